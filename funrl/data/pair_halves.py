"""Pairs of texts as texts with labels, two of each pair: what KTO learns from where data have pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np

from funrl.data.columns import Fields, renamed, text_columns
from funrl.data.json_lines import JsonLines
from funrl.data.records import Records

SIDES = ("chosen", "rejected")


def is_pair(record: Any) -> bool:
    """True of a record, after `renamed`, with a chosen and a rejected text and no completion of its own."""
    return isinstance(record, Mapping) and set(SIDES) <= set(record) and "completion" not in record


def half_of(record: Mapping[str, Any], rejected: bool) -> dict[str, Any]:
    """One text of a pair with its label.

    Args:
      record: after `renamed`.

    Raises:
      DataError: it has no prompt, and its conversations none in common.

    >>> half_of({"prompt": "a", "chosen": "b", "rejected": "c"}, rejected=True)
    {'prompt': 'a', 'completion': 'c', 'label': False}
    """
    found = text_columns(record, "preferences")
    rest = {name: value for name, value in found.items() if name not in (*SIDES, "margin")}
    return rest | {"completion": found[SIDES[rejected]], "label": not rejected}


def halves_of(record: Any) -> list[Any]:
    """Both texts of a pair, after `renamed`; another record as it is."""
    return [half_of(record, rejected) for rejected in (False, True)] if is_pair(record) else [record]


class PairHalves(Sequence[Any]):
    """The records of a file of pairs, each as two. Slices and arrays of places give views.

    Attributes:
      records: the pairs.
      fields: names of fields -> columns, as in `renamed`.
      places: [texts] twice the place of a text's pair, and one more where it is the rejected one.
    """

    def __init__(self, records: JsonLines | Records, fields: Fields, places: np.ndarray | None = None):
        self.records, self.fields = records, fields
        self.places = np.arange(2 * len(records)) if places is None else places

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice | np.ndarray) -> PairHalves: ...
    def __getitem__(self, index: int | slice | np.ndarray) -> Any:
        """Raises: DataError, the file has been changed since it was opened."""
        if isinstance(index, (slice, np.ndarray)):
            return PairHalves(self.records, self.fields, self.places[index])
        pair, rejected = divmod(int(self.places[index]), 2)
        return half_of(renamed(self.records[pair], self.fields), bool(rejected))

    @property
    def nbytes(self) -> np.ndarray:
        """[texts] bytes of each pair's text, at least."""
        return self.records.nbytes[self.places // 2]

    def where(self, index: int) -> str:
        """The file and the line of a text's pair."""
        return self.records.where(int(self.places[index]) // 2)
