"""The bridge: finds the route of a request, and runs a route forward and backward.

The eager door is an ``autograd.Function`` that does its set-up inside forward (eager_door.py), the graph door a
``torch.library`` op (graph.py). Both call :func:`run_forward` and :func:`run_backward`, so that they compute the same
bits.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from chunkwise import errors
from chunkwise.autograd.residuals import ResidualFormat, Residuals
from chunkwise.dispatcher import policy, select
from chunkwise.dispatcher.explain import Explanation
from chunkwise.dispatcher.route import Route, Runner
from chunkwise.protocol import derive

_autocast_active = torch._C._is_any_autocast_enabled


def route_for(
    request: select.Request,
    residual_format: ResidualFormat | None,
    tensors: Sequence[Any],
) -> Route:
    """Select a route, or raise NoImplementationError with every reason."""
    selection = select.select(request, residual_format)
    if selection.forward is None:
        raise errors.no_implementation(str(Explanation(selection)))
    route = select.build_route(selection, tensors, policy.ACTIVE)
    if policy.logger.isEnabledFor(logging.INFO):
        policy.logger.info("%s %s: %s", request.declaration.name, request.facts.describe(), route)
    return route


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
