"""Header stubs: what TileLang's templates want of a CUDA toolkit that is older than they expect.

``include/cuda_fp8.h`` goes before the toolkit's own and declares ``__nv_fp8_e8m0`` where headers of 12.6 and 12.7 lack
it; from 12.8 on it has no effect. Compile every kernel with these flags, whatever the toolkit: which headers a
compiler meets is known to the headers alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

INCLUDE = Path(__file__).resolve().parent.parent / "include"
"""The folder of the stubs."""


def compile_flags(compiler: Literal["nvcc", "nvrtc"]) -> list[str]:
    """The flags that put the stubs before the toolkit's headers.

    A folder that is named by ``-I`` comes before the toolkit's for nvcc and behind it for NVRTC, which takes a header
    ahead of the source instead.
    """
    if compiler == "nvcc":
        return [f"-I{INCLUDE}"]
    return [f"--pre-include={INCLUDE / 'cuda_fp8.h'}"]
