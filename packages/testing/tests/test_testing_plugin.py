"""The plugin: one line makes the suite, GPU tests are deselected and counted, the report has every cell."""

import contextlib
import json
import subprocess
import sys

import pytest
import torch

from chunkwise.ops import OPS
from chunkwise_testing import plugin, turns
from chunkwise_testing.routes import pairs_of
from chunkwise_testing.study import Sample, Study
from chunkwise_testing.suite.base import Subject, small_case
from chunkwise_testing.suite.gradients import Gradients
from chunkwise_testing.suite.shapes import Shapes

pytest_plugins = "pytester"

OP = "chunk_gated_delta_rule"
ONE_LINE = 'chunkwise_backend = "torch"\n'


@pytest.fixture
def one_line(pytester):
    pytester.makepyfile(test_parity=ONE_LINE)
    return pytester


OPTIONS = ("-p", "no:cacheprovider", "--import-mode=importlib", "-q")


@pytest.fixture(scope="module", autouse=True)
def everything_is_imported():
    """Pytester forgets modules that are first imported inside it, and torch does not bear a second import of some."""
    Subject(pairs_of(OP, "torch")[0], "cpu").check_sample(Sample(OP, small_case(OP, "plugin", 5)))


def run(pytester, *arguments):
    return pytester.runpytest_inprocess(*OPTIONS, *arguments)


def run_apart(pytester, *arguments):
    return pytester.runpytest_subprocess(*OPTIONS, *arguments)


def collect(pytester, *arguments):
    return run(pytester, "--collect-only", *arguments).stdout.str()


def test_one_line_collects_the_suite(one_line):
    text = collect(one_line)
    for name in ("TestAccuracy", "TestBackendTable", "TestGradients", "TestGraphs", "TestMemory", "TestModelOptions"):
        assert f"::{name}::" in text
    for name in ("TestRagged", "TestShapes", "TestStates"):
        assert f"::{name}::" in text
    ids = [line.rstrip("]") for line in text.splitlines() if "::TestAccuracy::" in line]
    assert ids == sorted(ids)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a machine with a GPU nothing is deselected")
@pytest.mark.parametrize(
    ("suite", "op", "idle"),
    [
        (Shapes, "chunk_delta_rule", ["test_first_gate_without_state", "test_gates"]),
        (Shapes, "chunk_gla", []),
        (Gradients, "sink_attention", ["test_state_carried_across_steps"]),
        (Gradients, "chunk_gla", []),
    ],
)
def test_tests_that_concern_no_op_of_a_backend_are_left_out(suite, op, idle):
    assert type("One", (suite,), {"backend": "torch", "ops": (op,)}).idle() == idle


def test_gpu_tests_are_deselected_and_counted(one_line):
    result = run(one_line, "-k", "test_within_budget and one-token", "--parity-report=matrix")
    text = result.stdout.str()
    assert result.ret == 0
    assert "needs a GPU" in text
    assert "skipped" not in text
    cells = json.loads((one_line.path / "matrix.json").read_text())["cells"]
    reasons = {cell["device"]: cell.get("reason") for cell in cells if cell["case"] == "one-token"}
    assert reasons == {"cpu": None, "cuda": "needs a GPU"}
    assert all(cell["over_budget"] <= 1.0 for cell in cells if cell["case"] == "one-token" and cell["device"] == "cpu")


def test_tests_that_compile_are_deselected_and_counted(pytester, monkeypatch):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.compiler
        def test_builds():
            pass

        def test_builds_nothing():
            pass
        """
    )
    monkeypatch.setenv("PATH", str(pytester.path))
    compiler = pytester.path / "c++"
    compiler.touch(mode=0o755)
    run(pytester).assert_outcomes(passed=2)
    compiler.unlink()
    result = run(pytester)
    result.assert_outcomes(passed=1, deselected=1)
    result.stdout.fnmatch_lines(["*chunkwise: 1 tests deselected: needs a C++ compiler"])


def test_backend_option_chooses(one_line):
    text = collect(one_line, "--backend=triton")
    assert "::Test" not in text


def test_backend_without_implementation_has_tests_and_rows(pytester):
    pytester.makepyfile(test_parity='chunkwise_backend = "nowhere"\n')
    result = run(pytester)
    assert result.ret == 1
    assert "no backend nowhere is installed" in result.stdout.str()


def test_failing_cell_is_in_the_report(pytester, monkeypatch):
    def broken(self, result):
        raise AssertionError("broken")

    monkeypatch.setattr(Study, "measures", broken)
    pytester.makepyfile(test_parity=ONE_LINE)
    result = run(pytester, "-k", "test_within_budget and one-token and wy64 and fp32", "--parity-report=matrix")
    assert result.ret == 1
    assert "the test failed" in (pytester.path / "matrix.md").read_text()


def test_workers_report_to_the_controller(one_line):
    pytest.importorskip("xdist")
    chosen = "test_within_budget and one-token and wy64"
    result = run_apart(one_line, "-n2", "-k", chosen, "--parity-report=matrix", "--compile-first")
    assert result.ret == 0
    cells = json.loads((one_line.path / "matrix.json").read_text())["cells"]
    measured = [c for c in cells if c.get("over_budget") is not None]
    formats = [f.name for op in OPS.values() for f in op.declaration.promises.formats if "wy64" in f.name]
    assert len(measured) == 4 * len(formats) * (1 + torch.cuda.is_available())
    assert torch.cuda.is_available() or "needs a GPU" in result.stdout.str()


def test_plugin_does_not_import_torch():
    code = "import sys, chunkwise_testing.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_parity_command_prints_the_matrix(capsys, monkeypatch, tmp_path):
    from chunkwise_testing import commands

    with pytest.raises(SystemExit):
        commands.parity(["--backend", "nothing"])
    assert "known backends" in capsys.readouterr().err
    code = "import sys; from chunkwise_testing.commands import parity; sys.exit(parity(['--backend', 'tilelang']))"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no implementation" in done.stdout


def test_tests_on_a_gpu_take_turns(pytester, monkeypatch):
    """A turn holds fixtures and the test; one that is marked ``alone`` gets it for itself."""
    monkeypatch.setattr(plugin, "_has_gpu", lambda: True)
    seen = []

    @contextlib.contextmanager
    def turn(alone):
        seen.append("alone" if alone else "beside")
        yield
        seen.append("over")

    monkeypatch.setattr(turns, "turn", turn)
    monkeypatch.setattr(turns, "seen", seen, raising=False)
    pytester.makepyfile("""
        import pytest
        from chunkwise_testing.turns import seen

        @pytest.fixture
        def room():
            yield seen.append("room")
            seen.append("given back")

        @pytest.mark.gpu
        def test_small(room):
            seen.append("small")

        @pytest.mark.gpu
        @pytest.mark.alone
        def test_large():
            seen.append("large")

        def test_elsewhere():
            seen.append("elsewhere")
    """)
    run(pytester).assert_outcomes(passed=3)
    small = ["beside", "room", "small", "given back", "over"]
    assert seen == [*small, "alone", "large", "over", "elsewhere"]
