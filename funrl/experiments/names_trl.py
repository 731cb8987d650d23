"""TRL's names of arguments, and what they mean here (its GRPOConfig, RLOOConfig, DPOConfig, SFTConfig, RewardConfig).

TRL counts completions a device and accumulation step, and optimizer steps; here a step has --batch_prompts prompts of
--samples_per_prompt completions each over all devices, and makes --minibatches optimizer steps a pass.
"""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

from funrl.experiments.renaming import (
    Convert,
    DifferentError,
    Meaning,
    NameContext,
    argument,
    choice,
    default_only,
    different,
    is_true,
    rounded,
    same,
    whole,
)
from funrl.trainer.output_settings import TRACKERS


def _batch(text: str, context: NameContext) -> Meaning:
    """Batch size a device, accumulation, and batches of one generation, which only together say what a step has."""
    each = context.number("per_device_train_batch_size", "8")
    accumulated = context.number("gradient_accumulation_steps", "1")
    together = each * accumulated * context.ranks
    how = f"{each} a device x {accumulated} accumulated x {context.ranks} devices with rows of their own"
    if context.texts:
        return Meaning({"batch_prompts": whole(together, "--batch_prompts")}, f"{how}; what is accumulated is decided "
                       "by --token_budget, and changes nothing")  # fmt: skip
    generated = each * context.ranks * context.number("steps_per_generation", str(accumulated))
    if context.theirs.get("generation_batch_size", "none").lower() != "none":
        generated = context.number("generation_batch_size", "")
    samples = context.number("num_generations", str(context.ours["samples_per_prompt"]))
    flags = {
        "batch_prompts": whole(generated / samples, f"--batch_prompts ({generated} completions / {samples})"),
        "minibatches": whole(generated / together, f"--minibatches ({generated} completions / {together})"),
    }
    return Meaning(flags, f"TRL counts completions: {how}; here prompts, of {samples} completions each")


def _updates(context: NameContext) -> Fraction:
    """Optimizer steps that one step here makes."""
    if context.texts:
        return Fraction(1)
    passes = context.number("num_iterations", str(context.ours["epochs"]))
    given = {"per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"}
    if given & set(context.theirs):
        return passes * Fraction(_batch("", context).flags["minibatches"])
    return passes * Fraction(context.ours["minibatches"])


def _steps(ours: str) -> Convert:
    def convert(text: str, context: NameContext) -> Meaning:
        if re.fullmatch(r"-\d+", text):
            return Meaning({})  # not given
        try:
            count = Fraction(text)
        except ValueError:
            raise DifferentError(f"{text}: a number of optimizer steps is needed") from None
        each = _updates(context)
        said = f"TRL counts optimizer steps, of which a step here makes {each}" if each != 1 else ""
        return Meaning({ours: rounded(count / each)}, said)

    return convert


def _warmup(text: str, context: NameContext) -> Meaning:
    share = context.number("warmup_ratio", "0")
    steps = Fraction(_steps("steps")(context.theirs["max_steps"], context).flags.get("steps", context.ours["steps"])
                     if "max_steps" in context.theirs else context.ours["steps"])  # fmt: skip
    updates = steps * _updates(context)
    return Meaning({"lr_warmup_steps": str(round(share * updates))}, f"{float(share):g} of {updates} optimizer steps")


def _warmup_steps(text: str, context: NameContext) -> Meaning:
    if 0 < context.number("warmup_steps", "0") < 1:
        return _warmup(text, context._replace(theirs={**context.theirs, "warmup_ratio": text}))
    return Meaning({"lr_warmup_steps": str(round(context.number("warmup_steps", "0")))})


def _epochs_of_data(text: str, context: NameContext) -> Meaning:
    raise DifferentError(
        f"the length of a run is --steps here, each of --batch_prompts; {text} epochs over N prompts are {text} x N / "
        "--batch_prompts steps (--epochs are passes over one batch of rollouts, TRL's num_iterations)"
    )


def _kl(text: str, context: NameContext) -> Meaning:
    if "kl_coef" not in context.arguments:
        raise DifferentError(f"{context.recipe} has no KL to a reference, so no --kl_coef")
    where = "taken off the reward" if context.recipe in ("rloo", "ppo") else "in the loss"
    return Meaning({"kl_coef": text}, f"the KL is {where}, with k3 as estimator, as TRL's")


def _epsilon(text: str, context: NameContext) -> Meaning:
    if "clip_low" not in context.arguments:
        raise DifferentError(f"{context.recipe} has no clip")
    return Meaning({"clip_low": text} | ({} if _given(context, "epsilon_high") else {"clip_high": text}))


def _epsilon_high(text: str, context: NameContext) -> Meaning:
    return argument("clip_high", "it has no clip")(text, context) if _given(context, "epsilon_high") else Meaning({})


def _given(context: NameContext, name: str) -> bool:
    return context.theirs.get(name, "none").lower() not in ("none", "null", "")


def _dataset(text: str, context: NameContext) -> Meaning:
    if not Path(text).exists():
        raise DifferentError(
            f"{text} is neither a file nor a directory; save it with datasets' save_to_disk, or as parquet, and give "
            f"--{'data' if context.texts else 'prompts'}=PATH"
        )
    return Meaning(
        {"data" if context.texts else "prompts": text},
        "a tenth of the records is held out; --eval_data=FILE names others",
    )


def _loss_type(text: str, context: NameContext) -> Meaning:
    if "loss" in context.arguments:  # dpo
        names = [one.strip(" '\"[]") for one in text.split(",")]
        return Meaning({"loss": "+".join({"bco_pair": "bco", "sppo_hard": "sppo", "exo_pair": "exo", "nca_pair": "nca"}
                                         .get(one, one) for one in names)})  # fmt: skip
    if context.recipe == "sft" and text == "nll":
        return Meaning({})
    per_sequence = {"grpo": "true", "dapo": "false", "bnpo": "false"}
    if context.recipe == "grpo" and text in per_sequence:
        said = {"bnpo": "TRL's bnpo is the mean over the tokens of a device's part, here of all"}
        return Meaning({"per_sequence": per_sequence[text]}, said.get(text, ""))
    if text == context.recipe:
        return Meaning({})
    raise DifferentError(
        f"a loss is part of the algorithm here: TRL's grpo is `funrl grpo`, its dapo and bnpo `funrl grpo "
        f"--noper_sequence` (a mean over all tokens), dr_grpo, cispo and sapo `funrl NAME`; this is {context.recipe}"
    )


def _scale_rewards(text: str, context: NameContext) -> Meaning:
    if text.lower() in ("group", "true") and context.recipe in ("grpo", "dapo", "gspo", "cispo", "sapo"):
        return Meaning({}, "TRL adds 1e-4 to the deviation of a group")
    if text.lower() in ("none", "false") and context.recipe == "dr_grpo":
        return Meaning({})
    raise DifferentError(
        f"the scale of an advantage is part of the algorithm: grpo divides by the deviation of the group, dr_grpo by "
        f"nothing, gdpo by the batch's; this is {context.recipe}"
    )


def _ratio(text: str, context: NameContext) -> Meaning:
    if (text == "token") == (context.recipe != "gspo"):
        return Meaning({})
    raise DifferentError("ratios of tokens are grpo's, those of sequences gspo's: `funrl gspo`")


def _report_to(text: str, context: NameContext) -> Meaning:
    names = [one.strip(" '\"[]") for one in text.split(",")]
    ours = ["mlflow" if one == "azure_ml" else one for one in names if one not in ("none", "tensorboard", "")]
    if unknown := [one for one in ours if one not in TRACKERS]:
        raise DifferentError(f"{unknown[0]} is not one of {', '.join(TRACKERS)}")
    return Meaning({"report_to": ",".join(ours)} if ours else {}, "TensorBoard and JSON lines are always written")


def _divergence(text: str, context: NameContext) -> Meaning:
    names = {"reverse_kl": "reverse_kl", "forward_kl": "forward_kl", "js_divergence": "js", "alpha_divergence": "alpha"}
    if "divergence" not in context.arguments:
        raise DifferentError(f"{context.recipe} has no --divergence")
    if text not in names:
        raise DifferentError(f"{text} is not one of {', '.join(names)}")
    return Meaning({"divergence": names[text]})


def _flag(ours: str, yes: str, no: str) -> Convert:
    return lambda text, context: Meaning({ours: yes if is_true(text) else no})


def _generates(text: str, context: NameContext) -> Meaning:
    return Meaning({"engine": "vllm"} if is_true(text) else {}, "" if is_true(text) else "the native engine generates")


def _every(ours: str) -> Convert:
    def convert(text: str, context: NameContext) -> Meaning:
        if text == "steps":
            return Meaning({})
        if text == "no" and ours == "save_every":
            return Meaning({"save_every": "0"})
        raise DifferentError(f"give --{ours}=N, in steps")

    return convert


def _reward_funcs(text: str, context: NameContext) -> Meaning:
    names = [one.strip(" '\"[]") for one in text.split(",")]
    paths = [one if ":" in one else ":".join(one.rsplit(".", 1)) if "." in one else "" for one in names]
    if not all(paths):
        raise DifferentError(f"{text} is a name inside TRL; give --reward=FILE.py:function or module:function")
    return Meaning({"reward": ",".join(paths)}, "called with a prompt and a completion, or as docs/rewards.md says")


def _prompt_length(text: str, context: NameContext) -> Meaning:
    if context.texts:
        raise DifferentError("the limit of a prompt and its completion together is --max_text_tokens")
    return Meaning({"max_prompt_tokens": text}, "--long_prompts says what is done with longer ones")


def _text_length(text: str, context: NameContext) -> Meaning:
    if not context.texts:
        raise DifferentError("the limits are --max_prompt_tokens and --max_new_tokens")
    if text.lower() in ("none", "null", ""):
        return Meaning({}, "the model's positions are the limit")
    if context.recipe == "reward_model":
        return Meaning({"max_text_tokens": text, "long_prompts": "drop"})
    difference = "a longer text loses the beginning of its prompt, in TRL its end"
    return Meaning({"max_text_tokens": text, "long_prompts": "truncate"}, difference)


_MEMORY = "what is kept and computed again is --remat and --token_budget here"
TRL: dict[str, Convert] = {
    "model_name_or_path": same("model"),
    "reward_model_name_or_path": same("reward_model"),
    "reward_model_path": same("reward_model"),
    "dataset_name": _dataset,
    "reward_funcs": _reward_funcs,
    "output_dir": same("run_dir", difference="one that holds a run is refused"),
    "learning_rate": same("lr"),
    "per_device_train_batch_size": _batch,
    "gradient_accumulation_steps": _batch,
    "steps_per_generation": _batch,
    "generation_batch_size": lambda text, context: (
        _batch(text, context) if _given(context, "generation_batch_size") else Meaning({})
    ),
    "num_iterations": same("epochs"),
    "num_ppo_epochs": same("epochs"),
    "num_mini_batches": same("minibatches"),
    "num_train_epochs": _epochs_of_data,
    "max_steps": _steps("steps"),
    "eval_steps": _steps("eval_every"),
    "save_steps": _steps("save_every"),
    "save_total_limit": same("keep_checkpoints", difference="the best one is kept beside them"),
    "logging_steps": default_only("1", "metrics are written after every step; leave it out"),
    "eval_strategy": _every("eval_every"),
    "save_strategy": _every("save_every"),
    "logging_strategy": default_only("steps", "metrics are written after every step; leave it out"),
    "report_to": _report_to,
    "run_name": different("a run has the name of its directory: --run_dir"),
    "logging_dir": different("everything is in --run_dir"),
    "lr_scheduler_type": choice(
        "lr_schedule",
        {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"},
        "--lr_schedule has these",
    ),
    "warmup_ratio": _warmup,
    "warmup_steps": _warmup_steps,
    "optim": choice(
        "optimizer",
        {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw": "adamw", "muon": "muon"},
        "--optimizer has adamw and muon",
    ),
    "gradient_checkpointing": _flag("remat", "full", "none"),
    "bf16": _flag("dtype", "bfloat16", "float32"),
    "fp16": default_only("false", "there is no float16; --dtype=bfloat16 keeps float32 master weights"),
    "torch_dtype": choice(
        "dtype", {"bfloat16": "bfloat16", "float32": "float32"}, "--dtype has bfloat16, float32 and float64"
    ),
    "use_vllm": _generates,
    "vllm_mode": choice("engine", {"colocate": "vllm", "server": "vllm_server"}, "--engine has vllm and vllm_server"),
    "vllm_server_base_url": same("engine_url"),
    "vllm_server_timeout": same("engine_timeout"),
    "vllm_gpu_memory_utilization": different("the cache's size is --kv_cache_gb, in 1e9 bytes"),
    "vllm_tensor_parallel_size": different("the mesh to generate on is --generate_mesh, such as dp4,tp2"),
    "num_generations": same("samples_per_prompt"),
    "num_generations_eval": lambda text, context: Meaning({"eval_samples": text} if text.isdigit() else {}),
    "max_completion_length": same("max_new_tokens"),
    "response_length": same("max_new_tokens"),
    "max_prompt_length": _prompt_length,
    "max_length": _text_length,
    "max_seq_length": _text_length,
    "packing": default_only("true", "rows are always packed end to end, and do not see one another; leave it out"),
    "padding_free": default_only("true", "rows are always packed end to end; leave it out"),
    "beta": _kl,
    "kl_coef": _kl,
    "epsilon": _epsilon,
    "epsilon_high": _epsilon_high,
    "cliprange": _epsilon,
    "cliprange_value": argument("value_clip", "it has no critic"),
    "lam": argument("gae_lambda", "it has no critic"),
    "delta": lambda text, context: (
        argument("dual_clip", "ratios of negative advantages are not bounded")(text, context)
        if _given(context, "delta") or "dual_clip" in context.arguments
        else Meaning({})
    ),
    "loss_type": _loss_type,
    "importance_sampling_level": _ratio,
    "scale_rewards": _scale_rewards,
    "label_smoothing": argument("smoothing", "its labels are taken as they are"),
    "rpo_alpha": argument("likelihood_coef", "it has no such term"),
    "f_divergence_type": _divergence,
    "f_alpha_divergence_coef": argument("divergence_alpha", "it has none"),
    "ld_alpha": argument("length_alpha", "it has none"),
    "center_rewards_coefficient": argument("center", "it is no reward model"),
    "mask_truncated_completions": default_only("false", "completions that were cut short are trained on"),
    "sync_ref_model": default_only("false", "the reference stays as the policy began"),
    "disable_dropout": default_only("true", "models have no dropout here"),
    "shuffle_dataset": default_only("true", "prompts and texts come in a shuffled order, by --seed"),
    "dataloader_num_workers": different("data is read where it is needed; leave it out"),
    "per_device_eval_batch_size": different("--eval_prompts are evaluated together; leave it out"),
    "use_liger_kernel": different(f"[tokens, vocabulary] is never whole here; leave it out ({_MEMORY})"),
    "activation_offloading": different(_MEMORY),
    "attn_implementation": different("attention is chosen by the device; leave it out"),
    "deepspeed": different("weights, gradients and optimizer states are sharded by --fsdp"),
    "fsdp_config": different("what --fsdp shards is --fsdp_axes and --fsdp_models"),
    "resume_from_checkpoint": different("--resume --run_dir=RUN continues a run"),
    "push_to_hub": default_only("false", "nothing is uploaded; the model is in --run_dir"),
    "log_completions": default_only("true", "samples are always written, every --sample_every steps"),
    "vllm_importance_sampling_correction": default_only("false", "a correction for the gap between engine and trainer "
        "is part of an algorithm: `corrected` with `importance_weights()`, docs/algorithms.md"),
}  # fmt: skip
