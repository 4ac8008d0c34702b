"""Inline assembly on elements, without memory and jumps, as functions of NumPy arrays."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from retrograd.ttir.asm_instructions import CLOCK, NO_VALUE, OPERAND, execute_instruction, is_known
from retrograd.ttir.element_types import Array, ElementType, from_bits, to_bits

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_INSTRUCTION = re.compile(r"(?:@(!?)(\S+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)
_VECTOR = re.compile(r"(?<=[\w,\s])(?<![;{}]\s)\{([^;{}]+)\}(?=\s*[,;])")
_DECLARED = re.compile(r"\.reg\s+\.\w+\s+([^;]+);")
_FENCE = re.compile(r"\b(?:fence\.(?!proxy)(?:\w+\.)*(?:gpu|sys)|membar\.(?:gl|sys))\b")
_BITS = {"h": 16, "r": 32, "f": 32, "l": 64, "d": 64, "b": 8, "c": 8}


def inline_asm(text: str, constraints: str, packed: int) -> Callable[..., Any] | str:
    """A function of (operands, their types, types of the results) for a piece of assembly.

    Args:
        text: as TTIR has it, line breaks as \\0A.
        constraints: "=r,=r,r".
        packed: how many elements of each operand one run takes.

    Returns:
        The function, or why there is none, in words.
    """
    plain = plain_text(text)
    # Braces of scopes go, those of operands stay: these stand behind a comma, or an instruction's name.
    marked = _VECTOR.sub("\a\\1\v", plain).replace("{", " ").replace("}", " ")
    body = marked.replace("\a", "{").replace("\v", "}")
    declared = {word.split("<")[0] for names in _DECLARED.findall(plain) for word in re.split(r"[,\s]+", names)}
    program: list[tuple[str, str, str, list[str]]] = []
    for statement in body.split(";"):
        statement = " ".join(statement.split())
        if not statement or statement.startswith(".reg"):
            continue
        match = _INSTRUCTION.match(statement)
        if match is None or not is_known(match[3].split(".")):
            return f"its instruction {statement!r}"
        name = match[3].split(".")[0]
        operands = OPERAND.findall(match[4])
        unknown = [w for w in operands if w[0] == "%" and w not in declared and w != "%smid" and not CLOCK.match(w)]
        if unknown:
            return f"the register {unknown[0]}"
        if name not in NO_VALUE:
            program.append((match[1] or "", match[2] or "", match[3], operands))
    slots = [word.strip("=&+ ") for word in constraints.split(",") if not word.startswith("~")]
    outputs = sum(word.strip().startswith("=") for word in constraints.split(","))

    def compute(
        operands: Sequence[Array], sources: Sequence[ElementType], targets: Sequence[ElementType],
        extents: Sequence[int] | None = None,
    ) -> Any:  # fmt: skip
        shape = np.broadcast_shapes(*(x.shape for x in operands)) if operands else (1,)
        if packed > 1 and extents is not None:
            # Neighbours are whatever a thread holds; which they are makes no difference to elements.
            shape = (shape[0], *extents)
        registers: dict[str, Array] = {}
        filled = outputs
        for operand, source in zip(operands, sources, strict=True):
            for content in _registers(operand, source, shape, packed, slots[filled] if filled < len(slots) else "r"):
                registers[f"${filled}"] = content
                filled += 1
        _execute(program, registers)
        return _results(registers, targets, shape, packed, slots)

    return compute


def reads_clock(text: str) -> bool:
    """Whether a piece of assembly asks for the time."""
    return bool(CLOCK.search(plain_text(text)))


def fences(text: str) -> bool:
    """Whether a piece of assembly has a fence that other programs hear of."""
    return bool(_FENCE.search(plain_text(text)))


def plain_text(text: str) -> str:
    """Assembly as it was written, from TTIR's text of it, without comments."""
    written = re.sub(r"\\([0-9A-F]{2})", lambda code: chr(int(code[1], 16)), text).replace("\\\\", "\\")
    return _COMMENT.sub(" ", written)


def _registers(operand: Array, source: ElementType, shape: tuple[int, ...], packed: int, slot: str) -> list[Array]:
    """Contents of the registers that one run takes of an operand; narrow elements share registers of 32 bits."""
    bits = to_bits(operand, source)
    if packed == 1:
        return [bits.astype(f"u{_BITS.get(slot, 32) // 8}")]
    bits = np.broadcast_to(bits, shape).reshape(shape[0], -1)
    if bits.shape[1] % packed:
        bits = np.repeat(bits, packed, axis=1)  # fewer elements than one run takes: the rest is whatever there is
    bits = bits.reshape(shape[0], -1, packed)
    if source.size >= 4:
        return [bits[..., i] for i in range(packed)]
    each = min(4 // source.size, packed)
    words = []
    for start in range(0, packed, each):
        word = np.zeros(bits.shape[:-1], np.uint32)
        for i in range(each):
            word |= bits[..., start + i].astype(np.uint32) << np.uint32(8 * source.size * i)
        words.append(word)
    return words


def _results(
    registers: dict[str, Array], targets: Sequence[ElementType], shape: tuple[int, ...], packed: int, slots: list[str]
) -> Any:
    results, at = [], 0
    for target in targets:
        unsigned = f"u{target.size}"
        if packed == 1:
            bits = registers.get(f"${at}", np.zeros(1, np.uint32))
            at += 1
            results.append(from_bits(np.ascontiguousarray(bits.astype(unsigned)), target))
            continue
        each = max(min(4 // target.size, packed), 1)
        elements = []
        for _ in range(0, packed, each):
            word = registers[f"${at}"]
            at += 1
            elements += [(word >> word.dtype.type(8 * target.size * i)).astype(unsigned) for i in range(each)]
        bits = np.stack(np.broadcast_arrays(*elements), axis=-1)
        bits = bits.reshape(shape[0], -1)
        bits = bits[:, :: max(bits.shape[1] // int(np.prod(shape[1:])), 1)].reshape(shape)
        results.append(from_bits(np.ascontiguousarray(bits), target))
    return results[0] if len(results) == 1 else tuple(results)


def _execute(program: list[tuple[str, str, str, list[str]]], registers: dict[str, Array]) -> None:
    for negated, predicate, name, operands in program:
        before = {word: registers.get(word) for word in operands[:1]}
        execute_instruction(name.split("."), operands, registers)
        if predicate:
            holds = registers[predicate].astype(bool) ^ bool(negated)
            for word, old in before.items():
                if old is not None:
                    registers[word] = np.where(holds, registers[word], old.astype(registers[word].dtype))
