"""The parity matrix: op, case, pair and format by device and dtype; error over budget, or a reason, in every cell."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROW = ("op", "case", "forward", "backward", "format")
COLUMN = ("device", "dtype")
NOT_RUN = "not run in this session"


@dataclass(frozen=True)
class Matrix:
    """All cells, by row and column. :meth:`cell` has an answer for every one of them."""

    rows: Sequence[tuple[str, ...]]
    columns: Sequence[tuple[str, ...]]
    entries: Mapping[tuple[tuple[str, ...], tuple[str, ...]], Mapping[str, Any]]

    def cell(self, row: tuple[str, ...], column: tuple[str, ...]) -> Mapping[str, Any]:
        """What was found, or why nothing was."""
        found = self.entries.get((row, column)) or self.entries.get((row, ("any", "any")))
        return found or {"reason": NOT_RUN}

    def text(self, row: tuple[str, ...], column: tuple[str, ...]) -> str:
        """A cell in a word or a number."""
        entry = self.cell(row, column)
        if entry.get("reason"):
            return str(entry["reason"])
        mark = "" if entry["over_budget"] <= 1.0 else " FAILED"
        return f"{entry['over_budget']:.2g} ({entry['quantity']}){mark}"

    @property
    def ok(self) -> bool:
        """Whether no measured cell is over budget and no test of a cell failed."""
        return not any(self.text(r, c).endswith(("FAILED", "failed")) for r in self.rows for c in self.columns)


def matrix(entries: Iterable[Mapping[str, Any]]) -> Matrix:
    """Arrange report entries; the last of two for one cell counts."""
    by_place = {(tuple(str(e[k]) for k in ROW), tuple(str(e[k]) for k in COLUMN)): e for e in entries}
    rows = sorted({row for row, _ in by_place})
    columns = sorted({column for _, column in by_place if column != ("any", "any")})
    return Matrix(rows, columns or [("any", "any")], by_place)


def to_json(table: Matrix) -> str:
    """Every cell with its place, missing ones with their reason."""
    cells = []
    for row in table.rows:
        for column in table.columns:
            place = {**dict(zip(ROW, row, strict=True)), **dict(zip(COLUMN, column, strict=True))}
            cells.append({**place, **{k: v for k, v in table.cell(row, column).items() if k not in place}})
    return json.dumps({"cells": cells}, indent=1) + "\n"


def to_markdown(table: Matrix) -> str:
    """One table for each op; a number is the worst error over its budget, with the output or gradient it is of."""
    lines = ["# Parity", "", "Worst error over budget (at most 1), and the output or gradient that it is of."]
    for op in sorted({row[0] for row in table.rows}):
        heads = ["case", "forward + backward", "residuals", *(" ".join(column) for column in table.columns)]
        lines += ["", f"## {op}", "", _line(heads), _line(["---"] * len(heads))]
        for row in table.rows:
            if row[0] == op:
                pair = row[2] if row[2] == row[3] else f"{row[2]} + {row[3]}"
                lines.append(_line([row[1], pair, row[4], *(table.text(row, column) for column in table.columns)]))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def write(entries: Iterable[Mapping[str, Any]], path: Path) -> tuple[Path, Path]:
    """Write the matrix as JSON and markdown beside each other; returns both paths."""
    table = matrix(entries)
    as_json, as_markdown = path.with_suffix(".json"), path.with_suffix(".md")
    as_json.write_text(to_json(table), encoding="utf-8")
    as_markdown.write_text(to_markdown(table), encoding="utf-8")
    return as_json, as_markdown
