"""Muon for the matrices inside the blocks, AdamW for everything else, one schedule for both."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

WARMUP_STEPS = 10
DECAY_FROM = 0.3  # the share of a run after which the learning rate falls linearly to zero


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised: each matrix moves by `lr * U V^T` of its gradient.

    Five Newton-Schulz steps of a quintic bring all singular values near one (Jordan, 2024). For [m, n] matrices.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves every matrix that has a gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros_like(matrix)
                state["momentum"].mul_(group["momentum"]).add_(matrix.grad)
                update = orthogonalised(matrix.grad + group["momentum"] * state["momentum"])
                # A tall matrix gets a longer step, so that its outputs change as much as a square one's.
                stretch = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
                matrix.add_(update, alpha=-group["lr"] * stretch)


def orthogonalised(matrix: Tensor, iterations: int = 5) -> Tensor:
    """About `U V^T` for `matrix = U S V^T`: singular values between 0.7 and 1.2."""
    x = matrix / (matrix.norm() + 1e-7)
    wide = x if x.shape[0] <= x.shape[1] else x.mT
    for _ in range(iterations):
        gram = wide @ wide.mT
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.mT


class Optimizers:
    """The optimisers of a model, stepped together under one schedule."""

    def __init__(self, model: nn.Module, muon_lr: float, embedding_lr: float, other_lr: float) -> None:
        matrices, embeddings, others = [], [], []
        for name, parameter in model.named_parameters():
            if name.startswith("embedding."):
                embeddings.append(parameter)
            elif name.startswith("blocks.") and parameter.ndim == 2 and min(parameter.shape) >= 16:
                matrices.append(parameter)
            else:
                others.append(parameter)
        groups = [{"params": embeddings, "lr": embedding_lr}, {"params": others, "lr": other_lr}]
        adamw = torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
        self.parts: list[torch.optim.Optimizer] = [Muon(matrices, lr=muon_lr), adamw]
        self._peaks = [[group["lr"] for group in part.param_groups] for part in self.parts]

    def step(self, factor: float) -> None:
        """One update at `factor` times the peak learning rates; clears the gradients."""
        for part, peaks in zip(self.parts, self._peaks, strict=True):
            for group, peak in zip(part.param_groups, peaks, strict=True):
                group["lr"] = factor * peak
            part.step()
            part.zero_grad()

    def state_dict(self) -> list[dict[str, Any]]:
        """The state of each optimiser."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Takes over what `state_dict` gave."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def learning_rate_factor(step: int, progress: float) -> float:
    """Share of the peak rate at a step and a progress in [0, 1]: warm-up, plateau, linear fall to zero."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    return warmup * min(1.0, max(0.0, 1.0 - progress) / (1.0 - DECAY_FROM))
