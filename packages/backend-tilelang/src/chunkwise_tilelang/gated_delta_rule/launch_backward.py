"""The launches of the backward of the gated delta rule: allocates what its kernels write, calls them in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chunkwise.verifier.facts import Facts
from chunkwise_tilelang.gated_delta_rule import bands_backward, launch, schedules_backward
from chunkwise_tilelang.gated_delta_rule.implementations import FULL
from chunkwise_tilelang.gated_delta_rule.launch import _DTYPES, _SHORT, Shape, _never_read, _normalised, slots_of
from chunkwise_tilelang.gated_delta_rule.schedules import CHUNK, Schedule
from chunkwise_tilelang.toolkit import compile as compiling
from chunkwise_tilelang.toolkit.streams import pipeline

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


def gradients_constants(
    shape: Shape, dtypes: tuple[str, str, str], grad_dtype: str, ragged: bool, full: bool = False
) -> dict[str, Any]:
    """The constants of the kernel of all products; the dtypes of the activations, the gates and beta."""
    names = dict(zip(("dtype", "g_dtype", "beta_dtype"), dtypes, strict=True))
    flags = {"ragged": ragged, "full": full}
    rest = {"grad_dtype": grad_dtype, "registers": schedules_backward.GRADIENTS_REGISTERS}
    return {**dict(zip(_SIZES, shape, strict=True)), **names, **rest, **flags}


def _work(
    groups: int, segmented: bool, shape: Shape, dtypes: tuple[str, str, str], grad_dtype: str, ragged: bool,
    full: bool = False,
) -> list[compiling.Work]:  # fmt: skip
    activations, _, betas = dtypes
    return [
        (GRADIENTS, gradients_constants(shape, dtypes, grad_dtype, ragged, full)),
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


class _Tensors(NamedTuple):
    """What the kernels read of the call and its residuals; q and k normalised where the call asks for it."""

    q: Tensor
    k: Tensor
    v: Tensor
    inverse: Tensor
    g_cumsum: Tensor
    beta: Tensor
    d_o: Tensor
    where: Tensor


class _Kept(NamedTuple):
    """What the passes leave for the gradients: S, dS', x and dr of the chunks that have a slot."""

    states: Tensor
    d_states: Tensor
    x: Tensor
    dr: Tensor


def backward(
    schedule: Schedule, inputs: Any, residuals: Any, grads: tuple[Tensor | None, Tensor | None], needs: frozenset[str]
) -> dict[str, Tensor]:
    """The gradients named in ``needs``, from the gradients of o and of final_state."""
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
    layout = schedules_backward.layout(sequences, batch * rows, shape[1:], _multiprocessors(index))
    saved = residuals.tensors
    full = "states" in saved
    launchers = _launchers(index, layout[0], layout[1] > 0, shape, dtypes, grad_dtype, offsets is not None, full)
    where = _never_read(v.device, torch.int32, (2,)) if offsets is None else offsets
    tensors = _Tensors(q, k, v, saved["inverse"], saved["g_cumsum"], inputs.beta, d_o, where)
    call = _Call(launchers, layout, tensors, inputs, _Ends(inputs.initial_state, d_final, d_initial), saved, needs)
    found = call.run()
    if norm:
        for name in needs & {"q", "k"}:
            found[name] = _through_norm(getattr(inputs, name), found[name])
    return {name: found[name] for name in needs}


class _Call:
    """A call on its way over the bands of its plan, and the gradients that it finds."""

    def __init__(
        self, launchers: list[compiling.Launcher], layout: tuple[int, int], tensors: _Tensors, inputs: Any, ends: _Ends,
        saved: Mapping[str, Tensor], needs: frozenset[str],
    ) -> None:  # fmt: skip
        self.run_gradients, self.run_passes, *split = launchers
        self.groups, self.segment = layout
        self.tensors, self.inputs, self.ends, self.saved = tensors, inputs, ends, saved
        self.full = "states" in saved
        v, offsets = inputs.v, inputs.cu_seqlens
        batch, rows = v.shape[:2]
        self.sequences = batch if offsets is None else len(offsets) - 1
        self.widths = (v.shape[2], inputs.k.shape[3], v.shape[3])
        self.absent = _never_read(v.device, torch.float32, (1, *self.widths))
        self.cut_states, self.cuts = launch.cut_states(saved, self.absent)
        # By place: the entry states of segments, and the gradients of their exit states or of what a band goes on from.
        self.entries: Tensor | None = None
        self.carried: Tensor | None = None
        if split:
            self.entries, self.carried = self._segment_ends(split)
        self.places = self.sequences if self.entries is None else len(self.entries)
        self.plan = self._plan()
        if self.carried is None and len(self.plan.bands) > 1:
            self.carried = v.new_empty(self.places, *self.widths, dtype=torch.float32)
        slots = self.places * self.plan.width
        self.kept = self._room(slots if offsets is None else slots_of(batch, rows, self.sequences, CHUNK, True))
        self.found = {"v": _rows(v, offsets)}
        if ends.d_initial is not None:
            self.found["initial_state"] = ends.d_initial
        self.rows_of_gradients = needs - {"initial_state", "v"}

    def run(self) -> dict[str, Tensor]:
        """All gradients; dq and dk are those of the rows that the kernels see."""
        plan = self.plan
        pipeline(self.inputs.v.device.index, len(plan.bands), plan.rooms, self._passes, self._gradients)
        return self.found

    def _plan(self) -> bands_backward.Plan:
        """The bands of a call; all at once where it is ragged, for nobody here knows how long its sequences are, and
        where all states were kept, for memory was no matter."""
        v = self.inputs.v
        whole = -(-v.shape[1] // CHUNK)
        chunks = min(self.segment, whole) if self.segment else whole
        if self.inputs.cu_seqlens is not None or self.full:
            return bands_backward.at_once(whole, chunks)
        count = _multiprocessors(v.device.index)
        best = schedules_backward.bands(self.places, chunks, self.groups, self.widths, v.itemsize, count)
        return bands_backward.plan(whole, chunks, *best)

    def _room(self, slots: int) -> _Kept:
        v, (value_heads, key_width, value_width) = self.inputs.v, self.widths
        d_states = v.new_empty(slots, value_heads, value_width, key_width)
        dr = v.new_empty(slots, value_heads, CHUNK, value_width)
        if self.full:  # nobody writes S and x
            return _Kept(d_states, d_states, dr, dr)
        return _Kept(torch.empty_like(d_states), d_states, torch.empty_like(dr), dr)

    def _segment_ends(self, launchers: list[compiling.Launcher]) -> tuple[Tensor, Tensor]:
        """The entry states of all segments, and the gradients of their exit states: each [segments, HV, K, V]."""
        run_summaries, run_compose = launchers
        v, where, segment = self.inputs.v, self.tensors.where, self.segment
        (batch, rows), (value_heads, key_width, value_width) = v.shape[:2], self.widths
        segments = slots_of(batch, rows, self.sequences, segment * CHUNK, self.inputs.cu_seqlens is not None)
        maps = v.new_empty(segments, value_heads, 2, key_width, key_width, dtype=torch.bfloat16)
        added = v.new_empty(2, segments, value_heads, key_width, value_width, dtype=torch.float32)
        found = torch.empty_like(added)
        run_summaries(*self.tensors, maps, *added, self.sequences.bit_length(), segment, self.inputs.scale)
        states, flags = self._given(self.ends[:2])
        run_compose(maps, added, where, *states, found, self.sequences, rows, segment, *flags)
        return found[0], found[1]

    def _given(self, states: Sequence[Tensor | None]) -> tuple[list[Tensor], list[int]]:
        """The kernels' arguments for states that may be absent, and the flags that tell."""
        return [self.absent if state is None else state for state in states], [int(s is not None) for s in states]

    def _passes(self, turn: int) -> None:
        """What the gradients of a band need, and dv; dS goes on by place to the band before it."""
        plan, (initial, d_final, d_initial) = self.plan, self.ends
        band, last = plan.bands[turn], turn == len(plan.bands) - 1
        if self.carried is not None:
            initial = self.entries if self.segment else initial
            d_final = self.carried if self.segment or turn else d_final
        states, flags = self._given(
            (self.cut_states if band.first else initial, d_final, d_initial if last else self.carried)
        )
        self.run_passes(
            *self.tensors, *states, *self.kept, self.found["v"], self.places, self.sequences.bit_length(),
            self.segment, plan.width, *band[:3], self.cuts if band.first else 0, self.inputs.scale,
            *flags, int(not last), 1 if self.full else 2,
        )  # fmt: skip
        if last and plan.rooms == 1:
            self.entries = self.carried = None  # their memory can be that of dq: all kernels run in turn

    def _gradients(self, turn: int) -> None:
        """dq, dk, dg and dbeta of the chunks of a band."""
        if not self.rows_of_gradients:
            return
        if "q" not in self.found:
            self.found |= _gradients_of(self.tensors, self.inputs)
        q, k, v, _, g_cumsum, beta, d_o, where = self.tensors
        plan, (states, flags) = self.plan, self._given(self.ends[:2])
        rounds = schedules_backward.GRADIENTS_ROUNDS if plan.rooms > 1 else 1
        most = self.kept.dr.shape[0] * k.shape[2]  # units: no chunk of a band is without a slot
        kept, first_slots = self.kept, launch.first_slots(self.saved, self.inputs.cu_seqlens, v, CHUNK)
        if self.full:
            kept = kept._replace(states=self.saved["states"], x=self.saved["v_new"])
        self.run_gradients(
            q, k, v, g_cumsum, beta, d_o, where, *states, *kept, first_slots,
            *(self.found[name] for name in ("q", "k", "g", "beta")),
            self.inputs.scale, self.sequences.bit_length(), min(most, rounds * _multiprocessors(v.device.index)),
            plan.chunks, plan.width, *plan.bands[turn], *flags,
        )  # fmt: skip


def _gradients_of(tensors: _Tensors, inputs: Any) -> dict[str, Tensor]:
    """What takes dq and dk, of the normalised rows in fp32 where they are normalised, dg and dbeta."""
    offsets = inputs.cu_seqlens
    wide = torch.float32 if inputs.use_qk_l2norm_in_kernel else None
    found = {"q": _rows(tensors.q, offsets, wide), "k": _rows(tensors.k, offsets, wide)}
    return found | {name: _rows(getattr(inputs, name), offsets) for name in ("g", "beta")}


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
        ragged, full = bool(facts.flag("ragged")), facts.residuals == FULL
        work += _work(groups, segment > 0, shape, dtypes, grad_dtype, ragged, full)
        if norm:
            work.append((L2_NORMALISE_BACKWARD, {"width": shape[2], "dtype": dtypes[0]}))
    compiling.build(work, torch.cuda.current_device())
