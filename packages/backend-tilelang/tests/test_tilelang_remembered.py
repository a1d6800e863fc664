"""Kernels that an earlier process compiled: found without TileLang, and only while nothing they depend on has changed.

Each process is a fresh one, as a user's; the nvcc is a script that writes a few bytes. No GPU looks at them: a launcher
that is called wrongly says so before it asks for one, and shows that it was loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chunkwise_tilelang.toolkit import remembered

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="tilelang is published for Linux")

HERE = Path(__file__).parent
ASK = """
import sys
from chunkwise_tilelang.toolkit import compile
try:
    compile.function({builder!r}, "sm_90a", width={width})(1)
except (RuntimeError, TypeError) as error:
    print("loaded:", error)
print("tilelang imported:", "tilelang" in sys.modules)
"""
LOADED = "loaded: add_kernel: num_args should be 3"


class Machine:
    """A cache, a toolkit whose nvcc is a script, and a module with a builder."""

    def __init__(self, folder: Path, put_nvcc: Callable[..., None]) -> None:
        self.log, self.cache, self.modules = folder / "log", folder / "cache", folder / "modules"
        put_nvcc(folder / "toolkit", self.log)
        self.modules.mkdir()
        (self.modules / "mine.py").write_text("from kernel_samples import add\n")
        self.environment = {
            **os.environ,
            "CUDA_HOME": str(folder / "toolkit"),
            "TILELANG_CACHE_DIR": str(self.cache),
            "TILELANG_DISABLE_CACHE": "0",
            "PYTHONPATH": os.pathsep.join((str(HERE), str(self.modules), os.environ.get("PYTHONPATH", ""))),
        }

    def run(self, script: str = "", **added: str) -> str:
        script = script or ASK.format(builder="mine:add", width=64)
        command = [sys.executable, "-c", script]
        ran = subprocess.run(
            command, capture_output=True, text=True, env={**self.environment, **added}, check=False, timeout=240
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    @property
    def compilations(self) -> int:
        return len(self.log.read_text().split()) if self.log.exists() else 0

    def notes(self) -> list[Path]:
        return sorted((self.cache / "chunkwise-notes").glob("*"))


@pytest.fixture
def machine(tmp_path: Path, put_nvcc: Callable[..., None]) -> Machine:
    return Machine(tmp_path, put_nvcc)


def imported(said: str) -> list[bool]:
    """Whether TileLang was imported when each kernel asked for had been loaded."""
    lines = said.splitlines()
    found = [line.endswith("True") for line in lines if line.startswith("tilelang imported: ")]
    assert sum(line.startswith(LOADED) for line in lines) == len(found)
    return found


@pytest.mark.compiler
def test_found_without_tilelang(machine: Machine) -> None:
    assert imported(machine.run()) == [True]
    assert (machine.compilations, len(machine.notes())) == (1, 1)
    another = ASK.format(builder="mine:add", width=128)
    assert imported(machine.run(ASK.format(builder="mine:add", width=64) + another)) == [False, True]
    assert (machine.compilations, len(machine.notes())) == (2, 2)
    assert imported(machine.run(TILELANG_DISABLE_CACHE="1")) == [True]


@pytest.mark.compiler
def test_what_has_changed_is_not_found(machine: Machine) -> None:
    machine.run()
    (note,) = machine.notes()
    library = machine.cache / json.loads(note.read_text())["library"]
    damaged = library.read_bytes()[:-1] + b"!"
    library.write_bytes(damaged)
    assert imported(machine.run()) == [True]
    assert library.read_bytes() != damaged  # TileLang saw it too

    module = machine.modules / "mine.py"
    module.write_text(module.read_text() + "# another source\n")
    assert imported(machine.run()) == [True]
    assert len(machine.notes()) == 2
    assert imported(machine.run()) == [False]


def test_a_note_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "0")
    library = tmp_path / "entry" / "executable.so"
    library.parent.mkdir()
    library.write_bytes(b"\x7fELF")
    monkeypatch.setattr(remembered, "_runtime_is_there", lambda: True)
    monkeypatch.setattr(remembered, "_load", lambda path: path)
    remembered.keep("name", library)
    note = tmp_path / "chunkwise-notes" / "name.json"
    assert remembered.find("name") == library
    text = note.read_text()
    for broken in ("", text[:-4], "[]", "{}", text.replace("entry", "gone")):
        note.write_text(broken)
        assert remembered.find("name") is None
    note.write_text(text)
    assert [path.name for path in note.parent.iterdir()] == ["name.json"]
    monkeypatch.setattr(remembered, "_runtime_is_there", lambda: False)
    assert remembered.find("name") is None
    monkeypatch.setattr(remembered, "_runtime_is_there", lambda: True)
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")
    assert remembered.find("name") is None


def test_a_library_outside_the_cache_is_not_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "0")
    library = tmp_path / "executable.so"
    library.write_bytes(b"\x7fELF")
    remembered.keep("name", library)
    assert not (tmp_path / "cache").exists()


def test_everything_that_a_kernel_depends_on_is_in_the_name() -> None:
    module = "chunkwise_tilelang.tiles.l2norm"
    base: list[object] = [module, "l2_normalise", {"width": 64}, "sm_90a", ("-DX",), {}]
    others: list[object] = [
        "chunkwise_tilelang.tiles.transposed", "l2_normalise_backward", {"width": 128}, "sm_120a", ("-DY",), {"a": 1},
    ]  # fmt: skip
    names = {remembered.name_of(*base)}  # type: ignore[arg-type]
    for place, other in enumerate(others):
        names.add(remembered.name_of(*(other if i == place else part for i, part in enumerate(base))))  # type: ignore[arg-type]
    assert len(names) == len(others) + 1
    assert None not in names
    assert remembered.name_of("no.such.module", "f", {}, "sm_90a", (), {}) is None


def test_a_file_of_the_package_changes_every_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def name() -> str | None:
        remembered._sources.cache_clear()
        return remembered.name_of("chunkwise_tilelang.tiles.l2norm", "l2_normalise", {}, "sm_90a", (), {})

    monkeypatch.setattr(remembered, "_PACKAGE", tmp_path)
    (tmp_path / "tiles.py").write_text("A = 1\n")
    before = name()
    (tmp_path / "tiles.py").write_text("A = 2\n")
    assert name() not in (before, None)
    remembered._sources.cache_clear()


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "0")
    remembered.keep("name", tmp_path / "file")
    assert remembered.find("name") is None
