"""Many faults in one run, seeded; compared with torch alone. Run it by ``scripts/soak``."""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.carry.harness import Kind, Reference, carry, expected, schedule

STEPS = 8  # between two faults, about
# kind -> its argument for that many steps
LENGTHS: dict[str, Callable[[int], int]] = {
    "ddp_loader": lambda steps: steps // 8 + 1,
    "gpt_loop": lambda steps: steps,
    "trainer": lambda steps: steps // 6 + 1,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run it.

    Returns:
        0: all was the same; 1: it was not, or the run failed.
    """
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--faults", type=int, default=100, help="moments at which a rank is killed")
    parser.add_argument("--seed", type=int, default=None, help="of the moments (default: drawn)")
    parser.add_argument("--script", choices=sorted(LENGTHS), default="ddp_loader")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for the whole run")
    parser.add_argument("--out", type=Path, help="JSON file that the run's result is added to")
    given = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(2**31) if given.seed is None else given.seed
    again = f"scripts/soak --faults {given.faults} --seed {seed} --script {given.script}"
    if given.ranks != 3:
        again += f" --ranks {given.ranks}"
    print(f"soak: {again}", flush=True)
    length = LENGTHS[given.script]((given.faults + 2) * STEPS)
    kind = Kind(given.script, (str(length),), timeout=given.timeout)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        reference = Reference()
        try:
            wanted = expected(reference, kind, folder / "undisturbed", given.ranks)
        finally:
            reference.close()
        strikes = schedule(seed, wanted.steps, given.faults)
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
