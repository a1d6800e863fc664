"""The declaration of an op, and what is read off its signature once."""

from __future__ import annotations

import collections
import inspect
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from chunkwise.autograd.residuals import ResidualFormat
from chunkwise.protocol.axes import STATE_DTYPES, Divides, TensorSpec, tensor_spec
from chunkwise.protocol.cases import Budget, Case, Cost
from chunkwise.protocol.contracts import Contract


@dataclass(frozen=True)
class Output:
    """One output: its axes, its dtype (or the argument that gives it) and the option that asks for it."""

    name: str
    axes_text: str
    dtype: str
    when: str | None = None


@dataclass(frozen=True)
class Offsets:
    """Ragged offsets: the argument that holds them, its host copy, and the axes that they cut."""

    name: str
    host: str
    rows: str = "T"
    sequences: str = "N"
    batch: str = "B"


@dataclass(frozen=True)
class Prologue:
    """Model options that core applies in front of the op, in plain differentiable PyTorch.

    ``function(arguments, values)`` takes the op's tensors by name and the values of ``arguments``, and returns
    the tensors that it replaces.
    """

    arguments: tuple[str, ...]
    function: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]


Settle = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""From the options of a call to those that hold: raises ValueError for one that cannot, fills in what was left open."""


@dataclass(frozen=True)
class OptionSpec:
    """An argument that is no tensor: its default and the Python types that it may have."""

    name: str
    default: Any
    types: tuple[type, ...]
    expected: str

    def accepts(self, value: object) -> bool:
        """Whether ``value`` may be given; a bool is no number, and a number is finite."""
        if isinstance(value, bool) and bool not in self.types:
            return False
        if isinstance(value, float) and not math.isfinite(value):
            return False
        return isinstance(value, self.types)


@dataclass(frozen=True, eq=False)
class Promises:
    """What a declaration says beside the signature; see :func:`chunkwise.protocol.op.op`."""

    outputs: tuple[Output, ...]
    constraints: tuple[Divides, ...]
    contracts: tuple[Contract, ...]
    differentiable: tuple[str, ...]
    states: tuple[str, ...]
    widened: tuple[str, ...]
    offsets: tuple[Offsets, ...]
    formats: tuple[ResidualFormat, ...]
    static_axes: tuple[str, ...]
    scale_axis: str
    prologue: Prologue | None
    settle: Settle | None
    bare: bool
    cases: tuple[Case, ...]
    benchmarks: tuple[Case, ...]
    cost: Callable[[Mapping[str, Any], int], Cost]
    budget: Budget


@dataclass(frozen=True, eq=False)
class Declaration:
    """An op as declared: one reference function, its promises, and what is derived from the signature."""

    name: str
    reference: Callable[..., Any]
    promises: Promises
    signature: inspect.Signature
    tensors: tuple[TensorSpec, ...]
    options: tuple[OptionSpec, ...]
    bind: Callable[..., tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...] | None]]
    Inputs: Any

    @cached_property
    def tensor_names(self) -> tuple[str, ...]:
        """The tensor arguments, in the order in which the bridge passes them."""
        return tuple(spec.name for spec in self.tensors)

    @cached_property
    def option_names(self) -> tuple[str, ...]:
        """The other arguments, in the order in which the bridge passes them."""
        return tuple(spec.name for spec in self.options)

    def format(self, name: str) -> ResidualFormat:
        """The residual format of this name."""
        return next(f for f in self.promises.formats if f.name == name)

    def kept_outputs(self, residual_format: ResidualFormat) -> tuple[int, ...]:
        """The places of the outputs that a format keeps for the backward."""
        names = [output.name for output in self.promises.outputs]
        return tuple(names.index(name) for name in residual_format.outputs)


def apply_prologue(declaration: Declaration, tensors: tuple[Any, ...], extras: tuple[Any, ...]) -> tuple[Any, ...]:
    """Apply the model options that core owns, in front of the op."""
    prologue = typing.cast("Prologue", declaration.promises.prologue)
    named = dict(zip(declaration.tensor_names, tensors))  # noqa: B905  # the tracer has no strict=
    replaced = prologue.function(named, dict(zip(prologue.arguments, extras)))  # noqa: B905
    return tuple([replaced.get(name, named[name]) for name in declaration.tensor_names])


CORE_OPTIONS = ("state_v_first", "backend")
"""Options that core settles: a backend sees K-first fp32 states, and was chosen already."""


def declare(reference: Callable[..., Any], promises: Promises) -> Declaration:
    """Read the reference's signature into a declaration."""
    signature = inspect.signature(reference)
    hints = typing.get_type_hints(reference)
    hidden = promises.prologue.arguments if promises.prologue else ()
    tensors, options = [], []
    for name, parameter in signature.parameters.items():
        any_float = name in promises.states or name in promises.widened
        spec = tensor_spec(name, hints[name], STATE_DTYPES if any_float else None)
        if name in hidden:
            continue
        if spec is not None:
            tensors.append(spec)
        else:
            options.append(_option_spec(name, hints[name], parameter.default))
    fields = [t.name for t in tensors] + [o.name for o in options if o.name not in CORE_OPTIONS]
    return Declaration(
        name=reference.__name__,
        reference=reference,
        promises=promises,
        signature=signature,
        tensors=tuple(tensors),
        options=tuple(options),
        bind=_binder(reference.__name__, signature, tensors, options, hidden),
        Inputs=collections.namedtuple("Inputs", fields),
    )


def _option_spec(name: str, hint: Any, default: Any) -> OptionSpec:
    types = typing.get_args(hint) or (hint,)
    accepted = tuple(types) + ((int,) if float in types else ())
    names = ["None" if t is type(None) else t.__name__ for t in types]
    return OptionSpec(name, default, accepted, " or ".join(f"a finite {n}" if n == "float" else n for n in names))


def _binder(
    name: str,
    signature: inspect.Signature,
    tensors: Sequence[TensorSpec],
    options: Sequence[OptionSpec],
    hidden: Sequence[str],
) -> Callable[..., Any]:
    """A function of the op's own signature that returns (tensors, options, model options or None).

    Generated, because Python's own argument binding is the only one that costs next to nothing, and because its
    errors for unknown or missing arguments then name the op.
    """
    defaults = {f"_{p}": v.default for p, v in signature.parameters.items() if v.default is not inspect.Parameter.empty}
    bare = [
        p.replace(annotation=p.empty, default=_Name(f"_{p.name}") if p.default is not p.empty else p.empty)
        for p in signature.parameters.values()
    ]
    untouched = " and ".join(f"{h} is _{h}" for h in hidden) or "True"
    source = (
        f"def {name}{inspect.Signature(bare)}:\n"
        f"    extras = None if {untouched} else ({''.join(f'{h}, ' for h in hidden)})\n"
        f"    return ({''.join(f'{t.name}, ' for t in tensors)}), ({''.join(f'{o.name}, ' for o in options)}), extras\n"
    )
    namespace: dict[str, Any] = defaults
    exec(source, namespace)
    return typing.cast("Callable[..., Any]", namespace[name])


class _Name:
    """Prints as a bare name in generated source."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name
