"""What is saved into memory, by ``torch.save`` or by pickling a storage (which calls that; torch
2.13, storage.py ``__reduce__``): its bytes may be hashed, sent or compared, so this is a door like
``tolist``. Small contents are logged, of larger ones the checksum, which a replay must reproduce.
"""

from __future__ import annotations

import io
import sys
import zlib
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from flashrun.worker.replay import kinds, threads
from flashrun.worker.replay.unreal import MARK

if TYPE_CHECKING:
    from types import FrameType

    from flashrun.worker.replay.session import Session

LARGEST = 64 << 10  # bytes of one content that is logged


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """What is saved, as far as containers, modules and storages go."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for member in value.values():
            yield from _tensors(member)
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from _tensors(member)
    elif isinstance(value, torch.nn.Module):
        yield from _tensors(value.state_dict(keep_vars=True))
    elif isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
        storage = value._untyped_storage if isinstance(value, torch.TypedStorage) else value
        if MARK in storage.__dict__:
            yield torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _door(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(f, io.BytesIO) or not session.on:
            return original(obj, f, *args, **kwargs)
        if get_ident() != session.main:
            if session.replaying:
                for tensor in _tensors(obj):
                    threads.check(session, tensor)
            return original(obj, f, *args, **kwargs)
        if session.depth:
            return original(obj, f, *args, **kwargs)
        at = f.tell()
        session.depth = 1  # what is saved within is a part of this
        try:
            original(obj, f, *args, **kwargs)
        finally:
            session.depth = 0
        frame = sys._getframe(1)
        content = f.getvalue()[at:]
        if session.replaying:
            replayed(obj, f, at, content, frame)
        else:
            session.append(kinds.SAVED, session.site(frame), payload(content))
        return None

    def payload(content: bytes) -> bytes:
        if len(content) <= LARGEST:
            return b"f" + content
        return b"c" + zlib.crc32(content).to_bytes(4, "little")

    def replayed(obj: Any, f: io.BytesIO, at: int, content: bytes, frame: FrameType) -> None:
        record = session.expect(kinds.SAVED, frame)
        if record is None:
            with session.quiet():
                session.past_the_end(kinds.SAVED, frame, list(_tensors(obj)))
            session.append(kinds.SAVED, session.site(frame), payload(content))
        elif record.payload[:1] == b"f":
            f.seek(at)
            f.truncate()
            f.write(record.payload[1:])
        elif record.payload != payload(content):
            raise session.diverged(
                f"{len(content)} bytes that are saved into memory are not logged in full (over"
                f" {LARGEST} bytes) and are others in the replay",
                frame,
            )

    return save


def install(session: Session) -> None:
    """Put the door in place."""
    session.patches.wrap(torch, "save", lambda original: _door(session, original))
