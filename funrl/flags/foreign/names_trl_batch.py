"""TRL's sizes of a batch and lengths of a run, which count completions, micro-batches and optimizer steps.

A step here has --batch_prompts prompts of --samples_per_prompt completions over all devices, and makes --minibatches
optimizer steps a pass.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from funrl.flags.foreign.renaming import (
    Convert,
    DifferentError,
    Meaning,
    NameContext,
    NoEffectError,
    is_none,
    number_text,
    rounded,
    whole,
)

SIZE_NAMES = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")


def _each(context: NameContext) -> Fraction:
    return context.number("per_device_train_batch_size", "8")


def micro_batch_count(context: NameContext) -> Fraction:
    """Micro-batches of an optimizer step over all devices; 1 where none of TRL's sizes are given."""
    if not set(SIZE_NAMES) & set(context.theirs):
        return Fraction(1)
    return context.number("gradient_accumulation_steps", "1") * context.ranks


def batch(context: NameContext) -> dict[str, str]:
    """The flags of a batch. Raises: DifferentError."""
    together = _each(context) * context.number("gradient_accumulation_steps", "1") * context.ranks
    if context.texts or context.recipe == "gkd":
        return {"batch_prompts": whole(together, "--batch_prompts")}
    accumulated = context.number("gradient_accumulation_steps", "1")
    generated = _each(context) * context.ranks * context.number("steps_per_generation", str(accumulated))
    if context.given("generation_batch_size"):
        generated = context.number("generation_batch_size", "")
    samples = context.number("num_generations", str(context.ours["samples_per_prompt"]))
    return {
        "batch_prompts": whole(generated / samples, f"--batch_prompts ({generated} completions / {samples})"),
        "minibatches": whole(generated / together, f"--minibatches ({generated} completions / {together})"),
    }


def batch_size(text: str, context: NameContext) -> Meaning:
    """Batch size a device, accumulation, and batches of one generation, which only together say what a step has."""
    accumulated = context.number("gradient_accumulation_steps", "1")
    counts = f"{_each(context)} a device x {accumulated} accumulated x {context.ranks} devices with rows of their own"
    if context.texts or context.recipe == "gkd":
        return Meaning(batch(context), f"{counts}; what is accumulated is decided by --token_budget")
    samples = context.number("num_generations", str(context.ours["samples_per_prompt"]))
    return Meaning(batch(context), f"TRL counts completions: {counts}; here prompts, of {samples} completions each")


def generation_batch_size(text: str, context: NameContext) -> Meaning:
    """Completions of one generation."""
    return Meaning({}) if is_none(text) else batch_size(text, context)


def updates_of_a_pass(context: NameContext) -> Fraction:
    """Optimizer steps of a pass over a batch; 1 where TRL's sizes are not given."""
    if context.texts or not set(SIZE_NAMES) & set(context.theirs):
        return Fraction(1)
    return Fraction(batch(context).get("minibatches", "1"))


def updates_of_a_step(context: NameContext) -> Fraction:
    """Optimizer steps that one step here makes."""
    if context.texts or context.recipe == "gkd":
        return Fraction(1)
    passes = context.number("num_iterations", str(context.ours["epochs"]))
    if set(SIZE_NAMES) & set(context.theirs):
        return passes * Fraction(batch(context)["minibatches"])
    return passes * Fraction(context.ours["minibatches"])


def max_steps(text: str, context: NameContext) -> Meaning:
    """The length of a run in optimizer steps."""
    if not _is_positive(text):
        return Meaning({})
    each = updates_of_a_step(context)
    steps = context.number("max_steps", text) / each
    if steps.denominator != 1:
        nearest = {"steps": str(math.ceil(steps))}
        raise DifferentError(f"a step here makes {each} optimizer steps: {text} of them end within a step", nearest)
    return Meaning({"steps": str(steps)}, _counted(each))


def optimizer_events(ours: str) -> Convert:
    """Optimizer steps between two events that change no number of a run."""

    def convert(text: str, context: NameContext) -> Meaning:
        if not _is_positive(text):
            return Meaning({})
        try:
            count = Fraction(text)
        except ValueError:
            raise DifferentError(f"{text}: a number of optimizer steps is needed") from None
        if count < 1:
            raise NoEffectError(f"{text} is a share of the run; give --{ours}=N, in steps")
        return Meaning({ours: rounded(count / updates_of_a_step(context))}, _counted(updates_of_a_step(context)))

    return convert


def _counted(each: Fraction) -> str:
    return f"TRL counts optimizer steps, of which a step here makes {each}" if each != 1 else ""


def _is_positive(text: str) -> bool:
    return not (is_none(text) or re.fullmatch(r"-\d+", text))


def steps_of_a_run(context: NameContext) -> int:
    """Steps of the whole run, of max_steps, of the epochs over known records, or of --steps. Raises: DifferentError."""
    if _is_positive(context.theirs.get("max_steps", "none")):
        return math.ceil(context.number("max_steps", "0") / updates_of_a_step(context))
    if context.records is None or "num_train_epochs" not in context.theirs:
        return int(context.ours["steps"])
    size = Fraction(batch(context)["batch_prompts"])
    of_an_epoch = context.records / size
    rounds = math.ceil if context.texts else math.floor  # TRL's sampler of completions drops an incomplete batch
    return math.ceil(context.number("num_train_epochs", "3") * max(rounds(of_an_epoch), 1))


def epochs_of_data(text: str, context: NameContext) -> Meaning:
    """The length of a run in passes over the data."""
    if _is_positive(context.theirs.get("max_steps", "none")):
        raise NoEffectError("max_steps is given, which counts")
    if context.records is None:
        raise DifferentError(
            f"the length of a run is --steps here, each of --batch_prompts; {text} epochs over N prompts are {text} x "
            "N / --batch_prompts steps, which `funrl import --records=N` computes (--epochs are passes over one batch "
            "of rollouts, TRL's num_iterations)"
        )
    left = context.records % int(batch(context)["batch_prompts"])
    short = f"; TRL's last batch of an epoch has {left}" if left and context.texts else ""
    return Meaning({"steps": str(steps_of_a_run(context))}, f"{text} epochs over {context.records} records{short}")


def warmup(text: str, context: NameContext) -> Meaning:
    """The share of a run's optimizer steps in which the rate rises."""
    if context.theirs.get("lr_scheduler_type") == "constant":
        raise NoEffectError("lr_scheduler_type=constant has no warm-up in TRL; constant_with_warmup has")
    share = context.number("warmup_ratio", "0")
    if not share:
        return Meaning({})
    total = steps_of_a_run(context) * updates_of_a_step(context)
    return Meaning(
        {"lr_warmup_steps": str(math.ceil(share * total))}, f"{number_text(share)} of {total} optimizer steps"
    )


def warmup_steps(text: str, context: NameContext) -> Meaning:
    """Optimizer steps in which the rate rises, or their share."""
    count = context.number("warmup_steps", "0")
    if not count:
        return Meaning({})
    if count < 1 or context.theirs.get("lr_scheduler_type") == "constant":
        return warmup(text, context._replace(theirs={**context.theirs, "warmup_ratio": text}))
    return Meaning({"lr_warmup_steps": whole(count, "--lr_warmup_steps")})
