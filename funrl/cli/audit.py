"""The command `funrl audit`: what a log of conversations holds, and what funrl, TRL and verl would train of it.

    funrl audit traces.jsonl --model=DIR
    funrl audit calls.jsonl --model=DIR --json=audit.json --output=audit.html

Of the model its tokenizer is read, with its chat template.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from funrl.cli.line import read_words
from funrl.cli.usages import COMMANDS
from funrl.data.conversations import ChatTemplate, Text
from funrl.data.records import source_problem
from funrl.data.tokenizer import load_tokenizer
from funrl.environments.row_paths import paths_of
from funrl.serve.log_audit import Audit, Trained, audit_entry
from funrl.serve.log_files import read_logs
from funrl.track.report.record_page import ShownRecord, ShownRow, text_pieces, write_records
from funrl.trainer.checkpoints.stored_models import find_stored_model
from funrl.trainer.settings.declaration import Bound, Flag, SettingsError, at_least, refusing

NEW_FILE = Bound("in a folder that exists", lambda x: Path(x).absolute().parent.is_dir())
AUDIT_FLAGS = (
    Flag("model", None, str, optional=True, text="directory or name of the model whose tokenizer and template is used"),
    Flag("chat_template", None, str, optional=True, text="file of another chat template"),
    Flag("count", 3, int, optional=False, text="entries to print and show, the first ones", bounds=(at_least(0),)),
    Flag("json", None, str, optional=True, text="file to write, with all numbers", bounds=(NEW_FILE,)),
    Flag("output", None, str, optional=True, text="page to write, such as audit.html", bounds=(NEW_FILE,)),
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
    template = ChatTemplate(load_tokenizer(find_stored_model(given["model"]).directory))
    if given["chat_template"] is not None:
        with refusing(f"--chat_template={given['chat_template']}: ", OSError):
            template.tokenizer.chat_template = Path(given["chat_template"]).read_text()
    audits: list[Audit] = []
    records: list[ShownRecord] = []
    for entry in read_logs(file, template):
        audit = audit_entry(entry, template)
        if len(audits) < given["count"]:
            print("\n".join([*audit_lines(audit), ""]))
            records.append(_shown(audit, template))
        audits.append(audit.without_tokens())
    if not audits:
        raise SettingsError(f"{file}: it has no entries with tokens")
    totals = total_lines(audits)
    print("\n".join(totals))
    if given["json"] is not None:
        Path(given["json"]).write_text(json.dumps([audit.as_json() for audit in audits], indent=1) + "\n")
        print(f"numbers in {given['json']}")
    if given["output"] is not None:
        write_records([ShownRecord("All entries", "", [], totals), *records], f"funrl audit {file}", given["output"])
        print(f"open {given['output']}")
    return 0


def audit_lines(audit: Audit) -> list[str]:
    """An audit in words."""
    entry = audit.entry
    ids = "token ids of the file" if entry.logged else "no token ids in the file: its words are tokenized"
    lines = [f"{entry.source}: {entry.form}, paths {audit.paths}, tokens {audit.tokens} ({ids})"]
    lines.append(f"  {_sampled_text(audit.sampled)}; template {audit.template}; given {audit.given}")
    return [*lines, *(f"  {text}" for text in (*entry.remarks, *audit.rewrites)), *_trained_lines(audit.trained)]


def total_lines(audits: Sequence[Audit]) -> list[str]:
    """Totals over audits in words."""
    sampled = sum((Counter(audit.sampled) for audit in audits), Counter[str]())
    rewrites = sum(len(audit.rewrites) for audit in audits)
    trained = {}
    for name in audits[0].trained:
        numbers = zip(*(audit.trained[name][:-1] for audit in audits), strict=True)
        refused = sum(bool(audit.trained[name].refused) for audit in audits)
        trained[name] = Trained(*map(sum, numbers), refused=f"something of {refused} entries" if refused else "")
    head = f"entries {len(audits)}: {_sampled_text(sampled)}; rewritten histories {rewrites}"
    return [head, *_trained_lines(trained)]


def _sampled_text(sampled: Mapping[str, int]) -> str:
    weights = ", ".join(f"{count:,} by {name}" for name, count in sampled.items())
    return f"sampled {sum(sampled.values()):,} ({weights})"


def _trained_lines(trained: Mapping[str, Trained]) -> list[str]:
    """A line for each library."""
    return [
        f"  {name:<6}rows {x.rows}, tokens {x.tokens}, trained {x.trained}: {x.as_sampled} as sampled, {x.again} again,"
        f" {x.other} others; sampled tokens that are not trained as sampled: {x.lost}"
        + (f"; refuses: {x.refused}" if x.refused else "")
        for name, x in trained.items()
    ]


def _shown(audit: Audit, template: ChatTemplate) -> ShownRecord:
    """The paths of an entry for the page, with the tokens that were sampled."""
    head, *rest = audit_lines(audit)
    rows = []
    for number, path in enumerate(paths_of(audit.entry.episode), 1):
        sampled = [node.sampled for node in path.nodes for _ in node.tokens]
        text = Text([token for node in path.nodes for token in node.tokens], sampled)
        rows.append(ShownRow(f"path {number}", text_pieces(text, template.tokenizer)))
    return ShownRecord(audit.entry.source, head.partition(": ")[2], rows, [text.strip() for text in rest])
