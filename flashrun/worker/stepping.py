"""Within an optimizer's step: whether what this rank has is still the state of its boundary.

A step may wait for others after it has begun to change the state (ZeRO's broadcasts, LBFGS's
closure from its second call on). Whoever is held there has half a step, and can't be a donor: a
loss at such a moment restarts all, which the user is told before it happens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashrun import messages

if TYPE_CHECKING:
    from flashrun.worker.runtime import Runtime


class Stepping:
    """See the module.

    Attributes:
        now: an optimizer may have begun to change the state of the boundary.
        splits: its step has collectives after it has changed something.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._rt = runtime
        self.now = False
        self.splits = False
        self._talks = False  # collectives were issued within a step
        self._looks = True  # whether it splits is not known yet
        self._versions: list[Any] | None = None  # of the state when the step under way began

    def begin(self) -> None:
        """From here on an optimizer may change the state of this boundary."""
        self.now = True
        # Mostly nobody can be held within a step, and that needs not be known.
        first = not self._rt.boundary
        self._versions = self._rt.state.versions() if self._talks or first else None

    def end(self) -> None:
        if self.now and self._talks and self._versions is not None:
            self._looks = False
        self.now = False

    def has_begun(self) -> bool:
        """Whether what is here is not the state of the boundary any more."""
        return self.now and (
            self._versions is None or self._versions != self._rt.state.versions()
        )

    def issues(self) -> None:
        """A collective is issued within it."""
        self._talks = True
        if not self._looks or self._versions is None or not self.has_begun():
            return
        self._looks, self.splits = False, True
        if self._rt.boundary:  # what is found in the first step goes with the first proof
            event = {"event": messages.STEP_SPLITS}
            self._rt.channel.send({"op": "event", "event": event}, standing=messages.STEP_SPLITS)
