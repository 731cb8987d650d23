"""Every name of TRL and verl that `funrl import` knows has the meaning that is declared here, or stops the import.

Losses are compared with their formulas in tests/algos/test_imported_losses.py; a name of a loss stands here too.
"""

import json
import re

import pytest

from funrl.cli import main as cli
from funrl.cli.import_config import imported
from funrl.flags.foreign import verl
from funrl.flags.foreign.files import shell_expanded
from funrl.flags.foreign.trainers import CLASSES, IDLE, TRAINERS
from funrl.flags.foreign.trl import TRL
from funrl.flags.foreign.verl import VERL

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
ONE = {"max_steps": 12}
GROUPS = {"algorithm.adv_estimator": "grpo", f"{R}.n": 4, "trainer.total_training_steps": 12}
CRITIC = {"trainer.total_training_steps": 12}
STOPS = "stops"

# name: (trainer, what is given, flags of the whole file, or STOPS where this name has no equal); {}: the file is as it
# is without the name
OF_TRL = {
    "model_name_or_path": ("sft", {"model_name_or_path": "m"}, {"model": "m"}),
    "model_revision": ("sft", {"model_revision": "v2"}, STOPS),
    "reward_model_name_or_path": ("grpo", {"reward_model_name_or_path": "m"}, {"reward_model": "m"}),
    "reward_model_path": ("grpo", {"reward_model_path": "m"}, {"reward_model": "m"}),
    "teacher_model_name_or_path": ("gkd", {"teacher_model_name_or_path": "m"}, {"teacher": "m"}),
    "dataset_name": ("grpo", {"dataset_name": "trl-lib/tldr"}, STOPS),
    "dataset_config": ("grpo", {"dataset_config": "main"}, STOPS),
    "dataset_train_split": ("grpo", {"dataset_train_split": "all"}, STOPS),
    "dataset_test_split": ("sft", {"dataset_test_split": "test"}, {}),
    "dataset_streaming": ("sft", {"dataset_streaming": True}, STOPS),
    "remove_unused_columns": ("grpo", {"remove_unused_columns": True}, {}),
    "trust_remote_code": ("sft", {"trust_remote_code": True}, {}),
    "torch_compile": ("sft", {"torch_compile": True}, {}),
    "eval_on_start": ("sft", {"eval_on_start": False}, {}),
    "dataset_text_field": ("sft", {"dataset_text_field": "body"}, STOPS),
    "reward_funcs": ("grpo", {"reward_funcs": ["a.b.f", "x.py:g"]}, {"reward": "a.b:f,x.py:g"}),
    "reward_weights": ("grpo", {"reward_weights": [1.0, 0.5]}, {"reward_weights": "1.0,0.5"}),
    "output_dir": ("grpo", {"output_dir": "d"}, {"run_dir": "d"}),
    "learning_rate": ("grpo", {"learning_rate": 3e-6}, {"lr": "3e-06"}),
    "per_device_train_batch_size": ("grpo", {"per_device_train_batch_size": 16}, {"batch_prompts": "2"}),
    "gradient_accumulation_steps": ("sft", {"gradient_accumulation_steps": 4}, {"batch_prompts": "32"}),
    "steps_per_generation": (
        "grpo", {"steps_per_generation": 4, "loss_type": "grpo"}, {"batch_prompts": "4", "minibatches": "4"}
    ),
    "generation_batch_size": (
        "grpo", {"generation_batch_size": 16, "loss_type": "grpo"}, {"batch_prompts": "2", "minibatches": "2"}
    ),
    "num_iterations": ("grpo", {"num_iterations": 3, "max_steps": 12}, {"epochs": "3", "steps": "4"}),
    "num_ppo_epochs": ("grpo", {"num_ppo_epochs": 2}, {"epochs": "2"}),
    "num_mini_batches": ("grpo", {"num_mini_batches": 2}, {"minibatches": "2"}),
    "num_train_epochs": ("sft", {"num_train_epochs": 2, "max_steps": -1}, STOPS),
    "max_steps": ("grpo", {"steps_per_generation": 4, "loss_type": "grpo", "max_steps": 10}, STOPS),
    "eval_steps": ("grpo", {"eval_steps": 20}, {"eval_every": "20"}),
    "save_steps": ("grpo", {"save_steps": 20}, {"save_every": "20"}),
    "save_total_limit": ("grpo", {"save_total_limit": 3}, {"keep_checkpoints": "3"}),
    "logging_steps": ("grpo", {"logging_steps": 10}, {}),
    "eval_strategy": ("grpo", {"eval_strategy": "epoch"}, {}),
    "save_strategy": ("grpo", {"save_strategy": "no"}, {"save_every": "0"}),
    "logging_strategy": ("grpo", {"logging_strategy": "epoch"}, {}),
    "report_to": ("grpo", {"report_to": ["wandb", "tensorboard"]}, {"report_to": "wandb"}),
    "run_name": ("grpo", {"run_name": "n"}, {}),
    "logging_dir": ("grpo", {"logging_dir": "n"}, {}),
    "lr_scheduler_type": ("grpo", {"lr_scheduler_type": "polynomial"}, STOPS),
    "warmup_ratio": ("grpo", {"warmup_ratio": 0.3}, {"lr_warmup_steps": "4"}),  # of 12 updates, rounded up
    "warmup_steps": ("grpo", {"warmup_steps": 5}, {"lr_warmup_steps": "5"}),
    "weight_decay": ("grpo", {"weight_decay": 0.1}, {"weight_decay": "0.1"}),
    "max_grad_norm": ("grpo", {"max_grad_norm": 0.2}, {"max_grad_norm": "0.2"}),
    "seed": ("grpo", {"seed": 7}, {"seed": "7"}),
    "optim": ("grpo", {"optim": "adafactor"}, STOPS),
    "adam_beta1": ("grpo", {"adam_beta1": 0.8}, STOPS),
    "adam_beta2": ("grpo", {"adam_beta2": 0.95}, STOPS),
    "adam_epsilon": ("grpo", {"adam_epsilon": 1e-08}, {}),
    "lr_scheduler_kwargs": ("grpo", {"lr_scheduler_kwargs": "num_cycles=2"}, STOPS),
    "label_smoothing_factor": ("sft", {"label_smoothing_factor": 0.1}, STOPS),
    "neftune_noise_alpha": ("sft", {"neftune_noise_alpha": 5}, STOPS),
    "gradient_checkpointing": ("grpo", {"gradient_checkpointing": False}, {"remat": "none"}),
    "bf16": ("grpo", {"bf16": False}, {"dtype": "float32"}),
    "fp16": ("grpo", {"fp16": True}, STOPS),
    "torch_dtype": ("grpo", {"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
    "dtype": ("grpo", {"dtype": "float32"}, {"dtype": "bfloat16"}),
    "use_vllm": ("grpo", {"use_vllm": True}, STOPS),
    "vllm_mode": (
        "grpo", {"vllm_mode": "server", "use_vllm": True, "vllm_importance_sampling_correction": False},
        {"engine": "vllm_server"},
    ),
    "vllm_server_base_url": ("grpo", {"vllm_server_base_url": "http://h:1"}, {"engine_url": "http://h:1"}),
    "vllm_server_timeout": ("grpo", {"vllm_server_timeout": 60}, {"engine_timeout": "60"}),
    "vllm_gpu_memory_utilization": ("grpo", {"vllm_gpu_memory_utilization": 0.5}, {}),
    "vllm_tensor_parallel_size": ("grpo", {"vllm_tensor_parallel_size": 2}, {}),
    "vllm_importance_sampling_correction": (
        "grpo", {"vllm_importance_sampling_correction": False, "use_vllm": True}, {"engine": "vllm"}
    ),
    "num_generations": ("grpo", {"num_generations": 4}, {"samples_per_prompt": "4", "batch_prompts": "2"}),
    "num_generations_eval": ("grpo", {"num_generations_eval": 2}, {"eval_samples": "2"}),
    "max_completion_length": ("grpo", {"max_completion_length": 9}, {"max_new_tokens": "9"}),
    "response_length": ("grpo", {"response_length": 9}, {"max_new_tokens": "9"}),
    "max_new_tokens": ("gkd", {"max_new_tokens": 9}, {"max_new_tokens": "9"}),
    "max_prompt_length": ("grpo", {"max_prompt_length": 9}, {"max_prompt_tokens": "9", "long_prompts": "truncate"}),
    "max_length": ("dpo", {"max_length": 9}, {"max_text_tokens": "9", "long_prompts": "error"}),
    "max_seq_length": ("reward_model", {"max_seq_length": 9}, {"max_text_tokens": "9", "long_prompts": "drop"}),
    "truncation_mode": ("dpo", {"truncation_mode": "keep_end"}, STOPS),
    "packing": ("sft", {"packing": True}, STOPS),
    "padding_free": ("sft", {"padding_free": True}, {}),
    "temperature": ("grpo", {"temperature": 0.7}, {"temperature": "0.7"}),
    "top_p": ("grpo", {"top_p": 0.9}, {"top_p": "0.9"}),
    "top_k": ("grpo", {"top_k": -1}, {"top_k": "0"}),
    "min_p": ("grpo", {"min_p": 0.1}, {"min_p": "0.1"}),
    "repetition_penalty": ("grpo", {"repetition_penalty": 1.1}, {"repetition_penalty": "1.1"}),
    "generation_kwargs": ("grpo", {"generation_kwargs": "typical_p=1"}, STOPS),
    "chat_template_kwargs": ("grpo", {"chat_template_kwargs": "enable_thinking=false"}, STOPS),
    "beta": ("grpo", {"beta": 0.04}, {"kl_coef": "0.04", "kl_bias_corrected": "true"}),
    "kl_coef": ("rloo", {"kl_coef": 0.2, "beta": 0.2}, {"kl_coef": "0.2"}),
    "use_bias_correction_kl": ("grpo", {"beta": 0.04, "use_bias_correction_kl": False}, {"kl_coef": "0.04"}),
    "epsilon": ("grpo", {"epsilon": 0.1}, {"clip_low": "0.1", "clip_high": "0.1"}),
    "epsilon_high": ("cispo", {"epsilon_high": 5.0, "loss_type": "cispo"}, {"clip_low": "none", "clip_high": "4"}),
    "cliprange": ("rloo", {"cliprange": 0.2}, {"clip_low": "0.2", "clip_high": "0.2"}),
    "cliprange_value": ("grpo", {"cliprange_value": 0.2}, STOPS),
    "lam": ("grpo", {"lam": 0.9}, STOPS),
    "delta": ("grpo", {"delta": 1.1}, STOPS),
    "loss_type": ("grpo", {"loss_type": "luspo"}, STOPS),
    "loss_weights": ("dpo", {"loss_weights": [0.5], "loss_type": ["hinge"]}, {"loss": "0.5*hinge"}),
    "importance_sampling_level": ("grpo", {"importance_sampling_level": "sequence", "loss_type": "grpo"},
                                  {"experiment": "gspo"}),
    "scale_rewards": ("grpo", {"scale_rewards": "batch"}, STOPS),
    "entropy_coef": ("grpo", {"entropy_coef": 0.1, "loss_type": "grpo"}, STOPS),
    "sapo_temperature_pos": ("grpo", {"sapo_temperature_pos": 0.5}, {}),
    "sapo_temperature_neg": ("grpo", {"sapo_temperature_neg": 0.5, "loss_type": "sapo"}, {"negative": "0.5"}),
    "use_adaptive_entropy": ("grpo", {"use_adaptive_entropy": True}, STOPS),
    "top_entropy_quantile": ("grpo", {"top_entropy_quantile": 0.2}, STOPS),
    "off_policy_mask_threshold": ("grpo", {"off_policy_mask_threshold": 0.2}, STOPS),
    "multi_objective_aggregation": ("grpo", {"multi_objective_aggregation": "normalize_then_sum"}, STOPS),
    "mask_truncated_completions": ("grpo", {"mask_truncated_completions": True}, STOPS),
    "normalize_advantages": ("rloo", {"normalize_advantages": True}, {"normalize": "true", "per_sequence": "true"}),
    "reward_clip_range": ("rloo", {"reward_clip_range": [-1, 1]}, STOPS),
    "label_smoothing": ("dpo", {"label_smoothing": 0.1}, {}),
    "rpo_alpha": ("dpo", {"rpo_alpha": 1.0}, {"likelihood_coef": "1.0"}),
    "f_divergence_type": ("dpo", {"f_divergence_type": "js_divergence", "loss_type": ["ipo"]}, STOPS),
    "f_alpha_divergence_coef": ("dpo", {"f_alpha_divergence_coef": 0.3}, {}),
    "ld_alpha": ("dpo", {"ld_alpha": 0.5}, {"length_alpha": "0.5"}),
    "use_weighting": ("dpo", {"use_weighting": True}, {"on_policy": "true", "weight_bound": "none"}),
    "discopop_tau": ("dpo", {"discopop_tau": 0.1}, STOPS),
    "desirable_weight": ("kto", {"desirable_weight": 2.0}, {"desirable": "2.0"}),
    "undesirable_weight": ("kto", {"undesirable_weight": 2.0}, {"undesirable": "2.0"}),
    "train_sampling_strategy": ("kto", {"train_sampling_strategy": "random"}, {}),
    "cpo_alpha": ("cpo", {"cpo_alpha": 0.5}, {"likelihood_coef": "0.5"}),
    "simpo_gamma": ("cpo", {"simpo_gamma": 0.5, "loss_type": "simpo", "cpo_alpha": 0.0}, {"margin": "0.5"}),
    "alpha": ("cpo", {"alpha": 0.3, "loss_type": "alphapo"}, {"alpha": "0.3"}),
    "lmbda": ("gkd", {"lmbda": 1.0}, STOPS),
    "seq_kd": ("gkd", {"seq_kd": True}, STOPS),
    "completion_only_loss": ("sft", {"completion_only_loss": False}, STOPS),
    "assistant_only_loss": ("sft", {"assistant_only_loss": True}, STOPS),
    "center_rewards_coefficient": ("reward_model", {"center_rewards_coefficient": 0.01}, {"center": "0.01"}),
    "use_peft": ("grpo", {"use_peft": True}, STOPS),
    "lora_r": ("grpo", {"lora_r": 8, "use_peft": True, "lora_dropout": 0, "lora_target_modules": ["q_proj", "v_proj"]},
               {"lora_rank": "8", "lora_alpha": "32", "lora_targets": "q_proj,v_proj"}),
    "lora_alpha": ("grpo", {"lora_alpha": 8}, {}),
    "lora_dropout": ("grpo", {"lora_dropout": 0.1, "use_peft": True, "lora_target_modules": "all-linear"}, STOPS),
    "lora_target_modules": ("grpo", {"use_peft": True, "lora_dropout": 0.0, "lora_target_modules": "all-linear"},
                            {"lora_rank": "16", "lora_targets": "all-linear"}),
    "lora_modules_to_save": ("grpo", {"lora_modules_to_save": ["lm_head"]}, STOPS),
    "use_rslora": ("grpo", {"use_rslora": True}, STOPS),
    "use_dora": ("grpo", {"use_dora": True}, STOPS),
    "load_in_4bit": ("grpo", {"load_in_4bit": True}, STOPS),
    "load_in_8bit": ("grpo", {"load_in_8bit": True}, STOPS),
    "average_tokens_across_devices": ("sft", {"average_tokens_across_devices": False}, STOPS),
    "cast_lm_head_to_fp32": ("grpo", {"cast_lm_head_to_fp32": True}, STOPS),
    "router_aux_loss_coef": ("grpo", {"router_aux_loss_coef": 0.001}, STOPS),
    "sync_ref_model": ("dpo", {"sync_ref_model": True}, STOPS),
    "disable_dropout": ("grpo", {"disable_dropout": False}, {}),
    "shuffle_dataset": ("grpo", {"shuffle_dataset": False}, STOPS),
    "load_best_model_at_end": ("sft", {"load_best_model_at_end": True}, STOPS),
    "dataloader_num_workers": ("sft", {"dataloader_num_workers": 4}, {}),
    "dataloader_drop_last": ("sft", {"dataloader_drop_last": True}, STOPS),
    "group_by_length": ("sft", {"group_by_length": True}, STOPS),
    "per_device_eval_batch_size": ("sft", {"per_device_eval_batch_size": 4}, {}),
    "precompute_ref_log_probs": ("dpo", {"precompute_ref_log_probs": True}, {}),
    "use_liger_kernel": ("sft", {"use_liger_kernel": True}, {}),
    "activation_offloading": ("sft", {"activation_offloading": True}, {}),
    "attn_implementation": ("sft", {"attn_implementation": "sdpa"}, {}),
    "deepspeed": ("sft", {"deepspeed": "zero3.json"}, {}),
    "fsdp": ("sft", {"fsdp": "full_shard"}, {}),
    "fsdp_config": ("sft", {"fsdp_config": "f.json"}, {}),
    "resume_from_checkpoint": ("sft", {"resume_from_checkpoint": "d"}, {}),
    "push_to_hub": ("sft", {"push_to_hub": True}, {}),
    "log_completions": ("grpo", {"log_completions": False}, {}),
}  # fmt: skip

OF_VERL = {
    "algorithm.adv_estimator": (CRITIC, {"algorithm.adv_estimator": "gdpo"}, STOPS),
    f"{A}.policy_loss.loss_mode": (GROUPS, {f"{A}.policy_loss.loss_mode": "dppo_kl"},
                                   {"experiment": "dppo", "kind": "kl", "sampled_by": "old_logp", "cap": "3.0"}),
    f"{M}.path": (GROUPS, {f"{M}.path": "m"}, {"model": "m"}),
    "data.train_files": (GROUPS, {"data.train_files": ["a", "b"]}, {"prompts": "a,b"}),
    "data.val_files": (GROUPS, {"data.val_files": "c"}, {"eval_data": "c"}),
    "data.prompt_key": (GROUPS, {"data.prompt_key": "problem"}, {"fields": "prompt:problem"}),
    "data.train_batch_size": (GROUPS, {"data.train_batch_size": 512}, {"batch_prompts": "512", "minibatches": "2"}),
    "data.gen_batch_size": (GROUPS, {"data.gen_batch_size": 512}, STOPS),
    "data.max_response_length": (GROUPS, {"data.max_response_length": 9}, {"max_new_tokens": "9"}),
    "data.max_prompt_length": (GROUPS, {"data.max_prompt_length": 9}, {"max_prompt_tokens": "9"}),
    "data.filter_overlong_prompts": (GROUPS, {"data.filter_overlong_prompts": True, "data.truncation": "error"},
                                     {"long_prompts": "drop"}),
    "data.truncation": (GROUPS, {"data.truncation": "middle"}, STOPS),
    "data.seed": (GROUPS, {"data.seed": 3}, {"seed": "3"}),
    "custom_reward_function.path": (GROUPS, {"custom_reward_function.path": "r.py"}, {"reward": "r.py:compute_score"}),
    "custom_reward_function.name": (
        GROUPS, {"custom_reward_function.path": "r.py", "custom_reward_function.name": "g"}, {"reward": "r.py:g"}
    ),
    "reward.custom_reward_function.path": (
        GROUPS, {"reward.custom_reward_function.path": "r.py"}, {"reward": "r.py:compute_score"}
    ),
    "reward.custom_reward_function.name": (
        GROUPS, {"reward.custom_reward_function.path": "r.py", "reward.custom_reward_function.name": "g"},
        {"reward": "r.py:g"},
    ),
    "reward_model.enable": (GROUPS, {"reward_model.enable": False, "reward_model.model.path": "m"}, {}),
    "reward_model.model.path": (GROUPS, {"reward_model.enable": True, "reward_model.model.path": "m"},
                                {"reward_model": "m"}),
    "reward.reward_model.enable": (GROUPS, {"reward.reward_model.enable": True}, {}),
    "reward.reward_model.model_path": (
        GROUPS, {"reward.reward_model.enable": True, "reward.reward_model.model_path": "m"}, {"reward_model": "m"}
    ),
    f"{R}.n": (GROUPS, {f"{R}.n": 6}, {"samples_per_prompt": "6"}),
    f"{R}.temperature": (GROUPS, {f"{R}.temperature": 0.7}, {"temperature": "0.7"}),
    f"{R}.top_p": (GROUPS, {f"{R}.top_p": 0.9}, {"top_p": "0.9"}),
    f"{R}.top_k": (GROUPS, {f"{R}.top_k": -1}, {"top_k": "0"}),
    f"{R}.val_kwargs.n": (GROUPS, {f"{R}.val_kwargs.n": 4}, {"eval_samples": "4"}),
    f"{R}.val_kwargs.do_sample": (GROUPS, {f"{R}.val_kwargs.do_sample": True, f"{R}.val_kwargs.temperature": 0.5},
                                  {"eval_temperature": "0.5"}),
    f"{R}.val_kwargs.temperature": (GROUPS, {f"{R}.val_kwargs.temperature": 0.5}, {"eval_temperature": "0"}),
    f"{R}.val_kwargs.top_p": (GROUPS, {f"{R}.val_kwargs.top_p": 0.5, f"{R}.val_kwargs.do_sample": True},
                              {"eval_top_p": "0.5"}),
    f"{R}.val_kwargs.top_k": (GROUPS, {f"{R}.val_kwargs.top_k": -1, f"{R}.val_kwargs.do_sample": True},
                              {"eval_top_k": "0"}),
    f"{R}.name": (GROUPS, {f"{R}.name": "vllm"}, {"engine": "vllm"}),
    f"{R}.dtype": (GROUPS, {f"{R}.dtype": "float16"}, STOPS),
    f"{R}.max_num_seqs": (GROUPS, {f"{R}.max_num_seqs": 9}, {"decode_rows": "9"}),
    f"{R}.gpu_memory_utilization": (GROUPS, {f"{R}.gpu_memory_utilization": 0.9}, {}),
    f"{R}.tensor_model_parallel_size": (GROUPS, {f"{R}.tensor_model_parallel_size": 4}, {"generate_mesh": "dp2,tp4"}),
    f"{R}.log_prob_micro_batch_size_per_gpu": (GROUPS, {f"{R}.log_prob_micro_batch_size_per_gpu": 4}, {}),
    f"{R}.log_prob_max_token_len_per_gpu": (GROUPS, {f"{R}.log_prob_max_token_len_per_gpu": 999},
                                            {"score_token_budget": "999"}),
    f"{A}.ppo_mini_batch_size": (GROUPS, {f"{A}.ppo_mini_batch_size": 128}, {"minibatches": "8"}),
    f"{A}.ppo_micro_batch_size": (GROUPS, {f"{A}.ppo_micro_batch_size": 4}, {}),
    f"{A}.ppo_micro_batch_size_per_gpu": (GROUPS, {f"{A}.ppo_micro_batch_size_per_gpu": 4}, {}),
    f"{A}.ppo_max_token_len_per_gpu": (GROUPS, {f"{A}.ppo_max_token_len_per_gpu": 999}, {"token_budget": "999"}),
    f"{A}.use_dynamic_bsz": (GROUPS, {f"{A}.use_dynamic_bsz": False}, {}),
    f"{A}.ppo_epochs": (GROUPS, {f"{A}.ppo_epochs": 2}, {"epochs": "2"}),
    f"{A}.optim.lr": (GROUPS, {f"{A}.optim.lr": "2e-6"}, {"lr": "2e-6"}),
    f"{A}.optim.weight_decay": (GROUPS, {f"{A}.optim.weight_decay": 0.1}, {"weight_decay": "0.1", "decay_all": "true"}),
    f"{A}.optim.lr_warmup_steps": (GROUPS, {f"{A}.optim.lr_warmup_steps": 5}, STOPS),
    f"{A}.optim.lr_warmup_steps_ratio": (
        GROUPS, {f"{A}.optim.lr_warmup_steps_ratio": 0.3, "data.train_batch_size": 256}, {"lr_warmup_steps": "3"}
    ),
    f"{A}.optim.warmup_style": (GROUPS, {f"{A}.optim.warmup_style": "cosine"}, STOPS),
    f"{A}.optim.lr_scheduler_type": (
        GROUPS, {f"{A}.optim.lr_scheduler_type": "cosine", "data.train_batch_size": 256}, {"lr_schedule": "cosine"}
    ),
    f"{A}.optim.clip_grad": (GROUPS, {f"{A}.optim.clip_grad": 0.5}, {"max_grad_norm": "0.5"}),
    f"{A}.grad_clip": (GROUPS, {f"{A}.grad_clip": 0.5}, {"max_grad_norm": "0.5"}),
    f"{A}.clip_ratio": (GROUPS, {f"{A}.clip_ratio": 0.3}, {"clip_low": "0.2", "clip_high": "0.2"}),
    f"{A}.clip_ratio_low": (GROUPS, {f"{A}.clip_ratio_low": 0.3}, {"clip_low": "0.3", "clip_high": "0.2"}),
    f"{A}.clip_ratio_high": (GROUPS, {f"{A}.clip_ratio_high": 0.3}, {"clip_low": "0.2", "clip_high": "0.3"}),
    f"{A}.clip_ratio_c": (
        {**GROUPS, "algorithm.adv_estimator": "reinforce_plus_plus"}, {f"{A}.clip_ratio_c": 4.0}, STOPS
    ),
    f"{A}.tau_pos": (GROUPS, {f"{A}.tau_pos": 2.0}, {}),
    f"{A}.tau_neg": (
        GROUPS, {f"{A}.tau_neg": 2.0, f"{A}.policy_loss.loss_mode": "sapo"}, {"negative": "2.0", "positive": "1.0"}
    ),
    f"{A}.entropy_coeff": (GROUPS, {f"{A}.entropy_coeff": 0.1}, {"entropy_coef": "0.1"}),
    f"{A}.use_kl_loss": (GROUPS, {f"{A}.use_kl_loss": True}, {"kl_coef": "0.001", "kl_kind": "k3"}),
    f"{A}.kl_loss_coef": (GROUPS, {f"{A}.kl_loss_coef": 0.1}, {"kl_coef": "0.0"}),
    f"{A}.kl_loss_type": (GROUPS, {f"{A}.kl_loss_type": "k1+", f"{A}.use_kl_loss": True}, {"kl_kind": "k1+"}),
    f"{A}.loss_agg_mode": (CRITIC, {f"{A}.loss_agg_mode": "seq-mean-token-sum"}, STOPS),
    f"{A}.loss_scale_factor": (GROUPS, {f"{A}.loss_scale_factor": 9}, {}),
    f"{A}.strategy": (GROUPS, {f"{A}.strategy": "fsdp2"}, {"mesh": "dp8", "fsdp": "true"}),
    f"{A}.ulysses_sequence_parallel_size": (GROUPS, {f"{A}.ulysses_sequence_parallel_size": 2}, {"mesh": "dp4,sp2"}),
    f"{A}.fsdp_config.param_offload": (
        GROUPS, {f"{A}.fsdp_config.param_offload": True, f"{A}.fsdp_config.optimizer_offload": True},
        {"offload": "params,optimizer"},
    ),
    f"{A}.fsdp_config.optimizer_offload": (
        GROUPS, {f"{A}.fsdp_config.optimizer_offload": True, "actor_rollout_ref.ref.fsdp_config.param_offload": True},
        {"offload": "optimizer,reference"},
    ),
    "actor_rollout_ref.ref.fsdp_config.param_offload": (
        GROUPS, {"actor_rollout_ref.ref.fsdp_config.param_offload": False}, {}
    ),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": (
        GROUPS, {"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 4}, {}
    ),
    f"{M}.enable_gradient_checkpointing": (GROUPS, {f"{M}.enable_gradient_checkpointing": False}, {"remat": "none"}),
    f"{M}.use_remove_padding": (GROUPS, {f"{M}.use_remove_padding": False}, {}),
    f"{M}.lora_rank": (GROUPS, {f"{M}.lora_rank": 32}, {"lora_rank": "32", "lora_alpha": "16",
                                                        "lora_targets": "all-linear"}),
    f"{M}.lora_alpha": (GROUPS, {f"{M}.lora_rank": 32, f"{M}.lora_alpha": 64}, {"lora_alpha": "64"}),
    f"{M}.target_modules": (
        GROUPS, {f"{M}.lora_rank": 8, f"{M}.target_modules": ["q_proj"]}, {"lora_targets": "q_proj"}
    ),
    f"{M}.exclude_modules": (GROUPS, {f"{M}.lora_rank": 8, f"{M}.exclude_modules": "visual"}, STOPS),
    "critic.optim.lr": (CRITIC, {"critic.optim.lr": "2e-5"}, {"critic_lr": "2e-5"}),
    "critic.optim.weight_decay": (CRITIC, {"critic.optim.weight_decay": 0.2}, STOPS),
    "critic.grad_clip": (CRITIC, {"critic.grad_clip": 0.2}, STOPS),
    "critic.ppo_epochs": (CRITIC, {"critic.ppo_epochs": 3}, STOPS),
    "critic.ppo_mini_batch_size": (CRITIC, {"critic.ppo_mini_batch_size": 64}, STOPS),
    "critic.loss_agg_mode": (CRITIC, {"critic.loss_agg_mode": "seq-mean-token-mean"}, STOPS),
    "critic.cliprange_value": (CRITIC, {"critic.cliprange_value": 0.2}, {"value_clip": "0.2"}),
    "critic.strategy": (CRITIC, {"critic.strategy": "fsdp2"}, {}),
    "critic.ulysses_sequence_parallel_size": (CRITIC, {"critic.ulysses_sequence_parallel_size": 2}, {}),
    "critic.model.path": (CRITIC, {"critic.model.path": "m"}, {}),
    "critic.model.enable_gradient_checkpointing": (CRITIC, {"critic.model.enable_gradient_checkpointing": True}, {}),
    "critic.model.use_remove_padding": (CRITIC, {"critic.model.use_remove_padding": True}, {}),
    "critic.model.fsdp_config.param_offload": (CRITIC, {"critic.model.fsdp_config.param_offload": True}, {}),
    "critic.model.fsdp_config.optimizer_offload": (CRITIC, {"critic.model.fsdp_config.optimizer_offload": True}, {}),
    "algorithm.gamma": (CRITIC, {"algorithm.gamma": 0.9}, {"gamma": "0.9"}),
    "algorithm.lam": (CRITIC, {"algorithm.lam": 0.9}, {"gae_lambda": "0.9"}),
    "algorithm.norm_adv_by_std_in_grpo": (GROUPS, {"algorithm.norm_adv_by_std_in_grpo": False},
                                          {"experiment": "dr_grpo"}),
    "algorithm.use_kl_in_reward": (CRITIC, {"algorithm.use_kl_in_reward": True}, {"kl_coef": "0.001"}),
    "algorithm.kl_penalty": (CRITIC, {"algorithm.kl_penalty": "abs", "algorithm.use_kl_in_reward": True}, STOPS),
    "algorithm.kl_ctrl.kl_coef": (CRITIC, {"algorithm.kl_ctrl.kl_coef": 0.1}, {"kl_coef": "0.0"}),
    "algorithm.kl_ctrl.type": (CRITIC, {"algorithm.kl_ctrl.type": "adaptive", "algorithm.use_kl_in_reward": True},
                               {"kl_target": "0.1"}),
    "algorithm.kl_ctrl.target_kl": (
        CRITIC, {"algorithm.kl_ctrl.type": "adaptive", "algorithm.use_kl_in_reward": True,
                 "algorithm.kl_ctrl.target_kl": 0.2}, {"kl_target": "0.2"},
    ),
    "algorithm.kl_ctrl.horizon": (CRITIC, {"algorithm.kl_ctrl.horizon": 99, "algorithm.use_kl_in_reward": True}, STOPS),
    "algorithm.rollout_correction.rollout_is": (GROUPS, {"algorithm.rollout_correction.rollout_is": "token"}, STOPS),
    "algorithm.rollout_correction.rollout_rs": (GROUPS, {"algorithm.rollout_correction.rollout_rs": "token"}, STOPS),
    "algorithm.rollout_correction.bypass_mode": (GROUPS, {"algorithm.rollout_correction.bypass_mode": True}, STOPS),
    "algorithm.rollout_correction.loss_type": (GROUPS, {"algorithm.rollout_correction.loss_type": "reinforce"}, STOPS),
    "trainer.nnodes": (GROUPS, {"trainer.nnodes": 2}, {"mesh": "dp16"}),
    "trainer.n_gpus_per_node": (GROUPS, {"trainer.n_gpus_per_node": 4}, {"mesh": "dp4"}),
    "trainer.total_training_steps": (GROUPS, {"trainer.total_training_steps": 9}, {"steps": "9"}),
    "trainer.total_epochs": (GROUPS, {"trainer.total_epochs": 3, "trainer.total_training_steps": None}, STOPS),
    "trainer.save_freq": (GROUPS, {"trainer.save_freq": 20}, {"save_every": "20"}),
    "trainer.test_freq": (GROUPS, {"trainer.test_freq": 5}, {"eval_every": "5"}),
    "trainer.critic_warmup": (CRITIC, {"trainer.critic_warmup": 5}, {"critic_warmup_steps": "5"}),
    "trainer.default_local_dir": (GROUPS, {"trainer.default_local_dir": "d"}, {"run_dir": "d"}),
    "trainer.logger": (GROUPS, {"trainer.logger": ["console", "wandb"]}, {"report_to": "wandb"}),
    "trainer.project_name": (GROUPS, {"trainer.project_name": "p"}, {}),
    "trainer.experiment_name": (GROUPS, {"trainer.experiment_name": "p"}, {}),
    "trainer.resume_mode": (GROUPS, {"trainer.resume_mode": "disable"}, {}),
    "trainer.val_before_train": (GROUPS, {"trainer.val_before_train": False}, {}),
    **{name: (GROUPS, {name: "another"}, STOPS) for name in verl.FIXED},
}  # fmt: skip


def found(tmp_path, config, trainer=None, records=None):
    (tmp_path / "theirs.json").write_text(json.dumps(config))
    return imported(str(tmp_path / "theirs.json"), trainer, 1, records)


def check(tmp_path, name, base, given, expected, trainer=None):
    """A configuration with a name beside one without: what the name changes, or that it stops."""
    plain, whole = found(tmp_path, base, trainer), found(tmp_path, base | given, trainer)
    if expected == STOPS:
        assert any(re.search(rf"(^|, ){re.escape(name)}=", row.theirs) for row in whole.lost), whole.lost
    elif expected:
        assert {flag: whole.flags.get(flag) for flag in expected} == expected
    else:
        assert whole.flags == plain.flags
        assert not any(re.search(rf"(^|, ){re.escape(name)}=", row.theirs) for row in whole.lost), whole.lost


@pytest.mark.parametrize("name", TRL)
def test_the_meaning_of_a_name_of_trl(name, tmp_path):
    trainer, given, expected = OF_TRL[name]
    check(tmp_path, name, ONE, given, expected, trainer if trainer in TRAINERS else "grpo")


@pytest.mark.parametrize("name", VERL)
def test_the_meaning_of_a_name_of_verl(name, tmp_path):
    base, given, expected = OF_VERL[name]
    check(tmp_path, name, base, given, expected)


def test_no_meaning_is_declared_of_a_name_that_is_not_known():
    assert set(OF_TRL) == set(TRL) and set(OF_VERL) == set(VERL)
    assert not IDLE & set(TRL)
    assert set(CLASSES) == set(TRAINERS)


REFUSED = [  # trainer, configuration, what the list names and says
    ("grpo", {"loss_type": "cispo"}, "epsilon=0.2", "bounds every ratio by 0.2, below 1"),
    ("grpo", {"delta": 1.1}, "delta=1.1", "1 + epsilon_high = 1.2"),
    ("grpo", {"steps_per_generation": 2}, "loss_type=dapo", "divides each of 2 mini-batches by their mean number"),
    ("grpo", {"importance_sampling_level": "sequence"}, "loss_type=dapo", "TRL's loss_type=grpo, not dapo"),
    ("grpo", {"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.1}, "beta=0.1", "gspo does not"),
    ("grpo", {"loss_type": "bnpo", "gradient_accumulation_steps": 2}, "loss_type=bnpo", "the means of micro-batches"),
    ("grpo", {"loss_type": "dr_grpo"}, "scale_rewards=group", "this is dr_grpo"),
    ("dpo", {"loss_type": ["ipo", "sigmoid"]}, "loss_type=ipo,sigmoid", "per_token is for all losses of a sum"),
    ("dpo", {"loss_type": ["sigmoid", "exo_pair"], "label_smoothing": 0.1}, "loss_type", "sigmoid reads no"),
    ("dpo", {"loss_type": ["sigmoid", "sft"], "gradient_accumulation_steps": 2}, "loss_type", "of micro-batches"),
    ("dpo", {"loss_type": ["aot"], "gradient_accumulation_steps": 2}, "loss_type", "each of 2 micro-batches"),
    ("dpo", {"f_divergence_type": "js_divergence", "loss_type": ["sigmoid", "bco_pair"]}, "f_divergence", "would not"),
    ("dpo", {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.5}, "f_div", "1 - it must be"),
    ("dpo", {"use_weighting": True, "loss_type": ["aot"]}, "loss_type=aot", "weighs aot and sft too"),
    ("kto", {"gradient_accumulation_steps": 2}, "loss_type=kto", "reference point of every micro-batch"),
    ("cpo", {"loss_type": "simpo"}, "cpo_alpha=1.0", "no likelihood beside its contrast"),
    ("cpo", {"loss_type": "hinge"}, "loss_type=hinge", "cpo has no hinge"),
    ("cpo", {"gradient_accumulation_steps": 2}, "cpo_alpha=1.0", "mean of the means"),
    ("orpo", {"beta": 0.2}, "beta=0.2", "of the prompt too"),
    ("gkd", {}, "lmbda=0.5", "its own samples alone"),
    ("sft", {"unheard_of": 3}, "unheard_of=3", "not known here"),
    (None, CRITIC | {f"{M}.path": "m", "critic.model.path": "n"}, "critic.model.path=n", "begins as the policy, m"),
    (None, GROUPS | {f"{R}.n": 1}, "algorithm.adv_estimator=grpo", "only completion"),
    (None, GROUPS | {f"{A}.policy_loss.loss_mode": "geo_mean"}, "algorithm.adv_estimator", "number of micro-batches"),
    (None, GROUPS | {f"{A}.policy_loss.loss_mode": "gspo"}, "loss_agg_mode=token-mean", "gspo takes seq-mean"),
    (None, GROUPS | {"algorithm.norm_adv_by_std_in_grpo": False, f"{A}.loss_agg_mode": "seq-mean-token-sum-norm"},
     "loss_agg_mode", "width of the padded batch"),
    (None, GROUPS | {f"{A}.grad_clip": 0.5, f"{A}.optim.clip_grad": 1.0}, "clip_grad=1.0", "0.5 by another name"),
    (None, GROUPS | {"actor_rollout_ref.unheard.of": 1}, "unheard.of=1", "not known here"),
]  # fmt: skip


@pytest.mark.parametrize(("trainer", "config", "name", "reason"), REFUSED, ids=str)
def test_what_has_no_equal_stops_with_a_list_and_is_left_out_on_request(
    trainer, config, name, reason, tmp_path, capsys
):
    (tmp_path / "t.json").write_text(json.dumps(config if trainer is None else ONE | config))
    line = ["funrl", "import", str(tmp_path / "t.json"), *([f"--recipe={trainer}"] if trainer else [])]
    assert cli.main([*line, f"--to={tmp_path / 'ours.yaml'}"]) == 2
    listed = capsys.readouterr().err.splitlines()
    assert "no equal here; --partial writes the rest" in listed[0] and not (tmp_path / "ours.yaml").exists()
    assert any(name in entry and reason in entry for entry in listed[1:]), listed
    assert cli.main([*line, "--partial", f"--to={tmp_path / 'ours.yaml'}"]) == 0
    assert "another run than theirs" in (tmp_path / "ours.yaml").read_text()


def test_with_partial_the_nearest_is_taken(tmp_path):
    whole = found(tmp_path, ONE | {"steps_per_generation": 2, "num_generations": 8})
    assert whole.lost and whole.flags["per_sequence"] == "false" and whole.flags["minibatches"] == "2"


@pytest.mark.parametrize(
    ("config", "trainer", "records", "steps"),
    [
        ({"num_generations": 8, "per_device_train_batch_size": 64}, None, 83, "30"),  # 3 x floor(83 / 8)
        ({"num_train_epochs": 2, "max_length": 99}, "sft", 81, "22"),  # 2 x ceil(81 / 8)
        ({"algorithm.adv_estimator": "grpo", f"{R}.n": 4, "trainer.total_epochs": 2}, None, 2100, "4"),
    ],
)
def test_epochs_become_steps_where_the_number_of_records_is_known(config, trainer, records, steps, tmp_path):
    assert found(tmp_path, config, trainer).lost
    known = found(tmp_path, config, trainer, records)
    assert known.lost == [] and known.flags["steps"] == steps


@pytest.mark.parametrize(
    ("config", "trainer"),
    [
        ({"num_generations": 2, "loss_type": "cispo"}, "GRPOConfig"), ({"lmbda": 1.0}, "GKDConfig"),
        ({"desirable_weight": 1.0, "beta": 0.1}, "KTOConfig"), ({"cpo_alpha": 0.0, "beta": 0.1}, "CPOConfig"),
        ({"normalize_advantages": True, "num_generations": 2}, "RLOOConfig"), ({"loss_type": "robust"}, "DPOConfig"),
        ({"center_rewards_coefficient": 0.1}, "RewardConfig"), ({"packing": False}, "SFTConfig"),
        ({"beta": 0.1}, None), ({"learning_rate": 1e-5}, None), ({"loss_type": "sigmoid"}, None),
    ],
)  # fmt: skip
def test_a_trainer_is_known_by_what_it_alone_has_or_asked_for(config, trainer, tmp_path):
    if trainer is None:
        with pytest.raises(ValueError, match="several of TRL's trainers have these names; give --recipe=grpo"):
            found(tmp_path, ONE | config)
    else:
        assert trainer in found(tmp_path, ONE | config).source


SCRIPT = """
set -x
export MODEL=${MODEL_PATH:-Qwen/Qwen3-8B}
SIZE=$((1024 * 2))
N=${UNSET:-4}
if [ $N -gt 2 ]; then
    CLIP=0.3
fi
DATA=(
    data.train_files="$HOME/train.parquet"
    data.max_prompt_length=$((SIZE / 2))
)
python3 -m verl.trainer.main_ppo "${DATA[@]}" algorithm.adv_estimator=grpo trainer.total_training_steps=5 \\
    actor_rollout_ref.model.path="$MODEL" data.max_response_length=${SIZE} actor_rollout_ref.rollout.n=$N \\
    actor_rollout_ref.actor.clip_ratio_low=$CLIP trainer.experiment_name=run_$(date +%s) data.train_batch_size=$B "$@"
"""


def test_a_script_s_own_variables_are_filled_in_and_others_are_listed(tmp_path, monkeypatch):
    monkeypatch.setenv("B", "64")  # of this shell, not of the script
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "run.sh").write_text(SCRIPT)
    whole = imported(str(tmp_path / "run.sh"))
    wanted = {
        "model": "Qwen/Qwen3-8B", "max_new_tokens": "2048", "max_prompt_tokens": "1024", "samples_per_prompt": "4",
        "prompts": "/home/me/train.parquet",
    }  # fmt: skip
    assert {name: whole.flags[name] for name in wanted} == wanted
    assert "batch_prompts" not in whole.flags
    listed = " ".join(row.theirs for row in whole.lost)
    assert "data.train_batch_size=$B" in listed and "clip_ratio_low" in listed and "experiment_name" not in listed


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$A/${A}", "2/2"), ("${B:-$A}", "2"), ("${B-x}", "x"), ("$((A ** 3))", "$((A ** 3))"),
        ("$((-A + 7 % 4))", "1"),
        ("$B", "$B"), ("$(pwd)", "$(pwd)"), ("$((B + 1))", "$((B + 1))"), ("$((9 / 2))", "4"), ("${B:-}", ""),
    ],
)  # fmt: skip
def test_a_shell_s_expansions(text, value):
    assert shell_expanded(text, {"A": "2"}) == value


def test_arguments_of_a_launcher_are_not_the_trainer_s(tmp_path):
    (tmp_path / "run.sh").write_text(
        "accelerate launch --num_processes 8 trl/scripts/orpo.py --beta 0.2 --max_steps 5 --learning_rate $LR"
    )
    whole = imported(str(tmp_path / "run.sh"))
    assert whole.flags["experiment"] == "orpo" and whole.flags["beta"] == "0.2"
    listed = " ".join(row.theirs for row in whole.lost)
    assert "learning_rate=$LR" in listed and "num_processes" not in listed


def test_references_inside_a_value_and_names_that_are_not_set(tmp_path):
    config = GROUPS | {
        "trainer.project_name": "p", "trainer.default_local_dir": "runs/${trainer.project_name}",
        "reward_model.enable": None, "actor_rollout_ref.unheard.of": None,
    }  # fmt: skip
    nested: dict = {}
    for name, value in config.items():
        *parts, last = name.split(".")
        inner = nested
        for part in parts:
            inner = inner.setdefault(part, {})
        inner[last] = value
    whole = found(tmp_path, nested)
    assert whole.lost == [] and whole.flags["run_dir"] == "runs/p"


def test_the_last_line_says_which_flags_are_still_needed(tmp_path, capsys):
    (tmp_path / "t.json").write_text(json.dumps(ONE | {"num_generations": 8}))
    assert cli.main(["funrl", "import", str(tmp_path / "t.json"), f"--to={tmp_path / 'o.yaml'}"]) == 0
    assert "with --model, --prompts or data" in capsys.readouterr().out
