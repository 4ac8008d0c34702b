"""What recording costs: a training step of a small transformer with and without a recorder, and the parts of it.

    python benchmarks/trace.py [--device cuda] [--width 768 --depth 12 --batch 8 --length 512] [--dtype bfloat16]
    python benchmarks/trace.py --parts
    python benchmarks/trace.py --kernel

Steps with and without a recorder alternate; medians of --repeats steps each. On a GPU wall time, the device waited for
at the end of a step; on a CPU the time of the process's one thread, so that a busy machine disturbs less. Reading the
statistics of a step and making records of it, which a recorder does when its block ends, is told as `afterwards`; with
a file it happens at the end of each step. The first step of a recorder, which looks up schemas and lines, is not
counted. --engines builds the tape if it is named.

A step that waits for the host, and one that waits for the device:

    python benchmarks/trace.py --device cuda --dtype bfloat16 --width 768 --depth 12 --batch 8 --length 512
    python benchmarks/trace.py --device cuda --dtype bfloat16 --width 768 --depth 12 --batch 64 --length 512

A tiny Llama, whose operators are small, so that the recorder costs most:

    python benchmarks/trace.py --llama --width 64 --depth 4 --batch 4 --length 64
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd import trace
from retrograd.trace import tape
from retrograd.trace.statistics import cpu


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LlamaBlock(nn.Module):
    """RMSNorm in float32, attention without biases, SwiGLU: more and smaller operators than `Block`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 32)
        self.norm1, self.norm2 = (nn.Parameter(torch.ones(width)) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        y = self.normed(x, self.norm1)
        q, k, v = (part(y).view(b, t, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        y = self.normed(x, self.norm2)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    @staticmethod
    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


class Step:
    """A training step that can be called again and again."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device, words = options.device, 512
        dtype = getattr(torch, options.dtype)
        blocks = [(LlamaBlock if options.llama else Block)(options.width) for _ in range(options.depth)]
        self.model = nn.Sequential(
            nn.Embedding(words, options.width), *blocks, nn.LayerNorm(options.width), nn.Linear(options.width, words)
        ).to(options.device, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.tokens = torch.randint(0, words, (options.batch, options.length + 1), device=options.device)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        logits = self.model(self.tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), self.tokens[:, 1:].flatten()).backward()
        self.optimizer.step()


def seconds(run: Callable[[], None], device: str) -> float:
    """Time of a call, the device waited for."""
    if device == "cpu":
        start = time.process_time()
        run()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def busy(step: Step) -> float:
    """Seconds in which the device computes, of a step; overlapping kernels count twice."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiler.key_averages()) * 1e-6


class Bare(TorchDispatchMode):
    """What a dispatch mode in Python costs that does nothing."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As the recorder's."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def measure(options: argparse.Namespace) -> None:
    """Print a row for each engine and level."""
    step = Step(options)
    for _ in range(3):
        step()
    print(
        f"torch {torch.__version__}, {options.device}, {options.dtype}, width {options.width}, depth {options.depth}, "
        f"batch {options.batch} x {options.length}, one thread of the CPU"
    )
    if options.device == "cuda":
        print(f"the device computes for {busy(step) * 1e3:.1f} ms of an unrecorded step")
    print("engine level  operators  unrecorded ms  recorded ms  ratio  afterwards ms")
    plain, mode = [], []
    for _ in range(options.repeats):
        plain.append(seconds(step, options.device))
        with Bare():
            mode.append(seconds(step, options.device))
    row("a mode that does nothing", 0, plain, mode, [])
    for engine in options.engines.split(","):
        for level in options.levels.split(","):
            plain, recorded, afterwards, operators = [], [], [], 0
            for _ in range(options.repeats):
                plain.append(seconds(step, options.device))
                recorder = trace.record(step.model, level=level, engine=engine)
                with recorder:
                    step()
                    _ = recorder.trace
                    recorded.append(seconds(step, options.device))
                    afterwards.append(seconds(lambda: recorder.trace, options.device))  # noqa: B023
                operators = sum(op.step == 1 for op in recorder.trace.ops)
            row(f"{engine:6} {level:5}", operators, plain, recorded, afterwards)


def row(name: str, operators: int, plain: list[float], recorded: list[float], afterwards: list[float]) -> None:
    """Print medians."""
    a, b = statistics.median(plain), statistics.median(recorded)
    after = f"{statistics.median(afterwards) * 1e3:14.1f}" if afterwards else ""
    print(f"{name:12} {operators or '':10} {a * 1e3:14.1f} {b * 1e3:12.1f} {b / a:6.2f} {after}", flush=True)


def parts() -> None:
    """Print what statistics of one CPU tensor cost: by the tape for each width of vectors, and by NumPy."""
    compiled = tape.load().measure
    print("dtype elements by exponents us ns-an-element")
    for dtype in (torch.float32, torch.bfloat16):
        for count in (64, 1 << 12, 1 << 18, 1 << 22):
            x = torch.randn(count).to(dtype)
            for exponents in (False, True):
                ways = {f"{w}-bytes": partial(compiled, x, exponents, w, trace.Exponents) for w in (16, 32, 64)}
                for name, run in (*ways.items(), ("numpy", partial(cpu.measure, x, exponents))):
                    best = min(seconds(run, "cpu") for _ in range(50))
                    print(f"{dtype!s:14} {count:8} {name:8} {exponents:1} {best * 1e6:9.1f} {best / count * 1e9:8.2f}")


def kernel() -> None:
    """Print how fast the kernel reads on this GPU, beside a copy: 16 tensors of 64 MiB a launch, 128 smaller ones."""
    from retrograd.trace.statistics import collector
    from retrograd.trace.statistics.triton import kernel

    def gigabytes_per_second(run: Callable[[], Any], size: int) -> float:
        run()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(10):
            run()
        end.record()
        torch.cuda.synchronize()
        return 10 * size / begin.elapsed_time(end) * 1e-6

    copied = torch.randn(1 << 28, device="cuda")
    other = torch.empty_like(copied)
    print(f"a copy, read and written: {gigabytes_per_second(lambda: other.copy_(copied), 2 << 30):6.0f} GB/s")
    for histogram in (False, True):
        buffers = collector._DeviceBuffers(torch.device("cuda"), kernel, histogram)
        results = buffers._new_chunk()
        for dtype in kernel.DTYPES:
            if histogram and not dtype.is_floating_point:
                continue
            for size, many in ((1 << 26, 16), (1 << 20, 128), (1 << 12, 128)):
                xs = [(torch.randn(size // 4, device="cuda") * 9).to(dtype) for _ in range(many)]
                xs = [x.repeat(4 // x.element_size() or 1)[: size // x.element_size()] for x in xs]
                table, groups = kernel.grouped(xs)
                there = table.cuda()

                def run() -> None:
                    kernel.measure_all(there, groups, results, 0)  # noqa: B023

                speed = gigabytes_per_second(run, many * size)
                name = f"{str(dtype).removeprefix('torch.')}{' with histogram' * histogram}"
                print(f"{name:24} {many:4} x {size >> 10:6} KiB: {speed:6.0f} GB/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    for name, usual in (("width", 256), ("depth", 4), ("batch", 8), ("length", 128), ("repeats", 9)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--engines", default="tape,python")
    parser.add_argument("--levels", default="names,fast,full")
    parser.add_argument("--llama", action="store_true")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--kernel", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts() if options.parts else kernel() if options.kernel else measure(options)


if __name__ == "__main__":
    main()
