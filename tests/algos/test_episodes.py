"""Chains and reductions on rows of episodes: one number for each agent of an episode, however many rows it has."""

import random

import pytest
import torch

from funrl.algos import (
    Advantage,
    chain,
    count_prompt_tokens,
    group_center,
    group_scale,
    overlong_penalty,
    product_ratio,
    token_mean,
    whiten,
)
from funrl.algos import reduce as reduce_loss
from funrl.algos.advantages.shaping import to_last_token, to_tokens
from funrl.algos.advantages.units import by_unit, episode_fields, units_of
from funrl.algos.applying import apply_advantage
from funrl.algos.losses.likelihood import imitated_tokens, negative_log_likelihood, restrict
from funrl.algos.losses.reductions import constant_mean, prompt_mean, sequence_mean
from funrl.batch import Batch, select, with_rows_spread

T = 12


def random_episodes(seed):
    """Lists of (group, agent, score, row masks) of episodes with 1 to 3 rows for each of 1 or 2 agents."""
    rng = random.Random(seed)
    units = []
    for episode in range(6):
        for agent in range(rng.randint(1, 2)):
            rows = [[rng.random() < 0.5 for _ in range(T)] for _ in range(rng.randint(1, 3))]
            rows[0][rng.randrange(T)] = True
            units.append((episode, episode // 3, agent, rng.choice([0.0, 0.5, 1.0]), rows))
    return units


def batch_of(units):
    rows = [(e, g, a, s, m) for e, g, a, s, masks in units for m in masks]
    mask = torch.tensor([m for *_, m in rows])
    batch = Batch(
        tokens=torch.zeros(len(rows), T, dtype=torch.int64),
        mask=mask,
        length=torch.full((len(rows),), T),
        episode=torch.tensor([r[0] for r in rows]),
        group=torch.tensor([r[1] for r in rows]),
        agent=torch.tensor([r[2] for r in rows]),
        score=torch.tensor([r[3] for r in rows], dtype=torch.float64),
    )
    units_here = units_of(batch)
    return batch._replace(**episode_fields(batch, units_here))


@pytest.mark.parametrize("seed", range(5))
def test_baselines_are_over_group_and_agent_and_each_row_has_its_agents_number(seed):
    units = random_episodes(seed)
    batch = batch_of(units)
    piece = chain(group_center(), overlong_penalty(limit=30, buffer=20), to_tokens())
    after, _, _ = apply_advantage(piece, piece.init(), batch)
    row = 0
    for _, group, agent, score, masks in units:
        others = [s for _, g, a, s, _ in units if (g, a) == (group, agent)]
        count = sum(map(sum, masks))
        expected = score - sum(others) / len(others) - max(0, count - 10) / 20
        for mask in masks:
            x = after.advantage[row]
            assert torch.allclose(x[torch.tensor(mask)], torch.tensor(expected, dtype=torch.float64), atol=1e-12)
            assert (x[~torch.tensor(mask)] == 0).all()
            row += 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("form", ["sequence_mean", "constant_mean", "token_mean"])
def test_losses_are_those_of_a_loop_over_episodes(seed, form):
    units = random_episodes(seed)
    batch = batch_of(units)
    x = torch.randn(batch.mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    loss = reduce_loss(
        lambda x, batch: (x, {}),
        {"sequence_mean": sequence_mean(), "constant_mean": constant_mean(7.0), "token_mean": token_mean()}[form],
    )
    row = 0
    totals, counts = [], []
    for *_, masks in units:
        values = [x[row + i, t].item() for i, mask in enumerate(masks) for t in range(T) if mask[t]]
        row += len(masks)
        totals.append(sum(values))
        counts.append(len(values))
    expected = {
        "sequence_mean": sum(t / n for t, n in zip(totals, counts, strict=True)) / len(units),
        "constant_mean": sum(totals) / 7 / len(units),
        "token_mean": sum(totals) / sum(counts),
    }[form]
    assert loss(x, batch)[0].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_a_mean_over_prompts_counts_the_tokens_of_all_episodes_of_a_prompt(seed):
    """The parts of a batch, rows of one episode among them, add up to the mean over groups and agents."""
    units = random_episodes(seed)
    batch = batch_of(units)
    x = torch.randn(batch.mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    piece = chain(group_center(), to_tokens(), count_prompt_tokens())
    batch, _, _ = apply_advantage(piece, piece.init(), batch)
    loss = reduce_loss(lambda x, batch: (x, {}), prompt_mean())
    row = 0
    groups = {}
    for _, group, agent, _, masks in units:
        values = [x[row + i, t].item() for i, mask in enumerate(masks) for t in range(T) if mask[t]]
        groups.setdefault((group, agent), []).extend(values)
        row += len(masks)
    means = [sum(values) / len(values) for values in groups.values() if values]
    assert loss(x, batch)[0].item() == pytest.approx(sum(means) / len(means), abs=1e-12)
    parts = [slice(0, None, 2), slice(1, None, 2)]
    whole = torch.stack([loss.numerators(x[part], select(batch, part))[0][0] for part in parts]).sum()
    count = torch.stack([loss.denominators(select(batch, part))[0] for part in parts]).sum()
    assert count.item() == pytest.approx(len(means), abs=1e-12)
    assert (whole / count).item() == pytest.approx(sum(means) / len(means), abs=1e-12)


def test_packed_rows_give_the_same_sums_as_rows_side_by_side():
    batch = batch_of(random_episodes(1))
    x = torch.randn(batch.mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    B = len(x)
    loss = reduce_loss(lambda x, batch: (x, {}), sequence_mean())
    wide = {
        name: getattr(batch, name)[:, None].expand(B, T).reshape(1, -1) for name in ("episode_tokens", "episode_first")
    }
    packed = Batch(
        tokens=batch.tokens.reshape(1, -1),
        mask=batch.mask.reshape(1, -1),
        segments=(1 + torch.arange(B))[:, None].expand(B, T).reshape(1, -1),
        **wide,
    )
    assert loss(x.reshape(1, -1), packed)[0].item() == pytest.approx(loss(x, batch)[0].item(), abs=1e-14)


def test_a_fork_changes_neither_baselines_nor_denominators():
    """An episode's second turn is told again in a row of its own; the shared first turn is context there."""
    first, second = [True] * 4 + [False] * 8, [False] * 6 + [True] * 4 + [False] * 2
    both = [a or b for a, b in zip(first, second, strict=True)]
    others = [(1, 0, 0, 1.0, [both]), (2, 0, 0, 0.5, [first])]
    whole = batch_of([(0, 0, 0, 0.0, [both]), *others])
    forked = batch_of([(0, 0, 0, 0.0, [first, second]), *others])
    piece = chain(group_center(), group_scale(), to_tokens())
    results = [apply_advantage(piece, piece.init(), batch)[0] for batch in (whole, forked)]
    for form in (sequence_mean(), constant_mean(5.0), token_mean()):
        loss = reduce_loss(lambda x, batch: (x * batch.advantage, {}), form)
        values = [loss(torch.ones(batch.mask.shape, dtype=torch.float64), batch) for batch in results]
        assert values[0][0].item() == pytest.approx(values[1][0].item(), abs=1e-14)
        assert loss.denominators(results[0]) == loss.denominators(results[1])


def test_an_episode_of_one_row_is_a_row_to_the_bit():
    units = [(i, i // 3, 0, s, [masks[0]]) for i, (_, _, _, s, masks) in enumerate(random_episodes(3))]
    batch = batch_of(units)
    plain = batch._replace(episode=None, agent=None, episode_tokens=None, episode_first=None)
    piece = chain(group_center(), group_scale(), to_last_token(), whiten())
    a, b = (apply_advantage(piece, piece.init(), rows)[0] for rows in (batch, plain))
    assert torch.equal(a.advantage, b.advantage)
    loss = reduce_loss(lambda x, batch: (x * batch.advantage, {}), token_mean() + constant_mean(3.0))
    x = torch.randn(batch.mask.shape, dtype=torch.float64)
    assert torch.equal(loss(x, a)[0], loss(x, b)[0])


def test_the_number_of_a_unit_goes_with_a_correction_of_the_mask():
    """A row whose tokens are all rejected still counts its episode, if another row has tokens left."""
    batch = batch_of([(0, 0, 0, 1.0, [[True] * T, [True] * 2 + [False] * 10]), (1, 0, 0, 0.0, [[True] * T])])
    mask = batch.mask.clone()
    mask[0] = False
    fields = episode_fields(batch._replace(mask=mask), units_of(batch))
    assert fields["episode_tokens"].tolist() == [2, 2, T] and fields["episode_first"].tolist() == [True, False, True]
    loss = reduce_loss(lambda x, batch: (x, {}), sequence_mean())
    assert [d.item() for d in loss.denominators(batch._replace(mask=mask, **fields))] == [2.0]


def test_units_are_in_the_order_of_episode_and_agent_wherever_their_rows_are():
    batch = batch_of([(1, 0, 1, 0.3, [[True] * T]), (0, 0, 0, 0.1, [[True] * T] * 2), (1, 0, 0, 0.2, [[True] * T])])
    seen = by_unit(batch, units_of(batch))
    assert seen.score.tolist() == [0.1, 0.2, 0.3] and seen.length.tolist() == [2 * T, T, T]
    assert seen.group.tolist() == [0, 0, 1]
    assert seen.across.own(seen.score).tolist() == batch.score.tolist()
    assert seen.across.sums(batch.mask).tolist() == [2 * T, T, T]


def test_a_restricted_loss_of_episodes_of_one_row_is_that_of_rows():
    """Tokens that are left out are in no mean, and a sequence without any left is not counted."""
    rows = random_episodes(0)
    batch = batch_of([(e, g, 0, s, masks[:1]) for e, g, a, s, masks in rows if a == 0])
    batch = batch._replace(imitated=batch.mask & (batch.group == 0)[:, None] & (torch.arange(T) % 2 == 0))
    loss = restrict(reduce_loss(negative_log_likelihood(), sequence_mean()), imitated_tokens)
    logp_BT = -torch.rand(batch.mask.shape, dtype=torch.float64)
    plain = batch._replace(episode=None, agent=None, episode_tokens=None, episode_first=None)
    assert loss.denominators(batch) == loss.denominators(plain)
    assert loss.numerators(logp_BT, batch)[0] == loss.numerators(logp_BT, plain)[0]


def test_all_rows_of_a_chosen_unit_are_taken_as_often_as_it_is_chosen():
    batch = batch_of([(0, 0, 0, 1.0, [[True] * T] * 2), (1, 0, 0, 0.0, [[True] * T]), (2, 0, 0, 0.5, [[True] * T] * 3)])
    taken = []

    def choose(batch, numbers):
        taken.append(numbers.tolist())
        return batch

    for chosen, expected in (([2, 0, 2], [3, 4, 5, 0, 1, 3, 4, 5]), ([1], [2]), ([], [])):
        pick = Advantage(
            lambda: (), lambda s, state, b, chosen=chosen: (s._replace(rows=torch.tensor(chosen).long()), state)
        )
        piece = chain(pick, to_tokens())
        apply_advantage(piece, piece.init(), batch, choose)
        assert taken.pop() == expected


def test_a_unit_that_is_chosen_twice_is_two():
    """Sums over episodes are not those of two copies."""
    batch = batch_of([(0, 0, 0, 1.0, [[True] * T] * 2), (1, 0, 0, 0.0, [[True] * T])])
    pick = Advantage(lambda: (), lambda s, state, b: (s._replace(rows=torch.tensor([0, 1, 0])), state))
    piece = chain(pick, to_tokens())
    chosen = apply_advantage(piece, piece.init(), batch)[0]
    assert chosen.unit.tolist() == [0, 0, 1, 2, 2]
    old_logp = torch.full(chosen.mask.shape, -1.0, dtype=torch.float64)
    ratio = product_ratio()(old_logp + 0.01, with_rows_spread(chosen._replace(old_logp=old_logp)))
    assert ratio[:, 0].log().tolist() == pytest.approx([0.24, 0.24, 0.12, 0.24, 0.24])
