"""Names of columns: from those of TRL, verl and raw files to those of this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from funrl.data.json_lines import DataError, JsonObject

Fields = Mapping[str, str]


def parse_fields(text: str | None) -> Fields:
    """Parse a mapping of fields to columns such as "prompt:question,answer:extra_info.answer".

    >>> parse_fields("prompt:question,answer:extra_info.answer")
    {'prompt': 'question', 'answer': 'extra_info.answer'}

    Raises:
      DataError: the text is not of this form, or names a field twice.
    """
    pairs = [part.partition(":") for part in (text or "").split(",") if part.strip()]
    fields = {name.strip(): column.strip() for name, _, column in pairs}
    if not all(fields) or not all(fields.values()) or len(fields) < len(pairs) or (text is not None and not fields):
        raise DataError(
            f"--fields={text}: write NAME:COLUMN, separated by commas, as in prompt:question,answer:solution"
        )
    return fields


def rename_columns(record: object, fields: Fields) -> Any:
    """Rename columns of a record to the names of `fields`; other columns stay.

    Args:
      record: a record of a file.
      fields: name of a field -> name of its column; "a.b" is the entry b of the column a.

    Raises:
      DataError: the record has no such column.
    """
    if not fields or not isinstance(record, Mapping):
        return record
    taken = {name: _column(record, name, column) for name, column in fields.items()}
    return {name: value for name, value in record.items() if name not in fields.values()} | taken


def prompt_columns(record: Mapping[str, object]) -> JsonObject:
    """Normalise a record for reinforcement learning.

    Without a `prompt`, the `question` becomes the prompt. The `ground_truth` in verl's `reward_model` becomes a field.
    """
    columns = dict(record)
    if "prompt" not in columns and "question" in columns:
        columns["prompt"] = columns.pop("question")
    nested = columns.get("reward_model")
    if isinstance(nested, Mapping) and "ground_truth" in nested:
        columns.setdefault("ground_truth", nested["ground_truth"])
    return columns


def text_columns(record: object, kind: str) -> Any:
    """Normalise a record for supervised learning.

    Without prompt and completion, `question` and `answer` become these. The prompt of a pair may be the common prefix
    of its texts. Columns without a value are left out.

    Args:
      record: after `rename_columns`.
      kind: as in `supervised`.
    """
    if not isinstance(record, Mapping):
        return record
    columns = {name: value for name, value in record.items() if value is not None}
    if "prompt" not in columns and "question" in columns:
        columns["prompt"] = columns.pop("question")
        if kind in ("demonstrations", "ratings") and "completion" not in columns and "answer" in columns:
            columns["completion"] = columns.pop("answer")
    if isinstance(columns.get("margin"), str):  # as in CSV
        columns["margin"] = _number(columns["margin"])
    if isinstance(columns.get("label"), str):
        columns["label"] = {"true": True, "false": False}.get(columns["label"].lower(), _number(columns["label"]))
    return _with_prompt(columns) if kind in ("preferences", "triples") else columns


def _with_prompt(record: JsonObject) -> JsonObject:
    """Move the common prefix of a pair's conversations into its prompt."""
    chosen, rejected = (record.get(name) for name in ("chosen", "rejected"))
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        if "prompt" in record or not (isinstance(chosen, str) and isinstance(rejected, str)):
            return record
        raise DataError(
            f"there is no field 'prompt', and 'chosen' is not a list of messages; the fields are {sorted(record)}"
        )
    if "prompt" in record and len(chosen) == len(rejected) == 1:
        return record
    common = _common(chosen, rejected)
    if isinstance(record.get("prompt"), list) and common[: len(record["prompt"])] != record["prompt"]:
        raise DataError("'chosen' and 'rejected' have several messages, but do not begin with those of 'prompt'")
    if not common:
        raise DataError("there is no field 'prompt', and 'chosen' and 'rejected' have no common first message")
    if {len(chosen), len(rejected)} != {len(common) + 1}:
        raise DataError("'chosen' and 'rejected' must differ only in their last message")
    return record | {"prompt": common, "chosen": chosen[-1:], "rejected": rejected[-1:]}


def _common(first: Sequence[object], second: Sequence[object]) -> list[object]:
    """Common prefix of two lists of messages; of equal ones, all but the last message."""
    pairs = enumerate(zip(first, second, strict=False))
    return list(first[: next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)) - (first == second))])


def _column(record: Mapping[str, object], name: str, column: str) -> object:
    value: object = record
    for part in [column] if column in record else column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise DataError(
                f"there is no field {column!r}, which --fields={name}:{column} names; the fields are {sorted(record)}"
            )
        value = value[part]
    return value


def _number(text: str) -> object:
    try:
        return float(text) if text else None
    except ValueError:
        return text


def check_steps(steps: object, labels: object) -> None:
    """Raise DataError where steps of a solution and their labels are no lists of one length."""
    if not (isinstance(steps, Sequence) and not isinstance(steps, str) and steps) or not all(
        isinstance(step, str) for step in steps
    ):
        raise DataError("'completions' must be a list of texts, the steps of a solution")
    if not isinstance(labels, Sequence) or len(labels) != len(steps) or not all(map(is_label, labels)):
        raise DataError(f"'labels' must be a list of true or false, one for each of the {len(steps)} completions")


def is_label(value: object) -> bool:
    """True of true, false and numbers from 0 to 1."""
    return isinstance(value, (bool, int, float)) and 0 <= value <= 1
