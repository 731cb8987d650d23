"""Metrics by their kinds, reductions joined, and the signal that a chain begins with."""

import pytest
import torch
from pieces import example

from funrl import algos
from funrl.algos import Max, Mean, Signal, Sum, reduce, token_mean
from funrl.batch import Batch


def test_a_chain_begins_with_the_scores_or_zeros():
    batch = example()
    assert torch.equal(algos.first_signal(batch).x, batch.score)
    none = algos.first_signal(batch._replace(score=None))
    assert none.x.tolist() == [0.0] * 7 and none.x.dtype == torch.float64 and torch.equal(none.mask, batch.mask)
    only = algos.first_signal(Batch(tokens=batch.tokens, mask=batch.mask))
    assert only.x.dtype == torch.float32
    assert isinstance(only, Signal)


def test_metrics_are_typed():
    mean, high, count = Mean(torch.tensor(6.0), torch.tensor(4.0)), Max(torch.tensor(2.0)), Sum(torch.tensor(2.0))
    assert mean.value == 1.5 and (mean + Mean(torch.tensor(2.0), torch.tensor(4.0))).value == 1
    assert Mean(torch.tensor(3.0), torch.tensor(0.0)).value == 3, "a denominator of 0 stands for 1"
    assert mean.over(torch.tensor(3, dtype=torch.int64)) == 2
    assert algos.merge(high, Max(torch.tensor(5.0))) == Max(torch.tensor(5.0))
    assert algos.merge(count, Sum(torch.tensor(5.0))) == Sum(torch.tensor(7.0))
    with pytest.raises(ValueError, match="a Max and a Sum cannot be merged into one metric"):
        algos.merge(high, count)
    batch = example()
    metrics = {"per token": batch.old_logp.clone().requires_grad_(), "mean": mean, "most": high, "all": count}
    loss = reduce(lambda logp, batch: (logp, metrics), token_mean())
    _, got = loss(batch.old_logp, batch)
    assert got["most"] == high and got["all"] == count and got["mean"] == mean
    assert got["per token"].value.item() == pytest.approx(batch.old_logp[batch.mask].mean().item())
    assert not got["per token"].value.requires_grad


def test_two_reductions_of_one_term():
    batch = example()
    both = reduce(algos.policy_gradient(), token_mean() + algos.sequence_mean())
    apart = [reduce(algos.policy_gradient(), form) for form in (token_mean(), algos.sequence_mean())]
    want = sum(loss(batch.old_logp, batch)[0] for loss in apart)
    assert len(both.denominators(batch)) == 2
    assert both(batch.old_logp, batch)[0].item() == pytest.approx(want.item(), rel=1e-12)


def test_importance_weights_report_what_they_clip():
    batch = example()
    ratio = (batch.old_logp - batch.rollout_logp)[batch.mask].exp()
    piece = algos.importance_weights("token", 0.8, 1.1)
    signal, _ = piece.update(algos.first_signal(batch), piece.init(), batch)
    clipped = signal.metrics["rollout_corr/is_clipped"].value.item()
    assert clipped == ((ratio < 0.8) | (ratio > 1.1)).double().mean().item() and 0 < clipped < 1 and clipped != 0.5
    mean = signal.metrics["rollout_corr/is_mean"].value.item()
    assert mean == pytest.approx(ratio.clamp(0.8, 1.1).mean().item())
