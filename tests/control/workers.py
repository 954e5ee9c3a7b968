"""Half of the model: one rank's process, its wires, and what it does by itself.

A worker follows `flashrun.worker.runtime` in what the decider can see of it. What takes no time and
depends on nobody else (`advance`) is done at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Word = tuple[Any, ...]  # a message: its op, then what matters of it

END_OF_FILE: Word = ("end of file",)


class Worker(NamedTuple):
    """The process of a rank.

    Attributes:
        generation: the one that its script uses; `pending` the newest that it was told of.
        state: it has the state of `boundary`.
        place: where its script's thread is: ``run`` (in the script: the collective of interval
            `boundary` is issued), ``catch-up`` (a replacement on its way), ``lag`` (a laggard on
            its way), ``plan``, ``rebuild``, ``go`` (held, waits for that word of generation
            `part`), ``stuck`` (has said what failed in `part`, waits for a newer one).
        told: words of generations that are not over.
        standing: what it says again on a new connection.
        exit: it was told to end.
    """

    incarnation: int
    boundary: int
    generation: int
    pending: int
    state: bool = True
    place: str = "run"
    part: int = 0
    target: int = -1
    told: tuple[Word, ...] = ()
    standing: tuple[Word, ...] = ()
    finished: bool = False
    exit: bool = False
    alive: bool = True

    def running(self) -> bool:
        """Its script is free to go on."""
        return self.alive and self.place == "run" and self.pending == self.generation

    def word(self, op: str) -> Word | None:
        return next((w for w in self.told if w[:2] == (op, self.part)), None)


class Seat(NamedTuple):
    """A rank: its process and what is under way from and to it.

    Attributes:
        up, down: words that were sent and not read yet, oldest first.
        link: ``open``; ``new`` (the decider has not read the hello); ``cut`` (the worker has not
            read the end of the old connection).
        end: how the process has ended, until the decider sees it: ``fault``, ``clean`` or "".
        built: the newest generation that a process of this rank has built (seen by nobody).
        hung: it does nothing any more.
    """

    worker: Worker
    up: tuple[Word, ...] = ()
    down: tuple[Word, ...] = ()
    link: str = "open"
    end: str = ""
    built: int = 0
    hung: bool = False

    def say(self, *words: Word) -> Seat:
        """Lost where nobody listens."""
        if self.link == "cut":
            return self
        return self._replace(up=self.up + words)


def replacement(incarnation: int, generation: int, built: int) -> Seat:
    """The next process of a rank, which has connected."""
    worker = Worker(incarnation, 0, -1, generation, state=False, place="catch-up", part=generation)
    return Seat(worker, up=(("hello", -1),), link="new", built=built)


def _standing(worker: Worker, word: Word) -> Worker:
    """As in a dict: what is said again keeps its place."""
    kept = list(worker.standing)
    for i, old in enumerate(kept):
        if old[0] == word[0]:
            kept[i] = word
            return worker._replace(standing=tuple(kept))
    return worker._replace(standing=(*kept, word))


def _withdraw(worker: Worker, *ops: str) -> Worker:
    return worker._replace(standing=tuple(w for w in worker.standing if w[0] not in ops))


def deliver(seat: Seat) -> Seat:
    """The worker reads its next word."""
    word, worker = seat.down[0], seat.worker
    seat = seat._replace(down=seat.down[1:])
    if word == END_OF_FILE:  # it connects again
        return seat._replace(link="new", up=(("hello", worker.generation, *worker.standing),))
    if word[0] == "exit":
        worker = worker._replace(exit=True)
    elif word[0] == "abort":
        worker = worker._replace(pending=max(worker.pending, word[1]))
    else:
        told = {w[:2]: w for w in (*worker.told, word) if w[1] >= worker.pending}
        worker = worker._replace(told=tuple(told[key] for key in sorted(told)))
        if word[0] == "plan" and worker.place == "catch-up" and word[1] >= worker.pending:
            worker = worker._replace(pending=word[1], target=word[2])
    worker = worker._replace(told=tuple(w for w in worker.told if w[1] >= worker.pending))
    return advance(seat._replace(worker=worker))


def enter(seat: Seat) -> Seat:
    """Hold in the newest generation and say so."""
    w = seat.worker
    word = ("held", w.pending, w.boundary, w.state, w.finished)
    w = _standing(w._replace(place="plan", part=w.pending), word)
    return advance(seat._replace(worker=w).say(word))


def finish(seat: Seat) -> Seat:
    """The script has ended."""
    word = ("finished", seat.worker.boundary)
    worker = _standing(seat.worker._replace(finished=True), word)
    return advance(seat._replace(worker=worker).say(word))


def leave(seat: Seat) -> Seat:
    """The script has ended its process by itself, with status 0."""
    worker = seat.worker._replace(finished=True, alive=False)
    return seat._replace(worker=worker, end="clean", down=())


def build(seat: Seat) -> Seat:
    """It has the state, and its communicators are there."""
    w = seat.worker
    word = ("built", w.part)
    w = _standing(w._replace(place="go", state=True), word)
    return advance(seat._replace(worker=w, built=w.part).say(word))


def fail(seat: Seat, late: bool = False) -> Seat:
    """It could not do its part.

    Args:
        late: the collective took longer than its group's timeout.
    """
    w = seat.worker
    if w.place == "run":
        word: Word = ("suspect", w.generation, *(["late"] if late else []))
        w = w._replace(place="stuck", part=w.generation)
    else:
        word = ("failed", w.part)
        w = w._replace(place="stuck")
    return seat._replace(worker=_standing(w, word)).say(word)


def arrive(seat: Seat) -> Seat:
    """A replacement or a laggard has come to the boundary."""
    w = seat.worker
    at = w.target if w.place == "catch-up" else w.boundary + 1
    return enter(seat._replace(worker=w._replace(boundary=at, state=at == 0)))


def advance(seat: Seat) -> Seat:
    """All that the worker does next at once, up to where it waits."""
    w = seat.worker
    if not w.alive or w.place in ("catch-up", "lag"):
        return seat
    if w.finished and w.exit:
        return seat._replace(worker=w._replace(alive=False), end="clean")
    if w.place == "run":
        return enter(seat) if w.pending > w.generation else seat
    if w.pending > w.part:
        return enter(seat)
    word = w.word(w.place)
    if word is None:
        return seat
    if w.place == "plan":
        _, generation, target, compare = word
        if w.state and w.boundary < target:
            return seat._replace(worker=_withdraw(w._replace(place="lag", state=False), "held"))
        if w.state and compare:
            said = ("digest", generation)
            w = _standing(w, said)
            seat = seat.say(said)
        return advance(seat._replace(worker=w._replace(place="rebuild")))
    if w.place == "rebuild":
        return build(seat) if w.state else seat
    if w.place == "go":
        live = w._replace(place="run", generation=w.part)
        w = _withdraw(live, "held", "built", "digest", "suspect", "failed")
        return advance(seat._replace(worker=w).say(("live", w.generation)))
    return seat
