"""Private names of Triton's interpreter: what goes on, what falls back and what refuses where they are not as known."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as module

import retrograd as rg
from retrograd import config
from retrograd.check import memory_accesses
from retrograd.compat import registry, versions
from retrograd.compat.triton_interpreter import launch_cache, memory_hooks, preparation, self_test
from retrograd.compat.triton_interpreter.launch_cache import caching_launches
from retrograd.errors import InterpreterError, RetrogradError

pytestmark = pytest.mark.skipif(not config.interpreting(), reason="kernels are compiled in this process")
PARTS = (preparation.REPAIRS, preparation.SPEED_UPS, launch_cache.LAUNCH_CACHE, memory_hooks.ACCESSES)


@triton.jit
def double_kernel(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(x_ptr + at) * 2.0)


@triton.jit
def between_kernel(out_ptr, low, high, N: tl.constexpr, ASSIGNS: tl.constexpr):
    at = tl.arange(0, N)
    if ASSIGNS:
        inside = low <= at < high
        tl.store(out_ptr + at, tl.where(inside, 1.0, 0.0))
    else:
        tl.store(out_ptr + at, 1.0, mask=low <= at < high)


@triton.jit
def one_bit_kernel(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at) > 0
    tl.store(out_ptr + at, (x + x).to(tl.float32))


@triton.jit
def flag_kernel(x_ptr, out_ptr, flag, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.where(flag, tl.load(x_ptr + at), 0.0))


@triton.jit
def scaled_product_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr, K: tl.constexpr):
    m, k = tl.arange(0, M), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * M + m[None, :])
    tl.store(out_ptr + m[:, None] * M + m[None, :], tl.dot_scaled(a, None, "bf16", b, None, "bf16"))


def doubled() -> list[float]:
    out = torch.zeros(4)
    double_kernel[(1,)](torch.arange(4.0), out, N=4)
    return out.tolist()


def launches(x: torch.Tensor) -> torch.Tensor:
    doubled()
    return x * x


def verify(fn) -> rg.Report:
    return rg.verify(rg.op(fn, lambda x: x * x, dict(x=rg.tensor("M", "N"))), level="quick", only=["oracle"])


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """The interpreter as Triton brings it; no comparison is known, here or from another process."""

    def put_back() -> None:
        for patches in reversed(preparation._state.values()):
            patches.undo()
        preparation._state.clear()
        registry._statuses.clear()
        self_test.known_files.cache_clear()
        module.InterpretedFunction.rewritten_fn.clear()

    put_back()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield
    put_back()
    monkeypatch.undo()
    preparation.prepare()


@pytest.fixture
def unknown(untouched, monkeypatch: pytest.MonkeyPatch) -> None:
    """No function of the interpreter is known by its source, so that probes are compared."""
    monkeypatch.setattr(self_test, "KNOWN_FILES", ())
    monkeypatch.setattr(self_test, "KNOWN", {})


def test_every_part_works_by_its_probes(unknown) -> None:
    preparation.prepare()
    assert {part.id: registry.status(part).difference for part in PARTS} == {part.id: "" for part in PARTS}


def test_the_functions_of_this_version_are_known(untouched, monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(*_):
        raise AssertionError("probes were compared")

    monkeypatch.setattr(self_test, "in_plain_thread", compare)
    preparation.prepare()
    assert registry.status(preparation.SPEED_UPS).state == "works"
    assert registry.status(launch_cache.LAUNCH_CACHE).state == "works"


def test_a_comparison_is_made_once_a_machine(unknown, monkeypatch: pytest.MonkeyPatch) -> None:
    def compare() -> str:
        compared.append(1)
        return "other results of double_kernel"

    compared: list[int] = []
    assert [self_test._kept("speed", compare) for _ in range(2)] == ["other results of double_kernel"] * 2
    assert len(compared) == 1


def test_a_repair_that_cannot_be_made_refuses_kernels_only(unknown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module, "_convert_float")
    assert verify(lambda x: x * x)
    with pytest.raises(InterpreterError, match=r"_convert_float.*run on a GPU without TRITON_INTERPRET"):
        verify(launches)
    with pytest.raises(InterpreterError, match=rf"triton {triton.__version__}"):
        preparation.prepare()


def test_a_repair_that_does_not_help_refuses(unknown, monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts go another way than they did, past the function that is replaced, and truncate."""

    def cast(self, src, dst, *_):
        if dst.scalar == tl.bfloat16:
            return module.TensorHandle((src.data.view("uint32") >> 16).astype("uint16"), dst.scalar)
        return self.cast_impl(src, dst)

    for name in ("create_fp_trunc", "create_fp_to_fp"):
        monkeypatch.setattr(module.InterpreterBuilder, name, cast)
    with pytest.raises(InterpreterError, match="not rounded to the nearest bfloat16"):
        preparation.prepare()


def _renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = module._patch_lang_tensor
    monkeypatch.setattr(module, "_patch_tensor", stock, raising=False)
    source = module._patch_lang.__code__
    names = tuple("_patch_tensor" if name == "_patch_lang_tensor" else name for name in source.co_names)
    monkeypatch.setattr(module._patch_lang, "__code__", source.replace(co_names=names))
    monkeypatch.delattr(module, "_patch_lang_tensor")


def _other_order(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, stock = module.GridExecutor, module.GridExecutor.__init__
    monkeypatch.setattr(executor, "__init__", lambda self, names, fn, grid, hooks: stock(self, fn, names, grid, hooks))

    def run(self, *args, grid, warmup, **kwargs):
        return None if warmup else executor(self.arg_names, self.rewrite(), grid, self.pre_run_hooks)(*args, **kwargs)

    monkeypatch.setattr(module.InterpretedFunction, "run", run)


def _other_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of floating numbers change places, so that x - y is y - x."""
    semantic = type(module.interpreter_semantic)
    stock = semantic.broadcast_impl_value

    def broadcast(self, a, b):
        swapped = all(v.type.is_block() and v.dtype.is_floating() for v in (a, b))
        return stock(self, b, a) if swapped else stock(self, a, b)

    monkeypatch.setattr(semantic, "broadcast_impl_value", broadcast)
    monkeypatch.setattr(self_test, "_differs_from_gpu", lambda: "")


@pytest.mark.parametrize("broken", [_renamed, _other_order, _other_meaning])
def test_a_speed_up_falls_back_with_a_note(unknown, broken, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    preparation.prepare()
    assert registry.status(preparation.REPAIRS).state == "works"
    assert registry.status(preparation.SPEED_UPS).state == "degraded"
    with caching_launches({}):
        assert [doubled(), doubled()] == [[0.0, 2.0, 4.0, 6.0]] * 2
    assert verify(launches)
    assert any("kernels are interpreted by Triton's own code" in each.note for each in registry.statuses())


def test_kept_launches_fall_back_with_a_note(unknown, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads of this interpreter add one, which those made for the cache do not."""
    stock = module.InterpreterBuilder.create_masked_load

    def load(self, *args, **kwargs):
        result = stock(self, *args, **kwargs)
        return module.TensorHandle(result.data + result.data.dtype.type(1), result.dtype)

    monkeypatch.setattr(module.InterpreterBuilder, "create_masked_load", load)
    monkeypatch.setattr(self_test, "_differs_from_gpu", lambda: "")
    with caching_launches({}):
        assert [doubled(), doubled()] == [[2.0, 4.0, 6.0, 8.0]] * 2
    assert registry.status(launch_cache.LAUNCH_CACHE).state == "degraded"
    assert any("every launch is interpreted" in each.note for each in registry.statuses())


def test_addresses_that_cannot_be_watched_are_noted(unknown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module.GridExecutor, "_init_args_hst")
    copy = lambda self, args, kwargs: (list(args), dict(kwargs))  # noqa: E731
    monkeypatch.setattr(module.GridExecutor, "_arguments", copy, raising=False)
    code = module.GridExecutor.__call__.__code__
    names = tuple("_arguments" if name == "_init_args_hst" else name for name in code.co_names)
    monkeypatch.setattr(module.GridExecutor.__call__, "__code__", code.replace(co_names=names))
    with memory_accesses.watch([]) as watched:
        assert doubled() == [0.0, 2.0, 4.0, 6.0]
    assert "_init_args_hst" in watched.missing
    assert watched.missing.endswith("addresses of interpreted kernels were not checked")


def test_an_unknown_function_of_an_untested_version_is_left_alone(unknown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "is_newer", lambda package, version=None: package == "triton")
    versions.note_if_newer.cache_clear()
    with pytest.warns(versions.UntestedVersionWarning):
        preparation.prepare()
    assert "_patch_lang" in registry.status(preparation.SPEED_UPS).difference
    assert doubled() == [0.0, 2.0, 4.0, 6.0]


def test_loops_that_this_pair_of_versions_cannot_run_are_refused(untouched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr("numpy.__version__", "2.4.0")
    assert verify(lambda x: x * x)
    with pytest.raises(InterpreterError, match=r"3\.6\.0.*NumPy 2\.4\.0.*triton>=3\.7"):
        verify(launches)


def test_nothing_is_patched_without_the_interpreter(untouched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    preparation.prepare()
    assert not preparation._state


@pytest.mark.parametrize("assigns", [False, True], ids=["mask", "assignment"])
def test_chained_comparisons_are_right_or_refused(assigns: bool) -> None:
    """`low <= at < high` computed as `at < high` writes rows that nobody asked for."""
    preparation.prepare()
    out = torch.zeros(8)
    if hasattr(module.ASTTransformer, "visit_Compare"):
        for _ in range(2):
            between_kernel[(1,)](out, 2, 5, N=8, ASSIGNS=assigns)
            assert out.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
        return
    with pytest.raises(Exception, match=r"test_interpreter_parts\.py:\d+ is chained \(a < b < c\)"):
        between_kernel[(1,)](out, 2, 5, N=8, ASSIGNS=assigns)
    assert out.tolist() == [0.0] * 8


def test_one_bit_wraps_the_same_at_every_launch() -> None:
    """On Triton 3.9 one bit and one bit are none; a replayed program added without wrapping."""
    outputs = []
    with caching_launches({}):
        for seed in range(4):
            x, out = torch.tensor([1.0, -1.0, 1.0, -1.0]) * (seed + 1), torch.zeros(4)
            one_bit_kernel[(1,)](x, out, N=4)
            outputs.append(out.tolist())
    wraps = versions.minor(triton.__version__) >= (3, 9)
    assert outputs == [[0.0 if wraps else 1.0, 0.0] * 2] * 4


@pytest.mark.skipif(
    versions.minor(triton.__version__) < (3, 9), reason="before 3.9 Triton's interpreter takes no flags as arguments"
)
def test_a_flag_means_the_same_at_every_launch() -> None:
    with caching_launches({}):
        for seed in range(1, 4):
            for flag in (True, False):
                out = torch.ones(4)
                flag_kernel[(1,)](torch.full((4,), float(seed)), out, flag, N=4)
                assert out.tolist() == [float(seed) * flag] * 4


@pytest.mark.skipif(
    not hasattr(module.InterpreterBuilder, "create_dot_scaled"), reason="this Triton interprets no scaled products"
)
def test_scaled_products_of_bfloat16_are_no_float16() -> None:
    """2^17 is infinite in float16, and infinite times zero is NaN."""
    preparation.prepare()
    a, b = torch.zeros(16, 64, dtype=torch.bfloat16), torch.zeros(64, 16, dtype=torch.bfloat16)
    a[:, 0], b[0], a[:, 1] = 2.0**17, 1.0, 2.0**-30
    b[1] = 2.0**30
    out = torch.empty(16, 16)
    scaled_product_kernel[(1,)](a, b, out, M=16, K=64)
    assert out.tolist() == [[2.0**17 + 1.0] * 16] * 16


def test_a_late_switch_is_refused(untouched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tl, "sum", lambda *_: None)
    with pytest.raises(RetrogradError, match="set after triton had been imported"):
        preparation.prepare()
