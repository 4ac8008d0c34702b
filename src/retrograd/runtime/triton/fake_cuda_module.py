"""Answers of torch.cuda and torch.accelerator where a GPU is pretended: one device and one order of work."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch

from retrograd.compat.triton_compile import GpuDescription
from retrograd.runtime.triton.fake_cuda_graph import AcceleratorGraph, CUDAGraph, graph, graphed, is_capturing

# Made here: inside of the context the mode would place it on the CPU.
_DEVICE = torch.device("cuda", 0)
_AMOUNTS = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
_KINDS = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
           torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)  # fmt: skip
_MARKS = ("range_push", "range_pop", "range_start", "range_end", "mark")
_RESETS = ("reset_peak_memory_stats", "reset_accumulated_memory_stats", "reset_max_memory_allocated")


STREAMS: list[Any] = []  # that are entered, the innermost last


class _Device(contextlib.nullcontext):
    """torch.cuda.device of whatever device."""

    idx, prev_idx = 0, -1

    def __init__(self, device: Any = None) -> None:
        super().__init__(device)


class _Event:
    """torch.cuda.Event, each record of which is a second after the one before.

    Nobody knows here what is fastest on a GPU, and by the clock of the CPU a library that times its own kernels chose
    another one at each run, with a NaN or without. By this one it keeps the first, and benchmarks repeat little.
    """

    _records = itertools.count()
    asked = 0  # how often somebody wanted to know how long something takes

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at = 0

    def record(self, stream: Any = None) -> None:
        self._at = next(self._records)

    def elapsed_time(self, end: _Event) -> float:
        _Event.asked += 1
        return 1e3 * (end._at - self._at)

    def synchronize(self) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True


def timings() -> int:
    """How often programs have asked so far how long something takes."""
    return _Event.asked


def launched_once(stock: Any) -> Any:
    """A function of triton.testing that times another one, which nobody here knows the time of: 1 ms.

    Triton's launches it eight times and clears a cache of 256 MB between them.
    """

    @functools.wraps(stock)
    def timed(*args: Any, **kwargs: Any) -> Any:
        told = inspect.signature(stock).bind(*args, **kwargs)
        told.apply_defaults()
        told.arguments["fn"]()
        _Event.asked += 1
        quantiles, mode = told.arguments.get("quantiles"), told.arguments.get("return_mode")
        times = [1.0] * len(quantiles or "1")
        return times if len(times) > 1 or (mode == "all" and quantiles is None) else times[0]

    return timed


class _Stream(contextlib.nullcontext):
    """torch.cuda.Stream: there is one order of work alone, and programs may compare streams by their numbers."""

    device_index, device = 0, _DEVICE
    _numbers = itertools.count(1)

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        super().__init__(self)
        self.cuda_stream = self.stream_id = next(_Stream._numbers)
        self.priority = priority

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and self.stream_id == other.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __enter__(self) -> Any:
        STREAMS.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        STREAMS.pop()

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event()
        event.record(self)
        return event

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _default_stream(device: Any = None) -> _Stream:
    stream = _Stream()
    stream.cuda_stream = stream.stream_id = 0
    return stream


def _current_stream(device: Any = None) -> _Stream:
    return STREAMS[-1] if STREAMS else _default_stream()


def _set_stream(stream: Any) -> None:
    """For the rest of what is entered."""
    if stream is not None:
        STREAMS[-1:] = [stream]


class _DefaultGenerator(torch.Generator):
    """The GPU's own generator, whose state is a seed and an offset, which launchers hand to kernels that draw."""

    offset = 0

    def get_state(self) -> torch.Tensor:
        seed = torch.default_generator.initial_seed()
        pair = torch.tensor([seed - (seed >> 63 << 64), self.offset], dtype=torch.int64, device="cpu")
        return pair.view(torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        seed, self.offset = state.view(torch.int64).tolist()
        if seed % 2**64 != torch.default_generator.initial_seed() % 2**64:
            self.manual_seed(seed)

    def manual_seed(self, seed: int) -> _DefaultGenerator:
        super().manual_seed(seed)
        _seed(seed)
        return self

    def initial_seed(self) -> int:
        return torch.default_generator.initial_seed()


def _seed(seed: int) -> None:
    """Not torch.manual_seed, which asks torch.cuda to do it as well."""
    torch.default_generator.manual_seed(int(seed))


def _restore(*states: torch.Tensor) -> None:
    """The state of all draws; a GPU's own, of 16 bytes as a checkpoint from one has it, by its seed."""
    for state in states:
        if state.numel() == 16:
            _seed(int(state.view(torch.int64)[0]))
        else:
            torch.set_rng_state(state)


@functools.cache
def cuda_answers(target: GpuDescription) -> dict[str, Any]:
    """By the names of torch.cuda."""
    capability = divmod(target.arch, 10) if isinstance(target.arch, int) else tuple(map(int, target.arch[3:5]))
    # Real names begin with the maker, by which libraries tell one GPU's from another's (FlagGems stops without).
    name = f"{'NVIDIA' if target.backend == 'cuda' else 'AMD'} {target.name}"
    properties = SimpleNamespace(
        name=name,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=target.num_sms,
        warp_size=target.warp_size,
        total_memory=80 * 1024**3,
        # What all GPUs since Volta have, but for the cache, which is a Hopper's.
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=target.shared_limit_bytes,
        shared_memory_per_multiprocessor=target.shared_limit_bytes + 1024,
        regs_per_multiprocessor=1 << 16,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        L2_cache_size=50 * 1024**2,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName=str(target.arch),
        uuid="00000000-0000-0000-0000-000000000000",
        pci_bus_id=0,
        # Of an H100 with HBM3, in kHz and bits.
        clock_rate=1_980_000,
        memory_clock_rate=2_619_000,
        memory_bus_width=5120,
    )
    return {
        "is_available": lambda: True,
        **dict.fromkeys(("init", "ipc_collect"), lambda: None),
        "get_arch_list": lambda: [f"sm_{target.arch}" if isinstance(target.arch, int) else target.arch],
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: name,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "current_stream": _current_stream,
        "default_stream": _default_stream,
        "Stream": _Stream,
        "ExternalStream": lambda pointer, device=None, **_: _Stream(),
        "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
        "set_stream": _set_stream,
        "Event": _Event,
        **dict.fromkeys(("device", "device_of", "_DeviceGuard"), _Device),  # the last: Inductor, FlagGems
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda *_, **__: True,
        **_graphs(),
        **_numbers(),
        # All draws are the CPU's.
        **dict.fromkeys(("manual_seed", "manual_seed_all"), _seed),
        **dict.fromkeys(("seed", "seed_all"), lambda: torch.default_generator.seed()),
        "initial_seed": torch.initial_seed,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),  # torch.compile saves and restores it
        "set_rng_state": lambda state, device="cuda": _restore(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda states: _restore(*states[:1]),
        **dict.fromkeys(_AMOUNTS, lambda device=None: 0),
        **dict.fromkeys(_RESETS, lambda device=None: None),
        "memory_stats": lambda device=None: defaultdict(int),
        "mem_get_info": lambda device=None: (properties.total_memory, properties.total_memory),
        "nvtx": SimpleNamespace(range=contextlib.nullcontext, **dict.fromkeys(_MARKS, lambda *_, **__: 0)),
        "profiler": SimpleNamespace(
            profile=contextlib.nullcontext, **dict.fromkeys(("init", "start", "stop"), lambda *_: None)
        ),
        "cudart": lambda: SimpleNamespace(**dict.fromkeys(("cudaProfilerStart", "cudaProfilerStop"), lambda: 0)),
        # Classes of tensors there, which are those of tensors here.
        **{f"{kind}Tensor": getattr(torch, f"{kind}Tensor") for kind in _KINDS},
    }


def _graphs() -> dict[str, Any]:
    return {
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": lambda: (0, 0),
        "make_graphed_callables": graphed,
        "is_current_stream_capturing": is_capturing,
    }


def _numbers() -> dict[str, Any]:
    """What a monitor would show of a GPU that does nothing, and what is to be set without effect."""
    idle = ("utilization", "temperature", "clock_rate", "power_draw", "memory_usage", "device_memory_used")
    ignored = ("set_per_process_memory_fraction", "set_sync_debug_mode", "_sleep", "_lazy_init")
    return {
        "is_initialized": lambda: True,
        "can_device_access_peer": lambda device, peer: False,
        "current_blas_handle": lambda: 0,
        "default_generators": (_DefaultGenerator(),),
        **dict.fromkeys(("_exchange_device", "_maybe_exchange_device"), lambda device: 0),  # Dynamo's guard calls them
        "get_allocator_backend": lambda: "native",
        "get_stream_from_external": lambda pointer, device=None: _Stream(),
        "get_sync_debug_mode": lambda: 0,
        "memory_snapshot": list,
        **dict.fromkeys(("memory_summary", "list_gpu_processes"), lambda *_, **__: ""),
        **dict.fromkeys(idle, lambda device=None: 0),
        **dict.fromkeys(ignored, lambda *_, **__: None),
    }


def accelerator_answers(target: GpuDescription) -> dict[str, Any]:
    """By the names of torch.accelerator, for all but torch itself.

    Dynamo asks it for streams of torch's own class, which no GPU that is not there has.
    """
    cuda = cuda_answers(target)
    pretended: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_accelerator": lambda check_available=False: _DEVICE,
        "get_device_capability": lambda device=None: {"supported_dtypes": set(_DTYPES)},
        "get_memory_info": cuda["mem_get_info"],
        "memory_stats": cuda["memory_stats"],
        **dict.fromkeys(("current_device_index", "current_device_idx"), lambda: 0),
        **dict.fromkeys(("set_device_index", "set_device_idx"), lambda _: None),
        "set_stream": _set_stream,
        "current_stream": _current_stream,
        "synchronize": lambda device=None: None,
        **dict.fromkeys(("empty_cache", "empty_host_cache"), lambda: None),
        **dict.fromkeys(_AMOUNTS, lambda device=None: 0),
        **dict.fromkeys(_RESETS, lambda device=None: None),
    }
    without: dict[str, Any] = {"is_available": lambda: False, "device_count": lambda: 0,
                               "current_accelerator": lambda check_available=False: None}  # fmt: skip
    by_asker = {
        name: functools.partial(_by_asker, answer, without.get(name, vars(torch.accelerator).get(name)))
        for name, answer in pretended.items()
    }
    return by_asker | {"Graph": AcceleratorGraph}


def group_answers() -> dict[str, Any]:
    """By the names of torch.distributed: gloo joins processes whose tensors are on the CPU, where NCCL is asked to."""
    named = ("init_process_group", "new_group")
    return {name: _by_gloo(getattr(torch.distributed, name)) for name in named if hasattr(torch.distributed, name)}


def replica_answers() -> dict[str, Any]:
    """By the names of DistributedDataParallel, which takes no numbers of devices for a module on the CPU."""
    stock: Any = torch.nn.parallel.DistributedDataParallel.__init__

    @functools.wraps(stock)
    def construct(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **more: Any):
        stock(self, module, None, None, *args, **more)

    return {"__init__": construct}


def profiler_answers() -> dict[str, Any]:
    """By the names of torch.autograd.profiler.profile: each operator would warn that there is no event of CUDA."""
    stock: Any = torch.autograd.profiler.profile.__init__

    @functools.wraps(stock)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **{k: v for k, v in kwargs.items() if k not in ("use_cuda", "use_device")})

    return {"__init__": construct}


def _by_gloo(stock: Any) -> Any:
    def joined(value: Any) -> Any:
        return "gloo" if value in ("nccl", "cuda:nccl", "cpu:gloo,cuda:nccl") else value

    @functools.wraps(stock)
    def grouped(*args: Any, **kwargs: Any) -> Any:
        if not args and stock.__name__ == "init_process_group" and kwargs.get("backend") is None:
            kwargs = kwargs | {"backend": "gloo"}
        kwargs.pop("device_id", None)
        if "backend" in kwargs:
            kwargs["backend"] = joined(kwargs["backend"])
        return stock(*(joined(value) if isinstance(value, str) else value for value in args), **kwargs)

    return grouped


def built_answers() -> dict[str, Any]:
    """By the names of torch.backends.cuda, for all but torch itself, which looks for what only such a build has."""
    return {"is_built": functools.partial(_by_asker, lambda: True, torch.backends.cuda.is_built)}


def _by_asker(pretended: Any, without: Any, *args: Any, **kwargs: Any) -> Any:
    asker = f"{sys._getframe(1).f_globals.get('__name__', '')}."
    torchs = asker.startswith("torch.") and not asker.startswith("torch.testing.")
    return (without if torchs else pretended)(*args, **kwargs)
