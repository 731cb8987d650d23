"""`funrl.testing` finds each fault that is planted in a piece, by the property that it breaks, and passes good ones."""

import dataclasses
import itertools
import random
import re

import pytest
import torch

from funrl import testing
from funrl.algos import (
    Advantage,
    Loss,
    Reduction,
    chain,
    group_center,
    not_truncated,
    policy_gradient,
    reduce,
    stateless,
    to_tokens,
    token_mean,
)
from funrl.algos.recipes import recipe
from funrl.testing.check_pieces import PROPERTIES
from funrl.testing.reward_properties import REWARD_PROPERTIES

GOOD = reduce(policy_gradient(), token_mean())
MEAN = token_mean()
COUNT = itertools.count()


def pg(logp, batch):
    return -logp * batch.advantage


def by_wrong_shape(logp, batch):
    return logp + logp[:, :2], {}


def changes_logp(logp, batch):
    logp.mul_(2.0)
    return pg(logp, batch), {}


def adds_noise(logp, batch):
    return pg(logp, batch) + torch.rand(()), {}


def scalar(logp, batch):
    return pg(logp, batch).mean(), {}


def reads_by_size(logp, batch):
    return pg(logp, batch) * (batch.weight if len(logp) > 4 else 1.0), {}


def less_the_mean_of_all(logp, batch):
    return pg(logp, batch) - logp.mean(), {}


def by_length_of_row(logp, batch):
    return pg(logp, batch) / batch.mask.sum(1, keepdim=True).clamp_min(1), {}


def less_the_mean(logp, batch):
    return pg(logp, batch) - logp[batch.mask].mean(), {}


def root_of_the_ratio(logp, batch):
    return (logp - batch.old_logp).square().sqrt(), {}


def detached(logp, batch):
    return pg(logp.detach(), batch), {}


def in_double(logp, batch):
    return pg(logp, batch).double(), {}


def branches(logp, batch):
    return (pg(logp, batch) if logp.sum() < 0 else logp), {}


TERMS = {
    "in_place": changes_logp,
    "determinism": adds_noise,
    "per_token": scalar,
    "fields": reads_by_size,
    "padding": less_the_mean_of_all,
    "packing": by_length_of_row,
    "micro_batches": less_the_mean,
    "gradient": root_of_the_ratio,
    "float32": in_double,
    "compilation": branches,
}


def loss_of(numerator, denominators=GOOD.denominators, metrics=None):
    return Loss(denominators, lambda x, batch: ((numerator(x, batch),), dict(metrics or {})))


def masked_sum(x, batch):
    return torch.where(batch.mask, pg(x, _constant(batch)), 0.0).sum()


LOSSES = {
    "in_place": loss_of(lambda x, batch: masked_sum(x.mul_(2.0) if not x.requires_grad else x, batch)),
    "determinism": loss_of(lambda x, batch: masked_sum(x, batch) + torch.rand(())),
    "typed_metrics": loss_of(masked_sum, metrics={"mine": torch.zeros(7, 13)}),
    "fields": loss_of(lambda x, batch: masked_sum(x, batch) * (batch.weight.sum() if len(x) > 4 else 1.0)),
    "outside_the_mask": loss_of(lambda x, batch: pg(x, batch).sum()),
    "padding": loss_of(lambda x, batch: masked_sum(x, batch) * x.shape[1]),
    "packing": loss_of(lambda x, batch: masked_sum(x, batch) + 0 * x.sum().nan_to_num() + batch.mask.any(1).sum()),
    "micro_batches": loss_of(lambda x, batch: masked_sum(x, batch).square()),
    "denominators": loss_of(masked_sum, lambda batch: (torch.where(batch.mask, batch.entropy, 0).sum().double(),)),
    "constants": loss_of(lambda x, batch: torch.where(batch.mask, x * batch.advantage, 0.0).sum()),
    "gradient": loss_of(lambda x, batch: masked_sum(x.detach(), batch)),
    "float32": loss_of(lambda x, batch: masked_sum(x, _constant(batch)).double()),
    "compilation": loss_of(lambda x, batch: masked_sum(x, _constant(batch)) * (1 if x[batch.mask].sum() < 0 else 2)),
}


def _constant(batch):
    return batch._replace(advantage=batch.advantage.detach())


def reduction_of(numerator, denominators=MEAN.denominators):
    return Reduction(denominators, lambda loss, mask, segments: (numerator(loss, mask),))


def kept(loss, mask):
    return torch.where(mask, loss, 0.0)


REDUCTIONS = {
    "in_place": reduction_of(lambda loss, mask: kept(loss.mul_(2.0), mask).sum()),
    "determinism": reduction_of(lambda loss, mask: kept(loss, mask).sum() + torch.rand(())),
    "padding": reduction_of(lambda loss, mask: loss.sum()),
    "packing": reduction_of(lambda loss, mask: (kept(loss, mask).sum(1) / mask.sum(1).clamp_min(1)).sum()),
    "micro_batches": reduction_of(lambda loss, mask: kept(loss, mask).sum() / mask.sum()),
}


def zeroes_scores(x, batch):
    batch.score.zero_()
    return x


def counts(signal, state, batch):
    return signal._replace(x=signal.x + next(COUNT)), state


ADVANTAGES = {
    "in_place": stateless(zeroes_scores),
    "determinism": Advantage(lambda: (), counts),
    "fields": stateless(lambda x, batch: x * (batch.score if len(x) < 5 else batch.greedy_score)),
    "outside_the_mask": chain(to_tokens(), stateless(lambda x, batch: x + batch.value.sum(1, keepdim=True))),
    "padding": chain(to_tokens(), stateless(lambda x, batch: x / x.shape[1])),
    "row_order": stateless(lambda x, batch: x.cumsum(0)),
    "float32": stateless(lambda x, batch: x.double()),
    "compilation": stateless(lambda x, batch: x if x.sum() > 0 else -x),
}


def raises_scores(batch):
    batch.score.add_(1.0)
    return batch.score > 0


FILTERS = {
    "in_place": raises_scores,
    "determinism": lambda batch: (batch.score > 0) ^ bool(next(COUNT) % 2),
    "truth_per_row": lambda batch: batch.score,
    "fields": lambda batch: (batch.score if len(batch.score) < 5 else batch.greedy_score) > 0,
    "padding": lambda batch: batch.across.own(batch.score) > (0 if batch.mask.shape[1] < 15 else 9),
    "row_order": lambda batch: torch.arange(len(batch.score)) > 2,
}


def needs_a_number(prompt, completion, **fields):
    return float(completion)


def random_reward(prompt, completion, **fields):
    return random.random()


def best_of_call(completions, **columns):
    return [float(len(text) == max(map(len, completions))) for text in completions]


def forgets_the_answer(prompt, completion, answer=(), **fields):
    return float(len(answer) and completion == answer.pop())


REWARDS = {
    "numbers": needs_a_number,
    "determinism": random_reward,
    "rows_alone": best_of_call,
    "arguments": forgets_the_answer,
}
CHECKS = {
    "term": (testing.check_term, TERMS),
    "loss": (testing.check_loss, LOSSES),
    "reduction": (testing.check_reduction, REDUCTIONS),
    "advantage": (testing.check_advantage, ADVANTAGES),
    "filter": (testing.check_filter, FILTERS),
    "reward": (lambda reward: testing.check_reward(reward, [("2 * 3?", "6", {"answer": ["6", "7"]})]), REWARDS),
}
CASES = [(kind, name) for kind, (_, faults) in CHECKS.items() for name in faults]


@pytest.mark.parametrize("kind,name", CASES, ids=["-".join(case) for case in CASES])
def test_a_planted_fault_is_found_by_its_property(kind, name):
    check, faults = CHECKS[kind]
    with pytest.raises(AssertionError) as error:
        check(faults[name])
    text = str(error.value)
    assert re.match(rf"{kind} \S+", text) and f": {name} (" in text, text
    if kind in ("term", "filter", "reward"):
        assert re.search(r"test_own_pieces\.py:\d+", text), text


# What no term can have, since `reduce` keeps it from them.
BY_CONSTRUCTION = {"term": {"outside_the_mask", "denominators", "constants"}}


def test_every_property_has_a_planted_fault():
    for kind, properties in (PROPERTIES | {"reward": REWARD_PROPERTIES}).items():
        assert set(properties) - BY_CONSTRUCTION.get(kind, set()) == set(CHECKS[kind][1]), kind


def test_a_line_of_an_in_place_change_is_named():
    with pytest.raises(AssertionError, match=r"changes its input x in place at .*test_own_pieces.py:\d+: logp.mul_\(2"):
        testing.check_term(changes_logp)
    with pytest.raises(AssertionError, match=r"RuntimeError: .* in by_wrong_shape at .*: return logp \+ logp\[:, :2\]"):
        testing.check_term(by_wrong_shape)


def test_a_gradient_that_is_stopped_is_found():
    with pytest.raises(AssertionError, match="it depends on nothing that is trained"):
        testing.check_term(detached, without={"compilation"})


def test_good_pieces_pass():
    testing.check_advantage(chain(group_center(), to_tokens()), without={"compilation"})
    testing.check_filter(not_truncated())
    testing.check_loss(GOOD, without={"compilation"})
    testing.check_reduction(token_mean() + MEAN)
    term = lambda logp, batch: (-logp * batch.score, {"score": batch.score})  # noqa: E731
    testing.check_term(term, without={"compilation"})
    right = lambda prompt, completion, answer, **fields: float(completion.strip() == answer)  # noqa: E731
    testing.check_reward(right, [("2 * 3?", "6", {"answer": "6"})])
    with pytest.raises(ValueError, match="without='speed': the properties of terms are per_token, "):
        testing.check_term(term, without={"speed"})


@pytest.mark.parametrize("name", ["grpo", "ppo", "dapo"])
def test_an_algorithm_is_checked_as_a_run_would_and_in_its_parts(name):
    testing.check_algorithm(recipe(name)(), without={"compilation"})


def test_what_a_run_would_refuse_is_refused():
    missing = reduce(lambda logp, batch: (logp * batch.margin, {}), token_mean())
    with pytest.raises(AssertionError, match=r"a run refuses it: .*batch.margin is missing"):
        testing.check_algorithm(dataclasses.replace(recipe("grpo")(), losses={"policy": missing}))
