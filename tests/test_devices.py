"""GPUs, where there is none: the launcher's questions to torch about them, and what it does with
the answers.

``pretended_gpus`` stands for two GPUs: torch says that they are there, each beside a processor of
its own, and notes which process has asked. A fork of that could not use them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from flashrun.devices import ask_apart
from tests import helpers, jobs

PRETENDED = """
import importlib.abc, importlib.machinery, os, sys

asked = set()  # pids; a fork inherits it


class Finder(importlib.abc.MetaPathFinder):
    '''torch.distributed.run imports this module, in either launcher, before it asks.'''

    def find_spec(self, name, path=None, target=None):
        if name != "torch.numa.binding":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), pretend(module))
        return spec


def pretend(binding):
    import torch

    def answering(answer):
        def answered(*args, **kwargs):
            asked.add(os.getpid())
            return answer(*args, **kwargs)
        return answered

    def beside(*, gpu_index, numa_options):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        cpus = sorted(os.sched_getaffinity(0))
        return {cpus[int(visible[gpu_index]) % len(cpus)]}

    torch.cuda.is_available = answering(lambda: True)
    torch.cuda.device_count = answering(lambda: 2)
    torch.accelerator.is_available = torch.cuda.is_available
    torch.accelerator.device_count = torch.cuda.device_count
    torch.accelerator.current_accelerator = lambda: torch.device("cuda")
    torch.cuda._is_compiled = lambda: True
    torch.cuda._is_in_bad_fork = lambda: bool(asked - {os.getpid()})
    binding._get_logical_cpus_to_bind_to = answering(beside)
    if "ASKS_EARLY" in os.environ:
        torch.cuda.is_available()


sys.meta_path.insert(0, Finder())
"""

# As numactl(8) does it; it is not installed everywhere.
NUMACTL = """#!{python}
import os, sys
option, *command = sys.argv[1:]
ends = option.removeprefix("--physcpubind=").split("-")
os.sched_setaffinity(0, range(int(ends[0]), int(ends[-1]) + 1))
os.execvp(command[0], command)
"""

BODY = """
import pretended_gpus
threads = None
if os.environ["WORLD_SIZE"] == "1":  # otherwise OMP_NUM_THREADS is set
    import torch
    threads = torch.get_num_threads()
tell("work", affinity=sorted(os.sched_getaffinity(0)), threads=threads,
     visible=os.environ.get("CUDA_VISIBLE_DEVICES"), world=os.environ["WORLD_SIZE"],
     asked=sorted(pretended_gpus.asked - {os.getpid()}))
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Of a machine with two GPUs."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "pretended_gpus.py").write_text(PRETENDED)
    (site / "sitecustomize.py").write_text("import pretended_gpus")
    numactl = site / "numactl"
    numactl.write_text(NUMACTL.format(python=sys.executable))
    numactl.chmod(0o755)
    return {"PYTHONPATH": str(site), "PATH": f"{site}:{os.environ['PATH']}"}


def workers(tmp_path: Path, launcher: str, environ: dict[str, str], *flags: str) -> list[dict]:
    """What each worker told, by rank."""
    home = tmp_path / f"{launcher}{len(list(tmp_path.iterdir()))}"
    home.mkdir()
    script = jobs.write_script(home, BODY)
    command = [*helpers.launcher(launcher), *flags, str(script)]
    forked = launcher == "flashrun" and "--no-zygote" not in flags
    with jobs.running(command, home, environ, forked=forked) as job:
        assert job.ended() == 0, job.describe()
        return sorted(job.told("work"), key=lambda told: told["rank"])


@pytest.mark.parametrize(
    "word", ["gpu", *(pytest.param(word, marks=pytest.mark.slow) for word in ("auto", "2"))]
)
def test_a_worker_is_no_fork_of_a_process_that_has_asked_for_gpus(
    tmp_path: Path, environ: dict[str, str], word: str
) -> None:
    found = workers(tmp_path, "flashrun", environ, f"--nproc-per-node={word}")
    assert [told["world"] for told in found] == ["2", "2"]
    assert [told["asked"] for told in found] == [[], []]


def test_workers_are_fresh_processes_where_forks_have_lost_the_gpus(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    early = {**environ, "ASKS_EARLY": "1"}
    [told] = workers(tmp_path, "flashrun", early, "--nproc-per-node=1", "--numa-binding=node")
    assert told["asked"] == []


@pytest.mark.parametrize(
    ("flags", "forked"),
    [
        (("--nproc-per-node=2", "--virtual-local-rank"), True),
        pytest.param((), True, marks=pytest.mark.slow),
        pytest.param((), False, marks=pytest.mark.slow),
    ],
)
def test_numa_binding(
    tmp_path: Path, environ: dict[str, str], flags: tuple[str, ...], forked: bool
) -> None:
    given = (*flags, "--numa-binding=node")
    expected = workers(tmp_path, "torchrun", environ, *given)
    assert all(len(told["affinity"]) == 1 for told in expected)
    own = () if forked else ("--no-zygote",)
    found = workers(tmp_path, "flashrun", environ, *given, *own)
    for name in ("affinity", "threads", "visible"):
        assert [told[name] for told in found] == [told[name] for told in expected], name
    assert [told["asked"] for told in found] == [[]] * len(expected)


def test_numa_binding_that_torch_cannot_find(tmp_path: Path, environ: dict[str, str]) -> None:
    script = jobs.write_script(tmp_path, 'tell("ran")')
    command = [*helpers.launcher("flashrun"), "--nproc-per-node=3", "--numa-binding=node"]
    ended = helpers.run([*command, str(script)], env=helpers.clean_environment(environ))
    assert ended.status == 2
    assert ended.stderr.splitlines()[-1] == (
        "flashrun: error: --numa-binding: cannot find the processors next to each GPU: list index"
        " out of range; leave it out"
    )


def test_an_answer_from_another_process() -> None:
    assert ask_apart(lambda: [os.getppid()]) == [os.getpid()]
    with pytest.raises(RuntimeError, match="no such device"):
        ask_apart(lambda: (_ for _ in ()).throw(OSError("no such device")))
    with pytest.raises(RuntimeError, match="ended with status 3"):
        ask_apart(lambda: os._exit(3))
