"""The optimizer that the flags describe."""

from __future__ import annotations

import functools

from funrl.models import Placed
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
from funrl.trainer.settings.settings import Settings
from funrl.trainer.steps.freezing import frozen_beginnings, learns


def make_optimizer(settings: Settings, lr: float, updates: int, placed: Placed) -> Transformation:
    """AdamW or Muon below a bound on the gradient's norm, in place. Its `update` is given that norm.

    Args:
      settings: which, schedule, decay, bound.
      lr: peak learning rate.
      updates: optimizer steps of the whole run, over which the rate decays.
      placed: the model that learns.
    """
    warmup = settings.optimization.lr_warmup_steps
    schedules = {
        "constant": lambda: warmup_constant(lr, warmup),
        "linear": lambda: warmup_linear(lr, warmup, updates),
        "cosine": lambda: warmup_cosine(lr, warmup, updates),
    }
    schedule = schedules[settings.optimization.lr_schedule]()
    decay = settings.optimization.weight_decay
    decayed = None if settings.optimization.decay_all else matrices
    if settings.optimization.optimizer == "muon":
        axes = placed.model.axes
        layouts = placed.stored
        step = muon(schedule, weight_decay=decay, axes=axes, layouts=layouts, mesh=placed.mesh, mask=decayed)
    else:
        step = fused_adamw(schedule, weight_decay=decay, mask=decayed)
    frozen = frozen_beginnings(settings, placed.model)
    if frozen:
        step = masked(step, functools.partial(learns, beginnings=frozen))
    return chain(clip_by_global_norm(settings.optimization.max_grad_norm, in_place=True), step)
