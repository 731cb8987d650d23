"""Bad arguments are refused where an algorithm is made, and states carry over from batch to batch."""

import dataclasses

import pytest
import torch
from pieces import example

from funrl import algos
from funrl.algos import Signal, chain, corrected, grpo, reads
from funrl.algos.losses.kl import KL_KINDS
from funrl.batch import Batch, as_dict, select

REFUSED = {
    "clip_low is -1": lambda: algos.clipped_surrogate(-1, 0.2),
    r"gae\(gamma=1.5\): it must be from 0 to 1": lambda: algos.gae(1.5),
    r"gae\(gae_lambda=-0.1\): it must be from 0 to 1": lambda: algos.gae(1.0, -0.1),
    r"length_adaptive\(alpha=0\): it must be above 0": lambda: algos.length_adaptive(0),
    "beta is -15: it must be above 0": lambda: algos.flowrl(flow_beta=-15),
    "the clip must be at least 0": lambda: algos.clipped_value_loss(-0.5),
    "kl_target=-3, horizon=10000": lambda: algos.adaptive_kl(0.1, -3),
    "over is 'tokens'": lambda: algos.importance_weights("tokens"),
    "bounds of the ratio are 2.0 and 1.0": lambda: algos.reject_ratio("token", 2.0, 1.0),
    "bounds of the ratio are -1": lambda: algos.importance_weights("token", -1, 1.0),
    "kind is k2, k3 or binary": lambda: algos.reject_divergence("k1"),
    "over is token, sum, mean or max": lambda: algos.reject_divergence("k3", "sequence"),
    "low is above high": lambda: algos.clip_reward(1.0, 0.0),
    "buffer 0 must be above 0": lambda: algos.overlong_penalty(10, 0),
    "at most the limit 10": lambda: algos.overlong_penalty(10, 11),
    "give a factor from 0 to 1": lambda: algos.stop_properly(1.5),
    "use pow, max_min or max_random": lambda: algos.resample_rows("power"),
    "would both add the gradient": lambda: algos.kl_to_reference("k3+", bias_corrected=True),
    "its gradient has a mean of 0": lambda: algos.distillation(direct=True, kind="k1"),
    "give numbers separated by commas": lambda: algos.gdpo("1;2"),
    "give numbers separated by commas, such as 1,0.5": lambda: algos.parse_weights("1,x"),
    "give numbers separated": lambda: algos.parse_weights(""),
    "reward_weights=1,,2": lambda: algos.parse_weights("1,,2"),
    "reward_weights=1,nan": lambda: algos.parse_weights("1,nan"),
    "dual_clip is 1.0": lambda: algos.clipped_surrogate(dual_clip=1.0),
    "delta is 1.4": lambda: algos.clipped_surrogate(clip_high=0.5, delta=1.4),
    "k4": lambda: algos.kl_to_reference("k4"),
    "full": lambda: algos.kl_estimate("full"),
    "beta is 0.0: it must": lambda: algos.direct_reward(0.0),
    "kind is 'js'": lambda: algos.divergence_mask("js"),
    "share is 0.0": lambda: algos.keep_highest_entropy(0.0),
    "beta is 0: it must": lambda: algos.sigmoid_pairs(0),
    "smoothing is 0.5": lambda: algos.robust_pairs(smoothing=0.5),
    "smoothing is 0.0": lambda: algos.exo_pairs(smoothing=0.0),
    "beta is -1.0": lambda: algos.kto_loss(-1.0),
    r"clipped_importance\(clip_low=None, clip_high=-2\)": lambda: algos.clipped_importance(clip_high=-2),
    r"clipped_importance\(clip_low=2, ": lambda: algos.clipped_importance(clip_low=2),
    r"soft_gate\(positive=0, ": lambda: algos.soft_gate(positive=0),
    r"soft_gate\(positive=1.0, negative=-1\)": lambda: algos.soft_gate(negative=-1),
    r"geometric_mean\(clip_low=-1": lambda: algos.geometric_mean(clip_low=-1),
    r"divergence_mask\(low=-1": lambda: algos.divergence_mask(low=-1),
    "cap=-1": lambda: algos.divergence_mask(cap=-1),
    r"max_at_k\(0\)": lambda: algos.max_at_k(0),
    r"quadratic_surrogate\(clip=0\)": lambda: algos.quadratic_surrogate(0),
    "give it to reduce": lambda: algos.prompt_mean().denominators(None, None),
    r"constant_mean\(0\)": lambda: algos.constant_mean(0),
    r"group_scale\(eps=-1\)": lambda: algos.group_scale(-1),
    r"batch_scale\(eps=-1\)": lambda: algos.batch_scale(-1),
    r"best_of_group\(eps=-1\)": lambda: algos.best_of_group(-1),
    r"decoupled_groups\(eps=-1\)": lambda: algos.decoupled_groups(eps=-1),
    r"reject_divergence\(high=-1\)": lambda: algos.reject_divergence(high=-1),
    "divergence is 'kl'; there are": lambda: algos.dpo(divergence="kl"),
    "divergence_alpha is 1": lambda: algos.dpo(divergence="alpha", divergence_alpha=1),
    "length_alpha is 2": lambda: algos.dpo(length_alpha=2),
    r"dpo\(margin=1\): loss 'hinge' does not take it": lambda: algos.dpo("hinge", margin=1),
    "must be one of sigmoid": lambda: algos.dpo("sigmoyd"),
    "aot.* compares sums": lambda: algos.dpo("aot", per_token=True),
    "kl_target=0.1 with kl_coef=0": lambda: algos.ppo(kl_coef=0, kl_target=0.1),
    r"Divergence\(beta=2, ": lambda: algos.gkd(beta=2),
    "the role must be one of the frozen roles reference, teacher": lambda: dataclasses.replace(
        algos.gkd(), divergence=algos.Divergence(role="policy")
    ),
    r"masked_importance\(clip_low=2, ": lambda: algos.masked_importance(2),
    r"masked_importance\(clip_low=0.2, clip_high=-1\)": lambda: algos.masked_importance(clip_high=-1),
    r"future_weighted\(half_life=0, ": lambda: algos.future_weighted(algos.surrogate(), 0),
    r"classification\(tau=0\)": lambda: algos.classification(0),
    r"reject_second_moment\(high=-1\)": lambda: algos.reject_second_moment(-1),
    r"entropy_gated_likelihood\(alpha=-1, ": lambda: algos.entropy_gated_likelihood(-1),
    "beta is 0.0: it must be above 0": lambda: algos.optimal_value_baseline(0.0),
    r"flow_balance\(clip_low=-1, clip_high=0.28\): both must be at least 0": lambda: algos.flow_balance(-1),
    "beta is -2: it must be above 0": lambda: algos.log_ratio_regression(-2),
    "beta is -3: it must be above 0": lambda: algos.group_log_ratio(-3),
    r"weigh_demonstrations\(peak=2, ": lambda: algos.weigh_demonstrations(2),
    r"weigh_demonstrations\(.* decay=-1\)": lambda: algos.weigh_demonstrations(decay=-1),
    "rest=True, kind=None": lambda: algos.distillation(rest=True),
    "there is no recipe 'grppo'": lambda: algos.recipe("grppo"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_arguments_are_refused_at_once(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def test_weights_must_match_the_reward_functions():
    batch = example()
    for piece in (algos.decoupled_groups([1.0, 2.0]), algos.weighted_scores([1.0] * 4)):
        with pytest.raises(ValueError, match=r"weights for 3 reward functions: batch.scores is \[7, 3\]"):
            piece.update(Signal(batch.score, batch.mask), piece.init(), batch)


def test_numbers_with_commas_between_are_weights():
    assert algos.parse_weights("1, -0.5,2e-1") == (1.0, -0.5, 0.2)


def test_adaptive_coefficients():
    """beta is multiplied by 1 + clip(KL / target - 1, -0.2, 0.2) rows / horizon; by hand, and at the clip."""
    control = algos.adaptive_kl(0.1, kl_target=2.0, horizon=100)
    beta = control.init()
    assert beta.item() == 0.1
    close = control.update(beta, torch.tensor(2.2, dtype=torch.float64), 10).item()
    assert abs(close - 0.1 * (1 + 0.1 * 10 / 100)) < 1e-15
    assert (
        abs(control.update(beta, torch.tensor(99.0, dtype=torch.float64), 10).item() - 0.1 * (1 + 0.2 * 10 / 100))
        < 1e-15
    )
    assert (
        abs(control.update(beta, torch.tensor(0.0, dtype=torch.float64), 10).item() - 0.1 * (1 - 0.2 * 10 / 100))
        < 1e-15
    )
    fixed = algos.fixed_kl(0.3)
    assert fixed.update(fixed.init(), torch.tensor(99.0, dtype=torch.float64), 10).item() == 0.3


ON_TOKENS = {
    "gae": algos.gae,
    "reward_to_go": algos.reward_to_go,
    "turn_center": algos.turn_center,
    "turn_gae": algos.turn_gae,
    "whiten": algos.whiten,
    "optimal_token_baseline": algos.optimal_token_baseline,
    "implicit_rewards": algos.implicit_rewards,
    "select_highest_covariance": algos.select_highest_covariance,
    "select_covariance_between": algos.select_covariance_between,
}
ON_ROWS = {
    "to_tokens": algos.to_tokens,
    "to_last_token": algos.to_last_token,
    "overlong_penalty": lambda: algos.overlong_penalty(8, 4),
    "stop_properly": lambda: algos.stop_properly(0.5),
    "group_center": algos.group_center,
    "group_scale": algos.group_scale,
    "batch_scale": algos.batch_scale,
    "leave_one_out": algos.leave_one_out,
    "length_weighted_center": algos.length_weighted_center,
    "decoupled_groups": algos.decoupled_groups,
}


@pytest.mark.parametrize("name", [*ON_TOKENS, *ON_ROWS])
def test_outcomes_and_token_rewards_are_told_apart_even_where_rows_are_as_many_as_tokens(name):
    whole = example()
    for width in (13, 7):
        per_token = {k: x[:, :width] for k, x in as_dict(whole).items() if x.shape[1:] == (13,)}
        batch = whole._replace(**per_token)
        score, mask = batch.score, batch.mask
        wrong, piece = (score, ON_TOKENS[name]()) if name in ON_TOKENS else (mask * 1.0, ON_ROWS[name]())
        ways_out = (r"outcomes \[7\]: put to_tokens\(\)", rf"rewards \[7, {width}\]: put it before")
        with pytest.raises(ValueError, match=ways_out[name in ON_ROWS]):
            piece.update(Signal(wrong, mask), piece.init(), batch)
        loss = algos.reduce(algos.policy_gradient(), algos.token_mean())
        with pytest.raises(ValueError, match=r"batch.advantage is \[7\] and not \[B, T\]: add to_tokens\(\)"):
            loss(batch.old_logp, batch._replace(advantage=score))


def test_weights_that_no_piece_makes_are_found():
    assert "weight" in reads(corrected(grpo(), algos.normalise_weights())).required
    both = corrected(grpo(), algos.importance_weights(), algos.normalise_weights())
    assert "weight" not in reads(both).required


def rejecting(make, *pieces):
    """Advantages of an algorithm with and without a rejection of tokens before its chain."""
    batch, outs = example(), []
    for first in ((), (algos.reject_ratio("token", 0.9, 1.3),)):
        algorithm = corrected(make(), *first, *pieces)
        signal, _ = algorithm.advantage.update(Signal(batch.score, batch.mask), algorithm.advantage.init(), batch)
        outs.append(signal)
    plain, rejected = outs
    assert 0 < rejected.mask.sum() < plain.mask.sum()
    return plain, rejected


@pytest.mark.parametrize(
    ("make", "pieces"),
    [
        (lambda: grpo(), (algos.overlong_penalty(11, 8, 0.5),)),
        (lambda: algos.opo(), ()),
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
    piece = chain(algos.mask_truncated(), algos.to_last_token(), algos.gae(1.0, lam))
    piece.update(Signal(batch.score, batch.mask), piece.init(), batch)
    assert seen == [batch.mask.sum(1).tolist()]
    rejecting(algos.vapo)  # and a whole algorithm takes it


def test_everything_rejected_leaves_numbers():
    """No token is left: every advantage is 0, and a loss has a value of 0 and gradients of 0."""
    batch = example()._replace(truncated=torch.ones(7, dtype=torch.bool))
    for make in (grpo, algos.opo, algos.vapo, algos.gdpo):
        algorithm = corrected(make(), algos.mask_truncated())
        made, _, _ = algos.apply_advantage(algorithm.advantage, algorithm.advantage.init(), batch)
        assert not made.mask.any() and (made.advantage == 0).all() and torch.equal(made.sampled, batch.mask)
        logp = batch.old_logp.clone().requires_grad_()
        value, metrics = algorithm.losses["policy"](logp, made)
        assert value == 0 and all(m.value == 0 for m in metrics.values())
        assert (torch.autograd.grad(value, logp)[0] == 0).all()


def test_pieces_before_gdpo_reach_its_advantages():
    batch = example()
    none, penalty = (
        corrected(algos.gdpo("1,1,0.5"), *pieces).advantage for pieces in ((), (algos.overlong_penalty(11, 8, 2.0),))
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
    for kind in KL_KINDS:
        loss, _ = algos.kl_to_reference(kind, bias_corrected=True)(logp[None], batch)
        mean = (row["old_logp"].exp() * loss).sum()
        (got,) = torch.autograd.grad(mean, leaf, retain_graph=True)
        right = torch.allclose(mean, exact, rtol=1e-12) and torch.allclose(got, slope, rtol=1e-10)
        biased |= set() if right else {kind}
    assert biased == {"k2", "abs"}


def test_running_statistics_of_parts_are_those_of_the_whole():
    piece = algos.running_normalise()
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
        algos.to_tokens(),
        algos.importance_weights("token", 0.0, 5.0),
        algos.reject_ratio("token", 0.9, 1.3),
        algos.normalise_weights(),
    )
    signal, _ = piece.update(Signal(batch.score, batch.mask), piece.init(), batch)
    ratio = (batch.old_logp - batch.rollout_logp).exp()
    kept = batch.mask & (ratio >= 0.9) & (ratio <= 1.3)
    assert 0 < kept.sum() < batch.mask.sum()
    assert torch.equal(signal.mask, kept)
    assert (signal.weight[~kept] == 0).all() and (signal.x[~kept] == 0).all()
    torch.testing.assert_close(signal.weight[kept], ratio[kept] / ratio[kept].mean())
    lost = signal.metrics["rollout_corr/rejected"]
    assert lost == ((batch.mask & ~kept).sum(), batch.mask.sum())


def test_pieces_behind_a_rejection_compare_only_what_is_left():
    batch = example()
    piece = chain(algos.to_tokens(), algos.mask_truncated(), algos.whiten())
    signal, _ = piece.update(Signal(batch.score, batch.mask), piece.init(), batch)
    left = signal.x[signal.mask]
    assert len(left) == (batch.mask & ~batch.truncated[:, None]).sum()
    torch.testing.assert_close(left.mean(), torch.zeros((), dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(left.var(), torch.ones((), dtype=torch.float64), atol=1e-6, rtol=0)


def test_resampled_rows_go_to_states_that_can_be_saved():
    piece = algos.resample_rows(seed=1)
    batch, state = example(), piece.init()
    draws = []
    for _ in range(4):
        signal, state = piece.update(Signal(batch.score, batch.mask), state, batch)
        draws.append(signal.rows.tolist())
    assert int(state) == 4
    resumed, _ = piece.update(Signal(batch.score, batch.mask), torch.tensor(3), batch)
    assert resumed.rows.tolist() == draws[3]


def test_a_rejected_token_shifts_no_other_in_the_optimal_token_baseline():
    """Two equal rows with rewards 1, 2, 4, 8, the first token of one of them rejected: nothing differs, all are 0."""
    mask = torch.ones(2, 4, dtype=torch.bool)
    rewards = torch.tensor([[1.0, 2.0, 4.0, 8.0]] * 2, dtype=torch.float64)
    same = torch.full((2, 4), -1.0, dtype=torch.float64)
    batch = Batch(tokens=mask.long(), mask=mask, group=torch.zeros(2).long(), old_logp=same, sum_pi_squared=same.exp())
    left = mask.clone()
    left[0, 0] = False
    for turns in (False, True):
        piece = chain(algos.reward_to_go(), algos.optimal_token_baseline(turns))
        signal, _ = piece.update(Signal(rewards, left), piece.init(), batch)
        assert (signal.x == 0).all()
