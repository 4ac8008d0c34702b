"""Commits and registries of a third draw, 17 repositories that nobody here had run or read: see repositories.py.

    python benchmarks/outside_triton/repositories_memory.py    # the commands that clone all of them

Their specs are in repositories_losses.py, _frameworks.py, _models.py, _graphs.py and _memory.py; what these need beyond
torch and Triton stands in the head of each.
"""

from __future__ import annotations

import sys

import torch
from repositories import CLONES
from specs import registries

COMMITS = {
    "mgmalek": "mgmalek/efficient_cross_entropy@049d44460051a82f58f7ff49a2ad0653ecf026d8",
    "sigmamoe": "RobertCsordas/moe_layer@c9b9c01c7071fe5c39d1f91ae6f24911fb75adb0",
    "ldtriton": "l1351868270/ld_triton@fc3796283e7c9dfe1c0112387846cfdc4eb71809",
    "gsplat": "hieu1999210/gsplat-triton@46beece9c8e0bd8a142abbaeae50f595399c60bf",
    "fbgemm": "pytorch/FBGEMM@71d6f8b229d964e61cac24df9bbd2ffcc4b4d378",
    "te": "NVIDIA/TransformerEngine@d0067d0da6cb01811b8072a7d304f0e00344ce2b",
    "megatron": "NVIDIA/Megatron-LM@d98e8a64ddf34856e74b24714e3bedb2f5a39553",
    "fairchem": "facebookresearch/fairchem@a73c95be1db2f5ca60cce19f00fd5bff4c29fd7d",
    "forgetting": "zhixuan-lin/forgetting-transformer@883f260c636e87971339749b0d8310004794a5cc",
    "windrwkv": "johanwind/wind_rwkv@d1d85d9d0d014a2af54caf6c324a5131a10e5b7e",
    "flagattention": "FlagOpen/FlagAttention@ee91638dec6da8c00c4113d179f469e0ffcd5852",
    "nemo": "NVIDIA/NeMo@8cfedd7203462cb251a914e700e5605444277561",
    "metta": "Metta-AI/metta@a8d1ecee19252b26b9351de23a628b372b19dfb6",
    "memorylayers": "facebookresearch/memory@7f85280cee4a4696f5e0444d5657dc09282408ff",
    "quantized": "gau-nernst/quantized-training@01607b37784cb5f7bf559670ce4f7d71d9608bed",
    "retention": "raizoken23/retention_integration@ac039cbcb2a33f291bc7b79835ab6362974dc3d4",
    "megafold": "Supercomputing-System-AI-Lab/MegaFold@cdd06eea6b7dc6633764362cd0645c7054f81f99",
}
THIRD = registries(COMMITS)
for _path in (
    "l1351868270/ld_triton",
    "FlagOpen/FlagAttention/src",
):
    sys.path.append(str(CLONES / _path))


def cycle(count: int, size: int, device: torch.device, start: int = 0) -> torch.Tensor:
    """Whole numbers below `size` in a fixed, uneven order."""
    return (torch.arange(count, device=device) * 7 + start) % size
