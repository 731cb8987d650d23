"""Sample one token of each of many sequences, by a function of static shapes over buffers on the device.

The buffers hold what a pass needs (last tokens, lengths, pages, seeds, limits, stop tokens), and the pass updates them.
So the host can begin a pass without waiting for the one before, and a CUDA graph can capture a whole pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from funrl.compiled_kernels.decode_slots import ADAPTER, CELL, ENDED, LENGTH, LIMIT, STOP, SlotState
from funrl.compiled_kernels.paged_attention import Paging, decode_paging
from funrl.rollout.native.device.row_sampler import sample_next_tokens, samples_by_kernels
from funrl.rollout.sampling import VocabularyPart, sample_shared_tokens, stream_noise
from funrl.rollout.sampling_parameters import Sampling


class RowAdapters(NamedTuple):
    """Adapters of the tokens of a pass.

    Attributes:
      used: their numbers, ascending; -1: some tokens have none.
      number_N: int64, that of each token; it is not read where all have the same.
    """

    used: tuple[int, ...]
    number_N: Tensor


class DecodeState(NamedTuple):
    """State of the sequences by slot. The last slot is spare: no sequence holds it, and it has ended.

    Attributes:
      tokens_S: int64, the last token of each sequence, whose keys and values are not computed yet.
      numbers_CS: int64, for each sequence its length, the length of its prompt, the length at which it ends, its seed,
        the number of its sampling group, whether it has ended, the number of its adapter, its cell, its stop tokens.
      table_SP: int32, its pages in order.
    """

    tokens_S: Tensor
    numbers_CS: Tensor
    table_SP: Tensor


class Spare(NamedTuple):
    """Page and cell of the cache that ended sequences write to; cell None: the cache has no cells."""

    page: int
    cell: int | None = None


class DecodeForm(NamedTuple):
    """Constants of a pass. Passes of equal form share a CUDA graph.

    Attributes:
      rows: number of rows, padded with the spare slot.
      pages: bound on the pages of a sequence that attention reads.
      sampling_groups: (number, parameters) pairs of the ways in which sequences are sampled; no repetition penalty.
      adapters: numbers of the adapters of the sequences, ascending; -1: some have none.
      tokens: number of new tokens, padded, of a pass that also computes prompts; 0: one of each row.
    """

    rows: int
    pages: int
    sampling_groups: tuple[tuple[int, Sampling], ...]
    adapters: tuple[int, ...] = (-1,)
    tokens: int = 0


class MixedInputs(NamedTuple):
    """Inputs of a pass that computes prompts beside decoding: N tokens of S sequences, R of which are sampled after.

    All are int64. Padding tokens are in sequences of the spare slot, and write to the spare page.

    Attributes:
      tokens_N: token ids.
      places_N, positions_N: as in `Paging`.
      adapters_N: number of each token's adapter.
      slots_S: slot of each sequence, whose pages it reads.
      offsets_S1, ends_S: as in `Paging`; a padding sequence may have no token.
      sampled_R: index of the token after which each row samples.
      slots_R: slot of each row, without repetition except the spare one.
    """

    tokens_N: Tensor
    places_N: Tensor
    positions_N: Tensor
    adapters_N: Tensor
    slots_S: Tensor
    offsets_S1: Tensor
    ends_S: Tensor
    sampled_R: Tensor
    slots_R: Tensor


class Decoder(Protocol):
    """A model with weights and a cache of pages; see `backends.TorchBackend`."""

    page_tokens: int

    @property
    def rows_at_once(self) -> int: ...

    @property
    def part(self) -> VocabularyPart: ...

    def hidden(
        self, tokens_N: Tensor, paging: Paging, adapters: RowAdapters | None = None, cells_S: Tensor | None = None
    ) -> Tensor: ...

    def own_logits(self, hidden_RD: Tensor) -> Tensor: ...


def empty_state(tokens_S: Tensor, stops: int, pages: int) -> DecodeState:
    """A state whose sequences have all ended.

    Args:
      tokens_S: the last tokens; the state shares their memory.
      stops, pages: room for stop tokens and pages of each sequence.
    """
    numbers_CS = tokens_S.new_zeros(STOP + stops, len(tokens_S))
    numbers_CS[LENGTH:LIMIT] = numbers_CS[ENDED] = 1
    return DecodeState(tokens_S, numbers_CS, tokens_S.new_zeros(len(tokens_S), pages, dtype=torch.int32))


def decode_pass(
    decoder: Decoder, state: DecodeState, rows_B: Tensor, form: DecodeForm, spare: Spare
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the last token of some sequences and sample the next one, updating the state and the cache.

    A sequence that has ended stays unchanged, and its results are meaningless. No shape depends on data, and the host
    never waits.

    Args:
      decoder: the model and its cache.
      state: updated in place.
      rows_B: int64 slots without repetition, except the spare one.
      form: constants of the pass.
      spare: the part of the cache that ended sequences write to.

    Returns: token [B] int64, and its sampling and raw log-probabilities, [B] nats each, as `sample_tokens` does.
    """
    rows = _read_rows(state, rows_B)
    running_B = rows.running_B
    page = decoder.page_tokens
    position_B = torch.where(running_B, rows.numbers_CB[LENGTH] - 1, 0)
    table_BP = state.table_SP[:, : form.pages].index_select(0, rows_B)
    page_B = table_BP.gather(1, (position_B // page)[:, None])[:, 0]
    place_B = torch.where(running_B, page_B.long(), spare.page) * page + position_B % page
    paging = decode_paging(position_B, table_BP, place_B, running_B=running_B)
    cells_B = None if spare.cell is None else torch.where(running_B, rows.numbers_CB[CELL], spare.cell)
    adapters = RowAdapters(form.adapters, rows.numbers_CB[ADAPTER])
    hidden_BD = decoder.hidden(rows.token_B, paging, adapters, cells_B)
    return _sample_next(decoder, state, rows, hidden_BD, groups=form.sampling_groups)


def mixed_pass(
    decoder: Decoder, state: DecodeState, inputs: MixedInputs, form: DecodeForm
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute new tokens of some sequences, such as prompts, and sample a token of each row.

    No shape depends on data, and the host never waits. Attention takes the lengths of the sequences from the device.

    Args:
      decoder: the model and its cache.
      state: updated in place; it has the pages of all sequences, and all numbers of the rows.
      inputs: tokens and rows of the pass.
      form: constants of the pass.

    Returns: as `decode_pass`.
    """
    table_SP = state.table_SP[:, : form.pages].index_select(0, inputs.slots_S)
    sequences, pages = table_SP.shape
    # Kernels read from it that some sequence has one new token, and the largest number that one may have.
    bounds_G5 = torch.tensor([[0, 0, sequences, 1, pages], [0, 0, 1, form.tokens, pages]])
    paging = Paging(
        inputs.places_N, inputs.positions_N, table_SP, inputs.offsets_S1.int(), inputs.ends_S.int(), bounds_G5
    )
    hidden_ND = decoder.hidden(inputs.tokens_N, paging, RowAdapters(form.adapters, inputs.adapters_N))
    hidden_RD = hidden_ND.index_select(0, inputs.sampled_R)
    return _sample_next(decoder, state, _read_rows(state, inputs.slots_R), hidden_RD, groups=form.sampling_groups)


class _Rows(NamedTuple):
    """Rows of a pass as the state has them before it.

    Attributes:
      slots_B: int64.
      token_B, numbers_CB: their columns of the state.
      running_B: bool, whether each has not ended.
    """

    slots_B: Tensor
    token_B: Tensor
    numbers_CB: Tensor
    running_B: Tensor


def _read_rows(state: DecodeState, slots_B: Tensor) -> _Rows:
    """Read the rows of some slots from a state."""
    numbers_CB = state.numbers_CS.index_select(1, slots_B)
    return _Rows(slots_B, state.tokens_S.index_select(0, slots_B), numbers_CB, numbers_CB[ENDED] == 0)


def _sample_next(
    decoder: Decoder, state: DecodeState, rows: _Rows, hidden_BD: Tensor, groups: tuple[tuple[int, Sampling], ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample the next token of each row from its hidden state, and update the state; as `decode_pass`."""
    if decoder.part.mesh.size("tensor") == 1 and samples_by_kernels(hidden_BD, groups):
        return _sample_by_kernels(decoder, state, rows.slots_B, hidden_BD, groups=groups)
    rows_B, token_B, numbers_CB, running_B = rows
    length_B, prompt_B, limit_B, seed_B, group_B = numbers_CB[:ENDED]
    sampled_B, *logps = _sample(
        decoder, hidden_BD, stream_noise(seed_B, length_B - prompt_B), group_B=group_B, groups=groups
    )
    last_B = length_B + running_B.long()
    stopped_B = (numbers_CB[STOP:] == sampled_B).any(0) | (last_B >= limit_B)
    state.tokens_S.index_copy_(0, rows_B, torch.where(running_B, sampled_B, token_B))
    state.numbers_CS[LENGTH].index_copy_(0, rows_B, last_B)
    state.numbers_CS[ENDED].index_copy_(0, rows_B, torch.where(running_B, stopped_B.long(), 1))
    return sampled_B, logps[0], logps[1]


def _sample(
    decoder: Decoder, hidden_BD: Tensor, noise_B: Tensor, group_B: Tensor, groups: tuple[tuple[int, Sampling], ...]
) -> tuple[Tensor, ...]:
    """Sample one token per row: each sampling group samples every row, and a row keeps its own group's token."""
    parts = []
    for low in range(0, len(hidden_BD), decoder.rows_at_once):
        rows = slice(low, low + decoder.rows_at_once)
        logits_RC = decoder.own_logits(hidden_BD[rows])
        sampled = None
        for number, sampling in groups:
            tokens = sample_shared_tokens(logits_RC, noise_B[rows], sampling, decoder.part, static=True)
            in_group_R = group_B[rows] == number
            sampled = tokens if sampled is None else tuple(map(torch.where, (in_group_R,) * 3, tokens, sampled))
        parts.append(sampled)
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def fused_pass(
    decoder: Decoder,
    hidden: Callable[[Tensor, SlotState], Tensor],
    state: DecodeState,
    rows_B: Tensor,
    groups: tuple[tuple[int, Sampling], ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """`decode_pass` whose hidden states come straight from the state, and whose kernels sample and update it.

    Args:
      decoder: the model.
      hidden: (slots, state) -> hidden states [B, D] of their last tokens, as `FusedDecoder.hidden`.
      state, rows_B: as in `decode_pass`.
      groups: as `DecodeForm.sampling_groups`.
    """
    hidden_BD = hidden(rows_B, SlotState(*state))
    if samples_by_kernels(hidden_BD, groups):
        return _sample_by_kernels(decoder, state, rows_B, hidden_BD, groups=groups)
    return _sample_next(decoder, state, _read_rows(state, rows_B), hidden_BD, groups=groups)


def _sample_by_kernels(
    decoder: Decoder, state: DecodeState, rows_B: Tensor, hidden_BD: Tensor, groups: tuple[tuple[int, Sampling], ...]
) -> tuple[Tensor, Tensor, Tensor]:
    # Twice as many rows as operators take at a time: no probabilities stand beside the logits.
    return sample_next_tokens(
        SlotState(*state), rows_B, hidden_BD, groups, decoder.own_logits, 2 * decoder.rows_at_once
    )
