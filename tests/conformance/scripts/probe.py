"""The doc string of the probe."""

_NAMES = sorted(globals())  # before anything else of this script exists
import sys  # noqa: E402

_MODULES = sorted(set(sys.modules) & {"torch", "numpy", "flashrun", "psutil", "runpy", "asyncio"})
_PATH = list(sys.path)
_BUILTINS_IS_MODULE = __builtins__ is sys.modules["builtins"]

import atexit  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import locale  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import signal  # noqa: E402
import stat  # noqa: E402
import subprocess  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402

# Steps that need torch; see torch_steps.py, which the harness puts in the place of this line.
TORCH_STEPS = {}


def say(text, where="stdout"):
    # One write for a line with its end: with -u, print makes two, and lines of ranks would mix.
    getattr(sys, where).write(text + "\n")


def stream(s):
    if s is None:
        return None
    return {
        "class": type(s).__name__,
        "name": str(s.name),
        "encoding": s.encoding,
        "errors": s.errors,
        "line_buffering": s.line_buffering,
        "write_through": s.write_through,
        "mode": getattr(s, "mode", None),
        "buffer": type(s.buffer).__name__,
        "isatty": s.isatty(),
    }


def kind(fd):
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return "closed"
    for name in ("FIFO", "SOCK", "REG", "CHR", "DIR"):
        if getattr(stat, f"S_IS{name}")(mode):
            return name
    return "other"


def descriptors():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        with open(f"/proc/self/fdinfo/{name}") as info:
            flags = int(info.read().split("flags:")[1].split()[0], 8)
        inherit = os.get_inheritable(int(name))
        if target.startswith(("pipe:", "socket:")):
            target = target.split(":")[0]
        access = ("r", "w", "rw")[flags & 3]
        append = bool(flags & os.O_APPEND)
        block = not flags & os.O_NONBLOCK
        found[name] = f"{target} {access} {append=} {block=} {inherit=}"
    return found


def status_masks():
    wanted = ("SigBlk", "SigIgn", "NoNewPrivs", "Seccomp", "Threads")
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file if ":" in line)
    return {name: lines[name].strip() for name in wanted if name in lines}


def read(path):
    with open(path) as file:
        return file.read().strip()


def dispositions():
    found = {}
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        name = getattr(handler, "__name__", None) or getattr(handler, "name", str(handler))
        found[signal.Signals(number).name if number < 32 else str(number)] = name
    return found


def here():
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "removed"


def umask():
    value = os.umask(0)
    os.umask(value)
    return oct(value)


def main_module():
    import __main__

    return {
        "names": _NAMES,
        "__file__": globals().get("__file__"),
        "__name__": __name__,
        "__spec__": globals().get("__spec__")
        and [__spec__.name, __spec__.origin, type(__spec__.loader).__name__, __spec__.parent],
        "__package__": __package__,
        "__loader__": type(__loader__).__name__,
        "__loader__.name": getattr(__loader__, "name", None),
        "__cached__": globals().get("__cached__", "absent"),
        "__doc__": __doc__,
        "__path__": globals().get("__path__"),
        "__annotations__": globals().get("__annotations__", "absent"),
        "builtins_is_module": _BUILTINS_IS_MODULE,
        "is_sys_modules": __main__.__dict__ is globals(),
    }


def child_environment():
    # What a child process gets, which is not os.environ if somebody called putenv behind it.
    raw = subprocess.run(["/usr/bin/env", "-0"], stdout=subprocess.PIPE, check=True).stdout
    return dict(os.fsdecode(item).split("=", 1) for item in raw.split(b"\0") if b"=" in item)


def dump():
    result = {
        "env": dict(os.environ),
        "child_env": child_environment(),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "flags": {
            n: getattr(sys.flags, n)
            for n in dir(sys.flags)
            if not n.startswith(("_", "n_", "count", "index"))
        },
        "xoptions": {k: str(v) for k, v in sys._xoptions.items()},
        "warnoptions": sys.warnoptions,
        "warnings_filters": [[str(part) for part in f[:4]] for f in warnings.filters],
        "main": main_module(),
        "path": _PATH,
        "modules": _MODULES,
        "path_hooks": len(sys.path_hooks),
        "meta_path": [getattr(f, "__name__", type(f).__name__) for f in sys.meta_path],
        "executable": sys.executable,
        "prefix": sys.prefix,
        "hooks": {
            "excepthook": sys.excepthook is sys.__excepthook__,
            "displayhook": sys.displayhook is sys.__displayhook__,
            "threading": threading.excepthook.__module__,
            "unraisable": sys.unraisablehook is sys.__unraisablehook__,
            "trace": sys.gettrace() is None,
        },
        "interpreter": {
            "recursionlimit": sys.getrecursionlimit(),
            "switchinterval": sys.getswitchinterval(),
            "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0],
            "dont_write_bytecode": sys.dont_write_bytecode,
            "int_max_str_digits": sys.get_int_max_str_digits(),
            "fsencoding": [sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()],
            "main_thread": threading.current_thread() is threading.main_thread(),
            "thread_name": threading.current_thread().name,
            "atexit": atexit._ncallbacks(),
        },
        "cwd": here(),
        "umask": umask(),
        "session_leader": os.getsid(0) == os.getpid(),
        "group_leader": os.getpgid(0) == os.getpid(),
        "signals": dispositions(),
        "status": status_masks(),
        "comm": read("/proc/self/comm"),
        "nice": os.nice(0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "oom": read("/proc/self/oom_score_adj"),
        "threads": threading.active_count(),
        "fds": descriptors(),
        "stdin_kind": kind(0),
        "streams": {n: stream(getattr(sys, n)) for n in ("stdin", "stdout", "stderr")},
        "locale": [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(False)],
        "rlimits": {
            n: resource.getrlimit(getattr(resource, n))
            for n in dir(resource)
            if n.startswith("RLIMIT_")
        },
        "children": [],
    }
    rank = os.environ.get("RANK", "x")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    path = os.path.join(os.environ["PROBE_OUT"], f"rank{rank}.attempt{attempt}.json")
    with open(path + ".part", "w") as file:
        json.dump(result, file)
    os.rename(path + ".part", path)
    return rank, attempt


def await_file(path):
    deadline = time.monotonic() + 40
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.01)


def act(step, rank, attempt):
    action, _, value = step.partition("=")
    out = os.environ["PROBE_OUT"]
    if action == "exit":
        sys.exit(int(value))
    elif action == "exitstr":
        sys.exit(value)
    elif action == "osexit":
        os._exit(int(value))
    elif action == "raise":
        raise ValueError(value)
    elif action == "interrupt":
        raise KeyboardInterrupt
    elif action == "kill":
        os.kill(os.getpid(), getattr(signal, value))
        time.sleep(60)
    elif action == "core":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    elif action == "after":  # the other rank of this attempt has dumped
        await_file(os.path.join(out, f"rank{value}.attempt{attempt}.json"))
    elif action == "sleep":
        time.sleep(float(value or 600))
    elif action == "handler":  # a script that saves on SIGTERM and leaves in order

        def handler(number, frame):
            say(f"handler of rank {rank} got {signal.Signals(number).name}")
            sys.exit(int(value or 0))

        for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"):
            signal.signal(getattr(signal, name), handler)
    elif action == "ignore":
        signal.signal(getattr(signal, value), signal.SIG_IGN)
    elif action == "mark":
        path = os.path.join(out, f"{value}.{rank}")
        unseen = os.path.join(out, f"mark.{rank}")
        with open(unseen, "w") as file:
            file.write(str(os.getpid()))
        os.rename(unseen, path)
    elif action == "out":
        sys.stdout.write(value)
    elif action == "lines":
        for i in range(int(value)):
            say(f"line {i} of rank {rank}")
            say(f"error {i} of rank {rank}", "stderr")
    elif action == "bytes":
        sys.stdout.buffer.write(b"caf\xe9 \xff\n")
    elif action == "unicode":
        print("grüße ✓ 漢字")
    elif action == "stdin":
        print("stdin:", sys.stdin.read())
    elif action == "child":
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    elif action == "closestdout":
        os.close(1)
    elif action == "errorfile":  # what torch's own handler writes, without importing torch
        data = {
            "message": {
                "message": value,
                "extraInfo": {"py_callstack": f"made up: {value}", "timestamp": "1700000000"},
            }
        }
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            json.dump(data, file)
    elif action == "warn":
        warnings.warn(value, stacklevel=1)
    elif action in TORCH_STEPS:
        TORCH_STEPS[action](value, rank)
    else:
        raise SystemExit(f"unknown step {step}")


def main():
    rank, attempt = dump()
    say(f"out of rank {rank} attempt {attempt}")
    say(f"err of rank {rank} attempt {attempt}", "stderr")
    for part in filter(None, os.environ.get("PROBE_DO", "").split(";")):
        # "0:exit=3" for rank 0, "0@1:…" for its attempt 1, "*:…" and "*@0:…" for all ranks
        who, _, steps = part.partition(":")
        which, _, when = who.partition("@")
        if which in ("*", rank) and when in ("", attempt):
            for step in steps.split(","):
                act(step, rank, attempt)


main()
