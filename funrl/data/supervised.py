"""Demonstrations and preferences: from records in a file or in memory to tokens with a mask of trained ones.

| kind | one record of the file |
|---|---|
| demonstrations | `{"prompt": text or messages, "completion": text}` or `{"messages": [...]}` or `{"text": text}` |
| preferences | `{"prompt": text or messages, "chosen": text, "rejected": text}`, and optionally "margin" |
| triples | a preference with "reference": text, the best one, which is imitated |
| ratings | `{"prompt": text or messages, "completion": text, "label": true or false}`, or a preference, which is two |
| steps | `{"prompt": text or messages, "completions": [text, ...], "labels": [true or false, ...]}` |

Messages are `{"role": ..., "content": ...}`, see `messages`, and go through the tokenizer's chat template; see
`conversations` for what is trained. A completion may also be messages; behind a prompt in messages, a text is the
assistant's. A text that completes a text ends with the end-of-text token, so that ending is trained too. A `text` is
trained except its first token, which nothing predicts. A separator follows every step, and the last token of a step is
trained. `text_columns` accepts further names of columns.

Checks: `load_examples` reads every record and checks its fields, without tokenizing. Before a run, `fit_examples`
tokenizes all texts of a list or of a file up to 4 MB; of a larger file, the first 1,000 lines and those whose size
suggests that they may be too long. A text is tokenized when it is read, by the rank that has it, which keeps up to
`KEPT_TOKENS`. The texts of a step are checked too, as a chat template may add many tokens to a short line.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import torch

from funrl.batch import Batch
from funrl.data.columns import Fields, check_steps, is_label, rename_columns, text_columns
from funrl.data.conversations import (
    ChatTemplate,
    Text,
    completed_text,
    continued_texts,
    conversation_texts,
    encode_prompt,
    whole_text,
)
from funrl.data.json_lines import DataError, JsonObject
from funrl.data.messages import (
    THOUGHT_FIELDS,
    ChatMessage,
    RecordRemarks,
    are_messages,
    are_usual,
    check_chat_roles,
    normal_messages,
)
from funrl.data.order import Mixture
from funrl.data.packing import pad_rows
from funrl.data.pictures import expand_placeholders, flags_after, picture_form_of, pictures_of
from funrl.data.processors.form import PictureForm
from funrl.data.processors.reading import ReadPatches
from funrl.data.prompt_format import PLAIN_PROMPTS, PromptFormat, format_messages, format_prompt, marked, tools_of
from funrl.data.records import FORMATS, Records, TableRows, open_records
from funrl.data.tokenizer import TextTokenizer, TokenizerError, encode_after, encode_text_prompt
from funrl.kinds import OwnedLines

TEXT_FIELDS = {
    "demonstrations": ("completion",),
    "preferences": ("chosen", "rejected"),
    "ratings": ("completion",),
    "steps": ("completions",),
    "triples": ("chosen", "rejected", "reference"),
}
LABELS = {"ratings": "label", "steps": "labels"}
SMALL_BYTES = 4 << 20  # a file up to here is tokenized whole before the run, in about two seconds
FIRST_LINES = 1000  # lines of any file that are tokenized before the run
KEPT_TOKENS = 1 << 20  # tokens of a file that a rank keeps, in about 50 MB


class TextExample(NamedTuple):
    """An example: a text; a chosen and a rejected text; these two and a text to imitate; or rows of a conversation.

    Attributes:
      texts: of a conversation one, or several if its chat template renders earlier turns otherwise.
      margin: margin by which the first text should win.
      labels: 0 to 1, one for each trained token in order, or a single one for the whole text.
      source: its file and line.
      owned: values that each text owns, such as its pictures; with a model that reads such, all examples have some.
    """

    texts: tuple[Text, ...]
    margin: float | None = None
    labels: tuple[float, ...] = ()
    source: str = ""
    owned: tuple[OwnedLines, ...] = ()

    def has_several_rows(self) -> bool:
        """True of rows of a conversation, whose prompts differ; the texts of a pair or triple share theirs."""
        return len({tuple(text.tokens[: text.trained.index(True)]) for text in self.texts}) > 1


@dataclass(eq=False)
class KeptTexts:
    """Tokenized texts of a file by their place in its table, up to `room` further tokens."""

    examples: dict[int, TextExample] = dataclasses.field(default_factory=dict)
    room: int = KEPT_TOKENS

    def keep(self, place: int, example: TextExample) -> None:
        """Keep an example if there is room."""
        tokens = sum(len(text.tokens) for text in example.texts)
        if tokens <= self.room:
            self.examples[place] = example
            self.room -= tokens


@dataclass(frozen=True, eq=False)
class TextFile(Sequence[TextExample]):
    """The examples of a file, read and tokenized on access. Slices and arrays of indices give views.

    Attributes:
      records: of the file.
      kind: one of `TEXT_FIELDS`.
      tokenizer: of Hugging Face.
      has_margin: whether every record has a margin, in this file and in those trained on together with it.
      fields: names of fields -> columns, as in `rename_columns`.
      form: of the prompts.
      most: bound on the tokens of a text, which is `shortened` beyond; None: no bound.
      remarks: on the records, for the log.
      kept: texts that are tokenized already; views of the file share it.
    """

    records: Records
    kind: str
    tokenizer: TextTokenizer
    has_margin: bool
    fields: Fields
    form: PromptFormat = PLAIN_PROMPTS
    most: int | None = None
    remarks: tuple[str, ...] = ()
    kept: KeptTexts = dataclasses.field(default_factory=KeptTexts)

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, index: int) -> TextExample: ...
    @overload
    def __getitem__(self, index: slice | np.ndarray) -> TextFile: ...
    def __getitem__(self, index: int | slice | np.ndarray) -> TextExample | TextFile:
        """Raises: DataError, naming file and line: the tokenizer refuses the text, or the file has been changed."""
        if isinstance(index, (slice, np.ndarray)):
            return dataclasses.replace(self, records=self.records[index])
        return self.example(index)

    def example(self, index: int, read: ReadPatches | None = None) -> TextExample:
        """An example, whose pictures `read` reads as in `expand_placeholders`. Raises: DataError."""
        place = int(self.records.places[index])
        example = self.kept.examples.get(place)
        if example is None:
            example = self._tokenized(index, read)
            self.kept.keep(place, example)
        example = example if self.most is None else shortened(example, self.most)
        # A column of margins needs a margin for every row that a step may contain.
        return example._replace(margin=example.margin if self.has_margin else None, source=self.records.where(index))

    def _tokenized(self, index: int, read: ReadPatches | None) -> TextExample:
        record = self.records[index]
        try:
            return text_example(rename_columns(record, self.fields), self.kind, self.tokenizer, self.form, read)
        except (DataError, TokenizerError) as error:
            raise DataError(f"{self.records.where(index)}: {error}") from error
        except Exception as error:  # tokenizers raise plain ones
            raise DataError(f"{self.records.where(index)}: the tokenizer refuses it: {error}") from error

    def suspects(self, positions: int) -> Iterable[int]:
        """Indices of the examples that may be too long or be refused, and have to be tokenized to know."""
        sizes = self.records.sizes()
        if sizes.sum() <= SMALL_BYTES:
            return range(len(self))
        # A token has at least one byte, apart from a template's additions.
        return np.flatnonzero((sizes > positions) | (np.arange(len(sizes)) < FIRST_LINES)).tolist()


def load_examples(
    source: str | Path | TableRows,
    kind: str,
    tokenizer: TextTokenizer,
    fields: Fields | None = None,
    form: PromptFormat = PLAIN_PROMPTS,
) -> TextFile:
    """Open a file of examples; blank lines are skipped. See `records` for what is held in memory.

    Args:
      source: as in `open_records`.
      kind: one of `TEXT_FIELDS`.
      fields: names of fields -> columns, as in `rename_columns`.
      form: of the prompts.

    Raises:
      DataError: the file is missing or empty, or a record does not fit the table of this module.
    """
    fields = fields or {}
    count = without_margin = 0
    paired = None
    remarks = RecordRemarks(tokenizer)

    def check(record: Any) -> None:
        nonlocal count, without_margin, paired
        record = rename_columns(record, fields)
        paired = kind == "ratings" and is_pair(record) if paired is None else paired
        read_kind = "preferences" if paired else kind
        columns = text_columns(record, read_kind)
        normal = normal_record(columns, read_kind)
        remarks.see(count, normal, usual=normal is columns)
        count += 1
        without_margin += normal.get("margin") is None

    records = open_records(source, check)
    if not len(records):
        raise DataError(f"{source}: the file is empty; {kind} are {FORMATS}")
    lines = tuple(remarks.lines(records.where))
    if paired:
        halves = Records(PairHalves(records, fields), np.arange(2 * len(records)))
        return TextFile(halves, kind, tokenizer, has_margin=False, fields={}, form=form, remarks=lines)
    return TextFile(records, kind, tokenizer, has_margin=not without_margin, fields=fields, form=form, remarks=lines)


def join_files(files: Sequence[TextFile], shares: Sequence[int] | None) -> Sequence[TextExample]:
    """Join the examples of several files, with margins if all records have them.

    Args:
      files: to join.
      shares: as in `Mixture`.
    """
    has_margin = all(file.has_margin for file in files)
    parts = [dataclasses.replace(file, has_margin=has_margin) for file in files]
    return parts[0] if len(parts) == 1 else Mixture(parts, shares)


def normal_record(record: object, kind: str) -> JsonObject:
    """Check a record after `text_columns`; messages that are not as usual come out in their normal form.

    Raises:
      DataError: a field is missing or of the wrong type.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"a JSON object is needed, this is {type(record).__name__}")
    normal: JsonObject = record if type(record) is dict else dict(record)
    for name in ("prompt",) if kind == "steps" else ("prompt", "messages", *TEXT_FIELDS[kind]):
        value = normal.get(name)
        if type(value) is list and value and not are_usual(value):
            normal = {**normal, name: _normal_field(name, value)}
    if kind == "demonstrations" and "messages" in normal:
        messages = normal["messages"]
        roles = [message["role"] for message in messages] if are_messages(messages) else []
        if "assistant" not in roles:
            seen = f"; the roles are {', '.join(dict.fromkeys(roles))}" if roles else ""
            raise DataError(f"'messages' must be a list of messages, one of them at least by the assistant{seen}")
        return normal
    if kind == "demonstrations" and "text" in normal and "prompt" not in normal:
        if not isinstance(normal["text"], str):
            raise DataError("'text' must be text")
        return normal
    needed = ("prompt", *TEXT_FIELDS[kind], *([LABELS[kind]] if kind in LABELS else []))
    missing = [name for name in needed if name not in normal]
    if missing:
        raise DataError(
            f"there is no field {missing[0]!r}; the fields are {sorted(normal)}: --fields={missing[0]}:COLUMN "
            "names the column that has it"
        )
    if not (isinstance(normal["prompt"], str) or are_messages(normal["prompt"])):
        raise DataError("'prompt' must be text, or a list of messages")
    if kind == "steps":
        check_steps(normal["completions"], normal["labels"])
        return normal
    if kind == "ratings" and not is_label(normal["label"]):
        raise DataError(f"'label' is {normal['label']!r}; true, false or a number from 0 to 1 is needed")
    for name in TEXT_FIELDS[kind]:
        _check_completion(normal[name], name, kind)
    margin = normal.get("margin")
    if margin is not None and not (isinstance(margin, (int, float)) and math.isfinite(margin)):
        raise DataError(f"'margin' is {margin!r}; a number is needed")
    return normal


def _normal_field(name: str, messages: list[Any]) -> list[ChatMessage]:
    try:
        return normal_messages(messages)
    except DataError as error:
        raise DataError(f"{name!r}, {error}") from None


def _check_completion(completion: Any, name: str, kind: str) -> None:
    """Raise DataError unless a completion is a text, or messages that begin with the assistant's."""
    if isinstance(completion, str):
        return
    if not are_messages(completion) or completion[0]["role"] != "assistant":
        raise DataError(f"{name!r} must be text, or a list of messages that begins with the assistant's")
    if len(completion) > 1 and kind != "demonstrations":
        raise DataError(f"{name!r} has {len(completion)} messages; give one, and what is before it as the prompt")


def text_example(
    record: object, kind: str, tokenizer: Any, form: PromptFormat = PLAIN_PROMPTS, read: ReadPatches | None = None
) -> TextExample:
    """Tokenize a record.

    Args:
      kind: one of `TEXT_FIELDS`.
      form: format of the prompt or conversation; not used for a `text`.
      read: as in `expand_placeholders`.

    Raises:
      DataError, TokenizerError: a field is missing or of the wrong kind.
    """
    record = normal_record(text_columns(record, kind), kind)
    pictures = pictures_of(record, tokenizer)
    places = ("prompt", "messages") if pictures else ()
    record = {**record, **{name: marked(record[name], tokenizer) for name in places if name in record}}
    example = _text_example(record, kind, tokenizer, form)
    see = picture_form_of(tokenizer)
    if see is None:
        return example
    if pictures and kind != "demonstrations":
        raise DataError(f"{kind} have no pictures: these are read with demonstrations and prompts")
    seen = [
        expand_placeholders(text.tokens, pictures[:share], see, read)
        for text, share in zip(example.texts, _shares(example.texts, pictures, see, record), strict=True)
    ]
    texts = tuple(Text(new.tokens, flags_after(*text, new, see)) for text, new in zip(example.texts, seen, strict=True))
    return example._replace(texts=texts, owned=tuple(new.owned for new in seen))


def _shares(texts: Sequence[Text], pictures: Sequence[object], form: PictureForm, record: JsonObject) -> list[int]:
    """For each text the number of pictures that it has, the first ones of its record: a row ends with its last turn."""
    counts = [text.tokens.count(form.tower.placeholder) for text in texts]
    contents = [message.get("content") for message in record.get("messages", ())]
    places = sum(part.get("type") == "image" for parts in contents if isinstance(parts, list) for part in parts)
    return counts if places == len(pictures) else [len(pictures) for _ in texts]


def _text_example(record: Mapping[str, Any], kind: str, tokenizer: TextTokenizer, form: PromptFormat) -> TextExample:
    template = ChatTemplate(tokenizer, tools_of(record.get("tools"), form), form.arguments)
    if kind == "demonstrations" and "messages" in record:
        messages = format_messages(record["messages"], form)
        check_chat_roles(messages, tokenizer.chat_template)
        has_system = record["messages"][0]["role"] == "system"
        first = len(messages) - len(record["messages"]) + has_system  # behind the examples of --few_shot
        return TextExample(tuple(conversation_texts(messages, template, first)))
    if kind == "demonstrations" and "prompt" not in record:
        return TextExample((whole_text(record["text"], tokenizer),))
    prompt = format_prompt(record["prompt"], form)
    if kind == "steps":
        ids, text = encode_prompt(tokenizer, prompt, template.tools, arguments=form.arguments)
        labels = tuple(float(label) for label in record["labels"])
        steps = steps_text(ids, record["completions"], form.step_separator, tokenizer=tokenizer, before=text)
        return TextExample((steps,), labels=labels)
    texts = [text for name in TEXT_FIELDS[kind] for text in completed_texts(prompt, name, record[name], template)]
    if kind in ("preferences", "triples") and texts[0] == texts[1]:
        _check_alike(record["chosen"], record["rejected"])
    return TextExample(tuple(texts), record.get("margin"), (float(record["label"]),) if kind == "ratings" else ())


def _check_alike(chosen: Any, rejected: Any) -> None:
    """Raise DataError where texts of the same tokens say different things, apart from white space and ids of calls."""

    def said(given: Any) -> JsonObject:
        message: ChatMessage
        (message,) = [{"content": given}] if isinstance(given, str) else normal_messages(given)
        calls = [call["function"] for call in message.get("tool_calls", ())]
        content = message["content"].strip() if isinstance(message["content"], str) else message["content"]
        return {"content": content, "thoughts": message.get(THOUGHT_FIELDS[0], "").strip(), "calls": calls}

    first, second = said(chosen), said(rejected)
    if lost := [name for name, value in first.items() if value != second[name]]:
        raise DataError(
            f"'chosen' and 'rejected' differ in their {' and '.join(lost)}, and have the same tokens: the chat "
            "template leaves the difference out; give another one (--chat_template=FILE)"
        )


def completed_texts(prompt: Any, name: str, completion: Any, template: ChatTemplate) -> list[Text]:
    """Texts of a formatted prompt and a completion, each a text or messages.

    Args:
      name: name of the completion's field, for errors.

    Raises:
      DataError, TokenizerError: they do not go together, or the template refuses them.
    """
    if not isinstance(prompt, str):
        check_chat_roles(prompt, template.tokenizer.chat_template)
        replies = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        return continued_texts(prompt, normal_messages(replies), template)
    if not isinstance(completion, str):
        message, *further = normal_messages(completion)
        if further:
            raise DataError(
                f"{name!r} has {len(completion)} messages, and the prompt is text: give the prompt as messages, or "
                "--chat_template=own"
            )
        if set(message) != {"role", "content"} or not isinstance(message["content"], str):
            beside = ", ".join(sorted(set(message) - {"role", "content"})) or "parts"
            raise DataError(
                f"{name!r} is a message with {beside}, and the prompt is text: give the prompt as messages, or "
                "--chat_template=own"
            )
        completion = message["content"]
    ids = encode_text_prompt(template.tokenizer, prompt)
    return [completed_text(ids, name, completion, template.tokenizer, before=prompt)]


def steps_text(prompt: list[int], steps: Sequence[str], separator: str, tokenizer: TextTokenizer, before: str) -> Text:
    """Tokens of a prompt and the steps of its solution; the last token of each step is trained.

    Args:
      separator: text after every step, including the last.
      before: text of the prompt, which the steps continue.

    Raises:
      DataError: a step has no tokens.
    """
    tokens = list(prompt)
    trained = [False] * len(prompt)
    for number, step in enumerate(steps, 1):
        ids = [*encode_after(tokenizer, before, step), *encode_after(tokenizer, step or before, separator)]
        before = separator or step or before
        if not ids:
            raise DataError(f"step {number} has no tokens")
        tokens += ids
        trained += [*[False] * (len(ids) - 1), True]
    return Text(tokens, trained)


def rows_of_conversation(example: TextExample) -> list[TextExample]:
    """A demonstration as one example per text; each is a row."""
    owned = [(x,) for x in example.owned] or [()] * len(example.texts)
    return [example._replace(texts=(text,), owned=own) for text, own in zip(example.texts, owned, strict=True)]


def text_batch(
    examples: Sequence[TextExample], pad: int, reader: bool = False, device: Any = "cpu", steps: bool = False
) -> Batch:
    """Rows to train on, one per example; the texts of a preference or triple are the segments 1, 2 and 3 of a row.

    Args:
      pad: id of the padding token.
      reader: append a token to every text, and set the mask only there: a value head's number at that position has
        seen the whole text. Padding tokens at the end of a text are removed first, as in transformers; this includes
        the end-of-text token if the tokenizer pads with it.
      device: of the batch.
      steps: for a reader, set the mask after each trained token instead, so that there is a number for every step.
    """
    read = _read_steps if steps else read_at_end
    rows_of_texts = [[read(text, pad) for text in x.texts] if reader else x.texts for x in examples]
    rows = [[i for text in texts for i in text.tokens] for texts in rows_of_texts]
    masks = [[i for text in texts for i in text.trained] for texts in rows_of_texts]
    places = [[i for text in texts for i in range(len(text.tokens))] for texts in rows_of_texts]
    segments = [[n for n, text in enumerate(texts, 1) for _ in text.tokens] for texts in rows_of_texts]
    put = lambda x, fill=0: torch.as_tensor(pad_rows(x, fill, 8), device=device)  # noqa: E731
    length = torch.tensor([len(r) for r in rows], dtype=torch.int64, device=device)
    batch = Batch(tokens=put(rows, pad), mask=put(masks).bool(), length=length)
    if examples and all(example.labels for example in examples):
        batch = batch._replace(label=_labels(examples, batch.mask))
    if all(len(example.texts) == 1 for example in examples):
        return batch
    batch = batch._replace(positions=put(places), segments=put(segments))
    if any(example.margin is None for example in examples):
        return batch
    margin_B = torch.tensor([example.margin for example in examples], device=device)
    return batch._replace(margin=margin_B[:, None].expand(batch.tokens.shape).contiguous())


def shortened(example: TextExample, most: int) -> TextExample:
    """Shorten the texts of an example to at most `most` tokens.

    First the tokens before the first trained one are cut from the start, by the same number in both texts of a pair. If
    a text is still too long, at most half of it precedes the first trained token, and the rest is cut from the end.

    Args:
      most: at least 2.
    """
    lengths = [len(text.tokens) for text in example.texts]
    if max(lengths) <= most:
        return example
    if example.has_several_rows():  # each is cut by itself
        rows = [shortened(TextExample((text,)), most).texts[0] for text in example.texts]
        return example._replace(texts=tuple(rows))
    prompt = example.texts[0].trained.index(True)
    rest = max(lengths) - prompt
    begin = prompt - min(prompt, most - rest if rest < most else most // 2)
    texts = tuple(Text(text.tokens[begin:][:most], text.trained[begin:][:most]) for text in example.texts)
    return example._replace(texts=texts, labels=example.labels[: sum(texts[0].trained)])


def read_at_end(text: Text, pad: int) -> Text:
    """Remove trailing padding from a text, and append a token, the only trained one."""
    length = max((i for i, token in enumerate(text.tokens, 1) if token != pad), default=1)
    return Text([*text.tokens[:length], pad], [False] * length + [True])


def _read_steps(text: Text, pad: int) -> Text:
    """Append a token to a text, and shift the mask right by one."""
    return Text([*text.tokens, pad], [False, *text.trained])


def _labels(examples: Sequence[TextExample], mask_BT: torch.Tensor) -> torch.Tensor:
    """Label of each token in the mask, [B, T] float32; a single label applies to the whole row."""
    label_BT = torch.zeros(mask_BT.shape, device=mask_BT.device)
    for label_T, mask_T, example in zip(label_BT, mask_BT, examples, strict=True):
        labels = torch.tensor(example.labels, device=mask_BT.device)
        if len(labels) > 1:
            label_T[mask_T] = labels
        else:
            label_T.copy_(labels.expand_as(label_T))
    return label_BT


SIDES = ("chosen", "rejected")


def is_pair(record: object) -> bool:
    """True for a record, after `rename_columns`, with a chosen and a rejected text and no completion."""
    return isinstance(record, Mapping) and set(SIDES) <= set(record) and "completion" not in record


def half_of(record: Mapping[str, object], rejected: bool) -> JsonObject:
    """One text of a pair with its label.

    Args:
      record: after `rename_columns`.
      rejected: whether to take the rejected text instead of the chosen one.

    Raises:
      DataError: it has no prompt, and its conversations have no common prefix.

    >>> half_of({"prompt": "a", "chosen": "b", "rejected": "c"}, rejected=True)
    {'prompt': 'a', 'completion': 'c', 'label': False}
    """
    pair = text_columns(record, "preferences")
    rest = {name: value for name, value in pair.items() if name not in (*SIDES, "margin")}
    return rest | {"completion": pair[SIDES[rejected]], "label": not rejected}


def halves_of(record: Any) -> list[Any]:
    """Both texts of a pair, after `rename_columns`; other records unchanged."""
    return [half_of(record, rejected) for rejected in (False, True)] if is_pair(record) else [record]


class PairHalves(NamedTuple):
    """A table of the texts of pairs: index 2 n is the chosen text of pair n, 2 n + 1 the rejected one.

    Attributes:
      pairs: the records.
      fields: names of fields -> columns, as in `rename_columns`.
    """

    pairs: Records
    fields: Fields

    def read(self, place: int) -> JsonObject:
        """Read a text with its label."""
        return half_of(rename_columns(self.pairs[place // 2], self.fields), bool(place % 2))

    def where(self, place: int) -> str:
        """The file and the line of a text's pair."""
        return self.pairs.where(place // 2)

    def sizes(self) -> np.ndarray:
        """[texts] bytes of each pair's text."""
        return np.repeat(self.pairs.sizes(), 2)
