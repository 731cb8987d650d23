"""Games of the library textarena, of one or several players.

funrl grpo --model=DIR --env=examples/env_textarena.py:textarena_game --env_args=name:GuessTheNumber-v0
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from funrl.data.prompts import Example
from funrl.environments.calls import call
from funrl.environments.environment import Environment
from funrl.loading import LoadError
from funrl.rollout.episodes import Episode, Message, Status, Trajectory
from funrl.rollout.policy import LimitReached, Policy

DEFAULT_GAMES = 256  # that differ by their seed
_random_state = threading.Lock()


def textarena_game(name: str, players: int = 1, games: int = DEFAULT_GAMES) -> Environment:
    """A game of textarena. Player 0 is the agent "policy", the others are "player1", "player2" and so on.

    An agent reads what the game and the other players have said since its last turn. The rewards are textarena's,
    mostly from -1 to 1; they are 0 where a limit ends a game. Games of equal seed begin equally; a seed is that of the
    record's field "seed", or else of the episode.

    Args:
      name: such as "GuessTheNumber-v0"; those whose names end with -raw and others are one game here.
      players: of the game.
      games: prompts of a run without --prompts.

    Raises:
      LoadError: textarena is not installed, or has no such game.
      ValueError: the game is not for this number of players.
    """
    try:
        import textarena  # type: ignore[import-not-found]
    except ImportError as error:
        raise LoadError(f"textarena:{name} needs textarena ({error}): pip install 'funrl[environments]'") from error

    def make() -> Any:
        return textarena.make(name.removesuffix("-raw") + "-raw")

    try:
        make().reset(num_players=players, seed=0)
    except Exception as error:  # of any game
        raise ValueError(f"textarena:{name} with {players} players: {error}") from error
    return _Game(make, name, players=players, games=games)


class _Game:
    def __init__(self, make: Any, name: str, players: int, games: int):
        self.agents = ("policy", *(f"player{number}" for number in range(1, players)))
        self._make = make
        self._name = name
        self._games = games

    def prompts(self, seed: int) -> Sequence[Mapping[str, Any]]:
        """Games with different seeds."""
        return [{"prompt": f"{self._name}, game {n}", "seed": seed * self._games + n} for n in range(self._games)]

    async def run(self, policy: Policy, example: Example, seed: int) -> Episode:
        """Play a game."""
        game = _OwnRandom(await call(self._make))
        await call(game.begin, len(self.agents), int(example.fields.get("seed", seed % (1 << 32))))
        ends: dict[str, Trajectory] = {}
        status: Status = "done"
        ended = False
        while not ended:
            player, messages = await call(game.heard)
            agent = self.agents[player]
            asked = policy.extend(ends[agent], messages) if agent in ends else policy.start(messages, agent=agent)
            try:
                reply, ends[agent] = await policy.sample(asked)
            except LimitReached as limit:
                status = limit.status
                break
            ended = await call(game.step, str(reply.message["content"]))
        outcome = await call(game.rewards) if ended else {}
        rewards = {agent: float(outcome.get(self.agents.index(agent), 0.0)) for agent in ends}
        return Episode(list(ends.values()), rewards, status=status)


class _OwnRandom:
    """A game whose draws from Python's `random`, which textarena seeds, are its own."""

    def __init__(self, game: Any):
        self._game = game
        self._state = random.Random(0).getstate()

    def begin(self, players: int, seed: int) -> None:
        """Begin a game."""
        with self._drawing():
            self._game.reset(num_players=players, seed=seed)

    def heard(self) -> tuple[int, list[Message]]:
        """Number of the player whose turn it is, and what it has not read yet, without its own words."""
        with self._drawing():
            player, observations = self._game.get_observation()
        lines = [
            text if sender < 0 else f"Player {sender}: {text}" for sender, text, _ in observations if sender != player
        ]
        return player, [{"role": "user", "content": "\n".join(lines)}]

    def step(self, text: str) -> bool:
        """Play a turn; True at the end of the game."""
        with self._drawing():
            return bool(self._game.step(text)[0])

    def rewards(self) -> Mapping[int, float]:
        """Rewards of the players."""
        return self._game.close()[0] or {}

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        with _random_state:
            others = random.getstate()
            random.setstate(self._state)
            try:
                yield
            finally:
                self._state = random.getstate()
                random.setstate(others)
