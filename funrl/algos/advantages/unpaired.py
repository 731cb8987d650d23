"""The reference point of unpaired preferences: how far the policy has moved on completions of other prompts."""

from __future__ import annotations

from funrl import trees
from funrl.algos.core import Advantage, Signal
from funrl.algos.masks import where_masked
from funrl.algos.metrics import Mean
from funrl.batch import Batch


def reference_point() -> Advantage:
    """KTO's z, a constant of the step: the mean over mismatched rows of sum_t log pi/pi_ref, at least 0.

    Mismatched rows, completions placed after another prompt than their own, serve only this purpose: the step trains on
    the other rows.

    Needs: mismatched [B], old_logp, ref_logp [B, T] (nats). Makes: kl_baseline [B, T], the same number everywhere; sets
      the signal to 0 on every token.
    Metrics: "preference/kl_baseline", in nats.
    References: Ethayarajh et al., 2024, https://arxiv.org/abs/2402.01306

    Warning: TRL recomputes z in every micro-batch from the current policy; here z comes from the policy before the
    step, over all rows of the step.
    """

    def update(signal: Signal, state: object, batch: Batch) -> tuple[Signal, trees.Tree]:
        moved_BT = where_masked(batch.old_logp - batch.ref_logp, batch.mask)
        total = where_masked(batch.across.sums(moved_BT), batch.mismatched).sum()
        z = (total / batch.mismatched.sum().clamp_min(1)).clamp_min(0)
        kl_baseline = z.to(moved_BT.dtype).expand(batch.mask.shape)
        return signal._replace(
            x=moved_BT.new_zeros(batch.mask.shape),
            rows=(~batch.mismatched).nonzero().squeeze(-1),
            extra=signal.extra | {"kl_baseline": kl_baseline},
            metrics=signal.metrics | {"preference/kl_baseline": Mean(z, z.new_ones(()))},
        ), state

    return Advantage(lambda: (), update)
