"""Runs the parity suite of the Triton backend on Triton's interpreter, which must be chosen before triton is imported.

By default a covering selection of a few minutes: every declared case in fp32 and fp16, ragged offsets, padding,
splitting, gradient subsets, equal bits; gates of every depth and parallel keys in bf16, where what cancels shows first;
fp32 where it loses most.
Arguments go to pytest instead (``-k ...``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from _scaffold import PACKAGES

# Of the ops with many pairs and formats one lean format in fp32, of small chunks where there is a choice.
ATTENTION = "triton.blocked and not torch.blocked and TestAccuracy and fp16 and (more-keys or more-queries)"
ALONE = "not torch.chunkwise and not centred+triton and not robust+triton"
FP32_ALONE = "(triton.robust-dplr-wy16 or triton.centred-dplr-wy32 or triton.split-gla64)"
LEAN = "(triton.split-gdn-wy64 or triton.split-simple-gla64) and not torch.chunkwise"
OF_64 = "(triton.robust-dplr-wy64 or triton.centred-dplr-wy64 or triton.split or triton.fused) and not states64"
BF16 = (
    f"bf16-mixed and {ALONE} and (test_gates and {OF_64} or test_parallel_keys and triton.split and wy64"
    " or TestAccuracy and triton.blocked and not torch.blocked and (more-keys or more-queries))"
)
# Where fp32 loses most: decays at the ends of what tf32 holds, exponents of 75, sums over 256 columns.
WIDE_RANGE = (
    "not torch and not robust+triton and (test_gates and strong and fp32 and triton.centred-dplr-wy64"
    " or test_first_gate and strong and triton.centred-dplr-wy16 or test_widths and sink and fp32 and k256-v16)"
)
COVERING = (
    "(TestAccuracy and triton.split and not torch.chunkwise and not chunk_gla and (fp32 or fp16)"
    f" or TestAccuracy and {FP32_ALONE} and fp32 and {ALONE}"
    f" or {WIDE_RANGE}"
    f" or {LEAN} and ((test_offsets or test_padding_holds_nan) and fp32 or test_public_backward or test_entry_states"
    " or test_absent_gradient or test_final_state_is_fresh or test_token_by_token or test_opcheck)"
    f" or {ATTENTION} or {BF16})"
)


def command(arguments: Sequence[str]) -> list[str]:
    """The pytest command."""
    tests = PACKAGES / "backend-triton" / "tests" / "test_parity_triton.py"
    chosen = list(arguments) or ["-k", COVERING]
    return [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "2",
        "--dist=worksteal",
        "-q",
        "-m",
        "interpreter",
        str(tests),
        *chosen,
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; pytest's exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return subprocess.run(command(arguments), env={**os.environ, "TRITON_INTERPRET": "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
