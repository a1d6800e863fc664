"""torch.compile as the first thing that a process does with an op: nothing may be left for the tracer to look up."""

from __future__ import annotations

import subprocess
import sys

# Ops with arguments that core applies in front of them: the tracer follows these into the declaration.
SCRIPT = """
import torch, chunkwise
q, k, v = (torch.randn(2, 70, 3, w) for w in (16, 16, 24))
k = torch.nn.functional.normalize(k, dim=-1)
per_head = torch.tensor([-0.1, -0.2, -0.3], requires_grad=True)
raw = torch.randn(2, 70, 3)

def simple_gla():
    return chunkwise.chunk_simple_gla(q, k, v, g_gamma=per_head)[0]

def gated_delta_rule():
    options = {"use_gate_in_kernel": True, "A_log": per_head, "use_beta_sigmoid_in_kernel": True}
    return chunkwise.chunk_gated_delta_rule(q, k, v, raw, raw, **options)[0]

for call in (simple_gla, gated_delta_rule):
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")()
    (expected,) = torch.autograd.grad(call().square().sum(), per_head)
    (found,) = torch.autograd.grad(compiled.square().sum(), per_head)
    torch.testing.assert_close(found, expected)
"""


def test_the_first_call_is_compiled() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
