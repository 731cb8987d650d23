"""Rows in the tokens of a teacher that has another tokenizer, and the spans that both tokenizations have in common.

policy      | un | likely | !   | </s> |
teacher     | u | n | like | ly! | <eos> |
spans       | un    | likely!    | end  |

The teacher reads the prompt through its own chat template, then the text of the completion, and after one that the
policy ended what ends a turn in its template, or the end-of-text token. A special token of the policy inside a
completion is a span, see `encode_special`; a last character that the limit of tokens cut is in none. Words of the text
that are special tokens of the teacher are text to it too.

Between special tokens, spans are those of GOLD in TRL 1.16, whose numbers are in the tests, but none ends within a
character. GOLD's loss compares whole distributions, see docs/algorithms.md.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple
from unicodedata import normalize

import torch
from torch import Tensor

from funrl.data.conversations import ChatTemplate, encode_prompt
from funrl.data.prompts import Example
from funrl.data.spans import SpanEnd, span_ends
from funrl.data.tokenizer import RenderedChat, encode_after, encode_rendered
from funrl.kinds import Ragged
from funrl.rewards.call import RewardError
from funrl.trainer.sources.own_texts import UNFINISHED, token_texts
from funrl.trainer.steps.step_rows import ragged

CHARACTER_BYTES = 4  # the most
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


def encode_special(tokenizer: Any, before: str, word: str) -> list[int]:
    """Tokens of a special token of the policy: the teacher's of that name, else its word, else the end of text.

    A teacher gives each of these little probability where it does not belong; without one the token would be free.
    """
    named = [i for i, name in special_tokens(tokenizer).items() if name == word]
    if named:
        return named[:1]
    try:
        ids = encode_written(tokenizer, before, word)
        written = tokenizer.decode(ids, **PLAIN).strip() == word
    except Exception:  # a tokenizer without some of its characters may raise anything
        ids, written = [], False
    return ids if ids and written else [tokenizer.eos_token_id]


def runs_of(completion: Sequence[int], special: Collection[int]) -> list[tuple[int, int]]:
    """Begins and ends of the parts of a completion: each special token, and what is between them."""
    edges = {0, len(completion)}
    for place, token in enumerate(completion):
        edges |= {place, place + 1} if token in special else set()
    return list(itertools.pairwise(sorted(edges)))


def places_of(ends: Sequence[SpanEnd], begin: int, side: int) -> list[int]:
    """For each token up to the last end, in one of two tokenizations, the place of its span's last own token.

    Args:
      begin: place of the first own token.
      side: 0: own tokens, 1: the other's.
    """
    places = []
    for end in ends:
        places += [begin + end.own] * (end[side] + 1 - len(places))
    return places


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
        where = f"--teacher: {example.source or 'a prompt'}: the {reader.name}'s tokenizer"
        tools = () if example.messages is None else self.tools(example)
        spans = [*range(begin), *[OUTSIDE] * (length - begin)]
        try:
            ids, text = encode_prompt(
                reader.tokenizer, example.messages or example.text, tools, arguments=self.arguments
            )
            places = [OUTSIDE] * len(ids)
            for first, last in runs_of(completion, special):
                if completion[first] in special:
                    own = [special[completion[first]]]
                    other = encode_special(reader.tokenizer, text, own[0])
                    ends = [SpanEnd(0, len(other) - 1)]
                else:
                    own = self._texts(example, completion, first, last, last == len(completion) and not stopped)
                    other = encode_written(reader.tokenizer, text, "".join(own))
                    ends = span_ends(own, texts_after(reader.tokenizer, ids[-1], other, "".join(own)))
                of_own, of_other = (places_of(ends, begin + first, side) for side in (0, 1))
                spans[begin + first : begin + first + len(of_own)] = of_own
                places += [*of_other, *[OUTSIDE] * (len(other) - len(of_other))]
                ids += other
                text += "".join(own)
            stop = encode_end(reader.tokenizer, text, example.messages is not None, self.arguments) if stopped else []
        except Exception as error:
            raise RewardError(f"{where}: {type(error).__name__}: {error}") from error
        ids += stop
        if len(ids) > reader.positions:
            raise RewardError(
                f"{where} gives {len(ids)} tokens of a prompt and its completion, and it has {reader.positions} "
                "positions; give a smaller --max_new_tokens, or shorter prompts"
            )
        if stopped:
            spans[-1] = length - 1
        return RowTokens(ids, [*places, *[length - 1] * len(stop)], spans)

    def _texts(self, example: Example, completion: Sequence[int], first: int, last: int, cut: bool) -> list[str]:
        """The text that each token of a part of a completion adds; `cut`: without a last character that lacks bytes."""
        before = completion[first - 1] if first else example.tokens[-1]
        decode = functools.partial(self.tokenizer.decode, skip_special_tokens=True, **PLAIN)
        texts = list(token_texts(completion[first:last], before, decode))
        if cut and texts[-1].endswith(UNFINISHED) and texts[-1].count(UNFINISHED) < CHARACTER_BYTES:
            texts[-1] = ""
        return texts

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
