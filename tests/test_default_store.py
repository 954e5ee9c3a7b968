"""A job over etcd outlives the node of rank 0: the survivors keep their processes, the weights are
bit for bit those of an undisturbed run, and what the ranks have written into the default store is
there, or the line that restarts all names the key. The store itself is as torch's."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import etcd, helpers
from tests.homes import table_of
from tests.jobs import Job
from tests.test_recovery import TRAIN
from tests.test_recovery_etcd import cluster, where
from tests.test_recovery_nodes import FOREVER, Nodes, Start, results, start, undisturbed

__all__ = ["cluster", "start", "undisturbed"]  # fixtures

# Ranks 0 and 3 write; all add; a group is made after the loss, and all look at what there is.
KEYS = TRAIN.replace(
    'dist.init_process_group("gloo")',
    'dist.init_process_group("gloo")\n'
    "store = dist.distributed_c10d._get_default_store()\n"
    "if RANK in (0, 3): store.set(f'of{RANK}', f'value {RANK}')\n"
    "tickets = [store.add('tickets', 1)]\n"
    "store.wait(['of0', 'of3'])\n"
    "winner = store.compare_set('winner', '', str(RANK))\n"
    "if winner == str(RANK).encode(): store.append('log', 'begun')\n"
    "SCENE",
).replace(
    'tell("step", step=step)',
    'tell("step", step=step)\n'
    "        if step in (40, 70):\n"
    "            group = dist.new_group([0, 1, 2, 3])\n"
    "            dist.barrier(group)\n"
    "            dist.monitored_barrier(group)\n"
    "            tickets.append(store.add('tickets', 1))\n"
    "            store.set(f'last{RANK}', str(step))\n"
    "            told = [None] * 4\n"
    "            dist.all_gather_object(told, tickets[-1])\n"
    "            if ATTEMPT == 0: tell('keys', step=step, all=sorted(told),\n"
    "                of0=store.get('of0').decode(), of3=store.get('of3').decode(),\n"
    "                winner=store.get('winner') == winner,\n"
    "                last=store.get(f'last{RANK}').decode(),\n"
    "                there=store.check(['of0', 'of3', 'log']), gone=store.check(['nothing']))\n"
    "        if step == 20 and RANK == 3 and ATTEMPT == 0: await_release('go')",
)


def lose(nodes: Nodes) -> tuple[Job, list[Job]]:
    lost = nodes.of(0)
    lost.process.kill()
    lost.process.wait()
    return lost, [node for node in nodes.jobs if node is not lost]


def ended(nodes: Nodes, left: Sequence[Job]) -> None:
    for node in left:
        node.wait(60)
        assert node.ended() == 0, nodes.describe()


def test_the_node_of_rank_0(
    start: Start, undisturbed: Any, cluster: etcd.Cluster
) -> None:
    body = KEYS.replace("SCENE", "")
    options = {"body": body, "fifos": ("go",), "spares": 1, **where(cluster)}
    with start(2, *FOREVER, **options) as nodes:
        nodes.await_step(20, 3)
        (_spare,) = nodes.await_spares()
        nodes.await_copied(20, 0, 1)
        _, left = lose(nodes)
        nodes.of(3).release("go")
        ended(nodes, left)
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    assert nodes.processes() == {0: 2, 1: 2, 2: 1, 3: 1}, "survivors keep their processes"
    assert "the default store's keys that were lost with node 0 are at" in nodes.describe()
    for node in left:
        for step, first in ((40, 5), (70, 9)):
            for told in node.told("keys", step=step):
                assert told["all"] == list(range(first, first + 4)), nodes.describe()
                assert (told["of0"], told["of3"]) == ("value 0", "value 3")
                assert told["winner"] and told["there"] and not told["gone"]
                assert told["last"] == str(step)
            assert len(node.told("keys", step=step)) == 2, nodes.describe()


def homed(place: int, nodes: int, name: str = "key") -> str:
    """A name for a script's key, of that home."""
    table = table_of(range(1, nodes + 1))
    names = (f"{name}{i}" for i in itertools.count())
    return next(n for n in names if table.home(f"default_pg/0//{n}") == place)


@pytest.mark.slow
@pytest.mark.parametrize("home", [0, 1])
def test_a_key_of_several_writers(
    start: Start, undisturbed: Any, cluster: etcd.Cluster, home: int
) -> None:
    """It restarts all if it was on the node that is lost; elsewhere it was never away."""
    name = homed(home, 2)
    scene = f"store.append({name!r}, f'{{RANK}} ')"
    body = KEYS.replace("SCENE", scene).replace(
        'tell("saved")', f'tell("saved", key=sorted(store.get({name!r}).decode().split()))'
    )
    options = {"body": body, "fifos": ("go",), "spares": 1, **where(cluster)}
    with start(2, "--max-restarts=1", *FOREVER, **options) as nodes:
        nodes.await_step(20, 3)
        (_spare,) = nodes.await_spares()
        nodes.await_copied(20, 0, 1)
        _, left = lose(nodes)
        nodes.of(3).release("go")
        ended(nodes, left)
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    words = f"have written the default store's key 'default_pg/0//{name}' in an order that was lost"
    assert (words in nodes.describe()) is (home == 0), nodes.describe()
    assert ("let one rank alone write a key" in nodes.describe()) is (home == 0)
    told = [t["key"] for node in left for t in node.told("saved")]
    assert told == [["0", "1", "2", "3"]] * 4, nodes.describe()
    if home == 1:
        assert nodes.processes() == {0: 2, 1: 2, 2: 1, 3: 1}, "survivors keep their processes"


# Each rank has keys of its own at all homes; all count at each, and elect somebody at each.
EVERYWHERE = TRAIN.replace(
    'dist.init_process_group("gloo")',
    'dist.init_process_group("gloo")\n'
    "store, some = dist.distributed_c10d._get_default_store(), range(20)\n"
    "def work(step):\n"
    "    for i in some: store.add(f'n{i}', i); store.set(f'of{RANK}.{i}', f'{RANK} {step}')\n"
    "    store.multi_set([f'm{RANK}.{i}' for i in some], [f'{step}'] * 20)\n"
    "    won = [store.compare_set(f'won{step}.{i}', '', str(RANK)).decode() for i in some]\n"
    "    dist.barrier()\n"
    "    one = (RANK + 1) % dist.get_world_size()\n"
    "    store.wait([f'of{one}.{i}' for i in some])\n"
    "    return [store.multi_get([f'{name}{i}' for i in some]) for name in\n"
    "        ('n', f'of{one}.', f'm{one}.', f'won{step}.')], won, store.num_keys()\n"
    "before = work(0)",
).replace(
    'tell("step", step=step)',
    'tell("step", step=step)\n'
    "        if step == 20 and RANK == 3 and ATTEMPT == 0: await_release('go')\n"
    "        if step == 40:\n"
    "            again, after = store.multi_get([f'won0.{i}' for i in some]), work(step)\n"
    "            tell('after', same=again == before[0][3], won=after[0][3] ==\n"
    "                [w.encode() for w in after[1]], keys=after[2],\n"
    "                n=[int(n) for n in after[0][0]], own={v.decode() for v in after[0][1]} ==\n"
    "                {f'{(RANK + 1) % dist.get_world_size()} {step}'}, many=set(after[0][2]) ==\n"
    "                {b'40'}, places={after[1][i] for i in some} <= set('01234567'))",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "lost"), [(3, (0,)), (3, (1,)), (3, (2,)), (4, (0, 2)), (4, (1, 3))]
)
def test_each_node_in_turn_and_two_at_once(
    start: Start, undisturbed: Any, cluster: etcd.Cluster, count: int, lost: Sequence[int]
) -> None:
    ranks = 2 * count
    replaced = {2 * place + i for place in lost for i in (0, 1)}
    stays = min({*range(ranks)} - replaced)
    body = EVERYWHERE.replace("RANK == 3", f"RANK == {stays}")
    options = {"body": body, "fifos": ("go",), "spares": len(lost), **where(cluster)}
    with start(count, *FOREVER, **options) as nodes:
        for rank in range(ranks):
            nodes.await_step(20, rank)
        nodes.await_spares()
        gone = [nodes.of(2 * place) for place in lost]
        nodes.await_copied(20, *replaced)
        for node in gone:
            node.process.kill()
        for node in gone:
            node.process.wait()
        left = [node for node in nodes.jobs if node not in gone]
        nodes.of(stays).release("go")
        ended(nodes, left)
    assert results(nodes.out, ranks) == undisturbed(ranks), nodes.describe()
    expected = {rank: 2 if rank in replaced else 1 for rank in range(ranks)}
    assert nodes.processes() == expected, "survivors keep their processes"
    told = [t for node in left for t in node.told("after")]
    assert len(told) == ranks, nodes.describe()
    keys = 1 + 20 + 20 * ranks * 2 + 40  # torch's own, the counters, each rank's, the elections
    for one in told:
        assert one["n"] == [2 * ranks * i for i in range(20)], nodes.describe()
        assert one["keys"] == keys, nodes.describe()
        for what in ("same", "won", "own", "many", "places"):
            assert one[what], (what, nodes.describe())
    for place in lost:
        assert f"that were lost with node {place} are at" in nodes.describe(), nodes.describe()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_at_any_moment(
    start: Start, undisturbed: Any, cluster: etcd.Cluster, seed: int
) -> None:
    """Three nodes; then the second host is lost as well."""
    draw = random.Random(seed)
    steps = draw.randrange(6, 38), draw.randrange(46, 68)
    pause = draw.random() * 0.05
    print(f"seed {seed}: lost after steps {steps} and {pause:.3f} s")
    body = KEYS.replace("SCENE", "").replace("[None] * 4", "[None] * 6")
    body = body.replace("[0, 1, 2, 3]", "[0, 1, 2, 3, 4, 5]").replace("step == 20", "step < 0")
    with start(3, *FOREVER, body=body, spares=2, **where(cluster)) as nodes:
        lost: list[Job] = []
        for rank, step in zip((0, 2), steps, strict=True):
            nodes.await_step(step, rank)
            time.sleep(pause)  # anywhere in a step
            last = next(j for j in nodes.jobs if j not in lost and j.told("step", rank=rank))
            last.process.kill()
            last.process.wait()
            lost.append(last)
        left = [node for node in nodes.jobs if node not in lost]
        ended(nodes, left)
    assert results(nodes.out, 6) == undisturbed(6), nodes.describe()
    assert nodes.processes() == {0: 2, 1: 2, 2: 2, 3: 2, 4: 1, 5: 1}, nodes.describe()
    told = [t for node in left for t in node.told("keys", step=70)]
    assert len(told) == 6
    for one in told:
        assert one["all"] == list(range(13, 19)) and one["last"] == "70", nodes.describe()
        assert (one["of0"], one["of3"]) == ("value 0", "value 3") and one["winner"]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_the_server_alone_is_lost(
    start: Start, undisturbed: Any, cluster: etcd.Cluster, rank: int
) -> None:
    """The process that has a node's part of the default store; the others use it all the time. Its
    node ends with it, and a spare takes that one's place."""
    body = EVERYWHERE.replace("RANK == 3", f"RANK == {3 - rank}")
    options = {"body": body, "fifos": ("go",), "spares": 1, **where(cluster)}
    with start(2, *FOREVER, **options) as nodes:
        for other in range(4):
            nodes.await_step(20, other)
        nodes.await_spares()
        nodes.await_copied(20, 0, 1, 2, 3)
        gone = nodes.of(rank)
        left = [node for node in nodes.jobs if node is not gone]
        os.kill(gone.helper("store"), signal.SIGKILL)
        gone.wait(60)
        nodes.of(3 - rank).release("go")
        ended(nodes, left)
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    replaced = {0, 1} if rank == 0 else {2, 3}
    assert nodes.processes() == {r: 2 if r in replaced else 1 for r in range(4)}
    assert "the store host (pid " in gone.err and "so this node ends" in gone.err
    told = [t for node in left for t in node.told("after")]
    assert len(told) == 4 and all(one["own"] and one["same"] for one in told), nodes.describe()


COUNTING = TRAIN.replace(
    'dist.init_process_group("gloo")',
    'dist.init_process_group("gloo")\n'
    "store = dist.distributed_c10d._get_default_store()",
).replace(
    'tell("step", step=step)',
    'store.add("steps", 1)\n'
    '        store.append(f"log{RANK}", f"{step} ")\n'
    '        tell("step", step=step)\n'
    "        if step in (20, 40, 60) and RANK == 3 and ATTEMPT == 0: await_release(f'go{step}')",
).replace(
    'tell("saved")',
    'dist.barrier()\n'
    'tell("saved", steps=int(store.get("steps")), log=store.get(f"log{RANK}").decode())',
)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["worker", "node"])
def test_what_a_lost_worker_has_counted_is_counted_once(
    start: Start, undisturbed: Any, cluster: etcd.Cluster, which: str
) -> None:
    """It is lost after it has counted, in the middle of an interval: the store has that already."""
    options = {"body": COUNTING, "fifos": ("go20", "go40", "go60"), "spares": 1, **where(cluster)}
    with start(2, *FOREVER, **options) as nodes:
        nodes.await_step(20, 3)
        first = nodes.of(3)
        lost: list[Job] = []
        if which == "worker":
            nodes.kill(3)
            nodes.of(0).await_output("done in", "err")
        first.release("go20")
        nodes.await_step(40, 3)
        if which == "node":
            (_spare,) = nodes.await_spares()
            gone, _ = lose(nodes)
            lost.append(gone)
        first.release("go40")
        nodes.await_step(60, 3)
        nodes.await_step(60, 2)
        nodes.kill(2)  # (a replay of rank 3 would wait again)
        first.await_output("rank 2 lost", "err")
        first.release("go60")
        ended(nodes, [node for node in nodes.jobs if node not in lost])
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    for told in [t for node in nodes.jobs for t in node.told("saved")]:
        assert told["steps"] == 4 * 90, nodes.describe()
        assert told["log"].split() == [str(step) for step in range(1, 91)]


OWN_STORE = TRAIN.replace(
    'tell("step", step=step)',
    'tell("step", step=step)\n'
    "        if step == 30:\n"
    "            where = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])\n"
    "            try: dist.TCPStore(*where, is_master=False); tell('own', error='')\n"
    "            except RuntimeError as error: tell('own', error=str(error))\n"
    "        if step == 20 and RANK == 3 and ATTEMPT == 0: await_release('go')",
)


@pytest.mark.slow
def test_a_store_of_the_scripts_own_is_refused_at_once(
    start: Start, undisturbed: Any, cluster: etcd.Cluster
) -> None:
    options = {"body": OWN_STORE, "fifos": ("go",), "spares": 1, **where(cluster)}
    with start(2, *FOREVER, **options) as nodes:
        nodes.await_step(20, 3)
        (_spare,) = nodes.await_spares()
        _, left = lose(nodes)
        nodes.of(3).release("go")
        ended(nodes, left)
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    told = [t["error"] for node in left for t in node.told("own")]
    assert len(told) == 4 and all("the default store" in error for error in told), told


LATE = TRAIN.replace(
    'dist.init_process_group("gloo")',
    'dist.init_process_group("gloo")\n'
    "store = dist.distributed_c10d._get_default_store()",
).replace(
    'tell("step", step=step)',
    'tell("step", step=step)\n'
    "        if step == 30:\n"
    "            tell('asks')\n"
    "            if RANK == 0 and ATTEMPT == 0: await_release('go')\n"
    "            if RANK == 0: store.set('LATE', 'here')\n"
    "            if RANK == 3: store.add('n', 1)\n"
    "            tell('late', value=store.get('LATE').decode())",
)


@pytest.mark.slow
@pytest.mark.parametrize("home", [0, 1])
def test_survivors_that_wait_for_a_key_of_the_lost_node(
    start: Start, undisturbed: Any, cluster: etcd.Cluster, home: int
) -> None:
    """They hold in the store as they would in a collective, and find out in any case. But what the
    lost worker did there last is known only where nothing of it can be left."""
    name = homed(home, 2, "late")
    options = {"body": LATE.replace("LATE", name), "fifos": ("go",), "spares": 1, **where(cluster)}
    with start(2, "--max-restarts=1", *FOREVER, **options) as nodes:
        for rank in range(4):
            nodes.await_step(30, rank)
        (spare,) = nodes.await_spares()
        nodes.of(3).await_told("asks", 2)
        _, left = lose(nodes)
        spare.release("go")
        ended(nodes, left)
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    words = f"lost worker has done the default store's set of 'default_pg/0//{name}' is not known"
    assert (words in nodes.describe()) is (home == 1), nodes.describe()
    told = [t["value"] for node in left for t in node.told("late")]
    assert told == ["here"] * 4, nodes.describe()
    if home == 0:
        assert nodes.processes() == {0: 2, 1: 2, 2: 1, 3: 1}, "survivors keep their processes"


IN_DOUBT = TRAIN.replace(
    'tell("step", step=step)',
    'tell("step", step=step, port=int(os.environ["MASTER_PORT"]))\n'
    "        if step == 20 and RANK == 3 and ATTEMPT == 0:\n"
    "            await_release('go')\n"
    f"            dist.distributed_c10d._get_default_store().add('{homed(0, 2)}', 1)",
)


def unread(port: int) -> bool:
    """Whether a server on this machine has a request that it has not read."""
    rows = [line.split() for name in ("tcp", "tcp6")
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]  # fmt: skip
    ours = [row for row in rows if int(row[1].rpartition(":")[2], 16) == port and row[3] == "01"]
    return any(int(row[4].partition(":")[2], 16) for row in ours)


@pytest.mark.slow
def test_a_worker_is_lost_while_it_counts(
    start: Start, undisturbed: Any, cluster: etcd.Cluster
) -> None:
    """The server stands still meanwhile, so nobody knows whether it will have counted."""
    options = {"body": IN_DOUBT, "fifos": ("go",), **where(cluster)}
    with start(2, "--max-restarts=1", *FOREVER, **options) as nodes:
        nodes.await_step(20, 3)
        host = nodes.of(0).helper("store")
        port = nodes.of(0).told("step")[-1]["port"]
        helpers.freeze(host)
        nodes.of(3).release("go")
        helpers.wait_until(lambda: unread(port), "a request that is not read", 60)
        nodes.kill(3)
        nodes.of(3).await_output("rank 3 lost", "err")
        os.kill(host, signal.SIGCONT)
        nodes.of(3).release("go")
        nodes.ended()
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    words = f"lost worker has done the default store's add of 'default_pg/0//{homed(0, 2)}' is not"
    assert words in nodes.describe(), nodes.describe()


ON_A_THREAD = TRAIN.replace(
    'tell("step", step=step)',
    'tell("step", step=step)\n'
    "        if step == 5 and RANK == 0:\n"
    "            store = dist.distributed_c10d._get_default_store()\n"
    "            thread = threading.Thread(target=store.set, args=('key', '1'))\n"
    "            thread.start()\n"
    "            thread.join()",
)


@pytest.mark.slow
def test_what_another_thread_writes_makes_the_job_restart_only(
    start: Start, undisturbed: Any, cluster: etcd.Cluster
) -> None:
    with start(2, "--max-restarts=1", *FOREVER, body=ON_A_THREAD, **where(cluster)) as nodes:
        nodes.await_step(20, 3)
        nodes.of(0).await_output("set of 'default_pg/0//key' was done on another thread", "err")
        nodes.kill(3)
        nodes.ended()
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    assert "restart 1 of at most 1" in nodes.describe()
