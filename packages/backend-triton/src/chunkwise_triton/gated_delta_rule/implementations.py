"""The table of the gated delta rule on Triton. Imports no kernel language."""

from __future__ import annotations

from chunkwise.verifier.implementation import Implementation
from chunkwise_triton.common.rules import ARCHS, REQUIRES
from chunkwise_triton.gated_delta_rule import schedules

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
    residuals=("gdn-wy64@2", "gdn-states64@1"),
    batch_invariant=True,
)

IMPLEMENTATIONS = (SPLIT,)
