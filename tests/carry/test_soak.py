"""The soak of scripts/soak, a short one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.carry import soak
from tests.carry.harness import Expected


def test_a_few_faults(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    code = soak.main(["--faults", "5", "--seed", str(seed % 2**31), "--script", "gpt_loop"])
    said = capsys.readouterr().out
    assert code == 0, said
    assert "soak: 5 faults" in said
    assert f"--seed {seed % 2**31}" in said


def test_a_mismatch_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def differs(*args: object) -> None:
        raise AssertionError("rank0.pt: model: differs")

    steps = {rank: list(range(100)) for rank in range(3)}
    monkeypatch.setattr(soak, "Reference", lambda: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(soak, "expected", lambda *_: Expected({}, steps))
    monkeypatch.setattr(soak, "carry", differs)
    assert soak.main(["--faults", "3", "--seed", "4"]) == 1
    said = capsys.readouterr().out
    assert "rank0.pt: model: differs" in said
    assert "again: scripts/soak --faults 3 --seed 4 --script ddp_loader" in said
