"""The benchmark of the norm family: each provider is checked, then timed, at each shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from retrograd.bench import harness
from retrograd.bench.correct import wrong_results
from retrograd.bench.harness import Data, Provider, Tensors, Work, check_names, guarded, make, timed
from retrograd.bench.providers import OPS, PROVIDERS, NormOp
from retrograd.bench.rows import Row, useful_bytes
from retrograd.bench.timing import Timer, host_us

Shape = tuple[int, int]

# Widths that train today at a constant number of rows, and the narrow ones at 32 Mi elements as well, where a launch
# costs a tenth of the time instead of a quarter; the widest ones, a ragged width, a launch-bound size.
SHAPES: list[Shape] = [
    *[(32768, 256), (131072, 256), (32768, 512), (65536, 512)],
    *[(32768, n) for n in (1024, 2048, 4096, 8192)],
    *[(16384, 16384), (8192, 32768), (4096, 65536), (2048, 131072), (4096, 2000), (512, 4096)],
]
SOME_SHAPES: list[Shape] = [
    *[(32768, 256), (131072, 256), (65536, 512)],
    *[(32768, n) for n in (1024, 2048, 4096)],
    *[(16384, 8192), (16384, 16384), (8192, 32768), (4096, 65536), (2048, 131072), (512, 4096)],
]
HOST_SHAPE: Shape = (512, 4096)
_PACKAGES = {"torch": "torch", "triton": "triton", "liger": "liger-kernel", "quack": "quack-kernels"}


@dataclass(frozen=True)
class Settings:
    """What is measured; `host`: host time, not device time.

    Without `shapes` it is `SHAPES` for rms_norm, `SOME_SHAPES` for the others, `HOST_SHAPE` for host time.
    """

    ops: tuple[str, ...] = tuple(OPS)
    shapes: tuple[Shape, ...] = ()
    providers: tuple[str, ...] = tuple(PROVIDERS)
    dtype: str = "bfloat16"
    max_seconds: float = float("inf")
    host: bool = False

    def __post_init__(self) -> None:
        check_names({"--ops": (self.ops, OPS), "--providers": (self.providers, PROVIDERS)})

    def jobs(self) -> list[Row]:
        """A row without times for each measurement; compiling takes longest and comes last."""
        rows = []
        for op in self.ops:
            usual = [HOST_SHAPE] if self.host else SHAPES if op == "rms_norm" else SOME_SHAPES
            for m, n in self.shapes or usual:
                rows += [Row(op, m, n, self.dtype, provider) for provider in self.providers]
        return sorted(rows, key=lambda row: row.provider == "compile")


def run(
    settings: Settings, timer: Timer, tell: Callable[[str], None], keep: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """Measure everything in `settings`.

    Args:
        settings: what.
        timer: how, and on which device.
        tell: given one line of progress at a time.
        keep: given each row as soon as it is complete.

    Returns:
        Rows by op, shape and provider. A provider that is missing has none; one that is wrong, fails or comes after
        `max_seconds` says so in `skipped`.
    """
    plan = harness.Plan(
        settings.jobs(), lambda row: _measured(row, timer, settings.host), lambda row: (row.op, row.m, row.n), _line,
        settings.providers, settings.max_seconds, machine(timer), copy=not settings.host,
    )  # fmt: skip
    return harness.run(plan, timer, tell, keep)


def machine(timer: Timer) -> dict[str, str]:
    """Name of the device and versions of everything that is compared."""
    return harness.machine(timer, _PACKAGES)


def _measured(row: Row, timer: Timer, host: bool) -> Row:
    """The row with its times, or with the reason why there are none."""
    op = OPS[row.op]
    provider = make(PROVIDERS, row.provider, op)

    def measure() -> Row:
        inputs, grads = next(_data(op, row, timer.device))
        bad = wrong_results(provider, op, inputs, grads)
        if bad:
            return replace(row, skipped=f"wrong: {bad}")
        if host:
            return replace(row, host_us=host_us(_both(provider, op, inputs, grads)))
        inputs = grads = {}
        sizes = [useful_bytes(op.name, way, row.m, row.n, row.dtype) for way in ("fwd", "bwd")]
        return timed(row, Work(provider, op.inputs, lambda: _data(op, row, timer.device), *sizes), timer)

    return guarded(row, timer.device, measure)


def _both(provider: Provider, op: NormOp, inputs: Tensors, grads: Tensors) -> Callable[[], object]:
    """One forward, and backward if there is one, with nothing of the harness in between."""
    if not provider.backward:
        return lambda: provider.call(inputs)
    leaves, grad_outs = [inputs[name] for name in op.inputs], [grads[name] for name in op.results]
    return lambda: torch.autograd.grad(provider.call(inputs), leaves, grad_outs)


def _data(op: NormOp, row: Row, device: str) -> Data:
    """Sets of inputs and gradients of the results without end; weight and bias are the same in all."""
    dtype = getattr(torch, row.dtype)
    # Not torch's own generator: a capture that failed leaves that one unusable.
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=dtype, generator=generator)

    weight, bias = (1 + 0.2 * normal(row.n)).requires_grad_(), (0.2 * normal(row.n)).requires_grad_()
    while True:
        x, residual = (normal(row.m, row.n) for _ in range(2))
        s = x + residual if op.add else x
        # Of the size of s and correlated with it, so that the projection in grad_x is not lost in rounding.
        grads = {name: s + 0.5 * normal(row.m, row.n) for name in op.results}
        known = {"x": x.requires_grad_(), "residual": residual.requires_grad_(), "weight": weight, "bias": bias}
        yield {name: known[name] for name in op.inputs}, grads


def _line(row: Row) -> str:
    parts = [f"{row.op} {row.m}x{row.n} {row.provider}:"]
    parts += [row.skipped] * bool(row.skipped)
    parts += [f"{way} {speed:.0f} GB/s" for way in ("fwd", "bwd") if (speed := row.gb_per_s(way))]
    parts += [f"{row.host_us:.1f} us host"] if row.host_us is not None else []
    parts += [f"({row.note})"] * bool(row.note)
    return " ".join(parts)
