"""The stage races: a gradient that is added up by plain stores is found, by atomics or partial sums it is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from test_races import in_a_process

from retrograd import codegen
from retrograd.check import cpu_kernels
from retrograd.check.op_runner import OpRunner
from retrograd.compat.triton_launch import around_launches

verified_ops = pytest.importorskip("verified_ops", reason="needs Triton")

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    pytest.importorskip("triton")
    return {row["name"]: row for row in in_a_process(HERE / "verified_ops.py")}


def test_additions_by_plain_stores_race(rows):
    row = rows["store"]
    assert row["verdict"] == "finding"
    texts = [text for stage, kind, text in row["findings"] if (stage, kind) == ("races", "race")]
    assert texts
    assert all("of `dw_ptr`" in text and "verified_ops.py:" in text for text in texts)


@pytest.mark.parametrize("name", ["atomic", "partial"])
def test_atomics_and_partial_sums_do_not(rows, name):
    assert rows[name]["verdict"] == "proved", rows[name]
    assert rows[name]["power"] == "every access of scale_backward_kernel, in 2 orders of its programs"


def test_a_kernel_that_never_ends_is_told_with_its_name_and_line(rows):
    text = next(text for stage, kind, text in rows["wait"]["findings"] if (stage, kind) == ("races", "endless-loop"))
    assert "scale_backward_kernel" in text
    assert re.search(r"verified_ops\.py:\d+: while tl\.atomic_add\(dw_ptr, 0\.0\) == 0\.0:", text)
    assert rows["wait"]["verdict"] == "finding"


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_products_have_the_error_of_what_they_multiply(rows, precision):
    assert rows[f"product 1.0 {precision}"]["verdict"] == "proved", rows[f"product 1.0 {precision}"]


def test_what_is_cast_to_16_bits_before_products_in_tf32_is_a_note(rows):
    text = "more than tf32 is lost of grad a: with products of float32 too, as after a cast to 16 bits"
    names = ["product cast tf32", "product 1.0 tf32", "product 1.0 ieee", "mixture 1.0", "linear attention 1.0"]
    assert [name for name in names if any(text in note for note in rows[name]["notes"])] == names[:1]
    assert not any("more than tf32 is lost" in note for name in names[1:] for note in rows[name]["notes"])


@pytest.mark.gpu
def test_kernels_that_a_gpu_runs_have_the_error_of_what_they_multiply():
    if not torch.cuda.is_available():
        pytest.skip("kernels run on a CUDA device")
    right = ["product 1.0 tf32", "product 1.0 ieee", "mixture 1.0", "decayed", "linear attention 1.0"]
    verdicts = dict.fromkeys(right, "proved")
    verdicts |= dict.fromkeys(["product 1.03 tf32", "product 1.0005 ieee", "linear attention 1.03"], "finding")
    rows = in_a_process(HERE / "verified_ops.py", "cuda", *verdicts)
    assert {row["name"]: row["verdict"] for row in rows} == verdicts, rows


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_what_a_gpu_runs_is_asked_for_its_precision(precision):
    """By code for a GPU that is not here, in the place of Triton's launch."""
    with codegen.recording("sm_90") as launches:
        verified_ops.multiply(torch.ones(16, 16), torch.ones(16, 16), precision)
    compiled = launches[0].compile()
    with around_launches(lambda launch, proceed: compiled), cpu_kernels.executed("cuda"):
        assert not cpu_kernels.tf32()
        verified_ops.multiply(torch.ones(16, 16), torch.ones(16, 16), precision)
        assert cpu_kernels.tf32() is (precision == "tf32")
    assert not cpu_kernels.tf32()


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_so_is_what_is_executed_here_beside_a_gpu(precision):
    """As for the races of kernels that a GPU runs."""
    with cpu_kernels.executed("cuda"), cpu_kernels.session():
        verified_ops.multiply(torch.ones(16, 16), torch.ones(16, 16), precision)
        assert cpu_kernels.tf32() is (precision == "tf32")


def test_a_reference_without_products_of_matrices_allows_for_tf32_as_well(rows):
    assert rows["product by element 1.0 tf32"]["verdict"] == "proved", rows["product by element 1.0 tf32"]


def test_differences_see_through_what_tf32_cuts(rows):
    assert not rows["product 1.0 tf32 alone"]["findings"], rows["product 1.0 tf32 alone"]
    kinds = [(stage, kind, text.split()[1]) for stage, kind, text in rows["product 8.0 tf32 alone"]["findings"]]
    assert kinds == [("adjoint", "not-the-derivative", "a")]


def test_what_cancels_in_tf32_leaves_what_its_terms_were_rounded_by(rows):
    assert rows["mixture 1.0"]["verdict"] == "proved", rows["mixture 1.0"]
    assert rows["mixture 1.03"]["verdict"] == "finding"
    assert any("grad s[" in text for _, _, text in rows["mixture 1.03"]["findings"]), rows["mixture 1.03"]


def test_so_it_does_where_runs_of_the_reference_cannot_be_made_at_once(rows):
    assert rows["attention 1.0"]["verdict"] == "proved", rows["attention 1.0"]
    assert any("grad q[" in text for _, _, text in rows["attention 1.1"]["findings"]), rows["attention 1.1"]


def test_what_a_formula_uses_twice_may_be_computed_twice_in_tf32(rows):
    """Where a product nearly cancels, the two are shares of it apart; right with float32's factors is what shows it."""
    assert rows["linear attention 1.0"]["verdict"] == "proved", rows["linear attention 1.0"]
    assert any("grad q is 1.0" in text for _, _, text in rows["linear attention 1.03"]["findings"])


def test_who_reads_back_what_an_atomic_gave_learns_of_others():
    x, out = torch.arange(64.0), torch.zeros(1)
    drawn, count = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with cpu_kernels.executed("cpu", {}), cpu_kernels.session() as session:
        verified_ops.last_adds_kernel[(4,)](x, torch.zeros(4), drawn, count, out, BLOCK=16)
    assert session.launches[-1].in_turns
    assert not list(session.faults)
    assert float(out) == float(x.sum())


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_tf32_can_be_left_out_for_once(precision):
    a, b = (torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    with cpu_kernels.executed("cpu", {}), cpu_kernels.session():
        plain = verified_ops.multiply(a, b, precision)
        with cpu_kernels.exact_factors() as possible:
            exact = verified_ops.multiply(a, b, precision)
        again = verified_ops.multiply(a, b, precision)
    assert possible
    assert torch.equal(again, plain)
    assert torch.equal(plain, exact) is (precision == "ieee")
    assert float((exact - a.double() @ b.double()).abs().max()) < 1e-5


@pytest.mark.parametrize(("device", "precision"), [("cpu", "tf32"), ("cuda", "tf32"), ("cpu", "ieee")])
def test_so_it_can_on_the_cpu_for_a_gpu(device, precision):
    spec = verified_ops.OPS[f"product 1.0 {precision}"]
    runner = OpRunner(spec, "float32", 0, "cpu")
    with cpu_kernels.executed("cpu", {}):
        plain = runner.run(runner.base)
        # Of a GPU nothing is asked but what its kernels multiplied in.
        asked = runner if device == "cpu" else OpRunner(spec, "float32", 0, device, _tf32=True)
        exact = asked.with_exact_factors(runner.base)
    assert (exact is None) is (precision == "ieee")
    if exact is not None:
        a, b = (exact.inputs[name].detach().double() for name in "ab")
        far, near = (float((run.outs["out"].detach() - a @ b).abs().max()) for run in (plain, exact))
        assert near < 1e-5 < far


def test_scores_by_elements_beside_a_product_of_matrices_allow_for_tf32(rows):
    assert rows["attention by element 1.0"]["verdict"] == "proved", rows["attention by element 1.0"]
    assert any("grad q[" in text for _, _, text in rows["attention by element 1.1"]["findings"])


def test_gradients_of_outputs_add_up_as_far_as_tf32_goes(rows):
    assert rows["two outputs"]["verdict"] == "proved", rows["two outputs"]
    assert "output-subset" in [kind for _, kind, _ in rows["a dropped output"]["findings"]]


@pytest.mark.parametrize(
    "name",
    [
        "product 1.03 tf32", "product 1.0005 ieee",
        "product by element 1.03 tf32", "product by element 1.0005 ieee",
    ],
)  # fmt: skip
def test_a_factor_that_no_rounding_explains_is_found(rows, name):
    assert rows[name]["verdict"] == "finding"
    assert any("grad a" in text for _, _, text in rows[name]["findings"])


def test_sizes_beside_the_blocks_of_kernels_are_tried(rows):
    assert rows["all blocks"]["verdict"] == "proved", rows["all blocks"]
    assert rows["whole blocks"]["verdict"] == "finding"
    (where,) = {(stage, text.split("[")[1].split(",")[0]) for stage, _, text in rows["whole blocks"]["findings"]}
    assert where == ("shapes", "512")


def test_kernels_are_watched_at_sizes_that_are_too_dear_for_a_truth(rows):
    """A program has 64 steps; the reference takes longer than level quick has where there are two."""
    ((stage, kind, text),) = rows["a sum handed on"]["findings"]
    assert (stage, kind) == ("shapes", "race")
    assert "of `y_ptr`" in text
    assert rows["a sum made anew"]["verdict"] == "proved", rows["a sum made anew"]
    for how in ("handed on", "made anew"):
        assert sum("no result was compared" in note for note in rows[f"a sum {how}"]["notes"]) == 1


def test_the_first_call_may_be_what_imports_triton():
    """Stage bounds ran its op, and with it the import, in guard bands alone, and said that no kernel can run here."""
    (row,) = in_a_process(HERE / "late_imports.py")
    assert row["masked"] == {"findings": [], "status": "passed"}
    assert row["unmasked"]["status"] == "failed"
    assert any("out of bounds in kernel double_kernel" in what for what in row["unmasked"]["findings"])
