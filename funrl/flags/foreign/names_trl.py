"""TRL's names of arguments, and what they mean here: its GRPO, RLOO, DPO, KTO, CPO, ORPO, GKD, SFT and reward trainers.

`TRL` has a meaning for each name. Meanings are those
of TRL 1.16. TRL counts completions a device and accumulation step, and optimizer steps; here a step has --batch_prompts
prompts of --samples_per_prompt completions each over all devices, and makes --minibatches optimizer steps a pass.
"""

from __future__ import annotations

from pathlib import Path

from funrl.flags.foreign import names_trl_batch as sizes
from funrl.flags.foreign import names_trl_losses as losses
from funrl.flags.foreign.renaming import (
    Convert,
    DifferentError,
    Meaning,
    NameContext,
    NoEffectError,
    argument,
    choice,
    default_only,
    default_shown,
    is_none,
    is_same,
    is_true,
    items,
    no_effect,
    same,
)
from funrl.trainer.settings.outputs import TRACKERS

PEFT_DEFAULTS = {"lora_r": "16", "lora_alpha": "32", "lora_dropout": "0.05", "lora_target_modules": "none"}


def _dataset(text: str, context: NameContext) -> Meaning:
    flag = "data" if context.texts else "prompts"
    if not Path(text).exists():
        raise DifferentError(
            f"{text} is neither a file nor a directory; save it with datasets' save_to_disk, or as parquet, and give "
            f"--{flag}=PATH"
        )
    return Meaning({flag: text}, "a tenth of the records is held out; --eval_data=FILE names others")


def _report_to(text: str, context: NameContext) -> Meaning:
    ours = ["mlflow" if one == "azure_ml" else one for one in items(text) if one not in ("none", "tensorboard")]
    if unknown := [one for one in ours if one not in TRACKERS]:
        raise NoEffectError(f"{unknown[0]} is not one of {', '.join(TRACKERS)}")
    return Meaning({"report_to": ",".join(ours)} if ours else {}, "TensorBoard and JSON lines are always written")


def _flag(ours: str, yes: str, no: str) -> Convert:
    return lambda text, context: Meaning({ours: yes if is_true(text) else no})


def _bfloat16(text: str, context: NameContext) -> Meaning:
    return Meaning({"dtype": "bfloat16" if is_none(text) or is_true(text) else "float32"})


def _dtype(text: str, context: NameContext) -> Meaning:
    names = {"bfloat16": "bfloat16", "float32": "float32"}
    if text.removeprefix("torch.") not in names:
        raise DifferentError(f"{text} is not one of {', '.join(names)}: --dtype has bfloat16, float32 and float64")
    ours = names[text.removeprefix("torch.")]
    if ours == "float32" and "bf16" in context.theirs and not is_same(context.theirs["bf16"], "false"):
        return Meaning({}, "of the weights; passes compute in what bf16 says")
    return Meaning({"dtype": ours}, "weights that learn stay float32" if ours == "bfloat16" else "")


def _generates(text: str, context: NameContext) -> Meaning:
    if not is_true(text):
        return Meaning({}, "the native engine generates")
    flags = {"engine": _ENGINES.get(context.theirs.get("vllm_mode", "colocate"), "vllm")}
    if context.recipe in losses.GROUPED and context.is_on("vllm_importance_sampling_correction", _corrects(context)):
        raise DifferentError(_CORRECTION, flags)
    return Meaning(flags)


_ENGINES = {"colocate": "vllm", "server": "vllm_server"}


def _vllm_mode(text: str, context: NameContext) -> Meaning:
    if "num_train_epochs" in context.theirs and not context.is_on("use_vllm"):
        raise NoEffectError("use_vllm is not set")
    return choice("engine", _ENGINES, "--engine has vllm and vllm_server")(text, context)


def _corrects(context: NameContext) -> str:
    """TRL's default of its correction: on, where a whole configuration is read."""
    return str("num_train_epochs" in context.theirs).lower()


_CORRECTION = (
    "a correction for the gap between engine and trainer (vllm_importance_sampling_correction, on by default) is part "
    "of an algorithm: `corrected` with `importance_weights()`, docs/algorithms.md"
)


def _correction(text: str, context: NameContext) -> Meaning:
    if is_same(text, "false"):
        return Meaning({}, _CORRECTION)
    if "num_train_epochs" in context.theirs and not context.is_on("use_vllm"):
        raise NoEffectError("use_vllm is not set")
    raise DifferentError(_CORRECTION)


def _events(ours: str) -> Convert:
    def convert(text: str, context: NameContext) -> Meaning:
        if text == "steps":
            return Meaning({})
        if text == "no":
            return Meaning({"save_every": "0"} if ours == "save_every" else {})
        raise NoEffectError(f"give --{ours}=N, in steps")

    return convert


def _reward_funcs(text: str, context: NameContext) -> Meaning:
    names = items(text)
    paths = [one if ":" in one else ":".join(one.rsplit(".", 1)) if "." in one else "" for one in names]
    if not all(paths):
        raise DifferentError(f"{text} is a name inside TRL; give --reward=FILE.py:function or module:function")
    return Meaning({"reward": ",".join(paths)}, "called with a prompt and a completion, or as docs/rewards.md says")


def _prompt_length(text: str, context: NameContext) -> Meaning:
    if context.texts:
        raise DifferentError("the limit of a prompt and its completion together is --max_text_tokens")
    if is_none(text):
        return Meaning({})
    return Meaning(
        {"max_prompt_tokens": text, "long_prompts": "truncate"}, "to a prompt's last tokens; --long_prompts has others"
    )


def _text_length(text: str, context: NameContext) -> Meaning:
    if not context.texts:
        raise DifferentError("the limits are --max_prompt_tokens and --max_new_tokens")
    if is_none(text):
        return Meaning({}, "the model's positions are the limit")
    if context.recipe == "reward_model":
        return Meaning({"max_text_tokens": text, "long_prompts": "drop"})
    stops = "TRL cuts the end of a longer text; here it stops the run, --long_prompts drops it or cuts its beginning"
    return Meaning({"max_text_tokens": text, "long_prompts": "error"}, stops)


def _adapters(text: str, context: NameContext) -> Meaning:
    """All of PEFT's names together."""
    if not context.is_on("use_peft"):
        raise NoEffectError("TRL reads it with use_peft alone; here it is --lora_rank, --lora_alpha, --lora_targets")
    given = {name: context.theirs.get(name, default) for name, default in PEFT_DEFAULTS.items()}
    flags = {"lora_rank": given["lora_r"], "lora_alpha": given["lora_alpha"]}
    modules = ",".join(items(given["lora_target_modules"]))
    if is_none(modules):
        raise DifferentError("lora_target_modules: PEFT's own choice depends on the model; name them", flags)
    flags["lora_targets"] = modules
    if not is_same(given["lora_dropout"], "0"):
        raise DifferentError(f"lora_dropout={given['lora_dropout']}: adapters have no dropout here", flags)
    return Meaning(flags)


def _with_peft(typed: Convert) -> Convert:
    """A name of PEFT's. A whole configuration is read by all of them together.

    Args:
      typed: its meaning by itself, as it is typed where a flag of this library is expected.
    """

    def convert(text: str, context: NameContext) -> Meaning:
        return (_adapters if "num_train_epochs" in context.theirs else typed)(text, context)

    return convert


def _rank(text: str, context: NameContext) -> Meaning:
    """The rank of adapters, with TRL's scale where none is given."""
    rank, alpha = PEFT_DEFAULTS["lora_r"], PEFT_DEFAULTS["lora_alpha"]
    flags = {"lora_rank": context.theirs.get("lora_r", rank)}
    if context.ours.get("lora_alpha") is None:
        flags["lora_alpha"] = alpha
    difference = (
        f"TRL's defaults are {rank} and {alpha}; adapters have no dropout here, --lora_targets names their modules"
    )
    return Meaning(flags, difference)


def _order(text: str, context: NameContext) -> Meaning:
    if text == "sequential":
        return Meaning({}, "TRL's kto reads the records in their order, here they are shuffled by --seed")
    return Meaning({})


def _rpo_alpha(text: str, context: NameContext) -> Meaning:
    if is_none(text):
        return Meaning({})
    return argument("likelihood_coef", "it has no such term")(text, context)


_UNBOUNDED = {"max_grad_norm": "1e9"}


def _grad_norm(text: str, context: NameContext) -> Meaning:
    if is_same(text, "0"):
        raise DifferentError(
            "gradients always have a bound here; give a large --max_grad_norm", {"max_grad_norm": "1e9"}
        )
    return Meaning({"max_grad_norm": text})


def _optional(ours: str) -> Convert:
    """A flag that none leaves as it is."""
    return lambda text, context: Meaning({} if is_none(text) else {ours: text})


_MEMORY = "what is kept and computed again is --remat and --token_budget here"
_ENTROPY = "no recipe has it; `adaptive_entropy_bonus` and `selected_only` of docs/pieces.md do it"
TRL: dict[str, Convert] = {
    "model_name_or_path": same("model"),
    "model_revision": default_only("main", "give the directory of that revision"),
    "reward_model_name_or_path": same("reward_model"),
    "reward_model_path": same("reward_model"),
    "teacher_model_name_or_path": _optional("teacher"),
    "dataset_name": _dataset,
    "dataset_config": default_only("none", "give the data of that configuration as a file"),
    "dataset_train_split": default_only("train", "give the data of that split as a file"),
    "dataset_text_field": default_only("text", "records have a prompt and a completion"),
    "reward_funcs": _reward_funcs,
    "reward_weights": _optional("reward_weights"),
    "output_dir": same("run_dir", difference="one that holds a run is refused"),
    "learning_rate": same("lr"),
    "per_device_train_batch_size": sizes.batch_size,
    "gradient_accumulation_steps": sizes.batch_size,
    "steps_per_generation": sizes.batch_size,
    "generation_batch_size": sizes.generation_batch_size,
    "num_iterations": same("epochs"),
    "num_ppo_epochs": same("epochs"),
    "num_mini_batches": same("minibatches"),
    "num_train_epochs": sizes.epochs_of_data,
    "max_steps": sizes.max_steps,
    "eval_steps": sizes.optimizer_events("eval_every"),
    "save_steps": sizes.optimizer_events("save_every"),
    "save_total_limit": same("keep_checkpoints", difference="the best one is kept beside them"),
    "logging_steps": default_shown("1", "metrics are written after every step; leave it out"),
    "eval_strategy": _events("eval_every"),
    "save_strategy": _events("save_every"),
    "logging_strategy": default_shown("steps", "metrics are written after every step; leave it out"),
    "report_to": _report_to,
    "run_name": no_effect("a run has the name of its directory: --run_dir"),
    "logging_dir": no_effect("everything is in --run_dir"),
    "lr_scheduler_type": choice(
        "lr_schedule",
        {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"},
        "--lr_schedule has these",
    ),
    "warmup_ratio": sizes.warmup,
    "warmup_steps": sizes.warmup_steps,
    "weight_decay": same("weight_decay"),
    "max_grad_norm": _grad_norm,
    "seed": same("seed", difference="the numbers that are drawn are others"),
    "optim": choice(
        "optimizer",
        {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw": "adamw"},
        "--optimizer=adamw is its adamw_torch; its muon has other factors than --optimizer=muon",
    ),
    "adam_beta1": default_only("0.9", "AdamW's averages have 0.9 and 0.999"),
    "adam_beta2": default_only("0.999", "AdamW's averages have 0.9 and 0.999"),
    "adam_epsilon": default_only("1e-8", "AdamW's eps is 1e-8"),
    "lr_scheduler_kwargs": default_only("none", "schedules have no further arguments"),
    "label_smoothing_factor": default_only("0", "the labels of a likelihood are taken as they are"),
    "neftune_noise_alpha": default_only("none", "embeddings have no noise"),
    "gradient_checkpointing": _flag("remat", "full", "none"),
    "bf16": _bfloat16,
    "fp16": default_only("false", "there is no float16; --dtype=bfloat16 keeps float32 master weights"),
    "torch_dtype": _dtype,
    "dtype": _dtype,
    "use_vllm": _generates,
    "vllm_mode": _vllm_mode,
    "vllm_server_base_url": _optional("engine_url"),
    "vllm_server_timeout": same("engine_timeout"),
    "vllm_gpu_memory_utilization": no_effect("the cache's size is --kv_cache_gb, in 1e9 bytes"),
    "vllm_tensor_parallel_size": no_effect("the mesh to generate on is --generate_mesh, such as dp4,tp2"),
    "vllm_importance_sampling_correction": _correction,
    "num_generations": same("samples_per_prompt"),
    "num_generations_eval": lambda text, context: Meaning({"eval_samples": text} if text.isdigit() else {}),
    "max_completion_length": same("max_new_tokens"),
    "response_length": same("max_new_tokens"),
    "max_new_tokens": same("max_new_tokens"),
    "max_prompt_length": _prompt_length,
    "max_length": _text_length,
    "max_seq_length": _text_length,
    "truncation_mode": default_only("keep_start", "a longer text stops the run, or is cut by --long_prompts"),
    "packing": losses.packed_texts,
    "padding_free": no_effect("rows are always packed end to end; leave it out"),
    "temperature": losses.gkd_temperature,
    "top_p": same("top_p"),
    "top_k": lambda text, context: Meaning({"top_k": "0" if is_none(text) or text == "-1" else text}),
    "min_p": _optional("min_p"),
    "repetition_penalty": same("repetition_penalty"),
    "generation_kwargs": default_only("none", "sampling has the flags of docs/flags.md alone"),
    "chat_template_kwargs": default_only("none", "give --template_arguments=NAME:VALUE"),
    "beta": losses.beta,
    "kl_coef": losses.beta,
    "use_bias_correction_kl": losses.kl_correction,
    "epsilon": losses.epsilon,
    "epsilon_high": losses.epsilon_high,
    "cliprange": losses.epsilon,
    "cliprange_value": argument("value_clip", "it has no critic"),
    "lam": argument("gae_lambda", "it has no critic"),
    "delta": losses.delta,
    "loss_type": losses.loss_type,
    "loss_weights": losses.loss_weights,
    "importance_sampling_level": losses.ratio_level,
    "scale_rewards": losses.scale_rewards,
    "entropy_coef": losses.entropy_coef,
    "sapo_temperature_pos": losses.sapo_temperature("positive"),
    "sapo_temperature_neg": losses.sapo_temperature("negative"),
    "use_adaptive_entropy": default_only("false", _ENTROPY),
    "top_entropy_quantile": default_only("1", _ENTROPY),
    "off_policy_mask_threshold": default_only("none", "no recipe has it"),
    "multi_objective_aggregation": default_only("sum_then_normalize", "`funrl gdpo` normalises each reward"),
    "mask_truncated_completions": default_only("false", "completions that were cut short are trained on"),
    "normalize_advantages": losses.normalize_advantages,
    "reward_clip_range": default_only("none", "`corrected` with `clip_reward(LOW, HIGH)` clips rewards"),
    "label_smoothing": losses.label_smoothing,
    "rpo_alpha": _rpo_alpha,
    "f_divergence_type": losses.f_divergence,
    "f_alpha_divergence_coef": losses.alpha_coefficient,
    "ld_alpha": losses.length_alpha,
    "use_weighting": losses.use_weighting,
    "discopop_tau": default_only("0.05", "discopop's temperature is 0.05"),
    "desirable_weight": argument("desirable", "its completions are pairs"),
    "undesirable_weight": argument("undesirable", "its completions are pairs"),
    "train_sampling_strategy": _order,
    "cpo_alpha": losses.cpo_alpha,
    "simpo_gamma": losses.of_recipes("margin", "simpo", "alphapo"),
    "alpha": losses.of_recipes("alpha", "alphapo"),
    "lmbda": losses.lmbda,
    "seq_kd": default_only("false", "gkd learns from its own samples alone"),
    "completion_only_loss": losses.completion_only,
    "assistant_only_loss": default_only("false", "of a chat the last answer is learned"),
    "center_rewards_coefficient": lambda text, context: (
        Meaning({}) if is_none(text) else argument("center", "it is no reward model")(text, context)
    ),
    "use_peft": lambda text, context: _with_peft(_rank)(text, context) if is_true(text) else Meaning({}),
    "lora_r": _with_peft(_rank),
    "lora_alpha": _with_peft(same("lora_alpha")),
    "lora_dropout": _with_peft(default_only("0", "adapters have no dropout here; leave it out")),
    "lora_target_modules": _with_peft(
        lambda text, context: Meaning({} if is_none(text) else {"lora_targets": ",".join(items(text))})
    ),
    "lora_modules_to_save": default_only("none", "nothing beside the adapters learns"),
    "use_rslora": default_only("false", "adapters count by alpha / rank"),
    "use_dora": default_only("false", "adapters are LoRA's"),
    "load_in_4bit": default_only("false", "weights are not quantised"),
    "load_in_8bit": default_only("false", "weights are not quantised"),
    "average_tokens_across_devices": default_only("true", "tokens are counted over all devices"),
    "cast_lm_head_to_fp32": default_only("false", "the last product is in --dtype"),
    "router_aux_loss_coef": default_only("none", "TRL's is of each micro-batch; --router_aux_coef is of the step"),
    "sync_ref_model": default_only("false", "the reference stays as the policy began"),
    "disable_dropout": no_effect("models have no dropout here"),
    "shuffle_dataset": lambda text, context: default_only(
        "false" if context.recipe == "sft" and is_same(text, "false") else "true",
        "prompts and texts come in a shuffled order, by --seed",
    )(text, context),
    "load_best_model_at_end": default_only("false", "the model of the last step is in --run_dir; export has the best"),
    "dataloader_num_workers": no_effect("data is read where it is needed; leave it out"),
    "dataloader_drop_last": default_only("false", "every batch is whole"),
    "group_by_length": default_only("false", "prompts and texts come in a shuffled order, by --seed"),
    "per_device_eval_batch_size": no_effect("--eval_prompts are evaluated together; leave it out"),
    "precompute_ref_log_probs": no_effect("the reference's log-probabilities are computed where they are needed"),
    "use_liger_kernel": no_effect(f"[tokens, vocabulary] is never whole here; leave it out ({_MEMORY})"),
    "activation_offloading": no_effect(_MEMORY),
    "attn_implementation": no_effect("attention is chosen by the device; leave it out"),
    "deepspeed": no_effect("weights, gradients and optimizer states are sharded by --fsdp"),
    "fsdp": no_effect("weights, gradients and optimizer states are sharded by --fsdp"),
    "fsdp_config": no_effect("what --fsdp shards is --fsdp_axes and --fsdp_models"),
    "resume_from_checkpoint": no_effect("--resume --run_dir=RUN continues a run"),
    "push_to_hub": default_shown("false", "nothing is uploaded; the model is in --run_dir"),
    "log_completions": default_shown("true", "samples are always written, every --sample_every steps"),
}
