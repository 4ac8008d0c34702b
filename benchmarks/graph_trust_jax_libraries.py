"""Pairs of programs of diffrax, jraph, rlax, numpyro, flax.nnx and plain JAX for `graph_trust.py`, in two sets.

    python benchmarks/graph_trust_jax_libraries.py FOLDER --set third     # needs jax and these libraries
    python benchmarks/graph_trust_jax_libraries.py FOLDER --set fourth    # no pair of it was looked at

Each pair three times: HLO, optimised HLO, StableHLO. Both sets and what they expect were written before any result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import jraph
import numpyro
import numpyro.distributions as dist
import optax
import rlax
from flax import nnx
from graph_trust_fresh import F32, I32, struct, texts
from graph_trust_pairs import Options, Pair, main
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def residual(o: Options) -> tuple:
    """A residual convolutional net of flax.nnx with batch norm, trained by an optimiser of optax."""

    class Unit(nnx.Module):
        def __init__(self, c: int, rngs: nnx.Rngs) -> None:
            self.conv = nnx.Conv(c, c, (3, 3), kernel_dilation=o["dilation"], rngs=rngs)
            self.norm = nnx.BatchNorm(c, momentum=o["momentum"], epsilon=o["eps"], rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + o["act"](self.norm(self.conv(x)))

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.stem = nnx.Conv(3, o["width"], (3, 3), strides=2, rngs=rngs)
            self.units = nnx.List([Unit(o["width"], rngs) for _ in range(o["units"])])
            self.head = nnx.Linear(o["width"], 7, use_bias=o["bias"], rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            h = self.stem(x)
            for unit in self.units:
                h = unit(h)
            return self.head(jnp.mean(h, (1, 2)))

    static, params, rest = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))), nnx.Param, ...)
    tx = o["tx"](o["lr"])

    def step(params: Any, rest: Any, opt: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(p: Any) -> Any:
            model = nnx.merge(static, p, rest, copy=True)
            value = optax.sigmoid_binary_cross_entropy(model(x), y).mean()
            return value, nnx.split(model, nnx.Param, ...)[2]

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), new, opt, value

    x, y = struct(o["batch"], 8, 8, 3), struct(o["batch"], 7)
    return step, (params, rest, jax.eval_shape(tx.init, params), x, y), *o["donate"]


def ode(o: Options) -> tuple:
    """A neural differential equation, its gradient through the solver."""

    def f(p: Any, y0: jax.Array) -> Any:
        def field(t: Any, y: jax.Array, args: Any) -> jax.Array:
            return jnp.tanh(y @ p["a"] + t) @ p["b"] * o["speed"]

        def loss(p: Any) -> jax.Array:
            solution = diffrax.diffeqsolve(
                diffrax.ODETerm(field), o["solver"](), 0.0, o["until"], o["dt"], y0, max_steps=o["most"],
                stepsize_controller=o["control"], throw=False,
            )  # fmt: skip
            return jnp.sum(solution.ys**2) * o["weight"]

        return jax.value_and_grad(loss)(p)

    return f, ({"a": struct(4, 6), "b": struct(6, 4)}, struct(3, 4))


def graphs(o: Options) -> tuple:
    """Message passing on a graph of jraph."""
    n, e = o["nodes"], 10

    def f(p: Any, nodes: jax.Array, edges: jax.Array, senders: jax.Array, receivers: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            def edge(e: jax.Array, s: jax.Array, r: jax.Array, g: Any) -> jax.Array:
                joined = jnp.concatenate([e, s, r] if o["order"] else [e, r, s], -1)
                return jax.nn.leaky_relu(joined @ p["edge"], o["slope"])

            def node(v: jax.Array, s: jax.Array, r: jax.Array, g: Any) -> jax.Array:
                return v + jnp.concatenate([v, r], -1) @ p["node"]

            net = jraph.GraphNetwork(edge, node, aggregate_edges_for_nodes_fn=o["aggregate"])
            state = jraph.GraphsTuple(nodes, edges, receivers, senders, None, jnp.array([n]), jnp.array([e]))
            for _ in range(o["rounds"]):
                state = net(state)
            return jnp.mean(jnp.abs(state.nodes)) + o["smooth"] * jnp.mean(state.edges**2)

        grads = jax.grad(loss)(p)
        return jax.tree.map(lambda w, g: w - o["lr"] * jnp.sign(g), p, grads)

    params = {"edge": struct(8, 4), "node": struct(6, 2)}
    return f, (params, struct(n, 2), struct(e, 4), struct(e, dtype=I32), struct(e, dtype=I32))


def policy(o: Options) -> tuple:
    """Proximal policy optimisation over minibatches in a scan, advantages of rlax."""

    def f(p: Any, obs: jax.Array, actions: jax.Array, old: jax.Array, rewards: jax.Array) -> Any:
        def head(p: Any, x: jax.Array) -> Any:
            h = jnp.tanh(x @ p["w"])
            return h @ p["pi"], (h @ p["v"])[..., 0]

        def loss(p: Any, batch: Any) -> jax.Array:
            x, a, before, r = batch
            logits, v = head(p, x)
            advantage = rlax.truncated_generalized_advantage_estimation(
                r[:-1], jnp.full(r.shape[0] - 1, o["gamma"]), o["lambda"], jax.lax.stop_gradient(v)
            )
            ratio = jnp.exp(jax.nn.log_softmax(logits)[jnp.arange(a.shape[0]), a] - before)[:-1]
            gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - o["clip"], 1 + o["clip"]) * advantage)
            entropy = -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), -1)
            value = jnp.mean(rlax.huber_loss(v - r, o["delta"]))
            return -gain.mean() + o["value"] * value - o["entropy"] * entropy.mean()

        def epoch(p: Any, batch: Any) -> Any:
            value, g = jax.value_and_grad(loss)(p, batch)
            return jax.tree.map(lambda w, d: w - o["lr"] * d, p, g), value

        p, values = jax.lax.scan(epoch, p, (obs, actions, old, rewards))
        return (p, values.mean()) if o["mean"] else (p, values[-1])

    n, t = o["minibatches"], 6
    params = {"w": struct(5, 8), "pi": struct(8, 3), "v": struct(8, 1)}
    return f, (params, struct(n, t, 5), struct(n, t, dtype=I32), struct(n, t), struct(n, t))


def bayes(o: Options) -> tuple:
    """The joint log density of a numpyro model and its gradient."""

    def model(x: jax.Array, y: jax.Array) -> None:
        w = numpyro.sample("w", dist.Normal(0.0, o["scale"]).expand([5]).to_event(1))
        s = numpyro.sample("s", o["noise"])
        mean = x @ w if o["linear"] else jnp.sin(x @ w)
        likelihood = dist.StudentT(o["df"], mean, s) if o["heavy"] else dist.Normal(mean, s)
        with numpyro.plate("data", x.shape[0], subsample_size=None):
            numpyro.sample("y", likelihood, obs=y)

    def f(sample: Any, x: jax.Array, y: jax.Array) -> Any:
        def density(s: Any) -> jax.Array:
            return numpyro.infer.util.log_density(model, (x, y), {}, s)[0] / o["temperature"]

        value, grads = jax.value_and_grad(density)(sample)
        return jax.tree.map(lambda v, g: v + o["lr"] * g, sample, grads), value

    return f, ({"w": struct(5), "s": struct()}, struct(o["rows"], 5), struct(o["rows"]))


def decoder(o: Options) -> tuple:
    """A scanned decoder with rotary positions, grouped queries and experts, each token to its best two."""
    d, heads, groups = 16, 4, o["groups"]

    def rotate(x: jax.Array) -> jax.Array:
        angle = jnp.arange(x.shape[1])[:, None] / o["theta"] ** (jnp.arange(0, 4, 2) / 4)
        left, right = jnp.split(x, 2, -1)
        c, s = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
        return jnp.concatenate([left * c - right * s, right * c + left * s], -1)

    def layer(h: jax.Array, w: Any) -> Any:
        n = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + o["eps"]) * w["norm"]
        q, k, v = (jnp.einsum("btd,dhe->bthe", n, w[x]) for x in "qkv")
        q, k = (rotate(q), rotate(k)) if o["rope"] else (q, k)
        k, v = (jnp.repeat(t, heads // groups, 2) for t in (k, v))
        s = jnp.einsum("bthe,bshe->bhts", q, k) * o["scale"]
        if o["cap"]:
            s = o["cap"] * jnp.tanh(s / o["cap"])
        span = jnp.arange(s.shape[-1])[:, None] - jnp.arange(s.shape[-1])
        s = jnp.where((span >= 0) & (span < o["window"]), s, -1e30)
        h = h + jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(s), v).reshape(h.shape) @ w["o"]
        gates = jax.nn.softmax(h @ w["route"])
        weight, chosen = jax.lax.top_k(gates, o["best"])
        mask = jnp.sum(jax.nn.one_hot(chosen, gates.shape[-1]) * weight[..., None], -2)
        up = jnp.einsum("btd,edf->btef", h, w["up"])
        out = h + jnp.einsum("btef,efd,bte->btd", o["act"](up), w["down"], mask)
        return out.astype(o["compute"]), jnp.mean(gates, (0, 1))

    def f(p: Any, tokens: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            body = jax.checkpoint(layer) if o["remat"] else layer
            h, load = jax.lax.scan(body, p["embed"][tokens].astype(o["compute"]), p["layers"])
            logits = (h @ p["embed"].T).astype(F32)
            value = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
            norm = jax.nn.logsumexp(logits, -1) ** 2
            return value.mean() + o["z"] * norm.mean() + o["balance"] * jnp.sum(load**2).astype(F32)

        return jax.tree.map(lambda w, g: w - o["lr"] * g.astype(w.dtype), p, jax.grad(loss)(p))

    n, e = o["layers"], o["experts"]
    dt = o["compute"]
    shapes = {"norm": (d,), "q": (d, heads, 4), "k": (d, groups, 4), "v": (d, groups, 4), "o": (d, d),
              "route": (d, e), "up": (e, d, o["hidden"]), "down": (e, o["hidden"], d)}  # fmt: skip
    params = {"embed": struct(30, d, dtype=dt), "layers": {k: struct(n, *s, dtype=dt) for k, s in shapes.items()}}
    return f, (params, struct(2, o["length"], dtype=I32))


def recurrence(o: Options) -> tuple:
    """A diagonal recurrence by an associative scan, a convolution in time, an FFT filter, sorts and segments."""

    def f(p: Any, x: jax.Array, ids: jax.Array) -> Any:
        def combine(a: Any, b: Any) -> Any:
            return a[0] * b[0], b[0] * a[1] + b[1]

        def loss(p: Any) -> jax.Array:
            decay = jnp.exp(-jax.nn.softplus(p["decay"]) * o["tau"])
            u = jax.lax.conv_general_dilated(
                x, p["conv"], (1,), [(o["left"], 2 - o["left"])], dimension_numbers=("NWC", "WIO", "NWC"),
                feature_group_count=4,
            )  # fmt: skip
            scanned = (jnp.broadcast_to(decay, u.shape), o["act"](u))
            h = jax.lax.associative_scan(combine, scanned, reverse=o["reverse"], axis=1)[1]
            spectrum = jnp.fft.rfft(h, axis=1) * p["filter"][:, None]
            y = jnp.fft.irfft(spectrum, axis=1, norm=o["norm"])
            pooled = o["segment"](y[0], ids, num_segments=o["segments"])
            ranked = jnp.argsort(y.sum(-1), axis=-1)[:, : o["kept"]]
            near = jnp.take_along_axis(y.sum(-1), ranked, -1)
            return jnp.sum(jnp.where(pooled > o["floor"], pooled, 0)) + jnp.sum(near) / o["denominator"]

        value, grads = jax.value_and_grad(loss)(p)
        return grads, value

    params = {"decay": struct(4), "conv": struct(3, 1, 4), "filter": struct(o["length"] // 2 + 1, dtype=jnp.complex64)}
    return f, (params, struct(2, o["length"], 4), struct(o["length"], dtype=I32))


def pipeline(o: Options) -> tuple:
    """Stages that hand activations on within a shard_map, gradients summed over data."""
    mesh = jax.make_mesh((2, 2), ("data", "stage"), axis_types=(AxisType.Auto,) * 2)
    ring = [(i, (i + 1) % 2) for i in range(2)] if o["ring"] else [(0, 1)]

    def f(w: jax.Array, x: jax.Array) -> Any:
        def tick(h: jax.Array, t: jax.Array) -> Any:
            h = jax.nn.gelu(h @ w[0]) * o["gain"]
            return jax.lax.ppermute(h, "stage", ring), jnp.max(h)

        h, peaks = jax.lax.scan(tick, x, jnp.arange(o["ticks"]))
        total = o["reduce"](jnp.sum(h**2), "data")
        mixed = jax.lax.all_to_all(h, o["axis"], 1, 0, tiled=True)
        return (total + jnp.sum(mixed) * o["mix"] + jnp.max(peaks))[None]

    whole = jax.shard_map(f, mesh=mesh, in_specs=(P("stage"), P("data")), out_specs=P(("data", "stage")),
                          check_vma=False)  # fmt: skip

    def step(w: jax.Array, x: jax.Array) -> Any:
        value = whole(w, jax.lax.with_sharding_constraint(x, NamedSharding(mesh, o["spec"])))
        return w * (1 - o["decay"]), value.sum()

    w = jax.ShapeDtypeStruct((2, 8, 8), o["dtype"], sharding=NamedSharding(mesh, P("stage")))
    return step, (w, jax.ShapeDtypeStruct((8, 8), o["dtype"], sharding=NamedSharding(mesh, P("data"))))


def diffusion(o: Options) -> tuple:
    """A step of a denoiser: noise, time embedding, down and up, moving average of the weights, accumulation."""
    tx = optax.MultiSteps(optax.lion(o["lr"], b1=o["b1"]), o["every"])

    def f(p: Any, ema: Any, state: Any, x: jax.Array, key: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            kt, kn = jax.random.split(key)
            t = jax.random.uniform(kt, (x.shape[0],)) if o["uniform"] else jax.random.beta(kt, 2.0, 2.0, (x.shape[0],))
            noise = jax.random.normal(kn, x.shape)
            signal = jnp.cos(t * jnp.pi / 2)[:, None, None, None]
            noisy = signal * x + jnp.sqrt(1 - signal**2 + o["tiny"]) * noise
            wave = t[:, None] * jnp.exp(jnp.linspace(0.0, o["top"], 4))
            emb = jnp.concatenate([jnp.sin(wave), jnp.cos(wave)], -1) @ p["time"]
            dims = ("NHWC", "HWIO", "NHWC")
            h = jax.lax.conv_general_dilated(noisy, p["down"], (2, 2), "SAME", dimension_numbers=dims)
            h = jax.nn.silu(h + emb[:, None, None])
            up = jax.image.resize(h, (h.shape[0], 8, 8, h.shape[-1]), o["resize"])
            out = jax.lax.conv_general_dilated(up, p["up"], (1, 1), "SAME", dimension_numbers=dims)
            target = noise if o["epsilon"] else x
            return jnp.mean(jnp.abs(out - target) ** o["norm"])

        value, grads = jax.value_and_grad(loss)(p)
        updates, state = tx.update(grads, state, p)
        p = optax.apply_updates(p, updates)
        return p, jax.tree.map(lambda e, w: o["ema"] * e + (1 - o["ema"]) * w, ema, p), state, value

    params = {"time": struct(8, 6), "down": struct(3, 3, 2, 6), "up": struct(3, 3, 6, 2)}
    state = jax.eval_shape(tx.init, params)
    x = struct(o["batch"], 8, 8, 2)
    return f, (params, params, state, x, struct(dtype=jax.random.key(0).dtype)), *o["donate"]


def algebra(o: Options) -> tuple:
    """Linear algebra, a fixed point with its own gradient, nested conditions, random draws, integer arithmetic."""

    @jax.custom_vjp
    def root(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, o["rounds"], lambda _, x: x - (a @ x - b) * o["damp"], b)

    root.defvjp(
        lambda a, b: (root(a, b), (a, root(a, b))),
        lambda r, g: (-jnp.outer(root(r[0].T, g), r[1]), root(r[0].T, g) * o["backward"]),
    )

    def f(a: jax.Array, b: jax.Array, key: jax.Array, n: jax.Array) -> Any:
        def loss(a: jax.Array) -> jax.Array:
            q, r = jnp.linalg.qr(a + o["shift"] * jnp.eye(6))
            x = root(a, b)
            x = jax.lax.cond(n > o["limit"], lambda v: jax.lax.cond(n > 9, jnp.sin, o["inner"], v), jnp.square, x)
            drawn = o["draw"](key, (6,)) * o["sigma"]
            low = jnp.linalg.slogdet(a @ a.T + jnp.eye(6))[1]
            mod = ((jnp.arange(6) * o["stride"]) % o["modulus"]).astype(F32)
            return jnp.sum(q @ x * mod) + low + jnp.sum(jnp.abs(r) * drawn)

        return o["outer"](loss)(a), jnp.bincount(jnp.clip(n[None], 0, 3), length=o["bins"])

    return f, (struct(6, 6), struct(6), struct(dtype=jax.random.key(0).dtype), struct(dtype=I32))


constant, adaptive = diffrax.ConstantStepSize(), diffrax.PIDController(1e-3, 1e-6)
DEFAULTS: dict[Callable, Options] = {
    residual: dict(dilation=1, momentum=0.9, eps=1e-5, act=jax.nn.relu, width=8, units=2, bias=True, lr=1e-3, batch=4,
                   tx=optax.adam, donate=()),
    ode: dict(speed=1.25, solver=diffrax.Tsit5, until=1.0, dt=0.125, most=16, control=constant, weight=0.75),
    graphs: dict(nodes=6, order=True, slope=0.2, aggregate=jraph.segment_sum, rounds=2, smooth=0.03, lr=0.07),
    policy: dict(gamma=0.97, clip=0.2, value=0.45, entropy=0.015, delta=1.0, lr=0.002, minibatches=4, mean=True,
                 **{"lambda": 0.85}),
    bayes: dict(scale=2.5, noise=dist.HalfNormal(1.5), linear=True, heavy=False, df=4.0, temperature=3.0, lr=0.004,
                rows=9),
    decoder: dict(groups=2, theta=10000.0, eps=1e-6, rope=True, scale=0.35, cap=0.0, window=99, best=2, act=jax.nn.silu,
                  remat=False, compute=F32, z=1e-4, balance=0.011, lr=0.3, layers=3, experts=4, hidden=12, length=10),
    recurrence: dict(tau=0.6, left=2, act=jnp.tanh, reverse=False, norm=None, segment=jax.ops.segment_sum, segments=4,
                     kept=5, floor=0.125, denominator=3.0, length=12),
    pipeline: dict(ring=True, gain=1.5, ticks=3, reduce=jax.lax.psum, axis="data", mix=0.3, spec=P("data"), decay=0.01,
                   dtype=F32),
    diffusion: dict(lr=1e-4, b1=0.85, every=3, uniform=True, tiny=1e-5, top=6.0, resize="nearest", epsilon=True,
                    norm=2.5, ema=0.995, batch=4, donate=()),
    algebra: dict(rounds=7, damp=0.1, backward=1.0, shift=0.5, limit=3, inner=jnp.cos, draw=jax.random.normal,
                  sigma=0.2, stride=5, modulus=7, outer=jax.grad, bins=4),
}  # fmt: skip
THIRD: list[Pair] = [
    ("nnx dilation", residual, {}, {"dilation": 2}, r"dilat"),
    ("nnx batch norm momentum", residual, {}, {"momentum": 0.95}, r"0\.9 -> 0\.95|0\.1.* -> 0\.05"),
    ("nnx activation", residual, {}, {"act": jax.nn.silu}, r"max|logistic|exponential|silu|relu"),
    ("nnx unit", residual, {}, {"units": 3}, r"^\+ .*(?:parameter|units)"),
    ("nnx optimiser", residual, {}, {"tx": optax.adamax}, r"sqrt|maximum|abs"),
    ("nnx donation", residual, {}, {"donate": (0, 2)}, r"donation of argument"),
    ("ode speed", ode, {}, {"speed": 2.75}, r"1\.25 -> 2\.75"),
    ("ode end", ode, {}, {"until": 1.75}, r"1 -> 1\.75"),
    ("ode field of another step", ode, {}, {"dt": 0.25}, r"0\.125 -> 0\.25"),
    ("jraph slope", graphs, {}, {"slope": 0.3}, r"0\.2 -> 0\.3"),
    ("jraph aggregation", graphs, {}, {"aggregate": jraph.segment_mean}, r"divide|maximum|scatter|segment"),
    ("jraph rounds", graphs, {}, {"rounds": 3}, r"^\+ "),
    ("jraph order", graphs, {}, {"order": False}, r"concatenate|order|exchanged|operand"),
    ("ppo gamma", policy, {}, {"gamma": 0.9}, r"0\.97 -> 0\.9"),
    ("ppo clip", policy, {}, {"clip": 0.3}, r"0\.8 -> 0\.7|1\.2 -> 1\.3"),
    ("ppo minibatches", policy, {}, {"minibatches": 6}, r"4 -> 6 steps|\[4,6,5\] -> f32\[6,6,5\]"),
    ("ppo last value", policy, {}, {"mean": False}, r"reduce|divide|slice|multiply"),
    ("bayes prior", bayes, {}, {"scale": 3.5}, r"2\.5 -> 3\.5|0\.4 -> 0\.28"),
    ("bayes likelihood", bayes, {}, {"heavy": True}, r"log|lgamma|square|negate"),
    ("bayes rows", bayes, {}, {"rows": 11}, r"parameters? .*\[9,5\] -> f32\[11,5\]"),
    ("decoder theta", decoder, {}, {"theta": 500000.0}, r"10000 -> 500000|1e\+?04 -> 5e\+?05|constant .*->"),
    ("decoder rotary", decoder, {}, {"rope": False}, r"^- |: - "),
    ("decoder window", decoder, {}, {"window": 4}, r"99 -> 4"),
    ("decoder cap", decoder, {"cap": 30.0}, {"cap": 50.0}, r"30 -> 50"),
    ("decoder experts", decoder, {}, {"experts": 6}, r"parameters? .*\[3,16,4\] -> f32\[3,16,6\]"),
    ("decoder remat", decoder, {}, {"remat": True}, r"remat"),
    ("decoder layers", decoder, {}, {"layers": 5}, r"3 -> 5 steps|\[3,16.* -> f32\[5,16"),
    ("recurrence reversed", recurrence, {}, {"reverse": True}, r"reverse"),
    ("recurrence segments", recurrence, {}, {"segment": jax.ops.segment_max}, r"max|scatter"),
    ("recurrence padding", recurrence, {}, {"left": 0}, r"pad"),
    ("pipeline ring", pipeline, {}, {"ring": False}, r"permute|pairs"),
    ("pipeline ticks", pipeline, {}, {"ticks": 5}, r"3 -> 5 steps"),
    ("diffusion target", diffusion, {}, {"epsilon": False}, r"subtract|operand|input|noise"),
    ("diffusion resize", diffusion, {}, {"resize": "linear"}, r"gather|dot|resize"),
    ("diffusion ema", diffusion, {}, {"ema": 0.9}, r"0\.995 -> 0\.9|0\.005.* -> 0\.1"),
    ("algebra inner branch", algebra, {}, {"inner": jnp.tan}, r"tan|cos"),
    ("algebra rounds", algebra, {}, {"rounds": 9}, r"7 -> 9"),
]  # fmt: skip
FOURTH: list[Pair] = [
    ("nnx eps", residual, {}, {"eps": 1e-3}, r"1e-05 -> 0\.001"),
    ("nnx width", residual, {}, {"width": 12}, r"parameters? .*8.* -> .*12"),
    ("nnx bias", residual, {}, {"bias": False}, r"^- .*(?:bias|parameter)"),
    ("nnx rate", residual, {}, {"lr": 3e-3}, r"0\.001 -> -?0\.003"),
    ("nnx batch", residual, {}, {"batch": 6}, r"\[4,8,8,3\] -> f32\[6,8,8,3\]"),
    ("nnx rmsprop", residual, {"tx": optax.rmsprop}, {"tx": optax.sgd}, r"^- .*(?:parameter|sqrt)|sqrt"),
    ("ode solver", ode, {"solver": diffrax.Heun}, {"solver": diffrax.Midpoint}, r"constant|0\.5|dot|multiply"),
    ("ode weight", ode, {}, {"weight": 1.75}, r"0\.75 -> 1\.75|1\.5 -> 3\.5"),
    ("ode most", ode, {}, {"most": 32}, r"16 -> 32|\[16.* -> .*\[32"),
    ("ode adaptive", ode, {}, {"control": adaptive}, r"^\+ |in B only|while|replaced"),
    ("jraph smooth", graphs, {}, {"smooth": 0.05}, r"0\.03 -> 0\.05|0\.00[0-9]* -> "),
    ("jraph rate", graphs, {}, {"lr": 0.01}, r"0\.07 -> -?0\.01"),
    ("jraph nodes", graphs, {}, {"nodes": 9}, r"\[6,2\] -> f32\[9,2\]"),
    ("ppo lambda", policy, {}, {"lambda": 0.5}, r"0\.85 -> 0\.5"),
    ("ppo entropy", policy, {}, {"entropy": 0.03}, r"0\.015 -> -?0\.03|0\.0025.* -> "),
    ("ppo delta", policy, {}, {"delta": 2.0}, r"1 -> 2|0\.5 -> 2"),
    ("ppo rate", policy, {}, {"lr": 0.01}, r"0\.002 -> -?0\.01"),
    ("bayes noise", bayes, {}, {"noise": dist.HalfCauchy(1.5)}, r"log|square|divide|multiply|negate"),
    ("bayes link", bayes, {}, {"linear": False}, r"sin|cos"),
    ("bayes temperature", bayes, {}, {"temperature": 7.0}, r"3 -> 7|0\.333.* -> 0\.1428"),
    ("decoder groups", decoder, {}, {"groups": 4}, r"parameters? .*\[3,16,2,4\] -> f32\[3,16,4,4\]"),
    ("decoder scale", decoder, {}, {"scale": 0.7}, r"0\.35 -> 0\.7"),
    ("decoder best", decoder, {}, {"best": 1}, r"k=2 -> k=1|2.* -> .*1|top"),
    ("decoder activation", decoder, {}, {"act": jax.nn.relu}, r"max|logistic|exponential|silu|relu"),
    ("decoder dtype", decoder, {}, {"compute": jnp.bfloat16}, r"parameters? .*f32\[.*-> bf16"),
    ("decoder z", decoder, {}, {"z": 1e-3}, r"0\.0001 -> 0\.001|5\.5.*e-0\d -> |1\.1.*e-05 -> "),
    ("decoder length", decoder, {}, {"length": 14}, r"s32\[2,10\] -> s32\[2,14\]"),
    ("decoder hidden", decoder, {}, {"hidden": 20}, r"parameters? .*\[3,4,.*12.* -> .*20"),
    ("recurrence tau", recurrence, {}, {"tau": 0.9}, r"0\.6 -> 0\.9"),
    ("recurrence activation", recurrence, {}, {"act": jnp.sin}, r"tanh|sine"),
    ("recurrence floor", recurrence, {}, {"floor": 0.5}, r"0\.125 -> 0\.5"),
    ("recurrence kept", recurrence, {}, {"kept": 7}, r"slice|\[2,5.* -> .*\[2,7"),
    ("pipeline reduce", pipeline, {}, {"reduce": jax.lax.pmax}, r"all-reduce|max"),
    ("pipeline axis", pipeline, {}, {"axis": "stage"}, r"all-to-all.*groups"),
    ("pipeline spec", pipeline, {}, {"spec": P("stage")}, r"shard|collective|all-"),
    ("diffusion beta", diffusion, {}, {"uniform": False}, r"uniform|beta|gamma|^\+ |replaced|in B only"),
    ("diffusion norm", diffusion, {}, {"norm": 1.5}, r"2\.5 -> 1\.5|1\.5 -> 0\.5"),
    ("diffusion every", diffusion, {}, {"every": 5}, r"2 -> 4|3 -> 5"),
    ("diffusion b1", diffusion, {}, {"b1": 0.95}, r"0\.85 -> 0\.95|0\.15.* -> 0\.05"),
    ("algebra draw", algebra, {}, {"draw": jax.random.uniform}, r"erf|uniform|normal|log"),
    ("algebra modulus", algebra, {}, {"modulus": 4}, r"7 -> 4"),
    ("algebra bins", algebra, {}, {"bins": 6}, r"\[4\] -> s32\[6\]"),
]  # fmt: skip


if __name__ == "__main__":
    main(__doc__, {"third": THIRD, "fourth": FOURTH}, partial(texts, defaults=DEFAULTS))
