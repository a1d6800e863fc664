"""The table of the gated delta rule on Triton. Imports no kernel language."""

from __future__ import annotations

from chunkwise.verifier.device import FAKE_DEVICES, INTERPRETER
from chunkwise.verifier.facts import Facts
from chunkwise.verifier.implementation import Implementation
from chunkwise.verifier.refusal import Kind
from chunkwise.verifier.rules import Rule, same_dtype, size_at_most
from chunkwise_triton.gated_delta_rule import schedules

ARCHS = ("sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121", "interpreter")


def _with_activations(facts: Facts, dtype: str) -> Facts:
    for name in ("q", "k", "v"):
        facts = facts.with_dtype(name, dtype)
    return facts


def _without_bf16(facts: Facts) -> Facts:
    if all(facts.dtype(name) == "bf16" for name in ("q", "k", "v")):
        return _with_activations(facts, "fp16")
    return facts.with_dtype("v", "fp16") if facts.dtype("v") == "bf16" else facts


NO_INTERPRETED_BF16 = Rule(
    name="bf16 is not interpreted",
    kind=Kind.UNSUPPORTED,
    reads=frozenset({"device", "dtype:v"}),
    holds=lambda f: not (f.device.kind == "interpreter" and f.dtype("v") == "bf16"),
    message=lambda f: "Triton's interpreter computes products of bf16 wrongly",
    remedy="use fp16 or fp32 under TRITON_INTERPRET=1",
    violate=lambda f: _with_activations(f.on(INTERPRETER), "bf16"),
    satisfy=_without_bf16,
)


def _many_rows_in_registers(facts: Facts) -> bool:
    # Beyond 256 another rule refuses already, and on every device.
    return facts.dtype("v") == "fp32" and 128 < facts.size("K") <= 256


# The scans hold K rows of a state as operands in registers where the matrix instruction does not read shared memory.
WIDE_FP32_NEEDS_HOPPER = Rule(
    name="fp32 beyond K = 128 needs Hopper",
    kind=Kind.UNSUPPORTED,
    reads=frozenset({"device", "dtype:v", "K"}),
    holds=lambda f: f.device.kind != "cuda" or f.device.arch == "sm90" or not _many_rows_in_registers(f),
    message=lambda f: f"states of {f.size('K')} rows in fp32 do not fit the registers of {f.device.arch}",
    remedy="use bf16 or fp16, or K <= 128",
    violate=lambda f: _with_activations(f.on(FAKE_DEVICES["A100"]), "fp32").with_size("K", 256),
    satisfy=lambda f: f.with_size("K", min(f.size("K"), 128)),
)

REQUIRES = (
    same_dtype("q k v"),
    size_at_most("K", 256),
    size_at_most("V", 256),
    NO_INTERPRETED_BF16,
    WIDE_FP32_NEEDS_HOPPER,
)

SPLIT = Implementation(
    "triton/gated_delta_rule/split",
    op="chunk_gated_delta_rule",
    rank=100,
    archs=ARCHS,
    requires=REQUIRES,
    schedule=schedules.schedule,
    forward="chunkwise_triton.gated_delta_rule.launch:forward",
    backward="chunkwise_triton.gated_delta_rule.launch:backward",
    compile="chunkwise_triton.gated_delta_rule.launch:compile",
    residuals=("gdn-wy64@1", "gdn-states64@1"),
)

IMPLEMENTATIONS = (SPLIT,)
