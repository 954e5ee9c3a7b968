"""The last interval of a catch-up, where the dead worker's log ends in it.

The others have completed the step that the dead worker was in, so it had taken part in every
collective of that interval, and may have died before its script read what they gave (the norm of
the gradients, a scaler's verdict, a mean loss). Nobody has logged that. But the survivors stand one
interval further and still have the results: they are asked for before the interval is replayed,
and its collectives give them. So gradients are real in this interval, although weights are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flashrun.worker.communicator import Superseded
from flashrun.worker.oplog import Op
from flashrun.worker.replay.api import Divergence
from flashrun.worker.transfer import TransferError

if TYPE_CHECKING:
    from flashrun.worker.runtime import Runtime


class Completion:
    """See the module."""

    def __init__(self, runtime: Runtime) -> None:
        self._rt = runtime
        self._boundary = -1

    def begin(self, b: int) -> None:
        """Take the results of interval `b` from the survivors, who stand at boundary `b` + 1."""
        rt = self._rt
        while not rt.exiting:
            generation = rt.pending
            try:
                plan = rt.await_word("plan", generation)
                rt.peers.fetch_outputs(generation, b, plan["donors"], None)
                break
            except Superseded:
                continue
            except (TransferError, OSError) as error:
                rt.failed(generation, error)
        rt.replay.complete_interval(b)
        # The catch-up has skipped collectives: count from where the survivors began the interval.
        for ident, number in rt.peers.bases.items():
            group = rt.groups.get(ident)
            if group is not None:
                group.seq = group.base[b] = number
        self._boundary = b

    def check(self, numbers: Mapping[str, int]) -> None:
        """At the boundary after it.

        Args:
            numbers: how many collectives each group has had there on the survivors.

        Raises:
            Divergence: not as many here, so what was given may have been others' results.
        """
        rt = self._rt
        if self._boundary != rt.boundary - 1:
            return
        for ident, number in numbers.items():
            group = rt.groups.get(ident)
            if group is not None and group.base.get(rt.boundary, number) != number:
                raise Divergence(
                    f"up to boundary {rt.boundary} group {ident} has had {number} collectives on"
                    f" the survivors and {group.base[rt.boundary]} in the replay"
                )

    def give(self, op: Op) -> bool:
        """Complete a collective with the result that it had; False: nobody has it.

        Ends this process where the survivors have issued something else there.
        """
        rt = self._rt
        if self._boundary != rt.boundary:
            return False
        content = rt.peers.served.pop((op.group.ident, op.seq), None)
        if content is None:
            return False
        outputs = op.outputs()
        kind = rt.peers.kinds[op.group.ident, op.seq]
        mine, theirs = ([(t.dtype, t.numel()) for t in ts] for ts in (outputs, content))
        if kind != op.kind or mine != theirs:
            rt.diverged(
                Divergence(f"the survivors have issued {kind} there, and not {op.describe()}")
            )
        op.fill(content)
        rt.replay.given(outputs)
        return True
