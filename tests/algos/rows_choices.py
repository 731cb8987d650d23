"""Rows of the pieces that choose tokens over a whole batch, follow a teacher, or restrict a loss; bad arguments."""

from __future__ import annotations

import functools

import pieces
import torch
from rows_terms import KL

from funrl import algos


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


def follow_teacher(kind, keep, of_teacher=1.0):
    """The teacher's advantage times `of_teacher`, and the signal times `keep`."""

    def reference(x, b):
        out = pieces.grid(b)
        for i in range(len(b.mask)):
            for t in pieces.sampled(b, i):
                kl = KL[kind](b.old_logp[i][t], b.teacher_logp[i][t])
                out[i][t] = (keep * x[i][t] if keep else 0.0) - of_teacher * kl
        return {"x": out}

    return reference


def with_spans(batch):
    """The batch with spans of two or three sampled tokens, and some tokens in none."""
    spans = torch.full(batch.mask.shape, -1)
    for row, mask in zip(spans, batch.mask, strict=True):
        places = mask.nonzero()[:, 0].tolist()
        for n in range(0, len(places), 3):
            span = places[n : n + 2 + n % 2]
            row[span] = span[-1]
    return batch._replace(teacher_span=spans)


def follow_teacher_by_spans(kind):
    """The teacher's advantage from the sums of each span, at all of its tokens."""

    def reference(x, b):
        out = pieces.grid(b)
        for i in range(len(b.mask)):
            for t in pieces.sampled(b, i):
                own = [s for s in pieces.sampled(b, i) if b.teacher_span[i][s] == b.teacher_span[i][t] >= 0]
                kl = KL[kind](sum(b.old_logp[i][s] for s in own), sum(b.teacher_logp[i][s] for s in own))
                out[i][t] = x[i][t] - kl
        return {"x": out}

    return reference


def early_tokens(gamma):
    def reference(x, b):
        out = pieces.grid(b)
        for i in range(len(b.mask)):
            places = pieces.sampled(b, i)
            whole = sum(abs(x[i][t]) for t in places)
            for n, t in enumerate(places):
                before = sum(abs(x[i][s]) for s in places[:n])
                out[i][t] = (1 + gamma * (1 - before / whole)) * x[i][t]
        return {"x": out}

    return reference


def weighted_likelihood(logp, b):
    places = [(i, t) for i in range(len(b.mask)) for t in pieces.sampled(b, i)]
    return [(sum(-b.weight[i][t] * logp[i][t] for i, t in places), float(len(places)))]


def likelihood_of_positives(logp, b):
    losses = [-logp[i][t] for i in range(len(b.mask)) for t in pieces.sampled(b, i) if b.imitated[i][t]]
    return [(sum(losses), float(len(losses)))]


ROWS = [
    pieces.Row(
        "select_covariance_between",
        "advantage",
        lambda: algos.select_covariance_between(1.0, 0.05, 0.8),
        eligible(0.05, 0.8),
        tokens=True,
        also=("covariance",),
    ),
    pieces.Row(
        "select_highest_covariance",
        "advantage",
        lambda: algos.select_highest_covariance(0.2),
        highest(0.2),
        tokens=True,
    ),
    pieces.Row(
        "keep_highest_entropy",
        "advantage",
        lambda: algos.keep_highest_entropy(0.3),
        high_entropy(0.3, False),
        tokens=True,
    ),
    pieces.Row(
        "keep_highest_entropy weighted",
        "advantage",
        lambda: algos.keep_highest_entropy(0.5),
        high_entropy(0.5, True),
        tokens=True,
    ),
    pieces.Row(
        "adapt_entropy",
        "advantage",
        lambda: algos.adapt_entropy(100.0, start=0.25),
        coefficient(0.25),
        tokens=True,
    ),
    pieces.Row("teacher_advantage", "advantage", algos.teacher_advantage, follow_teacher("k1", False)),
    pieces.Row(
        "teacher_advantage k3 rewards",
        "advantage",
        lambda: algos.teacher_advantage("k3"),
        follow_teacher("k3", True),
        tokens=True,
    ),
    pieces.Row(
        "teacher_advantage shared",
        "advantage",
        lambda: algos.teacher_advantage("k1", 0.3, 0.7),
        follow_teacher("k1", 0.3, 0.7),
        tokens=True,
    ),
    *(
        pieces.Row(
            f"teacher_advantage {kind} spans",
            "advantage",
            functools.partial(algos.teacher_advantage, kind),
            follow_teacher_by_spans(kind),
            tokens=True,
            prepare=with_spans,
            packed=False,
        )
        for kind in ("k1", "k3")
    ),
    pieces.Row(
        "weigh_early_tokens", "advantage", lambda: algos.weigh_early_tokens(0.7), early_tokens(0.7), tokens=True
    ),
    pieces.Row(
        "mark_positives",
        "advantage",
        lambda: algos.mark_positives(0.2),
        lambda x, b: {"imitated": [[on and b.score[i] > 0.2 for on in row] for i, row in enumerate(b.mask)]},
        tokens=True,
    ),
    pieces.Row(
        "negative_log_likelihood weighted",
        "loss",
        lambda: algos.sft().losses["policy"],
        weighted_likelihood,
        smooth=True,
    ),
    pieces.Row(
        "restrict",
        "loss",
        lambda: algos.restrict(
            algos.reduce(algos.negative_log_likelihood(), algos.token_mean()), algos.imitated_tokens
        ),
        likelihood_of_positives,
        smooth=True,
        also=("imitated_tokens",),
    ),
]
