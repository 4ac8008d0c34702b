"""Guard bands: tensors in the middle of larger allocations, whose other elements nobody may read or write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from retrograd.compat import torch_tensors
from retrograd.compat.torch_dispatch import EagerMode, HigherOrderOperator, resolved, schema

SIDES = ("before its start", "after its end", "between its rows")
NAN, HUGE, PLAIN = "NaN", "huge values", "ones"

BAND = 16 * 1024  # bytes on either side, or as many as the tensor has where that is more, up to _MOST
_MOST = 1 << 20
_ALIGNED = 512  # what PyTorch's allocators give on a GPU (64 on a CPU): an op must not notice where it is
_GUARDS = 256  # results of operators that get bands in one run: an op that loops in Python has no end of them


def guardable(t: Any) -> bool:
    """Whether `t` is a plain tensor with memory of its own, of a dtype that can be filled."""
    if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.layout != torch.strided:
        return False
    if t.device.type not in ("cpu", "cuda") or not t.numel() or t.is_quantized:
        return False
    if t.is_conj() or t.is_neg() or torch_tensors.has_no_memory(t):
        return False
    return not t.is_floating_point() or t.dtype.itemsize > 1


@dataclass
class Guard:
    """A tensor and what surrounds it.

    Attributes:
        owner: "x" for an input, "grad_out", "" for what the op made.
        name: what it is, for a sentence.
        tensor: what the op gets.
        flat: the allocation, in elements of the tensor's dtype.
        first, extent: where in it the tensor's first element lies, and how many elements on its last one does.
        covered: which of `flat` are the tensor's; None if all of the extent are.
        kept: the bytes of the others as they were filled.
    """

    owner: str
    name: str
    tensor: torch.Tensor
    flat: torch.Tensor
    first: int
    extent: int
    covered: torch.Tensor | None
    kept: torch.Tensor

    def overwritten(self) -> list[int]:
        """Places outside the tensor that no longer hold what they were filled with, counted from its first element."""
        off = _bytes(self.flat, self) != self.kept
        if not bool(off.any()):
            return []
        changed = off.view(-1, self.flat.dtype.itemsize).any(1)
        places = torch.arange(len(self.flat), device=self.flat.device)
        return (_outside(places, self)[changed] - self.first).tolist()

    def side(self, place: int) -> str:
        """Which of SIDES a place outside is."""
        return SIDES[0] if place < 0 else SIDES[1] if place >= self.extent else SIDES[2]

    def spans(self) -> list[tuple[int, int]]:
        """First byte and end of every run of the tensor's own elements, counted from the start of the allocation."""
        size = self.flat.dtype.itemsize
        if self.covered is None:
            return [(self.first * size, (self.first + self.extent) * size)]
        # An edge is where an element's neighbour is of the other kind; bands make both ends of `flat` uncovered.
        edges = (self.covered[1:] != self.covered[:-1]).nonzero().flatten() + 1
        return [(int(a) * size, int(b) * size) for a, b in edges.view(-1, 2).tolist()]


def _outside(flat: torch.Tensor, guard: Guard) -> torch.Tensor:
    """The elements of `flat` that are not the tensor's."""
    if guard.covered is None:
        return torch.cat([flat[: guard.first], flat[guard.first + guard.extent :]])
    return flat[~guard.covered]


def _bytes(flat: torch.Tensor, guard: Guard) -> torch.Tensor:
    return _outside(flat, guard).view(torch.uint8)


def _filling(t: torch.Tensor, fill: str, ends: tuple[int, int]) -> float | int:
    """The number that stands for NAN, HUGE or PLAIN in a tensor's dtype; `ends` for the first two in whole numbers."""
    if t.is_floating_point() or t.is_complex():
        return {NAN: float("nan"), HUGE: torch.finfo(t.dtype).max / 8, PLAIN: 1.0}[fill]
    return ends[1] if fill == HUGE else ends[0]


def _ends(t: torch.Tensor, known: bool) -> tuple[int, int]:
    """Two whole numbers to fill with: the least and greatest of the tensor, so that an index that is read stays one."""
    if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool or not known:
        return 0, 1
    low, high = int(t.min()), int(t.max())
    return (low, high) if low != high else (0, high or 1)


class Bands(EagerMode):
    """Places tensors inside guard bands; as a mode, also what operators of PyTorch return while it is active.

    Args:
        fill: what the bands hold: NAN, HUGE or PLAIN.
        only: owner and sides that hold it, PLAIN being elsewhere; None for all.
        whole: whether the bands are part of each tensor's storage. Without them it begins at its first element, as an
            op finds it elsewhere: gradients of views (CopySlices, as_strided) compute with offsets into the storage.
    """

    supports_higher_order_operators = True

    def __init__(self, fill: str, only: tuple[str, Sequence[str]] | None = None, *, whole: bool = False) -> None:
        super().__init__()
        self.fill, self.only, self.whole = fill, only, whole
        self.guards: list[Guard] = []
        self.broken: Exception | None = None  # a fault of ours, which must not be taken for one of the op

    def place(self, t: Any, owner: str, name: str) -> Any:
        """A tensor with the values and strides of `t` inside bands of its own; `t` itself if it cannot have any."""
        if not guardable(t):
            return t
        with torch.no_grad():
            guard = self._guard(t.detach(), owner, name)
        self.guards.append(guard)
        return guard.tensor

    def _guard(self, t: torch.Tensor, owner: str, name: str) -> Guard:
        extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        size = t.dtype.itemsize
        band = min(max(extent * size, BAND), _MOST)
        first = -(-band // _ALIGNED) * _ALIGNED // size
        flat = torch.empty(extent + 2 * first, dtype=t.dtype, device=t.device)
        ends = _ends(t, known=bool(owner))
        filled = SIDES if self.only is None else self.only[1] if self.only[0] == owner else ()
        fills = [_filling(t, self.fill if side in filled else PLAIN, ends) for side in SIDES]
        flat[:first].fill_(fills[0])
        flat[first + extent :].fill_(fills[1])
        covered = None
        if extent != t.numel():
            flat[first : first + extent].fill_(fills[2])
            covered = torch.zeros(len(flat), dtype=torch.bool, device=t.device)
            covered.as_strided(t.shape, t.stride(), first).fill_(True)
        # Not a view: autograd must not know that there is a larger tensor.
        if self.whole:
            tensor = torch.empty(0, dtype=t.dtype, device=t.device)
            tensor.set_(flat.untyped_storage(), first, t.shape, t.stride())
        else:
            tensor = torch.from_dlpack(flat.as_strided(t.shape, t.stride(), first))
        source, target = t, tensor
        for dim, stride in enumerate(t.stride()):
            if stride == 0:  # expanded: written once
                source, target = source.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
        target.copy_(source)
        guard = Guard(owner, name, tensor, flat, first, extent, covered, torch.empty(0))
        guard.kept = _bytes(flat, guard).clone()
        return guard

    @resolved
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(func, HigherOrderOperator) or not _fresh(func) or len(self.guards) >= _GUARDS:
            return out
        try:
            if type(out) in (tuple, list):
                return type(out)(self._house(t, func, args) for t in out)
            return self._house(out, func, args)
        except Exception as error:
            self.broken = error
            raise

    def _house(self, t: Any, func: Any, args: Sequence[Any]) -> Any:
        if not guardable(t) or not torch.ops.aten.is_non_overlapping_and_dense.default(t):
            return t
        memory = t.untyped_storage().data_ptr()
        if any(type(a) is torch.Tensor and a.untyped_storage().data_ptr() == memory for a in args if guardable(a)):
            return t  # a view in spite of its schema
        dtype = str(t.dtype).removeprefix("torch.")
        operator = schema(func).name.removeprefix("aten::")
        if "empty" in operator:
            t = t.zero_()  # what nobody wrote differs from run to run, which is another stage's business
        return self.place(t, "", f"a {dtype} tensor of shape {tuple(t.shape)} that the op made with {operator}")


@cache
def _fresh(func: Any) -> bool:
    """Whether an operator is PyTorch's own and returns new memory."""
    returns = schema(func).returns
    return func.namespace == "aten" and bool(returns) and all(r.alias_info is None for r in returns)
