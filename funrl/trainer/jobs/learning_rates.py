"""Optimizers of roles, and peak learning rates: of flags, or defaults that fit the size of the model.

A larger model wants smaller steps. The default of a model that is given falls with the square root of its number of
parameters N,

    lr(N) = c / sqrt(N), at least 5e-7 and at most 1e-3,

with c = 0.2 for reinforcement learning and preferences, and c = 1 for texts to imitate and for reward models:

| N | 1e5 | 2.6e5 | 1e8 | 5e8 | 8e9 | 7e10 | 4e11 |
|---|---|---|---|---|---|---|---|
| c = 0.2 | 6.3e-4 | 3.9e-4 | 2e-5 | 8.9e-6 | 2.2e-6 | 7.6e-7 | 5e-7 |
| c = 1 | 1e-3 | 1e-3 | 1e-4 | 4.5e-5 | 1.1e-5 | 3.8e-6 | 1.6e-6 |

and adapters take ten times as much. The ends of the first are known: on a model of 2.6e5 parameters 4e-4 to 1e-3 learn
well, and published runs of 7e9 to 7e10 take 5e-7 to 3e-6. The second goes between published runs, which do not agree:
demonstrations take 2e-5 at 7e9 and 7e10 (Llama 2; TRL's default), or 5e-6 at 8e9 and 2e-6 at 7e10 (Tulu 3); reward
models 1e-5 at 7e9 and 5e-6 at 7e10 (Llama 2), or 3e-6 at 8e9 (Tulu 3). Preferences stay with the first: Tulu 3 takes
5e-7 at 8e9, TRL 1e-6. A model that begins from nothing is that of an embedded task, which has a rate of its own.

References: Schulman and Thinking Machines Lab, 2025, "LoRA Without Regret" (the factor of adapters). Touvron et al.,
2023, https://arxiv.org/abs/2307.09288. Lambert et al., 2024, https://arxiv.org/abs/2411.15124.
"""

from __future__ import annotations

import functools
import math

from funrl import trees
from funrl.algos.core import Algorithm
from funrl.models.model import Model
from funrl.models.placed import Placed
from funrl.optim import (
    Transformation,
    chain,
    clip_by_global_norm,
    fused_adamw,
    masked,
    matrices,
    muon,
    warmup_constant,
    warmup_cosine,
    warmup_linear,
)
from funrl.trainer.jobs.job import BaseJob
from funrl.trainer.settings.declaration import run_kind
from funrl.trainer.settings.settings import Settings, flag_value
from funrl.trainer.steps.optimizer import frozen_beginnings, learns, with_gradient

# c
RATE_OF_ONE = 0.2
SUPERVISED_RATE_OF_ONE = 1.0
LOWEST = 5e-7
HIGHEST = 1e-3
ADAPTERS = 10.0
FROM_NOTHING = 1e-3
ADAPTERS_FROM_NOTHING = 3e-3


def rate_of_size(parameters: int, adapters: bool = False, supervised: bool = False) -> float:
    """The default learning rate of a model, to two digits.

    Args:
      parameters: of the whole model, 1 or more.
      adapters: whether adapters learn instead of it.
      supervised: whether it learns as `learns_from_texts` says.

    >>> rate_of_size(7_000_000_000), rate_of_size(7_000_000_000, supervised=True)
    (2.4e-06, 1.2e-05)
    """
    of_one = SUPERVISED_RATE_OF_ONE if supervised else RATE_OF_ONE
    rate = min(max(of_one / math.sqrt(parameters), LOWEST), HIGHEST)
    return float(f"{rate * (ADAPTERS if adapters else 1.0):.1e}")


def learns_from_texts(settings: Settings, algorithm: Algorithm) -> bool:
    """True if a model imitates texts or learns to score them; with preferences a policy learns as in RL."""
    return run_kind(algorithm, settings.examples.data) == "supervised" and (
        algorithm.example == "row" or algorithm.role_kinds.generating(algorithm.losses) is None
    )


def learning_rates(settings: Settings, algorithm: Algorithm, model: Model, adapters: bool = False) -> dict[str, float]:
    """Peak learning rates of the roles that learn.

    Args:
      model: that the run begins with, without adapters.
      adapters: whether adapters learn instead of it.
    """
    if settings.optimization.lr is not None:
        lr = settings.optimization.lr
    elif settings.models.model is None:
        lr = ADAPTERS_FROM_NOTHING if adapters else FROM_NOTHING
    else:
        lr = rate_of_size(trees.count(model.shapes), adapters, learns_from_texts(settings, algorithm))
    rules = {name: algorithm.role_kinds[name].rate for name in algorithm.losses}
    given = {name: flag_value(settings, rule.flag) if rule.flag else None for name, rule in rules.items()}
    return {name: rules[name].factor * lr if rate is None else rate for name, rate in given.items()}


def updates_of(settings: Settings, name: str) -> int:
    """Number of updates of a role by each mini-batch."""
    return settings.updates.critic_updates if name == "critic" else 1


def optimizer_of(job: BaseJob, name: str, placed: Placed, first_step: int) -> Transformation:
    """The optimizer of a role that learns: AdamW or Muon below a bound on the gradient's norm, in place.

    Its `update` is given that norm. Its rate decays over the role's updates of the whole run.

    Args:
      placed: its model on its devices.
      first_step: the first step in which it learns.
    """
    settings = job.settings
    flags = settings.optimization
    lr = learning_rates(settings, job.algorithm, job.model, job.lora is not None)[name]
    batches = (settings.run.steps - first_step + 1) * settings.updates.epochs * settings.updates.minibatches
    updates = batches * updates_of(settings, name)
    schedules = {
        "constant": lambda: warmup_constant(lr, flags.lr_warmup_steps),
        "linear": lambda: warmup_linear(lr, flags.lr_warmup_steps, updates),
        "cosine": lambda: warmup_cosine(lr, flags.lr_warmup_steps, updates),
    }
    schedule = schedules[flags.lr_schedule]()
    options = {"weight_decay": flags.weight_decay, "mask": with_gradient if flags.decay_all else matrices}
    if flags.optimizer == "muon":
        step = muon(schedule, axes=placed.model.axes, layouts=placed.stored, mesh=placed.mesh, **options)
    else:
        step = fused_adamw(schedule, **options)
    frozen = frozen_beginnings(settings, placed.model, name)
    if frozen:
        step = masked(step, functools.partial(learns, beginnings=frozen))
    return chain(clip_by_global_norm(flags.max_grad_norm, in_place=True), step)
