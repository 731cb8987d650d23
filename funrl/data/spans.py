"""Spans of two tokenizations of one text: between places where both have written the same."""

from __future__ import annotations

import functools
import itertools
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple


class SpanEnd(NamedTuple):
    """The last token of a span in two tokenizations, by its index in each."""

    own: int
    other: int


def span_ends(own: Sequence[str], other: Sequence[str]) -> list[SpanEnd]:
    """The ends of the shortest spans that have the same text in both tokenizations, ascending.

    A character whose bytes are in several tokens ends with the last of them. Tokens that add no text after the last
    character are in no span. Texts that differ in Unicode's normal forms alone are the same: some tokenizers compose
    characters.

    Args:
      own, other: the text that each token adds; "" where its last character continues in the next token.

    Raises:
      ValueError: the texts differ.

    Example:
      >>> span_ends(["un", "likely", "!"], ["u", "n", "like", "ly!"])
      [SpanEnd(own=0, other=1), SpanEnd(own=2, other=3)]
    """
    own, other = compose_texts(own), compose_texts(other)
    texts = "".join(own), "".join(other)
    if texts[0] != texts[1]:
        raise ValueError(f"{texts[0]!r} reads {texts[1]!r} in the other tokens")
    ends = [_first_tokens(texts) for texts in (own, other)]
    return [SpanEnd(token, ends[1][end]) for end, token in ends[0].items() if end in ends[1]]


def compose_texts(texts: Sequence[str]) -> Sequence[str]:
    """The texts that tokens add, in Unicode's form C; "" where the next text changes the last character.

    Example:
      >>> [len(text) for text in compose_texts(["a", "e", "\u0301b"])]
      [1, 0, 2]
    """
    if unicodedata.is_normalized("NFC", "".join(texts)):
        return texts
    form = functools.partial(unicodedata.normalize, "NFC")
    result = []
    held = ""
    for place, text in enumerate(texts):
        held += text
        rest = next((x for x in texts[place + 1 :] if x), "")
        changes = rest and (unicodedata.combining(rest[0]) or form(held + rest) != form(held) + form(rest))
        result.append("" if changes or not text else form(held))
        held = held if changes else ""
    return result


def _first_tokens(texts: Sequence[str]) -> dict[int, int]:
    """Length of text after which a token ends -> that token, of those that add text."""
    lengths = itertools.accumulate(map(len, texts))
    return {length: token for token, length in enumerate(lengths) if texts[token]}
