"""Schedules of the gated delta rule: tiles, warps and stages by device and widths. Imports no kernel language.

Each kernel has a list of tiles, the fastest first (measured on an H200 at K = V = 128 in bf16); a call takes the first
one whose shared memory fits its device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chunkwise.verifier.facts import Facts
from chunkwise.verifier.refusal import DoesNotFit

CHUNK = 64
_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Tile:
    """One kernel's launch: columns of v or of a state at once, warps, pipeline stages, its shared memory at most."""

    block_v: int
    warps: int
    stages: int
    shared_memory_bytes: int


@dataclass(frozen=True)
class Schedule:
    """The launch configuration of all kernels of one call.

    Args:
        chunk_size: rows of a chunk.
        block_k: the power of two that holds K.
        gradient_block_k: columns of K that one program of the state gradient works on.
        dot: dtype of the products' operands.
        inverse_dot: dtype of the operands of the inverse's products.
        wy, scan, output, local, scan_backward, state_gradient, pair_gradient: the kernels' tiles.
    """

    chunk_size: int
    block_k: int
    gradient_block_k: int
    dot: str
    inverse_dot: str
    wy: Tile
    scan: Tile
    output: Tile
    local: Tile
    scan_backward: Tile
    state_gradient: Tile
    pair_gradient: Tile

    @property
    def shared_memory_bytes(self) -> int:
        """The most that one of the kernels takes."""
        tiles = (self.wy, self.scan, self.output, self.local, self.scan_backward)
        return max(t.shared_memory_bytes for t in (*tiles, self.state_gradient, self.pair_gradient))


@dataclass(frozen=True)
class _Sizes:
    """What a tile's shared memory depends on; ``half`` is the columns of K of the state gradient."""

    block_k: int
    half: int
    element_bytes: int


Shape = tuple[int, int, int]
"""Columns of v, warps, stages."""
Estimate = Callable[[_Sizes, int, int], int]
"""Elements of shared memory for so many columns of v and stages: an upper bound, held against compiled kernels."""

# Few states: narrow tiles make more programs. Many: wide ones read k and w less often.
_SCAN_FEW: tuple[Shape, ...] = ((32, 4, 3), (32, 4, 2), (32, 4, 1))
_SCAN_MANY: tuple[Shape, ...] = ((64, 4, 2), *_SCAN_FEW)
_SCAN_BACKWARD_FEW: tuple[Shape, ...] = ((32, 4, 2), (32, 4, 1))
_SCAN_BACKWARD_MANY: tuple[Shape, ...] = ((64, 4, 2), *_SCAN_BACKWARD_FEW)
_WY: tuple[Shape, ...] = ((128, 4, 1), (64, 4, 1), (32, 4, 1))
_OUTPUT: tuple[Shape, ...] = ((64, 4, 1), (32, 4, 1))
_STATE_GRADIENT: tuple[Shape, ...] = ((64, 4, 2), (64, 4, 1), (32, 4, 1))
_PAIR_GRADIENT: tuple[Shape, ...] = ((64, 4, 1), (32, 4, 1))


def _wy(s: _Sizes, block_v: int, stages: int) -> int:
    return 2 * CHUNK * s.block_k + stages * CHUNK * block_v + 4 * CHUNK * CHUNK


def _scan(s: _Sizes, block_v: int, stages: int) -> int:
    return stages * CHUNK * (2 * s.block_k + block_v) + (s.block_k + CHUNK) * block_v


def _output(s: _Sizes, block_v: int, stages: int) -> int:
    return 2 * CHUNK * s.block_k + stages * (CHUNK + s.block_k) * block_v + CHUNK * CHUNK


def _scan_backward(s: _Sizes, block_v: int, stages: int) -> int:
    return stages * CHUNK * (3 * s.block_k + 2 * block_v) + (s.block_k + CHUNK) * block_v


def _state_gradient(s: _Sizes, block_v: int, stages: int) -> int:
    return stages * (3 * CHUNK + 2 * s.half) * block_v + CHUNK * (CHUNK + s.half) + 2 * s.half * block_v


def _pair_gradient(s: _Sizes, block_v: int, stages: int) -> int:
    return 3 * CHUNK * s.block_k + stages * 4 * CHUNK * block_v + 4 * CHUNK * CHUNK


def _nothing(s: _Sizes, block_v: int, stages: int) -> int:
    return 0


def _power_of_two(width: int) -> int:
    # Never 16: Triton 3.6 computes some 16-column products of these kernels wrongly on Hopper.
    return max(32, 1 << (width - 1).bit_length())


def _fills(facts: Facts, block_v: int) -> bool:
    """Whether the states of a call keep every multiprocessor busy with tiles so wide."""
    states = facts.size("N") * facts.size("HV")
    return states * -(-facts.size("V") // block_v) >= facts.device.sm_count


def schedule(facts: Facts) -> Schedule | DoesNotFit:
    """The first tile of every list that fits the device."""
    dot = facts.dtype("v") or "fp32"
    block_k = _power_of_two(facts.size("K"))
    sizes = _Sizes(block_k, min(64, block_k), _BYTES[dot])
    many = _fills(facts, 64)
    lists: dict[str, tuple[Sequence[Shape], Estimate]] = {
        "wy": (_WY, _wy),
        "scan": (_SCAN_MANY if many else _SCAN_FEW, _scan),
        "output": (_OUTPUT, _output),
        "local": (_OUTPUT, _output),
        "scan_backward": (_SCAN_BACKWARD_MANY if many else _SCAN_BACKWARD_FEW, _scan_backward),
        "state_gradient": (_STATE_GRADIENT, _state_gradient),
        "pair_gradient": (_PAIR_GRADIENT, _pair_gradient),
    }
    widest_v = _power_of_two(facts.size("V"))
    have = facts.device.shared_memory_bytes
    chosen: dict[str, Tile] = {}
    for name, (shapes, estimate) in lists.items():
        # The interpreter has no shared memory, and takes none.
        tiles = [_tile(sizes, shape, estimate if have else _nothing, widest_v) for shape in shapes]
        fitting = [tile for tile in tiles if tile.shared_memory_bytes <= have]
        if not fitting:
            return DoesNotFit(min(tile.shared_memory_bytes for tile in tiles), have)
        chosen[name] = fitting[0]
    return Schedule(
        chunk_size=CHUNK,
        block_k=block_k,
        gradient_block_k=sizes.half,
        dot=dot,
        # bf16 loses what nearly parallel keys need, fp16 keeps it.
        inverse_dot="fp16" if dot == "bf16" else "fp32",
        **chosen,
    )


def _tile(sizes: _Sizes, shape: Shape, estimate: Estimate, widest_v: int) -> Tile:
    block_v, warps, stages = shape
    block_v = min(block_v, widest_v)
    return Tile(block_v, warps, stages, estimate(sizes, block_v, stages) * sizes.element_bytes)
