"""The canonical form of a call: what core settles before a backend sees it, and undoes behind it.

A backend sees contiguous tensors, K-first fp32 states, int32 offsets, a scale that is a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from chunkwise.protocol.declaration import CORE_OPTIONS, Declaration


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.contiguous()


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32).contiguous()


def _state_v_first(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32).transpose(-1, -2).contiguous()


def _offsets(tensor: Tensor) -> Tensor:
    return tensor.to(torch.int32).contiguous()


class CanonicalForm:
    """The conversions that calls of one key need; built once a key, applied in every call."""

    def __init__(
        self, declaration: Declaration, tensors: Sequence[Any], options: Mapping[str, Any], width: int
    ) -> None:
        self.declaration = declaration
        self.options = options
        self.state_v_first = bool(options.get("state_v_first"))
        values = {**options, "scale": width**-0.5 if options["scale"] is None else float(options["scale"])}
        self.values = tuple(values[o.name] for o in declaration.options if o.name not in CORE_OPTIONS)
        self.conversions = tuple(
            (i, convert)
            for i, tensor in enumerate(tensors)
            if tensor is not None and (convert := self._conversion(declaration.tensor_names[i], tensor)) is not None
        )

    def _conversion(self, name: str, tensor: Tensor) -> Callable[[Tensor], Tensor] | None:
        promises = self.declaration.promises
        if name in promises.states and self.state_v_first:
            return _state_v_first
        if name in promises.states or name in promises.widened:
            return _widened if tensor.dtype != torch.float32 or not tensor.is_contiguous() else None
        if any(name in (offsets.name, offsets.host) for offsets in promises.offsets):
            return _offsets if tensor.dtype != torch.int32 or not tensor.is_contiguous() else None
        return None if tensor.is_contiguous() else _contiguous

    def inputs(self, tensors: Sequence[Any]) -> Any:
        """The op's ``Inputs`` for a backend."""
        if self.conversions:
            tensors = list(tensors)
            for i, convert in self.conversions:
                tensors[i] = convert(tensors[i])
        return self.declaration.Inputs(*tensors, *self.values)

    def state_out(self, state: Tensor) -> Tensor:
        """A backend's state in the caller's layout."""
        return state.transpose(-1, -2).contiguous() if self.state_v_first else state

    def state_gradient_in(self, gradient: Tensor) -> Tensor:
        """The gradient of a returned state, K-first, fp32, contiguous."""
        return (_state_v_first if self.state_v_first else _widened)(gradient)

    def gradient_out(self, name: str, gradient: Tensor, like: Tensor) -> Tensor:
        """A backend's gradient in the dtype and layout of the caller's argument."""
        if name in self.declaration.promises.states:
            gradient = self.state_out(gradient)
        return gradient.to(like.dtype)
