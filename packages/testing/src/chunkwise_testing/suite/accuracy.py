"""Outputs, final states and every gradient against the fp64 oracle, over the cases that the op declares."""
# ruff: noqa: S101

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from chunkwise.ops import OPS
from chunkwise.protocol.cases import Case
from chunkwise_testing.sampling import variant
from chunkwise_testing.study import Sample
from chunkwise_testing.suite.base import Subject, Suite, mark_of, subjects_of

CELL_PROPERTY = "chunkwise_cell"
DTYPE_PLANS = ("bf16", "bf16-mixed", "fp16", "fp32")


@dataclass(frozen=True)
class Cell:
    """One cell of the parity matrix."""

    subject: Subject
    case: Case
    plan: str

    def __str__(self) -> str:
        return f"{self.subject}-{self.case.name}-{self.plan}"

    def identity(self) -> dict[str, str]:
        """The cell's place in the matrix, in plain strings."""
        pair = self.subject.pair
        return {
            "op": pair.op,
            "case": self.case.name,
            "forward": pair.forward,
            "backward": pair.backward,
            "format": pair.format,
            "device": self.subject.device,
            "dtype": self.plan,
        }

    def sample(self) -> Sample:
        """The sample to measure; state layouts and the outputs in the loss rotate from cell to cell.

        The rotation depends on case and dtypes alone, so that all pairs share the oracle's result.
        """
        promises = OPS[self.subject.op].declaration.promises
        turn = promises.cases.index(self.case) + DTYPE_PLANS.index(self.plan)
        asked = [o.name for o in promises.outputs if o.when is None or self.case.options.get(o.when)]
        losses = (None, *((name,) for name in asked)) if len(asked) > 1 else (None,)
        case = self.case
        if set(asked) & set(promises.states) and turn % 2 and "state_v_first" not in case.options:
            case = variant(case, options={"state_v_first": True})
        return Sample(self.subject.op, case, self.plan, loss=losses[turn % len(losses)])


def cells_of(backend: str, ops: tuple[str, ...] | None = None) -> list[Cell]:
    """Every cell that a backend answers for: its pairs and devices, the op's cases, the dtypes."""
    return [
        Cell(subject, case, plan)
        for subject in subjects_of(backend, ops)
        for case in OPS[subject.op].declaration.promises.cases
        for plan in DTYPE_PLANS
    ]


class Accuracy(Suite):
    """Every declared case in every dtype, for each pair and residual format."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise over cells."""
        if "cell" in metafunc.fixturenames:
            cells = sorted(cells_of(self.backend, self.ops), key=str)
            metafunc.parametrize("cell", [pytest.param(c, id=str(c), marks=mark_of(c.subject.device)) for c in cells])

    @pytest.fixture
    def entry(self, cell: Cell, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
        """The cell's row in the parity report; it stays a failure until the test fills it."""
        row: dict[str, Any] = {**cell.identity(), "reason": "the test failed"}
        yield row
        request.node.user_properties.append((CELL_PROPERTY, row))

    def test_within_budget(self, cell: Cell, entry: dict[str, Any]) -> None:
        """Within budget, or refused with a reason."""
        study = cell.sample().study()
        call, _ = study.on(cell.subject.torch_device)
        if refusals := cell.subject.refusals(call, study.needs):
            entry["reason"] = f"refused: {refusals[0]}"
            return
        measures = study.measures(cell.subject.run_study(study))
        worst = max(measures, key=lambda m: m.over_budget)
        entry.update(
            over_budget=worst.over_budget,
            quantity=worst.name,
            relative_l2=max(m.relative_l2 for m in measures),
            reason=None,
        )
        assert worst.ok, "over budget:\n  " + "\n  ".join(str(m) for m in measures if not m.ok)
