"""Values of any size in a control store, whose own values and transactions are limited: the first
piece is the value of the key, the others lie under ``part/`` and are written before it."""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashrun.rendezvous.kv import MAX_VALUE, ControlStore, Put

PIECE = MAX_VALUE * 3 // 4  # bytes; the rest of a transaction is for what goes along


@dataclass(frozen=True)
class Blob:
    """A value ready to be written.

    Attributes:
        first: of the key itself.
        parts: to be put before it, each in a transaction of its own.
    """

    first: bytes
    parts: tuple[Put, ...] = ()


class Gone(LookupError):
    """A value's pieces were deleted meanwhile: it is not the present one any more."""


def packed(prefix: str, value: Any, piece: int = PIECE) -> Blob:
    """JSON as a blob; no two are equal."""
    data = zlib.compress(json.dumps(value).encode(), 1)
    pieces = [data[i : i + piece] for i in range(0, len(data), piece)]
    tag = uuid.uuid4().hex
    first = f"{tag} {len(pieces) - 1}\n".encode() + pieces[0]
    names = _names(prefix, tag, len(pieces) - 1)
    parts = tuple(Put(name, part) for name, part in zip(names, pieces[1:], strict=True))
    return Blob(first, parts)


def part_keys(prefix: str, first: bytes) -> list[str]:
    """Where the further pieces of a value are."""
    tag, number = first.partition(b"\n")[0].decode().split()
    return _names(prefix, tag, int(number))


def _names(prefix: str, tag: str, number: int) -> list[str]:
    return [f"{prefix}part/{tag}/{i}" for i in range(number)]


def unpacked(prefix: str, first: bytes, store: ControlStore) -> Any:
    """The JSON value whose first piece was found.

    Raises:
        Gone: see there. Those of `store`.
    """
    names = part_keys(prefix, first)
    rest: Sequence[bytes | None] = store.get_many(names) if names else ()
    pieces = [first.partition(b"\n")[2]]
    for piece in rest:
        if piece is None:
            raise Gone
        pieces.append(piece)
    return json.loads(zlib.decompress(b"".join(pieces)))
