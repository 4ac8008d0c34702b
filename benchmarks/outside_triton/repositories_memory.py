"""Specs of ops of facebookresearch/memory, gau-nernst/quantized-training, raizoken23/retention_integration.

Needs no package beyond torch and triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import repositories_frameworks  # noqa: F401  each adds its specs to THIRD
import repositories_graphs  # noqa: F401
import repositories_losses  # noqa: F401
import repositories_models  # noqa: F401
import torch
from repositories import CLONES, bare, print_commands
from repositories_routing import within
from repositories_third import COMMITS, THIRD
from specs import apply
from torch import Tensor

import retrograd as rg

MEMORY, QUANTIZED, RETENTION = (THIRD[name] for name in ("memorylayers", "quantized", "retention"))

# facebookresearch/memory: lingua/product_key/xformer_embeddingbag.py (memory layers at scale): F.embedding_bag of mode
# "sum" with weights, by three algorithms of the backward. Rows are a power of two wide.

_BAG = {"memory_product_key": "facebookresearch/memory/lingua/product_key"}


def _bag(algorithm: str) -> Any:
    function = within(_BAG, apply("memory_product_key.xformer_embeddingbag", "xFormersEmbeddingBag"))
    return lambda indices, table, weights: function(indices, table, weights, algorithm)


# expected, all three: values right where contiguous; layouts, true bug: the forward takes indices, table and weights
# for contiguous without a check (xformer_embeddingbag.py:106-108). Then
# - atomics: gradients right, order of sums not fixed, in bfloat16 added up in bfloat16. True bug: `assert
#   gradient.is_contiguous()` (238) fails for what autograd gives of .sum().backward().
# - lock: true bug: the gradient of the table is 0: USE_ATOMICS=True is hard-coded (254, "# use_atomics"), so that no
#   row is ever marked as written, and all of them, added up on uninitialised memory (231), are set to 0 afterwards
#   (260). The assertion as above.
# - reverse_indices (its default): gradients right; true bug: grad_out is not made contiguous, nor checked, and read by
#   flat indices (334): an expanded one (.sum().backward()) is read beyond its end. Rows are a multiple of 8 (asserted).
for _algorithm in ("atomics", "lock", "reverse_indices"):
    MEMORY.add(
        f"memorylayers_bag_{_algorithm}",
        _bag(_algorithm),
        lambda indices, table, weights: (weights[..., None] * table[indices]).sum(1),
        dict(
            indices=rg.tensor("B", "K", dtype="int64", low=0, high="8*R"),
            table=rg.tensor("8*R", "D"),
            weights=rg.tensor("B", "K"),
        ),
        sizes=dict(B=[9, 1, 20], K=[3, 1, 5], R=[2, 1, 4], D=[16, 4, 32]),
    )

# gau-nernst/quantized-training: subclasses/mixed_precision.py over kernels/gn_kernels/triton_mm.py. Their op is
# registered for CUDA alone; here its kernel is launched as they launch it, below their own autograd.Function.


def _scaled_mm(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """As `scaled_mm` of triton_mm.py for one scale a row and one a column."""
    m, k, n = *a.shape, b.shape[1]
    out = torch.empty(m, n, device=a.device, dtype=rows.dtype)
    import_module("gn_kernels.triton_mm")._scaled_mm_kernel[
        lambda meta: (-(-m // meta["BLOCK_M"]) * -(-n // meta["BLOCK_N"]),)
    ](
        a, b, out, rows, columns, m, n, k, *a.stride(), *b.stride(), *out.stride(),
        ACC_DTYPE=import_module("triton.language").int32, EVEN_K=k % 2 == 0, COL_SCALE_SCALAR=columns.numel() == 1,
    )  # fmt: skip
    return out


def _int8_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    root = CLONES / "gau-nernst/quantized-training"
    bare("gn_kernels", root / "kernels/gn_kernels", scaled_mm=_scaled_mm, scaled_int4_mm=None)
    bare("quantized_subclasses", root / "subclasses")
    module = import_module("quantized_subclasses.mixed_precision")
    weight = w.view_as(w)  # theirs is a subclass of these attributes
    weight.config, weight._data = module.MixedPrecisionConfig(), w.detach()
    return module._Int8MixedPrecisionLinear.apply(x, weight, b)


def _rounded(x: Tensor) -> Tensor:
    """To 127 steps of the largest of each row."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale.clip(1e-12)).round() * scale


class _Quantized(torch.autograd.Function):
    """README: all three products of a linear layer with both operands rounded to int8, by row and by column."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return _rounded(x) @ _rounded(w).T + b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, w = ctx.saved_tensors
        return _rounded(grad) @ _rounded(w.T).T, _rounded(grad.T) @ _rounded(x.T).T, grad.sum(0)


# expected: true bug, bounds and values: EVEN_K is k % 2 == 0 (triton_mm.py:404, and 140, 439), where "even" means a
# multiple of BLOCK_K: for an even inner size that is none (24; 64 for a block of 128) columns beyond the row, of the
# next row or beyond the end, are multiplied and added. That is each of K (output), N (gradient of x) and M (gradient of
# w) in turn. Odd sizes, and multiples of the block that is chosen, are right, of all layouts (operands are quantised
# into contiguous ones). Besides, tl.multiple_of(rm % M, BLOCK_M) promises what does not hold where M is no multiple:
# not to be seen here. In bfloat16 scales are rounded to bfloat16. A number that lies between two steps may round either
# way.
QUANTIZED.add(
    "quantized_int8_linear",
    _int8_linear,
    _Quantized.apply,
    dict(x=rg.tensor("M", "K"), w=rg.tensor("N", "K"), b=rg.tensor("N")),
    sizes=dict(M=[33, 1, 20, 64], K=[35, 1, 24, 64], N=[17, 1, 22, 64]),
    surrogate=True,
)

# raizoken23/retention_integration (power retention): retention/_discumsum/triton.py. Gates in float32, as its inputs.


def _discounted(x: Tensor, gates: Tensor) -> Tensor:
    """y_0 = 0, y_{t+1} = exp(log g_t) y_t + x_t; [B, T, H, D] to [B, T + 1, H, D] (docstring)."""
    state, rows = torch.zeros_like(x[:, 0]), []
    rows.append(state)
    for t in range(x.shape[1]):
        state = gates[:, t, :, None].exp().to(x.dtype) * state + x[:, t]
        rows.append(state)
    return torch.stack(rows, 1)


_PACKAGES = {
    f"retention{name}": f"raizoken23/retention_integration/retention{name.replace('.', '/')}"
    for name in ("", "._discumsum")
}
# expected: proved in float32, of all layouts: strides are used, of grad_out too; sums over blocks of D by atomics,
# reset by the tuner (one block up to 64 numbers). bfloat16: right within it; the gradient of the gates is made from the
# states as they were rounded, and given in float32.
RETENTION.add(
    "retention_discumsum",
    lambda x, gates: within(_PACKAGES, apply("retention._discumsum.triton", "DiscumsumTritonFunction"))(
        x, gates.float()
    ),
    _discounted,
    dict(x=rg.tensor("B", "T", "H", "D"), gates=rg.tensor("B", "T", "H", low=-1.0, high=0.0)),
    sizes=dict(B=(1, 2), T=[9, 1, 20], H=[3, 1], D=[12, 1, 70, 130]),
)


if __name__ == "__main__":
    print_commands(*COMMITS.values())
