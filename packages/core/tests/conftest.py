"""Fixtures of core's own tests: small inputs, and a second backend that wraps the built-in one."""

import dataclasses

import pytest
import torch

from chunkwise.dispatcher import failure
from chunkwise.eager import implementations


@pytest.fixture
def inputs():
    """Inputs of chunk_gated_delta_rule at B2 T5 H2 HV4 K8 V12, fp32."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    g, beta = -draw(2, 5, 4).abs(), draw(2, 5, 4).sigmoid()
    q, k = draw(2, 5, 2, 8), torch.nn.functional.normalize(draw(2, 5, 2, 8), dim=-1)
    return {"q": q, "k": k, "v": draw(2, 5, 4, 12), "g": g, "beta": beta}


@pytest.fixture
def packed(inputs):
    """The same sizes as one row of ten tokens, for ragged calls."""
    return {name: t.flatten(0, 1)[None] for name, t in inputs.items()}


@pytest.fixture
def variant():
    """Makes a copy of the built-in implementation under another name, with changes."""

    def make(name, **changes):
        return dataclasses.replace(implementations.GATED_DELTA_RULE, name=name, **changes)

    return make


@pytest.fixture(autouse=True)
def no_quarantine():
    yield
    failure.release_all()
