"""The kernels of the gated delta rule under racecheck, each way of walking over the chunks, forward and backward."""

from __future__ import annotations

import pytest

from chunkwise_testing.races import NAME, racecheck, sanitizer

CALL = """
import torch, chunkwise
from chunkwise_tilelang.gated_delta_rule import schedules, schedules_backward

{changes}
torch.manual_seed(0)
q, k = (torch.nn.functional.normalize(torch.randn(1, {rows}, 1, 128, device="cuda"), dim=-1) for _ in range(2))
v = torch.randn(1, {rows}, 2, 128, device="cuda")
g = torch.nn.functional.logsigmoid(torch.randn(1, {rows}, 2, device="cuda"))
beta = torch.rand(1, {rows}, 2, device="cuda")
tensors = [x.requires_grad_() for x in (q.bfloat16(), k.bfloat16(), v.bfloat16(), g, beta)]
offsets = {offsets}
cu_seqlens = None if offsets is None else torch.tensor(offsets, device="cuda")
o, final = chunkwise.chunk_gated_delta_rule(
    *tensors, output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens, backend="tilelang"
)
(o.float().sum() + final.sum()).backward()
torch.cuda.synchronize()
"""
LAYOUTS = "schedules.layout = lambda facts: {}; schedules_backward.layout = lambda *facts: {}"
WAYS = {
    "dense": ("", None),
    "ragged": ("", [0, 70, 70, 200]),
    "two groups": (LAYOUTS.format((2, 0, 1), (2, 0)), None),
    "segments": (LAYOUTS.format((1, 2, 2), (1, 2)), None),
    "bands": ("schedules_backward.bands = lambda *facts: (2, 2)", None),  # of 32 chunks and of one
}


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_no_thread_overwrites_what_another_one_reads(way: str) -> None:
    tool = sanitizer()
    if tool is None:
        pytest.skip(f"{NAME} is not there; it comes with CUDA's toolkit")
    changes, offsets = WAYS[way]
    rows = 2100 if way == "bands" else 200
    assert racecheck(CALL.format(changes=changes, offsets=offsets, rows=rows), tool) == []
