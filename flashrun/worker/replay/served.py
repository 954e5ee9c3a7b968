"""The forward of an outermost module, in a replay: served from what it gave for the same kind of
input, wherever it needs not run.

It runs in the first intervals, for each new kind of input, until a DDP module has rebuilt its
buckets, and in the interval that is completed. A module whose forward changes Python values always
runs.

Relied on in torch 2.13: ``Module.__call__`` is a plain attribute (nn/modules/module.py:1917).
"""

from __future__ import annotations

import marshal
import struct
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from flashrun.worker.replay import kinds, standins
from flashrun.worker.replay.doors import fill_scalar
from flashrun.worker.replay.gradients import BEHIND, Gradients
from flashrun.worker.replay.outputs import Outputs
from flashrun.worker.replay.recent import leaves as recent_leaves
from flashrun.worker.replay.unreal import mark_of

if TYPE_CHECKING:
    from flashrun.worker.replay.session import Session

ORDINAL = struct.Struct("<Q")
REAL_CALLS = 2  # of each kind of input with gradients: DDP rebuilds its buckets in the second
item = torch.Tensor.item  # taken before the door is installed
_FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def scalars(output: Any) -> list[torch.Tensor]:
    """The one-element floating tensors on the CPU that an output has at its first level."""
    if type(output) is torch.Tensor:
        candidates: Any = (output,)
    elif isinstance(output, (tuple, list)):
        candidates = output
    elif isinstance(output, dict):
        candidates = output.values()
    else:
        return []
    return [
        t
        for t in candidates
        if type(t) is torch.Tensor
        and t.numel() == 1
        and t.dtype in _FLOATING
        and t.is_cpu
    ]


def _will_rebuild_buckets(module: torch.nn.Module) -> bool:
    """Whether this is a DDP module that has yet to rebuild its buckets, which takes a real backward
    and a real forward after it (nn/parallel/distributed.py:1775; never where it looks for unused
    parameters, reducer.hpp, should_rebuild_buckets)."""
    if not isinstance(module, torch.nn.parallel.DistributedDataParallel):
        return False
    return not module._has_rebuilt_buckets and (
        module.static_graph or not module.find_unused_parameters
    )


class Forwards:
    """What a module returned for each kind of input."""

    def __init__(self) -> None:
        # key -> real calls so far, output, the parameters that its graph led to
        self.outputs: dict[Any, tuple[int, Any, list[torch.Tensor]]] = {}
        self.real_only = False
        self.own_generator = False
        self.trained = 0  # calls in training
        self.warned = False
        self.compiled = False
        self.marked = -1  # what it changes is marked since so many became real again


class Served:
    """See the module.

    Attributes:
        known: what each module returned.
        graph: a forward with gradients ran for real since the last backward.
    """

    def __init__(
        self,
        session: Session,
        known: weakref.WeakKeyDictionary[torch.nn.Module, Forwards],
        gradients: Gradients,
        outputs: Outputs,
    ) -> None:
        self.session = session
        self.known = known
        self.graph = False
        self._gradients = gradients
        self._outputs = outputs

    def forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self.session

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if session.depth or not session.on or get_ident() != session.main:
                return original(module, *args, **kwargs)
            if session.poison is not None:
                session.poison.check((args, kwargs))
            if session.replaying:
                return self._replay_forward(original, module, args, kwargs)
            output, ordinal = session.run_region(lambda: original(module, *args, **kwargs))
            of_one = scalars(output)
            if of_one:
                values = [item(t.detach()) for t in of_one]
                session.append(
                    kinds.OUT, 0, ORDINAL.pack(ordinal) + marshal.dumps(values)
                )
            if session.recent is not None and session.on:
                session.recent.keep(ordinal, output)
            return output

        return call

    def _replay_forward(
        self,
        original: Callable[..., Any],
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        session = self.session
        with session.quiet():
            known = self.known.get(module)
            if known is None:
                known = self.known[module] = Forwards()
                known.own_generator = standins.has_own_generator(module)
                known.real_only = known.own_generator
                known.compiled = standins.is_compiled(module)
            named = standins.signature(kwargs) if kwargs else None
            key = standins.signature(args), named, module.training, standins.context()
            calls, cached, _ = known.outputs.get(key, (0, None, []))
            real = (
                known.real_only
                or calls < REAL_CALLS
                or session.starting()
                or session.completes()
                or _will_rebuild_buckets(module)
            )
            before = standins.values_around(module) if real and not known.real_only else None
            again = None
            if session.remembers_outputs():
                again = self._outputs.about_to_call(original, module, args, kwargs, known)
            ran = []

            def run() -> Any:
                ran.append(True)
                with session.quiet() if known.compiled else session.loud():
                    return original(module, *args, **kwargs)

            output, ordinal = session.replay_region(
                run, lambda _: None if real else lambda: standins.copy_output(cached)
            )
            if real:
                if torch.is_grad_enabled():
                    self.graph = True
                self._learn(known, key, calls, output, module, before)
            elif session.past is not None and torch.is_grad_enabled():
                self.graph = True
            self._mark_forward(known, module, output, bool(ran))
            if module.training:
                known.trained += 1
            if again is not None:
                again.ran = bool(ran)
                output = self._outputs.add(again, output)
            self._fill(output, ordinal)
        return output

    def _mark_forward(
        self, known: Forwards, module: torch.nn.Module, output: Any, ran: bool
    ) -> None:
        """What a forward gave and changed is unreal, unless it really ran on real values."""
        unreal = self.session.unreal
        if unreal is None or (ran and (not unreal.started or not known.compiled)):
            return  # followed while it ran
        what = f"the output of {type(module).__name__}"
        for leaf in standins.tensors(output):
            unreal.mark_anew(leaf, what)
        if known.marked != unreal.cleared:
            known.marked = unreal.cleared
            unreal.mark_all(module.buffers(), f"a buffer of {type(module).__name__}")

    def _fill(self, output: Any, ordinal: int) -> None:
        """Give an output the values that the dead worker's had, as far as they are kept."""
        session = self.session
        record = session.peek()
        if (
            record is not None
            and record.kind == kinds.OUT
            and ORDINAL.unpack_from(record.payload)[0] == ordinal
        ):
            session.take()
            values = marshal.loads(record.payload[ORDINAL.size :])
            mine = scalars(output)
            if len(values) != len(mine):
                raise session.diverged("a forward returned another number of scalars than before")
            for tensor, value in zip(mine, values, strict=True):
                fill_scalar(session, tensor, value)
        unreal, recent = session.unreal, session.recent
        if unreal is None or recent is None or session.past is not None:
            return
        kept = recent.get(ordinal)
        if kept is None:
            return
        mine = recent_leaves(output)
        if [(t.shape, t.dtype) for t in kept] != [(t.shape, t.dtype) for t in mine]:
            raise session.diverged("a forward returned tensors of other shapes than before")
        for tensor, value in zip(mine, kept, strict=True):
            if mark_of(tensor) is not None:
                tensor.data.copy_(value)  # unseen by its graph, which may have kept it
                unreal.clear(tensor)

    def _learn(
        self,
        known: Forwards,
        key: Any,
        calls: int,
        output: Any,
        module: torch.nn.Module,
        before: Any,
    ) -> None:
        if not standins.can_stand_in(output):
            known.real_only = True
        after = standins.values_around(module) if before is not None else None
        if after is not None and after[0] != before[0]:
            known.real_only = True  # its forward changes Python values (a counter, a list)
        if after is not None and calls > 0 and after[1] != before[1] and not known.warned:
            known.warned = True
            self.session.warn(
                f"{type(module).__name__} keeps tensors between calls that are not buffers: their "
                "values are not replayed"
            )
        behind = known.outputs[key][2] if calls else []
        kept = standins.keep_output(output)
        if calls < REAL_CALLS and torch.is_grad_enabled():
            behind = self._gradients.led_to(standins.tensors(output))
        for leaf in standins.tensors(kept):
            leaf.__dict__[BEHIND] = behind
        known.outputs[key] = calls + 1, kept, behind
