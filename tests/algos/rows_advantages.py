"""Advantages and baselines: their references, loops over Python floats."""

from math import exp, log, sqrt

import torch
from pieces import Row, grid, members, sampled, sequences
from rows_shaping import masked, overlong

from funrl import algos


def mean(xs):
    return sum(xs) / len(xs)


def deviation(xs):
    return sqrt(sum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - 1)) if len(xs) > 1 else 0.0


def by_group(formula):
    """formula(own x, the group's x, own place in it) -> number; a group of one gets 0."""

    def reference(x, b):
        out = []
        for i in range(len(x)):
            rows = members(b, i)
            out.append(formula(x[i], [x[j] for j in rows], rows.index(i)) if len(rows) > 1 else 0.0)
        return {"x": out}

    return reference


def leave_one_out(own, group, place):
    return own - mean([x for k, x in enumerate(group) if k != place])


def win_rate(own, group, place):
    others = [x for k, x in enumerate(group) if k != place]
    return mean([1.0 if own > x else 0.5 if own == x else 0.0 for x in others]) - 0.5


def lead(eps):
    def formula(own, group, place):
        second = max(x for k, x in enumerate(group) if k != place)
        if own <= second:
            return 0.0
        return (own - second) / (1.0 if eps is None else deviation(group) + eps)

    return formula


def scaled(eps):
    def reference(x, b):
        out = []
        for i in range(len(x)):
            std = deviation([x[j] for j in members(b, i)])
            out.append(x[i] / (std + eps) if std > 0 else x[i])
        return {"x": out}

    return reference


def length_weighted(x, b):
    out = []
    for i in range(len(x)):
        rows = members(b, i)
        lengths = [len(sampled(b, j)) for j in rows]
        total = sum(lengths)
        base = sum(n * x[j] for n, j in zip(lengths, rows, strict=True)) / total if total else None
        out.append(x[i] - base if base is not None and len(rows) > 1 else 0.0)
    return {"x": out}


def informative(x, b):
    teaching = [i for i in range(len(x)) if any(x[j] != 0 for j in members(b, i))]
    return {"x": [len(x) / len(teaching) * v for v in x]}


def decoupled(weights, eps):
    """`eps` None: not divided by the deviation. A score that is NaN is not compared and adds nothing."""

    def reference(x, b):
        out = [0.0] * len(x)
        for k, weight in enumerate(weights):
            column = [row[k] for row in b.scores]
            for i in range(len(x)):
                group = [column[j] for j in members(b, i) if column[j] == column[j]]
                if len(group) > 1 and column[i] == column[i]:
                    out[i] += weight * (column[i] - mean(group)) / (1.0 if eps is None else deviation(group) + eps)
        return {"x": out}

    return reference


def some_do_not_apply(batch):
    scores = batch.scores.clone()
    scores[0, 1] = scores[1, 0] = scores[5, 2] = scores[3] = torch.nan
    return batch._replace(scores=scores)


def to_go(gamma):
    def reference(x, b):
        out = grid(b)
        for i in sequences(b):
            places = sampled(b, i)
            for k, t in enumerate(places):
                out[i][t] = sum(gamma**n * x[i][s] for n, s in enumerate(places[k:]))
        return {"x": out}

    return reference


def turns_of(b, i):
    """The sampled places of each turn of a row, in order."""
    results = {}
    for t in sampled(b, i):
        results.setdefault(int(b.turn[i][t]), []).append(t)
    return results


def to_turns(gamma):
    def reference(x, b):
        out = grid(b)
        for i in range(len(x)):
            turns = turns_of(b, i)
            reward = {k: sum(b.token_reward[i][t] for t in places) for k, places in turns.items()}
            if turns:
                reward[max(turns)] += x[i]
            for k, places in turns.items():
                for t in places:
                    out[i][t] = sum(gamma ** (j - k) * reward[j] for j in turns if j >= k)
        return {"x": out}

    return reference


def turn_centred(x, b):
    out = grid(b)
    for i in range(len(x)):
        for k, places in turns_of(b, i).items():
            others = [x[j][turns_of(b, j)[k][-1]] for j in members(b, i) if k in turns_of(b, j)]
            for t in places:
                out[i][t] = x[i][t] - mean(others)
    return {"x": out}


def turn_gae(gamma, lam):
    def reference(x, b):
        adv, returns = grid(b), grid(b)
        for i in range(len(x)):
            later = following = 0.0
            for places in [turns_of(b, i)[k] for k in sorted(turns_of(b, i), reverse=True)]:
                value = b.value[i][places[0]]
                later = sum(x[i][t] for t in places) + gamma * following - value + gamma * lam * later
                following = value
                for t in places:
                    adv[i][t], returns[i][t] = later, later + value
        return {"x": adv, "returns": returns}

    return reference


def gae(gamma, lam, critic_lambda=None):
    """The sum of discounted temporal differences, written out: A[t] = sum_n (gamma lam)^n delta[t + n]."""

    def reference(x, b):
        adv, returns = grid(b), grid(b)
        for i in sequences(b):
            places = sampled(b, i)
            own = lam(len(places)) if callable(lam) else lam
            v = [b.value[i][t] for t in places] + [0.0]
            delta = [x[i][t] + gamma * v[k + 1] - v[k] for k, t in enumerate(places)]
            for k, t in enumerate(places):
                adv[i][t] = sum((gamma * own) ** n * d for n, d in enumerate(delta[k:]))
                trust = own if critic_lambda is None else critic_lambda
                returns[i][t] = sum((gamma * trust) ** n * d for n, d in enumerate(delta[k:])) + v[k]
        return {"x": adv, "returns": returns}

    return reference


def whitened(eps):
    def reference(x, b):
        values = [x[i][t] for i in sequences(b) for t in sampled(b, i)]
        centre, var = mean(values), deviation(values) ** 2
        return {"x": masked([[(v - centre) / sqrt(var + eps) for v in row] for row in x], b)}

    return reference


def optimal(turns, raw_tail, rho=False, keep=lambda b, i, t: True):
    """`keep` says which tokens a correction has left; positions are those of what was sampled."""

    def reference(x, b):
        def slot(i, t):
            return sampled(b, i).index(t) if turns else t - sampled(b, i)[0]

        def left(i):
            return [t for t in sampled(b, i) if keep(b, i, t)]

        def weight(i, t):
            total = 0.0
            for s in left(i):
                if s <= t:
                    factor = b.weight[i][s] ** 2 if rho else 1.0
                    total += (1 - 2 * exp(b.old_logp[i][s]) + b.sum_pi_squared[i][s]) * factor
            return total

        out = grid(b)
        for i in sequences(b):
            for t in left(i):
                there = [(j, s) for j in members(b, i) for s in left(j) if slot(j, s) == slot(i, t)]
                if len(there) > 1:
                    base = sum(x[j][s] * weight(j, s) for j, s in there) / sum(weight(j, s) for j, s in there)
                    out[i][t] = x[i][t] - base
                elif raw_tail and len(members(b, i)) > 1:
                    out[i][t] = x[i][t]
        return {"x": out}

    return reference


def process(beta, coefficient):
    def reference(x, b):
        out = masked(x, b)

        def q(i):
            return [beta * (b.implicit_logp[i][t] - b.ref_logp[i][t]) for t in sampled(b, i)]

        for i in sequences(b):
            others = [mean(q(j)) if q(j) else 0.0 for j in members(b, i) if j != i]
            for t, value in zip(sampled(b, i), q(i), strict=True):
                out[i][t] += coefficient * (value - mean(others)) if others else 0.0
        return {"x": out}

    return reference


def penalised(penalty, reference):
    """What a penalty has changed in the score, centred in the group, beside the sum of normalised scores."""

    def both(x, b):
        changed = [v - s for v, s in zip(penalty(x, b)["x"], b.score, strict=True)]
        centred = by_group(lambda own, group, k: own - mean(group))(changed, b)["x"]
        return {"x": [u + v for u, v in zip(reference(x, b)["x"], centred, strict=True)]}

    return both


def implicit_loss(beta):
    def reference(logp, b):
        total = 0.0
        for i in sequences(b):
            Q = beta * sum(logp[i][t] - b.ref_logp[i][t] for t in sampled(b, i))
            s = mean([b.label[i][t] for t in sampled(b, i)])
            p = 1 / (1 + exp(-Q))
            total -= s * log(p) + (1 - s) * log(1 - p)
        return [(total, float(len(sequences(b))))]

    return reference


def labelled(x, b):
    label = [[b.score[i] if on else 0.0 for on in row] for i, row in enumerate(b.mask)]
    return {"x": list(x), "label": label}


def normalised_leave_one_out(x, b):
    """TRL's normalize_advantages: mean and deviation are of the rows that have others to be compared with."""
    advantages = by_group(leave_one_out)(x, b)["x"]
    compared = [value for i, value in enumerate(advantages) if len(members(b, i)) > 1]
    center, spread = mean(compared), deviation(compared) + 1e-4
    return {"x": [(value - center) / spread if len(members(b, i)) > 1 else 0.0 for i, value in enumerate(advantages)]}


ROWS = [
    Row(
        "group_center",
        "advantage",
        algos.group_center,
        by_group(lambda own, group, k: own - mean(group)),
    ),
    Row("group_scale", "advantage", algos.group_scale, scaled(1e-6)),
    Row("group_scale eps", "advantage", lambda: algos.group_scale(0.1), scaled(0.1)),
    Row(
        "batch_scale",
        "advantage",
        algos.batch_scale,
        lambda x, b: {"x": [v / (deviation(x) + 1e-6) for v in x]},
    ),
    Row(
        "batch_scale raw, then centred",
        "advantage",
        lambda: algos.chain(algos.batch_scale(1e-4), algos.group_center()),
        lambda x, b: {"x": [v / (deviation(x) + 1e-4) for v in by_group(lambda o, g, k: o - mean(g))(x, b)["x"]]},
    ),
    Row(
        "batch_scale of the compared",
        "advantage",
        lambda: algos.chain(algos.leave_one_out(), algos.batch_scale(1e-4, alone=False)),
        normalised_leave_one_out,
    ),
    Row("gae", "advantage", algos.gae, gae(1.0, 1.0), tokens=True, also=("generalised_advantages",)),
    Row("gae discounted", "advantage", lambda: algos.gae(0.9, 0.8), gae(0.9, 0.8), tokens=True),
    Row(
        "gae decoupled",
        "advantage",
        lambda: algos.gae(0.95, algos.length_adaptive(0.2), critic_lambda=1.0),
        gae(0.95, lambda n: max(0.0, 1 - 1 / (0.2 * n)), 1.0),
        tokens=True,
        also=("length_adaptive",),
    ),
    Row("reward_to_go", "advantage", algos.reward_to_go, to_go(1.0), tokens=True),
    Row("reward_to_go 0.9", "advantage", lambda: algos.reward_to_go(0.9), to_go(0.9), tokens=True),
    Row("to_turns", "advantage", algos.to_turns, to_turns(1.0)),
    Row("to_turns 0.9", "advantage", lambda: algos.to_turns(0.9), to_turns(0.9)),
    Row("turn_center", "advantage", algos.turn_center, turn_centred, tokens=True, compiles=False),
    Row("turn_gae", "advantage", lambda: algos.turn_gae(0.9, 0.7), turn_gae(0.9, 0.7), tokens=True),
    Row("whiten", "advantage", algos.whiten, whitened(1e-8), tokens=True),
    Row("leave_one_out", "advantage", algos.leave_one_out, by_group(leave_one_out)),
    Row("win_rate", "advantage", algos.win_rate, by_group(win_rate)),
    Row("best_of_group", "advantage", algos.best_of_group, by_group(lead(1e-6))),
    Row("best_of_group raw", "advantage", lambda: algos.best_of_group(None), by_group(lead(None))),
    Row(
        "greedy_baseline",
        "advantage",
        algos.greedy_baseline,
        lambda x, b: {"x": [v - g for v, g in zip(x, b.greedy_score, strict=True)]},
    ),
    Row(
        "prompt_baseline",
        "advantage",
        algos.prompt_baseline,
        lambda x, b: {"x": [v - g for v, g in zip(x, b.prompt_value, strict=True)]},
    ),
    Row("length_weighted_center", "advantage", algos.length_weighted_center, length_weighted),
    Row("informative_rescale", "advantage", algos.informative_rescale, informative),
    Row(
        "informative_rescale zeros",
        "advantage",
        lambda: algos.chain(algos.group_center(), algos.informative_rescale()),
        lambda x, b: informative(by_group(lambda own, group, k: own - mean(group))(x, b)["x"], b),
    ),
    Row("decoupled_groups", "advantage", algos.decoupled_groups, decoupled([1.0, 1.0, 1.0], 1e-6)),
    Row(
        "decoupled_groups weights",
        "advantage",
        lambda: algos.decoupled_groups([0.5, 0.0, 2.0], 0.01),
        decoupled([0.5, 0.0, 2.0], 0.01),
    ),
    Row(
        "decoupled_groups after a penalty",
        "advantage",
        lambda: algos.chain(algos.overlong_penalty(11, 8, 0.5), algos.decoupled_groups()),
        penalised(overlong(11, 8, 0.5), decoupled([1.0, 1.0, 1.0], 1e-6)),
    ),
    Row(
        "decoupled_groups without the deviation",
        "advantage",
        lambda: algos.decoupled_groups([0.5, 0.0, 2.0], deviation=False),
        decoupled([0.5, 0.0, 2.0], None),
    ),
    Row(
        "decoupled_groups where some do not apply",
        "advantage",
        algos.decoupled_groups,
        decoupled([1.0, 1.0, 1.0], 1e-6),
        prepare=some_do_not_apply,
    ),
    Row(
        "weighted_scores where some do not apply",
        "advantage",
        lambda: algos.weighted_scores([0.5, -1.0, 2.0]),
        lambda x, b: {
            "x": [sum(w * s for w, s in zip((0.5, -1.0, 2.0), row, strict=True) if s == s) for row in b.scores]
        },
        prepare=some_do_not_apply,
    ),
    Row(
        "weighted_scores",
        "advantage",
        lambda: algos.weighted_scores([0.5, -1.0, 2.0]),
        lambda x, b: {"x": [0.5 * s[0] - s[1] + 2.0 * s[2] for s in b.scores]},
    ),
    Row(
        "weighted_scores equal",
        "advantage",
        algos.weighted_scores,
        lambda x, b: {"x": [sum(s) for s in b.scores]},
    ),
    Row(
        "optimal_token_baseline",
        "advantage",
        algos.optimal_token_baseline,
        optimal(False, False),
        tokens=True,
    ),
    Row(
        "optimal_token_baseline turns",
        "advantage",
        lambda: algos.optimal_token_baseline(turns=True, raw_tail=True),
        optimal(True, True),
        tokens=True,
    ),
    Row(
        "optimal_token_baseline after a rejection",
        "advantage",
        lambda: algos.chain(algos.reject_ratio("token", 0.9, 1.3), algos.optimal_token_baseline(raw_tail=True)),
        optimal(False, True, keep=lambda b, i, t: 0.9 <= exp(b.old_logp[i][t] - b.rollout_logp[i][t]) <= 1.3),
        tokens=True,
    ),
    Row(
        "optimal_token_baseline weighted",
        "advantage",
        lambda: algos.optimal_token_baseline(raw_tail=True),
        optimal(False, True, rho=True),
        tokens=True,
    ),
    Row(
        "implicit_rewards",
        "advantage",
        lambda: algos.implicit_rewards(0.1, 2.0),
        process(0.1, 2.0),
        tokens=True,
    ),
    Row(
        "label_outcomes",
        "advantage",
        algos.label_outcomes,
        labelled,
        prepare=lambda batch: batch._replace(score=batch.score.sigmoid()),
    ),
    Row(
        "implicit_reward_loss",
        "loss",
        lambda: algos.implicit_reward_loss(0.3),
        implicit_loss(0.3),
        smooth=True,
    ),
]
