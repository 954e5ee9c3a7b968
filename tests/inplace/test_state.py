"""State that is not a parameter, a buffer or an optimizer's."""

from __future__ import annotations

import functools
import io
import json
import os
import signal
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from flashrun.worker import own as own_module
from flashrun.worker.comm_hooks import what_is_kept
from flashrun.worker.hook_state import HookStates
from flashrun.worker.oplog import Op
from flashrun.worker.own import Own
from flashrun.worker.replay.api import Replay
from flashrun.worker.runtime import Runtime
from flashrun.worker.state import _decode, _encode
from tests.inplace.harness import Job, same
from tests.inplace.test_trouble import dies_in_interval

torch.set_num_threads(1)  # before the forks: OpenMP does not survive them

STEPS = "9"
INTERVALS = [5, pytest.param(6, marks=pytest.mark.slow)]  # in which rank 1 dies

@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("kind", ["across", "after", "turns"])
def test_gradients_that_live_on_are_right_or_refused(kind: str, interval: int) -> None:
    outcome = Job("kept.py", 3, (kind, STEPS), in_child=dies_in_interval(1, interval)).run()
    if outcome.end == "restart":
        reasons = "from before the step at which this worker was", "gradients that are not zeroed"
        assert any(reason in outcome.reason for reason in reasons)
    else:
        assert outcome.end == "done", outcome
        undisturbed = Job("kept.py", 3, (kind, STEPS)).run()
        assert not same(undisturbed.results, outcome.results), outcome.lines
    assert outcome.end == ("done" if kind == "turns" else "restart")


def counting():  # type: ignore[no-untyped-def]
    count, seen = 0, []

    def assigns(state, bucket):  # type: ignore[no-untyped-def]
        nonlocal count
        count += 1

    def appends(state, bucket):  # type: ignore[no-untyped-def]
        seen.append(bucket)

    def reads(state, bucket):  # type: ignore[no-untyped-def]
        return count

    return assigns, appends, reads


KEPT = ["average", "large", "metric", "best", "swa", "rates"]


@pytest.mark.parametrize(
    ("kind", "interval"),
    [
        pytest.param(kind, interval, marks=[pytest.mark.slow] * (interval == 6))
        for kind in KEPT
        for interval in (5, 6)
    ]
    + [("gathered", 7)],  # the ranks were compared before it, and are again at boundary 8
)
def test_what_scripts_keep_is_what_it_was(kind: str, interval: int) -> None:
    outcome = Job("kept.py", 3, (kind, STEPS), in_child=dies_in_interval(1, interval)).run()
    assert outcome.end == "done", (outcome.reason, outcome.lines, outcome.output)
    assert outcome.incarnations == [0, 1, 0]
    undisturbed = Job("kept.py", 3, (kind, STEPS)).run()
    assert not same(undisturbed.results, outcome.results), outcome.lines


def dies_at_boundary_6(rank: int, incarnation: int) -> None:
    """Rank 1 dies after its step, with nothing of boundary 6 written down."""
    at, pid = Replay.at_boundary, os.getpid()

    def reached(replay, rt, b):  # type: ignore[no-untyped-def]
        if (rank, incarnation, b) == (1, 0, 6):
            os.kill(pid, signal.SIGKILL)
        at(replay, rt, b)

    Replay.at_boundary = reached  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("average", 3), ("average", 2), *(pytest.param(k, 3, marks=pytest.mark.slow) for k in KEPT)],
)
def test_what_was_not_written_down_comes_from_peers_where_all_have_it(
    kind: str, ranks: int
) -> None:
    """And what a rank counts for itself is made of outputs, which are in its log."""
    outcome = Job("kept.py", ranks, (kind, STEPS), in_child=dies_at_boundary_6).run()
    assert outcome.end == "done", (outcome.reason, outcome.lines, outcome.output)
    assert outcome.incarnations == [0, 1, *[0] * (ranks - 2)]
    assert not same(Job("kept.py", ranks, (kind, STEPS)).run().results, outcome.results)


class Hook:
    def __call__(self, state, bucket):  # type: ignore[no-untyped-def]
        return None

    method = __call__


power = powerSGD_hook.PowerSGDState(None, 1)


@pytest.mark.parametrize(
    ("hook", "state", "kept"),
    [
        (default_hooks.fp16_compress_hook, None, None),
        (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), None, None),
        (counting()[2], None, None),
        (powerSGD_hook.powerSGD_hook, power, "PowerSGDState"),
        (default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook), power, "PowerSGDState"),
        (functools.partial(powerSGD_hook.powerSGD_hook, power), None, "PowerSGDState"),
        (counting()[0], None, "variables that it changes"),
        (counting()[1], None, "list"),
        (Hook(), None, "Hook"),
        (Hook().method, None, "Hook"),
        (default_hooks.allreduce_hook, {}, "dict"),
    ],
)
def test_what_a_communication_hook_keeps(hook: object, state: object, kept: str | None) -> None:
    assert what_is_kept(hook, state) == kept


def test_a_hook_that_keeps_something_is_restart_only() -> None:
    outcome = Job("kept.py", 3, ("counter", "12"), in_child=dies_in_interval(1, 6)).run()
    assert outcome.end == "restart", outcome
    assert "keeps state" in outcome.reason
    assert any("restart only" in line and "fp16_compress_hook" in line for line in outcome.lines)


@pytest.mark.parametrize("interval", [3, 8])  # before and after it begins to compress
def test_what_powersgd_keeps_is_carried(interval: int) -> None:
    outcome = Job("kept.py", 3, ("power", "12"), in_child=dies_in_interval(1, interval)).run()
    assert outcome.end == "done", (outcome.reason, outcome.lines, outcome.output)
    assert outcome.incarnations == [0, 1, 0]
    assert not same(Job("kept.py", 3, ("power", "12")).run().results, outcome.results)


def dies_in_callback(rank: int, incarnation: int) -> None:
    """Rank 1 dies in interval 6 in the callback of a hook; on the others that runs in a thread of
    gloo, so that whoever waits for the hook does so in C++."""
    issue, wait, complete, pid = Runtime.issue, Runtime.wait, Op.complete, os.getpid()
    began = threading.Event()
    count = 0

    def issued(runtime, *args):  # type: ignore[no-untyped-def]
        nonlocal count
        count += runtime.boundary == 6
        if count == 2 and (rank, incarnation) == (1, 0):
            os.kill(pid, signal.SIGKILL)
        return issue(runtime, *args)

    def waited(runtime, op):  # type: ignore[no-untyped-def]
        if op.interval == 6 and op.in_backward and incarnation == 0:
            assert began.wait(60)
        wait(runtime, op)

    def completed(op):  # type: ignore[no-untyped-def]
        op.done = True
        if op.interval == 6:
            began.set()
        complete(op)

    Runtime.issue, Runtime.wait = issued, waited  # type: ignore[method-assign]
    Op.complete = completed  # type: ignore[method-assign]


def test_who_waits_in_cpp_for_a_hooks_callback_is_held() -> None:
    outcome = Job("kept.py", 3, ("chained", "12"), in_child=dies_in_callback).run()
    assert outcome.end == "done", (outcome.reason, outcome.lines, outcome.output)
    assert outcome.incarnations == [0, 1, 0]
    assert not same(Job("kept.py", 3, ("chained", "12")).run().results, outcome.results)


def test_powersgd_without_its_file_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HookStates, "at_boundary", lambda self, b: None)
    outcome = Job("kept.py", 3, ("power", "12"), in_child=dies_in_interval(1, 8)).run()
    assert outcome.end == "restart", outcome
    assert "PowerSGD hook kept at boundary" in outcome.reason


def test_what_is_too_large_to_carry_is_told_once(tmp_path: Path) -> None:
    state = powerSGD_hook.PowerSGDState(None, 1)
    state.error_dict[0] = torch.zeros(2 << 20)
    states = HookStates(tmp_path, 0, fresh=True)
    states.add(state)
    assert "8.39 MB" in (states.at_boundary(1) or "")
    assert states.at_boundary(2) is None
    assert not list(tmp_path.iterdir())


@pytest.fixture
def only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest's own frames, which hold the parameters of all tests, are no script."""
    monkeypatch.setattr(own_module, "is_script", lambda filename: filename == __file__)


class Odd:
    """Where looking could do something."""

    __slots__ = ("__weakref__", "inside", "unset")

    def __init__(self) -> None:
        self.inside = torch.zeros(3)

    @property
    def asked(self) -> None:
        raise AssertionError("a property was run")


@pytest.mark.usefixtures("only_here")
def test_looking_changes_nothing(tmp_path: Path) -> None:
    class Proxy:
        pass

    there = Proxy()
    odd = Odd()
    lists: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
    lists["a"].append(torch.zeros(2))
    gone = weakref.proxy(there)
    del there
    held = {"odd": odd, "lists": lists, "gone": gone, "same": lists, 3: deque([torch.zeros(1)])}
    module = torch.nn.BatchNorm1d(2)
    module.seen = torch.zeros(5)
    outlives = torch.zeros(4)
    fresh = torch.zeros(6)
    own = Own(tmp_path, 0, fresh=True)
    own.find([])
    fresh = torch.zeros(6)
    own.find([])
    names = sorted(name.split()[-1] for name in own.now())
    assert names == ["held[3][0]", "lists['a'][0]", "module.seen", "odd.inside", "outlives"]
    lists.clear()
    held.clear()
    names = sorted(name.split()[-1] for name in own.now())
    assert names == ["module.seen", "odd.inside", "outlives"]
    assert not lists and fresh is not outlives


@pytest.mark.usefixtures("only_here")
def test_what_was_there_before_the_first_step_is_not_looked_at(tmp_path: Path) -> None:
    data = {"x": torch.zeros(5), "y": torch.zeros(5), "z": torch.zeros(5)}
    own = Own(tmp_path, 0, fresh=True)
    own.before_first_step([data["z"]])
    data["y"] += 1
    data["x"] = data["x"].clone()
    own.find([data["z"]])
    assert {name.split()[-1] for name in own.now()} == {"data['x']", "data['y']"}


@pytest.mark.usefixtures("only_here")
def test_a_record_is_of_its_boundary_or_none(tmp_path: Path) -> None:
    held = [torch.zeros(2)]
    own = Own(tmp_path, 0, fresh=True)
    own.find([])
    for boundary in range(1, 8):
        held[0] = torch.full((boundary,), float(boundary))
        own.at_boundary(boundary)
    (name,) = own.recorded(7)
    assert torch.equal(own.recorded(7)[name], held[0])
    assert own.recorded(8) == own.recorded(2) == {}
    own.can_fill(7, [])
    held[0] = torch.zeros(7)
    own.fill(7)
    assert held[0].tolist() == [7.0] * 7
    assert Own(tmp_path, 0, fresh=True).recorded(7) == {}  # another round of the job


def test_what_was_taken_long_ago_is_not_compared_again(tmp_path: Path) -> None:
    """The rank that has taken it is a survivor by then; a later replacement need not have such a
    tensor, and all were restarted ("total differs between ranks")."""
    own = Own(tmp_path, 0, fresh=True)
    assert own.taken_lately(0) == []
    own.taken, own.taken_at = ["total"], 40
    assert own.taken_lately(42) == ["total"]
    assert own.taken_lately(62) == []


def test_an_optimizers_state_is_the_same_after_the_way_to_a_peer() -> None:
    """Down to the bytes of a checkpoint: a key is one string, a tuple no list, a number no text."""

    def state(content: Callable[[int], Any]) -> dict[int, Any]:
        return {p: content(p) for p in range(3)}

    def made(p: int) -> Any:
        return {"momentum_buffer": torch.full((2,), float(p)), "step": p, 7: (1, [2.5, None]),
                "flags": {"nesterov": True}}  # fmt: skip

    def sent(p: int) -> Any:
        tensors: dict[str, torch.Tensor] = {}
        tree = json.loads(json.dumps(_encode(made(p), "head", tensors)))
        return _decode(tree, None, tensors)

    there, here = io.BytesIO(), io.BytesIO()
    torch.save(state(made), there)
    torch.save(state(sent), here)
    assert here.getvalue() == there.getvalue()
