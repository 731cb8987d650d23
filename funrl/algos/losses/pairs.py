"""Pairs of a chosen and a rejected completion: how they are laid out in a batch, and sums over each.

There are two layouts:
- side by side: a row holds segment 1, the chosen completion with its prompt, and segment 2, the rejected one (then 3
  and 4, and so on). Rows may be split and reordered freely, so the trainer uses this layout; `side_by_side` makes it.
- interleaved: rows 2i and 2i + 1 are the chosen and the rejected completion of pair i; `segments` is absent. A split of
  such a batch must keep pairs together.
A triple has a third sequence, segment 3, which is imitated; the next one begins with 5.
`mask` is true on the completions. Every sequence of a pair has at least one masked token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from funrl.algos.masks import sequence_sums, to_own_tokens, where_masked
from funrl.algos.metrics import Mean
from funrl.batch import Batch, map_kinds


def pair_sums(x_BT: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The sums of x over the masked tokens of the chosen and of the rejected sequences.

    Returns: two tensors [P]; in packed rows P counts every pair that would fit; missing pairs sum to 0.

    Raises:
      ValueError: an odd number of interleaved rows.
    """
    table = sequence_sums(x_BT, batch.mask, batch.get("segments"))
    if batch.get("segments") is not None:
        table = table[:, 1 : 1 + batch.mask.shape[1] // 2 * 2]
    elif table.shape[0] % 2:
        raise ValueError(f"{table.shape[0]} rows do not form pairs: chosen and rejected rows must alternate")
    pairs_P2 = table.reshape(-1, 2)
    return pairs_P2[:, 0], pairs_P2[:, 1]


def to_pair_tokens(x_P: Tensor, batch: Batch) -> Tensor:
    """Give every masked token the value of its own pair: from [P], as from `pair_sums`, to [B, T]."""
    both_P2 = x_P[:, None].expand(-1, 2)
    segments_BT = batch.get("segments")
    if segments_BT is None:
        return to_own_tokens(both_P2.reshape(-1, 1), batch.mask)
    rows, width = batch.mask.shape
    table = pad(both_P2.reshape(rows, width // 2 * 2), (1, width % 2))
    return to_own_tokens(table, batch.mask, segments_BT)


def pairs_present(batch: Batch) -> Tensor:
    """[P] bool, the pairs that have tokens."""
    chosen_P, rejected_P = pair_sums(torch.ones_like(batch.mask, dtype=torch.float32), batch)
    return (chosen_P > 0) & (rejected_P > 0)


def chosen(batch: Batch) -> Tensor:
    """Bool that broadcasts to [B, T], the tokens of chosen sequences; for `restrict`."""
    segments_BT = batch.get("segments")
    if segments_BT is not None:
        return segments_BT % 2 == 1
    return (torch.arange(batch.mask.shape[0], device=batch.mask.device) % 2 == 0)[:, None]


def compared(batch: Batch) -> Tensor:
    """[B, T] bool, the tokens of the pairs of triples, which have segments 1 and 2 of every four; for `restrict`."""
    segments_BT = _of_triples(batch)
    return (segments_BT == 1) | (segments_BT == 2)


def gold(batch: Batch) -> Tensor:
    """[B, T] bool, the tokens of the third texts of triples, segment 3 of every four; for `restrict`."""
    return _of_triples(batch) == 3


def _of_triples(batch: Batch) -> Tensor:
    """[B, T], index of the text in its triple, 1 to 3."""
    segments_BT = batch.get("segments")
    if segments_BT is None:
        raise ValueError("the batch has no segments: triples lie side by side in a row, as segments 1, 2 and 3 of four")
    return segments_BT % 4


def side_by_side(batch: Batch, chosen_P: Tensor, rejected_P: Tensor) -> Batch:
    """Put the two rows of each pair into one row of twice the width, as segments 1 and 2.

    Args:
      batch: rows that are single sequences; padding begins at `length`; None: no padding.
      chosen_P, rejected_P: [P] int64, row numbers.
    Returns: P rows; fields per row are those of the chosen row.
    """
    rows, width = batch.mask.shape
    place_T = torch.arange(width, device=batch.mask.device)
    length_B = batch.get("length")
    positions_BT = batch.get("positions")
    length_B = torch.full((rows,), width, device=batch.mask.device) if length_B is None else length_B
    real_BT = (place_T < length_B[:, None]).long()
    positions_BT = place_T.expand(rows, width) if positions_BT is None else positions_BT
    joined = map_kinds(lambda kind, x: kind.beside(x, chosen_P, rejected_P), batch._replace(positions=positions_BT))
    segments = torch.cat((real_BT[chosen_P], 2 * real_BT[rejected_P]), 1)
    return joined._replace(segments=segments, length=width + length_B[rejected_P])


def best_and_worst(score_B: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor]:
    """The rows with the highest and the lowest score of each group; groups of equal scores are skipped.

    Of equal scores the first row is taken.

    Returns: two tensors [P] int64, row numbers, groups in ascending order.
    """
    by_score = score_B.argsort(stable=True)
    lowest = by_score[group_B[by_score].argsort(stable=True)]
    by_score = score_B.argsort(stable=True, descending=True)
    highest = by_score[group_B[by_score].argsort(stable=True)]
    group = group_B[highest]
    first = torch.ones_like(group, dtype=torch.bool)
    first[1:] = group[1:] != group[:-1]
    best_G = highest[first]
    worst_G = lowest[first]
    differ = score_B[best_G] > score_B[worst_G]
    return best_G[differ], worst_G[differ]


def online_pairs(batch: Batch) -> Batch:
    """Pair the policy's own samples, side by side: with the loss of DPO this is online DPO.

    Needs: score, group [B], and what the loss needs; rows are single sequences.
    References: Guo et al., 2024, https://arxiv.org/abs/2402.04792

    Warning: TRL samples two completions a prompt and lets another model choose; a tie is a pair there.
    """
    return side_by_side(batch, *best_and_worst(batch.score, batch.group))


def pair_metrics(
    chosen_P: Tensor, rejected_P: Tensor, batch: Batch, rounding_P: Tensor | float = 0.0
) -> dict[str, Mean]:
    """Means over pairs of the rewards, of their difference, and of how often the chosen reward is higher.

    A tie counts one half, so a policy that is its reference has an accuracy of 1/2.

    Args:
      rounding_P: differences up to this are ties; otherwise the order of summation on a mesh could break them.
    """
    present_P = pairs_present(batch)
    chosen_P = chosen_P.detach()
    rejected_P = rejected_P.detach()
    margin_P = chosen_P - rejected_P
    wins_P = (1 + torch.where(margin_P.abs() <= rounding_P, 0, margin_P.sign())) / 2

    def mean(x_P: Tensor) -> Mean:
        return Mean(where_masked(x_P, present_P).sum(), present_P.sum().to(x_P.dtype))

    return {
        "preference/accuracy": mean(wins_P),
        "preference/chosen": mean(chosen_P),
        "preference/rejected": mean(rejected_P),
        "preference/margin": mean(margin_P),
    }
