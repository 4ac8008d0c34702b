"""`retrograd demo` and `retrograd init`: what a newcomer runs first, and that what is written runs as it stands."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from retrograd.catalog import resolve
from retrograd.catalog.proposal import propose
from retrograd.check.runner import verify
from retrograd.cli import main
from retrograd.errors import SpecError, UndecidedError, UsageError

ROOT = Path(__file__).resolve().parents[2]
NODE = re.search(
    r"^```python\n(# my_op.py\n.*?)^def rms_norm", (ROOT / "docs" / "quickstart.md").read_text(), re.M | re.S
)[1]
FUNCTION = "def rms_norm(x, w, eps=1e-6):\n    return RmsNorm.apply(x, w, eps)\n"
REFERENCE = "def rms_norm_ref(x, w, eps=1e-6):\n    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w\n"
MODULE = """
import torch
class Scale(torch.nn.Module):
    def __init__(self, features, eps=1e-5):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(features))
    def forward(self, x):
        return x * self.weight
def reference(x, weight):
    return x * weight
"""
TRITON = """
import torch, triton, triton.language as tl
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=inside) + tl.load(y_ptr + at, mask=inside), mask=inside)
def add(x, y):
    assert x.shape == y.shape
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 64),)](x, y, out, x.numel(), BLOCK=64)
    return out
"""


ON_GPU = """
import torch
class Scale(torch.nn.Module):
    def __init__(self, features, size=1):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(features, device="cuda"))
    def forward(self, x):
        return x * self.weight
class Torn(torch.nn.Module):
    def __init__(self, features):
        raise ValueError(f"not {features}")
"""
OPERATOR = """
import torch
@torch.library.custom_op("init_test::scaled", mutates_args=())
def scaled(x: torch.Tensor, w: torch.Tensor, factor: float, rows: int = 0) -> torch.Tensor:
    assert x.shape[-1:] == w.shape
    return x * w * factor
scaled.register_autograd(
    lambda ctx, grad: (grad * ctx.w * ctx.factor, None, None, None),
    setup_context=lambda ctx, inputs, output: (setattr(ctx, "w", inputs[1]), setattr(ctx, "factor", inputs[2])),
)
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "mylib_of_this_test.py") -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        sys.modules.pop(Path(name).stem, None)
        return name

    return write


def _dims(target: str):
    proposal, _ = propose(target)
    return proposal.op.call, proposal.reference, proposal.fit.inputs, proposal.op.params


def test_functions_nodes_modules_and_launchers_are_read(write) -> None:
    rows = dict(x=("M...", "N"), w=("N",))
    eps = dict(eps=1e-6)
    assert _dims(write(NODE + FUNCTION)) == ("rms_norm", "", rows, eps)
    assert _dims(write(NODE + FUNCTION + REFERENCE)) == ("rms_norm", "rms_norm_ref", rows, eps)
    assert _dims(write(NODE)) == ("rmsnorm", "", rows, eps)
    assert _dims(write(MODULE)) == ("Scale(16)", "reference", dict(x=("M...", 16)), {})
    assert _dims(write("def matmul(a, b):\n    return a @ b\n")) == (
        "matmul",
        "",
        dict(a=("M...", "N"), b=("N", "K")),
        {},
    )
    # One that takes something else is no reference.
    assert _dims(write(NODE + FUNCTION + "def reference(x):\n    return x\n"))[1] == ""


def test_a_kernel_is_no_op_and_one_that_does_not_compile_says_why(write) -> None:
    pytest.importorskip("triton", reason="needs triton, which is for Linux")
    with pytest.raises(UsageError, match="'add_kernel' is a Triton kernel, expected the function that launches it"):
        propose(f"{write(TRITON)}:add_kernel")
    with pytest.raises(UndecidedError, match=r"CompilationError: at \d+:\d+: .*has no attribute 'laod'"):
        propose(write(TRITON.replace("tl.load(x_ptr", "tl.laod(x_ptr")))


def test_a_launcher_of_triton_kernels(write) -> None:
    pytest.importorskip("triton", reason="needs triton, which is for Linux")
    name = write(TRITON + "def add_ref(x, y):\n    return x + y\n")
    assert _dims(name) == ("add", "add_ref", dict(x=("M...", "N"), y=("M...", "N")), {})
    assert CliRunner().invoke(main, ["init", name]).exit_code == 0
    # It has no backward, and is not accused of that.
    report = verify(resolve("mylib_of_this_test_spec.py"), level="quick", only=["contract", "bounds", "oracle"])
    assert (report.verdict, report.findings) == ("proved", ())


@pytest.mark.parametrize("text", [NODE + FUNCTION + REFERENCE, NODE, MODULE])
def test_what_is_written_runs_and_is_not_written_over(text, write) -> None:
    name = write(text)
    done = CliRunner().invoke(main, ["init", name])
    assert done.exit_code == 0, done.output
    assert "next:  retrograd verify mylib_of_this_test_spec.py" in done.output
    report = verify(resolve("mylib_of_this_test_spec.py"), level="quick", only=["contract", "oracle"])
    assert report.verdict == ("finding" if REFERENCE in text else "proved")
    again = CliRunner().invoke(main, ["init", name])
    assert (again.exit_code, "is there already" in again.output) == (2, True)
    printed = CliRunner().invoke(main, ["init", name, "-o", "-"])
    assert printed.output == Path("mylib_of_this_test_spec.py").read_text()


def test_a_file_in_a_package_is_imported_from_above(write) -> None:
    write("", "pack_of_this_test/__init__.py")
    write("SCALE = 2.0\n", "pack_of_this_test/other.py")
    name = write("from .other import SCALE\n\ndef double(x):\n    return SCALE * x\n", "pack_of_this_test/op.py")
    assert CliRunner().invoke(main, ["init", name]).exit_code == 0
    assert resolve("op_spec.py").name == "double"


def test_a_checkout_that_nobody_has_installed_is_read_from_elsewhere(write, tmp_path, monkeypatch) -> None:
    write("", "far_of_this_test/__init__.py")
    write("SCALE = 2.0\n", "far_of_this_test/other.py")
    name = Path(write("from far_of_this_test.other import SCALE\n\ndef double(x):\n    return SCALE * x\n",
                      "far_of_this_test/op.py")).resolve()  # fmt: skip
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert propose(str(name))[0].module == "far_of_this_test.op"


def test_what_cannot_be_proposed_is_said(write) -> None:
    two = write(NODE + FUNCTION + "def other(x):\n    return RmsNorm.apply(x, x[0], 1e-6)\n")
    with pytest.raises(
        UsageError, match=r"has the ops rms_norm, other; name the one that is meant, as mylib_of_this_test.py:rms_norm$"
    ):
        propose(two)
    assert propose(f"{two}:other")[0].op.name == "other"
    with pytest.raises(UsageError, match="has no 'rms_nrom'; did you mean 'rms_norm'"):
        propose(f"{two}:rms_nrom")
    with pytest.raises(UsageError, match="has no op"):
        propose(write("X = 1\n"))
    with pytest.raises(UndecidedError, match=r"ran with none of 6 .*the plainest was x \[M, N\]: ValueError: never"):
        propose(write("def f(x):\n    raise ValueError('never')\n"))
    both = "def f(\n    x,  # [M, N]\n    w,  # [K]\n):\n    assert x.shape[1] == len(w), 'unlike'\n"
    with pytest.raises(UndecidedError, match=r"documented: AssertionError: unlike; with all of 16: ValueError: never"):
        propose(write(both + "    raise ValueError('never')\n"))
    with pytest.raises(SpecError, match=r"mylib_of_this_test\.py:1: ZeroDivisionError"):
        propose(write("1 / 0\n"))


def test_the_demo_finds_what_its_test_lets_through(tmp_path: Path) -> None:
    page = tmp_path / "page.json"
    done = CliRunner().invoke(main, ["demo", "-o", str(page)])
    assert done.exit_code == 0, done.output
    assert "rtol=1e-2): passes" in done.output
    assert "like   computed with ones instead of w" in done.output
    assert page.exists()


def test_what_takes_anything_is_read_where_it_is_written(write) -> None:
    rows = dict(x=("M...", "N"), w=("N",))
    bound = write(NODE + "rms_norm = RmsNorm.apply\n")
    assert _dims(f"{bound}:rms_norm") == ("rms_norm_op", "", rows, dict(eps=1e-6))
    assert "    return rms_norm(x, w, eps)\n" in propose(f"{bound}:rms_norm")[0].text()
    assert _dims(f"{write(OPERATOR)}:scaled") == ("scaled", "", rows, dict(factor=1.0))


def test_a_module_may_make_its_parameters_on_a_gpu(write) -> None:
    pytest.importorskip("triton")
    assert _dims(f"{write(ON_GPU)}:Scale") == ("Scale(16)", "", dict(x=("M...", 16)), {})
    with pytest.raises(SpecError, match=r"mylib_of_this_test.py:11: ValueError: not 16"):
        propose(f"{write(ON_GPU)}:Torn")


WORDS = """
import torch
class Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return q @ k.mT @ v
def attend(q, k, v, scale=None):
    \"\"\"Attention.

    Args:
        q (torch.Tensor):
            queries of shape `[B, HQ, T, K]`
        k: keys, shape (B, H, S, K)
        v (Optional[Tensor]): [B, H, S, V]

    Returns:
        [B, HQ, T, V]
    \"\"\"
    assert q.dim() == 4 and q.shape[1] % k.shape[1] == 0 and k.dtype != torch.float32
    many = q.shape[1] // k.shape[1]
    return Attend.apply(q, k.repeat_interleave(many, 1), v.repeat_interleave(many, 1))
def heads(
    x,  # [B, T, D]
    cos,  # (T, D // 2)
    *,
    flag=False,  # (unused)
):
    assert x.shape[1:] == (len(cos), 2 * cos.shape[1]) and x.shape[-1] % 16 == 0
    return x * torch.cat([cos, cos], -1)
def loss(logits, target):
    assert target.dtype == torch.int64 and logits.dim() == 2
    return torch.nn.functional.cross_entropy(logits, target)
"""


def test_shapes_are_those_that_an_op_says_itself(write) -> None:
    """fla's chunk_gla ran with none of 500 combinations, and chunk_retention with a v that its kernels left."""
    name = write(WORDS)
    attend, heads, loss = (propose(f"{name}:{op}")[0] for op in ("attend", "heads", "loss"))
    kv = dict(k=("B", "H", "S", "K"), v=("B", "H", "S", "V"))
    assert (attend.fit.inputs, attend.fit.dtype) == (dict(q=("B", "2*H", "T", "K"), **kv), "float16")
    assert heads.fit.inputs == dict(x=("B", "T", "D"), cos=("T", "D//2"))
    assert heads.fit.even == ("D",)
    assert "    sizes=dict(D=[16, 32]),\n" in heads.text()
    assert '        target=rg.tensor("M", dtype="int64", high="N"),\n' in loss.text()


def test_shapes_with_which_kernels_leave_their_tensors_are_not_proposed(write) -> None:
    pytest.importorskip("triton", reason="needs triton, which is for Linux")
    name = write(TRITON.replace("    assert x.shape == y.shape\n", ""))
    assert _dims(name)[2] == dict(x=("M...", "N"), y=("M...", "N"))
    # As good as the first combination, which reads behind y, and of which a result has the right shape.
    long = write(
        TRITON.replace("    assert x.shape == y.shape\n", "    assert y.dim() == 1\n"), "another_of_this_test.py"
    )
    assert _dims(long)[2] == dict(x=("N",), y=("N",))
