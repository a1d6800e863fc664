"""The graph door: an op as ``torch.library`` nodes, one forward and one backward, for compilers and subclasses.

There is one pair of nodes for each residual format, and one forward without residuals for calls that need no
gradient. The trace fixes the node (and so the format) from facts that do not vary; which implementation runs is
decided inside the node from the real sizes, so no size is specialised. Inside a node no output is an Optional or an
alias of an input: an absent tensor has no element.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from chunkwise.autograd.bridge import route_for, run_backward, run_forward
from chunkwise.autograd.residuals import ResidualFormat
from chunkwise.dispatcher import policy, select
from chunkwise.dispatcher.cache import ROUTES
from chunkwise.dispatcher.route import Route
from chunkwise.protocol import derive
from chunkwise.protocol.axes import dtype_name
from chunkwise.protocol.declaration import Declaration
from chunkwise.verifier.device import device_facts
from chunkwise.verifier.facts import Facts

NAMESPACE = "chunkwise"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_NODES: dict[tuple[str, str | None], Any] = {}
"""(op, format name or None) to the forward node."""
_DECLARATIONS: dict[str, Declaration] = {}
_Fixed = tuple[str, "int | None", "tuple[torch.dtype | None, ...]", tuple[int, ...]]
"""Device type and index, dtypes of the tensors, sizes of the static axes."""


def call(declaration: Declaration, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """Call the op's forward node. Traced by torch.compile, so it holds nothing but plain control flow."""
    options = tuple([_constant(option) for option in options])
    named = options[-1] if options[-1] is not None else policy.ACTIVE.backend
    residuals = policy.ACTIVE.residuals
    needs = []
    for spec, tensor in zip(declaration.tensors, tensors):  # noqa: B905  # the tracer has no strict=
        wanted = spec.name in declaration.promises.differentiable and tensor is not None
        needs.append(wanted and tensor.requires_grad and torch.is_grad_enabled())
    name = None
    if any(needs):
        name = _format_name(
            declaration.name, _fixed(declaration, tensors), options[:-1], tuple(needs), named, residuals
        )
    node = _NODES[declaration.name, name]
    results = node(*tensors, *options[:-1], needs, named or "", residuals or "")
    return _asked_for(declaration, results, options)


def _constant(number: Any) -> Any:
    """What is no tensor, as a constant of the trace where ``dynamic=True`` made a number of it a symbol.

    The tracer keeps ``int()`` and ``float()`` of a symbol symbolic; keys to group by it makes constants, with a guard.
    """
    return next(key for key, _ in groupby([number]))


def _asked_for(
    declaration: Declaration, results: Sequence[Tensor], options: Sequence[Any]
) -> tuple[Tensor | None, ...]:
    outputs: list[Tensor | None] = []
    for output, result in zip(declaration.promises.outputs, results):  # noqa: B905
        asked = output.when is None or options[declaration.option_names.index(output.when)]
        outputs.append(result if asked else None)
    return tuple(outputs)


def _fixed(declaration: Declaration, tensors: Sequence[Any]) -> _Fixed:
    """Device, dtypes and the sizes of the axes that do not vary, as constants of the trace."""
    sizes = []
    for axis in declaration.promises.static_axes:
        for spec, tensor in zip(declaration.tensors, tensors):  # noqa: B905
            names = [a.name for a in spec.axes]
            if tensor is not None and axis in names and not spec.optional:
                sizes.append(_constant(tensor.shape[names.index(axis)]))
                break
    device = tensors[0].device
    dtypes = tuple([None if t is None else t.dtype for t in tensors])
    return device.type, device.index, dtypes, tuple(sizes)


def _format_name(
    op: str,
    fixed: _Fixed,
    options: tuple[Any, ...],
    needs: tuple[bool, ...],
    named: str | None,
    residuals: str | None,
) -> str:
    """The residual format of a trace; the same rule as an eager call's."""
    declaration = _DECLARATIONS[op]
    device_type, device_index, dtypes, sizes = fixed
    names = declaration.tensor_names
    given = {name: dtype_name(d) for name, d in zip(names, dtypes, strict=True) if d is not None}
    facts = Facts(
        op=op,
        device=device_facts(device_type, device_index),
        sizes=dict(zip(declaration.promises.static_axes, sizes, strict=True)),
        dtypes=given,
        flags={
            **dict(zip(declaration.option_names, options, strict=False)),
            "ragged": any(o.name in given for o in declaration.promises.offsets),
        },
        needs=frozenset(name for name, needed in zip(names, needs, strict=True) if needed),
    )
    chosen = select.choose_format(select.Request(declaration, facts, named, "the graph", residuals))
    if chosen is None:
        raise ValueError("a format is chosen only where a gradient is needed")
    return chosen.name


# What torch.compiler.assume_constant_result does, without its import of the whole compiler.
_format_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


# --- definition of the nodes ---------------------------------------------------------------------------------


def define(declaration: Declaration) -> None:
    """Define the nodes of an op, with fakes and autograd derived from its declaration."""
    _DECLARATIONS[declaration.name] = declaration
    _NODES[declaration.name, None] = _define_forward(declaration, None)
    for residual_format in declaration.promises.formats:
        node = _define_forward(declaration, residual_format)
        backward = _define_backward(declaration, residual_format)
        torch.library.register_autograd(
            node,
            _backward_of(declaration, residual_format, backward),
            setup_context=_setup_context(declaration, residual_format),
            lib=_LIBRARY,
        )
        _NODES[declaration.name, residual_format.name] = node


def _schema_arguments(declaration: Declaration) -> str:
    kinds = {bool: "bool", int: "int", float: "float", str: "str"}
    tensors = [f"Tensor{'?' if spec.optional else ''} {spec.name}" for spec in declaration.tensors]
    options = []
    for spec in declaration.options:
        if spec.name != "backend":
            kind = next(kinds[t] for t in spec.types if t in kinds)
            options.append(f"{kind}{'?' if type(None) in spec.types else ''} {spec.name}")
    return ", ".join([*tensors, *options, "bool[] needs", "str backend", "str residuals"])


def _node_name(declaration: Declaration, residual_format: ResidualFormat | None, suffix: str = "") -> str:
    if residual_format is None:
        return declaration.name + suffix
    return f"{declaration.name}_{residual_format.name.replace('-', '_').replace('@', '_v')}{suffix}"


def _define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _define_forward(declaration: Declaration, residual_format: ResidualFormat | None) -> Any:
    outputs = len(declaration.promises.outputs) + (len(residual_format.fields) if residual_format else 0)
    returns = ", ".join(["Tensor"] * outputs)
    schema = f"{_node_name(declaration, residual_format)}({_schema_arguments(declaration)}) -> ({returns})"
    return _define(
        schema,
        functools.partial(_forward_kernel, declaration, residual_format),
        functools.partial(_forward_fake, declaration, residual_format),
    )


def _define_backward(declaration: Declaration, residual_format: ResidualFormat) -> Any:
    grads = [f"Tensor? grad_{output.name}" for output in declaration.promises.outputs]
    residuals = [f"Tensor saved_{name}" for name in residual_format.saved_names]
    returns = ", ".join(["Tensor"] * len(declaration.promises.differentiable))
    arguments = ", ".join([*grads, *residuals, _schema_arguments(declaration)])
    return _define(
        f"{_node_name(declaration, residual_format, '_backward')}({arguments}) -> ({returns})",
        functools.partial(_backward_kernel, declaration, residual_format),
        functools.partial(_backward_fake, declaration, residual_format),
    )


def _split(declaration: Declaration, arguments: Sequence[Any]) -> tuple[Any, Any, frozenset[str], str, str]:
    """A node's arguments as tensors, options with backend, names of needed gradients, backend, residuals."""
    count = len(declaration.tensors)
    *options, needs, backend, residuals = arguments[count:]
    named = zip(declaration.tensor_names, needs, strict=True)
    wanted = frozenset(name for name, needed in named if needed)
    return tuple(arguments[:count]), (*options, backend or None), wanted, backend, residuals


def _node_route(
    declaration: Declaration, residual_format: ResidualFormat | None, arguments: Sequence[Any]
) -> tuple[Route, tuple[Any, ...], frozenset[str]]:
    """The route for real sizes; found in the cache that eager calls use, under a key of its own."""
    tensors, options, needs, _, _ = _split(declaration, arguments)
    described = tuple(None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors)
    key = (declaration, policy.ACTIVE, residual_format, options, needs, described)
    route = ROUTES.get(key)
    if route is None:
        named = residual_format.name if residual_format else None
        request = select.request_of(declaration, tensors, options, needs, policy.ACTIVE, named)
        route = route_for(request, residual_format, tensors)
        ROUTES.put(key, route)
    return route, tensors, needs


def _forward_kernel(
    declaration: Declaration, residual_format: ResidualFormat | None, *arguments: Any
) -> tuple[Tensor, ...]:
    route, tensors, _ = _node_route(declaration, residual_format, arguments)
    outputs, residuals = run_forward(route, tensors)
    return (*(_or_empty(o, tensors[0]) for o in outputs), *residuals)


def _backward_kernel(declaration: Declaration, residual_format: ResidualFormat, *arguments: Any) -> tuple[Tensor, ...]:
    outputs, fields = len(declaration.promises.outputs), len(residual_format.saved_names)
    grads, residuals = arguments[:outputs], arguments[outputs : outputs + fields]
    route, tensors, needs = _node_route(declaration, residual_format, arguments[outputs + fields :])
    gradients = run_backward(route, tensors, residuals, grads, needs)
    by_name = dict(zip(declaration.tensor_names, gradients, strict=True))
    return tuple(_or_empty(by_name[name], tensors[0]) for name in declaration.promises.differentiable)


def _or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.float32) if tensor is None else tensor


def _forward_fake(
    declaration: Declaration, residual_format: ResidualFormat | None, *arguments: Any
) -> tuple[Tensor, ...]:
    tensors, options, _, _, _ = _split(declaration, arguments)
    binding = derive.check(declaration, tensors, options)
    values = dict(zip(declaration.option_names, options, strict=True))
    results = []
    for output in declaration.promises.outputs:
        if output.when is not None and not values[output.when]:
            results.append(_or_empty(None, tensors[0]))
            continue
        axes = output.axes_text
        if output.name in declaration.promises.states and values.get("state_v_first"):
            *lead, first, last = axes.split()
            axes = " ".join([*lead, last, first])
        results.append(derive.output_like(declaration, axes, output.dtype, binding.sizes, tensors))
    if residual_format is not None:
        sizes = residual_format.all_sizes(binding.sizes, binding.ragged)
        for field in residual_format.fields:
            results.append(derive.output_like(declaration, field.axes_text, field.dtype, sizes, tensors))
    return tuple(results)


def _backward_fake(declaration: Declaration, residual_format: ResidualFormat, *arguments: Any) -> tuple[Tensor, ...]:
    skip = len(declaration.promises.outputs) + len(residual_format.saved_names)
    tensors, _, needs, _, _ = _split(declaration, arguments[skip:])
    by_name = dict(zip(declaration.tensor_names, tensors, strict=True))
    return tuple(
        by_name[name].new_empty(by_name[name].shape) if name in needs else _or_empty(None, tensors[0])
        for name in declaration.promises.differentiable
    )


def _setup_context(declaration: Declaration, residual_format: ResidualFormat) -> Callable[..., None]:
    count, outputs = len(declaration.tensors), len(declaration.promises.outputs)
    kept = declaration.kept_outputs(residual_format)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *output[outputs:], *(o for o in output[:outputs] if o.numel() == 0 and o.dim() == 1)
        )
        ctx.save_for_backward(*inputs[:count], *output[outputs:], *(output[i] for i in kept))
        ctx.rest = inputs[count:]

    return setup_context


def _backward_of(declaration: Declaration, residual_format: ResidualFormat, node: Any) -> Callable[..., Any]:
    count, outputs = len(declaration.tensors), len(declaration.promises.outputs)
    differentiable = declaration.promises.differentiable

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        *options, _, backend, residuals = ctx.rest
        nothing = (None,) * len(ctx.rest)
        needs = [bool(needed) for needed in ctx.needs_input_grad[:count]]
        if all(g is None for g in grads[:outputs]):
            return (None,) * count + nothing
        results = node(*grads[:outputs], *saved[count:], *saved[:count], *options, needs, backend, residuals)
        by_name = dict(zip(differentiable, results, strict=True))
        wanted = zip(declaration.tensor_names, needs, strict=True)
        return tuple(by_name[name] if needed else None for name, needed in wanted) + nothing

    return backward
