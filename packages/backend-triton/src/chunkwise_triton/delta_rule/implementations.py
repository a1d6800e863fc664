"""The table of the delta rule on Triton: the kernels of the gated delta rule. Imports no kernel language."""

from __future__ import annotations

from chunkwise.verifier.facts import Facts
from chunkwise.verifier.implementation import Implementation
from chunkwise.verifier.refusal import DoesNotFit
from chunkwise_triton.common.rules import ARCHS, REQUIRES
from chunkwise_triton.gated_delta_rule import schedules


def as_gated(facts: Facts) -> Facts:
    """The facts of the call of the gated delta rule that runs: a value head for every head, and no gate."""
    return facts.with_size("HV", facts.size("H"))


def schedule(facts: Facts) -> schedules.Schedule | DoesNotFit:
    """That of the gated delta rule."""
    return schedules.schedule(as_gated(facts))


SPLIT = Implementation(
    "triton/delta_rule/split",
    op="chunk_delta_rule",
    rank=100,
    archs=ARCHS,
    requires=REQUIRES,
    schedule=schedule,
    forward="chunkwise_triton.delta_rule.launch:forward",
    backward="chunkwise_triton.delta_rule.launch:backward",
    compile="chunkwise_triton.delta_rule.launch:compile",
    residuals=("delta-wy64@2", "delta-states64@1"),
    batch_invariant=True,
)

IMPLEMENTATIONS = (SPLIT,)
