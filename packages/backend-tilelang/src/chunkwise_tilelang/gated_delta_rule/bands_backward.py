"""In which order the backward takes the chunks of a dense call, and where it keeps what it knows of each.

The gradients of a chunk need its S and x, which are found forwards, and its dS' and dr, which are found backwards. Kept
for all chunks they are most of a call's memory. So the two directions meet in the middle of every place (a sequence,
or a segment of one): first each takes its own half and keeps it; then, piece by piece, each goes on into the other's
half, and the gradients of both pieces, which are known then, are taken at once. What they have taken is not needed any
more, so its slots take the next pieces, each up to twice as long as the one before::

    chunks     0  1  2  3  4  5  6  7 | 8  9 10 11 12 13 14 15
    replay     first step ----------->   1 | 2 - 2 | 3 ------> ...
    reverse    ... <----- 3 | 2 - 2 | 1   <---------- first step

Nothing is computed twice, and every product has the operands that it has when all chunks are taken at once: between two
steps the states are carried on in fp32.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Walk(NamedTuple):
    """What a direction takes of each place in a step: chunks from ``first`` on, to slots from ``at`` on."""

    first: int
    chunks: int
    at: int


class Band(NamedTuple):
    """Chunks of each place whose gradients are taken, ``size`` of a sequence; where their S, x and dS', dr begin."""

    size: int
    first: int
    chunks: int
    states_at: int
    d_states_at: int


class Step(NamedTuple):
    """One launch of the passes, and the bands that the gradients take behind it: with no chunks, there is none."""

    replay: Walk
    reverse: Walk
    bands: tuple[Band, Band]


class Plan(NamedTuple):
    """Steps over places of ``chunks`` chunks, or fewer in a sequence's last one, with ``width`` slots each."""

    chunks: int
    width: int
    steps: tuple[Step, ...]


_NONE = Band(0, 0, 0, 0, 0)


def _band(whole: int, chunks: int, first: int, count: int, states_at: int, d_states_at: int) -> Band:
    before = (whole - 1) // chunks  # places of a sequence but the last
    last = min(max(whole - before * chunks - first, 0), count)
    return Band(before * count + last, first, count, states_at, d_states_at)


def at_once(whole: int, chunks: int) -> Plan:
    """All chunks in one step, each in its own slot; sequences of ``whole`` chunks in places of ``chunks``."""
    walk = Walk(0, chunks, 0)
    return Plan(chunks, chunks, (Step(walk, walk, (_band(whole, chunks, 0, chunks, 0, 0), _NONE)),))


@lru_cache(maxsize=1024)
def plan(whole: int, chunks: int, piece: int) -> Plan:
    """The steps over sequences of ``whole`` chunks in places of ``chunks`` chunks.

    The first piece has ``piece`` of them, 0: all are taken at once. S and x of the first half lie in the slots of their
    place from 0 on, dS' and dr of the last half from ``piece`` on: what is free is at the end of the one and at the
    start of the other.
    """
    if not piece:
        return at_once(whole, chunks)
    half = -(-chunks // 2)  # with an odd number, replay's first half has the chunk in the middle
    steps = [Step(Walk(0, half, 0), Walk(half, chunks - half, piece), (_NONE, _NONE))]
    done = 0
    while done < half:
        count = min(piece + done, half - done)
        above, below = half + done, half - done - count
        ahead = min(count, chunks - above)
        replay, reverse = Walk(above, ahead, half - done), Walk(below, count, 0)
        of_replay = _band(whole, chunks, above, ahead, replay.at, piece + done)
        of_reverse = _band(whole, chunks, below, count, below, reverse.at)
        steps.append(Step(replay, reverse, (of_replay, of_reverse)))
        done += count
    return Plan(chunks, half + piece, tuple(steps))
