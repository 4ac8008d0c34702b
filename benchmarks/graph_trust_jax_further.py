"""Pairs of programs of keras, mctx, tinygp, ott, jaxopt, flowjax, dynamax, e3nn, blackjax, evosax and plain JAX.

    python benchmarks/graph_trust_jax_further.py FOLDER --set fifth    # needs jax and these libraries
    python benchmarks/graph_trust_jax_further.py FOLDER --set sixth    # no pair of it was looked at

For `graph_trust.py`, each pair three times: HLO, optimised HLO, StableHLO. Both sets and what they expect were
written, and frozen in a commit, before any result.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import blackjax
import dm_pix
import dynamax.linear_gaussian_ssm as ssm
import e3nn_jax
import equinox as eqx
import evosax.algorithms
import flowjax.bijections
import flowjax.distributions
import flowjax.flows
import jax
import jax.numpy as jnp
import jaxlie
import jaxopt
import keras
import mctx
import optax
import optax.contrib
import tinygp
from graph_trust_fresh import F32, I32, struct, texts
from graph_trust_pairs import Options, Pair, main
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ott.geometry import costs, pointcloud
from ott.problems.linear import linear_problem
from ott.solvers.linear import sinkhorn

KEY = jax.random.key(0).dtype


def trained(o: Options) -> tuple:
    """A causal transformer as one writes it by hand, with what people change of it, and its optimiser."""
    d, heads = 16, o["heads"]

    def norm(x: jax.Array, w: jax.Array) -> jax.Array:
        x = x - jnp.mean(x, -1, keepdims=True) if o["centred"] else x
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + o["eps"]) * w

    def attention(x: jax.Array, w: Any, mask: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("btd,dhe->bthe", x, w[n], precision=o["precision"]) for n in "qkv")
        s = jnp.einsum("bthe,bshe->bhts", q, k) / o["divisor"]
        s = s.astype(o["softmax"])
        a = jax.nn.softmax(jnp.where(mask, s, o["fill"]), axis=o["axis"]).astype(v.dtype)
        out = jnp.einsum("bhts,bshe->bthe", a, v).reshape(x.shape) @ w["o"]
        return out + w["bias"] if o["bias"] else out

    def block(x: jax.Array, w: Any, mask: jax.Array, key: jax.Array) -> jax.Array:
        if o["pre"]:
            x = x + attention(norm(x, w["n1"]), w, mask)
        else:
            x = norm(x + attention(x, w, mask), w["n1"])
        h = o["act"](norm(x, w["n2"]) @ w["up"])
        keep = jax.random.bernoulli(key, 1 - o["drop"], h.shape)
        h = jnp.where(keep, h / (1 - o["drop"]), 0)
        return (x + h @ w["down"] if o["residual"] else h @ w["down"]).astype(o["compute"])

    def f(p: Any, state: Any, tokens: jax.Array, key: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            t = tokens.shape[1]
            span = jnp.arange(t)[:, None] - jnp.arange(t)
            mask = (span >= o["diagonal"]) & (span < o["window"])
            x = p["embed"][tokens].astype(o["compute"])
            keys = jax.random.split(key, o["layers"])
            run = jax.checkpoint(block, policy=o["policy"]) if o["remat"] else block
            if o["scan"]:
                x, _ = jax.lax.scan(lambda x, w: (run(x, w[0], mask, w[1]), None), x, (p["layers"], keys))
            else:
                for i in range(o["layers"]):
                    x = run(x, jax.tree.map(lambda v, i=i: v[i], p["layers"]), mask, keys[i])
            head = p["embed"].T if o["tied"] else p["head"]
            logits = (norm(x, p["n"]) @ head).astype(F32)
            target = jax.nn.one_hot(tokens[:, 1:], 24) * (1 - o["smooth"]) + o["smooth"] / 24
            scores = optax.softmax_cross_entropy(logits[:, :-1], target)
            entropy = jax.lax.stop_gradient(logits) if o["stopped"] else logits
            return scores.mean() * o["scaled"] + o["z"] * jnp.mean(jax.nn.logsumexp(entropy, -1) ** 2)

        value, grads = jax.value_and_grad(loss)(p)
        grads = jax.tree.map(lambda g: g / o["scaled"], grads)
        updates, state = o["tx"]().update(grads, state, p)
        return optax.apply_updates(p, updates), state, value

    n, e, h = o["layers"], d // heads, o["hidden"]
    shapes = {"n1": (d,), "n2": (d,), "q": (d, heads, e), "k": (d, heads, e), "v": (d, heads, e), "o": (d, d),
              "up": (d, h), "down": (h, d)} | ({"bias": (d,)} if o["bias"] else {})  # fmt: skip
    params = {"embed": struct(24, d), "n": struct(d), "layers": {k: struct(n, *s) for k, s in shapes.items()}}
    params |= {} if o["tied"] else {"head": struct(d, 24)}
    state = jax.eval_shape(o["tx"]().init, params)
    return f, (params, state, struct(o["batch"], o["length"], dtype=I32), struct(dtype=KEY)), *o["donate"]


def image_model(o: Options) -> tuple:
    """A model of keras with convolutions, a recurrent layer and its loss, by its stateless call."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 2))
    x = keras.layers.Conv2D(4, 3, strides=o["stride"], padding=o["padding"], use_bias=o["bias"])(inputs)
    x = keras.layers.BatchNormalization(momentum=o["momentum"], epsilon=o["eps"])(x) if o["norm"] else x
    x = keras.layers.Activation(o["act"])(x)
    x = (keras.layers.MaxPooling2D if o["max"] else keras.layers.AveragePooling2D)(2)(x)
    x = keras.layers.Reshape((-1, 4))(x)
    x = o["cell"](o["units"], go_backwards=o["backwards"])(x)
    x = keras.layers.Dropout(o["drop"])(x)
    decay = keras.regularizers.L2(o["l2"])
    model = keras.Model(inputs, keras.layers.Dense(3, kernel_regularizer=decay)(x))
    measure = keras.losses.CategoricalCrossentropy(from_logits=o["logits"], label_smoothing=o["smooth"])

    def f(trainable: Any, rest: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(trainable: Any) -> Any:
            out, rest_new, losses = model.stateless_call(trainable, rest, x, training=o["training"], return_losses=True)
            return measure(y, out) + sum(losses), rest_new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(trainable)
        return [v - o["lr"] * g for v, g in zip(trainable, grads, strict=True)], new, value

    variables = ([struct(*v.shape, dtype=v.dtype) for v in own]
                 for own in (model.trainable_variables, model.non_trainable_variables))  # fmt: skip
    return f, (*variables, struct(o["batch"], 8, 8, 2), struct(o["batch"], 3))


def search(o: Options) -> tuple:
    """A tree search of mctx with a learnt model."""

    def f(p: Any, state: jax.Array, key: jax.Array) -> Any:
        def recurrent(p: Any, key: jax.Array, action: jax.Array, embedding: jax.Array) -> Any:
            new = jnp.tanh(embedding @ p["next"] + p["act"][action])
            output = mctx.RecurrentFnOutput(
                reward=new.mean(-1) * o["reward"],
                discount=jnp.full(action.shape, o["discount"]),
                prior_logits=new @ p["pi"],
                value=(new @ p["v"])[:, 0],
            )
            return output, new

        root = mctx.RootFnOutput(prior_logits=state @ p["pi"], value=(state @ p["v"])[:, 0], embedding=state)
        out = o["policy"](p, key, root, recurrent, num_simulations=o["simulations"], max_depth=o["depth"], **o["more"])
        return out.action, out.action_weights

    p = {"next": struct(6, 6), "act": struct(4, 6), "pi": struct(6, 4), "v": struct(6, 1)}
    return f, (p, struct(3, 6), struct(dtype=KEY))


def process(o: Options) -> tuple:
    """The likelihood of a Gaussian process of tinygp."""

    def f(p: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            kernel = jnp.exp(p["amp"]) * o["kernel"](jnp.exp(p["scale"]))
            if o["linear"]:
                kernel = kernel + o["slope"] * tinygp.kernels.DotProduct()
            gp = tinygp.GaussianProcess(kernel, x, diag=jnp.exp(p["noise"]) + o["jitter"], mean=o["mean"])
            return -gp.log_probability(y) * o["weight"]

        value, grads = jax.value_and_grad(loss)(p)
        return value, jax.tree.map(lambda v, g: v - o["lr"] * g, p, grads)

    p = {"amp": struct(), "scale": struct(), "noise": struct()}
    return f, (p, struct(o["points"], 2), struct(o["points"]))


def transport(o: Options) -> tuple:
    """Regularised optimal transport of ott between two clouds."""

    def f(x: jax.Array, y: jax.Array) -> Any:
        def loss(x: jax.Array) -> jax.Array:
            geometry = pointcloud.PointCloud(x, y, cost_fn=o["cost"](), epsilon=o["epsilon"])
            problem = linear_problem.LinearProblem(geometry, tau_a=o["tau"])
            solver = sinkhorn.Sinkhorn(threshold=o["threshold"], max_iterations=o["most"], lse_mode=o["lse"],
                                       inner_iterations=o["inner"])  # fmt: skip
            return solver(problem).reg_ot_cost * o["weight"]

        return jax.value_and_grad(loss)(x)

    return f, (struct(o["points"], 3), struct(5, 3))


def inner(o: Options) -> tuple:
    """A regularised regression solved within the loss, by jaxopt, differentiated implicitly or unrolled."""

    def f(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        def objective(v: jax.Array, hyper: jax.Array) -> jax.Array:
            return o["loss"](y, x @ v).mean() + hyper * jnp.sum(v**2) * o["ridge"]

        def outer(hyper: jax.Array) -> jax.Array:
            solver = o["solver"](objective, maxiter=o["most"], tol=o["tol"], implicit_diff=o["implicit"], **o["more"])
            return jnp.sum(solver.run(w, hyper).params ** 2) + o["tax"] * hyper

        return jax.value_and_grad(outer)(w[0] ** 2)

    return f, (struct(3), struct(7, 3), struct(7))


def flow(o: Options) -> tuple:
    """Density estimation by flows of flowjax."""
    base = flowjax.distributions.Normal(jnp.zeros(3)) if o["normal"] else flowjax.distributions.Logistic(jnp.zeros(3))

    def made() -> Any:
        return o["flow"](jax.random.key(1), base_dist=base, nn_width=o["width"], nn_depth=1, flow_layers=o["layers"],
                         invert=o["invert"], **o["more"])  # fmt: skip

    shapes = eqx.filter_eval_shape(made)
    dynamic, static = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def f(p: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            return -eqx.combine(p, static).log_prob(x * o["gain"]).mean()

        return jax.value_and_grad(loss, allow_int=True)(p)

    return f, (dynamic, struct(o["batch"], 3))


def states(o: Options) -> tuple:
    """The likelihood of a linear Gaussian state space model of dynamax."""

    def f(p: Any, y: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            initial = ssm.ParamsLGSSMInitial(jnp.zeros(3), jnp.eye(3) * o["spread"])
            dynamics = ssm.ParamsLGSSMDynamics(p["f"], jnp.zeros(3), jnp.zeros((3, 0)), jnp.eye(3) * o["q"])
            emissions = ssm.ParamsLGSSMEmissions(p["h"], jnp.zeros(2), jnp.zeros((2, 0)), jnp.eye(2) * o["r"])
            params = ssm.ParamsLGSSM(initial, dynamics, emissions)
            filtered = (ssm.lgssm_smoother if o["smooth"] else ssm.lgssm_filter)(params, y)
            return -filtered.marginal_loglik + o["penalty"] * jnp.sum(jnp.abs(p["f"]))

        grads = jax.grad(loss)(p)
        return jax.tree.map(lambda v, g: v - o["lr"] * g, p, grads)

    return f, ({"f": struct(3, 3), "h": struct(2, 3)}, struct(o["steps"], 2))


def equivariant(o: Options) -> tuple:
    """Messages by spherical harmonics of e3nn, a tensor product, a gate."""

    def f(p: Any, x: jax.Array, r: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            rays = e3nn_jax.spherical_harmonics(o["irreps"], r, normalize=o["normalize"], normalization=o["norm"])
            features = e3nn_jax.IrrepsArray("4x0e", x)
            product = e3nn_jax.tensor_product(features, rays)
            length = jnp.linalg.norm(r, axis=-1) + o["tiny"]
            basis = e3nn_jax.bessel(length, 5, o["cut"]) * e3nn_jax.poly_envelope(3, 2, o["cut"])(length)[:, None]
            weight = o["act"](basis @ p["radial"]) @ p["out"]
            mixed = product.array * weight[:, :1]
            return jnp.sum(mixed**2) / o["neighbours"]

        return jax.value_and_grad(loss)(p)

    return f, ({"radial": struct(5, 8), "out": struct(8, 2)}, struct(6, 4), struct(6, 3))


def sampler(o: Options) -> tuple:
    """Steps of a Markov chain of blackjax in a scan."""

    def f(x: jax.Array, data: jax.Array, key: jax.Array) -> Any:
        def density(x: jax.Array) -> jax.Array:
            fit = jnp.sum(jax.nn.log_sigmoid(data @ x) * o["weight"])
            return fit - o["prior"] * jnp.sum(x**2)

        kernel = o["algorithm"](density, o["step"], **o["more"])

        def one(state: Any, key: jax.Array) -> Any:
            state, _ = kernel.step(key, state)
            return state, state.position * o["thin"]

        return jax.lax.scan(one, kernel.init(x), jax.random.split(key, o["draws"]))[1].mean(0)

    return f, (struct(3), struct(8, 3), struct(dtype=KEY))


def evolution(o: Options) -> tuple:
    """A generation of an evolution strategy of evosax."""
    solution = jnp.zeros(4)
    strategy = o["strategy"](population_size=o["population"], solution=solution, **o["more"])
    params = strategy.default_params

    def f(state: Any, key: jax.Array) -> Any:
        k1, k2 = jax.random.split(key)
        population, state = strategy.ask(k1, state, params)
        fitness = jnp.sum((population - o["target"]) ** 2, -1) + o["noise"] * jnp.sum(jnp.abs(population), -1)
        state, _ = strategy.tell(k2, population, fitness, state, params)
        return state, fitness.min()

    state = jax.eval_shape(lambda k: strategy.init(k, solution, params), jax.random.key(0))
    return f, (state, struct(dtype=KEY))


def pixels(o: Options) -> tuple:
    """Augmentations of dm_pix and a contrastive loss between two views."""

    def view(image: jax.Array, key: jax.Array) -> jax.Array:
        k1, k2, k3 = jax.random.split(key, 3)
        image = dm_pix.random_brightness(k1, image, o["brightness"])
        image = dm_pix.random_flip_left_right(k2, image, probability=o["flip"])
        image = dm_pix.adjust_gamma(image, o["gamma"]) if o["gammas"] else image
        image = dm_pix.gaussian_blur(image, o["sigma"], o["kernel"])
        return dm_pix.random_crop(k3, image, (o["crop"], o["crop"], 3))

    def f(w: jax.Array, images: jax.Array, key: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            keys = jax.random.split(key, 2)
            left, right = (jax.vmap(view)(images, jax.random.split(k, images.shape[0])) for k in keys)
            u, v = (o["pool"](t, (1, 2)) @ w for t in (left, right))
            u = u / (jnp.linalg.norm(u, axis=-1, keepdims=True) + o["tiny"])
            logits = u @ v.T / o["temperature"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(u))).mean()

        return w - o["lr"] * jax.grad(loss)(w)

    return f, (struct(3, 5), struct(4, 12, 12, 3), struct(dtype=KEY))


def poses(o: Options) -> tuple:
    """Registration of points on a Lie group of jaxlie."""

    def f(delta: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        def loss(delta: jax.Array) -> jax.Array:
            pose = jaxlie.SE3.exp(delta * o["gain"])
            pose = pose.inverse() if o["inverse"] else pose
            error = jax.vmap(pose.apply)(x) - y
            robust = o["robust"](error, delta=o["delta"])
            return jnp.sum(robust) + o["prior"] * jnp.sum(pose.log() ** 2)

        def step(delta: jax.Array, _: Any) -> Any:
            g = jax.grad(loss)(delta)
            return delta - o["lr"] * g, jnp.linalg.norm(g, ord=o["order"])

        return jax.lax.scan(step, delta, None, length=o["steps"])

    return f, (struct(6), struct(5, 3), struct(5, 3))


def springs(o: Options) -> tuple:
    """A chain of masses in the manner of brax: contacts, an integrator, control through the simulation."""

    def f(p: Any, x: jax.Array, v: jax.Array) -> Any:
        def force(x: jax.Array, v: jax.Array) -> jax.Array:
            gap = x[1:] - x[:-1]
            length = jnp.sqrt(jnp.sum(gap**2, -1, keepdims=True) + o["tiny"])
            pull = o["stiff"] * (length - o["rest"]) * gap / length
            inner = jnp.zeros_like(x).at[:-1].add(pull).at[1:].add(-pull)
            contact = o["contact"] * jnp.maximum(-x[:, 2:], 0.0) * jnp.array([0.0, 0.0, 1.0])
            return inner + contact - o["damp"] * v - jnp.array([0.0, 0.0, o["gravity"]])

        def tick(c: Any, _: Any) -> Any:
            x, v = c
            action = jnp.tanh(jnp.concatenate([x, v], -1) @ p["policy"])
            a = force(x, v) + action * o["power"]
            if o["explicit"]:
                x, v = x + o["dt"] * v, v + o["dt"] * a
            else:
                v = v + o["dt"] * a
                x = x + o["dt"] * v
            cost = jnp.mean(x[-1] ** 2) + o["effort"] * jnp.mean(action**2)
            return (x, v), cost

        def loss(p: Any) -> jax.Array:
            run = tick
            for _ in range(o["nest"]):
                run = jax.checkpoint(run)
            (x_end, _), costs = jax.lax.scan(run, (x, v), None, length=o["steps"], unroll=o["unroll"])
            return costs.sum() + o["terminal"] * jnp.sum(x_end**2)

        g = jax.grad(loss)(p)
        return jax.tree.map(lambda w, d: w - o["lr"] * jnp.clip(d, -o["clip"], o["clip"]), p, g)

    return f, ({"policy": struct(6, 3)}, struct(o["masses"], 3), struct(o["masses"], 3))


def partitioned(o: Options) -> tuple:
    """A layer whose weights and activations are partitioned, microbatches accumulated."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def f(p: Any, x: jax.Array) -> Any:
        def loss(p: Any, x: jax.Array) -> jax.Array:
            h = o["act"](x.astype(o["compute"]) @ p["up"].astype(o["compute"]))
            h = jax.lax.with_sharding_constraint(h, NamedSharding(mesh, o["hidden"]))
            y = h @ p["down"].astype(o["compute"])
            return jnp.mean(jnp.square(y).astype(F32)) * o["scale"]

        def micro(total: Any, x: jax.Array) -> Any:
            g = jax.grad(loss)(p, x)
            return jax.tree.map(jnp.add, total, g), None

        zero = jax.tree.map(jnp.zeros_like, p)
        total, _ = jax.lax.scan(micro, zero, x.reshape(o["micro"], -1, 8))
        return jax.tree.map(lambda w, g: w * (1 - o["decay"]) - o["lr"] / o["micro"] * g, p, total)

    up = jax.ShapeDtypeStruct((8, 12), F32, sharding=NamedSharding(mesh, o["up"]))
    down = jax.ShapeDtypeStruct((12, 8), F32, sharding=NamedSharding(mesh, P("model", None)))
    x = jax.ShapeDtypeStruct((16, 8), F32, sharding=NamedSharding(mesh, P("data")))
    return f, ({"up": up, "down": down}, x), *o["donate"]


def adam(lr: float = 1e-3, clip: float = 1.0, decay: float = 0.01, **more: Any) -> Any:
    return lambda: optax.chain(optax.clip_by_global_norm(clip), optax.adamw(lr, weight_decay=decay, **more))


POLICY = jax.checkpoint_policies
rational = flowjax.bijections.RationalQuadraticSpline
coupling, autoregressive = flowjax.flows.coupling_flow, flowjax.flows.masked_autoregressive_flow
warm = optax.warmup_cosine_decay_schedule
DEFAULTS: dict[Callable, Options] = {
    trained: dict(heads=2, centred=True, eps=1e-5, precision=None, divisor=3.0, softmax=F32, fill=-1e9, axis=-1,
                  bias=False, pre=True, act=jax.nn.gelu, drop=0.1, residual=True, diagonal=0, window=99,
                  compute=F32, layers=2, remat=False, policy=None, scan=True, tied=True, smooth=0.06, stopped=False,
                  scaled=128.0, z=2e-4, tx=adam(), hidden=20, batch=3, length=7, donate=()),
    image_model: dict(stride=1, padding="same", bias=True, momentum=0.99, eps=1e-3, norm=True, act="relu", max=True,
                      cell=keras.layers.LSTM, units=6, backwards=False, drop=0.25, l2=3e-4, logits=True, smooth=0.0,
                      training=True, lr=0.05, batch=3),
    search: dict(reward=0.7, discount=0.97, simulations=6, depth=None, policy=mctx.gumbel_muzero_policy, more={}),
    process: dict(kernel=tinygp.kernels.ExpSquared, linear=False, slope=0.35, jitter=1e-4, mean=0.0, weight=0.6,
                  lr=0.02, points=8),
    transport: dict(cost=costs.SqEuclidean, epsilon=0.05, tau=1.0, threshold=1e-3, most=40, lse=True, inner=10,
                    weight=0.8, points=6),
    inner: dict(loss=lambda y, z: (y - z) ** 2, ridge=0.3, solver=jaxopt.GradientDescent, most=20, tol=1e-3,
                implicit=True, tax=0.015, more={"stepsize": 0.05}),
    flow: dict(normal=True, flow=coupling, width=8, layers=2, invert=True, more={}, gain=1.1, batch=5),
    states: dict(spread=0.4, q=0.2, r=0.6, smooth=False, penalty=0.07, lr=0.003, steps=6),
    equivariant: dict(irreps="0e + 1o", normalize=True, norm="component", tiny=1e-6, cut=2.5, act=jax.nn.silu,
                      neighbours=4.5),
    sampler: dict(weight=1.3, prior=0.25, algorithm=blackjax.mala, step=0.15, more={}, thin=0.5, draws=5),
    evolution: dict(strategy=evosax.algorithms.Open_ES, population=8, target=0.35, noise=0.01, more={}),
    pixels: dict(brightness=0.3, flip=0.5, gamma=1.6, gammas=True, sigma=1.2, kernel=5, crop=10, pool=jnp.mean,
                 tiny=1e-6, temperature=0.07, lr=0.3),
    poses: dict(gain=0.9, inverse=False, robust=optax.losses.huber_loss, delta=0.4, prior=0.02, lr=0.06, order=2,
                steps=5),
    springs: dict(tiny=1e-8, stiff=45.0, rest=0.3, contact=200.0, damp=0.15, gravity=9.81, power=1.7, explicit=False,
                  dt=0.004, effort=0.03, nest=0, steps=8, unroll=1, terminal=2.5, lr=0.011, clip=0.7, masses=4),
    partitioned: dict(act=jax.nn.relu, compute=F32, hidden=P("data", "model"), scale=3.5, micro=4, decay=0.001,
                      lr=0.07, up=P(None, "model"), donate=()),
}  # fmt: skip
FIFTH: list[Pair] = [
    ("hand eps", trained, {}, {"eps": 1e-6}, r"1e-05 -> 1e-06"),
    ("hand divisor", trained, {}, {"divisor": 4.0}, r"3 -> 4|0\.3333.* -> 0\.25"),
    ("hand post norm", trained, {}, {"pre": False}, r"operand|reads|exchanged|add .*(?:multiply|dot)|replaced"),
    ("hand residual", trained, {}, {"residual": False}, r"^(?:in .*: )?- .*add|add"),
    ("hand centred", trained, {}, {"centred": False}, r"- .*(?:subtract|reduce)|subtract"),
    ("hand activation", trained, {}, {"act": jax.nn.relu}, r"tanh|max|relu|gelu|erf"),
    ("hand dropout", trained, {}, {"drop": 0.2}, r"0\.9 -> 0\.8|1\.1111.* -> 1\.25|0\.1 -> 0\.2"),
    ("hand diagonal", trained, {}, {"diagonal": 1}, r"0 -> 1|constant|\+ .*(?:subtract|add|compare)"),
    ("hand window", trained, {}, {"window": 3}, r"99 -> 3"),
    ("hand fill", trained, {}, {"fill": -1e4}, r"-1(?:e\+?0?9|000000000)(?:\.0)? -> -1(?:e\+?0?4|0000)"),
    ("hand axis", trained, {}, {"axis": -2}, r"reduce.*dim|axis|dimensions"),
    ("hand softmax dtype", trained, {"compute": jnp.bfloat16}, {"compute": jnp.bfloat16, "softmax": jnp.bfloat16},
     r"bf16|convert"),
    ("hand compute", trained, {}, {"compute": jnp.bfloat16}, r"bf16"),
    ("hand precision", trained, {}, {"precision": jax.lax.Precision.HIGHEST}, r"precision|highest"),
    ("hand remat", trained, {}, {"remat": True}, r"remat"),
    ("hand policy", trained, {"remat": True}, {"remat": True, "policy": POLICY.dots_saveable}, r"remat|saved"),
    ("hand unrolled", trained, {}, {"scan": False}, r"while|loop|scan"),
    ("hand tied", trained, {}, {"tied": False}, r"^\+ .*parameter"),
    ("hand layers", trained, {}, {"layers": 3}, r"2 -> 3 steps|\[2,16.* -> f32\[3,16"),
    ("hand heads", trained, {}, {"heads": 4}, r"parameters? .*\[2,16,2,8\] -> f32\[2,16,4,4\]"),
    ("hand smoothing", trained, {}, {"smooth": 0.1}, r"0\.94.* -> 0\.9|0\.0025.* -> 0\.0041"),
    ("hand stop gradient", trained, {}, {"stopped": True}, r"- .*(?:exp|divide|multiply|add)"),
    ("hand loss scale", trained, {}, {"scaled": 1024.0}, r"128 -> 1024|0\.0078125 -> 0\.000976"),
    ("hand rate", trained, {}, {"tx": adam(3e-3)}, r"0\.001 -> -?0\.003"),
    ("hand clip", trained, {}, {"tx": adam(clip=0.5)}, r"1 -> 0\.5|constant .*0\.5|\+ .*multiply"),
    ("hand decay", trained, {}, {"tx": adam(decay=0.1)}, r"0\.01 -> -?0\.1"),
    ("hand muon", trained, {}, {"tx": lambda: optax.contrib.muon(1e-3)}, r"dot|while|parameter|^[+-] "),
    ("hand bias", trained, {}, {"bias": True}, r"^\+ .*(?:parameter|bias)"),
    ("hand donation", trained, {}, {"donate": (0, 1)}, r"donation of argument"),
    ("hand batch", trained, {}, {"batch": 4}, r"\[3,7\] -> s32\[4,7\]"),
    ("keras activation", image_model, {}, {"act": "elu"}, r"max|exp|relu|elu"),
    ("keras momentum", image_model, {}, {"momentum": 0.9}, r"0\.99.* -> 0\.9|0\.01.* -> 0\.1"),
    ("keras dropout", image_model, {}, {"drop": 0.4}, r"0\.75 -> 0\.6|0\.25 -> 0\.4|1\.333.* -> 1\.66"),
    ("keras stride", image_model, {}, {"stride": 2}, r"stride"),
    ("keras pooling", image_model, {}, {"max": False}, r"max|select-and-scatter|reduce-window|divide"),
    ("keras cell", image_model, {}, {"cell": keras.layers.GRU}, r"parameters? |while|logistic|tanh"),
    ("keras l2", image_model, {}, {"l2": 1e-3}, r"0\.000[36].* -> 0\.00[12]"),
    ("keras inference", image_model, {}, {"training": False}, r"- .*(?:reduce|rng|shift|xor|parameter|output|convert)"),
    ("keras no norm", image_model, {}, {"norm": False}, r"^- .*(?:parameter|rsqrt)"),
    ("search simulations", search, {}, {"simulations": 9}, r"6 -> 9|\[.*7.*\] -> .*10"),
    ("search discount", search, {}, {"discount": 0.9}, r"0\.97 -> 0\.9"),
    ("search reward", search, {}, {"reward": 0.4}, r"0\.7 -> 0\.4|0\.11666.* -> 0\.0666"),
    ("search depth", search, {}, {"depth": 3}, r"6 -> 3|[57] -> 3|-1|2"),
    ("process kernel", process, {}, {"kernel": tinygp.kernels.Matern32}, r"sqrt|exp|abs|multiply"),
    ("process jitter", process, {}, {"jitter": 1e-6}, r"0\.0001 -> 1e-06"),
    ("process mean", process, {}, {"mean": 0.5}, r"0 -> 0\.5|\+ .*(?:subtract|add)|0\.5"),
    ("process linear", process, {}, {"linear": True}, r"\+ .*(?:dot|multiply|reduce|add)"),
    ("transport epsilon", transport, {}, {"epsilon": 0.1}, r"0\.05 -> 0\.1|20 -> 10"),
    ("transport cost", transport, {}, {"cost": costs.Euclidean}, r"sqrt"),
    ("transport most", transport, {}, {"most": 80}, r"40 -> 80|4 -> 8|39 -> 79|\[4\] -> f32\[8\]"),
    ("transport tau", transport, {}, {"tau": 0.9}, r"\+ |constant|multiply|replaced"),
    ("inner ridge", inner, {}, {"ridge": 0.5}, r"0\.3 -> 0\.5|0\.6 -> 1"),
    ("inner unrolled", inner, {}, {"implicit": False}, r"while|conditional|replaced|solve|dot|gradient"),
    ("inner solver", inner, {}, {"solver": jaxopt.LBFGS, "more": {}}, r"\+ |replaced|while|\[10"),
    ("inner tolerance", inner, {}, {"tol": 1e-5}, r"0\.001 -> 1e-05"),
    ("flow width", flow, {}, {"width": 12}, r"parameters? .*8.* -> .*12"),
    ("flow layers", flow, {}, {"layers": 3}, r"2 -> 3 steps|parameters? .*\[2,.* -> .*\[3,"),
    ("flow spline", flow, {}, {"more": {"transformer": rational(knots=4, interval=3)}},
     r"parameters? |softmax|exp|^\+ "),
    ("states noise", states, {}, {"q": 0.5}, r"0\.2 -> 0\.5|constant"),
    ("states steps", states, {}, {"steps": 9}, r"6 -> 9 steps|\[6,2\] -> f32\[9,2\]"),
    ("states penalty", states, {}, {"penalty": 0.2}, r"0\.07 -> -?0\.2"),
    ("rays cut", equivariant, {}, {"cut": 3.5}, r"2\.5 -> 3\.5|0\.4 -> 0\.285|constant"),
    ("rays activation", equivariant, {}, {"act": jnp.tanh}, r"tanh|logistic|exp"),
    ("rays order", equivariant, {}, {"irreps": "0e + 1o + 2e"}, r"\[|concatenate|multiply|\+ "),
    ("sampler step", sampler, {}, {"step": 0.3}, r"0\.15 -> 0\.3|0\.3 -> 0\.6|0\.547.* -> 0\.774"),
    ("sampler prior", sampler, {}, {"prior": 0.75}, r"0\.25 -> 0\.75|0\.5 -> 1\.5"),
    ("sampler draws", sampler, {}, {"draws": 8}, r"5 -> 8 steps"),
    ("evolution target", evolution, {}, {"target": 0.6}, r"0\.35 -> 0\.6"),
    ("evolution population", evolution, {}, {"population": 12}, r"\[8,4\]|\[4,4\]|8 -> 12|4 -> 6|iota"),
    ("pixels gamma", pixels, {}, {"gamma": 2.2}, r"1\.6 -> 2\.2|0\.6 -> 1\.2"),
    ("pixels blur", pixels, {}, {"sigma": 2.0}, r"constant|1\.2 -> 2|-?0\.34.* -> -?0\.125|-0\.347"),
    ("pixels crop", pixels, {}, {"crop": 8}, r"10.* -> .*8|slice"),
    ("pixels temperature", pixels, {}, {"temperature": 0.2}, r"0\.07 -> 0\.2|14\.28.* -> 5"),
    ("poses delta", poses, {}, {"delta": 0.8}, r"0\.4 -> 0\.8|0\.2 -> 0\.4"),
    ("poses inverse", poses, {}, {"inverse": True}, r"\+ .*(?:negate|multiply|sub)|negate"),
    ("poses steps", poses, {}, {"steps": 7}, r"5 -> 7 steps"),
    ("springs gravity", springs, {}, {"gravity": 1.62}, r"9\.81.* -> 1\.62|constant"),
    ("springs dt", springs, {}, {"dt": 0.002}, r"0\.004 -> 0\.002"),
    ("springs explicit", springs, {}, {"explicit": True}, r"operand|reads|instead"),
    ("springs remat", springs, {}, {"nest": 1}, r"remat"),
    ("springs unrolled", springs, {}, {"unroll": 2}, r"8 -> 4 steps|unroll"),
    ("springs clip", springs, {}, {"clip": 0.3}, r"-?0\.7 -> -?0\.3"),
    ("partitioned hidden", partitioned, {}, {"hidden": P("data", None)}, r"shard|all-|collective|reshard"),
    ("partitioned micro", partitioned, {}, {"micro": 2}, r"4 -> 2 steps|\[4,4,8\].*\[2,8,8\]"),
    ("partitioned compute", partitioned, {}, {"compute": jnp.bfloat16}, r"bf16"),
    ("partitioned decay", partitioned, {}, {"decay": 0.005}, r"0\.999 -> 0\.995"),
]  # fmt: skip
SIXTH: list[Pair] = [
    ("hand hidden", trained, {}, {"hidden": 28}, r"parameters? .*20.* -> .*28"),
    ("hand length", trained, {}, {"length": 9}, r"\[3,7\] -> s32\[3,9\]"),
    ("hand z", trained, {}, {"z": 1e-3}, r"0\.0002 -> 0\.001|constant .* -> .*"),
    ("hand prevented", trained, {"remat": True}, {"remat": True, "policy": POLICY.everything_saveable},
     r"remat|saved"),
    ("hand betas", trained, {}, {"tx": adam(b1=0.8)}, r"0\.9 -> 0\.8|0\.1.* -> 0\.2"),
    ("hand moment dtype", trained, {}, {"tx": adam(mu_dtype=jnp.bfloat16)}, r"parameters? .*f32\[.*-> bf16"),
    ("hand schedule", trained, {"tx": lambda: optax.adam(warm(0.0, 1e-3, 10, 100))},
     {"tx": lambda: optax.adam(warm(0.0, 1e-3, 20, 100))}, r"10 -> 20|0\.1 -> 0\.05|90 -> 80"),
    ("hand lookahead", trained, {"tx": lambda: optax.contrib.schedule_free_adamw(0.01)},
     {"tx": lambda: optax.contrib.schedule_free_adamw(0.01, b1=0.8)}, r"0\.9 -> 0\.8|0\.1.* -> 0\.2|1\.11.* -> 1\.25"),
    ("hand adafactor", trained, {"tx": lambda: optax.adafactor(0.01)},
     {"tx": lambda: optax.adafactor(0.01, multiply_by_parameter_scale=False)}, r"- .*(?:reduce|sqrt|max|multiply)"),
    ("hand lion", trained, {"tx": lambda: optax.lion(1e-4)}, {"tx": lambda: optax.sgd(1e-4, momentum=0.9)},
     r"sign|- .*multiply|compare"),
    ("hand eps of adam", trained, {}, {"tx": adam(eps=1e-6)}, r"1e-08 -> 1e-06"),
    ("hand nesterov", trained, {}, {"tx": adam(nesterov=True)}, r"\+ .*(?:add|multiply)"),
    ("hand swish", trained, {}, {"act": jax.nn.silu}, r"tanh|logistic|exp|gelu|erf"),
    ("hand donated state", trained, {"donate": (0, 1)}, {"donate": (0,)}, r"donation of argument"),
    ("keras bias", image_model, {}, {"bias": False}, r"^- .*(?:parameter|bias|add)"),
    ("keras padding", image_model, {}, {"padding": "valid"}, r"pad"),
    ("keras units", image_model, {}, {"units": 5}, r"parameters? .*24.* -> .*20"),
    ("keras backwards", image_model, {}, {"backwards": True}, r"reverse|subtract"),
    ("keras eps", image_model, {}, {"eps": 1e-5}, r"0\.001 -> 1e-05"),
    ("keras smoothing", image_model, {}, {"smooth": 0.2}, r"\+ .*(?:multiply|add)|0\.8"),
    ("keras probabilities", image_model, {}, {"logits": False}, r"log|exp|clamp|divide|softmax|max"),
    ("keras rate", image_model, {}, {"lr": 0.02}, r"0\.05 -> -?0\.02"),
    ("search policy", search, {}, {"policy": mctx.muzero_policy}, r"\+ |- |replaced"),
    ("search considered", search, {}, {"more": {"max_num_considered_actions": 2}}, r"constant|\[|4 -> 2|slice"),
    ("process weight", process, {}, {"weight": 0.9}, r"-?0\.6 -> -?0\.9"),
    ("process points", process, {}, {"points": 10}, r"\[8,2\] -> f32\[10,2\]"),
    ("process rate", process, {}, {"lr": 0.05}, r"0\.02 -> -?0\.05"),
    ("transport scaling form", transport, {}, {"lse": False}, r"exp|log|dot|- |\+ "),
    ("transport threshold", transport, {}, {"threshold": 1e-2}, r"0\.001 -> 0\.01"),
    ("transport inner", transport, {}, {"inner": 5}, r"10 -> 5|4 -> 8|\[4\]"),
    ("inner stepsize", inner, {}, {"more": {"stepsize": 0.02}}, r"0\.05 -> -?0\.02"),
    ("inner loss", inner, {}, {"loss": lambda y, z: jnp.log(jnp.cosh(y - z))}, r"log|cosh|tanh|exp|multiply"),
    ("inner most", inner, {}, {"most": 35}, r"20 -> 35|19 -> 34"),
    ("flow autoregressive", flow, {}, {"flow": autoregressive}, r"parameters? |while|\+ |- |replaced"),
    ("flow inverted", flow, {}, {"invert": False}, r"- |\+ |replaced|operand|subtract|divide|multiply"),
    ("flow base", flow, {}, {"normal": False}, r"log|exp|multiply|softplus"),
    ("flow gain", flow, {}, {"gain": 1.4}, r"1\.1 -> 1\.4"),
    ("states smoother", states, {}, {"smooth": True}, r"\+ |in B only|output"),
    ("states rate", states, {}, {"lr": 0.01}, r"0\.003 -> -?0\.01"),
    ("rays component", equivariant, {}, {"norm": "integral"}, r"constant|1\.73.* -> 0\.48|1 -> 0\.28|multiply"),
    ("rays neighbours", equivariant, {}, {"neighbours": 7.5}, r"4\.5 -> 7\.5|0\.222.* -> 0\.133|0\.444.* -> 0\.266"),
    ("sampler hmc", sampler, {}, {"algorithm": blackjax.hmc, "more": {"inverse_mass_matrix": jnp.ones(3),
                                  "num_integration_steps": 3}}, r"while|\+ |- |replaced"),
    ("sampler weight", sampler, {}, {"weight": 1.9}, r"1\.3 -> -?1\.9"),
    ("evolution strategy", evolution, {}, {"strategy": evosax.algorithms.SNES}, r"parameters? |\+ |- |replaced"),
    ("evolution noise", evolution, {}, {"noise": 0.05}, r"0\.01 -> 0\.05"),
    ("pixels gammaless", pixels, {}, {"gammas": False}, r"- .*(?:power|log|exp|multiply)"),
    ("pixels flip", pixels, {}, {"flip": 0.2}, r"0\.5 -> 0\.2"),
    ("pixels kernel", pixels, {}, {"kernel": 3}, r"\[5|iota|window|pad|constant"),
    ("pixels pool", pixels, {}, {"pool": jnp.max}, r"reduce|max"),
    ("poses robust", poses, {}, {"robust": lambda e, delta: jnp.log1p((e / delta) ** 2)}, r"log|abs|min"),
    ("poses order", poses, {}, {"order": 1}, r"sqrt|abs|multiply"),
    ("poses prior", poses, {}, {"prior": 0.05}, r"0\.02 -> 0\.05|0\.04 -> 0\.1"),
    ("springs stiffness", springs, {}, {"stiff": 60.0}, r"45 -> 60"),
    ("springs masses", springs, {}, {"masses": 6}, r"\[4,3\] -> f32\[6,3\]"),
    ("springs length", springs, {}, {"steps": 12}, r"8 -> 12 steps"),
    ("springs effort", springs, {}, {"effort": 0.09},
     r"0\.03 -> 0\.09|0\.01 -> 0\.03|0\.0025 -> 0\.0075|0\.005 -> 0\.015"),
    ("partitioned weights", partitioned, {}, {"up": P("model", None)}, r"shard|all-|collective|dynamic-slice|dot"),
    ("partitioned activation", partitioned, {}, {"act": jnp.tanh}, r"tanh|max|compare"),
    ("partitioned donation", partitioned, {}, {"donate": (0,)}, r"donation of argument"),
    ("partitioned scale", partitioned, {}, {"scale": 5.5}, r"3\.5 -> 5\.5|(?:0\.)?\d+.* -> "),
]  # fmt: skip


if __name__ == "__main__":
    main(__doc__, {"fifth": FIFTH, "sixth": SIXTH}, partial(texts, defaults=DEFAULTS))
