"""What tests of several files take."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def samples() -> ModuleType:
    """The builders of kernels for tests; imported late, since they import TileLang."""
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        import kernel_samples
    finally:
        sys.path.pop(0)
    return kernel_samples
