"""Bad arguments are refused where an algorithm is made, and states carry over from batch to batch."""

import pytest
import torch
from pieces import example

from funrl.algos import (
    advantages,
    baselines,
    corrections,
    kl,
    resampling,
    shaping,
    terms,
    terms_covariance,
    token_baselines,
    value,
)
from funrl.algos.compose import corrected
from funrl.algos.core import Signal, chain, needs, needs_of, reduce
from funrl.algos.distillation import distillation
from funrl.algos.gdpo import gdpo
from funrl.algos.grpo import grpo
from funrl.algos.opo import opo
from funrl.algos.reductions import token_mean
from funrl.algos.terms_token import policy_gradient
from funrl.algos.vapo import vapo
from funrl.batch import select

REFUSED = {
    "low is -1": lambda: terms.clipped_surrogate(-1, 0.2),
    r"gae\(gamma=1.5\): give a factor": lambda: advantages.gae(1.5),
    r"gae\(lam=-0.1\): give a factor": lambda: advantages.gae(1.0, -0.1),
    "the clip must be at least 0": lambda: value.clipped_value_loss(-0.5),
    "target=-3, horizon=10000": lambda: shaping.adaptive_kl(0.1, -3),
    "over is 'tokens'": lambda: corrections.importance_weights("tokens"),
    "bounds of the ratio are 2.0 and 1.0": lambda: corrections.reject_ratio("token", 2.0, 1.0),
    "bounds of the ratio are -1": lambda: corrections.importance_weights("token", -1, 1.0),
    "kind is k2 or k3": lambda: corrections.reject_divergence("k1"),
    "over is token, sum, mean or max": lambda: corrections.reject_divergence("k3", "sequence"),
    "low is above high": lambda: shaping.clip_reward(1.0, 0.0),
    "buffer 0 must be above 0": lambda: shaping.overlong_penalty(10, 0),
    "at most the limit 10": lambda: shaping.overlong_penalty(10, 11),
    "give a factor from 0 to 1": lambda: shaping.stop_properly(1.5),
    "there are pow, max_min and max_random": lambda: resampling.resample_rows("power"),
    "are no fields of Batch": lambda: needs("scored"),
    "would both add the gradient": lambda: kl.kl_to_reference("k3+", bias_corrected=True),
    "its gradient has a mean of 0": lambda: distillation(direct=True, kind="k1"),
    "give numbers with commas between": lambda: gdpo("1;2"),
    "piece 1 of the chain goes by signal.weight, which piece 2 makes": lambda: chain(
        corrections.normalise_weights(), corrections.importance_weights()
    ),
    "piece 2 of the chain goes by signal.weight, which piece 3 makes": lambda: chain(
        shaping.to_last_token(),
        chain(advantages.reward_to_go(), token_baselines.optimal_token_baseline()),
        corrections.importance_weights(),
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_arguments_are_refused_at_once(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def test_weights_must_match_the_reward_functions():
    batch = example()
    for piece in (baselines.decoupled_groups([1.0, 2.0]), baselines.weighted_scores([1.0] * 4)):
        with pytest.raises(ValueError, match=r"weights for 3 reward functions: batch.scores is \[7, 3\]"):
            piece.update(Signal(batch.score, batch.mask), piece.init(), batch)


def test_a_batch_without_groups_is_told_so():
    batch = example()._replace(group=None)
    with pytest.raises(ValueError, match="group is None"):
        advantages.group_center().update(Signal(batch.score, batch.mask), (), batch)


ON_TOKENS = {
    "gae": advantages.gae,
    "reward_to_go": advantages.reward_to_go,
    "whiten": advantages.whiten,
    "optimal_token_baseline": token_baselines.optimal_token_baseline,
    "implicit_rewards": token_baselines.implicit_rewards,
    "select_highest_covariance": terms_covariance.select_highest_covariance,
    "select_covariance_between": terms_covariance.select_covariance_between,
}
ON_ROWS = {
    "to_tokens": shaping.to_tokens,
    "to_last_token": shaping.to_last_token,
    "overlong_penalty": lambda: shaping.overlong_penalty(8, 4),
    "stop_properly": lambda: shaping.stop_properly(0.5),
    "group_center": advantages.group_center,
    "group_scale": advantages.group_scale,
    "batch_scale": advantages.batch_scale,
    "leave_one_out": baselines.leave_one_out,
    "length_weighted_center": baselines.length_weighted_center,
    "decoupled_groups": baselines.decoupled_groups,
}


@pytest.mark.parametrize("name", [*ON_TOKENS, *ON_ROWS])
def test_outcomes_and_token_rewards_are_told_apart_even_where_rows_are_as_many_as_tokens(name):
    whole = example()
    for width in (13, 7):
        per_token = {k: x[:, :width] for k, x in whole._asdict().items() if x is not None and x.shape[1:] == (13,)}
        batch = whole._replace(**per_token)
        score, mask = batch.score, batch.mask
        wrong, piece = (score, ON_TOKENS[name]()) if name in ON_TOKENS else (mask * 1.0, ON_ROWS[name]())
        ways_out = (r"outcomes \[7\]: put to_tokens\(\)", rf"rewards \[7, {width}\]: put it before")
        with pytest.raises(ValueError, match=ways_out[name in ON_ROWS]):
            piece.update(Signal(wrong, mask), piece.init(), batch)
        loss = reduce(policy_gradient(), token_mean())
        with pytest.raises(ValueError, match=r"batch.advantage is \[7\] and not \[B, T\]; to_tokens\(\)"):
            loss(batch.old_logp, batch._replace(advantage=score))


def test_weights_that_no_piece_makes_are_reported_before_the_run():
    assert "weight" in needs_of(corrected(grpo(), corrections.normalise_weights()))
    assert "weight" not in needs_of(
        corrected(grpo(), corrections.importance_weights(), corrections.normalise_weights())
    )


def rejecting(make, *pieces):
    """Advantages of an algorithm with and without a rejection of tokens before its chain."""
    batch, outs = example(), []
    for first in ((), (corrections.reject_ratio("token", 0.9, 1.3),)):
        algorithm = corrected(make(), *first, *pieces)
        signal, _ = algorithm.advantage.update(Signal(batch.score, batch.mask), algorithm.advantage.init(), batch)
        outs.append(signal)
    plain, rejected = outs
    assert 0 < rejected.mask.sum() < plain.mask.sum()
    return plain, rejected


@pytest.mark.parametrize(
    ("make", "pieces"),
    [
        (lambda: grpo(), (shaping.overlong_penalty(11, 8, 0.5),)),
        (lambda: opo(), ()),
    ],
    ids=["overlong penalty", "length-weighted baseline"],
)
def test_lengths_are_those_of_what_was_sampled_whatever_was_rejected(make, pieces):
    plain, rejected = rejecting(make, *pieces)
    torch.testing.assert_close(rejected.x[rejected.mask], plain.x[rejected.mask], rtol=0, atol=0)


def test_the_length_of_an_adaptive_lambda_is_that_of_what_was_sampled():
    seen = []

    def lam(lengths):
        seen.append(lengths[:, 0].tolist())
        return torch.ones_like(lengths)

    batch = example()
    piece = chain(corrections.mask_truncated(), shaping.to_last_token(), advantages.gae(1.0, lam))
    piece.update(Signal(batch.score, batch.mask), piece.init(), batch)
    assert seen == [batch.mask.sum(1).tolist()]
    rejecting(vapo)  # and a whole algorithm takes it


def test_everything_rejected_leaves_numbers():
    """No token is left: every advantage is 0, and a loss has a value of 0 and gradients of 0."""
    batch = example()._replace(truncated=torch.ones(7, dtype=torch.bool))
    for make in (grpo, opo, vapo, gdpo):
        algorithm = corrected(make(), corrections.mask_truncated())
        signal, _ = algorithm.advantage.update(Signal(batch.score, batch.mask), algorithm.advantage.init(), batch)
        assert not signal.mask.any() and (signal.x == 0).all()
        logp = batch.old_logp.clone().requires_grad_()
        made = batch._replace(mask=signal.mask, advantage=signal.x, returns=signal.returns, weight=signal.weight)
        fractions, metrics = algorithm.policy_loss(logp, made)
        value = sum(f.value for f in fractions)
        assert value == 0 and all(m.value == 0 for m in metrics.values())
        assert (torch.autograd.grad(value, logp)[0] == 0).all()


def test_pieces_before_gdpo_reach_its_advantages():
    batch = example()
    none, penalty = (
        corrected(gdpo("1,1,0.5"), *pieces).advantage for pieces in ((), (shaping.overlong_penalty(11, 8, 2.0),))
    )
    without, with_penalty = (p.update(Signal(batch.score, batch.mask), p.init(), batch)[0].x for p in (none, penalty))
    lower = (with_penalty - without).sum(1)
    assert lower[2] < 0 < lower[0]  # row 2 is 11 tokens long; the mean of its group, 7, falls too


def test_a_corrected_kl_is_unbiased_with_k1_and_k3():
    """Over a vocabulary of 6, the mean over the old policy's tokens of value and gradient, by enumeration."""
    draw = torch.Generator().manual_seed(4)
    logits, old, ref = (torch.randn(6, generator=draw, dtype=torch.float64) for _ in range(3))
    leaf = logits.requires_grad_()
    logp = leaf.log_softmax(0)
    exact = (logp.exp() * (logp - ref.log_softmax(0))).sum()
    (slope,) = torch.autograd.grad(exact, leaf, retain_graph=True)
    row = {"old_logp": old.log_softmax(0)[None], "ref_logp": ref.log_softmax(0)[None]}
    batch = select(example(), slice(0, 1))._replace(mask=torch.ones(1, 6, dtype=torch.bool), **row)
    biased = set()
    for kind in kl.KINDS:
        loss, _ = kl.kl_to_reference(kind, bias_corrected=True)(logp[None], batch)
        mean = (row["old_logp"].exp() * loss).sum()
        (got,) = torch.autograd.grad(mean, leaf, retain_graph=True)
        right = torch.allclose(mean, exact, rtol=1e-12) and torch.allclose(got, slope, rtol=1e-10)
        biased |= set() if right else {kind}
    assert biased == {"k2", "abs"}


def test_normalise_weights_needs_weights():
    batch = example()
    with pytest.raises(ValueError, match="comes after importance_weights"):
        corrections.normalise_weights().update(Signal(batch.score, batch.mask), (), batch)


def test_running_statistics_of_parts_are_those_of_the_whole():
    piece = shaping.running_normalise()
    scores = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0], dtype=torch.float64)
    state = piece.init()
    for part in (scores[:2], scores[2:3], scores[3:]):
        mask = torch.ones(len(part), 1, dtype=torch.bool)
        signal, state = piece.update(Signal(part, mask), state, example())
    rows, mean, squares = state
    assert rows == 7
    torch.testing.assert_close(mean, scores.mean())
    torch.testing.assert_close(squares / rows, scores.var(correction=0))
    torch.testing.assert_close(signal.x, (scores[3:] - scores.mean()) / (scores.var(correction=0) + 1e-8).sqrt())


def test_rejected_tokens_take_their_weights_and_advantages_with_them():
    batch = example()
    piece = chain(
        shaping.to_tokens(),
        corrections.importance_weights("token", 0.0, 5.0),
        corrections.reject_ratio("token", 0.9, 1.3),
        corrections.normalise_weights(),
    )
    signal, _ = piece.update(Signal(batch.score, batch.mask), piece.init(), batch)
    ratio = (batch.old_logp - batch.rollout_logp).exp()
    kept = batch.mask & (ratio >= 0.9) & (ratio <= 1.3)
    assert 0 < kept.sum() < batch.mask.sum()
    assert torch.equal(signal.mask, kept)
    assert (signal.weight[~kept] == 0).all() and (signal.x[~kept] == 0).all()
    torch.testing.assert_close(signal.weight[kept], ratio[kept] / ratio[kept].mean())
    lost = signal.metrics["rollout_corr/rejected"]
    assert lost.num == (batch.mask & ~kept).sum() and lost.den == batch.mask.sum()


def test_pieces_behind_a_rejection_compare_only_what_is_left():
    batch = example()
    piece = chain(shaping.to_tokens(), corrections.mask_truncated(), advantages.whiten())
    signal, _ = piece.update(Signal(batch.score, batch.mask), piece.init(), batch)
    left = signal.x[signal.mask]
    assert len(left) == (batch.mask & ~batch.truncated[:, None]).sum()
    torch.testing.assert_close(left.mean(), torch.zeros((), dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(left.var(), torch.ones((), dtype=torch.float64), atol=1e-6, rtol=0)


def test_resampled_rows_go_to_states_that_can_be_saved():
    piece = resampling.resample_rows(seed=1)
    batch, state = example(), piece.init()
    draws = []
    for _ in range(4):
        signal, state = piece.update(Signal(batch.score, batch.mask), state, batch)
        draws.append(signal.rows.tolist())
    assert int(state) == 4
    resumed, _ = piece.update(Signal(batch.score, batch.mask), torch.tensor(3), batch)
    assert resumed.rows.tolist() == draws[3]
