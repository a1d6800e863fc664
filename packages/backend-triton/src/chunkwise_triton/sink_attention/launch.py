"""Launches of attention with sinks: allocates what the kernels write and calls them in order."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from chunkwise.verifier.facts import Facts
from chunkwise_triton.common.call import DTYPES, build_once, meta_inputs, or_any
from chunkwise_triton.common.chunks import ChunkMap, chunk_map
from chunkwise_triton.common.launch import Key, aligned, launch, launch_again
from chunkwise_triton.sink_attention import kernels
from chunkwise_triton.sink_attention.schedules import Schedule, Tile


class _Call:
    """The tensors of a call, and what its launches share; ``others`` decide with the inputs how kernels are compiled.

    A window wider than all keys is none of its own: what passes S is cut.
    """

    def __init__(self, schedule: Schedule, inputs: Any, *others: Tensor | None) -> None:
        self.schedule, self.inputs = schedule, inputs
        self.rows, self.query_heads, width = inputs.q.shape[1:]
        self.keys, self.key_heads = inputs.k.shape[1:3]
        self.ragged = inputs.cu_seqlens_q is not None
        self.window = max(1, min(inputs.window_size, self.keys)) if schedule.windowed else 0
        self.offsets = (or_any(inputs.cu_seqlens_q, inputs.q), or_any(inputs.cu_seqlens_k, inputs.q))
        self.sizes = {"HQ": self.query_heads, "HK": self.key_heads, "D": width, "BD": schedule.width}
        self.sizes["RAGGED"] = self.ragged
        self.sees = {"DOT": DTYPES[schedule.dot], "CAUSAL": inputs.causal, "WINDOWED": schedule.windowed}
        self.key: Key | None = None
        tensors = (inputs.q, inputs.k, inputs.v, inputs.sinks, inputs.cu_seqlens_q, inputs.cu_seqlens_k, *others)
        if inputs.q.is_cuda and aligned(*tensors) and max(self.rows, self.keys) < 1 << 31:
            shape = (self.query_heads, self.key_heads, width, self.ragged, inputs.causal)
            self.key = (inputs.q.device.index, schedule, *shape)
        self.maps: dict[int, ChunkMap] = {}

    def blocks(self, tile: Tile) -> ChunkMap:
        """The blocks of queries of a tile."""
        tokens = tile.queries // tile.pack
        if tokens not in self.maps:
            self.maps[tokens] = chunk_map(self.inputs.q, self.inputs.cu_seqlens_q, tokens)
        return self.maps[tokens]

    def per_queries(self, kernel: Any, tile: Tile, *arguments: Any, **flags: Any) -> None:
        """Launch a kernel whose programs are blocks of queries."""
        blocks = self.blocks(tile)
        where = (*self.offsets, blocks.table, self.rows, self.keys, blocks.chunks_per_row)
        self._launch(kernel, blocks.slots * self.query_heads // tile.pack, tile, (*arguments, *where), self.sees, flags)

    def per_keys(self, kernel: Any, tile: Tile, *arguments: Any, **flags: Any) -> None:
        """Launch a kernel whose programs are blocks of keys."""
        blocks = chunk_map(self.inputs.k, self.inputs.cu_seqlens_k, tile.keys)
        where = (*self.offsets, blocks.table, self.rows, self.keys, blocks.chunks_per_row)
        self._launch(kernel, blocks.slots * self.key_heads, tile, (*arguments, *where), self.sees, flags)

    def sum_rows(self, tile: Tile, *arguments: Any, **flags: Any) -> None:
        """Launch the kernel of the statistics, in the blocks of queries of a tile."""
        blocks = self.blocks(tile)
        where = (self.offsets[0], blocks.table, self.rows, blocks.chunks_per_row)
        programs = blocks.slots * self.query_heads // tile.pack
        self._launch(kernels.statistics_kernel, programs, tile, (*arguments, *where), {}, flags)

    def _launch(
        self,
        kernel: Any,
        programs: int,
        tile: Tile,
        arguments: tuple[Any, ...],
        sees: dict[str, Any],
        flags: dict[str, Any],
    ) -> None:
        key = None if self.key is None else (*flags.values(), *self.key)
        if not (programs and launch_again(kernel, programs, arguments, key)):
            constants = {**self.sizes, **sees, **flags, "BM": tile.queries, "PACK": tile.pack}
            if sees:
                constants["BN"] = tile.keys
            launch(kernel, programs, arguments, constants, tile.warps, tile.stages, key)

    def like(self, x: Tensor) -> Tensor:
        """Room for an output or a gradient in the shape of x; rows of padding, if there can be any, are zero."""
        return (torch.zeros_like if self.ragged else torch.empty_like)(x)

    def per_row(self) -> Tensor:
        """One fp32 number a query of each head ``[B, HQ, T]``, zero in rows of padding."""
        make = torch.zeros if self.ragged else torch.empty
        shape = (self.inputs.q.shape[0], self.query_heads, self.rows)
        return make(shape, dtype=torch.float32, device=self.inputs.q.device)


def forward(
    schedule: Schedule, inputs: Any, save: str | None
) -> tuple[tuple[Tensor, Tensor | None], dict[str, Tensor]]:
    """``(o, lse or None)`` and the residual ``lse`` of the format ``save``."""
    call = _Call(schedule, inputs)
    keep = inputs.return_lse or save is not None
    o, lse = call.like(inputs.q), call.per_row() if keep else None
    call.per_queries(
        kernels.forward_kernel, schedule.forward,
        inputs.q, inputs.k, inputs.v, inputs.sinks, o, or_any(lse, inputs.sinks), inputs.scale, call.window, KEEP=keep,
    )  # fmt: skip
    if lse is None or save is None:
        return (o, lse), {}
    return (o, lse if inputs.return_lse else None), {"lse": lse.clone() if inputs.return_lse else lse}


def backward(
    schedule: Schedule, inputs: Any, residuals: Any, grads: tuple[Tensor | None, Tensor | None], needs: frozenset[str]
) -> dict[str, Tensor]:
    """The gradients named in ``needs``, from the gradients of o and of lse; either may be None."""
    d_o, d_lse = grads
    o, lse = residuals.tensors["o"], residuals.tensors["lse"]
    call = _Call(schedule, inputs, o, lse, d_o, d_lse)
    statistics = lse.new_empty(*lse.shape, 4)
    found = _statistics(call, o, d_o, d_lse, lse, statistics, "sinks" in needs)
    if not needs & {"q", "k", "v"}:
        return {name: found[name] for name in needs}
    if d_o is None:  # only lse was used
        d_o = torch.zeros_like(inputs.q)
    common = (inputs.q, inputs.k, inputs.v, d_o, statistics)
    if "q" in needs:
        found["q"] = call.like(inputs.q)
        tile = schedule.query_gradient
        call.per_queries(kernels.query_gradient_kernel, tile, *common, found["q"], inputs.scale, call.window)
    wanted = [name for name in ("k", "v") if name in needs]
    for names in [[name] for name in wanted] if schedule.apart else [wanted] if wanted else []:
        found |= {name: call.like(getattr(inputs, name)) for name in names}
        call.per_keys(
            kernels.key_gradient_kernel, schedule.key_gradient,
            *common, found.get("k", inputs.k), found.get("v", inputs.v), inputs.scale, call.window,
            DK="k" in names, DV="v" in names,
        )  # fmt: skip
    return {name: found[name] for name in needs}


def _statistics(
    call: _Call, o: Tensor, d_o: Tensor | None, d_lse: Tensor | None, lse: Tensor, statistics: Tensor, sums: bool
) -> dict[str, Tensor]:
    """Writes what the gradients need of every row, and gives the sinks' where it is asked for."""
    tile = call.schedule.query_gradient
    parts = lse.new_empty(call.blocks(tile).slots, call.query_heads) if sums else lse
    call.sum_rows(
        tile, o, or_any(d_o, o), or_any(d_lse, lse), lse, call.inputs.sinks, statistics, parts,
        HAS_DO=d_o is not None, HAS_LSE=d_lse is not None, SUM=sums,
    )  # fmt: skip
    return {"sinks": parts.sum(0)} if sums else {}


def compile(schedule: Schedule, facts: Facts, parts: Sequence[str]) -> None:
    """Build the kernels of a call's parts: the call itself, on ``meta`` tensors. Nothing where they were built."""
    build_once(_build, schedule, facts, parts, (("HQ", "HK", "D"), ("ragged", "causal", "return_lse")))


_AXES = {"q": "B T HQ D", "k": "B S HK D", "v": "B S HK D", "sinks": "HQ"}
_OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")


def _build(schedule: Schedule, facts: Facts, parts: Sequence[str]) -> None:
    inputs = meta_inputs(schedule, facts, _AXES, ("causal", "return_lse", "window_size"), _OFFSETS)
    if "forward" in parts:
        forward(schedule, inputs, facts.residuals)
    if "backward" in parts:
        lse = torch.empty(0, dtype=torch.float32, device="meta")  # kernels are compiled by dtype, not by shape
        grads = (inputs.q, lse if inputs.return_lse else None)
        residuals = SimpleNamespace(tensors={"o": inputs.q, "lse": lse})
        backward(schedule, inputs, residuals, grads, facts.needs)
