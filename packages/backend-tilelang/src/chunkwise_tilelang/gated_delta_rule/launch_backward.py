"""The launches of the backward of the gated delta rule: allocates what its kernels write, calls them in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chunkwise.verifier.facts import Facts
from chunkwise_tilelang.gated_delta_rule import bands_backward, launch, schedules_backward
from chunkwise_tilelang.gated_delta_rule.launch import _DTYPES, _SHORT, Shape, _never_read, _normalised, slots_of
from chunkwise_tilelang.gated_delta_rule.schedules import CHUNK, Schedule
from chunkwise_tilelang.toolkit import compile as compiling

GRADIENTS = "chunkwise_tilelang.gated_delta_rule.kernels_gradients_sm90:gradients"
PASSES = "chunkwise_tilelang.gated_delta_rule.kernels_passes_sm90:passes"
SUMMARISE_PASSES = "chunkwise_tilelang.gated_delta_rule.kernels_summaries_sm90:summarise_passes"
L2_NORMALISE_BACKWARD = "chunkwise_tilelang.tiles.l2norm:l2_normalise_backward"

_SIZES = ("heads", "value_heads", "key_width", "value_width")


def passes_constants(
    groups: int, segmented: bool, shape: Shape, dtype: str, beta_dtype: str, ragged: bool
) -> dict[str, Any]:
    """The constants of the passes for heads and widths ``(H, HV, K, V)``."""
    tiles = {"groups": groups, "stages": schedules_backward.PASSES_STAGES[groups]}
    names = {"dtype": dtype, "beta_dtype": beta_dtype, "registers": schedules_backward.PASSES_REGISTERS[groups]}
    return {**dict(zip(_SIZES, shape, strict=True)), **tiles, **names, "ragged": ragged, "segmented": segmented}


def split_work(shape: Shape, dtype: str, beta_dtype: str, ragged: bool) -> list[compiling.Work]:
    """The kernels that find the entry states of segments and the gradients of their exit states."""
    sizes = dict(zip(_SIZES, shape, strict=True))
    tiles = {"stages": schedules_backward.PASSES_STAGES[1], "registers": schedules_backward.PASSES_REGISTERS[1]}
    both = {name: sizes[name] for name in _SIZES[1:]}
    return [
        (SUMMARISE_PASSES, {**sizes, **tiles, "dtype": dtype, "beta_dtype": beta_dtype, "ragged": ragged}),
        (launch.COMPOSE, {**both, "directions": 2, "ragged": ragged}),
    ]


def gradients_constants(shape: Shape, dtypes: tuple[str, str, str], grad_dtype: str, ragged: bool) -> dict[str, Any]:
    """The constants of the kernel of all products; the dtypes of the activations, the gates and beta."""
    names = dict(zip(("dtype", "g_dtype", "beta_dtype"), dtypes, strict=True))
    rest = {"grad_dtype": grad_dtype, "registers": schedules_backward.GRADIENTS_REGISTERS, "ragged": ragged}
    return {**dict(zip(_SIZES, shape, strict=True)), **names, **rest}


def _work(
    groups: int, segmented: bool, shape: Shape, dtypes: tuple[str, str, str], grad_dtype: str, ragged: bool
) -> list[compiling.Work]:
    activations, _, betas = dtypes
    return [
        (GRADIENTS, gradients_constants(shape, dtypes, grad_dtype, ragged)),
        (PASSES, passes_constants(groups, segmented, shape, activations, betas, ragged)),
        *(split_work(shape, activations, betas, ragged) if segmented else ()),
    ]


@lru_cache(maxsize=256)
def _launchers(device: int, *constants: Any) -> list[compiling.Launcher]:
    return [compiling.kernel(builder, device, **found) for builder, found in _work(*constants)]


@lru_cache(maxsize=64)
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class _Ends(NamedTuple):
    """The states that a direction starts from and, last, what takes the gradient of the initial state."""

    initial: Tensor | None
    d_final: Tensor | None
    d_initial: Tensor | None


class _Kept(NamedTuple):
    """What the passes leave for the gradients: S, dS', x and dr of the chunks that have a slot."""

    states: Tensor
    d_states: Tensor
    x: Tensor
    dr: Tensor


def backward(
    schedule: Schedule, inputs: Any, residuals: Any, grads: tuple[Tensor | None, Tensor | None], needs: frozenset[str]
) -> dict[str, Tensor]:
    """The gradients named in ``needs``, from the gradients of o and of final_state and the lean residuals."""
    q, k, v, offsets = inputs.q, inputs.k, inputs.v, inputs.cu_seqlens
    batch, rows, value_heads, value_width = v.shape
    heads, key_width = k.shape[2:]
    sequences = len(offsets) - 1 if offsets is not None else batch
    d_o, d_final = grads
    state_shape = (sequences, value_heads, key_width, value_width)
    d_initial = v.new_empty(state_shape, dtype=torch.float32) if "initial_state" in needs else None
    if not sequences or not rows:
        if d_initial is not None:
            d_initial.zero_() if d_final is None else d_initial.copy_(d_final)
        found = {name: torch.zeros_like(getattr(inputs, name)) for name in needs - {"initial_state"}}
        return found if d_initial is None else {**found, "initial_state": d_initial}
    norm = inputs.use_qk_l2norm_in_kernel
    if norm:
        q, k = _normalised(q), _normalised(k)
    d_o = torch.zeros_like(v) if d_o is None else d_o
    dtypes = (_DTYPES[v.dtype], _DTYPES[inputs.g.dtype], _DTYPES[inputs.beta.dtype])
    shape = (heads, value_heads, key_width, value_width)
    grad_dtype = "float32" if norm else dtypes[0]
    index = v.device.index
    groups, segment = schedules_backward.layout(sequences, batch * rows, shape[1:], _multiprocessors(index))
    launchers = _launchers(index, groups, segment > 0, shape, dtypes, grad_dtype, offsets is not None)
    where = _never_read(v.device, torch.int32, (2,)) if offsets is None else offsets
    saved = residuals.tensors
    tensors = (q, k, v, saved["inverse"], saved["g_cumsum"], inputs.beta, d_o, where)
    ends = _Ends(inputs.initial_state, d_final, d_initial)
    found = _walk(launchers, segment, tensors, inputs, ends, needs)
    if norm:
        for name in needs & {"q", "k"}:
            found[name] = _through_norm(getattr(inputs, name), found[name])
    return {name: found[name] for name in needs}


def _walk(
    launchers: list[compiling.Launcher], segment: int, tensors: tuple[Tensor, ...], inputs: Any, ends: _Ends,
    needs: frozenset[str],
) -> dict[str, Tensor]:  # fmt: skip
    """All gradients, dq and dk of the rows that the kernels see: the steps of a plan, one after the other."""
    run_gradients, run_passes, *split = launchers
    v, offsets = inputs.v, inputs.cu_seqlens
    batch, rows = v.shape[:2]
    ragged = offsets is not None
    sequences = len(offsets) - 1 if ragged else batch
    entries = _segment_ends(split, segment, tensors, ends, inputs, sequences) if segment else None
    places = sequences if entries is None else len(entries[0])
    plan = _plan(inputs, places, segment)
    kept = _room(v, inputs.k.shape[3], slots_of(batch, rows, sequences, CHUNK, True) if ragged else places * plan.width)
    found = {"v": _rows(v, offsets)} | ({} if ends.d_initial is None else {"initial_state": ends.d_initial})
    products = _gradients_of(tensors, inputs) if needs - {"initial_state", "v"} else {}
    sizes = (places, sequences.bit_length(), segment, plan.width)
    for step, (states, flags) in zip(plan.steps, _carried(len(plan.steps), ends, entries, places, inputs), strict=True):
        run_passes(
            *tensors, *states, *kept, found["v"], *sizes, *step.replay, *step.reverse, inputs.scale, *flags
        )  # fmt: skip
        if products and any(band.chunks for band in step.bands):
            _products(run_gradients, tensors, inputs, ends, kept, products, plan, step.bands)
    return found | products


def _plan(inputs: Any, places: int, segment: int) -> bands_backward.Plan:
    """The steps of a call; of a ragged one all at once, for nobody here knows how long its sequences are."""
    v = inputs.v
    whole = -(-v.shape[1] // CHUNK)
    chunks = min(segment, whole) if segment else whole
    if inputs.cu_seqlens is not None:
        return bands_backward.at_once(whole, chunks)
    sizes = (v.shape[2], inputs.k.shape[3], v.shape[3])
    return bands_backward.plan(whole, chunks, schedules_backward.first_piece(places, chunks, sizes, v.itemsize))


def _room(v: Tensor, key_width: int, slots: int) -> _Kept:
    value_heads, value_width = v.shape[2:]
    states, d_states = (v.new_empty(slots, value_heads, value_width, key_width) for _ in range(2))
    x, dr = (v.new_empty(slots, value_heads, CHUNK, value_width) for _ in range(2))
    return _Kept(states, d_states, x, dr)


def _carried(
    steps: int, ends: _Ends, entries: Tensor | None, places: int, inputs: Any
) -> Iterator[tuple[tuple[Tensor, ...], tuple[int, ...]]]:
    """For each step the passes' states (initial, d_final, exits, d_initial) and flags.

    Between two steps they are in fp32 by place, where segments have theirs already; the call's own stay as they are.
    """
    v = inputs.v
    shape = (v.shape[2], inputs.k.shape[3], v.shape[3])
    absent = _never_read(v.device, torch.float32, (1, *shape))
    given = tuple(absent if state is None else state for state in ends)
    has_initial, has_final, has_d_initial = (int(state is not None) for state in ends)
    carry = entries
    if carry is None and steps > 1:
        carry = v.new_empty(2, places, *shape, dtype=torch.float32)
    for step in range(steps):
        inside = step > 0 or entries is not None
        begin = (carry[0], carry[1]) if carry is not None and inside else given[:2]
        flags = (1, 1) if inside else (has_initial, has_final)
        if carry is not None and step < steps - 1:
            yield (*begin, carry[0], carry[1]), (*flags, 0, 1)
        else:
            yield (*begin, absent, given[2]), (*flags, has_d_initial, 0)


def _segment_ends(
    launchers: list[compiling.Launcher], segment: int, tensors: tuple[Tensor, ...], ends: _Ends, inputs: Any,
    sequences: int,
) -> Tensor:  # fmt: skip
    """The entry states of all segments, and the gradients of their exit states: [2, segments, HV, K, V]."""
    run_summaries, run_compose = launchers
    v, where = tensors[2], tensors[7]
    batch, rows, value_heads, value_width = v.shape
    key_width = inputs.k.shape[3]
    segments = slots_of(batch, rows, sequences, segment * CHUNK, inputs.cu_seqlens is not None)
    maps = v.new_empty(segments, value_heads, 2, key_width, key_width, dtype=torch.bfloat16)
    added = v.new_empty(2, segments, value_heads, key_width, value_width, dtype=torch.float32)
    found = torch.empty_like(added)
    absent = _never_read(v.device, torch.float32, (1, value_heads, key_width, value_width))
    states = (absent if state is None else state for state in ends[:2])
    flags = (int(state is not None) for state in ends[:2])
    run_summaries(*tensors, maps, *added, sequences.bit_length(), segment, inputs.scale)
    run_compose(maps, added, where, *states, found, sequences, rows, segment, *flags)
    return found


def _gradients_of(tensors: tuple[Tensor, ...], inputs: Any) -> dict[str, Tensor]:
    """What takes dq and dk, of the normalised rows in fp32 where they are normalised, dg and dbeta."""
    offsets = inputs.cu_seqlens
    wide = torch.float32 if inputs.use_qk_l2norm_in_kernel else None
    found = {"q": _rows(tensors[0], offsets, wide), "k": _rows(tensors[1], offsets, wide)}
    return found | {name: _rows(getattr(inputs, name), offsets) for name in ("g", "beta")}


def _products(
    kernel: compiling.Launcher, tensors: tuple[Tensor, ...], inputs: Any, ends: _Ends, kept: _Kept,
    found: dict[str, Tensor], plan: bands_backward.Plan, bands: tuple[bands_backward.Band, bands_backward.Band],
) -> None:  # fmt: skip
    """dq, dk, dg and dbeta of the chunks of two bands."""
    q, k, v, _, g_cumsum, beta, d_o, where = tensors
    absent = _never_read(v.device, torch.float32, (1, v.shape[2], k.shape[3], v.shape[3]))
    initial, d_final = (absent if state is None else state for state in ends[:2])
    sequences = len(where) - 1 if inputs.cu_seqlens is not None else v.shape[0]
    most = kept.x.shape[0] * k.shape[2]  # units: no chunk of a step is without a slot
    kernel(
        q, k, v, g_cumsum, beta, d_o, where, initial, d_final, *kept,
        *(found[name] for name in ("q", "k", "g", "beta")),
        inputs.scale, sequences.bit_length(), min(most, _multiprocessors(v.device.index)),
        plan.chunks, plan.width, *bands[0], *bands[1], *(int(state is not None) for state in ends[:2]),
    )  # fmt: skip


def _rows(like: Tensor, offsets: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """A gradient in the shape of ``like``; rows of padding, which only ragged calls can have, are zero."""
    return (torch.empty_like if offsets is None else torch.zeros_like)(like, dtype=dtype)


def _through_norm(x: Tensor, dy: Tensor) -> Tensor:
    dx = torch.empty_like(x)
    width = x.shape[-1]
    kernel = compiling.kernel(L2_NORMALISE_BACKWARD, x.device, width=width, dtype=_DTYPES[x.dtype])
    kernel(x.view(-1, width), dy.view(-1, width), dx.view(-1, width))
    return dx


def compile(schedule: Schedule, facts: Facts, parts: Sequence[str]) -> None:
    """Build the kernels of a call's parts, side by side."""
    work = launch.forward_work(schedule, facts) if "forward" in parts else []
    if "backward" in parts:
        shape = (facts.size("H"), facts.size("HV"), facts.size("K"), facts.size("V"))
        dtypes = (_SHORT[facts.dtypes["v"]], _SHORT[facts.dtypes["g"]], _SHORT[facts.dtypes["beta"]])
        norm = bool(facts.flag("use_qk_l2norm_in_kernel"))
        count = _multiprocessors(torch.cuda.current_device())
        rows = facts.size("B") * facts.size("T")
        groups, segment = schedules_backward.layout(facts.size("N"), rows, shape[1:], count)
        grad_dtype = "float32" if norm else dtypes[0]
        work += _work(groups, segment > 0, shape, dtypes, grad_dtype, bool(facts.flag("ragged")))
        if norm:
            work.append((L2_NORMALISE_BACKWARD, {"width": shape[2], "dtype": dtypes[0]}))
    compiling.build(work, torch.cuda.current_device())
