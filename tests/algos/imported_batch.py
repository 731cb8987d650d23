"""Batches on which another library's documented formulas and an imported recipe are compared, and how a recipe is made.

Formulas are written anew from the other library's documentation, in plain torch on padded rows.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from funrl.algos import Algorithm, apply_advantage, recipe
from funrl.batch import Batch
from funrl.cli.import_config import Imported, imported
from funrl.flags.arguments import arguments_of
from funrl.trainer.settings.settings import settings_flags

LENGTHS = (4, 2, 5, 3, 6, 1)
GROUPS = (0, 0, 0, 1, 1, 1)


def grouped(seed: int = 0) -> tuple[Batch, Tensor]:
    """Two prompts of three completions each, and log-probabilities of a policy that has moved."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    mask = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
    old = -normal(6, 7).abs() - 0.05
    batch = Batch(
        tokens=torch.zeros(6, 7, dtype=torch.int64),
        mask=mask,
        group=torch.tensor(GROUPS),
        score=normal(6),
        old_logp=old,
        ref_logp=old + 0.3 * normal(6, 7),
        rollout_logp=old + 0.2 * normal(6, 7),
        entropy=normal(6, 7).abs(),
        value=normal(6, 7),
        greedy_score=normal(6),
    )
    return batch, (old + 0.5 * normal(6, 7)).clamp(max=-0.01)


def paired(seed: int = 0) -> tuple[Batch, Tensor]:
    """Three pairs, chosen and rejected in turns, with labels; and log-probabilities of a policy."""
    batch, logp = grouped(seed)
    labels = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)[:, None].expand(6, 7)
    sums = (2 * logp).exp() * 0.6
    return batch._replace(group=None, score=None, label=labels, sum_pi_squared=sums, kl_baseline=0 * logp + 0.3), logp


def read(tmp_path, config: dict | str, trainer: str | None = None) -> Imported:
    """What `funrl import` makes of a configuration, a dict of TRL's or dotted names of verl's."""
    (tmp_path / "theirs.json").write_text(json.dumps(config))
    return imported(str(tmp_path / "theirs.json"), trainer)


def composed(translation: Imported) -> Algorithm:
    """The algorithm of the flags that were written."""
    name = translation.flags["experiment"]
    flags = arguments_of(recipe(name), name).flags
    own = {key: flags[key].parse(text) for key, text in translation.flags.items() if key in flags}
    common = {
        key: settings_flags()[key].parse(text) for key, text in translation.flags.items() if key in settings_flags()
    }
    return recipe(name)(**{key: common.get(key, own[key]) for key in own})


def loss_of(algorithm: Algorithm, batch: Batch, x: Tensor, role: str = "policy") -> Tensor:
    """The loss of a role after the advantage chain, and its gradient, as one vector."""
    if algorithm.advantage is not None and batch.get("score") is not None:
        batch, _, _ = apply_advantage(algorithm.advantage, algorithm.advantage.init(), batch)
    leaf = x.clone().requires_grad_()
    value, _ = algorithm.losses[role](leaf, batch)
    (gradient,) = torch.autograd.grad(value, leaf)
    return torch.cat([value.detach().reshape(1), gradient.flatten()])


def with_gradient(value_of, x: Tensor) -> Tensor:
    """A formula's value at x and its gradient, as one vector."""
    leaf = x.clone().requires_grad_()
    value = value_of(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return torch.cat([value.detach().reshape(1), gradient.flatten()])


def by_group(reward: Tensor, eps: float | None) -> Tensor:
    """Rewards less their group's mean, over its deviation plus eps unless that is None."""
    groups = reward.view(2, 3)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred if eps is None else centred / (groups.std(1, keepdim=True) + eps)).flatten()


def token_mean(loss: Tensor, mask: Tensor) -> Tensor:
    return loss[mask].sum() / mask.sum()


def sequence_mean(loss: Tensor, mask: Tensor) -> Tensor:
    return ((loss * mask).sum(1) / mask.sum(1)).mean()


def sequence_sum(loss: Tensor, mask: Tensor) -> Tensor:
    return (loss * mask).sum(1).mean()
