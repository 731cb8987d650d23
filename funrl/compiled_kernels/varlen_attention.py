"""Causal attention over sequences that stand end to end in one row, in memory linear in the row.

One opaque operator for every device: eager mode, `torch.func`, `torch.compile(fullgraph=True)` and the rank simulator
take it, and no graph depends on where sequences begin, for that is data and not shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from funrl.autograd import AutogradFunction
from funrl.compiled_kernels.attention import (
    add_sinks,
    attention,
    attention_gradients,
    attention_reference,
    sink_gradient,
)
from funrl.compiled_kernels.blockwise_attention import STATIC_FORMS
from funrl.compiled_kernels.exact.dispatch import computes_exactly, is_aligned
from funrl.compiled_kernels.exact.registration import operator
from funrl.compiled_kernels.flash_kernel import FLASH_HEAD, flash_kernel
from funrl.compiled_kernels.kernel_library import KernelError
from funrl.compiled_kernels.mutual_attention import add_later, later_gradients, mutual_mask
from funrl.compiled_kernels.packed import AttentionOptions, sequence_attention

# A packet of overloads would look for the one that fits in each call.
_attention_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_BLOCK = 256  # queries at a time where a window is shorter than a segment, or by a matrix of weights
_KNOWN = WeakTensorKeyDictionary()  # offsets -> their version and runs
_BOUNDS = WeakTensorKeyDictionary()  # offsets -> their `SegmentBounds`
_MATRIX_TOKENS = 4096  # of short segments that are computed together by a whole matrix of weights


class SegmentBounds(NamedTuple):
    """Bounds of the segments of a packed row, which the host knows without waiting for the device.

    Attributes:
      longest: no segment has more tokens.
      segments: number of segments after which all others are empty.
      tokens: the last offset; None: the host does not know it.
    """

    longest: int
    segments: int
    tokens: int | None = None


def varlen_attention(
    q_1THN: Tensor,
    k_1TKN: Tensor,
    v_1TKN: Tensor,
    offsets: Tensor,
    window: int | None = None,
    longest: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    blockwise: bool | Literal["kernel"] = False,
    sinks_H: Tensor | None = None,
    mutual_RM: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T) v, where a token sees itself and the tokens before it in its own segment.

    On CPU each segment is computed by itself, so its numbers do not depend on what else is in the row; by the function
    of the decoding step, so they have its bits. On CUDA and ROCm 16-bit tensors go to the kernel of `flash_kernel`;
    wider ones, heads above 256 and capped ones without a kernel go segment by segment. On XLA: `blockwise_attention`.

    Args:
      q_1THN: queries of a packed row of T tokens.
      k_1TKN, v_1TKN: keys and values; K divides H, query head h uses key-value head h // (H / K).
      offsets: [S + 1] int32 on the device of q, ascending from 0: segment s is the tokens offsets[s] to offsets[s + 1].
        Segments may be empty. Tokens after the last offset are padding: their output and gradients are 0.
      window: how many tokens a token sees at most, itself included; None: all of its segment.
      longest: a bound on the tokens of a segment that the CUDA kernels plan with; None: that of `bound_segments`, and
        without one T, which is slower.
      scale: None: 1 / sqrt(N).
      cap: logits x become cap tanh(x / cap) before the softmax; None: they stay.
      blockwise: compute it as on XLA on every device, for programs that are traced; "kernel": by `kernel_attention`.
      sinks_H: logit of each head of a further key, which every token sees and whose value is 0.
      mutual_RM: int64, tokens of groups within segments that see later ones of their group too. The whole matrix of
        weights is made where wide tensors on CUDA have sinks or groups, and for groups with a cap.

    Raises:
      KernelError: there are sinks or groups on XLA, or a cap or groups beside sinks.

    Returns: [1, T, H, N] in the dtype of q; differentiable once.
    """
    blockwise = blockwise or q_1THN.device.type == "xla"
    if sinks_H is not None and (blockwise or cap):
        raise KernelError("attention sinks have no form for XLA, and none with capped logits")
    if mutual_RM is not None and (blockwise or sinks_H is not None):
        raise KernelError("attention to later tokens has no form for XLA, and none with sinks")
    no_sums = q_1THN.is_cuda and not is_for_flash(q_1THN, 0.0)  # of weights
    if (sinks_H is not None and no_sums) or (mutual_RM is not None and (cap or no_sums)):
        seen_1TT = _seen(offsets, q_1THN.shape[1], window, mutual_RM)
        out_1THN = attention(q_1THN, k_1TKN, v_1TKN, seen_1TT, scale=scale, cap=cap or None, sinks_H=sinks_H)
        return _without_padding(out_1THN[0], offsets).unsqueeze(0)
    if blockwise:
        return STATIC_FORMS[blockwise](q_1THN, k_1TKN, v_1TKN, offsets, window, longest=longest, scale=scale, cap=cap)
    tensors = (q_1THN[0], k_1TKN[0], v_1TKN[0], offsets, sinks_H, mutual_RM)
    numbers = (window or 0, longest or q_1THN.shape[1], scale or 0.0, cap or 0.0)
    return _VarlenAttention.apply(*tensors, *numbers)[0].unsqueeze(0)


def varlen_attention_reference(
    q_1THN: Tensor,
    k_1TKN: Tensor,
    v_1TKN: Tensor,
    offsets: Tensor,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks_H: Tensor | None = None,
    mutual_RM: Tensor | None = None,
) -> Tensor:
    """`varlen_attention` with the whole matrix of weights of each segment."""
    outs = []
    groups = mutual_mask(offsets.new_zeros(0, 1).long() if mutual_RM is None else mutual_RM, q_1THN.shape[1])
    for begin, end in itertools.pairwise(offsets.tolist()):
        part = slice(begin, end)
        q, k, v = (x[:, part] for x in (q_1THN, k_1TKN, v_1TKN))
        seen = torch.ones(1, q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril() | groups[part, part]
        seen = seen if window is None else seen.triu(1 - window)
        outs.append(attention_reference(q, k, v, seen, scale=scale, cap=cap, sinks_H=sinks_H))
    padding = q_1THN.new_zeros(1, q_1THN.shape[1] - int(offsets[-1]), *q_1THN.shape[2:])
    return torch.cat([*outs, padding], 1)


def segment_offsets(segments_1T: Tensor, count: int) -> Tensor:
    """Offsets of segments, from their numbers, without a wait for the device.

    Args:
      segments_1T: 1, 2, ... ascending in runs, a number may be missing; 0 is padding, after all of them.
      count: the largest number that may occur.

    Returns: [count + 1] int32, as `varlen_attention` takes them.

    Example: segment_offsets(torch.tensor([[1, 1, 3, 0]]), 4) is [0, 2, 2, 3, 3].
    """
    segments = segments_1T[0]
    tokens = segments.new_zeros(count + 1, dtype=torch.int32).scatter_add(0, segments.long(), (segments > 0).int())
    return tokens.cumsum(0, dtype=torch.int32)


def bound_segments(offsets: Tensor, bounds: SegmentBounds) -> Tensor:
    """Attach to offsets what the host knows of them, and return them.

    Kernels on a GPU plan blocks and workspace for every segment, empty or not, as if it were as long as the longest. So
    they receive offsets of used segments only, in few sizes. Bounds hold until offsets change; a copy has none.
    """
    _BOUNDS[offsets] = bounds
    return offsets


def segment_bounds(offsets: Tensor) -> SegmentBounds | None:
    """Bounds that `bound_segments` has attached to offsets; None: there are none."""
    return _BOUNDS.get(offsets)


def planned_segments(offsets: Tensor, longest: int) -> tuple[Tensor, int]:
    """Offsets of a power of two of segments, among them all used ones, and a bound on the tokens of a segment.

    Args:
      offsets: [S + 1]; without bounds of `bound_segments` all of them are returned.
      longest: a bound that is known otherwise.
    """
    bounds = segment_bounds(offsets)
    if bounds is None:
        return offsets, longest
    segments = 1 << max(bounds.segments - 1, 0).bit_length()
    return offsets[: segments + 1], min(longest, bounds.longest)


def _runs(offsets: Tensor) -> list[tuple[int, int, int]]:
    """Neighbouring segments of one length, less empty ones: their first token, their number and their length.

    The host waits for the device once, and not in each layer and direction again.
    """
    version = 0 if offsets.is_inference() else offsets._version
    known = _KNOWN.get(offsets)
    if known is None or known[0] != version:
        ends = offsets.cpu().numpy()
        lengths = np.diff(ends)
        begins = ends[:-1][lengths > 0]
        lengths = lengths[lengths > 0]
        first = np.flatnonzero(np.diff(lengths, prepend=0))
        counts = np.diff(first, append=len(lengths))
        runs = list(zip(begins[first].tolist(), counts.tolist(), lengths[first].tolist(), strict=True))
        known = _KNOWN[offsets] = (version, runs)
    return known[1]


# Flat arguments here, in kernels and in fakes: torch.library takes tensors and numbers, no records.
@operator("funrl::varlen_attention", device_types="cpu")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    window: int,
    longest: int,
    scale: float = 0.0,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    if computes_exactly(q, k, v):
        sums = sequence_attention(q, k, v, offsets, AttentionOptions(window, scale, cap))
        return *sums, q.new_empty(0, dtype=torch.uint64)
    if cap:
        return _forward_by_matrix(q, k, v, offsets, window, scale, cap)
    out = torch.zeros_like(q)
    lse = q.new_zeros(q.shape[1], q.shape[0], dtype=_wide(q))
    for block in _blocks(offsets, window, q):
        values, sums = _attention_forward(
            *_heads_first(block, q, k, v), 0.0, block.band is None, attn_mask=block.band, scale=scale or None
        )
        out[block.queries] = _tokens_first(values)
        lse[:, block.queries] = sums.transpose(0, 1).flatten(1)
    return out, lse, q.new_empty(0, dtype=torch.uint64)


@operator("funrl::varlen_attention_backward", device_types="cpu")
def _backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets: Tensor,
    window: int,
    longest: int,
    generator: Tensor,
    scale: float = 0.0,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    if cap:
        return _backward_by_matrix(d_out, q, k, v, offsets, window, scale, cap)
    blocks = list(_blocks(offsets, window, q))
    if len(blocks) == 1 and blocks[0].queries == slice(0, len(q)):  # there is nothing to add to, and no padding
        d_q, d_k, d_v = _block_gradients(blocks[0], d_out, q, k, v, out, lse, scale)
        return _in_layout(d_q, q), _in_layout(d_k, k), _in_layout(d_v, v)
    d_q, d_k, d_v = (torch.zeros_like(x) for x in (q, k, v))
    for block in blocks:
        grads = _block_gradients(block, d_out, q, k, v, out, lse, scale)
        d_q[block.queries] = grads[0]
        for whole, part in ((d_k, grads[1]), (d_v, grads[2])):
            # Keys within a window are seen by the queries of several blocks.
            whole[block.keys] = part if block.band is None else whole[block.keys] + part
    return d_q, d_k, d_v


@_forward.register_kernel("cuda")
def _forward_cuda(q, k, v, offsets, window, longest, scale=0.0, cap=0.0):
    if is_aligned(q) and computes_exactly(q, k, v):  # not the C++ functions of a CPU
        used, _ = planned_segments(offsets, longest)
        sums = sequence_attention(q, k, v, used, AttentionOptions(window, scale, cap))
        return *sums, q.new_zeros(2 if is_for_flash(q, cap) else 0, dtype=torch.uint64)
    if not is_for_flash(q, cap):
        return _forward_by_matrix(q, k, v, offsets, window, scale, cap)
    used, longest = planned_segments(offsets, longest)
    kernel = flash_kernel(cap > 0, q.shape[-1])
    out, lse, generator = kernel.forward(q, k, v, used, longest, window, scale, cap)
    return _zero_padding(out, offsets), lse, generator


@_backward.register_kernel("cuda")
def _backward_cuda(d_out, q, k, v, out, lse, offsets, window, longest, generator, scale=0.0, cap=0.0):
    if not is_for_flash(q, cap):
        return _backward_by_matrix(d_out, q, k, v, offsets, window, scale, cap)
    d_out = d_out.contiguous()
    used, longest = planned_segments(offsets, longest)
    kernel = flash_kernel(cap > 0, q.shape[-1])
    grads = kernel.backward(d_out, q, k, v, out, lse, used, longest, window, generator, scale, cap)
    return tuple(_zero_padding(grad, offsets) for grad in grads)


def is_for_flash(q: Tensor, cap: float) -> bool:
    """True if a tensor on a GPU goes to the kernel of `flash_kernel`."""
    return q.element_size() == 2 and q.shape[-1] <= FLASH_HEAD and (not cap or flash_kernel(True, q.shape[-1]).caps)


def _forward_by_matrix(q, k, v, offsets, window, scale, cap):
    out = torch.zeros_like(q)
    for block in _blocks(offsets, window, q, cap > 0):
        out[block.queries] = _by_matrix(q[block.queries], k[block.keys], v[block.keys], block, scale, cap)
    return out, q.new_zeros(q.shape[1], q.shape[0], dtype=_wide(q)), q.new_empty(0, dtype=torch.uint64)


def _backward_by_matrix(d_out, q, k, v, offsets, window, scale, cap):
    d_q, d_k, d_v = (torch.zeros_like(x) for x in (q, k, v))
    for block in _blocks(offsets, window, q, True):
        d_part, q_part = (x[block.queries].unflatten(0, (block.count, -1)) for x in (d_out, q))
        k_part, v_part = (x[block.keys].unflatten(0, (block.count, -1)) for x in (k, v))
        grads = attention_gradients(
            d_part, q_part, k_part, v_part, block.seen, scale or q.shape[-1] ** -0.5, cap or None
        )
        d_q[block.queries] = grads[0].flatten(0, 1)
        d_k[block.keys] += grads[1].flatten(0, 1)
        d_v[block.keys] += grads[2].flatten(0, 1)
    return d_q, d_k, d_v


@_forward.register_fake
def _(q, k, v, offsets, window, longest, scale=0.0, cap=0.0):
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=_wide(q))
    seed = 2 if q.device.type == "cuda" and is_for_flash(q, cap) else 0
    return torch.empty_like(q), lse, q.new_empty(seed, dtype=torch.uint64)


@_backward.register_fake
def _(d_out, q, k, v, out, lse, offsets, window, longest, generator, scale=0.0, cap=0.0):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _VarlenAttention(AutogradFunction):
    """Not `register_autograd`: `torch.func` refuses what that makes."""

    @staticmethod
    def forward(q, k, v, offsets, sinks, mutual, window, longest, scale, cap):
        out, lse, generator = _forward(q, k, v, offsets, window, longest, scale, cap)
        if mutual is not None:
            out, lse = add_later((q, k, v), out, lse, mutual, scale)
        if sinks is None:
            return out, lse, generator
        out, total = add_sinks(out, lse.T, sinks)
        return out, total.T.contiguous(), generator

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.window, ctx.longest, *ctx.logits = inputs[6:]
        ctx.save_for_backward(*inputs[:6], *output)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx, d_out, *_):
        q, k, v, offsets, sinks, mutual, out, lse, generator = ctx.saved_tensors
        with torch.no_grad():
            grads = _backward(d_out, q, k, v, out, lse, offsets, ctx.window, ctx.longest, generator, *ctx.logits)
            if mutual is not None:
                more = later_gradients(d_out, (q, k, v), out, lse, mutual, ctx.logits[0])
                grads = tuple(x + y for x, y in zip(grads, more, strict=True))
            d_sinks = None if sinks is None else sink_gradient(d_out, out, lse.T, sinks)
        return *grads, None, d_sinks, *(None,) * 5


class _Block(NamedTuple):
    """Queries and the keys that they see: of `count` segments of one length, which are a batch, or of part of one.

    Attributes:
      band: a mask of 0 and -inf between queries and keys; None: there are as many, and they are seen causally.
    """

    queries: slice
    keys: slice
    count: int
    band: Tensor | None

    @property
    def seen(self) -> Tensor | None:
        """The mask as `attention` takes it."""
        return None if self.band is None else (self.band == 0).unsqueeze(0)


def _blocks(offsets: Tensor, window: int, q: Tensor, small: bool = False) -> Iterator[_Block]:
    """All queries: neighbouring segments of one length together, `_BLOCK` of them where the window is shorter.

    Args:
      small: because the whole matrix of weights of each block is made.
    """
    for start, count, length in _runs(offsets):
        if not 0 < window < length and (not small or length <= _BLOCK):
            most = max(1, _MATRIX_TOKENS // length) if small else count
            for first in range(0, count, most):
                some = min(most, count - first)
                whole = slice(start + first * length, start + (first + some) * length)
                yield _Block(whole, whole, some, None)
            continue
        reach = window or length
        sizes = band = None
        for segment in range(start, start + count * length, length):
            for begin in range(segment, segment + length, _BLOCK):
                end = min(begin + _BLOCK, segment + length)
                first = max(segment, begin - reach + 1)
                if sizes != (end - begin, end - first):  # all blocks but the first and the last have the same
                    sizes = (end - begin, end - first)
                    band = _band(*sizes, reach, q)
                yield _Block(slice(begin, end), slice(first, end), 1, band)


def _band(queries: int, keys: int, reach: int, q: Tensor) -> Tensor:
    """0 where the last of these tokens, as queries, see the keys, which are all of them; -inf elsewhere."""
    places = torch.arange(keys, device=q.device)
    distance = places[keys - queries :, None] - places
    return torch.zeros_like(distance, dtype=q.dtype).masked_fill_((distance < 0) | (distance >= reach), -torch.inf)


def _block_gradients(
    block: _Block, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries of a block, and of the keys and values that they see, [tokens, heads, N] each."""
    d_out_part, out_part = (_segments_of(x, block.queries, block.count) for x in (d_out, out))
    sums = lse[:, block.queries].view(len(lse), block.count, -1).transpose(0, 1).contiguous()
    d_q, d_k, d_v = _attention_backward(
        d_out_part.contiguous(),
        *_heads_first(block, q, k, v),
        out_part,
        sums,
        0.0,
        block.band is None,
        attn_mask=block.band,
        scale=scale or None,
    )
    return _tokens_first(d_q), _tokens_first(d_k), _tokens_first(d_v)


def _in_layout(x: Tensor, like: Tensor) -> Tensor:
    """x with the strides of a tensor of its shape."""
    return x if x.stride() == like.stride() else torch.empty_like(like).copy_(x)


def _segments_of(x_THN: Tensor, part: slice, count: int) -> Tensor:
    """Part of a row, which is `count` segments, as [count, H, tokens, N]."""
    x_THN = x_THN[part]
    return x_THN.view(count, -1, *x_THN.shape[1:]).transpose(1, 2)


def _tokens_first(x: Tensor) -> Tensor:
    """The inverse of `_segments_of`."""
    return x.transpose(1, 2).flatten(0, 1)


def _heads_first(block: _Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a block, each [count, heads, tokens, N]."""
    keys, values = (_segments_of(x, block.keys, block.count) for x in (k, v))
    return _segments_of(q, block.queries, block.count), keys, values


def _by_matrix(q: Tensor, k: Tensor, v: Tensor, block: _Block, scale: float, cap: float) -> Tensor:
    """Attention of the block of tokens q, k and v by torch's own function; capped, by a whole matrix."""
    if cap:
        q, k, v = (x.unflatten(0, (block.count, -1)) for x in (q, k, v))
        return attention(q, k, v, block.seen, block.band is None, scale or None, cap).flatten(0, 1)
    queries, keys, values = _heads_first(block._replace(queries=slice(None), keys=slice(None)), q, k, v)
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (keys, values))
    causal = block.band is None
    out = F.scaled_dot_product_attention(queries, keys, values, block.band, is_causal=causal, scale=scale or None)
    return _tokens_first(out)


def _zero_padding(x: Tensor, offsets: Tensor) -> Tensor:
    """Zero the rows after the last offset in place: only these where the host knows it."""
    bounds = segment_bounds(offsets)
    if bounds is None or bounds.tokens is None:
        return _without_padding(x, offsets)
    x[bounds.tokens :].zero_()
    return x


def _without_padding(x: Tensor, offsets: Tensor) -> Tensor:
    """A copy with zeros after the last offset, where kernels leave undefined values."""
    return x.masked_fill((torch.arange(len(x), device=x.device) >= offsets[-1])[:, None, None], 0)


def _seen(offsets: Tensor, tokens: int, window: int | None, mutual_RM: Tensor | None = None) -> Tensor:
    """Bool [1, T, T]: the tokens that each token sees; padding sees padding."""
    places = torch.arange(tokens, device=offsets.device)
    segments = torch.searchsorted(offsets.long(), places, right=True)
    distance = places[:, None] - places
    seen = distance >= 0 if mutual_RM is None else (distance >= 0) | mutual_mask(mutual_RM, tokens)
    seen &= segments[:, None] == segments
    return (seen if window is None else seen & (distance < window)).unsqueeze(0)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
