"""The table of attention with sinks on Triton. Imports no kernel language."""

from __future__ import annotations

from chunkwise.verifier.implementation import Implementation
from chunkwise.verifier.rules import same_dtype, size_at_most
from chunkwise_triton.common.rules import ARCHS, NO_INTERPRETED_BF16
from chunkwise_triton.sink_attention import schedules

LSE = "attention-lse@1"

BLOCKED = Implementation(
    "triton/sink_attention/blocked",
    op="sink_attention",
    rank=100,
    archs=ARCHS,
    requires=(same_dtype("q k v"), size_at_most("D", 256), NO_INTERPRETED_BF16),
    schedule=schedules.schedule,
    forward="chunkwise_triton.sink_attention.launch:forward",
    backward="chunkwise_triton.sink_attention.launch:backward",
    compile="chunkwise_triton.sink_attention.launch:compile",
    residuals=(LSE,),
    batch_invariant=True,
)

IMPLEMENTATIONS = (BLOCKED,)
