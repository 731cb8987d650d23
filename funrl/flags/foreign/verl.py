"""Meanings of verl's dotted names (its ppo_trainer.yaml, 0.9.1).

`VERL` has a rule for each name; a name that `decides_nothing` does not affect training. verl's train_batch_size counts
prompts, as --batch_prompts does; its mini-batches too.
"""

from __future__ import annotations

import re

from funrl.flags.foreign import estimators
from funrl.flags.foreign.estimators import CORRECTION, MODEL, VERL_ROLLOUT
from funrl.flags.foreign.meaning import (
    Effect,
    Meaning,
    NameContext,
    NameRule,
    among,
    argument,
    becomes,
    choice,
    default_only,
    default_shown,
    different,
    equal,
    first_of,
    is_on,
    is_unset,
    no_effect,
    optional,
    same,
    switch,
    text_given,
    turned_on,
)
from funrl.flags.foreign.schedules import ACTOR, lr_schedule, lr_warmup, minibatch_count, total_epochs
from funrl.flags.foreign.values import is_none, is_same, items, whole
from funrl.trainer.settings.outputs import TRACKERS

DEFAULTS = {  # of its ppo_trainer.yaml that differ from ours or affect the meaning of other names
    "data.train_batch_size": "1024",
    "data.max_response_length": "512",
    "data.max_prompt_length": "512",
    "data.truncation": "error",
    f"{ACTOR}.ppo_mini_batch_size": "256",
    f"{ACTOR}.ppo_epochs": "1",
    f"{ACTOR}.optim.lr": "1e-6",
    f"{ACTOR}.optim.weight_decay": "0.01",
    f"{ACTOR}.clip_ratio": "0.2",
    f"{ACTOR}.clip_ratio_low": "0.2",
    f"{ACTOR}.clip_ratio_high": "0.2",
    f"{ACTOR}.clip_ratio_c": "3.0",
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.entropy_coeff": "0",
    f"{ACTOR}.use_kl_loss": "false",
    f"{ACTOR}.kl_loss_coef": "0.001",
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.grad_clip": "1.0",
    f"{VERL_ROLLOUT}.n": "1",
    f"{VERL_ROLLOUT}.dtype": "bfloat16",
    f"{VERL_ROLLOUT}.val_kwargs.do_sample": "false",
    f"{VERL_ROLLOUT}.temperature": "1.0",
    f"{VERL_ROLLOUT}.tensor_model_parallel_size": "2",
    "critic.optim.lr": "1e-5",
    "critic.cliprange_value": "0.5",
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": "1.0",
    "algorithm.lam": "1.0",
    "algorithm.norm_adv_by_std_in_grpo": "true",
    "algorithm.use_kl_in_reward": "false",
    "algorithm.kl_ctrl.kl_coef": "0.001",
    "algorithm.kl_ctrl.type": "fixed",
    "trainer.nnodes": "1",
    "trainer.n_gpus_per_node": "8",
    "trainer.save_freq": "-1",
    "trainer.test_freq": "-1",
    "trainer.total_epochs": "30",
    f"{MODEL}.enable_gradient_checkpointing": "true",
    f"{ACTOR}.strategy": "fsdp",
    f"{ACTOR}.tau_pos": "1.0",
    f"{ACTOR}.tau_neg": "1.05",
}
_BUDGET = "micro-batches are packed to --token_budget tokens, whatever their rows; this decides memory alone"
_SHARDED = "what is sharded and kept on the host is --fsdp_axes, --fsdp_models and --offload"
FIXED = {  # names with the only value that a run can have, and the reason
    "data.shuffle": ("true", "prompts come in a shuffled order, by --seed"),
    "data.train_max_samples": ("-1", "all records are used; give a file of some"),
    "data.tool_config_path": ("null", "episodes have one turn"),
    "data.custom_cls.path": ("null", "records are read as docs/data.md says"),
    f"{VERL_ROLLOUT}.do_sample": ("true", "completions are sampled"),
    f"{VERL_ROLLOUT}.multi_turn.enable": ("false", "episodes have one turn"),
    f"{VERL_ROLLOUT}.ignore_eos": ("false", "a completion ends at its end"),
    f"{VERL_ROLLOUT}.repetition_penalty": ("1", "give --repetition_penalty"),
    f"{VERL_ROLLOUT}.quantization": ("null", "the engine's weights are the trainer's"),
    f"{ACTOR}.optim.betas": ("0.9,0.999", "AdamW's averages have 0.9 and 0.999"),
    f"{ACTOR}.optim.optimizer": ("adamw", "verl's other optimizers have no equal; --optimizer has adamw and muon"),
    f"{ACTOR}.optim.min_lr_ratio": ("0", "--lr_schedule ends at 0"),
    f"{ACTOR}.optim.num_cycles": ("0.5", "--lr_schedule=cosine is half a cosine"),
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
    """True for a name of verl that changes only memory, speed, files or output."""
    return name not in VERL and NO_EFFECT.fullmatch(name) is not None


def is_of_verl(name: str) -> bool:
    """True for a name in a section of verl's configuration."""
    return (
        re.match(
            r"(actor_rollout_ref|data|algorithm|trainer|critic|reward|reward_model|custom_reward_function)\.", name
        )
        is not None
    )


def _mesh(text: str, context: NameContext) -> Meaning:
    """The mesh: devices divided among rows, sequence and tensor parallelism."""
    devices = context.number("trainer.nnodes", "1") * context.number("trainer.n_gpus_per_node", "8")
    tensor = context.number(f"{VERL_ROLLOUT}.tensor_model_parallel_size", "2")
    split = context.number(f"{ACTOR}.ulysses_sequence_parallel_size", "1")
    sequence = f",sp{whole(split, '--mesh')}" if split > 1 else ""
    flags = {"mesh": f"dp{whole(devices / split, '--mesh')}{sequence}"}
    if devices > 1 and context.theirs.get(f"{ACTOR}.strategy", "fsdp").startswith("fsdp"):
        flags["fsdp"] = "true"
    if tensor > 1 and devices > 1:
        flags["generate_mesh"] = f"dp{whole(devices / tensor, '--generate_mesh')},tp{tensor}"
    return Meaning(flags, "the same devices train and generate")


def _files(text: str, context: NameContext) -> str:
    return ",".join(items(text))


_eval_temperature = text_given(f"{VERL_ROLLOUT}.val_kwargs.temperature", "0")
_samples_to_evaluate = turned_on(f"{VERL_ROLLOUT}.val_kwargs.do_sample")


def _evaluation(ours: str, greedy: str) -> NameRule:
    """A sampling flag of evaluation, which verl reads only if evaluation samples."""
    return first_of(
        (_samples_to_evaluate, _top_k(ours) if ours == "eval_top_k" else same(ours)),
        (equal(greedy), becomes(**{ours: greedy})),
        becomes("greedy without do_sample", **{ours: greedy}),
    )


def _top_k(ours: str) -> NameRule:
    return first_of((among("-1"), becomes(**{ours: "0"})), same(ours))


def _is_never(text: str, context: NameContext) -> bool:
    return text.startswith("-") or text == "0"


def _logger(text: str, context: NameContext) -> Meaning:
    names = items(text)
    trackers = [name for name in names if name in TRACKERS]
    left = [name for name in names if name not in (*TRACKERS, "console", "tensorboard", "file")]
    note = f"no {', '.join(left)}; " * bool(left) + "TensorBoard and JSON lines are always written"
    return Meaning({"report_to": ",".join(trackers)} if trackers else {}, note)


def _reward_function(text: str, context: NameContext) -> Meaning:
    places = ("reward.custom_reward_function", "custom_reward_function")  # in newer and in older versions
    place = next((place for place in places if context.given(f"{place}.path")), None)
    if place is None:
        return Meaning({})
    name = context.theirs[f"{place}.name"] if context.given(f"{place}.name") else "compute_score"
    reward = f"{context.theirs[f'{place}.path']}:{name}"
    return Meaning({"reward": reward}, "docs/rewards.md says with which arguments it is called")


_REWARD = dict.fromkeys(
    (
        f"{place}.{part}"
        for place in ("custom_reward_function", "reward.custom_reward_function")
        for part in ("path", "name")
    ),
    _reward_function,
)
OFFLOADS = {  # name: what is offloaded
    f"{ACTOR}.fsdp_config.param_offload": "params",
    f"{ACTOR}.fsdp_config.optimizer_offload": "optimizer",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "reference",
}


def _offload(text: str, context: NameContext) -> Meaning:
    parts = [ours for name, ours in OFFLOADS.items() if context.is_on(name)]
    return Meaning({"offload": ",".join(parts)} if parts else {})


_cuts = text_given("data.truncation", "error")
_LONG_PROMPTS = first_of(
    (
        turned_on("data.filter_overlong_prompts"),
        becomes("verl drops such prompts before it would cut them", long_prompts="drop"),
    ),
    (lambda text, context: _cuts(text, context) == "error", becomes(long_prompts="error")),
    (lambda text, context: _cuts(text, context) == "left", becomes(long_prompts="truncate")),
    different(
        lambda text, context: (
            f"{_cuts(text, context)} is not one of error, left: --long_prompts=truncate keeps the last tokens"
        )
    ),
)


def _adapters(text: str, context: NameContext) -> Meaning:
    rank = context.theirs.get(f"{MODEL}.lora_rank", "0")
    if is_none(rank) or is_same(rank, "0"):
        return Meaning({})
    targets = ",".join(items(context.theirs.get(f"{MODEL}.target_modules", "all-linear")))
    flags = {"lora_rank": rank, "lora_alpha": context.theirs.get(f"{MODEL}.lora_alpha", "16"), "lora_targets": targets}
    if context.given(f"{MODEL}.exclude_modules"):
        return Meaning(flags, "--lora_targets names what has adapters; none is excluded", Effect.DIFFERENT)
    return Meaning(flags)


def _uses_reward_model(text: str, context: NameContext) -> bool:
    return any(context.is_on(f"{place}.enable") for place in ("reward_model", "reward.reward_model"))


_REWARD_MODEL = first_of((_uses_reward_model, optional("reward_model")))


VERL: dict[str, NameRule] = {
    "algorithm.adv_estimator": estimators.estimator_recipe,
    f"{ACTOR}.policy_loss.loss_mode": estimators.loss_mode,
    f"{MODEL}.path": same("model"),
    "data.train_files": becomes(prompts=_files),
    "data.val_files": becomes(eval_data=_files),
    "data.prompt_key": first_of((among("prompt", "question"), becomes()), becomes(fields="prompt:{text}")),
    "data.train_batch_size": same("batch_prompts"),
    "data.gen_batch_size": default_only("null", "a step completes --batch_prompts prompts"),
    "data.max_response_length": same("max_new_tokens"),
    "data.max_prompt_length": same("max_prompt_tokens"),
    "data.filter_overlong_prompts": _LONG_PROMPTS,
    "data.truncation": _LONG_PROMPTS,
    "data.seed": optional("seed"),
    **_REWARD,
    "reward_model.enable": becomes(),
    "reward_model.model.path": _REWARD_MODEL,
    "reward.reward_model.enable": becomes(),
    "reward.reward_model.model_path": _REWARD_MODEL,
    f"{VERL_ROLLOUT}.n": same("samples_per_prompt"),
    f"{VERL_ROLLOUT}.temperature": same("temperature"),
    f"{VERL_ROLLOUT}.top_p": same("top_p"),
    f"{VERL_ROLLOUT}.top_k": _top_k("top_k"),
    f"{VERL_ROLLOUT}.val_kwargs.n": same("eval_samples"),
    f"{VERL_ROLLOUT}.val_kwargs.do_sample": first_of(
        (is_on, becomes(eval_temperature=text_given(f"{VERL_ROLLOUT}.val_kwargs.temperature", "0"))),
        becomes(eval_temperature="0"),
    ),
    f"{VERL_ROLLOUT}.val_kwargs.temperature": _evaluation("eval_temperature", "0"),
    f"{VERL_ROLLOUT}.val_kwargs.top_p": _evaluation("eval_top_p", "1.0"),
    f"{VERL_ROLLOUT}.val_kwargs.top_k": _evaluation("eval_top_k", "0"),
    f"{VERL_ROLLOUT}.name": first_of(
        (among("vllm", "hf"), same("engine")),
        no_effect("there is no {text}, the native engine generates; --engine has vllm, vllm_server and hf too"),
    ),
    f"{VERL_ROLLOUT}.dtype": choice(
        "dtype",
        {"bfloat16": "bfloat16", "float32": "float32"},
        "--dtype has these",
        "of training and generation; master weights are float32",
    ),
    f"{VERL_ROLLOUT}.max_num_seqs": same("decode_rows"),
    f"{VERL_ROLLOUT}.gpu_memory_utilization": no_effect("the cache's size is --kv_cache_gb, in 1e9 bytes"),
    f"{VERL_ROLLOUT}.tensor_model_parallel_size": _mesh,
    f"{VERL_ROLLOUT}.log_prob_micro_batch_size_per_gpu": no_effect("scoring is packed to --score_token_budget tokens"),
    f"{VERL_ROLLOUT}.log_prob_max_token_len_per_gpu": same("score_token_budget"),
    f"{ACTOR}.ppo_mini_batch_size": becomes(
        "verl gives the prompts of one, here it is how many there are", minibatches=minibatch_count
    ),
    f"{ACTOR}.ppo_micro_batch_size": no_effect(_BUDGET),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": no_effect(_BUDGET),
    f"{ACTOR}.ppo_max_token_len_per_gpu": same("token_budget"),
    f"{ACTOR}.use_dynamic_bsz": default_shown("true", _BUDGET),
    f"{ACTOR}.ppo_epochs": same("epochs"),
    f"{ACTOR}.optim.lr": same("lr"),
    f"{ACTOR}.optim.weight_decay": first_of(
        (equal("0"), same("weight_decay")), becomes(weight_decay="{text}", decay_all="true")
    ),
    f"{ACTOR}.optim.lr_warmup_steps": lr_warmup,
    f"{ACTOR}.optim.lr_warmup_steps_ratio": lr_warmup,
    f"{ACTOR}.optim.warmup_style": lr_schedule,
    f"{ACTOR}.optim.lr_scheduler_type": lr_schedule,
    f"{ACTOR}.optim.clip_grad": same("max_grad_norm"),
    f"{ACTOR}.grad_clip": same("max_grad_norm"),
    f"{ACTOR}.clip_ratio": estimators.clip_both,
    f"{ACTOR}.clip_ratio_low": estimators.clip,
    f"{ACTOR}.clip_ratio_high": estimators.clip,
    f"{ACTOR}.clip_ratio_c": estimators.dual_clip,
    f"{ACTOR}.tau_pos": estimators.recipe_argument("positive"),
    f"{ACTOR}.tau_neg": estimators.recipe_argument("negative"),
    f"{ACTOR}.entropy_coeff": argument("entropy_coef", "it has no entropy bonus"),
    f"{ACTOR}.use_kl_loss": estimators.kl_in_loss,
    f"{ACTOR}.kl_loss_coef": estimators.kl_in_loss,
    f"{ACTOR}.kl_loss_type": estimators.kl_in_loss,
    f"{ACTOR}.loss_agg_mode": estimators.aggregation,
    f"{ACTOR}.loss_scale_factor": becomes(),
    f"{ACTOR}.strategy": _mesh,
    f"{ACTOR}.ulysses_sequence_parallel_size": _mesh,
    **dict.fromkeys(OFFLOADS, _offload),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": no_effect("scoring is packed to --score_token_budget"),
    f"{ACTOR}.freeze_vision_tower": first_of(
        (is_on, becomes("the tower is frozen by default, and its projector learns")), becomes(freeze="none")
    ),
    f"{MODEL}.enable_gradient_checkpointing": switch("remat", "full", "none"),
    f"{MODEL}.use_remove_padding": default_shown("true", "rows are always packed; leave it out"),
    f"{MODEL}.lora_rank": _adapters,
    f"{MODEL}.lora_alpha": _adapters,
    f"{MODEL}.target_modules": _adapters,
    f"{MODEL}.exclude_modules": _adapters,
    "critic.optim.lr": estimators.critic_argument("critic_lr"),
    "critic.optim.weight_decay": estimators.as_actor("optim.weight_decay", "0.01"),
    "critic.grad_clip": estimators.as_actor("grad_clip", "1.0"),
    "critic.ppo_epochs": estimators.as_actor("ppo_epochs", "1"),
    "critic.ppo_mini_batch_size": estimators.as_actor("ppo_mini_batch_size", "256"),
    "critic.loss_agg_mode": estimators.as_actor("loss_agg_mode", "token-mean"),
    "critic.cliprange_value": estimators.critic_argument("value_clip"),
    "critic.strategy": no_effect(_SHARDED),
    "critic.ulysses_sequence_parallel_size": no_effect(_SHARDED),
    "critic.model.path": estimators.critic_model,
    "critic.model.enable_gradient_checkpointing": no_effect("--remat is of all models"),
    "critic.model.use_remove_padding": no_effect("rows are always packed"),
    "critic.model.fsdp_config.param_offload": no_effect(_SHARDED),
    "critic.model.fsdp_config.optimizer_offload": no_effect(_SHARDED),
    "algorithm.gamma": estimators.recipe_argument("gamma"),
    "algorithm.lam": estimators.recipe_argument("gae_lambda"),
    "algorithm.norm_adv_by_std_in_grpo": estimators.estimator_recipe,
    "algorithm.use_kl_in_reward": estimators.reward_kl,
    "algorithm.kl_penalty": estimators.reward_kl,
    "algorithm.kl_ctrl.kl_coef": estimators.reward_kl,
    "algorithm.kl_ctrl.type": estimators.reward_kl,
    "algorithm.kl_ctrl.target_kl": estimators.reward_kl,
    "algorithm.kl_ctrl.horizon": estimators.reward_kl,
    f"{CORRECTION}.rollout_is": estimators.rollout_correction,
    f"{CORRECTION}.rollout_rs": estimators.rollout_correction,
    f"{CORRECTION}.bypass_mode": estimators.rollout_correction,
    f"{CORRECTION}.loss_type": default_only("ppo_clip", "the loss is that of the recipe"),
    "trainer.nnodes": _mesh,
    "trainer.n_gpus_per_node": _mesh,
    "trainer.total_training_steps": first_of((is_unset, becomes()), (among("-1"), becomes()), same("steps")),
    "trainer.total_epochs": total_epochs,
    "trainer.save_freq": first_of((_is_never, becomes(save_every="0")), same("save_every")),
    "trainer.test_freq": first_of((_is_never, becomes("the first and last steps always evaluate")), same("eval_every")),
    "trainer.critic_warmup": estimators.critic_argument("critic_warmup_steps"),
    "trainer.default_local_dir": same("run_dir", difference="one that holds a run is refused"),
    "trainer.logger": _logger,
    "trainer.project_name": no_effect("trackers take their project from their own variables, such as WANDB_PROJECT"),
    "trainer.experiment_name": no_effect("a run has the name of its directory: --run_dir"),
    "trainer.resume_mode": no_effect("--resume --run_dir=RUN continues a run"),
    "trainer.val_before_train": default_shown("true", "the state before the first step is always evaluated"),
    **{name: default_only(value, text) for name, (value, text) in FIXED.items()},
}
