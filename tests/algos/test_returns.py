"""Advantages of single tokens by some rows at a time."""

import pytest
import torch

from funrl.algos.advantages import returns


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("critic_lambda", [None, 1.0])
def test_rows_some_at_a_time_have_the_bits_of_all_at_once(monkeypatch, per_row, critic_lambda):
    draw = torch.Generator().manual_seed(0)
    reward, value = torch.randn(7, 13, generator=draw), torch.randn(7, 13, generator=draw)
    mask = torch.rand(7, 13, generator=draw) < 0.7
    gae_lambda = torch.rand(7, 1, generator=draw) if per_row else 0.9
    inputs = (reward, value, mask, 0.99, gae_lambda, critic_lambda)
    whole = returns.generalised_advantages(*inputs)
    assert whole.advantage[mask].abs().min() > 0
    for cached in (1, 2 * 13, 6 * 13):
        monkeypatch.setattr(returns, "CACHED", cached)
        parts = returns.generalised_advantages(*inputs)
        assert torch.equal(parts.advantage, whole.advantage) and torch.equal(parts.returns, whole.returns)
