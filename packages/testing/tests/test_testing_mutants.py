"""The suite notices wrong implementations: each mutant breaks one promise and must fail the test that holds it."""

import dataclasses
import importlib.metadata
import sys
from types import ModuleType

import pytest
import torch

import chunkwise.dispatcher.registry as registry_module
from chunkwise.dispatcher.cache import ROUTES
from chunkwise.dispatcher.registry import Backend, Registry
from chunkwise.eager import gated_delta_rule as eager
from chunkwise.eager.implementations import GATED_DELTA_RULE
from chunkwise.ops import OPS
from chunkwise_testing.routes import pairs_of
from chunkwise_testing.study import Sample
from chunkwise_testing.suite.base import Subject, small_case
from chunkwise_testing.suite.gradients import Gradients
from chunkwise_testing.suite.memory import Memory
from chunkwise_testing.suite.ragged import Ragged
from chunkwise_testing.suite.residuals import Residuals
from chunkwise_testing.suite.shapes import Shapes
from chunkwise_testing.suite.states import States

OP = "chunk_gated_delta_rule"
FORMAT = OPS[OP].declaration.promises.formats[0].name


def swaps_heads(schedule, inputs, save):
    (o, state), saved = eager.forward(schedule, inputs, save)
    return (o.flip(2), state), saved


def reads_first_gate(schedule, inputs, save):
    return eager.forward(schedule, inputs._replace(g=inputs.g[..., :1].expand_as(inputs.g).contiguous()), save)


def transposes_state(schedule, inputs, save):
    (o, state), saved = eager.forward(schedule, inputs, save)
    return (o, None if state is None else state.mT.contiguous().view(state.shape)), saved


def aliases_state(schedule, inputs, save):
    (o, state), saved = eager.forward(schedule, inputs, save)
    if inputs.v.shape[1] == 0 and state is not None:
        state = inputs.initial_state.view_as(state)
    return (o, state), saved


def ignores_last_row(schedule, inputs, save):
    (o, state), saved = eager.forward(schedule, inputs, save)
    rows = o.shape[1]
    return (torch.cat([o[:, : rows - 1], torch.empty_like(o[:, :1])], 1) if rows % 64 else o, state), saved


def leaks_padding(schedule, inputs, save):
    (o, state), saved = eager.forward(schedule, inputs, save)
    if inputs.cu_seqlens is not None:
        o[:, int(inputs.cu_seqlens[-1]) :] = inputs.v[:, int(inputs.cu_seqlens[-1]) :]
    return (o, state), saved


def rounds_like_tf32(schedule, inputs, save):
    (o, state), saved = eager.forward(schedule, inputs, save)
    return (o.bfloat16().to(o.dtype), state), saved


def not_repeatable(schedule, inputs, save):
    (o, state), saved = eager.forward(schedule, inputs, save)
    return (o * (1.0 + 1e-4 * torch.rand(())), state), saved


def writes_input(schedule, inputs, save):
    result = eager.forward(schedule, inputs, save)
    inputs.k.mul_(1.0).add_(1.0)
    return result


def reads_beside(schedule, inputs, save):
    """Reads one element before the tensor."""
    offset = inputs.v.storage_offset()
    before = inputs.v.as_strided((1,), (1,), offset - 1) if offset else inputs.v.new_zeros(1)
    (o, state), saved = eager.forward(schedule, inputs, save)
    return (o + 0.0 * before.sum(), state), saved


def enters_a_chunk_early(schedule, inputs, save):
    """Keeps the states before the chunk before."""
    result, saved = eager.forward(schedule, inputs, save)
    if save == FORMAT:
        states = eager.forward(schedule, inputs, eager.FULL)[1]["states"].float()
        kept = saved["entry_states"]
        kept.copy_(states.unflatten(0, (kept.shape[0], -1))[:, 31::32][:, : kept.shape[1]])
    return result, saved


def swaps_entry_rows(schedule, inputs, save):
    """Keeps each state in another row of the batch."""
    result, saved = eager.forward(schedule, inputs, save)
    return result, {name: x.flip(0) if name == "entry_states" else x for name, x in saved.items()}


def backward_with(change):
    def backward(schedule, inputs, residuals, grads, needs):
        return change(eager.backward(schedule, inputs, residuals, grads, needs), inputs, grads)

    return backward


def scaled(name, factor):
    return lambda found, inputs, grads: {**found, **({name: found[name] * factor} if name in found else {})}


def drops_state_gradient(found, inputs, grads):
    if grads[1] is None and "initial_state" in found:
        found["initial_state"] = torch.zeros_like(found["initial_state"])
    return found


def mixes_heads(found, inputs, grads):
    return {**found, "v": found["v"] + found["v"].mean(2, keepdim=True)} if "v" in found else found


def first_gate_gradient(found, inputs, grads):
    if "g" in found:
        found["g"][:, 0] += 1e-3 * found["g"].abs().max()
    return found


MUTANTS = {
    "aliases_state": (aliases_state, None),
    "drops_state_gradient": (None, backward_with(drops_state_gradient)),
    "enters_a_chunk_early": (enters_a_chunk_early, None),
    "first_gate_gradient": (None, backward_with(first_gate_gradient)),
    "ignores_last_row": (ignores_last_row, None),
    "leaks_padding": (leaks_padding, None),
    "mixes_heads": (None, backward_with(mixes_heads)),
    "not_repeatable": (not_repeatable, None),
    "reads_beside": (reads_beside, None),
    "reads_first_gate": (reads_first_gate, None),
    "rounds_like_tf32": (rounds_like_tf32, None),
    "scales_d_beta": (None, backward_with(scaled("beta", 1.0 + 1e-5))),
    "scales_d_g": (None, backward_with(scaled("g", 1.0 + 1e-5))),
    "swaps_entry_rows": (swaps_entry_rows, None),
    "swaps_heads": (swaps_heads, None),
    "transposes_state": (transposes_state, None),
    "writes_input": (writes_input, None),
}

CAUGHT_BY = {
    "aliases_state": lambda s: States().test_final_state_is_fresh(s, 0),
    "drops_state_gradient": lambda s: States().test_loss_on_output_only(s, "fp32"),
    "enters_a_chunk_early": lambda s: Residuals().test_entry_states(s, None),
    "first_gate_gradient": lambda s: Shapes().test_first_gate_without_state(s, "strong"),
    "ignores_last_row": lambda s: Memory().test_poison(s, "fp32", None, False),
    "leaks_padding": lambda s: Ragged().test_padding_holds_nan(s, "fp32"),
    "mixes_heads": lambda s: Shapes().test_heads_do_not_mix(s),
    "not_repeatable": lambda s: Memory().test_same_bits_twice(s, "fp32"),
    "reads_beside": lambda s: Memory().test_poison(s, "fp32", None, True),
    "reads_first_gate": lambda s: Shapes().test_unlike_heads(s, (3, 6)),
    "rounds_like_tf32": lambda s: s.check_sample(Sample(OP, small_case(OP, "plain"))),
    "scales_d_beta": lambda s: Gradients().test_subsets(s, None),
    "scales_d_g": lambda s: Gradients().test_subsets(s, None),
    "swaps_entry_rows": lambda s: Residuals().test_entry_states(s, None),
    "swaps_heads": lambda s: s.check_sample(Sample(OP, small_case(OP, "plain"), "bf16")),
    "transposes_state": lambda s: s.check_sample(Sample(OP, small_case(OP, "plain"), "bf16")),
    "writes_input": lambda s: Memory().test_inputs_are_not_written(s),
}


@pytest.fixture
def mutant(monkeypatch, request):
    """A registry with the built-in backend and one mutant of it."""
    forward, backward = MUTANTS[request.param]
    module = ModuleType("chunkwise_mutants")
    module.forward, module.backward = forward or eager.forward, backward or eager.backward
    module.TABLE = (
        dataclasses.replace(
            GATED_DELTA_RULE,
            name="mutant/gated_delta_rule/chunkwise",
            forward="chunkwise_mutants:forward",
            backward="chunkwise_mutants:backward",
        ),
    )
    monkeypatch.setitem(sys.modules, "chunkwise_mutants", module)
    registry = Registry([e for e in importlib.metadata.entry_points(group="chunkwise.backends") if e.name == "torch"])
    registry.add(Backend("mutant", "chunkwise", ">=0.1", tables=("chunkwise_mutants:TABLE",)))
    monkeypatch.setattr(registry_module, "_registry", registry)
    ROUTES.clear()
    pair = next(p for p in pairs_of(OP, "mutant") if p.forward == p.backward and p.format == FORMAT)
    yield Subject(pair, "cpu")
    ROUTES.clear()


def test_every_mutant_has_a_test():
    assert MUTANTS.keys() == CAUGHT_BY.keys()


@pytest.mark.parametrize(
    ("mutant", "name"), [(n, n) for n in sorted(MUTANTS)], indirect=["mutant"], ids=sorted(MUTANTS)
)
def test_mutant_is_caught(mutant, name):
    with pytest.raises(AssertionError):
        CAUGHT_BY[name](mutant)


@pytest.mark.parametrize("mutant", ["swaps_heads"], indirect=True)
def test_pairs_with_the_built_in_backend(mutant):
    """The mutant's file also answers for the pairs with the built-in backend, in every format."""
    pairs = pairs_of(OP, "mutant")
    backends = {(p.forward.split("/")[0], p.backward.split("/")[0]) for p in pairs}
    assert backends == {("mutant", "mutant"), ("mutant", "torch"), ("torch", "mutant")}
    assert len(pairs) == 3 * len(OPS[OP].declaration.promises.formats)
    assert all(p.forward.startswith("torch/") and p.backward.startswith("torch/") for p in pairs_of(OP, "torch"))


@pytest.mark.parametrize("mutant", ["scales_d_g"], indirect=True)
def test_mixed_pair_runs_the_named_backward(mutant):
    """A forward of one backend with a backward of another: the gradient is the mutant's."""
    pair = next(p for p in pairs_of(OP, "mutant") if p.forward.startswith("torch/") and p.format == FORMAT)
    with pytest.raises(AssertionError, match="d_g"):
        Gradients().test_subsets(Subject(pair, "cpu"), None)
