"""In which order the backward takes the chunks of a dense call, and where it keeps what it knows of each.

The gradients of a chunk need its S and x, which are found forwards, and its dS' and dr, which are found backwards. Kept
for all chunks they are most of a call's memory. But the forward leaves the state before every 32nd chunk, so that each
place (a sequence, or a segment of one) can be taken in bands, the last one first: the passes replay the states of a
band from what the forward left, and carry the gradient of the state on from the band behind it; then the gradients take
the band, and its slots serve another one.

With one room for all bands that is the next one. With two it is the next but one: then the passes of a band run beside
the gradients of the band behind it, where they leave multiprocessors free::

    chunks      0 .. 31 | 32 .. 63 | 64 .. 95 | 96 .. 127
    room             1  |      0   |      1   |      0
    first                                       passes
    then                             passes     gradients
    then                  passes     gradients
    then        passes    gradients
    last        gradients
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from chunkwise.autograd.residuals import ENTRY_CHUNKS

# A band that is a larger part of its place saves too little to start kernels twice.
_WORTH = 0.75

# The longest band over an equal part, where places are few times as long as what lies between two states.
_UNEQUAL = 1.25


class Band(NamedTuple):
    """Chunks of each place, from ``first`` on, to slots from ``at`` on; ``size`` of a sequence altogether."""

    first: int
    chunks: int
    at: int
    size: int


class Plan(NamedTuple):
    """Bands of places of ``chunks`` chunks, or fewer in a sequence's last one, with ``width`` slots each."""

    chunks: int
    width: int
    rooms: int
    bands: tuple[Band, ...]


def at_once(whole: int, chunks: int) -> Plan:
    """All chunks in one band, each in its own slot; sequences of ``whole`` chunks in places of ``chunks``."""
    return Plan(chunks, chunks, 1, (_band(whole, chunks, 0, chunks, 0),))


def _band(whole: int, chunks: int, first: int, count: int, at: int) -> Band:
    before = (whole - 1) // chunks  # places of a sequence but the last
    last = min(max(whole - before * chunks - first, 0), count)
    return Band(first, count, at, before * count + last)


@lru_cache(maxsize=1024)
def plan(whole: int, chunks: int, bands: int, rooms: int) -> Plan:
    """About ``bands`` bands, as equal as can be, over sequences of ``whole`` chunks in places of ``chunks`` chunks.

    A band begins where the forward left a state. So there is but one where a place is short, or where places but the
    first of a sequence begin elsewhere. There is one more than was asked for where the longest would be too long.
    """
    if bands == 1 or (whole > chunks and chunks % ENTRY_CHUNKS):
        return at_once(whole, chunks)
    firsts = _cut(chunks, bands)
    if _longest(firsts, chunks) * bands > chunks * _UNEQUAL:
        firsts = _cut(chunks, bands + 1)
    width = _longest(firsts, chunks)
    if width > chunks * _WORTH:
        return at_once(whole, chunks)
    ends = (*firsts[1:], chunks)
    turns = enumerate(zip(firsts[::-1], ends[::-1], strict=True))
    found = tuple(_band(whole, chunks, first, end - first, turn % rooms * width) for turn, (first, end) in turns)
    return Plan(chunks, min(rooms, len(found)) * width, rooms, found)


def _cut(chunks: int, bands: int) -> tuple[int, ...]:
    """Where each band begins: what is nearest to equal parts."""
    parts = (round(part * chunks / (bands * ENTRY_CHUNKS)) * ENTRY_CHUNKS for part in range(bands))
    return tuple(sorted({first for first in parts if first < chunks}))


def _longest(firsts: tuple[int, ...], chunks: int) -> int:
    return max(end - first for first, end in zip(firsts, (*firsts[1:], chunks), strict=True))
