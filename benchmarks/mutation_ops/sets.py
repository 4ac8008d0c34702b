"""Sets of ops whose backwards are mutated: PyTorch's decompositions, our own kernels, Liger's and fla's.

The libraries' ops are those of `benchmarks/outside_triton` of which verify says nothing bad (none is in
adjudicated.toml), so that whatever it says of a mutant is the mutant's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mutation_ops.decompositions import FORMULAS
from mutation_ops.forward_decompositions import FORWARDS
from torch._decomp import decompositions as stock

from retrograd.catalog import resolve
from retrograd.check.spec import OpSpec

PYTHON, KERNELS = ("python", "operation"), ("python", "triton", "ttir", "operation")
_OUTSIDE = Path(__file__).resolve().parents[1] / "outside_triton"


@dataclass(frozen=True)
class Subject:
    """An op whose functions are mutated.

    Attributes:
        spec: makes its description.
        levels: of mutation.
        functions: by name; () for all that it runs.
        within: a folder of the paths of functions that are mutated; "" for all.
    """

    spec: Callable[[], OpSpec]
    levels: tuple[str, ...]
    functions: tuple[str, ...] = ()
    within: str = ""

    def holds(self, file: str, line: int) -> bool:
        """Whether a function's place is of the op's library; operations have none."""
        return not file or self.within in Path(file).parts or not self.within


def _decompositions() -> dict[str, Subject]:
    formulas = {**FORMULAS, **FORWARDS}
    return {
        name: Subject(lambda name=name: formulas[name].spec(name), PYTHON, (formulas[name].place,))
        for name in formulas
        if hasattr(stock, formulas[name].function)  # some are newer than the oldest torch
    }


_OWN = (
    "rms_norm", "rms_norm_torch", "rms_norm_bias", "rms_norm_residual", "rms_norm_heads", "rms_norm_atomic",
    "rms_norm_parts", "rms_norm_residual_torch", "layer_norm", "layer_norm_torch", "layer_norm_residual",
    "ms_deform_attn", "ms_deform_attn_torch", "ms_deform_attn_border", "ms_deform_attn_points", "ms_deform_attn_fused",
)  # fmt: skip
_LIGER = (
    "rms_norm_llama", "rms_norm_gemma", "rms_norm_no_weight", "fused_add_rms_norm_llama", "layer_norm", "poly_norm",
    "modulated_rms_norm", "modulated_rms_norm_shifted_by_token", "dyt", "dyt_no_beta", "swiglu_fused_gate_up",
    "relu_squared", "softmax", "jsd_0.0", "kl_div_batchmean", "kl_div_log_target", "tvd_mean", "attn_res", "mhc_pre",
    "mhc_post_res", "embedding", "fused_moe",
)  # fmt: skip
_FLA = (
    "layer_norm", "rms_norm", "rms_norm_residual", "group_norm", "rms_norm_gated", "layer_norm_gated", "mamba_rms_norm",
    "l2norm", "swish", "logsigmoid_temperature", "swiglu", "powglu", "swiglu_linear", "causal_conv1d_swish",
    "token_shift", "rotary", "mean_pooling", "fused_kda_gate", "cross_entropy_z_loss", "fused_recurrent_linear_attn",
    "fused_recurrent_hgrn", "fused_recurrent_gla", "fused_recurrent_rwkv6",
    "chunk_retention", "chunk_simple_gla", "parallel_attn", "parallel_forgetting_attn", "parallel_based_normalised",
)  # fmt: skip


def _own() -> dict[str, Subject]:
    return {
        name: Subject(lambda name=name: resolve(name), PYTHON if name.endswith("_torch") else KERNELS) for name in _OWN
    }


def _of_library(names: tuple[str, ...], specs: Mapping[str, OpSpec], prefix: str, within: str) -> dict[str, Subject]:
    return {
        f"{prefix}_{name}": Subject(lambda spec=specs[f"{prefix}_{name}"]: spec, KERNELS, within=within)
        for name in names
    }


def _liger() -> dict[str, Subject]:
    sys.path.append(str(_OUTSIDE))
    from liger_attention import LIGER

    return _of_library(_LIGER, LIGER.specs, "liger", "liger_kernel")


def _fla() -> dict[str, Subject]:
    sys.path.append(str(_OUTSIDE))
    from fla_modules import FLA

    return _of_library(_FLA, FLA.specs, "fla", "fla")


# The dearest first, so that the last to end are short.
SETS: dict[str, Callable[[], dict[str, Subject]]] = {
    "own": _own, "fla": _fla, "liger": _liger, "decompositions": _decompositions,
}  # fmt: skip
