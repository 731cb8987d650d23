"""Backend of ranks that share the experts of one replica: attention is data parallel, and tokens go to their experts.

The ranks of `expert` are lanes. All of them make the same calls and know every row of the replica, but each has pages,
and computes attention and all else that is dense, for the rows of its own lane alone. In layers of experts they
exchange tokens. So that they meet in every exchange, each computes as many tokens as the lane with the most: a rank
whose lane has fewer, or none, computes padding in a spare page, which goes to no expert. The host knows these numbers
from the plan of the pass, and waits for nothing. Sampled tokens are gathered, so that every rank has those of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from funrl.compiled_kernels.paged_attention import Paging
from funrl.mesh.collectives import all_gather, psum
from funrl.mesh.mesh import Mesh
from funrl.models.model import Layer, Model
from funrl.rollout.native.backends import TorchBackend
from funrl.rollout.native.device.decode_state import DecodeForm, DecodeState, RowAdapters, Spare
from funrl.rollout.native.device.host_copy import device_copy
from funrl.rollout.native.lanes import LaneRows, places_in_lanes
from funrl.rollout.native.passes import PassWork, SampledRows
from funrl.rollout.sampling_parameters import Sampling


class ExpertLanesBackend(TorchBackend):
    """The training model itself, of which the ranks of "expert" compute a lane each. Collective over "expert"."""

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        dtype: torch.dtype,
        layer: Layer | None,
        page_tokens: int,
        record_routes: bool = False,
    ):
        """Make it; the arguments are those of `TorchBackend`."""
        super().__init__(model, mesh, dtype, layer, page_tokens, record_routes)
        self.lanes = mesh.size("expert")
        self.spare = 1
        # The engine counts the pages of all lanes, of which this rank has one.
        self.page_bytes = -(-self.page_bytes // self.lanes)
        self.cell_bytes = -(-self.cell_bytes // self.lanes)
        self._own = int(mesh.index("expert"))
        self._pages = 0  # of a lane
        self._cells = 0
        self._lane_M = np.zeros(0, dtype=np.int64)  # of the sampled positions of the last pass
        self._place_M = self._lane_M  # of each in its lane

    def resize(self, pages: int, cells: int = 0) -> None:
        """Replace the cache of this lane; the numbers are of all lanes."""
        self._pages = pages // self.lanes
        self._cells = cells // self.lanes
        super().resize(self._pages, self._cells)

    def routes(self, pages: Sequence[int], tokens: int) -> Tensor:
        """As `TorchBackend.routes`, on all ranks."""
        if not pages:  # of a request that was canceled while it waited; every rank sees that
            return super().routes(pages, tokens)
        own = pages[0] // self._pages == self._own
        ids_TC = super().routes([page % self._pages for page in pages], tokens)
        ids_TC = ids_TC if own else torch.zeros_like(ids_TC)
        return psum(ids_TC.to(self.mesh.device, torch.int32), self.mesh, "expert").to("cpu", ids_TC.dtype)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pages of this lane."""
        pairs = [pair for pair in zip(sources, targets, strict=True) if pair[0] // self._pages == self._own]
        if pairs:
            super().copy_pages(*([page % self._pages for page in pages] for pages in zip(*pairs, strict=True)))

    def copy_cells(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy cells of this lane."""
        own = [(a % self._cells, b % self._cells) for a, b in copies if a // self._cells == self._own]
        if own:
            super().copy_cells(own)

    def forward(self, work: PassWork) -> Tensor:
        """Hidden states of this lane's sampled positions, or of some token where it has none."""
        counts_S = np.asarray(work.counts)
        lane_S = work.table_SP[:, 0].numpy() // self._pages
        sequence_N = np.repeat(np.arange(len(counts_S)), counts_S)
        own_N = np.flatnonzero(lane_S[sequence_N] == self._own)
        position_M = np.asarray(work.sampled_positions, dtype=np.int64)
        self._lane_M = lane_S[sequence_N[position_M]]
        places_M, rows = places_in_lanes(self._lane_M, self.lanes) if len(position_M) else (position_M, 1)
        self._place_M = places_M % rows
        own_M = np.searchsorted(own_N, position_M[self._lane_M == self._own])
        tokens = int(np.bincount(lane_S, counts_S, self.lanes).max())
        own_work = self._own_work(work, np.flatnonzero(lane_S == self._own), own_N, tokens - len(own_N))
        return super().forward(own_work._replace(sampled_positions=own_M if len(own_M) else [0]))

    def _own_work(self, work: PassWork, own_S: np.ndarray, own_N: np.ndarray, lacks: int) -> PassWork:
        """The part of a pass that this lane computes, with padding of some tokens."""
        whole, rest = divmod(lacks, self.page_tokens)
        padding = np.array([self.page_tokens] * whole + [rest] * (rest > 0), dtype=np.int64)

        def padded(numbers: Sequence[int] | np.ndarray | None, filling: np.ndarray | int) -> Any:
            if numbers is None:
                return None
            return np.concatenate([np.asarray(numbers)[own_S], np.broadcast_to(filling, len(padding))])

        spare_SP = work.table_SP.new_full((len(padding), work.table_SP.shape[1]), self._pages)
        own_tokens_N = work.tokens_N[device_copy(own_N, work.tokens_N.device)]
        requests = work.requests and [*(work.requests[i] for i in own_S), *[None] * len(padding)]
        return PassWork(
            torch.cat([own_tokens_N, own_tokens_N.new_zeros(lacks)]),
            padded(work.counts, padding),
            padded(work.ends, padding),
            torch.cat([work.table_SP[torch.from_numpy(own_S)] % self._pages, spare_SP]),
            (),
            adapters=padded(work.adapters, -1),
            cells=None if work.cells is None else padded(work.cells % self._cells, self._cells),
            requests=requests,
        )

    def hidden(
        self,
        tokens_N: Tensor,
        paging: Paging,
        adapters: RowAdapters | None = None,
        cells_S: Tensor | None = None,
        owned: Mapping[str, Any] = {},
    ) -> Tensor:
        """As `TorchBackend.hidden`; tokens in the spare page are padding, which goes to no expert."""
        real_1N = (paging.places_N < self._pages * self.page_tokens).long().unsqueeze(0)
        return super().hidden(tokens_N, paging, adapters, cells_S, {"segments": real_1N, **owned})

    def sample(
        self, output_M: Tensor, source_R: Tensor, noise_R: Tensor | None, sampling: Sampling, seen_RV: Tensor | None
    ) -> SampledRows:
        """Sample the rows of this lane, and gather those of all lanes."""
        own_R, place_R, all_R = self._lane_of(source_R)
        noise_R, seen_RV = (None if x is None else x[own_R] for x in (noise_R, seen_RV))
        sampled = super().sample(output_M, place_R, noise_R, sampling, seen_RV)
        token_R, sampling_logp_R, raw_logp_R = (x[all_R] for x in self._of_all_lanes(sampled))
        return token_R, sampling_logp_R, raw_logp_R

    def keep(self, output_M: Tensor, source_R: Tensor, token_R: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """As `TorchBackend.keep` of the rows of this lane; the results are those of all lanes."""
        own_R, place_R, all_R = self._lane_of(source_R)
        kept = super().keep(output_M, place_R, token_R[own_R], sampling)
        logp_R, bits_RB = (all_gather(x, self.mesh, "expert")[all_R] for x in kept)
        return logp_R, bits_RB

    def _lane_of(self, source_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of this lane among some that sample.

        Args:
          source_R: position of each row among those of the last pass.

        Returns: indices of this lane's rows, padded with 0 to the most of a lane; the output of each; the place of
          every row where the lanes stand one after the other.
        """
        source = source_R.cpu().numpy()
        lane_R = self._lane_M[source]
        all_R, rows = places_in_lanes(lane_R, self.lanes)
        own_R = np.flatnonzero(lane_R == self._own)
        padding = 0, rows - len(own_R)
        indices = np.pad(own_R, padding), np.pad(self._place_M[source[own_R]], padding), all_R
        own, place, everywhere = (device_copy(x, source_R.device) for x in indices)
        return own, place, everywhere

    def decode(
        self, state: DecodeState, rows_B: Tensor, form: DecodeForm, spare: Spare
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `TorchBackend.decode` of rows of this lane; the results are those of all lanes, one after the other."""
        return self._of_all_lanes(super().decode(state, rows_B, form, spare))

    def lane_rows(self, lane_R: np.ndarray) -> LaneRows:
        """Rows of a pass by their lanes."""
        at_R, rows = places_in_lanes(lane_R, self.lanes)
        most = int(np.bincount(lane_R, minlength=self.lanes).max())
        return LaneRows(np.flatnonzero(lane_R == self._own), most, lane_R, at_R % rows)

    def own_pages(self, pages: np.ndarray) -> np.ndarray:
        """Numbers of pages in their lanes."""
        return pages % self._pages

    def own_cells(self, cells_R: np.ndarray | None) -> np.ndarray | None:
        """Numbers of cells in their lanes."""
        return None if cells_R is None else cells_R % self._cells

    @property
    def mixes(self) -> bool:
        """False: lanes have other prompts each."""
        return False

    def _of_all_lanes(self, sampled: SampledRows) -> SampledRows:
        """Sampled rows of all lanes, of which each has equally many."""
        numbers_3B = torch.stack([x.double() for x in sampled])  # token ids too are exact in float64
        numbers_3R = all_gather(numbers_3B, self.mesh, "expert", dim=1)
        token_R, sampling_logp_R, raw_logp_R = (x.to(like.dtype) for x, like in zip(numbers_3R, sampled, strict=True))
        return token_R, sampling_logp_R, raw_logp_R
