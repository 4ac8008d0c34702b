"""Suffix sums that a gradient of gates is, with a mistake in what is added up: smaller than the largest of them by far."""

from __future__ import annotations

import torch
from _gated_sums import gated, packed

MUTANTS = {
    # As an accumulator of 16 bits leaves it: 4e-3 of each term.
    "CS01": gated(lambda read, written: (read - written).bfloat16().float(), "terms_in_bfloat16"),
    # A rounded factor of one of the two: 5e-5 of it.
    "CS02": gated(lambda read, written: read - 1.00005 * written, "terms_apart_by_a_factor"),
    # The last step is only read.
    "CS03": gated(
        lambda read, written: read - torch.cat([written[:, :-1], 0 * written[:, -1:]], 1), "last_step_not_written"
    ),
    # The same factor where two sequences share a row.
    "CS04": packed(lambda read, written: read - 1.00005 * written, "packed_terms_apart_by_a_factor"),
}
