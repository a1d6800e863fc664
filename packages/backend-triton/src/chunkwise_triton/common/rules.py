"""Where the kernels can run, and what they cannot do on any op. Imports no kernel language."""

from __future__ import annotations

import dataclasses

from chunkwise.verifier.device import FAKE_DEVICES, INTERPRETER, DeviceFacts, interpreting
from chunkwise.verifier.facts import Facts
from chunkwise.verifier.implementation import resolve
from chunkwise.verifier.refusal import Kind
from chunkwise.verifier.rules import Rule, same_dtype, size_at_most

ARCHS = ("sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121", "interpreter")


_AS_SHIPPED = dataclasses.replace(INTERPRETER, name="Triton interpreter, as Triton ships it")


def with_activations(facts: Facts, dtype: str) -> Facts:
    """The same facts with q, k, v and, where they are given, a and b of one dtype."""
    for name in ("q", "k", "v", *filter(facts.given, ("a", "b"))):
        facts = facts.with_dtype(name, dtype)
    return facts


def _without_bf16(facts: Facts) -> Facts:
    if all(facts.dtype(name) in ("bf16", None) for name in ("q", "k", "v", "a", "b")):
        return with_activations(facts, "fp16")
    return facts.with_dtype("v", "fp16") if facts.dtype("v") == "bf16" else facts


def _multiplies_bf16(device: DeviceFacts) -> bool:
    """Whether products of bf16 come out right: an interpreter's only where this process has it, and measured so."""
    if device.kind != "interpreter":
        return True
    if device != INTERPRETER or not interpreting():
        return False
    try:
        return bool(resolve("chunkwise_triton.common.interpreted:bf16_is_right")())
    except ImportError:  # without triton or numpy nothing is interpreted
        return False


NO_INTERPRETED_BF16 = Rule(
    name="bf16 is not interpreted",
    kind=Kind.UNSUPPORTED,
    reads=frozenset({"device", "dtype:v"}),
    holds=lambda f: f.dtype("v") != "bf16" or _multiplies_bf16(f.device),
    message=lambda f: "Triton's interpreter computes products of bf16 wrongly",
    remedy="use fp16 or fp32 under TRITON_INTERPRET=1",
    violate=lambda f: with_activations(f.on(_AS_SHIPPED), "bf16"),
    satisfy=_without_bf16,
)


def wide_fp32_needs_hopper(*widened: str) -> Rule:
    """The scans hold K rows of a state as operands in registers where the matrix instruction does not read shared
    memory; ``widened`` are the activations whose operands are fp32."""

    def fits(facts: Facts) -> bool:
        # Beyond 256 another rule refuses already, and on every device.
        many_rows = facts.dtype("v") in widened and 128 < facts.size("K") <= 256
        return facts.device.kind != "cuda" or facts.device.arch == "sm90" or not many_rows

    others = [dtype for dtype in ("bf16", "fp16") if dtype not in widened]
    return Rule(
        name="fp32 beyond K = 128 needs Hopper",
        kind=Kind.UNSUPPORTED,
        reads=frozenset({"device", "dtype:v", "K"}),
        holds=fits,
        message=lambda f: f"states of {f.size('K')} rows in fp32 do not fit the registers of {f.device.arch}",
        remedy=f"use {' or '.join(others)}, or K <= 128",
        violate=lambda f: with_activations(f.on(FAKE_DEVICES["A100"]), "fp32").with_size("K", 256),
        satisfy=lambda f: f.with_size("K", min(f.size("K"), 128)),
    )


def anywhere(of_one_dtype: str = "q k v") -> tuple[Rule, ...]:
    """What no kernel can do on any device."""
    return (same_dtype(of_one_dtype), size_at_most("K", 256), size_at_most("V", 256), NO_INTERPRETED_BF16)


ANYWHERE = anywhere()
REQUIRES = (*ANYWHERE, wide_fp32_needs_hopper("fp32"))
