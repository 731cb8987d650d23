"""Scores of tokens under a truncated distribution: renormalised over the tokens that could have been sampled.

With S_t the tokens that were kept at t, p'(v) = p(v) / sum_{u in S_t} p(u) for v in S_t, else 0. All sums are taken in
float64 in the order of the ids, so that engine and trainer compute the same bits from the same log-probabilities.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funrl.compiled_kernels.linear_logprob import TokenScores


class KeptTokens(NamedTuple):
    """Tokens that could be sampled at each of N places.

    Attributes:
      ids_M: ids of one place after another, ascending at each.
      counts_N: int64, ids of each place; 0: nothing was truncated there.
    """

    ids_M: Tensor
    counts_N: Tensor

    @property
    def places_M(self) -> Tensor:
        """The place of each id."""
        numbers_N = torch.arange(len(self.counts_N), device=self.counts_N.device)
        return numbers_N.repeat_interleave(self.counts_N, output_size=len(self.ids_M))

    @property
    def columns_M(self) -> Tensor:
        """The number of each id among those of its place."""
        begins_N = self.counts_N.cumsum(0) - self.counts_N
        return torch.arange(len(self.ids_M), device=self.ids_M.device) - begins_N[self.places_M]

    def padded(self) -> Tensor:
        """[N, K] int64, with 0 after the ids of places that have fewer than K."""
        most = int(self.counts_N.max()) if len(self.counts_N) else 0
        ids_NK = self.ids_M.new_zeros(len(self.counts_N), most, dtype=torch.int64)
        ids_NK[self.places_M, self.columns_M] = self.ids_M.long()
        return ids_NK

    def select(self, places: Tensor) -> KeptTokens:
        """The tokens of some places, in this order."""
        counts = self.counts_N[places]
        begins = (self.counts_N.cumsum(0) - self.counts_N)[places]
        shift = begins - (counts.cumsum(0) - counts)
        total = int(counts.sum())
        index = shift.repeat_interleave(counts, output_size=total) + torch.arange(total, device=counts.device)
        return KeptTokens(self.ids_M[index], counts)


def truncated_scores(scores: TokenScores, logp_M: Tensor, kept: KeptTokens) -> TokenScores:
    """Scores under the distribution that is renormalised over the kept tokens; differentiable.

    Args:
      scores: under the whole distribution; log-probability, entropy and collision probability per place [N], or None.
      logp_M: nats, of each kept token under the whole distribution.
      kept: the kept tokens, among which each place's own token is.

    Example:
      >>> whole = TokenScores(logp=torch.tensor([0.5, 0.25]).log())
      >>> kept = KeptTokens(torch.tensor([0, 2]), torch.tensor([2, 0]))
      >>> truncated_scores(whole, torch.tensor([0.5, 0.3]).log(), kept).logp.exp()
      tensor([0.6250, 0.2500])
    """
    places_M = kept.places_M
    counted_N = kept.counts_N > 0
    wide_M = logp_M.double()
    top_N = wide_M.new_full(counted_N.shape, -torch.inf)
    top_N = top_N.scatter_reduce(0, places_M, wide_M.detach(), "amax").masked_fill(~counted_N, 0)

    def total(x_M: Tensor) -> Tensor:
        return torch.segment_reduce(x_M, "sum", lengths=kept.counts_N, unsafe=True)

    log_N = top_N + torch.where(counted_N, total((wide_M - top_N[places_M]).exp()), 1).log()
    kept_logp_M = wide_M - log_N[places_M]

    def chosen(whole_N: Tensor | None, truncated_N: Tensor) -> Tensor | None:
        return None if whole_N is None else torch.where(counted_N, truncated_N.to(whole_N.dtype), whole_N)

    logp = None if scores.logp is None else (scores.logp.double() - log_N).to(scores.logp.dtype)
    return scores._replace(
        logp=logp,
        entropy=chosen(scores.entropy, -total(kept_logp_M.exp() * kept_logp_M)),
        sum_pi_squared=chosen(scores.sum_pi_squared, total((2 * kept_logp_M).exp())),
    )
