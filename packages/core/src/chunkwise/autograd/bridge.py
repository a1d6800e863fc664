"""The bridge: one pair of functions that runs a route forward and backward, and its eager door.

The eager door is an ``autograd.Function`` that does its set-up inside forward; the graph door (graph.py) is a
``torch.library`` op. Both call :func:`run_forward` and :func:`run_backward`, so that they compute the same bits.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from chunkwise import errors
from chunkwise.autograd import graph
from chunkwise.autograd.residuals import ResidualFormat, Residuals
from chunkwise.dispatcher import failure, policy, select
from chunkwise.dispatcher.cache import ROUTES
from chunkwise.dispatcher.route import Route, Runner
from chunkwise.protocol import derive
from chunkwise.protocol.declaration import Declaration

_PLAIN_TYPES = frozenset((Tensor, Parameter))
_transforms_active = torch._C._are_functorch_transforms_active
_modes_active = torch._C._len_torch_dispatch_stack
_autocast_active = torch._C._is_any_autocast_enabled
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
    request = select.request_of(declaration, tensors, options, needed_gradients(declaration, tensors), policy.ACTIVE)
    if request.facts.device.kind == "meta":
        return None
    while True:
        route = route_for(request, select.choose_format(request), tensors)
        if failure.prepare(route, request.facts):
            return route


def route_for(
    request: select.Request,
    residual_format: ResidualFormat | None,
    tensors: Sequence[Any],
) -> Route:
    """Select a route, or raise NoImplementationError with every reason."""
    from chunkwise.dispatcher.explain import Explanation

    selection = select.select(request, residual_format)
    if selection.forward is None:
        raise errors.no_implementation(str(Explanation(selection)))
    route = select.build_route(selection, tensors, policy.ACTIVE)
    if policy.logger.isEnabledFor(logging.INFO):
        policy.logger.info("%s %s: %s", request.declaration.name, request.facts.describe(), route)
    return route


def needed_gradients(declaration: Declaration, tensors: Sequence[Any]) -> frozenset[str]:
    """The arguments whose gradient the call must be able to give."""
    if not _grad_enabled():
        return frozenset()
    named = zip(declaration.tensor_names, tensors, strict=True)
    wanted = declaration.promises.differentiable
    return frozenset(name for name, t in named if name in wanted and t is not None and t.requires_grad)


# --- the pair of functions that both doors call -------------------------------------------------------------


def run_forward(route: Route, tensors: Sequence[Any]) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, ...]]:
    """The outputs (None where not asked for) and the residuals in the order of their format's fields."""
    if route.check_values:
        derive.check_values(route.declaration, tensors, route.form.options)
    elif route.check_offsets:
        derive.check_host_offsets(route.declaration, tensors)
    save = route.format.name if route.format else None
    outputs, saved = _run(route, route.forward, route.form.inputs(tensors), save)
    if route.form.state_v_first:
        outputs = _states_out(route, outputs)
    if route.format is None:
        return outputs, ()
    if len(saved) != len(route.format.fields) or not all(map(saved.__contains__, route.format.field_names)):
        raise errors.wrong_residuals(route.forward.implementation.name, saved, route.format.field_names)
    return outputs, route.format.pick(saved)


def run_backward(
    route: Route,
    tensors: Sequence[Any],
    residuals: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    needs: frozenset[str],
) -> tuple[Tensor | None, ...]:
    """The gradient of each tensor argument, None where ``needs`` does not name it."""
    declaration, residual_format, runner = route.declaration, route.format, route.backward
    if residual_format is None or runner is None:
        raise errors.bad_backend(declaration.name, "a route without a backward was asked for gradients")
    outputs = declaration.promises.outputs
    canonical = tuple(
        None if g is None else _gradient_in(route, output.name, g) for output, g in zip(outputs, grads, strict=True)
    )
    saved = Residuals(residual_format.name, dict(zip(residual_format.saved_names, residuals, strict=True)))
    found = _run(route, runner, route.form.inputs(tensors), saved, canonical, needs)
    if found.keys() != needs:
        raise errors.wrong_gradients(runner.implementation.name, found, needs)
    return tuple(
        route.form.gradient_out(name, found[name], tensor) if name in needs else None
        for name, tensor in zip(declaration.tensor_names, tensors, strict=True)
    )


def _run(route: Route, runner: Runner, *arguments: Any) -> Any:
    """Call a backend's function on the tensors' device, out of autocast's reach."""
    if route.device_index is None and not _autocast_active():
        return runner.function(runner.schedule, *arguments)
    with contextlib.ExitStack() as stack:
        if route.device_index is not None and route.device_index != torch.cuda.current_device():
            stack.enter_context(torch.cuda.device(route.device_index))
        if _autocast_active():
            kind = "cpu" if route.device_index is None else "cuda"
            stack.enter_context(torch.autocast(kind, enabled=False))
        return runner.function(runner.schedule, *arguments)


def _states_out(route: Route, outputs: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    names = [output.name for output in route.declaration.promises.outputs]
    states = route.declaration.promises.states
    return tuple(
        route.form.state_out(tensor) if tensor is not None and name in states else tensor
        for name, tensor in zip(names, outputs, strict=True)
    )


def _gradient_in(route: Route, output: str, gradient: Tensor) -> Tensor:
    if output in route.declaration.promises.states:
        return route.form.state_gradient_in(gradient)
    return gradient.contiguous()


# --- the eager door -----------------------------------------------------------------------------------------


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
