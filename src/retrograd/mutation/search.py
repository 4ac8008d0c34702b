"""Search for an input at which a mutant differs from the original, apart from anything that verify does.

In float64 a difference is more than 1e-8 of the largest element, and at special values, where most of a gradient may
have cancelled, more than 16 roundoffs of the largest result; in another dtype an error of more than ten times the
original's plus 16 roundoffs. Where a whole gradient is 0 as far as the dtype knows, as a softmax's is for a constant
grad_out, what its terms leave of themselves is none. None instead of a tensor, another shape, a NaN where there was
none, and an exception are differences, but not None instead of zeros. What lies between gradients of the original at
inputs nearby is a kink.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from retrograd.check import extreme_values, layouts, tolerance
from retrograd.check import inputs as make
from retrograd.check.cpu_kernels import executed
from retrograd.check.input_specs import TensorSpec
from retrograd.check.op_runner import OpRunner
from retrograd.check.oracle import term_sizes
from retrograd.check.rounding import Float64
from retrograd.check.schema import Case
from retrograd.check.sizes import elements
from retrograd.check.spec import OpSpec
from retrograd.mutation.schema import OWN_NAN, RARITIES

_ORDINARY = 6  # draws of the ordinary inputs
_SIZES = (0, 1, 2, 3, 8, 17, 33, 64, 65, 129, 300)
_ROUND = 7919  # between the seeds of two rounds
_NEARBY = 1e-6  # of an input's size, how far inputs are moved to see whether a difference is that of a kink
_PAIRS = 3  # of moves of the inputs, there and back
_RAISES = "raises:"
_CLEAR = 0.1  # share of the largest element that anybody would call a difference

Values = dict[str, torch.Tensor | None] | Exception


@dataclass(frozen=True)
class TriedInput:
    """One input: the class of rarity that it stands for, the case, and the only inputs that want a gradient."""

    rarity: str
    case: Case
    only: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Seen:
    """How results differ, in words, and by which share of the largest element of any result; else infinite.

    `own`: only in whether the element that is NaN in an input is one in a result, which has no share.
    """

    text: str
    share: float = math.inf
    own: bool = False


@dataclass(frozen=True)
class MutantDifference:
    """The first trial of its class that differs, and how."""

    rarity: str
    trial: TriedInput
    seen: Seen

    @property
    def raises(self) -> bool:
        """Whether the mutant raises there."""
        return self.seen.text.startswith(_RAISES)


class Search:
    """Results of the original at every trial, to be compared with a mutant's later.

    Args:
        spec: of the op; it supplies inputs and sizes.
        seed: of the inputs.
        number: of the round; each has other inputs, and all but the first other sizes.

    Attributes:
        trials: all of them.
        original: a context in which the original is in place; to be set where a mutant is.
    """

    def __init__(self, spec: OpSpec, seed: int, number: int = 0) -> None:
        self.spec, self.seed = spec, seed + _ROUND * number
        self._sizes = sorted(random.Random(number).sample(range(1, 301), len(_SIZES))) if number else _SIZES
        self._runners = {d: OpRunner(spec, d, self.seed, "cpu") for d in spec.dtypes}
        self.exact = next((d for d in ("float64", "complex128") if d in spec.dtypes), "")
        self.trials = list(self._trials())
        self.original: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self._wanted: dict[TriedInput, Values] = {}
        self._truths: dict[TriedInput, Values | None] = {}
        for trial in self.trials:
            self.wanted(trial)

    def _trials(self) -> Iterator[TriedInput]:
        first = self.exact or self.spec.dtypes[0]
        base = self._runners[first].base
        for draw in range(_ORDINARY):
            yield TriedInput("every input", base.but(draw=draw))
        others = make.param_cases(self.spec, base)[1:]
        yield from (TriedInput("parameters", case) for case in others)
        for name, _ in base.sizes:
            free = isinstance(base.size(name), tuple)
            for size in [*((n,) for n in self._sizes), (), (2, 3), (2, 1, 3)] if free else self._sizes:
                if make.allows(self.spec, name, size) and (
                    case := make.fitted(self.spec, base.with_size(name, size), name)
                ):
                    yield TriedInput("sizes", case)
        specs = {n: s for n, s in (self.spec.tensor_specs or {}).items() if isinstance(s, TensorSpec)}
        for name, described in specs.items():
            bounded = described.low is not None or described.high is not None or described.values is not None
            for number, value in enumerate((*(() if bounded else extreme_values.NAMES), *extreme_values.ENDS)):
                yield TriedInput("special values", base.but(values={name: value}))
                if others:
                    yield TriedInput("special values", others[number % len(others)].but(values={name: value}))
            for layout in layouts.applicable(3):
                yield TriedInput("layouts", base.but(layouts={name: layout}))
        for layout in layouts.applicable(3):
            yield TriedInput("layouts", base.but(layouts={"grad_out": layout}))
        names = self._runners[first].differentiable(base)
        if len(names) > 1:
            yield from (TriedInput("subset of gradients", base, (name,)) for name in names)
            yield from (TriedInput("subset of gradients", base, tuple(n for n in names if n != name)) for name in names)
        for dtype in self.spec.dtypes:
            if dtype != first:
                yield from (TriedInput("dtypes", self._runners[dtype].base.but(draw=draw)) for draw in range(2))

    def runner(self, trial: TriedInput) -> OpRunner:
        """What runs a trial."""
        return self._runners[trial.case.dtype]

    def wanted(self, trial: TriedInput) -> Values:
        """What the original gives, and gave where it is known."""
        if trial not in self._wanted:
            with self.original():
                self._wanted[trial] = self._run(trial)
            self._truths[trial] = self._true(trial)
        return self._wanted[trial]

    def _run(self, trial: TriedInput, inputs: dict[str, Any] | None = None) -> Values:
        runner = self._runners[trial.case.dtype]
        try:
            with executed("cpu", {}):
                tensors = runner.forward(trial.case, inputs=inputs, only=trial.only).backward().tensors
        except Exception as error:
            return error
        return {name: None if t is None else t.detach().to(torch.float64) for name, t in tensors.items()}

    def _true(self, trial: TriedInput) -> Values | None:
        """What the reference gives in float64; None where the op's own values are compared, or it refuses the trial."""
        if trial.case.dtype == self.exact or self.spec.reference is None:
            return None
        with contextlib.suppress(Exception):
            exact = self._runners[trial.case.dtype].reference(trial.case).run(torch.float64, Float64())
            return {name: None if t is None else t.detach() for name, t in exact.items()}
        return None

    def differences(self, rarities: tuple[str, ...] = RARITIES) -> Iterator[MutantDifference]:
        """What differs now, in the order of the classes: at most one of each, `every input` or `some inputs` first."""
        own = None
        for rarity in (r for r in rarities if r not in ("some inputs", OWN_NAN)):
            trials = [t for t in self.trials if t.rarity == rarity]
            if rarity == "every input":
                shown = [(t, seen) for t in trials if (seen := self.difference(t))]
                if shown and (len(shown) == len(trials) or "some inputs" in rarities):
                    yield MutantDifference(rarity if len(shown) == len(trials) else "some inputs", *shown[0])
                continue
            for trial in trials:
                if (seen := self.difference(trial)) and not seen.own:
                    yield MutantDifference(rarity, trial, seen)
                    break
                own = own or (MutantDifference(OWN_NAN, trial, seen) if seen else None)
        if own and OWN_NAN in rarities:
            yield own

    def difference(self, trial: TriedInput) -> Seen | None:
        """How the op differs now from the original at a trial; None if it does not, or the original raised."""
        want = self.wanted(trial)
        if isinstance(want, Exception):
            return None
        got = self._run(trial)
        if isinstance(got, Exception):
            return Seen(f"{_RAISES} {str(got).splitlines()[0] if str(got) else type(got).__name__}")
        truth = self._truths[trial]
        finite = (t[t.isfinite()] for t in want.values() if t is not None)
        scale = max((float(t.abs().max()) for t in finite if t.numel()), default=1.0)
        seen = (self._compared(name, got, want, truth, trial, scale) for name in {**want, **got})
        return max((s for s in seen if s is not None), key=lambda s: s.share, default=None)

    def _compared(
        self,
        name: str,
        results: dict[str, torch.Tensor | None],
        wanted: dict[str, torch.Tensor | None],
        truth: Values | None,
        trial: TriedInput,
        scale: float,
    ) -> Seen | None:
        got, want = results.get(name), wanted.get(name)
        if got is None or want is None:  # to autograd no gradient is one of zeros
            there = want if got is None else got
            same = there is None or not bool(there.ne(0).any())
            return None if same else Seen(f"{name} is {'None' if got is None else 'a tensor'}")
        if got.shape != want.shape:
            return Seen(f"{name} has shape {tuple(got.shape)} instead of {tuple(want.shape)}")
        apart, seen = want.isfinite() != got.isfinite(), None
        if bool(apart.any()):
            own = any(value == "nan" for _, value in trial.case.values) and apart.nonzero().tolist() == [
                list(extreme_values.cell(apart.shape))
            ]
            lost = bool((apart & want.isfinite()).any())
            text = f"{name} is {'not ' * lost}finite where it was{'' if lost else ' not'}"
            seen = Seen(text, 0.0 if own else math.inf, own)
            if not own:
                return seen
        true = truth.get(name) if isinstance(truth, dict) else None
        center = want if true is None or true.shape != want.shape else true.to(want.dtype)
        finite = center.isfinite() & want.isfinite() & ~apart
        if not bool(finite.any()):
            same = (got == want) | (got.isnan() & want.isnan())
            return seen if bool((same | apart).all()) else Seen(f"{name} has another infinity")
        error = (want - center).abs()
        size, off = float(center[finite].abs().max()), torch.where(finite, (got - center).abs(), 0.0)
        roundoffs = 16 * torch.finfo(make.torch_dtype(trial.case.dtype)).eps
        allowed = max(1e-8 * size, roundoffs * scale if trial.case.values else 0.0)
        if trial.case.dtype != self.exact:
            allowed = 10 * float(error[finite].max()) + roundoffs * size
        if bool((off > allowed).any()):
            off = torch.where(off <= self._left(trial, name, wanted, want.abs() if true is None else error), 0.0, off)
        if (most := float(off.max())) <= allowed:
            return seen
        return Seen(f"{name} is off by {most:.3g} where the largest is {size:.3g}", most / scale if scale else math.inf)

    def _left(
        self, trial: TriedInput, name: str, wanted: dict[str, torch.Tensor | None], error: torch.Tensor
    ) -> torch.Tensor:
        """What terms that cancel may leave of a gradient that is 0 but for rounding, all of which is `error`."""
        want, reference = wanted[name], self.runner(trial).reference(trial.case)
        assert want is not None
        if self.spec.reference is None or (terms := term_sizes(reference, wanted).get(name)) is None:
            return torch.zeros_like(want)
        # The largest of all: a row's maximum, say, has the gradient of each of its elements.
        return tolerance.cancelled(want, error, tolerance.UNIT[trial.case.dtype], terms.amax().expand_as(want))

    def at_kink(self, difference: MutantDifference) -> bool:
        """Whether what is seen lies between results of the original at inputs nearby."""
        got = self._run(difference.trial)
        with self.original():
            hull = self._envelope(difference.trial)
        if isinstance(got, Exception) or hull is None:
            return False
        for name, (low, high) in hull.items():
            value = got.get(name)
            if value is None or value.shape != low.shape:
                return False
            slack = 1e-4 * (high - low) + 1e-8 * torch.maximum(low.abs(), high.abs())
            if bool(((value < low - slack) | (value > high + slack)).any()):
                return False
        return True

    def _envelope(self, trial: TriedInput) -> dict[str, tuple[torch.Tensor, torch.Tensor]] | None:
        """Least and most of the original's results near a trial; None where it cannot be told."""
        want = self.wanted(trial)
        if isinstance(want, Exception) or trial.case.dtype != self.exact:
            return None
        seen = [want]
        noise: dict[str, torch.Tensor] = {}
        runner, generator = self._runners[trial.case.dtype], torch.Generator().manual_seed(self.seed)
        for sign in (1, -1) * _PAIRS:  # so that each element is seen on both sides
            inputs = runner.inputs(trial.case)
            if sign > 0:
                noise = {n: _noise(t, generator) for n, t in inputs.items() if isinstance(t, torch.Tensor)}
            for name, step in noise.items():
                inputs[name] = inputs[name] + sign * step
            moved = self._run(trial, inputs)
            if isinstance(moved, Exception):
                return None
            seen.append(moved)
        hull = {}
        for name in want:
            values = [v for run in seen if (v := run.get(name)) is not None]
            if len(values) == len(seen):
                stacked = torch.stack(values)  # (moves + 1, *shape)
                hull[name] = (stacked.amin(0), stacked.amax(0))
        return hull

    def smaller(self, trial: TriedInput) -> TriedInput:
        """The trial with smaller sizes at which the mutant still differs by as much, tried one size after another."""
        seen = self.difference(trial)
        least = min(seen.share if seen else 0.0, _CLEAR) / 2
        for name, size in trial.case.sizes:
            for count in (n for n in (1, 2, 3, 4, 8) if n < elements(size)):
                less = (count,) if isinstance(size, tuple) else count
                case = make.fitted(self.spec, trial.case.with_size(name, less), name)
                if case is None or not make.allows(self.spec, name, less):
                    continue
                other = TriedInput(trial.rarity, case, trial.only)
                if (seen := self.difference(other)) and seen.share >= least:
                    trial = other
                    break
        return trial


def _noise(t: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A small move of an input; none of whole numbers."""
    if not t.is_floating_point():
        return torch.zeros_like(t)
    step = _NEARBY * t.abs().mean().nan_to_num(1.0).clamp_min(1e-30)
    return step * torch.randn(t.shape, generator=generator, dtype=t.dtype)
