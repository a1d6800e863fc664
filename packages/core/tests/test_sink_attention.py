"""What the parity suites do not know of sink attention: memory, its only residual format, its cost, bad heads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import chunkwise
from chunkwise.autograd.residuals import Residuals
from chunkwise.eager import sink_attention as eager
from chunkwise.eager.calls import elements_at_once
from chunkwise.eager.implementations import EagerSchedule


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return found


def inputs(tokens: int, window: int | None) -> Any:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, tokens, heads, 16) for heads in (4, 2, 2))
    offsets = {f"cu_seqlens_{side}{host}": None for side in "qk" for host in ("", "_cpu")}
    options = {"scale": 0.25, "window_size": window, "causal": True, "return_lse": False}
    return SimpleNamespace(q=q, k=k, v=v, sinks=torch.zeros(4), **offsets, **options)


@pytest.mark.parametrize(("window", "tokens"), [(64, 16_384), (None, 4096)])
def test_no_tensor_grows_with_the_product_of_lengths(window: int | None, tokens: int) -> None:
    given, schedule = inputs(tokens, window), EagerSchedule(64)
    with Largest() as largest:
        (o, _), saved = eager.forward(schedule, given, "attention-lse@1")
        residuals = Residuals("attention-lse@1", {**saved, "o": o})
        eager.backward(schedule, given, residuals, (o, None), frozenset("qkv") | {"sinks"})
    rows = max(given.q.numel(), elements_at_once(torch.device("cpu")))
    assert largest.elements <= rows < 4 * tokens * tokens // 8


def test_a_residual_policy_without_a_format_of_its_own_leaves_the_only_one() -> None:
    q, k, v = (torch.randn(1, 5, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    with chunkwise.prefer(residuals="full"):
        explanation = chunkwise.explain(chunkwise.sink_attention, q, k, v, torch.zeros(4))
        chunkwise.sink_attention(q, k, v, torch.zeros(4)).sum().backward()
    assert str(explanation.route).endswith("residuals attention-lse@1")
    assert q.grad is not None
    with (
        chunkwise.prefer(residuals="gdn-wy64@2"),
        pytest.raises(ValueError, match=r"no residual format.*attention-lse@1"),
    ):
        chunkwise.sink_attention(q, k, v, torch.zeros(4))


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, 4 + 5 + 6),
        ({"window_size": 5}, 4 + 5 + 5),
        ({"causal": False}, 3 * 6),
    ],
)
def test_cost_counts_the_keys_in_sight(options: dict[str, Any], pairs: int) -> None:
    sizes = {"B": 2, "T": 3, "S": 6, "HQ": 4, "HK": 2, "D": 8}
    cost = chunkwise.sink_attention.declaration.promises.cost({**sizes, **options}, 2)
    assert cost.flops == 2 * 4 * 8 * pairs * 4
    assert cost.bytes == 2 * 8 * (2 * 3 * 4 + 2 * 6 * 2) * 2


def test_query_heads_not_a_multiple() -> None:
    q, k = torch.randn(1, 5, 3, 8), torch.randn(1, 5, 2, 8)
    with pytest.raises(ValueError, match=r"HQ = 3 is not a multiple of HK = 2.*give HQ as a multiple of HK"):
        chunkwise.sink_attention(q, k, k, torch.zeros(3))


def test_a_key_with_nearly_all_the_weight() -> None:
    """The gradient of a score is P (1 - P) D . v then: of delta = o . D, bf16's rounding of o would leave nothing.

    1 - P is 6e-4 on average; rounded so, the gradient of a score has a relative error of 1.1.
    """
    torch.manual_seed(0)
    q, k, v, d_o = (torch.randn(1, 50, 2, 16).bfloat16() for _ in range(4))
    sinks = torch.full((2,), -8.0)

    def gradients(dtype: torch.dtype, function: Any) -> tuple[torch.Tensor, ...]:
        given = [x.to(dtype).requires_grad_() for x in (q, k, v, sinks)]
        return torch.autograd.grad(function(*given), given[:2], d_o.to(dtype))

    def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(0.25 * (q * k).sum(-1, keepdim=True) - sinks.unsqueeze(-1)) * v

    found = gradients(
        torch.bfloat16, lambda *given: chunkwise.sink_attention(*given, window_size=1, scale=0.25, backend="torch")
    )
    for got, want in zip(found, gradients(torch.float64, exact), strict=True):
        assert (got.double() - want).norm() < 0.01 * want.norm()
