"""Draws the inputs of an op's case from its declaration, within its contracts.

Values are drawn in fp64 on the CPU and then rounded, so that one case holds the same numbers on every device and, up
to rounding, in every dtype; benchmarks, which are large, may draw on the device itself. Heads are never alike: gates,
steps and states have a scale of their own in each.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from chunkwise.protocol.axes import DTYPES, TensorSpec
from chunkwise.protocol.cases import Case
from chunkwise.protocol.declaration import Declaration, Offsets, Output
from chunkwise.protocol.derive import settled, swapped
from chunkwise.protocol.op import Op
from chunkwise_testing import fitting

HEAD_AXES = ("H", "HV", "HQ", "HK")
"""Axes that count heads."""

PARALLEL_EPS = (0.003, 0.01, 0.1, 0.5, 2.0)
"""How far "parallel" keys are from one another, head by head."""


@dataclass(frozen=True)
class Plan:
    """The dtypes of a call: of activations, of gates and of tensors without a width, and of states."""

    name: str
    activations: str
    gates: str
    states: str = "fp32"


PLANS = {
    plan.name: plan
    for plan in (
        Plan("fp32", "fp32", "fp32"),
        Plan("bf16", "bf16", "bf16"),
        Plan("fp16", "fp16", "fp16"),
        Plan("bf16-mixed", "bf16", "fp32"),
        Plan("fp16-mixed", "fp16", "fp32"),
    )
}


@dataclass(frozen=True, eq=False)
class Call:
    """An op with the arguments of one call, absent tensors left out."""

    op: Op[..., Any]
    tensors: Mapping[str, Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def declaration(self) -> Declaration:
        """The op's declaration."""
        return self.op.declaration

    @property
    def spec(self) -> Mapping[str, TensorSpec]:
        """The tensor arguments by name, in the state layout of this call."""
        return specs(self.declaration, bool(self.options.get("state_v_first")))

    def replaced(self, tensors: Mapping[str, Tensor] | None = None, options: Mapping[str, Any] | None = None) -> Call:
        """The same call with some tensors or options exchanged or added."""
        return Call(self.op, {**self.tensors, **(tensors or {})}, {**self.options, **(options or {})})

    def mapped(self, function: Callable[[str, Tensor], Tensor]) -> Call:
        """The same call with a function applied to every tensor."""
        return Call(self.op, {name: function(name, t) for name, t in self.tensors.items()}, self.options)

    def without(self, *names: str) -> Call:
        """The same call without some tensors."""
        return Call(self.op, {n: t for n, t in self.tensors.items() if n not in names}, self.options)

    def arguments(self) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
        """Tensors and options in the order in which the bridge passes them."""
        tensors, options, _ = self.declaration.bind(**self.tensors, **self.options)
        return tensors, options


def specs(declaration: Declaration, state_v_first: bool) -> dict[str, TensorSpec]:
    """The tensor arguments by name, in one of the state layouts."""
    states = declaration.promises.states if state_v_first else ()
    return {s.name: swapped(s) if s.name in states else s for s in declaration.tensors}


def variant(
    case: Case,
    name: str | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    offsets: tuple[int, ...] | None = None,
    options: Mapping[str, object] | None = None,
    draw: Mapping[str, str] | None = None,
    present: tuple[str, ...] | None = None,
) -> Case:
    """A case like another, with some of its parts exchanged; ``offsets`` also fix B = 1 and replace all others."""
    new_sizes = {**case.sizes, **(sizes or {})}
    if offsets is not None:
        new_sizes["B"] = 1
    return dataclasses.replace(
        case,
        name=name or case.name,
        sizes=new_sizes,
        offsets=case.offsets if offsets is None else offsets,
        more_offsets=case.more_offsets if offsets is None else {},
        options={**case.options, **(options or {})},
        draw={**case.draw, **(draw or {})},
        present=case.present if present is None else present,
    )


def ragged_argument(declaration: Declaration) -> Offsets:
    """The op's (first) pair of ragged offsets."""
    return declaration.promises.offsets[0]


def row_axis_of(declaration: Declaration, axes: Sequence[str]) -> Offsets | None:
    """The offsets that cut an axis among these into sequences, or None."""
    return next((offsets for offsets in declaration.promises.offsets if offsets.rows in axes), None)


_FURTHER = (7, 0, -5, 2)
"""How many rows more than the first row axis a further one has, sequence by sequence."""


def _further(rows: int, sequence: int) -> int:
    return max(0, rows + _FURTHER[sequence % len(_FURTHER)])


def offsets_of(declaration: Declaration, case: Case) -> dict[str, tuple[int, ...]]:
    """The offsets of a ragged case by argument; those that it does not name have lengths like the first, not equal."""
    if case.offsets is None:
        return {}
    lengths = [_further(end - start, n) for n, (start, end) in enumerate(pairwise(case.offsets))]
    further = (0, *accumulate(lengths))
    first = ragged_argument(declaration)
    return {
        offsets.name: case.offsets if offsets is first else case.more_offsets.get(offsets.name, further)
        for offsets in declaration.promises.offsets
    }


def all_sizes(declaration: Declaration, case: Case) -> dict[str, int]:
    """The case's axis sizes with the number of sequences, and with the row axes that it leaves out."""
    sizes = dict(case.sizes)
    offsets = offsets_of(declaration, case)
    rows = sizes[ragged_argument(declaration).rows]
    for argument in declaration.promises.offsets:
        sizes[argument.sequences] = len(case.offsets) - 1 if case.offsets is not None else sizes[argument.batch]
        padding = rows - case.offsets[-1] if case.offsets is not None else 0
        sizes.setdefault(argument.rows, offsets[argument.name][-1] + padding if offsets else _further(rows, 0))
    return sizes


def draw(
    op: Op[..., Any],
    case: Case,
    plan: Plan | None = None,
    *,
    device: str = "cpu",
    seed: int = 0,
    drawn_on: str = "cpu",
) -> Call:
    """Draw the call that a case describes.

    ``drawn_on`` is where the numbers are drawn: quicker on the device where they are many, but other numbers there.
    """
    plan = plan or PLANS["fp32"]
    declaration = op.declaration
    case, plan = _fitted(op, case, plan)
    sizes = all_sizes(declaration, case)
    options = dict(case.options)
    v_first = bool(options.get("state_v_first"))
    offsets = offsets_of(declaration, case)
    hosts = {o.host for o in declaration.promises.offsets}
    tensors: dict[str, Tensor] = {}
    for spec in declaration.tensors:
        if spec.name in offsets:
            tensors[spec.name] = torch.tensor(offsets[spec.name], dtype=torch.int32, device=device)
        elif spec.name in hosts or (spec.optional and spec.name not in case.present):
            continue
        else:
            strategy = STRATEGIES[case.draw.get(spec.name) or _usual(declaration, spec)]
            x = _promised(declaration, spec.name, options, strategy(spec, sizes, _generator(spec.name, seed, drawn_on)))
            x = x.to(DTYPES[_dtype(declaration, spec, plan)])
            if spec.name in declaration.promises.states and v_first:
                x = x.transpose(-1, -2).contiguous()
            tensors[spec.name] = x.to(device)
    return Call(op, tensors, options)


def _fitted(op: Op[..., Any], case: Case, plan: Plan) -> tuple[Case, Plan]:
    """The case and the plan as what is under test accepts them."""
    declaration = op.declaration
    activations = {declaration.tensors[0].name, "q", "k", "v"} & set(declaration.tensor_names)
    dtypes = dict.fromkeys(sorted(activations), plan.activations)
    case, fitted = fitting.fit(declaration.name, case, all_sizes(declaration, case), dtypes)
    case = fitting.promise(declaration, case, fitted)
    found = fitted[declaration.tensors[0].name]
    if found == plan.activations:
        return case, plan
    uniform = plan.activations == plan.gates
    return case, PLANS[found] if uniform else dataclasses.replace(plan, activations=found)


def draw_gradients(
    call: Call, outputs: Sequence[str] | None = None, *, seed: int = 1, drawn_on: str = "cpu"
) -> dict[str, Tensor]:
    """Gradients of the outputs that the call asks for (or of those named), another scale for each head."""
    declaration = call.declaration
    sizes = call_sizes(call)
    device = next(iter(call.tensors.values())).device
    v_first = bool(call.options.get("state_v_first"))
    gradients = {}
    for output in asked_outputs(call):
        if outputs is not None and output.name not in outputs:
            continue
        spec = output_spec(output)
        x = _state(spec, sizes, _generator(f"d_{output.name}", seed, drawn_on))
        dtype = DTYPES[output.dtype] if output.dtype in DTYPES else call.tensors[output.dtype].dtype
        if output.name in declaration.promises.states and v_first:
            x = x.transpose(-1, -2).contiguous()
        gradients[output.name] = x.to(dtype).to(device)
    return gradients


def asked_outputs(call: Call) -> tuple[Output, ...]:
    """The outputs that the call returns."""
    outputs = call.declaration.promises.outputs
    return tuple(o for o in outputs if o.when is None or call.options.get(o.when))


def output_spec(output: Output) -> TensorSpec:
    """An output's axes as a tensor spec."""
    from chunkwise.protocol.axes import Axis

    return TensorSpec(output.name, output.axes_text, tuple(map(Axis.parse, output.axes_text.split())), (), False)


def call_sizes(call: Call) -> dict[str, int]:
    """Axis sizes, read off the shapes of a call's tensors."""
    sizes: dict[str, int] = {}
    for name, tensor in call.tensors.items():
        if name in call.spec:
            for axis, size in zip(call.spec[name].axes, tensor.shape, strict=True):
                sizes.setdefault(axis.name, size - axis.plus)
    for offsets in call.declaration.promises.offsets:
        sizes.setdefault(offsets.sequences, sizes[offsets.batch])
    return sizes


def gates_of(declaration: Declaration) -> list[str]:
    """The arguments that are gates: bounded from above by a contract."""
    return [c.name for c in declaration.promises.contracts if c.upper is not None]


def default_needs(call: Call) -> frozenset[str]:
    """Every argument of the call that has a gradient."""
    return frozenset(call.declaration.promises.differentiable) & frozenset(call.tensors)


def _usual(declaration: Declaration, spec: TensorSpec) -> str:
    if spec.name in declaration.promises.states:
        return "state"
    return "gate" if spec.name in gates_of(declaration) else "normal"


def _promised(declaration: Declaration, name: str, options: Mapping[str, Any], x: Tensor) -> Tensor:
    """The values of an argument, none of them below what the options promise."""
    given = {spec.name: options.get(spec.name, spec.default) for spec in declaration.options}
    held = settled(declaration, given, None)
    for contract in declaration.promises.contracts:
        bound = held.get(contract.lower_option) if contract.name == name and contract.lower_option else None
        x = x if bound is None else x.clamp(min=bound)
    return x


def _dtype(declaration: Declaration, spec: TensorSpec, plan: Plan) -> str:
    if spec.name in declaration.promises.states:
        return plan.states
    narrow = spec.axes[-1].name in HEAD_AXES
    return plan.gates if narrow or spec.name in gates_of(declaration) else plan.activations


def _generator(name: str, seed: int, device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()) + 7919 * seed)


# --- distributions ---------------------------------------------------------------------------------------------

Strategy = Callable[[TensorSpec, Mapping[str, int], torch.Generator], Tensor]


def _normal(spec: TensorSpec, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    return torch.randn(spec.size_of(sizes), generator=generator, dtype=torch.float64, device=generator.device)


def _per_head(spec: TensorSpec, x: Tensor, first: float, last: float) -> Tensor:
    """Numbers from ``first`` to ``last``, one a head, in a shape that broadcasts with ``x``."""
    shape = [1] * x.dim()
    for position, axis in enumerate(spec.axes):
        if axis.name in HEAD_AXES:
            heads = x.shape[position]
            shape[position] = heads
            return torch.linspace(first, last, heads, dtype=torch.float64, device=x.device).view(shape)
    return torch.full(shape, first, dtype=torch.float64, device=x.device)


def _unit(spec: TensorSpec, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    return functional.normalize(_normal(spec, sizes, generator), dim=-1)


def _gate(spec: TensorSpec, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    """Moderate decays: heads that remember for hundreds of tokens and heads that forget within a few."""
    x = _normal(spec, sizes, generator)
    return -_per_head(spec, x, math.log(0.005), math.log(0.6)).exp() * functional.softplus(x)


def _strong(spec: TensorSpec, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    """-20 a step in every other head; elsewhere ``-exp(A) softplus(x)`` with A from 0 to 2.8."""
    x = _normal(spec, sizes, generator)
    gates = -_per_head(spec, x, 0.0, 2.8).exp() * functional.softplus(x)
    heads = _per_head(spec, x, 0.0, 1.0)
    odd = (torch.arange(heads.numel(), device=x.device) % 2 == 1).view(heads.shape)
    return torch.where(odd, -20.0 + 0.1 * x.clamp(-3, 3), gates)


def _zero(spec: TensorSpec, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    """Exactly 0 and -0.0, mixed."""
    x = _normal(spec, sizes, generator)
    return torch.copysign(torch.zeros_like(x), x)


def _mixed(spec: TensorSpec, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    """Side by side: about -20 a step, moderate, and exactly 0."""
    gates = _gate(spec, sizes, generator)
    kind = torch.randint(0, 3, gates.shape, generator=generator, device=gates.device)
    return torch.where(kind == 0, gates - 20.0, torch.where(kind == 1, gates, 0.0))


def _step(spec: TensorSpec, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    """Step sizes in (0, 1), small in the first heads and large in the last."""
    x = _normal(spec, sizes, generator)
    return (x + _per_head(spec, x, -1.5, 1.5)).sigmoid()


def _near_one(spec: TensorSpec, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    size = spec.size_of(sizes)
    return 0.95 + 0.05 * torch.rand(size, generator=generator, dtype=torch.float64, device=generator.device)


def _parallel(spec: TensorSpec, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    """``k + eps noise``, normalised, with one ``k`` and one eps for each head."""
    x = _normal(spec, sizes, generator)
    heads = _per_head(spec, x, 0.0, 1.0)
    eps = x.new_tensor([PARALLEL_EPS[h % len(PARALLEL_EPS)] for h in range(heads.numel())])
    rows = next(i for i, axis in enumerate(spec.axes) if axis.name in ("T", "S"))
    first = functional.normalize(x.narrow(rows, 0, min(1, x.shape[rows])), dim=-1)
    noise = functional.normalize(_normal(spec, sizes, generator), dim=-1)
    return functional.normalize(first + eps.view(heads.shape) * noise, dim=-1)


def _erase(spec: TensorSpec, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    """``-x``, x of unit length."""
    return -_unit(spec, sizes, generator)


def _erase_parallel(spec: TensorSpec, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    """``-x``, the x of a head nearly parallel."""
    return -_parallel(spec, sizes, generator)


def _write(spec: TensorSpec, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    """A step along the x that the argument ``a`` was drawn from as ``erase``."""
    return _step(spec, sizes, generator)[..., :1] * _unit(spec, sizes, _of_argument(generator, spec.name, "a"))


def _write_parallel(spec: TensorSpec, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    """The same for ``erase-parallel``, with steps near one."""
    steps = _near_one(spec, sizes, generator)[..., :1]
    return steps * _parallel(spec, sizes, _of_argument(generator, spec.name, "a"))


def _of_argument(generator: torch.Generator, own: str, other: str) -> torch.Generator:
    """The generator that another argument of the call is drawn from."""
    seed = generator.initial_seed() - zlib.crc32(own.encode()) + zlib.crc32(other.encode())
    return torch.Generator(generator.device).manual_seed(seed)


def _large(spec: TensorSpec, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    """Up to 3e4 in size: products of two of them pass what fp16 holds."""
    return (1e4 * _normal(spec, sizes, generator)).clamp(-3e4, 3e4)


def _state(spec: TensorSpec, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    """Normal, with a ramp over the last axes and the heads: no symmetry for a wrong layout to hide behind."""
    x = _normal(spec, sizes, generator) * _per_head(spec, _normal(spec, sizes, generator), 0.5, 1.5)
    for axis in range(max(1, x.dim() - 2), x.dim()):
        shape = [1] * x.dim()
        shape[axis] = x.shape[axis]
        ramp = torch.linspace(0.5, 1.0 + 0.5 * (x.dim() - axis), x.shape[axis], dtype=x.dtype, device=x.device)
        x = x * ramp.view(shape)
    return x


STRATEGIES: dict[str, Strategy] = {
    "normal": _normal,
    "unit": _unit,
    "gate": _gate,
    "strong": _strong,
    "zero": _zero,
    "mixed": _mixed,
    "step": _step,
    "near-one": _near_one,
    "parallel": _parallel,
    "erase": _erase,
    "erase-parallel": _erase_parallel,
    "write": _write,
    "write-parallel": _write_parallel,
    "large": _large,
    "state": _state,
}
"""The distributions that a case's ``draw`` may name."""
