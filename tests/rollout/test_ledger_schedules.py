"""The ledger on random schedules, and with a fault planted in each of its transitions."""

import json
from pathlib import Path

import pytest
from random_ledgers import failures, planted

QUICK = 200  # schedules; `python tests/rollout/random_ledgers.py 10000` runs more
MANY = 2000
FAULTS = 400  # schedules at most until a planted fault is found
MUTATIONS = json.loads((Path(__file__).parent / "ledger_mutations.json").read_text())


def test_random_schedules():
    assert failures(range(QUICK)) == []


@pytest.mark.slow
def test_many_random_schedules():
    assert failures(range(MANY)) == []


@pytest.mark.parametrize("number", range(len(MUTATIONS)))
def test_a_planted_fault_is_found(number):
    mutation = MUTATIONS[number]
    assert failures(range(FAULTS), planted(mutation["before"], mutation["after"])), mutation
