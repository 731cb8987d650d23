"""Every public function of funrl.algos has a row in a rows_*.py, or a reason to have none."""

import importlib
import inspect
import pkgutil

from pieces import NAMED
from tables import ROWS

import funrl.algos

NO_PIECES = {  # public functions that need no row: what is wrong with them fails the rows of what they serve
    "needs": "marks fields; test_a_piece_reads_no_field_that_it_does_not_name holds it to them",
    "needs_of": "the same",
    "check_rank": "test_arguments.py",
    "token_mean_of": "every metric",
    "where_masked": "every piece",
    "clean": "test_loss_does_not_see_what_is_outside_the_mask",
    "sequence_sums": "every reduction over sequences",
    "to_own_tokens": "every term of sequences",
    "accumulate": "gae and reward_to_go",
    "next_sampled": "gae",
    "last_of": "to_last_token",
    "groups.groups_of": "every piece that compares rows",
    "groups.group_sum": "the same",
    "groups.group_min": "the same",
    "groups.group_max": "the same",
    "groups.group_mean": "the same",
    "groups.group_std": "the same",
    "token_slots": "optimal_token_baseline",
    "slot_baseline": "optimal_token_baseline",
    "log_gap": "every correction",
    "gap_over": "every correction",
}


def public_functions():
    """Public functions of the algos modules, by "module.function"; test_named.py has the named algorithms."""
    found = {}
    for info in pkgutil.iter_modules(funrl.algos.__path__):
        module = importlib.import_module(f"funrl.algos.{info.name}")
        for name, value in vars(module).items():
            own = inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
            if own and info.name not in NAMED:
                found[f"{info.name}.{name}"] = value
    return found


def test_every_public_piece_has_a_row():
    covered = {row.name.split()[0] for row in ROWS} | {name for row in ROWS for name in row.also}
    functions = public_functions()
    assert len(functions) > 100
    assert set(functions) - covered - set(NO_PIECES) == set(), "add a row for each of these to a tests/algos/rows_*.py"
    assert covered - set(functions) == set(), "these rows are of functions that are not there"
    assert set(NO_PIECES) - set(functions) == set(), "these exemptions are of functions that are not there"
    assert set(NO_PIECES) & covered == set(), "these have rows and need no exemption"


def test_row_names_are_unique():
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names))
