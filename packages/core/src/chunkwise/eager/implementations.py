"""The table of the built-in backend ``torch``: chunkwise PyTorch, right on any device."""

from __future__ import annotations

from dataclasses import dataclass

from chunkwise.verifier.facts import Facts
from chunkwise.verifier.implementation import Implementation


@dataclass(frozen=True)
class EagerSchedule:
    """How the chunkwise PyTorch code cuts a sequence.

    Args:
        chunk_size: rows of a chunk; the residual formats fix it.
    """

    chunk_size: int


def chunks_of_64(facts: Facts) -> EagerSchedule:
    """Chunks of 64 rows fit every device: nothing is held on chip."""
    return EagerSchedule(chunk_size=64)


GATED_DELTA_RULE = Implementation(
    "torch/gated_delta_rule/chunkwise",
    op="chunk_gated_delta_rule",
    rank=1000,
    archs=("any",),
    schedule=chunks_of_64,
    forward="chunkwise.eager.gated_delta_rule:forward",
    backward="chunkwise.eager.gated_delta_rule:backward",
    residuals=("gdn-wy64@1", "gdn-states64@1"),
)

DELTA_RULE = Implementation(
    "torch/delta_rule/chunkwise",
    op="chunk_delta_rule",
    rank=1000,
    archs=("any",),
    schedule=chunks_of_64,
    forward="chunkwise.eager.delta_rule:forward",
    backward="chunkwise.eager.delta_rule:backward",
    residuals=("delta-wy64@1", "delta-states64@1"),
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

IMPLEMENTATIONS = (GATED_DELTA_RULE, DELTA_RULE, SIMPLE_GLA)
