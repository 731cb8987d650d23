"""Preference and reward-model terms and their references: scalar loops in float64, written from the formulas.

Sequences 2i and 2i + 1 are the chosen and the rejected one of pair i.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log
from typing import Any, NamedTuple

import pieces
import torch
from rows_terms import Losses, TermRow, less_likely, table_rows
from sequences import apart

from funrl import algos
from funrl.batch import map_kinds


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


def on_pairs(
    formula: Callable[[float, float], float], reward: Callable[[dict], float]
) -> Callable[[list[dict]], Losses]:
    """The loss of a pair on all tokens of its two sequences."""

    def reference(seqs):
        losses = []
        for i in range(0, len(seqs), 2):
            loss = formula(reward(seqs[i]), reward(seqs[i + 1]))
            losses += [[loss] * len(seqs[i]["logp"]), [loss] * len(seqs[i + 1]["logp"])]
        return losses

    return reference


def log_ratio(s: dict) -> float:
    return sum(p - q for p, q in zip(s["logp"], s["ref_logp"], strict=True))


def mean_log_ratio(s: dict) -> float:
    return log_ratio(s) / len(s["logp"])


def likelihood(s: dict) -> float:
    return sum(s["logp"])


def mean_likelihood(s: dict) -> float:
    return sum(s["logp"]) / len(s["logp"])


def exo(beta: float, eps: float) -> Callable[[float, float], float]:
    def formula(c, r):
        chosen, rejected = exp(beta * c), exp(beta * r)
        p, q = chosen / (chosen + rejected), rejected / (chosen + rejected)
        return p * log(p / (1 - eps)) + q * log(q / eps)

    return formula


def discopop(beta: float, tau: float) -> Callable[[float, float], float]:
    def formula(c, r):
        d = beta * (c - r)
        gate = sigmoid(d / tau)
        return (1 - gate) * -log(sigmoid(d)) + gate * exp(-d)

    return formula


PAIR_LOSSES: dict[str, tuple[Any, Callable[[float, float], float]]] = {
    "sigmoid_pairs": (algos.sigmoid_pairs(0.3), lambda c, r: -log(sigmoid(0.3 * (c - r)))),
    "sigmoid_pairs smoothed": (
        algos.sigmoid_pairs(0.3, smoothing=0.1),
        lambda c, r: -0.9 * log(sigmoid(0.3 * (c - r))) - 0.1 * log(sigmoid(0.3 * (r - c))),
    ),
    "hinge_pairs": (algos.hinge_pairs(0.9), lambda c, r: max(0.0, 1 - 0.9 * (c - r))),
    "robust_pairs": (
        algos.robust_pairs(0.3, 0.1),
        lambda c, r: (-0.9 * log(sigmoid(0.3 * (c - r))) + 0.1 * log(sigmoid(0.3 * (r - c)))) / 0.8,
    ),
    "exo_pairs": (algos.exo_pairs(0.3, 0.01), exo(0.3, 0.01)),
    "nca_pairs": (
        algos.nca_pairs(0.3),
        lambda c, r: -log(sigmoid(0.3 * c)) - 0.5 * log(sigmoid(-0.3 * c)) - 0.5 * log(sigmoid(-0.3 * r)),
    ),
    "bco_pairs": (algos.bco_pairs(0.3), lambda c, r: -log(sigmoid(0.3 * c)) - log(1 - sigmoid(0.3 * r))),
    "sppo_pairs": (algos.sppo_pairs(0.5), lambda c, r: (c - 1.0) ** 2 + (r + 1.0) ** 2),
    "apo_zero_pairs": (algos.apo_zero_pairs(0.3), lambda c, r: 1 - sigmoid(0.3 * c) + sigmoid(0.3 * r)),
    "apo_down_pairs": (
        algos.apo_down_pairs(0.3),
        lambda c, r: sigmoid(0.3 * c) + 1 - sigmoid(0.3 * (c - r)),
    ),
    "discopop_pairs": (algos.discopop_pairs(0.3, 0.5), discopop(0.3, 0.5)),
}


def ranked(paired: bool) -> Callable[[list[dict]], Losses]:
    """AOT: both sides in ascending order, the i-th with the i-th."""

    def reference(seqs):
        upper, lower = [], []
        for i in range(0, len(seqs), 2):
            c, r = seqs[i], seqs[i + 1]
            upper.append(likelihood(c) - likelihood(r) if paired else log_ratio(c))
            lower.append(sum(c["ref_logp"]) - sum(r["ref_logp"]) if paired else log_ratio(r))
        losses: Losses = [[] for _ in seqs]
        for number, value in zip(sorted(range(len(upper)), key=upper.__getitem__), sorted(lower), strict=True):
            d = 0.3 * (upper[number] - value)
            loss = -0.9 * log(sigmoid(d)) - 0.1 * log(sigmoid(-d))
            for i in (2 * number, 2 * number + 1):
                losses[i] = [loss] * len(seqs[i]["logp"])
        return losses

    return reference


def odds(c: float, r: float) -> float:
    p, q = exp(c), exp(r)
    return -0.2 * log(sigmoid(log(p / (1 - p)) - log(q / (1 - q))))


def kto(beta: float, desirable: float, undesirable: float, baseline: bool) -> Callable[[list[dict]], Losses]:
    def reference(seqs):
        losses = []
        for s in seqs:
            gain = beta * (log_ratio(s) - (s["kl_baseline"][0] if baseline else 0.0))
            good = s["label"][0] == 1.0
            loss = desirable * (1 - sigmoid(gain)) if good else undesirable * (1 - sigmoid(-gain))
            losses.append([loss] * len(s["logp"]))
        return losses

    return reference


def bradley_terry(center: float, margin: bool) -> Callable[[list[dict]], Losses]:
    def reference(seqs):
        losses = []
        for i in range(0, len(seqs), 2):
            c, r = seqs[i], seqs[i + 1]
            gap = c["logp"][-1] - r["logp"][-1] - (c["margin"][0] if margin else 0.0)
            loss = -log(sigmoid(gap)) + center * (c["logp"][-1] + r["logp"][-1]) ** 2
            losses += [[loss] * len(s["logp"]) for s in (c, r)]
        return losses

    return reference


def cross_entropy(seqs: list[dict]) -> Losses:
    return [
        [-y * log(sigmoid(x)) - (1 - y) * log(1 - sigmoid(x)) for x, y in zip(s["logp"], s["label"], strict=True)]
        for s in seqs
    ]


SLOPES = {  # f'(u) of f-DPO, u the ratio of a completion
    "reverse_kl": lambda u: log(u) + 1,
    "forward_kl": lambda u: -1 / u,
    "js": lambda u: log(2 * u / (1 + u)),
    "alpha": lambda u: (1 - u**-0.4) / 0.4,
}


def dpo_loss(beta: float) -> Callable[[float, float], float]:
    return lambda c, r: -log(sigmoid(beta * (c - r)))


def desensitised(alpha: float) -> Callable[[list[dict]], Losses]:
    """LD-DPO: log-ratios beyond the length of the shorter completion of a pair count alpha."""

    def reference(seqs):
        losses = []
        for i in range(0, len(seqs), 2):
            pair = seqs[i : i + 2]
            public = min(len(s["logp"]) for s in pair)
            moved = [[p - q for p, q in zip(s["logp"], s["ref_logp"], strict=True)] for s in pair]
            chosen, rejected = (sum(d[:public]) + alpha * sum(d[public:]) for d in moved)
            losses += [[dpo_loss(0.3)(chosen, rejected)] * len(s["logp"]) for s in pair]
        return losses

    return reference


def on_policy(seqs: list[dict], bound: float = 1.0) -> Losses:
    """WPO: DPO's loss times how likely the policy is to write both completions, a constant."""
    losses = []
    for i in range(0, len(seqs), 2):
        pair, weight = seqs[i : i + 2], 1.0
        for s in pair:
            relative = [p - log(z) for p, z in zip(s["held"], s["sum_pi_squared"], strict=True)]
            weight *= exp(sum(relative) / len(relative))
        loss = min(weight, bound) * dpo_loss(0.3)(log_ratio(pair[0]), log_ratio(pair[1]))
        losses += [[loss] * len(s["logp"]) for s in pair]
    return losses


TERMS = [
    *(
        TermRow(
            name, lambda loss=loss: algos.preference(loss, algos.reference_log_ratio()), on_pairs(formula, log_ratio)
        )
        for name, (loss, formula) in PAIR_LOSSES.items()
    ),
    TermRow(
        "ipo_pairs",
        lambda: algos.preference(algos.ipo_pairs(0.4), algos.reference_log_ratio(per_token=True)),
        on_pairs(lambda c, r: (c - r - 1.25) ** 2, mean_log_ratio),
    ),
    *(
        TermRow(
            f"reference_log_ratio {kind}",
            lambda kind=kind: algos.preference(
                algos.sigmoid_pairs(0.3), algos.reference_log_ratio(divergence=kind, divergence_alpha=0.4)
            ),
            on_pairs(dpo_loss(0.3), lambda s, slope=slope: slope(exp(log_ratio(s)))),
        )
        for kind, slope in SLOPES.items()
    ),
    TermRow(
        "reference_log_ratio length_alpha",
        lambda: algos.preference(algos.sigmoid_pairs(0.3), algos.reference_log_ratio(length_alpha=0.4)),
        desensitised(0.4),
        also=("beyond_shorter", "of_completions"),
    ),
    TermRow(
        "on_policy_weight",
        lambda: algos.preference(algos.sigmoid_pairs(0.3), algos.reference_log_ratio(), algos.on_policy_weight()),
        on_policy,
        stops=True,
    ),
    TermRow(
        "on_policy_weight unbounded",
        lambda: algos.preference(algos.sigmoid_pairs(0.3), algos.reference_log_ratio(), algos.on_policy_weight(None)),
        lambda seqs: on_policy(seqs, float("inf")),
        stops=True,
    ),
    TermRow(
        "log_likelihood alpha",
        lambda: algos.preference(algos.sigmoid_pairs(2.0, margin=0.8), algos.log_likelihood(per_token=True, alpha=0.3)),
        on_pairs(
            lambda c, r: -log(sigmoid(2.0 * (c - r) - 0.8)),
            lambda s: (1 - exp(mean_likelihood(s)) ** -0.3) / 0.3,
        ),
        also=("alpha_reward",),
    ),
    TermRow(
        "preference log_likelihood per_token",
        lambda: algos.preference(algos.sigmoid_pairs(2.0, margin=0.8), algos.log_likelihood(per_token=True)),
        on_pairs(lambda c, r: -log(sigmoid(2.0 * (c - r) - 0.8)), mean_likelihood),
    ),
    TermRow(
        "preference log_likelihood",
        lambda: algos.preference(algos.sigmoid_pairs(0.2), algos.log_likelihood()),
        on_pairs(lambda c, r: -log(sigmoid(0.2 * (c - r))), likelihood),
    ),
    TermRow("aot", lambda: algos.aot(0.3, 0.1), ranked(True), splits=False),
    TermRow("aot unpaired", lambda: algos.aot(0.3, 0.1, paired=False), ranked(False), splits=False),
    TermRow("odds_ratio", lambda: algos.odds_ratio(0.2), on_pairs(odds, mean_likelihood)),
    TermRow("kto_loss", lambda: algos.kto_loss(0.3, 1.2, 0.7), kto(0.3, 1.2, 0.7, True)),
    TermRow("kto_loss no baseline", lambda: algos.kto_loss(0.3, baseline=False), kto(0.3, 1.0, 1.0, False)),
    TermRow("pairwise_reward", algos.pairwise_reward, bradley_terry(0.0, False)),
    TermRow(
        "pairwise_reward margin",
        lambda: algos.pairwise_reward(0.1, margin=True),
        bradley_terry(0.1, True),
    ),
    TermRow("step_reward", algos.step_reward, cross_entropy),
]


class LossRow(NamedTuple):
    """One whole loss to test: `reference` gives numerator and denominator of each part from the sequences."""

    name: str
    make: Callable[[], Any]
    reference: Callable[[list[dict]], list[tuple[float, float]]]


def pair_mean(formula: Callable[[float, float], float], reward: Callable[[dict], float]):
    """Numerator and denominator over sequences: each pair counts twice in both."""

    def value(seqs):
        losses = [formula(reward(seqs[i]), reward(seqs[i + 1])) for i in range(0, len(seqs), 2)]
        return 2 * sum(losses), 2.0 * len(losses)

    return value


def chosen_nll(seqs: list[dict], weight: float = 1.0) -> tuple[float, float]:
    tokens = [-weight * p for s in seqs[::2] for p in s["logp"]]
    return sum(tokens), float(len(tokens))


def simpo_loss(c: float, r: float) -> float:
    return -log(sigmoid(2.0 * (c - r) - 0.8))


LOSSES = [
    LossRow(
        "dpo", lambda: algos.dpo(beta=0.3).losses["policy"], lambda seqs: [pair_mean(dpo_loss(0.3), log_ratio)(seqs)]
    ),
    LossRow(
        "simpo",
        lambda: algos.simpo(2.0, 0.8).losses["policy"],
        lambda seqs: [pair_mean(simpo_loss, mean_likelihood)(seqs)],
    ),
    LossRow(
        "cpo",
        lambda: algos.cpo(0.2, 0.5).losses["policy"],
        lambda seqs: [pair_mean(dpo_loss(0.2), likelihood)(seqs), chosen_nll(seqs, 0.5)],
    ),
    LossRow(
        "orpo",
        lambda: algos.orpo(0.2).losses["policy"],
        lambda seqs: [chosen_nll(seqs), pair_mean(odds, mean_likelihood)(seqs)],
    ),
    LossRow(
        "chosen_likelihood",
        lambda: algos.chosen_likelihood(0.7),
        lambda seqs: [chosen_nll(seqs, 0.7)],
    ),
]


# ---- triples, side by side, two to a batch


def triples_of_example(batch):
    """Rows 0, 1, 2 and rows 3, 5, 6 of the example as two triples."""
    batch = less_likely(batch)
    parts = [torch.tensor(rows) for rows in ([0, 3], [1, 5], [2, 6])]
    width, lengths = batch.mask.shape[1], [batch.length[rows] for rows in parts]
    real = [torch.arange(width) < length[:, None] for length in lengths]
    segments = torch.cat([number * on.long() for number, on in enumerate(real, 1)], 1)

    def join(kind, x):
        return torch.cat([x[rows] for rows in parts], 1) if kind.per_token else x[parts[0]]

    return map_kinds(join, batch)._replace(segments=segments, length=2 * width + lengths[2])


def tpo_loss(beta, margin, coef, reward):
    def reference(seqs):
        pairs = [s for i, s in enumerate(seqs) if i % 3 < 2]
        tokens = [-coef * p for s in seqs[2::3] for p in s["logp"]]
        contrast = pair_mean(lambda c, r: -log(sigmoid(beta * (c - r) - margin)), reward)(pairs)
        return [contrast, (sum(tokens), float(len(tokens)))]

    return reference


TRIPLES = [
    LossRow("tpo", lambda: algos.tpo(0.3, 0.7).losses["policy"], tpo_loss(0.3, 0.0, 0.7, likelihood)),
    LossRow(
        "tpo per_token",
        lambda: algos.tpo(2.0, 1.0, per_token=True, margin=0.8).losses["policy"],
        tpo_loss(2.0, 0.8, 1.0, mean_likelihood),
    ),
    LossRow(
        "gold_likelihood",
        lambda: algos.gold_likelihood(0.7),
        lambda seqs: tpo_loss(1.0, 0.0, 0.7, likelihood)(seqs)[1:],
    ),
]


# ---- rows of the table of pieces: pairs side by side, three to a batch


def pairs_of_example(batch):
    batch = less_likely(batch)._replace(
        label=batch.label[:, :1].expand(batch.mask.shape), margin=batch.margin[:1, :1].expand(batch.mask.shape)
    )
    return algos.side_by_side(batch, torch.tensor([0, 3, 5]), torch.tensor([1, 2, 6]))


def on_loss(reference: Callable[[list[dict]], list[tuple[float, float]]]):
    return lambda logp, b: reference(apart(logp, b)[0])


ROWS = [
    *table_rows([row._replace(prepare=pairs_of_example) for row in TERMS], packed=False),
    *(
        pieces.Row(
            row.name, "loss", row.make, on_loss(row.reference), prepare=pairs_of_example, packed=False, smooth=True
        )
        for row in LOSSES
    ),
    *(
        pieces.Row(
            row.name, "loss", row.make, on_loss(row.reference), prepare=triples_of_example, packed=False, smooth=True
        )
        for row in TRIPLES
    ),
]
