"""The benchmark of deformable attention: each provider is checked, then timed, at each shape and dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from retrograd.bench import harness, registry
from retrograd.bench.harness import Data, Prepared, Provider, Tensors, Work, check_names, make
from retrograd.bench.msda.correct import judged, truth
from retrograd.bench.msda.providers import LEAVES
from retrograd.bench.msda.rows import OP, Row
from retrograd.bench.msda.shapes import CPU_SHAPES, SHAPES, Shape, shape_of
from retrograd.bench.rows import WAYS, in_words
from retrograd.bench.timing import Results, Timer

DTYPES = ("float32", "bfloat16", "float16")
# Few queries of one image: a call that the device answers faster than the host asks.
HOST_SHAPE = "B1-Q300-H8-C32-P4-40x40+20x20"
_PACKAGES = {"torch": "torch", "triton": "triton", "msda-triton": "msda-triton", "mmcv": "mmcv"}
# Pixels that each point keeps from the borders of its cell: the derivative jumps there and libraries round otherwise.
_MARGIN = 2.0**-10
_SIGMA = 2.0


@dataclass(frozen=True)
class Settings:
    """What is measured; `locations`: "float32", or "same" as value, which 16 bits place by up to half a pixel.

    Without `shapes` and `providers` what is usual on `device`; `host`: host time, not device time.
    """

    shapes: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = DTYPES[:2]
    locations: str = "float32"
    max_seconds: float = float("inf")
    host: bool = False
    device: str = "cuda"
    rounds: int | None = None

    def __post_init__(self) -> None:
        check_names({"--providers": (self.providers, registry.names((OP,))), "--dtypes": (self.dtypes, DTYPES)})
        usual = (HOST_SHAPE,) if self.host else tuple(SHAPES) if self.device == "cuda" else CPU_SHAPES
        object.__setattr__(self, "shapes", self.shapes or usual)
        object.__setattr__(self, "providers", self.providers or registry.names((OP,), self.device))
        for name in self.shapes:
            shape_of(name)

    def jobs(self) -> list[Row]:
        """A row without times for each measurement; compiling takes longest and comes last."""
        rows = [
            Row(shape, dtype, dtype if self.locations == "same" else "float32", provider)
            for dtype in self.dtypes
            for shape in self.shapes
            for provider in self.providers
        ]
        return sorted(rows, key=lambda row: "compile" in row.provider)


def run(
    settings: Settings, timer: Timer, tell: Callable[[str], None], keep: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """Measure everything in `settings`; arguments and result as for `retrograd.bench.norm.run`."""
    truths: dict[tuple[str, ...], Tensors] = {}  # of the latest shape and dtypes
    plan = harness.Plan(
        settings.jobs(), lambda row: _prepared(row, timer, truths), _line, settings.providers, settings.max_seconds,
        machine(timer), settings.host, settings.rounds,
    )  # fmt: skip
    return harness.run(plan, timer, tell, keep)


def machine(timer: Timer) -> dict[str, str]:
    """Name of the device and versions of everything that is compared."""
    return harness.machine(timer, _PACKAGES)


def _prepared(row: Row, timer: Timer, truths: dict[tuple[str, ...], Tensors]) -> Prepared[Row]:
    """The row with its work, or with the reason why there is none."""
    shape = shape_of(row.shape)
    provider = make(OP, row.provider, shape)
    inputs, grads = next(make_data(shape, row, timer.device))
    at = (row.shape, row.dtype, row.beside)
    if at not in truths:
        truths.clear()
        # Elsewhere while others are timed: it is larger than all inputs.
        truths[at] = {name: tensor.cpu() for name, tensor in truth(shape, inputs, grads).items()}
    want = {name: tensor.to(timer.device) for name, tensor in truths[at].items()}
    wrong, coarse = judged(provider, shape, inputs, grads, want)
    want.clear()
    if wrong:
        return replace(row, skipped=f"wrong: {wrong}"), None
    fwd, bwd = _extra_bytes(provider, inputs, grads, timer)
    seen = replace(row, fwd_extra_bytes=fwd, bwd_extra_bytes=bwd, note=f"coarse: {coarse}" if coarse else "")
    sizes = [row.useful_bytes(way) for way in WAYS]
    return seen, Work(provider, LEAVES, lambda: make_data(shape, row, timer.device), *sizes)


def _extra_bytes(provider: Provider, inputs: Tensors, grads: Tensors, timer: Timer) -> tuple[int | None, int | None]:
    """Memory of a forward and of its backward."""
    results: list[torch.Tensor] = []

    def forward() -> Results:
        results.extend(provider.call(inputs))
        return results

    def backward() -> Results:
        return torch.autograd.grad(results, [inputs[name] for name in LEAVES], list(grads.values()))

    return timer.extra_bytes(forward), timer.extra_bytes(backward)


def make_data(shape: Shape, row: Row, device: str) -> Data:
    """Sets of inputs and gradients of the results without end."""
    dtype, beside = getattr(torch, row.dtype), getattr(torch, row.beside)
    # Not torch's own generator: a capture that failed leaves that one unusable.
    generator = torch.Generator(device).manual_seed(0)
    sizes = torch.tensor(shape.levels, device=device).flip(1).float()[:, None]  # [L, 1, 2] (width, height)
    places = (shape.batch, shape.queries, shape.heads, len(shape.levels), shape.points)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, generator=generator)

    while True:
        value = normal(shape.batch, shape.size, shape.heads, shape.channels).to(dtype)
        if shape.pixels:
            x = _centres(shape, device)[:, None, None, None] * sizes - 0.5 + _SIGMA * normal(*places, 2)
        else:
            x = torch.rand((*places, 2), device=device, generator=generator) * sizes - 0.5
        x = x.floor() + (x - x.floor()).clamp(_MARGIN, 1 - _MARGIN)
        locations, weights = ((x + 0.5) / sizes).to(beside), normal(*places).flatten(3).softmax(-1).to(beside)
        grads = {"out": normal(shape.batch, shape.queries, shape.heads, shape.channels).to(dtype)}
        made = (value, locations, weights.view(places))
        yield {name: tensor.requires_grad_() for name, tensor in zip(LEAVES, made, strict=True)}, grads


def _centres(shape: Shape, device: str) -> torch.Tensor:
    """[S, 2] (x, y) in [0, 1] of all pixels of all levels."""
    parts = []
    for h, w in shape.levels:
        y, x = torch.meshgrid(torch.arange(h, device=device), torch.arange(w, device=device), indexing="ij")
        parts.append(torch.stack([(x + 0.5) / w, (y + 0.5) / h], dim=-1).view(-1, 2))
    return torch.cat(parts)


def _line(row: Row) -> str:
    parts = [f"{row.shape} {row.dtype} {row.provider}:"]
    parts += [row.skipped] * bool(row.skipped)
    parts += [f"{way} {in_words(ms)}" for way in ("fwd", "bwd") if (ms := row.ms(way)) is not None]
    parts += [f"{row.host_us:.1f} us host"] if row.host_us is not None else []
    parts += [f"({row.note})"] * bool(row.note)
    return " ".join(parts)
