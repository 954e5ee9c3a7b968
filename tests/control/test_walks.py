"""The protocol of recovery on long random ways, for two to five ranks (see `model`), and the
machine's words about replicas in any order."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from flashrun.control.commands import Send
from flashrun.control.recovery import RecoveryMachine
from tests.control.model import Faults, Model

ENDS = (
    "done",
    "fail:",  # max_retries
    "restart: no survivor holds the state",
    "restart: rank(s) [",  # have ended and can't take part
    "restart: 6 attempts in a row failed",
)
HANGS = "did not come to"


@st.composite
def ways(draw: st.DrawFn) -> tuple[Model, list[int], int]:
    size = draw(st.integers(2, 5))
    first = draw(st.integers(0, 2))
    faults = Faults(
        kills=draw(st.integers(0, 8)),
        deaths=draw(st.integers(0, 4)),
        breaks=draw(st.integers(0, 4)),
        hangs=draw(st.integers(0, 1)),
        slow=draw(st.integers(0, 2)),
        quits=draw(st.integers(0, 1)),
        hit=True,  # the first one, too, may be any rank
    )
    slow_wires = draw(st.booleans())
    model = Model(size, (first, first + draw(st.integers(1, 5))), faults, slow_wires)
    choices = draw(st.lists(st.integers(0, 10_000), max_size=400))
    return model, choices, draw(st.integers(0, 10_000))


@settings(max_examples=300, deadline=None)
@given(ways())
def test_any_way_ends_well(way: tuple[Model, list[int], int]) -> None:
    """Whatever happens, no invariant breaks; and once nothing more goes wrong, there is an end."""
    model, choices, then = way
    world = model.initial
    for choice in choices:
        if world.end:
            break
        by_itself, faults = model.next(world)
        options = faults if faults and choice % 8 == 0 else by_itself
        world = options[choice // 8 % len(options)][1]
    for _ in range(5_000):
        if world.end:
            break
        by_itself, _ = model.next(world)
        then = (then * 1103515245 + 12345) % 2**31  # any order will do
        world = by_itself[(then >> 8) % len(by_itself)][1]
    event(world.end.split(":")[0])
    hung = model.initial.faults.hangs and HANGS in world.end
    amid = model.initial.faults.quits and world.end.endswith("in the middle of a recovery")
    assert world.end.startswith(ENDS) or hung or amid, world.end


def shown(rank: int, boundary: int, tensors: dict[str, str], confirm: bool) -> dict[str, Any]:
    own = {"x": f"{boundary}", "y": f"{rank}"}
    return {"op": "replicas", "boundary": boundary, "tensors": tensors, "bytes": 8,
            "buffers": ["b"], "own": own, "confirm": confirm}  # fmt: skip


@st.composite
def shows(draw: st.DrawFn) -> tuple[int, list[tuple[int, dict[str, Any]]], list[Any], int]:
    """Every rank's words at some boundaries; in one order, and in another with some of them twice
    and the decider's death between them."""
    size = draw(st.integers(2, 5))
    confirm = draw(st.booleans())
    odd = draw(st.sampled_from(["", "a", "b", "lonely"]))
    boundaries = sorted(draw(st.sets(st.integers(1, 9), min_size=1, max_size=3)))
    words = []
    for boundary in boundaries:
        for rank in range(size):
            tensors = {"a": "1", "b": "1"}
            if odd and rank == size - 1:
                tensors[odd] = "2"
            words.append((rank, shown(rank, boundary, tensors, confirm)))
    order = []
    queues = {r: [w for q, w in words if q == r] for r in range(size)}
    while any(queues.values()):
        rank = draw(st.sampled_from([r for r, q in queues.items() if q]))
        word = queues[rank].pop(0)
        order += [(rank, word)] * draw(st.integers(1, 2))
    return size, words, order, draw(st.integers(0, len(order)))


@settings(max_examples=300, deadline=None)
@given(shows())
def test_what_is_proved_does_not_depend_on_the_order(
    case: tuple[int, list[tuple[int, dict[str, Any]]], list[Any], int],
) -> None:
    size, words, order, death = case

    def judged(order: list[tuple[int, dict[str, Any]]], death: int) -> tuple[Any, ...]:
        machine = RecoveryMachine(size)
        for who in machine.ranks:
            who.formed = True
        confirmed = set()
        for at, (rank, word) in enumerate(order):
            if at == death:
                machine = RecoveryMachine.load(json.loads(json.dumps(machine.dump())))
            for c in machine.message(rank, 0, word, 0.0):
                if isinstance(c, Send) and c.message["op"] == "confirmed":
                    confirmed.add((c.rank, c.message["boundary"]))
        return (machine.ended, machine.restart_only, machine.proved, machine.private,
                machine.peerless, machine.shared, machine.unshared, confirmed)  # fmt: skip

    assert judged(order, death) == judged(words, -1)
