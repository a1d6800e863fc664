"""What the parity suites do not know of simple GLA: the gate that is one number a head."""

from __future__ import annotations

import pytest
import torch

import chunkwise


def inputs(heads: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 70, heads, width) for width in (16, 16, 24)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_g_gamma_is_a_gate_for_every_token(dtype: torch.dtype) -> None:
    q, k, v = inputs()
    gamma = torch.tensor([-0.01, -0.3, 0.0], dtype=dtype, requires_grad=True)
    g = gamma.detach().float().expand(2, 70, 3).contiguous().requires_grad_()
    by_head, state = chunkwise.chunk_simple_gla(q, k, v, g_gamma=gamma, output_final_state=True)
    by_token, other = chunkwise.chunk_simple_gla(q, k, v, g, output_final_state=True)
    assert torch.equal(by_head, by_token)
    assert torch.equal(state, other)
    weights = torch.randn_like(by_head)
    (by_head * weights).sum().backward()
    (by_token * weights).sum().backward()
    assert gamma.grad.dtype == dtype
    torch.testing.assert_close(gamma.grad.float(), g.grad.sum((0, 1)), rtol=1e-5, atol=1e-5)
    assert bool((gamma.grad != 0).all())


def test_g_gamma_by_place_and_in_the_reference() -> None:
    q, k, v = inputs()
    gamma = torch.tensor([-0.01, -0.3, -1.0])
    by_place, _ = chunkwise.chunk_simple_gla(q, k, v, None, gamma)
    expected, _ = chunkwise.chunk_simple_gla.reference(q.double(), k.double(), v.double(), g_gamma=gamma)
    torch.testing.assert_close(by_place.double(), expected, rtol=1e-4, atol=1e-4)


def test_no_gate_is_a_gate_of_zero() -> None:
    q, k, v = inputs()
    without, _ = chunkwise.chunk_simple_gla(q, k, v)
    zero, _ = chunkwise.chunk_simple_gla(q, k, v, torch.zeros(2, 70, 3))
    assert torch.equal(without, zero)


def test_both_gates_are_refused() -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match=r"chunk_simple_gla: g and g_gamma were both given.*leave one out"):
        chunkwise.chunk_simple_gla(q, k, v, torch.zeros(2, 70, 3), torch.zeros(3))


@pytest.mark.parametrize(("gamma", "message"), [(torch.zeros(2), "axis H is 2"), (torch.zeros(1, 3), r"\[H\]")])
def test_g_gamma_of_a_wrong_shape(gamma: torch.Tensor, message: str) -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match=message):
        chunkwise.chunk_simple_gla(q, k, v, g_gamma=gamma)
