"""Uneven exchange between the ranks of mesh axes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from funrl.mesh.heartbeat import entered, left
from funrl.mesh.mesh import Axes, Mesh

_c10d = torch.ops._c10d_functional


def exchange(flat: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], mesh: Mesh, axes: Axes) -> Tensor:
    """Exchange rows: what every rank of `axes` has for this one, end to end by rank. One collective; no gradient.

    Args:
      flat: [sum of send_counts, ...], what this rank has for each other and itself, end to end by rank.
      send_counts, receive_counts: along dim 0, one for each rank of `axes`; what a sends to b is what b receives of a.

    Returns: [sum of receive_counts, ...].
    """
    if len(flat) != sum(send_counts):
        raise ValueError(f"{len(flat)} numbers are to be sent, the counts are of {sum(send_counts)}")
    if mesh.size(axes) == 1:
        return flat.detach()
    sent = flat.detach().contiguous()
    group = mesh.group_name(axes)
    entered("exchange", group)
    out = _c10d.wait_tensor(_c10d.all_to_all_single(sent, list(receive_counts), list(send_counts), group))
    left()
    return out
