"""Who offers which op: one table that every benchmark and `retrograd bench --list` read, and where a user adds a row.

Nothing is imported to read it; a provider's function is found when it is to be timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from retrograd.bench.rows import OPS, own
from retrograd.errors import UsageError

MSDA = "ms_deform_attn"
RANK_SUM = "rank_sum"
# How a person's function is called for each op; it returns what stands after the arrow.
CALLS = {
    "rms_norm": "f(x, weight, eps=) -> y",
    "add_rms_norm": "f(x, residual, weight, eps=) -> (y, x + residual)",
    "layer_norm": "f(x, weight, bias, eps=) -> y",
    "add_layer_norm": "f(x, residual, weight, bias, eps=) -> (y, x + residual)",
    MSDA: "f(value, levels, locations, weights) -> out",
    RANK_SUM: "f(received) -> sum",
}
_BOTH = ("cuda", "cpu")
_GPU, _CPU = ("cuda",), ("cpu",)
# Neither Liger nor quack has a fused add + LayerNorm.
_WITHOUT_ADD_LAYER = OPS[:3]


@dataclass(frozen=True)
class Entry:
    """One provider.

    Attributes:
        name: as `--providers` has it.
        ops: what it offers.
        make: "module:function" that makes a `harness.Provider` from what the benchmark tells it, or the function.
        options: more arguments of that function.
        package: the distribution it comes from; "" is the user's own.
        devices: where it runs.
        usual: where it is measured without being asked for by name.
    """

    name: str
    ops: tuple[str, ...]
    make: str | Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    package: str = "retrograd"
    devices: tuple[str, ...] = _BOTH
    usual: tuple[str, ...] = _BOTH

    @property
    def version(self) -> str | None:
        """Of its package; None where that is not installed."""
        try:
            return metadata.version(self.package) if self.package else "yours"
        except metadata.PackageNotFoundError:
            # A checkout on PYTHONPATH has no metadata, yet is there.
            return "checkout" if self.package == "retrograd" else None

    def build(self, *what: object) -> Any:
        """The provider for what a benchmark tells: a norm, a shape of deformable attention."""
        make = self.make
        if isinstance(make, str):
            module, _, name = make.partition(":")
            make = getattr(importlib.import_module(module), name)
        return make(*what, **self.options)


_NORM, _DEFORM, _SUM = "retrograd.bench.providers:", "retrograd.bench.msda.providers:", "retrograd.bench.general.sums:"
# What makes a provider of any other function.
ANYTHING, ANYTHING_COMPILED = "retrograd.bench.general.run:functions", "retrograd.bench.general.run:compiled"
_ATOMIC, _FIXED = {"deterministic": False}, {"deterministic": True}

# In the order in which tables show them. torch.compile of what people write comes last: it takes longest.
TABLE: list[Entry] = [
    Entry("retrograd", OPS, _NORM + "retrograd"),
    Entry("retrograd-atomic", OPS, _NORM + "retrograd", _ATOMIC, devices=_GPU, usual=_GPU),
    Entry("retrograd-triton", OPS, _NORM + "retrograd", {"impl": "triton"}, devices=_GPU, usual=()),
    Entry("retrograd-native", OPS, _NORM + "retrograd", {"impl": "native"}, devices=_CPU, usual=()),
    # Torch operations, for machines without a compiler: 10 times slower than native code on a CPU.
    Entry("retrograd-torch", OPS, _NORM + "retrograd", {"impl": "torch"}, usual=()),
    Entry("retrograd-compile", OPS, _NORM + "compiled_retrograd", usual=()),
    Entry("torch", OPS, _NORM + "by_torch", package="torch"),
    Entry("written-out", OPS, _NORM + "written_out", package="torch", usual=_CPU),
    Entry("liger", _WITHOUT_ADD_LAYER, _NORM + "liger", package="liger-kernel", devices=_GPU, usual=_GPU),
    Entry("quack", _WITHOUT_ADD_LAYER, _NORM + "quack", package="quack-kernels", devices=_GPU, usual=_GPU),
    Entry("compile", OPS, _NORM + "compiled", package="torch", usual=_GPU),
    Entry("retrograd", (MSDA,), _DEFORM + "retrograd"),
    Entry("retrograd-deterministic", (MSDA,), _DEFORM + "retrograd", _FIXED, usual=_GPU),
    Entry("retrograd-triton", (MSDA,), _DEFORM + "retrograd", {"impl": "triton"}, devices=_GPU, usual=_GPU),
    Entry("retrograd-cuda", (MSDA,), _DEFORM + "retrograd", {"impl": "cuda"}, devices=_GPU, usual=()),
    Entry("retrograd-native", (MSDA,), _DEFORM + "retrograd", {"impl": "native"}, devices=_CPU, usual=()),
    # Torch operations on blocks of queries, for machines without kernels: a second a call at the large shapes.
    Entry("retrograd-torch", (MSDA,), _DEFORM + "retrograd", {"impl": "torch"}, usual=()),
    Entry("retrograd-compile", (MSDA,), _DEFORM + "compiled_retrograd", usual=()),
    Entry("grid_sample", (MSDA,), _DEFORM + "grid_sample", package="torch"),
    Entry("msda-triton", (MSDA,), _DEFORM + "msda_triton", package="msda-triton", devices=_GPU, usual=_GPU),
    Entry("mmcv", (MSDA,), _DEFORM + "mmcv", package="mmcv", devices=_GPU, usual=_GPU),
    Entry("grid_sample-compile", (MSDA,), _DEFORM + "compiled", package="torch", usual=_GPU),
    Entry("retrograd", (RANK_SUM,), _SUM + "retrograd"),
    Entry("retrograd-loop", (RANK_SUM,), _SUM + "retrograd", {"impl": "loop"}, usual=_GPU),
    Entry("torch", (RANK_SUM,), _SUM + "by_torch", package="torch"),
]


def ops() -> tuple[str, ...]:
    """Every op of the table, in its order."""
    return tuple(dict.fromkeys(op for entry in TABLE for op in entry.ops))


def find(op: str, name: str) -> Entry | None:
    """The provider of an op, the one that was added last; None if there is none."""
    return next((entry for entry in reversed(TABLE) if entry.name == name and op in entry.ops), None)


def names(among: Sequence[str], device: str | None = None) -> tuple[str, ...]:
    """Providers of any of these ops: all of them, or those that are usual on a device."""
    fits = [e.name for e in TABLE if set(e.ops) & set(among) and (device is None or device in e.usual)]
    return tuple(dict.fromkeys(fits))


def register(
    name: str,
    op: str,
    function: Callable[..., Any],
    *,
    package: str = "",
    devices: Sequence[str] = _BOTH,
) -> None:
    """Add a provider of an op, which is then checked and timed beside the others; a later one replaces its namesake.

    Args:
        name: as tables and `--providers` have it.
        op: one of `ops()`.
        function: computes the op from tensors, with gradients, called as `CALLS[op]` says; an op of yours is called
            like itself.
        package: the distribution whose version is told; "" for code of your own.
        devices: some of "cuda", "cpu".

    Raises:
        UsageError: the op is unknown, the name is taken by this project or cannot stand in a list, `function` cannot
            be called, or a device is unknown.
    """
    if op not in ops():
        raise UsageError(f"`op` is {op!r}, expected one of {', '.join(ops())}")
    if not name or own(name) or "," in name:
        raise UsageError(f"`name` is {name!r}, expected a name of your own, without commas and not retrograd's")
    if not callable(function):
        raise UsageError(f"`function` of {name!r} is {type(function).__name__}, expected {CALLS.get(op, 'a function')}")
    if not devices or not set(devices) <= set(_BOTH):
        raise UsageError(f"`devices` of {name!r} is {tuple(devices)}, expected some of {', '.join(_BOTH)}")
    made = _NORM + "users" if op in OPS else _DEFORM + "users" if op == MSDA else ANYTHING
    add(Entry(name, (op,), made, {"function": function}, package, tuple(devices), tuple(devices)))


def add(entry: Entry) -> None:
    """Put a provider behind the others, in place of its namesakes for the same op."""
    TABLE[:] = [e for e in TABLE if not (e.name == entry.name and e.ops == entry.ops)]
    TABLE.append(entry)


def listing() -> str:
    """The table in text: ops, how a person's function is called, providers with devices and versions."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for op in ops():
        groups.setdefault(tuple(i for i, entry in enumerate(TABLE) if op in entry.ops), []).append(op)
    parts = []
    for places, members in groups.items():
        lines = [f"{op:<16} yours: {CALLS[op]}" if op in CALLS else op for op in members]
        lines += [_line(TABLE[i]) for i in places]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _line(entry: Entry) -> str:
    version = entry.version
    state = f"{entry.package} {version}".strip() if version else f"not installed: pip install {entry.package}"
    rest = [device for device in entry.devices if device not in entry.usual]
    asked = f"   (on {' and '.join(rest)} when asked for by name)" if rest else ""
    return f"  {entry.name:<24}{' '.join(entry.devices):<10}{state}{asked}"
