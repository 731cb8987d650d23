"""Arguments of TRL 1.16 that decide a loss, by what its trainers compute: which recipe, and which of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction

from funrl.flags.foreign.names_trl_batch import batch, micro_batch_count, updates_of_a_pass
from funrl.flags.foreign.renaming import (
    DifferentError,
    Meaning,
    NameContext,
    NoEffectError,
    is_none,
    is_same,
    is_true,
    items,
    number_text,
)
from funrl.trainer.settings.declaration import NONE

GROUPED = ("grpo", "dr_grpo", "gspo", "cispo", "sapo")  # the recipes that GRPOTrainer's losses are
OWN_BETA = ("dpo", "kto", "cpo", "simpo", "alphapo", "gkd", "online_dpo")  # whose beta is TRL's beta
PAIR_LOSSES = {
    "sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo", "exo_pair": "exo", "nca_pair": "nca", "robust": "robust",
    "bco_pair": "bco", "sppo_hard": "sppo", "aot": "aot", "aot_unpaired": "aot_unpaired", "apo_zero": "apo_zero",
    "apo_down": "apo_down", "discopop": "discopop", "sigmoid_norm": "sigmoid",
}  # fmt: skip
LENGTH_NORMALISED = {"ipo", "sigmoid_norm"}  # divide a completion's log-ratio by its length
ORDERED = {"aot", "aot_unpaired"}  # compare the pairs of a micro-batch in their order
SMOOTHED = {"exo_pair", "robust", *ORDERED}  # read label_smoothing
PLAIN_RATIOS = {"nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", *ORDERED, "sft"}  # read no f-divergence


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


def loss_type(text: str, context: NameContext) -> Meaning:
    """The loss of the trainer whose recipe this is."""
    of_recipe: dict[str, Callable[[str, NameContext], Meaning]] = {
        "dpo": _pair_loss, "sft": _likelihood, "kto": _unpaired_loss, "cpo": _contrast, "simpo": _contrast,
        "alphapo": _contrast, "grpo": _grouped_loss, "gspo": _grouped_loss,
    }  # fmt: skip
    if context.recipe in of_recipe:
        return of_recipe[context.recipe](text, context)
    if text != context.recipe:
        raise DifferentError(_LOSS_IS_RECIPE.format(context.recipe))
    if text == "cispo":
        _same_tokens(context, text)
    return Meaning({})


_LOSS_IS_RECIPE = (
    "a loss is part of the algorithm here: TRL's grpo is `funrl grpo`, its dapo and bnpo `funrl grpo --noper_sequence` "
    "(a mean over all tokens), dr_grpo, cispo and sapo `funrl NAME`; this is {}"
)


def _grouped_loss(text: str, context: NameContext) -> Meaning:
    if context.recipe == "gspo":
        if text != "grpo":
            raise DifferentError(f"gspo takes the mean of each completion, TRL's loss_type=grpo, not {text}")
        return Meaning({})
    if text not in ("grpo", "dapo", "bnpo"):
        raise DifferentError(_LOSS_IS_RECIPE.format(context.recipe))
    flags = {"per_sequence": str(text == "grpo").lower()}
    if text == "dapo":
        _same_tokens(context, text, flags)
    if text == "bnpo" and micro_batch_count(context) > 1:
        raise DifferentError("TRL's bnpo is a mean of the means of micro-batches, here a mean over all tokens", flags)
    return Meaning(flags)


def _same_tokens(context: NameContext, text: str, nearest: Mapping[str, str] | None = None) -> None:
    """Refuse a mean over tokens where TRL's denominator is not that of the mini-batch."""
    if updates_of_a_pass(context) > 1:
        raise DifferentError(
            f"TRL's {text} divides each of {updates_of_a_pass(context)} mini-batches by their mean number of tokens, "
            "here each is divided by its own",
            nearest,
        )


def beta(text: str, context: NameContext) -> Meaning:
    """TRL's beta: of a preference loss its own, else the factor of a KL to the reference."""
    if context.recipe == "orpo":
        raise DifferentError("TRL's likelihood is of the prompt too, here of the completion alone", {"beta": text})
    if context.recipe in OWN_BETA:
        return Meaning({"beta": text})
    if "kl_coef" not in context.arguments:
        if is_same(text, "0"):
            return Meaning({})
        raise DifferentError(f"{context.recipe} has no KL to a reference, so no --kl_coef")
    if context.recipe in ("rloo", "ppo"):
        return Meaning({"kl_coef": text}, "the KL is taken off the reward, with k1 as estimator, as TRL's")
    if is_same(text, "0") or not context.is_on("use_bias_correction_kl", "true"):
        return Meaning({"kl_coef": text}, "the KL is in the loss, with k3 as estimator, as TRL's")
    if "kl_bias_corrected" not in context.arguments:
        raise DifferentError(
            f"TRL weighs the KL by the ratio of its loss (use_bias_correction_kl), {context.recipe} does not",
            {"kl_coef": text},
        )
    return Meaning({"kl_coef": text, "kl_bias_corrected": "true"}, "k3 in the loss, times the ratio, as TRL's")


def kl_correction(text: str, context: NameContext) -> Meaning:
    """The weight of TRL's KL by the ratio, on or off."""
    if is_same(context.theirs.get("beta", "0"), "0"):
        raise NoEffectError("there is no KL with beta=0")
    return beta(context.theirs["beta"], context)


def epsilon(text: str, context: NameContext) -> Meaning:
    """The clips of a ratio; in cispo only the upper bound, which is the ratio itself."""
    if context.recipe == "sapo":
        raise NoEffectError("sapo has a gate and no clip")
    if context.recipe == "cispo":
        high = context.theirs["epsilon_high"] if context.given("epsilon_high") else context.theirs.get("epsilon", text)
        bound = context.number("epsilon_high" if context.given("epsilon_high") else "epsilon", high)
        if bound < 1:
            raise DifferentError(f"TRL's cispo then bounds every ratio by {high}, below 1; --clip_high begins at 1")
        return Meaning({"clip_low": NONE, "clip_high": number_text(bound - 1)}, "TRL's bound is the ratio itself")
    if "clip_low" not in context.arguments:
        raise DifferentError(f"{context.recipe} has no clip")
    low = context.theirs.get("epsilon", text)
    return Meaning({"clip_low": low} | ({} if context.given("epsilon_high") else {"clip_high": low}))


def epsilon_high(text: str, context: NameContext) -> Meaning:
    """The upper clip where it is another than the lower one."""
    if is_none(text):
        return Meaning({})
    if context.recipe in ("cispo", "sapo"):
        return epsilon(text, context)
    if "clip_high" not in context.arguments:
        raise DifferentError(f"{context.recipe} has no --clip_high: it has no clip")
    return Meaning({"clip_high": text})


def delta(text: str, context: NameContext) -> Meaning:
    """The bound of an unclipped ratio, which acts on negative advantages alone if it is above 1 + epsilon_high."""
    if is_none(text):
        return Meaning({"dual_clip": NONE} if "dual_clip" in context.arguments else {})
    if context.recipe in ("cispo", "sapo"):
        raise NoEffectError(f"TRL's {context.recipe} does not read it")
    if "dual_clip" not in context.arguments:
        raise DifferentError(f"{context.recipe} has no --dual_clip: ratios of negative advantages are not bounded")
    high = context.number("epsilon_high" if context.given("epsilon_high") else "epsilon", "0.2")
    if context.number("delta", text) <= 1 + high:
        raise DifferentError(f"a bound up to 1 + epsilon_high = {number_text(1 + high)} would bound all ratios")
    return Meaning({"dual_clip": text}, "the same for a bound above 1 + epsilon_high")


def scale_rewards(text: str, context: NameContext) -> Meaning:
    """The scale of an advantage."""
    if text.lower() in ("group", "true") and context.recipe in ("grpo", "dapo", "gspo", "cispo", "sapo"):
        if "std_eps" not in context.arguments:
            return Meaning({}, "TRL adds 1e-4 to the deviation of a group")
        return Meaning({"std_eps": "1e-4"})
    if text.lower() in ("none", "false") and context.recipe == "dr_grpo":
        return Meaning({})
    raise DifferentError(
        f"the scale of an advantage is part of the algorithm: grpo divides by the deviation of the group, dr_grpo by "
        f"nothing, gdpo by the batch's; this is {context.recipe}"
    )


def ratio_level(text: str, context: NameContext) -> Meaning:
    """Ratios of tokens or of sequences."""
    if (text == "token") == (context.recipe != "gspo"):
        return Meaning({})
    raise DifferentError("ratios of tokens are grpo's, those of sequences gspo's: `funrl gspo`")


def entropy_coef(text: str, context: NameContext) -> Meaning:
    """The entropy bonus, which TRL takes as a mean over the tokens of a micro-batch, whatever the loss."""
    if is_same(text, "0"):
        return Meaning({"entropy_coef": text} if "entropy_coef" in context.arguments else {})
    over_tokens = context.theirs.get("loss_type", "dapo") in ("dapo", "bnpo", "cispo")
    if not over_tokens or micro_batch_count(context) > 1:
        raise DifferentError(
            "TRL's bonus is the mean of the means over tokens of each micro-batch, here it is reduced as the loss is",
            {"entropy_coef": text},
        )
    return Meaning({"entropy_coef": text})


def sapo_temperature(ours: str) -> Callable[[str, NameContext], Meaning]:
    """A temperature of SAPO's gate."""

    def convert(text: str, context: NameContext) -> Meaning:
        if context.recipe != "sapo":
            raise NoEffectError("only the loss sapo reads it")
        return Meaning({ours: text})

    return convert


def normalize_advantages(text: str, context: NameContext) -> Meaning:
    """RLOO's scale; its ratio is of a whole completion."""
    if context.recipe != "rloo":
        raise DifferentError(f"{context.recipe} has no --normalize; rloo has")
    return Meaning({"normalize": str(is_true(text)).lower(), "per_sequence": "true"}, "one ratio a completion")


# ---- preferences


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


def _pair_loss(text: str, context: NameContext) -> Meaning:
    weights = _pair_weights(text, context)
    likelihood = weights.pop("sft", Fraction(0))
    if not weights or min([*weights.values(), likelihood]) < 0:
        raise DifferentError(f"loss_type={text}: a loss of pairs with a weight of at least 0 is needed")
    parts = [PAIR_LOSSES[name] if w == 1 else f"{_decimal(w)}*{PAIR_LOSSES[name]}" for name, w in weights.items()]
    flags = {"loss": "+".join(parts)}
    if set(weights) & LENGTH_NORMALISED:
        flags["per_token"] = "true"
    if likelihood:
        flags["likelihood_coef"] = number_text(likelihood)
    if "robust" in weights or set(weights) & ORDERED:
        flags["smoothing"] = context.theirs.get("label_smoothing", "0.0")
    if problem := _pair_problem(context, weights, likelihood):
        raise DifferentError(problem, flags)
    if set(weights) & ORDERED:
        return Meaning(flags, "of the pairs of a step, where --token_budget holds them")
    return Meaning(flags)


def _pair_problem(context: NameContext, weights: Mapping[str, Fraction], likelihood: Fraction) -> str:
    """The first reason why a sum of TRL's losses is none of `dpo`'s; "" if it is one."""
    names = set(weights)
    if names & LENGTH_NORMALISED and names - LENGTH_NORMALISED:
        return "per_token is for all losses of a sum: ipo and sigmoid_norm go with no other"
    if {"sigmoid", "sigmoid_norm"} <= names:
        return "sigmoid and sigmoid_norm are one loss here, with and without per_token"
    if likelihood and micro_batch_count(context) > 1:
        return "TRL's sft is a mean of the means over tokens of micro-batches, here the mean over all tokens of a step"
    if names & ORDERED and micro_batch_count(context) > 1:
        count = micro_batch_count(context)
        return f"TRL orders the pairs of each of {count} micro-batches, here those of one of --token_budget"
    if context.is_on("use_weighting") and (likelihood or names & ORDERED):
        return "use_weighting weighs aot and sft too, on_policy does not"
    if names & ORDERED and context.given("ld_alpha"):
        return "aot takes no length_alpha here"
    if "exo_pair" in names and is_same(context.theirs.get("label_smoothing", "0.0"), "0"):
        return "exo_pair needs a label_smoothing above 0, in TRL too"
    if "sigmoid" in names and names & SMOOTHED and not is_same(context.theirs.get("label_smoothing", "0"), "0"):
        return "TRL's sigmoid reads no label_smoothing, here it would be smoothed with the others"
    return ""


def _decimal(weight: Fraction) -> str:
    text = f"{float(weight):.12f}".rstrip("0")
    return f"{text}0" if text.endswith(".") else text


def loss_weights(text: str, context: NameContext) -> Meaning:
    """Weights of DPO's losses."""
    return Meaning({}) if is_none(text) else _pair_loss(context.theirs.get("loss_type", "sigmoid"), context)


def label_smoothing(text: str, context: NameContext) -> Meaning:
    """The probability of a wrong label, which TRL's DPO reads in four of its losses."""
    if context.recipe in ("cpo", "simpo", "alphapo"):
        if is_same(text, "0"):
            return Meaning({})
        raise DifferentError(f"{context.recipe} has no --smoothing")
    if "smoothing" not in context.arguments:
        raise DifferentError(f"{context.recipe} has no --smoothing: its labels are taken as they are")
    if not set(items(context.theirs.get("loss_type", "sigmoid"))) & SMOOTHED:
        raise NoEffectError(f"TRL reads it in {', '.join(sorted(SMOOTHED))} alone")
    return Meaning({"smoothing": text})


def f_divergence(text: str, context: NameContext) -> Meaning:
    """The f-divergence of a preference loss, and the coefficient of the alpha divergence, which is 1 - alpha in TRL."""
    if "divergence" not in context.arguments:
        raise DifferentError(f"{context.recipe} has no --divergence")
    names = {"reverse_kl": "reverse_kl", "forward_kl": "forward_kl", "js_divergence": "js", "alpha_divergence": "alpha"}
    if text not in names:
        raise DifferentError(f"{text} is not one of {', '.join(names)}")
    flags = {"divergence": names[text]}
    if text == "alpha_divergence":
        coefficient = context.number("f_alpha_divergence_coef", "0.5")
        if coefficient == 1:
            return Meaning({"divergence": "reverse_kl"}, "which a coefficient of 1 is")
        if not 0 < coefficient < 1:
            raise DifferentError(f"f_alpha_divergence_coef={number_text(coefficient)}: 1 - it must be from 0 to 1 here")
        flags["divergence_alpha"] = number_text(1 - coefficient)
    losses = set(items(context.theirs.get("loss_type", "sigmoid")))
    if text == "reverse_kl" or not losses & PLAIN_RATIOS:
        if text != "reverse_kl" and losses & LENGTH_NORMALISED:
            raise DifferentError("TRL divides f' of the sum by the length, here f' is of the mean log-ratio", flags)
        return Meaning(flags)
    if losses <= PLAIN_RATIOS:
        raise NoEffectError(f"TRL's {', '.join(sorted(losses))} take log-ratios whatever it is")
    raise DifferentError(f"TRL's {', '.join(sorted(losses & PLAIN_RATIOS))} would not read it, here all do", flags)


def alpha_coefficient(text: str, context: NameContext) -> Meaning:
    """The coefficient of the alpha divergence."""
    if "divergence" not in context.arguments:
        raise DifferentError(f"{context.recipe} has no --divergence_alpha: it has none")
    if context.theirs.get("f_divergence_type", "reverse_kl") != "alpha_divergence":
        raise NoEffectError("only f_divergence_type=alpha_divergence reads it")
    return f_divergence("alpha_divergence", context)


def use_weighting(text: str, context: NameContext) -> Meaning:
    """WPO's weights."""
    if not is_true(text):
        return Meaning({})
    if "on_policy" not in context.arguments:
        raise DifferentError(f"{context.recipe} has no --on_policy")
    return Meaning({"on_policy": "true", "weight_bound": NONE}, "TRL's weights have no bound")


def length_alpha(text: str, context: NameContext) -> Meaning:
    """LD-DPO's factor of the tokens beyond the shorter completion."""
    if is_none(text):
        return Meaning({})
    if "length_alpha" not in context.arguments:
        raise DifferentError(f"{context.recipe} has no --length_alpha: it has none")
    return Meaning({"length_alpha": text})


def _unpaired_loss(text: str, context: NameContext) -> Meaning:
    names = {"kto": "kto", "apo_zero_unpaired": "apo_zero"}
    if text not in names:
        raise DifferentError(f"{text} is not one of {', '.join(names)}")
    if text == "kto" and micro_batch_count(context) > 1:
        raise DifferentError(
            "TRL takes the reference point of every micro-batch, here it is that of the step", {"loss": "kto"}
        )
    return Meaning({"loss": names[text]})


def _contrast(text: str, context: NameContext) -> Meaning:
    if text in ("hinge", "ipo"):
        raise DifferentError(f"cpo has no {text}; its loss is TRL's sigmoid")
    if context.recipe == "cpo" and not is_same(context.theirs.get("alpha", "0"), "0"):
        raise DifferentError("alpha bends the rewards of alphapo alone (loss_type=alphapo)")
    return Meaning({})


def cpo_alpha(text: str, context: NameContext) -> Meaning:
    """The factor of CPO's likelihood."""
    if context.recipe in ("simpo", "alphapo"):
        if is_same(text, "0") or context.theirs.get("loss_type") == "alphapo":
            return Meaning({})
        raise DifferentError(f"{context.recipe} has no likelihood beside its contrast (cpo_alpha=0)")
    if "likelihood_coef" not in context.arguments:
        raise DifferentError(f"{context.recipe} has no --likelihood_coef")
    if not is_same(text, "0") and micro_batch_count(context) > 1:
        raise DifferentError(
            "TRL's likelihood is a mean of the means over tokens of micro-batches, here the mean over all of a step",
            {"likelihood_coef": text},
        )
    return Meaning({"likelihood_coef": text})


def of_recipes(ours: str, *recipes: str) -> Callable[[str, NameContext], Meaning]:
    """An argument that TRL reads with some losses, which are these recipes."""

    def convert(text: str, context: NameContext) -> Meaning:
        if context.recipe not in recipes or ours not in context.arguments:
            raise NoEffectError(f"TRL reads it with {' and '.join(recipes)} alone")
        return Meaning({ours: text})

    return convert


# ---- given texts, distillation


def _likelihood(text: str, context: NameContext) -> Meaning:
    if text not in ("nll", "chunked_nll", "dft"):
        raise DifferentError(f"{text} is not one of nll, dft")
    return Meaning({"dynamic": "true"} if text == "dft" else {})


def completion_only(text: str, context: NameContext) -> Meaning:
    """The loss on a prompt's tokens, on or off."""
    if is_none(text):
        return Meaning({}, "of records with a prompt and a completion the completion is learned, in TRL too")
    if is_true(text):
        return Meaning({})
    raise DifferentError("the tokens of a prompt are not learned here")


def packed_texts(text: str, context: NameContext) -> Meaning:
    """TRL's packing, which makes rows of several texts, so that its batches count such rows."""
    if is_none(text) or not is_true(text):
        return Meaning({}, "rows are packed end to end to --token_budget, which changes no number")
    if "per_device_train_batch_size" in context.theirs:
        raise DifferentError("TRL's batches then count rows of several texts; --batch_prompts counts texts")
    return Meaning({}, "rows are always packed end to end, and do not see one another; leave it out")


def lmbda(text: str, context: NameContext) -> Meaning:
    """The share of a student's own samples in GKD."""
    nearest = {"batch_prompts": batch(context)["batch_prompts"], "samples_per_prompt": "1", "minibatches": "1"}
    if not is_same(text, "1"):
        raise DifferentError(f"gkd learns from its own samples alone, which is lmbda=1, not {text}", nearest)
    raise DifferentError(
        "TRL divides by the tokens of the data's completions, here by those that the student sampled", nearest
    )


def gkd_temperature(text: str, context: NameContext) -> Meaning:
    """Of sampling; the divergence of TRL's GKD has a temperature of 1."""
    if context.recipe != "gkd" or is_same(text, "1"):
        return Meaning({"temperature": text})
    raise DifferentError("TRL samples at it and takes the divergence at 1, here both are one", {"temperature": text})
