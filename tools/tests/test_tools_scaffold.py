"""What the scaffolding tools write: it loads, it is right, it passes the linter's eye, and nothing is overwritten."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import _scaffold
import new_backend
import new_implementation
import pytest

OP = "chunk_gated_delta_rule"

FORCED_CALL = """
import sys, torch, chunkwise
from chunkwise.dispatcher.registry import registry
name = sys.argv[1]
backend = name.split("/")[0]
assert not registry().failures, registry().failures
assert [i.name for i in registry().loaded[backend].implementations] == [name]
g = torch.Generator().manual_seed(0)
draw = lambda *shape: torch.randn(shape, generator=g)
k = torch.nn.functional.normalize(draw(1, 70, 2, 16), dim=-1)
tensors = [draw(1, 70, 2, 16), k, draw(1, 70, 4, 24), -draw(1, 70, 4).abs(), draw(1, 70, 4).sigmoid()]
op = chunkwise.chunk_gated_delta_rule
assert chunkwise.explain(op, *tensors).implementations[0].startswith("torch/"), "taken unasked"
def run(which):
    leaves = [t.clone().requires_grad_() for t in tensors]
    o, _ = op(*leaves, backend=which)
    return [o, *torch.autograd.grad(o.square().sum(), leaves)]
assert name in str(chunkwise.explain(op, *tensors, backend=name).route)
for a, b in zip(run(name), run("torch"), strict=True):
    assert torch.equal(a, b)
o, _ = op.reference(*tensors)
assert torch.allclose(run(name)[0], o, rtol=1e-3, atol=1e-4)
if len(sys.argv) > 2:
    import pytest
    sys.exit(pytest.main(sys.argv[2:]))
"""


def copied(tmp_path: Path, backend: str) -> Path:
    """A folder of packages that holds a copy of one backend as it was before any implementation."""
    packages = tmp_path / "packages"
    source = _scaffold.PACKAGES / f"backend-{backend}"
    shutil.copytree(source, packages / source.name, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    package = packages / source.name / "src" / f"chunkwise_{backend}"
    shutil.rmtree(package / "gated_delta_rule", ignore_errors=True)
    text = (package / "backend.py").read_text(encoding="utf-8")
    found = _scaffold._TABLES.search(text)
    assert found is not None
    text = text[: found.start("value")] + "()" + text[found.end("value") :]
    (package / "backend.py").write_text(text, encoding="utf-8")
    return packages


def python(script: str, *argv: str, path: Path, interpret: bool = False) -> None:
    """Run a script in a fresh process that finds packages below ``path`` first."""
    environment = {**os.environ, "PYTHONPATH": str(path), "TRITON_INTERPRET": "1" if interpret else "0"}
    for variable in ("CHUNKWISE_BACKEND", "CHUNKWISE_CHECK", "CHUNKWISE_LOG", "PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        environment.pop(variable, None)
    done = subprocess.run(
        [sys.executable, "-c", script, *argv], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def add_metadata(source: Path, name: str) -> None:
    """What an installer would write beside the package, so that its entry point is found."""
    info = source / f"chunkwise_{name}-0.1.0.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.4\nName: chunkwise-{name}\nVersion: 0.1.0\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    entry = f"[chunkwise.backends]\n{name} = chunkwise_{name}.backend:BACKEND\n"
    (info / "entry_points.txt").write_text(entry, encoding="utf-8")


def test_implementation_in_the_triton_backend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("numpy")
    packages = copied(tmp_path, "triton")
    assert new_implementation.main(["triton", OP, "trial", "--packages", str(packages)]) == 0
    assert "Now:" in capsys.readouterr().out
    source = packages / "backend-triton" / "src"
    folder = source / "chunkwise_triton" / "gated_delta_rule"
    written = {path.name for path in folder.iterdir()}
    assert written == {"__init__.py", "implementations.py", "schedules.py", "launch.py", "evidence.json", "NOTES.md"}
    assert "A starting point, not a kernel" in (folder / "launch.py").read_text(encoding="utf-8")
    python(FORCED_CALL, "triton/gated_delta_rule/trial", path=source, interpret=True)


def test_implementation_in_a_new_backend(tmp_path: Path) -> None:
    assert new_backend.main(["trial", "--packages", str(tmp_path)]) == 0
    package = tmp_path / "backend-trial"
    source = package / "src"
    add_metadata(source, "trial")
    assert new_implementation.main(["trial", OP, "plain", "--packages", str(tmp_path)]) == 0
    suite = [str(package / "tests" / "test_parity_trial.py"), "-p", "no:cacheprovider", "-q", "-k", "BackendTable"]
    python(FORCED_CALL, "trial/gated_delta_rule/plain", *suite, path=source)


def test_new_backend_is_a_whole_package(tmp_path: Path) -> None:
    package = new_backend.scaffold(tmp_path, "trial")
    files = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    assert files == {
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "src/chunkwise_trial/__init__.py",
        "src/chunkwise_trial/backend.py",
        "src/chunkwise_trial/py.typed",
        "tests/test_parity_trial.py",
    }
    assert (package / "LICENSE").read_bytes() == (_scaffold.ROOT / "LICENSE").read_bytes()
    assert len((package / "tests" / "test_parity_trial.py").read_text(encoding="utf-8").splitlines()) == 1
    project = (package / "pyproject.toml").read_text(encoding="utf-8")
    assert f'dependencies = ["chunkwise{new_backend.core_range()}"]' in project
    assert 'trial = "chunkwise_trial.backend:BACKEND"' in project


@pytest.mark.parametrize("backend", ["triton", "tilelang"])
def test_table_is_entered_once_and_the_rest_is_kept(tmp_path: Path, backend: str) -> None:
    packages = copied(tmp_path, backend)
    file = packages / f"backend-{backend}" / "src" / f"chunkwise_{backend}" / "backend.py"
    before = file.read_text(encoding="utf-8")
    plan = new_implementation.scaffold(packages, backend, OP, "trial")
    assert _scaffold.tables_of(file) == [plan.table]
    assert file.read_text(encoding="utf-8").replace(f'("{plan.table}",)', "()") == before


def test_tables_grow_in_order_and_within_the_line(tmp_path: Path) -> None:
    file = tmp_path / "backend.py"
    file.write_text("BACKEND = Backend(\n    tables=(),\n    needs=(),\n)\n", encoding="utf-8")
    tables = [f"chunkwise_trial.some_long_operation_{i}.implementations:IMPLEMENTATIONS" for i in range(3)]
    for table in tables:
        _scaffold.add_table(file, table)
    text = file.read_text(encoding="utf-8")
    assert _scaffold.tables_of(file) == tables
    assert max(map(len, text.splitlines())) <= 120
    assert text.endswith("    needs=(),\n)\n")
    ast.parse(text)
    with pytest.raises(_scaffold.ScaffoldError, match="already"):
        _scaffold.add_table(file, tables[0])


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packages = copied(tmp_path, "triton")
    new_implementation.scaffold(packages, "triton", OP, "trial")
    folder = packages / "backend-triton" / "src" / "chunkwise_triton" / "gated_delta_rule"
    (folder / "launch.py").write_text("mine\n", encoding="utf-8")
    for variant in ("trial", "other"):
        assert new_implementation.main(["triton", OP, variant, "--packages", str(packages)]) == 2
        assert "is there already" in capsys.readouterr().err
    assert (folder / "launch.py").read_text(encoding="utf-8") == "mine\n"
    assert new_backend.main(["triton", "--packages", str(packages)]) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["triton", "tilelang", "trial"])
def test_what_is_written_fits_the_line(backend: str) -> None:
    files = new_implementation.files_of(new_implementation.plan_for(backend, OP, "split"))
    for name, text in files.items():
        assert max(map(len, text.splitlines())) <= 120, name
        if name.endswith(".py"):
            ast.parse(text)


def test_half_written_files_are_never_left(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("mine\n", encoding="utf-8")
    with pytest.raises(_scaffold.ScaffoldError, match=r"b\.py"):
        _scaffold.write_new(tmp_path, {"a.py": "new\n", "b.py": "new\n"})
    assert not (tmp_path / "a.py").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["tritn", OP, "split"], "no backend 'tritn'"),
        (["triton", "chunk_gdn", "split"], "no op is called 'chunk_gdn'"),
        (["triton", OP, "Split"], "variant 'Split' cannot be used"),
        (["triton", OP, "a-b"], "variant 'a-b' cannot be used"),
        (["triton", OP, "class"], "variant 'class' cannot be used"),
    ],
)
def test_wrong_names(tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    packages = copied(tmp_path, "triton")
    assert new_implementation.main([*argv, "--packages", str(packages)]) == 2
    assert message in capsys.readouterr().err


def test_wrong_backend_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert new_backend.main(["My-Backend", "--packages", str(tmp_path)]) == 2
    assert "'My-Backend' cannot be used" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
