"""A worker forked from the zygote is to its script what ``python -u script`` is.

Each case is a small program run both ways in the same folder; its output (both streams, line by
line and in order) and its exit status must be the same.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import dedent

import pytest

from flashrun.node.eligibility import may_import_torch
from tests import helpers
from tests.conformance import harness


@dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
        name: the test's name.
        files: the program; ``main.py`` is run unless ``run`` says otherwise.
        status: what the plain interpreter must exit with (so that a broken case is noticed).
        run: what follows ``python -u`` and ``flashrun``.
        streams: what is compared.
        frames: what shows a raw stack shows flashrun's frames below the script's; they are cut.
    """

    name: str
    files: Mapping[str, str]
    status: int = 0
    run: tuple[str, ...] = ("main.py",)
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: str | None = None
    streams: tuple[str, ...] = ("stdout", "stderr")
    frames: bool = False


def _case(name: str, script: str, status: int = 0, **options: object) -> Case:
    files = {"main.py": dedent(script).lstrip("\n")}
    files.update(options.pop("files", {}))  # type: ignore[call-overload]
    return Case(name, files, status, **options)  # type: ignore[arg-type]


MAIN_MODULE = [
    _case("name_guard", """
        if __name__ == "__main__":
            print("main", __name__, __file__, __spec__, __package__, __doc__, __cached__)
            print(sorted(globals()))
        """),
    _case("getsource", """
        import inspect

        class Model:
            '''A class of the script.'''
            size = 3

        def train(x):
            # a comment
            return x + 1

        print(inspect.getsource(train), inspect.getsource(Model), inspect.getsourcefile(train))
        print(inspect.getmodule(Model), inspect.signature(train))
        import __main__
        print(inspect.getsource(__main__) == open(__file__).read())
        """),
    _case("pickle_main_class", """
        import pickle, copyreg, sys

        class Config:
            def __init__(self, x): self.x = x
            class Inner: pass

        def f(): return 1

        for thing in (Config(4), Config, Config.Inner(), f):
            data = pickle.dumps(thing)
            back = pickle.loads(data)
            print(type(back), b"__main__" in data, getattr(back, "x", back))
        print(sys.modules["__main__"].Config is Config)
        """),
    _case("type_hints_and_dataclasses", """
        from __future__ import annotations
        import dataclasses, enum, typing
        from collections import namedtuple

        @dataclasses.dataclass
        class Options:
            rate: float = 0.1
            inner: Other | None = None

        class Other(typing.NamedTuple):
            a: int

        class Colour(enum.Enum):
            RED = 1

        P = namedtuple("P", "x y")
        print(typing.get_type_hints(Options), Options(), P(1, 2).__class__.__module__)
        print(Colour.RED, Colour.__module__, Other.__qualname__)
        x: int = 3
        print(__annotations__)
        """),
    _case("file_relative_paths", """
        import os, pathlib, sys
        print(pathlib.Path(__file__).parent.joinpath("data.txt").read_text())
        print(os.path.dirname(os.path.abspath(sys.argv[0])) == sys.path[0], sys.argv)
        """, files={"data.txt": "data"}, run=("main.py", "--a", "b c", "")),
    _case("script_in_subfolder", """
        import beside, sys
        print(beside.HERE, __file__, sys.argv, sys.path[0])
        """, files={"sub/beside.py": "HERE = __file__\n",
                    "sub/main.py": "import beside, sys\n"
                                   "print(beside.HERE, __file__, sys.path[0])\n"},
          run=("sub/main.py",)),
    _case("importlib_resources", "", files={
        "pkg/__init__.py": "", "pkg/data.txt": "resource",
        "pkg/__main__.py": "from importlib import resources\n"
                           "print(resources.files('pkg').joinpath('data.txt').read_text())\n"
                           "print(__spec__.name, __package__, __file__)\n"}, run=("-m", "pkg")),
    _case("relative_import_under_m", "", files={
        "pkg/__init__.py": "print('init', __name__)\n",
        "pkg/sub/__init__.py": "", "pkg/util.py": "VALUE = 5\n",
        "pkg/sub/tool.py": "from ..util import VALUE\nfrom .. import util\nimport sys\n"
                           "print(VALUE, util.__name__, __name__, __spec__.name, __package__)\n"
                           "print(sys.argv, sys.path[0] , 'pkg.sub.tool' in sys.modules)\n"},
          run=("-m", "pkg.sub.tool", "-x")),
    _case("m_pickles_main_class", "", files={
        "mod.py": "import pickle\nclass A: pass\nprint(pickle.loads(pickle.dumps(A())).__class__)\n"
                  "import inspect\nprint(inspect.getsource(A))\n"}, run=("-m", "mod")),
    _case("import_of_main_again", """
        import main, __main__
        print(main is __main__, main.__name__)
        """),
    _case("runpy_inside", """
        import runpy
        print(sorted(runpy.run_path("other.py", run_name="x")["seen"]))
        """, files={"other.py": "seen = [__name__, __file__]\n"}),
    _case("local_modules_shadow", """
        import queue, utils, sympy
        print(queue.WHO, utils.WHO, sympy.WHO)
        """, files={n + ".py": f"WHO = 'local {n}'\n" for n in ("queue", "utils", "sympy")}),
    _case("local_module_shadows_stdlib_loaded_by_torch", """
        import statistics, optree
        print(statistics.WHO, optree.WHO)
        """, files={n + ".py": f"WHO = 'local {n}'\n" for n in ("statistics", "optree")}),
    _case("syntax_error", "x = 1\ndef f(:\n    pass\n", status=1),
    _case("indentation_error", "if True:\npass\n", status=1),
    # Python's tokenizer of files words it differently from compile().
    _case("null_byte", "x = '\0'\n", status=1, streams=("stdout",)),
    _case("encoding_cookie", "# -*- coding: latin-1 -*-\nprint(ascii('\u00e9'))\n"),
    _case("future_division_not_leaking", "print(eval('__debug__'), compile.__name__)\n"
          "x: undefined_name = 1\n", status=1),
    _case("empty_script", ""),
    _case("doc_string", '"""Doc of the script."""\nprint(__doc__)\n'),
]  # fmt: skip

ENDINGS = [
    _case("exit_none", "import sys; sys.exit()"),
    *[_case(f"exit_{str(n).replace('-', 'minus_')}", f"import sys; sys.exit({n})", status=n & 255)
      for n in (0, 3, 255, 256, 257, -1, 1000)],
    _case("exit_string", "import sys; sys.exit('a message')", status=1),
    _case("exit_true", "import sys; sys.exit(True)", status=1),
    _case("exit_tuple", "import sys; sys.exit((1, 2))", status=1),
    _case("exit_float", "import sys; sys.exit(2.5)", status=1),
    _case("raise_system_exit_in_function", "def f(): raise SystemExit(4)\nf()", status=4),
    _case("builtin_exit", "exit(5)", status=5),
    _case("builtin_quit", "print(quit, exit, copyright is not None)\nquit('bye')", status=1),
    _case("atexit_order", """
        import atexit, sys, threading
        atexit.register(print, "first registered")
        atexit.register(print, "second registered")
        threading._register_atexit(print, "threading atexit")
        class Loud:
            def __del__(self): print("deleted", sys.is_finalizing())
        loud = Loud()
        print("end of script")
        """),
    _case("atexit_raises", "import atexit\natexit.register(lambda: 1 / 0)\nprint('end')"),
    _case("atexit_after_exception", "import atexit\natexit.register(print, 'bye')\n1/0", status=1),
    _case("threads_are_joined", """
        import threading
        def late():
            threading.main_thread().join()
            print("thread done")
        threading.Thread(target=late).start()
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        print("main done")
        """),
    _case("thread_exception", """
        import threading
        t = threading.Thread(target=lambda: 1 / 0, name="worker-thread")
        t.start(); t.join()
        print("alive")
        """),
    _case("exception_in_thread_pool_exit", """
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(1)
        pool.submit(print, "from the pool")
        """),
    _case("uncaught_exception", """
        class Odd(Exception):
            pass

        def deeper(n):
            if n == 0:
                raise Odd("with\\nlines")
            deeper(n - 1)

        deeper(5)
        """, status=1),
    _case("chained_exception", """
        def f():
            try:
                {}["x"]
            except KeyError as error:
                raise RuntimeError("outer") from error
        try:
            f()
        except RuntimeError:
            [1][2]
        """, status=1),
    _case("exception_group_and_notes", """
        error = ValueError("one")
        if hasattr(error, "add_note"):
            error.add_note("a note")
        raise error
        """, status=1),
    _case("exception_in_import", "import broken\n", status=1,
          files={"broken.py": "def f():\n    return 1/0\nf()\n"}),
    _case("m_exception", "", status=1, run=("-m", "mod"),
          files={"mod.py": "def f():\n    raise ValueError('under -m')\nf()\n"}),
    _case("recursion_error", """
        import sys
        print(sys.getrecursionlimit())
        def f(n): return f(n + 1)
        try:
            f(0)
        except RecursionError as error:
            print(str(error)[:40])
        """),
    _case("keyboard_interrupt", "print('before')\nraise KeyboardInterrupt", status=-2),
    _case("sigint_to_itself", """
        import os, signal
        print(signal.getsignal(signal.SIGINT))
        try:
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        except KeyboardInterrupt:
            print("interrupted")
        """),
    _case("sigterm_to_itself", "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
          status=-15),
    _case("signal_handlers", """
        import os, signal, time
        for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGPIPE", "SIGCHLD",
                     "SIGALRM", "SIGQUIT"):
            print(name, signal.getsignal(getattr(signal, name)))
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        signal.signal(signal.SIGTERM, lambda n, f: print("got", n, f.f_code.co_name))
        signal.raise_signal(signal.SIGTERM)
        rung = []
        signal.signal(signal.SIGALRM, lambda n, f: (print("alarm"), rung.append(n)))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        while not rung:  # it may ring before a pause begins, which would have no end then
            time.sleep(0.01)
        print(signal.set_wakeup_fd(-1))
        """),
    _case("excepthook_of_the_script", """
        import sys
        def hook(kind, value, traceback):
            frames = []
            while traceback:
                frames.append(traceback.tb_frame.f_code.co_name)
                traceback = traceback.tb_next
            print("hook", kind.__name__, value, frames)
        sys.excepthook = hook
        def f(): raise ValueError("for the hook")
        f()
        """, status=1),
    _case("excepthook_raises", "import sys\nsys.excepthook = lambda *a: 1/0\nraise ValueError(1)",
          status=1, frames=True),
    _case("os_exit_skips_all", "import atexit, os\natexit.register(print, 'no')\nos._exit(9)",
          status=9),
    _case("abort", """
        import os, resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.abort()
        """, status=-6),
    _case("closed_stdout_at_exit", "import sys\nprint('x')\nsys.stdout.close()"),
]  # fmt: skip

STREAMS = [
    _case("unbuffered", """
        import sys
        for s in (sys.stdout, sys.stderr, sys.stdin):
            print(type(s).__name__, s.encoding, s.errors, s.line_buffering, s.write_through, s.name,
                  type(s.buffer).__name__, s.mode, s.closed)
        print(sys.stdout is sys.__stdout__, sys.flags)
        print(sys.stdout.buffer.fileno(), sys.stderr.fileno(), sys.stdin.fileno())
        """),
    _case("no_newline_before_os_exit", "import os, sys\nsys.stdout.write('abc')\nos._exit(0)"),
    _case("reconfigure", """
        import sys
        sys.stdout.reconfigure(encoding="latin-1", errors="backslashreplace", line_buffering=True)
        print("é ✓", sys.stdout.write_through)
        """),
    _case("input", "print([input('name? '), input()])\n", stdin="ada\nlovelace\n"),
    _case("input_eof", "input()\n", stdin="", status=1),
    _case("stdin_lines", "import sys\nfor line in sys.stdin: print(repr(line))\n", stdin="a\nb"),
    _case("stdin_null", "import sys\nprint(repr(sys.stdin.read()))\n"),
    _case("dup2_redirect", """
        import os, sys
        out = os.open("got.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        saved = os.dup(1)
        os.dup2(out, 1)
        print("into the file"); os.system("echo from a shell")
        os.dup2(saved, 1)
        print(open("got.txt").read())
        """),
    _case("faulthandler", """
        import faulthandler, os, signal, resource, sys
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        print(faulthandler.is_enabled())
        faulthandler.enable()
        def crash(): os.kill(os.getpid(), signal.SIGSEGV)
        crash()
        """, status=-11, frames=True),
    _case("faulthandler_dump", """
        import faulthandler, sys
        def here(): faulthandler.dump_traceback(all_threads=True)
        here()
        """, frames=True),
    _case("warnings_shown", """
        import warnings
        def old(): warnings.warn("this is old", DeprecationWarning, stacklevel=2)
        old()
        warnings.warn("user warning")
        warnings.warn("user warning")
        for i in range(2): warnings.warn("in a loop")
        print([(f[0], f[2].__name__) for f in warnings.filters])
        """),
    _case("warnings_option", "import warnings\nwarnings.warn('fatal')\n", status=1,
          env={"PYTHONWARNINGS": "error"}),
    _case("warning_in_module", "import quiet, loud\nloud.f()\n", files={
        "quiet.py": "import warnings\nwarnings.warn('hidden', DeprecationWarning)\n",
        "loud.py": "import warnings\ndef f(): warnings.warn('shown', stacklevel=2)\n"}),
    _case("resource_warning_dev_mode", "open('main.py')\nprint('x')\n",
          env={"PYTHONDEVMODE": "1"}),
    _case("logging_root", """
        import logging
        print(logging.getLogger().handlers, logging.getLogger().level)
        logging.warning("root warning")
        logging.basicConfig(level="INFO", format="%(processName)s %(threadName)s %(message)s")
        logging.info("now shown once")
        """),
]  # fmt: skip

PROCESSES = [
    _case("os_fork", """
        import os, sys
        pid = os.fork()
        if pid == 0:
            print("child")
            os._exit(3)
        print("parent", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """),
    _case("fork_child_runs_to_the_end", """
        import os, sys, atexit
        atexit.register(print, "exit handler")
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
        print("end", bool(pid))
        """),
    *[_case(f"multiprocessing_{method}", f"""
        import multiprocessing as mp

        class Job:
            def __init__(self, n): self.n = n

        def square(job): return job.n ** 2, __name__

        if __name__ == "__main__":
            print(mp.current_process().name, mp.parent_process(), mp.get_start_method())
            context = mp.get_context("{method}")
            with context.Pool(2) as pool:
                print(pool.map(square, [Job(1), Job(2), Job(3)]))
        else:
            pass
        """) for method in ("fork", "spawn", "forkserver")],
    _case("multiprocessing_set_start_method", """
        import multiprocessing as mp
        def f(q): q.put(__name__)
        if __name__ == "__main__":
            mp.set_start_method("spawn")
            q = mp.Queue()
            p = mp.Process(target=f, args=(q,))
            p.start(); print(q.get()); p.join(); print(p.exitcode, p.name)
        """),
    _case("spawn_under_m", "", run=("-m", "pkg.go"), files={
        "pkg/__init__.py": "",
        "pkg/go.py": dedent("""
            import multiprocessing as mp
            from . import __name__ as parent
            class T: pass
            def f(t): return type(t).__module__, __name__, parent
            if __name__ == "__main__":
                with mp.get_context("spawn").Pool(1) as pool:
                    print(pool.apply(f, (T(),)))
            """)}),
    _case("process_pool_executor", """
        from concurrent.futures import ProcessPoolExecutor
        def f(x): return x * 2
        if __name__ == "__main__":
            with ProcessPoolExecutor(2) as pool:
                print(list(pool.map(f, range(4))))
        """),
    _case("subprocess", """
        import subprocess, sys, os
        print(subprocess.run([sys.executable, "-c", "import sys; print(sys.argv, 7)"],
                             capture_output=True, text=True).stdout)
        print(subprocess.call("exit 4", shell=True), os.system("true"))
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError as error:
            print("no children", error)
        """),
    _case("asyncio", """
        import asyncio
        async def main():
            process = await asyncio.create_subprocess_exec("echo", "from asyncio",
                                                           stdout=asyncio.subprocess.PIPE)
            print((await process.communicate())[0], process.returncode)
        asyncio.run(main())
        """),
    _case("execv_first", "import os; os.execv('/bin/echo', ['echo', 'replaced', os.getcwd()])\n"),
    _case("execv_python", """
        import os, sys
        if len(sys.argv) < 2:
            os.execv(sys.executable, [sys.executable, "main.py", "again"])
        print("second life", sys.argv, sys.stdout.write_through)
        """),
    _case("reexec_by_orig_argv", """
        import os, sys
        if "DONE" not in os.environ:
            os.environ["DONE"] = "1"
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
        print("again", sys.argv, sys.orig_argv[1:])
        """, run=("main.py", "x")),
    _case("session_and_group", """
        import os
        print(os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid())
        os.setpgid(0, 0) if os.getpgid(0) != os.getpid() else None
        print(len(os.listdir("/proc/self/task")))
        """, env={"EXPECT_SESSION": "1"}),
]  # fmt: skip

IMPORTS = [
    _case("never_imports_torch", """
        import sys
        if len(sys.argv) > 9:
            import torch  # so that the zygote has all that torch scripts need
        print("torch" in sys.modules)
        print([type(f).__name__ if not isinstance(f, type) else f.__name__
               for f in sys.meta_path][-3:])
        """),
    _case("torch_is_whole", """
        import sys, torch
        print(torch.__version__, torch.__file__ == torch.__spec__.origin, torch.__spec__.name)
        import torch.nn as nn, torch.distributed as dist, torch.utils.data
        print(nn.Linear(1, 1, bias=False).weight.shape, dist.is_available(), dist.is_initialized())
        print(type(torch.__loader__).__name__)
        print(torch.__path__ == torch.__spec__.submodule_search_locations)
        import importlib; print(importlib.import_module("torch.nn.functional") is nn.functional)
        """),
    _case("from_torch_import", "from torch.nn import Linear\nfrom torch import tensor as t\n"
          "print(Linear.__module__, t([1.5]))\n"),
    _case("import_dotted_first", "import torch.utils.data.distributed\nprint(torch.float32)\n"),
    _case("find_spec_torch", "import importlib.util, sys\n"
          "print(importlib.util.find_spec('torch').name, 'torch' in sys.modules)\n"
          "from importlib import metadata\nprint(metadata.version('torch'))\n"),
    _case("torch_imported_in_thread", """
        import threading
        found = []
        def load():
            import torch
            found.append(torch.ones(2).sum().item())
        threads = [threading.Thread(target=load) for _ in range(4)]
        [t.start() for t in threads]; [t.join() for t in threads]
        print(found)
        """),
    _case("torch_imported_after_fork", """
        import os
        pid = os.fork()
        import torch
        # Both at once, and alike: in one write each, since print makes two of a line under -u.
        os.write(1, b"%d\\n" % torch.arange(3).sum().item())
        if pid:
            os.waitpid(pid, 0)
        """),
    _case("threads_default", "import torch\nprint(torch.get_num_threads())\n"
          "print(torch.get_num_interop_threads())\n"),
    _case("threads_set_by_script", """
        import torch
        torch.set_num_threads(3); torch.set_num_interop_threads(2)
        print(torch.get_num_threads(), torch.get_num_interop_threads())
        print((torch.randn(500, 500, generator=torch.Generator().manual_seed(1)) @
               torch.ones(500, 1)).shape)
        """),
    _case("omp_set_by_script", """
        import os
        os.environ["OMP_NUM_THREADS"] = "3"
        import torch
        print(torch.get_num_threads())
        """),
    _case("omp_set_after_import", """
        import os, torch
        before = torch.get_num_threads()
        os.environ["OMP_NUM_THREADS"] = "7"
        print(torch.get_num_threads() == before)
        """),
    _case("mkl_set_by_script", """
        import os
        os.environ["MKL_NUM_THREADS"] = "1"
        import torch
        print(torch.get_num_threads(), torch.__config__.parallel_info().count("MKL"))
        """),
    _case("omp_in_environment", "import torch\nprint(torch.get_num_threads())\n",
          env={"OMP_NUM_THREADS": "2"}),
    _case("torch_logs_set_by_script", """
        import os
        os.environ["TORCH_LOGS"] = "+torch.distributed"
        import torch, logging
        print(logging.getLogger("torch.distributed").level, logging.getLogger("torch").level)
        print(len(logging.getLogger("torch.distributed").handlers))
        """),
    _case("torch_logs_in_environment", """
        import torch, logging
        print(logging.getLogger("torch.distributed").level, logging.getLogger("torch").level)
        """, env={"TORCH_LOGS": "+torch.distributed"}, streams=("stdout",)),
    _case("random_state", """
        import torch, random
        torch.manual_seed(7)
        print(torch.initial_seed(), torch.rand(3), torch.get_rng_state().sum())
        random.seed(1); print(random.random())
        """),
    _case("torch_defaults", """
        import torch
        import torch.multiprocessing as mp
        print(torch.get_default_dtype(), torch.is_grad_enabled())
        print(torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled)
        print(torch.get_float32_matmul_precision(), torch.is_inference_mode_enabled())
        print(mp.get_start_method(allow_none=True), mp.get_sharing_strategy())
        """),
    _case("dataloader_spawn", """
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Numbers(Dataset):
            def __len__(self): return 4
            def __getitem__(self, i): return i * 10

        def collate(items): return torch.tensor(items), __name__

        if __name__ == "__main__":
            loader = DataLoader(Numbers(), 2, num_workers=1, collate_fn=collate,
                                multiprocessing_context="spawn")
            for batch in loader: print(batch)
        """),
    _case("dataloader_fork", """
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Numbers(Dataset):
            def __len__(self): return 4
            def __getitem__(self, i): return i * 10

        for batch in DataLoader(Numbers(), 2, num_workers=2): print(batch)
        """),
    _case("torch_mp_spawn", """
        import torch, torch.multiprocessing as mp
        def f(i, t): t[i] = i + 1
        if __name__ == "__main__":
            shared = torch.zeros(2).share_memory_()
            mp.spawn(f, (shared,), nprocs=2)
            print(shared)
        """),
    _case("torch_exception", "import torch\ntorch.ones(2) @ torch.ones(3)\n", status=1),
    _case("gc_and_interpreter", """
        import gc, os, sys
        # Not how much is frozen: see conformance/differences.py.
        print(gc.isenabled(), gc.get_threshold(), gc.get_debug())
        print(sys.getswitchinterval(), sys.getprofile(), sys.gettrace(), sys.dont_write_bytecode)
        print(os.path.realpath(sys.executable), sys.prefix, sys.base_prefix, sys.path)
        """),
]  # fmt: skip

# FRTEST_EQUIVALENCE=torchrun shows what of the comparison itself does not hold still.
LAUNCHER = os.environ.get("FRTEST_EQUIVALENCE", "flashrun")

_COLD = [*MAIN_MODULE, *ENDINGS, *STREAMS, *PROCESSES, *IMPORTS]


def _warm(case: Case) -> Case:
    """The same with a zygote that has loaded all of torch: of a script that could import it."""
    files = {**case.files, "main.py": case.files["main.py"] + "\nif 0:\n    import torch\n"}
    return replace(case, name=f"{case.name}_warm", files=files)


WARM = [_warm(case) for case in _COLD if case.run == ("main.py",) and case.status != 1
        and "main.py" in case.files and not may_import_torch(case.files["main.py"])]  # fmt: skip
# One for each thing that a process with more modules, hooks and handlers in it could do otherwise.
_WARM_STAY = {f"{name}_warm" for name in (
    "pickle_main_class", "atexit_order", "warnings_shown", "multiprocessing_spawn", "faulthandler")}
CASES = [*_COLD, *WARM]

# Scripts whose workers can't be forks; every other is served by the zygote.
_FRESH = {
    "local_modules_shadow", "local_module_shadows_stdlib_loaded_by_torch", "mkl_set_by_script",
}  # fmt: skip

# Left to `scripts/test -m slow`: each asks the same of flashrun as the case beside it, by another
# value or with less around it.
NEAR_DUPLICATES = {
    "script_in_subfolder": "file_relative_paths",
    "doc_string": "name_guard",
    "indentation_error": "syntax_error",
    "exit_255": "exit_3",
    "exit_1000": "exit_257",
    "exit_float": "exit_tuple",
    "raise_system_exit_in_function": "exit_3",
    "builtin_exit": "builtin_quit",
    "exception_group_and_notes": "uncaught_exception",
    "stdin_null": "input_eof",
    "multiprocessing_set_start_method": "multiprocessing_spawn",
    "process_pool_executor": "multiprocessing_fork",
    "execv_python": "reexec_by_orig_argv",
    "from_torch_import": "torch_is_whole",
    "import_dotted_first": "torch_is_whole",
    "omp_set_after_import": "omp_set_by_script",
}


def _write(case: Case, folder: Path) -> None:
    for name, text in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        encoding = "latin-1" if "coding: latin-1" in text else "utf-8"
        path.write_text(text, encoding=encoding)


def _environment(case: Case, folder: Path) -> dict[str, str]:
    env = {"PYTHONHASHSEED": "5", "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(folder / "tmp")}
    return helpers.clean_environment({**env, **case.env})


def _normal(text: str) -> list[str]:
    """Lines without addresses, process ids and the launcher's own lines."""
    text = re.sub(r"0x[0-9a-f]{6,}", "0x…", text)
    text = re.sub(r"Process-\d+(:\d+)*|Thread 0x…", "<task>", text)
    text = re.sub(r"^<sys>:0: ", "sys:1: ", text, flags=re.M)
    text = re.sub(r"^.*ResourceWarning: subprocess.*$\n", "", text, flags=re.M)
    return text.strip("\n").split("\n")


def _cut_frames(text: str) -> str:
    """Without frames of flashrun and the list of C modules in memory (faulthandler)."""
    text = re.sub(r'^  File "[^"]*/flashrun/[^"]*", line .*\n(?:    .*\n)*', "", text, flags=re.M)
    return re.sub(r"^\n?Extension modules: .*\n", "", text, flags=re.M)


def _worker_status(finished: helpers.Finished) -> int:
    """The exit status of the only worker: 0, or what the report says."""
    if finished.status == 0:
        return 0
    report = harness.report(finished.stderr, lambda text: text)
    assert report, finished.describe()
    return int(report["root"]["0"]["exitcode"])


Pair = tuple[helpers.Finished, helpers.Finished]


@pytest.fixture(scope="session")
def ahead(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[helpers.Ahead[Case, Pair]]:
    """The plain and the launched run of a case, made while the cases before are looked at."""
    home = tmp_path_factory.mktemp("cases")

    def both(case: Case) -> Pair:
        folder = home / str(CASES.index(case))  # short: unix socket paths
        (folder / "tmp").mkdir(parents=True)
        _write(case, folder)
        options = {"env": _environment(case, folder), "cwd": folder, "stdin": case.stdin}
        plain = helpers.run([sys.executable, "-u", *case.run], **options)
        flags = ["--nproc-per-node=1", *case.run]
        return plain, helpers.run([*helpers.launcher(LAUNCHER), *flags], **options)

    items = request.session.items
    cases = [i.callspec.params["case"] for i in items if "test_same_as_python[" in i.name]
    runner = helpers.Ahead(both, cases, workers=(os.cpu_count() or 2) + 1, depth=6)
    yield runner
    runner.close()


def test_near_duplicates_are_of_cases_that_stay() -> None:
    names = {case.name for case in CASES}
    assert len(names) == len(CASES)
    assert set(NEAR_DUPLICATES) < names
    assert names > _WARM_STAY | _FRESH
    assert names - set(NEAR_DUPLICATES) >= set(NEAR_DUPLICATES.values())


def _is_slow(case: Case) -> bool:
    return case.name in NEAR_DUPLICATES or (case in WARM and case.name not in _WARM_STAY)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] * _is_slow(case))
        for case in CASES
    ],
)
def test_same_as_python(case: Case, ahead: helpers.Ahead[Case, Pair]) -> None:
    plain, launched = ahead.get(case, timeout=150)
    assert plain.status == case.status, plain.describe()
    shown = f"{plain.describe()}\n\n{launched.describe()}"
    assert _worker_status(launched) == case.status, shown
    if LAUNCHER == "flashrun":
        fresh = "workers start as fresh processes" in launched.stderr
        assert fresh == (case.name.removesuffix("_warm") in _FRESH), shown
    for stream in case.streams:
        expected = _normal(getattr(plain, stream))
        got = getattr(launched, stream)
        got = _cut_frames(got) if case.frames else got
        got = _normal(harness.worker_text(got) if stream == "stderr" else got)
        if got != expected:
            difference = "\n".join(difflib.unified_diff(expected, got, "python", LAUNCHER, n=1))
            pytest.fail(f"{stream} differs\n{difference}\n\n{shown}", pytrace=False)


_ASK = """
import sys
with open("/proc/self/environ", "rb") as file:
    fresh = b"LOCAL_RANK=" in file.read()  # a forked worker keeps the launcher's environment there
print("plain" if fresh else "forked")
"""


@pytest.mark.parametrize(
    ("script", "env", "flags", "expected"),
    [
        (_ASK, {}, [], "forked"),
        (_ASK, {}, ["-m"], "forked"),
        (_ASK + "import os; os.environ['OMP_NUM_THREADS'] = '1'\n", {}, [], "forked"),
        (_ASK + "import os; os.environ['MKL_NUM_THREADS'] = '1'\n", {}, [], "plain"),
        (_ASK, {}, ["--no-zygote"], "plain"),
        (_ASK, {"PYTHON_EXEC": f"{sys.prefix}/bin/python3.{sys.version_info.minor}"}, [], None),
    ],
)
def test_worker_is_what_it_should_be(
    script: str, env: dict[str, str], flags: list[str], expected: str | None, tmp_path: Path
) -> None:
    """The comparisons above would say nothing of the zygote if it served none of them."""
    (tmp_path / "ask.py").write_text(script)
    target = "ask" if "-m" in flags else "ask.py"
    finished = helpers.run(
        [*helpers.launcher("flashrun"), *flags, target],
        env=helpers.clean_environment(env),
        cwd=tmp_path,
    )
    assert finished.status == 0, finished.describe()
    assert finished.stdout.strip() in ({expected} if expected else {"plain", "forked"})


def test_zip_and_folder(tmp_path: Path) -> None:
    source = "import sys, inspect\ndef f(): return 1\nprint(sys.argv, __file__, __spec__.name)\n"
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text(source + "print(inspect.getsource(f))\n")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", source + "import beside\nprint(beside.__file__)\n")
        archive.writestr("beside.py", "")
    for target in ("app", "app.zip"):
        plain = helpers.run([sys.executable, "-u", target, "x"], cwd=tmp_path)
        launched = helpers.run([*helpers.launcher(LAUNCHER), target, "x"], cwd=tmp_path)
        assert (launched.status, launched.stdout) == (plain.status, plain.stdout)


def test_ranks_have_their_own_randomness(tmp_path: Path) -> None:
    """A fresh interpreter draws its seeds from the system; so must each forked one."""
    (tmp_path / "draw.py").write_text(
        "import os, random, sys, tempfile, uuid\n"
        "import numpy, torch\n"
        "import multiprocessing as mp\n"
        "draws = [torch.initial_seed(), torch.rand(1).item(), random.random(), numpy.random.rand(),"
        " uuid.uuid4(), torch.Generator().initial_seed(), next(tempfile._get_candidate_names()),"
        " bytes(mp.current_process().authkey).hex(), numpy.random.default_rng().random()]\n"
        "sys.stdout.write(' '.join(map(str, draws)) + '\\n')\n"
    )
    finished = helpers.run(
        [*helpers.launcher(LAUNCHER), "--nproc-per-node=2", "draw.py"], cwd=tmp_path
    )
    assert finished.status == 0, finished.describe()
    one, two = (line.split() for line in finished.stdout.splitlines())
    # torch.Generator() is the exception: its seed is a constant.
    assert [a == b for a, b in zip(one, two, strict=True)] == [i == 5 for i in range(9)]
