"""Launches of the delta rule: those of the gated delta rule, with gates of zero."""

from __future__ import annotations

from collections.abc import Sequence

from chunkwise.autograd.ungated import without_gate
from chunkwise.verifier.facts import Facts
from chunkwise_triton.delta_rule.implementations import as_gated
from chunkwise_triton.gated_delta_rule import launch
from chunkwise_triton.gated_delta_rule.schedules import Schedule

forward, backward = without_gate(
    launch.forward, launch.backward, {"delta-wy64@1": "gdn-wy64@1", "delta-states64@1": "gdn-states64@1"}
)


def compile(schedule: Schedule, facts: Facts, parts: Sequence[str]) -> None:
    """Build the kernels of a call's parts."""
    launch.compile(schedule, as_gated(facts), parts)
