"""Pairs of graphs of nflows, mambapy, performer, lightly, pytorch_msssim, further transformers, own loops.

    python benchmarks/graph_trust_torch_tenth.py FOLDER    # needs torch, transformers, torchvision and these

For `graph_trust.py`. Each pair as Dynamo's graph, joint graph, forward and backward, as far as these differ. Programs,
changes and what is expected were written, and frozen in a commit, before any result. `nothing` changes names or order.
"""

from __future__ import annotations

import lightly.loss
import mambapy.mamba
import nflows.transforms
import performer_pytorch
import pytorch_msssim
import pytorch_tcn
import soft_moe_pytorch
import torch
import transformers
import x_mlps_pytorch
from graph_trust_pairs import SAME, Options, Pair, Texts, main
from graph_trust_torch import graphs
from torch import nn
from torch.nn import functional as F


def autoregressive(o: Options) -> Texts:
    """Density by masked layers of nflows."""
    size = dict(features=4, hidden_features=8, num_blocks=1, dropout_probability=0.1)
    move = nflows.transforms.MaskedAffineAutoregressiveTransform(**size | o.get("move", {})).train()
    spread = o.get("spread", 1.0)

    def f(x: torch.Tensor) -> torch.Tensor:
        z, volume = move(x)
        own = -0.5 * (z / spread).square().sum(-1) - 3.5 + (volume if o.get("volume", True) else 0)
        return -own.mean() + o.get("penalty", 0.02) * z.abs().mean()

    return graphs(f, torch.randn(5, 4))


def stepped(o: Options) -> Texts:
    """Euler steps of a stochastic equation, with its noise given."""
    drift, spread = nn.Linear(3, 3), nn.Linear(3, 3)
    dt, count = o.get("dt", 0.1), o.get("count", 3)
    act = o.get("act", torch.tanh)

    def f(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        paths = []
        for k in range(count):
            x = x + dt * act(drift(x)) + dt**0.5 * torch.sigmoid(spread(x)) * noise[k]
            paths.append(x)
        path = torch.stack(paths, o.get("axis", 0))
        return (path[-1] - 1).square().mean() + o.get("rough", 0.3) * path.diff(dim=0).abs().mean()

    return graphs(f, torch.randn(4, 3), torch.randn(5, 4, 3))


def states(o: Options) -> Texts:
    size = dict(d_model=6, n_layers=1, d_state=4, d_conv=3, pscan=False, rms_norm_eps=1e-5)
    net = mambapy.mamba.Mamba(mambapy.mamba.MambaConfig(**size | o)).train()
    return graphs(lambda x: net(x).square().mean(), torch.randn(2, 4, 6))


def kernels(o: Options) -> Texts:
    """Attention by random features of performer."""
    size = dict(dim=8, heads=2, dim_head=4, nb_features=6, causal=False, dropout=0.1, generalized_attention=False)
    net = performer_pytorch.SelfAttention(**size | o).train()
    norm = nn.LayerNorm(8)
    return graphs(lambda x: (x + net(norm(x))).logsumexp(-1).mean(), torch.randn(2, 6, 8))


def softly(o: Options) -> Texts:
    size = dict(dim=8, seq_len=6, num_experts=2, expert_mult=2, dropout=0.1)
    net = soft_moe_pytorch.SoftMoE(**size | o).train()
    return graphs(lambda x: net(x).cos().mean(), torch.randn(2, 6, 8))


def temporal(o: Options) -> Texts:
    size = dict(num_inputs=3, num_channels=[4, 4], kernel_size=3, dropout=0.1, causal=True, use_norm="weight_norm")
    net = pytorch_tcn.TCN(**size | o).train()
    return graphs(lambda x: net(x).square().mean(), torch.randn(2, 3, 10))


def joined(o: Options) -> Texts:
    """Losses of lightly on two views."""
    up, down = nn.Linear(6, 10), nn.Linear(10, 5, bias=o.get("bias", True))
    judge = o.get("judge", lightly.loss.VICRegLoss)(**o.get("sized", {}))

    def code(x: torch.Tensor) -> torch.Tensor:
        return down(F.relu(up(x)))

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if o.get("first", True):
            one = code(a)
            two = code(b)
        else:
            two = code(b)
            one = code(a)
        return judge(one, two.detach() if o.get("stopped") else two)

    return graphs(f, torch.randn(6, 6), torch.randn(6, 6))


def similar(o: Options) -> Texts:
    """Pictures restored, judged by structure."""
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Hardswish(), nn.Conv2d(4, 1, 3, padding=1))
    size = dict(data_range=1.0, win_size=7, win_sigma=1.5, K=(0.01, 0.03))

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = net(
            F.interpolate(x, scale_factor=2, mode=o.get("mode", "bilinear"), align_corners=o.get("corners", False))
        )
        alike = pytorch_msssim.ssim(torch.sigmoid(out), y, **size | o.get("sized", {}))
        return 1 - alike + o.get("also", 0.2) * F.smooth_l1_loss(out, y, reduction=o.get("over", "mean"))

    return graphs(f, torch.rand(2, 1, 8, 8), torch.rand(2, 1, 16, 16))


def perceptrons(o: Options) -> Texts:
    net = nn.Sequential(
        x_mlps_pytorch.MLP(6, 8, 4, activation=o.get("act", nn.ReLU())), nn.RMSNorm(4, eps=o.get("eps", 1e-6))
    )
    model = net.to(o.get("dtype", torch.float32))
    soft = o.get("soft", 0.1)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=o.get("cast", False)):
            out = model(x.to(next(model.parameters()).dtype))
        return F.cross_entropy(out.float(), y, label_smoothing=soft, ignore_index=o.get("ignored", -100))

    return graphs(f, torch.randn(5, 6), torch.randint(0, 4, (5,)))


def falcon(o: Options) -> Texts:
    size = dict(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, hidden_dropout=0.1,
                multi_query=True, parallel_attn=True, alibi=False, bias=False)  # fmt: skip
    config = transformers.FalconConfig(**size | o, attn_implementation="eager")
    model = transformers.FalconModel(config).train()
    return graphs(lambda ids: model(ids, use_cache=False).last_hidden_state, torch.randint(0, 30, (2, 6)))


def electra(o: Options) -> Texts:
    size = dict(vocab_size=30, embedding_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                intermediate_size=12, max_position_embeddings=16)  # fmt: skip
    config = transformers.ElectraConfig(**size | o, attn_implementation="eager")
    model = transformers.ElectraForPreTraining(config).train()
    ids, told = torch.randint(0, 30, (2, 6)), torch.randint(0, 2, (2, 6))
    return graphs(lambda ids, told: model(ids, labels=told.float()).loss, ids, told)


def convnext(o: Options) -> Texts:
    size = dict(num_channels=3, patch_size=2, num_stages=2, hidden_sizes=[4, 8], depths=[1, 1], drop_path_rate=0.2)
    model = transformers.ConvNextV2Model(transformers.ConvNextV2Config(**size | o)).train()
    return graphs(lambda x: model(x).last_hidden_state, torch.randn(2, 3, 8, 8))


def trained(o: Options) -> Texts:
    """A step with clipping by hand, momentum and a schedule, in one graph without gradients."""
    lr, mass, most = o.get("lr", 0.05), o.get("mass", 0.9), o.get("most", 1.0)

    def f(w: torch.Tensor, m: torch.Tensor, g: torch.Tensor, n: torch.Tensor) -> tuple:
        norm = torch.linalg.vector_norm(g, o.get("order", 2))
        g = g * (most / (norm + 1e-6)).clamp(max=1.0) if o.get("clipped", True) else g
        g = g + o.get("decay", 0.01) * w if o.get("coupled", True) else g
        m = m.mul_(mass).add_(g) if o.get("in place") else m * mass + g
        rate = lr * torch.minimum(n / 10, torch.rsqrt(n))
        return w - rate * (g + mass * m if o.get("nesterov") else m), m

    return graphs(f, torch.randn(6), torch.zeros(6), torch.randn(6), torch.tensor(3.0))


PAIRS: list[Pair] = [
    ("autoregressive residual", autoregressive, {}, {"move": {"use_residual_blocks": False}}, r"parameter|add|layer"),
    ("autoregressive dropout", autoregressive, {}, {"move": {"dropout_probability": 0.3}}, r"0\.1.*0\.3|1\.11.*1\.42"),
    ("autoregressive volume", autoregressive, {}, {"volume": False}, r"- .*(?:log|sum|add)|add|log"),
    ("autoregressive spread", autoregressive, {}, {"spread": 1.4}, r"1\.0.*1\.4"),
    ("stepped count", stepped, {}, {"count": 4}, r"^\+ |stack|cat"),
    ("stepped act", stepped, {}, {"act": F.softsign}, r"tanh|softsign|abs"),
    ("stepped axis", stepped, {}, {"axis": 1}, r"stack|dim|-?0.*1|cat|view|unsqueeze|select"),
    ("states kernel", states, {}, {"d_conv": 4}, r"parameters? .*3.* -> .*4"),
    ("states norms", states, {}, {"inner_layernorms": True}, r"^\+ .*(?:parameter|rsqrt|mean|pow)"),
    ("states eps", states, {}, {"rms_norm_eps": 1e-3}, r"1e-0?5.*0\.001"),
    ("kernels general", kernels, {}, {"generalized_attention": True}, r"relu|exp|- |replaced"),
    ("kernels features", kernels, {}, {"nb_features": 8}, r"6.* -> .*8"),
    ("kernels bias", kernels, {}, {"qkv_bias": True}, r"\+ .*parameter|bias|addmm|add"),
    ("softly slots", softly, {}, {"seq_len": None, "num_slots": 2}, r"parameter .*3.* -> .*2"),
    ("softly gated", softly, {}, {"geglu": True}, r"parameter|chunk|mul|split|gelu"),
    ("temporal acausal", temporal, {}, {"causal": False}, r"pad"),
    ("temporal norm", temporal, {}, {"use_norm": "layer_norm"}, r"weight_norm|layer_norm|norm|parameter"),
    ("temporal dilated", temporal, {}, {"dilations": [1, 4]}, r"dilation|pad|2.*4|conv"),
    ("joined kind", joined, {}, {"judge": lightly.loss.BarlowTwinsLoss}, r"replaced|- |\+ |std|var|norm"),
    ("joined weight", joined, {}, {"sized": {"mu_param": 15.0}}, r"25\.0.*15\.0"),
    ("joined stopped", joined, {}, {"stopped": True}, r"detach|output|backward|- "),
    ("joined bias", joined, {}, {"bias": False}, r"- .*parameter|bias|linear|addmm"),
    ("similar window", similar, {}, {"sized": {"win_sigma": 1.2}},
     r"tensor|constant|buffer|parameter|1\.5.*1\.2|4\.5.*2\.88"),
    ("similar K", similar, {}, {"sized": {"K": (0.02, 0.03)}}, r"0\.0001.*0\.0004"),
    ("similar corners", similar, {}, {"corners": True}, r"False.*True|align|mul|arange|0\.5|clamp|7|replaced|- "),
    ("similar over", similar, {}, {"over": "sum"}, r"mean|sum"),
    ("perceptrons act", perceptrons, {}, {"act": nn.Mish()}, r"relu|mish"),
    ("perceptrons soft", perceptrons, {}, {"soft": 0.2}, r"0\.1.*0\.2|0\.025.*0\.05|0\.9.*0\.8"),
    ("perceptrons cast", perceptrons, {}, {"cast": True}, r"autocast|bf16|bfloat16|convert|_to_copy"),
    ("perceptrons dtype", perceptrons, {}, {"dtype": torch.bfloat16}, r"parameters? .*f32.* -> bf16|bf16"),
    ("perceptrons ignored", perceptrons, {}, {"ignored": 0}, r"-100.*0|ignore_index"),
    ("falcon serial", falcon, {}, {"parallel_attn": False}, r"layer_norm|parameter|add"),
    ("falcon alibi", falcon, {}, {"alibi": True}, r"alibi|cos|sin|rotary|- |replaced|\+ "),
    ("falcon heads", falcon, {}, {"num_attention_heads": 4}, r"parameter|view|2.*4|4.*2"),
    ("electra act", electra, {}, {"hidden_act": "relu"}, r"gelu|relu|erf"),
    ("electra eps", electra, {}, {"layer_norm_eps": 1e-5}, r"1e-12.*1e-0?5"),
    ("electra embedding", electra, {}, {"embedding_size": 6}, r"parameter"),
    ("convnext depth", convnext, {}, {"depths": [1, 2]}, r"\+ .*parameter|layer"),
    ("convnext path", convnext, {}, {"drop_path_rate": 0.4}, r"0\.2.*0\.4|0\.8.*0\.6"),
    ("trained order", trained, {}, {"order": float("inf")}, r"2.*inf|vector_norm|amax"),
    ("trained unclipped", trained, {}, {"clipped": False}, r"- .*(?:norm|clamp|mul)"),
    ("trained in place", trained, {}, {"in place": True}, r"mul_|add_|copy_|replaced"),
    ("trained nesterov", trained, {}, {"nesterov": True}, r"\+ "),
    ("trained uncoupled", trained, {}, {"coupled": False}, r"- .*(?:add|mul)"),
    ("nothing joined", joined, {}, {"first": False}, SAME),
]  # fmt: skip


if __name__ == "__main__":
    main(__doc__, {"tenth": PAIRS})
