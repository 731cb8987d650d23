"""The meaning that is expected of each name of verl."""

from funrl.flags.foreign import verl

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
GROUPS = {"algorithm.adv_estimator": "grpo", f"{R}.n": 4, "trainer.total_training_steps": 12}
CRITIC = {"trainer.total_training_steps": 12}
STOPS = "stops"

# name: (the configuration, what is given, flags of the whole file, or STOPS where this name has no equal); {}: the
# file is as it is without the name
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
    f"{verl.ACTOR}.freeze_vision_tower": (GROUPS, {f"{verl.ACTOR}.freeze_vision_tower": False}, {"freeze": "none"}),
    **{name: (GROUPS, {name: "another"}, STOPS) for name in verl.FIXED},
}  # fmt: skip
