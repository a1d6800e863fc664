"""bf16 under Triton's interpreter: refused with the reason where its products are wrong, run where they are right."""

import os
import subprocess
import sys

import pytest

from chunkwise.verifier.device import FAKE_DEVICES, INTERPRETER
from chunkwise.verifier.facts import Facts
from chunkwise_triton.common.rules import NO_INTERPRETED_BF16

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="triton is published for Linux")

WITH_RULE = """
import torch
from chunkwise.verifier.device import INTERPRETER
from chunkwise.verifier.facts import Facts
from chunkwise_triton.common.rules import NO_INTERPRETED_BF16
call = Facts("chunk_gla", INTERPRETER, {}, dict.fromkeys("qkv", "bf16"))
"""
CALL = """
import torch
import chunkwise
q, k, v = (torch.randn(1, 20, 1, 16).bfloat16() for _ in range(3))
run = lambda: chunkwise.chunk_simple_gla(q, k, v, -torch.rand(1, 20, 1), backend="triton")[0]
"""


def interpret(script: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_shipped_interpreter_is_refused() -> None:
    """And stays so, since it is measured once."""
    interpret(
        f"{WITH_RULE}\n"
        "assert not NO_INTERPRETED_BF16.holds(call)\n"
        "from chunkwise_testing.interpreter import mend\n"
        "assert mend()\n"
        "assert not NO_INTERPRETED_BF16.holds(call)\n"
    )


def test_mended_interpreter_is_accepted() -> None:
    """Also where the question first comes under fake tensors; what the rule's counterexample is made for is not."""
    interpret(
        f"{WITH_RULE}\n"
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "from chunkwise_testing.interpreter import mend\n"
        "assert mend()\n"
        "with FakeTensorMode(), torch.device('meta'):\n"
        "    assert NO_INTERPRETED_BF16.holds(call)\n"
        "assert not NO_INTERPRETED_BF16.holds(NO_INTERPRETED_BF16.violate(call))\n"
    )


def test_a_call_says_why_it_is_refused() -> None:
    interpret(
        f"{CALL}\n"
        "try:\n"
        "    run()\n"
        "except Exception as error:\n"
        "    assert 'computes products of bf16 wrongly' in str(error), error\n"
        "    assert 'use fp16 or fp32 under TRITON_INTERPRET=1' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('ran')\n"
    )


def test_a_call_runs_on_a_mended_interpreter() -> None:
    interpret(
        f"{CALL}\n"
        "from chunkwise_testing.interpreter import mend\n"
        "assert mend()\n"
        "out = run()\n"
        "assert out.dtype == torch.bfloat16 and out.abs().max() > 0 and out.isfinite().all()\n"
    )


def test_described_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is interpreted, a described interpreter is taken as Triton ships it; GPUs are not measured."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    call = Facts("chunk_gla", INTERPRETER, {}, dict.fromkeys("qkv", "bf16"))
    assert not NO_INTERPRETED_BF16.holds(call)
    assert NO_INTERPRETED_BF16.holds(call.on(FAKE_DEVICES["H200"]))
    assert NO_INTERPRETED_BF16.holds(NO_INTERPRETED_BF16.satisfy(call))
