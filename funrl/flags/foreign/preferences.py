"""Arguments of TRL 1.16 that determine a preference loss: DPO, KTO, CPO."""

from __future__ import annotations

from fractions import Fraction

from funrl.flags.foreign.meaning import (
    Effect,
    Meaning,
    NameContext,
    NameRule,
    Template,
    Test,
    among,
    argument,
    becomes,
    different,
    equal,
    first_of,
    is_on,
    negated,
    no_effect,
    optional,
    recipe_is,
    same,
    takes,
    text_of,
)
from funrl.flags.foreign.sizes import accumulates, micro_batch_count
from funrl.flags.foreign.values import DifferentError, is_same, items, number_text
from funrl.trainer.settings.declaration import NONE

CONTRASTS = ("cpo", "simpo", "alphapo")  # recipes of CPOTrainer
PAIR_LOSSES = {
    "sigmoid": "sigmoid",
    "hinge": "hinge",
    "ipo": "ipo",
    "exo_pair": "exo",
    "nca_pair": "nca",
    "robust": "robust",
    "bco_pair": "bco",
    "sppo_hard": "sppo",
    "aot": "aot",
    "aot_unpaired": "aot_unpaired",
    "apo_zero": "apo_zero",
    "apo_down": "apo_down",
    "discopop": "discopop",
    "sigmoid_norm": "sigmoid",
}
LENGTH_NORMALISED = {"ipo", "sigmoid_norm"}  # divide a completion's log-ratio by its length
ORDERED = {"aot", "aot_unpaired"}  # sort the pairs of a micro-batch
SMOOTHED = {"exo_pair", "robust", *ORDERED}  # read label_smoothing
PLAIN_RATIOS = {"nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", *ORDERED, "sft"}  # read no f-divergence


def _pair_losses(text: str) -> set[str]:
    """TRL's losses of pairs in a sum, without its likelihood."""
    return set(items(text)) - {"sft"}


def _loss_types(context: NameContext) -> set[str]:
    return set(items(context.theirs.get("loss_type", "sigmoid")))


def _has(name: str) -> Test:
    """Test: the value of another name is not 0."""
    return lambda text, context: not is_same(context.theirs.get(name, "0"), "0")


def _pair_weights(text: str, context: NameContext) -> dict[str, Fraction]:
    """Weights of DPO's losses by TRL's names."""
    names = items(text)
    weights = items(context.theirs.get("loss_weights", "")) if context.given("loss_weights") else ["1"] * len(names)
    if len(weights) != len(names) or len(set(names)) < len(names):
        raise DifferentError(f"loss_weights={','.join(weights)}: a number for each of {', '.join(names)} is needed")
    if unknown := [name for name in names if name not in PAIR_LOSSES and name != "sft"]:
        raise DifferentError(f"{unknown[0]} is not one of {', '.join([*PAIR_LOSSES, 'sft'])}")
    try:
        return {name: Fraction(weight) for name, weight in zip(names, weights, strict=True)}
    except ValueError:
        raise DifferentError(f"loss_weights={','.join(weights)}: numbers are needed") from None


# Reasons why a sum of TRL's losses cannot be one of `dpo`, each with its test.
_PAIR_PROBLEMS: tuple[tuple[Test, Template], ...] = (
    (
        lambda text, context: bool(_pair_losses(text) & LENGTH_NORMALISED and _pair_losses(text) - LENGTH_NORMALISED),
        "per_token is for all losses of a sum: ipo and sigmoid_norm go with no other",
    ),
    (
        lambda text, context: {"sigmoid", "sigmoid_norm"} <= _pair_losses(text),
        "sigmoid and sigmoid_norm are one loss here, with and without per_token",
    ),
    (
        lambda text, context: bool(_pair_weights(text, context).get("sft")) and accumulates(text, context),
        "TRL's sft is a mean of the means over tokens of micro-batches, here the mean over all tokens of a step",
    ),
    (
        lambda text, context: bool(_pair_losses(text) & ORDERED) and accumulates(text, context),
        lambda text, context: (
            f"TRL sorts the pairs of each of {micro_batch_count(context)} micro-batches; here those of one "
            "micro-batch of --token_budget are sorted"
        ),
    ),
    (
        lambda text, context: (
            context.is_on("use_weighting")
            and bool(_pair_weights(text, context).get("sft") or _pair_losses(text) & ORDERED)
        ),
        "use_weighting weighs aot and sft too, on_policy does not",
    ),
    (
        lambda text, context: bool(_pair_losses(text) & ORDERED) and context.given("ld_alpha"),
        "aot takes no length_alpha here",
    ),
    (
        lambda text, context: "exo_pair" in items(text) and not _has("label_smoothing")(text, context),
        "exo_pair needs a label_smoothing above 0, in TRL too",
    ),
    (
        lambda text, context: (
            "sigmoid" in items(text) and bool(_pair_losses(text) & SMOOTHED) and _has("label_smoothing")(text, context)
        ),
        "TRL's sigmoid reads no label_smoothing, here it would be smoothed with the others",
    ),
)


def pair_loss(text: str, context: NameContext) -> Meaning:
    """Meaning of a `loss_type`: the losses of pairs with their weights.

    Raises:
      DifferentError: a weight is below 0, or no loss has one.
    """
    weights = _pair_weights(text, context)
    likelihood = weights.pop("sft", Fraction(0))
    if not weights or min([*weights.values(), likelihood]) < 0:
        raise DifferentError(f"loss_type={text}: a loss of pairs with a weight of at least 0 is needed")
    parts = [PAIR_LOSSES[name] if w == 1 else f"{_decimal(w)}*{PAIR_LOSSES[name]}" for name, w in weights.items()]
    ours = {"loss": "+".join(parts)}
    if set(weights) & LENGTH_NORMALISED:
        ours["per_token"] = "true"
    if likelihood:
        ours["likelihood_coef"] = number_text(likelihood)
    if set(weights) & {"robust", *ORDERED}:
        ours["smoothing"] = context.theirs.get("label_smoothing", "0.0")
    for test, reason in _PAIR_PROBLEMS:
        if test(text, context):
            return Meaning(ours, text_of(reason, text, context), Effect.DIFFERENT)
    return Meaning(ours, "of the pairs of a step, where --token_budget holds them" if set(weights) & ORDERED else "")


def _decimal(weight: Fraction) -> str:
    text = f"{float(weight):.12f}".rstrip("0")
    return f"{text}0" if text.endswith(".") else text


loss_weights = optional(lambda text, context: pair_loss(context.theirs.get("loss_type", "sigmoid"), context))
# The probability of a wrong label, which TRL's DPO reads in four of its losses.
label_smoothing = first_of(
    (recipe_is(*CONTRASTS), equal("0"), becomes()),
    (recipe_is(*CONTRASTS), different("{recipe} has no --smoothing")),
    (
        takes("smoothing"),
        lambda text, context: not _loss_types(context) & SMOOTHED,
        no_effect(f"TRL reads it in {', '.join(sorted(SMOOTHED))} alone"),
    ),
    argument("smoothing", "its labels are taken as they are"),
)


DIVERGENCES = {
    "reverse_kl": "reverse_kl",
    "forward_kl": "forward_kl",
    "js_divergence": "js",
    "alpha_divergence": "alpha",
}


def f_divergence(text: str, context: NameContext) -> Meaning:
    """The f-divergence of a preference loss, with the coefficient of the alpha divergence."""
    if "divergence" not in context.arguments:
        raise DifferentError(f"{context.recipe} has no --divergence")
    if text not in DIVERGENCES:
        raise DifferentError(f"{text} is not one of {', '.join(DIVERGENCES)}")
    ours = {"divergence": DIVERGENCES[text]}
    if text == "alpha_divergence":
        coefficient = context.number("f_alpha_divergence_coef", "0.5")
        if coefficient == 1:
            return Meaning({"divergence": "reverse_kl"}, "which a coefficient of 1 is")
        if not 0 < coefficient < 1:
            raise DifferentError(f"f_alpha_divergence_coef={number_text(coefficient)}: 1 - it must be from 0 to 1 here")
        ours["divergence_alpha"] = number_text(1 - coefficient)
    losses = set() if text == "reverse_kl" else _loss_types(context)
    names = ", ".join(sorted(losses & PLAIN_RATIOS))
    if losses and losses <= PLAIN_RATIOS:
        return Meaning({}, f"TRL's {names} take log-ratios whatever it is", Effect.NO_EFFECT)
    if names:
        return Meaning(ours, f"TRL's {names} would not read it, here all do", Effect.DIFFERENT)
    if losses & LENGTH_NORMALISED:
        reason = "TRL divides f' of the sum by the length, here f' is of the mean log-ratio"
        return Meaning(ours, reason, Effect.DIFFERENT)
    return Meaning(ours)


alpha_coefficient = first_of(
    (negated(takes("divergence")), different("{recipe} has no --divergence_alpha: it has none")),
    (
        lambda text, context: context.theirs.get("f_divergence_type", "reverse_kl") != "alpha_divergence",
        no_effect("only f_divergence_type=alpha_divergence reads it"),
    ),
    lambda text, context: f_divergence("alpha_divergence", context),
)
use_weighting = first_of(
    (negated(is_on), becomes()),
    (takes("on_policy"), becomes("TRL's weights have no bound", on_policy="true", weight_bound=NONE)),
    different("{recipe} has no --on_policy"),
)
length_alpha = optional(argument("length_alpha", "it has none"))  # LD-DPO's factor of the longer completion's end
unpaired_loss = first_of(
    (
        among("kto"),
        accumulates,
        different("TRL takes the reference point of every micro-batch, here it is that of the step", loss="kto"),
    ),
    (among("kto"), same("loss")),
    (among("apo_zero_unpaired"), becomes(loss="apo_zero")),
    different("{text} is not one of kto, apo_zero_unpaired"),
)
contrast_loss = first_of(
    (among("hinge", "ipo"), different("cpo has no {text}; its loss is TRL's sigmoid")),
    (
        recipe_is("cpo"),
        _has("alpha"),
        different("alpha bends the rewards of alphapo alone (loss_type=alphapo)"),
    ),
)
# The factor of CPO's likelihood.
cpo_alpha = first_of(
    (recipe_is("simpo", "alphapo"), equal("0"), becomes()),
    (
        recipe_is("simpo", "alphapo"),
        lambda text, context: context.theirs.get("loss_type") != "alphapo",
        different("{recipe} has no likelihood beside its contrast (cpo_alpha=0)"),
    ),
    (recipe_is("simpo", "alphapo"), becomes()),
    (negated(takes("likelihood_coef")), different("{recipe} has no --likelihood_coef")),
    (
        negated(equal("0")),
        accumulates,
        different(
            "TRL's likelihood is a mean of the means over tokens of micro-batches, here the mean over all of a step",
            likelihood_coef="{text}",
        ),
    ),
    same("likelihood_coef"),
)


def of_recipes(ours: str, *recipes: str) -> NameRule:
    """An argument that TRL reads with some losses, which are these recipes."""
    reason = f"TRL reads it with {' and '.join(recipes)} alone"
    return first_of((recipe_is(*recipes), takes(ours), same(ours)), no_effect(reason))
