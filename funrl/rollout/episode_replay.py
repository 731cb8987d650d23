"""Episodes again: every turn of the policy, with the logged answers of the environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from funrl.rollout.engine import Engine, complete
from funrl.rollout.episodes import Episode, Node
from funrl.rollout.requests import Completion, Request


class DifferingTurn(NamedTuple):
    """A turn that was sampled differently.

    Attributes:
      episode: index of the episode.
      node: as it was.
      completion: as it is now.
    """

    episode: int
    node: Node
    completion: Completion


def differing_turns(engine: Engine, episodes: Sequence[Episode]) -> list[DifferingTurn]:
    """Sample every turn of some episodes again, and compare the tokens.

    All turns are sampled at once, as what is before each of them is known. If a model is split over several ranks, all
    of them make this call with the same episodes.

    Args:
      engine: an engine with the weights that sampled them, awake and without unfinished requests.
      episodes: as they were.

    Raises:
      ValueError: a sampled node has no sampling parameters or no seed.
    """
    nodes: dict[Node, int] = {}
    for number, episode in enumerate(episodes):
        for end in episode.ends:
            nodes |= {node: number for node in end.nodes() if node.sampled}
    requests = [_request(number, node) for number, node in enumerate(nodes)]
    completions = complete(engine, requests)
    return [
        DifferingTurn(episode, node, completion)
        for (node, episode), completion in zip(nodes.items(), completions, strict=True)
        if completion.tokens.tolist() != list(node.tokens)
    ]


def _request(number: int, node: Node) -> Request:
    if node.sampling is None or node.seed is None:
        raise ValueError("a sampled node has no sampling parameters and seed, so it cannot be sampled again")
    prompt = [token for before in node.path()[:-1] for token in before.tokens]
    return Request(number, prompt, node.sampling, node.seed)
