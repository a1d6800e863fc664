"""Tiles that are loaded anew while a product may read them, found in the text of a kernel."""

import pytest

from chunkwise_testing.refilled_tiles import refilled_tiles

LOOP = """
      %s_7 = ttg.local_alloc : () -> !ttg.memdesc<{places}x64x64xbf16, #shared1, #smem, mutable> loc(#loc4)
      %x_8 = ttg.local_alloc : () -> !ttg.memdesc<2x64x64xbf16, #shared1, #smem, mutable> loc(#loc5)
      %s_9 = ttg.memdesc_index %s_7[%c0] : !ttg.memdesc<...> -> !ttg.memdesc<64x64xbf16, #shared1, #smem, mutable>
      %x_9 = ttg.memdesc_index %x_8[%c0] : !ttg.memdesc<...> -> !ttg.memdesc<64x64xbf16, #shared1, #smem, mutable>
      %s_10 = ttg.memdesc_trans %s_9 {{order = array<i32: 1, 0>}} : !ttg.memdesc<...> -> !ttg.memdesc<...>
      %y_11 = ttng.warp_group_dot %x_9, {operand}, %acc {{inputPrecision = 1 : i32, isAsync = {run}}} : ...
      %y_12:3 = ttng.warp_group_dot_wait %y_11, %x_9, {operand} {{pendings = {pendings} : i32}} : ...
      %t_13 = ttg.async_copy_global_to_local %p, {filled} mask %m other %z : tensor<...> -> <...> loc(#loc4)
"""
RACE = {"places": 1, "operand": "%s_10", "run": "true", "pendings": 1, "filled": "%s_9"}


def found(**changes):
    return refilled_tiles(LOOP.format(**{**RACE, **changes}))


def test_a_tile_with_one_place_is_found():
    assert found() == ["%s_7"]
    assert found(operand="%s_9") == ["%s_7"]


@pytest.mark.parametrize(
    "change", [{"places": 2}, {"pendings": 0}, {"run": "false"}, {"operand": "%x_9"}, {"filled": "%x_9"}]
)
def test_what_is_safe_is_not(change):
    """Two places; a product that is waited for, or that runs at once; a tile that no product reads, or nobody fills."""
    assert found(**change) == []


def test_only_the_last_products_are_in_flight():
    """Of two products a wait that leaves one waits for the first."""
    other = "%z_11 = ttng.warp_group_dot %x_9, %x_9, %acc {inputPrecision = 1 : i32, isAsync = true} : ..."
    text = LOOP.format(**RACE)
    before, after = text.split("      %y_12")
    assert refilled_tiles(f"{before}      {other}\n      %y_12{after}") == []
    assert refilled_tiles(text.replace("      %y_11", f"      {other}\n      %y_11")) == ["%s_7"]
