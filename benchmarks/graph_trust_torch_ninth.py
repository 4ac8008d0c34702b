"""Pairs of graphs of local_attention, rotary_embedding_torch, monai, vocos, pytorch_optimizer and of RoFormer.

    python benchmarks/graph_trust_torch_ninth.py FOLDER    # needs torch, transformers and these

For `graph_trust.py`. Each pair as Dynamo's graph, joint graph, forward and backward, as far as these differ. Programs,
changes and what is expected were written, and frozen in a commit, before any result, and measured once, after what the
eighth set showed was mended.
"""

from __future__ import annotations

from typing import Any

import local_attention
import monai
import pytorch_optimizer
import rotary_embedding_torch
import torch
import transformers
import vocos.modules
from graph_trust_pairs import Options, Pair, Texts, main
from graph_trust_torch import graphs
from torch import nn
from torch.nn import functional as F


def windows(o: Options) -> Texts:
    """Attention in windows behind rotary positions."""
    size = dict(dim=8, window_size=4, causal=True, look_backward=1, dropout=0.1, autopad=True, use_rotary_pos_emb=False)
    attend = local_attention.LocalAttention(**size | o.get("attend", {})).train()
    turn = rotary_embedding_torch.RotaryEmbedding(dim=4, theta=o.get("theta", 10000), cache_if_possible=False)
    inner, outer = nn.Linear(8, 48, bias=False), nn.Linear(16, 8)

    def f(x: torch.Tensor) -> torch.Tensor:
        q, k, v = inner(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        q, k = (turn.rotate_queries_or_keys(t) for t in (q, k)) if o.get("turned", True) else (q, k)
        h = attend(q, k, v).transpose(1, 2).flatten(2)
        return (x + outer(h * o.get("gain", 1.3))).logsumexp(-1).mean()

    return graphs(f, torch.randn(2, 12, 8))


def volumes(o: Options) -> Texts:
    """A small net for volumes of monai and its loss of overlap."""
    size = dict(spatial_dims=2, in_channels=1, out_channels=2, features=(4, 4, 8, 8, 8, 4), dropout=0.1)
    net = monai.networks.nets.BasicUNet(**size | o.get("net", {})).train()
    judge = monai.losses.DiceLoss(**dict(sigmoid=True, squared_pred=False, smooth_nr=1e-5) | o.get("judge", {}))

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = net(x)
        return judge(out, y) + o.get("also", 0.6) * F.binary_cross_entropy_with_logits(out, y)

    return graphs(f, torch.randn(1, 1, 32, 32), torch.rand(1, 2, 32, 32).round())


def waves(o: Options) -> Texts:
    """Blocks of vocos, a spectrum of theirs as sound."""
    block = vocos.modules.ConvNeXtBlock(6, o.get("inner", 12), o.get("scale", 0.2))
    head = nn.Linear(6, 18)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = head(block(x).transpose(1, 2))
        size, phase = h.chunk(2, -1)
        size = size.exp().clip(max=o.get("most", 50.0))
        frames = torch.fft.irfft(torch.polar(size, phase), n=16, norm=o.get("norm", "backward"))
        return F.huber_loss(frames * torch.hann_window(16), y, delta=o.get("delta", 0.6))

    return graphs(f, torch.randn(2, 6, 5), torch.randn(2, 5, 16))


def turned(o: Options) -> Texts:
    size = dict(vocab_size=30, embedding_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                intermediate_size=12, max_position_embeddings=16, hidden_dropout_prob=0.1)  # fmt: skip
    model = transformers.RoFormerModel(transformers.RoFormerConfig(**size | o)).train()
    return graphs(lambda ids: model(ids).last_hidden_state, torch.randint(0, 30, (2, 6)))


def updated(o: Options) -> Texts:
    o = dict(o)
    model = nn.Linear(4, 3)
    kind: Any = o.pop("kind", pytorch_optimizer.Lamb)
    tuned = kind(model.parameters(), **{"lr": 0.03} | o)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return graphs(lambda: tuned.step())


belief = {"kind": pytorch_optimizer.AdaBelief}
PAIRS: list[Pair] = [
    ("windows size", windows, {}, {"attend": {"window_size": 6}}, r"4.*6|\[.*\] -> .*\["),
    ("windows looked back", windows, {}, {"attend": {"look_backward": 2}}, r"^\+ |cat|pad|1.*2|\[.*8.*\].*12"),
    ("windows theta", windows, {}, {"theta": 500}, r"parameter|freqs|10000.*500|tensor|buffer|constant|pow"),
    ("windows dropout", windows, {}, {"attend": {"dropout": 0.3}}, r"0\.1.*0\.3|1\.11.*1\.42"),
    ("volumes activation", volumes, {}, {"net": {"act": "relu"}}, r"leaky|relu|gt|where|le|threshold"),
    ("volumes norm", volumes, {}, {"net": {"norm": "batch"}}, r"instance|batch|norm|parameter"),
    ("volumes squared", volumes, {}, {"judge": {"squared_pred": True}}, r"pow|square|mul"),
    ("volumes also", volumes, {}, {"also": 0.9}, r"0\.6.*0\.9"),
    ("waves scale", waves, {}, {"scale": 0.0}, r"- .*parameter|mul|parameter|gamma"),
    ("waves most", waves, {}, {"most": 80.0}, r"50\.0.*80\.0"),
    ("waves delta", waves, {}, {"delta": 0.9}, r"0\.6.*0\.9"),
    ("turned value", turned, {}, {"rotary_value": True}, r"^\+ |mul|add|stack|replaced"),
    ("turned activation", turned, {}, {"hidden_act": "silu"}, r"gelu|silu|sigmoid|erf"),
    ("lamb decay", updated, {"weight_decay": 0.1}, {"weight_decay": 0.3},
     r"0\.1.*0\.3|0\.997.*0\.991|-0\.003.*-0\.009"),
    ("belief rectified", updated, belief, {**belief, "rectify": True}, r"sqrt|\+ |- |replaced|div|mul"),
    ("belief betas", updated, belief, {**belief, "betas": (0.8, 0.999)}, r"0\.9.*0\.8|0\.1.*0\.2"),
]  # fmt: skip


if __name__ == "__main__":
    main(__doc__, {"ninth": PAIRS})
