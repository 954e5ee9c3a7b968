"""Which ranks are replicas of each other, from the hashes of everybody's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashrun.control.held import line_of
from flashrun.messages import SAME_BUFFERS, Message


@dataclass(frozen=True)
class Kept:
    """What scripts keep in places of their own, as far as the ranks have found it. A variable that
    holds another tensor than when a rank looked last is left out by that rank, for now.

    Attributes:
        names: all of it.
        equal: what every rank has, equal.
        apart: what two ranks have, and it differs.
    """

    names: set[str]
    equal: set[str]
    apart: set[str]


def kept_of(proofs: Mapping[str, Message]) -> Kept:
    """
    Args:
        proofs: as for `compare`.
    """
    everybody = [proof.get("own", {}) for proof in proofs.values()]
    names = {name for own in everybody for name in own}
    found = {name: [own[name] for own in everybody if name in own] for name in names}
    apart = {name for name, hashes in found.items() if len(set(hashes)) > 1}
    everywhere = {name for name, hashes in found.items() if len(hashes) == len(everybody)}
    return Kept(names, everywhere - apart, apart)


@dataclass(frozen=True)
class Verdict:
    """What a comparison has shown.

    Attributes:
        differing: names that differ between ranks although they should not.
        private: names of what each rank keeps for itself, and that does differ.
        lonely: rank -> what only it has.
        size: bytes of the largest state.
    """

    differing: list[str]
    private: list[str]
    lonely: dict[int, str]
    size: int


def compare(proofs: Mapping[str, Message]) -> Verdict:
    """
    Args:
        proofs: rank -> its ``replicas`` message, all for the same boundary.
    """
    everybody = {int(rank): proof["tensors"] for rank, proof in proofs.items()}
    holders: dict[str, list[int]] = {}
    for rank, tensors in everybody.items():
        for name in tensors:
            holders.setdefault(name, []).append(rank)
    own = {name for proof in proofs.values() for name in proof["buffers"]}
    differing = [
        name
        for name, ranks in holders.items()
        if len(ranks) > 1 and len({everybody[rank][name] for rank in ranks}) > 1
    ]
    lonely: dict[int, str] = {}
    if len(everybody) > 1:
        for name, ranks in holders.items():
            if len(ranks) == 1:
                lonely.setdefault(ranks[0], name.split("/")[0])
    return Verdict(
        [name for name in differing if name not in own],
        [name for name in differing if name in own],
        lonely,
        max(int(proof["bytes"]) for proof in proofs.values()),
    )


def by_line(
    words: Mapping[str, Message], lines: Mapping[str, Message], alike: Mapping[str, str]
) -> list[dict[str, Message]]:
    """What ranks have said, in groups that must be replicas.

    Args:
        lines: rank -> where it says of which line it is (`line_of`).
    """
    groups: dict[str, dict[str, Message]] = {}
    for rank, word in words.items():
        groups.setdefault(line_of(lines[rank], alike), {})[rank] = word
    return list(groups.values())


def alike_in(proofs: Mapping[str, Message]) -> dict[str, str]:
    """Which lines' ranks have the same state, in the form that `line_of` takes."""
    firsts: dict[str, Message] = {}  # of each state
    alike: dict[str, str] = {}
    for proof in proofs.values():
        line = proof.get("line", "")
        if line not in alike:
            alike[line] = next((n for n, first in firsts.items() if _same(first, proof)), line)
            firsts.setdefault(alike[line], proof)
    return alike


def _same(one: Message, other: Message) -> bool:
    return (
        one.get("trees") == other.get("trees")
        and one["tensors"].keys() == other["tensors"].keys()
        and not compare({"0": one, "1": other}).differing
    )


def named(names: list[str]) -> str:
    """``"a"`` or ``"a (and 3 more)"``."""
    more = len(names) - 1
    return f"{names[0]} (and {more} more)" if more else names[0]


SPLITS = (
    "the optimizer's step has collectives after it has begun to change something (LBFGS, ZeRO):"
    " a loss while a rank waits in one of them restarts all"
)


def amount(size: float) -> str:
    """Bytes for people."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size:.0f} bytes"


def promise(
    ranks: int,
    size: int,
    splits: bool,
    peerless: Mapping[str, str],
    private: list[str],
    nodes: int,
) -> str:
    """What recovery this job has, for people, and which losses it has not.

    Args:
        size: bytes of a rank's state.
        splits: a rank waits for others in the middle of its step.
        peerless: rank -> what only it has.
        private: buffers that differ between ranks.
    """
    line = f"recovery: in place, {ranks} replicas, {amount(size)} each, no step lost"
    if peerless:
        lonely = ", ".join(f"{name} on rank {rank}" for rank, name in sorted(peerless.items()))
        line += f"; but only one rank has: {lonely} (its loss restarts all)"
    if splits:
        line += f"; but {SPLITS}"
    if private and nodes > 1:
        line += (
            f"; but each rank has its own {named(private)}, so the loss of a node restarts all"
            f" where the last of these had not been copied ({SAME_BUFFERS})"
        )
    return line
