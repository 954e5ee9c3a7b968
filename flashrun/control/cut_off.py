"""What a node's fence (:mod:`flashrun.control.fence`) looks at, and how a node that stands still
finds out whether its ranks are still its own."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

from flashrun.control.events import Connected, Event, GoOn, Lost, Membership, Pause
from flashrun.control.fence import Fence, Pausing
from flashrun.control.plan_book import PREFIX, PlanBook
from flashrun.control.probing import out_of_reach, some, unanswered
from flashrun.control.records import Member
from flashrun.rendezvous.kv import KeyValue
from flashrun.rendezvous.table import NodeRanks


def fence_of(
    membership: Membership,
    at: Connected,
    peers: Callable[[], list[NodeRanks]],
    emit: Callable[[Event], None],
    kept: Path | None,
    paused: float | None,
) -> Fence | None:
    """The fence of a node; None: it needs none.

    Args:
        peers: the other nodes of the round that this one has ranks in.
        kept: see `Fence`.
        paused: since when the workers stand still, by the agent before this one.
    """
    if membership.alone or membership.handler is not None or membership.store == "file":
        return None
    if at.hosting:
        return None  # where the store is, the job is
    etcd, timeout = membership.etcd, membership.timing.detection_timeout

    def cut_off(why: str) -> None:
        emit(Lost(why, at_once=True))

    if etcd is None:
        return Fence(timeout, lambda try_s: out_of_reach(at.host, at.port, try_s), cut_off, kept)

    def look(try_s: float) -> str | None:
        asked = some(peers())
        lonely = unanswered(asked, try_s)
        # Without all of them no step can be finished here, so nothing is lost by standing still.
        if not lonely:
            return None
        names = ", ".join(peer.addr for peer in asked if peer.node in lonely)
        return f"{etcd.where} does not answer, and {names} cannot be reached either"

    pausing = Pausing(
        membership.timing.outage,
        lambda why, since: emit(Pause(why, since)),
        lambda why, paused_s: emit(GoOn(why, paused_s)),
        paused,
    )
    return Fence(timeout, look, cut_off, kept, pausing)


def come_back(fence: Fence, kv: KeyValue, book: PlanBook, me: Member) -> None:
    """The store answers, and the workers are paused: let them go on, if they may."""
    if _ranks_are_ours(kv, book, me):
        fence.go_on("etcd answers again, and the ranks are still this node's")


def _ranks_are_ours(kv: KeyValue, book: PlanBook, me: Member) -> bool:
    """Whether nobody has, or can get, the ranks of a node that has just sent a heartbeat.

    The plan is written anew, as it is, so that what somebody decides who has not seen that
    heartbeat comes too late; whoever decides next looks at the heartbeats first (``losses``).
    """
    if me.state not in ("running", "failed"):
        return True  # there are no workers that could act
    if kv.get(f"{PREFIX}lost/{me.order}") is not None:
        return False  # the plan will say what becomes of them
    plan = book.read()
    here = plan.table is not None and plan.table.of(me.node) is not None
    if plan.phase != "running" or plan.round != me.round or not here:
        return False  # they are stopped, see `membership_plan.react`
    kv.increment(f"{PREFIX}losses")
    return book.confirm(uuid.uuid4().hex)
