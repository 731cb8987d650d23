"""Every public function of funrl.algos has a row in a rows_*.py, or a test of its own, or a reason to have neither."""

import ast
import importlib
import inspect
import pathlib
import pkgutil

from tables import ROWS

import funrl.algos
from funrl.algos import NAMES, WHERE

HERE = pathlib.Path(__file__).parent
TESTED = {  # name: the test that would fail if it were wrong
    "adaptive_kl": "test_arguments.py::test_adaptive_coefficients",
    "apply_advantage": "test_named.py::test_golden_numbers",
    "first_signal": "test_metrics.py::test_a_chain_begins_with_the_scores_or_zeros",
    "best_and_worst": "test_pairs.py::test_ranking",
    "check": "test_guards.py::test_a_broken_piece_is_refused_before_the_first_update",
    "check_beta": "test_arguments.py::test_bad_arguments_are_refused_at_once",
    "check_bounds": "test_arguments.py::test_bad_arguments_are_refused_at_once",
    "check_eps": "test_arguments.py::test_bad_arguments_are_refused_at_once",
    "check_order": "test_guards.py::test_a_broken_piece_is_refused_before_the_first_update",
    "check_called": "test_guards.py::test_a_broken_piece_is_refused_before_the_first_update",
    "check_rank": "test_arguments.py::"
    "test_outcomes_and_token_rewards_are_told_apart_even_where_rows_are_as_many_as_tokens",
    "by_source": "test_objectives.py::test_each_objective_has_the_numbers_that_it_has_alone",
    "rows_of_objective": "test_objectives.py::test_each_objective_has_the_numbers_that_it_has_alone",
    "some_across": "test_objectives.py::test_each_objective_has_the_numbers_that_it_has_alone",
    "chosen": "test_pairs.py::test_layout",
    "piece_call": "test_explanation.py::test_pieces_of_ones_own_show_by_name_arguments_and_docstring",
    "chain_links": "test_explanation.py::test_every_recipe_is_explained",
    "clean": "test_pieces.py::test_a_piece_has_its_properties",
    "corrected": "test_compose.py::test_corrected_and_filtered",
    "defined_at": "test_guards.py::test_a_broken_piece_is_refused_before_the_first_update",
    "described": "test_guards.py::test_a_broken_piece_is_refused_before_the_first_update",
    "compared": "test_pairs.py::test_triples",
    "gold": "test_pairs.py::test_triples",
    "divide": "test_metrics.py::test_metrics_are_typed",
    "composition_text": "test_explanation.py::test_the_composition_of_recipes",
    "explain_algorithm": "test_explanation.py::test_every_recipe_is_explained",
    "expression": "test_explanation.py::test_the_composition_of_recipes",
    "is_piece": "test_explanation.py::test_pieces_of_ones_own_show_by_name_arguments_and_docstring",
    "filtered": "test_compose.py::test_corrected_and_filtered",
    "fixed_kl": "test_arguments.py::test_adaptive_coefficients",
    "guarded": "test_guards.py::test_a_broken_piece_is_refused_before_the_first_update",
    "is_own": "test_guards.py::test_a_broken_piece_is_refused_before_the_first_update",
    "kl_controller": "test_arguments.py::test_bad_arguments_are_refused_at_once",
    "last_tokens": "test_pairs.py::test_last_tokens",
    "line_of": "test_guards.py::test_a_broken_piece_is_refused_before_the_first_update",
    "loss_factors": "test_arguments.py::test_bad_arguments_are_refused_at_once",
    "mean_over_tokens": "test_pieces.py::test_a_piece_has_its_properties",
    "merge": "test_metrics.py::test_metrics_are_typed",
    "name_of": "test_guards.py::test_a_broken_piece_is_refused_before_the_first_update",
    "noise": "test_selection.py::test_noise",
    "online_pairs": "test_pairs.py::test_ranking",
    "pair_metrics": "test_pairs.py::test_places",
    "pair_sums": "test_pairs.py::test_layout",
    "pairs_present": "test_pairs.py::test_places",
    "parse_weights": "test_arguments.py::test_numbers_with_commas_between_are_weights",
    "reads": "test_pieces.py::test_a_piece_has_its_properties",
    "advantage_parts": "test_reward_parts.py::test_parts_of_an_advantage_equal_loops_and_add_up_to_it",
    "loss_of_part": "test_reward_parts.py::test_parts_of_a_loss_keep_the_branch_of_the_whole",
    "opening_tokens": "test_flowrl.py::test_the_two_losses_have_the_gradient_of_the_joint_loss",
    "reward_rounding": "test_pairs.py::test_a_difference_within_rounding_is_a_tie",
    "rounding": "test_pairs.py::test_a_difference_within_rounding_is_a_tie",
    "reference_point": "test_pairs.py::test_reference_point",
    "resample_rows": "test_selection.py::test_resampling",
    "reverse_linear_scan": "test_scan.py::test_equals_the_loop",
    "resampling_weights": "test_selection.py::test_the_weights_of_resampling_can_be_seen",
    "run_advantage": "test_guards.py::test_what_a_chain_makes_is_found_by_running_it",
    "run_function": "test_pieces.py::test_a_piece_has_its_properties",
    "or_token_ratio": "test_guards.py::test_a_broken_piece_is_refused_before_the_first_update",
    "run_piece": "test_guards.py::test_a_broken_piece_is_refused_before_the_first_update",
    "run_term": "test_guards.py::test_a_broken_piece_is_refused_before_the_first_update",
    "typed_metric": "test_metrics.py::test_metrics_are_typed",
    "share_of": "test_selection.py::test_random_selection",
    "side_by_side": "test_pairs.py::test_layout",
    "smoothed": "test_terms.py::test_equals_its_reference_whatever_lies_outside_the_mask",
    "to_pair_tokens": "test_pairs.py::test_places",
    "token_mean_of": "test_metrics.py::test_metrics_are_typed",
    "top_tokens": "test_selection.py::test_the_same_tokens_are_on_top_as_by_sorting",
    "total": "test_pieces.py::test_a_piece_has_its_properties",
    "value_of": "test_pieces.py::test_a_piece_has_its_properties",
    "units_of": "test_episodes.py::test_units_are_in_the_order_of_episode_and_agent_wherever_their_rows_are",
    "episode_units": "test_episodes.py::test_losses_are_those_of_a_loop_over_episodes",
    "episodes_of": "test_episodes.py::test_losses_are_those_of_a_loop_over_episodes",
    "by_unit": "test_episodes.py::test_units_are_in_the_order_of_episode_and_agent_wherever_their_rows_are",
    "acted_tokens": "../trainer/test_episode_steps.py::test_observations_are_learned_and_counted_once",
    "observed_tokens": "../trainer/test_episode_steps.py::test_observations_are_learned_and_counted_once",
    "choose_rows": "test_episodes.py::test_a_unit_that_is_chosen_twice_is_two",
    "units_of_copies": "test_episodes.py::test_a_unit_that_is_chosen_twice_is_two",
    "first_of_equal": "test_forks.py::test_a_fork_changes_no_loss",
    "sum_of_earlier_rows": "test_forks.py::test_a_fork_changes_no_recipe",
    "episode_fields": "test_episodes.py::test_the_number_of_a_unit_goes_with_a_correction_of_the_mask",
}
SERVE = {  # name: the rows that fail if it is wrong
    "accumulate": "gae, reward_to_go",
    "either": "soft_gate, kto_loss",
    "gap_over": "importance_weights",
    "group_max": "best_of_group",
    "group_mean": "group_center",
    "group_min": "group_center",
    "group_std": "group_scale",
    "group_sum": "leave_one_out",
    "groups_of": "group_center",
    "in_order": "kl_in_reward, whiten",
    "last_of": "to_last_token",
    "log_gap": "importance_weights",
    "next_sampled": "gae",
    "power_of_two": "group_scale, whiten",
    "check_factors": "to_turns",
    "groups_with": "turn_center",
    "turn_count": "turn_center",
    "turn_returns": "to_turns",
    "row_turns": "to_turns",
    "on_tokens_of_sequence": "sequence_ratio",
    "row_or_episode_sums": "importance_weights",
    "sequence_sums": "sequence_mean",
    "span_sums": "teacher_advantage",
    "sum_of_earlier_rows": "weigh_early_tokens",
    "sums_by_sequence": "sequence_ratio",
    "slot_baseline": "optimal_token_baseline",
    "to_own_tokens": "sequence_ratio",
    "token_slots": "optimal_token_baseline",
    "where_masked": "to_tokens",
}


def modules():
    result = pkgutil.walk_packages(funrl.algos.__path__, "funrl.algos.")
    return [importlib.import_module(x.name) for x in result if not x.ispkg]


def public_functions():
    """Public functions and where they are, those of recipes aside."""
    results = {}
    for module in modules():
        for name, value in vars(module).items():
            own = inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
            if own and name not in NAMES:
                assert name not in results, f"{name} is in {module.__name__} and in {results[name]}"
                results[name] = module.__name__
    return results


def test_every_public_piece_has_a_row_or_a_test():
    covered = {row.name.split()[0] for row in ROWS} | {name for row in ROWS for name in row.also}
    functions = set(public_functions()) - {"on_example", "learns_alone"}  # of `reads`, `check` and a job
    assert len(functions) > 100
    assert functions - covered - set(TESTED) - set(SERVE) == set(), "add a row for each of these to a rows_*.py"
    assert covered - functions - set(NAMES) == set(), "these rows are of functions that are not there"
    assert (set(TESTED) | set(SERVE)) - functions == set(), "these exemptions are of functions that are not there"
    assert (set(TESTED) | set(SERVE)) & covered == set(), "these have rows and need no exemption"
    assert {row for rows in SERVE.values() for row in rows.split(", ")} <= covered


def test_the_tests_that_stand_for_rows_are_there():
    for where in TESTED.values():
        file, test = where.split("::")
        tree = ast.parse((HERE / file).read_text())
        assert test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, where


def test_every_row_has_a_reference():
    kinds = {"advantage", "term", "loss", "reduction", "filter"}
    assert [row.name for row in ROWS if row.kind not in kinds or not callable(row.reference)] == []
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names))


def test_the_index_has_every_public_name_and_where_it_is():
    functions = public_functions() | {name: f"funrl.algos.recipes.{name}" for name in NAMES}
    assert {name: WHERE[name] for name in functions if name in WHERE} == {
        name: module.removeprefix("funrl.algos.") for name, module in functions.items() if name in WHERE
    }
    inner = {"on_example", "learns_alone", "loss_factors", "defined_at", "guarded", "is_own", "line_of"}
    inner |= {"piece_call", "chain_links", "composition_text", "expression", "is_piece"}  # of explanations
    inner |= {"reverse_linear_scan"}
    inner |= {"units_of", "by_unit", "episode_fields", "episode_units", "episodes_of"}  # of chains on rows of episodes
    inner |= {"row_turns", "turn_count", "turn_returns", "groups_with", "check_factors"}  # of turns
    inner |= {"units_of_copies", "choose_rows", "first_of_equal", "sum_of_earlier_rows", "span_sums"}
    assert set(functions) - set(WHERE) == inner
    for name, module in WHERE.items():
        assert getattr(funrl.algos, name) is getattr(importlib.import_module(f"funrl.algos.{module}"), name)
    inside = {info.name.split(".")[2] for info in pkgutil.walk_packages(funrl.algos.__path__, "funrl.algos.")}
    assert inside & set(WHERE) == set(), "a file and what it holds would share a name"
    assert set(dir(funrl.algos)) >= set(WHERE)


def test_every_recipe_is_a_file_and_every_argument_has_a_default():
    files = {path.stem for path in pathlib.Path(funrl.algos.__path__[0], "recipes").glob("*.py")} - {"__init__"}
    assert files == set(NAMES)
    for name in NAMES:
        recipe = funrl.algos.recipe(name)
        parameters = inspect.signature(recipe).parameters.values()
        assert all(p.default is not p.empty for p in parameters), name
        text = inspect.getdoc(recipe)
        assert all(p.name in text for p in parameters), f"{name}: an argument is not in its docstring"
