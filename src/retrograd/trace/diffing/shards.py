"""Shards of a run over several ranks, put together as one trace that is compared with a run on a single device.

Ranks keep statistics, no elements, so shards are put together as statistics: the least of the least, the root of the
mean square. What is not known from these (partial sums) is not compared; the operators after it are. No torch.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from retrograd.core.wording import count, some
from retrograd.errors import UndecidedError, UsageError
from retrograd.trace.diffing.counterparts import (
    by_tensor,
    computes,
    counterparts,
    fits,
    is_move,
    is_shard,
    lengths_of_lists,
    parameters_of,
)
from retrograd.trace.diffing.error_bounds import UNIT
from retrograd.trace.diffing.identity import base_name, names, unwrapped_module
from retrograd.trace.diffing.schema import UNKNOWN, DivergenceCause
from retrograd.trace.schema import BACKWARD, OPTIMIZER, OTHER, Op, Stats, Trace
from retrograd.trace.trial_runs import trial_runs

Part = tuple[int, int]  # a rank and one of the microbatches that it takes a step
# Of parts of a sum they give parts of the sum that they give of the whole.
_LINEAR = names(
    "add sub rsub neg mul div mm bmm addmm matmul linear view _unsafe_view reshape t transpose permute expand slice "
    "select split chunk squeeze unsqueeze detach clone copy alias _to_copy cat stack sum mean index_select as_strided "
    "_foreach_add _foreach_mul _foreach_div"
)
GRADIENT = "gradient read by the optimizer"
# How near to a whole number the ratio of gradients must be to be the number of ranks that their mean is over. Rounding
# in bfloat16 moves it by 2^-8 at most.
_NEAR = 2.0**-6


@dataclass
class Assembled:
    """Several ranks as one trace, and what that leaves out.

    Attributes:
        reference: the reference, with an operator more where ranks reduce a gradient before an optimizer reads it.
        trace: the operators of `reference`, each with the numbers of the ranks.
        paired: how many of them compute something, and have a counterpart on a rank.
        unknown: of these, how many are not compared: only parts of a sum are known of what they give.
        lacking: operators that compute something and have none, by name.
        own: what the ranks run beside them, collectives for instance, by name.
        ranks: by index and name of an operator, the ranks and the rms of what each gave first.
        scales: of gradients by step: ranks take the mean over them only when they reduce.
    """

    reference: Trace
    trace: Trace
    paired: int = 0
    unknown: int = 0
    lacking: Counter[str] = field(default_factory=Counter[str])
    own: Counter[str] = field(default_factory=Counter[str])
    ranks: dict[tuple[int, str], str] = field(default_factory=dict[tuple[int, str], str])
    scales: dict[int, int] = field(default_factory=dict[int, int])

    def notes(self) -> Iterable[str]:
        """What a reader of the comparison should know."""
        partly = f", of {self.unknown} only parts of a sum are known, which were not compared" * bool(self.unknown)
        yield f"{count(self.paired, 'operator')} of the reference have a counterpart on the ranks{partly}"
        if self.lacking:
            yield f"{count(self.lacking.total(), 'operator')} of the reference ran on no rank: {_counted(self.lacking)}"
        if self.own:
            more = f"{count(self.own.total(), 'operator')} more: {_counted(self.own)}"
            yield f"rank {self.trace.rank} ran {more}"
        for scale in sorted(set(self.scales.values()) - {1}):
            taking = "ranks, or microbatches, take a mean of their own"
            yield f"gradients before their reduction are {scale} times the reference's: {taking}"

    def told(self, cause: DivergenceCause) -> DivergenceCause:
        """A cause with what each rank gave; one about a gradient in words of its own."""
        if cause.a is None:
            return cause
        by_rank = self.ranks.get((cause.a.index, cause.a.name), "")
        why = "; ".join(filter(None, (cause.why, by_rank)))
        if cause.a.name != GRADIENT:
            return replace(cause, why=why)
        return replace(
            cause, what="the optimizer reads another gradient than that of the reference", why=why,
            advice="look at what reduces, scales, clips or accumulates gradients after the backward of the ranks",
        )  # fmt: skip


def assemble(reference: Trace, ranks: Sequence[Trace]) -> Assembled:
    """The traces of ranks as one that has the operators, sizes and value numbers of the reference.

    Args:
        reference: a run of the same program on one device, or in another layout on one rank.
        ranks: under tensor, sequence, context or data parallelism, sharded or not; stages of a pipeline;
            each may take the batch in several microbatches, or accumulate gradients.

    Raises:
        UsageError: two traces are of one rank, or no operator of the reference has a counterpart.
    """
    numbers = [trace.rank for trace in ranks]
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"`b` has traces of ranks {numbers}; expected one of each")
    if len({lengths_of_lists(trace.ops) for trace in (reference, *ranks)}) > 1:
        reference, *ranks = (replace(trace, ops=by_tensor(trace.ops)) for trace in (reference, *ranks))
    rows: dict[int, dict[Part, Op]] = defaultdict(dict)  # index of the reference's operator -> by rank and microbatch
    own: Counter[str] = Counter()
    for trace in ranks:
        trials = trial_runs(trace.ops)
        meant = [op for op in trace.ops if op.index not in trials]
        paired = counterparts(reference.ops, meant, len(ranks))
        for index, by_number in paired.items():
            rows[index] |= {(trace.rank, number): op for number, op in by_number.items()}
        if trace is ranks[0]:
            partners = {op.index for by_number in paired.values() for op in by_number.values()}
            own.update(op.name for op in meant if computes(op) and op.index not in partners)
    if not rows:
        raise UsageError("no operator of `a` has a counterpart in `b`: are they traces of one program?")
    sides = [replace(trace, ops=[]) for trace in (reference, ranks[0])]
    result = Assembled(*sides, paired=len(rows), own=own)
    assembler = _Assembler(result, reference, ranks, max(len(parts) for parts in rows.values()))
    for op in reference.ops:
        assembler.add(op, rows.get(op.index, {}))
    if result.paired - result.unknown < result.unknown + result.lacking.total():
        raise UndecidedError(f"too little corresponds to be compared: {'; '.join(result.notes())}")
    return result


def _parameters(trace: Trace) -> dict[tuple[int, str], list[Stats]]:
    """What was measured of parameters and buffers, by step and name, before an optimizer changes them."""
    named: dict[tuple[int, str], list[Stats]] = defaultdict(list)
    for op in (op for op in trace.ops if op.phase != OTHER):
        for t in op.inputs:
            if t.name and t.rms is not None:
                named[op.step, unwrapped_module(t.name)].append(t)
    return named


class _Assembler:
    """Puts operators together, in their order: what is known of a value is what its operator gave."""

    def __init__(self, result: Assembled, reference: Trace, ranks: Sequence[Trace], most: int) -> None:
        self._result, self._most, self._numbers = result, most, -1
        self._named = {trace.rank: _parameters(trace) for trace in ranks}
        # By number of a value in the reference: what the ranks have together, and whether theirs is a larger gradient.
        self._known: dict[int, Stats] = {}
        self._scaled: set[int] = set()
        self._partial: set[int] = set()  # values of which each rank has a part of the sum, until they are reduced
        self._gradients: set[int] = set()
        self._read: dict[int, Stats] = {}  # by number of a gradient, what an optimizer reads of it
        self._parameters = parameters_of(reference.ops)

    def add(self, op: Op, by_rank: dict[Part, Op]) -> None:
        """Add an operator of the reference, and what the ranks have of it together."""
        # Of products without the term that the reference adds, the factors are the last.
        by_rank = {rank: _with_inputs(partner, len(op.inputs)) for rank, partner in by_rank.items()}
        if op.phase == OTHER and by_rank:
            op = self._with_reductions(op, by_rank)
        inputs = tuple(
            self._input(t, [partner.inputs[k : k + 1] for partner in by_rank.values()], op)
            for k, t in enumerate(op.inputs)
        )
        if by_rank:
            self._result.ranks[op.index, op.name] = _by_rank(
                {rank: partner.outputs for rank, partner in by_rank.items()}
            )
            outputs = self._outputs(op, by_rank)
            self._result.unknown += all(t.digest == UNKNOWN for t in outputs)
        else:
            self._result.lacking.update([op.name] * computes(op))
            # A view has the numbers of what it views, under each layout.
            outputs = tuple(_viewed(inputs[0], t) if is_move(op) else _unknown(t) for t in op.outputs)
            for values in (self._scaled, self._partial) if is_move(op) else ():
                if op.inputs[0].tensor in values:
                    values.update(t.tensor for t in op.outputs)
            if op.phase == BACKWARD and any(t.tensor in self._scaled for t in op.inputs):
                self._scaled.update(t.tensor for t in op.outputs)
        self._put(op, replace(op, inputs=inputs, outputs=outputs))

    def _put(self, op: Op, together: Op) -> None:
        self._known |= {t.tensor: t for t in together.outputs}
        changed = {
            t.shape for t in op.inputs if t.tensor in self._gradients and op.owner != OPTIMIZER
        }  # as clipping does
        self._gradients.update(t.tensor for t in op.outputs if op.phase == BACKWARD or t.shape in changed)
        self._result.reference.ops.append(op)
        self._result.trace.ops.append(together)

    def _with_reductions(self, op: Op, by_rank: dict[Part, Op]) -> Op:
        """The operator of an optimizer, and before it one more for each gradient that ranks changed after the backward.

        What reduced or scaled it stands nowhere in the reference.
        """
        inputs = list(op.inputs)
        for k, t in enumerate(op.inputs):
            if t.tensor not in self._gradients or t.name:
                continue
            if t.tensor in self._read:
                inputs[k] = self._read[t.tensor]
                continue
            parts = {rank: partner.inputs[k : k + 1] for rank, partner in by_rank.items()}
            whole = _together(t, list(parts.values()), replicas=True)
            if UNKNOWN != whole.digest != self._known[t.tensor].digest:
                self._numbers -= 1  # below all that recorders give
                module = self._parameters.get(op.index, "").rpartition(".")[0]
                reduced = inputs[k] = self._read[t.tensor] = replace(t, tensor=self._numbers)
                read = replace(
                    op, name=GRADIENT, module=module, phase=BACKWARD, arguments="", inputs=(t,), outputs=(reduced,)
                )
                self._result.ranks[op.index, GRADIENT] = _by_rank(parts)
                there = (self._known[t.tensor],), (replace(whole, tensor=self._numbers),)
                self._put(read, replace(read, inputs=there[0], outputs=there[1]))
        return replace(op, inputs=tuple(inputs))

    def _input(self, t: Stats, shards: Sequence[tuple[Stats, ...]], op: Op) -> Stats:
        if t.tensor in self._known:
            return replace(self._known[t.tensor], shape=t.shape)
        if not shards and t.name:  # of an operator that is not paired, as a transposition
            place = op.step, unwrapped_module(t.name)
            fitting = {
                (rank, 0): [s for s in named[place] if fits([s], [t], self._most)]
                for rank, named in self._named.items()
            }
            by_rank = {rank: tuple(tensors[:1]) for rank, tensors in fitting.items()}
            self._result.ranks[op.index, op.name] = _by_rank(by_rank)
            shards = list(by_rank.values())
        # Parameters and data. Where only one side has the name, a rank has computed something of it first.
        same = all(part and unwrapped_module(part[0].name) == unwrapped_module(t.name) for part in shards)
        return _together(t, shards, replicas=bool(t.name)) if shards and same else _unknown(t)

    def _outputs(self, op: Op, by_part: dict[Part, Op]) -> tuple[Stats, ...]:
        shards, several = list(by_part.values()), 1 + max(number for _, number in by_part)
        pairs = [pair for partner in shards for pair in zip(partner.inputs, op.inputs, strict=False)]
        values = {t.tensor for t in op.inputs}
        linear = bool(values & self._partial and base_name(op.name) in _LINEAR)
        # Until a loss meets its batch, each microbatch has a share of its gradient, or one of a mean of its own.
        share = op.phase == BACKWARD and several > 1 and op.step not in self._result.scales
        outputs: list[Stats] = []
        for k, t in enumerate(op.outputs):
            parts = [partner.outputs[k : k + 1] for partner in shards]
            full = all(part and part[0].shape == t.shape for part in parts)
            all_of_batch = all(part and _fills(part[0], t, several) for part in parts)
            # Who adds over a dimension of which each rank or microbatch has a part, gives a part of the sum, be it
            # equal by chance. Of its microbatch a rank has less than all only where ranks share it.
            adds = any(is_shard(part.shape, s.shape) and (full or not _fills(part, s, several)) for part, s in pairs)
            # Of anything else ranks that give different whole tensors have parted, unless what went in is not known.
            replicas = not (adds or linear) and all(t in self._partial or self._is_known(t) for t in values)
            whole = _together(t, parts, replicas=replicas)
            if all_of_batch and not full and linear and _parted(by_part, k):
                whole = _unknown(t)
            if all_of_batch and (adds or share or (linear and whole.digest == UNKNOWN)):
                self._partial.add(t.tensor)
            other = any(base_name(partner.name) != base_name(op.name) for partner in shards)
            outputs.append(_unknown(t) if other or (all_of_batch and (adds or (share and full))) else whole)
        if op.phase != BACKWARD:
            return tuple(outputs)
        begins = op.step not in self._result.scales and self._begins(op, outputs)
        if begins or any(t.tensor in self._scaled for t in op.inputs):
            self._scaled.update(t.tensor for t in op.outputs)
            outputs = [_scaled(t, self._result.scales[op.step]) for t in outputs]
        return tuple(outputs)

    def _is_known(self, number: int) -> bool:
        return number not in self._known or self._known[number].digest != UNKNOWN

    def _begins(self, op: Op, outputs: Sequence[Stats]) -> bool:
        """Whether this is a step's first gradient in shards, and larger: each rank's loss is a mean of its own."""
        for t, whole in zip(op.outputs, outputs, strict=True):
            if t.rms and whole.rms and whole.digest is None:
                ratio = whole.rms / t.rms
                near = max(1, round(ratio))
                fits = near <= self._most and abs(ratio - near) <= _NEAR * near
                self._result.scales[op.step] = near if fits else 1
                return fits and near > 1
        return False


def _fills(part: Stats, t: Stats, several: int) -> bool:
    """Whether a tensor is all that so many microbatches leave of another."""
    return part.shape == t.shape or math.prod(part.shape) * several >= math.prod(t.shape)


def _parted(by_part: dict[Part, Op], k: int) -> bool:
    """Whether ranks gave different tensors for one microbatch."""
    tensors: dict[int, set[Any]] = defaultdict(set)
    for (_, number), op in by_part.items():
        tensors[number].update((t.digest, t.rms) for t in op.outputs[k : k + 1])
    return any(len(several) > 1 for several in tensors.values())


def _with_inputs(op: Op, count: int) -> Op:
    """The operator with so many inputs, the last ones; what there is not is unknown."""
    nothing = Stats(-1, (), "", "")
    return replace(op, inputs=((nothing,) * (count - len(op.inputs)) + op.inputs)[-count:] if count else ())


def _viewed(source: Stats, t: Stats) -> Stats:
    numbers = {name: getattr(source, name) for name in ("low", "high", "rms", "nan", "inf")}
    return replace(t, digest=UNKNOWN if source.digest == UNKNOWN else None, **numbers)


def _unknown(t: Stats) -> Stats:
    if t.dtype not in UNIT:
        return t
    return replace(t, low=None, high=None, rms=None, nan=None, inf=None, zero=None, digest=UNKNOWN, exponents=None)


def _together(t: Stats, shards: Sequence[tuple[Stats, ...]], replicas: bool = False) -> Stats:
    """What a tensor of the reference is on all ranks together; unknown where it cannot be told.

    Args:
        t: the tensor of the reference.
        shards: that of each rank, () where it has none.
        replicas: Whole tensors must be the same on all ranks, as parameters and reduced gradients: of different ones
            the farthest from the reference stands for all. Without it they are taken for parts of a sum.
    """
    parts = [part for (part,) in shards] if all(shards) else []
    if not parts or any(part.dtype != t.dtype or part.rms is None for part in parts):
        return _unknown(t)
    if all(part.shape == t.shape for part in parts):
        digests = {part.digest if part.digest is not None else (part.low, part.high, part.rms) for part in parts}
        if len(digests) > 1 and not replicas:
            return _unknown(t)  # each has a part of a sum, or of a batch of one
        farthest = max(parts, key=lambda part: _distance(t, part))
        return replace(farthest, tensor=t.tensor, storage=t.storage, name=t.name, device=t.device)
    if any(not is_shard(part.shape, t.shape) for part in parts):
        return _unknown(t)
    numel = [math.prod(part.shape) for part in parts]
    if sum(numel) < math.prod(t.shape):
        return _unknown(t)
    rms = math.sqrt(sum(n * (part.rms or 0.0) ** 2 for n, part in zip(numel, parts, strict=True)) / max(sum(numel), 1))
    low, high = ([getattr(p, name) for p in parts if getattr(p, name) is not None] for name in ("low", "high"))
    # Each shard may lie on several ranks, in a mesh of two dimensions: as often as all together have too many elements.
    copies = max(1, round(sum(numel) / max(math.prod(t.shape), 1)))
    # Rounded up: what one copy alone has is not nothing.
    nan, inf = (-(-sum(getattr(p, name) or 0 for p in parts) // copies) for name in ("nan", "inf"))
    whole = replace(
        t, low=min(low, default=None), high=max(high, default=None), rms=rms, nan=None if t.nan is None else nan,
        inf=None if t.inf is None else inf, subnormal=None, zero=None, digest=None, exponents=None,
    )  # fmt: skip
    exact = (whole.low, whole.high) == (t.low, t.high) and math.isclose(rms, t.rms or 0.0, rel_tol=1e-9)
    if t.dtype not in UNIT and exact:
        return t
    return whole


def _scaled(t: Stats, scale: float) -> Stats:
    if t.dtype not in UNIT or t.digest == UNKNOWN:
        return t
    numbers = {name: None if (x := getattr(t, name)) is None else x / scale for name in ("low", "high", "rms")}
    return replace(t, digest=None, **numbers)


def _counted(names: Counter[str]) -> str:
    """ "12 aten.mm.default, 6 aten.sum.dim_IntList and 3 more"."""
    return some([f"{n} {name}" for name, n in names.most_common()], 6)


def _distance(s: Stats, t: Stats) -> float:
    if s.bad != t.bad:
        return math.inf  # least, greatest and rms are of finite elements alone
    pairs = ((s.low, t.low), (s.high, t.high), (s.rms, t.rms))
    return max((abs(x - y) for x, y in pairs if x is not None and y is not None), default=math.inf)


def _by_rank(tensors: dict[Part, tuple[Stats, ...]]) -> str:
    """What each rank gave first, for the reader of a cause."""
    firsts = [(part, row[0]) for part, row in sorted(tensors.items()) if row and row[0].rms is not None]
    parts = {rank: sum(other == rank for (other, _), _ in firsts) for (rank, _), _ in firsts}
    return "; ".join(
        f"rank {rank}{f', microbatch {number}' * (parts[rank] > 1)}: {list(t.shape)}, rms {t.rms:.7g}"
        for (rank, number), t in firsts[:8]
    )
