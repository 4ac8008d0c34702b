"""Recorder: a dispatch mode that sees operators on their way to the kernels, forward and backward.

It calls each operator as it came, draws no random numbers and waits for no device inside a step; statistics are read
where a step ends. An error of its own book-keeping is noted in the trace's `meta` and never stops a run.
"""

from __future__ import annotations

import datetime
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from retrograd import config
from retrograd.compat.triton_launch import KernelLaunch, Proceed, around_launches
from retrograd.core import gc_pause
from retrograd.env import run_conditions
from retrograd.errors import RetrogradError, UsageError
from retrograd.trace import compiled_regions, kernel_launches, store, tape
from retrograd.trace.gradient_scaling import updates_scale
from retrograd.trace.nan_breakpoint import InfinityMasks, Stop, open_debugger, stop_kinds
from retrograd.trace.observer import Observer
from retrograd.trace.operator_mode import OperatorMode
from retrograd.trace.operator_schemas import Operator, tensors_in
from retrograd.trace.pending_op import PendingOp
from retrograd.trace.schema import OTHER, Trace

ENGINES = ("auto", "tape", "python")
# A step of more operators is read in parts, which bounds the memory of pending operators.
_MAX_PENDING = 20_000

# Recorders at work. A forked process, as a worker of a DataLoader, has them too; what it does is no part of the run.
_active: weakref.WeakSet[Recorder] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [recorder.abandon() for recorder in list(_active)])


class Recorder:
    """Records what runs inside `with`; made by `retrograd.trace.record`, which describes the arguments.

    Attributes:
        engine: which engine records, "tape" or "python".
        path: the file it is written to, with the rank in its name if there are several; None for none.
        on_last_step: called when the last of `steps` has been recorded; may raise.
    """

    def __init__(
        self,
        model: torch.nn.Module | None,
        *,
        level: str,
        out: str | os.PathLike[str] | None,
        steps: int | None,
        compiled: str,
        breakpoint_on: str | None,
        then: Callable[[Stop], None] | None,
        engine: str,
    ) -> None:
        self._tape, why = _tape(engine, breakpoint_on)
        self.engine = "python" if self._tape is None else "tape"
        self._rank, size, self.path = _rank_and_path(out)
        self._stops, self._masks = stop_kinds(breakpoint_on), InfinityMasks()
        self._then = then or open_debugger
        self._writer = None if self.path is None else store.Writer(self.path, level, self._rank)
        self._trace = Trace(level=level, rank=self._rank, meta=_meta() | {"engine": self.engine, "ranks": str(size)})
        if why:
            self._trace.meta["no tape"] = why
        self._steps = steps
        self._compiled = compiled_regions.CompiledRegions(compiled, model)
        self._observer: Any
        if self._tape is None:
            self._observer = Observer(model, level, self._compiled, bool(self._stops), self.unrecorded)
        else:
            from retrograd.trace.tape.engine import TapeObserver

            self._observer = TapeObserver(self._tape, model, level, self._compiled, self)
        self._operators: dict[Any, Operator] = {}
        self._pending: list[PendingOp] = []
        self._step, self._step_began, self._before_update, self._automatic, self._unread = 0, 0, 0, True, False
        self._skipped, self._worked = 0, False  # steps without an optimizer, and whether the open one has computed
        self._last_step = 0
        self._done = False
        self._lost: dict[str, int] = {}
        self._lock = threading.RLock()
        self._local = threading.local()
        self._stack: ExitStack | None = None
        self.on_last_step: Callable[[], None] | None = None

    def __enter__(self) -> Recorder:
        if self._stack is not None:
            raise UsageError("a recorder records once; make another with retrograd.trace.record(...)")
        import torch.optim.optimizer as optimizer

        if self._tape is None:
            self._guarded(self._observer.between_steps)
        self._stack = ExitStack()
        before = optimizer.register_optimizer_step_pre_hook(self._before_optimizer)
        after = optimizer.register_optimizer_step_post_hook(self._after_optimizer)
        self._stack.callback(before.remove)
        self._stack.callback(after.remove)
        self._stack.enter_context(self._compiled.stance())
        self._stack.enter_context(around_launches(self.launch))
        self._stack.enter_context(OperatorMode(self.run) if self._tape is None else self._observer.recording())
        _active.add(self)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        assert self._stack is not None
        self._stack.close()
        _active.discard(self)
        self.read()
        if isinstance(error, Exception) and "raised" not in self.trace.meta:
            self.trace.meta["raised"] = f"{type(error).__name__}: {str(error)[:500]}"
        self._note_conditions()
        self.trace.meta["seed"] = str(torch.initial_seed())  # the program's own, if it has set one
        self.trace.meta.update(self._compiled.meta())
        for number, note in enumerate(sorted(self._observer.statistics.notes)):
            self.trace.meta[f"note {number + 1}"] = note
        if self._lost:
            self.trace.meta["lost"] = "; ".join(f"{error} ({count} times)" for error, count in self._lost.items())
        if self._writer is not None:
            self._writer.close(self.trace.meta)

    @property
    def trace(self) -> Trace:
        """The operators up to the end of the last step; after the block all of them. Built at the first access."""
        if self._unread:
            self._unread = False
            self.read()
        return self._trace

    @property
    def steps(self) -> int:
        """How many steps have ended, as far as they were read those too that GradScaler skipped."""
        return self._step + self._skipped

    def step(self) -> None:
        """End a step here. The first call ends the automatic counting of optimizer steps."""
        self._automatic = False
        self._end_step()

    def abandon(self) -> None:
        """Record nothing more and write nothing more, in a process that was forked."""
        self._done = True
        self._observer.stop()
        if self._writer is not None:
            self._writer.abandon()

    # Called by the dispatch mode and by launches of kernels.

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator and record it."""
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = Operator(func)
        if operator.silent or self._done or getattr(self._local, "unrecorded", False):
            return func(*args, **kwargs)
        pending = PendingOp(operator, self._step)
        self._guarded(self._observer.before, pending, args, kwargs, sys._getframe(2))
        outer, self._local.pending = getattr(self._local, "pending", None), pending
        try:
            out = func(*args, **kwargs)
        except Exception as error:
            self._guarded(self._failed, pending, error)
            raise
        finally:
            self._local.pending = outer
        self._guarded(self._after, self._observer.after, pending, args, kwargs, out)
        if self._stops:
            self._stop(pending, out)
        return out

    def launch(self, launch: KernelLaunch, run: Proceed) -> Any:
        """Run a Triton kernel and record it: as an operator, or as part of the one that launches it."""
        if launch.warmup or self._done or getattr(self._local, "unrecorded", False):
            return run()
        name, arguments = launch.name, (*launch.args, *launch.kwargs.values())
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        if self._tape is not None:
            return self._observer.launch(name, tensors, run)
        outer = getattr(self._local, "pending", None)
        if outer is not None:
            outer.kernels.append(name)
            return self.unrecorded(run)
        pending = PendingOp(kernel_launches.kernel_operator(name), self._step)
        self._guarded(self._observer.before_launch, pending, tensors, launch.caller)
        try:
            out = self.unrecorded(run)
        except Exception as error:
            self._guarded(self._failed, pending, error)
            raise
        self._guarded(self._after, self._observer.after_launch, pending, tensors)
        if self._stops:
            self._stop(pending, tensors)
        return out

    def unrecorded(self, run: Callable[[], Any]) -> Any:
        """Run a function whose operators are no part of the step: a kernel without a GPU may use operators itself."""
        before = getattr(self._local, "unrecorded", False)
        self._local.unrecorded = True
        if self._tape is not None:
            self._tape.quiet(True)
        try:
            return run()
        finally:
            self._local.unrecorded = before
            if self._tape is not None:
                self._tape.quiet(False)

    def _guarded(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function of the book-keeping; its errors are noted."""
        try:
            with self._lock:
                function(*args)
        except RetrogradError:
            raise
        except Exception as error:  # an exotic tensor must not end the run that is recorded
            self.note_lost(f"{type(error).__name__}: {str(error)[:200]}")

    def note_lost(self, error: str) -> None:
        self._lost[error] = self._lost.get(error, 0) + 1

    # Before and after an operator.

    def _failed(self, pending: PendingOp, error: Exception) -> None:
        self.note_raised(pending, f"{type(error).__name__}: {str(error)[:500]}")
        self._append(pending)

    def note_raised(self, pending: PendingOp, error: str) -> None:
        place, _ = self._observer.locator.text(pending.line)
        self._trace.meta.setdefault("raised", f"{pending.operator.name}{f' at {place}' if place else ''}: {error}")

    def _after(self, observe: Callable[..., None], pending: PendingOp, *args: Any) -> None:
        observe(pending, *args)
        self._append(pending)

    def _append(self, pending: PendingOp) -> None:
        self._pending.append(pending)
        if len(self._pending) >= _MAX_PENDING:
            self.read()

    # Steps.

    def _before_optimizer(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._observer.optimizing, self._before_update = True, self._recorded_count()
        # Lightning and LBFGS: forward and backward are in a closure that the optimizer calls, and no part of it.
        if not any(callable(value) for value in (*args[1:], *kwargs.values())):
            return None
        return (args[0], *map(self._outside, args[1:])), {key: self._outside(value) for key, value in kwargs.items()}

    def _outside(self, argument: Any) -> Any:
        """A closure given to an optimizer, whose operators are not the optimizer's; other arguments as they are."""

        def closure() -> Any:
            self._observer.optimizing = False
            try:
                return argument()
            finally:
                self._observer.optimizing = True

        return closure if callable(argument) else argument

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._observer.optimizing = False
        if not self._done and self._recorded_count() == self._before_update:
            self._observer.rewritten(self._compiled.updated(optimizer))
        if self._automatic and not self._done:
            self._end_step()

    def _end_step(self) -> None:
        if self._recorded_count() <= self._step_began:  # nothing ran since the last end
            return
        self._step += 1
        self._unread = True
        self._guarded(self.unrecorded, self._note_conditions)  # within the program's own contexts, as its operators
        if self._writer is not None or self._pending_count() >= _MAX_PENDING:
            self._unread = False
            self.read()
        else:
            self._guarded(self.unrecorded, self._observer.fold)
        self._step_began = self._recorded_count()
        self._guarded(self._observer.between_steps, self._step)
        if self._writer is not None:
            self._writer.flush()
        if self._steps is not None and self.steps >= self._steps:
            self._done = True
            self._observer.stop()
            if self.on_last_step is not None:
                self.on_last_step()

    def _note_conditions(self) -> None:
        """Flags, versions and variables at the end of the first step."""
        if not self._trace.conditions:
            conditions = run_conditions.process_conditions() | run_conditions.torch_conditions(torch)
            self._trace.conditions = conditions
            if self._writer is not None:
                self._writer.conditions(conditions)

    def _pending_count(self) -> int:
        return len(self._pending) + self._observer.buffered

    def _recorded_count(self) -> int:
        return len(self._trace.ops) + self._pending_count()

    def read(self) -> None:
        """Read the statistics and append pending operators to the trace."""
        # Records hold no cycles, but their number starts the collector: of 200 ms for two steps it took 150.
        with self._lock, gc_pause.paused(age=True):
            pending_ops, self._pending = [*self._pending, *self._observer.drain()], []
            # A device that has failed answers no more; what is known of the operators is kept all the same.
            self._guarded(self.unrecorded, self._observer.statistics.collect)
            self._observer.forget()
            for pending in pending_ops:
                self._count_skipped(pending)
                op = self._observer.finished_op(pending, len(self._trace.ops))
                self._trace.ops.append(op)
                if self._writer is not None:
                    self._writer.add(op)

    def _count_skipped(self, pending: PendingOp) -> None:
        """End a step where GradScaler has kept the optimizer, which ends the others, from its step."""
        if pending.step + self._skipped > self._last_step:
            self._last_step, self._worked = pending.step + self._skipped, False
        pending.step += self._skipped
        if self._automatic and updates_scale(pending.operator.name):
            self._skipped += self._worked
            self._worked = False
        self._worked = self._worked or pending.phase != OTHER

    def _stop(self, pending: PendingOp, out: Any) -> None:
        """Call the breakpoint for the first operator with a bad result."""
        if not any(v.row is not None and (v.row[3] or v.row[4]) for v in pending.outputs):
            return
        op = self._observer.finished_op(pending, self._recorded_count() - 1)
        if self._masks.stops(op, self._stops):
            self._stops = frozenset()
            self.unrecorded(lambda: self._then(Stop(op, pending.input_tensors, list(tensors_in(out)))))


def _tape(engine: str, breakpoint_on: str | None) -> tuple[Any, str]:
    """The compiled tape, or None where Python records, and why that is so with engine "auto"."""
    if engine not in ENGINES:
        raise UsageError(f"`engine` is {engine!r}, expected one of {', '.join(map(repr, ENGINES))}")
    if engine == "python":
        return None, ""
    if engine == "auto":
        return (None, "it stops at no operator") if breakpoint_on is not None else tape.available()
    if breakpoint_on is not None:
        raise UsageError("`breakpoint_on` needs engine='python': the tape does not stop; leave `engine` out")
    module = tape.load()
    if module.at_work():
        raise UsageError("engine='tape', but another recorder has the tape; end it, or use engine='python'")
    return module, ""


def _rank_and_path(out: str | os.PathLike[str] | None) -> tuple[int, int, str | None]:
    """Rank of this process, how many there are, and its own file: with several processes `x.rank1.trace`."""
    rank, size = config.rank() or (0, 1)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank, size = distributed.get_rank(), distributed.get_world_size()
    if out is None:
        return rank, size, None
    path = os.fspath(out)
    store.check_path(path)
    if size > 1:
        suffix = next(s for s in store.SUFFIXES if path.endswith(s))
        path = f"{path.removesuffix(suffix)}.rank{rank}{suffix}"
    return rank, size, path


def _meta() -> dict[str, str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    start = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"torch": torch.__version__, "device": device, "seed": str(torch.initial_seed()), "start": start}
