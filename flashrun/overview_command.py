"""``flashrun status``, ``nodes``, ``cordon`` and ``uncordon``: a running job seen from outside."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from flashrun.errors import UsageError

if TYPE_CHECKING:
    from flashrun.control.overview import Overview
    from flashrun.rendezvous.kv import ControlStore, KeyValue

_PATIENCE_S = 5.0
_REFUSED_S = 0.5  # a job that is there has its store


def main(command: str, argv: Sequence[str]) -> int:
    """Carry it out.

    Returns:
        0; 1 if there is no such job or node, or nobody answers.

    Raises:
        UsageError: the endpoint can't be read.
    """
    # Before torch is loaded: it warns of addresses without a name, which don't matter here.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from flashrun.control.overview import node_lines, read_overview, status_lines
    from flashrun.rendezvous.endpoint import EndpointError
    from flashrun.rendezvous.kv import StoreLost, StoreRefused
    from flashrun.rendezvous.tcp_kv import NotAStore

    args = _parser(command).parse_intermixed_args(argv)
    try:
        with _job_store(args) as (kv, recovery):
            view = None if kv is None else read_overview(kv, recovery)
            if kv is None or view is None:
                raise LookupError(f"no flashrun job at {_named(args)}; it may have ended")
            if command in ("cordon", "uncordon"):
                print(_cordon(kv, view, args.node, args.reason if command == "cordon" else None))
                return 0
    except EndpointError as error:
        raise UsageError(str(error)) from None
    except (NotAStore, StoreLost, StoreRefused, LookupError) as error:
        print(f"flashrun: error: {error.args[0] if error.args else error}", file=sys.stderr)
        return 1
    lines = status_lines(view) if command == "status" else node_lines(view)
    print(view.to_json() if args.json else "\n".join(lines))
    return 0


def _parser(command: str) -> argparse.ArgumentParser:
    from flashrun.control.terms import SPARES

    what = {
        "status": "Shows a job",
        "nodes": "Shows the nodes of a job",
        "cordon": "Gives a node no ranks from the next round on",
        "uncordon": "Lets a node have ranks again",
    }
    parser = argparse.ArgumentParser(
        prog=f"flashrun {command}",
        description=f"{what[command]} (nodes meet by flash, c10d, static or flash-etcd).",
    )
    if command in ("cordon", "uncordon"):
        parser.add_argument("node", metavar="NODE",
                            help="address or number (spares: name), as `nodes` shows it; what is"
                            " cordoned is the address")  # fmt: skip
    else:
        parser.add_argument("--json", action="store_true", help="for programs; the same for both")
    if command == "cordon":
        parser.add_argument("--reason", default="by hand", help="shown with it")
    parser.add_argument("endpoint", nargs="?", metavar="HOST[:PORT]",
                        help="the job's --rdzv-endpoint (default: this machine)")  # fmt: skip
    parser.add_argument("--rdzv-endpoint", "--rdzv_endpoint", default="localhost",
                        help="the same as HOST[:PORT]")  # fmt: skip
    parser.add_argument("--rdzv-backend", "--rdzv_backend", default="flash",
                        choices=["static", *SPARES], help="the job's")  # fmt: skip
    for flag, text in (("id", "the job's, which etcd needs (default: none)"),
                       ("conf", "the job's, to get in to etcd")):  # fmt: skip
        parser.add_argument(f"--rdzv-{flag}", f"--rdzv_{flag}", default="", help=text)
    return parser


def _named(args: argparse.Namespace) -> str:
    from flashrun.control.terms import ETCD

    where = args.endpoint or args.rdzv_endpoint
    return f"{where} by the id '{args.rdzv_id or 'none'}'" if args.rdzv_backend == ETCD else where


def _cordon(kv: KeyValue, view: Overview, name: str, reason: str | None) -> str:
    """Cordon an address, which may be that of several nodes, or without a reason uncordon it; what
    to tell."""
    from flashrun.control.cordon import Cordon, CordonBook
    from flashrun.control.plan_book import PREFIX

    book = CordonBook(kv, PREFIX)
    known = [f"{n.name} ({n.addr})" if n.name else n.addr for n in view.nodes]
    addr = next((n.addr for n in view.nodes if name and name in (n.addr, n.name)), name)
    if addr not in {n.addr for n in view.nodes} and addr not in book.read():
        raise LookupError(f"job '{view.run_id}' has no node '{name}'; it has {', '.join(known)}")
    book.set(addr, None if reason is None else Cordon(reason, by_hand=True))
    strict = {where for where, cordon in book.read().items() if cordon.by_hand}
    return _told(view, addr, strict, cordoned=reason is not None)


def _told(view: Overview, addr: str, out: set[str], cordoned: bool) -> str:
    """What it means that an address is cordoned, or not any more.

    Args:
        out: what is cordoned by hand. (The others are taken where there are too few.)
    """
    from flashrun.control.overview import GONE

    here = [n for n in view.nodes if n.addr == addr and n.state not in GONE]
    names = ", ".join(n.name for n in here)
    who = f"{addr} (nodes {names})" if len(here) > 1 else addr
    if not cordoned:
        return f"{who} may have ranks again from the next round on"
    if view.policy == "static":
        return f"{who} keeps its ranks: with static node ranks nobody else can take its place"
    ranks = [str(rank) for n in here for rank in n.ranks]
    keeps = f"; it keeps ranks {', '.join(ranks)} until then" if ranks else ""
    left = [n for n in view.nodes if n.addr not in out and n.state not in GONE]
    few = ""
    if len(left) < view.min_nodes:
        few = (
            f"\nwarning: {len(left)} other node(s) are left, and job '{view.run_id}' needs"
            f" {view.min_nodes}: after the next restart it waits for more nodes, or for flashrun"
            f" uncordon {addr}"
        )
    return f"{who} gets no ranks from the next round on{keeps}{few}"


_Where = tuple["KeyValue | None", "Callable[[], ControlStore]"]


@contextmanager
def _job_store(args: argparse.Namespace) -> Iterator[_Where]:
    """The job's keys (None: there is no job), and what opens the store of its recovery."""
    from flashrun.control.terms import ETCD

    text = args.endpoint or args.rdzv_endpoint
    if args.rdzv_backend == ETCD:
        with _in_etcd(text, args.rdzv_id or "none", args.rdzv_conf) as where:
            yield where
        return
    from flashrun.rendezvous.embedded import connect_embedded
    from flashrun.rendezvous.endpoint import C10D_PORT, parse_endpoint, resolve
    from flashrun.rendezvous.tcp_kv import ConnectTimeout, connect

    endpoint = parse_endpoint(text, C10D_PORT)
    resolve(endpoint.host)  # a name that stands for nothing is not somebody who does not answer
    at = (endpoint.host, endpoint.port, _PATIENCE_S, _PATIENCE_S)
    try:
        kv = connect(*at, refused_s=_REFUSED_S)
    except ConnectTimeout:
        raise LookupError(
            f"nobody answers at {endpoint}: the job may have ended, its store with it; or this is"
            " not its --rdzv-endpoint, or a firewall is between"
        ) from None
    yield kv, partial(connect_embedded, *at)


@contextmanager
def _in_etcd(text: str, run_id: str, conf: str) -> Iterator[_Where]:
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    from flashrun.rendezvous.etcd_config import etcd_config, prefix_of

    values = {"read_timeout": _PATIENCE_S, **_parse_rendezvous_config(conf)}
    config = etcd_config(text, values, os.environ, prefix_of(run_id))
    from flashrun.rendezvous.etcd_job import current_job, open_folder
    from flashrun.rendezvous.etcd_store import EtcdStore

    with EtcdStore(config, _quiet) as base:
        name = current_job(base)
    again = partial(open_folder, config, name or "", _quiet)
    if name is None:
        yield None, again
        return
    with again() as store:
        yield store, again


def _quiet(line: str) -> None:
    """What a client says on the way; an error tells all of it."""
