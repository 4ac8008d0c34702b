"""Pairs of programs with one planted difference, lowered by the installed jax and torch for `graph_trust.py`.

    python benchmarks/graph_trust_programs.py FOLDER

Per JAX program three pairs: HLO, optimised HLO, StableHLO; per torch program Dynamo's graph. The folder gets a
`pairs.toml` with what each pair should be told as.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from graph_trust_pairs import Options, Pair, Texts, main

# How a training step of the JAX model may be varied; the base is all defaults.
BASE: Options = {
    "rate": 0.05, "decay": 0.99, "eps": 1e-6, "layers": 3, "width": 16, "batch": 8, "dtype": "float32", "act": "tanh",
    "clip": 1.0, "norm": True, "remat": False, "scan": False, "donate": (), "extra": False, "order": False,
    "unroll": 1, "label": 0.0,
}  # fmt: skip


def step(params: Any, state: Any, x: jax.Array, y: jax.Array, o: dict[str, Any]) -> Any:
    """A training step: residual layers with RMS norm, cross entropy, momentum, clipping."""

    def layer(h: jax.Array, weight: jax.Array) -> jax.Array:
        if o["norm"]:
            h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + o["eps"])
        act = {"tanh": jnp.tanh, "gelu": jax.nn.gelu, "sin": jnp.sin, "cos": jnp.cos}[o["act"]]
        return h + act(h @ weight)

    if o["remat"]:
        layer = jax.checkpoint(layer)

    def loss(params: Any) -> jax.Array:
        h = x.astype(params["layers"].dtype if o["scan"] else params["layers"][0].dtype)
        if o["scan"]:
            h, _ = jax.lax.scan(lambda h, w: (layer(h, w), None), h, params["layers"])
        else:
            for weight in params["layers"]:
                h = layer(h, weight)
        logits = jax.nn.log_softmax(h @ params["head"])
        target = jax.nn.one_hot(y, logits.shape[-1]) * (1 - o["label"]) + o["label"] / logits.shape[-1]
        return -jnp.mean(jnp.sum(target * logits, -1)).astype(jnp.float32)

    value, grads = jax.value_and_grad(loss)(params)
    if o["clip"] is not None:
        norm = jnp.sqrt(sum(jnp.sum(g.astype(jnp.float32) ** 2) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, o["clip"] / norm).astype(g.dtype), grads)
    state = jax.tree.map(lambda m, g: o["decay"] * m + g, state, grads)
    params = jax.tree.map(lambda p, m: p - o["rate"] * m, params, state)
    return (params, state, value, jnp.max(jnp.abs(x))) if o["extra"] else (params, state, value)


def lowered(options: Options) -> Texts:
    """The three texts of a variant."""
    o = BASE | options
    dtype, width, layers = jnp.dtype(o["dtype"]), o["width"], o["layers"]
    weight = jax.ShapeDtypeStruct((width, width), dtype)
    stacked = jax.ShapeDtypeStruct((layers, width, width), dtype)
    params = {"layers": stacked if o["scan"] else [weight] * layers, "head": jax.ShapeDtypeStruct((width, 10), dtype)}
    x, y = jax.ShapeDtypeStruct((o["batch"], width), jnp.float32), jax.ShapeDtypeStruct((o["batch"],), jnp.int32)
    low = jax.jit(partial(step, o=o), donate_argnums=o["donate"]).lower(params, params, x, y)
    return {"hlo.txt": low.as_text("hlo"), "opt.txt": low.compile().as_text(), "shlo.mlir": low.as_text()}


def attention(x: torch.Tensor, w: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    q, k, v = (x @ w).chunk(3, -1)
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -1e9)
    return scores.softmax(-1) @ v


def in_mode(x: torch.Tensor, w: torch.Tensor, mode: Any) -> torch.Tensor:
    with mode():
        y = x @ w
    return torch.relu(y).sum()


def buffers(x: torch.Tensor, w: torch.Tensor, beta: float, inplace: bool) -> torch.Tensor:
    y = x.clone()
    y.mul_(beta)
    y[0] = y[1] if inplace else y[2]
    return y @ w


def noise(x: torch.Tensor, w: torch.Tensor, rate: float, twice: bool) -> torch.Tensor:
    if twice:
        torch.rand(4)
    return torch.nn.functional.dropout(x @ w, rate, True)


def dynamo(o: Options) -> Texts:
    """The text of Dynamo's graph of a function with its arguments beside tensors."""
    arguments, texts = dict(o), Texts()
    function = partial(arguments.pop("function"), **arguments)

    def keep(module: Any, inputs: Any) -> Any:
        texts["dynamo"] = module.print_readable(print_output=False)
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep)(torch.ones(6, 8), torch.ones(8, 24))
    return texts


JAX_PAIRS: list[Pair] = [
    ("rms eps", lowered, {}, {"eps": 1e-3}, r"1e-0?6 -> 0\.001"),
    ("decay of momentum", lowered, {}, {"decay": 0.9}, r"0\.99 -> 0\.9"),
    ("rate", lowered, {}, {"rate": 0.25}, r"-?0\.05 -> -?0\.25"),
    ("activation", lowered, {}, {"act": "gelu"}, r"tanh|parameter_insert"),
    ("sin for cos", lowered, {"act": "sin"}, {"act": "cos"}, r"sine|cosine"),
    ("batch", lowered, {}, {"batch": 12}, r"\[8,16\] -> f32\[12,16\]"),
    ("weights in bf16", lowered, {}, {"dtype": "bfloat16"}, r"f32\[16,16\] -> bf16"),
    ("clipping of gradients", lowered, {}, {"clip": 0.5}, r"1 -> 0\.5"),
    ("no clipping", lowered, {}, {"clip": None}, r"- "),
    ("no norm", lowered, {}, {"norm": False}, r"- .*rsqrt|- "),
    ("one layer more", lowered, {}, {"layers": 4}, r"\+ .*parameter"),
    ("donation", lowered, {}, {"donate": (0,)}, r"donation of argument"),
    ("metric returned", lowered, {}, {"extra": True}, r"\+ output"),
    ("scan length", lowered, {"scan": True}, {"scan": True, "layers": 5}, r"3 -> 5 steps"),
    ("remat in scan", lowered, {"scan": True}, {"scan": True, "remat": True}, r"remat"),
    ("rate beside a scan", lowered, {"scan": True}, {"scan": True, "rate": 0.25}, r"-?0\.05 -> -?0\.25"),
    ("eps in a scan", lowered, {"scan": True}, {"scan": True, "eps": 1e-3}, r"1e-0?6 -> 0\.001"),
    ("activation in a scan", lowered, {"scan": True, "act": "sin"}, {"scan": True, "act": "cos"}, r"sine|cosine"),
    ("label smoothing", lowered, {"label": 0.1}, {"label": 0.2}, r"0\.9 -> 0\.8"),
]
scaled = {"function": attention, "scale": 0.25, "causal": True}
moded = {"function": in_mode, "mode": torch.no_grad}
halved = {"function": in_mode, "mode": partial(torch.autocast, "cpu", torch.bfloat16)}
written = {"function": buffers, "beta": 0.5, "inplace": True}
drawn = {"function": noise, "rate": 0.1, "twice": False}
TORCH_PAIRS: list[Pair] = [
    ("scale of attention", dynamo, scaled, scaled | {"scale": 0.5}, r"0\.25.*0\.5"),
    ("causal mask", dynamo, scaled, scaled | {"causal": False}, r"triu|masked_fill"),
    ("inference block", dynamo, moded, moded | {"mode": torch.enable_grad}, r"grad"),
    ("autocast dtype", dynamo, halved, halved | {"mode": partial(torch.autocast, "cpu", torch.float16)},
     r"bfloat16.*float16"),
    ("factor of mul_", dynamo, written, written | {"beta": 0.75}, r"0\.5.*0\.75"),
    ("row read by setitem", dynamo, written, written | {"inplace": False}, r"1.*2"),
    ("dropout rate", dynamo, drawn, drawn | {"rate": 0.3}, r"0\.1.*0\.3"),
    ("one draw more", dynamo, drawn, drawn | {"twice": True}, r"\+ torch\.rand"),
]  # fmt: skip


if __name__ == "__main__":
    main(__doc__, {"programs": JAX_PAIRS + TORCH_PAIRS})
