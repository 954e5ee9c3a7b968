"""Several agents on one host, and what one node's store shows to the outside."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests import helpers, jobs

BACKENDS = ["static", "c10d"]


def _flags(backend: str, node: int, port: int) -> list[str]:
    if backend == "static":
        where = [f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    else:
        where = [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{port}",
            "--rdzv-id=j",
            f"--rdzv-conf=is_host={int(node == 0)}",
        ]
    return ["--nnodes=2", *where]


@contextmanager
def _two(
    folder: Path,
    backend: str,
    body: str,
    *flags: str,
    fifos: tuple[str, ...] = (),
    script: Path | None = None,
    each: Callable[[int], Sequence[str]] = lambda node: (),
) -> Iterator[tuple[jobs.Job, jobs.Job]]:
    """A job of two nodes; node 0 hosts the store.

    Args:
        each: flags of one node.
    """
    port = helpers.free_port()
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                jobs.job(
                    folder,
                    body,
                    *_flags(backend, node, port),
                    *flags,
                    *each(node),
                    fifos=fifos,
                    script=script,
                    name=f"n{node}",
                    env={"NODE": str(node)},
                )
            )
            for node in (0, 1)
        ]
        yield nodes[0], nodes[1]


_ONE_IS_LATE = """
    NODE = int(os.environ["NODE"])
    tell("ready")
    if NODE == 1:
        await_release("go")
        code = int(open(os.path.join(os.environ["FRTEST_FOLDER"], "code")).read())
        os._exit(code)
"""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("code", [0, 3], ids=["succeeds", "fails"])
def test_job_ends_when_one_node_finished_before_the_other(
    tmp_path: Path, backend: str, code: int
) -> None:
    """The node that hosts the store is first; there is no barrier to sit out at the end."""
    with _two(tmp_path, backend, _ONE_IS_LATE, fifos=("go",)) as (first, late):
        (ready,) = first.await_told("ready")
        late.await_told("ready")
        first.await_gone([ready["pid"]])
        (late.folder / "code").write_text(str(code))
        late.release("go")
        assert late.ended() == (1 if code else 0), late.describe()
        assert first.ended() == (1 if code else 0), first.describe()
        if code:  # told on both, by the one that failed
            assert "exitcode  : 3" in first.err
            assert "exitcode  : 3" in late.err


@pytest.mark.parametrize("backend", BACKENDS)
def test_node_that_waits_for_the_others_to_finish_obeys_signals(
    tmp_path: Path, backend: str
) -> None:
    with _two(tmp_path, backend, _ONE_IS_LATE, fifos=("go",)) as (first, late):
        (ready,) = first.await_told("ready")
        late.await_told("ready")
        first.await_gone([ready["pid"]])
        first.signal(signal.SIGTERM)
        assert first.ended() == 1, first.describe()
        assert late.ended() == 1, late.describe()  # its store is gone, or it was told


def test_node_ranks_that_all_give_are_honoured(tmp_path: Path) -> None:
    """Also where the node that hosts the store is not the first; torch's word that they are
    ignored is not said."""
    body = """
        tell("ran", node=os.environ["NODE"], group_rank=os.environ["GROUP_RANK"],
             addr=os.environ["MASTER_ADDR"])
    """
    with _two(tmp_path, "c10d", body, each=lambda node: [f"--node-rank={1 - node}"]) as nodes:
        for node in nodes:
            assert node.ended() == 0, node.describe()
            assert "node_rank" not in node.err
        told = [e for node in nodes for e in node.told("ran")]
        assert [(e["node"], e["group_rank"], e["rank"]) for e in told] == [
            ("0", "1", 1), ("1", "0", 0)]  # fmt: skip
        assert {e["addr"] for e in told} == {"127.0.0.1"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_restarts_are_counted_once_for_the_whole_job(tmp_path: Path, backend: str) -> None:
    """Each node's own failures would be within the limit; the job's are not."""
    body = """
        NODE = int(os.environ["NODE"])
        tell("ran", limit=os.environ["TORCHELASTIC_MAX_RESTARTS"])
        if NODE == ATTEMPT % 2:
            await_release(f"go{ATTEMPT}")
            os._exit(10 + ATTEMPT)
        forever()
    """
    fifos = ("go0", "go1", "go2")
    with _two(tmp_path, backend, body, "--max-restarts=2", fifos=fifos) as nodes:
        for attempt in range(3):
            for node in nodes:
                node.await_told("ran", attempt=attempt)
            nodes[attempt % 2].release(f"go{attempt}")
        for node in nodes:
            assert node.ended() == 1, node.describe()
            assert [(e["attempt"], e["limit"]) for e in node.told("ran")] == [
                (0, "2"), (1, "2"), (2, "2")]  # fmt: skip
            assert "exitcode  : 12" in node.err


def test_the_same_error_on_every_node_is_not_tried_again(tmp_path: Path) -> None:
    body = """
        tell("ran")
        import not_there
    """
    script = jobs.write_script(tmp_path, body)
    with _two(tmp_path, "c10d", "", "--max-restarts=3", script=script) as nodes:
        for node in nodes:
            assert node.ended() == 1, node.describe()
            assert {e["attempt"] for e in node.told("ran")} == {0}, node.describe()
        assert "another attempt would fail the same way" in nodes[0].err + nodes[1].err


def test_agents_of_both_nodes_may_die(tmp_path: Path) -> None:
    body = """
        tell("ready")
        if ATTEMPT == 0:
            await_release("go")
            os._exit(1 if RANK == 1 else 0)
    """
    with _two(tmp_path, "c10d", body, "--max-restarts=1", fifos=("go",)) as nodes:
        for node in nodes:
            node.await_told("ready")
        for node in nodes:
            node.kill_helper("agent")
        for node in nodes:
            node.release("go")
        for node in nodes:
            assert node.ended() == 0, node.describe()
            assert [e["attempt"] for e in node.told("ready")] == [0, 1]


# -- endpoints -------------------------------------------------------------------------------------


def test_second_job_at_an_endpoint_is_refused_with_the_id_of_the_first(tmp_path: Path) -> None:
    port = helpers.free_port()
    place = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}")
    with jobs.job(tmp_path, 'tell("ready"); forever()\n', *place, "--rdzv-id=first") as job:
        job.await_told("ready")
        with jobs.job(tmp_path, 'tell("ran")\n', *place, "--rdzv-id=second", name="k") as other:
            assert other.ended() == 1, other.describe()
            assert not other.told("ran")
            assert "'first'" in other.err
            assert f"127.0.0.1:{port}" in other.err


@pytest.mark.parametrize("backend", BACKENDS)
def test_port_in_use_names_the_owner(tmp_path: Path, backend: str) -> None:
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", 0))
        mine.listen()
        port = mine.getsockname()[1]
        if backend == "static":
            place = ["--master-addr=127.0.0.1", f"--master-port={port}"]
        else:
            place = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
        with jobs.job(tmp_path, 'tell("ran")\n', *place) as job:
            assert job.ended() == 1, job.describe()
            assert not job.told("ran")
            assert f"Port {port} on 127.0.0.1 is already in use by process {os.getpid()}" in job.err


_MEET = """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    tell("met", addr=os.environ["MASTER_ADDR"], port=os.environ["MASTER_PORT"])
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("text", ["[::1]:{port}", "[::1]", "::1", "localhost:{port}"])
def test_ipv6_with_and_without_brackets(tmp_path: Path, text: str, has_ipv6: bool) -> None:
    if not has_ipv6:
        pytest.skip("no IPv6 loopback here")
    endpoint = text.format(port=helpers.free_port())
    place = ("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--nproc-per-node=2")
    if "port" not in text:
        with socket.socket(socket.AF_INET6) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not TIME_WAIT
            try:
                probe.bind(("::1", 29400))
            except OSError:
                pytest.skip("the default port 29400 is in use")
    with jobs.job(tmp_path, _MEET, *place, forked=True) as job:
        assert job.ended() == 0, job.describe()
        assert len(job.told("met")) == 2
        expected = "localhost" if "localhost" in text else "::1"
        assert {e["addr"] for e in job.told("met")} == {expected}


def test_static_ipv6(tmp_path: Path, has_ipv6: bool) -> None:
    if not has_ipv6:
        pytest.skip("no IPv6 loopback here")
    place = ("--master-addr=::1", f"--master-port={helpers.free_port()}", "--nproc-per-node=2")
    with jobs.job(tmp_path, _MEET, *place, forked=True) as job:
        assert job.ended() == 0, job.describe()
        assert len(job.told("met")) == 2


@pytest.mark.parametrize("place", [(), ("--standalone",), ("--master-port={port}",)])
def test_one_node_looks_up_no_name_and_listens_on_loopback(
    tmp_path: Path, place: tuple[str, ...]
) -> None:
    """A look-up of anything but localhost ends the process that asks, whoever it is."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os, socket\n"
        "def guard(name):\n"
        "    real = getattr(socket, name)\n"
        "    def ask(host='', *args, **options):\n"
        "        text = host.decode() if isinstance(host, bytes) else host\n"
        "        numeric = text is None or text == 'localhost' or text[:1].isdigit()\n"
        "        if not numeric and ':' not in text:\n"
        "            with open(os.environ['LOOKED_UP'], 'a') as file:\n"
        "                file.write(f'{name} {text!r}\\n')\n"
        "            os._exit(86)\n"
        "        return real(host, *args, **options)\n"
        "    setattr(socket, name, ask)\n"
        "names = 'getaddrinfo gethostbyname gethostbyname_ex getfqdn gethostbyaddr'\n"
        "for name in names.split():\n"
        "    guard(name)\n"
    )
    looked_up = tmp_path / "looked_up"
    env = {"PYTHONPATH": str(tmp_path / "site"), "LOOKED_UP": str(looked_up)}
    flags = [flag.format(port=helpers.free_port()) for flag in place]
    body = """
        tell("ready")
        await_release("go")
        sys.exit(5)
    """
    with jobs.job(tmp_path, body, *flags, env=env, fifos=["go"]) as job:
        job.await_told("ready")
        listening = [
            connection.laddr.ip
            for row in job.rows()
            for connection in psutil.Process(row.pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert listening
        assert set(listening) <= {"127.0.0.1", "::1"}
        job.release("go")
        assert job.ended() == 1, job.describe()  # the report of a failure asks for no name either
        assert "exitcode  : 5" in job.err
        assert not looked_up.exists(), looked_up.read_text()
