"""The divergence over the whole vocabulary from hidden states, with its gradient."""

import pytest
import torch

import funrl.models.compiling.compiled_layer  # noqa: F401  # tells torch.compile what is constant
from funrl.compiled_kernels import linear_divergence as kernel
from funrl.compiled_kernels.linear_divergence import linear_divergence, linear_divergence_reference
from funrl.mesh.simulate import gather, per_rank, simulate

T, V, D, E = 13, 24, 6, 4
BETAS = [0, 0.1, 0.5, 1]


def _inputs(dtype=torch.float64, scale=1.0):
    """Hidden states and unembeddings of student and teacher, whose widths differ, and weights of the tokens."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((T, D), (V, D), (T, E), (V, E))
    tensors = [(scale * torch.randn(*size, generator=generator, dtype=torch.float64)).to(dtype) for size in sizes]
    weight = torch.randn(T, generator=generator, dtype=torch.float64)
    return [x.requires_grad_() for x in tensors], weight


def _with_grads(value, inputs, weight):
    return value.detach(), *torch.autograd.grad((value * weight).sum(), inputs[:2])


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("chunk", [1, 5, 13, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_reference(beta, chunk, temperature):
    inputs, weight = _inputs()
    got = _with_grads(linear_divergence(*inputs, beta, temperature=temperature, chunk=chunk), inputs, weight)
    expected = _with_grads(linear_divergence_reference(*inputs, beta, temperature), inputs, weight)
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("beta", BETAS)
def test_capped_logits(beta):
    inputs, weight = _inputs()
    hidden, unembed, *teacher = inputs
    got = linear_divergence(*inputs, beta, temperature=0.7, chunk=4, caps=(0.8, 0.5))

    def capped(x, w, cap):  # as logits of an unembedding that is the identity
        return cap * ((x @ w.T) / cap).tanh()

    eye = torch.eye(V, dtype=torch.float64)
    logits = capped(hidden, unembed, 0.8), eye, capped(*teacher, 0.5), eye
    pairs = zip(
        *(_with_grads(x, inputs, weight) for x in (got, linear_divergence_reference(*logits, beta, 0.7))), strict=True
    )
    assert all((a - b).abs().max() < 1e-12 for a, b in pairs)


@pytest.mark.parametrize("text", ["tp2", "tp4", "dp2,tp4"])
@pytest.mark.parametrize("beta", BETAS)
def test_vocabulary_parallel(text, beta):
    inputs, weight = _inputs(scale=3.0)
    value, d_hidden, d_unembed = _with_grads(linear_divergence_reference(*inputs, beta, 0.7), inputs, weight)
    with simulate(text) as mesh:
        size = mesh.size("tensor")

        def rows(x):
            parts = x.detach().chunk(size)
            return per_rank(mesh.world, lambda rank: parts[rank % size].clone()).requires_grad_()

        hidden, teacher = (x.detach().clone().requires_grad_() for x in inputs[::2])
        local = hidden, rows(inputs[1]), teacher, rows(inputs[3])
        result = _with_grads(linear_divergence(*local, beta, mesh, 0.7, chunk=5), local, weight)
        ranks = [gather(result, rank) for rank in range(mesh.world)]
    for rank, (got, got_hidden, got_unembed) in enumerate(ranks):
        own = d_unembed.chunk(size)[rank % size]
        for a, b in ((got, value), (got_hidden, d_hidden), (got_unembed, own)):  # hidden's is complete on every rank
            assert (a - b).abs().max() < 1e-12 * (1 + b.abs().max())


def test_the_teacher_has_no_gradient_and_one_input_may_have_it_alone():
    inputs, _ = _inputs()
    both = torch.autograd.grad(linear_divergence(*inputs).sum(), inputs, allow_unused=True)
    assert both[2] is None and both[3] is None
    for i in range(2):
        alone = [x.detach() for x in inputs]
        alone[i].requires_grad_()
        assert torch.equal(torch.autograd.grad(linear_divergence(*alone).sum(), alone[i])[0], both[i])


def test_a_student_that_is_the_teacher_is_at_rest():
    (hidden, unembed, *_), _ = _inputs()
    for beta in BETAS:
        value = linear_divergence(hidden, unembed, hidden, unembed, beta)
        grads = torch.autograd.grad(value.sum(), (hidden, unembed))
        assert all(x.abs().max() < 1e-14 for x in (value, *grads))


@pytest.mark.parametrize("beta", BETAS)
def test_large_logits_do_not_overflow(beta):
    inputs, weight = _inputs(torch.float32, scale=10.0)
    value, *grads = _with_grads(linear_divergence(*inputs, beta), inputs, weight.float())
    expected = linear_divergence_reference(*inputs, beta)
    assert ((value - expected).abs() < 1e-4 * (1 + expected)).all() and all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("beta", BETAS)
def test_bfloat16_accumulates_in_float32(beta):
    inputs, weight = _inputs(torch.bfloat16)
    got, *grads = _with_grads(linear_divergence(*inputs, beta, chunk=5), inputs, weight)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected, *grads_expected = _with_grads(linear_divergence_reference(*wide, beta), wide, weight)
    assert got.dtype == torch.float32 and (got - expected).abs().max() < 1e-5
    for g, e in zip(grads, grads_expected, strict=True):
        assert g.dtype == torch.bfloat16 and (g.double() - e).norm() < 0.02 * e.norm()


def test_logits_are_never_whole(monkeypatch):
    inputs, _ = _inputs()
    rows, project = [], kernel.project
    monkeypatch.setattr(kernel, "project", lambda h, w, cap: rows.append(len(h)) or project(h, w, cap))
    linear_divergence(*inputs, chunk=5).sum().backward()
    assert rows == [5, 5, 5, 5, 3, 3] * 2


@pytest.mark.slow
def test_functional_gradient_and_compilation():
    inputs, weight = _inputs()
    hidden, unembed, *teacher = [x.detach() for x in inputs]

    def loss(h, w):
        return (linear_divergence(h, w, *teacher, 0.3, chunk=8) * weight).sum()

    expected = torch.autograd.grad((linear_divergence_reference(*inputs, 0.3) * weight).sum(), inputs[:2])
    for way in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        if way is loss:
            got = torch.func.grad(way, argnums=(0, 1))(hidden, unembed)
        else:
            got = torch.autograd.grad(way(*inputs[:2]), inputs[:2])
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(got, expected, strict=True))


def test_no_tokens():
    inputs, _ = _inputs()
    got = linear_divergence(inputs[0][:0], inputs[1], inputs[2][:0], inputs[3])
    assert got.shape == (0,) and torch.autograd.grad(got.sum(), inputs[1])[0].abs().max() == 0


def test_what_does_not_fit_together():
    (hidden, unembed, teacher, teacher_unembed), _ = _inputs()
    with pytest.raises(ValueError, match="student's vocabulary has 24 rows and the teacher's 23"):
        linear_divergence(hidden, unembed, teacher, teacher_unembed[:-1])
    with pytest.raises(ValueError, match="student has 13 tokens and the teacher 12"):
        linear_divergence(hidden, unembed, teacher[1:], teacher_unembed)
    with pytest.raises(ValueError, match="temperature is 0"):
        linear_divergence(hidden, unembed, teacher, teacher_unembed, temperature=0.0)
    with pytest.raises(ValueError, match=r"beta is 2\.0"):
        linear_divergence(hidden, unembed, teacher, teacher_unembed, 2.0)
