"""What follows from the words of ranks that are held: who can give state to whom, whether all are
where the script is, which operations are issued again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashrun import messages
from flashrun.messages import Message

NOTHING: Mapping[str, str] = {}


@dataclass
class Rank:
    """What is known of the process that serves a rank.

    Attributes:
        state: it has the state of its boundary (a replacement and a laggard have not).
        held: its last word in this generation.
        digest: hashes of its state at the target, once it was asked for them.
        target: the boundary it was told to come to, -1 before.
        failures: faults in a row without progress beyond boundary `failed_at`.
    """

    incarnation: int = 0
    state: bool = True
    port: int = 0
    held: Message | None = None
    digest: Message | None = None
    built: bool = False
    finished: bool = False
    gone: bool = False
    formed: bool = False
    target: int = -1
    failures: int = 0
    failed_at: int = -1
    spawned: bool = False  # a replacement that has not been live yet


def donors_of(
    ranks: Sequence[Rank], rank: int, alike: Mapping[str, str] = NOTHING
) -> dict[str, int]:
    """Who came with all that `rank` needs; a rank may have something that the others have not.

    Args:
        alike: as for `line_of`.
    """
    mine = _kind_of(ranks[rank], alike)
    return {
        str(i): r.port
        for i, r in enumerate(ranks)
        if r.held is not None and r.held["state"] and _kind_of(r, alike) == mine
    }


def _kind_of(who: Rank, alike: Mapping[str, str]) -> tuple[Any, str] | None:
    if who.held is None:
        return None
    return who.held["check"].get("state"), line_of(who.held["check"], alike)


def line_of(word: Mapping[str, Any], alike: Mapping[str, str]) -> str:
    """Ranks of one line are replicas (see flashrun/worker/uneven.py).

    Args:
        word: what a rank has said of itself.
        alike: line -> the one whose state it was found to have when the ranks were compared last.
    """
    line: str = word.get("line", "")
    return alike.get(line, line)


def out_of_step(ranks: Sequence[Rank], target: int) -> str | None:
    """Why boundary numbers don't mean the same on all ranks, where some have no more batches; None:
    they do, or that is not why."""
    held = [(i, r.held) for i, r in enumerate(ranks) if r.state and r.held is not None]
    joined = [i for i, word in held if word["check"].get("shadowed")]
    if not joined:
        return None
    counted: dict[tuple[str, int], set[int]] = {}  # operations before a boundary
    for _, word in held:
        at = int(word["boundary"])
        for ident, group in word["groups"].items():
            for boundary, number in ((at, group["base"]), (at - 1, group.get("before"))):
                if number is not None:
                    counted.setdefault((ident, boundary), set()).add(number)
    beyond = [
        ident
        for _, word in held
        for ident, group in word["groups"].items()
        if group["issued"] > min(counted.get((ident, int(word["boundary"]) + 1), {math.inf}))
    ]
    together = all(int(word["boundary"]) >= target - 1 for _, word in held)
    if together and not beyond and all(len(numbers) == 1 for numbers in counted.values()):
        return None
    return (
        f"rank(s) {joined} have no more batches (Join), and the others don't take one step for each"
        " of theirs: they accumulate gradients, or have several optimizers"
    )


def _nobody_has(
    ranks: Sequence[Rank], rank: int, target: int, alike: Mapping[str, str]
) -> str:
    """Why a rank that is held has no donor."""
    checks = {i: r.held["check"] for i, r in enumerate(ranks) if r.held is not None}
    mine = checks.pop(rank)
    others = [check for i, check in checks.items() if ranks[i].state]
    if any(line_of(check, alike) == line_of(mine, alike) for check in others):
        return (
            f"no survivor has what rank {rank} has at boundary {target}: names and"
            " shapes of the state differ"
        )
    if mine.get("shadowed"):
        what = "ran out of batches (Join) when no survivor did"
    elif all(check.get("shadowed") for check in others):
        what = "was still training (Join), as no survivor was"
    else:
        return (
            f"rank {rank} has a state of its own since a Join of uneven inputs, at whose end only"
            " the model is made the same"
        )
    return f"rank {rank} {what}, so nobody has its state"


def survives(who: Rank) -> bool:
    """Whether it has the state, or will come to it by itself (a laggard)."""
    return (who.state or not who.spawned) and not who.gone


def gone(ranks: Sequence[Rank]) -> str:
    """Who has ended, as a reason."""
    return f"rank(s) {[i for i, r in enumerate(ranks) if r.gone]} have ended and can't take part"


def hopeless(
    ranks: Sequence[Rank],
    dead: Mapping[int, str],
    restart_only: str | None,
    peerless: Mapping[str, str],
) -> str | None:
    """Why a loss can't be recovered, as far as that is known at once; None: it is not.

    Args:
        dead: rank -> cause.
        restart_only: why no loss can.
        peerless: rank -> what only it has.
    """
    if restart_only is not None:
        return restart_only
    for rank in dead:
        if str(rank) in peerless:
            return f"only rank {rank} had {peerless[str(rank)]}"
    if not any(survives(who) for rank, who in enumerate(ranks) if rank not in dead):
        return "no survivor holds the state"
    return gone(ranks) if any(who.gone for who in ranks) else None


def told(rank: int, spawned: bool, reason: str) -> str:
    """Why a worker can't go on; it may have said itself which it is."""
    mine = f"rank {rank}"
    if reason.startswith((f"{mine} ", f"{mine}, ")):
        return reason
    what = "can't be replaced in place" if spawned else "can't go on exactly"
    return f"{mine} {what}: {reason.removeprefix(f'{mine}: ')}"


def mismatch(
    ranks: Sequence[Rank], target: int, alike: Mapping[str, str] = NOTHING
) -> str | None:
    """In what the ranks differ that are all held at boundary `target`; None: in nothing.

    Args:
        alike: as for `line_of`.
    """
    checks = [(i, r.held["check"]) for i, r in enumerate(ranks) if r.held is not None]
    donor, right = next((i, c) for i, c in checks if ranks[i].state)
    firsts: dict[str, tuple[int, str]] = {}  # of each line, and where it is
    for rank, check in checks:
        if not ranks[rank].state and not donors_of(ranks, rank, alike):
            return _nobody_has(ranks, rank, target, alike)
        first, site = firsts.setdefault(line_of(check, alike), (rank, check["site"]))
        if check["site"] != site:
            return (
                f"rank {rank} and rank {first} differ at boundary {target} in the optimizer call:"
                f" {check['site']} and {site}"
            )
        where = f"rank {rank} and rank {donor} differ at boundary {target} in"
        if not _like(check["buckets"], right["buckets"]):
            return (
                f"{where} how DDP has put gradients into buckets (a replacement has them in the"
                " order in which its own become ready; that is not the others' where ranks use"
                " layers in another order)"
            )
        if not ranks[rank].state:
            continue  # a replacement has skipped what was computed; it takes the numbers
        for other, theirs in checks:
            if not ranks[other].state:
                continue
            common = check["groups"].keys() & theirs["groups"].keys()
            for ident in sorted(common):
                if check["groups"][ident] != theirs["groups"][ident]:
                    return (
                        f"at boundary {target} group {ident} has had"
                        f" {check['groups'][ident]} operations on rank {rank} and"
                        f" {theirs['groups'][ident]} on rank {other}"
                    )
    for ident, members in _members(ranks).items():
        for rank in members:
            held = ranks[rank].held
            if held is not None and ident not in held["check"]["groups"]:
                return f"group {ident} is missing on rank {rank} at boundary {target}"
    return None


def _like(mine: list[str | None], theirs: list[str | None]) -> bool:
    """Whether the same DDP modules have rebuilt their buckets, or will in the next forward, and
    nothing is known to differ (see flashrun/worker/buckets.py)."""
    not_yet = messages.BUCKETS_NOT_REBUILT
    return len(mine) == len(theirs) and all(
        a == b or (None in (a, b) and a not in not_yet and b not in not_yet)
        for a, b in zip(mine, theirs, strict=True)
    )


def numbers(ranks: Sequence[Rank]) -> dict[str, int]:
    """Per group how many operations it has had at the target boundary."""
    return {
        ident: number
        for who in ranks
        if who.state and who.held is not None
        for ident, number in who.held["check"]["groups"].items()
    }


def _members(ranks: Sequence[Rank]) -> dict[str, list[int]]:
    """Groups that exist at the target boundary, with their members."""
    members: dict[str, list[int]] = {}
    for who in ranks:
        if who.held is not None:
            for ident in who.held["check"]["groups"]:
                members[ident] = who.held["groups"][ident]["ranks"]
    return members


def let_go(ranks: Sequence[Rank]) -> str | None:
    """Why what this interval's collectives have given can't be given again."""
    those = [i for i, r in enumerate(ranks) if r.held is not None and r.held.get("let_go")]
    if not those:
        return None
    return (
        f"rank(s) {those} have let go of what collectives gave since the last optimizer step, of"
        " which there were too many to keep"
    )


def first_again(ranks: Sequence[Rank]) -> tuple[dict[str, int], str | None]:
    """Per group the first operation of the interval that is issued again by everybody.

    From the interval's beginning where the inputs are kept (our own copies, so nothing can
    have changed them). Where an input is gone, everything up to it is served from a survivor
    instead, also to survivors on which it has not completed.
    """
    first: dict[str, int] = {}
    groups: dict[str, list[tuple[int, Message]]] = {}
    for rank, who in enumerate(ranks):
        if who.state and who.held is not None:
            for ident, group in who.held["groups"].items():
                groups.setdefault(ident, []).append((rank, group))
    for ident, members in groups.items():
        base = max(int(g["base"]) for _, g in members)
        start = max(int(g["lost"]) for _, g in members) + 1
        if start <= base:
            first[ident] = base
            continue
        served = {seq for _, g in members for seq in g["serves"]}
        gone = [seq for seq in range(base, start) if seq not in served]
        if not gone:
            first[ident] = start
            continue
        undone = [r for r, g in members if int(g["done"]) < start]
        if undone:
            return {}, (
                f"inputs of operations of group {ident} that are not complete on rank(s)"
                f" {undone} were not kept (--retain)"
            )
        return {}, f"results of operations {gone[:5]} of group {ident} are gone"
    return first, None
