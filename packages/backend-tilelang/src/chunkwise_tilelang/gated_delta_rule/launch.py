"""Launches of the gated delta rule: allocates what the kernels write and calls them in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from chunkwise.autograd.residuals import chunk_slots, entry_slots
from chunkwise.verifier.facts import Facts
from chunkwise_tilelang.gated_delta_rule.implementations import FULL, LEAN
from chunkwise_tilelang.gated_delta_rule.schedules import SUMMARY_REGISTERS, Schedule, keeping
from chunkwise_tilelang.toolkit import compile as compiling

# By name: importing TileLang takes longer than loading what an earlier process compiled.
SOLVE = "chunkwise_tilelang.gated_delta_rule.kernels:solve"
FUSED = "chunkwise_tilelang.gated_delta_rule.kernels_sm90:fused"
WEIGHTS = "chunkwise_tilelang.gated_delta_rule.kernels_weights_sm90:weights"
SUMMARISE = "chunkwise_tilelang.gated_delta_rule.kernels_split_sm90:summarise"
COMPOSE = "chunkwise_tilelang.gated_delta_rule.kernels_split_sm90:compose"
L2_NORMALISE = "chunkwise_tilelang.tiles.l2norm:l2_normalise"

_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
Shape = tuple[int, int, int, int]


def _solve_constants(shape: Shape, dtypes: tuple[str, str, str], ragged: bool) -> dict[str, Any]:
    heads, value_heads, key_width, _ = shape
    names = {"dtype": dtypes[0], "g_dtype": dtypes[1], "beta_dtype": dtypes[2]}
    return {"heads": heads, "value_heads": value_heads, "key_width": key_width, "ragged": ragged, **names}


def fused_constants(schedule: Schedule, shape: Shape, dtype: str, ragged: bool, kept: bool = False) -> dict[str, Any]:
    """The constants of the fused kernel for heads and widths ``(H, HV, K, V)``."""
    if kept:
        schedule = keeping(schedule, shape[2])
    sizes = dict(zip(("heads", "value_heads", "key_width", "value_width"), shape, strict=True))
    tiles = {"groups": schedule.groups, "stages": schedule.stages, "registers": schedule.registers}
    return {**sizes, **tiles, "dtype": dtype, "ragged": ragged, "segmented": schedule.segment > 0, "kept": kept}


def _weights_constants(shape: Shape, dtype: str, ragged: bool) -> dict[str, Any]:
    heads, value_heads, key_width, _ = shape
    return {"heads": heads, "value_heads": value_heads, "key_width": key_width, "dtype": dtype, "ragged": ragged}


def split_work(schedule: Schedule, shape: Shape, dtype: str, ragged: bool) -> list[compiling.Work]:
    """The kernels that find the entry states of segments, with their constants."""
    sizes = dict(zip(("heads", "value_heads", "key_width", "value_width"), shape, strict=True))
    both = {name: sizes[name] for name in ("value_heads", "key_width", "value_width")}
    tiles = {"groups": schedule.summary_groups, "stages": schedule.stages, "registers": SUMMARY_REGISTERS}
    return [
        (SUMMARISE, {**sizes, **tiles, "dtype": dtype, "ragged": ragged}),
        (COMPOSE, {**both, "directions": 1, "ragged": ragged}),
    ]


@lru_cache(maxsize=256)
def _launchers(
    schedule: Schedule, device: int, shape: Shape, dtypes: tuple[str, str, str], ragged: bool, kept: bool
) -> Any:
    return (
        compiling.kernel(SOLVE, device, **_solve_constants(shape, dtypes, ragged)),
        compiling.kernel(FUSED, device, **fused_constants(schedule, shape, dtypes[0], ragged, kept)),
    )


@lru_cache(maxsize=256)
def _split_launchers(schedule: Schedule, device: int, shape: Shape, dtype: str, ragged: bool) -> list[Any]:
    return [compiling.kernel(b, device, **constants) for b, constants in split_work(schedule, shape, dtype, ragged)]


@lru_cache(maxsize=64)
def _never_read(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """What stands in a kernel's arguments for a tensor that is absent."""
    return torch.zeros(shape, dtype=dtype, device=device)


def _normalised(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    width = x.shape[-1]
    launch = compiling.kernel(L2_NORMALISE, x.device, width=width, dtype=_DTYPES[x.dtype])
    launch(x.view(-1, width), y.view(-1, width))
    return y


def slots_of(batch: int, rows: int, sequences: int, width: int, ragged: bool) -> int:
    """The slots of chunks or segments of ``width`` rows: ``tiles/sequences.py``."""
    return rows // width + sequences if ragged else batch * -(-rows // width)


def forward(
    schedule: Schedule, inputs: Any, save: str | None
) -> tuple[tuple[Tensor, Tensor | None], dict[str, Tensor]]:
    """``(o, final_state)`` and the residuals of the format ``save``, if any."""
    q, k, v, g, beta, offsets = inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.cu_seqlens
    batch, rows, value_heads, value_width = v.shape
    heads, key_width = k.shape[2:]
    ragged, chunk = offsets is not None, schedule.chunk_size
    sequences = len(offsets) - 1 if ragged else batch
    o = torch.zeros_like(v) if ragged else torch.empty_like(v)
    state_shape = (sequences, value_heads, key_width, value_width)
    final = v.new_empty(state_shape, dtype=torch.float32) if inputs.output_final_state else None
    saved: dict[str, Tensor] = {}
    if save is not None:
        saved = _room(save, inputs, state_shape, chunk)
    if not sequences:
        return (o, final), saved
    if not rows:
        if final is not None:
            final.zero_() if inputs.initial_state is None else final.copy_(inputs.initial_state)
        return (o, final), saved
    if inputs.use_qk_l2norm_in_kernel:
        q, k = _normalised(q), _normalised(k)
    slots = slots_of(batch, rows, sequences, chunk, ragged)
    solved = v.new_empty(slots, value_heads, chunk, chunk)
    decays = v.new_empty(slots, value_heads, 3, chunk, dtype=torch.float32)
    dtypes = (_DTYPES[v.dtype], _DTYPES[g.dtype], _DTYPES[beta.dtype])
    shape = (heads, value_heads, key_width, value_width)
    launch_solve, launch_fused = _launchers(schedule, v.device.index, shape, dtypes, ragged, save == FULL)
    where = offsets if ragged else _never_read(v.device, torch.int32, (2,))
    solving = saved or {
        "inverse": _never_read(v.device, v.dtype, (1, 1, value_heads, chunk)),
        "g_cumsum": _never_read(v.device, torch.float32, (1, 1, value_heads)),
    }
    steps = sequences.bit_length()
    launch_solve(k, g, beta, where, solved, decays, solving["inverse"], solving["g_cumsum"], steps, int(bool(saved)))
    absent = _never_read(v.device, torch.float32, (1, *state_shape[1:]))
    initial = inputs.initial_state
    places, chunks = sequences, schedule.segment
    if chunks:
        initial = _entry_states(schedule, inputs, (k, solved, decays, where), shape, steps)
        places = initial.shape[0]
    if save == FULL:
        launch_weights = compiling.kernel(WEIGHTS, v.device.index, **_weights_constants(shape, dtypes[0], ragged))
        launch_weights(k, solved, decays, where, saved["w"], steps)
    entries, cuts = cut_states(saved, absent)
    launch_fused(
        q, k, v, solved, decays, where, absent if initial is None else initial, o, absent if final is None else final,
        entries, *kept_rows(saved, o, state_shape[1:]), first_slots(saved, offsets, v, chunk),
        places, steps, chunks, cuts, inputs.scale, int(initial is not None), int(final is not None),
    )  # fmt: skip
    return (o, final), saved


def _room(save: str, inputs: Any, state_shape: tuple[int, ...], chunk: int) -> dict[str, Tensor]:
    """The residuals of a format before anything is written; what no kernel writes is zero, every time."""
    v, g, ragged = inputs.v, inputs.g, inputs.cu_seqlens is not None
    batch, rows, value_heads, value_width = v.shape
    sequences, _, key_width, _ = state_shape
    room = v.new_zeros if ragged else v.new_empty  # rows of padding, and slots of no chunk
    saved = {
        "g_cumsum": torch.empty_like(g, dtype=torch.float32),
        "inverse": v.new_empty(batch, rows, value_heads, chunk),
    }
    if save == LEAN:
        cuts = entry_slots({"T": rows, "C": chunk}, ragged)["entries"]
        return {**saved, "entry_states": room(batch, cuts, *state_shape[1:], dtype=torch.float32)}
    slots = chunk_slots({"B": batch, "T": rows, "C": chunk, "N": sequences}, ragged)["slots"]
    return {
        **saved,
        "w": room(batch, rows, value_heads, key_width),
        "v_new": room(batch, rows, value_heads, value_width),
        "states": room(slots, *state_shape[1:]),
    }


def kept_rows(saved: Mapping[str, Tensor], o: Tensor, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """x and S of all chunks where they are kept; else what stands for them."""
    if "states" not in saved:
        return o, _never_read(o.device, o.dtype, (1, *widths))
    return saved["v_new"], saved["states"]


def first_slots(saved: Mapping[str, Tensor], offsets: Tensor | None, like: Tensor, chunk: int) -> Tensor:
    """The slot of each sequence's first chunk among the kept states of a ragged call, where chunks are counted.

    Offsets are clamped as the kernels clamp them. No other call reads it. ``like`` is of ``[B, T, ...]``.
    """
    if offsets is None or "states" not in saved:
        return _never_read(like.device, torch.int32, (2,))
    rows = like.shape[1]
    starts = offsets[:-1].clamp(0, rows)
    lengths = torch.maximum(offsets[1:].clamp(0, rows), starts) - starts
    counts = (lengths + chunk - 1) // chunk
    return (counts.cumsum(0) - counts).to(torch.int32)


def cut_states(saved: Mapping[str, Tensor], absent: Tensor) -> tuple[Tensor, int]:
    """The states at the cuts of a call, one after the other, and how many a row of the batch has room for."""
    found = saved.get("entry_states")
    if found is None or not found.shape[1]:
        return absent, 0
    return found.flatten(0, 1), found.shape[1]


def _entry_states(
    schedule: Schedule, inputs: Any, tensors: tuple[Tensor, Tensor, Tensor, Tensor], shape: Shape, steps: int
) -> Tensor:
    """The entry state of every segment."""
    k, solved, decays, where = tensors
    v, initial, ragged, chunks = inputs.v, inputs.initial_state, inputs.cu_seqlens is not None, schedule.segment
    (batch, rows), (_, value_heads, key_width, value_width) = v.shape[:2], shape
    sequences = len(where) - 1 if ragged else batch
    segments = slots_of(batch, rows, sequences, chunks * schedule.chunk_size, ragged)
    maps = v.new_empty(segments, value_heads, 2, key_width, key_width, dtype=torch.bfloat16)
    added = v.new_empty(1, segments, value_heads, key_width, value_width, dtype=torch.float32)
    entries = torch.empty_like(added)
    launch_summarise, launch_compose = _split_launchers(schedule, v.device.index, shape, _DTYPES[v.dtype], ragged)
    launch_summarise(k, v, solved, decays, where, maps, added[0], steps, chunks)
    absent = _never_read(v.device, torch.float32, (1, value_heads, key_width, value_width))
    launch_compose(
        maps, added, where, absent if initial is None else initial, absent, entries,
        sequences, rows, chunks, int(initial is not None), 0,
    )  # fmt: skip
    return entries[0]


def forward_work(schedule: Schedule, facts: Facts) -> list[compiling.Work]:
    """The kernels of a call's forward, with their constants."""
    heads, value_heads, key_width, value_width = (facts.size(axis) for axis in ("H", "HV", "K", "V"))
    shape = (heads, value_heads, key_width, value_width)
    activations, gates, betas = (_SHORT[facts.dtypes[name]] for name in ("v", "g", "beta"))
    ragged, full = bool(facts.flag("ragged")), facts.residuals == FULL
    work: list[compiling.Work] = [
        (SOLVE, _solve_constants(shape, (activations, gates, betas), ragged)),
        (FUSED, fused_constants(schedule, shape, activations, ragged, full)),
    ]
    if full:
        work.append((WEIGHTS, _weights_constants(shape, activations, ragged)))
    if schedule.segment:
        work += split_work(schedule, shape, activations, ragged)
    if facts.flag("use_qk_l2norm_in_kernel"):
        work.append((L2_NORMALISE, {"width": key_width, "dtype": activations}))
    return work
