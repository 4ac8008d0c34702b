"""Buckets of gradients over several FSDP2 groups: reduced in the order of a static plan, on unchanged PyTorch.

FSDP2 goes on doing everything else: it gathers parameters, notices that a group's gradients are ready, and its own
function reduces, divides, casts, accumulates and hands out; it is called once for a bucket instead of once for a
group.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from retrograd.compat.fsdp2 import foreach_reduce, names, param_groups, self_test
from retrograd.compat.registry import require
from retrograd.compat.torch_autograd import BACKWARD, in_backward
from retrograd.compat.torch_dynamo import compiles_backward
from retrograd.core.order_registry import Order, announce, withdraw
from retrograd.errors import BucketError, UsageError
from retrograd.fsdp.agreement import Agreement
from retrograd.fsdp.bucket_plan import MIB, BucketPlan, Launcher, digest
from retrograd.fsdp.bucket_reducer import Backward, Reduction
from retrograd.fsdp.model_plan import Model, plans_differ
from retrograd.fsdp.ordered_reduce import FixedOrderReduceScatter

_KEPT = 100  # backwards whose launches the log keeps
_KEEP = "make buckets once, on every rank; to make them anew, save() the plan and give it as plan="


@dataclass(frozen=True)
class _BucketSettings:
    bucket: int
    missing: str
    verify_every: int
    max_pending: int | None
    timeout: float
    comm: Any


class Buckets:
    """Handle of `bucket_gradients`.

    Attributes:
        plan: what is reduced together, in which order; None until the first backward, unless it was given.
        backwards: how many backward passes with gradients to reduce have ended.
        abandoned: how many ended in an exception; their gradients were dropped.
        sequences: hashes of every different sequence so far; one, if nothing varies.
    """

    def __init__(self, model: Any, settings: _BucketSettings, plan: BucketPlan | None) -> None:
        self.plan = plan
        self.backwards = self.abandoned = 0
        self.sequences: list[str] = []
        self._settings = settings
        self._model = Model(model, settings.comm)
        self._step_hook: Any = None  # while gradients are held; none after remove() or pause()
        self._removed = self._agreed = False
        self._open: Backward | None = None
        self._log: deque[tuple[Reduction, ...]] = deque(maxlen=_KEPT)
        self._peak: Launcher | None = None  # of the backward in which most waited
        self._hook()
        self._agreement = Agreement(param_groups.ranks_of(self._model.group_list), settings.timeout)

    @property
    def log(self) -> list[tuple[Reduction, ...]]:
        """What each of the last 100 backward passes reduced, in order; the newest last."""
        return list(self._log)

    def hash(self) -> str:
        """16 hexadecimal digits of the sequence that the last backward reduced: equal at every step and on every rank.

        Raises:
            UsageError: no backward has ended yet.
        """
        if not self._log:
            raise UsageError("no backward has ended yet; hash() is that of the last one")
        return digest([astuple(launch) for launch in self._log[-1]])

    def report(self) -> str:
        """What was planned, what happened and what it cost, as text."""
        lines = [self.plan.describe() if self.plan else "no plan yet: it is made by the first backward"]
        peak = self._peak
        size, groups = (peak.peak_bytes, peak.peak_groups) if peak else (0, 0)
        launches = len(self._log[-1]) if self._log else 0
        lines.append(
            f"{self.backwards} backwards, {launches} reductions in the last, {len(self.sequences)} different "
            f"sequences; {self.abandoned} ended in an exception"
        )
        waited = f", for {peak.blocked_by}" if peak and peak.blocked_by else ""
        lines.append(f"at most {size / MIB:.3g} MB in {groups} groups waited at once{waited}")
        return "\n".join(lines)

    def remove(self) -> None:
        """Leave reduction to FSDP2 again; a second call does nothing.

        Raises:
            UsageError: a backward is running, some of whose gradients are held.
        """
        self._unhook("remove")
        self._removed = True

    def pause(self) -> None:
        """Leave reduction to FSDP2 until `resume`, on every rank: to compare both in one run; the plan is kept.

        Raises:
            UsageError: a backward is running, some of whose gradients are held.
        """
        self._unhook("pause")

    def resume(self) -> None:
        """Go on after `pause`, on every rank; does nothing if nothing was paused.

        Raises:
            UsageError: a backward is running, the handle was removed, or others are in its place.
        """
        if self._removed:
            raise UsageError("resume() was called after remove(); call bucket_gradients again, with plan=handle.plan")
        if in_backward():
            raise UsageError("resume() was called inside backward; call it between steps")
        if self._step_hook is None:
            self._hook()

    def _unhook(self, method: str) -> None:
        if self._step_hook is None:
            return
        if in_backward():
            raise UsageError(f"{method}() was called inside backward; call it between steps")
        self._abandon()
        self._step_hook.remove()
        self._step_hook = None
        for state in self._model.states:
            for name in (names.BACKWARD_BEGINS, names.BACKWARD_ENDS, names.FORWARD_BEGINS, names.RESET):
                param_groups.unshadow(state, name)
        for group in self._model.group_list:
            param_groups.unshadow(group, names.INPUTS_WATCHED)
        foreach_reduce.give_back(self._model.group_list)
        withdraw(self._model.root)

    def _hook(self) -> None:
        foreach_reduce.take_over(self._model.group_list, self._arrive)
        # On the root only, where FSDP2's own hook leaves a compiled graph anyway. A root whose backward failed believes
        # that it is being checkpointed and does not ask who starts a step; this hook comes first.
        hook = torch.compiler.disable(self._step, reason="bookkeeping of gradient buckets")
        self._step_hook = self._model.root.register_forward_pre_hook(hook, prepend=True)
        if self._agreed and self.plan is not None:
            self._announce(self.plan)
        for state in self._model.states:
            param_groups.shadow(state, names.BACKWARD_BEGINS, self._begins, state)
            param_groups.shadow(state, names.BACKWARD_ENDS, self._ends)
            param_groups.shadow(state, names.FORWARD_BEGINS, self._forward)
        if names.version().resets:
            param_groups.shadow(self._model.states[0], names.RESET, self._reset)
        if self.plan is None:
            for name, group in self._model.groups.items():
                param_groups.shadow(group, names.INPUTS_WATCHED, self._watched, name)

    def _watched(self, name: str, before: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        answer = before(args, kwargs)
        # FSDP2 hears of the end of a group's backward through its inputs; without one that needs a gradient, only
        # when everything is over. It returns the very arguments then.
        if torch.is_grad_enabled() and answer[0] is args and answer[1] is kwargs:
            self._model.late.add(name)
        return answer

    def _step(self, *_: Any) -> None:
        """A forward begins: the last backward must have ended."""
        if not in_backward():
            _refuse_compiled_autograd()
            if self._open is not None or param_groups.failed(self._model.states[0]):
                self._recover()

    def _forward(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Each part calls it in each forward; only where forward is called on a part alone is there anything to do.
        if self._open is not None or param_groups.failed(self._model.states[0]):
            self._step()
        return before(*args, **kwargs)

    def _begins(self, state: Any, before: Callable[..., Any]) -> Any:
        if not param_groups.begun(state):
            with torch.no_grad():
                self._begin()
        return before()

    def _ends(self, before: Callable[..., Any]) -> None:
        try:
            param_groups.look_again(self._model.group_list)
            before()
            with torch.no_grad():
                self._end()
        except BaseException:
            self._abandon()
            raise

    def _reset(self, before: Callable[..., Any]) -> None:
        self._abandon()
        before()
        param_groups.drop_gradients(self._model.group_list)

    def _begin(self) -> None:
        _refuse_compiled_autograd()
        if param_groups.manual(self._model.states[0]):
            raise UsageError("bucket_gradients ends backward itself; call set_manual_backward_finalization(False)")
        self._abandon()
        plan, settings = self._agree_on_plan(), self._settings
        expected = self._model.expected()
        due = bool(settings.verify_every) and self.backwards % settings.verify_every == 0
        checked = bool(expected) and (due or settings.missing == "skip")
        launcher = Launcher(plan, expected, settings.max_pending)
        self._open = Backward(self._model, launcher, expected, settings.missing, self._agreement if checked else None)

    def _agree_on_plan(self) -> BucketPlan:
        """The plan; at the first backward made, or looked at, and compared over ranks before anything is reduced."""
        if self._agreed and self.plan is not None:
            return self.plan
        if self.plan is not None:
            self._model.require_fit(self.plan)
        plan = self.plan or self._model.plan(self._settings.bucket)
        cap = self._settings.max_pending
        if cap is not None and cap < plan.nominal_peak:
            raise UsageError(
                f"max_pending_mb is {cap / MIB:.3g}, but {plan.nominal_peak / MIB:.3g} MB wait even if gradients come "
                "in the planned order; raise it, or make bucket_mb smaller"
            )
        self._agreement.require("the comparison of plans", plan.hash, plan.to_json, plans_differ)
        self.plan, self._agreed = plan, True
        self._announce(plan)
        for group in self._model.group_list:
            param_groups.unshadow(group, names.INPUTS_WATCHED)
        return plan

    def _announce(self, plan: BucketPlan) -> None:
        announce(self._model.root, Order("bucket plan", plan.hash, plan.rows(), "bucket", _KEEP))

    def _arrive(self, arguments: dict[str, Any]) -> tuple[Any, ...]:
        """FSDP2 would reduce a group's gradients, with these arguments; what it is told."""
        if self._open is None:
            raise BucketError(
                "gradients arrived in a backward that FSDP2 did not announce; was the graph kept after a backward that "
                "failed? Run forward again, or call reset_iter_state()"
            )
        try:
            return self._open.arrive(arguments)
        except BaseException:
            self._abandon()
            raise

    def _end(self) -> None:
        backward = self._open
        if backward is None:
            return
        backward.finish()
        self._open = None
        if not backward.expected:  # an accumulating backward, which reduces nothing
            return
        self.backwards += 1
        launches = tuple(backward.launches)
        changed = not self._log or launches != self._log[-1]
        self._log.append(launches)
        if changed and self.hash() not in self.sequences:
            self.sequences.append(self.hash())
        if backward.launcher.peak_bytes > (self._peak.peak_bytes if self._peak else 0):
            self._peak = backward.launcher

    def _abandon(self) -> None:
        """Drop what a backward that failed has left."""
        if self._open is not None:
            self._open.drop()
            self._open = None
            self.abandoned += 1

    def _recover(self) -> None:
        """A forward begins, and the last backward never ended."""
        if not names.version().resets:
            raise BucketError(
                f"the last backward ended in an exception, and FSDP2 of PyTorch {torch.__version__} cannot be reset; "
                "start again from a checkpoint, or use PyTorch 2.13, which can"
            )
        warnings.warn(
            "the last backward ended in an exception; its gradients that were not reduced are dropped. Call "
            "zero_grad() as well: others may have been reduced",
            stacklevel=2,
        )
        param_groups.forget(self._model.states[0], self._model.group_list)


def bucket_gradients(
    model: Any,
    bucket_mb: float = 25.0,
    reduce: str = "native",
    missing: str = "error",
    verify_every: int = 100,
    max_pending_mb: float | None = None,
    plan: BucketPlan | str | Path | None = None,
    timeout: float = 300.0,
) -> Buckets:
    """Reduce gradients of several FSDP2 groups together, in an order that is the same at every step and on every rank.

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        handle = retrograd.fsdp.bucket_gradients(model, bucket_mb=25)

    FSDP2 reduces each group by itself, in the order in which autograd happens to finish them. Here several groups share
    one reduce-scatter, and reduce-scatters leave in the order of a plan: the first forward reversed, compared over
    ranks before anything is reduced. A group that is ready too early is held. All-gathers stay as they are, one a
    group. Call it on every rank, after `fully_shard` and before the first backward.

    Args:
        model: the root module that `fully_shard` was called on.
        bucket_mb: size of a bucket on the wire, in 2**20 bytes; a group that is larger has one for itself.
        reduce: "native", as FSDP2 does; or "ordered": summed in rank order in float32, the same bits for every bucket
            size.
        missing: what a parameter without gradient means. "error": the run ends with its name; "zeros": zeros are
            reduced for it, and its gradient is zero instead of None; "skip": it is left out, if every rank leaves it
            out, which ranks ask each other before each bucket.
        verify_every: ranks compare what they are about to reduce before each bucket of the first backward and of every
            so manieth; 0 for the plan alone.
        max_pending_mb: most gradients that may be held for one that is late, in 2**20 bytes; None for no limit.
        plan: a plan, or the file of one, instead of the order of the first forward.
        timeout: how many seconds ranks wait for each other when they compare.

    Returns:
        A handle: `.plan`, `.log`, `.hash()`, `.report()`, `.pause()` and `.resume()`, and `.remove()`, which undoes it.

    Raises:
        UsageError: an argument is wrong, the model is not the root of sharded modules or has buckets already, this
            PyTorch is unknown, or compiled autograd is on.
        BucketError: in a backward: gradients are missing or too much is held.
        RanksDifferError: in a backward: ranks have different plans or are about to reduce different things.
    """
    settings = _BucketSettings(
        _size("bucket_mb", bucket_mb),
        _choice("missing", missing, ("error", "zeros", "skip")),
        verify_every,
        None if max_pending_mb is None else _size("max_pending_mb", max_pending_mb),
        timeout,
        FixedOrderReduceScatter() if _choice("reduce", reduce, ("native", "ordered")) == "ordered" else None,
    )
    if not isinstance(verify_every, int) or verify_every < 0:
        raise UsageError(f"`verify_every` is {verify_every!r}, expected a number of backwards, or 0")
    if isinstance(plan, (str, Path)):
        plan = BucketPlan.load(plan)
    _refuse_compiled_autograd()
    require(BACKWARD)
    require(self_test.BUCKETS)
    groups = param_groups.groups_of(param_groups.states_of(model))
    if not groups:
        raise UsageError("`model` has no sharded parameters; call fully_shard on its blocks and on itself first")
    if settings.comm is not None and (other := param_groups.custom_comms(groups)):
        raise UsageError(f'reduce="ordered" would replace {other}; remove set_custom_reduce_scatter or say "native"')
    return Buckets(model, settings, plan)


def _refuse_compiled_autograd() -> None:
    if compiles_backward():
        raise UsageError(
            "compiled autograd is on, under which FSDP2 silently stops reducing gradients after the first step; switch "
            "it off (torch._dynamo.config.compiled_autograd = False) and compile the blocks, not the backward"
        )


def _size(name: str, mb: float) -> int:
    if isinstance(mb, bool) or not isinstance(mb, (int, float)) or not mb > 0 or mb == float("inf"):
        raise UsageError(f"`{name}` is {mb!r}, expected a positive number of 2**20 bytes, as 25")
    return max(1, int(mb * MIB))


def _choice(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise UsageError(f"`{name}` is {value!r}, expected one of {', '.join(known)}")
    return value
