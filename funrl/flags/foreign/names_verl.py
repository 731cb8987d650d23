"""verl's dotted names, and what they mean here (its ppo_trainer.yaml, 0.9.1).

`VERL` has a meaning for each name; a name that `decides_nothing` changes nothing that a run learns from. verl's
train_batch_size counts prompts, as --batch_prompts does; its mini-batches too.
"""

from __future__ import annotations

import re

from funrl.flags.foreign import names_verl_meanings as meanings
from funrl.flags.foreign.names_verl_meanings import ACTOR, CORRECTION, MODEL, ROLLOUT, recipe_of
from funrl.flags.foreign.renaming import (
    Convert,
    Meaning,
    argument,
    choice,
    default_only,
    default_shown,
    is_none,
    no_effect,
    same,
)

__all__ = ["DEFAULTS", "VERL", "decides_nothing", "recipe_of"]

DEFAULTS = {  # of its ppo_trainer.yaml, where they differ from those here or decide what others mean
    "data.train_batch_size": "1024", "data.max_response_length": "512", "data.max_prompt_length": "512",
    "data.truncation": "error", f"{ACTOR}.ppo_mini_batch_size": "256",
    f"{ACTOR}.ppo_epochs": "1", f"{ACTOR}.optim.lr": "1e-6", f"{ACTOR}.optim.weight_decay": "0.01",
    f"{ACTOR}.clip_ratio": "0.2", f"{ACTOR}.clip_ratio_low": "0.2", f"{ACTOR}.clip_ratio_high": "0.2",
    f"{ACTOR}.clip_ratio_c": "3.0", f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.entropy_coeff": "0", f"{ACTOR}.use_kl_loss": "false", f"{ACTOR}.kl_loss_coef": "0.001",
    f"{ACTOR}.kl_loss_type": "low_var_kl", f"{ACTOR}.grad_clip": "1.0", f"{ROLLOUT}.n": "1",
    f"{ROLLOUT}.dtype": "bfloat16", f"{ROLLOUT}.val_kwargs.do_sample": "false", f"{ROLLOUT}.temperature": "1.0",
    f"{ROLLOUT}.tensor_model_parallel_size": "2", "critic.optim.lr": "1e-5", "critic.cliprange_value": "0.5",
    "algorithm.adv_estimator": "gae", "algorithm.gamma": "1.0", "algorithm.lam": "1.0",
    "algorithm.norm_adv_by_std_in_grpo": "true", "algorithm.use_kl_in_reward": "false",
    "algorithm.kl_ctrl.kl_coef": "0.001", "algorithm.kl_ctrl.type": "fixed", "trainer.nnodes": "1",
    "trainer.n_gpus_per_node": "8", "trainer.save_freq": "-1", "trainer.test_freq": "-1",
    "trainer.total_epochs": "30", f"{MODEL}.enable_gradient_checkpointing": "true", f"{ACTOR}.strategy": "fsdp",
    f"{ACTOR}.tau_pos": "1.0", f"{ACTOR}.tau_neg": "1.05",
}  # fmt: skip
_BUDGET = "micro-batches are packed to --token_budget tokens, whatever their rows; this decides memory alone"
_SHARDED = "what is sharded and kept on the host is --fsdp_axes, --fsdp_models and --offload"
FIXED = {  # names of which a run has one value
    "data.shuffle": ("true", "prompts come in a shuffled order, by --seed"),
    "data.train_max_samples": ("-1", "all records are used; give a file of some"),
    "data.tool_config_path": ("null", "episodes have one turn"),
    "data.custom_cls.path": ("null", "records are read as docs/data.md says"),
    f"{ROLLOUT}.do_sample": ("true", "completions are sampled"),
    f"{ROLLOUT}.multi_turn.enable": ("false", "episodes have one turn"),
    f"{ROLLOUT}.ignore_eos": ("false", "a completion ends at its end"),
    f"{ROLLOUT}.repetition_penalty": ("1", "give --repetition_penalty"),
    f"{ROLLOUT}.quantization": ("null", "the engine's weights are the trainer's"),
    f"{ACTOR}.optim.betas": ("0.9,0.999", "AdamW's averages have 0.9 and 0.999"),
    f"{ACTOR}.optim.optimizer": ("adamw", "verl's other optimizers have no equal; --optimizer has adamw and muon"),
    f"{ACTOR}.optim.min_lr_ratio": ("0", "--lr_schedule ends at 0"),
    f"{ACTOR}.optim.num_cycles": ("0.5", "--lr_schedule=cosine is half a cosine"),
    f"{ACTOR}.freeze_vision_tower": ("false", "models have no vision tower"),
    f"{ACTOR}.fsdp_config.qat.enable": ("false", "weights are not quantised"),
    f"{MODEL}.lora_adapter_path": ("null", "adapters begin at zero"),
    f"{MODEL}.lora.rank": ("0", "give actor_rollout_ref.model.lora_rank"),
    f"{MODEL}.custom_chat_template": ("null", "give --chat_template=FILE.jinja"),
    f"{MODEL}.override_config": ("null", "a model is what its config.json says"),
    f"{MODEL}.mtp.enable": ("false", "no further tokens are predicted"),
    f"{CORRECTION}.rollout_is_batch_normalize": ("false", "weights are not normalised"),
    "algorithm.filter_groups.enable": ("false", "`funrl dapo` samples prompts until their rewards differ"),
    "algorithm.use_pf_ppo": ("false", "`funrl pf_ppo` resamples rows"),
    "distillation.enabled": ("false", "`funrl distillation` and `funrl gkd` distil"),
    "reward_model.reward_manager": ("naive", "a reward is --reward and --reward_model"),
    "reward.reward_manager.name": ("naive", "a reward is --reward and --reward_model"),
    "critic.optim.lr_warmup_steps_ratio": ("0", "the schedule of the critic is that of the policy"),
    "trainer.v1.trainer_mode": ("sync", "training and generation take turns"),
    "trainer.val_only": ("false", "`funrl evaluate` evaluates"),
}
NO_EFFECT = re.compile(
    r"(trainer|reward|reward_model|critic|data|actor_rollout_ref\.\w+)\.((.*\.)?(profiler|checkpoint|wrap_policy|trace|"
    r"checkpoint_engine|engine_kwargs|fused_kernel_options|tiled_mlp|agent|disaggregation|prometheus|skip)\..*|.*_workers|"
    r".*micro_batch_size(_per_gpu)?|.*use_dynamic_bsz|.*token_len_per_gpu|trust_remote_code|.*\.trust_remote_code)"
    r"|(global_profiler|skip|transfer_queue|ray_init|sandbox_fusion|reward\.sandbox_fusion)\..*"
    r"|trainer\.(balance_batch|log_val_generations|rollout_data_dir|validation_data_dir|resume_from_path|device|use_v1|"
    r"default_hdfs_dir|del_local_ckpt_after_load|max_actor_ckpt_to_keep|max_critic_ckpt_to_keep|esi_redundant_time|"
    r"ray_wait_register_center_timeout|use_legacy_worker_impl)"
    r"|data\.(use_shm|tokenizer|val_batch_size|val_max_samples|validation_shuffle|return_\w+|reward_fn_key|image_key|"
    r"video_key|audio_key|image_patch_size|filter_overlong_prompts_workers)"
    r"|actor_rollout_ref\.(hybrid_engine|nccl_timeout)"
    r"|(actor_rollout_ref\.model|critic\.model)\.(use_shm|tokenizer_path|hf_config_path|external_lib|use_liger|"
    r"use_fused_kernels|enable_activation_offload)"
    r"|actor_rollout_ref\.rollout\.(mode|seed|full_determinism|load_format|layered_summon|enforce_eager|free_cache_engine|"
    r"cudagraph_capture_sizes|data_parallel_size|expert_parallel_size|max_num_batched_tokens|max_model_len|prompt_length|"
    r"response_length|enable_chunked_prefill|enable_prefix_caching|logprobs_mode|scheduling_policy|disable_log_stats|"
    r"skip_tokenizer_init|calculate_log_probs|log_prob_use_dynamic_bsz|nnodes|n_gpus_per_node|update_weights_bucket_"
    r"megabytes|multi_stage_wake_up)"
    r"|(actor_rollout_ref\.(actor|ref)|critic)\.(use_torch_compile|shuffle|data_loader_seed|rollout_n|forward_prefetch|"
    r"entropy_from_logits_with_chunking|entropy_checkpointing|calculate_entropy|use_remove_padding|use_fused_kernels|"
    r"use_prefix_grouper|calculate_sum_pi_squared|fsdp_config\.(fsdp_size|forward_prefetch|reshard_after_forward|"
    r"offload_policy|use_orig_params|use_torch_compile|seed|full_determinism|strategy|entropy_\w+))"
    r"|algorithm\.(filter_groups|pf_ppo|rollout_correction)\.\w+|distillation\..*|reward(_model)?\.model\.external_lib"
)


def decides_nothing(name: str) -> bool:
    """True for a name of verl's that changes memory, speed, files or what is shown alone."""
    return name not in VERL and NO_EFFECT.fullmatch(name) is not None


def is_of_verl(name: str) -> bool:
    """True for a name in one of the parts of verl's configuration."""
    return (
        re.match(
            r"(actor_rollout_ref|data|algorithm|trainer|critic|reward|reward_model|custom_reward_function)\.", name
        )
        is not None
    )


VERL: dict[str, Convert] = {
    "algorithm.adv_estimator": meanings.recipe,
    f"{ACTOR}.policy_loss.loss_mode": meanings.loss_mode,
    f"{MODEL}.path": same("model"),
    "data.train_files": meanings.files("prompts"),
    "data.val_files": meanings.files("eval_data"),
    "data.prompt_key": meanings.prompt_key,
    "data.train_batch_size": same("batch_prompts"),
    "data.gen_batch_size": default_only("null", "a step completes --batch_prompts prompts"),
    "data.max_response_length": same("max_new_tokens"),
    "data.max_prompt_length": same("max_prompt_tokens"),
    "data.filter_overlong_prompts": meanings.long_prompts,
    "data.truncation": meanings.long_prompts,
    "data.seed": lambda text, context: Meaning({} if is_none(text) else {"seed": text}),
    "custom_reward_function.path": meanings.reward_function,
    "custom_reward_function.name": meanings.reward_function,
    "reward.custom_reward_function.path": meanings.reward_function,
    "reward.custom_reward_function.name": meanings.reward_function,
    "reward_model.enable": lambda text, context: Meaning({}),
    "reward_model.model.path": meanings.scoring_model,
    "reward.reward_model.enable": lambda text, context: Meaning({}),
    "reward.reward_model.model_path": meanings.scoring_model,
    f"{ROLLOUT}.n": same("samples_per_prompt"),
    f"{ROLLOUT}.temperature": same("temperature"),
    f"{ROLLOUT}.top_p": same("top_p"),
    f"{ROLLOUT}.top_k": meanings.top_k("top_k"),
    f"{ROLLOUT}.val_kwargs.n": same("eval_samples"),
    f"{ROLLOUT}.val_kwargs.do_sample": meanings.samples_to_evaluate,
    f"{ROLLOUT}.val_kwargs.temperature": meanings.evaluation("eval_temperature", "0"),
    f"{ROLLOUT}.val_kwargs.top_p": meanings.evaluation("eval_top_p", "1.0"),
    f"{ROLLOUT}.val_kwargs.top_k": meanings.evaluation("eval_top_k", "0"),
    f"{ROLLOUT}.name": meanings.engine,
    f"{ROLLOUT}.dtype": choice("dtype", {"bfloat16": "bfloat16", "float32": "float32"}, "--dtype has these",
                               "of training and generation; master weights are float32"),
    f"{ROLLOUT}.max_num_seqs": same("decode_rows"),
    f"{ROLLOUT}.gpu_memory_utilization": no_effect("the cache's size is --kv_cache_gb, in 1e9 bytes"),
    f"{ROLLOUT}.tensor_model_parallel_size": meanings.mesh,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": no_effect("scoring is packed to --score_token_budget tokens"),
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": same("score_token_budget"),
    f"{ACTOR}.ppo_mini_batch_size": meanings.minibatches,
    f"{ACTOR}.ppo_micro_batch_size": no_effect(_BUDGET),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": no_effect(_BUDGET),
    f"{ACTOR}.ppo_max_token_len_per_gpu": same("token_budget"),
    f"{ACTOR}.use_dynamic_bsz": default_shown("true", _BUDGET),
    f"{ACTOR}.ppo_epochs": same("epochs"),
    f"{ACTOR}.optim.lr": same("lr"),
    f"{ACTOR}.optim.weight_decay": meanings.decay,
    f"{ACTOR}.optim.lr_warmup_steps": meanings.warmup_of_steps,
    f"{ACTOR}.optim.lr_warmup_steps_ratio": meanings.warmup_of_steps,
    f"{ACTOR}.optim.warmup_style": meanings.schedule,
    f"{ACTOR}.optim.lr_scheduler_type": meanings.schedule,
    f"{ACTOR}.optim.clip_grad": same("max_grad_norm"),
    f"{ACTOR}.grad_clip": same("max_grad_norm"),
    f"{ACTOR}.clip_ratio": meanings.clip_both,
    f"{ACTOR}.clip_ratio_low": meanings.clip,
    f"{ACTOR}.clip_ratio_high": meanings.clip,
    f"{ACTOR}.clip_ratio_c": meanings.dual_clip,
    f"{ACTOR}.tau_pos": meanings.of_argument("positive"),
    f"{ACTOR}.tau_neg": meanings.of_argument("negative"),
    f"{ACTOR}.entropy_coeff": argument("entropy_coef", "it has no entropy bonus"),
    f"{ACTOR}.use_kl_loss": meanings.kl_in_loss,
    f"{ACTOR}.kl_loss_coef": meanings.kl_in_loss,
    f"{ACTOR}.kl_loss_type": meanings.kl_in_loss,
    f"{ACTOR}.loss_agg_mode": meanings.aggregation,
    f"{ACTOR}.loss_scale_factor": lambda text, context: Meaning({}),
    f"{ACTOR}.strategy": meanings.mesh,
    f"{ACTOR}.ulysses_sequence_parallel_size": meanings.mesh,
    **dict.fromkeys(meanings.OFFLOADS, meanings.host_offload),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": no_effect("scoring is packed to --score_token_budget"),
    f"{MODEL}.enable_gradient_checkpointing": lambda text, context: Meaning(
        {"remat": "full" if meanings.is_true(text) else "none"}
    ),
    f"{MODEL}.use_remove_padding": default_shown("true", "rows are always packed; leave it out"),
    f"{MODEL}.lora_rank": meanings.adapters,
    f"{MODEL}.lora_alpha": meanings.adapters,
    f"{MODEL}.target_modules": meanings.adapters,
    f"{MODEL}.exclude_modules": meanings.adapters,
    "critic.optim.lr": meanings.of_critic("critic_lr"),
    "critic.optim.weight_decay": meanings.as_actor("optim.weight_decay", "0.01"),
    "critic.grad_clip": meanings.as_actor("grad_clip", "1.0"),
    "critic.ppo_epochs": meanings.as_actor("ppo_epochs", "1"),
    "critic.ppo_mini_batch_size": meanings.as_actor("ppo_mini_batch_size", "256"),
    "critic.loss_agg_mode": meanings.as_actor("loss_agg_mode", "token-mean"),
    "critic.cliprange_value": meanings.of_critic("value_clip"),
    "critic.strategy": no_effect(_SHARDED),
    "critic.ulysses_sequence_parallel_size": no_effect(_SHARDED),
    "critic.model.path": meanings.critic_model,
    "critic.model.enable_gradient_checkpointing": no_effect("--remat is of all models"),
    "critic.model.use_remove_padding": no_effect("rows are always packed"),
    "critic.model.fsdp_config.param_offload": no_effect(_SHARDED),
    "critic.model.fsdp_config.optimizer_offload": no_effect(_SHARDED),
    "algorithm.gamma": meanings.of_argument("gamma"),
    "algorithm.lam": meanings.of_argument("gae_lambda"),
    "algorithm.norm_adv_by_std_in_grpo": meanings.recipe,
    "algorithm.use_kl_in_reward": meanings.reward_kl,
    "algorithm.kl_penalty": meanings.reward_kl,
    "algorithm.kl_ctrl.kl_coef": meanings.reward_kl,
    "algorithm.kl_ctrl.type": meanings.reward_kl,
    "algorithm.kl_ctrl.target_kl": meanings.reward_kl,
    "algorithm.kl_ctrl.horizon": meanings.reward_kl,
    f"{CORRECTION}.rollout_is": meanings.rollout_correction,
    f"{CORRECTION}.rollout_rs": meanings.rollout_correction,
    f"{CORRECTION}.bypass_mode": meanings.rollout_correction,
    f"{CORRECTION}.loss_type": default_only("ppo_clip", "the loss is that of the recipe"),
    "trainer.nnodes": meanings.mesh,
    "trainer.n_gpus_per_node": meanings.mesh,
    "trainer.total_training_steps": meanings.training_steps,
    "trainer.total_epochs": meanings.total_epochs,
    "trainer.save_freq": meanings.event_interval("save_every", "0"),
    "trainer.test_freq": meanings.event_interval("eval_every", ""),
    "trainer.critic_warmup": meanings.of_critic("critic_warmup_steps"),
    "trainer.default_local_dir": same("run_dir", difference="one that holds a run is refused"),
    "trainer.logger": meanings.logger,
    "trainer.project_name": no_effect("trackers take their project from their own variables, such as WANDB_PROJECT"),
    "trainer.experiment_name": no_effect("a run has the name of its directory: --run_dir"),
    "trainer.resume_mode": no_effect("--resume --run_dir=RUN continues a run"),
    "trainer.val_before_train": default_shown("true", "the state before the first step is always evaluated"),
    **{name: default_only(value, text) for name, (value, text) in FIXED.items()},
}  # fmt: skip
