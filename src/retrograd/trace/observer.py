"""What is looked at of an operator: who asked for it, what it was given and what it made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from retrograd.trace import kernel_launches
from retrograd.trace.compiled_regions import Compiled
from retrograd.trace.operator_schemas import Operator, tensors_in, told
from retrograd.trace.schema import BACKWARD, FORWARD, OTHER, Op
from retrograd.trace.source_lines import Line, Places
from retrograd.trace.statistics.collector import Gather
from retrograd.trace.value_ids import Value, Values

_OWN = torch.Tensor.__torch_dispatch__
_MOST_NODES = 500_000  # remembered of graphs that are kept over steps


class Pending:
    """An operator whose statistics are not read yet; fields as in `Op`."""

    __slots__ = (
        "facts", "generated", "inputs", "inside", "kernels", "line", "module", "node", "operator", "outputs", "phase",
        "seen", "step",
    )  # fmt: skip

    def __init__(self, operator: Operator, step: int) -> None:
        self.operator, self.step = operator, step
        self.phase, self.module, self.node = OTHER, "", ""
        self.line: Line | None = None
        self.inside: Line | None = None
        self.facts: tuple[tuple[str, Any], ...] = ()
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []
        self.seen: list[torch.Tensor] = []  # the inputs themselves, for who stops; else empty
        self.kernels: list[str] = []
        self.generated = False


class Observer:
    """Looks at operators of one run.

    Args:
        model: names are those of its modules; None takes the outermost at work.
        level: "names", "fast" or "full".
        compiled: notices compiled regions.
        at_once: Read statistics after every operator, and keep its inputs for who stops there.
        quietly: runs something that is no part of the step.
    """

    def __init__(
        self, model: Any, level: str, compiled: Compiled, at_once: bool, quietly: Callable[[Callable[[], Any]], Any]
    ) -> None:
        self.level, self.optimizing = level, False
        self.places = Places(model)
        self.values = Values(self.places.tensors)
        self.gather = Gather(at_once, level == "full")
        self._compiled, self._keep, self._quietly = compiled, at_once, quietly
        self._forward: dict[int, tuple[Line | None, str]] = {}  # number of an autograd node -> who made it
        self._thread = threading.get_ident()

    waiting = 0  # operators that were noted elsewhere

    def stop(self) -> None:
        """Nothing more will come."""

    def fold(self) -> None:
        """A step has ended: wait for no device."""
        self.gather.fold()

    def between_steps(self, step: int = 0) -> None:
        """Learn new names, and forget what is gone."""
        self.values.refresh()
        if len(self._forward) > _MOST_NODES:
            self._forward.clear()

    def op(self, pending: Pending, index: int) -> Op:
        place, code = self.places.text(pending.line)
        inputs, outputs, operator = pending.inputs, pending.outputs, pending.operator
        if operator.launch:
            inputs, outputs = kernel_launches.sides(inputs, outputs)
        inside = ": ".join(filter(None, self.places.text(pending.inside))) if pending.inside else ""
        # By position and without loops of Python: a step makes thousands.
        return Op(
            index, pending.step, pending.phase, operator.name, pending.module, pending.node, place, code,
            told(pending.facts) if pending.facts else "", tuple([v._stats or v.stats() for v in inputs]),
            tuple([v._stats or v.stats() for v in outputs]), operator.random, tuple(pending.kernels), inside,
        )  # fmt: skip

    def drain(self) -> list[Pending]:
        """Operators that were noted elsewhere; none."""
        return []

    def forget(self) -> None:
        """What was drained has its statistics."""

    def before(self, pending: Pending, args: tuple[Any, ...], kwargs: dict[str, Any], frame: Any) -> None:
        operator = pending.operator
        self._locate(pending, frame)
        tensors, pending.facts = operator.split(args, kwargs)
        measuring = not (operator.view or operator.aliases or self.level == "names")
        measuring &= not (self.optimizing and self.level == "fast")
        overwritten = [id(t) for t in operator.overwritten(args, kwargs)] if operator.writes else ()
        for tensor in tensors:
            if overwritten and id(tensor) in overwritten:
                continue
            value = self.values.of(tensor)
            if not value.asked:
                self._compiled.look(tensor)
                if measuring:
                    self._ask(value, tensor)
            pending.inputs.append(value)
            if self._keep:
                pending.seen.append(tensor)
        if pending.phase == OTHER and not self.optimizing and torch.is_grad_enabled():
            # Outside of every module a loss is forward, and what makes the data is not.
            pending.phase = FORWARD if any(t.requires_grad for t in tensors) else OTHER

    def after(self, pending: Pending, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        operator = pending.operator
        written = list(operator.written(args, kwargs)) if operator.writes else []
        for tensor in written:
            self.values.written(tensor)
        made = [out] if isinstance(out, torch.Tensor) else list(tensors_in(out))
        if written:
            returned = {id(t) for t in made}
            made += [t for t in written if id(t) not in returned]
        for tensor in made:
            if operator.makes_memory:
                self.values.born(tensor)
            value = self.values.of(tensor)
            pending.outputs.append(value)
            if operator.view and not written:
                self._link(value, pending, tensor)
            elif not (operator.makes_memory or operator.aliases or operator.asynchronous) and self._counts(tensor):
                self._ask(value, tensor)

        if pending.generated:
            # Kernels that are not seen run between the operators of compiled code: what was measured may not last.
            for tensor in (*tensors_in((args, kwargs)), *made):
                self.values.written(tensor)

    def before_launch(self, pending: Pending, tensors: list[torch.Tensor], frame: Any) -> None:
        self._locate(pending, frame)
        if pending.phase == OTHER and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            pending.phase = FORWARD
        for tensor in tensors:
            value = self.values.of(tensor)
            if self.level != "names":
                self._ask(value, tensor)
            pending.inputs.append(value)
            if self._keep:
                pending.seen.append(tensor)

    def after_launch(self, pending: Pending, tensors: list[torch.Tensor]) -> None:
        # Which tensors a kernel wrote shows in their digests, once those are read (`_op`).
        pending.kernels.append(pending.operator.name.rpartition("::")[2])
        for tensor, before in zip(tensors, pending.inputs, strict=True):
            fresh = self.values.unwritten(tensor)
            self.values.written(tensor)
            value = self.values.of(tensor)
            value.fresh = fresh
            if before.number != value.number and self.level != "names":
                self._ask(value, tensor)
            pending.outputs.append(value)

    def _counts(self, tensor: torch.Tensor) -> bool:
        """Whether results are measured now; what an optimizer keeps for itself is not at level fast."""
        if self.level == "names":
            return False
        return self.level == "full" or not self.optimizing or isinstance(tensor, torch.nn.Parameter)

    def _ask(self, value: Value, tensor: torch.Tensor) -> None:
        if value.asked:
            return
        value.asked = True
        if has_numbers(tensor):
            tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor
            self._quietly(lambda: self.gather.request(tensor, value.take))

    def _link(self, value: Value, pending: Pending, tensor: torch.Tensor) -> None:
        """A view with the elements of its source has the statistics of its source."""
        source = pending.inputs[0] if pending.inputs else value
        if value.asked or value is source or not source.asked or source.dtype != value.dtype:
            return
        elements, before = tensor.numel(), source.count
        kind = pending.operator.view
        if before == 0 or elements % before or (kind != "expanded" and elements != before):
            return
        ordered = kind == "ordered" or elements == before == 1 or (kind == "expanded" and elements == before)
        if self.level == "full" and not ordered:
            return
        value.asked, value.source, value.times, value.ordered = True, source, elements // before, ordered

    def _locate(self, pending: Pending, frame: Any) -> None:
        """Phase, module, autograd node and line."""
        line, module = self.places.look(frame)
        pending.generated = self.places.generated
        if pending.generated:
            self._compiled.in_frames = True
        if self.places.grown:  # a model that was not known before
            self.places.grown = False
            self.values.rename()
        if torch._C._current_graph_task_id() == -1:
            pending.line, pending.module = line, module or ""
            if module is not None and not self.optimizing:
                pending.phase = FORWARD
            # The node of this operator has just been made: autograd stands above the mode.
            self._forward.setdefault(torch.autograd._get_sequence_nr() - 1, (line, module or ""))
            return
        pending.phase = BACKWARD
        node = torch._C._current_autograd_node()
        if node is not None:
            pending.node = node.name().removeprefix("torch::autograd::")
            pending.line, pending.module = self._forward.get(node._sequence_nr(), (None, ""))
            self._compiled.in_nodes |= pending.node.startswith("CompiledFunction")
            variable = getattr(node, "variable", None)
            if variable is not None:
                pending.module = self.values.of(variable).name.rpartition(".")[0]
        if module is not None:  # a forward computed again, by checkpointing
            pending.line, pending.module = line, module
        else:
            pending.inside = line
        if threading.get_ident() == self._thread:
            # Second derivatives: nodes made in a backward are those of its line.
            self._forward.setdefault(torch.autograd._get_sequence_nr() - 1, (pending.line, pending.module))


def has_numbers(tensor: torch.Tensor) -> bool:
    """Whether there is memory to read: not of fake tensors, nor of sparse ones but COO."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    dense = tensor.layout is torch.strided or tensor.layout is torch.sparse_coo
    return plain and dense and not tensor.is_quantized and tensor.device.type != "meta"


def made_of_others(kind: Any) -> bool:
    """Whether tensors of this type consist of other tensors, as DTensor: operators on those are what is recorded."""
    from torch._subclasses.fake_tensor import FakeTensor

    own = getattr(kind, "__torch_dispatch__", _OWN)
    return own is not _OWN and own is not torch._C._disabled_torch_dispatch_impl and not issubclass(kind, FakeTensor)
