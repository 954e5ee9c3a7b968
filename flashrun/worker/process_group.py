"""The process group that a script gets: every collective goes through the runtime's log.

Relied on in torch 2.13: ``distributed_c10d._new_process_group_helper`` (distributed_c10d.py:1984)
takes a plugin backend whose creator returns a ``ProcessGroup`` and uses it as it is; the
trampolines of ``PyProcessGroup`` carry what C++ asks (DDP's reducer, functional collectives),
Python callers find the methods themselves. ``getBackendName`` must not be "gloo": DDP's logger
would then ask for a C++ backend and fail.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from flashrun.worker import functional
from flashrun.worker.oplog import Op
from flashrun.worker.untraced import leave_alone

if TYPE_CHECKING:
    from flashrun.worker.communicator import Communicator
    from flashrun.worker.runtime import Runtime

PLUGIN = "flashrun"


# torch's stubs know neither the trampoline's constructor nor the argument forms that Python
# callers use.
_Work: Any = c10d.Work
_ProcessGroup: Any = c10d.ProcessGroup


class HeldWork(_Work):  # type: ignore[misc]  # of type Any
    """A collective that ends when it has really completed here, whatever happens meanwhile."""

    def __init__(self, runtime: Runtime, op: Op) -> None:
        super().__init__()
        self._runtime = runtime
        self._op = op

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._op.done:
            self._runtime.wait(self._op)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        op = self._op
        if op.done:
            return True
        if op.handle is None or op.handle.is_completed():
            self._runtime.wait(op)  # at once, or held
            return True
        return False

    def is_success(self) -> bool:
        return self._op.done

    def exception(self) -> Any:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._op.outputs()

    def source_rank(self) -> int:
        return int(getattr(self._op.handle, "source_rank", lambda: 0)())

    _source_rank = source_rank

    def get_future(self) -> Any:
        return self._runtime.futures.of(self._op)

    def block_current_stream(self) -> None:
        self.wait()


def _options(kind: Any, field: str, given: Any) -> Any:
    """``given`` as options: options, the one field that Python callers may give, or nothing."""
    if isinstance(given, kind):
        return given
    options = kind()
    if given is not None:
        setattr(options, field, given)
    return options


def _listed(tensors: Any) -> Any:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


class FlashProcessGroup(_ProcessGroup):  # type: ignore[misc]  # of type Any
    """See the module.

    Attributes:
        ident: name in every rank's log, the same in every incarnation.
        ranks: global ranks of the members.
        seq: collectives issued so far.
        base: boundary -> `seq` there.
        communicator: of the present generation; None while there is none.
    """

    def __init__(
        self,
        runtime: Runtime,
        ident: str,
        rank: int,
        ranks: list[int],
        backend: str,
        timeout: timedelta,
    ) -> None:
        super().__init__(rank, len(ranks))
        self._runtime = runtime
        self.ident = ident
        self.ranks = ranks
        self.backend = backend
        self.timeout = timeout
        self.seq = 0
        self.base: dict[int, int] = {}
        self.communicator: Communicator | None = None
        self.destroyed = False

    def getBackendName(self) -> str:
        return PLUGIN

    def _get_backend_name(self) -> str:
        return self.backend

    def name(self) -> str:
        return self.backend

    def getGroupName(self) -> str:
        return self.group_name

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    setGroupDesc = _set_group_desc
    getGroupDesc = lambda self: self._desc  # noqa: E731

    def shutdown(self) -> None:
        self.destroyed = True

    def abort(self) -> None:
        self.destroyed = True

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout
        if self.communicator is not None:
            self.communicator.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _start(self, kind: str, *args: Any) -> HeldWork:
        return HeldWork(self._runtime, self._runtime.issue(self, kind, args))

    # --- collectives, by the names that C++ and Python use

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> HeldWork:
        opts = _options(c10d.AllreduceOptions, "reduceOp", opts)
        return self._start("allreduce", _listed(tensors), opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> HeldWork:
        return self._start("allreduce_coalesced", tensors, opts or c10d.AllreduceCoalescedOptions())

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> HeldWork:
        opts = _options(c10d.BroadcastOptions, "rootRank", opts)
        return self._start("broadcast", _listed(tensors), opts)

    def barrier(self, opts: Any = None, timeout: Any = None) -> HeldWork:
        if not isinstance(opts, c10d.BarrierOptions):
            opts = c10d.BarrierOptions()
        return self._start("barrier", opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self._start("monitored_barrier", timeout or self.timeout, wait_all_ranks).wait()

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> HeldWork:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._start("allgather", outputs, inputs, opts or c10d.AllgatherOptions())

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> HeldWork:
        return self._start("allgather_coalesced", outputs, inputs, opts or c10d.AllgatherOptions())

    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> HeldWork:
        return self._start("_allgather_base", output, input, opts or c10d.AllgatherOptions())

    all_gather_single = _allgather_base

    def reduce(self, tensors: Any, opts: Any = None) -> HeldWork:
        return self._start("reduce", tensors, opts or c10d.ReduceOptions())

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> HeldWork:
        return self._start("gather", outputs, inputs, opts or c10d.GatherOptions())

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> HeldWork:
        return self._start("scatter", outputs, inputs, opts or c10d.ScatterOptions())

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> HeldWork:
        return self._start("reduce_scatter", outputs, inputs, opts or c10d.ReduceScatterOptions())

    def _reduce_scatter_base(self, output: Any, input: Any, opts: Any = None) -> HeldWork:
        options = opts or c10d.ReduceScatterOptions()
        return self._start("_reduce_scatter_base", output, input, options)

    reduce_scatter_single = _reduce_scatter_base

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> HeldWork:
        return self._start("alltoall", outputs, inputs, opts or c10d.AllToAllOptions())

    def alltoall_base(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> HeldWork:
        return self._start(
            "alltoall_base",
            output,
            input,
            list(output_splits or ()),
            list(input_splits or ()),
            opts or c10d.AllToAllOptions(),
        )

    all_to_all_single = alltoall_base

    def send(self, tensors: Any, dst: int, tag: int) -> HeldWork:
        return self._start("send", tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int) -> HeldWork:
        return self._start("recv", tensors, src, tag)

    def recv_anysource(self, tensors: Any, tag: int) -> HeldWork:
        return self._start("recv_anysource", tensors, tag)


leave_alone(FlashProcessGroup)
leave_alone(HeldWork)


def install(runtime: Runtime) -> Callable[[], None]:
    """Have every new group made by `runtime` for the backends that it carries; returns the undo."""
    original = distributed_c10d._new_process_group_helper
    dist.Backend.register_backend(PLUGIN, _create, extended_api=True, devices=["cpu", "cuda"])
    _runtime.append(runtime)
    withdraw_kernels = functional.install()

    def helper(
        group_size: int,
        group_rank: int,
        global_ranks_in_group: list[int],
        backend: Any,
        store: Any,
        group_name: Any,
        **kwargs: Any,
    ) -> Any:
        if not runtime.carries(str(backend)):
            return original(
                group_size, group_rank, global_ranks_in_group, backend, store, group_name, **kwargs
            )
        _wanted.append(str(backend))
        try:
            pg, prefix = original(
                group_size, group_rank, global_ranks_in_group, PLUGIN, store, group_name, **kwargs
            )
        finally:
            _wanted.pop()
        world = distributed_c10d._world
        if isinstance(pg, FlashProcessGroup) and pg in world.pg_map:
            world.pg_map[pg] = (backend, prefix)
            config = distributed_c10d.BackendConfig(distributed_c10d.Backend(str(backend)))
            world.pg_backend_config[pg] = str(config)
        return pg, prefix

    place: Any = distributed_c10d
    place._new_process_group_helper = helper

    def undo() -> None:
        place._new_process_group_helper = original
        withdraw_kernels()
        _runtime.remove(runtime)

    return undo


_runtime: list[Runtime] = []
_wanted: list[str] = []  # the backend that the script asked for, while a group is made


def _create(options: Any, _backend_options: Any) -> FlashProcessGroup:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return _runtime[-1].create_group(
        str(options.group_id), options.group_rank, ranks, _wanted[-1], options.timeout
    )
