"""Defaults of TRL's trainers (1.16), the names that identify each, and the names without an effect."""

from __future__ import annotations

from collections.abc import Mapping

from funrl.flags.foreign.values import items

COMMON = {  # defaults of all trainers that differ from ours or affect the meaning of other names
    "per_device_train_batch_size": "8",
    "gradient_accumulation_steps": "1",
    "num_train_epochs": "3.0",
    "lr_scheduler_type": "linear",
    "gradient_checkpointing": "true",
    "bf16": "none",
    "weight_decay": "0.0",
    "max_grad_norm": "1.0",
}
SAMPLED_DEFAULTS = {
    "num_generations": "8",
    "max_completion_length": "512",
    "num_iterations": "1",
    "epsilon": "0.2",
    "learning_rate": "1e-6",
    "temperature": "1.0",
    "top_p": "1.0",
    "top_k": "0",
    "repetition_penalty": "1.0",
}
PAIR_DEFAULTS = {"learning_rate": "1e-6", "beta": "0.1", "label_smoothing": "0.0", "max_length": "1024"}
TRAINERS: dict[str, dict[str, str]] = {  # the recipe of each trainer, and the defaults of its configuration
    "grpo": SAMPLED_DEFAULTS
    | {
        "beta": "0.0",
        "delta": "none",
        "loss_type": "dapo",
        "scale_rewards": "group",
        "entropy_coef": "0.0",
        "importance_sampling_level": "token",
        "sapo_temperature_pos": "1.0",
        "sapo_temperature_neg": "1.05",
    },
    "rloo": SAMPLED_DEFAULTS | {"num_generations": "2", "beta": "0.05", "normalize_advantages": "false"},
    "dpo": PAIR_DEFAULTS | {"loss_type": "sigmoid", "f_divergence_type": "reverse_kl"},
    "kto": {
        "learning_rate": "1e-6",
        "beta": "0.1",
        "loss_type": "kto",
        "desirable_weight": "1.0",
        "undesirable_weight": "1.0",
        "max_length": "1024",
        "train_sampling_strategy": "sequential",
    },
    "cpo": PAIR_DEFAULTS | {"loss_type": "sigmoid", "cpo_alpha": "1.0", "simpo_gamma": "0.5", "alpha": "0.0"},
    "orpo": {"learning_rate": "1e-6", "beta": "0.1", "max_length": "1024"},
    "gkd": {"learning_rate": "2e-5", "beta": "0.5", "lmbda": "0.5", "temperature": "0.9", "max_new_tokens": "128"},
    "sft": {
        "learning_rate": "2e-5",
        "loss_type": "nll",
        "max_length": "1024",
        "completion_only_loss": "none",
        "packing": "false",
    },
    "reward_model": {"learning_rate": "1e-4", "max_length": "1024"},
}
CLASSES = {
    "grpo": "GRPOConfig",
    "rloo": "RLOOConfig",
    "dpo": "DPOConfig",
    "kto": "KTOConfig",
    "cpo": "CPOConfig",
    "orpo": "ORPOConfig",
    "gkd": "GKDConfig",
    "sft": "SFTConfig",
    "reward_model": "RewardConfig",
}
OWN_NAMES = {  # names that only one trainer has, or the first of several
    "gkd": {"lmbda", "seq_kd", "teacher_model_name_or_path"},
    "kto": {"desirable_weight", "undesirable_weight"},
    "cpo": {"cpo_alpha", "simpo_gamma"},
    "rloo": {"normalize_advantages", "reward_clip_range"},
    "grpo": {"num_generations", "epsilon", "num_iterations", "reward_funcs", "scale_rewards", "epsilon_high"},
    "reward_model": {"center_rewards_coefficient"},
    "dpo": {"f_divergence_type", "use_weighting", "loss_weights", "ld_alpha", "rpo_alpha"},
    "sft": {"packing", "completion_only_loss", "assistant_only_loss", "dataset_text_field"},
}
OWN_LOSSES = {
    "kto": {"kto", "apo_zero_unpaired"},
    "cpo": {"simpo", "alphapo"},
    "sft": {"nll", "dft", "chunked_nll"},
    "grpo": {"grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo", "luspo"},
    "dpo": {
        "exo_pair",
        "nca_pair",
        "robust",
        "bco_pair",
        "sppo_hard",
        "aot",
        "aot_unpaired",
        "apo_zero",
        "apo_down",
        "discopop",
        "sigmoid_norm",
    },
}


def guessed_trainer(content: Mapping[str, str]) -> str | None:
    """The trainer of a configuration, by a name or loss that only it has; None if several are possible."""
    by_names = (trainer for trainer, names in OWN_NAMES.items() if names & set(content))
    loss = content.get("loss_type", "")
    several = len(items(loss)) > 1 or loss.startswith("[")
    by_loss = (trainer for trainer, names in OWN_LOSSES.items() if loss in names)
    return next(by_names, "dpo" if several else next(by_loss, None))


# Names that change only memory, speed, files or output.
IDLE = frozenset(
    [
        "bnb_4bit_quant_type",
        "data_seed",
        "dataloader_persistent_workers",
        "dataloader_pin_memory",
        "dataloader_prefetch_factor",
        "dataset_num_proc",
        "ddp_backend",
        "ddp_bucket_cap_mb",
        "ddp_find_unused_parameters",
        "ddp_timeout",
        "debug",
        "do_eval",
        "do_predict",
        "do_train",
        "ds3_gather_for_generation",
        "entropy_coef_delta",
        "entropy_coef_max",
        "entropy_coef_min",
        "entropy_target",
        "eval_accumulation_steps",
        "eval_delay",
        "eval_do_concat_batches",
        "eval_packing",
        "full_determinism",
        "generate_during_eval",
        "gradient_checkpointing_kwargs",
        "greater_is_better",
        "hub_model_id",
        "hub_private_repo",
        "hub_strategy",
        "hub_token",
        "include_num_input_tokens_seen",
        "is_encoder_decoder",
        "jit_mode_eval",
        "local_rank",
        "log_level",
        "log_multimodal",
        "log_on_each_node",
        "log_unique_prompts",
        "logging_first_step",
        "logging_nan_inf_filter",
        "max_tool_calling_iterations",
        "metric_for_best_model",
        "num_completions_to_print",
        "overwrite_output_dir",
        "pad_to_multiple_of",
        "pad_token",
        "padding_value",
        "precompute_ref_batch_size",
        "ref_model_mixup_alpha",
        "ref_model_sync_steps",
        "restore_callback_states_from_checkpoint",
        "save_on_each_node",
        "save_only_model",
        "save_safetensors",
        "skip_memory_metrics",
        "tf32",
        "torch_empty_cache_steps",
        "tp_size",
        "use_bnb_nested_quant",
        "use_cpu",
        "vllm_enable_sleep_mode",
        "vllm_group_port",
        "vllm_importance_sampling_cap",
        "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min",
        "vllm_importance_sampling_mode",
        "vllm_max_model_length",
        "vllm_model_impl",
        "vllm_server_host",
        "vllm_server_port",
    ]
)
