"""Sample one token per row: counter-based noise, inversion of the cumulative distribution, log-probabilities.

The noise is a function of (seed, row, step) in integer arithmetic. There is no stateful generator, so the tokens of a
row do not depend on other rows, on when they finish, or on the device.

Tensor ranks that share the vocabulary sample without whole logits, by the same function: each sums the exponentials of
its part in float64, the sums determine the rank that holds the token, and that rank searches it. Rows of truncated or
penalised distributions are exchanged instead, so that each rank has some whole rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from funrl.compiled_kernels.decode_slots import VOCAB_BLOCK
from funrl.compiled_kernels.exact.dispatch import computes_exactly
from funrl.compiled_kernels.exact.scores import largest_logits, log_probabilities, logit_moments
from funrl.compiled_kernels.linear_logprob import filled_columns
from funrl.compiled_kernels.packed import parts_of
from funrl.mesh.collectives import all_gather, all_to_all, own_shard, pmax, psum, psum_pairwise
from funrl.mesh.mesh import SINGLE, Mesh
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


class VocabularyPart(NamedTuple):
    """The columns of logits that a tensor rank has.

    Attributes:
      mesh: the vocabulary is split over "tensor".
      columns: of each rank, fewer of the last ones where the vocabulary does not divide.
      vocab: tokens of the whole vocabulary.
    """

    mesh: Mesh
    columns: int
    vocab: int

    @property
    def first(self) -> Any:
        """The token of the first column: an int, or a tensor where ranks are simulated or traced together."""
        return self.mesh.index("tensor") * self.columns


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
    whole = VocabularyPart(SINGLE, logits_RV.shape[1], logits_RV.shape[1])
    penalized_RV = _penalized(logits_RV, sampling.repetition_penalty, seen_RV)
    if not sampling.truncated:
        token_R, logp_R, raw_logp_R = _sample_plain(penalized_RV, noise_R, sampling, whole)
        if penalized_RV is not logits_RV:
            raw_logp_R = _token_logp(logits_RV, token_R, whole)
            logp_R = raw_logp_R if sampling.greedy else logp_R
        return token_R, logp_R, raw_logp_R
    assert noise_R is not None
    shaped_RV = penalized_RV if sampling.temperature == 1 else penalized_RV / sampling.temperature
    prob_RV = shaped_RV.softmax(-1)
    token_R1, kept_R1 = _sample_truncated(prob_RV, noise_R, sampling, static=static)
    logp_R1 = (prob_RV.gather(1, token_R1).double() / kept_R1).log().to(logits_RV.dtype)
    return token_R1.squeeze(1), logp_R1.squeeze(1), _token_logp(logits_RV, token_R1.squeeze(1), whole)


def sample_shared_tokens(
    logits_RC: Tensor,
    noise_R: Tensor | None,
    sampling: Sampling,
    part: VocabularyPart,
    seen_RV: Tensor | None = None,
    static: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`sample_tokens` of logits that tensor ranks share; the same results on all of them. Collective over "tensor".

    Args:
      logits_RC: of this rank's part of the vocabulary.
      noise_R, sampling, seen_RV, static: as in `sample_tokens`, the same on every rank.
      part: this rank's part.
    """
    if part.mesh.size("tensor") == 1:
        return sample_tokens(logits_RC, noise_R, sampling, seen_RV, static)
    if sampling.reshaped:
        return _sample_exchanged_rows(logits_RC, noise_R, sampling, part, seen_RV, static)
    return _sample_plain(logits_RC, noise_R, sampling, part)


def _sample_plain(
    logits_RC: Tensor, noise_R: Tensor | None, sampling: Sampling, part: VocabularyPart
) -> tuple[Tensor, Tensor, Tensor]:
    """`sample_shared_tokens` at a temperature, or greedily, of these logits as they are."""
    mesh = part.mesh
    top_R1 = pmax(logits_RC.amax(1, keepdim=True), mesh, "tensor")
    if sampling.greedy:
        column_R1 = _argmax(logits_RC)
        largest_R1 = logits_RC.gather(1, column_R1) == top_R1
        token_R1 = -pmax(-torch.where(largest_R1, column_R1 + part.first, part.vocab - 1), mesh, "tensor")
        raw_logp_R = _token_logp(logits_RC, token_R1.squeeze(1), part)
        return token_R1.squeeze(1), raw_logp_R, raw_logp_R
    assert noise_R is not None
    temperature = sampling.temperature
    token_R1, sum_R1 = invert(_exponentials(logits_RC, top_R1, temperature), noise_R, part)
    token_R = token_R1.squeeze(1)
    logp_R = _token_logp(logits_RC, token_R, part, temperature, sum_R1.squeeze(1))
    return token_R, logp_R, logp_R if temperature == 1 else _token_logp(logits_RC, token_R, part)


def _sample_exchanged_rows(
    logits_RC: Tensor,
    noise_R: Tensor | None,
    sampling: Sampling,
    part: VocabularyPart,
    seen_RV: Tensor | None,
    static: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`sample_shared_tokens` by an exchange after which each rank has whole logits of its share of the rows."""
    mesh = part.mesh
    rows = len(logits_RC)
    lacks = -rows % mesh.size("tensor")

    def own_rows(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return own_shard(torch.cat([x, x.new_zeros(lacks, *x.shape[1:])]) if lacks else x, mesh, "tensor")

    columns_RC = functional.pad(filled_columns(logits_RC, part.columns), (0, 0, 0, lacks))
    logits_BV = all_to_all(columns_RC, mesh, "tensor", split=0, concat=1)[:, : part.vocab].contiguous()
    sampled = sample_tokens(logits_BV, own_rows(noise_R), sampling, own_rows(seen_RV), static)
    token_R, logp_R, raw_logp_R = (all_gather(x, mesh, "tensor")[:rows] for x in sampled)
    return token_R, logp_R, raw_logp_R


def invert(weight_RC: Tensor, noise_R: Tensor, part: VocabularyPart | None = None) -> tuple[Tensor, Tensor]:
    """First index whose cumulative weight exceeds the noise times the total; never an index of weight 0.

    The sums of all blocks determine the block that holds it; then the index is searched within the block. Where tensor
    ranks share the weights, their sums determine the rank before.

    Args:
      weight_RC: at least 0; of this rank's part. Sums of int64 are exact; those of floating-point numbers are taken in
        float64.
      noise_R: float64 in (0, 1).
      part: this rank's part; None: there are no others.

    Returns: the index [R, 1] int64 in the whole, some index where weights are NaN; the total [R, 1] int64 or float64.
    """
    exact = not weight_RC.is_floating_point()
    wide = torch.int64 if exact else torch.float64
    sums_RN = _by_block(weight_RC, lambda x_RNB: x_RNB.sum(-1, dtype=wide))
    mesh = SINGLE if part is None else part.mesh
    ranks_RP = all_gather(sums_RN.sum(1, keepdim=True), mesh, "tensor", dim=1)
    upto_RP = ranks_RP.cumsum(1)
    total_R1 = upto_RP[:, -1:]
    target_R1 = noise_R.unsqueeze(1) * total_R1  # below the total, because the noise is below 1
    if exact:
        target_R1 = torch.minimum(target_R1.to(torch.int64), total_R1 - 1)
    rank_R1 = _first_above(upto_RP, ranks_RP, target_R1)
    before_R1 = functional.pad(upto_RP, (1, 0)).gather(1, rank_R1)
    upto_RN = before_R1 + sums_RN.cumsum(1)  # of the rank that holds it; others search in vain
    block_R1 = _first_above(upto_RN, sums_RN, target_R1)
    before_R1 = torch.where(block_R1 > 0, upto_RN.gather(1, (block_R1 - 1).clamp_min(0)), before_R1)
    ids_RB, inside_RB = _block(weight_RC, block_R1)
    at_RB = torch.arange(VOCAB_BLOCK, device=weight_RC.device)
    inside_RB = inside_RB.to(wide).masked_fill(block_R1 * VOCAB_BLOCK + at_RB >= weight_RC.shape[1], 0)
    index_R1 = ids_RB.gather(1, _first_above(before_R1 + inside_RB.cumsum(1), inside_RB, target_R1))
    if part is not None and mesh.size("tensor") > 1:
        index_R1 = psum(torch.where(rank_R1 == mesh.index("tensor"), index_R1 + part.first, 0), mesh, "tensor")
    return index_R1, total_R1


def _first_above(upto_RN: Tensor, weight_RN: Tensor, target_R1: Tensor) -> Tensor:
    """First place [R, 1] whose running sum exceeds a target; the last one of any weight if rounding leaves none."""
    place_N = torch.arange(weight_RN.shape[1], device=weight_RN.device)
    last_R1 = (place_N * (weight_RN > 0)).amax(1, keepdim=True)
    return torch.minimum((upto_RN <= target_R1).sum(1, keepdim=True), last_R1)


def _exponentials(logits_RC: Tensor, top_R1: Tensor, temperature: float) -> Tensor:
    """e^((logit - top) / temperature)."""
    above_RC = logits_RC - top_R1
    return (above_RC if temperature == 1 else above_RC.div_(temperature)).exp_()


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


def _token_logp(
    logits_RC: Tensor,
    token_R: Tensor,
    part: VocabularyPart,
    temperature: float = 1.0,
    sum_R: Tensor | None = None,
) -> Tensor:
    """Log-probability [R] of tokens under softmax(logits / temperature), even where the probability underflows.

    Args:
      logits_RC: of this rank's part of the vocabulary.
      token_R: in the whole vocabulary.
      part: this rank's part.
      temperature: above 0.
      sum_R: of the exponentials of the whole row, if it is there already.
    """
    mesh = part.mesh
    columns = logits_RC.shape[1]
    column_R1 = token_R.unsqueeze(1) - part.first
    here_R1 = (column_R1 >= 0) & (column_R1 < columns)
    column_R1 = torch.where(here_R1, column_R1, 0)
    if computes_exactly(logits_RC):
        top_R = pmax(largest_logits(logits_RC), mesh, "tensor")
        ranks = mesh.size("tensor")
        parts = max(parts_of(columns * ranks) // ranks, 1)
        above_R1, sums_R3 = logit_moments(logits_RC, top_R, column_R1, temperature, parts)
        above_R1 = psum(torch.where(here_R1, above_R1, 0), mesh, "tensor")
        sum_R = psum_pairwise(sums_R3[:, 0].contiguous(), mesh, "tensor")
        return log_probabilities(above_R1, sum_R, temperature, logits_RC.dtype).squeeze(1)
    top_R1 = pmax(logits_RC.amax(1, keepdim=True), mesh, "tensor")
    if sum_R is None:
        weight_RC = _exponentials(logits_RC, top_R1, temperature)
        sum_R = psum(_by_block(weight_RC, lambda x_RNB: x_RNB.sum(-1, dtype=torch.float64)).sum(1), mesh, "tensor")
    above_R1 = logits_RC.gather(1, column_R1).double() - top_R1.double()
    above_R = psum(torch.where(here_R1, above_R1, 0), mesh, "tensor").squeeze(1)
    return (above_R / temperature - sum_R.log()).to(logits_RC.dtype)


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
