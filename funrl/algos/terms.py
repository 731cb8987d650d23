"""Terms and reductions. Running a term checks its result; errors give its name and line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl.algos.guarding import defined_at, described, guarded, name_of
from funrl.algos.masks import on_tokens_of_sequence, sums_by_sequence
from funrl.algos.metrics import Max, Mean, Metric, PieceError, Sum, token_mean_of
from funrl.batch import Batch, seen_of

Metrics = dict[str, Any]  # [B, T] tensors, reported as means over tokens, or Mean, Max, Sum
Term = Callable[[Tensor, Batch], tuple[Tensor, Metrics]]
Filter = Callable[[Batch], Tensor]


class EpisodeTokens(NamedTuple):
    """Facts about its episode on each token; the rows of an episode may be on any ranks.

    Attributes:
      count: [B, T] trained tokens in all rows of the episode and agent.
      first: [B, T] bool, on the tokens of the first row of the episode and agent.
    """

    count: Tensor
    first: Tensor


class Reduction(NamedTuple):
    """From losses per token to fractions; both functions are additive over examples. `+` concatenates two.

    Attributes:
      denominators: (mask_BT, segments_BT or None) -> a tuple of scalars, float64.
      numerators: (loss_BT, mask_BT, segments_BT or None) -> a tuple of equally many scalars.
      of_episodes: the reduction for rows of episodes, from `EpisodeTokens`, where it is another one; None: it does not
        depend on which rows make an episode.
      of_prompts: the reduction from `prompt_tokens` [B, T]; None: it does not depend on the groups.
    """

    denominators: Callable[[Tensor, Tensor | None], tuple[Tensor, ...]]
    numerators: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, ...]]
    of_episodes: Callable[[EpisodeTokens], Reduction] | None = None
    of_prompts: Callable[[Tensor], Reduction] | None = None

    def __add__(self, other: Reduction) -> Reduction:  # type: ignore[override]
        both = self.of_episodes or other.of_episodes
        by_prompt = self.of_prompts or other.of_prompts
        return Reduction(
            lambda mask, segments: self.denominators(mask, segments) + other.denominators(mask, segments),
            lambda loss, mask, segments: self.numerators(loss, mask, segments) + other.numerators(loss, mask, segments),
            of_episodes=both and (lambda episodes: self.at(episodes) + other.at(episodes)),
            of_prompts=by_prompt and (lambda tokens_BT: self.by_prompt(tokens_BT) + other.by_prompt(tokens_BT)),
        )

    def at(self, episodes: EpisodeTokens | None) -> Reduction:
        """The reduction for rows of these episodes; None: each row is an example."""
        return self if episodes is None or self.of_episodes is None else self.of_episodes(episodes)

    def by_prompt(self, tokens_BT: Tensor) -> Reduction:
        """The reduction for groups of this many tokens."""
        return self if self.of_prompts is None else self.of_prompts(tokens_BT)

    def on(self, batch: Batch) -> Reduction:
        """The reduction for the episodes and groups of a batch."""
        here = self.at(episodes_of(self, batch))
        return here if here.of_prompts is None else here.by_prompt(batch.prompt_tokens)


def check_called(piece: object, kind: str) -> None:
    """Check that a piece is callable and not the factory that makes it; the return annotation tells a factory.

    Args:
      kind: the annotation, such as "Term".

    Raises:
      PieceError: it is a factory, or not callable.
    """
    if not callable(piece) or getattr(piece, "__annotations__", {}).get("return") == kind:
        hint = f": call it, {name_of(piece)}(...)" if callable(piece) else ""
        raise PieceError(f"{described(piece)} is not a {kind.lower()}{hint}")


def run_term(term: Term, x_BT: Tensor, batch: Batch, place: str = "") -> tuple[Tensor, Metrics]:
    """Run a term and check its result, a loss and metrics.

    Args:
      place: position of the term among the summed terms, for error messages.

    Raises:
      PieceError: the result is wrong; or, on a batch that records, the term changed its inputs.
    """
    seen = seen_of(batch)
    if seen is None:
        return _checked_term(term, term(x_BT, batch), batch)
    given = batch if seen.by_piece else None
    out = guarded(f"term {name_of(term)}", lambda: term(x_BT, batch), given, others={"x": x_BT})
    loss_BT, metrics = _checked_term(term, out, batch)
    seen.terms.append((term, place, x_BT, loss_BT))
    return loss_BT, metrics


def _checked_term(term: Term, out: object, batch: Batch) -> tuple[Tensor, Metrics]:
    if isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], dict):
        loss_BT = out[0]
        if isinstance(loss_BT, Tensor) and loss_BT.shape == batch.mask.shape:
            return loss_BT, out[1]
        raise PieceError(
            f"term {name_of(term)} gave {described(loss_BT)} as its loss, for a batch of {list(batch.mask.shape)}: a "
            f"loss per token [B, T] is needed; the reduction sums it{defined_at(term)}"
        )
    name = name_of(term)
    origin = defined_at(term)
    if isinstance(out, Tensor):
        raise PieceError(f"term {name} gave a loss and no metrics: return (loss, {{}}){origin}")
    if callable(out):
        raise PieceError(f"{name}(x, batch) gave {described(out)}: {name} makes terms; call it, {name}(...){origin}")
    raise PieceError(f"term {name} gave {described(out)}: return (loss per token, dict of metrics){origin}")


def typed_metric(name: str, metric: object, term: Term, mask_BT: Tensor) -> Metric:
    """A metric of a term as Mean, Max or Sum. Raises PieceError for anything else."""
    if isinstance(metric, Mean):
        return Mean(metric.num.detach(), metric.den)
    if isinstance(metric, (Max, Sum)):
        return type(metric)(metric.value.detach())
    if not isinstance(metric, Tensor) or metric.shape != mask_BT.shape:
        raise PieceError(
            f"metric {name!r} of term {name_of(term)} is {described(metric)}: give a tensor [B, T], whose mean over "
            f"tokens is reported, or Mean, Max or Sum{defined_at(term)}"
        )
    return token_mean_of(metric.detach(), mask_BT)


def episodes_of(reduction: Reduction, batch: Batch) -> EpisodeTokens | None:
    """The facts about the episodes of the tokens, if the reduction asks and the batch has it."""
    if reduction.of_episodes is None:
        return None
    count = batch.get("episode_tokens")
    first = batch.get("episode_first")
    if count is None and first is not None and batch.get("unit") is not None:  # the mask is a part of what was counted
        ones_BT = torch.ones_like(batch.mask, dtype=torch.float64)
        count = on_tokens_of_sequence(sums_by_sequence(ones_BT, batch.mask, batch), ones_BT > 0, batch)
    if count is None or first is None:
        return None
    return EpisodeTokens(*(x if x.dim() == 2 else x[:, None].expand(batch.mask.shape) for x in (count, first)))
