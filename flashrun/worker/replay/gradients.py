"""Which parameters a skipped backward gives gradients, and those gradients: zeros, unreal ones.

A backward that ran shows which it has given some (optimizers and scripts ask whether a gradient is
there). A skipped one at the same line gives them to the same parameters; where it was not always
the same ones there, or the script asks for those of inputs, its graph tells. In that a stand-in's
leaf has the parameters that the graph had for which it stands.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch

from flashrun.worker.replay import standins
from flashrun.worker.replay.outputs import nodes, variable_of
from flashrun.worker.replay.unreal import MARK, USED

if TYPE_CHECKING:
    from flashrun.worker.replay.session import Session

BEHIND = "_flashrun_behind"  # of a leaf that stands for a graph: the parameters in that


class Gradients:
    """See the module.

    Args:
        optimizers: all that there are.
        modules: the outermost ones whose forwards there were.
    """

    def __init__(
        self,
        session: Session,
        optimizers: Iterable[torch.optim.Optimizer],
        modules: Collection[torch.nn.Module],
    ) -> None:
        self._session = session
        self._optimizers = optimizers
        self._modules = modules
        # call site -> the different lists of parameters that it gave gradients
        self._given: dict[int, list[list[torch.Tensor]]] = {}
        self._of_others: set[int] = set()  # call sites that have given others some
        # by id, since tensors compare elementwise
        self._zeros: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def forget(self) -> None:
        """The replay is over."""
        self._given.clear()
        self._zeros.clear()

    def parameters(self) -> list[torch.Tensor]:
        """All that may be given some."""
        found: dict[int, torch.Tensor] = {}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    found[id(parameter)] = parameter
        for module in self._modules:
            for parameter in module.parameters():
                found[id(parameter)] = parameter
        return [p for p in found.values() if p.requires_grad]

    def others(self, tensors: Any, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """What else a backward from there gives some: the script's inputs."""
        known = {id(p) for p in parameters}
        return [leaf for leaf in self.led_to(tensors, through=False) if id(leaf) not in known]

    def note(self, site: int, touched: list[torch.Tensor], others: bool) -> None:
        """A backward at this line has given these some, and others."""
        if others:
            self._of_others.add(site)
        known = self._given.setdefault(site, [])
        ids = {id(p) for p in touched}
        if touched and all({id(p) for p in before} != ids for before in known):
            known.append(touched)

    def of_site(self, site: int, tensors: Any) -> list[torch.Tensor]:
        """The parameters that a skipped backward gives gradients."""
        known = self._given.get(site)
        if not known:
            return self.parameters()
        if len(known) == 1 and site not in self._of_others:
            return known[0]
        return self.led_to(tensors) or known[-1]

    def led_to(self, tensors: Any, through: bool = True) -> list[torch.Tensor]:
        """The leaves to which graphs lead.

        Args:
            tensors: one or many.
            through: those of stand-ins are the ones they stand for; otherwise left out.
        """
        with self._session.quiet():
            return _leaves(nodes(tensors), through)

    def made_of(
        self, output: torch.Tensor, inputs: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[int]]:
        """What the graph of an output that a module gave leads to: leaves that are not behind one
        of its inputs, and the positions of the inputs."""
        with self._session.quiet():
            ends = {next(nodes(t)): i for i, t in enumerate(inputs) if t.requires_grad}
            found = list(nodes(output, ends=lambda node: node in ends))
        return (
            _leaves((node for node in found if node not in ends), True),
            [ends[node] for node in found if node in ends],
        )

    def give_zeros(self, parameters: list[torch.Tensor]) -> None:
        """Each has a gradient after this, an unreal one."""
        unreal = self._session.unreal
        for parameter in parameters:
            grad = parameter.grad
            if grad is None:
                known = self._zeros.get(id(parameter))
                if known is None or known[0]() is not parameter:
                    with self._session.quiet():
                        known = weakref.ref(parameter), torch.zeros_like(parameter)
                    if isinstance(parameter, torch.nn.Parameter):  # it comes again
                        self._zeros[id(parameter)] = known
                parameter.grad = grad = known[1]
                own = grad.untyped_storage().__dict__
                own.pop(USED, None)
                if MARK in own:
                    continue
            if unreal is not None:  # also one that was zeroed in place since
                unreal.mark(grad, "backward")

    def reduced_by_ddp(self) -> set[int]:
        """By id, the parameters whose gradients DDP reduces in a backward now."""
        return {
            id(parameter)
            for outermost in self._modules
            for module in outermost.modules()
            if isinstance(module, torch.nn.parallel.DistributedDataParallel)
            and module.require_backward_grad_sync
            for parameter in module.parameters()
        }


def _leaves(found: Iterable[Any], through: bool) -> list[torch.Tensor]:
    leaves: dict[int, torch.Tensor] = {}
    for node in found:
        leaf = variable_of(node)
        if leaf is None or leaf is standins.anchor():
            continue
        behind = leaf.__dict__.get(BEHIND)
        if behind is None:
            leaves[id(leaf)] = leaf
        elif through:
            leaves.update((id(p), p) for p in behind)
    return list(leaves.values())


def is_stood_for(roots: Any) -> bool:
    """Whether a graph has stand-ins in it, behind which there is nothing."""
    leaves = map(variable_of, nodes(roots))
    return any(leaf is not None and BEHIND in leaf.__dict__ for leaf in leaves)
