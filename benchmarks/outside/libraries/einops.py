"""Specs of einops: functions and layers, beside permute, reshape and einsum of PyTorch."""

from __future__ import annotations

import torch
from describe import add, module
from einops import einsum, pack, rearrange, reduce, repeat, unpack
from einops.layers.torch import EinMix, Rearrange, Reduce

from retrograd import tensor as t

IMAGE = dict(x=t("B", "C", 6, 4))
add("einops.rearrange", lambda x: rearrange(x, "b c (h p) (w q) -> b (h w) (p q c)", p=2, q=2),
    lambda x: x.reshape(*x.shape[:2], 3, 2, 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(x.shape[0], 6, 4 * x.shape[1]), IMAGE)  # fmt: skip
add(
    "einops.repeat",
    lambda x: repeat(x, "m n -> m n k", k=3),
    lambda x: x[..., None].expand(*x.shape, 3),
    dict(x=t("M", "N")),
)
for kind in ("sum", "mean", "max", "min", "prod"):
    plain = {"max": torch.amax, "min": torch.amin}.get(kind)
    add(f"einops.reduce.{kind}", lambda x, k=kind: reduce(x, "b c (h p) (w q) -> b h w c", k, p=2, q=2),
        (lambda x, f=plain: f(x.reshape(*x.shape[:2], 3, 2, 2, 2), (3, 5)).permute(0, 2, 3, 1)) if plain else
        (lambda x, k=kind: getattr(torch, k)(getattr(torch, k)(x.reshape(*x.shape[:2], 3, 2, 2, 2), 5), 3).permute(0, 2, 3, 1)),
        IMAGE)  # fmt: skip
add("einops.layers.Rearrange", Rearrange("b c h w -> b (h w c)"), lambda x: x.permute(0, 2, 3, 1).reshape(x.shape[0], -1),
    IMAGE, sizes=dict(B=(1, 9), C=(1, 50)))  # fmt: skip
add("einops.layers.Reduce", Reduce("b c h w -> b c", "mean"), lambda x: x.mean((2, 3)), IMAGE)
add(
    "einops.einsum",
    lambda x, y: einsum(x, y, "b q d, b k d -> b q k"),
    lambda x, y: x @ y.mT,
    dict(x=t("B", "Q", "D"), y=t("B", "K", "D")),
)


def through_pack(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    joined, shapes = pack([x, y], "m *")
    return unpack(joined * 2, shapes, "m *")


add(
    "einops.pack",
    through_pack,
    lambda x, y: [x * 2, y * 2],
    dict(x=t("M", "N"), y=t("M", 3, 2)),
    sizes=dict(M=(1, 99), N=(1, 99)),
)
module(
    "einops.layers.EinMix",
    lambda: EinMix("b t c -> b t d", weight_shape="c d", bias_shape="d", c=6, d=5),
    dict(x=t("B", "T", 6)),
)
module(
    "einops.layers.EinMix.heads",
    lambda: EinMix("b t (h c) -> b h t d", weight_shape="h c d", h=2, c=3, d=4),
    dict(x=t("B", "T", 6)),
)
