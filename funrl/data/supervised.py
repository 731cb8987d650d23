"""Demonstrations and preferences: from a file of JSON lines, or in memory, to tokens of which some are learnt.

| kind | one line of the file |
|---|---|
| demonstrations | `{"prompt": text or messages, "completion": text}` or `{"messages": [...]}` |
| preferences | `{"prompt": text or messages, "chosen": text, "rejected": text}`, and "margin" where it is known |

Messages are `{"role": ..., "content": ...}` and go through the tokenizer's chat template; of a conversation every turn
of the assistant is learnt, and nothing else. A completion may also be a list of one message. It ends with the
end-of-text token, so that ending is learnt too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from funrl.batch import Batch
from funrl.data.packing import pad_rows
from funrl.data.tokenizer import TokenizerError, encode_prompt

FIELDS = {"demonstrations": ("completion",), "preferences": ("chosen", "rejected")}


class DataError(ValueError):
    """A line that cannot be learnt from; the message names the file, the line and what is wrong with it."""


class Text(NamedTuple):
    """A sequence of tokens, and which of them are learnt."""

    tokens: list[int]
    learnt: list[bool]


class TextExample(NamedTuple):
    """What belongs together: one text, or the chosen and the rejected one.

    Attributes:
      margin: by how much the first text should win.
      source: the file and the line it is from.
    """

    texts: tuple[Text, ...]
    margin: float | None = None
    source: str = ""


def load_examples(path: str | Path, kind: str, tokenizer: Any) -> list[TextExample]:
    """All examples of a file; blank lines are skipped.

    Args:
      kind: "demonstrations" or "preferences".
    Raises:
      DataError: the file is missing or empty, or a line is not as the table above says.
    """
    path = Path(path)
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: it cannot be read: {error}") from error
    examples = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            examples.append(text_example(json.loads(line), kind, tokenizer)._replace(source=where))
        except (ValueError, TokenizerError) as error:
            raise DataError(f"{where}: {error}") from error
        except Exception as error:  # tokenizers raise plain ones
            raise DataError(f"{where}: the tokenizer refuses it: {error}") from error
    if not examples:
        raise DataError(f"{path}: the file is empty; {kind} are JSON lines")
    return examples


def text_example(record: Any, kind: str, tokenizer: Any) -> TextExample:
    """One record as tokens.

    Raises:
      DataError, TokenizerError: a field is missing or of the wrong kind.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"a JSON object is needed, this is {type(record).__name__}")
    if kind == "demonstrations" and "messages" in record:
        return TextExample((conversation(record["messages"], tokenizer),))
    missing = [name for name in ("prompt", *FIELDS[kind]) if name not in record]
    if missing:
        raise DataError(f"there is no field {missing[0]!r}; the fields are {sorted(record)}")
    if not (isinstance(record["prompt"], str) or _are_messages(record["prompt"])):
        raise DataError("'prompt' must be text, or a list of messages")
    prompt, _ = encode_prompt(tokenizer, record["prompt"])
    margin = record.get("margin")
    if margin is not None and not (isinstance(margin, (int, float)) and math.isfinite(margin)):
        raise DataError(f"'margin' is {margin!r}; a number is needed")
    return TextExample(tuple(_completed(prompt, name, record[name], tokenizer) for name in FIELDS[kind]), margin)


def conversation(messages: Any, tokenizer: Any) -> Text:
    """A conversation of which the assistant's turns are learnt.

    Raises:
      DataError, TokenizerError: it has no such turn, or the template writes a turn differently once another follows.
    """
    if not _are_messages(messages) or not any(m["role"] == "assistant" for m in messages):
        raise DataError("'messages' must be a list of messages, one of them at least by the assistant")
    text, tokens, learnt = "", [], []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        _, before = encode_prompt(tokenizer, messages[:i])
        after = tokenizer.apply_chat_template(list(messages[: i + 1]), tokenize=False)
        if not (before.startswith(text) and after.startswith(before)):
            raise DataError("the chat template changes earlier turns when one is added; give prompts and completions")
        for part, is_learnt in ((before[len(text) :], False), (after[len(before) :], True)):
            ids = tokenizer.encode(part, add_special_tokens=False)
            tokens += ids
            learnt += [is_learnt] * len(ids)
        text = after
    return Text(tokens, learnt)


def to_batch(examples: Sequence[TextExample], pad: int, reader: bool = False, device: Any = "cpu") -> Batch:
    """Rows to learn from, one a lesson; the two texts of a preference lie side by side as segments 1 and 2.

    Args:
      pad: id of the padding token.
      reader: end every text with one more token, and let the mask be true there and nowhere else: a value head's
        number at that place has seen the whole text. Padding tokens at the end of a text are not read, as in
        transformers: a tokenizer that pads with its end-of-text token thus has that token not read either.
      device: where the batch goes.
    """
    rows, masks, places, segments = [], [], [], []
    for one in examples:
        texts = [_read(text, pad) for text in one.texts] if reader else one.texts
        rows.append([i for t in texts for i in t.tokens])
        masks.append([i for t in texts for i in t.learnt])
        places.append([i for t in texts for i in range(len(t.tokens))])
        segments.append([n for n, t in enumerate(texts, 1) for _ in t.tokens])
    put = lambda x, fill=0: torch.as_tensor(pad_rows(x, fill, 8), device=device)  # noqa: E731
    length = torch.tensor([len(r) for r in rows], device=device)
    batch = Batch(tokens=put(rows, pad), mask=put(masks).bool(), length=length)
    if all(len(one.texts) == 1 for one in examples):
        return batch
    batch = batch._replace(positions=put(places), segments=put(segments))
    if any(one.margin is None for one in examples):
        return batch
    margin_B = torch.tensor([one.margin for one in examples], device=device)
    return batch._replace(margin=margin_B[:, None].expand(batch.tokens.shape).contiguous())


def check_lengths(examples: Sequence[TextExample], positions: int, tokenizer: Any) -> None:
    """Compares texts with the longest sequence that a model was made for.

    Raises:
      DataError: naming the first lesson that is longer, and how many there are.
    """
    long = [(i, one) for i, one in enumerate(examples, 1) if max(len(t.tokens) for t in one.texts) > positions]
    if not long:
        return
    number, one = long[0]
    which, text = max(enumerate(one.texts), key=lambda pair: len(pair[1].tokens))
    name = "text" if len(one.texts) == 1 else f"prompt with {FIELDS['preferences'][which]!r}"
    begins = tokenizer.decode(text.tokens[:40])[:60]
    others = f"; {len(long)} of {len(examples)} examples are too long" if len(long) > 1 else ""
    raise DataError(
        f"{one.source or f'lesson {number}'}: the {name} has {len(text.tokens)} tokens, but the model has {positions} "
        f"positions; shorten it, leave it out or take a model with more{others} (it begins {begins!r})"
    )


def _read(text: Text, pad: int) -> Text:
    """The text without padding at its end, and behind it one token that is learnt."""
    length = max((i for i, token in enumerate(text.tokens, 1) if token != pad), default=1)
    return Text([*text.tokens[:length], pad], [False] * length + [True])


def _completed(prompt: list[int], name: str, completion: Any, tokenizer: Any) -> Text:
    if _are_messages(completion) and len(completion) == 1:
        completion = completion[0]["content"]
    if not isinstance(completion, str):
        raise DataError(f"{name!r} must be text, or a list of one message")
    ids = tokenizer.encode(completion, add_special_tokens=False)
    if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids = [*ids, tokenizer.eos_token_id]
    if not prompt or not ids:
        raise DataError(f"the prompt and {name!r} must have at least one token")
    return Text([*prompt, *ids], [False] * len(prompt) + [True] * len(ids))


def _are_messages(x: Any) -> bool:
    return (
        isinstance(x, list)
        and bool(x)
        and all(
            isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in x
        )
    )
