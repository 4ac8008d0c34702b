"""Pairs of programs of atoms and messages, recurrent coders, schedules, quantised layers and experts over devices.

    python benchmarks/graph_trust_jax_eleventh.py FOLDER    # needs jax, flax and optax

For `graph_trust.py`, each pair three times: HLO, optimised HLO, StableHLO. Programs, changes and what is expected were
written, and frozen in a commit, before any result of the tenth set, and measured once, after what that showed was
mended.
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
import optax
from graph_trust_fresh import F32, I32, struct, texts
from graph_trust_pairs import SAME, Options, Pair, main
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

KEY = jax.random.key(0).dtype


def atoms(o: Options) -> tuple:
    """Energies and forces of atoms by messages over edges, trained on both."""

    def f(p: Any, place: jax.Array, kind: jax.Array, edges: jax.Array, want: jax.Array, pull: jax.Array) -> Any:
        def energy(p: Any, place: jax.Array) -> jax.Array:
            h = p["kinds"][kind]
            far = jnp.linalg.norm(place[edges[0]] - place[edges[1]], axis=-1)
            waves = jnp.exp(-o["sharp"] * (far[:, None] - jnp.linspace(0.0, o["cut"], 5)) ** 2)
            fade = 0.5 * (jnp.cos(jnp.pi * far / o["cut"]) + 1) * (far < o["cut"])
            for layer in p["layers"]:
                sent = o["act"](h[edges[0]] @ layer["w"]) * (waves @ layer["r"]) * fade[:, None]
                h = h + o["pool"](sent, edges[1], num_segments=place.shape[0])
            return o["over"](h @ p["out"])

        def loss(p: Any) -> jax.Array:
            e, g = jax.value_and_grad(energy, 1)(p, place)
            return (e - want) ** 2 + o["forces"] * jnp.mean((-g - pull) ** 2)

        return jax.tree.map(lambda w, d: w - o["lr"] * d, p, jax.grad(loss)(p))

    layers = [{"w": struct(6, 6), "r": struct(5, 6)} for _ in range(o["layers"])]
    p = {"kinds": struct(4, 6), "layers": layers, "out": struct(6)}
    return f, (p, struct(5, 3), struct(5, dtype=I32), struct(2, 8, dtype=I32), struct(), struct(5, 3))


class Coder(nn.Module):
    """A recurrent encoder and decoder with teacher forcing."""

    o: Options

    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        o = self.o
        embed = nn.Embed(12, 6)
        cell = o["cell"](8)
        carry, seen = nn.RNN(cell, return_carry=True, reverse=o["reverse"], keep_order=True)(embed(x))
        fed = jnp.pad(y, ((0, 0), (1, 0)))[:, :-1] if o["shifted"] else y
        h = nn.RNN(o["cell"](8))(embed(fed), initial_carry=carry if o["handed"] else None)
        score = jnp.einsum("btd,bsd->bts", h, seen) / o["heat"]
        h = jnp.concatenate([h, jax.nn.softmax(score, o["axis"]) @ seen], -1)
        return nn.Dense(12, use_bias=o["bias"])(nn.Dropout(o["drop"], deterministic=False)(h))


def spoken(o: Options) -> tuple:
    """A trainer with warmup and cosine, gradients that are averaged or summed."""
    net = Coder(o)
    rate = optax.warmup_cosine_decay_schedule(0.0, o["peak"], o["warm"], 100)
    tx = optax.chain(optax.clip_by_global_norm(o["most"]), optax.lamb(rate, weight_decay=o["decay"]))

    def f(p: Any, s: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            logits = net.apply(p, x, y, rngs={"dropout": key})
            told = optax.smooth_labels(jax.nn.one_hot(y, 12), o["smooth"])
            return jnp.mean(optax.softmax_cross_entropy(logits, told))

        u, s = tx.update(jax.grad(loss)(p), s, p)
        return optax.apply_updates(p, u), s

    x = struct(2, 5, dtype=I32)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(0)}
    p = jax.eval_shape(net.init, keys, x, x)
    return f, (p, jax.eval_shape(tx.init, p), x, x, struct(dtype=KEY)), *o["donate"]


def rounded(o: Options) -> tuple:
    """Layers with weights rounded to few bits, gradients straight through."""

    def few(w: jax.Array) -> jax.Array:
        size = jnp.max(jnp.abs(w), axis=o["axis"], keepdims=True) / o["levels"]
        near = jnp.clip(jnp.round(w / size), -o["levels"], o["levels"]) * size
        return w + jax.lax.stop_gradient(near - w) if o["straight"] else near

    def f(p: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            h = x
            for w in p:
                h = o["act"](jnp.matmul(h, few(w), precision=o["precision"]))
            return jnp.mean(jnp.abs(h - y)) + o["l1"] * sum(jnp.sum(jnp.abs(w)) for w in p)

        g = jax.grad(loss)(p)
        if o["later"]:
            moved = [w - o["lr"] * d for w, d in zip(p, g, strict=True)]
            return moved, loss(p)
        value = loss(p)
        return [w - o["lr"] * d for w, d in zip(p, g, strict=True)], value

    return f, ([struct(6, 7), struct(7, 3)], struct(4, 6), struct(4, 3))


def routed(o: Options) -> tuple:
    """Experts on four devices, tokens sent by all-to-all, a loss that balances them."""
    mesh = jax.make_mesh((4,), ("e",), axis_types=(AxisType.Auto,))

    def run(w: jax.Array, gate: jax.Array, x: jax.Array) -> Any:
        odds = jax.nn.softmax(x @ gate)
        best = jnp.argmax(odds, -1)
        chosen = jax.nn.one_hot(best, 4) * jnp.max(odds, -1, keepdims=True)
        place = jnp.cumsum(chosen > 0, 0) - 1
        slots = jax.nn.one_hot(place, o["room"]) * (chosen > 0)[..., None]
        sent = jnp.einsum("tec,td->ecd", slots, x)
        got = jax.lax.all_to_all(sent, "e", 0, 0, tiled=True)
        back = jax.lax.all_to_all(o["act"](got @ w[0]), "e", 0, 0, tiled=True)
        out = jnp.einsum("tec,ecd->td", slots * chosen[..., None], back)
        even = 4 * jnp.sum(jnp.mean(odds, 0) * jnp.mean(chosen > 0, 0))
        return out + x if o["residual"] else out, o["reduce"](even, "e")[None]

    part = jax.shard_map(run, mesh=mesh, in_specs=(P("e"), P(), P("e")), out_specs=(P("e"), P("e")), check_vma=False)

    def f(w: jax.Array, gate: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array, gate: jax.Array) -> jax.Array:
            out, even = part(w, gate, x)
            return jnp.mean(out**2) + o["even"] * jnp.mean(even)

        return jax.value_and_grad(loss, (0, 1))(w, gate)

    return f, (struct(4, 5, 5, dtype=o["kept"]), struct(5, 4), struct(16, 5))


DEFAULTS: dict[Callable, Options] = {
    atoms: dict(sharp=1.7, cut=4.0, act=jax.nn.silu, pool=jax.ops.segment_sum, over=jnp.sum, forces=8.0, lr=0.003,
                layers=1),
    spoken: dict(cell=nn.GRUCell, reverse=False, shifted=True, handed=True, heat=2.8, axis=-1, bias=True, drop=0.2,
                 peak=0.02, warm=10, most=1.5, decay=0.05, smooth=0.1, donate=()),
    rounded: dict(axis=0, levels=7, straight=True, act=jnp.tanh, precision=None, l1=0.001, later=False, lr=0.05),
    routed: dict(room=3, act=jax.nn.gelu, residual=True, reduce=jax.lax.pmean, even=0.02, kept=F32),
}  # fmt: skip
PAIRS: list[Pair] = [
    ("atoms forces", atoms, {}, {"forces": 12.0}, r"8 -> 12|16 -> 24|constant .*->"),
    ("atoms pool", atoms, {}, {"pool": jax.ops.segment_max}, r"add .*maximum|maximum|to_apply|scatter"),
    ("atoms layers", atoms, {}, {"layers": 2}, r"\+ .*parameter|layer"),
    ("spoken unhanded", spoken, {}, {"handed": False}, r"instead of|reads|broadcast|constant|0|while"),
    ("spoken axis", spoken, {}, {"axis": 1}, r"dimensions|reduce|softmax|axis"),
    ("spoken smooth", spoken, {}, {"smooth": 0.2}, r"0\.9 -> 0\.8"),
    ("spoken donated", spoken, {}, {"donate": (0, 1)}, r"donat"),
    ("rounded bent", rounded, {}, {"straight": False}, r"- .*(?:add|subtract)|replaced|\+ "),
    ("rounded axis", rounded, {}, {"axis": 1}, r"dimensions|reduce"),
    ("rounded precision", rounded, {}, {"precision": jax.lax.Precision.HIGHEST}, r"precision|highest|HIGHEST"),
    ("routed room", routed, {}, {"room": 4}, r"3.* -> .*4"),
    ("routed summed", routed, {}, {"reduce": jax.lax.psum}, r"- .*divide|divide|multiply|4|constant"),
    ("nothing rounded", rounded, {}, {"later": True}, SAME),
]  # fmt: skip


if __name__ == "__main__":
    main(__doc__, {"eleventh": PAIRS}, partial(texts, defaults=DEFAULTS))
