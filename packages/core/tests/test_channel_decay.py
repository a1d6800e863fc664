"""Products of rows under decays of single channels, against the plain sum over channels in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chunkwise.eager.channel_decay import (
    LOWEST_GATE,
    channel_decays,
    pair_products,
    pair_products_backward,
    state_gates_gradient,
)

SIZES = (2, 3)  # chunks, heads
WIDTH = 5


def gates(kind: str, rows: int) -> Tensor:
    shape = (*SIZES, rows, WIDTH)
    moderate = -torch.rand(shape)
    choice = torch.randint(0, 4, shape)
    strong = torch.where(choice == 0, -20.0, torch.where(choice == 1, 0.0, moderate))
    resets = torch.where(torch.rand(shape) < 0.1, -torch.inf, moderate)
    return {"moderate": moderate, "zero": torch.zeros(shape), "strong": strong, "resets": resets}[kind]


def plain(g: Tensor, left: list[Tensor], right: list[Tensor]) -> Tensor:
    sums = g.cumsum(-2)
    rows = g.shape[-2]
    lower = torch.ones(rows, rows, dtype=torch.bool).tril()[..., None]
    exponents = torch.where(lower, sums.unsqueeze(-2) - sums.unsqueeze(-3), -torch.inf)
    found = [[(x.unsqueeze(-2) * exponents.exp() * y.unsqueeze(-3)).sum(-1) for y in right] for x in left]
    return torch.stack([torch.stack(row) for row in found])


@pytest.mark.parametrize("rows", [1, 2, 8, 64])
@pytest.mark.parametrize("kind", ["moderate", "zero", "strong", "resets"])
def test_pairs_and_their_gradients(kind: str, rows: int) -> None:
    torch.manual_seed(rows)
    g = gates(kind, rows)
    left, right = ([torch.randn(*SIZES, rows, WIDTH) for _ in range(count)] for count in (2, 3))
    exact = [x.double().requires_grad_() for x in (g.clamp(min=LOWEST_GATE), *left, *right)]
    expected = plain(exact[0], exact[1:3], exact[3:])
    weights = torch.randn(expected.shape)
    expected.backward(weights.double())
    decays = channel_decays(g.clone())
    torch.testing.assert_close(pair_products(decays, left, right).double(), expected.detach(), rtol=1e-5, atol=1e-5)
    d_left, d_right, d_g = pair_products_backward(decays, left, right, weights)
    for found, leaf in zip([d_g, *d_left, *d_right], exact, strict=True):
        torch.testing.assert_close(found.double(), leaf.grad, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["moderate", "strong", "resets"])
def test_decays_to_the_ends_of_a_chunk(kind: str) -> None:
    torch.manual_seed(0)
    g = gates(kind, 16)
    exact = g.double().clamp(min=LOWEST_GATE)
    decays, sums = channel_decays(g.clone()), exact.cumsum(-2)
    torch.testing.assert_close(decays.from_start.double(), sums.exp(), rtol=1e-6, atol=1e-30)
    torch.testing.assert_close(decays.to_end.double(), (sums[..., -1:, :] - sums).exp(), rtol=1e-5, atol=1e-30)
    assert bool((decays.from_start <= 1).all() and (decays.to_end <= 1).all())


def test_gradient_of_gates_through_states() -> None:
    torch.manual_seed(0)
    g = gates("moderate", 8).double().requires_grad_()
    entry, exit = torch.randn(2, *g.shape)
    whole = torch.randn(*SIZES, WIDTH)
    sums = g.cumsum(-2)
    (sums * entry + (sums[..., -1:, :] - sums) * exit).sum().add((sums[..., -1, :] * whole).sum()).backward()
    torch.testing.assert_close(state_gates_gradient(entry, exit, whole).double(), g.grad, rtol=1e-5, atol=1e-5)
