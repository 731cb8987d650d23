"""Preference and reward-model terms and their references: scalar loops in float64, written from the formulas.

Sequences 2i and 2i + 1 are the chosen and the rejected one of pair i.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log
from typing import Any, NamedTuple

import pieces
import pytest
import torch
from rows_terms import Losses, TermRow, less_likely, table_rows
from sequences import apart

from funrl.algos import pair_losses as pairs
from funrl.algos import preference, reward_losses
from funrl.algos.preference import log_likelihood, reference_log_ratio


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
    "pair_losses.sigmoid_pairs": (pairs.sigmoid_pairs(0.3), lambda c, r: -log(sigmoid(0.3 * (c - r)))),
    "pair_losses.sigmoid_pairs smoothed": (
        pairs.sigmoid_pairs(0.3, smoothing=0.1),
        lambda c, r: -0.9 * log(sigmoid(0.3 * (c - r))) - 0.1 * log(sigmoid(0.3 * (r - c))),
    ),
    "pair_losses.hinge_pairs": (pairs.hinge_pairs(0.9), lambda c, r: max(0.0, 1 - 0.9 * (c - r))),
    "pair_losses.robust_pairs": (
        pairs.robust_pairs(0.3, 0.1),
        lambda c, r: (-0.9 * log(sigmoid(0.3 * (c - r))) + 0.1 * log(sigmoid(0.3 * (r - c)))) / 0.8,
    ),
    "pair_losses.exo_pairs": (pairs.exo_pairs(0.3, 0.01), exo(0.3, 0.01)),
    "pair_losses.nca_pairs": (
        pairs.nca_pairs(0.3),
        lambda c, r: -log(sigmoid(0.3 * c)) - 0.5 * log(sigmoid(-0.3 * c)) - 0.5 * log(sigmoid(-0.3 * r)),
    ),
    "pair_losses.bco_pairs": (pairs.bco_pairs(0.3), lambda c, r: -log(sigmoid(0.3 * c)) - log(1 - sigmoid(0.3 * r))),
    "pair_losses.sppo_pairs": (pairs.sppo_pairs(0.5), lambda c, r: (c - 1.0) ** 2 + (r + 1.0) ** 2),
    "pair_losses.apo_zero_pairs": (pairs.apo_zero_pairs(0.3), lambda c, r: 1 - sigmoid(0.3 * c) + sigmoid(0.3 * r)),
    "pair_losses.apo_down_pairs": (
        pairs.apo_down_pairs(0.3),
        lambda c, r: sigmoid(0.3 * c) + 1 - sigmoid(0.3 * (c - r)),
    ),
    "pair_losses.discopop_pairs": (pairs.discopop_pairs(0.3, 0.5), discopop(0.3, 0.5)),
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


TERMS = [
    *(
        TermRow(
            name, lambda loss=loss: preference.preference(loss, reference_log_ratio()), on_pairs(formula, log_ratio)
        )
        for name, (loss, formula) in PAIR_LOSSES.items()
    ),
    TermRow(
        "pair_losses.ipo_pairs",
        lambda: preference.preference(pairs.ipo_pairs(0.4), reference_log_ratio(per_token=True)),
        on_pairs(lambda c, r: (c - r - 1.25) ** 2, mean_log_ratio),
    ),
    TermRow(
        "preference.preference log_likelihood per_token",
        lambda: preference.preference(pairs.sigmoid_pairs(2.0, margin=0.8), log_likelihood(per_token=True)),
        on_pairs(lambda c, r: -log(sigmoid(2.0 * (c - r) - 0.8)), mean_likelihood),
    ),
    TermRow(
        "preference.preference log_likelihood",
        lambda: preference.preference(pairs.sigmoid_pairs(0.2), log_likelihood()),
        on_pairs(lambda c, r: -log(sigmoid(0.2 * (c - r))), likelihood),
    ),
    TermRow("preference.aot", lambda: preference.aot(0.3, 0.1), ranked(True), splits=False),
    TermRow("preference.aot unpaired", lambda: preference.aot(0.3, 0.1, paired=False), ranked(False), splits=False),
    TermRow("preference.odds_ratio", lambda: preference.odds_ratio(0.2), on_pairs(odds, mean_likelihood)),
    TermRow("preference.kto", lambda: preference.kto(0.3, 1.2, 0.7), kto(0.3, 1.2, 0.7, True)),
    TermRow("preference.kto no baseline", lambda: preference.kto(0.3, baseline=False), kto(0.3, 1.0, 1.0, False)),
    TermRow("reward_losses.pairwise_reward", reward_losses.pairwise_reward, bradley_terry(0.0, False)),
    TermRow(
        "reward_losses.pairwise_reward margin",
        lambda: reward_losses.pairwise_reward(0.1, margin=True),
        bradley_terry(0.1, True),
    ),
    TermRow("reward_losses.step_reward", reward_losses.step_reward, cross_entropy),
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


def dpo_loss(beta: float) -> Callable[[float, float], float]:
    return lambda c, r: -log(sigmoid(beta * (c - r)))


def simpo_loss(c: float, r: float) -> float:
    return -log(sigmoid(2.0 * (c - r) - 0.8))


LOSSES = [
    LossRow("preference.dpo", lambda: preference.dpo(0.3), lambda seqs: [pair_mean(dpo_loss(0.3), log_ratio)(seqs)]),
    LossRow(
        "preference.simpo",
        lambda: preference.simpo(2.0, 0.8),
        lambda seqs: [pair_mean(simpo_loss, mean_likelihood)(seqs)],
    ),
    LossRow(
        "preference.cpo",
        lambda: preference.cpo(0.2, 0.5),
        lambda seqs: [pair_mean(dpo_loss(0.2), likelihood)(seqs), chosen_nll(seqs, 0.5)],
    ),
    LossRow(
        "preference.orpo",
        lambda: preference.orpo(0.2),
        lambda seqs: [chosen_nll(seqs), pair_mean(odds, mean_likelihood)(seqs)],
    ),
    LossRow(
        "preference.chosen_likelihood",
        lambda: preference.chosen_likelihood(0.7),
        lambda seqs: [chosen_nll(seqs, 0.7)],
    ),
]


# ---- rows of the table of pieces: pairs side by side, three to a batch


def pairs_of_example(batch):
    batch = less_likely(batch)._replace(
        label=batch.label[:, :1].expand(batch.mask.shape), margin=batch.margin[:1, :1].expand(batch.mask.shape)
    )
    return preference.side_by_side(batch, torch.tensor([0, 3, 5]), torch.tensor([1, 2, 6]))


def check_layout():
    """Pairs of rows side by side hold the same sequences as the rows, in the order of the pairs."""
    batch = pieces.example()
    chosen, rejected = torch.tensor([5, 0]), torch.tensor([2, 6])
    both = preference.side_by_side(batch, chosen, rejected)
    rows, _ = apart(batch.old_logp.tolist(), pieces.plain(batch))
    number = {row: k for k, row in enumerate(pieces.sequences(pieces.plain(batch)))}
    got, _ = apart(both.old_logp.tolist(), pieces.plain(both))
    for k, row in enumerate((5, 2, 0, 6)):
        want = rows[number[row]]
        for name in ("logp", "advantage", "ref_logp", "label", "entropy"):
            assert got[k][name] == want[name]
    assert both.segments.tolist()[0] == [1] * 8 + [0] * 5 + [2] * 12 + [0]
    assert both.positions.tolist()[1] == [*range(13), *range(13)]
    assert both.length.tolist() == [13 + 12, 13 + 8]
    assert both.score.tolist() == batch.score[chosen].tolist()
    assert preference.chosen(both).tolist()[0] == [True] * 8 + [False] * 18
    alternate = batch._replace(segments=None)
    assert preference.chosen(alternate).flatten().tolist() == [True, False] * 3 + [True]
    with pytest.raises(ValueError, match="7 rows"):
        preference.pair_sums(batch.old_logp, batch)


def check_places():
    """What stands for a pair reaches the tokens of its two sequences and no others; empty places are not counted."""
    both = pairs_of_example(pieces.example())
    present = preference.pairs_present(both)
    assert present.sum() == 3
    placed = preference.to_pair_tokens(torch.arange(float(present.numel())), both)
    per_row = present.numel() // 3
    for row in range(3):
        assert placed[row][both.mask[row]].unique().tolist() == [float(row * per_row)]
        assert (placed[row][~both.mask[row]] == 0).all()
    logp = both.ref_logp + torch.where(preference.chosen(both), 0.1, -0.1)
    _, metrics = preference.preference(pairs.sigmoid_pairs(), reference_log_ratio())(logp, both)
    assert metrics["preference/accuracy"] == (3, 3)
    _, same = preference.preference(pairs.sigmoid_pairs(), reference_log_ratio())(both.ref_logp, both)
    assert same["preference/accuracy"] == (1.5, 3)  # ties
    moved = both.ref_logp + torch.where(preference.chosen(both), torch.tensor([[0.1], [0.0], [-0.1]]), 0.0)
    _, each = preference.preference(pairs.sigmoid_pairs(), reference_log_ratio())(moved, both)
    assert each["preference/accuracy"] == (1.5, 3)  # one won, one tied, one lost
    lengths = both.mask.sum().item()
    assert metrics["preference/margin"].value.item() == pytest.approx(0.1 * lengths / 3)


def check_ranking():
    """The best and the worst of each group; ties take the first row, equal groups are left out."""
    score = torch.tensor([0.5, 1.0, 0.0, 2.0, 1.0, 0.0, 3.0, 3.0, 7.0])
    group = torch.tensor([4, 9, 4, 4, 9, 9, 2, 2, 1])
    chosen, rejected = preference.best_and_worst(score, group)
    assert chosen.tolist() == [3, 1]
    assert rejected.tolist() == [2, 5]
    batch = pieces.example()
    both = preference.online_pairs(batch)
    high, low = (f([0, 2, 4], key=batch.score.__getitem__) for f in (max, min))  # one of the two groups of several
    assert both.score.tolist()[1] == batch.score[high].item()
    assert both.mask[1].tolist() == batch.mask[high].tolist() + batch.mask[low].tolist()


def check_reference_point():
    """The mean over sequences of the summed log-ratio, cut at 0, whatever the layout."""
    batch = pieces.example()
    seqs, _ = apart(pieces.policy_logp(batch).tolist(), pieces.plain(batch))
    want = sum(log_ratio(s) for s in seqs) / len(seqs)
    for sign in (1, -1):
        shift = torch.zeros_like(batch.ref_logp) + sign
        z = preference.reference_point(pieces.policy_logp(batch) + shift, batch)
        tokens = sum(len(s["logp"]) for s in seqs)
        assert z.shape == batch.mask.shape
        assert z[0, 0].item() == pytest.approx(max(0.0, want + sign * tokens / len(seqs)))


def check_last_tokens():
    both = pairs_of_example(pieces.example())
    last = reward_losses.last_tokens(both.mask, both.segments)
    _, places = apart(both.old_logp.tolist(), pieces.plain(both))
    assert sorted((i, t) for i, t in last.nonzero().tolist()) == sorted(at[-1] for at in places)


def check_arguments():
    for make, name in (
        (lambda: pairs.sigmoid_pairs(0.0), "beta"),
        (lambda: pairs.robust_pairs(smoothing=0.5), "smoothing"),
        (lambda: pairs.exo_pairs(smoothing=0.0), "smoothing"),
        (lambda: preference.kto(-1.0), "beta"),
    ):
        with pytest.raises(ValueError, match=name):
            make()


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
    pieces.Row(
        "preference.side_by_side",
        "check",
        check_layout,
        also=("preference.chosen", "preference.pair_sums", "preference.log_likelihood"),
    ),
    pieces.Row(
        "preference.to_pair_tokens",
        "check",
        check_places,
        also=("preference.pairs_present", "preference.pair_metrics", "preference.reference_log_ratio"),
    ),
    pieces.Row("preference.best_and_worst", "check", check_ranking, also=("preference.online_pairs",)),
    pieces.Row("preference.reference_point", "check", check_reference_point),
    pieces.Row("reward_losses.last_tokens", "check", check_last_tokens),
    pieces.Row("pair_losses.check_beta", "check", check_arguments, also=("pair_losses.smoothed",)),
]
