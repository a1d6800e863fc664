"""How far each side is from the fp64 recurrence, and each peer from ours. Reported only: the gate is another matter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from chunkwise.protocol.cases import Case
from chunkwise.protocol.op import Op
from chunkwise.verifier.facts import Facts
from chunkwise_testing import sampling
from chunkwise_testing.oracle import oracle
from chunkwise_testing.sampling import Plan
from chunkwise_testing.scorer.inputs import BOTH, InputSet, draw_set
from chunkwise_testing.scorer.results import Accuracy
from chunkwise_testing.scorer.sides import OURS, Side, failures, in_words, leaf_names

TOKENS, HEADS = 512, 4
"""The size of the call that is held against fp64: one row, so many tokens, so many heads in the smaller head axis."""


def relative_l2(actual: Tensor, reference: Tensor, dtype: torch.dtype = torch.float64) -> float:
    """The norm of the difference over the norm of the reference, in ``dtype`` on the reference's device.

    0 where both are zeros, infinite where only the reference is, NaN where a value is.
    """
    wide = reference.to(dtype)
    difference = float((actual.to(wide.device, dtype) - wide).norm())
    norm = float(wide.norm())
    return difference / norm if norm else (0.0 if difference == 0.0 else float("inf"))


def against_oracle(
    op: Op[..., Any], case: Case, plan: Plan, device: str, sides: Sequence[tuple[Side, Facts]], mode: str
) -> Iterator[Accuracy]:
    """Every side against the recurrence in fp64, at a modest shape."""
    call = sampling.draw(op, case, plan)
    gradients = sampling.draw_gradients(call)
    needs = leaf_names(call) if mode == BOTH else ()
    expected = oracle(call, needs, gradients).quantities()
    on_device = call.mapped(lambda _, t: t.to(device))
    inputs = InputSet(on_device, {name: g.to(device) for name, g in gradients.items()})
    for side, facts in sides:
        yield from _rows(side, facts, inputs, mode, ("fp64", case.name, expected))


def against_ours(
    op: Op[..., Any], case: Case, plan: Plan, device: str, sides: Sequence[tuple[Side, Facts]], mode: str
) -> Iterator[Accuracy]:
    """Every peer against ours, which is the first side, at a benchmark shape."""
    inputs = draw_set(op, case, plan, device, seed=0)
    try:
        expected = sides[0][0].result(inputs, mode).quantities()
    except failures() as error:
        yield Accuracy(OURS, "", OURS, case.name, reason=in_words(error))
        return
    for side, facts in sides[1:]:
        yield from _rows(side, facts, inputs, mode, (OURS, case.name, expected))


def _rows(
    side: Side, facts: Facts, inputs: InputSet, mode: str, reference: tuple[str, str, Mapping[str, Tensor]]
) -> Iterator[Accuracy]:
    against, case, expected = reference
    reason = side.unsupported(facts)
    found: Mapping[str, Tensor] = {}
    try:
        if reason is None:
            found = side.result(inputs, mode).quantities()
    except failures() as error:
        reason = in_words(error)
    if reason is not None:
        yield Accuracy(side.name, "", against, case, reason=reason)
        return
    for quantity, wanted in expected.items():
        if quantity not in found:
            yield Accuracy(side.name, quantity, against, case, reason="not returned")
        elif found[quantity].shape != wanted.shape:
            shapes = f"{list(found[quantity].shape)}, not {list(wanted.shape)}"
            yield Accuracy(side.name, quantity, against, case, reason=f"its shape is {shapes}")
        else:
            yield Accuracy(side.name, quantity, against, case, relative_l2(found[quantity], wanted))
