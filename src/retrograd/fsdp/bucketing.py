"""Buckets of gradients over several FSDP2 groups: reduced in the order of a static plan, on unchanged PyTorch.

FSDP2 goes on doing everything else: it gathers parameters, notices that a group's gradients are ready, and its own
function reduces, divides, casts, accumulates and hands out; it is called once for a bucket instead of once for a
group.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from retrograd.errors import BucketError, UsageError
from retrograd.fsdp import private
from retrograd.fsdp.agreement import Agreement
from retrograd.fsdp.buckets import MIB, BucketPlan, Group, Launcher, digest, first_difference
from retrograd.fsdp.private import Call

_KEPT = 100  # backwards whose launches the log keeps


@dataclass(frozen=True)
class Launch:
    """One reduction of gradients.

    Attributes:
        bucket: its number in the plan.
        repeat: whether these gradients came after others of the same groups in the same backward.
        groups: what was reduced.
        without: parameters of these groups that had no gradient.
        numel: elements on the wire.
        dtype: on the wire.
    """

    bucket: int
    repeat: bool
    groups: tuple[str, ...]
    without: tuple[str, ...]
    numel: int
    dtype: str


class Buckets:
    """Handle of `bucket_gradients`.

    Attributes:
        plan: what is reduced together, in which order; None until the first backward, unless it was given.
        backwards: how many backward passes with gradients to reduce have ended.
        abandoned: how many ended in an exception; their gradients were dropped.
    """

    def __init__(self, model: Any, settings: _Settings, plan: BucketPlan | None) -> None:
        self.plan: BucketPlan | None = plan
        self.backwards: int = 0
        self.abandoned: int = 0
        self._model: Any = model
        self._settings: _Settings = settings
        self._states: list[Any] = private.states_of(model)
        self._groups: list[Any] = private.groups_of(self._states)
        self._names: list[str] = private.names_of(model, self._groups)
        self._name_of: dict[int, str] = {
            id(param): name
            for name, group in zip(self._names, self._groups, strict=True)
            for param in group.fsdp_params
        }
        self._parameter: dict[int, str] = private.parameter_names(model, self._groups)
        self._late: set[str] = set()
        self._agreed: bool = False
        self._open: _Backward | None = None
        self._log: deque[tuple[Launch, ...]] = deque(maxlen=_KEPT)
        self._hashes: list[str] = []
        self._peak: tuple[int, int, str | None] = (0, 0, None)
        private.take_over(self._groups, self._arrive)
        self._agreement: Agreement = Agreement(private.ranks_of(self._groups), settings.timeout)
        self._hook()

    @property
    def log(self) -> list[tuple[Launch, ...]]:
        """What each of the last 100 backward passes reduced, in order; the newest last."""
        return list(self._log)

    def hash(self) -> str:
        """16 hexadecimal digits of the sequence that the last backward reduced: equal at every step and on every rank.

        Raises:
            UsageError: no backward has ended yet.
        """
        if not self._log:
            raise UsageError("no backward has ended yet; hash() is that of the last one")
        return _sequence(self._log[-1])

    def report(self) -> str:
        """What was planned, what happened and what it cost, as text."""
        lines = [self.plan.describe() if self.plan else "no plan yet: it is made by the first backward"]
        size, groups, blocking = self._peak
        launches = len(self._log[-1]) if self._log else 0
        lines.append(
            f"{self.backwards} backwards, {launches} reductions in the last, {len(self._hashes)} different sequences; "
            f"{self.abandoned} ended in an exception"
        )
        waited = f", for {blocking}" if blocking else ""
        lines.append(f"at most {size / MIB:.3g} MB in {groups} groups waited at once{waited}")
        return "\n".join(lines)

    def remove(self) -> None:
        """Leave reduction to FSDP2 again; a second call does nothing.

        Raises:
            UsageError: a backward is running, some of whose gradients are held.
        """
        if self._model is None:
            return
        if self._open is not None and private.in_backward():
            raise UsageError("remove() was called inside backward; call it between steps")
        for state in self._states:
            for name in (private.BACKWARD_BEGINS, private.BACKWARD_ENDS, private.FORWARD_BEGINS, private.RESET):
                private.unshadow(state, name)
        for group in self._groups:
            private.unshadow(group, private.INPUTS_WATCHED)
        private.give_back(self._groups)
        self._model, self._open = None, None

    # Hooks ------------------------------------------------------------------------------------------------------

    def _hook(self) -> None:
        for state in self._states:
            private.shadow(state, private.BACKWARD_BEGINS, lambda before, state=state: self._begins(before, state))
            private.shadow(state, private.BACKWARD_ENDS, self._ends)
            private.shadow(state, private.FORWARD_BEGINS, self._forward)
        if private.version().resets:
            private.shadow(self._states[0], private.RESET, self._reset)
        for name, group in zip(self._names, self._groups, strict=True):
            if self.plan is None:
                private.shadow(group, private.INPUTS_WATCHED, lambda before, name=name: self._watch(before, name))

    def _watch(self, before: Callable[..., Any], name: str) -> Callable[..., Any]:
        def watched(args: Any, kwargs: Any) -> Any:
            answer = before(args, kwargs)
            # FSDP2 hears of the end of a group's backward through its inputs; without one that needs a gradient, only
            # when everything is over. It returns the very arguments then.
            if torch.is_grad_enabled() and answer[0] is args and answer[1] is kwargs:
                self._late.add(name)
            return answer

        return watched

    def _forward(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def root_pre_forward(*args: Any, **kwargs: Any) -> Any:
            if not private.in_backward():
                _refuse_compiled_autograd()
                if self._open is not None or private.failed(self._states[0]):
                    self._recover()
            return before(*args, **kwargs)

        return root_pre_forward

    def _begins(self, before: Callable[..., Any], state: Any) -> Callable[..., Any]:
        def backward_begins() -> Any:
            if not private.begun(state):
                with torch.no_grad():
                    self._begin()
            return before()

        return backward_begins

    def _ends(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def backward_ends() -> None:
            try:
                private.look_again(self._groups)
                before()
                with torch.no_grad():
                    self._end()
            except BaseException:
                self._abandon()
                raise

        return backward_ends

    def _reset(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def reset_iter_state() -> None:
            self._abandon()
            before()
            private.drop_gradients(self._groups)

        return reset_iter_state

    # One backward -----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        _refuse_compiled_autograd()
        if private.manual(self._states[0]):
            raise UsageError("bucket_gradients ends backward itself; call set_manual_backward_finalization(False)")
        self._abandon()
        plan = self._agree_on_plan()
        expected = {
            name: private.trainable(group)
            for name, group in zip(self._names, self._groups, strict=True)
            if group.reduce_grads and private.trainable(group)
        }
        every = self._settings.verify_every
        checked = self._settings.missing == "skip" or bool(every and self.backwards % every == 0)
        cap = self._settings.max_pending
        self._open = _Backward(Launcher(plan, expected, cap), expected, checked and bool(expected))

    def _agree_on_plan(self) -> BucketPlan:
        plan = self.plan or self._make_plan()
        if not self._agreed:
            if self.plan is not None:
                _fits(plan, self._specs())
            cap = self._settings.max_pending
            if cap is not None and cap < plan.nominal_peak:
                raise UsageError(
                    f"max_pending_mb is {cap / MIB:.3g}, but {plan.nominal_peak / MIB:.3g} MB wait even if gradients "
                    "come in the planned order; raise it, or make bucket_mb smaller"
                )
            self._agreement.require("plan", plan.hash, plan.to_json, _plans_differ)
            self.plan, self._agreed = plan, True
            for group in self._groups:
                private.unshadow(group, private.INPUTS_WATCHED)
        return plan

    def _make_plan(self) -> BucketPlan:
        specs = self._specs()
        known = {id(group): name for name, group in zip(self._names, self._groups, strict=True)}
        # A group that is used twice is ready after the backward of its first use.
        order = dict.fromkeys(known[id(g)] for g in private.forward_order(self._states[0]) if id(g) in known)
        unused = [name for name in self._names if name not in order]
        self._late.update(unused)
        ordered = [specs[name] for name in [*reversed(order), *unused]]
        return BucketPlan.of(
            [Group(s.name, s.bytes, s.key, s.name in self._late) for s in ordered], self._settings.bucket
        )

    def _specs(self) -> dict[str, Group]:
        kinds: dict[Any, int] = {}
        specs: dict[str, Group] = {}
        for name, group in zip(self._names, self._groups, strict=True):
            params = private.trainable(group)
            call = self._comm(Call.of(group))
            made = {private.grad_dtype(param) for param in params}
            if len(made) > 1 and call.reduce_dtype is None:
                raise UsageError(
                    f"gradients of group {name} have dtypes {', '.join(sorted(map(_word, made)))}, which FSDP2 cannot "
                    "reduce together; shard its modules separately, or give them a reduce_dtype"
                )
            grad = "+".join(sorted(map(_word, made))) or "frozen"
            wire = call.reduce_dtype or next(iter(made), torch.float32)
            kind = kinds.setdefault((*call.kind, grad), len(kinds))
            key = f"{grad}->{_word(wire)} over {private.shape_of_mesh(group)} ({kind})"
            numel = sum(private.wire_numel(param, group) for param in params)
            specs[name] = Group(name, numel * wire.itemsize, key)
        return specs

    def _comm(self, call: Call) -> Call:
        if self._settings.comm is not None:
            call.arguments["reduce_scatter_comm"] = self._settings.comm
        return call

    def _arrive(self, call: Call) -> tuple[Any, ...]:
        """FSDP2 has gradients of a group: hold them, reduce what is complete."""
        if self._open is None:
            raise BucketError(
                "gradients arrived outside a backward that FSDP2 announced; was the graph kept after a backward that "
                "failed? Run forward again, or call reset_iter_state()"
            )
        name = self._name_of[id(call.params[0])]
        try:
            with torch.no_grad():
                if self._settings.missing == "zeros":
                    self._add_zeros(self._comm(call), name)
                size = sum(grad.numel() * grad.element_size() for grad in call.grads)
                self._open.take(name, self._comm(call))
                for index in self._open.launcher.arrive(name, size):
                    self._launch(self._open, index, self._open.held)
        except BaseException:
            self._abandon()
            raise
        return call.placeholder()

    def _add_zeros(self, call: Call, name: str) -> None:
        group = self._groups[self._names.index(name)]
        have = {id(param): grad for param, grad in zip(call.params, call.grads, strict=True)}
        dtype = call.grads[0].dtype if call.grads else None
        call.params = [param for param in group.fsdp_params if id(param) in have or param in private.trainable(group)]
        call.grads = [
            have[id(param)]
            if id(param) in have
            else private.no_gradient(param, group, dtype or private.grad_dtype(param))
            for param in call.params
        ]

    def _launch(self, backward: _Backward, index: int, held: dict[str, Call], names: Iterable[str] = ()) -> None:
        """Reduce what is held of a bucket: one collective, unless settings that ranks share cut it."""
        assert self.plan is not None
        repeat = held is backward.again
        calls = [(name, held.pop(name)) for name in names or self.plan.buckets[index].groups if name in held]
        runs = [
            list(run)
            for _, run in groupby(calls, key=lambda it: (*it[1].kind, it[0] if it[1].alone else ""))
        ]
        launches = [self._describe(backward, index, repeat, run) for run in runs]
        if backward.checked:
            words = f"reduction {'again ' if repeat else ''}of bucket {index}"
            self._agreement.require(words, [astuple(one) for one in launches], lambda: _words(launches), None)
        for run, launch in zip(runs, launches, strict=True):
            self._reduce(backward, run, repeat)
            backward.launches.append(launch)

    def _describe(self, backward: _Backward, index: int, repeat: bool, run: list[tuple[str, Call]]) -> Launch:
        have = {id(param) for _, call in run for param in call.params}
        numel = sum(private.wire_numel(param, self._group(name)) for name, call in run for param in call.params)
        without = () if repeat else tuple(
            self._parameter[id(param)]
            for name, _ in run
            for param in backward.expected.get(name, ())
            if id(param) not in have
        )
        first = run[0][1]
        dtype = first.reduce_dtype or first.grads[0].dtype
        return Launch(index, repeat, tuple(name for name, _ in run), without, numel, _word(dtype))

    def _group(self, name: str) -> Any:
        return self._groups[self._names.index(name)]

    def _reduce(self, backward: _Backward, run: list[tuple[str, Call]], repeat: bool) -> None:
        name, first = run[0]
        if first.alone:
            first.partial = self._group(name)._partial_reduce_output
        params = [param for _, call in run for param in call.params]
        grads = [grad for _, call in run for grad in call.grads]
        for _, call in run:
            call.grads.clear()
        if len({grad.dtype for grad in grads}) > 1 and first.reduce_dtype is not None:
            # Copy-in casts to this dtype anyway, but asks for one to cast from.
            grads = [grad.to(first.reduce_dtype) for grad in grads]
        stream = backward.flight.join([call for _, call in run], grads)
        backward.flight.make_room(stream, private.buffers_in_flight(self._states[0]))
        alone = first.alone
        result = first.make(params, grads)
        if alone:
            first.partial = self._group(name)._partial_reduce_output = result["partial_reduce_output"]
        backward.flight.add(first, result)
        if repeat:
            # Added to the shards of the first round on the reduction's stream, while autograd may go on.
            stream.wait_event(result["post_reduce_event"])

    def _end(self) -> None:
        backward = self._open
        if backward is None:
            return
        if backward.expected and (backward.any or self._settings.missing == "zeros"):
            self._complete(backward)
            for index in backward.launcher.finish():
                self._launch(backward, index, backward.held)
            for index, names in backward.launcher.repeated():
                self._launch(backward, index, backward.again, names)
        sequence = tuple(backward.launches)
        if backward.checked:
            self._agreement.require("end of backward", _sequence(sequence), lambda: _words(sequence), None)
        backward.flight.land()
        for name in backward.expected:
            private.wait_for_offload(self._group(name))
        self._assert_empty(backward)
        self._open = None
        if backward.expected:
            self._note(backward, sequence)

    def _complete(self, backward: _Backward) -> None:
        """Deal with gradients that did not come."""
        if self._settings.missing == "zeros":
            for name in backward.launcher.missing():
                call = self._comm(Call.of(self._group(name)))
                self._add_zeros(call, name)
                backward.take(name, call)
        if self._settings.missing != "error":
            return
        lacking = [
            f"{name} ({', '.join(self._parameter[id(param)] for param in params if id(param) not in backward.got)})"
            for name, params in backward.expected.items()
            if any(id(param) not in backward.got for param in params)
        ]
        if backward.checked:
            self._agreement.require("end of backward, gradients missing", lacking, lambda: "; ".join(lacking), None)
        if lacking:
            raise BucketError(
                f"no gradients came for {len(lacking)} of {len(backward.expected)} groups: {'; '.join(lacking)}; use "
                'these parameters in every forward, freeze them, or say missing="zeros" to reduce zeros for them or '
                'missing="skip" if all ranks always leave out the same'
            )

    def _assert_empty(self, backward: _Backward) -> None:
        held = [*backward.held, *backward.again]
        late = [self._parameter[id(p)] for name in backward.expected for p in private.leftovers(self._group(name))]
        if held or late:
            private.drop_gradients(self._groups)
            raise BucketError(
                f"gradients of {', '.join(held or late)} were left when backward ended, and would have been added to "
                "the next step's; "
                + ("this is an error of retrograd: please report it" if held else "a parameter is used outside its module's forward")
            )

    def _note(self, backward: _Backward, sequence: tuple[Launch, ...]) -> None:
        self.backwards += 1
        self._log.append(sequence)
        if (word := _sequence(sequence)) not in self._hashes:
            self._hashes.append(word)
        launcher = backward.launcher
        if launcher.peak_bytes > self._peak[0]:
            self._peak = (launcher.peak_bytes, launcher.peak_groups, launcher.blocked_by)

    def _abandon(self) -> None:
        """Drop what a backward that failed has left."""
        if self._open is not None:
            self._open.flight.land()
            self._open = None
            self.abandoned += 1

    def _recover(self) -> None:
        open_, self._open = self._open is not None, self._open
        if not private.version().resets:
            raise BucketError(
                f"the last backward ended in an exception, and FSDP2 of PyTorch {torch.__version__} cannot be reset; "
                "start again from a checkpoint, or use PyTorch 2.13, which can"
            )
        warnings.warn(
            "the last backward ended in an exception; its gradients that were not reduced are dropped. Call "
            "zero_grad() as well: others may have been reduced",
            stacklevel=2,
        )
        self.abandoned += not open_
        private.forget(self._states[0], self._groups)


class _Flight:
    """Buffers and events of reductions that may still run, so that no memory is given back under a running kernel."""

    def __init__(self) -> None:
        self._inputs: list[tuple[Any, Any]] = []
        self._held: list[Any] = []
        self._events: dict[Any, Any] = {}
        self._handle: Any = None

    def join(self, calls: list[Call], grads: list[torch.Tensor]) -> Any:
        """Order the current stream after those on which gradients were made; the current stream."""
        stream = calls[0].device_handle.current_stream()
        for call in calls:
            if call.stream != stream:
                stream.wait_event(call.event)
        if any(call.stream != stream for call in calls) and grads[0].device.type != "cpu":
            for grad in grads:  # made on another stream, whose allocator must not reuse it before copy-in
                grad.record_stream(stream)
        return stream

    def make_room(self, stream: Any, most: int) -> None:
        """Wait until fewer than `most` inputs are being reduced: what FSDP2 does before each of its reductions."""
        while len(self._inputs) >= most:
            _, event = self._inputs.pop(0)
            if event is not None:
                stream.wait_event(event)

    def add(self, call: Call, result: dict[str, Any]) -> None:
        """Keep what a reduction still reads or writes."""
        self._handle = call.device_handle
        self._inputs.append((result["reduce_scatter_input"], result["reduce_scatter_event"]))
        if result["all_reduce_input"] is not None:
            self._held.append((result["all_reduce_input"], result["all_reduce_event"]))
        # 2.11 and 2.12 do not say which stream came last; waiting for every event is right as well.
        self._events[result.get("post_reduce_stream", len(self._events))] = result["post_reduce_event"]

    def land(self) -> None:
        """Order the current stream after everything in flight, then let go of it."""
        if self._handle is None:
            return
        stream = self._handle.current_stream()
        ended = [event for _, event in (*self._inputs, *self._held)]
        for event in (*ended, *self._events.values()):
            if event is not None:
                stream.wait_event(event)
        self._inputs.clear()
        self._held.clear()
        self._events.clear()


class _Backward:
    """Gradients of one backward pass that are held, and what has left."""

    def __init__(self, launcher: Launcher, expected: dict[str, list[Any]], checked: bool) -> None:
        self.launcher: Launcher = launcher
        self.expected: dict[str, list[Any]] = expected
        self.checked: bool = checked
        self.held: dict[str, Call] = {}
        self.again: dict[str, Call] = {}
        self.got: set[int] = set()
        self.any: bool = False
        self.launches: list[Launch] = []
        self.flight: _Flight = _Flight()
        self._seen: set[str] = set()

    def take(self, name: str, call: Call) -> None:
        """Hold gradients of a group; from the third time on they are added up here."""
        self.any = True
        self.got.update(id(param) for param in call.params)
        if name not in self._seen:
            self._seen.add(name)
            self.held[name] = call
        elif name not in self.again:
            self.again[name] = call
        else:
            _add(self.again[name], call)


def _add(sums: Call, call: Call) -> None:
    at = {id(param): i for i, param in enumerate(sums.params)}
    for param, grad in zip(call.params, call.grads, strict=True):
        if id(param) not in at:
            sums.params.append(param)
            sums.grads.append(grad)
            continue
        i = at[id(param)]
        sums.grads[i] = sums.grads[i].to(sums.reduce_dtype or grad.dtype) + grad


@dataclass(frozen=True)
class _Settings:
    bucket: int
    missing: str
    verify_every: int
    max_pending: int | None
    timeout: float
    comm: Any


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
        A handle: `.plan`, `.log`, `.hash()`, `.report()`, and `.remove()`, which undoes it.

    Raises:
        UsageError: an argument is wrong, the model is not the root of sharded modules or has buckets already, this
            PyTorch is unknown, or compiled autograd is on.
        BucketError: in a backward: gradients are missing or too much is held.
        RanksDifferError: in a backward: ranks have different plans or are about to reduce different things.
    """
    settings = _Settings(
        _size("bucket_mb", bucket_mb),
        _choice("missing", missing, ("error", "zeros", "skip")),
        verify_every,
        None if max_pending_mb is None else _size("max_pending_mb", max_pending_mb),
        timeout,
        _ordered() if _choice("reduce", reduce, ("native", "ordered")) == "ordered" else None,
    )
    if not isinstance(verify_every, int) or verify_every < 0:
        raise UsageError(f"`verify_every` is {verify_every!r}, expected a number of backwards, or 0")
    if isinstance(plan, (str, Path)):
        plan = BucketPlan.load(plan)
    _refuse_compiled_autograd()
    private.self_test()
    groups = private.groups_of(private.states_of(model))
    if not groups:
        raise UsageError("`model` has no sharded parameters; call fully_shard on its blocks and on itself first")
    if settings.comm is not None and (other := private.custom_comms(groups)):
        raise UsageError(f'reduce="ordered" would replace {other}; remove set_custom_reduce_scatter or say "native"')
    return Buckets(model, settings, plan)


def _ordered() -> Any:
    from retrograd.fsdp.ordered import FixedOrderReduceScatter

    return FixedOrderReduceScatter()


def _refuse_compiled_autograd() -> None:
    if private.compiled_autograd():
        raise UsageError(
            "compiled autograd is on, under which FSDP2 silently stops reducing gradients after the first step; switch "
            "it off (torch._dynamo.config.compiled_autograd = False) and compile the blocks, not the backward"
        )


def _size(name: str, mb: float) -> int:
    if isinstance(mb, bool) or not isinstance(mb, (int, float)) or not mb > 0 or mb == float("inf"):
        raise UsageError(f"`{name}` is {mb!r}, expected a positive number of 2**20 bytes, as 25")
    return max(1, int(mb * MIB))


def _choice(name: str, given: str, known: tuple[str, ...]) -> str:
    if given not in known:
        raise UsageError(f"`{name}` is {given!r}, expected one of {', '.join(known)}")
    return given


def _fits(plan: BucketPlan, specs: dict[str, Group]) -> None:
    """A plan from elsewhere must be of this model."""
    planned = {group.name: group for group in plan.groups}
    if planned.keys() != specs.keys():
        ours, theirs = sorted(specs.keys() - planned.keys()), sorted(planned.keys() - specs.keys())
        raise UsageError(
            f"the plan is of another model: it lacks groups [{', '.join(ours)}] and has [{', '.join(theirs)}] too many; "
            "save() one of this model"
        )
    for name, group in planned.items():
        here = specs[name]
        if (group.bytes, group.key) != (here.bytes, here.key):
            raise UsageError(
                f"the plan has {group.bytes} bytes of {group.key} for {name}, the model {here.bytes} of {here.key}; "
                "save() a plan of this model"
            )


def _plans_differ(one: str, other: str) -> str:
    return f"their plans: {first_difference(BucketPlan.from_json(one), BucketPlan.from_json(other))}"


def _sequence(launches: tuple[Launch, ...]) -> str:
    return digest([astuple(one) for one in launches])


def _words(launches: Iterable[Launch]) -> str:
    return "; ".join(
        f"[{', '.join(one.groups)}] of {one.numel} {one.dtype}"
        + (f" without {', '.join(one.without)}" if one.without else "")
        for one in launches
    ) or "nothing"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
