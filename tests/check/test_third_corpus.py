"""The third corpus in plain PyTorch: each broken op is broken, each healthy one right, whatever the checker says."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from corpus import files, load_module
from entries import RARITIES, Call, Entries, error

MUTANTS: dict[str, Entries] = {}
HEALTHY: dict[str, Entries] = {}


def entries(module: ModuleType) -> Entries:
    return next(v for v in vars(module).values() if isinstance(v, Entries))


for kind, table in (("mutants_third", MUTANTS), ("healthy_third", HEALTHY)):
    for path in files(kind):
        found = entries(load_module(path))
        assert not table.keys() & found.proofs.keys()
        table |= dict.fromkeys(found.proofs, found)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", MUTANTS)
def test_broken(name):
    """There is a call on which the op is wrong."""
    proof = MUTANTS[name].proofs[name]
    if isinstance(proof, Call):
        assert error(MUTANTS[name].ops[name], proof) > proof.bound
    else:
        assert proof()


@pytest.mark.parametrize("name", HEALTHY)
def test_right(name):
    """It agrees with float64 at ordinary and at the smallest sizes, with each combination of parameters."""
    proof, spec = HEALTHY[name].proofs[name], HEALTHY[name].ops[name]
    if not isinstance(proof, Call):
        assert proof()
        return
    least = {key: smallest(spec.sizes.get(key)) for key in spec.size_names}
    for values in itertools.product(*spec.params.values()):
        for seed, sizes in enumerate((proof.sizes, proof.sizes, least)):
            call = replace(proof, sizes=sizes, params=dict(zip(spec.params, values, strict=True)))
            assert error(spec, call, seed) <= proof.bound, call


def smallest(rule: Any) -> int:
    return 1 if rule is None else min(rule) if isinstance(rule, (tuple, list)) else rule


def test_size():
    """Sixty that a spec describes on each side, every rarity among the broken ones, and reasons for the rest."""
    told = [name for name in MUTANTS if name not in MUTANTS[name].not_sayable]
    assert len(told) == len([name for name in HEALTHY if name not in HEALTHY[name].not_sayable]) == 60
    rarities = Counter(MUTANTS[name].rarity[name] for name in MUTANTS)
    assert set(rarities) == set(RARITIES)
    assert all(MUTANTS[name].bugs[name] for name in MUTANTS)
