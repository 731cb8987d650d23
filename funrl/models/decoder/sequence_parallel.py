"""Attention over a packed row whose tokens are split over the mesh axis `sequence`.

Each rank has the queries, keys and values of a contiguous part of the row, and all ranks know where its sequences begin
and end. Between two attentions a layer computes each token by itself, so nothing else of it knows of the split.

| form | a rank receives, a layer | needs |
|---|---|---|
| ulysses | (sp - 1) / sp of its tokens' queries, keys, values and results | sp divides a rank's query heads |
| ring | its own tokens once and back; keys and values of all others, twice that and their gradients going back | - |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from funrl.compiled_kernels.varlen_attention import varlen_attention
from funrl.mesh.collectives import all_to_all
from funrl.mesh.mesh import Mesh
from funrl.models.decoder.ring_attention import ring_attention
from funrl.models.errors import ModelError
from funrl.models.model import Layer

AXIS = "sequence"
FORMS = ("auto", "ulysses", "ring")


def split_attention(
    q_1tHN: Tensor,
    k_1tKN: Tensor,
    v_1tKN: Tensor,
    offsets: Tensor,
    mesh: Mesh,
    window: int | None = None,
    form: str = "auto",
    **how: Any,
) -> Tensor:
    """`varlen_attention` of a row that may be split: of this rank's tokens.

    Args:
      form: one of `FORMS`; auto is ulysses where the heads divide.
      how: `scale`, `cap`, `sinks_H` of this rank's heads, `blockwise` and `mutual_RM`.

    Raises:
      ModelError: attention by blocks is asked for where keys go round a ring, or tokens of a split row see later ones.
    """
    if mesh.size(AXIS) == 1:
        return varlen_attention(q_1tHN, k_1tKN, v_1tKN, offsets=offsets, window=window, **how)
    if how.pop("mutual_RM", None) is not None:
        raise ModelError("tokens that see later ones are not split over sp")
    if is_ring(form, q_1tHN.shape[2], mesh.sizes):
        if how.pop("blockwise", False):
            raise ModelError("the steps of ring attention depend on where sequences begin: it has no static shapes")
        return ring_attention(q_1tHN, k_1tKN, v_1tKN, offsets=offsets, mesh=mesh, window=window, **how)
    return ulysses_attention(q_1tHN, k_1tKN, v_1tKN, offsets=offsets, mesh=mesh, window=window, **how)


def is_ring(form: str, heads: int, sizes: Mapping[str, int]) -> bool:
    """True if a form means ring attention.

    Args:
      heads: query heads of a tensor rank.
      sizes: of the mesh's axes.
    """
    return sizes[AXIS] > 1 and (form == "ring" or (form == "auto" and heads % sizes[AXIS] > 0))


def with_form(layer: Layer, form: str) -> Layer:
    """A layer whose attention over a split row has one of `FORMS`."""
    if form == "auto":
        return layer

    def formed(config, mesh, params, x_BTD, context):
        return layer(config, mesh, params, x_BTD, context._replace(form=form))

    return formed


def ulysses_attention(
    q_1tHN: Tensor, k_1tKN: Tensor, v_1tKN: Tensor, offsets: Tensor, mesh: Mesh, window: int | None, **how: Any
) -> Tensor:
    """`varlen_attention` of the whole row, by exchanging heads for tokens and back.

    Inside, a rank has all T tokens of its H / sp heads, so the work is balanced whatever the row holds, and any kernel
    does. Where sp does not divide the key-value heads, each is sent to all ranks whose queries use it.

    Args:
      q_1tHN, k_1tKN, v_1tKN: of this rank's t = T / sp tokens, rotated; sp divides H.
      offsets: [S + 1], of the whole row.
      how: `scale`, `cap`, `sinks_H` and `blockwise`, as in `varlen_attention`.

    Returns: [1, t, H, N], of this rank's tokens.

    References: Jacobs et al., 2023, https://arxiv.org/abs/2309.14509
    """
    sp = mesh.size(AXIS)
    q = q_1tHN[0]
    k = k_1tKN[0]
    v = v_1tKN[0]
    copies = sp // math.gcd(k.shape[1], sp)  # it divides H / K, as sp divides H
    if copies > 1:
        k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
    heads = q.shape[1] // sp
    kv_heads = k.shape[1] // sp
    sent = torch.cat([x.unflatten(1, (sp, -1)) for x in (q, k, v)], 2)  # what goes to a rank is together
    whole = all_to_all(sent.flatten(1, 2), mesh, AXIS, split=1, concat=0)
    q, k, v = whole.split((heads, kv_heads, kv_heads), 1)
    if (sinks_H := how.get("sinks_H")) is not None:
        own_H = mesh.index(AXIS) * heads + torch.arange(heads, device=q.device)
        how["sinks_H"] = sinks_H.index_select(0, own_H)
    out_1THN = varlen_attention(q[None], k[None], v[None], offsets=offsets, window=window, **how)
    return all_to_all(out_1THN[0], mesh, AXIS, split=0, concat=1).unsqueeze(0)
