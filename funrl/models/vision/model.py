"""A decoder that sees: a vision tower gives the hidden states of the tokens that stand for pictures."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import SINGLE, Mesh
from funrl.models.decoder.config import Config
from funrl.models.decoder.decoder import decoder_model
from funrl.models.errors import ModelError
from funrl.models.model import Apply, Inputs, Layer, Model, Output, OwnedValues, PromptPlaces
from funrl.models.vision.config import CHANNELS, TowerConfig, VisionLanguageConfig, with_tower
from funrl.models.vision.grids import picture_tokens, token_places
from funrl.models.vision.inputs import (
    GRIDS,
    PATCHES,
    Pictures,
    check_placeholders,
    grids_of,
    picture_inputs,
    single_pictures,
    token_contents,
    whole_pictures,
    with_pictures,
)
from funrl.models.vision.tower import apply_tower, init_tower, tower_axes, tower_shapes

VISION = "vision"  # part of the tree of weights


def with_vision(model: Model, tower: TowerConfig) -> Model:
    """`model` with a vision tower, whose weights are the part "vision" beside its own.

    Where a batch has pictures, each placeholder is one hidden state of the tower, and tokens have three
    positions each; elsewhere the model computes what `model` does.

    Raises:
      ModelError: it is no decoder, or it has a tower, adapters or a value head already.
    """
    if not isinstance(model.config, Config) or model.value is not None or model.adapters is not None:
        raise ModelError("a tower is given to a plain decoder: before adapters and a value head")
    if VISION in model.shapes:
        raise ModelError("the model has a vision tower already")
    D = model.config.embed
    return Model(
        config=with_tower(model.config, tower),
        shapes={**model.shapes, VISION: tower_shapes(tower, D)},
        axes={**model.axes, VISION: tower_axes(tower, D)},
        init=functools.partial(_init, model, tower),
        apply=_seeing(model, tower),
        unembed=model.unembed,
        value=None,
        layer=model.layer,
        init_cache=model.init_cache,
        rebuild=vision_language_model,
        abilities=model.abilities._replace(
            compiled_step="it sees pictures",
            exact_sums="it sees pictures",
            aligned="it sees pictures",
            unsampled=tower.unsampled,
            splits_rows=model.abilities.splits_rows and not tower.layout.mutual,
            shares_prefixes=False,  # equal placeholders stand for the pictures of their own rows
        ),
        owned=OwnedValues(
            none={
                PATCHES: torch.zeros(0, CHANNELS, tower.patch, tower.patch, dtype=torch.uint8),
                GRIDS: torch.zeros(0, 2, dtype=torch.int64),
            },
            read=functools.partial(picture_inputs, tower),
            apart=functools.partial(single_pictures, tower),
            encode=functools.partial(_encode, tower),
            place=functools.partial(_place, tower),
            check=functools.partial(check_placeholders, tower),
            contents=functools.partial(token_contents, tower),
            frozen={VISION: (f"{VISION}/embed", f"{VISION}/layers")},
            whole=functools.partial(whole_pictures, tower) if tower.layout.mutual else None,
        ),
    )


def vision_language_model(config: VisionLanguageConfig) -> Model:
    """The decoder of a config, with its tower."""
    return with_vision(decoder_model(config), config.tower)


def model_of_config(config: Config) -> Model:
    """The decoder of a config, with its tower if it has one."""
    return vision_language_model(config) if isinstance(config, VisionLanguageConfig) else decoder_model(config)


def _init(
    model: Model, tower: TowerConfig, generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> trees.Tree:
    return {**model.init(generator, dtype), VISION: init_tower(tower, model.config.embed, generator, dtype)}


def _encode(tower: TowerConfig, params: trees.Tree, values: Mapping[str, Tensor]) -> Tensor:
    """Hidden states of the tokens of one picture, whatever is computed beside it."""
    patches_PCHW = values[PATCHES].to(trees.leaves(params)[0].device)
    return apply_tower(tower, params[VISION], Pictures(patches_PCHW, grids_of(values[GRIDS])))


def _place(tower: TowerConfig, tokens_T: Tensor, values: Mapping[str, Tensor]) -> PromptPlaces:
    """Places of the tokens of a prompt with pictures."""
    grids = grids_of(values[GRIDS])
    inputs = with_pictures(tower, Inputs(tokens_T.cpu().unsqueeze(0)), Pictures(values[PATCHES], grids))
    assert inputs.inserted_at is not None and inputs.axial_positions is not None
    return PromptPlaces(
        inserted_at_T=inputs.inserted_at[0],
        positions_T3=inputs.axial_positions[0],
        shrink=int(token_places(grids, tower).shrink_M.sum()),
        counts=tuple(picture_tokens(grid, tower) for grid in grids),
        mutual_RM=inputs.mutual_RM,
    )


def _seeing(model: Model, tower: TowerConfig) -> Apply:
    """`Model.apply` of a model with hidden states of pictures in place of some embeddings."""

    def apply(
        params: trees.Tree, inputs: Inputs, mesh: Mesh = SINGLE, cache: trees.Tree = None, layer: Layer | None = None
    ) -> Output:
        pictures: Pictures | None = inputs.pictures
        if pictures is not None:
            inputs = inputs._replace(inserted=apply_tower(tower, params[VISION], pictures, inputs.adapt))
        return model.apply(params, inputs, mesh, cache, layer)

    return apply
