"""Records and verifies the collectives of a run whose code stays as it is."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from retrograd.compat import c10d_collectives as c10d
from retrograd.compat.torch_autograd import called_back, in_backward
from retrograd.compat.versions import UntestedVersionWarning, tested
from retrograd.core.program_lines import innermost
from retrograd.errors import RanksDifferError, UsageError, VerificationError
from retrograd.fsdp.attribution import Attribution
from retrograd.fsdp.peers import Peers, meet
from retrograd.fsdp.rank_conditions import RankConditions
from retrograd.fsdp.rank_verification import RankVerifier
from retrograd.fsdp.schema import BESIDE, COMPARED, POINT_TO_POINT, REDUCTIONS, VARYING, Collective, Log, LoggedStep
from retrograd.fsdp.step_patterns import Journal
from retrograd.fsdp.watchdog import Watchdog, to_stderr

ON_CHANGE = ("warn", "raise", "record")
STEPS = ("auto", "optimizer", "manual")
_WAIT = 300.0  # seconds to wait for other ranks without `timeout`: compiling a first step may take minutes
_EXPLAINED = 1.0  # seconds to wait for the rank whose end ended this one
_WARNINGS = 3  # changed steps that are told one by one


class StepChangedWarning(UserWarning):
    """A step issued other collectives than the steps before it."""


class CollectiveLog:
    """What `record_collectives` gives: begins with `with`, or with `start()` until `stop()`."""

    _active: CollectiveLog | None = None
    replaced: Callable[[CollectiveLog], None] | None = None  # is told of a log of the program's, before which this ends
    folder: Path | None = None  # where ring files stay; else they are deleted at the end

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        self.model, self.options = model, options
        self.problems: list[str] = []
        self.journal = Journal(0, 1)
        self._said_changes = 0
        self._unrecorded: set[str] = set()
        self._verifier: RankVerifier | None = None
        self._conditions = RankConditions()
        self._line = ""  # of the program, which issued the last collective
        self._thread = threading.get_ident()
        self._failure: BaseException | None = None
        self._watchdog: Watchdog | None = None
        self._ended = False  # an optimizer has ended the step; whether the program says so too is not known yet
        self._verified = False  # by an optimizer, in this step
        self._manual = options["steps"] == "manual"
        self._undo: list[Callable[[], Any]] = []
        self._lock = threading.RLock()
        self.on_stall: Callable[[str], None] = to_stderr
        self.on_stalled: Callable[[], None] = lambda: None
        self.on_step: Callable[[int], None] = lambda total: None

    def start(self) -> CollectiveLog:
        """Begin to record.

        Raises:
            UsageError: another log records already, or this torch is unknown.
        """
        if (active := CollectiveLog._active) is not None:
            if active.replaced is None:
                raise UsageError(
                    "collectives are recorded already; stop() the first log, or leave its `with`, before another"
                )
            active.stop()
            active.replaced(self)
            self.journal.notes += active.notes
        self._attribution = Attribution(self.model)
        self._undo = [c10d.install(self._before, self._unknown)]
        if names := c10d.unknown_operators():
            self.journal.notes.append(
                f"torch {torch.__version__} has operators that are not recorded: {', '.join(names)}"
            )
        self._undo.append(register_optimizer_step_pre_hook(self._before_optimizer).remove)
        self._undo.append(register_optimizer_step_post_hook(self._after_optimizer).remove)
        CollectiveLog._active = self
        self._watchdog = Watchdog(self._ranks, self.options["timeout"], self._tell, lambda: self.on_stalled())
        self._watchdog.start()
        return self

    def stop(self) -> None:
        """End recording and leave torch as it was; a second call does nothing."""
        if CollectiveLog._active is not self:
            return
        if self._ended:
            self._close()
        for undo in reversed(self._undo):
            undo()
        if self._watchdog is not None:
            self._watchdog.close()
        if self._peers is not None:
            self._peers.leave(keep=self.folder is not None)
        CollectiveLog._active = None

    def __enter__(self) -> CollectiveLog:
        return self.start()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.failed(error)
        self.stop()

    def failed(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends with an error, and the error which collective was the last."""
        if self._failure is error:
            return  # told when it left `with`
        self._failure = error
        self._ended = False  # the others do not wait for this rank's last step
        ours = isinstance(error, (RanksDifferError, VerificationError))
        if self._watchdog is not None:
            self._watchdog.stop()
        last = self.journal.last
        line = f" at {self._line}" if self._line else ""
        where = f"after {last.name}{line} ({self.journal.place()})" if last is not None else "before any collective"
        raised = f"raised {type(error).__name__}: {(str(error).splitlines() or [''])[0][:1000]}"
        sentences = [f"retrograd.fsdp: rank {self.journal.rank} ended {where}"]
        try:
            if (ranks := self._ranks()) is not None:
                ranks.fail(raised if ours else f"{raised}, {where}")
                if not self.journal.total:
                    self._conditions.tell(self._tell, self.journal.notes)
        except RuntimeError:  # the store is gone with the rank that held it
            sentences.append("the store of the job does not answer: the process that held it has ended")
        if self._verifier is not None and not ours:
            # Only torch's own errors may come from the end of another rank, which has its word out in a moment.
            sentences += self._verifier.explain(_EXPLAINED if isinstance(error, RuntimeError) else 0)
        if ours:
            self.problems.append(str(error))
        else:
            self.problems.append("; ".join([f"rank {self.journal.rank} {raised[:200]}", *sentences]))
            error.add_note("; ".join(sentences))

    def step(self) -> None:
        """End a step: with gradient accumulation after each micro-batch or after each update, as you like.

        Raises:
            RanksDifferError: ranks issued different collectives.
            VerificationError: gradients were not reduced or not finite; or the step changed and on_change="raise".
        """
        self._manual = True
        self._close()

    @property
    def steps(self) -> list[LoggedStep]:
        """The steps so far, the last 10,000."""
        return list(self.journal.steps)

    @property
    def notes(self) -> list[str]:
        """What is worth knowing and nothing wrong."""
        return self.journal.notes

    @property
    def last(self) -> Collective | None:
        """The collective that was issued last."""
        return self.journal.last

    def collectives(self, step: int = -1) -> list[Collective]:
        """The collectives of a step, by default of the last one that ended.

        Raises:
            UsageError: there is no such step, or it is not kept.
        """
        rows = self.steps
        row = rows[-1] if step == -1 and rows else next((r for r in rows if r.number == step), None)
        if row is None or row.pattern < 0:
            raise UsageError(
                f"`step` is {step}, which is not kept; {len(rows)} steps are, up to {self.journal.total - 1}"
            )
        log = self.log()
        return log.collectives(log.patterns[row.pattern].entries)

    def hash(self) -> str:
        """Of everything since recording began, 16 hex digits."""
        return self.journal.digest.hex()

    def log(self) -> Log:
        """The whole as a record."""
        with self._lock:
            log = self.journal.log()
        log.problems = list(self.problems)
        log.versions = {"torch": torch.__version__}
        return log

    def save(self, path: str | Path) -> None:
        """Write the log as JSON, schema retrograd.fsdp.log/1."""
        self.log().save(path)

    def _ranks(self) -> RankVerifier | None:
        """The verifier, once there is a process group with more than one rank."""
        if self._verifier is None and dist.is_available() and dist.is_initialized():
            with self._lock:
                self.journal.rank, self.journal.size = dist.get_rank(), dist.get_world_size()
                exchange = c10d.rank_store("order") if self._verifier is None else None
                if exchange is not None:
                    self._conditions.join(exchange)
                    peers, seconds = meet(exchange, self.folder, self.journal.notes), self.options["timeout"] or _WAIT
                    self._verifier = RankVerifier(exchange, self.journal, seconds, peers)
        return self._verifier

    @property
    def _peers(self) -> Peers | None:
        return None if self._verifier is None else self._verifier.peers

    def _unknown(self, name: str) -> None:
        if name in self._unrecorded:
            return
        self._unrecorded.add(name)
        text = (
            f"step {self.journal.total}: {name} of torch {torch.__version__} ran, and neither it nor its later calls "
            f"are recorded; known are the operators of torch {tested('torch')}"
        )
        with self._lock:
            self.journal.notes.append(text)
        warnings.warn(f"retrograd.fsdp: {text}", UntestedVersionWarning, stacklevel=4)

    def _before(self, call: c10d.IssuedCollective) -> None:
        varying = call.kind in ("all-to-all", "send", "recv")
        numel = VARYING if varying else sum(t.numel() for t in call.tensors)
        by, modules, phase, op = self._attribution.of(sys._getframe(1), call.kind, numel, call.group)
        if phase in ("optimizer", "other") and threading.get_ident() != self._thread:
            phase = "backward" if called_back(self._thread) else BESIDE
        if self._ended and phase != "optimizer" and (phase in COMPARED or by == "fsdp"):
            self._close()
        dtype = str(call.tensors[0].dtype).removeprefix("torch.") if call.tensors else ""
        ranks = tuple(sorted(dist.get_process_group_ranks(call.group)))
        root = call.peer if call.kind in POINT_TO_POINT else call.root
        collective = Collective(call.kind, phase, modules, numel, dtype, op, ranks, by, root, call.group.group_name)
        if self.journal.total < 2:
            self._conditions.collective(call.kind, phase, call.tensors, ranks)
        verifier = self._ranks()
        with self._lock:
            self.journal.add(collective)
            if call.channel is not None:
                self.journal.channels.add(call.channel, call.kind, sum(t.nbytes for t in call.tensors))
            # Of a backward in a thread of autograd's the program's line is that which waits for it.
            self._line = innermost(sys._getframe(1)) or innermost(sys._current_frames().get(self._thread))
            if verifier is not None and verifier.peers is not None:
                verifier.peers.own.add(collective, self._line, self.journal.total, self.journal.issued - 1)
        if self._watchdog is not None:
            self._watchdog.progress()
        if verifier is None:
            return
        verifier.look(collective, self.journal.total < self.options["first"])
        looked = self.options["nonfinite"] and collective.kind in REDUCTIONS and phase == "backward"
        finite = (bool(t.isfinite().all()) for t in call.tensors if t.is_floating_point())
        if looked and not verifier.bad and not all(finite):
            verifier.bad = f"{collective.name} ({self.journal.place()})"
        if self.options["strict"]:
            verifier.before(collective)

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if in_backward():
            return  # an optimizer inside backward, one for each parameter: no end of a step
        self._thread = threading.get_ident()
        if self._ended:
            self._close()
        self.journal.updated = hash(tuple(id(p) for group in optimizer.param_groups for p in group["params"]))
        self._attribution.ddp.refresh()
        if not self.journal.total:
            self._conditions.optimizer(optimizer, self._attribution.ddp.replicas())
        self._reduced()
        self._compare(optimizer)
        self._verified = True
        self._attribution.optimizing = True

    def _after_optimizer(self, *_: Any) -> None:
        if in_backward():
            return
        self._attribution.optimizing = False
        if self.options["steps"] == "optimizer":
            self._close()
            self.on_step(self.journal.total)
        elif not self._manual:
            self._ended = True

    def _reduced(self) -> None:
        """Before an optimizer: FSDP keeps no gradient that it did not reduce."""
        if names := self._attribution.unreduced():
            reductions = sum(self.journal.entries[n].kind == "reduce-scatter" for n in self.journal.current)
            raise VerificationError(
                f"step {self.journal.total}: the gradients of {', '.join(names)} were never reduced over the ranks "
                f"({reductions} reduce-scatters in this step) and the optimizer is about to go on without them: under "
                "compiled autograd compile the forward alone; with gradient accumulation call "
                "set_requires_gradient_sync(True) before the last backward"
            )

    def _compare(self, optimizer: Any = None) -> None:
        every, now = self.options["verify_every"], self.journal.total
        due = now < self.options["first"] or (every is not None and now % every == 0)
        if (verifier := self._ranks()) is None or not due:
            return
        self._conditions.start()
        try:
            if self.options["strict"]:
                verifier.end_of_step()
            verifier.check()
        except RanksDifferError as error:
            if idle := self._attribution.ddp.idle(optimizer):
                raise RanksDifferError(f"{error}; rank {self.journal.rank} has {idle}") from None
            raise
        finally:
            if verifier.exchange.rank == 0:
                self._conditions.tell(self._tell, self.journal.notes)

    def _close(self) -> None:
        self._ended = False
        if not self._verified:
            self._compare()
        self._verified = False
        with self._lock:
            change = self.journal.end_step()
        if self._watchdog is not None:
            self._watchdog.progress()
        if change:
            self._changed(f"step {self.journal.total - 1} differs from the steps before it, {change}")

    def _changed(self, text: str) -> None:
        self._said_changes += 1
        if self._said_changes <= _WARNINGS:
            self.problems.append(text)
        elif self._said_changes == _WARNINGS + 1:
            text = "further steps differ; they are recorded and no longer told"
            self.problems.append(text)
        else:
            return
        if self.options["on_change"] == "raise":
            raise VerificationError(text)
        if self.options["on_change"] == "warn":
            warnings.warn(f"retrograd.fsdp: {text}", StepChangedWarning, stacklevel=4)

    def _tell(self, text: str) -> None:
        self.problems.append(text)
        self.on_stall(text)


def record_collectives(
    model: Any = None, *, verify_every: int | None = 1, first: int = 3, strict: bool = False,
    timeout: float | None = None, on_change: str = "warn", steps: str = "auto", nonfinite: bool = False,
) -> CollectiveLog:  # fmt: skip
    """Record the collectives of a run with the modules they are for, and compare steps and ranks.

        with retrograd.fsdp.record_collectives() as log:
            for batch in batches:
                train_step(batch)  # FSDP2, DDP, buckets, torch.compile: as it is
        log.save(f"order-{rank}.json")

    FSDP2 matches reduce-scatters by their position alone: blocks of equal size that run in another order on one rank
    give wrong gradients without an error. Here the ranks compare hashes before an optimizer uses the gradients.

    Args:
        model: names are those of its modules; None asks FSDP, DDP or the outermost module at work.
        verify_every: ranks are compared before every Nth update; None compares the first steps alone. The hash rolls
            over the steps in between, so a difference is found late, not never.
        first: that many steps at the beginning are always compared.
        strict: compare before each collective too, which finds a difference before it hangs or spoils anything.
        timeout: seconds after which a rank that issues nothing is reported with the collective that is due, and how
            long ranks wait for each other (without it 300 s, and no report).
        on_change: what a step is that differs from those before it on this rank: "warn", "raise" or "record".
        steps: what ends a step: "optimizer" (its step()), "manual" (`log.step()`), "auto" (`log.step()` if the
            program calls it, else the optimizer).
        nonfinite: look for NaN and Inf in what this rank gives to gradient reductions, and name the rank; reads every
            gradient once more, and on a GPU waits for it.

    Returns:
        The log: a context manager with `step()`, `steps`, `hash()`, `collectives()`, `save(path)`, `problems`, `notes`.

    Raises:
        UsageError: an argument makes no sense.
    """
    for name, value, most in (("verify_every", verify_every, 1), ("first", first, 0)):
        allowed = value is None and name == "verify_every"
        if not allowed and (not isinstance(value, int) or isinstance(value, bool) or value < most):
            raise UsageError(f"`{name}` is {value!r}, expected a number of steps, {most} or more")
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout <= 0):
        raise UsageError(f"`timeout` is {timeout!r}, expected seconds, more than 0, or None")
    for name, value, legal in (("on_change", on_change, ON_CHANGE), ("steps", steps, STEPS)):
        if value not in legal:
            raise UsageError(f"`{name}` is {value!r}, expected one of {', '.join(map(repr, legal))}")
    if model is not None and not isinstance(model, torch.nn.Module):
        raise UsageError(f"`model` is {type(model).__name__}, expected a torch.nn.Module or None")
    options = {
        "verify_every": verify_every, "first": first, "strict": strict, "timeout": timeout, "on_change": on_change,
        "steps": steps, "nonfinite": nonfinite,
    }  # fmt: skip
    return CollectiveLog(model, options)
