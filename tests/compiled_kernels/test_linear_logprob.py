"""Log-probs, entropies and collision probabilities from hidden states, with their gradients."""

import math

import pytest
import torch

from funrl.compiled_kernels import linear_logprob as kernel
from funrl.compiled_kernels.linear_logprob import WANTS, linear_logprob, linear_logprob_reference, topk
from funrl.mesh.simulate import gather, per_rank, simulate

T, V, D = 13, 24, 6


def _inputs(dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    hidden, unembed = (scale * torch.randn(n, D, generator=generator, dtype=torch.float64) for n in (T, V))
    targets = torch.randint(0, V, (T,), generator=generator)
    cotangent = torch.randn(3, T, generator=generator, dtype=torch.float64)
    return hidden.to(dtype).requires_grad_(), unembed.to(dtype).requires_grad_(), targets, cotangent


def known(scores):
    """The fields that were asked for."""
    return [x for x in scores if x is not None]


def _with_grads(scores, inputs, cotangent):
    """The scores that were asked for, and the gradient of a weighted sum of them."""
    known = [(x, c) for x, c in zip(scores, cotangent, strict=False) if x is not None]
    total = sum((x * c).sum() for x, c in known)
    return [x.detach() for x, _ in known], torch.autograd.grad(total, inputs)


@pytest.mark.parametrize("want", [("logp",), ("entropy",), ("logp", "entropy"), ("sum_pi_squared",), WANTS])
@pytest.mark.parametrize("chunk", [1, 5, 13, 100])
def test_equals_reference(want, chunk):
    hidden, unembed, targets, cotangent = _inputs()
    got = linear_logprob(hidden, unembed, targets, temperature=0.7, chunk=chunk, want=want)
    assert [name for name, x in got._asdict().items() if x is not None] == [w for w in WANTS if w in want]
    whole = linear_logprob_reference(hidden, unembed, targets, 0.7)
    expected = type(whole)(*(x if name in want else None for name, x in whole._asdict().items()))
    (got, grads), (expected, grads_expected) = (_with_grads(s, (hidden, unembed), cotangent) for s in (got, expected))
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(got, expected, strict=True))
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(grads, grads_expected, strict=True))


@pytest.mark.parametrize("cap", [0.5, 3.0])
@pytest.mark.parametrize("want", [("logp",), WANTS])
def test_capped_logits_equal_the_reference(cap, want):
    hidden, unembed, targets, cotangent = _inputs()
    got = linear_logprob(hidden, unembed, targets, temperature=0.7, chunk=5, want=want, cap=cap)
    whole = linear_logprob_reference(hidden, unembed, targets, 0.7, cap)
    expected = type(whole)(*(x if name in want else None for name, x in whole._asdict().items()))
    (got, grads), (expected, grads_expected) = (_with_grads(s, (hidden, unembed), cotangent) for s in (got, expected))
    assert all((a - b).abs().max() < 1e-12 for a, b in zip((*got, *grads), (*expected, *grads_expected), strict=True))
    ids, logp = topk(hidden, unembed, 3, temperature=0.7, cap=cap)
    best = linear_logprob_reference(hidden, unembed, ids[:, 0], 0.7, cap).logp
    assert (logp[:, 0] - best).abs().max() < 1e-12


@pytest.mark.parametrize("cap", [None, 0.8])
def test_finite_differences(cap):
    hidden, unembed, targets, _ = _inputs()

    def scores(h, w):
        return torch.stack(known(linear_logprob(h, w, targets, temperature=1.3, chunk=4, want=WANTS, cap=cap)))

    assert torch.autograd.gradcheck(scores, (hidden, unembed))


def test_by_hand():
    # Logits 0 and log 3: p = 1/4, 3/4; at temperature 1/2 logits 0 and log 9: p = 1/10, 9/10.
    hidden, unembed = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]])
    warm = linear_logprob(hidden, unembed, torch.tensor([1]), want=WANTS)
    assert warm.logp.item() == pytest.approx(math.log(0.75))
    assert warm.entropy.item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))
    assert warm.sum_pi_squared.item() == pytest.approx(10 / 16)
    cold = linear_logprob(hidden, unembed, torch.tensor([0]), temperature=0.5)
    assert cold.logp.item() == pytest.approx(math.log(0.1)) and cold.entropy is None


def test_large_logits_do_not_overflow():
    hidden, unembed, targets, cotangent = _inputs(torch.float32, scale=30.0)
    got = linear_logprob(hidden, unembed, targets, want=WANTS)
    expected = linear_logprob_reference(hidden.double(), unembed.double(), targets)
    for a, b in zip(known(got), known(expected), strict=True):
        assert torch.isfinite(a).all() and (a - b).abs().max() < 1e-5 * (1 + b.abs().max())
    assert all(torch.isfinite(g).all() for g in _with_grads(got, (hidden, unembed), cotangent.float())[1])


def test_bfloat16_accumulates_in_float32():
    hidden, unembed, targets, cotangent = _inputs(torch.bfloat16)
    got = linear_logprob(hidden, unembed, targets, chunk=5, want=WANTS)
    wide = [x.detach().double().requires_grad_() for x in (hidden, unembed)]
    expected = linear_logprob_reference(*wide, targets)
    assert all(x.dtype == torch.float32 for x in known(got))
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(known(got), known(expected), strict=True))
    grads = _with_grads(got, (hidden, unembed), cotangent)[1]
    for g, e in zip(grads, _with_grads(expected, wide, cotangent)[1], strict=True):
        assert g.dtype == torch.bfloat16 and (g.double() - e).norm() < 0.02 * e.norm()


def test_only_one_input_needs_a_gradient():
    hidden, unembed, targets, _ = _inputs()
    both = torch.autograd.grad(linear_logprob(hidden, unembed, targets).logp.sum(), (hidden, unembed))
    (alone,) = torch.autograd.grad(linear_logprob(hidden, unembed.detach(), targets).logp.sum(), (hidden,))
    (other,) = torch.autograd.grad(linear_logprob(hidden.detach(), unembed, targets).logp.sum(), (unembed,))
    assert torch.equal(alone, both[0]) and torch.equal(other, both[1])


def test_what_no_loss_depends_on_is_not_in_the_backward_pass(monkeypatch):
    """The entropy that is only looked at: its gradient is not computed, not even as zeros."""
    hidden, unembed, targets, _ = _inputs()
    seen = []
    d_logits = kernel.to_d_logits_
    monkeypatch.setattr(kernel, "to_d_logits_", lambda *args: seen.append(set(args[-1])) or d_logits(*args))
    both = linear_logprob(hidden, unembed, targets, temperature=0.7, want=WANTS)
    got = torch.autograd.grad(both.logp.sin().sum(), (hidden, unembed))
    alone = linear_logprob(hidden, unembed, targets, temperature=0.7).logp
    expected = torch.autograd.grad(alone.sin().sum(), (hidden, unembed))
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-12, atol=1e-12)
    torch.autograd.grad(linear_logprob(hidden, unembed, targets, want=WANTS).entropy.sum(), hidden)
    assert seen == [{"logp"}, {"logp"}, {"entropy"}]


def test_no_tokens():
    hidden, unembed, targets, _ = _inputs()
    got = linear_logprob(hidden[:0], unembed, targets[:0], want=WANTS)
    assert all(x.shape == (0,) for x in known(got))
    assert torch.autograd.grad(got.logp.sum(), unembed)[0].abs().max() == 0


def test_logits_are_never_whole(monkeypatch):
    hidden, unembed, targets, _ = _inputs()
    rows = []
    project = kernel.project
    monkeypatch.setattr(kernel, "project", lambda h, w, cap: rows.append(len(h)) or project(h, w, cap))
    linear_logprob(hidden, unembed, targets, chunk=5).logp.sum().backward()
    assert rows == [5, 5, 3] * 2


def test_unknown_wants_and_temperatures():
    hidden, unembed, targets, _ = _inputs()
    with pytest.raises(ValueError, match=r"'logits'.*'entropy'"):
        linear_logprob(hidden, unembed, targets, want=("logits",))
    with pytest.raises(ValueError, match="temperature is 0"):
        linear_logprob(hidden, unembed, targets, temperature=0.0)


def test_functional_gradient():
    hidden, unembed, targets, _ = _inputs()

    def loss(w):
        return linear_logprob(hidden.detach(), w, targets, chunk=4).logp.sum()

    expected = torch.autograd.grad(loss(unembed), unembed)[0]
    assert torch.allclose(torch.func.grad(loss)(unembed.detach()), expected, atol=1e-12)


@pytest.mark.parametrize("text", ["tp2", "tp4", "dp2,tp4"])
def test_vocabulary_parallel(text):
    hidden, unembed, targets, cotangent = _inputs(scale=3.0)
    expected, (d_hidden, d_unembed) = _with_grads(
        linear_logprob_reference(hidden, unembed, targets, 0.7), (hidden, unembed), cotangent
    )
    with simulate(text) as mesh:
        size = mesh.size("tensor")
        shards = unembed.detach().chunk(size)
        local = per_rank(mesh.world, lambda rank: shards[rank % size].clone()).requires_grad_()
        whole = hidden.detach().clone().requires_grad_()
        scores = linear_logprob(whole, local, targets, mesh, 0.7, chunk=5, want=WANTS)
        everything = _with_grads(scores, (whole, local), cotangent)
        ranks = [gather(everything, rank) for rank in range(mesh.world)]
    for rank, (got, (got_hidden, got_unembed)) in enumerate(ranks):
        assert all((a - b).abs().max() < 1e-9 for a, b in zip(got, expected, strict=True))
        assert (got_hidden - d_hidden).abs().max() < 1e-9  # complete on every rank
        assert (got_unembed - d_unembed.chunk(size)[rank % size]).abs().max() < 1e-9


def _among(hidden, unembed, among, temperature):
    """Log-probabilities of further tokens, from whole logits."""
    return (hidden @ unembed.T / temperature).log_softmax(-1).gather(1, among)


@pytest.mark.parametrize("want", [(), ("logp",), WANTS])
def test_further_tokens(want):
    """Their log-probabilities and, together with all else, their gradients; one of them may be the target itself."""
    hidden, unembed, targets, cotangent = _inputs()
    among = torch.stack([targets, (targets + 5) % V, (targets + 5) % V, torch.arange(T)], 1)
    weights = torch.randn(among.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = linear_logprob(hidden, unembed, targets, temperature=0.7, chunk=5, want=want, topk_TK=among)
    expected = linear_logprob_reference(hidden, unembed, targets, 0.7)
    expected = expected._replace(**{name: None for name in WANTS if name not in want})
    expected = expected._replace(topk_logp=_among(hidden, unembed, among, 0.7))
    assert [x is None for x in got] == [x is None for x in expected]
    cotangent = [*cotangent, weights]
    (got, grads), (expected, grads_expected) = (_with_grads(s, (hidden, unembed), cotangent) for s in (got, expected))
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(got, expected, strict=True))
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(grads, grads_expected, strict=True))


@pytest.mark.parametrize("text", ["tp1", "tp2", "tp8", "dp2,tp4"])
def test_the_topk_of_all_ranks(text):
    """Under tp8 a rank has fewer tokens than are asked for."""
    hidden, unembed, targets, _ = _inputs(scale=3.0)
    k = 5
    logp, ids = _among(hidden, unembed, torch.arange(V).expand(T, V), 0.7).detach().topk(k, -1)
    weights = torch.randn(T, k, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    d_hidden, d_unembed = torch.autograd.grad((_among(hidden, unembed, ids, 0.7) * weights).sum(), (hidden, unembed))
    with simulate(text) as mesh:
        size = mesh.size("tensor")
        shards = unembed.detach().chunk(size)
        local = per_rank(mesh.world, lambda rank: shards[rank % size].clone()).requires_grad_()
        whole = hidden.detach().clone().requires_grad_()
        result = topk(whole, local, k, mesh, 0.7, chunk=5)
        scores = linear_logprob(whole, local, targets, mesh, 0.7, chunk=5, want=(), topk_TK=result[0])
        grads = torch.autograd.grad((scores.topk_logp * weights).sum(), (whole, local))
        ranks = [gather((result, grads), rank) for rank in range(mesh.world)]
    for rank, ((got_ids, got_logp), (got_hidden, got_unembed)) in enumerate(ranks):
        assert torch.equal(got_ids, ids) and (got_logp - logp).abs().max() < 1e-12
        assert (got_hidden - d_hidden).abs().max() < 1e-9
        assert (got_unembed - d_unembed.chunk(size)[rank % size]).abs().max() < 1e-9
