"""Two of the scripts, struck in each phase of the run and of a recovery (issue 3)."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.carry import phases
from tests.carry.harness import Kind, Reference, Undisturbed, Watched, carry

KINDS = [Kind("ddp_loader"), Kind("gpt_loop", slow=True)]
RUNS: dict[str, list[phases.Phase]] = {
    "run": [phases.before_the_first_step, phases.rank_0_in_a_save, phases.all_but_one],
    "epoch": [phases.in_a_validation, phases.in_a_save],
    "recovery": [phases.again_in_the_hold, phases.the_replacement, phases.a_donor],
    "agent": [phases.the_agent, phases.the_agent_in_a_recovery],
    "any": [phases.again_at_any_time, phases.again_at_any_time, phases.again_at_any_time],
}
ENDS = [phases.in_the_last_step, phases.after_some_have_finished, phases.the_unfinished_one]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Undisturbed]:
    reference = Reference()
    yield Undisturbed(reference, tmp_path_factory.mktemp("undisturbed"), phases.RANKS)
    reference.close()


# The second script's are minutes more.
SCRIPTS = [
    pytest.param(kind, id=kind.script, marks=[pytest.mark.slow] if kind.slow else [])
    for kind in KINDS
]


@pytest.mark.parametrize("kind", SCRIPTS)
@pytest.mark.parametrize("name", RUNS)
def test_phases(
    kind: Kind, name: str, undisturbed: Undisturbed, tmp_path: Path, seed: int
) -> None:
    if name == "agent" and kind.script == "ddp_loader":
        kind = dataclasses.replace(kind, args=("20",))  # epochs: an agent takes a while
    draw = random.Random(seed)

    def strike(run: Watched) -> None:
        for phase in RUNS[name]:
            phase(run, draw)

    carry(None, kind, undisturbed[kind], tmp_path / "out", [], more=strike)


@pytest.mark.parametrize("kind", SCRIPTS)
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_the_end(
    kind: Kind, end: object, undisturbed: Undisturbed, tmp_path: Path, seed: int
) -> None:
    wanted = undisturbed[kind]
    draw = random.Random(seed)

    def strike(run: Watched) -> None:
        assert callable(end)
        end(run, draw, wanted.steps[0][-1])

    carry(None, kind, wanted, tmp_path / "out", [], more=strike)
