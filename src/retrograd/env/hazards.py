"""Hazards: facts that may surprise somebody who compares numbers or times, a sentence each. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from retrograd.compat import versions

_WORKSPACES = (":4096:8", ":16:8")
_ON = ("1", "true", "on", "yes", "y")
# Variables that matter where they are switched on, where they are not empty, and where they are set at all.
_SWITCHED_ON = {
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "TF32 on for matrix products, unless the program turns it off",
    **dict.fromkeys(("XLA_USE_BF16", "XLA_DOWNCAST_BF16"), "float32 tensors are bfloat16 on XLA devices"),
    "TRITON_INTERPRET": "Triton kernels are interpreted: wrong in bfloat16 and at NaN, slow, and no race can show",
    "CUDA_LAUNCH_BLOCKING": "each launch waits for its kernel: races hide, times are not those of a real run",
}
_NOT_EMPTY = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor is a cudaMalloc: slow, and stale memory looks different",
    "PYTHONOPTIMIZE": "asserts do nothing",
}
_ORDER = "another order of adding across ranks than NCCL's own choice"
_THREADS = "sums on the CPU are split by threads: another number gives other last bits"
_SET = {
    **dict.fromkeys(("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE"), _ORDER),
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), _THREADS),
}

_TF32 = "TF32 on: float32 matrix products in 10 bits of mantissa on CUDA"
# Flag of torch -> the values that surprise, and a sentence.
_FLAGS: dict[str, tuple[tuple[Any, ...], str]] = {
    "cuda.matmul.allow_tf32": ((True,), _TF32),
    "cuda.matmul.fp32_precision": (("tf32",), _TF32),  # its newer name; the older one cannot be read then
    "float32_matmul_precision": (("medium",), "float32 matrix products in bfloat16 pieces: 8 to 16 bits"),
    "cudnn.allow_tf32": ((True,), "TF32 on: float32 convolutions in 10 bits of mantissa (torch's default)"),
    "mkldnn.matmul.fp32_precision": (("bf16", "tf32"), "float32 matrix products on the CPU in fewer bits"),
    "fp16_accumulation": ((True,), "fp16 products are added up in fp16"),
    "flush_denormal": ((True,), "subnormal numbers are zero on the CPU"),
    "cudnn.benchmark": ((True,), "the algorithm of a convolution is chosen by timing: another run may choose another"),
    "deterministic_warn_only": ((True,), "operations that differ from run to run only warn"),
    "fill_uninitialized_memory": ((False,), "torch.empty is not filled: what reads it differs from run to run"),
}

Hazard = dict[str, str]


def hazards(facts: Mapping[str, Any]) -> list[Hazard]:
    """Where (a flag, a variable, a package or a part) and what, for the facts of `survey`."""
    toolkits: Mapping[str, Any] = facts["toolkits"] or {}
    pairs = [*_flags(facts["flags"] or {}, facts["variables"], bool(toolkits.get("cuda")))]
    pairs += _variables(facts["variables"])
    for part in facts["compatibility"]:
        if part["state"] in ("degraded", "refused"):
            pairs.append((part["part"], f"{part['difference']}: {part['otherwise']}"))
    for name in versions.TESTED:
        if (version := facts["packages"].get(name)) and versions.is_newer(name, version):
            pairs.append((name, f"newer than the releases retrograd was tested with ({versions.tested(name)})"))
    return [{"where": where, "what": sentence} for where, sentence in pairs]


def _flags(flags: Mapping[str, Any], variables: Mapping[str, str], cuda: bool) -> Iterator[tuple[str, str]]:
    deterministic = flags.get("deterministic_algorithms") is True
    asleep = {"cudnn.allow_tf32": not cuda}  # flags that change nothing here
    asleep |= dict.fromkeys(("deterministic_warn_only", "fill_uninitialized_memory"), not deterministic)
    told: dict[str, str] = {}  # a sentence once, by the first of its flags
    for flag, (values, sentence) in _FLAGS.items():
        if flags.get(flag) in values and not asleep.get(flag):
            told.setdefault(sentence, flag)
    yield from ((flag, sentence) for sentence, flag in told.items())
    for kind in ("fp16", "bf16"):
        if cuda and str(flags.get(f"{kind}_reduced_precision_reduction")) not in ("False", "None"):
            yield f"{kind}_reduced_precision_reduction", f"partial sums of {kind} products in 16 bits (torch's default)"
    if flags.get("default_dtype") not in (None, "float32"):
        yield "default_dtype", f"tensors made without a dtype are {flags['default_dtype']}"
    if deterministic and cuda and variables.get("CUBLAS_WORKSPACE_CONFIG") not in _WORKSPACES:
        wanted = " or ".join(_WORKSPACES)
        yield "CUBLAS_WORKSPACE_CONFIG", f"matrix products on CUDA may raise: deterministic cuBLAS needs {wanted}"


def _variables(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield from ((name, sentence) for name, sentence in _SWITCHED_ON.items() if variables.get(name, "").lower() in _ON)
    yield from ((name, sentence) for name, sentence in _NOT_EMPTY.items() if variables.get(name))
    yield from ((name, sentence) for name, sentence in _SET.items() if name in variables)
    if "NVIDIA_TF32_OVERRIDE" in variables:
        state = "off" if variables["NVIDIA_TF32_OVERRIDE"] == "0" else "on"
        yield "NVIDIA_TF32_OVERRIDE", f"TF32 {state} in all NVIDIA libraries, whatever torch's flags say"
