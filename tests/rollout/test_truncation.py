"""Which tokens top-k, top-p and min-p leave: against a sort of the vocabulary, and against transformers."""

import itertools
from typing import cast

import pytest
import torch
from plain_sampling import plain_logp
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from funrl.rollout import truncation
from funrl.rollout.sampling_parameters import Sampling
from funrl.rollout.truncation import ONE, kept_mass, mass_of, shortlist, threshold

KS, PS, MINS = (0, 1, 7, 64, 65, 300, 9000), (1.0, 0.999999, 0.95, 0.5, 1e-3), (0.0, 0.02, 0.3)
HOWS = [Sampling(top_k=k, top_p=p, min_p=m) for k, p, m in itertools.product(KS, PS, MINS)]
HOWS = [how for how in HOWS if how.truncated]


def rows_of(vocab: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Logits of rows from flat to peaked, the last ones with many ties."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(8, vocab, generator=generator, dtype=torch.float64)
    logits *= torch.tensor([[0.01], [0.5], [2.0], [4.0], [9.0], [2.0], [4.0], [1.0]])
    logits[5:] = (logits[5:] * 4).round() / 4
    return logits.to(dtype)


@pytest.mark.parametrize("vocab", [5, 64, 65, 1000, 10000])
def test_the_tokens_kept_are_those_of_a_sort(vocab):
    logits = rows_of(vocab)
    prob, listed = logits.softmax(-1), 0
    for how in HOWS if vocab < 10000 else HOWS[::3]:
        expected = plain_logp(logits, how) > -torch.inf
        expected &= mass_of(prob) > 0
        mass = kept_mass(prob, how)
        assert torch.equal(mass > 0, expected), how
        assert torch.equal(mass, mass_of(prob) * expected)
        short = shortlist(prob, how)
        if short is not None:
            listed += int((~short.open_R).sum())
            settled = torch.zeros_like(mass).scatter_(1, short.ids_RC, short.mass_RC)[~short.open_R]
            assert torch.equal(settled, mass[~short.open_R]), how
            assert (short.ids_RC.diff(dim=1) > 0).all()
    assert listed > 50  # the short way is taken


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_ties_it_is_what_transformers_keeps(dtype):
    logits = rows_of(1000, dtype)[:5]
    for how in (Sampling(top_k=40), Sampling(top_p=0.8), Sampling(min_p=0.1), Sampling(top_k=40, top_p=0.8, min_p=0.1)):
        scores, unread = logits, cast("torch.LongTensor", torch.empty(0).long())
        for given, warper in (
            (how.top_k > 0, lambda how=how: TopKLogitsWarper(how.top_k)),
            (how.top_p < 1, lambda how=how: TopPLogitsWarper(how.top_p)),
            (how.min_p > 0, lambda how=how: MinPLogitsWarper(how.min_p)),
        ):
            scores = warper()(unread, scores) if given else scores
        assert torch.equal(kept_mass(logits.softmax(-1), how) > 0, scores > -torch.inf)


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        (Sampling(top_k=3), [1, 4, 0]),  # of the equal tokens 0, 2, 3, 5 the first
        (Sampling(top_k=4), [1, 4, 0, 2]),
        (Sampling(top_p=0.5), [1, 4]),
        (Sampling(top_p=0.51), [1, 4, 0]),
        (Sampling(top_p=0.625), [1, 4, 0]),
        (Sampling(top_p=0.25), [1]),  # of the equal tokens 1, 4 the first
        (Sampling(top_k=4, top_p=0.75), [1, 4, 0]),  # of 3/4: 1/4 + 1/4 + 1/8 >= 9/16 > 1/4 + 1/4
        (Sampling(top_k=4, top_p=0.66), [1, 4]),
        (Sampling(min_p=0.5), [0, 1, 2, 3, 4, 5]),
        (Sampling(min_p=0.51), [1, 4]),
        (Sampling(top_p=0.63, min_p=0.5), [1, 4, 0, 2]),
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab", [6, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_equal_tokens_those_with_the_lower_ids_are_kept(how, kept, vocab, dtype):
    prob = torch.zeros(1, vocab, dtype=dtype)
    prob[0, :6] = torch.tensor([0.125, 0.25, 0.125, 0.125, 0.25, 0.125])
    assert kept_mass(prob, how)[0].nonzero()[:, 0].tolist() == sorted(kept)
    short = shortlist(prob, how)
    assert short is not None
    if not short.open_R:
        assert short.ids_RC[short.mass_RC > 0].tolist() == sorted(kept)


def test_top_p_is_reached_and_not_only_approached():
    prob = torch.full((1, 500), 2.0**-11, dtype=torch.float64)
    prob[0, 3] = 2.0**-10
    for top_p, count in ((2.0**-10, 1), (2.0**-10 + 2.0**-62, 2)):
        assert (kept_mass(prob, Sampling(top_p=top_p)) > 0).sum() == count


def test_a_tie_that_goes_beyond_the_list_leaves_the_row_open():
    prob = torch.full((1, 4096), 2.0**-12)
    for how in (Sampling(top_k=20), Sampling(top_p=0.004), Sampling(min_p=1.0)):
        short = shortlist(prob, how)
        assert short is not None and short.open_R.tolist() == [True]
        count = {20: 20, 0: 17 if how.top_p < 1 else 4096}[how.top_k]
        assert kept_mass(prob, how)[0].nonzero()[:, 0].tolist() == list(range(count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("digit", [truncation.DIGIT_BITS, 7, 13])
def test_a_threshold_by_digits_is_that_of_a_sort(dtype, digit, monkeypatch):
    monkeypatch.setattr(truncation, "DIGIT_BITS", digit)
    prob = rows_of(2000, dtype).softmax(-1)
    mass = mass_of(prob)
    value, order = prob.sort(dim=1, descending=True, stable=True)
    upto = mass.gather(1, order).cumsum(1)
    for share in (0.0, 0.1, 0.5, 0.9, 0.999):
        wanted = (upto[:, -1:].double() * share).long().clamp_min(1)
        result, wanting = threshold(prob, mass, wanted)
        at = (upto < wanted).sum(1, keepdim=True)
        assert torch.equal(result, value.gather(1, at))
        assert torch.equal(wanting, wanted - (mass * (prob > result)).sum(1, keepdim=True))
    result, _ = threshold(prob, mass, torch.full_like(wanted, 2 * ONE))  # more than there is
    assert (result == 0).all()


def test_lists_that_would_not_pay_are_not_made():
    prob = rows_of(10000).softmax(-1)
    assert shortlist(prob, Sampling(top_k=truncation.LONGEST)) is None
    assert shortlist(prob, Sampling(top_k=truncation.LONGEST - 1)) is not None
    assert shortlist(prob, Sampling(top_k=10000, top_p=0.9)) is not None  # which is top-p alone
    assert shortlist(prob.to("meta"), Sampling(top_k=9)) is None


def test_mass_is_exact_for_float32_and_its_sums_do_not_depend_on_order():
    prob = rows_of(5000, torch.float32).softmax(-1)
    large = prob > 2.0**-36
    assert torch.equal(mass_of(prob)[large].double() / ONE, prob[large].double())
    assert torch.equal(mass_of(prob).flip(1).cumsum(1)[:, -1], mass_of(prob).sum(1))
    assert (mass_of(prob).sum(1).double() / ONE - prob.double().sum(1)).abs().max() < 1e-14
