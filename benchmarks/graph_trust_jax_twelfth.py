"""Pairs of programs of a language model, a denoiser, transducers, clipped policies, sharp minima, beams and devices.

    python benchmarks/graph_trust_jax_twelfth.py FOLDER    # needs jax, equinox, flax and optax

For `graph_trust.py`, each pair three times: HLO, optimised HLO, StableHLO. Programs, changes and what is expected were
written, and frozen in a commit, before any result.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from graph_trust_fresh import F32, I32, struct, texts
from graph_trust_pairs import Options, Pair, main
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

BF16, KEY = jnp.bfloat16, jax.random.key(0).dtype


class Block(eqx.Module):
    """Attention with turned queries and few keys, a gated layer."""

    q: eqx.nn.Linear
    kv: eqx.nn.Linear
    out: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norms: list
    o: Options = eqx.field(static=True)

    def __init__(self, o: Options, key: jax.Array) -> None:
        keys = jax.random.split(key, 5)
        few = 2 * o["keys"] * 4
        self.q = eqx.nn.Linear(16, 16, use_bias=o["bias"], key=keys[0])
        self.kv = eqx.nn.Linear(16, few, use_bias=False, key=keys[1])
        self.out = eqx.nn.Linear(16, 16, use_bias=False, key=keys[2])
        self.up = eqx.nn.Linear(16, 2 * o["wide"], key=keys[3])
        self.down = eqx.nn.Linear(o["wide"], 16, key=keys[4])
        self.norms = [eqx.nn.RMSNorm(16, eps=o["eps"], use_bias=False) for _ in range(2)]
        self.o = o

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        o, t = self.o, x.shape[0]
        h = jax.vmap(self.norms[0])(x)
        q = jax.vmap(self.q)(h).reshape(t, 4, 4)
        k, v = jnp.split(jax.vmap(self.kv)(h).reshape(t, 2 * o["keys"], 4), 2, 1)
        angle = jnp.arange(t)[:, None] * o["theta"] ** (-jnp.arange(2) / 2)

        def turned(u: jax.Array) -> jax.Array:
            a, b = jnp.split(u, 2, -1)
            c, s = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
            return jnp.concatenate([a * c - b * s, a * s + b * c], -1)

        q, k = turned(q), turned(k) if o["both"] else k
        k, v = (jnp.repeat(u, 4 // o["keys"], 1) for u in (k, v))
        score = jnp.einsum("qhd,khd->hqk", q, k) * o["scale"]
        score = o["cap"] * jnp.tanh(score / o["cap"]) if o["cap"] else score
        mask = jnp.tril(jnp.ones((t, t), bool), o["diagonal"])
        odds = jax.nn.softmax(jnp.where(mask, score, o["fill"]), -1)
        h = jnp.einsum("hqk,khd->qhd", odds, v).reshape(t, 16)
        x = x + eqx.nn.Dropout(o["drop"])(jax.vmap(self.out)(h), key=key)
        a, b = jnp.split(jax.vmap(self.up)(jax.vmap(self.norms[1])(x)), 2, -1)
        return x + jax.vmap(self.down)(o["gate"](a) * b)


def speaker(o: Options) -> tuple:
    """A language model of equinox, trained with decay for matrices alone, steps that are gathered, a moving mean."""

    def build() -> Any:
        keys = jax.random.split(jax.random.key(0), o["layers"] + 2)
        head = eqx.nn.Linear(16, 23, use_bias=False, key=keys[1])
        return eqx.nn.Embedding(23, 16, key=keys[0]), [Block(o, k) for k in keys[2:]], head

    def arrays(v: Any) -> bool:
        return isinstance(v, jax.ShapeDtypeStruct)

    params, static = eqx.partition(eqx.filter_eval_shape(build), arrays)
    matrices = partial(jax.tree.map, lambda v: v.ndim > 1)
    rate = optax.linear_schedule(o["high"], o["low"], o["until"])
    tx = optax.adamw(rate, b2=o["b2"], weight_decay=o["decay"], mask=matrices if o["masked"] else None)
    tx = optax.MultiSteps(tx, o["every"]) if o["every"] > 1 else tx

    def f(p: Any, s: Any, mean: Any, ids: jax.Array, key: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            embed, blocks, head = eqx.combine(p, static)

            def one(ids: jax.Array, key: jax.Array) -> jax.Array:
                h = jax.vmap(embed)(ids)
                for k, block in enumerate(blocks):
                    run = eqx.filter_checkpoint(block) if o["remat"] else block
                    h = run(h, jax.random.fold_in(key, k))
                return jax.vmap(head)(h)

            logits = jax.vmap(one)(ids[:, :-1], jax.random.split(key, ids.shape[0])).astype(F32)
            wrong = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
            weight = (ids[:, 1:] != o["ignored"]).astype(F32)
            return jnp.sum(wrong * weight) / jnp.maximum(jnp.sum(weight), 1)

        value, g = jax.value_and_grad(loss)(p)
        u, s = tx.update(g, s, p)
        p = eqx.apply_updates(p, u)
        return p, s, optax.incremental_update(p, mean, o["share"]), value

    state = jax.eval_shape(tx.init, params)
    return f, (params, state, params, struct(o["batch"], 7, dtype=I32), struct(dtype=KEY)), *o["donate"]


class Denoiser(nnx.Module):
    """A U-Net of one level."""

    def __init__(self, o: Options, rngs: nnx.Rngs) -> None:
        c = 6
        size = (o["kernel"],) * 2
        self.o = o
        self.start = nnx.Conv(2, c, size, rngs=rngs)
        self.norm = nnx.GroupNorm(c, o["groups"], epsilon=1e-5, rngs=rngs)
        self.down = nnx.Conv(c, 2 * c, (3, 3), strides=2, padding=o["padding"], rngs=rngs)
        self.time = nnx.Linear(8, 2 * c, rngs=rngs)
        self.up = nnx.ConvTranspose(2 * c, c, (2, 2), strides=(2, 2), rngs=rngs)
        self.end = nnx.Conv(2 * c if o["skip"] else c, 2, (3, 3), use_bias=o["bias"], rngs=rngs)

    def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:
        o = self.o
        waves = t[:, None] * jnp.exp(-jnp.log(o["period"]) * jnp.arange(4) / 4)
        told = self.time(jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1))
        first = o["act"](self.norm(self.start(x)))
        h = o["act"](self.down(first) + told[:, None, None])
        h = self.up(h)
        h = jnp.concatenate([h, first], -1) if o["skip"] else h
        return self.end(h)


def painter(o: Options) -> tuple:
    """Diffusion: noise by a schedule, the noise or the speed as target, weights by how noisy it is."""
    static, params = nnx.split(nnx.eval_shape(lambda: Denoiser(o, nnx.Rngs(0))))
    tx = optax.chain(optax.add_decayed_weights(o["decay"]), optax.scale_by_adam(), optax.scale(-o["lr"]))

    def f(p: Any, s: Any, x: jax.Array, key: jax.Array) -> Any:
        a, b = jax.random.split(key)
        t = jax.random.uniform(a, (x.shape[0],), minval=o["least"])
        noise = jax.random.normal(b, x.shape)
        level = jnp.cos((t + o["offset"]) / (1 + o["offset"]) * jnp.pi / 2) ** 2
        signal, sigma = (jnp.sqrt(v)[:, None, None, None] for v in (level, 1 - level))
        noisy = signal * x + sigma * noise
        target = signal * noise - sigma * x if o["speed"] else noise

        def loss(p: Any) -> jax.Array:
            wrong = jnp.mean((nnx.merge(static, p)(noisy, t) - target) ** 2, (1, 2, 3))
            weight = jnp.minimum(level / (1 - level), o["gamma"])
            return jnp.mean(weight * wrong)

        value, g = jax.value_and_grad(loss)(p)
        u, s = tx.update(g, s, p)
        return optax.apply_updates(p, u), s, value

    return f, (params, jax.eval_shape(tx.init, params), struct(2, 8, 8, 2), struct(dtype=KEY))


def transducer(o: Options) -> tuple:
    """The loss of a transducer: a joint network, then sums over alignments by a scan over time."""

    def f(p: Any, sound: jax.Array, said: jax.Array, lengths: jax.Array) -> Any:
        def encode(w: Any, xs: jax.Array) -> jax.Array:
            def cell(h: jax.Array, x: jax.Array) -> Any:
                z = jax.nn.sigmoid(x @ w["xz"] + h @ w["hz"] + o["gate"])
                n = jnp.tanh(x @ w["xn"] + h @ w["hn"])
                new = z * h + (1 - z) * n
                return new, new

            first = jnp.full((xs.shape[1], 6), o["first"]) if o["first"] else jnp.zeros((xs.shape[1], 6))
            return jax.lax.scan(cell, first, xs, reverse=o["reverse"], unroll=o["unroll"])[1]

        def loss(p: Any) -> jax.Array:
            enc = encode(p["enc"], sound)
            dec = encode(p["dec"], p["embed"][said].swapaxes(0, 1))
            dec = jnp.pad(dec, ((1, 0), (0, 0), (0, 0)))
            both = enc[:, None] + dec[None]
            logits = o["act"](both) @ p["out"]
            odds = jax.nn.log_softmax(logits / o["heat"], -1)
            blank = odds[..., o["blank"]]
            token = jnp.take_along_axis(odds[:, :-1], said.T[None, :, :, None], -1)[..., 0]

            def over(alpha: jax.Array, now: Any) -> Any:
                stay, move = now

                def inner(left: jax.Array, k: Any) -> Any:
                    up, m = k
                    new = jnp.logaddexp(up, left + m)
                    return new, new

                come = alpha + stay
                _, rest = jax.lax.scan(inner, come[0], (come[1:], move))
                new = jnp.concatenate([come[:1], rest])
                return new, new

            start = jnp.where(jnp.arange(blank.shape[1])[:, None] == 0, 0.0, o["never"])
            start = jnp.broadcast_to(start, blank.shape[1:])
            body = jax.checkpoint(over, policy=o["policy"]) if o["remat"] else over
            _, alphas = jax.lax.scan(body, start, (blank, token))
            end = jnp.take_along_axis(alphas[-1], lengths[None], 0)[0]
            return -o["over"](end) + o["smooth"] * -jnp.mean(odds)

        return jax.tree.map(lambda w, d: w - o["lr"] * d, p, jax.grad(loss)(p))

    layer = {"xz": struct(5, 6), "hz": struct(6, 6), "xn": struct(5, 6), "hn": struct(6, 6)}
    p = {"enc": layer, "dec": layer, "embed": struct(9, 5), "out": struct(6, 9)}
    return f, (p, struct(7, 2, 5), struct(2, 3, dtype=I32), struct(2, dtype=I32))


def clipped(o: Options) -> tuple:
    """A policy improved within bounds: advantages by a scan, epochs of shuffled minibatches."""

    def f(p: Any, seen: jax.Array, act: jax.Array, old: jax.Array, reward: jax.Array, done: jax.Array, key: jax.Array):
        def heads(p: Any, x: jax.Array) -> Any:
            h = o["act"](x @ p["body"])
            return h @ p["policy"], (h @ p["value"])[..., 0]

        value = heads(p, seen)[1]

        def back(last: jax.Array, now: Any) -> Any:
            r, d, v, following = now
            delta = r + o["gamma"] * following * (1 - d) - v
            last = delta + o["gamma"] * o["lam"] * (1 - d) * last
            return last, last

        given = reward, done, value[:-1], value[1:]
        _, gain = jax.lax.scan(back, jnp.zeros(value.shape[1]), given, reverse=True)
        target = jax.lax.stop_gradient(gain + value[:-1])
        flat = jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:]), (seen[:-1], act, old, gain, target, value[:-1]))

        def loss(p: Any, part: Any) -> jax.Array:
            x, a, old, gain, target, before = part
            gain = (gain - gain.mean()) / (gain.std() + o["tiny"]) if o["normal"] else gain
            logits, v = heads(p, x)
            logp = jax.nn.log_softmax(logits)
            ratio = jnp.exp(jnp.take_along_axis(logp, a[:, None], -1)[:, 0] - old)
            low = jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - o["clip"], 1 + o["clip"]) * gain)
            near = before + jnp.clip(v - before, -o["room"], o["room"])
            wrong = jnp.maximum((v - target) ** 2, (near - target) ** 2) if o["bounded"] else (v - target) ** 2
            mixed = -jnp.sum(jnp.exp(logp) * logp, -1)
            return -jnp.mean(low) + o["critic"] * jnp.mean(wrong) - o["entropy"] * jnp.mean(mixed)

        def epoch(p: Any, key: jax.Array) -> Any:
            order = jax.random.permutation(key, flat[1].shape[0])
            parts = jax.tree.map(lambda v: v[order].reshape(o["parts"], -1, *v.shape[1:]), flat)

            def step(p: Any, part: Any) -> Any:
                g = jax.grad(loss)(p, part)
                return jax.tree.map(lambda w, d: w - o["lr"] * d, p, g), optax.global_norm(g)

            return jax.lax.scan(step, p, parts)

        return jax.lax.scan(epoch, p, jax.random.split(key, o["epochs"]))

    p = {"body": struct(4, 8), "policy": struct(8, 3), "value": struct(8, 1)}
    t = struct(6, 2)
    return f, (p, struct(7, 2, 4), struct(6, 2, dtype=I32), t, t, t, struct(dtype=KEY)), *o["donate"]


def sharp(o: Options) -> tuple:
    """Two gradients a step, the second where the first leads; rules of one's own for gradients; a scaled loss."""

    @jax.custom_vjp
    def held(x: jax.Array) -> jax.Array:
        return x

    held.defvjp(lambda x: (x, x), lambda x, g: (jnp.clip(g, -o["hold"], o["hold"]),))

    def f(p: Any, m: Any, scale: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            low = jax.tree.map(lambda w: w.astype(o["half"]), p)
            h = o["act"](x.astype(o["half"]) @ low["a"])
            h = held(h) if o["holds"] else h
            wrong = (h @ low["b"]).astype(F32) - y
            return jnp.mean(optax.log_cosh(wrong)) * scale

        g = jax.grad(loss)(p)
        size = o["norm"](g)
        there = jax.tree.map(lambda w, d: w + o["radius"] * d / (size + 1e-12), p, g) if o["twice"] else p
        g = jax.tree.map(lambda d: d / scale, jax.grad(loss)(there))
        fine = jnp.all(jnp.stack([jnp.all(jnp.isfinite(d)) for d in jax.tree.leaves(g)]))
        new = jax.tree.map(lambda v, d: o["momentum"] * v + d, m, g)
        step = jax.tree.map(lambda v, d: o["momentum"] * v + d, new, g) if o["nesterov"] else new
        moved = jax.tree.map(lambda w, v: w - o["lr"] * (v + o["decay"] * w), p, step)
        p, m = jax.tree.map(partial(jnp.where, fine), (moved, new), (p, m))
        scale = jnp.where(fine, jnp.minimum(scale * o["grow"], 2.0**16), jnp.maximum(scale / 2, 1.0))
        return p, m, scale

    p = {"a": struct(5, 9), "b": struct(9, 3)}
    return f, (p, p, struct(), struct(o["rows"], 5), struct(o["rows"], 3)), *o["donate"]


def beams(o: Options) -> tuple:
    """Beams of a recurrent decoder until all are done, lengths weighed."""

    def f(p: Any, state: jax.Array) -> Any:
        def more(s: Any) -> jax.Array:
            return (s[0] < o["most"]) & ~jnp.all(s[4])

        def step(s: Any) -> Any:
            k, h, token, score, done, kept = s
            new = jnp.tanh(p["embed"][token] + h @ p["w"])
            logp = jax.nn.log_softmax(new @ p["out"] / o["heat"])
            logp = logp - o["again"] * jax.nn.one_hot(token, 11)
            logp = jnp.where(done[:, None], jnp.where(jnp.arange(11) == o["stop"], 0.0, -1e9), logp)
            total = score[:, None] + logp
            weight = ((5.0 + k) / 6.0) ** o["length"]
            _, best = jax.lax.top_k((total / weight).reshape(-1), o["beams"])
            row, token = best // 11, best % 11
            score = total.reshape(-1)[best]
            done = done[row] | (token == o["stop"])
            kept = kept[row].at[:, k].set(token)
            return k + 1, new[row], token.astype(I32), score, done, kept

        n = o["beams"]
        score = jnp.where(jnp.arange(n) == 0, 0.0, -1e9)
        first = 0, jnp.tile(state, (n, 1)), jnp.full(n, o["begin"], I32), score, jnp.zeros(n, bool)
        return jax.lax.while_loop(more, step, (*first, jnp.zeros((n, o["most"]), I32)))[3:]

    return f, ({"embed": struct(11, 6), "w": struct(6, 6), "out": struct(6, 11)}, struct(6))


def tensored(o: Options) -> tuple:
    """A layer over four devices: rows gathered before, sums scattered behind, gradients of both averaged."""
    mesh = jax.make_mesh((4,), ("t",), axis_types=(AxisType.Auto,))

    def run(p: Any, x: jax.Array) -> jax.Array:
        def norm(x: jax.Array) -> jax.Array:
            return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + o["eps"]) * p["scale"]

        whole = jax.lax.all_gather(norm(x), "t", axis=o["along"], tiled=True)
        h = o["act"](jnp.einsum("btd,df->btf", whole, p["up"], precision=o["precision"]))
        out = jnp.einsum("btf,fd->btd", h.astype(o["sent"]), p["down"].astype(o["sent"]))
        if o["scattered"]:
            out = jax.lax.psum_scatter(out, "t", scatter_dimension=o["along"], tiled=True)
        else:
            out = jax.lax.psum(out, "t")
            at = jax.lax.axis_index("t") * x.shape[1]
            out = jax.lax.dynamic_slice_in_dim(out, at, x.shape[1], 1)
        return x * o["keep"] + out.astype(F32)

    specs = {"scale": P(), "up": P(None, "t"), "down": P("t", None)}
    part = jax.shard_map(run, mesh=mesh, in_specs=(specs, P(None, "t")), out_specs=P(None, "t"), check_vma=False)

    def f(p: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(p: Any, x: jax.Array) -> jax.Array:
            for _ in range(o["deep"]):
                x = part(p, x)
            return jnp.mean(o["error"](x - y))

        return jax.value_and_grad(loss)(p, x)

    p = {"scale": struct(6), "up": struct(6, 8), "down": struct(8, 6)}
    return f, (p, struct(2, 8, 6), struct(2, 8, 6))


def gates(o: Options) -> tuple:
    """Recurrent cells with peepholes for several members at once, rows that end early."""

    def net(p: Any, xs: jax.Array, lengths: jax.Array, key: jax.Array) -> jax.Array:
        def cell(s: Any, now: Any) -> Any:
            h, c = s
            x, t = now
            i, g, e, w = jnp.split(x @ p["x"] + h @ p["h"] + p["b"], 4, -1)
            if o["peep"]:
                i, e = i + c * p["peep"], e + c * p["peep"]
            new = jax.nn.sigmoid(e + o["keep"]) * c + jax.nn.sigmoid(i) * o["act"](g)
            out = jax.nn.sigmoid(w) * o["act"](new)
            out = jnp.where(jax.random.uniform(jax.random.fold_in(key, t), out.shape) < o["zone"], h, out)
            alive = (t < lengths)[:, None]
            return (jnp.where(alive, out, h), jnp.where(alive, new, c)), out

        first = p["first"] if o["learnt"] else jnp.zeros(6)
        first = jnp.broadcast_to(first, (xs.shape[0], 6))
        given = xs.swapaxes(0, 1), jnp.arange(xs.shape[1])
        (h, _), outs = jax.lax.scan(jax.checkpoint(cell) if o["remat"] else cell, (first, first), given)
        pooled = o["pool"](outs, 0) if o["pooled"] else h
        return pooled @ p["out"]

    def f(p: Any, xs: jax.Array, lengths: jax.Array, y: jax.Array, keys: jax.Array) -> Any:
        def loss(p: Any, key: jax.Array) -> jax.Array:
            out = net(p, xs, lengths, key)
            return jnp.mean(optax.sigmoid_focal_loss(out, y, gamma=o["focus"])) + o["l2"] * jnp.sum(p["h"] ** 2)

        axes = dict.fromkeys(p, 0) | ({"out": None} if o["shared"] else {})
        mapped = jax.vmap(jax.value_and_grad(loss), (axes, 0))
        return mapped(p, keys)

    n = 3
    p = {"x": struct(n, 4, 24), "h": struct(n, 6, 24), "b": struct(n, 24), "peep": struct(n, 6), "first": struct(n, 6)}
    p["out"] = struct(6, 2) if o["shared"] else struct(n, 6, 2)
    return f, (p, struct(5, o["steps"], 4), struct(5, dtype=I32), struct(5, 2), struct(n, dtype=KEY))


save = jax.checkpoint_policies
DEFAULTS: dict[Callable, Options] = {
    speaker: dict(keys=2, bias=False, wide=12, eps=1e-5, theta=10000.0, both=True, scale=0.5, cap=0.0, diagonal=0,
                  fill=-1e9, drop=0.1, gate=jax.nn.silu, layers=2, high=3e-3, low=3e-4, until=500, b2=0.97, decay=0.1,
                  masked=True, every=1, remat=False, ignored=0, share=0.01, batch=3, donate=()),
    painter: dict(kernel=3, groups=2, padding="SAME", skip=True, bias=True, period=1000.0, act=nnx.silu, decay=1e-4,
                  lr=2e-4, least=0.0, offset=0.008, speed=False, gamma=5.0),
    transducer: dict(gate=1.5, first=0.0, reverse=False, unroll=1, act=jnp.tanh, heat=1.3, blank=0, never=-1e9,
                     policy=None, remat=False, over=jnp.mean, smooth=0.02, lr=0.07),
    clipped: dict(act=jnp.tanh, gamma=0.97, lam=0.9, tiny=1e-6, normal=True, clip=0.2, room=0.3, bounded=True,
                  critic=0.6, entropy=0.015, parts=3, epochs=4, lr=0.004, donate=()),
    sharp: dict(hold=0.4, half=F32, act=jax.nn.gelu, holds=True, norm=optax.global_norm, radius=0.07, twice=True,
                momentum=0.85, nesterov=False, lr=0.03, decay=0.002, grow=1.01, rows=4, donate=()),
    beams: dict(most=9, heat=1.2, again=0.35, stop=1, length=0.65, beams=3, begin=2),
    tensored: dict(eps=1e-6, along=1, act=jax.nn.relu, precision=None, sent=F32, scattered=True, keep=1.0, deep=1,
                   error=jnp.square),
    gates: dict(peep=True, keep=1.0, act=jnp.tanh, zone=0.1, learnt=False, remat=False, pool=jnp.mean, pooled=False,
                focus=2.5, l2=0.003, shared=False, steps=6),
}  # fmt: skip
PAIRS: list[Pair] = [
    ("speaker keys", speaker, {}, {"keys": 4}, r"parameters? .*\[16,16\].* -> .*\[32,16\]"),
    ("speaker theta", speaker, {}, {"theta": 5e5}, r"10000 -> 5(?:e\+05|00000)|0\.01 -> 0\.0014|constant .* -> "),
    ("speaker unturned", speaker, {}, {"both": False}, r"- .*(?:concatenate|multiply|slice|cosine)|replaced"),
    ("speaker scale", speaker, {}, {"scale": 0.25}, r"0\.5 -> 0\.25"),
    ("speaker cap", speaker, {}, {"cap": 15.0}, r"\+ .*tanh"),
    ("speaker diagonal", speaker, {}, {"diagonal": -1}, r"0 -> -1|-1|compare|add|constant"),
    ("speaker drop", speaker, {}, {"drop": 0.25}, r"0\.9 -> 0\.75"),
    ("speaker gate", speaker, {}, {"gate": jax.nn.relu}, r"logistic|exponential|max"),
    ("speaker layers", speaker, {}, {"layers": 3}, r"\+ .*parameter"),
    ("speaker bias", speaker, {}, {"bias": True}, r"\+ .*parameter"),
    ("speaker until", speaker, {}, {"until": 800}, r"500 -> 800|0\.002 -> 0\.00125"),
    ("speaker decay", speaker, {}, {"decay": 0.03}, r"0\.1 -> 0\.03"),
    ("speaker unmasked", speaker, {}, {"masked": False}, r"\+ .*(?:add|multiply)"),
    ("speaker every", speaker, {"every": 2}, {"every": 4}, r"2 -> 4|[13] -> [13]|0\.5 -> 0\.25"),
    ("speaker remat", speaker, {}, {"remat": True}, r"remat"),
    ("speaker ignored", speaker, {}, {"ignored": -1}, r"0 -> -1|-1"),
    ("speaker share", speaker, {}, {"share": 0.05}, r"0\.01 -> 0\.05|0\.99.* -> 0\.95"),
    ("speaker donated", speaker, {}, {"donate": (0, 1, 2)}, r"donation of argument"),
    ("painter kernel", painter, {}, {"kernel": 5}, r"parameters? .*\[3,3,2,6\].* -> .*\[5,5,2,6\]"),
    ("painter groups", painter, {}, {"groups": 3}, r"\[.*2.*\] -> .*3"),
    ("painter padding", painter, {}, {"padding": "CIRCULAR"}, r"pad|concatenate|slice"),
    ("painter skip", painter, {}, {"skip": False}, r"parameters? .*\[3,3,12,2\].* -> .*\[3,3,6,2\]|concatenate"),
    ("painter period", painter, {}, {"period": 100.0}, r"1000 -> 100|6\.9.* -> 4\.6|constant|-1\.7.* -> -1\.1"),
    ("painter least", painter, {}, {"least": 0.05}, r"0 -> 0\.05|1 -> 0\.95|constant|\+ "),
    ("painter offset", painter, {}, {"offset": 0.02}, r"0\.008 -> 0\.02|1\.008.* -> 1\.02"),
    ("painter speed", painter, {}, {"speed": True}, r"\+ .*(?:multiply|subtract)|replaced|reads|instead"),
    ("painter gamma", painter, {}, {"gamma": 8.0}, r"5 -> 8"),
    ("painter rate", painter, {}, {"lr": 5e-4}, r"-?0\.0002 -> -?0\.0005"),
    ("transducer gate", transducer, {}, {"gate": 2.0}, r"1\.5 -> 2"),
    ("transducer first", transducer, {"first": 0.2}, {"first": 0.3}, r"0\.2 -> 0\.3"),
    ("transducer reverse", transducer, {}, {"reverse": True}, r"subtract|reverse|- .*|\+ "),
    ("transducer unrolled", transducer, {}, {"unroll": 3}, r"unroll|steps"),
    ("transducer heat", transducer, {}, {"heat": 1.6}, r"1\.3 -> 1\.6|0\.769.* -> 0\.625"),
    ("transducer blank", transducer, {}, {"blank": 8}, r"slice|0.* -> .*8|gather|pad"),
    ("transducer remat", transducer, {}, {"remat": True}, r"remat"),
    ("transducer policy", transducer, {"remat": True}, {"remat": True, "policy": save.everything_saveable}, r"remat"),
    ("transducer sum", transducer, {}, {"over": jnp.sum}, r"divide|multiply|2|0\.5|constant"),
    ("transducer smooth", transducer, {}, {"smooth": 0.05}, r"0\.02 -> 0\.05|constant .* -> "),
    ("clipped lam", clipped, {}, {"lam": 0.95}, r"0\.873 -> 0\.9215|0\.9 -> 0\.95"),
    ("clipped clip", clipped, {}, {"clip": 0.1}, r"0\.8 -> 0\.9|1\.2.* -> 1\.1"),
    ("clipped raw", clipped, {}, {"normal": False}, r"- .*(?:subtract|divide|reduce|sqrt)"),
    ("clipped bounded", clipped, {}, {"bounded": False}, r"- .*(?:maximum|clamp|add|multiply|compare|max)"),
    ("clipped parts", clipped, {}, {"parts": 2}, r"3 -> 2 steps|\[3,4\].* -> .*\[2,6\]"),
    ("clipped epochs", clipped, {}, {"epochs": 6}, r"4 -> 6 steps"),
    ("clipped entropy", clipped, {}, {"entropy": 0.03}, r"-?0\.015 -> -?0\.03|constant .* -> "),
    ("clipped donated", clipped, {}, {"donate": (0,)}, r"donation of argument"),
    ("sharp hold", sharp, {}, {"hold": 0.8}, r"-?0\.4 -> -?0\.8"),
    ("sharp loose", sharp, {}, {"holds": False}, r"- .*(?:clamp|minimum|maximum)"),
    ("sharp half", sharp, {}, {"half": BF16}, r"bf16|convert"),
    ("sharp once", sharp, {}, {"twice": False}, r"- "),
    ("sharp radius", sharp, {}, {"radius": 0.02}, r"0\.07 -> 0\.02"),
    ("sharp nesterov", sharp, {}, {"nesterov": True}, r"\+ .*(?:multiply|add)"),
    ("sharp momentum", sharp, {}, {"momentum": 0.95}, r"0\.85 -> 0\.95"),
    ("sharp grow", sharp, {}, {"grow": 1.002}, r"1\.01 -> 1\.002"),
    ("sharp rows", sharp, {}, {"rows": 6}, r"\[4,5\].* -> f32\[6,5\]"),
    ("beams count", beams, {}, {"beams": 4}, r"\[3.* -> .*\[4|3 -> 4"),
    ("beams again", beams, {}, {"again": 0.5}, r"-?0\.35 -> -?0\.5"),
    ("beams length", beams, {}, {"length": 0.9}, r"0\.65 -> 0\.9"),
    ("beams stop", beams, {}, {"stop": 3}, r"1 -> 3"),
    ("beams most", beams, {}, {"most": 12}, r"9 -> 12|\[3,9\].* -> .*\[3,12\]"),
    ("tensored eps", tensored, {}, {"eps": 1e-4}, r"1e-06 -> 0\.0001"),
    ("tensored precision", tensored, {}, {"precision": "highest"}, r"precision|highest"),
    ("tensored sent", tensored, {}, {"sent": BF16}, r"bf16|convert"),
    ("tensored summed", tensored, {}, {"scattered": False}, r"reduce-scatter|reduce_scatter|all-reduce"),
    ("tensored deep", tensored, {}, {"deep": 2}, r"\+ "),
    ("tensored keep", tensored, {"keep": 0.9}, {"keep": 0.7}, r"0\.9 -> 0\.7"),
    ("tensored error", tensored, {}, {"error": jnp.abs}, r"abs|sign|multiply"),
    ("gates plain", gates, {}, {"peep": False}, r"- "),
    ("gates keep", gates, {}, {"keep": 0.5}, r"1 -> 0\.5"),
    ("gates zone", gates, {}, {"zone": 0.2}, r"0\.1 -> 0\.2"),
    ("gates learnt", gates, {}, {"learnt": True}, r"\+ .*(?:parameter|broadcast|output)|parameter|reads|instead"),
    ("gates remat", gates, {}, {"remat": True}, r"remat"),
    ("gates pool", gates, {"pooled": True}, {"pooled": True, "pool": jnp.max}, r"max|reduce|divide"),
    ("gates focus", gates, {}, {"focus": 1.5}, r"2\.5 -> 1\.5|1\.5 -> 0\.5"),
    ("gates shared", gates, {}, {"shared": True}, r"parameters? .*\[3,6,2\].* -> .*\[6,2\]"),
    ("gates steps", gates, {}, {"steps": 8}, r"\[5,6,4\].* -> f32\[5,8,4\]|6 -> 8 steps"),
]  # fmt: skip


if __name__ == "__main__":
    main(__doc__, {"twelfth": PAIRS}, partial(texts, defaults=DEFAULTS))
