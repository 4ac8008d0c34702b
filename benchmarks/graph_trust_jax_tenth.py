"""Pairs of programs of s2fft and jax-cfd, of fields, scans, bodies, self-distillation, contrast, caches and pipelines.

    python benchmarks/graph_trust_jax_tenth.py FOLDER    # needs jax, s2fft, jax-cfd, flax and optax

For `graph_trust.py`, each pair three times: HLO, optimised HLO, StableHLO. Programs, changes and what is expected were
written, and frozen in a commit, before any result. `nothing` changes names, order or packaging and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import flax.linen as nn
import jax
import jax.numpy as jnp
import jax_cfd.base as cfd
import optax
import s2fft
from graph_trust_fresh import F32, I32, struct, texts
from graph_trust_pairs import SAME, Options, Pair, main
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

BF16 = jnp.bfloat16
KEY = jax.random.key(0).dtype


def sphere(o: Options) -> tuple:
    """A filter of spherical harmonics, learnt."""

    def f(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            modes = s2fft.forward_jax(x, L=o["L"], spin=o["spin"], reality=False)
            passed = modes * w[:, None] / (1 + o["damp"] * jnp.arange(float(o["L"]))[:, None])
            out = s2fft.inverse_jax(passed, L=o["L"], spin=o["spin"], reality=False)
            return o["over"](jnp.abs(out - y) ** 2)

        return w - o["lr"] * jax.grad(loss)(w)

    shape = s2fft.sampling.s2_samples.f_shape(o["L"])
    return f, (struct(o["L"]), struct(*shape, dtype=jnp.complex64), struct(*shape))


def fluid(o: Options) -> tuple:
    """Steps of an incompressible flow of jax-cfd with a learnt force."""
    grid = cfd.grids.Grid((8, 8), domain=((0, o["width"]), (0, 2.0)))
    around = cfd.boundaries.periodic_boundary_conditions(2)

    def f(p: Any, u: jax.Array, v: jax.Array) -> Any:
        def speeds(u: jax.Array, v: jax.Array) -> Any:
            parts = zip((u, v), grid.cell_faces, strict=True)
            return tuple(cfd.grids.GridVariable(cfd.grids.GridArray(t, at, grid), around) for t, at in parts)

        def step(s: Any, _: Any) -> Any:
            flow = speeds(*s)
            moved = [cfd.advection.advect_van_leer(c, flow, o["dt"]) if o["leer"] else
                     cfd.advection.advect_linear(c, flow, o["dt"]) for c in flow]  # fmt: skip
            spread = [cfd.diffusion.diffuse(c, o["viscosity"]) for c in flow]
            pushed = [w * jnp.tanh(c.data * o["push"]) for c, w in zip(flow, (p["u"], p["v"]), strict=True)]
            new = [
                c.data + o["dt"] * (a.data + d.data + q) for c, a, d, q in zip(flow, moved, spread, pushed, strict=True)
            ]
            return tuple(c.data for c in cfd.pressure.projection(speeds(*new))) if o["projected"] else tuple(new), None

        (u, v), _ = jax.lax.scan(step, (u, v), None, length=o["steps"])
        return jnp.sum(u**2 + v**2)

    return jax.value_and_grad(f), ({"u": struct(8, 8), "v": struct(8, 8)}, struct(8, 8), struct(8, 8))


def scanned(o: Options) -> tuple:
    """A selective state space by an associative scan, trained with weighted cross entropy and clipped updates."""

    def combine(a: Any, b: Any) -> Any:
        return a[0] * b[0], b[0] * a[1] + b[1]

    def layer(p: Any, x: jax.Array) -> jax.Array:
        u, gate = jnp.split(x @ p["in"], 2, -1)
        tail = jnp.pad(u, ((0, 0), (2, 0), (0, 0))) if o["causal"] else jnp.pad(u, ((0, 0), (1, 1), (0, 0)))
        u = o["act"](sum(tail[:, k : k + u.shape[1]] * p["conv"][k] for k in range(3)))
        dt = jax.nn.softplus(u @ p["dt"] + o["shift"])
        decay = jnp.exp(-jnp.exp(p["a"]) * dt[..., None])
        fed = (dt * u)[..., None] * (u @ p["b"])[:, :, None, :]
        _, h = jax.lax.associative_scan(combine, (decay, fed), axis=1, reverse=o["reverse"])
        y = jnp.einsum("blds,bls->bld", h, u @ p["c"])
        y = y + p["d"] * u if o["skip"] else y
        return x + (y * jax.nn.silu(gate)) @ p["out"]

    layer = jax.checkpoint(layer) if o["remat"] else layer
    tx = optax.chain(optax.clip(o["clip"]), optax.adamw(o["lr"], b1=o["b1"], weight_decay=o["decay"]))

    def f(p: Any, s: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            h = p["embed"][x]
            for each in p["layers"]:
                h = layer(each, h)
            h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + o["eps"])
            cost = optax.softmax_cross_entropy_with_integer_labels(h @ p["embed"].T, y)
            known = y != o["ignored"]
            return jnp.sum(cost * known) / jnp.sum(known)

        value, g = jax.value_and_grad(loss)(p)
        u, s = tx.update(g, s, p)
        return optax.apply_updates(p, u), s, value

    one = {"in": (6, 16), "conv": (3, 8), "dt": (8, 8), "a": (8, 4), "b": (8, 4), "c": (8, 4), "d": (8,), "out": (8, 6)}
    layers = [{k: struct(*v) for k, v in one.items()} for _ in range(o["layers"])]
    p = {"embed": struct(11, 6), "layers": layers}
    return f, (p, jax.eval_shape(tx.init, p), struct(2, 8, dtype=I32), struct(2, 8, dtype=I32)), *o["donate"]


class Encoder(nn.Module):
    """A small convolutional encoder with a projector."""

    o: Options

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        o = self.o
        for width in o["widths"]:
            x = nn.Conv(width, (3, 3), strides=2, padding=o["padding"], feature_group_count=o["split"])(x)
            x = o["act"](nn.GroupNorm(2, epsilon=o["eps"])(x))
        x = x.mean((1, 2))
        x = nn.WeightNorm(nn.Dense(6))(x) if o["weighted"] else nn.Dense(6)(x)
        return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6) if o["unit"] else x


def student(o: Options) -> tuple:
    """A student that learns from the moving mean of itself, whose outputs are centred."""
    net = Encoder(o)

    def f(p: Any, teacher: Any, centre: jax.Array, a: jax.Array, b: jax.Array) -> Any:
        said = net.apply(teacher, b)
        told = jax.nn.softmax((said - centre) / o["sharp"])
        told = jax.lax.stop_gradient(told) if o["stopped"] else told

        def loss(p: Any) -> jax.Array:
            target = told if o["stopped"] else jax.nn.softmax((net.apply(p, b) - centre) / o["sharp"])
            return -jnp.mean(jnp.sum(target * jax.nn.log_softmax(net.apply(p, a) / o["warm"]), -1))

        g = jax.grad(loss)(p)
        p = jax.tree.map(lambda w, d: w - o["lr"] * d, p, g)
        teacher = jax.tree.map(lambda t, w: o["keep"] * t + (1 - o["keep"]) * w, teacher, p)
        return p, teacher, o["centre"] * centre + (1 - o["centre"]) * said.mean(0)

    x = struct(4, 8, 8, 2)
    p = jax.eval_shape(net.init, jax.random.key(0), x)
    return f, (p, p, struct(6), x, x)


def bodies(o: Options) -> tuple:
    """Rigid discs with contacts and a policy through time, as of brax."""

    def f(p: Any, place: jax.Array, speed: jax.Array) -> Any:
        def force(place: jax.Array, speed: jax.Array) -> jax.Array:
            gap = place[:, None] - place[None]
            far = jnp.sqrt(jnp.sum(gap**2, -1) + 1e-6)
            deep = jax.nn.relu(o["radius"] - far) * (1 - jnp.eye(place.shape[0]))
            push = o["stiff"] * jnp.sum((deep / far)[..., None] * gap, 1)
            ground = jnp.where(place[:, 1] < 0, -o["floor"] * place[:, 1], 0.0)
            act = jnp.tanh(jnp.concatenate([place, speed], -1) @ p["w"] + p["b"]) * o["gain"]
            return push + act + jnp.stack([jnp.zeros_like(ground), ground - o["gravity"]], -1)

        def step(s: Any, _: Any) -> Any:
            place, speed = s
            speed = (speed + o["dt"] * force(place, speed)) * o["drag"]
            new = place + o["dt"] * (speed if o["symplectic"] else s[1])
            return (new, speed), (jnp.mean(new[:, 0]) - o["cost"] * jnp.mean(speed**2))

        def total(p_: Any) -> jax.Array:
            nonlocal p
            p = p_
            _, gained = jax.lax.scan(step, (place, speed), None, length=o["steps"], unroll=o["unroll"])
            return -jnp.sum(gained * o["gamma"] ** jnp.arange(o["steps"]))

        own = p
        value, g = jax.value_and_grad(total)(own)
        norm = optax.global_norm(g)
        return jax.tree.map(lambda w, d: w - o["lr"] * d / jnp.maximum(norm, 1.0), own, g), value

    return f, ({"w": struct(4, 2), "b": struct(2)}, struct(5, 2), struct(5, 2))


def written(o: Options) -> tuple:
    """A token at a time from a cache of keys and values, drawn from the most likely."""

    def f(p: Any, k: jax.Array, v: jax.Array, token: jax.Array, at: jax.Array, key: jax.Array) -> Any:
        def step(s: Any, _: Any) -> Any:
            k, v, token, at, key = s
            h = p["embed"][token]
            q, nk, nv = jnp.split(h @ p["qkv"], 3, -1)
            k = jax.lax.dynamic_update_slice(k, nk.astype(k.dtype)[:, None], (0, at, 0))
            v = jax.lax.dynamic_update_slice(v, nv.astype(v.dtype)[:, None], (0, at, 0))
            score = jnp.einsum("bd,bld->bl", q, k.astype(F32)) * o["scale"]
            seen = jnp.arange(k.shape[1]) <= at
            seen = seen & (jnp.arange(k.shape[1]) > at - o["window"]) if o["window"] else seen
            score = jnp.where(seen, score, o["hidden"])
            h = h + jnp.einsum("bl,bld->bd", jax.nn.softmax(score), v.astype(F32)) @ p["o"]
            logits = h @ p["embed"].T
            key, own = jax.random.split(key)
            if o["greedy"]:
                new = jnp.argmax(logits, -1)
            else:
                best, where = jax.lax.top_k(logits, o["most"])
                drawn = jax.random.categorical(own, best / o["temperature"])
                new = jnp.take_along_axis(where, drawn[:, None], -1)[:, 0]
            return (k, v, new.astype(I32), at + 1, key), new

        return jax.lax.scan(step, (k, v, token, at, key), None, length=o["steps"])

    p = {"embed": struct(13, 8), "qkv": struct(8, 24), "o": struct(8, 8)}
    cache = struct(2, o["room"], 8, dtype=o["kept"])
    return f, (p, cache, cache, struct(2, dtype=I32), struct(dtype=I32), struct(dtype=KEY)), *o["donate"]


def stages(o: Options) -> tuple:
    """A pipeline of four stages over devices, microbatches in turn, its outputs gathered."""
    mesh = jax.make_mesh((4,), ("s",), axis_types=(AxisType.Auto,))

    def run(w: jax.Array, x: jax.Array) -> jax.Array:
        index = jax.lax.axis_index("s")
        count = x.shape[0]

        def turn(state: jax.Array, t: jax.Array) -> Any:
            fed = jnp.where(index == 0, x[jnp.clip(t, 0, count - 1)], state)
            out = o["act"](fed @ w[0] + (fed if o["residual"] else 0))
            ring = [(i, (i + o["hop"]) % 4) for i in range(4)]
            return jax.lax.ppermute(out, "s", ring), out

        first = jnp.zeros(x.shape[1:], x.dtype)
        _, outs = jax.lax.scan(turn, first, jnp.arange(count + 3))
        kept = jnp.where(index == 3, outs[3:], 0.0)
        return jax.lax.psum(kept, "s") if o["summed"] else jax.lax.pmean(kept, "s")

    part = jax.shard_map(run, mesh=mesh, in_specs=(P("s"), P()), out_specs=P(), check_vma=False)

    def f(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            return o["error"](part(w.astype(o["compute"]), x.astype(o["compute"])).astype(F32) - y) * o["weight"]

        return w - o["lr"] * jax.grad(loss)(w)

    places = NamedSharding(mesh, P("s")), NamedSharding(mesh, P()), NamedSharding(mesh, P())
    shapes = struct(4, 6, 6), struct(o["parts"], 2, 6), struct(o["parts"], 2, 6)
    given = tuple(jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at) for s, at in zip(shapes, places, strict=True))
    return f, given, *o["donate"]


def field(o: Options) -> tuple:
    """A network of sines that solves an equation: second derivatives, a boundary, weights for both."""

    def f(p: Any, inside: jax.Array, edge: jax.Array) -> Any:
        def u(p: Any, x: jax.Array) -> jax.Array:
            h = jnp.sin(o["first"] * (p["in"] @ x + p["c"]))
            h = jnp.sin(p["mid"] @ h + p["d"]) + (h if o["residual"] else 0)
            return p["out"] @ h

        def apart(p: Any, x: jax.Array) -> jax.Array:
            bend = jnp.trace(jax.hessian(u, 1)(p, x))
            return bend + o["wave"] ** 2 * u(p, x) - jnp.prod(jnp.sin(jnp.pi * x))

        def loss(p: Any) -> jax.Array:
            wrong = jax.vmap(partial(apart, p))(inside)
            rim = jax.vmap(partial(u, p))(edge)
            return jnp.mean(wrong**2) + o["rim"] * o["over"](rim**2)

        g = jax.grad(loss)(p)
        return jax.tree.map(lambda w, d: w - o["lr"] * d, p, g)

    def renamed(weights: Any, points: jax.Array, border: jax.Array) -> Any:
        with jax.named_scope("solver"):
            return jax.jit(f)(weights, points, border)

    p = {"in": struct(7, 2), "c": struct(7), "mid": struct(7, 7), "d": struct(7), "out": struct(7)}
    return renamed if o["renamed"] else f, (p, struct(5, 2), struct(4, 2))


def mixture(o: Options) -> tuple:
    """Contrast between two views with a queue of old ones, and a term against collapse."""

    def f(p: Any, queue: jax.Array, a: jax.Array, b: jax.Array) -> Any:
        def code(p: Any, x: jax.Array) -> jax.Array:
            h = jax.nn.relu(x @ p["up"])
            h = h @ p["down"]
            return h / jnp.sqrt(jnp.sum(h * h, -1, keepdims=True) + 1e-6)

        def loss(p: Any) -> jax.Array:
            if o["swapped"]:
                other = code(p, b)
                own = code(p, a)
            else:
                own = code(p, a)
                other = code(p, b)
            other = jax.lax.stop_gradient(other) if o["stopped"] else other
            near = jnp.sum(own * other, -1, keepdims=True)
            logits = jnp.concatenate([near, own @ queue.T], 1) / o["temperature"]
            spread = jnp.sqrt(jnp.var(own, axis=0, ddof=o["ddof"]) + 1e-4)
            even = jnp.mean(jax.nn.relu(o["least"] - spread))
            return jnp.mean(jax.nn.logsumexp(logits, 1) - logits[:, 0]) + o["even"] * even

        g = jax.grad(loss)(p)
        new = code(p, b)
        queue = jnp.concatenate([queue[new.shape[0] :], new]) if o["queued"] else jnp.roll(queue, 1, 0)
        return jax.tree.map(lambda w, d: w - o["lr"] * d, p, g), queue

    return f, ({"up": struct(6, 9), "down": struct(9, 5)}, struct(8, 5), struct(4, 6), struct(4, 6))


DEFAULTS: dict[Callable, Options] = {
    sphere: dict(L=4, spin=0, damp=0.3, over=jnp.mean, lr=0.02),
    fluid: dict(width=2.0, dt=0.05, leer=False, viscosity=0.02, push=1.5, projected=False, steps=3),
    scanned: dict(causal=True, act=jax.nn.silu, shift=-1.5, reverse=False, skip=True, remat=False, clip=0.7, lr=0.003,
                  b1=0.9, decay=0.02, eps=1e-5, ignored=0, layers=2, donate=()),
    student: dict(widths=(4, 6), padding="SAME", split=1, act=nn.gelu, eps=1e-5, weighted=False, unit=False, sharp=0.05,
                  stopped=True, warm=0.15, lr=0.04, keep=0.99, centre=0.9),
    bodies: dict(radius=0.6, stiff=40.0, floor=70.0, gain=1.4, gravity=9.81, dt=0.02, drag=0.97, symplectic=True,
                 cost=0.03, steps=6, unroll=1, gamma=0.95, lr=0.05),
    written: dict(scale=0.35, window=0, hidden=-1e9, greedy=False, most=4, temperature=0.8, steps=5, room=12, kept=F32,
                  donate=()),
    stages: dict(act=jnp.tanh, residual=True, hop=1, summed=True, error=lambda d: jnp.mean(d * d), compute=F32,
                 weight=0.7, lr=0.03, parts=3, donate=()),
    field: dict(first=6.0, residual=False, wave=1.7, rim=12.0, over=jnp.mean, lr=0.002, renamed=False),
    mixture: dict(swapped=False, stopped=True, temperature=0.2, ddof=0, least=0.9, even=0.4, queued=True, lr=0.06),
}  # fmt: skip
PAIRS: list[Pair] = [
    ("sphere degree", sphere, {}, {"L": 5}, r"parameters? .*4.* -> .*5"),
    ("sphere damp", sphere, {}, {"damp": 0.5}, r"0\.3 -> 0\.5"),
    ("sphere sum", sphere, {}, {"over": jnp.sum}, r"divide|multiply|28|0\.0357|constant|mean"),
    ("fluid viscosity", fluid, {}, {"viscosity": 0.05}, r"0\.02 -> 0\.05|constant .* -> "),
    ("fluid projected", fluid, {}, {"projected": True}, r"fft|dot|\+ |custom-call|while"),
    ("fluid steps", fluid, {}, {"steps": 5}, r"3 -> 5 steps"),
    ("scanned reverse", scanned, {}, {"reverse": True}, r"reverse"),
    ("scanned acausal", scanned, {}, {"causal": False}, r"pad"),
    ("scanned skip", scanned, {}, {"skip": False}, r"- .*(?:parameter|multiply|add)"),
    ("scanned remat", scanned, {}, {"remat": True}, r"remat|checkpoint|optimization-barrier"),
    ("scanned ignored", scanned, {}, {"ignored": -100}, r"0 -> -100|-100|constant|compare"),
    ("scanned layers", scanned, {}, {"layers": 3}, r"\+ .*parameters|layer"),
    ("scanned b1", scanned, {}, {"b1": 0.95}, r"0\.9 -> 0\.95|0\.1 -> 0\.05"),
    ("student unstopped", student, {}, {"stopped": False}, r"\+ |- |replaced|reads|convolution|subtract"),
    ("student padding", student, {}, {"padding": "VALID"}, r"pad"),
    ("student eps", student, {}, {"eps": 1e-3}, r"1e-05 -> 0\.001"),
    ("student weight norm", student, {}, {"weighted": True}, r"\+ .*parameter|scale|WeightNorm"),
    ("student keep", student, {}, {"keep": 0.996}, r"0\.99 -> 0\.996|0\.01.* -> 0\.004"),
    ("student centre", student, {}, {"centre": 0.8}, r"0\.9 -> 0\.8|0\.1.* -> 0\.2"),
    ("bodies explicit", bodies, {}, {"symplectic": False}, r"operand|reads|add|multiply"),
    ("bodies unrolled", bodies, {}, {"unroll": 2}, r"6 -> 3 steps|unroll|steps"),
    ("bodies floor", bodies, {}, {"floor": 90.0}, r"70 -> (?:-)?90|-70 -> -90"),
    ("bodies gamma", bodies, {}, {"gamma": 0.9}, r"0\.95 -> 0\.9|-0\.05.* -> -0\.1|constant"),
    ("written window", written, {}, {"window": 4}, r"\+ .*(?:compare|subtract|and)|and"),
    ("written greedy", written, {}, {"greedy": True}, r"argmax|reduce|topk|top-k|sort|custom-call|- |replaced"),
    ("written most", written, {}, {"most": 6}, r"4.* -> .*6|k=|slice|topk"),
    ("written kept", written, {}, {"kept": BF16}, r"parameters? .*f32.* -> bf16"),
    ("written donated", written, {}, {"donate": (1, 2)}, r"donat"),
    ("written room", written, {}, {"room": 16}, r"parameters? .*12.* -> .*16"),
    ("stages hop", stages, {}, {"hop": 3}, r"source_target|pairs|permute"),
    ("stages residual", stages, {}, {"residual": False}, r"- .*add|add"),
    ("stages compute", stages, {}, {"compute": BF16}, r"bf16|convert"),
    ("stages mean", stages, {}, {"summed": False}, r"\+ .*(?:divide|multiply)|divide|multiply|0\.25|4"),
    ("field wave", field, {}, {"wave": 2.2}, r"2\.89.* -> 4\.84|1\.7 -> 2\.2"),
    ("field residual", field, {}, {"residual": True}, r"\+ .*add|add"),
    ("field sum", field, {}, {"over": jnp.sum}, r"divide|multiply|12 -|4|constant|mean|- "),
    ("mixture unstopped", mixture, {}, {"stopped": False}, r"\+ "),
    ("mixture ddof", mixture, {}, {"ddof": 1}, r"4 -> 3|0\.25 -> 0\.33|constant"),
    ("mixture rolled", mixture, {}, {"queued": False}, r"concatenate|slice|replaced"),
    ("nothing field", field, {}, {"renamed": True}, SAME),
    ("nothing mixture", mixture, {}, {"swapped": True}, SAME),
]  # fmt: skip


if __name__ == "__main__":
    main(__doc__, {"tenth": PAIRS}, partial(texts, defaults=DEFAULTS))
