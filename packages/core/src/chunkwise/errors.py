"""Every message to a user, in one catalogue.

Each builder returns an exception (the caller raises it), and each message says what was given, what was
expected and what to do. Nothing here imports torch, so that a message can be built anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class ChunkwiseError(Exception):
    """Base of the errors that are this library's own; bad arguments raise ValueError and TypeError too."""


class ArgumentValueError(ChunkwiseError, ValueError):
    """An argument has the wrong shape, dtype, device or value."""


class ArgumentTypeError(ChunkwiseError, TypeError):
    """An argument is of the wrong Python type."""


class UnknownNameError(ChunkwiseError, ValueError):
    """A backend, an implementation, an op or a residual format that nobody registered."""


class NoImplementationError(ChunkwiseError, RuntimeError):
    """No usable implementation can run the call; the message holds every reason."""


class UnsupportedTransformError(ChunkwiseError, RuntimeError):
    """vmap, forward-mode or double differentiation, which the ops do not have."""


class CompileFailure(ChunkwiseError, RuntimeError):
    """A backend raises this when a kernel cannot be compiled: nothing was launched, the inputs are untouched."""


class BackendBug(ChunkwiseError, RuntimeError):
    """A backend broke the protocol: a wrong set of gradients, residuals or rules."""


def _listing(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


# --- arguments -------------------------------------------------------------------------------------------


def not_a_tensor(op: str, name: str, given: object) -> Exception:
    kind = type(given).__name__
    return ArgumentTypeError(f"{op}: {name} is a {kind}, but a torch.Tensor is expected; pass a tensor")


def missing_tensor(op: str, name: str) -> Exception:
    return ArgumentTypeError(f"{op}: {name} is None, but it is required; pass a tensor")


def not_strided(op: str, name: str, layout: str) -> Exception:
    return ArgumentTypeError(
        f"{op}: {name} has layout {layout}, but a strided tensor is expected; call .to_dense() first"
    )


def wrong_rank(op: str, name: str, shape: Sequence[int], axes: str) -> Exception:
    rank = len(axes.split())
    return ArgumentValueError(
        f"{op}: {name} has shape {list(shape)} ({len(shape)} axes), but [{axes}] ({rank} axes) is expected"
    )


def axis_disagrees(op: str, name: str, axis: str, given: int, source: str, fixed: int) -> Exception:
    return ArgumentValueError(f"{op}: {name}: axis {axis} is {given}, but {source} fixed {axis} = {fixed}")


def offsets_empty(op: str, name: str) -> Exception:
    return ArgumentValueError(
        f"{op}: {name} has no entry, but N + 1 offsets are expected; [0] stands for no sequence at all"
    )


def axis_empty(op: str, name: str, axis: str) -> Exception:
    return ArgumentValueError(f"{op}: {name}: axis {axis} is 0, but at least 1 is expected")


def not_divisible(op: str, axis: str, size: int, divisor: str, by: int) -> Exception:
    return ArgumentValueError(
        f"{op}: {axis} = {size} is not a multiple of {divisor} = {by}; each of the {divisor} heads serves {axis} // "
        f"{divisor} of the {axis}, so give {axis} as a multiple of {divisor}"
    )


def wrong_dtype(op: str, name: str, given: str, expected: Iterable[str]) -> Exception:
    return ArgumentTypeError(
        f"{op}: {name} has dtype {given}, but one of {_listing(expected)} is expected; convert it with .to()"
    )


def wrong_device(op: str, name: str, given: str, source: str, expected: str) -> Exception:
    return ArgumentValueError(
        f"{op}: {name} is on {given}, but {source} is on {expected}; move all tensors to one device"
    )


def host_tensor_expected(op: str, name: str, given: str) -> Exception:
    return ArgumentValueError(f"{op}: {name} is on {given}, but a copy in host memory is expected; call .cpu()")


def wrong_option(op: str, name: str, given: object, expected: str) -> Exception:
    kind = type(given).__name__
    return ArgumentTypeError(f"{op}: {name} = {given!r} ({kind}), but {expected} is expected{_one_window(name, given)}")


def _one_window(name: str, given: object) -> str:
    if name != "window_size" or not isinstance(given, (tuple, list)):
        return ""
    left = given[0] if len(given) == 2 and given[1] == 0 and isinstance(given[0], int) else None
    number = "left + 1" if left is None else "None" if left == -1 else str(left + 1)
    return (
        ": the number of keys that a query sees, its own position included; (left, 0) is window_size=left + 1 and "
        f"(-1, 0) is None, both with causal=True, so give window_size={number}"
    )


def window_too_small(op: str, given: int) -> Exception:
    return ArgumentValueError(
        f"{op}: window_size = {given}, but at least 1 is expected (a query sees its own position); None: no window"
    )


def window_needs_causal(op: str, given: int) -> Exception:
    return ArgumentValueError(
        f"{op}: window_size = {given} together with causal=False, but a window reaches back only; give causal=True, or "
        f"window_size=None"
    )


def ragged_needs_one_row(op: str, name: str, batch: int) -> Exception:
    return ArgumentValueError(
        f"{op}: B = {batch} together with {name}, but ragged sequences are packed into one row; reshape the "
        f"inputs to [1, B * T, ...] and give the offsets of all sequences"
    )


def requires(op: str, name: str, needed: str) -> Exception:
    return ArgumentValueError(f"{op}: {name} was given without {needed}, and means nothing then; give both or none")


def not_one_of(op: str, name: str, given: object, allowed: Iterable[object]) -> Exception:
    return ArgumentValueError(f"{op}: {name} = {given!r}, but one of {_listing(map(str, allowed))} is expected")


def bound_not_negative(op: str, name: str, given: float) -> Exception:
    return ArgumentValueError(
        f"{op}: {name} = {given:g}, but a bound below 0 is expected: it promises that no gate is less; None promises "
        f"nothing"
    )


def exclude_each_other(op: str, one: str, other: str) -> Exception:
    return ArgumentValueError(f"{op}: {one} and {other} were both given, but only one of them can hold; leave one out")


def bad_offset(op: str, name: str, index: int, value: int, reason: str, axis: str = "T") -> Exception:
    return ArgumentValueError(
        f"{op}: {name}[{index}] = {value} {reason}; offsets start at 0, never decrease and end at {axis} or before it"
    )


def offsets_differ(op: str, name: str, host: str, index: int, on_device: int, on_host: int) -> Exception:
    return ArgumentValueError(
        f"{op}: {name}[{index}] = {on_device}, but {host}[{index}] = {on_host}; {host} must be a host copy of {name}"
    )


def value_outside_contract(op: str, name: str, index: Sequence[int], value: float, contract: str) -> Exception:
    return ArgumentValueError(f"{op}: {name}{list(index)} = {value:g}, but the contract is {contract}")


# --- transforms ------------------------------------------------------------------------------------------


def transform_unsupported(op: str) -> Exception:
    return UnsupportedTransformError(
        f"{op}: torch.func transforms (vmap, grad, jvp) and forward-mode AD are not supported; put the mapped "
        f"axis into B and use .backward() or torch.autograd.grad"
    )


def double_backward_unsupported(op: str) -> Exception:
    return UnsupportedTransformError(
        f"{op}: the gradient of a gradient is not supported; use {op}.reference, whose operations all are "
        f"differentiable twice, or do without create_graph=True"
    )


# --- names and routes ------------------------------------------------------------------------------------


def unknown_backend(given: str, source: str, backends: Iterable[str], implementations: Iterable[str]) -> Exception:
    return UnknownNameError(
        f"{source} names {given!r}, which is neither a backend nor an implementation; known backends: "
        f"{_listing(backends)}; known implementations: {_listing(implementations)}"
    )


def unknown_residuals(given: str, op: str, known: Iterable[str]) -> Exception:
    return UnknownNameError(f"{op}: residuals {given!r} is no residual format of it; known: {_listing(known)}")


def format_of_other_chunks(op: str, residuals: str, chunk_size: int, given: int) -> Exception:
    return ArgumentValueError(
        f"{op}: residuals {residuals} are of chunks of {chunk_size}, but chunk_size = {given}; leave chunk_size out, "
        f"or name a format of that chunk size"
    )


def unknown_op(given: str, known: Iterable[str]) -> Exception:
    return UnknownNameError(f"no op is called {given!r}; known ops: {_listing(known)}")


def unknown_choice(variable: str, given: str, known: Iterable[str]) -> Exception:
    return UnknownNameError(f"{variable} = {given!r} is not known; expected one of: {_listing(known)}")


def no_implementation(explanation: str) -> Exception:
    return NoImplementationError(f"nothing installed can run this call\n{explanation}")


def quarantined(implementation: str, cause: BaseException) -> str:
    return (
        f"chunkwise: {implementation} failed to compile and is not used again in this process; the next "
        f"implementation runs instead. Cause: {type(cause).__name__}: {cause}"
    )


# --- the protocol, towards authors of backends -------------------------------------------------------------


def bad_backend(name: str, problem: str) -> Exception:
    return BackendBug(f"backend {name}: {problem}")


def wrong_gradients(implementation: str, given: Iterable[str], needed: Iterable[str]) -> Exception:
    return BackendBug(
        f"{implementation}: backward returned gradients of {_listing(sorted(given))}, but exactly "
        f"{_listing(sorted(needed))} were asked for"
    )


def wrong_residuals(implementation: str, given: Iterable[str], expected: Iterable[str]) -> Exception:
    return BackendBug(
        f"{implementation}: forward returned the residuals {_listing(given)}, but the format holds {_listing(expected)}"
    )
