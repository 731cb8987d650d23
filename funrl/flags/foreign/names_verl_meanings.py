"""Meanings of verl's values, by what its trainers compute (0.9.1): what the table of names_verl.py is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from funrl.flags.foreign.renaming import (
    Convert,
    DifferentError,
    Meaning,
    NameContext,
    NoEffectError,
    is_none,
    is_same,
    is_true,
    items,
    number_text,
    whole,
)
from funrl.trainer.settings.outputs import TRACKERS

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
CORRECTION = "algorithm.rollout_correction"
ESTIMATORS = {  # of adv_estimator
    "gae": "ppo", "grpo": "grpo", "rloo": "rloo", "rloo_vectorized": "rloo", "remax": "remax", "opo": "opo",
    "reinforce_plus_plus": "reinforce_plus_plus", "gpg": "gpg", "gdpo": "gdpo",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline", "optimal_token_baseline": "otb",
}  # fmt: skip
LOSS_RECIPES = {  # of policy_loss.loss_mode
    "gspo": "gspo", "sapo": "sapo", "cispo": "cispo", "geo_mean": "gmpo", "dppo_tv": "dppo", "dppo_kl": "dppo",
}  # fmt: skip
RAW_ALONE = {"grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"}  # give the only row of a prompt its reward
OTHER = {  # recipes that compute something else than verl
    "gdpo": "verl takes the last deviation over tokens, here it is over rows",
    "gpg": "verl counts the rows whose reward is not 0, here those of groups with unequal rewards; its default loss is "
    "the clipped one",
    "gmpo": "verl's loss grows with the number of micro-batches",
    "opo": "verl takes the clipped loss, here it is the plain policy gradient",
}
REDUCTIONS = {
    "rloo": "seq-mean-token-sum", "remax": "seq-mean-token-sum", "gspo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm", "sapo": "seq-mean-token-mean", "gmpo": "seq-mean-token-mean",
    "opo": "seq-mean-token-sum", "gdpo": "seq-mean-token-mean",
}  # fmt: skip


def recipe_of(theirs: Mapping[str, str]) -> str:
    """The recipe of an advantage estimator and a policy loss. Raises: DifferentError."""
    estimator = theirs.get("algorithm.adv_estimator", "gae").lower()
    loss = theirs.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    if estimator == "grpo" and loss in LOSS_RECIPES:
        return LOSS_RECIPES[loss]
    if estimator == "grpo" and loss == "vanilla":
        plain = theirs.get("algorithm.norm_adv_by_std_in_grpo", "true").lower() == "false"
        return "dr_grpo" if plain else "grpo"
    if estimator == "gpg" and loss == "gpg":
        return "gpg"
    if estimator not in ESTIMATORS or loss != "vanilla":
        raise DifferentError(f"adv_estimator={estimator} with loss_mode={loss}: `funrl --help` lists what there is")
    return ESTIMATORS[estimator]


def recipe(text: str, context: NameContext) -> Meaning:
    flags = {"experiment": context.recipe}
    if context.recipe in OTHER:
        raise DifferentError(OTHER[context.recipe], flags)
    estimator = context.theirs.get("algorithm.adv_estimator", "grpo").lower()
    if estimator in RAW_ALONE and is_same(context.theirs.get(f"{ROLLOUT}.n", "2"), "1"):
        raise DifferentError("of a prompt's only completion verl's advantage is the reward, here it is 0", flags)
    grouped = context.recipe in set(LOSS_RECIPES.values())
    if grouped and not context.is_on("algorithm.norm_adv_by_std_in_grpo", "true"):
        raise DifferentError(f"{context.recipe} divides by the deviation of the group", flags)
    return Meaning(flags, "dr_grpo: no division by the deviation, nor by the length"
                   if context.recipe == "dr_grpo" else "")  # fmt: skip


def loss_mode(text: str, context: NameContext) -> Meaning:
    if context.recipe != "dppo":
        return Meaning({})
    return Meaning({"kind": text.removeprefix("dppo_"), "sampled_by": sampler(context)})


def sampler(context: NameContext) -> str:
    return "rollout_logp" if context.is_on(f"{CORRECTION}.bypass_mode") else "old_logp"


def minibatch_count(context: NameContext) -> str:
    prompts = context.number("data.train_batch_size", "1024")
    each = context.number(f"{ACTOR}.ppo_mini_batch_size", "256")
    return whole(prompts / each, f"--minibatches ({prompts} prompts / {each})")


def minibatches(text: str, context: NameContext) -> Meaning:
    return Meaning({"minibatches": minibatch_count(context)}, "verl gives the prompts of one, here it is how many "
                   "there are")  # fmt: skip


def updates_of_batch(context: NameContext) -> Fraction:
    """Optimizer steps of a step."""
    return Fraction(minibatch_count(context)) * context.number(f"{ACTOR}.ppo_epochs", "1")


def mesh(text: str, context: NameContext) -> Meaning:
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


def clip(text: str, context: NameContext) -> Meaning:
    names = ("low", "high") if context.recipe == "dppo" else ("clip_low", "clip_high")
    if names[0] not in context.arguments:
        raise NoEffectError(f"{context.recipe} has no clip, here and in verl")
    both = context.theirs.get(f"{ACTOR}.clip_ratio", "0.2")
    low, high = (context.theirs.get(f"{ACTOR}.clip_ratio_{side}", both) for side in ("low", "high"))
    return Meaning({names[0]: low, names[1]: high})


def clip_both(text: str, context: NameContext) -> Meaning:
    sides = {context.theirs.get(f"{ACTOR}.clip_ratio_{side}", "null") for side in ("low", "high")}
    if any(map(is_none, sides)):
        return clip(text, context)
    raise NoEffectError("verl reads clip_ratio_low and clip_ratio_high, each 0.2 if it is not given")


def dual_clip(text: str, context: NameContext) -> Meaning:
    if context.recipe == "dppo":
        return Meaning({"cap": text})
    if "dual_clip" in context.arguments:
        return Meaning({"dual_clip": text})
    if context.recipe in LOSS_RECIPES.values() or context.recipe in ("gpg", "opo"):
        raise NoEffectError(f"{context.recipe} bounds no ratio of a negative advantage, here and in verl")
    if updates_of_batch(context) > 1:
        raise DifferentError(
            f"verl bounds ratios of negative advantages at {text}, {context.recipe} does not; with one update a batch "
            "all ratios are 1"
        )
    return Meaning({}, "with one update a batch all ratios are 1")


def kl_in_loss(text: str, context: NameContext) -> Meaning:
    in_reward = "kl_target" in context.arguments
    if not context.is_on(f"{ACTOR}.use_kl_loss"):
        return Meaning({"kl_coef": "0.0"} if "kl_coef" in context.arguments and not in_reward else {})
    if in_reward or "kl_coef" not in context.arguments:
        raise DifferentError(f"{context.recipe} has no KL in the loss; grpo does")
    kinds = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    kind = context.theirs.get(f"{ACTOR}.kl_loss_type", "low_var_kl")
    coefficient = {"kl_coef": context.theirs.get(f"{ACTOR}.kl_loss_coef", "0.001")}
    if kind.rstrip("+") not in kinds:
        raise DifferentError(f"kl_loss_type={kind}: --kl_kind has k1, k2, k3 and abs, and each with +", coefficient)
    ours = kinds[kind.rstrip("+")] + "+" * kind.endswith("+")
    if "kl_kind" in context.arguments:
        return Meaning(coefficient | {"kl_kind": ours}, "verl clamps k3 to +-10")
    if ours != "k3":
        raise DifferentError(f"the KL of {context.recipe} is k3, which grpo's --kl_kind chooses", coefficient)
    return Meaning(coefficient, "verl clamps k3 to +-10")


def reward_kl(text: str, context: NameContext) -> Meaning:
    used = context.is_on("algorithm.use_kl_in_reward")
    if "kl_target" not in context.arguments:
        if used:
            raise DifferentError(f"{context.recipe} has no KL in the reward; ppo, rloo and remax do")
        return Meaning({})
    if not used:
        return Meaning({"kl_coef": "0.0"})
    flags = {"kl_coef": context.theirs.get("algorithm.kl_ctrl.kl_coef", "0.001")}
    if context.theirs.get("algorithm.kl_ctrl.type", "fixed") == "adaptive":
        flags["kl_target"] = context.theirs.get("algorithm.kl_ctrl.target_kl", "0.1")
    if context.theirs.get("algorithm.kl_penalty", "kl") not in ("kl", "k1"):
        raise DifferentError("the KL in a reward is k1, verl's kl_penalty=kl", flags)
    if not is_same(context.theirs.get("algorithm.kl_ctrl.horizon", "10000"), "10000"):
        raise DifferentError("an adaptive coefficient has a horizon of 10000 rows", flags)
    return Meaning(flags, "an adaptive one counts nats a token")


def aggregation(text: str, context: NameContext) -> Meaning:
    of_recipe = {"token-mean": "all tokens", "seq-mean-token-mean": "each completion's tokens, then completions",
                 "seq-mean-token-sum": "completions, of their tokens' sums"}  # fmt: skip
    if context.recipe == "grpo" and text in ("token-mean", "seq-mean-token-mean"):
        return Meaning({"per_sequence": str(text != "token-mean").lower()}, "verl takes it of each mini-batch, as here")
    own = REDUCTIONS.get(context.recipe, "token-mean")
    extra = context.is_on(f"{ACTOR}.use_kl_loss") or not is_same(context.theirs.get(f"{ACTOR}.entropy_coeff", "0"), "0")
    if context.recipe == "sapo" and text != own and not extra:
        raise NoEffectError("verl's sapo takes the mean of each completion whatever it is")
    limit = context.theirs.get("data.max_response_length", "512")
    if context.recipe == "dr_grpo" and text == own:
        if is_same(context.theirs.get(f"{ACTOR}.loss_scale_factor", "none"), limit):
            return Meaning({}, "dr_grpo divides by --max_new_tokens")
        raise DifferentError(
            f"verl divides by the width of the padded batch unless loss_scale_factor is given, here by "
            f"--max_new_tokens (loss_scale_factor={limit})"
        )
    if text == own:
        return Meaning({})
    raise DifferentError(
        f"verl's mean is over {of_recipe.get(text, text)}; {context.recipe} takes {own}: the size of a gradient and "
        "the weight of long completions differ"
    )


def files(ours: str) -> Convert:
    return lambda text, context: Meaning({ours: ",".join(items(text))})


def event_interval(ours: str, never: str) -> Convert:
    def convert(text: str, context: NameContext) -> Meaning:
        if text.startswith("-") or text == "0":
            return Meaning({ours: never} if never else {}, "" if never else "the first and last steps always evaluate")
        return Meaning({ours: text})

    return convert


def top_k(ours: str) -> Convert:
    return lambda text, context: Meaning({ours: "0" if text == "-1" else text})


def evaluation(ours: str, greedy: str) -> Convert:
    """A flag of evaluation, which verl reads where it samples there."""

    def convert(text: str, context: NameContext) -> Meaning:
        if not context.is_on(f"{ROLLOUT}.val_kwargs.do_sample"):
            return Meaning({ours: greedy}, "greedy without do_sample" if not is_same(text, greedy) else "")
        return Meaning({ours: "0" if ours == "eval_top_k" and text == "-1" else text})

    return convert


def samples_to_evaluate(text: str, context: NameContext) -> Meaning:
    if is_true(text):
        return Meaning({"eval_temperature": context.theirs.get(f"{ROLLOUT}.val_kwargs.temperature", "0")})
    return Meaning({"eval_temperature": "0"})


def engine(text: str, context: NameContext) -> Meaning:
    if text in ("vllm", "hf"):
        return Meaning({"engine": text})
    raise NoEffectError(f"there is no {text}, the native engine generates; --engine has vllm, vllm_server and hf too")


def logger(text: str, context: NameContext) -> Meaning:
    names = items(text)
    ours = [one for one in names if one in TRACKERS]
    left = [one for one in names if one not in (*TRACKERS, "console", "tensorboard", "file")]
    note = f"no {', '.join(left)}; " * bool(left) + "TensorBoard and JSON lines are always written"
    return Meaning({"report_to": ",".join(ours)} if ours else {}, note)


def reward_function(text: str, context: NameContext) -> Meaning:
    for place in ("reward.custom_reward_function", "custom_reward_function"):  # of newer and of older versions
        path = context.theirs.get(f"{place}.path", "null")
        name = context.theirs.get(f"{place}.name", "null")
        if not is_none(path):
            ours = f"{path}:{'compute_score' if is_none(name) else name}"
            return Meaning({"reward": ours}, "docs/rewards.md says with which arguments it is called")
    return Meaning({})


def prompt_key(text: str, context: NameContext) -> Meaning:
    return Meaning({} if text in ("prompt", "question") else {"fields": f"prompt:{text}"})


OFFLOADS = {  # name: what leaves the GPU
    f"{ACTOR}.fsdp_config.param_offload": "params",
    f"{ACTOR}.fsdp_config.optimizer_offload": "optimizer",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "reference",
}


def host_offload(text: str, context: NameContext) -> Meaning:
    parts = [ours for name, ours in OFFLOADS.items() if context.is_on(name)]
    return Meaning({"offload": ",".join(parts)} if parts else {})


def long_prompts(text: str, context: NameContext) -> Meaning:
    cut = context.theirs.get("data.truncation", "error")
    if context.is_on("data.filter_overlong_prompts"):
        return Meaning({"long_prompts": "drop"}, "verl drops such prompts before it would cut them")
    if cut not in ("error", "left"):
        raise DifferentError(f"{cut} is not one of error, left: --long_prompts=truncate keeps the last tokens")
    return Meaning({"long_prompts": {"error": "error", "left": "truncate"}[cut]})


def adapters(text: str, context: NameContext) -> Meaning:
    rank = context.theirs.get(f"{MODEL}.lora_rank", "0")
    if is_none(rank) or is_same(rank, "0"):
        return Meaning({})
    targets = ",".join(items(context.theirs.get(f"{MODEL}.target_modules", "all-linear")))
    flags = {"lora_rank": rank, "lora_alpha": context.theirs.get(f"{MODEL}.lora_alpha", "16"), "lora_targets": targets}
    if not is_none(context.theirs.get(f"{MODEL}.exclude_modules", "null")):
        raise DifferentError("--lora_targets names what has adapters; none is excluded", flags)
    return Meaning(flags)


def rollout_correction(text: str, context: NameContext) -> Meaning:
    used = [
        name for name in ("rollout_is", "rollout_rs") if not is_none(context.theirs.get(f"{CORRECTION}.{name}", ""))
    ]
    bypassed = context.is_on(f"{CORRECTION}.bypass_mode")
    if used or (bypassed and context.recipe != "dppo"):
        raise DifferentError(
            "it changes the loss: a correction for the gap between engine and trainer is `corrected` with "
            "`importance_weights()` or `reject_ratio()` in a FILE.py, docs/algorithms.md"
        )
    return Meaning({"sampled_by": sampler(context)} if bypassed else {})


def schedule(text: str, context: NameContext) -> Meaning:
    if is_none(text):
        return Meaning({})
    if text not in ("constant", "cosine"):
        raise DifferentError(f"{text} is not one of constant, cosine: --lr_schedule has these and linear")
    if text == "cosine" and updates_of_batch(context) > 1:
        raise DifferentError(STAIRS, {"lr_schedule": text})
    return Meaning({"lr_schedule": text})


STAIRS = "verl's rate stays during a step and moves between steps, here it moves with every optimizer step"


def warmup_of_steps(text: str, context: NameContext) -> Meaning:
    steps, ratio = (context.number(f"{ACTOR}.optim.{name}", "-1") for name in
                    ("lr_warmup_steps", "lr_warmup_steps_ratio"))  # fmt: skip
    note = ""
    if steps <= 0 and ratio > 0:
        total = total_steps(context)
        steps, note = Fraction(math.floor(ratio * total)), f"{number_text(ratio)} of {total} steps"
    if steps <= 0:
        return Meaning({})
    flags = {"lr_warmup_steps": str(round(steps * updates_of_batch(context)))}
    if updates_of_batch(context) > 1:
        raise DifferentError(STAIRS, flags)
    return Meaning(flags, note)


def total_steps(context: NameContext) -> int:
    given = context.theirs.get("trainer.total_training_steps", "null")
    if not (is_none(given) or given == "-1"):
        return int(context.number("trainer.total_training_steps", "0"))
    if context.records is None:
        return int(context.ours["steps"])
    of_an_epoch = math.floor(context.records / context.number("data.train_batch_size", "1024"))
    return int(of_an_epoch * context.number("trainer.total_epochs", "30"))


def scoring_model(text: str, context: NameContext) -> Meaning:
    used = any(context.is_on(f"{place}.enable") for place in ("reward_model", "reward.reward_model"))
    return Meaning({"reward_model": text} if used and not is_none(text) else {})


def training_steps(text: str, context: NameContext) -> Meaning:
    return Meaning({} if is_none(text) or text == "-1" else {"steps": text})


def total_epochs(text: str, context: NameContext) -> Meaning:
    given = context.theirs.get("trainer.total_training_steps", "null")
    if not (is_none(given) or given == "-1"):
        raise NoEffectError("total_training_steps is given, which counts")
    if context.records is None:
        raise DifferentError(
            "a run's length is --steps here: epochs x prompts / --batch_prompts, which `funrl import --records=N` "
            "computes"
        )
    return Meaning({"steps": str(max(total_steps(context), 1))}, f"{text} epochs over {context.records} records")


def as_actor(name: str, default: str) -> Convert:
    """A value of the critic that is the actor's here."""

    def convert(text: str, context: NameContext) -> Meaning:
        actor = context.theirs.get(f"{ACTOR}.{name}", default)
        if context.recipe not in ("ppo", "vapo") or is_same(text, actor) or is_none(text):
            return Meaning({})
        raise DifferentError(f"critic and policy have one value here, {actor} of the actor")

    return convert


def critic_model(text: str, context: NameContext) -> Meaning:
    """The model that a critic begins from."""
    policy = context.theirs.get(f"{MODEL}.path", text)
    if context.recipe in ("ppo", "vapo") and text != policy:
        raise DifferentError(f"the critic begins as the policy, {policy}")
    return Meaning({}, "the critic begins as the policy")


def of_critic(ours: str) -> Convert:
    """A flag of runs with a critic."""

    def convert(text: str, context: NameContext) -> Meaning:
        if context.recipe not in ("ppo", "vapo"):
            raise NoEffectError(f"{context.recipe} has no critic")
        return Meaning({ours: text})

    return convert


def decay(text: str, context: NameContext) -> Meaning:
    if is_same(text, "0"):
        return Meaning({"weight_decay": text})
    return Meaning({"weight_decay": text, "decay_all": "true"})


def of_argument(ours: str) -> Convert:
    """An argument that the estimator of another recipe does not read."""

    def convert(text: str, context: NameContext) -> Meaning:
        if ours not in context.arguments:
            raise NoEffectError(f"{context.recipe} does not read it, here and in verl")
        return Meaning({ours: text})

    return convert
