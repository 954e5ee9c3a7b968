"""The table of the conformance suite: what is run under both launchers.

In arguments and environment values ``{work}`` is the working directory with the scripts,
``{logs}`` a folder for logs that does not exist yet, ``{out}`` where the probe writes, and
``{port}`` a free port (one for each launcher and row).

``do`` tells the probe what to do after it has dumped what it sees; see ``scripts/probe.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """One run under each launcher.

    Attributes:
        name: the test's name.
        args: the launcher's arguments before the script.
        script: the script, module or program; empty for none.
        script_args: what follows it.
        do: the steps of the probe.
        env: variables added to the clean environment.
        agents: arguments added for each agent; one agent for each entry, started at once.
        stdin: what is piped into the launcher; None for /dev/null.
        signal: sent to the (first) launcher once ``ready`` marks exist.
        ready: how many files ``ready.*`` the probes write before the signal.
        closed_stdout: the launcher's stdout is a pipe that nobody reads any more.
        cwd: working directory, relative to ``{work}``.
        preexec: name of a preparation in the launcher's process (see harness.PREPARATIONS).
        refused: torchrun does not run this at all.
    """

    name: str
    args: tuple[str, ...] = ()
    script: str = "probe.py"
    script_args: tuple[str, ...] = ()
    do: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    agents: tuple[tuple[str, ...], ...] = ((),)
    stdin: str | None = None
    signal: str = ""
    ready: int = 1
    closed_stdout: bool = False
    cwd: str = ""
    preexec: str = ""
    refused: bool = False


def _row(name: str, args: str = "", *script: str, **options: object) -> Row:
    if script:
        options["script"], options["script_args"] = script[0], tuple(script[1:])
    return Row(name, tuple(args.split()), **options)  # type: ignore[arg-type]


_TWO = "--nproc-per-node=2"
_STATIC = "--nnodes=2 --nproc-per-node=1 --master-addr=127.0.0.1 --master-port={port}"
_C10D = "--nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port}"

COMMAND_LINE = [
    _row("bare"),
    _row("nproc_auto", "--nproc-per-node=auto"),
    _row("nproc_cpu", "--nproc-per-node=cpu"),
    _row("underscores", "--nproc_per_node 2 --max_restarts 1 --monitor_interval 0.05"),
    _row("abbreviated", "--nproc-per=2 --stand"),
    _row("standalone", "--standalone --nproc-per-node=2"),
    _row("standalone_overrides", "--standalone --rdzv-id=mine --rdzv-backend=c10d"),
    _row("nnodes_elastic_one_node", "--nnodes=1:3 --rdzv-backend=c10d "
         "--rdzv-endpoint=localhost:{port} --rdzv-conf=last_call_timeout=1 --rdzv-id=elastic"),
    _row("role", "--role=trainer --nproc-per-node=2 -t 3"),
    _row("local_addr", "--local-addr=127.0.0.1 --nproc-per-node=1"),
    _row("static_single", "--master-addr=127.0.0.1 --master-port={port} --nproc-per-node=2"),
    _row("static_localhost", "--node-rank=0 --master-addr=localhost --master-port={port}"),
    _row("static_endpoint", "--rdzv-backend=static --rdzv-endpoint=127.0.0.1:{port} --rdzv-id=7"),
    _row("static_two_agents_two_ranks", "--nnodes=2 --nproc-per-node=2 --master-port={port}",
         agents=(("--node-rank=0",), ("--node-rank=1",))),
    _row("c10d_one_agent", "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} --rdzv-id=job7"),
    _row("c10d_port_0", "--rdzv-backend=c10d --rdzv-endpoint=localhost:0 --rdzv-id=j"),
    _row("c10d_conf", "--rdzv-backend=c10d --rdzv-endpoint=localhost:{port} --rdzv-id=conf "
         "--rdzv-conf=is_host=1,read_timeout=30,join_timeout=60"),
    _row("small_flags", "--nnodes=1:1 --nproc-per-node=1 --signals-to-handle=SIGTERM,SIGUSR1 "
         "--shutdown-timeout=5 --start-method=fork --monitor-interval=0.5"),
    _row("virtual_local_rank", _TWO + " --virtual-local-rank",
         env={"CUDA_VISIBLE_DEVICES": "5,3"}),
    _row("virtual_local_rank_unrestricted", _TWO + " --virtual-local-rank"),
    _row("logs_specs", _TWO + " --logs-specs=mine --log-dir={logs}",
         env={"PYTHONPATH": "{work}/plugin"}),
    _row("event_log_console", "--event-log-handler=console"),
    _row("event_log_console_failure", "--event-log-handler=console --max-restarts=1",
         do="*:kill=SIGKILL"),
]  # fmt: skip

WHAT_IS_RUN = [
    _row("absolute_script", "", "{work}/probe.py"),
    _row("script_in_folder", "", "./sub/real.py"),
    _row("symlinked_script", "", "link.py"),
    _row("script_with_space", "", "grüße 2.py", "a b", "ä✓"),
    _row("script_without_extension", "", "noext"),
    _row("folder_with_main", "", "app"),
    _row("zip_with_main", "", "app.zip", "x"),
    _row("module_package", "-m", "pkg", "--flag"),
    _row("module_submodule", "--module", "pkg.mod", "1"),
    _row("module_single_file", "-m", "probe"),
    _row("module_from_pythonpath", "-m", "pkg.mod", cwd="sub", env={"PYTHONPATH": "{work}"}),
    _row("no_python_shell", "--no-python", "./run.sh", "one two", "${local_rank}"),
    _row("no_python_shebang", "--no_python --nproc-per-node=2", "./executable.py", "z"),
    _row(
        "no_python_from_path",
        "--no-python",
        "python3",
        "probe.py",
        "q",
        env={"PATH": f"{sys.prefix}/bin:/usr/bin:/bin"},
    ),
    _row("run_path", "--run-path", "{work}/probe.py", "a", "--b"),
    _row("run_path_raises", "--run-path", "{work}/probe.py", do="*:raise=from run_path"),
    _row("run_path_exit_0", "--run-path", "{work}/probe.py", do="*:exit=0"),
    _row("python_exec", "", "probe.py", env={"PYTHON_EXEC": "{work}/mypython"}),
    _row("args_spaces_unicode_empty", "", "probe.py", "a b", "", "ünï", "--x=1", "-v", "*", "'\""),
    _row(
        "args_after_script_like_ours",
        "",
        "probe.py",
        "--nproc-per-node=7",
        "--standalone",
        "a",
        "--",
        "b",
    ),
    _row("args_ambiguous_after_script", "", "probe.py", "--logs", "x", "--n", "3", refused=True),
    _row("args_double_dash_first", "", "probe.py", "--", "b"),
    _row("macro_local_rank", _TWO, "probe.py", "${local_rank}", "--gpu=${local_rank}", "$x"),
]

ENVIRONMENT = [
    _row("pet_defaults", "", env={
        "PET_NPROC_PER_NODE": "2", "PET_ROLE": "pet", "PET_MAX_RESTARTS": "2",
        "PET_MONITOR_INTERVAL": "0.2"}),
    _row("pet_log_dir_and_tee", _TWO, env={"PET_LOG_DIR": "{logs}", "PET_TEE": "1:3"}),
    _row("pet_module_and_override", "--nproc-per-node=1", "pkg",
         env={"PET_MODULE": "1", "PET_NPROC_PER_NODE": "2"}),
    _row("pet_standalone", "", env={"PET_STANDALONE": "1"}),
    _row("omp_set", _TWO, env={"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "1,0"}),
    _row("omp_one_rank", "--nproc-per-node=1", "torch_probe.py", do="*:torch"),
    _row("prefix_template", "-t 3 --role=r --nproc-per-node=2",
         env={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name}/${rank}/${local_rank}> "}),
    _row("torchelastic_passed", "", env={"TORCHELASTIC_ENABLE_FILE_TIMER": "0", "RANK": "9",
                                         "WORLD_SIZE": "10", "MASTER_PORT": "1",
                                         "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}),
    _row("pythonpath", "", env={"PYTHONPATH": "{work}/sub:/nowhere"}),
    _row("pythonsafepath", "", env={"PYTHONSAFEPATH": "1"}),
    _row("pythonwarnings", "", do="*:warn=careful", env={"PYTHONWARNINGS": "error::UserWarning"}),
    _row("pythonhashseed", "", env={"PYTHONHASHSEED": "11"}),
    _row("pythonoptimize", "", env={"PYTHONOPTIMIZE": "1", "PYTHONDONTWRITEBYTECODE": "1"}),
    _row("pythondevmode", "", env={"PYTHONDEVMODE": "1"}),
    _row("pythonutf8_off", "", do="*:bytes", env={"PYTHONUTF8": "0", "LC_ALL": "C",
                                                  "PYTHONCOERCECLOCALE": "0"}),
    _row("pythonioencoding", "", do="*:unicode", env={"PYTHONIOENCODING": "utf-8:replace"}),
    _row("stdin_piped", "", do="*:stdin", stdin="line one\nline two\n"),
    _row("inherited", "", preexec="inherited"),
    _row("nohup", "", preexec="ignore_sighup"),
    _row("stdin_closed", "", preexec="close_stdin"),
]  # fmt: skip

LOGS = [
    _row("redirect_all", _TWO + " -r 3 --log-dir={logs}"),
    _row("redirect_map", _TWO + " -r 0:1,1:2 --log-dir={logs}"),
    _row("tee_all", _TWO + " -t 3 --log-dir={logs}"),
    _row("tee_map", _TWO + " --tee=0:3,1:1 --log-dir={logs}"),
    _row("tee_and_redirect", _TWO + " -r 3 -t 0:2 --log-dir={logs}"),
    _row("tee_without_log_dir", "-t 1"),
    _row("redirect_without_log_dir", "-r 3"),
    _row("log_dir_only", "--log-dir={logs}"),
    _row("log_dir_dev_null", "--log-dir=/dev/null"),
    _row("ranks_filter", _TWO + " --local-ranks-filter=1"),
    _row("ranks_filter_tee", _TWO + " --local-ranks-filter=0 -t 3 --log-dir={logs}"),
    _row(
        "tee_filters_and_ranks",
        _TWO + " -r 1 -t 0:3,1:3 --local-ranks-filter=1 --duplicate-stdout-filters=line "
        "--duplicate-stderr-filters=warning --log-dir={logs}",
        do="*:lines=3,warn=a warning",
    ),
    _row(
        "duplicate_filters",
        _TWO + " --duplicate-stdout-filters=rank,,x,attempt "
        "--duplicate-stderr-filters=nothing -t 3 --log-dir={logs}",
    ),
    _row(
        "duplicate_filter_matches",
        _TWO + " --duplicate-stdout-filters=line -r 3 --log-dir={logs}",
        do="*:lines=3",
    ),
    # One rank, one stream: torchrun's own lines of two tees end up in one another.
    _row("many_lines_tee", "-t 1 --log-dir={logs}", do="*:lines=2000"),
    _row("no_newline_at_end_tee", "-t 1 --log-dir={logs}", do="*:unicode,out=no newline"),
    _row("child_output_tee", "-t 3 --log-dir={logs}", do="*:child"),
    _row("not_utf8_redirected", "-r 1 --log-dir={logs}", do="*:bytes"),
    _row(
        "restart_logs",
        _TWO + " -t 3 --log-dir={logs} --max-restarts=1",
        do="0@0:after=1;1@0:after=0,exit=5;0@0:sleep",
    ),
]

ENDINGS = [
    *[_row(f"exit_{n}", "", do=f"*:exit={n}") for n in (1, 255)],
    _row("exit_0", "", do="*:exit=0"),
    _row("exit_string", "", do="*:exitstr=good bye"),
    _row("exception", "", do="*:raise=boom"),
    _row("keyboard_interrupt", "", do="*:interrupt"),
    _row("os_exit", "", do="*:osexit=6"),
    *[_row(f"kills_itself_{n}", "", do=f"*:core,kill={n}")
      for n in ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM")],
    _row("error_file", "--log-dir={logs}", do="*:errorfile=written,exit=7"),
    _row("recorded", "--log-dir={logs}", "torch_probe.py", do="*:record=recorded"),
    _row("recorded_parent_file", "", do="*:errorfile=inner,exit=7",
         env={"TORCHELASTIC_ERROR_FILE": "{out}/parent.json"}),
    _row("one_of_two_fails", _TWO, do="1:after=0,exit=3;0:after=1,sleep"),
    _row("one_fails_other_has_handler", _TWO + " -t 1 --log-dir={logs}",
         do="0:handler=0,mark=ready,sleep;1:after=0,sleep=0.3,exit=3"),
    _row("one_finished_other_fails", _TWO, do="1:after=0,sleep=0.5,exit=3"),
    _row("fails_then_succeeds", "--max-restarts=2", do="*@0:exit=3"),
    _row("fails_then_succeeds_two", _TWO + " --max-restarts=1",
         do="0@0:after=1,sleep;1@0:after=0,exit=1"),
    _row("killed_then_succeeds", "--max-restarts=1", do="*@0:kill=SIGKILL"),
    _row("fails_too_often", _TWO + " --max-restarts=1",
         do="0:after=1,sleep;1:after=0,exit=2"),
    _row("static_two_agents_one_fails", _STATIC, agents=(("--node-rank=0",), ("--node-rank=1",)),
         do="0:after=1,exit=3;1:after=0,sleep=2"),
    *[_row(f"{n.lower()}_to_launcher", _TWO, do="*:mark=ready,sleep", signal=n, ready=2)
      for n in ("SIGTERM", "SIGHUP", "SIGQUIT")],
    # One rank: two write their tracebacks at once, and unbuffered pieces of lines mix.
    _row("sigint_to_launcher", "", do="*:mark=ready,sleep", signal="SIGINT"),
    _row("sigterm_with_handlers", _TWO + " -t 1 --log-dir={logs}",
         do="*:handler=0,mark=ready,sleep", signal="SIGTERM", ready=2),
    _row("sigterm_with_failing_handlers", "", do="*:handler=9,mark=ready,sleep", signal="SIGTERM"),
    _row("sigterm_ignored_by_worker", "--shutdown-timeout=1",
         do="*:ignore=SIGTERM,mark=ready,sleep", signal="SIGTERM"),
    _row("launcher_stdout_closed", "", closed_stdout=True),
    _row("worker_closes_stdout", "", do="*:closestdout"),
]  # fmt: skip

GLOO = [
    _row("gloo_plain", _TWO, "torch_probe.py", do="*:gloo"),
    _row("gloo_static_two_agents", _STATIC + " --role=r", "torch_probe.py", do="*:gloo",
         agents=(("--node-rank=1",), ("--node-rank=0",))),
    _row("gloo_c10d_two_agents", _C10D + " --rdzv-id=job8", "torch_probe.py", agents=((), ()),
         do="*:gloo"),
    _row("gloo_one_fails", _TWO, "torch_probe.py", do="*:gloo;1:exit=3;0:sleep"),
]  # fmt: skip

ROWS = [*COMMAND_LINE, *WHAT_IS_RUN, *ENVIRONMENT, *LOGS, *ENDINGS, *GLOO]

# Left to `scripts/test -m slow`: each says the same of a launcher as the row beside it, by another
# value or with less around it.
NEAR_DUPLICATES = {
    "abbreviated": "underscores",
    "standalone_overrides": "standalone",
    "nproc_cpu": "nproc_auto",
    "static_localhost": "static_single",
    "c10d_port_0": "standalone",
    "absolute_script": "script_in_folder",
    "script_without_extension": "symlinked_script",
    "module_single_file": "module_submodule",
    "pet_standalone": "pet_defaults",
    "pet_log_dir_and_tee": "pet_defaults",
    "pythonpath": "module_from_pythonpath",
    "pythonioencoding": "pythonutf8_off",
    "pythonoptimize": "pythondevmode",  # and each of its processes compiles all of torch
    "redirect_all": "tee_and_redirect",
    "tee_without_log_dir": "role",
    "tee_map": "redirect_map",
    "ranks_filter": "tee_filters_and_ranks",
    "ranks_filter_tee": "tee_filters_and_ranks",
    "exit_0": "bare",
    "exit_255": "exit_1",
    "kills_itself_SIGABRT": "kills_itself_SIGSEGV",
    "fails_then_succeeds_two": "restart_logs",
    "sigquit_to_launcher": "sighup_to_launcher",
    "gloo_plain": "gloo_one_fails",
}
