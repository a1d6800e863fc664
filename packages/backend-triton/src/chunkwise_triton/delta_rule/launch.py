"""Launches of the delta rule: those of the gated delta rule, whose kernels then read no gate."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from chunkwise.verifier.facts import Facts
from chunkwise_triton.delta_rule.implementations import as_gated
from chunkwise_triton.gated_delta_rule import launch
from chunkwise_triton.gated_delta_rule.schedules import Schedule


def forward(
    schedule: Schedule, inputs: Any, save: str | None
) -> tuple[tuple[Tensor, Tensor | None], dict[str, Tensor]]:
    """``(o, final_state)`` and the residuals of the format ``save``."""
    return launch.forward(schedule, _ungated(inputs), save)


def backward(
    schedule: Schedule, inputs: Any, residuals: Any, grads: tuple[Tensor | None, Tensor | None], needs: frozenset[str]
) -> dict[str, Tensor]:
    """The gradients named in ``needs``, from the gradients of o and of final_state."""
    return launch.backward(schedule, _ungated(inputs), residuals, grads, needs)


def _ungated(inputs: Any) -> SimpleNamespace:
    return SimpleNamespace(**inputs._asdict(), g=None)


def compile(schedule: Schedule, facts: Facts, parts: Sequence[str]) -> None:
    """Build the kernels of a call's parts."""
    launch.compile(schedule, as_gated(facts), parts)
