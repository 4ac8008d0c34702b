"""Pairs of further programs for `graph_trust.py`, made after the causes were mended: an LSTM in a scan, a convolution.

    python benchmarks/graph_trust_unseen.py FOLDER

As in `graph_trust_programs.py`, each pair three times: HLO, optimised HLO, StableHLO. `conv_value_returned.a.hlo.txt`
is `tests/graph/data/fresh/pool.hlo.txt.gz`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from graph_trust_pairs import Pair, main

F32 = jnp.float32
LSTM: dict[str, Any] = {"forget": 1.0, "remat": False, "reverse": False, "scale": 1.0, "l2": 1e-4, "lr": 0.01,
                        "steps": 6, "dtype": "float32", "donate": ()}  # fmt: skip
CONV: dict[str, Any] = {"stride": 1, "pad": "SAME", "relu": True, "max": True, "power": 2, "clip": 3.0, "value": True,
                        "batch": 8}  # fmt: skip
_POOL = ((1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def lstm(params: Any, xs: jax.Array, y: jax.Array, o: dict[str, Any]) -> Any:
    """A step of gradient descent through an LSTM."""

    def loss(p: Any) -> jax.Array:
        def cell(carry: Any, x: jax.Array) -> Any:
            h, s = carry
            i, f, g, q = jnp.split(x @ p["wx"] + h @ p["wh"] + p["b"], 4, -1)
            s = jax.nn.sigmoid(f + o["forget"]) * s + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(q) * s, s), None

        step = jax.checkpoint(cell) if o["remat"] else cell
        (h, _), _ = jax.lax.scan(step, (jnp.zeros((4, 16)), jnp.zeros((4, 16))), xs, reverse=o["reverse"])
        decay = sum(jnp.sum(v * v) for v in jax.tree.leaves(p))
        return jnp.mean((h @ p["o"] - y) ** 2) * o["scale"] + o["l2"] * decay

    return jax.tree.map(lambda a, b: a - o["lr"] * b, params, jax.grad(loss)(params))


def lowered_lstm(options: dict[str, Any]) -> dict[str, str]:
    o = LSTM | options
    shapes = {"wx": (8, 64), "wh": (16, 64), "b": (64,), "o": (16, 2)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.dtype(o["dtype"])) for name, shape in shapes.items()}
    x, y = jax.ShapeDtypeStruct((o["steps"], 4, 8), F32), jax.ShapeDtypeStruct((4, 2), F32)
    return texts(jax.jit(partial(lstm, o=o), donate_argnums=o["donate"]).lower(params, x, y))


def convolution(params: Any, x: jax.Array, y: jax.Array, o: dict[str, Any]) -> Any:
    """A step of clipped gradient descent through a convolution and a pool."""

    def loss(p: Any) -> jax.Array:
        dims = ("NHWC", "HWIO", "NHWC")
        h = jax.lax.conv_general_dilated(x, p["k1"], (o["stride"],) * 2, o["pad"], dimension_numbers=dims)
        h = jax.nn.relu(h) if o["relu"] else jnp.tanh(h)
        start, combine = (-jnp.inf, jax.lax.max) if o["max"] else (0.0, jax.lax.add)
        h = jax.lax.reduce_window(h, start, combine, *_POOL)
        h = h.reshape(h.shape[0], -1).mean(-1, keepdims=True) * p["w"]
        return jnp.sum(jax.nn.softplus(h - y) ** o["power"])

    value, grads = jax.value_and_grad(loss)(params)
    params = jax.tree.map(lambda p, g: p - 0.1 * jnp.clip(g, -o["clip"], o["clip"]), params, grads)
    return (params, value) if o["value"] else params


def lowered_convolution(options: dict[str, Any]) -> dict[str, str]:
    o = CONV | options
    params = {"k1": jax.ShapeDtypeStruct((3, 3, 3, 4), F32), "w": jax.ShapeDtypeStruct((1, 5), F32)}
    x, y = jax.ShapeDtypeStruct((o["batch"], 8, 8, 3), F32), jax.ShapeDtypeStruct((o["batch"], 5), F32)
    return texts(jax.jit(partial(convolution, o=o)).lower(params, x, y))


def texts(low: Any) -> dict[str, str]:
    return {"hlo.txt": low.as_text("hlo"), "opt.txt": low.compile().as_text(), "shlo.mlir": low.as_text()}


PAIRS: list[Pair] = [
    ("lstm length", lowered_lstm, {}, {"steps": 9}, r"6 -> 9 steps"),
    ("lstm remat", lowered_lstm, {}, {"remat": True}, r"remat"),
    ("lstm forget bias", lowered_lstm, {}, {"forget": 0.5}, r"1 -> 0\.5"),
    ("lstm lr", lowered_lstm, {}, {"lr": 0.03}, r"0\.01 -> -?0\.03"),
    ("lstm l2", lowered_lstm, {}, {"l2": 3e-4}, r"0\.000[12] -> "),
    ("lstm donation", lowered_lstm, {}, {"donate": (0,)}, r"donation of argument"),
    ("lstm bf16", lowered_lstm, {}, {"dtype": "bfloat16"}, r"parameters? .*f32\[.*-> bf16"),
    ("lstm reverse", lowered_lstm, {}, {"reverse": True}, r"subtract"),
    ("lstm scale", lowered_lstm, {"scale": 2.0}, {"scale": 5.0}, r"-> (?:5|10|1\.25|0\.625)"),
    ("conv stride", lowered_convolution, {}, {"stride": 2}, r"stride"),
    ("conv activation", lowered_convolution, {}, {"relu": False}, r"tanh|maximum"),
    ("conv pool", lowered_convolution, {}, {"max": False}, r"max|select-and-scatter|reduce-window"),
    ("conv power", lowered_convolution, {}, {"power": 3}, r"2 -> 3"),
    ("conv clip", lowered_convolution, {}, {"clip": 4.0}, r"-?3 -> -?4"),
    ("conv value returned", lowered_convolution, {}, {"value": False}, r"- output"),
    ("conv batch", lowered_convolution, {}, {"batch": 12}, r"f32\[8,8,8,3\] -> f32\[12,8,8,3\]"),
    ("conv pad", lowered_convolution, {}, {"pad": "VALID"}, r"pad"),
]


if __name__ == "__main__":
    main(__doc__, {"unseen": PAIRS})
