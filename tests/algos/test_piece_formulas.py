"""Formulas of `funrl explain` against the pieces that they are of: the plain text, read and evaluated in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from formula_reader import value

from funrl import algos
from funrl.algos import (
    add,
    entropy_bonus,
    kl_to_reference,
    log_likelihood,
    negative_log_likelihood,
    policy_gradient,
    product_ratio,
    reference_log_ratio,
    scale,
    sequence_ratio,
    sigmoid_pairs,
    surrogate,
    times_ratio,
    token_ratio,
    weighted,
)
from funrl.algos.core import Signal
from funrl.algos.explanation import Writer, explain_algorithm
from funrl.batch import Batch

ROWS, WIDTH = 4, 3
DRAW = torch.Generator().manual_seed(3)


def normal(*shape: int, by: float = 1.0) -> torch.Tensor:
    return by * torch.randn(*shape, generator=DRAW, dtype=torch.float64)


def logp() -> torch.Tensor:
    return (0.9 * torch.rand(ROWS, WIDTH, generator=DRAW, dtype=torch.float64) + 0.05).log()


LOGP = logp()
BATCH = Batch(
    mask=torch.ones(ROWS, WIDTH, dtype=torch.bool),
    old_logp=(LOGP + normal(ROWS, WIDTH, by=0.3)).clamp(max=-0.01),
    rollout_logp=(LOGP + normal(ROWS, WIDTH, by=0.1)).clamp(max=-0.01),
    ref_logp=logp(),
    teacher_logp=logp(),
    advantage=normal(ROWS, WIDTH),
    weight=normal(ROWS, WIDTH).abs(),
    entropy=3 * torch.rand(ROWS, WIDTH, generator=DRAW, dtype=torch.float64),
    entropy_coefficient=normal(ROWS, WIDTH).abs(),
    value=normal(ROWS, WIDTH),
    returns=normal(ROWS, WIDTH),
    label=torch.tensor([[1.0], [0.0], [1.0], [0.0]], dtype=torch.float64).expand(ROWS, WIDTH),
    kl_baseline=torch.full((ROWS, WIDTH), 0.3, dtype=torch.float64),
    sum_pi_squared=torch.rand(ROWS, WIDTH, generator=DRAW, dtype=torch.float64),
    score=torch.tensor([1.0, 0.0, 1.0, 0.25], dtype=torch.float64),
    group=torch.tensor([0, 0, 0, 0]),
    truncated=torch.tensor([False, True, False, False]),
)


def of(name: str) -> torch.Tensor:
    found = getattr(BATCH, name)
    assert found is not None, name
    return found


def symbols() -> dict[str, Any]:
    d = LOGP - of("old_logp")
    return {
        "pi": LOGP.exp(),
        "pi_old": of("old_logp").exp(),
        "pi_rollout": of("rollout_logp").exp(),
        "pi_ref": of("ref_logp").exp(),
        "pi_teacher": of("teacher_logp").exp(),
        "r_t": d.exp(),
        "rho_t": (LOGP - of("rollout_logp")).exp(),
        "s_i": d.mean(1, keepdim=True).exp(),
        "p_i": d.sum(1, keepdim=True).exp(),
        "A_t": of("advantage"),
        "w_t": of("weight"),
        "H": of("entropy"),
        "c_ent": of("entropy_coefficient"),
        "V_t": LOGP,  # a term is given values instead of log-probabilities there
        "V_old": of("value"),
        "R_t": of("returns"),
        "X_t": LOGP,
        "y_t": of("label"),
        "z": of("kl_baseline"),
        "desirable": of("label") > 0.5,
        "sum_squares": of("sum_pi_squared"),
    }


def dual(cap: float):
    def of_loss(y: torch.Tensor) -> torch.Tensor:
        return torch.where(of("advantage") < 0, torch.minimum(y, -cap * of("advantage")), y)

    return of_loss


def read(piece, meanings, weights: bool = False):
    writer = Writer(weights)
    formula = writer.formula(piece)
    assert "operatorname{" + piece_name(piece) not in formula, formula
    return value(formula, writer.definitions, meanings, {"dual_3": dual(3.0), "dual_1.1": dual(1.1)})


def piece_name(piece) -> str:
    return getattr(piece, "__qualname__", "").split(".")[0].replace("_", r"\_") + "}("


TERMS = {
    "clipped_surrogate": lambda: algos.clipped_surrogate(0.1, 0.3),
    "clipped_surrogate dual and delta": lambda: algos.clipped_surrogate(0.1, 0.1, dual_clip=1.1, delta=1.2),
    "clipped_surrogate of sequences": lambda: algos.clipped_surrogate(0.1, 0.1, ratio=sequence_ratio()),
    "surrogate": surrogate,
    "surrogate to the engine": lambda: surrogate(token_ratio("rollout_logp")),
    "surrogate product": lambda: surrogate(product_ratio()),
    "surrogate per token": lambda: surrogate(sequence_ratio(per_token=True)),
    "surrogate sum": lambda: surrogate(sequence_ratio(mean=False)),
    "surrogate sum per token": lambda: surrogate(sequence_ratio(per_token=True, mean=False)),
    "policy_gradient": policy_gradient,
    "clipped_importance": lambda: algos.clipped_importance(0.1, 0.2),
    "clipped_importance above": lambda: algos.clipped_importance(None, 0.1),
    "masked_importance": lambda: algos.masked_importance(0.05, 0.1),
    "masked_importance old": lambda: algos.masked_importance(0.2, 0.1, "old_logp"),
    "tapered": algos.tapered,
    "tapered per token": lambda: algos.tapered(token_ratio()),
    "soft_gate": lambda: algos.soft_gate(1.5, 2.5),
    "divergence_mask tv": lambda: algos.divergence_mask("tv", 0.01, 0.02, 1.05),
    "divergence_mask defaults": lambda: algos.divergence_mask("tv", sampled_by="old_logp"),
    "direct_reward": lambda: algos.direct_reward(0.3),
    "geometric_mean": lambda: algos.geometric_mean(0.1, 0.2),
    "gamma_weighted": lambda: algos.gamma_weighted(),
    "gamma_weighted old": lambda: algos.gamma_weighted((1.0, 2.0), (0.5, 1.0), "old_logp"),
    "self_play_regression": lambda: algos.self_play_regression(2.0),
    "log_ratio_regression": lambda: algos.log_ratio_regression(0.3),
    "log_ratio_regression to the reference": lambda: algos.log_ratio_regression(1.0, "ref_logp"),
    "classification": lambda: algos.classification(0.7),
    "mask_off_policy": lambda: algos.mask_off_policy(policy_gradient(), 0.05),
    "mask_off_policy of a sum": lambda: algos.mask_off_policy(
        add(policy_gradient(), entropy_bonus()), 0.0, "rollout_logp"
    ),
    "entropy_bonus": lambda: entropy_bonus(0.1),
    "adaptive_entropy_bonus": algos.adaptive_entropy_bonus,
    **{f"kl_to_reference {kind}": lambda kind=kind: kl_to_reference(kind) for kind in ("k1", "k2", "k3", "abs", "k1+")},
    "kl_to_reference corrected": lambda: kl_to_reference("k3", bias_corrected=True),
    "kl_to_old": lambda: algos.kl_to_old("abs"),
    "kl_to_teacher": lambda: algos.kl_to_teacher("k1+"),
    "negative_log_likelihood": negative_log_likelihood,
    "dynamic_likelihood": algos.dynamic_likelihood,
    "entropy_gated_likelihood": lambda: algos.entropy_gated_likelihood(2.0, 1.5),
    "uncertain_likelihood": algos.uncertain_likelihood,
    "on_tokens": lambda: algos.on_tokens(policy_gradient(), algos.probability_below(0.5)),
    "on_tokens entropy": lambda: algos.on_tokens(policy_gradient(), algos.entropy_above(1.0)),
    "clipped_value_loss": lambda: algos.clipped_value_loss(0.2),
    "clipped_value_loss open": lambda: algos.clipped_value_loss(None),
    "kto_loss": lambda: algos.kto_loss(0.2),
    "kto_loss weights": lambda: algos.kto_loss(0.2, 1.5, 0.5, baseline=False),
    "step_reward": algos.step_reward,
    "times_ratio": lambda: times_ratio(entropy_bonus(0.1), sequence_ratio()),
    "scale of a sum": lambda: scale(0.5, add(negative_log_likelihood(), scale(2.0, policy_gradient()))),
}


@pytest.mark.parametrize("name", TERMS)
def test_the_formula_of_a_term_has_its_value(name):
    term = TERMS[name]()
    want = term(LOGP, BATCH)[0]
    got = torch.as_tensor(read(term, symbols())).expand_as(want)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


def test_the_divergence_of_a_mask_is_as_written():
    term = algos.divergence_mask("kl", 0.001, 0.002, 1.05)
    # the piece adds 1e-8 to 1 - p before the logarithm; no token of these is as near to a bound as that
    torch.testing.assert_close(read(term, symbols()), term(LOGP, BATCH)[0], rtol=0, atol=1e-9)


def test_weights_are_written_as_factors():
    term = weighted(policy_gradient())
    torch.testing.assert_close(read(term, symbols(), weights=True), term(LOGP, BATCH)[0], rtol=0, atol=1e-9)


PAIRS = [name for name in dir(algos) if name.endswith("_pairs") and name != "online_pairs"]
OPTIONS = {
    "sigmoid_pairs": {"smoothing": 0.1, "margin": 0.5},
    "robust_pairs": {"smoothing": 0.2},
    "exo_pairs": {"smoothing": 0.3},
    "discopop_pairs": {"tau": 0.4},
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_formula_of_a_pair_loss_has_its_value(name):
    chosen, rejected = normal(6), normal(6)
    for options in ({}, OPTIONS.get(name, {})):
        loss = getattr(algos, name)(beta=0.7, **options)
        got = read(loss, {"h_w": chosen, "h_l": rejected})
        torch.testing.assert_close(got, loss(chosen, rejected), rtol=0, atol=1e-9)


REWARDS = {
    "reference": reference_log_ratio,
    "per token": lambda: reference_log_ratio(per_token=True),
    **{f"f {name}": lambda name=name: reference_log_ratio(True, name, 0.3) for name in ("forward_kl", "js", "alpha")},
    "likelihood": log_likelihood,
    "alpha": lambda: log_likelihood(True, 0.25),
}


def of_pairs(symbols: dict[str, Any]) -> dict[str, Any]:
    """The symbols of the chosen rows under "w" and those of the rejected ones under "l"."""
    sides = {side: {k: x[start::2] for k, x in symbols.items()} for start, side in enumerate("wl")}
    return sides | {"margin": sides["w"]["margin"]} if "margin" in symbols else sides


@pytest.mark.parametrize("name", REWARDS)
@pytest.mark.parametrize("weight", [None, 0.5, 1e9])
def test_the_formula_of_a_preference_has_its_value(name, weight):
    weigher = None if weight is None else algos.on_policy_weight(weight)
    term = algos.preference(sigmoid_pairs(0.4, margin=0.2), REWARDS[name](), weigher)
    want = term(LOGP, BATCH)[0][::2]
    got = read(term, of_pairs(symbols()))
    torch.testing.assert_close(got.expand_as(want), want, rtol=0, atol=1e-9)


def test_the_formulas_of_odds_and_of_reward_models_have_their_values():
    want = algos.odds_ratio(0.3)(LOGP, BATCH)[0][::2]
    got = read(algos.odds_ratio(0.3), of_pairs(symbols()))
    torch.testing.assert_close(got.expand_as(want), want, rtol=0, atol=1e-9)
    margin = normal(ROWS // 2, 1).repeat_interleave(2, 0).expand(ROWS, WIDTH)
    term = algos.pairwise_reward(0.1, margin=True)
    want = term(LOGP, BATCH._replace(margin=margin))[0][::2]
    got = read(term, of_pairs({"X": LOGP[:, -1:], "margin": margin[:, :1]}))
    torch.testing.assert_close(got.expand_as(want), want, rtol=0, atol=1e-9)


STEPS = {
    "group_center": algos.group_center,
    "group_scale": lambda: algos.group_scale(0.1),
    "batch_center": algos.batch_center,
    "batch_scale": lambda: algos.batch_scale(0.1),
    "constant_baseline": lambda: algos.constant_baseline(0.3),
    "relative_to_mean": algos.relative_to_mean,
    "optimal_value_baseline": lambda: algos.optimal_value_baseline(0.3),
    "group_log_ratio": lambda: algos.group_log_ratio(0.2),
    "leave_one_out": algos.leave_one_out,
    "best_of_group": lambda: algos.best_of_group(0.1),
    "best_of_group alone": lambda: algos.best_of_group(None),
    "keep_best": lambda: algos.keep_best(0.5),
    "clip_reward": lambda: algos.clip_reward(0.1, 0.9),
    "overlong_penalty": lambda: algos.overlong_penalty(4, 3, 0.5),
    "kl_in_reward": lambda: algos.kl_in_reward(algos.fixed_kl(0.2), "k3"),
    "whiten": lambda: algos.whiten(0.1),
    "kl_in_reward per token": lambda: algos.kl_in_reward(algos.fixed_kl(0.2), "k2"),
    "teacher_advantage": algos.teacher_advantage,
}
OF_TOKENS = ("whiten", "kl_in_reward per token", "teacher_advantage")


@pytest.mark.parametrize("name", STEPS)
def test_the_formula_of_a_step_has_its_value(name):
    piece = STEPS[name]()
    x = of("advantage") if name in OF_TOKENS else of("score") + torch.tensor([0.3, 0.0, 0.0, 0.0])
    want = piece.update(Signal(x, BATCH.mask), piece.init(), BATCH)[0].x
    chain = algos.chain(algos.to_tokens(), piece) if want.dim() == 2 else algos.chain(piece, algos.to_tokens())
    loss = algos.reduce(policy_gradient(), algos.token_mean())
    step = explain_algorithm(algos.Algorithm(chain, {"policy": loss})).steps[1 if want.dim() == 2 else 0]
    column = x if name in OF_TOKENS else x[:, None]
    others = (column.sum(0) - column) / (ROWS - 1)
    best = torch.stack([torch.cat((column[:i], column[i + 1 :])).amax(0) for i in range(ROWS)])
    meanings = symbols() | {"x": column, "x_i": column, "x_t": column, "others": others, "best_other": best}
    of_batch = {"mean": torch.mean, "std": torch.std, "var": torch.var}
    of_group = {"mean_G": torch.mean, "std_G": torch.std, "max_G": torch.max}
    meanings |= {"length": torch.full((ROWS, 1), float(WIDTH), dtype=torch.float64)}
    got = value(step.formula, step.definitions, meanings, of_batch | of_group)
    torch.testing.assert_close(got.expand(len(want), -1).reshape(want.shape), want, rtol=0, atol=1e-9)
