"""What the tests of the clustered kernels share."""

from __future__ import annotations

import re

import pytest
import torch

from retrograd.codegen import nvidia
from retrograd.compat.cuda_tools import disassemble
from retrograd.runtime.cuda import nvrtc

SHARED_LIMIT = 227 * 1024  # of a multiprocessor of sm_90
_WIDE = re.compile(r"LDG(STS)?\.\S*128")

needs_nvrtc = pytest.mark.skipif(not nvrtc.is_there(), reason="no NVRTC here: it comes with PyTorch for CUDA")
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.version.hip is not None or torch.cuda.get_device_capability()[0] < 9,
        reason="needs an NVIDIA GPU of compute capability 9.0 or more: clusters",
    ),
]


def gpu_test(function):
    for mark in needs_gpu:
        function = mark(function)
    return function


def narrow_loads(cubin: bytes) -> list[str]:
    """Global loads of less than 16 bytes.

    Fails where registers are spilled, an instruction is not known, or memory is touched ahead of the wait for the kernel
    that runs before.
    """
    usage, code = disassemble(cubin)
    assert "STACK:0" in usage, usage
    assert "LOCAL:0" in usage, usage
    # A copy with a policy to an address from a uniform register: an instruction that an H200 does not know (CUDA 13.0).
    assert not re.search(r"LDGSTS\S* \[[^]]*UR", code)
    assert "ACQBULK" in code
    assert nvidia.read(usage, code)["ahead_of_wait"] == ()
    return [line for line in code.splitlines() if re.search(r"\b(LDG|LDGSTS)\b", line) and not _WIDE.search(line)]
