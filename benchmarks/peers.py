"""Other packages' norms as targets, and what verify says of all of them in one table.

    pip install liger-kernel quack-kernels
    retrograd verify benchmarks/peers.py:liger_rms_norm --device cuda
    python benchmarks/peers.py -j 4 --level full --out table.md

Written for liger-kernel 0.8.5 and quack-kernels 0.6.5, neither of which is needed to import this file: an op whose
package is missing is left out of the table. docs/peers.md has what it said. `compute="float32"` stands where a kernel
is written to compute in float32 and round once at the end; elsewhere 16-bit results are measured by a 16-bit formula.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import retrograd as rg
from retrograd.check.spec import OpSpec

HALVES = ["float32", "bfloat16"]
EPS = [1e-6, 1e-2]  # the second shows whether eps is honoured: the first is below the attainable error


def rms_norm(x: torch.Tensor, w: torch.Tensor | None = None, *, eps: float, offset: float = 0.0) -> torch.Tensor:
    x_hat = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return x_hat if w is None else x_hat * (w + offset)


def rms_norm_bias(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, *, eps: float) -> torch.Tensor:
    return rms_norm(x, w, eps=eps) + b


def add_rms_norm(
    x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, *, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    s = x + r
    return rms_norm(s, w, eps=eps, offset=offset), s


def layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, *, eps: float) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * w + b


def _liger(module: str, function: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function).apply


def liger_rms(
    x: torch.Tensor, w: torch.Tensor | None = None, *, eps: float, offset: float, casting: str, in_place: bool
) -> torch.Tensor:
    return _liger("rms_norm", "LigerRMSNormFunction")(x, w, eps, offset, casting, in_place)


def liger_add(
    x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, *, eps: float, offset: float, casting: str, in_place: bool
) -> Any:
    function = _liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    return function(x, r, w, eps, offset, casting, in_place)


def liger_layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, *, eps: float) -> torch.Tensor:
    return _liger("layer_norm", "LigerLayerNormFunction")(x, w, b, eps)


def quack_rms(x: torch.Tensor, w: torch.Tensor | None = None, *, eps: float, offset: float = 0.0) -> torch.Tensor:
    return importlib.import_module("quack").rmsnorm(x, w, eps=eps, weight_offset=offset)


def quack_rms_bias(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, *, eps: float) -> torch.Tensor:
    return importlib.import_module("quack").rmsnorm(x, w, b, eps=eps)


def quack_add(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, *, eps: float, offset: float = 0.0) -> Any:
    return importlib.import_module("quack").rmsnorm(x, w, residual=r, eps=eps, prenorm=True, weight_offset=offset)


class _QuackLayerNorm(torch.autograd.Function):
    """quack offers LayerNorm's forward and backward as functions; joining them, strides too, is left to the caller."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, eps: float) -> torch.Tensor:
        norm = importlib.import_module("quack.rmsnorm").layernorm_fwd
        x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
        out, rstd, mean = norm(x, w, b, eps, return_rstd=True, return_mean=True)
        ctx.save_for_backward(x, w, rstd, mean)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, w, rstd, mean = ctx.saved_tensors
        return *importlib.import_module("quack.rmsnorm").layernorm_bwd(x, w, dy.contiguous(), rstd, mean), None


def quack_layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, *, eps: float) -> torch.Tensor:
    return _QuackLayerNorm.apply(x, w, b, eps)


_X, _V, _WIDE = rg.tensor("M", "N"), rg.tensor("N"), rg.tensor("N", dtype="float32")
_PLAIN, _ADD, _AFFINE = dict(x=_X, w=_V), dict(x=_X, r=_X, w=_V), dict(x=_X, w=_V, b=_V)
_STREAM = dict(x=_X, r=rg.tensor("M", "N", dtype="float32"), w=_V)
_HEADS = dict(x=rg.tensor("M", "H", "N"), w=rg.tensor("H", "N"))
SPECS: dict[str, OpSpec] = {}


def _spec(
    name: str, fn: Callable[..., Any], reference: Callable[..., Any], inputs: dict[str, Any], **more: Any
) -> None:
    more = dict(params=dict(eps=EPS), dtypes=HALVES) | more
    SPECS[name] = rg.op(fn, reference, inputs, name=name, **more)


for _casting, _offset, _compute in (("llama", 0.0, None), ("gemma", 1.0, "float32"), ("none", 0.0, None)):
    _given = dict(offset=_offset, casting=_casting, in_place=False)
    _name = "" if _casting == "llama" else f"_{_casting}"
    _spec(f"liger_rms_norm{_name}", partial(liger_rms, **_given), partial(rms_norm, offset=_offset), _PLAIN,
          compute=_compute)  # fmt: skip
    _spec(f"liger_add_rms_norm{_name}", partial(liger_add, **_given), partial(add_rms_norm, offset=_offset), _ADD)
_LLAMA = dict(offset=0.0, casting="llama")
# The default of the one and an option of the other: grad_out's memory holds grad x afterwards.
_spec("liger_rms_norm_in_place", partial(liger_rms, **_LLAMA, in_place=True), rms_norm, _PLAIN)
_spec("liger_add_rms_norm_in_place", partial(liger_add, **_LLAMA, in_place=True), add_rms_norm, _ADD)
_spec("liger_rms_norm_no_weight", partial(liger_rms, **_LLAMA, in_place=False), rms_norm, dict(x=_X))
# From 32768 rows of at most 256 columns on, other kernels run, several rows to a program.
_spec("liger_rms_norm_many_rows", partial(liger_rms, **_LLAMA, in_place=False), rms_norm, _PLAIN,
      sizes=dict(M=[32768, 32769, 33000], N=(1, 256)))  # fmt: skip
_spec("liger_layer_norm", liger_layer, layer_norm, _AFFINE, compute="float32")

_spec("quack_rms_norm", quack_rms, rms_norm, _PLAIN, compute="float32")
_spec("quack_rms_norm_offset", partial(quack_rms, offset=1.0), partial(rms_norm, offset=1.0), _PLAIN, compute="float32")
_spec("quack_rms_norm_bias", quack_rms_bias, rms_norm_bias, _AFFINE, compute="float32")
_spec("quack_rms_norm_no_weight", quack_rms, rms_norm, dict(x=_X), compute="float32")
_spec("quack_rms_norm_wide_weight", quack_rms, rms_norm, dict(x=_X, w=_WIDE), compute="float32", dtypes=["bfloat16"])
_spec(
    "quack_rms_norm_heads",
    quack_rms,
    rms_norm,
    _HEADS,
    compute="float32",
    sizes=dict(M=(0, 40), H=[1, 2, 3, 8], N=[8, 64, 128, 48]),
)
_spec("quack_add_rms_norm", quack_add, add_rms_norm, _ADD)
_spec("quack_add_rms_norm_stream", quack_add, add_rms_norm, _STREAM, dtypes=["bfloat16"])
_spec("quack_layer_norm", quack_layer, layer_norm, dict(x=_X, w=_WIDE, b=_WIDE), compute="float32")
globals().update(SPECS)

PACKAGES = {"liger": "liger-kernel", "quack": "quack-kernels"}


def version(package: str) -> str:
    """The installed version of a package, "" if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def verified(name: str, args: argparse.Namespace) -> tuple[str, dict[str, Any] | str]:
    """The report of an op as data, or the error that kept it from being checked."""
    words = [sys.executable, "-m", "retrograd", "verify", f"{__file__}:{name}", "--level", args.level, "-q"]
    words += ["--device", args.device, "--seed", str(args.seed), "--format", "json", *["--memcheck"] * args.memcheck]
    words += ["--only", args.only] if args.only else []
    words += ["-o", str(args.reports / f"{name}.json")] if args.reports else []
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return name, json.loads(done.stdout) if done.stdout.lstrip().startswith("{") else done.stderr.strip()


def lines(name: str, report: dict[str, Any] | str) -> list[str]:
    """Rows of the table: one a finding."""
    if isinstance(report, str):
        return [f"| {name} | error | | {report.splitlines()[-1] if report else 'no output'} | |"]
    found = [f for stage in report["stages"] for f in stage["findings"]]
    if not found:
        return [f"| {name} | {report['verdict']} | | | |"]
    said = [(f["case"]["dtype"], f["stage"], " ".join(f["what"].split())[:400], f["where"]) for f in found]
    return [f"| {name} | {' | '.join(words)} |" for words in said]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(SPECS), help="ops; all unless given")
    parser.add_argument("--level", default="full", choices=["quick", "full"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="stages, comma separated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memcheck", action="store_true")
    parser.add_argument("-j", "--jobs", type=int, default=1)
    parser.add_argument("--reports", type=Path, help="a folder for a JSON report of each op")
    parser.add_argument("--out", type=Path, help="markdown")
    args = parser.parse_args()
    have = {short: f"{package} {version(package)}" for short, package in PACKAGES.items() if version(package)}
    names = [name for name in args.names if name.partition("_")[0] in have]
    head = f"{', '.join(have.values())}, torch {torch.__version__}, level {args.level}, seed {args.seed}, {args.device}"
    table = [head, "", "| op | dtype | stage | what | where |", "|---|---|---|---|---|"]
    with ThreadPoolExecutor(args.jobs) as pool:
        for name, report in pool.map(lambda name: verified(name, args), names):
            rows = lines(name, report)
            print(*rows, sep="\n", flush=True)
            table += rows
            if args.out:
                args.out.write_text("\n".join(table) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
