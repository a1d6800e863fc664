"""The table of simple GLA on Triton. Imports no kernel language."""

from __future__ import annotations

from chunkwise.verifier.device import FAKE_DEVICES
from chunkwise.verifier.facts import Facts
from chunkwise.verifier.implementation import Implementation
from chunkwise.verifier.refusal import Kind
from chunkwise.verifier.rules import Rule
from chunkwise_triton.common.rules import ANYWHERE, ARCHS, REQUIRES, with_activations
from chunkwise_triton.common.schedules import fills
from chunkwise_triton.simple_gla import schedules

LEAN, FULL = "simple-gla64@1", "simple-gla-states64@1"

SPLIT = Implementation(
    "triton/simple_gla/split",
    op="chunk_simple_gla",
    rank=100,
    archs=ARCHS,
    requires=REQUIRES,
    schedule=schedules.split,
    forward="chunkwise_triton.simple_gla.launch:forward",
    backward="chunkwise_triton.simple_gla.launch:backward",
    compile="chunkwise_triton.simple_gla.launch:compile",
    residuals=(LEAN, FULL),
    batch_invariant=True,
)

# With fp32 operands the kernel's state and its products do not fit the registers together.
ONE_PASS_IN_16_BIT = Rule(
    name="one pass is for 16 bit",
    kind=Kind.UNSUPPORTED,
    reads=frozenset({"device", "dtype:v"}),
    holds=lambda f: f.device.kind != "cuda" or f.dtype("v") != "fp32",
    message=lambda f: "v is fp32, expected bf16 or fp16",
    remedy=f"use bf16 or fp16, or let {SPLIT.name} run",
    violate=lambda f: with_activations(f.on(FAKE_DEVICES["H200"]), "fp32").with_size("K", min(f.size("K"), 128)),
    satisfy=lambda f: with_activations(f, "bf16") if f.dtype("v") == "fp32" else f,
)


def _blocks(facts: Facts) -> int:
    return facts.size("N") * facts.size("H") * -(-facts.size("V") // schedules.FUSED_COLUMNS)


# A program walks its sequence alone: with fewer programs than multiprocessors the rest of the device idles, while split
# takes the outputs of all chunks at once.
STATES_FILL_THE_DEVICE = Rule(
    name="states fill the device",
    kind=Kind.SLOWER,
    reads=frozenset({"device", "N", "H", "V"}),
    holds=lambda f: fills(f, schedules.FUSED_COLUMNS, "H"),
    message=lambda f: f"{_blocks(f)} column blocks of states, fewer than {f.device.sm_count} multiprocessors",
    remedy="name the implementation with backend= to run it all the same",
    violate=lambda f: f.on(FAKE_DEVICES["H200"]).with_size("N", 1).with_size("H", 1),
    satisfy=lambda f: f.with_size("N", max(f.size("N"), f.device.sm_count)),
    against=SPLIT.name,
)

FUSED = Implementation(
    "triton/simple_gla/fused",
    op="chunk_simple_gla",
    rank=90,
    # Where the matrix instruction does not read memory, the state is in registers twice: 15 KB of spills at K = 256.
    archs=("sm90", "interpreter"),
    requires=(*ANYWHERE, ONE_PASS_IN_16_BIT),
    slower=(STATES_FILL_THE_DEVICE,),
    schedule=schedules.fused,
    forward="chunkwise_triton.simple_gla.launch:forward_fused",
    compile="chunkwise_triton.simple_gla.launch:compile",
    residuals=(LEAN,),
    batch_invariant=True,
)

IMPLEMENTATIONS = (SPLIT, FUSED)
