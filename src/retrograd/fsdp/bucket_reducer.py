"""One backward pass: gradients that are held, buckets that leave, and what must not be left over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from itertools import groupby
from typing import Any

import torch

from retrograd.compat import fsdp2
from retrograd.compat.fsdp2 import foreach_reduce, param_groups, partial_sums, set_partial_sums
from retrograd.compat.fsdp2.foreach_reduce import ReduceCall
from retrograd.errors import BucketError
from retrograd.fsdp.agreement import Agreement
from retrograd.fsdp.attribution import naming
from retrograd.fsdp.bucket_plan import Launcher
from retrograd.fsdp.in_flight import InFlight
from retrograd.fsdp.model_plan import Model, word


@dataclass(frozen=True)
class Reduction:
    bucket: int  # its number in the plan
    repeat: bool  # whether these gradients came after others of the same groups in the same backward
    groups: tuple[str, ...]
    without: tuple[str, ...]  # parameters of these groups that had no gradient
    numel: int  # on the wire
    dtype: str  # on the wire


@dataclass
class Backward:
    """Gradients of one backward pass.

    A group that has a bucket for itself, and whose turn it is when it arrives, is reduced by the very call that FSDP2
    makes: nothing is held, copied or waited for that FSDP2 would not.
    """

    model: Model
    launcher: Launcher
    expected: dict[str, list[Any]]  # parameters that want gradients, by group
    missing: str  # "error", "zeros" or "skip"
    agreement: Agreement | None  # asks other ranks before each bucket; None in a backward in which nobody asks
    launches: list[Reduction] = field(default_factory=list)  # what has been reduced, in order
    _held: dict[str, ReduceCall] = field(default_factory=dict)
    _again: dict[str, ReduceCall] = field(default_factory=dict)
    _got: set[int] = field(default_factory=set)
    _whole: set[str] = field(default_factory=set)  # groups of which every parameter got its gradient
    _seen: set[str] = field(default_factory=set)
    _bucketed: set[str] = field(default_factory=set)  # groups whose reduction FSDP2 does not know of
    _start: tuple[Any, Any] | None = None  # the stream on which gradients are made, an event on it

    def __post_init__(self) -> None:
        self._in_flight = InFlight(self.model.handle)

    def arrive(self, arguments: dict[str, Any]) -> tuple[Any, ...]:
        """FSDP2 would reduce a group, with these arguments: hold its gradients, reduce what is complete; its answer."""
        params, grads = arguments["fsdp_params"], arguments["unsharded_grads"]
        name = self.model.home(params[0])
        if self.model.comm is not None:
            arguments["reduce_scatter_comm"] = self.model.comm
        if params == self.expected.get(name):
            self._whole.add(name)
            if _one_dtype(grads) and self.launcher.passes(name):
                return self._straight(name, arguments)
        with torch.no_grad():
            call, event = self._call(arguments)
            if name not in self._whole and self.missing == "zeros":
                call.params, call.grads = self._with_zeros(name, call.params, call.grads)
            size = sum(grad.nbytes for grad in call.grads)
            self._take(name, call)
            for index in self.launcher.arrive(name, size):
                self._launch(index, self._held)
        return call.placeholder(event)

    def finish(self) -> None:
        """Backward is over: reduce the rest, wait for everything; BucketError for gradients missing or left over."""
        if self.expected and (self._seen or self.missing == "zeros"):
            self._deal_with_missing()
            for index in self.launcher.finish():
                self._launch(index, self._held)
            for index, names in self.launcher.repeated():
                self._launch(index, self._again, names)
        self._require("the end of backward", self.launches)
        self._in_flight.wait()
        for name in self._bucketed:
            param_groups.wait_for_offload(self.model.groups[name])
        self._require_empty()

    def drop(self) -> None:
        """Forget gradients of a backward that failed, when nothing reads them any more."""
        self._in_flight.wait()
        self._held.clear()
        self._again.clear()

    def _call(self, arguments: dict[str, Any]) -> tuple[ReduceCall, Any]:
        """A call to be held, and an event that FSDP2 can wait for.

        One event of the backward's first call serves them all; a call on another stream has its own, for those who use
        its gradients.
        """
        stream = self.model.handle.current_stream()
        if self._start is None:
            self._start = stream, stream.record_event()
        usual, event = self._start
        own = None if stream == usual else stream.record_event()
        return ReduceCall(arguments, stream, own), event

    def _straight(self, name: str, arguments: dict[str, Any]) -> tuple[Any, ...]:
        """Let FSDP2 reduce a group that has a bucket for itself."""
        self._seen.add(name)
        index = self.launcher.next - 1
        launch = self._describe(index, False, (name,), arguments["fsdp_params"], foreach_reduce.wire_dtype(arguments))
        if self.agreement is not None:
            self._require(self._due(index), [launch])
        self._make_room()
        try:
            with naming(self.model.modules[name]):
                answer, stream, event = foreach_reduce.reduce_as_given(arguments)
        except RuntimeError as error:
            self._explain(error, index)
            raise
        self._in_flight.follow(stream, event)
        self.launches.append(launch)
        return answer

    def _take(self, name: str, call: ReduceCall) -> None:
        if name not in self._whole:
            self._got.update(id(param) for param in call.params)
        if name not in self._seen:
            self._seen.add(name)
            self._held[name] = call
        elif name not in self._again:
            self._again[name] = call
        else:
            _add(self._again[name], call)

    def _with_zeros(self, name: str, params: list[Any], grads: list[Any]) -> tuple[list[Any], list[Any]]:
        """Parameters that want gradients, and these, zeros where there were none."""
        group = self.model.groups[name]
        have = {id(param): grad for param, grad in zip(params, grads, strict=True)}
        wanted = {id(param) for param in param_groups.trainable(group)} | have.keys()
        dtype = grads[0].dtype if grads else None
        every = [param for param in group.fsdp_params if id(param) in wanted]
        filled = [
            have[id(param)]
            if id(param) in have
            else param_groups.no_gradient(param, group, dtype or param_groups.grad_dtype(param))
            for param in every
        ]
        return every, filled

    def _launch(self, index: int, held: dict[str, ReduceCall], names: Iterable[str] = ()) -> None:
        """Reduce what is held of a bucket: one collective, unless settings that ranks share cut it."""
        wanted = names or self.launcher.plan.buckets[index].groups
        calls = [(name, held.pop(name)) for name in wanted if name in held]
        runs = [list(run) for _, run in groupby(calls, key=lambda it: (*it[1].kind, it[0] if it[1].alone else ""))]
        repeat = held is self._again
        launches = [self._launch_of(index, repeat, run) for run in runs]
        if self.agreement is not None:
            self._require(self._due(index, repeat), launches)
        for run, launch in zip(runs, launches, strict=True):
            try:
                self._reduce(run, repeat)
            except RuntimeError as error:
                self._explain(error, index, repeat)
                raise
            self.launches.append(launch)

    def _due(self, index: int, repeat: bool = False) -> str:
        groups = ", ".join(self.launcher.plan.buckets[index].groups)
        return f"the reduction {'again ' if repeat else ''}of bucket {index} [{groups}]"

    def _explain(self, error: RuntimeError, index: int, repeat: bool = False) -> None:
        """What the backend says of a rank that is gone names no module."""
        error.add_note(f"retrograd.fsdp: it happened in {self._due(index, repeat)}")

    def _launch_of(self, index: int, repeat: bool, run: list[tuple[str, ReduceCall]]) -> Reduction:
        names, params = tuple(name for name, _ in run), [param for _, call in run for param in call.params]
        first = run[0][1]
        return self._describe(index, repeat, names, params, first.reduce_dtype or first.grads[0].dtype)

    def _describe(self, index: int, repeat: bool, names: tuple[str, ...], params: list[Any], dtype: Any) -> Reduction:
        """What a reduction is; kept from step to step as long as the same parameters have gradients."""
        whole = not repeat and self._whole.issuperset(names)
        known = self.model.launches.get((index, names)) if whole else None
        if known is not None and known[1] is dtype and known[0] == params:
            return known[2]
        have = set(map(id, params))
        lacking = [p for name in names if not repeat for p in self.expected.get(name, ()) if id(p) not in have]
        groups = [self.model.groups[self.model.home(param)] for param in params]
        numel = sum(map(param_groups.wire_numel, params, groups))
        launch = Reduction(
            index, repeat, names, tuple(self.model.named(param) for param in lacking), numel, word(dtype)
        )
        if whole:
            self.model.launches[index, names] = params, dtype, launch
        return launch

    def _reduce(self, run: list[tuple[str, ReduceCall]], repeat: bool) -> None:
        name, first = run[0]
        group, alone = self.model.groups[name], first.alone
        if alone:  # sums of an earlier reduction of this backward, if there was one
            first.partial = partial_sums(group)
        self._bucketed.update(name for name, _ in run)
        params = [param for _, call in run for param in call.params]
        grads = [grad for _, call in run for grad in call.grads]
        for _, call in run:
            call.grads.clear()  # so that memory is free after copy-in
        if first.reduce_dtype is not None and not _one_dtype(grads):
            # Copy-in casts to this dtype anyway, but takes gradients of one dtype only (2.13).
            grads = [grad.to(first.reduce_dtype) for grad in grads]
        stream = self._in_flight.join([call for _, call in run], grads)
        self._make_room()
        with naming([module for name, _ in run for module in self.model.modules[name]]):
            result = first.make(params, grads)
        if alone:
            first.partial = result["partial_reduce_output"]
            set_partial_sums(group, first.partial)
        self._in_flight.add(result)
        if repeat:
            # Added to the shards of the first round on the reduction's stream, while autograd may go on.
            stream.wait_event(result["post_reduce_event"])

    def _make_room(self) -> None:
        """As many inputs in flight as FSDP2 would have, its own counted."""
        if self._in_flight.inputs:
            root = self.model.states[0]
            self._in_flight.make_room(param_groups.buffers_in_flight(root) - param_groups.inputs_kept(root))

    def _require(self, due: str, launches: Iterable[Reduction]) -> None:
        if self.agreement is not None:
            self.agreement.require(due, [astuple(launch) for launch in launches], lambda: in_words(launches))

    def _deal_with_missing(self) -> None:
        """Make gradients that did not come, refuse to go on without them, or leave them out."""
        if self.missing == "zeros":
            for name in self.launcher.missing():
                call = self.model.call(name)
                call.params, call.grads = self._with_zeros(name, [], [])
                self._take(name, call)
        if self.missing != "error":
            return
        lacking = []
        for name, params in self.expected.items():
            if name in self._whole:
                continue
            if without := [self.model.named(param) for param in params if id(param) not in self._got]:
                lacking.append(f"{name} ({', '.join(without)})")
        if self.agreement is not None:
            text = "; ".join(lacking)
            self.agreement.require("the end of backward, without gradients", lacking, lambda: text or "none")
        if lacking:
            raise BucketError(
                f"no gradients came for {len(lacking)} of {len(self.expected)} groups: {'; '.join(lacking)}; use these "
                'parameters in every forward, freeze them, or say missing="zeros" to reduce zeros for them or '
                'missing="skip" if all ranks always leave out the same'
            )

    def _require_empty(self) -> None:
        held = [*self._held, *self._again]
        groups = [self.model.groups[name] for name in self.expected]
        late = [self.model.named(param) for group in groups for param in fsdp2.leftovers(group)]
        if not held and not late:
            return
        param_groups.drop_gradients(groups)
        mend = "this is an error of retrograd, please report it" if held else "use parameters in their module's forward"
        raise BucketError(
            f"gradients of {', '.join(held or late)} were left when backward ended, and would have been added to the "
            f"next step's; they are dropped; {mend}"
        )


def _one_dtype(grads: list[Any]) -> bool:
    """FSDP2 copies in gradients of one dtype only (2.13)."""
    return len({grad.dtype for grad in grads}) == 1


def _add(sums: ReduceCall, call: ReduceCall) -> None:
    at = {id(param): i for i, param in enumerate(sums.params)}
    for param, grad in zip(call.params, call.grads, strict=True):
        if id(param) not in at:
            sums.params.append(param)
            sums.grads.append(grad)
            continue
        i = at[id(param)]
        sums.grads[i] = sums.grads[i].to(sums.reduce_dtype or grad.dtype) + grad


def in_words(launches: Iterable[Reduction]) -> str:
    return (
        "; ".join(
            f"[{', '.join(launch.groups)}] of {launch.numel} {launch.dtype}"
            + (f" without {', '.join(launch.without)}" if launch.without else "")
            for launch in launches
        )
        or "nothing"
    )
