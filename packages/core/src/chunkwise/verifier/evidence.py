"""Evidence: measured rows that a "slower" rule names. No performance number lives only in a comment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """Both sides of one measurement, from one run.

    Args:
        name: unique within the file.
        implementation, against: the full names of the two sides.
        gpu, capability, sm_count: the device that ran it.
        facts: sizes, dtypes and flags of the call.
        time_us, against_us: median times of the two sides in microseconds.
        versions: torch, triton, tilelang, CUDA, as far as they matter.
        date, commit: when, and at which commit of this repository.
    """

    name: str
    implementation: str
    against: str
    gpu: str
    capability: str
    sm_count: int
    facts: Mapping[str, Any]
    time_us: float
    against_us: float
    versions: Mapping[str, str]
    date: str
    commit: str

    def __str__(self) -> str:
        return (
            f"{self.time_us:g} us against {self.against_us:g} us of {self.against} "
            f"({self.gpu}, {self.date}, row {self.name})"
        )


def load(path: Path) -> dict[str, Row]:
    """Read an ``evidence.json``: a list of rows, every field required, names unique."""
    rows: dict[str, Row] = {}
    wanted = {f.name for f in fields(Row)}
    for entry in json.loads(path.read_text(encoding="utf-8")):
        if set(entry) != wanted:
            odd = sorted(set(entry) ^ wanted)
            name = entry.get("name", "?")
            raise ValueError(f"{path.name}: row {name} has missing or unknown fields: {odd}")
        if entry["name"] in rows:
            raise ValueError(f"{path.name}: two rows are called {entry['name']}")
        rows[entry["name"]] = Row(**entry)
    return rows
