"""First hour: a wheel built from this checkout, installed alone into fresh environments, and used as a newcomer does.

    python tools/first_hour.py [--only base,torch,all] [--pinned] [--keep]

Environments: the base install, [torch] and [all], the last two with transformers; the newest of everything, or with
--pinned what constraints.txt says. Each step has an exit code and words that it must print; its time is printed.
Exit code: 0 all as they should be, 1 a step is not. PyPI has torch for CUDA alone, 6 GB installed;
UV_TORCH_BACKEND=cpu takes the build for CPUs from PyTorch's own index.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = ROOT / ".uv" / "bin" / "uv"
DUMPS = ROOT / "tests" / "graph" / "data" / "xla"
LIBRARY = """
import torch


class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, w, r)
        return x * r * w

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w, r = ctx.saved_tensors
        g, x_hat = dy * WEIGHT, x * r
        dw = (dy * x_hat).reshape(x.shape[:-1].numel(), x.shape[-1]).sum(0)
        return (g - x_hat * (g * x_hat).mean(-1, keepdim=True)) * r, dw


def rms_norm(x, w):
    return RmsNorm.apply(x, w)


def rms_norm_ref(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w
"""
TEST = """
import mylib_spec, pytest

(spec,) = [value for value in vars(mylib_spec).values() if type(value).__name__ == "OpSpec"]


@pytest.mark.retrograd(spec, level="quick")
def test_rms_norm(retrograd_stage):
    retrograd_stage.assert_passes()
"""
KERNEL = """
import torch, triton, triton.language as tl


@triton.jit
def square_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < size)
    tl.store(out_ptr + at, x * x, at < size)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        x = x.contiguous()
        out = torch.empty_like(x)
        square_kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        return 2 * dy * ctx.saved_tensors[0]


def square(x):
    return Square.apply(x)


def square_ref(x):
    return x * x
"""
LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from retrograd import patch

torch.manual_seed(0)
sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model, ids = LlamaForCausalLM(LlamaConfig(**sizes)), torch.randint(0, 99, (2, 8))


def step():
    loss = model(input_ids=ids, labels=ids).loss
    return [loss, *torch.autograd.grad(loss, model.parameters())]


before = step()
with patch.norms(model) as handle:
    print(handle)
    torch.testing.assert_close(step(), before)
torch.testing.assert_close(step(), before, rtol=0, atol=0)
"""


@dataclass(frozen=True)
class Step:
    """A command in words; what it must print, and its exit code."""

    words: str
    prints: str = ""
    code: int = 0


_GRAPHS = (
    Step("retrograd graph diff a.hlo.txt.gz b.hlo.txt.gz -o diff.json -o diff.html", "different: ", 1),
    Step("retrograd report diff.json -o again.html"),
)
_OPS = (
    Step("retrograd demo -o demo.html", "FINDING"),
    Step("retrograd init mylib.py", "reference rms_norm_ref"),
    Step("retrograd verify mylib_spec.py --level quick", "PROVED"),
    Step("retrograd init broken.py", "broken_spec.py"),
    Step("retrograd verify broken_spec.py --level quick -o broken.html -o broken.json", "FINDING", 1),
    Step("retrograd report broken.json -o broken.html"),
    Step("python llama.py", "5 norms replaced"),
    *_GRAPHS,
)
STEPS = {
    "base": (
        Step("retrograd --version", "retrograd "),
        Step("retrograd --help", "verify"),
        *_GRAPHS,
        Step("retrograd demo", "retrograd[torch]", 2),
    ),
    "torch": _OPS,
    "all": (
        *_OPS,
        Step("retrograd init kernel.py", "reference square_ref"),
        Step("retrograd verify kernel_spec.py --level quick", "PROVED"),
        Step("pytest -q test_mylib.py", " passed"),
    ),
}


def wheel(folder: Path) -> Path:
    """The wheel of this checkout."""
    subprocess.run([UV, "build", "-q", "--wheel", "-o", folder, ROOT], check=True)
    return next(folder.glob("*.whl"))


def environment(name: str, built: Path, folder: Path, pinned: bool) -> Path:
    """The folder of commands of a fresh environment with the wheel in it."""
    home = folder / f"venv-{name}"
    subprocess.run([UV, "venv", "-q", "-p", sys.executable, home], check=True)
    what = [str(built)] if name == "base" else [f"{built}[{name}]", "transformers"]
    pins = ["-c", ROOT / "constraints.txt"] if pinned else []
    local = ["--find-links", os.environ["PIP_FIND_LINKS"]] if pinned and os.environ.get("PIP_FIND_LINKS") else []
    subprocess.run([UV, "pip", "install", "-q", "--compile-bytecode", "-p", home, *local, *pins, *what], check=True)
    return home / "bin"


def desk(folder: Path) -> Path:
    """A folder with a newcomer's files: a library, right and wrong, a kernel, a test, a model, two dumps."""
    folder.mkdir()
    for name, weight in (("mylib.py", "w"), ("broken.py", "torch.ones_like(w)")):
        (folder / name).write_text(LIBRARY.replace("WEIGHT", weight))
    for name, text in (("test_mylib.py", TEST), ("kernel.py", KERNEL), ("llama.py", LLAMA)):
        (folder / name).write_text(text)
    for name, dump in (("a", "base_step1"), ("b", "stray_step2")):
        shutil.copy(DUMPS / f"{dump}.hlo.txt.gz", folder / f"{name}.hlo.txt.gz")
    return folder


def walk(steps: tuple[Step, ...], commands: Path, folder: Path) -> list[str]:
    """Take the steps, printing the time of each; what was not as it should be."""
    # Nothing of this checkout and of how tests run here: a newcomer has neither.
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RETROGRAD_", "TRITON_", "PYTEST", "PYTHON"))}
    environ = {**kept, "PATH": os.pathsep.join([str(commands), os.environ["PATH"]])}
    faults: list[str] = []
    for step in steps:
        begin = time.monotonic()
        done = subprocess.run(step.words.split(), cwd=folder, env=environ, capture_output=True, text=True, check=False)
        right = done.returncode == step.code and step.prints in done.stdout + done.stderr
        print(f"  {time.monotonic() - begin:6.1f} s  {'' if right else 'WRONG  '}{step.words}", flush=True)
        if not right:
            wanted = f"expected exit code {step.code} and {step.prints!r}, got {done.returncode}"
            faults.append(f"{step.words}: {wanted}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return faults


def main() -> int:
    """Build, install, walk."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="base,torch,all", help="environments")
    parser.add_argument("--pinned", action="store_true", help="versions of constraints.txt instead of the newest")
    parser.add_argument("--keep", action="store_true", help="leave the environments")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="first-hour-"))
    faults: list[str] = []
    try:
        built = wheel(folder)
        for name in options.only.split(","):
            begin = time.monotonic()
            commands = environment(name, built, folder, options.pinned)
            print(f"{name}: installed in {time.monotonic() - begin:.0f} s", flush=True)
            faults += walk(STEPS[name], commands, desk(folder / name))
    finally:
        if options.keep:
            print(folder)
        else:
            shutil.rmtree(folder)
    print("\n\n".join(faults), file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
