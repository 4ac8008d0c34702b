"""Watch: the context in which the steps of a run are watched, `retrograd.graph.watch`."""

# What people pass is checked, whatever the hints say.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrograd import config
from retrograd.compat import torch_xla
from retrograd.core import order_registry
from retrograd.core.rank_store import RankStore
from retrograd.errors import RanksDifferError, UsageError
from retrograd.graph.schema import Diff
from retrograd.graph.watching import backends, files, lock
from retrograd.graph.watching.events import Compiled, Event, WatchBackend
from retrograd.graph.watching.rank_agreement import Comparison, store_of
from retrograd.graph.watching.schema import WatchReport
from retrograd.graph.watching.session import WatchSession

_active: list[Watch] = []


@dataclass(eq=False, repr=False)
class Watch:
    """Watches while it is entered; made by `watch`."""

    session: WatchSession
    backends: tuple[WatchBackend, ...]
    _save: str | Path | None
    _lock: str | Path | None
    _ranks: Comparison | None
    _running: bool = False
    marked: bool = False  # the program calls `step` itself

    def __enter__(self) -> Watch:
        if self._running or self.session.now:
            raise UsageError("this watch was entered before; make a new one with retrograd.graph.watch(...)")
        started: list[WatchBackend] = []
        try:
            for backend in self.backends:
                backend.start(self._notify)
                started.append(backend)
        except BaseException:
            for backend in started:
                backend.stop()
            raise
        self.session.backends = tuple(b.name for b in self.backends)
        self.session.versions = tuple((b.name, b.version()) for b in self.backends)
        self._running = True
        _active.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            self._close(raised=error is not None)
        finally:
            ranks_error = self._ranks.found if self._ranks else None
            if ranks_error is not None and error is not None and not isinstance(error, RanksDifferError):
                # torch.compile wraps what ends a compilation in an exception of its own.
                raise ranks_error from error

    def _close(self, raised: bool) -> None:
        _active.remove(self)
        self._running = False
        events: list[Event] = []
        with ExitStack() as stack:
            for backend in self.backends:
                stack.callback(backend.stop)
            for backend in self.backends:
                events += backend.drain()
                if eager := getattr(backend, "eager", 0):
                    self.session.notes.append(
                        f"{eager} modules of JAX's own functions, called eagerly, are not counted"
                    )
        if raised:
            self.session.on_extra = "explain"  # an exception is on its way, ours would hide it
        try:
            if any(isinstance(event, Compiled) for event in events):
                self.session.step(events, order_registry.current())
        finally:
            if self._save is not None:
                files.save(self.session, self._save)
        if self._lock is not None and not raised:
            lock.hold(self._lock, self.session)

    def step(self) -> None:
        """Mark the end of a step: after the optimizer, or after torch_xla.sync().

        Raises:
            GraphChangedError: the step compiled a graph too many, or an order beside the graphs changed (a plan of
                gradient buckets), and `on_extra` is "raise".
            RanksDifferError: ranks are compared, and another one compiled other graphs or keeps to another order.
            UsageError: outside of the `with` block.
        """
        if not self._running:
            raise UsageError("step() was called outside of `with retrograd.graph.watch(...) as w:`")
        events = [event for backend in self.backends for event in self._drained(backend)]
        held = order_registry.current()
        if self._ranks is not None:
            self._ranks.end_of_step([order for order in held.values() if order.key])
        self.session.step(events, held)

    def report(self) -> WatchReport:
        """What was seen up to the last step; `.text()` is a table, `.to_json()` keeps it."""
        return self.session.report()

    def explain(self, i: int, j: int) -> Diff:
        """Compare graphs i and j of the report, causes first; UsageError if one has no text that can be read."""
        return self.session.explain(i, j)

    def lock(self, path: str | Path) -> None:
        """Write the lock file of the graphs seen so far, for `retrograd graph check` and `watch(lock=path)`."""
        lock.write(path, lock.of_session(self.session))

    def _drained(self, backend: WatchBackend) -> list[Event]:
        events = backend.drain()
        for event in events if not backend.tells else ():
            if isinstance(event, Compiled):
                self._notify(event)
        return events

    def _notify(self, compiled: Compiled) -> None:
        if self._ranks is not None:
            self._ranks.graph(compiled)


def watch(
    backend: str | Sequence[str] = "auto",
    *,
    expect: int | None = None,
    warmup: int | None = None,
    on_extra: str = "explain",
    save: str | Path | None = None,
    lock: str | Path | None = None,
    ranks: str | Path | RankStore | None = None,
    ranks_timeout: float = 300.0,
    threshold: int = 0,
    gc_before_cut: bool = False,
    model: Any = None,
    texts: bool = True,
) -> Watch:
    """Watch a training loop: which graphs its steps compile, and at the first one too many what changed.

        with retrograd.graph.watch(expect=2) as w:
            for batch in batches:
                train_step(batch)
                w.step()
        print(w.report().text())

    Args:
        backend: "compile" (torch.compile), "xla" (torch_xla), "jax", several of them, or "auto": what is imported.
        expect: how many graphs there may be, forward and backward counted apart; None leaves it to `warmup`.
        warmup: steps in which new graphs are no surprise; 2 if neither it nor `expect` is given.
        on_extra: at a graph too many "explain" prints what changed, "warn" warns with it (GraphChangedWarning), "raise"
            raises it at the end of the step.
        save: folder for the text of each graph, the report and an index.
        lock: a lock file; written if it does not exist, else the graphs must be those in it.
        ranks: "compare" through torch.distributed's store, or a folder that all ranks see (RANK and WORLD_SIZE say who
            is who): each graph is compared with the other ranks' before it runs.
        ranks_timeout: seconds to wait for the other ranks.
        threshold: of torch_xla's live tensors, those whose graph has more nodes than this are compared between steps.
        gc_before_cut: collect garbage before each cut of torch_xla, so that no graph has tensors in reference cycles.
        model: with torch_xla, a model whose reduce-scatter buckets must be empty at each cut.
        texts: with torch_xla, keep texts of graphs (torch_xla then writes each step's graph to a file); without them
            graphs are told by their live tensors alone.

    Returns:
        A Watch: `step()`, `report()`, `explain(i, j)`, `lock(path)`.

    Raises:
        UsageError: an argument makes no sense, or no framework is imported.
        GraphError: the framework lacks what the watcher listens to.
        GraphChangedError: in `step()`, with on_extra="raise"; at the end, if a lock file disagrees.
        RanksDifferError: ranks are about to run different graphs.
    """
    if not isinstance(ranks_timeout, (int, float)) or ranks_timeout <= 0:
        raise UsageError(f"`ranks_timeout` is {ranks_timeout!r}, expected seconds, more than 0")
    if not isinstance(threshold, int) or threshold < 0:
        raise UsageError(f"`threshold` is {threshold!r}, expected a number of nodes, 0 or more")
    session = WatchSession(expect, warmup, on_extra, say=_say)
    options = {"threshold": threshold, "gc_before_cut": gc_before_cut, "model": model, "texts": texts}
    chosen = backends.names(backend)
    _check_options(options, chosen)
    opened = tuple(backends.make(name, **options) for name in chosen)
    store = store_of(ranks, config.rank())
    return Watch(session, opened, save, lock, Comparison(store, ranks_timeout) if store is not None else None)


def _check_options(options: dict[str, Any], chosen: Sequence[str]) -> None:
    """Options of torch_xla are for torch_xla, and a model has to have buckets for them to be checked."""
    usual = {"threshold": 0, "gc_before_cut": False, "model": None, "texts": True}
    changed = [name for name, value in options.items() if value is not usual[name] and value != usual[name]]
    if changed and "xla" not in chosen:
        raise UsageError(
            f"`{changed[0]}` is for the backend 'xla', but {', '.join(map(repr, chosen))} is watched; leave it out"
        )
    model = options["model"]
    if model is not None and not torch_xla.bucket_modules(model):
        raise UsageError(
            f"`model` is {type(model).__name__} and has no module with reduce_scatter_op, expected one with parts in "
            "torch_xla's XlaFullyShardedDataParallel; leave it out for other models"
        )


def step() -> None:
    """Mark the end of a step for every watch that runs; does nothing where none does."""
    for active in tuple(_active):
        if not active.marked:
            active.marked = True
            active.session.restart()
        active.step()


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
