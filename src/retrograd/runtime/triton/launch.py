"""Device side of a launch: is this tensor launchable, on which GPU, with how many multiprocessors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from retrograd import config
from retrograd.compat.torch_cuda import current_device
from retrograd.compat.triton_relaunch import KernelHandle, hooked, loaded_kernel
from retrograd.compat.triton_relaunch import relaunch as relaunch
from retrograd.runtime.cuda import driver
from retrograd.runtime.triton import planned_gpu
from retrograd.runtime.triton.gpu import Backend, Gpu

# Triton's interpreter runs programs one after another: none may wait for another, as plans for NVIDIA GPUs have it. An
# operation takes 60 to 100 us up to about 32768 elements, so tiles are large.
_INTERPRETER = Gpu(Backend.HIP, 2, 0, lanes=2048)
_HERE: AbstractContextManager[object] = nullcontext()

# Options of the compilers that decide bits, whatever Triton's defaults are: contraction of a product and a sum (kernels
# that must not contract forbid it where they multiply) is on up to Triton 3.9 and announced to be off from 3.10 on;
# flushing of subnormal numbers changes 36 of 122 kernels on NVIDIA GPUs and 28 of 53 on AMD's.
PINNED = {
    Backend.CUDA: {"enable_fp_fusion": True, "enable_reflect_ftz": True},
    Backend.HIP: {"enable_fp_fusion": True, "allow_flush_denorm": False},
}


def gpu_of(tensor: torch.Tensor) -> Gpu:
    """The device that a launch on `tensor` is planned for.

    Raises:
        RuntimeError: The tensor is on the CPU outside `retrograd.cpu_triton` and this process does not interpret
            kernels, or its device is neither CPU nor CUDA.
    """
    device = tensor.device
    if device.type == "cuda":
        # Kernels of an interpreting process run on the host, whatever the device.
        return _cuda_gpu(device.index) if not config.interpreting() else _INTERPRETER
    planned = planned_gpu.planned()
    if planned is not None:
        return planned
    if device.type != "cpu":
        raise RuntimeError(
            f"impl='triton' got a tensor on {device}, expected cuda (or cpu inside `with retrograd.cpu_triton():`); "
            "use impl='torch'"
        )
    if not config.interpreting():
        raise RuntimeError(
            "impl='triton' on a CPU tensor needs `with retrograd.cpu_triton():` around forward and backward, which "
            "executes kernels without a GPU; or move the tensor to a GPU, or use impl='torch'"
        )
    return _INTERPRETER


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """A context in which the tensor's GPU is the current one."""
    device = tensor.device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


def launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], *, pdl: bool = False, **options: Any
) -> KernelHandle | None:
    """kernel[grid](*args, **options); what `relaunch` needs, or None where nothing was compiled.

    `pdl`: it is launched while the kernel ahead of it ends, and waits for that before it touches memory.
    """
    if pdl:
        options["launch_pdl"] = True  # other backends of Triton do not know it
    compiled = kernel[grid](*args, **PINNED[_backend()], **options)
    return loaded_kernel(compiled, grid)


def relaunchable(*tensors: torch.Tensor | None) -> bool:
    """Whether `relaunch` may be used for these tensors: aligned, on the current GPU, no profiler hooked in."""
    first = tensors[0]
    if first is None or not first.is_cuda or first.device.index != current_device():
        return False
    addresses = 0
    for tensor in tensors:
        if tensor is not None:
            addresses |= tensor.data_ptr()
    return addresses % 16 == 0 and not hooked()


def _backend() -> Backend:
    """Whose compiler a launch goes to; the interpreter takes no options and drops them."""
    planned = planned_gpu.planned()
    if planned is not None:
        return planned.backend
    return Backend.CUDA if torch.version.hip is None else Backend.HIP


@cache
def _cuda_gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return Gpu(Backend.HIP, properties.multi_processor_count, 0, lanes=64)
    arch = 10 * properties.major + properties.minor
    return Gpu(Backend.CUDA, properties.multi_processor_count, arch, driver.has_pdl(arch))
