"""Intermediate results of one layer of the decoding step, written by its own C++ code."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from funrl.compiled_kernels.packed import LANES, round_up


class StepTrace(NamedTuple):
    """Results of passes over N tokens, each in place of those of the last, in the dtype of logits.

    A head, D and F are padded to whole lanes; what is beyond means nothing.

    Attributes:
      layer: whose results these are, but for `stream` and `norm`.
      stream: residual stream after each layer, [layers, N, D].
      attn_norm, mlp_norm: results of the norms before the halves of the layer, [N, D].
      heads: queries, keys and values, [N, H + 2 K, head].
      normed, turned: queries and keys after their norms and after their rotation, [N, H + K, head].
      attention: results of the heads, [N, H, head].
      output, down: what the halves add to the stream, [N, D].
      middle: the stream between the halves, [N, D].
      gate, up, inner: two products, and the one of both, [N, F].
      norm: hidden states of the tokens whose logits are wanted, after the last norm, [N, D].
    """

    layer: int
    stream: Tensor
    attn_norm: Tensor
    heads: Tensor
    normed: Tensor
    turned: Tensor
    attention: Tensor
    output: Tensor
    middle: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    inner: Tensor
    down: Tensor
    norm: Tensor


class TracePointers(ctypes.Structure):
    """A `StepTrace` as the C++ code takes it."""

    _fields_ = [("layer", ctypes.c_int64), *((name, ctypes.c_void_p) for name in StepTrace._fields[1:])]


def empty_trace(sizes, layer: int, tokens: int, dtype: torch.dtype) -> StepTrace:
    """Memory for the results of passes over `tokens` tokens.

    Args:
      sizes: `decode_step.StepSizes` of the model.
      dtype: of logits.
    """
    head, D, F = (round_up(size, LANES) for size in (sizes.head, sizes.embed, sizes.mlp))
    both = sizes.heads + sizes.kv_heads
    shapes = {
        "stream": (sizes.layers, tokens, D),
        "heads": (tokens, both + sizes.kv_heads, head),
        "normed": (tokens, both, head),
        "turned": (tokens, both, head),
        "attention": (tokens, sizes.heads, head),
        **dict.fromkeys(("gate", "up", "inner"), (tokens, F)),
    }
    return StepTrace(layer, *(torch.zeros(shapes.get(x, (tokens, D)), dtype=dtype) for x in StepTrace._fields[1:]))


def pointers_of(trace: StepTrace | None) -> TracePointers | None:
    """The form that the C++ code takes; the trace must outlive it."""
    return None if trace is None else TracePointers(trace.layer, *(x.data_ptr() for x in trace[1:]))
