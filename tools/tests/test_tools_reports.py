"""The tools that check and report: generated docs, wheels, evidence, the parity matrix."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import _scaffold
import evidence_rows
import gen_docs
import parity_matrix
import pytest
import remeasure
import verify_wheels

TOOLS = (
    *("new_implementation", "new_backend", "gen_docs", "parity_matrix", "verify_wheels"),
    *("remeasure", "evidence_rows"),
)


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


# --- evidence_rows ---------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GLA = "triton/gla/centred"


def score_file(path: Path, route: str = GLA, ours: float | None = 2.0, shape: str = "", **environment: str) -> Path:
    """A score of one shape of chunk_gla in both modes, against fla-core and nobody."""
    from chunkwise.ops import OPS
    from chunkwise_testing.scorer.results import Figure, Row, Score

    case = OPS["chunk_gla"].declaration.promises.benchmarks[0]
    sides = (Figure("chunkwise", ours), Figure("fla-core", 3.00004), Figure("nobody", reason="it broke"))
    words = {"forward": f"{route} (forward)", "forward+backward": f"{route}, residuals gla@1"}
    rows = [
        Row(shape or case.name, case.sizes, mode, "events", words[mode], 2, 1, 5, sides)
        for mode in ("forward", "forward+backward")
    ]
    known = {"device": "NVIDIA H200", "arch": "sm90", "sm_count": "132", "date": "2026-01-02T03:04:05+00:00"}
    known |= {"torch": "2.13.0", "triton": "3.7.1", "tilelang": "not installed", "cuda": "13.0", "commit": COMMIT}
    known |= {"peer fla-core": "0.6.0 FLA_TILELANG=1", "peer nobody": "1.0", **environment}
    path.write_text(Score("chunk_gla", "bf16-mixed", known, {}, rows=tuple(rows)).to_json(), encoding="utf-8")
    return path


def test_evidence_of_a_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from chunkwise.verifier.evidence import load

    evidence, score = tmp_path / "evidence.json", score_file(tmp_path / "score.json")
    assert evidence_rows.main([str(evidence), GLA, "fla-core", str(score)]) == 0
    assert "2 rows" in capsys.readouterr().out
    forward, both = load(evidence).values()
    assert forward.name.endswith("-forward-events") and both.name.endswith("-forward+backward-events")
    assert (forward.implementation, forward.against) == (GLA, "fla-core 0.6.0")
    assert (forward.time_us, forward.against_us) == (2000.0, 3000.0)
    assert (forward.gpu, forward.capability, forward.sm_count) == ("NVIDIA H200", "9.0", 132)
    assert (forward.date, forward.commit) == ("2026-01-02", COMMIT[:7])
    wanted = {"torch": "2.13.0", "triton": "3.7.1", "cuda": "13.0", "fla-core": "0.6.0 FLA_TILELANG=1"}
    assert forward.versions == wanted
    assert forward.facts["dtypes"] == {"q": "bf16", "k": "bf16", "v": "bf16", "g": "fp32"}
    assert (forward.facts["needs"], both.facts["needs"]) == ([], ["q", "k", "v", "g"])


def test_rows_of_a_name_are_replaced_and_others_kept(tmp_path: Path) -> None:
    from chunkwise.verifier.evidence import load

    path = stored(tmp_path, row())
    score = str(score_file(tmp_path / "score.json"))
    assert evidence_rows.main([str(path), GLA, "fla-core", score]) == 0
    score_file(tmp_path / "score.json", ours=5.0)
    assert evidence_rows.main([str(path), GLA, "fla-core", score]) == 0
    assert evidence_rows.main([str(path), GLA, "fla-core", score, "--suffix=-again"]) == 0
    rows = load(path)
    assert len(rows) == 5 and rows["a-row"].time_us == 3.0
    assert [r.time_us for name, r in rows.items() if name != "a-row"] == [5000.0] * 4


def test_the_facts_of_evidence_are_those_of_a_new_score() -> None:
    from chunkwise.ops import OPS
    from chunkwise.verifier.evidence import load
    from chunkwise_testing.scorer.results import Row, Score

    files = remeasure.evidence_files(_scaffold.PACKAGES)
    rows = [r for file in files for r in load(file).values() if r.against.startswith(("fla-core ", "flash-qla "))]
    assert rows
    for stored_row in rows:
        shape, mode = re.fullmatch(r"(.*?)-(forward(?:\+backward)?)-.*", stored_row.name).groups()
        op = remeasure._op_of(stored_row.implementation)
        made = Row(shape, stored_row.facts["sizes"], mode, "events", "", 1, 1, 1, ())
        assert op in OPS
        assert evidence_rows.facts_of(Score(op, "bf16-mixed", {}, {}), made) == stored_row.facts, stored_row.name


@pytest.mark.parametrize(
    ("changes", "arguments", "code", "message"),
    [
        ({"commit": f"{COMMIT} dirty"}, [GLA, "fla-core"], 2, "its commit is .* dirty"),
        ({"commit": "no checkout"}, [GLA, "fla-core"], 2, "name the one that was measured with --commit"),
        ({"commit": "no checkout"}, [GLA, "fla-core", "--commit", "abcdef0"], 0, "2 rows"),
        ({"shape": "h1@T64"}, [GLA, "fla-core"], 2, "h1@T64 is no benchmark shape of chunk_gla"),
        ({}, [GLA, "flash-qla"], 2, "no times of flash-qla, only of fla-core, nobody"),
        ({}, [GLA, "nobody"], 1, "left out: .*: one of the sides has no time"),
        ({"ours": None}, [GLA, "fla-core"], 1, "one of the sides has no time"),
        ({"route": "triton/gla/robust"}, [GLA, "fla-core"], 1, "left out: .*: triton/gla/robust ran"),
    ],
)
def test_what_is_no_evidence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    evidence = tmp_path / "evidence.json"
    (implementation, peer, *rest), score = arguments, score_file(tmp_path / "score.json", **changes)
    assert evidence_rows.main([str(evidence), implementation, peer, str(score), *rest]) == code
    printed = capsys.readouterr()
    assert re.search(message, printed.out + printed.err)
    assert evidence.exists() == (code == 0)


def test_two_scores_of_one_row_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = [str(score_file(tmp_path / f"{i}.json")) for i in range(2)]
    assert evidence_rows.main([str(tmp_path / "evidence.json"), GLA, "fla-core", *scores]) == 2
    assert "1.json: another score has a row" in capsys.readouterr().err
