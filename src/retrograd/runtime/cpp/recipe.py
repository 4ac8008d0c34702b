"""Recipes: compiled launches as C++ makes them again, and what they pass to the driver; host.hpp reads them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

_FLOATS = {"fp16": "<e", "fp32": "<f", "f32": "<f", "fp64": "<d"}


class DriverCall(NamedTuple):
    """What a launch passes to the CUDA driver; host.hpp reads the fields in this order."""

    function: int  # the driver's handle of the kernel
    grid: tuple[int, int, int]  # programs
    threads: int  # of a program
    shared_bytes: int  # of shared memory
    parameters: tuple[tuple[int, int], ...] = ()  # (slot of a tensor, 0) or (-1, value)
    pdl: bool = False  # whether it begins while the kernel ahead of it ends
    block: bytes = b""  # a struct that the kernel takes instead
    addresses: tuple[tuple[int, int], ...] = ()  # (offset in the struct, slot of the tensor whose address stands there)


class Buffer(NamedTuple):
    """A tensor that is allocated for the launches; host.hpp reads the fields in this order."""

    slot: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    zeros: bool = False  # filled with them, else not at all


class Recipe(NamedTuple):
    """A call as launches in their order, and buffers beside inputs and results. Tensors are known by slots."""

    launches: tuple[DriverCall, ...]
    buffers: tuple[Buffer, ...] = ()


def key_bytes(numbers: Iterable[int]) -> bytes:
    """The numbers as host.hpp compares them."""
    words = tuple(numbers)
    return struct.pack(f"={len(words)}q", *words)


def driver_call(handle: Any, slots: Sequence[int], rest: Iterable[Any]) -> DriverCall | None:
    """What a launch passes to the driver, its first arguments being tensors of `slots`; None for unusual launches.

    Triton passes all arguments that are not constexprs, in their order; None and 1 are constexprs to it. Behind them
    come two addresses of scratch memory, null unless a kernel asks for some.
    """
    compiled = getattr(handle, "compiled", None)
    if compiled is None:
        return None
    warps, ctas, shared = handle.metadata
    from retrograd.compat.triton_relaunch import has_plain_arguments  # a kernel was launched, so Triton is there

    if ctas != 1 or not has_plain_arguments(compiled):
        return None
    kinds = list(compiled.src.signature.values())
    args = [*slots, *rest]
    if len(kinds) != len(args):
        return None
    parameters = []
    for place, (kind, value) in enumerate(zip(kinds, args, strict=True)):
        if kind == "constexpr":
            continue
        is_address = isinstance(kind, str) and kind.startswith("*")
        if is_address != (place < len(slots)):
            return None
        bits = 0 if is_address else scalar_bits(kind, value)
        if bits is None:
            return None
        parameters.append((value, 0) if is_address else (-1, bits))
    return DriverCall(
        function=handle.function,
        grid=handle.grid,
        threads=32 * warps,
        shared_bytes=shared,
        parameters=tuple(parameters),
        pdl=bool(getattr(compiled.metadata, "launch_pdl", False)),
    )


def scalar_bits(kind: Any, value: Any) -> int | None:
    """The bytes of a number as Triton's type `kind`, lowest first, in 64 bits; None for other types."""
    if not isinstance(kind, str):
        return None
    if kind in _FLOATS:
        return int.from_bytes(struct.pack(_FLOATS[kind], value), "little")
    if kind == "bf16":
        return int.from_bytes(struct.pack("<f", value), "little") >> 16
    if kind[0] in "iu" and kind[1:].isdigit() and int(kind[1:]) <= 64:
        return int(value) & (2**64 - 1)
    return None
