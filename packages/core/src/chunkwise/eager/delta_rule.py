"""`chunk_delta_rule` in chunkwise PyTorch: the gated delta rule with gates of zero."""

from __future__ import annotations

from chunkwise.autograd.ungated import without_gate
from chunkwise.eager import gated_delta_rule

forward, backward = without_gate(
    gated_delta_rule.forward,
    gated_delta_rule.backward,
    {"delta-wy64@2": gated_delta_rule.LEAN, "delta-states64@1": gated_delta_rule.FULL},
)
