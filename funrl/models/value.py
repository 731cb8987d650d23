"""A critic: a decoder without unembedding, and one row that reads a value from its hidden states."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import Mesh
from funrl.models import decoder
from funrl.models.config import Config
from funrl.models.scores import follows


def shapes(config: Config) -> trees.Tree:
    """The whole tree of weights as tensors without memory."""
    return _with_head(decoder.shapes(config), torch.empty(1, config.embed, device="meta"))


def axes(config: Config) -> trees.Tree:
    """The logical axes of every weight."""
    return _with_head(decoder.axes(config), ("value", "norm"))  # one row: whole on every rank, as norms are


def init(config: Config, decoder_params: trees.Tree) -> trees.Tree:
    """A critic of a decoder's own tensors, which values everything at 0. Works on shards as on whole trees."""
    return _with_head(decoder_params, decoder_params["norm"].new_zeros(1, config.embed))


def apply(
    config: Config,
    params: trees.Tree,
    tokens_BT: Tensor,
    positions: Tensor | None = None,
    segments: Tensor | None = None,
    mesh: Mesh = decoder.SINGLE,
    layer: Callable | None = None,
) -> Tensor:
    """The value of the state before each token, in float32 or wider.

    Args: as in `decoder.apply`.

    Returns: value [B, T]; position t is read from the hidden state of token t - 1, and 0 at the first token of a
      sequence, which nothing comes before, and at padding.
    """
    hidden_BTD, _ = decoder.apply(config, params["decoder"], tokens_BT, positions, segments, mesh=mesh, layer=layer)
    wide = torch.promote_types(hidden_BTD.dtype, torch.float32)
    value_BT = F.linear(hidden_BTD[:, :-1].to(wide), params["value"].to(wide)).squeeze(-1)
    return torch.where(follows(tokens_BT, segments), F.pad(value_BT, (1, 0)), 0)


def _with_head(tree: dict, head) -> trees.Tree:
    return {"decoder": {name: part for name, part in tree.items() if name != "unembed"}, "value": head}
