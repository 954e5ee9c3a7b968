"""``--rdzv-backend=flash`` and ``flash-etcd`` under plain torchrun, and what they are made of."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from torch.distributed import DistStoreError, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from flashrun.rendezvous.handlers import create_flash_etcd, state_from_json, state_to_json
from flashrun.rendezvous.kv_store import KeyValueStore
from tests import etcd, helpers
from tests.stores import Backend

SCRIPT = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(value)
print("sum", int(value), "of", dist.get_world_size(), os.environ["TORCHELASTIC_RUN_ID"])
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[etcd.Cluster]:
    etcd.need()
    with etcd.Cluster(tmp_path / "etcd") as found:
        yield found


def run_two(
    tmp_path: Path, flags: list[str], launcher: str, body: str = SCRIPT
) -> list[helpers.Finished]:
    """Two agents of one job with a worker each."""
    script = tmp_path / "script.py"
    script.write_text(body)
    command = [*helpers.launcher(launcher), "--nnodes=2", "--nproc-per-node=1", *flags]
    command.append(str(script))
    env = helpers.clean_environment({"ETCD_PASSWORD": "unused"})
    with ExitStack() as stack:
        both = [stack.enter_context(helpers.start(command, env=env)) for _ in range(2)]
        return [one.wait(90) for one in both]


@pytest.mark.parametrize(
    ("launcher", "backend"),
    [
        ("torchrun", "flash-etcd"),
        ("flashrun", "flash-etcd"),
        pytest.param("torchrun", "flash", marks=pytest.mark.slow),
        pytest.param("flashrun", "flash", marks=pytest.mark.slow),
    ],
)
def test_two_nodes_meet(
    launcher: str, backend: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if backend == "flash-etcd":
        where = request.getfixturevalue("cluster").config().endpoints[0]
    else:
        where = f"127.0.0.1:{helpers.free_port()}"
    run_id = f"job-{uuid.uuid4().hex[:6]}"
    flags = [f"--rdzv-backend={backend}", f"--rdzv-endpoint={where}", f"--rdzv-id={run_id}"]
    flags += ["--local-addr=127.0.0.1", "--rdzv-conf=last_call_timeout=1"]
    flags += [f"--log-dir={tmp_path}/logs"]
    for finished in run_two(tmp_path, flags, launcher):
        assert finished.status == 0, finished.describe()
        assert f"sum 3 of 2 {run_id}" in finished.stdout, finished.describe()


@pytest.mark.slow  # as long as it takes with c10d
def test_a_worker_fails_under_torchrun(tmp_path: Path, cluster: etcd.Cluster) -> None:
    """The nodes meet again, and their workers as well."""
    first = 'os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"'
    fails = f"if {first} and dist.get_rank() == 1: os._exit(3)"
    flags = ["--rdzv-backend=flash-etcd", f"--rdzv-endpoint={cluster.config().endpoints[0]}",
             "--rdzv-id=again", "--local-addr=127.0.0.1", "--rdzv-conf=last_call_timeout=1",
             "--max-restarts=3", f"--log-dir={tmp_path}/logs"]  # fmt: skip
    script = SCRIPT.replace("dist.all_reduce(value)", f"dist.all_reduce(value)\n{fails}")
    found = run_two(tmp_path, flags, "torchrun", script)
    for finished in found:
        assert finished.status == 0, finished.describe()
        assert finished.stdout.splitlines()[-1] == "sum 3 of 2 again", finished.describe()
    assert any("exitcode: 3" in finished.stderr for finished in found)


# --- parts ------------------------------------------------------------------------------------


def test_the_state_is_the_same_after_json() -> None:
    state = _RendezvousState()
    nodes = [_NodeDesc("a", 1, 0), _NodeDesc("::1", 2, 3), _NodeDesc("ü", 4, 0)]
    now = datetime.now(timezone.utc)
    state.round, state.complete, state.deadline = 3, True, now
    state.participants = {nodes[0]: 1, nodes[1]: 0}
    state.wait_list, state.redundancy_list = {nodes[2]}, {nodes[1]}
    state.last_heartbeats = {node: now - timedelta(seconds=i) for i, node in enumerate(nodes)}
    assert vars(state_from_json(state_to_json(state))) == vars(state)
    empty = _RendezvousState()
    assert vars(state_from_json(state_to_json(empty))) == vars(empty)
    assert state_to_json(empty) != state_to_json(empty)  # for compare-and-swap


@pytest.mark.parametrize("data", [b"\x80\x04N.", b"[]", b"{}", b'{"round": "x"}'])
def test_what_is_no_state_is_said_and_never_unpickled(data: bytes) -> None:
    with pytest.raises(RendezvousStateError, match="an id of its own"):
        state_from_json(data)


def test_a_torch_store_on_etcd_behaves_as_torchs(cluster: etcd.Cluster) -> None:
    spec = {"kind": "etcd", "prefix": "/s/", "endpoints": list(cluster.config().endpoints)}
    with closing(Backend(spec)) as backend:
        kv = backend.open()
        # torch's C++ does not keep the Python half of what it is given.
        bare = [KeyValueStore(kv, "store/"), KeyValueStore(backend.open(), "store/")]
        store, other = (PrefixStore("p", one) for one in bare)
        store.set("text", "1")
        store.set("empty", "")
        assert other.get("text") == b"1" and other.get("empty") == b""
        assert [store.add("n", 2), other.add("n", 3)] == [2, 5]
        assert store.compare_set("c", "", "one") == b"one"
        assert store.compare_set("c", "wrong", "two") == b"one"
        assert store.compare_set("c", "one", "two") == b"two"
        assert store.compare_set("absent", "wanted", "x") == b"wanted"
        assert store.check(["text", "n"]) and not store.check(["text", "absent"])
        assert store.multi_get(["text", "n"]) == [b"1", b"5"]
        assert KeyValueStore(kv, "store/p/").num_keys() == 4
        assert KeyValueStore(kv, "store/p/").delete_key("c")
        assert not store.check(["c"])
        with pytest.raises(DistStoreError, match=r"wait timeout after 100ms.*keys: p/later"):
            store.wait(["later", "text"], timedelta(milliseconds=100))
        waited: list[bytes] = []
        thread = threading.Thread(target=lambda: waited.append(other.get("later")))
        thread.start()
        store.set("later", b"\xff\x00")
        thread.join()
        assert waited == [b"\xff\x00"]


def params_of(cluster: etcd.Cluster, run_id: str) -> RendezvousParameters:
    return RendezvousParameters(
        "flash-etcd", cluster.config().endpoints[0], run_id, 1, 1, "127.0.0.1",
        last_call_timeout=1,
    )  # fmt: skip


def test_a_run_id_can_be_used_again(cluster: etcd.Cluster) -> None:
    """etcd still has the closed rendezvous of the job before."""
    for _ in range(2):
        handler = create_flash_etcd(params_of(cluster, "again"))
        assert handler.get_backend() == "flash-etcd"
        info = handler.next_rendezvous()
        assert (info.rank, info.world_size) == (0, 1)
        info.store.set("left over", b"1")
        assert not handler.is_closed()
        assert handler.shutdown()


def test_a_job_that_is_just_ending_is_waited_for(cluster: etcd.Cluster) -> None:
    first = create_flash_etcd(params_of(cluster, "ending"))
    first.next_rendezvous()
    first.set_closed()
    made: list[object] = []
    thread = threading.Thread(
        target=lambda: made.append(create_flash_etcd(params_of(cluster, "ending")))
    )
    thread.start()
    thread.join(0.5)
    assert not made
    begun = time.monotonic()
    first.shutdown()
    thread.join(20)
    assert made and time.monotonic() - begun < 20
    assert made[0].next_rendezvous().rank == 0  # type: ignore[attr-defined]
    assert made[0].shutdown()  # type: ignore[attr-defined]


def test_an_endpoint_where_nothing_is() -> None:
    etcd.need()
    where = f"127.0.0.1:{helpers.free_port()}"
    params = RendezvousParameters("flash-etcd", where, "j", 1, 1, read_timeout=1)
    with pytest.raises(RendezvousConnectionError, match="etcdctl endpoint health"):
        create_flash_etcd(params)
