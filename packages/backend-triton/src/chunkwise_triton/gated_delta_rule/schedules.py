"""Schedules of the gated delta rule: tiles, warps and stages by device and widths. Imports no kernel language.

The order of the tiles was measured on an H200 at K = V = 128 in bf16.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from chunkwise.verifier.facts import Facts
from chunkwise.verifier.refusal import DoesNotFit
from chunkwise_triton.common import schedules
from chunkwise_triton.common.schedules import ALL, CHUNK, Tile, Tiles, choose, output_elements, tiles


@dataclass(frozen=True, eq=False)
class Schedule(schedules.Schedule):
    """The launch configuration of all kernels of one call; equal ones are one object (:func:`schedule`).

    Args:
        inverse_dot: dtype of the operands of the inverse's products.
        wy, scan, output, local, scan_backward, solve, state_gradient, pair_gradient: the kernels' tiles.
    """

    inverse_dot: str
    wy: Tile
    scan: Tile
    output: Tile
    local: Tile
    scan_backward: Tile
    solve: Tile
    state_gradient: Tile
    pair_gradient: Tile


_SMALL_SCANS = tuple(Tile(ALL, 32, rows, 4, 1) for rows in (64, 32, 16))
# Few states: narrow tiles make more programs. Many: wide ones read k and w less often.
_SCAN_FEW = (*tiles((ALL, 32, 4, 3), (ALL, 32, 4, 2)), *_SMALL_SCANS)
_SCAN_MANY = (*tiles((ALL, 64, 4, 2)), *_SCAN_FEW)
_SCAN_BACKWARD_FEW = (*tiles((ALL, 32, 4, 2)), *_SMALL_SCANS)
_SCAN_BACKWARD_MANY = (*tiles((ALL, 64, 4, 2)), *_SCAN_BACKWARD_FEW)
_WY = tiles((128, 128, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1))
_OUTPUT = tiles((128, 64, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1))
_SOLVE = tiles((64, 128, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1))
_STATE_GRADIENT = tiles((64, 64, 4, 2), (64, 64, 4, 1), (32, 32, 4, 1))
_PAIR_GRADIENT = tiles((64, 64, 4, 1), (32, 32, 4, 1))


def _wy(t: Tile) -> int:
    return 2 * CHUNK * t.block_k + CHUNK * t.block_v + 4 * CHUNK * CHUNK


def _scan(t: Tile) -> int:
    return t.stages * t.rows * (2 * t.block_k + t.block_v) + (t.block_k + t.rows) * t.block_v


def _scan_backward(t: Tile) -> int:
    return t.stages * t.rows * (3 * t.block_k + 2 * t.block_v) + (t.block_k + t.rows) * t.block_v


def _solve(t: Tile) -> int:
    return CHUNK * CHUNK + 3 * CHUNK * t.block_v


def _state_gradient(t: Tile) -> int:
    return t.stages * (3 * CHUNK + 2 * t.block_k) * t.block_v + 2 * t.block_k * t.block_v


def _pair_gradient(t: Tile) -> int:
    return 2 * CHUNK * t.block_k + 3 * CHUNK * t.block_v + 3 * CHUNK * CHUNK


KERNELS = {
    "wy": Tiles(_WY, _WY, _wy),
    "scan": Tiles(_SCAN_FEW, _SCAN_MANY, _scan, scans=True),
    "output": Tiles(_OUTPUT, _OUTPUT, output_elements),
    "local": Tiles(_OUTPUT, _OUTPUT, output_elements),
    "scan_backward": Tiles(_SCAN_BACKWARD_FEW, _SCAN_BACKWARD_MANY, _scan_backward, scans=True),
    "solve": Tiles(_SOLVE, _SOLVE, _solve),
    "state_gradient": Tiles(_STATE_GRADIENT, _STATE_GRADIENT, _state_gradient),
    "pair_gradient": Tiles(_PAIR_GRADIENT, _PAIR_GRADIENT, _pair_gradient),
}
"""The tiles of each kernel."""


def schedule(facts: Facts) -> Schedule | DoesNotFit:
    """The first tile of every list that fits the device."""
    dot = facts.dtype("v") or "fp32"
    chosen = choose(KERNELS, facts, dot, "HV")
    return chosen if isinstance(chosen, DoesNotFit) else _interned(dot, schedules.asynchronous(facts), *chosen)


@functools.cache
def _interned(dot: str, is_asynchronous: bool, *chosen: Tile) -> Schedule:
    # bf16 loses what nearly parallel keys need, fp16 keeps it.
    return Schedule(CHUNK, dot, is_asynchronous, "fp16" if dot == "bf16" else "fp32", *chosen)
