"""Breadth first through all worlds of a `Model`, each once; the shortest way to a violation."""

from __future__ import annotations

import gc
from array import array
from collections import Counter
from dataclasses import dataclass

import numpy as np

from tests.control.model import Label, Model, Violation, World


@dataclass(frozen=True)
class Explored:
    """
    Attributes:
        worlds: how many there are.
        ends: in how many of them which end was decided.
    """

    worlds: int
    ends: Counter[str]


def explore(model: Model) -> Explored:
    """
    Raises:
        Violation: an invariant does not hold; with the shortest history that leads there.
    """
    collects = gc.isenabled()
    gc.disable()  # there are no cycles among these many small values
    try:
        return _explore(model)
    finally:
        if collects:
            gc.enable()


def _explore(model: Model) -> Explored:
    numbers = {model.initial: 0}
    worlds = [model.initial]
    came_from = array("i", [0])
    edges = array("i"), array("i")  # from, to; without faults
    ends: Counter[str] = Counter()
    for at, world in enumerate(worlds):
        if world.end:
            ends[world.end] += 1
            continue
        try:
            by_itself, faults = model.next(world)
        except Violation as violation:
            story = [*_story(model, worlds, came_from, at), f"=> {violation}"]
            raise Violation("\n".join(story)) from None
        for steps in (by_itself, faults):
            for _, after in steps:
                number = numbers.setdefault(after, len(worlds))
                if number == len(worlds):
                    worlds.append(after)
                    came_from.append(at)
                if steps is by_itself:
                    edges[0].append(at)
                    edges[1].append(number)
    stuck = _without_way_out(worlds, *edges)
    if stuck is not None:
        story = [*_story(model, worlds, came_from, stuck), "=> from here there is no way to an end"]
        raise Violation("\n".join(story))
    return Explored(len(worlds), ends)


def _without_way_out(worlds: list[World], sources: array[int], targets: array[int]) -> int | None:
    """The first world from which no end can be reached without a further fault."""
    into = np.frombuffer(targets, np.int32)
    order = np.argsort(into, kind="stable")
    before = np.frombuffer(sources, np.int32)[order]
    starts = np.searchsorted(into[order], np.arange(len(worlds) + 1))
    good = np.array([bool(world.end) for world in worlds])
    fresh = list(np.flatnonzero(good))
    while fresh:
        at = fresh.pop()
        for source in before[starts[at] : starts[at + 1]]:
            if not good[source]:
                good[source] = True
                fresh.append(source)
    return None if good.all() else int(np.argmin(good))


def _story(model: Model, worlds: list[World], came_from: array[int], at: int) -> list[str]:
    steps: list[Label] = []
    while at:
        before = came_from[at]
        options = [option for options in model.next(worlds[before]) for option in options]
        steps.append(next(label for label, after in options if after == worlds[at]))
        at = before
    return [" ".join(map(str, label)) for label in reversed(steps)]
