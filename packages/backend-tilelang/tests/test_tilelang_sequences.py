"""Where chunks and segments lie, by the arithmetic of the kernels: compiled for the CPU and run there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor

from chunkwise.autograd.residuals import ENTRY_CHUNKS

pytestmark = pytest.mark.compiler

CHUNK = 64
Places = Callable[[tuple[int, ...] | None, int, int, int], tuple[Tensor, Tensor, Tensor]]
OFFSETS = [
    (0, 0), (0, 0, 0), (0, 1), (0, 64), (0, 65, 65, 66), (0, 0, 63, 64, 65, 300, 300, 801, 960),
    (0, 128, 256, 256, 640), (0, 1, 2, 3, 4, 5), (0, 0, 0, 0, 700),
]  # fmt: skip


@pytest.fixture(scope="module")
def places(samples: ModuleType) -> Places:
    import tilelang

    kernels = {
        ragged: tilelang.compile(samples.places(ragged, CHUNK), target="c", execution_backend="cython")
        for ragged in (False, True)
    }

    def run(offsets: tuple[int, ...] | None, batch: int, rows: int, chunks: int) -> tuple[Tensor, Tensor, Tensor]:
        """What each slot of a chunk, each slot of a segment and each sequence is told."""
        ragged = offsets is not None
        sequences = len(offsets) - 1 if offsets is not None else batch
        counts = [
            rows // width + sequences if ragged else batch * -(-rows // width) for width in (CHUNK, chunks * CHUNK)
        ]
        shapes = zip((*counts, sequences), (6, 5, 2), strict=True)
        found = [torch.full(shape, -7, dtype=torch.int32) for shape in shapes]
        where = torch.tensor(offsets or (0, 0), dtype=torch.int32)
        kernels[ragged](where, *found, sequences.bit_length(), rows, chunks)
        return found[0], found[1], found[2]

    return run


def check(places: Places, offsets: tuple[int, ...] | None, batch: int, rows: int, chunks: int) -> None:
    """Every row is in one chunk and one segment; segments start where the chunk that they name starts."""
    by_chunk, by_segment, by_sequence = places(offsets, batch, rows, chunks)
    spans = list(pairwise(offsets)) if offsets is not None else [(0, rows)] * batch
    taken = set()
    for n, (begin, end) in enumerate(spans):
        slot, count = by_sequence[n].tolist()
        assert count == max(1, -(-(end - begin) // (chunks * CHUNK)))
        at = begin
        for i in range(count):
            taken.add(slot + i)
            owner, first, length, chunk, ends = by_segment[slot + i].tolist()
            assert (owner, first, ends) == (n, at, int(i == count - 1))
            assert length == min(end - at, chunks * CHUNK)
            for step in range(-(-length // CHUNK)):
                row = 0 if offsets is not None else n
                part = min(CHUNK, end - at - step * CHUNK)
                opens, closes = at + step * CHUNK == begin, at + step * CHUNK + part == end
                assert by_chunk[chunk + step].tolist() == [row, at + step * CHUNK, part, n, opens, closes]
            at += length
        assert at == end
    for slot in set(range(len(by_segment))) - taken:
        assert by_segment[slot, 2] == 0
        assert by_segment[slot, 4] == -1
    assert (by_chunk[:, 2] >= 0).all()
    assert by_chunk[:, 2].sum() == sum(end - begin for begin, end in spans)


@pytest.mark.parametrize("chunks", [1, 2, 3, 100])
@pytest.mark.parametrize("offsets", OFFSETS, ids=lambda o: "_".join(map(str, o)))
def test_ragged(places: Places, offsets: tuple[int, ...], chunks: int) -> None:
    check(places, offsets, 1, offsets[-1], chunks)
    check(places, offsets, 1, offsets[-1] + 130, chunks)  # rows of padding


@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 64, 65, 1000])
def test_dense(places: Places, rows: int, chunks: int) -> None:
    check(places, None, 3, rows, chunks)


def test_random_offsets(places: Places) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        count, rows = (int(torch.randint(1, most, (), generator=generator)) for most in (12, 1500))
        cuts = torch.randint(0, rows + 1, (count,), generator=generator).sort().values.tolist()
        check(places, (0, *cuts), 1, rows, int(torch.randint(1, 6, (), generator=generator)))


@pytest.mark.parametrize("chunks", [7, 16, 32, 33, 64, 1000])
@pytest.mark.parametrize("offsets", [None, (0, 100, 2148, 2148, 4197, 8397), (0, 2048, 4097, 6145, 6200, 10296)])
def test_cuts(samples: ModuleType, offsets: tuple[int, ...] | None, chunks: int) -> None:
    """Each is left once, by the block that has the chunk behind it, at the slot that the residual format names."""
    import tilelang

    ragged = offsets is not None
    kernel = tilelang.compile(samples.cuts(ragged, CHUNK), target="c", execution_backend="cython")
    batch, rows = (1, offsets[-1]) if offsets is not None else (3, 4200)
    spans = list(pairwise(offsets)) if offsets is not None else [(0, rows)] * batch
    sequences, width, apart = len(spans), chunks * CHUNK, ENTRY_CHUNKS * CHUNK
    count = (rows - 1) // apart
    segments = rows // width + sequences if ragged else batch * -(-rows // width)
    found = torch.full((segments, 4), -7, dtype=torch.int32)
    where = torch.tensor(offsets or (0, 0), dtype=torch.int32)

    def left() -> list[tuple[int, int]]:
        kernel(where, found, sequences.bit_length(), rows, chunks, count)
        listed = []
        for start, length, turn, slot in found.tolist():
            turns = range(turn, -(-length // CHUNK), ENTRY_CHUNKS) if turn >= 0 else ()
            listed += [(start + i * CHUNK, slot + j) for j, i in enumerate(turns)]
        return sorted(listed)

    wanted = [
        (row, (0 if ragged else n) * count + row // apart - 1)
        for n, (begin, end) in enumerate(spans)
        for row in range(begin + apart, end, apart)
    ]
    assert left() == sorted(wanted)
    assert len({slot for _, slot in wanted}) == len(wanted)
    count = 0
    assert left() == []
