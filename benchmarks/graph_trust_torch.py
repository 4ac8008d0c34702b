"""Pairs of torch.compile graphs of transformers' and own models for `graph_trust.py`, in two sets.

    python benchmarks/graph_trust_torch.py FOLDER --set first     # needs torch and transformers
    python benchmarks/graph_trust_torch.py FOLDER --set second    # measured after what the first showed was mended

Each pair as Dynamo's graph, joint graph, forward and backward, as far as these differ. Both sets and what they expect
were written before any result.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import transformers
from graph_trust_pairs import Pair, Texts, main
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def graphs(function: Callable, *arguments: Any) -> Texts:
    """The texts of the first graph that a call compiles: Dynamo's, joint, forward, backward."""
    texts: Texts = {}

    def keep(name: str) -> Callable:
        def compiler(module: Any, inputs: Any) -> Any:
            texts.setdefault(name, module.print_readable(print_output=False))
            return module.forward

        return compiler

    def partition(joint: Any, inputs: Any, **kwargs: Any) -> Any:
        texts.setdefault("joint", joint.print_readable(print_output=False))
        return default_partition(joint, inputs, **kwargs)

    lowered = aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"), partition_fn=partition)

    def backend(module: Any, inputs: Any) -> Any:
        keep("dynamo")(module, inputs)
        return lowered(module, inputs)

    torch._dynamo.reset()
    torch.manual_seed(0)
    result = torch.compile(function, backend=backend)(*arguments)
    if isinstance(result, torch.Tensor) and result.requires_grad:
        result.sum().backward()
    return texts


def bert(o: dict[str, Any]) -> Texts:
    size = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24)
    config = transformers.BertConfig(**size | o, max_position_embeddings=16, attn_implementation="eager")
    model = transformers.BertModel(config).train()
    return graphs(lambda ids: model(ids).last_hidden_state, torch.randint(0, 50, (2, 8)))


def llama(o: dict[str, Any]) -> Texts:
    o = dict(o)
    length, frozen = o.pop("length", 8), o.pop("frozen", False)
    size = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24)
    config = transformers.LlamaConfig(
        **size | {"num_key_value_heads": 2} | o, max_position_embeddings=32, attn_implementation="sdpa"
    )
    model = transformers.LlamaModel(config).train()
    if frozen:
        model.layers[0].mlp.requires_grad_(False)
    return graphs(lambda ids: model(ids, use_cache=False).last_hidden_state, torch.randint(0, 50, (2, length)))


def vision(o: dict[str, Any]) -> Texts:
    size = dict(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=16, patch_size=4
    )
    model = transformers.ViTModel(
        transformers.ViTConfig(**size | o, attn_implementation="eager"), add_pooling_layer=False
    ).train()
    return graphs(lambda x: model(x).last_hidden_state, torch.randn(2, 3, 16, 16))


class Net(torch.nn.Module):
    """Convolution, batch norm, pool, two linear layers, with what may vary."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.o = o
        self.conv = torch.nn.Conv2d(3, 6, 3, stride=o["stride"], padding=1, groups=o["groups"])
        self.norm = torch.nn.BatchNorm2d(6, momentum=o["momentum"])
        self.fc1 = torch.nn.Linear(6, 12, dtype=torch.float32)
        self.fc2 = torch.nn.Linear(12, 5, bias=o["bias"])
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        o = self.o
        if o["count"]:
            self.steps.add_(o["count"])
        h = o["act"](self.norm(self.conv(x)))
        h = (F.max_pool2d if o["max"] else F.avg_pool2d)(h, 2).mean((-1, -2))
        h = F.dropout(h, o["drop"])
        with torch.autocast("cpu", torch.bfloat16) if o["cast"] else nullcontext():
            h = self.fc1(h)
        h = checkpoint(lambda v: F.silu(v) * v.exp(), h, use_reentrant=False) if o["remat"] else F.silu(h) * h.exp()
        if o["noise"]:
            h = h + torch.randn_like(h) * o["noise"]
        with torch.no_grad() if o["nograd"] else nullcontext():
            scale = h.float().abs().amax(o["dim"], keepdim=True)
        loss = F.cross_entropy(self.fc2((h / scale).float()), y, label_smoothing=o["smooth"], reduction=o["reduction"])
        return loss * o["factor"]


NET: dict[str, Any] = dict(stride=1, groups=1, momentum=0.1, bias=True, count=1, act=torch.relu, max=True, drop=0.1,
                           cast=False, remat=False, noise=0.0, nograd=False, dim=-1, smooth=0.1, reduction="mean",
                           factor=2.0, batch=4)  # fmt: skip


def net(o: dict[str, Any]) -> Texts:
    o = NET | o
    return graphs(Net(o).train(), torch.randn(o["batch"], 3, 8, 8), torch.randint(0, 5, (o["batch"],)))


def optimizer(o: dict[str, Any]) -> Texts:
    o = dict(o)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    tuned = o.pop("kind", torch.optim.AdamW)(model.parameters(), **{"lr": 0.01} | o)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return graphs(lambda: tuned.step())


def masked(o: dict[str, Any]) -> Texts:
    """Attention of one's own, with a table, indices and in-place updates."""
    table = torch.arange(8.0) * o.get("slope", 0.5)

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        bias = (torch.arange(8)[None] - torch.arange(8)[:, None]).clamp(-o.get("window", 3), 3) * 0.5
        s = torch.einsum("bhqd,bhkd->bhqk", q, k) * o.get("scale", 0.35) + bias + table.sum() * 0
        s = s.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(o.get("diagonal", 1)), float("-inf"))
        p = s.softmax(o.get("dim", -1))
        out = torch.where(p > o.get("cut", 0.01), p, 0) @ v
        out = out[..., :: o.get("hop", 1), :]
        left, right = (q.sum(), v.sum()) if o.get("left", True) else (v.sum(), q.sum())
        result = out.cumsum(o.get("along", 2)) * (left - right)
        return result.clone() if o.get("clone") else result

    shape = (2, 2, 8, 4)
    return graphs(f, *(torch.randn(shape, requires_grad=True) for _ in range(3)))


gelu = partial(F.gelu, approximate="none")
FIRST: list[Pair] = [
    ("bert heads", bert, {}, {"num_attention_heads": 2}, r"4.* -> .*2|reshape|view"),
    ("bert layer", bert, {}, {"num_hidden_layers": 3}, r"^\+ "),
    ("bert activation", bert, {}, {"hidden_act": "relu"}, r"gelu|relu"),
    ("bert eps", bert, {}, {"layer_norm_eps": 1e-5}, r"1e-12.*1e-05"),
    ("bert dropout", bert, {}, {"hidden_dropout_prob": 0.3}, r"0\.1.*0\.3"),
    ("llama kv heads", llama, {}, {"num_key_value_heads": 4}, r"parameters?|expand|repeat"),
    ("llama frozen mlp", llama, {}, {"frozen": True}, r"^- |requires_grad|parameter|output"),
    ("llama length", llama, {}, {"length": 12}, r"\[2,8\].* -> .*\[2,12\]"),
    ("vit qkv bias", vision, {}, {"qkv_bias": False}, r"^- .*parameter|bias|linear|addmm"),
    ("net stride", net, {}, {"stride": 2}, r"conv"),
    ("net momentum", net, {}, {"momentum": 0.2}, r"0\.1.*0\.2|0\.9.*0\.8"),
    ("net activation", net, {}, {"act": torch.tanh}, r"relu|tanh"),
    ("net autocast", net, {}, {"cast": True}, r"autocast|bf16"),
    ("net checkpoint", net, {}, {"remat": True}, r"remat|checkpoint"),
    ("net noise", net, {"noise": 0.1}, {"noise": 0.2}, r"0\.1.*0\.2"),
    ("net no_grad", net, {}, {"nograd": True}, r"grad|detach|- .*amax|- .*(?:eq|where|mask)"),
    ("net smoothing", net, {}, {"smooth": 0.2}, r"0\.1.*0\.2|0\.9.*0\.8|0\.02.*0\.04"),
    ("net counter", net, {}, {"count": 2}, r"1.*2"),
    ("adamw decay", optimizer, {}, {"weight_decay": 0.1}, r"0\.01.*0\.1|0\.9999.*0\.999"),
    ("adamw betas", optimizer, {}, {"betas": (0.8, 0.999)}, r"0\.9.*0\.8|0\.1.*0\.2"),
    ("attention scale", masked, {}, {"scale": 0.5}, r"0\.35.*0\.5"),
    ("diagonal of mask", masked, {}, {"diagonal": 2}, r"1.*2"),
    ("softmax dim", masked, {}, {"dim": -2}, r"softmax.*-1.*-2"),
    ("operands exchanged", masked, {}, {"left": False}, r"exchanged|operand|sub"),
]  # fmt: skip
SECOND: list[Pair] = [
    ("bert width", bert, {}, {"intermediate_size": 32}, r"parameters? .*24.* -> .*32"),
    ("bert attention dropout", bert, {}, {"attention_probs_dropout_prob": 0.2}, r"0\.1.*0\.2"),
    ("llama norm eps", llama, {}, {"rms_norm_eps": 1e-5}, r"1e-06.*1e-05"),
    ("llama tanh", llama, {}, {"hidden_act": "gelu"}, r"silu|gelu|sigmoid|erf"),
    ("llama attention bias", llama, {}, {"attention_bias": True}, r"^\+ .*parameter|bias|linear|addmm"),
    ("vit patch", vision, {}, {"patch_size": 8}, r"parameters? |conv"),
    ("net groups", net, {}, {"groups": 3}, r"conv|parameters? .*\[6,3,3,3\] -> f32\[6,1,3,3\]"),
    ("net pool", net, {}, {"max": False}, r"pool"),
    ("net dropout", net, {}, {"drop": 0.4}, r"0\.1.*0\.4"),
    ("net head bias", net, {}, {"bias": False}, r"^- .*parameter|bias|linear|addmm"),
    ("net amax dim", net, {}, {"dim": 0}, r"amax"),
    ("net reduction", net, {}, {"reduction": "sum"}, r"mean.*sum|reduction|cross_entropy|div|nll"),
    ("net factor", net, {}, {"factor": 3.0}, r"2\.0.*3\.0|2 -> 3"),
    ("net batch", net, {}, {"batch": 6}, r"\[4,3,8,8\] -> f32\[6,3,8,8\]"),
    ("adam for adamw", optimizer, {}, {"kind": torch.optim.Adam}, r"^- |mul"),
    ("adamw amsgrad", optimizer, {}, {"amsgrad": True}, r"^\+ .*|maximum"),
    ("threshold", masked, {}, {"cut": 0.02}, r"0\.01.*0\.02"),
    ("strided rows", masked, {}, {"hop": 2}, r"slice|getitem"),
    ("cumsum along", masked, {}, {"along": 3}, r"cumsum"),
    ("relative window", masked, {}, {"window": 2}, r"-3.*-2"),
]  # fmt: skip


if __name__ == "__main__":
    main(__doc__, {"first": FIRST, "second": SECOND})
