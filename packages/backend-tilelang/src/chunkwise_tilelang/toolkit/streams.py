"""Two kinds of kernels of one call side by side."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


@cache
def _ahead_of(index: int) -> torch.cuda.Stream:
    # Its blocks come before those of the call's own stream, which has the lowest priority unless its user gave it one.
    return torch.cuda.Stream(index, priority=-1)


def pipeline(index: int, turns: int, rooms: int, ahead: Callable[[int], None], behind: Callable[[int], None]) -> None:
    """Launch ``ahead(turn)`` and then ``behind(turn)`` for all turns, on a device and in the order of its stream.

    ``ahead(turn)`` uses what all turns before left, and room that ``behind(turn - rooms)`` gives back. With more than
    one room it is launched on a stream of its own, so that it may run beside what is behind it. Afterwards both have a
    place in the current stream's order, as if all had been launched there; tensors need no more care than that.
    """
    if rooms == 1 or turns == 1:
        for turn in range(turns):
            ahead(turn)
            behind(turn)
        return
    here, other = torch.cuda.current_stream(index), _ahead_of(index)
    other.wait_stream(here)
    known: list[torch.cuda.Event] = []
    freed: list[torch.cuda.Event] = []
    for turn in range(turns + 1):
        if turn < turns:
            if turn >= rooms:
                other.wait_event(freed[turn - rooms])
            with torch.cuda.stream(other):
                ahead(turn)
            known.append(other.record_event())
        if turn:
            here.wait_event(known[turn - 1])
            behind(turn - 1)
            freed.append(here.record_event())
