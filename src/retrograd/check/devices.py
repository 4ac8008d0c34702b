"""Devices and the machine: which one is meant, whether it still answers, how a report names it."""

from __future__ import annotations

from functools import cache

import torch

from retrograd import config
from retrograd.errors import UsageError


def checked(device: str) -> str:
    """The device itself; UsageError if torch has none such."""
    try:
        kind = torch.device(device)
    except RuntimeError:
        raise UsageError(f"`device` is {device!r}, expected cpu, cuda or cuda:0") from None
    if kind.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"`device` is {device!r}, but torch sees no GPU; use cpu")
    return device


def lost(device: str) -> str:
    """Why a GPU answers no call of this process any more, as after an illegal memory access; "" if it does."""
    if torch.device(device).type != "cuda":
        return ""
    try:
        torch.cuda.synchronize(device)
    except Exception as error:
        return str(error).splitlines()[0]
    return ""


def describe(device: str) -> str:
    """How a report names the device."""
    if device.startswith("cuda"):
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return "cpu (Triton interpreter)" if config.interpreting() else "cpu"


@cache
def environment() -> dict[str, str]:
    """Versions and settings, collected once a process."""
    from retrograd import env

    return env.collect()
