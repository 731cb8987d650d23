"""Prompts of a teacher that sees more than the policy: a demonstration, feedback, or the best answer of its group.

| --teacher_context | the teacher's prompt of a completion |
|---|---|
| FIELD | the text in that field of the prompt's record, an empty line, the prompt |
| sibling | the best other completion of the same prompt, an empty line, the prompt |
| FILE.py:function | what the function returns: a text, or messages where the prompt has some |

A sibling is used if it scores more than the completion does. The best completions of a group have none, so the teacher
scores them after the policy's prompt.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from funrl.data.conversations import encode_prompt
from funrl.data.prompts import Example
from funrl.kinds import Ragged
from funrl.rewards.call import RewardError
from funrl.trainer.steps.step_rows import ragged

SIBLING = "sibling"
GAP = "\n\n"  # between a text and the prompt


class ScoredCompletion(NamedTuple):
    """A completion as contexts see it.

    Attributes:
      number: of its row; rows of one group are neighbours.
      tokens: ids without the stop token.
      score: its reward.
    """

    number: int
    tokens: Sequence[int]
    score: float


Content = str | Sequence[Mapping[str, Any]]  # of a prompt: text or messages
# (prompt, completions, scores, index, **fields) -> the teacher's prompt; None: the policy's
MakePrompt = Callable[..., Content | None]


class TeacherPrompts(NamedTuple):
    """Maker of the teacher's prompts.

    Attributes:
      make: as `prompt_maker` gives it.
      tokenizer: of the policy and the teacher.
      tools: of an example, for its chat template.
      arguments: of the chat template.
      most: positions of the teacher.
    """

    make: MakePrompt
    tokenizer: Any
    tools: Callable[[Example], Sequence[Any]]
    arguments: Mapping[str, Any]
    most: int

    def tokens(self, example: Example, completions: Sequence[str], scores: Sequence[float], index: int) -> list[int]:
        """Ids of the teacher's prompt of one completion; none: it is the policy's.

        Args:
          example: the prompt.
          completions, scores: of its group.
          index: of the completion in the group.

        Raises:
          RewardError: the function failed, or the tokenizer refuses its prompt.
        """
        where = f"--teacher_context: {example.source or 'a prompt'}"
        given = example.text if example.messages is None else copy.deepcopy(example.messages)
        try:
            prompt = self.make(given, list(completions), list(scores), index, **example.fields)
            if not prompt:
                return []
            tools = () if isinstance(prompt, str) else self.tools(example)
            return encode_prompt(self.tokenizer, prompt, tools, arguments=self.arguments)[0]
        except Exception as error:
            raise RewardError(f"{where}: {type(error).__name__}: {error}") from error

    def lines(self, examples: Sequence[Example], own: Sequence[ScoredCompletion], samples: int) -> Ragged:
        """The field `teacher_prompt` of this rank's rows.

        Args:
          examples: the prompts of all rows.
          own: this rank's completions in the order of their rows; each group is whole.
          samples: completions of a prompt.

        Raises:
          RewardError: as `tokens`; or a prompt and its completion exceed the teacher's positions.
        """
        texts = [self.tokenizer.decode(list(x.tokens), skip_special_tokens=True) for x in own]
        members: dict[int, list[int]] = {}
        for place, completion in enumerate(own):
            members.setdefault(completion.number // samples, []).append(place)
        lines = []
        for place, completion in enumerate(own):
            group = members[completion.number // samples]
            example = examples[completion.number // samples]
            scores = [own[i].score for i in group]
            tokens = self.tokens(example, [texts[i] for i in group], scores, group.index(place))
            if len(tokens) + len(completion.tokens) + 1 > self.most:
                raise RewardError(
                    f"--teacher_context: {example.source or 'a prompt'}: the teacher's prompt has {len(tokens)} tokens "
                    f"and the completion {len(completion.tokens) + 1}, and the teacher has {self.most} positions; give "
                    "a shorter text"
                )
            lines.append(torch.tensor(tokens, dtype=torch.int64))
        return ragged(lines, torch.zeros(0, dtype=torch.int64))


def prompt_maker(source: str, load: Callable[[str], MakePrompt]) -> MakePrompt:
    """The function that makes the teacher's prompts, by --teacher_context.

    Args:
      source: the flag's value.
      load: the function of FILE.py:function.
    """
    if source == SIBLING:
        return after_best_sibling
    return load(source) if ":" in source else functools.partial(after_field, source)


def after_field(
    field: str, prompt: Content, completions: object, scores: object, index: int, **fields: object
) -> Content | None:
    """The prompt after the text of a field of its record; None where that is empty."""
    value = fields.get(field)
    return None if value in (None, "") else after_text(f"{value}", prompt)


def after_best_sibling(
    prompt: Content, completions: Sequence[str], scores: Sequence[float], index: int, **fields: object
) -> Content | None:
    """The prompt after the completion with the highest score, the first of equals, if it is above that of `index`.

    References: Huebotter et al., 2026, https://arxiv.org/abs/2601.20802, whose teacher sees a solved attempt.
    """
    best = max(range(len(scores)), key=lambda i: (scores[i], -i))
    return after_text(completions[best], prompt) if scores[best] > scores[index] else None


def after_text(text: str, prompt: Content) -> Content:
    """A prompt after a text: in the last message by the user, where it is a chat."""
    if isinstance(prompt, str):
        return f"{text}{GAP}{prompt}"
    messages = [dict(message) for message in prompt]
    last = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=0)
    messages[last]["content"] = f"{text}{GAP}{messages[last].get('content') or ''}"
    return messages
