"""What torch alone gives: runs scripts on forked ranks, without a launcher and without flashrun.

A process of its own, which has imported torch once: that makes a run some tenths of a second. One
JSON line in (script, args, folder, port, world), one out (the ranks' exit codes).
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed
import torch.utils.data  # so that the forks need not import it


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun gives to a worker, as far as scripts and frameworks look at it."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": str(world), "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }  # fmt: skip


def worker(rank: int, request: dict) -> int:
    """Be one rank; the exit code."""
    os.environ.update(environment(rank, request["world"], request["port"]))
    os.chdir(request["folder"])
    script = request["script"]
    sys.argv = [script, *request["args"]]
    sys.path[0] = str(Path(script).parent)
    output = os.open(
        f"{request['output']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600
    )  # fmt: skip
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:  # noqa: BLE001  (whatever it is, the test shows it)
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
    return 0


def main() -> None:
    torch.set_num_threads(1)  # before the forks: OpenMP does not survive them
    for line in sys.stdin:
        request = json.loads(line)
        children = []
        for rank in range(request["world"]):
            pid = os.fork()
            if pid == 0:
                code = worker(rank, request)
                sys.stdout.flush()
                os._exit(code)  # as a forked worker of multiprocessing ends
            children.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main()
