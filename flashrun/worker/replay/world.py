"""Answers of the outside world: clock, uuid, random bytes, pid, host name.

Up to the second boundary they are logged and replayed, so that run names, folders and seeds made of
them come out the same; later ones are the present ones. Only what the script and its libraries
ask counts: torch, the standard library and flashrun ask on other occasions in a replay.

Seeding from outside entropy (``torch.seed()``, ``random.seed()``, ``numpy.random.seed()``,
``numpy.random.default_rng()``) is logged for the whole run: later draws depend on it.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import marshal
import os
import platform
import random
import socket
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flashrun.worker.replay import kinds
from flashrun.worker.replay.carried import is_script

if TYPE_CHECKING:
    from flashrun.worker.replay.journal import Reader, Record
    from flashrun.worker.replay.session import Session

Encode = Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def _door(
    session: Session,
    kind: int,
    original: Callable[..., Any],
    encode: Encode = _same,
    decode: Encode = _same,
    only: Callable[[tuple[Any, ...]], bool] | None = None,
) -> Callable[..., Any]:
    def door(*args: Any, **kwargs: Any) -> Any:
        if (
            not session.world_on
            or session.depth
            or not session.on
            or get_ident() != session.main
            or (only is not None and not only(args))
        ):
            return original(*args, **kwargs)
        frame = sys._getframe(1)
        if not is_script(frame.f_code.co_filename):
            return original(*args, **kwargs)
        given = session.given(kind, frame)
        if given is not None:
            return decode(marshal.loads(given))
        if session.replaying:
            if session.peek() is None:  # past the end nothing is known: the present answer
                value = encode(original(*args, **kwargs))
                session.append(kind, session.site(frame), marshal.dumps(value))
                return decode(value)
            return decode(session.read(kind, frame, lambda: None))
        value = original(*args, **kwargs)
        session.append(kind, session.site(frame), marshal.dumps(encode(value)))
        return value

    return door


def _no_time(position: int) -> Callable[[tuple[Any, ...]], bool]:
    """The function reads the clock when this argument is left out."""
    return lambda args: len(args) <= position or args[position] is None


def _seed_door(
    session: Session, original: Callable[..., Any], outside: Callable[[tuple[Any, ...]], bool]
) -> Callable[..., Any]:
    """Seeding from entropy: the state after it is what is logged."""

    def door(*args: Any, **kwargs: Any) -> Any:
        randomness = session.randomness
        if randomness is None or not session.here() or kwargs or not outside(args):
            return original(*args, **kwargs)
        frame = sys._getframe(1)
        value = original(*args, **kwargs)
        plain = value if isinstance(value, int) else None
        given = session.given(kinds.SEED, frame)
        if given is not None:
            plain, whole = marshal.loads(given)
            randomness.restore_whole(whole)
            return plain if plain is not None else value
        if session.replaying:
            record = session.expect(kinds.SEED, frame)
            if record is None:
                raise session.diverged("the dead worker's log ends before a seeding", frame)
            plain, whole = marshal.loads(record.payload)
            randomness.restore_whole(whole)
            return plain if plain is not None else value
        session.append(
            kinds.SEED, session.site(frame), marshal.dumps((plain, randomness.whole()))
        )
        return value

    return door


def _sleep(session: Session, original: Callable[[float], None]) -> Callable[[float], None]:
    """What the script waited for has happened long ago: a replay does not wait again."""

    def sleep(seconds: float, /) -> None:
        if not (session.replaying and session.on and get_ident() == session.main):
            original(seconds)

    return sleep


def _default_rng(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    def default_rng(seed: Any = None) -> Any:
        if seed is not None or not session.here():
            return original(seed)
        frame = sys._getframe(1)
        entropy: Any = np.random.SeedSequence().entropy
        given = session.given(kinds.SEEDED, frame)
        if given is not None:
            return original(marshal.loads(given))
        if session.replaying:
            record = session.expect(kinds.SEEDED, frame)
            if record is None:
                raise session.diverged("the dead worker's log ends before a seeding", frame)
            entropy = marshal.loads(record.payload)
        else:
            session.append(kinds.SEEDED, session.site(frame), marshal.dumps(entropy))
        return original(entropy)

    return default_rng


def _patch_clock_class(
    session: Session, kind: int, base: type, names: tuple[str, ...]
) -> None:
    """Make ``base.now`` and the like doors, in the class itself.

    A subclass in its place would break pickling (``pickle`` compares the class with what it finds
    by name), so the methods are exchanged in the C type's own dictionary, which CPython reaches
    from the mapping proxy (3.10 to 3.14); the type's method cache is told.
    """
    own = gc.get_referents(base.__dict__)[0]
    if type(own) is not dict or own.keys() != base.__dict__.keys():
        session.warn(f"{base.__name__}.{names[0]}() is not logged on this Python")
        return

    def modified() -> None:
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(base))

    def patch(name: str, kind: int) -> None:
        before = own[name]
        door = _door(
            session,
            kind,
            lambda cls, *args, **kwargs: before.__get__(None, cls)(*args, **kwargs),
            encode=lambda value: value.isoformat(),
            decode=base.fromisoformat,  # type: ignore[attr-defined]
            only=lambda args: args[0] is base,
        )
        own[name] = classmethod(door)
        session.patches.later(lambda: own.__setitem__(name, before))

    session.patches.later(modified)
    for offset, name in enumerate(names):
        patch(name, kind + offset)
    modified()


def in_flight(reader: Reader) -> deque[Record]:
    """The answers that the dead worker got after the boundary of a join, in order."""
    found: deque[Record] = deque()
    asked = (kinds.SEED, kinds.SEEDED, kinds.STORE, kinds.STORE_GAVE)
    while (record := reader.take()) is not None:
        if record.kind >= kinds.WORLD or record.kind in asked:
            found.append(record)
    return found


def install(session: Session) -> None:
    """Wrap the questions to the outside world."""
    wrap = session.patches.wrap
    kind = kinds.WORLD
    for name in (
        "time",
        "time_ns",
        "monotonic",
        "monotonic_ns",
        "perf_counter",
        "perf_counter_ns",
        "process_time",
        "thread_time",
    ):
        wrap(time, name, partial(_door, session, kind))
        kind += 1
    for name, position in (("strftime", 1), ("ctime", 0), ("asctime", 0)):
        wrap(
            time,
            name,
            partial(_door, session, kind, only=_no_time(position)),
        )
        kind += 1
    for name in ("localtime", "gmtime"):
        wrap(
            time,
            name,
            partial(
                _door,
                session,
                kind,
                encode=lambda value: (tuple(value), value.tm_zone, value.tm_gmtoff),
                decode=lambda value: time.struct_time((*value[0], *value[1:])),
                only=_no_time(0),
            ),
        )
        kind += 1
    for owner, name in (
        (os, "getpid"),
        (os, "getppid"),
        (os, "urandom"),
        (socket, "gethostname"),
        (socket, "getfqdn"),
        (platform, "node"),
    ):
        wrap(owner, name, partial(_door, session, kind))
        kind += 1
    wrap(time, "sleep", partial(_sleep, session))
    for name in ("uuid1", "uuid4"):
        wrap(
            uuid,
            name,
            partial(
                _door,
                session,
                kind,
                encode=lambda value: value.int,
                decode=lambda value: uuid.UUID(int=value),
            ),
        )
        kind += 1
    _patch_clock_class(session, kind, datetime.datetime, ("now", "utcnow"))
    _patch_clock_class(session, kind + 2, datetime.date, ("today",))

    def nothing(args: tuple[Any, ...]) -> bool:
        return not args or args[0] is None

    for owner in (torch, torch.random):
        wrap(owner, "seed", lambda original: _seed_door(session, original, lambda args: True))
    for owner in (random, np.random):
        wrap(owner, "seed", lambda original: _seed_door(session, original, nothing))
    wrap(np.random, "default_rng", lambda original: _default_rng(session, original))
