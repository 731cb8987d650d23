"""Arguments of TRL 1.16 that determine a loss: which recipe it is, and which of its arguments.

`preferences` has those of preference losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from funrl.flags.foreign.meaning import (
    Meaning,
    NameContext,
    NameRule,
    among,
    argument,
    becomes,
    different,
    equal,
    first_of,
    is_on,
    is_unset,
    negated,
    no_effect,
    optional,
    recipe_is,
    same,
    takes,
)
from funrl.flags.foreign.preferences import CONTRASTS, contrast_loss, pair_loss, unpaired_loss
from funrl.flags.foreign.sizes import accumulates, micro_batch_count, trl_batch, updates_of_a_pass
from funrl.flags.foreign.values import DifferentError, is_none, is_same, is_true, number_text
from funrl.trainer.settings.declaration import NONE

GROUPED = ("grpo", "dr_grpo", "gspo", "cispo", "sapo")  # recipes for GRPOTrainer's losses
OWN_BETA = ("dpo", "kto", *CONTRASTS, "gkd", "online_dpo")  # recipes whose beta is TRL's beta


def recipe_of_trainer(trainer: str, theirs: Mapping[str, str]) -> str:
    """The recipe of a trainer's configuration, by its loss."""
    loss = theirs.get("loss_type", "").strip("[]'\" ")
    if trainer == "grpo" and theirs.get("importance_sampling_level") == "sequence":
        return "gspo"
    if trainer == "grpo":
        return loss if loss in GROUPED else "grpo"
    if trainer == "cpo" and loss in ("simpo", "alphapo"):
        return "simpo" if is_same(theirs.get("alpha", "0"), "0") else "alphapo"
    return trainer


# ---- rewards of groups: GRPO, RLOO

_LOSS_IS_RECIPE = different(
    "a loss is part of the algorithm here: TRL's grpo is `funrl grpo`, its dapo and bnpo `funrl grpo --noper_sequence` "
    "(a mean over all tokens), dr_grpo, cispo and sapo `funrl NAME`; this is {recipe}"
)


def _makes_updates(text: str, context: NameContext) -> bool:
    """True if a pass makes several optimizer steps."""
    return updates_of_a_pass(context) > 1


def _denominators(text: str, context: NameContext) -> str:
    return (
        f"TRL's {text} divides each of {updates_of_a_pass(context)} mini-batches by their mean number of tokens, "
        "here each is divided by its own"
    )


_GROUPED_LOSS = first_of(
    (among("grpo"), becomes(per_sequence="true")),
    (among("dapo"), _makes_updates, different(_denominators, per_sequence="false")),
    (
        among("bnpo"),
        accumulates,
        different(
            "TRL's bnpo is a mean of the means of micro-batches, here a mean over all tokens", per_sequence="false"
        ),
    ),
    (among("dapo", "bnpo"), becomes(per_sequence="false")),
    _LOSS_IS_RECIPE,
)
_SEQUENCE_LOSS = first_of(
    (negated(among("grpo")), different("gspo takes the mean of each completion, TRL's loss_type=grpo, not {text}"))
)


def _is_in_loss(text: str, context: NameContext) -> bool:
    """True if the KL is in the loss, without a ratio as weight."""
    return is_same(text, "0") or not context.is_on("use_bias_correction_kl", "true")


# The beta of a preference loss, else the factor of a KL to the reference.
beta = first_of(
    (
        recipe_is("orpo"),
        different("TRL's likelihood is of the prompt too, here of the completion alone", beta="{text}"),
    ),
    (recipe_is(*OWN_BETA), same("beta")),
    (negated(takes("kl_coef")), equal("0"), becomes()),
    (negated(takes("kl_coef")), different("{recipe} has no KL to a reference, so no --kl_coef")),
    (
        recipe_is("rloo", "ppo"),
        same("kl_coef", difference="the KL is subtracted from the reward, with estimator k1, as in TRL"),
    ),
    (_is_in_loss, same("kl_coef", difference="the KL is in the loss, with estimator k3, as in TRL")),
    (
        takes("kl_bias_corrected"),
        becomes("k3 in the loss, times the ratio, as TRL's", kl_coef="{text}", kl_bias_corrected="true"),
    ),
    different(
        "TRL weighs the KL by the ratio of its loss (use_bias_correction_kl), {recipe} does not", kl_coef="{text}"
    ),
)


# TRL's switch that weights the KL by the ratio.
kl_correction = first_of(
    (
        lambda text, context: is_same(context.theirs.get("beta", "0"), "0"),
        no_effect("there is no KL with beta=0"),
    ),
    lambda text, context: beta(context.theirs["beta"], context),
)


def _cispo_clip(text: str, context: NameContext) -> Meaning:
    """TRL's cispo has only the upper bound, given as a ratio."""
    name = "epsilon_high" if context.given("epsilon_high") else "epsilon"
    bound = context.number(name, text)
    if bound < 1:
        high = context.theirs.get(name, text)
        raise DifferentError(f"TRL's cispo then bounds every ratio by {high}, below 1; --clip_high begins at 1")
    return Meaning({"clip_low": NONE, "clip_high": number_text(bound - 1)}, "TRL's bound is the ratio itself")


def _clips(text: str, context: NameContext) -> Meaning:
    names = ("clip_low",) if context.given("epsilon_high") else ("clip_low", "clip_high")
    return Meaning(dict.fromkeys(names, context.theirs.get("epsilon", text)))


epsilon = first_of(
    (recipe_is("sapo"), no_effect("sapo has a gate and no clip")),
    (recipe_is("cispo"), _cispo_clip),
    (negated(takes("clip_low")), different("{recipe} has no clip")),
    _clips,
)
epsilon_high = optional(first_of((recipe_is("cispo", "sapo"), epsilon), argument("clip_high", "it has no clip")))


def _highest_ratio(context: NameContext) -> Fraction:
    return 1 + context.number("epsilon_high" if context.given("epsilon_high") else "epsilon", "0.2")


# The bound of an unclipped ratio; above 1 + epsilon_high it affects only negative advantages.
delta = first_of(
    (is_unset, takes("dual_clip"), becomes(dual_clip=NONE)),
    (is_unset, becomes()),
    (recipe_is("cispo", "sapo"), no_effect("TRL's {recipe} does not read it")),
    (
        negated(takes("dual_clip")),
        different("{recipe} has no --dual_clip: ratios of negative advantages are not bounded"),
    ),
    (
        lambda text, context: context.number("delta", text) <= _highest_ratio(context),
        different(
            lambda _, context: (
                f"a bound up to 1 + epsilon_high = {number_text(_highest_ratio(context))} would bound all ratios"
            )
        ),
    ),
    same("dual_clip", difference="the same for a bound above 1 + epsilon_high"),
)
scale_rewards = first_of(
    (
        equal("group", "true"),
        recipe_is("grpo", "dapo", "gspo", "cispo", "sapo"),
        first_of((takes("std_eps"), becomes(std_eps="1e-4")), becomes("TRL adds 1e-4 to the deviation of a group")),
    ),
    (equal("none", "false"), recipe_is("dr_grpo"), becomes()),
    different(
        "the scale of an advantage is part of the algorithm: grpo divides by the deviation of the group, dr_grpo by "
        "nothing, gdpo by the batch's; this is {recipe}"
    ),
)
ratio_level = first_of(
    (lambda text, context: (text == "token") == (context.recipe != "gspo"), becomes()),
    different("ratios of tokens are grpo's, those of sequences gspo's: `funrl gspo`"),
)


def _is_mean_of_means(text: str, context: NameContext) -> bool:
    """True if TRL reduces the bonus by another mean than the loss."""
    over_tokens = context.theirs.get("loss_type", "dapo") in ("dapo", "bnpo", "cispo")
    return not over_tokens or micro_batch_count(context) > 1


# TRL takes the bonus as a mean over the tokens of a micro-batch, whatever the loss.
entropy_coef = first_of(
    (equal("0"), first_of((takes("entropy_coef"), same("entropy_coef")))),
    (
        _is_mean_of_means,
        different(
            "TRL's bonus is the mean of the means over tokens of each micro-batch, here it is reduced as the loss is",
            entropy_coef="{text}",
        ),
    ),
    same("entropy_coef"),
)


def sapo_temperature(ours: str) -> NameRule:
    """A temperature of SAPO's gate."""
    return first_of((recipe_is("sapo"), same(ours)), no_effect("only the loss sapo reads it"))


normalize_advantages = first_of(
    (
        recipe_is("rloo"),
        becomes(
            "one ratio a completion",
            normalize=lambda text, context: str(is_true(text)).lower(),
            per_sequence="true",
        ),
    ),
    different("{recipe} has no --normalize; rloo has"),
)


# ---- given texts, distillation

_LIKELIHOOD = first_of(
    (among("dft"), becomes(dynamic="true")),
    (among("nll", "chunked_nll"), becomes()),
    different("{text} is not one of nll, dft"),
)
completion_only = first_of(
    (is_unset, becomes("of records with a prompt and a completion the completion is learned, in TRL too")),
    (is_on, becomes()),
    different("the tokens of a prompt are not learned here"),
)
# TRL's packing makes rows of several texts, so that its batches count such rows.
packed_texts = first_of(
    (
        lambda text, context: is_none(text) or not is_true(text),
        becomes("rows are packed end to end to --token_budget, which changes no number"),
    ),
    (
        lambda text, context: "per_device_train_batch_size" in context.theirs,
        different("TRL's batches then count rows of several texts; --batch_prompts counts texts"),
    ),
    becomes("rows are always packed end to end, and do not see one another; leave it out"),
)
_OWN_SAMPLES = {
    "batch_prompts": lambda text, context: trl_batch(context)["batch_prompts"],
    "samples_per_prompt": "1",
    "minibatches": "1",
}
# The share of the student's own samples in GKD.
lmbda = first_of(
    (
        negated(equal("1")),
        different("gkd learns from its own samples alone, which is lmbda=1, not {text}", **_OWN_SAMPLES),
    ),
    different(
        "TRL divides by the tokens of the data's completions, here by those that the student sampled", **_OWN_SAMPLES
    ),
)
gkd_temperature = first_of(
    (
        recipe_is("gkd"),
        negated(equal("1")),
        different("TRL samples at it and takes the divergence at 1, here both are one", temperature="{text}"),
    ),
    same("temperature"),
)
loss_type = first_of(
    (recipe_is("dpo"), pair_loss),
    (recipe_is("sft"), _LIKELIHOOD),
    (recipe_is("kto"), unpaired_loss),
    (recipe_is(*CONTRASTS), contrast_loss),
    (recipe_is("grpo"), _GROUPED_LOSS),
    (recipe_is("gspo"), _SEQUENCE_LOSS),
    (lambda text, context: text != context.recipe, _LOSS_IS_RECIPE),
    (among("cispo"), _makes_updates, different(_denominators)),
)
