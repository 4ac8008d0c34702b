"""The benchmark of the norm family: each provider is checked, then timed, at each shape."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata

import torch

from retrograd.bench.correct import wrong_results
from retrograd.bench.providers import OPS, PROVIDERS, NormOp, Provider, Tensors, UnavailableError, make
from retrograd.bench.rows import Row, useful_bytes
from retrograd.bench.timing import CudaTimer, FakeTimer, Timer, Timing, first_line, host_us, plan_calls
from retrograd.errors import UsageError

Shape = tuple[int, int]

# Widths that train today at a constant number of rows, the widest ones, a ragged width, a launch-bound size.
SHAPES: list[Shape] = [
    *[(32768, n) for n in (256, 512, 1024, 2048, 4096, 8192)],
    *[(16384, 16384), (8192, 32768), (4096, 65536), (2048, 131072), (4096, 2000), (512, 4096)],
]
SOME_SHAPES: list[Shape] = [
    *[(32768, n) for n in (256, 1024, 2048, 4096)],
    *[(16384, 8192), (16384, 16384), (8192, 32768), (4096, 65536), (512, 4096)],
]
HOST_SHAPE: Shape = (512, 4096)
_PACKAGES = {"torch": "torch", "triton": "triton", "liger": "liger-kernel", "quack": "quack-kernels"}
_OVER = "over --max-seconds"


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
        for option, given, known in (("--ops", self.ops, OPS), ("--providers", self.providers, PROVIDERS)):
            for name in given:
                if name not in known:
                    raise UsageError(f"`{option}` has {name!r}, expected some of {', '.join(known)}")

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
    began = time.monotonic()
    jobs, gone = settings.jobs(), set()
    done: list[Row] = []
    with timer.scope():
        base = {"machine": machine(timer), "copy_gb_per_s": None if settings.host else timer.copy_gb_per_s()}
        for job in jobs:
            row = replace(job, **base)
            if (row.provider, row.op) in gone:
                continue
            try:
                if time.monotonic() - began > settings.max_seconds:
                    row = replace(row, skipped=_OVER)
                else:
                    row = _measured(row, timer, settings.host)
            except UnavailableError as error:
                gone.add((row.provider, row.op))
                tell(f"left out: {error}")
                continue
            done.append(row)
            keep(row)
            tell(_line(row))
    order = {(row.op, row.m, row.n): i for i, row in reversed(list(enumerate(jobs)))}
    return sorted(done, key=lambda r: (order[r.op, r.m, r.n], settings.providers.index(r.provider)))


def machine(timer: Timer) -> dict[str, str]:
    """Name of the device and versions of everything that is compared."""
    facts = {"gpu": torch.cuda.get_device_name() if timer.device == "cuda" else timer.device}
    for name, package in _PACKAGES.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[name] = metadata.version(package)
    facts["torch"] = str(torch.__version__)
    return facts


def make_timer(device: str) -> Timer:
    """The timer for a device.

    Raises:
        UsageError: there is no such device.
    """
    if device == "cpu":
        return FakeTimer()
    if not torch.cuda.is_available():
        raise UsageError(
            "retrograd bench measures a CUDA device and torch sees none here; "
            "to show results from elsewhere, run: retrograd bench norm --load FILE [--plot FILE]"
        )
    return CudaTimer()


def _measured(row: Row, timer: Timer, host: bool) -> Row:
    """The row with its times, or with the reason why there are none."""
    op = OPS[row.op]
    if row.provider == "compile":
        torch.compiler.reset()
    provider = make(row.provider, op)
    try:
        inputs, grads = next(_data(op, row, timer.device))
        bad = wrong_results(provider, op, inputs, grads)
        if bad:
            return replace(row, skipped=f"wrong: {bad}")
        if host:
            return replace(row, host_us=host_us(_both(provider, op, inputs, grads)))
        inputs = grads = {}
        return _timed(row, provider, op, timer)
    except Exception as error:
        return replace(row, skipped=first_line(error))
    finally:
        gc.collect()
        if timer.device == "cuda":
            torch.cuda.empty_cache()


def _timed(row: Row, provider: Provider, op: NormOp, timer: Timer) -> Row:
    sets, calls = plan_calls(useful_bytes(op.name, "fwd", row.m, row.n, row.dtype))
    data = _data(op, row, timer.device)
    inputs = [next(data)[0] for _ in range(sets)]
    fwd = timer.time(lambda i: provider.norm(inputs[i]), sets, calls)
    row = replace(row, fwd_ms=fwd.ms, fwd_how=fwd.how, note=fwd.note)
    if not provider.backward:
        return replace(row, note=f"{row.note} no backward".strip())
    try:
        # Forward sets are at least as many as backward sets: a backward touches more.
        bwd = _backward(row, provider, op, timer, inputs)
    except Exception as error:
        return replace(row, note=f"{row.note} backward: {first_line(error)}".strip())
    return replace(row, bwd_ms=bwd.ms, bwd_how=bwd.how, note=f"{row.note} {bwd.note}".strip())


def _backward(row: Row, provider: Provider, op: NormOp, timer: Timer, inputs: list[Tensors]) -> Timing:
    """Time of torch.autograd.grad for all inputs; the forward has run before, on the same stream."""
    sets, calls = plan_calls(useful_bytes(op.name, "bwd", row.m, row.n, row.dtype))
    del inputs[sets:]
    data = _data(op, row, timer.device)
    graphs = [(provider.norm(t), [t[name] for name in op.inputs], list(next(data)[1].values())) for t in inputs]

    def call(i: int) -> Sequence[torch.Tensor | None]:
        results, leaves, grads = graphs[i]
        # Replays read what the forward saved, so it must stay.
        return torch.autograd.grad(results, leaves, grads, retain_graph=True)

    return timer.time(call, sets, calls)


def _both(provider: Provider, op: NormOp, inputs: Tensors, grads: Tensors) -> Callable[[], object]:
    """One forward, and backward if there is one, with nothing of the harness in between."""
    if not provider.backward:
        return lambda: provider.norm(inputs)
    leaves, grad_outs = [inputs[name] for name in op.inputs], [grads[name] for name in op.results]
    return lambda: torch.autograd.grad(provider.norm(inputs), leaves, grad_outs)


def _data(op: NormOp, row: Row, device: str) -> Iterator[tuple[Tensors, Tensors]]:
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
