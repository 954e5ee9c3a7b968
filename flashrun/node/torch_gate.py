"""A forked worker has torch in memory; its script must not notice before it imports it.

``close()`` takes torch out of ``sys.modules``. When the script imports it, an entry at the front of
``sys.meta_path`` puts everything back, so the import costs nothing, and at that moment applies what
torch would have read from the environment had it been loaded there and then: a script may set
OMP_NUM_THREADS or TORCH_LOGS before its first ``import torch``. What cannot be applied any more is
found beforehand (:mod:`flashrun.node.eligibility`) or, failing that, said in one line.

Relies on importlib's order (Python 3.10 to 3.13, ``importlib._bootstrap._find_and_load``):
``sys.modules`` first, then the parents of a dotted name, then ``sys.meta_path`` in order.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import flashrun

_HIDDEN_ROOTS = ("torch", "torchgen", "functorch")

# Read by native libraries or by torch's Python code while they load. A change made after that has
# no effect, so a forked worker would differ from a fresh one.
LOAD_TIME_PREFIXES = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "DNNL_", "ONEDNN_", "NPY_",
    "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "PYTORCH_", "ATEN_", "C10_",
    "LD_PRELOAD", "LD_LIBRARY_PATH", "MALLOC_", "GLIBC_TUNABLES",
)  # fmt: skip

# Those of them that are read each time they are needed, long after the load (torch 2.13:
# ProcessGroupNCCL.cpp and torch/distributed/* read TORCH_NCCL_* and TORCH_GLOO_* when a group is
# made; the CUDA allocator reads its settings at the first use of a device).
READ_LATE_PREFIXES = (
    "TORCH_NCCL_", "TORCH_GLOO_", "TORCH_DISTRIBUTED_", "TORCH_FR_", "TORCH_HOME",
    "TORCH_EXTENSIONS_DIR", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
)  # fmt: skip

# Those that are applied when the gate opens.
APPLIED = frozenset({"OMP_NUM_THREADS", "TORCH_LOGS", "TORCH_LOGS_OUT", "TORCH_LOGS_FORMAT"})


def is_load_time(name: str) -> bool:
    """Whether the environment variable ``name`` is read while torch or its libraries load."""
    return name.startswith(LOAD_TIME_PREFIXES) and not name.startswith(READ_LATE_PREFIXES)


def changed_load_time_variables(
    at_load: Mapping[str, str], now: Mapping[str, str]
) -> dict[str, tuple[str | None, str | None]]:
    """Load-time variables whose value differs: name -> (value then, value now)."""
    names = {n for n in (*at_load, *now) if is_load_time(n)}
    return {n: (at_load.get(n), now.get(n)) for n in names if at_load.get(n) != now.get(n)}


def omp_threads(value: str | None, default: int, most: int | None = None) -> int:
    """The thread count that torch takes from OMP_NUM_THREADS (a list gives one per level).

    Args:
        value: the variable.
        default: what holds without it.
        most: what MKL allows, whose count torch takes over as it loads (2.13:
            aten/src/ATen/ParallelOpenMP.cpp, ``init_num_threads``): the physical cores.
    """
    first = (value or "").split(",")[0].strip()
    count = int(first) if first.isdigit() and int(first) > 0 else default
    return count if most is None else min(count, most)


def _own_seed() -> None:
    """torch's default generator draws its first seed from the system as it is made (2.13:
    aten/src/ATen/CPUGeneratorImpl.cpp, ``getDefaultCPUGenerator``); forks would share it."""
    import torch

    torch.default_generator.seed()


class _Present(Loader):
    """Hands importlib the module that is in memory already, attributes untouched."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__
        self._loader = module.__loader__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        module.__loader__ = self._loader


class TorchGate(MetaPathFinder):
    """Hides torch until the script imports it.

    Args:
        default_threads: torch's intra-op thread count as it was right after the load, when the
            environment said nothing.
        set_by_load: variables that torch set as it loaded.
        filters: ``warnings.filters`` that torch and its dependencies added while they loaded.
        on_open: called with torch visible again, before the script's import returns; the worker
            runtime is installed there.
        warn: takes one line for a person.
    """

    def __init__(
        self,
        default_threads: int,
        set_by_load: Mapping[str, str],
        filters: Sequence[Any] = (),
        on_open: Callable[[], None] | None = None,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._default_threads = default_threads
        self._set_by_load = dict(set_by_load)
        self._at_close: dict[str, str] = {}
        self._filters = list(filters)
        self._on_open = on_open
        self._warn = warn
        self._modules: dict[str, ModuleType] = {}

    def close(self) -> None:
        """Take torch out of sight; what is in the environment now is what torch has been told."""
        self._at_close = dict(os.environ)
        for name in [n for n in sys.modules if n.split(".", 1)[0] in _HIDDEN_ROOTS]:
            self._modules[name] = sys.modules.pop(name)
        sys.meta_path.insert(0, self)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname not in _HIDDEN_ROOTS:
            return None
        sys.meta_path.remove(self)
        module = self._modules[fullname]
        sys.modules.update(self._modules)
        filters: Any = warnings.filters
        filters[:0] = self._filters
        self._apply_environment()
        _own_seed()
        if self._on_open is not None:
            self._on_open()
        # importlib wants to make the module itself; let it find ours.
        del sys.modules[fullname]
        return ModuleSpec(fullname, _Present(module), is_package=True)

    def _apply_environment(self) -> None:
        import torch

        changed = changed_load_time_variables(self._at_close, os.environ)
        for name, value in self._set_by_load.items():
            os.environ.setdefault(name, value)
        # Without OMP_NUM_THREADS at the load, the default is what MKL allows.
        free = "OMP_NUM_THREADS" not in flashrun.STARTED_WITH_ENVIRON
        mkl: Any = torch.backends.mkl
        most = self._default_threads if free and mkl.is_available() else None
        torch.set_num_threads(
            omp_threads(os.environ.get("OMP_NUM_THREADS"), self._default_threads, most)
        )
        if any(name.startswith("TORCH_LOGS") for name in changed):
            logging_internal: Any = torch._logging._internal
            # torch/__init__.py calls this while torch loads (2.13).
            logging_internal._init_logs()
        late = sorted(set(changed) - APPLIED)
        if late:
            self._warn(
                f"the script set {', '.join(late)} before its first import of torch, but this"
                " worker was forked with torch in memory and it was not read again; start with"
                " --no-zygote to have it read"
            )
