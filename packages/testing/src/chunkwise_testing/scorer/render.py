"""A score as text: where it was measured, what was checked, a table of all rows, the summaries, the reasons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from chunkwise_testing.scorer.results import Figure, Once, Row, Score, Summary

NONE = "-"
_NAME_WIDTH = 60  # templates of C++ have names of hundreds


def render(score: Score) -> str:
    """The whole report; every figure that is missing has its reason below the tables."""
    notes = _Notes()
    parts = [
        _head(score),
        _parity(score),
        _table("First calls, s", *_once(score, ("import", "first call"), notes)),
        _table("Accuracy, relative L2", *_accuracy(score, notes)),
        _table("Peak memory over the inputs, MiB", *_once(score, ("peak memory",), notes)),
        _table("Kernels, us a call", *_kernels(score, notes)),
        _table("Times, ms (spread of the repeats); ratio: the peer's time over ours", *_times(score, notes)),
        _table("Summary", *_summary(score)),
        notes.text(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


class _Notes:
    """Reasons, numbered in the order in which they first appear."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, reason: str | None) -> str:
        """What stands in the table for a reason."""
        return NONE if reason is None else f"[{self._numbers.setdefault(reason, len(self._numbers) + 1)}]"

    def text(self) -> str:
        """The reasons under their numbers."""
        return "\n".join(f"[{number}] {reason}" for reason, number in self._numbers.items())


def _head(score: Score) -> str:
    lines = [f"{score.op}, {score.plan}", *(f"  {name}: {value}" for name, value in score.environment.items())]
    copy, matmul = float(score.rates["copy_bytes_per_s"]), float(score.rates["matmul_flops"])
    lines.append(f"  measured rates: {copy / 1e9:.1f} GB/s, {matmul / 1e12:.3g} TFLOP/s ({score.rates['how']})")
    lines += [f"  route: {route}" for route in dict.fromkeys(f"{row.route} in {row.mode}" for row in score.rows)]
    return "\n".join(lines)


def _parity(score: Score) -> str:
    measured = [check.over_budget for check in score.parity if check.over_budget is not None]
    refused = len(score.parity) - len(measured)
    text = f"Parity: {len(measured)} cases within budget, the worst at {max(measured, default=0.0):.2g} of it"
    return text + (f"; {refused} refused by their implementation" if refused else "")


Cells = tuple[Sequence[str], list[list[str]]]


def _once(score: Score, kinds: Sequence[str], notes: _Notes) -> Cells:
    """One line for each measurement, one column for each side."""
    entries = [entry for entry in score.once if entry.what in kinds]
    sides = list(dict.fromkeys(entry.side for entry in entries))
    places = dict.fromkeys((entry.what, entry.shape, entry.mode) for entry in entries)
    lines = []
    for place in places:
        found = {e.side: e for e in entries if (e.what, e.shape, e.mode) == place}
        lines.append([*(part or NONE for part in place), *(_once_text(found.get(side), notes) for side in sides)])
    return ["what", "shape", "mode", *sides], lines


def _once_text(entry: Once | None, notes: _Notes) -> str:
    if entry is None or entry.value is None:
        return notes.mark(entry.reason if entry else None)
    return f"{entry.value / 2**20:.1f}" if entry.unit == "bytes" else f"{entry.value:.3f}"


def _accuracy(score: Score, notes: _Notes) -> Cells:
    """One line for each side and what it is held against, one column for each output and gradient."""
    quantities = list(dict.fromkeys(row.quantity for row in score.accuracy if row.quantity))
    lines = []
    for place in dict.fromkeys((row.side, row.against, row.case) for row in score.accuracy):
        found = {row.quantity: row for row in score.accuracy if (row.side, row.against, row.case) == place}
        cells = []
        for quantity in quantities:
            row = found.get(quantity) or found.get("")
            value = row.relative_l2 if row else None
            cells.append(f"{value:.2e}" if value is not None else notes.mark(row.reason if row else None))
        lines.append([*place, *(cells or [notes.mark(found[""].reason)])])
    return ["side", "against", "shape", *(quantities or ["all"])], lines


def _kernels(score: Score, notes: _Notes) -> Cells:
    """One line for each kernel of a side's call, with its share of them all."""
    lines = []
    for kernel in score.kernels:
        call = [kernel.shape, kernel.mode, kernel.side]
        if kernel.reason is not None:
            lines.append([*call, notes.mark(kernel.reason), NONE, NONE, NONE])
            continue
        whole = sum(k.us for k in score.kernels if [k.shape, k.mode, k.side] == call)
        share = f"{kernel.us / whole * 100:.0f}%"
        lines.append([*call, kernel.name[:_NAME_WIDTH], f"{kernel.launches:g}", f"{kernel.us:.1f}", share])
    return ["shape", "mode", "side", "kernel", "launches", "us", "share"], lines


def _times(score: Score, notes: _Notes) -> Cells:
    heads = ["shape", "mode", "timing", "chunkwise", *(h for peer in score.peers for h in (peer, "ratio"))]
    lines = []
    for row in score.rows:
        line = [row.shape, row.mode, row.timing, _time(row.ours, notes)]
        for figure in row.figures[1:]:
            line += [_time(figure, notes), _ratio(row.ratio(figure.side))]
        floor = f"{row.floor_ms:.4f}" if row.floor_ms is not None else notes.mark(row.floor_reason)
        lines.append([*line, floor, _ratio(row.over_floor), _inputs(row)])
    return [*heads, "floor", "x floor", "inputs"], lines


def _time(figure: Figure, notes: _Notes) -> str:
    return notes.mark(figure.reason) if figure.ms is None else f"{figure.ms:.4f} ({figure.spread * 100:.0f}%)"


def _ratio(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"


def _inputs(row: Row) -> str:
    return f"{row.sets} x {row.input_bytes / row.sets / 2**20:.1f} MiB"


def _summary(score: Score) -> Cells:
    heads = ["against", "mode", "timing", "geomean", "worst", "in", "shapes", "left out"]
    lines = [_summary_line(summary) for summary in score.summaries()]
    for mode, timing, over in score.over_floor():
        rows = sum(1 for r in score.rows if (r.mode, r.timing) == (mode, timing) and r.over_floor is not None)
        lines.append(["the floor (our time over it)", mode, timing, _ratio(over), NONE, NONE, str(rows), NONE])
    return heads, lines


def _summary_line(summary: Summary) -> list[str]:
    counts = [str(summary.rows), str(summary.left_out)]
    ratios = [_ratio(summary.geomean), _ratio(summary.worst), summary.worst_shape or NONE]
    return [summary.peer, summary.mode, summary.timing, *ratios, *counts]


def _table(title: str, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    if not lines:
        return ""
    widths = [max(len(line[i]) for line in (heads, *lines)) for i in range(len(heads))]
    return "\n".join([title, *_aligned(widths, heads, lines)])


def _aligned(widths: Sequence[int], heads: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    for line in (heads, *lines):
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
