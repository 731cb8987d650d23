"""Guess the number: two agents guess in turn, each with the bounds of the number, and whoever names it wins."""

from __future__ import annotations

import re

import numpy as np

from funrl.data.prompts import Example
from funrl.environments.environment import Environment
from funrl.rollout.episodes import Episode, Status, Trajectory
from funrl.rollout.policy import LimitReached, Policy

QUESTION = "The number is between {low} and {high}. Name one."
RIVAL = "rival"
RANDOM = "random"  # value of the field "rival" of a record: a fixed player, which names any number that is possible
_NUMBER = re.compile(r"\d+")


class NumberGame:
    """Knowledge that both players have of a number.

    Attributes:
      low, high: bounds of the number.
    """

    def __init__(self, secret: int, low: int, high: int):
        self.low = low
        self.high = high
        self._secret = secret

    def guess(self, number: int | None) -> bool:
        """True if a guess is the number, else it may move a bound; None is no number, and changes nothing."""
        if number == self._secret:
            return True
        if number is not None and number < self._secret:
            self.low = max(self.low, number + 1)
        elif number is not None:
            self.high = min(self.high, number - 1)
        return False


def guess_the_number(largest: int = 100, turns: int = 10, question: str = QUESTION) -> Environment:
    """A game of the agents "policy" and "rival": they guess in turn, and each hears the bounds before its guess.

    The winner's reward is 1, the loser's 0; both have 0 after `turns` guesses each. A record's fields are "secret", the
    number; "first", who begins, "policy" if it is absent; perhaps "low" and "high", bounds that both know from the
    begin; and perhaps "rival": "random" is a fixed player that names any number within the bounds, instead of a model.

    Args:
      largest: number; the smallest is 1, where a record has no bounds.
      turns: guesses of each player.
      question: with {low} and {high}.

    Raises:
      ValueError: a number is too small.
    """
    if largest < 2 or turns < 1:
        raise ValueError(f"largest={largest}, turns={turns}: a game needs two numbers and one guess")
    return _GuessTheNumber(largest, turns, question)


class _GuessTheNumber:
    agents = ("policy", RIVAL)

    def __init__(self, largest: int, turns: int, question: str):
        self._largest = largest
        self._turns = turns
        self._question = question

    async def run(self, policy: Policy, example: Example, seed: int) -> Episode:
        """Play a game. A rival that names the number at once has won, but the policy is asked all the same."""
        fields = example.fields
        game = NumberGame(int(fields["secret"]), int(fields.get("low", 1)), int(fields.get("high", self._largest)))
        fixed = fields.get("rival") == RANDOM
        rng = np.random.default_rng(seed % (1 << 63))
        order = self.agents if fields.get("first", "policy") == "policy" else self.agents[::-1]
        trajectories: dict[str, Trajectory] = {}
        winner = ""
        status: Status = "done"
        try:
            for agent in order * self._turns:
                if agent == RIVAL and fixed:
                    number = int(rng.integers(game.low, game.high + 1))
                else:
                    number, trajectories[agent] = await self._ask(policy, trajectories.get(agent), agent, game)
                if game.guess(number):
                    winner = agent
                    break
            if "policy" not in trajectories:
                _, trajectories["policy"] = await self._ask(policy, None, "policy", game)
        except LimitReached as limit:
            status = limit.status
        rewards = {agent: float(agent == winner) for agent in trajectories}
        return Episode(list(trajectories.values()), rewards, status=status)

    async def _ask(
        self, policy: Policy, before: Trajectory | None, agent: str, game: NumberGame
    ) -> tuple[int | None, Trajectory]:
        """An agent's next guess, the last number that it writes, and its trajectory."""
        messages = [{"role": "user", "content": self._question.format(low=game.low, high=game.high)}]
        asked = policy.start(messages, agent=agent) if before is None else policy.extend(before, messages)
        reply, trajectory = await policy.sample(asked)
        numbers = _NUMBER.findall(str(reply.message["content"]))
        return (int(numbers[-1][:9]) if numbers else None), trajectory
