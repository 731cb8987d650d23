"""Two Triton kernels that sample the next token of each row of logits, and update the state of its sequence.

The first reads the logits once, and writes the maximum and the sum of each block of the vocabulary. The second finds
the block of the noise's quantile, searches it, and does what is left: both log-probabilities, stop tokens and the
slot's numbers. Sums are float64 of float32 exponentials, so that their order plays no part in practice.
"""

# A kernel is in Triton's language, whose types a checker of Python's does not know.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportReturnType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-not-found]

from funrl.compiled_kernels.decode_slots import ENDED, GROUP, LENGTH, LIMIT, PROMPT, SEED, STOP, VOCAB_BLOCK, SlotState
from funrl.compiled_kernels.gpu_kernels.decode_kernels import launch_kernel

_BLOCKS = 16  # of a program of the first kernel
_LOWEST = tl.constexpr(-3e38)  # a block's maximum at least: no difference of two is not a number
_BLOCK = tl.constexpr(VOCAB_BLOCK)
_ENDED = tl.constexpr(ENDED)  # rows of a slot's numbers
_GROUP = tl.constexpr(GROUP)
_LENGTH = tl.constexpr(LENGTH)
_LIMIT = tl.constexpr(LIMIT)
_PROMPT = tl.constexpr(PROMPT)
_SEED = tl.constexpr(SEED)
_STOP = tl.constexpr(STOP)
# The increment and the multipliers of SplitMix64, as signed 64-bit numbers; products wrap.
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_MIX_30 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_MIX_27 = tl.constexpr(0x94D049BB133111EB - (1 << 64))


class SamplerOptions(NamedTuple):
    """Distribution of a sampling group.

    Attributes:
      temperature: logits are divided by it.
      greedy: take the first of the most probable tokens; the temperature plays no part.
      group: number of the group, whose rows alone are sampled; -1: all rows are.
    """

    temperature: float
    greedy: bool
    group: int = -1


@triton.jit
def _block_sums(
    logits_ptr,
    tops_ptr,
    sums_ptr,
    raw_ptr,
    vocab,
    count,
    temperature,
    blocks: tl.constexpr,
    block: tl.constexpr,
    tempered: tl.constexpr,
    pdl: tl.constexpr,
):
    """Maxima of some blocks of one row, and sums of e^(x - maximum), at the temperature and without."""
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * blocks + tl.arange(0, blocks)
    token = number[:, None] * block + tl.arange(0, block)[None, :]
    x = tl.load(logits_ptr + row * vocab + token, mask=token < vocab, other=float("-inf"))
    top = tl.maximum(tl.max(x, 1), _LOWEST)
    here = row * count + number
    tl.store(tops_ptr + here, top, mask=number < count)
    tl.store(raw_ptr + here, tl.sum(tl.exp(x - top[:, None]).to(tl.float64), 1), mask=number < count)
    if tempered:
        z = x / temperature - (top / temperature)[:, None]
        tl.store(sums_ptr + here, tl.sum(tl.exp(z).to(tl.float64), 1), mask=number < count)


@triton.jit
def _noise(seed, step):
    """(i + 1/2) / 2^52 of SplitMix64; an int64's own shift repeats the sign."""
    bits = seed + (step + 1) * _GAMMA
    bits = (bits ^ ((bits >> 30) & ((1 << 34) - 1))) * _MIX_30
    bits = (bits ^ ((bits >> 27) & ((1 << 37) - 1))) * _MIX_27
    bits = bits ^ ((bits >> 31) & ((1 << 33) - 1))
    return (((bits >> 12) & ((1 << 52) - 1)).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def _first(mask, positions, last):
    """The first of the positions in the mask, or else the last one."""
    return tl.minimum(tl.min(tl.where(mask, positions, last)), last)


@triton.jit
def _scaled(x, temperature, tempered: tl.constexpr):
    return x / temperature if tempered else x


@triton.jit
def _block_of(logits_ptr, number, vocab):
    """Logits of a block of the vocabulary."""
    token = number.to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    return tl.load(logits_ptr + token, mask=token < vocab, other=float("-inf"))


@triton.jit
def _quantile(weight, begin, target):
    """The first place of a positive weight at which `begin` and the running sum exceed a target; the sum before it."""
    place = tl.arange(0, weight.shape[0])
    upto = begin + tl.cumsum(weight)
    chosen = _first((upto > target) & (weight > 0), place, tl.max(tl.where(weight > 0, place, 0)))
    return chosen, tl.sum(tl.where(place == chosen - 1, upto, 0.0))


@triton.jit
def _advance(own, token_ptr, sampled, slots, stops: tl.constexpr, stop_width: tl.constexpr):
    """Append a token to a running slot, and note its end by the limit or a stop token."""
    running = tl.load(own + _ENDED * slots) == 0
    after = tl.load(own + _LENGTH * slots) + running.to(tl.int64)
    ends = after >= tl.load(own + _LIMIT * slots)
    if stops > 0:
        stop = tl.arange(0, stop_width)
        tokens = tl.load(own + (_STOP + stop) * slots, mask=stop < stops, other=-1)
        ends = ends | (tl.max((tokens == sampled).to(tl.int32)) > 0)
    if running:
        tl.store(token_ptr, sampled)
        tl.store(own + _LENGTH * slots, after)
        tl.store(own + _ENDED * slots, ends.to(tl.int64))


@triton.jit
def _sample(
    rows_ptr,
    tokens_ptr,
    numbers_ptr,
    logits_ptr,
    tops_ptr,
    sums_ptr,
    raw_ptr,
    token_ptr,
    logp_ptr,
    raw_logp_ptr,
    slots,
    vocab,
    count,
    temperature,
    group,
    stops: tl.constexpr,
    stop_width: tl.constexpr,
    width: tl.constexpr,
    greedy: tl.constexpr,
    tempered: tl.constexpr,
    grouped: tl.constexpr,
    pdl: tl.constexpr,
):
    """Sample the next token of one row, and update its slot."""
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    b = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows_ptr + b)
    own = numbers_ptr + slot
    its_group = tl.load(own + _GROUP * slots) if grouped else group
    if its_group != group:
        return
    number = tl.arange(0, width)
    inside = number < count
    here = b * count + number
    top = tl.load(tops_ptr + here, mask=inside, other=_LOWEST)
    most = tl.max(top)
    z_top = _scaled(top, temperature, tempered)
    z_most = _scaled(most, temperature, tempered)
    raw = tl.load(raw_ptr + here, mask=inside, other=0.0)
    raw_norm = tl.log(tl.sum(raw * tl.exp((top - most).to(tl.float64))))
    logits_ptr += b * vocab
    if greedy:
        chosen = _first(inside & (top == most), number, count - 1)
        index = _first(_block_of(logits_ptr, chosen, vocab) == most, tl.arange(0, _BLOCK), _BLOCK - 1)
        norm = raw_norm
    else:
        sums = tl.load(sums_ptr + here, mask=inside, other=0.0) if tempered else raw
        weight = sums * tl.exp((z_top - z_most).to(tl.float64))
        total = tl.sum(weight)
        norm = tl.log(total)
        step = tl.load(own + _LENGTH * slots) - tl.load(own + _PROMPT * slots)
        target = _noise(tl.load(own + _SEED * slots), step) * total
        chosen, before = _quantile(weight, 0.0, target)
        its_top = tl.sum(tl.where(number == chosen, z_top, 0.0))
        z = _scaled(_block_of(logits_ptr, chosen, vocab), temperature, tempered)
        share = tl.exp(z - its_top).to(tl.float64) * tl.exp((its_top - z_most).to(tl.float64))
        index, _ = _quantile(share, before, target)
    sampled = tl.minimum(chosen.to(tl.int64) * _BLOCK + index, vocab - 1)
    logit = tl.load(logits_ptr + sampled)
    z_logit = _scaled(logit, temperature, tempered)
    tl.store(token_ptr + b, sampled)
    tl.store(logp_ptr + b, ((z_logit - z_most).to(tl.float64) - norm).to(tl.float32))
    tl.store(raw_logp_ptr + b, ((logit - most).to(tl.float64) - raw_norm).to(tl.float32))
    _advance(own, tokens_ptr + slot, sampled, slots, stops, stop_width)


def launch_block_sums(logits_RV: Tensor, options: SamplerOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Maxima [R, blocks] float32, and sums of e^(x - maximum) [R, blocks] float64 at the temperature and at 1."""
    R, V = logits_RV.shape
    count = triton.cdiv(V, VOCAB_BLOCK)
    tops = logits_RV.new_empty(R, count)
    tempered = _is_tempered(options)
    raw = torch.empty(R, count, dtype=torch.float64, device=logits_RV.device)
    sums = torch.empty_like(raw)  # not read unless tempered; an operator may not return one tensor twice
    given = logits_RV, tops, sums, raw, V, count, options.temperature
    constants = {"blocks": _BLOCKS, "block": VOCAB_BLOCK, "tempered": tempered}
    launch_kernel(_block_sums, (R, triton.cdiv(count, _BLOCKS)), given, constants)
    return tops, sums, raw


def launch_sample(
    rows_R: Tensor,
    state: SlotState,
    logits_RV: Tensor,
    sums: tuple[Tensor, Tensor, Tensor],
    options: SamplerOptions,
    results: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Sample a token of each row of the group, and update the state.

    Args:
      rows_R: int64 slots.
      state: of all slots.
      logits_RV: float32.
      sums: of `launch_block_sums`.
      options: the group.
      results: take the tokens [R] int64, and sampling and raw log-probabilities [R] float32.
    """
    R, V = logits_RV.shape
    count = sums[0].shape[1]
    numbers_CS = state.numbers_CS
    stops = len(numbers_CS) - STOP
    given = rows_R, state.tokens_S, numbers_CS, logits_RV, *sums, *results
    scalars = numbers_CS.stride(0), V, count, options.temperature, options.group
    widths = {"stop_width": triton.next_power_of_2(max(1, stops)), "width": triton.next_power_of_2(count)}
    form = {"greedy": options.greedy, "tempered": _is_tempered(options), "grouped": options.group >= 0}
    constants = {"stops": stops} | widths | form
    launch_kernel(_sample, (R,), (*given, *scalars), constants)


def _is_tempered(options: SamplerOptions) -> bool:
    return not options.greedy and options.temperature != 1
