"""What one rank knows of the default store's keys, and what all of them together make of it. Pure.

Each rank keeps what it has itself written, and what it has read lately. When a node is lost, what
they have of the keys whose home it was is brought together (`merge`), and that is exact where the
order of two ranks' writes does not matter:

- a key that one rank alone has written, in whatever way, has the value that this rank gave it last;
- a key to which several have only added has the sum of what they added;
- a key that several have only ever set to one and the same value has that value.

Any other key of several writers is refused, and so is a value that a rank has read lately and
nobody knows to have written: a lost rank wrote it after the last boundary that is known of it.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

ADDED, SAME, OWN = "added", "same", "own"  # only added to; only set to one value; anything else
_PAST = 64  # values of a key that a rank remembers to have written
_MOST = 4 << 20  # bytes of a rank's keys and values
_READ = 1024  # keys read, from which on old ones are forgotten

REMEDY = "let one rank alone write a key, or let all only add to it"


class Refused(Exception):
    """What a key's value would be can't be told; the message names the key."""


@dataclass
class Written:
    """By one rank, to one key.

    Attributes:
        how: `ADDED`, `SAME` or `OWN`.
        value: the sum of what was added, or the value; None: deleted.
        past: checksums of the values before.
    """

    how: str
    value: bytes | None
    past: list[int] = field(default_factory=list)


@dataclass
class Keys:
    """Of one rank.

    Attributes:
        read: key -> (value, None where only its being there was seen; the interval).
    """

    written: dict[str, Written] = field(default_factory=dict)
    read: dict[str, tuple[bytes | None, int]] = field(default_factory=dict)

    def set(self, key: str, value: bytes) -> None:
        known = self.written.get(key)
        if known is None:
            self.written[key] = Written(SAME, value)
        elif known.how != SAME or known.value != value:
            self._now(key, value)

    def add(self, key: str, amount: int, result: int, interval: int) -> None:
        known = self.written.get(key)
        if known is None:
            self.written[key] = Written(ADDED, b"%d" % amount)
        elif known.how == ADDED and known.value is not None:
            known.value = b"%d" % (int(known.value) + amount)
        else:
            self._now(key, b"%d" % result)
        self.saw(key, b"%d" % result, interval)

    def append(self, key: str, value: bytes) -> None:
        known = self.written.get(key)
        self._now(key, ((known.value if known is not None else None) or b"") + value)

    def compare_set(
        self, key: str, expected: bytes, desired: bytes, result: bytes, interval: int
    ) -> None:
        if result == desired and desired != expected:
            self.set(key, desired)  # or it was there: as good as set once more
        elif result != expected or expected == desired:
            self.saw(key, result, interval)

    def delete(self, key: str, was_there: bool) -> None:
        if was_there:
            self._now(key, None)

    def saw(self, key: str, value: bytes | None, interval: int) -> None:
        """Of a key that is there; None: not what it has."""
        if value is None and key in self.read and self.read[key][1] == interval:
            return
        self.read[key] = value, interval
        if len(self.read) > _READ:
            self.read = {k: v for k, v in self.read.items() if v[1] >= interval - 1}

    def _now(self, key: str, value: bytes | None) -> None:
        known = self.written.get(key)
        past = [] if known is None else known.past
        if known is not None and known.value is not None:
            past = [*past, zlib.crc32(known.value)][-_PAST:]
        self.written[key] = Written(OWN, value, past)

    def note(self, what: str, args: Sequence[Any], value: Any, interval: int) -> None:
        """An operation of the store was done, and gave `value`."""
        if what == "set":
            self.set(args[0], args[1])
        elif what == "multi_set":
            for key, one in zip(args[0], args[1], strict=True):
                self.set(key, one)
        elif what == "add":
            self.add(args[0], args[1], value, interval)
        elif what == "append":
            self.append(args[0], args[1])
        elif what == "compare_set":
            self.compare_set(args[0], args[1], args[2], value, interval)
        elif what == "delete_key":
            self.delete(args[0], value)
        elif what == "get":
            self.saw(args[0], value, interval)
        elif what == "multi_get":
            for key, one in zip(args[0], value, strict=True):
                self.saw(key, one, interval)
        elif what == "wait" or (what == "check" and value):
            for key in args[0]:
                self.saw(key, None, interval)

    def of(self, wanted: Callable[[str], bool]) -> Keys:
        """Some of the keys."""
        return Keys(
            {key: written for key, written in self.written.items() if wanted(key)},
            {key: seen for key, seen in self.read.items() if wanted(key)},
        )

    def to_word(self, **more: Any) -> str:
        """One line, with some more that is JSON.

        Raises:
            Refused: they are too large.
        """
        size = sum(len(key) + len(w.value or b"") for key, w in self.written.items())
        if size > _MOST:
            raise Refused(
                f"this rank has written {size >> 20} MB into the default store that were lost with"
                f" a node, more than the {_MOST >> 20} MB that it can bring to another one; share"
                " large values by files"
            )
        body = {
            "written": {k: [w.how, _text(w.value), w.past] for k, w in self.written.items()},
            "read": {k: [_text(value), at] for k, (value, at) in self.read.items()},
            **more,
        }
        return base64.b64encode(zlib.compress(json.dumps(body).encode())).decode()


@dataclass(frozen=True)
class Part:
    """What one rank brings.

    Attributes:
        replaced: the rank was lost, so what it did after the boundary is not known.
        at: the joins of the table by which this rank has used the store; a replacement: 0.
    """

    keys: Keys
    replaced: bool
    at: int

    def of(self, wanted: Callable[[str], bool]) -> Part:
        """Some of the keys."""
        return replace(self, keys=self.keys.of(wanted))

    @staticmethod
    def from_word(word: str) -> Part:
        body = json.loads(zlib.decompress(base64.b64decode(word)))
        written = {
            key: Written(how, _bytes(value), past)
            for key, (how, value, past) in body["written"].items()
        }
        read = {k: (_bytes(value), int(at)) for k, (value, at) in body["read"].items()}
        return Part(Keys(written, read), bool(body["replaced"]), int(body["at"]))


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode("latin-1")


def merge(parts: Sequence[Part], boundary: int) -> dict[str, bytes]:
    """All these keys, by the rules of the module.

    Args:
        parts: of every rank, in order.
        boundary: at which all ranks are.

    Raises:
        Refused: see the module.
    """
    writers: dict[str, list[tuple[int, Written]]] = {}
    for rank, part in enumerate(parts):
        for key, written in part.keys.written.items():
            writers.setdefault(key, []).append((rank, written))
    merged = {key: _value(key, found) for key, found in writers.items()}
    there = {key: value for key, value in merged.items() if value is not None}
    for rank, part in enumerate(parts):
        for key, (value, interval) in part.keys.read.items():
            if interval >= boundary - 1 and not _explained(
                value, merged.get(key), writers.get(key, ()), parts, interval < boundary
            ):
                raise Refused(
                    f"rank {rank} has read the default store's key '{key}', and who has written"
                    " what it has read was lost with the node in the middle of a step; write keys"
                    " outside of the steps, or each key once"
                )
    return there


def _value(key: str, found: Sequence[tuple[int, Written]]) -> bytes | None:
    first = found[0][1]
    if len(found) == 1:
        return first.value
    if all(w.how == ADDED for _, w in found):
        return b"%d" % sum(int(w.value or 0) for _, w in found)
    if all(w.how == SAME and w.value == first.value for _, w in found):
        return first.value
    ranks = [rank for rank, _ in found]
    raise Refused(
        f"ranks {ranks} have written the default store's key '{key}' in an order that was lost"
        f" with its host; {REMEDY}"
    )


def _explained(
    value: bytes | None,
    merged: bytes | None,
    found: Iterable[tuple[int, Written]],
    parts: Sequence[Part],
    before: bool,
) -> bool:
    """Whether what was read is there, or was before something that is known to have been written.

    Args:
        before: it was read in an interval that is over.
    """
    found = list(found)
    if value is None:
        return bool(found)
    if value == merged:
        return True
    if found and merged is not None and all(w.how == ADDED for _, w in found):
        return value.lstrip(b"-").isdigit() and int(value) <= int(merged)
    checksum = zlib.crc32(value)
    return any(
        checksum in written.past or written.value == value
        for rank, written in found
        if before or not parts[rank].replaced
    )
