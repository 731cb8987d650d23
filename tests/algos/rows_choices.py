"""Rows of the pieces that choose tokens over a whole batch, follow a teacher, or restrict a loss; bad arguments."""

from __future__ import annotations

import pieces
import pytest
import torch
from rows_terms import KL

from funrl.algos import core, kl, supervised, terms, terms_covariance, terms_teacher, terms_token
from funrl.algos.reductions import token_mean


def mean_over_mask(x, b):
    values = [x[i][t] for i in range(len(x)) for t in pieces.sampled(b, i)]
    return sum(values) / len(values)


def covariances(x, b):
    a, p = mean_over_mask(x, b), mean_over_mask(b.old_logp, b)
    return {(i, t): (x[i][t] - a) * (b.old_logp[i][t] - p) for i in range(len(x)) for t in pieces.sampled(b, i)}


def selected(chosen, b):
    return {"selected": [[float((i, t) in chosen) for t in range(len(row))] for i, row in enumerate(b.mask)]}


def eligible(low, high):
    return lambda x, b: selected({at for at, c in covariances(x, b).items() if low < c < high}, b)


def highest(share):
    def reference(x, b):
        cov = covariances(x, b)
        count = max(1, int(share * len(cov)))
        return selected(sorted(cov, key=cov.__getitem__)[-count:], b)

    return reference


def high_entropy(share, with_weight):
    def reference(x, b):
        values = sorted(b.old_entropy[i][t] for i in range(len(x)) for t in pieces.sampled(b, i))
        place = (1 - share) * (len(values) - 1)
        below, rest = int(place), place - int(place)
        threshold = values[below] + (rest * (values[below + 1] - values[below]) if rest else 0.0)
        weight = pieces.grid(b)
        for i in range(len(x)):
            for t in pieces.sampled(b, i):
                if b.old_entropy[i][t] >= threshold:
                    weight[i][t] = b.weight[i][t] if with_weight else 1.0
        return {"weight": weight}

    return reference


def coefficient(value):
    def reference(x, b):
        return {"entropy_coefficient": [[value if on else 0.0 for on in row] for row in b.mask]}

    return reference


def follow_teacher(kind, keep):
    def reference(x, b):
        out = pieces.grid(b)
        for i in range(len(b.mask)):
            for t in pieces.sampled(b, i):
                out[i][t] = (x[i][t] if keep else 0.0) - KL[kind](b.old_logp[i][t], b.teacher_logp[i][t])
        return {"x": out}

    return reference


def check_random_selection():
    """As many as asked for, all of them eligible, others at the next batch, the same in a repeated run."""
    batch = pieces.example()
    signal = core.Signal(pieces.token_signal(batch), batch.mask)
    b, piece = pieces.plain(batch), terms_covariance.select_covariance_between(0.2, 0.0, 100.0)
    may = torch.tensor(eligible(0.0, 100.0)(signal.x.tolist(), b)["selected"]).bool()
    draws, state = [], piece.init()
    for _ in range(8):
        out, state = piece.update(signal, state, batch)
        draws.append(out.extra["selected"])
        assert draws[-1].sum() == int(0.2 * batch.mask.sum())
        assert (draws[-1] & ~may).sum() == 0
    assert any(not torch.equal(draws[0], other) for other in draws[1:])
    assert torch.equal(piece.update(signal, piece.init(), batch)[0].extra["selected"], draws[0])
    share = piece.update(signal, piece.init(), batch)[0].metrics["actor/selected"]
    assert share == (draws[0].sum(), batch.mask.sum())


def check_noise():
    """Uniform, different by draw, and not moved by more columns."""
    x = terms_covariance.noise((50, 200), torch.tensor(3))
    assert abs(x.mean().item() - 0.5) < 0.01 and abs(x.var().item() - 1 / 12) < 0.003
    assert x.min() >= 0 and x.max() < 1 and x.unique().numel() > 9_990
    correlation = torch.corrcoef(torch.stack((x.flatten()[:-1], x.flatten()[1:])))[0, 1]
    assert abs(correlation.item()) < 0.04
    assert torch.equal(terms_covariance.noise((50, 300), torch.tensor(3))[:, :200], x)
    assert not torch.equal(terms_covariance.noise((50, 200), torch.tensor(4)), x)


def check_entropy_controller():
    """The coefficient rises while the entropy is short of the target, is off above it, and stays in its bounds."""
    batch = pieces.example()
    mean = batch.old_entropy[batch.mask].mean().item()
    below = terms_covariance.adapt_entropy(mean + 1, step=0.01, start=0.005, high=0.02)
    above = terms_covariance.adapt_entropy(mean - 1, step=0.01, start=0.015)
    for piece, states, applied in (
        (below, (0.015, 0.02, 0.02), (0.005, 0.015, 0.02)),
        (above, (0.005, 0.0), (0.0, 0.0)),
    ):
        state = piece.init()
        for after, now in zip(states, applied, strict=False):
            signal, state = piece.update(core.Signal(batch.score, batch.mask), state, batch)
            assert state.item() == pytest.approx(after, abs=1e-12)
            assert signal.extra["entropy_coefficient"][batch.mask].unique().item() == pytest.approx(now, abs=1e-12)
            assert signal.metrics["actor/entropy_coefficient"].value.item() == pytest.approx(now, abs=1e-12)


def check_arguments():
    """Arguments that cannot be meant are refused by name."""
    for make, name in (
        (lambda: terms.clipped_surrogate(dual=1.0), "dual"),
        (lambda: terms.clipped_surrogate(high=0.5, delta=1.4), "delta"),
        (lambda: kl.kl_to_reference("k4"), "k4"),
        (lambda: kl.kl_estimate("full"), "full"),
        (lambda: terms_token.direct_reward(0.0), "beta"),
        (lambda: terms_token.divergence_mask("js"), "kind"),
        (lambda: terms_covariance.keep_highest_entropy(0.0), "share"),
    ):
        with pytest.raises(ValueError, match=name):
            make()


def weighted_likelihood(logp, b):
    places = [(i, t) for i in range(len(b.mask)) for t in pieces.sampled(b, i)]
    return [(sum(-b.weight[i][t] * logp[i][t] for i, t in places), float(len(places)))]


def likelihood_of_positives(logp, b):
    losses = [-logp[i][t] for i in range(len(b.mask)) if b.score[i] > 0.2 for t in pieces.sampled(b, i)]
    return [(sum(losses), float(len(losses)))]


ROWS = [
    pieces.Row(
        "terms_covariance.select_covariance_between",
        "advantage",
        lambda: terms_covariance.select_covariance_between(1.0, 0.05, 0.8),
        eligible(0.05, 0.8),
        tokens=True,
        also=("terms_covariance.covariance",),
    ),
    pieces.Row(
        "terms_covariance.select_covariance_between share",
        "check",
        check_random_selection,
        also=("terms_covariance.top_tokens", "terms_covariance.share_of"),
    ),
    pieces.Row("terms_covariance.noise", "check", check_noise),
    pieces.Row(
        "terms_covariance.select_highest_covariance",
        "advantage",
        lambda: terms_covariance.select_highest_covariance(0.2),
        highest(0.2),
        tokens=True,
    ),
    pieces.Row(
        "terms_covariance.keep_highest_entropy",
        "advantage",
        lambda: terms_covariance.keep_highest_entropy(0.3),
        high_entropy(0.3, False),
        tokens=True,
    ),
    pieces.Row(
        "terms_covariance.keep_highest_entropy weighted",
        "advantage",
        lambda: terms_covariance.keep_highest_entropy(0.5),
        high_entropy(0.5, True),
        tokens=True,
    ),
    pieces.Row(
        "terms_covariance.adapt_entropy",
        "advantage",
        lambda: terms_covariance.adapt_entropy(100.0, start=0.25),
        coefficient(0.25),
        tokens=True,
    ),
    pieces.Row("terms_covariance.adapt_entropy steps", "check", check_entropy_controller),
    pieces.Row(
        "terms_teacher.teacher_advantage", "advantage", terms_teacher.teacher_advantage, follow_teacher("k1", False)
    ),
    pieces.Row(
        "terms_teacher.teacher_advantage k3 rewards",
        "advantage",
        lambda: terms_teacher.teacher_advantage("k3"),
        follow_teacher("k3", True),
        tokens=True,
    ),
    pieces.Row("supervised.sft", "loss", supervised.sft, weighted_likelihood, smooth=True),
    pieces.Row(
        "supervised.restrict",
        "loss",
        lambda: supervised.restrict(
            core.reduce(supervised.negative_log_likelihood(), token_mean()), supervised.positives(0.2)
        ),
        likelihood_of_positives,
        smooth=True,
        packed=False,
        also=("supervised.positives",),
    ),
    pieces.Row("terms.clipped_surrogate arguments", "check", check_arguments),
]
