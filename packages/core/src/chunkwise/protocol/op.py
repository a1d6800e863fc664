"""The op: one decorated reference function that says signature, axes, contracts, gradients, cases and cost."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch

from chunkwise.autograd import eager_door, graph
from chunkwise.autograd.residuals import ResidualFormat
from chunkwise.protocol.axes import Divides
from chunkwise.protocol.cases import Budget, Case, Cost
from chunkwise.protocol.contracts import Contract
from chunkwise.protocol.declaration import (
    Declaration,
    Offsets,
    Output,
    Prologue,
    Promises,
    Settle,
    apply_prologue,
    declare,
)

P = ParamSpec("P")
R = TypeVar("R")

_compiling = torch.compiler.is_dynamo_compiling  # other tracers pass fake tensors, which the eager door hands on


class Op(Generic[P, R]):
    """What is computed. Calling it dispatches to a backend; ``reference`` is the oracle in the inputs' own dtype."""

    def __init__(self, declaration: Declaration, reference: Callable[P, R]) -> None:
        functools.update_wrapper(self, reference)
        self.declaration = declaration
        self.reference = reference
        self._bind = declaration.bind
        self._prologue = declaration.promises.prologue
        self._bare = declaration.promises.bare
        self.__signature__ = declaration.signature
        # Computed now: torch.compile cannot trace the lock that Python 3.11 takes when they are first asked for.
        _ = declaration.tensor_names, declaration.option_names
        graph.define(declaration)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        tensors, options, extras = self._bind(*args, **kwargs)
        if extras is not None:
            tensors = apply_prologue(self.declaration, tensors, extras)
        call = graph.call if _compiling() else eager_door.call
        outputs = call(self.declaration, tensors, options)
        return cast("R", bared(outputs) if self._bare else outputs)

    def __repr__(self) -> str:
        return f"<chunkwise op {self.declaration.name}{self.declaration.signature}>"

    def __reduce__(self) -> str:
        return self.declaration.name


def bared(outputs: Sequence[Any]) -> Any:
    """The outputs that were asked for, without a tuple where that is one."""
    asked = tuple([output for output in outputs if output is not None])
    return asked[0] if len(asked) == 1 else asked


def op(
    *,
    outputs: tuple[Output, ...],
    differentiable: tuple[str, ...],
    formats: tuple[ResidualFormat, ...],
    static_axes: tuple[str, ...],
    cost: Callable[[Mapping[str, Any], int], Cost],
    budget: Budget,
    constraints: tuple[Divides, ...] = (),
    contracts: tuple[Contract, ...] = (),
    states: tuple[str, ...] = (),
    widened: tuple[str, ...] = (),
    offsets: tuple[Offsets, ...] = (),
    scale_axis: str = "K",
    prologue: Prologue | None = None,
    settle: Settle | None = None,
    bare: bool = False,
    cases: tuple[Case, ...] = (),
    benchmarks: tuple[Case, ...] = (),
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Declare an op. The decorated function's signature (jaxtyping) is the interface, its body the reference.

    Args:
        outputs: what it returns, in order.
        differentiable: the arguments that have a gradient.
        formats: the residual formats, the default first; at most two for each chunk size, lean and full.
        static_axes: axes that do not vary between the calls of one model; a trace may depend on them.
        cost: axis sizes with the options of a call, and the bytes of an activation, to the FLOPs and bytes that no
            implementation can avoid.
        constraints: between axis sizes.
        contracts: on values; checked under ``CHUNKWISE_CHECK=values`` only.
        states: arguments and outputs that are states ``[..., K, V]`` (``[..., V, K]`` with ``state_v_first``).
        widened: arguments of any float dtype that a backend sees in fp32, as it sees states; their gradients come back
            in the dtype that was given.
        offsets: ragged offsets and their host copies; given all together or not at all.
        scale_axis: the axis whose size gives the default ``scale``, ``size ** -0.5``.
        prologue: model options that core applies in front.
        settle: checks options, whose types are right, against each other and fills in those that a call leaves open. An
            option ``chunk_size`` chooses among the formats by their chunks, ``disable_recompute`` those that are full.
        bare: outputs that were not asked for are left out, and a single one is returned without a tuple.
        cases, benchmarks: shapes for parity tests and for the benchmark.
        budget: the accuracy that every backend must reach.
    """

    def decorate(reference: Callable[P, R]) -> Op[P, R]:
        promises = Promises(
            outputs=outputs,
            constraints=constraints,
            contracts=contracts,
            differentiable=differentiable,
            states=states,
            widened=widened,
            offsets=offsets,
            formats=formats,
            static_axes=static_axes,
            scale_axis=scale_axis,
            prologue=prologue,
            settle=settle,
            bare=bare,
            cases=cases,
            benchmarks=benchmarks,
            cost=cost,
            budget=budget,
        )
        return Op(declare(reference, promises), reference)

    return decorate
