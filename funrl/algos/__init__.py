"""Algorithms and what they are made of.

Every public name can be imported from here; its module is loaded on first use:

from funrl.algos import Algorithm, chain, clipped_surrogate, group_center, grpo, reduce
"""

import importlib
from typing import Any

from funrl.algos.recipes import NAMES, recipe

_PIECES = {
    "core": "Advantage Algorithm Divergence Loss RankError Reduction Signal add chain check_rank reduce"
    " run_piece scale stateless sum_losses weighted",
    "terms": "Filter Metrics Term check_called run_term typed_metric",
    "applying": "apply_advantage first_signal",
    "reward_parts": "advantage_parts loss_of_part",
    "metrics": "Max Mean Metric PieceError Sum divide mean_over_tokens merge token_mean_of value_of",
    "masks": "clean in_order on_tokens_of_sequence rounding row_or_episode_sums sequence_sums sums_by_sequence"
    " to_own_tokens total where_masked",
    "checking": "check check_order",
    "guarding": "described name_of",
    "reading": "CountError FieldReads reads run_advantage run_function",
    "explanation": "explain_algorithm",
    "compose": "corrected filtered kl_controller with_regularizers",
    "objectives": "by_source rows_of_objective some_across",
    "advantages.baselines": "batch_center batch_scale best_of_group check_eps class_sizes constant_baseline"
    " greedy_baseline group_center group_log_ratio group_scale informative_rescale leave_one_out"
    " length_weighted_center max_at_k optimal_value_baseline prompt_baseline relative_to_mean win_rate",
    "advantages.flow": "flow_targets",
    "advantages.groups": "Groups group_max group_mean group_min group_std group_sum groups_of power_of_two",
    "advantages.imitation": "weigh_demonstrations",
    "advantages.resampling": "resample_rows resampling_weights",
    "advantages.returns": "AdvantagesAndReturns accumulate gae generalised_advantages length_adaptive next_sampled"
    " reward_to_go whiten",
    "advantages.segments": "discount_segments mask_summaries",
    "advantages.several_rewards": "decoupled_groups parse_weights weighted_scores",
    "advantages.shaping": "Controller adaptive_kl clip_reward fixed_kl kl_in_reward last_of overlong_penalty"
    " running_normalise stop_properly to_last_token to_tokens token_rewards",
    "advantages.subtrees": "subtree_baselines",
    "advantages.steps": "hierarchical_center learn_observations role_baseline step_groups turn_length_penalty"
    " turn_relative",
    "advantages.teacher_rewards": "teacher_advantage weigh_early_tokens",
    "advantages.token_baselines": "implicit_rewards label_outcomes optimal_token_baseline slot_baseline token_slots",
    "advantages.token_selection": "adapt_entropy count_prompt_tokens covariance keep_highest_entropy"
    " mark_positives noise select_covariance_between select_highest_covariance share_of top_tokens",
    "advantages.turns": "to_turns turn_center turn_gae",
    "advantages.unpaired": "reference_point",
    "corrections.importance": "check_bounds gap_over importance_weights log_gap normalise_weights",
    "corrections.rejection": "keep_best mask_truncated reject_divergence reject_ratio reject_second_moment",
    "filters.by_group": "complete_groups mean_between unequal_scores",
    "filters.by_row": "every not_truncated rewarded",
    "losses.clipped": "ClippedSurrogate adaptive_entropy_bonus clipped_surrogate clipped_surrogate_loss entropy_bonus",
    "losses.implicit_reward": "implicit_reward_loss",
    "losses.kl": "kl_estimate kl_to kl_to_old kl_to_reference",
    "losses.likelihood": "acted_tokens demonstrated_tokens dynamic_likelihood entropy_gated_likelihood imitated_tokens"
    " negative_log_likelihood observed_tokens"
    " opening_tokens restrict sampled_tokens uncertain_likelihood",
    "losses.pair_losses": "PairLoss apo_down_pairs apo_zero_pairs bco_pairs check_beta discopop_pairs exo_pairs"
    " hinge_pairs ipo_pairs nca_pairs robust_pairs sigmoid_pairs smoothed sppo_pairs",
    "losses.pairs": "best_and_worst chosen compared gold online_pairs pair_metrics pair_sums pairs_present side_by_side"
    " to_pair_tokens",
    "losses.preference": "alpha_reward aot beyond_shorter chosen_likelihood gold_likelihood kto_loss log_likelihood"
    " odds_ratio of_completions on_policy_weight preference reference_log_ratio reward_rounding",
    "losses.ratios": "Ratio bounded_exp either log_ratio mean_of_sequence or_token_ratio product_ratio sequence_ratio"
    " sum_of_sequence times_ratio token_ratio",
    "losses.reductions": "constant_mean prompt_mean sequence_mean sequence_sum_mean token_mean token_sum",
    "losses.reward_models": "last_tokens pairwise_reward step_reward",
    "losses.selected": "entropy_above off_selected on_selected on_tokens probability_below",
    "losses.sequence_terms": "classification future_weighted gamma_weighted geometric_mean flow_balance"
    " log_ratio_regression mask_off_policy self_play_regression",
    "losses.teacher": "divergence_to_teacher forward_kl_topk kl_to_teacher",
    "losses.token_terms": "clipped_importance direct_reward divergence_mask masked_importance policy_gradient"
    " quadratic_surrogate soft_gate surrogate tapered",
    "losses.value_loss": "clipped_value_loss",
}
WHERE = {name: module for module, names in _PIECES.items() for name in names.split()}
WHERE |= {name: f"recipes.{name}" for name in NAMES}

__all__ = ["NAMES", "WHERE", "recipe", *WHERE]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *WHERE})
