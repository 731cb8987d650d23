"""From per-token losses to a loss that is exact under micro-batches, packing and data parallelism.

Each is `(loss_BT, mask_BT, segments_BT=None) -> Fraction`; a sequence is a row, or a segment of a packed row. A token
that a correction rejected is in neither part, and a sequence without a masked token is not counted. verl counts
sequences in the same way; TRL counts empty ones too. verl's gspo, sapo and geo_mean bypass the reduction that was
asked for; here none does.

Example:
  >>> loss, mask = torch.tensor([[1.0, 2.0], [6.0, 7.0]]), torch.tensor([[True, True], [True, False]])
  >>> [form(loss, mask).value.item() for form in (token_mean(), token_sum(), sequence_mean(), sequence_sum_mean())]
  [3.0, 9.0, 3.75, 4.5]
"""

from __future__ import annotations

from torch import Tensor

from funrl.algos.core import Fraction, Reduction, sequence_sums, token_fraction, where_masked


def token_mean() -> Reduction:
    """The mean over all masked tokens of the batch, sum L m / sum m. A long sequence weighs more than a short one.

    References: DAPO, Yu et al., 2025, https://arxiv.org/abs/2503.14476; TRL calls it dapo, and bnpo where the batch
      that is normalised is one device's micro-batch. Here the batch is always the whole mini-batch.
    """

    def reduction(loss_BT: Tensor, mask_BT: Tensor, segments_BT: Tensor | None = None) -> Fraction:
        return token_fraction(loss_BT, mask_BT)

    return reduction


def token_sum() -> Reduction:
    """The sum over all masked tokens, sum L m: the learning rate then depends on the batch. Its denominator is 0."""

    def reduction(loss_BT: Tensor, mask_BT: Tensor, segments_BT: Tensor | None = None) -> Fraction:
        num = where_masked(loss_BT, mask_BT).sum()
        return Fraction(num, num.detach().new_zeros(()))

    return reduction


def sequence_mean() -> Reduction:
    """The mean over sequences of the mean over their tokens. Each sequence weighs the same, whatever its length.

    References: GRPO, Shao et al., 2024, https://arxiv.org/abs/2402.03300
    """

    def reduction(loss_BT: Tensor, mask_BT: Tensor, segments_BT: Tensor | None = None) -> Fraction:
        sums_BS = sequence_sums(loss_BT, mask_BT, segments_BT)
        lengths_BS = sequence_sums(mask_BT.to(loss_BT.dtype), mask_BT, segments_BT)
        return Fraction((sums_BS / lengths_BS.clamp_min(1)).sum(), (lengths_BS > 0).sum().to(loss_BT.dtype))

    return reduction


def sequence_sum_mean() -> Reduction:
    """The mean over sequences of the sum over their tokens: the gradient of a sequence's log-probability."""
    return constant_mean(1)


def constant_mean(length: float) -> Reduction:
    """The mean over sequences of the sum over their tokens divided by one constant.

    Args:
      length: tokens, the same for every sequence of the run; usually the longest completion allowed.
    References: Dr. GRPO, Liu et al., 2025, https://arxiv.org/abs/2503.20783

    Warning: verl divides by the padded width of the batch unless a constant is given, so its loss moves with padding.
    """

    def reduction(loss_BT: Tensor, mask_BT: Tensor, segments_BT: Tensor | None = None) -> Fraction:
        lengths_BS = sequence_sums(mask_BT.to(loss_BT.dtype), mask_BT, segments_BT)
        sequences = (lengths_BS > 0).sum().to(loss_BT.dtype)
        return Fraction(where_masked(loss_BT, mask_BT).sum() / length, sequences)

    return reduction
