"""What is built ahead of a call: the call on ``meta`` tensors, in every residual format, with no GPU."""

import dataclasses

import pytest
import torch

from chunkwise.ops import OPS
from chunkwise.verifier.device import FAKE_DEVICES
from chunkwise_testing import sampling
from chunkwise_testing.routes import facts_of, implementations_of
from chunkwise_testing.sampling import PLANS
from chunkwise_testing.suite.base import small_case, widths
from chunkwise_triton.common import call, launch

BUILDS = [(i, f) for i in implementations_of("triton") if i.compile for f in i.residuals]


@pytest.fixture
def built(monkeypatch):
    """The kernels that are asked for: each one's name, and the dtypes of its tensors."""
    found = []

    def note(kernel, arguments, *_):
        found.append((kernel.__name__, tuple(x.dtype for x in arguments if isinstance(x, torch.Tensor))))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(call, "warm", lambda run: run())
    monkeypatch.setattr(launch, "_compile", note)
    monkeypatch.setattr(call, "_WARM", set())
    return found


def kernels_of(built, implementation, kept, plan="bf16"):
    """What is built now for a call with gradients that keeps a format."""
    op = OPS[implementation.op]
    drawn = sampling.draw(op, small_case(op.declaration.name, "build", 64, **widths(64, 64)), PLANS[plan])
    facts = facts_of(drawn, sampling.default_needs(drawn)).on(FAKE_DEVICES["H200"])
    facts = dataclasses.replace(facts, residuals=kept)
    if "chunk_size" in facts.flags:
        facts = facts.with_flag("chunk_size", op.declaration.format(kept).chunk_size)
    built.clear()
    parts = [part for part in ("forward", "backward") if getattr(implementation, part)]
    implementation.function("compile")(implementation.schedule(facts), facts, parts)
    return set(built)


@pytest.mark.parametrize("plan", ["bf16", "fp32"])
@pytest.mark.parametrize(("implementation", "kept"), BUILDS, ids=[f"{i.name}-{f}" for i, f in BUILDS])
def test_every_format_is_built(built, implementation, kept, plan):
    """Forwards, and backwards from what they saved; a second time nothing is built."""
    assert kernels_of(built, implementation, kept, plan)
    assert not kernels_of(built, implementation, kept, plan)


def test_a_full_format_has_kernels_of_its_own(built):
    """GLA keeps its states in fp32 there."""
    (gla,) = (i for i in implementations_of("triton") if i.op == "chunk_gla")
    lean, full = (kernels_of(built, gla, kept) for kept in gla.residuals)
    states = {name for name, dtypes in full - lean if torch.float32 in dtypes}
    assert {"scan_kernel", "output_kernel", "gradient_kernel"} <= states
