"""Common beginnings of rows are computed once: bits of the forward pass, and gradients."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from funrl import trees
from funrl.batch import Batch
from funrl.models import decoder_config, decoder_model, place, with_value_head
from funrl.models.decoder.decoder import decoder_layer
from funrl.models.decoder.routing import Experts
from funrl.models.equivalent_layer import EquivalentLayer
from funrl.models.shared_prefixes import first_equals, shared_prefixes
from funrl.models.vision.config import TowerConfig
from funrl.models.vision.model import with_vision

CONFIG = decoder_config(vocab=50, embed=64, layers=2, heads=4, kv_heads=2, head=16, mlp=128, windows=(4, None))
WANT = ("logp", "entropy")


def packed_rows(padding=5, prompts=2, rows=7):
    """Rows of some prompts, of different lengths, end to end with padding after them."""
    generator = torch.Generator().manual_seed(0)
    beginnings = [torch.randint(3, 50, (9,), generator=generator) for _ in range(prompts)]
    ends = [torch.randint(3, 50, (i,), generator=generator) for i in range(rows)]
    lines = [torch.cat([beginnings[i % prompts], end]) for i, end in enumerate(ends)]
    lengths = torch.tensor([len(line) for line in lines])
    zeros = torch.zeros(padding, dtype=torch.int64)
    segments = torch.cat([torch.repeat_interleave(torch.arange(1, rows + 1), lengths), zeros])
    positions = torch.cat([*(torch.arange(len(line)) for line in lines), zeros])
    return Batch(
        tokens=torch.cat([*lines, zeros]).unsqueeze(0),
        mask=(positions >= 9).unsqueeze(0),
        positions=positions.unsqueeze(0),
        segments=segments.unsqueeze(0),
        offsets=torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
    )


def scores_and_gradients(placed, params, batch):
    """Scores of the rows, or values, and the gradient of their weighted sum."""
    leaves = trees.map(lambda x: x.clone().requires_grad_(), params)
    if placed.model.unembed is None:
        scores = [placed.values(leaves, batch)]
    else:
        scores = [placed.token_scores(leaves, batch, WANT).read(name) for name in WANT]
    weights_BT = torch.linspace(-1, 1, batch.tokens.shape[1]).to(scores[0].dtype) * batch.mask
    total = sum((score_BT * weights_BT).sum() for score_BT in scores)
    return [x.detach() for x in scores], torch.autograd.grad(total, trees.leaves(leaves), allow_unused=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("wrap", [lambda model: model, with_value_head], ids=["policy", "critic"])
def test_rows_with_equal_beginnings_have_the_bits_of_rows_one_by_one(dtype, wrap):
    model = wrap(decoder_model(CONFIG))
    generator = torch.Generator().manual_seed(2)
    params = trees.map(
        lambda x: x + 0.1 * torch.randn(x.shape, generator=generator).to(dtype), model.init(generator, dtype)
    )
    batch = packed_rows()
    scores, grads = scores_and_gradients(place(model, dtype=dtype), params, batch)
    whole_scores, whole_grads = scores_and_gradients(place(model, dtype=dtype, shares_prefixes=False), params, batch)
    assert all(torch.equal(some, whole) for some, whole in zip(scores, whole_scores, strict=True))
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 0.05}[dtype]
    for grad, whole in zip(grads, whole_grads, strict=True):
        assert (grad is None) == (whole is None)
        if whole is not None and whole.any():
            assert (grad.double() - whole.double()).norm() < tolerance * whole.double().norm()


@pytest.mark.parametrize(("shares", "tokens"), [(True, 2 * 9 + 21 + 1), (False, 7 * 9 + 21 + 5)])
def test_layers_see_each_beginning_and_padding_once(shares, tokens):
    sizes = []

    def counting(config, mesh, weights, x_BTD, context):
        sizes.append(x_BTD.shape[1])
        return decoder_layer(config, mesh, weights, x_BTD, context)

    model = decoder_model(CONFIG)
    placed = place(model, layer=EquivalentLayer(model.layer, counting), shares_prefixes=shares)
    placed.token_scores(model.init(torch.Generator().manual_seed(2)), packed_rows())
    assert sizes == [tokens] * 2


def test_a_layer_of_another_kind_sees_whole_rows():
    """It may depend on more than the tokens before: here on the position in the row."""

    def counting_places(config, mesh, weights, x_BTD, context):
        out_BTD = decoder_layer(config, mesh, weights, x_BTD, context)
        return out_BTD + torch.arange(x_BTD.shape[1])[:, None] / 100

    model = decoder_model(CONFIG)
    params = model.init(torch.Generator().manual_seed(2))
    scores = [
        place(model, layer=counting_places, shares_prefixes=shares).token_scores(params, packed_rows()).logp
        for shares in (True, False)
    ]
    assert torch.equal(*scores)


def test_models_whose_layers_count_tokens_or_that_see_pictures_share_nothing():
    assert decoder_model(CONFIG).abilities.shares_prefixes
    tower = TowerConfig(layers=1, embed=8, heads=1, inner=8, patch=4, window=16, placeholder=1)
    assert not with_vision(decoder_model(CONFIG), tower).abilities.shares_prefixes
    experts = Experts(count=4, per_token=2, mlp=32)
    assert not decoder_model(replace(CONFIG, mlp=replace(CONFIG.mlp, experts=experts))).abilities.shares_prefixes


def test_rows_with_other_positions_or_few_equal_tokens_are_left_alone():
    batch = packed_rows()
    assert shared_prefixes(batch.tokens, batch.positions, batch.offsets) is not None
    places = torch.arange(batch.tokens.shape[1]).unsqueeze(0)
    assert shared_prefixes(batch.tokens, places, batch.offsets) is None
    apart = packed_rows(padding=0, prompts=7)
    assert shared_prefixes(apart.tokens, apart.positions, apart.offsets) is None


def test_first_equals_is_that_of_all_pairs():
    random = np.random.default_rng(0)
    for _ in range(50):
        offsets = np.concatenate([[0], random.integers(0, 6, 8).cumsum()])
        tokens = random.integers(0, 3, offsets[-1] + 2)
        spans = list(itertools.pairwise(offsets))
        beginnings = [tuple(tokens[begin : i + 1]) for begin, end in spans for i in range(begin, end)]
        first = first_equals(tokens, offsets)
        for i, some in enumerate(beginnings):
            for j, other in enumerate(beginnings):
                assert (first[i] == first[j]) == (some == other)
        assert (first[offsets[-1] :] == offsets[-1]).all()
