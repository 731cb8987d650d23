"""Scores and gradients do not depend on micro-batches, padding, or which rank works on which rows."""

import functools
from typing import Any

import pytest
import torch
from small_runs import GRPO, PPO, assert_same, begin, gap, gradients, run_steps, scored_batch, small_job

from funrl import trees
from funrl.algos.core import Fraction, needs, token_fraction
from funrl.batch import Batch, select
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.mesh.rules import shard
from funrl.models.scores import token_scores
from funrl.trainer import ensemble, phases
from funrl.trainer.step import gradient, score

MANY = 1 << 20  # tokens: everything in one micro-batch
FEW = 24  # tokens: one or two rows in a micro-batch
PLAIN: dict[str, Any] = {"batch_prompts": 5, "samples_per_prompt": 3, "max_new_tokens": 6}


@functools.cache
def scored(compose, mesh="dp1"):
    """A job, its models, its state and a batch, after one step's rollout. Longer prompts make rows of two widths."""
    job = small_job(compose, mesh=mesh, **PLAIN)
    job = job._replace(task=job.task._replace(prompts=[*map(longer, job.task.prompts[:40])]))
    models, state = begin(job, single())
    critic = state.critic and state.critic._replace(params=trees.map(jiggle, state.critic.params))
    state = state._replace(policy=state.policy._replace(params=trees.map(jiggle, state.policy.params)), critic=critic)
    batch, state, _ = scored_batch(job, models, state)
    assert len(set(batch.length.tolist())) > 4 and batch.tokens.shape[1] > 16
    return job, models, state, batch


def longer(example):
    """Some prompts several times as long: micro-batches of different widths."""
    return example._replace(tokens=example.tokens * (1 + len(example.tokens) % 3))


def jiggle(x):
    """Weights near x: a critic whose head is not 0, a policy that is not the one that sampled."""
    noise = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(x.numel()))
    return x + 0.3 * noise


def compositions():
    entropy = functools.partial(PPO, entropy_coef=0.1)
    return pytest.mark.parametrize("compose", [PPO, entropy, GRPO], ids=["ppo", "ppo with entropy", "grpo"])


def moved(state):
    """The state after some updates: ratios are not 1, values not the old ones."""
    policy = state.policy._replace(params=trees.map(lambda x: jiggle(jiggle(x) - 0.25 * x), state.policy.params))
    return state._replace(policy=policy)


def assert_equal(a, b, tolerance=1e-12):
    assert gap(a.policy, b.policy) < tolerance
    assert abs(a.policy_loss - b.policy_loss) < tolerance
    assert (a.critic is None) == (b.critic is None)
    if a.critic is not None:
        assert gap(a.critic, b.critic) < tolerance
        assert abs(a.critic_loss - b.critic_loss) < tolerance
    assert a.metrics == pytest.approx(b.metrics, abs=tolerance)


def norm(tree):
    return torch.cat([x.reshape(-1) for x in trees.leaves(tree)]).norm().item()


@compositions()
def test_micro_batches_change_nothing(compose):
    job, models, state, batch = scored(compose)
    state = moved(state)
    whole = gradients(job, models, state, batch, MANY)
    assert norm(whole.policy) > 1e-2
    assert whole.critic is None or norm(whole.critic) > 1e-2
    for budget in (1, FEW, 100):
        assert_equal(gradients(job, models, state, batch, budget), whole)


@compositions()
def test_padding_changes_nothing(compose):
    """Wider rows, other pad tokens, and anything at all in the fields outside of the mask."""
    job, models, state, batch = scored(compose)
    state = moved(state)
    whole = gradients(job, models, state, batch, MANY)
    at_T = torch.arange(batch.tokens.shape[1] + 24)

    def widen(x):
        filler = 7 if x.dtype == torch.int64 else False if x.dtype == torch.bool else float("nan")
        return torch.nn.functional.pad(x, (0, 24), value=filler)

    wide = batch._replace(
        **{k: widen(x) for k, x in batch._asdict().items() if x is not None and is_of_tokens(k, x, batch)}
    )
    beyond = at_T >= batch.length[:, None]
    wide = wide._replace(tokens=torch.where(beyond, 11, wide.tokens))
    for budget in (MANY, FEW):
        assert_equal(gradients(job, models, state, wide, budget), whole)


def is_of_tokens(name, x, batch):
    return x.ndim == 2 and x.shape[1] == batch.tokens.shape[1] and name != "scores"


@compositions()
def test_the_order_of_rows_changes_nothing(compose):
    job, models, state, batch = scored(compose)
    order = torch.randperm(len(batch.tokens), generator=torch.Generator().manual_seed(0))
    shuffled = select(batch, order)
    assert_equal(gradients(job, models, state, shuffled, 100), gradients(job, models, state, batch, MANY))


def test_the_gradient_is_that_of_the_loss_written_out():
    """GRPO on one batch: the mean over rows of the mean over tokens of -min(r A, clip(r) A) + beta k3."""
    job, models, state, batch = scored(functools.partial(GRPO, kl_coef=0.1, dual_clip=1e9))
    state = moved(state)

    def loss(params):
        logp = token_scores(job.config, params, batch.tokens).logp
        total = torch.zeros((), dtype=torch.float64)
        for row in range(len(batch.tokens)):
            at = batch.mask[row]
            ratio, adv = (logp - batch.old_logp)[row][at].exp(), batch.advantage[row][at]
            ahead = (batch.ref_logp - logp)[row][at]
            per_token = -torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv) + 0.1 * (ahead.exp() - 1 - ahead)
            total = total + per_token.mean() / len(batch.tokens)
        return total, ()

    (value, _), grads = trees.value_and_grad(loss)(state.policy.params)
    ours = gradients(job, models, state, batch, 100)
    assert ours.policy_loss.item() == pytest.approx(value.item(), abs=1e-12)
    assert gap(ours.policy, grads) < 1e-12
    assert ours.metrics["actor/pg_clipfrac"] > 0.1  # the clip was at work


def test_scores_of_several_micro_batches_are_those_of_one():
    job, _, state, batch = scored(PPO)

    def forward(params, rows):
        found = token_scores(job.config, params, rows.tokens, wanted_BT=rows.mask, want=("logp", "entropy"))
        return [found.logp, found.entropy]

    one = score(forward, state.policy.params, batch, single(), MANY)
    for budget in (1, FEW, 100):
        for a, b in zip(score(forward, state.policy.params, batch, single(), budget), one, strict=True):
            assert a.shape == batch.tokens.shape and not a.requires_grad
            assert (a - b).abs().max() < 1e-12
    assert one[1][batch.mask].min() > 0


def linear(rows: Batch, params):
    """A model that can be checked by hand: the score of token v is params[v]."""
    return params["w"][rows.tokens]


@needs("advantage")
def weighted_mean(logp_BT, batch):
    """The mean over tokens of A logp, and how many micro-batches there were."""
    seen = Fraction(logp_BT.new_ones(()), logp_BT.new_zeros(()))
    fraction = token_fraction(logp_BT * torch.nan_to_num(batch.advantage), batch.mask)
    return (fraction,), {"pieces": seen, "mean": Fraction(fraction.num.detach(), fraction.den)}


def by_hand(rows, width=8):
    """A batch of `rows` rows, its parameters and its gradient: A of a token is its row's number plus 1."""
    length = torch.tensor([1 + i % width for i in range(rows)])
    tokens = torch.arange(rows * width).view(rows, width) % 5
    mask = (torch.arange(width) < length[:, None]) & (torch.arange(width) >= length[:, None] // 2)
    advantage = torch.where(mask, torch.arange(rows)[:, None] + 1.0, float("nan")).double()
    expected = torch.zeros(5, dtype=torch.float64)
    for i in range(rows):
        for t in range(width):
            if mask[i, t]:
                expected[tokens[i, t]] += (i + 1) / int(mask.sum())
    return Batch(tokens, mask, length=length, advantage=advantage), {"w": torch.arange(5).double()}, {"w": expected}


def hand_gradient(mesh, rows, budget):
    batch, params, _ = by_hand(rows)

    def objective(params, piece, dens):
        fractions, metrics = weighted_mean(linear(piece, params), piece)
        return fractions[0].over(dens[0]), (fractions, metrics)

    old = torch.zeros(batch.tokens.shape, dtype=torch.float64)
    grads, metrics, loss = gradient(objective, weighted_mean, params, batch, old, mesh, budget)
    return grads, {k: float(v) for k, v in metrics.items()}, float(loss)


@pytest.mark.gloo
def test_data_ranks_without_rows_contribute_nothing_and_nothing_hangs():
    """One to nine rows over four data ranks: the closed form, on every rank's parameters."""
    cases = [(rows, budget) for rows in (1, 2, 3, 4, 5, 9) for budget in (8, 16, MANY)]
    over_ranks = launch(
        lambda mesh: [hand_gradient(mesh, *case) for case in cases], {**single().sizes, "data": 4}, "cpu"
    )
    for (rows, budget), (grads, metrics, loss) in zip(cases, over_ranks, strict=True):
        _, params, expected = by_hand(rows)
        value = float((expected["w"] * params["w"]).sum())
        assert gap(grads, expected) < 1e-14, (rows, budget)
        assert (loss, metrics["mean"]) == pytest.approx((value, value), abs=1e-13)
        alone = hand_gradient(single(), rows, budget)
        assert gap(alone[0], expected) < 1e-14
        if rows >= 4:  # equal numbers of micro-batches on every rank
            assert metrics["pieces"] % 4 == 0


@pytest.mark.gloo
@pytest.mark.parametrize("compose", [PPO, GRPO], ids=["ppo", "grpo"])
def test_fewer_rows_than_data_ranks_in_a_mini_batch(compose):
    """Two rows on four data ranks, of two tensor ranks each, with real models: two data ranks only keep pace."""
    one_job, models, state, batch = scored(compose)
    few = select(batch, torch.tensor([0, 7]))
    expected = gradients(one_job, models, state, few, MANY)
    job = one_job._replace(sizes={**one_job.sizes, "data": 4, "tensor": 2})

    def program(mesh):
        here = ensemble.build(job._replace(generate_sizes=job.sizes), mesh, print)
        policy = state.policy._replace(params=shard(state.policy.params, here.policy_layouts, mesh))
        critic = state.critic and state.critic._replace(params=shard(state.critic.params, here.critic_layouts, mesh))
        return gradients(job, here, state._replace(policy=policy, critic=critic), few, 8)

    assert_equal(launch(program, job.sizes, "cpu"), expected, 1e-11)


@pytest.mark.gloo
@pytest.mark.parametrize("mesh", ["dp4", "dp4,tp2"])
def test_a_run_whose_mini_batches_have_fewer_rows_than_ranks(mesh):
    settings = {"batch_prompts": 4, "samples_per_prompt": 2, "minibatches": 7}  # mini-batches of two rows, and of fewer
    assert_same(run_steps(2, mesh=mesh, **settings), run_steps(2, **settings), 1e-9)


@pytest.mark.parametrize("rows, minibatches, sizes", [(8, 2, [4, 4]), (9, 6, [2, 2, 2, 1, 1, 1]), (3, 6, [1, 1, 1])])
def test_a_pass_has_the_mini_batches_of_the_schedule(rows, minibatches, sizes):
    job, whole = small_job(minibatches=minibatches), torch.arange(rows)[:, None]
    parts = phases._mini_batches(job, Batch(whole, torch.ones_like(whole, dtype=torch.bool)), 1, 0)
    assert [len(part.tokens) for part in parts] == sizes
    order = torch.cat([part.tokens for part in parts]).flatten()
    assert order.tolist() != list(range(rows)) and sorted(order.tolist()) == list(range(rows))
