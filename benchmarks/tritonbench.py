"""The 184 Triton programs of TritonBench (thunlp/TritonBench, data/TritonBench_G_v1), written by others, without a GPU.

    git clone https://github.com/thunlp/TritonBench
    python benchmarks/tritonbench.py TritonBench/data/TritonBench_G_v1 --out build/tritonbench -j 2
    python benchmarks/tritonbench.py TritonBench/data/TritonBench_G_v1 --out build/tritonbench --gpu

Each program is run in a process of its own inside of `retrograd.cpu_triton`, and what is told of its kernels is held
against the 24 files in which others have found invalid accesses with sanitizers (thunlp/TritonBench#12). With `--gpu`
each runs on the GPU as well, on the same random numbers, and results are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten_with_path

# thunlp/TritonBench#12, without ".py".
INVALID = {
    "apply_penalty", "attention_fwd_triton1", "chunk_bwd_dqkg", "chunk_delta_fwd", "chunk_gated_attention",
    "chunk_gla_fwd", "chunk_gla_simple", "chunk_linear_attn", "chunk_retention_ops", "decay_cumsum",
    "fused_recurrent_delta", "fused_recurrent_hgrn", "fused_recurrent_retention", "fused_rotary_embedding",
    "layer_norm_triton", "matmul_triton2", "nested_loops_processing", "parallel_attention",
    "parallel_retention_attention", "quantize_kv_copy", "rotary_emb_nopad", "softmax_reducev", "token_attn_mistral",
    "token_attn_reduceV",
}  # fmt: skip
_DRAWN = ("rand", "randn", "randint", "randperm", "normal", "rand_like", "randn_like", "randint_like", "bernoulli")
_FILLED = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_")


class DrawnOnCpu(TorchFunctionMode):
    """Random numbers of a GPU are those of the CPU, so that a program has the same on both."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        first = next((t for t in args if isinstance(t, torch.Tensor)), None)
        place = kwargs.get("device") or (first.device if first is not None else "cpu")
        if name in _DRAWN and torch.device(place).type == "cuda" and kwargs.get("generator") is None:
            args = tuple(t.cpu() if isinstance(t, torch.Tensor) else t for t in args)
            wants = kwargs.pop("requires_grad", False)
            return (
                func(*args, **kwargs | {"device": "cpu"} if "device" in kwargs else kwargs)
                .to(place)
                .requires_grad_(wants)
            )
        if name in _FILLED and first is not None and first.is_cuda:
            return first.copy_(func(torch.empty(first.shape, dtype=first.dtype), *args[1:], **kwargs))
        return func(*args, **kwargs)


def results_of(path: Path) -> dict[str, torch.Tensor]:
    """What a program leaves in the dictionaries of its module, by its place there; runs it."""
    torch.manual_seed(0)
    left = {name: value for name, value in runpy.run_path(str(path)).items() if isinstance(value, dict)}
    leaves = tree_flatten_with_path({n: v for n, v in left.items() if not n.startswith("__")})[0]
    return {str(where): t.detach().cpu().clone() for where, t in leaves if isinstance(t, torch.Tensor)}


def written_of(tensor: torch.Tensor, undefined: Any) -> torch.Tensor:
    """Which elements of a contiguous tensor somebody has written."""
    if undefined is None:
        return torch.ones(tensor.shape, dtype=torch.bool)
    return ~torch.from_numpy(undefined.reshape(tensor.numel(), -1).any(1)).view(tensor.shape)


def one(path: Path, out: Path, *, on_gpu: bool) -> None:
    """Run a program here; its results and what was told of it go to files beside `out`."""
    if on_gpu:
        with DrawnOnCpu(), mock.patch.object(torch.cuda, "manual_seed", torch.manual_seed):
            torch.save(results_of(path), out.with_suffix(".gpu.pt"))
        return
    import retrograd as rg

    told: dict[str, Any] = {}
    try:
        with rg.cpu_triton() as session:
            try:
                results = results_of(path)
                written = {name: written_of(t, session.undefined(t)) for name, t in results.items()}
            finally:
                told["faults"] = [f"{'mild ' * f.is_mild}{f.text()}" for f in session.faults]
                told["kinds"] = sorted({f.kind for f in session.faults if not f.is_mild})
                told["launches"], told["undecided"] = len(session.launches), list(session.undecided)
        torch.save((results, written), out.with_suffix(".cpu.pt"))
        told["unwritten"] = sum(int((~mask).sum()) for mask in written.values())
    except BaseException as error:
        told["error"] = f"{type(error).__name__}: {str(error)[:400]}"
        raise
    finally:
        out.with_suffix(".json").write_text(json.dumps(told, indent=1), encoding="utf-8")


def started(path: Path, args: argparse.Namespace, *, on_gpu: bool) -> dict[str, Any]:
    out = args.out / path.name
    with contextlib.suppress(FileNotFoundError):
        out.with_suffix(".json").unlink()
    command = [sys.executable, __file__, str(path), "--one", "--out", str(out), *["--gpu"] * on_gpu]
    hidden = {} if on_gpu else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    try:
        done = subprocess.run(command, env=os.environ | hidden, capture_output=True, text=True, timeout=args.timeout)
        end = {"rc": done.returncode, "last": "\n".join(done.stderr.strip().splitlines()[-3:])[-400:]}
    except subprocess.TimeoutExpired:
        end = {"rc": -1, "last": f"longer than {args.timeout} s"}
    told = json.loads(out.with_suffix(".json").read_text()) if not on_gpu and out.with_suffix(".json").exists() else {}
    row = {
        "file": path.stem,
        "seconds": round(time.monotonic() - start, 1),
        "on": "gpu" if on_gpu else "cpu",
        **end,
        **told,
    }
    with (args.out / "rows.jsonl").open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")
    return row


def difference(path: Path) -> str:
    """By how much results that somebody has written differ, of the largest of each, in words; empty without a GPU's."""
    try:
        gpu = torch.load(path.with_suffix(".gpu.pt"))
        cpu, written = torch.load(path.with_suffix(".cpu.pt"))
    except FileNotFoundError:
        return ""
    worst, equal = 0.0, 0
    for name, want in gpu.items():
        if name not in cpu or cpu[name].shape != want.shape:
            return f"{name} is missing or of another shape"
        want, got = (t[written[name]].to(torch.float64) for t in (want, cpu[name]))
        if torch.equal(got, want):
            equal += 1
        elif not torch.equal(want.isfinite(), got.isfinite()):
            return f"{name} is finite at {int(want.isfinite().sum())} and {int(got.isfinite().sum())} of {want.numel()}"
        else:
            apart, want = (t.nan_to_num(0.0, 0.0, 0.0).abs().max() for t in (want - got, want))
            worst = max(worst, float(apart / want.clamp_min(1e-300)))
    return f"{equal} of {len(gpu)} equal, others {worst:.1e} apart"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", type=Path, help="their folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpu", action="store_true", help="run them on a GPU, too")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds a program")
    parser.add_argument("-j", "--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="part of a name")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args.programs, args.out, on_gpu=args.gpu)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    paths = [path for path in sorted(args.programs.glob("*.py")) if args.only in path.name]
    with ThreadPoolExecutor(args.jobs) as pool, ThreadPoolExecutor(max(args.jobs // 2, 1)) as beside:
        there = [beside.submit(started, path, args, on_gpu=True) for path in paths] if args.gpu else []
        rows = list(pool.map(lambda path: started(path, args, on_gpu=False), paths))
        for row, path, gpu in zip(rows, paths, [f.result() for f in there] or [{}] * len(rows), strict=True):
            row["gpu"] = gpu
            row["beside"] = difference(args.out / path.name)
    (args.out / "rows.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    for row in rows:
        row["listed"] = row["file"] in INVALID
        if row["listed"] or row["rc"] or row.get("kinds") or row["beside"]:
            print(
                "listed" if row["listed"] else "      ",
                row["file"],
                row["rc"],
                row["seconds"],
                row.get("kinds"),
                row["beside"],
                row["gpu"].get("rc"),
                row["last"][-160:] if row["rc"] else "",
                sep=" | ",
            )
    told = {row["file"] for row in rows if "out of bounds" in row.get("kinds", [])}
    listed = {row["file"] for row in rows} & INVALID
    print(
        f"{len(rows)} programs, {sum(not r['rc'] for r in rows)} run; of {len(listed)} with invalid accesses "
        f"{len(told & listed)} are told, and {sorted(told - listed)}; not told: {sorted(listed - told)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
