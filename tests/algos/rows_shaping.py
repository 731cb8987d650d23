"""What is made of rewards before they become advantages: references, loops over Python floats."""

from math import exp, sqrt

from pieces import Row, grid, sampled, sequences

from funrl import algos


def spread(x, b):
    return {"x": [[x[i] if on else 0.0 for on in row] for i, row in enumerate(b.mask)]}


def at_last(x, b):
    out = grid(b)
    for i in sequences(b):
        for t in sampled(b, i):
            out[i][t] = b.token_reward[i][t] if b.token_reward is not None else 0.0
        out[i][sampled(b, i)[-1]] += x[i]
    return {"x": out}


def less_kl(beta):
    def reference(x, b):
        out = [list(row) for row in x]
        for i in sequences(b):
            for t in sampled(b, i):
                out[i][t] -= beta * (b.old_logp[i][t] - b.ref_logp[i][t])
        return {"x": masked(out, b)}

    return reference


def k3(b, i, t):
    d = b.ref_logp[i][t] - b.old_logp[i][t]
    return exp(d) - 1 - d


def last_less_kl(beta):
    return lambda x, b: less_kl(beta)(at_last(x, b)["x"], b)


def masked(x, b):
    return [[v if on else 0.0 for v, on in zip(*rows, strict=True)] for rows in zip(x, b.mask, strict=True)]


def overlong(limit, buffer, factor):
    def reference(x, b):
        beyond = [len(sampled(b, i)) - (limit - buffer) for i in range(len(x))]
        return {"x": [v + min(0.0, -n / buffer * factor) for v, n in zip(x, beyond, strict=True)]}

    return reference


def truncated(change):
    return lambda x, b: {"x": [change(v) if cut else v for v, cut in zip(x, b.truncated, strict=True)]}


def normalised(x, b):
    centre = sum(x) / len(x)
    return {"x": [(v - centre) / sqrt(sum((u - centre) ** 2 for u in x) / len(x) + 1e-8) for v in x]}


ROWS = [
    Row("to_tokens", "advantage", algos.to_tokens, spread),
    Row("to_last_token", "advantage", algos.to_last_token, at_last),
    Row(
        "to_last_token outcome",
        "advantage",
        algos.to_last_token,
        at_last,
        prepare=lambda batch: batch._replace(token_reward=None),
    ),
    Row("token_rewards", "advantage", lambda: algos.token_rewards(algos.fixed_kl(0.2)), last_less_kl(0.2)),
    Row(
        "kl_in_reward",
        "advantage",
        lambda: algos.chain(algos.to_last_token(), algos.kl_in_reward(algos.adaptive_kl(0.3, 0.1))),
        last_less_kl(0.3),
    ),
    Row(
        "kl_in_reward rows",
        "advantage",
        lambda: algos.kl_in_reward(algos.fixed_kl(0.3), "k3"),
        lambda x, b: {"x": [v - 0.3 * sum(k3(b, i, t) for t in sampled(b, i)) for i, v in enumerate(x)]},
    ),
    Row(
        "clip_reward",
        "advantage",
        lambda: algos.clip_reward(-0.2, 0.5),
        lambda x, b: {"x": [min(max(v, -0.2), 0.5) for v in x]},
    ),
    Row("overlong_penalty", "advantage", lambda: algos.overlong_penalty(11, 8, 0.5), overlong(11, 8, 0.5)),
    Row("stop_properly", "advantage", lambda: algos.stop_properly(0.3), truncated(lambda v: 0.3 * v)),
    Row("stop_properly set", "advantage", lambda: algos.stop_properly(-1.0), truncated(lambda v: -1.0)),
    Row("running_normalise", "advantage", algos.running_normalise, normalised),
]
