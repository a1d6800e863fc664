"""The table of the delta rule on TileLang: the kernels of the gated delta rule. Imports no kernel language."""

from __future__ import annotations

from dataclasses import replace

from chunkwise.verifier.facts import Facts
from chunkwise.verifier.implementation import Implementation
from chunkwise.verifier.refusal import DoesNotFit
from chunkwise_tilelang.gated_delta_rule import schedules_backward
from chunkwise_tilelang.gated_delta_rule.implementations import FULL, LEAN, REQUIRES
from chunkwise_tilelang.gated_delta_rule.schedules import Schedule

GATED = {"delta-wy64@2": LEAN, "delta-states64@1": FULL}
"""The format that the kernels save for each of the op's own, without the gates' sums."""


def as_gated(facts: Facts) -> Facts:
    """The facts of the call of the gated delta rule that runs: a value head for every head, gates in fp32."""
    saved = None if facts.residuals is None else GATED[facts.residuals]
    return replace(facts.with_size("HV", facts.size("H")), dtypes={**facts.dtypes, "g": "fp32"}, residuals=saved)


def schedule(facts: Facts) -> Schedule | DoesNotFit:
    """That of the gated delta rule."""
    return schedules_backward.schedule(as_gated(facts))


FUSED = Implementation(
    "tilelang/delta_rule/fused",
    op="chunk_delta_rule",
    rank=10,
    archs=("sm90",),
    requires=REQUIRES,
    schedule=schedule,
    forward="chunkwise_tilelang.delta_rule.launch:forward",
    backward="chunkwise_tilelang.delta_rule.launch:backward",
    compile="chunkwise_tilelang.delta_rule.launch:compile",
    residuals=tuple(GATED),
)

IMPLEMENTATIONS = (FUSED,)
