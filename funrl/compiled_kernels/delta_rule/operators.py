"""The Triton kernels of the gated delta rule as operators with a gradient. Triton is imported where one first runs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl.autograd import AutogradFunction
from funrl.compiled_kernels.exact.registration import operator

LARGEST_DELTA_HEAD = 256  # numbers of a key or a value at most
_SMALLEST_HEAD = 16  # of a product on tensor cores
# As the kernels have them, whose module imports triton: tokens of a chunk, values and keys of a program.
CHUNK_TOKENS = 64
_VALUES = 32
_KEYS = 64
FORGET = -110.0  # a logarithm whose factor is 0 in float32


def chunked_delta_rule(
    heads: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], segments_BT: Tensor | None, first_BHNM: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule by Triton kernels, in the dtype of v with states in float32.

    Args:
      heads: queries, keys, values, decays and betas, as of `gated_delta_rule`.
      segments_BT: as there.
      first_BHNM: the state before the first token.

    Returns: results [B, T, H, M] in the dtype of v, and the states after the last tokens in float32; differentiable
      once.
    """
    q_BTKN, k_BTKN, v_BTHM, log_decay_BTH, beta_BTH = heads
    N, M = first_BHNM.shape[2:]
    keys, values = (_padded(size) - size for size in (N, M))
    q_BTKN, k_BTKN = (_pad(x.to(v_BTHM.dtype), keys) for x in (q_BTKN, k_BTKN))
    first_BHNM = F.pad(first_BHNM.float(), (0, values, 0, keys)) if keys or values else first_BHNM.float()
    log_decay_BTH = log_decay_BTH.float().clamp(min=FORGET)
    if segments_BT is not None:
        begins_BT = F.pad(segments_BT[:, 1:] != segments_BT[:, :-1], (1, 0))
        log_decay_BTH = log_decay_BTH.masked_fill(begins_BT.unsqueeze(-1), FORGET)
    out_BTHM, end_BHNM = _Rule.apply(q_BTKN, k_BTKN, _pad(v_BTHM, values), log_decay_BTH, beta_BTH, first_BHNM)
    return out_BTHM[..., :M], end_BHNM[..., :N, :M]


def _padded(size: int) -> int:
    return max(_SMALLEST_HEAD, 1 << (size - 1).bit_length())


def _pad(x: Tensor, count: int) -> Tensor:
    return F.pad(x, (0, count)) if count else x


@operator("funrl::delta_rule")
def _forward(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    from funrl.compiled_kernels.delta_rule import kernels

    return kernels.launch_rule(kernels.DeltaRows(*(x.contiguous() for x in (q, k, v, log_decay, beta, first))))


@_forward.register_fake
def _(q, k, v, log_decay, beta, first):
    return v.new_empty(v.shape), first.new_empty(first.shape)


@operator("funrl::delta_rule_backward")
def _backward(
    d_out: Tensor,
    d_end: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    first: Tensor,
) -> list[Tensor]:
    from funrl.compiled_kernels.delta_rule import kernels

    rows = kernels.DeltaRows(*(x.contiguous() for x in (q, k, v, log_decay, beta, first)))
    return kernels.launch_rule_gradients(d_out.contiguous(), d_end.contiguous(), rows)


@_backward.register_fake
def _(d_out, d_end, q, k, v, log_decay, beta, first):
    return [x.new_empty(x.shape) for x in (q, k, v, log_decay, beta, first)]


def rule_flops(q: Tensor, v: Tensor) -> int:
    """FLOPs of the products of `delta_rule`, which computes weights of a chunk once for each block of values."""
    B, T, _, N = q.shape
    H, M = v.shape[2:]
    C = CHUNK_TOKENS
    condensed = C * C * (2 * N + M) + 10 * C**3
    advanced = C * C * (N * -(-M // _VALUES) + M) + 3 * C * N * M
    return 2 * B * H * -(-T // C) * (condensed + advanced)


def rule_gradient_flops(q: Tensor, v: Tensor) -> int:
    """FLOPs of the products of `delta_rule_backward`, with those of the states that it computes again."""
    B, T, _, N = q.shape
    H, M = v.shape[2:]
    C = CHUNK_TOKENS
    again = C * C * (2 * N + M) + 10 * C**3 + 2 * C * N * M
    retreat = C * C * (N * -(-M // _VALUES) + M) + 3 * C * N * M
    read = C * C * (2 * M * -(-N // _KEYS) + 2 * N) + 3 * C * N * M
    condensed = C * C * (4 * M + 7 * N)
    return 2 * B * H * -(-T // C) * (again + retreat + read + condensed)


def rule_room(q: Tensor, v: Tensor) -> int:
    """Bytes of intermediate results of `delta_rule`."""
    B, T, _, N = q.shape
    H, M = v.shape[2:]
    return B * T * H * ((M + N) * v.element_size() + 4)


def rule_gradient_room(q: Tensor, v: Tensor) -> int:
    """Bytes of intermediate results of `delta_rule_backward`: those of the forward pass, and gradients of them."""
    B, T, _, N = q.shape
    H, M = v.shape[2:]
    states = B * H * -(-T // CHUNK_TOKENS) * N * M
    kept = B * T * H * (2 * M + N + CHUNK_TOKENS) + states
    gradients = B * T * H * (M + 3 * N) + states
    return (kept + gradients) * v.element_size() + 4 * B * T * H * (3 + -(-N // _KEYS))


class _Rule(AutogradFunction):
    @staticmethod
    def forward(q, k, v, log_decay, beta, first):
        return _forward(q, k, v, log_decay, beta, first)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, d_out, d_end):
        with torch.no_grad():
            return tuple(_backward(d_out, d_end, *ctx.saved_tensors))
