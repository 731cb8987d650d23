"""Rows in the tokens of a teacher that has another tokenizer, and the spans that both tokenizations have in common.

policy      | un | likely | !   | </s> |
teacher     | u | n | like | ly! | <eos> |
spans       | un    | likely!    | end  |

The teacher reads the prompt through its own chat template, then the text of the completion, and after one that the
policy ended what ends a turn in its template, or the end-of-text token. Special tokens of the policy inside a
completion, and a last character that is not complete, are in no span. Words of the text that are special tokens of the
teacher's are text to it too.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unicodedata import normalize

import torch
from torch import Tensor

from funrl.data.conversations import ChatTemplate, encode_prompt
from funrl.data.prompts import Example
from funrl.data.spans import span_ends
from funrl.data.tokenizer import RenderedChat, encode_after, encode_rendered
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


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Special tokens of a tokenizer, by their ids, also those that it only adds."""
    added = {i: str(x) for i, x in getattr(tokenizer, "added_tokens_decoder", {}).items() if x.special}
    return dict(zip(tokenizer.all_special_ids, map(str, tokenizer.all_special_tokens), strict=True)) | added


def encode_written(tokenizer: Any, before: str, text: str) -> list[int]:
    """Tokens of a text that a model wrote after another one; what reads as a special token is text."""
    words = sorted((word for word in special_tokens(tokenizer).values() if len(word) > 1), key=len, reverse=True)
    marks = re.finditer("|".join(map(re.escape, words)), text) if words else ()
    cuts = [len(before) + mark.start() + 1 for mark in marks]
    return encode_rendered(tokenizer, RenderedChat(before + text, cuts), len(before))


def texts_after(tokenizer: Any, before: int, tokens: Sequence[int], text: str) -> list[str]:
    """The text that each token of a text adds, as `token_texts`.

    Some tokenizers put a space behind a special token, which is of the text or not.

    Args:
      before: the token before them.
      text: of the tokens.
    """
    texts = []
    for skip in (False, True):
        decode = functools.partial(tokenizer.decode, skip_special_tokens=skip, **PLAIN)
        texts = list(token_texts(tokens, before, decode))
        if normalize("NFC", "".join(texts)) == normalize("NFC", text):
            break
    return texts


def encode_end(tokenizer: Any, before: str, chat: bool, arguments: Mapping[str, Any]) -> list[int]:
    """Tokens that end a completion: of a chat what ends a turn in the template, else the end-of-text token.

    Args:
      before: the text that they end.
      arguments: of the chat template.
    """
    template = ChatTemplate(tokenizer, (), arguments)
    end = template.closing()[1] or template.next_marks().get("user", "") if chat else ""
    return encode_after(tokenizer, before, end) if end else [tokenizer.eos_token_id]


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
        special = special_tokens(self.tokenizer)
        covered = [place for place, token in enumerate(completion) if token not in special]
        decode = functools.partial(self.tokenizer.decode, skip_special_tokens=True, **PLAIN)
        own = list(token_texts([completion[place] for place in covered], example.tokens[-1], decode))
        where = f"--teacher: {example.source or 'a prompt'}: the {reader.name}'s tokenizer"
        tools = () if example.messages is None else self.tools(example)
        try:
            prompt, before = encode_prompt(
                reader.tokenizer, example.messages or example.text, tools, arguments=self.arguments
            )
            text = "".join(own)
            written = encode_written(reader.tokenizer, before, text)
            other = texts_after(reader.tokenizer, prompt[-1], written, text)
            ends = span_ends(own, other)
            chat = example.messages is not None
            stop = encode_end(reader.tokenizer, before + text, chat, self.arguments) if stopped else []
        except Exception as error:
            raise RewardError(f"{where}: {type(error).__name__}: {error}") from error
        ids = [*prompt, *written, *stop]
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
            spans[-1] = length - 1
            places[len(ids) - len(stop) :] = [length - 1] * len(stop)
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
