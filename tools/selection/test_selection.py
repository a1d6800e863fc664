"""Run in an environment that holds core, the testing package and a selection of backends, from built wheels."""

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

CHOSEN = {"none": set(), "triton": {"triton"}, "tilelang": {"tilelang"}, "all": {"triton", "tilelang"}}


@pytest.fixture
def chosen(request):
    return CHOSEN[request.config.getoption("--selection")]


def test_exactly_the_chosen_distributions_are_installed(chosen):
    found = {
        d.metadata["Name"] for d in importlib.metadata.distributions() if d.metadata["Name"].startswith("chunkwise")
    }
    assert found == {"chunkwise", "chunkwise-testing", *(f"chunkwise-{name}" for name in chosen)}


def test_they_are_wheels_and_not_links_into_the_tree():
    spec = importlib.util.find_spec("chunkwise")
    assert "site-packages" in Path(spec.origin).parts


def test_every_package_imports(chosen):
    for module in ["chunkwise", "chunkwise_testing", *(f"chunkwise_{name}" for name in sorted(chosen))]:
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True)


def test_doctor_lists_exactly_the_chosen_backends(chosen):
    done = subprocess.run([sys.executable, "-m", "chunkwise.cli", "doctor"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed to load" not in done.stdout
    for name in ("triton", "tilelang"):
        distribution = f"chunkwise-{name}"
        assert (distribution in done.stdout or f"{name} " in done.stdout.split("backends", 1)[-1]) == (name in chosen)


def test_one_parity_case_holds():
    from chunkwise_testing.suite.accuracy import cells_of

    cell = next(c for c in cells_of("torch") if c.case.name == "ragged" and str(c).count("fp32"))
    study = cell.sample().study()
    study.check(cell.subject.run_study(study))
