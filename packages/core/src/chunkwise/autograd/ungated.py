"""An op without a gate on what was written for its gated form: gates of zero go in, and their gradient stays behind.

A gate of zero is exact: every decay is ``exp(0) = 1``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from chunkwise.autograd.residuals import Residuals

Forward = Callable[..., tuple[tuple[Tensor, Tensor | None], dict[str, Tensor]]]
Backward = Callable[..., dict[str, Tensor]]
GATE_SUMS = "g_cumsum"
"""What the gated formats keep of the gates; the others leave it out."""


def without_gate(forward: Forward, backward: Backward, formats: Mapping[str, str]) -> tuple[Forward, Backward]:
    """A forward and a backward of the op without a gate.

    Args:
        forward, backward: of the gated op, as a backend offers them; ``g`` has the axes of ``beta``.
        formats: for each residual format of the op without a gate, the one of the gated op that has :data:`GATE_SUMS`
            beside the same fields.
    """

    def run_forward(schedule: Any, inputs: Any, save: str | None) -> Any:
        outputs, tensors = forward(schedule, _gated(inputs), None if save is None else formats[save])
        return outputs, {name: tensor for name, tensor in tensors.items() if name != GATE_SUMS}

    def run_backward(schedule: Any, inputs: Any, residuals: Residuals, grads: Any, needs: frozenset[str]) -> Any:
        given = _gated(inputs)
        saved = Residuals(formats[residuals.format], {**residuals.tensors, GATE_SUMS: given.g})
        return backward(schedule, given, saved, grads, needs)

    return run_forward, run_backward


def _gated(inputs: Any) -> SimpleNamespace:
    return SimpleNamespace(**inputs._asdict(), g=torch.zeros_like(inputs.beta, dtype=torch.float32))
