"""Gated delta rule and its convolution over a packed row whose tokens are split over the mesh axis `sequence`.

A rank has a contiguous part of the row. All that it needs of the parts before is the state S behind them, [N, M] for
each head, and the last W - 1 inputs of the convolution. In S both its results and the state behind its own part are
linear. So each rank computes its part at once as a function of S, all gather these functions' ends, and each composes
those before it:

    out = out_0 + R S       R S is 0 behind the first border of sequences in the part
    end = end_0 + P S       P = product of decay_t (1 - beta_t k_t k_t^T), whose norm is at most 1

| form | a rank receives, a layer | waits for | needs |
|---|---|---|---|
| gather ends (this) | (sp - 1) H N (N + M) numbers in float32 or wider | all ranks, once | - |
| send S from rank to rank | H N M | the ranks before it, in turn | - |
| all-to-all, heads for tokens | (sp - 1) / sp of its queries, keys, values and results | all, twice | sp divides K |

What is sent does not grow with the tokens, so it is least where rows are long enough to be split: for Qwen3-Next on
sp4 12.6 MB of ends beside 75 MB of the heads of 4096 tokens a rank in bfloat16. The price is N more columns in the
loop over chunks and in what is read, about twice the rule's own products, some 5 % of those of a layer. P contracts, so
composing loses nothing: float64 agrees with one device to 1e-12.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl.compiled_kernels.delta_rule.gated_delta import causal_convolution, part_of_delta_rule
from funrl.mesh.collectives import all_gather
from funrl.mesh.mesh import Mesh

_AXIS = "sequence"


def split_delta_rule(heads: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], segments_1T: Tensor, mesh: Mesh) -> Tensor:
    """`gated_delta_rule` over a row split over the ranks of `sequence`.

    Args:
      heads: queries and keys [1, t, K, N], values [1, t, H, M], decays and betas [1, t, H], all of this rank's
        t = T / sp tokens.
      segments_1T: number of the sequence of each token of the whole row.

    Returns: [1, t, H, M] of this rank's tokens in the dtype of v; differentiable once.
    """
    v_1tHM = heads[2]
    t = v_1tHM.shape[1]
    value = v_1tHM.shape[-1]
    own_1t = _own(segments_1T, mesh, t, t)
    out_1tHX, end_1HNX = part_of_delta_rule(*heads, own_1t)
    ends_RHNX = all_gather(end_1HNX, mesh, _AXIS)
    continues_R = segments_1T[0, t::t] == segments_1T[0, t - 1 : -1 : t]  # of all parts but the first
    states_RHNM = _states(ends_RHNX, continues_R, value)
    state_1HNM = states_RHNM.index_select(0, mesh.index(_AXIS) + torch.arange(1, device=v_1tHM.device))
    out_1tHM, readers_1tHN = out_1tHX.tensor_split((value,), -1)
    read_1HtM = readers_1tHN.transpose(1, 2) @ state_1HNM
    return (out_1tHM + read_1HtM.transpose(1, 2)).to(v_1tHM.dtype)


def split_convolution(x_1tD: Tensor, weight_DW: Tensor, segments_1T: Tensor, mesh: Mesh) -> Tensor:
    """`causal_convolution` over a row split over the ranks of `sequence`: of this rank's tokens.

    Args:
      x_1tD: of this rank's t = T / sp tokens.
      weight_DW: the same on every rank.
      segments_1T: as in `split_delta_rule`.
    """
    before = weight_DW.shape[1] - 1
    if not before:
        return causal_convolution(x_1tD, weight_DW)
    t = x_1tD.shape[1]
    kept = min(before, t)
    tails_1XD = all_gather(x_1tD[:, t - kept :], mesh, _AXIS, dim=1)
    earlier_1WD = _own(F.pad(tails_1XD, (0, 0, before, 0)), mesh, kept, before)
    segments_1X = _own(F.pad(segments_1T, (before, 0), value=-1), mesh, t, before + t)
    return causal_convolution(torch.cat((earlier_1WD, x_1tD), 1), weight_DW, segments_1X)[:, before:]


def _own(x_1T: Tensor, mesh: Mesh, step: int, count: int) -> Tensor:
    """The `count` places of a rank, which begin `step` behind those of the rank before."""
    places = mesh.index(_AXIS) * step + torch.arange(count, device=x_1T.device)
    return x_1T.index_select(1, places)


def _states(ends_RHNX: Tensor, continues_R: Tensor, value: int) -> Tensor:
    """States [ranks, H, N, M] before the first token of each rank's part; 0 where it begins a sequence."""
    values_RHNM, transitions_RHNN = ends_RHNX.tensor_split((value,), -1)
    states = [torch.zeros_like(values_RHNM[0])]
    for rank in range(len(ends_RHNX) - 1):
        end_HNM = values_RHNM[rank] + transitions_RHNN[rank] @ states[-1]
        states.append(end_HNM.masked_fill(~continues_R[rank], 0))
    return torch.stack(states)
