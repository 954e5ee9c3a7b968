"""What a rank does in a recovery, from its hold until the new generation is live.

It sees to it that nothing is under way, reports where it stands, and follows the machine's words:
``plan`` (who is behind, whom to compare), ``rebuild`` (communicators, and state for a replacement),
``go`` (what the interval had not completed everywhere is issued again). All of it on the script's
thread; a newer generation ends it at any wait with `Superseded`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from flashrun.worker import proof
from flashrun.worker.oplog import Creation, Op
from flashrun.worker.replay.api import Divergence

if TYPE_CHECKING:
    from flashrun.worker.runtime import Runtime


class Rejoining:
    """See the module."""

    def __init__(self, runtime: Runtime) -> None:
        self._rt = runtime

    def take_part(self, generation: int) -> None:
        """From the hold to the end of the recovery (or, as a laggard, until the script may run).

        Raises:
            Superseded: a newer generation is open, or every script has ended.
            Divergence: it can't be done exactly.
        """
        self._drain()
        self._report(generation)
        self._follow(generation)

    def _drain(self) -> None:
        """See to it that each operation either completed or will never.

        Raises:
            Divergence: one of an earlier interval has not: nobody issues it again.
        """
        rt = self._rt
        rt.abort()
        with rt.lock:
            entries = [e for log in rt.log_of.values() for e in log if isinstance(e, Op)]
        for op in entries:
            handle = op.handle
            if not op.done and handle is not None:
                try:
                    handle.wait()
                except RuntimeError:
                    op.handle = None
                else:
                    rt.completed(op)
        for op in entries:
            if op.interval < rt.boundary and not op.done:
                raise Divergence(
                    f"{op.describe()} was issued before the last optimizer step and was not waited"
                    " for until then, so it can't be repeated; wait for it before the step"
                )

    def _report(self, generation: int) -> None:
        rt = self._rt
        groups = {}
        existing = self._existing()
        for ident, group in rt.groups.items():
            ops = [
                e
                for e in rt.log_of[rt.boundary]
                if isinstance(e, Op) and e.group is group and e.seq >= 0
            ]
            base = group.base.get(rt.boundary, 0)
            done = base
            for op in ops:
                if not op.done:
                    break
                done = op.seq + 1
            groups[ident] = {
                "ranks": group.ranks, "base": base, "issued": group.seq, "done": done,
                "before": group.base.get(rt.boundary - 1),
                "serves": [op.seq for op in ops if op.served() is not None],
                "lost": max((op.seq for op in ops if not op.reissuable()), default=-1),
            }  # fmt: skip
        check = {
            "groups": {ident: rt.groups[ident].base.get(rt.boundary, 0) for ident in existing},
            "site": "{}:{}".format(*rt.sites.get(rt.boundary, ("", 0))),
            "buckets": rt.buckets.get(rt.boundary, []),
            "line": rt.line,
            "shadowed": rt.shadowed,
        }
        if rt.boundary:
            check["state"] = rt.state.shape_at(rt.boundary)
        rt.channel.send(
            {
                "op": "held",
                "generation": generation,
                "boundary": rt.boundary,
                "state": rt.has_state,
                "finished": rt.finished,
                "let_go": rt.retention.let_go == rt.boundary,
                "taken": rt.own.taken_lately(rt.boundary),
                "kept": sorted(rt.own.names_at(rt.boundary)),
                "groups": groups,
                "check": check,
            },
            standing="held",
        )

    def _existing(self) -> list[str]:
        """The groups that there were at the last boundary."""
        rt = self._rt
        created = {e.group.ident for e in rt.log_of[rt.boundary] if isinstance(e, Creation)}
        return [ident for ident in rt.groups if ident not in created]

    def _follow(self, generation: int) -> None:
        rt = self._rt
        plan = rt.await_word("plan", generation)
        if plan["receives"]:
            rt.proving.joined(int(plan["target"]))
        if rt.has_state and rt.boundary < int(plan["target"]):
            rt.laggard.begin(plan)
            return
        if rt.has_state and plan["receives"] and rt.stepping.has_begun():
            raise Divergence(
                f"rank {rt.rank} waits in a collective within its optimizer's step (ZeRO, LBFGS),"
                f" so what it has is no more the state of boundary {rt.boundary}"
            )
        if rt.has_state and plan["compare"]:
            own = rt.own.copies(rt.boundary) if plan["own"] else {}
            own = {name: own[name] for name in plan["own"] if name in own}
            tensors = proof.digests({**rt.state.at(rt.boundary).tensors, **own})
            digest = {"op": "digest", "generation": generation, "tensors": tensors}
            rt.channel.send(digest, standing="digest")
        rebuild = rt.await_word("rebuild", generation)
        started = time.monotonic()
        received = 0
        first = rebuild["from"]
        if rt.has_state:
            self._take_missing(generation, rebuild["donors"], first)
        else:
            rt.completion.check(rebuild["numbers"])
            self._take_numbers(rebuild["numbers"])
            received = rt.peers.fetch_state(
                generation, rebuild["donors"], rebuild["private"], rt.own.taken
            )
            rt.own.fill(rt.boundary)
            rt.peers.fetch_outputs(generation, rt.boundary, rebuild["donors"], first)
            rt.replay.after_state(rt, rt.boundary)
            rt.has_state = True
        if rt.default_store is not None:
            rt.default_store.settle(generation)
        for ident in self._existing():
            rt.build(rt.groups[ident], generation)
        rt.channel.send(
            {
                "op": "built",
                "generation": generation,
                "seconds": time.monotonic() - started,
                "bytes": received,
            },
            standing="built",
        )
        rt.await_word("go", generation)
        if rt.default_store is not None:
            rt.default_store.arrive()
        self._issue_again(generation, first)
        rt.channel.withdraw("held", "built", "digest", "suspect", "failed")
        rt.channel.send({"op": "live", "generation": generation})
        if rt.copied is not None:
            rt.copied.end()
            rt.copied = None

    def _take_missing(
        self, generation: int, donors: Mapping[str, str], first: Mapping[str, int]
    ) -> None:
        """Operations that are not issued again have completed somewhere: here as well, then."""
        rt = self._rt
        if not rt.boundary and not rt.groups:  # this script has yet to begin
            rt.peers.fetch_outputs(generation, 0, donors, first)
            return
        with rt.lock:
            undone = [
                e
                for e in rt.log_of[rt.boundary]
                if isinstance(e, Op) and not e.done and 0 <= e.seq < first.get(e.group.ident, 0)
            ]
        if not undone:
            return
        to_come = dict(rt.peers.served)  # what this script has not asked for yet
        rt.peers.fetch_outputs(generation, rt.boundary, donors, first)
        with rt.lock:
            for op in undone:
                op.receive(rt.peers.served[op.group.ident, op.seq])
        rt.peers.served.clear()
        rt.peers.served.update(to_come)

    def _take_numbers(self, numbers: Mapping[str, int]) -> None:
        """A catch-up has skipped forward and backward with their collectives: take the count of
        operations that the groups have had at this boundary from who has not."""
        rt = self._rt
        for ident, number in numbers.items():
            group = rt.groups.get(ident)
            if group is not None:
                group.seq += number - group.base.get(rt.boundary, 0)
                group.base[rt.boundary] = number
                group.base.pop(rt.boundary - 1, None)  # counted in the replay, so without these

    def _issue_again(self, generation: int, first: Mapping[str, int]) -> None:
        """What the interval had not completed everywhere, in the order of the script (rule 9)."""
        rt = self._rt
        with rt.lock:
            entries = list(rt.log_of[rt.boundary])
        for entry in entries:
            if isinstance(entry, Creation):
                rt.build(entry.group, generation)
                continue
            op = entry
            if 0 <= op.seq < first.get(op.group.ident, 0):
                continue
            communicator = op.group.communicator
            if communicator is None:
                raise LookupError(f"no communicator for {op.describe()}")
            with rt.lock:
                handle = communicator.issue(op.kind, op.again())
                if not op.done:
                    op.handle = handle
                    if op.future is not None:
                        rt.futures.attach(op)
        with rt.lock:
            rt.wanted(generation)()
            rt.generation = generation
