"""Pieces of the newer algorithms (MaxRL, PRPO, TOPR, RAFT++, M2PO, FIPO, REAL, GVPO, A*-PO, EAFT, CHORD): references.

Loops over Python floats, written from the formulas; TERMS are of sequences, as in rows_terms.py.
"""

from __future__ import annotations

from itertools import combinations
from math import exp, log

from pieces import Row, members, sampled, sequences
from rows_advantages import by_group, mean
from rows_corrections import gap, group_scores, keeping, leash, leash_of, tokens_of
from rows_terms import A_HELD, TermRow, by_sequence, by_token, clip, ppo, sequence_log_ratio, table_rows

from funrl import algos


def relative(own, group, place):
    return (own - mean(group)) / mean(group) if mean(group) > 0 else 0.0


def best_of_sets(k):
    """k times the mean best of the sets of k rows with the row, less that of the sets without it."""

    def advantage(own, group, place):
        size = min(k, len(group) - 1)
        if size < 1:
            return 0.0
        sets = list(combinations(range(len(group)), size))
        inside = [max(group[j] for j in rows) for rows in sets if place in rows]
        outside = [max(group[j] for j in rows) for rows in sets if place not in rows]
        return size * (mean(inside) - mean(outside))

    return by_group(advantage)


def optimal_value(beta):
    return by_group(lambda own, group, place: own - beta * log(mean([exp(x / beta) for x in group])))


def class_size(own, group, place):
    good = sum(x > 0 for x in group)
    if good in (0, len(group)):
        return 0.0
    return float(good) if own > 0 else float(good - len(group))


def with_group_log_ratio(beta, other):
    def log_ratio(b, i):
        return sum(b.old_logp[i][t] - getattr(b, other)[i][t] for t in sampled(b, i))

    def reference(x, b):
        groups = [[j for j in range(len(x)) if b.group[j] == number] for number in b.group]
        return {"x": [v + beta * mean([log_ratio(b, j) for j in rows]) for v, rows in zip(x, groups, strict=True)]}

    return reference


def best_rows(threshold):
    def best(b, i):
        return b.score[i] == max(group_scores(b, i)) and b.score[i] > threshold

    def reference(x, b):
        mask = [[on and best(b, i) for on in row] for i, row in enumerate(b.mask)]
        return {"x": [float(best(b, i)) for i in range(len(x))], "mask": mask}

    return reference


def second_moment(high, harmful=False):
    """The smallest squared gaps stay, as many as have a mean of at most `high`."""

    def reference(x, b):
        counted = [(i, t) for i in sequences(b) for t in sampled(b, i)]
        if harmful:
            counted = [(i, t) for i, t in counted if gap(b, i, t) * x[i][t] > 0]
        moments = sorted(gap(b, i, t) ** 2 for i, t in counted)
        kept = max((n for n in range(len(moments) + 1) if n == 0 or mean(moments[:n]) <= high), default=0)
        dropped = {(i, t) for i, t in counted if gap(b, i, t) ** 2 > (moments[kept - 1] if kept else -1.0)}
        assert 0 < len(dropped) < len(counted) or high in (0.0, 9.0)
        return keeping(lambda b, i, t: (i, t) not in dropped)(x, b)

    return reference


def hard_mask(low, high, sampler):
    def loss(logp, held, old, a):
        r = exp(held - old)
        return -a * r * logp if 1 - low < r < 1 + high else 0.0

    return by_token(loss, "logp", "held", sampler, "advantage")


def quadratic(r, a, clip):
    return -(r * a - abs(a) * (r - 1) ** 2 / (2 * clip))


def topr(whole):
    def formula(s):
        total = exp(sum(held - old for held, old in zip(s["held"], s["old_logp"], strict=True)))
        losses = []
        for logp, held, old, a in zip(*(s[name] for name in A_HELD), strict=True):
            r = total if whole else exp(held - old)
            losses.append(-a * logp if a >= 0 else -a * min(r, 1.0) * logp)
        return losses

    return by_sequence(formula)


def fipo(half_life, low, high, most, safe):
    gamma = 0.5 ** (1 / half_life)

    def formula(s):
        ratios = [exp(held - old) for held, old in zip(s["held"], s["old_logp"], strict=True)]
        logs = [0.0 if most is not None and r > most else log(r) for r in ratios]
        losses = []
        for t, (logp, old, a) in enumerate(zip(s["logp"], s["old_logp"], s["advantage"], strict=True)):
            future = sum(gamma**k * x for k, x in enumerate(logs[t:]))
            f = clip(exp(future), 1 - low, 1 + high)
            if safe is not None and a < 0 and ratios[t] > safe:
                f = min(f, 1.0)
            losses.append(f * ppo(0.2, 0.28)(exp(logp - old), a))
        return losses

    return by_sequence(formula)


def real(tau):
    def formula(s):
        label, score = mean(s["advantage"]), sequence_log_ratio(s)
        return [log(abs(label) + exp((-score if label > 0 else score) / tau))] * len(s["logp"])

    return by_sequence(formula)


def regression(beta, other):
    def formula(s):
        moved = sum(new - old for new, old in zip(s["logp"], s[other], strict=True))
        return [(beta * moved - mean(s["advantage"])) ** 2] * len(s["logp"])

    return by_sequence(formula)


def flow_targets(beta):
    def reference(x, b):
        returns, out = ([[0.0] * len(row) for row in b.mask] for _ in range(2))
        opening = [[False] * len(row) for row in b.mask]
        for i in sequences(b):
            places = sampled(b, i)
            opening[i][places[0]] = True
            moved = mean([b.old_logp[i][t] - b.ref_logp[i][t] for t in places])
            for t in places:
                out[i][t] = beta * x[i] - b.value[i][places[0]]
                returns[i][t] = beta * x[i] - moved
        return {"x": out, "returns": returns, "opening": opening}

    return reference


def balance(low, high):
    def formula(s):
        moved = mean([new - ref for new, ref in zip(s["logp"], s["ref_logp"], strict=True)])
        weight = clip(exp(sequence_log_ratio(s, "held")), 1 - low, 1 + high)
        return [weight * (moved - mean(s["advantage"])) ** 2] * len(s["logp"])

    return by_sequence(formula)


def weighed(mu):
    def reference(x, b):
        weight = [
            [(mu if on else 1 - mu) if m else 0.0 for on, m in zip(*row, strict=True)]
            for row in zip(b.demonstration, b.mask, strict=True)
        ]
        out = [
            [0.0 if on or not m else v for v, on, m in zip(*row, strict=True)]
            for row in zip(x, b.demonstration, b.mask, strict=True)
        ]
        return {"x": out, "weight": weight}

    return reference


def nll_of(wanted):
    """Numerator and denominator of the likelihood over the tokens that are of a demonstration, or of none."""

    def reference(logp, b):
        values = [-logp[i][t] for i in sequences(b) for t in sampled(b, i) if b.demonstration[i][t] == wanted]
        return [(sum(values), float(len(values)))]

    return reference


def group_tokens(b, i):
    return sum(len(sampled(b, j)) for j in members(b, i))


def prompt_mean(logp, b):
    """The mean over prompts of the mean over the tokens of all their rows."""
    loss = tokens_of(leash_of)(logp, b)
    means = []
    for number in sorted({b.group[i] for i in sequences(b)}):
        rows = [i for i in sequences(b) if b.group[i] == number]
        means.append(mean([loss[i][t] for i in rows for t in sampled(b, i)]))
    return [(sum(means), float(len(means)))]


TERMS = [
    TermRow("masked_importance", algos.masked_importance, hard_mask(0.2, 0.2, "rollout_logp"), stops=True),
    TermRow(
        "masked_importance old",
        lambda: algos.masked_importance(0.3, 0.5, "old_logp"),
        hard_mask(0.3, 0.5, "old_logp"),
        stops=True,
    ),
    TermRow(
        "quadratic_surrogate",
        algos.quadratic_surrogate,
        by_token(lambda new, old, a: quadratic(exp(new - old), a, 0.2), "logp", "old_logp", "advantage"),
    ),
    TermRow(
        "quadratic_surrogate rollout",
        lambda: algos.quadratic_surrogate(0.3, algos.token_ratio("rollout_logp")),
        by_token(lambda new, old, a: quadratic(exp(new - old), a, 0.3), "logp", "rollout_logp", "advantage"),
    ),
    TermRow("flow_balance", algos.flow_balance, balance(0.2, 0.28), stops=True),
    TermRow("flow_balance wide", lambda: algos.flow_balance(0.9, 3.0), balance(0.9, 3.0), stops=True),
    TermRow("tapered", algos.tapered, topr(whole=True), stops=True, also=("product_ratio",)),
    TermRow("tapered per_token", lambda: algos.tapered(algos.token_ratio()), topr(whole=False), stops=True),
    TermRow(
        "token_ratio rollout",
        lambda: algos.surrogate(algos.token_ratio("rollout_logp")),
        by_token(lambda new, old, a: -a * exp(new - old), "logp", "rollout_logp", "advantage"),
    ),
    TermRow(
        "future_weighted",
        lambda: algos.future_weighted(algos.clipped_surrogate(0.2, 0.28), 2.0, 0.3, 0.4, 1.5, 1.2),
        fipo(2.0, 0.3, 0.4, 1.5, 1.2),
        stops=True,
    ),
    TermRow(
        "future_weighted unbounded",
        lambda: algos.future_weighted(algos.clipped_surrogate(0.2, 0.28), 32.0, 0.0, 5.0, None, None),
        fipo(32.0, 0.0, 5.0, None, None),
        stops=True,
    ),
    TermRow("classification", lambda: algos.classification(0.4), real(0.4)),
    TermRow("log_ratio_regression", lambda: algos.log_ratio_regression(0.3), regression(0.3, "old_logp")),
    TermRow(
        "log_ratio_regression reference",
        lambda: algos.log_ratio_regression(0.2, "ref_logp"),
        regression(0.2, "ref_logp"),
    ),
    TermRow(
        "entropy_gated_likelihood",
        lambda: algos.entropy_gated_likelihood(1.5, 0.8),
        by_token(lambda logp, h: -(min(h / 0.8, 1.0) ** 1.5) * logp, "logp", "entropy"),
    ),
    TermRow(
        "uncertain_likelihood",
        algos.uncertain_likelihood,
        by_token(lambda logp, h: -exp(h) * (1 - exp(h)) * logp, "logp", "held"),
        stops=True,
    ),
]

ROWS = [
    *table_rows(TERMS),
    Row("weigh_demonstrations", "advantage", algos.weigh_demonstrations, weighed(0.9), tokens=True),
    Row(
        "weigh_demonstrations warmup",
        "advantage",
        lambda: algos.weigh_demonstrations(0.8, 0.1, 4, 0),
        weighed(0.0),
        tokens=True,
    ),
    *(
        Row(
            name,
            "loss",
            lambda which=which: algos.restrict(
                algos.reduce(algos.negative_log_likelihood(), algos.token_mean()), which
            ),
            nll_of(wanted),
            smooth=True,
        )
        for name, which, wanted in (
            ("demonstrated_tokens", algos.demonstrated_tokens, True),
            ("sampled_tokens", algos.sampled_tokens, False),
        )
    ),
    Row(
        "count_prompt_tokens",
        "advantage",
        algos.count_prompt_tokens,
        lambda x, b: {"prompt_tokens": [[group_tokens(b, i) * on for on in row] for i, row in enumerate(b.mask)]},
    ),
    Row("prompt_mean", "loss", lambda: algos.reduce(leash, algos.prompt_mean()), prompt_mean, smooth=True),
    Row("relative_to_mean", "advantage", algos.relative_to_mean, by_group(relative)),
    Row(
        "relative_to_mean of rewards",
        "advantage",
        algos.relative_to_mean,
        by_group(relative),
        prepare=lambda batch: batch._replace(score=(batch.score > 0).to(batch.score)),
    ),
    Row("optimal_value_baseline", "advantage", lambda: algos.optimal_value_baseline(0.3), optimal_value(0.3)),
    Row("batch_center", "advantage", algos.batch_center, lambda x, b: {"x": [v - mean(x) for v in x]}),
    Row(
        "constant_baseline",
        "advantage",
        lambda: algos.constant_baseline(0.4),
        lambda x, b: {"x": [v - 0.4 for v in x]},
    ),
    *(
        Row(f"max_at_k {k}", "advantage", lambda k=k: algos.max_at_k(k), best_of_sets(k), compiles=False)
        for k in (1, 2, 4)
    ),
    Row("flow_targets", "advantage", lambda: algos.flow_targets(0.7), flow_targets(0.7)),
    Row("class_sizes", "advantage", algos.class_sizes, by_group(class_size)),
    *(
        Row(
            f"group_log_ratio {other}",
            "advantage",
            lambda other=other: algos.group_log_ratio(0.3, other),
            with_group_log_ratio(0.3, other),
        )
        for other in ("ref_logp", "rollout_logp")
    ),
    *(
        Row(f"keep_best {threshold}", "advantage", lambda t=threshold: algos.keep_best(t), best_rows(threshold))
        for threshold in (-9.0, 0.3)
    ),
    *(
        Row(
            f"reject_second_moment {high}",
            "advantage",
            lambda high=high: algos.reject_second_moment(high),
            second_moment(high),
            tokens=True,
        )
        for high in (0.02, 0.05, 0.0, 9.0)
    ),
    Row(
        "reject_second_moment harmful",
        "advantage",
        lambda: algos.reject_second_moment(0.03, harmful=True),
        second_moment(0.03, harmful=True),
        tokens=True,
    ),
]
