"""Sampling inside vLLM: replaces vLLM's sampler by the one that all engines share.

vLLM computes the logits. Sampling from them follows `Sampling` exactly, with the request's own random stream. So a
completion does not depend on whether another engine began it, or on interruptions, and each token has both of its
log-probabilities, raw and of the sampling distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl.rollout.kept_tokens import keep_tokens, unpack_ids
from funrl.rollout.sampling import sample_tokens, stream_noise
from funrl.rollout.sampling_parameters import Sampling

NO_TOKEN = -1  # vLLM gives out pairs of a token and a number; under this one the sampling log-probability travels


class RequestSampling(NamedTuple):
    """Sampling of a request.

    Attributes:
      sampling: sampling parameters.
      seed: of the request's random stream.
      begun: tokens of the completion that are part of vLLM's prompt.
    """

    sampling: Sampling
    seed: int
    begun: int


class RequestSampler:
    """A sampler for vLLM's model runner.

    Attributes:
      requests: sampling of each unfinished request, by vLLM's own id.
      unsampled: ids of tokens that are never sampled.
      kept: ids that the last step could sample, by vLLM's own id of the request; None: they are not recorded.
    """

    def __init__(self, runner: Any, unsampled: Sequence[int] = (), record_kept: bool = False):
        self.requests: dict[str, RequestSampling] = {}
        self.kept: dict[str, list[int]] | None = {} if record_kept else None
        self.unsampled = list(unsampled)
        self._runner = runner

    def __call__(self, logits: Tensor, sampling_metadata: Any, **_: Any) -> Any:
        """A token and two log-probabilities for each row of logits [R, V]."""
        from vllm.v1.outputs import LogprobsTensors, SamplerOutput  # type: ignore[import-not-found]

        ids = self._runner.input_batch.req_ids[: len(logits)]
        states = [self._runner.requests[name] for name in ids]
        if self.unsampled:
            logits[:, self.unsampled] = -torch.inf
        samplings = [self.requests[name] for name in ids]
        token_R, logp_R2 = sample_rows(logits, states, samplings)
        if self.kept is not None:
            kept = keep_rows(logits, token_R, logp_R2, samplings)
            self.kept = {ids[row]: x for row, x in kept.items()}
        pairs_R2 = torch.stack([token_R, torch.full_like(token_R, NO_TOKEN)], 1).int()
        rank_R = torch.zeros(len(token_R), dtype=torch.int64, device=logits.device)
        return SamplerOutput(token_R.int().unsqueeze(1), LogprobsTensors(pairs_R2, logp_R2, rank_R))


def keep_rows(
    logits_RV: Tensor, token_R: Tensor, logp_R2: Tensor, samplings: list[RequestSampling]
) -> dict[int, list[int]]:
    """Ids that truncated sampling could take, by row; the sampled tokens' log-probabilities among them are written.

    Args:
      logits_RV, samplings: as in `sample_rows`.
      token_R, logp_R2: the results of that.
    """
    kept: dict[int, list[int]] = {}
    for sampling in {request.sampling for request in samplings if request.sampling.truncated}:
        rows = [row for row, request in enumerate(samplings) if request.sampling == sampling]
        here = torch.tensor(rows, device=logits_RV.device)
        logp_R2[here, 1], bits_RB = keep_tokens(logits_RV[here].float(), token_R[here], sampling)
        kept |= {row: ids.tolist() for row, ids in zip(rows, unpack_ids(bits_RB.cpu().numpy()), strict=True)}
    return kept


def sample_rows(logits_RV: Tensor, states: list[Any], samplings: list[RequestSampling]) -> tuple[Tensor, Tensor]:
    """Sample one token per row.

    Args:
      logits_RV: of the model.
      states: of vLLM's requests, with `prompt_token_ids` and `output_token_ids`.
      samplings: of the same requests.

    Returns: token [R] int64; its log-probabilities [R, 2], raw and of the sampling distribution.
    """
    device = logits_RV.device
    logits_RV = logits_RV.float()
    groups: dict[Sampling, list[int]] = {}
    for row, request in enumerate(samplings):
        groups.setdefault(request.sampling, []).append(row)
    token_R = torch.empty(len(logits_RV), dtype=torch.int64, device=device)
    logp_R2 = torch.empty(len(logits_RV), 2, device=device)
    for sampling, rows in groups.items():  # nearly always one group
        here = torch.tensor(rows, device=device)
        noise = seen = None
        if not sampling.greedy:
            seeds = torch.tensor([samplings[row].seed for row in rows], device=device)
            steps = torch.tensor(
                [samplings[row].begun + len(states[row].output_token_ids) for row in rows], device=device
            )
            noise = stream_noise(seeds, steps)
        if sampling.repetition_penalty != 1:
            seen = torch.zeros(len(rows), logits_RV.shape[1], dtype=torch.bool)
            for mask, row in zip(seen, rows, strict=True):
                mask[[*states[row].prompt_token_ids, *states[row].output_token_ids]] = True
            seen = seen.to(device)
        part_RV = logits_RV if len(groups) == 1 else logits_RV[here]
        token_R[here], logp_R2[here, 1], logp_R2[here, 0] = sample_tokens(part_RV, noise, sampling, seen_RV=seen)
    return token_R, logp_R2
