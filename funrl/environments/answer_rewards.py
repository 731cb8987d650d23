"""Views of a reply for reward functions, and rewards of one answer in an episode by a function of any form."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from funrl.environments.chat import TemplateChat, continued_text
from funrl.rewards.call import CompletedRow, Failure, Reward, RewardError, awaited_outcomes, outcomes, reward_functions
from funrl.rewards.load import load_rewards
from funrl.rewards.views import ANSWER, MARKS, TEXT

# (prompt, answer, fields, messages of the prompt or None) -> reward
AnswerReward = Callable[[str, str, Mapping[str, object], Sequence[Mapping[str, object]] | None], float]


def answer_reward(reward: str | Reward) -> AnswerReward:
    """A plain function that rewards an answer; it must not be called on an event loop.

    Args:
      reward: a reward function of any form, or what --reward names: "exact", "math", "FILE.py:function".

    Raises:
      ValueError: the text names several rewards.
      LoadError: a function cannot be loaded.
    """
    functions = load_rewards(reward) if isinstance(reward, str) else reward_functions([reward])
    if len(functions) != 1:
        raise ValueError(f"reward={reward}: an answer has one reward here, not {len(functions)}")
    (function,) = functions

    def of_answer(
        prompt: str, answer: str, fields: Mapping[str, object], messages: Sequence[Mapping[str, object]] | None = None
    ) -> float:
        row = CompletedRow(prompt, answer, fields, messages=messages)
        if function.awaited:
            (outcome,) = asyncio.run(awaited_outcomes(function, [row]))
        else:
            (outcome,) = outcomes(function, [row])
        if isinstance(outcome, Failure):
            raise RewardError(*outcome)
        return float(outcome)

    return of_answer


class CompletionReader:
    """A reader of completions.

    Args:
      chat: knows the form of the replies.
      stop: tokens that end a completion.

    Example: CompletionReader(chat).read("answer", prompt, tokens) is "6" for gpt-oss's tokens of a thought and "6".
    """

    def __init__(self, chat: TemplateChat, stop: Sequence[int] = ()):
        self.chat = chat
        self.tokenizer: Any = chat.tokenizer
        self._ends = {*stop, self.tokenizer.eos_token_id, self.tokenizer.pad_token_id}

    def views(self, names: Iterable[str], before: Sequence[int], tokens: Sequence[int]) -> dict[str, str]:
        """Views of a completion by name, as `read` gives each."""
        return {name: self.read(name, before, tokens) for name in names}

    def read(self, name: str, before: Sequence[int], tokens: Sequence[int]) -> str:
        """Read a completion.

        Args:
          name: one of `TEXT_VIEWS`.
          before: tokens of its prompt.
          tokens: its own, with or without the one that ended it.
        """
        plain = continued_text(before, tokens, self._plain)
        if name == TEXT:
            return plain
        kept = list(tokens)
        while kept and kept[-1] in self._ends:
            kept.pop()
        marked = continued_text(before, kept, self._marked)
        if name == MARKS:
            return marked
        return plain if marked == plain else str(self.chat.read(before, kept).message["content"])

    def _plain(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _marked(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))


def check_readings(rewards: Sequence[Reward], tokenizer: Any) -> None:
    """Raise RewardError if a tokenizer cannot write what a reward function must be able to read."""
    reader = CompletionReader(TemplateChat(tokenizer))
    for reward in reward_functions(rewards):
        name, example = reward.view
        name = MARKS if name == ANSWER else name  # an example of an answer has no thoughts before it
        try:
            seen = reader.read(name, (), tokenizer.encode(example, add_special_tokens=False)) if example else ""
        except Exception:  # of a tokenizer that has not all characters, and no token for others
            seen = ""
        if "".join(seen.split()) != "".join(example.split()):
            advice = "; @read_as('marks') shows it special tokens" if name == TEXT else ""
            raise RewardError(
                f"the reward function {reward.name} can give nothing with this tokenizer: of {example!r} it would read "
                f"{seen!r}{advice}"
            )
