"""The tools are scripts beside each other, found as they are when one of them is run."""

from __future__ import annotations

import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[1]

if str(TOOLS) not in sys.path:
    sys.path.insert(0, str(TOOLS))
