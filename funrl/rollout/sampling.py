"""Drawing one token per row: counter-based noise, truncation, inversion of the cumulative distribution.

The noise is a function of (seed, row, step) in integer arithmetic. No generator has a state, so what a row draws does
not depend on the rows beside it, on when they finish, or on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funrl.rollout.completions import Sampling

# The increment and the multipliers of SplitMix64, as signed 64-bit numbers; products wrap.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, 1))


def request_seed(seed: int, row: int) -> int:
    """Start of the stream of noise of one row: a hash of (seed, row), as a signed 64-bit number."""
    return int(_hash(_hash(torch.tensor(_signed(seed))) + torch.tensor(row) * _GAMMA))


def noise(seeds_R: Tensor, steps_S: Tensor) -> Tensor:
    """Noise in (0, 1), equal for equal (seed, step) wherever it is computed.

    A seed begins a SplitMix64 stream; step s is its s-th number.

    Args:
      seeds_R: int64, such as `request_seed` makes.
      steps_S: int64 numbers of the steps, [S] or [R, S].

    Returns: [R, S] float64, (i + 1/2) / 2^52 for a whole number i.
    Reference: Steele, Lea and Flood, 2014, https://doi.org/10.1145/2660193.2660195
    """
    bits_RS = _hash(seeds_R.unsqueeze(1) + (steps_S + 1) * _GAMMA)
    return (_shift_right(bits_RS, 12).to(torch.float64) + 0.5) * 2.0**-52


def sample_tokens(logits_RV: Tensor, noise_R: Tensor | None, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """One token per row.

    Args:
      logits_RV: float32 or float64.
      noise_R: float64 in (0, 1); not used by greedy sampling.
      sampling: temperature, truncation, greedy.

    Returns: token [R] int64; its log-probability in the distribution that was drawn from, and in the model's own
      (temperature 1, whole vocabulary), [R] nats each.
    """
    model_logp_RV = logits_RV.log_softmax(-1)
    if sampling.greedy:
        token_R1 = model_logp_RV.argmax(-1, keepdim=True)
        logp_R = model_logp_RV.gather(1, token_R1).squeeze(1)
        return token_R1.squeeze(1), logp_R, logp_R
    if sampling.temperature == 1 and not sampling.truncated:
        token_R1 = invert(model_logp_RV, noise_R)
        logp_R = model_logp_RV.gather(1, token_R1).squeeze(1)
        return token_R1.squeeze(1), logp_R, logp_R
    logp_RC, ids_RC = candidates(logits_RV, sampling)
    choice_R1 = invert(logp_RC, noise_R)
    token_R1 = choice_R1 if ids_RC is None else ids_RC.gather(1, choice_R1)
    logp_R1, model_logp_R1 = logp_RC.gather(1, choice_R1), model_logp_RV.gather(1, token_R1)
    return token_R1.squeeze(1), logp_R1.squeeze(1), model_logp_R1.squeeze(1)


def candidates(logits_RV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """The tempered and truncated distribution.

    Returns: log-probabilities [R, C], -inf for what cannot be drawn; the tokens' ids [R, C], most probable first, or
      None where they are 0, 1, 2, ... because nothing is truncated (then nothing is sorted).
    """
    tempered_RV = logits_RV / sampling.temperature
    if not sampling.truncated:
        return tempered_RV.log_softmax(-1), None
    count = min(sampling.top_k or logits_RV.shape[1], logits_RV.shape[1])
    if count < logits_RV.shape[1]:
        kept_RC, ids_RC = tempered_RV.topk(count)
    else:
        kept_RC, ids_RC = tempered_RV.sort(descending=True, stable=True)
    if sampling.top_p < 1:
        prob_RC = kept_RC.softmax(-1)
        before_RC = prob_RC.cumsum(-1, dtype=torch.float64) - prob_RC  # 0 for the first: it always stays
        kept_RC = kept_RC.masked_fill(before_RC >= sampling.top_p, -torch.inf)
    return kept_RC.log_softmax(-1), ids_RC


def invert(logp_RC: Tensor, noise_R: Tensor | None) -> Tensor:
    """The first index whose cumulative probability exceeds the noise, [R, 1]; one of probability 0 is never it."""
    assert noise_R is not None
    cumulative_RC = logp_RC.exp().cumsum(-1, dtype=torch.float64)
    target_R1 = noise_R.unsqueeze(1) * cumulative_RC[:, -1:]  # below the last one, because the noise is below 1
    # Above NaN nothing is found: the last index is returned, and the caller sees NaN in its log-probability.
    return torch.searchsorted(cumulative_RC, target_R1, right=True).clamp_max_(logp_RC.shape[1] - 1)


def _hash(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64: a bijection of 64-bit numbers in which every bit depends on every bit."""
    for shift, factor in _MIX:
        x = (x ^ _shift_right(x, shift)) * factor
    return x


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Shift in zeros: torch's own shift of int64 repeats the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(x: int) -> int:
    """x modulo 2^64, as the int64 with the same bits."""
    return ((x + (1 << 63)) % (1 << 64)) - (1 << 63)
