"""verl's advantage estimators and losses as recipes and their arguments, by what its trainers compute (0.9.1)."""

from __future__ import annotations

from collections.abc import Mapping

from funrl.flags.foreign.meaning import (
    Effect,
    Meaning,
    NameContext,
    NameRule,
    Template,
    among,
    becomes,
    different,
    first_of,
    negated,
    no_effect,
    recipe_is,
    same,
    takes,
    text_given,
    turned_on,
)
from funrl.flags.foreign.schedules import ACTOR, makes_several_updates
from funrl.flags.foreign.values import DifferentError, is_none, is_same

VERL_ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
CORRECTION = "algorithm.rollout_correction"
ESTIMATORS = {  # by adv_estimator
    **{name: name for name in ("grpo", "remax", "opo", "reinforce_plus_plus", "gpg", "gdpo")},
    **dict.fromkeys(("rloo", "rloo_vectorized"), "rloo"),
    "gae": "ppo",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "optimal_token_baseline": "otb",
}
LOSS_RECIPES = {  # by policy_loss.loss_mode
    **{name: name for name in ("gspo", "sapo", "cispo")},
    **dict.fromkeys(("dppo_tv", "dppo_kl"), "dppo"),
    "geo_mean": "gmpo",
}
RAW_ALONE = {"grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"}  # give a prompt's only row its raw reward
OTHER = {  # recipes that differ from verl's computation
    "gdpo": "verl takes the last deviation over tokens, here it is over rows",
    "gpg": "verl counts the rows whose reward is not 0, here those of groups with unequal rewards; its default loss is "
    "the clipped one",
    "gmpo": "verl's loss grows with the number of micro-batches",
    "opo": "verl takes the clipped loss, here it is the plain policy gradient",
}
REDUCTIONS = {  # verl's name -> reduction of a recipe's loss
    **dict.fromkeys(("rloo", "remax", "opo"), "seq-mean-token-sum"),
    **dict.fromkeys(("gspo", "sapo", "gmpo", "gdpo"), "seq-mean-token-mean"),
    "dr_grpo": "seq-mean-token-sum-norm",
}
REDUCED_OVER = {
    "token-mean": "all tokens",
    "seq-mean-token-mean": "each completion's tokens, then completions",
    "seq-mean-token-sum": "completions, of their tokens' sums",
}


def recipe_of(theirs: Mapping[str, str]) -> str:
    """The recipe of an advantage estimator and a policy loss. Raises: DifferentError."""
    estimator = theirs.get("algorithm.adv_estimator", "gae").lower()
    loss = theirs.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    undivided = theirs.get("algorithm.norm_adv_by_std_in_grpo", "true").lower() == "false"
    recipes = {(name, "vanilla"): recipe for name, recipe in ESTIMATORS.items()}
    recipes |= {("grpo", name): recipe for name, recipe in LOSS_RECIPES.items()}
    recipes |= {("grpo", "vanilla"): "dr_grpo" if undivided else "grpo", ("gpg", "gpg"): "gpg"}
    if (estimator, loss) not in recipes:
        raise DifferentError(f"adv_estimator={estimator} with loss_mode={loss}: `funrl --help` lists all recipes")
    return recipes[estimator, loss]


def _recipe(text: str, context: NameContext) -> str:
    return recipe_of(context.theirs)


def _is_only_completion(text: str, context: NameContext) -> bool:
    """True if prompts have one completion and verl's estimator treats it differently."""
    estimator = context.theirs.get("algorithm.adv_estimator", "grpo").lower()
    return estimator in RAW_ALONE and is_same(context.theirs.get(f"{VERL_ROLLOUT}.n", "2"), "1")


estimator_recipe = first_of(
    (recipe_is(*OTHER), different(lambda text, context: OTHER[context.recipe], experiment=_recipe)),
    (
        _is_only_completion,
        different("of a prompt's only completion verl's advantage is the reward, here it is 0", experiment=_recipe),
    ),
    (
        recipe_is(*LOSS_RECIPES.values()),
        negated(turned_on("algorithm.norm_adv_by_std_in_grpo", "true")),
        different("{recipe} divides by the deviation of the group", experiment=_recipe),
    ),
    (
        recipe_is("dr_grpo"),
        becomes("dr_grpo: no division by the deviation, nor by the length", experiment=_recipe),
    ),
    becomes(experiment=_recipe),
)


def sampler(text: str, context: NameContext) -> str:
    """The field with log-probabilities of the sampling policy."""
    return "rollout_logp" if context.is_on(f"{CORRECTION}.bypass_mode") else "old_logp"


loss_mode = first_of(
    (recipe_is("dppo"), becomes(kind=lambda text, context: text.removeprefix("dppo_"), sampled_by=sampler)),
    (recipe_is("gspo"), becomes("verl's gradient is that of GSPO-token", per_token="true")),
)


def _clip_side(side: str) -> Template:
    def text_of_side(text: str, context: NameContext) -> str:
        both = context.theirs.get(f"{ACTOR}.clip_ratio", "0.2")
        return context.theirs.get(f"{ACTOR}.clip_ratio_{side}", both)

    return text_of_side


clip = first_of(
    (recipe_is("dppo"), becomes(low=_clip_side("low"), high=_clip_side("high"))),
    (takes("clip_low"), becomes(clip_low=_clip_side("low"), clip_high=_clip_side("high"))),
    no_effect("{recipe} has no clip, here and in verl"),
)


def _gives_both_clips(text: str, context: NameContext) -> bool:
    return all(context.given(f"{ACTOR}.clip_ratio_{side}") for side in ("low", "high"))


clip_both = first_of(
    (_gives_both_clips, no_effect("verl reads clip_ratio_low and clip_ratio_high, each 0.2 if it is not given")), clip
)
dual_clip = first_of(
    (recipe_is("dppo"), same("cap")),
    (takes("dual_clip"), same("dual_clip")),
    (
        recipe_is(*LOSS_RECIPES.values(), "gpg", "opo"),
        no_effect("{recipe} bounds no ratio of a negative advantage, here and in verl"),
    ),
    (
        makes_several_updates,
        different(
            "verl bounds ratios of negative advantages at {text}, {recipe} does not; with one update a batch all "
            "ratios are 1"
        ),
    ),
    becomes("with one update a batch all ratios are 1"),
)
KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


_given_kind = text_given(f"{ACTOR}.kl_loss_type", "low_var_kl")


def _kl_kind(text: str, context: NameContext) -> str:
    """The estimator of the KL; "" if verl's has no equivalent."""
    kind = _given_kind(text, context)
    name = KL_ESTIMATORS.get(kind.rstrip("+"), "")
    return name + "+" * (kind.endswith("+") and bool(name))


_kl_coef = text_given(f"{ACTOR}.kl_loss_coef", "0.001")
_uses_kl_loss = turned_on(f"{ACTOR}.use_kl_loss")
kl_in_loss = first_of(
    (
        negated(_uses_kl_loss),
        takes("kl_coef"),
        negated(takes("kl_target")),
        becomes(kl_coef="0.0"),
    ),
    (negated(_uses_kl_loss), becomes()),
    (takes("kl_target"), different("{recipe} has no KL in the loss; grpo does")),
    (negated(takes("kl_coef")), different("{recipe} has no KL in the loss; grpo does")),
    (
        lambda text, context: not _kl_kind(text, context),
        different(
            lambda text, context: (
                f"kl_loss_type={_given_kind(text, context)}: --kl_kind has k1, k2, k3 and abs, and each with +"
            ),
            kl_coef=_kl_coef,
        ),
    ),
    (takes("kl_kind"), becomes("verl clamps k3 to +-10", kl_coef=_kl_coef, kl_kind=_kl_kind)),
    (
        lambda text, context: _kl_kind(text, context) != "k3",
        different("the KL of {recipe} is k3, which grpo's --kl_kind chooses", kl_coef=_kl_coef),
    ),
    becomes("verl clamps k3 to +-10", kl_coef=_kl_coef),
)


def _kl_control(text: str, context: NameContext) -> Meaning:
    """The coefficient of a KL in the reward, fixed or adaptive."""
    flags = {"kl_coef": context.theirs.get("algorithm.kl_ctrl.kl_coef", "0.001")}
    if context.theirs.get("algorithm.kl_ctrl.type", "fixed") == "adaptive":
        flags["kl_target"] = context.theirs.get("algorithm.kl_ctrl.target_kl", "0.1")
    if context.theirs.get("algorithm.kl_penalty", "kl") not in ("kl", "k1"):
        return Meaning(flags, "the KL in a reward is k1, verl's kl_penalty=kl", Effect.DIFFERENT)
    if not is_same(context.theirs.get("algorithm.kl_ctrl.horizon", "10000"), "10000"):
        return Meaning(flags, "an adaptive coefficient has a horizon of 10000 rows", Effect.DIFFERENT)
    return Meaning(flags, "an adaptive one counts nats a token")


_uses_kl_reward = turned_on("algorithm.use_kl_in_reward")
reward_kl = first_of(
    (takes("kl_target"), _uses_kl_reward, _kl_control),
    (takes("kl_target"), becomes(kl_coef="0.0")),
    (_uses_kl_reward, different("{recipe} has no KL in the reward; ppo, rloo and remax do")),
)


def _own_reduction(text: str, context: NameContext) -> str:
    return REDUCTIONS.get(context.recipe, "token-mean")


def _is_own_reduction(text: str, context: NameContext) -> bool:
    return text == _own_reduction(text, context)


def _adds_terms(text: str, context: NameContext) -> bool:
    """True if the loss has a KL or an entropy bonus."""
    entropy = context.theirs.get(f"{ACTOR}.entropy_coeff", "0")
    return _uses_kl_loss(text, context) or not is_same(entropy, "0")


_limit = text_given("data.max_response_length", "512")


def _divides_by_limit(text: str, context: NameContext) -> bool:
    return is_same(context.theirs.get(f"{ACTOR}.loss_scale_factor", "none"), _limit(text, context))


aggregation = first_of(
    (
        recipe_is("grpo"),
        among("token-mean"),
        becomes("verl takes it of each mini-batch, as here", per_sequence="false"),
    ),
    (
        recipe_is("grpo"),
        among("seq-mean-token-mean"),
        becomes("verl takes it of each mini-batch, as here", per_sequence="true"),
    ),
    (
        recipe_is("sapo"),
        negated(_is_own_reduction),
        negated(_adds_terms),
        no_effect("verl's sapo takes the mean of each completion whatever it is"),
    ),
    (recipe_is("dr_grpo"), _is_own_reduction, _divides_by_limit, becomes("dr_grpo divides by --max_new_tokens")),
    (
        recipe_is("dr_grpo"),
        _is_own_reduction,
        different(
            lambda text, context: (
                "verl divides by the width of the padded batch unless loss_scale_factor is given, "
                f"here by --max_new_tokens (loss_scale_factor={_limit(text, context)})"
            )
        ),
    ),
    (_is_own_reduction, becomes()),
    different(
        lambda text, context: (
            f"verl's mean is over {REDUCED_OVER.get(text, text)}; {context.recipe} takes "
            f"{_own_reduction(text, context)}: the size of a gradient and the weight of long completions differ"
        )
    ),
)


def _uses_correction(text: str, context: NameContext) -> bool:
    """True if verl corrects the loss for the gap between engine and trainer."""
    weighs = any(context.given(f"{CORRECTION}.{name}") for name in ("rollout_is", "rollout_rs"))
    return weighs or (context.recipe != "dppo" and context.is_on(f"{CORRECTION}.bypass_mode"))


rollout_correction = first_of(
    (
        _uses_correction,
        different(
            "it changes the loss: a correction for the gap between engine and trainer is `corrected` with "
            "`importance_weights()` or `reject_ratio()` in a FILE.py, docs/algorithms.md"
        ),
    ),
    (turned_on(f"{CORRECTION}.bypass_mode"), becomes(sampled_by=sampler)),
)


def recipe_argument(ours: str) -> NameRule:
    """An argument that the estimator of another recipe does not read."""
    return first_of((takes(ours), same(ours)), no_effect("{recipe} does not read it, here and in verl"))


def critic_argument(ours: str) -> NameRule:
    """A flag of runs with a critic."""
    return first_of((recipe_is("ppo", "vapo"), same(ours)), no_effect("{recipe} has no critic"))


def _actor_value(name: str, default: str, context: NameContext) -> str:
    return context.theirs.get(f"{ACTOR}.{name}", default)


def as_actor(name: str, default: str) -> NameRule:
    """A value of the critic that is shared with the actor here."""

    def is_other(text: str, context: NameContext) -> bool:
        actor = _actor_value(name, default, context)
        return context.recipe in ("ppo", "vapo") and not (is_same(text, actor) or is_none(text))

    def reason(text: str, context: NameContext) -> str:
        return f"critic and policy share one value here, the actor's {_actor_value(name, default, context)}"

    return first_of((is_other, different(reason)))


def _policy_path(text: str, context: NameContext) -> str:
    return context.theirs.get(f"{MODEL}.path", text)


critic_model = first_of(
    (
        recipe_is("ppo", "vapo"),
        lambda text, context: text != _policy_path(text, context),
        different(lambda text, context: f"the critic begins as the policy, {_policy_path(text, context)}"),
    ),
    becomes("the critic begins as the policy"),
)
