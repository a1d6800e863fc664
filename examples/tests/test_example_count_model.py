"""The demo's baseline: a proper distribution with the smoothing that it names."""

import math

import numpy as np
import pytest
from corpus import BOS, load_corpus
from count_model import CountModel


@pytest.mark.parametrize("context", [(), (97,), (97, 98), (BOS, BOS), (BOS, 97), (200, 201)])
def test_probabilities_sum_to_one(context: tuple[int, ...]) -> None:
    distribution = CountModel([b"abracadabra", b"abba"]).distribution(context)
    assert distribution.shape == (256,)
    assert np.all(distribution > 0)
    assert math.isclose(distribution.sum(), 1.0, rel_tol=1e-12)


def test_witten_bell_by_hand() -> None:
    model = CountModel([b"aab"])  # without a context: a twice, b once, two kinds
    a, b = ord("a"), ord("b")
    none_a, none_b = (2 + 2 / 256) / 5, (1 + 2 / 256) / 5
    after_a_b = (1 + 2 * none_b) / 4  # after a: a once, b once
    after_aa_b = (1 + 1 * after_a_b) / 2  # after aa: b once
    assert math.isclose(model.distribution(())[a], none_a)
    assert math.isclose(model.distribution((a,))[b], after_a_b)
    assert math.isclose(model.distribution((a, a))[b], after_aa_b)
    assert math.isclose(model.distribution((7, a))[b], after_a_b)  # an unseen context says nothing of its own


def test_bits_are_those_of_the_chain_from_the_start_symbol() -> None:
    model = CountModel([b"aab"])
    contexts = [(BOS, BOS), (BOS, ord("a"))]
    bits = -sum(math.log2(model.distribution(context)[byte]) for context, byte in zip(contexts, b"ab", strict=True))
    assert math.isclose(model.bits_per_byte([b"ab"]), bits / 2)
    assert CountModel([]).bits_per_byte([b"any"]) == 8.0


def test_more_context_is_worth_it_on_the_real_text() -> None:
    corpus = load_corpus()
    by_order = [CountModel(corpus.train, order).bits_per_byte(corpus.held_out) for order in (0, 2)]
    assert by_order[1] < by_order[0] - 1.0
