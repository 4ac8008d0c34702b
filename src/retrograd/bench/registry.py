"""Table of ops and of who offers them: what every benchmark and `retrograd bench --list` read, and users add to.

No library is imported to read it; a provider's function is called when it is to be timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from retrograd.bench.benchmark import DEVICES, Benchmark, Implementation, Provider, UnavailableError, own
from retrograd.bench.ops import msda, msda_providers, norm, rank_sum
from retrograd.bench.ops.any_spec import ReferencedOp
from retrograd.errors import UsageError

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark for module in (norm, msda, rank_sum) for benchmark in module.BENCHMARKS
}
PROVIDERS: list[Provider] = [*norm.PROVIDERS, *msda_providers.PROVIDERS, *rank_sum.PROVIDERS]
# Words of the command line that stand for ops.
GROUPS = {"norm": tuple(norm.name for norm in norm.BENCHMARKS), "msda": (msda.OP,)}


def ops() -> tuple[str, ...]:
    """Every op that can be measured."""
    return tuple(BENCHMARKS)


def kind_of(op: str) -> type[Benchmark]:
    """The kind of benchmark of an op; of a person's own, which results may name, the one of any op."""
    return type(BENCHMARKS[op]) if op in BENCHMARKS else ReferencedOp


def find(op: str, name: str) -> Provider | None:
    """The provider of an op, the one that was added last; None if there is none."""
    return next((p for p in reversed(PROVIDERS) if p.name == name and op in p.ops), None)


def names(among: Sequence[str], device: str | None = None) -> tuple[str, ...]:
    """Providers of any of these ops: all of them, or those that are usual on a device."""
    fits = [p.name for p in PROVIDERS if set(p.ops) & set(among) and (device is None or device in p.usual)]
    return tuple(dict.fromkeys(fits))


def make(op: str, provider: Provider, shape: str, dtype: str) -> Implementation:
    """The op by a provider; UnavailableError if that is not installed or lacks the op."""
    if provider.also and provider.missing:
        raise UnavailableError(f"{provider.name} needs what is not installed: pip install {' '.join(provider.missing)}")
    try:
        return provider.make(BENCHMARKS[op].parameters(shape, dtype), **provider.options)
    except (ImportError, AttributeError, OSError) as error:
        raise UnavailableError(f"{provider.name} cannot be imported or lacks this op: {error}") from None


def register(
    name: str,
    op: str,
    function: Callable[..., Any],
    *,
    package: str = "",
    devices: Sequence[str] = DEVICES,
) -> None:
    """Add a provider of an op, which is then checked and timed beside the others; a later one replaces its namesake.

    Args:
        name: as tables and `--providers` have it.
        op: one of `ops()`.
        function: computes the op from tensors, with gradients, called as `retrograd bench --list` says; an op of yours
            is called like itself.
        package: the distribution whose version is told; "" for code of your own.
        devices: some of "cuda", "cpu".

    Raises:
        UsageError: the op is unknown, the name is taken by this project or cannot stand in a list, `function` cannot
            be called, or a device is unknown.
    """
    if op not in BENCHMARKS:
        raise UsageError(f"`op` is {op!r}, expected one of {', '.join(BENCHMARKS)}")
    if not name or own(name) or "," in name:
        raise UsageError(f"`name` is {name!r}, expected a name of your own, without commas and not retrograd's")
    if not callable(function):
        expected = BENCHMARKS[op].signature or "a function"
        raise UsageError(f"`function` of {name!r} is {type(function).__name__}, expected {expected}")
    if not devices or not set(devices) <= set(DEVICES):
        raise UsageError(f"`devices` of {name!r} is {tuple(devices)}, expected some of {', '.join(DEVICES)}")
    make = BENCHMARKS[op].by_user(function)
    add(Provider(name, (op,), make, package=package, devices=tuple(devices), usual=tuple(devices)))


def add(*providers: Provider) -> None:
    """Put providers behind the others, in place of their namesakes for the same op."""
    for provider in providers:
        PROVIDERS[:] = [p for p in PROVIDERS if not (p.name == provider.name and p.ops == provider.ops)]
        PROVIDERS.append(provider)


def listing() -> str:
    """The table in text: ops, how a person's function is called, providers with devices and versions."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for op in BENCHMARKS:
        groups.setdefault(tuple(i for i, provider in enumerate(PROVIDERS) if op in provider.ops), []).append(op)
    parts: list[str] = []
    for places, members in groups.items():
        signatures = {op: BENCHMARKS[op].signature for op in members}
        lines = [f"{op:<16} yours: {signature}" if signature else op for op, signature in signatures.items()]
        lines += [_line(PROVIDERS[i]) for i in places]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _line(provider: Provider) -> str:
    missing = " ".join(provider.missing)
    state = f"not installed: pip install {missing}" if missing else f"{provider.package} {provider.version}".strip()
    rest = [device for device in provider.devices if device not in provider.usual]
    asked = f"   (on {' and '.join(rest)} when asked for by name)" if rest else ""
    return f"  {provider.name:<24}{' '.join(provider.devices):<10}{state}{asked}"
