"""Cases of the kernels of `logit_rows` under Triton's interpreter, which interpreted_cases.py runs."""

import itertools

import torch
from torch.library import opcheck

from funrl.compiled_kernels import linear_logprob as head
from funrl.compiled_kernels.gpu_kernels import trials
from funrl.compiled_kernels.linear_divergence import divergence, divergence_error, linear_divergence
from funrl.compiled_kernels.linear_logprob import WANTS, linear_logprob, linear_logprob_reference, topk
from funrl.compiled_kernels.logit_rows import kernels, operators
from funrl.compiled_kernels.logit_rows.settings import LogitBlock, RowSettings
from funrl.mesh.simulate import gather, per_rank, simulate

C, V, D, N = 4, 45, 6, 3
FLAGS = ((True, True), (False, True), (False, False))  # whether the entropy and the sum of squares are wanted
SETTINGS = ((1.0, None), (0.7, None), (1.3, 3.0))  # temperature and cap


def draw(*shape, seed=0, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(got, expected, tolerance):
    assert got.shape == expected.shape
    error = (got.double() - expected).abs().amax().item() if got.numel() else 0.0
    assert error < tolerance, f"differs by {error}"


def picked_columns(count=N):
    """Some twice in a row, and the last column of all."""
    row_CN = torch.randint(V, (C, count), generator=torch.Generator().manual_seed(3))
    row_CN[0, -1] = row_CN[0, 0]
    row_CN[1, 0] = V - 1
    return row_CN


def tempered(x_CV, temperature, cap):
    return (x_CV if cap is None else cap * (x_CV / cap).tanh()) / temperature


def sums_of_blocks(x_CV, row_CN, settings, width):
    """Running sums over blocks of columns, as `operators.logit_row_sums` of all of them."""
    sums_CS, picked_CN = operators.empty_row_sums(len(x_CV), row_CN.shape[1], settings, x_CV.device)
    for x in (sums_CS, picked_CN):
        x.fill_(torch.nan)  # what memory has at first
    for first in range(0, x_CV.shape[1], width):
        x_CB = x_CV[:, first : first + width].contiguous()
        operators.add_row_sums_(sums_CS, picked_CN, LogitBlock(x_CB, row_CN, first), settings)
    return sums_CS, picked_CN - sums_CS[:, :1]


def sums_equal_float64():
    for dtype, settings in ((torch.float32, SETTINGS[1:]), (torch.bfloat16, SETTINGS[2:])):
        for temperature, cap in settings:
            x_CV = draw(C, V, scale=5.0).to(dtype)
            z_CV = tempered(x_CV.double(), temperature, cap)
            for entropy, squared in FLAGS if cap is None else FLAGS[:1]:
                compare_sums(x_CV, z_CV, picked_columns(), RowSettings(temperature, cap or 0.0, entropy, squared), V)


def compare_sums(x_CV, z_CV, row_CN, settings, width):
    """Sums over blocks of columns beside those of whole rows in float64."""
    top_C1 = z_CV.amax(-1, keepdim=True)
    z_CV = z_CV - top_C1
    e_CV = z_CV.exp()
    extras = ((e_CV * z_CV).sum(-1), settings.entropy), (e_CV.square().sum(-1), settings.squared)
    expected = [top_C1[:, 0], e_CV.sum(-1), *[x for x, wanted in extras if wanted]]
    sums_CS, picked_CN = sums_of_blocks(x_CV, row_CN, settings, width)
    close(sums_CS, torch.stack(expected, 1), 1e-6 * e_CV.shape[1] + 2e-5)
    close(picked_CN, z_CV.gather(1, row_CN), 1e-5)


BLOCKS = tuple(itertools.product((1, 5, 31, 33, 64, 97), (3, 7, 32, 40, 70)))  # columns in all and of a block
COUNTS = (1, 2, 3, 0, 40)  # picked columns; 40: more than a program has at a time


def blocks_equal_float64():
    """At 30 shapes, sums and gradients over blocks that do not divide the columns, with any picked columns."""
    assert len(BLOCKS) == 30
    for i, (columns, width) in enumerate(BLOCKS):
        temperature, cap = SETTINGS[i % 3]
        rows = 1 + i % 4
        settings = RowSettings(temperature, cap or 0.0, *FLAGS[i % 3])
        x_CV = draw(rows, columns, seed=i, scale=4.0).float()
        generator = torch.Generator().manual_seed(i)
        row_CN = torch.randint(columns, (rows, COUNTS[i % 5]), generator=generator)
        wide_CV = x_CV.double().requires_grad_()
        z_CV = tempered(wide_CV, temperature, cap)
        compare_sums(x_CV, z_CV.detach(), row_CN, settings, width)

        logp_CV = z_CV.log_softmax(-1)
        values = {"logp": logp_CV.gather(1, row_CN), "entropy": -(logp_CV.exp() * logp_CV).sum(-1, keepdim=True)}
        values["sum_pi_squared"] = (2 * logp_CV).exp().sum(-1, keepdim=True)
        used = {"logp": row_CN.shape[1] > 0, "entropy": settings.entropy, "sum_pi_squared": settings.squared}
        grads = {name: draw(*values[name].shape, seed=i) for name, wanted in used.items() if wanted}
        if not grads:
            continue
        total = sum((values[name] * grad).sum() for name, grad in grads.items())
        (expected_CV,) = torch.autograd.grad(total, wide_CV)
        over = {name: (grad / temperature).float() for name, grad in grads.items()}
        known = {name: values[name].detach().float() for name in grads}
        facts_C6 = operators.row_facts(z_CV.detach().logsumexp(-1).float(), known, over)
        grad_CN = over.get("logp", torch.zeros(rows, 0))
        whole_CV = torch.full((rows, columns + 3), torch.nan)  # rows of which these are the first columns
        for first in range(0, columns, width):
            block = slice(first, min(first + width, columns))
            logits = LogitBlock(x_CV[:, block].contiguous(), row_CN, first)
            operators.logit_gradients(whole_CV[:, block], logits, grad_CN, facts_C6, settings)
        close(whole_CV[:, :columns], expected_CV, 2e-5)
        assert whole_CV[:, columns:].isnan().all()


def gradients_equal_float64():
    """A row without a gradient is 0 to the bit, and a column of another rank is not picked."""
    for dtype, out_dtype, tolerance, settings in (
        (torch.float32, torch.float32, 1e-5, SETTINGS[1:]),
        (torch.float32, torch.bfloat16, 0.02, SETTINGS[2:]),
        (torch.bfloat16, torch.bfloat16, 0.02, SETTINGS[2:]),
    ):
        for temperature, cap in settings:
            x_CV = draw(C, V, scale=3.0).to(dtype)
            wide_CV = x_CV.double().requires_grad_()
            logp_CV = tempered(wide_CV, temperature, cap).log_softmax(-1)
            results = {"entropy": -(logp_CV.exp() * logp_CV).sum(-1), "sum_pi_squared": (2 * logp_CV).exp().sum(-1)}
            grads = {"logp": draw(C, N, seed=1), "entropy": draw(C, seed=2), "sum_pi_squared": draw(C, seed=4)}
            for grad in grads.values():
                grad[2] = 0
            mine_CN = torch.ones(C, N, dtype=torch.bool)
            mine_CN[3, 1] = False
            total = (logp_CV.gather(1, picked_columns()) * grads["logp"]).sum()
            total = total + sum((results[name] * grads[name]).sum() for name in results)
            (d_CV,) = torch.autograd.grad(total, wide_CV)
            slope_CV = 1 if cap is None else 1 - (x_CV.double() / cap).tanh().square()
            elsewhere_CV = torch.zeros_like(d_CV).scatter_add(
                1, picked_columns(), torch.where(mine_CN, 0, grads["logp"] / temperature)
            )
            expected_CV = d_CV - elsewhere_CV * slope_CV
            over = {name: (grad / temperature).float().reshape(C, -1) for name, grad in grads.items()}
            known = {name: x.detach().float()[:, None] for name, x in results.items()}
            normalizer_C = tempered(x_CV.double(), temperature, cap).logsumexp(-1).float()
            out_CV = torch.full((C, V), torch.nan, dtype=out_dtype)
            kernels.launch_gradients(
                out_CV,
                LogitBlock(x_CV, picked_columns()),
                torch.where(mine_CN, over["logp"], 0),
                operators.row_facts(normalizer_C, known, over),
                RowSettings(temperature, cap or 0.0, True, True),
            )
            close(out_CV, expected_CV, tolerance)
            assert not out_CV[2].any()


def inputs(dtype, vocab=V, tokens=7):
    hidden, unembed = (draw(n, D, seed=n).to(dtype).requires_grad_() for n in (tokens, vocab))
    ids_T = torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(1))
    return hidden, unembed, ids_T, torch.stack([ids_T, (ids_T + 5) % vocab, (ids_T + 5) % vocab], 1)


COTANGENTS = [draw(*shape, seed=7 + i) for i, shape in enumerate([(7,), (7,), (7,), (7, 3)])]


def total_of(scores):
    pairs = zip(scores, COTANGENTS, strict=False)
    return sum((x * cotangent).sum() for x, cotangent in pairs if x is not None)


def reference(hidden, unembed, ids_T, topk_TK, temperature, cap, want):
    whole = linear_logprob_reference(hidden, unembed, ids_T, temperature, cap)
    logits_TV = tempered(hidden @ unembed.T, temperature, cap)
    whole = whole._replace(**{name: None for name in WANTS if name not in want})
    return whole if topk_TK is None else whole._replace(topk_logp=logits_TV.log_softmax(-1).gather(1, topk_TK))


def scores_equal_float64():
    """Of all wants, several chunks, and further tokens; and their gradients."""
    for dtype, ratio, want, further, (temperature, cap) in (
        (torch.float32, 1e-5, ("logp",), False, SETTINGS[0]),
        (torch.bfloat16, 0.02, ("entropy",), False, SETTINGS[1]),
        (torch.float32, 1e-5, WANTS, True, SETTINGS[2]),
    ):
        hidden, unembed, ids_T, topk_TK = inputs(dtype)
        topk_TK = topk_TK if further else None
        got = linear_logprob(
            hidden, unembed, ids_T, temperature=temperature, chunk=4, want=want, topk_TK=topk_TK, cap=cap
        )
        wide = [x.detach().double().requires_grad_() for x in (hidden, unembed)]
        expected = reference(*wide, ids_T, topk_TK, temperature, cap, want)
        for a, b in zip(got, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                close(a, b, 1e-5)
        grads = torch.autograd.grad(total_of(got), (hidden, unembed))
        for a, b in zip(grads, torch.autograd.grad(total_of(expected), wide), strict=True):
            assert a.dtype == dtype and (a.double() - b).norm() < ratio * b.norm()


def divergences_equal_float64():
    """Of several chunks, kinds, caps and dtypes, and where each of two ranks has half of the vocabulary."""
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(n, d, generator=generator) for n, d in ((7, D), (44, D), (7, 4), (44, 4))]
    for (beta, caps), dtype in zip(
        ((0, (None, None)), (1, (3.0, None)), (0.3, (3.0, 2.0))),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        strict=True,
    ):
        given = [x.to(dtype).requires_grad_() for x in tensors]
        wide = [x.detach().double().requires_grad_() for x in given]
        capped = [tempered(h @ w.T, 1.0, cap) for (h, w), cap in zip((wide[:2], wide[2:]), caps, strict=True)]
        student, teacher = ((x / 0.7).log_softmax(-1) for x in capped)
        expected = divergence(student, teacher.detach(), beta)
        d_hidden, d_unembed = torch.autograd.grad((expected * COTANGENTS[0]).sum(), wide[:2])
        got = linear_divergence(*given, beta, temperature=0.7, chunk=4, caps=caps)
        close(got, expected, 1e-5)
        grads = torch.autograd.grad((got * COTANGENTS[0]).sum(), given[:2])
        for a, b in zip(grads, (d_hidden, d_unembed), strict=True):
            assert a.dtype == dtype and (a.double() - b).norm() < (1e-5 if dtype is torch.float32 else 0.02) * b.norm()
        if dtype is torch.bfloat16:
            continue
        with simulate("tp2") as mesh:
            local = [x.detach() for x in given]
            for i in (1, 3):
                shards = local[i].chunk(2)
                local[i] = per_rank(2, lambda rank, shards=shards: shards[rank].clone())
            local[0].requires_grad_()
            got = linear_divergence(*local, beta, mesh, 0.7, chunk=4, caps=caps)
            (grad,) = torch.autograd.grad((got * COTANGENTS[0]).sum(), local[0])
            ranks = [gather((got, grad), rank) for rank in range(2)]
        for value, d_local in ranks:
            close(value, expected, 1e-5)
            close(d_local, d_hidden, 1e-4)


def vocabulary_is_split():
    """Each of two ranks has half of the vocabulary; maxima and sums of both meet."""
    hidden, unembed, ids_T, topk_TK = inputs(torch.float32, vocab=44)
    wide = [x.detach().double().requires_grad_() for x in (hidden, unembed)]
    expected = reference(*wide, ids_T, topk_TK, 0.7, None, WANTS)
    d_hidden, d_unembed = torch.autograd.grad(total_of(expected), wide)
    with simulate("tp2") as mesh:
        shards = unembed.detach().chunk(2)
        local = per_rank(2, lambda rank: shards[rank].clone()).requires_grad_()
        scores = linear_logprob(hidden, local, ids_T, mesh, 0.7, chunk=4, want=WANTS, topk_TK=topk_TK)
        grads = torch.autograd.grad(total_of(scores), (hidden, local))
        best = topk(hidden, local, 4, mesh, 0.7, chunk=4)[0]
        ranks = [gather((tuple(scores)[:4], grads, best), rank) for rank in range(2)]
    for rank, (got, (got_hidden, got_unembed), got_best) in enumerate(ranks):
        for a, b in zip(got, expected, strict=False):
            close(a, b, 1e-5)
        close(got_hidden, d_hidden, 1e-4)
        close(got_unembed, d_unembed.chunk(2)[rank], 1e-4)
        assert torch.equal(got_best, (wide[0] @ wide[1].T).topk(4).indices)


def what_is_not_finite_stays_so():
    x_CV = draw(C, V).float()
    x_CV[1, 40], x_CV[2, 3] = torch.nan, torch.inf
    x_CV[3] *= 1e4
    for width in (V, 20):
        sums_CS, _ = sums_of_blocks(x_CV, picked_columns(), RowSettings(entropy=True, squared=True), width)
        assert sums_CS[1:3, 1:].isnan().all() and sums_CS[[0, 3]].isfinite().all()


def operators_keep_their_promises():
    """What they write, and the shapes that a tracer is told."""
    x_CV, row_CN = draw(C, V).float(), picked_columns()
    out_CV, grad_CN, facts_C6 = torch.empty(C, V, dtype=torch.bfloat16), draw(C, N).float(), draw(C, 6).float()
    tests = ("test_schema", "test_faketensor")
    sums = torch.empty(C, 3), torch.empty(C, N)
    opcheck(operators._row_sums.definition, (x_CV, row_CN, *sums, 0, 0.7, 0.0, True, False), test_utils=tests)
    given = x_CV, 2 * x_CV, facts_C6[:, :4], 0.3, 0.7, 0.0, 3.0
    opcheck(operators._divergence_sums.definition, given, test_utils=tests)
    opcheck(operators._divergence_gradients.definition, (out_CV, *given), test_utils=tests)
    opcheck(
        operators._d_logits.definition,
        (out_CV, x_CV, row_CN, grad_CN, facts_C6, 0, 0.7, 3.0, True, True),
        test_utils=tests,
    )


def no_tokens_and_one_input():
    hidden, unembed, ids_T, _ = inputs(torch.float32)
    got = linear_logprob(hidden[:0], unembed, ids_T[:0], want=WANTS)
    assert got.logp.shape == (0,) and not torch.autograd.grad(got.logp.sum(), unembed)[0].any()
    both = torch.autograd.grad(linear_logprob(hidden, unembed, ids_T).logp.sum(), (hidden, unembed))
    (alone,) = torch.autograd.grad(linear_logprob(hidden, unembed.detach(), ids_T).logp.sum(), (hidden,))
    (function,) = (torch.func.grad(lambda h: linear_logprob(h, unembed.detach(), ids_T).logp.sum())(hidden.detach()),)
    assert torch.equal(alone, both[0])
    close(function, both[0].double(), 1e-5)  # a CPU's products of blocks round by where they lie in memory


def wrong_kernels_are_found():
    trials._PROBED = "cpu"
    assert trials.trial_problem(operators.logit_rows_error) is None and trials.trial_problem(divergence_error) is None
    right = kernels.launch_gradients
    kernels.launch_gradients = lambda out_CV, block, grad_CN, *given: right(out_CV, block, 2 * grad_CN, *given)
    try:
        assert "differ by 1 from" in trials.trial_problem(operators.logit_rows_error)
    finally:
        kernels.launch_gradients = right


CASES = (
    sums_equal_float64,
    blocks_equal_float64,
    gradients_equal_float64,
    scores_equal_float64,
    divergences_equal_float64,
    vocabulary_is_split,
    what_is_not_finite_stays_so,
    operators_keep_their_promises,
    no_tokens_and_one_input,
    wrong_kernels_are_found,
)


def set_up():
    """Run the kernels with two programs, or turns, for a row."""
    kernels._WIDTH = 32
    operators.l2_blocks = lambda device: operators.ColumnBlocks(numbers=64, processors=2)
    operators.TILE = (2, 8)  # rows and columns: two waves of a block of 4 rows are 16 columns
    head.operators.by_kernels = lambda *hidden, **trial: True
    head.computes_exactly = lambda *tensors: False
