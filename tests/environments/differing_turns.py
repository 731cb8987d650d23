"""Turns of episodes that an engine samples differently now."""

from typing import NamedTuple

from funrl.rollout.engine import complete
from funrl.rollout.episode_replay import turn_request
from funrl.rollout.episodes import Node
from funrl.rollout.requests import Completion


class DifferingTurn(NamedTuple):
    """A turn of an episode, as it was and as it is now."""

    episode: int
    node: Node
    completion: Completion


def differing_turns(engine, episodes):
    """Sample every turn of some episodes again, all at once, and compare the tokens."""
    nodes = {}
    for number, episode in enumerate(episodes):
        for end in episode.ends:
            nodes |= {node: number for node in end.nodes() if node.sampled}
    requests = [turn_request(node)._replace(number=number) for number, node in enumerate(nodes)]
    completions = complete(engine, requests)
    return [
        DifferingTurn(episode, node, completion)
        for (node, episode), completion in zip(nodes.items(), completions, strict=True)
        if completion.tokens.tolist() != list(node.tokens)
    ]
