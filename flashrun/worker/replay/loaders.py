"""Loaders in catch-up: samplers advance, map-style datasets are not read.

The door is the fetcher (``torch/utils/data/_utils/fetch.py``, torch 2.13), which every loader of
one process goes through, also torchdata's ``StatefulDataLoader``. Skipped are fetches from
map-style datasets where fetching changes no Python values and no generator of the script. Iterable
datasets are iterated for real (their place is in their own code), and loaders with worker processes
run their workers for real: a worker's random state comes from all it has fetched before.

The shapes of batches are facts that the script sees; a change of them is logged, and a batch whose
structure the replay has not seen yet is fetched for real.
"""

from __future__ import annotations

import struct
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data._utils import fetch as torch_fetch
from torch.utils.weak import TensorWeakRef

from flashrun.worker.replay import kinds, standins, surroundings

if TYPE_CHECKING:
    from flashrun.worker.replay.session import Session

_SHAPE = struct.Struct("<QI")  # ordinal, check of the structure
WATCHED = 2  # real fetches from each dataset
_SMALL = 4096  # elements up to which a stand-in has memory of its own


@dataclass
class _Template:
    """A batch that others look like."""

    batch: Any
    leaves: list[torch.Tensor]
    pristine: list[torch.Tensor]
    versions: list[int]


@dataclass
class _Standing:
    """A batch that was not fetched, as long as the script holds a part of it."""

    leaves: list[tuple[int, TensorWeakRef]]
    fetcher: Any
    index: Any
    random_states: bytes | None
    ordinal: int  # of the region


class Loaders:
    """Fetches of the main process."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._shapes: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._templates: dict[int, _Template] = {}
        self._standing: list[_Standing] = []
        self._prune_at = 64
        self._real_only: dict[int, tuple[Any, bool]] = {}  # id(dataset) -> dataset, verdict
        # id(dataset) -> dataset, real fetches that were watched
        self._watched: dict[int, tuple[Any, int]] = {}
        self._original: Callable[[Any, Any], Any] = torch_fetch._MapDatasetFetcher.fetch

    def fetch(self, original: Callable[[Any, Any], Any], map_style: bool) -> Any:
        session = self.session

        def fetch(fetcher: Any, index: Any) -> Any:
            if session.depth or not session.on or get_ident() != session.main:
                return original(fetcher, index)
            if session.replaying:
                return self._replay(original, fetcher, index, map_style)
            batch, ordinal = session.run_region(lambda: original(fetcher, index))
            self._note_shape(fetcher, batch, ordinal)
            return batch

        return fetch

    def _note_shape(self, fetcher: Any, batch: Any, ordinal: int) -> None:
        shape = standins.signature(batch)
        if shape != self._shapes.get(fetcher):
            self._shapes[fetcher] = shape
            self.session.append(kinds.SHAPE, 0, _SHAPE.pack(ordinal, _check(shape)))

    def _replay(
        self, original: Callable[[Any, Any], Any], fetcher: Any, index: Any, map_style: bool
    ) -> Any:
        session = self.session
        now: list[int] = []

        def decide(drawn: bool) -> Callable[[], Any] | None:
            record = session.peek()
            if record is not None and record.kind == kinds.SHAPE:
                ordinal, check = _SHAPE.unpack(record.payload)
                if ordinal == session.ordinal:
                    session.take()
                    now.append(check)
                    self._shapes[fetcher] = check
            check = self._shapes.get(fetcher)
            if (
                not map_style
                or session.starting()
                or session.near_target()
                or self._is_new(fetcher.dataset)
                or check not in self._templates
                or self._must_be_real(fetcher.dataset)
                or self._must_be_real(fetcher.collate_fn)
            ):
                return None
            states = None
            if drawn and session.randomness is not None:
                states = session.randomness.whole()
            return lambda: self._stand_in(self._templates[check], fetcher, index, states)

        real_run: list[Any] = []

        def real() -> Any:
            dataset = fetcher.dataset
            watched = map_style and self._is_new(dataset) and not self._must_be_real(dataset)
            before = self._around(fetcher) if watched else None
            batch = original(fetcher, index)
            if watched:
                known = self._watched.get(id(dataset), (dataset, 0))
                self._watched[id(dataset)] = dataset, known[1] + 1
                if before != self._around(fetcher):
                    self._real_only[id(dataset)] = (dataset, True)
            real_run.append(batch)
            return batch

        batch, ordinal = session.replay_region(real, decide, strict=True)
        if real_run:
            check = _check(standins.signature(batch))
            if session.past is not None:
                if check != self._shapes.get(fetcher):
                    session.append(kinds.SHAPE, 0, _SHAPE.pack(ordinal, check))
                    self._shapes[fetcher] = check
            elif check != self._shapes.get(fetcher):
                raise session.diverged("a loader gave a batch of another structure than before")
            if map_style and check not in self._templates:
                with session.quiet():
                    self._templates[check] = _template(batch)
        return batch

    def _is_new(self, dataset: Any) -> bool:
        """Whether it was not yet seen what reading changes besides."""
        return self._watched.get(id(dataset), (None, 0))[1] < WATCHED

    def _around(self, fetcher: Any) -> tuple[list[Any], list[Any]]:
        dataset = fetcher.dataset
        with self.session.quiet():
            around = surroundings.look((dataset, type(dataset), fetcher.collate_fn))
        return standins.object_values(dataset), around

    def _must_be_real(self, value: Any) -> bool:
        known = self._real_only.get(id(value))
        if known is None:
            known = self._real_only[id(value)] = (value, standins.holds_generator(value))
        return known[1]

    def _stand_in(self, template: _Template, fetcher: Any, index: Any, states: Any) -> Any:
        fresh: list[tuple[int, TensorWeakRef]] = []
        number = iter(range(len(template.leaves)))

        def stand(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            i = next(number)
            if leaf.numel() <= _SMALL:
                new = leaf.clone()
            else:
                if leaf._version != template.versions[i]:  # the script changed a stand-in
                    leaf.copy_(template.pristine[i])
                    template.versions[i] = leaf._version
                new = leaf.detach()
            fresh.append((i, TensorWeakRef(new)))
            if self.session.unreal is not None:
                self.session.unreal.mark_anew(new, "a batch that was not fetched")
            return new

        with self.session.quiet():
            batch = pytree.tree_map(stand, template.batch)
        self._standing.append(_Standing(fresh, fetcher, index, states, self.session.ordinal))
        if len(self._standing) >= self._prune_at:
            self._standing = [
                s for s in self._standing if any(r() is not None for _, r in s.leaves)
            ]
            self._prune_at = 64 + 2 * len(self._standing)
        return batch

    def make_real(self) -> None:
        """Fetch what living stand-ins stand for, into them. Leaves random states anywhere."""
        session = self.session
        for standing in self._standing:
            alive = [(i, leaf) for i, r in standing.leaves if (leaf := r()) is not None]
            if not alive or session.randomness is None:
                continue
            if standing.random_states is not None:
                session.randomness.restore_whole(standing.random_states)
            depth, session.depth = session.depth, 1
            ordinal, session.ordinal = session.ordinal, standing.ordinal  # files as they were then
            try:
                batch = self._original(standing.fetcher, standing.index)
            finally:
                session.depth, session.ordinal = depth, ordinal
            leaves = [t for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor)]
            for i, leaf in alive:
                leaf.data = leaves[i].detach()
        self._standing.clear()

    def forget(self) -> None:
        """The replay is over: shapes are noted anew."""
        self._shapes = weakref.WeakKeyDictionary()
        self._templates.clear()


def _check(shape: Any) -> int:
    return zlib.crc32(repr(shape).encode())


def _template(batch: Any) -> _Template:
    own = pytree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, batch)
    leaves = [t for t in pytree.tree_leaves(own) if isinstance(t, torch.Tensor)]
    return _Template(
        own,
        leaves,
        [t.clone() if t.numel() > _SMALL else t for t in leaves],
        [t._version for t in leaves],
    )


def install(session: Session) -> Loaders:
    """Wrap the fetchers."""
    loaders = Loaders(session)
    wrap = session.patches.wrap
    wrap(torch_fetch._MapDatasetFetcher, "fetch", lambda f: loaders.fetch(f, True))
    wrap(torch_fetch._IterableDatasetFetcher, "fetch", lambda f: loaders.fetch(f, False))
    return loaders
