"""The demo's modules import each other by name, as a script's do; tests reach them the same way."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from model import MIXERS, ModelConfig


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors here are so small that threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=sorted(MIXERS))
def tiny(request: pytest.FixtureRequest) -> ModelConfig:
    """A model with each mixer, small in every axis, with more value heads than key heads and unlike widths."""
    sizes = {"layers": 2, "width": 32, "heads": 2, "value_heads": 4, "key_width": 16, "value_width": 24}
    return ModelConfig(mixer=request.param, hidden=48, buckets=101, dropout=0.1, **sizes)
