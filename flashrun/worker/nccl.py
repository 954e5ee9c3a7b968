"""NCCL behind the communicator interface, for torch 2.13's ``ProcessGroupNCCL``.

It has NOT run on a GPU. What can be tried without one, has been: `Queued` holds all that is not a
call of CUDA, and the tests drive it with a double that behaves as ``ProcessGroupNCCL`` is
documented to (tests/double). `Nccl` and `CudaMark` are written against torch 2.13's sources
(``torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp``) and have tests marked ``gpu``.

What is different from gloo, and where it is dealt with:

- Operations queue on a stream. ``Work.wait`` only makes the caller's stream wait: `CudaMark` puts
  an event behind the operation, which the host waits for.
- A dead peer is silence: kernels spin until ``abort``. Timeouts are ours (`_Watch`), since torch's
  own watchdog would end the process (it is told not to, see `Nccl.make`).
- ``abort`` makes whatever was queued end, with anything in the outputs: no end that comes after
  the abort has begun is taken for a completion (`_Handle.wait`).
- ``ncclCommInitRank`` waits for its peers for ever: it runs on a thread of its own, and is aborted
  when the generation is superseded.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, ClassVar, Protocol

import torch
from torch._C import _distributed_c10d as c10d

from flashrun.worker.communicator import Handle, meet

_LOOKS_PER_TIMEOUT = 20
_LONGEST_LOOK, _CONNECT_LOOK = 1.0, 0.005  # s


class Mark(Protocol):
    """A point on the device's stream, behind an operation."""

    def wait(self) -> None:
        """Block the host until the device has passed it."""

    def passed(self) -> bool: ...


class CudaMark:
    """An event behind `work`, on a stream that has nothing else to do: waiting for it does not wait
    for what the script has queued since."""

    _streams: ClassVar[dict[int, Any]] = {}  # device -> stream

    def __init__(self, work: Any) -> None:
        cuda: Any = torch.cuda
        device = cuda.current_device()
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = cuda.Stream(device)
        with cuda.stream(stream):
            work.wait()
            self._event = cuda.Event()
            self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()

    def passed(self) -> bool:
        return bool(self._event.query())


class _Failed:
    """An operation that could not even be issued: the communicator is broken."""

    def __init__(self, error: Exception) -> None:
        self._text = str(error)

    def wait(self) -> Any:
        raise RuntimeError(self._text)

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        _fail(future, self._text)
        return future


class _Handle:
    """See `Handle`. Holds the arguments, so that no memory that the device still works on is given
    to anybody else."""

    __slots__ = ("_args", "_good", "_mark", "_owner", "_work")

    def __init__(self, owner: Queued, args: tuple[Any, ...], work: Any, mark: Mark) -> None:
        self._owner = owner
        self._args = args
        self._work = work
        self._mark = mark
        self._good = False

    def wait(self) -> bool:
        if not self._good:
            self._mark.wait()
            # The flag is up before the abort begins: where it is down now, the operation has ended
            # by itself.
            self._owner.raise_if_aborted()
            self._good = True
        self._work.wait()  # and what the caller queues from here on comes after it
        return True

    def is_completed(self) -> bool:
        return self._mark.passed()

    def get_future(self) -> Any:
        return self._owner.future(self)


class _Watch:
    """Sees operations that take too long. It holds marks, not tensors."""

    def __init__(self, timeout: timedelta, late: Callable[[str, float], None]) -> None:
        self.timeout = timeout.total_seconds()
        self._late = weakref.WeakMethod(late)
        self._open: deque[tuple[float, str, Mark]] = deque()
        self.closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flashrun-late", daemon=True)

    def add(self, kind: str, mark: Mark) -> None:
        self._open.append((time.monotonic(), kind, mark))
        if self._thread.ident is None:
            self._thread.start()

    def _run(self) -> None:
        while not self.closed.wait(min(_LONGEST_LOOK, self.timeout / _LOOKS_PER_TIMEOUT)):
            while self._open and self._open[0][2].passed():
                self._open.popleft()
            if self._open and time.monotonic() - self._open[0][0] > self.timeout:
                late = self._late()
                if late is not None:
                    late(self._open[0][1], self.timeout)
                return


class Queued:
    """A group whose operations queue on a stream, end in order, and are silent about dead peers.

    Args:
        group: with ``ProcessGroupNCCL``'s methods.
        mark: puts a mark behind the operation it is given.
        timeout: for one operation.
    """

    ordered = True

    def __init__(self, group: Any, mark: Callable[[Any], Mark], timeout: timedelta) -> None:
        self._group = group
        self._mark = mark
        self._aborting = threading.Lock()
        self._why = ""  # why it was aborted; "": it was not
        self._watch = _Watch(timeout, self._late)
        self._asked: SimpleQueue[tuple[_Handle, Any] | None] = SimpleQueue()
        self._answers: threading.Thread | None = None

    def __del__(self) -> None:
        self._watch.closed.set()
        self._asked.put(None)

    def issue(self, kind: str, args: tuple[Any, ...]) -> Handle:
        for options in args:
            # The other way runs on the caller's own stream and gives no work to wait for
            # (ProcessGroupNCCL.cpp, collective(): "asyncOp").
            if hasattr(options, "asyncOp"):
                options.asyncOp = True
        try:
            self.raise_if_aborted()
            work = getattr(self._group, kind)(*args)
            mark = self._mark(work)
        except (torch._C._DistError, _Aborted) as error:
            return _Failed(error)
        except RuntimeError as error:
            if not self._why:
                raise
            return _Failed(error)
        self._watch.add(kind, mark)
        return _Handle(self, args, work, mark)

    def raise_if_aborted(self) -> None:
        if self._why:
            raise _Aborted(self._why)

    def abort(self, why: str = "the communicator was aborted") -> None:
        with self._aborting:
            if self._why:
                return
            self._why = why
            self._watch.closed.set()
        self._group.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        self._watch.timeout = timeout.total_seconds()

    def _late(self, kind: str, timeout: float) -> None:
        self.abort(f"Timed out waiting {timeout * 1e3:.0f}ms for {kind} to complete")

    def future(self, handle: _Handle) -> Any:
        """A thread waits for those operations that somebody wants to hear of, in their order."""
        future: Any = torch.futures.Future()
        if self._answers is None:
            self._answers = threading.Thread(
                target=_answer, args=(self._asked,), name="flashrun-futures", daemon=True
            )
            self._answers.start()
        self._asked.put((handle, future))
        return future


def _answer(asked: SimpleQueue[tuple[_Handle, Any] | None]) -> None:
    while (entry := asked.get()) is not None:
        handle, future = entry
        del entry
        try:
            handle.wait()
        except RuntimeError as error:
            _fail(future, str(error))
        else:
            future.set_result(None)
        del handle, future


def _fail(future: Any, text: str) -> None:
    """As ``Future.set_exception`` (torch/futures, 2.13), which keeps the exception, and with it the
    frames that it is raised through, and their tensors, for as long as the future lives."""

    def unwrap(_: Any) -> None:
        raise RuntimeError(text)

    future._set_unwrap_func(unwrap)
    future.set_result(None)


class _Aborted(RuntimeError):
    """An operation that ended because its communicator was aborted, or may have."""


# What torch's own threads would do about a late or failed operation: end the process.
_OWN_HANDLING = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",  # an abort ends ncclCommInitRank
}


@contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Nccl(Queued):
    """One ``ProcessGroupNCCL``. Not tried on a GPU, see the module."""

    @classmethod
    def make(
        cls, store: Any, rank: int, size: int, timeout: timedelta, wanted: Callable[[], None]
    ) -> Nccl:
        """See `Maker`. The device is the current one, as for a script that calls ``set_device``."""
        device = torch.device("cuda", torch.cuda.current_device())
        meet(store, rank, size, None, timeout.total_seconds(), wanted)
        nccl: Any = c10d
        options = nccl.ProcessGroupNCCL.Options()
        options._timeout = timeout
        with _variables(_OWN_HANDLING):  # read by the constructor
            group = nccl.ProcessGroupNCCL(nccl.PrefixStore("nccl", store), rank, size, options)
        _connect(group, device, wanted)
        return cls(group, CudaMark, timeout)


def _connect(group: Any, device: torch.device, wanted: Callable[[], None]) -> None:
    """``ncclCommInitRank``, given up when `wanted` says so."""
    failures: list[Exception] = []

    def connect() -> None:
        try:
            group.eager_connect_single_device(device)
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=connect, name="flashrun-connect", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_CONNECT_LOOK)
        try:
            wanted()
        except BaseException:
            group.abort()
            raise
    if failures:
        raise failures[0]
