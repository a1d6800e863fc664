"""The command line: what it prints, what it returns, and that it never shows a traceback."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from chunkwise import cli
from chunkwise.commands import doctor
from chunkwise.dispatcher import failure, policy, registry
from chunkwise.dispatcher.registry import Backend, Finding, LoadedBackend, LoadFailure, Need, Registry
from chunkwise.errors import CompileFailure
from chunkwise.ops import OPS
from chunkwise.verifier.facts import Facts
from chunkwise.verifier.implementation import Implementation

SIZES = "B=1,T=8192,H=16,HV=32,K=128,V=128"
OP = "chunk_gated_delta_rule"


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU, no environment variables of ours."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for variable in (*doctor.VARIABLES, "TRITON_INTERPRET"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """A registry with the built-in backend alone, to which a test adds others."""
    entries = [e for e in importlib.metadata.entry_points(group=registry.GROUP) if e.name == "torch"]
    found = Registry(entries)
    monkeypatch.setattr(registry, "_registry", found)
    yield found
    failure.release_all()


def compile_well(schedule: object, facts: object, parts: tuple[str, ...]) -> None:
    """A compile hook that succeeds."""


def compile_badly(schedule: object, facts: object, parts: tuple[str, ...]) -> None:
    """A compile hook that fails."""
    raise CompileFailure("ptxas said no")


def compile_with_a_bug(schedule: object, facts: object, parts: tuple[str, ...]) -> None:
    """A compile hook that breaks in a way that is no compile failure."""
    raise ZeroDivisionError("a bug")


def fake_backend(
    found: Registry,
    hook: str | None = None,
    ok: bool = True,
    archs: tuple[str, ...] = ("any",),
    residuals: tuple[str, ...] = ("gdn-wy64@2",),
) -> LoadedBackend:
    """Add a backend ``fake`` with one implementation of the op, of the best rank."""
    implementation = Implementation(
        "fake/gated_delta_rule/best",
        op=OP,
        rank=1,
        archs=archs,
        schedule=lambda facts: ("tile", 64),
        forward="chunkwise.eager.gated_delta_rule:forward",
        backward="chunkwise.eager.gated_delta_rule:backward",
        residuals=residuals,
        compile=f"{__name__}:{hook}" if hook else None,
    )
    finding = Finding(ok, "a fake thing" if ok else "nothing", "" if ok else "buy one")
    backend = Backend("fake", "chunkwise", ">=0.1", needs=(Need("a thing", lambda: finding),))
    loaded = LoadedBackend(backend, "9.9", (implementation,))
    found.loaded["fake"] = loaded
    return loaded


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command line."""
    code = cli.main(argv)
    written = capsys.readouterr()
    assert "Traceback" not in written.err
    return code, written.out, written.err


# --- the whole -------------------------------------------------------------------------------------------


def test_importing_it_imports_no_torch() -> None:
    script = "import sys, chunkwise.cli; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_help_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for name in ("doctor", "ops", "explain", "warm"):
        assert f"  {name} " in out


def test_no_command_is_a_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys)[0] == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"chunkwise {importlib.metadata.version('chunkwise')}\n", "")


def test_unknown_command_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "expalin")
    assert code == 2
    assert "'expalin'" in err
    assert "doctor, ops, explain, warm" in err


@pytest.mark.parametrize("command", ["doctor", "ops", "explain", "warm"])
def test_each_command_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert f"usage: chunkwise {command}" in out


def test_unknown_flag(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "doctor", "--loud")
    assert code == 2
    assert "--loud" in err


def _entry(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    entry = importlib.metadata.EntryPoint("extra", value, cli.GROUP)
    monkeypatch.setattr(cli, "_added", lambda: {"extra": entry})


def test_commands_of_other_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = SimpleNamespace(extra=lambda argv: len(argv))
    monkeypatch.setitem(sys.modules, "extra_commands", module)
    _entry(monkeypatch, "extra_commands:extra")
    assert run(capsys, "extra", "a", "--b", "c")[0] == 3
    assert "extra_commands" in run(capsys, "--help")[1]


@pytest.mark.parametrize("value", ["no_such_module_at_all:extra", "chunkwise.cli:no_such_function"])
def test_command_that_does_not_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    _entry(monkeypatch, value)
    code, _, err = run(capsys, "extra")
    assert code == 2
    assert f"the command extra ({value}) failed to load: " in err


# --- doctor ----------------------------------------------------------------------------------------------


def test_doctor_of_a_healthy_machine(backends: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    fake_backend(backends)
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert f"torch {torch.__version__}" in out
    assert "cpu     CPU" in out
    assert "CHUNKWISE_BACKEND is not set" in out
    assert f"torch 0.1.0: usable, {len(OPS)} implementations\n" in out
    assert "ok       a thing: a fake thing" in out
    assert out.endswith("usable: torch, fake\n")


def test_doctor_says_what_is_missing_and_what_to_do(backends: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    fake_backend(backends, ok=False)
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "fake 9.9: not usable" in out
    assert "missing  a thing: nothing" in out
    assert "fix: buy one" in out


def test_doctor_quotes_load_failures(backends: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    backends.failures["broken"] = LoadFailure("broken", ImportError("libfoo.so is missing"))
    assert "broken: failed to load: ImportError: libfoo.so is missing" in run(capsys, "doctor")[1]


def test_doctor_without_any_backend(backends: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    backends.loaded.clear()
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "usable: no backend" in out


def test_doctor_shows_gpus(
    backends: Registry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from chunkwise.verifier import device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    fakes = [device.FAKE_DEVICES["H200"], device.FAKE_DEVICES["GB10"]]
    monkeypatch.setattr(device, "device_facts", lambda kind, index: device.CPU if kind == "cpu" else fakes[index])
    out = run(capsys, "doctor")[1]
    assert "cuda:0  H200, sm90, 132 SMs, 232,448 bytes of shared memory a block" in out
    assert "cuda:1  GB10, sm121" in out


def test_doctor_on_a_broken_driver(
    backends: Registry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> bool:
        raise RuntimeError("driver/library mismatch")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "cuda    does not start: driver/library mismatch" in out


def test_doctor_shows_a_variable_that_names_nothing(
    backends: Registry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHUNKWISE_BACKEND", "tritn")
    monkeypatch.setattr(policy, "ACTIVE", policy.Policy(backend="tritn", source="CHUNKWISE_BACKEND"))
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "CHUNKWISE_BACKEND = tritn" in out
    assert "wrong: CHUNKWISE_BACKEND names 'tritn'" in out


# --- ops -------------------------------------------------------------------------------------------------


def test_ops_is_one_line_an_op(capsys: pytest.CaptureFixture[str]) -> None:
    from chunkwise.ops import OPS

    code, out, _ = run(capsys, "ops")
    lines = out.splitlines()
    assert code == 0
    assert [line.partition("(")[0] for line in lines] == list(OPS)
    line = next(line for line in lines if line.startswith(OP))
    for part in (
        "q [B T H K]",
        "initial_state=None [N HV K V]",
        "A_log=None [HV]",
        "-> o [B T HV V], final_state [N HV K V] if output_final_state",
        "gradients: q k v g beta initial_state",
        "gdn-wy64@2 (lean), gdn-states64@1 (full)",
    ):
        assert part in line


def test_ops_prints_the_documentation_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "ops", OP)
    assert code == 0
    assert "S <- exp(g_t) S" in out


def test_unknown_op_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["ops", "chunk_gdn"], ["explain", "chunk_gdn", "--sizes", SIZES], ["warm", "chunk_gdn"]):
        code, _, err = run(capsys, *argv)
        assert code == 2
        assert f"no op is called 'chunk_gdn'; known ops: {OP}" in err


# --- explain ---------------------------------------------------------------------------------------------


def explain(capsys: pytest.CaptureFixture[str], *argv: str, sizes: str = SIZES) -> tuple[int, str, str]:
    return run(capsys, "explain", OP, "--sizes", sizes, *argv)


@pytest.mark.parametrize("name", ["H200", "h200", "RTX PRO 6000", "rtx-5090", "gb10", "Triton interpreter"])
def test_explain_for_a_device_that_is_not_here(
    backends: Registry, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    code, out, _ = explain(capsys, "--device", name)
    assert code == 0
    assert "route: torch/gated_delta_rule/chunkwise (forward and backward), residuals gdn-wy64@2" in out
    assert (
        out.splitlines()[0]
        .lower()
        .replace(" ", "")
        .startswith(f"{OP}on" + name.lower().replace("-", " ").replace(" ", ""))
    )


def test_needs_of_this_machine_say_nothing_of_another(backends: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    fake_backend(backends, ok=False, archs=("sm90",))
    assert "route: fake/gated_delta_rule/best" in explain(capsys, "--device", "H200")[1]
    here = explain(capsys)[1]
    assert "route: torch/" in here
    assert "lacks a thing: nothing; buy one" in here


def test_rules_still_speak_for_a_device_that_is_not_here(
    backends: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_backend(backends, ok=False, archs=("sm90",))
    out = explain(capsys, "--device", "A100")[1]
    assert "route: torch/" in out
    assert "unsupported: the tensors are on A100 (sm80), expected sm90" in out


def test_explain_reads_every_argument(backends: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = explain(
        capsys,
        *("--dtype", "fp16", "--dtype", "g=fp32", "--ragged", "--given", "initial_state", "--no-grad"),
        *("--option", "use_qk_l2norm_in_kernel=true", "--option", "scale=0.5", "--residuals", "full"),
        sizes=f"{SIZES},N=7",
    )
    assert code == 0
    first = out.splitlines()[0]
    for part in ("N=7", "q:fp16", "g:fp32", "initial_state:fp32", "cu_seqlens:int32", "scale=0.5", "ragged=True"):
        assert part in first
    assert "gradients: none" in first
    assert "(forward)" in out


def test_explain_full_residuals(backends: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    assert "residuals gdn-states64@1" in explain(capsys, "--residuals", "full")[1]


def test_explain_forced(backends: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    fake_backend(backends)
    out = explain(capsys, "--backend", "torch")[1]
    assert "forced: --backend torch" in out
    assert "route: torch/" in out


def test_explain_of_a_call_that_nothing_can_run(backends: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    fake_backend(backends, archs=("sm90",))
    code, out, _ = explain(capsys, "--backend", "fake", "--device", "A100")
    assert code == 1
    assert "route: none" in out


def test_explain_agrees_with_the_dispatcher(backends: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    import chunkwise

    q = torch.zeros(1, 5, 2, 16)
    v = torch.zeros(1, 5, 4, 24)
    g = torch.zeros(1, 5, 4)
    real = chunkwise.explain(chunkwise.chunk_gated_delta_rule, q, q, v, g, g)
    out = explain(capsys, "--no-grad", "--dtype", "fp32", sizes="B=1,T=5,H=2,HV=4,K=16,V=24")[1]
    assert sorted(out.splitlines()[0].replace(";", "").split()) == sorted(
        str(real).splitlines()[0].replace(";", "").split()
    )
    assert out.splitlines()[1:] == str(real).splitlines()[1:]


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--device", "H900"], ["'H900'", "H200", "RTX PRO 6000"]),
        (["--device", "cuda"], ["this machine has 0 CUDA devices"]),
        (["--device", "cuda:x"], ["'cuda:x'"]),
        (["--backend", "tritn"], ["--backend names 'tritn'", "torch"]),
        (["--residuals", "thin"], ["'thin'", "lean", "full"]),
        (["--dtype", "fp8"], ["q has dtype fp8", "bf16"]),
        (["--dtype", "z=bf16"], ["no dtype 'z'"]),
        (["--dtype", "g="], ["--dtype 'g=' is not understood"]),
        (["--option", "use_l2=true"], ["no option 'use_l2'", "use_qk_l2norm_in_kernel"]),
        (["--option", "use_qk_l2norm_in_kernel=3"], ["use_qk_l2norm_in_kernel = 3"]),
        (["--option", "use_qk_l2norm_in_kernel"], ["--option 'use_qk_l2norm_in_kernel' is not understood"]),
        (["--option", "use_gate_in_kernel=true"], ["in front of the op"]),
        (["--given", "final_state"], ["no optional tensor 'final_state'", "initial_state"]),
        (["--ragged"], ["the size of N is not given"]),
    ],
)
def test_explain_refuses(
    backends: Registry, capsys: pytest.CaptureFixture[str], argv: list[str], parts: list[str]
) -> None:
    code, _, err = explain(capsys, *argv)
    assert code == 2
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    ("sizes", "part"),
    [
        ("B=1,T=8", "the size of H, K, HV, V is not given"),
        (f"{SIZES},D=4", "no axis 'D'"),
        ("B=1,T=x", "T = 'x' is no whole number"),
        ("B", "--sizes 'B' is not understood"),
        ("B=1,T=8,H=3,HV=4,K=8,V=8", "HV = 4 is not a multiple of H = 3"),
        ("B=1,T=-8,H=3,HV=3,K=8,V=8", "axis T is -8"),
        ("B=1,T=8,H=0,HV=3,K=8,V=8", "axis H is 0"),
        ("B=2,T=8,H=3,HV=3,K=8,V=8,N=3", "axis N is 3"),
    ],
)
def test_explain_refuses_sizes(backends: Registry, capsys: pytest.CaptureFixture[str], sizes: str, part: str) -> None:
    code, _, err = explain(capsys, sizes=sizes)
    assert code == 2
    assert part in err


def test_explain_refuses_ragged_batches(backends: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = explain(capsys, "--ragged", sizes="B=2,T=8,H=3,HV=3,K=8,V=8,N=3")
    assert code == 2
    assert "B = 2 together with cu_seqlens" in err


# --- warm ------------------------------------------------------------------------------------------------


def test_warm_with_nothing_to_compile(backends: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    fake_backend(backends)
    code, out, _ = run(capsys, "warm")
    assert code == 0
    assert out.startswith("nothing to compile")


def test_warm_compiles_each_schedule_once_for_each_set_of_heads(
    backends: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kernels are compiled for heads and widths, whatever the schedule says; B and T decide nothing."""
    fake_backend(backends, "compile_well")
    code, out, _ = run(capsys, "warm", OP)
    assert code == 0
    heads = [line.partition(" H=")[2].partition(" K=")[0] for line in out.splitlines()[:-1]]
    assert heads == ["16 HV=32", "16 HV=64", "2 HV=8", "8 HV=16", "2 HV=4"]
    assert out.endswith("5 compiled, 0 failed\n")
    assert run(capsys, "warm", "--dtype", "bf16", "--dtype", "fp16")[1].endswith("10 compiled, 0 failed\n")


def test_warm_for_a_call_of_ones_own(backends: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    fake_backend(backends, "compile_well")
    argv = ("--sizes", "H=3,HV=6,K=64", "--ragged", "--given", "initial_state", "--option", "output_final_state=true")
    code, out, _ = run(capsys, "warm", OP, *argv, "--dtype", "g=fp32", "--no-grad")
    assert code == 0
    (line,) = out.splitlines()[:-1]
    sizes = ("H=3 ", "HV=6 ", "K=64 ", "V=128 ", "N=1;")
    for part in (*sizes, "v:bf16 g:fp32", "initial_state:fp32", "ragged=True", "gradients: none"):
        assert part in line, line
    code, _, err = run(capsys, "warm", OP, "--sizes", "H=3,HV=5")
    assert code == 2
    assert "HV" in err


def compile_what_is_kept(schedule: object, facts: Facts, parts: tuple[str, ...]) -> None:
    """A compile hook that says of which residual format it was asked."""
    print(f"kept: {facts.residuals}")


@pytest.mark.parametrize("argv, kept", [
    ((), "gdn-wy64@2"), (("--residuals", "full"), "gdn-states64@1"), (("--residuals", "gdn-wy64@2"), "gdn-wy64@2"),
    (("--no-grad", "--residuals", "full"), "None"),
])  # fmt: skip
def test_warm_for_the_residuals_of_a_call(
    backends: Registry, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], kept: str
) -> None:
    fake_backend(backends, "compile_what_is_kept", residuals=("gdn-wy64@2", "gdn-states64@1"))
    code, out, _ = run(capsys, "warm", OP, *argv)
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("kept")] == [f"kept: {kept}"] * 5


def test_warm_leaves_out_what_keeps_other_residuals(backends: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    fake_backend(backends, "compile_badly")
    assert run(capsys, "warm", OP, "--residuals", "full")[0] == 0


@pytest.mark.parametrize("flag, value, named", [
    ("--residuals", "gdn-wy32@1", "gdn-wy32@1"), ("--sizes", "H=many", "'many'"), ("--option", "no_such=1", "no_such"),
    ("--dtype", "v=int8", "int8"), ("--given", "no_such", "no_such"),
])  # fmt: skip
def test_warm_refuses_a_wrong_call(
    backends: Registry, capsys: pytest.CaptureFixture[str], flag: str, value: str, named: str
) -> None:
    """Also where nothing has to be compiled."""
    code, _, err = run(capsys, "warm", OP, flag, value)
    assert code == 2
    assert named in err


def test_warm_reports_what_does_not_compile(backends: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    fake_backend(backends, "compile_badly")
    code, out, _ = run(capsys, "warm")
    assert code == 1
    assert "failed: CompileFailure: ptxas said no" in out
    assert "0 compiled, 5 failed" in out


def test_warm_lets_bugs_through(backends: Registry) -> None:
    fake_backend(backends, "compile_with_a_bug")
    with pytest.raises(ZeroDivisionError):
        cli.main(["warm"])


def test_warm_leaves_out_what_cannot_run(backends: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    fake_backend(backends, "compile_badly", ok=False)
    assert run(capsys, "warm")[0] == 0
    fake_backend(backends, "compile_badly", archs=("sm90",))
    assert run(capsys, "warm")[0] == 0


def test_warm_for_one_backend(backends: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    fake_backend(backends, "compile_badly")
    assert run(capsys, "warm", "--backend", "torch")[0] == 0
    code, _, err = run(capsys, "warm", "--backend", "tritn")
    assert code == 2
    assert "known backends: fake, torch" in err


def test_warm_refuses_a_device_that_is_not_here(backends: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "warm", "--device", "H200")
    assert code == 2
    assert "this machine's devices only" in err
