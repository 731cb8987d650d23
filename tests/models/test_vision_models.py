"""Vision-language models against transformers, and what they read and write."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_vl import (
    FAMILIES,
    MERGE,
    PLACEHOLDER,
    picture_batch,
    rows_of,
    saved_model,
    transformers_logits,
)

from funrl import trees
from funrl.models import place
from funrl.models.errors import ModelError
from funrl.models.huggingface.directories import load, save
from funrl.models.placed import inputs_of
from funrl.models.vision.config import TowerConfig
from funrl.models.vision.grids import token_places, tower_indices
from funrl.models.vision.inputs import picture_inputs
from funrl.trainer.steps.micro import micro_batch


@pytest.fixture(scope="module", params=FAMILIES)
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    return saved_model(folder, request.param), folder


@pytest.fixture
def rows(peer):
    return rows_of(peer[0].config.model_type)


def _hidden(model, params, batch):
    inputs = picture_inputs(model.config.tower, batch, inputs_of(batch))
    return model.apply(params, inputs).hidden


def test_logits_are_those_of_transformers(peer, rows):
    theirs, folder = peer
    model, params = load(folder)
    batch, lengths = picture_batch(model.config.tower, rows)
    logits = _hidden(model, params, batch) @ model.unembed(params).T
    for row, length in enumerate(lengths):
        expected = transformers_logits(theirs, model.config.tower, batch, row, length)
        assert (logits[row, :length] - expected).abs().max() < 2e-5


def test_packed_rows_have_the_logits_of_each_alone(peer, rows):
    theirs, folder = peer
    model, params = load(folder)
    batch, lengths = picture_batch(model.config.tower, rows)
    packed = micro_batch(batch._replace(segments=None), np.array(lengths), np.arange(len(rows)), 256, 8)
    logits = (_hidden(model, params, packed.batch) @ model.unembed(params).T)[0]
    begin = 0
    for row in packed.rows.tolist():
        expected = transformers_logits(theirs, model.config.tower, batch, row, lengths[row])
        assert (logits[begin : begin + lengths[row]] - expected).abs().max() < 2e-5
        begin += lengths[row]


def test_a_saved_directory_opens_in_transformers(peer, tmp_path: Path):
    from transformers import AutoModelForImageTextToText

    theirs, folder = peer
    model, params = load(folder)
    save(tmp_path, model, params)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    for (name, x), (_, y) in zip(sorted(theirs.named_parameters()), sorted(again.named_parameters()), strict=True):
        assert torch.equal(x, y), name
    sizes, expected = (item.config.vision_config.to_dict() | {"dtype": None} for item in (again, theirs))
    assert sizes == expected
    second, read = load(tmp_path)
    assert second.config == model.config
    assert all(torch.equal(x, y) for x, y in zip(trees.leaves(params), trees.leaves(read), strict=True))


def test_rows_without_pictures_are_those_of_the_text_model(peer):
    _, folder = peer
    model, params = load(folder)
    placed = place(model, dtype=torch.float64)
    wide = trees.map(lambda x: x.double(), params)
    batch, _ = picture_batch(model.config.tower, ((5,), (9,)))
    with_fields = placed.token_scores(wide, batch).logp
    plain = placed.token_scores(wide, batch._replace(patches=None, grids=None)).logp
    assert torch.equal(with_fields, plain)


def test_placeholders_are_as_many_as_the_pictures_have(peer, rows):
    _, folder = peer
    model, params = load(folder)
    batch, _ = picture_batch(model.config.tower, rows)
    tokens = batch.tokens.clone()
    tokens[1, 2] = PLACEHOLDER
    with pytest.raises(ModelError, match="placeholders of pictures have pictures of"):
        _hidden(model, params, batch._replace(tokens=tokens))


def test_windows_are_squares_and_patches_return_to_their_places():
    tower = TowerConfig(layers=1, embed=8, heads=1, inner=8, patch=4, window=16, placeholder=1)
    grids = ((10, 6), (2, 2))
    indices = tower_indices(grids, tower)
    assert sorted(indices.order_P) == list(range(64))
    assert indices.windows.tolist() == [16, 8, 16, 8, 8, 4, 4]
    places = indices.places_P2[:16]
    assert (places.min(0).tolist(), places.max(0).tolist()) == ([0, 0], [3, 3])
    back = indices.order_P.reshape(-1, MERGE**2)[indices.back_M]
    assert np.array_equal(back.ravel(), np.arange(64))


def test_a_picture_shrinks_the_positions_behind_it():
    tower = TowerConfig(layers=1, embed=8, heads=1, inner=8, patch=4, window=16, placeholder=1)
    places = token_places([(4, 6)], tower)
    assert places.places_M2.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert places.shrink_M.tolist() == [0, 0, 0, 0, 0, 6 - 3]
