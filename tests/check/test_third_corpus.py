"""The third corpus and those after it in plain PyTorch: each broken op is broken, each healthy one right, whatever the checker says."""

from __future__ import annotations

import itertools
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


NUMBERS = dict(third=60, fourth=60, fifth=10)  # ops on either side
for number in NUMBERS:
    for table, kind in ((MUTANTS, f"mutants_{number}"), (HEALTHY, f"healthy_{number}")):
        for path in files(kind):
            group = entries(load_module(path))
            assert not table.keys() & group.proofs.keys()
            table |= dict.fromkeys(group.proofs, group)


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


@pytest.mark.parametrize("number", NUMBERS)
def test_size(number):
    """So many that a spec describes on each side, of large sets every rarity, and reasons for the rest."""
    broken, right = ([entries(load_module(p)) for p in files(f"{kind}_{number}")] for kind in ("mutants", "healthy"))
    for groups in (broken, right):
        assert sum(name not in group.not_sayable for group in groups for name in group.proofs) == NUMBERS[number]
    rarities = {group.rarity[name] for group in broken for name in group.proofs}
    assert NUMBERS[number] < 60 or rarities == set(RARITIES) - ({"order"} if number == "third" else set())
    assert all(group.bugs[name] for group in broken for name in group.proofs)
