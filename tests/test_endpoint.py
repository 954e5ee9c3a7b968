"""Endpoints as torch reads them, IPv6 with and without brackets, and no name look-ups."""

from __future__ import annotations

import socket
import threading

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from flashrun.rendezvous import endpoint as module
from flashrun.rendezvous.endpoint import (
    EndpointError,
    is_local,
    is_loopback,
    join_host_port,
    listen_address,
    own_addresses,
    parse_endpoint,
    resolve,
)


@pytest.fixture
def no_dns(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*args: object, **kwargs: object) -> list[object]:
        raise AssertionError(f"a name was looked up: {args}")

    for name in ("getaddrinfo", "gethostbyname", "getfqdn", "gethostbyaddr", "getnameinfo"):
        monkeypatch.setattr(socket, name, look_up)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node-3:1234", "node-3", 1234),
        ("node-3", "node-3", 29400),
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("", "localhost", 29400),
        (None, "localhost", 29400),
        (" host : 1 ".replace(" ", ""), "host", 1),
        ("[::1]:29500", "::1", 29500),
        ("[::1]", "::1", 29400),
        ("::1", "::1", 29400),
        ("2001:db8::7", "2001:db8::7", 29400),
        ("[2001:db8::7]:80", "2001:db8::7", 80),
    ],
)
def test_parse(text: str | None, host: str, port: int) -> None:
    parsed = parse_endpoint(text, 29400)
    assert (parsed.host, parsed.port, parsed.text) == (host, port, (text or "").strip())


@pytest.mark.parametrize("text", ["host:port", "host:70000", "host:-1", "a b:1", "[::1]:x", "/x:1"])
def test_malformed(text: str) -> None:
    with pytest.raises(EndpointError, match="Right would be"):
        parse_endpoint(text, 29400)
    if text == "host:70000":
        with pytest.raises(EndpointError, match="between 0 and 65535"):
            parse_endpoint(text, 29400)


@given(st.text(alphabet="abz01.:-[]", max_size=12))
def test_reads_what_torch_reads(text: str) -> None:
    if module._is_ipv6(text.strip()):
        return  # torch takes the last group for a port
    try:
        expected = parse_rendezvous_endpoint(text, 5)
    except ValueError:
        with pytest.raises(EndpointError):
            parse_endpoint(text, 5)
        return
    parsed = parse_endpoint(text, 5)
    assert (parsed.host, parsed.port) == expected


def test_joined_again() -> None:
    assert join_host_port("::1", 5) == "[::1]:5"
    assert str(parse_endpoint("[::1]:5", 1)) == "[::1]:5"


@pytest.mark.usefixtures("no_dns")
@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("203.0.113.7", False),
        ("2001:db8::7", False),
    ],
)
def test_local_without_dns(host: str, local: bool) -> None:
    assert is_local(host) == local


@pytest.mark.usefixtures("no_dns")
def test_own_addresses_and_names_are_local_without_dns() -> None:
    assert all(is_local(address) for address in own_addresses())
    assert is_local(socket.gethostname())
    assert is_local("name-of-a-nat", local_addr="name-of-a-nat")


def test_unknown_name_is_not_local_and_says_so() -> None:
    assert not is_local("no-such-host.invalid", deadline_s=5.0)
    with pytest.raises(EndpointError, match="numeric address"):
        resolve("no-such-host.invalid", 5.0)


def test_silent_name_service_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hang(*args: object, **kwargs: object) -> list[object]:
        release.wait(30)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    with pytest.raises(EndpointError, match="not resolved within"):
        resolve("slow.example", 0.05)
    release.set()


def test_loopback() -> None:
    assert is_loopback("localhost") and is_loopback("127.0.1.1") and is_loopback("::1")
    assert not is_loopback("10.0.0.1") and not is_loopback("node-3")


@pytest.mark.parametrize("several", [False, True])
def test_listens_no_wider_than_needed(several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    own = sorted(a for a in own_addresses() if not is_loopback(a) and ":" not in a)
    names = {"debian-name": ["127.0.1.1"], "nat-name": ["203.0.113.7"], "here": own[:1]}

    def answer(host: str, deadline_s: float = 0.0) -> list[str]:
        return names.get(host, [host])

    monkeypatch.setattr(module, "resolve", answer)
    assert listen_address("localhost", several) == "127.0.0.1"
    assert listen_address("::1", several) == "::1"
    assert listen_address("debian-name", several) == ("::" if several else "127.0.1.1")
    assert listen_address("nat-name", several) == ("::" if several else "203.0.113.7")
    if own:
        assert listen_address("here", several) == own[0]
        assert listen_address(own[0], several) == own[0]


def test_own_addresses_are_those_of_the_interfaces() -> None:
    assert "127.0.0.1" in own_addresses()
    count = sum(
        e.family in (socket.AF_INET, socket.AF_INET6)
        for entries in psutil.net_if_addrs().values()
        for e in entries
    )
    assert 0 < len(own_addresses()) <= count
