"""Linear attention that forgets and adds, forward and backward, whatever the gates look like.

With entry state `S`, `o = scale (query S + P v)` and `S' = exp(G_C) S + key_out^T v`. What differs between ops is how a
chunk gets `query`, `key_out` and P from q, k and the gates: a :class:`Chunk`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from chunkwise.eager.calls import layout_of, states_or_zeros, walk, walk_back
from chunkwise.eager.chunks import ChunkGroup
from chunkwise.eager.gated_delta_rule import Schedule
from chunkwise.eager.precision import exact_matmuls
from chunkwise.eager.state_scan import accumulate_states, accumulate_states_backward


class Chunk(Protocol):
    """The chunks of a group, packed and widened to fp32."""

    @property
    def v(self) -> Tensor:
        """Values `[chunks, H, C, V]`."""
        ...

    @property
    def g_cumsum(self) -> Tensor:
        """Gates summed from the chunk's first row, `[chunks, H, C]` or `[chunks, H, C, K]`."""
        ...

    @property
    def query(self) -> Tensor:
        """The factor of the entry state in the outputs, but for the scale: `exp(G_t) q_t` `[chunks, H, C, K]`."""
        ...

    @property
    def key_out(self) -> Tensor:
        """What a row brings to the exit state: `exp(G_C - G_t) k_t` `[chunks, H, C, K]`."""
        ...

    @property
    def whole(self) -> Tensor:
        """`exp(G_C)` `[chunks, H, 1 or K]`."""
        ...

    def pairs(self) -> Tensor:
        """P `[chunks, H, C, C]`, zero above the diagonal."""
        ...

    def gradients(self, d_pairs: Tensor, d_query: Tensor, d_key_out: Tensor, d_whole: Tensor) -> dict[str, Tensor]:
        """Of q, k and g from those of the above; `d_pairs` holds anything above the diagonal, `d_whole` K columns."""
        ...


def linear_attention(
    pack: Callable[[ChunkGroup, Any], Chunk], full: str
) -> tuple[Callable[..., Any], Callable[..., dict[str, Tensor]]]:
    """The forward and the backward of an op.

    Args:
        pack: gathers the chunks of a group.
        full: the residual format that has `states` beside `g_cumsum`; any other holds `g_cumsum` alone.
    """

    def forward(schedule: Schedule, inputs: Any, save: str | None) -> Any:
        """Compute `(o, final_state or None)` and the residuals of the format `save`, none when it is None."""
        v = inputs.v
        with exact_matmuls(v.device):
            layout = layout_of(schedule.chunk_size, inputs)
            final = states_or_zeros(inputs, layout, inputs.initial_state)
            saved = {} if save is None else {"g_cumsum": v.new_zeros(_gates_shape(inputs), dtype=torch.float32)}
            o = v.new_empty(v.shape) if layout.covers else v.new_zeros(v.shape)
            if save == full:
                shape = (layout.slots, v.shape[2], inputs.k.shape[-1], v.shape[3])
                saved["states"] = v.new_zeros(shape, dtype=torch.float32)

            def compute(group: ChunkGroup, state: Tensor) -> dict[str, Tensor]:
                chunk = pack(group, inputs)
                states = accumulate_states(group, chunk.key_out, chunk.whole, chunk.v, state)
                o = (chunk.query @ states).add_(chunk.pairs() @ chunk.v).mul_(inputs.scale)
                return {"o": o, "g_cumsum": chunk.g_cumsum, "states": states}

            walk(layout, final, {**saved, "o": o}, compute)
        return (o, final if inputs.output_final_state else None), saved

    def backward(
        schedule: Schedule,
        inputs: Any,
        residuals: Any,
        grads: tuple[Tensor | None, Tensor | None],
        needs: frozenset[str],
    ) -> dict[str, Tensor]:
        """Compute the gradients named in `needs` from `grads = (d_o, d_final_state)`; either may be None."""
        d_o, d_final = grads
        with exact_matmuls(inputs.v.device):
            layout = layout_of(schedule.chunk_size, inputs)
            states = states_or_zeros(inputs, layout, inputs.initial_state)
            d_states = states_or_zeros(inputs, layout, d_final)
            rows = {name: torch.zeros_like(getattr(inputs, name)) for name in needs - {"initial_state"}}

            def recover(group: ChunkGroup, state: Tensor) -> tuple[Chunk, Tensor]:
                chunk = pack(group, inputs)
                if residuals.format == full:
                    return chunk, residuals.tensors["states"].index_select(0, group.slots)
                return chunk, accumulate_states(group, chunk.key_out, chunk.whole, chunk.v, state)

            def gradients(group: ChunkGroup, known: tuple[Chunk, Tensor], d_state: Tensor) -> dict[str, Tensor]:
                chunk, entry = known
                d_packed = torch.zeros_like(chunk.v) if d_o is None else group.pack(d_o).mul_(inputs.scale)
                return _gradients(group, chunk, entry, d_packed, d_state)

            walk_back(layout, states, d_states, rows, recover, gradients)
        return rows | ({"initial_state": d_states} if "initial_state" in needs else {})

    return forward, backward


def _gates_shape(inputs: Any) -> torch.Size:
    """Of the gates; an absent one is a number a head."""
    shape: torch.Size = inputs.v.shape[:3] if inputs.g is None else inputs.g.shape
    return shape


def _gradients(group: ChunkGroup, chunk: Chunk, states: Tensor, d_o: Tensor, d_state: Tensor) -> dict[str, Tensor]:
    """Packed gradients of one group; `d_state`, of the states after it, becomes that of those before it."""
    d_exit = accumulate_states_backward(group, chunk.query, chunk.whole, d_o, d_state)
    d_whole = (states * d_exit).sum(-1)
    found = chunk.gradients(d_o @ chunk.v.mT, d_o @ states.mT, chunk.v @ d_exit.mT, d_whole)
    return {**found, "v": (chunk.pairs().mT @ d_o).add_(chunk.key_out @ d_exit)}
