"""Sampling of logits that tensor ranks share: the tokens and bits of whole logits, and few bytes sent for them."""

from typing import Any

import lockstep_ranks
import pytest
import torch
from lockstep_ranks import run_ranks
from test_sampling import CASES, draw, mixed_logits, name, uniform

from funrl.mesh.mesh import parse
from funrl.rollout import sampling
from funrl.rollout.sampling import VocabularyPart, sample_shared_tokens, sample_tokens
from funrl.rollout.sampling_parameters import Sampling

WAYS = [*CASES, Sampling(greedy=True), Sampling(greedy=True, repetition_penalty=1.4)]


def shared(logits, noise, how, seen, ranks):
    """The results of one of the ranks, after a check that all have the same."""
    vocab = logits.shape[1]
    columns = -(-vocab // ranks)

    def program(mesh):
        first = mesh.index("tensor") * columns
        own = logits[:, first : first + columns].contiguous()
        return sample_shared_tokens(own, noise, how, VocabularyPart(mesh, columns, vocab), seen_RV=seen)

    results: list[Any] = run_ranks(program, parse(f"tp{ranks}"))
    for other in results[1:]:
        assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(other, results[0], strict=True))
    return results[0]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("how", WAYS, ids=name)
def test_ranks_sample_the_bits_of_whole_logits(how, ranks):
    """Where the ranks divide the vocabulary."""
    vocab = 2056
    for dtype in (torch.float32, torch.float64):
        logits = mixed_logits(vocab, dtype)
        seen = draw(12, vocab, seed=7) > 1
        for step in range(3):
            noise = uniform(5, torch.arange(12), torch.tensor([step]))[:, 0]
            parts = shared(logits, noise, how, seen, ranks)
            whole = sample_tokens(logits, noise, how, seen)
            assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("vocab", [23, 301])
@pytest.mark.parametrize(
    "how", [Sampling(temperature=0.7), Sampling(top_k=9, top_p=0.8), Sampling(greedy=True)], ids=name
)
def test_the_last_ranks_may_have_fewer_tokens(how, vocab, ranks):
    logits = mixed_logits(vocab)
    noise = uniform(6, torch.arange(12), torch.tensor([0]))[:, 0]
    token, *logps = shared(logits, noise, how, None, ranks)
    whole, *whole_logps = sample_tokens(logits, noise, how)
    assert torch.equal(token, whole)
    for a, b in zip(logps, whole_logps, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", [Sampling(), Sampling(temperature=0.7), Sampling(greedy=True)], ids=name)
def test_ranks_sample_alike_without_the_functions_of_the_decoding_step(how, monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(sampling, "computes_exactly", lambda *_: False)
    logits = mixed_logits(2056)
    noise = uniform(5, torch.arange(12), torch.tensor([0]))[:, 0]
    exactly = sample_tokens(logits, noise, how)
    for ranks in (1, 4):
        token, *logps = shared(logits, noise, how, None, ranks)
        assert torch.equal(token, exactly[0])
        for a, b in zip(logps, exactly[1:], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_flat_logits_of_a_large_vocabulary_give_the_same_tokens():
    """Many tokens of small probability are where rounding would tell."""
    logits = draw(64, 4096 * 8, seed=3, scale=0.1).float()
    noise = uniform(7, torch.arange(64), torch.tensor([0]))[:, 0]
    whole = sample_tokens(logits, noise, Sampling())
    for ranks in (2, 8):
        assert all(
            torch.equal(a, b) for a, b in zip(shared(logits, noise, Sampling(), None, ranks), whole, strict=True)
        )


@pytest.mark.parametrize("how", [Sampling(), Sampling(greedy=True), Sampling(top_p=0.9)], ids=name)
def test_logits_that_are_not_finite_are_found_on_all_ranks(how):
    logits = draw(5, 320, seed=8).float()
    logits[1, 7], logits[2, 300], logits[3] = torch.nan, torch.inf, -torch.inf
    noise = uniform(0, torch.arange(5), torch.tensor([0]))[:, 0]
    token, _, raw_logp = shared(logits, noise, how, None, 2)
    assert raw_logp.isnan().tolist() == [False, True, True, True, False]
    assert ((token >= 0) & (token < 320)).all()


@pytest.mark.parametrize(("ranks", "gathered"), [(2, 303_872), (8, 531_776)])
def test_a_row_of_a_large_vocabulary_takes_a_hundred_bytes(ranks, gathered, monkeypatch):
    """What a rank receives for a row at most; its logits would be `gathered` bytes."""
    vocab = 151_936
    received = {}
    given = lockstep_ranks._Collectives._of

    def counted(x, group):
        parts = [x] * ranks if isinstance(x, torch.Tensor) else list(x)  # to each rank
        rank = lockstep_ranks._own.rank
        received[rank] = received.get(rank, 0) + (ranks - 1) * max(part.nbytes for part in parts)
        return given(x, group)

    monkeypatch.setattr(lockstep_ranks._Collectives, "_of", staticmethod(counted))
    assert gathered == (ranks - 1) * vocab * 4 // ranks
    rows = 8
    logits = draw(rows, vocab, seed=1).float()
    noise = uniform(0, torch.arange(rows), torch.tensor([0]))[:, 0]
    sent = {}
    for how in (Sampling(), Sampling(temperature=0.7), Sampling(greedy=True), Sampling(top_p=0.9)):
        received.clear()
        shared(logits, noise, how, None, ranks)
        assert len(set(received.values())) == 1
        sent[name(how)] = received[0] // rows
    assert sent["plain"] <= 40 * (ranks - 1)
    assert sent["temperature=0.7"] <= 60 * (ranks - 1) and sent["greedy=True"] <= 40 * (ranks - 1)
    assert sent["top_p=0.9"] <= gathered / ranks + 16 * ranks
