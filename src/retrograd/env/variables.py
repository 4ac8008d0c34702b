"""Variables of other software that change numbers, their order or their speed."""

from __future__ import annotations

import re

from retrograd import config

_NAMES = (
    *("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "HIP_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION", "MIOPEN_FIND_MODE"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_CBWR", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "ATEN_CPU_CAPABILITY"),
    *("PYTHONHASHSEED", "PYTHONOPTIMIZE", "XLA_FLAGS", "XLA_USE_BF16", "XLA_DOWNCAST_BF16", "PJRT_DEVICE"),
    *("DISABLE_ADDMM_CUDA_LT", "FLASH_ATTENTION_DETERMINISTIC", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"),
)
_PREFIXES = ("TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "TRITON_", "NCCL_", "JAX_", "RETROGRAD_")
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|API_?KEY", re.I)


def variables() -> dict[str, str]:
    """Those that are set; what looks like a secret is not shown."""
    found = config.variables(_NAMES, _PREFIXES)
    return {name: "(hidden)" if _SECRET.search(name) else value for name, value in found.items()}
