"""An algorithm for each source of prompts, beside each by itself on the rows of its source."""

import pytest
import torch
from pieces import example, policy_logp

from funrl import algos
from funrl.algos import Algorithm, PieceError, apply_advantage, by_source, reads
from funrl.batch import as_dict, declare, select
from funrl.batch import example as example_batch
from funrl.fields import FIELDS

RECIPES = {
    "grpo and dapo": (algos.grpo, algos.dapo),
    "grpo with a KL and reinforce_plus_plus": (lambda: algos.grpo(kl_coef=0.1), algos.reinforce_plus_plus),
    "ppo and grpo": (algos.ppo, algos.grpo),
    "scalerl and distillation": (algos.scalerl, algos.distillation),
    "otb and fipo": (algos.otb, algos.fipo),
    "corrected and sao": (
        lambda: algos.corrected(algos.grpo(), algos.importance_weights("token", high=1.1)),
        algos.sao,
    ),
}


def mixed(makes, weights=None) -> Algorithm:
    return by_source({name: make() for name, make in zip("ab", makes, strict=False)}, weights)


def advantages_of(algorithm, batch):
    return apply_advantage(algorithm.advantage, algorithm.advantage.init(), batch)[:2]


def rows_with_objectives(algorithm):
    """Seven rows of groups that are whole in one objective."""
    batch = declare(example(torch.float64), algorithm.fields)
    group = torch.tensor([0, 1, 0, 2, 0, 1, 3])
    made = dict.fromkeys(FIELDS.by("advantage"))  # by the chains, later
    return batch._replace(**made)._replace(group=group, objective=torch.tensor([0, 1, 0, 0, 0, 1, 1]))


@pytest.mark.parametrize("name", RECIPES)
def test_each_objective_has_the_numbers_that_it_has_alone(name):
    makes = RECIPES[name]
    algorithm = mixed(makes, {"b": 0.25})
    batch = rows_with_objectives(algorithm)
    done, _ = advantages_of(algorithm, batch)
    expected = {}
    for number, make in enumerate(makes):
        alone = make()
        places = (batch.objective == number).nonzero()[:, 0]
        own, _ = advantages_of(alone, select(batch._replace(objective=None), places))
        assert torch.allclose(done.advantage[places], own.advantage, atol=1e-12, rtol=0)
        for role, loss in alone.losses.items():
            x = policy_logp(batch)[places]
            value, metrics = loss(x, own)
            expected.setdefault(role, []).append((0.25 if number else 1.0) * value)
            for key, metric in metrics.items():
                mixed_metric = algorithm.losses[role](policy_logp(batch), done)[1][f"{'ab'[number]}/{key}"]
                assert torch.allclose(mixed_metric.value.double(), metric.value.double(), atol=1e-12), key
    for role, parts in expected.items():
        value, _ = algorithm.losses[role](policy_logp(batch), done)
        assert torch.allclose(value, sum(parts), atol=1e-12), role
    assert {*algorithm.losses} == {*expected}


def test_it_reads_what_its_objectives_read_and_the_objective():
    algorithm = by_source({"a": algos.grpo(), "b": algos.grpo(kl_coef=0.1), "c": algos.ppo()})
    apart = reads(algos.grpo(), algos.grpo(kl_coef=0.1), algos.ppo())
    assert reads(algorithm).required >= apart.required | {"objective"}
    assert algorithm.objectives == ("a", "b", "c")


def test_a_filter_sees_the_rows_of_its_own_objective():
    algorithm = by_source({"a": algos.dapo(), "b": algos.grpo()})
    batch = rows_with_objectives(algorithm)._replace(score=torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0, 2.0, 3.0]).double())
    assert algorithm.filter is not None
    assert algorithm.filter(batch).tolist() == [False, True, False, False, False, True, True]


def test_an_objective_without_rows_changes_nothing():
    algorithm = mixed((algos.grpo, algos.dapo))
    batch = rows_with_objectives(algorithm)
    done, _ = advantages_of(algorithm, batch._replace(objective=torch.zeros_like(batch.objective)))
    own, _ = advantages_of(algos.grpo(), batch._replace(objective=None))
    assert torch.equal(done.advantage, own.advantage)
    value, _ = algorithm.losses["policy"](policy_logp(batch), done)
    assert torch.allclose(value, algos.grpo().losses["policy"](policy_logp(batch), own)[0], atol=1e-12)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: by_source({}), "give an algorithm"),
        (lambda: by_source({"a": algos.dpo()}), "does not learn from single rows"),
        (lambda: by_source({"a": algos.chord()}), "rows that are sampled"),
        (lambda: by_source({"a": algos.grpo()}, {"b": 1.0}), "a weight for 'b'"),
        (lambda: by_source({"a": by_source({"b": algos.grpo()})}), "does not learn from single rows"),
        (lambda: by_source({"a": algos.gkd(0.1), "b": algos.gkd(0.2)}), "one divergence"),
    ],
)
def test_what_cannot_be_mixed_is_refused(make, text):
    with pytest.raises(PieceError, match=text):
        make()


def test_drawn_rows_are_refused_where_the_chain_runs():
    with pytest.raises(PieceError, match="draws rows anew"):
        reads(by_source({"a": algos.pf_ppo(), "b": algos.grpo()}))
    assert "objective" not in as_dict(example_batch())
