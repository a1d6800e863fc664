"""Checks of the graph door: the library nodes, whole-graph compilation, recompilation, checkpointing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from chunkwise.autograd import graph
from chunkwise.autograd.residuals import ResidualFormat
from chunkwise_testing.oracle import Result, evaluate
from chunkwise_testing.sampling import Call

BACKEND = "aot_eager"
"""Traces forward and backward as inductor would see them, and compiles nothing."""


def node_arguments(call: Call, needs: Collection[str]) -> tuple[Any, ...]:
    """The arguments of the op's library node for a call."""
    tensors, options = call.arguments()
    wanted = [name in needs for name in call.declaration.tensor_names]
    leaves = [t if t is None else t.detach().requires_grad_(n) for t, n in zip(tensors, wanted, strict=True)]
    return (*leaves, *options[:-1], wanted, "", "")


def node_of(call: Call, residual_format: str | None) -> Any:
    """The op's forward node of a residual format; of the one without residuals for None."""
    return graph._NODES[call.declaration.name, residual_format]


def residuals(call: Call, needs: Collection[str], residual_format: ResidualFormat) -> dict[str, Tensor]:
    """The fields that the call's forward saves for a backward that gives the gradients named."""
    returned = node_of(call, residual_format.name)(*node_arguments(call, needs))
    outputs = len(call.declaration.promises.outputs)
    return dict(zip(residual_format.field_names, returned[outputs:], strict=True))


def opcheck(call: Call, needs: Collection[str], residual_format: str | None) -> Mapping[str, str]:
    """Hold the node against torch's own checks: schema, fake, autograd registration, tracing."""
    node = node_of(call, residual_format if needs else None)
    checked: Mapping[str, str] = torch.library.opcheck(node, node_arguments(call, needs))
    return checked


class Compiled:
    """A call's op compiled as one graph; counts the calls that compiled it."""

    def __init__(self, call: Call, *, dynamic: bool | None = None) -> None:
        from torch._dynamo.testing import CompileCounterWithBackend

        torch._dynamo.reset()
        self.names = tuple(call.tensors)
        self.counter = CompileCounterWithBackend(BACKEND)
        names, op, options = self.names, call.op, dict(call.options)

        def function(*tensors: Tensor) -> Any:
            return op(**dict(zip(names, tensors)), **options)  # noqa: B905  # the tracer has no strict=

        self._function = torch.compile(function, fullgraph=True, backend=self.counter, dynamic=dynamic)
        self.compilations = 0

    def run(
        self, call: Call, needs: Collection[str] = (), gradients: Mapping[str, Tensor | None] | None = None
    ) -> Result:
        """Run a call of the same arguments through the compiled graph, forward and backward."""
        before = self.counter.frame_count
        found = evaluate(call, needs, gradients, lambda **given: self._function(*(given[n] for n in self.names)))
        # The tracer may start anew within one call, as it does where a float becomes a constant.
        self.compilations += self.counter.frame_count > before
        return found


def checkpointed(call: Call, *, reentrant: bool) -> Callable[..., Any]:
    """The call's op under activation checkpointing."""
    names = tuple(call.tensors)

    def function(**arguments: Any) -> Any:
        def inner(*tensors: Tensor) -> Any:
            return call.op(**dict(zip(names, tensors, strict=True)), **call.options)

        return checkpoint(inner, *(arguments[n] for n in names), use_reentrant=reentrant)

    return function


@contextlib.contextmanager
def recompilation_is_an_error() -> Iterator[None]:
    """Within the block, a guard that fails raises and names itself."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


def captured(call: Call, warmups: int = 3) -> tuple[torch.cuda.CUDAGraph, Sequence[Tensor | None]]:
    """Capture a forward into a CUDA graph: the graph, and the outputs that a replay refills."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            call.op(**call.tensors, **call.options)
    torch.cuda.current_stream().wait_stream(stream)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        outputs = call.op(**call.tensors, **call.options)
    return recorded, outputs
