"""The inverse of a unit lower triangular matrix, by merging blocks in pairs.

With X the inverse of the diagonal blocks of a size, the inverse of the blocks of twice that size is ``X - X L X``,
L the blocks that lie between. It is as stable as substitution, which sums of powers of A are not when keys are nearly
parallel, and it is nothing but products of whole tiles.
"""

import triton
import triton.language as tl


@triton.jit
def unit_lower_inverse(a, C: tl.constexpr, DOT: tl.constexpr):
    """``(I + a)^-1`` for ``a`` ``[C, C]`` fp32, zero on and above the diagonal.

    DOT is the dtype of the products' operands: fp16 (with fp32 accumulation) or fp32 (tf32x3); never bf16, whose eight
    bits lose the digits that nearly parallel keys need.
    """
    LEVELS: tl.constexpr = 4 if C == 16 else 5 if C == 32 else 6  # of C = 64
    t = tl.arange(0, C)
    row, column = t[:, None], t[None, :]
    one = (row == column).to(tl.float32)
    x = one - tl.where(row // 2 == column // 2, a, 0.0)
    # A loop and not unrolled: with fp32 operands ptxas takes a minute for the straight code.
    for level in range(1, LEVELS):
        same = (row >> (level + 1)) == (column >> (level + 1))
        between = tl.where(same & ((row >> level) > (column >> level)), a, 0.0)
        inner = tl.dot(between.to(DOT), x.to(DOT), input_precision="tf32x3")
        x -= tl.dot(x.to(DOT), inner.to(DOT), input_precision="tf32x3")
    return x
