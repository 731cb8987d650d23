"""Parts of advantages and losses that single reward functions account for.

    parts_BTK = advantage_parts(chain, state, batch, weights=(1.0, 0.5))
    loss = loss_of_part(algorithm.losses["policy"], 0)

Both are directional derivatives, so the parts are additive and their gradients too. Divisors such as a group's standard
deviation count as constants: GRPO's part of reward k is w_k (s_k - mean_G s_k) / std_G s, and the parts add up to the
advantage. A loss that is proportional to the advantage, such as a clipped surrogate, then has parts whose gradients add
up to its gradient: each token keeps the branch that the whole advantage chooses. What remains is of other sources, such
as a KL, an entropy bonus, or a piece that is not linear in the scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from funrl.across import Across
from funrl.algos.applying import apply_advantage
from funrl.algos.core import Advantage, Loss
from funrl.algos.masks import where_masked
from funrl.algos.metrics import Metric
from funrl.batch import Batch, as_dict, schema_of, seen_of, with_across
from funrl.fields import FIELDS, Field, Schema

REWARD_PARTS = "reward_parts"
ATTACHED = Schema(advantage=dataclasses.replace(FIELDS["advantage"], writer="step"))
PART_FIELDS = Schema({REWARD_PARTS: Field("token_k", "advantage", "part of each reward function in the advantage")})


@torch.no_grad()
def advantage_parts(advantage: Advantage, state: object, batch: Batch, weights: Sequence[float | None]) -> Tensor:
    """Derivative of a chain's advantages along the weighted scores of each reward function.

    Args:
      state: of the chain, before its run.
      batch: scored rows, before the chain, on the CPU.
      weights: K, of the reward functions in the score; None: `token_reward` has the function's rewards instead.
    Needs: score [B]. Uses scores [B, K], without which the only reward is the score; token_reward [B, T].

    Returns: [b, T, K], before rows are resampled.
    """
    across = batch.across
    linear = across._replace(
        sums=lambda x_bT: _dual_sums(x_bT, across),
        kth_largest=lambda x_bT, k: across.kth_largest(x_bT.detach(), k),
    )
    batch = with_across(batch, linear)
    parts = []
    for number, weight in enumerate(weights):
        tangents = _tangents(batch, number, weight)
        with forward_ad.dual_level():
            moved = batch._replace(
                **{name: forward_ad.make_dual(getattr(batch, name), x) for name, x in tangents.items()}
            )
            applied, _, _ = apply_advantage(advantage, state, moved, choose=lambda rows, _: rows)
            x_bT, part_bT = forward_ad.unpack_dual(applied.advantage)
            parts.append(torch.zeros_like(x_bT) if part_bT is None else part_bT.clone())
    return torch.stack(parts, dim=2)


def _dual_sums(x_bT: Tensor, across: Across) -> Tensor:
    """The sums of each row with those of its tangent: collectives have no derivative of their own."""
    if not x_bT.is_floating_point():
        return across.sums(x_bT)
    value_bT, tangent_bT = forward_ad.unpack_dual(x_bT)
    sums_B = across.sums(value_bT)
    return sums_B if tangent_bT is None else forward_ad.make_dual(sums_B, across.sums(tangent_bT))


def _tangents(batch: Batch, number: int, weight: float | None) -> dict[str, Tensor]:
    """The part of a reward function in each field of rewards, by name."""
    scores_BK = batch.get("scores")
    token_reward_BT = batch.get("token_reward")
    of_tokens = {} if token_reward_BT is None else {"token_reward": token_reward_BT}
    if scores_BK is None:  # of episodes, whose only reward has what their turns earned
        return {"score": batch.score} | of_tokens
    applied_B = scores_BK[:, number].nan_to_num(0.0)
    tangent_BK = torch.zeros_like(scores_BK)
    tangent_BK[:, number] = applied_B
    if weight is None:
        return {"scores": tangent_BK} | of_tokens
    return {"scores": tangent_BK, "score": (weight * applied_B).to(batch.score.dtype)}


def loss_of_part(loss: Loss, number: int) -> Loss:
    """Derivative of a loss along the part of a reward function in the advantage, as a loss of its own.

    Args:
      number: of the reward function, a column of `reward_parts`.
    Needs: advantage [B, T], reward_parts [B, T, K]; what the loss needs.
    """

    def numerators(x_BT: Tensor, batch: Batch) -> tuple[tuple[Tensor, ...], dict[str, Metric]]:
        with torch.enable_grad():
            advantage_BT = batch.advantage.detach().requires_grad_()
            values, _ = loss.numerators(x_BT, _with_attached(batch, advantage_BT))
        part_BT = where_masked(getattr(batch, REWARD_PARTS)[..., number], batch.mask)
        return tuple(_derivative(value, advantage_BT, part_BT) for value in values), {}

    return Loss(loss.denominators, numerators, loss.fields.extended(PART_FIELDS))


def _with_attached(batch: Batch, advantage_BT: Tensor) -> Batch:
    """The batch with an advantage that terms do not detach, like a field that the step writes."""
    if seen_of(batch) is not None:  # which records reads, and takes no derivative
        return batch._replace(advantage=advantage_BT)
    fields = as_dict(batch) | {"advantage": advantage_BT}
    return with_across(Batch(schema_of(batch) | ATTACHED, **fields), batch.across)


def _derivative(value: Tensor, at: Tensor, direction: Tensor) -> Tensor:
    """Derivative of a scalar along a direction; 0 where it does not depend on `at`, as when reads are recorded."""
    if not value.requires_grad:
        return 0 * value
    (slope,) = torch.autograd.grad(value, at, create_graph=True, allow_unused=True)
    return 0 * value if slope is None else (slope * direction).sum()
