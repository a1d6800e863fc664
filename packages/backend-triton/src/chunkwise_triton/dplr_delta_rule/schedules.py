"""Schedules of the DPLR delta rule: tiles, warps and stages by device, chunk and widths. Imports no kernel language."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from chunkwise.verifier.facts import Facts
from chunkwise.verifier.refusal import DoesNotFit
from chunkwise_triton.common import schedules
from chunkwise_triton.common.schedules import ALL, Tile, Tiles, choose, tiles


@dataclass(frozen=True, eq=False)
class Schedule(schedules.Schedule):
    """The launch configuration of all kernels of one call; equal ones are one object.

    Args:
        centred: whether products of pairs are centred in the chunk, which needs gates of a promised bound.
        gates, prepare, scan, output, scan_backward, value_gradient, key_gradient: the kernels' tiles.
    """

    centred: bool
    gates: Tile
    prepare: Tile
    scan: Tile
    output: Tile
    scan_backward: Tile
    value_gradient: Tile
    key_gradient: Tile


@functools.cache
def kernels(chunk: int) -> Mapping[str, Tiles]:
    """The tiles of each kernel for chunks of a size."""
    small_scans = tuple(Tile(ALL, 32, rows, 4, 1) for rows in (64, 32, 16) if rows <= chunk)
    few = (*tiles((ALL, 32, 4, 2), rows=chunk), *small_scans)
    many = (*tiles((ALL, 64, 4, 2), rows=chunk), *few)
    whole = tiles((64, 64, 4, 1), (32, 32, 4, 1), rows=chunk)
    gates = tiles((64, 32, 4, 1), rows=chunk)
    square = chunk * chunk

    def scan(t: Tile) -> int:
        return t.stages * t.rows * (3 * t.block_k + 2 * t.block_v) + (t.block_k + t.rows) * t.block_v

    def prepare(t: Tile) -> int:
        return 4 * chunk * max(t.block_k, chunk)

    def output(t: Tile) -> int:
        return chunk * t.block_k + (2 * chunk + t.block_k) * t.block_v + 2 * square

    def value_gradient(t: Tile) -> int:
        return chunk * t.block_k + (3 * chunk + t.block_k) * t.block_v + 3 * square

    def key_gradient(t: Tile) -> int:
        return max(6 * chunk * t.block_k + 2 * square, chunk * t.block_k + (chunk + t.block_k) * t.block_v)

    return {
        "gates": Tiles(gates, gates, lambda t: 2 * chunk * t.block_k, scans=True),
        "prepare": Tiles(whole, whole, prepare),
        "scan": Tiles(few, many, scan, scans=True),
        "output": Tiles(whole, whole, output),
        "scan_backward": Tiles(few, many, scan, scans=True),
        "value_gradient": Tiles(whole, whole, value_gradient),
        "key_gradient": Tiles(whole, whole, key_gradient),
    }


def robust(facts: Facts) -> Schedule | DoesNotFit:
    """The first tile of every list that fits the device, for any gates."""
    return _schedule(facts, False)


def centred(facts: Facts) -> Schedule | DoesNotFit:
    """The first tile of every list that fits the device, for gates of a promised bound."""
    return _schedule(facts, True)


def _schedule(facts: Facts, is_centred: bool) -> Schedule | DoesNotFit:
    chunk, dtype = facts.flag("chunk_size"), facts.dtype("v") or "fp32"
    # fp16 ends at 2^-24, which decays pass: its operands are widened.
    dot = "bf16" if dtype == "bf16" else "fp32"
    chosen = choose(kernels(chunk), facts, dot, "H")
    if isinstance(chosen, DoesNotFit):
        return chosen
    return _interned(chunk, dot, schedules.asynchronous(facts), is_centred, *chosen)


@functools.cache
def _interned(chunk: int, dot: str, is_asynchronous: bool, is_centred: bool, *chosen: Tile) -> Schedule:
    return Schedule(chunk, dot, is_asynchronous, is_centred, *chosen)
