"""Values whose infinities or NaN the program wrote as such: masks, branches of `where`, buffers before they are filled.

They do no harm as long as no loss and no gradient has them. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from retrograd.trace import nan_reasons
from retrograd.trace.diffing.identity import base_name, names
from retrograd.trace.schema import BACKWARD, OPTIMIZER, Op, Stats

VIEWS = names(
    "view reshape _unsafe_view as_strided alias detach t transpose permute unsqueeze squeeze expand slice narrow split "
    "select split_with_sizes chunk unbind"
)
_FILLS = names("scalar_tensor full full_like new_full fill masked_fill constant_pad_nd")


class DeliberateValues:
    """Numbers of values: `infinite` have infinities and no NaN, `nan` have NaN.

    Args:
        producers: the operators that made values so far; whoever adds operators fills it.
        writers: those that wrote to memory so far, likewise.
        trains: whether there is a backward: without one it is not known what does harm.
    """

    def __init__(self, producers: Mapping[int, Op], writers: Mapping[int, Sequence[Op]], *, trains: bool) -> None:
        self.infinite: set[int] = set()
        self.nan: set[int] = set()
        self._producers, self._writers, self._trains = producers, writers, trains
        # Of memory, whether the infinities, and the NaN, that were written last are deliberate.
        self._infinite_in: dict[int, bool] = {}
        self._nan_in: dict[int, bool] = {}

    def add(self, op: Op) -> None:
        """The next operator, whose results are not among the values that were made."""
        self._read(op)
        self._write(op)

    def is_mask(self, stats: Stats) -> bool:
        """Deliberate infinities: written as such, or between zeros, as an additive mask that came in."""
        if not stats.inf or stats.nan:
            return False
        foreign = stats.tensor not in self._producers and stats.storage not in self._writers
        return stats.tensor in self.infinite or (foreign and stats.low == stats.high == 0)

    def _read(self, op: Op) -> None:
        """What is read of x after x[0] = -inf, which writes to a view, is a value that nobody has seen being made."""
        for stats in op.inputs:
            if stats.tensor not in self._producers and stats.storage >= 0:
                if stats.nan and self._nan_in.get(stats.storage):
                    self.nan.add(stats.tensor)
                elif stats.inf and self._infinite_in.get(stats.storage):
                    self.infinite.add(stats.tensor)

    def _write(self, op: Op) -> None:
        # A number of the program, as in x[0] = inf, comes as a tensor of its own.
        number = base_name(op.name) == "lift_fresh" and all(s.shape == () for s in op.outputs)
        infinite = number or nan_reasons.writes_infinity(op) or any(map(self.is_mask, op.inputs))
        nan = number or self._writes_nan(op)
        view = base_name(op.name) in VIEWS
        for stats in op.outputs:
            if stats.nan:
                known = nan or (view and self._nan_in.get(stats.storage, False))
                self._nan_in[stats.storage], self._infinite_in[stats.storage] = known, False
                self.nan |= {stats.tensor} if known else set()
            elif stats.inf or (number and stats.nan is None):
                known = infinite or (view and self._infinite_in.get(stats.storage, False))
                self._infinite_in[stats.storage] = known
                self.infinite |= {stats.tensor} if known else set()

    def _writes_nan(self, op: Op) -> bool:
        if base_name(op.name) in _FILLS and nan_reasons.writes_nan(op):
            return True
        if not self._trains or op.phase == BACKWARD or op.owner == OPTIMIZER:
            return False
        bad = [stats for stats in op.inputs if stats.nan]
        return bool(bad) and all(stats.tensor in self.nan for stats in bad)
