"""Tokens that could be sampled, and log-probabilities of the truncated distribution with the trainer's bits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from funrl.compiled_kernels.exact.dispatch import computes_exactly
from funrl.compiled_kernels.exact.scores import largest_logits, log_probabilities, logit_moments
from funrl.compiled_kernels.linear_logprob import TokenScores
from funrl.compiled_kernels.packed import parts_of
from funrl.compiled_kernels.truncated_scores import KeptTokens, truncated_scores
from funrl.rollout.requests import Completion
from funrl.rollout.sampling_parameters import Sampling
from funrl.rollout.truncation import kept_mass

ID = np.int32  # of a kept token in a completion


def keep_tokens(logits_RV: Tensor, token_R: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The tokens that truncated sampling could take, and the sampled tokens' log-probabilities among them.

    Args:
      logits_RV: of the whole vocabulary, as `sample_tokens` gets them.
      token_R: the tokens that were sampled.
      sampling: truncated, without a repetition penalty.

    Returns: [R] nats, in the dtype of the logits, with the bits of `token_scores` where those of the whole
      distribution are the same; the kept tokens, as bits of a table [R, ceil(V / 8)] uint8, the lowest first.
    """
    shaped_RV = logits_RV if sampling.temperature == 1 else logits_RV / sampling.temperature
    kept_RV = kept_mass(shaped_RV.softmax(-1), sampling) > 0
    place_M, id_M = kept_RV.nonzero(as_tuple=True)
    kept = KeptTokens(id_M, kept_RV.sum(1))
    token_R1 = token_R.unsqueeze(1)
    if computes_exactly(logits_RV):
        top_R = largest_logits(logits_RV)
        parts = parts_of(logits_RV.shape[1])
        above_R1, sums_R3 = logit_moments(logits_RV, top_R, token_R1, sampling.temperature, parts)
        above_M = logits_RV[place_M, id_M].double() - top_R.double()[place_M]
        sum_R = sums_R3[:, 0].contiguous()
        given = sampling.temperature, logits_RV.dtype
        logp_R = log_probabilities(above_R1, sum_R, *given)[:, 0]
        logp_M = log_probabilities(above_M[:, None], sum_R[place_M], *given)[:, 0]
    else:
        logp_RV = shaped_RV.double().log_softmax(-1).to(logits_RV.dtype)
        logp_R = logp_RV.gather(1, token_R1)[:, 0]
        logp_M = logp_RV[place_M, id_M]
    return truncated_scores(TokenScores(logp=logp_R), logp_M, kept).read("logp"), pack_bits(kept_RV)


def pack_bits(x_RV: Tensor) -> Tensor:
    """Bits of bool rows, [R, ceil(V / 8)] uint8, the lowest first."""
    x_RV = torch.nn.functional.pad(x_RV, (0, -x_RV.shape[1] % 8))
    weight_8 = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=x_RV.device)
    return (x_RV.unflatten(1, (-1, 8)) * weight_8).sum(-1, dtype=torch.uint8)


def unpack_ids(bits_RB: np.ndarray) -> list[np.ndarray]:
    """Ids of the bits of each row, ascending."""
    rows, ids = np.unpackbits(bits_RB, axis=1, bitorder="little").nonzero()
    return np.split(ids.astype(ID), np.searchsorted(rows, np.arange(1, len(bits_RB) + 1)))[:-1]


def kept_before(begun: Completion) -> list[np.ndarray]:
    """Ids that could be sampled at each token of a begun completion. Raises: ValueError, they are not recorded."""
    if begun.kept is None:
        raise ValueError(f"completion {begun.number} is continued, and what it could have sampled was not recorded")
    ids, counts = (x.numpy() for x in begun.kept)
    return np.split(ids, np.cumsum(counts)[:-1]) if len(counts) else []
