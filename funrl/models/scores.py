"""What a policy says of the tokens of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.linear_logprob import TokenScores, likeliest, linear_logprob
from funrl.mesh.mesh import Mesh
from funrl.models import decoder
from funrl.models.config import Config


class Rows(NamedTuple):
    """Rows of tokens as a forward pass takes them.

    Attributes:
      tokens: [B, T] int64.
      positions, segments: as in `decoder.apply`.
      wanted: [B, T] bool, tokens whose scores matter; the others get 0 and cost no logits. None: all.
    """

    tokens: Tensor
    positions: Tensor | None = None
    segments: Tensor | None = None
    wanted: Tensor | None = None


def token_scores(
    config: Config,
    params: trees.Tree,
    tokens_BT: Tensor,
    positions: Tensor | None = None,
    segments: Tensor | None = None,
    mesh: Mesh = decoder.SINGLE,
    temperature: float = 1.0,
    want: tuple[str, ...] = ("logp",),
    wanted_BT: Tensor | None = None,
    layer: Callable | None = None,
    among_BTK: Tensor | None = None,
) -> TokenScores:
    """Log-probability, entropy and collision probability of every token given those before it.

    Args:
      config, params, tokens_BT, positions, segments, mesh, layer: as in `decoder.apply`.
      temperature: logits are divided by it.
      want: as in `linear_logprob`.
      wanted_BT: bool, tokens whose scores matter; the others get 0 and cost no logits. None: all.
      among_BTK: token ids that could have stood in the place of each token; None: none.

    Returns: [B, T] each, [B, T, K] for `among_BTK`, aligned with the tokens; 0 at the first token of a sequence and at
      padding.
    """
    rows = Rows(tokens_BT, positions, segments, wanted_BT)
    hidden_ND, at_N = _before(config, params, rows, mesh, layer)
    among_NK = None if among_BTK is None else among_BTK[:, 1:].flatten(0, 1)[at_N]
    after_N = tokens_BT[:, 1:].flatten()[at_N]
    w_VD, over = _unembedding(config, params, mesh)
    scores = linear_logprob(hidden_ND, w_VD, after_N, over, temperature, want=want, among_TK=among_NK)
    return TokenScores(*(None if x is None else _place(x, at_N, rows) for x in scores))


def likely_tokens(
    config: Config,
    params: trees.Tree,
    rows: Rows,
    k: int,
    mesh: Mesh = decoder.SINGLE,
    temperature: float = 1.0,
    layer: Callable | None = None,
) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens in the place of every token, given those before it, and their log-probabilities.

    Returns: [B, T, k] int64 and [B, T, k] nats, without a gradient; 0 where `token_scores` has 0.
    """
    with torch.no_grad():
        hidden_ND, at_N = _before(config, params, rows, mesh, layer)
        w_VD, over = _unembedding(config, params, mesh)
        ids_NK, logp_NK = likeliest(hidden_ND, w_VD, k, over, temperature)
        return _place(ids_NK, at_N, rows), _place(logp_NK, at_N, rows)


def _before(
    config: Config, params: trees.Tree, rows: Rows, mesh: Mesh, layer: Callable | None
) -> tuple[Tensor, Tensor | slice]:
    """The hidden states before the tokens that matter, and which of the B (T - 1) tokens behind the first these are."""
    tokens, positions, segments, wanted_BT = rows
    hidden_BTD, _ = decoder.apply(config, params, tokens, positions, segments, mesh=mesh, layer=layer)
    before_MD = hidden_BTD[:, :-1].flatten(0, 1)
    if wanted_BT is None:
        return before_MD, slice(None)
    at_N = wanted_BT[:, 1:].flatten().nonzero().squeeze(-1)
    return before_MD[at_N], at_N


def _unembedding(config: Config, params: trees.Tree, mesh: Mesh) -> tuple[Tensor, Mesh]:
    """The unembedding's rows on this rank, and the mesh over which the vocabulary is split."""
    w_VD = decoder.unembed(params)
    return w_VD, decoder.SINGLE if w_VD.shape[0] == config.vocab else mesh  # a whole vocabulary needs no other rank


def _place(x: Tensor, at_N: Tensor | slice, rows: Rows) -> Tensor:
    """Numbers of some tokens, [N, ...], among 0s as [B, T, ...]."""
    B, T = rows.tokens.shape
    if isinstance(at_N, Tensor):
        x = x.new_zeros(B * (T - 1), *x.shape[1:]).index_copy(0, at_N, x)
    x = torch.cat([x.new_zeros(B, 1, *x.shape[1:]), x.view(B, T - 1, *x.shape[1:])], 1)
    known_BT = follows(rows.tokens, rows.segments)
    return torch.where(known_BT.view(*known_BT.shape, *(1,) * (x.ndim - 2)), x, 0)


def follows(tokens_BT: Tensor, segments_BT: Tensor | None) -> Tensor:
    """True where a token has one before it in its sequence: [B, T] bool, or [T] where it is the same in all rows."""
    if segments_BT is None:
        return torch.arange(tokens_BT.shape[1], device=tokens_BT.device) > 0
    same_BT = (segments_BT[:, 1:] == segments_BT[:, :-1]) & (segments_BT[:, 1:] != 0)
    return torch.nn.functional.pad(same_BT, (1, 0))
