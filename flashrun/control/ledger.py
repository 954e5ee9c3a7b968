"""The controller's books on the recovery of one round: what it took in, and what it decided.

What workers say comes as entries of an inbox in the control store. The controller feeds them to
the recovery machine in order, and what that commands becomes durable in one transaction: the
machine as it is now, the commands, and the removal of the entries that led to them. So each entry
counts once, whoever the controller is and wherever it is killed; its successor loads the machine
and goes on in the middle of any phase. Pure: this makes transactions and writes none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashrun.control import commands as codec
from flashrun.control.blobs import packed, part_keys
from flashrun.control.commands import Command, Reseat
from flashrun.control.director import Director
from flashrun.control.recovery import Limits
from flashrun.rendezvous.kv import MAX_OPERATIONS, Delete, Put
from flashrun.rendezvous.table import NodeRanks, RankTable

RECOVERY = "recovery/"  # prefix of all rounds in the control store
_MANY = 24  # entries that led to no command, after which the books are written all the same
_DELETES = MAX_OPERATIONS - 10  # of one transaction
_HEAD_PIECE = 1 << 17  # bytes, beside the commands in one transaction


class Keys:
    """Where things are in the control store; ``prefix`` is the round's own."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.leader = f"{prefix}leader"
        self.head = f"{prefix}head"
        self.inbox = f"{prefix}in/"
        self.out = f"{prefix}out/"
        self.copies = f"{prefix}copies/"  # node -> port at which it takes copies

    def entry(self, node: str, life: str, number: int) -> str:
        """One entry in the inbox, of one life of a node's agent."""
        return f"{self.inbox}{node}/{life}.{number}"

    def order(self, number: int) -> str:
        """One batch of commands."""
        return f"{self.out}{number:012d}"

    def number_of(self, key: str) -> int:
        return int(key[len(self.out) :])


def keys_of(table: RankTable, prefix: str = RECOVERY) -> Keys:
    """Where the books of a round are."""
    return Keys(f"{prefix}{table.round}.{table.token[:8]}/")


def round_of(key: str, prefix: str = RECOVERY) -> int:
    """To which round a key belongs."""
    return int(key[len(prefix) :].partition(".")[0])


def _hosts(table: RankTable) -> list[str]:
    """Of each rank, the address of its node."""
    return [node.addr for node in table.nodes for _ in range(node.slots)]


@dataclass(frozen=True)
class Commit:
    """One transaction: ``first`` are to be written before it, each by itself. The rest is what
    the books say after it."""

    first: tuple[Put, ...]
    expected: dict[str, bytes | None]
    operations: tuple[Put | Delete, ...]
    head: bytes
    last: int
    kept: dict[str, list[str]]
    garbage: list[str]


class Ledger:
    """See the module.

    Args:
        keys: of the round.
        table: of the round; its nodes read the commands.
        limits: of the machine.

    Attributes:
        table: the newest one.
    """

    def __init__(self, keys: Keys, table: RankTable, limits: Limits) -> None:
        self._keys = keys
        self.table = table
        self.director = Director(_hosts(table), limits, [n.base_rank for n in table.nodes])
        self._joined: dict[str, str] = {}  # node -> which of its agents said that it has joined
        self._head: bytes | None = None
        self._last = 0  # number of the last batch of commands
        self._kept: dict[str, list[str]] = {}  # number of a batch -> its further pieces
        self._read: dict[str, int] = {}  # node -> the last batch it has read
        self._taken: list[tuple[str, bytes]] = []  # entries since the last commit
        self._commands: list[Command] = []
        self._garbage: list[str] = []
        self._command_seats(told=0)

    def load(self, head: bytes, value: Mapping[str, Any], now: float) -> None:
        """Go on from the last commit; ``value`` is what is packed in ``head``."""
        self._head = head
        self._last = int(value["last"])
        self._kept = dict(value["kept"])
        self._read = dict(value["read"])
        self._garbage = list(value["garbage"])
        self._joined = dict(value["joined"])
        told = None if value["table"] is None else RankTable.from_dict(value["table"])
        if told is not None and told.joins >= self.table.joins:
            self.table = told
        self.director = Director.load(value["director"], _hosts(self.table), now)
        self._commands = []
        self._command_seats(0 if told is None else told.joins)

    def take(self, key: str, first: bytes, value: Mapping[str, Any], now: float) -> None:
        """The next entry of the inbox.

        Args:
            first: as it is in the store.
            value: unpacked: ``node``, ``read`` (the last batch of commands it has read) and
                ``seen``, a list of what happened to its workers, or to its place.
        """
        self._taken.append((key, first))
        self._read[value["node"]] = max(self._read.get(value["node"], 0), int(value["read"]))
        for seen in value["seen"]:
            if "table" in seen:
                table = RankTable.from_dict(seen["table"])
                told = self.table.joins
                if seen.get("joined"):
                    # What was commanded before it joined was for the lost node; it has not read it.
                    told = min(told, table.joins)
                self._reseat(table, told)
                self._join(value["node"], seen, now)
                continue
            rank, incarnation = int(seen["rank"]), int(seen["incarnation"])
            if "ended" in seen:
                kind, cause = seen["ended"]
                self._commands += self.director.exited(rank, incarnation, kind, cause, now)
            else:
                self._commands += self.director.message(rank, incarnation, seen["message"], now)

    def _reseat(self, table: RankTable, told: int) -> None:
        """A node has this table."""
        if table.joins > self.table.joins:
            for place in table.nodes:
                if place != self.table.of(place.node):  # (it may have been here before)
                    self._joined.pop(place.node, None)
            self.table = table
            self.director.reseat(_hosts(table))
        self._command_seats(told)

    def _command_seats(self, told: int) -> None:
        """Have all nodes take the newest table, if there is one that has none since `told` joins.
        (A spare that begins to lead has a table of which the books, and others, don't know.)"""
        if self.table.joins > told:
            self._commands.append(Reseat(self.table.to_dict()))

    def _join(self, node: str, seen: Mapping[str, Any], now: float) -> None:
        place, life = self.table.of(node), seen.get("joined", "")
        if place is None or not life or self._joined.get(node) == life:
            return
        self._joined[node] = life
        if seen["unable"]:
            self._commands += self.director.unable(place.ranks, seen["unable"])
        else:
            self._commands += self.director.node_joined(place.ranks, place.addr, now)

    def node_lost(self, node: str, why: str, now: float, no_spare: str = "") -> None:
        """A node does not live any more; ``no_spare``: why no other can take its place."""
        place = self.table.of(node)
        if place is not None:
            self._commands += self.director.node_lost(place.ranks, place.addr, why, now, no_spare)

    @property
    def quiet(self) -> int | None:
        """None while something is being recovered; else how many places others have taken."""
        seated = not self._on_their_way()
        return self.table.joins if seated and self.director.quiet else None

    def _on_their_way(self) -> list[NodeRanks]:
        """Those that were given a lost node's place, and have not said that they have it."""
        return [n for n in self.table.nodes if n.instead and n.node not in self._joined]

    def missed(self) -> tuple[str, set[int]]:
        """As the director's, and the ranks of nodes that are on their way to a place: a spare may
        have been dead before it was given one."""
        wait, ranks = self.director.missed()
        if not self.director.machine.ended:
            for node in self._on_their_way():
                wait += f" {node.node}"
                ranks.update(node.ranks)
        return wait, ranks

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._commands += self.director.tick(now)

    @property
    def due(self) -> bool:
        """Whether something has to become durable. What led to no command need not: it is still
        in the inbox."""
        return bool(self._commands) or len(self._taken) >= _MANY

    def commit(self, now: float) -> Commit:
        """The transaction for all that is due; call `committed` once it was carried out."""
        keys = self._keys
        puts: list[Put] = []
        first: list[Put] = []
        last, kept = self._last, dict(self._kept)
        if self._commands:
            last += 1
            blob = packed(keys.prefix, {"commands": codec.to_json(self._commands)})
            puts.append(Put(keys.order(last), blob.first))
            first += blob.parts
            kept[str(last)] = [part.key for part in blob.parts]
        # The entries themselves come first, so that none is left over to be read again.
        garbage = [key for key, _ in self._taken]
        for _, value in self._taken:
            garbage += part_keys(keys.prefix, value)
        everybody_has = min(self._read.get(node, 0) for node in (n.node for n in self.table.nodes))
        for number in [n for n in kept if int(n) <= everybody_has]:
            garbage += [keys.order(int(number)), *kept.pop(number)]
        if self._head is not None:
            garbage += part_keys(keys.prefix, self._head)
        garbage += self._garbage
        left = garbage[_DELETES:]
        books = {
            "last": last,
            "kept": kept,
            "read": self._read,
            "garbage": left,
            "joined": self._joined,
            "table": self.table.to_dict() if self.table.joins else None,
            "director": self.director.dump(now),
        }
        head = packed(keys.prefix, books, _HEAD_PIECE)
        return Commit(
            first=(*first, *head.parts),
            expected={keys.head: self._head},
            operations=(
                Put(keys.head, head.first), *puts, *(Delete(key) for key in garbage[:_DELETES]),
            ),
            head=head.first,
            last=last,
            kept=kept,
            garbage=left,
        )  # fmt: skip

    def committed(self, commit: Commit) -> None:
        """It was carried out."""
        self._head = commit.head
        self._last, self._kept, self._garbage = commit.last, commit.kept, commit.garbage
        self._taken, self._commands = [], []
