"""Every public piece of funrl.algos through the same properties. A new piece needs a row in one of the rows_*.py.

Terms and preference losses go through further properties in test_terms.py; test_completeness.py sees to it that no
piece is left out.
"""

import math

import pieces
import pytest
import torch
from pieces import example, packed, plain, poisoned, policy_logp, token_signal, widened
from tables import ROWS

from funrl.algos import reductions
from funrl.algos.core import Fraction, Signal, reduce
from funrl.batch import select

CONSTANTS = ("advantage", "weight", "old_logp", "ref_logp", "rollout_logp", "teacher_logp", "value", "returns", "label")


def of(*kinds):
    rows = [row for row in ROWS if row.kind in kinds]
    return pytest.mark.parametrize("row", rows, ids=[row.name for row in rows])


def signal_of(row, batch):
    return Signal(token_signal(batch) if row.tokens else batch.score, batch.mask, weight=row_weight(row, batch))


def row_weight(row, batch):
    return batch.weight if "weighted" in row.name else None


def run(row, batch):
    """The advantage piece on a batch, from its first state."""
    piece = row.make()
    signal, state = piece.update(signal_of(row, batch), piece.init(), batch)
    return signal, state


def fields_of(signal):
    fields = {k: getattr(signal, k) for k in ("x", "mask", "returns", "weight", "rows")}
    return {k: v for k, v in (fields | signal.extra).items() if v is not None}


def as_loss(row):
    """The losses that a piece makes: itself, or a term under each kind of reduction."""
    if row.kind == "loss":
        return [row.make()]
    return [reduce(row.make(), form) for form in (reductions.token_mean(), reductions.sequence_mean())]


def gradient_by(leaf, total):
    """The gradient of the total, zeros where it does not depend on the leaf (an entropy bonus by log-probabilities)."""
    if not total.requires_grad:
        return torch.zeros_like(leaf)
    (gradient,) = torch.autograd.grad(total, leaf, allow_unused=True)
    return torch.zeros_like(leaf) if gradient is None else gradient


def assert_close(got, want, tolerance=1e-11):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


# ---- values


@of("advantage")
def test_advantage_equals_its_reference(row):
    batch = row.prepare(example())
    signal, _ = run(row, batch)
    b = plain(batch)
    expected = row.reference(signal_of(row, batch).x.tolist(), b)
    got = fields_of(signal)
    for name, want in expected.items():
        assert_close(got[name].double(), torch.tensor(want, dtype=torch.float64))
    assert {"x"} <= set(got)
    for name in set(got) - {"rows", "mask"}:
        if got[name].dim() == 2 and name in expected:
            assert (got[name][~signal.mask] == 0).all(), f"{name} is not 0 outside the mask"


@of("term")
def test_term_equals_its_reference(row):
    batch = row.prepare(example())
    logp = policy_logp(batch)
    loss, metrics = row.make()(logp, batch)
    want = torch.tensor(row.reference(logp.tolist(), plain(batch)), dtype=torch.float64)
    assert_close(loss[batch.mask], want[batch.mask])
    for value in metrics.values():
        if isinstance(value, Fraction):  # a mean over something else than tokens
            assert math.isfinite(value.value.item())
            continue
        assert value.shape == batch.mask.shape
        assert not value.requires_grad
        assert torch.isfinite(value[batch.mask].double()).all()


@of("loss")
def test_loss_equals_its_reference(row):
    batch = row.prepare(example())
    logp = policy_logp(batch)
    fractions, metrics = row.make()(logp, batch)
    want = row.reference(logp.tolist(), plain(batch))
    assert len(fractions) == len(want)
    for got, (num, den) in zip(fractions, want, strict=True):
        assert_close(got.num, torch.tensor(num, dtype=torch.float64))
        assert_close(got.den, torch.tensor(den, dtype=torch.float64))
    assert all(isinstance(m, Fraction) for m in metrics.values())


@of("reduction")
def test_reduction_equals_its_reference(row):
    batch = example()
    loss = token_signal(batch)
    got = row.make()(loss, batch.mask)
    num, den = row.reference(loss.tolist(), plain(batch))
    assert_close(got.num, torch.tensor(num, dtype=torch.float64))
    assert_close(got.den, torch.tensor(den, dtype=torch.float64))


@of("filter")
def test_filter_equals_its_reference(row):
    batch = row.prepare(example())
    assert row.make()(batch).tolist() == row.reference(plain(batch))


@of("check")
def test_check(row):
    row.make()


@of("term", "loss")
def test_gradient_equals_differences_of_the_reference(row):
    if not row.smooth:
        pytest.skip("stops gradients inside, on purpose")
    batch = row.prepare(example())
    logp = policy_logp(batch)
    b = plain(batch)

    def total(values):
        out = row.reference(values, b)
        if row.kind == "loss":
            return sum(num for num, _ in out)
        return sum(out[i][t] for i in range(len(out)) for t in pieces.sampled(b, i))

    leaf = logp.clone().requires_grad_()
    out = row.make()(leaf, batch)[0]
    ours = sum(f.num for f in out) if row.kind == "loss" else out[batch.mask].sum()
    (gradient,) = torch.autograd.grad(ours, leaf)
    step = 1e-6
    for i, t in batch.mask.nonzero().tolist()[::3]:
        up, down = logp.clone(), logp.clone()
        up[i, t] += step
        down[i, t] -= step
        slope = (total(up.tolist()) - total(down.tolist())) / (2 * step)
        assert math.isclose(gradient[i, t].item(), slope, rel_tol=1e-5, abs_tol=1e-7), (i, t)


@of("advantage")
def test_advantage_in_float32(row):
    exact = fields_of(run(row, row.prepare(example()))[0])
    single = fields_of(run(row, row.prepare(example(torch.float32)))[0])
    for name, value in single.items():
        if value.is_floating_point():
            assert value.dtype == torch.float32, name
            assert_close(value.double(), exact[name].double(), 2e-4)


@of("term", "loss")
def test_loss_in_float32(row):
    for loss in as_loss(row):
        pairs = []
        for dtype in (torch.float64, torch.float32):
            batch = row.prepare(example(dtype))
            fractions, _ = loss(policy_logp(batch), batch)
            assert all(f.num.dtype == dtype for f in fractions)
            pairs.append([f.value.double() for f in fractions])
        for exact, single in zip(*pairs, strict=True):
            assert_close(single, exact, 2e-4)


# ---- what must not matter


@of("advantage")
def test_advantage_does_not_see_what_is_outside_the_mask(row):
    batch = row.prepare(example())
    one, _ = run(row, batch)
    piece = row.make()
    signal = signal_of(row, batch)
    if row.tokens:
        signal = signal._replace(x=torch.where(batch.mask, signal.x, torch.nan))
    if signal.weight is not None:
        signal = signal._replace(weight=torch.where(batch.mask, signal.weight, torch.nan))
    other, _ = piece.update(signal, piece.init(), poisoned(batch))
    for name, value in fields_of(one).items():
        got = fields_of(other)[name]
        on = one.mask if value.dim() == 2 and name != "mask" else torch.ones_like(value, dtype=torch.bool)
        assert torch.equal(got[on], value[on]), name


@of("term", "loss")
def test_loss_does_not_see_what_is_outside_the_mask(row):
    batch = row.prepare(example())
    results = []
    for poison in (False, True):
        logp = policy_logp(batch)
        given = batch
        if poison:
            logp, given = torch.where(batch.mask, logp, torch.nan), poisoned(batch)
        logp = logp.requires_grad_()
        for loss in as_loss(row):
            fractions, metrics = loss(logp, given)
            gradient = gradient_by(logp, sum(f.num for f in fractions))
            results.append([*(f.num for f in fractions), *(m.num for m in metrics.values()), gradient])
    half = len(results) // 2
    for clean, dirty in zip(results[:half], results[half:], strict=True):
        for a, b in zip(clean, dirty, strict=True):
            assert torch.equal(a, b)
            assert torch.isfinite(a).all()


@of("advantage", "filter")
def test_the_order_of_rows_does_not_matter(row):
    if not row.permutes:
        pytest.skip("draws by row number")
    batch = row.prepare(example())
    order = torch.tensor([3, 0, 6, 5, 1, 4, 2])
    if row.kind == "filter":
        assert torch.equal(row.make()(select(batch, order)), row.make()(batch)[order])
        return
    piece, moved = row.make(), select(batch, order)
    signal = signal_of(row, batch)
    signal = Signal(signal.x[order], signal.mask[order], weight=None if signal.weight is None else signal.weight[order])
    got = fields_of(piece.update(signal, piece.init(), moved)[0])
    for name, value in fields_of(run(row, batch)[0]).items():
        assert_close(got[name], value[order])


@of("advantage")
def test_padding_does_not_matter_to_advantages(row):
    batch = row.prepare(example())
    wide = widened(batch, 4)
    piece, signal = row.make(), signal_of(row, batch)
    pad = lambda x: torch.nn.functional.pad(x, (0, 4))  # noqa: E731
    weight = None if signal.weight is None else pad(signal.weight)
    signal = Signal(pad(signal.x) if row.tokens else signal.x, wide.mask, weight=weight)
    got = fields_of(piece.update(signal, piece.init(), wide)[0])
    for name, value in fields_of(run(row, batch)[0]).items():
        assert_close(got[name][..., : value.shape[-1]], value)


@of("term", "loss")
def test_padding_and_packing_do_not_matter_to_losses(row):
    batch = row.prepare(example())
    logp = policy_logp(batch)
    for loss in as_loss(row):
        fractions, metrics = loss(logp, batch)
        others = [(widened(batch, 3), torch.nn.functional.pad(logp, (0, 3)))]
        if row.packed:
            others.append(packed(batch, logp))
        for batch_, logp_ in others:
            fractions_, metrics_ = loss(logp_, batch_)
            for a, b in zip([*fractions, *metrics.values()], [*fractions_, *metrics_.values()], strict=True):
                assert_close(b.num, a.num)
                assert_close(b.den, a.den)


@of("reduction")
def test_padding_and_packing_do_not_matter_to_reductions(row):
    batch = example()
    loss = token_signal(batch)
    whole = row.make()(loss, batch.mask)
    short, short_loss = packed(batch, loss)
    for other in (
        row.make()(torch.nn.functional.pad(loss, (0, 3)), torch.nn.functional.pad(batch.mask, (0, 3))),
        row.make()(short_loss, short.mask, short.segments),
        row.make()(torch.where(batch.mask, loss, torch.nan), batch.mask),
    ):
        assert_close(other.num, whole.num)
        assert_close(other.den, whole.den)


@of("term", "loss", "reduction")
def test_parts_add_up_to_the_whole(row):
    """Micro-batches of unequal size, and two data ranks that hold every other row."""
    batch = row.prepare(example())
    logp = policy_logp(batch)
    splits = ([slice(0, 1), slice(1, 5), slice(5, 7)], [slice(0, None, 2), slice(1, None, 2)])
    if not row.additive:
        pytest.skip("takes statistics over the batch")
    if row.kind == "reduction":
        losses = [lambda x, b: ((row.make()(x, b.mask),), {})]
    else:
        losses = as_loss(row)
    for loss in losses:
        leaf = logp.clone().requires_grad_()
        fractions, metrics = loss(leaf, batch)
        whole = [*fractions, *metrics.values()]
        gradient = gradient_by(leaf, sum(f.num for f in fractions))
        for parts in splits:
            leaf = logp.clone().requires_grad_()
            outs = [loss(leaf[part], select(batch, part)) for part in parts]
            sums = [sum(column[1:], column[0]) for column in zip(*[[*f, *m.values()] for f, m in outs], strict=True)]
            for got, want in zip(sums, whole, strict=True):
                assert_close(got.num, want.num)
                assert_close(got.den, want.den)
            total = sum(f.num for fractions, _ in outs for f in fractions)
            assert_close(gradient_by(leaf, total), gradient)


@of("term", "loss")
def test_denominators_depend_on_the_mask_alone(row):
    batch = row.prepare(example())
    for loss in as_loss(row):
        one, other = (loss(policy_logp(batch, seed), batch)[0] for seed in (1, 5))
        assert [f.den.item() for f in one] == [f.den.item() for f in other]


@of("term", "loss")
def test_no_gradient_reaches_what_the_batch_holds_constant(row):
    batch = row.prepare(example())
    held = {k: getattr(batch, k).clone().requires_grad_() for k in CONSTANTS}
    logp = policy_logp(batch).requires_grad_()
    fractions, _ = as_loss(row)[0](logp, batch._replace(**held))
    total = sum(f.num for f in fractions)
    if total.requires_grad:
        grads = torch.autograd.grad(total, list(held.values()), allow_unused=True)
        assert {k: g for k, g in zip(held, grads, strict=True) if g is not None and g.abs().max() > 0} == {}


@of("advantage")
def test_an_advantage_compiles_whole_with_equal_values(row):
    batch, piece = row.prepare(example()), row.make()
    signal, state = signal_of(row, batch), piece.init()

    def step(x):
        return fields_of(piece.update(signal._replace(x=x), state, batch)[0])

    torch._dynamo.reset()
    got, want = torch.compile(step, fullgraph=True, backend="eager")(signal.x), step(signal.x)
    assert set(got) == set(want)
    for name, value in want.items():
        assert_close(got[name], value)


@of("term", "loss")
def test_compiles_whole_with_equal_values_and_gradients(row):
    batch = row.prepare(example())
    loss = as_loss(row)[-1]

    def step(logp):
        fractions, metrics = loss(logp, batch)
        return sum(f.value for f in fractions), {k: m.value for k, m in metrics.items()}

    torch._dynamo.reset()
    results = []
    for fn in (step, torch.compile(step, fullgraph=True, backend="eager")):  # test_named.py traces gradients too
        leaf = policy_logp(batch).requires_grad_()
        value, metrics = fn(leaf)
        results.append([value.detach(), gradient_by(leaf, value), *metrics.values()])
    for a, b in zip(*results, strict=True):
        assert_close(b, a)


# ---- needs


@of("advantage", "term", "loss", "filter")
def test_a_piece_reads_no_field_that_it_does_not_name(row):
    batch = row.prepare(example())
    piece = row.make()
    optional = {"mask", "tokens", "weight", "token_reward", "segments", "positions", "length"}
    held = {k: v if k in piece.needs | optional else None for k, v in batch._asdict().items()}
    bare = type(batch)(**held)
    if row.kind == "advantage":
        signal = signal_of(row, batch)
        assert_close(piece.update(signal, piece.init(), bare)[0].x, run(row, batch)[0].x)
    elif row.kind == "filter":
        assert torch.equal(piece(bare), piece(batch))
    else:
        logp = policy_logp(batch)
        got, want = piece(logp, bare)[0], piece(logp, batch)[0]
        on = batch.mask if row.kind == "term" else slice(None)
        for a, b in zip(got if row.kind == "loss" else (got,), want if row.kind == "loss" else (want,), strict=True):
            assert_close(a[on] if row.kind == "term" else a.num, b[on] if row.kind == "term" else b.num)
