"""Sample one token per row: counter-based noise, inversion of the cumulative distribution, log-probabilities.

The noise is a function of (seed, row, step) in integer arithmetic. There is no stateful generator, so the tokens of a
row do not depend on other rows, on when they finish, or on the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from funrl.compiled_kernels.decode_slots import VOCAB_BLOCK
from funrl.compiled_kernels.exact.dispatch import computes_exactly
from funrl.compiled_kernels.exact.scores import token_log_probabilities
from funrl.rollout.sampling_parameters import Sampling
from funrl.rollout.truncation import ONE, kept_mass, shortlist

# The increment and the multipliers of SplitMix64, as signed 64-bit numbers; products wrap.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, 1))

ROWS_NUMBERS = 1 << 16  # probabilities of the rows that are truncated together; more are not faster on a CPU


def request_seed(seed: int, row: int) -> int:
    """Start of the SplitMix64 stream of one row: a hash of (seed, row), as a signed 64-bit number.

    Args:
      seed: any integer, taken modulo 2^64.
      row: any integer, taken modulo 2^64.
    """
    return _signed(_hash_integer(_hash_integer(seed) + row * _GAMMA))


def stream_noise(seeds_R: Tensor, steps_R: Tensor) -> Tensor:
    """Noise in (0, 1), a function of (seed, step) on every device.

    Args:
      seeds_R: int64, each a `request_seed`.
      steps_R: int64, index in the stream of each row; broadcast with `seeds_R`.

    Returns: [R] float64, (i + 1/2) / 2^52 for an integer i.
    Reference: Steele, Lea and Flood, 2014, https://doi.org/10.1145/2660193.2660195
    """
    bits_R = _hash(seeds_R + (steps_R + 1) * _GAMMA)
    return (_shift_right(bits_R, 12).to(torch.float64) + 0.5) * 2.0**-52


def sample_tokens(
    logits_RV: Tensor,
    noise_R: Tensor | None,
    sampling: Sampling,
    seen_RV: Tensor | None = None,
    static: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample one token per row: the first, by token id, whose cumulative probability exceeds the noise.

    The distribution is that of `Sampling`. The bits of a row's results do not depend on other rows: on the CPU a row's
    own numbers decide between the short list and the full vocabulary, and the order of sums does not depend on the
    number of rows.

    Args:
      logits_RV: float32 or float64.
      noise_R: float64 in (0, 1); not used by greedy sampling.
      sampling: sampling parameters.
      seen_RV: bool, the tokens of each row's prompt and completion so far; needed with a repetition penalty.
      static: let no shape depend on data, so that the host need not wait; always so on other devices than a CPU.

    Returns: token [R] int64; its log-probability under the distribution that was sampled from (greedy: the model's
      own), and under the model's own (temperature 1, no penalty, whole vocabulary), [R] nats each. They are NaN where
      the logits are not finite.

    Raises:
      ValueError: there is a repetition penalty and no `seen_RV`.
    """
    penalized_RV = _penalized(logits_RV, sampling.repetition_penalty, seen_RV)
    if sampling.greedy:
        token_R1 = _argmax(penalized_RV)
        raw_logp_R = _token_logp(logits_RV, token_R1).squeeze(1)
        return token_R1.squeeze(1), raw_logp_R, raw_logp_R
    assert noise_R is not None
    shaped_RV = penalized_RV if sampling.temperature == 1 else penalized_RV / sampling.temperature
    prob_RV = shaped_RV.softmax(-1)
    if sampling.truncated:
        token_R1, kept_R1 = _sample_truncated(prob_RV, noise_R, sampling, static=static)
    else:
        token_R1, kept_R1 = invert(prob_RV, noise_R)
    prob_R1 = prob_RV.gather(1, token_R1).double()
    logp_R1 = (prob_R1 / kept_R1).log().to(logits_RV.dtype)
    if computes_exactly(logits_RV):
        raw_logp_R1 = token_log_probabilities(logits_RV, token_R1)
        if not sampling.truncated:
            logp_R1 = token_log_probabilities(penalized_RV, token_R1, sampling.temperature)
    elif shaped_RV is not logits_RV:
        raw_logp_R1 = _token_logp(logits_RV, token_R1)
    elif sampling.truncated:
        raw_logp_R1 = (prob_R1 / _total(prob_RV)).log().to(logits_RV.dtype)
    else:
        raw_logp_R1 = logp_R1
    return token_R1.squeeze(1), logp_R1.squeeze(1), raw_logp_R1.squeeze(1)


def invert(weight_RV: Tensor, noise_R: Tensor) -> tuple[Tensor, Tensor]:
    """First index whose cumulative weight exceeds the noise times the total; never an index of weight 0.

    The sums of all blocks determine the block that holds it; then the index is searched within the block.

    Args:
      weight_RV: at least 0. Sums of int64 are exact; those of floating-point numbers are taken block by block in that
        type, and of blocks in float64.
      noise_R: float64 in (0, 1).

    Returns: the index [R, 1] int64, some index where weights are NaN; the total [R, 1] int64 or float64.
    """
    exact = not weight_RV.is_floating_point()
    wide = torch.int64 if exact else torch.float64
    sums_RN = _by_block(weight_RV, lambda x_RNB: x_RNB.sum(-1)).to(wide)
    upto_RN = sums_RN.cumsum(1)
    total_R1 = upto_RN[:, -1:]
    target_R1 = noise_R.unsqueeze(1) * total_R1  # below the total, because the noise is below 1
    if exact:
        target_R1 = torch.minimum(target_R1.to(torch.int64), total_R1 - 1)
    block_R1 = (upto_RN <= target_R1).sum(1, keepdim=True).clamp_max_(sums_RN.shape[1] - 1)
    before_R1 = functional.pad(upto_RN, (1, 0)).gather(1, block_R1)
    ids_RB, inside_RB = _block(weight_RV, block_R1)
    at_RB = torch.arange(VOCAB_BLOCK, device=weight_RV.device)
    inside_RB = inside_RB.to(wide).masked_fill(block_R1 * VOCAB_BLOCK + at_RB >= weight_RV.shape[1], 0)
    found_R1 = (before_R1 + inside_RB.cumsum(1) <= target_R1).sum(1, keepdim=True)
    # A block's own sum and the last cumulative one may differ by rounding.
    last_R1 = (at_RB * (inside_RB > 0)).amax(1, keepdim=True)
    return ids_RB.gather(1, torch.minimum(found_R1, last_R1)), total_R1


def _sample_truncated(
    prob_RV: Tensor, noise_R: Tensor, sampling: Sampling, static: bool = False
) -> tuple[Tensor, Tensor]:
    """Sample a token [R, 1]; also returns the total probability [R, 1] of the tokens that are kept.

    On the CPU most rows are sampled from a short list of their most probable tokens. Rows that the list does not settle
    use the whole vocabulary, as all rows do on other devices, where finding these rows would make the host wait.
    """
    short = None if static else shortlist(prob_RV, sampling)
    if short is None:
        token_R1, total_R1 = invert(kept_mass(prob_RV, sampling), noise_R)
        return token_R1, total_R1.double() / ONE
    at_R1, total_R1 = invert(short.mass_RC, noise_R)
    token_R1 = short.ids_RC.gather(1, at_R1)
    open_rows = short.open_R.nonzero().squeeze(1)
    for rows in open_rows.split(max(1, ROWS_NUMBERS // prob_RV.shape[1])):
        mass_RV = kept_mass(prob_RV.index_select(0, rows), sampling)
        token_R1[rows], total_R1[rows] = invert(mass_RV, noise_R[rows])
    return token_R1, total_R1.double() / ONE


def _penalized(logits_RV: Tensor, penalty: float, seen_RV: Tensor | None) -> Tensor:
    """Divide positive logits of the seen tokens by the penalty, and multiply negative ones."""
    if penalty == 1:
        return logits_RV
    if seen_RV is None:
        raise ValueError(f"repetition_penalty is {penalty}, so the tokens seen so far (seen_RV) must be given")
    nearer = torch.minimum if penalty > 1 else torch.maximum
    return torch.where(seen_RV, nearer(logits_RV / penalty, logits_RV * penalty), logits_RV)


def _token_logp(logits_RV: Tensor, token_R1: Tensor) -> Tensor:
    """Log-probability of tokens under the softmax of the logits, [R, 1], even where the probability underflows."""
    if computes_exactly(logits_RV):
        return token_log_probabilities(logits_RV, token_R1)
    prob_RV = logits_RV.softmax(-1)
    most_R1 = prob_RV.amax(1, keepdim=True).double() / _total(prob_RV)
    below_R1 = logits_RV.gather(1, token_R1).double() - logits_RV.amax(1, keepdim=True).double()
    return (below_R1 + most_R1.log()).to(logits_RV.dtype)


def _total(prob_RV: Tensor) -> Tensor:
    """Sum of probabilities [R, 1] float64: 1 except for the softmax's rounding, which it normalises away."""
    return _by_block(prob_RV, lambda x_RNB: x_RNB.sum(-1)).sum(1, keepdim=True, dtype=torch.float64)


def _argmax(x_RV: Tensor) -> Tensor:
    """First index of the maximum, [R, 1], computed by blocks."""
    block_R1 = _by_block(x_RV, lambda x_RNB: x_RNB.amax(-1)).argmax(1, keepdim=True)
    ids_RB, inside_RB = _block(x_RV, block_R1)
    return ids_RB.gather(1, inside_RB.argmax(1, keepdim=True))


def _by_block(x_RV: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `reduce` ([R, N, B] -> [R, N]) to each block; the last block may be shorter."""
    count, rest = divmod(x_RV.shape[1], VOCAB_BLOCK)
    whole_RN = reduce(x_RV[:, : count * VOCAB_BLOCK].unflatten(1, (count, VOCAB_BLOCK)))
    return torch.cat([whole_RN, reduce(x_RV[:, None, count * VOCAB_BLOCK :])], 1) if rest else whole_RN


def _block(x_RV: Tensor, block_R1: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of one block of each row, [R, VOCAB_BLOCK]; the last index is repeated beyond the end."""
    ids_RB = (block_R1 * VOCAB_BLOCK + torch.arange(VOCAB_BLOCK, device=x_RV.device)).clamp_max_(x_RV.shape[1] - 1)
    return ids_RB, x_RV.gather(1, ids_RB)


def _hash(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64: a bijection of 64-bit numbers in which every bit depends on every bit."""
    for shift, factor in _MIX:
        x = (x ^ _shift_right(x, shift)) * factor
    return x


def _hash_integer(x: int) -> int:
    """`_hash` of one number, modulo 2^64."""
    x %= 1 << 64
    for shift, factor in _MIX:
        x = ((x ^ (x >> shift)) * factor) % (1 << 64)
    return x


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Shift in zeros: torch's own shift of int64 repeats the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(x: int) -> int:
    """x modulo 2^64, as the int64 with the same bits."""
    return ((x + (1 << 63)) % (1 << 64)) - (1 << 63)
