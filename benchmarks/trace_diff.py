"""How long `retrograd.trace.diff` takes on runs of 100 000 operators. Torch-free: python benchmarks/trace_diff.py

The traces are of a transformer's shape: 20 steps of 24 blocks, each operator with module, arguments, sizes and digests.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace

from retrograd.trace import Op, Stats, Trace, diff

_STEPS, _BLOCKS, _OPS = 20, 24, 209  # 100 320 operators
_NAMES = ("addmm", "native_layer_norm", "gelu", "add", "bmm", "_softmax", "view", "transpose", "mul", "mm", "sum")


def made(salt: int = 0, dtype: str = "float32", after: int = 0) -> Trace:
    """A run; its values are other ones from operator `after` on if `salt` is not 0."""
    ops: list[Op] = []
    for step in range(_STEPS):
        for block in range(_BLOCKS):
            for k in range(_OPS):
                at, phase = len(ops), "backward" if block >= _BLOCKS // 2 else "forward"
                held = (at, salt if at >= after else 0)
                before = _stats(at, (at - 1, salt if at - 1 >= after else 0), dtype)
                ops.append(
                    Op(at, step, phase, f"aten.{_NAMES[k % len(_NAMES)]}.default", f"blocks.{block}.part{k % 7}", "",
                       f"model.py:{k}", "", f"dim={k % 3}", (before,), (_stats(at + 1, held, dtype),))
                )  # fmt: skip
    return Trace(ops, "full")


def _stats(number: int, held: tuple[int, int], dtype: str) -> Stats:
    off = (held[1] and dtype != "float32") * 1e-4
    return Stats(number, (64, 256), dtype, "cpu", -3.0 - off, 3.0 + off, 1.0 + off, 0, 0, 0, 0, hash(held))


def shuffled(run: Trace, edits: int) -> Trace:
    """With operators inserted, taken out and renamed in random places."""
    draw, ops = random.Random(0), list(run.ops)
    for _ in range(edits):
        at = draw.randrange(len(ops))
        match draw.randrange(3):
            case 0:
                ops.insert(at, replace(ops[at], name="aten.sin.default"))
            case 1:
                del ops[at]
            case _:
                ops[at] = replace(ops[at], name="aten.relu.default")
    return Trace(ops, run.level)


def main() -> None:
    plain = made()
    runs = {
        "the same": made(),
        "other values from operator 1000 on": made(1, after=1000),
        "300 operators inserted, missing or replaced": shuffled(plain, 300),
        "10 000 of them": shuffled(plain, 10_000),
        "bfloat16, within the attainable error": made(1, "bfloat16"),
        "a step more": Trace(plain.ops + [replace(op, step=_STEPS) for op in plain.ops[: _BLOCKS * _OPS]], plain.level),
    }
    print(f"{len(plain.ops)} operators, Python {sys.version.split()[0]}")
    for name, other in runs.items():
        began = time.process_time()
        found = diff(plain, other)
        print(f"{time.process_time() - began:6.2f} s  {name}: {len(found.causes)} causes, {found.carried} carried")


if __name__ == "__main__":
    main()
