"""Pairs of graphs of torchvision, timm, x-transformers, torchdiffeq, transformers and own models, in two sets.

    python benchmarks/graph_trust_torch_libraries.py FOLDER --set third     # needs torch and these libraries
    python benchmarks/graph_trust_torch_libraries.py FOLDER --set fourth    # no pair of it was looked at

For `graph_trust.py`. Each pair as Dynamo's graph, joint graph, forward and backward, or as what symbolic tracing
gives, as far as these differ. Both sets and what they expect were written before any result.
"""

from __future__ import annotations

from functools import partial

import torch
from graph_trust_pairs import Options, Pair, Texts, main
from graph_trust_torch import graphs
from torch import nn
from torch.nn import functional as F

try:
    import torchvision
except RuntimeError:  # a wheel built for CUDA: beside a torch for CPUs its operators have no schema
    _VISION = torch.library.Library("torchvision", "DEF")
    for _operator in ("nms", "qnms", "roi_align", "qroi_align"):
        _VISION.define(f"{_operator}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    import torchvision

import timm
import torchdiffeq
import transformers
import x_transformers


def resnet(o: Options) -> Texts:
    block = getattr(torchvision.models.resnet, o.get("block", "BasicBlock"))
    norm = o.get("norm", nn.BatchNorm2d)
    model = torchvision.models.ResNet(block, [1, 1, 1, 1], num_classes=o.get("classes", 5), norm_layer=norm,
                                      replace_stride_with_dilation=(False, False, o.get("dilated", False)))  # fmt: skip
    model.fc = nn.Sequential(nn.Dropout(o.get("drop", 0.2)), model.fc)
    model.layer1.requires_grad_(not o.get("frozen"))
    model.train(not o.get("eval"))
    return graphs(lambda x: model(x).logsumexp(-1), torch.randn(o.get("batch", 2), 3, 32, 32))


def mixer(o: Options) -> Texts:
    model = timm.models.mlp_mixer.MlpMixer(
        num_classes=o.get("classes", 4), img_size=16, patch_size=o.get("patch", 8), num_blocks=o.get("blocks", 2),
        embed_dim=16, mlp_ratio=(0.5, o.get("ratio", 2.0)), act_layer=o.get("act", nn.GELU),
        norm_layer=partial(nn.LayerNorm, eps=o.get("eps", 1e-6)), global_pool=o.get("pool", "avg"),
    )  # fmt: skip
    return graphs(model.train(), torch.randn(2, 3, 16, 16))


def convnext(o: Options) -> Texts:
    model = timm.models.convnext.ConvNeXt(
        num_classes=3, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), kernel_sizes=o.get("kernel", 7),
        ls_init_value=o.get("scale", 1e-6), conv_mlp=o.get("conv", False), norm_eps=o.get("eps", None),
    )  # fmt: skip
    return graphs(model.train(), torch.randn(2, 3, 32, 32))


def language(o: Options) -> Texts:
    model = x_transformers.TransformerWrapper(
        num_tokens=20, max_seq_len=16, use_abs_pos_emb=o.get("absolute", True),
        attn_layers=x_transformers.Decoder(**dict(dim=16, depth=1, heads=2, attn_dim_head=8) | o.get("layers", {})),
    )  # fmt: skip
    return graphs(lambda ids: model(ids).square().mean() * o.get("weight", 0.5), torch.randint(0, 20, (2, 8)))


def flow(o: Options) -> Texts:
    net = nn.Sequential(nn.Linear(3, 8), o.get("act", nn.Tanh)(), nn.Linear(8, 3))
    times = torch.linspace(0.0, 1.0, o.get("points", 3))

    def f(y: torch.Tensor) -> torch.Tensor:
        path = torchdiffeq.odeint(lambda t, y: net(y) * o.get("speed", 0.7), y, times, method=o.get("method", "rk4"))
        return path[o.get("at", -1)].pow(2).sum()

    return graphs(f, torch.randn(4, 3))


def gpt2(o: Options) -> Texts:
    size = dict(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    config = transformers.GPT2Config(**size | o, attn_implementation="eager")
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(0, 40, (2, 8))
    return graphs(lambda ids: model(ids, labels=ids, use_cache=False).loss, ids)


def t5(o: Options) -> Texts:
    size = dict(vocab_size=30, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4, dropout_rate=0.1)
    model = transformers.T5EncoderModel(transformers.T5Config(**size | o)).train()
    return graphs(lambda ids: model(ids).last_hidden_state, torch.randint(0, 30, (2, 8)))


def recurrent(o: Options) -> Texts:
    """An LSTM written out, its loop unrolled."""
    cell = nn.LSTMCell(5, o.get("size", 6))
    head = nn.Linear(o.get("size", 6), 2, bias=o.get("bias", True))

    def f(xs: torch.Tensor) -> torch.Tensor:
        h = c = xs.new_zeros(3, o.get("size", 6))
        total = xs.new_zeros(())
        for x in xs.unbind(0):
            h, c = cell(x, (h, c))
            h = h * o.get("keep", 0.9)
            total = total + head(h).abs().sum()
        return total / o.get("by", 4)

    return graphs(f, torch.randn(o.get("steps", 4), 3, 5))


class Auto(nn.Module):
    """A variational autoencoder with transposed convolutions."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.o = o
        self.down = nn.Conv2d(1, 4, 4, 2, 1, padding_mode=o.get("padding", "zeros"))
        self.code = nn.Linear(64, 6)
        self.back = nn.Linear(3, 64)
        self.up = nn.ConvTranspose2d(4, 1, 4, 2, 1, output_padding=o.get("extra", 0))
        self.norm = o.get("norm", nn.InstanceNorm2d)(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        o = self.o
        mean, log = self.code(F.leaky_relu(self.norm(self.down(x)), o.get("slope", 0.1)).flatten(1)).chunk(2, -1)
        z = mean + torch.exp(0.5 * log) * torch.randn_like(log)
        z = F.normalize(z, dim=-1, p=o.get("p", 2.0)) if o.get("normal", True) else z
        y = self.up(o.get("act", F.elu)(self.back(z).view(-1, 4, 4, 4)))
        size = (8, 8)
        y = F.interpolate(y, size, mode=o.get("mode", "nearest"))
        error = o.get("loss", F.mse_loss)(y, x)
        return error - o.get("beta", 0.25) * (1 + log - mean.pow(2) - log.exp()).mean()


def auto(o: Options) -> Texts:
    return graphs(Auto(o).train(), torch.randn(3, 1, 8, 8))


def contrast(o: Options) -> Texts:
    """Two towers, a temperature, hard negatives, a memory that is written."""
    left, right = nn.Linear(6, 4), nn.Linear(6, 4)
    memory = torch.zeros(8, 4)

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        u, v = F.normalize(left(a), dim=-1), F.normalize(right(b), dim=-1)
        with torch.no_grad():
            memory[o.get("row", 0) : o.get("row", 0) + 5].lerp_(v, o.get("lerp", 0.1))
        logits = torch.cat([u @ v.T, u @ memory.T], o.get("dim", 1)) / o.get("temperature", 0.07)
        hard = logits.topk(o.get("k", 3), largest=o.get("largest", True)).values
        target = torch.arange(len(a))
        loss = F.cross_entropy(logits, target, ignore_index=o.get("ignore", -100)) if o.get("dim", 1) else hard.sum()
        return loss + o.get("margin", 0.3) * F.relu(hard - u.mean()).sum() + (v if o.get("which") else u).std()

    return graphs(f, torch.randn(5, 6), torch.randn(5, 6))


def optimizer(o: Options) -> Texts:
    o = dict(o)
    model = nn.Linear(4, 3)
    tuned = o.pop("kind", torch.optim.SGD)(model.parameters(), **{"lr": 0.05, "momentum": 0.9} | o)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return graphs(lambda: tuned.step())


class Plain(nn.Module):
    """Attention of torch, a mixture of experts, positions from a buffer: what symbolic tracing can follow."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.o = o
        self.attention = nn.MultiheadAttention(8, 2, dropout=o.get("drop", 0.0), batch_first=True)
        self.gate = nn.Linear(8, o.get("experts", 2), bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(o.get("experts", 2)))
        self.norm = o.get("norm", nn.LayerNorm)(8)
        self.register_buffer("positions", torch.arange(6.0)[:, None] * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        o = self.o
        h = x + torch.sin(self.positions * o.get("wave", 2.0))
        h = self.norm(h + self.attention(h, h, h, need_weights=False)[0]) if o.get("attend", True) else self.norm(h)
        weight = torch.softmax(self.gate(h), o.get("dim", -1))
        out = sum(weight[..., i : i + 1] * expert(h) for i, expert in enumerate(self.experts))
        out = torch.roll(out, o.get("shift", 1), 1) if o.get("roll") else out
        return o.get("reduce", torch.mean)(F.softplus(out, beta=o.get("beta", 1.0))) * o.get("gain", 3.0)


def traced(o: Options) -> Texts:
    graph = torch.fx.symbolic_trace(Plain({"attend": False} | o))
    return {"fx": graph.print_readable(print_output=False)}


def compiled(o: Options) -> Texts:
    return graphs(Plain(o).train(), torch.randn(2, 6, 8))


group = partial(nn.GroupNorm, 4)
THIRD: list[Pair] = [
    ("resnet block", resnet, {}, {"block": "Bottleneck"}, r"parameters? |conv"),
    ("resnet group norm", resnet, {}, {"norm": group}, r"batch_norm|group_norm|parameters? "),
    ("resnet evaluated", resnet, {}, {"eval": True}, r"batch_norm|dropout|training|True.*False"),
    ("resnet dropout", resnet, {}, {"drop": 0.5}, r"0\.2.*0\.5|1\.25.*2\.0"),
    ("mixer activation", mixer, {}, {"act": nn.SiLU}, r"gelu|silu|sigmoid"),
    ("mixer patch", mixer, {}, {"patch": 4}, r"parameters? |conv"),
    ("mixer eps", mixer, {}, {"eps": 1e-3}, r"1e-06.*0\.001"),
    ("convnext kernel", convnext, {}, {"kernel": 5}, r"parameters? .*7,7.* -> .*5,5"),
    ("convnext mlp", convnext, {}, {"conv": True}, r"permute|linear|conv|parameters? |addmm"),
    ("decoder rotary", language, {}, {"layers": {"rotary_pos_emb": True}}, r"^\+ "),
    ("decoder gated", language, {}, {"layers": {"ff_glu": True}}, r"parameters? |chunk|^\+ |split"),
    ("decoder weight", language, {}, {"weight": 0.75}, r"0\.5.*0\.75"),
    ("flow method", flow, {}, {"method": "euler"}, r"^- |add|mul"),
    ("flow speed", flow, {}, {"speed": 0.3}, r"0\.7.*0\.3"),
    ("gpt2 heads", gpt2, {}, {"n_head": 4}, r"view|reshape|\[2,8,2,8\]|\[2,2,8,8\]"),
    ("gpt2 activation", gpt2, {}, {"activation_function": "relu"}, r"tanh|pow|relu"),
    ("gpt2 tied", gpt2, {}, {"tie_word_embeddings": False}, r"^\+ .*parameter"),
    ("t5 buckets", t5, {}, {"relative_attention_num_buckets": 16}, r"16|8|parameters? |32"),
    ("t5 gated", t5, {}, {"feed_forward_proj": "gated-gelu"}, r"^\+ |relu|gelu|parameters? |tanh|pow"),
    ("lstm steps", recurrent, {}, {"steps": 6}, r"\[4,3,5\] -> f32\[6,3,5\]"),
    ("lstm kept", recurrent, {}, {"keep": 0.8}, r"0\.9.*0\.8"),
    ("vae padding", auto, {}, {"padding": "circular"}, r"pad|conv"),
    ("vae beta", auto, {}, {"beta": 0.5}, r"0\.25.*0\.5"),
    ("vae loss", auto, {}, {"loss": F.smooth_l1_loss}, r"mse|smooth|l1|sub"),
    ("vae norm", auto, {}, {"norm": nn.BatchNorm2d}, r"norm|parameters? "),
    ("contrast temperature", contrast, {}, {"temperature": 0.2}, r"0\.07.*0\.2"),
    ("contrast row", contrast, {}, {"row": 2}, r"slice|0.*2"),
    ("contrast of the other", contrast, {}, {"which": True}, r"std|var|operand"),
    ("sgd nesterov", optimizer, {}, {"nesterov": True}, r"^\+ .*add"),
    ("sgd dampening", optimizer, {}, {"dampening": 0.2}, r"1(?:\.0)?.*0\.8"),
    ("experts", traced, {}, {"experts": 3}, r"^\+ .*(?:experts|parameter|linear|getitem)"),
    ("softplus", traced, {}, {"beta": 2.0}, r"1\.0.*2\.0|1 -> 2"),
    ("norm of a layer", traced, {}, {"norm": nn.RMSNorm}, r"norm|LayerNorm|RMSNorm"),
    ("attention dropout", compiled, {}, {"drop": 0.25}, r"0\.0.*0\.25|dropout"),
    ("wave", compiled, {}, {"wave": 3.0}, r"2\.0.*3\.0"),
    ("summed", compiled, {}, {"reduce": torch.sum}, r"mean|sum|div"),
]  # fmt: skip
FOURTH: list[Pair] = [
    ("resnet classes", resnet, {}, {"classes": 7}, r"parameters? .*\[5,512\] -> f32\[7,512\]|5.* -> .*7"),
    ("resnet dilated", resnet, {}, {"dilated": True}, r"conv.*(?:dilat|stride|\[2,2\]|\[2, 2\]|\[1, 1\]|\(1, 1\))"),
    ("resnet frozen", resnet, {}, {"frozen": True}, r"^- |output|requires_grad|parameters? "),
    ("resnet batch", resnet, {}, {"batch": 3}, r"\[2,3,32,32\] -> f32\[3,3,32,32\]"),
    ("mixer blocks", mixer, {}, {"blocks": 3}, r"^\+ .*(?:parameter|blocks)"),
    ("mixer ratio", mixer, {}, {"ratio": 3.0}, r"parameters? .*32.* -> .*48"),
    ("mixer classes", mixer, {}, {"classes": 6}, r"parameters? .*\[4,16\] -> f32\[6,16\]|4.* -> .*6"),
    ("convnext layer scale", convnext, {}, {"scale": None}, r"^- .*(?:parameter|mul)"),
    ("convnext eps", convnext, {}, {"eps": 1e-3}, r"1e-06.*0\.001"),
    ("decoder positions", language, {}, {"absolute": False}, r"^- "),
    ("decoder rms", language, {}, {"layers": {"use_rmsnorm": True}}, r"norm|^- .*parameter|parameters? "),
    ("decoder heads", language, {}, {"layers": {"heads": 4}}, r"parameters? .*16,16.* -> .*32,16"),
    ("flow points", flow, {}, {"points": 4}, r"^\+ |\[3\].* -> .*\[4\]|while|slice"),
    ("flow activation", flow, {}, {"act": nn.Softplus}, r"tanh|softplus"),
    ("flow at", flow, {}, {"at": 1}, r"-1.*1|select|getitem"),
    ("gpt2 layers", gpt2, {}, {"n_layer": 2}, r"^\+ .*(?:parameter|layer|h\.1|h_1)"),
    ("gpt2 eps", gpt2, {}, {"layer_norm_epsilon": 1e-3}, r"1e-05.*0\.001"),
    ("gpt2 scaled", gpt2, {}, {"scale_attn_weights": False}, r"^- .*(?:div|mul)|0\.35.*1\.0|2\.8.*1"),
    ("gpt2 dropout", gpt2, {}, {"embd_pdrop": 0.3}, r"0\.1.*0\.3|1\.1111.*1\.42857"),
    ("t5 distance", t5, {}, {"relative_attention_max_distance": 64}, r"128.*64|log|2\.77.*2\.07"),
    ("t5 eps", t5, {}, {"layer_norm_epsilon": 1e-4}, r"1e-06.*0\.0001"),
    ("lstm size", recurrent, {}, {"size": 7}, r"parameters? .*24.* -> .*28"),
    ("lstm bias", recurrent, {}, {"bias": False}, r"^- .*parameter|bias|linear|addmm"),
    ("lstm divisor", recurrent, {}, {"by": 8}, r"4.*8"),
    ("vae slope", auto, {}, {"slope": 0.3}, r"0\.1.*0\.3"),
    ("vae activation", auto, {}, {"act": F.selu}, r"elu|selu"),
    ("vae mode", auto, {"extra": 1}, {"extra": 1, "mode": "bilinear"}, r"nearest|bilinear|interpolate|upsample"),
    ("vae norm of code", auto, {}, {"normal": False}, r"^- "),
    ("vae p", auto, {}, {"p": 3.0}, r"2\.0.*3\.0|norm|pow"),
    ("contrast lerp", contrast, {}, {"lerp": 0.3}, r"0\.1.*0\.3"),
    ("contrast k", contrast, {}, {"k": 4}, r"topk.*3.*4|3.* -> .*4"),
    ("contrast smallest", contrast, {}, {"largest": False}, r"True.*False|largest|topk"),
    ("contrast margin", contrast, {}, {"margin": 0.6}, r"0\.3.*0\.6"),
    ("sgd decay", optimizer, {}, {"weight_decay": 0.01}, r"^\+ .*add"),
    ("sgd maximise", optimizer, {}, {"maximize": True}, r"^\+ .*neg|-0\.05.*0\.05"),
    ("asgd", optimizer, {}, {"momentum": 0.5}, r"0\.9.*0\.5"),
    ("gate dim", traced, {}, {"dim": 1}, r"-1.*1"),
    ("rolled", traced, {"roll": True}, {"roll": True, "shift": 2}, r"roll.*1.*2"),
    ("gain", traced, {}, {"gain": 4.0}, r"3\.0.*4\.0|3 -> 4"),
    ("attention or none", compiled, {}, {"attend": False}, r"^- "),
    ("norm", compiled, {}, {"norm": nn.RMSNorm}, r"norm|parameters? |^- .*parameter"),
    ("rolled or not", compiled, {}, {"roll": True}, r"^\+ .*roll|roll"),
]  # fmt: skip


if __name__ == "__main__":
    main(__doc__, {"third": THIRD, "fourth": FOURTH})
