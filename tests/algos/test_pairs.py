"""How pairs are laid out, chosen and counted."""

import pieces
import pytest
import torch
from rows_preference import pairs_of_example, triples_of_example
from sequences import apart

from funrl import algos
from funrl.batch import select


def test_layout():
    """Pairs of rows side by side hold the same sequences as the rows, in the order of the pairs."""
    batch = pieces.example()
    chosen, rejected = torch.tensor([5, 0]), torch.tensor([2, 6])
    both = algos.side_by_side(batch, chosen, rejected)
    rows, _ = apart(batch.old_logp.tolist(), pieces.plain(batch))
    number = {row: k for k, row in enumerate(pieces.sequences(pieces.plain(batch)))}
    got, _ = apart(both.old_logp.tolist(), pieces.plain(both))
    for k, row in enumerate((5, 2, 0, 6)):
        want = rows[number[row]]
        for name in ("logp", "advantage", "ref_logp", "label", "entropy"):
            assert got[k][name] == want[name]
    assert both.segments.tolist()[0] == [1] * 8 + [0] * 5 + [2] * 12 + [0]
    assert both.positions.tolist()[1] == [*range(13), *range(13)]
    assert both.length.tolist() == [13 + 12, 13 + 8]
    assert both.score.tolist() == batch.score[chosen].tolist()
    assert algos.chosen(both).tolist()[0] == [True] * 8 + [False] * 18
    alternate = batch._replace(segments=None)
    assert algos.chosen(alternate).flatten().tolist() == [True, False] * 3 + [True]
    with pytest.raises(ValueError, match="7 rows"):
        algos.pair_sums(batch.old_logp, batch)


def test_triples():
    """Segments 1 and 2 of every four are compared, the third is imitated; a number of segments that is not there is no
    pair."""
    batch = triples_of_example(pieces.example())
    packed = batch._replace(segments=torch.where(batch.segments > 0, batch.segments + 4, 0))  # behind another triple
    for item in (batch, packed):
        assert algos.compared(item).sum(1).tolist() == [7 + 11, 3 + 8]
        assert algos.gold(item).sum(1).tolist() == [12, 8]
        assert not (algos.gold(item) & algos.compared(item)).any()
        loss, metrics = algos.tpo(0.3).losses["policy"](item.old_logp, item)
        assert metrics["preference/accuracy"].den == 2 and loss.isfinite()
    with pytest.raises(ValueError, match="the batch has no segments: triples lie side by side"):
        algos.gold(batch._replace(segments=None))


def test_places():
    """What stands for a pair reaches the tokens of its two sequences and no others; empty places are not counted."""
    both = pairs_of_example(pieces.example())
    present = algos.pairs_present(both)
    assert present.sum() == 3
    placed = algos.to_pair_tokens(torch.arange(float(present.numel())), both)
    per_row = present.numel() // 3
    for row in range(3):
        assert placed[row][both.mask[row]].unique().tolist() == [float(row * per_row)]
        assert (placed[row][~both.mask[row]] == 0).all()
    dpo = algos.preference(algos.sigmoid_pairs(0.1), algos.reference_log_ratio())
    logp = both.ref_logp + torch.where(algos.chosen(both), 0.1, -0.1)
    _, metrics = dpo(logp, both)
    assert metrics["preference/accuracy"] == (3, 3)
    _, same = dpo(both.ref_logp, both)
    assert same["preference/accuracy"] == (1.5, 3)  # ties
    moved = both.ref_logp + torch.where(algos.chosen(both), torch.tensor([[0.1], [0.0], [-0.1]]), 0.0)
    _, each = dpo(moved, both)
    assert each["preference/accuracy"] == (1.5, 3)  # one won, one tied, one lost
    lengths = both.mask.sum().item()
    assert metrics["preference/margin"].value.item() == pytest.approx(0.1 * 0.1 * lengths / 3)  # times beta


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_difference_within_rounding_is_a_tie(dtype):
    """Another mesh adds in another order: a policy that is its reference differs from it by last bits."""
    both = pairs_of_example(pieces.example(dtype))
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(both.ref_logp.shape, generator=draw, dtype=dtype) * torch.finfo(dtype).eps
    beats = torch.where(algos.chosen(both), 1e-3, 0.0).to(dtype)
    for recipe in (algos.dpo(), algos.dpo(length_alpha=0.3)):
        loss = recipe.losses["policy"]
        _, metrics = loss(both.ref_logp + noise, both)
        assert metrics["preference/accuracy"] == (1.5, 3) and metrics["preference/margin"].num != 0
        _, metrics = loss(both.ref_logp + beats, both)
        assert metrics["preference/accuracy"] == (3, 3)
    _, metrics = algos.aot()(both.ref_logp + noise, both)
    assert metrics["preference/accuracy"] == (1.5, 3)
    equal = torch.full_like(both.ref_logp, -2.0)
    for term in (algos.pairwise_reward(), algos.preference(algos.sigmoid_pairs(), algos.log_likelihood(True))):
        assert term(equal + noise, both)[1]["preference/accuracy"] == (1.5, 3)
    implicit = algos.implicit_reward_loss()
    labelled = both._replace(label=torch.ones_like(both.ref_logp))
    assert implicit.numerators(both.ref_logp + noise, labelled)[1]["implicit_reward/accuracy"].value == 0.5
    assert implicit.numerators(both.ref_logp + 0.1, labelled)[1]["implicit_reward/accuracy"].value == 1
    assert implicit.numerators(both.ref_logp - 0.1, labelled)[1]["implicit_reward/accuracy"].value == 0


def test_ranking():
    """The best and the worst of each group; ties take the first row, equal groups are left out."""
    score = torch.tensor([0.5, 1.0, 0.0, 2.0, 1.0, 0.0, 3.0, 3.0, 7.0])
    group = torch.tensor([4, 9, 4, 4, 9, 9, 2, 2, 1])
    chosen, rejected = algos.best_and_worst(score, group)
    assert chosen.tolist() == [3, 1]
    assert rejected.tolist() == [2, 5]
    batch = pieces.example()
    both = algos.online_pairs(batch)
    high, low = (f([0, 2, 4], key=batch.score.__getitem__) for f in (max, min))  # one of the two groups of several
    assert both.score.tolist()[1] == batch.score[high].item()
    assert both.mask[1].tolist() == batch.mask[high].tolist() + batch.mask[low].tolist()


def test_reference_point():
    """The mean over mismatched rows of the summed log-ratio, cut at 0; the others are trained on."""
    batch = pieces.example()
    want = sum(
        batch.old_logp[i][t].item() - batch.ref_logp[i][t].item() for i in (2, 5) for t in range(13) if batch.mask[i, t]
    )
    tokens = int(batch.mask[batch.mismatched].sum())
    for shift in (1, -1):
        moved = batch._replace(ref_logp=torch.where(batch.mask, batch.ref_logp - shift, torch.nan))
        chain = algos.reference_point()
        made, _, metrics = algos.apply_advantage(chain, chain.init(), moved, choose=lambda batch, rows: (batch, rows))
        (made, rows), z = made, max(0.0, (want + shift * tokens) / 2)
        assert rows.tolist() == [0, 1, 3, 4, 6] and made.kl_baseline.shape == batch.mask.shape
        assert made.kl_baseline[0, 0].item() == pytest.approx(z) == metrics["preference/kl_baseline"].value.item()
    assert z == 0


def test_last_tokens():
    both = pairs_of_example(pieces.example())
    last = algos.last_tokens(both.mask, both.segments)
    _, places = apart(both.old_logp.tolist(), pieces.plain(both))
    assert sorted((i, t) for i, t in last.nonzero().tolist()) == sorted(at[-1] for at in places)


def test_tokens_beyond_the_shorter_completion_of_a_pair():
    batch = pieces.example()
    both = algos.side_by_side(batch, torch.tensor([0]), torch.tensor([2]))  # 4 and 11 sampled tokens
    beyond = algos.beyond_shorter(both)
    assert beyond.sum() == 7 and beyond[0, 13:][batch.mask[2]].tolist() == [False] * 4 + [True] * 7
    interleaved = select(batch, torch.tensor([2, 0]))
    assert algos.beyond_shorter(interleaved)[0].sum() == 7 and not algos.beyond_shorter(interleaved)[1].any()


def test_dpo_begins_at_log_2():
    both = pairs_of_example(pieces.example())
    for recipe in (algos.dpo(), algos.dpo(divergence="js"), algos.dpo(length_alpha=0.3), algos.dpo(smoothing=0.1)):
        value, metrics = recipe.losses["policy"](both.ref_logp, both)
        assert value.item() == pytest.approx(0.6931471805599453, abs=1e-12)
        assert metrics["preference/margin"].value == 0 and metrics["preference/accuracy"].value == 0.5
    rpo, metrics = algos.dpo(likelihood_coef=1.0).losses["policy"](both.ref_logp, both)
    assert rpo.item() == pytest.approx(0.6931471805599453 + metrics["actor/nll"].value.item(), abs=1e-12)


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "js", "alpha"])
def test_f_dpo_is_the_likelihood_of_the_preferences_at_the_best_policy(kind):
    """Over a vocabulary of 5, the policy that is best under reward less beta D_f has f'(u) = (r - lambda) / beta.

    Then beta (f'(u_c) - f'(u_r)) = r_c - r_r: the loss of a pair is -log s(r_c - r_r), Bradley and Terry's.
    """
    beta, alpha = 0.7, 0.4
    reference = torch.tensor([0.3, 0.1, 0.25, 0.2, 0.15], dtype=torch.float64)
    reward = torch.tensor([0.9, -0.3, 0.2, 0.5, 0.0], dtype=torch.float64)
    inverse = {  # of f', the ratio u
        "reverse_kl": lambda s: (s - 1).exp(),
        "forward_kl": lambda s: -1 / s,
        "js": lambda s: s.exp() / (2 - s.exp()),
        "alpha": lambda s: (1 - alpha * s) ** (-1 / alpha),
    }[kind]
    top = {"reverse_kl": 50.0, "forward_kl": 0.0, "js": 0.6931471805599453, "alpha": 1 / alpha}[kind]  # f' is below it
    low, high = (reward.max() - beta * top + 1e-9).item(), 100.0
    for _ in range(200):
        middle = (low + high) / 2
        mass = (reference * inverse((reward - middle) / beta)).sum()
        low, high = (middle, high) if mass > 1 else (low, middle)
    best = reference * inverse((reward - low) / beta)
    assert best.sum().item() == pytest.approx(1, abs=1e-9)
    for chosen, rejected in ((0, 1), (3, 2), (4, 0)):
        pair = [chosen, rejected]
        batch = pieces.Batch(
            tokens=torch.tensor(pair)[:, None],
            mask=torch.ones(2, 1, dtype=torch.bool),
            ref_logp=reference[pair, None].log(),
        )
        loss, _ = algos.dpo(beta=beta, divergence=kind, divergence_alpha=alpha).losses["policy"](
            best[pair, None].log(), batch
        )
        want = -torch.nn.functional.logsigmoid(reward[chosen] - reward[rejected])
        assert loss.item() == pytest.approx(want.item(), abs=1e-9)
