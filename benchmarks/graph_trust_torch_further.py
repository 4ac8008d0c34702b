"""Pairs of graphs of torch_geometric, gpytorch, diffusers, vit_pytorch, normflows and further classes, in two sets.

    python benchmarks/graph_trust_torch_further.py FOLDER --set fifth    # needs torch and these libraries
    python benchmarks/graph_trust_torch_further.py FOLDER --set sixth    # no pair of it was looked at

For `graph_trust.py`. Each pair as Dynamo's graph, joint graph, forward and backward, or as `torch.export` prints it,
as far as these differ. Both sets and what they expect were written, and frozen in a commit, before any result.
"""

from __future__ import annotations

from functools import partial

import diffusers
import gpytorch
import normflows
import segmentation_models_pytorch as smp
import torch
import torch_geometric
import torchvision
import transformers
import vit_pytorch
from graph_trust_pairs import Options, Pair, Texts, main
from graph_trust_torch import graphs
from torch import nn
from torch.nn import functional as F

geometric = torch_geometric.nn


def exported(model: nn.Module, *inputs: torch.Tensor) -> Texts:
    """What torch.export prints, before and after decomposing."""
    torch.manual_seed(0)
    program = torch.export.export(model, inputs, strict=False)
    return {"exported": str(program), "decomposed": str(program.run_decompositions())}


def messages(o: Options) -> Texts:
    layer = {"gcn": geometric.GCNConv, "sage": geometric.SAGEConv}.get(o.get("layer", "gcn"), geometric.GCNConv)
    first, more = layer(5, 8, **o.get("conv", {})), [layer(8, 8) for _ in range(o.get("more", 1))]
    head = nn.Linear(8, 3, bias=o.get("bias", True))

    def f(x: torch.Tensor, edges: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        h = o.get("act", F.relu)(first(x, edges))
        for conv in more:
            h = h + F.dropout(conv(h, edges), o.get("drop", 0.5))
        pooled = o.get("pool", geometric.global_mean_pool)(h, batch, 2)
        return F.cross_entropy(head(pooled), torch.tensor([0, 2]), label_smoothing=o.get("smooth", 0.05))

    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 2], [1, 2, 0, 4, 5, 3, 1]])
    return graphs(f, torch.randn(6, 5), edges, torch.tensor([0, 0, 0, 1, 1, 1]))


def attentive(o: Options) -> Texts:
    conv = geometric.GATv2Conv(5, 4, heads=o.get("heads", 2), concat=o.get("concat", True),
                               negative_slope=o.get("slope", 0.2), add_self_loops=False)  # fmt: skip
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 2], [1, 2, 0, 4, 5, 3, 1]])
    return graphs(lambda x: conv(x, edges).pow(o.get("power", 2)).mean(), torch.randn(6, 5))


def kernel(o: Options) -> Texts:
    base = o.get("kernel", gpytorch.kernels.RBFKernel)()
    scaled = gpytorch.kernels.ScaleKernel(base)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        k = scaled(x).to_dense() + o.get("jitter", 1e-3) * torch.eye(len(x))
        root = torch.linalg.cholesky(k)
        a = torch.cholesky_solve((y - o.get("mean", 0.0))[:, None], root)
        return (y @ a).sum() * o.get("half", 0.5) + root.diagonal().log().sum()

    return graphs(f, torch.randn(6, 2), torch.randn(6))


def denoiser(o: Options) -> Texts:
    size = dict(sample_size=8, in_channels=2, out_channels=2, layers_per_block=1, block_out_channels=(8, 8),
                norm_num_groups=4, attention_head_dim=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                up_block_types=("AttnUpBlock2D", "UpBlock2D"))  # fmt: skip
    model = diffusers.UNet2DModel(**size | o.get("model", {})).train()
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=20, **o.get("noise", {}))
    alphas = scheduler.alphas_cumprod

    def f(x: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        a = alphas[t][:, None, None, None]
        noisy = a.sqrt() * x + (1 - a).sqrt() * noise
        out = model(noisy, t).sample
        target = noise if o.get("epsilon", True) else a.sqrt() * noise - (1 - a).sqrt() * x
        weight = torch.clamp(a / (1 - a), max=o.get("snr", 5.0))
        return (weight * o.get("error", F.mse_loss)(out, target, reduction="none")).mean()

    return graphs(f, torch.randn(2, 2, 8, 8), torch.randn(2, 2, 8, 8), torch.tensor([3, 9]))


def blocks(o: Options) -> Texts:
    o = dict(o)
    kind = o.pop("kind", vit_pytorch.ViT)
    size = dict(image_size=16, patch_size=8, num_classes=4, dim=16, depth=1, heads=2, mlp_dim=24, dropout=0.1,
                emb_dropout=0.05)  # fmt: skip
    return graphs(kind(**size | o).train(), torch.randn(2, 3, 16, 16))


def density(o: Options) -> Texts:
    flows = []
    for _ in range(o.get("layers", 2)):
        net = normflows.nets.MLP([1, o.get("width", 8), 2], init_zeros=True)
        flows += [normflows.flows.AffineCouplingBlock(net, scale_map=o.get("map", "exp")),
                  normflows.flows.Permute(2, mode="swap")]  # fmt: skip
    model = normflows.NormalizingFlow(normflows.distributions.DiagGaussian(2), flows)
    return graphs(lambda x: model.forward_kld(x * o.get("gain", 1.0)) + o.get("tax", 0.0) * x.abs().sum(),
                  torch.randn(5, 2))  # fmt: skip


def segmented(o: Options) -> Texts:
    size = dict(encoder_weights=None, encoder_depth=3, decoder_channels=(16, 8, 8), classes=2)
    model = smp.Unet("resnet18", **size | o.get("model", {}))
    loss = o.get("loss", smp.losses.DiceLoss)("binary", **o.get("more", {}))
    target = torch.randint(0, 2, (2, 2, 32, 32)).float()
    return graphs(lambda x: loss(model(x), target), torch.randn(2, 3, 32, 32))


def mixtral(o: Options) -> Texts:
    size = dict(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
                intermediate_size=24, num_local_experts=2, max_position_embeddings=32)  # fmt: skip
    config = transformers.Qwen3Config(**size | dict(head_dim=4) | o, attn_implementation="eager")
    model = transformers.Qwen3Model(config).train()
    return graphs(lambda ids: model(ids, use_cache=False).last_hidden_state, torch.randint(0, 40, (2, 8)))


def gemma(o: Options) -> Texts:
    size = dict(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                intermediate_size=24, head_dim=4, sliding_window=4, max_position_embeddings=32)  # fmt: skip
    model = transformers.Gemma2Model(transformers.Gemma2Config(**size | o, attn_implementation="eager")).train()
    return graphs(lambda ids: model(ids, use_cache=False).last_hidden_state, torch.randint(0, 40, (2, 8)))


def whisper(o: Options) -> Texts:
    size = dict(vocab_size=40, num_mel_bins=4, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                d_model=16, decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_source_positions=8,
                pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)  # fmt: skip
    config = transformers.WhisperConfig(**size | o, attn_implementation="eager")
    model = transformers.models.whisper.modeling_whisper.WhisperEncoder(config).train()
    return graphs(lambda x: model(x).last_hidden_state, torch.randn(2, 4, 16))


def pictures(o: Options) -> Texts:
    efficient = torchvision.models.efficientnet
    kind = efficient.FusedMBConvConfig if o.get("fused") else efficient.MBConvConfig
    setting = [kind(o.get("expand", 2), o.get("kernel", 3), o.get("stride", 1), 8, 8, 1)]
    model = efficient.EfficientNet(setting, o.get("drop", 0.3), stochastic_depth_prob=o.get("depth", 0.2),
                                   num_classes=o.get("classes", 4), last_channel=16)  # fmt: skip
    return graphs(model.train(not o.get("eval")), torch.randn(2, 3, 16, 16))


def windows(o: Options) -> Texts:
    model = torchvision.models.SwinTransformer(
        patch_size=[4, 4], embed_dim=8, depths=[2], num_heads=[2], window_size=o.get("window", [4, 4]), num_classes=3,
        dropout=o.get("drop", 0.0), stochastic_depth_prob=o.get("depth", 0.1), mlp_ratio=o.get("ratio", 2.0),
    )  # fmt: skip
    return graphs(model.train(), torch.randn(2, 3, 32, 32))


def stepped(o: Options) -> Texts:
    o = dict(o)
    model = nn.Linear(4, 3)
    tuned = o.pop("kind", torch.optim.RAdam)(model.parameters(), **{"lr": 0.02} | o)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return graphs(lambda: tuned.step())


class Small(nn.Module):
    """What people write into a module of their own: all that torch.export follows."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.o = o
        self.embed = nn.Embedding(20, 8, padding_idx=o.get("padding"))
        self.rnn = o.get("rnn", nn.GRU)(8, 8, num_layers=o.get("layers", 1), batch_first=True)
        self.conv = nn.Conv1d(8, 8, 3, padding=1, groups=o.get("groups", 1), bias=o.get("bias", True))
        self.norm = o.get("norm", nn.BatchNorm1d)(8)
        self.head = nn.Linear(8, 20)
        if o.get("tied"):
            self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        o = self.o
        x = self.embed(ids) * o.get("gain", 2.5)
        h = x if o.get("plain") else self.rnn(x)[0]
        y = self.conv(h.transpose(1, 2))
        y = self.norm(y) if o.get("before", True) else y
        y = o.get("act", F.gelu)(y)
        y = y if o.get("before", True) else self.norm(y)
        h = h + y.transpose(1, 2) if o.get("residual", True) else y.transpose(1, 2)
        if o.get("counted"):
            self.count.add_(o["counted"])
        mask = torch.triu(torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool), o.get("diagonal", 1))
        scores = (h @ h.transpose(1, 2)).masked_fill(mask, o.get("fill", -1e4)) / o.get("divisor", 2.0)
        h = F.dropout(scores.softmax(o.get("dim", -1)) @ h, o.get("drop", 0.1), training=o.get("training", True))
        h = h.detach() if o.get("detached") else h
        return self.head(h.to(o.get("dtype", torch.float32)).float()).log_softmax(-1)


def small(o: Options) -> Texts:
    ids = torch.randint(0, 20, (o.get("batch", 2), 6))
    torch.manual_seed(0)
    compiled = {} if o.get("rnn") or not o.get("plain") else graphs(Small(o).train(), ids)
    return compiled | exported(Small(o).train(), ids)


plain = {"plain": True}
FIFTH: list[Pair] = [
    ("messages layer", messages, {}, {"layer": "sage"}, r"parameters? |scatter|^[+-] |replaced"),
    ("messages normalise", messages, {}, {"conv": {"normalize": False}}, r"- .*(?:pow|mul|scatter|index)"),
    ("messages dropout", messages, {}, {"drop": 0.3}, r"0\.5.*0\.3|2\.0.*1\.42857"),
    ("messages pool", messages, {}, {"pool": geometric.global_add_pool}, r"- .*(?:div|clamp|count|ones|scatter)|mean"),
    ("messages rounds", messages, {}, {"more": 2}, r"^\+ "),
    ("attentive slope", attentive, {}, {"slope": 0.3}, r"0\.2.*0\.3"),
    ("attentive heads", attentive, {}, {"heads": 3}, r"parameters? .*8.* -> .*12|\[1,2,4\] -> f32\[1,3,4\]"),
    ("kernel", kernel, {}, {"kernel": gpytorch.kernels.MaternKernel}, r"\+ |- |replaced"),
    ("kernel jitter", kernel, {}, {"jitter": 1e-5}, r"0\.001.*1e-05"),
    ("denoiser groups", denoiser, {}, {"model": {"norm_num_groups": 2}}, r"group_norm.*4.*2"),
    ("denoiser eps", denoiser, {}, {"model": {"norm_eps": 1e-6}}, r"1e-05.*1e-06"),
    ("denoiser activation", denoiser, {}, {"model": {"act_fn": "gelu"}}, r"silu|gelu|sigmoid|erf"),
    ("denoiser target", denoiser, {}, {"epsilon": False}, r"\+ .*(?:mul|sub)|operand|mse"),
    ("denoiser snr", denoiser, {}, {"snr": 3.0}, r"5\.0.*3\.0"),
    ("denoiser loss", denoiser, {}, {"error": F.l1_loss}, r"mse|l1|pow|abs"),
    ("vit depth", blocks, {}, {"depth": 2}, r"^\+ .*(?:parameter|layers)"),
    ("vit dropout", blocks, {}, {"dropout": 0.3}, r"0\.1.*0\.3|1\.1111.*1\.42857"),
    ("vit pool", blocks, {}, {"pool": "mean"}, r"mean|select|getitem"),
    ("density map", density, {}, {"map": "sigmoid"}, r"exp|sigmoid"),
    ("density gain", density, {"gain": 1.5}, {"gain": 1.8}, r"1\.5.*1\.8"),
    ("segmented loss", segmented, {}, {"loss": smp.losses.JaccardLoss}, r"sub|mul|add|div|replaced|^[+-] "),
    ("segmented smoothing", segmented, {}, {"more": {"smooth": 1.0}}, r"0\.0.*1\.0|\+ .*add"),
    ("qwen theta", mixtral, {}, {"rope_theta": 500000.0, "rope_parameters": {"rope_theta": 500000.0,
                               "rope_type": "default"}}, r"10000|500000|constant|inv_freq|tensor|buffer"),
    ("qwen eps", mixtral, {}, {"rms_norm_eps": 1e-5}, r"1e-06.*1e-05"),
    ("qwen groups", mixtral, {}, {"num_key_value_heads": 4}, r"parameters? .*8,16.* -> .*16,16"),
    ("gemma cap", gemma, {}, {"attn_logit_softcapping": 30.0}, r"50\.0.*30\.0"),
    ("gemma window", gemma, {}, {"sliding_window": 6}, r"4.*6|-4|window"),
    ("gemma scale", gemma, {}, {"query_pre_attn_scalar": 64}, r"0\.0625.*0\.125"),
    ("whisper activation", whisper, {}, {"activation_function": "relu"}, r"gelu|relu|erf"),
    ("whisper layers", whisper, {}, {"encoder_layers": 2}, r"^\+ .*(?:parameter|layers)"),
    ("whisper dropout", whisper, {}, {"dropout": 0.2}, r"0\.0.*0\.2|0\.2|dropout|1\.25"),
    ("efficient fused", pictures, {}, {"fused": True}, r"^- .*(?:parameter|sigmoid|mean|conv)|parameters? "),
    ("efficient stride", pictures, {}, {"stride": 2}, r"conv.*1, 1.*2, 2"),
    ("swin window", windows, {}, {"window": [2, 2]}, r"parameters? |view|reshape|\[|roll|pad|4.*2"),
    ("swin ratio", windows, {}, {"ratio": 3.0}, r"parameters? .*16.* -> .*24"),
    ("radam betas", stepped, {}, {"betas": (0.8, 0.999)}, r"0\.9.*0\.8|0\.1.*0\.2"),
    ("radam decay", stepped, {}, {"weight_decay": 0.1, "decoupled_weight_decay": True}, r"\+ .*mul"),
    ("adadelta rho", stepped, {"kind": torch.optim.Adadelta}, {"kind": torch.optim.Adadelta, "rho": 0.8},
     r"0\.9.*0\.8|0\.1.*0\.2"),
    ("small gain", small, plain, plain | {"gain": 3.5}, r"2\.5.*3\.5"),
    ("small order", small, plain, plain | {"before": False}, r"operand|reads|exchanged|gelu|norm"),
    ("small residual", small, plain, plain | {"residual": False}, r"- .*add|add"),
    ("small counted", small, plain, plain | {"counted": 2}, r"\+ .*(?:add|count|copy|parameter|output)"),
    ("small diagonal", small, plain, plain | {"diagonal": 2}, r"1.*2"),
    ("small fill", small, plain, plain | {"fill": -1e9}, r"-1(?:0000|e\+?0?4).*-1(?:000000000|e\+?0?9)"),
    ("small axis", small, plain, plain | {"dim": -2}, r"softmax.*-1.*-2"),
    ("small detached", small, plain, plain | {"detached": True}, r"detach|^- |output"),
    ("small half", small, plain, plain | {"dtype": torch.bfloat16}, r"bf16|bfloat16|to"),
    ("small norm", small, plain, plain | {"norm": partial(nn.GroupNorm, 2)}, r"norm|parameters? "),
    ("recurrent cell", small, {}, {"rnn": nn.LSTM}, r"gru|lstm|parameters? |sigmoid|tanh"),
    ("recurrent layers", small, {}, {"layers": 2}, r"^\+ .*parameter|layers|gru"),
]  # fmt: skip
SIXTH: list[Pair] = [
    ("messages self loops", messages, {}, {"conv": {"add_self_loops": False}}, r"- .*(?:cat|arange|loop|cond|full)"),
    ("messages activation", messages, {}, {"act": torch.tanh}, r"relu|tanh"),
    ("messages bias", messages, {}, {"bias": False}, r"^- .*parameter|bias|linear|addmm"),
    ("messages smoothing", messages, {}, {"smooth": 0.2}, r"0\.05.*0\.2|0\.95.*0\.8|0\.016.*0\.066"),
    ("attentive mean", attentive, {}, {"concat": False}, r"mean|view|reshape|parameters? "),
    ("attentive power", attentive, {}, {"power": 4}, r"2.*4"),
    ("kernel half", kernel, {}, {"half": 0.75}, r"0\.5.*0\.75"),
    ("kernel mean", kernel, {"mean": 0.25}, {"mean": 0.5}, r"0\.25.*0\.5"),
    ("denoiser channels", denoiser, {}, {"model": {"block_out_channels": (8, 16)}}, r"parameters? .*8.* -> .*16"),
    ("denoiser steps", denoiser, {}, {"noise": {"beta_end": 0.03}}, r"tensor|constant|buffer|beta|parameters? "),
    ("denoiser scaled", denoiser, {}, {"model": {"downsample_padding": 0}}, r"pad"),
    ("denoiser shift", denoiser, {}, {"model": {"resnet_time_scale_shift": "scale_shift"}},
     r"parameters? |chunk|split|\+ "),
    ("vit heads", blocks, {}, {"heads": 4}, r"parameters? .*384,16.* -> .*768,16"),
    ("vit embedding dropout", blocks, {}, {"emb_dropout": 0.2}, r"0\.05.*0\.2|1\.0526.*1\.25"),
    ("vit classes", blocks, {}, {"num_classes": 6}, r"parameters? .*\[4,16\] -> f32\[6,16\]"),
    ("density layers", density, {}, {"layers": 3}, r"^\+ .*(?:parameter|flows)"),
    ("density width", density, {}, {"width": 12}, r"parameters? .*8.* -> .*12"),
    ("density tax", density, {"tax": 0.1}, {"tax": 0.3}, r"0\.1.*0\.3"),
    ("segmented attention", segmented, {}, {"model": {"decoder_attention_type": "scse"}},
     r"^\+ .*(?:parameter|sigmoid|attention)"),
    ("segmented log", segmented, {}, {"more": {"log_loss": True}}, r"log"),
    ("qwen layers", mixtral, {}, {"num_hidden_layers": 2}, r"^\+ .*(?:parameter|layers)"),
    ("qwen attention bias", mixtral, {}, {"attention_bias": True}, r"^\+ .*parameter|bias|linear|addmm"),
    ("qwen dropout", mixtral, {}, {"attention_dropout": 0.2}, r"0\.0.*0\.2|0\.2|dropout|1\.25"),
    ("gemma activation", gemma, {}, {"hidden_activation": "silu"}, r"gelu|silu|tanh|sigmoid"),
    ("gemma eps", gemma, {}, {"rms_norm_eps": 1e-5}, r"1e-06.*1e-05"),
    ("gemma width", gemma, {}, {"intermediate_size": 32}, r"parameters? .*24.* -> .*32"),
    ("whisper heads", whisper, {}, {"encoder_attention_heads": 4}, r"view|reshape|\[2,8,2,8\]|\[2,2,8,8\]|0\.35.*0\.5"),
    ("whisper mels", whisper, {}, {"num_mel_bins": 4, "scale_embedding": True}, r"\+ .*mul|4\.0|embed"),
    ("efficient kernel", pictures, {}, {"kernel": 5}, r"parameters? .*3,3.* -> .*5,5"),
    ("efficient classes", pictures, {}, {"classes": 7}, r"parameters? .*\[4,.* -> f32\[7,"),
    ("efficient evaluated", pictures, {}, {"eval": True}, r"batch_norm|training|True.*False|num_batches"),
    ("swin depth dropped", windows, {}, {"depth": 0.3}, r"0\.1.*0\.3|0\.9.*0\.7|0\.95.*0\.85|bernoulli"),
    ("swin dropout", windows, {}, {"drop": 0.2}, r"0\.0.*0\.2|0\.2|1\.25"),
    ("adamax eps", stepped, {"kind": torch.optim.Adamax}, {"kind": torch.optim.Adamax, "eps": 1e-6}, r"1e-08.*1e-06"),
    ("rmsprop centred", stepped, {"kind": torch.optim.RMSprop}, {"kind": torch.optim.RMSprop, "centered": True},
     r"^\+ |addcmul|lerp|sub"),
    ("nadam momentum", stepped, {"kind": torch.optim.NAdam}, {"kind": torch.optim.NAdam, "momentum_decay": 0.01},
     r"0\.004.*0\.01|0\.96"),
    ("small activation", small, plain, plain | {"act": F.silu}, r"gelu|silu|sigmoid|erf"),
    ("small divisor", small, plain, plain | {"divisor": 4.0}, r"2\.0.*4\.0"),
    ("small dropout", small, plain, plain | {"drop": 0.3}, r"0\.1.*0\.3|1\.1111.*1\.42857"),
    ("small evaluated", small, plain, plain | {"training": False}, r"dropout|True.*False"),
    ("small groups", small, plain, plain | {"groups": 2}, r"parameters? .*\[8,8,3\] -> f32\[8,4,3\]"),
    ("small bias", small, plain, plain | {"bias": False}, r"^- .*parameter|bias|conv"),
    ("small tied", small, plain, plain | {"tied": True}, r"^- .*parameter"),
    ("small padding", small, plain, plain | {"padding": 0}, r"embedding.*0|-1"),
    ("small batch", small, plain, plain | {"batch": 3}, r"\[2,6\] -> i64\[3,6\]|\[2,6\] -> s64\[3,6\]"),
    ("small counter", small, plain | {"counted": 1}, plain | {"counted": 3}, r"1.*3"),
    ("recurrent simple", small, {}, {"rnn": nn.RNN}, r"gru|rnn|parameters? |sigmoid|tanh"),
]  # fmt: skip


if __name__ == "__main__":
    main(__doc__, {"fifth": FIFTH, "sixth": SIXTH})
