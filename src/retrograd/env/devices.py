"""GPUs: asked of the driver's own program, so that this process opens none; of torch only what needs no context."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from retrograd.env.asking import answer, find

_QUERY = "index,name,compute_cap,memory.total,driver_version"


def gpus() -> list[dict[str, Any]]:
    """Index, name, capability, memory in MiB and driver of NVIDIA's; [] without its driver."""
    if not find("nvidia-smi"):
        return []
    found = []
    for line in (answer(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]) or "").splitlines():
        index, name, capability, memory, driver = (*(word.strip() for word in line.split(",")), *[""] * 5)[:5]
        mib = int(memory) if memory.isdecimal() else None
        found.append({"index": index, "name": name, "capability": capability, "memory_mib": mib, "driver": driver})
    return found


def toolkits(torch: ModuleType) -> dict[str, str | None]:
    """What torch was built for, and the libraries it loads; None: built without."""
    built: dict[str, str | None] = {"cuda": torch.version.cuda, "hip": torch.version.hip, "cudnn": None, "nccl": None}
    if torch.version.cuda or torch.version.hip:
        built["cudnn"] = _told(lambda: torch.backends.cudnn.version())
        built["nccl"] = _told(lambda: ".".join(map(str, torch.cuda.nccl.version())))
    # Counted by the driver's library, without a context.
    built["devices"] = _told(torch.cuda.device_count)
    return built


def _told(ask: Any) -> str | None:
    try:
        return str(ask())
    except Exception as error:  # a library that does not load is what the reader is looking for
        return f"{type(error).__name__}: {error}"
