"""The C++ norms against their definition in float64, held to the error of rounding the exact result once.

Widths: 1 is a degenerate row, 63 to 65 end inside and at a vector, 129 adds a tail to whole unrolled steps. Rows: 1, 7
and 37 leave a partial group of four; 600 rows fill all 64 shares of a weight gradient.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import extensions
import pytest
import torch

from retrograd.errors import NativeBuildError
from retrograd.ops.norm import cpu
from retrograd.ops.norm.arguments import BackwardTensors, NormTensors, WantedGrads, WantedOutput
from retrograd.ops.norm.cpu import norm_bwd, norm_fwd
from retrograd.ops.norm.spec import NormSpec
from retrograd.runtime.cpp import build

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SOURCE = Path(cpu.__file__).with_name("norm.cpp")
# Correct rounding has ratio 1. The rest is room for float32 statistics of 16-bit rows (y, grad_x) and for sums of
# rows in float32 (grad_weight, grad_bias).
ROOM = {"y": 1.1, "grad_x": 1.1, "grad_residual": 1.1, "grad_weight": 1.25, "grad_bias": 1.25}

NO_COMPILER = extensions.why_no_compiler()
pytestmark = pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exact(s, weight, bias, grad_out, grad_s, spec, heads):
    """Results in float64 by autograd over the definition; s is what is normalised."""
    m, n = s.shape
    s = s.double().requires_grad_()
    weight = None if weight is None else weight.float() + spec.weight_offset  # defined as a float32 sum
    vectors = [None if v is None else v.double().expand(heads, n).clone().requires_grad_() for v in (weight, bias)]
    d = (s - s.mean(-1, keepdim=True) if spec.centered else s).view(-1, heads, n)
    y = d * torch.rsqrt(d.square().mean(-1, keepdim=True) + spec.eps)
    if weight is not None:
        y = y * vectors[0]
    y = (y + vectors[1] if bias is not None else y).view(m, n)
    loss = (y * grad_out.double()).sum() + (0 if grad_s is None else (s * grad_s.double()).sum())
    loss.backward()
    return {
        "y": y.detach(),
        "grad_x": s.grad,
        "grad_residual": s.grad,
        "grad_weight": None if weight is None else vectors[0].grad,
        "grad_bias": None if bias is None else vectors[1].grad,
    }


def assert_at_floor(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    want = want.reshape(got.shape)
    floor = (want.to(got.dtype).double() - want).norm()
    error = (got.double() - want).norm()
    # An exactly representable truth has floor 0: then one float64 rounding is left.
    assert error <= ROOM[name] * floor + 1e-15 * want.norm(), f"{name}: {error / floor:.3f} times the rounding floor"


def check(x, weight=None, bias=None, residual=None, *, spec, out=None, stream=None, with_grad_s=True):
    """Forward and backward of one case, each result at its floor."""
    out, stream = out or x.dtype, stream or x.dtype
    heads = max(v.shape[0] if v is not None and v.dim() == 2 else 1 for v in (weight, bias))
    y, s, mean, rstd = norm_fwd(
        NormTensors(x, weight, bias, residual), spec, WantedOutput(out_dtype=out, s_dtype=stream)
    )
    if residual is not None or stream != x.dtype:
        total = x.float() if residual is None else x.float() + residual.float()
        assert torch.equal(s, total.to(stream))
    else:
        assert s is None
        s = x
    grad_out = (s.double() + 0.5 * normal(*x.shape, seed=9)).to(out)
    grad_s = normal(*x.shape, seed=8).to(stream) if with_grad_s else None
    tensors = dict(x=x, weight=weight, bias=bias, residual=residual)
    dtypes = {name: None if t is None else t.dtype for name, t in tensors.items()}
    saved = BackwardTensors(grad_out, s, weight, mean, rstd, grad_s)
    grads = norm_bwd(saved, spec, WantedGrads(**dtypes, heads=heads))
    got = {f"grad_{name}": grad for name, grad in grads._asdict().items()} | {"y": y}
    want = exact(s, weight, bias, grad_out, grad_s, spec, heads)
    for (name, tensor), dtype in zip(got.items(), [*dtypes.values(), out], strict=True):
        assert (tensor is None) == (dtype is None), name
        if tensor is not None:
            assert tensor.dtype == dtype
            assert_at_floor(name, tensor, want[name])
    if residual is not None and residual.dtype == x.dtype:
        assert got["grad_x"] is got["grad_residual"]
    assert (mean is None) == (not spec.centered)
    return got


@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 129])
@pytest.mark.parametrize("m", [1, 7, 37, 600])
def test_shapes(m, n, centered):
    spec = NormSpec(centered, 1e-5)
    for dtype in DTYPES:
        x, residual = normal(m, n).to(dtype), normal(m, n, seed=1).to(dtype)
        weight, bias = (1 + 0.2 * normal(n, seed=2)).to(dtype), normal(n, seed=3).to(dtype)
        if not (centered and n == 1):  # s - mean is 0: the truth of grad_x is 0 and has no relative error
            check(x, weight, bias, residual, spec=spec)


@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
def test_every_mix_of_dtypes(x_dtype, centered):
    m, n = 16, 133
    for residual, vector, out, stream in itertools.product((None, *DTYPES), (None, *DTYPES), DTYPES, DTYPES):
        check(
            normal(m, n).to(x_dtype),
            None if vector is None else (1 + 0.2 * normal(n, seed=2)).to(vector),
            None if vector is None else normal(n, seed=3).to(vector),
            None if residual is None else normal(m, n, seed=1).to(residual),
            spec=NormSpec(centered, 1e-6),
            out=out,
            stream=stream,
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_offset_and_lonely_vectors(dtype):
    x, weight, bias = normal(60, 33).to(dtype), 0.2 * normal(4, 33, seed=2).to(dtype), normal(4, 33, seed=3).to(dtype)
    for spec in (NormSpec(False, 1e-6, weight_offset=1.0), NormSpec(True, 1e-6, weight_offset=1.0)):
        check(x, weight, bias, spec=spec)
        check(x, weight, None, spec=spec)
        check(x, None, bias, spec=spec, with_grad_s=False)
        check(x, weight[0], bias[:1], spec=spec)


def test_large_mean_does_not_cancel():
    # E[s^2] - mean^2 of such float32 rows loses every digit; the rounding of grad_out and s is in the truth too.
    check(1e4 + normal(8, 512).float(), spec=NormSpec(True, 1e-6))


def backward_of_ones(dtype=torch.float32, m=333, n=1029, **options):
    x, grad = normal(m, n).to(dtype), normal(m, n, seed=1).to(dtype)
    weight = (1 + 0.1 * normal(n, seed=2)).to(dtype)
    spec = options.pop("spec", NormSpec(True, 1e-6))
    y, _, mean, rstd = norm_fwd(
        NormTensors(x=x, weight=weight, bias=weight), spec, WantedOutput(out_dtype=dtype, s_dtype=dtype)
    )
    wanted = WantedGrads(**({"x": dtype, "weight": dtype, "bias": dtype} | options))
    saved = BackwardTensors(grad_out=grad, s=x, weight=weight, mean=mean, rstd=rstd)
    return [y, mean, rstd, *norm_bwd(saved, spec, wanted)]


def bits(tensors):
    return [None if t is None else t.clone() for t in tensors]


def same(first, second):
    return all(a is b if a is None else torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parts", [None, 1, 5, 1000])
def test_threads_do_not_change_bits(dtype, parts):
    spec, before = NormSpec(True, 1e-6, parts=parts), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(bits(backward_of_ones(dtype, spec=spec)))
    finally:
        torch.set_num_threads(before)
    assert same(found[0], found[1])
    assert same(found[0], found[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_batch(dtype):
    n, spec = 517, NormSpec(True, 1e-6)
    x, grad, weight = normal(70, n).to(dtype), normal(70, n, seed=1).to(dtype), normal(n, seed=2).to(dtype)

    def run(rows):
        tensors = NormTensors(x=x[rows], weight=weight)
        y, _, mean, rstd = norm_fwd(tensors, spec, WantedOutput(out_dtype=dtype, s_dtype=dtype))
        saved = BackwardTensors(grad_out=grad[rows], s=x[rows], weight=weight, mean=mean, rstd=rstd)
        return y, norm_bwd(saved, spec, WantedGrads(x=dtype, weight=dtype)).x

    whole = run(slice(None))
    for rows in (slice(0, 1), slice(3, 5), slice(62, 70)):
        assert same([t[rows] for t in whole], run(rows))


def test_frozen_arguments_change_no_other_gradient():
    every = backward_of_ones()
    for index, name in ((3, "x"), (4, "weight"), (5, "bias")):
        got = backward_of_ones(**{name: None})
        assert got[index] is None
        assert same([t for i, t in enumerate(got) if i != index], [t for i, t in enumerate(every) if i != index])


def test_added_to_main_grad():
    plain = backward_of_ones(torch.bfloat16, weight=torch.float32, bias=torch.float32)
    into = [torch.full((1029,), 2.0), torch.full((1029,), 2.0)]
    got = backward_of_ones(
        torch.bfloat16, weight=torch.bfloat16, bias=torch.bfloat16, into_weight=into[0], into_bias=into[1]
    )
    assert got[4] is None
    assert got[5] is None
    # One more rounding, of the sum with what was there.
    for total, gradient in zip(into, plain[4:6], strict=True):
        assert ((total.double() - 2 - gradient.double()).abs() <= 2.0**-23 * (2 + gradient.double().abs())).all()


def test_strided_and_expanded_rows():
    spec, wanted = NormSpec(True, 1e-6), WantedGrads(x=torch.float32, weight=torch.float32, bias=torch.float32)
    wide, flipped = normal(9, 300).float(), normal(130, 9).float().T
    for x in (wide[:, 7:137], flipped, wide[:1, :130].expand(9, 130)):
        for grad in (
            normal(9, 260).float()[:, ::2],
            normal(1, 130).float().expand(9, 130),
            torch.ones(()).expand(9, 130),
        ):
            found = []
            for a, g in ((x, grad), (x.contiguous(), grad.contiguous())):
                y, _, mean, rstd = norm_fwd(NormTensors(x=a), spec, WantedOutput(out_dtype=a.dtype, s_dtype=a.dtype))
                saved = BackwardTensors(grad_out=g, s=a, weight=None, mean=mean, rstd=rstd)
                found.append([y, *norm_bwd(saved, spec, wanted)])
            assert same(*found)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)], ids=str)
def test_empty(shape):
    x, spec = torch.ones(shape), NormSpec(True, 0.25)
    weight = torch.ones(shape[1])
    tensors = NormTensors(x=x, weight=weight, bias=weight, residual=x)
    y, s, mean, rstd = norm_fwd(tensors, spec, WantedOutput(out_dtype=torch.float16, s_dtype=torch.bfloat16))
    assert (y.shape, s.shape, y.dtype, s.dtype) == (shape, shape, torch.float16, torch.bfloat16)
    assert torch.equal(rstd, torch.full((shape[0],), 2.0))
    wanted = WantedGrads(x=torch.float32, weight=torch.float32, residual=torch.bfloat16)
    saved = BackwardTensors(grad_out=y, s=s, weight=weight, mean=mean, rstd=rstd)
    grads = norm_bwd(saved, spec, wanted)
    assert grads.x.shape == grads.residual.shape == shape
    assert torch.equal(grads.weight, torch.zeros(shape[1]))
    assert grads.bias is None


def test_nan_and_infinity_stay_in_their_row():
    for dtype in DTYPES:
        x = normal(5, 77).to(dtype)
        x[1, 3], x[2, 70] = float("nan"), float("inf")
        y = norm_fwd(NormTensors(x=x), NormSpec(False, 1e-6), WantedOutput(out_dtype=dtype, s_dtype=dtype))[0]
        assert y[1].isnan().all()
        assert y[2, 70].isnan()
        assert y[[0, 3, 4]].isfinite().all()


@pytest.mark.parametrize("flags", [(), ("-mno-f16c",)], ids=["native", "no-f16c"])
def test_conversions_are_those_of_torch(flags, monkeypatch):
    if flags and "avx" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("-mno-f16c is a flag for x86")
    library = build.load(SOURCE, build.FLAGS + flags)
    monkeypatch.setattr(build, "load", lambda source: library)
    # Every 16-bit pattern, and float32 values around each float16 step: ties, subnormals, overflow, NaN.
    halves = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    steps = halves.view(torch.float16).float()
    near = torch.cat([steps, (steps * (1 + 2.0**-11)).nan_to_num(3.0), steps * 0.99997, steps * 1e-3, steps * 1e30])
    for source in (halves.view(torch.float16)[None], halves.view(torch.bfloat16)[None], near[None]):
        for dtype in DTYPES:
            if dtype == source.dtype:
                continue
            s = norm_fwd(NormTensors(x=source), NormSpec(False, 0.0), WantedOutput(out_dtype=dtype, s_dtype=dtype))[1]
            assert torch.equal(s.nan_to_num(12.5), source.to(dtype).nan_to_num(12.5))
            assert torch.equal(s.isnan(), source.isnan())


def test_float64_is_refused():
    x = torch.ones(2, 3, dtype=torch.float64)
    with pytest.raises(TypeError, match="float64, expected float32"):
        norm_fwd(NormTensors(x=x), NormSpec(False, 1e-6), WantedOutput(out_dtype=torch.float32, s_dtype=torch.float32))


def test_denormals_survive_loading_and_running():
    code = (
        "import torch; from retrograd.ops.norm.cpu import *; from retrograd.ops.norm.spec import NormSpec; "
        "from retrograd.ops.norm.arguments import NormTensors, WantedOutput; "
        "norm_fwd(NormTensors(x=torch.ones(64, 1024)), NormSpec(False, 0.), WantedOutput(out_dtype=torch.float32, "
        "s_dtype=torch.float32)); print((torch.full((99999,), 1e-40) * 1 > 0).all().item(), 1e-310 * 1 > 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


# ---- building -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A source that compiles in no time, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    source = tmp_path / "tiny.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    return source


def load_again(source, flags=build.FLAGS):
    return build.load.__wrapped__(source, flags)


def test_cache_keeps_one_library_per_source_and_flags(tiny, tmp_path):
    def libraries():
        return sorted((tmp_path / "cache").rglob("*.so"))

    assert load_again(tiny).answer() == 42
    (first,) = libraries()
    written = first.stat().st_mtime_ns
    assert load_again(tiny).answer() == 42
    assert first.stat().st_mtime_ns == written
    load_again(tiny, (*build.FLAGS, "-DOTHER"))
    tiny.write_text(tiny.read_text().replace("42", "43"))
    assert load_again(tiny).answer() == 43
    assert len(libraries()) == 3
    assert [p for p in first.parent.iterdir() if p.suffix != ".so"] == []


def test_processes_may_build_at_once(tiny):
    code = (
        f"from pathlib import Path; from retrograd.runtime.cpp import build; "
        f"print(build.load(Path({str(tiny)!r})).answer())"
    )
    command = [sys.executable, "-c", code]
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: subprocess.run(command, capture_output=True, text=True, check=True), range(4)))
    assert [p.stdout.strip() for p in done] == ["42"] * 4


def test_no_compiler_says_so(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeBuildError, match=r"no C\+\+ compiler found on PATH .*install one, for example g\+\+"):
        load_again(tiny)
    monkeypatch.setenv("CXX", "no-such-compiler -v")
    with pytest.raises(NativeBuildError, match="CXX is 'no-such-compiler -v', which is not a program on PATH"):
        load_again(tiny)
    build.why_not.cache_clear()
    build.load.cache_clear()
    try:
        assert cpu.why_not() is not None
        assert "no-such-compiler" in cpu.why_not()
    finally:
        build.why_not.cache_clear()


def test_broken_compiler_and_broken_source_say_so(tiny, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(NativeBuildError, match=r"tiny.cpp does not compile \(exit code 1\); set CXX to another"):
        load_again(tiny)
    monkeypatch.delenv("CXX")
    tiny.write_text("int main( {")
    with pytest.raises(NativeBuildError, match=r"command: .*\n.*tiny.cpp:1"):
        load_again(tiny)


def test_unwritable_cache_builds_elsewhere(tiny, monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert load_again(tiny).answer() == 42
