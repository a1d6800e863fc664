"""Transposed tiles between shared memory and the accumulators of a warpgroup.

A warpgroup holds a [64, 64] product with the rows of its warps: a thread has element (row, column) in register
``place(row, column)``, if it has it at all. Kernels that keep V on the rows read and write tiles [tokens, V] here,
eight elements a lane, by ldmatrix and stmatrix with a transposition.
"""

from typing import Any

import tilelang.language as T  # noqa: N812 - TileLang's parser knows it by this name
from tvm import tirx

_TILE = 64
_STMATRIX = tirx.op.Op.get("tl.ptx_stmatrix")
_PACK = tirx.op.Op.get("tl.pack_b16")


def place(row: Any, column: Any) -> Any:
    """The register of an element of a [64, 64] accumulator in the thread that has it."""
    return column // 8 * 4 + row % 16 // 8 * 2 + column % 2


def _corner(step: Any) -> tuple[Any, Any]:
    """Token and column of the eight elements of a [tokens, V] tile that a lane gives the address of."""
    lane = T.get_thread_binding() % 32
    warp = T.get_thread_binding() % 128 // 32
    return step * 16 + lane // 16 * 8 + lane % 8, warp * 16 + lane % 16 // 8 * 8


def load_transposed(tile: Any, lead: tuple[Any, ...], registers: Any, step: int) -> Any:
    """``registers[place(v, t)] = tile[*lead, t, v]`` for the 16 tokens of a step; 16 bit."""
    corner = (*lead, *_corner(step))
    return T.ptx_ldmatrix(
        True, 4, T.access_ptr(tile[corner], "r", extent=8), T.access_ptr(registers[step * 8], "w", extent=8)
    )


def store_transposed(registers: Any, tile: Any, step: int) -> Any:
    """``tile[t, v] = registers[place(v, t)]`` for the 16 tokens of a step; 16 bit."""
    first = step * 8
    packed = [
        tirx.call_intrin("int32", _PACK, registers[first + 2 * pair], registers[first + 2 * pair + 1])
        for pair in range(4)
    ]
    pointer = T.access_ptr(tile[_corner(step)], "w", extent=8)
    return tirx.call_intrin("handle", _STMATRIX, True, 4, pointer, *packed, tirx.StringImm("m8n8"))
