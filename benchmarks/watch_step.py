"""Cost of `retrograd.graph.watch` at a step that changes nothing: least of 20 rounds of 1,000 steps, CPU time.

python benchmarks/watch_step.py > benchmarks/results/watch-step.md
"""

import platform
import sys
import time

import jax
import jax.numpy as jnp
import torch

import retrograd.graph

ROUNDS, STEPS = 20, 1000


def least(step) -> float:
    """Microseconds of CPU that a step takes."""
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(STEPS):
            step()
        times.append(time.process_time() - began)
    return min(times) / STEPS * 1e6


def costs(backend: str, compute) -> tuple[float, float]:
    """Of a step of the program alone, and of the watcher's."""
    with retrograd.graph.watch(backend, expect=4) as watcher:
        compute()
        watcher.step()
        return least(compute), least(watcher.step)


def main() -> None:
    x = jnp.ones((8, 4))
    jitted = jax.jit(lambda x: jnp.tanh(x).sum())
    model = torch.compile(torch.nn.Linear(4, 2), backend="aot_eager")
    data = torch.ones(8, 4)
    print("Written by `python benchmarks/watch_step.py`; least of 20 rounds of 1,000 steps, CPU time, one thread.\n")
    print("| watched | the step itself, us | watching it, us |")
    print("|---|---|---|")
    torch.set_num_threads(1)
    for name, backend, compute in (
        ("JAX: tanh and sum of 32 numbers", "jax", lambda: jitted(x)),
        ("torch.compile: Linear(4, 2), backend aot_eager", "compile", lambda: model(data)),
    ):
        own, watching = costs(backend, compute)
        print(f"| {name} | {own:.1f} | {watching:.1f} |")
    machine = platform.processor() or sys.platform
    print(f"\nPython {platform.python_version()}, jax {jax.__version__}, torch {torch.__version__}, {machine}")


if __name__ == "__main__":
    main()
