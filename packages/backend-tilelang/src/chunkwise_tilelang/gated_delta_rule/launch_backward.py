"""The launches of the backward of the gated delta rule: allocates what its kernels write, calls them in order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chunkwise.verifier.facts import Facts
from chunkwise_tilelang.gated_delta_rule import launch, schedules_backward
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


class _Passed(NamedTuple):
    """What the passes leave: S, dS', x and dr of every chunk, and dv."""

    states: Tensor
    d_states: Tensor
    x: Tensor
    dr: Tensor
    dv: Tensor


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
    run_gradients, *launchers = _launchers(index, groups, segment > 0, shape, dtypes, grad_dtype, offsets is not None)
    ends = (inputs.initial_state, d_final, d_initial)
    passed = _passes(launchers, segment, (q, k, d_o), inputs, residuals.tensors, ends, state_shape)
    found = {"v": passed.dv} if d_initial is None else {"v": passed.dv, "initial_state": d_initial}
    if needs - {"initial_state", "v"}:
        sums = residuals.tensors["g_cumsum"]
        found |= _products(run_gradients, (q, k, d_o), inputs, sums, ends[:2], passed, state_shape)
    if norm:
        for name in needs & {"q", "k"}:
            found[name] = _through_norm(getattr(inputs, name), found[name])
    return {name: found[name] for name in needs}


def _passes(
    launchers: list[compiling.Launcher], segment: int, rows: tuple[Tensor, Tensor, Tensor], inputs: Any,
    saved: dict[str, Tensor], ends: tuple[Tensor | None, ...], state_shape: tuple[int, ...],
) -> _Passed:  # fmt: skip
    """Both passes; ``ends`` are the initial state, the gradient of the final one, and what takes the initial one's."""
    run_passes, *split = launchers
    q, k, d_o = rows
    v, beta, offsets = inputs.v, inputs.beta, inputs.cu_seqlens
    sequences, value_heads, key_width, value_width = state_shape
    slots = slots_of(v.shape[0], v.shape[1], sequences, CHUNK, offsets is not None)
    states, d_states = (v.new_empty(slots, value_heads, value_width, key_width) for _ in range(2))
    x, dr = (v.new_empty(slots, value_heads, CHUNK, value_width) for _ in range(2))
    passed = _Passed(states, d_states, x, dr, _rows(v, offsets))
    where = _never_read(v.device, torch.int32, (2,)) if offsets is None else offsets
    absent = _never_read(v.device, torch.float32, (1, *state_shape[1:]))
    initial, d_final, d_initial = (absent if state is None else state for state in ends)
    has_initial, has_final, has_d_initial = (int(state is not None) for state in ends)
    tensors = (q, k, v, saved["inverse"], saved["g_cumsum"], beta, d_o, where)
    places = sequences
    if segment:
        states_of = ((initial, has_initial), (d_final, has_final))
        initial, d_final = _segment_ends(split, segment, tensors, states_of, inputs, sequences)
        places, has_initial, has_final = len(initial), 1, 1
    run_passes(
        *tensors, initial, d_final, d_initial, *passed,
        places, sequences.bit_length(), segment, inputs.scale, has_initial, has_final, has_d_initial,
    )  # fmt: skip
    return passed


def _segment_ends(
    launchers: list[compiling.Launcher], segment: int, tensors: tuple[Tensor, ...],
    ends: tuple[tuple[Tensor, int], tuple[Tensor, int]], inputs: Any, sequences: int,
) -> Tensor:  # fmt: skip
    """The entry states of all segments, and the gradients of their exit states: [2, segments, HV, K, V]."""
    run_summaries, run_compose = launchers
    (initial, has_initial), (d_final, has_final) = ends
    v, where = tensors[2], tensors[7]
    value_heads, key_width, value_width = initial.shape[1:]
    batch, rows = v.shape[:2]
    segments = slots_of(batch, rows, sequences, segment * CHUNK, inputs.cu_seqlens is not None)
    maps = v.new_empty(segments, value_heads, 2, key_width, key_width, dtype=torch.bfloat16)
    added = v.new_empty(2, segments, value_heads, key_width, value_width, dtype=torch.float32)
    found = torch.empty_like(added)
    run_summaries(*tensors, maps, *added, sequences.bit_length(), segment, inputs.scale)
    run_compose(maps, added, where, initial, d_final, found, sequences, rows, segment, has_initial, has_final)
    return found


def _products(
    kernel: compiling.Launcher, rows: tuple[Tensor, Tensor, Tensor], inputs: Any, g_cumsum: Tensor,
    ends: tuple[Tensor | None, Tensor | None], passed: _Passed, state_shape: tuple[int, ...],
) -> dict[str, Tensor]:  # fmt: skip
    """dq and dk, of the normalised rows in fp32 where they are normalised, dg and dbeta."""
    q, k, d_o = rows
    v, offsets = inputs.v, inputs.cu_seqlens
    wide = torch.float32 if inputs.use_qk_l2norm_in_kernel else None
    found = {"q": _rows(q, offsets, wide), "k": _rows(k, offsets, wide)}
    found |= {name: _rows(getattr(inputs, name), offsets) for name in ("g", "beta")}
    where = _never_read(v.device, torch.int32, (2,)) if offsets is None else offsets
    absent = _never_read(v.device, torch.float32, (1, *state_shape[1:]))
    initial, d_final = (absent if state is None else state for state in ends)
    units = passed.x.shape[0] * k.shape[2]
    kernel(
        q, k, v, g_cumsum, inputs.beta, d_o, where, initial, d_final, *passed[:4],
        *(found[name] for name in ("q", "k", "g", "beta")),
        inputs.scale, state_shape[0].bit_length(), min(units, _multiprocessors(v.device.index)),
        *(int(state is not None) for state in ends),
    )  # fmt: skip
    return found


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
