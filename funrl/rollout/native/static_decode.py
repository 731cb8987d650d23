"""The host's side of decoding by passes of static shape: what has changed since the last pass goes to the device.

A pass takes a constant number of calls, whatever the number of sequences: those that came or went, or got a page, are
copied together. What was drawn is read one pass late.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from funrl.mesh.mesh import Mesh
from funrl.models.model import Model
from funrl.rollout.native.backends import Backend, TorchBackend
from funrl.rollout.native.captured import CapturedFunctions
from funrl.rollout.native.decode_state import STOP, DecodeForm, DecodeState, decode_pass, empty_state
from funrl.rollout.native.flights import NO_HOLDER, Flights
from funrl.rollout.native.host_copy import HostCopy, device_copy
from funrl.rollout.native.scheduler import Scheduler
from funrl.rollout.sampling_parameters import Sampling

MOST_KINDS = 4  # ways to draw in one pass; every sequence is drawn in all of them


class StaticDecode:
    """Passes that only decode."""

    def __init__(self, backend: TorchBackend, flights: Flights, scheduler: Scheduler, problem: str | None = None):
        """
        Args:
          flights: with a seat for each row and one more, which nobody ever gets.
          problem: a reason why passes are not captured as CUDA graphs.
        """
        self._backend, self._flights, self._scheduler = backend, flights, scheduler
        self._device, slots = flights.last.device, len(flights.lengths)
        self._graphs, self._state = CapturedFunctions(self._device, problem), None
        self._rows: dict[int, tuple[Tensor, np.ndarray]] = {}  # of each size: slots on the device and here
        # What the device knows of each slot: whose it is, its tokens, its pages.
        self._serials, self._lengths, self._owned = (np.full(slots, NO_HOLDER) for _ in range(3))

    def drop(self) -> None:
        """Forget what depends on the weights' and the cache's memory."""
        self._graphs.drop()
        self._serials[:] = NO_HOLDER

    def kinds(self, seats: np.ndarray) -> tuple[tuple[int, Sampling], ...] | None:
        """The ways in which some seats are drawn; None: not by one pass of static shape."""
        kinds = self._flights.kinds_of(seats)
        return None if len(kinds) > MOST_KINDS or any(how.repetition_penalty != 1 for _, how in kinds) else kinds

    def run(self, seats: np.ndarray, kinds: tuple[tuple[int, Sampling], ...], pages: int) -> HostCopy:
        """Draw the next token of some seats, each of which has a page for its last one.

        Args:
          kinds: of these seats.
          pages: of the cache; the one behind them is spare.
        """
        state, rows = self._updated(seats), bucket(len(seats), len(self._lengths) - 1)
        form = DecodeForm(rows, self._read_pages(seats), kinds)
        rows_B = self._rows_of(seats, rows)
        found = self._graphs.run(form, lambda: decode_pass(self._backend, state, rows_B, form, pages))
        self._lengths[seats] += 1
        return HostCopy(found)

    def _updated(self, seats: np.ndarray) -> DecodeState:
        """The state, with what some seats are now."""
        flights, scheduler = self._flights, self._scheduler
        most, stops = scheduler.most_pages_of(seats), flights.stop_columns
        state = self._state
        if state is None or state.table_SP.shape[1] < most or len(state.numbers_CS) != STOP + stops:
            width = bucket(max(most, 0 if state is None else state.table_SP.shape[1]))
            state = self._state = empty_state(flights.last, stops, width)
            self.drop()
        other = self._serials[seats] != flights.serials[seats]
        new = seats[other | (self._lengths[seats] != flights.lengths[seats])]
        if len(new):
            at = device_copy(new, self._device)
            state.numbers_CS.index_copy_(1, at, device_copy(flights.numbers_of(new), self._device))
            self._lengths[new] = flights.lengths[new]
        owned = scheduler.pages_of(seats)
        moved = seats[other | (self._owned[seats] != owned)]
        if len(moved):
            at, table = device_copy(moved, self._device), scheduler.table_of(moved, state.table_SP.shape[1])
            state.table_SP.index_copy_(0, at, device_copy(table, self._device))
        self._serials[seats], self._owned[seats] = flights.serials[seats], owned
        return state

    def _read_pages(self, seats: np.ndarray) -> int:
        """Pages that attention may read: all that there can be where a kernel stops at a sequence's end by itself."""
        assert self._state is not None
        width = self._state.table_SP.shape[1]
        return width if self._backend.by_kernel else bucket(int(self._owned[seats].max()), width)

    def _rows_of(self, seats: np.ndarray, rows: int) -> Tensor:
        """Slots on the device, in memory that stays."""
        if rows not in self._rows:
            self._rows[rows] = torch.zeros(rows, dtype=torch.int64, device=self._device), np.full(rows, NO_HOLDER)
        there_B, here = self._rows[rows]
        if not np.array_equal(here[: len(seats)], seats) or (here[len(seats) :] != len(self._lengths) - 1).any():
            here[: len(seats)], here[len(seats) :] = seats, len(self._lengths) - 1
            there_B.copy_(device_copy(here, self._device))
        return there_B


def bucket(count: int, most: int | None = None) -> int:
    """The next power of two, so that few sizes occur, or `most`."""
    size = 1 << max(0, count - 1).bit_length()
    return size if most is None else min(size, most)


def static_problem(model: Model, backend: Backend, speculate: int) -> str | None:
    """The reason why decoding is not by passes of static shape; None: it can be."""
    if not isinstance(backend, TorchBackend):
        return "the compiled step computes on the CPU"
    if speculate:
        return "drafts are made on the host"
    return None


def graph_problem(mesh: Mesh) -> str | None:
    """The reason why passes are not captured as CUDA graphs; None: they are."""
    if mesh.device.type != "cuda":
        return f"there are none on {mesh.device.type}"
    if mesh.size("tensor") > 1:
        return f"ranks of {mesh} talk in each layer"
    return None
