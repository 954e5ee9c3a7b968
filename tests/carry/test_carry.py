"""Scripts that in-place recovery must carry, unmodified, through the launcher (issue 3).

Every script runs once by torch alone, whose results are the expected ones, and once under
``flashrun --recovery=in-place`` with faults at seeded random moments. On every rank the weights,
the optimizer's state, the counts and histories, and all files that were written must be the same,
bit for bit, and survivors keep their processes. Where that can't be had the launcher must say so,
restart, and come to the same results.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.carry.harness import (
    Kind,
    Reference,
    Undisturbed,
    Watched,
    carry,
    schedule,
)

RANKS = 3
# Nobody who lives has done as many iterations; or the end of a block was not compared yet.
UNEVEN = "so nobody has its state|of its own since a Join"
# What a Hugging Face Trainer notes of the clock.
TIMES = frozenset(
    f"{part}_{what}"
    for part in ("train", "eval")
    for what in ("runtime", "samples_per_second", "steps_per_second")
)

KINDS = [
    Kind("ddp_loader"),
    Kind("gpt_loop"),
    Kind("permutation", slow=True),
    Kind("early_stopping"),
    Kind("trainer", ("7",)),
    Kind("trainer", ("9",), before=("3",)),
    Kind("scaler"),
    Kind("norms"),
    Kind("plain_allreduce", slow=True),
    Kind("functional"),
    Kind("ema_all", slow=True),
    Kind("gan", slow=True),
    Kind("wgan"),
    Kind("warmup_reset", slow=True),
    Kind("augment"),
    Kind("workers"),
    Kind("iterable"),
    Kind("objects"),
    # Both members of a group may be lost, and nobody has its result.
    Kind("subgroups", restart="log ends before the read|nobody has the result",
         either=True, slow=True),
    Kind("subgroups", victims=(2,)),
    Kind("checkpointing", slow=True),
    Kind("unused", slow=True),
    Kind("hook_fp16"),
    Kind("join", ("0",)),
    Kind("metrics_after"),
    Kind("in_globals"),
    Kind("saved_in_memory"),
    Kind("by_hand", lines=30),  # no boundary: all of it runs again
    Kind("ema_rank0", victims=(1, 2)),
    Kind("compiled", slow=True, timeout=200),
    Kind("hf_trainer", slow=True, timeout=200, needs=("transformers", "accelerate"), unlike=TIMES),
    Kind("lightning_job", slow=True, timeout=200, needs=("lightning",)),
    Kind("accelerate_job", slow=True, timeout=200, needs=("accelerate",), lines=2),
    Kind("stateful_loader", slow=True, timeout=200, needs=("torchdata",)),
    Kind("ema_rank0", restart="only rank 0 ha", victims=(0,)),
    Kind("hook_powersgd", restart="PowerSGD hook kept", either=True),
    Kind("best_restored", restart="script keeps best", either=True, after=0.2),
    Kind("local_sgd", restart="differs between ranks"),
    Kind("in_threads", restart="a thread of the script reads"),
    Kind("join", ("1",), restart=UNEVEN, either=True),
    Kind("join", ("3",), restart=UNEVEN, either=True, slow=True),
    Kind("no_group", restart="had formed a process group"),
]


def name(kind: Kind) -> str:
    resumed = "-resumed" if kind.before is not None else ""
    others = [f"only{rank}" for rank in kind.victims]
    return "-".join([kind.script, *kind.args, *others]) + resumed


@pytest.fixture(scope="module")
def reference() -> Iterator[Reference]:
    process = Reference()
    yield process
    process.close()


@pytest.fixture(scope="module")
def undisturbed(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(reference, tmp_path_factory.mktemp("undisturbed"), RANKS)


def params() -> list[object]:
    return [
        pytest.param(
            kind,
            id=name(kind),
            marks=[pytest.mark.slow] * kind.slow,
        )
        for kind in KINDS
    ]


@pytest.mark.parametrize("kind", params())
def test_random_faults(
    kind: Kind, reference: Reference, undisturbed: Undisturbed, tmp_path: Path, seed: int
) -> None:
    missing = [module for module in kind.needs if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"needs {missing}: pip install -e '.[frameworks]'")
    wanted = undisturbed[kind]
    rounds = int(os.environ.get("FRTEST_ROUNDS", "1"))
    for i in range(rounds):
        print(f"seed {seed + i}")
        strikes = schedule(seed + i, wanted.steps, kind.strikes, kind.after, kind.victims)
        carry(reference, kind, wanted, tmp_path / f"out{i}", strikes)


@pytest.mark.parametrize("what", ["norm", "loss", "scale", "objects"])
def test_killed_between_backward_and_the_reads_before_the_step(
    what: str, reference: Reference, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """The others complete the step; what the dead worker would have read is in nobody's log, but
    they have the gradients."""
    kind = Kind("norm_before_step", (what,))

    def wait(run: Watched) -> None:
        run.killed[1].append(0)
        run.await_said("done in|cannot go on", "err")

    carry(reference, kind, undisturbed[kind], tmp_path / "out", [], more=wait)
