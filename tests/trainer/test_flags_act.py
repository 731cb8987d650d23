"""Every flag of `Settings` changes something: the numbers of a run here, or a named test elsewhere shows what."""

import ast
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from selection import quick
from small_runs import GRPO, PPO, Quiet, begin, one_step, small_job, whole_weights

from funrl import trees
from funrl.algos.recipes.dapo import dapo
from funrl.algos.recipes.prime import prime
from funrl.api.warm_start import warm_started
from funrl.mesh.mesh import single
from funrl.optim import clip_by_global_norm, global_norm
from funrl.trainer import loop
from funrl.trainer.jobs import learning_rates
from funrl.trainer.jobs.sharding import stored_rules
from funrl.trainer.settings.settings import settings_flags, settings_of
from funrl.trainer.steps import step

TESTS = Path(__file__).parents[1]
BASE: dict[str, Any] = {"batch_prompts": 2, "minibatches": 1}

# flag: (recipe, the run that it changes, the change)
CHANGES: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "batch_prompts": (GRPO, {}, 3),
    "samples_per_prompt": (GRPO, {}, 3),
    "max_new_tokens": (GRPO, {}, 3),
    "new_tokens_per_step": (GRPO, {}, 2),
    "temperature": (GRPO, {}, 0.7),
    "top_k": (GRPO, {}, 3),
    "top_p": (GRPO, {}, 0.5),
    "min_p": (GRPO, {}, 0.95),
    "mask_replay": (GRPO, {"top_p": 0.5}, True),
    "raw_logp": (GRPO, {"temperature": 0.5}, True),
    "repetition_penalty": (GRPO, {}, 1e6),  # the logits of untrained weights are small
    "seed": (GRPO, {}, 1),
    "warmstart_steps": (GRPO, {}, 1),
    "dtype": (GRPO, {}, "float32"),
    "lr": (GRPO, {}, 1e-3),
    "optimizer": (GRPO, {}, "muon"),
    "lr_schedule": (GRPO, {}, "cosine"),
    "lr_warmup_steps": (GRPO, {}, 2),
    "weight_decay": (GRPO, {}, 0.5),
    "decay_all": (GRPO, {"weight_decay": 0.5}, True),
    "max_grad_norm": (GRPO, {"optimizer": "muon"}, 1e-9),  # Adam would undo a factor of all gradients
    "freeze": (GRPO, {}, "layers/0"),
    "epochs": (GRPO, {}, 2),
    "minibatches": (GRPO, {}, 2),
    "critic_lr": (PPO, {}, 1e-4),
    "critic_warmup_steps": (PPO, {}, 1),
    "critic_updates": (PPO, {}, 2),
    "implicit_reward_lr": (prime, {"max_refills": 1}, 1e-4),
    "max_refills": (dapo, {"max_refills": 1}, 3),
    "lora_rank": (GRPO, {"lora_rank": 2}, 1),
    "lora_alpha": (GRPO, {"lora_rank": 2}, 16.0),
    "lora_targets": (GRPO, {"lora_rank": 2}, "q_proj"),
}
QUICK = (
    "temperature",
    "seed",
    "dtype",
    "optimizer",
    "epochs",
)
SHOWN: dict[str, Any] = {"steps": 3, "eval_every": 1, "eval_prompts": 3, "eval_temperature": 2.0, "sample_every": 1}
TABLES: dict[str, Any] = {"fsdp": False, "fsdp_axes": "ep", "fsdp_models": "critic"}
TESTED = {  # flag: the test that fails where it does nothing
    "agents": "trainer/test_agents.py::test_an_earlier_self_stays_or_is_renewed",
    "mesh": "trainer/test_loop_train.py::test_the_same_lines_and_samples_on_every_mesh",
    "staleness": "trainer/test_placement_runs.py::test_no_token_is_older_than_the_staleness",
    "place": "trainer/test_placement_runs.py::test_apart_the_bits_are_those_of_ranks_that_do_both",
    "generate_mesh": "cli/test_bad_input.py::test_bad_input_is_refused_before_any_work",
    "device": "cli/test_bad_input.py::test_cuda_without_a_gpu_is_refused",
    "router_bias_rate": "trainer/test_router_bias.py::test_an_uneven_router_becomes_even",
    "router_replay": "trainer/test_router_replay.py::test_replay_narrows_the_gap",
    "sequence_parallel": "trainer/test_layouts.py::test_flags_that_cannot_work_are_refused",
    "adapter": "cli/test_adapter_models.py::test_a_run_goes_on_with_an_adapter",
    "save_dtype": "trainer/test_save_dtype.py::test_a_model_is_saved_as_it_came_or_as_the_flag_says",
    "grad_reduce_dtype": "trainer/test_layouts.py::"
    "test_gradients_are_summed_in_the_dtype_of_the_flag_and_the_run_says_it",
    "split_residual": "cost/test_dry_ranks.py::test_tensor_ranks_hold_a_share_and_talk",
    "remat": "cost/test_dry_run.py::test_so_it_does_whatever_the_flags",
    "backend": "trainer/test_lowered_runs.py::test_a_run_in_jax_has_the_numbers_of_one_in_torch",
    "offload": "cost/test_dry_run.py::test_what_is_offloaded_is_away_where_it_is_not_needed",
    "hardware": "cost/test_dry_report.py::test_the_command_prints_everything_and_starts_nothing",
    "env_check": "trainer/test_env_check.py::test_one_that_works_is_tried_without_a_trace",
    "timeout": "processes/test_heartbeat.py::test_a_rank_that_is_stopped_is_named_and_so_is_the_flag",
    "heartbeat": "api/test_python.py::test_a_reward_that_takes_long_is_told_after_a_heartbeat",
    "empty_filter": "trainer/test_empty_filter.py::test_a_skipped_step_changes_no_weight_and_is_said",
    "stalled_after": "cli/test_interrupts.py::test_a_rank_that_is_stopped_ends_the_run_by_its_flag",
    "max_skipped": "trainer/test_skipped.py::test_too_many_in_a_row_stop_the_run_with_its_state_saved",
    "compile": "trainer/test_compile_phase.py::"
    "test_a_run_compiles_before_the_first_step_and_a_resumed_run_compiles_nothing_anew",
    "report_to": "track/test_services.py::test_a_run_gives_its_metrics_to_the_trackers_of_its_flag",
    "metrics_port": "track/test_spans.py::test_prometheus_reads_the_newest_metrics_of_a_run",
    "kv_cache_gb": "trainer/test_engine_flags.py::test_flags_bound_the_engine_and_change_no_number",
    "decode_rows": "trainer/test_engine_flags.py::test_flags_bound_the_engine_and_change_no_number",
    "model_code": "trainer/test_module_runs.py::test_what_it_cannot_do_is_refused_before_the_run",
    "engine": "trainer/test_vllm_runs.py::test_a_run_that_vllm_cannot_generate_for_is_refused",
    "engine_url": "trainer/test_vllm_runs.py::test_the_servers_of_a_run_are_one_for_each_data_rank",
    "engine_timeout": "trainer/test_vllm_runs.py::test_a_run_waits_for_its_server_and_names_it",
    "speculate": "trainer/test_engine_flags.py::test_drafts_take_fewer_passes_and_change_no_number",
    "rollout_dtype": "trainer/test_float8_runs.py::test_the_engine_rounds_and_the_trainer_does_not",
    "state_snapshot_tokens": "trainer/test_engine_flags.py::test_states_are_kept_as_often_as_a_flag_says",
    "queue": "trainer/test_engine_flags.py::test_ranks_take_prompts_as_they_have_room_or_by_their_numbers",
    "eval_top_k": "trainer/test_eval_sampling.py::test_evaluation_is_drawn_from_that_distribution",
    "eval_top_p": "trainer/test_eval_sampling.py::test_flags_of_sampling_reach_the_engine",
    "eval_min_p": "trainer/test_eval_sampling.py::test_flags_of_sampling_reach_the_engine",
    "eval_repetition_penalty": "trainer/test_eval_sampling.py::test_flags_of_sampling_reach_the_engine",
    "token_budget": "cost/test_dry_run.py::test_many_micro_batches_and_mini_batches_are_on_the_line",
    "score_token_budget": "trainer/test_score.py::test_what_learns_nothing_is_packed_by_a_budget_of_its_own",
    "model": "cli/test_own_model.py::test_the_reward_rises_and_the_text_stays_near_the_models",
    "task": "trainer/test_settings.py::test_choices_are_those_of_the_modules_that_act_on_them",  # it has one choice
    "prompts": "cli/test_own_model.py::test_the_reward_rises_and_the_text_stays_near_the_models",
    "reward": "cli/test_own_model.py::test_the_reward_rises_and_the_text_stays_near_the_models",
    "reward_model": "trainer/test_completion_scores.py::test_it_may_be_all_that_scores",
    "process_reward_model": "trainer/test_own_texts.py::test_every_step_is_a_reward_of_the_token_that_ends_it",
    "process_reward": "trainer/test_own_texts.py::test_every_step_is_a_reward_of_the_token_that_ends_it",
    "step_separator": "trainer/test_own_texts.py::test_a_separator_of_ones_own",
    "judge": "trainer/test_own_texts.py::test_a_judge_reads_the_completion_and_its_verdict_is_the_score",
    "judge_template": "trainer/test_own_texts.py::test_a_judge_reads_the_completion_and_its_verdict_is_the_score",
    "judge_pattern": "trainer/test_own_texts.py::test_a_judge_reads_the_completion_and_its_verdict_is_the_score",
    "judge_max_new_tokens": "trainer/test_own_texts.py::test_a_judge_reads_the_completion_and_its_verdict_is_the_score",
    "reward_workers": "trainer/test_pending_rewards.py::test_workers_change_no_bit_of_a_run",
    "reward_timeout": "trainer/test_pending_rewards.py::test_a_reward_that_takes_longer_than_its_flag_ends_the_run",
    "reward_weights": "cli/test_experiments.py::test_gdpo_weighs_by_the_flag_that_weighs_rewards",
    "data": "trainer/test_gkd.py::test_given_texts_are_distilled_too",
    "fields": "trainer/test_job_data.py::test_fields_name_the_columns_of_prompts_and_texts",
    "eval_data": "trainer/test_prompt_data.py::test_eval_data_is_held_out_instead_of_a_tenth",
    "eval_samples": "trainer/test_evaluation.py::test_metrics_are_those_of_the_table",
    **dict.fromkeys(
        ("prompt_template", "system_prompt", "few_shot", "chat_template", "tools", "template_arguments"),
        "trainer/test_prompt_data.py::test_every_flag_of_the_format_changes_a_prompt",
    ),
    "long_prompts": "trainer/test_prompt_data.py::test_long_prompts_are_refused_dropped_or_cut_before_the_run",
    "max_prompt_tokens": "trainer/test_prompt_data.py::test_long_prompts_are_refused_dropped_or_cut_before_the_run",
    "max_text_tokens": "trainer/test_job_data.py::test_texts_that_are_too_long_are_refused_dropped_or_shortened",
    "max_pixels": "trainer/test_picture_jobs.py::test_a_bound_on_pixels_makes_pictures_smaller_and_is_saved",
    "router_aux_coef": "trainer/test_router_losses.py::test_several_micro_batches_have_the_gradient_of_one",
    "router_z_coef": "trainer/test_router_losses.py::test_several_micro_batches_have_the_gradient_of_one",
    "curriculum": "trainer/test_curriculum.py::test_a_resumed_run_goes_on_with_the_same_prompts_bit_for_bit",
    "difficulty": "trainer/test_curriculum.py::test_prompts_that_are_solved_are_left_alone_from_then_on",
    "teacher": "trainer/test_roles.py::test_a_teacher_gives_likely_tokens_and_the_policy_comes_nearer_to_it",
    "teacher_top_k": "trainer/test_roles.py::test_a_teacher_gives_likely_tokens_and_the_policy_comes_nearer_to_it",
    "dry_run": "cost/test_dry_report.py::test_the_command_prints_everything_and_starts_nothing",
    "prompt_tokens": "cost/test_dry_run.py::test_tokens_of_a_prompt_are_the_flags_or_the_embedded_tasks",
    "text_tokens": "cost/test_dry_report.py::test_texts_have_flags_of_their_own",
    "json": "cost/test_dry_report.py::test_json_is_one_object_with_the_numbers_of_the_tables",
    "explain_every": "trainer/test_reward_gradients.py::test_a_run_explains_every_so_many_steps_and_learns_the_same",
    "profile": "trainer/test_profiling.py::test_a_trace_has_the_phases_of_its_steps",
    "profile_ranks": "trainer/test_profiling.py::test_ranks_that_are_named_write_a_trace",
    "verify_sync": "trainer/test_verify.py::test_the_flags_say_what_is_compared",
    "probe_sync_every": "trainer/test_verify.py::test_the_flags_say_what_is_compared",
    "run_dir": "cli/test_experiments.py::test_an_experiment_runs_and_leaves_its_files",
    "keep_checkpoints": "trainer/test_checkpoint.py::test_the_newest_are_kept_and_the_best",
    "save_every": "trainer/test_checkpoint.py::test_a_resumed_run_has_the_same_bits_as_one_that_never_stopped",
    "save_rollouts": "trainer/test_replay.py::test_which_steps_are_kept",
    "keep_rollouts": "trainer/test_replay.py::test_which_steps_are_kept",
    "teacher_context": "trainer/test_teacher_context.py::test_the_teacher_scores_a_completion_after_its_own_prompt",
    "follow": "trainer/test_follow.py::test_a_reference_follows_the_policy",
    "foreign_rows": "trainer/test_foreign_row_runs.py::test_what_is_dropped_is_in_no_denominator",
    "on_gap": "trainer/test_gap.py::test_a_gap_where_there_should_be_none_stops_the_run_or_is_said",
    "numerics": "trainer/test_numerics.py::test_a_run_that_would_have_a_gap_is_refused",
    "on_reward_error": "trainer/test_failed_rewards.py::test_a_completion_whose_reward_failed_is_zero_or_not_there",
    "resize_vocab": "models/test_resize.py::test_a_run_adds_them_and_transformers_opens_what_it_saves",
    **dict.fromkeys(
        (
            *("episode_turns", "episode_tokens", "env_timeout", "episode_retries", "max_waiting"),
            *("tool_parser", "tool_tokens", "history"),
        ),
        "trainer/test_env_flags.py::test_flags_bound_the_episodes",
    ),
    **dict.fromkeys(
        ("assume_turns", "assume_turn_tokens"),
        "trainer/test_episode_dry_run.py::test_tokens_and_turns_are_those_of_a_real_run",
    ),
    "assume_pictures": "cost/test_dry_pictures.py::test_pictures_are_bounded_by_pixels_and_by_the_row",
    "assume_tool_seconds": "cost/test_dry_turns.py::test_seconds_of_tools_lengthen_generation",
    "tool_trace": "cost/test_dry_turns.py::test_a_trace_has_waits_or_spans",
    **dict.fromkeys(
        ("staleness", "window", "lengths"), "cost/test_schedule_report.py::test_flags_decide_what_is_simulated"
    ),
    "env": "trainer/test_env_flags.py::test_an_environment_of_a_file",
    "env_workers": "trainer/test_env_flags.py::test_workers_of_an_environment_change_no_bit",
    "env_args": "trainer/test_env_flags.py::test_arguments_and_prompts_of_an_environment",
    "resume": "trainer/test_checkpoint.py::test_a_resumed_run_has_the_same_bits_as_one_that_never_stopped",
}


@pytest.mark.slow
def test_every_flag_is_here():
    named = [*CHANGES, *SHOWN, *TABLES, *TESTED]
    assert len(named) == len(set(named)) and set(named) == set(settings_flags())
    for where in TESTED.values():
        file, test = where.split("::")
        tree = ast.parse((TESTS / file).read_text())
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, where
    silent = [name for name, where in TESTED.items() if not names_flag(TESTS / where.split("::")[0], name)]
    assert silent == [], "the file of its test does not name the flag"


def names_flag(file, name):
    """Whether a test file gives a flag: as an argument, a key or a word of a command line."""
    return re.search(rf"\b{name}\b", file.read_text()) is not None


def weights_after(recipe, **settings):
    """The policy's weights, or those of every role that learns, after two steps."""
    job = small_job(recipe, **BASE | {"steps": 4} | settings)
    with warm_started(job) as started:
        run, state = begin(started, single())
        for _ in range(2):
            state, _ = one_step(run, state)
        return whole_weights(run, state)


def moved(before, after):
    pairs = zip(trees.named(before), trees.named(after), strict=True)
    return any(x.shape != y.shape or not torch.equal(x.double(), y.double()) for (_, x), (_, y) in pairs)


@functools.cache
def weights_before(recipe, settings):
    """Weights of the run that a flag is to change, which are those of the same run again."""
    before = weights_after(recipe, **dict(settings))
    assert not moved(before, weights_after(recipe, **dict(settings))), "the same run twice"
    return before


@pytest.mark.parametrize("name", quick(CHANGES, QUICK))
def test_a_flag_of_the_update_changes_the_weights(name):
    recipe, settings, value = CHANGES[name]
    before = weights_before(recipe, tuple(settings.items()))
    assert moved(before, weights_after(recipe, **settings | {name: value}))


@functools.cache
def shown(**settings):
    """What an observer receives of a run: metrics by step, without times, and the samples."""
    job, observer = small_job(GRPO, **BASE | {"steps": 2, "eval_every": 2, "sample_every": 5} | settings), Quiet()
    loop.train_loop(job, single(), observer)
    values = [(n, {k: v for k, v in step.items() if k.startswith("eval/")}) for n, step in observer.steps]
    return values, observer.shown


@pytest.mark.parametrize("name", SHOWN)
def test_a_flag_of_the_output_changes_what_is_shown(name):
    before = shown(steps=3) if name == "sample_every" else shown()
    assert before != shown(**({"steps": 3} if name == "sample_every" else {}) | {name: SHOWN[name]})


@pytest.mark.parametrize("name", TABLES)
def test_a_flag_of_the_layout_changes_the_table_of_a_role(name):
    base = {"mesh": "dp2", "fsdp": True}
    tables = [stored_rules(settings_of(**base | more), "policy") for more in ({}, {}, {name: TABLES[name]})]
    assert tables[0] == tables[1] != tables[2]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_global_norm_is_taken_once_an_update(optimizer, monkeypatch):
    taken = []

    def counting(*args):
        taken.append(args)
        return global_norm(*args)

    monkeypatch.setattr(step, "global_norm", counting)
    clip = functools.partial(clip_by_global_norm, norm_of=counting)  # which takes it where it is not handed over
    monkeypatch.setattr(learning_rates, "clip_by_global_norm", clip)
    weights_after(PPO, minibatches=2, optimizer=optimizer)
    assert len(taken) == 2 * 2 * 2, "steps, mini-batches, models"
