"""Specs of ops of seven packages that nobody had run here, as they came: freesolo-chalk, gru-qat, mlstm-kernels, ...

Each ran without a GPU at first sight. Formulas are our own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from specs import SINGLE, of, registries
from torch import Tensor

import retrograd as rg

LATEST = registries(
    {
        "chalk": "freesolo-chalk==0.5.7",
        "flashswiglu": "flash-swiglu-mlp==0.4.3",
        "gru": "gru-qat==0.5.0",
        "kernelfun": "kernel-fun==0.2.0",
        "orda": "orda-kernel==0.1.0",
        "mlstm": "mlstm-kernels==2.0.6",
        "lasp": "lasp==0.0.1",
    }
)
CHALK, SWIGLU, GRU, KERNELFUN, ORDA, MLSTM, LASP = LATEST.values()
_MATRIX, _ROW = rg.tensor("M", "N"), rg.tensor("N")


@cache
def _built(module: str, builder: str, *args: Any) -> Any:
    """What chalk makes of its kernels, which it keeps itself once its own test on a GPU has passed."""
    return getattr(import_module(f"chalk.ops.{module}"), builder)(*args)


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _halves_turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + _halves_turned(x) * sin


for name, gemma in (("gemma", True), ("llama", False)):
    CHALK.add(
        f"chalk_rmsnorm_{name}",
        lambda x, w, gemma=gemma: _built("rmsnorm", "_build_kernels", gemma)(x, w, 1e-6),
        lambda x, w, gemma=gemma: _normed(x) * (w + gemma),
        dict(x=_MATRIX, w=_ROW),
    )
CHALK.add(
    "chalk_swiglu",
    lambda gate, up: _built("swiglu", "_build_kernels")(gate, up),
    lambda gate, up: F.silu(gate) * up,
    dict(gate=_MATRIX, up=_MATRIX),
)
CHALK.add(
    "chalk_gated_rmsnorm",
    lambda x, w, z: _built("gdn", "_build_gated_rmsnorm_kernels")(x, w, z, 1e-6),
    lambda x, w, z: _normed(x) * w * F.silu(z),
    dict(x=_MATRIX, w=_ROW, z=_MATRIX),
)
CHALK.add(
    "chalk_out_gate",
    of("chalk.ops.qkv", "out_gate"),
    lambda x, gate: x * torch.sigmoid(gate),
    dict(x=_MATRIX, gate=_MATRIX),
)


def _causal_conv(x: Tensor, w: Tensor) -> Tensor:
    """SiLU of a depthwise convolution of x (B, C, L) with w (C, taps), none of which reads later steps."""
    return F.silu(F.conv1d(F.pad(x, (w.shape[1] - 1, 0)), w[:, None], groups=w.shape[0]))


CHALK.add(
    "chalk_gdn_conv",
    lambda x, w: _built("gdn", "_build_conv_kernels")(x, w),
    _causal_conv,
    dict(x=rg.tensor("B", "C", "L"), w=rg.tensor("C", 4)),
)
CHALK.add(
    "chalk_lora",
    lambda x, a, b: of("chalk.ops.lora", "fused_lora")(x, a, b, 0.5),
    lambda x, a, b: (x @ a.mT @ b.mT) * 0.5,
    dict(x=rg.tensor("M", "K"), a=rg.tensor("R", "K"), b=rg.tensor("N", "R")),
    sizes=dict(M=[32, 17], K=[64], R=[16], N=[48]),
)
_ANGLES = rg.tensor("M", 32, grad=False)


def _qknorm_rope(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, kept = (_normed(x) * (1 + w)).split([32, 32], -1)
    return torch.cat([_rope(turned, cos[:, None], sin[:, None]), kept], -1)


CHALK.add(
    "chalk_qknorm_rope",
    of("chalk.ops.qkv", "qknorm_rope"),
    _qknorm_rope,
    dict(x=rg.tensor("M", "H", 64), w=rg.tensor(64), cos=_ANGLES, sin=_ANGLES),
)
_TURNS = rg.tensor("B", "T", 32, grad=False)
CHALK.add(
    "chalk_rope",
    lambda q, k, cos, sin: _built("rope", "_build_kernels")(q, k, cos, sin),
    lambda q, k, cos, sin: tuple(_rope(x, cos[:, None], sin[:, None]) for x in (q, k)),
    dict(q=rg.tensor("B", "H", "T", 32), k=rg.tensor("B", "G", "T", 32), cos=_TURNS, sin=_TURNS),
)


def _grpo(hidden: Tensor, w: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """As the docstring of chalk.ops.grpo_loss has it, with a penalty of 0.04."""
    logs = (hidden @ w.mT).float().log_softmax(-1)
    penalty = (logs.exp() * logs).sum(-1) + math.log(w.shape[0])
    each = 0.04 * penalty - advantages * logs.mean(-1)
    return (mask * each).sum() / mask.sum().clamp(min=1)


_HIDDEN, _VOCABULARY = rg.tensor("M", "K"), rg.tensor("V", "K")
_TOKENS = rg.tensor("M", dtype="int64", low=0, high="V")
CHALK.add(
    "chalk_grpo_loss",
    of("chalk.ops.grpo_loss", "fused_linear_grpo_loss_entry"),
    _grpo,
    dict(hidden=_HIDDEN, w=_VOCABULARY, advantages=rg.tensor("M"), mask=rg.tensor("M", low=0.0, high=1.0, grad=False)),
    dtypes=SINGLE,
)
CHALK.add(
    "chalk_flce",
    lambda hidden, w, tokens: _built("flce", "_build_kernels")(hidden, w, tokens),
    lambda hidden, w, tokens: F.cross_entropy(hidden @ w.mT, tokens),
    dict(hidden=_HIDDEN, w=_VOCABULARY, tokens=_TOKENS),
    dtypes=SINGLE,
)
SWIGLU.add(
    "flash_swiglu_mlp",
    of("flash_swiglu_mlp.ops", "flash_swiglu"),
    lambda x, gate, up, down: (F.silu(x @ gate.mT) * (x @ up.mT)) @ down.mT,
    dict(x=rg.tensor(2, "S", "D"), gate=rg.tensor("H", "D"), up=rg.tensor("H", "D"), down=rg.tensor("D", "H")),
    sizes=dict(S=[16, 9], D=[32, 64], H=[64]),
)


def _gru(steps: Tensor, h: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """States of a GRU of 32 numbers, from what each step brings (T, B, 96); w is (96, 32), or its diagonals (3, 32)."""
    states = []
    for step in steps:
        own = (h @ w.mT if len(w) == 96 else (h[:, None] * w).flatten(1)) + bias
        (r, z, n), (own_r, own_z, own_n) = step.chunk(3, -1), own.chunk(3, -1)
        r, z = torch.sigmoid(r + own_r), torch.sigmoid(z + own_z)
        h = (1 - z) * torch.tanh(n + r * own_n) + z * h
        states.append(h)
    return torch.stack(states)


for module, name, rows in (("scan", "gru_scan", 96), ("scan_diagonal", "gru_scan_diagonal", 3)):
    GRU.add(
        name,
        of(f"gru_qat.triton_kernels.{module}", name),
        _gru,
        dict(steps=rg.tensor("T", "B", 96), h=rg.tensor("B", 32), w=rg.tensor(rows, 32), bias=rg.tensor(96)),
        sizes=dict(T=[5, 1, 8], B=[4, 16]),
        dtypes=SINGLE,
    )


def _strip(x: Tensor, w: Tensor) -> Tensor:
    ops = import_module("kernel_fun.cconv.ops")
    ops._FN = ops._FN or ops._make_fn()
    return ops._FN.apply(x, w, ("a shape",))


KERNELFUN.add(
    "kernelfun_causal_conv1d",
    _strip,
    lambda x, w: _causal_conv(x.mT, w).mT,
    dict(x=rg.tensor("B", "T", "D"), w=rg.tensor("D", 4)),
    sizes=dict(D=[64]),
    dtypes=("bfloat16",),
)


def _distilled(hidden: Tensor, w: Tensor, teacher: Tensor, tokens: Tensor) -> Tensor:
    api = import_module("orda_kernel.api")
    options = dict(student_ce_weight=1.0, teacher_ce_weight=0.0, kl_weight=0.5, backend="triton")
    return api.distillation_loss(hidden, w, tokens, api.TiedTeacher(teacher), **options).loss


def _distillation(hidden: Tensor, w: Tensor, teacher: Tensor, tokens: Tensor) -> Tensor:
    """The teacher shares the head, and takes it for a constant."""
    scores = hidden @ w.mT
    apart = (teacher @ w.detach().mT).log_softmax(-1)
    divergence = (apart.exp() * (apart - scores.log_softmax(-1))).sum(-1).mean()
    return F.cross_entropy(scores, tokens) + 0.5 * divergence


ORDA.add(
    "orda_tied_frozen",
    _distilled,
    _distillation,
    dict(hidden=_HIDDEN, w=_VOCABULARY, teacher=rg.tensor("M", "K", grad=False), tokens=_TOKENS),
    sizes=dict(M=[16, 5], K=[32], V=[64, 50]),
    dtypes=SINGLE,
    surrogate=True,
)


def _mlstm(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, *, sigmoid: bool = False, normalised: bool = True,
    whole: bool = False,
) -> Tensor:  # fmt: skip
    """[B, H, S, K or V], gates [B, H, S]. The backward of these takes what it divides by for a constant, but `whole`.

    A norm behind it makes that right, as it asks for no scale.
    """
    sums = F.logsigmoid(f).cumsum(-1)
    decay = sums[..., :, None] - sums[..., None, :] + (F.logsigmoid(i) if sigmoid else i)[..., None, :]
    earlier = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    decay = torch.where(earlier, decay, -torch.inf)  # [B, H, S, S]
    largest = torch.zeros((), dtype=q.dtype) if sigmoid else decay.max(-1, keepdim=True).values
    largest = largest if whole else largest.detach()
    scores = (q @ k.mT) * q.shape[-1] ** -0.5 * (decay - largest).exp()
    if not normalised:
        return scores @ v
    size = torch.maximum(scores.sum(-1, keepdim=True).abs(), (-largest).exp())
    return scores / ((size if whole else size.detach()) + 1e-6) @ v


def _of_mlstm(kernel: str, **options: Any) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
        function = import_module("mlstm_kernels.torch").get_mlstm_kernel(kernel)
        return function(q=q, k=k, v=v, i=i, f=f, autocast_kernel_dtype=q.dtype, **options)

    return call


_KEYS, _VALUES, _GATES = rg.tensor("B", "H", "S", "K"), rg.tensor("B", "H", "S", "V"), rg.tensor("B", "H", "S")
_MIXED = dict(q=_KEYS, k=_KEYS, v=_VALUES, i=_GATES, f=rg.tensor("B", "H", "S", low=-2.0, high=6.0))
_CHUNKS = dict(B=[2, 1], H=[2, 1, 3], S=[64, 128], K=[32, 16, 64], V=[32, 16, 64])  # what is no whole chunk is refused
_OPTIONS: tuple[tuple[str, str, dict[str, Any], dict[str, Any]], ...] = (
    ("mlstm_xl_chunk", "chunkwise--triton_xl_chunk", {}, {}),
    ("mlstm_limit_chunk", "chunkwise--triton_limit_chunk", {}, {}),
    ("mlstm_limit_chunk_whole", "chunkwise--triton_limit_chunk", {}, dict(whole=True)),
    ("mlstm_siging", "chunkwise--triton_xl_chunk_siging", {}, dict(sigmoid=True)),
    (
        "mlstm_siging_plain", "chunkwise--triton_xl_chunk_siging", dict(normalize=False),
        dict(sigmoid=True, normalised=False),
    ),
)  # fmt: skip
for name, kernel, options, formula in _OPTIONS:
    exact = bool(formula.get("whole")) or not formula.get("normalised", True)
    function = _of_mlstm(kernel, chunk_size=64, **options)
    MLSTM.add(name, function, partial(_mlstm, **formula), _MIXED, sizes=_CHUNKS, surrogate=not exact)
MLSTM.add(
    "mlstm_limit_headdim",
    _of_mlstm("parallel--triton_limit_headdim"),
    _mlstm,
    _MIXED | dict(v=_KEYS),
    sizes=dict(B=[2, 1], H=[2, 1, 3], S=[64, 128], K=[32, 64]),
    surrogate=True,
)


def _decayed(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
    """Causal q k v, by exp(-s) less a step; [B, H, T, D], s [H]."""
    steps = torch.arange(q.shape[2], device=q.device)
    apart = (steps[:, None] - steps).clamp_min(0)
    return ((q @ k.mT).tril() * (-s[:, None, None] * apart).exp()) @ v


_LASP_KEYS, _LASP_VALUES = rg.tensor("B", "H", "T", "D"), rg.tensor("B", "H", "T", "E")
LASP.add(
    "lasp_lightning_attention",
    of("lasp.lightning_attention", "lightning_attn"),
    _decayed,
    dict(
        q=_LASP_KEYS, k=_LASP_KEYS, v=_LASP_VALUES,
        s=rg.tensor("H", low=0.01, high=0.5, grad=False, dtype="float32"),
    ),
    sizes=dict(B=[2, 1], H=[2, 1, 3], T=[70, 64, 128, 33], D=[32, 16, 64], E=[32, 16, 64]),
)  # fmt: skip
