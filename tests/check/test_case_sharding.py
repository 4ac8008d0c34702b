"""Level quick of ops whose runs cost much: what is left out of one dtype is done in another, and said."""

from __future__ import annotations

import pytest
import torch
from specimens import with_backward

import retrograd as rg
from retrograd.check.case_sharding import shard, shard_cases
from retrograd.check.runner import verify
from retrograd.check.stages import StageContext, adjoint, contract, determinism, extremes, layouts, oracle, state
from retrograd.check.verification import Verification

DTYPES = ("float32", "float16", "bfloat16")


def product(wrong: float = 1.0) -> rg.OpSpec:
    """x * w, whose gradient of w is `wrong` times what it should be."""
    fn = with_backward(lambda x, w: x * w, lambda dy, x, w: (dy * w, wrong * dy * x))
    return rg.op(fn, lambda x, w: x * w, dict(x=rg.tensor("M", "N"), w=rg.tensor("M", "N")), dtypes=DTYPES)


def context(
    dtype: str, *, launched: bool = True, level: str = "quick", dtypes: tuple[str, ...] = DTYPES
) -> StageContext:
    return StageContext.of(product(), dtype, level=level, launched=lambda: launched, dtypes=dtypes)


def shares(**how: object) -> list[list[object]]:
    return [shard_cases(layouts.STAGE, b, layouts.cases(b)) for b in (context(d, **how) for d in DTYPES)]  # type: ignore[arg-type]


def test_every_case_is_run_in_exactly_one_dtype():
    every = {c.but(dtype="float32") for c in layouts.cases(context("float32"))}
    dealt_out = [c.but(dtype="float32") for part in shares() for c in part]
    assert len(dealt_out) == len(every)
    assert set(dealt_out) == every
    assert all(shares())


@pytest.mark.parametrize(
    "how", [dict(launched=False), dict(level="full")], ids=["no-kernels-are-launched", "level-full"]
)
def test_nothing_is_left_out_elsewhere(how):
    assert [len(part) for part in shares(**how)] == [len(layouts.cases(context("float32")))] * 3


def test_a_dtype_alone_has_all_cases():
    alone = context("float16", dtypes=("float16",))
    assert shard_cases(layouts.STAGE, alone, layouts.cases(alone)) == layouts.cases(alone)
    assert not alone.shared


def test_fewer_cases_than_dtypes_leave_none_without_one():
    for dtype in DTYPES:
        one = context(dtype)
        (case,) = shard_cases(layouts.STAGE, one, layouts.cases(one)[:2])
        assert case.dtype == dtype
        assert one.shared == {"2 cases": "kernels run without a GPU"}


def test_on_a_gpu_kernels_are_compiled_for_a_share_of_the_cases():
    one = context("float32")
    wanted = layouts.cases(one)
    one.runner.device = "cuda"
    assert not one.emulated()
    assert shard_cases(layouts.STAGE, one, wanted) == wanted[::3]
    assert list(one.shared.values()) == ["a kernel is compiled for each"]


def test_a_sweep_of_many_cases_is_dealt_out_wherever_it_runs():
    many = context("float32", launched=False)
    wanted = [many.base.but(draw=d) for d in range(40)]
    assert shard_cases(oracle.STAGE, many, wanted) == wanted  # a stage that does not deal
    assert not many.shared
    assert len(shard_cases(layouts.STAGE, many, wanted)) == 14


def test_sweeps_of_an_op_of_many_inputs_are_dealt_out_wherever_it_runs():
    def four(w, x, y, z):
        return w + x + y + z

    inputs = {name: rg.tensor("M") for name in "wxyz"}
    spec = rg.op(four, four, inputs, dtypes=list(DTYPES))
    wide = StageContext.of(spec, "float32", dtypes=DTYPES)
    wanted = [wide.base.but(sizes=(("M", m),)) for m in (1, 2, 3)]
    assert shard_cases(layouts.STAGE, wide, wanted) == wanted[:1]
    assert wide.shared == {"3 cases": "there are many inputs"}
    full = StageContext.of(spec, "float32", level="full", dtypes=DTYPES)
    assert shard_cases(layouts.STAGE, full, wanted) == wanted


def test_parts_of_a_case_are_shared_likewise():
    parts = [shard(context(d), "abcde", "letters") for d in DTYPES]
    assert sorted(letter for part in parts for letter in part) == list("abcde")
    other = context("float32")
    assert shard(other, "ab", "letters", ["float16", "bfloat16"]) == ["a", "b"]
    assert not other.shared


def test_repeats_and_parts_of_state_are_dealt_out_only_where_kernels_are_interpreted():
    for stage, said in ((determinism, "19 repeats"), (state, "second calls, second backwards and two graphs at once")):
        dear, cheap = ([context(d, launched=i) for d in DTYPES] for i in (True, False))
        for few, all_ in zip(dear, cheap, strict=True):
            stage.check(few, few.base)
            stage.check(all_, all_.base)
            assert said in few.shared
            assert not all_.shared
        assert sum(b.runner.calls for b in dear) < sum(b.runner.calls for b in cheap) * 2 / 3


def test_a_buffer_that_is_kept_is_found_by_the_dtype_that_looks_for_it():
    kept: dict[object, torch.Tensor] = {}

    def backward(dy, x, w):
        key = (x.shape, x.dtype)
        return kept.setdefault(key, torch.empty_like(x)).copy_(dy * w), dy * x

    fn = with_backward(lambda x, w: x * w, backward)
    spec = rg.op(fn, lambda x, w: x * w, dict(x=rg.tensor("M", "N"), w=rg.tensor("M", "N")), dtypes=DTYPES)
    kinds = []
    for d in DTYPES:
        one = StageContext.of(spec, d, launched=lambda: True, dtypes=DTYPES)
        kinds += [f.kind for f in state.check(one, one.base).findings]
    assert "kept-buffer" in kinds


def test_one_line_along_all_inputs_finds_what_a_line_for_each_does():
    """What a joint line shows is narrowed down to the input by lines of their own; a right op needs none."""
    healthy = context("float32")
    out = adjoint.check(healthy, healthy.base)
    assert (out.findings, out.notes) == (
        [], ["all inputs moved at once, as kernels run without a GPU; level full moves each alone"]
    )  # fmt: skip
    joint = healthy.runner.calls
    alone = context("float32", launched=False)
    assert adjoint.check(alone, alone.base).notes == []
    assert joint < alone.runner.calls
    broken = StageContext.of(product(1.001), "float32", launched=lambda: True)
    assert [f.tensor for f in adjoint.check(broken, broken.base).findings] == ["grad w"]


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_inputs_of_which_a_joint_line_says_little_have_lines_of_their_own(factor):
    """The gradient of b is a ten-thousandth of the others': what is wrong in it would hardly show beside them."""
    fn = with_backward(lambda x, w, b: x * w + 1e-4 * b, lambda dy, x, w, b: (dy * w, dy * x, factor * 1e-4 * dy))
    spec = rg.op(fn, None, {name: rg.tensor("M", "N") for name in "xwb"}, dtypes=("float32",))
    joint = StageContext.of(spec, "float32", launched=lambda: True)
    out = adjoint.check(joint, joint.base)
    alone = StageContext.of(spec, "float32")
    assert [f.tensor for f in out.findings] == [f.tensor for f in adjoint.check(alone, alone.base).findings]
    if factor != 1.0:  # which the joint line shows without saying of which input
        assert [f.tensor for f in out.findings] == ["grad b"]
        return
    assert out.notes[0].startswith("x, w moved at once")
    assert joint.runner.calls < alone.runner.calls


def test_the_first_finding_is_told_before_its_smallest_case_is_looked_for():
    told: list[tuple[str, str]] = []
    runs: list[int] = []
    spec = product(1.5)
    verification = Verification(spec, level="quick", progress=lambda *said: (told.append(said), runs.append(count())))

    def count() -> int:
        return verification.calls()

    result = verification.run_stage(oracle.STAGE)
    assert [stage for stage, _ in told] == ["oracle"] * 3
    assert all(
        said.startswith("found: grad w[") and dtype in said for (_, said), dtype in zip(told, DTYPES, strict=True)
    )
    assert "M=7 N=48" in told[0][1]
    assert result.findings[0].case.sizes != oracle.cases(context("float32"))[0].sizes  # shrunk afterwards
    assert runs[0] == 1
    healthy = rg.verify(product(), level="quick", progress=lambda *said: told.append(said))
    assert healthy
    assert not any(said.startswith("found") for _, said in told[3:])


def test_an_exception_on_the_ordinary_case_is_told_at_once():
    def raises(x):
        raise ValueError("no")

    told = []
    spec = rg.op(raises, lambda x: x * 2, dict(x=rg.tensor("M")))
    rg.verify(spec, level="quick", only=["contract"], progress=lambda *said: told.append(said))
    assert told[1] == ("contract", "found: the forward raised ValueError: no (at float32 M=7)")
    assert torch.is_grad_enabled()


def described(spec: rg.OpSpec, *, launched: bool = True) -> list[StageContext]:
    return [StageContext.of(spec, d, launched=lambda: launched, dtypes=DTYPES) for d in DTYPES]


def test_each_combination_of_parameters_but_the_first_is_run_in_one_dtype():
    spec = rg.op(
        lambda x, k: x * k, lambda x, k: x * k, dict(x=rg.tensor("M")), params=dict(k=[1, 2, 3]), dtypes=DTYPES
    )
    contexts = described(spec)
    run = [[dict(c.params)["k"] for c in oracle.cases(b)] for b in contexts]
    assert run == [[1, 2, 1], [1, 3, 1], [1]]  # there and back again
    assert [len(oracle.cases(b)) for b in described(spec, launched=False)] == [4, 4, 4]
    assert all(any("combinations of parameters" in label for label in b.shared) for b in contexts)


def test_a_parameter_that_is_ignored_is_found_by_the_dtype_that_has_it():
    spec = rg.op(
        lambda x, k: x * 1, lambda x, k: x * k, dict(x=rg.tensor("M")), params=dict(k=[1, 2, 3]), dtypes=DTYPES
    )
    found = [any(oracle.check(b, c).findings for c in oracle.cases(b)) for b in described(spec)]
    assert found == [True, True, False]


def test_gradients_of_each_output_alone_are_asked_for_in_one_dtype():
    """A backward that forgets the second output where the first one has no gradient."""

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            return x * 2, x * 3

        @staticmethod
        def backward(_, first, second):
            return None if first is None else first * 2 + (0 if second is None else second * 3)

    spec = rg.op(Both.apply, lambda x: (x * 2, x * 3), dict(x=rg.tensor("M")), dtypes=DTYPES)
    contexts = described(spec)
    outcomes = [contract.check(b, b.base) for b in contexts]
    assert [[f.kind for f in o.findings] for o in outcomes] == [["output-subset"], [], []]
    assert all("gradients of each output alone" in b.shared for b in contexts)
    assert all(contract.check(b, b.base).findings for b in described(spec, launched=False))


def test_finite_extremes_are_all_in_the_first_dtype_and_each_cell_that_is_not_finite_in_one():
    spec = product()
    held = [[c.values[0] for c in extremes.cases(b)] for b in described(spec)]
    alone = [[c.values[0] for c in extremes.cases(b)] for b in described(spec, launched=False)]
    finite = [v for v in alone[0] if v[1] != "nan"]
    assert [v for v in held[0] if v[1] != "nan"] == finite
    assert sorted(v for part in held for v in part if v[1] == "nan") == [("w", "nan"), ("x", "nan")]
    assert sorted(held[1] + held[2] + [v for v in held[0] if v[1] == "nan"]) == sorted(alone[1])
    for b in described(spec):
        extremes.cases(b)
        assert "cells that are not finite" in b.shared
        assert ("finite extremes of all dtypes but the first" in b.shared) == (b.runner.dtype != "float32")


def test_what_was_shared_is_told_once_for_all_stages():
    """Twelve of fourteen notes below a norm said so, one for each stage and part."""
    inputs = {name: rg.tensor("M") for name in "wxyz"}
    spec = rg.op(lambda w, x, y, z: w * x + y * z, lambda w, x, y, z: w * x + y * z, inputs, dtypes=DTYPES)
    report, full = (verify(spec, level=level, only=["contract", "mutation", "state"]) for level in ("quick", "full"))
    assert not any("shared" in note for stage in report.stages for note in stage.notes)
    (note,) = [note for note in report.notes if "shared" in note]
    assert note.startswith("level quick shared work among float32, float16, bfloat16, as there are many inputs: ")
    assert note.endswith("; level full has all in each")
    assert note.index("contract (subsets of the inputs") < note.index("state (")
    assert not [note for note in full.notes if "shared" in note]
