"""Pairs of graphs of kornia, peft, geoopt, entmax, vector_quantize_pytorch, pytorch_metric_learning and further models.

    python benchmarks/graph_trust_torch_seventh.py FOLDER    # needs torch, transformers, torchvision and these

For `graph_trust.py`. Each pair as Dynamo's graph, joint graph, forward and backward, as far as these differ. Programs,
changes and what is expected were written, and frozen in a commit, before any result. What is expected is the
operation, the value or the place that changed, in any of the forms in which torch may write it. In a backward of
AOTAutograd alone, where its forward is not seen, the shape of what is saved counts as the value.
"""

from __future__ import annotations

from typing import Any

import entmax
import geoopt
import kornia
import peft
import pytorch_metric_learning.losses as metric
import torch
import torchvision
import transformers
import vector_quantize_pytorch
from graph_trust_pairs import Options, Pair, Texts, main
from graph_trust_torch import graphs
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def images(o: Options) -> Texts:
    """A filter of kornia before a small net, a loss by structural similarity."""
    net = nn.Conv2d(2, 2, 3, padding=1)
    matrix = torch.tensor([[[0.9, 0.1, 0.0], [-0.1, 0.9, 1.0]]]).repeat(2, 1, 1)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = kornia.filters.gaussian_blur2d(x, (o.get("kernel", 3),) * 2, (o.get("sigma", 1.1),) * 2)
        edge, corners = o.get("padding", "zeros"), o.get("corners", True)
        x = kornia.geometry.warp_affine(x, matrix, (12, 12), padding_mode=edge, align_corners=corners)
        out = net(x)
        edges = kornia.filters.sobel(out) if o.get("edges", True) else out.abs()
        similar = kornia.losses.ssim_loss(out, y, o.get("window", 5), reduction=o.get("reduction", "mean"))
        return similar.mean() + o.get("rough", 0.15) * edges.mean()

    return graphs(f, torch.rand(2, 2, 12, 12), torch.rand(2, 2, 12, 12))


def adapted(o: Options) -> Texts:
    """OPT with low-rank adapters of peft."""
    size = dict(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=24,
                max_position_embeddings=16, word_embed_proj_dim=16, dropout=0.1)  # fmt: skip
    model = transformers.OPTModel(transformers.OPTConfig(**size | o.get("model", {}), attn_implementation="eager"))
    lora = dict(r=3, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.05)
    model = peft.get_peft_model(model, peft.LoraConfig(**lora | o.get("lora", {}))).train()
    ids = torch.randint(3, 40, (2, o.get("length", 7)))
    return graphs(lambda ids: model(ids, use_cache=False).last_hidden_state, ids)


def hyperbolic(o: Options) -> Texts:
    """Embeddings in a Poincare ball of geoopt."""
    ball = geoopt.PoincareBall(c=o.get("c", 0.8))
    layer = nn.Linear(5, 4, bias=o.get("bias", True))

    def f(x: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
        points = ball.expmap0(layer(x) * o.get("gain", 0.6))
        others = ball.expmap0(centres)
        apart = ball.dist(points[:, None], others[None]) if o.get("hyperbolic", True) else torch.cdist(points, others)
        return (apart.min(o.get("dim", 1)).values - o.get("margin", 0.25)).clamp_min(0).sum()

    return graphs(f, torch.randn(6, 5), torch.randn(3, 4))


def sparse(o: Options) -> Texts:
    """Attention whose weights entmax makes sparse, scores by position as in ALiBi."""
    inner = nn.Linear(8, 24, bias=o.get("bias", False))
    slopes = 2.0 ** -torch.arange(1.0, 3.0)

    def f(x: torch.Tensor) -> torch.Tensor:
        q, k, v = inner(x).view(2, 6, 3, o.get("heads", 2), -1).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * o.get("scale", 0.45)
        if o.get("alibi", True):
            scores = (
                scores - slopes[: o.get("heads", 2), None, None] * (torch.arange(6)[:, None] - torch.arange(6)).abs()
            )
        scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(o.get("diagonal", 1)), -1e5)
        weights = o.get("weights", entmax.entmax_bisect)(scores, dim=-1, **o.get("more", {"alpha": 1.3, "n_iter": 6}))
        return torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2).logsumexp(-1)

    return graphs(f, torch.randn(2, 6, 8))


def quantised(o: Options) -> Texts:
    """Codes by a codebook or by finite scalars of vector_quantize_pytorch."""
    down, up = nn.Linear(6, 4), nn.Linear(4, 6)
    if o.get("scalars", True):
        book: Any = vector_quantize_pytorch.FSQ(levels=o.get("levels", [5, 5, 5, 3]))
    else:
        book = vector_quantize_pytorch.LFQ(dim=4, codebook_size=16, entropy_loss_weight=o.get("entropy", 0.1))

    def f(x: torch.Tensor) -> torch.Tensor:
        h = o.get("act", F.silu)(down(x)) * o.get("gain", 1.2)
        h = book(h)[0]
        return F.smooth_l1_loss(up(h), x, beta=o.get("beta", 0.7), reduction=o.get("reduction", "mean"))

    return graphs(f, torch.randn(3, 5, 6))


def metrics(o: Options) -> Texts:
    """Losses of pytorch_metric_learning on an embedding."""
    net = nn.Sequential(nn.Linear(6, 8), o.get("act", nn.PReLU)(), nn.Linear(8, 4))
    loss = o.get("loss", metric.NTXentLoss)(**o.get("more", {"temperature": 0.2}))
    left, right = torch.tensor([0, 1, 2, 3, 4, 5]), torch.tensor([1, 0, 3, 2, 5, 4])
    apart = torch.tensor([0, 1, 2, 3, 4, 5]), torch.tensor([2, 3, 4, 5, 0, 1])

    def f(x: torch.Tensor) -> torch.Tensor:
        h = net(x)
        h = F.normalize(h, p=o.get("p", 2.0), dim=-1) if o.get("normal", True) else h
        value = loss(h, indices_tuple=(left, right, *apart))
        return value * o.get("weight", 0.9) + o.get("spread", 0.02) * h.var(0, unbiased=o.get("unbiased", True)).sum()

    return graphs(f, torch.randn(6, 6))


def bloom(o: Options) -> Texts:
    size = dict(vocab_size=40, hidden_size=16, n_layer=1, n_head=2, hidden_dropout=0.1, attention_dropout=0.05)
    model = transformers.BloomModel(transformers.BloomConfig(**size | o)).train()
    return graphs(lambda ids: model(ids, use_cache=False).last_hidden_state, torch.randint(0, 40, (2, 7)))


def albert(o: Options) -> Texts:
    size = dict(vocab_size=40, embedding_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                intermediate_size=24, max_position_embeddings=16, hidden_dropout_prob=0.1)  # fmt: skip
    model = transformers.AlbertModel(transformers.AlbertConfig(**size | o, attn_implementation="eager")).train()
    return graphs(lambda ids: model(ids).last_hidden_state, torch.randint(0, 40, (2, 7)))


def regnet(o: Options) -> Texts:
    o = dict(o)
    regnets = torchvision.models.regnet
    block = dict(depths=[1], widths=[8], group_widths=[4], bottleneck_multipliers=[1.0], strides=[2], se_ratio=0.25)
    params = regnets.BlockParams(**block | o.pop("block", {}))
    model = regnets.RegNet(params, num_classes=o.pop("classes", 4), stem_width=8, activation=o.pop("act", nn.ReLU))
    return graphs(model.train(not o.pop("eval", False)), torch.randn(2, 3, 16, 16))


def dense(o: Options) -> Texts:
    size = dict(growth_rate=4, block_config=(2, 1), num_init_features=8, bn_size=2, drop_rate=0.1, num_classes=3)
    return graphs(torchvision.models.DenseNet(**size | o).train(), torch.randn(2, 3, 32, 32))


class Cell(nn.Module):
    """A gated cell over a window, complex filters, a table that is written, per-example gradients within the loss."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.o = o
        self.cell = nn.GRUCell(6, o.get("size", 5), bias=o.get("bias", True))
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.cfloat if o.get("complex", True) else torch.float))
        self.out = nn.Bilinear(o.get("size", 5), 6, 3)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        o = self.o
        with torch.no_grad():
            self.seen.index_add_(0, y, torch.ones(4), alpha=o.get("alpha", 1))
        spectrum = torch.fft.rfft(x, dim=1, norm=o.get("norm", "ortho")) * self.filter[:, None]
        x = torch.fft.irfft(spectrum, n=8, dim=1, norm=o.get("norm", "ortho")) + o.get("keep", 0.4) * x
        windows = x.unfold(1, o.get("window", 2), o.get("hop", 2)).amax(-1)
        h = x.new_zeros(4, o.get("size", 5))
        for k in range(o.get("ticks", 3)):
            h = (
                checkpoint(self.cell, windows[:, k], h, use_reentrant=False)
                if o.get("remat")
                else self.cell(windows[:, k], h)
            )
        weight = (self.seen + o.get("more", 1.5)).rsqrt()[y] if o.get("weighted", True) else 1.0
        scores = self.out(h, windows[:, -1])
        own = scores.gather(1, (y % 3)[:, None])[:, 0]
        rest = scores.scatter(1, (y % 3)[:, None], o.get("fill", -1e4)).amax(1)
        loss = (weight * F.softplus(rest - own + o.get("margin", 0.3))).mean()
        with torch.autocast("cpu", torch.bfloat16, enabled=o.get("cast", False)):
            spare = (h @ h.mT).float().tril(o.get("below", -1)).square().sum()
        return loss + o.get("spare", 0.02) * spare


def gated(o: Options) -> Texts:
    return graphs(Cell(o).train(), torch.randn(4, 8, 6), torch.tensor([0, 1, 2, 3]))


def distilled(o: Options) -> Texts:
    """A student beside a teacher without gradients, attention by torch's own, a mixture of both losses."""
    teacher = nn.Linear(6, 4).requires_grad_(o.get("trained", False))
    student = nn.Sequential(nn.Linear(6, o.get("width", 5)), nn.Hardswish(), nn.Linear(o.get("width", 5), 4))

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = F.scaled_dot_product_attention(x, x, x, is_causal=o.get("causal", True), scale=o.get("scale"))
        soft = F.log_softmax(teacher(h) / o.get("teacher", 2.0), o.get("axis", -1))
        own = student(h)
        own = F.alpha_dropout(own, o.get("drop", 0.1), training=True) if o.get("dropped") else own
        mixed = F.kl_div(F.log_softmax(own / 3.0, -1), soft, reduction=o.get("reduction", "batchmean"), log_target=True)
        hard = F.multi_margin_loss(own.flatten(0, 1), y, p=o.get("p", 1), margin=o.get("margin", 0.8))
        return o.get("mix", 0.7) * mixed + hard

    return graphs(f, torch.randn(2, 3, 6), torch.tensor([0, 1, 2, 3, 0, 1]))


def updated(o: Options) -> Texts:
    o = dict(o)
    model = nn.Linear(4, 3)
    tuned = o.pop("kind", torch.optim.Adagrad)(model.parameters(), **{"lr": 0.03} | o)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return graphs(lambda: tuned.step())


finite = {"scalars": False}
PAIRS: list[Pair] = [
    ("images sigma", images, {}, {"sigma": 1.6}, r"1\.1.*1\.6|2\.42.*5\.12|tensor|constant"),
    ("images kernel", images, {}, {"kernel": 5}, r"3.*5|pad|arange|\[.*\] -> .*\[|1, 1, 1, 1.*2, 2, 2, 2"),
    ("images corners", images, {}, {"corners": False}, r"True.*False|grid|sub|mul|add|affine"),
    ("images padding", images, {}, {"padding": "border"},
     r"zeros|border|clamp|grid_sampl|0, 0.*0, 1|where|ge|lt|logical"),
    ("images edges", images, {}, {"edges": False}, r"- .*(?:conv|sqrt|pad|pow)|replaced"),
    ("images window", images, {}, {"window": 3}, r"5.*3|2, 2, 2, 2.*1, 1, 1, 1|pad|arange"),
    ("images rough", images, {}, {"rough": 0.3}, r"0\.15.*0\.3"),
    ("adapted rank", adapted, {}, {"lora": {"r": 4}}, r"\[3,16\].*\[4,16\]|\[16,3\].*\[16,4\]|2\.66.*2\.0"),
    ("adapted alpha", adapted, {}, {"lora": {"lora_alpha": 12}}, r"2\.66.*4\.0"),
    ("adapted targets", adapted, {}, {"lora": {"target_modules": ["q_proj", "k_proj", "v_proj"]}},
     r"^\+ .*(?:parameter|lora|k_proj|linear|mm|t)"),
    ("adapted dropout", adapted, {}, {"lora": {"lora_dropout": 0.2}}, r"0\.05.*0\.2|1\.0526.*1\.25"),
    ("adapted stable", adapted, {}, {"lora": {"use_rslora": True}}, r"2\.66.*4\.6"),
    ("adapted activation", adapted, {}, {"model": {"activation_function": "gelu"}},
     r"relu|gelu|threshold|le|where|erf"),
    ("adapted length", adapted, {}, {"length": 9}, r"\[2,7\].*\[2,9\]|7.*9"),
    ("hyperbolic curvature", hyperbolic, {}, {"c": 1.4}, r"0\.8.*1\.4|-0\.8.*-1\.4|tensor|abs|buffer|constant"),
    ("hyperbolic gain", hyperbolic, {}, {"gain": 0.9}, r"0\.6.*0\.9"),
    ("hyperbolic flat", hyperbolic, {}, {"hyperbolic": False}, r"cdist|euclid|- .*(?:atanh|log|mul)|replaced"),
    ("hyperbolic margin", hyperbolic, {}, {"margin": 0.5}, r"0\.25.*0\.5"),
    ("hyperbolic nearest", hyperbolic, {}, {"dim": 0}, r"min|1.*0|\[6.*\].*\[3"),
    ("sparse alpha", sparse, {}, {"more": {"alpha": 1.6, "n_iter": 6}}, r"1\.3.*1\.6|0\.3.*0\.6|tensor|3\.33.*1\.66"),
    ("sparse iterations", sparse, {}, {"more": {"alpha": 1.3, "n_iter": 8}}, r"^\+ |6.*8"),
    ("sparse softmax", sparse, {}, {"weights": torch.softmax, "more": {}}, r"softmax|- |replaced|entmax|Function"),
    ("sparse without positions", sparse, {}, {"alibi": False}, r"- .*(?:sub|abs|mul|arange)"),
    ("sparse scale", sparse, {}, {"scale": 0.6}, r"0\.45.*0\.6"),
    ("sparse bias", sparse, {}, {"bias": True}, r"^\+ .*parameter|bias|addmm|linear|sum"),
    ("quantised levels", quantised, {}, {"levels": [7, 5, 5, 3]},
     r"tensor|constant|5.*7|buffer|basis|levels|i32|lifted"),
    ("quantised codebook", quantised, {}, finite, r"round|tanh|sign|where|\+ |- |replaced"),
    ("quantised activation", quantised, {}, {"act": F.mish}, r"silu|mish|softplus|sigmoid"),
    ("quantised gain", quantised, {}, {"gain": 1.7}, r"1\.2.*1\.7"),
    ("quantised beta", quantised, {}, {"beta": 0.4}, r"0\.7.*0\.4"),
    ("quantised sum", quantised, {}, {"reduction": "sum"}, r"mean|sum|div|90|smooth_l1"),
    ("metrics temperature", metrics, {}, {"more": {"temperature": 0.4}}, r"0\.2.*0\.4|5\.0.*2\.5"),
    ("metrics triplets", metrics, {}, {"loss": metric.ContrastiveLoss, "more": {"pos_margin": 0.1}},
     r"exp|log|relu|max|\+ |- |replaced"),
    ("metrics norm", metrics, {}, {"p": 1.0}, r"2\.0.*1\.0|norm|abs|sign|pow"),
    ("metrics activation", metrics, {}, {"act": nn.Softsign}, r"prelu|abs|where|gt|div|parameter"),
    ("metrics biased", metrics, {}, {"unbiased": False}, r"True.*False|correction|1.*0|var|5.*6|0\.4.*0\.33"),
    ("metrics spread", metrics, {}, {"spread": 0.06}, r"0\.02.*0\.06"),
    ("bloom heads", bloom, {}, {"n_head": 4},
     r"view|reshape|0\.35.*0\.5|\[2,7,2,3,8\]|\[.*2.*\] -> .*\[.*4|tensor|alibi|8.*4"),
    ("bloom residual", bloom, {}, {"apply_residual_connection_post_layernorm": True}, r"operand|add|reads|instead"),
    ("bloom dropout", bloom, {}, {"hidden_dropout": 0.25}, r"0\.1.*0\.25|1\.1111.*1\.333"),
    ("bloom eps", bloom, {}, {"layer_norm_epsilon": 1e-6}, r"1e-05.*1e-06"),
    ("albert layers", albert, {}, {"num_hidden_layers": 3}, r"^\+ "),
    ("albert inner groups", albert, {}, {"hidden_act": "relu"}, r"gelu|tanh|relu|pow|threshold|le"),
    ("albert embedding", albert, {}, {"embedding_size": 10}, r"parameters? .*8.*10|\[.*8\].*\[.*10\]"),
    ("albert types", albert, {}, {"type_vocab_size": 3}, r"\[2,8\].*\[3,8\]|2.*3"),
    ("regnet excitation", regnet, {}, {"block": {"se_ratio": None}}, r"^- .*(?:parameter|mean|sigmoid|pool|conv|mul)"),
    ("regnet groups", regnet, {}, {"block": {"group_widths": [2]}}, r"\[8,4,3,3\].*\[8,2,3,3\]|2.*4"),
    ("regnet activation", regnet, {}, {"act": nn.ELU}, r"relu|elu|threshold|le|where"),
    ("regnet stride", regnet, {}, {"block": {"strides": [1]}},
     r"\[2, 2\].*\[1, 1\]|\(2, 2\).*\(1, 1\)|stride|\[2,8,4,4\].*\[2,8,8,8\]|\[.*4,4\] -> .*8,8\]"),
    ("dense growth", dense, {}, {"growth_rate": 6}, r"parameters? |\[.*4,.*\] -> .*6"),
    ("dense drop", dense, {}, {"drop_rate": 0.3}, r"0\.1.*0\.3|1\.111.*1\.428"),
    ("dense layers", dense, {}, {"block_config": (2, 2)}, r"^\+ |layer"),
    ("gated filter", gated, {}, {"complex": False}, r"c64|complex|real|c64\[5\].*f32\[5\]"),
    ("gated norm", gated, {}, {"norm": "backward"}, r"ortho.*backward|1.*[02]|fft"),
    ("gated hop", gated, {}, {"hop": 1}, r"2, 2.*2, 1|unfold|\[4,4,6.*\].*\[4,7,6"),
    ("gated ticks", gated, {}, {"ticks": 4}, r"^\+ "),
    ("gated remat", gated, {}, {"remat": True}, r"remat|checkpoint"),
    ("gated alpha", gated, {}, {"alpha": 3}, r"1.*3"),
    ("gated unweighted", gated, {}, {"weighted": False}, r"- .*(?:rsqrt|index|mul|add|pow)"),
    ("gated fill", gated, {}, {"fill": -1e6}, r"-1(?:0000|e\+?0?4).*-1(?:000000|e\+?0?6)"),
    ("gated cast", gated, {}, {"cast": True}, r"autocast|bf16|bfloat16|True.*False|False.*True"),
    ("gated below", gated, {}, {"below": 0}, r"-1.*0|tril"),
    ("gated bias", gated, {}, {"bias": False}, r"^- .*parameter|bias|gru|addmm"),
    ("distilled causal", distilled, {}, {"causal": False}, r"True.*False|causal|- .*(?:tril|triu|where|full|mask)"),
    ("distilled scale", distilled, {"scale": 0.3}, {"scale": 0.5}, r"0\.3.*0\.5|0\.547.*0\.707"),
    ("distilled trained", distilled, {}, {"trained": True}, r"grad|output|^\+ "),
    ("distilled teacher", distilled, {}, {"teacher": 4.0}, r"2\.0.*4\.0"),
    ("distilled reduction", distilled, {}, {"reduction": "sum"}, r"batchmean.*sum|div|kl_div|- "),
    ("distilled power", distilled, {}, {"p": 2}, r"1.*2|margin|pow|mul|square"),
    ("distilled mix", distilled, {}, {"mix": 0.4}, r"0\.7.*0\.4"),
    ("adagrad decay", updated, {}, {"lr_decay": 0.01}, r"0\.0.*0\.01|\+ .*|1\.0|0\.01|div|mul|add"),
    ("asgd", updated, {}, {"kind": torch.optim.ASGD}, r"parameters? |\+ |- |replaced"),
    ("rprop etas", updated, {"kind": torch.optim.Rprop}, {"kind": torch.optim.Rprop, "etas": (0.4, 1.3)},
     r"0\.5.*0\.4|1\.2.*1\.3"),
    ("adafactor eps", updated, {"kind": torch.optim.Adafactor}, {"kind": torch.optim.Adafactor, "d": 2.0},
     r"1\.0.*2\.0|0\.5|2\.0"),
]  # fmt: skip


if __name__ == "__main__":
    main(__doc__, {"seventh": PAIRS})
