"""What is made of rewards before they become advantages: references, loops over Python floats."""

from math import exp, sqrt

import torch
from pieces import Row, grid, sampled, sequences

from funrl.algos import core, shaping


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


def check_adaptive():
    """beta is multiplied by 1 + clip(KL / target - 1, -0.2, 0.2) rows / horizon; by hand, and at the clip."""
    control = shaping.adaptive_kl(0.1, target=2.0, horizon=100)
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
    fixed = shaping.fixed_kl(0.3)
    assert fixed.update(fixed.init(), torch.tensor(99.0, dtype=torch.float64), 10).item() == 0.3


ROWS = [
    Row("shaping.to_tokens", "advantage", shaping.to_tokens, spread),
    Row("shaping.to_last_token", "advantage", shaping.to_last_token, at_last),
    Row(
        "shaping.to_last_token outcome",
        "advantage",
        shaping.to_last_token,
        at_last,
        prepare=lambda batch: batch._replace(token_reward=None),
    ),
    Row("shaping.token_rewards", "advantage", lambda: shaping.token_rewards(shaping.fixed_kl(0.2)), last_less_kl(0.2)),
    Row(
        "shaping.kl_in_reward",
        "advantage",
        lambda: core.chain(shaping.to_last_token(), shaping.kl_in_reward(shaping.adaptive_kl(0.3, 0.1))),
        last_less_kl(0.3),
    ),
    Row(
        "shaping.kl_in_reward rows",
        "advantage",
        lambda: shaping.kl_in_reward(shaping.fixed_kl(0.3), "k3"),
        lambda x, b: {"x": [v - 0.3 * sum(k3(b, i, t) for t in sampled(b, i)) for i, v in enumerate(x)]},
    ),
    Row("shaping.adaptive_kl", "check", check_adaptive, also=("shaping.fixed_kl",)),
    Row(
        "shaping.clip_reward",
        "advantage",
        lambda: shaping.clip_reward(-0.2, 0.5),
        lambda x, b: {"x": [min(max(v, -0.2), 0.5) for v in x]},
    ),
    Row("shaping.overlong_penalty", "advantage", lambda: shaping.overlong_penalty(11, 8, 0.5), overlong(11, 8, 0.5)),
    Row("shaping.stop_properly", "advantage", lambda: shaping.stop_properly(0.3), truncated(lambda v: 0.3 * v)),
    Row("shaping.stop_properly set", "advantage", lambda: shaping.stop_properly(-1.0), truncated(lambda v: -1.0)),
    Row("shaping.running_normalise", "advantage", shaping.running_normalise, normalised),
]
