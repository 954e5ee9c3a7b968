"""State from peers (rule 8): a part from each donor, all of it checked."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashrun.worker.checksum import Checksum
from flashrun.worker.peers import Peers
from flashrun.worker.state import Objects, State, as_bytes
from flashrun.worker.transfer import Fetch, Refused, Server, TransferError

TOKEN = "the job's"
CONTENT = bytes(range(256)) * 3


def checksum(content: bytes) -> int:
    found = Checksum()
    found.add(memoryview(content))
    return found.value


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Somebody who gives this answer to whoever asks, at this address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)

        def answers() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as file:
                file.readline()
                connection.sendall(answer)

        thread = threading.Thread(target=answers)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


FLIPPED = bytes([*CONTENT[:300], CONTENT[300] ^ 1, *CONTENT[301:]])


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (line({}) + CONTENT + line({"checksum": checksum(CONTENT)}), None),
        (line({}) + FLIPPED + line({"checksum": checksum(CONTENT)}), "is not the sender's"),
        (line({}) + CONTENT[:300], "the peer ended after 300 bytes"),
        (line({}) + CONTENT, "ended in the middle of a message"),
        (line({}) + CONTENT + b'{"checks', "ended in the middle of a message"),
        (line({}) + CONTENT + line({}), "is not the sender's: None"),
        (line({}) + CONTENT + line({"checksum": "7"}), "is not the sender's"),
        (b"", "ended in the middle of a message"),
        (line([]), "something that is not an object"),
        (b"\xff\n", "asking the peer at 127.0.0.1:"),
        (line({"error": "rank 2 is at boundary 8"}), "rank 2 is at boundary 8"),
    ],
)
def test_what_comes_is_what_was_sent_or_an_error(answer: bytes, says: str | None) -> None:
    into = bytearray(len(CONTENT))

    def fetch() -> int:
        return Fetch(address, TOKEN, {}, 30).into([memoryview(into)])

    with answering(answer) as address:
        if says is None:
            assert fetch() == len(CONTENT) and into == CONTENT
        else:
            with pytest.raises(TransferError, match=says):
                fetch()


def test_a_stranger_gets_nothing() -> None:
    asked: list[Any] = []

    def provide(request: dict[str, Any]) -> tuple[dict[str, Any], Iterable[memoryview]]:
        asked.append(request)
        raise LookupError("nothing of the kind")

    server = Server(TOKEN, provide)
    try:
        with pytest.raises(TransferError, match="in the middle of a message"):
            Fetch(f"127.0.0.1:{server.port}", "another's", {"what": "state"}, 30)
        assert not asked
        with pytest.raises(Refused, match="nothing of the kind"):
            Fetch(f"127.0.0.1:{server.port}", TOKEN, {"what": "state"}, 30)
        assert asked == [{"what": "state"}]
    finally:
        server.close()


class Rank(Peers):
    """A rank with a layer, every byte of which is `fill`.

    Attributes:
        asked: the parts that it was asked for.
    """

    def __init__(self, fill: int, width: int = 5) -> None:
        self.layer = torch.nn.Linear(width, 7)
        for parameter in self.layer.parameters():
            as_bytes(parameter)[:] = bytes([fill]) * parameter.nbytes
        objects = Objects()
        objects._note(self.layer, objects._modules)
        state = State(objects)
        state.at_boundary(9)
        runtime: Any = SimpleNamespace(
            state=state, own=SimpleNamespace(now=dict), boundary=9, generation=fill,
            has_state=True, rank=fill, copied=None,
        )  # fmt: skip
        self.asked: list[list[int]] = []
        super().__init__(runtime, TOKEN)

    def _provide(self, request: dict[str, Any]) -> tuple[dict[str, Any], Iterable[memoryview]]:
        self.asked.append(request["part"])
        return super()._provide(request)

    def content(self) -> bytes:
        layout = self._rt.state.layout()
        return b"".join(bytes(as_bytes(tensor)) for tensor in layout.tensors.values())

    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    """Three donors and, last, a replacement."""
    made = [Rank(fill) for fill in (1, 2, 3, 0)]
    yield made
    for rank in made:
        rank.server.close()


def fetch_from(donors: list[Rank], into: Rank) -> int:
    addresses = {str(i): donor.address() for i, donor in enumerate(donors)}
    return into.fetch_state(4, addresses, [], [])


@pytest.mark.parametrize("number", [1, 2, 3])
def test_each_donor_sends_a_part_of_its_own(ranks: list[Rank], number: int) -> None:
    donors, replacement = ranks[:number], ranks[3]
    size = 4 * (5 * 7 + 7)  # bytes
    assert fetch_from(donors, replacement) == size
    assert [donor.asked for donor in donors] == [[[i, number]] for i in range(number)]
    # none twice, none missing: whose bytes these are, in the order of the state
    edges = [size * i // number for i in range(number + 1)]
    parts = [bytes([i + 1]) * (edges[i + 1] - edges[i]) for i in range(number)]
    assert replacement.content() == b"".join(parts)


def wider(ranks: list[Rank]) -> str:
    ranks[1].server.close()
    ranks[1] = Rank(2, width=6)
    return "two donors describe the state differently"


def elsewhere(ranks: list[Rank]) -> str:
    ranks[1]._rt.state.boundary = 10
    return "this rank is at boundary 10, not 9"


def gone(ranks: list[Rank]) -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    ranks[1].address = lambda: f"127.0.0.1:{free}"  # type: ignore[method-assign]
    return "asking the peer at"


@pytest.mark.parametrize("trouble", [wider, elsewhere, gone])
def test_without_all_parts_nothing_is_taken(ranks: list[Rank], trouble: Any) -> None:
    says = trouble(ranks)
    with pytest.raises(TransferError, match=says):
        fetch_from(ranks[:3], ranks[3])


@pytest.mark.parametrize("answer", [line({}), line({"state": None})])
def test_whatever_goes_wrong_a_part_is_missing(ranks: list[Rank], answer: bytes) -> None:
    """Parts are taken by threads, whose exceptions nobody else would see."""
    with answering(answer) as address, pytest.raises((KeyError, TransferError)):
        ranks[3].fetch_state(4, {"0": ranks[0].address(), "1": address}, [], [])
