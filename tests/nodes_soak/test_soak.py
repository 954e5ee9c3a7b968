"""The soak of scripts/soak_nodes, a short one; and what it would tell."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.nodes_soak import soak
from tests.nodes_soak.fleet import Failed, Plan


def test_a_few_events(seed: int, tmp_path: Path) -> None:
    # The node that thaws is the spare that takes the next lost one's place, in the same round.
    kinds = ["workers", "freeze", "agent", "workers", "doze", "node"]
    plan = Plan(nodes=2, spares=1, pace=0.1)
    found = soak.soak(plan, seed, len(kinds), tmp_path, print, kinds)
    assert [event["kind"] for event in found["events"]] == kinds
    assert found["equal"] == 7 * plan.ranks


def event(name: str, round_: int, reason: str = "") -> dict[str, Any]:
    return {"event": name, "round": round_, "reason": reason, "time": 5.5}


def played(*lost: list[int]) -> list[dict[str, Any]]:
    """A node was killed every second; the last but one was not waited for."""
    return [
        {"number": i, "at": float(i), "at once": i == len(lost) - 2, "lost": [ranks]}
        for i, ranks in enumerate(lost)
    ]


COPIES = "the host-read logs of ranks 2 to 3 were lost with their node"


@pytest.mark.parametrize(
    ("told", "lost", "said"),
    [
        ([event("started", 1)], [], "ended without a word: [0]"),
        ([event("stop", 0, "internal error")], [], "{0: {'why': 'internal error'"),
        ([event("stop", 0, COPIES)], [[4, 5], [2, 3]], ""),
        ([event("stop", 0, COPIES)], [[6, 7], [2, 3]], COPIES),  # another had the copies
        ([event("stop", 0, COPIES)], [[4, 5], [0, 1], [2, 3]], COPIES),  # they were made anew
    ],
)
def test_a_restart_for_no_good_reason_is_told(
    told: list[dict[str, Any]], lost: list[list[int]], said: str
) -> None:
    fleet: Any = SimpleNamespace(told=lambda: told, plan=Plan())
    if said:
        with pytest.raises(Failed, match=re.escape(said)):
            soak.restarts(fleet, played(*lost))
    else:
        found = soak.restarts(fleet, played(*lost))
        assert found == {0: {"why": COPIES, "events": [0, 1], "lost": lost}}


def test_a_failure_says_how_to_run_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: object) -> None:
        raise Failed("waited for 2 more steps in vain")

    monkeypatch.setattr(soak, "soak", fails)
    assert soak.main(["--events", "3", "--seed", "4"]) == 1
    said = capsys.readouterr().out
    assert "waited for 2 more steps in vain" in said
    assert "again: scripts/soak_nodes --events 3 --seed 4 --backend flash-etcd" in said
