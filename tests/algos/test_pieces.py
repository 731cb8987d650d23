"""Every public piece of funrl.algos through the same properties. A new piece needs a row in one of the rows_*.py.

Terms and preference losses go through further properties in test_terms.py; test_completeness.py sees to it that no
piece is left out.
"""

import functools
import math

import pieces
import pytest
import torch
from pieces import example, fractions, on_term, packed, plain, poisoned, policy_logp, reduced, token_signal, widened
from tables import ROWS

from funrl import algos
from funrl.algos import Max, Mean, Signal, Sum, reads, reduce
from funrl.batch import Batch, MissingField, as_dict, fields_by, select

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
    return [reduce(row.make(), form) for form in (algos.token_mean(), algos.sequence_mean())]


def gradient_by(leaf, total):
    """The gradient of the total, zeros where it does not depend on the leaf (an entropy bonus by log-probabilities)."""
    if not total.requires_grad:
        return torch.zeros_like(leaf)
    (gradient,) = torch.autograd.grad(total, leaf, allow_unused=True)
    return torch.zeros_like(leaf) if gradient is None else gradient


def flat(out):
    """The numbers of a loss's parts and metrics."""
    parts, metrics = out
    return [*(x for part in parts for x in part), *(x for name in sorted(metrics) for x in metrics[name])]


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
    loss, metrics = on_term(row.make(), logp, batch)
    want = torch.tensor(row.reference(logp.tolist(), plain(batch)), dtype=torch.float64)
    assert_close(loss[batch.mask], want[batch.mask])
    for value in metrics.values():
        if isinstance(value, (Mean, Max, Sum)):  # over something else than tokens
            assert math.isfinite(value.value.item())
            continue
        assert value.shape == batch.mask.shape
        assert torch.isfinite(value[batch.mask].double()).all()


@of("loss")
def test_loss_equals_its_reference(row):
    batch = row.prepare(example())
    logp = policy_logp(batch)
    parts, metrics = fractions(row.make(), logp, batch)
    want = row.reference(logp.tolist(), plain(batch))
    assert len(parts) == len(want)
    for got, (num, den) in zip(parts, want, strict=True):
        assert_close(got.num, torch.tensor(num, dtype=torch.float64))
        assert_close(got.den, torch.tensor(den, dtype=torch.float64))
    assert all(isinstance(m, (Mean, Max, Sum)) for m in metrics.values())
    assert_close(row.make()(logp, batch)[0], sum(part.value for part in parts))


@of("reduction")
def test_reduction_equals_its_reference(row):
    batch = example()
    loss = token_signal(batch)
    got = reduced(row.make(), loss, batch.mask)
    num, den = row.reference(loss.tolist(), plain(batch))
    assert_close(got.num, torch.tensor(num, dtype=torch.float64))
    assert_close(got.den, torch.tensor(den, dtype=torch.float64))


@of("filter")
def test_filter_equals_its_reference(row):
    batch = row.prepare(example())
    assert row.make()(batch).tolist() == row.reference(plain(batch))


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
    if row.kind == "loss":
        ours = sum(f.num for f in fractions(row.make(), leaf, batch)[0])
    else:
        ours = on_term(row.make(), leaf, batch)[0][batch.mask].sum()
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
            parts, _ = fractions(loss, policy_logp(batch), batch)
            assert all(f.num.dtype == dtype and f.den.dtype == torch.float64 for f in parts)
            assert all(f.value.dtype == dtype for f in parts)
            pairs.append([f.value.double() for f in parts])
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
            parts, metrics = fractions(loss, logp, given)
            gradient = gradient_by(logp, sum(f.num for f in parts))
            results.append([*(f.num for f in parts), *(m.value for m in metrics.values()), gradient])
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
        whole = fractions(loss, logp, batch)
        others = [(widened(batch, 3), torch.nn.functional.pad(logp, (0, 3)))]
        if row.packed:
            others.append(packed(batch, logp))
        for batch_, logp_ in others:
            for a, b in zip(flat(whole), flat(fractions(loss, logp_, batch_)), strict=True):
                assert_close(b, a)


@of("reduction")
def test_padding_and_packing_do_not_matter_to_reductions(row):
    batch = example()
    loss = token_signal(batch)
    whole = reduced(row.make(), loss, batch.mask)
    short, short_loss = packed(batch, loss)
    for other in (
        reduced(row.make(), torch.nn.functional.pad(loss, (0, 3)), torch.nn.functional.pad(batch.mask, (0, 3))),
        reduced(row.make(), short_loss, short.mask, short.segments),
        reduced(row.make(), torch.where(batch.mask, loss, torch.nan), batch.mask),
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
        losses = [lambda x, b: ((reduced(row.make(), x, b.mask),), {})]
    else:
        losses = [functools.partial(fractions, loss) for loss in as_loss(row)]
    for loss in losses:
        leaf = logp.clone().requires_grad_()
        out = loss(leaf, batch)
        gradient = gradient_by(leaf, sum(f.num for f in out[0]))
        for parts in splits:
            leaf = logp.clone().requires_grad_()
            outs = [loss(leaf[part], select(batch, part)) for part in parts]
            merged = outs[0]
            for more in outs[1:]:
                sums = tuple(a + b for a, b in zip(merged[0], more[0], strict=True))
                merged = (sums, {k: algos.merge(merged[1][k], more[1][k]) for k in merged[1]})
            for got, want in zip(flat(merged), flat(out), strict=True):
                assert_close(got, want)
            total = sum(f.num for parts, _ in outs for f in parts)
            assert_close(gradient_by(leaf, total), gradient)


@of("term", "loss")
def test_denominators_need_nothing_of_the_step(row):
    batch = row.prepare(example())
    for loss in as_loss(row):
        held = batch._replace(**dict.fromkeys(fields_by("step")))
        assert loss.denominators(held) == loss.denominators(batch)


@of("term", "loss")
def test_no_gradient_reaches_what_the_batch_holds_constant(row):
    batch = row.prepare(example())
    held = {k: getattr(batch, k).clone().requires_grad_() for k in CONSTANTS}
    logp = policy_logp(batch).requires_grad_()
    parts, _ = fractions(as_loss(row)[0], logp, batch._replace(**held))
    total = sum(f.num for f in parts)
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
        value, metrics = loss(logp, batch)
        return value, {k: m.value for k, m in metrics.items()}

    torch._dynamo.reset()
    results = []
    for fn in (step, torch.compile(step, fullgraph=True, backend="eager")):  # test_named.py traces gradients too
        leaf = policy_logp(batch).requires_grad_()
        value, metrics = fn(leaf)
        results.append([value.detach(), gradient_by(leaf, value), *metrics.values()])
    for a, b in zip(*results, strict=True):
        assert_close(b, a)


# ---- reads


def used(row, piece, batch, logp):
    """What a piece gives on a batch, in a form that can be compared."""
    if row.kind == "advantage":
        signal = signal_of(row, batch)
        return fields_of(piece.update(signal, piece.init(), batch)[0])
    if row.kind == "filter":
        return {"kept": piece(batch)}
    if row.kind == "loss":
        return {str(k): x for k, x in enumerate(flat(fractions(piece, logp, batch)))}
    return {"loss": torch.where(batch.mask, on_term(piece, logp, batch)[0], 0.0)}


@of("advantage", "term", "loss", "filter")
def test_what_a_piece_reads_is_found_by_running_it(row):
    """The fields that are found are enough, and none of the required ones can be missing."""
    batch, piece = row.prepare(example()), row.make()
    logp, found = policy_logp(batch), reads(piece)
    carried = {"mask", "score"} | ({"weight"} if "weighted" in row.name else set())
    bare = Batch(**{k: v for k, v in as_dict(batch).items() if k in found.required | found.optional | carried})
    want, got = used(row, piece, batch, logp), used(row, piece, bare, logp)
    assert set(got) == set(want)
    for name, value in want.items():
        assert_close(got[name], value)
    for field in found.required - {"mask", "score"}:
        with pytest.raises(MissingField, match=rf"batch.{field} is missing; it is written by"):
            used(row, piece, batch._replace(**{field: None}), logp)
