"""The fourth corpus, and the fifth, beside the checker: a finding for each broken op, none for a right one.

In two minutes of a CPU, with `--rotate` a third a day: of a broken op what comes before the first finding, of a right
one the stages that compare values. `benchmarks/corpus_verdicts.py --corpus fourth` runs all stages at each level.
"""

from __future__ import annotations

import pytest
from corpus import Found, corpus, stop

from retrograd.check.runner import verify

MUTANTS = corpus("mutants_fourth") | corpus("mutants_fifth")
HEALTHY = corpus("healthy_fourth") | corpus("healthy_fifth")
COMPARING = ["oracle", "kinks", "layouts", "extremes", "higher_order"]


@pytest.mark.dealt(3)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_found(name):
    with pytest.raises(Found):
        verify(MUTANTS[name], level="quick", seed=0, watch=stop)


@pytest.mark.dealt(3)
@pytest.mark.parametrize("name", HEALTHY)
def test_right_op_is_left_alone(name):
    report = verify(HEALTHY[name], level="quick", seed=0, only=COMPARING)
    assert report.verdict == "proved", [f.what for f in report.findings]
