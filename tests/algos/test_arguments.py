"""Bad arguments are refused where an algorithm is made, and states carry over from batch to batch."""

import pytest
import torch
from pieces import example

from funrl.algos import advantages, baselines, corrections, resampling, shaping, terms, value
from funrl.algos.core import Signal, chain, needs

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
