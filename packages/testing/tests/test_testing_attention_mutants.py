"""The suite notices wrong attention: each mutant of the built-in implementation must fail the test that holds it."""

import dataclasses

import pytest
import torch

from chunkwise.eager import sink_attention as eager
from chunkwise.eager.implementations import SINK_ATTENTION
from chunkwise_testing.fakes import installed
from chunkwise_testing.routes import pairs_of
from chunkwise_testing.study import Sample
from chunkwise_testing.suite.attention import Attention
from chunkwise_testing.suite.base import Subject, small_case
from chunkwise_testing.suite.gradients import Gradients
from chunkwise_testing.suite.memory import Memory
from chunkwise_testing.suite.ragged import Ragged
from chunkwise_testing.suite.shapes import Shapes

OP = "sink_attention"


def on_inputs(change):
    """A forward and a backward that see other inputs."""

    def forward(schedule, inputs, save):
        return eager.forward(schedule, change(inputs), save)

    def backward(schedule, inputs, residuals, grads, needs):
        return eager.backward(schedule, change(inputs), residuals, grads, needs)

    return forward, backward


def on_outputs(change):
    """A forward whose `(o, lse)` are changed."""

    def forward(schedule, inputs, save):
        (o, lse), saved = eager.forward(schedule, inputs, save)
        return change(inputs, o, lse), saved

    return forward, eager.backward


def on_gradients(change):
    """A backward that sees other gradients of the outputs."""

    def backward(schedule, inputs, residuals, grads, needs):
        return eager.backward(schedule, inputs, residuals, change(*grads), needs)

    return eager.forward, backward


def one_key_too_many(inputs):
    return inputs._replace(window_size=None if inputs.window_size is None else inputs.window_size + 1)


def aligned_at_the_start(inputs):
    rows = inputs.q.shape[1]
    return inputs._replace(k=inputs.k[:, :rows].contiguous(), v=inputs.v[:, :rows].contiguous())


def without_sink(inputs, o, lse):
    return o, None if lse is None else lse + torch.log1p(-(inputs.sinks[:, None] - lse).exp())


def writes_sinks(schedule, inputs, save):
    result = eager.forward(schedule, inputs, save)
    inputs.sinks.add_(1.0)
    return result


MUTANTS = {
    "aligned_at_the_start": (on_inputs(aligned_at_the_start)[0], eager.backward),
    "first_sink_for_all": on_inputs(lambda i: i._replace(sinks=i.sinks[:1].expand_as(i.sinks).contiguous())),
    "ignores_d_lse": on_gradients(lambda d_o, d_lse: (d_o, None)),
    "offsets_of_the_other_side": on_inputs(lambda i: i._replace(cu_seqlens_k=i.cu_seqlens_q)),
    "lse_without_sink": on_outputs(without_sink),
    "multiplies_unseen_values": on_outputs(lambda i, o, lse: (o + 0.0 * i.v.sum(), lse)),
    "no_maximum": on_outputs(lambda i, o, lse: (o * (i.sinks.exp() / i.sinks.exp())[:, None], lse)),
    "one_key_too_many": on_inputs(one_key_too_many),
    "other_group": on_inputs(lambda i: i._replace(k=i.k.roll(1, 2), v=i.v.roll(1, 2))),
    "writes_sinks": (writes_sinks, eager.backward),
}

CAUGHT_BY = {
    "aligned_at_the_start": lambda s: Attention().test_who_sees_whom(s, (3, 67), {}),
    "first_sink_for_all": lambda s: s.check_sample(Sample(OP, small_case(OP, "plain"), "bf16")),
    "ignores_d_lse": lambda s: Gradients().test_subsets(s, None),
    "offsets_of_the_other_side": lambda s: Ragged().test_offsets(s, (0, 5, 5, 6, 70, 70), "fp32"),
    "lse_without_sink": lambda s: Attention().test_equal_logits(s, None),
    "multiplies_unseen_values": lambda s: Attention().test_keys_outside_every_window_hold_nan(s, (70, 200), "fp32"),
    "no_maximum": lambda s: Attention().test_large_sinks(s, "fp32"),
    "one_key_too_many": lambda s: Attention().test_who_sees_whom(s, (65, 129), {"window_size": 16}),
    "other_group": lambda s: Shapes().test_unlike_heads(s, (3, 6)),
    "writes_sinks": lambda s: Memory().test_inputs_are_not_written(s),
}


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_mutant_is_caught(name):
    forward, backward = MUTANTS[name]
    table = dataclasses.replace(
        SINK_ATTENTION, name=f"mutant/{OP}/blocked", forward="fake_mutant:forward", backward="fake_mutant:backward"
    )
    with installed("mutant", [table], functions={"forward": forward, "backward": backward}):
        pair = next(p for p in pairs_of(OP, "mutant") if p.forward == p.backward)
        with pytest.raises(AssertionError):
            CAUGHT_BY[name](Subject(pair, "cpu"))


def test_every_mutant_has_a_test():
    assert MUTANTS.keys() == CAUGHT_BY.keys()
