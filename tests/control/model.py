"""The protocol of recovery as a state machine, to be explored (`explorer`) or walked at random.

It reads like a TLA+ specification: a `World` is a value, `Model.next` gives all that may come next,
and what must never be is a `Violation`. The decider is the real `RecoveryMachine` (`decider`);
workers and wires are a model of `flashrun.worker.runtime` and its channel (`workers`).

VARIABLES
    decider     what the machine has saved (its dump, without times)
    seats       per rank: its process, the words under way in either direction, the connection
    faults      what may still happen
    end         what the machine has decided for good, "" before

INIT
    All ranks are live in generation 0, at the same boundary, connected, and proved.

ACTIONS of the workers
    step        a rank completes its collective, which every rank of its generation has issued,
                takes the optimizer step, and issues the next: it may be one boundary ahead
    end         the script has ended at the last boundary; the worker waits for the word to exit
    suspect     a collective can't complete: a peer is dead, hangs, or has cut its communicators
    arrive      a replacement comes to its target, a laggard to the next boundary
    take        a rank without the state takes it from the donors that were named, or fails
    (What takes no time is done at once: to hold, to say so, to run as a laggard, to build with the
    state at hand, to go live.)
ACTIONS of the decider
    read        a word of one rank; its connection keeps the order, others may come before or after
    see         the end of a process, before or after the last words of that process
    grace       the moment has passed in which an exit might have explained a suspicion
    deadline    only where somebody hangs, and where nothing else can happen any more
    found       who hangs while nobody needs it, by its heartbeat
FAULTS, at any moment, as often as `Faults` says
    kill        any process that lives. By symmetry, the first one is rank 0
    break       a collective or a transfer of a rank fails although everybody lives
    hang        a process neither acts nor reads any more
    quit        a script ends its process by itself at its end, with status 0 (os._exit)
    slow        the rebuild's deadline passes although nobody hangs
    death       of the decider: connections are cut, what was on the way to it is lost, the next one
                loads the dump, workers connect again and say again what stands. It may also have
                saved and not have said a word of its last answer, or (since survivors are woken
                before anything else) have said `abort` and not have saved.
Wires are fast or slow. On slow ones a word to a worker may come at any time later, may be lost with
the connection, and each word after a hello is read by itself. On fast ones workers read at once,
which leaves out no outcome, only many orders: what a worker answers is as late as one likes.

INVARIANTS
    one generation      a worker goes live in g only when all ranks have built g with state at one
                        boundary, and no other process still runs in an older generation
    an end to waits     while not live, the machine has a deadline
    no need of it       nothing but a hang makes it necessary: something else can always happen
    a way out           from every world, the end can be reached without a further fault
    one process         a process is started once, as the next of its rank, when the one before it
                        has ended
    donors              who gives state has it, at that boundary
    once                a word that comes twice in a row, or from a dead process, changes nothing
    honest end          `Done` only if all scripts have ended
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from flashrun.control.recovery import RecoveryMachine
from tests.control.decider import Answer, Decider, Effect, Violation, check
from tests.control.workers import (
    END_OF_FILE,
    Seat,
    Word,
    Worker,
    arrive,
    build,
    deliver,
    fail,
    finish,
    leave,
    replacement,
)

Label = tuple[object, ...]
Move = Callable[[Seat], Seat]


class Faults(NamedTuple):
    """How often each may still happen. `hit`: somebody was killed."""

    kills: int = 0
    deaths: int = 0
    breaks: int = 0
    hangs: int = 0
    slow: int = 0
    quits: int = 0
    hit: bool = False


class World(NamedTuple):
    decider: int
    seats: tuple[int, ...]
    faults: Faults
    end: str = ""


Next = tuple[Label, World]


class Model:
    """See the module. Deciders and seats are known by numbers, so that a world is a small value.

    Args:
        boundaries: where all are at the beginning, and where their scripts end.
        slow_wires: see the module.
        machine: the class to check.
    """

    def __init__(
        self,
        world_size: int,
        boundaries: tuple[int, int],
        faults: Faults,
        slow_wires: bool = False,
        machine: type[RecoveryMachine] = RecoveryMachine,
    ) -> None:
        self._last = boundaries[1]
        self._slow = slow_wires
        self._decider = Decider(world_size, machine)
        self._numbers: dict[Seat, int] = {}
        self._seats: list[Seat] = []
        self._after: dict[tuple[int, Move | Word], int] = {}  # a seat's own moves
        first = self._number(Seat(Worker(0, boundaries[0], 0, 0)))
        self.initial = World(self._decider.start, (first,) * world_size, faults)

    # --- what may come next

    def next(self, world: World) -> tuple[list[Next], list[Next]]:
        """
        Returns:
            What may happen by itself, and the faults; nothing after the end.

        Raises:
            Violation: an invariant does not hold here or in what comes next.
        """
        if world.end:
            return [], []
        seats = [self._seats[number] for number in world.seats]
        inputs = list(self._inputs(world, seats))
        found = [(label, self._obey(rest, answer)) for label, rest, answer in inputs]
        found += self._moves(world, seats)
        if not found:
            hung = [rank for rank, seat in enumerate(seats) if seat.hung and seat.worker.alive]
            check(bool(hung), "nothing but a deadline can end this wait")
            if self._decider.waits(world.decider):
                found.append((("deadline",), self._obey(world, self._decider.tick(world.decider))))
            else:
                found += [((r, "is found stopped"), self._move(world, r, _die)) for r in hung]
        faults = list(self._faults(world, seats))
        if world.faults.deaths:
            faults += self._deaths(world, seats, inputs)
        return found, faults

    def _moves(self, world: World, seats: list[Seat]) -> Iterator[Next]:
        """Of the workers."""
        for rank, seat in enumerate(seats):
            w = seat.worker
            if not w.alive or seat.hung:
                continue
            if seat.down and self._slow:
                yield (rank, "reads", seat.down[0]), self._read(world, rank)
            if w.place == "lag" or (w.place == "catch-up" and w.target >= 0):
                yield (rank, "arrives"), self._move(world, rank, arrive)
            elif w.place == "rebuild" and not w.state and w.word("rebuild") is not None:
                yield (rank, "takes state"), self._take(world, rank, seats)
            elif w.running() and not w.finished:
                if w.boundary == self._last:
                    yield (rank, "ends its script"), self._move(world, rank, finish)
                    continue
                if all(_issued(other, w) for other in seats):
                    yield (rank, "steps"), self._move(world, rank, _step)
                if any(_absent(other, w) for other in seats):
                    late = any(other.hung and other.worker.alive for other in seats)
                    seat = fail(seat, late)
                    yield (rank, "suspects"), self._put(world, rank, self._number(seat))

    def _inputs(self, world: World, seats: list[Seat]) -> Iterator[tuple[Label, World, Answer]]:
        """What the decider may learn next: the world without that, and its answer."""
        for rank, seat in enumerate(seats):
            if seat.up:
                word, incarnation = seat.up[0], seat.worker.incarnation
                rest = self._move(world, rank, self._heard)
                if word[0] == "hello" and self._slow:
                    word = word[:2]
                answer = self._decider.heard(world.decider, rank, incarnation, word)
                yield ("decider reads", word, "of", rank), rest, answer
            if seat.end:
                yield ("decider sees the end of", rank), *self._see(world, rank, seat)
        if self._decider.suspects(world.decider):
            yield ("grace",), world, self._decider.tick(world.decider)

    def _faults(self, world: World, seats: list[Seat]) -> Iterator[Next]:
        left = world.faults
        for rank, seat in enumerate(seats):
            w = seat.worker
            if not w.alive:
                continue
            if left.kills and (left.hit or rank == 0):
                after = left._replace(kills=left.kills - 1, hit=True)
                yield (rank, "is killed"), self._move(world, rank, _die)._replace(faults=after)
            if left.quits and w.running() and w.boundary == self._last and not w.finished:
                after = left._replace(quits=left.quits - 1)
                yield (rank, "quits"), self._move(world, rank, leave)._replace(faults=after)
            if left.hangs and not seat.hung:
                after = left._replace(hangs=left.hangs - 1)
                yield (rank, "hangs"), self._move(world, rank, _hang)._replace(faults=after)
            if left.breaks and not seat.hung and _may_fail(w):
                after = left._replace(breaks=left.breaks - 1)
                yield (rank, "fails"), self._move(world, rank, fail)._replace(faults=after)
        if left.slow and self._decider.rebuilds(world.decider):
            after = left._replace(slow=left.slow - 1)
            late = self._obey(world, self._decider.tick(world.decider))
            yield ("too slow",), late._replace(faults=after)

    def _deaths(
        self, world: World, seats: list[Seat], inputs: list[tuple[Label, World, Answer]]
    ) -> Iterator[Next]:
        """The decider dies: before it learns something, after it has saved, before it saves."""
        after = world.faults._replace(deaths=world.faults.deaths - 1)
        world = world._replace(faults=after)
        yield ("decider dies",), self._cut(world)
        if self._slow:
            yield ("decider dies, all words are lost",), self._cut(world, lost=True)
        for label, rest, (decider, effects) in inputs:
            said = [e for e in effects if e[0] == "send"]
            if said:
                kept = tuple(e for e in effects if e[0] != "send")
                silent = self._obey(rest._replace(faults=after), (decider, kept))
                yield (*label, "saves, dies"), self._cut(silent)
            if any(e[0] == "spawn" for e in effects):
                yield (*label, "says abort, dies"), self._cut(self._send(world, said))

    # --- what the decider does

    def _heard(self, seat: Seat) -> Seat:
        word, link = seat.up[0], seat.link
        rest = seat.up[1:]
        if word[0] == "hello":
            link = "open"
            if self._slow:
                rest = (*word[2:], *rest)
        return seat._replace(up=rest, link=link)

    def _see(self, world: World, rank: int, seat: Seat) -> tuple[World, Answer]:
        """The end of a process; what it has said and nobody has read must have no effect now."""
        incarnation = seat.worker.incarnation
        decider, effects = self._decider.exited(world.decider, rank, incarnation, seat.end)
        for word in seat.up:
            heard = self._decider.heard(decider, rank, incarnation, word)
            check(heard == (decider, ()), f"{word} of a dead process has an effect: {heard}")
        return self._move(world, rank, _buried), (decider, effects)

    def _obey(self, world: World, answer: Answer) -> World:
        decider, effects = answer
        world = World(decider, world.seats, world.faults)
        for effect in effects:
            kind, *what = effect
            if kind == "kill":
                self._check_kill(world, *what)
                world = self._move(world, what[0], _die)
            elif kind == "spawn":
                rank, incarnation, generation = what
                self._check_spawn(world, rank, incarnation)
                built = self._seats[world.seats[rank]].built
                seat = replacement(incarnation, generation, built)
                world = self._put(world, rank, self._number(seat))
            elif kind == "end":
                world = world._replace(end=what[0])
                self._check_end(world)
        return self._send(world, [e for e in effects if e[0] == "send"])

    def _send(self, world: World, sends: list[Effect]) -> World:
        for _, rank, word in sends:
            before = world.seats[rank]
            after = self._after.get((before, word))
            if after is None:
                seat = self._seats[before]
                if seat.link == "open" and seat.worker.alive:
                    seat = seat._replace(down=(*seat.down, word))
                    if not self._slow and not seat.hung:
                        seat = deliver(seat)
                after = self._after[before, word] = self._number(seat)
            if after != before:
                world = self._put(world, rank, after)
                self._check_live(world, rank, before)
        return world

    def _cut(self, world: World, lost: bool = False) -> World:
        """The decider is gone, and with it all connections; the next one has its dump."""
        cut = _cut_and_lost if lost else _cut
        seats = tuple(self._moved(number, cut) for number in world.seats)
        return World(world.decider, seats, world.faults, world.end)

    # --- what the workers do

    def _read(self, world: World, rank: int) -> World:
        before = world.seats[rank]
        world = self._move(world, rank, deliver)
        self._check_live(world, rank, before)
        return world

    def _take(self, world: World, rank: int, seats: list[Seat]) -> World:
        """Take state from the donors, if they still are who they were."""
        w = seats[rank].worker
        word = w.word("rebuild")
        assert word is not None
        check(bool(word[2]), f"rank {rank} has no donor")
        there = True
        for donor, incarnation in word[2]:
            seat = seats[donor]
            d = seat.worker
            there = there and d.alive and not seat.hung and d.incarnation == incarnation
            if d.incarnation == incarnation:
                check(
                    d.state and d.boundary == w.boundary,
                    f"rank {rank} would take the state of {w.boundary} from {donor}, which has not",
                )
        return self._move(world, rank, build if there else fail)

    def _move(self, world: World, rank: int, move: Move) -> World:
        return self._put(world, rank, self._moved(world.seats[rank], move))

    def _moved(self, before: int, move: Move) -> int:
        """A seat's own move: worked out once."""
        after = self._after.get((before, move))
        if after is None:
            seat = move(self._seats[before])
            if not self._slow and seat.down and not seat.hung:
                seat = deliver(seat)
            after = self._after[before, move] = self._number(seat)
        return after

    def _number(self, seat: Seat) -> int:
        number = self._numbers.setdefault(seat, len(self._seats))
        if number == len(self._seats):
            self._seats.append(seat)
        return number

    def _put(self, world: World, rank: int, number: int) -> World:
        decider, seats, faults, end = world
        return World(decider, (*seats[:rank], number, *seats[rank + 1 :]), faults, end)

    # --- invariants

    def _check_live(self, world: World, rank: int, before: int) -> None:
        """Where `rank` has just gone live."""
        me = self._seats[world.seats[rank]].worker
        g = me.generation
        if g == self._seats[before].worker.generation:
            return
        seats = [self._seats[number] for number in world.seats]
        check(me.state, f"rank {rank} is live without state")
        for other, seat in enumerate(seats):
            w = seat.worker
            check(seat.built >= g, f"rank {rank} is live in {g}, which {other} has not built")
            check(
                not w.alive or w.pending >= g,
                f"rank {other} still runs in {w.generation} while {rank} is live in {g}",
            )
            check(
                w.generation != g or abs(w.boundary - me.boundary) <= 1,
                f"ranks {rank} and {other} are live in {g} at boundaries that don't fit",
            )

    def _check_kill(self, world: World, rank: int, incarnation: int) -> None:
        now = self._seats[world.seats[rank]].worker.incarnation
        check(now == incarnation, f"rank {rank}: {now} is there, not {incarnation}, to be killed")

    def _check_spawn(self, world: World, rank: int, incarnation: int) -> None:
        w = self._seats[world.seats[rank]].worker
        check(not w.alive, f"rank {rank} is replaced while its process lives")
        check(incarnation == w.incarnation + 1, f"rank {rank}: {incarnation} after {w.incarnation}")

    def _check_end(self, world: World) -> None:
        if world.end == "done":
            ended = all(self._seats[number].worker.finished for number in world.seats)
            check(ended, "done, although a script has not ended")


def _issued(other: Seat, w: Worker) -> bool:
    """`other` has issued the collective in which `w` waits."""
    return other.worker.generation == w.generation and other.worker.boundary >= w.boundary


def _absent(other: Seat, w: Worker) -> bool:
    """`other` may be why the collective of `w` does not complete."""
    theirs = other.worker
    if theirs.generation == w.generation and theirs.boundary > w.boundary:
        return False
    return (
        not theirs.alive or other.hung or theirs.pending > w.generation or theirs.place == "stuck"
    )


def _may_fail(w: Worker) -> bool:
    if w.place == "run":
        return w.pending == w.generation and not w.finished
    return w.place in ("rebuild", "go")


def _step(seat: Seat) -> Seat:
    w = seat.worker
    return seat._replace(worker=w._replace(boundary=w.boundary + 1))


def _die(seat: Seat) -> Seat:
    if not seat.worker.alive:
        return seat
    return seat._replace(worker=seat.worker._replace(alive=False), end="fault", down=())


def _hang(seat: Seat) -> Seat:
    return seat._replace(hung=True)


def _buried(seat: Seat) -> Seat:
    return seat._replace(up=(), end="")


def _cut(seat: Seat) -> Seat:
    if not seat.worker.alive or seat.link == "cut":
        return seat._replace(up=())
    return seat._replace(up=(), down=(*seat.down, END_OF_FILE), link="cut")


def _cut_and_lost(seat: Seat) -> Seat:
    return _cut(seat._replace(down=(END_OF_FILE,) if seat.link == "cut" else ()))


__all__ = ["Faults", "Model", "Violation", "World"]
