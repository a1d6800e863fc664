"""Launches of the gated delta rule: allocates what the kernels write and calls them in order."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from chunkwise.verifier.device import interpreting
from chunkwise.verifier.facts import Facts
from chunkwise_triton.common.chunks import ChunkMap, chunk_map
from chunkwise_triton.common.gates import gate_kernel
from chunkwise_triton.common.l2norm import l2_normalise, l2_normalise_backward
from chunkwise_triton.common.launch import Key, aligned, launch, launch_again, warm
from chunkwise_triton.common.state_scan import scan_backward_kernel, scan_kernel
from chunkwise_triton.gated_delta_rule import kernels
from chunkwise_triton.gated_delta_rule.schedules import Schedule, Tile

LEAN = ("g_cumsum", "inverse")
FULL = ("g_cumsum", "inverse", "w", "v_new", "states")
_DTYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}


class _Call:
    """One call's sizes, chunk map and constants, shared by its launches."""

    def __init__(self, schedule: Schedule, inputs: Any) -> None:
        self.schedule = schedule
        self.q, self.k = inputs.q, inputs.k
        if inputs.use_qk_l2norm_in_kernel:
            self.q, self.k = l2_normalise(inputs.q), l2_normalise(inputs.k)
        self.v, self.g, self.beta, self.scale = inputs.v, inputs.g, inputs.beta, inputs.scale
        self.heads, self.key_width = inputs.k.shape[2:]
        self.value_heads, self.value_width = inputs.v.shape[2:]
        self.map: ChunkMap = chunk_map(inputs.v, inputs.cu_seqlens, schedule.chunk_size)
        self.parts = -(-self.key_width // schedule.state_gradient.block_k)
        self.sizes = {"H": self.heads, "HV": self.value_heads, "K": self.key_width, "V": self.value_width}
        self.sizes["C"] = schedule.chunk_size
        self.rest = {"DOT": _DTYPES[schedule.dot], "RAGGED": self.map.ragged}
        self.where = (self.map.cu_seqlens, self.map.table, self.v.shape[1], self.map.chunks_per_row)
        self.key = self._key(inputs.initial_state, inputs.cu_seqlens)

    def _key(self, initial: Tensor | None, cu_seqlens: Tensor | None) -> Key | None:
        """What decides how the kernels are compiled, but for the flags of each; see ``launch_again``."""
        if not self.v.is_cuda:
            return None
        if not aligned(self.q, self.k, self.v, self.g, self.beta, initial, cu_seqlens) or self.v.shape[1] >= 1 << 31:
            return None
        shape = (self.heads, self.value_heads, self.key_width, self.value_width, self.map.ragged)
        return (self.v.device.index, self.schedule, *shape)

    def per_chunk(self, kernel: Any, tile: Tile, programs: int, *arguments: Any, **flags: Any) -> None:
        """Launch a kernel with some programs a chunk."""
        sizes = {"BLOCK_K": tile.block_k, "BV": tile.block_v}
        options = (tile.warps, tile.stages)
        self._launch(kernel, self.map.slots * programs, (*arguments, *self.where), {**sizes, **flags}, flags, options)

    def per_state(self, kernel: Any, tile: Tile, *arguments: Any, **flags: Any) -> None:
        """Launch a kernel whose programs are column blocks of the states of the sequences; its loop has the stages."""
        programs = self.map.sequences * self.value_heads * -(-self.value_width // tile.block_v)
        where = (self.map.cu_seqlens, self.map.first_slots, *self.where[2:])
        sizes = {"BK": tile.block_k, "BV": tile.block_v, "ROWS": tile.rows, "STAGES": tile.stages}
        self._launch(kernel, programs, (*arguments, *where), {**sizes, **flags}, flags, (tile.warps, 1))

    def _launch(
        self,
        kernel: Any,
        programs: int,
        arguments: tuple[Any, ...],
        constants: dict[str, Any],
        flags: dict[str, Any],
        options: tuple[int, int],
    ) -> None:
        key = None if self.key is None else (*flags.values(), *self.key)
        if not (programs and launch_again(kernel, programs, arguments, key)):
            launch(kernel, programs, arguments, {**self.sizes, **constants, **self.rest}, *options, key)

    def rows(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """An output in the shape of ``like``; rows of padding, which only ragged calls can have, are zero."""
        make = torch.zeros_like if self.map.ragged else torch.empty_like
        return make(like, dtype=dtype or like.dtype)

    def states(self) -> Tensor:
        """One state a chunk slot, in the activations' dtype."""
        shape = (self.map.slots, self.value_heads, self.key_width, self.value_width)
        return torch.empty(shape, dtype=self.v.dtype, device=self.v.device)

    def state(self) -> Tensor:
        """One fp32 state a sequence."""
        shape = (self.map.sequences, self.value_heads, self.key_width, self.value_width)
        return torch.empty(shape, dtype=torch.float32, device=self.v.device)

    def gates(self) -> dict[str, Tensor]:
        """Room for the gate sums, and the decays from each row to its chunk's end and over each chunk."""
        g_cumsum = torch.empty_like(self.g, dtype=torch.float32)
        whole = g_cumsum.new_empty(self.map.slots, self.value_heads)
        return {"g_cumsum": g_cumsum, "to_end": torch.empty_like(g_cumsum), "whole": whole}


def forward(
    schedule: Schedule, inputs: Any, save: str | None
) -> tuple[tuple[Tensor, Tensor | None], dict[str, Tensor]]:
    """``(o, final_state)`` and the residuals of the format ``save``."""
    call = _Call(schedule, inputs)
    inverse = None if save is None else inputs.v.new_empty(*inputs.g.shape, schedule.chunk_size)
    saved = _solve(call, inverse, invert=True)
    final = call.state() if inputs.output_final_state else None
    saved["states"] = _scan(call, saved, inputs.initial_state, final)
    o = call.rows(inputs.v)
    call.per_chunk(
        kernels.output_kernel, schedule.output, call.value_heads,
        call.q, call.k, saved["v_new"], call.g, saved["states"], o, call.scale,
    )  # fmt: skip
    return (o, final), {name: saved[name] for name in _fields(save)}


def _fields(save: str | None) -> tuple[str, ...]:
    return () if save is None else FULL if save.startswith("gdn-states64") else LEAN


def _solve(call: _Call, inverse: Tensor | None, invert: bool) -> dict[str, Tensor]:
    """The gates, w and, in v_new's place, u; the inverse first, where ``invert``, which is kept where there is room."""
    saved = call.gates()
    saved["w"] = call.v.new_empty(*call.v.shape[:3], call.key_width)
    saved["v_new"] = torch.empty_like(call.v)
    saved["inverse"] = _or(inverse, saved["w"])
    call.per_chunk(
        kernels.wy_kernel, call.schedule.wy, call.value_heads,
        call.k, call.v, call.g, call.beta, *(saved[name] for name in ("inverse", "w", "v_new")),
        *(saved[name] for name in ("g_cumsum", "to_end", "whole")),
        INVERT=invert, KEEP=inverse is not None, INVERSE_DOT=_DTYPES[call.schedule.inverse_dot],
    )  # fmt: skip
    return saved


def _scan(call: _Call, saved: dict[str, Tensor], initial: Tensor | None, final: Tensor | None) -> Tensor:
    """Turn u into v_new; returns the entry state of every chunk."""
    states = call.states()
    call.per_state(
        scan_kernel, call.schedule.scan,
        call.k, saved["w"], saved["v_new"], saved["to_end"], saved["whole"],
        states, _or(initial, states), _or(final, states),
        HAS_INITIAL=initial is not None, HAS_FINAL=final is not None,
    )  # fmt: skip
    return states


def _or(tensor: Tensor | None, never_read: Tensor) -> Tensor:
    return never_read if tensor is None else tensor


def backward(
    schedule: Schedule, inputs: Any, residuals: Any, grads: tuple[Tensor | None, Tensor | None], needs: frozenset[str]
) -> dict[str, Tensor]:
    """The gradients named in ``needs``, from the gradients of o and of final_state."""
    call = _Call(schedule, inputs)
    d_o, d_final = grads
    if not aligned(d_o, d_final, *residuals.tensors.values()):
        call.key = None
    saved = dict(residuals.tensors)
    if "states" in saved:
        saved |= _gates_again(call)
    else:
        saved = _solve(call, saved["inverse"], invert=False)
        saved["states"] = _scan(call, saved, inputs.initial_state, None)
    d_v_new, d_states, d_initial = _scan_backward(call, saved, d_o, d_final, "initial_state" in needs)
    found = _input_gradients(call, inputs, saved, d_o, (d_v_new, d_states))
    if inputs.use_qk_l2norm_in_kernel:
        for name in ("q", "k"):
            found[name] = l2_normalise_backward(getattr(inputs, name), found[name])
    if d_initial is not None:
        found["initial_state"] = d_initial
    return {name: found[name] for name in needs}


def _scan_backward(
    call: _Call, saved: dict[str, Tensor], d_o: Tensor | None, d_final: Tensor | None, initial: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of v_new, of every chunk's exit state, and of the initial state where it is needed."""
    d_v_new, d_states = torch.empty_like(call.v), call.states()
    d_initial = call.state() if initial else None
    if d_o is not None:
        call.per_chunk(
            kernels.local_gradient_kernel, call.schedule.local, call.value_heads,
            call.q, call.k, call.g, d_o, d_v_new, call.scale,
        )  # fmt: skip
    call.per_state(
        scan_backward_kernel, call.schedule.scan_backward,
        call.q, call.k, saved["w"], saved["g_cumsum"], saved["to_end"], saved["whole"],
        _or(d_o, call.v), d_v_new, d_states,
        _or(d_initial, d_states), _or(d_final, d_states), call.scale,
        HAS_DO=d_o is not None, HAS_INITIAL=initial, HAS_FINAL=d_final is not None,
    )  # fmt: skip
    return d_v_new, d_states, d_initial


def _input_gradients(
    call: _Call, inputs: Any, saved: dict[str, Tensor], d_o: Tensor | None, flows: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    """Gradients of q, k (of the normalised ones, in fp32, under the L2 norm), v, g and beta."""
    wide = torch.float32 if inputs.use_qk_l2norm_in_kernel else None
    found = {"q": call.rows(call.q, wide), "k": call.rows(call.k, wide)}
    found |= {name: call.rows(getattr(call, name)) for name in ("v", "g", "beta")}
    d_v_new, d_states = flows
    schedule, d_o_or_any, has = call.schedule, _or(d_o, call.v), {"PARTS": call.parts, "HAS_DO": d_o is not None}
    state_dq, state_dk = (torch.empty_like(x, dtype=torch.float32) for x in (call.q, call.k))
    sums = state_dq.new_empty(*call.g.shape, 3 * call.parts + 1)
    state_sums = state_dq.new_empty(call.map.slots, call.value_heads, call.parts)
    call.per_chunk(
        kernels.solve_gradient_kernel, schedule.solve, call.value_heads,
        call.v, call.beta, saved["inverse"], d_v_new, found["v"], sums, PARTS=call.parts,
    )  # fmt: skip
    call.per_chunk(
        kernels.state_gradient_kernel, schedule.state_gradient, call.heads * call.parts,
        call.q, call.k, saved["g_cumsum"], saved["to_end"], call.beta, saved["v_new"], saved["states"], d_o_or_any,
        d_v_new, d_states, state_dq, state_dk, sums, state_sums, call.scale, **has,
    )  # fmt: skip
    call.per_chunk(
        kernels.pair_gradient_kernel, schedule.pair_gradient, call.heads,
        call.q, call.k, call.g, call.beta, saved["v_new"], saved["whole"], d_o_or_any, d_v_new, state_dq, state_dk,
        sums, state_sums, *(found[name] for name in ("q", "k", "g", "beta")), call.scale, **has,
    )  # fmt: skip
    return found


def _gates_again(call: _Call) -> dict[str, Tensor]:
    """The decays that no residual format keeps."""
    gates = call.gates()
    launch(
        gate_kernel, call.map.slots * call.value_heads,
        (call.g, gates["g_cumsum"], gates["to_end"], gates["whole"], *call.where),
        {"HV": call.value_heads, "C": call.schedule.chunk_size, "RAGGED": call.map.ragged},
    )  # fmt: skip
    return gates


_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


_WARM: set[tuple[Any, ...]] = set()


def compile(schedule: Schedule, facts: Facts, parts: Sequence[str]) -> None:
    """Build the kernels of a call's parts: the call itself, on ``meta`` tensors. Nothing where they were built."""
    if interpreting():
        return
    sizes = (facts.size(axis) for axis in ("H", "HV", "K", "V"))
    flags = (facts.flag(name) for name in ("ragged", "output_final_state", "use_qk_l2norm_in_kernel"))
    decisive = (*sizes, *flags, *sorted(facts.dtypes.items()), facts.needs, *parts)
    key = (torch.cuda.current_device(), schedule, *decisive)
    if key not in _WARM:
        _build(schedule, facts, parts)
        _WARM.add(key)


def _build(schedule: Schedule, facts: Facts, parts: Sequence[str]) -> None:
    rows = schedule.chunk_size
    lengths = {"B": 1, "T": rows, "N": 1, "N+1": 2}
    axes = {"q": "B T H K", "k": "B T H K", "v": "B T HV V", "g": "B T HV", "beta": "B T HV"}
    axes |= {"initial_state": "N HV K V", "cu_seqlens": "N+1"}

    def tensor(name: str) -> Tensor | None:
        if name == "cu_seqlens":
            return torch.empty(2, dtype=torch.int32, device="meta") if facts.flag("ragged") else None
        if not facts.given(name):
            return None
        shape = [lengths.get(axis) or facts.size(axis) for axis in axes[name].split()]
        dtype = torch.float32 if name == "initial_state" else _TORCH[facts.dtypes[name]]
        return torch.empty(shape, dtype=dtype, device="meta")

    def run() -> None:
        (o, final), saved = forward(schedule, inputs, "gdn-states64@1" if facts.needs else None)
        if "backward" in parts:
            lean = {name: saved[name] for name in LEAN}
            backward(schedule, inputs, SimpleNamespace(tensors=lean), (o, final), facts.needs)

    options = {name: facts.flag(name) for name in ("output_final_state", "use_qk_l2norm_in_kernel")}
    inputs = SimpleNamespace(scale=1.0, **options, **{name: tensor(name) for name in axes})
    warm(run)
