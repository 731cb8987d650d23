"""TRL's batch sizes and run lengths, which count completions, micro-batches and optimizer steps.

A step here has --batch_prompts prompts with --samples_per_prompt completions each over all devices, and makes
--minibatches optimizer steps per pass.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from funrl.flags.foreign.meaning import (
    Effect,
    Meaning,
    NameContext,
    NameRule,
    becomes,
    different,
    first_of,
    no_effect,
)
from funrl.flags.foreign.values import DifferentError, is_none, number_text, whole

SIZE_NAMES = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")


def _rows_per_device(context: NameContext) -> Fraction:
    return context.number("per_device_train_batch_size", "8")


def _accumulation(context: NameContext) -> Fraction:
    return context.number("gradient_accumulation_steps", "1")


def _samples(context: NameContext) -> Fraction:
    return context.number("num_generations", str(context.ours["samples_per_prompt"]))


def has_sizes(context: NameContext) -> bool:
    """True if one of TRL's sizes is given."""
    return bool(set(SIZE_NAMES) & set(context.theirs))


def micro_batch_count(context: NameContext) -> Fraction:
    """Micro-batches of an optimizer step over all devices; 1 if none of TRL's sizes is given."""
    return _accumulation(context) * context.ranks if has_sizes(context) else Fraction(1)


def accumulates(text: str, context: NameContext) -> bool:
    """True if an optimizer step has several micro-batches."""
    return micro_batch_count(context) > 1


def trl_batch(context: NameContext) -> dict[str, str]:
    """The flags of a batch. Raises: DifferentError."""
    together = _rows_per_device(context) * _accumulation(context) * context.ranks
    if context.texts or context.recipe == "gkd":
        return {"batch_prompts": whole(together, "--batch_prompts")}
    generated = _rows_per_device(context) * context.ranks
    generated *= context.number("steps_per_generation", str(_accumulation(context)))
    if context.given("generation_batch_size"):
        generated = context.number("generation_batch_size", "")
    samples = _samples(context)
    return {
        "batch_prompts": whole(generated / samples, f"--batch_prompts ({generated} completions / {samples})"),
        "minibatches": whole(generated / together, f"--minibatches ({generated} completions / {together})"),
    }


def batch_size(text: str, context: NameContext) -> Meaning:
    """Meaning of batch size per device, accumulation and batches per generation, which together size a step."""
    accumulated = f"{_rows_per_device(context)} a device x {_accumulation(context)} accumulated"
    counts = f"{accumulated} x {context.ranks} devices with rows of their own"
    if context.texts or context.recipe == "gkd":
        return Meaning(trl_batch(context), f"{counts}; what is accumulated is decided by --token_budget")
    note = f"TRL counts completions: {counts}; here prompts, of {_samples(context)} completions each"
    return Meaning(trl_batch(context), note)


def updates_of_a_pass(context: NameContext) -> Fraction:
    """Optimizer steps of a pass over a batch; 1 if TRL's sizes are not given."""
    return (
        Fraction(1) if context.texts or not has_sizes(context) else Fraction(trl_batch(context).get("minibatches", "1"))
    )


def updates_of_a_step(context: NameContext) -> Fraction:
    """Optimizer steps that one step here makes."""
    if context.texts or context.recipe == "gkd":
        return Fraction(1)
    updates = trl_batch(context)["minibatches"] if has_sizes(context) else context.ours["minibatches"]
    return context.number("num_iterations", str(context.ours["epochs"])) * Fraction(updates)


def _is_positive(text: str) -> bool:
    return not (is_none(text) or re.fullmatch(r"-\d+", text))


def _has_max_steps(text: str, context: NameContext) -> bool:
    return _is_positive(context.theirs.get("max_steps", "none"))


def _count_note(updates: Fraction) -> str:
    return f"TRL counts optimizer steps; a step here makes {updates}" if updates != 1 else ""


def max_steps(text: str, context: NameContext) -> Meaning:
    """The length of a run in optimizer steps."""
    if not _is_positive(text):
        return Meaning({})
    updates = updates_of_a_step(context)
    steps = context.number("max_steps", text) / updates
    if steps.denominator == 1:
        return Meaning({"steps": str(steps)}, _count_note(updates))
    reason = f"a step here makes {updates} optimizer steps: {text} of them end within a step"
    return Meaning({"steps": str(math.ceil(steps))}, reason, Effect.DIFFERENT)


def optimizer_events(ours: str) -> NameRule:
    """An interval in optimizer steps between events that do not affect training."""

    def rule(text: str, context: NameContext) -> Meaning:
        if not _is_positive(text):
            return Meaning({})
        try:
            count = Fraction(text)
        except ValueError:
            raise DifferentError(f"{text}: a number of optimizer steps is needed") from None
        if count < 1:
            return Meaning({}, f"{text} is a share of the run; give --{ours}=N, in steps", Effect.NO_EFFECT)
        updates = updates_of_a_step(context)
        return Meaning({ours: str(max(1, round(count / updates)))}, _count_note(updates))

    return rule


def steps_of_a_run(context: NameContext) -> int:
    """Steps by max_steps, by the epochs over known records, or by --steps. Raises: DifferentError."""
    if _has_max_steps("", context):
        return math.ceil(context.number("max_steps", "0") / updates_of_a_step(context))
    if context.records is None or "num_train_epochs" not in context.theirs:
        return int(context.ours["steps"])
    steps = context.records / Fraction(trl_batch(context)["batch_prompts"])
    rounds = math.ceil if context.texts else math.floor  # TRL's sampler of completions drops an incomplete batch
    return math.ceil(context.number("num_train_epochs", "3") * max(rounds(steps), 1))


def _epochs_note(text: str, context: NameContext) -> str:
    left = (context.records or 0) % int(trl_batch(context)["batch_prompts"])
    short = f"; TRL's last batch of an epoch has {left}" if left and context.texts else ""
    return f"{text} epochs over {context.records} records{short}"


# The length of a run in passes over the data.
epochs_of_data = first_of(
    (_has_max_steps, no_effect("max_steps is given, which counts")),
    (
        lambda text, context: context.records is None,
        different(
            "the length of a run is --steps here, each of --batch_prompts; {text} epochs over N prompts are {text} x "
            "N / --batch_prompts steps, which `funrl import --records=N` computes (--epochs are passes over one batch "
            "of rollouts, TRL's num_iterations)"
        ),
    ),
    becomes(_epochs_note, steps=lambda text, context: str(steps_of_a_run(context))),
)


def warmup(text: str, context: NameContext) -> Meaning:
    """The share of a run's optimizer steps in which the rate rises."""
    if context.theirs.get("lr_scheduler_type") == "constant":
        reason = "lr_scheduler_type=constant has no warm-up in TRL; constant_with_warmup has"
        return Meaning({}, reason, Effect.NO_EFFECT)
    share = context.number("warmup_ratio", "0")
    if not share:
        return Meaning({})
    total = steps_of_a_run(context) * updates_of_a_step(context)
    note = f"{number_text(share)} of {total} optimizer steps"
    return Meaning({"lr_warmup_steps": str(math.ceil(share * total))}, note)


def warmup_steps(text: str, context: NameContext) -> Meaning:
    """Optimizer steps in which the rate rises, or their share."""
    count = context.number("warmup_steps", "0")
    if not count:
        return Meaning({})
    if count < 1 or context.theirs.get("lr_scheduler_type") == "constant":
        return warmup(text, context._replace(theirs={**context.theirs, "warmup_ratio": text}))
    return Meaning({"lr_warmup_steps": whole(count, "--lr_warmup_steps")})
