"""Collects statistics of many tensors: CPU tensors at once, those of a GPU in buffers that are read once a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from retrograd.trace.statistics import host, plain
from retrograd.trace.statistics.digest import finish, keys
from retrograd.trace.statistics.exponents import BUCKETS, exponents
from retrograd.trace.statistics.host import NOTHING, Row, as_real, size

_ROWS = 512  # tensors a buffer: 8 MiB

Take = Callable[[Row], None]


class Gather:
    """Statistics of the tensors of one step.

    Args:
        at_once: Read each result when it is asked for, which waits for the device; for who stops at a bad value.
        histogram: Count exponents too.
    """

    def __init__(self, at_once: bool = False, histogram: bool = False) -> None:
        self.at_once, self.histogram = at_once, histogram
        self.notes: set[str] = set()
        self._devices: dict[torch.device, _Buffers] = {}

    def request(self, tensor: torch.Tensor, take: Take) -> None:
        """Have `take` called with the statistics of a tensor, now or in `collect`; the tensor may change afterwards."""
        kind = tensor.device.type
        if kind == "cpu":
            take(host.measure(tensor, self.histogram))
        elif kind == "cuda":
            self._request_cuda(tensor, take)
        elif kind == "meta":
            take(NOTHING)
        else:
            take(plain.measure(tensor, self.histogram))

    def request_all(self, tensors: list[tuple[torch.Tensor, Take]]) -> None:
        """`request` for tensors of one stream that nobody writes to before it returns; with few launches."""
        many: list[tuple[torch.Tensor, Take]] = []
        kernel = None
        for tensor, take in tensors:
            if tensor.device.type == "cuda" and not self.at_once:
                kernel = kernel or _kernel()
                x = as_real(tensor) if tensor.is_complex() or tensor.is_neg() else tensor
                if kernel is not None and kernel.takes(x.dtype) and x.numel():
                    many.append((x, take))
                    continue
            self.request(tensor, take)
        if many and torch.cuda.is_current_stream_capturing():
            for _, take in many:
                self._captured(take)
        elif many:
            self._buffers(many[0][0].device, kernel).request_all(many)

    def fold(self) -> None:
        """Join the partial results of a step; waits for no device."""
        for buffers in self._devices.values():
            buffers.fold()

    def _captured(self, take: Take) -> None:
        # In a captured graph our kernel would be part of it.
        self.notes.add("a CUDA graph was captured: what its replays compute is not seen")
        take(NOTHING)

    def _buffers(self, device: torch.device, kernel: Any) -> _Buffers:
        buffers = self._devices.get(device)
        if buffers is None:
            buffers = self._devices[device] = _Buffers(device, kernel, self.histogram)
        return buffers

    def collect(self) -> None:
        """Wait for the devices and hand out what was asked for."""
        for buffers in self._devices.values():
            buffers.collect()

    def _request_cuda(self, tensor: torch.Tensor, take: Take) -> None:
        if torch.cuda.is_current_stream_capturing():
            self._captured(take)
            return
        kernel = _kernel()
        x = as_real(tensor)
        if kernel is None or not kernel.takes(x.dtype) or not x.numel():
            take(plain.measure(tensor, self.histogram))
            return
        buffers = self._buffers(tensor.device, kernel)
        buffers.request(x, take)
        if self.at_once:
            buffers.collect()


class _Buffers:
    """Partial results on one device."""

    def __init__(self, device: torch.device, kernel: Any, histogram: bool = False) -> None:
        self.device, self.kernel, self.histogram = device, kernel, histogram
        self._keys = torch.tensor(keys(), dtype=torch.int64, device=device)
        # On the device once: to copy it there at each step would wait for the device.
        self._nothing = torch.tensor([float("inf"), float("-inf"), 0.0], dtype=torch.float64, device=device)
        self._chunks: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        self._waiting: list[tuple[Take, int, int, bool]] = []
        self._streams: set[int] = set()
        self._folded: list[tuple[Any, ...]] = []  # of tensors: facts, and results joined on the device

    def request(self, x: torch.Tensor, take: Take) -> None:
        chunk, row = divmod(len(self._waiting), _ROWS)
        if chunk == len(self._chunks):
            self._chunks.append(self._fresh())
        # A copy where rows are not in the order of memory: positions count as they are read.
        ints, floats, counts = self._chunks[chunk]
        self.kernel.measure(x.contiguous(), ints, floats, self._keys, row, counts)
        self._waiting.append((take, x.numel(), size(x), x.dtype.is_floating_point))
        self._launched()

    def request_all(self, tensors: list[tuple[torch.Tensor, Take]]) -> None:
        rows: dict[int, list[tuple[torch.Tensor, int]]] = {}
        for x, take in tensors:
            chunk, row = divmod(len(self._waiting), _ROWS)
            rows.setdefault(chunk, []).append((x.contiguous(), row))
            self._waiting.append((take, x.numel(), size(x), x.dtype.is_floating_point))
        for chunk, some in rows.items():
            if chunk == len(self._chunks):
                self._chunks.append(self._fresh())
            ints, floats, counts = self._chunks[chunk]
            self.kernel.measure_all(some, ints, floats, self._keys, counts)
        self._launched()

    def fold(self) -> None:
        """Join what the programs found of each tensor, on the device."""
        if not self._waiting:
            return
        self._launched()
        if len(self._streams) > 1:
            _wait(self.device)  # what is joined is written on other streams too
        waiting, self._waiting = self._waiting, []
        for number, (ints, floats, counts) in enumerate(self._chunks):
            part = waiting[number * _ROWS : (number + 1) * _ROWS]
            if not part:
                break
            ints, floats = ints[: len(part)], floats[: len(part)]
            fields = None if counts is None else counts[: len(part)].clone()
            low, high = floats[:, :, 0].amin(1), floats[:, :, 1].amax(1)
            self._folded.append((part, fields, ints.sum(1), low, high, floats[:, :, 2].sum(1)))
            self._clear(ints, floats)
            if counts is not None:
                counts[: len(part)].zero_()
        if len(self._streams) > 1:
            _wait(self.device)
        self._streams.clear()

    def collect(self) -> None:
        self.fold()
        if self._folded:
            _wait(self.device)
        folded, self._folded = self._folded, []
        for part, counts, *found in folded:
            fields = [None] * len(part) if counts is None else list(counts.cpu().numpy())
            for (take, *facts), *numbers in zip(part, fields, *(one.tolist() for one in found), strict=True):
                take(_row(*facts, *numbers))

    def _launched(self) -> None:
        """Remember on which streams kernels ran; the last is that on which results are joined."""
        self._streams.add(torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0)

    def _fresh(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        shape = _ROWS, self.kernel.PROGRAMS
        ints = torch.empty(*shape, self.kernel.INTS, dtype=torch.int64, device=self.device)
        floats = torch.empty(*shape, self.kernel.FLOATS, dtype=torch.float64, device=self.device)
        self._clear(ints, floats)
        counts = torch.zeros(_ROWS, BUCKETS, dtype=torch.int64, device=self.device) if self.histogram else None
        _wait(self.device)  # another stream may be the first to write
        return ints, floats, counts

    def _clear(self, ints: torch.Tensor, floats: torch.Tensor) -> None:
        ints.zero_()
        floats.copy_(self._nothing)


def _row(
    count: int, hashed: int, floating: bool, fields: Any, counts: list[int], low: float, high: float, squares: float
) -> Row:
    total, nan, special, normal, other = counts
    finite = count - special
    values = (low, high, (squares / finite) ** 0.5) if finite else (None, None, None)
    bad = (nan, special - nan, other - normal) if floating else (None, None, None)
    found = exponents(fields) if floating and fields is not None else None
    return (*values, *bad, count - other, finish(total, hashed), found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _kernel() -> Any:
    """The kernel's module, None without Triton."""
    try:
        from retrograd.trace.statistics.triton import kernel
    except ImportError:
        return None
    return kernel
