"""The eager door: a call from Python to its cached route, under an ``autograd.Function`` where a gradient is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from chunkwise import errors
from chunkwise.autograd import graph
from chunkwise.autograd.bridge import route_for, run_backward, run_forward
from chunkwise.dispatcher import failure, policy, select
from chunkwise.dispatcher.cache import ROUTES
from chunkwise.dispatcher.route import Route
from chunkwise.protocol import derive
from chunkwise.protocol.declaration import Declaration

_PLAIN_TYPES = frozenset((Tensor, Parameter))
_transforms_active = torch._C._are_functorch_transforms_active
_modes_active = torch._C._len_torch_dispatch_stack
_grad_enabled = torch.is_grad_enabled


def call(declaration: Declaration, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """Run an op eagerly: key, cached route, run. Calls that a route cannot take go to the graph door."""
    if _transforms_active() or forward_ad._current_level >= 0:
        raise errors.transform_unsupported(declaration.name)
    recorded = _grad_enabled()
    key: Any = [declaration, policy.ACTIVE, options, recorded]
    try:
        for tensor in tensors:
            if tensor is None:
                key.append(None)
            elif type(tensor) in _PLAIN_TYPES:
                # A contiguous tensor's strides follow from its shape; to ask for them costs twice as much.
                strides = tensor.is_contiguous() or tensor.stride()
                key += (tensor.shape, strides, tensor.dtype, tensor.device, recorded and tensor.requires_grad)
            else:
                return _call_unusual(declaration, tensors, options)
        key = tuple(key)
        route = ROUTES.get(key)
    except (RuntimeError, TypeError):  # a layout without strides, or an option that cannot be hashed
        derive.check(declaration, tensors, options)
        raise
    if _modes_active():
        return graph.call(declaration, tensors, options)
    if route is None:
        return _call_anew(declaration, tensors, options, key)
    return failure.attempt(_run_recorded if route.needs else _run_unrecorded, route, tensors) or _call_anew(
        declaration, tensors, options, key
    )


def _call_anew(declaration: Declaration, tensors: tuple[Any, ...], options: tuple[Any, ...], key: Any) -> Any:
    """Find routes until one compiles, run it and keep it."""
    while True:
        route = _find_route(declaration, tensors, options)
        if route is None:
            return graph.call(declaration, tensors, options)
        ROUTES.put(key, route)
        outputs = failure.attempt(_run_recorded if route.needs else _run_unrecorded, route, tensors)
        if outputs is not None:
            return outputs


def _call_unusual(declaration: Declaration, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """Tensor subclasses (fake, functional, distributed) dispatch on the graph door's op; other types raise."""
    derive.check(declaration, tensors, options)
    return graph.call(declaration, tensors, options)


def _find_route(declaration: Declaration, tensors: Sequence[Any], options: Sequence[Any]) -> Route | None:
    """The route of a new key, its kernels compiled; None for tensors without storage (``meta``)."""
    needs = select.needed_gradients(declaration, tensors)
    request = select.request_of(declaration, tensors, options, needs, policy.ACTIVE)
    if request.facts.device.kind == "meta":
        return None
    while True:
        route = route_for(request, select.choose_format(request), tensors)
        if failure.prepare(route, request.facts):
            return route


def _run_unrecorded(route: Route, tensors: Sequence[Any]) -> Any:
    return run_forward(route, tensors)[0]


def _run_recorded(route: Route, tensors: Sequence[Any]) -> Any:
    return _apply_recorded(route, *tensors)


class _Recorded(torch.autograd.Function):
    """A call whose gradient is wanted. Set-up inside forward costs a quarter of a custom op's."""

    @staticmethod
    def forward(ctx: Any, route: Route, *tensors: Any) -> Any:
        ctx.set_materialize_grads(False)
        outputs, residuals = run_forward(route, tensors)
        ctx.route = route
        kept = [outputs[i] for i in route.kept_outputs] if route.kept_outputs else ()
        ctx.save_for_backward(*tensors, *residuals, *kept)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        route: Route = ctx.route
        saved, count = ctx.saved_tensors, len(route.declaration.tensors)
        tensors, residuals = saved[:count], saved[count:]
        asked = zip(route.declaration.tensor_names, ctx.needs_input_grad[1:], strict=True)
        needs = frozenset(name for name, needed in asked if needed and name in route.needs)
        if not needs or all(g is None for g in grads):
            return (None,) * (count + 1)
        with torch.no_grad():
            gradients = run_backward(route, tensors, residuals, grads, needs)
        if _grad_enabled():  # create_graph=True: a second differentiation must raise, not give zeros
            gradients = _Once.apply(route.declaration.name, gradients, *tensors, *grads)
        return (None, *gradients)


# Function.apply's own C function: what Python adds before it (a look for torch.func transforms) was done already.
_apply_recorded = super(torch.autograd.Function, _Recorded).apply


class _Once(torch.autograd.Function):
    """Passes gradients on, tied to what they depend on; differentiating them again raises."""

    @staticmethod
    def forward(ctx: Any, op: str, gradients: tuple[Tensor | None, ...], *_: Any) -> Any:
        ctx.op = op
        return tuple(None if g is None else g.view_as(g) for g in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise errors.double_backward_unsupported(ctx.op)
