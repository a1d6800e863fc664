"""Finds tiles of a Triton kernel that are loaded anew while a product may still read them: a race that Triton makes.

In a pipelined loop for Hopper a product is waited for one turn later, and its operands have two places in shared memory
or more, which are filled in turn. But a tile that is read into registers too has one place (Triton 3.6 and 3.7): the
load of the next turn goes there while the product of this one may still read. A few results in a million are then wrong
in their last digits, and others in another run.

Works on the text of the ``ttgir`` that a compiled kernel has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_VALUE = r"(%[\w#.-]+)"
_PLACES = re.compile(rf"^\s*{_VALUE} = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x")
_VIEW = re.compile(rf"^\s*{_VALUE} = ttg\.memdesc_\w+ {_VALUE}")
_FILL = re.compile(rf"async_copy_global_to_local %[\w#.-]+, {_VALUE}")
_PRODUCT = re.compile(rf"ttng\.warp_group_dot {_VALUE}, {_VALUE}, .*isAsync = true")
_WAIT = re.compile(r"warp_group_dot_wait .*pendings = (\d+)")


def refilled_tiles(ttgir: str) -> list[str]:
    """The tiles, by their names in the text, sorted; empty where there are none."""
    lines = ttgir.splitlines()
    tiles, places = _tiles(lines)
    filled = {tiles[found[1]] for line in lines if (found := _FILL.search(line)) and found[1] in tiles}
    read = {tiles[operand] for operand in _in_flight(lines) if operand in tiles}
    return sorted(tile for tile in filled & read if places[tile] == 1)


def _tiles(lines: list[str]) -> tuple[dict[str, str], dict[str, int]]:
    """The tile that each name is a view of, and how many places each tile has."""
    tiles: dict[str, str] = {}
    places: dict[str, int] = {}
    for line in lines:
        if found := _PLACES.match(line):
            tiles[found[1]] = found[1]
            places[found[1]] = int(found[2])
        elif (found := _VIEW.match(line)) and found[2] in tiles:
            tiles[found[1]] = tiles[found[2]]
    return tiles, places


def _in_flight(lines: list[str]) -> Iterator[str]:
    """Operands of products that a wait leaves running."""
    products: list[tuple[str, str]] = []
    for line in lines:
        if found := _PRODUCT.search(line):
            products.append((found[1], found[2]))
        elif found := _WAIT.search(line):
            products = products[len(products) - int(found[1]) :] if int(found[1]) else []
            for operands in products:
                yield from operands
