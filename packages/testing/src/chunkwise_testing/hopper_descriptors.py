"""Finds addresses that ptxas computes wrongly for Hopper's matrix instructions, in the disassembly of a kernel.

ptxas 12.8, which Triton 3.4, 3.6 and 3.7 bring, now and then builds the upper word of a shared-memory descriptor from a
uniform register that nothing wrote, where one address serves tiles of two layouts. The kernel then reads anywhere:
wrong numbers that are the same in every run, or an illegal access. (12.9 compiles the same PTX rightly.) The upper
words are constants, so following constants through the uniform registers, in the order of the text, finds a wrong one.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Za-z0-9_.]+)\s*(.*?)\s*;")
_WRITES_UNIFORM = re.compile(r"U[A-Z]|R2UR|S2UR|VOTEU|REDUX")
_UNWRITTEN, _UNKNOWN = "never written", None
# Bits 62 and 63 name the swizzle, the rest of the upper word is the stride between groups of eight rows, in 16 bytes.
_VALID = {0x40000040, 0x80000020, 0xC0000010}

Value = int | str | None


def disassemble(cubin: bytes, nvdisasm: Path) -> str:
    """The text of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, check=True)
    return done.stdout


def wrong_descriptors(text: str) -> list[str]:
    """The matrix instructions whose descriptors have an upper word that is wrong or that nothing wrote."""
    words: dict[int, Value] = {}
    found = []
    for line in text.splitlines():
        if not (match := _INSTRUCTION.search(line)):
            continue
        name, operands = match.group(1), [o.strip() for o in match.group(2).split(",")]
        if "gdesc" in match.group(2):
            for register in _upper_words(operands):
                value = words.get(register, _UNWRITTEN)
                if value is not _UNKNOWN and value not in _VALID:
                    found.append(f"UR{register} is {value if isinstance(value, str) else hex(value)}: {line.strip()}")
        elif _WRITES_UNIFORM.match(name) and re.fullmatch(r"UR\d+", operands[0]):
            _write(words, name, operands)
    return found


def _upper_words(operands: list[str]) -> list[int]:
    """The registers of the upper words: of A and B, or of B alone where A is in registers."""
    (first,) = (int(digits) for operand in operands for digits in re.findall(r"gdesc\[UR(\d+)\]", operand))
    return [first + 3] if re.fullmatch(r"R\d+(\.reuse)?", operands[1]) else [first + 1, first + 3]


def _write(words: dict[int, Value], name: str, operands: list[str]) -> None:
    """Follow one instruction; a sum is known where all its terms are, and a low word's carry is nothing."""
    target = int(operands[0][2:])
    terms = [o for o in operands[1:] if not re.fullmatch(r"!?UP(T|\d)", o)]
    if name in ("UMOV", "UIADD3", "UIADD3.X"):
        words[target] = _sum([_value(words, term) for term in terms])
    elif name == "UIADD3.64" and all(re.fullmatch(r"0x[0-9a-f]+|URZ", term) for term in terms[1:]):
        words[target] = _UNKNOWN
        words[target + 1] = 0 if terms[0] == "URZ" else words.get(int(terms[0][2:]) + 1, _UNWRITTEN)
    else:
        words[target] = _UNKNOWN
        if ".64" in name or ".WIDE" in name:
            words[target + 1] = _UNKNOWN


def _sum(terms: list[Value]) -> Value:
    if _UNWRITTEN in terms:
        return _UNWRITTEN
    numbers = [term for term in terms if isinstance(term, int)]
    return sum(numbers) & 0xFFFFFFFF if len(numbers) == len(terms) else _UNKNOWN


def _value(words: dict[int, Value], term: str) -> Value:
    if term == "URZ":
        return 0
    if match := re.fullmatch(r"UR(\d+)(\.reuse)?", term):
        return words.get(int(match.group(1)), _UNWRITTEN)
    return int(term, 0) & 0xFFFFFFFF if re.fullmatch(r"-?0x[0-9a-f]+", term) else _UNKNOWN
