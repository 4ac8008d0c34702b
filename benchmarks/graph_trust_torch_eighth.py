"""Pairs of graphs of zuko, snntorch, perceiver_pytorch, tab_transformer_pytorch, torchcrf, auraloss and further models.

    python benchmarks/graph_trust_torch_eighth.py FOLDER    # needs torch, transformers and these, conformer, linformer,
                                                            # lion_pytorch, opacus, rtdl_revisiting_models, schedulefree

For `graph_trust.py`. Each pair as Dynamo's graph, joint graph, forward and backward, as far as these differ. Programs,
changes and what is expected were written, and frozen in a commit, before any result. What is expected is the
operation, the value or the place that changed, in any of the forms in which torch may write it. In a backward of
AOTAutograd alone, where its forward is not seen, the shape of what is saved counts as the value.
"""

from __future__ import annotations

from typing import Any

import auraloss
import conformer
import linformer
import lion_pytorch
import opacus
import perceiver_pytorch
import rtdl_revisiting_models
import schedulefree
import snntorch
import tab_transformer_pytorch
import torch
import torchcrf
import transformers
import zuko
from graph_trust_pairs import Options, Pair, Texts, main
from graph_trust_torch import graphs
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def splines(o: Options) -> Texts:
    """Density estimation by a layer of zuko: spline transforms of what a small net says."""
    net = nn.Sequential(nn.Linear(2, 10), o.get("act", nn.ReLU)(), nn.Linear(10, 3 * (3 * o.get("bins", 5) - 1)))

    def f(x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        sizes = [o.get("bins", 5), o.get("bins", 5), o.get("bins", 5) - 1]
        widths, heights, slopes = net(given).unflatten(-1, (3, -1)).split(sizes, -1)
        if o.get("affine"):
            moved: Any = zuko.transforms.MonotonicAffineTransform(widths[..., 0], heights[..., 0])
        else:
            moved = zuko.transforms.MonotonicRQSTransform(widths, heights, slopes, bound=o.get("bound", 4.0))
        z, ladj = moved.call_and_ladj(x * o.get("gain", 0.8))
        base = -F.smooth_l1_loss(z, torch.zeros_like(z), reduction="none") if o.get("robust") else -0.5 * z.square()
        return -(base + o.get("volume", 1.0) * ladj).sum(-1).mean()

    return graphs(f, torch.randn(4, 3), torch.randn(4, 2))


def spikes(o: Options) -> Texts:
    """Leaky neurons of snntorch over a few steps, spikes counted."""
    first, second = nn.Linear(5, 6), nn.Linear(6, 3)
    grad = snntorch.surrogate.atan() if o.get("atan") else snntorch.surrogate.fast_sigmoid(slope=o.get("slope", 25))
    neuron = dict(beta=0.9, threshold=1.0, reset_mechanism="subtract", spike_grad=grad)
    hidden, out = (snntorch.Leaky(**neuron | o.get("neuron", {})) for _ in range(2))

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = torch.zeros(4, 6), torch.zeros(4, 3)
        told = []
        for _ in range(o.get("ticks", 3)):
            spike, a = hidden(first(x), a)
            spike, b = out(second(F.dropout(spike, o.get("drop", 0.2))), b)
            told.append(b if o.get("potential") else spike)
        return F.cross_entropy(torch.stack(told).sum(0), y, label_smoothing=o.get("smooth", 0.05))

    return graphs(f, torch.randn(4, 5), torch.tensor([0, 1, 2, 0]))


def latents(o: Options) -> Texts:
    """A perceiver: a few latent vectors that look at all pixels."""
    size = dict(input_channels=3, input_axis=2, num_freq_bands=2, max_freq=4.0, depth=2, num_latents=6, latent_dim=8,
                cross_heads=1, latent_heads=2, cross_dim_head=4, latent_dim_head=4, num_classes=3, attn_dropout=0.1,
                ff_dropout=0.0, weight_tie_layers=False, self_per_cross_attn=1)  # fmt: skip
    return graphs(perceiver_pytorch.Perceiver(**size | o).train(), torch.randn(2, 4, 4, 3))


def tables(o: Options) -> Texts:
    """A transformer over the columns of a table."""
    size = dict(categories=(5, 4), num_continuous=3, dim=8, dim_out=2, depth=1, heads=2, dim_head=4, attn_dropout=0.1,
                ff_dropout=0.1)  # fmt: skip
    model = tab_transformer_pytorch.FTTransformer(**size | o).train()
    return graphs(model, torch.tensor([[0, 1], [4, 3], [2, 2]]), torch.randn(3, 3))


def columns(o: Options) -> Texts:
    """The residual net for tables of rtdl_revisiting_models."""
    size = dict(d_in=5, d_out=2, n_blocks=2, d_block=8, d_hidden=None, d_hidden_multiplier=1.5, dropout1=0.2,
                dropout2=0.1)  # fmt: skip
    model = rtdl_revisiting_models.ResNet(**size | o).train()
    return graphs(model, torch.randn(4, 5))


def tagged(o: Options) -> Texts:
    """A tagger with a conditional random field."""
    net = nn.Linear(6, 4)
    field = torchcrf.CRF(4, batch_first=True)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = net(F.layer_norm(x, (6,), eps=o.get("eps", 1e-5))) / o.get("temperature", 1.5)
        value = -field(scores, y, torch.ones_like(y, dtype=torch.bool), reduction=o.get("reduction", "mean"))
        lasso = field.transitions.abs().sum() if o.get("lasso") else field.transitions.square().sum()
        return value + o.get("decay", 0.03) * lasso

    return graphs(f, torch.randn(2, o.get("length", 4), 6), torch.randint(0, 4, (2, o.get("length", 4))))


def sounds(o: Options) -> Texts:
    """A filter in time, judged by spectra of auraloss."""
    net = nn.Conv1d(1, 1, 5, padding=2, padding_mode=o.get("edge", "zeros"))
    size = dict(fft_size=32, hop_size=8, win_length=16, w_sc=1.0, w_log_mag=1.0, w_lin_mag=0.0)
    judge = auraloss.freq.STFTLoss(**size | o.get("judge", {}))

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(net(x) * o.get("drive", 1.7))
        out = out - o.get("pre", 0.85) * F.pad(out[..., :-1], (1, 0))
        return judge(out, y) + o.get("own", 0.4) * (out - y).abs().mean()

    return graphs(f, torch.randn(2, 1, 64), torch.randn(2, 1, 64))


def private(o: Options) -> Texts:
    """Attention of opacus whose parts are plain layers."""
    size = dict(embed_dim=8, num_heads=2, bias=True, add_bias_kv=False, add_zero_attn=False, dropout=0.1)
    attend = opacus.layers.DPMultiheadAttention(**size | o.get("attend", {})).train()
    norm = nn.GroupNorm(o.get("groups", 2), 8, eps=1e-5) if o.get("grouped", True) else nn.InstanceNorm1d(8)

    def f(x: torch.Tensor) -> torch.Tensor:
        h = attend(x, x, x)[0]
        h = norm((x + h).permute(1, 2, 0)) if o.get("after", True) else x.permute(1, 2, 0) + norm(h.permute(1, 2, 0))
        return h.pow(o.get("power", 2)).mean()

    return graphs(f, torch.randn(5, 2, 8))


def linear(o: Options) -> Texts:
    """Attention of linformer over a sequence of fixed length."""
    size = dict(dim=8, seq_len=10, depth=1, k=4, heads=2, dim_head=4, one_kv_head=False, share_kv=False, dropout=0.1)
    return graphs(linformer.Linformer(**size | o).train(), torch.randn(2, 10, 8))


def spoken(o: Options) -> Texts:
    """A block of a conformer, and a loss over alignments."""
    size = dict(dim=8, dim_head=4, heads=2, ff_mult=2, conv_expansion_factor=2, conv_kernel_size=3, attn_dropout=0.0,
                ff_dropout=0.1, conv_dropout=0.0)  # fmt: skip
    block = conformer.ConformerBlock(**size | o.get("block", {})).train()
    head = nn.Linear(8, 5)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = head(block(x)).log_softmax(-1).transpose(0, 1)
        long = torch.full((2,), 9, dtype=torch.long)
        short = torch.full((2,), 3, dtype=torch.long)
        own = F.ctc_loss(scores, y, long, short, blank=o.get("blank", 0), zero_infinity=o.get("zero", False))
        return own - o.get("entropy", 0.02) * (scores.exp() * scores).sum(-1).mean()

    return graphs(f, torch.randn(2, 9, 8), torch.randint(1, 4, (2, 3)))


def neox(o: Options) -> Texts:
    size = dict(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
                max_position_embeddings=16, hidden_dropout=0.1, attention_dropout=0.0)  # fmt: skip
    config = transformers.GPTNeoXConfig(**size | o, attn_implementation="eager")
    model = transformers.GPTNeoXModel(config).train()
    return graphs(lambda ids: model(ids, use_cache=False).last_hidden_state, torch.randint(0, 40, (2, 7)))


def fourier(o: Options) -> Texts:
    size = dict(vocab_size=40, hidden_size=16, num_hidden_layers=1, intermediate_size=24, max_position_embeddings=16,
                hidden_dropout_prob=0.1)  # fmt: skip
    model = transformers.FNetModel(transformers.FNetConfig(**size | o)).train()
    return graphs(lambda ids: model(ids).last_hidden_state, torch.randint(0, 40, (2, 8)))


def selective(o: Options) -> Texts:
    size = dict(vocab_size=40, hidden_size=8, num_hidden_layers=1, state_size=3, expand=2, conv_kernel=3,
                time_step_rank=2)  # fmt: skip
    model = transformers.MambaModel(transformers.MambaConfig(**size | o)).train()
    return graphs(lambda ids: model(ids, use_cache=False).last_hidden_state, torch.randint(0, 40, (2, 4)))


class Mixed(nn.Module):
    """Images to words: patches shuffled, a tied table, a slow copy of the weights, a mask by distance."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.o = o
        self.table = nn.Embedding(12, 8, padding_idx=o.get("pad"), scale_grad_by_freq=o.get("by frequency", False))
        self.patch = nn.Conv2d(2, 8, 2, stride=2, bias=o.get("bias", True))
        self.norm = nn.LayerNorm(8, elementwise_affine=o.get("affine", True))
        self.inner = nn.Linear(8, 16)
        self.outer = nn.Linear(16, 8)
        self.head = nn.Linear(8, 12, bias=False)
        if o.get("tied", True):
            self.head.weight = self.table.weight
        self.register_buffer("slow", torch.zeros(8))

    def block(self, h: torch.Tensor) -> torch.Tensor:
        o = self.o
        apart = (torch.arange(h.shape[1])[:, None] - torch.arange(h.shape[1])).abs()
        mask = apart.lt(o.get("near", 6)) if o.get("boolean", True) else apart * -0.1
        g = self.norm(h) if o.get("before", True) else h
        h = h + F.scaled_dot_product_attention(g, g, g, attn_mask=mask, dropout_p=o.get("drop", 0.0))
        h = h if o.get("before", True) else self.norm(h)
        return h + self.outer(o.get("act", F.gelu)(self.inner(h)))

    def forward(self, image: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        o = self.o
        seen = self.patch(F.pixel_unshuffle(F.pad(image, (0, 0, 0, 0, 0, 1)), 2)[:, : 2 * o.get("every", 1) : o.get(
            "every", 1)]).flatten(2).mT  # fmt: skip
        h = torch.cat([seen, self.table(words[:, :-1])], 1)
        h = checkpoint(self.block, h, use_reentrant=False) if o.get("remat") else self.block(h)
        logits = self.head(h[:, seen.shape[1] :]) * o.get("logit scale", 0.35)
        with torch.no_grad():
            self.slow.lerp_(h.mean((0, 1)), o.get("follow", 0.1))
        centre = self.slow.detach() if o.get("detached", True) else h.mean((0, 1))
        apart = F.cosine_similarity(seen.mean(1), centre[None], dim=-1, eps=o.get("eps", 1e-8))
        total = logits.double() if o.get("wide") else logits
        scores = F.cross_entropy(total.flatten(0, 1), words[:, 1:].flatten(), ignore_index=o.get("ignored", 3))
        return scores.float() + o.get("apart", 0.05) * apart.mean() + o.get("l2", 4e-4) * self.inner.weight.norm()


def mixed(o: Options) -> Texts:
    return graphs(Mixed(o).train(), torch.randn(2, 2, 8, 8), torch.randint(4, 12, (2, 5)))


def updated(o: Options) -> Texts:
    o = dict(o)
    model = nn.Linear(4, 3)
    kind = o.pop("kind", lion_pytorch.Lion)
    tuned = kind(model.parameters(), **{"lr": 0.03} | o)
    if isinstance(tuned, schedulefree.AdamWScheduleFree):
        tuned.train()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return graphs(lambda: tuned.step())


free = {"kind": schedulefree.AdamWScheduleFree, "foreach": False}
PAIRS: list[Pair] = [
    ("splines bins", splines, {}, {"bins": 6}, r"parameters? .*\[42.*\[51|\[.*5\].* -> .*6\]|\b14\b.*\b17\b|5.*6"),
    ("splines bound", splines, {}, {"bound": 3.0}, r"4\.0.*3\.0|8\.0.*6\.0"),
    ("splines affine", splines, {}, {"affine": True}, r"softmax|searchsorted|exp|- |replaced"),
    ("splines robust", splines, {}, {"robust": True}, r"smooth_l1|pow|square|mul|abs"),
    ("splines activation", splines, {}, {"act": nn.Softplus}, r"relu|softplus|threshold|le"),
    ("spikes leak", spikes, {}, {"neuron": {"beta": 0.8}}, r"0\.9.*0\.8|tensor|constant|clamp|buffer"),
    ("spikes reset", spikes, {}, {"neuron": {"reset_mechanism": "zero"}}, r"mul|sub|\+ |- |replaced"),
    ("spikes learnt", spikes, {}, {"neuron": {"learn_beta": True}}, r"parameter|output|sum|\+ |beta"),
    ("spikes surrogate", spikes, {}, {"atan": True}, r"abs|pow|div|mul|Function|ATan|FastSigmoid|sigmoid"),
    ("spikes slope", spikes, {}, {"slope": 40}, r"25.*40|Function|function"),
    ("spikes potential", spikes, {}, {"potential": True}, r"operand|stack|cat|instead|output|gt|- |add"),
    ("spikes smoothing", spikes, {}, {"smooth": 0.15}, r"0\.05.*0\.15|0\.95.*0\.85|0\.016.*0\.05"),
    ("latents tied", latents, {}, {"weight_tie_layers": True}, r"- .*parameter|parameter"),
    ("latents bands", latents, {}, {"num_freq_bands": 3}, r"\[.*13.*\].*\[.*17|13.*17|2.*3|linspace"),
    ("latents heads", latents, {}, {"latent_heads": 4}, r"parameters? |\[.*8.*\].*16|view|reshape|rearrange|2.*4"),
    ("latents dropout", latents, {}, {"attn_dropout": 0.3}, r"0\.1.*0\.3|1\.11.*1\.42"),
    ("tables heads", tables, {}, {"heads": 3}, r"parameters? |24.*36|\[.*8.*\].*12|\b2\b.*\b3\b"),
    ("tables depth", tables, {}, {"depth": 2}, r"^\+ "),
    ("columns dropout", columns, {}, {"dropout1": 0.4}, r"0\.2.*0\.4|1\.25.*1\.66"),
    ("columns blocks", columns, {}, {"n_blocks": 3}, r"^\+ "),
    ("columns hidden", columns, {}, {"d_hidden_multiplier": 2.0}, r"\[.*12.*\].*\[.*16|12.*16"),
    ("tagged reduction", tagged, {}, {"reduction": "token_mean"}, r"mean|sum|div|8|expand"),
    ("tagged lasso", tagged, {}, {"lasso": True}, r"abs|sgn|sign|pow|square"),
    ("tagged length", tagged, {}, {"length": 5}, r"\[2,4.*\].*\[2,5|^\+ "),
    ("tagged temperature", tagged, {}, {"temperature": 2.5}, r"1\.5.*2\.5|0\.66.*0\.4"),
    ("sounds hop", sounds, {}, {"judge": {"hop_size": 4}}, r"8.*4|stft|as_strided|unfold|\[.*9\].*17\]"),
    ("sounds linear", sounds, {}, {"judge": {"w_lin_mag": 0.6}}, r"0\.0.*0\.6|\+ |0\.6"),
    ("sounds distance", sounds, {}, {"judge": {"mag_distance": "L2"}}, r"l1_loss|mse|abs|pow|sgn|sign"),
    ("sounds edge", sounds, {}, {"edge": "circular"}, r"pad|circular|cat|slice|copy|\[2\].*\[0\]|\(2,\).*\(0,\)"),
    ("sounds drive", sounds, {}, {"drive": 2.5}, r"1\.7.*2\.5"),
    ("private zero", private, {}, {"attend": {"add_zero_attn": True}}, r"cat|zeros|\+ |pad"),
    ("private bias", private, {}, {"attend": {"add_bias_kv": True}}, r"^\+ .*parameter|cat|bias|parameter"),
    ("private groups", private, {}, {"groups": 4}, r"2.*4|\[4,.*\[8|\[2,2"),
    ("private instance", private, {}, {"grouped": False}, r"parameter|group_norm|instance|batch_norm|weight"),
    ("private order", private, {}, {"after": False}, r"add|operand|reads|instead"),
    ("linear shared", linear, {}, {"share_kv": True}, r"^- .*parameter|parameter|to_v|linear|mm"),
    ("linear length", linear, {}, {"k": 5}, r"\[10,4\].*\[10,5\]|4.*5"),
    ("linear one head", linear, {}, {"one_kv_head": True}, r"\[8,8\].*\[4,8\]|parameters? |8.*4|expand"),
    ("spoken kernel", spoken, {}, {"block": {"conv_kernel_size": 5}}, r"\[16,1,3\].*\[16,1,5\]|parameters? |\(1, 1\)"),
    ("spoken infinity", spoken, {}, {"zero": True}, r"False.*True|where|isinf|zero|eq"),
    ("spoken blank", spoken, {}, {"blank": 4}, r"0.*4|ctc|blank"),
    ("spoken dropout", spoken, {}, {"block": {"ff_dropout": 0.25}}, r"0\.1.*0\.25|1\.11.*1\.33"),
    ("neox parallel", neox, {}, {"use_parallel_residual": False}, r"operand|add|reads|instead"),
    ("neox rotary", neox, {}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0,
                                                   "partial_rotary_factor": 0.25}}, r"buffer|inv_freq|parameter|cos"),
    ("neox activation", neox, {}, {"hidden_act": "silu"}, r"gelu|silu|sigmoid|erf"),
    ("fourier types", fourier, {}, {"type_vocab_size": 5}, r"\[4,16\].*\[5,16\]|4.*5"),
    ("fourier activation", fourier, {}, {"hidden_act": "relu"}, r"gelu|tanh|relu|pow|threshold|le"),
    ("selective states", selective, {}, {"state_size": 4}, r"\[.*3\].*\[.*4\]|\[8,16\].*\[10,16\]|8.*10|parameters? "),
    ("selective kernel", selective, {}, {"conv_kernel": 4}, r"\[16,1,3\].*\[16,1,4\]|parameters? |2.*3"),
    ("selective bias", selective, {}, {"use_conv_bias": False}, r"- .*parameter|bias|parameter|sum|None|convolution"),
    ("mixed untied", mixed, {}, {"tied": False}, r"^\+ .*parameter|parameter|weight|output"),
    ("mixed post norm", mixed, {}, {"before": False}, r"operand|norm|add|reads|instead"),
    ("mixed mask", mixed, {}, {"boolean": False}, r"lt|mul|where|mask|scalar"),
    ("mixed near", mixed, {}, {"near": 4}, r"6.*4"),
    ("mixed plain norm", mixed, {}, {"affine": False}, r"^- .*parameter|layer_norm|weight|mul"),
    ("mixed remat", mixed, {}, {"remat": True}, r"remat|checkpoint"),
    ("mixed follow", mixed, {}, {"follow": 0.3}, r"0\.1.*0\.3"),
    ("mixed attached", mixed, {}, {"detached": False}, r"detach|operand|reads|slow|mean|instead|\+ |- "),
    ("mixed wide", mixed, {}, {"wide": True}, r"f64|double|float64|_to_copy|convert"),
    ("mixed ignored", mixed, {}, {"ignored": 5}, r"3.*5"),
    ("mixed dropped", mixed, {}, {"drop": 0.2}, r"0\.0.*0\.2|0\.2|dropout|bernoulli|\+ |rand"),
    ("mixed frequency", mixed, {}, {"by frequency": True}, r"False.*True|embedding"),
    ("lion decay", updated, {"weight_decay": 0.1}, {"weight_decay": 0.3}, r"0\.997.*0\.991|0\.003.*0\.009|0\.1.*0\.3"),
    ("lion betas", updated, {}, {"betas": (0.8, 0.99)}, r"0\.9.*0\.8|0\.1.*0\.2"),
    ("schedule free", updated, free, {**free, "weight_decay": 0.1}, r"0\.1|\+ |mul|add|-0\.1"),
    ("schedule free power", updated, free, {**free, "eps": 1e-6}, r"1e-08.*1e-06"),
]  # fmt: skip


if __name__ == "__main__":
    main(__doc__, {"eighth": PAIRS})
