"""Launchability: schedules swept over fake devices, so that what a table accepts does launch there."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from chunkwise.ops import OPS
from chunkwise.protocol.declaration import Declaration
from chunkwise.verifier.device import FAKE_DEVICES
from chunkwise.verifier.facts import Facts
from chunkwise.verifier.implementation import Implementation, Verdict
from chunkwise_testing import sampling
from chunkwise_testing.routes import Pair, facts_of
from chunkwise_testing.sampling import PLANS, variant

WIDTHS = (16, 32, 60, 64, 80, 96, 100, 128, 192, 256)
TOKENS = (1, 64, 1000, 32_768)


def swept_facts(op: str) -> Iterator[Facts]:
    """Facts of an op's cases in every dtype, with and without gradients, then over widths and lengths."""
    declaration = OPS[op].declaration
    for case in declaration.promises.cases:
        tiny = variant(case, sizes={} if case.offsets is not None else {"T": 1})
        for plan in PLANS.values():
            call = sampling.draw(OPS[op], tiny, plan)
            for needs in (sampling.default_needs(call), frozenset[str]()):
                facts = facts_of(call, needs)
                yield dataclasses.replace(facts, sizes={**facts.sizes, **case.sizes})
    axes = [axis for axis in declaration.promises.static_axes if axis not in sampling.HEAD_AXES]
    for facts in list(_first_facts(op)):
        for widths in itertools.product(WIDTHS, repeat=len(axes)):
            for t in TOKENS:
                sizes = {**facts.sizes, **dict(zip(axes, widths, strict=True)), "T": t}
                yield dataclasses.replace(facts, sizes=sizes)


def _first_facts(op: str) -> Iterator[Facts]:
    case = variant(OPS[op].declaration.promises.cases[0], sizes={"T": 1})
    for plan in (PLANS["bf16"], PLANS["fp32"]):
        call = sampling.draw(OPS[op], case, plan)
        for options in chunk_options(OPS[op].declaration):
            yield facts_of(call.replaced(options=options), sampling.default_needs(call))


def chunk_options(declaration: Declaration) -> list[dict[str, int]]:
    """Options that ask for each chunk size of an op; nothing where it has but one."""
    if "chunk_size" not in declaration.option_names:
        return [{}]
    sizes = dict.fromkeys(f.chunk_size for f in declaration.promises.formats if f.chunk_size is not None)
    return [{"chunk_size": size} for size in sizes]


def verdicts(implementation: Implementation) -> Iterator[tuple[Facts, Verdict]]:
    """The verifier's judgement on every swept call on every fake device."""
    for facts in swept_facts(implementation.op):
        for device in FAKE_DEVICES.values():
            there = facts.on(device)
            yield there, implementation.judge(there)


def launch_problem(facts: Facts, verdict: Verdict) -> str | None:
    """What is wrong with a verdict: no schedule and no refusal, a silent refusal, or more memory than there is."""
    where = facts.describe()
    if verdict.hard:
        mute = [r.rule for r in verdict.refusals if not (r.reason() and r.remedy)]
        return f"refused without a reason by {mute} {where}" if mute else None
    if verdict.schedule is None:
        return f"accepted without a schedule {where}"
    if getattr(type(verdict.schedule), "__hash__", None) is None:
        return f"the schedule is not frozen {where}"
    need = getattr(verdict.schedule, "shared_memory_bytes", 0)
    if need > facts.device.shared_memory_bytes:
        return f"needs {need} bytes of shared memory, the device has {facts.device.shared_memory_bytes} {where}"
    return None


def compile_all(work: list[tuple[Pair, Facts]], threads: int = 4) -> int:
    """Compile the kernels that the given calls need, in parallel; returns how many compilations were asked for."""
    jobs = {}
    for pair, facts in work:
        forward, backward = pair.implementations
        facts = dataclasses.replace(facts, residuals=pair.format if facts.needs else None)
        for implementation, part in ((forward, "forward"), (backward, "backward")):
            verdict = implementation.judge(facts)
            if implementation.compile is not None and not verdict.hard:
                jobs[implementation.name, repr(verdict.schedule), pair.format, part] = (
                    implementation,
                    verdict.schedule,
                    facts,
                    part,
                )
    with ThreadPoolExecutor(threads) as pool:
        return len(list(pool.map(_compile, jobs.values())))


def _compile(job: tuple[Implementation, Any, Facts, str]) -> None:
    implementation, schedule, facts, part = job
    implementation.function("compile")(schedule, facts, (part,))
