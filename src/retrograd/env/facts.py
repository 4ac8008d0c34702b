"""Facts about this machine: versions, processor, memory, GPUs, compilers, caches, variables. Imports no framework."""

from __future__ import annotations

import getpass
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from retrograd import config

# By the question they answer: what computes, what is compared with, what tests and shows.
_PACKAGES = (
    *("retrograd", "torch", "triton", "numpy", "scipy", "jax", "jaxlib", "torch_xla"),
    *("quack-kernels", "liger-kernel", "msda-triton", "mmcv"),
    *("pytest", "pytest-xdist", "hypothesis", "tensorboard", "vl-convert-python", "click", "rich", "jinja2"),
)
_NVRTC = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12")
# Variables of other software that change numbers, their order or their speed.
_VARIABLES = (
    *("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "HIP_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION", "MIOPEN_FIND_MODE"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_CBWR", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "ATEN_CPU_CAPABILITY"),
    *("PYTHONHASHSEED", "PYTHONOPTIMIZE", "XLA_FLAGS", "XLA_USE_BF16", "XLA_DOWNCAST_BF16", "PJRT_DEVICE"),
    *("DISABLE_ADDMM_CUDA_LT", "FLASH_ATTENTION_DETERMINISTIC", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"),
)
_PREFIXES = ("TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "TRITON_", "NCCL_", "JAX_", "RETROGRAD_")
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|API_?KEY", re.I)

_RELEASE = re.compile(r"release (\d+\.\d+)|\b(\d+\.\d+(?:\.\d+)+)")
_CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_GPU_QUERY = "index,name,compute_cap,memory.total,driver_version"
_SECONDS = 10.0  # after which a program that is asked for its version is ended
# Beyond so many files the sum is a lower bound: a shared cache may hold millions.
_MOST_FILES = 100_000

Tool = dict[str, str | None]


def package_version(name: str) -> str | None:
    """Version of an installed distribution; None: not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def packages() -> dict[str, str | None]:
    """Versions by name; None: not installed. A checkout of retrograd on PYTHONPATH has no metadata, yet is there."""
    versions = {name: package_version(name) for name in _PACKAGES}
    return {**versions, "retrograd": versions["retrograd"] or "checkout"}


def variables() -> dict[str, str]:
    """Those that are set; what looks like a secret is not shown."""
    values = config.variables(_VARIABLES, _PREFIXES)
    return {name: "(hidden)" if _SECRET.search(name) else value for name, value in values.items()}


def machine() -> dict[str, Any]:
    """Platform, C library, processor, memory."""
    return {
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "cpu": cpu_model(),
        "cpus": cpu_count(),
        "memory_bytes": memory_bytes(),
        "cache_bytes": last_level_cache_bytes(),
    }


def cpu_model() -> str:
    """The processor as the kernel names it; what Python knows elsewhere."""
    named = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.M)
    return named[1].strip() if named else platform.processor() or platform.machine() or "unknown"


def cpu_count() -> int:
    """Processors that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def busy_cpus() -> float | None:
    """How many processors other processes have kept busy in the last minute; None where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def last_level_cache_bytes() -> int | None:
    """Size of the largest cache of the first processor; None where the system does not say."""
    sizes = (re.fullmatch(r"(\d+)([KMG]?)", _text(path).strip()) for path in _CPU_CACHES.glob("index*/size"))
    return max((int(size[1]) * _UNITS.get(size[2], 1) for size in sizes if size), default=None)


def memory_bytes() -> int | None:
    """Memory of the machine; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def gpus() -> list[dict[str, Any]]:
    """Index, name, capability, memory in MiB and driver of NVIDIA's; [] without its driver.

    The driver's own program is asked, so that this process opens no GPU.
    """
    answer = _output("nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits")
    rows: list[dict[str, Any]] = []
    for line in answer.splitlines():
        index, name, capability, memory, driver = (*(word.strip() for word in line.split(",")), *[""] * 5)[:5]
        mib = int(memory) if memory.isdecimal() else None
        rows.append({"index": index, "name": name, "capability": capability, "memory_mib": mib, "driver": driver})
    return rows


def compilers() -> list[Tool]:
    """Name, path and version of each compiler; a path of None: it is not there."""
    chosen = config.variables(["CXX"]).get("CXX", "")
    cxx = next(iter(shlex.split(chosen)), "")
    first = next((name for name in (cxx, "c++", "g++", "clang++") if name and shutil.which(name)), cxx or "c++")
    paths = {"c++": shutil.which(first), "nvcc": shutil.which("nvcc"), "hipcc": shutil.which("hipcc")}
    paths |= {"ptxas (Triton's)": _triton_ptxas(), "ptxas": shutil.which("ptxas")}
    tools: list[Tool] = [{"name": name, "path": path, "version": _tool_version(path)} for name, path in paths.items()]
    # CUDA's run-time compiler, as a wheel brings it.
    nvrtc = next((name for name in _NVRTC if package_version(name)), None)
    return [*tools, {"name": "nvrtc", "path": nvrtc, "version": package_version(nvrtc) if nvrtc else None}]


def _tool_version(path: str | None) -> str | None:
    release = _RELEASE.search(_output(path, "--version") if path else "")
    return (release[1] or release[2]) if release else None


def _triton_ptxas() -> str | None:
    """The one that Triton calls: TRITON_PTXAS_PATH, else that of its wheel."""
    chosen = config.variables(["TRITON_PTXAS_PATH"]).get("TRITON_PTXAS_PATH")
    if chosen:
        return shutil.which(chosen)
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    return str(path) if path.is_file() else None


def caches() -> list[dict[str, Any]]:
    """Name, path, number of files and their bytes; `complete` is false where there were too many to count."""
    chosen = config.variables(["TRITON_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR"])
    home = Path(chosen.get("TRITON_HOME") or Path.home())
    triton = Path(chosen.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no name for this number, as in a container
        user = "unknown"
    inductor = Path(chosen.get("TORCHINDUCTOR_CACHE_DIR") or Path(tempfile.gettempdir()) / f"torchinductor_{user}")
    folders = {"retrograd": config.cache_home() / "retrograd", "triton": triton, "torch.compile": inductor}
    return [{"name": name, "path": str(path), **_folder_size(path)} for name, path in folders.items()]


def _folder_size(path: Path) -> dict[str, Any]:
    files, total = 0, 0
    for folder, _, names in os.walk(path):
        for name in names:
            files += 1
            try:
                total += (Path(folder) / name).lstat().st_size
            except OSError:  # removed meanwhile
                continue
        if files > _MOST_FILES:
            return {"files": files, "bytes": total, "complete": False}
    return {"files": files, "bytes": total, "complete": True}


def _output(*command: str) -> str:
    """What a program prints; "" if it cannot be run, fails, or says nothing in ten seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, errors="replace", check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
