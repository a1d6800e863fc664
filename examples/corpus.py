"""English text that every CPython ships, as documents: deduplicated, split, packed into ragged batches."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor

BOS = 256  # stands in front of every document; the other symbols are the 256 byte values
VOCABULARY = 257

# The split does not depend on the seed of a run, so that the figures of two runs compare.
SPLIT_SEED = 20
HELD_OUT_SHARE = 0.08
SHORTEST_DOCUMENT, LONGEST_DOCUMENT = 256, 4096  # bytes; where a document ends is drawn between them


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents held out; no paragraph occurs twice, in one part or across."""

    train: list[bytes]
    held_out: list[bytes]


@dataclass(frozen=True)
class Batch:
    """Documents side by side, `N` of them with `T` bytes in all.

    `tokens` [1, T] int64: each document's symbols shifted right by one, `BOS` first.
    `targets` [1, T] int64: the bytes themselves, so that position t predicts `targets[t]`.
    `cu_seqlens` [N + 1] int32, on the CPU: document n is `[cu_seqlens[n], cu_seqlens[n + 1])`.
    """

    tokens: Tensor
    targets: Tensor
    cu_seqlens: Tensor

    def to(self, device: torch.device) -> "Batch":
        """The same batch with its symbols on `device`; the offsets stay on the CPU."""
        return Batch(self.tokens.to(device), self.targets.to(device), self.cu_seqlens)


def load_corpus(texts: dict[str, str] | None = None) -> Corpus:
    """The corpus of `texts` (title -> text), by default the help topics of this Python."""
    rng = np.random.default_rng(SPLIT_SEED)
    paragraphs = distinct_paragraphs(topics if texts is None else texts)
    documents = [document for topic in paragraphs for document in group_paragraphs(topic, rng)]
    target = HELD_OUT_SHARE * sum(map(len, documents))
    train: list[bytes] = []
    held_out: list[bytes] = []
    for index in rng.permutation(len(documents)):
        part = held_out if sum(map(len, held_out)) < target else train
        part.append(documents[index])
    return Corpus(train, held_out)


def paragraph_key(paragraph: str) -> str:
    """What makes two paragraphs the same: their words, whatever the case, indent and line breaks."""
    return " ".join(paragraph.casefold().split())


def distinct_paragraphs(texts: dict[str, str]) -> list[list[str]]:
    """The paragraphs of each text, in order, without those that an earlier text or line has shown."""
    seen: set[str] = set()
    result: list[list[str]] = []
    for title in sorted(texts):
        fresh: list[str] = []
        for paragraph in re.split(r"\n[ \t]*\n", texts[title]):
            key = paragraph_key(paragraph)
            if key and key not in seen:
                seen.add(key)
                fresh.append(paragraph.strip("\n").rstrip())
        if fresh:
            result.append(fresh)
    return result


def group_paragraphs(paragraphs: list[str], rng: np.random.Generator) -> list[bytes]:
    """Neighbouring paragraphs joined to documents of uneven length (log-uniform), none cut in two."""
    documents: list[bytes] = []
    gathered: list[str] = []
    aim = 0.0
    for paragraph in paragraphs:
        if not gathered:
            aim = np.exp(rng.uniform(np.log(SHORTEST_DOCUMENT), np.log(LONGEST_DOCUMENT)))
        gathered.append(paragraph)
        if sum(map(len, gathered)) >= aim:
            documents.append("\n\n".join(gathered).encode())
            gathered = []
    if gathered:
        documents.append("\n\n".join(gathered).encode())
    return documents


def pack(documents: list[bytes]) -> Batch:
    """One batch of these documents, in this order."""
    symbols = [np.frombuffer(document, dtype=np.uint8).astype(np.int64) for document in documents]
    shifted = [np.concatenate([[BOS], document[:-1]]) for document in symbols]
    offsets = np.cumsum([0] + [len(document) for document in symbols], dtype=np.int32)
    tokens, targets = (torch.from_numpy(np.concatenate(part))[None] for part in (shifted, symbols))
    return Batch(tokens, targets, torch.from_numpy(offsets))


def packed_batches(documents: list[bytes], bytes_per_batch: int) -> Iterator[Batch]:
    """Every document once, whole and in order; a batch exceeds the limit only by a lone long document."""
    waiting: list[bytes] = []
    size = 0
    for document in documents:
        if waiting and size + len(document) > bytes_per_batch:
            yield pack(waiting)
            waiting, size = [], 0
        waiting.append(document)
        size += len(document)
    if waiting:
        yield pack(waiting)


def training_batches(documents: list[bytes], bytes_per_batch: int, seed: int) -> Iterator[Batch]:
    """Batches without end, each epoch in its own order: a function of the seed, so a resumed run skips ahead."""
    epoch = 0
    while True:
        order = np.random.default_rng([seed, epoch]).permutation(len(documents))
        yield from packed_batches([documents[index] for index in order], bytes_per_batch)
        epoch += 1
