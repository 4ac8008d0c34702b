"""A dozen ops made of kernels of the first set, each healthy or with its slip, through `verify` at level quick.

    python benchmarks/unseen_races/verified.py [NAME ...]    # verdict, stages that found something, seconds

Sums over rows are weight gradients of `x * w`, whose products torch makes; the others are forwards or whole ops.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import measure
import torch

import retrograd as rg

measure.load("first")
locks, queues, sums, tuned = (
    sys.modules[f"first_{name}"] for name in ("locks", "scans_and_queues", "sums", "tuned_and_chained")
)
Sum = Callable[[torch.Tensor], torch.Tensor]
N, T = 16, 48


def scaled(add: Sum) -> Any:
    """x * w, the gradient of w added up over rows by `add`."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dy):
            x, w = ctx.saved_tensors
            return dy * w, add((dy * x).contiguous()) if len(x) else torch.zeros_like(w)

    return Scaled.apply


def counter(x: torch.Tensor, n: int = 1) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32, device=x.device)


def by_lock(take: str) -> Sum:
    def add(x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(N)
        locks.scoped_lock_kernel[(len(x),)](x, total, counter(x), BLOCK=N, TAKE=take, GIVE="and", SCOPE="gpu")
        return total

    return add


def by_the_last(mistake: str) -> Sum:
    def add(x: torch.Tensor) -> torch.Tensor:
        parts, out = torch.empty_like(x), x.new_zeros(N)
        queues.last_of_tile_kernel[(1, len(x))](x, parts, counter(x), out, PARTS=len(x), BLOCK=N, MISTAKE=mistake)
        return out

    return add


def by_queue(mistake: bool) -> Sum:
    def add(x: torch.Tensor) -> torch.Tensor:
        total, tiles = x.new_zeros(N), len(x)
        queues.persistent_queue_kernel[(3,)](x, torch.empty_like(x), total, counter(x), tiles, BLOCK=N, MISTAKE=mistake)
        return total

    return add


def attended(mistake: bool) -> Any:
    """Half the squares of scores, their gradients by the kernel."""

    class Scores(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k):
            ctx.save_for_backward(q, k)
            return (q @ k.mT).square().sum((1, 2)) / 2

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dy):
            q, k = (t.contiguous() for t in ctx.saved_tensors)
            dq, dk = torch.zeros_like(q), torch.zeros_like(k)
            tuned.flash_gradient_kernel[(len(q), T // 16)](q, k, dq, dk, T=T, D=N, TILE=16, MISTAKE=mistake)
            return dq * dy[:, None, None], dk * dy[:, None, None]

    return Scores.apply


IDS = torch.tensor([0, 0, 0, 1, 1, 3, 3, 3, 3, 3, 3, 4, 4, 5, 5, 5])


def segments(mistake: int) -> Any:
    """Sums over sorted segments; the gradient is a gather."""

    class Segments(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            out = x.new_zeros(6)
            ids = IDS.to(torch.int32).to(x.device)
            sums.segment_kernel[(4,)](ids, x.contiguous(), out, len(x), PER=4, MISTAKE=mistake)
            return out

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(_, dy):
            return dy[IDS.to(dy.device)]

    return Segments.apply


def combined(mistake: bool) -> Any:
    """Each row is the sum of its two halves' rows with gates; the gradient is torch's."""

    class Combined(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, gate):
            ctx.save_for_backward(y, gate)
            tokens, out = len(gate), y.new_zeros(len(gate), N)
            rows = torch.arange(2 * tokens, dtype=torch.int32, device=y.device)
            if tokens:
                grid = (2 * tokens,) if mistake else (tokens,)
                sums.combine_kernel[grid](y.contiguous(), rows, gate.contiguous(), out, K=2, D=N, MISTAKE=mistake)
            return out

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dy):
            y, gate = ctx.saved_tensors
            d = dy[:, None] * gate[:, :, None]
            return d, (dy[:, None] * y).sum(-1)

    return Combined.apply


ROWS = dict(x=rg.tensor("M", "N"), w=rg.tensor("N"))
ROW_SIZES = dict(M=(0, 12), N=[N])


def scale_op(add: Sum) -> Any:
    return rg.op(scaled(add), lambda x, w: x * w, ROWS, sizes=ROW_SIZES)


def score_op(mistake: bool) -> Any:
    tensors = dict(q=rg.tensor("B", "T", "D"), k=rg.tensor("B", "T", "D", scale=0.3))
    reference = lambda q, k: (q @ k.mT).square().sum((1, 2)) / 2  # noqa: E731
    return rg.op(attended(mistake), reference, tensors, sizes=dict(B=(1, 2), T=[T], D=[N]))


def segment_op(mistake: int) -> Any:
    reference = lambda x: x.new_zeros(6).index_add(0, IDS.to(x.device), x)  # noqa: E731
    return rg.op(segments(mistake), reference, dict(x=rg.tensor("L")), sizes=dict(L=[len(IDS)]))


def combine_op(mistake: bool) -> Any:
    tensors = dict(y=rg.tensor("M", "K", "N"), gate=rg.tensor("M", "K"))
    reference = lambda y, gate: (y * gate[:, :, None]).sum(1)  # noqa: E731
    return rg.op(combined(mistake), reference, tensors, sizes=dict(M=(1, 12), K=[2], N=[N]))


# Name -> op, and whether it is racy.
OPS: dict[str, tuple[Any, bool]] = {
    "lock": (scale_op(by_lock("or")), False),
    "lock taken relaxed": (scale_op(by_lock("weak")), True),
    "last part": (scale_op(by_the_last("")), False),
    "last part but one": (scale_op(by_the_last("early")), True),
    "queue": (scale_op(by_queue(False)), False),
    "queue with a plain sum": (scale_op(by_queue(True)), True),
    "scores": (score_op(False), False),
    "scores by stores": (score_op(True), True),
    "segments": (segment_op(0), False),
    "segments whose first is stored": (segment_op(1), True),
    "combined": (combine_op(False), False),
    "combined by each choice": (combine_op(True), True),
}


def main() -> int:
    wrong = 0
    for name in sys.argv[1:] or OPS:
        spec, racy = OPS[name]
        start = time.perf_counter()
        report = rg.verify(spec, level="quick", dtypes=["float32"])
        stages = sorted({f"{finding.stage}: {finding.kind}" for finding in report.findings})
        right = report.verdict == "finding" and "races: race" in stages if racy else report.verdict == "proved"
        wrong += not right
        expected = "a race" if racy else "proved"
        seconds = time.perf_counter() - start
        print(f"| {name} | {expected} | {report.verdict} | {', '.join(stages)} | {seconds:.0f} |", flush=True)
        if not right:
            print(*[finding.what for finding in report.findings][:4], sep="\n    ", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
