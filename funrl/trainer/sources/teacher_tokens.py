"""Rows in the tokens of a teacher that has another tokenizer, and the spans that both tokenizations have in common.

policy      | un | likely | !   | </s> |
teacher     | u | n | like | ly! | <eos> |
spans       | un    | likely!    | end  |

The teacher reads the prompt through its own chat template, then the text of the completion. Special tokens of the
policy inside a completion, and a last character that is not complete, are in no span.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl.data.conversations import encode_prompt
from funrl.data.prompts import Example
from funrl.data.spans import span_ends
from funrl.data.tokenizer import encode_after
from funrl.kinds import Ragged
from funrl.rewards.call import RewardError
from funrl.trainer.sources.own_texts import token_texts
from funrl.trainer.steps.step_rows import ragged

OUTSIDE = -1  # place of a token in no span
PLAIN = {"clean_up_tokenization_spaces": False}  # of the decoding of texts that are compared


class TeacherReader(NamedTuple):
    """A teacher that reads rows in tokens of its own.

    Attributes:
      name: of the role, for errors.
      tokenizer: its own.
      positions: length of the longest sequence that it takes.
    """

    name: str
    tokenizer: Any
    positions: int


class RowTokens(NamedTuple):
    """A row in a teacher's tokens.

    Attributes:
      ids: of its prompt and completion.
      places: for each of these the place in the policy's row of the last token of its span; `OUTSIDE` of any.
      spans: the same for each token of the policy's row.
    """

    ids: list[int]
    places: list[int]
    spans: list[int]


class TeacherTokens(NamedTuple):
    """Maker of rows in teachers' tokens.

    Attributes:
      reader_of: the teacher of a prompt; None: it reads the policy's tokens.
      tokenizer: of the policy.
      tools: of an example, for chat templates.
      arguments: of chat templates.
    """

    reader_of: Callable[[Example], TeacherReader | None]
    tokenizer: Any
    tools: Callable[[Example], Sequence[Any]]
    arguments: Mapping[str, Any]

    def row(self, example: Example, completion: Sequence[int], stopped: bool) -> RowTokens:
        """One row in its teacher's tokens.

        Args:
          completion: token ids of the policy, without the stop token.
          stopped: whether a stop token followed.

        Raises:
          RewardError: the text is another one in the teacher's tokens, or has more than it has positions.
        """
        begin = len(example.tokens)
        length = begin + len(completion) + stopped
        reader = self.reader_of(example)
        if reader is None:
            return RowTokens([], [], list(range(length)))
        special = frozenset(self.tokenizer.all_special_ids)
        covered = [place for place, token in enumerate(completion) if token not in special]
        decode = functools.partial(self.tokenizer.decode, skip_special_tokens=True, **PLAIN)
        own = list(token_texts([completion[place] for place in covered], example.tokens[-1], decode))
        where = f"--teacher: {example.source or 'a prompt'}: the {reader.name}'s tokenizer"
        tools = () if example.messages is None else self.tools(example)
        try:
            prompt, before = encode_prompt(
                reader.tokenizer, example.messages or example.text, tools, arguments=self.arguments
            )
            written = encode_after(reader.tokenizer, before, "".join(own))
            other = list(token_texts(written, prompt[-1], functools.partial(reader.tokenizer.decode, **PLAIN)))
            ends = span_ends(own, other)
        except Exception as error:
            raise RewardError(f"{where}: {type(error).__name__}: {error}") from error
        ids = [*prompt, *written, *[reader.tokenizer.eos_token_id] * stopped]
        if len(ids) > reader.positions:
            raise RewardError(
                f"{where} gives {len(ids)} tokens of a prompt and its completion, and it has {reader.positions} "
                "positions; give a smaller --max_new_tokens, or shorter prompts"
            )
        places = [OUTSIDE] * len(ids)
        spans = [*range(begin), *[OUTSIDE] * (length - begin)]
        first = last = 0
        for end in ends:
            place = begin + covered[end.own]
            for token in covered[first : end.own + 1]:
                spans[begin + token] = place
            places[len(prompt) + last : len(prompt) + end.other + 1] = [place] * (end.other + 1 - last)
            first, last = end.own + 1, end.other + 1
        if stopped:
            spans[-1] = places[-1] = length - 1
        return RowTokens(ids, places, spans)

    def lines(self, rows: Sequence[tuple[Example, Sequence[int], bool]], width: int) -> tuple[Ragged, Tensor]:
        """The fields `teacher_tokens` and `teacher_span` [b, width] of this rank's rows.

        Args:
          rows: arguments of `row`, in their order.
          width: of the rows' fields per token.

        Raises:
          RewardError: as `row`.
        """
        read = [self.row(*row) for row in rows]
        lines = [torch.tensor([x.ids, x.places], dtype=torch.int64).T.reshape(-1, 2) for x in read]
        spans = [[*x.spans, *[0] * (width - len(x.spans))] for x in read]
        none = torch.zeros(0, 2, dtype=torch.int64)
        return ragged(lines, none), torch.tensor(spans, dtype=torch.int64).reshape(-1, width)
