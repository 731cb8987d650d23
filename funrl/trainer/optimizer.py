"""The optimizer that the flags describe."""

from __future__ import annotations

import functools

from funrl import trees
from funrl.mesh.mesh import Mesh
from funrl.optim import (
    Transformation,
    chain,
    clip_by_global_norm,
    fused_adamw,
    global_norm,
    matrices,
    warmup_constant,
    warmup_cosine,
    warmup_linear,
)
from funrl.trainer.settings import Settings


def make_optimizer(settings: Settings, lr: float, updates: int, layouts: trees.Tree, mesh: Mesh) -> Transformation:
    """AdamW below a bound on the gradient's norm over the mesh, in place.

    Args:
      settings: schedule, decay, bound.
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
    norm = functools.partial(global_norm, layouts=layouts, mesh=mesh)
    return chain(
        clip_by_global_norm(settings.max_grad_norm, norm, in_place=True),
        fused_adamw(schedules[settings.lr_schedule](), weight_decay=settings.weight_decay, mask=matrices),
    )
