"""Decays of their own for each channel of the keys, inside a chunk, and products of pairs of rows under them:

    P[t, s] = sum_d exp(G[t, d] - G[s, d]) left[t, d] right[s, d]   (s <= t)

with `G[t, d]` the sum of the gates of channel d up to row t. A decay that differs from channel to channel cannot be
taken out of the sum over d, and splitting `exp(G_t - G_s)` into `exp(G_t) exp(-G_s)` overflows for strong gates. So the
chunk is halved again and again. Where t lies in the lower and s in the upper half of a block, with m the last row of
the upper half,

    exp(G_t - G_s) = exp(G_t - G_m) exp(G_m - G_s)

and neither exponent is ever above zero, whatever the gates are. Every pair s < t meets so on exactly one level, and a
pair s = t knows no decay. Gradients of the gates are summed level by level: gate j receives the pairs with s < j <= t
and nothing else, so nothing is added that is taken away again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from chunkwise.eager.triangular import diagonal_blocks, ones_lower, prefix_sums_of_rows

# exp is 0 in fp32 far above this; a gate of -inf (a reset) would give NaN in sums that multiply by zero.
LOWEST_GATE = -1e4


class ChannelDecays(NamedTuple):
    """The decays inside the chunks of a group. C is a power of two."""

    high: Tensor  # [chunks, H, C, K] G rounded to fp32
    low: Tensor  # [chunks, H, C, K] what rounding took away
    from_start: Tensor  # [chunks, H, C, K] exp(G_t)
    to_end: Tensor  # [chunks, H, C, K] exp(G_C - G_t)

    @property
    def whole(self) -> Tensor:
        """`exp(G_C)` `[chunks, H, K]`."""
        return self.from_start[..., -1, :]


def channel_decays(g: Tensor) -> ChannelDecays:
    """From packed gates `[chunks, H, C, K]`, natural log; they are overwritten."""
    high, low = prefix_sums_of_rows(g.clamp_(min=LOWEST_GATE))
    # The exponential of a large sum needs the digits that rounding it to fp32 took away.
    from_start = high.exp().mul_(low.exp())
    to_end = (high[..., -1:, :] - high).add_(low[..., -1:, :]).sub_(low).exp_()
    return ChannelDecays(high, low, from_start, to_end)


class _Level(NamedTuple):
    """The blocks of `2 size` rows of a chunk, each of two halves."""

    size: int
    factors: Tensor  # [N, blocks, 2, size, K] exp(G_m - G_s) in the upper half, exp(G_t - G_m) in the lower one

    def halves(self, x: Tensor) -> Tensor:
        """View `[N, C, K]` as `[N, blocks, 2, size, K]`."""
        return x.view(self.factors.shape)

    def scaled(self, rows: Sequence[Tensor], half: int) -> Tensor:
        """One half of each block of each `[N, C, K]`, decayed towards m: `[N, blocks, len(rows) * size, K]`."""
        factor = self.factors[:, :, half]
        return torch.cat([self.halves(x)[:, :, half] * factor for x in rows], -2)

    def summed(self, x: Tensor) -> Tensor:
        """Add up what `scaled` laid side by side: `[N, blocks, len(rows) * size, K]` -> `[N, blocks, size, K]`."""
        apart: Tensor = x.unflatten(-2, (-1, self.size))
        return apart.sum(2)

    def add(self, gradients: Tensor, half: int, into: Sequence[Tensor]) -> None:
        """The transpose of `scaled`, added to tensors `[N, C, K]`."""
        for gradient, out in zip(gradients.split(self.size, -2), into, strict=True):
            self.halves(out)[:, :, half].addcmul_(gradient, self.factors[:, :, half])

    def pairs(self, p: Tensor) -> Tensor:
        """View of `[L, R, N, C, C]` where rows are in the lower and columns in the upper half of a block:
        `[N, blocks, L, size, R, size]`."""
        blocks = diagonal_blocks(p.flatten(0, 2), 2 * self.size)[..., self.size :, : self.size]
        apart: Tensor = blocks.unflatten(0, p.shape[:3])
        return apart.permute(2, 3, 0, 4, 1, 5)


def _levels(decays: ChannelDecays) -> Iterator[_Level]:
    """From pairs of neighbouring rows to the halves of the chunk."""
    high, low = decays.high.flatten(0, 1), decays.low.flatten(0, 1)
    batch, rows, width = high.shape
    size = 1
    while size < rows:
        high_halves, low_halves = (x.view(batch, -1, 2, size, width) for x in (high, low))
        middle = high_halves[:, :, :1, -1:], low_halves[:, :, :1, -1:]
        sums = (high_halves - middle[0]).add_(low_halves).sub_(middle[1])
        sums[:, :, 0].neg_()
        yield _Level(size, sums.exp_())
        size *= 2


def pair_products(decays: ChannelDecays, left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """P for each of `left` with each of `right`, all `[chunks, H, C, K]`.

    Returns:
        `[L, R, chunks, H, C, C]`, zero above the diagonal.
    """
    lefts, rights = ([x.flatten(0, 1) for x in rows] for rows in (left, right))
    batch, rows = lefts[0].shape[:2]
    pairs = lefts[0].new_zeros(len(lefts), len(rights), batch, rows, rows)
    for level in _levels(decays):
        products = level.scaled(lefts, 1) @ level.scaled(rights, 0).mT
        into = level.pairs(pairs)
        into.copy_(products.view(into.shape))
    for i, x in enumerate(lefts):
        for j, y in enumerate(rights):
            pairs[i, j].diagonal(0, -2, -1).copy_((x * y).sum(-1))
    found: Tensor = pairs.unflatten(2, left[0].shape[:2])
    return found


def pair_products_backward(
    decays: ChannelDecays, left: Sequence[Tensor], right: Sequence[Tensor], d_pairs: Tensor
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Gradients of `left`, of `right` and of the gates, each `[chunks, H, C, K]`.

    `d_pairs` `[L, R, chunks, H, C, C]` is read at and below the diagonal only.
    """
    lefts, rights = ([x.flatten(0, 1) for x in rows] for rows in (left, right))
    d_flat = d_pairs.flatten(2, 3)
    # Pairs of a row with itself know no decay; they stay out of the gates' gradient.
    own = d_flat.diagonal(0, -2, -1).unsqueeze(-1)  # [L, R, N, C, 1]
    d_left = [torch.stack([own[i, j] * y for j, y in enumerate(rights)]).sum(0) for i in range(len(lefts))]
    d_right = [torch.stack([own[i, j] * x for i, x in enumerate(lefts)]).sum(0) for j in range(len(rights))]
    d_g = torch.zeros_like(lefts[0])
    for level in _levels(decays):
        at_left, at_right = level.scaled(lefts, 1), level.scaled(rights, 0)
        d_products = level.pairs(d_flat).reshape(*at_left.shape[:-1], at_right.shape[-2])
        d_at_left, d_at_right = d_products @ at_right, d_products.mT @ at_left
        # exp(G_t - G_m) is moved by the gates after m up to row t, exp(G_m - G_s) by those after s up to m.
        ones, d_halves = ones_lower(level.size, d_g), level.halves(d_g)
        d_halves[:, :, 1] += ones.mT @ level.summed(at_left * d_at_left)
        d_halves[:, :, 0] += ones.tril(-1) @ level.summed(at_right * d_at_right)
        level.add(d_at_left, 1, d_left)
        level.add(d_at_right, 0, d_right)
    shape = left[0].shape
    return [x.view(shape) for x in d_left], [x.view(shape) for x in d_right], d_g.view(shape)


def state_gates_gradient(entry: Tensor, exit: Tensor, whole: Tensor) -> Tensor:
    """What reaches the gates through the states at a chunk's start and end.

    Args:
        entry: `[chunks, H, C, K]`, per row t the gradient of the exponent G_t.
        exit: `[chunks, H, C, K]`, per row t that of G_C - G_t.
        whole: `[chunks, H, K]`, that of G_C.
    """
    # exp(G_t) is moved by every gate up to row t, exp(G_C - G_t) by every gate after it, exp(G_C) by all.
    ones = ones_lower(entry.shape[-2], entry)
    return (ones.mT @ entry).add_(ones.tril(-1) @ exit).add_(whole.unsqueeze(-2))
