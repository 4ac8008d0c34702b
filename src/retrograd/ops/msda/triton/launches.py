"""Parts that launchers of deformable attention share: tensors as kernels read them, launches that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl

from retrograd.ops.msda.arguments import Levels
from retrograd.ops.msda.shapes import tensor_of
from retrograd.ops.msda.slots import Slot
from retrograd.ops.msda.triton.sampling import MAX_SIZES
from retrograd.runtime.cpp.recipe import DriverCall, driver_call
from retrograd.runtime.triton.launch import KernelHandle, launch, on_device_of, relaunch, relaunchable

Tensors = tuple[torch.Tensor | None, ...]

# Launches that have been compiled, by all that they depend on.
_LAUNCHES: dict[Any, tuple[KernelHandle, tuple[Any, ...]]] = {}
# One level's size as a kernel's argument, of 64 bits whatever the size: bit 62, height and width of 31 bits.
_NO_SIZE = 1 << 62


def paired(locations: torch.Tensor) -> torch.Tensor:
    """Contiguous, with pairs that one load can read."""
    locations = locations.contiguous()
    return locations.clone() if locations.data_ptr() % (2 * locations.element_size()) else locations


def sizes_of(levels: Levels, value: torch.Tensor) -> tuple[torch.Tensor | None, tuple[int, ...]]:
    """([L, 2] on the device, MAX_SIZES arguments), one of the two without content."""
    nothing = (_NO_SIZE,) * MAX_SIZES
    if levels.sizes is None or len(levels.sizes) > MAX_SIZES:
        return tensor_of(levels, value.device).contiguous(), nothing
    # A level without pixels may be as wide as it likes.
    packed = tuple(_NO_SIZE | h << 31 | w if h * w else _NO_SIZE for h, w in levels.sizes)
    return None, packed + nothing[len(packed) :]


def index_of(value: torch.Tensor) -> tl.dtype:
    """What holds a position, and the distance of an element from the first of its image and head."""
    _, pixels, heads, channels = value.shape
    return tl.int32 if pixels < 2**30 and pixels * heads * channels < 2**31 else tl.int64


def key_of(name: str, tensors: Tensors, *others: Any) -> Any:
    """All that the launch of this name depends on; None if it has to go through Triton. The first tensor is there."""
    if tensors[0] is None or not relaunchable(*tensors):
        return None
    return _key_on(tensors[0].device, name, tensors, others)


def relaunched(key: Any, tensors: Tensors) -> bool:
    """Launch again what is kept under `key`; False where nothing is."""
    if key is None or key not in _LAUNCHES:
        return False
    handle, rest = _LAUNCHES[key]
    relaunch(handle, (*tensors, *rest), key[0])
    return True


def launch_kept(
    kernel: Any, grid: tuple[int, ...], tensors: Tensors, rest: tuple[Any, ...], key: Any, num_warps: int
) -> None:
    """Compile and launch on the device of the tensors, and keep the launch under `key`."""
    assert tensors[0] is not None
    with on_device_of(tensors[0]):
        handle = launch(kernel, grid, (*tensors, *rest), num_warps=num_warps)
    if key is not None and handle is not None:
        _LAUNCHES[key] = (handle, rest)


def kept_call(
    device: torch.device, name: str, tensors: Tensors, slots: Sequence[Slot], *others: Any
) -> DriverCall | None:
    """What the launch with such tensors, known by slots, passes to the driver; None where none is kept."""
    kept = _LAUNCHES.get(_key_on(device, name, tensors, others))
    return None if kept is None else driver_call(kept[0], slots, kept[1])


def _key_on(device: torch.device, name: str, tensors: Tensors, others: tuple[Any, ...]) -> Any:
    return (device.index, name, others, *(None if t is None else (t.dtype, t.shape) for t in tensors))
