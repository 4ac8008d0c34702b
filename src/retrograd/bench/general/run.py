"""The benchmark of any op: each provider is held against the reference in float64, then timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from retrograd.bench import harness, registry
from retrograd.bench.deviation import Deviation, computed, deviations
from retrograd.bench.general import sums
from retrograd.bench.general.ops import OPS, Op, find
from retrograd.bench.general.rows import Row
from retrograd.bench.harness import Data, Prepared, Provider, Tensors, Work, check_names, compiled_provider, make
from retrograd.bench.registry import RANK_SUM
from retrograd.bench.rows import WAYS, in_words
from retrograd.bench.timing import Timer

DTYPES = ("float32", "bfloat16", "float16", "float64")
_PACKAGES = {"torch": "torch", "triton": "triton"}
# Beside rounding, a provider may be off by what the reference is in the op's own precision, and by float32's sums.
_SUMS = 8 * 2.0**-24
OPS.setdefault(RANK_SUM, sums.OP)


@dataclass(frozen=True)
class Settings:
    """What is measured; see `retrograd.bench.norm.Settings`."""

    ops: tuple[str, ...]
    shapes: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    max_seconds: float = float("inf")
    host: bool = False
    device: str = "cuda"
    rounds: int | None = None

    def __post_init__(self) -> None:
        check_names({"--providers": (self.providers, registry.names(self.ops)), "--dtypes": (self.dtypes, DTYPES)})
        object.__setattr__(self, "providers", self.providers or registry.names(self.ops, self.device))
        for name in self.ops:
            for shape in self.shapes:
                find(name).check_shape(shape)

    def jobs(self) -> list[Row]:
        """A row without times for each measurement; compiling takes longest and comes last."""
        rows = [
            Row(op.name, shape, dtype, provider)
            for op in map(find, self.ops)
            for shape in self.shapes or op.shapes
            for dtype in self.dtypes or op.dtypes
            for provider in self.providers
            if registry.find(op.name, provider)
        ]
        return sorted(rows, key=lambda row: "compile" in row.provider)


def run(
    settings: Settings, timer: Timer, tell: Callable[[str], None], keep: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """Measure everything in `settings`; arguments and result as for `retrograd.bench.norm.run`."""
    plan = harness.Plan(
        settings.jobs(), lambda row: _prepared(row, timer), _line, settings.providers, settings.max_seconds,
        machine(timer), settings.host, settings.rounds,
    )  # fmt: skip
    return harness.run(plan, timer, tell, keep)


def machine(timer: Timer) -> dict[str, str]:
    """Name of the device and versions of everything that is compared."""
    return harness.machine(timer, _PACKAGES)


def functions(op: Op, shape: str, dtype: str, function: Callable[..., Any]) -> Provider:
    """A provider that calls `function(*inputs, **options)`, which returns a tensor or several."""
    options = op.options(shape, dtype)
    return Provider(lambda t: _tensors(function(*t.values(), **options)))


def compiled(op: Op, shape: str, dtype: str, function: Callable[..., Any]) -> Provider:
    """`functions` in a graph of torch.compile."""
    return compiled_provider(functions(op, shape, dtype, function).call)


def _tensors(out: Any) -> tuple[torch.Tensor, ...]:
    """The floating results of an op, which are what has gradients."""
    found = (out,) if isinstance(out, torch.Tensor) else tuple(out)
    return tuple(t for t in found if isinstance(t, torch.Tensor) and t.is_floating_point())


def _prepared(row: Row, timer: Timer) -> Prepared[Row]:
    """The row with its work, or with the reason why there is none."""
    op = find(row.op)
    provider = make(row.op, row.provider, op, row.shape, row.dtype)
    drawn, leaves = op.draw(row.shape, row.dtype)
    provider = replace(provider, backward=provider.backward and bool(leaves))
    reference = replace(functions(op, row.shape, row.dtype, op.reference), backward=provider.backward)
    inputs = _placed(drawn, leaves, timer.device)
    outs = {f"out{i}": out.detach() for i, out in enumerate(reference.call(inputs))}
    # Of the size of the results and correlated with them, so that no projection is lost in rounding.
    grads = {name: out + 0.5 * torch.randn_like(out) for name, out in outs.items()}
    if wrong := _wrong(provider, reference, leaves, inputs, grads):
        return replace(row, skipped=f"wrong: {wrong}"), None
    moved = sum(map(_bytes, (*inputs.values(), *outs.values())))
    sizes = (moved, moved + sum(_bytes(inputs[name]) for name in leaves))

    def data() -> Data:
        while True:
            yield _placed(drawn, leaves, timer.device), {name: grad.clone() for name, grad in grads.items()}

    return replace(row, fwd_bytes=sizes[0], bwd_bytes=sizes[1]), Work(provider, leaves, data, *sizes)


def _wrong(
    provider: Provider, reference: Provider, leaves: tuple[str, ...], inputs: dict[str, Any], grads: Tensors
) -> str:
    """Names of results that are further from float64 than rounding and the reference in the same precision explain."""
    wide = {name: _wide(value) for name, value in inputs.items()}
    truth = computed(reference, leaves, tuple(grads), wide, {name: grad.double() for name, grad in grads.items()})

    if odd := [name for name, out in zip(grads, provider.call(inputs), strict=True) if out.shape != truth[name].shape]:
        return f"{', '.join(odd)} (not in the shape of the reference's)"

    def away(which: Provider) -> dict[str, Deviation]:
        got = computed(which, leaves, tuple(grads), inputs, grads)
        return {d.name: d for d in deviations(got, ((name, slice(None), t) for name, t in truth.items()), _SUMS)}

    usual = away(reference)
    # Also true of what is not a number.
    found = [d for d in away(provider).values() if not d.relative <= 2 * (d.rounding + usual[d.name].relative + _SUMS)]
    return ", ".join(map(str, found))


def _placed(drawn: dict[str, Any], leaves: tuple[str, ...], device: str) -> dict[str, Any]:
    """Fresh copies of the inputs on a device; the leaves ask for gradients."""
    made = {}
    for name, value in drawn.items():
        made[name] = value.detach().to(device, copy=True) if isinstance(value, torch.Tensor) else value
        if name in leaves:
            made[name].requires_grad_()
    return made


def _wide(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _line(row: Row) -> str:
    parts = [f"{row.op} {row.shape} {row.dtype} {row.provider}:"]
    parts += [row.skipped] * bool(row.skipped)
    parts += [f"{way} {in_words(ms)}" for way in WAYS if (ms := row.ms(way)) is not None]
    parts += [f"{row.host_us:.1f} us host"] if row.host_us is not None else []
    parts += [f"({row.note})"] * bool(row.note)
    return " ".join(parts)
