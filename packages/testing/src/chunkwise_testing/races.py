"""Races between the threads of a block, told by compute-sanitizer's racecheck: a script, run in a process under it.

It sees what is read and written in shared memory and the barriers between; not what tensor copies do on their own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

NAME = "compute-sanitizer"
_SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")


def sanitizer() -> Path | None:
    """The tool on PATH, or that of the toolkit of CUDA_HOME or in its usual place."""
    homes = [home for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda") if home]
    found = shutil.which(NAME) or shutil.which(NAME, path=os.pathsep.join(str(Path(home, "bin")) for home in homes))
    return Path(found) if found else None


def racecheck(script: str, tool: Path, timeout_s: float = 600.0) -> list[str]:
    """What racecheck says of a Python script: its lines on hazards, none where there are none.

    Raises:
        RuntimeError: the script failed, or the tool did not come to its summary; with the end of what was printed.
    """
    command = [str(tool), "--tool", "racecheck", "--racecheck-report", "analysis", sys.executable, "-c", script]
    ran = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False)
    said = ran.stdout + ran.stderr
    summary = _SUMMARY.search(said)
    if ran.returncode != 0 or summary is None:
        raise RuntimeError(f"{tool} exited with {ran.returncode}: {said[-2000:]}")
    if summary[1] == "0":
        return []
    lines = [line.removeprefix("========= ") for line in said.splitlines()]
    return [line for line in lines if "Race reported" in line or "hazards]" in line]
