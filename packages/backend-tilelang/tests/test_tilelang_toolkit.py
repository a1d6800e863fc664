"""Discovery of nvcc on faked machines: every place, every way in which what is there can be no good."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chunkwise_tilelang.toolkit import discover
from chunkwise_tilelang.toolkit.arch import OLDEST
from chunkwise_tilelang.toolkit.discover import Candidate

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the fake compilers are shell scripts")

BANNER = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release {0}, V{0}.85"
Toolkit = Callable[..., Path]


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No nvcc anywhere."""
    monkeypatch.delitem(sys.modules, "tilelang.env", raising=False)  # what another test imported
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(discover, "_in_wheel", lambda: None)
    monkeypatch.setattr(discover, "DEFAULT_HOME", tmp_path / "usr" / "local" / "cuda")


@pytest.fixture
def toolkit(tmp_path: Path) -> Toolkit:
    """Makes a toolkit whose nvcc answers ``--version`` as told; returns its home."""

    def make(name: str, release: str = "13.0", body: str | None = None) -> Path:
        home = tmp_path / name
        (home / "bin").mkdir(parents=True)
        nvcc = home / "bin" / "nvcc"
        nvcc.write_text("#!/bin/sh\n" + (f"cat <<'END'\n{BANNER.format(release)}\nEND\n" if body is None else body))
        nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
        return home

    return make


def the_only() -> Candidate:
    (candidate,) = discover.discover()
    return candidate


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_environment_variable(monkeypatch: pytest.MonkeyPatch, toolkit: Toolkit, variable: str) -> None:
    home = toolkit("cuda", "12.9")
    monkeypatch.setenv(variable, str(home))
    assert the_only() == Candidate(home / "bin" / "nvcc", variable, (12, 9), None)
    assert the_only().home == home


def test_on_path(monkeypatch: pytest.MonkeyPatch, toolkit: Toolkit) -> None:
    home = toolkit("cuda")
    monkeypatch.setattr("shutil.which", lambda name: str(home / "bin" / name))
    assert the_only() == Candidate(home / "bin" / "nvcc", "PATH", (13, 0), None)


def test_link_on_path_leads_to_its_toolkit(monkeypatch: pytest.MonkeyPatch, toolkit: Toolkit, tmp_path: Path) -> None:
    home = toolkit("cuda")
    shims = tmp_path / "env" / "bin"
    shims.mkdir(parents=True)
    (shims / "nvcc").symlink_to(home / "bin" / "nvcc")
    monkeypatch.setattr("shutil.which", lambda name: str(shims / name))
    assert the_only().home == home


def test_link_beside_headers_keeps_its_prefix(
    monkeypatch: pytest.MonkeyPatch, toolkit: Toolkit, tmp_path: Path
) -> None:
    home = toolkit("cuda")
    prefix = tmp_path / "env"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "include").mkdir()
    (prefix / "include" / "cuda_runtime.h").touch()
    (prefix / "bin" / "nvcc").symlink_to(home / "bin" / "nvcc")
    monkeypatch.setattr("shutil.which", lambda name: str(prefix / "bin" / name))
    assert the_only().home == prefix


def test_wrapper_on_path_without_a_toolkit_around_it(
    monkeypatch: pytest.MonkeyPatch, toolkit: Toolkit, tmp_path: Path
) -> None:
    sdk = toolkit("hpc_sdk/25.7/compilers")
    monkeypatch.setattr("shutil.which", lambda name: str(sdk / "bin" / name))
    if "cuda" in str(tmp_path).lower():
        pytest.skip("the temporary folder's own name decides how the path is read")
    assert the_only().path == sdk.parent / "bin" / "nvcc"
    assert the_only().rejected == "no such file"


def test_wheel(monkeypatch: pytest.MonkeyPatch, toolkit: Toolkit) -> None:
    nvcc = toolkit("nvidia/cu13") / "bin" / "nvcc"
    monkeypatch.setattr(discover, "_in_wheel", lambda: nvcc)
    assert the_only() == Candidate(nvcc, "the nvidia-cuda-nvcc wheel", (13, 0), None)


def test_default_folder(toolkit: Toolkit) -> None:
    toolkit("usr/local/cuda", "12.8")
    assert the_only().source == str(discover.DEFAULT_HOME)
    assert the_only().version == (12, 8)


def test_all_places_in_tilelangs_order(monkeypatch: pytest.MonkeyPatch, toolkit: Toolkit) -> None:
    homes = {name: toolkit(name) for name in ("home", "path", "on-path", "wheel", "usr/local/cuda")}
    monkeypatch.setenv("CUDA_HOME", str(homes["home"]))
    monkeypatch.setenv("CUDA_PATH", str(homes["path"]))
    monkeypatch.setattr("shutil.which", lambda name: str(homes["on-path"] / "bin" / name))
    monkeypatch.setattr(discover, "_in_wheel", lambda: homes["wheel"] / "bin" / "nvcc")
    assert [candidate.home for candidate in discover.discover()] == list(homes.values())


def test_nothing_anywhere() -> None:
    assert discover.discover() == ()
    assert discover.usable("sm90") is None
    finding = discover.probe_nvcc(["sm90"])
    assert not finding.ok
    assert finding.found.startswith("no nvcc: CUDA_HOME and CUDA_PATH are not set")
    assert "install CUDA 12.6 or newer" in finding.fix


# --- no good ---------------------------------------------------------------------------------------------


def test_cuda_home_points_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/nowhere/at/all")
    assert the_only().rejected == "no such file"
    finding = discover.probe_nvcc(["sm90"])
    assert not finding.ok
    assert finding.found == "/nowhere/at/all/bin/nvcc (from CUDA_HOME): rejected: no such file"


def test_nvcc_is_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cuda" / "bin" / "nvcc").mkdir(parents=True)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert the_only().rejected == "not a file"


def test_nvcc_is_not_executable(monkeypatch: pytest.MonkeyPatch, toolkit: Toolkit) -> None:
    home = toolkit("cuda")
    (home / "bin" / "nvcc").chmod(0o644)
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert the_only().rejected == "not executable"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo 'license expired' >&2; exit 1\n", "`nvcc --version` exits with 1: license expired"),
        ("exit 3\n", "`nvcc --version` exits with 3"),
        ("echo 'hello world'\n", "`nvcc --version` names no release"),
        ("printf '\\377\\376\\000'\n", "`nvcc --version` names no release"),
        ("", "`nvcc --version` names no release"),
    ],
)
def test_nvcc_answers_nonsense(monkeypatch: pytest.MonkeyPatch, toolkit: Toolkit, body: str, reason: str) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit("cuda", body=body)))
    assert the_only().rejected == reason


def test_nvcc_for_another_machine(monkeypatch: pytest.MonkeyPatch, toolkit: Toolkit) -> None:
    home = toolkit("cuda")
    (home / "bin" / "nvcc").write_bytes(b"\x7fELF of something else")
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert str(the_only().rejected).startswith("`nvcc --version` cannot be started")


def test_nvcc_hangs(monkeypatch: pytest.MonkeyPatch, toolkit: Toolkit) -> None:
    monkeypatch.setattr(discover, "_TIMEOUT_S", 0.2)
    monkeypatch.setenv("CUDA_HOME", str(toolkit("cuda", body="exec sleep 30\n")))
    assert the_only().rejected == "`nvcc --version` did not answer within 0.2 s"


def test_old_release(monkeypatch: pytest.MonkeyPatch, toolkit: Toolkit) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit("cuda", "11.8")))
    assert the_only().rejected == "nvcc 11.8 is older than 12.6"


# --- architectures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "archs"),
    [
        ("11.8", []),
        ("12.5", []),
        ("12.6", ["sm90"]),
        ("12.8", ["sm90", "sm120"]),
        ("12.9", ["sm90", "sm120", "sm121"]),
        ("13.0", ["sm90", "sm120", "sm121"]),
        ("12.10", ["sm90", "sm120", "sm121"]),
    ],
)
def test_releases_and_architectures(
    monkeypatch: pytest.MonkeyPatch, toolkit: Toolkit, release: str, archs: list[str]
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit("cuda", release)))
    assert [arch for arch in OLDEST if discover.usable(arch)] == archs


def test_too_old_for_the_only_gpu(monkeypatch: pytest.MonkeyPatch, toolkit: Toolkit) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit("cuda", "12.6")))
    finding = discover.probe_nvcc(["sm120"])
    assert not finding.ok
    assert "12.6 is too old for sm120, which needs 12.8 or newer" in finding.found
    assert "install CUDA 12.8 or newer" in finding.fix


def test_good_for_one_gpu_of_two(monkeypatch: pytest.MonkeyPatch, toolkit: Toolkit) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit("cuda", "12.6")))
    finding = discover.probe_nvcc(["sm90", "sm121"])
    assert finding.ok
    assert "12.6 is too old for sm121" in finding.found


def test_without_a_gpu_the_easiest_is_asked(monkeypatch: pytest.MonkeyPatch, toolkit: Toolkit) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit("cuda", "12.6")))
    assert discover.probe_nvcc([]).ok


def test_the_first_place_counts_as_it_does_for_tilelang(monkeypatch: pytest.MonkeyPatch, toolkit: Toolkit) -> None:
    good = toolkit("good")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.setattr("shutil.which", lambda name: str(good / "bin" / name))
    assert discover.usable("sm90") is None
    finding = discover.probe_nvcc(["sm90"])
    assert not finding.ok
    assert "/nowhere/bin/nvcc (from CUDA_HOME): rejected: no such file" in finding.found
    assert f"{good}/bin/nvcc (from PATH): nvcc 13.0" in finding.found
    assert finding.fix == f"set CUDA_HOME={good}"


def test_each_nvcc_is_asked_once(monkeypatch: pytest.MonkeyPatch, toolkit: Toolkit, tmp_path: Path) -> None:
    log = tmp_path / "log"
    home = toolkit("cuda", body=f"echo asked >> {log}\necho 'release 13.0, V13.0.1'\n")
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("CUDA_PATH", str(home))
    monkeypatch.setattr("shutil.which", lambda name: str(home / "bin" / name))
    assert len(discover.discover()) == 3
    assert log.read_text().split() == ["asked"]


class _File:
    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name

    def locate(self) -> Path:
        return self.path


def test_wheel_without_nvcc_is_a_rejected_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("importlib.metadata.files", lambda name: [_File(Path("/site/nvidia/bin/ptxas"))])
    place = discover._in_wheel()
    assert place is not None
    assert not place.exists()


def test_nvcc_inside_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    files = [_File(Path("/site/nvidia/cu13/bin/ptxas")), _File(Path("/site/nvidia/cu13/bin/nvcc"))]
    monkeypatch.setattr("importlib.metadata.files", lambda name: files)
    assert discover._in_wheel() == Path("/site/nvidia/cu13/bin/nvcc")
