"""The demo's text: no paragraph twice, whole documents, honest split."""

import re
from itertools import islice

import numpy as np
import pytest
import torch
from corpus import (
    BOS,
    HELD_OUT_SHARE,
    distinct_paragraphs,
    load_corpus,
    pack,
    packed_batches,
    paragraph_key,
    training_batches,
)


def paragraphs_of(documents: list[bytes]) -> list[str]:
    texts = [document.decode() for document in documents]
    return [paragraph_key(part) for text in texts for part in re.split(r"\n[ \t]*\n", text)]


def test_no_paragraph_is_held_out_and_trained_on() -> None:
    corpus = load_corpus()
    train, held_out = paragraphs_of(corpus.train), paragraphs_of(corpus.held_out)
    assert len(set(train)) == len(train)
    assert len(set(held_out)) == len(held_out)
    assert not set(train) & set(held_out)


def test_the_held_out_share_is_met_and_the_split_is_fixed() -> None:
    corpus = load_corpus()
    held_out, train = (sum(map(len, part)) for part in (corpus.held_out, corpus.train))
    assert HELD_OUT_SHARE <= held_out / (held_out + train) < HELD_OUT_SHARE + 0.03
    assert load_corpus() == corpus


def test_paragraphs_that_differ_in_layout_alone_are_one() -> None:
    texts = {"a": "First one.\n\nSecond,\n  wrapped.", "b": "   FIRST one.\n \nThird.", "c": "second, wrapped."}
    assert distinct_paragraphs(texts) == [["First one.", "Second,\n  wrapped."], ["Third."]]


def test_packing_shifts_each_document_by_its_own_start() -> None:
    batch = pack([b"abc", b"z", b"\xff\x00"])
    assert batch.tokens.tolist() == [[BOS, 97, 98, BOS, BOS, 255]]
    assert batch.targets.tolist() == [[97, 98, 99, 122, 255, 0]]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert batch.cu_seqlens.dtype == torch.int32


@pytest.mark.parametrize("limit", [1, 7, 10, 1000])
def test_batches_hold_every_document_once(limit: int) -> None:
    documents = [b"aaaaa", b"bb", b"cccccccc", b"d", b"e"]
    batches = list(packed_batches(documents, limit))
    assert b"".join(batch.targets.numpy().astype(np.uint8).tobytes() for batch in batches) == b"".join(documents)
    for batch in batches:
        assert batch.targets.numel() <= limit or len(batch.cu_seqlens) == 2


def test_training_order_follows_from_the_seed_alone() -> None:
    documents = [bytes([65 + index]) * (index + 1) for index in range(12)]

    def first(seed: int) -> list[list[int]]:
        return [batch.targets[0].tolist() for batch in islice(training_batches(documents, 20, seed), 12)]

    assert first(3) == first(3)
    assert first(3) != first(4)
