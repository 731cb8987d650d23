"""Records as they are trained: their tokens as pieces of text, and a page of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from funrl.data.conversations import Text
from funrl.data.tokenizer import markers_of
from funrl.track.records.run_directory import write_text
from funrl.track.report.rendering import render_page
from funrl.track.report.run_files import ReportError
from funrl.trainer.sources.own_texts import UNFINISHED, text_after

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST_CHARACTER = 8  # tokens


class TextPiece(NamedTuple):
    """Text of a token, or of several equal ones.

    Attributes:
      text: as the tokenizer decodes it behind the token before.
      ids: of the tokens.
      trained: whether they are trained.
      special: whether it is a special token, or a mark of the chat template that is one token.
      note: on them, such as the label of a step.
    """

    text: str
    ids: tuple[int, ...]
    trained: bool
    special: bool
    note: str = ""


class ShownRow(NamedTuple):
    """A sequence of tokens with a title, "" if it is the only one."""

    title: str
    pieces: Sequence[TextPiece]


class ShownRecord(NamedTuple):
    """A record.

    Attributes:
      source: its file, and line or row.
      size: numbers of its rows and tokens, in words.
      rows: of tokens.
      remarks: differences between the record and the tokens.
      fields: that rewards get, by name, as texts.
    """

    source: str
    size: str
    rows: Sequence[ShownRow]
    remarks: Sequence[str]
    fields: Mapping[str, str] = {}


def text_pieces(text: Text, tokenizer: PreTrainedTokenizerBase, notes: Iterable[str] = ()) -> list[TextPiece]:
    """One piece for each token, or for several that make one character.

    Args:
      notes: one for each trained token.
    """
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)  # noqa: E731
    markers = markers_of(tokenizer)
    remaining = iter(notes)
    pieces = []
    begin = 0
    while begin < len(text.tokens):
        end = begin + 1
        while True:
            ids = text.tokens[begin:end]
            before = text.tokens[begin - 1 : begin]
            decoded = text_after(decode(before), before[0], ids, decode) if before else decode(ids)
            similar = end < len(text.tokens) and text.trained[end] == text.trained[begin]
            if not (decoded.endswith(UNFINISHED) and similar and len(ids) < LONGEST_CHARACTER):
                break
            end += 1
        word = tokenizer.convert_ids_to_tokens(ids[0])
        special = len(ids) == 1 and len(word) > 1 and bool(markers.fullmatch(word))
        note = next(remaining, "") if text.trained[begin] else ""
        pieces.append(TextPiece(word if special else decoded, tuple(ids), text.trained[begin], special, note))
        begin = end
    return pieces


def joined_pieces(pieces: Sequence[TextPiece]) -> list[TextPiece]:
    """Pieces with neighbours joined that look the same; a special token that is repeated is counted."""
    joined = []
    numbered = enumerate(pieces)
    for _, group in itertools.groupby(numbered, lambda pair: _look(*pair)):
        similar = [piece for _, piece in group]
        first = similar[0]
        text = first.text if first.special else "".join(piece.text for piece in similar)
        note = f"{len(similar)} times" if first.special and len(similar) > 1 else first.note
        ids = tuple(token for piece in similar for token in piece.ids)
        joined.append(first._replace(text=text, ids=ids, note=note))
    return joined


def write_records(records: Sequence[ShownRecord], title: str, to: str | Path) -> None:
    """Write a page of records, which stands alone. Raises: ReportError, it cannot be written."""
    try:
        Path(to).absolute().parent.mkdir(parents=True, exist_ok=True)
        write_text(Path(to).absolute(), render_page("records.html.j2", title=title, records=records))
    except OSError as error:
        raise ReportError(f"{to}: cannot be written: {error.strerror}") from None


def _look(number: int, piece: TextPiece) -> tuple[object, ...]:
    return piece.trained, piece.special, piece.ids if piece.special else (), number if piece.note else -1
