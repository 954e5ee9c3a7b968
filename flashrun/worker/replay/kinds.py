"""The kinds of records in a host-read log. Numbers are part of the format: never reuse one."""

from __future__ import annotations

INIT = 1  # full states of the generators before the script ran
BOUNDARY = 2  # boundary, regions so far, check of the generators
CARRY = 3  # small tensors that the script holds at a boundary
DRAWS = 4  # a region drew: ordinal, generator, number of draws
DRAWS_OPEN = 5  # the same, the number comes later; until then the state is in the ring
STATE = 6  # a region changed a generator in another way: its state after
LOSS = 7  # the loss's value at backward
OUT = 8  # values of the scalars that a forward returned
SHAPE = 9  # the structure of fetched batches changed
CLOSURE = 10  # the optimizer called its closure
RAISED = 11  # a region ended by an exception
OBJECTS = 12  # what an object collective gave
SEED = 13  # a generator was seeded from outside entropy: its state after
STORE = 14  # an operation on the default store has begun
STORE_GAVE = 15  # what it gave

ITEM = 20
FLOAT = 21
INT = 22
BOOL = 23
INDEX = 24
COMPLEX = 25
TOLIST = 26
NUMPY = 27
REPR = 28
EQUAL = 29
ALLCLOSE = 30
NONZERO = 31
SEEDED = 32
SHAPES = 33  # the shapes of a result that depend on values
SAVED = 34  # what was saved into memory

WORLD = 60  # and up: answers of the outside world, see world.py

NAMES = {
    value: name.lower()
    for name, value in list(globals().items())
    if name.isupper() and isinstance(value, int)
}


def name(kind: int) -> str:
    """A word for a kind, for messages."""
    return "an answer of the outside world" if kind >= WORLD else NAMES.get(kind, str(kind))
