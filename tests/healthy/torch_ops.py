"""Common ops of torch.nn.functional and others, at ordinary and at hard inputs: kinks, one column, large means, scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from retrograd.check.spec import OpSpec, op, tensor

X = tensor("M...", "N")
ROWS = dict(x=tensor("B", "C", "L"))
SMALL = dict(B=(1, 3), C=(1, 4), L=(4, 32))
FILLED = dict(N=(1, 64))
IMAGE = dict(x=tensor("B", "C", "H", "W"))
PICTURES = dict(B=(1, 2), C=(1, 4), H=(4, 10), W=(4, 10))

HEALTHY: dict[str, OpSpec] = {}


def itself(name: str, fn: Callable[..., Any], inputs: Any = None, **options: Any) -> None:
    """An op of PyTorch's own, which in float64 is its own reference."""
    HEALTHY[name] = op(fn, fn, inputs or dict(x=X), name=name, **options)


def _layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _large_mean(x: Tensor) -> Tensor:
    return _layer_norm(x + 1000)


# --- Pointwise, smooth and with kinks -----------------------------------------------------

itself("tanh", torch.tanh)
itself("sigmoid", torch.sigmoid)
itself("softplus", F.softplus)
itself("mish", F.mish)
itself("elu", F.elu)
itself("selu", F.selu)
itself("leaky_relu", F.leaky_relu)
itself("relu6", F.relu6)
itself("hardtanh", F.hardtanh)
itself("hardswish", F.hardswish)
itself("hardsigmoid", F.hardsigmoid)
itself("softshrink", F.softshrink)
itself("logsigmoid", F.logsigmoid)
itself("prelu", F.prelu, dict(x=tensor("M", "N"), slope=tensor("N")), sizes=dict(N=(2, 64)))
itself("glu", F.glu, dict(x=tensor("M", "E")), sizes=dict(E=[2, 8, 64]))
itself("clamp", lambda x: x.clamp(-0.5, 0.5))
itself("maximum", torch.maximum, dict(x=X, y=X))

# --- Norms and reductions at hard inputs -------------------------------------------------------

itself("layer_norm_one_column", _layer_norm, dict(x=tensor("M", "N")), sizes=dict(N=1))
itself("layer_norm_large_mean", _large_mean, dict(x=tensor("M", "N")), sizes=dict(N=(2, 64)))
itself("layer_norm_scales", _layer_norm, dict(x=tensor("M", "N", scale=(1e-6, 1e4))), sizes=dict(N=(2, 64)))
itself("softmax_scales", lambda x: x.softmax(-1), dict(x=tensor("M", "N", scale=(1e-6, 1e4))), sizes=FILLED)
itself("logsumexp_large_mean", lambda x: (x + 1000).logsumexp(-1), sizes=FILLED)
itself("normalize", lambda x: F.normalize(x, dim=-1), dict(x=tensor("M", "N")), sizes=dict(N=(2, 64)))
itself("cosine_similarity", F.cosine_similarity, dict(x=tensor("M", "N"), y=tensor("M", "N")), sizes=dict(N=(2, 64)))
itself("variance", lambda x: x.var(-1, correction=0), sizes=FILLED)
itself("cumprod", lambda x: x.cumprod(-1), dict(x=tensor("M", "N")), sizes=dict(N=(1, 8)))
itself("sort", lambda x: x.sort(-1).values, dict(x=tensor("M", "N")), sizes=FILLED)
itself("topk", lambda x: x.topk(2).values, dict(x=tensor("M", "N")), sizes=dict(N=(2, 32)))
itself("batch_norm", lambda x: F.batch_norm(x, None, None, training=True), ROWS, sizes=SMALL)
itself("instance_norm", F.instance_norm, ROWS, sizes=SMALL)

# --- Losses --------------------------------------------------------------------------------

CLASSES = dict(logits=tensor("M", "C"), target=tensor("M", dtype="int64", low=0, high="C"))
itself("cross_entropy_smoothed", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1, reduction="none"), CLASSES,
       sizes=dict(C=(2, 32)))  # fmt: skip
itself("cross_entropy_ignored", lambda x, t: F.cross_entropy(x, t, ignore_index=0, reduction="sum"), CLASSES,
       sizes=dict(C=(2, 32)))  # fmt: skip
itself("cross_entropy_mean_of_kept", lambda x, t: F.cross_entropy(x, t, ignore_index=0, reduction="sum")
       / (t != 0).sum().clamp_min(1), CLASSES, sizes=dict(C=(2, 32)))  # fmt: skip
itself("mse", lambda x, y: F.mse_loss(x, y, reduction="none"), dict(x=X, y=X))
itself("l1", lambda x, y: F.l1_loss(x, y, reduction="none"), dict(x=X, y=X))
itself("huber", lambda x, y: F.huber_loss(x, y, reduction="none"), dict(x=X, y=X))
itself("bce_with_logits", lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"),
       dict(x=X, y=tensor("M...", "N", low=0.0, high=1.0, grad=False)))  # fmt: skip

# --- Convolution, pooling, resampling, products, indices ---------------------------------------

CONV = dict(x=tensor("B", "C", "H", "W"), weight=tensor("K", "C", 3, 3), bias=tensor("K"))
itself("conv2d", lambda x, w, b: F.conv2d(x, w, b, padding=1), CONV, sizes=PICTURES | dict(K=(1, 4)))
itself("conv1d_dilated", lambda x, w: F.conv1d(x, w, padding=2, dilation=2),
       dict(x=tensor("B", "C", "L"), weight=tensor("K", "C", 3)), sizes=SMALL | dict(K=(1, 4)))  # fmt: skip
itself("conv_transpose1d", lambda x, w: F.conv_transpose1d(x, w, stride=2),
       dict(x=tensor("B", "C", "L"), weight=tensor("C", "K", 3)), sizes=SMALL | dict(K=(1, 4)))  # fmt: skip
itself("avg_pool2d", lambda x: F.avg_pool2d(x, 3, stride=2, padding=1), IMAGE, sizes=PICTURES)
itself("max_pool2d", lambda x: F.max_pool2d(x, 2), IMAGE, sizes=PICTURES)
itself("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 3), ROWS, sizes=SMALL)
itself("interpolate", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), IMAGE, sizes=PICTURES)
itself("pad_reflect", lambda x: F.pad(x, (2, 1), mode="reflect"), ROWS, sizes=SMALL)
itself("einsum", lambda x, w: torch.einsum("bmk,kn->bmn", x, w), dict(x=tensor("B", "M", "K"), w=tensor("K", "N")),
       sizes=dict(B=(1, 3), M=(1, 16), K=(1, 16), N=(1, 16)))  # fmt: skip
itself("bilinear", F.bilinear, dict(x=tensor("M", "K"), y=tensor("M", "L"), weight=tensor("N", "K", "L")),
       sizes=dict(M=(1, 16), K=(1, 8), L=(1, 8), N=(1, 8)))  # fmt: skip
itself("attention_causal", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
       {name: tensor("B", "Q", "D") for name in ("query", "key", "value")},
       sizes=dict(B=(1, 3), Q=(1, 16), D=(1, 16)))  # fmt: skip
itself("embedding_bag", lambda table, index: F.embedding_bag(index, table, mode="sum"),
       dict(table=tensor("V", "N"), index=tensor("M", 3, dtype="int64", low=0, high="V")),
       sizes=dict(V=(1, 24), N=(1, 16), M=(1, 16)))  # fmt: skip
itself("gather", lambda x, index: x.gather(1, index),
       dict(x=tensor("M", "N"), index=tensor("M", 3, dtype="int64", low=0, high="N")), sizes=dict(N=(1, 64)))  # fmt: skip
