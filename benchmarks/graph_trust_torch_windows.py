"""Pairs of graphs of models with windows: strides, sizes, paddings and dilations, and what is shaped by them.

    python benchmarks/graph_trust_torch_windows.py FOLDER    # needs torch

For `graph_trust.py`. Each pair as Dynamo's graph, joint graph, forward and backward, as far as these differ. Programs,
changes and what is expected were written, and frozen in a commit, before any result.
"""

from __future__ import annotations

import torch
from graph_trust_pairs import Options, Pair, Texts, main
from graph_trust_torch import graphs
from torch import nn
from torch.nn import functional as F


def classified(o: Options) -> Texts:
    """Two convolutions and a pool, flattened, two layers."""
    pool = nn.MaxPool2d if o.get("max", True) else nn.AvgPool2d
    image = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=o.get("stride", 1), padding=o.get("pad", 1)), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 6, 3, padding=1, dilation=o.get("dilation", 1)), nn.Tanh(),
        pool(o.get("size", 2), o.get("step", 2), o.get("around", 0)), nn.Flatten(),
    )  # fmt: skip
    x, wide = torch.randn(4, 3, o.get("image", 14), o.get("image", 14)), o.get("wide", 12)
    flat = image(x).shape[1]
    head = nn.Sequential(nn.Linear(flat, wide), nn.GELU(), nn.Linear(wide, 5))
    return graphs(lambda x, y: F.cross_entropy(head(image(x)), y), x, torch.tensor([0, 1, 2, 3]))


def heard(o: Options) -> Texts:
    """Sound: convolutions along time, a table of places, a recurrence of gates, the mean."""
    first = nn.Conv1d(1, 6, 5, stride=o.get("stride", 2), padding=o.get("pad", 2))
    second = nn.Conv1d(6, 6, 3, padding=1, groups=2)
    x = torch.randn(3, 1, 40)
    places = nn.Parameter(torch.randn(6, F.avg_pool1d(first(x), o.get("size", 2), o.get("step", 2)).shape[2]))
    gate, end = nn.Linear(6, o.get("wide", 10)), nn.Linear(o.get("wide", 10), 2)

    def f(x: torch.Tensor) -> torch.Tensor:
        h = F.avg_pool1d(F.relu(first(x)), o.get("size", 2), o.get("step", 2)) + places
        h = h + F.silu(second(h))
        return end(torch.sigmoid(gate(h.mT)).mean(1)).square().mean()

    return graphs(f, x)


def patched(o: Options) -> Texts:
    """A transformer of patches, with a token that is its own and places for all."""
    cut = nn.Conv2d(3, 8, 4, stride=o.get("stride", 4), padding=o.get("pad", 0))
    x = torch.randn(2, 3, 16, 16)
    count = cut(x).flatten(2).shape[2]
    own, places = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.randn(1, count + 1, 8))
    layer = nn.TransformerEncoderLayer(8, 2, o.get("wide", 16), dropout=0.0, batch_first=True, norm_first=True)
    end = nn.Linear(8, 4)

    def f(x: torch.Tensor) -> torch.Tensor:
        h = cut(x).flatten(2).mT
        h = torch.cat([own.expand(h.shape[0], -1, -1), h], 1) + places
        return end(layer(h)[:, 0]).square().mean()

    return graphs(f, x)


def rebuilt(o: Options) -> Texts:
    """An autoencoder with a code of a few numbers: flattened, and back by a transposed convolution."""
    down = nn.Conv2d(1, 4, 3, stride=o.get("stride", 2), padding=1)
    x = torch.randn(2, 1, 12, 12)
    shape = down(x).shape[1:]
    code, back = nn.Linear(shape.numel(), o.get("code", 5)), nn.Linear(o.get("code", 5), shape.numel())
    up = nn.ConvTranspose2d(4, 1, 4 if o.get("stride", 2) == 2 else 3, stride=o.get("stride", 2), padding=1)

    def f(x: torch.Tensor) -> torch.Tensor:
        h = F.elu(code(F.relu(down(x)).flatten(1)))
        return (up(F.relu(back(h)).unflatten(1, shape)) - x).square().mean()

    return graphs(f, x)


def pooled(o: Options) -> Texts:
    """A mean over the image, whose shape no window changes."""
    first = nn.Conv2d(3, 6, 3, stride=o.get("stride", 1), padding=o.get("pad", 1))
    end = nn.Linear(6, 4)

    def f(x: torch.Tensor) -> torch.Tensor:
        h = F.max_pool2d(F.relu(first(x)), o.get("size", 2), o.get("step", 2))
        return end(h.mean((2, 3))).square().mean()

    return graphs(f, torch.randn(2, 3, 12, 12))


CONV, POOL = r"^[^+-].*conv\w*\b.*(?:->|replaced)", r"^[^+-].*pool\w*\b.*(?:->|replaced)"
PAIRS: list[Pair] = [
    ("classified step", classified, {}, {"step": 1}, POOL),
    ("classified average", classified, {"max": False}, {"max": False, "step": 1}, POOL),
    ("classified size", classified, {}, {"size": 3}, POOL),
    ("classified around", classified, {}, {"around": 1}, POOL),
    ("classified stride", classified, {}, {"stride": 2}, CONV),
    ("classified pad", classified, {}, {"pad": 0}, CONV),
    ("classified dilation", classified, {}, {"dilation": 2}, CONV),
    ("classified wide", classified, {}, {"wide": 20}, r"\[12.*\[20"),
    ("classified image", classified, {}, {"image": 18}, r"14,14\].*18,18\]"),
    ("classified both", classified, {}, {"step": 1, "wide": 20}, rf"{POOL}|\[12.*\[20"),
    ("heard stride", heard, {}, {"stride": 1}, CONV),
    ("heard pad", heard, {}, {"pad": 0}, CONV),
    ("heard step", heard, {}, {"step": 1}, POOL),
    ("heard size", heard, {}, {"size": 4}, POOL),
    ("heard wide", heard, {}, {"wide": 14}, r"\[10.*\[14"),
    ("patched stride", patched, {}, {"stride": 2}, CONV),
    ("patched pad", patched, {}, {"pad": 2}, CONV),
    ("patched wide", patched, {}, {"wide": 24}, r"\[16.*\[24"),
    ("rebuilt stride", rebuilt, {}, {"stride": 1}, CONV),
    ("rebuilt code", rebuilt, {}, {"code": 7}, r"\[5.*\[7|5\].*7\]"),
    ("pooled stride", pooled, {}, {"stride": 2}, CONV),
    ("pooled step", pooled, {}, {"step": 1}, POOL),
    ("pooled size", pooled, {}, {"size": 3}, POOL),
]


if __name__ == "__main__":
    main(__doc__, {"windows": PAIRS})
