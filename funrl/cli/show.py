"""The command `funrl show`: records as they are trained, in the terminal and as a page.

    funrl show sft --data=FILE --model=DIR
    funrl show grpo --prompts=FILE --model=DIR --record=7 --tokens
    funrl show FILE --model=DIR --output=page.html

The flags are those of the run. Of the model its tokenizer and config.json are read; nothing is trained or started.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from funrl.cli.command import read_command, with_models
from funrl.cli.doctor import experiment_of
from funrl.cli.line import program_words
from funrl.cli.usages import COMMANDS
from funrl.data.columns import parse_fields, rename_columns
from funrl.data.records import read_records, source_problem
from funrl.flags import parser as flags
from funrl.trainer.settings.declaration import Bound, Flag, SettingsError, at_least
from funrl.trainer.settings.settings import settings_flags

if TYPE_CHECKING:  # torch is imported after the checks of a command line that do not need it
    from rich.text import Text

    from funrl.track.report.record_page import ShownRecord, TextPiece

LINE_NUMBERS = Bound("numbers of lines or rows, such as 3,17", lambda x: bool(re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", x)))
SHOW_FLAGS = (
    Flag("record", None, str, optional=True, text="lines or rows of each file", bounds=(LINE_NUMBERS,)),
    Flag("count", 3, int, optional=False, text="number of records, the first of each file", bounds=(at_least(1),)),
    Flag("tokens", False, bool, optional=False, text="show the id of each token"),
    Flag("output", None, str, optional=True, text="page to write, such as page.html"),
)
# The recipe for a file that is given alone: the first whose columns it has.
RECIPE_COLUMNS = {
    "tpo": ("chosen", "rejected", "reference"),
    "dpo": ("chosen", "rejected"),
    "process_reward_model": ("completions", "labels"),
    "kto": ("completion", "label"),
}
DEMONSTRATED = ("messages", "completion", "text")  # columns of records for sft; others are prompts, for grpo
LEGEND = "[green]trained[/] [black on green]trained special token[/] [dim]context[/] [cyan]special token[/]"
PLAIN_LEGEND = "{+trained+}; the rest is context"
BREAK = "\u21b5"  # a line break
BLANK = "\u00b7"  # a blank at the border of a piece or line
BLANKS = re.compile(r"\A +| +(?=\n)| +\Z")
STYLES = {(False, False): "dim", (False, True): "cyan", (True, False): "green", (True, True): "black on green"}


def show_command(argv: Sequence[str]) -> int:
    """Print records, and write the page of --output; return 0.

    Args:
      argv: "show", then a recipe with the flags of its run, or a file with some of them, and `SHOW_FLAGS` flags.

    Raises:
      ValueError: the first flag or record that cannot be used.
    """
    flags.refuse_repeated(argv)
    line = flags.read(SHOW_FLAGS, argv)
    words = run_words(line.unknown)
    numbers = line_numbers(line.values["record"])
    program = f"funrl {words[0]}"
    command = with_models(read_command(experiment_of(words[0]), [program, *words[1:]], writes=False, rewarded=False))
    from rich.console import Console

    from funrl.track.report.record_page import write_records
    from funrl.track.report.shown_records import shown_records

    shown = shown_records(command.settings, command.compose(), command.kind, numbers, count=line.values["count"])
    console = Console(highlight=False, soft_wrap=True)
    plain = console.color_system is None or console.no_color
    console.print(f"funrl {' '.join(words)}\n{PLAIN_LEGEND if plain else LEGEND}", markup=not plain)
    records = []
    for record in shown:
        records.append(record)
        console.print(styled_record(record, plain, line.values["tokens"]), end="")
    if line.values["output"] is not None:
        write_records(records, f"funrl {' '.join(words)}", line.values["output"])
        print(f"open {line.values['output']}")
    return 0


def run_words(words: Sequence[str]) -> list[str]:
    """The command line of a run: with a file instead of a recipe, that of the recipe that takes its columns.

    Raises:
      SettingsError, DataError: there is no such recipe or file, or it has no record.
    """
    name, *rest = program_words(words, COMMANDS["show"].usage)
    try:
        experiment_of(name)
    except SettingsError:
        if problem := source_problem(name):
            hint = "funrl --help lists the recipes"
            raise SettingsError(f"{name!r} is not a recipe, and no file of records: {problem}; {hint}") from None
    else:
        return [name, *rest]
    fields = parse_fields(flags.read([settings_flags()["fields"]], ["", *rest]).values["fields"])
    _, record = next(read_records(name), ("", None))
    if not isinstance(record, Mapping):
        raise SettingsError(f"{name}: there is no record with columns at its begin")
    columns = set(rename_columns(record, fields))
    fitting = (recipe for recipe, needed in RECIPE_COLUMNS.items() if columns >= set(needed))
    recipe = next(fitting, "grpo" if columns.isdisjoint(DEMONSTRATED) else "sft")
    return [recipe, f"--{'prompts' if recipe == 'grpo' else 'data'}={name}", *rest]


def line_numbers(text: str | None) -> list[int]:
    """The numbers in "3,17"; none for None."""
    return sorted({int(number) for number in (text or "").split(",") if number})


def styled_record(record: ShownRecord, plain: bool, ids: bool) -> Text:
    """A record for a terminal.

    Args:
      plain: whether the terminal has no colours, so that brackets mark what is trained.
      ids: whether to show the id of each token.
    """
    from rich.text import Text

    from funrl.track.report.record_page import joined_pieces
    from funrl.track.report.rendering import written_out

    lines = [f"  {written_out(remark)}\n" for remark in record.remarks]
    text = Text.assemble("\n", (written_out(record.source), "bold"), f"  {record.size}\n", *lines)
    for row in record.rows:
        text.append(f"--- {row.title}\n" if row.title else "---\n", "bold")
        pieces = row.pieces if ids else joined_pieces(row.pieces)
        for trained, group in itertools.groupby(pieces, lambda piece: piece.trained):
            similar = list(group)
            text.append("{+" if plain and trained else "")
            for piece in similar:
                _append(text, piece, ids, closing="+}" if plain and trained and piece is similar[-1] else "")
        text.append("" if text.plain.endswith("\n") else "\n")
    for name, value in record.fields.items():
        text.append(f"field {written_out(name)}: {written_out(value)}\n")
    return text


def _append(text: Text, piece: TextPiece, ids: bool, closing: str) -> None:
    """Append a piece with line breaks and blanks at borders made visible, its note, its ids, and a closing bracket."""
    from funrl.track.report.rendering import written_out

    shown = BLANKS.sub(lambda blanks: BLANK * len(blanks[0]), written_out(piece.text)).replace("\n", f"{BREAK}\n")
    text.append(shown.removesuffix("\n"), STYLES[piece.trained, piece.special])
    notes = [f"({piece.note})"] * bool(piece.note) + [" ".join(map(str, piece.ids))] * ids
    text.append("".join(f" {note} " for note in notes), "yellow")
    text.append(closing + "\n" * shown.endswith("\n"))
