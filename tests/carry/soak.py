"""Many faults in one run, seeded; compared with torch alone. Run it by ``scripts/soak``."""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.bars import facts
from tests.carry.harness import Kind, Reference, carry, expected, schedule

STEPS = 8  # between two faults, about


def one(ranks: int) -> int:
    return 1


def shared(batches: int) -> Callable[[int], int]:
    """An epoch of so many batches, which the ranks share."""
    return lambda ranks: batches // ranks


# script -> number of ranks -> the steps that its argument counts, at least
COUNTED: dict[str, Callable[[int], int]] = {
    "augment": shared(24),
    "checkpointing": one,
    "ddp_loader": shared(24),
    "early_stopping": lambda ranks: 6,
    "ema_all": one,
    "functional": one,
    "gpt_loop": one,
    "hook_fp16": one,
    "iterable": lambda ranks: 6,
    "metrics_after": one,
    "norms": one,
    "objects": one,
    "permutation": lambda ranks: 10,
    "plain_allreduce": one,
    "scaler": one,
    "subgroups": one,
    "trainer": shared(18),
    "unused": one,
    "workers": shared(24),
}
# Where all members of a smaller group may die at once, nobody is left who has its results.
VICTIMS = {"subgroups": (2,)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run it.

    Returns:
        0: all was the same; 1: it was not, or the run failed.
    """
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--faults", type=int, default=100, help="moments at which a rank is killed")
    parser.add_argument("--seed", type=int, default=None, help="of the moments (default: drawn)")
    parser.add_argument("--script", choices=sorted(COUNTED), default="ddp_loader")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for the whole run")
    parser.add_argument("--out", type=Path, help="JSON file that the run's result is added to")
    given = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(2**31) if given.seed is None else given.seed
    again = f"scripts/soak --faults {given.faults} --seed {seed} --script {given.script}"
    if given.ranks != 3:
        again += f" --ranks {given.ranks}"
    print(f"soak: {again}", flush=True)
    length = (given.faults + 2) * STEPS // COUNTED[given.script](given.ranks) + 1
    victims = VICTIMS.get(given.script, ())
    kind = Kind(given.script, (str(length),), victims=victims, timeout=given.timeout)
    began, of_this_run = time.monotonic(), facts()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        reference = Reference()
        try:
            wanted = expected(reference, kind, folder / "undisturbed", given.ranks)
        finally:
            reference.close()
        strikes = schedule(seed, wanted.steps, given.faults, victims=victims)
        try:
            carry(None, kind, wanted, folder / "struck", strikes, given.ranks)
        except (AssertionError, TimeoutError) as error:
            print(f"{error}\nsoak: FAILED after {time.monotonic() - began:.0f} s; again: {again}")
            return 1
    killed = sum(len(strike.victims) for strike in strikes)
    if given.out is not None:
        runs = json.loads(given.out.read_text()) if given.out.exists() else []
        runs.append(
            {
                "command": again,
                **of_this_run,
                "strikes": [str(strike) for strike in strikes],
                "processes killed": killed,
                "results equal": len(wanted.results),
                "seconds": round(time.monotonic() - began, 1),
            }
        )
        given.out.write_text(json.dumps(runs, indent=1) + "\n")
    print(
        f"soak: {len(strikes)} faults ({killed} processes), {len(wanted.results)} results equal,"
        f" {time.monotonic() - began:.0f} s"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
