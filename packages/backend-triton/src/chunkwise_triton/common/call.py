"""One call: its sizes, chunk map and constants, what its launches share, and its kernels built before the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from chunkwise.protocol import axes as protocol
from chunkwise.verifier.device import interpreting
from chunkwise.verifier.facts import Facts
from chunkwise_triton.common.channel_gates import channel_gate_kernel
from chunkwise_triton.common.chunks import ChunkMap, chunk_map
from chunkwise_triton.common.gates import gate_kernel
from chunkwise_triton.common.launch import Key, aligned, launch, launch_again, warm
from chunkwise_triton.common.schedules import Schedule, Tile

DTYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}


class Call:
    """The tensors of a call and what its launches share.

    Args:
        schedule: its launch configuration.
        inputs: the op's; ``g`` may be absent or None, and then the kernels read no gate.
        q, k: what takes the place of the raw ones.
        others: further tensors whose alignment decides how kernels are compiled.
    """

    def __init__(self, schedule: Schedule, inputs: Any, q: Tensor, k: Tensor, *others: Tensor | None) -> None:
        self.schedule = schedule
        self.q, self.k, self.v, self.scale = q, k, inputs.v, inputs.scale
        self.gated = inputs.g is not None
        self.g = or_any(inputs.g, self.v)
        self.heads, self.key_width = k.shape[2:]
        self.value_heads, self.value_width = self.v.shape[2:]
        self.map: ChunkMap = chunk_map(self.v, inputs.cu_seqlens, schedule.chunk_size)
        self.sizes = {"H": self.heads, "HV": self.value_heads, "K": self.key_width, "V": self.value_width}
        self.sizes["C"] = schedule.chunk_size
        self.rest = {"DOT": DTYPES[schedule.dot], "RAGGED": self.map.ragged}
        self.where = (self.map.cu_seqlens, self.map.table, self.v.shape[1], self.map.chunks_per_row)
        self.key = self._key(self.q, self.k, self.v, self.g, inputs.initial_state, inputs.cu_seqlens, *others)

    def _key(self, *tensors: Tensor | None) -> Key | None:
        """What decides how the kernels are compiled, but for the flags of each; see ``launch_again``."""
        if not self.v.is_cuda or not aligned(*tensors) or self.v.shape[1] >= 1 << 31:
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

    def states(self, dtype: torch.dtype | None = None) -> Tensor:
        """One state a chunk slot, in the activations' dtype unless another is asked for; zero where none is written.

        Ragged calls have slots that no chunk takes, and residuals hold the same bits every time.
        """
        shape = (self.map.slots, self.value_heads, self.key_width, self.value_width)
        make = torch.zeros if self.map.ragged else torch.empty
        return make(shape, dtype=dtype or self.v.dtype, device=self.v.device)

    def state(self) -> Tensor:
        """One fp32 state a sequence."""
        shape = (self.map.sequences, self.value_heads, self.key_width, self.value_width)
        return torch.empty(shape, dtype=torch.float32, device=self.v.device)

    def gates(self) -> dict[str, Tensor]:
        """Room for the gate sums, and the decays from each row to its chunk's end and over each chunk."""
        if not self.gated:
            return dict.fromkeys(("g_cumsum", "g_low", "to_end", "whole"), self.v)  # never read
        g_cumsum = torch.empty_like(self.g, dtype=torch.float32)
        whole = g_cumsum.new_empty(self.map.slots, self.value_heads)
        return {"g_cumsum": g_cumsum, "to_end": torch.empty_like(g_cumsum), "whole": whole}

    def sum_gates(self, warps: int = 4, low: bool = False) -> dict[str, Tensor]:
        """The gate sums and decays of every chunk, with ``low`` also what rounding took from the sums; unread ones
        where there is no gate."""
        gates = self.gates()
        if self.gated:
            gates["g_low"] = torch.empty_like(gates["g_cumsum"]) if low else gates["g_cumsum"]
            arguments = (self.g, *(gates[n] for n in ("g_cumsum", "g_low", "to_end", "whole")), *self.where)
            programs, key = self.map.slots * self.value_heads, None if self.key is None else (warps, low, *self.key)
            if not (programs and launch_again(gate_kernel, programs, arguments, key)):
                sizes = {"HV": self.value_heads, "C": self.schedule.chunk_size}
                constants = {**sizes, "RAGGED": self.map.ragged, "LOW": low}
                launch(gate_kernel, programs, arguments, constants, warps, key=key)
        return gates

    def channel_sums(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Gate sums ``[B, T, H, K]`` fp32 of every chunk, and what rounding took from them: written and read with fp32
        operands only."""
        g_cumsum = self.rows(self.g, torch.float32)
        g_low = torch.empty_like(g_cumsum) if self.schedule.dot == "fp32" else g_cumsum
        parts = -(-self.key_width // tile.block_k)
        self.per_chunk(channel_gate_kernel, tile, self.heads * parts, self.g, g_cumsum, g_low)
        return g_cumsum, g_low


def or_any(tensor: Tensor | None, never_read: Tensor) -> Tensor:
    """The tensor, or one that stands in its place and is never read."""
    return never_read if tensor is None else tensor


_WARM: set[tuple[Any, ...]] = set()


def build_once(
    build: Callable[[Any, Facts, Sequence[str]], None],
    schedule: Schedule,
    facts: Facts,
    parts: Sequence[str],
    decisive: tuple[Sequence[str], Sequence[str]],
) -> None:
    """Build the kernels of a call's parts, nothing where they were built.

    Args:
        build: runs the parts on ``meta`` tensors, inside :func:`warm`.
        schedule, facts, parts: of the call.
        decisive: the axes and the flags that kernels are compiled for.
    """
    if interpreting():
        return
    axes, flags = decisive
    sizes = (facts.size(axis) for axis in axes)
    known = (*sizes, *map(facts.flag, flags), *sorted(facts.dtypes.items()), facts.needs, facts.residuals, *parts)
    key = (build, torch.cuda.current_device(), schedule, *known)
    if key not in _WARM:
        warm(lambda: build(schedule, facts, parts))
        _WARM.add(key)


def meta_inputs(
    schedule: Schedule,
    facts: Facts,
    axes: Mapping[str, str],
    options: Sequence[str],
    offsets: Sequence[str] = ("cu_seqlens",),
) -> SimpleNamespace:
    """The inputs of a call of one chunk as ``meta`` tensors, which launches compile for; None where not given.

    Args:
        schedule, facts: of the call.
        axes: each tensor's axes (``B T H K``).
        options: the flags that are inputs.
        offsets: the arguments that cut rows into sequences.
    """
    lengths = {"B": 1, "T": schedule.chunk_size, "S": schedule.chunk_size, "N": 1, "N+1": 2}

    def tensor(name: str) -> Tensor | None:
        if name in offsets:
            return torch.empty(2, dtype=torch.int32, device="meta") if facts.flag("ragged") else None
        if not facts.given(name):
            return None
        shape = [lengths.get(axis) or facts.size(axis) for axis in axes[name].split()]
        dtype = torch.float32 if name == "initial_state" else protocol.DTYPES[facts.dtypes[name]]
        return torch.empty(shape, dtype=dtype, device="meta")

    names = (*axes, *offsets)
    return SimpleNamespace(scale=1.0, **{o: facts.flag(o) for o in options}, **{name: tensor(name) for name in names})
