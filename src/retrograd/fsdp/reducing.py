"""One backward pass: gradients that are held, buckets that leave, and what must not be left over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from itertools import groupby
from typing import Any

from retrograd.errors import BucketError
from retrograd.fsdp import private
from retrograd.fsdp.agreement import Agreement
from retrograd.fsdp.attribution import naming
from retrograd.fsdp.buckets import Launcher, digest
from retrograd.fsdp.flight import Flight
from retrograd.fsdp.planning import Model, word
from retrograd.fsdp.private import Call


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


class Backward:
    """Gradients of one backward pass.

    Args:
        model: whose they are.
        launcher: keeps to the plan.
        missing: "error", "zeros" or "skip".
        agreement: asks other ranks before each bucket; None in a backward in which nobody asks.

    Attributes:
        launches: what has been reduced, in order.
    """

    def __init__(self, model: Model, launcher: Launcher, missing: str, agreement: Agreement | None) -> None:
        self.launcher: Launcher = launcher
        self.launches: list[Launch] = []
        self.expected: dict[str, list[Any]] = model.expected()
        self._model: Model = model
        self._missing: str = missing
        self._agreement: Agreement | None = agreement
        self._held: dict[str, Call] = {}
        self._again: dict[str, Call] = {}
        self._got: set[int] = set()
        self._seen: set[str] = set()
        self._flight: Flight = Flight()

    def arrive(self, call: Call) -> None:
        """FSDP2 has gradients of a group: hold them, reduce what is complete."""
        name = self._model.home(call.params[0])
        call = self._model.with_comm(call)
        if self._missing == "zeros":
            self._add_zeros(call, name)
        size = sum(grad.numel() * grad.element_size() for grad in call.grads)
        self._take(name, call)
        for index in self.launcher.arrive(name, size):
            self._launch(index, self._held)

    def finish(self) -> None:
        """Backward is over: reduce the rest, wait for everything, see that nothing is left.

        Raises:
            BucketError: gradients are missing or left over.
        """
        if self.expected and (self._seen or self._missing == "zeros"):
            self._deal_with_missing()
            for index in self.launcher.finish():
                self._launch(index, self._held)
            for index, names in self.launcher.repeated():
                self._launch(index, self._again, names)
        self._require("the end of backward", self.launches)
        self._flight.land()
        for name in self.expected:
            private.wait_for_offload(self._model.groups[name])
        self._require_empty()

    def drop(self) -> None:
        """Forget gradients of a backward that failed, when nothing reads them any more."""
        self._flight.land()
        self._held.clear()
        self._again.clear()

    def _take(self, name: str, call: Call) -> None:
        self._got.update(id(param) for param in call.params)
        if name not in self._seen:
            self._seen.add(name)
            self._held[name] = call
        elif name not in self._again:
            self._again[name] = call
        else:
            _add(self._again[name], call)

    def _add_zeros(self, call: Call, name: str) -> None:
        group = self._model.groups[name]
        have = {id(param): grad for param, grad in zip(call.params, call.grads, strict=True)}
        wanted = {id(param) for param in private.trainable(group)} | have.keys()
        dtype = call.grads[0].dtype if call.grads else None
        call.params = [param for param in group.fsdp_params if id(param) in wanted]
        call.grads = [
            have[id(param)]
            if id(param) in have
            else private.no_gradient(param, group, dtype or private.grad_dtype(param))
            for param in call.params
        ]

    def _launch(self, index: int, held: dict[str, Call], names: Iterable[str] = ()) -> None:
        """Reduce what is held of a bucket: one collective, unless settings that ranks share cut it."""
        wanted = names or self.launcher.plan.buckets[index].groups
        calls = [(name, held.pop(name)) for name in wanted if name in held]
        runs = [list(run) for _, run in groupby(calls, key=lambda it: (*it[1].kind, it[0] if it[1].alone else ""))]
        repeat = held is self._again
        launches = [self._describe(index, repeat, run) for run in runs]
        groups = ", ".join(self.launcher.plan.buckets[index].groups)
        due = f"the reduction {'again ' if repeat else ''}of bucket {index} [{groups}]"
        self._require(due, launches)
        for run, launch in zip(runs, launches, strict=True):
            try:
                self._reduce(run, repeat)
            except RuntimeError as error:  # what the backend says of a rank that is gone names no module
                error.add_note(f"retrograd.fsdp: it happened in {due}")
                raise
            self.launches.append(launch)

    def _describe(self, index: int, repeat: bool, run: list[tuple[str, Call]]) -> Launch:
        have = {id(param) for _, call in run for param in call.params}
        lacking = [p for name, _ in run if not repeat for p in self.expected.get(name, ()) if id(p) not in have]
        numel = sum(private.wire_numel(param, self._model.groups[name]) for name, call in run for param in call.params)
        first = run[0][1]
        dtype = word(first.reduce_dtype or first.grads[0].dtype)
        names, without = tuple(name for name, _ in run), tuple(self._model.named(param) for param in lacking)
        return Launch(index, repeat, names, without, numel, dtype)

    def _reduce(self, run: list[tuple[str, Call]], repeat: bool) -> None:
        name, first = run[0]
        group, alone = self._model.groups[name], first.alone
        if alone:  # sums of an earlier reduction of this backward, if there was one
            first.partial = group._partial_reduce_output
        params = [param for _, call in run for param in call.params]
        grads = [grad for _, call in run for grad in call.grads]
        for _, call in run:
            call.grads.clear()  # so that memory is free after copy-in
        if len({grad.dtype for grad in grads}) > 1 and first.reduce_dtype is not None:
            # Copy-in casts to this dtype anyway, but takes gradients of one dtype only (2.13).
            grads = [grad.to(first.reduce_dtype) for grad in grads]
        stream = self._flight.join([call for _, call in run], grads)
        self._flight.make_room(stream, private.buffers_in_flight(self._model.states[0]))
        with naming([module for name, _ in run for module in self._model.modules[name]]):
            result = first.make(params, grads)
        if alone:
            first.partial = group._partial_reduce_output = result["partial_reduce_output"]
        self._flight.add(first, result)
        if repeat:
            # Added to the shards of the first round on the reduction's stream, while autograd may go on.
            stream.wait_event(result["post_reduce_event"])

    def _require(self, due: str, launches: Iterable[Launch]) -> None:
        if self._agreement is not None:
            self._agreement.require(due, [astuple(one) for one in launches], lambda: in_words(launches), None)

    def _deal_with_missing(self) -> None:
        """Make gradients that did not come, refuse to go on without them, or leave them out."""
        if self._missing == "zeros":
            for name in self.launcher.missing():
                call = self._model.call(name)
                self._add_zeros(call, name)
                self._take(name, call)
        if self._missing != "error":
            return
        lacking = []
        for name, params in self.expected.items():
            if without := [self._model.named(param) for param in params if id(param) not in self._got]:
                lacking.append(f"{name} ({', '.join(without)})")
        if self._agreement is not None:
            text = "; ".join(lacking)
            self._agreement.require("the end of backward, without gradients", lacking, lambda: text or "none", None)
        if lacking:
            raise BucketError(
                f"no gradients came for {len(lacking)} of {len(self.expected)} groups: {'; '.join(lacking)}; use these "
                'parameters in every forward, freeze them, or say missing="zeros" to reduce zeros for them or '
                'missing="skip" if all ranks always leave out the same'
            )

    def _require_empty(self) -> None:
        held = [*self._held, *self._again]
        groups = [self._model.groups[name] for name in self.expected]
        late = [self._model.named(param) for group in groups for param in private.leftovers(group)]
        if not held and not late:
            return
        private.drop_gradients(groups)
        mend = "this is an error of retrograd, please report it" if held else "use parameters in their module's forward"
        raise BucketError(
            f"gradients of {', '.join(held or late)} were left when backward ended, and would have been added to the "
            f"next step's; they are dropped; {mend}"
        )


def _add(sums: Call, call: Call) -> None:
    at = {id(param): i for i, param in enumerate(sums.params)}
    for param, grad in zip(call.params, call.grads, strict=True):
        if id(param) not in at:
            sums.params.append(param)
            sums.grads.append(grad)
            continue
        i = at[id(param)]
        sums.grads[i] = sums.grads[i].to(sums.reduce_dtype or grad.dtype) + grad


def sequence_hash(launches: tuple[Launch, ...]) -> str:
    return digest([astuple(one) for one in launches])


def in_words(launches: Iterable[Launch]) -> str:
    return (
        "; ".join(
            f"[{', '.join(one.groups)}] of {one.numel} {one.dtype}"
            + (f" without {', '.join(one.without)}" if one.without else "")
            for one in launches
        )
        or "nothing"
    )
