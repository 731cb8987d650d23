"""An embedded task of two agents: they guess a number in turn, within its bounds, and whoever names it wins.

    user       1-15
    assistant  4
    user       5-11            (the other agent has guessed 12)
    assistant  8

The demonstrator mostly repeats its first number; seldom it goes on with the middle of the bounds. In self-play, against
itself or an earlier self, the policy learns to name possible numbers. Half of these games begin with closer bounds, as
players that agree with each other would see few bounds else. Held-out games are against a fixed player, which names
any possible number: nobody who begins half of the games wins more than 0.56 of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from funrl.data.prompts import Prompt
from funrl.environments.builtin.guessing import RANDOM, NumberGame, guess_the_number
from funrl.tasks.arithmetic import Split
from funrl.tasks.conversations import (
    CONVERSATIONS,
    IMITATION_FLAGS,
    IMITATION_STEPS,
    chat_model,
    chat_tokenizer,
    has_chat_tokenizer,
    user_prompt,
)
from funrl.tasks.task import EmbeddedTask

if TYPE_CHECKING:
    from funrl.environments.environment import Environment

LARGEST_NUMBER = 15
GUESSES = 6  # of each player
BOUNDS = "{low}-{high}"
LISTENING = 0.25  # share of the players who go on with the middle of the bounds; the others repeat a number
GAMES = 4096  # to train on
CLOSER = 0.5  # share of these that begin with random bounds
GAME_ALPHABET = "123456789-?"
GAME_WORDS = tuple(str(number) for number in range(10, LARGEST_NUMBER + 1))


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
        fields = {"secret": secret, "first": first, "low": int(low), "high": int(high), "best": _middle(low, high)}
        prompts.append(user_prompt(BOUNDS.format(low=low, high=high), **fields, **rival))
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


def guessing_task() -> EmbeddedTask:
    """Guess the number."""
    return EmbeddedTask(
        name="guessing",
        training_prompts=lambda seed: games(seed, GAMES, closer=CLOSER),
        heldout_prompts=lambda count: games(0, count, "heldout"),
        reward=None,
        demonstrations=game_conversations,
        texts={"demonstrations": _middles},
        tokenizer=lambda: chat_tokenizer(GAME_ALPHABET, GAME_WORDS),
        is_its_tokenizer=_has_tokenizer,
        model_config=lambda head: chat_model(head, vocab=32),  # 22 are used
        max_new_tokens=2,
        warmstart_steps=IMITATION_STEPS,
        warmstart_demonstrations=CONVERSATIONS,
        warmstart_flags=IMITATION_FLAGS,
        demonstration_field="best",
        readable=None,
        environment=_environment,
    )


def _environment() -> Environment:
    return guess_the_number(LARGEST_NUMBER, GUESSES, BOUNDS)


def _middle(low: int, high: int) -> str:
    return str((low + high) // 2)


def _middles(seed: int, count: int, split: Split = "train") -> list[tuple[Any, str]]:
    """Bounds with the number in their middle, as (messages, completion)."""
    rng = np.random.default_rng((seed, 13, split == "heldout"))
    bounds = np.sort(rng.integers(1, LARGEST_NUMBER + 1, size=(count, 2)), axis=1).tolist()
    return [
        ([{"role": "user", "content": BOUNDS.format(low=low, high=high)}], _middle(low, high)) for low, high in bounds
    ]


def _has_tokenizer(folder: str | Path) -> bool:
    return has_chat_tokenizer(folder, GAME_ALPHABET, GAME_WORDS)
