"""Sampling of decoding passes by two kernels a group, which update the sequences' state too; see `sampler_kernels`.

They sample what `sample_tokens` samples, up to the rounding of probabilities, but no truncated groups (top-k, top-p,
min-p).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from funrl.compiled_kernels.decode_slots import ENDED, LENGTH, LIMIT, PROMPT, SEED, STOP, SlotState
from funrl.compiled_kernels.exact.dispatch import is_aligned
from funrl.compiled_kernels.exact.scores import token_log_probabilities
from funrl.compiled_kernels.fused_sampler import block_sums, sample_rows_
from funrl.compiled_kernels.gpu_kernels.trials import kernels_run
from funrl.rollout.sampling import sample_tokens, stream_noise
from funrl.rollout.sampling_parameters import Sampling

SamplingGroups = tuple[tuple[int, Sampling], ...]


def samples_by_kernels(hidden_BD: Tensor, groups: SamplingGroups) -> bool:
    """True if kernels sample these groups from logits of hidden states, which are in float32."""
    plain = not any(sampling.truncated or sampling.repetition_penalty != 1 for _, sampling in groups)
    plain = plain and (len(groups) == 1 or not is_aligned(hidden_BD))
    return hidden_BD.is_cuda and hidden_BD.dtype.itemsize <= 4 and plain and kernels_run(row_sampler_error)


def sample_next_tokens(
    state: SlotState,
    rows_B: Tensor,
    hidden_BD: Tensor,
    groups: SamplingGroups,
    logits: Callable[[Tensor], Tensor],
    rows_at_once: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample the next token of each row, and update the state.

    Args:
      state: updated in place.
      rows_B: int64 slots.
      hidden_BD: of each row.
      groups: their sampling groups.
      logits: hidden states [R, D] -> float32 logits [R, V].
      rows_at_once: bound on the rows of a call of `logits`.

    Returns: as `decode_pass`.
    """
    B = len(rows_B)
    token_B = rows_B.new_empty(B)
    logp_B, raw_logp_B = (hidden_BD.new_empty(B, dtype=torch.float32) for _ in range(2))
    for low in range(0, B, rows_at_once):
        chunk = (rows_B, hidden_BD, token_B, logp_B, raw_logp_B)
        own, hidden, *into = chunk if rows_at_once >= B else (x[low : low + rows_at_once] for x in chunk)
        logits_RV = logits(hidden)
        for number, sampling in groups:
            options = sampling.temperature, sampling.greedy
            sums = block_sums(logits_RV, *options)
            group = number if len(groups) > 1 else -1
            inputs = own, state.tokens_S, state.numbers_CS, logits_RV
            sample_rows_(*inputs, *sums, *into, *options, group)
            if is_aligned(logits_RV):  # the trainer's sums, in its order; there is one group
                _score_tokens(logits_RV, sampling, *into)
    return token_B, logp_B, raw_logp_B


def _score_tokens(logits_RV: Tensor, sampling: Sampling, token_R: Tensor, logp_R: Tensor, raw_logp_R: Tensor) -> None:
    """Write the log-probabilities of sampled tokens as the trainer computes them."""
    raw_logp_R.copy_(token_log_probabilities(logits_RV, token_R[:, None])[:, 0])
    if sampling.greedy or sampling.temperature == 1:
        logp_R.copy_(raw_logp_R)
    else:
        logp_R.copy_(token_log_probabilities(logits_RV, token_R[:, None], sampling.temperature)[:, 0])


def row_sampler_error(device: str) -> float:
    """Largest error of a small call, beside `sample_tokens` on the host; infinite if a token is another one."""
    generator = torch.Generator().manual_seed(0)
    V, slots = 1000, 6
    logits = 3 * torch.randn(4, V, generator=generator)
    numbers = torch.zeros(STOP + 1, slots, dtype=torch.int64)
    numbers[LENGTH] = torch.tensor([7, 5, 9, 3, 8, 4])
    numbers[PROMPT] = 2
    numbers[LIMIT] = 9
    numbers[SEED] = torch.randint(-(1 << 62), 1 << 62, (slots,), generator=generator)
    numbers[STOP] = -1
    numbers[ENDED, 5] = 1
    rows = torch.tensor([3, 0, 4, 5])
    worst = 0.0
    for sampling in (Sampling(), Sampling(temperature=0.7), Sampling(greedy=True)):
        state = SlotState(
            torch.zeros(slots, dtype=torch.int64), numbers.clone(), torch.zeros(slots, 1, dtype=torch.int32)
        )
        state = SlotState(*(x.to(device) for x in state))
        results = sample_next_tokens(state, rows.to(device), logits.to(device), ((0, sampling),), lambda x: x, 3)
        noise = stream_noise(numbers[SEED, rows], numbers[LENGTH, rows] - numbers[PROMPT, rows])
        token, *logps = sample_tokens(logits, noise, sampling)
        after = numbers[LENGTH].clone()
        after[rows[:3]] += 1
        same = torch.equal(results[0].cpu(), token) and torch.equal(state.numbers_CS[LENGTH].cpu(), after)
        same = same and state.numbers_CS[ENDED].tolist() == [0, 0, 0, 0, 1, 1]
        errors = [(a.cpu() - b).abs().max().item() for a, b in zip(results[1:], logps, strict=True)]
        worst = max(worst, *errors) if same else float("inf")
    return worst
