"""Interleaved timing: who runs when on which inputs, how many times, and what is kept of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Run = Callable[[], object]
"""One call of one side on one input set."""

REPEATS = 3
WARM_UPS = 3
SECONDS_A_REPEAT = 0.25
FEWEST, MOST = 5, 200
"""Calls of each side in a repeat, where the time for a repeat does not say otherwise."""


class Timer(Protocol):
    """Times single calls; reading may be put off to the end, so that a device is never waited for in between."""

    def mark(self) -> Any:
        """A point in time."""

    def read_ms(self, spans: Sequence[tuple[Any, Any]]) -> list[float]:
        """The milliseconds between the marks of each pair."""


@dataclass(frozen=True)
class Reading:
    """What was timed of one side.

    Args:
        repeats_ms: the median of each repeat's calls, in milliseconds.
        calls: how many calls each repeat timed.
    """

    repeats_ms: tuple[float, ...]
    calls: int

    @property
    def ms(self) -> float:
        """The figure: the median of the repeats."""
        return statistics.median(self.repeats_ms)

    @property
    def spread(self) -> float:
        """The largest less the smallest repeat, over the figure."""
        return (max(self.repeats_ms) - min(self.repeats_ms)) / self.ms if self.ms else 0.0


def rounds_of_a_period(sides: int, sets: int) -> int:
    """After so many rounds every side has run on every input set equally often, and in every place of a round."""
    return sides * sets // math.gcd(sides, sets)


def turns(sides: int, sets: int, rounds: int) -> Iterator[tuple[int, int]]:
    """Pairs of (side, input set), one a call; each round has every side once.

    The sets come strictly in turn, whoever runs: no side finds in the cache what the one before it has just read. The
    sides change places when they have seen all sets that their place in a round gives them.
    """
    stay = sets // math.gcd(sides, sets)
    for turn in range(rounds):
        for place in range(sides):
            yield (place + turn // stay) % sides, (turn * sides + place) % sets


def rounds_for(round_ms: float, sides: int, sets: int, seconds: float = SECONDS_A_REPEAT) -> int:
    """How many rounds fill a repeat: whole periods, so that no side gets the easier inputs."""
    period = rounds_of_a_period(sides, sets)
    wanted = min(MOST, max(FEWEST, int(seconds * 1e3 / max(round_ms, 1e-6))))
    return period * math.ceil(wanted / period)


def time_sides(
    runs: Mapping[str, Sequence[Run]], timer: Timer, *, repeats: int = REPEATS, calls: int | None = None
) -> dict[str, Reading]:
    """Time all sides in turn.

    Args:
        runs: side name to its call on each input set; as many for every side. Each must have run before, so that
            nothing is compiled now; a few calls more warm the clocks of the device.
        timer: times one call.
        repeats: how many medians are taken.
        calls: of each side in a repeat, rounded up to whole periods; by default what fills a quarter of a second.
    """
    names = list(runs)
    sets = len(runs[names[0]])
    warm_ms = timer.read_ms([_timed(runs[name][0], timer) for name in names for _ in range(WARM_UPS)])
    if calls is None:
        rounds = rounds_for(sum(warm_ms) / WARM_UPS, len(names), sets)
    else:
        period = rounds_of_a_period(len(names), sets)
        rounds = period * math.ceil(calls / period)
    medians: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        order = list(turns(len(names), sets, rounds))
        times = timer.read_ms([_timed(runs[names[side]][chosen], timer) for side, chosen in order])
        for position, name in enumerate(names):
            own = [ms for (side, _), ms in zip(order, times, strict=True) if side == position]
            medians[name].append(statistics.median(own))
    return {name: Reading(tuple(found), rounds) for name, found in medians.items()}


def _timed(run: Run, timer: Timer) -> tuple[Any, Any]:
    start = timer.mark()
    run()
    return start, timer.mark()
