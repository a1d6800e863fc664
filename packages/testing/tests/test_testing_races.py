"""Running racecheck, with a script in the tool's place."""

import sys

import pytest

from chunkwise_testing import races

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the tool is a script with a first line")

CLEAN = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
FOUND = """\
========= COMPUTE-SANITIZER
========= Warning: Race reported between Write access at solve+0x5130 in kernels.cu:228
=========     and Read access at solve+0x4750 in kernels.cu:222 [256 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)
"""


@pytest.fixture
def tool(tmp_path):
    def make(says, code=0):
        path = tmp_path / "bin" / races.NAME
        path.parent.mkdir(exist_ok=True)
        note = f"open({str(tmp_path / 'args')!r}, 'w').write(repr(sys.argv[1:]))"
        path.write_text(f"#!{sys.executable}\nimport sys\n{note}\nsys.stdout.write({says!r})\nsys.exit({code})\n")
        path.chmod(0o755)
        return path

    return make


def test_a_clean_run_has_no_hazards(tool, tmp_path):
    assert races.racecheck("import torch", tool(CLEAN)) == []
    arguments = (tmp_path / "args").read_text()
    assert "'--tool', 'racecheck'" in arguments
    assert arguments.endswith(f"{sys.executable!r}, '-c', 'import torch']")


def test_hazards_are_told_line_by_line(tool):
    assert races.racecheck("", tool(FOUND)) == [
        "Warning: Race reported between Write access at solve+0x5130 in kernels.cu:228",
        "    and Read access at solve+0x4750 in kernels.cu:222 [256 hazards]",
    ]


@pytest.mark.parametrize(("says", "code"), [(CLEAN, 1), ("Device not supported\n", 0)])
def test_a_run_that_says_nothing_is_no_proof(tool, says, code):
    with pytest.raises(RuntimeError, match=f"exited with {code}: .*{says.splitlines()[0]}"):
        races.racecheck("", tool(says, code))


@pytest.mark.parametrize("variable", ["PATH", "CUDA_HOME", "CUDA_PATH"])
def test_where_the_tool_is_found(tool, monkeypatch, variable):
    path = tool(CLEAN)
    for name in ("PATH", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv(variable, str(path.parent if variable == "PATH" else path.parent.parent))
    assert races.sanitizer() == path
