"""What a policy says of the tokens of a batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.linear_logprob import TokenScores, linear_logprob
from funrl.mesh.mesh import Mesh
from funrl.models import decoder
from funrl.models.config import Config


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
) -> TokenScores:
    """Log-probability, entropy and collision probability of every token given those before it.

    Args:
      config, params, tokens_BT, positions, segments, mesh, layer: as in `decoder.apply`.
      temperature: logits are divided by it.
      want: as in `linear_logprob`.
      wanted_BT: bool, tokens whose scores matter; the others get 0 and cost no logits. None: all.

    Returns: [B, T] each, aligned with the tokens; 0 at the first token of a sequence and at padding.
    """
    hidden_BTD, _ = decoder.apply(config, params, tokens_BT, positions, segments, mesh=mesh, layer=layer)
    B, T = tokens_BT.shape
    before_MD, after_M = hidden_BTD[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten()
    at_N = None if wanted_BT is None else wanted_BT[:, 1:].flatten().nonzero().squeeze(-1)
    if at_N is not None:
        before_MD, after_M = before_MD[at_N], after_M[at_N]
    w_VD = decoder.unembed(params)
    over = decoder.SINGLE if w_VD.shape[0] == config.vocab else mesh  # a whole vocabulary needs no other rank
    scores = linear_logprob(before_MD, w_VD, after_M, over, temperature, want=want)
    known_BT = follows(tokens_BT, segments)

    def place(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        if at_N is not None:
            x = x.new_zeros(B * (T - 1)).index_copy(0, at_N, x)
        return torch.where(known_BT, torch.nn.functional.pad(x.view(B, T - 1), (1, 0)), 0)

    return TokenScores(*(place(x) for x in scores))


def follows(tokens_BT: Tensor, segments_BT: Tensor | None) -> Tensor:
    """True where a token has one before it in its sequence: [B, T] bool, or [T] where it is the same in all rows."""
    if segments_BT is None:
        return torch.arange(tokens_BT.shape[1], device=tokens_BT.device) > 0
    same_BT = (segments_BT[:, 1:] == segments_BT[:, :-1]) & (segments_BT[:, 1:] != 0)
    return torch.nn.functional.pad(same_BT, (1, 0))
