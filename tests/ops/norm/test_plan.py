"""Launch plans of RMSNorm: limits, coverage and what they depend on."""

from __future__ import annotations

import dataclasses

import pytest

from retrograd.ops.norm.plan import (
    BACKWARD_TILE_LIMIT,
    FORWARD_TILE_LIMIT,
    ceil_div,
    next_power_of_2,
    plan_backward,
    plan_forward,
)

# Widths on both sides of every threshold: one column, below and above a power of two, both tile limits.
WIDTHS = [1, 2, 63, 64, 65, 1024, 2000, 16384, 16385, 32768, 32769, 131072]


@pytest.mark.parametrize("n", WIDTHS, ids=lambda n: f"N{n}")
@pytest.mark.parametrize("m", [1, 7, 33, 32768], ids=lambda m: f"M{m}")
@pytest.mark.parametrize("interpreting", [False, True], ids=["compiled", "interpreted"])
def test_plans_cover_the_input(m: int, n: int, interpreting: bool) -> None:
    forward = plan_forward(m, n, 2, 132, interpreting)
    assert forward.programs * forward.block_m >= m
    assert forward.looped == (next_power_of_2(n) > FORWARD_TILE_LIMIT)
    assert forward.looped or forward.block_n >= n
    backward = plan_backward(m, n, 2, 132, True, interpreting)
    assert backward.looped == (next_power_of_2(n) > BACKWARD_TILE_LIMIT)
    assert backward.looped or backward.block_n >= n
    tiles = ceil_div(m, backward.dw_block_m if backward.looped else backward.block_m)
    # A part without a tile would be a row of the buffer that costs traffic and holds only zeros.
    assert 1 <= backward.parts <= tiles
    for plan in (forward, backward):
        for field, value in dataclasses.asdict(plan).items():
            if "block" in field or field == "num_warps":
                assert value & (value - 1) == 0, field


def test_programs_are_capped_by_the_multiprocessors() -> None:
    one, two = (plan_backward(1 << 20, 4096, 2, sms, True, False) for sms in (132, 264))
    assert two.programs == 2 * one.programs
    assert one.programs % 132 == 0


def test_atomic_plan_differs_only_in_parts() -> None:
    ordered, atomic = (plan_backward(4096, 2048, 2, 132, flag, False) for flag in (True, False))
    assert atomic.parts == 0
    assert dataclasses.replace(ordered, parts=0) == atomic


def test_a_second_stage_is_asked_for_only_where_it_fits() -> None:
    assert plan_backward(4096, 2048, 2, 132, True, False).num_stages == 2
    assert plan_backward(4096, 16384, 4, 132, True, False).num_stages == 1


def test_column_loop_can_be_forced() -> None:
    assert plan_forward(8, 100, 4, 132, False, max_tile_n=32).looped
    backward = plan_backward(8, 100, 4, 132, True, False, max_tile_n=32)
    assert backward.looped
    assert backward.block_n == backward.dw_block_n == 32


def test_plans_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan_forward(8, 100, 4, 132, False).block_m = 1
