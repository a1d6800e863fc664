"""The launches of the backward of the gated delta rule: allocates what its kernels write, calls them in order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chunkwise.verifier.facts import Facts
from chunkwise_tilelang.gated_delta_rule import launch, schedules_backward
from chunkwise_tilelang.gated_delta_rule.kernels_gradients_sm90 import gradients
from chunkwise_tilelang.gated_delta_rule.kernels_passes_sm90 import passes
from chunkwise_tilelang.gated_delta_rule.launch import _DTYPES, _SHORT, Shape, _never_read, _normalised
from chunkwise_tilelang.gated_delta_rule.schedules import Schedule
from chunkwise_tilelang.tiles.l2norm import l2_normalise_backward
from chunkwise_tilelang.toolkit import compile as compiling

_SIZES = ("heads", "value_heads", "key_width", "value_width")


def passes_constants(groups: int, shape: Shape, dtype: str, beta_dtype: str, ragged: bool) -> dict[str, Any]:
    """The constants of the passes for heads and widths ``(H, HV, K, V)``."""
    tiles = {"groups": groups, "stages": schedules_backward.PASSES_STAGES[groups]}
    names = {"dtype": dtype, "beta_dtype": beta_dtype, "registers": schedules_backward.PASSES_REGISTERS[groups]}
    return {**dict(zip(_SIZES, shape, strict=True)), **tiles, **names, "ragged": ragged}


def gradients_constants(shape: Shape, dtypes: tuple[str, str, str], grad_dtype: str, ragged: bool) -> dict[str, Any]:
    """The constants of the kernel of all products; the dtypes of the activations, the gates and beta."""
    names = dict(zip(("dtype", "g_dtype", "beta_dtype"), dtypes, strict=True))
    rest = {"grad_dtype": grad_dtype, "registers": schedules_backward.GRADIENTS_REGISTERS, "ragged": ragged}
    return {**dict(zip(_SIZES, shape, strict=True)), **names, **rest}


def _work(
    groups: int, shape: Shape, dtypes: tuple[str, str, str], grad_dtype: str, ragged: bool
) -> list[compiling.Work]:
    activations, _, betas = dtypes
    return [
        (passes, passes_constants(groups, shape, activations, betas, ragged)),
        (gradients, gradients_constants(shape, dtypes, grad_dtype, ragged)),
    ]


@lru_cache(maxsize=256)
def _launchers(groups: int, device: int, *constants: Any) -> list[compiling.Launcher]:
    return [compiling.kernel(builder, device, **found) for builder, found in _work(groups, *constants)]


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
    groups = schedules_backward.groups(sequences, value_heads, value_width, _multiprocessors(index))
    run_passes, run_gradients = _launchers(groups, index, shape, dtypes, grad_dtype, offsets is not None)
    ends = (inputs.initial_state, d_final, d_initial)
    passed = _passes(run_passes, schedule.chunk_size, (q, k, d_o), inputs, residuals.tensors, ends, state_shape)
    found = {"v": passed.dv} if d_initial is None else {"v": passed.dv, "initial_state": d_initial}
    if needs - {"initial_state", "v"}:
        found |= _products(run_gradients, (q, k, d_o), inputs, residuals.tensors["g_cumsum"], passed, sequences)
    if norm:
        for name in needs & {"q", "k"}:
            found[name] = _through_norm(getattr(inputs, name), found[name])
    return {name: found[name] for name in needs}


def _passes(
    kernel: compiling.Launcher, chunk: int, rows: tuple[Tensor, Tensor, Tensor], inputs: Any,
    saved: dict[str, Tensor], ends: tuple[Tensor | None, ...], state_shape: tuple[int, ...],
) -> _Passed:  # fmt: skip
    """Both passes; ``ends`` are the initial state, the gradient of the final one, and what takes the initial one's."""
    q, k, d_o = rows
    v, beta, offsets = inputs.v, inputs.beta, inputs.cu_seqlens
    sequences, value_heads, key_width, value_width = state_shape
    slots = v.shape[1] // chunk + sequences if offsets is not None else v.shape[0] * -(-v.shape[1] // chunk)
    states, d_states = (v.new_empty(slots, value_heads, value_width, key_width) for _ in range(2))
    x, dr = (v.new_empty(slots, value_heads, chunk, value_width) for _ in range(2))
    passed = _Passed(states, d_states, x, dr, _rows(v, offsets))
    where = _never_read(v.device, torch.int32, (2,)) if offsets is None else offsets
    absent = _never_read(v.device, torch.float32, (1, *state_shape[1:]))
    initial, d_final, d_initial = (absent if state is None else state for state in ends)
    has_initial, has_final, has_d_initial = (int(state is not None) for state in ends)
    kernel(
        q, k, v, saved["inverse"], saved["g_cumsum"], beta, d_o, where, initial, d_final, d_initial, *passed,
        sequences, inputs.scale, has_initial, has_final, has_d_initial,
    )  # fmt: skip
    return passed


def _products(
    kernel: compiling.Launcher, rows: tuple[Tensor, Tensor, Tensor], inputs: Any, g_cumsum: Tensor, passed: _Passed,
    sequences: int,
) -> dict[str, Tensor]:  # fmt: skip
    """dq and dk, of the normalised rows in fp32 where they are normalised, dg and dbeta."""
    q, k, d_o = rows
    v, offsets = inputs.v, inputs.cu_seqlens
    wide = torch.float32 if inputs.use_qk_l2norm_in_kernel else None
    found = {"q": _rows(q, offsets, wide), "k": _rows(k, offsets, wide)}
    found |= {name: _rows(getattr(inputs, name), offsets) for name in ("g", "beta")}
    where = _never_read(v.device, torch.int32, (2,)) if offsets is None else offsets
    units = passed.x.shape[0] * k.shape[2]
    kernel(
        q, k, v, g_cumsum, inputs.beta, d_o, where, *passed[:4], *(found[name] for name in ("q", "k", "g", "beta")),
        inputs.scale, sequences.bit_length(), min(units, _multiprocessors(v.device.index)),
    )  # fmt: skip
    return found


def _rows(like: Tensor, offsets: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """A gradient in the shape of ``like``; rows of padding, which only ragged calls can have, are zero."""
    return (torch.empty_like if offsets is None else torch.zeros_like)(like, dtype=dtype)


def _through_norm(x: Tensor, dy: Tensor) -> Tensor:
    dx = torch.empty_like(x)
    width = x.shape[-1]
    kernel = compiling.kernel(l2_normalise_backward, x.device, width=width, dtype=_DTYPES[x.dtype])
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
        groups = schedules_backward.groups(facts.size("N"), shape[1], shape[3], count)
        work += _work(groups, shape, dtypes, "float32" if norm else dtypes[0], bool(facts.flag("ragged")))
        if norm:
            work.append((l2_normalise_backward, {"width": shape[2], "dtype": dtypes[0]}))
    compiling.build(work, torch.cuda.current_device())
