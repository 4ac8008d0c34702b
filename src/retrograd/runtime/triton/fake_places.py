"""Names of places, as calls of torch have them, where a GPU is pretended."""

from __future__ import annotations

from typing import Any

import torch

FIRST = torch.device("cuda", 0)


def plain(value: Any) -> Any:
    """A device for its number, and a class of tensors on the CPU for the name of one on a GPU."""
    if isinstance(value, str) and value.startswith("torch.cuda."):
        return value.replace("cuda.", "")
    return FIRST if type(value) is int else value


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
