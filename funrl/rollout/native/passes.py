"""Passes of an engine: the new tokens of many sequences, and what computes them.

The scheduler plans them, and a `Backend` computes them; neither knows the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from funrl import trees
from funrl.models.lora import Adapter
from funrl.rollout.native.cells import CellCopies
from funrl.rollout.requests import Request
from funrl.rollout.sampling_parameters import Sampling

SampledRows = tuple[Tensor, Tensor, Tensor]  # tokens [R] int64, their log-probabilities, sampling and raw, [R] nats


class PassWork(NamedTuple):
    """New tokens of some sequences.

    Attributes:
      tokens_N: int64 ids on the device, sequence by sequence.
      counts: new tokens of each sequence.
      ends: length of each sequence, including its new tokens.
      table_SP: int32 pages of each sequence in order, on the CPU.
      sampled_positions: indices into `tokens_N` of the tokens after which one is sampled.
      adapters: number of each sequence's adapter, -1: it has none; None: no sequence has one.
      cells: int64 cell of each sequence; None: the cache has none.
      requests: of each sequence whose prompt owns values; None: no prompt does.
    """

    tokens_N: Tensor
    counts: Sequence[int] | np.ndarray
    ends: Sequence[int] | np.ndarray
    table_SP: Tensor
    sampled_positions: Sequence[int] | np.ndarray
    adapters: np.ndarray | None = None
    cells: np.ndarray | None = None
    requests: Sequence[Request | None] | None = None


class PassPlan(NamedTuple):
    """A planned pass of the engine.

    Attributes:
      work: work of the backend.
      slots: slot of each of its sequences.
      sampling_slots: slots that sample a token, once for each token.
      sources: row of the backend's output for each of them.
      ahead: drafted tokens of the slot before each of them; None without drafts.
      copies: (from, to) pages to copy after the pass.
      cell_copies: cells to copy around it.
    """

    work: PassWork
    slots: np.ndarray
    sampling_slots: np.ndarray
    sources: np.ndarray
    ahead: np.ndarray | None
    copies: Sequence[tuple[int, int]]
    cell_copies: CellCopies

    @property
    def plain(self) -> bool:
        """True if it has neither drafts nor cells, and no prompt owns values."""
        return self.ahead is None and self.work.cells is None and self.work.requests is None


class Backend(Protocol):
    """A model with weights and a cache of pages, and perhaps of cells.

    Attributes:
      page_tokens: tokens of a page.
      page_bytes: bytes of a page, all layers together, on a rank.
      cell_bytes: bytes of a cell likewise; 0: the cache has none.
      vocab: size of the vocabulary.
      lanes: groups of devices with equally many pages and cells each, which sequences of other groups do not use.
    """

    page_tokens: int
    page_bytes: int
    cell_bytes: int
    vocab: int
    lanes: int

    def load(self, params: trees.Tree) -> None:
        """Replace this rank's weights."""
        ...

    def rest(self) -> None:
        """Free what is held beside weights and cache, and is computed again where it is needed."""
        ...

    def drop(self) -> None:
        """Release the weights."""
        ...

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that it computes with, by name, in the model's own form."""
        ...

    def load_adapter(self, number: int, adapter: Adapter | None) -> None:
        """Replace the adapter that `PassWork` calls by a number; None: remove it. The base has been loaded."""
        ...

    def held_adapter(self, number: int) -> Iterator[tuple[str, Tensor]]:
        """The factors that it computes with, by name; dims may be merged."""
        ...

    def resize(self, pages: int, cells: int) -> None:
        """Replace the cache by `pages` empty pages and `cells` cells; 0 frees it."""
        ...

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy keys and values of pages."""
        ...

    def copy_cells(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy cells, (from, to) pairs; what one writes no other reads."""
        ...

    def forward(self, work: PassWork) -> Tensor:
        """Input of `sample` for each of the work's sampled positions, [M, ...]."""
        ...

    def sample(
        self, output_M: Tensor, source_R: Tensor, noise_R: Tensor | None, sampling: Sampling, seen_RV: Tensor | None
    ) -> SampledRows:
        """Sample one token per row of `source_R`.

        Args:
          output_M: of `forward`.
          source_R: row of `output_M` for each sampled token.
          noise_R: float64 in (0, 1); None: greedy.
          sampling: temperature, truncation, penalty.
          seen_RV: bool, tokens that the sequence has; None: there is no penalty.
        """
        ...

    def keep(self, output_M: Tensor, source_R: Tensor, token_R: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Log-probabilities of sampled tokens, and bits of those that could be sampled, as `keep_tokens`."""
        ...


def run_plan(backend: Backend, plan: PassPlan) -> Tensor:
    """The output of a planned pass; cells and pages are copied around it."""
    if plan.cell_copies.before:
        backend.copy_cells(plan.cell_copies.before)
    output = backend.forward(plan.work)
    if plan.cell_copies.after:
        backend.copy_cells(plan.cell_copies.after)
    if plan.copies:
        backend.copy_pages([a for a, _ in plan.copies], [b for _, b in plan.copies])
    return output


def sampled_positions(
    slots: np.ndarray, counts: np.ndarray, lacking: np.ndarray, decoding: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens of a pass after which one is sampled: their indices, their slots, and the drafted tokens before each.

    Args:
      slots, counts: slot and number of new tokens of each sequence.
      lacking: tokens of each sequence that this pass does not compute.
      decoding: number of sequences, the first ones, that sample after each of their tokens.
    """
    if len(slots) == decoding == counts.sum():  # nearly always: no prompts, no drafts
        return np.arange(decoding), slots, np.zeros_like(slots)
    sampled = np.where(np.arange(len(slots)) < decoding, counts, lacking == 0)  # of each sequence
    ahead = np.arange(sampled.sum()) - np.repeat(np.cumsum(sampled) - sampled, sampled)
    return np.repeat(np.cumsum(counts) - sampled, sampled) + ahead, np.repeat(slots, sampled), ahead
