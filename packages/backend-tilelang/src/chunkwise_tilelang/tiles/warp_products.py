"""Products of [16, 16] tiles that a warp keeps in registers: ``mma.m16n8k16``, fp16 in, fp32 sums.

A thread has eight elements of a tile: of a product, row ``lane // 4 + 8 i`` and columns ``8 j + 2 (lane % 4) + e`` in
register ``4 j + 2 i + e``. Packed to 16 bit in the same order they are the left operand of the next product, so that a
chain of products from the left goes through no shared memory.
"""

from typing import Any

import tilelang.language as T  # noqa: N812 - TileLang's parser knows it by this name

WARP_TILE = 16
PADDED = 8
"""Elements behind a row of 16 or 32 in shared memory, with which eight rows lie in different banks."""


def load_tile(tile: Any, lead: tuple[Any, ...], row: Any, column: Any, registers: Any, first: int, right: bool) -> Any:
    """A [16, 16] tile of shared memory as an operand, in ``registers[first : first + 8]``.

    Args:
        tile, lead, row, column: ``tile[*lead, row : row + 16, column : column + 16]``, 16 bit.
        registers, first: where it goes.
        right: whether it is a right operand, with the rows summed over, or a left one.
    """
    lane = T.get_thread_binding() % 32
    corner = (*lead, row + lane % 16, column + lane // 16 * 8)
    source = T.access_ptr(tile[corner], "r", extent=8)
    return T.ptx_ldmatrix(right, 4, source, T.access_ptr(registers[first], "w", extent=8))


@T.macro
def multiply_add(left, a, right, b, result, c):
    """``result += left right`` of the tiles that begin at registers a, b and c."""
    for half in T.unroll(2):
        T.ptx_mma(
            "float32", "m16n8k16", "row", "col", "fp16", "fp16", "fp32",
            left.data, a, right.data, b + 4 * half, result.data, c + 4 * half, T.bool(False),
        )  # fmt: skip


@T.macro
def as_left_operand(result, c, left, a):
    """Round a product to the left operand of the next one."""
    for half, i, e in T.grid(2, 2, 2):
        left[a + 4 * half + 2 * i + e] = T.cast(result[c + 4 * half + 2 * i + e], "float16")
