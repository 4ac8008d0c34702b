"""Specs of ops of hieu1999210/gsplat-triton, johanwind/wind_rwkv, NVIDIA/NeMo, zhixuan-lin/forgetting-transformer,
Supercomputing-System-AI-Lab/MegaFold.

Needs jaxtyping with wadler-lindig and typing_extensions (gsplat-triton), einops (forgetting attention), liger-kernel
(MegaFold imports its utils), and pytest (imported by forgetting-transformer): pip install --no-deps will do.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from repositories import MATRIX, layer
from repositories_routing import within
from repositories_third import THIRD
from specs import SINGLE, apply, causal, log_softmax, softmax
from torch import Tensor

import retrograd as rg

GSPLAT, WIND, NEMO, FORGETTING, MEGAFOLD = (
    THIRD[name] for name in ("gsplat", "windrwkv", "nemo", "forgetting", "megafold")
)

# hieu1999210/gsplat-triton: gsplat/triton_impl/_wrapper.py. float32.

_GSPLAT = {
    "gsplat": "hieu1999210/gsplat-triton/gsplat",
    "gsplat.triton_impl": "hieu1999210/gsplat-triton/gsplat/triton_impl",
}


def _legendre(degree: int, order: int, z: Tensor) -> Tensor:
    """The order-th derivative of the Legendre polynomial, by Rodrigues' formula: (z^2 - 1)^l derived l + m times."""
    powers = {2 * k: math.comb(degree, k) * (-1.0) ** (degree - k) for k in range(degree + 1)}
    for _ in range(degree + order):
        powers = {p - 1: p * c for p, c in powers.items() if p}
    scale = 1 / (2**degree * math.factorial(degree))
    return sum((scale * c * z**p for p, c in powers.items()), torch.zeros_like(z))


def _harmonics(coefficients: Tensor, directions: Tensor, *, degree: int) -> Tensor:
    """sum_lm Y_lm(direction) c_lm of real harmonics, as sh_fwd.py's docstring has them; coefficients [N, K, C]."""
    x, y, z = (directions / directions.norm(dim=-1, keepdim=True)).unbind(-1)
    basis, sines, cosines = [], [torch.zeros_like(x)], [torch.ones_like(x)]
    for _ in range(degree):
        sines, cosines = [*sines, x * sines[-1] + y * cosines[-1]], [*cosines, x * cosines[-1] - y * sines[-1]]
    for l in range(degree + 1):  # noqa: E741
        for m in range(-l, l + 1):
            n = abs(m)
            k = math.sqrt((2 * l + 1) / (4 * math.pi) * math.factorial(l - n) / math.factorial(l + n))
            around = cosines[n] if m >= 0 else sines[n]
            basis.append((-1) ** n * k * (math.sqrt(2) if n else 1) * around * _legendre(l, n, z))
    return (torch.stack(basis, -1)[..., None] * coefficients[:, : len(basis)]).sum(-2)


def _gsplat(name: str) -> Any:
    return within(_GSPLAT, apply("gsplat.triton_impl._wrapper", name))


# expected (both): proved: all is copied, masks have other=0, constants were checked by hand; coefficients beyond the
# degree get zeros. Gradients of directions are added up over channels by atomics: order not fixed. Extremes: a
# direction of 0 is 0 * inf = NaN in both.
for _degree in (2, 4):
    GSPLAT.add(
        f"gsplat_harmonics_{_degree}",
        lambda coefficients, directions, d=_degree: _gsplat("_SphericalHarmonics")(
            d, directions, coefficients, None, None
        ),
        partial(_harmonics, degree=_degree),
        dict(coefficients=rg.tensor("N", 25, "C"), directions=rg.tensor("N", 3)),
        sizes=dict(N=[9, 1, 40], C=[3, 1, 4]),
        dtypes=SINGLE,
    )

_WIDTH, _HEIGHT, _TILE = 7, 6, 4


def _splats(means: Tensor, conics: Tensor, colors: Tensor, opacity: Tensor, background: Tensor) -> Tensor:
    """Every tile of 4 x 4 pixels lists all splats, in order."""
    count, tiles = means.shape[1], (_HEIGHT + 3) // _TILE * ((_WIDTH + 3) // _TILE)
    offsets = count * torch.arange(tiles, dtype=torch.int32, device=means.device).view(1, -1, (_WIDTH + 3) // _TILE)
    ids = torch.arange(count, dtype=torch.int32, device=means.device).repeat(tiles)
    function = _gsplat("_RasterizeToPixels")
    return function(means, conics, colors, opacity, background, None, _WIDTH, _HEIGHT, _TILE, offsets, ids, False, 8)


def _blended(
    means: Tensor, conics: Tensor, colors: Tensor, opacity: Tensor, background: Tensor
) -> tuple[Tensor, Tensor]:
    """Front to back: alpha = o exp(-d^T C d / 2), color = sum_i c_i alpha_i prod_{j<i} (1 - alpha_j) + T background."""
    y, x = (torch.arange(n, dtype=means.dtype, device=means.device) + 0.5 for n in (_HEIGHT, _WIDTH))
    dx, dy = means[0, :, 0, None, None] - x, means[0, :, 1, None, None] - y[:, None]
    a, b, c = (part[:, None, None] for part in conics[0].unbind(-1))
    alpha = opacity[0, :, None, None] * torch.exp(-(0.5 * (a * dx * dx + c * dy * dy) + b * dx * dy))
    left = torch.cumprod(1 - alpha, 0)
    before = torch.cat([torch.ones_like(left[:1]), left[:-1]])
    color = torch.einsum("nhw,nc->hwc", before * alpha, colors[0]) + left[-1][..., None] * background[0]
    return color[None], (1 - left[-1])[None, ..., None]


def _definite(conics: Tensor) -> Tensor:
    """The middle one halved, so that none has a negative direction: the op leaves out what lies there (sigma < 0)."""
    return conics * torch.tensor([1.0, 0.5, 1.0], dtype=conics.dtype, device=conics.device)


# expected: numbers right within fast exp and log (fast_expf, fast_logf: a few ulp, more for the backward, which starts
# from log(1 - alpha) of the stored alpha: about 6e-8 / T relative, so at T of 1e-3 some 1e-4: a finding of precision,
# maybe, at 12 splats). Bounds, true bug: the two atomics of means have no mask (rasterize_to_pixels_bwd.py:279-280),
# while those of all else have one: where the number of splats of a tile is no multiple of 8, zeros are added beyond the
# end of the gradient of means. No layouts: all is copied. Values here keep off both thresholds (alpha < 1/255, T <
# 1e-4).
GSPLAT.add(
    "gsplat_rasterize",
    lambda means, conics, *others: _splats(means, _definite(conics), *others),
    lambda means, conics, *others: _blended(means, _definite(conics), *others),
    dict(
        means=rg.tensor(1, "N", 2, low=1.0, high=6.0),
        conics=rg.tensor(1, "N", 3, low=0.04, high=0.06),
        colors=rg.tensor(1, "N", 4),
        opacity=rg.tensor(1, "N", low=0.3, high=0.5),
        background=rg.tensor(1, 4),
    ),
    sizes=dict(N=[8, 1, 12, 5]),
    dtypes=SINGLE,
)

# johanwind/wind_rwkv: wind_rwkv/rwkv7/triton_bighead.py. bfloat16, contiguous, steps and heads by 16 (all asserted).

_WIND = {name: f"johanwind/wind_rwkv/{name.replace('.', '/')}" for name in ("wind_rwkv", "wind_rwkv.rwkv7")}


def _rwkv7(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    """S = S diag(exp(-exp(w))) + (S a) b^T + v k^T, y = S q; [B, T, H, C], state [B, H, C, C] (rows are values)."""
    *steps, state = inputs
    rows = []
    for q, w, k, v, a, b in zip(*(x.unbind(1) for x in steps), strict=True):
        decay = torch.exp(-torch.exp(w))
        state = (
            state * decay[..., None, :] + (state @ a[..., None]) * b[..., None, :] + v[..., :, None] * k[..., None, :]
        )
        rows.append((state @ q[..., None])[..., 0])
    return torch.stack(rows, 1), state


_HEADS = rg.tensor("B", "16*T", "H", "16*C", scale=0.3)
# expected: right within bfloat16 for w as RWKV-7 has it (below -0.5), contiguous: dots in float32, barriers between
# what is stored and loaded. True bug: dy and the gradient of the state are read as if contiguous, without the assert
# that the forward has (triton_bighead.py:362-370): an expanded one (y.sum().backward()) is read beyond its end.
# Extremes: products of decays over 16 steps underflow for larger w, and 1/0 * 0 is NaN: true, by design of such
# kernels. Of the tuner's three blocks those that do not divide the head fail to compile, which it takes for slow.
WIND.add(
    "windrwkv_rwkv7",
    lambda q, w, k, v, a, b, s: within(_WIND, apply("wind_rwkv.rwkv7.triton_bighead", "RWKV7_bighead"))(
        q, w, k, v, a, b, s, "fp32"
    ),
    _rwkv7,
    dict(
        q=_HEADS,
        w=rg.tensor("B", "16*T", "H", "16*C", low=-3.0, high=-0.5),
        k=_HEADS,
        v=_HEADS,
        a=rg.tensor("B", "16*T", "H", "16*C", scale=0.15),
        b=rg.tensor("B", "16*T", "H", "16*C", scale=0.15),
        s=rg.tensor("B", "H", "16*C", "16*C", scale=0.3),
    ),
    sizes=dict(B=[2, 1], T=[2, 1, 3], H=[2, 1], C=[1, 2]),
    dtypes=("bfloat16",),
    layouts="contiguous",
)

# NVIDIA/NeMo: nemo/collections/asr/parts/k2/rnnt_logprobs_triton.py. Contiguous logits (asserted).

_NEMO = {
    name: f"NVIDIA/NeMo/{name.replace('.', '/')}"
    for name in (
        "nemo",
        "nemo.collections",
        "nemo.collections.asr",
        "nemo.collections.asr.parts",
        "nemo.collections.asr.parts.k2",
    )
}


def _spans(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Frames and labels of each in the batch, the first all of them."""
    number = torch.arange(len(logits), device=logits.device)
    return logits.shape[1] - number % logits.shape[1], logits.shape[2] - 1 - number % logits.shape[2]


def _scores(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log probabilities of labels and of the blank (0), [B, T, U + 1]; 0 beyond the lengths (docstring)."""
    frames, count = _spans(logits)
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    t, u = (torch.arange(n, device=logits.device) for n in logits.shape[1:3])
    inside = (t[:, None] < frames[:, None, None]) & (u <= count[:, None, None])
    logp = log_softmax(logits)
    chosen = F.pad(targets, (0, 1))[:, None, :, None].expand(*logits.shape[:3], 1)
    label = torch.where(inside & (u < count[:, None, None]), logp.gather(-1, chosen)[..., 0], 0.0)
    return label, torch.where(inside, logp[..., 0], 0.0)


# expected: values right in both dtypes. True bug: neither gradient of the two outputs is made contiguous before it is
# read by flat indices (rnnt_logprobs_triton.py:119, 121, 221-222): an expanded one (.sum().backward()) is read beyond
# its end, a transposed one wrongly. A target that is the blank would lose the blank's part (line 126), and is not
# drawn.
NEMO.add(
    "nemo_rnnt_logprobs",
    lambda logits, targets: within(_NEMO, apply("nemo.collections.asr.parts.k2.rnnt_logprobs_triton", "RnntLogProbs"))(
        logits, targets, 0, *_spans(logits)
    ),
    _scores,
    dict(logits=rg.tensor("B", "T", "U+1", "V"), targets=rg.tensor("B", "U", dtype="int64", low=1, high="V")),
    sizes=dict(B=[3, 1], T=[5, 1, 2], U=[3, 1, 2], V=[6, 2, 130]),
    layouts="contiguous",
)

# zhixuan-lin/forgetting-transformer: src/forgetting_transformer. Heads of 16, 32, 64 or 128 (asserted).

_FORGETTING = {
    name: f"zhixuan-lin/forgetting-transformer/src/{name.replace('.', '/')}"
    for name in (
        "forgetting_transformer",
        "forgetting_transformer.ops",
        "forgetting_transformer.model",
        "forgetting_transformer.model.forgetting_transformer",
    )
}


def _shifted(x: Tensor, previous: Tensor, current: Tensor) -> Tensor:
    """out_t = c_t x_t + p_t x_{t-1}, x before the first is 0 (its test); [B, T, H, D], weights [B, T, H]."""
    return x * current[..., None] + F.pad(x, (0, 0, 0, 0, 1, 0))[:, :-1] * previous[..., None]


# expected: contiguous right in both dtypes. True bug: `assert dout.stride() == x.stride()` (token_shift.py:209) fails
# for what autograd gives, an expanded grad_out (.sum().backward()), a transposed one: AssertionError that no user can
# avoid. Layouts: inputs whose strides empty_like does not keep (cut out, expanded) raise AssertionError in the forward,
# as do weights of different strides: refusals without a word in the documentation.
FORGETTING.add(
    "forgetting_token_shift",
    within(_FORGETTING, apply("forgetting_transformer.model.forgetting_transformer.token_shift", "TokenShift")),
    _shifted,
    dict(x=rg.tensor("B", "T", "H", "16*D"), previous=rg.tensor("B", "T", "H"), current=rg.tensor("B", "T", "H")),
    sizes=dict(B=(1, 2), T=[9, 1, 40], H=[3, 1], D=[1, 2]),
)


def _forgetful(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    """softmax_j<=i(q_i k_j / sqrt(D) + sum_{j<l<=i} log f_l) v: Forgetting Transformer, eq. 5; [B, H, T, D]."""
    total = gates.cumsum(-1).to(q.dtype)
    scores = q @ k.mT * q.shape[-1] ** -0.5 + total[..., :, None] - total[..., None, :]
    return softmax(causal(scores)) @ v


def _forgetting(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    function = apply("forgetting_transformer.ops.forgetting_attention", "ForgettingAttention")
    extra = (None, True, None, None, False, False, None, False, False)
    return within(_FORGETTING, function)(q, k, v, gates.float(), *extra)  # logarithms: no function of ours before it


# expected: right within the dtype (its API takes halves alone, gates in float32), of all layouts: strides are used, of
# grad_out too. `loads`: rows of q, k, v, grad_out, l and delta beyond the last are loaded without `other` and enter
# dots, times 0, where T is no multiple of the block (forgetting_attention.py:632, 1033-1034, 1069, 1098, 1227-1228,
# 1279-1280).
FORGETTING.add(
    "forgetting_attention",
    _forgetting,
    lambda q, k, v, gates: _forgetful(q, k, v, gates.float() if gates.dtype == torch.bfloat16 else gates),
    {name: rg.tensor("B", "H", "T", "16*D") for name in "qkv"}
    | dict(gates=rg.tensor("B", "H", "T", low=-3.0, high=-0.05)),
    sizes=dict(B=(1, 2), H=[2, 1], T=[40, 2, 64, 70], D=[1, 2]),
    dtypes=("bfloat16", "float16"),
)

# Supercomputing-System-AI-Lab/MegaFold: megafold/model.

_MEGAFOLD = {
    name: f"Supercomputing-System-AI-Lab/MegaFold/{name.replace('.', '/')}"
    for name in (
        "megafold",
        "megafold.model",
        "megafold.model.FusedTransition",
        "megafold.model.FusedLayernormLinear",
    )
}
# expected: values and first gradients right. True bug: the backward writes the gradient over the saved input
# (fused_transition.py:51-52), which is the user's own tensor where that is contiguous: mutation of x, and a second
# backward is wrong. Layouts right else: both are copied (ensure_contiguous).
MEGAFOLD.add(
    "megafold_swiglu",
    within(_MEGAFOLD, apply("megafold.model.FusedTransition.fused_transition", "FusedSwiGLUFunction")),
    lambda x: F.silu(x.chunk(2, -1)[1]) * x.chunk(2, -1)[0],
    dict(x=rg.tensor("M", "2*N")),
    sizes=dict(M=(1, 20), N=[33, 1, 64]),
)
# expected: true bug where K is no power of two: the variance adds (0 - mean)^2 for each masked column
# (fused_layernorm_linear.py, _first_forward_kernel: X_row is loaded with other=0.0 and mean subtracted unmasked), so
# that values and all gradients are wrong where a row's mean is not 0; at K = 64 right. Products in tf32 in float32. In
# bfloat16 mean and rstd are kept in bfloat16, and sums of a row are in bfloat16: precision. Sums by atomics: not fixed.
MEGAFOLD.add(
    "megafold_layernorm_linear",
    lambda x, w, b, scale, shift: within(
        _MEGAFOLD, apply("megafold.model.FusedLayernormLinear.fused_layernorm_linear", "LayernormLinearFunction")
    )(x, w, b, scale, shift, True, True),
    lambda x, w, b, scale, shift: layer(x, scale, shift) @ w + b,
    dict(
        x=MATRIX,
        w=rg.tensor("N", "O", scale=0.2),
        b=rg.tensor("O"),
        scale=rg.tensor("N"),
        shift=rg.tensor("N"),
    ),
    sizes=dict(M=[20, 1, 33], N=[64, 2, 24], O=[17, 1, 32]),  # the last is the ordinary one
)
