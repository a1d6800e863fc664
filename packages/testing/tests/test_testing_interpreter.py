"""Triton's interpreter: bf16 is wrong as it comes, right when mended, and mended by the plugin where it interprets;
fp32 is rounded as on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("numpy")
pytest_plugins = "pytester"

INTERPRETED = {**os.environ, "TRITON_INTERPRET": "1"}
TO_BF16 = ("fp32", "fp16", "fp64", "bool", "int8", "uint8", "int32", "int64")
FROM_BF16 = ("fp32", "fp16", "int32")


@pytest.fixture(scope="module")
def found():
    """What a process measured before and after mending; an interpreter lasts as long as its process."""
    script = Path(__file__).with_name("interpreted_numbers.py")
    run = subprocess.run([sys.executable, script], env=INTERPRETED, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("product", ["bf16", "bf16+", "fp16", "fp16+", "fp32", "fp32+"])
def test_products_are_those_of_fp64(found, product):
    """Alone and added to an accumulator, within what fp32 sums lose; those of other dtypes keep their bits."""
    assert found["mended"]["products"][product] <= 1.0
    assert product.startswith("bf16") or found["mended"]["products"][product] == found["shipped"]["products"][product]


@pytest.mark.parametrize("source", TO_BF16)
def test_casts_to_bf16_round_to_the_nearest(found, source):
    assert found["mended"]["to bf16"][source] == 0


@pytest.mark.parametrize("target", FROM_BF16)
def test_casts_from_bf16_are_exact(found, target):
    assert found["mended"]["from bf16"][target] == 0


def test_other_casts_are_right(found):
    assert found["mended"]["others"] == found["shipped"]["others"] == {"fp16": 0, "int32": 0}


def test_wrong_is_seen_and_mended(found):
    """This triton's is wrong as it comes. When one comes that is right, what mends it can go."""
    shipped = found["shipped"]
    assert not shipped["right"]
    assert shipped["products"]["bf16"] > 1.0
    assert all(shipped["to bf16"][source] for source in TO_BF16)
    assert found["result"]
    assert found["mended"]["right"]


def test_sums_of_products_are_cut_off(found):
    """The longer the sum, the more; all of them towards zero."""
    short, long = found["cut off"]["512"], found["cut off"]["2048"]
    assert 0 < short["mean"] < long["mean"]
    assert long["above"] == 0


def test_exponentials_lose_what_their_argument_does(found):
    """2^-24 of a multiple of log2(e) of 108 is 2^-17 at most; near zero nothing is lost but the last digit."""
    assert 2**-20 < found["exp"]["75"] < 2**-17
    assert found["exp"]["0.5"] < 2**-22


@pytest.mark.parametrize("shift", ["0", "100", "107"])
def test_products_in_parts_keep_the_digits_of_fp32(found, shift):
    """Also of factors far apart, one of each product being 2^-shift."""
    assert found["tf32x3"][shift] <= 4.0
    assert found["tf32x3"][shift] == found["tf32x3 again"][shift]


def test_products_in_parts_lose_what_tf32_cannot_hold(found):
    """2^-11 of a factor near 2^-124 is a lower part below tf32's last digit; in fp32 nothing is lost."""
    assert found["tf32x3"]["124"] > 8.0
    assert found["fp32"]["124"] <= 1.0


def test_what_is_infinite_stays_so_in_parts(found):
    assert found["infinite"] == {"product": True, "others": True}


def test_an_interpreter_that_is_right_is_left_alone(found):
    assert found["always right"] == {"result": True, "untouched": True}
    assert found["again"] == {"result": True, "untouched": True}


def test_what_mending_does_not_make_right_is_put_back(found):
    assert found["always wrong"] == {"result": False, "untouched": True}


def test_nothing_is_mended_where_nothing_is_interpreted():
    script = (
        "from triton.runtime.interpreter import InterpreterBuilder as B\n"
        "before = B.create_dot, B.cast_impl\n"
        "from chunkwise_testing import interpreter\n"
        "assert not interpreter.mend()\n"
        "assert before == (B.create_dot, B.cast_impl)\n"
    )
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "TRITON_INTERPRET": "0"}, check=True)


@pytest.mark.parametrize(("suite", "right"), [('chunkwise_backend = "nowhere"\n', True), ("", False)])
def test_the_plugin_mends_for_a_file_with_the_suite(pytester, monkeypatch, suite, right):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytester.makepyfile(
        test_here=suite
        + "from chunkwise_testing.interpreter import bf16_is_right\n"
        + f"def test_interpreter():\n    assert bf16_is_right() is {right}\n"
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-q", "-k", "test_interpreter")
    result.assert_outcomes(passed=1, deselected=result.parseoutcomes().get("deselected", 0))
