"""Pairs of texts as single labelled texts, two per pair, for KTO on paired data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from funrl.data.columns import Fields, rename_columns, text_columns
from funrl.data.records import Records

SIDES = ("chosen", "rejected")


def is_pair(record: object) -> bool:
    """True for a record, after `rename_columns`, with a chosen and a rejected text and no completion."""
    return isinstance(record, Mapping) and set(SIDES) <= set(record) and "completion" not in record


def half_of(record: Mapping[str, object], rejected: bool) -> dict[str, Any]:
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

    def read(self, place: int) -> dict[str, Any]:
        """Read a text with its label."""
        return half_of(rename_columns(self.pairs[place // 2], self.fields), bool(place % 2))

    def where(self, place: int) -> str:
        """The file and the line of a text's pair."""
        return self.pairs.where(place // 2)

    def sizes(self) -> np.ndarray:
        """[texts] bytes of each pair's text."""
        return np.repeat(self.pairs.sizes(), 2)
