"""A real etcd cluster on loopback, with or without TLS; its members can be killed and frozen."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from flashrun.rendezvous.etcd_config import EtcdConfig, EtcdTiming
from flashrun.rendezvous.kv import StoreLost, StoreRefused
from tests import helpers

FAST = EtcdTiming(call=20.0, attempt=0.5)
"""For a server whose elections take 0.2 s."""


def program() -> str | None:
    """The etcd server: ``.venv/bin/etcd`` (scripts/etcd-server) or one that is installed."""
    beside = Path(sys.executable).parent / "etcd"
    return str(beside) if beside.exists() else shutil.which("etcd")


def why_not() -> str | None:
    """Why there can be no etcd here, None when there can."""
    if program() is None:
        return "needs an etcd server (scripts/etcd-server gets Debian's)"
    if importlib.util.find_spec("etcd3") is None:
        return "needs the etcd client (pip install 'flashrun[etcd]')"
    return None


def need() -> None:
    """Skip the test where there is no etcd."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@dataclass(frozen=True)
class Certificates:
    """Files made by :func:`make_certificates`; ``other_ca`` signed nothing here."""

    ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path
    other_ca: Path
    other_client: Path
    other_key: Path


def make_certificates(folder: Path) -> Certificates:
    """An authority with a server's and a client's certificate, and one that nobody trusts."""
    folder.mkdir(parents=True, exist_ok=True)
    for authority in ("ca", "other-ca"):
        _openssl("req", "-x509", *_key(folder, authority), "-out", folder / f"{authority}.pem",
                 "-subj", f"/CN={authority}", "-days", "2")  # fmt: skip
    for name, authority in (("server", "ca"), ("client", "ca"), ("other-client", "other-ca")):
        _openssl("req", *_key(folder, name), "-out", folder / f"{name}.csr",
                 "-subj", f"/CN={name}")  # fmt: skip
        extensions = folder / f"{name}.ext"
        extensions.write_text("subjectAltName=IP:127.0.0.1\n")
        _openssl("x509", "-req", "-in", folder / f"{name}.csr", "-out", folder / f"{name}.pem",
                 "-CA", folder / f"{authority}.pem", "-CAkey", folder / f"{authority}.key",
                 "-CAcreateserial", "-days", "2", "-extfile", extensions)  # fmt: skip
    files = ("ca.pem", "server.pem", "server.key", "client.pem", "client.key", "other-ca.pem",
             "other-client.pem", "other-client.key")  # fmt: skip
    return Certificates(*(folder / name for name in files))


def _key(folder: Path, name: str) -> list[str | Path]:
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    return [*curve, "-keyout", folder / f"{name}.key"]


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


@dataclass
class Member:
    """One server process; ``start`` again after ``kill`` finds its data."""

    name: str
    port: int
    peer_port: int
    folder: Path
    arguments: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; it answers a little later."""
        parent = os.getpid()
        libc = ctypes.CDLL(None)

        def die_with_us() -> None:
            libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:
                os._exit(1)

        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.arguments,
                env=helpers.clean_environment({"ETCD_UNSUPPORTED_ARCH": os.uname().machine}),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                preexec_fn=die_with_us,
            )

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def freeze(self) -> None:
        assert self.process is not None
        helpers.freeze(self.process.pid)

    def kill(self) -> None:
        """SIGKILL; thaws nothing first, and waits for the end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(20)
            self.process = None


class Cluster:
    """``size`` members on free ports with their data under ``folder``; a context manager.

    Args:
        fast: heartbeat 20 ms and election 200 ms instead of 100 ms and 1 s.
        certificates: speak TLS; ``mutual``: and ask clients for a certificate.
    """

    def __init__(
        self,
        folder: Path,
        size: int = 1,
        *,
        fast: bool = True,
        certificates: Certificates | None = None,
        mutual: bool = False,
        more: Sequence[str] = (),
    ) -> None:
        binary = program()
        assert binary is not None
        folder.mkdir(parents=True, exist_ok=True)
        self._certificates = certificates
        self._mutual = mutual
        scheme = "http" if certificates is None else "https"
        ports: set[int] = set()
        while len(ports) < 2 * size:  # free_port may give one twice
            ports.add(helpers.free_port())
        self.members = [Member(f"m{i}", ports.pop(), ports.pop(), folder) for i in range(size)]
        peers = ",".join(f"{m.name}=http://127.0.0.1:{m.peer_port}" for m in self.members)
        for member in self.members:
            client, peer = (f"{scheme}://127.0.0.1:{member.port}",
                            f"http://127.0.0.1:{member.peer_port}")  # fmt: skip
            member.arguments = [
                binary, f"--name={member.name}", f"--data-dir={folder / member.name}",
                f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster={peers}", "--logger=zap", "--log-level=warn", *more,
            ]  # fmt: skip
            if fast:
                member.arguments += ["--heartbeat-interval=20", "--election-timeout=200"]
            if certificates is not None:
                member.arguments += [
                    f"--cert-file={certificates.server}", f"--key-file={certificates.server_key}",
                ]  # fmt: skip
            if mutual and certificates is not None:
                member.arguments += [
                    "--client-cert-auth=true", f"--trusted-ca-file={certificates.ca}"
                ]  # fmt: skip

    def config(self, **changes: Any) -> EtcdConfig:
        """How to reach this cluster."""
        config = EtcdConfig(
            tuple(f"127.0.0.1:{m.port}" for m in self.members), prefix="/test/", timing=FAST
        )
        if self._certificates is not None:
            config = replace(config, tls=True, ca=self._certificates.ca)
            if self._mutual:
                cert, key = self._certificates.client, self._certificates.client_key
                config = replace(config, cert=cert, key=key)
        return replace(config, **changes)

    def start(self) -> None:
        """Start all members and wait until the cluster serves writes."""
        for member in self.members:
            member.start()
        self.await_health()

    def await_health(self) -> None:
        from flashrun.rendezvous.etcd_store import EtcdStore

        with EtcdStore(self.config(prefix="/health/"), report=lambda line: None) as store:
            try:
                store.put("up", b"1")
            except (StoreLost, StoreRefused) as error:
                logs = [(m.folder / f"{m.name}.log").read_text()[-1500:] for m in self.members]
                raise RuntimeError("the servers did not start:\n" + "\n\n".join(logs)) from error

    def status(self, member: Member) -> Any:
        """What a member says of itself: ``leader``, ``header.member_id``, ``raftTerm``."""
        return self.ask(member, "MaintenanceStub", "Status", "StatusRequest")

    def ask(self, member: Member, stub: str, method: str, request: str, **fields: Any) -> Any:
        """Send a request of etcd's interface to one member, beside our own client."""
        from flashrun.rendezvous.etcd_client import grpc
        from flashrun.rendezvous.etcd_client import rpc as etcdrpc

        c = self._certificates
        where = f"127.0.0.1:{member.port}"
        if c is None:
            channel = grpc.insecure_channel(where)
        else:
            files = (c.ca, c.client_key, c.client)
            channel = grpc.secure_channel(
                where, grpc.ssl_channel_credentials(*(f.read_bytes() for f in files))
            )
        metadata = fields.pop("metadata", None)
        with channel:
            call = getattr(getattr(etcdrpc, stub)(channel), method)
            return call(getattr(etcdrpc, request)(**fields), timeout=10, metadata=metadata)

    def leader(self) -> Member:
        """The member that leads now."""
        for member in self.members:
            try:
                status = self.status(member)
            except Exception:  # noqa: BLE001  # a member that is down or frozen: ask the next
                continue
            if status.leader:
                break
        else:
            raise RuntimeError("no member knows a leader")
        for candidate in self.members:
            try:
                if self.status(candidate).header.member_id == status.leader:
                    return candidate
            except Exception:  # noqa: BLE001  # as above
                continue
        raise RuntimeError("the leader does not answer")

    def kill(self) -> None:
        """SIGKILL all members; their data stays."""
        for member in self.members:
            member.kill()

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Traffic:
    """Writes 0, 1, 2, … to one key in a thread and watches them on another client."""

    def __init__(self, config: EtcdConfig) -> None:
        from flashrun.rendezvous.etcd_store import EtcdStore

        self.lines: list[str] = []
        self._writer = EtcdStore(config, self.lines.append)
        self._reader = EtcdStore(config, self.lines.append)
        self._watch = self._reader.watch("n")
        self._end = threading.Event()
        self.written: list[float] = []  # when each was acknowledged (monotonic)
        self.seen: list[tuple[int, float]] = []
        self.resynced = 0
        self.error: Exception | None = None
        self._progress = threading.Condition()
        self._threads = [threading.Thread(target=t) for t in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    def _write(self) -> None:
        try:
            while not self._end.is_set():
                self._writer.put("n", str(len(self.written)).encode())
                with self._progress:
                    self.written.append(time.monotonic())
                    self._progress.notify_all()
                self._end.wait(0.002)
        except Exception as error:  # noqa: BLE001  # told by finish
            self.error = error
            with self._progress:
                self._progress.notify_all()

    def _read(self) -> None:
        idle_since = time.monotonic()
        while not self._end.is_set() or len(self.seen) < len(self.written):
            events = self._watch.get(0.1)
            if not events and self._end.is_set() and time.monotonic() - idle_since > 20:
                return  # ``lost`` finds what is missing
            if events:
                idle_since = time.monotonic()
            with self._progress:
                self.seen += [(int(event.value), time.monotonic()) for event in events]
                self.resynced += sum(event.resynced for event in events)
                self._progress.notify_all()

    def await_more(self, count: int, timeout: float = 30.0) -> float:
        """Until ``count`` further writes were acknowledged and seen; seconds to the first."""
        begun, goal = time.monotonic(), len(self.written) + count
        with self._progress:
            assert self._progress.wait_for(
                lambda: min(len(self.written), len(self.seen)) >= goal or self.error, timeout
            ), f"{len(self.written)} written and {len(self.seen)} seen, not {goal}, in {timeout} s"
        if self.error is not None:
            raise self.error
        return self.written[goal - count] - begun

    def longest_gap(self) -> tuple[float, float]:
        """The longest silence, seconds, in what was acknowledged and in what was seen."""
        gaps = [[b - a for a, b in itertools.pairwise(times)]
                for times in (self.written, [when for _, when in self.seen])]  # fmt: skip
        return max(gaps[0]), max(gaps[1])

    def finish(self) -> None:
        """End the traffic; raises what the writer raised."""
        self._end.set()
        for thread in self._threads:
            thread.join()
        self._writer.close()
        self._reader.close()
        if self.error is not None:
            raise self.error

    def lost(self) -> int:
        """How many of the writes the watch did not give exactly once and in order."""
        numbers = [number for number, _ in self.seen]
        if numbers == list(range(len(self.written))):
            return 0
        return max(1, len(set(range(len(self.written))) - set(numbers)))


class Proxy:
    """Passes connections on to a port, and for a while what the server answers is lost."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._links: list[socket.socket] = []
        self._deaf = threading.Event()
        self.swallowed = threading.Event()  # an answer was lost
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return  # closed
            self._links += [client, server]
            for source, target, answers in ((client, server, False), (server, client, True)):
                thread = threading.Thread(
                    target=self._pass, args=(source, target, answers), daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _pass(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        try:
            while data := source.recv(65536):
                if answers and self._deaf.is_set():
                    self.swallowed.set()
                    continue
                target.sendall(data)
        except OSError:
            pass  # cut
        for link in (source, target):
            try:
                link.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # cut already

    def swallow(self) -> None:
        """Lose the answers from now on."""
        self.swallowed.clear()
        self._deaf.set()

    def cut(self) -> None:
        """Break all connections; those that come later work."""
        links, self._links = self._links, []
        for link in links:
            try:
                link.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the other side was first
            link.close()
        self._deaf.clear()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(5)
