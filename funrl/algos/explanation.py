"""Explanation of an algorithm: its composition, the fields that it reads, and the docstring of each of its pieces.

    print(explain_algorithm(grpo(kl_coef=0.1)))

Formulas and papers are those of the docstrings, so a user's own piece is explained like the project's.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from funrl.algos.composition import chain_links, composition_text, is_piece, piece_call
from funrl.algos.core import Algorithm
from funrl.algos.reading import reads

ADDRESS = re.compile(r"https?://[^\s,;)]+[^\s,;).]")
# The line of a docstring at which its description ends.
SECTION = re.compile(
    r"^(Args|Needs|Uses|Makes|Adds|Returns|Raises|Metrics?|References?|Warning|Example)\b.*[:\[]", re.M
)


class PieceNote(NamedTuple):
    """Name, description and references of a piece."""

    name: str
    description: str
    references: tuple[str, ...]


class Explanation(NamedTuple):
    """An algorithm, explained; its text is `str(explanation)`.

    Attributes:
      composition: the chain and the losses, as the calls that made them.
      required, optional: fields of the batch that it reads.
      pieces: notes on all pieces, each once.
    """

    composition: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    pieces: tuple[PieceNote, ...]

    def __str__(self) -> str:
        lines = [self.composition, f"reads: {', '.join(self.required) or 'nothing'}"]
        if self.optional:
            lines.append(f"reads where there is one: {', '.join(self.optional)}")
        for note in self.pieces:
            text = "\n".join([note.description, *note.references])
            lines += [f"{note.name}:", textwrap.indent(text, "  ")]
        return "\n".join(lines)


def explain_algorithm(algorithm: Algorithm) -> Explanation:
    """Explain an algorithm.

    Raises:
      PieceError: one of its pieces cannot be run.
    """
    chain = () if algorithm.advantage is None else tuple(chain_links(algorithm.advantage))
    parts = [*chain, *algorithm.losses.values(), *([] if algorithm.filter is None else [algorithm.filter])]
    notes = {note.name: note for part in parts for note in _notes(part)}
    fields = reads(algorithm)
    return Explanation(
        composition=composition_text(algorithm),
        required=tuple(sorted(fields.required)),
        optional=tuple(sorted(fields.optional - fields.required)),
        pieces=tuple(notes.values()),
    )


def _notes(piece: Any) -> Iterator[PieceNote]:
    """Yield notes on a piece and on its inner pieces."""
    call = piece_call(piece)
    if not call.joins and not call.name.startswith("_"):
        text = (inspect.getdoc(call.made_by) or "") if call.made_by is not None else ""
        description = SECTION.split(text, maxsplit=1)[0].strip() or "It has no docstring."
        papers = re.search(r"\bReferences?: (.*?)(?=\n\n|\n\S|\Z)", text, re.DOTALL)
        references = dict.fromkeys(ADDRESS.findall(papers[1] if papers else ""))
        yield PieceNote(call.name, description, tuple(references))
    for value in call.arguments.values():
        for inner in value if isinstance(value, tuple) and not is_piece(value) else (value,):
            if is_piece(inner) and getattr(inner, "__module__", "").split(".")[0] != "torch":
                yield from _notes(inner)
