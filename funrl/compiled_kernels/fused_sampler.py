"""Operators of the two kernels of `sampler_kernels`; there are none for a CPU, which has `sample_tokens`."""

from __future__ import annotations

import torch
from torch import Tensor

from funrl.compiled_kernels.decode_slots import VOCAB_BLOCK, SlotState
from funrl.compiled_kernels.exact.registration import operator


# Flat arguments: torch.library takes tensors and numbers, no records.
@operator("funrl::logit_block_sums")
def block_sums(logits: Tensor, temperature: float, greedy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Maxima and sums of each block of the vocabulary, as `sampler_kernels.launch_block_sums`."""
    from funrl.compiled_kernels.gpu_kernels import sampler_kernels as kernels

    return kernels.launch_block_sums(logits, kernels.SamplerOptions(temperature, greedy))


@block_sums.register_fake
def _(logits, temperature, greedy):
    R, V = logits.shape
    tops = logits.new_empty(R, -(-V // VOCAB_BLOCK))
    return tops, *(torch.empty_like(tops, dtype=torch.float64) for _ in range(2))


@operator("funrl::sample_rows", mutates_args=("tokens", "numbers", "token", "logp", "raw_logp"))
def sample_rows_(
    rows: Tensor,
    tokens: Tensor,
    numbers: Tensor,
    logits: Tensor,
    tops: Tensor,
    sums: Tensor,
    raw_sums: Tensor,
    token: Tensor,
    logp: Tensor,
    raw_logp: Tensor,
    temperature: float,
    greedy: bool,
    group: int,
) -> None:
    """Sample the rows of a group and update their slots, as `sampler_kernels.launch_sample`."""
    from funrl.compiled_kernels.gpu_kernels import sampler_kernels as kernels

    state = SlotState(tokens, numbers, tokens)
    options = kernels.SamplerOptions(temperature, greedy, group)
    kernels.launch_sample(rows, state, logits, (tops, sums, raw_sums), options, (token, logp, raw_logp))


@sample_rows_.register_fake
def _(*_):
    return None
