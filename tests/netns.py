"""Nodes as network namespaces: a switch between them, links that can be cut, no names.

All of a :class:`Network` is in its own namespaces (veth pairs between them, a bridge in the one of
the switch); nothing is added to the machine's own network, and all of it goes with them.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest

_MADE_FOR = Path("/etc/netns")


def ip(*arguments: str) -> None:
    """``ip ARGUMENTS``; raises CalledProcessError with what it said."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@functools.cache
def why_not() -> str | None:
    """Why there can be no namespaces here, None when there can."""
    if shutil.which("ip") is None:
        return "needs ip (Debian's iproute2)"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    try:
        with Network(1):
            return None
    except RuntimeError as error:
        return f"no network namespaces here ({error})"


def need() -> None:
    """Skip the test where there can be no namespaces."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


class Network:
    """``nodes`` namespaces; a context manager.

    Args:
        kind: ``flat``: all in 10.77.0.0/24; ``routed``: each in a subnet of its own, with the
            switch as router; ``ipv6``: fd77::/64 and no IPv4; ``two``: each has a first interface
            by which nobody else is reached, and ``flat``'s.
        bad: node -> what its cable does: seconds that a frame takes, share of them that is lost.
        seed: which frames are lost.
    """

    def __init__(
        self, nodes: int, kind: str = "flat", bad: Mapping[int, tuple[float, float]] | None = None,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.kind = kind
        self.bad, self.seed = bad or {}, seed
        self._cables: list[subprocess.Popen[str]] = []
        mark = uuid.uuid4().hex[:6]
        self.switch = f"frsw-{mark}"
        self.names = [f"frn{i}-{mark}" for i in range(nodes)]

    def address(self, node: int) -> str:
        if self.kind == "ipv6":
            return f"fd77::{node + 1}"
        return f"10.77.{node}.1" if self.kind == "routed" else f"10.77.0.{node + 1}"

    @property
    def switch_address(self) -> str:
        """At which every node reaches what runs in the switch's namespace."""
        return {"ipv6": "fd77::ff", "routed": "10.77.0.254"}.get(self.kind, "10.77.0.254")

    def within(self, node: int) -> list[str]:
        """The command that runs another one on a node."""
        return ["ip", "netns", "exec", self.names[node]]

    def cut(self, node: int) -> None:
        """Take the node's cable out, at the switch's end."""
        ip("-n", self.switch, "link", "set", f"v{node}", "down")

    def mend(self, node: int) -> None:
        ip("-n", self.switch, "link", "set", f"v{node}", "up")

    def forget(self, node: int, address: str) -> None:
        """Lose what the node sends to one address; everything else goes through."""
        ip("-n", self.names[node], "route", "add", "blackhole", address)

    def remember(self, node: int, address: str) -> None:
        ip("-n", self.names[node], "route", "del", "blackhole", address)

    # --------------------------------------------------------------------------------------------

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for cable in self._cables:
            cable.kill()
            cable.communicate()
        for name in (*self.names, self.switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)
            shutil.rmtree(_MADE_FOR / name, ignore_errors=True)
        if _MADE_FOR.is_dir() and not any(_MADE_FOR.iterdir()):
            _MADE_FOR.rmdir()

    def _make(self) -> None:
        for name in (self.switch, *self.names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        for name in self.names:
            folder = _MADE_FOR / name
            folder.mkdir(parents=True)
            # No name but localhost stands for anything, and whoever asks is refused at once.
            (folder / "hosts").write_text("127.0.0.1 localhost\n")
            (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1\n")
        if self.kind != "routed":
            ip("-n", self.switch, "link", "add", "name", "bridge", "type", "bridge")
            self._up(self.switch, "bridge", self._with_length(self.switch_address))
        for node, name in enumerate(self.names):
            if self.kind == "two":
                ip("-n", self.switch, "link", "add", "name", f"u{node}", "type", "veth",
                   "peer", "name", "first", "netns", name)  # fmt: skip
                ip("-n", self.switch, "link", "set", f"u{node}", "up")
                self._up(name, "first", f"10.66.0.{node + 1}/24")
            if node in self.bad:
                self._lay_bad_cable(node)
            else:
                ip("-n", self.switch, "link", "add", "name", f"v{node}", "type", "veth",
                   "peer", "name", "eth", "netns", name)  # fmt: skip
            self._up(name, "eth", self._with_length(self.address(node)))
            if self.kind == "routed":
                self._up(self.switch, f"v{node}", f"10.77.{node}.254/24")
                ip("-n", name, "route", "add", "default", "via", f"10.77.{node}.254")
            else:
                ip("-n", self.switch, "link", "set", f"v{node}", "master", "bridge", "up")
        if self.kind == "routed":
            forward = "echo 1 >/proc/sys/net/ipv4/ip_forward"
            subprocess.run(["ip", "netns", "exec", self.switch, "sh", "-c", forward], check=True)

    def _lay_bad_cable(self, node: int) -> None:
        delay, lost = self.bad[node]
        words = [sys.executable, "-m", "tests.bad_cable", "eth", f"v{node}", str(delay), str(lost)]
        cable = subprocess.Popen(
            [*self.within(node), *words, str(self.seed + node)], stdout=subprocess.PIPE, text=True,
            cwd=Path(__file__).parents[1],
        )  # fmt: skip
        self._cables.append(cable)
        assert cable.stdout is not None
        if cable.stdout.readline() != "ready\n":
            raise RuntimeError("no TAP devices here (/dev/net/tun)")
        ip("-n", self.names[node], "link", "set", f"v{node}", "netns", self.switch)

    def _with_length(self, address: str) -> str:
        return f"{address}/{64 if ':' in address else 24}"

    def _up(self, name: str, link: str, address: str) -> None:
        more = ["nodad"] if ":" in address else []
        ip("-n", name, "addr", "add", address, "dev", link, *more)
        ip("-n", name, "link", "set", link, "up")
