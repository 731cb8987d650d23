"""Advantages over the segments of compacted episodes, beside loops over episodes."""

import pytest
import torch
from test_episodes import batch_of, random_episodes

from funrl import algos
from funrl.algos.applying import apply_advantage
from funrl.algos.core import reduce
from funrl.algos.losses.reductions import sequence_mean, token_mean
from funrl.batch import Batch
from funrl.testing.subjects import loss_parts


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("adaptive", [False, True])
def test_later_segments_discount_earlier_ones(seed, adaptive):
    units = random_episodes(seed)
    order = torch.randperm(sum(len(masks) for *_, masks in units), generator=torch.Generator().manual_seed(seed))
    decay = algos.length_adaptive(0.3) if adaptive else 0.8
    piece = algos.chain(algos.to_tokens(), algos.discount_segments(0.9, decay))
    batch = batch_of(units)
    after, _, _ = apply_advantage(piece, piece.init(), batch)
    assert len(order) == len(batch.mask)
    row = 0
    for *_, score, masks in units:
        lengths = [sum(mask) for mask in masks]
        own = max(0.0, 1 - 1 / (0.3 * max(sum(lengths), 1))) if adaptive else 0.8
        for number, mask in enumerate(masks):
            factor = (0.9 * own) ** sum(lengths[number + 1 :])
            want = [score * factor if on else 0.0 for on in mask]
            assert torch.allclose(after.advantage[row], torch.tensor(want, dtype=torch.float64), atol=1e-14)
            row += 1


def with_summaries(batch):
    """The last token of every row with two or more is a summary."""
    mask = batch.mask
    last = mask & (mask.int().flip(1).cumsum(1).flip(1) == 1) & (mask.sum(1, keepdim=True) > 1)
    return batch._replace(author=torch.where(last, 4, mask.long())), last


@pytest.mark.parametrize("seed", range(4))
def test_masked_summaries_are_in_no_denominator_and_count_as_sampled(seed):
    batch, summaries = with_summaries(batch_of(random_episodes(seed)))
    recipes = {trained: algos.compaction(summaries=trained) for trained in (True, False)}
    batch = batch._replace(value=torch.linspace(-1, 1, batch.mask.numel(), dtype=torch.float64).view(batch.mask.shape))
    whole, masked = (apply_advantage(made.advantage, made.advantage.init(), batch)[0] for made in recipes.values())
    assert torch.equal(masked.mask, batch.mask & ~summaries) and torch.equal(whole.mask, batch.mask)
    assert torch.equal(masked.advantage, torch.where(summaries, 0, whole.advantage))
    assert torch.equal(masked.returns[masked.mask], whole.returns[masked.mask])
    units = {(e, a) for e, a in zip(batch.episode.tolist(), batch.agent.tolist(), strict=True)}
    for unit in units:
        own = [i for i in range(len(batch.mask)) if (int(batch.episode[i]), int(batch.agent[i])) == unit]
        left = sum(int(masked.mask[i].sum()) for i in own)
        assert all(int(masked.episode_tokens[i]) == left for i in own)
    x = torch.ones(batch.mask.shape, dtype=torch.float64)
    tokens = reduce(lambda x, batch: (x, {}), token_mean()).denominators(masked)[0]
    assert float(tokens) == int(masked.mask.sum())
    loss = reduce(lambda x, batch: (x, {}), sequence_mean())
    (fraction,), _ = loss_parts(loss, x, masked)
    assert float(fraction.value) == pytest.approx(1.0, abs=1e-12)


def test_bad_factors_are_refused():
    for arguments in ({"gamma": 1.1}, {"gae_lambda": -0.1}):
        with pytest.raises(ValueError, match="it must be from 0 to 1"):
            algos.discount_segments(**arguments)


@pytest.mark.parametrize("by_size", [False, True])
def test_segments_of_an_episode_are_one_path_of_its_prompt_and_share_no_beginning_with_others(by_size):
    """Three episodes of a prompt, of which two have a second segment, whose first turn is the episode's third."""
    mask = torch.tensor([[0, 1, 0, 1], [0, 1, 0, 1], [0, 1, 0, 1], [0, 1, 0, 1], [0, 1, 0, 0]], dtype=torch.bool)
    turn = torch.tensor([[0, 0, 1, 1], [2, 2, 3, 3], [0, 0, 1, 1], [2, 2, 3, 3], [0, 0, 1, 1]])
    episode = torch.tensor([0, 0, 1, 1, 2])
    rewards = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    batch = Batch(
        tokens=torch.arange(20).view(5, 4),
        mask=mask,
        length=torch.full((5,), 4),
        group=torch.zeros(5, dtype=torch.int64),
        episode=episode,
        agent=torch.zeros(5, dtype=torch.int64),
        score=rewards[episode],
        turn=turn,
    )
    piece = algos.subtree_baselines(by_size)
    after, _, _ = apply_advantage(piece, piece.init(), batch)
    want = torch.where(mask, (rewards - rewards.mean())[episode][:, None], 0)
    torch.testing.assert_close(after.advantage, want, rtol=0, atol=1e-12)
