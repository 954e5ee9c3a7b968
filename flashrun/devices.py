"""What torch knows of this machine's GPUs, asked in a process of its own.

Workers are forks of the launcher, and CUDA (or XPU) can't be used in a fork of a process that has
asked it anything, be it only how many devices there are ("Cannot re-initialize CUDA in forked
subprocess"). So the launcher never asks by itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from flashrun.node import linux


def ask_apart(question: Callable[[], Any]) -> Any:
    """The answer of ``question``, JSON types only, from a process that ends with it.

    Raises:
        RuntimeError: it raised an exception, with its text, or its process died.
    """
    read_end, write_end = os.pipe()
    here = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            linux.die_with_parent(here)
            try:
                answer = {"is": question()}
            except Exception as error:  # noqa: BLE001  # whatever it is, the launcher says it
                answer = {"error": " ".join(str(error).split()) or type(error).__name__}
            with os.fdopen(write_end, "w") as pipe:
                json.dump(answer, pipe)
        finally:
            os._exit(0)  # also for an interrupt: what is above on the stack is the launcher's
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if not text:
        code = os.waitstatus_to_exitcode(status)
        raise RuntimeError(f"the process that asked for the devices ended with status {code}")
    answer = json.loads(text)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["is"]


def are_there(kind: str) -> bool:
    """Whether torch can use devices of ``kind``: ``cuda``, ``xpu``."""
    import torch

    try:
        return bool(ask_apart(getattr(torch, kind).is_available))
    except RuntimeError:
        return False  # a driver that ends who asks it


def lost_to_forks() -> bool:
    """Whether forks of this process can't use a GPU any more: something else in it (a site
    customisation, a plugin) has asked for devices."""
    import torch

    cuda: Any = torch.cuda
    xpu: Any = torch.xpu
    if not (cuda._is_compiled() or xpu._is_compiled()):
        return False
    return bool(ask_apart(lambda: cuda._is_in_bad_fork() or xpu._is_in_bad_fork()))


def local_world_size(nproc_per_node: str) -> int:
    """The number of workers that ``--nproc-per-node`` asks for, a number or a word.

    Raises:
        RuntimeError: torch refuses the word.
    """
    from torch.distributed.run import determine_local_world_size

    if nproc_per_node.isdecimal():
        return int(nproc_per_node)
    return int(ask_apart(lambda: determine_local_world_size(nproc_per_node)))


def processors_by_numa(options: Any, workers: int) -> tuple[tuple[int, ...], ...]:
    """To which processors ``--numa-binding`` binds each local rank.

    torch's own launcher has ``numactl`` do that; here a worker does it itself before it begins.

    Args:
        options: torch.numa.binding.NumaOptions.
        workers: on this node.

    Raises:
        RuntimeError: torch can't tell for one of them.
    """
    from torch.numa import binding

    places: Any = binding._get_logical_cpus_to_bind_to

    def look() -> list[list[int]]:
        return [sorted(places(gpu_index=i, numa_options=options)) for i in range(workers)]

    found = tuple(tuple(cpus) for cpus in ask_apart(look))
    if () in found:
        rank = found.index(())
        raise RuntimeError(f"this process may use no processor next to GPU {rank}")
    return found
