"""Launches of the delta rule: those of the gated delta rule, under gates of zero.

Zeros take four bytes a token and head to read, where q, k, v and o take a thousand: a case without gates would make a
second one of every kernel and save nothing that can be measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from chunkwise.verifier.facts import Facts
from chunkwise_tilelang.delta_rule.implementations import GATED, as_gated
from chunkwise_tilelang.gated_delta_rule import launch, launch_backward
from chunkwise_tilelang.gated_delta_rule.schedules import Schedule


def forward(
    schedule: Schedule, inputs: Any, save: str | None
) -> tuple[tuple[Tensor, Tensor | None], dict[str, Tensor]]:
    """``(o, final_state)`` and the residuals of the format ``save``, if any."""
    outputs, saved = launch.forward(schedule, _with_gates(inputs), None if save is None else GATED[save])
    return outputs, {name: kept for name, kept in saved.items() if name != "g_cumsum"}


def backward(
    schedule: Schedule, inputs: Any, residuals: Any, grads: tuple[Tensor | None, Tensor | None], needs: frozenset[str]
) -> dict[str, Tensor]:
    """The gradients named in ``needs``, from the gradients of o and of final_state."""
    gated = _with_gates(inputs)
    saved = SimpleNamespace(tensors={**residuals.tensors, "g_cumsum": gated.g})
    return launch_backward.backward(schedule, gated, saved, grads, needs)


def _with_gates(inputs: Any) -> SimpleNamespace:
    return SimpleNamespace(**inputs._asdict(), g=inputs.beta.new_zeros(inputs.beta.shape, dtype=torch.float32))


def compile(schedule: Schedule, facts: Facts, parts: Sequence[str]) -> None:
    """Build the kernels of a call's parts."""
    launch_backward.compile(schedule, as_gated(facts), parts)
