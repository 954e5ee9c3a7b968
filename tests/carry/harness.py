"""Runs a script through the launcher, strikes at seeded moments, and compares with torch alone.

The scripts know nothing of it. Where a rank is, is seen by the line that it prints for each step; a
moment is "a little after rank q has printed its k-th line", drawn from a seed.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashrun.node import tags
from flashrun.node.process_tree import read_tag
from tests import helpers
from tests.jobs import Job, running

SCRIPTS = Path(__file__).parent / "scripts"
# Replicas are proved at the second boundary; what is lost before has tests of its own.
FIRST = 3
_LINE = re.compile(rb"^rank (\d+) step (\d+) ", re.MULTILINE)
_SAID = re.compile(r"^rank (\d+) (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Kind:
    """One script and what is expected of it.

    Attributes:
        script: file in scripts/, without ``.py``.
        before: arguments of a run that comes first in the same folder (by torch alone).
        restart: in-place recovery is not to be had, and the launcher gives a reason that matches
            this; "" where survivors must stay.
        either: a strike may be carried in place as well.
        victims: only these are killed; () for all.
        strikes: moments at which somebody is killed.
        after: the share of the run before which there is none.
        lines: how many lines a rank prints for each boundary, at most.
        needs: modules without which it can't run.
        timeout: seconds for one run; never reached on the way to success.
        unlike: keys of JSON files and results that are times.
    """

    script: str
    args: tuple[str, ...] = ()
    before: tuple[str, ...] | None = None
    restart: str = ""
    either: bool = False
    victims: tuple[int, ...] = ()
    strikes: int = 3
    after: float = 0.0
    lines: int = 1
    needs: tuple[str, ...] = ()
    slow: bool = False
    timeout: float = 60.0
    unlike: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Strike:
    """SIGKILL to ``victims``, ``delay`` seconds after rank ``seen`` has printed step ``step``."""

    seen: int
    step: int
    victims: tuple[int, ...]
    delay: float

    def __str__(self) -> str:
        who = " and ".join(map(str, self.victims))
        return f"{self.delay * 1e3:.2f} ms after step {self.step} of rank {self.seen}: rank {who}"


@dataclass
class Expected:
    """What torch alone gives: results by name, and the lines and steps that each rank prints."""

    results: dict[str, str]
    steps: dict[int, list[int]] = field(default_factory=dict)
    lines: Counter[tuple[str, str]] = field(default_factory=Counter)


class Reference:
    """The process of reference.py."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("reference.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=helpers.clean_environment({"OMP_NUM_THREADS": "1", **quiet()}),
        )  # fmt: skip

    def run(self, kind: Kind, folder: Path, args: Sequence[str], world: int) -> dict[int, str]:
        """Run it to its end; what each rank has printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        output = folder.with_name(folder.name + ".output")
        request = {
            "script": str(SCRIPTS / f"{kind.script}.py"), "args": list(args), "world": world,
            "folder": str(folder), "port": helpers.free_port(), "output": str(output),
        }  # fmt: skip
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        shown = {
            rank: Path(f"{output}.{rank}").read_text() for rank in range(world)
        }  # fmt: skip
        assert answer and not any(json.loads(answer)), (answer, shown)
        return shown

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate()


def quiet() -> dict[str, str]:
    """Frameworks that would ask the network, or draw bars."""
    return {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}


def prepare(reference: Reference | None, kind: Kind, folder: Path, world: int) -> None:
    """The folder that a run begins with."""
    folder.mkdir(parents=True)
    if kind.before is not None:
        assert reference is not None
        reference.run(kind, folder, kind.before, world)


def expected(reference: Reference, kind: Kind, folder: Path, world: int) -> Expected:
    """The undisturbed run."""
    prepare(reference, kind, folder, world)
    shown = reference.run(kind, folder, kind.args, world)
    steps = {
        rank: [int(step) for who, step in _LINE.findall(text.encode()) if int(who) == rank]
        for rank, text in shown.items()
    }
    lines = Counter(_SAID.findall("\n".join(shown.values())))
    return Expected(results(folder, kind.unlike), steps, lines)


class Undisturbed(dict[Kind, Expected]):
    """What torch alone gives, by kind; each computed when it is first asked for."""

    def __init__(self, reference: Reference, folder: Path, world: int) -> None:
        super().__init__()
        self._reference, self._folder, self._world = reference, folder, world

    def __missing__(self, kind: Kind) -> Expected:
        folder = self._folder / str(len(self))
        self[kind] = expected(self._reference, kind, folder, self._world)
        return self[kind]


def brief(job: Job) -> str:
    """What a person needs of a failed run: status, flashrun's own lines, the end of stderr."""
    lines = [line for line in job.err.splitlines() if "debug_logger.cc" not in line]
    own = [line for line in lines if line.startswith("flashrun:")]
    if len(own) > 40:
        own = own[:20] + [f"… {len(own) - 40} lines …"] + own[-20:]
    others = [line for line in lines if not line.startswith("flashrun:")][-60:]
    text = "\n".join([*own, "--- the rest of stderr", *others])
    return f"$ {' '.join(job.command)}\nstatus {job.process.poll()}\n{text}"


def digest(value: Any, folder: Path, unlike: frozenset[str] = frozenset()) -> str:
    """One hash over a nest of tensors and plain values, bit for bit; ``folder`` may differ."""
    hashed = hashlib.sha256()

    def plain(value: Any) -> bytes:
        return repr(value).replace(str(folder), "FOLDER").encode()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            hashed.update(f"{value.dtype}{tuple(value.shape)}".encode())
            hashed.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(value, dict):
            for key in value:
                if key not in unlike:
                    hashed.update(plain(key))
                    add(value[key])
        elif isinstance(value, (list, tuple)):
            hashed.update(str(len(value)).encode())
            for item in value:
                add(item)
        else:
            hashed.update(plain(value))

    add(value)
    return hashed.hexdigest()[:16]


def results(folder: Path, unlike: frozenset[str] = frozenset()) -> dict[str, str]:
    """Every file below ``folder``, and every entry of what torch has saved -> hash."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = str(path.relative_to(folder))
        if path.suffix in (".pt", ".ckpt", ".bin", ".pth"):
            value = torch.load(path, weights_only=False)
            parts = value.items() if isinstance(value, dict) else [("", value)]
            found.update({f"{name}: {key}": digest(part, folder, unlike) for key, part in parts
                          if key not in unlike})  # fmt: skip
        elif path.suffix == ".json":
            found[name] = digest(json.loads(path.read_text()), folder, unlike)
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return found


def differences(wanted: dict[str, str], got: dict[str, str]) -> list[str]:
    """One line for each thing that is not the same."""
    lines = [f"{name}: missing" for name in wanted if name not in got]
    lines += [f"{name}: not in the undisturbed run" for name in got if name not in wanted]
    return lines + [f"{n}: differs" for n in wanted if n in got and wanted[n] != got[n]]


def schedule(
    seed: int,
    steps: dict[int, list[int]],
    count: int,
    after: float = 0.0,
    victims: Sequence[int] = (),
) -> list[Strike]:
    """``count`` moments of a run in order, each with one victim or two (at least once).

    Two strikes are at least three steps of the rank looked at apart, so that a recovery is over
    before the next begins (the phases of a recovery have tests of their own).
    """
    draw = random.Random(seed)
    ranks = sorted(steps)
    length = min(len(lines) for lines in steps.values())
    first = max(FIRST, int(length * after))
    last = max(first + count, int(length * 0.85))
    slots = [first + (last - first) * i // count for i in range(count + 1)]
    found = []
    for i in range(count):
        at = draw.randrange(slots[i], max(slots[i] + 1, slots[i + 1] - 3))
        seen = draw.choice(ranks)
        two = i == count - 2 or (count > 5 and draw.random() < 0.15)
        two = two and len(ranks) > 2 and not victims
        hit = draw.sample(victims or ranks, 2 if two else 1)
        found.append(Strike(seen, steps[seen][at], tuple(hit), draw.uniform(0, 4e-3)))
    return found


class Watched:
    """A job under ``--recovery=in-place`` whose ranks are seen and hit.

    Attributes:
        pids: rank -> the processes that have served it, in order.
        killed: rank -> those of them that were killed (0: the script struck by itself).
        agents: how many agents were killed: what they had just said may be said again.
    """

    def __init__(self, job: Job, world: int) -> None:
        self.job = job
        self.world = world
        self.pids: dict[int, list[int]] = {rank: [] for rank in range(world)}
        self.killed: dict[int, list[int]] = {rank: [] for rank in range(world)}
        self.agents = 0
        self._read = 0
        self._step: dict[int, int] = {}

    def step(self, rank: int) -> int:
        """The last step that the rank has printed, -1 if none."""
        out = self.job.output["out"]
        end = out.rfind(b"\n") + 1
        for who, step in _LINE.findall(out[self._read : end]):
            self._step[int(who)] = int(step)
        self._read = max(end, self._read)
        return self._step.get(rank, -1)

    def await_step(self, rank: int, step: int, timeout: float) -> None:
        self._await(lambda: self.step(rank) >= step, f"step {step} of rank {rank}", timeout)

    def _await(self, condition: Callable[[], bool], what: str, timeout: float) -> None:
        try:
            self.job._await(condition, what, timeout)
        except TimeoutError:
            raise AssertionError(f"{what} never came\n{brief(self.job)}") from None

    def look(self) -> dict[int, int]:
        """rank -> its present process, from the tags of the launcher's children."""
        found = {}
        try:
            children = Path(f"/proc/{self.job.pid}/task/{self.job.pid}/children").read_text()
        except OSError:
            children = ""  # the launcher has ended
        for pid in map(int, children.split()):
            role = tags.role_of(read_tag(pid))  # a zombie has none
            if role.isdigit():
                found[int(role)] = pid
                if pid not in self.pids[int(role)]:
                    self.pids[int(role)].append(pid)
        return found

    def present(self, ranks: Sequence[int]) -> dict[int, int]:
        """The present processes of these ranks, none of them killed; {} if the job has ended."""
        now: dict[int, int] = {}

        def found() -> bool:  # the kernel's list of children may leave some out (proc(5))
            now.update(self.look())
            return self.has_ended() or all(
                now.get(rank, 0) not in (0, *self.killed[rank]) for rank in ranks
            )

        try:
            helpers.wait_until(found, f"processes of ranks {ranks}")
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{brief(self.job)}") from None
        return {} if self.has_ended() else {rank: now[rank] for rank in ranks}

    def has_ended(self) -> bool:
        """Whether the launcher has."""
        return self.job.process.poll() is not None

    def kill(self, ranks: Sequence[int]) -> list[int]:
        """Kill the present processes of these ranks; their pids."""
        now = self.present(ranks)
        for rank, pid in now.items():
            with suppress(ProcessLookupError):  # ended, and the launcher has seen it
                os.kill(pid, signal.SIGKILL)
                self.killed[rank].append(pid)
        return list(now.values())

    def check_lines(self, wanted: Counter[tuple[str, str]], lines: int) -> list[str]:
        """What the ranks have printed that the undisturbed run's did not, or did not so often.

        A replay is muted. What a worker printed after the boundary at which its replacement goes
        live, which is the last one or that before it, is there twice.

        Args:
            lines: for each boundary; 0: all may be there again, since all were restarted.
        """
        got = Counter(_SAID.findall(self.job.out))
        wrong = [f"{line}: missing" for line in wanted if line not in got]
        wrong += [f"{line}: not in the undisturbed run" for line in got if line not in wanted]
        for rank, killed in self.killed.items():
            again = [
                line
                for line, count in (got - wanted).items()
                for _ in range(count)
                if line[0] == str(rank) and line[1].startswith("step ")
            ]
            if lines and len(again) > 2 * lines * len(killed):
                wrong.append(f"killed {len(killed)} times, but printed again: {again}")
        return wrong

    def check_losses(self) -> list[str]:
        """What flashrun has said of the kills, and the processes, that does not fit."""
        wrong = []
        for rank, killed in self.killed.items():
            said = self.job.err.count(f"recovery: rank {rank} lost (SIGKILL); replacing it")
            said += self.lost_after_the_end(rank)
            if not len(killed) <= said <= len(killed) + (self.agents if killed else 0):
                wrong.append(f"rank {rank} was killed {len(killed)} times, {said} were told")
            # One that had run past where the others meet is started again by the machine itself.
            left = [pid for pid in self.pids[rank] if pid not in killed]
            if not (left or self.lost_after_the_end(rank)) or (len(left) > 1 and not killed):
                wrong.append(f"rank {rank} was served by {self.pids[rank]}, killed: {killed}")
        return wrong

    def lost_after_the_end(self, rank: int) -> int:
        """How often the launcher has told that the rank's process was lost when no script ran."""
        return self.job.err.count(f"rank {rank} was lost (SIGKILL) after every script had ended")

    def last(self) -> int:
        """The last step that anybody has printed."""
        return max(self.step(rank) for rank in range(self.world))

    def await_said(self, text: str, stream: str = "out", again: bool = False) -> None:
        """Wait until a worker (``out``) or flashrun (``err``) has said it.

        Args:
            again: from now on; not before.
        """
        try:
            self.job.await_output(text, stream, after=again * len(self.job.output[stream]))
        except TimeoutError:
            raise AssertionError(f"{text!r} never came\n{brief(self.job)}") from None

    def await_replacement(self, rank: int, but: int) -> None:
        """Wait until another process than ``but`` serves the rank."""
        helpers.wait_until(lambda: self.look().get(rank, but) != but, f"another rank {rank}")

    def recoveries(self) -> int:
        """Those that the launcher has told of."""
        return self.job.err.count("recovery: done in")

    def restarts(self) -> int:
        """Those of all workers."""
        return len(set(re.findall(r"restart (\d+) of at most", self.job.err)))

    def await_overcome(self, strikes: int, timeout: float) -> None:
        """Wait until all of these are over: this process may be late by many steps, and two of them
        would be one recovery."""
        self._await(lambda: self.recoveries() + self.restarts() >= strikes,
                    f"the end of strike {strikes}", timeout)  # fmt: skip

    def strike(self, strike: Strike, timeout: float) -> list[int]:
        """Kill the victims at the moment; their pids, none if it is too late."""
        self.await_step(strike.seen, strike.step, timeout)
        until = time.perf_counter() + strike.delay
        while time.perf_counter() < until:
            pass  # a moment within a step, which no event marks
        return self.kill(strike.victims)


@contextmanager
def watched(
    kind: Kind, folder: Path, name: str, world: int, *flags: str
) -> Iterator[Watched]:  # fmt: skip
    """The script under the launcher, in ``folder``, which :func:`prepare` has made."""
    command = [
        *helpers.launcher("flashrun"), "--recovery=in-place", f"--nproc-per-node={world}", *flags,
        str(SCRIPTS / f"{kind.script}.py"), *kind.args,
    ]  # fmt: skip
    environment = {**quiet(), "OMP_NUM_THREADS": "1"}
    with running(command, folder, environment, None, False, True, "in-place") as job:
        yield Watched(job, world)


def carry(
    reference: Reference | None,
    kind: Kind,
    wanted: Expected,
    folder: Path,
    strikes: Sequence[Strike],
    world: int = 3,
    more: Callable[[Watched], None] | None = None,
) -> Job:
    """Run with these strikes and compare everything with the undisturbed run.

    Steps take milliseconds, and on a busy machine this process may be late by more than what is
    left of the run: the last strike may come after the scripts' end, which costs nobody a recovery
    and must change no result either.

    Args:
        reference: needed where the kind has a run before.
        more: strikes itself, after ``strikes``.
    """
    prepare(reference, kind, folder, world)
    # Where this process is late by many steps, several strikes come before the next boundary.
    flags = ["--max-retries=99", *(["--max-restarts=9"] if kind.restart else [])]
    told = "strikes:\n  " + "\n  ".join(map(str, strikes))
    print(told)
    struck: Sequence[int] = ()
    with watched(kind, folder, "j", world, *flags) as run:
        for number, strike in enumerate(strikes, 1):
            run.await_overcome(number - 1, kind.timeout)
            run.look()
            struck = run.strike(strike, kind.timeout)
            if number % 10 == 0:
                print(f"{number} of {len(strikes)} strikes", flush=True)
        if more is not None:
            more(run)
            run.present(range(world))  # whoever was killed has been replaced
        if (not kind.restart or kind.either) and more is None:  # the last look, before the end
            rank = strikes[-1].victims[0] if strikes else 0
            run.await_step(rank, wanted.steps[rank][int(len(wanted.steps[rank]) * 0.92)],
                           kind.timeout)  # fmt: skip
            run.look()
        try:
            status = run.job.wait(kind.timeout)
        except TimeoutError:
            raise AssertionError(f"not ended in {kind.timeout} s\n{brief(run.job)}") from None
        run.job.close()
    text = f"{told}\n{brief(run.job)}"
    assert status == 0, text
    unlike = differences(wanted.results, results(folder, kind.unlike))
    assert not unlike, f"differs from the undisturbed run: {unlike}\n{text}"
    restarts, done = run.restarts(), run.recoveries()
    wrong = run.check_lines(wanted.lines, 0 if restarts else kind.lines)
    if restarts:
        if not kind.restart or not re.search(kind.restart, run.job.err):
            wrong.append(f"restarted, but with no reason {kind.restart!r}")
    elif kind.restart and not kind.either:
        wrong.append("not restarted")
    else:
        wrong += run.check_losses()
    if more is not None:
        if not done:
            wrong.append("there was no recovery")
    else:
        ended = {rank: run.lost_after_the_end(rank) for rank in run.killed}
        late = any(ended.values()) or (bool(strikes) and not struck)
        in_time = len(strikes) - late
        if (restarts if kind.restart and not kind.either else restarts + done) != in_time:
            wrong.append(f"{in_time} strikes: {done} recoveries, {restarts} restarts")
        hits = {rank: 1 + len(killed) - ended[rank] for rank, killed in run.killed.items()}
        if not restarts and {rank: len(pids) for rank, pids in run.pids.items()} != hits:
            wrong.append(f"processes {run.pids}: survivors must keep theirs")
    assert not wrong, f"{wrong}\n{text}"
    shutil.rmtree(folder)
    return run.job


__all__ = [
    "SCRIPTS", "Expected", "Kind", "Reference", "Strike", "Undisturbed", "Watched", "carry",
    "differences", "digest", "expected", "prepare", "quiet", "results", "schedule", "watched",
]  # fmt: skip
