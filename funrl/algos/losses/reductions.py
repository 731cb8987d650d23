"""From per-token losses to a loss that is exact under micro-batches, packing and data parallelism.

Each gives a numerator from losses and a denominator from masks alone; a sequence is a row, or a segment of a packed
row. A token that a correction rejected is in neither, and a sequence without a masked token is not counted. Where
several rows make an episode, the sequence is the whole episode of an agent: its tokens are those of all its rows, and
its first row counts it, so that a branch changes no denominator.

verl counts sequences in the same way; TRL counts empty ones too. verl's sapo and geo_mean ignore the configured
reduction; here no term does.

Example:
  >>> loss, mask = torch.tensor([[1.0, 2.0], [6.0, 7.0]]), torch.tensor([[True, True], [True, False]])
  >>> from funrl.algos.core import value_of
  >>> forms = token_mean(), token_sum(), sequence_mean(), sequence_sum_mean()
  >>> [value_of(form.numerators(loss, mask, None), form.denominators(mask, None)).item() for form in forms]
  [3.0, 9.0, 3.75, 4.5]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from funrl.algos.masks import sequence_sums, where_masked
from funrl.algos.metrics import PieceError
from funrl.algos.terms import EpisodeTokens, Reduction


def token_mean() -> Reduction:
    """The mean over all masked tokens of the batch, sum L m / sum m. A long sequence weighs more than a short one.

    References: DAPO, Yu et al., 2025, https://arxiv.org/abs/2503.14476; TRL calls it dapo, or bnpo if it normalises
      each device's micro-batch. Here the batch is always the whole mini-batch.
    """
    return Reduction(lambda mask, segments: (_tokens(mask),), _summed)


def token_sum() -> Reduction:
    """Sum over all masked tokens, sum L m. Its denominator is 0: the learning rate depends on the batch."""
    return Reduction(lambda mask, segments: (mask.new_zeros((), dtype=torch.float64),), _summed)


def sequence_mean() -> Reduction:
    """The mean over sequences of the mean over their tokens. Each sequence weighs the same, whatever its length.

    A sequence is a row, or all rows of an agent in an episode.

    References: GRPO, Shao et al., 2024, https://arxiv.org/abs/2402.03300
    """

    def numerators(loss_BT: Tensor, mask_BT: Tensor, segments_BT: Tensor | None) -> tuple[Tensor]:
        sums_BS = sequence_sums(loss_BT, mask_BT, segments_BT)
        lengths_BS = sequence_sums(torch.ones_like(loss_BT), mask_BT, segments_BT)
        return ((sums_BS / lengths_BS.clamp_min(1)).sum(),)

    def of_episodes(episodes: EpisodeTokens) -> Reduction:
        def shares(loss_BT: Tensor, mask_BT: Tensor, segments_BT: Tensor | None) -> tuple[Tensor]:
            sums_BS = sequence_sums(loss_BT, mask_BT, segments_BT)
            counts_BT = episodes.count.to(loss_BT.dtype)
            if segments_BT is None:
                counts_BS = counts_BT[:, :1]
            else:  # all tokens of a sequence have its number
                counts_BS = torch.zeros_like(sums_BS).scatter(1, segments_BT.long(), counts_BT)
            return ((sums_BS / counts_BS.clamp_min(1)).sum(),)

        return Reduction(_first_rows(episodes), shares)

    return Reduction(_sequences, numerators, of_episodes)


def prompt_mean() -> Reduction:
    """The mean over prompts of the mean over all tokens of the prompt's group. Each prompt weighs the same.

    With n(t) the tokens of the group of token t, it is sum_t L[t] / n(t) over sum_t 1 / n(t), whose denominator is the
    number of prompts. A mini-batch with a part of a group's tokens counts this part of a prompt, so that mini-batches,
    micro-batches and ranks add up whatever rows they hold.

    Needs: prompt_tokens [B, T], made by `count_prompt_tokens`.

    References: ScaleRL, Khatri et al., 2025, https://arxiv.org/abs/2510.13786

    Warning: SkyRL's prompt_mean counts the tokens of a mini-batch, which must hold whole groups.
    """

    def of_prompts(tokens_BT: Tensor) -> Reduction:
        def parts(mask_BT: Tensor) -> Tensor:
            return where_masked(tokens_BT.double().clamp_min(1).reciprocal(), mask_BT)

        def numerators(loss_BT: Tensor, mask_BT: Tensor, segments_BT: Tensor | None) -> tuple[Tensor]:
            return _summed(loss_BT * parts(mask_BT).to(loss_BT.dtype), mask_BT, segments_BT)

        return Reduction(lambda mask_BT, segments_BT: (parts(mask_BT).sum(),), numerators)

    def uncounted(*_: object) -> tuple[Tensor]:
        raise PieceError("prompt_mean() needs the groups of a batch: give it to reduce(term, prompt_mean())")

    return Reduction(uncounted, uncounted, of_prompts=of_prompts)


def sequence_sum_mean() -> Reduction:
    """Mean over sequences of the sum over their tokens. That is the gradient of a sequence's log-probability."""
    return constant_mean(1)


def constant_mean(length: float) -> Reduction:
    """The mean over sequences of the sum over their tokens divided by one constant.

    Args:
      length: tokens, the same for every sequence of the run, above 0; usually the longest completion allowed.

    Raises:
      ValueError: the length is not above 0.
    References: Dr. GRPO, Liu et al., 2025, https://arxiv.org/abs/2503.20783

    Warning: verl divides by the padded width of the batch unless a constant is given, so its loss moves with padding.
    """
    if not length > 0:
        raise ValueError(f"constant_mean({length}): length must be above 0")

    def numerators(loss_BT: Tensor, mask_BT: Tensor, segments_BT: Tensor | None) -> tuple[Tensor]:
        return (_summed(loss_BT, mask_BT, segments_BT)[0] / length,)

    return Reduction(_sequences, numerators, lambda episodes: Reduction(_first_rows(episodes), numerators))


def _summed(loss_BT: Tensor, mask_BT: Tensor, segments_BT: Tensor | None) -> tuple[Tensor]:
    return (where_masked(loss_BT, mask_BT).sum(),)


def _tokens(mask_BT: Tensor) -> Tensor:
    return mask_BT.count_nonzero().to(torch.float64)


def _sequences(mask_BT: Tensor, segments_BT: Tensor | None) -> tuple[Tensor]:
    lengths_BS = sequence_sums(mask_BT.to(torch.float64), mask_BT, segments_BT)
    return (lengths_BS.count_nonzero().to(torch.float64),)


def _first_rows(episodes: EpisodeTokens) -> Callable[[Tensor, Tensor | None], tuple[Tensor]]:
    """Count the episodes that have a trained token, each at its first row, which may have none itself."""

    def count(mask_BT: Tensor, segments_BT: Tensor | None) -> tuple[Tensor]:
        counted_BT = episodes.first & (episodes.count > 0)
        if segments_BT is None:
            return (counted_BT[:, 0].count_nonzero().to(torch.float64),)
        flags_BS = sequence_sums(counted_BT.to(torch.float64), counted_BT, segments_BT)
        return (flags_BS.count_nonzero().to(torch.float64),)

    return count
