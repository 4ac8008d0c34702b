"""Each test of deformable attention runs on every implementation this machine has."""

from __future__ import annotations

from pathlib import Path

import extensions
import pytest
import torch

no_native = "tensors are on the GPU" if torch.cuda.is_available() else extensions.why_no_compiler()
NATIVE = pytest.param("native", marks=pytest.mark.skipif(no_native is not None, reason=str(no_native)))

# Tests in float64 whose names do not say so.
IN_FLOAT64 = (
    "test_gradcheck_twice",
    "test_second_derivative_counts_each_input_once",
    "test_second_derivative_of_the_operator",
)


# CUDA C++ is there where a GPU is that it has been run on; elsewhere there is nothing to skip.
CUDA = ["cuda"] if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0) else []


@pytest.fixture(params=["torch", NATIVE, "triton", *CUDA])
def impl(request: pytest.FixtureRequest) -> str:
    if request.param == "triton":
        pytest.importorskip("triton")
    in_float64 = "float64" in request.node.name or request.node.name.startswith(IN_FLOAT64)
    if request.param in ("triton", "cuda") and in_float64:
        pytest.skip("the kernels compute in float32")
    return request.param


# What is tested with Triton kernels without a GPU, in a minute: each plan and kernel. A GPU runs all tests.
EXECUTED = (
    "test_within_budget[zeros-edges-",
    "test_within_budget[border-aligned-",
    "test_one_tensor_in_float32[",
    "test_points_per_level[zeros-edges-",
    "test_points_per_level[border-aligned-",
    "test_strides[triton-permuted-",
    "test_strides[triton-sliced-value",
    "test_strides[triton-expanded-value",
    "test_nothing_at_all[",
    "test_empty_levels[border-edges-",
    "test_empty_levels[zeros-aligned-",
    "test_queries_do_not_see_each_other[",
    "test_side_at_borders[",
    "test_points_that_do_not_exist[zeros-edges-triton-x-nan",
    "test_points_that_do_not_exist[zeros-aligned-triton-y-inf",
    "test_points_that_do_not_exist[border-edges-triton-y--inf",
    "test_points_that_do_not_exist[border-aligned-triton-x-nan",
    "test_far_points[",
    "test_a_weight_that_is_nan_shows[",
    "test_pixels_that_are_not_reached_do_not_matter[",
    "test_why_a_fixed_tolerance_is_flaky[",
    "test_the_tie_at_the_edge_is_torchs[",
    "test_only_what_is_needed[",
    "test_a_tensor_that_promises_too_many_pixels_reads_nothing[",
    "test_subsets[triton-value",
    "test_the_op[triton-meta-torch.bfloat16-tensor",
    "test_the_op[triton-double-torch.float32-list",
    "test_the_fused_op[triton-meta-points",
    "test_within_budget_of_the_definition[zeros-edges-triton-uneven-float-points",
    "test_within_budget_of_the_definition[border-aligned-triton-even-bfloat16-float-boxes",
    "test_within_budget_of_the_definition[zeros-edges-triton-many-float-boxes",
    "test_cells_are_those_of_the_composition[",
    "test_only_the_inputs_are_saved[",
    "test_logits_without_a_softmax[",
    "test_empty_level_gives_no_nan[",
    "test_mixed_dtypes[",
    "test_negated_views[",
    "test_subsets_of_the_inputs[triton-value-boxes",
    "test_subsets_of_the_inputs[triton-reference_points-points",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    here = Path(__file__).parent

    def left_out(item: pytest.Item) -> bool:
        chosen = getattr(item, "callspec", None)
        executed = chosen is not None and chosen.params.get("impl") == "triton" and here in item.path.parents
        return executed and not item.name.startswith(EXECUTED)

    config.hook.pytest_deselected(items=[item for item in items if left_out(item)])
    items[:] = [item for item in items if not left_out(item)]


MODES = [(padding, aligned) for padding in ("zeros", "border") for aligned in (False, True)]


@pytest.fixture(params=MODES, ids=lambda m: f"{m[0]}-{'aligned' if m[1] else 'edges'}")
def mode(request: pytest.FixtureRequest) -> dict[str, object]:
    padding, aligned = request.param
    return dict(padding_mode=padding, align_corners=aligned)
