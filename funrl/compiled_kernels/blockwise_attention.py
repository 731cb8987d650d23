"""Causal attention over sequences that stand end to end in one row, by operators of torch's core and static shapes.

The form for XLA, which has no kernel to call and takes no shape that depends on numbers. The row is cut into blocks.
One step computes a diagonal of the matrix of blocks: the queries of every block with the keys of the block so many
before it, all in one batched product; the results are merged step by step as those of a softmax over more and more
keys. The steps are the same for all numbers: where sequences begin and end is a mask. What a step makes is T times a
block, so memory is linear in the row, and with a window the number of steps does not depend on the row at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl.autograd import AutogradFunction
from funrl.compiled_kernels.exact.registration import operator

BLOCK_TOKENS = 512  # tokens
LEAST_HEAD = 64  # numbers of a head for a kernel, which fills heads up to 128


def blockwise_attention(
    q_1THN: Tensor,
    k_1TKN: Tensor,
    v_1TKN: Tensor,
    offsets: Tensor,
    window: int | None = None,
    longest: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    block: int = BLOCK_TOKENS,
) -> Tensor:
    """`varlen_attention` in the form for XLA.

    Args:
      q_1THN, k_1TKN, v_1TKN, offsets, window, scale, cap: as there.
      longest: a bound on the tokens of a segment: blocks farther apart are not compared. None: T.
      block: tokens of a block.

    Returns: [1, T, H, N]; differentiable once.

    References: Dao et al., 2022, https://arxiv.org/abs/2205.14135; Rabe and Staats, 2021,
      https://arxiv.org/abs/2112.05682
    """
    T, _, N = q_1THN.shape[1:]
    options = _Options(min(block, T), window or T, min(longest or T, window or T, T), scale or N**-0.5, cap or 0.0)
    return _Blockwise.apply(q_1THN[0], k_1TKN[0], v_1TKN[0], offsets, options)[0].unsqueeze(0)


class _Options(NamedTuple):
    """Options of a call.

    Attributes:
      block: tokens of a block.
      window: tokens that a token sees at most.
      reach: how many tokens back a token sees at most, itself included.
      scale, cap: of the logits; a cap of 0 is none.
    """

    block: int
    window: int
    reach: int
    scale: float
    cap: float

    def diagonals(self, blocks: int) -> range:
        """Distances of blocks where a query sees a key of the other block, the largest first."""
        return range(min(blocks - 1, (self.reach + self.block - 2) // self.block), -1, -1)


class _Softmax(NamedTuple):
    """Softmax over some of the keys: the largest logit, the sum of the weights relative to it, and their sum of values.

    Rows are [blocks, K, block H / K], the queries of the heads that share a key-value head together.
    """

    top: Tensor
    total: Tensor
    out: Tensor  # with a dim N more


class _Blockwise(AutogradFunction):
    """(result [T, H, N], log-sum-exp by block)."""

    @staticmethod
    def forward(q, k, v, offsets, options):
        q_b, k_b, v_b = _blocks((q, k, v), k.shape[1], options)
        low = _first_seen(offsets, q, k.shape[1], options)
        total: _Softmax | None = None
        for distance in options.diagonals(len(q_b)):
            queries = slice(distance, None)
            keys = slice(0, len(q_b) - distance)
            logits, seen = _logits(q_b[queries], k_b[keys], low[queries], distance, options)
            part = _softmax_part(torch.where(seen, logits, -math.inf), v_b[keys])
            total = part if total is None else _merged(_led(total, len(part.top)), part)
        assert total is not None  # a block sees itself
        out = torch.where(_real(offsets, q), _tokens(total.out / total.total.unsqueeze(-1), q), 0)
        return out, total.top + total.total.log()

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, offsets, ctx.options = inputs
        ctx.save_for_backward(q, k, v, offsets, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, d_out, _):
        q, k, v, offsets, out, lse = ctx.saved_tensors
        with torch.no_grad():
            return *_backward((q, k, v), offsets, (out, lse), d_out, ctx.options), None, None


def _backward(
    inputs: tuple[Tensor, Tensor, Tensor],
    offsets: Tensor,
    saved: tuple[Tensor, Tensor],
    d_out: Tensor,
    options: _Options,
) -> tuple[Tensor, ...]:
    """Gradients by queries, keys and values, which are `inputs`, of the result and the log-sum-exp in `saved`."""
    q = inputs[0]
    kv_heads = inputs[1].shape[1]
    out, lse = saved
    d_out = torch.where(_real(offsets, q), d_out, 0)
    mean = (d_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1, keepdim=True)
    q_b, k_b, v_b, d_b, mean_b = _blocks((*inputs, d_out, mean), kv_heads, options)
    low = _first_seen(offsets, q, kv_heads, options)
    sums = _gradients(q_b, k_b, v_b, d_b, mean_b, lse, low, options)
    return tuple(_tokens(x, like) for x, like in zip(sums, inputs, strict=True))


def kernel_attention(
    q_1THN: Tensor, k_1TKN: Tensor, v_1TKN: Tensor, offsets: Tensor, window: int | None = None, **options: Any
) -> Tensor:
    """`blockwise_attention` as one operator, which a program for a TPU computes by a kernel of Pallas.

    In float64, which the kernel does not take, and of heads below `LEAST_HEAD`, it is not one.

    Args:
      q_1THN, k_1TKN, v_1TKN, offsets, window: as there.
      options: `longest`, `scale` and `cap`, as there.
    """
    if q_1THN.dtype == torch.float64 or q_1THN.shape[-1] < LEAST_HEAD:
        return blockwise_attention(q_1THN, k_1TKN, v_1TKN, offsets, window, **options)
    numbers = [window or 0, options.get("scale") or q_1THN.shape[-1] ** -0.5, options.get("cap") or 0.0]
    return _SegmentAttention.apply(q_1THN[0], k_1TKN[0], v_1TKN[0], offsets, numbers).unsqueeze(0)


# By what `varlen_attention` is given as `blockwise`.
STATIC_FORMS: Mapping[bool | str, Callable[..., Tensor]] = {True: blockwise_attention, "kernel": kernel_attention}


def _of_segments(q: Tensor, numbers: Sequence[float]) -> _Options:
    T = len(q)
    window = int(numbers[0]) or T
    return _Options(min(BLOCK_TOKENS, T), window, min(window, T), *numbers[1:])


# `numbers` are window, scale and cap: torch.library takes tensors and numbers, no records.
@operator("funrl::segment_attention")
def _segment_attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, numbers: Sequence[float]) -> Tensor:
    return _Blockwise.forward(q, k, v, offsets, _of_segments(q, numbers))[0]


@_segment_attention.register_fake
def _(q, k, v, offsets, numbers):
    return torch.empty_like(q)


@operator("funrl::segment_attention_backward")
def _segment_attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, numbers: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor]:
    options = _of_segments(q, numbers)
    saved = _Blockwise.forward(q, k, v, offsets, options)
    d_q, d_k, d_v = _backward((q, k, v), offsets, saved, d_out, options)
    return d_q, d_k, d_v


@_segment_attention_backward.register_fake
def _(d_out, q, k, v, offsets, numbers):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _SegmentAttention(AutogradFunction):
    """The operator with its gradient; its backward pass computes the weights again, and nothing else is saved."""

    @staticmethod
    def forward(q, k, v, offsets, numbers):
        return _segment_attention(q, k, v, offsets, numbers)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:4])
        ctx.numbers = inputs[4]

    @staticmethod
    def backward(ctx, d_out):
        with torch.no_grad():
            grads = _segment_attention_backward(d_out, *ctx.saved_tensors, ctx.numbers)
        return *grads, None, None


def _gradients(q_b, k_b, v_b, d_b, mean, lse, low, options: _Options) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by queries, keys and values, in blocks; exact with `lse`, which is over all keys.

    Args:
      d_b: the gradient of the result.
      mean: its sum over a token's dims, times the result.
    """
    d_q, d_k, d_v = (x[:0] for x in (q_b, k_b, v_b))
    for distance in options.diagonals(len(q_b)):
        queries = slice(distance, None)
        keys = slice(0, len(q_b) - distance)
        logits, seen = _logits(q_b[queries], k_b[keys], low[queries], distance, options)
        weights = torch.where(seen, (logits - lse[queries].unsqueeze(-1)).exp(), 0)
        d_logits = weights * (torch.matmul(d_b[queries], v_b[keys].mT) - mean[queries]) * options.scale
        if options.cap:
            d_logits = d_logits * (1 - (logits / options.cap).square())
        # Of farther blocks there are fewer: queries of the last, keys of the first.
        count = len(logits)
        d_q = _pad(d_q, count, True) + torch.matmul(d_logits, k_b[keys])
        d_k = _pad(d_k, count, False) + torch.matmul(d_logits.mT, q_b[queries])
        d_v = _pad(d_v, count, False) + torch.matmul(weights.mT, d_b[queries])
    return d_q, d_k, d_v


def _softmax_part(logits: Tensor, v_b: Tensor) -> _Softmax:
    """Softmax over the keys of one diagonal; logits are -inf where a key is not seen, which may be everywhere."""
    top = logits.amax(-1).clamp(min=torch.finfo(logits.dtype).min)
    weights = (logits - top.unsqueeze(-1)).exp()
    return _Softmax(top, weights.sum(-1), torch.matmul(weights.to(v_b.dtype), v_b).to(logits.dtype))


def _merged(first: _Softmax, second: _Softmax) -> _Softmax:
    """Softmax over the keys of both."""
    top = torch.maximum(first.top, second.top)
    scale_1 = (first.top - top).exp()
    scale_2 = (second.top - top).exp()
    out = first.out * scale_1.unsqueeze(-1) + second.out * scale_2.unsqueeze(-1)
    return _Softmax(top, first.total * scale_1 + second.total * scale_2, out)


def _led(part: _Softmax, blocks: int) -> _Softmax:
    """The same after blocks that have seen nothing yet, `blocks` of them in all."""
    nothing = torch.finfo(part.top.dtype).min
    return _Softmax(_pad(part.top, blocks, True, nothing), *(_pad(x, blocks, True) for x in part[1:]))


def _pad(x: Tensor, blocks: int, front: bool, value: float = 0.0) -> Tensor:
    """As many blocks, the new ones before or after them."""
    more = blocks - x.shape[0]
    return F.pad(x, (*(0, 0) * (x.ndim - 1), *((more, 0) if front else (0, more))), value=value)


def _logits(q_b: Tensor, k_b: Tensor, low: Tensor, distance: int, options: _Options) -> tuple[Tensor, Tensor]:
    """Logits [blocks, K, block H / K, block], and which of the keys are seen.

    Args:
      low: of `_first_seen`.
      distance: how many blocks the keys stand before the queries.
    """
    logits = torch.matmul(q_b, k_b.mT) * options.scale
    if options.cap:
        logits = torch.tanh(logits / options.cap) * options.cap
    places = torch.arange(options.block, device=q_b.device)
    seen = places - distance * options.block >= low
    return logits, seen if distance else seen & (places <= _of_heads(places, q_b.shape[2] // options.block))


def _first_seen(offsets: Tensor, q: Tensor, kv_heads: int, options: _Options) -> Tensor:
    """The first token that each query sees, counted from the first of its block: [blocks, 1, block H / K, 1].

    Padding sees itself.
    """
    T, heads = q.shape[:2]
    places = torch.arange(T + -T % options.block, device=q.device)
    ends = offsets[1:].long()
    ended = torch.zeros(len(places) + 1, dtype=torch.int64, device=q.device).scatter_add(0, ends, torch.ones_like(ends))
    begins = torch.where(places < offsets[-1], offsets.long()[ended.cumsum(0)[:-1]], places)
    low = torch.maximum(begins, places - options.window + 1).view(-1, options.block)
    return _of_heads(low - places[:: options.block, None], heads // kv_heads).unsqueeze(1)


def _real(offsets: Tensor, q: Tensor) -> Tensor:
    """[T, 1, 1]: false at padding."""
    return (torch.arange(q.shape[0], device=q.device) < offsets[-1])[:, None, None]


def _blocks(tensors: tuple[Tensor, ...], kv_heads: int, options: _Options) -> list[Tensor]:
    """[blocks, K, block H / K, N] each, in float32 or wider: heads that share keys are as good as tokens."""

    def blocks(x_THN: Tensor) -> Tensor:
        wide = x_THN.to(torch.promote_types(x_THN.dtype, torch.float32))
        padded = F.pad(wide, (0, 0, 0, 0, 0, -x_THN.shape[0] % options.block))
        return padded.unflatten(0, (-1, options.block)).unflatten(2, (kv_heads, -1)).transpose(1, 2).flatten(2, 3)

    return [blocks(x) for x in tensors]


def _tokens(x_b: Tensor, like_THN: Tensor) -> Tensor:
    """The inverse of `_blocks`, in the shape and dtype of `like`."""
    T, H, N = like_THN.shape
    x = x_b.unflatten(2, (-1, H // x_b.shape[1])).transpose(1, 2).reshape(-1, H, N)[:T]
    return x.to(like_THN.dtype)


def _of_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat [..., block] values per token for heads that share a key-value head: [..., block heads, 1]."""
    return x.unsqueeze(-1).expand(*x.shape, heads).reshape(*x.shape[:-1], -1, 1)
