"""Poison, rule counterexamples, launchability and the report."""

import dataclasses
import json

import pytest
import torch

from chunkwise.ops import OPS
from chunkwise.verifier.device import FAKE_DEVICES
from chunkwise.verifier.evidence import Row
from chunkwise.verifier.implementation import Implementation
from chunkwise.verifier.refusal import DoesNotFit, Kind
from chunkwise.verifier.rules import (
    Region,
    dtype,
    flag_is,
    measured,
    needs_promise,
    one_of,
    same_dtype,
    size_at_most,
    size_multiple_of,
)
from chunkwise_testing import launchability, report, rules, sampling
from chunkwise_testing.poison import GUARD, Guarded, GuardedAllocations, guard_inputs, poisoned_memory
from chunkwise_testing.suite.base import small_case

OP = "chunk_gated_delta_rule"


# --- poison --------------------------------------------------------------------------------------------------------


def test_fresh_memory_is_nan_inside_and_settings_come_back():
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned_memory():
        narrow = torch.ones(3).new_empty(5, dtype=torch.bfloat16)
        for made in (torch.empty(100), torch.empty_like(torch.ones(7)), narrow):
            assert bool(made.isnan().all())
    assert torch.are_deterministic_algorithms_enabled() == before
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 4), (5,), (0, 4)])
def test_guarded_views_hold_the_values(shape, packed):
    x = torch.randn(shape)
    guarded = Guarded(x, packed=packed or x.dim() < 2 or x.numel() == 0)
    assert torch.equal(guarded.view, x)
    assert bool(guarded.storage[:GUARD].isnan().all() and guarded.storage[-GUARD:].isnan().all())
    assert guarded.untouched()
    guarded.storage[GUARD - 1] = 0.0
    assert not guarded.untouched()


def test_written_arguments_are_named():
    call = sampling.draw(OPS[OP], small_case(OP, "guard", 6))
    inside, written = guard_inputs(call)
    assert not inside.tensors["q"].is_contiguous()
    assert written() == []
    inside.tensors["k"].add_(1.0)
    assert written() == ["k"]


def test_overrun_of_an_allocation_is_seen():
    with GuardedAllocations() as allocations:
        made = torch.empty(4, 5)
        zeros = made.new_zeros(3)
        torch.empty_like(zeros)
    assert len(allocations.storages) == 3
    assert torch.equal(zeros, torch.tensor([0.0, 0.0, 0.0]))
    assert allocations.overrun() == 0
    made.as_strided((1,), (1,), made.storage_offset() + made.numel()).fill_(1.0)
    assert allocations.overrun() == 1


# --- rules and schedules -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tiles:
    shared_memory_bytes: int


def table_entry(**changes):
    row = Row("wide-heads", "x/y/z", "torch/gated_delta_rule/chunkwise", "H200", "9.0", 132, {}, 2.0, 1.0, {}, "", "")
    region = Region(
        frozenset({"HV"}),
        inside=lambda f: f.size("HV") >= 32,
        enter=lambda f: f.with_size("HV", 48),
        leave=lambda f: f.with_size("HV", 6),
    )
    promise = needs_promise(
        "bounded",
        ["flag:scale"],
        lambda f: f.flag("scale") is not None,
        "give scale",
        violate=lambda f: f.with_flag("scale", None),
        satisfy=lambda f: f.with_flag("scale", 1.0),
    )
    entry = Implementation(
        "x/y/z",
        op=OP,
        rank=1,
        archs=("sm90", "sm120"),
        schedule=lambda f: Tiles(64 * f.size("K")),
        requires=(
            one_of("K", 64, 128),
            size_at_most("V", 256),
            size_multiple_of("V", 8),
            dtype("q", "bf16", "fp16"),
            same_dtype("q k v"),
            flag_is("use_qk_l2norm_in_kernel", False, "normalise before the call"),
        ),
        promises=(promise,),
        slower=(measured(row, region),),
    )
    return dataclasses.replace(entry, **changes)


def accepted(entry):
    found = rules.accepted_facts(entry, launchability.swept_facts(OP))
    assert found is not None
    return found


def test_every_kind_of_rule_has_its_counterexample():
    entry = table_entry()
    assert rules.counterexample_problems(entry, accepted(entry)) == []


def test_rules_that_break_their_word_are_found():
    good = size_at_most("V", 256)

    bad = {
        "reads": [dataclasses.replace(good, reads=frozenset({"K"}))],
        "accepts what violate": [dataclasses.replace(good, violate=lambda f: f.with_size("V", 255))],
        "changed nothing": [dataclasses.replace(good, violate=lambda f: f)],
        "neighbour": [dataclasses.replace(good, satisfy=lambda f: f)],
        "without a reason": [dataclasses.replace(good, message=lambda f: "")],
        "refused by": [good, dataclasses.replace(good, name="the same again")],
    }
    for words, broken in bad.items():
        entry = table_entry(requires=(one_of("K", 64, 128), *broken))
        problems = rules.counterexample_problems(entry, accepted(entry))
        assert any(words in problem for problem in problems), (words, problems)


def test_reads_are_recorded():
    facts = accepted(table_entry())
    assert rules.read_by(one_of("K", 64), facts) == {"K"}
    assert rules.read_by(same_dtype("q k"), facts) == {"dtype:q", "dtype:k"}
    assert rules.read_by(flag_is("ragged", False, "pad"), facts) == {"flag:ragged"}
    assert rules.read_by(table_entry().rules[0], facts) == {"device"}


def test_schedules_that_do_not_launch_are_found():
    entry = table_entry(schedule=lambda f: Tiles(150_000), promises=())
    problems = [p for f, v in launchability.verdicts(entry) if (p := launchability.launch_problem(f, v))]
    assert problems
    assert all("150000 bytes" in p and "101376" in p for p in problems)
    honest = table_entry(
        promises=(),
        schedule=lambda f: (
            Tiles(150_000)
            if f.device.shared_memory_bytes >= 150_000
            else DoesNotFit(150_000, f.device.shared_memory_bytes)
        ),
    )
    verdicts = list(launchability.verdicts(honest))
    assert not any(launchability.launch_problem(f, v) for f, v in verdicts)
    assert {r.kind for _, v in verdicts for r in v.refusals} >= {Kind.DOES_NOT_FIT, Kind.UNSUPPORTED}
    nothing = table_entry(schedule=lambda f: None, promises=())
    assert any(launchability.launch_problem(f, v) for f, v in launchability.verdicts(nothing))


def test_sweep_covers_every_device_and_width():
    facts = list(launchability.swept_facts(OP))
    assert {f.size("K") for f in facts} >= set(launchability.WIDTHS)
    assert any(not f.needs for f in facts)
    assert any(f.flag("ragged") for f in facts)
    assert len(FAKE_DEVICES) == 10


# --- the report ----------------------------------------------------------------------------------------------------


def entry(case, dtype_name, device="cpu", **found):
    place = {"op": OP, "case": case, "forward": "a/x", "backward": "b/x", "format": "f@1"}
    return {**place, "device": device, "dtype": dtype_name, **found}


def test_no_cell_is_empty(tmp_path):
    entries = [
        entry("dense", "bf16", over_budget=0.25, quantity="d_g", relative_l2=0.002, reason=None),
        entry("dense", "fp32", over_budget=3.0, quantity="o", relative_l2=0.1, reason=None),
        entry("ragged", "bf16", reason="the test failed"),
        entry("ragged", "bf16", device="cuda", reason="needs a GPU"),
        {**entry("dense", "any", device="any", reason="no implementation"), "forward": "c", "backward": "c"},
    ]
    as_json, as_markdown = report.write(entries, tmp_path / "parity")
    cells = json.loads(as_json.read_text())["cells"]
    assert len(cells) == 3 * 3
    assert all(cell.get("reason") or cell.get("over_budget") is not None for cell in cells)
    rows = [line for line in as_markdown.read_text().splitlines() if line.startswith("| ")][1:]
    assert all(cell.strip() for line in rows for cell in line.strip("|").split("|"))
    text = as_markdown.read_text()
    for word in ("0.25 (d_g)", "3 (o) FAILED", "needs a GPU", "no implementation", report.NOT_RUN):
        assert word in text
    assert not report.matrix(entries).ok
    assert report.matrix(entries[:1]).ok
