"""The interface of the replay half towards the worker runtime.

The runtime (``flashrun.worker.runtime``) owns one `Replay` per process and calls it like this:

    first incarnation       start_recording(rt)  at_boundary(rt, 1), at_boundary(rt, 2), ...
    replacement             start_catchup(rt)    at_boundary(rt, 1), ..., finish_catchup(rt, B)
                            and from there on as a live incarnation: at_boundary(rt, B + 1), ...

A replacement calls `after_state` once the state has come, before the script goes on.

`Replay` wraps ``Optimizer.profile_hook_step`` too: a hook that was made from the unwrapped one must
be in place before `start_*` (it is then wrapped), or be made after it.

`start_*` come after ``import torch`` and before the first line of the script. `at_boundary` comes
after every outer optimizer step, in either mode, with ``rt.boundary`` already equal to ``b``.
`finish_catchup` comes at the target boundary right after ``at_boundary(rt, B)``, on the main
thread, before state is received from peers; when it returns ``rt.mode`` may become LIVE.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from flashrun.worker.replay.session import Session


WORLD_UNTIL = 2  # the outside world's answers are logged up to this boundary


class Mode(enum.Enum):
    """What this process is doing: training with its peers, or replaying towards them."""

    LIVE = "live"
    CATCHUP = "catchup"


class Divergence(RuntimeError):
    """The replay can't be exact: the script did something else than the log says, or the log is
    damaged or too short. The runtime answers with tier 3 and this text as the reason."""


class OtherNodes(Protocol):
    """Asks the workers of the other nodes (of each, any one); each call waits for its answer, and
    raises `Divergence` where it does not come. Requests and answers are JSON objects."""

    def numbers(self) -> list[int]:
        """The nodes."""

    def name(self, number: int) -> str:
        """A node, for people."""

    def ask(self, requests: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Several nodes side by side."""

    def copy(self, number: int, request: dict[str, Any], path: str) -> dict[str, Any]:
        """As `ask`, and put the bytes that come with the answer into a file."""


class RuntimeLike(Protocol):
    """The part of the worker runtime that the replay uses.

    Attributes:
        others: the other nodes of the job; None: there are none.
    """

    mode: Mode
    boundary: int  # the last step boundary reached; 0 before the first step
    rank: int
    world_size: int
    incarnation: int

    @property
    def others(self) -> OtherNodes | None: ...

    @property
    def run_dir(self) -> Path | str:
        """Folder of the job on this node; outlives the worker, the same for all ranks."""

    def diverged(self, error: BaseException) -> None:
        """End this process, whether catching up or live again: it can't go on exactly (tier 3,
        with the error's text as the reason). Does not return."""

    def fills(self, b: int) -> list[torch.Tensor]:
        """Tensors of this replacement, in places of the script's own, that will get the values
        which the dead worker had at boundary `b`."""

    def log(self, event: Mapping[str, Any]) -> None:
        """Take one structured event. The replay sends

        ``{"event": "recovery-class", "class": "restart-only", "reason": str, "remedy": str}``
            from here on this rank can't be replayed (shared memory full, old file not kept);
        ``{"event": "replay-warning", "reason": str}``
            something that is worth a line, with no consequence for correctness.
        """


class Replay:
    """Records what a worker's script saw of the world and replays it in a replacement.

    Attributes:
        real_stderr_fd: in catch-up a duplicate of the real standard error (the descriptors 1 and 2
            of the process are muted), otherwise None. The runtime's own messages may go there.
        target: in catch-up the boundary to stop at, once the runtime knows it, else None. While it
            is None or while ``boundary < target - 2`` batches are not fetched. The runtime sets
            it with `set_target` as early as it can; setting it late costs correctness of nothing
            except tensors derived from batches (see `finish_catchup`).
        copied: in catch-up, what the dead worker left is a copy from another node, which may end
            before the dead worker did. Set before `start_catchup`.
    """

    def __init__(self) -> None:
        self._session: Session | None = None
        self.real_stderr_fd: int | None = None
        self.target: int | None = None
        self.copied = False

    @property
    def session(self) -> Session:
        if self._session is None:
            raise RuntimeError("neither start_recording nor start_catchup was called")
        return self._session

    def start_recording(self, rt: RuntimeLike) -> None:
        """Open a new log for this rank and install the doors. Never raises for a full or read-only
        `run_dir`: the job then runs unrecorded and ``rt.log`` gets the recovery class."""
        from flashrun.worker.replay.session import Session

        self._session = Session.record(rt)

    def start_catchup(self, rt: RuntimeLike) -> None:
        """Open the log of the dead incarnation and install the doors for reading from it.

        Raises:
            Divergence: there is no usable log of this rank (never opened, other format, restart
                only); reason in the text.
        """
        from flashrun.worker.replay.session import Session

        self._session = Session.catch_up(rt, self)

    def made_since(self) -> str:
        """In a replay: the last path that the script has looked for in vain because it was made
        after that had begun; "" if there was none."""
        view = self._session.view if self._session is not None else None
        return view.made_since() if view is not None else ""

    def failure(self) -> Divergence | None:
        """What has ended a replay, also if the script has made another exception of it."""
        return self._session.failure if self._session is not None else None

    def newest_boundary(self) -> int:
        """The last boundary that the dead incarnation logged (0: died before its first step)."""
        return self.session.newest_boundary()

    def set_target(self, b: int) -> None:
        """Tell the catch-up where it will stop. May be called again with a larger value."""
        self.target = b
        self.session.set_target(b)

    def at_boundary(self, rt: RuntimeLike, b: int) -> None:
        """Log the boundary (live), or compare it with the log (catch-up).

        Raises:
            Divergence: catch-up only.
        """
        self.session.at_boundary(b)

    def finish_catchup(self, rt: RuntimeLike, b: int) -> None:
        """Turn this process into a live incarnation at boundary `b`: living stand-ins get their
        real content, the random states are those of the dead worker at `b` (compared where the log
        has them), the file view and the muting end, the log is cut at `b` and recording goes on.

        Raises:
            Divergence: the states differ, or a stand-in can't be made real.
        """
        self.session.finish(b)
        self.real_stderr_fd = None

    def after_state(self, rt: RuntimeLike, b: int) -> None:
        """Call once the peers' state of boundary `b` is loaded, before the script goes on. Outputs
        of modules that were computed before `b` and are used after it (a GAN's fake batch between
        its two optimizers) are computed now, with the right weights. Issues no collective.

        Raises:
            Divergence: computing one of them takes collectives of its own.
        """
        self.session.after_state()

    def written_by_torch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Call with what C++ has filled in and gives to a collective in backward (DDP's buckets,
        which live on from the replay): it is real, whatever it was before."""
        if self._session is not None and self._session.poison is not None:
            for tensor in tensors:
                self._session.poison.overwritten(tensor)

    def complete_interval(self, b: int) -> None:
        """Call in catch-up at boundary `b`, before collectives of interval `b` are counted, which
        will give what they have given to the survivors (`given`), as far as these have it.

        Raises:
            Divergence: what the interval uses from before can't be had.
        """
        self.session.complete(b)

    def given(self, tensors: Iterable[torch.Tensor]) -> None:
        """Call in catch-up with the results of a collective that were taken from a survivor."""
        if self._session is not None and self._session.unreal is not None:
            self._session.results_given += 1
            for tensor in tensors:
                self._session.unreal.clear(tensor)

    def stood_in(self, tensors: Iterable[torch.Tensor]) -> None:
        """Call in catch-up with the results of a collective that did not take place: this rank's
        own input is in them."""
        if self._session is not None and self._session.unreal is not None:
            self._session.results_missing += 1
            self._session.unreal.mark_all(tensors, "a collective")

    def sent(self, inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]) -> None:
        """Call with what the script gives to a collective and gets from it: what a replay has not
        computed must not reach peers, and what they send is real."""
        if self._session is not None and self._session.poison is not None:
            self._session.poison.sent(inputs, outputs)

    def answer(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], Iterable[memoryview]]:
        """What a replay on another node asks this one (`OtherNodes`); on any thread.

        Raises:
            ConnectionError: not yet.
            LookupError: it can't be had.
        """
        view = self._session.view if self._session is not None else None
        if view is None:
            raise ConnectionError("this worker is only beginning")
        return view.answer(request)

    @property
    def poisoned(self) -> bool:
        """Whether there may be anything that `sent` refuses."""
        return self._session is not None and self._session.poison is not None

    @property
    def computing(self) -> bool:
        """Within `after_state`, which issues no collectives."""
        return self._session is not None and self._session.computing

    def stop(self) -> None:
        """Call when the script and its exit handlers are done: ends the thread of the recording."""
        if self._session is not None and self._session.randomness is not None:
            self._session.randomness.stop()

    def abort_catchup(self) -> None:
        """Undo muting and file view after a `Divergence` or a crash, so that the report of it
        reaches the terminal. The log of the dead incarnation is left as it was."""
        if self._session is not None:
            self._session.abort()
        self.real_stderr_fd = None
