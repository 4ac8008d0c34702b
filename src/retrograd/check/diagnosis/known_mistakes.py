"""Known mistakes as numbers: what a tensor would be if a backward had made one of them.

Most are not formulas of some op but changes of the reference, so that they fit any: a gradient that does not come back
through one of its operators, or comes back too large; a part of grad_out that is never added; another value of a
parameter; memory read with the strides of another layout. Gradients are linear in what comes back through an operator
and in grad_out, so two runs tell how many times it counts, and a least-squares fit which parts of grad_out are lost.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from retrograd.check import tolerance
from retrograd.check.diagnosis.elements import describe
from retrograd.check.layouts import lay_out, without_strides
from retrograd.check.op_runner import OpRunner
from retrograd.check.oracle import Truth
from retrograd.check.rounding import Float64
from retrograd.check.schema import Case
from retrograd.check.sizes import elements
from retrograd.check.tensor_comparison import compare

_MOST_OPERATORS = 60  # of a reference that are looked at; each costs a run of it
_MOST_PARTS = 64  # of an axis of grad_out, likewise
_MOST_OF_DEAR = 8  # of either where a run takes long: a loop's first operators are what stands before it
_FEW = 8  # elements, in fewer of which a factor that was fitted shows nothing
_MOST_TIMES = 4  # that a part of a sum may count to be believed
_TORCH = str(Path(torch.__file__).parent)


class Suspect(NamedTuple):
    """A mistake in words, and the tensor that it would give; None where the reference cannot make it."""

    text: str
    tensor: torch.Tensor | None


@dataclass(frozen=True)
class Evidence:
    """One wrong tensor of a case; `got` and `want` are float64. Where the reference `is_dear` it runs less often."""

    runner: OpRunner
    case: Case
    name: str
    got: torch.Tensor
    want: torch.Tensor
    truth: Truth
    is_dear: bool = False

    def most(self, number: int) -> int:
        """How many runs of the reference may be spent on one kind of mistake, of so many."""
        return min(number, _MOST_OF_DEAR) if self.is_dear else number

    def shows(self, suspect: Suspect) -> bool:
        """Whether the op gave the suspect's numbers, every one of them."""
        tensor = suspect.tensor
        if tensor is None:
            return False
        # Lost memory may hold anything, and NaN equals NaN: what is finite and not 0 has to speak; of a gradient that
        # is 0 in most places, as relu's is in half of them, at the others, if these are not too few to fit by chance.
        says, asked = (int((t.isfinite() & (t != 0)).sum()) for t in (tensor, self.want))
        asked = asked if says >= _FEW else tensor.numel()
        if tensor.shape != self.got.shape or (2 * says < asked and bool((tensor != 0).any())):
            return False
        tol = tolerance.mistake_tolerance(self.truth.tol[self.name], self.want, tensor, self.case.dtype)
        return not compare(self.got, tensor, tol).wrong

    def reference(
        self, change: Callable[..., Any] | None = None, *, case: Case | None = None,
        grad_outs: list[torch.Tensor] | None = None,
    ) -> torch.Tensor | None:  # fmt: skip
        """The tensor by the reference in float64, with `change` in its place, at another case or grad_out."""
        case, gs = case or self.case, self.grad_outs() if grad_outs is None else grad_outs
        reference = self.runner.reference(case)
        layout = case.layout("grad_out")
        reference = replace(
            reference,
            spec=replace(reference.spec, reference=change or reference.spec.reference),
            grad_outs=lambda: [lay_out(g.detach().clone(), layout) for g in gs],
        )
        try:
            result = reference.run(torch.float64, Float64()).get(self.name)
        except Exception:  # a changed reference may be nonsense; then it is not what happened
            return None
        return None if result is None else result.detach()

    def grad_outs(self) -> list[torch.Tensor]:
        """grad_out of the case without its layout, per output."""
        return self.runner.grad_outs(without_strides(self.case))

    def times(self, part: torch.Tensor) -> float | None:
        """How many times `part`, a summand of the right tensor, counts in what the op gave; None if it is 0."""
        size = float(part.square().sum())
        rest = self.want - part
        return float(((self.got - rest) * part).nan_to_num(0.0, 0.0, 0.0).sum()) / size if size else None


def suspects(evidence: Evidence) -> Iterator[Suspect]:
    """All that is tried, the simplest first."""
    sources = (_scaled, _other_tensors, _moved, _times_an_input, _parameters)
    of_gradients = (_other_inputs, _layouts, _roots, _operators, _parts)
    # A NaN where the truth is a number is no other gradient of the reference, which took 60 runs of it to say.
    lost = not bool(evidence.got.isfinite()[evidence.want.isfinite()].all())
    for source in (*sources, *of_gradients) if evidence.name.startswith("grad ") and not lost else sources:
        yield from source(evidence)


def _sizes(case: Case) -> Iterator[tuple[str, float]]:
    """Numbers that stand for something at a case, with what they stand for."""
    for name, size in case.sizes:
        n = elements(size)
        if not n:  # "0" says it already
            continue
        padded = 1 << (n - 1).bit_length()
        yield f"{name} ({n})", n
        yield f"1/{name} (1/{n})", 1 / n
        if n > 1:
            yield f"{name}/({name}-1)", n / (n - 1)
            yield f"({name}-1)/{name}", (n - 1) / n
            yield f"sqrt(({name}-1)/{name})", math.sqrt((n - 1) / n)
        if padded != n:
            yield f"{name} over the block it is padded to ({n}/{padded})", n / padded
            yield f"the block that {name} is padded to over {name} ({padded}/{n})", padded / n


def _factor(value: float, case: Case) -> str:
    """A factor in words."""
    known = [("0", 0.0), ("-1", -1.0), ("2", 2.0), ("1/2", 0.5), ("3", 3.0), *_sizes(case)]
    named = [text for text, number in known if math.isclose(value, number, rel_tol=1e-3, abs_tol=1e-6)]
    apart = abs(value - 1)  # 1.0003 is no 1
    digits = 4 - round(math.log10(apart)) if 0 < apart < 5e-4 else 4
    return named[0] if named else f"{value:.{digits}g}"


def _scaled(e: Evidence) -> Iterator[Suspect]:
    noun = "gradient" if e.name.startswith("grad ") else "value"
    yield Suspect(f"zero everywhere: the {noun} is never written, or cut off", torch.zeros_like(e.want))
    if (times := e.times(e.want)) is not None:
        text = "the right one with the other sign" if _factor(times, e.case) == "-1" else ""
        yield Suspect(text or f"{_factor(times, e.case)} times the right one", times * e.want)
    yield Suspect("the right one without its signs", e.want.abs())


def _other_tensors(e: Evidence) -> Iterator[Suspect]:
    for name, tensor in e.truth.want.items():
        alike = name.startswith("grad ") == e.name.startswith("grad ")
        if name != e.name and alike:
            yield Suspect(f"{name} instead of {e.name}: results that changed places", tensor)
    for i, grad_out in enumerate(e.runner.grad_outs(e.case)):
        yield Suspect(f"grad_out{i if i else ''} itself, passed through", grad_out.double())
    for name, tensor in _tensors(e).items():
        yield Suspect(f"the input {name} itself", tensor.double())


def _tensors(e: Evidence) -> dict[str, torch.Tensor]:
    inputs = e.runner.inputs(without_strides(e.case))
    return {n: t for n, t in inputs.items() if isinstance(t, torch.Tensor) and t.is_floating_point()}


def _moved(e: Evidence) -> Iterator[Suspect]:
    for axis, n in enumerate(e.want.shape):
        for by in (1, -1) if n > 1 else ():
            yield Suspect(f"moved by {by:+d} along axis {axis}: a neighbour's place", e.want.roll(by, axis))
        yield Suspect(f"in reverse order along axis {axis}", e.want.flip(axis))
    for a, b in itertools.combinations(range(e.want.ndim), 2):
        if e.want.shape[a] == e.want.shape[b]:
            yield Suspect(f"axes {a} and {b} changed places", e.want.transpose(a, b))
        yield Suspect(f"stored with axes {a} and {b} changed places", e.want.transpose(a, b).reshape(e.want.shape))


def _times_an_input(e: Evidence) -> Iterator[Suspect]:
    for name, tensor in _tensors(e).items():
        try:
            wide = tensor.double().broadcast_to(e.want.shape)
        except RuntimeError:
            continue
        yield Suspect(f"{name} is multiplied in once too often", e.want * wide)
        yield Suspect(f"{name} is forgotten as a factor", e.want / wide)


def _parameters(e: Evidence) -> Iterator[Suspect]:
    for name, value in e.case.params:
        others = [v for v in e.runner.spec.params.get(name, ()) if v != value]
        others += [type(value)(0)] if isinstance(value, (int, float)) and value and 0 not in others else []
        for other in others:
            tensor = e.reference(case=e.case.but(params=dict(e.case.params) | {name: other}))
            yield Suspect(f"computed with {name} = {other!r} instead of {value!r}", tensor)


def _other_inputs(e: Evidence) -> Iterator[Suspect]:
    """Gradients of the op at ones or squares instead of an input, or for a grad_out of ones."""
    reference = e.runner.spec.reference
    assert reference is not None
    yield Suspect("grad_out is taken for ones", e.reference(grad_outs=[torch.ones_like(g) for g in e.grad_outs()]))
    names = list(e.runner.inputs(without_strides(e.case)))
    changes = (
        ("ones instead of", torch.ones_like),
        ("the square of", torch.square),
        ("1 added to", lambda t: t + 1),
        ("1 taken off", lambda t: t - 1),
    )
    for name in _tensors(e):
        place = names.index(name)
        for how, change in changes:
            if e.name == f"grad {name}":
                continue  # it would be cut off, or differentiated

            def changed(*args: Any, place: int = place, change: Any = change, **params: Any) -> Any:
                return reference(*args[:place], change(args[place].detach()), *args[place + 1 :], **params)

            yield Suspect(f"computed with {how} {name}", e.reference(changed))


def _roots(e: Evidence) -> Iterator[Suspect]:
    """With several outputs: one that adds nothing to the gradient, or too much."""
    grad_outs = e.grad_outs()
    if len(grad_outs) < 2:
        return
    for i in range(len(grad_outs)):
        rest = e.reference(grad_outs=[torch.zeros_like(g) if j == i else g for j, g in enumerate(grad_outs)])
        yield from _miscounted(e, rest, f"the part of the gradient that belongs to output {i}", "is not added")


def _miscounted(e: Evidence, rest: torch.Tensor | None, label: str, lost: str) -> Iterator[Suspect]:
    """What the right tensor has beside `rest`, counted another number of times."""
    rest = torch.zeros_like(e.want) if rest is None else rest
    part = e.want - rest
    if (times := e.times(part)) is not None:
        factor = _factor(times, e.case)
        how, times = (lost, 0.0) if factor == "0" else (f"counts {factor} times", times)
        yield Suspect(f"{label} {how}", rest + times * part)


def _layouts(e: Evidence) -> Iterator[Suspect]:
    """grad_out read with strides that are not its own."""
    laid = e.runner.grad_outs(e.case)
    first = next((t for t in e.runner.inputs(e.case).values() if isinstance(t, torch.Tensor)), None)
    ways = [("as if it were contiguous", [torch.empty(g.shape, device="meta").stride() for g in laid])]
    if first is not None and all(g.shape == first.shape for g in laid):
        ways.append(("with the strides of the first input", [first.stride()] * len(laid)))
    for how, strides in ways:
        read = [_read(g, s) for g, s in zip(laid, strides, strict=True)]
        if any(not torch.equal(a, b) for a, b in zip(read, laid, strict=True)):
            yield Suspect(f"grad_out is read {how}", e.reference(grad_outs=read))


def _read(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """What lies at other strides in the tensor's memory; zeros beyond its end."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    place = torch.full(tensor.shape, int(tensor.storage_offset()), dtype=torch.int64, device=tensor.device)
    for axis, stride in enumerate(strides):
        steps = torch.arange(tensor.shape[axis], device=tensor.device) * stride
        place += steps.view([-1] + [1] * (tensor.ndim - axis - 1))
    if not tensor.numel() or not size:
        return torch.zeros_like(tensor)
    memory = tensor.as_strided((size,), (1,), 0)
    return torch.where(place < size, memory[place.clamp(max=size - 1)], 0)


class _Constant(TorchFunctionMode):
    """Makes a constant of the result of one of the operators that run in it, and says which it was."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.seen, self.text = number, 0, ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not isinstance(out, torch.Tensor) or not out.requires_grad or func is torch.Tensor.requires_grad_:
            return out
        self.seen += 1
        if self.seen - 1 != self.number:
            return out
        name = getattr(func, "__name__", str(func)).strip("_")
        self.text = f"{name} ({_caller()})"
        return out.detach()


def _caller() -> str:
    """file:line of the innermost frame that is neither torch's nor this file's."""
    frame = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename.startswith(_TORCH) or frame.f_code.co_filename == __file__):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else "reference"


def _operators(e: Evidence) -> Iterator[Suspect]:
    """What comes back through one operator of the reference, taken 0, -1, 2 or any number of times."""
    reference = e.runner.spec.reference
    assert reference is not None
    for number in range(e.most(_MOST_OPERATORS)):
        mode = _Constant(number)

        def changed(*args: Any, mode: _Constant = mode, **params: Any) -> Any:
            with mode:
                return reference(*args, **params)

        without = e.reference(changed)
        if not mode.text:
            return
        yield from _miscounted(e, without, f"what comes back through {mode.text}", "is missing")


def _parts(e: Evidence) -> Iterator[Suspect]:
    """Slices of grad_out that count 0, 2 or another whole number of times in a sum over them."""
    grad_outs = [g.double() for g in e.grad_outs()]
    if len(grad_outs) != 1 or not bool(e.got.isfinite().all()):
        return
    (grad_out,) = grad_outs
    for axis, n in enumerate(grad_out.shape):
        if not 1 < n <= e.most(_MOST_PARTS) or e.want.numel() < n:
            continue
        parts = []
        for i in range(n):
            only = torch.zeros_like(grad_out)
            only.select(axis, i).copy_(grad_out.select(axis, i))
            tensor = e.reference(grad_outs=[only])
            parts.append(torch.zeros_like(e.want).flatten() if tensor is None else tensor.detach().flatten())
        # [elements, n], on the CPU: CUDA's driver wants columns that do not depend on each other.
        columns = torch.stack(parts, 1).cpu()
        if not bool(columns.isfinite().all()):  # LAPACK refuses them, and one number in them would be all of it
            continue
        times = torch.linalg.lstsq(columns, e.got.flatten()[:, None].cpu()).solution[:, 0].round()
        wrong = [i for i in range(n) if times[i] != 1]
        if wrong and len({float(times[i]) for i in wrong}) == 1 and abs(float(times[wrong[0]])) <= _MOST_TIMES:
            count = int(times[wrong[0]])
            how = {0: "is lost", 2: "is added twice", -1: "is subtracted"}.get(count, f"counts {count} times")
            name, rows = f"axis {axis} of grad_out", torch.tensor([i in wrong for i in range(n)])
            where = describe(rows, [name]).replace("every element", f"all of {name}")
            yield Suspect(f"what belongs to {where} {how}", (columns @ times).view(e.want.shape))
