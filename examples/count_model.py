"""The baseline: an order-2 byte model that only counts, with interpolated Witten-Bell smoothing."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np
from corpus import BOS

Context = tuple[int, ...]


class CountModel:
    """`p(b | two symbols before)` from counts, backing off to one symbol, none, and the uniform one.

    A context c that was seen n(c) times, followed by u(c) different bytes, gives
    `p(b | c) = (count(c, b) + u(c) * p(b | shorter c)) / (n(c) + u(c))` (Witten and Bell, 1991).
    """

    def __init__(self, documents: Iterable[bytes], order: int = 2) -> None:
        self.order = order
        self._counts: dict[Context, Counter[int]] = defaultdict(Counter)
        for document in documents:
            symbols = [BOS] * order + list(document)
            for position in range(order, len(symbols)):
                for length in range(order + 1):
                    self._counts[tuple(symbols[position - length : position])][symbols[position]] += 1
        self._distributions: dict[Context, np.ndarray] = {}

    def distribution(self, context: Context) -> np.ndarray:
        """Probabilities [256] float64 of the next byte after `context`, of which the last symbols count."""
        context = context[max(0, len(context) - self.order) :]
        if context not in self._distributions:
            shorter = self.distribution(context[1:]) if context else np.full(256, 1 / 256)
            seen = self._counts.get(context, Counter())
            counts = np.zeros(256)
            counts[list(seen.keys())] = list(seen.values())
            total = counts.sum() + len(seen)
            self._distributions[context] = (counts + len(seen) * shorter) / total if seen else shorter
        return self._distributions[context]

    def bits_per_byte(self, documents: Iterable[bytes]) -> float:
        """Mean of `-log2 p` over every byte of every document, each started afresh from `BOS`."""
        bits = 0.0
        size = 0
        for document in documents:
            symbols = [BOS] * self.order + list(document)
            for position in range(self.order, len(symbols)):
                context = tuple(symbols[position - self.order : position])
                bits -= math.log2(self.distribution(context)[symbols[position]])
            size += len(document)
        return bits / size
