"""Pieces that pick tokens or rows, drawn at random or by a state: how many, which, and the same in a repeated run."""

import pieces
import pytest
import torch
from rows_choices import eligible

from funrl import algos
from funrl.batch import select


def test_random_selection():
    """As many as asked for, all of them eligible, others at the next batch, the same in a repeated run."""
    batch = pieces.example()
    signal = algos.Signal(pieces.token_signal(batch), batch.mask)
    b, piece = pieces.plain(batch), algos.select_covariance_between(0.2, 0.0, 100.0)
    may = torch.tensor(eligible(0.0, 100.0)(signal.x.tolist(), b)["selected"]).bool()
    draws, state = [], piece.init()
    for _ in range(8):
        out, state = piece.update(signal, state, batch)
        draws.append(out.extra["selected"])
        assert draws[-1].sum() == int(0.2 * batch.mask.sum())
        assert (draws[-1] & ~may).sum() == 0
    assert any(not torch.equal(draws[0], other) for other in draws[1:])
    assert torch.equal(piece.update(signal, piece.init(), batch)[0].extra["selected"], draws[0])
    share = piece.update(signal, piece.init(), batch)[0].metrics["actor/selected"]
    assert share == (draws[0].sum(), batch.mask.sum())


def test_noise():
    """Uniform, different by draw, and not moved by more columns."""
    x = algos.noise(torch.arange(50), 200, torch.tensor(3))
    assert abs(x.mean().item() - 0.5) < 0.01 and abs(x.var().item() - 1 / 12) < 0.003
    assert x.min() >= 0 and x.max() < 1 and x.unique().numel() > 9_990
    correlation = torch.corrcoef(torch.stack((x.flatten()[:-1], x.flatten()[1:])))[0, 1]
    assert abs(correlation.item()) < 0.04
    assert torch.equal(algos.noise(torch.arange(50), 300, torch.tensor(3))[:, :200], x)
    assert not torch.equal(algos.noise(torch.arange(50), 200, torch.tensor(4)), x)


def test_entropy_controller():
    """The coefficient rises while the entropy is short of the target, is off above it, and stays in its bounds."""
    batch = pieces.example()
    mean = batch.old_entropy[batch.mask].mean().item()
    below = algos.adapt_entropy(mean + 1, step=0.01, start=0.005, high=0.02)
    above = algos.adapt_entropy(mean - 1, step=0.01, start=0.015)
    for piece, states, applied in (
        (below, (0.015, 0.02, 0.02), (0.005, 0.015, 0.02)),
        (above, (0.005, 0.0), (0.0, 0.0)),
    ):
        state = piece.init()
        for after, now in zip(states, applied, strict=False):
            signal, state = piece.update(algos.Signal(batch.score, batch.mask), state, batch)
            assert state.item() == pytest.approx(after, abs=1e-12)
            assert signal.extra["entropy_coefficient"][batch.mask].unique().item() == pytest.approx(now, abs=1e-12)
            assert signal.metrics["actor/entropy_coefficient"].value.item() == pytest.approx(now, abs=1e-12)


@pytest.mark.slow
def test_resampling():
    """Frequencies against the weights; the same draw from the same state, another from the next."""
    batch = pieces.example()._replace(score=torch.tensor([0.0, 1.0, -2.0, 1.0, 0.5, -0.5, 2.0], dtype=torch.float64))
    expected = {
        "pow": [0.0, 1.0, 4.0, 1.0, 0.25, 0.25, 4.0],
        "max_min": [0, 0, 1, 0, 0, 0, 1],
        "max_random": [0.1] * 6 + [0.4],
    }
    for kind, weights in expected.items():
        piece = algos.resample_rows(kind, power=2.0, seed=3)
        state, counts, drawn = piece.init(), [0] * 7, []
        for _ in range(600):
            signal, after = piece.update(algos.Signal(batch.score, batch.mask), state, batch)
            again, _ = piece.update(algos.Signal(batch.score, batch.mask), state, batch)
            assert torch.equal(signal.rows, again.rows)
            assert signal.rows.shape == (7,)
            drawn.append(tuple(signal.rows.tolist()))
            for i in signal.rows.tolist():
                counts[i] += 1
            state = after
        assert len(set(drawn)) > 5
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count / 4200 - weight / sum(weights)) < 0.03, kind
            assert weight > 0 or count == 0


def test_the_weights_of_resampling_can_be_seen():
    score = torch.tensor([0.0, 1.0, -2.0, 1.0], dtype=torch.float64)
    weight = algos.resampling_weights(score)
    torch.testing.assert_close(weight, torch.tensor([0, 1, 4, 1], dtype=torch.float64) / 6, rtol=0, atol=1e-8)
    batch = select(pieces.example(), slice(0, 4))._replace(score=score)
    piece = algos.resample_rows()
    signal, _ = piece.update(algos.first_signal(batch), piece.init(), batch)
    assert signal.metrics["resampling/largest"].value.item() == pytest.approx(4 / 6, abs=1e-7)
    assert signal.metrics["resampling/effective"].value.item() == pytest.approx(1 / (18 / 36) / 4, abs=1e-7)
    assert signal.metrics["resampling/rows"].value.item() == len(set(signal.rows.tolist())) / 4
    with pytest.raises(ValueError, match="'power' is not a way to weigh rows: use pow, max_min or max_random"):
        algos.resample_rows("power")


def test_the_same_tokens_are_on_top_as_by_sorting():
    draw = torch.Generator().manual_seed(3)
    batch = pieces.example()
    x = torch.randint(0, 4, batch.mask.shape, generator=draw).double()  # many ties
    for count in (1, 5, 11, 24, 99):
        flat = [(-x[i, t].item(), i, t) for i, t in batch.mask.nonzero().tolist()]
        want = {(i, t) for _, i, t in sorted(flat)[:count]}
        got = algos.top_tokens(x, batch.mask, torch.tensor(count), batch)
        assert {(i, t) for i, t in got.nonzero().tolist()} == want
