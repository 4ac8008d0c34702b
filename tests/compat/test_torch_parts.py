"""Parts of torch outside of c10d and FSDP2: each works here, and each notices names that are gone or mean otherwise."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from retrograd.compat import (
    registry,
    torch_autograd,
    torch_cuda,
    torch_ddp,
    torch_dispatch,
    torch_dynamo,
    torch_native,
    torch_tensors,
    torch_testing,
)
from retrograd.errors import UnsupportedVersionError

pytestmark = pytest.mark.usefixtures("untested_parts")

PARTS = [
    torch_autograd.BACKWARD, torch_autograd.NODES, torch_cuda.STREAM, torch_cuda.SLEEP, torch_ddp.PART,
    torch_dispatch.WATCHED, torch_dispatch.WITHOUT_MODES, torch_dispatch.RESOLVING, torch_dispatch.FUNCTORCH, torch_dispatch.SUBCLASSES,
    torch_dispatch.DECOMPOSITIONS, torch_dispatch.TAPE, torch_dynamo.CALLBACKS, torch_dynamo.COMPILED_AUTOGRAD,
    torch_tensors.PART, torch_testing.PART,
]  # fmt: skip


@pytest.fixture(autouse=True)
def dynamo_is_loaded() -> None:
    import torch._dynamo.callback
    import torch._dynamo.compiled_autograd  # noqa: F401


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.id)
def test_this_torch_behaves_as_known(part):
    assert registry.status(part).difference == ""


def test_whether_torch_runs_its_own_cutedsl(monkeypatch):
    utils = pytest.importorskip("torch._native.cutedsl_utils", reason="torch has it since 2.12")
    assert registry.status(torch_native.CUTEDSL).difference == ""
    for name, stand_in in (("runtime_available", True), ("runtime_version", "4.9"), ("_version_is_ok", False)):
        monkeypatch.setattr(utils, name, lambda stand_in=stand_in: stand_in)
    assert torch_native.why_not_cutedsl() == "this torch does not take nvidia-cutlass-dsl 4.9"
    monkeypatch.setattr(utils, "_version_is_ok", lambda: True)
    assert torch_native.why_not_cutedsl() == ""
    monkeypatch.setenv("TORCH_DISABLE_NATIVE_JIT", "1")
    assert "TORCH_DISABLE_NATIVE_JIT" in torch_native.why_not_cutedsl()


def test_a_torch_that_asks_for_cutedsl_otherwise_is_noticed(monkeypatch):
    utils = pytest.importorskip("torch._native.cutedsl_utils", reason="torch has it since 2.12")
    monkeypatch.delattr(utils, "runtime_version")
    assert registry.status(torch_native.CUTEDSL).state == "degraded"
    assert "AttributeError" in torch_native.why_not_cutedsl()


@pytest.mark.parametrize("part", [torch_autograd.NODES, torch_dispatch.WATCHED, torch_tensors.PART], ids=lambda p: p.id)
def test_who_asks_first_may_be_inside_a_mode_or_inference(part):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.inference_mode(), FakeTensorMode():
        assert registry.status(part).difference == ""


# part, owner and name of what is replaced, its stand-in (None: gone), what the self-test says
BROKEN = [
    (torch_autograd.BACKWARD, torch._C, "_current_graph_task_id", None, "AttributeError"),
    (torch_autograd.BACKWARD, torch._C, "_current_graph_task_id", lambda: 7, "seems to run where none does"),
    (torch_autograd.NODES, torch._C, "_current_autograd_node", lambda: None, "AttributeError"),
    (torch_autograd.NODES, torch.autograd, "_get_sequence_nr", lambda: 7, "was the last given out"),
    (torch_ddp.PART, torch.nn.parallel.DistributedDataParallel, "_get_ddp_logging_data", lambda self: {}, "it has"),
    (torch_dispatch.WATCHED, torch._C, "_len_torch_dispatch_stack", lambda: 0, "not noticed"),
    (torch_dispatch.WATCHED, torch._C, "_dispatch_tls_is_dispatch_key_included", None, "AttributeError"),
    (torch_dispatch.FUNCTORCH, torch._C._functorch, "is_functorch_wrapped_tensor", lambda t: False, "vmap wraps"),
    (torch_dispatch.RESOLVING, torch._C, "_ForceDispatchKeyGuard", None, "AttributeError"),
    (torch_dispatch.RESOLVING, torch._C, "_ForceDispatchKeyGuard", lambda *_: nullcontext(), "pseudoinverse"),
    (torch_dispatch.TAPE, torch._C, "_dispatch_has_backend_fallback", lambda key: True, "fake tensors in C"),
    (torch_tensors.PART, torch.Tensor, "_is_zerotensor", lambda t: False, "not told apart"),
    (torch_tensors.PART, torch.Tensor, "_values", lambda t: t.indices(), "not the elements"),
    (
        torch_testing.PART,
        torch.testing._comparison.TensorLikePair,
        "_compare_regular_values_close",
        None,
        "AttributeError",
    ),
]


@pytest.mark.parametrize(
    ("part", "owner", "name", "stand_in", "difference"), BROKEN, ids=lambda v: getattr(v, "id", "")
)
def test_another_torch_is_noticed(monkeypatch, part, owner, name, stand_in, difference):
    # a tape that an earlier test of this process loaded holds the key itself, which is no other torch
    monkeypatch.delitem(sys.modules, "retrograd_trace_tape", raising=False)
    if stand_in is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, stand_in)
    status = registry.status(part)
    assert status.state == ("refused" if part.refuses else "degraded")
    with pytest.raises(UnsupportedVersionError, match=difference) as caught:
        registry.require(part)
    assert part.otherwise in str(caught.value)


@pytest.fixture
def nothing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in PARTS:
        monkeypatch.setitem(registry._statuses, part.id, registry.Status(part, "degraded", "renamed"))


def test_what_asks_goes_on_without(nothing_works):
    assert (torch_autograd.running_node(), torch_autograd.last_node_number()) == (None, -1)
    assert torch_dispatch.decompositions(["silu"]) == {}
    assert not torch_dispatch.is_functorch_wrapped(torch.ones(1))
    with torch_dynamo.while_compiling(lambda quiet: None):
        assert torch_dynamo.compiles_backward() is False
    torch_testing.watch_comparisons(lambda *facts: pytest.fail("a comparison was noted"))
    torch.testing.assert_close(1.0, 1.0)
    model = SimpleNamespace(module=torch.nn.Linear(2, 2))
    assert torch_ddp.bucket_orders(model) == ([[1, 0]], False)


def test_second_derivatives_are_refused_where_modes_cannot_be_left(nothing_works):
    with pytest.raises(UnsupportedVersionError, match="--skip"):
        torch_dispatch.without_modes()


def printed(program: str) -> list[str]:
    """The words that a process of its own prints."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()


def test_operators_are_taken_apart_without_dynamo():
    """Which takes 0.9 s to import, for a softplus as for a logsumexp."""
    program = (
        "import sys, torch; from retrograd.compat.torch_dispatch import decompositions\n"
        "table = decompositions(['softplus', 'logsumexp', 'gelu', 'addcmul'])\n"
        "x = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)\n"
        "for name, extra in (('softplus', ()), ('logsumexp', ([0],)), ('gelu', ()), ('addcmul', (x, x))):\n"
        "    operator = getattr(torch.ops.aten, name).default\n"
        "    assert torch.allclose(table[operator](x, *extra), operator(x, *extra), rtol=2**-40, atol=0.0), name\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    assert printed(program) == ["False"]


def test_memory_that_nobody_has_written_is_followed_without_dynamo_until_somebody_loads_it():
    """Which is 2 of the 5 s of a first program; code that is compiled beside the mode is compiled as ever."""
    program = (
        "import sys, torch, retrograd as rg\n"
        "with rg.cpu_triton(pretend=False) as run:\n"
        "    x = torch.empty(4); x[:2] = 1.0\n"
        "    y = x + 1\n"
        "    print('torch._dynamo' in sys.modules)\n"
        "    z = torch.compile(lambda x: 2 * x, backend='eager', fullgraph=True)(y)\n"
        "    z[0].item(); print(len(run.faults))\n"
        "    z[3].item(); print(len(run.faults))\n"
    )
    assert printed(program) == ["False", "0", "1"]


def test_kernels_for_cuda_that_torch_registers_are_nobodys():
    """Nor is a mode entered for them, below which each operator takes 10 us more."""
    program = (
        "import torch, torch._inductor, torch.distributed.fsdp\n"
        "from retrograd.compat.torch_library import any_cuda_kernel\n"
        "print(any_cuda_kernel())\n"
        "torch.library.custom_op('theirs::copy', torch.clone, mutates_args=(), device_types='cuda',\n"
        "                        schema='(Tensor x) -> Tensor')\n"
        "print(any_cuda_kernel())\n"
    )
    assert printed(program) == ["False", "True"]
