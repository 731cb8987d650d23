"""verl's batch sizes and run lengths, which count prompts, steps and epochs."""

from __future__ import annotations

import math
from fractions import Fraction

from funrl.flags.foreign.meaning import (
    Effect,
    Meaning,
    NameContext,
    among,
    becomes,
    different,
    first_of,
    negated,
    no_effect,
    optional,
    same,
)
from funrl.flags.foreign.values import number_text, whole

ACTOR = "actor_rollout_ref.actor"


def minibatch_count(text: str, context: NameContext) -> str:
    """Number of mini-batches per pass. Raises: DifferentError."""
    prompts = context.number("data.train_batch_size", "1024")
    size = context.number(f"{ACTOR}.ppo_mini_batch_size", "256")
    return whole(prompts / size, f"--minibatches ({prompts} prompts / {size})")


def updates_of_batch(context: NameContext) -> Fraction:
    """Optimizer steps of a step."""
    return Fraction(minibatch_count("", context)) * context.number(f"{ACTOR}.ppo_epochs", "1")


def makes_several_updates(text: str, context: NameContext) -> bool:
    """True if a step makes several optimizer steps."""
    return updates_of_batch(context) > 1


_STAIRS = "verl's rate stays during a step and moves between steps, here it moves with every optimizer step"
lr_schedule = optional(
    first_of(
        (
            negated(among("constant", "cosine")),
            different("{text} is not one of constant, cosine: --lr_schedule has these and linear"),
        ),
        (among("cosine"), makes_several_updates, different(_STAIRS, lr_schedule="{text}")),
        same("lr_schedule"),
    )
)


def lr_warmup(text: str, context: NameContext) -> Meaning:
    """Meaning of a warm-up in steps, or as a share of all steps if steps are not given."""
    names = ("lr_warmup_steps", "lr_warmup_steps_ratio")
    steps, ratio = (context.number(f"{ACTOR}.optim.{name}", "-1") for name in names)
    note = ""
    if steps <= 0 and ratio > 0:
        total = _total_steps(context)
        steps = Fraction(math.floor(ratio * total))
        note = f"{number_text(ratio)} of {total} steps"
    if steps <= 0:
        return Meaning({})
    updates = updates_of_batch(context)
    flags = {"lr_warmup_steps": str(round(steps * updates))}
    return Meaning(flags, _STAIRS, Effect.DIFFERENT) if updates > 1 else Meaning(flags, note)


def _gives_steps(text: str, context: NameContext) -> bool:
    return context.given("trainer.total_training_steps") and context.theirs["trainer.total_training_steps"] != "-1"


def _total_steps(context: NameContext) -> int:
    if _gives_steps("", context):
        return int(context.number("trainer.total_training_steps", "0"))
    if context.records is None:
        return int(context.ours["steps"])
    epoch_steps = math.floor(context.records / context.number("data.train_batch_size", "1024"))
    return int(epoch_steps * context.number("trainer.total_epochs", "30"))


total_epochs = first_of(
    (_gives_steps, no_effect("total_training_steps is given, which counts")),
    (
        lambda text, context: context.records is None,
        different(
            "a run's length is --steps here: epochs x prompts / --batch_prompts, which `funrl import --records=N` "
            "computes"
        ),
    ),
    becomes(
        lambda text, context: f"{text} epochs over {context.records} records",
        steps=lambda text, context: str(max(_total_steps(context), 1)),
    ),
)
