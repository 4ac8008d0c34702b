"""Device side of a launch: is this tensor launchable, on which GPU, with how many multiprocessors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from retrograd import config, interpreter

# What the interpreter is told: it runs programs one after another, the number only shapes the plan.
INTERPRETER_NUM_SMS = 2


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """A context in which kernels on `tensor` may be launched; makes the tensor's GPU the current one.

    Raises:
        RuntimeError: The tensor is on the CPU and this process does not interpret kernels, or its device is
            neither CPU nor CUDA.
    """
    if config.interpreting():
        interpreter.prepare()
    if tensor.device.type == "cuda":
        return torch.cuda.device(tensor.device)
    if tensor.device.type != "cpu":
        raise RuntimeError(
            f"impl='triton' got a tensor on {tensor.device}, expected cuda (or cpu under TRITON_INTERPRET=1); "
            "use impl='torch'"
        )
    if not config.interpreting():
        raise RuntimeError(
            "impl='triton' on a CPU tensor needs TRITON_INTERPRET=1 set before triton is imported; "
            "set it, move the tensor to a GPU, or use impl='torch'"
        )
    return nullcontext()


def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; a small constant where kernels are interpreted."""
    if config.interpreting() or device.type != "cuda":
        return INTERPRETER_NUM_SMS
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _cuda_num_sms(index)


@cache
def _cuda_num_sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
