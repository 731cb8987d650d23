"""Targets of a flow balance, FlowRL's, with the critic as the logarithm of the partition function."""

from __future__ import annotations

from torch import Tensor

from funrl import trees
from funrl.algos.advantages.teacher_rewards import sum_of_earlier_rows
from funrl.algos.core import Advantage, Signal, check_rank
from funrl.algos.losses.pair_losses import check_beta
from funrl.algos.masks import where_masked
from funrl.batch import Batch
from funrl.fields import Field, Schema

OPENING_FIELDS = Schema(
    opening=Field("token", "advantage", "first sampled token of a sequence, made by flow_targets()", dtype="bool")
)


def flow_targets(beta: float = 15.0) -> Advantage:
    """Targets of the balance log Z + mean_t log(pi / pi_ref) = beta x of each row, [B] -> [B, T].

    The advantage of all tokens is beta x - log Z, to which `flow_balance` brings the policy; the critic's target is
    beta x - mean_t log(pi_old / pi_ref), for the value before the first sampled token. That value is log Z: it has seen
    the prompt alone. Of an agent's episode of several rows it is that of the first one.

    Args:
      beta: nats per token for one unit of x, above 0.
    Needs: value, old_logp, ref_logp [B, T]. Makes: returns, opening.

    Raises:
      ValueError: beta is not above 0.
    References: FlowRL, Zhu et al., 2025, https://arxiv.org/abs/2509.15207
    """
    check_beta(beta)

    def update(signal: Signal, state: object, batch: Batch) -> tuple[Signal, trees.Tree]:
        check_rank(signal, "row")
        mask_BT = signal.mask
        across = batch.across
        first_B1 = sum_of_earlier_rows(batch.mask.double(), batch)[:, None] == 0
        opening_BT = first_B1 & batch.mask & (batch.mask.cumsum(1) == 1)  # though a correction has masked it

        def mean(x_BT: Tensor, over_BT: Tensor) -> Tensor:
            count_B = across.sums(over_BT).clamp_min(1)
            return (across.sums(where_masked(x_BT, over_BT)) / count_B).to(signal.x.dtype)

        def on_tokens(x_B: Tensor) -> Tensor:
            return where_masked(across.own(x_B)[:, None].expand(mask_BT.shape), mask_BT)

        goal_B = beta * signal.x
        advantage_BT = on_tokens(goal_B - mean(batch.value, opening_BT))
        returns_BT = on_tokens(goal_B - mean(batch.old_logp - batch.ref_logp, mask_BT))
        return signal._replace(x=advantage_BT, returns=returns_BT, extra=signal.extra | {"opening": opening_BT}), state

    return Advantage(lambda: (), update, fields=OPENING_FIELDS)
