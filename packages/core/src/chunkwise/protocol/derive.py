"""What is derived from a declaration: argument checks, output shapes, offset and value checks, docs rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chunkwise import errors
from chunkwise.protocol.axes import DTYPES, Axis, Binder, TensorSpec, dtype_name
from chunkwise.protocol.contracts import finite, offset_problem
from chunkwise.protocol.declaration import Declaration, Offsets


@dataclass(frozen=True)
class Binding:
    """A checked call: the size of every axis, and whether its sequences are ragged."""

    sizes: Mapping[str, Any]
    ragged: bool


def check(declaration: Declaration, tensors: Sequence[Any], options: Sequence[Any]) -> Binding:
    """Hold a call against its declaration; raises ValueError or TypeError that names the argument."""
    check_options(declaration, dict(zip(declaration.option_names, options, strict=True)))
    present = _present(declaration, tensors)
    _check_kinds(declaration, present)
    _check_devices(declaration, present)
    return _bind(declaration, present, _option(declaration, options, "state_v_first"))


def check_options(declaration: Declaration, values: Mapping[str, Any]) -> None:
    """Raise where an option has a wrong type, a number is not finite, or the op itself refuses a value."""
    for spec in declaration.options:
        if spec.name in values and not spec.accepts(values[spec.name]):
            raise errors.wrong_option(declaration.name, spec.name, values[spec.name], spec.expected)
    if declaration.promises.settle is not None:
        declaration.promises.settle(values)


def settled(declaration: Declaration, options: Mapping[str, Any], residuals: str | None) -> Mapping[str, Any]:
    """The options that hold for a call: those given, and where they leave something open, what the op settles.

    ``residuals`` may name a residual format; a chunk size that is left open is then that format's.
    """
    if declaration.promises.settle is None:
        return options
    chunks = {f.name: f.chunk_size for f in declaration.promises.formats if f.chunk_size is not None}
    if "chunk_size" in options and residuals in chunks:
        if options["chunk_size"] not in (None, chunks[residuals]):
            raise errors.format_of_other_chunks(declaration.name, residuals, chunks[residuals], options["chunk_size"])
        options = {**options, "chunk_size": chunks[residuals]}
    return {**options, **declaration.promises.settle(options)}


def _option(declaration: Declaration, options: Sequence[Any], name: str) -> Any:
    names = declaration.option_names
    return options[names.index(name)] if name in names else None


def _present(declaration: Declaration, tensors: Sequence[Any]) -> dict[str, Tensor]:
    present = {}
    for spec, value in zip(declaration.tensors, tensors, strict=True):
        if value is None and spec.optional:
            continue
        if value is None:
            raise errors.missing_tensor(declaration.name, spec.name)
        if not isinstance(value, Tensor):
            raise errors.not_a_tensor(declaration.name, spec.name, value)
        present[spec.name] = value
    return present


def _check_kinds(declaration: Declaration, present: Mapping[str, Tensor]) -> None:
    for spec in declaration.tensors:
        tensor = present.get(spec.name)
        if tensor is None:
            continue
        if tensor.layout is not torch.strided:
            raise errors.not_strided(declaration.name, spec.name, str(tensor.layout))
        if dtype_name(tensor.dtype) not in spec.dtypes:
            raise errors.wrong_dtype(declaration.name, spec.name, dtype_name(tensor.dtype), spec.dtypes)


def _check_devices(declaration: Declaration, present: Mapping[str, Tensor]) -> None:
    hosts = {offsets.host for offsets in declaration.promises.offsets}
    source, first = next(iter(present.items()))
    for name, tensor in present.items():
        if name in hosts:
            if tensor.device.type != "cpu":
                raise errors.host_tensor_expected(declaration.name, name, str(tensor.device))
        elif tensor.device != first.device:
            raise errors.wrong_device(declaration.name, name, str(tensor.device), source, str(first.device))


def _bind(declaration: Declaration, present: Mapping[str, Tensor], state_v_first: bool) -> Binding:
    name, promises = declaration.name, declaration.promises
    specs = {spec.name: spec for spec in declaration.tensors}
    binder = Binder(name)
    for spec in declaration.tensors:
        if not spec.optional:
            binder.bind(spec, present[spec.name].shape)
    _check_all_offsets(declaration, present)
    ragged = [_bind_sequences(binder, offsets, specs, present) for offsets in promises.offsets]
    for state in promises.states:
        if state in present:
            spec = swapped(specs[state]) if state_v_first else specs[state]
            binder.bind(spec, present[state].shape)
    for axis in promises.static_axes:
        if binder.sizes[axis] == 0:
            raise errors.axis_empty(name, binder.fixed_by[axis], axis)
    for constraint in promises.constraints:
        constraint.check(name, binder.sizes)
    return Binding(binder.sizes, any(ragged))


def _check_all_offsets(declaration: Declaration, present: Mapping[str, Tensor]) -> None:
    names = [offsets.name for offsets in declaration.promises.offsets]
    given = [name for name in names if name in present]
    if given and len(given) < len(names):
        raise errors.requires(declaration.name, given[0], next(name for name in names if name not in present))


def swapped(spec: TensorSpec) -> TensorSpec:
    """The V-first layout of a state: its last two axes change places."""
    *lead, first, last = spec.axes_text.split()
    return tensor_spec_of(spec, " ".join([*lead, last, first]))


def tensor_spec_of(spec: TensorSpec, axes_text: str) -> TensorSpec:
    """The same argument with other axes."""
    axes = tuple(map(Axis.parse, axes_text.split()))
    return TensorSpec(spec.name, axes_text, axes, spec.dtypes, spec.optional)


def _bind_sequences(
    binder: Binder, offsets: Offsets, specs: Mapping[str, TensorSpec], present: Mapping[str, Tensor]
) -> bool:
    """Fix N: from the offsets where they are given, else N = B. Returns whether the call is ragged."""
    given = present.get(offsets.name)
    if given is None:
        if offsets.host in present:
            raise errors.requires(binder.op, offsets.host, offsets.name)
        binder.fix(offsets.sequences, binder.sizes[offsets.batch], f"{offsets.batch} (without {offsets.name})")
        return False
    if binder.sizes[offsets.batch] != 1:
        raise errors.ragged_needs_one_row(binder.op, offsets.name, binder.sizes[offsets.batch])
    if given.dim() == 1 and given.shape[0] == 0:
        raise errors.offsets_empty(binder.op, offsets.name)
    binder.bind(specs[offsets.name], given.shape)
    if offsets.host in present:
        binder.bind(specs[offsets.host], present[offsets.host].shape)
    return True


def check_host_offsets(declaration: Declaration, tensors: Sequence[Any]) -> None:
    """Raise where offsets that the host can read without a sync decrease, do not start at 0 or pass T."""
    present = dict(zip(declaration.tensor_names, tensors, strict=True))
    for offsets in declaration.promises.offsets:
        given, host = present[offsets.name], present[offsets.host]
        if given is not None and given.device.type == "cpu":
            _raise_bad_offset(declaration, offsets, offsets.name, given, present)
        if host is not None:
            _raise_bad_offset(declaration, offsets, offsets.host, host, present)


def _raise_bad_offset(
    declaration: Declaration, offsets: Offsets, name: str, values: Tensor, present: Mapping[str, Any]
) -> None:
    problem = offset_problem(values, _rows(declaration, offsets, present), offsets.rows)
    if problem is not None:
        raise errors.bad_offset(declaration.name, name, *problem, axis=offsets.rows)


def _rows(declaration: Declaration, offsets: Offsets, present: Mapping[str, Any]) -> int:
    """The number of rows that the offsets cut: the size of their axis in the first tensor that has it."""
    for spec in declaration.tensors:
        for position, axis in enumerate(spec.axes):
            if axis.name == offsets.rows and present[spec.name] is not None:
                return int(present[spec.name].shape[position])
    raise errors.bad_backend(declaration.name, f"no argument has the axis {offsets.rows}")


def check_values(declaration: Declaration, tensors: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Hold values against the contracts: gates, NaN, offsets on the device. Syncs; rows of padding are left out.

    ``options`` are the call's, settled: they may promise more than the declaration does.
    """
    present = dict(zip(declaration.tensor_names, tensors, strict=True))
    ends: dict[str, int] = {}
    for offsets in declaration.promises.offsets:
        given, host = present[offsets.name], present[offsets.host]
        if given is None:
            continue
        values = given.cpu()
        _raise_bad_offset(declaration, offsets, offsets.name, values, present)
        if host is not None and bool((host.long() != values.long()).any()):
            index = int((host.long() != values.long()).nonzero()[0])
            raise errors.offsets_differ(
                declaration.name, offsets.name, offsets.host, index, int(values[index]), int(host[index])
            )
        ends[offsets.rows] = int(values[-1])
    bounds = {contract.name: contract.under(options) for contract in declaration.promises.contracts}
    for spec in declaration.tensors:
        tensor = present[spec.name]
        if tensor is not None and tensor.is_floating_point():
            contract = bounds.get(spec.name, finite(spec.name))
            contract.check(declaration.name, _live_rows(spec, tensor.detach(), ends))


def _live_rows(spec: TensorSpec, tensor: Tensor, ends: Mapping[str, int]) -> Tensor:
    for position, axis in enumerate(spec.axes):
        if axis.name in ends:
            tensor = tensor.narrow(position, 0, ends[axis.name])
    return tensor


def output_like(
    declaration: Declaration, axes_text: str, dtype: str, sizes: Mapping[str, Any], tensors: Sequence[Any]
) -> Tensor:
    """An uninitialised tensor of the given axes, on the call's device; ``dtype`` may name an argument."""
    present = dict(zip(declaration.tensor_names, tensors, strict=True))
    resolved = DTYPES[dtype] if dtype in DTYPES else present[dtype].dtype
    shape = [sizes[axis.name] + axis.plus for axis in map(Axis.parse, axes_text.split())]
    first: Tensor = next(t for t in tensors if t is not None)
    return first.new_empty(shape, dtype=resolved)
