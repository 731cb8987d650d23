"""The optimizer that the flags describe, and the weights that do not learn beside others of the same model that do."""

from __future__ import annotations

import functools

from funrl import trees
from funrl.models import Model, Placed
from funrl.models.lora import plain_name
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
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import Settings

FREEZE_NONE = "none"


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


def frozen_beginnings(settings: Settings, model: Model) -> tuple[str, ...]:
    """Beginnings of the names of the weights that --freeze holds, or by default those that the model names.

    Adapters stand on weights that are all frozen, so there is nothing to add.

    Raises:
      SettingsError: no weight's name begins like this.
    """
    parts = {} if model.owned is None else model.owned.frozen
    given = settings.optimization.freeze
    if model.adapters is not None or given == FREEZE_NONE:
        return ()
    if given is None:
        return tuple(beginning for beginnings in parts.values() for beginning in beginnings)
    names = [plain_name(name) for name, _ in trees.named(model.shapes)]
    beginnings = [x for word in given.split(",") for x in parts.get(word.strip(), (word.strip(),))]
    for beginning in beginnings:
        if not beginning or not any(name.startswith(beginning) for name in names):
            known = ", ".join((*parts, *sorted({name.split("/")[0] for name in names} - parts.keys())))
            raise SettingsError(f"--freeze={given}: no weight's name begins with {beginning!r}; there are {known}")
    if all(name.startswith(tuple(beginnings)) for name in names):
        raise SettingsError(f"--freeze={given}: nothing would learn")
    return tuple(beginnings)


def is_frozen(name: str, beginnings: tuple[str, ...]) -> bool:
    """True of the name of a weight that begins like one of some."""
    return plain_name(name).startswith(beginnings)


def with_frozen(params: trees.Tree, beginnings: tuple[str, ...]) -> trees.Tree:
    """Weights of which those with such names have no gradient."""
    if not beginnings:
        return params
    return trees.map_named(lambda name, x: x.detach() if is_frozen(name, beginnings) else x, params)


def learns(params: trees.Tree, beginnings: tuple[str, ...]) -> trees.Tree:
    """A tree like the weights, true where they learn."""
    return trees.map_named(lambda name, _: not is_frozen(name, beginnings), params)
