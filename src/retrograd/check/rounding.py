"""Random rounding: a dispatch mode that runs any PyTorch code in float64 and, if asked, perturbs every operator.

Monte-Carlo arithmetic at operator level (Parker 1997; Verificarlo, arXiv 1509.01347): the spread of the results
is the error that a correct implementation of the same formula in that precision may make. Casts to a
lower precision inside the code are lifted, so a reference that says `x.float()` still gives a float64 truth.
"""

from __future__ import annotations

import math
import random
from functools import cache, lru_cache
from typing import Any

import torch

from retrograd.check import contractions
from retrograd.check.last_run import LastRun, near
from retrograd.check.operators import (
    ADDING,
    AGAINST_ZERO,
    CHOOSING,
    DECIDING,
    EXACT_RESULTS,
    EXTREMA,
    KEEPING,
    MAKING,
    NORMS,
    OF_NAN,
    PRODUCTS,
    SMOOTH,
    OperatorTraits,
    about,
)
from retrograd.check.own_mistakes import calls_theirs
from retrograd.check.rounding_errors import product_error, reduction_error, square
from retrograd.check.whole_numbers import stays_whole
from retrograd.compat.torch_dispatch import UnwrappedMode, resolved, tree_leaves, tree_map_only

_LIFTED = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64)
_LIFTED |= dict.fromkeys((torch.complex64, torch.complex32), torch.complex128)
_ATEN = torch.ops.aten
_CHOICES = ("min", "max", "amin", "amax")

# Uniform numbers that noise is cut out of: to draw them takes longer than most operators. Two pieces overlap by 1/16 of
# themselves on the average, which changes a spread by 3 % at most.
_POOL = 1 << 20
_PIECE = _POOL // 16


@cache
def _pool(device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(0)
    return torch.empty(_POOL, dtype=torch.float64, device=device).uniform_(-1.0, 1.0, generator=generator)


@lru_cache(maxsize=8)  # 8 MiB each; each dtype has two, at kinks and elsewhere
def _factors(device: torch.device, unit: float) -> torch.Tensor:
    """What multiplies a number that is rounded randomly, for each number of the pool."""
    return _pool(device) * unit + 1.0


@cache
def _each_twice(runs: int, device: torch.device) -> torch.Tensor:
    """The number of the pair of each run."""
    return torch.arange(runs, device=device) // 2


@lru_cache(maxsize=1 << 12)
def _taken(runs: int, others: int, device: torch.device, both: bool = False) -> torch.Tensor:
    """The run whose values each has: the other of its pair where a bit of `others` is set, of `both` the same one."""
    return torch.tensor([run ^ (others >> (run // 2 if both else run) & 1) for run in range(runs)], device=device)


def _unplaced(first: torch.Tensor, results: Any) -> bool:
    """Whether a choice is among NaNs, or of an infinity that others equal: which of them is a convention."""
    chosen = next((t for t in results if isinstance(t, torch.Tensor) and t.is_floating_point()), first)
    ends = [end for end in (math.inf, -math.inf) if bool((chosen == end).any())]
    return bool(first.isnan().any()) or any(int((first == end).sum()) > 1 for end in ends)


def _chooses(name: str, args: tuple[Any, ...]) -> bool:
    """Whether this is a norm that is one of the numbers, the largest or the least, or counts them, or a reduction.

    A largest distance is a difference: its rounding is the last, and the gradient asks which of them it is.
    """
    if name in CHOOSING:
        return any(isinstance(a, str) and a in _CHOICES for a in args)
    place = NORMS.get(name, len(args))
    return len(args) > place and args[place] in (math.inf, -math.inf, 0)


def _may_decide(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator may make a kink or a jump of numbers that it is given.

    A mask made of rows and columns decides nothing that inputs do. What numbers become when they are made whole does.
    """
    if name == "_to_copy":
        dtype = kwargs.get("dtype")
        return dtype is not None and not dtype.is_floating_point and not dtype.is_complex and _floating(args[0])
    return SMOOTH.isdisjoint((name, name.removesuffix("_"))) and any(map(_floating, tree_leaves(args)))


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _size(value: Any) -> Any:
    """The sizes of what a sum adds up."""
    return value.abs() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _lift(t: torch.Tensor) -> torch.Tensor:
    return t.to(_LIFTED.get(t.dtype, t.dtype))


@calls_theirs
def _run_lifted(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """What an operator returns, and what it was given: in float64 where some of it is and the rest keeps it from it.

    A reference may hold constants of a lower precision: an operator refuses them, or a single number in float64 gives
    way to them.
    """
    try:
        out = func(*args, **kwargs)
        if not (isinstance(out, torch.Tensor) and out.dtype in _LIFTED and _mixed(func, args, kwargs)):
            return out, args, kwargs
    except RuntimeError:
        if not _mixed(func, args, kwargs):
            raise
    args, kwargs = (tree_map_only(torch.Tensor, _lift, tree) for tree in (args, kwargs))
    return func(*args, **kwargs), args, kwargs


@calls_theirs
def _viewed(func: Any, args: Any) -> Any:
    """What an operator returns that looks at memory in another way."""
    return func(*args)


def _made_lifted(func: Any, name: str, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The same, where what an operator makes of nothing in the default dtype is in float64 too."""
    out, args, kwargs = _run_lifted(func, args, kwargs)
    if name in MAKING and out.dtype in _LIFTED:  # a dtype that is named has been lifted already
        kwargs = kwargs | {"dtype": _LIFTED[out.dtype]}
        out = func(*args, **kwargs)
    return out, args, kwargs


def _mixed(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator that returns memory of its own is given float64 and something of a lower precision."""
    kinds = {t.dtype for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
    return (
        not about(func).returns_alias
        and not _LIFTED.keys().isdisjoint(kinds)
        and not kinds.isdisjoint(_LIFTED.values())
    )


class Float64(UnwrappedMode):
    """Lift everything to float64; with `unit` > 0 perturb each operator's result.

    Args:
        unit: relative half-width of the noise on each inexact result, e.g. 2**-24 for float32.
        accumulate: unit roundoff of accumulators inside reductions (16-bit ops add in float32).
        seed: of the noise.
        products: unit roundoff of what goes into products of matrices, where that is less than `unit`'s; else 0. It is
            that of all products of two tensors where `elementwise`, for a formula that multiplies no matrices.
        inputs: whether what goes in is perturbed too, as whoever measures a formula's error must; False leaves exact
            what a lower precision would be given exactly.
        grad_outs: whether the gradients that go in are.
        track: whether `peak` is kept, without noise only.
        widest: whether so is `widest`, of which each result is asked.
        record: whether `decisions` are kept: by operator, what it decided for each element, in the order of the run.
        runs: how many runs there are at once, along a first dimension that functorch made.
        last: of a single run, the one before it.
        apart: whether two runs of a pair take values of each other only both at once, and so stay apart. Where one does
            alone the two are the same from there on: of a few operators in a row the first few alone tell them apart.
    """

    def __init__(
        self, unit: float = 0.0, accumulate: float = 0.0, seed: int = 0, device: str = "cpu", products: float = 0.0,
        *, inputs: bool = True, grad_outs: bool = False, track: bool = False, widest: bool = False,
        record: bool = False, elementwise: bool = False, runs: int = 1, last: LastRun | None = None,
        apart: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.matrices = False  # whether a product of matrices was met
        self.switches: set[str] = set()  # operators that may have a kink, by name
        self._inside = 0  # depth of operators that are being taken apart
        self.peak = 0.0  # the largest number that adding up met, of sums of sizes
        self.widest = 0.0  # the largest of all, where that is asked for
        self._every = widest
        self.elements = 0  # of all results together
        self.changes = False  # whether anything ran otherwise than without the mode: lifted, or taken apart
        self._runs, self._last, self._apart = runs, last, apart
        self.record = record
        self.decisions: list[tuple[str, torch.Tensor]] = []
        self.unplaced: set[str] = set()  # operators whose choice is a convention (`_unplaced`), kept beside `decisions`
        self.by_nan: set[str] = set()  # those that decided by a NaN, also kept beside them
        self.unit, self.accumulate, self.products = unit, accumulate, products
        self._multiplying = PRODUCTS | {"mul"} if elementwise else PRODUCTS
        self._sums = bool(products) and not elementwise  # whether some may be products of matrices by elements
        self.inputs, self.grad_outs, self.track = inputs, grad_outs, track
        self._place = random.Random(seed).random

    def _cut_like(self, pool: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """`_cut` in the shape of `t`: in one step where it can be, as this is asked for at each operator."""
        count = t.numel()
        if count > _PIECE or not t.is_contiguous():
            return self._cut(pool, tuple(t.shape))
        return pool.as_strided(t.shape, t.stride(), int(self._place() * (_POOL - count)))

    def _cut(self, pool: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Numbers from a random place of a pool; not to be written to."""
        count = math.prod(shape)
        if count <= _PIECE:
            start = int(self._place() * (_POOL - count))
            return torch.narrow(pool, 0, start, count).view(shape)
        starts = [int(self._place() * (_POOL - _PIECE)) for _ in range(-(-count // _PIECE))]
        return torch.cat([pool[start : start + _PIECE] for start in starts])[:count].view(shape)

    def noise(self, t: torch.Tensor) -> torch.Tensor:
        """Uniform in [-1, 1), the shape of `t`, not to be written to; both parts of complex numbers."""
        # A reference may make a tensor on the CPU while the op is on a GPU.
        if not t.is_complex():
            return self._cut_like(_pool(t.device), t)
        return torch.view_as_complex(self._cut(_pool(t.device), (*t.shape, 2)).clone())

    def _factor_of_runs(self, t: torch.Tensor, unit: float) -> torch.Tensor:
        """What multiplies all elements of a tensor, another number for each pair of runs."""
        runs = self._runs if t.ndim and t.shape[0] % self._runs == 0 else 1
        pairs = -(-runs // 2)
        each = self._cut(_factors(t.device, unit), (pairs, *[1] * (t.ndim - 1)) if t.ndim else ())
        if runs == 1:
            return each if self._last is None else self._last.factor(each)
        each = each.index_select(0, _each_twice(runs, t.device))
        return each if t.shape[0] == runs else each.repeat_interleave(t.shape[0] // runs, 0)

    def _of_another_run(self, t: torch.Tensor) -> torch.Tensor:
        """Of half of the runs the values of the other of a pair, where these are near: as computed a second time.

        What cancels exactly where one product is used twice does not where an implementation has it twice, each from
        factors with fewer bits: do v less the sum of p (do v) may be do v less do o.
        """
        runs = self._runs
        if t.dtype != torch.float64 or not t.ndim or not t.numel():
            return t
        if self._last is not None:
            return self._last.operand(t, taken=self._place() < 0.5)
        if runs == 1 or runs % 2 or t.shape[0] % runs:
            return t
        taken = _taken(runs, int(self._place() * 2**runs), t.device, self._apart)
        if t.shape[0] == runs:
            other = t.index_select(0, taken)
        else:
            other = t.unflatten(0, (runs, -1)).index_select(0, taken).view_as(t)
        return other if near(other, t) else t

    def _of_other_runs(self, args: Any, in_place: bool) -> list[Any]:
        own, rest = args[:in_place], args[in_place:]  # what is changed in place
        return [*own, *(self._of_another_run(a) if isinstance(a, torch.Tensor) else a for a in rest)]

    @resolved
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._dispatch(func, args, kwargs or {})
        if self._sums:
            contractions.note(func, args, out)
        return out

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = (operator := about(func)).name
        if operator.view and not (kwargs or self._every or self.record):
            return self._view(operator, args)
        if kwargs:
            name = "floor_divide" if name == "div" and kwargs.get("rounding_mode") else name
            if kwargs.get("dtype") in _LIFTED:
                kwargs, self.changes = kwargs | {"dtype": _LIFTED[kwargs["dtype"]]}, True
        if not (self._inside or operator.view) and _may_decide(name, args, kwargs):
            self.switches.add(name)
        if name in PRODUCTS:
            self.matrices = True
        if operator.decomposition is not None:
            return self._take_apart(operator.decomposition, args, kwargs)
        if operator.zeros:
            # Zeros without memory, which the operators below a mode would read all the same.
            func, self.changes = _ATEN.zeros.default, True
        multiplies = name in self._multiplying or (self._sums and contractions.contracts(name, args, kwargs))
        if self.products and not (operator.exact or operator.returns_alias):
            args = self._of_other_runs(args, operator.in_place)
        out, *lifted = _made_lifted(func, name, args, kwargs)
        self.changes = self.changes or lifted[0] is not args or lifted[1] is not kwargs
        args, kwargs = lifted
        self.elements += out.numel() if not self.unit and isinstance(out, torch.Tensor) else 0
        if self.track and not self.unit and (self._every or name in ADDING):
            self._note_peak(func, name, args, kwargs, out)
        if self.record:
            self._note_decision(name, args, out)
        if not self.unit:
            return out
        adds_up = name in ("index_put", "index_put_") and len(args) > 3 and args[3]
        exact = (operator.exact or name == "floor_divide") and not adds_up
        if exact or _chooses(name, args) or operator.returns_alias:
            return out if not operator.in_place or exact else self._in_place(out)
        if stays_whole(name, out, args, self.unit):
            return out
        if isinstance(out, torch.Tensor):
            counted = out.is_floating_point() or out.is_complex()
            extra = reduction_error(name, out, args, kwargs) if counted and out.numel() else None
            if self.products and counted and out.numel() and multiplies:
                out, extra = self._cut_factors(name, out, args, kwargs, extra)
            return self._perturb(out, extra)
        if name in EXACT_RESULTS:
            return tuple(t if i in EXACT_RESULTS[name] else self._perturb(t, None) for i, t in enumerate(out))
        return tree_map_only(torch.Tensor, lambda t: self._perturb(t, None), out)

    def _view(self, operator: OperatorTraits, args: Any) -> Any:
        """Most operators of a recurrence are views, above all of several runs at once: nothing is to be rounded."""
        out = _viewed(operator.overload, args)
        self.elements += out.numel() if not self.unit and isinstance(out, torch.Tensor) else 0
        return out

    def _take_apart(self, decomposition: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self._inside += 1
        self.changes = True
        try:
            with self:
                return decomposition(*args, **kwargs)
        finally:
            self._inside -= 1

    def _cut_factors(
        self, name: str, out: torch.Tensor, args: Any, kwargs: dict[str, Any], extra: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A product whose factors have fewer bits, and what then adds to its spread."""
        if name == "mul" and not isinstance(args[1], torch.Tensor):
            return out, extra
        coarse = self.products / self.accumulate * product_error(name, out, args, kwargs)
        # Both factors may be cut towards zero, and then all of a product is too small by up to so much.
        out = out * self._factor_of_runs(out, 2.0 * self.products)
        return out, coarse if extra is None else (square(extra) + square(coarse)).sqrt()

    def _note_peak(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        # What is not added up overflows in the op's own precision as well, or is not chosen.
        adds = name in ADDING
        if adds:
            out = func(*[_size(a) for a in args], **{k: _size(v) for k, v in kwargs.items()})
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and t.dtype == torch.float64 and t.numel() and t.device.type != "meta":
                most = float(torch.linalg.vector_norm(t.detach(), math.inf))
                if not math.isfinite(most):
                    most = float(t.detach().abs().nan_to_num(0.0, 0.0, 0.0).max())
                self.peak = max(self.peak, most) if adds else self.peak
                self.widest = max(self.widest, most)

    def _note_decision(self, name: str, args: Any, out: Any) -> None:
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if name not in SMOOTH | OF_NAN and any(isinstance(a, torch.Tensor) and bool(a.isnan().any()) for a in args):
            self.by_nan.add(name)
        if first is None or not first.is_floating_point():
            return
        if name in DECIDING:
            self.decisions.append((name, out.detach()))
        elif name in AGAINST_ZERO:
            self.decisions.append((name, first.detach() > 0))
        elif name in KEEPING and isinstance(out, torch.Tensor):
            self.decisions.append((name, out.detach() == first.detach()))
        elif name != "_to_copy":  # places: of a sort, a maximum, the k largest; not what was decided before
            results = out if isinstance(out, (tuple, list)) else (out,)
            places = [(name, t) for t in results if isinstance(t, torch.Tensor) and t.dtype == torch.int64]
            self.decisions += places
            if (places or (name in EXTREMA and not self._inside)) and _unplaced(first, results):
                self.unplaced.add(name)

    def _in_place(self, out: Any) -> Any:
        if isinstance(out, torch.Tensor) and out.dtype in (torch.float64, torch.complex128):
            out.mul_(1 + self.unit * self.noise(out))
        return out

    def _perturb(self, t: torch.Tensor, extra: torch.Tensor | None) -> torch.Tensor:
        wide = t.dtype in (torch.float64, torch.complex128)
        if not wide or t.device.type == "meta" or t.layout != torch.strided:
            return t
        # Few passes, as this runs for every operator of every noise run: t (1 + unit noise) + accumulate extra noise.
        if t.is_complex():
            out = t * (1.0 + self.unit * self.noise(t))
        elif t.numel() > _PIECE and t.is_contiguous():
            out, factors = torch.empty_like(t), _factors(t.device, self.unit)
            for part, rounded in zip(t.view(-1).split(_PIECE), out.view(-1).split(_PIECE), strict=True):
                torch.mul(part, self._cut(factors, tuple(part.shape)), out=rounded)
        else:
            out = t * self._cut_like(_factors(t.device, self.unit), t)
        if extra is not None and extra.shape == t.shape:
            out.addcmul_(self.noise(t), extra, value=self.accumulate)
        return out
