"""flashrun runs everything torchrun runs: every row of the table under both, compared."""

from __future__ import annotations

import os
import pprint
import re
import sys
from collections.abc import Iterator

import pytest

from tests import helpers
from tests.conformance import differences, harness
from tests.conformance.rows import NEAR_DUPLICATES, ROWS, Row

# The two commands compared; FRTEST_CONFORMANCE=torchrun,torchrun shows what the table itself
# cannot hold still.
EXPECTED, CANDIDATE = os.environ.get("FRTEST_CONFORMANCE", "torchrun,flashrun").split(",")
WORKERS = max(2, (os.cpu_count() or 2) + 1)  # a launcher waits a third of its time


Pair = tuple[harness.Observed, harness.Observed]


@pytest.fixture(scope="session")
def ahead(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[helpers.Ahead[Row, Pair]]:
    """Both runs of a row, made while the rows before are looked at."""
    home = tmp_path_factory.mktemp("rows")

    def observe(row: Row) -> Pair:
        # One after the other: several rows are run at once as it is.
        folder = home / str(ROWS.index(row))  # short: unix socket paths end at 107 bytes
        one = harness.observe(row, EXPECTED, folder / "a")
        return one, harness.observe(row, CANDIDATE, folder / "b")

    rows = [i.callspec.params["row"] for i in request.session.items if "test_row[" in i.name]
    runner = helpers.Ahead(observe, rows, workers=WORKERS, depth=2 * WORKERS)
    yield runner
    runner.close()


def test_table_is_well_formed() -> None:
    names = [row.name for row in ROWS]
    assert len(names) >= 100
    assert len(names) == len(set(names))
    stay = set(names) - set(NEAR_DUPLICATES)
    assert len(stay) >= 90
    assert stay.issuperset(NEAR_DUPLICATES.values())
    assert set(NEAR_DUPLICATES) < set(names)
    for difference in differences.DIFFERENCES:
        assert difference.reason
        assert any(re.fullmatch(difference.rows, name) for name in names), difference.rows


_seen: set[str] = set()  # rows that were compared
_needed: dict[differences.Difference, str] = {}  # and one that each intended difference is for


def _without_missing_ranks(
    differing: dict[str, tuple[object, object]],
) -> dict[str, tuple[object, object]]:
    """Where one launcher did not run a rank at all, one line says so instead of a hundred."""
    shown = {}
    for key, values in differing.items():
        rank, attempt, _ = [*key.split("."), "", ""][:3]
        whole = f"{rank}.{attempt}.argv"
        if rank.startswith("rank") and None in differing.get(whole, ()):
            key, values = f"{rank}.{attempt}", tuple(v is not None for v in differing[whole])
        shown[key] = values
    return shown


@pytest.mark.skipif(sys.platform != "linux", reason="flashrun runs on Linux")
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=[pytest.mark.slow] * (row.name in NEAR_DUPLICATES))
        for row in ROWS
    ],
)
def test_row(row: Row, ahead: helpers.Ahead[Row, Pair]) -> None:
    expected, got = ahead.get(row, timeout=2 * harness.TIMEOUT)
    if not row.refused:
        assert any("rank" in key for key in expected), "nothing ran: " + expected["raw"]
    differing = harness.compare(expected, got)
    left = {}
    for key, values in _without_missing_ranks(differing).items():
        found = differences.explanation(row.name, key, values)
        if found is None:
            left[key] = values
        else:
            _needed[found] = row.name
    _seen.add(row.name)
    if left:
        lines = [
            f"{key}:\n  {EXPECTED}: {pprint.pformat(one, width=150)}\n"
            f"  {CANDIDATE}: {pprint.pformat(two, width=150)}"
            for key, (one, two) in left.items()
        ]
        pytest.fail(
            "\n".join(lines) + f"\n\n=== {EXPECTED} {expected['raw']}\n=== {CANDIDATE} "
            f"{got['raw']}",
            pytrace=False,
        )


@pytest.mark.skipif(CANDIDATE != "flashrun", reason="the list is of flashrun's differences")
def test_every_difference_is_needed() -> None:
    """By a row that is not slow; of what was left out (-k) nothing is said."""
    stale = []
    for difference in differences.DIFFERENCES:
        rows = {row.name for row in ROWS if re.fullmatch(difference.rows, row.name)}
        if difference not in _needed and rows - set(NEAR_DUPLICATES) <= _seen:
            stale.append(f"{difference.key}: {difference.reason}")
    assert not stale, "no row needs these differences:\n" + "\n".join(stale)
