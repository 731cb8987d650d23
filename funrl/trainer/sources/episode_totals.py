"""Totals over the episodes of a rollout, of all of them and of each source of prompts, and the metrics of them.

A total is a sum and the number of episodes that it is of. Those of a source have names such as "source/math/turns".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl.data.prompts import Example
from funrl.environments.row_paths import episode_totals
from funrl.environments.run import EpisodeSpending
from funrl.rollout.episodes import Episode
from funrl.trainer.sources.pending_rewards import Totals, add_totals

SOURCE_METRICS = "source/"
REWARD = "reward"

NumberedEpisodes = Sequence[tuple[int, Episode]]
NumbersBySource = Mapping[str, np.ndarray]  # numbers of the episodes of each source, ascending


class EpisodeTable(NamedTuple):
    """All E episodes of a rollout, as every rank knows them; A agents.

    Attributes:
      owner: [E] rank of each episode, as an index over the row axes of the generate mesh.
      reward: [E, A] float64, of each agent; NaN: unscored, or it has no trajectory.
      failed: [E] bool, the environment failed.
      finished: [E] bool, the environment ended it, and no limit did.
      turns: [E] sampled nodes.
      tokens: [E] tokens of all rows.
    """

    owner: np.ndarray
    reward: Tensor
    failed: Tensor
    finished: Tensor
    turns: Tensor
    tokens: Tensor


def numbers_by_source(
    source_of: Callable[[Example], str] | None, examples: Sequence[Example], samples: int
) -> NumbersBySource:
    """Episodes of each source, by number; none where there is one source.

    Args:
      source_of: name of the source of a prompt.
      examples: prompts.
      samples: episodes of each.
    """
    if source_of is None:
        return {}
    names = np.repeat([source_of(example) for example in examples], samples)
    return {str(name): np.flatnonzero(names == name) for name in dict.fromkeys(names)}


def part_totals(episodes: Sequence[Episode]) -> Totals:
    """Totals of the parts of rewards."""
    return add_totals(*({name: (float(x), 1) for name, x in episode.parts.items()} for episode in episodes))


def totals_of_rank(
    episodes: NumberedEpisodes, costs: Sequence[EpisodeSpending], frozen: Collection[str], sources: NumbersBySource
) -> Totals:
    """Totals of what the episodes of a rank counted, of all and by source.

    Args:
      episodes: of this rank.
      costs: of each of them; none: they are not known.
      frozen: agents that are not trained.
      sources: numbers of the episodes of all ranks.
    """
    own = [episode for _, episode in episodes]
    totals = dict(episode_totals(own, frozen, costs))
    for source, numbers in sources.items():
        everywhere = set(numbers.tolist())
        places = [place for place, (number, _) in enumerate(episodes) if number in everywhere]
        some = [own[place] for place in places]
        parts = {f"{REWARD}/{name}": total for name, total in part_totals(some).items()}
        counted = episode_totals(some, frozen, [costs[place] for place in places] if costs else ())
        totals |= {f"{SOURCE_METRICS}{source}/{name}": total for name, total in {**counted, **parts}.items()}
    return totals


def table_totals(table: EpisodeTable, sources: NumbersBySource) -> Totals:
    """Totals of facts about all episodes, and by source. The reward of a source is that of the first agent."""
    totals = dict(_facts(table, slice(None)))
    for source, numbers in sources.items():
        places = torch.from_numpy(numbers).to(table.reward.device)
        reward_E = table.reward[places, 0]
        scored_E = reward_E[~reward_E.isnan()]
        reward = {REWARD: (float(scored_E.sum()), len(scored_E))} if len(scored_E) else {}
        totals |= {
            f"{SOURCE_METRICS}{source}/{name}": total for name, total in {**_facts(table, places), **reward}.items()
        }
    return totals


def episode_metrics(totals: Totals, prefix: str = "") -> dict[str, float]:
    """Metrics "episodes/...": means over all episodes, and the shares of them that failed or are unscored.

    Those of a source are "source/NAME/...", with the mean reward of its scored episodes and the means of the parts of
    rewards. In an evaluation they are "eval/NAME/..." without the mean reward, which is there already.

    Args:
      totals: of all ranks.
      prefix: "eval/" in an evaluation.
    """
    whole = {name: total for name, total in totals.items() if not name.startswith(SOURCE_METRICS)}
    metrics = _means(whole, f"{prefix}episodes/")
    for source in dict.fromkeys(name.split("/")[1] for name in totals if name.startswith(SOURCE_METRICS)):
        begin = f"{SOURCE_METRICS}{source}/"
        own = {name.removeprefix(begin): total for name, total in totals.items() if name.startswith(begin)}
        if prefix:
            own.pop(REWARD, None)
        metrics |= _means(own, f"{prefix or SOURCE_METRICS}{source}/")
    return metrics


def _means(totals: Totals, prefix: str) -> dict[str, float]:
    """Means over all episodes; of rewards, over episodes that have rewards.

    A replica or a part of a step names no fork that none of its episodes has, so the largest count is that of all.
    """
    episodes = max((count for _, count in totals.values()), default=0)
    return {
        f"{prefix}{name}": value / (count if name.split("/")[0] == REWARD else episodes)
        for name, (value, count) in totals.items()
        if episodes
    }


def _facts(table: EpisodeTable, places: Tensor | slice) -> Totals:
    columns = {
        "turns": table.turns,
        "tokens": table.tokens,
        "failed": table.failed,
        "unscored": table.reward.isnan().all(1) & ~table.failed,
    }
    return {name: (float(x[places].sum()), len(x[places])) for name, x in columns.items()}
