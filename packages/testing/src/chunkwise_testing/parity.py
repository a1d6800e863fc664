"""The generated suite: the classes that a backend's one-line test file stands for."""

from __future__ import annotations

from typing import Any

from chunkwise_testing.suite.accuracy import Accuracy
from chunkwise_testing.suite.attention import Attention
from chunkwise_testing.suite.base import Suite
from chunkwise_testing.suite.contracts import Contracts, Gates, Promises
from chunkwise_testing.suite.gradients import Gradients
from chunkwise_testing.suite.graphs import CudaGraphs, Graphs
from chunkwise_testing.suite.memory import LargeCalls, Memory
from chunkwise_testing.suite.model_options import ModelOptions
from chunkwise_testing.suite.ragged import Ragged
from chunkwise_testing.suite.residuals import Residuals
from chunkwise_testing.suite.shapes import Shapes
from chunkwise_testing.suite.states import States
from chunkwise_testing.suite.table import BackendTable

SUITE: tuple[Any, ...] = (
    Accuracy,
    Attention,
    BackendTable,
    Contracts,
    CudaGraphs,
    Gates,
    Gradients,
    Graphs,
    LargeCalls,
    Memory,
    ModelOptions,
    Promises,
    Ragged,
    Residuals,
    Shapes,
    States,
)
"""Every family of promises; each class is generic over ops, implementations and devices."""


def generate(backend: str) -> dict[str, type]:
    """Test classes for a backend, by name; what has nothing to test on it is left out, a class or a test."""
    bound = [type(f"Test{suite.__name__}", (suite,), {"backend": backend, "__doc__": suite.__doc__}) for suite in SUITE]
    for cls in bound:
        for name in cls.idle() if issubclass(cls, Suite) else ():
            setattr(cls, name, None)
    return {cls.__name__: cls for cls in bound if cls.applies()}  # type: ignore[attr-defined]
