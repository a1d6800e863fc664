"""Schedules of GLA: tiles, warps and stages by device and widths. Imports no kernel language."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from chunkwise.verifier.facts import Facts
from chunkwise.verifier.refusal import DoesNotFit
from chunkwise_triton.common import schedules
from chunkwise_triton.common.schedules import CHUNK, SCAN_FEW, SCAN_MANY, Tile, Tiles, choose, scan_elements, tiles


@dataclass(frozen=True, eq=False)
class Split(schedules.Schedule):
    """The launch configuration of the kernels that pass states through memory; equal ones are one object.

    Args:
        decay, scan, steep_pairs, output, scan_backward, value_gradient, gradient, steep_gradient: the kernels' tiles.
    """

    decay: Tile
    scan: Tile
    steep_pairs: Tile
    output: Tile
    scan_backward: Tile
    value_gradient: Tile
    gradient: Tile
    steep_gradient: Tile


_SMALL = tiles((64, 64, 4, 1), (32, 32, 4, 1))
_OUTPUT = (*tiles((64, 128, 4, 2), (64, 128, 4, 1)), *_SMALL)
_GRADIENT = (*tiles((64, 64, 4, 2)), *_SMALL)


def _square(t: Tile) -> int:
    return 2 * CHUNK * t.block_k


def _pairs(t: Tile) -> int:
    return 3 * CHUNK * t.block_k + 2 * CHUNK * CHUNK


def _output(t: Tile) -> int:
    return t.stages * (2 * CHUNK + t.block_v) * t.block_k + CHUNK * (t.block_v + CHUNK) + 2 * CHUNK * t.block_k


def _gradient(t: Tile) -> int:
    return t.stages * 2 * (CHUNK + t.block_k) * t.block_v + 4 * CHUNK * t.block_k + 2 * CHUNK * CHUNK


KERNELS = {
    "decay": Tiles(_SMALL, _SMALL, _square),
    "scan": Tiles(SCAN_FEW, SCAN_MANY, scan_elements, scans=True, paired=True),
    "steep_pairs": Tiles(_SMALL, _SMALL, _pairs),
    "output": Tiles(_OUTPUT, _OUTPUT, _output),
    "scan_backward": Tiles(SCAN_FEW, SCAN_MANY, scan_elements, scans=True, paired=True),
    "value_gradient": Tiles(_OUTPUT, _OUTPUT, _output),
    "gradient": Tiles(_GRADIENT, _GRADIENT, _gradient),
    "steep_gradient": Tiles(_SMALL, _SMALL, _gradient),
}
"""The tiles of each kernel."""


# Where the matrix instruction reads memory, a wide tile costs no registers: three programs share a multiprocessor.
_WIDE = Tiles((*tiles((128, 128, 4, 1)), *_OUTPUT), (*tiles((128, 128, 4, 1)), *_OUTPUT), _output)
HOPPER_KERNELS = {**KERNELS, "output": _WIDE, "value_gradient": _WIDE}


def split(facts: Facts) -> Split | DoesNotFit:
    """The first tile of every list that fits the device."""
    dot = facts.dtype("v") or "fp32"
    kernels = HOPPER_KERNELS if facts.device.arch == "sm90" and dot != "fp32" else KERNELS
    chosen = choose(kernels, facts, dot, "H")
    return chosen if isinstance(chosen, DoesNotFit) else _split(dot, schedules.asynchronous(facts), *chosen)


@functools.cache
def _split(dot: str, is_asynchronous: bool, *chosen: Tile) -> Split:
    return Split(CHUNK, dot, is_asynchronous, *chosen)
