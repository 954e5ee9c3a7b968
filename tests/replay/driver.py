"""One process of a replay test: runs a script under a minimal runtime without process groups.

    driver.py reference  RUN_DIR SCRIPT        dump values and states at every boundary
    driver.py record     RUN_DIR SCRIPT KILL_AT MICROSECONDS
    driver.py catchup    RUN_DIR SCRIPT TARGET REFERENCE_DUMP [KILL_AT MICROSECONDS]

KILL_AT 0 never kills. MICROSECONDS -1 kills in the optimizer step of the interval.
A recorded run leaves ``record.dump`` with what it has at KILL_AT.
"""

from __future__ import annotations

import copy
import os
import pickle
import random
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch

from flashrun.worker.replay import elsewhere
from flashrun.worker.replay.api import Divergence, Mode, Replay

PLAIN = (int, float, str, bool, bytes, type(None))
_clock, _cpu, _pid = time.perf_counter, time.process_time, os.getpid


class OtherNode:
    """Another node, whose registry is under a folder; asked without a network."""

    def __init__(self, run_dir: str) -> None:
        self.root = Path(run_dir) / "view"

    def numbers(self):
        return [0]

    def name(self, number):
        return "the other node"

    def ask(self, requests):
        return {n: elsewhere.answer(self.root, request)[0] for n, request in requests.items()}

    def copy(self, number, request, path):
        header, parts = elsewhere.answer(self.root, request)
        with open(path, "wb") as file:
            file.writelines(parts)
        return header


class Runtime:
    def __init__(self, run_dir: str, mode: Mode, incarnation: int) -> None:
        self.mode = mode
        self.boundary = 0
        self.rank = 0
        self.world_size = 1
        self.incarnation = incarnation
        other = os.environ.get("REPLAY_OTHER")
        self.others = OtherNode(other) if other else None
        self.run_dir = Path(run_dir)
        self.events: list[dict] = []

    def log(self, event) -> None:
        self.events.append(dict(event))

    def fills(self, b):
        """Best weights are sent by peers (worker/own.py), which this driver has not got; the script
        that keeps them does not use them."""
        for frame in frames(os.path.abspath(sys.argv[0])):
            return list(frame.f_globals.get("best_state", {}).values())
        return []

    def diverged(self, error) -> None:
        print("DIVERGENCE", error, flush=True)
        os._exit(3)


def plain(value, depth=4):
    """A comparable copy of what is plain in a value, None for the rest."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.tobytes())
    if type(value) is torch.Tensor:
        return ("tensor", str(value.dtype), tuple(value.shape), value.detach().numpy().tobytes())
    if depth and isinstance(value, (list, tuple)):
        return [plain(v, depth - 1) for v in value]
    if depth and isinstance(value, dict):
        return {str(k): plain(value[k], depth - 1) for k in sorted(value, key=str)}
    if isinstance(value, (torch.optim.lr_scheduler.LRScheduler,
                          torch.optim.lr_scheduler.ReduceLROnPlateau)):
        return {k: plain(v) for k, v in value.state_dict().items() if k != "lr_lambdas"}
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if depth and type(value).__module__ == "__main__":
        return {k: plain(v, depth - 1) for k, v in sorted(vars(value).items())}
    return None


def frames(script):
    frame = sys._getframe(1)
    found = []
    while frame is not None:
        if frame.f_code.co_filename == script:
            found.append(frame)
        frame = frame.f_back
    return found[::-1]


def variables(script, unchecked):
    found = {}
    for i, frame in enumerate(frames(script)):
        for name, value in frame.f_locals.items():
            if not name.startswith("__") and name not in unchecked:
                found[f"{i}.{name}"] = plain(value)
    return found


def random_states():
    return (
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        pickle.dumps(np.random.get_state()),
    )


def roots(script):
    """Everything with state in the script's frames, by its name."""
    found = {}

    def look(name, value, depth):
        if isinstance(value, (torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler)):
            found[name] = value
        elif depth and type(value).__module__ == "__main__":
            for key, member in vars(value).items():
                look(f"{name}.{key}", member, depth - 1)

    for i, frame in enumerate(frames(script)):
        for name, value in frame.f_locals.items():
            look(f"{i}.{name}", value, 1)
    return found


def main() -> None:
    action, run_dir, script = sys.argv[1:4]
    script = os.path.abspath(script)
    rest = sys.argv[4:]
    # computed by skipped regions (or copies of weights): not known at the boundary
    unchecked = {"out", "fake", "logits", "best_state"}
    unchecked.update(os.environ.get("REPLAY_UNCHECKED", "").split())
    rt = Runtime(run_dir, Mode.CATCHUP if action == "catchup" else Mode.LIVE, 0)
    replay = Replay()
    dumps = {}
    reference = {}
    timing = {}
    dumps_at = Path(os.environ.get("REPLAY_DUMPS", run_dir))
    kill_at, wait = 0, 0
    if action == "record":
        kill_at, wait = int(rest[0]), int(rest[1])
    if action == "catchup" and len(rest) > 2:
        kill_at, wait = int(rest[2]), int(rest[3])
    if action == "catchup":
        target = int(rest[0])
        with open(rest[1], "rb") as file:
            reference = pickle.load(file)  # noqa: S301  (written by the test)
    kills = os.kill

    def killer() -> None:
        end = _clock() + wait * 1e-6
        while _clock() < end:
            pass
        kills(_pid(), signal.SIGKILL)

    def snapshot():
        return {
            "values": variables(script, unchecked),
            "random": random_states(),
            "state": copy.deepcopy({n: o.state_dict() for n, o in roots(script).items()}),
        }

    def boundary() -> None:
        rt.boundary += 1
        b = rt.boundary
        if action == "reference":
            dumps[b] = snapshot()
            return
        replay.at_boundary(rt, b)
        if action == "record" and b == kill_at:
            session = replay.session
            session.on = False
            with open(dumps_at / "record.dump", "wb") as file:
                pickle.dump({b: snapshot()}, file)
            session.on = True
        if rt.mode is Mode.LIVE and b == kill_at and wait >= 0:
            threading.Thread(target=killer, daemon=True).start()
        if rt.mode is Mode.CATCHUP and b == target:
            replay.finish_catchup(rt, b)
            rt.mode = Mode.LIVE
            timing["catchup"] = _clock() - timing["start"]
            timing["cpu"] = _cpu() - timing["cpu"]
            session, on = replay.session, replay.session.on
            session.on = False  # the comparison is not the script's
            compare(reference[b], snapshot(), b)
            state = reference[b]["state"]
            for name, holder in roots(script).items():
                holder.load_state_dict(copy.deepcopy(state[name]))
            replay.after_state(rt, b)
            restore_random(reference[b]["random"])
            session.on = on

    def restore_random(states) -> None:
        if random_states() != states:
            raise SystemExit("random states moved")

    def compare(wanted, got, b) -> None:
        problems = []
        if wanted["random"] != got["random"]:
            which = [i for i in range(3) if wanted["random"][i] != got["random"][i]]
            problems.append(f"random states {which}")
        for name in sorted(wanted["values"].keys() | got["values"].keys()):
            one, two = wanted["values"].get(name), got["values"].get(name)
            if repr(one) != repr(two):
                problems.append(f"{name}: {str(one)[:300]} != {str(two)[:300]}")
        if wanted["state"].keys() != got["state"].keys():
            problems.append("other objects with state")
        if problems:
            raise SystemExit(f"MISMATCH at boundary {b}: " + "; ".join(problems))

    if action != "catchup":  # as entropy may have it; the replacement gets them from the log
        random.seed(99)
        np.random.seed(99)
    if action == "record":
        replay.start_recording(rt)
    elif action == "catchup":
        timing["start"], timing["cpu"] = _clock(), _cpu()
        try:
            replay.start_catchup(rt)
        except Divergence as error:
            print("DIVERGENCE", error, flush=True)
            raise SystemExit(3) from error
        replay.set_target(target)
        if not target:
            replay.finish_catchup(rt, 0)
            rt.mode = Mode.LIVE

    original = torch.optim.Optimizer.profile_hook_step
    depth = [0]

    def outer(func):
        def step(*args, **kwargs):
            if wait < 0 and not depth[0] and rt.boundary == kill_at:
                kills(_pid(), signal.SIGKILL)
            depth[0] += 1
            try:
                value = func(*args, **kwargs)
            finally:
                depth[0] -= 1
            if not depth[0]:
                boundary()
            return value

        return step

    torch.optim.Optimizer.profile_hook_step = staticmethod(lambda f: outer(original(f)))
    torch.amp.GradScaler.step = outer(torch.amp.GradScaler.step)

    error = None
    final = {}

    def at_end() -> None:
        """Called by scripts as their last act, in the frame that holds everything."""
        replay_on = action != "reference" and replay.session.on
        if replay_on:
            replay.session.on = False
        final.update(snapshot())

    import builtins

    builtins.at_end = at_end
    sys.argv = [script]
    try:
        runpy.run_path(script, run_name="__main__")
    except Divergence as divergence:
        error = divergence
    except BaseException:
        if rt.mode is Mode.CATCHUP:
            replay.abort_catchup()  # what follows is to be seen
        raise
    if error is not None:
        replay.abort_catchup()
        print("DIVERGENCE", error, flush=True)
        raise SystemExit(3)
    dumps["final"] = final
    dumps["events"] = rt.events
    dumps["boundaries"] = rt.boundary
    dumps["timing"] = timing
    with open(dumps_at / f"{action}.dump", "wb") as file:
        pickle.dump(dumps, file)


if __name__ == "__main__":
    main()
