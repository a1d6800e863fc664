"""The table of the gated delta rule on TileLang. Imports no kernel language."""

from __future__ import annotations

from chunkwise.verifier.implementation import Implementation
from chunkwise.verifier.rules import dtype, one_of, same_dtype, size_at_most, size_multiple_of
from chunkwise_tilelang.gated_delta_rule import schedules, schedules_backward

LEAN, FULL = "gdn-wy64@2", "gdn-states64@1"
"""The residual formats, of which the full one keeps S, x and w of every chunk beside what both keep."""

REQUIRES = (
    one_of("K", 64, 128),  # the state of 64 columns of V stands in a warpgroup's registers
    size_multiple_of("V", schedules.GROUP_WIDTH),
    size_at_most("V", 256),
    dtype("q", "bf16", "fp16"),
    same_dtype("q k v"),
)
"""What the kernels cannot do on any op."""

FUSED = Implementation(
    "tilelang/gated_delta_rule/fused",
    op="chunk_gated_delta_rule",
    rank=10,
    archs=("sm90",),
    requires=REQUIRES,
    schedule=schedules_backward.schedule,
    forward="chunkwise_tilelang.gated_delta_rule.launch:forward",
    backward="chunkwise_tilelang.gated_delta_rule.launch_backward:backward",
    compile="chunkwise_tilelang.gated_delta_rule.launch_backward:compile",
    residuals=(LEAN, FULL),
)

IMPLEMENTATIONS = (FUSED,)
