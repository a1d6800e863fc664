"""Cases drawn as implementations accept them: only what a rule refuses moves, and no further than to its neighbour."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chunkwise.ops import OPS
from chunkwise.verifier.rules import Rule, centred_gates_fit, dtype, one_of, same_dtype, size_multiple_of
from chunkwise_testing import sampling
from chunkwise_testing.fitting import fitted_to
from chunkwise_testing.sampling import variant
from chunkwise_testing.study import Sample
from chunkwise_testing.suite.base import small_case

OP = "chunk_gated_delta_rule"


def pair(*rules: Rule, residuals: str | None = None) -> Any:
    return SimpleNamespace(implementations=(SimpleNamespace(rules=rules),), format=residuals)


NARROW = pair(one_of("K", 64, 128), size_multiple_of("V", 64), dtype("q", "bf16", "fp16"), same_dtype("q k v"))


def drawn(plan: str = "fp32") -> dict[str, torch.Tensor]:
    return dict(sampling.draw(OPS[OP], small_case(OP, "fitted"), sampling.PLANS[plan]).tensors)


def test_nothing_moves_that_is_accepted() -> None:
    plain = drawn()
    with fitted_to(pair(one_of("K", 24), dtype("q", "fp32")), "cpu"):
        fitted = drawn()
    assert all(torch.equal(plain[name], fitted[name]) for name in plain)


def test_widths_and_dtypes_move_to_the_nearest() -> None:
    with fitted_to(NARROW, "cpu"):
        tensors = drawn()
    assert tensors["q"].shape[-1] == tensors["k"].shape[-1] == 64
    assert tensors["v"].shape[-1] == 128  # unlike widths stay unlike
    assert tensors["initial_state"].shape[-2:] == (64, 128)
    assert {tensors[name].dtype for name in "qkv"} == {torch.bfloat16}
    assert tensors["g"].dtype == torch.bfloat16  # a plan of one dtype stays one
    assert tensors["initial_state"].dtype == torch.float32


def test_a_cell_keeps_its_dtypes() -> None:
    with fitted_to(NARROW, "cpu", cell=True):
        tensors = drawn()
    assert tensors["q"].dtype == torch.float32
    assert tensors["q"].shape[-1] == 64


def test_studies_are_kept_apart() -> None:
    sample = Sample(OP, small_case(OP, "kept", 5), "bf16")
    plain = sample.study()
    with fitted_to(NARROW, "cpu"):
        fitted = sample.study()
    assert plain.call.tensors["q"].shape[-1] != fitted.call.tensors["q"].shape[-1] == 64
    assert sample.study() is plain


@pytest.mark.parametrize("reads", [{"T"}, {"needs"}, {"flag:ragged", "K"}])
def test_rules_that_read_more_move_nothing(reads: set[str]) -> None:
    rule = one_of("K", 64)
    other = Rule(**{**rule.__dict__, "reads": frozenset(reads)})
    with fitted_to(pair(other), "cpu"):
        assert drawn()["q"].shape[-1] == drawn()["k"].shape[-1] == 24


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("options", [{}, {"safe_gate": True}])
def test_what_a_rule_wants_promised_is_promised_and_kept(chunk_size: int, options: dict[str, bool]) -> None:
    op: Any = OPS["chunk_dplr_delta_rule"]
    case = variant(small_case("chunk_dplr_delta_rule", "promised"), draw={"gk": "strong"}, options=options)
    assert float(sampling.draw(op, case).tensors["gk"].min()) < (-4.9 if options else -10)
    with fitted_to(pair(centred_gates_fit(), residuals=f"dplr-wy{chunk_size}@1"), "cpu"):
        call = sampling.draw(op, case)
    bound = call.options.get("lower_bound", -5.0)
    assert (chunk_size / 2 + 1) * -bound * math.log2(math.e) <= 124
    assert float(call.tensors["gk"].min()) == pytest.approx(bound)
