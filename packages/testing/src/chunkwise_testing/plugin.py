"""The pytest plugin: a test file that says ``chunkwise_backend = "torch"`` stands for the whole suite.

Options: ``--backend NAME`` (generate the suite for these backends only), ``--parity-report FILE`` (write the parity
matrix as FILE.json and FILE.md), ``--compile-first`` (build the kernels of all collected cells before the first test).

Under ``TRITON_INTERPRET=1`` a file that asks for the suite has Triton's interpreter mended for bf16, in its process,
and fp32 rounded as on a GPU.

Tests that need a GPU carry the marker ``gpu``; without one they are deselected and counted at the end, never skipped.
Those that need most of its memory also carry ``alone``: while one runs, tests of other processes wait. Tests that build
a kernel's host code carry ``compiler``, and are counted likewise where there is no C++ compiler.
Nothing here imports torch before a test file asks for the suite.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("chunkwise_testing.suite")
# Read when torch loads. Test workers share the cores: threads that spin while they wait take them from the others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

VARIABLE = "chunkwise_backend"
CELL_PROPERTY = "chunkwise_cell"
NEEDS = {
    "gpu": "needs a GPU",
    "compiler": "needs a C++ compiler",
    "interpreter": "needs TRITON_INTERPRET=1",
    "cpu": "does not run under TRITON_INTERPRET=1",
}
_CELLS = pytest.StashKey[list[dict[str, Any]]]()
_LEFT_OUT = pytest.StashKey[Counter[str]]()
_OUTPUT = "chunkwise_left_out"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("chunkwise", "parity suites of chunkwise backends")
    group.addoption("--backend", action="append", metavar="NAME", help="generate the suite for this backend only")
    group.addoption("--parity-report", type=Path, metavar="FILE", help="write the parity matrix to FILE.json, FILE.md")
    group.addoption("--compile-first", action="store_true", help="build all kernels before the first test")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and prepare the report."""
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU; deselected on a machine without one")
    config.addinivalue_line("markers", "alone: needs most of a GPU's memory; tests of other processes wait meanwhile")
    config.addinivalue_line("markers", "compiler: builds host code; deselected on a machine without a C++ compiler")
    config.addinivalue_line("markers", "interpreter: needs TRITON_INTERPRET=1; deselected without it")
    config.stash[_CELLS] = []
    config.stash[_LEFT_OUT] = Counter()
    config.pluginmanager.register(_Gatherer(config.stash[_CELLS]), "chunkwise-gatherer")


def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> list[pytest.Collector] | None:
    """Put the suite's classes in the place of ``chunkwise_backend``."""
    if name != VARIABLE or not isinstance(collector, pytest.Module) or not isinstance(obj, str):
        return None
    chosen = collector.config.getoption("--backend")
    if chosen and obj not in chosen:
        return []
    import torch

    from chunkwise_testing.parity import generate

    if hasattr(collector.config, "workerinput"):
        torch.set_num_threads(1)
    if _interpreting():
        _mend_interpreter()
    classes = generate(obj)
    for class_name, cls in classes.items():
        setattr(collector.obj, class_name, cls)
    return [pytest.Class.from_parent(collector, name=class_name) for class_name in sorted(classes)]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what this machine cannot run; its cells go into the report with the reason."""
    kept, left_out = [], []
    for item in items:
        reason = _lacking(item)
        if reason is None:
            kept.append(item)
            continue
        left_out.append(item)
        config.stash[_LEFT_OUT][reason] += 1
        if cell := _cell_of(item):
            config.stash[_CELLS].append({**cell.identity(), "reason": reason})
    if left_out:
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)


def _lacking(item: pytest.Item) -> str | None:
    if item.get_closest_marker("gpu") and not _has_gpu():
        return NEEDS["gpu"]
    if item.get_closest_marker("compiler") and not _has_compiler():
        return NEEDS["compiler"]
    interpreting = _interpreting()
    if item.get_closest_marker("interpreter") and not interpreting:
        return NEEDS["interpreter"]
    if interpreting and _device_of(item) == "cpu":
        return NEEDS["cpu"]
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test on a GPU waits for its turn there, fixtures included."""
    from chunkwise_testing.turns import turn

    if item.get_closest_marker("gpu") and _has_gpu():
        with turn(item.get_closest_marker("alone") is not None):
            return (yield)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Draw the cases of a test as its subject accepts them; a cell's in its own dtypes."""
    from chunkwise_testing.fitting import fitted_to

    cell = _cell_of(item)
    subject = cell.subject if cell is not None else _subject_of(item)
    if subject is None or not getattr(getattr(item, "function", None), "fitted", True):
        yield
        return
    with fitted_to(subject.pair, subject.torch_device, cell=cell is not None):
        yield


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _mend_interpreter() -> None:
    """Let Triton's interpreter, where there is one, compute bf16 as a GPU does, and round fp32 so."""
    if any(importlib.util.find_spec(name) is None for name in ("triton", "numpy")):
        return
    from chunkwise_testing import interpreter

    if not interpreter.mend():
        warnings.warn("Triton's interpreter computes bf16 wrongly, and could not be mended", stacklevel=2)
    interpreter.round_like_a_gpu()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _has_compiler() -> bool:
    return any(map(shutil.which, ("g++", "clang++", "c++")))


def _parameters(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec is not None else {}


def _cell_of(item: pytest.Item) -> Any:
    return _parameters(item).get("cell") if hasattr(_parameters(item).get("cell"), "identity") else None


def _device_of(item: pytest.Item) -> str | None:
    cell = _cell_of(item)
    return getattr(cell.subject if cell is not None else _subject_of(item), "device", None)


def _subject_of(item: pytest.Item) -> Any:
    return next((given for given in _parameters(item).values() if hasattr(given, "pair")), None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """``--compile-first``: each worker builds its share of the kernels."""
    if not session.config.getoption("--compile-first"):
        return
    cells = [cell for item in session.items if (cell := _cell_of(item)) is not None]
    if not cells:
        return
    from chunkwise_testing.launchability import compile_all
    from chunkwise_testing.routes import facts_of

    work = []
    for cell in _share(session.config, cells):
        study = cell.sample().study()
        call, _ = study.on(cell.subject.torch_device)
        work.append((cell.subject.pair, facts_of(call, study.needs)))
    compile_all(work)


def _share(config: pytest.Config, cells: list[Any]) -> list[Any]:
    given = getattr(config, "workerinput", None)
    if given is None:
        return cells
    return cells[int(given["workerid"].removeprefix("gw")) :: int(given["workercount"])]


class _Gatherer:
    """Gathers the cells of finished tests, those of pytest-xdist's workers included."""

    def __init__(self, cells: list[dict[str, Any]]) -> None:
        self.cells = cells

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the cells at the teardown, when they are filled."""
        if report.when == "teardown":
            self.cells += [value for name, value in report.user_properties if name == CELL_PROPERTY]  # type: ignore[misc]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take over what a worker of pytest-xdist left out; all of them collect the same tests."""
    config: pytest.Config = node.config
    left_out, cells = getattr(node, "workeroutput", {}).get(_OUTPUT, ({}, []))
    counts: Counter[str] = config.stash[_LEFT_OUT]
    gathered: list[dict[str, Any]] = config.stash[_CELLS]
    if not counts:
        counts.update(left_out)
        gathered.extend(cells)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the report, or hand what a worker knows to the controller."""
    config = session.config
    cells: list[dict[str, Any]] = config.stash[_CELLS]
    counts: Counter[str] = config.stash[_LEFT_OUT]
    output = getattr(config, "workeroutput", None)
    if output is not None:
        left_out = [cell for cell in cells if cell.get("reason") in NEEDS.values()]
        output[_OUTPUT] = (dict(counts), left_out)
        return
    path = config.getoption("--parity-report")
    if path is not None:
        from chunkwise_testing import report

        report.write(cells, path)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how many tests were left out, and why."""
    for reason, count in sorted(config.stash[_LEFT_OUT].items()):
        terminalreporter.write_line(f"chunkwise: {count} tests deselected: {reason}")
    path = config.getoption("--parity-report")
    if path is not None:
        terminalreporter.write_line(f"chunkwise: parity matrix in {path.with_suffix('.json')} and .md")
