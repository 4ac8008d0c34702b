"""A function that stands for the driver: C++ paths launch into it on CPU tensors, and it computes by torch.

What it is handed, pointers and numbers, is all that it computes from, so that a wrong key, order or size shows.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from retrograd.compat.triton_relaunch import KernelHandle
from retrograd.runtime.cpp.recipe import DriverCall, scalar_bits
from retrograd.runtime.cuda.driver import _Config

_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)


class StandIn:
    """Stands for cuLaunchKernelEx: calls, in Python, what a kernel would do with the addresses it is handed."""

    def __init__(self) -> None:
        self.kernels: list[Callable[[Any], None]] = []
        self.launches: list[tuple[int, tuple[int, ...], int]] = []
        self.code = 0
        self.function = _LAUNCH(self._launch)

    @property
    def address(self) -> int:
        return ctypes.cast(self.function, ctypes.c_void_p).value or 0

    def _launch(self, config: Any, function: Any, params: Any, _extra: Any) -> int:
        how = config.contents
        grid, block = (how.grid_x, how.grid_y, how.grid_z), (how.block_x, how.block_y, how.block_z)
        kernel = self.kernels[function - 1]
        size = getattr(kernel, "bytes", 0)
        count = 1 if size else kernel.count
        words = [ctypes.cast(params[i], ctypes.POINTER(ctypes.c_uint64))[0] for i in range(count + 2)]
        assert block == (128, 1, 1)
        assert words[-2:] == [0, 0]
        assert how.attribute_count == 0
        self.launches.append((function, grid, how.shared_bytes))
        if self.code == 0:
            kernel(ctypes.string_at(params[0], size) if size else words[:-2])
        return self.code

    def handle(self, tensors: Sequence[Any], rest: tuple[Any, ...], kernel: Callable[[list[Any]], None]) -> Any:
        """A Handle as Triton leaves one; `kernel` gets an address or None for each of the tensors."""
        signature = {f"t{i}": "constexpr" if t is None else "*" + _NAMES[t.dtype] for i, t in enumerate(tensors)}
        present = [t is not None for t in tensors]
        signature |= {f"r{i}": "fp32" if isinstance(value, float) else "i32" for i, value in enumerate(rest)}

        def call(words: list[int]) -> None:
            given = iter(words)
            addresses = [next(given) if there else None for there in present]
            numbers = [scalar_bits("fp32" if isinstance(v, float) else "i32", v) for v in rest]
            assert list(given) == numbers
            kernel(addresses)

        call.count = len(rest) + sum(present)
        self.kernels.append(call)
        meta = SimpleNamespace(
            launch_cooperative_grid=False, launch_pdl=False, global_scratch_size=0, profile_scratch_size=0
        )
        compiled = SimpleNamespace(src=SimpleNamespace(signature=signature), metadata=meta)
        return KernelHandle(None, len(self.kernels), (4, 1, 64), (3, 2, 1), compiled)

    def struct_call(self, slots: Sequence[int], tail: bytes, kernel: Callable[[list[Any]], None]) -> DriverCall:
        """A launch of a kernel that takes one struct: an address for each slot, then `tail`."""
        pointers = 8 * len(slots)

        def call(block: bytes) -> None:
            assert block[pointers:] == tail
            kernel([int.from_bytes(block[8 * i :][:8], "little") or None for i in range(len(slots))])

        call.bytes = pointers + len(tail)
        self.kernels.append(call)
        return DriverCall(
            function=len(self.kernels),
            grid=(3, 2, 1),
            threads=128,
            shared_bytes=64,
            block=bytes(pointers) + tail,
            addresses=tuple((8 * i, slot) for i, slot in enumerate(slots)),
        )


def like(t: Any) -> Callable[[int], torch.Tensor] | None:
    """Address -> a tensor of that shape, those strides there."""
    if t is None:
        return None
    dtype, shape, stride = t.dtype, t.shape, t.stride()
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))

    def at(address: int) -> torch.Tensor:
        memory = (ctypes.c_char * (extent * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride)

    return at


def driver_as_triton(op: str, folder: Path, built: Path) -> subprocess.CompletedProcess[str]:
    """What ops/host_driver.py finds in a process in which Triton does not interpret."""
    script = Path(__file__).with_name("ops") / "host_driver.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, script, folder, op, built]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
