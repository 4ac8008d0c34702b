"""Operators of aten that torch itself runs by kernels in other languages, where those are installed."""

from __future__ import annotations

import os
from typing import Any

from retrograd.compat.registry import part, status


def why_not_cutedsl() -> str:
    """Why torch does not run RMSNorm by a kernel in the CuTe DSL; "" where it does, at shapes which that takes."""
    state = status(CUTEDSL)
    if state.state != "works":
        return state.note or "torch is not installed"
    if os.environ.get("TORCH_DISABLE_NATIVE_JIT", "0") != "0":
        return "TORCH_DISABLE_NATIVE_JIT is set"
    return _reason(_utils())


def _utils() -> Any:
    from torch._native import cutedsl_utils  # since torch 2.12

    return cutedsl_utils


def _reason(utils: Any) -> str:
    if not utils.runtime_available():
        return "this torch finds no CUDA, nvidia-cutlass-dsl or apache-tvm-ffi for it"
    return "" if utils._version_is_ok() else f"this torch does not take nvidia-cutlass-dsl {utils.runtime_version()}"


@part(
    "torch.native_cutedsl",
    "asks torch whether its own kernels in the CuTe DSL are in use",
    "`retrograd bench` does not measure them under a name of their own",
    names=("torch._native.cutedsl_utils.runtime_available", "_version_is_ok", "runtime_version"),
    ran=("2.13",),
)
def CUTEDSL() -> str:
    """The reason has words, or none where a version is told."""
    utils = _utils()
    available, version = utils.runtime_available(), utils.runtime_version()
    return "" if available == (version is not None) and isinstance(_reason(utils), str) else f"{available}, {version}"
