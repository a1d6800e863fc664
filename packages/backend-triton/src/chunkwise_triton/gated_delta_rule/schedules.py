"""Schedules of the gated delta rule: tiles, warps and stages by device and widths. Imports no kernel language.

Each kernel has a list of tiles, the fastest first (measured on an H200 at K = V = 128 in bf16); a call takes the first
one whose shared memory fits its device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from chunkwise.verifier.facts import Facts
from chunkwise.verifier.refusal import DoesNotFit

CHUNK = 64
_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Tile:
    """One kernel's launch.

    Args:
        block_k, block_v: columns of K and of V at once.
        rows: rows of a chunk at once; less than a chunk only in the scans.
        warps, stages: Triton's ``num_warps`` and ``num_stages``.
        shared_memory_bytes: what it takes at most.
    """

    block_k: int
    block_v: int
    rows: int
    warps: int
    stages: int
    shared_memory_bytes: int = 0


@dataclass(frozen=True, eq=False)
class Schedule:
    """The launch configuration of all kernels of one call; equal ones are one object (:func:`schedule`).

    Args:
        chunk_size: rows of a chunk.
        dot: dtype of the products' operands.
        inverse_dot: dtype of the operands of the inverse's products.
        wy, scan, output, local, scan_backward, solve, state_gradient, pair_gradient: the kernels' tiles.
    """

    chunk_size: int
    dot: str
    inverse_dot: str
    wy: Tile
    scan: Tile
    output: Tile
    local: Tile
    scan_backward: Tile
    solve: Tile
    state_gradient: Tile
    pair_gradient: Tile

    @property
    def shared_memory_bytes(self) -> int:
        """The most that one of the kernels takes."""
        tiles: list[Tile] = [getattr(self, name) for name in KERNELS]
        return max(tile.shared_memory_bytes for tile in tiles)


def _tiles(*shapes: tuple[int, int, int, int]) -> tuple[Tile, ...]:
    return tuple(Tile(block_k, block_v, CHUNK, warps, stages) for block_k, block_v, warps, stages in shapes)


_ALL = 256  # a scan holds all rows of a state
_SMALL_SCANS = tuple(Tile(_ALL, 32, rows, 4, 1) for rows in (64, 32, 16))
# Few states: narrow tiles make more programs. Many: wide ones read k and w less often.
_SCAN_FEW = (*_tiles((_ALL, 32, 4, 3), (_ALL, 32, 4, 2)), *_SMALL_SCANS)
_SCAN_MANY = (*_tiles((_ALL, 64, 4, 2)), *_SCAN_FEW)
_SCAN_BACKWARD_FEW = (*_tiles((_ALL, 32, 4, 2)), *_SMALL_SCANS)
_SCAN_BACKWARD_MANY = (*_tiles((_ALL, 64, 4, 2)), *_SCAN_BACKWARD_FEW)
_WY = _tiles((128, 128, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1))
_OUTPUT = _tiles((128, 64, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1))
_SOLVE = _tiles((64, 128, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1))
_STATE_GRADIENT = _tiles((64, 64, 4, 2), (64, 64, 4, 1), (32, 32, 4, 1))
_PAIR_GRADIENT = _tiles((64, 64, 4, 1), (32, 32, 4, 1))


# Elements of shared memory of a tile: upper bounds, held against compiled kernels.


def _wy(t: Tile) -> int:
    return 2 * CHUNK * t.block_k + CHUNK * t.block_v + 4 * CHUNK * CHUNK


def _scan(t: Tile) -> int:
    return t.stages * t.rows * (2 * t.block_k + t.block_v) + (t.block_k + t.rows) * t.block_v


def _scan_backward(t: Tile) -> int:
    return t.stages * t.rows * (3 * t.block_k + 2 * t.block_v) + (t.block_k + t.rows) * t.block_v


def _output(t: Tile) -> int:
    return 2 * CHUNK * t.block_k + (CHUNK + t.block_k) * t.block_v + CHUNK * CHUNK


def _solve(t: Tile) -> int:
    return CHUNK * CHUNK + 3 * CHUNK * t.block_v


def _state_gradient(t: Tile) -> int:
    return t.stages * (3 * CHUNK + 2 * t.block_k) * t.block_v + 2 * t.block_k * t.block_v


def _pair_gradient(t: Tile) -> int:
    return 2 * CHUNK * t.block_k + 3 * CHUNK * t.block_v + 3 * CHUNK * CHUNK


KERNELS: dict[str, tuple[Sequence[Tile], Sequence[Tile], Callable[[Tile], int]]] = {
    "wy": (_WY, _WY, _wy),
    "scan": (_SCAN_FEW, _SCAN_MANY, _scan),
    "output": (_OUTPUT, _OUTPUT, _output),
    "local": (_OUTPUT, _OUTPUT, _output),
    "scan_backward": (_SCAN_BACKWARD_FEW, _SCAN_BACKWARD_MANY, _scan_backward),
    "solve": (_SOLVE, _SOLVE, _solve),
    "state_gradient": (_STATE_GRADIENT, _STATE_GRADIENT, _state_gradient),
    "pair_gradient": (_PAIR_GRADIENT, _PAIR_GRADIENT, _pair_gradient),
}
"""Of each kernel: its tiles for few and for many states, and how many elements of shared memory a tile takes."""
_SCANS = ("scan", "scan_backward")


def _narrowest(dtype: str) -> int:
    """The least columns of a tile: 128 bytes, so that all tiles of a kernel lie in shared memory in one layout.

    The ptxas that Triton 3.4, 3.6 and 3.7 bring (12.8) computes wrong addresses for Hopper's matrix instructions where
    a narrower tile takes the place of a wider one: NOTES.md.
    """
    return 128 // _BYTES[dtype]


def _widest(facts: Facts, dtype: str) -> int:
    """The most columns of a tile: fp32 operands live in registers where the matrix instruction does not read memory."""
    return 32 if dtype == "fp32" and facts.device.arch != "sm90" else _ALL


def _power_of_two(width: int, narrowest: int) -> int:
    return max(narrowest, 1 << (width - 1).bit_length())


def _fills(facts: Facts, block_v: int) -> bool:
    """Whether the states of a call keep every multiprocessor busy with tiles so wide."""
    states = facts.size("N") * facts.size("HV")
    return states * -(-facts.size("V") // block_v) >= facts.device.sm_count


def schedule(facts: Facts) -> Schedule | DoesNotFit:
    """The first tile of every list that fits the device."""
    dot = facts.dtype("v") or "fp32"
    narrowest = _narrowest(dot)
    widest_k, widest_v = (_power_of_two(facts.size(axis), narrowest) for axis in ("K", "V"))
    have = facts.device.shared_memory_bytes
    many = _fills(facts, 64)
    chosen: dict[str, Tile] = {}
    for name, (few_tiles, many_tiles, elements) in KERNELS.items():
        tiles = [
            replace(tile, block_k=min(tile.block_k, widest_k), block_v=min(tile.block_v, widest_v))
            for tile in (many_tiles if many else few_tiles)
            if name in _SCANS or narrowest <= tile.block_v <= _widest(facts, dot)
        ]
        # The interpreter has no shared memory, and takes none.
        tiles = [replace(tile, shared_memory_bytes=elements(tile) * _BYTES[dot] if have else 0) for tile in tiles]
        fitting = [tile for tile in tiles if tile.shared_memory_bytes <= have]
        if not fitting:
            return DoesNotFit(min(tile.shared_memory_bytes for tile in tiles), have)
        chosen[name] = fitting[0]
    return _interned(dot, *chosen.values())


@functools.cache
def _interned(dot: str, *tiles: Tile) -> Schedule:
    # bf16 loses what nearly parallel keys need, fp16 keeps it.
    return Schedule(CHUNK, dot, "fp16" if dot == "bf16" else "fp32", *tiles)
