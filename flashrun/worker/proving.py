"""When a rank's state is compared with the others' (see `proof`), and when what the script itself
keeps is looked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashrun.worker import proof
from flashrun.worker.state import fingerprint

if TYPE_CHECKING:
    from flashrun.worker.runtime import Runtime


class Proving:
    """See the module."""

    def __init__(self, runtime: Runtime) -> None:
        self._rt = runtime
        self._joined_at = -proof.AFTER_RECOVERY  # where somebody took state from peers last
        self._confirmed_at = -1  # the last boundary after that at which the ranks were compared
        self._gathered = -2, -2  # the last intervals in which the script has gathered something

    def joined(self, b: int) -> None:
        """Somebody takes its state from peers at this boundary."""
        self._joined_at = b

    def confirmed(self, b: int) -> None:
        """The machine has compared the ranks at this boundary (`Runtime.told` is held)."""
        self._confirmed_at = max(self._confirmed_at, b)

    def gathers(self, interval: int) -> None:
        """The script gathers something in this interval."""
        if self._gathered[-1] != interval:
            self._gathered = self._gathered[-1], interval

    def at_boundary(self, b: int, due: bool, settles: bool = False) -> None:
        """A boundary of a live rank that has its state.

        Args:
            due: see `proof.due`.
            settles: ranks of several lines may have become replicas here (see `uneven`).
        """
        rt = self._rt
        confirm = self._joined_at < b <= self._joined_at + proof.AFTER_RECOVERY
        prove = confirm or due
        # An evaluation has begun to gather: the script may keep the pieces in a list for a while.
        began = self._gathered[-1] == b - 1 and self._gathered[0] != b - 2
        if prove or began:
            rt.own.find(rt.state.layout().tensors.values(), small_only=not prove)
        rt.own.at_boundary(b)
        if prove:
            self._prove(confirm, settles)

    def _prove(self, confirm: bool, settles: bool) -> None:
        """Let the machine compare the ranks' states.

        Args:
            confirm: soon after a recovery, so before the script goes on and may write down a wrong
                one.
            settles: see `at_boundary`.
        """
        rt = self._rt
        layout = rt.state.layout()
        message = {
            "op": "replicas",
            "boundary": rt.boundary,
            "tensors": proof.digests(layout.tensors),
            "buffers": layout.buffers,
            "bytes": layout.size(),
            "trees": fingerprint(layout.trees),
            "line": rt.line,
            "splits": rt.stepping.splits,
            "settles": settles,
            "own": proof.digests(rt.own.copies(rt.boundary)),
            "confirm": confirm,
        }
        # Boundaries are compared in pairs, and when one rank has come to the second of them,
        # another may not: both stand.
        rt.channel.send(message, standing=f"replicas {rt.boundary & 1}")
        if confirm:
            with rt.told:
                rt.told.wait_for(
                    lambda: self._confirmed_at >= rt.boundary or rt.pending > rt.generation,
                    timeout=proof.CONFIRM,
                )
