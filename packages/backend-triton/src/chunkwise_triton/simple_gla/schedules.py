"""Schedules of simple GLA: tiles, warps and stages by device and widths. Imports no kernel language."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from chunkwise.verifier.facts import Facts
from chunkwise.verifier.refusal import DoesNotFit
from chunkwise_triton.common import schedules
from chunkwise_triton.common.schedules import (
    ALL,
    CHUNK,
    SCAN_FEW,
    SCAN_MANY,
    Tile,
    Tiles,
    choose,
    output_elements,
    scan_elements,
    tiles,
)


@dataclass(frozen=True, eq=False)
class Split(schedules.Schedule):
    """The launch configuration of the kernels that pass states through memory; equal ones are one object.

    Args:
        scan, output, scan_backward, gradient: the kernels' tiles.
    """

    scan: Tile
    output: Tile
    scan_backward: Tile
    gradient: Tile


@dataclass(frozen=True, eq=False)
class Fused(schedules.Schedule):
    """The launch configuration of the forward in one pass; equal ones are one object.

    Args:
        fused: the kernel's tile.
    """

    fused: Tile


_OUTPUT = tiles((128, 64, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1))
_GRADIENT = tiles((64, 64, 4, 2), (64, 64, 4, 1), (32, 32, 4, 1))
FUSED_COLUMNS = 64
_FUSED = tiles((ALL, FUSED_COLUMNS, 4, 2), (ALL, FUSED_COLUMNS, 4, 1))


def _gradient(t: Tile) -> int:
    return t.stages * 2 * (CHUNK + t.block_k) * t.block_v + 2 * CHUNK * t.block_k + 3 * CHUNK * CHUNK


def _fused(t: Tile) -> int:
    return t.stages * CHUNK * (2 * t.block_k + t.block_v) + (t.block_k + CHUNK) * t.block_v


SPLIT_KERNELS = {
    "scan": Tiles(SCAN_FEW, SCAN_MANY, scan_elements, scans=True, paired=True),
    "output": Tiles(_OUTPUT, _OUTPUT, output_elements),
    "scan_backward": Tiles(SCAN_FEW, SCAN_MANY, scan_elements, scans=True, paired=True),
    "gradient": Tiles(_GRADIENT, _GRADIENT, _gradient),
}
FUSED_KERNELS = {"fused": Tiles(_FUSED, _FUSED, _fused, scans=True, paired=True)}
"""The tiles of each kernel."""


def split(facts: Facts) -> Split | DoesNotFit:
    """The first tile of every list that fits the device."""
    dot = facts.dtype("v") or "fp32"
    chosen = choose(SPLIT_KERNELS, facts, dot, "H")
    return chosen if isinstance(chosen, DoesNotFit) else _split(dot, schedules.asynchronous(facts), *chosen)


def fused(facts: Facts) -> Fused | DoesNotFit:
    """The first tile that fits the device."""
    dot = facts.dtype("v") or "fp32"
    chosen = choose(FUSED_KERNELS, facts, dot, "H")
    return chosen if isinstance(chosen, DoesNotFit) else _fused_of(dot, schedules.asynchronous(facts), *chosen)


@functools.cache
def _split(dot: str, is_asynchronous: bool, *chosen: Tile) -> Split:
    return Split(CHUNK, dot, is_asynchronous, *chosen)


@functools.cache
def _fused_of(dot: str, is_asynchronous: bool, *chosen: Tile) -> Fused:
    return Fused(CHUNK, dot, is_asynchronous, *chosen)
