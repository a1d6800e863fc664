"""Schedules of attention with sinks: tiles, warps and stages by device and width. Imports no kernel language."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from chunkwise.verifier.facts import Facts
from chunkwise.verifier.refusal import DoesNotFit
from chunkwise_triton.common import schedules
from chunkwise_triton.common.schedules import BYTES, padded_width


@dataclass(frozen=True)
class Tile:
    """One kernel's launch.

    Args:
        queries, keys: rows of a block of queries, and of keys.
        warps, stages: Triton's ``num_warps`` and ``num_stages``.
        pack: heads of a group whose rows stand side by side in a block of queries.
        shared_memory_bytes: what it takes at most.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    pack: int = 1
    shared_memory_bytes: int = 0


@dataclass(frozen=True, eq=False)
class Schedule(schedules.Schedule):
    """The launch configuration of the kernels of one call; equal ones are one object. Its chunks are the tokens of a
    block of queries in the forward.

    Args:
        windowed: whether the call has a window.
        width: columns of a tile, a power of two.
        forward, query_gradient, key_gradient: the kernels' tiles.
        apart: whether the gradients of keys and of values are computed one after the other: both do not fit the
            registers.
    """

    windowed: bool
    width: int
    forward: Tile
    query_gradient: Tile
    key_gradient: Tile
    apart: bool

    @property
    def shared_memory_bytes(self) -> int:
        """The most that one of the kernels takes."""
        return max(t.shared_memory_bytes for t in (self.forward, self.query_gradient, self.key_gradient))


_Shapes = Mapping[str, Sequence[tuple[int, int, int, int]]]
_KERNELS = ("forward", "query_gradient", "key_gradient")
# For each kernel (queries, keys, warps, stages), the fastest first, by the least width that they are made for.
# Measured on an H200 in bf16; of the others it is known what they take on chip.
_HOPPER: Mapping[int, _Shapes] = {
    256: {
        "forward": ((64, 32, 4, 2),),
        "query_gradient": ((128, 32, 8, 2),),
        "key_gradient": ((32, 64, 4, 2),),
    },
    128: {
        "forward": ((64, 64, 4, 3),),
        "query_gradient": ((128, 64, 8, 3),),
        "key_gradient": ((64, 64, 4, 2),),
    },
    0: {
        "forward": ((64, 64, 4, 3),),
        "query_gradient": ((64, 64, 4, 3),),
        "key_gradient": ((64, 64, 4, 3),),
    },
}
# A window that few blocks cover: narrow ones leave less of them outside.
_HOPPER_WINDOW: Mapping[int, _Shapes] = {
    **_HOPPER,
    0: {
        "forward": ((64, 32, 4, 3),),
        "query_gradient": ((64, 32, 4, 3),),
        "key_gradient": ((64, 64, 4, 3),),
    },
}
_NARROW = 256
"""Windows up to here are narrow."""
_ELSEWHERE: Mapping[int, _Shapes] = {
    256: {
        "forward": ((64, 32, 4, 1),),
        "query_gradient": ((32, 32, 4, 1),),
        "key_gradient": ((32, 32, 4, 1),),
    },
    0: {
        "forward": ((64, 64, 4, 2), (64, 32, 4, 1)),
        "query_gradient": ((64, 32, 4, 2), (64, 32, 4, 1)),
        "key_gradient": ((32, 64, 4, 2), (32, 64, 4, 1)),
    },
}
_HOPPER_FP32: Mapping[int, _Shapes] = {
    256: {
        "forward": ((64, 32, 4, 1),),
        "query_gradient": ((16, 32, 4, 1),),
        "key_gradient": ((16, 16, 4, 1),),
    },
    128: {
        "forward": ((64, 32, 4, 1),),
        "query_gradient": ((64, 32, 4, 1),),
        "key_gradient": ((32, 64, 4, 1),),
    },
    0: {
        "forward": ((64, 64, 4, 2),),
        "query_gradient": ((64, 32, 4, 1),),
        "key_gradient": ((32, 64, 4, 1),),
    },
}
_ELSEWHERE_FP32: Mapping[int, _Shapes] = {
    256: {
        "forward": ((16, 32, 4, 1),),
        "query_gradient": ((16, 32, 4, 1), (16, 16, 4, 1)),
        "key_gradient": ((16, 16, 4, 1),),
    },
    0: {
        "forward": ((32, 32, 4, 1),),
        "query_gradient": ((32, 32, 8, 1), (16, 32, 4, 1)),
        "key_gradient": ((32, 32, 8, 1), (16, 32, 4, 1)),
    },
}
_INTERPRETED = Tile(64, 64, 4, 1)  # it takes as long for a small tile as for a large one


def shared_memory_bytes(kernel: str, tile: Tile, width: int, dot: str, arch: str) -> int:
    """What a tile takes at most: the rows that a program holds, twice in fp32, and those that its loop reads."""
    read = tile.keys
    held = tile.queries
    if kernel == "query_gradient":
        held = 2 * tile.queries
    elif kernel == "key_gradient":
        read, held = tile.queries, 2 * tile.keys
    rows = held * (2 if dot == "fp32" else 1) + 2 * tile.stages * read
    # The matrix instruction of sm_100 reads weights from memory, not from registers.
    weights = 4 * tile.queries * tile.keys if arch in ("sm100", "sm103") else 0
    return (rows * width + weights) * BYTES[dot] + 32 * tile.stages * tile.queries


def _narrow(facts: Facts) -> bool:
    window = facts.flag("window_size")
    return window is not None and window <= _NARROW


def _table(facts: Facts, dot: str) -> Mapping[int, _Shapes]:
    if facts.device.arch != "sm90":
        return _ELSEWHERE_FP32 if dot == "fp32" else _ELSEWHERE
    if dot == "fp32":
        return _HOPPER_FP32
    return _HOPPER_WINDOW if _narrow(facts) else _HOPPER


def schedule(facts: Facts) -> Schedule | DoesNotFit:
    """The first tile of every list that fits the device."""
    dot = facts.dtype("v") or "fp32"
    width = padded_width(facts.size("D"), dot)
    table = _table(facts, dot)
    shapes = table[max(least for least in table if least <= width)]
    chosen: list[Tile] = []
    for kernel in _KERNELS:
        found = _first(kernel, shapes[kernel], width, facts, dot)
        if isinstance(found, DoesNotFit):
            return found
        chosen.append(found)
    is_asynchronous = schedules.asynchronous(facts)
    return _interned(dot, is_asynchronous, facts.flag("window_size") is not None, width, *chosen)


def _first(
    kernel: str, shapes: Sequence[tuple[int, int, int, int]], width: int, facts: Facts, dot: str
) -> Tile | DoesNotFit:
    have = facts.device.shared_memory_bytes
    if not have:  # the interpreter has none, and takes none
        return _packed(kernel, facts, _INTERPRETED)
    needs = []
    for shape in shapes:
        tile = Tile(*shape)
        needs.append(shared_memory_bytes(kernel, tile, width, dot, facts.device.arch))
        if needs[-1] <= have:
            return _packed(kernel, facts, replace(tile, shared_memory_bytes=needs[-1]))
    return DoesNotFit(min(needs), have)


def _packed(kernel: str, facts: Facts, tile: Tile) -> Tile:
    """The tile with the heads of a group that stand in a block of queries together.

    The keys' gradient takes the heads of a group one after the other where each has many queries: rows of one head lie
    in memory as they are used.
    """
    group = facts.size("HQ") // facts.size("HK")
    together = kernel != "key_gradient" or _narrow(facts)
    return replace(tile, pack=min(group & -group, tile.queries) if together else 1)


@functools.cache
def _interned(
    dot: str, is_asynchronous: bool, windowed: bool, width: int, forward: Tile, query_gradient: Tile, key_gradient: Tile
) -> Schedule:
    tokens = forward.queries // forward.pack
    apart = width > (64 if dot == "fp32" else 128)
    return Schedule(tokens, dot, is_asynchronous, windowed, width, forward, query_gradient, key_gradient, apart)
