"""Control rows of an engine in 8 bits: some of its completions, scored by the weights as they were loaded.

A control row is computed once more in one pass over its whole text, by the same kernels. As each token sees the tokens
that the engine has sampled before it, the first one that the row's own noise would sample otherwise is the first at
which decoding with those weights and that noise leaves the completion.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl.compiled_kernels.paged_attention import paging_of
from funrl.models.model import Inputs, ModelCache
from funrl.rollout.native.cache_sizes import pass_tokens
from funrl.rollout.native.float8_backend import Float8Backend
from funrl.rollout.native.sequence import RunningSequence
from funrl.rollout.sampling import sample_tokens, stream_noise


class ControlTotals(NamedTuple):
    """Sums over control rows, which are added over replicas.

    Attributes:
      rows: their number.
      tokens: of their completions.
      distance: sum over tokens of the distance of log-probabilities, in nats.
      kept: sum over rows of the share of tokens before the first that the same noise samples otherwise.
    """

    rows: float = 0.0
    tokens: float = 0.0
    distance: float = 0.0
    kept: float = 0.0


class ControlRows:
    """Scores every n-th request of an engine when it ends, unless parts of it are of other weights.

    Example: `engine.control.take()` are the totals since the last call.
    """

    def __init__(self, backend: Float8Backend, every: int):
        self._backend = backend
        self._every = every
        self._totals = ControlTotals()

    def take(self) -> ControlTotals:
        """Totals since the last call."""
        totals, self._totals = self._totals, ControlTotals()
        return totals

    @torch.no_grad()
    def add(self, sequence: RunningSequence) -> None:
        """Score a sequence that has ended, if it is a control row."""
        request = sequence.request
        sampling = request.sampling
        whole = request.begun is None and len(sequence.versions) == 1 and request.owned is None
        if request.number % self._every or not whole or sampling.greedy or sampling.repetition_penalty != 1:
            return
        first = len(request.prompt)
        tokens_T = torch.from_numpy(sequence.text).to(self._backend.mesh.device)
        hidden_RD = self._hidden(tokens_T[:-1], first - 1, sequence.adapter)
        sampled_R = tokens_T[first:]
        seed = torch.tensor(request.seed, device=tokens_T.device)
        noise_R = stream_noise(seed, torch.arange(len(sampled_R), device=tokens_T.device))
        logps = []
        others = []
        for rows in torch.arange(len(sampled_R), device=tokens_T.device).split(self._backend.rows_at_once):
            logits_RV = self._backend.logits(hidden_RD[rows]).float()
            logps.append(logits_RV.log_softmax(-1).gather(1, sampled_R[rows, None])[:, 0])
            others.append(sample_tokens(logits_RV, noise_R[rows], sampling)[0] != sampled_R[rows])
        distance = np.abs(torch.cat(logps).double().cpu().numpy() - sequence.logps[1]).sum()
        other_R = torch.cat(others).cpu().numpy()
        kept = int(other_R.argmax()) if other_R.any() else len(other_R)
        new = ControlTotals(1.0, len(other_R), float(distance), kept / len(other_R))
        self._totals = ControlTotals(*(a + b for a, b in zip(self._totals, new, strict=True)))

    def _hidden(self, tokens_T: Tensor, first: int, adapter: int) -> Tensor:
        """Hidden states of the tokens from `first` on, with a cache of their own, for which `CacheRoom` leaves room."""
        backend = self._backend
        page = backend.page_tokens
        device = tokens_T.device
        pages = -(-len(tokens_T) // page)
        table_SP = torch.arange(pages, dtype=torch.int32)[None]
        cache: ModelCache | None = backend.empty_cache(pages)
        parts = []
        most = pass_tokens(device.type)
        for begin in range(0, len(tokens_T), most):
            part_N = tokens_T[begin : begin + most]
            paging = paging_of([len(part_N)], [begin + len(part_N)], table_SP, page_tokens=page, device=device)
            hidden_ND, cache = backend.unquantized(Inputs(part_N[None], paging=paging), cache, adapter)
            parts.append(hidden_ND)
        return torch.cat(parts)[first:]
