"""Collector of statistics of many tensors: of CPU tensors immediately, of a GPU's in buffers read once a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from retrograd.trace.statistics import cpu
from retrograd.trace.statistics.cpu import NO_STATISTICS, StatisticsRow, as_real, byte_size, finish_all
from retrograd.trace.statistics.digest import keys
from retrograd.trace.statistics.exponents import BUCKETS, exponents

_CHUNK_ROWS = 512  # tensors a chunk: 16 MiB
_MEMORY_SHARE = 256  # 1/256 of a GPU's memory may be held until it is measured: 560 MiB of an H200's
_CAPTURED = "a CUDA graph was captured: what its replays compute is not seen"
_NONE = (None, None, None)

Callback = Callable[[StatisticsRow], None]
TableCallback = Callable[[dict[int, StatisticsRow]], None]


class StatisticsCollector:
    """Statistics of the tensors of one step.

    Args:
        immediate: Read each result when it is requested, which waits for the device; for breakpoints.
        histogram: Count exponents too.
    """

    def __init__(self, immediate: bool = False, histogram: bool = False) -> None:
        self.immediate, self.histogram = immediate, histogram
        self.notes: set[str] = set()
        self._devices: dict[torch.device, _DeviceBuffers] = {}

    def request(self, tensor: torch.Tensor, callback: Callback) -> None:
        """Have the callback called with the statistics, now or in `collect`; the tensor may change afterwards."""
        if tensor.device.type == "cuda":
            self._request_cuda(tensor, callback)
        else:
            callback(NO_STATISTICS if tensor.is_meta else cpu.measure(tensor, self.histogram))

    def request_all(self, tensors: list[tuple[torch.Tensor, Callback]]) -> None:
        """`request` for tensors of one stream that nobody writes to before it returns; with few launches."""
        kernel, many = _kernel(), []
        for tensor, callback in tensors:
            if tensor.device.type == "cuda" and kernel is not None and tensor.numel():
                x = as_real(tensor) if tensor.is_complex() or tensor.is_neg() else tensor
                if kernel.takes(x.dtype):
                    many.append((x.contiguous(), callback))
                    continue
            self.request(tensor, callback)
        if many and kernel is not None:
            table, groups = kernel.grouped([x for x, _ in many])

            def take_all(rows: dict[int, StatisticsRow]) -> None:
                for number, row in rows.items():
                    many[number][1](row)

            self.request_table(many[0][0].device, table, groups, take_all)

    def request_table(
        self, device: torch.device, table: torch.Tensor, groups: list[Any], callback: TableCallback
    ) -> None:
        """Have the callback called, now or in `collect`, with the statistics of tensors by the last column of a table.

        Args:
            device: where the tensors are, and nobody writes to them before it returns.
            table: as of the kernel's `measure_all`, on the CPU.
            groups: likewise.
            callback: called once.
        """
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.notes.add(_CAPTURED)
            callback(dict.fromkeys(table[:, 3].tolist(), NO_STATISTICS))
        else:
            self._buffers(device, _kernel()).request_table(table, groups, callback)

    def fold(self) -> None:
        """Join the partial results of a step; waits for no device."""
        for buffers in self._devices.values():
            buffers.fold()

    def _buffers(self, device: torch.device, kernel: Any) -> _DeviceBuffers:
        buffers = self._devices.get(device)
        if buffers is None:
            buffers = self._devices[device] = _DeviceBuffers(device, kernel, self.histogram)
        return buffers

    def collect(self) -> None:
        """Wait for the devices and call the callbacks."""
        for buffers in self._devices.values():
            buffers.collect()

    def _request_cuda(self, tensor: torch.Tensor, callback: Callback) -> None:
        if torch.cuda.is_current_stream_capturing():
            self.notes.add(_CAPTURED)
            callback(NO_STATISTICS)
            return
        kernel = _kernel()
        x = as_real(tensor)
        if kernel is None or not kernel.takes(x.dtype) or not x.numel():
            callback(cpu.measure(tensor, self.histogram))
            return
        buffers = self._buffers(tensor.device, kernel)
        buffers.request(x, callback)
        if self.immediate:
            buffers.collect()


class _Request(NamedTuple):
    """Tensors in consecutive rows of a chunk."""

    first: int
    count: Any  # elements of each, int64
    size: Any  # bytes
    floating: Any
    callback: Callable[[list[StatisticsRow]], None]


class _DeviceBuffers:
    """Partial results on one device."""

    def __init__(self, device: torch.device, kernel: Any, histogram: bool = False) -> None:
        self.device, self.kernel, self.histogram = device, kernel, histogram
        self._keys = torch.tensor(keys(), dtype=torch.int64, device=device)
        # On the device once: to copy it there at each step would wait for the device.
        self._initial = torch.tensor([float("inf"), float("-inf"), 0.0], dtype=torch.float64, device=device)
        self._chunks: list[Any] = []  # `PartialResults` of the kernel
        self._requests: list[list[_Request]] = []  # by chunk
        self._used = _CHUNK_ROWS  # rows of the last of them
        self._streams: set[int] = set()
        self._folded: list[tuple[Any, ...]] = []  # of chunks: requests, and results joined on the device

    def request(self, x: torch.Tensor, callback: Callback) -> None:
        results, row = self._reserve(1)
        # A copy where rows are not in the order of memory: positions count as they are read.
        self.kernel.measure(x.contiguous(), results, row)
        columns = np.array([x.numel()]), np.array([byte_size(x)]), np.array([x.dtype.is_floating_point])
        self._requests[-1].append(_Request(row, *columns, lambda rows: callback(rows[0])))
        self._note_stream()

    def request_table(self, table: torch.Tensor, groups: list[Any], callback: TableCallback) -> None:
        results, first = self._reserve(len(table))
        there = table.to(self.device, non_blocking=True)
        self.kernel.measure_all(there, groups, results, first)
        many = [group[3] for group in groups]
        elements, numbers = table.numpy()[:, 1], table.numpy()[:, 3]
        sizes = elements * np.repeat([group[0].itemsize for group in groups], many)
        floating = np.repeat([group[0].is_floating_point for group in groups], many)
        request = _Request(
            first, elements, sizes, floating, lambda rows: callback(dict(zip(numbers.tolist(), rows, strict=True)))
        )
        self._requests[-1].append(request)
        self._note_stream()

    def _reserve(self, many: int) -> tuple[Any, int]:
        """A chunk with so many free rows, and the first of them."""
        if self._used + many > _CHUNK_ROWS:
            if len(self._requests) == len(self._chunks):
                self._chunks.append(self._new_chunk())
            self._requests.append([])
            self._used = 0
        self._used += many
        return self._chunks[len(self._requests) - 1], self._used - many

    def fold(self) -> None:
        """Join the partial results of each tensor's programs, on the device."""
        if not self._requests:
            return
        self._note_stream()
        if len(self._streams) > 1:
            _wait(self.device)  # what is joined is written on other streams too
        for number, (requests, (ints, floats, counts, _)) in enumerate(
            zip(self._requests, self._chunks, strict=False), 1
        ):
            used = self._used if number == len(self._requests) else _CHUNK_ROWS
            ints, floats = ints[:used], floats[:used]
            fields = None if counts is None else counts[:used].clone()
            low, high = floats[:, :, 0].amin(1), floats[:, :, 1].amax(1)
            self._folded.append((requests, fields, ints.sum(1), torch.stack([low, high, floats[:, :, 2].sum(1)])))
            self._clear(ints, floats)
            if counts is not None:
                counts[:used].zero_()
        self._requests, self._used = [], _CHUNK_ROWS
        if len(self._streams) > 1:
            _wait(self.device)
        self._streams.clear()

    def collect(self) -> None:
        self.fold()
        if self._folded:
            _wait(self.device)
        folded, self._folded = self._folded, []
        for requests, *partial in folded:
            arrays: list[Any] = [None if part is None else part.cpu().numpy() for part in partial]
            fields, ints, floats = arrays
            for first, count, sizes, floating, callback in requests:
                part = slice(first, first + len(count))  # rows of this request
                counts = None if fields is None else fields[part]
                low, high, squares = floats[:, part]
                callback(_statistics_rows(count, sizes, floating, counts, ints[part], low, high, squares))

    def _note_stream(self) -> None:
        """Remember on which streams kernels ran; the last is that on which results are joined."""
        self._streams.add(torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0)

    def _new_chunk(self) -> Any:
        shape = _CHUNK_ROWS, self.kernel.PROGRAMS
        ints = torch.empty(*shape, self.kernel.INTS, dtype=torch.int64, device=self.device)
        floats = torch.empty(*shape, self.kernel.FLOATS, dtype=torch.float64, device=self.device)
        self._clear(ints, floats)
        counts = torch.zeros(_CHUNK_ROWS, BUCKETS, dtype=torch.int64, device=self.device) if self.histogram else None
        _wait(self.device)  # another stream may be the first to write
        return self.kernel.PartialResults(ints, floats, counts, self._keys)

    def _clear(self, ints: torch.Tensor, floats: torch.Tensor) -> None:
        ints.zero_()
        floats.copy_(self._initial)


def _statistics_rows(
    count: Any, sizes: Any, floating: Any, fields: Any, ints: Any, low: Any, high: Any, squares: Any
) -> list[StatisticsRow]:
    """Statistics of tensors [N] from the joined results of their programs."""
    total, nan, special, normal, other = ints.T
    finite = count - special
    rms = np.sqrt(squares / np.maximum(finite, 1))
    columns = low, high, rms, nan, special - nan, other - normal, count - other, finish_all(total, sizes)
    histograms = [None] * len(count) if fields is None else map(exponents, fields)
    rows = zip(*(column.tolist() for column in columns), histograms, strict=True)
    if finite.all() and floating.all():
        return list(rows)
    kinds = zip(rows, finite.tolist(), floating.tolist(), strict=True)
    complete: list[Any] = [
        (*(row[:3] if some else _NONE), *row[3:8], row[8]) if is_float else (*row[:3], *_NONE, *row[6:8], None)
        for row, some, is_float in kinds
    ]
    return complete


def table_limits() -> tuple[str, int, int]:
    """On which devices tensors wait to be measured by tables, up to how many bytes one has few programs, and how many
    bytes may wait. Without the kernel the second is 0: they wait all the same, and are measured one by one."""
    if not torch.cuda.is_available():
        return "cuda", 0, 0
    kernel = _kernel()
    memory = min(torch.cuda.get_device_properties(at).total_memory for at in range(torch.cuda.device_count()))
    return "cuda", 0 if kernel is None else kernel.FEW_BYTES, memory // _MEMORY_SHARE


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
