"""What test_testing_interpreter.py measures under TRITON_INTERPRET=1: the interpreter as it comes, mended, rounding."""

import json
import sys

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from chunkwise_testing import interpreter

SIZES = (32, 16, 64)
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
INTEGERS = {"bool": torch.bool, "int8": torch.int8, "uint8": torch.uint8, "int32": torch.int32, "int64": torch.int64}
TARGETS = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.int32: tl.int32,
}


@triton.jit
def multiply(x, y, z, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, HOW: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left, right = tl.load(x + m[:, None] * K + k[None, :]), tl.load(y + n[None, :] * K + k[:, None])
    at = m[:, None] * N + n[None, :]
    tl.store(out + at, tl.dot(left, right, tl.load(z + at), input_precision=HOW))


@triton.jit
def convert(x, out, SIZE: tl.constexpr, TO: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i).to(TO))


def product_error(dtype, accumulated, how="ieee", shift=0):
    """Of fp64's product of the same values, the largest error as a share of what fp32 sums may lose."""
    m, n, k = SIZES
    x, y = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    z = 10 * torch.randn(m, n) if accumulated else torch.zeros(m, n)
    x, y = x * 2.0**-shift, y * 2.0**shift
    out = torch.empty(m, n)
    multiply[(1,)](x, y, z, out, M=m, N=n, K=k, HOW=how)
    x, y, z = x.double(), y.double().T, z.double()
    allowed = (k + 1) * 2**-24 * (x.abs() @ y.abs() + z.abs())
    return float(((out - (x @ y + z)).abs() / allowed).max())


@triton.jit
def exponentials(x, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.exp(tl.load(x + i)))


def exponential_error(largest):
    """The largest relative error of ``exp(-x)`` for x up to ``largest``."""
    x, out = -largest * torch.rand(2**10), torch.empty(2**10)
    exponentials[(1,)](x, out, SIZE=2**10)
    return float((out.double() / x.double().exp() - 1.0).abs().max())


def cut_off(k):
    """Of products that are exact in tf32 and sums of k that are not: what they lose, and how many are too large."""
    m = n = 16
    x, y, out = 1.0 + torch.rand(m, k).bfloat16(), 1.0 + torch.rand(n, k).bfloat16(), torch.empty(m, n)
    multiply[(1,)](x.float(), y.float(), torch.zeros(m, n), out, M=m, N=n, K=k, HOW="tf32x3")
    lost = 1.0 - out.double() / (x.double() @ y.double().T)
    return {"mean": float(lost.mean()), "above": int((lost < 0).sum())}


def in_parts():
    """The errors of products whose factors are 2^shift apart from 1, on either side."""
    return {str(shift): product_error(torch.float32, False, "tf32x3", shift) for shift in (0, 100, 107, 124)}


def with_infinite():
    """Whether a row with an infinite factor has infinite products, and whether the other rows are what they were."""
    m, n, k = SIZES
    x, y, z = torch.rand(m, k), torch.rand(n, k), torch.zeros(m, n)
    out, wild = torch.empty(m, n), torch.empty(m, n)
    multiply[(1,)](x, y, z, out, M=m, N=n, K=k, HOW="tf32x3")
    x[3, 5] = float("inf")
    multiply[(1,)](x, y, z, wild, M=m, N=n, K=k, HOW="tf32x3")
    rows = torch.arange(m) != 3
    return {"product": bool((wild[3] == float("inf")).all()), "others": torch.equal(wild[rows], out[rows])}


def differing(x, target):
    """How many numbers are not cast as torch casts them."""
    out = torch.empty(x.shape, dtype=target)
    convert[(1,)](x, out, SIZE=x.numel(), TO=TARGETS[target])
    return int((~torch.isclose(out, x.to(target), rtol=0, atol=0, equal_nan=True)).sum())


def samples():
    """Numbers of each dtype. Of bf16 all there are; of fp32 every exponent and both sides of every tie."""
    whole = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    every = (whole << 16).view(torch.float32)
    ties = ((whole << 16) | (2**15 - 1 + torch.randint(0, 3, whole.shape, dtype=torch.int32))).view(torch.float32)
    near = torch.randn(2**12)
    return {
        "bf16": every.bfloat16(),
        "fp32": ties,
        "fp16": near.half(),
        "fp64": near.double(),
        **{name: (near * 2**6).to(dtype) for name, dtype in INTEGERS.items()},
    }


def measured():
    torch.manual_seed(0)
    inputs = samples()
    within = inputs["bf16"][inputs["bf16"].abs() < 2**30]
    padded = torch.cat((within, within.new_zeros(2**16 - within.numel())))
    return {
        "right": interpreter.bf16_is_right(),
        "products": {f"{name}{'+' * a}": product_error(TYPES[name], a) for name in TYPES for a in (0, 1)},
        "to bf16": {name: differing(x, torch.bfloat16) for name, x in inputs.items() if name != "bf16"},
        "from bf16": {
            "fp32": differing(inputs["bf16"], torch.float32),
            "fp16": differing(inputs["bf16"], torch.float16),
            "int32": differing(padded, torch.int32),
        },
        "others": {"fp16": differing(inputs["fp32"], torch.float16), "int32": differing(inputs["fp16"], torch.int32)},
    }


def operations():
    return [InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl]


def with_verdict(verdict):
    """What mending does where the interpreter is always measured right, or always wrong."""
    real, before = interpreter.bf16_is_right, operations()
    interpreter.bf16_is_right = lambda: verdict
    result = interpreter.mend()
    interpreter.bf16_is_right = real
    return {"result": result, "untouched": before == operations()}


def main():
    found = {"shipped": measured(), "always right": with_verdict(True), "always wrong": with_verdict(False)}
    found["result"] = interpreter.mend()
    found["mended"] = measured()
    once = operations()
    found["again"] = {"result": interpreter.mend(), "untouched": once == operations()}
    interpreter.round_like_a_gpu()
    torch.manual_seed(1)
    found["tf32x3"] = in_parts()
    found["exp"] = {str(largest): exponential_error(largest) for largest in (0.5, 75)}
    found["cut off"] = {str(k): cut_off(k) for k in (512, 2048)}
    interpreter.round_like_a_gpu()
    torch.manual_seed(1)
    found["tf32x3 again"] = in_parts()
    found["fp32"] = {"124": product_error(torch.float32, False, "ieee", 124)}
    found["infinite"] = with_infinite()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
