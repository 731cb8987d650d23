"""Completions in the tokens of models that have their own tokenizer: as texts, chats and steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from funrl.batch import Batch
from funrl.data.conversations import Text, encode_prompt
from funrl.data.prompt_format import SEPARATOR
from funrl.data.prompts import Example
from funrl.data.supervised import TextExample, steps_text, text_batch
from funrl.data.tokenizer import encode_after, encode_rendered, render_chat
from funrl.mesh.rows import gather_table
from funrl.rewards.call import RewardError
from funrl.trainer.steps.step_rows import Rows, rows_of

Decode = Callable[[list[int]], str]
UNFINISHED = "\ufffd"  # ends a text whose last character continues in the next token


def text_after(opening: str, before: int, tokens: Sequence[int], decode: Callable[[list[int]], str]) -> str:
    """Text of a completion as it continues the token before it, whose own text is `opening`.

    Some tokenizers decode a run of bytes as a whole: behind the last byte of another character they lose the text.
    """
    joined = decode([before, *tokens])
    text = joined[len(opening) :] if joined.startswith(opening) else decode(list(tokens))
    return min(text, decode(list(tokens)), key=lambda x: x.count(UNFINISHED)) if UNFINISHED in text else text


class WrittenRow(NamedTuple):
    """A completion on this rank.

    Attributes:
      example: the prompt.
      tokens: ids, without the stop token.
      finished: whether a stop token ended it.
    """

    example: Example
    tokens: list[int]
    finished: bool


class SolutionStep(NamedTuple):
    """A step of a completion.

    Attributes:
      text: without the separator after it.
      last: index of its last token among the completion's tokens.
    """

    text: str
    last: int


def reads_tokens(tokenizer: Any, policys: Any, prompts: Sequence[Example]) -> bool:
    """True if a model with this tokenizer can read the policy's tokens unchanged.

    That takes the same vocabulary and, if prompts are chats, the same chat template.
    """
    chats = any(example.messages for example in prompts)
    same = tokenizer.get_vocab() == policys.get_vocab()
    return same and (not chats or tokenizer.chat_template == policys.chat_template)


def own_completions(rows: Rows, examples: Sequence[Example]) -> list[WrittenRow]:
    """Completions of this rank's rows, in their order.

    Args:
      examples: prompts, each with the same number of rows.
    """
    own = rows.own.tolist()
    batch = rows.batch
    lengths = rows.lengths.tolist()
    truncated = batch.truncated.tolist()
    completions = []
    for tokens_T, number in zip(batch.tokens.tolist(), own, strict=True):
        example = examples[number * len(examples) // len(lengths)]
        end = lengths[number] - (not truncated[number])  # a stop token is not text
        completions.append(WrittenRow(example, tokens_T[len(example.tokens) : end], not truncated[number]))
    return completions


def written_texts(written: Sequence[WrittenRow], decode: Decode) -> list[str]:
    """Texts of completions as they continue their prompts."""
    opening = functools.cache(lambda token: decode([token]))
    last = [completion.example.tokens[-1] for completion in written]
    return [
        text_after(opening(token), token, completion.tokens, decode=decode)
        for token, completion in zip(last, written, strict=True)
    ]


def whole_tokens(written: WrittenRow, text: str, tokenizer: Any) -> list[int]:
    """Prompt and completion in the tokens of another model's tokenizer.

    A chat goes through its chat template, with the completion as the assistant's message, or after its words where the
    prompt ends with these. A text prompt gets its special tokens, and a completion that the policy ended gets its
    end-of-text token.
    """
    example = written.example
    if example.messages is not None:
        *before, last = example.messages
        if last["role"] == "assistant" and isinstance(last.get("content"), str):  # the policy went on with its words
            messages = [*before, {**last, "content": last["content"] + text}]
        else:
            messages = [*example.messages, {"role": "assistant", "content": text}]
        return encode_rendered(tokenizer, render_chat(tokenizer, messages))
    prompt, _ = encode_prompt(tokenizer, example.text)
    end = [tokenizer.eos_token_id] if written.finished and tokenizer.eos_token_id is not None else []
    return [*prompt, *encode_after(tokenizer, example.text, text), *end]


def steps_of(written: WrittenRow, separator: str, decode: Decode) -> list[SolutionStep]:
    """Steps of a completion; blank ones are left out.

    Args:
      written: the completion.
      separator: between two steps; "": every token is a step.
      decode: token ids of the policy -> text.
    """
    pieces = list(token_texts(written.tokens, written.example.tokens[-1], decode))
    if not separator:
        return [SolutionStep(text, place) for place, text in enumerate(pieces) if text]
    text = "".join(pieces)
    solution_steps = list[SolutionStep]()
    begin = 0
    end = 0
    ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0)
    for part in text.split(separator):
        end = min(begin + len(part) + len(separator), len(text))  # after the separator, if there is one
        if part.strip():
            solution_steps.append(SolutionStep(part, int(torch.searchsorted(ends, end))))
        begin = end
    return solution_steps


def token_texts(tokens: Sequence[int], before: int, decode: Decode) -> Iterator[str]:
    """Yield the text that each token adds. A character of several tokens is added by the last of them.

    Bytes that are no character, each read as U+FFFD, are added with the text after them, or by the last token of all.

    Args:
      before: the token before them.
    """
    piece = functools.lru_cache(1 << 16)(lambda last, ids: text_after(decode([last]), last, ids, decode=decode))
    held: list[int] = []
    for left, token in zip(range(len(tokens) - 1, -1, -1), tokens, strict=True):
        held.append(token)
        text = piece(before, tuple(held))
        if left and text.endswith(UNFINISHED):
            yield ""
        else:
            before = token
            held = []
            yield text


class Reader(NamedTuple):
    """A model with a value head that reads completions in its own tokens.

    Attributes:
      name: of the model, for errors.
      tokenizer: its own.
      decode: token ids of the policy without the stop token -> text.
      pad: id of its padding token.
      positions: length of the longest sequence that the model takes.
      separator: between two steps.
    """

    name: str
    tokenizer: Any
    decode: Decode
    pad: int
    positions: int
    separator: str = SEPARATOR


def read_texts(reader: Reader, rows: Rows, examples: Sequence[Example]) -> Rows:
    """The rows in the model's own tokens, with the mask true at the end of each; see `whole_tokens`.

    Raises:
      RewardError: a text has more tokens than the model has positions; raised on every rank.
    """
    written = own_completions(rows, examples)
    ids = [
        whole_tokens(completion, text, reader.tokenizer)
        for completion, text in zip(written, written_texts(written, reader.decode), strict=True)
    ]
    texts = [TextExample((Text(tokens, [False] * len(tokens)),)) for tokens in ids]
    return _read_rows(reader, rows, text_batch(texts, reader.pad, reader=True, device=rows.mesh.device))


def read_steps(reader: Reader, rows: Rows, examples: Sequence[Example]) -> tuple[Rows, list[list[int]]]:
    """The rows in the model's own tokens, with the mask true at the end of every step.

    Returns: the rows, and for each row of this rank the positions of the policy's tokens that end its steps.

    Raises:
      RewardError: as in `read_texts`.
    """
    texts = []
    ends = []
    for completion in own_completions(rows, examples):
        solution_steps = steps_of(completion, reader.separator, reader.decode)
        prompt, before = encode_prompt(reader.tokenizer, completion.example.messages or completion.example.text)
        steps = [step.text for step in solution_steps]
        text = steps_text(prompt, steps, reader.separator, tokenizer=reader.tokenizer, before=before)
        texts.append(TextExample((text,)))
        ends.append([len(completion.example.tokens) + step.last for step in solution_steps])
    batch = text_batch(texts, reader.pad, reader=True, device=rows.mesh.device, steps=True)
    return _read_rows(reader, rows, batch), ends


def _read_rows(reader: Reader, rows: Rows, batch: Batch) -> Rows:
    """Rows of a batch of texts of this rank's rows."""
    table = gather_table({"length": batch.length}, rows.owner, rows.mesh, axes=rows.mesh.row_axes)
    longest = int(table["length"].max()) - 1  # one more token reads the last
    if longest > reader.positions:
        raise RewardError(
            f"the {reader.name} reads a prompt and completion as {longest} tokens, but it has {reader.positions} "
            "positions; use a smaller --max_new_tokens or shorter prompts"
        )
    return rows_of(batch._replace(length=table["length"]), rows.owner, rows.mesh)
