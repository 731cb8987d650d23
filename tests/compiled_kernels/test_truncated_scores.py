"""Scores of truncated distributions against a loop over tokens."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from funrl.compiled_kernels.linear_logprob import TokenScores, linear_logprob
from funrl.compiled_kernels.truncated_scores import KeptTokens, truncated_scores
from funrl.mesh.launch import launch
from funrl.mesh.mesh import SINGLE, parse

TEMPERATURE = 0.7
COUNTS = (3, 0, 1, 12, 5)


def inputs():
    draw = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(len(COUNTS), 6, generator=draw, dtype=torch.float64)
    unembed_VD = 2 * torch.randn(12, 6, generator=draw, dtype=torch.float64)
    ids = [torch.randperm(12, generator=draw)[:count].sort().values for count in COUNTS]
    targets_T = torch.stack([x[len(x) // 2] if len(x) else torch.tensor(7) for x in ids])
    return hidden_TD, unembed_VD, targets_T, KeptTokens(torch.cat(ids).int(), torch.tensor(COUNTS))


def scores(hidden_TD, unembed_VD, targets_T, kept, mesh=SINGLE):
    want = "logp", "entropy", "sum_pi_squared"
    whole = linear_logprob(hidden_TD, unembed_VD, targets_T, mesh, TEMPERATURE, want=want, topk_TK=kept.padded())
    return truncated_scores(whole, whole.topk_logp[kept.places_M, kept.columns_M], kept)


def loop(hidden_TD, unembed_VD, targets_T, kept):
    """The three scores of each token, number by number."""
    results = []
    ids = kept.ids_M.tolist()
    for hidden_D, target, count in zip(hidden_TD, targets_T.tolist(), kept.counts_N.tolist(), strict=True):
        own, ids = (ids[:count], ids[count:]) if count else (list(range(len(unembed_VD))), ids)
        z = {v: float(hidden_D @ unembed_VD[v]) / TEMPERATURE for v in own}
        total = math.log(math.fsum(math.exp(x) for x in z.values()))
        logp = {v: x - total for v, x in z.items()}
        entropy = -math.fsum(math.exp(x) * x for x in logp.values())
        results.append((logp[target], entropy, math.fsum(math.exp(2 * x) for x in logp.values())))
    return torch.tensor(results, dtype=torch.float64)


def test_scores_are_those_of_a_loop():
    given = inputs()
    results = torch.stack(scores(*given)[:3], 1)
    assert (results - loop(*given)).abs().max() < 1e-12


def test_gradients_are_those_of_finite_differences():
    hidden_TD, unembed_VD, targets_T, kept = inputs()

    def all_scores(hidden_TD, unembed_VD):
        return scores(hidden_TD, unembed_VD, targets_T, kept)[:3]

    assert gradcheck(all_scores, (hidden_TD.requires_grad_(), unembed_VD.requires_grad_()))


def test_one_kept_token_is_certain_and_none_is_the_whole_distribution():
    hidden_TD, unembed_VD, targets_T, kept = inputs()
    results = scores(hidden_TD, unembed_VD, targets_T, kept)
    assert results.logp[2] == results.entropy[2] == 0 and results.sum_pi_squared[2] == 1
    whole = linear_logprob(hidden_TD, unembed_VD, targets_T, SINGLE, TEMPERATURE)
    assert results.logp[1] == whole.logp[1]


def test_no_score_overflows_where_the_kept_tokens_are_improbable():
    logp_M = torch.tensor([-5000.0, -5001.0])
    whole = TokenScores(logp=logp_M[:1], entropy=torch.zeros(1))
    results = truncated_scores(whole, logp_M, KeptTokens(torch.tensor([3, 5]), torch.tensor([2])))
    assert results.logp.item() == pytest.approx(-math.log(1 + math.exp(-1)))


def test_selected_places_keep_their_tokens():
    kept = KeptTokens(torch.tensor([4, 5, 6, 7, 8, 9]), torch.tensor([2, 0, 1, 3]))
    some = kept.select(torch.tensor([3, 1, 0]))
    assert some.ids_M.tolist() == [7, 8, 9, 4, 5] and some.counts_N.tolist() == [3, 0, 2]
    assert some.padded().tolist() == [[7, 8, 9], [0, 0, 0], [4, 5, 0]]


@pytest.mark.slow
@pytest.mark.gloo
def test_tensor_ranks_have_the_scores_of_one():
    hidden_TD, unembed_VD, targets_T, kept = inputs()

    def program(mesh):
        own_VD = unembed_VD.chunk(2)[int(mesh.index("tensor"))]
        return scores(hidden_TD, own_VD, targets_T, kept, mesh)[:3]

    expected = scores(hidden_TD, unembed_VD, targets_T, kept)[:3]
    for ours, theirs in zip(launch(program, parse("tp2"), "cpu"), expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-12
