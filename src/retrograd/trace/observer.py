"""Observer: source line, module, inputs and outputs of each operator before and after it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sized
from typing import Any

import torch

from retrograd.compat.torch_autograd import in_backward, last_node_number, running_node
from retrograd.compat.torch_dispatch import implements_operators
from retrograd.compat.torch_tensors import as_plain, sparse_values
from retrograd.trace import kernel_launches
from retrograd.trace.compiled_regions import BACKWARD_RAN, FORWARD_CODE_RAN, CompiledRegions
from retrograd.trace.operator_owners import ReducedGradients, owner
from retrograd.trace.operator_schemas import Operator, attributes_text, tensors_in
from retrograd.trace.pending_op import PendingOp
from retrograd.trace.schema import BACKWARD, FORWARD, OTHER, Op
from retrograd.trace.source_lines import Line, SourceLocator
from retrograd.trace.statistics.collector import StatisticsCollector
from retrograd.trace.value_ids import Value, ValueTable

ACCUMULATION = "AccumulateGrad"  # the node that adds to the gradient of a parameter
_MAX_NODES = 500_000  # remembered of graphs that are kept over steps


class Observer:
    """Observes the operators of one run.

    Args:
        model: names are those of its modules; None takes the outermost at work.
        level: "names", "fast" or "full".
        compiled: notices compiled regions.
        immediate: Read statistics after every operator, and keep its inputs for a breakpoint there.
        unrecorded: runs a function whose operators are no part of the step.
    """

    def __init__(
        self,
        model: Any,
        level: str,
        compiled: CompiledRegions,
        immediate: bool,
        unrecorded: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self.level, self.optimizing = level, False
        self.locator = SourceLocator(model)
        self.values = ValueTable(self.locator.tensor_names)
        self.statistics = StatisticsCollector(immediate, level == "full")
        self._compiled, self._keep_inputs, self._unrecorded = compiled, immediate, unrecorded
        self._forward: dict[
            int, tuple[Line | None, str | None]
        ] = {}  # number of an autograd node -> line and module of its forward
        self._made_at: dict[int, tuple[Line, str | None]] = {}  # by the number of a value that a backward made
        # Where gradients were put, by place in memory: DDP's buckets, from which others take them out again.
        self._accumulated_at: dict[tuple[Any, ...], tuple[Line, str | None]] = {}
        self._reduced = ReducedGradients()
        self._thread = threading.get_ident()

    # An observer with a buffer of its own (the tape's) overrides these.

    buffered = 0  # operators in that buffer

    def stop(self) -> None:
        """Observe nothing more."""

    def drain(self) -> list[PendingOp]:
        """Take the operators out of the buffer."""
        return []

    def forget(self) -> None:
        """The operators that were drained have their statistics."""

    def fold(self) -> None:
        """A step has ended: join its partial results, and wait for no device."""
        self.statistics.fold()

    def rewritten(self, tensors: list[torch.Tensor]) -> None:
        """Somebody unseen has written to these: what was measured of them is of before."""
        for tensor in tensors:
            self.values.bump_version(tensor)

    def between_steps(self, step: int = 0) -> None:
        """Look up names of tensors, and forget tensors that are gone."""
        self.values.refresh()
        if len(self._forward) > _MAX_NODES:
            self._forward.clear()
        if len(self._made_at) > _MAX_NODES:
            self._made_at.clear()
            self._accumulated_at.clear()

    def finished_op(self, pending: PendingOp, index: int) -> Op:
        """The record of an operator whose statistics are there."""
        inputs, outputs, operator = pending.inputs, pending.outputs, pending.operator
        if pending.phase == BACKWARD:
            self._locate_gradient(pending)
        belongs = owner(pending, self._reduced)
        place, code = self.locator.text(pending.line)
        if operator.is_launch:
            inputs, outputs = kernel_launches.inputs_and_outputs(inputs, outputs)
        inside = ": ".join(filter(None, self.locator.text(pending.inside))) if pending.inside else ""
        # By position and without loops of Python: a step makes thousands.
        return Op(
            index, pending.step, pending.phase, operator.name, pending.module or "", pending.node, place, code,
            attributes_text(pending.attributes) if pending.attributes else "",
            tuple([v._stats or v.stats() for v in inputs]), tuple([v._stats or v.stats() for v in outputs]),
            operator.random, tuple(pending.kernels), inside, belongs,
        )  # fmt: skip

    def _locate_gradient(self, pending: PendingOp) -> None:
        """What has no forward, as the accumulation of a gradient, has line and module of what made its input."""
        if pending.node in ("", ACCUMULATION):
            known = [self._made_at.get(value.number) for value in pending.inputs]
            if not pending.node:
                known = [self._accumulated_at.get(value.place) for value in pending.outputs] + known
            line, module = next(filter(None, known), (None, None))
            pending.line = line or pending.line
            pending.module = module if pending.module is None else pending.module
        if pending.line is not None:
            where = pending.line, pending.module
            self._made_at.update((value.number, where) for value in pending.outputs)
            if pending.node == ACCUMULATION:
                self._accumulated_at.update((value.place, where) for value in pending.outputs)

    def before(self, pending: PendingOp, args: tuple[Any, ...], kwargs: dict[str, Any], frame: Any) -> None:
        """Note the inputs of an operator that is about to run."""
        operator = pending.operator
        self.locate(pending, frame)
        tensors, pending.attributes = operator.split_arguments(args, kwargs)
        measuring = not (operator.view or operator.aliases or operator.waits or self.level == "names")
        measuring &= not (self.optimizing and self.level == "fast") or _divides(operator, tensors)
        overwritten = [id(t) for t in operator.overwritten(args, kwargs)] if operator.writes else ()
        for tensor in tensors:
            if overwritten and id(tensor) in overwritten:
                continue
            value = self.values.value_of(tensor)
            if not value.requested:
                self._compiled.check_tensor(tensor)
                if measuring:
                    self._request_statistics(value, tensor)
            pending.inputs.append(value)
            if self._keep_inputs:
                pending.input_tensors.append(tensor)
        if pending.phase == OTHER and not self.optimizing and torch.is_grad_enabled():
            # Outside of every module a loss is forward, and what makes the data is not.
            pending.phase = FORWARD if any(t.requires_grad for t in tensors) else OTHER

    def after(self, pending: PendingOp, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note the outputs of an operator that has run."""
        operator = pending.operator
        written = list(operator.written(args, kwargs)) if operator.writes else []
        for tensor in written:
            self.values.bump_version(tensor)
        results = [out] if isinstance(out, torch.Tensor) else list(tensors_in(out))
        if written:
            returned = {id(t) for t in results}
            results += [t for t in written if id(t) not in returned]
        for tensor in results:
            if operator.makes_memory:
                self.values.bump_version(tensor, unwritten=True)
            value = self.values.value_of(tensor)
            pending.outputs.append(value)
            if operator.view and not written:
                self._share_statistics(value, pending, tensor)
            elif not (operator.makes_memory or operator.aliases or operator.asynchronous) and self._measures(
                value, tensor, _divides(operator, pending.inputs)
            ):
                self._request_statistics(value, tensor)
        if pending.in_generated_code:
            # Kernels that are not seen run between the operators of compiled code: what was measured may not last.
            for tensor in (*tensors_in((args, kwargs)), *results):
                self.values.bump_version(tensor)

    def before_launch(self, pending: PendingOp, tensors: list[torch.Tensor], frame: Any) -> None:
        """Note the tensors of a kernel that is about to be launched."""
        self.locate(pending, frame)
        if pending.phase == OTHER and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            pending.phase = FORWARD
        for tensor in tensors:
            value = self.values.value_of(tensor)
            if self.level != "names":
                self._request_statistics(value, tensor)
            pending.inputs.append(value)
            if self._keep_inputs:
                pending.input_tensors.append(tensor)

    def after_launch(self, pending: PendingOp, tensors: list[torch.Tensor]) -> None:
        """Note the tensors of a kernel that was launched."""
        # Which tensors a kernel wrote shows in their digests, once those are read (`finished_op`).
        pending.kernels.append(pending.operator.name.rpartition("::")[2])
        for tensor, before in zip(tensors, pending.inputs, strict=True):
            fresh = self.values.is_unwritten(tensor)
            self.values.bump_version(tensor)
            value = self.values.value_of(tensor)
            value.fresh = fresh
            if before.number != value.number and self.level != "names":
                self._request_statistics(value, tensor)
            pending.outputs.append(value)

    def _measures(self, value: Value, tensor: torch.Tensor, divides: bool) -> bool:
        """Whether results are measured now; of what an optimizer keeps for itself only quotients are at level fast."""
        if self.level == "names":
            return False
        # A shard of a parameter is a tensor that has its name.
        parameter = isinstance(tensor, torch.nn.Parameter) or bool(value.name)
        return self.level == "full" or not self.optimizing or parameter or divides

    def _request_statistics(self, value: Value, tensor: torch.Tensor) -> None:
        if value.requested:
            return
        value.requested = True
        # There is no memory to read of fake tensors, nor of sparse ones but COO.
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        if not plain and not implements_operators(type(tensor)):
            tensor, plain = as_plain(tensor), True  # a class with methods of its own, and ordinary memory
        dense = tensor.layout is torch.strided or tensor.layout is torch.sparse_coo
        if plain and dense and not tensor.is_quantized and tensor.device.type != "meta":
            tensor = sparse_values(tensor) if tensor.layout is torch.sparse_coo else tensor
            self._unrecorded(lambda: self.statistics.request(tensor, value.take))

    def _share_statistics(self, value: Value, pending: PendingOp, tensor: torch.Tensor) -> None:
        """A view with the elements of its source has the statistics of its source."""
        source = pending.inputs[0] if pending.inputs else value
        if value.requested or value is source or not source.requested or source.dtype != value.dtype:
            return
        elements, before = tensor.numel(), source.count
        kind = pending.operator.view
        if before == 0 or elements % before or (kind != "expanded" and elements != before):
            return
        ordered = kind == "ordered" or elements == before == 1 or (kind == "expanded" and elements == before)
        if self.level == "full" and not ordered:
            return
        value.requested, value.source, value.repeats, value.ordered = True, source, elements // before, ordered

    def locate(self, pending: PendingOp, frame: Any) -> None:
        """Phase, module, autograd node and line."""
        line, module = self.locator.locate(frame)
        pending.in_generated_code = self.locator.in_generated_code
        if pending.in_generated_code:
            self._compiled.notice(FORWARD_CODE_RAN)
        if self.locator.has_new_root:  # a model that was not known before
            self.locator.has_new_root = False
            self.values.refresh_names()
        if not in_backward():
            pending.line, pending.module, pending.optimizing = line, module, self.optimizing
            if module is not None and not self.optimizing:
                pending.phase = FORWARD
            # The node of this operator has just been made: autograd stands above the mode.
            self._forward.setdefault(last_node_number(), (line, module))
            return
        pending.phase = BACKWARD
        if (running := running_node()) is not None:
            pending.node, number, node = running
            pending.line, pending.module = self._forward.get(number, (None, None))
            if pending.node.startswith("CompiledFunction"):
                self._compiled.notice(BACKWARD_RAN)
            variable = getattr(node, "variable", None)
            if variable is not None:
                name = self.values.value_of(variable).name
                pending.module = name.rpartition(".")[0] if name else None
        if module is not None:  # a forward computed again, by checkpointing
            pending.line, pending.module = line, module
        else:
            pending.inside = line
        if pending.line is None and pending.node in ("", ACCUMULATION):
            pending.line = self.locator.waiting_line(self._thread)
        if threading.get_ident() == self._thread:
            # Second derivatives: nodes made in a backward are those of its line.
            self._forward.setdefault(last_node_number(), (pending.line, pending.module))


def _divides(operator: Operator, tensors: Sized) -> bool:
    return bool(operator.divides) and len(tensors) >= operator.divides


def is_wrapper_subclass(kind: Any) -> bool:
    """Whether tensors of this type wrap other tensors, as DTensor does: operators on those are what is recorded."""
    from torch._subclasses.fake_tensor import FakeTensor

    return implements_operators(kind) and not issubclass(kind, FakeTensor)
