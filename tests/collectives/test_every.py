"""Every collective gives under ``--recovery=in-place`` what torchrun gives, bit for bit."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils import _pytree as pytree

from tests import helpers

SCRIPT = str(Path(__file__).parent / "every.py")
RANKS = 3


def test_as_under_torchrun(tmp_path: Path) -> None:
    found = {}
    for name, flags in (("torchrun", []), ("flashrun", ["--recovery=in-place"])):
        out = tmp_path / name
        out.mkdir()
        command = [*helpers.launcher(name), *flags, f"--nproc-per-node={RANKS}", SCRIPT, str(out)]
        # torchrun leaves its log folder
        env = helpers.clean_environment({"TMPDIR": str(tmp_path)})
        finished = helpers.run(command, timeout=120.0, env=env)
        assert finished.status == 0, finished.describe()
        found[name] = [torch.load(out / f"rank{r}.pt") for r in range(RANKS)]
    different = []
    for rank, (expected, ours) in enumerate(zip(found["torchrun"], found["flashrun"], strict=True)):
        assert expected.keys() == ours.keys()
        for case in expected:
            one, two = pytree.tree_leaves(expected[case]), pytree.tree_leaves(ours[case])
            same = len(one) == len(two) and all(
                torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b
                for a, b in zip(one, two, strict=True)
            )
            if not same:
                different.append(f"rank {rank}, {case}: {expected[case]} became {ours[case]}")
    assert not different, "\n".join(different)
    failed = {case for case, value in found["torchrun"][0].items() if isinstance(value, str)}
    assert failed <= {"coalescing manager", "functional odd", "functional all_reduce avg"}
