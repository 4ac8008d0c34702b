"""A fake of torch_xla 2.9, as far as the watcher looks at it: no tensors, no compiler.

Written after torch_xla's sources: `sync` runs the graph of all live tensors; `_XLAC._xla_tensors_report` lists them as
GetLiveTensorsReport of init_python_bindings.cpp does; the save-file grows by a block a cut as SaveTensorsGraphInfo of
debug_util.cpp writes it, in a file whose name ends in the device's ordinal, read from the environment at the first cut;
CompileTime is (samples, nanoseconds, ...).
"""

from __future__ import annotations

import os
import sys
import types
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

HLO = """HloModule IrToHlo.{size}, entry_computation_layout={{(f32[{size}]{{0}})->(f32[{size}]{{0}})}}

ENTRY %IrToHlo.{size} (p0.1: f32[{size}]) -> ({outputs}) {{
  %p0.1 = f32[{size}]{{0}} parameter(0)
  %constant.2 = f32[] constant({rate})
  %broadcast.3 = f32[{size}]{{0}} broadcast(f32[] %constant.2), dimensions={{}}
  %multiply.4 = f32[{size}]{{0}} multiply(f32[{size}]{{0}} %p0.1, f32[{size}]{{0}} %broadcast.3), metadata={{op_type="aten__mul" op_name="aten__mul" source_file="train.py" source_line=30}}
{extra}  ROOT %tuple.9 = ({outputs}) tuple({roots})
}}
"""
STRAY = """  %negate.5 = f32[{size}]{{0}} negate(f32[{size}]{{0}} %multiply.4), metadata={{op_type="aten__neg" op_name="aten__neg" source_file="train.py" source_line=41}}
"""


def hlo(size: int = 8, rate: float = 0.5, stray: bool = False) -> str:
    """The graph of a step; `stray` has one more output, made at train.py:41."""
    shape = f"f32[{size}]{{0}}"
    names = ["%multiply.4", *(["%negate.5"] if stray else [])]
    return HLO.format(
        size=size,
        rate=rate,
        outputs=", ".join([shape] * len(names)),
        roots=", ".join(f"{shape} {n}" for n in names),
        extra=STRAY.format(size=size) if stray else "",
    )


class World:
    """What is pending: live tensors as (shape, nodes, "file:line"), and the graph that the next cut runs."""

    def __init__(self) -> None:
        self.live: list[tuple[str, int, str]] = []
        self.graph = hlo()
        self.hash = "5e4854"
        self.counters = {"UncachedCompile": 0, "CachedCompile": 0}
        self.nanoseconds = 0
        self.cached: set[str] = set()
        self.cuts = 0
        self.ordinal = 0
        self._file: str | None = None

    def pend(self, hash: str, graph: str, live: list[tuple[str, int, str]] = ()) -> None:
        self.hash, self.graph, self.live = hash, graph, list(live)

    def report(self, nodes_threshold: int = 100, device: str = "") -> str:
        text = ""
        for number, (shape, nodes, where) in enumerate(self.live):
            if nodes > nodes_threshold:
                file, _, line = where.partition(":")
                text += f"Tensor: id={number}, shape={shape}, device={device}, ir_nodes={nodes}\n"
                text += f"Python Frames:\n  __call__ (/x/site-packages/torch/nn/modules/module.py:5)\n  step ({file}:{line})\n"
                text += "IR {\n  %0 = f32[] prim::Constant(), ROOT=0\n}\n\n\n"
        return text

    def sync(self, wait: bool = False, reset_scope: bool = True) -> None:
        if self._file is None:
            chosen = os.environ.get("XLA_SAVE_TENSORS_FILE", "")
            self._file = f"{chosen}.{self.ordinal}" if chosen else ""
            assert not chosen or os.environ["XLA_SAVE_TENSORS_FMT"] == "hlo"
        if self._file:
            with Path(self._file).open("a") as file:
                file.write(
                    "[ScheduleSyncTensorsGraph]\nTensorsGraphInfo:\n  sync (/x/site-packages/torch_xla/torch_xla.py:90)\n"
                    f"  main (train.py:50)\n\nRoot Hashes: (1a)\n\n## BEGIN_GRAPH\n{self.graph}\n"
                    f"Graph Hash: {self.hash}\n\n## END_GRAPH\n\n\n"
                )
        if self.hash in self.cached:
            self.counters["CachedCompile"] += 1
        else:
            self.cached.add(self.hash)
            self.counters["UncachedCompile"] += 1
            self.nanoseconds += 2_000_000_000
        self.cuts += 1


@contextmanager
def installed():
    """The fake as the module torch_xla; gives its world."""
    world = World()
    package, core, inner, xm = (
        types.ModuleType(n) for n in ("torch_xla", "torch_xla.core", "torch_xla.torch_xla", "torch_xla.core.xla_model")
    )
    package.__version__ = "2.9.0+fake"
    package._XLAC = types.SimpleNamespace(
        _xla_tensors_report=world.report,
        _xla_counter_value=world.counters.get,
        _xla_metric_data=lambda name: (
            (1, world.nanoseconds, []) if name == "CompileTime" and world.nanoseconds else None
        ),
        _xla_get_default_device=lambda: "CPU:0",
    )
    package.sync = inner.sync = world.sync
    xm.mark_step = lambda wait=False: package.sync(wait)
    package.core, core.xla_model, package.torch_xla = core, xm, inner
    modules = {m.__name__: m for m in (package, core, inner, xm)}
    with mock.patch.dict(sys.modules, modules):
        yield world
