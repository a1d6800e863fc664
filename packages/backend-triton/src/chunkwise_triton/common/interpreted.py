"""Whether Triton's interpreter, as it is in this process, multiplies bf16 right: measured, and once.

As Triton ships it, it holds bf16 as the integers of the same bits, and multiplies those.
"""

import functools
import threading

import torch
import triton
import triton.language as tl

_SIZE = 16


@triton.jit
def _products(x, y, out, C: tl.constexpr):
    """``[2, C, C]`` fp32: the products of x, and of the ones on and below the diagonal, with y."""
    t = tl.arange(0, C)
    at = t[:, None] * C + t[None, :]
    right = tl.load(y + at)
    tl.store(out + at, tl.dot(tl.load(x + at), right))
    tl.store(out + C * C + at, tl.dot((t[:, None] >= t[None, :]).to(tl.bfloat16), right))


@functools.cache
def bf16_is_right() -> bool:
    """Whether products of bf16 come out right; False too where nothing is interpreted."""
    if isinstance(_products, triton.JITFunction):
        return False
    found: list[bool] = []
    # In a thread of its own: torch's modes, under which tensors may be fake, are the calling thread's.
    thread = threading.Thread(target=lambda: found.append(_measure()))
    thread.start()
    thread.join()
    return found == [True]


def _measure() -> bool:
    """Of small integers, whose products and sums are exact in fp32."""
    x = (torch.arange(_SIZE * _SIZE, device="cpu").view(_SIZE, _SIZE) % 7 - 3).to(torch.bfloat16)
    y = x.T.contiguous() - 1
    out = torch.full((2, _SIZE, _SIZE), float("nan"), dtype=torch.float32, device="cpu")
    _products[(1,)](x, y, out, C=_SIZE)
    left = torch.stack((x.float(), torch.ones_like(out[0]).tril()))
    return torch.equal(out, left @ y.float())
