"""Policy terms and their references: scalar loops in float64, written from the formulas.

A reference maps sequences (masked positions only) to the loss of every token. "logp" is what a gradient goes through,
"held" the same number where the formula stops it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log
from typing import Any, NamedTuple

import pieces
import torch
from sequences import on_batch

from funrl import algos
from funrl.batch import Batch

Losses = list[list[float]]


class TermRow(NamedTuple):
    """One term to test.

    Attributes:
      name: the function's name, then what is special about this row.
      make: () -> term.
      reference: sequences -> loss of each token.
      metrics: sequences -> {name: number of each token}.
      through: the field that the gradient goes through.
      stops: whether the formula holds constant a part of what it computes from "logp", which it then takes from "held".
      splits: whether the loss of a part of the rows is a part of the loss.
      prepare: what the example batch of the table of pieces lacks.
      also: further public names that the row covers.
    """

    name: str
    make: Callable[[], Any]
    reference: Callable[[list[dict]], Losses]
    metrics: Callable[[list[dict]], dict[str, Losses]] | None = None
    through: str = "logp"
    stops: bool = False
    splits: bool = True
    prepare: Callable[[Batch], Batch] = lambda batch: batch
    also: tuple[str, ...] = ()


def table_rows(rows: list[TermRow], **always: Any) -> list[pieces.Row]:
    """The same terms as rows of the table of pieces."""
    return [
        pieces.Row(
            row.name,
            "term",
            row.make,
            on_batch(row.reference),
            prepare=row.prepare,
            smooth=row.through == "logp" and not row.stops,
            additive=row.splits,
            also=row.also,
            **always,
        )
        for row in rows
    ]


def less_likely(batch: Batch) -> Batch:
    """The moved policy's numbers of the example, and the sampler's, stay below log 1."""
    assert batch.old_logp is not None and batch.rollout_logp is not None
    return batch._replace(old_logp=batch.old_logp - 1.5, rollout_logp=batch.rollout_logp - 1.5)


def with_top_tokens(batch: Batch) -> Batch:
    draw = torch.Generator().manual_seed(9)
    teacher, student = (torch.rand(*batch.mask.shape, 4, generator=draw, dtype=torch.float64) + 0.1 for _ in range(2))
    tops = [(x / x.sum(-1, keepdim=True)).log()[..., :3].to(batch.old_logp) for x in (teacher, student)]
    return batch._replace(teacher_topk_logp=tops[0], topk_logp=tops[1])


def by_token(formula: Callable[..., float], *fields: str) -> Callable[[list[dict]], Losses]:
    """A reference that treats every token alone: `formula` gets the numbers of these fields."""
    return lambda seqs: [[formula(*xs) for xs in zip(*(s[f] for f in fields), strict=True)] for s in seqs]


def by_sequence(formula: Callable[[dict], list[float]]) -> Callable[[list[dict]], Losses]:
    """A reference that treats every sequence alone."""
    return lambda seqs: [formula(s) for s in seqs]


def clip(x: float, low: float, high: float) -> float:
    return low if x < low else high if x > high else x


def mean(xs: list[float]) -> float:
    return sum(xs) / len(xs)


def sequence_log_ratio(s: dict, now: str = "logp") -> float:
    total = 0.0
    for new, old in zip(s[now], s["old_logp"], strict=True):
        total += new - old
    return total / len(s["old_logp"])


def ppo(low, high, dual_clip=None, delta=None):
    def loss(r, a):
        objective = min((r if delta is None else min(r, delta)) * a, clip(r, 1 - low, 1 + high) * a)
        if dual_clip is not None and a < 0:
            objective = max(objective, dual_clip * a)
        return -objective

    return loss


def ppo_metrics(low, high, dual):
    def metrics(seqs):
        def decided(new, old, a):
            r = exp(new - old)
            return float((a > 0 and r > 1 + high) or (a < 0 and r < 1 - low))

        def bounded(new, old, a):
            return float(a < 0 and exp(new - old) > dual)

        fields = ("logp", "old_logp", "advantage")
        return {
            "actor/pg_clipfrac": by_token(decided, *fields)(seqs),
            "actor/pg_clipfrac_lower": by_token(bounded, *fields)(seqs),
            "actor/ppo_kl": by_token(lambda new, old: old - new, "logp", "old_logp")(seqs),
        }

    return metrics


def ppo_tokens(*args, **kwargs):
    loss = ppo(*args, **kwargs)
    return by_token(lambda new, old, a: loss(exp(new - old), a), "logp", "old_logp", "advantage")


def ppo_sequences(low, high):
    return by_sequence(lambda s: [ppo(low, high)(exp(sequence_log_ratio(s)), a) for a in s["advantage"]])


def gspo_token(low, high):
    def formula(s):
        center = sequence_log_ratio(s, "held")
        rows = zip(s["logp"], s["held"], s["advantage"], strict=True)
        return [ppo(low, high)(exp(center) * exp(new) / exp(held), a) for new, held, a in rows]

    return by_sequence(formula)


KL = {
    "k1": lambda p, q: p - q,
    "k2": lambda p, q: (p - q) ** 2 / 2,
    "k3": lambda p, q: exp(q) / exp(p) - 1 - (q - p),
    "abs": lambda p, q: abs(p - q),
}


def kl_reference(kind, other="ref_logp"):
    value = KL[kind[:-1] if kind.endswith("+") else kind]
    if not kind.endswith("+"):
        return by_token(value, "logp", other)
    return by_token(lambda p, h, q: value(h, q) + (p - q) ** 2 / 2 - (h - q) ** 2 / 2, "logp", "held", other)


def dppo(kind, low, high, cap, sampler="rollout_logp"):
    def loss(logp, held, old, a):
        p, q = exp(held), exp(old)
        if kind == "tv":
            near = p - q <= high if a > 0 else p - q >= -low
        else:
            divergence = q * log(q / p) + (1 - q) * log((1 - q + 1e-8) / (1 - p + 1e-8))
            near = (divergence <= high or p <= q) if a > 0 else (divergence <= low or p >= q)
        return -a * min(p / q, cap) * logp if near else 0.0

    return by_token(loss, "logp", "held", sampler, "advantage")


def gmpo(low, high):
    def formula(s):
        total = 0.0
        for new, old, a in zip(s["logp"], s["old_logp"], s["advantage"], strict=True):
            sign = 1 if a > 0 else -1
            total += sign * min(sign * (new - old), sign * clip(new - old, -low, high))
        n = len(s["logp"])
        return [-mean(s["advantage"]) * exp(total / n)] * n

    return by_sequence(formula)


def vespo(positive, negative, sampler="rollout_logp"):
    def formula(s):
        w = 1.0
        for held, sampled in zip(s["held"], s[sampler], strict=True):
            w *= exp(held - sampled)
        losses = []
        for logp, a in zip(s["logp"], s["advantage"], strict=True):
            k, lam = positive if a >= 0 else negative
            losses.append(-a * w**k * exp(lam * (1 - w)) * logp)
        return losses

    return by_sequence(formula)


def sppo(eta):
    def formula(s):
        n = len(s["logp"])
        return [(n * sequence_log_ratio(s) - eta * mean(s["advantage"])) ** 2] * n

    return by_sequence(formula)


def off_policy(threshold, sampler):
    def formula(s):
        gap = mean([old - held for held, old in zip(s["held"], s[sampler], strict=True)])
        rows = zip(s["logp"], s["advantage"], strict=True)
        return [0.0 if a < 0 and gap > threshold else -a * logp for logp, a in rows]

    return by_sequence(formula)


def forward_kl(teacher, student):
    return max(0.0, sum(exp(p) * (p - q) for p, q in zip(teacher, student, strict=True)))


def forward_kl_and_rest(teacher, student):
    p, q = (1 - sum(map(exp, xs)) for xs in (teacher, student))
    return sum(exp(p) * (p - q) for p, q in zip(teacher, student, strict=True)) + p * log(p / q)


A_OLD = ("logp", "old_logp", "advantage")
A_HELD = ("logp", "held", "old_logp", "advantage")
SELECTED = ("logp", "advantage", "selected")


def sapo(positive, negative):
    def loss(new, old, a):
        tau = positive if a > 0 else negative
        return -a * 4 / tau / (1 + exp(-tau * (exp(new - old) - 1)))

    return by_token(loss, *A_OLD)


def cispo(low, high):
    return by_token(lambda new, h, old, a: -a * clip(exp(h - old), 1 - low, 1 + high) * new, *A_HELD)


TERMS = [
    TermRow(
        "clipped_surrogate",
        algos.clipped_surrogate,
        ppo_tokens(0.2, 0.2),
        also=("clipped_surrogate_loss", "log_ratio", "bounded_exp"),
    ),
    TermRow(
        "clipped_surrogate dual",
        lambda: algos.clipped_surrogate(0.1, 0.3, dual_clip=1.5),
        ppo_tokens(0.1, 0.3, dual_clip=1.5),
        ppo_metrics(0.1, 0.3, 1.5),
    ),
    TermRow("clipped_surrogate delta", lambda: algos.clipped_surrogate(delta=1.4), ppo_tokens(0.2, 0.2, delta=1.4)),
    TermRow("token_ratio", lambda: algos.clipped_surrogate(ratio=algos.token_ratio()), ppo_tokens(0.2, 0.2)),
    TermRow(
        "sequence_ratio",
        lambda: algos.clipped_surrogate(0.05, 0.1, ratio=algos.sequence_ratio()),
        ppo_sequences(0.05, 0.1),
        also=("sum_of_sequence", "mean_of_sequence"),
    ),
    TermRow(
        "sequence_ratio product",
        lambda: algos.clipped_surrogate(0.3, 0.5, ratio=algos.sequence_ratio(mean=False)),
        by_sequence(
            lambda s: [
                ppo(0.3, 0.5)(exp(len(s["logp"]) * sequence_log_ratio(s)), advantage) for advantage in s["advantage"]
            ]
        ),
    ),
    TermRow(
        "sequence_ratio per_token",
        lambda: algos.clipped_surrogate(0.05, 0.1, ratio=algos.sequence_ratio(per_token=True)),
        gspo_token(0.05, 0.1),
        stops=True,
    ),
    TermRow(
        "entropy_bonus",
        lambda: algos.entropy_bonus(0.3),
        by_token(lambda h: -0.3 * h, "entropy"),
        through="entropy",
    ),
    *(TermRow(f"kl_to_reference {k}", lambda k=k: algos.kl_to_reference(k), kl_reference(k)) for k in KL),
    *(
        TermRow(f"kl_to_reference {k}+", lambda k=k: algos.kl_to_reference(k + "+"), kl_reference(k + "+"), stops=True)
        for k in KL
    ),
    TermRow(
        "kl_to_reference bias_corrected",
        lambda: algos.kl_to_reference("k3", bias_corrected=True),
        by_token(lambda new, q, old: exp(new - old) * KL["k3"](new, q), "logp", "ref_logp", "old_logp"),
    ),
    TermRow("kl_to_old", algos.kl_to_old, kl_reference("abs", "old_logp"), also=("kl_to", "kl_estimate")),
    TermRow("kl_to_teacher", algos.kl_to_teacher, kl_reference("k3", "teacher_logp")),
    TermRow(
        "forward_kl_topk",
        algos.forward_kl_topk,
        by_token(forward_kl, "teacher_topk_logp", "topk_logp"),
        through="topk_logp",
        prepare=with_top_tokens,
    ),
    TermRow(
        "forward_kl_topk rest",
        lambda: algos.forward_kl_topk(rest=True),
        by_token(forward_kl_and_rest, "teacher_topk_logp", "topk_logp"),
        through="topk_logp",
        prepare=with_top_tokens,
    ),
    TermRow(
        "divergence_to_teacher", algos.divergence_to_teacher, by_token(lambda d: d, "divergence"), through="divergence"
    ),
    TermRow(
        "times_ratio",
        lambda: algos.times_ratio(algos.policy_gradient()),
        by_token(lambda new, old, a: -exp(new - old) * a * new, *A_OLD),
    ),
    TermRow(
        "on_tokens",
        lambda: algos.on_tokens(algos.policy_gradient(), algos.entropy_above(0.8)),
        by_token(lambda new, a, h: -a * new if h > 0.8 else 0.0, "logp", "advantage", "entropy"),
        also=("entropy_above",),
    ),
    TermRow(
        "probability_below",
        lambda: algos.on_tokens(algos.policy_gradient(), algos.probability_below(0.4)),
        by_token(lambda new, h, a: -a * new if exp(h) < 0.4 else 0.0, "logp", "held", "advantage"),
        stops=True,
    ),
    TermRow(
        "policy_gradient",
        algos.policy_gradient,
        by_token(lambda new, a: -a * new, "logp", "advantage"),
    ),
    TermRow("surrogate", algos.surrogate, by_token(lambda new, old, a: -a * exp(new - old), *A_OLD)),
    TermRow("clipped_importance", algos.clipped_importance, cispo(1.0, 0.2), stops=True),
    TermRow("clipped_importance low", lambda: algos.clipped_importance(0.1, 0.4), cispo(0.1, 0.4), stops=True),
    TermRow("soft_gate", lambda: algos.soft_gate(1.0, 2.0), sapo(1.0, 2.0)),
    TermRow(
        "divergence_mask tv",
        lambda: algos.divergence_mask("tv", 0.1, 0.15, 1.2),
        dppo("tv", 0.1, 0.15, 1.2),
        stops=True,
    ),
    TermRow(
        "divergence_mask kl",
        lambda: algos.divergence_mask("kl", 0.02, 0.03),
        dppo("kl", 0.02, 0.03, 20.0),
        prepare=less_likely,
        stops=True,
    ),
    *(
        TermRow(
            f"divergence_mask {kind} default",
            lambda kind=kind: algos.divergence_mask(kind, sampled_by="old_logp"),
            dppo(kind, bound, bound, 20.0, "old_logp"),
            stops=True,
            prepare=less_likely,
        )
        for kind, bound in (("tv", 0.15), ("kl", 0.05))
    ),
    TermRow(
        "direct_reward",
        lambda: algos.direct_reward(0.3),
        by_token(lambda new, old, a: -(new * a - 0.15 * (new - old) ** 2), *A_OLD),
    ),
    TermRow("geometric_mean", lambda: algos.geometric_mean(0.2, 0.3), gmpo(0.2, 0.3)),
    TermRow("gamma_weighted", algos.gamma_weighted, vespo((2.0, 3.0), (3.0, 2.0)), stops=True),
    TermRow(
        "gamma_weighted old",
        lambda: algos.gamma_weighted((1.0, 2.0), (2.0, 1.0), "old_logp"),
        vespo((1.0, 2.0), (2.0, 1.0), "old_logp"),
        stops=True,
    ),
    TermRow("self_play_regression", lambda: algos.self_play_regression(0.7), sppo(0.7)),
    TermRow(
        "mask_off_policy",
        lambda: algos.mask_off_policy(algos.policy_gradient(), 0.05),
        off_policy(0.05, "old_logp"),
        stops=True,
    ),
    TermRow(
        "mask_off_policy rollout",
        lambda: algos.mask_off_policy(algos.policy_gradient(), 0.0, "rollout_logp"),
        off_policy(0.0, "rollout_logp"),
        stops=True,
    ),
    TermRow(
        "on_selected",
        lambda: algos.on_selected(algos.policy_gradient()),
        by_token(lambda new, a, chosen: -a * new if chosen else 0.0, *SELECTED),
    ),
    TermRow(
        "off_selected",
        lambda: algos.off_selected(algos.policy_gradient()),
        by_token(lambda new, a, chosen: 0.0 if chosen else -a * new, *SELECTED),
    ),
    TermRow(
        "adaptive_entropy_bonus",
        algos.adaptive_entropy_bonus,
        by_token(lambda h, c: -c * h, "entropy", "entropy_coefficient"),
        through="entropy",
    ),
    TermRow("negative_log_likelihood", algos.negative_log_likelihood, by_token(lambda new: -new, "logp")),
    TermRow(
        "dynamic_likelihood",
        algos.dynamic_likelihood,
        by_token(lambda new, h: -exp(h) * new, "logp", "held"),
        stops=True,
    ),
]

ROWS = table_rows(TERMS)
