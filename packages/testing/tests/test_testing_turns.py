"""Whose turn it is on a GPU, in processes that are fakes of tests."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from chunkwise_testing.turns import turn

WORKER = """
import sys, time
from pathlib import Path
from chunkwise_testing.turns import turn
folder, name, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
end = time.monotonic() + 60
while time.monotonic() < end and not (folder / "done").exists():
    with turn(kind == "alone", folder):
        mark = folder / f"{kind}-{name}.here"
        mark.touch()
        others = [x.name for x in folder.glob("*.here") if x != mark]
        if kind == "alone" and others or any(x.startswith("alone") for x in others):
            (folder / "broken").write_text(f"{name} beside {others}")
        if others:
            (folder / "beside").touch()
        time.sleep(0.02)
        mark.unlink()
    if kind == "alone":
        (folder / f"{name}.turn").touch()
        break
"""


def test_alone_and_beside_others(tmp_path: Path) -> None:
    """Four that run beside each other all the time; two that want to be alone get their turn nevertheless."""
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path), str(i), "alone" if i > 3 else "beside"])
        for i in range(6)
    ]
    end = time.monotonic() + 60
    while len(list(tmp_path.glob("*.turn"))) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    turns = list(tmp_path.glob("*.turn"))
    (tmp_path / "done").touch()
    assert [worker.wait(60) for worker in workers] == [0] * 6
    assert len(turns) == 2
    assert not (tmp_path / "broken").exists()
    assert (tmp_path / "beside").exists()


def test_other_gpus_have_other_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with turn(True, tmp_path):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
        with turn(True, tmp_path):
            assert len(list(tmp_path.glob("*.lock"))) == 2
