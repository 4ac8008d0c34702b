"""Wrote the dumps in `fresh/` (jax 0.10.2 on a CPU): python dump_jax.py fresh"""

import gzip
import os
import sys
from functools import partial
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

WIDTH, HEADS, LAYERS = 16, 2, 3


def norm(x, gain):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * gain


def block(x, p):
    q, k, v = jnp.split(norm(x, p["gain1"]) @ p["qkv"], 3, -1)

    def heads(t):
        return t.reshape(t.shape[0], HEADS, -1).transpose(1, 0, 2)

    a = jax.nn.softmax(heads(q) @ heads(k).transpose(0, 2, 1) / np.sqrt(WIDTH // HEADS), -1) @ heads(v)
    x = x + a.transpose(1, 0, 2).reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(norm(x, p["gain2"]) @ p["up"]) @ p["down"], None


def loss(params, x, y):
    x, _ = jax.lax.scan(block, x, params)
    return ((x - y) ** 2).mean()


def train(params, x, y):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value


@jax.custom_vjp
def clip(x):
    return x


clip.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))


def custom(x, i):
    def grow(x):
        return jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2 + x, x)

    branch = jax.lax.switch(i, [jnp.sin, lambda x: clip(x) ** 3, grow], x).sum()
    grad = jax.grad(lambda x: jax.lax.cond(x[0] > 0, lambda: (clip(x) ** 2).sum(), lambda: jnp.sort(x)[1]))(x)
    noise = jax.random.uniform(jax.random.key(3), (4,))
    low = x.astype(jnp.float8_e4m3fn)
    conv = jax.lax.conv_general_dilated(x[None, None, :], x[None, None, :], (1,), "SAME")
    return branch, grad, noise, x.at[i].set(2.0), jnp.linalg.cholesky(jnp.outer(x, x)), low, jnp.fft.fft(x), conv


def collectives(w, x):
    w = jax.lax.all_gather(w, "a", tiled=True)
    y = jax.lax.ppermute(jax.lax.psum(w * 2, "b"), "a", [(0, 1), (1, 0)])
    y = jax.lax.psum_scatter(y, "a", tiled=True)
    return y + jax.lax.all_to_all(y, "b", 0, 0, tiled=True) + jax.lax.pmax(x, "a").sum()


def save(folder, name, function, *args, **options):
    lowered = jax.jit(function, **options).lower(*args)
    texts = {
        "stablehlo.mlir": lowered.as_text(),
        "loc.stablehlo.mlir": lowered.as_text(debug_info=True),
        "hlo.txt": lowered.as_text("hlo"),
        "opt.hlo.txt": lowered.compile().as_text(),
    }
    for kind, text in texts.items():
        with gzip.GzipFile(folder / f"{name}.{kind}.gz", "wb", mtime=0) as file:
            file.write(text.encode())


def main(folder):
    folder.mkdir(exist_ok=True)
    square, x = (LAYERS, WIDTH), jnp.ones((8, WIDTH))
    sizes = {"gain1": (), "gain2": (), "qkv": (3 * WIDTH,), "out": (WIDTH,), "up": (4 * WIDTH,)}
    params = {name: jnp.ones(square + size) for name, size in sizes.items()}
    params["down"] = jnp.ones((LAYERS, 4 * WIDTH, WIDTH))
    save(folder, "block", train, params, x, x, donate_argnums=0)
    save(folder, "custom", custom, jnp.arange(4.0), 1)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
    sharded = partial(jax.shard_map, mesh=mesh, in_specs=(P("a", "b"), P("b")), out_specs=P("a", "b"), check_vma=False)
    save(folder, "collectives", sharded(collectives), jnp.ones((8, 8)), jnp.ones((4,)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
