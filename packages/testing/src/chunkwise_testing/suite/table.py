"""The backend and its table: it loads, says what it lacks, every rule and schedule holds, absent ops are explained."""
# ruff: noqa: S101

from __future__ import annotations

from typing import Any, ClassVar

import pytest

import chunkwise
from chunkwise import errors
from chunkwise.dispatcher.registry import LoadedBackend, registry
from chunkwise.ops import OPS
from chunkwise.verifier.implementation import Implementation
from chunkwise_testing import launchability, rules, sampling
from chunkwise_testing.routes import BUILT_IN, implementations_of, pairs_of
from chunkwise_testing.suite.accuracy import CELL_PROPERTY


def loaded(backend: str) -> LoadedBackend:
    """The backend, which must have been loaded."""
    failure = registry().failures.get(backend)
    assert failure is None, str(failure)
    assert backend in registry().loaded, f"no backend {backend} is installed; known: {registry().backend_names}"
    return registry().loaded[backend]


def missing_ops(backend: str) -> list[str]:
    """The ops that a backend has no implementation of."""
    present = {i.op for i in implementations_of(backend)}
    return [op for op in sorted(OPS) if op not in present]


class BackendTable:
    """What holds for every backend, whatever this machine has and whatever it implements."""

    backend: ClassVar[str] = ""

    @classmethod
    def applies(cls) -> bool:
        """Always."""
        return True

    def test_loads(self) -> None:
        """The package is found by its entry point and all of its tables import."""
        found = loaded(self.backend)
        assert found.backend.name == self.backend
        assert found.version

    def test_needs_are_stated(self) -> None:
        """Each need says what was found, and what to do where it is not met."""
        found = loaded(self.backend)
        for need, finding in found.findings:
            assert need.name
            assert finding.found
            assert finding.ok or finding.fix
        assert found.usable == all(finding.ok for _, finding in found.findings)
        assert found.usable or found.lacks()
        assert self.backend != BUILT_IN or found.usable

    def test_explain_names_the_backend(self) -> None:
        """Its version, how many implementations it has of the op, and what it lacks."""
        found = loaded(self.backend)
        for op in OPS:
            call = sampling.draw(OPS[op], OPS[op].declaration.promises.cases[0])
            text = str(chunkwise.explain(OPS[op], **call.tensors, **call.options))
            line = next(line for line in text.splitlines() if line.startswith(f"  {self.backend} {found.version}:"))
            count = sum(1 for i in found.implementations if i.op == op)
            assert f"{count} implementation" in line
            assert line.endswith("; usable") or found.lacks() in line

    def test_unusable_backend_raises_when_forced(self) -> None:
        """A backend that cannot run a call says so; nothing else runs in its place."""
        found = loaded(self.backend)
        for op in OPS:
            case = OPS[op].declaration.promises.cases[0]
            call = sampling.draw(OPS[op], case)
            if found.usable and any("any" in i.archs or "cpu" in i.archs for i in found.implementations if i.op == op):
                assert call.op(**call.tensors, **call.options, backend=self.backend) is not None
                continue
            with pytest.raises(errors.NoImplementationError) as caught:
                call.op(**call.tensors, **call.options, backend=self.backend)
            text = str(caught.value)
            assert f"forced: backend= {self.backend}" in text
            assert found.usable or found.lacks() in text
            for implementation in (i for i in found.implementations if i.op == op):
                assert implementation.name in text

    def test_unknown_names_list_the_known(self) -> None:
        """A name close to the backend's is refused with a list that holds the real one."""
        for op in OPS:
            call = sampling.draw(OPS[op], OPS[op].declaration.promises.cases[0])
            with pytest.raises(errors.UnknownNameError, match=self.backend):
                call.op(**call.tensors, **call.options, backend=f"{self.backend}x")

    def test_rules_refuse_their_counterexamples(self) -> None:
        """Each rule refuses its counterexample alone, accepts its neighbour, and reads what it names."""
        for implementation in implementations_of(self.backend):
            accepted = self._accepted(implementation)
            assert not (problems := rules.counterexample_problems(implementation, accepted)), problems

    def test_schedules_launch_on_every_device(self) -> None:
        """Each verdict over cases, widths, lengths and fake devices: a schedule that fits, or a reason."""
        for implementation in implementations_of(self.backend):
            problems = [
                p for f, v in launchability.verdicts(implementation) if (p := launchability.launch_problem(f, v))
            ]
            assert not problems, f"{implementation.name}: {len(problems)} problems, first: {problems[0]}"

    def test_every_implementation_has_a_partner(self) -> None:
        """Each implementation is in a pair that the suite runs."""
        for implementation in implementations_of(self.backend):
            pairs = pairs_of(implementation.op, self.backend)
            assert any(implementation.name in (pair.forward, pair.backward) for pair in pairs), implementation.name

    def test_ops_without_implementation(self, request: pytest.FixtureRequest) -> None:
        """Each op that the backend lacks is a row of the parity matrix, with the reason."""
        for op in missing_ops(self.backend):
            assert pairs_of(op, self.backend) == []
            for case in OPS[op].declaration.promises.cases:
                row: dict[str, Any] = {
                    "op": op,
                    "case": case.name,
                    "forward": self.backend,
                    "backward": self.backend,
                    "format": "any",
                    "device": "any",
                    "dtype": "any",
                    "reason": "no implementation",
                }
                request.node.user_properties.append((CELL_PROPERTY, row))

    def _accepted(self, implementation: Implementation) -> Any:
        calls = launchability.swept_facts(implementation.op)
        accepted = rules.accepted_facts(implementation, calls)
        assert accepted is not None, f"{implementation.name} accepts no call of any case on any device"
        return accepted
