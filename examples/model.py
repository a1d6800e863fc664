"""A byte-level language model of layers around one op of chunkwise, gated-delta-net by default; plain PyTorch."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from corpus import BOS, VOCABULARY
from torch import Tensor, nn
from torch.nn.functional import conv1d, normalize, silu, softplus

import chunkwise


def forward_precision(device: torch.device) -> AbstractContextManager[Any]:
    """bf16 autocast on a GPU, fp32 on a CPU. The op's dtypes are its arguments': autocast stops in front of it."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; `mixer` is a key of `MIXERS`."""

    mixer: str = "gated_delta_rule"
    layers: int = 2
    width: int = 192
    heads: int = 2  # of queries and keys
    value_heads: int = 2
    key_width: int = 64
    value_width: int = 64
    window: int = 128  # of attention: positions that one sees, its own included
    hidden: int = 512  # of the feed-forward layer
    kernel: int = 4  # of the short convolution: a position sees itself and the three before it
    ngrams: tuple[int, ...] = (2, 3, 4)  # hashed n-grams of the latest bytes that are embedded too
    buckets: int = 8191  # rows of each n-gram table; prime, since the hash is a remainder
    dropout: float = 0.1


class Ragged:
    """Where documents lie in a packed row, and how their history is put in front of each.

    `padded` inserts `reach` rows before each document, so that a look back of up to `reach` positions
    meets that document's own history and never its neighbour. Documents must not be empty.
    """

    def __init__(self, cu_seqlens: Tensor, reach: int, device: torch.device) -> None:
        starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        documents = torch.arange(len(starts))
        self.count, self.reach = len(starts), reach
        self.cu_seqlens_cpu = cu_seqlens
        self.cu_seqlens = cu_seqlens.to(device)
        ahead = torch.repeat_interleave((documents + 1) * reach, ends - starts)
        self.rows = (torch.arange(int(cu_seqlens[-1])) + ahead).to(device)  # [T] where each position lies
        first = starts + documents * reach
        self._history_rows = (first[:, None] + torch.arange(reach)).flatten().to(device)
        last = ends + (documents + 1) * reach
        self._latest_rows = (last[:, None] - reach + torch.arange(reach)).flatten().to(device)

    def padded(self, x: Tensor, history: Tensor) -> Tensor:
        """`x` [T, ...] with `history` [N, reach, ...] in front of each document: [T + N * reach, ...]."""
        rows = x.new_empty(x.shape[0] + self.count * self.reach, *x.shape[1:])
        rows = rows.index_copy(0, self._history_rows, history.to(x.dtype).flatten(0, 1))
        return rows.index_copy(0, self.rows, x)

    def latest(self, padded: Tensor) -> Tensor:
        """The last `reach` rows of each document, [N, reach, ...]: the history of what follows it."""
        return padded.index_select(0, self._latest_rows).unflatten(0, (self.count, self.reach))


class Past(NamedTuple):
    """Keys and values that later positions may still see, those of all documents one behind another."""

    k: Tensor  # [1, S, HK, D]
    v: Tensor  # [1, S, HK, D]
    cu_seqlens: Tensor  # [N + 1] int32 on the CPU

    def followed_by(self, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> "Past":
        """Each document's rows, then its rows of `k` and `v`."""
        counts = self.cu_seqlens.diff(), cu_seqlens.diff()
        documents = torch.cat([torch.repeat_interleave(torch.arange(len(n)), n) for n in counts])
        rows = documents.argsort(stable=True).to(k.device)
        joined = (torch.cat(parts, 1).index_select(1, rows) for parts in ((self.k, k), (self.v, v)))
        return Past(*joined, self.cu_seqlens + cu_seqlens)

    def latest(self, count: int) -> "Past":
        """At most the last `count` rows of each document."""
        lengths = self.cu_seqlens.diff()
        left = torch.repeat_interleave(self.cu_seqlens[1:], lengths) - torch.arange(int(self.cu_seqlens[-1]))
        rows = (left <= count).nonzero().squeeze(1).to(self.k.device)
        kept = lengths.clamp(max=count).cumsum(0, dtype=torch.int32)
        offsets = torch.cat([kept.new_zeros(1), kept])
        return Past(self.k.index_select(1, rows), self.v.index_select(1, rows), offsets)


class MixerState(NamedTuple):
    """What a mixer carries over a cut in a document."""

    convolution: Tensor  # [N, kernel - 1, channels], activations' dtype
    carried: Tensor | Past  # of a recurrence [N, HV, K, V] fp32


class ModelState(NamedTuple):
    """What the model carries over a cut in a document, of N documents."""

    history: Tensor  # [N, kernel - 1] int64, the latest symbols
    mixers: tuple[MixerState, ...]


class ShortConvolution(nn.Module):
    """Causal depthwise convolution along each document, then SiLU."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, kernel) / math.sqrt(kernel))

    def forward(self, x: Tensor, ragged: Ragged, history: Tensor | None) -> tuple[Tensor, Tensor]:
        """`x` [T, C] and `history` [N, kernel - 1, C] (None: zeros) to the output [T, C] and the new history."""
        if history is None:
            history = x.new_zeros(ragged.count, ragged.reach, x.shape[1])
        padded = ragged.padded(x, history)
        mixed = conv1d(padded.mT[None], self.weight.to(x.dtype), groups=x.shape[1])[0].mT
        # The convolution has no rows for the first `reach` inputs, so its rows lie that much earlier.
        return silu(mixed.index_select(0, ragged.rows - ragged.reach)), ragged.latest(padded)


class Mixer(nn.Module):
    """Short convolution, an op that mixes positions, gated normalisation; which op is its subclasses' matter."""

    op: Any  # the op of this library that runs it
    op_options: Mapping[str, Any] = {}

    def __init__(self, config: ModelConfig, counts: tuple[int, int, int], widths: tuple[int, int, int]) -> None:
        """`counts` and `widths` of the heads of q, k and v; there are as many outputs as most of them."""
        super().__init__()
        self.counts = counts
        self.split = tuple(count * width for count, width in zip(counts, widths, strict=True))
        self.qkv = nn.Linear(config.width, sum(self.split), bias=False)
        self.convolution = ShortConvolution(sum(self.split), config.kernel)
        self.heads = max(counts)
        self.output_gate = nn.Linear(config.width, self.heads * widths[2], bias=False)
        self.norm = nn.RMSNorm(widths[2], eps=1e-6)
        self.output = nn.Linear(self.heads * widths[2], config.width, bias=False)
        nn.init.zeros_(self.output.weight)  # at first the layer adds nothing

    def convolved(self, x: Tensor, ragged: Ragged, state: MixerState | None) -> tuple[list[Tensor], Tensor]:
        """q, k and v `[1, T, heads, width]` for `x` [T, width], and the convolution's new history."""
        mixed, history = self.convolution(self.qkv(x), ragged, state.convolution if state else None)
        parts = zip(mixed.split(self.split, dim=-1), self.counts, strict=True)
        return [part.unflatten(-1, (heads, -1))[None] for part, heads in parts], history

    def op_arguments(
        self, x: Tensor, ragged: Ragged, state: MixerState | None
    ) -> tuple[tuple[Tensor, ...], dict[str, Any], Tensor]:
        """Tensors and options of the op for `x` [T, width], and the convolution's new history."""
        raise NotImplementedError

    def run_op(self, tensors: tuple[Tensor, ...], options: dict[str, Any], keep_state: bool) -> tuple[Tensor, Any]:
        """The op's output, and what is carried on if `keep_state`."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, ragged: Ragged, state: MixerState | None, keep_state: bool
    ) -> tuple[Tensor, MixerState | None]:
        """Mixes `x` [T, width] along each document; the new state only if `keep_state`."""
        tensors, options, history = self.op_arguments(x, ragged, state)
        o, carried = self.run_op(tensors, options, keep_state)
        gate = silu(self.output_gate(x)).unflatten(-1, (self.heads, -1))
        y = self.output((self.norm(o[0].float()) * gate).flatten(-2))
        return y, None if carried is None else MixerState(history, carried)

    def explain(self, x: Tensor, ragged: Ragged) -> Any:
        """What `chunkwise.explain` says of this layer's call."""
        tensors, options, _ = self.op_arguments(x, ragged, None)
        return chunkwise.explain(self.op, *tensors, **options)


class RecurrentMixer(Mixer):
    """A recurrence along each document; which one is its subclasses' matter."""

    def __init__(self, config: ModelConfig, key_heads: int) -> None:
        widths = (config.key_width, config.key_width, config.value_width)
        super().__init__(config, (key_heads, key_heads, config.value_heads), widths)

    def steps(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the op takes behind q, k and v, from `x` [T, width]: `[1, T, HV]` each, fp32, where it says no other."""
        raise NotImplementedError

    def op_arguments(
        self, x: Tensor, ragged: Ragged, state: MixerState | None
    ) -> tuple[tuple[Tensor, ...], dict[str, Any], Tensor]:
        """The recurrence begins where the state left it."""
        qkv, history = self.convolved(x, ragged, state)
        options = {
            "initial_state": state.carried if state else None,
            "cu_seqlens": ragged.cu_seqlens,
            "cu_seqlens_cpu": ragged.cu_seqlens_cpu,
            **self.op_options,
        }
        return (*qkv, *self.steps(x)), options, history

    def run_op(self, tensors: tuple[Tensor, ...], options: dict[str, Any], keep_state: bool) -> tuple[Tensor, Any]:
        """The final state is carried on."""
        o, state = self.op(*tensors, **options, output_final_state=keep_state)
        return o, state


class Decay(nn.Module):
    """The natural log of a decay, <= 0, for each of some heads: `-exp(A_log) softplus(x W + dt_bias)`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.step = nn.Linear(width, heads, bias=False)
        # Decays exp(-A * dt) that differ per head: A from 1 to 16, dt around 0.01 to 0.1 at the start.
        self.A_log = nn.Parameter(torch.linspace(1.0, 16.0, heads).log())
        dt = torch.logspace(-2, -1, heads)
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt

    def forward(self, x: Tensor) -> Tensor:
        """`x` [T, width] to [1, T, heads], fp32."""
        return -self.A_log.exp() * softplus(self.step(x).float()[None] + self.dt_bias)


class GatedDeltaNet(RecurrentMixer):
    """The gated delta rule (Yang, Kautz and Hatamizadeh, 2025)."""

    op = chunkwise.chunk_gated_delta_rule
    op_options: Mapping[str, Any] = {"use_qk_l2norm_in_kernel": True}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.heads)
        self.decay = Decay(config.width, config.value_heads)
        self.beta = nn.Linear(config.width, config.value_heads, bias=False)

    def steps(self, x: Tensor) -> tuple[Tensor, ...]:
        """g, beta."""
        return self.decay(x), self.beta(x).float()[None].sigmoid()


class SimpleGLA(RecurrentMixer):
    """Linear attention with one gate a head; every value head has a key head of its own."""

    op = chunkwise.chunk_simple_gla

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.value_heads)
        self.decay = Decay(config.width, config.value_heads)

    def steps(self, x: Tensor) -> tuple[Tensor, ...]:
        """g."""
        return (self.decay(x),)


class GatedLinearAttention(RecurrentMixer):
    """Linear attention with a gate for each channel of the keys (Yang, Wang, Shen, Panda and Kim, 2024)."""

    op = chunkwise.chunk_gla

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.value_heads)
        self.decay = Decay(config.width, config.value_heads * config.key_width)

    def steps(self, x: Tensor) -> tuple[Tensor, ...]:
        """g, `[1, T, H, K]`."""
        return (self.decay(x).unflatten(-1, (self.counts[0], -1)),)


class DPLR(RecurrentMixer):
    """A delta rule that erases along one key what it writes along another, with a gate for each channel of the keys."""

    op = chunkwise.chunk_dplr_delta_rule

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.value_heads)
        channels = config.value_heads * config.key_width
        self.decay: nn.Module = Decay(config.width, channels)
        self.erased = nn.Linear(config.width, channels, bias=False)
        self.rate = nn.Linear(config.width, channels, bias=False)

    def steps(self, x: Tensor) -> tuple[Tensor, ...]:
        """a, b, gk, `[1, T, H, K]`."""
        raw, rate, decay = (f(x).view(1, len(x), self.counts[0], -1) for f in (self.erased, self.rate, self.decay))
        key = normalize(raw.float(), dim=-1)
        return (-key).to(raw.dtype), (key * rate.float().sigmoid()).to(raw.dtype), decay


class BoundedDecay(nn.Module):
    """RWKV-7's decay: its natural log is `-exp(-0.5) sigmoid(x W + bias)`."""

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.step = nn.Linear(width, channels, bias=False)
        self.bias = nn.Parameter(torch.linspace(-6.0, 1.0, channels))  # decays that differ per channel

    def forward(self, x: Tensor) -> Tensor:
        """`x` [T, width] to [1, T, channels], fp32."""
        return -math.exp(-0.5) * (self.step(x).float()[None] + self.bias).sigmoid()


class RWKV7(DPLR):
    """RWKV-7's recurrence (Peng et al., 2025): DPLR whose decays keep a bound that a kernel may rely on."""

    op = staticmethod(chunkwise.chunk_rwkv7)
    op_options: Mapping[str, Any] = {"scale": 1.0, "lower_bound": -math.exp(-0.5)}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.decay = BoundedDecay(config.width, config.value_heads * config.key_width)

    def op_arguments(
        self, x: Tensor, ragged: Ragged, state: MixerState | None
    ) -> tuple[tuple[Tensor, ...], dict[str, Any], Tensor]:
        """r, w, k, v, a, b."""
        (r, k, v, a, b, w), options, history = super().op_arguments(x, ragged, state)
        return (r, w, k, v, a, b), options, history

    def explain(self, x: Tensor, ragged: Ragged) -> Any:
        """What `chunkwise.explain` says of the op that runs it."""
        (r, w, k, v, a, b), options, _ = self.op_arguments(x, ragged, None)
        return chunkwise.explain(chunkwise.chunk_dplr_delta_rule, r, k, v, a, b, w, **options)


class DeltaNet(RecurrentMixer):
    """The delta rule (Yang, Wang, Zhang, Shen and Kim, 2024); every value head has a key head of its own."""

    op = chunkwise.chunk_delta_rule
    op_options: Mapping[str, Any] = {"use_qk_l2norm_in_kernel": True}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.value_heads)
        self.beta = nn.Linear(config.width, config.value_heads, bias=False)

    def steps(self, x: Tensor) -> tuple[Tensor, ...]:
        """beta."""
        return (self.beta(x).float()[None].sigmoid(),)


class SinkAttention(Mixer):
    """Attention over a sliding window, with a learned sink a head; several queries' heads share one of the keys."""

    op = chunkwise.sink_attention

    def __init__(self, config: ModelConfig) -> None:
        width = config.value_width
        super().__init__(config, (config.value_heads, config.heads, config.heads), (width, width, width))
        self.window = config.window
        self.sinks = nn.Parameter(torch.zeros(config.value_heads))

    def op_arguments(
        self, x: Tensor, ragged: Ragged, state: MixerState | None
    ) -> tuple[tuple[Tensor, ...], dict[str, Any], Tensor]:
        """Keys and values begin with those that the state holds."""
        (q, k, v), history = self.convolved(x, ragged, state)
        past = Past(k, v, ragged.cu_seqlens_cpu)
        if state is not None and isinstance(state.carried, Past):
            past = state.carried.followed_by(*past)
        options = {
            "window_size": self.window,
            "cu_seqlens_q": ragged.cu_seqlens,
            "cu_seqlens_q_cpu": ragged.cu_seqlens_cpu,
            "cu_seqlens_k": past.cu_seqlens.to(x.device),
            "cu_seqlens_k_cpu": past.cu_seqlens,
        }
        return (q, past.k, past.v, self.sinks), options, history

    def run_op(self, tensors: tuple[Tensor, ...], options: dict[str, Any], keep_state: bool) -> tuple[Tensor, Any]:
        """What a window reaches back to is carried on."""
        past = Past(tensors[1], tensors[2], options["cu_seqlens_k_cpu"])
        return self.op(*tensors, **options), past.latest(self.window - 1) if keep_state else None


MIXERS: dict[str, type[nn.Module]] = {
    "gated_delta_rule": GatedDeltaNet,
    "delta_rule": DeltaNet,
    "simple_gla": SimpleGLA,
    "gla": GatedLinearAttention,
    "dplr_delta_rule": DPLR,
    "rwkv7": RWKV7,
    "sink_attention": SinkAttention,
}


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)
        nn.init.zeros_(self.down.weight)  # at first the layer adds nothing

    def forward(self, x: Tensor) -> Tensor:
        """[T, width] to [T, width], position by position."""
        return self.down(silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A mixer and a feed-forward layer, each normalised in front and added to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.mixer_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.mixer = MIXERS[config.mixer](config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, ragged: Ragged, state: MixerState | None, keep_state: bool
    ) -> tuple[Tensor, MixerState | None]:
        """[T, width] to [T, width] and the mixer's new state."""
        mixed, state = self.mixer(self.mixer_norm(x), ragged, state, keep_state)
        x = x + self.dropout(mixed)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x))), state

    def explain(self, x: Tensor, ragged: Ragged) -> Any:
        """What `chunkwise.explain` says of the mixer's call."""
        return self.mixer.explain(self.mixer_norm(x), ragged)


class NgramEmbedding(nn.Module):
    """The sum of embeddings of the latest symbol and of the hashed n-grams that end in it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ngrams, self.buckets = config.ngrams, config.buckets
        self.symbol = nn.Embedding(VOCABULARY, config.width)
        tables = [nn.Embedding(config.buckets, config.width) for _ in config.ngrams]
        for table in tables:
            nn.init.normal_(table.weight, std=0.02)
        self.tables = nn.ModuleList(tables)
        nn.init.normal_(self.symbol.weight, std=0.5)

    def forward(self, padded: Tensor, ragged: Ragged) -> Tensor:
        """Symbols with their history, [T + N * reach] int64, to [T, width]."""
        x = self.symbol(padded[ragged.rows])
        for n, table in zip(self.ngrams, self.tables, strict=True):
            code = sum(padded[ragged.rows - back] * VOCABULARY**back for back in range(n))  # [T] int64
            x = x + table(code % self.buckets)
        return x


class ByteModel(nn.Module):
    """Logits of the next byte for packed documents, whole or continued from a state."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if max(config.ngrams, default=1) > config.kernel:
            raise ValueError(f"ngrams reach {max(config.ngrams)} symbols, but the history holds {config.kernel}")
        self.config = config
        self.embedding = NgramEmbedding(config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.head = nn.Linear(config.width, 256)
        nn.init.zeros_(self.head.weight)  # at first all bytes are alike: 8 bits each
        nn.init.zeros_(self.head.bias)

    def forward(
        self, tokens: Tensor, cu_seqlens: Tensor, state: ModelState | None = None, keep_state: bool = False
    ) -> tuple[Tensor, ModelState | None]:
        """Logits [1, T, 256] fp32 for `tokens` [1, T] int64, and the state if `keep_state`.

        `cu_seqlens` [N + 1] int32 on the CPU; no document may be empty. `state` continues each document
        where an earlier call left it; without one, documents start afresh.
        """
        ragged = Ragged(cu_seqlens, self.config.kernel - 1, tokens.device)
        if state is None:
            history = tokens.new_full((ragged.count, ragged.reach), BOS)
            mixer_states: tuple[MixerState | None, ...] = (None,) * len(self.blocks)
        else:
            history, mixer_states = state
        padded = ragged.padded(tokens[0], history)
        kept: list[MixerState] = []
        with forward_precision(tokens.device):
            x = self.dropout(self.embedding(padded, ragged))
            for block, mixer_state in zip(self.blocks, mixer_states, strict=True):
                x, new_state = block(x, ragged, mixer_state, keep_state)
                if new_state is not None:
                    kept.append(new_state)
            logits = self.head(self.norm(x)).float()[None]
        return logits, ModelState(ragged.latest(padded), tuple(kept)) if keep_state else None

    def explain(self, tokens: Tensor, cu_seqlens: Tensor) -> Any:
        """What `chunkwise.explain` says of the first layer's call for these documents."""
        ragged = Ragged(cu_seqlens, self.config.kernel - 1, tokens.device)
        history = tokens.new_full((ragged.count, ragged.reach), BOS)
        with forward_precision(tokens.device):
            x = self.embedding(ragged.padded(tokens[0], history), ragged)
            return self.blocks[0].explain(x, ragged)
