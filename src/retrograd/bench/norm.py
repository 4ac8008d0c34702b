"""The benchmark of the norm family: each provider is checked, then timed, at each shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from retrograd.bench import harness, registry
from retrograd.bench.correct import wrong_results
from retrograd.bench.harness import Data, Prepared, Work, check_names, make
from retrograd.bench.providers import OPS, NormOp
from retrograd.bench.rows import WAYS, Row, in_words, rate
from retrograd.bench.timing import Timer

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
# On a CPU, where a pass over 64 MiB takes 10 ms: square, tall, wide.
CPU_SHAPES: list[Shape] = [(4096, 4096), (16384, 1024), (1024, 16384)]
HOST_SHAPE: Shape = (512, 4096)
DTYPES = ("bfloat16", "float16", "float32")
_PACKAGES = {"torch": "torch", "triton": "triton", "liger": "liger-kernel", "quack": "quack-kernels"}


@dataclass(frozen=True)
class Settings:
    """What is measured; `host`: host time, not device time.

    Without `shapes` it is `SHAPES` for rms_norm, `SOME_SHAPES` for the others, `CPU_SHAPES` on a CPU, `HOST_SHAPE` for
    host time; without `providers` and `dtypes` what is usual on `device`.
    """

    ops: tuple[str, ...] = tuple(OPS)
    shapes: tuple[Shape, ...] = ()
    providers: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    max_seconds: float = float("inf")
    host: bool = False
    device: str = "cuda"
    rounds: int | None = None

    def __post_init__(self) -> None:
        known = registry.names(self.ops)
        check_names({"--ops": (self.ops, OPS), "--dtypes": (self.dtypes, DTYPES)})
        check_names({"--providers": (self.providers, known)})
        usual = ("bfloat16",) if self.device == "cuda" else ("float32", "bfloat16")
        object.__setattr__(self, "dtypes", self.dtypes or usual)
        object.__setattr__(self, "providers", self.providers or registry.names(self.ops, self.device))

    def jobs(self) -> list[Row]:
        """A row without times for each measurement; compiling takes longest and comes last."""
        rows = []
        for op in self.ops:
            for m, n in self.shapes or self._usual_shapes(op):
                rows += [Row(op, m, n, dtype, provider) for dtype in self.dtypes for provider in self.providers]
        return sorted(rows, key=lambda row: row.provider == "compile")

    def _usual_shapes(self, op: str) -> list[Shape]:
        if self.host:
            return [HOST_SHAPE]
        if self.device == "cpu":
            return CPU_SHAPES
        return SHAPES if op == "rms_norm" else SOME_SHAPES


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
        settings.jobs(), lambda row: _prepared(row, timer), _line, settings.providers, settings.max_seconds,
        machine(timer), settings.host, settings.rounds,
    )  # fmt: skip
    return harness.run(plan, timer, tell, keep)


def machine(timer: Timer) -> dict[str, str]:
    """Name of the device and versions of everything that is compared."""
    return harness.machine(timer, _PACKAGES)


def _prepared(row: Row, timer: Timer) -> Prepared[Row]:
    """The row with its work, or with the reason why there is none."""
    op = OPS[row.op]
    provider = make(row.op, row.provider, op)
    inputs, grads = next(_data(op, row, timer.device))
    bad = wrong_results(provider, op, inputs, grads)
    if bad:
        return replace(row, skipped=f"wrong: {bad}"), None
    sizes = [row.useful_bytes(way) for way in WAYS]
    return row, Work(provider, op.inputs, lambda: _data(op, row, timer.device), *sizes)


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
    parts = [f"{row.op} {row.m}x{row.n} {row.dtype} {row.provider}:"]
    parts += [row.skipped] * bool(row.skipped)
    speeds = [(way, row.ms(way), row.gb_per_s(way)) for way in WAYS]
    parts += [f"{way} {in_words(ms)} {rate(speed)} GB/s" for way, ms, speed in speeds if ms and speed]
    parts += [f"{row.host_us:.1f} us host"] if row.host_us is not None else []
    parts += [f"({row.note})"] * bool(row.note)
    return " ".join(parts)
