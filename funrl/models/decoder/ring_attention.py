"""Attention over a packed row that is split over `sequence`, for any number of heads: keys and values go round a ring.

Inside, the row is in zigzag order. It has two halves for each rank, and of n ranks rank r works on halves r and
2n - 1 - r: on an early one, whose queries see few keys, and on a late one. So all ranks have the same work when a
sequence fills the row, at each step of the ring. The halves are exchanged before and after, since everything else
works on contiguous parts.

Queries see keys of their own half and of those before it. Each pair of halves is computed by itself, and the results
are merged by their log-sum-exp; going back, the gradients of keys and values travel with them until they are home.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl.autograd import AutogradFunction
from funrl.compiled_kernels.attention import add_sinks, sink_gradient
from funrl.compiled_kernels.exact.registration import operator
from funrl.compiled_kernels.flash_kernel import flash_kernel
from funrl.compiled_kernels.varlen_attention import is_for_flash, planned_segments
from funrl.mesh.collectives import exchange_rows, start_shift, wait
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

    A rank holds the keys and values of two parts at a time, and never the whole row's. On a GPU the host does not wait.
    There tensors of 16 bits go to the kernel of `flash_kernel`, except halves that a window joins and caps without a
    kernel for them; these and wider tensors are computed by matrices of weights, `_BLOCK` queries at a time.

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


class Half(NamedTuple):
    """Half of a rank's part of the row: its first token, and the number of its tokens."""

    first: int
    count: int

    @property
    def end(self) -> int:
        """The first token after it."""
        return self.first + self.count


class HalfPair(NamedTuple):
    """Queries of a half, and keys of one that they may see: 0 for a rank's early half, 1 for its late one."""

    query: int
    key: int


def ring_halves(rank: int, ranks: int, tokens: int) -> tuple[Half, Half]:
    """The early and the late half that a rank works on; `tokens` are those of a rank's part."""
    first_count = tokens - tokens // 2

    def half(number: int) -> Half:
        part, late = divmod(number, 2)
        return Half(part * tokens + late * first_count, tokens // 2 if late else first_count)

    return half(rank), half(2 * ranks - 1 - rank)


def half_pairs(queries: tuple[Half, Half], keys: tuple[Half, Half], window: int) -> list[HalfPair]:
    """The pairs of halves of two ranks of which queries may see keys; a window of 0 is none."""
    return [
        HalfPair(i, j)
        for i, query in enumerate(queries)
        for j, key in enumerate(keys)
        if key.first <= query.first and not 0 < window <= query.first - key.end + 1
    ]


class _Ring(AutogradFunction):
    @staticmethod
    def forward(q, k, v, offsets, sinks, place):
        mesh, options = place
        heads = (q.shape[1], k.shape[1], v.shape[1])
        q, k, v = (x.contiguous() for x in _to_zigzag(torch.cat((q, k, v), 1), mesh).split(heads, 1))
        own = _own_halves(len(q), mesh)
        joined = [_nothing(x) for x in _split(q, own)]
        for halves, (keys, values) in _parts(torch.stack((k, v)), mesh):
            for i, j in half_pairs(own, halves, options.window):
                rows = (_split(q, own)[i], _split(keys, halves)[j], _split(values, halves)[j])
                joined[i] = _joined(*joined[i], *_part(*rows, offsets, own[i].first, halves[j].first, *options))
        out, lse = (torch.cat(parts) for parts in zip(*joined, strict=True))
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        return _from_zigzag(out, mesh), out, lse, q, k, v

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, _, _, offsets, sinks, (ctx.mesh, ctx.how) = inputs
        ctx.save_for_backward(*output[1:], offsets, sinks)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx, d_out, *_):
        with torch.no_grad():
            out, lse, q, k, v, offsets, sinks = ctx.saved_tensors
            mesh = ctx.mesh
            own = _own_halves(len(q), mesh)
            d_out = _to_zigzag(d_out, mesh)
            d_q = torch.zeros_like(q, dtype=lse.dtype)
            grads = torch.zeros(2, *k.shape, dtype=lse.dtype, device=k.device)
            for halves, kv in _parts(torch.stack((k, v)), mesh):
                for i, j in half_pairs(own, halves, ctx.how.window):
                    d_rows, rows, outs, sums = (_split(x, own)[i] for x in (d_out, q, out, lse))
                    keys, values = (_split(x, halves)[j] for x in kv)
                    place = (offsets, own[i].first, halves[j].first, *ctx.how)
                    gradients = _part_backward(d_rows, rows, keys, values, outs, sums, *place)
                    _split(d_q, own)[i].add_(gradients[0])
                    for grad, more in zip(grads, gradients[1], strict=True):
                        _split(grad, halves)[j].add_(more)
                grads = wait(start_shift(grads, mesh, _AXIS)).view(grads.shape)  # after as many they are home
            d_sinks = None if sinks is None else sink_gradient(d_out, out, lse, sinks)
            together = torch.cat((d_q.to(q.dtype), *grads.to(k.dtype)), 1)
            d_qkv = _from_zigzag(together, mesh).split((q.shape[1], k.shape[1], v.shape[1]), 1)
        return *d_qkv, None, d_sinks, None


def _own_halves(tokens: int, mesh: Mesh) -> tuple[Half, Half]:
    return ring_halves(int(mesh.index(_AXIS)), mesh.size(_AXIS), tokens)


def _split(x: Tensor, halves: tuple[Half, Half]) -> tuple[Tensor, ...]:
    """The rows of each half."""
    return x.split([half.count for half in halves])


def _nothing(q: Tensor) -> tuple[Tensor, Tensor]:
    """The result of queries that see no key."""
    wide = _wide(q)
    return torch.zeros_like(q, dtype=wide), q.new_full(q.shape[:2], -torch.inf, dtype=wide)


def _to_zigzag(x: Tensor, mesh: Mesh) -> Tensor:
    """Rows of the two halves that this rank works on, from rows of its part of the row [t, ...]."""
    ranks = mesh.size(_AXIS)
    own = int(mesh.index(_AXIS))
    parts = list(x.split([len(x) - len(x) // 2, len(x) // 2]))
    counts = [(_worker(2 * own + i, ranks), len(part)) for i, part in enumerate(parts)]
    sent = torch.cat(parts[::-1] if 2 * own >= ranks else parts)  # in the order of the ranks that they go to
    arriving = [(half.first // len(x), half.count) for half in _own_halves(len(x), mesh)]
    return exchange_rows(sent, _by_rank(counts, ranks), _by_rank(arriving, ranks), mesh, _AXIS)


def _from_zigzag(x: Tensor, mesh: Mesh) -> Tensor:
    """The inverse of `_to_zigzag`."""
    ranks = mesh.size(_AXIS)
    own = int(mesh.index(_AXIS))
    counts = [len(x) - len(x) // 2, len(x) // 2]
    sent = [(half.first // len(x), half.count) for half in _own_halves(len(x), mesh)]
    arriving = [(_worker(2 * own + i, ranks), count) for i, count in enumerate(counts)]
    rows = exchange_rows(x.contiguous(), _by_rank(sent, ranks), _by_rank(arriving, ranks), mesh, _AXIS)
    return torch.cat(rows.split(counts[::-1])[::-1]) if 2 * own >= ranks else rows


def _worker(half: int, ranks: int) -> int:
    """The rank that works on a half, by its number."""
    return min(half, 2 * ranks - 1 - half)


def _by_rank(counts: list[tuple[int, int]], ranks: int) -> list[int]:
    """Sums of (rank, count) for each rank."""
    return [sum(count for rank, count in counts if rank == other) for other in range(ranks)]


def _parts(kv: Tensor, mesh: Mesh) -> Iterator[tuple[tuple[Half, Half], Tensor]]:
    """The halves of all ranks as they come by, the own ones first, and their keys and values.

    Args:
      kv: [2, t, K, N] keys and values of this rank.
    """
    ranks = mesh.size(_AXIS)
    own = int(mesh.index(_AXIS))
    for step in range(ranks):
        coming = start_shift(kv, mesh, _AXIS) if step + 1 < ranks else None
        yield ring_halves((own - step) % ranks, ranks, kv.shape[1]), kv
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
    place = _Place(offsets, Half(first, len(q)), Half(source, len(k)))
    if _by_flash(q, place, options):
        return _flash_forward(q, k, v, place, options)
    out, lse = _nothing(q)
    for block in _blocks(place, q, options):
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
    """Gradients of queries of one half, and of the keys and values of another: [2, t, K, N]."""
    options = _How(window, scale, cap)
    place = _Place(offsets, Half(first, len(q)), Half(source, len(k)))
    if _by_flash(q, place, options):
        return _flash_backward(d_out, q, k, v, out, lse, place, options)
    d_q = torch.zeros_like(q, dtype=lse.dtype)
    d_kv = torch.zeros(2, *k.shape, dtype=lse.dtype, device=k.device)
    for block in _blocks(place, q, options):
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


def seen_pairs(offsets: Tensor, queries: Half, keys: Half, window: int) -> int:
    """Number of pairs of a query of one half and a key of another that it sees; a window of 0 is none."""
    ends = offsets.numpy()
    positions = np.arange(queries.first, queries.end)
    positions = positions[positions < ends[-1]]
    low = np.maximum(ends[np.searchsorted(ends, positions, "right") - 1], keys.first)
    low = np.maximum(low, positions - window + 1) if window else low
    return int(np.clip(np.minimum(positions + 1, keys.end) - low, 0, None).sum())


def _wide(q: Tensor) -> torch.dtype:
    """The dtype of sums."""
    return torch.promote_types(q.dtype, torch.float32)


class _Place(NamedTuple):
    """Queries and keys of two halves, of which one is before the other or both are the same, and the row's offsets."""

    offsets: Tensor
    queries: Half
    keys: Half


def _blocks(place: _Place, q: Tensor, how: _How) -> Iterator[_Block]:
    """Blocks of the queries, with keys that they may see."""
    return _host_blocks(place, q, how.window) if _on_cpu(q, how) else _device_blocks(place, q, how.window)


def _device_blocks(place: _Place, q: Tensor, window: int) -> Iterator[_Block]:
    """Blocks whose sizes do not depend on where sequences begin; the device makes their masks, and nobody waits."""
    offsets, (first, count), keys = place
    positions = torch.arange(first, first + count, device=q.device)
    begins = offsets[torch.searchsorted(offsets, positions.to(offsets.dtype), right=True) - 1]
    for low in range(0, count, _BLOCK):
        rows = slice(low, min(low + _BLOCK, count))
        cols = slice(
            max(0, first + low - keys.first - window + 1) if window else 0,
            min(keys.count, first + rows.stop - keys.first),
        )
        if cols.start >= cols.stop:
            continue
        query = positions[rows, None]
        key = torch.arange(keys.first + cols.start, keys.first + cols.stop, device=q.device)
        seen = (key <= query) & (key >= begins[rows, None]) & (query < offsets[-1])
        yield _Block(rows, cols, seen & (key > query - window) if window else seen)


def _host_blocks(place: _Place, q: Tensor, window: int) -> Iterator[_Block]:
    """Blocks of single sequences, for torch's kernel: without a window all of a sequence is one block."""
    ends = place.offsets.numpy()
    first, count = place.queries
    source = place.keys.first
    sizes = None
    band = None
    here = (ends[1:] > first) & (ends[:-1] < first + count) & (ends[1:] > ends[:-1])
    for begin, end in zip(ends[:-1][here].tolist(), ends[1:][here].tolist(), strict=True):
        step = _BLOCK if window else count
        for low in range(max(begin, first), min(end, first + count), step):
            high = min(low + step, end, first + count)
            k_low = max(begin, source, low - window + 1 if window else 0)
            k_high = min(high, place.keys.end)
            if k_low >= k_high:
                continue
            high = min(high, k_high + window - 1) if window else high  # each of these queries sees some of the keys
            queries = slice(low - first, high - first)
            keys = slice(k_low - source, k_high - source)
            if not window:  # these keys are all before, or they are the queries' own
                yield _Block(queries, keys, None, k_high > low)
                continue
            seen = None
            if k_high > low + 1 or high - k_low > window:
                if sizes != (high - low, k_high - k_low, low - k_low):  # most blocks are of equal sizes
                    sizes = high - low, k_high - k_low, low - k_low
                    band = _band(*sizes, window, q.device)
                    band = torch.zeros_like(band, dtype=q.dtype).masked_fill(~band, -torch.inf)
                seen = band
            yield _Block(queries, keys, seen)


def _by_flash(q: Tensor, place: _Place, how: _How) -> bool:
    """True if the kernel for 16 bits computes a pair of halves: its windows are for queries beside their own keys."""
    own = place.queries == place.keys
    return q.is_cuda and is_for_flash(q, how.cap) and (own or not how.window)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, place: _Place, how: _How) -> tuple[Tensor, Tensor]:
    """Result and log-sum-exp by the kernel, whose lengths are on the device."""
    seeing, _ = _seeing(place)
    kernel = flash_kernel(how.cap > 0, q.shape[-1])
    rows, cols = _ends(place)
    out, lse, _ = kernel.forward(q, k, v, rows, max(len(q), len(k)), *how, keys=cols)
    out = out.to(_wide(q)).masked_fill(~seeing[:, None, None], 0)
    return out, lse.T.masked_fill(~seeing[:, None], -torch.inf)


def _flash_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, place: _Place, how: _How
) -> tuple[Tensor, Tensor]:
    """Gradients by the kernel, exact with the result and log-sum-exp over all that is seen."""
    seeing, seen = _seeing(place)
    kernel = flash_kernel(how.cap > 0, q.shape[-1])
    rows, cols = _ends(place)
    seed = q.new_zeros(2, dtype=torch.uint64)
    sizes = (rows, max(len(q), len(k)), how.window, seed, how.scale, how.cap)
    grads = kernel.backward(d_out.contiguous(), q, k, v, out, lse.T.contiguous(), *sizes, keys=cols)
    d_q, d_k, d_v = (
        x.to(lse.dtype).masked_fill(~used[:, None, None], 0)
        for x, used in zip(grads, (seeing, seen, seen), strict=True)
    )
    return d_q, torch.stack((d_k, d_v))


def _ends(place: _Place) -> tuple[Tensor, Tensor | None]:
    """Offsets of the sequences' queries and keys in the two halves; None: the keys are the queries' own."""
    offsets, queries, keys = place
    used, _ = planned_segments(offsets, 0)
    rows, cols = ((used.clamp(half.first, half.end) - half.first).int() for half in (queries, keys))
    return rows, None if queries == keys else cols


def _seeing(place: _Place) -> tuple[Tensor, Tensor]:
    """Bools of the queries that see a key of the other half, and of the keys that are seen."""
    offsets, queries, keys = place
    rows, cols = (torch.arange(half.first, half.end, device=offsets.device) for half in (queries, keys))
    query_segments, key_segments = (torch.searchsorted(offsets, x.to(offsets.dtype), right=True) for x in (rows, cols))
    seeing = (rows < offsets[-1]) & (offsets[query_segments - 1] < keys.end)
    # Of a key that is padding the number of the segment is one too large for the offsets.
    ends = offsets[key_segments.clamp(max=len(offsets) - 1)]
    return seeing, (cols < offsets[-1]) & (ends > queries.first)


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
    weights = _weights(logits, sums.unsqueeze(-1))
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
    weights = _weights(logits, lse.T.unflatten(0, grouped).unsqueeze(-1))
    d_out_g = d_out.unflatten(1, grouped)
    q_g = q.unflatten(1, grouped)
    d_v = torch.einsum("kgts,tkgn->skn", weights, d_out_g)
    mean = (d_out * out).sum(-1).T.unflatten(0, grouped).unsqueeze(-1)
    d_logits = weights * (torch.einsum("tkgn,skn->kgts", d_out_g, v) - mean) * how.scale
    if how.cap:
        d_logits = d_logits * (1 - (logits.masked_fill(weights == 0, 0) / how.cap).square())
    d_q = torch.einsum("kgts,skn->tkgn", d_logits, k).flatten(1, 2)
    return d_q, torch.einsum("kgts,tkgn->skn", d_logits, q_g), d_v


def _weights(logits: Tensor, sums: Tensor) -> Tensor:
    """Weights by the log-sum-exp of all logits; 0 for a query that sees nothing, whose sum is -inf."""
    return (logits - sums.masked_fill(sums == -torch.inf, 0)).exp()


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
