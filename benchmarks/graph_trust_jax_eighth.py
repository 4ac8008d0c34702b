"""Pairs of programs of penzai, equimo, jax_md, folx, quax, interpax and of models written in plain JAX.

    python benchmarks/graph_trust_jax_eighth.py FOLDER    # needs jax, these libraries, equinox and optax

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

import equimo.models as vision
import equinox as eqx
import folx
import interpax
import jax
import jax.numpy as jnp
import jax_md
import optax
import quax
from graph_trust_fresh import F32, I32, struct, texts
from graph_trust_pairs import Options, Pair, main
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz
from penzai.models.transformer.variants import llamalike_common as llamalike
from quax.examples import lora

KEY = jax.random.key(0).dtype


def penzai(o: Options) -> tuple:
    """A transformer of penzai with named axes, its parameters taken out of it, trained by an optimiser of optax."""
    window = llamalike.AttentionTypeSlidingWindowCausal(o["window"])
    config = llamalike.LlamalikeTransformerConfig(
        num_kv_heads=o["kv"], query_head_multiplier=2, embedding_dim=12, projection_dim=4, mlp_hidden_dim=o["hidden"],
        num_decoder_blocks=2, vocab_size=20, mlp_variant=o["mlp"], tie_embedder_and_logits=o["tied"],
        rope_wavelength=o["wavelength"], rms_norm_eps=o["eps"], use_post_attn_norm=o["post"],
        final_logit_softcap=o["cap"], use_layer_stack=o["stacked"],
        attention_type=window if o["window"] else llamalike.AttentionTypeGlobalCausal(),
    )  # fmt: skip
    held: list[Any] = []

    def build() -> Any:
        model, params = pz.unbind_params(llamalike.build_llamalike_transformer(config, jax.random.key(0)), freeze=True)
        arrays, static = eqx.partition(model, eqx.is_array)
        held.append(static)
        return params, arrays

    params, arrays = jax.eval_shape(build)
    tx = optax.adamw(o["lr"], weight_decay=o["decay"])

    def f(params: Any, state: Any, arrays: Any, tokens: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            model = pz.bind_variables(eqx.combine(arrays, held[0]), params, unfreeze_as_copy=True)
            inner = pz.nx.wrap(tokens[:, :-1]).tag("batch", "seq")
            logits = model(inner, token_positions=pz.nx.wrap(jnp.arange(6)).tag("seq"))
            logits = logits.unwrap("batch", "seq", "vocabulary")
            scores = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return scores.mean() + o["z"] * jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    return f, (params, jax.eval_shape(tx.init, params), arrays, struct(2, 7, dtype=I32)), *o["donate"]


def patches(o: Options) -> tuple:
    """A vision transformer of equimo that is told what a teacher sees."""
    size = dict(img_size=16, in_channels=3, dim=16, patch_size=o["patch"], num_heads=[o["heads"]], depths=[o["depth"]],
                num_classes=5, reg_tokens=o["registers"], mlp_ratio=o["ratio"], init_values=o["scale"],
                act_layer=o["act"], eps=o["eps"])  # fmt: skip

    def build() -> Any:
        return vision.VisionTransformer(**size, key=jax.random.key(0))

    params, static = eqx.partition(eqx.filter_eval_shape(build), lambda v: isinstance(v, jax.ShapeDtypeStruct))

    def f(p: Any, x: jax.Array, teacher: jax.Array, y: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            model = eqx.combine(p, static)
            logits = jax.vmap(lambda x: model(x, inference=True, key=jax.random.key(1)))(x)
            soft = jax.nn.log_softmax(logits / o["temperature"])
            told = -jnp.sum(jax.nn.softmax(teacher / o["temperature"]) * soft, -1)
            own = optax.softmax_cross_entropy(logits, optax.smooth_labels(jax.nn.one_hot(y, 5), o["smooth"]))
            return jnp.mean(o["mix"] * told + own)

        value, g = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda w, d: w - o["lr"] * d, p, g), value

    return f, (params, struct(2, 3, 16, 16), struct(2, 5), struct(2, dtype=I32))


def molecules(o: Options) -> tuple:
    """Steps of molecular dynamics of jax_md, a gradient of the energy reached."""
    displacement, shift = jax_md.space.periodic(o["box"]) if o["periodic"] else jax_md.space.free()
    if o["jones"]:
        energy = jax_md.energy.lennard_jones_pair(displacement, sigma=o["sigma"], epsilon=o["epsilon"],
                                                  r_onset=o["onset"], r_cutoff=2.5)  # fmt: skip
    else:
        energy = jax_md.energy.morse_pair(displacement, sigma=o["sigma"], epsilon=o["epsilon"], alpha=4.0)
    if o["thermal"]:
        init, step = jax_md.simulate.nvt_langevin(energy, shift, o["dt"], o["kT"], gamma=o["gamma"])
    else:
        init, step = jax_md.simulate.nve(energy, shift, o["dt"])

    def f(r: jax.Array, key: jax.Array) -> Any:
        def reached(r: jax.Array) -> Any:
            start = init(key, r, mass=o["mass"]) if o["thermal"] else init(key, r, o["kT"], mass=o["mass"])
            tick = jax.checkpoint(lambda s, _: (step(s), None)) if o["remat"] else lambda s, _: (step(s), None)
            end, _ = jax.lax.scan(tick, start, None, length=o["steps"])
            return energy(end.position) + o["hold"] * jnp.sum(end.momentum**2), end.position

        return jax.value_and_grad(reached, has_aux=True)(r)

    return f, (struct(5, 2), struct(2, dtype=jnp.uint32))


def wave(o: Options) -> tuple:
    """The local energy of a trial wave function, its Laplacian by folx, a variance to be made small."""

    def log_psi(p: Any, x: jax.Array) -> jax.Array:
        apart = jnp.sqrt(jnp.sum((x[:, None] - x[None]) ** 2, -1) + o["soft"])
        h = o["act"](x @ p["a"] + p["c"])
        h = o["act"](h @ p["b"]) + (h if o["residual"] else 0)
        jastrow = jnp.sum(jnp.triu(p["j"] / (1 + o["range"] * apart), 1))
        return jnp.sum(jnp.tanh(h)) + jastrow - o["trap"] * jnp.sum(x**2)

    def f(p: Any, x: jax.Array) -> Any:
        def energy(x: jax.Array) -> jax.Array:
            flat = folx.forward_laplacian(lambda v: log_psi(p, v.reshape(3, 2)))(x.reshape(-1))
            kinetic = -0.5 * (flat.laplacian + jnp.sum(flat.jacobian.dense_array**2))
            return kinetic + o["omega"] * jnp.sum(x**2)

        local = jax.vmap(energy)(x)
        middle = jnp.mean(local)
        local = jnp.clip(local, middle - o["clip"], middle + o["clip"]) if o["clipped"] else local

        def loss(p: Any) -> jax.Array:
            weight = jax.lax.stop_gradient(local - jnp.mean(local)) if o["stopped"] else local - jnp.mean(local)
            return jnp.mean(weight * jax.vmap(partial(log_psi, p))(x))

        return jax.tree.map(lambda w, d: w - o["lr"] * d, p, jax.grad(loss)(p)), middle

    p = {"a": struct(2, o["size"]), "c": struct(o["size"]), "b": struct(o["size"], o["size"]), "j": struct()}
    return f, (p, struct(4, 3, 2))


def low_rank(o: Options) -> tuple:
    """Low-rank adapters of quax around a perceptron of equinox."""

    def build() -> Any:
        k1, k2 = jax.random.split(jax.random.key(0))
        mlp = eqx.nn.MLP(6, 4, 10, o["depth"], activation=o["act"], use_final_bias=o["bias"], key=k1)
        return lora.loraify(mlp, rank=o["rank"], stop_gradient=o["stop"], key=k2)

    params, static = eqx.partition(eqx.filter_eval_shape(build), lambda v: isinstance(v, jax.ShapeDtypeStruct))

    def f(p: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            out = quax.quaxify(lambda model, x: jax.vmap(model)(x))(eqx.combine(p, static), x)
            return jnp.mean(o["loss"](out - y)) * o["weight"]

        return jax.tree.map(lambda w, d: w - o["lr"] * d, p, jax.grad(loss)(p))

    return f, (params, struct(5, 6), struct(5, 4))


def profile(o: Options) -> tuple:
    """A curve through knots of interpax, fitted to points, its slope kept small."""

    def f(knots: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        grid = jnp.linspace(0.0, o["end"], 8)

        def loss(knots: jax.Array) -> jax.Array:
            curve = partial(interpax.interp1d, x=grid, f=knots, method=o["method"], extrap=o["extrap"])
            bent = curve(x, derivative=o["derivative"])
            return jnp.mean(o["error"](curve(x) - y)) + o["smooth"] * jnp.mean(bent**2)

        value, g = jax.value_and_grad(loss)(knots)
        return knots - o["lr"] * g, value

    return f, (struct(8), struct(12), struct(12))


def preference(o: Options) -> tuple:
    """Direct optimisation by preferences: a small language model beside the one it began as."""

    def score(p: Any, tokens: jax.Array) -> jax.Array:
        h = p["embed"][tokens[:, :-1]]
        spots = jnp.arange(h.shape[1])
        decay = jnp.where(spots[:, None] >= spots, o["fade"] ** jnp.abs(spots[:, None] - spots), 0.0)
        for w in p["layers"]:
            if o["pre"]:
                h = h + o["act"](jnp.einsum("ts,bsd->btd", decay, rms(h, o["eps"])) @ w["up"]) @ w["down"]
            else:
                h = rms(h + o["act"](jnp.einsum("ts,bsd->btd", decay, h) @ w["up"]) @ w["down"], o["eps"])
        logits = h @ (p["embed"].T if o["tied"] else p["head"])
        each = -optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        told = tokens[:, 1:] != o["pad"]
        total = jnp.sum(each * told, -1)
        return total / jnp.sum(told, -1) if o["averaged"] else total

    def f(p: Any, old: Any, state: Any, good: jax.Array, bad: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            gap = score(p, good) - score(p, bad)
            if o["reference"]:
                gap = gap - (score(old, good) - score(old, bad))
            if o["kind"] == "sigmoid":
                own = -jax.nn.log_sigmoid(o["beta"] * gap) * (1 - o["smooth"])
                own = own - jax.nn.log_sigmoid(-o["beta"] * gap) * o["smooth"]
            else:
                own = (gap - 1 / (2 * o["beta"])) ** 2
            return jnp.mean(own) - o["also"] * jnp.mean(score(p, good))

        updates, state = tx.update(jax.grad(loss)(p), state, p)
        return optax.apply_updates(p, updates), state

    tx = o["tx"]()
    layer = {"up": struct(8, 14), "down": struct(14, 8)}
    p = {"embed": struct(18, 8), "layers": [layer] * o["layers"]} | ({} if o["tied"] else {"head": struct(8, 18)})
    return f, (p, p, jax.eval_shape(tx.init, p), struct(3, 7, dtype=I32), struct(3, 7, dtype=I32))


def rms(h: jax.Array, eps: float) -> jax.Array:
    return h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + eps)


def retention(o: Options) -> tuple:
    """Retention in chunks: a state handed on by a scan, within a chunk all at once, a gate and a norm of groups."""

    def heads(p: Any, x: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("td,dhe->hte", x, p[name]) for name in "qkv")
        gamma = 1 - 2.0 ** -(o["slowest"] + jnp.arange(2.0))
        n = o["chunk"]
        spots = jnp.arange(n)
        inner = jnp.tril(gamma[:, None, None] ** jnp.abs(spots[:, None] - spots))

        def tick(state: jax.Array, each: Any) -> Any:
            q, k, v = each
            scores = jnp.einsum("hte,hse->hts", q, k, preferred_element_type=o["inner"]) * inner
            out = jnp.einsum("hts,hse->hte", scores.astype(F32), v)
            past = jnp.einsum("hte,hef->htf", q, state.astype(F32)) * gamma[:, None, None] ** (spots[:, None] + 1)
            late = k * gamma[:, None, None] ** (n - 1 - spots[:, None])
            state = state * (gamma**n)[:, None, None].astype(state.dtype) + jnp.einsum("hte,htf->hef", late, v).astype(
                state.dtype
            )
            return state, out + past

        cut = [t.reshape(2, -1, n, 4).swapaxes(0, 1) for t in (q, k, v)]
        body = jax.checkpoint(tick) if o["remat"] else tick
        _, out = jax.lax.scan(body, jnp.zeros((2, 4, 4), o["state"]), tuple(cut), unroll=o["unroll"])
        return out.swapaxes(0, 1).reshape(2, -1, 4).swapaxes(0, 1)

    def layer(p: Any, x: jax.Array) -> jax.Array:
        h = heads(p, x)
        h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + o["eps"])
        gate = o["gate"](x @ p["g"])
        out = h.reshape(x.shape) * gate if o["norm first"] else (h.reshape(x.shape) + gate)
        return out @ p["o"]

    def f(p: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            out = x + o["skip"] * jax.vmap(partial(layer, p))(x)
            return jnp.mean(jnp.where(y > o["least"], (out - y) ** 2, 0.0))

        return jax.tree.map(lambda w, d: w - o["lr"] * d, p, jax.grad(loss)(p))

    p = {name: struct(8, 2, 4) for name in "qkv"} | {"g": struct(8, 8), "o": struct(8, 8)}
    return f, (p, struct(2, 12, 8), struct(2, 12, 8))


def ring(o: Options) -> tuple:
    """Attention over a sequence that lies on several devices: keys and values go round."""
    mesh = jax.make_mesh((o["devices"],), ("s",), axis_types=(AxisType.Auto,), devices=jax.devices()[: o["devices"]])
    n = o["devices"]

    def part(w: jax.Array, x: jax.Array) -> jax.Array:
        q, k, v = jnp.split(x @ w, 3, -1)
        me = jax.lax.axis_index("s")
        size = x.shape[0]

        def tick(carry: Any, turn: jax.Array) -> Any:
            best, total, out, k, v = carry
            scores = q @ k.T * o["scale"]
            if o["causal"]:
                own = me * size + jnp.arange(size)
                others = (me - turn) % n * size + jnp.arange(size)
                scores = jnp.where(own[:, None] >= others, scores, o["hidden"])
            new = jnp.maximum(best, scores.max(-1))
            old, fresh = jnp.exp(best - new), jnp.exp(scores - new[:, None])
            total = total * old + fresh.sum(-1)
            out = (out * old[:, None] + fresh @ v).astype(o["kept"])
            order = [(i, (i + o["direction"]) % n) for i in range(n)]
            return (new, total, out, *(jax.lax.ppermute(t, "s", order) for t in (k, v))), None

        start = jnp.full((size,), -1e9), jnp.zeros((size,)), jnp.zeros((size, 4), o["kept"]), k, v
        (_, total, out, _, _), _ = jax.lax.scan(tick, start, jnp.arange(n))
        return out.astype(F32) / (total[:, None] + o["eps"])

    mapped = jax.shard_map(part, mesh=mesh, in_specs=(P(), P("s")), out_specs=P("s"), check_vma=False)

    def f(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            return jnp.mean((mapped(w, x) - y) ** 2) + o["decay"] * jnp.sum(w**2)

        return w - o["lr"] * jax.grad(loss)(w)

    return f, (struct(6, 12), struct(16, 6), struct(16, 4))


def adversary(o: Options) -> tuple:
    """A generator and its critic: a penalty on the critic's gradient, a spectral norm by power iteration."""

    def critic(p: Any, x: jax.Array) -> jax.Array:
        w = p["a"]
        if o["spectral"]:
            u = jax.lax.fori_loop(0, o["power"], lambda _, u: w @ (u @ w) / jnp.linalg.norm(w @ (u @ w)), jnp.ones(4))
            w = w / jax.lax.stop_gradient(jnp.linalg.norm(u @ w))
        return o["act"](x @ w + p["c"]) @ p["b"]

    def generator(p: Any, z: jax.Array) -> jax.Array:
        h = z @ p["a"]
        h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + o["eps"])
        return jnp.tanh(jax.nn.leaky_relu(h, o["slope"]) @ p["b"])

    def f(c: Any, g: Any, x: jax.Array, key: jax.Array) -> Any:
        k1, k2 = jax.random.split(key)
        z = jax.random.normal(k1, (5, 3)) * o["spread"]

        def critical(c: Any) -> jax.Array:
            false = jax.lax.stop_gradient(generator(g, z))
            mixed = x + jax.random.uniform(k2, (5, 1)) * (false - x)
            slope = jax.vmap(jax.grad(lambda v: critic(c, v)[0]))(mixed)
            size = jnp.sqrt(jnp.sum(slope**2, -1) + 1e-8)
            if o["hinge"]:
                gap = jax.nn.relu(1 - critic(c, x)) + jax.nn.relu(1 + critic(c, false))
            else:
                gap = critic(c, false) - critic(c, x)
            return jnp.mean(gap) + o["penalty"] * jnp.mean((size - o["target"]) ** 2)

        c = jax.tree.map(lambda w, d: w - o["lr"] * d, c, jax.grad(critical)(c))
        d = jax.grad(lambda g: -jnp.mean(critic(c, generator(g, z))))(g)
        return c, jax.tree.map(lambda w, d: w - o["slow"] * d, g, d)

    c = {"a": struct(4, 9), "c": struct(9), "b": struct(9, 1)}
    return f, (c, {"a": struct(3, 7), "b": struct(7, 4)}, struct(5, 4), struct(dtype=KEY))


def speech(o: Options) -> tuple:
    """A recogniser of speech: a spectrum in bands, convolutions in time, a loss over alignments."""

    def f(p: Any, wave: jax.Array, labels: jax.Array, blank: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            spots = jnp.arange(10)[:, None] * o["hop"] + jnp.arange(16)
            frames = wave[:, spots] * jnp.hanning(16)
            power = jnp.abs(jnp.fft.rfft(frames)) ** o["power"]
            h = jnp.log(power @ p["bands"] ** 2 + o["floor"])
            h = (h - h.mean(1, keepdims=True)) * jax.lax.rsqrt(h.var(1, keepdims=True) + 1e-4)
            h = jax.lax.conv_general_dilated(h, p["conv"], (o["stride"],), o["pad"], rhs_dilation=(o["dilation"],),
                                             dimension_numbers=("NWC", "WIO", "NWC"))  # fmt: skip
            logits = o["act"](h) @ p["out"]
            own = optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), labels, blank, blank_id=o["blank"])
            return jnp.mean(own) + o["l1"] * jnp.sum(jnp.abs(p["out"]))

        value, g = jax.value_and_grad(loss)(p)
        norm = optax.global_norm(g)
        g = jax.tree.map(lambda d: d * jnp.minimum(1.0, o["norm"] / norm), g)
        return jax.tree.map(lambda w, d: w - o["lr"] * d, p, g), value

    p = {"bands": struct(9, 6), "conv": struct(o["kernel"], 6, 8), "out": struct(8, 5)}
    return f, (p, struct(2, 64), struct(2, 3, dtype=I32), struct(2, 3))


def placed(o: Options) -> tuple:
    """Two layers and an optimiser whose state lies on a mesh, activations constrained."""
    mesh = jax.make_mesh((2, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)

    def lay(spec: P) -> NamedSharding:
        return NamedSharding(mesh, spec)

    def given(spec: P, *shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=lay(spec))

    tx = optax.chain(optax.clip_by_global_norm(o["clip"]), o["rule"](o["lr"]))

    def f(p: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            h = o["act"](x @ p["up"])
            h = jax.lax.with_sharding_constraint(h, lay(o["between"]))
            if o["dropped"]:
                h = jnp.where(jax.random.bernoulli(jax.random.key(o["seed"]), 0.8, h.shape), h / 0.8, 0.0)
            out = (h.astype(o["low"]) @ p["down"].astype(o["low"])).astype(F32)
            return jnp.mean((jax.lax.with_sharding_constraint(out, lay(P("d"))) - y) ** 2)

        g = jax.grad(loss)(p)
        updates, state = tx.update(g, state, p)
        return optax.apply_updates(p, updates), state

    p = {"up": given(o["up"], 8, 16), "down": given(P("m", None), 16, 8)}
    state = jax.eval_shape(tx.init, {"up": struct(8, 16), "down": struct(16, 8)})
    return f, (p, state, given(P("d"), 4, 8), given(P("d"), 4, 8)), *o["donate"]


def swish(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(1.5 * x)


DEFAULTS: dict[Callable, Options] = {
    penzai: dict(window=0, kv=1, hidden=16, mlp="swiglu", tied=True, wavelength=10000, eps=1e-6, post=False, cap=30.0,
                 stacked=False, lr=2e-3, decay=0.05, z=3e-4, donate=()),
    patches: dict(patch=4, heads=2, depth=1, registers=2, ratio=2.0, scale=0.1, act="gelu", eps=1e-5, temperature=2.5,
                  smooth=0.1, mix=0.7, lr=0.03),
    molecules: dict(periodic=True, box=6.0, jones=True, sigma=1.1, epsilon=0.8, onset=2.0, thermal=False, dt=4e-3,
                    kT=0.3, gamma=0.2, mass=1.3, remat=False, steps=5, hold=0.07),
    wave: dict(soft=1e-3, act=jnp.tanh, residual=True, range=0.6, trap=0.35, omega=0.45, clip=4.0, clipped=True,
               stopped=True, lr=0.02, size=6),
    low_rank: dict(depth=2, act=jax.nn.gelu, bias=True, rank=2, stop=True, loss=jnp.square, weight=0.6,
                   lr=0.03),
    profile: dict(end=2.0, method="cubic", extrap=False, derivative=1, error=jnp.square, smooth=0.03, lr=0.2),
    preference: dict(fade=0.85, pre=True, act=jax.nn.relu, eps=1e-6, tied=False, pad=0, averaged=False, reference=True,
                     kind="sigmoid", beta=0.15, smooth=0.1, also=0.2, layers=2, tx=lambda: optax.lion(3e-4, b1=0.9)),
    retention: dict(slowest=3.0, chunk=4, inner=F32, remat=False, state=F32, unroll=1, eps=1e-5, gate=jax.nn.silu,
                    skip=0.8, least=-2.0, lr=0.04) | {"norm first": True},
    ring: dict(devices=4, scale=0.55, causal=True, hidden=-1e6, kept=F32, direction=1, eps=1e-6, decay=2e-3, lr=0.15),
    adversary: dict(spectral=False, power=2, act=jax.nn.elu, eps=1e-5, slope=0.2, spread=1.4, hinge=False, penalty=7.0,
                    target=1.0, lr=0.006, slow=0.0015),
    speech: dict(hop=5, power=2, floor=1e-6, stride=1, pad="SAME", dilation=1, act=jax.nn.relu6, blank=0, l1=3e-3,
                 norm=2.0, lr=0.05, kernel=3),
    placed: dict(clip=1.5, rule=optax.adabelief, lr=2e-3, act=swish, between=P("d", "m"), dropped=False, seed=3,
                 low=F32, up=P(None, "m"), donate=()),
}  # fmt: skip
PAIRS: list[Pair] = [
    ("penzai window", penzai, {"window": 2}, {"window": 4}, r"(?<!\d)2 -> 4|1 -> 3"),
    ("penzai untied", penzai, {}, {"tied": False}, r"parameters? |3\.46|transpose|sqrt|multiply"),
    ("penzai gate", penzai, {}, {"mlp": "geglu_approx"}, r"tanh|logistic|exponential"),
    ("penzai wavelength", penzai, {}, {"wavelength": 500}, r"10000 -> 500|9\.21.* -> 6\.21|constant"),
    ("penzai post norm", penzai, {}, {"post": True}, r"^\+ .*(?:parameter|rsqrt|norm)"),
    ("penzai stacked", penzai, {}, {"stacked": True}, r"parameters? |while|scan"),
    ("penzai decay", penzai, {}, {"decay": 0.2}, r"0\.05 -> 0\.2|-0\.0001 -> -0\.0004"),
    ("patches registers", patches, {}, {"registers": 3}, r"parameters? .*\[2,16\].*\[3,16\]"),
    ("patches scale", patches, {}, {"scale": None}, r"^- .*(?:parameter|multiply)|parameters? "),
    ("patches activation", patches, {}, {"act": "relu"}, r"max|erf|tanh|compare|select"),
    ("patches eps", patches, {}, {"eps": 1e-3}, r"1e-05 -> 0\.001"),
    ("patches temperature", patches, {}, {"temperature": 4.0}, r"2\.5 -> 4|0\.4 -> 0\.25"),
    ("patches smoothing", patches, {}, {"smooth": 0.2}, r"0\.9 -> 0\.8|0\.02 -> 0\.04|0\.1 -> 0\.2"),
    ("molecules potential", molecules, {}, {"jones": False}, r"exponential|power|multiply|divide|replaced|- |\+ "),
    ("molecules free", molecules, {}, {"periodic": False},
     r"^(?:in .*: )?- .*(?:remainder|round|floor|select|compare)"),
    ("molecules onset", molecules, {}, {"onset": 1.5}, r"2 -> 1\.5|4 -> 2\.25"),
    ("molecules steps", molecules, {}, {"steps": 8}, r"5 -> 8 steps"),
    ("molecules remat", molecules, {}, {"remat": True}, r"remat"),
    ("molecules friction", molecules, {"thermal": True}, {"thermal": True, "gamma": 0.6},
     r"0\.2 -> 0\.6|-?0\.0008 -> -?0\.0024|0\.999.* -> 0\.997|constant"),
    ("molecules mass", molecules, {}, {"mass": 2.0}, r"1\.3.* -> 2|constant|0\.769.* -> 0\.5"),
    ("wave residual", wave, {}, {"residual": False}, r"^(?:in .*: )?- .*add|add"),
    ("wave range", wave, {}, {"range": 0.9}, r"0\.6 -> 0\.9"),
    ("wave activation", wave, {}, {"act": jax.nn.sigmoid}, r"tanh|logistic"),
    ("wave unclipped", wave, {}, {"clipped": False}, r"- .*(?:clamp|min|max|subtract|add)"),
    ("wave unstopped", wave, {}, {"stopped": False}, r"^\+ |stop|add|replaced"),
    ("low rank rank", low_rank, {}, {"rank": 3}, r"parameters? .*2.* -> .*3"),
    ("low rank weight", low_rank, {}, {"weight": 0.9}, r"0\.6 -> 0\.9|0\.03 -> 0\.045|0\.06 -> 0\.09"),
    ("low rank trained", low_rank, {}, {"stop": False}, r"^\+ .*(?:dot|multiply|transpose|subtract)|output|operand"),
    ("low rank depth", low_rank, {}, {"depth": 3}, r"^\+ .*parameter"),
    ("profile method", profile, {}, {"method": "linear"}, r"dot|- |replaced|gather"),
    ("profile catmull", profile, {}, {"method": "catmull-rom"}, r"divide|constant|multiply|replaced|\+ |- "),
    ("profile second derivative", profile, {}, {"derivative": 2}, r"derivative|constant|multiply|dot|gather|\+ |- "),
    ("profile end", profile, {}, {"end": 3.0}, r"2 -> 3|constant|iota"),
    ("preference identity", preference, {}, {"kind": "identity"}, r"log|exp|logistic|subtract|3\.33|- |replaced"),
    ("preference without reference", preference, {}, {"reference": False}, r"- .*(?:parameter|gather|subtract|dot)"),
    ("preference tied", preference, {}, {"tied": True}, r"- .*parameter"),
    ("preference post norm", preference, {}, {"pre": False}, r"operand|reads|add|rsqrt|multiply|instead"),
    ("preference averaged", preference, {}, {"averaged": True}, r"\+ .*(?:divide|reduce|convert)"),
    ("preference momentum", preference, {"tx": lambda: optax.lion(3e-4, b1=0.9)},
     {"tx": lambda: optax.lion(3e-4, b1=0.8)}, r"0\.9 -> 0\.8|0\.1 -> 0\.2"),
    ("preference pad", preference, {}, {"pad": 1}, r"0 -> 1"),
    ("retention chunk", retention, {}, {"chunk": 6}, r"3 -> 2 steps|4.* -> .*6"),
    ("retention inner dtype", retention, {}, {"inner": jnp.bfloat16}, r"bf16|bfloat16"),
    ("retention state dtype", retention, {}, {"state": jnp.bfloat16}, r"bf16|bfloat16"),
    ("retention remat", retention, {}, {"remat": True}, r"remat"),
    ("retention unroll", retention, {}, {"unroll": 3}, r"3 -> 1 steps|while|scan|steps"),
    ("retention combined", retention, {}, {"norm first": False}, r"multiply.*add|add"),
    ("ring causal", ring, {}, {"causal": False}, r"- .*(?:select|compare|remainder|iota)"),
    ("ring direction", ring, {}, {"direction": -1}, r"permute|source_target|pairs"),
    ("ring kept", ring, {}, {"kept": jnp.bfloat16}, r"bf16|bfloat16"),
    ("ring devices", ring, {}, {"devices": 2}, r"4 -> 2|num_partitions|replica|mesh|sharding|devices"),
    ("adversary penalty", adversary, {}, {"penalty": 11.0}, r"7 -> 11|1\.4 -> 2\.2"),
    ("adversary hinge", adversary, {}, {"hinge": True}, r"max|compare|select"),
    ("adversary spectral", adversary, {}, {"spectral": True}, r"while|sqrt|norm|divide|\+ "),
    ("adversary slope", adversary, {}, {"slope": 0.01}, r"0\.2 -> 0\.01"),
    ("speech power", speech, {}, {"power": 1}, r"- .*(?:multiply|integer_pow|square)|power|multiply|square"),
    ("speech stride", speech, {}, {"stride": 2}, r"stride"),
    ("speech kernel", speech, {}, {"kernel": 5}, r"parameters? .*\[3,6,8\].*\[5,6,8\]"),
    ("speech hop", speech, {}, {"hop": 4}, r"(?<!\d)5 -> 4|constant|gather"),
    ("speech blank", speech, {}, {"blank": 4}, r"0 -> 4|slice|start|limit|gather|4"),
    ("placed rule", placed, {}, {"rule": optax.amsgrad}, r"parameters? |maximum|subtract|\+ "),
    ("placed between", placed, {}, {"between": P("d", None)}, r"sharding|sharded|\[2,1,2\]|partition"),
    ("placed up", placed, {}, {"up": P("d", "m")}, r"sharding|sharded|all-gather|all-reduce"),
    ("placed low", placed, {}, {"low": jnp.bfloat16}, r"bf16|bfloat16|convert"),
    ("placed donated", placed, {}, {"donate": (0,)}, r"donation of argument"),
]  # fmt: skip


if __name__ == "__main__":
    main(__doc__, {"eighth": PAIRS}, partial(texts, defaults=DEFAULTS))
