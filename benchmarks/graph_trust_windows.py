"""Pairs of programs with windows for `graph_trust.py`: strides, sizes, paddings, dilations, and what they shape.

    python benchmarks/graph_trust_windows.py FOLDER                  # needs jax, flax, optax, equinox and dm-haiku
    python benchmarks/graph_trust_windows.py FOLDER --set second     # measured after what the first showed was mended

Each pair three times: HLO, optimised HLO, StableHLO. A dense layer behind a flattened image has as many rows as the
windows leave numbers, a table of places as many as they leave places; a mean over the image has neither. Sets and what
they expect were written before any result of theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from graph_trust_fresh import I32, struct, texts
from graph_trust_pairs import Options, Pair, main
from jax.example_libraries import optimizers, stax

DIMS = ("NHWC", "HWIO", "NHWC")


def trained(loss: Callable, params: Any, tx: optax.GradientTransformation) -> Callable:
    """A step of an optimiser."""

    def step(p: Any, s: Any, *batch: Any) -> Any:
        value, g = jax.value_and_grad(loss)(p, *batch)
        u, s = tx.update(g, s, p)
        return optax.apply_updates(p, u), s, value

    return step, (params, jax.eval_shape(tx.init, params))


def entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def serial(o: Options) -> tuple:
    """A net of stax: convolution, pool, flattened, two dense layers, momentum."""
    pool = stax.MaxPool if o["max"] else stax.AvgPool
    init, apply = stax.serial(
        stax.Conv(6, (3, 3), (o["stride"],) * 2, o["pad"]), stax.Relu,
        pool((o["size"],) * 2, (o["step"],) * 2, o["pool_pad"]), stax.Flatten,
        stax.Dense(o["wide"]), stax.Relu, stax.Dense(10), stax.LogSoftmax,
    )  # fmt: skip
    shape = (8, o["image"], o["image"], 3)
    params = jax.eval_shape(lambda key: init(key, shape)[1], jax.random.key(0))
    start, update, get = optimizers.momentum(0.1, 0.9)

    def step(k: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            return -jnp.mean(jnp.take_along_axis(apply(p, x), y[:, None], 1))

        return update(k, jax.grad(loss)(get(state)), state)

    return step, (struct(dtype=I32), jax.eval_shape(start, params), struct(*shape), struct(8, dtype=I32))


def plain(o: Options) -> tuple:
    """Two convolutions and an average pool of plain JAX, flattened, trained by Adam."""
    shape = (4, 20, 20, 2)

    def image(p: Any, x: jax.Array) -> jax.Array:
        h = jax.lax.conv_general_dilated(x, p["first"], (o["stride"],) * 2, o["pad"], dimension_numbers=DIMS)
        h = jnp.tanh(h)
        h = jax.lax.conv_general_dilated(
            h, p["second"], (1, 1), "SAME", rhs_dilation=(o["dilation"],) * 2, dimension_numbers=DIMS
        )
        h = jax.nn.gelu(h)
        window, steps = (1, o["size"], o["size"], 1), (1, o["step"], o["step"], 1)
        h = jax.lax.reduce_window(h, 0.0, jax.lax.add, window, steps, o["pool_pad"]) / o["size"] ** 2
        return h.mean((1, 2)) if o["mean"] else h.reshape(h.shape[0], -1)

    kernel = o["kernel"]
    params = {"first": struct(kernel, kernel, 2, 5), "second": struct(3, 3, 5, o["channels"])}
    flat = jax.eval_shape(image, params, struct(*shape)).shape[1]
    params |= {"dense": struct(flat, o["wide"]), "bias": struct(o["wide"]), "head": struct(o["wide"], 4)}

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h = jax.nn.relu(image(p, x) @ p["dense"] + p["bias"])
        return entropy(h @ p["head"], y)

    step, state = trained(loss, params, optax.adam(1e-3))
    return step, (*state, struct(*shape), struct(4, dtype=I32))


def scanned(o: Options) -> tuple:
    """Frames read by a convolution and a recurrent cell in a scan, which flattens what the pool leaves."""

    def image(kernel: jax.Array, x: jax.Array) -> jax.Array:
        h = jax.lax.conv_general_dilated(x, kernel, (o["stride"],) * 2, o["pad"], dimension_numbers=DIMS)
        h = jax.nn.relu(h)
        start = (1, o["step"], o["step"], 1)
        return jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, o["size"], o["size"], 1), start, "VALID")

    kernel = struct(3, 3, 1, 4)
    flat = jax.eval_shape(image, kernel, struct(2, 14, 14, 1)).size // 2
    params = {"conv": kernel, "in": struct(flat, o["wide"]), "hidden": struct(o["wide"], o["wide"]),
              "out": struct(o["wide"], 3)}  # fmt: skip

    def loss(p: Any, xs: jax.Array, y: jax.Array) -> jax.Array:
        def cell(h: jax.Array, x: jax.Array) -> Any:
            return jnp.tanh(image(p["conv"], x).reshape(2, -1) @ p["in"] + h @ p["hidden"]), None

        h, _ = jax.lax.scan(cell, jnp.zeros((2, o["wide"])), xs)
        return entropy(h @ p["out"], y)

    step, state = trained(loss, params, optax.sgd(0.1, momentum=0.9))
    return step, (*state, struct(5, 2, 14, 14, 1), struct(2, dtype=I32))


class Patches(linen.Module):
    """Patches with a table of places, a layer of attention, the mean of all."""

    o: Options

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        o = self.o
        h = linen.Conv(8, (4, 4), (o["stride"],) * 2, o["pad"])(x)
        h = h.reshape(h.shape[0], -1, 8)
        h = h + self.param("places", linen.initializers.normal(0.02), (1, *h.shape[1:]))
        h = h + linen.MultiHeadDotProductAttention(2)(linen.LayerNorm()(h))
        h = h + linen.Dense(8)(linen.gelu(linen.Dense(o["wide"])(linen.LayerNorm()(h))))
        return linen.Dense(5)(h.mean(1))


def patches(o: Options) -> tuple:
    """A transformer of patches."""
    model, x = Patches(o), struct(3, 16, 16, 3)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    step, state = trained(lambda p, x, y: entropy(model.apply(p, x), y), params, optax.adamw(1e-3))
    return step, (*state, x, struct(3, dtype=I32))


def waves(o: Options) -> tuple:
    """Sound: convolutions of nnx along time, an average pool, flattened, a layer, trained by SGD."""

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs, flat: int) -> None:
            self.first = nnx.Conv(1, 4, (5,), strides=o["stride"], padding=o["pad"], rngs=rngs)
            self.second = nnx.Conv(4, 6, (3,), kernel_dilation=o["dilation"], padding="VALID", rngs=rngs)
            self.dense = nnx.Linear(flat, o["wide"], rngs=rngs)
            self.head = nnx.Linear(o["wide"], 2, rngs=rngs)

        def image(self, x: jax.Array) -> jax.Array:
            h = self.second(nnx.relu(self.first(x)))
            return nnx.avg_pool(nnx.relu(h), (o["size"],), (o["step"],)).reshape(x.shape[0], -1)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.head(nnx.relu(self.dense(self.image(x))))

    x = struct(4, 64, 1)
    flat = nnx.eval_shape(lambda x: Net(nnx.Rngs(0), 1).image(x), x).shape[1]
    static, params = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0), flat)))
    step, state = trained(lambda p, x, y: entropy(nnx.merge(static, p)(x), y), params, optax.sgd(0.05))
    return step, (*state, x, struct(4, dtype=I32))


def twice(o: Options) -> tuple:
    """Two images by one net, mapped over examples; a bias of every place, flattened."""

    def image(kernel: jax.Array, x: jax.Array) -> jax.Array:
        h = jax.lax.conv_general_dilated(x[None], kernel, (o["stride"],) * 2, "SAME", dimension_numbers=DIMS)
        window = (1, o["size"], o["size"], 1)
        return jax.lax.reduce_window(jnp.abs(h), -jnp.inf, jax.lax.max, window, (1, o["step"], o["step"], 1), "SAME")[0]

    kernel = struct(5, 5, 1, 3)
    size = jax.eval_shape(image, kernel, struct(16, 16, 1)).shape
    flat = size[0] * size[1] * size[2]
    params = {"conv": kernel, "place": struct(*size), "dense": struct(flat, o["wide"])}

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def embed(x: jax.Array) -> jax.Array:
            return jnp.tanh((image(p["conv"], x) + p["place"]).reshape(-1) @ p["dense"])

        apart = jnp.sum((jax.vmap(embed)(x) - jax.vmap(embed)(y)) ** 2, -1)
        return jnp.mean(jax.nn.softplus(1 - apart)) + 1e-4 * sum(jnp.sum(v * v) for v in jax.tree.leaves(p))

    step, state = trained(loss, params, optax.rmsprop(1e-3))
    return step, (*state, struct(6, 16, 16, 1), struct(6, 16, 16, 1))


class Seen(eqx.Module):
    """Two convolutions of equinox with a pool between them, a layer of what is left, flattened."""

    layers: list
    pool: eqx.Module
    last: eqx.nn.Linear

    def __init__(self, o: Options, key: jax.Array) -> None:
        kind = eqx.nn.MaxPool2d if o["max"] else eqx.nn.AvgPool2d
        first = eqx.nn.Conv2d(2, 4, 3, stride=o["stride"], padding=1, key=key)
        second = eqx.nn.Conv2d(4, 4, 3, padding=o["pad"], dilation=o["dilation"], groups=o["groups"], key=key)
        self.layers, self.pool = [first, second], kind(o["size"], o["step"])
        flat = jax.eval_shape(partial(flattened, self.layers, self.pool), struct(2, 18, 18)).size
        self.last = eqx.nn.Linear(flat, o["classes"], key=key)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(flattened(self.layers, self.pool, x))


def flattened(layers: list, pool: Callable, x: jax.Array) -> jax.Array:
    return jax.nn.silu(layers[1](pool(jax.nn.relu(layers[0](x))))).reshape(-1)


def seen(o: Options) -> tuple:
    """A net of equinox, mapped over examples, trained by a Lion."""

    def arrays(v: Any) -> bool:
        return isinstance(v, jax.ShapeDtypeStruct)

    params, static = eqx.partition(eqx.filter_eval_shape(lambda: Seen(o, jax.random.key(0))), arrays)

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return entropy(jax.vmap(eqx.combine(p, static))(x), y)

    step, state = trained(loss, params, optax.lion(1e-3))
    return step, (*state, struct(4, 2, 18, 18), struct(4, dtype=I32))


def heads(o: Options) -> tuple:
    """A net of haiku with a norm of batches, whose flattened image goes through a net of several layers, with decay."""

    def net(x: jax.Array) -> jax.Array:
        h = hk.Conv2D(4, 3, stride=o["stride"], rate=o["rate"], padding=o["pad"])(x)
        h = jax.nn.leaky_relu(hk.LayerNorm(-1, True, True)(h))
        h = hk.MaxPool(o["size"], o["step"], "SAME", channel_axis=-1)(h)
        return hk.nets.MLP([o["wide"], 6, 3])(hk.Flatten()(h))

    model, x = hk.without_apply_rng(hk.transform(net)), struct(4, 15, 15, 2)
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return entropy(model.apply(p, x), y) + 1e-3 * sum(jnp.sum(v * v) for v in jax.tree.leaves(p))

    step, state = trained(loss, params, optax.chain(optax.clip_by_global_norm(1.0), optax.nadam(1e-3)))
    return step, (*state, x, struct(4, dtype=I32))


def outlined(o: Options) -> tuple:
    """A map of classes as large as the windows leave it, whose labels are an argument; a table of weights of places."""

    def net(p: Any, x: jax.Array) -> jax.Array:
        h = jax.lax.conv_general_dilated(x, p["down"], (o["stride"],) * 2, o["pad"], dimension_numbers=DIMS)
        h = jnp.tanh(h)
        up = jax.lax.conv_transpose(h, p["up"], (o["up"],) * 2, "SAME", dimension_numbers=DIMS)
        return jax.lax.conv_general_dilated(jax.nn.relu(up), p["end"], (1, 1), "SAME", dimension_numbers=DIMS)

    params = {"down": struct(3, 3, 1, 4), "up": struct(3, 3, 4, 4), "end": struct(1, 1, 4, o["classes"])}
    size = jax.eval_shape(net, params, struct(2, 12, 12, 1)).shape[1:3]
    params["weights"] = struct(*size)

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        wrong = optax.softmax_cross_entropy_with_integer_labels(net(p, x), y)
        return jnp.mean(wrong * jax.nn.softplus(p["weights"]))

    step, state = trained(loss, params, optax.adam(1e-2))
    return step, (*state, struct(2, 12, 12, 1), struct(2, *size, dtype=I32))


def layered(o: Options) -> tuple:
    """Layers in a scan that mix places by a matrix of their number, behind a convolution; one that ends behind them."""

    def image(kernel: jax.Array, x: jax.Array) -> jax.Array:
        h = jax.lax.conv_general_dilated(x, kernel, (o["stride"],), o["pad"], dimension_numbers=("NWC", "WIO", "NWC"))
        return jax.lax.reduce_window(h, 0.0, jax.lax.add, (1, o["size"], 1), (1, o["step"], 1), "VALID")

    kernel = struct(4, 2, 6)
    t = jax.eval_shape(image, kernel, struct(3, 36, 2)).shape[1]
    params = {"conv": kernel, "mix": struct(3, t, t), "own": struct(3, 6, o["wide"]), "back": struct(3, o["wide"], 6),
              "end": struct(t, 6)}  # fmt: skip

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: Any) -> Any:
            h = h + jnp.einsum("btc,ts->bsc", h, w[0])
            return h + jax.nn.gelu(h @ w[1]) @ w[2], None

        h, _ = jax.lax.scan(layer, image(p["conv"], x), (p["mix"], p["own"], p["back"]))
        return jnp.mean((jnp.einsum("btc,tc->b", h, p["end"]) - y) ** 2)

    step, state = trained(loss, params, optax.adamw(1e-3))
    return step, (*state, struct(3, 36, 2), struct(3))


def edges(o: Options) -> tuple:
    """Images with a border, cut, spread and taken every few places, flattened; positions cut from a longer table."""

    def image(x: jax.Array) -> jax.Array:
        h = jnp.pad(x, ((0, 0), (o["border"],) * 2, (o["border"],) * 2, (0, 0)))
        h = h[:, o["crop"] : -o["crop"], o["crop"] : -o["crop"]] if o["crop"] else h
        h = jnp.repeat(jnp.tanh(h[:, :: o["every"], :: o["every"]]), o["spread"], 1)
        return h.reshape(h.shape[0], -1) if o["flat"] else h.reshape(h.shape[0], -1, h.shape[-1])

    x = struct(4, 12, 12, 2)
    shape = jax.eval_shape(image, x).shape
    params = {"table": struct(400, 2), "end": struct(2, 3)}
    params = {"dense": struct(shape[1], o["wide"])} if o["flat"] else params

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h = image(x)
        if not o["flat"]:
            h = (h + p["table"][: h.shape[1]]).mean(1) @ p["end"]
            return entropy(h, y)
        return entropy(jax.nn.relu(h @ p["dense"]), y)

    step, state = trained(loss, params, optax.adam(1e-3))
    return step, (*state, x, struct(4, dtype=I32))


DEFAULTS: dict[Callable, Options] = {
    edges: {"border": 1, "crop": 0, "every": 1, "spread": 1, "wide": 8, "flat": True},
    seen: {"stride": 1, "pad": 0, "dilation": 1, "groups": 1, "max": True, "size": 2, "step": 2, "classes": 5},
    heads: {"stride": 1, "rate": 1, "pad": "VALID", "size": 3, "step": 2, "wide": 10},
    outlined: {"stride": 2, "pad": "SAME", "up": 2, "classes": 3},
    layered: {"stride": 1, "pad": "VALID", "size": 2, "step": 2, "wide": 9},
    serial: {"stride": 1, "pad": "SAME", "max": True, "size": 2, "step": 2, "pool_pad": "VALID", "wide": 16,
             "image": 16},
    plain: {"stride": 1, "pad": "SAME", "dilation": 1, "size": 2, "step": 2, "pool_pad": "VALID", "wide": 12,
            "kernel": 3, "channels": 6, "mean": False},
    scanned: {"stride": 1, "pad": "SAME", "size": 2, "step": 2, "wide": 8},
    patches: {"stride": 4, "pad": "VALID", "wide": 24},
    waves: {"stride": 2, "pad": "SAME", "dilation": 1, "size": 3, "step": 3, "wide": 9},
    twice: {"stride": 2, "size": 2, "step": 2, "wide": 7},
}  # fmt: skip
CONV, POOL = (
    r"conv\w*\b.*?(?:window|stride|pad|dilat)",
    r"(?:reduce-window|select-and-scatter)\b.*?(?:window|stride|pad)",
)


def parameter(before: int, after: int) -> str:
    """Parameters of this size and of that."""
    return rf"^parameter.*\b{before}\].*\b{after}\]"


FIRST: list[Pair] = [
    ("serial step", serial, {}, {"step": 1}, POOL),
    ("serial step 3", serial, {}, {"step": 3}, POOL),
    ("serial average step", serial, {"max": False}, {"max": False, "step": 1}, POOL),
    ("serial size", serial, {}, {"size": 3}, POOL),
    ("serial pool pad", serial, {"size": 3}, {"size": 3, "pool_pad": "SAME"}, POOL),
    ("serial stride", serial, {}, {"stride": 2}, CONV),
    ("serial pad", serial, {}, {"pad": "VALID"}, CONV),
    ("serial wide", serial, {}, {"wide": 24}, parameter(16, 24)),
    ("serial image", serial, {}, {"image": 20}, r"^parameter.*\[8,16,16,3\] -> f32\[8,20,20,3\]"),
    ("serial both", serial, {}, {"step": 1, "wide": 24}, rf"{POOL}|{parameter(16, 24)}"),
    ("plain step", plain, {}, {"step": 1}, POOL),
    ("plain size", plain, {"step": 1}, {"step": 1, "size": 3}, POOL),
    ("plain stride", plain, {}, {"stride": 2}, CONV),
    ("plain pad", plain, {}, {"pad": "VALID"}, CONV),
    ("plain dilation", plain, {}, {"dilation": 2}, CONV),
    ("plain kernel", plain, {}, {"kernel": 5}, r"^parameter.*\[3,3,2,5\] -> f32\[5,5,2,5\]"),
    ("plain channels", plain, {}, {"channels": 8}, r"^parameter.*\[3,3,5,6\] -> f32\[3,3,5,8\]"),
    ("plain mean step", plain, {"mean": True}, {"mean": True, "step": 1}, POOL),
    ("plain mean stride", plain, {"mean": True}, {"mean": True, "stride": 2}, CONV),
    ("plain both", plain, {}, {"stride": 2, "wide": 20}, rf"{CONV}|{parameter(12, 20)}"),
    ("scanned step", scanned, {}, {"step": 1}, POOL),
    ("scanned stride", scanned, {}, {"stride": 2}, CONV),
    ("scanned pad", scanned, {}, {"pad": "VALID"}, CONV),
    ("scanned wide", scanned, {}, {"wide": 10}, parameter(8, 10)),
    ("patches stride", patches, {}, {"stride": 2}, CONV),
    ("patches pad", patches, {"stride": 3}, {"stride": 3, "pad": "SAME"}, CONV),
    ("patches wide", patches, {}, {"wide": 32}, parameter(24, 32)),
    ("waves stride", waves, {}, {"stride": 1}, CONV),
    ("waves pad", waves, {}, {"pad": "VALID"}, CONV),
    ("waves dilation", waves, {}, {"dilation": 2}, CONV),
    ("waves step", waves, {}, {"step": 2}, POOL),
    ("waves size", waves, {}, {"size": 2}, POOL),
    ("waves wide", waves, {}, {"wide": 13}, parameter(9, 13)),
    ("twice stride", twice, {}, {"stride": 1}, CONV),
    ("twice step", twice, {}, {"step": 1}, POOL),
    ("twice wide", twice, {}, {"wide": 9}, parameter(7, 9)),
]
SECOND: list[Pair] = [
    ("seen step", seen, {}, {"step": 1}, POOL),
    ("seen average", seen, {"max": False}, {"max": False, "step": 3}, POOL),
    ("seen size", seen, {}, {"size": 4}, POOL),
    ("seen stride", seen, {}, {"stride": 2}, CONV),
    ("seen pad", seen, {}, {"pad": 1}, CONV),
    ("seen dilation", seen, {}, {"dilation": 2}, CONV),
    ("seen groups", seen, {}, {"groups": 2}, r"^parameter.*\[4,4,3,3\] -> f32\[4,2,3,3\]"),
    ("seen classes", seen, {}, {"classes": 8}, r"^parameter.*\b5[],].*\b8[],]"),
    ("heads stride", heads, {}, {"stride": 2}, CONV),
    ("heads rate", heads, {}, {"rate": 2}, CONV),
    ("heads pad", heads, {}, {"pad": "SAME"}, CONV),
    ("heads step", heads, {}, {"step": 4}, POOL),
    ("heads size", heads, {"step": 1}, {"step": 1, "size": 2}, POOL),
    ("heads wide", heads, {}, {"wide": 14}, r"^parameter.*\b10[],].*\b14[],]"),
    ("outlined stride", outlined, {}, {"stride": 1}, CONV),
    ("outlined pad", outlined, {}, {"pad": "VALID"}, CONV),
    ("outlined up", outlined, {}, {"up": 3}, CONV),
    ("outlined classes", outlined, {}, {"classes": 4}, r"^parameter.*\b3\].*\b4\]"),
    ("layered stride", layered, {}, {"stride": 2}, CONV),
    ("layered pad", layered, {}, {"pad": "SAME"}, CONV),
    ("layered step", layered, {}, {"step": 1}, POOL),
    ("layered size", layered, {}, {"size": 4}, POOL),
    ("layered wide", layered, {}, {"wide": 13}, r"^parameter.*\b9[],].*\b13[],]"),
]
THIRD: list[Pair] = [
    ("edges border", edges, {}, {"border": 2}, r"\bpad\b.*->"),
    ("edges crop", edges, {"crop": 1}, {"crop": 2}, r"\bslice\b.*->"),
    ("edges every", edges, {"every": 2}, {"every": 3}, r"\b(?:slice|gather)\b.*->"),
    ("edges spread", edges, {"spread": 2}, {"spread": 3}, r"\b(?:broadcast|reshape|gather)\b"),
    ("edges wide", edges, {}, {"wide": 10}, parameter(8, 10)),
    ("edges and wide", edges, {}, {"wide": 10, "border": 2}, rf"{parameter(8, 10)}|\bpad\b.*->"),
    ("edges places border", edges, {"flat": False}, {"flat": False, "border": 2}, r"\bpad\b.*->"),
]


if __name__ == "__main__":
    main(__doc__, {"first": FIRST, "second": SECOND, "third": THIRD}, partial(texts, defaults=DEFAULTS))
