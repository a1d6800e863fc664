"""What a score holds: plain numbers and names, which JSON carries there and back."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from chunkwise_testing.scorer.gate import Check

SCHEMA = 1
BEST = "best of the peers"
"""Stands for a peer in summaries where there are several: the quickest of them in each row."""


@dataclass(frozen=True)
class Figure:
    """One side in one row.

    Args:
        side: its name.
        ms: the median of the repeats' medians, in milliseconds; None where ``reason`` says why.
        spread: largest less smallest repeat, over ``ms``.
        repeats_ms: the repeats.
        reason: why there is no figure.
    """

    side: str
    ms: float | None = None
    spread: float = 0.0
    repeats_ms: tuple[float, ...] = ()
    reason: str | None = None


@dataclass(frozen=True)
class Row:
    """One shape in one mode and one timing.

    Args:
        shape: name of the benchmark shape.
        sizes: axis name to size.
        mode: ``forward`` (no gradient) or ``forward+backward``.
        timing: ``events`` or ``clock`` (a call at a time, host work counts), or ``graph`` (a replay of a CUDA graph).
        route: our implementations, in words.
        sets: the number of input sets.
        input_bytes: of all sets together.
        calls: timed calls of each side in each repeat.
        figures: ours first.
        floor_ms: the physical floor; None where ``floor_reason`` says why.
        floor_reason: why there is none.
    """

    shape: str
    sizes: Mapping[str, int]
    mode: str
    timing: str
    route: str
    sets: int
    input_bytes: int
    calls: int
    figures: tuple[Figure, ...]
    floor_ms: float | None = None
    floor_reason: str | None = None

    @property
    def ours(self) -> Figure:
        """Our figure."""
        return self.figures[0]

    @property
    def over_floor(self) -> float | None:
        """Our time over the floor."""
        return self.ours.ms / self.floor_ms if self.ours.ms and self.floor_ms else None

    def ratio(self, peer: str) -> float | None:
        """The peer's time over ours; more than 1 where ours is quicker. None where either is missing."""
        if peer == BEST:
            found = [r for figure in self.figures[1:] if (r := self.ratio(figure.side)) is not None]
            return min(found, default=None)
        theirs = next((f.ms for f in self.figures[1:] if f.side == peer), None)
        return theirs / self.ours.ms if theirs and self.ours.ms else None


@dataclass(frozen=True)
class Summary:
    """All rows of a peer, a mode and a timing.

    Args:
        geomean: of the ratios peer/ours.
        worst, worst_shape: the smallest ratio and its shape.
        rows: how many have a ratio.
        left_out: how many have none.
    """

    peer: str
    mode: str
    timing: str
    geomean: float | None
    worst: float | None
    worst_shape: str
    rows: int
    left_out: int


@dataclass(frozen=True)
class Accuracy:
    """A side's outputs or gradients as a whole: reported, and nothing depends on it.

    Args:
        side: whose.
        quantity: output, or ``d_`` and the input.
        against: ``fp64`` (the recurrence) or ``chunkwise`` (ours).
        case: the shape.
        relative_l2: norm of the difference over the norm of ``against``'s; None where ``reason`` says why.
        reason: why there is none.
    """

    side: str
    quantity: str
    against: str
    case: str
    relative_l2: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Once:
    """Something measured once for a side.

    Args:
        side: whose.
        what: ``import``, ``first call`` or ``peak memory``.
        shape, mode: of the call; empty for an import.
        value: in ``unit``; None where ``reason`` says why.
        unit: ``s`` or ``bytes``.
        reason: why there is none.
    """

    side: str
    what: str
    shape: str
    mode: str
    value: float | None
    unit: str
    reason: str | None = None


@dataclass(frozen=True)
class Kernel:
    """A kernel, copy or fill that a side runs on the device in a call.

    Args:
        side: whose.
        shape, mode: of the call.
        name: as the device knows it; empty where ``reason`` says why nothing is known.
        us: its time in microseconds, all launches of a call together.
        launches: in a call.
        reason: why there are none.
    """

    side: str
    shape: str
    mode: str
    name: str = ""
    us: float = 0.0
    launches: float = 0.0
    reason: str | None = None


@dataclass(frozen=True)
class Score:
    """Everything that one run of the scorer found.

    Args:
        op: what was scored.
        plan: the dtypes, by the name of the plan.
        environment: device, versions, date, commit, caches: strings by name.
        rates: the measured copy and matmul rates by name, and how they were measured.
        parity: the gate's checks; none of them red.
        accuracy, once, rows, kernels: as measured.
    """

    op: str
    plan: str
    environment: Mapping[str, str]
    rates: Mapping[str, float | str]
    parity: tuple[Check, ...] = ()
    accuracy: tuple[Accuracy, ...] = ()
    once: tuple[Once, ...] = ()
    rows: tuple[Row, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    schema: int = field(default=SCHEMA)

    @property
    def peers(self) -> list[str]:
        """The peers' names, in the order of the command line."""
        return list(dict.fromkeys(figure.side for row in self.rows for figure in row.figures[1:]))

    @property
    def complete(self) -> bool:
        """Whether ours ran in every row; rows of a timing that the device does not have do not count."""
        asked = [row for row in self.rows if row.timing != "graph"]
        return bool(asked) and all(row.ours.ms is not None for row in asked)

    def summaries(self) -> list[Summary]:
        """One for each peer, mode and timing; with several peers also for the best of them in each row."""
        peers = [*self.peers, *([BEST] if len(self.peers) > 1 else [])]
        return [_summary(peer, mode, timing, rows) for peer in peers for mode, timing, rows in self._groups()]

    def _groups(self) -> Iterator[tuple[str, str, list[Row]]]:
        for mode, timing in dict.fromkeys((row.mode, row.timing) for row in self.rows):
            yield mode, timing, [row for row in self.rows if (row.mode, row.timing) == (mode, timing)]

    def over_floor(self) -> list[tuple[str, str, float]]:
        """Mode, timing and the geomean of our time over the floor, where there is a floor."""
        found = []
        for mode, timing, rows in self._groups():
            if values := [row.over_floor for row in rows if row.over_floor is not None]:
                found.append((mode, timing, statistics.geometric_mean(values)))
        return found

    def to_json(self) -> str:
        """The score with its summaries, as text."""
        return json.dumps({**asdict(self), "summaries": [asdict(s) for s in self.summaries()]}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Score:
        """Read what :meth:`to_json` wrote. Raises ValueError for another schema."""
        given = json.loads(text)
        if given.get("schema") != SCHEMA:
            raise ValueError(f"a score of schema {given.get('schema')}, but {SCHEMA} is expected; score again")
        given.pop("summaries", None)
        lists: dict[str, type[Any]] = {"parity": Check, "accuracy": Accuracy, "once": Once, "kernels": Kernel}
        for name, kind in lists.items():
            given[name] = tuple(kind(**entry) for entry in given.get(name, ()))
        given["rows"] = tuple(_row(entry) for entry in given["rows"])
        return cls(**given)


def _row(entry: Mapping[str, Any]) -> Row:
    figures = tuple(Figure(**{**figure, "repeats_ms": tuple(figure["repeats_ms"])}) for figure in entry["figures"])
    return Row(**{**entry, "figures": figures})


def _summary(peer: str, mode: str, timing: str, rows: Sequence[Row]) -> Summary:
    ratios = [(ratio, row.shape) for row in rows if (ratio := row.ratio(peer)) is not None]
    if not ratios:
        return Summary(peer, mode, timing, None, None, "", 0, len(rows))
    worst, shape = min(ratios)
    geomean = statistics.geometric_mean([ratio for ratio, _ in ratios])
    return Summary(peer, mode, timing, geomean, worst, shape, len(ratios), len(rows) - len(ratios))
