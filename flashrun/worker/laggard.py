"""A rank that is one boundary behind the others (rule 4).

What it waits for has completed on the others. Its operations get the results that a survivor still
has, and its script runs on to the boundary: with the right gradients its own step gives the state
that the others have, so it depends on nobody any more. What nobody has any more is a `Divergence`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashrun.worker.oplog import Op
from flashrun.worker.replay.api import Divergence

if TYPE_CHECKING:
    from flashrun.messages import Message
    from flashrun.worker.runtime import Runtime


class Laggard:
    """See the module.

    Attributes:
        running: on its way to the boundary.
        in_closure: in a step that calls back into the script: its optimizer's state is in between.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._rt = runtime
        self.running = False
        self.in_closure = False

    def called_back(self) -> Divergence:
        return Divergence(
            f"rank {self._rt.rank} was one boundary behind, and its optimizer calls back into the"
            " script (LBFGS), which the others have done already"
        )

    def begin(self, plan: Message) -> None:
        """Let the script run to the boundary.

        Raises:
            Divergence: it waits for a result that nobody has any more.
        """
        rt = self._rt
        if self.in_closure:
            raise self.called_back()
        rt.channel.withdraw("held")
        rt.peers.fetch_outputs(int(plan["generation"]), rt.boundary, plan["donors"], None)
        with rt.lock:
            undone = [e for e in rt.log_of[rt.boundary] if isinstance(e, Op) and not e.done]
            contents = [(op, self._result(op)) for op in undone]
            self.running = True
            for op, content in contents:
                op.receive(content)

    def give(self, op: Op) -> None:
        """Complete an operation that the script issues on its way."""
        try:
            content = self._result(op)
        except Divergence as error:
            self._rt.diverged(error)
        op.receive(content)
        self._rt.log_of[op.interval].append(op)

    def _result(self, op: Op) -> list[torch.Tensor] | None:
        content = self._rt.peers.served.pop((op.group.ident, op.seq), None)
        if content is None and op.outputs():
            raise Divergence(
                f"rank {self._rt.rank} was one boundary behind, and nobody has the result of"
                f" {op.describe()} any more, which its script may read"
            )
        return content
