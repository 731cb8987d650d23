"""Check for a chat template before anything is loaded, if prompts are chats. Nothing here imports torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from funrl.data.columns import prompt_columns, rename_columns
from funrl.data.json_lines import DataError
from funrl.data.records import read_records
from funrl.trainer.settings.checks import data_files, names_of_fields
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import Settings, flag_value

TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
MAKE_CHATS = ("system_prompt", "tools", "template_arguments")  # flags


def check_chats(settings: Settings) -> None:
    """Check that the tokenizer of --model has a chat template if prompts are chats, or if flags turn them into chats.

    Looks only at directories and at the first lines of JSON-lines files; other errors come up when the files are read.

    Raises:
      SettingsError: it has none.
    """
    given = settings.models.model
    if (
        given is None
        or settings.formatting.chat_template is not None
        or settings.estimate.dry_run
        or has_chat_template(Path(given))
    ):
        return
    reason = next((f"--{name}={flag_value(settings, name)}" for name in MAKE_CHATS if flag_value(settings, name)), "")
    reason = reason or next((where for name in ("prompts", "data") for where in _first_chats(settings, name)), "")
    if reason:
        raise SettingsError(
            f"--model={given}: its tokenizer has no chat template, and prompts are chat messages ({reason}); give "
            "--chat_template=FILE.jinja, or prompts as text"
        )


def has_chat_template(folder: Path) -> bool:
    """False if the tokenizer of a directory has no chat template; True also if that is unknown."""
    if any((folder / name).exists() for name in TEMPLATE_FILES) or not (folder / TOKENIZER_CONFIG).is_file():
        return True
    try:
        config = json.loads((folder / TOKENIZER_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return not isinstance(config, dict) or config.get("chat_template") is not None


def _first_chats(settings: Settings, flag: str) -> list[str]:
    """Files whose first lines have chat messages, with those lines."""
    chats = []
    for path, _ in data_files(settings, flag):
        if path.endswith(".jsonl") and Path(path).is_file():
            try:
                where, record = next(iter(read_records(path)))
                record = prompt_columns(rename_columns(record, names_of_fields(settings)))
            except (DataError, StopIteration, TypeError, ValueError):
                continue  # reported when the whole file is read
            chats += [where] * _is_chat(record)
    return chats


def _is_chat(record: dict[str, Any]) -> bool:
    return any(isinstance(record.get(name), list) and record[name] for name in ("prompt", "messages"))
