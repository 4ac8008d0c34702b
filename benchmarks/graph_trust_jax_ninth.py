"""Pairs of programs of distreqx, quadax and jaxkan, of grouped policy optimisation and of an optimiser in shards.

    python benchmarks/graph_trust_jax_ninth.py FOLDER    # needs jax, these libraries, equinox, flax and optax

For `graph_trust.py`, each pair three times: HLO, optimised HLO, StableHLO. Programs, changes and what is expected were
written, and frozen in a commit, before any result, and measured once, after what the eighth set showed was mended.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import jaxkan.layers as kan
import optax
import quadax
from distreqx import bijectors, distributions
from flax import nnx
from graph_trust_fresh import F32, I32, struct, texts
from graph_trust_pairs import Options, Pair, main
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

KEY = jax.random.key(0).dtype


def coded(o: Options) -> tuple:
    """A variational autoencoder with distributions and a bijector of distreqx."""

    def f(p: Any, x: jax.Array, key: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            def one(x: jax.Array, key: jax.Array) -> jax.Array:
                mean, spread = jnp.split(o["act"](x @ p["in"] + p["c"]) @ p["out"], 2)
                code = distributions.MultivariateNormalDiag(mean, jax.nn.softplus(spread) + o["least"])
                z = code.sample(key)
                prior = distributions.MultivariateNormalDiag(jnp.zeros(3), jnp.full(3, o["prior"]))
                moved = bijectors.Tanh().forward(z) if o["squashed"] else z
                logits = jax.nn.gelu(moved @ p["up"]) @ p["down"]
                kind = distributions.Logistic if o["heavy"] else distributions.Normal
                own = kind(logits, jnp.full(6, o["noise"])).log_prob(x).sum()
                return o["beta"] * (code.log_prob(z) - prior.log_prob(z)) - own

            return jnp.mean(jax.vmap(one)(x, jax.random.split(key, x.shape[0])))

        return jax.tree.map(lambda w, d: w - o["lr"] * d, p, jax.grad(loss)(p))

    p = {"in": struct(6, 9), "c": struct(9), "out": struct(9, 6), "up": struct(3, 7), "down": struct(7, 6)}
    return f, (p, struct(4, 6), struct(dtype=KEY))


def integral(o: Options) -> tuple:
    """A density made to integrate to one, its integral by quadax."""

    def f(p: Any, x: jax.Array) -> Any:
        def density(x: jax.Array, p: Any) -> jax.Array:
            return jnp.exp(-jnp.sum(p["w"] * jnp.cos(jnp.arange(1.0, 5.0) * x + p["b"])) - o["pull"] * x**2)

        def loss(p: Any) -> jax.Array:
            if o["adaptive"]:
                total, _ = quadax.quadgk(density, (-o["end"], o["end"]), args=(p,), epsabs=o["tolerance"], max_ninter=5)
            else:
                total, _ = quadax.romberg(density, (-o["end"], o["end"]), args=(p,), epsabs=o["tolerance"], divmax=6)
            fit = -jnp.mean(jnp.log(jax.vmap(lambda x: density(x, p))(x) + 1e-9))
            return fit + o["weight"] * (total - 1) ** 2

        value, g = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda w, d: w - o["lr"] * jnp.sign(d), p, g), value

    return f, ({"w": struct(4), "b": struct(4)}, struct(9))


def edges(o: Options) -> tuple:
    """Two layers of a Kolmogorov-Arnold network of jaxkan."""

    def f(x: jax.Array, y: jax.Array, state: Any) -> Any:
        def loss(state: Any) -> jax.Array:
            h = nnx.merge(first, state[0], more)(x)
            h = jnp.tanh(h * o["squeeze"]) if o["squeezed"] else h
            return jnp.mean(optax.log_cosh(nnx.merge(second, state[1], others)(h), y)) * o["weight"]

        return jax.tree.map(lambda w, d: w - o["lr"] * d, state, jax.grad(loss)(state))

    layers = [kan.ChebyshevLayer(n_in=a, n_out=b, D=o["degree"], add_bias=o["bias"]) for a, b in ((3, 5), (5, 2))]
    (first, one, more), (second, two, others) = (nnx.split(layer, nnx.Param, ...) for layer in layers)
    return f, (struct(6, 3), struct(6, 2), jax.eval_shape(lambda: (one, two)))


def grouped(o: Options) -> tuple:
    """Policy optimisation by groups of answers: advantages in a group, a ratio that is clipped, epochs in a scan."""

    def f(p: Any, old: Any, tokens: jax.Array, reward: jax.Array, length: jax.Array) -> Any:
        def scores(p: Any) -> jax.Array:
            h = p["embed"][tokens[..., :-1]]
            h = jnp.cumsum(h, -2) / jnp.arange(1.0, 7.0)[:, None] if o["mean"] else jax.lax.cummax(h, axis=2)
            logits = o["act"](h @ p["up"]) @ p["down"] / o["temperature"]
            return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., 1:, None], -1)[..., 0]

        gain = reward - reward.mean(1, keepdims=True)
        gain = gain / (reward.std(1, keepdims=True) + o["eps"]) if o["normal"] else gain
        told = jnp.arange(6) < length[..., None]
        before = scores(old)

        def loss(p: Any) -> jax.Array:
            own = scores(p)
            ratio = jnp.exp(own - jax.lax.stop_gradient(before))
            bounded = jnp.clip(ratio, 1 - o["low"], 1 + o["high"])
            value = jnp.minimum(ratio * gain[..., None], bounded * gain[..., None])
            apart = jnp.exp(before - own) - (before - own) - 1
            each = jnp.where(told, value - o["kl"] * apart, 0.0)
            return -jnp.sum(each) / jnp.sum(told) if o["by token"] else -jnp.mean(each.sum(-1) / told.sum(-1))

        def epoch(p: Any, _: Any) -> Any:
            return jax.tree.map(lambda w, d: w - o["lr"] * d, p, jax.grad(loss)(p)), None

        return jax.lax.scan(epoch, p, None, length=o["epochs"])[0]

    p = {"embed": struct(15, 6), "up": struct(6, 10), "down": struct(10, 15)}
    return f, (p, p, struct(2, 4, 7, dtype=I32), struct(2, 4), struct(2, 4, dtype=I32))


def sharded(o: Options) -> tuple:
    """Data in parallel, gradients summed into shards, each device updates its own and gathers the others'."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def step(w: jax.Array, m: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        def loss(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
            return jnp.mean(o["error"](o["act"](x @ w.reshape(6, 8)) - y))

        def some(total: jax.Array, each: Any) -> Any:
            return total + jax.grad(loss)(w, *each).astype(o["kept"]), None

        parts = tuple(t.reshape(o["parts"], -1, t.shape[-1]) for t in (x, y))
        g, _ = jax.lax.scan(some, jnp.zeros(48, o["kept"]), parts)
        g = (g / o["parts"]).astype(o["sent"])
        own = (jax.lax.psum_scatter(g, "d", tiled=True) / 4).astype(F32)
        m = o["momentum"] * m + own
        mine = jax.lax.dynamic_slice(w, (jax.lax.axis_index("d") * 12,), (12,)) - o["lr"] * m
        return jax.lax.all_gather(mine, "d", tiled=True), m

    f = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("d"), P("d"), P("d")), out_specs=(P(), P("d")), check_vma=False)
    return f, (struct(48), struct(48), struct(16, 6), struct(16, 8)), *o["donate"]


DEFAULTS: dict[Callable, Options] = {
    coded: dict(act=jax.nn.silu, least=1e-3, prior=1.2, squashed=False, heavy=False, noise=0.45, beta=0.35, lr=0.03),
    integral: dict(pull=0.15, adaptive=True, end=2.0, tolerance=1e-4, weight=0.8, lr=0.02),
    edges: dict(squeeze=0.9, squeezed=True, weight=0.7, lr=0.04, degree=4, bias=True),
    grouped: dict(mean=True, act=jax.nn.relu, temperature=1.3, eps=1e-4, normal=True, low=0.2, high=0.28, kl=0.04,
                  lr=0.006, epochs=3) | {"by token": False},
    sharded: dict(error=jnp.square, act=jnp.tanh, kept=F32, parts=2, sent=F32, momentum=0.85, lr=0.07, donate=()),
}  # fmt: skip
PAIRS: list[Pair] = [
    ("coded beta", coded, {}, {"beta": 0.6}, r"0\.35 -> 0\.6|0\.0875 -> 0\.15"),
    ("coded squashed", coded, {}, {"squashed": True}, r"tanh"),
    ("coded heavy", coded, {}, {"heavy": True}, r"exp|log|softplus|max|\+ |- |replaced"),
    ("integral rule", integral, {}, {"adaptive": False}, r"while|constant|replaced|- |\+ |steps"),
    ("integral end", integral, {}, {"end": 3.0}, r"-?2 -> -?3|4 -> 6|constant"),
    ("edges degree", edges, {}, {"degree": 5}, r"parameters? .*5.* -> .*6"),
    ("edges squeezed", edges, {}, {"squeezed": False}, r"^- .*tanh|tanh|0\.9"),
    ("grouped epochs", grouped, {}, {"epochs": 5}, r"3 -> 5 steps"),
    ("grouped clip", grouped, {}, {"high": 0.4}, r"1\.28 -> 1\.4"),
    ("grouped unnormal", grouped, {}, {"normal": False}, r"- .*(?:sqrt|divide|reduce|power|subtract)"),
    ("grouped by token", grouped, {}, {"by token": True}, r"reduce|divide|sum|replaced|- |\+ "),
    ("sharded sent", sharded, {}, {"sent": jnp.bfloat16}, r"bf16|bfloat16|convert"),
    ("sharded parts", sharded, {}, {"parts": 4}, r"2 -> 4 steps|2,2,.*4,1"),
    ("sharded momentum", sharded, {}, {"momentum": 0.95}, r"0\.85 -> 0\.95"),
]  # fmt: skip


if __name__ == "__main__":
    main(__doc__, {"ninth": PAIRS}, partial(texts, defaults=DEFAULTS))
