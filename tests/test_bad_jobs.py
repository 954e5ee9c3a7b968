"""Agents that do not fit together, and places where no job can be: refused by a line that says what
differs or what is wrong, while the job that is there goes on."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import etcd, helpers
from tests.jobs import Job, job

BODY = """
    tell("ready")
    await_release("go")
"""


@pytest.mark.slow  # the parts: test_coordinator.py
@pytest.mark.parametrize("backend", ["flash", "flash-etcd"])
def test_an_agent_with_other_flags_and_a_second_job(tmp_path: Path, backend: str) -> None:
    flags = ["--nnodes=2", "--nproc-per-node=1", f"--rdzv-backend={backend}", "--rdzv-id=one"]
    with ExitStack() as stack:
        if backend == "flash-etcd":
            etcd.need()
            cluster = stack.enter_context(etcd.Cluster(tmp_path / "etcd"))
            flags.append(f"--rdzv-endpoint={cluster.config().endpoints[0]}")
        else:
            flags.append(f"--rdzv-endpoint=127.0.0.1:{helpers.free_port()}")

        def agent(name: str, *more: str) -> Job:
            return stack.enter_context(
                job(tmp_path, BODY, *flags, *more, name=name, fifos=("go",))
            )

        first = agent("n0")
        first.await_output("1 of at least 2 nodes are here", "err")
        other = agent("other", "--max-restarts=2", "--detection-timeout=30")
        assert other.ended() == 1
        for words in ("does not fit job 'one'", "max_restarts is 2 here and 0 in the job",
                      "detection_timeout is 30.0 here and 15.0 in the job"):  # fmt: skip
            assert words in other.err, other.describe()
        second = agent("n1")
        for node in (first, second):
            node.await_told("ready")
        late = agent("late")  # of a second job, for all that its user knows
        late.await_output("a second job needs its own", "err")
        for node in (first, second):
            node.release("go")
        for node in (first, second):
            assert node.ended() == 0, node.describe()
        assert late.ended() == 0 and not late.told("ready")


def test_nobody_at_the_endpoint(tmp_path: Path) -> None:
    where = f"127.0.0.1:{helpers.free_port()}"
    flags = ["--rdzv-backend=flash-etcd", f"--rdzv-endpoint={where}", "--rdzv-conf=read_timeout=1"]
    etcd.need()
    with job(tmp_path, BODY, *flags) as run:
        assert run.ended() == 1
        assert f"etcd at {where} did not answer within 1 s" in run.err, run.describe()
        assert "Check that a majority of the members runs" in run.err
        assert "Traceback" not in run.err


def _look_from_outside(flags: list[str], env: dict[str, str]) -> None:
    """With what it takes to get in, and without."""
    for command, *words, says in (
        ("status", "1 node(s), 1 ranks"),
        ("cordon", "0", "--reason=hot", "warning: 0 other node(s) are left"),
        ("nodes", "cordoned: hot"),
        ("uncordon", "0", "may have ranks again from the next round on"),
    ):
        line = [*helpers.launcher("flashrun"), command, *words, *flags]
        with helpers.start(line, env=helpers.clean_environment(env)) as asked:
            finished = asked.wait(60)
        assert finished.status == 0 and says in finished.stdout, finished.describe()
    with helpers.start(line, env=helpers.clean_environment({"ETCD_PASSWORD": "wr0ng"})) as asked:
        finished = asked.wait(60)
    assert finished.status == 1 and "Check the user and the password" in finished.stderr


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["", "password", "authority"])
def test_a_cluster_with_users_and_certificates(tmp_path: Path, wrong: str) -> None:
    etcd.need()
    files = etcd.make_certificates(tmp_path / "certificates")
    with etcd.Cluster(tmp_path / "etcd", certificates=files, mutual=True) as cluster:
        for method, request, fields in (
            ("UserAdd", "AuthUserAddRequest", {"name": "root", "password": "s3cret"}),
            ("UserGrantRole", "AuthUserGrantRoleRequest", {"user": "root", "role": "root"}),
            ("AuthEnable", "AuthEnableRequest", {}),
        ):
            cluster.ask(cluster.members[0], "AuthStub", method, request, **fields)
        ca = files.other_ca if wrong == "authority" else files.ca
        conf = f"ca_cert={ca},ssl_cert={files.client},ssl_cert_key={files.client_key},user=root"
        flags = ["--rdzv-backend=flash-etcd", f"--rdzv-conf={conf}",
                 f"--rdzv-endpoint=https://{cluster.config().endpoints[0]}"]  # fmt: skip
        password = "wr0ng" if wrong == "password" else "s3cret"
        env = {"ETCD_PASSWORD": password}
        with job(tmp_path, BODY, *flags, env=env, fifos=("go",)) as run:
            if not wrong:
                run.await_told("ready")
                _look_from_outside(flags, env)
                run.release("go")
            assert run.ended() == (1 if wrong else 0), run.describe()
        assert bool(run.told("ready")) == (not wrong)
        says = {"": "", "password": "Check the user and the password",
                "authority": "ca_cert holds the authority"}  # fmt: skip
        assert says[wrong] in run.err, run.describe()
        assert "Traceback" not in run.err and password not in run.err
