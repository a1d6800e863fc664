"""Schedules of GLA: tiles, warps and stages by device and widths. Imports no kernel language."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from chunkwise.verifier.facts import Facts
from chunkwise.verifier.refusal import DoesNotFit
from chunkwise_triton.common import schedules
from chunkwise_triton.common.schedules import ALL, CHUNK, Tile, Tiles, choose, tiles


@dataclass(frozen=True, eq=False)
class Split(schedules.Schedule):
    """The launch configuration of the kernels that pass states through memory; equal ones are one object.

    Args:
        gates, scan, output, scan_backward, gradient: the kernels' tiles.
    """

    gates: Tile
    scan: Tile
    output: Tile
    scan_backward: Tile
    gradient: Tile


_GATES = tiles((64, 64, 4, 1), (32, 32, 4, 1))
_SMALL_SCANS = tuple(Tile(ALL, 32, rows, 4, 1) for rows in (64, 32, 16))
# Few states: narrow tiles make more programs. Many: wide ones read keys or queries, and gates, less often.
_SCAN_FEW = (*tiles((ALL, 32, 4, 2)), *_SMALL_SCANS)
_SCAN_MANY = (*tiles((ALL, 64, 4, 2), (ALL, 64, 4, 1)), *_SCAN_FEW)
_OUTPUT = tiles((64, 128, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1))
_GRADIENT = tiles((64, 64, 4, 1), (32, 32, 4, 1))


def _gates(t: Tile) -> int:
    return 2 * CHUNK * t.block_k


def _scan(t: Tile) -> int:
    return t.stages * t.rows * (3 * t.block_k + t.block_v) + 2 * t.rows * t.block_v


def _output(t: Tile) -> int:
    return 4 * CHUNK * t.block_k + (CHUNK + t.block_k) * t.block_v + CHUNK * CHUNK


def _gradient(t: Tile) -> int:
    return t.stages * 2 * (CHUNK + t.block_k) * t.block_v + 4 * CHUNK * t.block_k + 3 * CHUNK * CHUNK


KERNELS = {
    "gates": Tiles(_GATES, _GATES, _gates),
    "scan": Tiles(_SCAN_FEW, _SCAN_MANY, _scan, scans=True, paired=True),
    "output": Tiles(_OUTPUT, _OUTPUT, _output),
    "scan_backward": Tiles(_SCAN_FEW, _SCAN_MANY, _scan, scans=True, paired=True),
    "gradient": Tiles(_GRADIENT, _GRADIENT, _gradient),
}
"""The tiles of each kernel."""


def split(facts: Facts) -> Split | DoesNotFit:
    """The first tile of every list that fits the device."""
    dot = facts.dtype("v") or "fp32"
    chosen = choose(KERNELS, facts, dot, "H")
    return chosen if isinstance(chosen, DoesNotFit) else _split(dot, *chosen)


@functools.cache
def _split(dot: str, *chosen: Tile) -> Split:
    return Split(CHUNK, dot, *chosen)
