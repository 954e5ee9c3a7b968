"""A node is lost with everything on it: its ranks go on in place on a spare, from the copies that
the next node of the ring holds; the final weights, optimizer state and histories of every rank are
bit for bit those of an undisturbed run, and the survivors keep their processes.
"""

from __future__ import annotations

import json
import os
import random
import signal
from typing import Any

import pytest

from flashrun.control.plan_book import PREFIX, PlanBook
from flashrun.rendezvous.embedded import connect_embedded
from flashrun.rendezvous.tcp_kv import connect
from tests import helpers
from tests.jobs import Job
from tests.test_recovery import TRAIN
from tests.test_recovery_nodes import FOREVER, Nodes, Start, results, start, undisturbed

__all__ = ["start", "undisturbed"]  # fixtures

# Rank 0 waits at these steps, so that the others wait for it and all that they have left is copied.
STEPS = (20, 40, 60)
WAITING = TRAIN.replace(
    'tell("step", step=step)',
    'tell("step", step=step)\n'
    f'        if step in {STEPS} and RANK == 0 and ATTEMPT == 0: await_release(f"go{{step}}")',
)
GATES = [f"go{step}" for step in STEPS]
BODY = {"body": WAITING, "fifos": GATES}
QUICK = ("--detection-timeout=3", "--heartbeat-interval=0.5")


def lose(*jobs: Job) -> None:
    """Kill the supervisors: nothing of a node outlives its own."""
    for job in jobs:
        job.process.kill()
    for job in jobs:
        job.process.wait()  # the kernel has killed its workers by then


def release(nodes: Nodes, *gates: str) -> None:
    """Let rank 0 go on, now and when it comes there."""
    for gate in gates:
        nodes.of(0).release(gate)


def ended(nodes: Nodes, *lost: Job) -> None:
    nodes.ended(*lost)


def test_a_node_is_replaced_in_place(start: Start, undisturbed: Any) -> None:
    with start(2, *FOREVER, spares=1, **BODY) as nodes:
        nodes.await_step(20, 0)
        (spare,) = nodes.await_spares()
        lost = nodes.of(3)
        nodes.await_copied(20, 2, 3)
        lose(lost)
        release(nodes, *GATES)
        ended(nodes, lost)
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    assert nodes.processes() == {0: 1, 1: 1, 2: 2, 3: 2}, "survivors keep their processes"
    assert {e["rank"] for e in spare.told("saved")} == {2, 3}
    for words in ("the node at 127.0.0.1 was lost with ranks 2 to 3", "refuses connections",
                  "the node at 127.0.0.1 takes ranks 2 to 3", "no step lost"):  # fmt: skip
        assert words in nodes.jobs[0].err, nodes.describe()
    assert "restart 1" not in nodes.jobs[0].err


def test_the_node_that_hosts_the_store(start: Start) -> None:
    """The others can't go on without it, and the spare is of no help: all end at once, without
    waiting for any timeout, say what would have helped, and leave no worker."""
    with start(2, *FOREVER, "--max-restarts=3", spares=1, **BODY) as nodes:
        nodes.await_step(20, 0)
        (spare,) = nodes.await_spares()
        host, left = nodes.of(0), nodes.of(3)
        workers = [row.pid for node in nodes.jobs for row in node.rows()]
        assert {nodes.pid(rank) for rank in range(4)} <= set(workers)
        lose(host)
        for node in (left, spare):
            assert node.wait(20) == 1, nodes.describe()
            assert node.ended() == 1
            assert "The node that hosts it has ended or can't be reached" in node.err
            assert "With etcd (--rdzv-backend=flash-etcd) no single node is needed" in node.err
            assert "restart 1" not in node.err, nodes.describe()
        host.await_gone(workers)
    assert not any(j.told("saved") for j in nodes.jobs)


@pytest.mark.slow
def test_one_node_after_the_other(start: Start, undisturbed: Any) -> None:
    """The second to be lost is the spare that took the first one's place; then one more worker."""
    with start(2, *FOREVER, spares=2, **BODY) as nodes:
        nodes.await_step(20, 0)
        nodes.await_spares()
        first = nodes.of(3)
        nodes.await_copied(20, 2, 3)
        lose(first)
        release(nodes, "go20")
        nodes.await_step(40, 0)
        second = next(j for j in nodes.jobs if j is not first and j.told("step", rank=3))
        nodes.await_copied(40, 2, 3)
        lose(second)
        release(nodes, "go40")
        nodes.await_step(60, 0)
        third = next(
            j for j in nodes.jobs if j not in (first, second) and j.told("step", rank=3)
        )
        os.kill(third.told("step", rank=3)[-1]["pid"], signal.SIGKILL)
        release(nodes, "go60")
        ended(nodes, first, second)
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    assert nodes.processes() == {0: 1, 1: 1, 2: 3, 3: 4}, "survivors keep their processes"


@pytest.mark.slow
def test_during_the_recovery_from_another_fault(start: Start, undisturbed: Any) -> None:
    with start(2, *FOREVER, spares=1, **BODY) as nodes:
        nodes.await_step(20, 0)
        nodes.await_spares()
        lost = nodes.of(3)
        nodes.kill(1)
        nodes.of(0).await_output("rank 1 lost", "err")
        nodes.await_copied(20, 2, 3)
        lose(lost)
        release(nodes, *GATES)
        ended(nodes, lost)
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    assert nodes.processes() == {0: 1, 1: 2, 2: 2, 3: 2}, "survivors keep their processes"


@pytest.mark.slow
def test_a_spare_that_is_lost_while_it_takes_over(start: Start, undisturbed: Any) -> None:
    """What the first node has left is still where it was copied to."""
    with start(2, *FOREVER, spares=2, **BODY) as nodes:
        nodes.await_step(20, 0)
        spares = nodes.await_spares()
        first = nodes.of(3)
        nodes.await_copied(20, 2, 3)
        lose(first)
        release(nodes, "go20")
        helpers.wait_until(
            lambda: any(b"takes a lost one's place" in s.output["err"] for s in spares),
            "a spare that takes over", 60,
        )  # fmt: skip
        second = next(s for s in spares if b"takes a lost one's place" in s.output["err"])
        lose(second)
        release(nodes, "go40", "go60")
        ended(nodes, first, second)
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    assert nodes.processes()[0] == nodes.processes()[1] == 1, "survivors keep their processes"


@pytest.mark.slow
def test_a_spare_that_was_dead_before(start: Start, undisturbed: Any) -> None:
    """Its heartbeat is not waited for: it is given the place, and does not come."""
    with start(2, *FOREVER, spares=2, late=1, **BODY) as nodes:
        nodes.await_step(20, 0)
        (dead,) = nodes.await_spares()  # who came first is asked first
        nodes.add()
        nodes.await_spares()
        first = nodes.of(3)
        nodes.await_copied(20, 2, 3)
        lose(dead)
        lose(first)
        release(nodes, *GATES)
        ended(nodes, first, dead)
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    assert nodes.processes() == {0: 1, 1: 1, 2: 2, 3: 2}, "survivors keep their processes"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "after"),
    [((1, 3), ""), ((1, 3), "takes ranks 2 to 3"), ((1, 2), "")],
    ids=["apart", "in-the-recovery-from-the-other", "the-holder-too"],
)
def test_two_nodes_at_once(
    start: Start, undisturbed: Any, which: tuple[int, int], after: str
) -> None:
    """With four in the ring, 1 and 3 are no neighbours; 2 holds what 1 has left."""
    with start(4, "--max-restarts=1", *FOREVER, spares=2, **BODY) as nodes:
        nodes.await_step(20, 0)
        nodes.await_spares()
        lost = [nodes.of(2 * group_rank) for group_rank in which]
        nodes.await_copied(20, *(2 * group + i for group in which for i in (0, 1)))
        lose(lost[0])
        if not after:
            lose(lost[1])
        release(nodes, "go20")
        if after:
            nodes.jobs[0].await_output(after, "err")
            lose(lost[1])
        if which == (1, 3):
            release(nodes, "go40", "go60")
        ended(nodes, *lost)
    assert results(nodes.out, 8) == undisturbed(8), nodes.describe()
    left = nodes.jobs[0].err
    if which == (1, 3):
        assert nodes.processes() == {r: 1 + (r // 2 in which) for r in range(8)}
        assert "restart 1" not in left
    else:
        assert "the host-read logs of ranks 2 to 3 were lost with their node" in left
        assert "(the node that held it was lost as well)" in left and "restart 1 of" in left


@pytest.mark.slow
def test_the_agent_that_holds_the_copies_is_killed_as_well(start: Start, undisturbed: Any) -> None:
    with start(3, *FOREVER, spares=1, **BODY) as nodes:
        nodes.await_step(20, 0)
        nodes.await_spares()
        lost, holder = nodes.of(2), nodes.of(4)
        nodes.await_copied(20, 2, 3)
        os.kill(holder.helper("agent"), signal.SIGKILL)
        lose(lost)
        release(nodes, *GATES)
        ended(nodes, lost)
    assert results(nodes.out, 6) == undisturbed(6), nodes.describe()
    assert nodes.processes() == {r: 1 + (r in (2, 3)) for r in range(6)}, nodes.describe()


@pytest.mark.slow
def test_the_node_that_leads_the_recovery(start: Start, undisturbed: Any) -> None:
    with start(2, *FOREVER, spares=1, **BODY) as nodes:
        nodes.await_step(20, 0)
        nodes.await_spares()
        host, lost = nodes.of(0), nodes.of(3)
        table = PlanBook(connect("127.0.0.1", nodes.port, 10.0), PREFIX).read().table
        assert table is not None
        (its_id,) = [place.node for place in table.nodes if 3 in place.ranks]
        with connect_embedded("127.0.0.1", nodes.port, 10.0) as store:

            def leads() -> bool:
                found = [k for k in store.list_keys("recovery/") if k.endswith("/leader")]
                values = [store.get(key) for key in found]
                return [json.loads(v)["node"] for v in values if v is not None] == [its_id]

            if not leads():  # an agent that stands still loses its lease
                agent = host.helper("agent")
                helpers.freeze(agent)
                helpers.wait_until(leads, "the other node to lead", 30)
                os.kill(agent, signal.SIGCONT)
            nodes.await_copied(20, 2, 3)
            assert leads()
        lose(lost)
        release(nodes, *GATES)
        ended(nodes, lost)
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    assert nodes.processes() == {0: 1, 1: 1, 2: 2, 3: 2}, "survivors keep their processes"


@pytest.mark.slow
def test_the_node_of_rank_0(start: Start, undisturbed: Any) -> None:
    """The store is elsewhere, and so MASTER_ADDR stays right."""
    body = WAITING.replace("RANK == 0 and", "RANK == 3 and").replace(
        'tell("step", step=step)',
        'tell("step", step=step)\n'
        "        if step == 70:\n"
        "            where = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])\n"
        "            tell('met', number=dist.TCPStore(*where).add('met', 1))",
    )
    options = {"body": body, "fifos": GATES, "spares": 1, "hosted": False}
    with start(2, *QUICK, **options) as nodes:
        nodes.await_step(20, 3)
        nodes.await_spares()
        lost, left = nodes.of(0), nodes.of(3)
        lose(lost)
        for gate in GATES:
            left.release(gate)
        ended(nodes, lost)
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    assert nodes.processes() == {0: 2, 1: 2, 2: 1, 3: 1}, "survivors keep their processes"
    met = [event["number"] for node in nodes.jobs for event in node.told("met")]
    assert sorted(met) == [1, 2, 3, 4], nodes.describe()


@pytest.mark.slow
def test_a_spare_that_comes_in_time(start: Start, undisturbed: Any) -> None:
    with start(2, *FOREVER, spares=1, late=1, **BODY) as nodes:
        nodes.await_step(20, 0)
        lost = nodes.of(3)
        lose(lost)
        release(nodes, "go20")
        nodes.of(0).await_output("waiting for 1 spare node", "err")
        nodes.add()
        release(nodes, "go40", "go60")
        ended(nodes, lost)
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    assert nodes.processes() == {0: 1, 1: 1, 2: 2, 3: 2}, "survivors keep their processes"


@pytest.mark.slow
def test_no_spare_comes(start: Start) -> None:
    flags = ("--max-restarts=1", "--spare-timeout=0.5", *FOREVER)
    with start(2, *flags, least=1, **BODY) as nodes:
        nodes.await_step(20, 0)
        lost = nodes.of(3)
        lose(lost)
        release(nodes, "go20")
        ended(nodes, lost)
        left = nodes.of(0)
    for words in ("and no spare came within 0.5 s (--spares, --spare-timeout)",
                  "restart 1 of at most 1"):  # fmt: skip
        assert words in left.err, nodes.describe()
    assert {e["rank"] for e in left.told("saved")} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_at_random_moments(start: Start, undisturbed: Any, seed: int) -> None:
    """In place, or (rarely: where the last steps had not been copied) with a restart."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    with start(3, "--max-restarts=2", *FOREVER, spares=2) as nodes:
        lost: list[Job] = []
        for _ in range(2):
            nodes.await_step(draw.randint(5, 40) + 40 * len(lost), draw.randrange(6))
            there = [j for j in nodes.jobs[1:] if j not in lost and j.told("step")]
            lost.append(draw.choice(there))
            lose(lost[-1])
        ended(nodes, *lost)
    assert results(nodes.out, 6) == undisturbed(6), nodes.describe()
    left = nodes.jobs[0].err
    in_place, restarts = left.count("recovery: done in"), left.count(" of at most 2")
    assert in_place + restarts == len(lost) and in_place, nodes.describe()
    gone = {e["rank"] for node in lost for e in node.told("step")}
    for rank, processes in nodes.processes().items():
        assert rank in gone or processes == 1 + restarts, "survivors keep their processes"
