"""Host side of passes of static shape: copies what has changed since the last pass to the device.

A pass takes a constant number of calls for any number of sequences: all changes (new or ended sequences, new pages) are
copied together. Sampled tokens are read a pass later or more. A pass that computes prompts too is padded to one of a
few numbers of tokens.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.models.lora import Adapter
from funrl.models.model import Model
from funrl.rollout.native.backends import TorchBackend
from funrl.rollout.native.device.captured import CapturedFunctions
from funrl.rollout.native.device.decode_state import (
    STOP,
    DecodeForm,
    DecodeState,
    MixedInputs,
    Spare,
    empty_state,
    mixed_pass,
)
from funrl.rollout.native.device.host_copy import HostCopy, device_copy
from funrl.rollout.native.device.row_sampler import SamplingGroups
from funrl.rollout.native.lanes import bucket
from funrl.rollout.native.passes import Backend, PassPlan
from funrl.rollout.native.scheduler import Scheduler
from funrl.rollout.native.sequences import NO_HOLDER, RunningSequences

MAX_SAMPLING_GROUPS = 4  # of a pass; every sequence is sampled in each group
MIXED_TOKENS = (256, 512, 768, 1024, 1536, 2048)  # new tokens that a pass with prompts is padded to
ROW_STEPS = ((8, 64), (16, 256), (32, 512))  # above 8: (step, largest number of rows that it is for)
LARGER_RUNS = 16  # of a captured pass of up to twice the rows before one of fewer rows is captured, which takes as long


class _MixedBuffer(NamedTuple):
    """Inputs of passes with prompts, at addresses that stay the same.

    Attributes:
      numbers: all of them except the tokens, one after the other.
      inputs: views of it, and the tokens.
    """

    numbers: Tensor
    inputs: MixedInputs


class StaticDecode:
    """Passes of static shape: those that only decode, and those that compute few tokens of prompts beside it."""

    def __init__(self, backend: TorchBackend, sequences: RunningSequences, scheduler: Scheduler):
        """Begin without captured passes.

        Args:
          backend: computes the passes.
          sequences: with a slot for each row and a spare one that is never assigned.
          scheduler: knows the pages of each slot.
        """
        self._backend = backend
        self._sequences = sequences
        self._scheduler = scheduler
        self._device = sequences.last.device
        slots = len(sequences.lengths)
        self._graphs = CapturedFunctions(backend.mesh)
        self._state = None
        self._spare_page: int | None = None  # in the table of the spare slot
        self._rows: dict[int, tuple[Tensor, np.ndarray]] = {}  # by number of rows: slots on the device and on the host
        self._mixed: dict[tuple[int, int], _MixedBuffer] = {}  # by numbers of tokens and rows
        self._larger_runs: Counter[DecodeForm] = Counter()  # of forms that were not captured
        # What the device has of each slot: serial of its holder, length, number of pages.
        self._serials, self._lengths, self._owned = (np.full(slots, NO_HOLDER) for _ in range(3))

    @property
    def captured(self) -> int:
        """Number of captured passes."""
        return self._graphs.captured

    @property
    def uncaptured(self) -> int:
        """Number of passes so far that ran eagerly, as none of their kind can be captured."""
        return self._graphs.uncaptured

    @property
    def load_bytes(self) -> int:
        """Bytes of new weights, and of what is made of them, beside those that passes compute with."""
        return self._backend.load_bytes

    def drop(self) -> None:
        """Forget what depends on the addresses of weights and cache."""
        self._graphs.drop()
        self._larger_runs.clear()
        self._serials[:] = NO_HOLDER

    def load(self, params: trees.Tree) -> None:
        """Replace the weights; captured passes stay if the new ones fit into the memory of those before."""
        if not self._backend.overwrite(params):
            self.drop()

    def load_adapter(self, number: int, adapter: Adapter) -> None:
        """Replace the factors of an adapter likewise."""
        if not self._backend.overwrite_adapter(number, adapter):
            self.drop()

    def drop_adapter(self, number: int) -> None:
        """Forget the passes of an adapter, which hold its factors and memory of their own."""
        self._graphs.drop_where(lambda form: number in form.adapters)
        self._larger_runs = Counter({form: n for form, n in self._larger_runs.items() if number not in form.adapters})

    def sampling_groups(self, slots: np.ndarray) -> SamplingGroups | None:
        """The sampling groups of `slots`; None: one pass of static shape cannot sample them."""
        groups = self._sequences.sampling_groups_of(slots)
        penalised = any(sampling.repetition_penalty != 1 for _, sampling in groups)
        return None if penalised or len(groups) > MAX_SAMPLING_GROUPS else groups

    def run(self, slots: np.ndarray, groups: SamplingGroups, spare: Spare) -> HostCopy:
        """Sample the next token of each of `slots`, which have pages for their last tokens.

        Args:
          slots: slots to decode.
          groups: their sampling groups.
          spare: unused part of the cache.
        """
        state = self._updated(slots, spare)
        lanes = self._backend.lane_rows(self._scheduler.lanes_of(slots))
        form = self._form(slots, len(slots) if lanes is None else lanes.most, groups)
        rows_B = self._rows_of(slots if lanes is None else slots[lanes.own], form.rows)
        sampled = self._graphs.run(form, lambda: self._backend.decode(state, rows_B, form, spare))
        if lanes is not None:
            place_R = device_copy(lanes.places(form.rows), self._device)
            sampled = tuple(x.index_select(0, place_R) for x in sampled)
        self._lengths[slots] += 1
        return HostCopy(sampled)

    def run_plan(self, plan: PassPlan, spare: Spare) -> HostCopy | None:
        """Run a planned pass that also computes prompts; None: it has no static shape, and has not been run.

        Pages are copied behind the captured pass: padded to a constant number, they would take longer than the pass.

        Args:
          plan: of the scheduler, which has recorded it.
          spare: unused part of the cache, whose page padding writes to.
        """
        self._backend.stack_weights()  # before eager passes too, so that all compile for the same weights
        groups = self.sampling_groups(plan.sampling_slots) if plan.plain and self._backend.mixes else None
        count = len(plan.work.tokens_N)
        if not groups or count > MIXED_TOKENS[-1]:  # a pass that samples nothing has a part of a long prompt alone
            return None
        if count == len(plan.slots) and np.array_equal(plan.slots, plan.sampling_slots):  # each samples after one token
            return self.run(plan.slots, groups, spare)
        slots = np.union1d(plan.slots, plan.sampling_slots)
        state = self._updated(slots, spare)
        rows = max(len(plan.slots), len(plan.sampling_slots))
        tokens = next(tokens for tokens in MIXED_TOKENS if tokens >= count)
        form = self._form(slots, rows, groups, tokens=tokens)
        inputs = self._mixed_inputs(plan, form, spare)
        compute = functools.partial(mixed_pass, self._backend, state, inputs, form)
        sampled = self._graphs.run(form, compute, "passes with prompts")
        if plan.copies:
            self._backend.copy_pages(*zip(*plan.copies, strict=True))
        self._lengths[plan.sampling_slots] += 1
        return HostCopy(sampled)

    def _form(self, slots: np.ndarray, rows: int, groups: SamplingGroups, tokens: int = 0) -> DecodeForm:
        """Constants of a pass of at least some rows, which reads the pages of some slots.

        A captured pass of more rows is taken until a capture of the smallest one is worth its time.
        """
        adapters = tuple(np.unique(self._scheduler.adapters_of(slots)).tolist())
        rows = row_bucket(rows, len(self._lengths) - 1)
        form = DecodeForm(rows, self._read_pages(slots), groups, adapters, tokens)
        if form in self._graphs.keys or self._larger_runs[form] == LARGER_RUNS:
            return form
        sizes = {captured.rows for captured in self._graphs.keys if rows < captured.rows <= 2 * rows}
        larger = [form._replace(rows=size) for size in sorted(sizes) if form._replace(rows=size) in self._graphs.keys]
        self._larger_runs[form] += bool(larger)
        return larger[0] if larger else form

    def _mixed_inputs(self, plan: PassPlan, form: DecodeForm, spare: Spare) -> MixedInputs:
        """Inputs of a pass on the device, padded. Padding tokens are in sequences of a page's length at most."""
        page = self._backend.page_tokens
        spare_slot = len(self._lengths) - 1
        work = plan.work
        count = len(work.tokens_N)
        sequences = form.rows + -(-form.tokens // page)
        whole, rest = divmod(form.tokens - count, page)
        padding = [page] * whole + [rest] * (rest > 0)

        def of_sequences(numbers: np.ndarray, padding: list[int], filling: int) -> np.ndarray:
            numbers = np.concatenate([numbers, np.array(padding, dtype=np.int64)])
            return np.pad(numbers, (0, sequences - len(numbers)), constant_values=filling)

        counts_S = of_sequences(np.asarray(work.counts), padding, 0)
        ends_S = of_sequences(np.asarray(work.ends), padding, 1)
        slots_S = of_sequences(plan.slots, [], spare_slot)
        offsets_S1 = np.append(0, np.cumsum(counts_S))
        sequence_N = np.repeat(np.arange(sequences), counts_S)
        positions_N = np.arange(form.tokens) + (ends_S - offsets_S1[1:])[sequence_N]
        pages_N = self._scheduler.page_at(slots_S[sequence_N[:count]], positions_N[:count])
        pages_N = np.pad(pages_N, (0, form.tokens - count), constant_values=spare.page)
        adapters_N = self._scheduler.adapters_of(slots_S)[sequence_N]
        adapters_N[count:] = form.adapters[0]
        rows = form.rows - len(plan.sampling_slots)
        sampled_R = np.pad(np.asarray(work.sampled_positions)[plan.sources], (0, rows))
        slots_R = np.pad(plan.sampling_slots, (0, rows), constant_values=spare_slot)
        given = (pages_N * page + positions_N % page, positions_N, adapters_N)
        parts = (*given, slots_S, offsets_S1, ends_S, sampled_R, slots_R)
        key = form.tokens, form.rows
        if key not in self._mixed:
            numbers = torch.zeros(sum(map(len, parts)), dtype=torch.int64, device=self._device)
            tokens_N = torch.zeros(form.tokens, dtype=torch.int64, device=self._device)
            self._mixed[key] = _MixedBuffer(numbers, MixedInputs(tokens_N, *numbers.split([len(x) for x in parts])))
        buffer = self._mixed[key]
        buffer.numbers.copy_(device_copy(np.concatenate(parts), self._device))
        buffer.inputs.tokens_N[:count].copy_(work.tokens_N)
        return buffer.inputs

    def _updated(self, slots: np.ndarray, spare: Spare) -> DecodeState:
        """Bring the state up to date for some slots, and for the spare one, whose page padding reads."""
        sequences = self._sequences
        scheduler = self._scheduler
        most = scheduler.most_pages_of(slots)
        stops = sequences.stop_columns
        state = self._state
        if state is None or state.table_SP.shape[1] < most or len(state.numbers_CS) != STOP + stops:
            width = bucket(max(most, 0 if state is None else state.table_SP.shape[1]))
            state = self._state = empty_state(sequences.last, stops, width)
            self._spare_page = None
            self.drop()
        if spare.page != self._spare_page:
            state.table_SP[-1].fill_(spare.page)
            self._spare_page = spare.page
        other = self._serials[slots] != sequences.serials[slots]
        new = slots[other | (self._lengths[slots] != sequences.lengths[slots])]
        if len(new):
            index = device_copy(new, self._device)
            cells = self._backend.own_cells(scheduler.cells.of_slots(new))
            columns = sequences.device_columns_of(new, scheduler.adapters_of(new), cells)
            state.numbers_CS.index_copy_(1, index, device_copy(columns, self._device))
            self._lengths[new] = sequences.lengths[new]
        owned = scheduler.pages_of(slots)
        moved = slots[other | (self._owned[slots] != owned)]
        if len(moved):
            index = device_copy(moved, self._device)
            table = self._backend.own_pages(scheduler.table_of(moved, state.table_SP.shape[1]))
            state.table_SP.index_copy_(0, index, device_copy(table, self._device))
        self._serials[slots] = sequences.serials[slots]
        self._owned[slots] = owned
        return state

    def _read_pages(self, slots: np.ndarray) -> int:
        """Bound on the pages that attention reads; the largest possible if the kernel stops at each sequence's end."""
        assert self._state is not None
        width = self._state.table_SP.shape[1]
        return width if self._backend.by_kernel else bucket(int(self._owned[slots].max()), width)

    def _rows_of(self, slots: np.ndarray, rows: int) -> Tensor:
        """Slots on the device, at an address that stays the same."""
        if rows not in self._rows:
            self._rows[rows] = torch.zeros(rows, dtype=torch.int64, device=self._device), np.full(rows, NO_HOLDER)
        device_B, host = self._rows[rows]
        if not np.array_equal(host[: len(slots)], slots) or (host[len(slots) :] != len(self._lengths) - 1).any():
            host[: len(slots)] = slots
            host[len(slots) :] = len(self._lengths) - 1
            device_B.copy_(device_copy(host, self._device))
        return device_B


def row_bucket(count: int, most: int) -> int:
    """Number of rows that a pass of `count` rows is padded to: 1, 2, 4, 8, then by steps that grow, at most `most`."""
    step = next((step for step, largest in ROW_STEPS if count <= largest), ROW_STEPS[-1][0])
    return min(bucket(count) if count <= ROW_STEPS[0][0] else -(-count // step) * step, most)


def static_problem(model: Model, backend: Backend, speculate: int, record_kept: bool = False) -> str | None:
    """Reason why decoding cannot use passes of static shape; None: it can."""
    if not isinstance(backend, TorchBackend):
        return "the compiled step computes on the CPU"
    if speculate:
        return "drafts are made on the host"
    if record_kept:
        return "the tokens that could be sampled are recorded"
    if model.owned is not None:
        return "prompts may own pictures, whose positions are made on the host"
    return None


def drafts_problem(device: str, max_rows: int) -> str | None:
    """Reason why an engine may not draft; None: it may."""
    if device == "cpu" or max_rows == 1:
        return None
    return (
        f"drafts are made on the host, so that no pass on {device} is a CUDA graph, and several rows lose more time by "
        "that than drafts save"
    )
