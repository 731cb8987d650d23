"""verl's dotted names, and what they mean here (its ppo_trainer.yaml).

verl's train_batch_size counts prompts, as --batch_prompts does; its mini-batches too. Numbers are of one step.
"""

from __future__ import annotations

from fractions import Fraction

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

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
DEFAULTS = {  # of its ppo_trainer.yaml, where they differ from those here or decide what others mean
    "data.train_batch_size": "1024", "data.max_response_length": "512", f"{ACTOR}.ppo_mini_batch_size": "256",
    f"{ACTOR}.ppo_epochs": "1", f"{ACTOR}.optim.lr": "1e-6", f"{ACTOR}.optim.weight_decay": "0.01",
    f"{ACTOR}.clip_ratio": "0.2", f"{ACTOR}.clip_ratio_c": "3.0", f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.entropy_coeff": "0", f"{ACTOR}.use_kl_loss": "false", f"{ACTOR}.kl_loss_coef": "0.001",
    f"{ACTOR}.kl_loss_type": "low_var_kl", f"{ACTOR}.grad_clip": "1.0", f"{ROLLOUT}.n": "1",
    f"{ROLLOUT}.dtype": "bfloat16",
    f"{ROLLOUT}.tensor_model_parallel_size": "2", "critic.optim.lr": "1e-5", "critic.cliprange_value": "0.5",
    "algorithm.adv_estimator": "gae", "algorithm.gamma": "1.0", "algorithm.lam": "1.0",
    "algorithm.norm_adv_by_std_in_grpo": "true", "algorithm.use_kl_in_reward": "false",
    "algorithm.kl_ctrl.kl_coef": "0.001", "algorithm.kl_ctrl.type": "fixed", "trainer.nnodes": "1",
    "trainer.n_gpus_per_node": "8", "trainer.save_freq": "-1", "trainer.test_freq": "-1",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "true", f"{ACTOR}.strategy": "fsdp",
}  # fmt: skip
ESTIMATORS = {  # of adv_estimator
    "gae": "ppo", "grpo": "grpo", "rloo": "rloo", "rloo_vectorized": "rloo", "remax": "remax", "opo": "opo",
    "reinforce_plus_plus": "reinforce_plus_plus", "gpg": "gpg", "gdpo": "gdpo",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline", "optimal_token_baseline": "otb",
}  # fmt: skip


def recipe_of(theirs: dict[str, str]) -> str:
    """The recipe of an advantage estimator and a policy loss. Raises: DifferentError."""
    estimator = theirs.get("algorithm.adv_estimator", "gae").lower()
    loss = theirs.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    if estimator == "grpo" and loss in ("gspo", "sapo", "cispo"):
        return loss
    if estimator == "grpo" and loss == "geo_mean":
        return "gmpo"
    if estimator == "grpo" and loss == "vanilla":
        plain = theirs.get("algorithm.norm_adv_by_std_in_grpo", "true").lower() == "false"
        return "dr_grpo" if plain else "grpo"
    if estimator not in ESTIMATORS or loss != "vanilla":
        raise DifferentError(f"adv_estimator={estimator} with loss_mode={loss}: `funrl --help` lists what there is")
    return ESTIMATORS[estimator]


def _recipe(text: str, context: NameContext) -> Meaning:
    return Meaning({"experiment": context.recipe}, "dr_grpo: no division by the deviation, nor by the length"
                   if context.recipe == "dr_grpo" else "")  # fmt: skip


def _minibatches(text: str, context: NameContext) -> Meaning:
    prompts = context.number("data.train_batch_size", "1024")
    each = context.number(f"{ACTOR}.ppo_mini_batch_size", "256")
    return Meaning({"minibatches": whole(prompts / each, f"--minibatches ({prompts} prompts / {each})")},
                   "verl gives the prompts of one, here it is how many there are")  # fmt: skip


def _mesh(text: str, context: NameContext) -> Meaning:
    devices = context.number("trainer.nnodes", "1") * context.number("trainer.n_gpus_per_node", "8")
    tensor = context.number(f"{ROLLOUT}.tensor_model_parallel_size", "2")
    split = context.number(f"{ACTOR}.ulysses_sequence_parallel_size", "1")
    sequence = f",sp{whole(split, '--mesh')}" if split > 1 else ""
    flags = {"mesh": f"dp{whole(devices / split, '--mesh')}{sequence}"}
    if devices > 1 and context.theirs.get(f"{ACTOR}.strategy", "fsdp").startswith("fsdp"):
        flags["fsdp"] = "true"
    if tensor > 1 and devices > 1:
        flags["generate_mesh"] = f"dp{whole(devices / tensor, '--generate_mesh')},tp{tensor}"
    return Meaning(flags, "the same devices train and generate")


def _clip(text: str, context: NameContext) -> Meaning:
    if "clip_low" not in context.arguments:
        raise DifferentError(f"{context.recipe} has no clip")
    both = context.theirs.get(f"{ACTOR}.clip_ratio", "0.2")
    low, high = (context.theirs.get(f"{ACTOR}.clip_ratio_{side}", both) for side in ("low", "high"))
    return Meaning({"clip_low": low, "clip_high": high})


def _kl_in_loss(text: str, context: NameContext) -> Meaning:
    used = is_true(context.theirs.get(f"{ACTOR}.use_kl_loss", "false"))
    if "kl_kind" not in context.arguments and used:
        raise DifferentError(f"{context.recipe} has no KL in the loss whose estimator can be chosen; grpo does")
    if not used:
        in_reward = "kl_target" in context.arguments
        return Meaning({"kl_coef": "0.0"} if "kl_coef" in context.arguments and not in_reward else {})
    kinds = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    kind = context.theirs.get(f"{ACTOR}.kl_loss_type", "low_var_kl")
    if kind.rstrip("+") not in kinds:
        raise DifferentError(f"kl_loss_type={kind}: --kl_kind has k1, k2, k3 and abs, and each with +")
    coefficient = context.theirs.get(f"{ACTOR}.kl_loss_coef", "0.001")
    return Meaning({"kl_coef": coefficient, "kl_kind": kinds[kind.rstrip("+")] + "+" * kind.endswith("+")},
                   "verl clamps k3 to +-10")  # fmt: skip


def _kl_in_reward(text: str, context: NameContext) -> Meaning:
    used = is_true(context.theirs.get("algorithm.use_kl_in_reward", "false"))
    if "kl_target" not in context.arguments:
        if used:
            raise DifferentError(f"{context.recipe} has no KL in the reward; ppo, rloo and remax do")
        return Meaning({})
    if not used:
        return Meaning({"kl_coef": "0.0"})
    flags = {"kl_coef": context.theirs.get("algorithm.kl_ctrl.kl_coef", "0.001")}
    if context.theirs.get("algorithm.kl_ctrl.type", "fixed") == "adaptive":
        flags["kl_target"] = context.theirs.get("algorithm.kl_ctrl.target_kl", "0.1")
    return Meaning(flags, "an adaptive one counts nats a token")


def _aggregation(text: str, context: NameContext) -> Meaning:
    of_recipe = {"token-mean": "all tokens", "seq-mean-token-mean": "each completion's tokens, then completions",
                 "seq-mean-token-sum": "completions, of their tokens' sums"}  # fmt: skip
    if context.recipe == "grpo" and text in ("token-mean", "seq-mean-token-mean"):
        said = "verl takes it of each mini-batch, as here" if text == "token-mean" else ""
        return Meaning({"per_sequence": str(text != "token-mean").lower()}, said)
    own = {"rloo": "seq-mean-token-sum", "remax": "seq-mean-token-sum", "gspo": "seq-mean-token-mean",
           "dr_grpo": "seq-mean-token-sum-norm", "sapo": "seq-mean-token-mean", "gmpo": "seq-mean-token-mean",
           "opo": "seq-mean-token-sum"}.get(context.recipe, "token-mean")  # fmt: skip
    if text == own:
        return Meaning({}, "dr_grpo divides by --max_new_tokens" if context.recipe == "dr_grpo" else "")
    raise DifferentError(
        f"verl's mean is over {of_recipe.get(text, text)}; {context.recipe} takes {own}: the size of a gradient and "
        "the weight of long completions differ"
    )


def _files(ours: str) -> Convert:
    return lambda text, context: Meaning({ours: ",".join(one.strip(" '\"[]") for one in text.split(","))})


def _every(ours: str, never: str) -> Convert:
    def convert(text: str, context: NameContext) -> Meaning:
        if text.startswith("-") or text == "0":
            return Meaning({ours: never} if never else {}, "" if never else "the first and last steps always evaluate")
        return Meaning({ours: text})

    return convert


def _top_k(ours: str) -> Convert:
    return lambda text, context: Meaning({ours: "0" if text == "-1" else text})


def _engine(text: str, context: NameContext) -> Meaning:
    if text in ("vllm", "hf"):
        return Meaning({"engine": text})
    raise DifferentError(f"there is no {text}; --engine has native, vllm, vllm_server and hf")


def _logger(text: str, context: NameContext) -> Meaning:
    names = [one.strip(" '\"[]") for one in text.split(",")]
    ours = [one for one in names if one in TRACKERS]
    left = [one for one in names if one not in (*TRACKERS, "console", "tensorboard", "file", "")]
    said = f"no {', '.join(left)}; " * bool(left) + "TensorBoard and JSON lines are always written"
    return Meaning({"report_to": ",".join(ours)} if ours else {}, said)


def _reward(text: str, context: NameContext) -> Meaning:
    for place in ("reward.custom_reward_function", "custom_reward_function"):  # of newer and of older versions
        path = context.theirs.get(f"{place}.path", "null")
        name = context.theirs.get(f"{place}.name", "compute_score")
        if path not in ("null", "None", ""):
            break
    else:
        return Meaning({})
    return Meaning({"reward": f"{path}:{name}"}, "docs/rewards.md says with which arguments it is called")


def _fields(text: str, context: NameContext) -> Meaning:
    return Meaning({} if text in ("prompt", "question") else {"fields": f"prompt:{text}"})


def _offload(what: str) -> Convert:
    return lambda text, context: Meaning({"offload": what} if is_true(text) else {})


def _warmup(text: str, context: NameContext) -> Meaning:
    steps, ratio = (context.number(f"{ACTOR}.optim.{name}", "-1") for name in
                    ("lr_warmup_steps", "lr_warmup_steps_ratio"))  # fmt: skip
    if steps > 0 or ratio <= 0:
        return Meaning({"lr_warmup_steps": str(max(round(steps), 0))})
    total = context.number("trainer.total_training_steps", str(context.ours["steps"]))
    updates = total * Fraction(_minibatches("", context).flags["minibatches"])
    return Meaning({"lr_warmup_steps": rounded(ratio * updates)}, f"{float(ratio):g} of {updates} optimizer steps")


def _reward_model(text: str, context: NameContext) -> Meaning:
    return Meaning({"reward_model": text} if is_true(context.theirs.get("reward_model.enable", "false")) else {})


def _steps(text: str, context: NameContext) -> Meaning:
    return Meaning({} if text in ("null", "None", "-1") else {"steps": text})


_EPOCHS = "a run's length is --steps here: epochs x prompts / --batch_prompts"
_BUDGET = "micro-batches are packed to --token_budget tokens, whatever their rows; this decides memory alone"
VERL: dict[str, Convert] = {
    "algorithm.adv_estimator": _recipe,
    "actor_rollout_ref.model.path": same("model"),
    "data.train_files": _files("prompts"),
    "data.val_files": _files("eval_data"),
    "data.prompt_key": _fields,
    "data.train_batch_size": same("batch_prompts"),
    "data.max_response_length": same("max_new_tokens"),
    "data.max_prompt_length": same("max_prompt_tokens"),
    "data.filter_overlong_prompts": lambda text, context: Meaning({"long_prompts": "drop"} if is_true(text) else {}),
    "data.truncation": choice(
        "long_prompts", {"error": "error", "left": "truncate"}, "--long_prompts=truncate keeps the last tokens"
    ),
    "data.seed": same("seed"),
    "custom_reward_function.path": _reward,
    "reward.custom_reward_function.path": _reward,
    "reward_model.model.path": _reward_model,
    f"{ROLLOUT}.n": same("samples_per_prompt"),
    f"{ROLLOUT}.temperature": same("temperature"),
    f"{ROLLOUT}.top_p": same("top_p"),
    f"{ROLLOUT}.top_k": _top_k("top_k"),
    f"{ROLLOUT}.val_kwargs.n": same("eval_samples"),
    f"{ROLLOUT}.val_kwargs.temperature": same("eval_temperature"),
    f"{ROLLOUT}.val_kwargs.top_p": same("eval_top_p"),
    f"{ROLLOUT}.val_kwargs.top_k": _top_k("eval_top_k"),
    f"{ROLLOUT}.name": _engine,
    f"{ROLLOUT}.dtype": choice("dtype", {"bfloat16": "bfloat16", "float32": "float32"}, "--dtype has these",
                               "of training and generation; master weights are float32"),
    f"{ROLLOUT}.max_num_seqs": same("decode_rows"),
    f"{ROLLOUT}.gpu_memory_utilization": different("the cache's size is --kv_cache_gb, in 1e9 bytes"),
    f"{ROLLOUT}.tensor_model_parallel_size": _mesh,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": different("scoring is packed to --score_token_budget tokens"),
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": same("score_token_budget"),
    f"{ACTOR}.ppo_mini_batch_size": _minibatches,
    f"{ACTOR}.ppo_micro_batch_size": different(_BUDGET),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": different(_BUDGET),
    f"{ACTOR}.ppo_max_token_len_per_gpu": same("token_budget"),
    f"{ACTOR}.use_dynamic_bsz": default_only("true", _BUDGET),
    f"{ACTOR}.ppo_epochs": same("epochs"),
    f"{ACTOR}.optim.lr": same("lr"),
    f"{ACTOR}.optim.weight_decay": same("weight_decay", difference="of matrices only"),
    f"{ACTOR}.optim.lr_warmup_steps": _warmup,
    f"{ACTOR}.optim.lr_warmup_steps_ratio": _warmup,
    f"{ACTOR}.optim.warmup_style": choice("lr_schedule", {"constant": "constant", "cosine": "cosine"}, "--lr_schedule"),
    f"{ACTOR}.optim.lr_scheduler_type": choice(
        "lr_schedule", {"constant": "constant", "cosine": "cosine"}, "--lr_schedule"
    ),
    f"{ACTOR}.grad_clip": same("max_grad_norm"),
    f"{ACTOR}.clip_ratio": _clip,
    f"{ACTOR}.clip_ratio_low": _clip,
    f"{ACTOR}.clip_ratio_high": _clip,
    f"{ACTOR}.clip_ratio_c": lambda text, context: (
        Meaning({"dual_clip": text})
        if "dual_clip" in context.arguments
        else Meaning({}, f"{context.recipe} bounds no ratio of a negative advantage")
    ),
    f"{ACTOR}.entropy_coeff": argument("entropy_coef", "it has no entropy bonus"),
    f"{ACTOR}.use_kl_loss": _kl_in_loss,
    f"{ACTOR}.kl_loss_coef": _kl_in_loss,
    f"{ACTOR}.kl_loss_type": _kl_in_loss,
    f"{ACTOR}.loss_agg_mode": _aggregation,
    f"{ACTOR}.strategy": _mesh,
    f"{ACTOR}.ulysses_sequence_parallel_size": _mesh,
    f"{ACTOR}.fsdp_config.param_offload": _offload("params"),
    f"{ACTOR}.fsdp_config.optimizer_offload": _offload("optimizer"),
    "actor_rollout_ref.ref.fsdp_config.param_offload": _offload("reference"),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": different("scoring is packed to --score_token_budget"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": lambda text, context: Meaning(
        {"remat": "full" if is_true(text) else "none"}
    ),
    "actor_rollout_ref.model.use_remove_padding": default_only("true", "rows are always packed; leave it out"),
    "critic.optim.lr": lambda text, context: Meaning({"critic_lr": text} if context.recipe in ("ppo", "vapo") else {}),
    "critic.cliprange_value": lambda text, context: Meaning(
        {"value_clip": text} if "value_clip" in context.arguments else {}
    ),
    "algorithm.gamma": lambda text, context: Meaning({"gamma": text} if "gamma" in context.arguments else {}),
    "algorithm.lam": lambda text, context: Meaning({"gae_lambda": text} if "gae_lambda" in context.arguments else {}),
    "algorithm.norm_adv_by_std_in_grpo": _recipe,
    "algorithm.use_kl_in_reward": _kl_in_reward,
    "algorithm.kl_ctrl.kl_coef": _kl_in_reward,
    "algorithm.kl_ctrl.type": _kl_in_reward,
    "algorithm.kl_ctrl.target_kl": _kl_in_reward,
    "trainer.nnodes": _mesh,
    "trainer.n_gpus_per_node": _mesh,
    "trainer.total_training_steps": _steps,
    "trainer.total_epochs": different(_EPOCHS),
    "trainer.save_freq": _every("save_every", "0"),
    "trainer.test_freq": _every("eval_every", ""),
    "trainer.critic_warmup": lambda text, context: Meaning(
        {"critic_warmup_steps": text} if context.recipe in ("ppo", "vapo") else {}
    ),
    "trainer.default_local_dir": same("run_dir", difference="one that holds a run is refused"),
    "trainer.logger": _logger,
    "trainer.project_name": different("trackers take their project from their own variables, such as WANDB_PROJECT"),
    "trainer.experiment_name": different("a run has the name of its directory: --run_dir"),
    "trainer.resume_mode": different("--resume --run_dir=RUN continues a run"),
    "trainer.val_before_train": default_only("true", "the state before the first step is always evaluated"),
}  # fmt: skip
