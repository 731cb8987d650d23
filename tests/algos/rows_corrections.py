"""Corrections, filters, reductions, the critic's loss and the combinators: their references."""

from math import exp, log

from pieces import Row, grid, members, sampled, sequences

from funrl import algos


def gap(b, i, t):
    return b.old_logp[i][t] - b.rollout_logp[i][t]


def mean(xs):
    return sum(xs) / len(xs)


def ratio(over, b, i, t):
    gaps = [gap(b, i, s) for s in sampled(b, i)]
    return exp({"token": gap(b, i, t), "sequence": sum(gaps), "geometric": mean(gaps)}[over])


def weights(over, low, high, old=False):
    def reference(x, b):
        out = grid(b)
        for i in sequences(b):
            for t in sampled(b, i):
                out[i][t] = min(max(ratio(over, b, i, t), low), high) * (b.weight[i][t] if old else 1.0)
        return {"weight": out, "mask": b.mask}

    return reference


def mean_one(x, b):
    out = weights("token", 0.0, 1.2)(x, b)["weight"]
    centre = mean([out[i][t] for i in sequences(b) for t in sampled(b, i)])
    return {"weight": [[w / centre for w in row] for row in out]}


def keeping(rule):
    def reference(x, b):
        mask = [[on and rule(b, i, t) for t, on in enumerate(row)] for i, row in enumerate(b.mask)]
        x = [[v if on else 0.0 for v, on in zip(*rows, strict=True)] for rows in zip(x, mask, strict=True)]
        return {"mask": mask, "x": x}

    return reference


def zeroing(rule, old=False):
    """Rejected tokens stay in the mask and have a weight of 0."""

    def reference(x, b):
        weight = grid(b)
        for i in sequences(b):
            for t in sampled(b, i):
                weight[i][t] = (b.weight[i][t] if old else 1.0) if rule(b, i, t) else 0.0
        return {"mask": b.mask, "weight": weight}

    return reference


def inside(over, low, high):
    return keeping(lambda b, i, t: low <= ratio(over, b, i, t) <= high)


def divergence(kind, over, high):
    def rule(b, i, t):
        def k(s):
            d = gap(b, i, s)
            p, q = (min(max(exp(x[i][s]), 1e-6), 1 - 1e-6) for x in (b.rollout_logp, b.old_logp))
            binary = p * log(p / q) + (1 - p) * log((1 - p) / (1 - q))
            return {"k2": d * d / 2, "k3": exp(d) - 1 - d, "binary": binary}[kind]

        values = [k(s) for s in sampled(b, i)]
        return {"token": k(t), "sum": sum(values), "mean": mean(values), "max": max(values)}[over] <= high

    return keeping(rule)


def group_scores(b, i):
    return [b.score[j] for j in members(b, i)]


def rows_of(rule):
    return lambda b: [rule(b, i) for i in range(len(b.score))]


def token_mean(loss, b):
    values = [loss[i][t] for i in sequences(b) for t in sampled(b, i)]
    return sum(values), float(len(values))


def per_sequence(number):
    def reference(loss, b):
        rows = [[loss[i][t] for t in sampled(b, i)] for i in sequences(b)]
        return sum(number(row) for row in rows), float(len(rows))

    return reference


def value_loss(clip):
    def reference(v, b):
        out = grid(b)
        for i in sequences(b):
            for t in sampled(b, i):
                target, old = b.returns[i][t], b.value[i][t]
                errors = [(v[i][t] - target) ** 2]
                if clip is not None:
                    errors.append((min(max(v[i][t], old - clip), old + clip) - target) ** 2)
                out[i][t] = max(errors) / 2
        return out

    return reference


def tokens_of(formula):
    def reference(logp, b):
        out = grid(b)
        for i in sequences(b):
            for t in sampled(b, i):
                out[i][t] = formula(logp[i][t], b, i, t)
        return out

    return reference


def pull(logp, batch):
    """-A logp."""
    return -batch.advantage.detach() * logp, {"pull": logp.detach()}


def leash(logp, batch):
    """(logp - ref)^2."""
    return (logp - batch.ref_logp.detach()).square(), {"leash": logp.detach()}


def pull_of(logp, b, i, t):
    return -b.advantage[i][t] * logp


def leash_of(logp, b, i, t):
    return (logp - b.ref_logp[i][t]) ** 2


def policy_of(logp, b, i, t):
    d = b.ref_logp[i][t] - logp
    return b.weight[i][t] * pull_of(logp, b, i, t) + 0.3 * (exp(d) - 1 - d) - 0.2 * b.entropy[i][t]


def both(logp, b):
    first, other = tokens_of(pull_of)(logp, b), tokens_of(leash_of)(logp, b)
    return [token_mean(first, b), per_sequence(mean)(other, b)]


ROWS = [
    Row(
        "importance_weights",
        "advantage",
        algos.importance_weights,
        weights("token", 0.0, 2.0),
        tokens=True,
    ),
    *(
        Row(
            f"importance_weights {over}",
            "advantage",
            lambda over=over: algos.importance_weights(over, 0.8, 1.1),
            weights(over, 0.8, 1.1),
            tokens=True,
        )
        for over in ("token", "sequence", "geometric")
    ),
    Row(
        "importance_weights weighted",
        "advantage",
        lambda: algos.importance_weights("token", 0.0, 1.1),
        weights("token", 0.0, 1.1, old=True),
        tokens=True,
    ),
    Row(
        "normalise_weights",
        "advantage",
        lambda: algos.chain(algos.importance_weights("token", 0.0, 1.2), algos.normalise_weights()),
        mean_one,
        tokens=True,
    ),
    *(
        Row(
            f"reject_ratio {over}",
            "advantage",
            lambda over=over: algos.reject_ratio(over, 0.9, 1.3),
            inside(over, 0.9, 1.3),
            tokens=True,
        )
        for over in ("token", "sequence", "geometric")
    ),
    *(
        Row(
            f"reject_divergence {kind} {over}",
            "advantage",
            lambda kind=kind, over=over, high=high: algos.reject_divergence(kind, over, high),
            divergence(kind, over, high),
            tokens=True,
        )
        for kind in ("k2", "k3", "binary")
        for over, high in (("token", 0.02), ("sum", 0.1), ("mean", 0.04), ("max", 0.1))
    ),
    Row(
        "reject_ratio in_denominator",
        "advantage",
        lambda: algos.reject_ratio("token", 0.9, 1.3, in_denominator=True),
        zeroing(lambda b, i, t: 0.9 <= ratio("token", b, i, t) <= 1.3),
        tokens=True,
    ),
    Row(
        "reject_divergence in_denominator weighted",
        "advantage",
        lambda: algos.reject_divergence("k3", "max", 0.1, in_denominator=True),
        zeroing(lambda b, i, t: max(exp(gap(b, i, s)) - 1 - gap(b, i, s) for s in sampled(b, i)) <= 0.1, old=True),
        tokens=True,
    ),
    Row(
        "mask_truncated in_denominator",
        "advantage",
        lambda: algos.mask_truncated(in_denominator=True),
        zeroing(lambda b, i, t: not b.truncated[i]),
        tokens=True,
    ),
    Row(
        "mask_truncated",
        "advantage",
        algos.mask_truncated,
        keeping(lambda b, i, t: not b.truncated[i]),
        tokens=True,
    ),
    Row(
        "unequal_scores",
        "filter",
        algos.unequal_scores,
        rows_of(lambda b, i: len(set(group_scores(b, i))) > 1),
        prepare=lambda batch: batch._replace(score=batch.score.round()),
    ),
    Row(
        "mean_between",
        "filter",
        lambda: algos.mean_between(0.0, 0.6),
        rows_of(lambda b, i: 0.0 < mean(group_scores(b, i)) < 0.6),
    ),
    Row("not_truncated", "filter", algos.not_truncated, rows_of(lambda b, i: not b.truncated[i])),
    Row("rewarded", "filter", algos.rewarded, rows_of(lambda b, i: not b.failed[i])),
    Row(
        "complete_groups",
        "filter",
        lambda: algos.complete_groups(2),
        rows_of(lambda b, i: len(members(b, i)) == 2),
    ),
    Row(
        "every",
        "filter",
        lambda: algos.every(algos.not_truncated(), algos.complete_groups(3)),
        rows_of(lambda b, i: not b.truncated[i] and sum(not b.truncated[j] for j in members(b, i)) == 3),
    ),
    Row("token_mean", "reduction", algos.token_mean, token_mean),
    Row("token_sum", "reduction", algos.token_sum, lambda loss, b: (token_mean(loss, b)[0], 0.0)),
    Row("sequence_mean", "reduction", algos.sequence_mean, per_sequence(mean)),
    Row("sequence_sum_mean", "reduction", algos.sequence_sum_mean, per_sequence(sum)),
    Row(
        "constant_mean",
        "reduction",
        lambda: algos.constant_mean(12),
        per_sequence(lambda row: sum(row) / 12),
    ),
    Row("clipped_value_loss", "term", algos.clipped_value_loss, value_loss(0.5), smooth=True),
    Row("clipped_value_loss plain", "term", lambda: algos.clipped_value_loss(None), value_loss(None), smooth=True),
    Row(
        "add",
        "term",
        lambda: algos.add(pull, leash),
        tokens_of(lambda p, b, i, t: pull_of(p, b, i, t) + leash_of(p, b, i, t)),
        smooth=True,
    ),
    Row("scale", "term", lambda: algos.scale(-3, leash), tokens_of(lambda *a: -3 * leash_of(*a)), smooth=True),
    Row(
        "weighted",
        "term",
        lambda: algos.weighted(pull),
        tokens_of(lambda p, b, i, t: b.weight[i][t] * pull_of(p, b, i, t)),
        smooth=True,
    ),
    Row(
        "reduce",
        "loss",
        lambda: algos.reduce(leash, algos.sequence_mean()),
        lambda p, b: [per_sequence(mean)(tokens_of(leash_of)(p, b), b)],
        smooth=True,
    ),
    Row(
        "sum_losses",
        "loss",
        lambda: algos.sum_losses(algos.reduce(pull, algos.token_mean()), algos.reduce(leash, algos.sequence_mean())),
        both,
        smooth=True,
    ),
    Row(
        "with_regularizers", "term", lambda: algos.with_regularizers(pull, 0.3, 0.2), tokens_of(policy_of), smooth=True
    ),
    Row(
        "chain",
        "advantage",
        lambda: algos.chain(algos.mask_truncated(), algos.reject_ratio("token", 0.9, 1.3)),
        keeping(lambda b, i, t: not b.truncated[i] and 0.9 <= ratio("token", b, i, t) <= 1.3),
        tokens=True,
    ),
    Row(
        "stateless",
        "advantage",
        lambda: algos.stateless(lambda x, batch: x * batch.greedy_score),
        lambda x, b: {"x": [v * g for v, g in zip(x, b.greedy_score, strict=True)]},
    ),
]
