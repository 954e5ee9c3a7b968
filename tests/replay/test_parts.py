"""The log, the generators seen in place, the carried values."""

from __future__ import annotations

import random
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from flashrun.worker.replay import carried, memory, mersenne, unprofiled
from flashrun.worker.replay.journal import FIRST_SEGMENT, Reader, Writer
from flashrun.worker.replay.randomness import Randomness


def read(folder: Path) -> list[tuple[int, int, bytes, int | None]]:
    reader, found = Reader(folder), []
    while (record := reader.take()) is not None:
        found.append((record.kind, record.site, record.payload, record.tail))
    return found


def test_log_grows_by_segments_and_splits_large_records(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    wanted = []
    rng = random.Random(1)
    for number in range(400):
        payload = rng.randbytes(rng.choice([0, 9, 4000, 59_999, 60_000, 60_001, 200_000]))
        writer.append(number % 200 + 1, number, payload)
        wanted.append((number % 200 + 1, number, payload, None))
    assert len(list(tmp_path.glob("log.*"))) > 2
    assert read(tmp_path) == wanted


def test_tails_are_filled_in_later_and_a_cut_log_goes_on(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.append(1, 1, b"one")
    tail = writer.append_open(2, 2, b"open")
    place = writer.position()
    for number in range(100):
        writer.append(3, number, b"after")
    assert read(tmp_path)[1] == (2, 2, b"open", None)
    tail.fill(77)
    again = Writer(tmp_path, place)
    assert len(read(tmp_path)) == 102  # nothing is lost before the first append
    again.append(3, 0, b"other")  # as long as the old record there
    assert read(tmp_path) == [(1, 1, b"one", None), (2, 2, b"open", 77), (3, 0, b"other", None)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3000), st.integers(0, 7))
def test_any_flipped_bit_ends_the_log(tmp_path_factory, at: int, bit: int) -> None:
    folder = tmp_path_factory.mktemp("log")
    writer = Writer(folder)
    for number in range(60):
        writer.append(1 + number % 5, number, bytes([number]) * 40)
    wanted = read(folder)
    path = folder / "log.0000"
    content = bytearray(path.read_bytes())
    at = 16 + at % (writer.position().offset - 16)
    content[at] ^= 1 << bit
    path.write_bytes(content)
    got = read(folder)
    assert got == wanted[: len(got)]
    assert len(got) < len(wanted)


def test_a_full_file_system_is_an_error_before_the_record(tmp_path: Path, monkeypatch) -> None:
    writer = Writer(tmp_path)

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    while writer.position().offset + 2000 < FIRST_SEGMENT:
        writer.append(1, 0, bytes(1000))
    wanted = read(tmp_path)
    with pytest.raises(OSError, match="No space"):
        writer.append(1, 0, bytes(3000))
    assert read(tmp_path) == wanted


def test_layouts_hold_on_this_python_and_torch() -> None:
    mersenne.prove_layouts()


@pytest.mark.parametrize(
    "draws",
    [0, 1, 5, 324, 325, 623, 624, 625, 948, 949, 5000, 40_260, 40_261, 100_003, 400_000],
)
def test_draws_are_found_and_drawn_again(draws: int) -> None:
    generator = torch.Generator()
    generator.manual_seed(3)
    twister = mersenne.TorchTwister(generator)
    torch.empty(300, dtype=torch.int32).random_(generator=generator)
    before = twister.capture()
    torch.empty(draws, dtype=torch.int32).random_(generator=generator)
    after = twister.capture()
    assert mersenne.DrawCounter().count(before, after) == draws
    few = mersenne.count_few(before, after, 8)
    assert few == (draws if 324 < draws <= 324 + 8 * 624 else None)
    twister.restore(before)
    twister.advance(draws)
    assert twister.capture() == after


def test_a_seeding_is_not_a_number_of_draws() -> None:
    generator = torch.Generator()
    twister = mersenne.TorchTwister(generator)
    generator.manual_seed(1)
    before = twister.capture()
    generator.manual_seed(2)
    assert mersenne.DrawCounter(limit=1 << 20).count(before, twister.capture()) is None


def test_cached_normals_are_part_of_a_state() -> None:
    own = random.Random(1)
    twister = mersenne.PythonTwister(own)
    own.gauss(0, 1)
    state = twister.capture()
    first = [own.gauss(0, 1) for _ in range(3)]
    twister.restore(state)
    assert [own.gauss(0, 1) for _ in range(3)] == first
    legacy = np.random.RandomState(1)
    numpy = mersenne.NumpyTwister(legacy)
    legacy.randn()
    mark, state = numpy.fingerprint(), numpy.capture()
    legacy.randn()  # the cached one: no word is drawn
    assert numpy.fingerprint() != mark
    numpy.restore(state)
    assert numpy.fingerprint() == mark


def test_draws_that_a_dead_process_had_not_counted_are_there_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their states lie in a ring, which later processes of the rank fill again and again."""
    monkeypatch.setattr(Randomness, "_count_draws", lambda self: None)  # killed before

    def draw(randomness: Randomness, ordinal: int, writer: Writer) -> None:
        randomness.begin()
        torch.rand(20_000)
        randomness.end(ordinal, writer)
        randomness._queue.clear()

    torch.manual_seed(1)
    randomness, writer = Randomness(tmp_path, create=True), Writer(tmp_path)
    began, wanted = randomness.whole(), []
    for ordinal in range(3):
        draw(randomness, ordinal, writer)
        wanted.append(randomness.whole())
    for _ in range(2):
        randomness, reader = Randomness(tmp_path, create=False), Reader(tmp_path)
        randomness.restore_whole(began)
        for ordinal in range(3):
            randomness.apply(randomness.take(ordinal, reader))
            assert randomness.whole() == wanted[ordinal]
        writer = Writer(tmp_path, reader.here)
        randomness.drop_after(0, 3)
        randomness.rebase()
        for ordinal in range(3, 1100):
            draw(randomness, ordinal, writer)


def test_small_tensors_in_the_scripts_frames_are_carried() -> None:
    frame = sys._getframe()
    total, history = torch.tensor(1.5), [torch.tensor(2), torch.tensor([True, False])]
    names = {"half": torch.tensor(0.5, dtype=torch.bfloat16)}
    large = torch.zeros(100)
    logged = carried.collect(frame)
    total.add_(1)
    history[0].zero_()
    history[1].logical_not_()
    names["half"].zero_()
    large.add_(1)
    problem, restored = carried.restore(frame, logged, nullcontext())
    assert problem is None
    assert any(tensor is total for tensor in restored)
    assert total.item() == 1.5
    assert [t.tolist() for t in history] == [2, [True, False]]
    assert names["half"].item() == 0.5
    assert large[0] == 1
    history.append(torch.tensor(3))
    assert "log has" in str(carried.restore(frame, logged, nullcontext())[0])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(8)[2::3],
        torch.tensor(True),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.empty(0),
        torch._efficientzerotensor(3),
    ],
)
def test_content_of_small_tensors(tensor: torch.Tensor) -> None:
    plain = tensor.resolve_conj().resolve_neg().contiguous().clone()
    assert memory.content(tensor) == bytes(plain.untyped_storage())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_scalar_is_filled_unseen_by_its_graph(dtype: torch.dtype) -> None:
    weight = torch.tensor(3.0, dtype=dtype, requires_grad=True)
    loss = weight * 1
    squared = loss * loss  # keeps the loss
    assert memory.fill_one(loss, 5.0) == (dtype is not torch.bfloat16)
    squared.backward()
    assert weight.grad is not None
    assert weight.grad.item() == (6.0 if dtype is torch.bfloat16 else 10.0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit.script
def test_names_for_a_profiler_are_given_where_there_is_one() -> None:
    class Seen(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Seen.count += 1
            return func(*args, **(kwargs or {}))

    def named() -> None:
        with torch.autograd.profiler.record_function("named"):
            pass

    patches = unprofiled.install()
    try:
        with Seen():
            named()
        assert Seen.count == 0
        with torch.profiler.profile() as profile:
            named()
        assert "named" in [event.key for event in profile.key_averages()]
        scripted = torch.jit.script(_named)
        assert scripted(torch.ones(1)).item() == 2
    finally:
        patches.undo()
    with Seen():
        named()
    assert Seen.count == 2


def _named(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.profiler.record_function("named"):
        return x + 1


def test_looking_leaves_locals_that_the_script_holds() -> None:
    def script() -> tuple[dict[str, object], int]:
        total = torch.zeros(1)
        held = locals()
        carried.collect(sys._getframe())
        return held, id(total)

    held, total = script()
    assert id(held["total"]) == total


def test_looking_keeps_nothing_alive() -> None:
    def script() -> None:
        total = torch.zeros(1)
        carried.collect(sys._getframe())
        seen = weakref.ref(total)
        del total
        assert seen() is None

    script()
