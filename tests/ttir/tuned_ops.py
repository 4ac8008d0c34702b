"""Ops with autotuned kernels, some configurations of which are wrong, verified without a GPU in a process of their own.

python tests/ttir/tuned_ops.py    # a line of JSON an op
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

import retrograd as rg


def configs(*blocks: int, **options: Any) -> list[Any]:
    return [triton.Config({"BLOCK": block, **options}, num_warps=2) for block in blocks]


def doubled(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + cols, 2.0 * tl.load(x_ptr + cols, cols < N), cols < N)


def doubled_without_mask(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + cols, 2.0 * tl.load(x_ptr + cols))


def doubled_by_half(x_ptr, y_ptr, N, BLOCK: tl.constexpr, MASKED: tl.constexpr, HALVES: tl.constexpr):
    """The second half of a block is lost where it has halves, which a heuristic turns into a mask."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (cols < N) & (cols % BLOCK < BLOCK // HALVES) if MASKED else cols < N
    tl.store(y_ptr + cols, 2.0 * tl.load(x_ptr + cols, mask), mask)


def doubled_if_it_compiles(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK < 64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + cols, 2.0 * tl.load(x_ptr + cols, cols < N), cols < N)


def summed(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + cols, cols < N, other=0.0)
    tl.store(y_ptr, tl.sum(total))


def summed_in_splits(x_ptr, y_ptr, N, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """Adds in programs of their own, and by plain stores where there are several."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0) * BLOCK, N, BLOCK * SPLITS):
        cols = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + cols, cols < N, other=0.0)
    tl.store(y_ptr, tl.load(y_ptr) + tl.sum(total))


def summed_by_programs(x_ptr, y_ptr, N, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """Adds in programs of their own by atomics, so that bits depend on their order."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0) * BLOCK, N, BLOCK * SPLITS):
        cols = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + cols, cols < N, other=0.0)
    tl.atomic_add(y_ptr, tl.sum(total))


def summed_by_adding(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + at, mask=at < N, other=0.0)
    tl.atomic_add(y_ptr, tl.sum(total, 0))


def differentiable(launch: Any) -> Any:
    """An op whose backward is its forward."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return launch(x)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(_, dy):
            return launch(dy)

    return Double.apply


def elementwise(function: Any, tuned: list[Any], around: Any = lambda kernel: kernel, **pruning: Any) -> Any:
    kernel = triton.autotune(tuned, key=["N"], **pruning)(around(triton.jit(function)))

    def launch(x):
        x = x.contiguous()
        y = torch.zeros_like(x)
        if x.numel():
            kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
        return y

    return differentiable(launch)


def keeping(function: Any, tuned: list[Any]) -> Any:
    """An op that asks its tuner once in a process, as libraries do that have a cache of their own."""
    kernel, chosen = triton.autotune(tuned, key=[])(triton.jit(function)), dict[str, int]()

    def launch(x):
        x = x.contiguous()
        y = torch.zeros_like(x)
        if x.numel() and not chosen:
            kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
            chosen.update(kernel.best_config.kwargs)
        elif x.numel():
            kernel.fn[(triton.cdiv(x.numel(), chosen["BLOCK"]),)](x, y, x.numel(), **chosen)
        return y

    return differentiable(launch)


def sum_of_all(
    function: Any, tuned: list[Any], reset: tuple[str, ...] = ("y_ptr",), tuner: Any = None, start: float = 0.0
) -> Any:
    kernel = (tuner or triton.autotune)(tuned, key=["N"], reset_to_zero=list(reset))(triton.jit(function))
    # The forward is tuned too, so that a finding has to name one of two kernels.
    double = elementwise(doubled, configs(64, 128))

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.shape = x.shape
            x, y = double(x).contiguous(), x.new_full((), start)
            if x.numel():
                kernel[lambda meta: (meta.get("SPLITS", 1),)](x, y, x.numel())
            return y

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dy):
            return 2.0 * dy.expand(ctx.shape)

    return Sum.apply


ASKED = Counter[int]()


def only_1(tuned: list[Any], named_args: Any, **_: Any) -> list[Any]:
    ASKED[named_args["N"]] += 1
    return [config for config in tuned if config.kwargs["BLOCK"] == 1]


class OwnTuner(Autotuner):
    """As libraries write them: what was chosen is asked for before Triton's own way of running is left."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        key = str([self.nargs[name] for name in self.keys])
        if key not in self.cache:
            timings = {config: self._bench(*args, config=config, **kwargs) for config in self.prune_configs(kwargs)}
            self.cache[key] = min(timings, key=timings.get)
            self.pre_hook({**self.nargs, **kwargs, **self.cache[key].all_kwargs()}, reset_only=True)
        self.best_config = self.cache[key]
        return self.fn.run(*args, **kwargs, **self.best_config.all_kwargs())


def own_tuner(tuned: list[Any], key: list[str], reset_to_zero: list[str]) -> Any:
    return lambda kernel: OwnTuner(kernel, kernel.arg_names, tuned, key, reset_to_zero, None)


HALVED = triton.heuristics({"MASKED": lambda args: args["HALVES"] > 1})
X, XS = rg.tensor("N"), rg.tensor("M", "N")
SMALL, LONG = dict(M=(1, 4), N=(1, 9)), dict(N=(150, 260))
FORWARD_OF_SUM = lambda x: 2 * x.sum()  # noqa: E731

DOUBLES = {
    "two blocks": elementwise(doubled, configs(32, 64)),
    "no mask": elementwise(doubled_without_mask, configs(1, 64)),
    "pruned": elementwise(doubled_without_mask, configs(1, 64), prune_configs_by={"early_config_prune": only_1}),
    "heuristics": elementwise(doubled_by_half, [*configs(32, HALVES=1), *configs(32, HALVES=2)], HALVED),
    "static assertion": elementwise(doubled_if_it_compiles, configs(32, 64, 128)),
    "kept": keeping(doubled, configs(32, 64)),
}
SUMS = {
    "sum": sum_of_all(summed, configs(32, 128)),
    "splits": sum_of_all(summed_in_splits, [*configs(32, SPLITS=1), *configs(32, SPLITS=4)]),
    "reset": sum_of_all(summed_by_adding, configs(32, 128)),
    "no reset": sum_of_all(summed_by_adding, configs(32, 128), reset=()),
    "reset of programs": sum_of_all(summed_by_programs, [*configs(8, SPLITS=16), *configs(16, SPLITS=16)]),
    "own tuner": sum_of_all(summed_by_adding, configs(32, 128), tuner=own_tuner),
    "own tuner, no reset": sum_of_all(summed_by_adding, configs(32, 128), reset=(), tuner=own_tuner),
    "reset of what is overwritten": sum_of_all(summed, configs(32, 128), start=3.0),
    "many": sum_of_all(summed, configs(32, 64, 128, 256, 512, 1024)),
}


def doubled_by_the_fastest():
    """Chooses among blocks by a clock of its own."""
    kernel, fastest = triton.jit(doubled), dict[int, int]()

    def launch(x, out, block):
        kernel[(triton.cdiv(x.numel(), block),)](x, out, x.numel(), BLOCK=block)

    def run(x):
        out = torch.empty_like(x)
        if x.numel() not in fastest:
            times = {block: triton.testing.do_bench(lambda b=block: launch(x, out, b), 1, 1) for block in (32, 64)}
            fastest[x.numel()] = min(times, key=times.get)
        launch(x, out, fastest[x.numel()])
        return out

    class Doubled(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: run(x.contiguous()))
        backward = staticmethod(lambda ctx, dy: run(dy.contiguous()))

    return Doubled.apply


DOUBLES["by the fastest"] = doubled_by_the_fastest()
OPS = {name: rg.op(fn, lambda x: 2 * x, dict(x=XS), sizes=SMALL, name=name) for name, fn in DOUBLES.items()}
OPS |= {name: rg.op(fn, FORWARD_OF_SUM, dict(x=X), sizes=LONG, name=name) for name, fn in SUMS.items()}
EVEN = dict(M=(1, 4, 4), N=(1, 9, 8))
OPS |= {
    name: rg.op(elementwise(function, configs(1, 2)), lambda x: 2 * x, dict(x=XS), sizes=EVEN, name=name)
    for name, function in (("a mask at odd sizes", doubled), ("no mask at odd sizes", doubled_without_mask))
}
FROM_3 = sum_of_all(summed_by_adding, configs(32, 128), start=3.0)
OPS["reset of what was written"] = rg.op(FROM_3, lambda x: 2 * x.sum() + 3, dict(x=X), sizes=LONG)
OPS["sum, deterministic"] = rg.op(SUMS["sum"], FORWARD_OF_SUM, dict(x=X), sizes=LONG, deterministic=True)


def nested() -> dict[str, Any]:
    """What one session inside another chooses, and what a tuner that had chosen before has afterwards."""
    untimed = dict(do_bench=lambda call, quantiles: 1 / 0)
    kernel = triton.autotune(configs(32, 64, 128), key=["N"], **untimed)(triton.jit(doubled))
    kernel.cache = kept = {"chosen": "on a GPU"}
    blocks, x = [], torch.ones(16)

    def launch(session: Any) -> None:
        kernel[lambda meta: blocks.append(meta["BLOCK"]) or (1,)](x, torch.empty(16), 16)
        blocks.append(session.chosen["doubled"].kwargs["BLOCK"])

    with rg.cpu_triton(configuration=1) as outer:
        with rg.cpu_triton(configuration=5) as inner:
            launch(inner)
        launch(outer)
    left = sorted({"do_bench", "prune_configs"} & vars(kernel).keys())
    return {"name": "nested", "blocks": blocks, "kept": kernel.cache is kept, "left": left}


def main() -> None:
    sys.stdout.write(json.dumps(nested()) + "\n")
    for name, spec in OPS.items():
        report = rg.verify(spec, level="quick", dtypes=["float32"])
        findings = [[finding.stage, finding.kind, finding.what] for finding in report.findings]
        stage = next(stage for stage in report.stages if stage.id == "determinism")
        row = {"name": name, "verdict": report.verdict, "findings": findings, "power": stage.power_text}
        row["notes"] = [*stage.notes, *report.notes]
        row["asked"] = max(ASKED.values(), default=0)
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
