"""Steps whose operators are repeated: a dispatch mode in sampled steps, and what is said before the optimizer steps."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from retrograd import config
from retrograd.compat.c10d_collectives import rank_store
from retrograd.compat.torch_autograd import in_backward
from retrograd.compat.torch_dispatch import entered_modes
from retrograd.compat.torch_dynamo import has_compiled_modules
from retrograd.compat.triton_launch import KernelLaunch, Proceed, around_launches
from retrograd.core.schema import decode, plain
from retrograd.core.wording import some
from retrograd.errors import ExecutionsDifferError, UsageError
from retrograd.trace.compiled_regions import STAY_COMPILED, CompiledRegions
from retrograd.trace.diffing.summaries import op_summary
from retrograd.trace.observer import Observer
from retrograd.trace.operator_mode import OperatorMode
from retrograd.trace.operator_schemas import Operator, tensors_in
from retrograd.trace.pending_op import PendingOp
from retrograd.trace.repeating import messages, replicas
from retrograd.trace.repeating.executions import CannotRepeat, Executions, bits, check_comparable, same
from retrograd.trace.repeating.schema import OperatorDifference, RepeatedSteps, ReplicaDifference

_PATIENCE = 120.0  # seconds for the other ranks to come to the end of the same step
_MOST = 20  # differences that are kept; of a broken device each operator may be one
_WITHOUT_VALUES = ("set_", "resize_", "resize_as_", "_resize_output_", "record_stream")


class StepRepeater:
    """Repeats the operators of sampled steps inside `with`; made by `retrograd.trace.repeat_steps`, which describes it.

    Attributes:
        on_last_step: called when the last of `steps` has been made; may raise.
    """

    def __init__(self, every: int, ranks: bool, steps: int | None) -> None:
        self._every, self._with_ranks, self._last = every, ranks, steps
        self._rank = (config.rank() or (0, 1))[0]
        self._compiled = CompiledRegions("keep", None)
        self._observer = Observer(None, "names", self._compiled, False, lambda run: run())
        self._mode, self._entered = OperatorMode(self.run), False
        self._operators: dict[Any, Operator] = {}
        self._sampling = self._reduced = False
        self._steps = self._sampled = self._repeated = self._before = 0  # operators repeated before this step
        self._differences: list[OperatorDifference] = []
        self._replicas: list[ReplicaDifference] = []
        self._left_out: Counter[str] = Counter()
        self._notes: dict[str, None] = {}
        self._exchange: Any = None
        self._posted: str | None = None  # of the sample before, under this name
        self._told = 0  # differences that the other ranks have been told of
        self._ranks: tuple[int, ...] = (self._rank,)
        self._lock, self._process = threading.RLock(), os.getpid()
        self._stack: ExitStack | None = None
        self.on_last_step: Callable[[], None] | None = None

    def __enter__(self) -> StepRepeater:
        if self._stack is not None:
            raise UsageError("steps are repeated in one `with`; make another with retrograd.trace.repeat_steps(...)")
        import torch.optim.optimizer as optimizer

        self._stack = ExitStack()
        self._stack.callback(optimizer.register_optimizer_step_pre_hook(self._before_optimizer).remove)
        self._stack.callback(optimizer.register_optimizer_step_post_hook(self._after_optimizer).remove)
        self._stack.enter_context(around_launches(self._launch))
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._stack is not None
        self._stop_sampling()
        if self._entered:
            self._entered = False
            self._mode.__exit__(None, None, None)
        self._stack.close()

    @property
    def outcome(self) -> RepeatedSteps:
        """What has been shown by now; with `ranks` of all ranks, up to the last update of a sampled step."""
        compiled = [text for key, text in self._compiled.meta().items() if key == "compiled"]
        return RepeatedSteps(
            self._every, self._steps, self._sampled, self._repeated, tuple(self._differences), tuple(self._replicas),
            tuple(sorted(self._left_out.items())), (*self._notes, *compiled), self._ranks, self._rank,
        )  # fmt: skip

    # Called by the dispatch mode, in any thread.

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute an operator, in a sampled step twice."""
        if not self._sampling or os.getpid() != self._process:  # a worker of a DataLoader is no part of the step
            return func(*args, **kwargs)
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = Operator(func)
        pending = PendingOp(operator, self._steps)
        self._guarded(self._observer.locate, pending, sys._getframe(2))
        self._reduced |= operator.name.startswith("c10d::allreduce") and in_backward()
        try:
            why = _left_out(operator, func)
            executions = None if why is not None else Executions(operator, func, args, kwargs)
        except CannotRepeat as reason:
            executions, why = None, str(reason)
        except Exception as error:  # no memory for copies, say
            executions, why = None, type(error).__name__
        if executions is None:
            if why:
                self._left_out[why] += 1
            out = func(*args, **kwargs)
        else:
            out, results = executions.first()
            inputs = list(tensors_in((args, kwargs)))
            for tensor in inputs:
                self._compiled.check_tensor(tensor)
            self._repeat(executions, pending, results, inputs)
        return out

    def _repeat(self, executions: Executions, pending: PendingOp, results: Any, inputs: list[torch.Tensor]) -> None:
        if not any(t.numel() for t in results) or any(isinstance(t, FakeTensor) for t in results):
            return
        try:
            check_comparable([*results, *inputs])
            second = executions.again()
            self._repeated += 1
            if same(results, second):
                return
            kind, which = executions.examine(tried := [results, second])
            other = tried[next(k for k, number in enumerate(which) if number)]
            if kind is not None and len(self._differences) < _MOST:
                value_of = self._observer.values.value_of
                pending.inputs, pending.outputs = ([value_of(t) for t in tensors] for tensors in (inputs, results))
                op = op_summary(self._observer.finished_op(pending, self._repeated))
                self._differences.append(OperatorDifference(kind, op, self._rank, which, *_apart(results, other)))
        except CannotRepeat as reason:
            self._left_out[str(reason)] += 1
        except Exception as error:  # our own executions must not end the run; one of the program's would do so itself
            self._notes[f"{pending.operator.name} could not be repeated: {type(error).__name__}: {error}"[:300]] = None

    def _launch(self, launch: KernelLaunch, run: Proceed) -> Any:
        if self._sampling and not launch.warmup:
            self._left_out["launches of Triton kernels"] += 1
        return run()

    def _guarded(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function that says where an operator is; its errors are noted."""
        try:
            with self._lock:
                function(*args)
        except Exception as error:
            self._notes[f"lost: {type(error).__name__}: {error}"[:300]] = None

    # Steps.

    def _begin(self) -> None:
        """Begin a sampled step. The mode is entered where no other is, for contexts of modes must be nested."""
        if not self._entered:
            if entered_modes():
                self._notes["a step was left out: the program had entered a dispatch mode of its own"] = None
                return
            self._mode.__enter__()
            self._entered = True
        self._sampling, self._reduced, self._before = True, False, self._repeated

    def _before_optimizer(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._sampling:
            return None

        def outside(argument: Any) -> Any:
            # Lightning and LBFGS: forward and backward are in a closure that the optimizer calls.
            def closure() -> Any:
                result = argument()
                self._end(optimizer)
                return result

            return closure if callable(argument) else argument

        if any(callable(value) for value in (*args[1:], *kwargs.values())):
            return (args[0], *map(outside, args[1:])), {key: outside(value) for key, value in kwargs.items()}
        self._end(optimizer)
        return None

    def _end(self, optimizer: torch.optim.Optimizer) -> None:
        """End a sampled step before its update: raise where something differs, on all ranks that are asked."""
        if not self._sampling:
            return
        self._stop_sampling()
        if self._entered and entered_modes() == 1:  # else it stays and looks on, to be left where it is the only one
            self._entered = False
            self._mode.__exit__(None, None, None)
        if self._with_ranks:
            self._tell_ranks(optimizer)
        if not STAY_COMPILED and any(map(has_compiled_modules, self._observer.locator.roots)):
            note = f"torch {torch.__version__} runs compiled modules eagerly in sampled steps: last bits may differ"
            self._notes[note] = None
        self._guarded(self._observer.between_steps, self._steps)
        if (record := self.outcome).exit_code == 1:
            raise ExecutionsDifferError(messages.verdict(record))

    def _stop_sampling(self) -> None:
        self._sampled += self._sampling and self._repeated > self._before
        self._sampling = False

    def _after_optimizer(self, *_: Any) -> None:
        self._steps += 1
        if self._last is not None and self._steps >= self._last:
            if self.on_last_step is not None:
                self.on_last_step()
        elif self._steps % self._every == 0:
            self._begin()

    def _tell_ranks(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchange what this step has shown, so that all ranks end before the same update."""
        self._exchange = self._exchange or rank_store("repeat")
        if self._exchange is None:
            self._notes["--ranks: there is no process group of several ranks, so this rank stands alone"] = None
            return
        store, name = self._exchange, f"step {self._steps}"
        self._rank = store.rank
        own = {
            "differences": [plain(d) for d in self._differences[self._told :]],
            "sums": replicas.checksums(optimizer, self._observer.locator.roots, self._reduced),
        }
        store.post(name, json.dumps(own))
        posted = {rank: json.loads(text) for rank, text in store.gather(name, range(store.size), _PATIENCE).items()}
        if missing := [str(rank) for rank in range(store.size) if rank not in posted]:
            self._notes[f"rank {some(missing)} did not come to the end of step {self._steps} in {_PATIENCE:.0f} s"] = (
                None
            )
            self._with_ranks = False  # it may have no optimizer: nobody waits for it again
        elif self._posted is not None:
            store.forget(self._posted)  # who has posted this step has read the one before
        self._posted = name
        self._ranks = tuple(sorted(posted))
        for rank, values in posted.items():
            if rank != store.rank:
                self._differences += [decode(OperatorDifference, each) for each in values["differences"]]
        self._told = len(self._differences)
        self._replicas += replicas.compare({rank: values["sums"] for rank, values in posted.items()}, self._steps)


def _left_out(operator: Operator, func: Any) -> str | None:
    """Why an operator is executed once; "" for one that computes nothing, None for those that are repeated."""
    if operator.silent or operator.makes_memory or operator.view or operator.waits:
        return ""
    space = "" if operator.name.startswith("aten.") else operator.name.partition("::")[0]
    if operator.asynchronous or space in ("c10d", "_c10d_functional", "c10d_functional", "_dtensor"):
        return "collectives"
    if space:
        # What such an operator keeps outside of its arguments would change at each execution.
        return f"operators of {space}"
    if operator.aliases and not operator.writes:
        return ""
    if torch.Tag.inplace_view in func.tags or operator.name.split(".")[1] in _WITHOUT_VALUES:
        return ""
    if torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "operators captured in a CUDA graph"
    return None


def _apart(results: list[torch.Tensor], others: list[torch.Tensor]) -> tuple[int, int, str]:
    """How many elements of two results differ, of how many, and the first of them as text."""
    differ, example = 0, ""
    for number, (a, b) in enumerate(zip(results, others, strict=True)):
        apart = bits(a) != bits(b)
        if a.is_complex():
            apart = apart.any(-1)
        differ += int(apart.sum())
        if not example and apart.any():
            at = tuple(apart.nonzero()[0].tolist())
            where = f"result {number}{list(at)}" if len(results) > 1 else str(list(at))
            example = f"{where}: {a[at].item()!r} against {b[at].item()!r}"
    return differ, sum(t.numel() for t in results), example
