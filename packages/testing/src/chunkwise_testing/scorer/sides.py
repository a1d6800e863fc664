"""The sides of a comparison: ours through the public op, peers through their adapters; all are called alike."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chunkwise.protocol.op import Op
from chunkwise.verifier.facts import Facts
from chunkwise_testing.oracle import Result, evaluate
from chunkwise_testing.peers import LoadedPeer
from chunkwise_testing.sampling import Call
from chunkwise_testing.scorer.inputs import BOTH, InputSet

OURS = "chunkwise"


def _everything(_: Facts) -> str | None:
    return None


@dataclass(frozen=True)
class Side:
    """One side of the comparison.

    Args:
        name: ``chunkwise``, or the peer's.
        function: takes the op's tensors and options by name and returns the op's outputs.
        unsupported: why a call is beyond this side, or None.
    """

    name: str
    function: Callable[..., Any]
    unsupported: Callable[[Facts], str | None] = _everything

    def run_of(self, inputs: InputSet, mode: str) -> Callable[[], list[Tensor]]:
        """A call on an input set; returns the outputs, and the gradients where the mode has a backward."""
        return _backward_run(self, inputs) if mode == BOTH else _forward_run(self, inputs)

    def result(self, inputs: InputSet, mode: str) -> Result:
        """Outputs, and gradients where the mode has a backward, of one call, by name."""
        needs = leaf_names(inputs.call) if mode == BOTH else ()
        return evaluate(inputs.call, needs, dict(inputs.gradients), self.function)


def ours(op: Op[..., Any], route: str | None) -> Side:
    """The public op; ``route`` is what ``backend=`` takes, or None for the dispatcher's choice."""

    def function(**arguments: Any) -> Any:
        return op(**arguments, backend=route)

    return Side(OURS, op if route is None else function)


def theirs(op: Op[..., Any], peer: LoadedPeer) -> Side:
    """A peer's function."""
    defaults = {option.name: option.default for option in op.declaration.options}
    return Side(peer.peer.name, peer.function, lambda facts: peer.adapter.reason(facts, defaults))


def leaf_names(call: Call) -> tuple[str, ...]:
    """The tensors of a call whose gradients are taken: all that have one."""
    differentiable = call.declaration.promises.differentiable
    return tuple(name for name in call.tensors if name in differentiable)


def _present(outputs: Any) -> list[Tensor]:
    listed = outputs if isinstance(outputs, tuple) else (outputs,)
    return [x for x in listed if x is not None]


def _forward_run(side: Side, inputs: InputSet) -> Callable[[], list[Tensor]]:
    function, arguments = side.function, {**inputs.call.tensors, **inputs.call.options}

    def run() -> list[Tensor]:
        with torch.no_grad():
            return _present(function(**arguments))

    return run


def _backward_run(side: Side, inputs: InputSet) -> Callable[[], list[Tensor]]:
    function, names = side.function, leaf_names(inputs.call)
    tensors = {n: t.detach().requires_grad_(n in names) for n, t in inputs.call.tensors.items()}
    arguments, leaves = {**tensors, **inputs.call.options}, [tensors[n] for n in names]
    gradients = list(inputs.gradients.values())

    def run() -> list[Tensor]:
        outputs = _present(function(**arguments))
        return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, leaves, gradients)]

    return run


def failures() -> tuple[type[BaseException], ...]:
    """What a side may raise because it fails on a call; such an error becomes a reason in the row."""
    usual = (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, LookupError, OSError, ImportError)
    triton = getattr(sys.modules.get("triton.errors"), "TritonError", None)  # derives from nothing but Exception
    return (*usual, triton) if isinstance(triton, type) else usual


def in_words(error: BaseException) -> str:
    """An error in one line, with the one before it where there is one: a capture that breaks raises a second time."""
    first = error.__context__
    return _one_line(error) if first is None else f"{_one_line(error)} (after {_one_line(first)})"


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
