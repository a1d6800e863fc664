"""What tests of several files take."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

NVCC = """#!/bin/sh
case "$*" in *--version*) echo "Cuda compilation tools, release {release}, V{release}.1"; exit 0;; esac
echo "$$" >> {log}
{first}
while [ $# -gt 1 ]; do [ "$1" = -o ] && echo "cubin of {release}" > "$2"; shift; done
"""


@pytest.fixture(scope="session")
def put_nvcc() -> Callable[..., None]:
    """Puts an nvcc into a toolkit that notes each call in a log and writes a few bytes; ``first`` runs before that."""

    def put(home: Path, log: Path, release: str = "13.0", first: str = "") -> None:
        nvcc = home / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True, exist_ok=True)
        nvcc.write_text(NVCC.format(release=release, log=log, first=first))
        nvcc.chmod(0o755)

    return put


@pytest.fixture(scope="session")
def samples() -> ModuleType:
    """The builders of kernels for tests; imported late, since they import TileLang."""
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        import kernel_samples
    finally:
        sys.path.pop(0)
    return kernel_samples
