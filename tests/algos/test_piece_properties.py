"""The properties of piece_properties.py find what is planted."""

import pytest
from piece_properties import equals_reference, ranks, reference_gradient

from funrl.algos import chain, group_center, not_truncated, policy_gradient, reduce, stateless, to_tokens, token_mean
from funrl.testing.subjects import Subject


def plain_pg(logp, b):
    return [[-x * a for x, a in zip(*rows, strict=True)] for rows in zip(logp, b.advantage, strict=True)]


def twice(logp, batch):
    return -2 * logp * batch.advantage, {}


def half_detached(logp, batch):
    return -(logp / 2 + logp.detach() / 2) * batch.advantage, {}


WRONG = {
    "term": (twice, plain_pg),
    "loss": (reduce(policy_gradient(), token_mean()), lambda logp, b: [(1.0, 1.0)]),
    "reduction": (token_mean(), lambda loss, b: (1.0, 1.0)),
    "advantage": (group_center(), lambda x, b: {"x": x}),
    "filter": (not_truncated(), lambda b: b.truncated),
}


@pytest.mark.parametrize("kind", WRONG)
def test_another_reference_is_found(kind):
    piece, reference = WRONG[kind]
    with pytest.raises(AssertionError):
        equals_reference(Subject(kind, piece), reference)


def test_a_stopped_gradient_is_found_by_the_reference():
    equals_reference(Subject("term", policy_gradient()), plain_pg)
    reference_gradient(Subject("term", policy_gradient()), plain_pg)
    with pytest.raises(AssertionError, match="by token 2 of row 0 is"):
        reference_gradient(Subject("term", half_detached), plain_pg)


def test_a_piece_that_mixes_rows_is_found_on_a_rank_with_some():
    mixed = chain(to_tokens(), stateless(lambda x, batch: x - x[batch.mask].mean()))
    with pytest.raises(AssertionError, match=r"on a rank that has the tokens of rows \[3, 0, 2, 4\]"):
        ranks(Subject("advantage", mixed))
    with pytest.raises(AssertionError, match="on a rank"):
        ranks(Subject("filter", lambda batch: batch.mask.sum(1) > 3))
    ranks(Subject("filter", lambda batch: batch.across.sums(batch.mask) > 3))
    ranks(Subject("advantage", chain(group_center(), to_tokens())))
