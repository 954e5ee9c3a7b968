"""A worker's freed memory stays with it, unless the user has said how that is to be."""

from pathlib import Path

import pytest

from tests import helpers

PAGES = 64 << 8  # of 64 MB

BODY = """
import resource, torch
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(1 << 18) for _ in range(64)]  # 64 MB that a step frees
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first = faults()
print(f"faults {first} {min(faults() for _ in range(3))}", flush=True)
"""


def faults(folder: Path, *flags: str, **variables: str) -> tuple[int, int]:
    """Pages that came with the first 64 MB of a worker, and with the same again."""
    script = folder / "script.py"
    script.write_text(BODY)
    command = [*helpers.launcher("flashrun"), "--standalone", *flags, str(script)]
    done = helpers.run(command, cwd=folder, env=variables)
    assert done.status == 0, done.describe()
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("faults")]
    first, again = map(int, line.split()[1:])
    return first, again


@pytest.mark.parametrize("flags", [(), ("--recovery=restart",), ("--no-zygote",)], ids=str)
def test_what_a_step_frees_is_there_for_the_next(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    first, again = faults(tmp_path, *flags)
    assert first > PAGES / 2
    assert again < PAGES / 10


@pytest.mark.parametrize(
    "variables",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"},
    ],
    ids=str,
)
def test_the_users_own_setting_counts(tmp_path: Path, variables: dict[str, str]) -> None:
    _, again = faults(tmp_path, **variables)
    assert again > PAGES / 2
