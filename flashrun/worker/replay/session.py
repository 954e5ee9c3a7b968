"""One process's part in recording or replaying: the log, the region it is in, what to do next.

A *region* is a stretch of the script that a replay may skip: the forward of an outermost module,
backward, the optimizer's step, a loader's fetch. Regions of the main thread are numbered. Inside of
one nothing is logged; at its end the log has what it drew. Outside of regions the script really
runs, and every value that enters Python through a door (`doors`, `world`, `objects`) is logged or,
in catch-up, taken from the log.
"""

from __future__ import annotations

import marshal
import os
import struct
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from torch.utils.weak import TensorWeakRef

from flashrun.errors import writing_remedy
from flashrun.worker import own_code
from flashrun.worker.replay import boundaries, kinds, unprofiled, world
from flashrun.worker.replay.api import WORLD_UNTIL, Divergence, RuntimeLike
from flashrun.worker.replay.journal import Reader, Record, Writer
from flashrun.worker.replay.mersenne import LayoutError
from flashrun.worker.replay.muted import Muted
from flashrun.worker.replay.patching import Patches
from flashrun.worker.replay.poison import Poison
from flashrun.worker.replay.randomness import Randomness
from flashrun.worker.replay.recent import Recent
from flashrun.worker.replay.unreal import Loud, Quiet, Unreal, mark_of, tensors_in

if TYPE_CHECKING:
    from flashrun.worker.replay.api import Replay
    from flashrun.worker.replay.fileview import FileView
    from flashrun.worker.replay.loaders import Loaders
    from flashrun.worker.replay.regions import Regions

_BEGAN = struct.Struct("<q")
_RAISED = struct.Struct("<Q")
REAL_INTERVALS = 2  # intervals 0 and 1 run for real, so that lazy state exists
TAIL_INTERVALS = 2  # the last intervals before the target fetch for real
# before the target in which outputs are remembered: as many steps may follow with one in use
OUTPUT_INTERVALS = 16
_TORCH_DATA = os.path.join("torch", "utils", "data") + os.sep


class _Memory:
    """Keeps records for later: what was done past the end of the dead worker's log."""

    def __init__(self) -> None:
        self.records: list[tuple[int, int, bytes]] = []

    def append(self, kind: int, site: int, payload: bytes) -> None:
        self.records.append((kind, site, payload))


class Session:
    """See the module. Created by `record` or `catch_up`; there is one per process."""

    def __init__(self, rt: RuntimeLike, folder: Path) -> None:
        self.rt = rt
        self.folder = folder
        self.main = threading.get_ident()
        self.on = False  # the doors act; False: everything passes through
        self.gave_up = False
        self.forked = False  # this is a child of the worker, while the doors acted
        self.replaying = False
        self.world_on = True  # before boundary WORLD_UNTIL
        self.depth = 0  # > 0: in a region
        self.ordinal = 0
        self.boundary = 0
        self.writer: Writer | None = None
        self.past: _Memory | None = None  # set once the replay is past the end of the log
        self.reader: Reader | None = None
        self.randomness: Randomness | None = None
        self.recent: Recent | None = None
        self.unreal: Unreal | None = None  # in catch-up
        self.poison: Poison | None = None  # after a join, while anything of it is left
        self.carried: list[TensorWeakRef] = []  # right at the last boundary
        self.failure: Divergence | None = None
        self.answers: deque[Record] = deque()  # the outside world's, in the interval in flight
        self.patches = Patches()
        self._unprofiled: Patches | None = None  # in catch-up
        self.view: FileView | None = None
        self.loaders: Loaders | None = None
        self.regions: Regions | None = None
        self.muted: Muted | None = None
        self.target: int | None = None
        self.completing = -1  # the interval that `completes`
        self.computing = False  # outputs, after a join
        self.results_given = self.results_missing = 0  # collectives that gave those, or could not
        self.began = 0  # ns of the epoch; when the script began
        self.copied = False  # the log is a copy from another node
        self.uncertain = -1  # the interval in which what the dead worker did may not be known
        self._newest = 0
        self._opened = 0  # open draw records seen
        self._sites: dict[tuple[int, int], int] = {}
        self._codes: list[CodeType] = []  # keeps the ids in _sites from being used again
        self._names: dict[int, str] = {}

    # --- the two ways to start

    @classmethod
    def record(cls, rt: RuntimeLike) -> Session:
        """Begin a new log and install the doors; on failure the job runs without a log."""
        folder = _folder(rt)
        session = cls(rt, folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "restart-only").unlink(missing_ok=True)
            session._keep_code()
            session.writer = Writer(folder)
            session.randomness = Randomness(folder, create=True)
            session.recent = Recent(folder, create=True)
            session.began = time.time_ns()
            began = _BEGAN.pack(session.began)
            session.writer.append(kinds.INIT, 0, began + session.randomness.whole())
            session.on = True
        except (OSError, LayoutError) as error:
            session.give_up(f"no host-read log: {error}", writing_remedy(error, folder))
        session._install()
        return session

    @classmethod
    def catch_up(cls, rt: RuntimeLike, api: Replay) -> Session:
        """Open the log of the dead incarnation and install the doors.

        Raises:
            Divergence: it can't be used.
        """
        folder = _folder(rt)
        session = cls(rt, folder)
        session.copied = api.copied
        marker = folder / "restart-only"
        if marker.exists():
            raise Divergence(marker.read_text())
        try:
            session._keep_code()
            session.reader = Reader(folder)
            session.randomness = Randomness(folder, create=False)
            session.recent = Recent(folder, create=False)
        except own_code.CodeChanged as error:
            raise Divergence(str(error)) from error
        except (OSError, ValueError, LayoutError) as error:
            reason = f"the host-read log of rank {rt.rank} can't be used: {error}"
            raise Divergence(reason) from error
        first = session.reader.take()
        if first is None or first.kind != kinds.INIT:
            raise Divergence(f"the host-read log of rank {rt.rank} has no beginning")
        (session.began,) = _BEGAN.unpack_from(first.payload)
        session.randomness.restore_whole(first.payload[_BEGAN.size :])
        session.randomness.rebase()
        session._newest = session.randomness.newest_boundary()
        session.replaying = session.on = True
        session.unreal = Unreal(session)
        session._unprofiled = unprofiled.install()
        session._install()
        session.muted = Muted()
        api.real_stderr_fd = session.muted.stderr
        return session

    def _keep_code(self) -> None:
        """See `OwnCode.settle`."""
        mine = own_code.own_code
        if mine is None:
            return
        mine.on_failure = lambda error: self.give_up(
            f"the script's code can't be kept: {error}", writing_remedy(error, self.folder)
        )
        mine.settle(list(sys.modules.values()))

    def _install(self) -> None:
        from flashrun.worker.replay import (
            doors,
            leaks,
            loaders,
            objects,
            regions,
            saved,
            shapes,
            threads,
        )
        from flashrun.worker.replay.fileview import FileView

        doors.install(self)
        shapes.install(self)
        self.regions = regions.install(self)
        self.loaders = loaders.install(self)
        world.install(self)
        objects.install(self)
        self.view = FileView(self)
        self.view.install()
        saved.install(self)
        leaks.install(self)
        threads.install(self)
        os.register_at_fork(after_in_child=self._in_child)

    def _in_child(self) -> None:
        # A forked child (a loader worker, one that saves in the background) has no log; its file
        # view stays, and what it changes is registered.
        self.forked = self.forked or self.on
        self.on = False

    # --- failures

    def give_up(self, reason: str, remedy: str) -> None:
        """From here on this rank can't be replayed; say so once and go on training."""
        if self.forked:  # the channel is its parent's; a replacement finds the reason
            self.forked = False
            self._mark(reason)
            return
        self.on = False
        if self.gave_up:
            return
        self.gave_up = True
        self.rt.log(
            {
                "event": "recovery-class",
                "class": "restart-only",
                "reason": reason,
                "remedy": remedy,
            }
        )
        self._mark(reason)

    def _mark(self, reason: str) -> None:
        """Nobody can replay what this rank has left."""
        try:
            (self.folder / "restart-only").write_text(reason)
        except OSError:
            # a full file system: the log itself must then not be mistaken for a whole one
            for path in self.folder.glob("log.*"):
                path.unlink()

    def warn(self, reason: str) -> None:
        self.rt.log({"event": "replay-warning", "reason": reason})

    def diverged(self, what: str, frame: FrameType | None = None) -> Divergence:
        """A `Divergence` that ends the replay, also where the script catches it."""
        place = f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
        self.failure = Divergence(
            f"rank {self.rt.rank}: {what}{place} (interval {self.boundary}, log record "
            f"{self.reader.count if self.reader else 0})"
        )
        return self.failure

    # --- the log

    def site(self, frame: FrameType) -> int:
        """A number for the line of `frame`, the same in every incarnation."""
        code = frame.f_code
        key = (id(code), frame.f_lasti)
        known = self._sites.get(key)
        if known is None:
            known = zlib.crc32(f"{code.co_filename}:{frame.f_lineno}".encode())
            self._sites[key] = known
            self._codes.append(code)
            self._names[known] = f"{code.co_filename}:{frame.f_lineno}"
        return known

    def append(self, kind: int, site: int, payload: bytes) -> None:
        """Append a record; a log that can't grow ends the recording, not the job."""
        if self.writer is None:
            if self.past is not None:
                self.past.append(kind, site, payload)
            return
        try:
            self.writer.append(kind, site, payload)
        except OSError as error:
            self.give_up(
                f"the host-read log can't grow: {error}",
                writing_remedy(error, self.folder.parent),
            )

    def peek(self) -> Record | None:
        """The next record, None past the end of the log."""
        if self.reader is None or self.past is not None:
            return None
        record = self.reader.peek()
        if record is None:
            self.past = _Memory()
        return record

    def take(self) -> None:
        if self.reader is not None:
            self.reader.take()

    def read(
        self, kind: int, frame: FrameType, real: Callable[[], Any], of: Iterable[Any] = ()
    ) -> Any:
        """The value that the dead worker read here.

        Args:
            kind: which door.
            frame: the caller.
            real: gives the value of this process, where there is no logged one.
            of: what is read; past the log's end it must be real.

        Raises:
            Divergence: the log has another read here, or none although it matters.
        """
        site = self.site(frame)
        record = self.peek()
        if record is None:
            # A loader's or sampler's seed is drawn from a state that is right.
            if _TORCH_DATA not in frame.f_code.co_filename:
                self.past_the_end(kind, frame, of)
            value = real()
            self.append(kind, site, marshal.dumps(value))
            return value
        self._check(record, kind, site, frame)
        self.take()
        return marshal.loads(record.payload)

    def past_the_end(self, kind: int, frame: FrameType, of: Iterable[Any]) -> None:
        """A read that the dead worker had not come to: it gives what it would have given if what
        is read is real.

        Raises:
            Divergence: it is not.
        """
        sources = [mark for t in tensors_in(of) if (mark := mark_of(t)) is not None]
        if not self.completes() or sources:
            made = f" of what the replay does not compute ({sources[0]})" if sources else ""
            raise self.diverged(
                f"the dead worker's log ends before the read '{kinds.name(kind)}'{made}", frame
            )

    def _check(self, record: Record, kind: int, site: int, frame: FrameType) -> None:
        if record.kind != kind:
            raise self.diverged(
                f"the script reads '{kinds.name(kind)}' where the log has "
                f"'{kinds.name(record.kind)}' {self._names.get(record.site, '')}",
                frame,
            )
        if record.site != site:
            raise self.diverged(
                f"the script reads '{kinds.name(kind)}' where the log has one from "
                f"{self._names.get(record.site, 'another line')}",
                frame,
            )

    def given(self, kind: int, frame: FrameType) -> bytes | None:
        """Live, in the interval in flight: the answer that the dead worker got here. It may have
        told others, so this is the answer now as well; it is logged again."""
        if not self.answers:
            return None
        record = self.answers.popleft()
        try:
            self._check(record, kind, self.site(frame), frame)
        except Divergence as error:
            self.refuse(str(error))
        self.append(kind, record.site, record.payload)
        return record.payload

    def expect(self, kind: int, frame: FrameType) -> Record | None:
        """Take the next record, which must be of `kind` and from this line; None past the end."""
        record = self.peek()
        if record is not None:
            self._check(record, kind, self.site(frame), frame)
            self.take()
        return record

    # --- unreal values

    def quiet(self) -> Quiet:
        """For work of the replay's own, which `unreal` does not follow."""
        return Quiet(self.unreal)

    def loud(self) -> Loud:
        """For work of the script within that."""
        return Loud(self.unreal)

    # --- regions

    def here(self) -> bool:
        """On the main thread and outside of any region, with the doors acting."""
        return self.on and not self.depth and threading.get_ident() == self.main

    def run_region(self, real: Callable[[], Any]) -> tuple[Any, int]:
        """Run a region live; returns its value and its ordinal."""
        self.ordinal = ordinal = self.ordinal + 1
        randomness = self.randomness
        if randomness is None or self.replaying:
            raise RuntimeError("run_region is for a recording session")
        randomness.begin()
        depth = self.depth
        self.depth = 1
        try:
            value = real()
        except BaseException:
            self.depth = depth
            self._end(ordinal)
            self.append(kinds.RAISED, 0, _RAISED.pack(ordinal))
            raise
        self.depth = depth
        if randomness.moved():
            self._end(ordinal)
        return value, ordinal

    def _end(self, ordinal: int) -> None:
        if self.writer is not None and self.randomness is not None and self.on:
            try:
                self.randomness.end(ordinal, self.writer)
            except OSError as error:
                self.give_up(
                    f"the host-read log can't grow: {error}",
                    writing_remedy(error, self.folder.parent),
                )

    def replay_region(
        self,
        real: Callable[[], Any],
        decide: Callable[[bool], Callable[[], Any] | None],
        strict: bool = False,
    ) -> tuple[Any, int]:
        """Run a region in catch-up, for real or skipped. Where the log ends it is always real.

        Args:
            real: what the script does.
            decide: told whether the region drew; gives what to do in its place, None for the real
                thing.
            strict: a real run must draw what the log says (a fetch); otherwise the log counts.

        Raises:
            Divergence: see above, or the region raised in one of the two and not in the other.
        """
        self.ordinal = ordinal = self.ordinal + 1
        randomness = self.randomness
        if randomness is None:
            raise RuntimeError("no generators")
        drawn = []
        if self.peek() is not None and self.reader is not None:
            drawn = randomness.take(ordinal, self.reader)
            self._opened += sum(1 for r in drawn if r.kind == kinds.DRAWS_OPEN)
        skip = decide(bool(drawn))
        following = self.peek()
        raises = (
            following is not None
            and following.kind == kinds.RAISED
            and _RAISED.unpack(following.payload)[0] == ordinal
        )
        if raises:
            self.take()
        if skip is not None and following is not None and not raises:
            randomness.apply(drawn)
            return skip(), ordinal
        whole = randomness.whole()
        depth, self.depth = self.depth, 1
        randomness.begin()
        raised: BaseException | None = None
        value = None
        try:
            value = real()
        except BaseException as error:
            raised = error
            if isinstance(error, Divergence):
                self.failure = error
                raise
        finally:
            self.depth = depth
        if following is None:  # the log ends in this region: what it drew is the real thing
            if self.past is None:
                self.past = _Memory()
            randomness.end_past(ordinal, self.past, {r.payload[8] for r in drawn})
        else:
            got = randomness.whole()
            randomness.restore_whole(whole)
            randomness.apply(drawn)
            if strict and randomness.whole() != got:
                raise self.diverged("fetching a batch drew other random numbers than before")
        if raised is not None and not raises and following is not None:
            raise self.diverged(f"a step of the script raised {raised!r} only in the replay")
        if raised is None and raises:
            raise self.diverged("a step of the script raised an exception, but not in the replay")
        if raised is not None:
            raise raised
        return value, ordinal

    # --- boundaries

    def newest_boundary(self) -> int:
        return self._newest

    def set_target(self, b: int) -> None:
        self.target = b

    def starting(self) -> bool:
        """In the first intervals, which run for real."""
        return self.boundary < REAL_INTERVALS

    def completes(self) -> bool:
        """In an interval whose collectives give real results (`completion`)."""
        return self.completing == self.boundary

    def complete(self, b: int) -> None:
        """See `Replay.complete_interval`."""
        self.completing = b
        if self.regions is not None:
            self.regions.outputs.before_completion()

    def near_target(self) -> bool:
        """In the last intervals before the target. While it is unknown it may be any from the
        log's last boundary but one."""
        return self._within(TAIL_INTERVALS)

    def remembers_outputs(self) -> bool:
        """In the intervals whose outputs may be in use where the replay ends."""
        return self._within(OUTPUT_INTERVALS)

    def _within(self, intervals: int) -> bool:
        target = self.target if self.target is not None else self._newest - 1
        return self.boundary >= target - intervals

    def at_boundary(self, b: int) -> None:
        """See `Replay.at_boundary`."""
        self.boundary = b
        if b >= WORLD_UNTIL:
            self.world_on = False
        if not self.on or self.randomness is None:
            return
        self.randomness.note_cuda()
        if self.replaying:
            if self.failure is not None:
                raise self.failure  # the script caught it
            boundaries.compare(self, self.randomness, b)
        else:
            boundaries.log(self, self.randomness, b)

    def finish(self, b: int) -> None:
        """See `Replay.finish_catchup`."""
        randomness = self.randomness
        if not self.replaying or randomness is None or self.reader is None:
            raise RuntimeError("finish_catchup without start_catchup")
        if self.boundary != b:
            raise Divergence(f"asked to go live at boundary {b}, but this is {self.boundary}")
        whole = randomness.whole()
        logged = randomness.boundary_state(b)
        if logged is not None and self.past is None and logged != whole:
            raise self.diverged(f"the random states at boundary {b} are not the logged ones")
        hoped = self.regions.outputs.keep_usable() if self.regions is not None else set()
        if self.loaders is not None:
            self.loaders.make_real()
            self.loaders.forget()
        randomness.restore_whole(whole)
        self._find_poison(b, hoped)
        here = self.reader.here
        self.answers = world.in_flight(self.reader) if self.past is None else deque()
        try:
            self.writer = Writer(self.folder, here)
            randomness.drop_after(b, self._opened)
            for kind, site, payload in self.past.records if self.past else ():
                self.writer.append(kind, site, payload)
            randomness.keep(b, randomness.whole())
        except OSError as error:
            self.give_up(
                f"the host-read log can't grow: {error}", writing_remedy(error, self.folder)
            )
        randomness.rebase()
        if self.view is not None:
            self.view.end_replay()
        if self.muted is not None:
            self.muted.end()
            self.muted = None
        if self._unprofiled is not None:
            self._unprofiled.undo()
        self.replaying = False
        self.past = None
        if self.copied:
            self.uncertain = b

    def _find_poison(self, b: int, hoped: set[int]) -> None:
        """See what is still unreal: the rest of it must not be used."""
        if self.unreal is None or self.regions is None:
            return
        if self.regions.steps.accumulates:
            raise self.diverged(
                "an optimizer steps with gradients that are not zeroed between its steps, and "
                "nobody has those of this boundary; zero them after or before each step"
            )
        self.unreal.end()
        self.unreal = None
        self.regions.forget()
        self.poison = Poison(self, b)
        restored = [*(ref() for ref in self.carried), *self.rt.fills(b)]
        self.poison.find(list(self.regions.steps.known), restored, hoped)

    def after_state(self) -> None:
        """See `Replay.after_state`."""
        if self.regions is None or self.poison is None:
            return
        self.computing = True
        try:
            real = self.regions.outputs.after_state(self.poison.unreal())
        finally:
            self.computing = False
        if self.randomness is not None:
            self.randomness.rebase()
        if not self.poison.spread(real):
            self.poison = None

    def refuse(self, what: str) -> NoReturn:
        """Live, after a join: the script is about to use what could not be made real. The process
        ends, so that nobody can catch this."""
        self.rt.diverged(self.diverged(what))
        raise RuntimeError(what)  # not reached: `diverged` does not return

    def abort(self) -> None:
        """See `Replay.abort_catchup`."""
        self.on = False
        if self.view is not None:
            self.view.abort()
        if self.muted is not None:
            self.muted.end()
            self.muted = None


def _folder(rt: RuntimeLike) -> Path:
    return Path(rt.run_dir) / "replay" / f"rank{rt.rank}"
