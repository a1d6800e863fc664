"""The tools that check and report: generated docs, wheels, evidence, the parity matrix."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import _scaffold
import gen_docs
import parity_matrix
import pytest
import remeasure
import verify_wheels

TOOLS = ("new_implementation", "new_backend", "gen_docs", "parity_matrix", "verify_wheels", "remeasure")


@pytest.mark.parametrize("tool", TOOLS)
def test_help(tool: str) -> None:
    command = [sys.executable, str(_scaffold.ROOT / "tools" / f"{tool}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(f"usage: {tool}.py")


# --- gen_docs --------------------------------------------------------------------------------------------


def test_docs_of_every_op() -> None:
    from chunkwise.ops import OPS

    text = gen_docs.render()
    for name, op in OPS.items():
        assert f"## `{name}`" in text
        for argument in op.declaration.signature.parameters:
            assert f"| `{argument}` |" in text
        for residual_format in op.declaration.promises.formats:
            assert f"`{residual_format.name}`" in text


def test_docs_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "docs" / "ops.md"
    check = ["--check", "--target", str(target)]
    assert gen_docs.main(check) == 1
    assert not target.exists()
    assert gen_docs.main(["--target", str(target)]) == 0
    assert gen_docs.main(check) == 0
    target.write_text(target.read_text(encoding="utf-8").replace("natural-log", "binary-log"), encoding="utf-8")
    capsys.readouterr()
    assert gen_docs.main(check) == 1
    written = capsys.readouterr()
    assert "binary-log" in written.out
    assert "is stale" in written.err


# --- verify_wheels ---------------------------------------------------------------------------------------

CORE = {
    "chunkwise/__init__.py": '__version__ = "0.3.0"\n',
    "chunkwise/py.typed": "",
    "chunkwise-0.3.0.dist-info/licenses/LICENSE": "MIT",
}
FAKE = {
    "chunkwise_fake/__init__.py": "",
    "chunkwise_fake/py.typed": "",
    "chunkwise_fake-0.1.0.dist-info/licenses/LICENSE": "MIT",
}


def metadata(name: str, version: str, *requires: str) -> dict[str, str]:
    """A METADATA file."""
    lines = [f"Name: {name}", f"Version: {version}", "License-Expression: MIT", "Requires-Python: >=3.10"]
    lines += [f"Requires-Dist: {text}" for text in requires]
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    return {f"{info}/METADATA": "Metadata-Version: 2.4\n" + "\n".join(lines) + "\n"}


class Workshop:
    """A folder of packages and one of wheels."""

    def __init__(self, folder: Path) -> None:
        self.packages, self.wheels = folder / "packages", folder / "dist"
        self.wheels.mkdir()
        self.project("core", "chunkwise", "0.3.0")
        self.project("fake", "chunkwise-fake", "0.1.0")
        self.wheel("core", {**CORE, **metadata("chunkwise", "0.3.0", "torch>=2.10")})
        self.wheel("fake", {**FAKE, **metadata("chunkwise-fake", "0.1.0", "chunkwise>=0.3,<0.4")})

    def project(self, folder: str, name: str, version: str) -> None:
        """Declare a package."""
        (self.packages / folder).mkdir(parents=True, exist_ok=True)
        text = f'[project]\nname = "{name}"\nversion = "{version}"\n'
        (self.packages / folder / "pyproject.toml").write_text(text, encoding="utf-8")

    def wheel(self, stem: str, files: dict[str, str]) -> None:
        """Write a wheel."""
        with zipfile.ZipFile(self.wheels / f"{stem}.whl", "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)

    def problems(self) -> list[str]:
        """What the tool finds."""
        return verify_wheels.problems(self.wheels, self.packages)


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def test_good_wheels(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    assert workshop.problems() == []
    assert verify_wheels.main([str(workshop.wheels), "--packages", str(workshop.packages)]) == 0
    assert "good: core.whl, fake.whl" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"chunkwise/ops.py": ""}, "holds chunkwise/ops.py, which is not of chunkwise_fake"),
        ({"tests/test_fake.py": ""}, "holds tests/test_fake.py"),
        ({"chunkwise_fake/tests/test_fake.py": ""}, "which is not for users"),
        ({"chunkwise_fake/a.pyc": ""}, "which is not for users"),
    ],
)
def test_what_a_wheel_must_not_hold(workshop: Workshop, extra: dict[str, str], problem: str) -> None:
    workshop.wheel("fake", {**FAKE, **metadata("chunkwise-fake", "0.1.0", "chunkwise>=0.3,<0.4"), **extra})
    assert any(problem in found for found in workshop.problems()), workshop.problems()


@pytest.mark.parametrize("missing", list(FAKE))
def test_what_a_wheel_must_hold(workshop: Workshop, missing: str) -> None:
    files = {name: text for name, text in FAKE.items() if name != missing}
    workshop.wheel("fake", {**files, **metadata("chunkwise-fake", "0.1.0", "chunkwise>=0.3,<0.4")})
    assert workshop.problems() == [f"fake.whl lacks {missing}"]


@pytest.mark.parametrize(
    ("requirement", "problem"),
    [
        ("chunkwise>=0.4,<0.5", "but chunkwise is 0.3.0"),
        ("chunkwise>=0.1,<0.2", "but chunkwise is 0.3.0"),
        ("chunkwise>=0.3", "without an upper bound"),
        ("chunkwise @ file:///somewhere/core", "a path is of this machine only"),
    ],
)
def test_ranges_must_fit(workshop: Workshop, requirement: str, problem: str) -> None:
    workshop.wheel("fake", {**FAKE, **metadata("chunkwise-fake", "0.1.0", requirement)})
    assert any(problem in found for found in workshop.problems()), workshop.problems()


def test_versions_must_agree(workshop: Workshop) -> None:
    workshop.project("fake", "chunkwise-fake", "0.2.0")
    assert workshop.problems() == ["fake.whl is version 0.1.0, but pyproject.toml says 0.2.0"]
    workshop.project("fake", "chunkwise-fake", "0.1.0")
    stale = {**CORE, "chunkwise/__init__.py": '__version__ = "0.2.9"\n'}
    workshop.wheel("core", {**stale, **metadata("chunkwise", "0.3.0")})
    assert workshop.problems() == ["core.whl is version 0.3.0, but __version__ is 0.2.9"]


def test_every_package_needs_a_wheel(workshop: Workshop) -> None:
    (workshop.wheels / "fake.whl").unlink()
    assert workshop.problems() == [f"chunkwise-fake has no wheel in {workshop.wheels}"]
    assert verify_wheels.main([str(workshop.wheels), "--packages", str(workshop.packages)]) == 1


# --- parity_matrix ---------------------------------------------------------------------------------------


def cell(device: str = "cpu", **found: Any) -> dict[str, Any]:
    """A cell of a report."""
    place = {"op": "an_op", "case": "dense", "forward": "a/b/c", "backward": "a/b/c", "format": "f@1"}
    return {**place, "device": device, "dtype": "bf16", **found}


def passed(over_budget: float = 0.5, device: str = "cpu") -> dict[str, Any]:
    return cell(device, over_budget=over_budget, quantity="o", reason=None)


def reported(tmp_path: Path, name: str, *cells: dict[str, Any]) -> str:
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    return str(path)


def test_reports_of_two_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = reported(tmp_path, "first", passed(0.25), cell("sm90", reason="needs a GPU"))
    second = reported(tmp_path, "second", passed(0.5, "sm90"))
    assert parity_matrix.main([first, second]) == 0
    out = capsys.readouterr().out
    assert "0.25 (o)" in out
    assert "0.5 (o)" in out
    assert "needs a GPU" not in out


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("winner", "loser"),
    [
        (passed(0.9), passed(0.1)),
        (passed(2.0), passed(0.1)),
        (passed(), cell(reason="needs a GPU")),
        (cell(reason="the test failed"), passed()),
        (cell(reason="refused: K is 20"), cell(reason="not run in this session")),
    ],
)
def test_what_wins(winner: dict[str, Any], loser: dict[str, Any], reverse: bool) -> None:
    reports = [[loser], [winner]] if reverse else [[winner], [loser]]
    assert parity_matrix.merge(reports) == [winner]


def test_failures_are_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "matrix.md"
    path = reported(tmp_path, "bad", passed(1.5))
    assert parity_matrix.main([path, "--output", str(output)]) == 1
    assert "1.5 (o) FAILED" in output.read_text(encoding="utf-8")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"cells": [{"op": "x"}]}'])
def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-8")
    assert parity_matrix.main([str(path)]) == 2
    assert "is no parity report" in capsys.readouterr().err


# --- remeasure -------------------------------------------------------------------------------------------


def row(**changes: Any) -> dict[str, Any]:
    """An evidence row of the CPU, both of whose sides are the built-in implementation."""
    names = ("q", "k", "v", "g", "beta")
    facts = {
        "sizes": {"B": 1, "T": 70, "H": 2, "HV": 4, "K": 16, "V": 24, "N": 1},
        "dtypes": dict.fromkeys(names, "fp32"),
        "flags": {"output_final_state": True, "ragged": False},
        "needs": ["q", "g"],
    }
    built_in = "torch/gated_delta_rule/chunkwise"
    times = {"time_us": 3.0, "against_us": 2.0, "versions": {}, "date": "2020-01-01", "commit": "0"}
    device = {"gpu": "CPU", "capability": "cpu", "sm_count": 0}
    return {
        "name": "a-row",
        "implementation": built_in,
        "against": built_in,
        "facts": facts,
        **times,
        **device,
        **changes,
    }


def stored(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    path = tmp_path / "evidence.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def test_rows_of_other_machines_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = stored(tmp_path, row(gpu="NVIDIA H200", sm_count=132))
    before = path.read_bytes()
    assert remeasure.main([str(path), "--write"]) == 0
    assert "a-row: not measured, this machine has no NVIDIA H200 of 132 SMs" in capsys.readouterr().out
    assert path.read_bytes() == before


@pytest.mark.parametrize("needs", [[], ["q", "initial_state"]])
def test_both_sides_are_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], needs: list[str]) -> None:
    facts = row()["facts"]
    ragged = {
        **facts,
        "sizes": {**facts["sizes"], "N": 3},
        "dtypes": {**facts["dtypes"], "q": "bf16", "initial_state": "fp32", "cu_seqlens": "int32"},
        "offsets": [0, 0, 30, 70],
        "needs": needs,
    }
    path = stored(tmp_path, row(facts=ragged))
    before = path.read_bytes()
    assert remeasure.main([str(path), "--repeats", "2"]) in (0, 1)
    out = capsys.readouterr().out
    assert "us (was 3)" in out
    assert "us (was 2)" in out
    assert path.read_bytes() == before


def test_the_call_is_the_rows(tmp_path: Path) -> None:
    from chunkwise.verifier.evidence import load

    (stored_row,) = load(stored(tmp_path, row())).values()
    call = remeasure.call_of(stored_row, "cpu")
    assert tuple(call.tensors["v"].shape) == (1, 70, 4, 24)
    assert call.options == {"output_final_state": True}
    assert set(call.tensors) == {"q", "k", "v", "g", "beta"}


@pytest.mark.parametrize(("times", "code", "claim"), [((9.0, 5.0), 0, "still slower"), ((4.0, 5.0), 1, "NO LONGER")])
def test_claims(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    times: tuple[float, float],
    code: int,
    claim: str,
) -> None:
    monkeypatch.setattr(remeasure, "interleaved_us", lambda sides, device, repeats: list(times))
    path = stored(tmp_path, row())
    assert remeasure.main([str(path), "--write"]) == code
    assert claim in capsys.readouterr().out
    (written,) = json.loads(path.read_text(encoding="utf-8"))
    assert (written["time_us"], written["against_us"]) == times
    assert written["date"] != "2020-01-01"
    assert written["versions"]["torch"]


def test_without_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert remeasure.main(["--packages", str(tmp_path)]) == 0
    assert "nothing to measure" in capsys.readouterr().out
