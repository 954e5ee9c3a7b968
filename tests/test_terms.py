"""The terms of a job as read from torch's own parser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import config_from_args, get_args_parser

from flashrun.config import Settings
from flashrun.control.events import Membership, Node
from flashrun.control.terms import membership_of, node_of
from flashrun.rendezvous.endpoint import EndpointError


@pytest.fixture(autouse=True)
def _log_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes a temporary folder for logs otherwise, and leaves it."""
    monkeypatch.setenv("PET_LOG_DIR", str(tmp_path))


def terms(*flags: str) -> tuple[Membership, Node]:
    args = get_args_parser().parse_args([*flags, "train.py"])
    if args.master_port is None:
        args.master_port = 29500  # as torch's run() does
    launch, _, _ = config_from_args(args)
    return membership_of(launch, Settings()), node_of(launch, "id")


def test_static() -> None:
    membership, node = terms(
        "--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--nproc-per-node=4"
    )
    assert (membership.endpoint.host, membership.endpoint.port) == ("10.0.0.1", 29500)
    assert (membership.job.policy, membership.job.max_nodes) == ("static", 2)
    assert membership.job.use_agent_store
    assert membership.timing.join_timeout == 900
    assert (node.node_rank, node.slots) == (1, 4)


def test_c10d() -> None:
    membership, node = terms(
        "--nnodes=1:3",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=[::1]:1234",
        "--rdzv-id=mine",
        "--rdzv-conf=join_timeout=7,last_call_timeout=3,read_timeout=2,is_host=0",
        "--local-addr=fe80::1",
    )
    job, timing = membership.job, membership.timing
    assert (job.policy, job.min_nodes, job.max_nodes, job.run_id) == ("elastic", 1, 3, "mine")
    assert (timing.join_timeout, timing.last_call, timing.read_timeout) == (7, 3, 2)
    assert membership.is_host is False
    assert (membership.endpoint.host, membership.endpoint.text) == ("::1", "[::1]:1234")
    assert (node.node_rank, node.local_addr) == (None, "fe80::1")


def test_default_port_of_c10d() -> None:
    membership, _ = terms("--rdzv-backend=c10d", "--rdzv-endpoint=node0")
    assert membership.endpoint.port == 29400


def test_workers_store_is_not_shared_when_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    assert not terms("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")[0].job.use_agent_store
    assert terms("--master-port=1")[0].job.use_agent_store  # static: always, as torch


def test_file_store_and_other_backends() -> None:
    membership, _ = terms(
        "--rdzv-backend=c10d", "--rdzv-endpoint=/tmp/x", "--rdzv-conf=store_type=file"
    )
    assert (membership.store, membership.endpoint.text) == ("file", "/tmp/x")
    other, _ = terms("--rdzv-backend=mine", "--rdzv-endpoint=whatever://x")
    assert other.handler is not None
    assert other.handler.endpoint == "whatever://x"


@pytest.mark.parametrize(
    ("flags", "error", "says"),
    [
        (["--rdzv-backend=c10d", "--rdzv-endpoint=a:b"], EndpointError, "port"),
        (["--rdzv-backend=static", "--rdzv-endpoint=host"], EndpointError, "--master-port"),
        (["--rdzv-backend=c10d", "--rdzv-conf=store_type=x"], ValueError, "store_type"),
        (["--rdzv-backend=c10d", "--rdzv-conf=store_type=file"], EndpointError, "PATH"),
        (["--rdzv-backend=c10d", "--rdzv-conf=join_timeout=0"], ValueError, "join_timeout"),
        (["--rdzv-backend=c10d", "--rdzv-conf=is_host=maybe"], ValueError, "is_host"),
        (["--rdzv-backend=c10d", "--rdzv-conf=read_timeout=x"], ValueError, "read_timeout"),
    ],
)
def test_bad_configuration_is_said(flags: list[str], error: type[Any], says: str) -> None:
    with pytest.raises(error, match=says):
        terms(*flags)
