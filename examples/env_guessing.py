"""Guess the number: two agents guess in turn, each with the bounds of the number, and whoever names it wins.

`guess_the_number` is for any model. `numbers` is a task for a small decoder:

    user       1-15
    assistant  4
    user       5-11            (the other agent has guessed 12)
    assistant  8

    python examples/env_guessing.py GUESSING   # writes its files; docs/example_environments.md has what follows

The demonstrator mostly repeats its first number and seldom names the middle of the bounds. In self-play, against
itself or an earlier self, the policy learns to name possible numbers. Half of these games begin with closer bounds, as
players that agree with each other would see few bounds else. Held-out games are against a fixed player, which names
any possible number: nobody who begins half of the games wins more than 0.56 of them.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
from task_files import CONVERSATIONS, Task, write_files

from funrl.data.prompts import Example, Prompt
from funrl.environments.environment import Environment
from funrl.rollout.episodes import Episode, Status, Trajectory
from funrl.rollout.policy import LimitReached, Policy
from funrl.tasks.arithmetic import Split

QUESTION = "The number is between {low} and {high}. Name one."
RIVAL = "rival"
RANDOM = "random"  # value of the field "rival" of a record: a fixed player, which names any number that is possible
LARGEST_NUMBER = 15
GUESSES = 6  # of each player
BOUNDS = "{low}-{high}"
LISTENING = 0.25  # share of the players who go on with the middle of the bounds; the others repeat a number
GAMES = 4096  # to train on
CLOSER = 0.5  # share of these that begin with random bounds
GAME_ALPHABET = "123456789-?"
GAME_WORDS = tuple(str(number) for number in range(10, LARGEST_NUMBER + 1))
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


def numbers() -> Environment:
    """Numbers from 1 to `LARGEST_NUMBER`."""
    return guess_the_number(LARGEST_NUMBER, GUESSES, BOUNDS)


def games(seed: int, count: int, split: Split = "train", closer: float = 0.0) -> list[Prompt]:
    """Games with a random number and beginner; those of the split "heldout" are against the fixed player.

    Args:
      seed: fixes them.
      count: of the games.
      split: "train" or "heldout".
      closer: share of the games that begin with random bounds.
    """
    rng = np.random.default_rng((seed, 11))
    rival = {"rival": RANDOM} if split == "heldout" else {}
    prompts = []
    for _ in range(count):
        low = 1
        high = LARGEST_NUMBER
        if closer and rng.random() < closer:
            low, high = sorted(rng.choice(LARGEST_NUMBER, size=2, replace=False) + 1)
        secret = int(rng.integers(low, high + 1))
        first = ("policy", "rival")[rng.integers(2)]
        fields = {"secret": secret, "first": first, "low": int(low), "high": int(high), **rival}
        prompts.append(Prompt([{"role": "user", "content": BOUNDS.format(low=low, high=high)}], fields))
    return prompts


def game_conversations(seed: int, count: int) -> list[dict[str, Any]]:
    """Conversations of one of two demonstrators in a game."""
    rng = np.random.default_rng((seed, 12))
    records = []
    for prompt in games(seed, count):
        game = NumberGame(prompt.fields["secret"], 1, LARGEST_NUMBER)
        own = prompt.fields["first"] == "policy"
        listens = rng.random(2) < LISTENING
        firsts = rng.integers(1, LARGEST_NUMBER + 1, size=2).tolist()
        turn = 0
        messages = []
        ended = False
        while not ended and turn < 2 * GUESSES:
            number = (game.low + game.high) // 2 if turn > 1 and listens[int(own)] else firsts[int(own)]
            if own:
                messages.append({"role": "user", "content": BOUNDS.format(low=game.low, high=game.high)})
                messages.append({"role": "assistant", "content": str(number)})
            ended = game.guess(number)
            own = not own
            turn += 1
        if messages:  # the other has not named it at once
            records.append({"messages": messages})
    return records


def task(conversations: int = CONVERSATIONS) -> Task:
    """The task of numbers."""
    return Task(
        GAME_ALPHABET,
        GAME_WORDS,
        vocab=32,  # 22 are used
        positions=64,
        prompts=games(0, GAMES, closer=CLOSER),
        heldout=games(0, 256, "heldout"),
        demonstrations=game_conversations(0, conversations),
    )


if __name__ == "__main__":
    write_files(task(), sys.argv[1])
