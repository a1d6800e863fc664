"""Merge the parity reports of several machines (`pytest --parity-report FILE`) into one matrix in markdown.

Where two reports have the same cell, a failure wins over a pass, a worse error over a better one, a measurement over
a reason, and any reason over "not run".
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Cell = Mapping[str, Any]


def read(path: Path) -> list[Cell]:
    """The cells of one report. Raises ValueError where the file is none."""
    from chunkwise_testing import report

    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no parity report: {type(error).__name__}: {error}") from error
    for cell in cells:
        if missing := [key for key in (*report.ROW, *report.COLUMN) if key not in cell]:
            raise ValueError(f"{path} is no parity report: a cell lacks {', '.join(missing)}")
    return list(cells)


def weight(cell: Cell) -> tuple[int, float]:
    """How much a cell has to say; the heaviest of two for one place is kept."""
    from chunkwise_testing import report

    reason = cell.get("reason")
    if not reason:
        return 2, float(cell["over_budget"])
    if reason == report.NOT_RUN:
        return 0, 0.0
    return (3, 0.0) if str(reason).endswith("failed") else (1, 0.0)


def merge(reports: Iterable[Iterable[Cell]]) -> list[Cell]:
    """One cell for each place."""
    from chunkwise_testing import report

    kept: dict[tuple[str, ...], Cell] = {}
    for cells in reports:
        for cell in cells:
            place = tuple(str(cell[key]) for key in (*report.ROW, *report.COLUMN))
            if place not in kept or weight(cell) > weight(kept[place]):
                kept[place] = cell
    return list(kept.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Merge and write; 1 if a cell failed, 2 if a file is no report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, help="the JSON files")
    parser.add_argument("--output", type=Path, help="the markdown file; default: standard output")
    args = parser.parse_args(argv)
    from chunkwise_testing import report

    try:
        table = report.matrix(merge(read(path) for path in args.reports))
    except ValueError as error:
        print(f"parity_matrix: {error}", file=sys.stderr)
        return 2
    text = report.to_markdown(table)
    if args.output is None:
        sys.stdout.write(text)
    else:
        args.output.write_text(text, encoding="utf-8")
    return 0 if table.ok else 1


if __name__ == "__main__":
    sys.exit(main())
