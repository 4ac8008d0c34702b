"""torch_xla 2.9: what is alive before each cut, which graph the cut ran, and its text where it was compiled.

The cut is `torch_xla.sync` (or `xm.mark_step`), which is wrapped. The text of a graph is only to be had from the file
that XLA_SAVE_TENSORS_FILE names, which torch_xla appends to at every cut; it is read there and kept only when the
counter UncachedCompile has risen, or where the graph was compiled before the watch began.
"""

# pyright: basic

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from retrograd import config
from retrograd.compat import torch_xla
from retrograd.errors import VerificationError
from retrograd.graph.source_lines import short, user_frame
from retrograd.graph.watching import live_tensors, xla_save_file
from retrograd.graph.watching.events import Compiled, Event, Executed, WatchBackend

_TOO_LATE = (
    "torch_xla saved no graph: it looks for XLA_SAVE_TENSORS_FILE at its first cut; begin to watch before that, or "
    "set it with XLA_SAVE_TENSORS_FMT=hlo before the program starts"
)


class Xla(WatchBackend):
    """Wraps the cuts while it is started.

    Args:
        threshold: live tensors whose graph has more nodes than this are looked at.
        gc_before_cut: collect garbage before each cut, so that tensors in reference cycles are never part of a graph.
        model: its FSDP modules may have no gradient left in a bucket at a cut.
        texts: keep texts of graphs; without them graphs are told by what is alive.
    """

    name = "xla"
    module = "torch_xla"
    part = torch_xla.PART

    def __init__(self, threshold: int = 0, gc_before_cut: bool = False, model: Any = None, texts: bool = True) -> None:
        self.threshold, self.collect, self.model, self.texts = threshold, gc_before_cut, model, texts
        self._wrapped: list[tuple[Any, str, Any]] = []
        self._events: list[Event] = []
        self._alive: dict[str, tuple[int, tuple[live_tensors.Live, ...]]] = {}  # by digest: the cut that saw it first
        self._last: tuple[int, tuple[live_tensors.Live, ...]] | None = None
        self.after: Callable[[], Any] | None = None  # called after each cut
        self._seen: set[str] = set()
        self._cuts = 0
        self._here = threading.local()  # each device may have a thread of its own
        self._files: dict[str, xla_save_file.Follower] = {}
        self._following: Path | None = None

    def _hook(self) -> None:
        if self.texts:
            # torch_xla remembers the first name that it reads: a later watch of the same process reads the same file.
            chosen = config.saved_graphs()
            self._following = Path(chosen) if chosen else xla_save_file.own()
            self._follower()
        for module, name in torch_xla.CUTS:
            owner = sys.modules.get(module)
            if owner is not None and hasattr(owner, name):
                self._wrap(owner, name)

    def stop(self) -> None:
        """Put the cuts back."""
        while self._wrapped:
            module, name, original = self._wrapped.pop()
            setattr(module, name, original)
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._following = None

    def drain(self) -> list[Event]:
        """What the cuts since the last call compiled and ran."""
        events, self._events = self._events, []
        return events

    def _follower(self) -> xla_save_file.Follower | None:
        """The file of the device that this thread computes on: torch_xla appends its ordinal to the name."""
        if self._following is None:
            return None
        ordinal = torch_xla.default_device().rpartition(":")[2]
        if ordinal not in self._files:
            mine = self._following == xla_save_file.own()
            self._files[ordinal] = xla_save_file.Follower(Path(f"{self._following}.{ordinal}"), mine)
        return self._files[ordinal]

    def _wrap(self, module: Any, name: str) -> None:
        original = getattr(module, name)

        def cut(*args: Any, **kwargs: Any) -> Any:
            return self._cut(original, args, kwargs)

        cut.__name__, cut.__doc__ = name, original.__doc__
        self._wrapped.append((module, name, original))
        setattr(module, name, cut)

    def _cut(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(self._here, "inside", False):  # mark_step calls sync
            return original(*args, **kwargs)
        self._here.inside = True
        try:
            if self.collect:
                gc.collect()
            self._check_buckets()
            file = self._follower()
            alive = self._look()
            before = torch_xla.compilations()
            with config.saving_graphs(xla_save_file.own()) if file and file.mine else nullcontext():
                result = original(*args, **kwargs)
            after = torch_xla.compilations()
            self._ran(file, alive, after[0] - before[0], after[1] - before[1])
        finally:
            self._here.inside = False
        if self.after is not None:
            self.after()
        return result

    def _check_buckets(self) -> None:
        left = torch_xla.left_in_buckets(self.model) if self.model is not None else ()
        if left:
            raise VerificationError(
                f"{sum(n for _, n in left)} gradients are left in reduce-scatter buckets at the cut, the first in that "
                f"of {left[0][0]!r}: the optimizer misses them and the next step reduces them though they are stale. "
                "Call retrograd.fsdp.xla.flush_before_end_of_backward(model) before training, or set "
                "reduce_scatter_bucket_size_mb=0"
            )

    def _look(self) -> tuple[live_tensors.Live, ...]:
        """What is alive; told before the cut, since ranks whose live tensors differ hang in it."""
        device = torch_xla.default_device()
        alive = live_tensors.read(torch_xla.live_tensors(self.threshold, device))
        key = live_tensors.digest(alive)
        if key not in self._alive:
            self._alive[key] = (self._cuts, alive)
        self._tell(Compiled("live", "live", "\n".join(map(str, alive)), family="live", digest=key))
        return alive

    def _ran(
        self, file: xla_save_file.Follower | None, alive: tuple[live_tensors.Live, ...], compilations: int, spent: float
    ) -> None:
        notes = live_tensors.difference(self._last[1], alive, self._last[0]) if self._last else ()
        block = file.read() if file else None
        key = block.key if block else live_tensors.digest(alive)
        if compilations or key not in self._seen:
            if file and not block:
                notes = (*notes, _TOO_LATE)
            text, name = (block.body.strip("\n"), short(user_frame(block.frames, library=False))) if block else ("", "")
            reason = "" if compilations else "torch_xla had compiled it before the watch began"
            cost = spent if compilations else None
            self._events.append(
                Compiled("step", "hlo", text, name, "step", key, cost, reason, notes, digest=live_tensors.digest(alive))
            )
            self._seen.add(key)
        self._events.append(Executed(key))
        self._last = (self._cuts, alive)
        self._cuts += 1
