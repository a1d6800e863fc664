"""The table of GLA on Triton. Imports no kernel language."""

from __future__ import annotations

from chunkwise.verifier.implementation import Implementation
from chunkwise_triton.common.rules import ARCHS, REQUIRES
from chunkwise_triton.gla import schedules

LEAN, FULL = "gla64@1", "gla-states64@1"

SPLIT = Implementation(
    "triton/gla/split",
    op="chunk_gla",
    rank=100,
    archs=ARCHS,
    requires=REQUIRES,
    schedule=schedules.split,
    forward="chunkwise_triton.gla.launch:forward",
    backward="chunkwise_triton.gla.launch:backward",
    compile="chunkwise_triton.gla.launch:compile",
    residuals=(LEAN, FULL),
    batch_invariant=True,
)

IMPLEMENTATIONS = (SPLIT,)
