"""Meanings of TRL's arguments: those of its GRPO, RLOO, DPO, KTO, CPO, ORPO, GKD, SFT and reward trainers.

`TRL` has a rule for each name. Meanings are those of TRL 1.16. TRL counts completions per device and accumulation step,
and optimizer steps; here a step has --batch_prompts prompts with --samples_per_prompt completions each over all
devices, and makes --minibatches optimizer steps per pass.
"""

from __future__ import annotations

from pathlib import Path

from funrl.flags.foreign import losses, preferences, sizes
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
    in_file,
    is_on,
    is_unset,
    negated,
    no_effect,
    optional,
    recipe_is,
    same,
    switch,
)
from funrl.flags.foreign.values import DifferentError, is_none, is_same, items
from funrl.trainer.settings.outputs import TRACKERS

PEFT_DEFAULTS = {"lora_r": "16", "lora_alpha": "32", "lora_dropout": "0.05", "lora_target_modules": "none"}


def _data_flag(context: NameContext) -> str:
    return "data" if context.texts else "prompts"


def _dataset(text: str, context: NameContext) -> Meaning:
    flag = _data_flag(context)
    if not Path(text).exists():
        raise DifferentError(
            f"{text} is neither a file nor a directory; save it with datasets' save_to_disk, or as parquet, and give "
            f"--{flag}=PATH"
        )
    return Meaning({flag: text}, "a tenth of the records is held out; --eval_data=FILE names others")


def _split(ours: str = "") -> NameRule:
    """A split of a dataset, which is part of the dataset's name here.

    Args:
      ours: the flag of the dataset; "": that of the training data.
    """

    def rule(text: str, context: NameContext) -> Meaning:
        flag = ours or _data_flag(context)
        dataset = context.theirs.get("dataset_name")
        if dataset is None:
            raise DifferentError(f"a split is a part of the dataset's name: --{flag}=NAME:{text}")
        parts = (dataset, context.theirs.get("dataset_config", ""), text)
        return Meaning({flag: ":".join(filter(None, parts))})

    return rule


def _report_to(text: str, context: NameContext) -> Meaning:
    trackers = ["mlflow" if name == "azure_ml" else name for name in items(text) if name not in ("none", "tensorboard")]
    if unknown := [name for name in trackers if name not in TRACKERS]:
        return Meaning({}, f"{unknown[0]} is not one of {', '.join(TRACKERS)}", Effect.NO_EFFECT)
    flags = {"report_to": ",".join(trackers)} if trackers else {}
    return Meaning(flags, "TensorBoard and JSON lines are always written")


def _computes_in_bf16(text: str, context: NameContext) -> bool:
    return "bf16" in context.theirs and not is_same(context.theirs["bf16"], "false")


_DTYPE = first_of(
    (among("bfloat16", "torch.bfloat16"), becomes("weights that learn stay float32", dtype="bfloat16")),
    (
        among("float32", "torch.float32"),
        _computes_in_bf16,
        becomes("of the weights; passes compute in what bf16 says"),
    ),
    (among("float32", "torch.float32"), becomes(dtype="float32")),
    different("{text} is not one of bfloat16, float32: --dtype has bfloat16, float32 and float64"),
)
_ENGINES = {"colocate": "vllm", "server": "vllm_server"}
_CORRECTION = (
    "a correction for the gap between engine and trainer (vllm_importance_sampling_correction, on by default) is part "
    "of an algorithm: `corrected` with `importance_weights()`, docs/algorithms.md"
)


def _engine(text: str, context: NameContext) -> str:
    return _ENGINES.get(context.theirs.get("vllm_mode", "colocate"), "vllm")


def _corrects(text: str, context: NameContext) -> bool:
    """True if TRL corrects its losses, the default in a complete configuration."""
    default = str(context.complete).lower()
    return context.recipe in losses.GROUPED and context.is_on("vllm_importance_sampling_correction", default)


def _lacks_vllm(text: str, context: NameContext) -> bool:
    return context.complete and not context.is_on("use_vllm")


_USE_VLLM = first_of(
    (negated(is_on), becomes("the native engine generates")),
    (_corrects, different(_CORRECTION, engine=_engine)),
    becomes(engine=_engine),
)


def _events(ours: str, **never: str) -> NameRule:
    """An interval of steps.

    Args:
      never: flags for no such event.
    """
    return first_of(
        (among("steps"), becomes()), (among("no"), becomes(**never)), no_effect(f"give --{ours}=N, in steps")
    )


def _reward_funcs(text: str, context: NameContext) -> Meaning:
    paths = [name if ":" in name else ":".join(name.rsplit(".", 1)) if "." in name else "" for name in items(text)]
    if not all(paths):
        raise DifferentError(f"{text} is a name inside TRL; give --reward=FILE.py:function or module:function")
    return Meaning({"reward": ",".join(paths)}, "called with a prompt and a completion, or as docs/rewards.md says")


def _learns_from_texts(text: str, context: NameContext) -> bool:
    return context.texts


_PROMPT_LENGTH = first_of(
    (_learns_from_texts, different("the limit of a prompt and its completion together is --max_text_tokens")),
    (is_unset, becomes()),
    becomes(
        "to a prompt's last tokens; --long_prompts has others", max_prompt_tokens="{text}", long_prompts="truncate"
    ),
)
_TEXT_LENGTH = first_of(
    (negated(_learns_from_texts), different("the limits are --max_prompt_tokens and --max_new_tokens")),
    (is_unset, becomes("the model's positions are the limit")),
    (recipe_is("reward_model"), becomes(max_text_tokens="{text}", long_prompts="drop")),
    becomes(
        "TRL cuts the end of a longer text; here it stops the run, --long_prompts drops it or cuts its beginning",
        max_text_tokens="{text}",
        long_prompts="error",
    ),
)


def _adapters(text: str, context: NameContext) -> Meaning:
    """Meaning of all of PEFT's names together."""
    if not context.is_on("use_peft"):
        reason = "TRL reads it with use_peft alone; here it is --lora_rank, --lora_alpha, --lora_targets"
        return Meaning({}, reason, Effect.NO_EFFECT)
    given = {name: context.theirs.get(name, default) for name, default in PEFT_DEFAULTS.items()}
    flags = {"lora_rank": given["lora_r"], "lora_alpha": given["lora_alpha"]}
    modules = ",".join(items(given["lora_target_modules"]))
    if is_none(modules):
        reason = "lora_target_modules: PEFT's own choice depends on the model; name them"
        return Meaning(flags, reason, Effect.DIFFERENT)
    flags["lora_targets"] = modules
    if is_same(given["lora_dropout"], "0"):
        return Meaning(flags)
    reason = f"lora_dropout={given['lora_dropout']}: adapters have no dropout here"
    return Meaning(flags, reason, Effect.DIFFERENT)


def _rank(text: str, context: NameContext) -> Meaning:
    """The rank of adapters, with TRL's scale if none is given."""
    rank = PEFT_DEFAULTS["lora_r"]
    alpha = PEFT_DEFAULTS["lora_alpha"]
    flags = {"lora_rank": context.theirs.get("lora_r", rank)}
    if context.ours.get("lora_alpha") is None:
        flags["lora_alpha"] = alpha
    difference = (
        f"TRL's defaults are {rank} and {alpha}; adapters have no dropout here, --lora_targets names their modules"
    )
    return Meaning(flags, difference)


def _shuffles(text: str, context: NameContext) -> Meaning:
    """TRL's sft may keep the order of its data."""
    usual = "false" if context.recipe == "sft" and is_same(text, "false") else "true"
    return default_only(usual, "prompts and texts come in a shuffled order, by --seed")(text, context)


_IDLE = no_effect("decides no number of the run")
_FIXED_BETAS = "AdamW's averages have 0.9 and 0.999"
_MEMORY = "what is kept and computed again is --remat and --token_budget here"
_ENTROPY_BONUS = "no recipe has it; `adaptive_entropy_bonus()` and `adapt_entropy()` of docs/pieces.md do it"
_TOP_ENTROPY = "no recipe has it; `keep_highest_entropy()` of docs/pieces.md does it, with that share"
_QUANTIZED = "weights are not quantized; --lora_rank, --dtype=bfloat16, --remat=full and --offload save memory"
_SHARDED = "weights, gradients and optimizer states are sharded by --fsdp"
TRL: dict[str, NameRule] = {
    "model_name_or_path": same("model"),
    "model_revision": default_only(
        "main", "--model is a directory, or what the local cache has; download the revision first"
    ),
    "trust_remote_code": in_file(
        _IDLE,
        default_only(
            "false",
            "code of a model's repository is never run; --model_code=hf takes the classes of transformers",
        ),
    ),
    "reward_model_name_or_path": same("reward_model"),
    "reward_model_path": same("reward_model"),
    "teacher_model_name_or_path": optional("teacher"),
    "dataset_name": _dataset,
    "dataset_config": in_file(
        default_only("none", "give the data of that configuration as a file"),
        different("a configuration is a part of the dataset's name: NAME:CONFIG:SPLIT"),
    ),
    "dataset_train_split": in_file(default_only("train", "give the data of that split as a file"), _split()),
    "dataset_test_split": in_file(_IDLE, _split("eval_data")),
    "dataset_streaming": default_only("false", "data is read from files where it is needed; leave it out"),
    "remove_unused_columns": in_file(_IDLE, default_only("false", "every column reaches the reward; leave it out")),
    "dataset_text_field": default_only("text", "records have a prompt and a completion"),
    "reward_funcs": _reward_funcs,
    "reward_weights": optional("reward_weights"),
    "output_dir": same("run_dir", difference="one that holds a run is refused"),
    "learning_rate": same("lr"),
    "per_device_train_batch_size": sizes.batch_size,
    "gradient_accumulation_steps": sizes.batch_size,
    "steps_per_generation": sizes.batch_size,
    "generation_batch_size": optional(sizes.batch_size),
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
    "eval_on_start": in_file(_IDLE, default_only("true", "the state before the first step is always evaluated")),
    "save_strategy": _events("save_every", save_every="0"),
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
    "max_grad_norm": first_of(
        (
            equal("0"),
            different("gradients always have a bound here; give a large --max_grad_norm", max_grad_norm="1e9"),
        ),
        same("max_grad_norm"),
    ),
    "seed": same("seed", difference="its random numbers are others"),
    "optim": choice(
        "optimizer",
        {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw": "adamw"},
        "--optimizer=adamw is its adamw_torch; its muon has other factors than --optimizer=muon",
    ),
    "adam_beta1": default_only("0.9", _FIXED_BETAS),
    "adam_beta2": default_only("0.999", _FIXED_BETAS),
    "adam_epsilon": default_only("1e-8", "AdamW's eps is 1e-8"),
    "lr_scheduler_kwargs": default_only("none", "schedules have no further arguments"),
    "label_smoothing_factor": default_only("0", "the labels of a likelihood are taken as they are"),
    "neftune_noise_alpha": default_only("none", "embeddings have no noise"),
    "gradient_checkpointing": switch("remat", "full", "none"),
    "bf16": first_of((is_unset, becomes(dtype="bfloat16")), switch("dtype", "bfloat16", "float32")),
    "fp16": default_only("false", "there is no float16; --dtype=bfloat16 keeps float32 master weights"),
    "torch_dtype": _DTYPE,
    "dtype": _DTYPE,
    "use_vllm": _USE_VLLM,
    "vllm_mode": first_of(
        (_lacks_vllm, no_effect("use_vllm is not set")),
        choice("engine", _ENGINES, "--engine has vllm and vllm_server"),
    ),
    "vllm_server_base_url": optional("engine_url"),
    "vllm_server_timeout": same("engine_timeout"),
    "vllm_gpu_memory_utilization": no_effect("the cache's size is --kv_cache_gb, in 1e9 bytes"),
    "vllm_tensor_parallel_size": no_effect("the mesh to generate on is --generate_mesh, such as dp4,tp2"),
    "vllm_importance_sampling_correction": first_of(
        (equal("false"), becomes(_CORRECTION)),
        (_lacks_vllm, no_effect("use_vllm is not set")),
        different(_CORRECTION),
    ),
    "num_generations": same("samples_per_prompt"),
    "num_generations_eval": first_of((lambda text, context: text.isdigit(), same("eval_samples"))),
    "max_completion_length": same("max_new_tokens"),
    "response_length": same("max_new_tokens"),
    "max_new_tokens": same("max_new_tokens"),
    "max_prompt_length": _PROMPT_LENGTH,
    "max_length": _TEXT_LENGTH,
    "max_seq_length": _TEXT_LENGTH,
    "truncation_mode": default_only("keep_start", "a longer text stops the run, or is cut by --long_prompts"),
    "packing": losses.packed_texts,
    "padding_free": no_effect("rows are always packed end to end; leave it out"),
    "temperature": losses.gkd_temperature,
    "top_p": same("top_p"),
    "top_k": first_of((is_unset, becomes(top_k="0")), (among("-1"), becomes(top_k="0")), same("top_k")),
    "min_p": optional("min_p"),
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
    "loss_weights": preferences.loss_weights,
    "importance_sampling_level": losses.ratio_level,
    "scale_rewards": losses.scale_rewards,
    "entropy_coef": losses.entropy_coef,
    "sapo_temperature_pos": losses.sapo_temperature("positive"),
    "sapo_temperature_neg": losses.sapo_temperature("negative"),
    "use_adaptive_entropy": default_only("false", _ENTROPY_BONUS),
    "top_entropy_quantile": default_only("1", _TOP_ENTROPY),
    "off_policy_mask_threshold": default_only("none", "no recipe has it"),
    "multi_objective_aggregation": default_only("sum_then_normalize", "`funrl gdpo` normalises each reward"),
    "mask_truncated_completions": default_only("false", "completions that were cut short are trained on"),
    "normalize_advantages": losses.normalize_advantages,
    "reward_clip_range": default_only("none", "`corrected` with `clip_reward(LOW, HIGH)` clips rewards"),
    "label_smoothing": preferences.label_smoothing,
    "rpo_alpha": optional(argument("likelihood_coef", "it has no such term")),
    "f_divergence_type": preferences.f_divergence,
    "f_alpha_divergence_coef": preferences.alpha_coefficient,
    "ld_alpha": preferences.length_alpha,
    "use_weighting": preferences.use_weighting,
    "discopop_tau": default_only("0.05", "discopop's temperature is 0.05"),
    "desirable_weight": argument("desirable", "its completions are pairs"),
    "undesirable_weight": argument("undesirable", "its completions are pairs"),
    "train_sampling_strategy": first_of(
        (
            among("sequential"),
            becomes("TRL's kto reads the records in their order, here they are shuffled by --seed"),
        ),
    ),
    "cpo_alpha": preferences.cpo_alpha,
    "simpo_gamma": preferences.of_recipes("margin", "simpo", "alphapo"),
    "alpha": preferences.of_recipes("alpha", "alphapo"),
    "lmbda": losses.lmbda,
    "seq_kd": default_only("false", "gkd learns from its own samples alone"),
    "completion_only_loss": losses.completion_only,
    "assistant_only_loss": default_only("false", "of a chat the last answer is learned"),
    "center_rewards_coefficient": optional(argument("center", "it is no reward model")),
    "use_peft": first_of((is_on, in_file(_adapters, _rank))),
    "lora_r": in_file(_adapters, _rank),
    "lora_alpha": in_file(_adapters, same("lora_alpha")),
    "lora_dropout": in_file(_adapters, default_only("0", "adapters have no dropout here; leave it out")),
    "lora_target_modules": in_file(
        _adapters, optional(becomes(lora_targets=lambda text, context: ",".join(items(text))))
    ),
    "lora_modules_to_save": default_only("none", "nothing beside the adapters learns"),
    "use_rslora": default_only("false", "adapters count by alpha / rank"),
    "use_dora": default_only("false", "adapters are LoRA's"),
    "load_in_4bit": default_only("false", _QUANTIZED),
    "load_in_8bit": default_only("false", _QUANTIZED),
    "average_tokens_across_devices": default_only("true", "tokens are counted over all devices"),
    "cast_lm_head_to_fp32": default_only("false", "the last product is in --dtype"),
    "router_aux_loss_coef": default_only("none", "TRL's is of each micro-batch; --router_aux_coef is of the step"),
    "sync_ref_model": default_only("false", "the reference stays as the policy began"),
    "disable_dropout": no_effect("models have no dropout here"),
    "shuffle_dataset": _shuffles,
    "load_best_model_at_end": default_only("false", "the model of the last step is in --run_dir; export has the best"),
    "dataloader_num_workers": no_effect("data is read where it is needed; leave it out"),
    "dataloader_drop_last": default_only("false", "every batch is whole"),
    "group_by_length": default_only("false", "prompts and texts come in a shuffled order, by --seed"),
    "per_device_eval_batch_size": no_effect("--eval_prompts are evaluated together; leave it out"),
    "precompute_ref_log_probs": no_effect("the reference's log-probabilities are computed where they are needed"),
    "use_liger_kernel": no_effect(f"[tokens, vocabulary] is never whole here; leave it out ({_MEMORY})"),
    "activation_offloading": no_effect(_MEMORY),
    "torch_compile": in_file(_IDLE, different("--compile says what is compiled")),
    "attn_implementation": no_effect("attention is chosen by the device; leave it out"),
    "deepspeed": no_effect(_SHARDED),
    "fsdp": no_effect(_SHARDED),
    "fsdp_config": no_effect("what --fsdp shards is --fsdp_axes and --fsdp_models"),
    "resume_from_checkpoint": no_effect("--resume --run_dir=RUN continues a run"),
    "push_to_hub": default_shown("false", "nothing is uploaded; the model is in --run_dir"),
    "log_completions": default_shown("true", "samples are always written, every --sample_every steps"),
}
