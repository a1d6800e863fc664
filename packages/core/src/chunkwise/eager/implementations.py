"""The table of the built-in backend ``torch``: chunkwise PyTorch, right on any device."""

from __future__ import annotations

from dataclasses import dataclass

from chunkwise.verifier.facts import Facts
from chunkwise.verifier.implementation import Implementation


@dataclass(frozen=True)
class EagerSchedule:
    """How the chunkwise PyTorch code cuts a sequence.

    Args:
        chunk_size: rows of a chunk; the residual formats fix it, where they have chunks.
    """

    chunk_size: int


def chunks_of_64(facts: Facts) -> EagerSchedule:
    """Chunks of 64 rows fit every device: nothing is held on chip."""
    return EagerSchedule(chunk_size=64)


def chunks_as_asked(facts: Facts) -> EagerSchedule:
    """Chunks of the size that the call settles."""
    return EagerSchedule(chunk_size=facts.flag("chunk_size"))


GATED_DELTA_RULE = Implementation(
    "torch/gated_delta_rule/chunkwise",
    op="chunk_gated_delta_rule",
    rank=1000,
    archs=("any",),
    schedule=chunks_of_64,
    forward="chunkwise.eager.gated_delta_rule:forward",
    backward="chunkwise.eager.gated_delta_rule:backward",
    residuals=("gdn-wy64@2", "gdn-states64@1"),
)

DELTA_RULE = Implementation(
    "torch/delta_rule/chunkwise",
    op="chunk_delta_rule",
    rank=1000,
    archs=("any",),
    schedule=chunks_of_64,
    forward="chunkwise.eager.delta_rule:forward",
    backward="chunkwise.eager.delta_rule:backward",
    residuals=("delta-wy64@2", "delta-states64@1"),
)

SIMPLE_GLA = Implementation(
    "torch/simple_gla/chunkwise",
    op="chunk_simple_gla",
    rank=1000,
    archs=("any",),
    schedule=chunks_of_64,
    forward="chunkwise.eager.simple_gla:forward",
    backward="chunkwise.eager.simple_gla:backward",
    residuals=("simple-gla64@1", "simple-gla-states64@1"),
)

GLA = Implementation(
    "torch/gla/chunkwise",
    op="chunk_gla",
    rank=1000,
    archs=("any",),
    schedule=chunks_of_64,
    forward="chunkwise.eager.gla:forward",
    backward="chunkwise.eager.gla:backward",
    residuals=("gla64@1", "gla-states64@1"),
)

# It needs no promise: no exponent in it is above zero, whatever the gates are.
DPLR_DELTA_RULE = Implementation(
    "torch/dplr_delta_rule/chunkwise",
    op="chunk_dplr_delta_rule",
    rank=1000,
    archs=("any",),
    schedule=chunks_as_asked,
    forward="chunkwise.eager.dplr_delta_rule:forward",
    backward="chunkwise.eager.dplr_delta_rule:backward",
    residuals=tuple(f"dplr-{kept}{size}@1" for size in (16, 32, 64) for kept in ("wy", "states")),
)

SINK_ATTENTION = Implementation(
    "torch/sink_attention/blocked",
    op="sink_attention",
    rank=1000,
    archs=("any",),
    schedule=chunks_of_64,
    forward="chunkwise.eager.sink_attention:forward",
    backward="chunkwise.eager.sink_attention:backward",
    residuals=("attention-lse@1",),
)

IMPLEMENTATIONS = (GATED_DELTA_RULE, DELTA_RULE, SIMPLE_GLA, GLA, DPLR_DELTA_RULE, SINK_ATTENTION)
