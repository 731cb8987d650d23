"""The command `funrl audit`: what a log of conversations holds, and what funrl, TRL and verl would train of it.

    funrl audit traces.jsonl --model=DIR
    funrl audit calls.jsonl --model=DIR --json=audit.json --output=audit.html

Of the model its tokenizer is read, with its chat template.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from funrl.cli.line import read_words
from funrl.cli.usages import COMMANDS
from funrl.data.records import source_problem
from funrl.trainer.settings.declaration import Flag, SettingsError, at_least

AUDIT_FLAGS = (
    Flag("model", None, str, optional=True, text="directory or name of the model whose tokenizer and template is used"),
    Flag("chat_template", None, str, optional=True, text="file of another chat template"),
    Flag("count", 3, int, optional=False, text="entries to print and show, the first ones", bounds=(at_least(0),)),
    Flag("json", None, str, optional=True, text="file to write, with the numbers of all entries"),
    Flag("output", None, str, optional=True, text="page to write, such as audit.html"),
)


def audit_command(argv: Sequence[str]) -> int:
    """Print an audit, and write the files of --json and --output; return 0.

    Args:
      argv: "audit", a file and `AUDIT_FLAGS` flags.

    Raises:
      SettingsError, DataError: a flag, the file or a record cannot be used.
    """
    (file,), line = read_words(AUDIT_FLAGS, argv, COMMANDS["audit"].usage)
    given = line.values
    if problem := source_problem(file):
        raise SettingsError(f"{file}: {problem}")
    if given["model"] is None:
        raise SettingsError("give --model, a directory or a name: its tokenizer and chat template read the log")
    for name in ("json", "output"):
        if given[name] is not None and not Path(given[name]).absolute().parent.is_dir():
            raise SettingsError(f"--{name}={given[name]}: its folder does not exist")
    from funrl.serve.log_audit import audit_entry
    from funrl.serve.log_files import read_logs

    template = _template(given["model"], given["chat_template"])
    audits: list[Any] = []
    for entry in read_logs(file, template):
        audit = audit_entry(entry, template)
        audits.append(audit if len(audits) < given["count"] else audit.without_tokens())
    if not audits:
        raise SettingsError(f"{file}: it has no entries with tokens")
    for audit in audits[: given["count"]]:
        print("\n".join([*_lines(audit), ""]))
    totals = _totals(audits)
    print("\n".join(totals))
    if given["json"] is not None:
        Path(given["json"]).write_text(json.dumps([audit.as_json() for audit in audits], indent=1) + "\n")
        print(f"numbers in {given['json']}")
    if given["output"] is not None:
        _write_page(audits[: given["count"]], template.tokenizer, f"funrl audit {file}", totals, given["output"])
        print(f"open {given['output']}")
    return 0


def _template(model: str, file: str | None) -> Any:
    """The chat template of a model. Raises: SettingsError, it cannot be read."""
    from funrl.data.conversations import ChatTemplate
    from funrl.data.tokenizer import load_tokenizer
    from funrl.trainer.checkpoints.stored_models import find_stored_model
    from funrl.trainer.settings.declaration import refusing

    tokenizer = load_tokenizer(find_stored_model(model).directory)
    if file is not None:
        with refusing(f"--chat_template={file}: ", OSError):
            tokenizer.chat_template = Path(file).read_text()
    return ChatTemplate(tokenizer)


def _lines(audit: Any) -> list[str]:
    """An audit in words."""
    entry = audit.entry
    ids = "token ids of the file" if entry.logged else "no token ids in the file: its words are tokenized"
    lines = [f"{entry.source}: {entry.form}, paths {audit.paths}, tokens {audit.tokens} ({ids})"]
    weights = ", ".join(f"{count} by {name}" for name, count in audit.sampled.items())
    lines.append(f"  sampled {sum(audit.sampled.values())} ({weights}); template {audit.template}; given {audit.given}")
    return [*lines, *(f"  {text}" for text in (*entry.remarks, *audit.rewrites)), *_trained_lines(audit.trained)]


def _trained_lines(trained: Any) -> list[str]:
    """A line for each library."""
    return [
        f"  {name:<6}rows {x.rows}, tokens {x.tokens}, trained {x.trained}: {x.as_sampled} as sampled, {x.again} again, "
        f"{x.other} others; sampled tokens that are not trained as sampled: {x.lost}"
        + (f"; refuses: {x.refused}" if x.refused else "")
        for name, x in trained.items()
    ]


def _totals(audits: Sequence[Any]) -> list[str]:
    """Totals over all entries, in words."""
    from funrl.serve.log_audit import Trained

    sampled: dict[str, int] = {}
    for audit in audits:
        for name, count in audit.sampled.items():
            sampled[name] = sampled.get(name, 0) + count
    shown = ", ".join(f"{count:,} by {name}" for name, count in sampled.items())
    rewrites = sum(len(audit.rewrites) for audit in audits)
    lines = [f"entries {len(audits)}: sampled {sum(sampled.values()):,} ({shown}); rewritten histories {rewrites}"]
    trained = {}
    for name in audits[0].trained:
        numbers = zip(*(audit.trained[name][:-1] for audit in audits), strict=True)
        refused = sum(bool(audit.trained[name].refused) for audit in audits)
        trained[name] = Trained(*map(sum, numbers), refused=f"something of {refused} entries" if refused else "")
    return [*lines, *_trained_lines(trained)]


def _write_page(audits: Sequence[Any], tokenizer: Any, title: str, totals: Sequence[str], to: str) -> None:
    """Write a page that shows the paths of entries, with the tokens that were sampled."""
    from funrl.data.conversations import Text
    from funrl.environments.row_paths import paths_of
    from funrl.track.report.record_page import ShownRecord, ShownRow, text_pieces, write_records

    records = [ShownRecord("All entries", "", [], totals)]
    for audit in audits:
        head, *rest = _lines(audit)
        rows = []
        for number, path in enumerate(paths_of(audit.entry.episode), 1):
            tokens = [token for node in path.nodes for token in node.tokens]
            sampled = [node.sampled for node in path.nodes for _ in node.tokens]
            rows.append(ShownRow(f"path {number}", text_pieces(Text(tokens, sampled), tokenizer)))
        records.append(ShownRecord(audit.entry.source, head.partition(": ")[2], rows, [text.strip() for text in rest]))
    write_records(records, title, to)
