"""Attention over a packed row that is split over `sequence`, for any number of heads: keys and values go round a ring.

A rank's queries see keys of its own part and of those before it. Each part is seen by itself, and the results are
merged by their log-sum-exp; going back, the gradients of keys and values travel with them until they are home. The last
rank has the most to do, as causal queries see all that is before them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl.autograd import AutogradFunction
from funrl.compiled_kernels.attention import add_sinks, sink_gradient
from funrl.compiled_kernels.exact.registration import operator
from funrl.mesh.collectives import start_shift, wait
from funrl.mesh.mesh import Mesh

_AXIS = "sequence"
_BLOCK = 256  # queries at a time
_aten = torch.ops.aten


def ring_attention(
    q_1tHN: Tensor,
    k_1tKN: Tensor,
    v_1tKN: Tensor,
    offsets: Tensor,
    mesh: Mesh,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """`varlen_attention` of the whole row, by sending keys and values from rank to rank.

    A rank holds the keys and values of two parts at a time, and never the whole row's. On a GPU the host waits at every
    call, to learn where sequences begin.

    Args:
      q_1tHN, k_1tKN, v_1tKN: of this rank's t = T / sp tokens, rotated.
      offsets: [S + 1], of the whole row.
      window, scale, cap, sinks_H: as in `varlen_attention`.

    Returns: [1, t, H, N], of this rank's tokens; differentiable once.

    References: Liu et al., 2023, https://arxiv.org/abs/2310.01889
    """
    options = _How(window or 0, scale or q_1tHN.shape[-1] ** -0.5, cap or 0.0)
    return _Ring.apply(q_1tHN[0], k_1tKN[0], v_1tKN[0], offsets, sinks_H, (mesh, options))[0].unsqueeze(0)


class _How(NamedTuple):
    """Window and numbers of the logits; 0 is none."""

    window: int
    scale: float
    cap: float


class _Block(NamedTuple):
    """Queries of this rank's part, and keys of a part that they see.

    Attributes:
      seen: [queries, keys], bool, or 0 and -inf for torch's kernel for the CPU; None: all of them.
      causal: query i sees the keys up to i; there are as many keys as queries.
    """

    queries: slice
    keys: slice
    seen: Tensor | None
    causal: bool = False


class _Ring(AutogradFunction):
    @staticmethod
    def forward(q, k, v, offsets, sinks, place):
        mesh, options = place
        seen = (
            _part(q, keys, values, offsets, *firsts, *options)
            for firsts, (keys, values) in _parts(torch.stack((k, v)), mesh)
        )
        joined = functools.reduce(lambda before, part: _joined(*before, *part), seen)
        out, lse = joined if sinks is None else add_sinks(*joined, sinks)
        return out.to(q.dtype), lse

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, offsets, sinks, (ctx.mesh, ctx.how) = inputs
        ctx.save_for_backward(q, k, v, offsets, *output, sinks)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, d_out, _):
        with torch.no_grad():
            q, k, v, offsets, out, lse, sinks = ctx.saved_tensors
            d_q = torch.zeros_like(q, dtype=lse.dtype)
            d_out = d_out.contiguous()
            grads = torch.zeros(2, *k.shape, dtype=lse.dtype, device=k.device)
            for place, (keys, values) in _parts(torch.stack((k, v)), ctx.mesh):
                gradients = _part_backward(d_out, q, keys, values, out, lse, offsets, *place, *ctx.how)
                d_q += gradients[0]
                grads += gradients[1]
                grads = wait(start_shift(grads, ctx.mesh, _AXIS)).view(grads.shape)  # after as many they are home
            d_sinks = None if sinks is None else sink_gradient(d_out, out, lse, sinks)
        return d_q.to(q.dtype), *grads.to(k.dtype).unbind(0), None, d_sinks, None


def _parts(kv: Tensor, mesh: Mesh) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """The parts of all ranks as they come by, the own one first: the first token of the queries and of the keys.

    Args:
      kv: [2, t, K, N] keys and values of this rank.
    """
    ranks = mesh.size(_AXIS)
    own = int(mesh.index(_AXIS))
    count = kv.shape[1]
    for step in range(ranks):
        coming = start_shift(kv, mesh, _AXIS) if step + 1 < ranks else None
        yield (own * count, (own - step) % ranks * count), kv
        if coming is not None:
            kv = wait(coming).view(kv.shape)


def _joined(out: Tensor, lse: Tensor, found: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Results over two sets of keys as one over both; where nothing of the second is seen the first stays."""
    both = torch.logaddexp(lse, sums)
    seen = sums > -torch.inf
    before = torch.where(seen, (lse - both).exp(), 1.0).unsqueeze(-1)
    now = torch.where(seen, (sums - both).exp(), 0.0).unsqueeze(-1)
    return out * before + found * now, torch.where(seen, both, lse)


@operator("funrl::ring_part")
def _part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    first: int,
    source: int,
    window: int,
    scale: float,
    cap: float,
) -> tuple[Tensor, Tensor]:
    options = _How(window, scale, cap)
    wide = _wide(q)
    out = torch.zeros_like(q, dtype=wide)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=wide)
    for block in _blocks(
        offsets.cpu().numpy(), first, source, count=len(q), window=window, q=q, on_cpu=_on_cpu(q, options)
    ):
        rows = block.queries
        cols = block.keys
        out[rows], lse[rows] = _forward(q[rows], k[cols], v[cols], block=block, how=options)
    return out, lse


@operator("funrl::ring_part_backward")
def _part_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets: Tensor,
    first: int,
    source: int,
    window: int,
    scale: float,
    cap: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of this rank's queries, and of the keys and values of a part: [2, t, K, N]."""
    options = _How(window, scale, cap)
    d_q = torch.zeros_like(q, dtype=lse.dtype)
    d_kv = torch.zeros(2, *k.shape, dtype=lse.dtype, device=k.device)
    for block in _blocks(
        offsets.cpu().numpy(), first, source, count=len(q), window=window, q=q, on_cpu=_on_cpu(q, options)
    ):
        rows = block.queries
        cols = block.keys
        d_q[rows], d_k, d_v = _backward(
            d_out[rows], q[rows], k[cols], v=v[cols], out=out[rows], lse=lse[rows], block=block, how=options
        )
        d_kv[0, cols] += d_k
        d_kv[1, cols] += d_v
    return d_q, d_kv


@_part.register_fake
def _(q, k, v, offsets, first, source, window, scale, cap):
    return torch.empty_like(q, dtype=_wide(q)), q.new_empty(q.shape[:2], dtype=_wide(q))


@_part_backward.register_fake
def _(d_out, q, k, v, out, lse, offsets, first, source, window, scale, cap):
    return torch.empty_like(q, dtype=lse.dtype), lse.new_empty(2, *k.shape)


def seen_pairs(offsets: Tensor, first: int, source: int, count: int, window: int) -> int:
    """Number of pairs of a query and a key that it sees, of the `count` tokens from `first` on and those from `source`.

    Args:
      window: 0 is none.
    """
    ends = offsets.numpy()
    positions = np.arange(first, first + count)
    positions = positions[positions < ends[-1]]
    low = np.maximum(ends[np.searchsorted(ends, positions, "right") - 1], source)
    low = np.maximum(low, positions - window + 1) if window else low
    return int(np.clip(np.minimum(positions + 1, source + count) - low, 0, None).sum())


def _wide(q: Tensor) -> torch.dtype:
    """The dtype of sums."""
    return torch.promote_types(q.dtype, torch.float32)


def _blocks(
    ends: np.ndarray, first: int, source: int, count: int, window: int, q: Tensor, on_cpu: bool
) -> Iterator[_Block]:
    """Blocks of the tokens from `first` on as queries, and of those from `source` on as keys; `count` of either.

    Args:
      on_cpu: as `_on_cpu`: without a window all of a sequence is one block, and masks are 0 and -inf.
    """
    sizes = None
    band = None
    whole = on_cpu and not window
    here = (ends[1:] > first) & (ends[:-1] < first + count) & (ends[1:] > ends[:-1])
    for begin, end in zip(ends[:-1][here].tolist(), ends[1:][here].tolist(), strict=True):
        step = count if whole else _BLOCK
        for low in range(max(begin, first), min(end, first + count), step):
            high = min(low + step, end, first + count)
            k_low = max(begin, source, low - window + 1 if window else 0)
            k_high = min(high, source + count)
            if k_low >= k_high:
                continue
            high = min(high, k_high + window - 1) if window else high  # each of these queries sees some of the keys
            queries = slice(low - first, high - first)
            keys = slice(k_low - source, k_high - source)
            if whole:  # these keys are all before, or they are the queries' own
                yield _Block(queries, keys, None, k_high > low)
                continue
            seen = None
            if k_high > low + 1 or (window and high - k_low > window):
                if sizes != (high - low, k_high - k_low, low - k_low):  # most blocks are of equal sizes
                    sizes = high - low, k_high - k_low, low - k_low
                    band = _band(*sizes, window, q.device)
                    band = torch.zeros_like(band, dtype=q.dtype).masked_fill(~band, -torch.inf) if on_cpu else band
                seen = band
            yield _Block(queries, keys, seen)


def _band(queries: int, keys: int, ahead: int, window: int, device: torch.device) -> Tensor:
    """Mask of the keys that queries see; the first query stands `ahead` of the first key."""
    behind = torch.arange(ahead, ahead + queries, device=device)[:, None] - torch.arange(keys, device=device)
    return (behind >= 0) & (behind < window) if window else behind >= 0


def _forward(q: Tensor, k: Tensor, v: Tensor, block: _Block, how: _How) -> tuple[Tensor, Tensor]:
    """Result [t, H, N] and log-sum-exp [t, H] of queries; each sees some of the keys."""
    if _on_cpu(q, how):
        outputs, sums = _aten._scaled_dot_product_flash_attention_for_cpu(
            *_heads_first(q, k, v), 0.0, block.causal, attn_mask=block.seen, scale=how.scale
        )
        return outputs[0].transpose(0, 1), sums[0].T
    logits = _logits(q, k, block.seen, how=how)
    sums = logits.logsumexp(-1)
    weights = (logits - sums.unsqueeze(-1)).exp()
    outputs = torch.einsum("kgts,skn->tkgn", weights, v.to(weights.dtype)).flatten(1, 2)
    return outputs, sums.permute(2, 0, 1).flatten(1)


def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: _Block, how: _How
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values of a block, exact with the result and log-sum-exp over all that is seen."""
    if _on_cpu(q, how):
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_heads_first(d_out, q, k, v, out),
            lse.T[None].contiguous(),
            0.0,
            block.causal,
            attn_mask=block.seen,
            scale=how.scale,
        )
        return tuple(x[0].transpose(0, 1) for x in grads)
    logits = _logits(q, k, block.seen, how=how)
    d_out, q, k, v, out = (x.to(logits.dtype) for x in (d_out, q, k, v, out))
    grouped = (k.shape[1], -1)
    weights = (logits - lse.T.unflatten(0, grouped).unsqueeze(-1)).exp()
    d_out_g = d_out.unflatten(1, grouped)
    q_g = q.unflatten(1, grouped)
    d_v = torch.einsum("kgts,tkgn->skn", weights, d_out_g)
    mean = (d_out * out).sum(-1).T.unflatten(0, grouped).unsqueeze(-1)
    d_logits = weights * (torch.einsum("tkgn,skn->kgts", d_out_g, v) - mean) * how.scale
    if how.cap:
        d_logits = d_logits * (1 - (logits.masked_fill(weights == 0, 0) / how.cap).square())
    d_q = torch.einsum("kgts,skn->tkgn", d_logits, k).flatten(1, 2)
    return d_q, torch.einsum("kgts,tkgn->skn", d_logits, q_g), d_v


def _on_cpu(q: Tensor, how: _How) -> bool:
    """True where torch's kernel for the CPU computes a block; else it is done by a whole matrix of weights."""
    return q.device.type == "cpu" and not how.cap


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(0, 1).unsqueeze(0) for x in tensors]


def _logits(q: Tensor, k: Tensor, seen: Tensor | None, how: _How) -> Tensor:
    """[K, H / K, t, s] in float32 or wider; -inf where a key is not seen."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q_g = q.to(wide).unflatten(1, (k.shape[1], -1))
    logits = torch.einsum("tkgn,skn->kgts", q_g, k.to(wide)) * how.scale
    logits = how.cap * torch.tanh(logits / how.cap) if how.cap else logits
    return logits if seen is None else logits.masked_fill(~seen, -torch.inf)
