"""The kernels of the gated delta rule as they are compiled for Hopper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from chunkwise_tilelang.gated_delta_rule import schedules, schedules_backward
from chunkwise_tilelang.gated_delta_rule.kernels import solve
from chunkwise_tilelang.gated_delta_rule.kernels_gradients_sm90 import gradients
from chunkwise_tilelang.gated_delta_rule.kernels_passes_sm90 import passes
from chunkwise_tilelang.gated_delta_rule.kernels_sm90 import fused
from chunkwise_tilelang.gated_delta_rule.kernels_split_sm90 import compose, summarise
from chunkwise_tilelang.gated_delta_rule.kernels_summaries_sm90 import summarise_passes
from chunkwise_tilelang.gated_delta_rule.kernels_weights_sm90 import weights
from chunkwise_tilelang.tiles.l2norm import l2_normalise, l2_normalise_backward
from chunkwise_tilelang.toolkit.variants import Variant

_ARCH = "sm_90a"
_HEADS = {"heads": 2, "value_heads": 4}
# With two groups the thread that computes pairs has 72 registers, and one that copies 24: NOTES.md.
_SPILL_BYTES = {1: 0, 2: 400}
_SEGMENTS_SPILL_BYTES = {1: 0, 2: 720}

# The same of two groups, and more with K = 64.
_PASSES_SPILL_BYTES = {(64, 1): 0, (128, 1): 0, (64, 2): 600, (128, 2): 400}
# What is used once a chunk lies in memory meanwhile: NOTES.md.
_GRADIENTS_SPILL_BYTES = 500

# Where S and x are kept: a few addresses of those that copy, and with K = 128 of those that have states.
_KEPT_SPILL_BYTES = 110
_DTYPES = ("bfloat16", "float16")

# Of kernels that no schedule chooses between: of the weights by K, of the solving kernel by the value heads that it
# takes together, with K = 128.
_WEIGHTS_BYTES = {64: 16_384, 128: 24_576}
_SOLVE_BYTES = {1: 16_896, 2: 20_480}


def variants(whole: bool) -> Sequence[Variant]:
    """Every kernel, or one of each number of groups, width and way to find a chunk."""
    found = [_fused(key_width, groups, ragged, dtype) for key_width, groups, ragged, dtype in _choices(whole)]
    found += [_solve(heads, ragged, dtype) for heads, ragged, dtype in _solve_choices(whole)]
    found += [_summarise(key_width, groups, ragged, dtype) for key_width, groups, ragged, dtype in _summaries(whole)]
    found += [_compose(*choice) for choice in _compositions(whole)]
    found += [_summarise_passes(*choice) for choice in _passes_summaries(whole)]
    found += [_passes(*choice) for choice in (_choices(whole) if whole else _choices(whole)[:2])]
    found += [_gradients(*choice) for choice in _gradients_choices(whole)]
    found += _full(whole)
    width = {"width": 128, "dtype": "bfloat16"}
    found.append(Variant("gated delta rule, L2 norm", l2_normalise, width, _ARCH, 0))
    return [*found, Variant("gated delta rule, gradient of the L2 norm", l2_normalise_backward, width, _ARCH, 0)]


def _choices(whole: bool) -> list[tuple[int, int, bool, str]]:
    chosen = [(128, 1, True, "bfloat16"), (128, 2, False, "bfloat16"), (64, 1, False, "float16")]
    every = [
        (key_width, groups, ragged, dtype)
        for key_width in (64, 128)
        for groups in (1, 2)
        for ragged in (False, True)
        for dtype in ("bfloat16", "float16")
    ]
    return every if whole else chosen


def _fused(key_width: int, groups: int, ragged: bool, dtype: str) -> Variant:
    constants: dict[str, Any] = {
        **_HEADS,
        **{"key_width": key_width, "value_width": 128, "groups": groups, "stages": schedules.STAGES},
        **{"registers": schedules.REGISTERS[groups], "dtype": dtype, "ragged": ragged},
        **{"segmented": ragged, "kept": False},
    }
    name = f"gated delta rule, fused, K {key_width}, {groups} groups, {'ragged' if ragged else 'dense'}, {dtype}"
    spills = (_SEGMENTS_SPILL_BYTES if ragged else _SPILL_BYTES)[groups]
    return Variant(name, fused, constants, _ARCH, schedules.fused_bytes(key_width, groups), spills)


def _full(whole: bool) -> list[Variant]:
    """What full residuals change: the forward keeps S and x, the gradients read them, and w is left for others."""
    found = []
    every = [(key_width, ragged, d) for key_width in (64, 128) for ragged in (False, True) for d in _DTYPES]
    for key_width, ragged, dtype in every if whole else [(128, True, "bfloat16")]:
        kind = f"K {key_width}, {'ragged' if ragged else 'dense'}, {dtype}"
        like = _fused(key_width, 1, ragged, dtype)
        name, constants = f"gated delta rule, fused, all kept, {kind}", {**like.constants, "kept": True}
        need = schedules.fused_bytes(key_width, 1, kept=True)
        found.append(Variant(name, fused, constants, _ARCH, need, _KEPT_SPILL_BYTES))
        like = _gradients(key_width, 128, ragged, dtype)
        constants = {**like.constants, "full": True}
        name = f"gated delta rule, gradients of what was kept, {kind}"
        found.append(replace(like, name=name, constants=constants))
        sizes = {**_HEADS, "key_width": key_width, "dtype": dtype, "ragged": ragged}
        found.append(Variant(f"gated delta rule, weights, {kind}", weights, sizes, _ARCH, _WEIGHTS_BYTES[key_width]))
    return found


def _passes(key_width: int, groups: int, ragged: bool, dtype: str) -> Variant:
    constants: dict[str, Any] = {
        **_HEADS,
        **{"key_width": key_width, "value_width": 128, "groups": groups, "dtype": dtype, "beta_dtype": "float32"},
        **{"stages": schedules_backward.PASSES_STAGES[groups], "ragged": ragged},
        **{"registers": schedules_backward.PASSES_REGISTERS[groups], "segmented": ragged and groups == 1},
    }
    name = f"gated delta rule, passes, K {key_width}, {groups} groups, {'ragged' if ragged else 'dense'}, {dtype}"
    need = schedules_backward.passes_bytes(key_width, groups)
    return Variant(name, passes, constants, _ARCH, need, _PASSES_SPILL_BYTES[key_width, groups])


def _gradients_choices(whole: bool) -> list[tuple[int, int, bool, str]]:
    chosen = [(128, 128, True, "bfloat16")]
    every = [
        (key_width, value_width, ragged, dtype)
        for key_width in (64, 128)
        for value_width in (64, 128, 256)
        for ragged in (False, True)
        for dtype in ("bfloat16", "float16")
    ]
    return every if whole else chosen


def _gradients(key_width: int, value_width: int, ragged: bool, dtype: str) -> Variant:
    constants: dict[str, Any] = {
        **_HEADS,
        **{"key_width": key_width, "value_width": value_width, "dtype": dtype, "grad_dtype": dtype},
        **{"g_dtype": "float32", "beta_dtype": dtype, "ragged": ragged},
        **{"registers": schedules_backward.GRADIENTS_REGISTERS, "full": False},
    }
    name = f"gated delta rule, gradients, K {key_width}, V {value_width}, {'ragged' if ragged else 'dense'}, {dtype}"
    need = schedules_backward.gradients_bytes(key_width, value_width)
    return Variant(name, gradients, constants, _ARCH, need, _GRADIENTS_SPILL_BYTES)


def _solve_choices(whole: bool) -> list[tuple[int, bool, str]]:
    dtypes = ("bfloat16", "float16")
    every = [(heads, ragged, dtype) for heads in (1, 2) for ragged in (False, True) for dtype in dtypes]
    return every if whole else [(1, True, "bfloat16"), (2, False, "bfloat16")]


def _solve(heads: int, ragged: bool, dtype: str) -> Variant:
    sizes = {"heads": 2, "value_heads": 2 * heads, "key_width": 128}
    constants = {**sizes, "dtype": dtype, "g_dtype": "float32", "beta_dtype": dtype, "ragged": ragged}
    name = f"gated delta rule, solve, {heads} heads, {'ragged' if ragged else 'dense'}, {dtype}"
    return Variant(name, solve, constants, _ARCH, _SOLVE_BYTES[heads])


def _summaries(whole: bool) -> list[tuple[int, int, bool, str]]:
    dtypes = ("bfloat16", "float16")
    every = [(k, g, ragged, dtype) for k in (64, 128) for g in (1, 2) for ragged in (False, True) for dtype in dtypes]
    return every if whole else [(128, 2, True, "float16")]


def _summarise(key_width: int, groups: int, ragged: bool, dtype: str) -> Variant:
    sizes = {"key_width": key_width, "value_width": 128, "groups": groups, "stages": schedules.STAGES}
    constants = {**_HEADS, **sizes, "registers": schedules.SUMMARY_REGISTERS, "dtype": dtype, "ragged": ragged}
    name = f"gated delta rule, summaries, K {key_width}, {groups} groups, {'ragged' if ragged else 'dense'}, {dtype}"
    return Variant(name, summarise, constants, _ARCH, schedules.summarise_bytes(key_width, groups))


def _passes_summaries(whole: bool) -> list[tuple[int, bool, str]]:
    every = [(k, ragged, dtype) for k in (64, 128) for ragged in (False, True) for dtype in ("bfloat16", "float16")]
    return every if whole else [(128, True, "bfloat16")]


def _summarise_passes(key_width: int, ragged: bool, dtype: str) -> Variant:
    tiles = {"stages": schedules_backward.PASSES_STAGES[1], "registers": schedules_backward.PASSES_REGISTERS[1]}
    names = {"dtype": dtype, "beta_dtype": "float32", "ragged": ragged}
    constants = {**_HEADS, "key_width": key_width, "value_width": 128, **tiles, **names}
    name = f"gated delta rule, summaries of the passes, K {key_width}, {'ragged' if ragged else 'dense'}, {dtype}"
    return Variant(name, summarise_passes, constants, _ARCH, schedules_backward.summaries_bytes(key_width))


def _compositions(whole: bool) -> list[tuple[int, int, bool]]:
    every = [(k, directions, ragged) for k in (64, 128) for directions in (1, 2) for ragged in (False, True)]
    return every if whole else [(128, 2, True)]


def _compose(key_width: int, directions: int, ragged: bool) -> Variant:
    constants = {"value_heads": 4, "key_width": key_width, "value_width": 128}
    constants |= {"directions": directions, "ragged": ragged}
    name = f"gated delta rule, composition, K {key_width}, {directions} ways, {'ragged' if ragged else 'dense'}"
    return Variant(name, compose, constants, _ARCH, schedules.compose_bytes(key_width))
