"""What differs first, on traces made by hand: each reason has its case, and a case in which nothing is said."""

from __future__ import annotations

import diffed
import pytest
from diffed import op, value

from retrograd.errors import UsageError
from retrograd.report import document
from retrograd.report.html import to_html
from retrograd.trace import Trace, diff
from retrograd.trace.diffing import error_bounds
from retrograd.trace.diffing.schema import TraceDiff

NAMES = [f"aten.{name}.default" for name in ("mm", "relu", "mm", "gelu", "add", "sum")]


def _kinds(found: TraceDiff) -> list[str]:
    return [cause.kind for cause in found.causes]


def _trace(*ops, **more) -> Trace:
    return Trace(list(ops), "full", **more)


def test_the_same_run_has_no_cause() -> None:
    found = diff(diffed.chain(*NAMES), diffed.chain(*NAMES))
    assert found
    assert (found.causes, found.matched, found.carried, found.exit_code) == ((), 6, 0, 0)
    assert found.text().startswith("the same bit for bit")


@pytest.mark.parametrize("at", range(len(NAMES) + 1))
def test_an_inserted_operator_alone_is_named_wherever_it_is(at: int) -> None:
    longer = [*NAMES[:at], "aten.sin.default", *NAMES[at:]]
    there, back = (diff(diffed.chain(*x), diffed.chain(*y)) for x, y in ((NAMES, longer), (longer, NAMES)))
    assert [(c.kind, c.what, c.b.index) for c in there.causes] == [("inserted", "aten.sin.default is in B alone", at)]
    assert [(c.kind, c.what, c.a.index) for c in back.causes] == [("missing", "aten.sin.default is in A alone", at)]
    assert there.carried == len(NAMES) - at


def test_of_equal_neighbours_the_one_whose_values_are_new_is_the_inserted_one() -> None:
    a = _trace(op(0, "aten.relu.default", [value(0, 1)], [value(1, 5)], place="m.py:1"))
    new = op(0, "aten.relu.default", [value(0, 1)], [value(1, 5)], place="m.py:1")
    b = _trace(new, op(1, "aten.relu.default", [value(1, 5)], [value(2, 6)], place="m.py:9"))
    assert [c.b.place for c in diff(a, b).causes] == ["m.py:9"]
    c = _trace(
        op(0, "aten.relu.default", [value(0, 3)], [value(1, 1)], place="m.py:9"),
        op(1, "aten.relu.default", [value(1, 1)], [value(2, 5)], place="m.py:1"),
    )
    assert [cause.b.place for cause in diff(a, c).causes] == ["m.py:9"]


def test_a_whole_step_more_does_not_end_the_comparison() -> None:
    a = Trace(diffed.chain(*NAMES).ops + diffed.chain(*NAMES, step=1).ops, "full")
    b = Trace(a.ops + diffed.chain("aten.cos.default", *NAMES, step=2).ops, "full")
    found = diff(a, b)
    assert [(c.what, c.count) for c in found.causes] == [("step 2 is in B alone", len(NAMES) + 1)]
    assert found.matched == len(a.ops)


def _one(name: str, made: int, given: int = 3, **more) -> Trace:
    return _trace(
        op(0, "aten.ones.default", [], [value(0, given)]), op(1, name, [value(0, given)], [value(1, made)], **more)
    )


def test_made_here_and_carried_from_there() -> None:
    a, b = (_trace(*_one("aten.gelu.default", made).ops, op(2, "aten.sin.default", [value(1, made)], [value(2, made)]))
            for made in (4, 5))  # fmt: skip
    found = diff(a, b)
    assert [(c.kind, c.b.name) for c in found.causes] == [("operator", "aten.gelu.default")]
    assert (found.matched, found.carried) == (1, 1)
    assert [row.status for row in found.rows] == ["same", "made", "carried"]


@pytest.mark.parametrize(
    ("name", "more", "kind"),
    [
        ("aten.native_dropout.default", {}, "random"),
        ("mylib::noise", {"random": True}, "random"),
        ("aten.index_add.default", {}, "nondeterministic"),
        ("aten.embedding_dense_backward.default", {}, "nondeterministic"),
        ("aten.grid_sampler_2d_backward.default", {}, "nondeterministic"),
        ("aten.gelu.default", {}, "operator"),
    ],
)
def test_why_in_a_word(name: str, more: dict, kind: str) -> None:
    assert _kinds(diff(_one(name, 4, **more), _one(name, 5, **more))) == [kind]
    assert diff(_one(name, 4, **more), _one(name, 4, **more))


def test_a_line_inside_a_custom_backward_is_told_beside_that_of_the_forward() -> None:
    inside = "m.py:9: return grad * noise"
    a, b = (_trace(op(0, "aten.mul.Tensor", [value(0)], [value(1, held)], inside=inside)) for held in (1, 2))
    found = diff(a, b)
    assert found.causes[0].first.inside == inside
    assert f"   in    {inside}\n" in found.text()
    assert TraceDiff.from_json(found.to_json()) == found
    assert inside in to_html(document(found), found.to_json())


def test_other_arguments() -> None:
    found = diff(_one("aten.sum.dim", 4, arguments="dim=[0]"), _one("aten.sum.dim", 5, arguments="dim=[1]"))
    assert _kinds(found) == ["argument"]
    assert found.causes[0].what == "aten.sum.dim has other arguments: dim=[0] -> dim=[1]"
    alike = diff(
        _one("aten.sum.dim", 4, arguments="dim=[0]"), _one("aten.sum.dim", 4, arguments="dim=[0], keepdim=True")
    )
    assert alike
    assert "1 operator has other arguments and the same result" in alike.notes


def _wired(reader: tuple[int, int], result: int) -> Trace:
    """An addition beside a relu, and a product that reads one of the two: `reader` is the value and what it holds."""
    relu = op(0, "aten.relu.default", [value(0, 3)], [value(1, 4)])
    add = op(1, "aten.add.Tensor", [value(1, 4)], [value(2, 5)])
    product = op(2, "aten.mul.Tensor", [value(*reader)], [value(3, result)])
    return _trace(relu, add, product, op(3, "aten.sum.default", [value(3, result)], [value(4, result + 1)]))


def test_an_operator_that_reads_the_result_of_another_one() -> None:
    """All operators are there and give the same, but for one that is given what another made: it was called the same."""
    found = diff(_wired((1, 4), 6), _wired((2, 5), 8))
    assert _kinds(found) == ["operand"]
    what = "input 0 is the result of aten.relu.default (0, m.py:0) in A, of aten.add.Tensor (1, m.py:1) in B"
    assert found.causes[0].what == f"aten.mul.Tensor reads another value: {what}"
    assert (found.matched, found.carried) == (2, 1)
    # Another order of adding gives the same up to rounding: it is told, and not called a difference.
    attainable = diff(_wired((1, 4), 6), _wired((2, 500), 800), "attainable")
    assert attainable
    assert any(note.startswith("1 operator reads another value, which another order") for note in attainable.notes)


def test_memory_that_fsdp_fills_in_part_is_compared_where_the_collective_has_filled_it() -> None:
    """The second result is memory for the shards of all ranks, of which only this rank's is there."""

    def gathered(garbage: int, shard: int = 4, received: int = 9) -> Trace:
        made = [value(1, shard, (4,)), value(2, garbage, (8,))]
        copied = op(0, "fsdp::all_gather_copy_in", [value(0, 3, (4,))], made)
        return _trace(
            copied, op(1, "aten.split_with_sizes.default", [value(5, received, (8,))], [value(6, received, (8,))])
        )

    assert diff(gathered(7), gathered(8))
    assert diff(gathered(7), gathered(8), "attainable")
    assert diff(gathered(7), gathered(7, shard=5)).causes[0].b.name == "fsdp::all_gather_copy_in"
    assert diff(gathered(7), gathered(8, received=10)).causes[0].b.name == "aten.split_with_sizes.default"


def test_operands_that_change_places_and_give_the_same_are_no_difference() -> None:
    def added(*order: int) -> Trace:
        made = [
            op(k, f"aten.{name}.default", [value(0, 3)], [value(k + 1, 4 + k)]) for k, name in enumerate(("sin", "cos"))
        ]
        inputs = [value(k, 3 + k) for k in order]
        return _trace(
            *made,
            op(2, "aten.add.Tensor", inputs, [value(3, 9)]),
            op(3, "aten.sum.default", [value(3, 9)], [value(4, 1)]),
        )

    assert diff(added(1, 2), added(2, 1))


def test_a_device_or_a_dtype_as_argument_is_no_difference() -> None:
    one, other = (
        _one("aten.full.default", 4, arguments=f"size=[4], dtype=float32, device={d}") for d in ("cpu", "cuda:0")
    )
    assert diff(one, other)


def test_other_dtype_from_the_same_inputs() -> None:
    a = _one("aten.mm.default", 4)
    b = _trace(a.ops[0], op(1, "aten.mm.default", [value(0, 3)], [value(1, 4, dtype="bfloat16")]))
    assert _kinds(diff(a, b, "bitwise")) == ["dtype"]
    assert diff(a, _trace(a.ops[0], op(1, "aten.mm.default", [value(0, 3)], [value(1, 4, high=5.0, dtype="bfloat16")])))


def test_casts_of_one_run_alone_are_one_cause_with_both_dtypes() -> None:
    """As an operator that is computed in bfloat16 in one run: its operands and its result are cast."""
    a = _trace(op(0, "aten.mm.default", [value(0)], [value(1, 4)]))
    cast = [
        op(0, "aten._to_copy.default", [value(0)], [value(1, 3, dtype="bfloat16")], module="proj"),
        op(1, "aten.mm.default", [value(1, 3, dtype="bfloat16")], [value(2, 5, dtype="bfloat16")], module="proj"),
        op(2, "aten._to_copy.default", [value(2, 5, dtype="bfloat16")], [value(3, 6)], module="proj"),
    ]
    found = diff(a, _trace(*cast), "bitwise")
    assert _kinds(found) == ["dtype"]
    assert found.causes[0].what == "float32 is cast to bfloat16 in B alone"
    assert found.causes[0].count == 2
    assert "1 operator has results of another dtype, the first aten.mm.default" in "".join(found.notes)
    copied = _trace(op(0, "aten.clone.default", [value(0)], [value(1, 3)]), a.ops[0])
    assert _kinds(diff(a, copied, "bitwise")) == ["inserted"]


def test_operators_that_compiled_code_hides_are_not_said_to_be_missing() -> None:
    a, b = diffed.chain(*NAMES), diffed.chain("aten.sum.default")
    assert "alone" in diff(a, b).causes[0].what
    assert "torch.compile" not in diff(a, b).causes[0].what
    b.meta["compiled"] = "not seen: a compiled forward ran"
    found = diff(a, b)
    assert [cause.what for cause in found.causes] == [
        "operators do not correspond where torch.compile compiled in B alone"
    ]
    assert "compiled='eager'" in found.causes[0].advice
    a.meta["compiled"] = b.meta["compiled"]  # the same regions may be hidden on both sides
    assert "torch.compile" not in diff(a, b).causes[0].what
    eager = diffed.chain(*NAMES)
    eager.meta["compiled"] = "functions compiled by torch.compile ran eagerly"
    assert diff(diffed.chain(*NAMES), eager)


def test_settings_in_which_the_runs_differ_are_the_reason() -> None:
    a, b = _one("aten.gelu.default", 4), _one("aten.gelu.default", 5)
    a.conditions = {"flags": {"mkldnn.enabled": "True"}, "variables": {}, "sources": {"train": "12"}}
    b.conditions = {"flags": {"mkldnn.enabled": "True"}, "variables": {}, "sources": {"train": "12"}}
    assert "settings" not in diff(a, b).causes[0].why
    b.conditions["flags"] = {"mkldnn.enabled": "False"}
    b.conditions["variables"] = {"DISABLE_ADDMM_CUDA_LT": "1", "NCCL_DEBUG": "INFO"}
    found = diff(a, b)
    settings = "mkldnn.enabled is True in A, False in B", "DISABLE_ADDMM_CUDA_LT is unset in A, 1 in B"
    assert found.causes[0].why.startswith(f"the runs differ in their settings: {'; '.join(settings)}; ")
    assert found.notes == settings
    alike = diff(a, Trace(a.ops, "full", conditions=b.conditions))
    assert alike
    assert alike.notes == settings


def test_another_size_from_inputs_of_the_same_size() -> None:
    a = _one("aten.nonzero.default", 4)
    b = _trace(a.ops[0], op(1, "aten.nonzero.default", [value(0, 3)], [value(1, 5, shape=(3, 2))]))
    assert _kinds(diff(a, b)) == ["shape"]


def test_an_operator_in_the_place_of_another() -> None:
    assert _kinds(diff(_one("aten.gelu.default", 4), _one("aten.relu.default", 5))) == ["replaced"]
    renamed = diff(_one("aten.gelu.default", 4), _one("mylib::gelu_fast", 4))
    assert renamed
    assert "1 operator has another name and the same result" in renamed.notes


def test_a_nan_on_one_side() -> None:
    a = _one("aten.log.default", 4)
    b = _trace(a.ops[0], op(1, "aten.log.default", [value(0, 3)], [value(1, 5, nan=2)]))
    assert _kinds(diff(a, b)) == ["nonfinite"]
    assert "in B alone" in diff(a, b).causes[0].what


def test_values_from_outside_are_one_cause_and_name_parameters() -> None:
    def made(weight: int) -> Trace:
        first = op(0, "aten.mm.default", [value(0, 1), value(1, weight, name="fc.weight")], [value(2, weight)])
        return _trace(first, op(1, "aten.mm.default", [value(2, weight), value(3, 2 * weight)], [value(4, weight)]))

    found = diff(made(3), made(5))
    assert _kinds(found) == ["outside"]
    assert found.causes[0].what == "fc.weight, input 1 of aten.mm.default, comes in from outside with other values"
    assert diff(made(3), made(3))


def test_memory_that_nobody_wrote_says_nothing_until_it_is_read() -> None:
    def made(garbage: int, result: int) -> Trace:
        return _trace(
            op(0, "aten.empty.memory_format", [], [value(0, garbage)]),
            op(1, "aten.gelu.default", [value(0, garbage)], [value(1, result)]),
        )

    assert diff(made(1, 7), made(2, 7))
    found = diff(made(1, 7), made(2, 8))
    assert _kinds(found) == ["uninitialised"]


def test_later_draws_follow_from_the_first() -> None:
    def made(one: int, other: int) -> Trace:
        ops = _one("aten.bernoulli.p", one).ops
        return _trace(*ops, op(2, "aten.rand.default", [], [value(5, other)]))

    found = diff(made(4, 6), made(5, 7))
    assert _kinds(found) == ["random"]
    assert found.carried == 1
    assert _kinds(diff(made(4, 6), made(4, 7))) == ["random"]


def test_names_alone() -> None:
    a, b = diffed.chain(*NAMES), diffed.chain(*NAMES, "aten.sin.default")
    a.level = "names"
    assert _kinds(diff(a, b)) == ["inserted"]
    assert any("without values" in note for note in diff(a, b).notes)
    with pytest.raises(UsageError, match=r"`level` is 'bitwise', but a run was recorded at level 'names'"):
        diff(a, b, "bitwise")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Trace(), diffed.chain("x")), "`a` has no operators"),
        ((diffed.chain("x"), 3), "`b` is int, expected a Trace or a file"),
        ((diffed.chain("x"), diffed.chain("x"), "roughly"), "`level` is 'roughly', expected 'bitwise'"),
    ],
    ids=["empty", "number", "level"],
)
def test_what_cannot_be_compared(arguments: tuple, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        diff(*arguments)


def test_json_holds_everything() -> None:
    found = diff(diffed.chain(*NAMES), diffed.chain(*NAMES, "aten.sin.default"))
    assert TraceDiff.from_json(found.to_json()) == found


def test_the_error_of_a_product_grows_with_the_root_of_its_length() -> None:
    """A sum of K products, in float32: u sqrt(K) times the partial sums, sqrt(K) here, and the stored result's u."""
    u = error_bounds.UNIT["float32"]
    for length in (64, 4096):
        left, right = (value(n, shape=s, rms=1.0) for n, s in ((0, (8, length)), (1, (length, 8))))
        made = op(0, "aten.mm.default", [left, right], [value(2, shape=(8, 8), rms=length**0.5)])
        assert error_bounds.reduction(made) == length
        (error,) = error_bounds.errors(made, made, [0.0, 0.0])
        assert error == pytest.approx(u * (length**2 + length) ** 0.5)
        (carried,) = error_bounds.errors(made, made, [0.01, 0.0])
        assert carried == pytest.approx(0.01 * length**0.5)
