"""The table of the gated delta rule on TileLang. Imports no kernel language."""

from __future__ import annotations

from dataclasses import replace

from chunkwise.verifier.implementation import Implementation
from chunkwise.verifier.refusal import Kind
from chunkwise.verifier.rules import Rule, dtype, one_of, same_dtype, size_at_most, size_multiple_of
from chunkwise_tilelang.gated_delta_rule import schedules, schedules_backward

NOT_UNASKED_WITH_GRADIENTS = Rule(
    name="gradients only where it is named",
    kind=Kind.SLOWER,
    reads=frozenset({"needs"}),
    holds=lambda f: not f.needs,
    message=lambda f: "its backward, as it is now, has not been through the whole suite on a GPU",
    remedy="name the implementation with backend= to run it all the same",
    violate=lambda f: replace(f, needs=frozenset({"q"})),
    satisfy=lambda f: replace(f, needs=frozenset()),
    against="triton/gated_delta_rule/split",
)

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
    slower=(NOT_UNASKED_WITH_GRADIENTS,),
    schedule=schedules_backward.schedule,
    forward="chunkwise_tilelang.gated_delta_rule.launch:forward",
    backward="chunkwise_tilelang.gated_delta_rule.launch_backward:backward",
    compile="chunkwise_tilelang.gated_delta_rule.launch_backward:compile",
    residuals=("gdn-wy64@1",),
)

IMPLEMENTATIONS = (FUSED,)
