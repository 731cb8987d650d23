"""Host side of decoding by passes of static shape: copies what has changed since the last pass to the device.

A pass takes a constant number of calls for any number of sequences: all changes (new or ended sequences, new pages) are
copied together. Sampled tokens are read one pass later.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from funrl.models.model import Model
from funrl.rollout.native.backends import TorchBackend
from funrl.rollout.native.device.captured import CapturedFunctions
from funrl.rollout.native.device.decode_state import STOP, DecodeForm, DecodeState, Spare, empty_state
from funrl.rollout.native.device.host_copy import HostCopy, device_copy
from funrl.rollout.native.passes import Backend
from funrl.rollout.native.scheduler import Scheduler
from funrl.rollout.native.sequences import NO_HOLDER, RunningSequences
from funrl.rollout.sampling_parameters import Sampling

MAX_SAMPLING_GROUPS = 4  # of a pass; every sequence is sampled in each group


class StaticDecode:
    """Passes that only decode."""

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
        self._rows: dict[int, tuple[Tensor, np.ndarray]] = {}  # by number of rows: slots on the device and on the host
        # What the device has of each slot: serial of its holder, length, number of pages.
        self._serials, self._lengths, self._owned = (np.full(slots, NO_HOLDER) for _ in range(3))

    def drop(self) -> None:
        """Forget what depends on the addresses of weights and cache."""
        self._graphs.drop()
        self._serials[:] = NO_HOLDER

    def sampling_groups(self, slots: np.ndarray) -> tuple[tuple[int, Sampling], ...] | None:
        """The sampling groups of `slots`; None: one pass of static shape cannot sample them."""
        groups = self._sequences.sampling_groups_of(slots)
        penalised = any(sampling.repetition_penalty != 1 for _, sampling in groups)
        return None if penalised or len(groups) > MAX_SAMPLING_GROUPS else groups

    def run(self, slots: np.ndarray, groups: tuple[tuple[int, Sampling], ...], spare: Spare) -> HostCopy:
        """Sample the next token of each of `slots`, which have pages for their last tokens.

        Args:
          slots: slots to decode.
          groups: their sampling groups.
          spare: unused part of the cache.
        """
        state = self._updated(slots)
        rows = bucket(len(slots), len(self._lengths) - 1)
        adapters = tuple(np.unique(self._scheduler.adapters_of(slots)).tolist())
        form = DecodeForm(rows, self._read_pages(slots), groups, adapters)
        rows_B = self._rows_of(slots, rows)
        sampled = self._graphs.run(form, lambda: self._backend.decode(state, rows_B, form, spare))
        self._lengths[slots] += 1
        return HostCopy(sampled)

    def _updated(self, slots: np.ndarray) -> DecodeState:
        """Bring the state up to date for some slots."""
        sequences = self._sequences
        scheduler = self._scheduler
        most = scheduler.most_pages_of(slots)
        stops = sequences.stop_columns
        state = self._state
        if state is None or state.table_SP.shape[1] < most or len(state.numbers_CS) != STOP + stops:
            width = bucket(max(most, 0 if state is None else state.table_SP.shape[1]))
            state = self._state = empty_state(sequences.last, stops, width)
            self.drop()
        other = self._serials[slots] != sequences.serials[slots]
        new = slots[other | (self._lengths[slots] != sequences.lengths[slots])]
        if len(new):
            index = device_copy(new, self._device)
            columns = sequences.device_columns_of(new, scheduler.adapters_of(new), scheduler.cells.of_slots(new))
            state.numbers_CS.index_copy_(1, index, device_copy(columns, self._device))
            self._lengths[new] = sequences.lengths[new]
        owned = scheduler.pages_of(slots)
        moved = slots[other | (self._owned[slots] != owned)]
        if len(moved):
            index = device_copy(moved, self._device)
            table = scheduler.table_of(moved, state.table_SP.shape[1])
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


def bucket(count: int, most: int | None = None) -> int:
    """The next power of two, at most `most`: few different sizes occur."""
    size = 1 << max(0, count - 1).bit_length()
    return size if most is None else min(size, most)


def static_problem(model: Model, backend: Backend, speculate: int) -> str | None:
    """Reason why decoding cannot use passes of static shape; None: it can."""
    if not isinstance(backend, TorchBackend):
        return "the compiled step computes on the CPU"
    if speculate:
        return "drafts are made on the host"
    if model.owned is not None:
        return "prompts may own pictures, whose positions are made on the host"
    return None
