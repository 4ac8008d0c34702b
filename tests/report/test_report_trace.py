"""Histograms of exponents in what is shown of a trace: text, page, JSON, buckets of TensorBoard."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest

from retrograd.report import document, to_text
from retrograd.report.html import to_html
from retrograd.trace import Exponents, Listing, Op, Stats
from retrograd.trace.messages import buckets, tensor_text

# float16: subnormal numbers from 2^-24 on, normal ones from 2^-14 on; 2^15 is the last power of two before overflow.
HALF = Stats(
    0, (6,), "float16", "cpu", -40000.0, 2.0, 1.0, 0, 0, 1, 0, 7, 0, "",
    Exponents(-16, (1, *(0,) * 16, 4, *(0,) * 14), (*(0,) * 31, 1)),
)  # fmt: skip
WHOLE = Stats(1, (6,), "int64", "cpu", 0.0, 5.0, 1.0)


def page_of(record: Listing) -> str:
    return to_html(document(record), record.to_json())


def listed(*made: Stats) -> Listing:
    ops = tuple(
        Op(k, 0, "forward", f"aten.op{k}.default", "", "", "a.py:1", "x", "", (), (stats,))
        for k, stats in enumerate(made)
    )
    return Listing(ops, len(ops), len(ops), 1, "full", 0, {})


def test_magnitudes_are_a_column_where_they_were_counted() -> None:
    text = to_text(listed(HALF, WHOLE))
    assert re.search(r"range +magnitudes +rms", text)
    assert "2^-16 to 2^15" in text
    assert "magnitudes" not in to_text(listed(replace(HALF, exponents=None), WHOLE))
    assert "rms 1, magnitudes 2^-16 to 2^15, 1 subnormal" in tensor_text(HALF)


def test_a_page_draws_them_and_marks_what_is_near_the_ends_of_the_dtype() -> None:
    page = page_of(listed(HALF, WHOLE))
    (picture,) = re.findall(r"<svg.*?</svg>", page)
    assert 'viewBox="0 0 32 20"' in picture
    bars = {kind: re.findall(r"M(\d+) 20v", d) for kind, d in re.findall(r'<path( class="edge")? d="(.*?)"/>', picture)}
    assert bars == {"": ["17"], ' class="edge"': ["0", "31"]}
    wide = page_of(listed(replace(HALF, dtype="float32")))
    assert 'class="edge"' not in wide
    assert "<svg" not in page_of(listed(WHOLE))


def test_a_listing_is_read_back_with_them_and_one_without_them_too() -> None:
    record = listed(HALF, WHOLE)
    assert Listing.from_json(record.to_json()) == record
    data = json.loads(record.to_json())
    for op in data["ops"]:
        del op["outputs"][0]["exponents"]
    assert Listing.from_json(json.dumps(data)) == listed(replace(HALF, exponents=None), WHOLE)


@pytest.mark.parametrize("zeros", [0, 2], ids=["no-zeros", "zeros"])
@pytest.mark.parametrize(
    "numbers",
    [[1.5, -1.5, 3.0, -0.3, -0.3], [0.1, 1.0, 1.9], [-6.0, -0.7], [], [1e-40, -1e-40, 3e38]],
    ids=["both", "positive", "negative", "none", "ends"],
)
def test_each_number_is_in_its_bucket(numbers: list[float], zeros: int) -> None:
    import torch

    from retrograd.trace.statistics import cpu

    x = torch.tensor([*numbers, *[0.0] * zeros])
    exponents = cpu.measure(x, histogram=True)[8]
    assert exponents is not None
    limits, counts = buckets(exponents, zeros)
    assert all(a < b for a, b in pairwise(limits))
    below = [float("-inf"), *limits]
    # Of negative numbers a power of two belongs to the bucket below it, of positive ones to that above.
    assert counts == [
        sum(low < v < high or v == (high if high <= 0 else low) for v in x.tolist()) for low, high in pairwise(below)
    ]
