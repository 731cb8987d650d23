"""Spans of two tokenizations of one text: between places where both have written the same."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class SpanEnd(NamedTuple):
    """The last token of a span in two tokenizations, by its index in each."""

    own: int
    other: int


def span_ends(own: Sequence[str], other: Sequence[str]) -> list[SpanEnd]:
    """The ends of the shortest spans that have the same text in both tokenizations, ascending.

    A character whose bytes are in several tokens ends with the last of them. Tokens that add no text after the last
    character are in no span.

    Args:
      own, other: the text that each token adds; "" where its last character continues in the next token.

    Raises:
      ValueError: the texts differ.

    Example:
      >>> span_ends(["un", "likely", "!"], ["u", "n", "like", "ly!"])
      [SpanEnd(own=0, other=1), SpanEnd(own=2, other=3)]
    """
    texts = "".join(own), "".join(other)
    if texts[0] != texts[1]:
        raise ValueError(f"{texts[0]!r} reads {texts[1]!r} in the other tokens")
    ends = [_first_tokens(texts) for texts in (own, other)]
    return [SpanEnd(token, ends[1][end]) for end, token in ends[0].items() if end in ends[1]]


def _first_tokens(texts: Sequence[str]) -> dict[int, int]:
    """Length of text after which a token ends -> that token, of those that add text."""
    lengths = itertools.accumulate(map(len, texts))
    return {length: token for token, length in enumerate(lengths) if texts[token]}
