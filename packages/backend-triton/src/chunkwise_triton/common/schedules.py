"""What the schedules of all ops are made of: tiles, and the choice of the first that fits. Imports no kernel language.

Each kernel has a list of tiles, the fastest first; a call takes the first one whose shared memory fits its device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from chunkwise.verifier.facts import Facts
from chunkwise.verifier.refusal import DoesNotFit

CHUNK = 64
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_RESERVED = 1024
"""Bytes that each program takes beside its own; a multiprocessor has so many more than one program may take."""


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


@dataclass(frozen=True)
class Tiles:
    """The tiles that a kernel may take.

    Args:
        few, many: for few and for many states, the fastest first.
        elements: how many elements of shared memory a tile takes: an upper bound, held against compiled kernels.
        scans: whether the kernel carries a state, all rows of K, which exempts its tiles from a least width.
        paired: whether a tile of which two fit a multiprocessor goes before those of which one does.
    """

    few: Sequence[Tile]
    many: Sequence[Tile]
    elements: Callable[[Tile], int]
    scans: bool = False
    paired: bool = False


@dataclass(frozen=True, eq=False)
class Schedule:
    """The launch configuration of all kernels of one call; an op adds a tile for each of its kernels.

    Args:
        chunk_size: rows of a chunk.
        dot: dtype of the products' operands.
        asynchronous: whether products of matrices run beside what follows them.
    """

    chunk_size: int
    dot: str
    asynchronous: bool

    @property
    def shared_memory_bytes(self) -> int:
        """The most that one of the kernels takes."""
        values = (getattr(self, field.name) for field in fields(self))
        return max(value.shared_memory_bytes for value in values if isinstance(value, Tile))


# And the interpreter, so that what is done for it is tested on a CPU.
_ASYNCHRONOUS = ("sm90", "interpreter")


def asynchronous(facts: Facts) -> bool:
    """Whether the device's matrix products are wgmma: waited for later, and reading shared memory until then."""
    return facts.device.arch in _ASYNCHRONOUS


ALL = 256
"""Columns of a scan's tile: it holds all rows of a state."""


def tiles(*shapes: tuple[int, int, int, int], rows: int = CHUNK) -> tuple[Tile, ...]:
    """Tiles of whole chunks from (block_k, block_v, warps, stages)."""
    return tuple(Tile(block_k, block_v, rows, warps, stages) for block_k, block_v, warps, stages in shapes)


_SMALL_SCANS = tuple(Tile(ALL, 32, rows, 4, 1) for rows in (64, 32, 16))
# Few states: narrow tiles make more programs. Many: wide ones read keys or queries less often.
SCAN_FEW = (*tiles((ALL, 32, 4, 3), (ALL, 32, 4, 2)), *_SMALL_SCANS)
SCAN_MANY = (*tiles((ALL, 64, 4, 3), (ALL, 64, 4, 2)), *SCAN_FEW)
"""Tiles of the scans that only forget and add."""


def scan_elements(t: Tile) -> int:
    """Of these scans."""
    return t.stages * t.rows * (t.block_k + t.block_v) + 2 * t.rows * t.block_v


def output_elements(t: Tile) -> int:
    """Of the kernel that computes o, or of one that takes the same products."""
    return 2 * CHUNK * t.block_k + (CHUNK + t.block_k) * t.block_v + CHUNK * CHUNK


def _narrowest(dtype: str) -> int:
    """The least columns of a tile: 128 bytes, so that all tiles of a kernel lie in shared memory in one layout.

    The ptxas that Triton 3.4, 3.6 and 3.7 bring (12.8) computes wrong addresses for Hopper's matrix instructions where
    a narrower tile takes the place of a wider one: ``gated_delta_rule/NOTES.md``.
    """
    return 128 // BYTES[dtype]


def _widest(facts: Facts, dtype: str) -> int:
    """The most columns of a tile: fp32 operands live in registers where the matrix instruction does not read memory."""
    return 32 if dtype == "fp32" and facts.device.arch != "sm90" else ALL


def _power_of_two(width: int, narrowest: int) -> int:
    return max(narrowest, 1 << (width - 1).bit_length())


def padded_width(width: int, dtype: str) -> int:
    """Columns of a tile that holds a whole width."""
    return _power_of_two(width, _narrowest(dtype))


def fills(facts: Facts, block_v: int, heads: str) -> bool:
    """Whether the states of a call keep every multiprocessor busy with tiles so wide; ``heads`` is the states' axis."""
    states = facts.size("N") * facts.size(heads)
    return states * -(-facts.size("V") // block_v) >= facts.device.sm_count


def choose(kernels: Mapping[str, Tiles], facts: Facts, dot: str, heads: str) -> tuple[Tile, ...] | DoesNotFit:
    """For each kernel the first of its tiles that fits the device."""
    narrowest = _narrowest(dot)
    widest_k, widest_v = (padded_width(facts.size(axis), dot) for axis in ("K", "V"))
    have = facts.device.shared_memory_bytes
    many = fills(facts, 64, heads)
    chosen: list[Tile] = []
    for kernel in kernels.values():
        fitted = [
            replace(tile, block_k=min(tile.block_k, widest_k), block_v=min(tile.block_v, widest_v))
            for tile in (kernel.many if many else kernel.few)
            if kernel.scans or narrowest <= tile.block_v <= _widest(facts, dot)
        ]
        # The interpreter has no shared memory, and takes none.
        fitted = [replace(t, shared_memory_bytes=kernel.elements(t) * BYTES[dot] if have else 0) for t in fitted]
        fitting = [tile for tile in fitted if tile.shared_memory_bytes <= have]
        if not fitting:
            return DoesNotFit(min(tile.shared_memory_bytes for tile in fitted), have)
        paired = [tile for tile in fitting if 2 * (tile.shared_memory_bytes + _RESERVED) <= have + _RESERVED]
        chosen.append(((kernel.paired and paired) or fitting)[0])
    return tuple(chosen)
