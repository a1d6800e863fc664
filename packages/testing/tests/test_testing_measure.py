"""The accuracy measure, the sampler and the oracle."""

import math

import pytest
import torch

from chunkwise.ops import OPS
from chunkwise_testing import sampling
from chunkwise_testing.oracle import evaluate, oracle, oracle_of_many, same_bits
from chunkwise_testing.routes import pairs_of
from chunkwise_testing.sampling import PARALLEL_EPS, PLANS, STRATEGIES, Call, ragged_argument, variant
from chunkwise_testing.study import Sample, study_of
from chunkwise_testing.suite.base import small_case
from chunkwise_testing.suite.memory import far_apart, unequal
from chunkwise_testing.suite.ragged import nan_padded, one_by_one
from chunkwise_testing.suite.states import in_pieces
from chunkwise_testing.tolerance import CHUNK, Parts, half_ulp, measure, moved, row_blocks

OP = "chunk_gated_delta_rule"
AXES = ("B", "T", "HV", "V")


def exact(call):
    """The call in fp64."""
    return call.mapped(lambda _, t: t.double() if t.is_floating_point() else t)


def plain(actual, reference, change=1e-6):
    blocks = row_blocks(reference.shape[1], None)
    changes = [torch.full((1, *reference.shape), change, dtype=torch.float64)]
    return measure("o", actual, reference, changes, parts=Parts(AXES, blocks), multiple=4.0)


# --- the measure ---------------------------------------------------------------------------------------------------


def test_exact_result_has_no_error():
    reference = torch.randn(2, 130, 3, 8, dtype=torch.float64)
    assert plain(reference, reference).over_budget == 0.0


def test_one_bad_head_of_one_chunk_is_enough():
    reference = torch.randn(2, 10 * CHUNK, 4, 8, dtype=torch.float64)
    bad = reference.clone()
    bad[1, CHUNK : 2 * CHUNK, 2] *= 1.0 + 1e-3
    found = plain(bad, reference)
    assert found.relative_l2 < 2e-4
    assert math.isclose(found.error, 1e-3, rel_tol=0.02)
    assert not found.ok


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_not_a_number_is_over_budget(value):
    reference = torch.randn(1, 5, 3, 8, dtype=torch.float64)
    bad = reference.clone()
    bad[0, 4, 2, 7] = value
    assert not plain(bad, reference).ok


def test_a_part_of_zeros_does_not_divide_by_zero():
    reference = torch.randn(1, 2 * CHUNK, 3, 8, dtype=torch.float64)
    reference[:, :CHUNK] = 0.0
    assert plain(reference, reference).ok
    wrong = reference.clone()
    wrong[0, 3, 1, 1] = 1.0
    assert not plain(wrong, reference).ok


def test_zeros_expected_and_anything_else_returned():
    zeros = torch.zeros(1, 5, 3, 8, dtype=torch.float64)
    assert plain(zeros, zeros, change=0.0).ok
    assert not plain(zeros + 1e-30, zeros, change=0.0).ok


def test_wrong_shape_raises():
    with pytest.raises(AssertionError, match="shape"):
        plain(torch.zeros(1, 5, 3, 7), torch.zeros(1, 5, 3, 8, dtype=torch.float64))


def test_budget_is_the_multiple_of_the_loss():
    reference = torch.ones(1, 4, 3, 8, dtype=torch.float64)
    just_in, just_out = reference + 3.99e-6, reference + 4.01e-6
    assert plain(just_in, reference).ok
    assert not plain(just_out, reference).ok


def test_rounding_to_the_dtype_is_within_budget():
    reference = torch.randn(1, 70, 3, 8, dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        found = plain(reference.to(dtype), reference, change=0.0)
        assert 0.0 < found.over_budget <= 0.25 + 1e-9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_ulp(dtype):
    x = torch.tensor([1.0, -1.0, 1.5, 3.0, 1000.0, 0.01], dtype=dtype)
    up = torch.nextafter(x.abs(), torch.full_like(x, 1e4)) if dtype != torch.float16 else None
    if up is not None:
        assert torch.equal(2 * half_ulp(x), up.double() - x.abs().double())
    assert torch.equal((moved(x, 3) - x.double()).abs(), half_ulp(x))
    assert float(half_ulp(torch.zeros(1, dtype=dtype))) > 0.0


def test_row_blocks_follow_sequences():
    assert row_blocks(130, None).tolist() == [0] * 64 + [1] * 64 + [2] * 2
    assert row_blocks(8, [0, 2, 2, 5]).tolist() == [0, 0, 1, 1, 1, 2, 2, 2]


# --- the sampler ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", sorted(PLANS))
def test_draws_honour_contracts_and_dtypes(plan):
    for case in OPS[OP].declaration.promises.cases:
        call = sampling.draw(OPS[OP], case, PLANS[plan])
        for contract in call.declaration.promises.contracts:
            contract.check(OP, call.tensors[contract.name])
        assert sampling.call_sizes(call).items() >= sampling.all_sizes(call.declaration, case).items()


def test_heads_differ():
    call = sampling.draw(OPS[OP], small_case(OP, "heads", 200))
    gates = call.tensors["g"].mean((0, 1))
    assert bool((gates[1:] < 1.5 * gates[:-1]).all())
    state = call.tensors["initial_state"]
    assert state.shape[-1] != state.shape[-2]


def test_one_case_has_the_same_values_in_every_dtype():
    case = OPS[OP].declaration.promises.cases[0]
    wide, narrow = (sampling.draw(OPS[OP], case, PLANS[p]) for p in ("fp32", "bf16"))
    assert torch.equal(wide.tensors["v"].bfloat16(), narrow.tensors["v"])


def test_strategies():
    spec = next(s for s in OPS[OP].declaration.tensors if s.name == "k")
    sizes = {"B": 1, "T": 50, "H": 5, "K": 16}
    draw = {name: strategy(spec, sizes, torch.Generator().manual_seed(0)) for name, strategy in STRATEGIES.items()}
    assert torch.allclose(draw["unit"].norm(dim=-1), torch.ones(1, 50, 5, dtype=torch.float64))
    spread = 1.0 - (draw["parallel"][:, :1] * draw["parallel"]).sum(-1)[0, 1:].mean(0)
    assert torch.equal(spread.argsort(), torch.tensor(PARALLEL_EPS).argsort())
    assert float(spread[0]) < 1e-4
    assert bool((draw["zero"] == 0).all())
    assert 0 < int(torch.signbit(draw["zero"]).sum()) < draw["zero"].numel()
    assert float(draw["strong"].max()) <= 0.0
    assert float(draw["strong"][..., 1, :].max()) < -19.0
    assert float(draw["near-one"].min()) >= 0.95
    assert 6e4 / 2.5 < float(draw["large"].abs().max()) <= 3e4


# --- the oracle ----------------------------------------------------------------------------------------------------


def test_gradients_equal_finite_differences():
    case = small_case(OP, "tiny", 5, H=1, HV=2, K=3, V=2)
    call = exact(sampling.draw(OPS[OP], variant(case, offsets=(0, 2, 2, 5))))
    names = [n for n, t in call.tensors.items() if t.is_floating_point()]

    def function(*tensors):
        arguments = {**call.tensors, **dict(zip(names, tensors, strict=True))}
        return call.op.reference(**arguments, **call.options)

    assert torch.autograd.gradcheck(function, tuple(call.tensors[n].requires_grad_() for n in names))


def test_one_token_by_hand():
    call = exact(sampling.draw(OPS[OP], small_case(OP, "hand", 1, H=1, HV=1, K=3, V=2)))
    q, k, v, g, beta, state = (call.tensors[n] for n in ("q", "k", "v", "g", "beta", "initial_state"))
    s = state[0, 0] * g.exp().squeeze()
    s = s + torch.outer(k[0, 0, 0], beta.squeeze() * (v[0, 0, 0] - s.T @ k[0, 0, 0]))
    found = oracle(call).outputs
    assert torch.allclose(found["final_state"][0, 0], s, atol=1e-14)
    assert torch.allclose(found["o"][0, 0, 0], 3**-0.5 * s.T @ q[0, 0, 0], atol=1e-14)


@pytest.mark.parametrize("cuts", [[1], [2], [63], [64], [65], [69], [10, 11, 50]], ids=str)
def test_oracle_splits(cuts):
    call = exact(sampling.draw(OPS[OP], small_case(OP, "split")))
    needs, gradients = sampling.default_needs(call), sampling.draw_gradients(call)
    gradients = {n: g.double() for n, g in gradients.items()}
    whole = evaluate(call, needs, gradients, call.op.reference).quantities()
    reference = Call(Reference(call.op), call.tensors, call.options)
    parts = evaluate(reference, needs, gradients, in_pieces(reference, cuts, 70)).quantities()
    assert all(torch.allclose(parts[n], x, rtol=1e-11, atol=1e-13) for n, x in whole.items())


class Reference:
    """An op whose call is its reference."""

    def __init__(self, op):
        self.op, self.declaration, self.reference = op, op.declaration, op.reference

    def __call__(self, *args, **kwargs):
        return self.op.reference(*args, **kwargs)


def test_oracle_runs_each_sequence_as_if_alone():
    case = variant(small_case(OP, "alone", 40), offsets=(0, 0, 13, 14, 40))
    call = exact(sampling.draw(OPS[OP], case))
    needs = sampling.default_needs(call)
    gradients = {n: g.double() for n, g in sampling.draw_gradients(call).items()}
    together = oracle(call, needs, gradients).quantities()
    reference = Call(Reference(call.op), call.tensors, call.options)
    alone = evaluate(reference, needs, gradients, one_by_one(reference)).quantities()
    assert all(torch.allclose(alone[n], x, rtol=1e-11, atol=1e-13) for n, x in together.items())


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("offsets", [None, (0, 0, 12, 30)], ids=["dense", "padded"])
def test_side_by_side_equals_one_by_one(op, offsets):
    case = small_case(op, "many", 33, B=2)
    case = variant(case, offsets=offsets) if offsets else case
    calls = [sampling.draw(OPS[op], case, seed=seed) for seed in range(3)]
    needs, gradients = sampling.default_needs(calls[0]), sampling.draw_gradients(calls[0])
    together = oracle_of_many(calls, needs, [gradients] * 3)
    for call, found in zip(calls, together, strict=True):
        alone = oracle(call, needs, gradients).quantities()
        assert all(torch.allclose(found.quantities()[n], x, rtol=1e-12, atol=1e-14) for n, x in alone.items())


def test_oracle_ignores_padding():
    case = variant(small_case(OP, "padding", 30), offsets=(0, 20), options={"use_qk_l2norm_in_kernel": True})
    call = sampling.draw(OPS[OP], case)
    needs, gradients = sampling.default_needs(call), sampling.draw_gradients(call)
    clean = oracle(call, needs, gradients).quantities()
    dirty = oracle(nan_padded(call), needs, gradients).quantities()
    assert all(same_bits(clean[n], x) for n, x in dirty.items())
    assert not bool(dirty["o"][:, 20:].any())


def test_no_state_equals_zeros_for_the_oracle():
    call = sampling.draw(OPS[OP], small_case(OP, "none", 20))
    zeros = call.replaced({"initial_state": torch.zeros_like(call.tensors["initial_state"])})
    absent = oracle(call.without("initial_state")).quantities()
    assert all(same_bits(x, oracle(zeros).quantities()[n]) for n, x in absent.items())


@pytest.mark.parametrize("offsets", [(0,), (0, 0), (0, 0, 0)], ids=["none", "one", "two"])
def test_oracle_without_rows(offsets):
    case = variant(small_case(OP, "no-rows", 0), offsets=offsets)
    study = study_of(sampling.draw(OPS[OP], case))
    expected = study.expected
    assert same_bits(expected.outputs["final_state"], study.call.tensors["initial_state"].double())
    incoming = study.gradients["final_state"]
    assert same_bits(expected.gradients["initial_state"], incoming.double())


def test_studies_are_kept():
    sample = Sample(OP, small_case(OP, "kept", 5))
    again = Sample(OP, small_case(OP, "kept", 5))
    assert sample.study() is again.study()
    assert sample.study() is not Sample(OP, small_case(OP, "kept", 5), seed=1).study()


def test_missing_gradient_is_named():
    study = Sample(OP, small_case(OP, "missing", 5)).study()
    from chunkwise_testing.oracle import Result

    short = {n: g for n, g in study.expected.gradients.items() if n != "beta"}
    with pytest.raises(AssertionError, match="d_beta"):
        study.check(Result(study.expected.outputs, short))


def test_offsets_argument():
    assert ragged_argument(OPS[OP].declaration).name == "cu_seqlens"


@pytest.mark.parametrize(
    ("op", "plan", "quantity", "of_fp32"),
    [
        ("chunk_gla", "bf16-mixed", "d_initial_state", True),  # exp(sum of g) dS: gates and states are fp32
        ("chunk_gla", "bf16-mixed", "final_state", False),  # k and v
        ("chunk_gla", "bf16-mixed", "d_k", False),  # an output in bf16
        ("chunk_gla", "bf16-mixed", "d_q", False),  # zero, and in bf16
        ("chunk_gla", "bf16", "d_initial_state", False),  # gates in bf16
        ("chunk_delta_rule", "bf16-mixed", "d_initial_state", False),  # k
    ],
)
def test_the_budget_of_a_quantity_that_no_16_bit_number_reaches(op, plan, quantity, of_fp32):
    declaration = OPS[op].declaration
    case = next(c for c in declaration.promises.cases if "initial_state" in c.present)
    case = variant(case, options={**case.options, "output_final_state": True})
    study = Sample(op, case, plan, loss=("final_state",)).study()
    budget = declaration.promises.budget
    dtype = study.expected.quantities()[quantity].dtype
    assert dtype == torch.float64
    returned = torch.bfloat16 if quantity in ("d_k", "d_q") else torch.float32
    assert study._multiple(quantity, returned) == (budget.full if of_fp32 else budget.half)
    assert budget.full > budget.half


def test_elements_that_are_far_apart():
    torch.manual_seed(0)
    x = torch.randn(2, 50, 3)
    rounded, wrapped, nan = x.bfloat16(), x.clone(), x.clone()
    wrapped[1, 7, 2] = x[1, 7, 2] + 0.1 * x[1].abs().max()
    nan[0, 3, 1] = math.nan
    assert [far_apart(y, x) for y in (x, rounded, wrapped, nan)] == [0, 0, 1, 1]
    assert far_apart(100.0 * wrapped, 100.0 * x) == 1
    assert [unequal(y, x) for y in (x, wrapped, nan)] == [0, 1, 1]


def test_a_pair_promises_what_both_of_it_promise():
    """Equal bits whatever else a batch holds: the products of the built-in backend change with the batch."""
    promised = {str(pair): pair.batch_invariant for pair in pairs_of(OP, "triton")}
    assert any(promised.values())
    assert promised == {name: "torch" not in name and "tilelang" not in name for name in promised}
