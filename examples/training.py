"""The training loop, the held-out figure, and a checkpoint from which a run goes on as if never cut."""

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from corpus import Batch, packed_batches, training_batches
from model import ByteModel
from optim import Optimizers, learning_rate_factor
from torch import Tensor
from torch.nn.functional import cross_entropy


class OtherRunError(ValueError):
    """A checkpoint that belongs to another model, seed or batch size."""


@dataclass(frozen=True)
class TrainingOptions:
    """How long to train, on how much at a time, how often to save."""

    steps: int
    seconds: float  # of wall clock, at most; the schedule follows whichever limit is nearer
    bytes_per_batch: int
    seed: int
    checkpoint_every: int
    muon_lr: float = 0.03
    embedding_lr: float = 0.03
    other_lr: float = 0.01


def batch_loss(model: ByteModel, batch: Batch, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats over every byte of a batch that is on the model's device."""
    logits, _ = model(batch.tokens, batch.cu_seqlens)
    return cross_entropy(logits[0], batch.targets[0], reduction=reduction)


@torch.no_grad()
def bits_per_byte(model: ByteModel, documents: list[bytes], bytes_per_batch: int, device: torch.device) -> float:
    """Mean over every byte of every document; each document starts afresh from `BOS`."""
    model.eval()
    nats = 0.0
    for batch in packed_batches(documents, bytes_per_batch):
        nats += float(batch_loss(model, batch.to(device), reduction="sum"))
    return nats / math.log(2) / sum(map(len, documents))


class Trainer:
    """A model with everything that changes while it trains; all of it is in the checkpoint."""

    def __init__(self, model: ByteModel, options: TrainingOptions, device: torch.device) -> None:
        self.model, self.options, self.device = model, options, device
        self.optimizers = Optimizers(model, options.muon_lr, options.embedding_lr, options.other_lr)
        self.step = 0
        self.seconds = 0.0  # of training so far, checkpoints included
        self.bytes_seen = 0
        self.curve: list[float] = []  # bits per byte of each step's batch

    @property
    def progress(self) -> float:
        """Share of the run that is done, by the limit that is nearer: steps or seconds."""
        return max(self.step / self.options.steps, self.seconds / self.options.seconds)

    def train(self, documents: list[bytes], checkpoint: Path, on_step: Callable[["Trainer"], None]) -> None:
        """Trains until a limit is reached, saving on the way and at the end."""
        batches = self._remaining(documents)
        started = time.perf_counter() - self.seconds
        self.model.train()
        while self.progress < 1.0:
            self._update(next(batches).to(self.device))
            self.seconds = time.perf_counter() - started
            if self.step % self.options.checkpoint_every == 0:
                self.save(checkpoint)
            on_step(self)
        self.save(checkpoint)

    def _remaining(self, documents: list[bytes]) -> Iterator[Batch]:
        """The batches that follow the steps already done."""
        every = training_batches(documents, self.options.bytes_per_batch, self.options.seed)
        return islice(every, self.step, None)

    def _update(self, batch: Batch) -> None:
        loss = batch_loss(self.model, batch)
        loss.backward()
        self.optimizers.step(learning_rate_factor(self.step, self.progress))
        self.step += 1
        self.bytes_seen += batch.targets.numel()
        self.curve.append(float(loss.detach()) / math.log(2))

    def save(self, path: Path) -> None:
        """Writes the checkpoint beside `path` and renames it, so that a cut leaves the old one whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".unfinished")
        torch.save(
            {
                "identity": self.identity(),
                "model": self.model.state_dict(),
                "optimizers": self.optimizers.state_dict(),
                "step": self.step,
                "seconds": self.seconds,
                "bytes_seen": self.bytes_seen,
                "curve": self.curve,
                "random": torch.get_rng_state(),
                "random_cuda": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
            },
            unfinished,
        )
        os.replace(unfinished, path)

    def load(self, path: Path) -> None:
        """Goes on from a checkpoint; OtherRunError if it is not of this run."""
        saved = torch.load(path, map_location="cpu", weights_only=True)
        theirs = saved["identity"]
        unlike = [
            f"{key} {theirs.get(key)} instead of {value}"
            for key, value in self.identity().items()
            if theirs.get(key) != value
        ]
        if unlike:
            raise OtherRunError(f"{path} is of another run: {', '.join(unlike)}. Use its options, or another folder")
        self.model.load_state_dict(saved["model"])
        self.optimizers.load_state_dict(saved["optimizers"])
        self.step, self.seconds = saved["step"], saved["seconds"]
        self.bytes_seen, self.curve = saved["bytes_seen"], saved["curve"]
        torch.set_rng_state(saved["random"])
        if saved["random_cuda"] and self.device.type == "cuda":
            torch.cuda.set_rng_state_all(saved["random_cuda"])

    def identity(self) -> dict[str, str]:
        """What two halves of one run must share."""
        return {
            "model": str(self.model.config),
            "seed": str(self.options.seed),
            "bytes per batch": str(self.options.bytes_per_batch),
        }
