"""Flags of torch that change numbers or whether they are the same twice, as they are now, and what it is built with."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

Read = Callable[[Any], Any]
UNREADABLE = "cannot be read"


def _sdp(name: str) -> Read:
    return lambda torch: getattr(torch.backends.cuda, f"{name}_sdp_enabled")()


_FLAGS: dict[str, Read] = {
    "default_dtype": lambda torch: torch.get_default_dtype(),
    "default_device": lambda torch: torch.get_default_device(),
    "float32_matmul_precision": lambda torch: torch.get_float32_matmul_precision(),
    "cuda.matmul.allow_tf32": lambda torch: torch.backends.cuda.matmul.allow_tf32,
    "cudnn.allow_tf32": lambda torch: torch.backends.cudnn.allow_tf32,
    "cuda.matmul.fp32_precision": lambda torch: torch.backends.cuda.matmul.fp32_precision,
    "cudnn.conv.fp32_precision": lambda torch: torch.backends.cudnn.conv.fp32_precision,
    "mkldnn.matmul.fp32_precision": lambda torch: torch.backends.mkldnn.matmul.fp32_precision,
    "fp16_reduced_precision_reduction": lambda t: t.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    "bf16_reduced_precision_reduction": lambda t: t.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    "fp16_accumulation": lambda t: t.backends.cuda.matmul.allow_fp16_accumulation,
    "deterministic_algorithms": lambda torch: torch.are_deterministic_algorithms_enabled(),
    "deterministic_warn_only": lambda torch: torch.is_deterministic_algorithms_warn_only_enabled(),
    "fill_uninitialized_memory": lambda torch: torch.utils.deterministic.fill_uninitialized_memory,
    "cudnn.enabled": lambda torch: torch.backends.cudnn.enabled,
    "cudnn.benchmark": lambda torch: torch.backends.cudnn.benchmark,
    "cudnn.deterministic": lambda torch: torch.backends.cudnn.deterministic,
    "sdp.flash": _sdp("flash"),
    "sdp.mem_efficient": _sdp("mem_efficient"),
    "sdp.math": _sdp("math"),
    "sdp.cudnn": _sdp("cudnn"),
    "mkldnn.enabled": lambda torch: torch.backends.mkldnn.enabled,
    "flush_denormal": lambda torch: _flushes(torch),
    "cpu_capability": lambda torch: torch.backends.cpu.get_cpu_capability(),
    "num_threads": lambda torch: torch.get_num_threads(),
    "num_interop_threads": lambda torch: torch.get_num_interop_threads(),
}


def flags(torch: ModuleType) -> dict[str, Any]:
    """Values by name: true or false, a number or a word; None where this version of torch has no such flag."""
    with warnings.catch_warnings():
        # Some warn that they are read by an older name.
        warnings.simplefilter("ignore")
        return {name: _plain(torch, read) for name, read in _FLAGS.items()}


def toolkits(torch: ModuleType) -> dict[str, str | None]:
    """What torch was built for, and the libraries it loads; None: built without."""
    built: dict[str, str | None] = {"cuda": torch.version.cuda, "hip": torch.version.hip, "cudnn": None, "nccl": None}
    if torch.version.cuda or torch.version.hip:
        built["cudnn"] = _or_error(lambda: torch.backends.cudnn.version())
        built["nccl"] = _or_error(lambda: ".".join(map(str, torch.cuda.nccl.version())))
    # Counted by the driver's library, without a context.
    built["devices"] = _or_error(torch.cuda.device_count)
    return built


def _or_error(read: Callable[[], Any]) -> str:
    try:
        return str(read())
    except Exception as error:  # a library that does not load is what the reader is looking for
        return f"{type(error).__name__}: {error}"


def _plain(torch: ModuleType, read: Read) -> Any:
    try:
        value = read(torch)
    except AttributeError:
        return None
    except Exception as error:  # as when TF32 was set by its new name, and is read by the old one
        return f"{UNREADABLE}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return value if isinstance(value, (bool, int)) else str(value).removeprefix("torch.")


def _flushes(torch: Any) -> bool:
    """Whether subnormal numbers become zero on this thread: there is no flag to read, so one is multiplied by 1."""
    tiny = torch.full((1,), 1e-310, dtype=torch.float64, device="cpu")
    return not bool((tiny * 1.0).view(torch.int64).item())
