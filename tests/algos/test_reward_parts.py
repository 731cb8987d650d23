"""Parts of reward functions in advantages and losses: against loops over Python floats, and their sums."""

from statistics import fmean, stdev

import pytest
import torch

from funrl.algos import (
    advantage_parts,
    apply_advantage,
    chain,
    clipped_surrogate,
    gae,
    group_center,
    group_scale,
    leave_one_out,
    loss_of_part,
    recipes,
    reduce,
    relative_to_mean,
    subtree_baselines,
    to_last_token,
    to_tokens,
    to_turns,
    token_mean,
    turn_center,
    whiten,
    win_rate,
)
from funrl.batch import declare, example

WEIGHTS = (1.0, -0.5)
SCORES = [[0.0, 1.0], [0.3, 0.4], [0.5, 0.6], [0.9, float("nan")]]
GROUPS = [(0, 1), (2, 3)]


def scored(algorithm=None):
    batch = example() if algorithm is None else example(schema=algorithm.schema)
    scores_BK = torch.tensor(SCORES, dtype=torch.float64)
    return batch._replace(scores=scores_BK, score=(scores_BK * torch.tensor(WEIGHTS).double()).nansum(1))


def applied(row):
    """Weighted scores of a row; 0 where a function does not apply."""
    return [w * (0.0 if s != s else s) for w, s in zip(WEIGHTS, SCORES[row], strict=True)]


@pytest.mark.parametrize(
    ("piece", "scale"),
    [
        (chain(group_center(), group_scale(0.1)), lambda total: 1 / (stdev(total) + 0.1)),
        (leave_one_out(), lambda total: 2.0),
        (relative_to_mean(), lambda total: 1 / fmean(total) if fmean(total) > 0 else 0.0),
    ],
    ids=["grpo", "rloo", "maxrl"],
)
def test_parts_of_an_advantage_equal_loops_and_add_up_to_it(piece, scale):
    batch = scored()
    advantage = chain(piece, to_tokens())
    parts_BTK = advantage_parts(advantage, advantage.init(), batch, WEIGHTS)
    for group in GROUPS:
        total = [sum(applied(row)) for row in group]
        for row in group:
            for k in range(2):
                part = (applied(row)[k] - fmean(applied(other)[k] for other in group)) * scale(total)
                values = parts_BTK[row, :, k][batch.mask[row]]
                assert values.tolist() == pytest.approx([part] * len(values), abs=1e-12)
    whole, _, _ = apply_advantage(advantage, advantage.init(), batch)
    torch.testing.assert_close(parts_BTK.sum(2), whole.advantage, rtol=0, atol=1e-9)


def applied_to(advantage, batch):
    return apply_advantage(advantage, advantage.init(), batch)[0].advantage


def rewarded_tokens():
    """A batch with rewards of tokens and a critic's values, of which no reward has a part."""
    batch = scored()
    values = torch.linspace(-1, 1, batch.mask.numel(), dtype=torch.float64).reshape(batch.mask.shape)
    return batch._replace(token_reward=values.cos(), value=values)


def test_a_function_that_rewards_tokens_has_these_as_its_part():
    advantage = chain(to_last_token(), gae(0.9, 0.8))
    batch = rewarded_tokens()
    batch = batch._replace(score=batch.scores[:, 0])
    parts_BTK = advantage_parts(advantage, advantage.init(), batch, (1.0, None))
    whole_BT = applied_to(advantage, batch)
    without = {"score": torch.zeros_like(batch.score)}, {"token_reward": torch.zeros_like(batch.token_reward)}
    for number, fields in enumerate(without):
        part_BT = whole_BT - applied_to(advantage, batch._replace(**fields))
        torch.testing.assert_close(parts_BTK[..., number], part_BT, rtol=0, atol=1e-12)


def test_the_reward_of_an_episode_is_the_only_part():
    advantage = chain(to_last_token(), gae(0.9, 0.8))
    batch = rewarded_tokens()._replace(scores=None)
    parts_BTK = advantage_parts(advantage, advantage.init(), batch, (1.0,))
    nothing = batch._replace(score=0 * batch.score, token_reward=0 * batch.token_reward)
    part_BT = applied_to(advantage, batch) - applied_to(advantage, nothing)
    torch.testing.assert_close(parts_BTK[..., 0], part_BT, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "advantage",
    [
        subtree_baselines(),
        subtree_baselines(by_size=True),
        chain(to_tokens(), whiten()),
        chain(to_turns(0.9), turn_center()),
        chain(subtree_baselines(), whiten()),
    ],
    ids=["paths", "paths by size", "whitened", "turns", "whitened paths"],
)
def test_parts_of_what_is_compared_over_tokens_add_up_to_it(advantage):
    batch = scored()._replace(token_reward=None)
    parts_BTK = advantage_parts(advantage, advantage.init(), batch, WEIGHTS)
    assert parts_BTK.any()
    torch.testing.assert_close(parts_BTK.sum(2), applied_to(advantage, batch), rtol=0, atol=1e-12)


def test_what_is_not_linear_in_the_scores_is_no_part():
    advantage = chain(win_rate(), to_tokens())
    assert not advantage_parts(advantage, advantage.init(), scored(), WEIGHTS).any()


@pytest.mark.parametrize("name", [name for name in recipes.NAMES if recipes.recipe(name)().advantage is not None])
def test_every_chain_has_parts(name):
    algorithm = recipes.recipe(name)()
    batch = scored(algorithm)
    batch = batch._replace(score=batch.scores.nanmean(1))  # from 0 to 1
    parts_BTK = advantage_parts(algorithm.advantage, algorithm.advantage.init(), batch, (0.5, 0.5))
    assert parts_BTK.shape == (*batch.mask.shape, 2) and parts_BTK.isfinite().all()


def test_parts_of_a_loss_keep_the_branch_of_the_whole():
    """Derivatives by log-probabilities: -A_k r where the whole advantage is not clipped, else 0."""
    loss = reduce(clipped_surrogate(0.2, 0.2), token_mean())
    batch = example()
    draw = torch.Generator().manual_seed(0)
    logp_BT = (batch.old_logp + torch.randn(batch.mask.shape, generator=draw, dtype=torch.float64)).requires_grad_()
    parts_BTK = torch.randn(*batch.mask.shape, 2, generator=draw, dtype=torch.float64)
    batch = declare(batch, loss_of_part(loss, 0).fields)
    batch = batch._replace(advantage=parts_BTK.sum(2), reward_parts=parts_BTK)
    slopes = []
    for number in range(2):
        (value,), _ = loss_of_part(loss, number).numerators(logp_BT, batch)
        slopes.append(torch.autograd.grad(value, logp_BT)[0])
    for row, place in batch.mask.nonzero().tolist():
        ratio = (logp_BT - batch.old_logp)[row, place].exp().item()
        whole = batch.advantage[row, place].item()
        clipped = ratio > 1.2 if whole > 0 else ratio < 0.8
        for number in range(2):
            part = parts_BTK[row, place, number].item()
            assert slopes[number][row, place].item() == pytest.approx(0.0 if clipped else -part * ratio, abs=1e-12)
    (value,), _ = loss.numerators(logp_BT, batch)
    torch.testing.assert_close(sum(slopes), torch.autograd.grad(value, logp_BT)[0], rtol=0, atol=1e-12)
