"""Pairs of programs of optimistix, lineax, distrax, tensorflow_probability, rax, flashbax and further models.

    python benchmarks/graph_trust_jax_seventh.py FOLDER    # needs jax and these libraries, flax, equinox, haiku, optax

For `graph_trust.py`, each pair three times: HLO, optimised HLO, StableHLO. Programs, changes and what is expected were
written, and frozen in a commit, before any result. What is expected is the operation, the value or the place that
changed, in any of the forms in which a library, JAX or XLA may write it; where a number is folded into others, these.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import distrax
import equinox as eqx
import flashbax
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import lineax
import optax
import optimistix
import rax
import tensorflow_probability.substrates.jax as tfp
from graph_trust_fresh import F32, I32, struct, texts
from graph_trust_pairs import Options, Pair, main
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

KEY = jax.random.key(0).dtype


class Halves(nn.Module):
    """A U-Net of one level: convolutions down, up, and what is handed across."""

    o: Options

    @nn.compact
    def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:
        o = self.o
        angle = t[:, None] * jnp.exp(-jnp.arange(4) * o["waves"])
        time = nn.Dense(o["width"])(nn.swish(nn.Dense(8)(jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1))))
        h = nn.Conv(o["width"], (3, 3), padding=o["padding"])(x)
        skip = o["act"](nn.GroupNorm(o["groups"], epsilon=o["eps"])(h) + time[:, None, None])
        h = nn.Conv(o["width"], (3, 3), strides=2)(skip)
        h = nn.Dropout(o["drop"], deterministic=False)(o["act"](h))
        if o["resize"]:
            h = jax.image.resize(h, skip.shape, o["method"])
        else:
            h = nn.ConvTranspose(o["width"], (2, 2), strides=(2, 2))(h)
        h = jnp.concatenate([h, skip], -1) if o["joined"] else h + skip * o["share"]
        return nn.Conv(2, (1, 1), use_bias=o["bias"])(h)


def diffusion(o: Options) -> tuple:
    """Denoising with a U-Net of flax.linen, an average of the weights beside them."""
    model, tx = Halves(o), optax.adam(o["lr"])
    x, t = struct(o["batch"], 8, 8, 2), struct(o["batch"])
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = jax.eval_shape(model.init, keys, x, t)

    def f(params: Any, mean: Any, state: Any, x: jax.Array, key: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            k1, k2, k3 = jax.random.split(key, 3)
            t = jax.random.randint(k1, x.shape[:1], 0, o["levels"])
            alpha = jnp.cumprod(1 - jnp.linspace(1e-4, o["last"], 50))[t][:, None, None, None]
            noise = jax.random.normal(k2, x.shape)
            noisy = jnp.sqrt(alpha) * x + jnp.sqrt(1 - alpha) * noise
            out = model.apply(p, noisy, t.astype(F32), rngs={"dropout": k3})
            return jnp.mean(o["error"](out - (noise if o["epsilon"] else x)))

        updates, state = tx.update(jax.grad(loss)(params), state)
        params = optax.apply_updates(params, updates)
        return params, optax.incremental_update(params, mean, o["step"]), state

    return f, (params, params, jax.eval_shape(tx.init, params), x, struct(dtype=KEY))


def words(o: Options) -> tuple:
    """A classifier of sentences in equinox: attention with rotary positions, a recurrent cell, weights that decay."""

    def build() -> Any:
        k = jax.random.split(jax.random.key(0), 5)
        return dict(
            embed=eqx.nn.Embedding(30, 16, key=k[0]),
            rope=eqx.nn.RotaryPositionalEmbedding(16 // o["heads"], theta=o["theta"]),
            attend=eqx.nn.MultiheadAttention(o["heads"], 16, use_query_bias=o["bias"], key=k[1]),
            norm=(eqx.nn.RMSNorm if o["rms"] else eqx.nn.LayerNorm)(16, eps=o["eps"]),
            cell=(eqx.nn.GRUCell if o["gru"] else eqx.nn.LSTMCell)(16, o["size"], key=k[2]),
            head=eqx.nn.MLP(o["size"], 3, 10, o["depth"], final_activation=o["last"], key=k[3]),
        )

    tx = optax.chain(optax.add_decayed_weights(o["decay"]), optax.sgd(o["lr"], momentum=o["momentum"]))
    params, static = eqx.partition(eqx.filter_eval_shape(build), lambda v: isinstance(v, jax.ShapeDtypeStruct))

    def one(m: Any, tokens: jax.Array) -> jax.Array:
        h = jax.vmap(m["embed"])(tokens)
        turn = jax.vmap(m["rope"], in_axes=1, out_axes=1)
        g = jax.vmap(m["norm"])(h)
        mask = jnp.abs(jnp.arange(9)[:, None] - jnp.arange(9)) < o["near"]
        h = h + m["attend"](g, g, g, mask=mask, process_heads=lambda q, k, v: (turn(q), turn(k), v))
        state = jnp.zeros(o["size"]) if o["gru"] else (jnp.zeros(o["size"]), jnp.zeros(o["size"]))

        def tick(s: Any, x: jax.Array) -> Any:
            s = m["cell"](x, s)
            return s, s if o["gru"] else s[0]

        _, out = jax.lax.scan(tick, state, h, reverse=o["reverse"])
        return m["head"](out[-1] if o["last step"] else out.mean(0))

    def f(p: Any, state: Any, tokens: jax.Array, y: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            out = jax.vmap(partial(one, eqx.combine(p, static)))(tokens)
            return o["loss"](out, y).mean()

        updates, state = tx.update(jax.grad(loss)(p), state, p)
        return eqx.apply_updates(p, updates), state

    return f, (params, jax.eval_shape(tx.init, params), struct(4, 9, dtype=I32), struct(4, dtype=I32))


def codes(o: Options) -> tuple:
    """A quantised autoencoder of haiku, its codebook a moving average or learnt."""

    def net(x: jax.Array, training: bool) -> Any:
        h = hk.Conv2D(o["width"], o["kernel"], stride=2)(x)
        h = o["act"](hk.LayerNorm(-1, True, o["offset"])(h))
        if o["average"]:
            book = hk.nets.VectorQuantizerEMA(o["width"], o["codes"], o["commit"], o["decay"], epsilon=o["eps"])
        else:
            book = hk.nets.VectorQuantizer(o["width"], o["codes"], o["commit"])
        found = book(h, training)
        h = found["quantize"]
        h = hk.Conv2DTranspose(2, 4, stride=2, with_bias=o["bias"])(h)
        return h, found["loss"], found["perplexity"]

    model, tx = hk.transform_with_state(net), optax.adamax(o["lr"])
    x = struct(o["batch"], 8, 8, 2)
    params, state = jax.eval_shape(partial(model.init, training=True), jax.random.key(0), x)

    def f(params: Any, state: Any, opt: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> Any:
            (out, own, spread), new = model.apply(p, state, None, x, True)
            error = jnp.mean((out - x) ** 2) / o["variance"] + own
            return error, (new, spread)

        (value, (new, spread)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt = tx.update(grads, opt)
        result = optax.apply_updates(params, updates), new, opt, value
        return (*result, spread) if o["told"] else result

    return f, (params, state, jax.eval_shape(tx.init, params), x)


def roots(o: Options) -> tuple:
    """An equation solved within a loss by optimistix, a linear system by lineax, gradients through both."""

    def f(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            def equation(y: jax.Array, args: Any) -> jax.Array:
                return y - jnp.tanh(args @ y * o["gain"]) - x

            found = optimistix.root_find(equation, o["solver"](o["rtol"], 1e-6), x, w, max_steps=o["most"], throw=False)
            matrix = w @ w.T + o["ridge"] * jnp.eye(4)
            tags = lineax.positive_semidefinite_tag if o["definite"] else ()
            solved = lineax.linear_solve(
                lineax.MatrixLinearOperator(matrix, tags), found.value, o["linear"], throw=False
            )
            return jnp.sum(solved.value**2) * o["weight"] + o["tax"] * jnp.sum(jnp.abs(w))

        value, g = jax.value_and_grad(loss)(w)
        return w - o["lr"] * g, value

    return f, (struct(4, 4), struct(4))


def actor(o: Options) -> tuple:
    """An actor and a critic with distributions of distrax, targets that follow slowly."""

    def f(p: Any, slow: Any, obs: jax.Array, action: jax.Array, reward: jax.Array, key: jax.Array) -> Any:
        def policy(p: Any, x: jax.Array) -> Any:
            mean, spread = jnp.split(o["act"](x @ p["in"]) @ p["out"], 2, -1)
            scale = jax.nn.softplus(spread) + o["least"]
            base = (distrax.Normal if o["normal"] else distrax.Laplace)(mean, scale)
            squashed = distrax.Transformed(base, distrax.Block(distrax.Tanh(), 0)) if o["squashed"] else base
            return distrax.Independent(squashed, 1)

        def critic(p: Any, x: jax.Array, a: jax.Array) -> jax.Array:
            return (jax.nn.relu(jnp.concatenate([x, a], -1) @ p["q1"]) @ p["q2"])[:, 0]

        def loss(p: Any) -> jax.Array:
            chosen, log = policy(p, obs).sample_and_log_prob(seed=key)
            target = reward + o["gamma"] * (critic(slow, obs, chosen) - o["alpha"] * log)
            target = jax.lax.stop_gradient(target) if o["stopped"] else target
            error = o["error"](critic(p, obs, action) - target)
            gain = jnp.mean(o["alpha"] * log - critic(jax.lax.stop_gradient(p), obs, chosen))
            return jnp.mean(error) * o["half"] + gain

        g = jax.grad(loss)(p)
        p = jax.tree.map(lambda w, d: w - o["lr"] * d, p, g)
        return p, jax.tree.map(lambda s, w: s * (1 - o["tau"]) + w * o["tau"], slow, p)

    p = {"in": struct(5, o["hidden"]), "out": struct(o["hidden"], 4), "q1": struct(7, 10), "q2": struct(10, 1)}
    return f, (p, p, struct(6, 5), struct(6, 2), struct(6), struct(dtype=KEY))


def bayesian(o: Options) -> tuple:
    """A regression of tensorflow_probability: a joint density, a variational family, draws of it."""
    tfd, tfb = tfp.distributions, tfp.bijectors

    def f(q: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> Any:
        def loss(q: Any) -> jax.Array:
            family = tfd.MultivariateNormalDiag(q["mean"], jnp.exp(q["log"]) * o["wide"])
            family = tfd.TransformedDistribution(family, o["bijector"](tfb)) if o["moved"] else family
            draws = family.sample(o["draws"], seed=key)

            def joint(w: jax.Array) -> jax.Array:
                prior = o["prior"](tfd, o["scale"]).log_prob(w).sum()
                noise = tfd.StudentT(o["df"], x @ w, o["noise"]) if o["heavy"] else tfd.Normal(x @ w, o["noise"])
                return prior * o["share"] + noise.log_prob(y).sum()

            return jnp.mean(family.log_prob(draws) * o["entropy"] - jax.vmap(joint)(draws))

        value, g = jax.value_and_grad(loss)(q)
        return jax.tree.map(lambda v, d: v - o["lr"] * jnp.clip(d, -o["clip"], o["clip"]), q, g), value

    return f, ({"mean": struct(3), "log": struct(3)}, struct(o["points"], 3), struct(o["points"]), struct(dtype=KEY))


def ranking(o: Options) -> tuple:
    """Learning to rank with losses and metrics of rax."""

    def f(p: Any, x: jax.Array, labels: jax.Array, where: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            scores = (o["act"](x @ p["a"]) @ p["b"])[..., 0] / o["temperature"]
            value = o["loss"](scores, labels, where=where if o["masked"] else None)
            return value + o["l2"] * jnp.sum(p["a"] ** 2)

        def score(p: Any) -> jax.Array:
            return rax.ndcg_metric((jax.nn.relu(x @ p["a"]) @ p["b"])[..., 0], labels, topn=o["topn"])

        value, g = jax.value_and_grad(loss)(p)
        new = jax.tree.map(lambda w, d: w - o["lr"] * d, p, g)
        return (new, value, score(p)) if o["scored"] else (new, value)

    size = o["lists"], o["items"]
    return f, ({"a": struct(6, 8), "b": struct(8, 1)}, struct(*size, 6), struct(*size), struct(*size, dtype=jnp.bool_))


def replay(o: Options) -> tuple:
    """Q-learning from a buffer of flashbax: an item is added, a batch drawn, targets by two networks."""
    buffer = flashbax.make_item_buffer(o["length"], o["least"], o["drawn"])
    item = {"obs": jnp.zeros(4), "a": jnp.zeros((), I32), "r": jnp.zeros(()), "next": jnp.zeros(4)}
    state = jax.eval_shape(buffer.init, item)
    tx = o["tx"]()

    def f(p: Any, slow: Any, opt: Any, state: Any, item: Any, key: jax.Array) -> Any:
        state = buffer.add(state, item)
        batch = buffer.sample(state, key).experience

        def q(p: Any, x: jax.Array) -> jax.Array:
            h = jax.nn.relu(x @ p["a"] + p["c"])
            return h @ p["b"] - (h @ p["b"]).mean(-1, keepdims=True) if o["duel"] else h @ p["b"]

        def loss(p: Any) -> jax.Array:
            best = jnp.argmax(q(p if o["double"] else slow, batch["next"]), -1)
            future = jnp.take_along_axis(q(slow, batch["next"]), best[:, None], -1)[:, 0]
            target = jnp.clip(batch["r"], -o["bound"], o["bound"]) + o["gamma"] * future
            own = jnp.take_along_axis(q(p, batch["obs"]), batch["a"][:, None], -1)[:, 0]
            return jnp.mean(o["error"](own - jax.lax.stop_gradient(target)))

        updates, opt = tx.update(jax.grad(loss)(p), opt, p)
        return optax.apply_updates(p, updates), opt, state

    p = {"a": struct(4, 8), "c": struct(8), "b": struct(8, 3)}
    return f, (p, p, jax.eval_shape(tx.init, p), state, jax.eval_shape(lambda: item), struct(dtype=KEY))


def recurrence(o: Options) -> tuple:
    """A linear recurrence by an associative scan in a language model, gradients of one's own, steps accumulated."""

    @jax.custom_vjp
    def held(x: jax.Array) -> jax.Array:
        return x

    held.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -o["hold"], o["hold"]),))

    def mixed(x: jax.Array, w: Any) -> jax.Array:
        decay = jnp.exp(-jax.nn.softplus(w["decay"]) * o["dt"])
        gate = o["gate"](x @ w["gate"])
        drive = (x @ w["in"]) * (jnp.sqrt(1 - decay**2) if o["normal"] else 1.0)

        def joined(left: Any, right: Any) -> Any:
            return left[0] * right[0], left[1] * right[0] + right[1]

        steps = jnp.broadcast_to(decay, drive.shape)
        _, h = jax.lax.associative_scan(joined, (steps, drive), reverse=o["reverse"], axis=1)
        return (held(h) * gate) @ w["out"]

    tx = optax.MultiSteps(optax.adamw(o["lr"], b2=o["b2"]), o["every"]) if o["every"] > 1 else optax.adamw(o["lr"])

    def f(p: Any, state: Any, tokens: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            x = p["embed"][tokens[:, :-1]]
            for w in p["blocks"]:
                x = x + o["scale"] * mixed(x / (jnp.sqrt(jnp.mean(x**2, -1, keepdims=True)) + o["eps"]), w)
            logits = jnp.tanh(x @ p["embed"].T / o["cap"]) * o["cap"]
            scores = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return jnp.sum(scores * (tokens[:, 1:] != o["pad"])) / jnp.sum(tokens[:, 1:] != o["pad"])

        updates, state = tx.update(jax.grad(loss)(p), state, p)
        return optax.apply_updates(p, updates), state

    n = o["size"]
    block = {"decay": struct(n), "gate": struct(8, n), "in": struct(8, n), "out": struct(n, 8)}
    p = {"embed": struct(20, 8), "blocks": [block] * o["blocks"]}
    return f, (p, jax.eval_shape(tx.init, p), struct(3, o["length"] + 1, dtype=I32)), *o["donate"]


def meta(o: Options) -> tuple:
    """Learning to learn: steps of gradient descent per task within the loss, over tasks at once."""

    def net(p: Any, x: jax.Array) -> jax.Array:
        return o["act"](x @ p["a"] + p["c"]) @ p["b"]

    def f(p: Any, rates: Any, x: jax.Array, y: jax.Array, x2: jax.Array, y2: jax.Array) -> Any:
        def task(p: Any, rates: Any, x: jax.Array, y: jax.Array, x2: jax.Array, y2: jax.Array) -> jax.Array:
            def tick(q: Any, _: Any) -> Any:
                g = jax.grad(lambda q: jnp.mean((net(q, x) - y) ** 2))(q)
                g = jax.lax.stop_gradient(g) if o["first order"] else g
                return jax.tree.map(lambda w, r, d: w - (r if o["learnt"] else o["inner"]) * d, q, rates, g), None

            step = jax.checkpoint(tick) if o["remat"] else tick
            q, _ = jax.lax.scan(step, p, None, length=o["steps"])
            return jnp.mean(o["error"](net(q, x2) - y2))

        def loss(p: Any) -> jax.Array:
            each = jax.vmap(partial(task, p, rates))(x, y, x2, y2)
            return o["over"](each) + o["tie"] * sum(jnp.sum(w**2) for w in jax.tree.leaves(p))

        value, g = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda w, d: w - o["outer"] * d, p, g), value

    p = {"a": struct(2, 6), "c": struct(6), "b": struct(6, 1)}
    n = o["tasks"]
    return f, (p, p, *(struct(n, *s) for s in ((5, 2), (5, 1), (o["shots"], 2), (o["shots"], 1))))


def experts(o: Options) -> tuple:
    """A mixture of experts: tokens sent to experts on other devices and back."""
    mesh = jax.make_mesh((4,), ("e",), axis_types=(AxisType.Auto,))

    def layer(w: Any, x: jax.Array) -> jax.Array:
        logits = x @ w["gate"]
        weight, chosen = jax.lax.top_k(jax.nn.softmax(logits) if o["before"] else logits, o["k"])
        weight = weight / weight.sum(-1, keepdims=True) if o["renormal"] else weight
        spots = jax.nn.one_hot(chosen, 4).reshape(-1, 4)
        rank = (jnp.cumsum(spots, 0) - 1) * spots
        kept = spots * (rank < o["room"])
        place = jax.nn.one_hot(rank.sum(-1).astype(I32), o["room"]) * kept.sum(-1, keepdims=True)
        sent = jnp.einsum("te,tr->ter", kept, place)
        tokens = jnp.repeat(x, o["k"], 0)
        h = jnp.einsum("ter,td->erd", sent, tokens)
        h = jax.lax.all_to_all(h, "e", 0, o["concat"], tiled=True)
        h = o["act"](h @ w["up"]) @ w["down"]
        h = jax.lax.all_to_all(h, "e", o["concat"], 0, tiled=True)
        out = jnp.einsum("ter,erd->td", sent, h).reshape(x.shape[0], o["k"], -1)
        return (out * weight[..., None]).sum(1) + o["skip"] * x, jax.lax.pmean(
            jnp.mean(jax.nn.logsumexp(logits, -1) ** 2), "e"
        )

    spec = {"gate": P(), "up": P(), "down": P()}
    part = jax.shard_map(layer, mesh=mesh, in_specs=(spec, P("e")), out_specs=(P("e"), P()), check_vma=False)

    def f(w: Any, x: jax.Array) -> Any:
        def loss(w: Any) -> jax.Array:
            y, z = part(w, x)
            return jnp.mean(y**2) + o["z"] * z

        return jax.tree.map(lambda v, g: v - o["lr"] * g, w, jax.grad(loss)(w))

    return f, ({"gate": struct(8, 4), "up": struct(8, o["hidden"]), "down": struct(o["hidden"], 8)}, struct(24, 8))


def huber(x: jax.Array) -> jax.Array:
    return optax.huber_loss(x)


DEFAULTS: dict[Callable, Options] = {
    diffusion: dict(waves=0.5, width=8, padding="SAME", groups=4, eps=1e-5, act=nn.swish, drop=0.1, resize=True,
                    method="nearest", joined=True, share=0.7, bias=True, lr=2e-4, batch=2, levels=50, last=0.02,
                    error=jnp.square, epsilon=True, step=0.01),
    words: dict(heads=2, theta=10000.0, bias=False, rms=False, eps=1e-5, gru=True, size=12, depth=1,
                last=jax.nn.tanh, decay=0.002, lr=0.06, momentum=0.8, near=4, reverse=False, loss=
                optax.softmax_cross_entropy_with_integer_labels) | {"last step": True},
    codes: dict(width=6, kernel=4, act=jax.nn.relu, offset=True, average=True, codes=10, commit=0.25, decay=0.98,
                eps=1e-5, bias=True, lr=3e-3, batch=3, variance=0.06, told=False),
    roots: dict(gain=0.4, solver=optimistix.Newton, rtol=1e-3, most=12, ridge=0.3, definite=True,
                linear=lineax.Cholesky(), weight=0.9, tax=0.02, lr=0.15),
    actor: dict(act=jax.nn.tanh, least=1e-3, normal=True, squashed=True, gamma=0.97, alpha=0.12, stopped=True,
                error=jnp.square, half=0.5, lr=0.004, tau=0.005, hidden=12),
    bayesian: dict(wide=0.8, moved=False, bijector=lambda tfb: tfb.Softplus(), draws=4, scale=1.7,
                   prior=lambda tfd, s: tfd.Normal(0.0, s), heavy=False, df=5.0, noise=0.35, share=0.6, entropy=1.0,
                   lr=0.03, clip=3.0, points=9),
    ranking: dict(act=jax.nn.relu, temperature=1.4, loss=rax.softmax_loss, masked=True, l2=0.004, topn=3, lr=0.07,
                  scored=True, lists=3, items=6),
    replay: dict(length=32, least=4, drawn=5, tx=lambda: optax.rmsprop(0.003, decay=0.95), duel=False, double=True,
                 bound=1.5, gamma=0.98, error=huber),
    recurrence: dict(hold=0.4, dt=0.12, gate=jax.nn.silu, normal=True, reverse=False, every=4, lr=7e-4, b2=0.98,
                     scale=0.3, eps=1e-6, cap=15.0, pad=0, size=6, blocks=2, length=8, donate=()),
    meta: dict(act=jnp.tanh, learnt=False, inner=0.12, remat=False, steps=3, error=jnp.square, over=jnp.mean, tie=3e-3,
               outer=0.04, tasks=3, shots=5) | {"first order": False},
    experts: dict(before=True, k=2, renormal=True, room=5, concat=1, act=jax.nn.gelu, skip=0.9, z=2e-3, lr=0.08,
                  hidden=12),
}  # fmt: skip
PAIRS: list[Pair] = [
    ("diffusion waves", diffusion, {}, {"waves": 0.75}, r"-?0\.5 -> -?0\.75|constant"),
    ("diffusion padding", diffusion, {}, {"padding": "CIRCULAR"}, r"\+ .*(?:pad|concatenate|slice)|pad="),
    ("diffusion groups", diffusion, {}, {"groups": 2}, r"2,8,8,4,2.*2,8,8,2,4|\[2,4.*\].* -> .*\[2,2"),
    ("diffusion drop", diffusion, {}, {"drop": 0.25}, r"0\.9 -> 0\.75|1\.111.* -> 1\.333"),
    ("diffusion method", diffusion, {}, {"method": "linear"}, r"dot|gather|replaced|multiply"),
    ("diffusion transposed", diffusion, {}, {"resize": False}, r"^\+ .*parameter|convolution|gather"),
    ("diffusion sum", diffusion, {}, {"joined": False}, r"parameters? .*16,2\] -> .*8,2\]|concatenate"),
    ("diffusion levels", diffusion, {}, {"levels": 40}, r"50 -> 40|remainder|constant"),
    ("diffusion last", diffusion, {}, {"last": 0.03}, r"0\.02 -> 0\.03|constant|0\.0199.* -> 0\.0299"),
    ("diffusion error", diffusion, {}, {"error": jnp.abs}, r"abs|sign|multiply"),
    ("diffusion target", diffusion, {}, {"epsilon": False}, r"operand|reads|subtract"),
    ("diffusion average", diffusion, {}, {"step": 0.03}, r"0\.01 -> 0\.03|0\.99 -> 0\.97"),
    ("words heads", words, {}, {"heads": 4}, r"\[.*2,8\].* -> .*\[.*4,4\]|2,8.*4,4"),
    ("words theta", words, {}, {"theta": 500.0}, r"10000 -> 500|constant"),
    ("words bias", words, {}, {"bias": True}, r"^\+ .*parameter|bias"),
    ("words norm", words, {}, {"rms": True}, r"- .*(?:subtract|reduce|parameter)|subtract|mean|reduce"),
    ("words eps", words, {}, {"eps": 1e-3}, r"1e-05 -> 0\.001"),
    ("words cell", words, {}, {"gru": False}, r"parameters? |logistic|tanh|while"),
    ("words near", words, {}, {"near": 3}, r"4 -> 3"),
    ("words reverse", words, {}, {"reverse": True}, r"subtract|reverse"),
    ("words pooled", words, {}, {"last step": False}, r"reduce|slice|divide|mean|dynamic"),
    ("words momentum", words, {}, {"momentum": 0.6}, r"0\.8 -> 0\.6"),
    ("codes number", codes, {}, {"codes": 14}, r"parameters? .*10.* -> .*14"),
    ("codes commitment", codes, {}, {"commit": 0.4}, r"0\.25 -> 0\.4|0\.5 -> 0\.8"),
    ("codes decay", codes, {}, {"decay": 0.95}, r"0\.98 -> 0\.95|0\.02.* -> 0\.05"),
    ("codes learnt", codes, {}, {"average": False}, r"parameters? |^[+-] "),
    ("codes offset", codes, {}, {"offset": False}, r"^- .*(?:parameter|add|offset)"),
    ("codes variance", codes, {}, {"variance": 0.09}, r"0\.06 -> 0\.09|16\.66.* -> 11\.11"),
    ("codes told", codes, {}, {"told": True}, r"^\+ output"),
    ("roots gain", roots, {}, {"gain": 0.6}, r"0\.4 -> 0\.6"),
    ("roots solver", roots, {}, {"solver": optimistix.Chord}, r"while|\+ |- |replaced"),
    ("roots tolerance", roots, {}, {"rtol": 1e-5}, r"0\.001 -> 1e-05"),
    ("roots most", roots, {}, {"most": 20}, r"12 -> 20|11 -> 19|13 -> 21"),
    ("roots linear", roots, {}, {"linear": lineax.LU(), "definite": False},
     r"cholesky|potrf|lu|getrf|custom-call|triang"),
    ("roots tax", roots, {}, {"tax": 0.05}, r"0\.02 -> -?0\.05"),
    ("actor squashed", actor, {}, {"squashed": False}, r"^(?:in .*: )?- .*(?:tanh|log|softplus|exp)|tanh"),
    ("actor laplace", actor, {}, {"normal": False}, r"abs|log|sign|erf|normal|\+ |- |replaced"),
    ("actor least", actor, {}, {"least": 0.02}, r"0\.001 -> 0\.02"),
    ("actor discount", actor, {}, {"gamma": 0.9}, r"0\.97 -> 0\.9"),
    ("actor alpha", actor, {}, {"alpha": 0.2}, r"-?0\.12 -> -?0\.2|0\.02 -> 0\.033"),
    ("actor following", actor, {}, {"tau": 0.02}, r"0\.995 -> 0\.98|0\.005 -> 0\.02"),
    ("actor hidden", actor, {}, {"hidden": 16}, r"parameters? .*12.* -> .*16"),
    ("bayesian moved", bayesian, {}, {"moved": True}, r"\+ .*(?:log|exp|abs|max)|log|exp"),
    ("bayesian draws", bayesian, {}, {"draws": 6}, r"\[4.* -> .*\[6|4 -> 6|iota|\[12\].*\[18\]|12 -> 18"),
    ("bayesian heavy", bayesian, {}, {"heavy": True}, r"log|\+ |- |replaced"),
    ("bayesian prior", bayesian, {}, {"prior": lambda tfd, s: tfd.Laplace(0.0, s)}, r"abs|sign|square|multiply|log"),
    ("bayesian scale", bayesian, {}, {"scale": 2.6}, r"1\.7 -> 2\.6|0\.588.* -> 0\.384|constant"),
    ("bayesian entropy", bayesian, {"entropy": 0.7}, {"entropy": 0.4}, r"-?0\.7 -> -?0\.4|0\.175.* -> 0\.1"),
    ("bayesian clip", bayesian, {}, {"clip": 2.0}, r"-?3 -> -?2"),
    ("ranking loss", ranking, {}, {"loss": rax.pairwise_hinge_loss}, r"exp|log|reduce|max|\+ |- |replaced"),
    ("ranking unmasked", ranking, {}, {"masked": False},
     r"^- .*(?:parameter|select|or|and|broadcast|output)|select|where"),
    ("ranking topn", ranking, {}, {"topn": 5}, r"3 -> 5"),
    ("ranking temperature", ranking, {}, {"temperature": 0.9}, r"1\.4 -> 0\.9|0\.714.* -> 1\.11"),
    ("ranking unscored", ranking, {}, {"scored": False}, r"^- output"),
    ("ranking items", ranking, {}, {"items": 8}, r"\[3,6,6\] -> f32\[3,8,6\]"),
    ("replay length", replay, {}, {"length": 48}, r"parameters? .*32.* -> .*48"),
    ("replay drawn", replay, {}, {"drawn": 8}, r"5.* -> .*8"),
    ("replay duel", replay, {}, {"duel": True}, r"^(?:in .*: )?\+ .*(?:reduce|subtract|divide)"),
    ("replay single", replay, {}, {"double": False}, r"operand|reads|instead|- .*(?:dot|multiply|max|add|reduce)"),
    ("replay bound", replay, {}, {"bound": 1.0}, r"-?1\.5 -> -?1"),
    ("replay centred", replay, {}, {"tx": lambda: optax.rmsprop(0.003, decay=0.95, centered=True)},
     r"^\+ .*(?:parameter|multiply|subtract|output)"),
    ("recurrence held", recurrence, {}, {"hold": 0.6}, r"-?0\.4 -> -?0\.6"),
    ("recurrence dt", recurrence, {}, {"dt": 0.2}, r"-?0\.12 -> -?0\.2"),
    ("recurrence gate", recurrence, {}, {"gate": jax.nn.sigmoid}, r"multiply|logistic|silu|exp"),
    ("recurrence unscaled", recurrence, {}, {"normal": False}, r"- .*(?:sqrt|subtract|multiply|power)"),
    ("recurrence reversed", recurrence, {}, {"reverse": True}, r"reverse|slice|pad|concatenate"),
    ("recurrence every", recurrence, {}, {"every": 6}, r"4 -> 6|3 -> 5"),
    ("recurrence unaccumulated", recurrence, {}, {"every": 1}, r"^- .*(?:parameter|select|conditional|add|output)"),
    ("recurrence cap", recurrence, {}, {"cap": 30.0}, r"15 -> 30|0\.0666.* -> 0\.0333"),
    ("recurrence pad", recurrence, {}, {"pad": 3}, r"0 -> 3"),
    ("recurrence blocks", recurrence, {}, {"blocks": 3}, r"^\+ .*parameter"),
    ("recurrence donated", recurrence, {}, {"donate": (0, 1)}, r"donation of argument"),
    ("meta first order", meta, {}, {"first order": True}, r"^(?:in .*: )?- |remat|while"),
    ("meta steps", meta, {}, {"steps": 5}, r"3 -> 5 steps"),
    ("meta rate", meta, {}, {"inner": 0.2}, r"-?0\.12 -> -?0\.2"),
    ("meta learnt", meta, {}, {"learnt": True}, r"parameter|multiply|reads|operand|constant|0\.12"),
    ("meta remat", meta, {}, {"remat": True}, r"remat"),
    ("meta worst", meta, {}, {"over": jnp.max}, r"max|reduce|divide"),
    ("meta tasks", meta, {}, {"tasks": 4}, r"\[3,5,2\] -> f32\[4,5,2\]"),
    ("experts chosen", experts, {}, {"k": 1}, r"k=2.*k=1|2.* -> .*1|top"),
    ("experts room", experts, {}, {"room": 4}, r"5.* -> .*4"),
    ("experts raw", experts, {}, {"before": False}, r"softmax|exp|reads|- .*(?:divide|reduce|subtract)|top"),
    ("experts unnormal", experts, {}, {"renormal": False}, r"- .*(?:divide|reduce)"),
    ("experts axis", experts, {}, {"concat": 0}, r"all-to-all|all_to_all|transpose|reshape"),
    ("experts z", experts, {}, {"z": 6e-3}, r"0\.002 -> 0\.006|0\.00\d+ -> |0\.000\d+ -> "),
]  # fmt: skip


if __name__ == "__main__":
    main(__doc__, {"seventh": PAIRS}, partial(texts, defaults=DEFAULTS))
