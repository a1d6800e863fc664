"""The demo's model: documents are islands, and a carried state replaces the past exactly."""

import pytest
import torch
from corpus import BOS, pack
from generate import advance, generate
from model import ByteModel, ModelConfig
from torch import Tensor

DOCUMENTS = [b"The first document is the longest one of all: it passes two chunks of the op. " * 2, b"Q", b"ab", b"cde"]


@pytest.fixture
def model(tiny: ModelConfig) -> ByteModel:
    """Weights such that every part of the model moves the logits: nothing is left at zero."""
    torch.manual_seed(1)
    model = ByteModel(tiny).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def logits_of(model: ByteModel, documents: list[bytes]) -> Tensor:
    batch = pack(documents)
    with torch.no_grad():
        return model(batch.tokens, batch.cu_seqlens)[0][0]


def test_packed_documents_read_as_if_alone(model: ByteModel) -> None:
    alone = torch.cat([logits_of(model, [document]) for document in DOCUMENTS])
    torch.testing.assert_close(logits_of(model, DOCUMENTS), alone, rtol=1e-4, atol=1e-4)


def test_nothing_leaks_across_documents_or_from_the_future(model: ByteModel) -> None:
    batch = pack(DOCUMENTS)
    embedded: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        embedded.append(output)

    model.embedding.register_forward_hook(keep)
    logits, _ = model(batch.tokens, batch.cu_seqlens)
    start, end = (int(batch.cu_seqlens[index]) for index in (3, 4))  # the last document, "cde"
    logits[0, start + 1].square().sum().backward()
    reached = embedded[0].grad.abs().sum(-1).nonzero().flatten().tolist()
    assert end - start == 3
    assert reached == [start, start + 1]


@pytest.mark.parametrize("pieces", [(1,) * 156, (64, 1, 2, 89), (155, 1)])
def test_a_carried_state_equals_one_parallel_run(model: ByteModel, pieces: tuple[int, ...]) -> None:
    document = DOCUMENTS[0]
    symbols = [BOS, *document[:-1]]
    parallel = logits_of(model, [document])
    state, position = None, 0
    for piece in pieces:
        logits, state = advance(model, symbols[position : position + piece], state)
        position += piece
        torch.testing.assert_close(logits, parallel[position - 1], rtol=1e-3, atol=1e-3)
    assert position == len(symbols)


def test_states_of_several_documents_are_kept_apart(model: ByteModel) -> None:
    first, second = [b"abcd", b"xy"], [b"efg", b"z"]
    whole = pack([a + b for a, b in zip(first, second, strict=True)])
    head, tail = pack(first), pack(second)
    tail_tokens = whole.tokens[:, [4, 5, 6, 9]]
    with torch.no_grad():
        parallel, _ = model(whole.tokens, whole.cu_seqlens)
        _, state = model(head.tokens, head.cu_seqlens, keep_state=True)
        continued, _ = model(tail_tokens, tail.cu_seqlens, state)
    torch.testing.assert_close(continued, parallel[:, [4, 5, 6, 9]], rtol=1e-3, atol=1e-3)


def test_sampling_follows_its_seed(model: ByteModel) -> None:
    texts = [generate(model, b"ab", 12, temperature=1.0, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == 14 and texts[0].startswith(b"ab")


def test_an_ngram_beyond_the_history_is_refused() -> None:
    with pytest.raises(ValueError, match="ngrams reach 5 symbols, but the history holds 4"):
        ByteModel(ModelConfig(ngrams=(2, 5)))
