"""Wrote the dumps in `formats/` (jax 0.10.2 and torch 2.13 on a CPU): python dump_formats.py formats && rm -r raw"""

import gzip
import os
import sys
import tempfile
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_dump_to=raw --xla_dump_hlo_as_text --xla_dump_hlo_as_proto"

import jax
import jax.numpy as jnp
from jax import export

jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")
jax.config.update("jax_traceback_in_locations_limit", 2)


def loss(p, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["layers"])
    return jnp.mean((x @ p["head"]) ** 2)


@jax.jit
def step(p, x):
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(loss)(p, x))


def main(folder: Path) -> None:
    arguments = {"layers": jnp.ones((3, 4, 4)), "head": jnp.ones((4, 2))}, jnp.ones((8, 4))
    lowered = step.lower(*arguments)
    lowered.compile()
    for stage in ("before_optimizations", "cpu_after_optimizations"):
        for ending in ("txt", "hlo.pb"):
            [file] = Path("raw").glob(f"module_*.jit_step.{stage}.{ending}")
            keep(folder / "xla" / f"module_0001.jit_step.{stage}.{ending}.gz", file.read_bytes())
    with tempfile.TemporaryFile() as file:
        lowered.compiler_ir("stablehlo").operation.write_bytecode(file)
        file.seek(0)
        keep(folder / "step.mlirbc.gz", file.read())
    keep(folder / "step.mlir.gz", lowered.as_text(debug_info=True).encode())
    keep(folder / "step.export.mlirbc.gz", export.export(step)(*arguments).mlir_module_serialized)
    (folder / "step.jaxpr").write_text(f"{jax.make_jaxpr(step)(*arguments)}\n")


def keep(path: Path, data: bytes) -> None:
    path.write_bytes(gzip.compress(data, mtime=0))


if __name__ == "__main__":
    for name in ("", "xla"):
        Path(sys.argv[1], name).mkdir(exist_ok=True)
    main(Path(sys.argv[1]))
