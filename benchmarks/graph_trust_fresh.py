"""Pairs of programs in flax, equinox, haiku, optax and plain JAX for `graph_trust.py`, in two sets.

    python benchmarks/graph_trust_fresh.py FOLDER --set first     # needs jax, flax, equinox, dm-haiku, optax
    python benchmarks/graph_trust_fresh.py FOLDER --set second    # measured after what the first showed was mended

Each pair three times: HLO, optimised HLO, StableHLO. Both sets and what they expect were written before any result.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from graph_trust_pairs import Options, Pair, Texts, main
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

F32, I32 = jnp.float32, jnp.int32


def struct(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# Programs: each takes options and returns a function and its arguments; defaults stand in DEFAULTS.


class Block(nn.Module):
    o: Options

    @nn.compact
    def __call__(self, h: jax.Array) -> jax.Array:
        o = self.o
        mask = nn.make_causal_mask(jnp.ones(h.shape[:2])) if o["causal"] else None
        a = nn.MultiHeadDotProductAttention(o["heads"], qkv_features=o["qkv"])(
            nn.LayerNorm(epsilon=o["eps"])(h), mask=mask
        )
        h = h + nn.Dropout(o["drop"], deterministic=False)(a)
        f = nn.Dense(o["hidden"])(nn.LayerNorm(epsilon=o["eps"])(h))
        return h + nn.Dense(h.shape[-1], use_bias=o["bias"])(o["act"](f))


class Encoder(nn.Module):
    o: Options

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        o = self.o
        h = nn.Embed(40, 16)(tokens)
        h = h + jnp.asarray(np.sin(np.arange(12 * 16).reshape(12, 16) * o["wave"]), F32)[: tokens.shape[1]]
        block = nn.remat(Block) if o["remat"] else Block
        for _ in range(o["layers"]):
            h = block(o)(h)
        return nn.Dense(40)(h)


def flax_encoder(o: Options) -> tuple[Callable, tuple]:
    model = Encoder(o)
    tx = optax.chain(optax.clip_by_global_norm(o["clip"]), optax.adamw(o["lr"], b2=o["b2"], weight_decay=o["decay"]))
    tokens = struct(o["batch"], 12, dtype=I32)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = jax.eval_shape(model.init, keys, tokens)

    def step(params: Any, state: Any, tokens: jax.Array, seed: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            logits = model.apply(p, tokens, rngs={"dropout": jax.random.fold_in(jax.random.key(seed), o["fold"])})
            value = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
            return value.mean() if o["mean"] else value.sum()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, jax.eval_shape(tx.init, params), tokens, struct(dtype=jnp.uint32))


def equinox_net(o: Options) -> tuple[Callable, tuple]:
    tx = optax.sgd(o["lr"], momentum=o["momentum"], nesterov=o["nesterov"])

    def build() -> Any:
        keys = jax.random.split(jax.random.key(0), 4)
        return (
            eqx.nn.Conv2d(3, 8, o["kernel"], stride=o["stride"], padding=1, key=keys[0]),
            eqx.nn.GroupNorm(o["groups"], 8),
            eqx.nn.MLP(8, 5, 16, o["depth"], activation=o["act"], key=keys[1]),
        )

    params, static = eqx.partition(eqx.filter_eval_shape(build), lambda v: isinstance(v, jax.ShapeDtypeStruct))

    def one(model: Any, x: jax.Array) -> jax.Array:
        conv, norm, mlp = model
        return mlp(o["pool"](jax.nn.silu(norm(conv(x))), (1, 2)))

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            out = jax.vmap(partial(one, eqx.combine(p, static)))(x)
            return jnp.mean(optax.huber_loss(out, y, delta=o["delta"]))

        grads = jax.grad(loss)(params)
        updates, state = tx.update(grads, state)
        return eqx.apply_updates(params, updates), state

    x, y = struct(o["batch"], 3, 8, 8), struct(o["batch"], 5)
    return step, (params, jax.eval_shape(tx.init, params), x, y)


def haiku_recurrent(o: Options) -> tuple[Callable, tuple]:
    def forward(xs: jax.Array, training: bool) -> jax.Array:
        xs = hk.BatchNorm(True, True, o["bn"])(xs, training)
        core = hk.DeepRNN([hk.GRU(o["size"]) for _ in range(o["cells"])])
        if o["unroll"]:
            out, _ = hk.static_unroll(core, xs, core.initial_state(xs.shape[1]))
        else:
            out, _ = hk.dynamic_unroll(core, xs, core.initial_state(xs.shape[1]))
        return hk.Linear(3)(out[-1] * o["gain"])

    net = hk.transform_with_state(forward)
    xs = struct(o["steps"], 4, 6)
    params, state = jax.eval_shape(partial(net.init, training=True), jax.random.key(0), xs)
    tx = optax.rmsprop(o["lr"], decay=o["rho"])

    def step(params: Any, state: Any, opt: Any, xs: jax.Array, y: jax.Array) -> Any:
        def loss(p: Any) -> Any:
            out, new = net.apply(p, state, None, xs, True)
            return jnp.mean(jnp.abs(out - y) ** o["power"]), new

        (value, state2), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt = tx.update(grads, opt)
        return optax.apply_updates(params, updates), state2, opt, value

    return step, (params, state, jax.eval_shape(tx.init, params), xs, struct(4, 3))


def control(o: Options) -> tuple[Callable, tuple]:
    """Newton's method in a while loop, branches of a switch, a power iteration in a fori_loop, linear algebra."""

    def f(a: jax.Array, b: jax.Array, k: jax.Array) -> Any:
        def body(s: Any) -> Any:
            x, n = s
            return x - o["damp"] * (x * x - b) / (2 * x), n + 1

        def going(s: Any) -> Any:
            return (s[1] < o["most"]) & (jnp.max(jnp.abs(s[0] * s[0] - b)) > o["tol"])

        root, n = jax.lax.while_loop(going, body, (jnp.ones_like(b), 0))
        branches = [lambda v: v + o["shift"], lambda v: jnp.sin(v) * 2, jnp.cumsum, lambda v: jnp.flip(v)]
        picked = jax.lax.switch(k, branches[: o["branches"]], root)
        v = jax.lax.fori_loop(0, o["power"], lambda _, v: (a @ v) / jnp.linalg.norm(a @ v), jnp.ones(a.shape[0]))
        low = jnp.linalg.cholesky(a @ a.T + o["ridge"] * jnp.eye(a.shape[0]))
        solved = jax.scipy.linalg.solve_triangular(low, v, lower=True, trans=o["trans"])
        sure = jax.lax.cond(n > o["n"], lambda t: t * 3, lambda t: t - 1, solved)
        return root, picked, sure

    return f, (struct(6, 6), struct(5), struct(dtype=I32))


def sharded(o: Options) -> tuple[Callable, tuple]:
    mesh = jax.make_mesh(o["mesh"], ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def f(w: jax.Array, x: jax.Array) -> Any:
        h = jnp.tanh(x @ w)
        h = o["reduce"](h, o["axis"])
        size = mesh.shape["model"]
        h = h + jax.lax.ppermute(h, "model", [(i, (i + o["hop"]) % size) for i in range(size)])
        g = jax.lax.all_gather(h, "data", tiled=o["tiled"])
        s = jax.lax.psum_scatter(g, "model", scatter_dimension=g.ndim - 1, tiled=True) if o["scatter"] else g
        return jnp.mean(s * o["factor"])[None]

    part = jax.shard_map(
        f, mesh=mesh, in_specs=(P(None, "model"), P("data")), out_specs=P(("data", "model")), check_vma=False
    )

    def step(w: jax.Array, x: jax.Array) -> Any:
        return w - o["lr"] * jax.grad(lambda w: jnp.sum(part(w, x)))(w)

    places = NamedSharding(mesh, P(None, "model")), NamedSharding(mesh, P("data"))
    shapes = struct(8, 16), struct(o["batch"], 8)
    return step, tuple(jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p) for s, p in zip(shapes, places, strict=True))


def partitioned(o: Options) -> tuple[Callable, tuple]:
    """Two layers under GSPMD."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def f(p: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            h = jax.nn.relu(jnp.einsum("bd,dh->bh", x, p["up"], precision=o["precision"]) + p["bias"])
            h = jax.lax.with_sharding_constraint(h, NamedSharding(mesh, o["spec"]))
            return jnp.mean((h @ p["down"] - y) ** 2) + o["l1"] * jnp.sum(jnp.abs(p["up"]))

        grads = jax.grad(loss)(p)
        return {k: p[k] - o["lr"] * g for k, g in grads.items()}

    spec = {"up": P(None, "model"), "bias": P("model"), "down": P("model", None)}
    shapes = {"up": (8, 16), "bias": (16,), "down": (16, 4)}
    params = {k: jax.ShapeDtypeStruct(s, F32, sharding=NamedSharding(mesh, spec[k])) for k, s in shapes.items()}
    x = jax.ShapeDtypeStruct((8, 8), F32, sharding=NamedSharding(mesh, o["input"]))
    return f, (params, x, jax.ShapeDtypeStruct((8, 4), F32, sharding=NamedSharding(mesh, P("data"))))


def mixed(o: Options) -> tuple[Callable, tuple]:
    """Half precision, loss scale, embedding by scatter, sort, a table, an FFT."""
    table = np.linspace(-1, 1, 24).reshape(6, 4).astype(np.float32)
    table[o["row"], 2] += o["bump"]

    def f(p: Any, ids: jax.Array, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            e = p["embed"][ids].astype(o["compute"]) + jnp.asarray(table, o["compute"])
            h = jnp.dot(e, p["w"].astype(o["compute"]), preferred_element_type=F32)
            top = jax.lax.top_k(h, o["k"])[0]
            s = jnp.sort(x, axis=o["axis"], descending=o["descending"])
            spectrum = jnp.abs(jnp.fft.rfft(s, axis=-1))
            left, right = (spectrum, 0.5 * s[..., :1]) if o["order"] else (0.5 * s[..., :1], spectrum)
            return (jnp.sum(top) + jnp.sum(jnp.sqrt(1 + jnp.square(left - 2 * right)))) * o["scale"]

        grads = jax.tree.map(lambda g: g / o["scale"], jax.grad(loss)(p))
        new = jax.tree.map(lambda a, g: (a - o["lr"] * g).astype(a.dtype), p, grads)
        return (new, grads["w"]) if o["grads"] else new

    params = {"embed": struct(30, 4, dtype=o["dtype"]), "w": struct(4, 7, dtype=o["dtype"])}
    return f, (params, struct(6, dtype=I32), struct(6, 8))


def ensemble(o: Options) -> tuple[Callable, tuple]:
    """Blocks under vmap and a scan over layers, with remat by a policy and uniform noise."""

    def net(p: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> Any:
            g = jax.nn.softmax(h @ w / o["temperature"]) * h
            return jnp.maximum(g, o["floor"]) + h, None

        body = jax.checkpoint(layer, policy=o["policy"]) if o["remat"] else layer
        h, _ = jax.lax.scan(body, x, p["stack"], unroll=o["unroll"])
        noise = jax.random.uniform(key, h.shape, minval=-o["noise"], maxval=o["noise"])
        return jnp.sum((h + noise) @ p["head"])

    def f(p: Any, x: jax.Array, keys: jax.Array) -> Any:
        value, grads = jax.vmap(jax.value_and_grad(net), (0, None, 0))(p, x, keys)
        new = jax.tree.map(lambda a, g: a - o["lr"] * g, p, grads)
        return (new, value.mean(), value.std()) if o["std"] else (new, value.mean())

    n, depth = o["members"], o["depth"]
    params = {"stack": struct(n, depth, 8, 8), "head": struct(n, 8, 3)}
    return f, (params, struct(5, 8), struct(n, dtype=jax.random.key(0).dtype))


save_dots = jax.checkpoint_policies.dots_saveable
DEFAULTS: dict[Callable, Options] = {
    flax_encoder: dict(heads=4, qkv=16, eps=1e-6, drop=0.1, hidden=32, bias=True, act=nn.gelu, causal=True, wave=0.1,
                       remat=False, layers=2, clip=1.0, lr=3e-4, b2=0.95, decay=0.01, batch=4, fold=7, mean=True),
    equinox_net: dict(lr=0.1, momentum=0.9, nesterov=False, kernel=3, stride=1, groups=4, depth=2, act=jax.nn.relu,
                      pool=jnp.mean, delta=1.0, batch=6),
    haiku_recurrent: dict(bn=0.9, size=8, cells=1, unroll=False, gain=1.5, steps=5, lr=1e-3, rho=0.9, power=1.5),
    control: dict(damp=1.0, most=20, tol=1e-5, shift=1.0, branches=3, power=10, ridge=1e-3, trans=0, n=4),
    sharded: dict(mesh=(2, 2), reduce=jax.lax.psum, axis="model", hop=1, tiled=True, scatter=True, factor=0.5, lr=0.1,
                  batch=8),
    partitioned: dict(precision=None, spec=P("data", "model"), l1=1e-4, lr=0.1, input=P("data")),
    mixed: dict(row=3, bump=0.0, compute=jnp.bfloat16, dtype=F32, k=3, axis=-1, descending=False, order=True,
                scale=1024.0, lr=0.02, grads=False),
    ensemble: dict(temperature=1.7, floor=-1.0, remat=False, policy=None, unroll=1, noise=0.25, lr=0.05, std=False,
                   members=3, depth=4),
}  # fmt: skip
FIRST: list[Pair] = [
    ("flax heads", flax_encoder, {}, {"heads": 2}, r"\[16,4,4\].* -> f32\[16,2,8\]"),
    ("flax dropout", flax_encoder, {}, {"drop": 0.3}, r"0\.9 -> 0\.7"),
    ("flax norm eps", flax_encoder, {}, {"eps": 1e-3}, r"1e-06 -> 0\.001"),
    ("flax weight decay", flax_encoder, {}, {"decay": 0.1}, r"0\.01 -> 0\.1"),
    ("flax causal mask", flax_encoder, {}, {"causal": False}, r"^- "),
    ("flax remat", flax_encoder, {}, {"remat": True}, r"remat"),
    ("flax layer", flax_encoder, {}, {"layers": 3}, r"^\+ .*(?:Block_2|parameter)"),
    ("flax bias", flax_encoder, {}, {"bias": False}, r"^- .*(?:bias|parameter)"),
    ("flax positions", flax_encoder, {}, {"wave": 0.2}, r"constant f32\[12,16\]"),
    ("equinox activation", equinox_net, {}, {"act": jnp.tanh}, r"tanh"),
    ("equinox depth", equinox_net, {}, {"depth": 3}, r"^\+ .*parameter"),
    ("equinox nesterov", equinox_net, {}, {"nesterov": True}, r"^\+ .*(?:multiply|add)"),
    ("equinox stride", equinox_net, {}, {"stride": 2}, r"stride"),
    ("equinox groups", equinox_net, {}, {"groups": 2}, r"\[6,4,.* -> f32\[6,2,|\[4,.* -> f32\[2,"),
    ("haiku steps", haiku_recurrent, {}, {"steps": 7}, r"5 -> 7 steps|f32\[5,4,6\] -> f32\[7,4,6\]"),
    ("haiku size", haiku_recurrent, {}, {"size": 12}, r"parameters? .*8.* -> .*12"),
    ("haiku cells", haiku_recurrent, {}, {"cells": 2}, r"^\+ .*parameter"),
    ("haiku bn decay", haiku_recurrent, {}, {"bn": 0.99}, r"0\.9 -> 0\.99|0\.1.* -> 0\.01"),
    ("newton iterations", control, {}, {"most": 30}, r"20 -> 30"),
    ("branches of switch", control, {}, {"branches": 4}, r"branch|conditional"),
    ("constant of a branch", control, {}, {"shift": 2.0}, r"1 -> 2"),
    ("fori steps", control, {}, {"power": 15}, r"10 -> 15 steps|10 -> 15"),
    ("psum axis", sharded, {}, {"axis": "data"}, r"all-reduce.*groups"),
    ("permute hop", sharded, {"mesh": (1, 4)}, {"mesh": (1, 4), "hop": 2}, r"collective-permute.*pairs"),
    ("no reduce-scatter", sharded, {}, {"scatter": False}, r"- .*reduce-scatter"),
    ("precision of a dot", partitioned, {}, {"precision": "highest"}, r"precision"),
    ("input sharding", partitioned, {}, {"input": P(None, "model")}, r"shard|parameter|layout|all-|collective"),
    ("compute dtype", mixed, {}, {"compute": jnp.float16}, r"bf16.* -> f16|bf16.*f16"),
    ("loss scale", mixed, {}, {"scale": 4096.0}, r"1024 -> 4096|0\.000976562.* -> 0\.000244"),
    ("row of a table", mixed, {}, {"bump": 1.0}, r"constant (?:f32|bf16)\[6,4\]"),
    ("sort descending", mixed, {}, {"descending": True}, r"sort|compare|LT|negate|direction|reverse"),
    ("operands exchanged", mixed, {}, {"order": False}, r"exchanged|operand|subtract"),
    ("gradient returned", mixed, {}, {"grads": True}, r"^\+ output"),
    ("members", ensemble, {}, {"members": 5}, r"parameters? .*\[3,4,8,8\] -> f32\[5,4,8,8\]"),
    ("policy of remat", ensemble, {"remat": True}, {"remat": True, "policy": save_dots}, r"remat"),
    ("floor in a scan", ensemble, {}, {"floor": -2.0}, r"-1 -> -2"),
]  # fmt: skip
SECOND: list[Pair] = [
    ("flax hidden", flax_encoder, {}, {"hidden": 48}, r"parameters? .*32.* -> .*48"),
    ("flax activation", flax_encoder, {}, {"act": nn.relu}, r"tanh|maximum|max"),
    ("flax clip", flax_encoder, {}, {"clip": 0.25}, r"1 -> 0\.25"),
    ("flax b2", flax_encoder, {}, {"b2": 0.999}, r"0\.95 -> 0\.999|0\.05.* -> 0\.001"),
    ("flax key folded", flax_encoder, {}, {"fold": 8}, r"7 -> 8"),
    ("flax sum", flax_encoder, {}, {"mean": False}, r"divide|44|0\.0227"),
    ("flax batch", flax_encoder, {}, {"batch": 6}, r"s32\[4,12\] -> s32\[6,12\]"),
    ("equinox kernel", equinox_net, {}, {"kernel": 5}, r"parameters? .*\[8,3,3,3\] -> f32\[8,3,5,5\]"),
    ("equinox pool", equinox_net, {}, {"pool": jnp.max}, r"max|reduce"),
    ("equinox delta", equinox_net, {}, {"delta": 0.5}, r"1 -> 0\.5"),
    ("equinox momentum", equinox_net, {}, {"momentum": 0.5}, r"0\.9 -> 0\.5"),
    ("haiku unrolled", haiku_recurrent, {}, {"unroll": True}, r"unroll|while|loop"),
    ("haiku gain", haiku_recurrent, {}, {"gain": 2.5}, r"1\.5 -> 2\.5"),
    ("haiku power", haiku_recurrent, {}, {"power": 2.5}, r"1\.5 -> 2\.5"),
    ("newton tolerance", control, {}, {"tol": 1e-3}, r"1e-05 -> 0\.001"),
    ("transposed solve", control, {}, {"trans": 1}, r"transpose"),
    ("ridge", control, {}, {"ridge": 1e-2}, r"0\.001 -> 0\.01"),
    ("threshold of cond", control, {}, {"n": 6}, r"4 -> 6"),
    ("pmean for psum", sharded, {}, {"reduce": jax.lax.pmean}, r"^\+ .*(?:divide|multiply)|2"),
    ("mesh", sharded, {}, {"mesh": (1, 4)}, r"mesh|groups|shard|partition|devices"),
    ("l1", partitioned, {}, {"l1": 1e-3}, r"0\.0001 -> 0\.001"),
    ("activation sharding", partitioned, {}, {"spec": P("data", None)}, r"shard|all-|collective|reshard"),
    ("master weights", mixed, {}, {"dtype": jnp.bfloat16}, r"parameters? .*f32\[.*-> bf16"),
    ("top k", mixed, {}, {"k": 2}, r"k=3 -> k=2|3.* -> .*2|top"),
    ("sorted axis", mixed, {}, {"axis": 0}, r"sort.*dimension"),
    ("unrolled scan", ensemble, {}, {"unroll": 2}, r"4 -> 2 steps|unroll"),
    ("noise", ensemble, {}, {"noise": 0.5}, r"0\.25 -> 0\.5|0\.5 -> 1"),
    ("value returned", ensemble, {}, {"std": True}, r"^\+ output"),
]  # fmt: skip


def texts(program: Callable, options: Options, defaults: dict[Callable, Options]) -> Texts:
    """The three texts of a variant."""
    f, arguments, *donated = program(defaults[program] | options)
    low = jax.jit(f, donate_argnums=tuple(donated)).lower(*arguments)
    return {"hlo.txt": low.as_text("hlo"), "opt.txt": low.compile().as_text(), "shlo.mlir": low.as_text()}


if __name__ == "__main__":
    main(__doc__, {"first": FIRST, "second": SECOND}, partial(texts, defaults=DEFAULTS))
