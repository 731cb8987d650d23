"""Records of files as a run trains them: their tokens, and what differs between the two."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from funrl.algos.core import Algorithm
from funrl.data.columns import prompt_columns, rename_columns, text_columns
from funrl.data.conversations import ChatTemplate, Text
from funrl.data.json_lines import DataError
from funrl.data.messages import (
    are_messages,
    normal_changes,
    normal_messages,
    shown,
    unread_fields,
    without_arrow_nulls,
)
from funrl.data.pictures import PICTURE_COLUMNS, with_picture_form
from funrl.data.prompt_format import PICTURE_MARK, PromptFormat, tools_of
from funrl.data.prompts import Example, encode, prompt_of_record
from funrl.data.records import TableRows, open_table
from funrl.data.supervised import (
    LABELS,
    TEXT_FIELDS,
    TextExample,
    halves_of,
    read_at_end,
    text_example,
)
from funrl.data.text_lengths import FitExample, check_lengths, fit_examples
from funrl.data.tokenizer import (
    END_THINK,
    TRUSTED,
    TokenizerError,
    encode_text,
    has_own_begin,
    inline_thoughts,
    load_tokenizer,
    markers_of,
)
from funrl.models.huggingface import directories as hf
from funrl.tasks.task import RIGHT_ANSWER
from funrl.track.report.record_page import ShownRecord, ShownRow, text_pieces
from funrl.trainer.jobs.datasets import (
    embedded_prompts,
    embedded_texts,
    format_of,
    given_environment,
    prompts_of_environment,
    token_limit,
    with_chat_template,
)
from funrl.trainer.jobs.demonstrations import DemonstrationReader, check_demonstrations, learns_from_demonstrations
from funrl.trainer.jobs.job import DEMONSTRATION
from funrl.trainer.jobs.models import first_model
from funrl.trainer.jobs.prepare import form_of_pictures, texts_kind
from funrl.trainer.settings.checks import data_files, names_of_fields
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.scorers import Given, resolved
from funrl.trainer.settings.settings import Settings

NULLS = "nulls that the table has for absent keys are left out"


class StoredRecord(NamedTuple):
    """A record of a file.

    Attributes:
      where: its file, and line or row.
      columns: its values by name.
      has_nulls: whether its Arrow table gave it nulls, which are left out.
    """

    where: str
    columns: Any
    has_nulls: bool = False


class RecordReader(NamedTuple):
    """A reader of the records of a run.

    Attributes:
      settings: the flags.
      algorithm: of the run.
      kind: of given texts, one of `TEXT_FIELDS`; "" for prompts.
      tokenizer: with the chat template.
      form: of the prompts.
      most: tokens that a prompt or text may have, and the reason.
    """

    settings: Settings
    algorithm: Algorithm
    kind: str
    tokenizer: Any
    form: PromptFormat
    most: tuple[int, str]

    def text(self, ids: Sequence[int]) -> str:
        """Text of tokens, with special ones, and a blank for all white space."""
        decoded = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return " ".join(decoded.split())


def shown_records(
    settings: Settings, algorithm: Algorithm, kind: str, numbers: Sequence[int], count: int
) -> Iterator[ShownRecord]:
    """Yield records as a run trains them.

    Args:
      settings: the flags, with directories of models.
      algorithm: of the run.
      kind: of the run.
      numbers: of lines or rows, ascending; empty: the first ones.
      count: number of these of each file.

    Raises:
      SettingsError, DataError, PromptError: a flag or a record cannot be used.
    """
    reader = record_reader(settings, algorithm, texts_kind(algorithm) if kind == "supervised" else "")
    files = data_files(settings, "data" if reader.kind else "prompts")
    environment = None if reader.kind or files else given_environment(settings, Given())
    for file in files:
        for record in stored_records(file.path, numbers, count):
            yield from text_records(reader, record) if reader.kind else [prompt_record(reader, record)]
    if environment is not None:
        prompts = prompts_of_environment(environment, settings, Given())
        for place in [n - 1 for n in numbers or range(1, count + 1) if n <= len(prompts)]:
            yield prompt_record(reader, StoredRecord(f"prompt {place + 1}", prompts[place]))
    elif not files:
        examples: Sequence[Any] = (
            embedded_texts(settings, reader.kind, reader.tokenizer).examples
            if reader.kind
            else embedded_prompts(settings, reader.tokenizer).prompts
        )
        for place in [n - 1 for n in numbers or range(1, count + 1) if n <= len(examples)]:
            example = examples[place]._replace(source=f"{settings.examples.task}, example {place + 1}")
            yield show_texts(reader, example, []) if reader.kind else show_prompt(reader, example, [])


def record_reader(settings: Settings, algorithm: Algorithm, kind: str) -> RecordReader:
    """A reader; `kind` as in `RecordReader`. Raises: ValueError, the model's directory or a flag cannot be used."""
    path = settings.models.model
    if path is None:
        model, tokenizer = first_model(settings, Given())
    else:
        tokenizer = load_tokenizer(path)
        has_config = (Path(path) / "config.json").is_file()
        model = hf.load_model(path, settings.models.model_code) if has_config else None
    tokenizer = with_chat_template(tokenizer, settings)
    room = sys.maxsize if model is None else model.config.max_positions
    reason = f"the model has {room} positions"
    if model is not None:
        tokenizer = with_picture_form(tokenizer, form_of_pictures(settings, model.config))
    flag, asked = "max_text_tokens", settings.examples.max_text_tokens
    if not kind:
        new_tokens = resolved(settings, given=True).sampling.max_new_tokens or 0
        room -= new_tokens
        reason = f"--max_new_tokens is {new_tokens} and {reason}"
        flag, asked = "max_prompt_tokens", settings.examples.max_prompt_tokens
    most, reason, _ = token_limit(flag, asked, room, reason)
    return RecordReader(
        settings, algorithm, kind, tokenizer, form=format_of(settings, names_of_fields(settings)), most=(most, reason)
    )


def stored_records(path: str, numbers: Sequence[int], count: int) -> list[StoredRecord]:
    """Read records of a file; the others as in `shown_records`."""
    table = open_table(Path(path))
    records = {}
    is_arrow = isinstance(table, TableRows) and table.is_arrow
    for place, row in table.scan():
        if place + 1 in numbers or not numbers:
            columns = without_arrow_nulls(row) if is_arrow else row
            records[place + 1] = StoredRecord(table.where(place), columns, has_nulls=columns != row)
        if len(records) == (len(numbers) or count):
            break
    missing = [number for number in numbers if number not in records]
    if missing:
        raise SettingsError(f"--record={missing[0]}: {path} has no record there")
    if not records:
        raise DataError(f"{path}: the file is empty")
    return list(records.values())


def text_records(reader: RecordReader, record: StoredRecord) -> Iterator[ShownRecord]:
    """Yield a record of given texts; a pair that is trained as ratings is two. Raises: DataError."""
    kind = reader.kind
    try:
        columns = rename_columns(record.columns, names_of_fields(reader.settings))
        for half in halves_of(columns) if kind == "ratings" else [columns]:
            example = text_example(half, kind, reader.tokenizer, reader.form)._replace(source=record.where)
            given = text_columns(half, kind)
            used = _columns_read(given, kind)
            remarks = [NULLS] * record.has_nulls
            if "prompt" in given and columns.keys().isdisjoint({"prompt", "question"}):
                remarks.append(f"the prompt is what its texts share: the first messages ({len(given['prompt'])})")
            remarks += record_remarks(reader, given, used, rows=example.texts)
            further = ("tools", "margin", LABELS.get(kind), *PICTURE_COLUMNS)
            unread = [name for name in given if name not in (*used, *further)]
            remarks += [f"columns that nothing reads: {', '.join(unread)}"] * bool(unread)
            if "chosen" in used and given["chosen"] == given["rejected"]:
                remarks.append("chosen and rejected are equal: there is nothing to learn")
            if kind == "demonstrations" and len(example.texts) > 1:
                remarks.append("the chat template renders earlier turns otherwise later: each row trains other turns")
            yield show_texts(reader, example, remarks)
    except (DataError, TokenizerError) as error:
        raise DataError(f"{record.where}: {error}") from error
    except Exception as error:  # tokenizers raise plain ones
        raise DataError(f"{record.where}: the tokenizer refuses it: {error}") from error


def show_texts(reader: RecordReader, example: TextExample, remarks: list[str]) -> ShownRecord:
    """A tokenized example of given texts."""
    example, fitting = fit_length(reader, example)
    tokenizer = reader.tokenizer
    texts = example.texts
    titles: Sequence[str] = TEXT_FIELDS["triples"] if len(texts) > 1 else [""]
    if reader.kind == "demonstrations":
        titles = [f"row {n} of {len(texts)}" if len(texts) > 1 else "" for n in range(1, len(texts) + 1)]
    if reader.kind == "ratings":
        titles = [f"label {example.labels[0]:g}"]
    notes = [f"label {label:g}" for label in example.labels] if reader.kind == "steps" else []
    reads = {reader.algorithm.role_kinds[name].reads for name in reader.algorithm.losses}
    if "completion" in reads:
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        texts = [read_at_end(text, pad) for text in texts]
        fitting = [*fitting, "trained is the model's number at the token that is appended, where it has seen the text"]
    if "steps" in reads:
        fitting = [*fitting, "trained is the model's number after each coloured token"]
    pieces = [text_pieces(text, tokenizer, notes) for text in texts]
    rows = [ShownRow(title, row) for title, row in zip(titles, pieces, strict=False)]
    if reader.kind in ("preferences", "triples"):
        similar = (len(set(column)) == 1 for column in zip(*pieces, strict=False))
        shared = next((place for place, same in enumerate(similar) if not same), min(map(len, pieces)))
        rows = [ShownRow("shared", pieces[0][:shared]), *(ShownRow(x.title, x.pieces[shared:]) for x in rows)]
    sizes = [f"{len(text.tokens)} tokens, {sum(text.trained)} trained" for text in texts]
    size = "; ".join(f"{title}: {size}" if title else size for title, size in zip(titles, sizes, strict=False))
    return ShownRecord(example.source, size, rows, [*remarks, *fitting])


def prompt_record(reader: RecordReader, record: StoredRecord) -> ShownRecord:
    """A prompt to complete. Raises: PromptError."""
    settings = reader.settings
    fields = names_of_fields(settings)
    prompt = prompt_of_record(record.where, record.columns, fields)
    example = encode(prompt, reader.tokenizer, reader.form)
    given = prompt_columns(rename_columns(record.columns, fields))
    remarks = [NULLS] * record.has_nulls
    text = Text(example.tokens, [False] * len(example.tokens))
    remarks += record_remarks(reader, given, ["prompt"], rows=[text])
    if prompt.prompt in [shot.prompt for shot in reader.form.shots]:
        remarks.append("left out: it is an example of --few_shot")
    if settings.environments.env is not None:
        remarks.append(f"--env={settings.environments.env} gets this record, and says what the policy reads")
    return show_prompt(reader, example, remarks)


def show_prompt(reader: RecordReader, example: Example, remarks: list[str]) -> ShownRecord:
    """A tokenized prompt, with its demonstration where the algorithm learns from it."""
    settings = reader.settings
    example, fitting = fit_length(reader, example)
    text = Text(example.tokens, [False] * len(example.tokens))
    rows = [ShownRow("prompt, which the policy continues", text_pieces(text, reader.tokenizer))]
    if learns_from_demonstrations(reader.algorithm):
        is_embedded = settings.examples.prompts is None and settings.environments.env is None
        field = RIGHT_ANSWER if is_embedded else DEMONSTRATION
        check_demonstrations([example], field, None)
        demonstrations = DemonstrationReader(field, reader.tokenizer, reader.form, most=0, pad=0, paired=False)
        rows.append(ShownRow("demonstration", text_pieces(demonstrations.text(example).texts[0], reader.tokenizer)))
    fields = {name: shown(value) for name, value in example.fields.items()}
    return ShownRecord(example.source, f"{len(example.tokens)} tokens of prompt", rows, [*remarks, *fitting], fields)


def fit_length(reader: RecordReader, example: FitExample) -> tuple[FitExample, list[str]]:
    """An example as --long_prompts treats it if it is too long, and a remark on that."""
    most, reason = reader.most
    long = reader.settings.examples.long_prompts
    try:
        check_lengths([example], most, reader.tokenizer, reason=reason)
    except DataError as error:
        if long == "truncate":
            short = fit_examples([example], most, long, reason=reason, tokenizer=reader.tokenizer).examples[0]
            return short, [f"shortened to {most} tokens, as {reason}"]
        if long == "drop":
            return example, [f"left out (--long_prompts=drop): {reason}"]
        return example, [f"the run refuses it: {error}"]
    return example, []


def record_remarks(
    reader: RecordReader, given: Mapping[str, Any], names: Sequence[str], rows: Sequence[Text]
) -> list[str]:
    """Remarks on what the tokens lack of a record, or have otherwise.

    Args:
      given: the record.
      names: of its columns that are read.
      rows: its tokens.
    """
    tokenizer = reader.tokenizer
    form = reader.form
    remarks = []
    tokens = [token for row in rows for token in row.tokens]
    text = " ".join(reader.text(row.tokens) for row in rows)
    columns = {name: given[name] for name in names}
    lists = {name: value for name, value in columns.items() if are_messages(value)}
    chats = {name: normal_messages(value) for name, value in lists.items() if isinstance(value[0], Mapping)}
    for name, messages in chats.items():
        for number, (before, message) in enumerate(zip(given[name], messages, strict=True), 1):
            changes = [*normal_changes(before, message), *_message_remarks(message, text, tokenizer)]
            remarks += [f"{name}, message {number} ({message['role']}): {change}" for change in changes]
    words = {name: value for name, value in columns.items() if isinstance(value, str)}
    remarks += [
        f"{name} is not in the tokens word for word"
        for name, word in words.items()
        if not _has(text, *word.split(PICTURE_MARK))
    ]
    tools = [tool.get("function") or tool for tool in tools_of(given.get("tools"), form)]
    template = ChatTemplate(tokenizer, tools, form.arguments)
    if chats or form.chat:
        unread = unread_fields([message for chat in chats.values() for message in chat], tokenizer.chat_template)
        remarks += [f"fields of messages that nothing reads: {', '.join(unread)}"] * bool(unread)
        hidden = [str(tool.get("name")) for tool in tools if not _has(text, str(tool.get("name")))]
        remarks += [f"tools that the chat template does not show: {', '.join(hidden)}"] * bool(hidden)
    elif tools:
        remarks.append("tools are not shown: the prompt is text (--chat_template=own makes it a chat)")
    begun = [word for word in words.values() if has_own_begin(tokenizer, word)]
    if begun and encode_text(tokenizer, begun[0], special=True)[:2] == [tokenizer.bos_token_id] * 2:
        remarks.append(f"the text begins with {tokenizer.bos_token} itself, which is not put before it again")
    closing, mark = template.closing() if chats or form.chat else ("", "")
    if (
        closing is not None
        and not mark
        and any(row.trained[-1] and row.tokens[-1] == tokenizer.eos_token_id for row in rows)
    ):
        lacking = "the chat template" if chats or form.chat else "the record"
        remarks.append(f"{tokenizer.eos_token} is added and trained: {lacking} has nothing that ends the text")
    unknown = tokens.count(tokenizer.unk_token_id) if tokenizer.unk_token_id is not None else 0
    return [
        *remarks,
        *[f"{unknown} tokens are {tokenizer.unk_token}: the tokenizer does not know them"] * bool(unknown),
    ]


def _message_remarks(message: Mapping[str, Any], text: str, tokenizer: Any) -> Iterator[str]:
    """Yield remarks on a message in the normal form.

    Args:
      text: of the tokens, as of `RecordReader.text`.
    """
    content = message["content"]
    contents = content.split(PICTURE_MARK) if isinstance(content, str) else [x.get("text", "") for x in content]
    if message["role"] not in TRUSTED:
        matches = (match for content in contents for match in markers_of(tokenizer).finditer(content))
        marks = dict.fromkeys(match[0] for match in matches if len(match[0]) > 1)
        if marks:
            yield f"{', '.join(marks)} is text in it, and no special token"
    if message["role"] == "assistant":
        if not _has(text, inline_thoughts(message)):
            yield "its thoughts are not in the tokens"
        contents[-1] = contents[-1].rpartition(END_THINK)[2]
    if not _has(text, *contents):
        yield "its content is not in the tokens word for word"
    for call in message.get("tool_calls", ()):
        function = call["function"]
        if not _has(text, function["name"], *_leaves(function["arguments"])):
            yield f"its call of {function['name']} is not in the tokens word for word"


def _has(text: str, *parts: str) -> bool:
    """True if a text has all of some others, as they are or as JSON, whatever the white space."""
    forms = ((part, json.dumps(part, ensure_ascii=False)[1:-1], json.dumps(part)[1:-1]) for part in parts)
    return all(any(" ".join(form.split()) in text for form in similar) for similar in forms)


def _leaves(value: Any) -> Iterator[str]:
    """Yield the texts in arguments of a call."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _leaves(inner)


def _columns_read(given: Mapping[str, Any], kind: str) -> list[str]:
    """Names of the columns that texts are made of."""
    if kind == "demonstrations" and "messages" in given:
        return ["messages"]
    if kind == "demonstrations" and "prompt" not in given:
        return ["text"]
    return ["prompt", *TEXT_FIELDS[kind]]
