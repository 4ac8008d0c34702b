"""torch_xla's private names: cuts, compilations and live tensors; buckets of its FSDP. Loads no torch_xla."""

from __future__ import annotations

import sys
from typing import Any

from retrograd.compat.registry import part

# Where a cut of the graph is made, by whichever name a program has imported it.
CUTS = (("torch_xla", "sync"), ("torch_xla.torch_xla", "sync"), ("torch_xla.core.xla_model", "mark_step"))
_FUNCTIONS = ("_xla_tensors_report", "_xla_counter_value", "_xla_metric_data", "_xla_get_default_device")
# Called on the root when backward is over, before gradients are handed over.
END_OF_BACKWARD = "_wait_for_post_backward"


def _core() -> Any:
    return getattr(sys.modules["torch_xla"], "_XLAC", None)


def default_device() -> str:
    """The device that this thread computes on, "CPU:0"."""
    return str(_core()._xla_get_default_device())


def live_tensors(threshold: int, device: str) -> str:
    """A report of the tensors alive on a device whose graphs have more nodes than `threshold`."""
    return _core()._xla_tensors_report(threshold, device)


def compilations() -> tuple[int, float]:
    """Compilations so far, and the seconds they took."""
    metric = _core()._xla_metric_data("CompileTime")
    return int(_core()._xla_counter_value("UncachedCompile") or 0), float(metric[1]) / 1e9 if metric else 0.0


def is_fsdp_root(model: Any) -> bool | None:
    """Whether forward is called on this module of torch_xla's FSDP; None until its first forward, and for others."""
    return getattr(model, "_is_root", None)


def bucket_modules(model: Any) -> list[tuple[str, Any]]:
    """The parts of a model that reduce gradients through a bucket, by name."""
    named = model.named_modules() if hasattr(model, "named_modules") else ()
    return [(name, m) for name, m in named if callable(getattr(getattr(m, "reduce_scatter_op", None), "flush", None))]


def buckets(model: Any) -> list[Any]:
    """The reduce-scatter operators of a model that keep gradients back, each once: modules may share one."""
    return list({id(m.reduce_scatter_op): m.reduce_scatter_op for _, m in bucket_modules(model)}.values())


def left_in_buckets(model: Any) -> tuple[tuple[str, int], ...]:
    """The parts with gradients in their bucket: name and how many; a bucket that several parts share counts once."""
    first: dict[int, tuple[str, int]] = {}
    for name, module in bucket_modules(model):
        operator = module.reduce_scatter_op
        first.setdefault(id(operator), (name, len(getattr(operator, "bucket", None) or ())))
    return tuple((name, waiting) for name, waiting in first.values() if waiting)


@part(
    "torch_xla.cuts",
    "watches cuts of the graph",
    "save-files can be read all the same: `retrograd graph unique FILE`",
    names=(*(f"torch_xla._XLAC.{name}" for name in _FUNCTIONS), "XlaFullyShardedDataParallel._wait_for_post_backward"),
    refuses=True,
)
def PART() -> str:
    """Ask each function as a cut does."""
    if "torch_xla" not in sys.modules:
        return ""
    missing = [f"_XLAC.{name}" for name in _FUNCTIONS if not hasattr(_core(), name)]
    if missing:
        return f"lacks {', '.join(missing)}"
    count, seconds = compilations()
    report = live_tensors(1 << 30, default_device())  # a graph of that many nodes no tensor has
    if count < 0 or seconds < 0 or not isinstance(report, str):
        return "counters or the report of live tensors are of another kind"
    return ""
