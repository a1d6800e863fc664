"""Facts of a call that is described, not made: no tensors, and the device may be one that is not here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chunkwise import errors
from chunkwise.protocol.axes import ACTIVATION_DTYPES, TensorSpec
from chunkwise.protocol.cases import Case
from chunkwise.protocol.declaration import Declaration
from chunkwise.protocol.derive import check_options
from chunkwise.verifier.device import DeviceFacts
from chunkwise.verifier.facts import Facts


@dataclass(frozen=True)
class DescribedCall:
    """A call in words.

    Args:
        device: where its tensors would be.
        sizes: of every axis of the required tensors; of ``N`` too where ``ragged``.
        dtype: of the tensors that hold activations.
        dtypes: argument name to dtype, where it is another one.
        options: option name to value, where it is not the default.
        given: the optional tensors that are passed.
        ragged: whether the offsets are passed.
        gradients: whether the call must be able to give gradients.
    """

    device: DeviceFacts
    sizes: Mapping[str, int]
    dtype: str = "bf16"
    dtypes: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    given: tuple[str, ...] = ()
    ragged: bool = False
    gradients: bool = True


def of_case(case: Case, device: DeviceFacts, dtype: str) -> DescribedCall:
    """The call that a case of a declaration describes."""
    ragged = case.offsets is not None
    sizes = {**case.sizes, "N": len(case.offsets) - 1} if case.offsets is not None else case.sizes
    return DescribedCall(device, sizes, dtype, options=case.options, given=case.present, ragged=ragged)


def facts_of(declaration: Declaration, call: DescribedCall) -> Facts:
    """The facts of a described call. Raises ValueError or TypeError that names what is wrong with it."""
    given = _given(declaration, call)
    dtypes = {spec.name: _dtype(declaration, spec, call) for spec in given}
    _refuse_unknown(declaration.name, "dtype", call.dtypes, [spec.name for spec in declaration.tensors])
    differentiable = declaration.promises.differentiable
    return Facts(
        op=declaration.name,
        device=call.device,
        sizes=_sizes(declaration, call),
        dtypes=dtypes,
        flags={**_options(declaration, call.options), "ragged": call.ragged},
        needs=frozenset(name for name in dtypes if name in differentiable) if call.gradients else frozenset(),
    )


def required_axes(declaration: Declaration) -> list[str]:
    """The axes of the required tensors, in their order."""
    return list(dict.fromkeys(axis.name for spec in declaration.tensors if not spec.optional for axis in spec.axes))


def _given(declaration: Declaration, call: DescribedCall) -> list[TensorSpec]:
    optional = [spec.name for spec in declaration.tensors if spec.optional]
    _refuse_unknown(declaration.name, "optional tensor", call.given, optional)
    present = {*call.given, *(offsets.name for offsets in declaration.promises.offsets if call.ragged)}
    return [spec for spec in declaration.tensors if not spec.optional or spec.name in present]


def _dtype(declaration: Declaration, spec: TensorSpec, call: DescribedCall) -> str:
    usual = call.dtype
    if spec.name in declaration.promises.states:
        usual = "fp32"
    elif not set(spec.dtypes) & set(ACTIVATION_DTYPES):
        usual = spec.dtypes[0]
    dtype = call.dtypes.get(spec.name, usual)
    if dtype not in spec.dtypes:
        raise errors.wrong_dtype(declaration.name, spec.name, dtype, spec.dtypes)
    return dtype


def _sizes(declaration: Declaration, call: DescribedCall) -> dict[str, int]:
    name, sizes = declaration.name, dict(call.sizes)
    sequences = [(offsets.sequences, offsets.batch, offsets.name) for offsets in declaration.promises.offsets]
    required = required_axes(declaration)
    needed = required + [axis for axis, _, _ in sequences if call.ragged]
    if missing := [axis for axis in needed if axis not in sizes]:
        raise errors.ArgumentValueError(
            f"{name}: the size of {', '.join(missing)} is not given; give one for each axis"
        )
    _refuse_unknown(name, "axis", sizes, required + [axis for axis, _, _ in sequences])
    for axis, batch, offsets_name in sequences:
        if call.ragged and sizes[batch] != 1:
            raise errors.ragged_needs_one_row(name, offsets_name, sizes[batch])
        if not call.ragged and sizes.setdefault(axis, sizes[batch]) != sizes[batch]:
            raise errors.axis_disagrees(name, axis, axis, sizes[axis], f"{batch} (a dense call)", sizes[batch])
    for axis, size in sizes.items():
        if size < 0:
            raise errors.ArgumentValueError(f"{name}: axis {axis} is {size}, but at least 0 is expected")
        if size == 0 and axis in declaration.promises.static_axes:
            raise errors.axis_empty(name, "sizes", axis)
    for constraint in declaration.promises.constraints:
        constraint.check(name, sizes)
    return sizes


def _options(declaration: Declaration, given: Mapping[str, Any]) -> dict[str, Any]:
    specs = {spec.name: spec for spec in declaration.options if spec.name != "backend"}
    _refuse_unknown(declaration.name, "option", given, specs)
    values = {name: given.get(name, spec.default) for name, spec in specs.items()}
    check_options(declaration, values)
    return values


def _refuse_unknown(op: str, what: str, given: Mapping[str, Any] | tuple[str, ...], known: Any) -> None:
    for name in given:
        if name not in known:
            raise errors.UnknownNameError(f"{op} has no {what} {name!r}; known: {', '.join(known)}")
