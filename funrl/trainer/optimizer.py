"""The optimizer that the flags describe."""

from __future__ import annotations

from funrl import trees
from funrl.mesh.mesh import Mesh
from funrl.optim import (
    Transformation,
    chain,
    clip_by_global_norm,
    fused_adamw,
    matrices,
    muon,
    warmup_constant,
    warmup_cosine,
    warmup_linear,
)
from funrl.trainer.settings import Settings


def make_optimizer(settings: Settings, lr: float, updates: int, layouts: trees.Tree, mesh: Mesh) -> Transformation:
    """AdamW or Muon below a bound on the gradient's norm, in place. Its `update` is given that norm.

    Args:
      settings: which, schedule, decay, bound.
      lr: peak learning rate.
      updates: optimizer steps of the whole run, over which the rate decays.
      layouts: of the parameters on `mesh`.
    """
    warmup = settings.lr_warmup_steps
    schedules = {
        "constant": lambda: warmup_constant(lr, warmup),
        "linear": lambda: warmup_linear(lr, warmup, updates),
        "cosine": lambda: warmup_cosine(lr, warmup, updates),
    }
    schedule, decay = schedules[settings.lr_schedule](), settings.weight_decay
    if settings.optimizer == "muon":
        step = muon(schedule, weight_decay=decay, layouts=layouts, mesh=mesh)
    else:
        step = fused_adamw(schedule, weight_decay=decay, mask=matrices)
    return chain(clip_by_global_norm(settings.max_grad_norm, in_place=True), step)
