"""State and results from and to peers: what a replacement or a laggard is sent (rules 8 and 9).

The receiver asks on the script's thread, while it takes part in a recovery. The sender answers on a
thread of its data server, while its script's thread is held.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from flashrun.messages import SAME_BUFFERS, Message
from flashrun.worker.oplog import Op
from flashrun.worker.replay import elsewhere
from flashrun.worker.replay.api import Divergence
from flashrun.worker.state import as_bytes, fingerprint, plain
from flashrun.worker.transfer import Fetch, Server, TransferError, cut, shares

if TYPE_CHECKING:
    from flashrun.worker.runtime import Runtime


class Peers:
    """See the module.

    Attributes:
        served: results of finished operations that a survivor has sent, by group and sequence
            number, until the script asks for them.
        kinds: of which collective each of them is.
        bases: per group the number of its first operation in that interval.
    """

    def __init__(self, runtime: Runtime, token: str, address: str = "") -> None:
        self._rt = runtime
        self._token = token
        self.served: dict[tuple[str, int], list[torch.Tensor]] = {}
        self.kinds: dict[tuple[str, int], str] = {}
        self.bases: dict[str, int] = {}
        self.server = Server(token, self._provide, address)

    def fetch_state(
        self, generation: int, donors: Mapping[str, str], private: list[str], own: list[str]
    ) -> int:
        """Take the state of this boundary, a part from each donor.

        Args:
            private: names of what differs between ranks, which is found in the rank's own file.
            own: names of what the script keeps in places of its own, and all ranks have equal.
        """
        self._rt.state.refresh(force=True)
        addresses = list(donors.values())
        request = {
            "what": "state", "boundary": self._rt.boundary, "generation": generation, "own": own,
        }  # fmt: skip
        first = Fetch(addresses[0], self._token, {**request, "part": [0, len(addresses)]}, 30)
        described = first.header["state"]
        into, put = self._rt.state.room(described, self._rt.own.now())
        views = [as_bytes(tensor) for tensor in into.values()]
        total = sum(len(view) for view in views)
        ranges = shares(total, len(addresses))
        problems: list[Exception] = []
        print_of = fingerprint(described)

        def take(number: int) -> None:
            try:
                part = {**request, "part": [number, len(addresses)]}
                fetch = first if number == 0 else Fetch(addresses[number], self._token, part, 30)
                if fingerprint(fetch.header["state"]) != print_of:
                    raise TransferError("two donors describe the state differently")
                fetch.into(cut(views, *ranges[number]))
            except Exception as error:  # noqa: BLE001  # raised below: whatever it is, a part lacks
                problems.append(error)

        threads = [threading.Thread(target=take, args=(i,)) for i in range(len(addresses))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]
        put()
        rt = self._rt
        written = rt.copied is None or rt.copied.has(rt.boundary)
        if private and not (written and rt.private.restore(rt.boundary, rt.state.buffers)):
            lost = "was not kept"
            if not written:
                lost = f"had not been copied when its node was lost; {SAME_BUFFERS}"
            raise Divergence(
                f"{private[0]} differs between ranks, and what rank {rt.rank} had at"
                f" boundary {rt.boundary} {lost}"
            )
        return total

    def fetch_outputs(
        self,
        generation: int,
        boundary: int,
        donors: Mapping[str, str],
        below: Mapping[str, int] | None,
    ) -> None:
        """Take the results of finished operations of an interval from survivors (rule 9).

        Args:
            below: per group, results before this sequence number; None: all there are.

        Raises:
            Divergence: a result before `below` is nowhere.
        """
        self.served.clear()
        self.kinds.clear()
        self.bases.clear()
        wanted = {
            (ident, seq)
            for ident, number in (below or {}).items()
            for seq in range(self._base(ident, boundary), number)
            if ident in self._rt.groups or not boundary  # at 0 it may be made later
        }
        for address in donors.values():
            if below is not None and wanted <= self.served.keys():
                return
            request = {
                "what": "outputs", "generation": generation, "boundary": boundary, "below": below,
            }  # fmt: skip
            fetch = Fetch(address, self._token, request, 30)
            self.bases.update(fetch.header["bases"])
            tensors = []
            for ident, seq, kind, shapes in fetch.header["outputs"]:
                contents = [
                    torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in shapes
                ]
                tensors.extend(contents)
                self.served.setdefault((ident, seq), contents)
                self.kinds[ident, seq] = kind
            fetch.into([as_bytes(t) for t in tensors])
        missing = wanted - self.served.keys()
        if missing:
            named = ", ".join(f"operation {seq} of group {ident}" for ident, seq in sorted(missing))
            raise Divergence(f"nobody has the results of {named[:200]} any more")

    def _base(self, ident: str, boundary: int) -> int:
        group = self._rt.groups.get(ident)
        return group.base.get(boundary, 0) if group is not None else 0

    def _provide(self, request: Message) -> tuple[Message, Iterable[memoryview]]:
        """Answer a peer. Runs on a thread of the data server while the script's thread is held (or,
        for files, does anything)."""
        if request["what"] == elsewhere.WHAT:
            return self._rt.replay.answer(request)
        boundary = int(request["boundary"])
        if request["what"] == "outputs":
            return self._provide_outputs(boundary, request["below"])
        rt = self._rt
        if rt.generation >= int(request["generation"]) or not rt.has_state:
            raise LookupError(f"rank {rt.rank} does not hold the state of boundary {boundary}")
        layout = rt.state.at(boundary)
        copies = rt.own.copies(boundary) if request["own"] else {}
        for name in request["own"]:
            if name not in copies:
                raise LookupError(f"rank {rt.rank} has no copy of {name} at boundary {boundary}")
            layout.tensors[name] = copies[name]
        views = [as_bytes(plain(tensor)) for tensor in layout.tensors.values()]
        number, of = request["part"]
        low, high = shares(sum(len(v) for v in views), of)[number]
        return {"state": layout.describe()}, cut(views, low, high)

    def _provide_outputs(
        self, boundary: int, below: Mapping[str, int] | None
    ) -> tuple[Message, Iterable[memoryview]]:
        found = []
        tensors: list[torch.Tensor] = []
        for entry in self._rt.log_of.get(boundary, ()):
            if not isinstance(entry, Op) or entry.seq < 0:
                continue
            if below is not None and entry.seq >= below.get(entry.group.ident, 0):
                continue
            contents = entry.served()
            if contents is None:
                continue
            shapes = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in contents]
            found.append([entry.group.ident, entry.seq, entry.kind, shapes])
            tensors.extend(plain(t) for t in contents)
        bases = {i: g.base[boundary] for i, g in self._rt.groups.items() if boundary in g.base}
        return {"outputs": found, "bases": bases}, [as_bytes(t) for t in tensors]
