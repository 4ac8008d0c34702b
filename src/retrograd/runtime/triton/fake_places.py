"""Names of places, as calls of torch have them, where a GPU is pretended."""

from __future__ import annotations

from typing import Any

import torch

FIRST = torch.device("cuda", 0)
# Functions, with the place among their arguments of a device.
_MAY_BE_NUMBERS: dict[Any, int] = {torch.device: 0, torch.Tensor.to: 1, torch.Tensor.type: 1}


def plain(value: Any) -> Any:
    """A device for its number, and a class of tensors on the CPU for the name of one on a GPU."""
    if isinstance(value, str) and value.startswith("torch.cuda."):
        return value.replace("cuda.", "")
    return FIRST if type(value) is int else value


def unnumbered(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of a call of torch with a device where a number may stand for one, as in `torch.device(0)`."""
    at = _MAY_BE_NUMBERS.get(func)
    return args if at is None else (*args[:at], *map(plain, args[at : at + 1]), *args[at + 1 :])


def is_cuda(value: Any) -> bool:
    """Whether a value is a CUDA device, or names one."""
    if isinstance(value, str):
        return value == "cuda" or value.startswith("cuda:")
    return isinstance(value, torch.device) and value.type == "cuda"


def is_cpu(value: Any) -> bool:
    """Whether a value is the CPU as a device, or its name."""
    return value == "cpu" if isinstance(value, str) else isinstance(value, torch.device) and value.type == "cpu"


def place(value: Any) -> Any:
    """The CPU for a CUDA device, anything else as it is."""
    if not is_cuda(value):
        return value
    return "cpu" if isinstance(value, str) else torch.device("cpu")
