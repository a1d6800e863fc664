"""Commands that this package adds to ``chunkwise``: ``parity`` and ``bench``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path


def parity(argv: Sequence[str]) -> int:
    """``chunkwise parity [--backend NAME] [--all] [--report FILE]``: measure, and print the parity matrix.

    Runs the accuracy cells of each backend, or with ``--all`` the whole suite; 0 where all pass.
    """
    parser = argparse.ArgumentParser(prog="chunkwise parity", description="measure every implementation's accuracy")
    parser.add_argument("--backend", action="append", help="this backend only (default: every installed one)")
    parser.add_argument("--all", action="store_true", help="the whole suite, not the accuracy cells alone")
    parser.add_argument("--report", type=Path, help="also write the matrix to FILE.json and FILE.md")
    parser.add_argument("--compile-first", action="store_true", help="build all kernels before the first test")
    arguments = parser.parse_args(list(argv))

    from chunkwise.dispatcher.registry import registry

    known = registry().backend_names
    backends = arguments.backend or known
    if unknown := sorted(set(backends) - set(known)):
        parser.error(f"unknown backend {', '.join(unknown)}; known backends: {', '.join(known)}")
    with tempfile.TemporaryDirectory() as folder:
        report = (arguments.report or Path(folder) / "parity").absolute()
        status = _run(Path(folder), backends, report, whole=arguments.all, compile_first=arguments.compile_first)
        table = report.with_suffix(".md")
        sys.stdout.write(table.read_text(encoding="utf-8") if table.exists() else "no cell was measured\n")
    return status


def _run(folder: Path, backends: Sequence[str], report: Path, *, whole: bool, compile_first: bool) -> int:
    """Run pytest on one-line test files, one for each backend."""
    import pytest

    for name in backends:
        (folder / f"test_parity_{name}.py").write_text(f'chunkwise_backend = "{name}"\n', encoding="utf-8")
    options = ["-q", "--import-mode=importlib", f"--rootdir={folder}", "-p", "no:cacheprovider"]
    options += [f"--parity-report={report}", *(["--compile-first"] if compile_first else [])]
    options += [] if whole else ["-k", "TestAccuracy or test_ops_without_implementation"]
    return int(pytest.main([*options, str(folder)], plugins=_plugins()))


def _plugins() -> list[str]:
    """The plugin by name, where its entry point is not installed."""
    from importlib.metadata import entry_points

    installed = any(e.value == "chunkwise_testing.plugin" for e in entry_points(group="pytest11"))
    return [] if installed else ["chunkwise_testing.plugin"]


def bench(argv: Sequence[str]) -> int:
    """``chunkwise bench OP [options]``: score an op; ``chunkwise bench host [PART ...]``: what core costs the host."""
    import importlib

    host = list(argv[:1]) == ["host"]
    module = importlib.import_module("chunkwise_testing.bench" if host else "chunkwise_testing.scorer.cli")
    status: int = module.main(list(argv[1:] if host else argv))
    return status
