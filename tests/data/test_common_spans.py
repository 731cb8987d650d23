"""Spans of two tokenizations, beside a search over all cuts of their bytes."""

import itertools
import random

import pytest

from funrl.data.spans import SpanEnd, span_ends


def cut(text, draw):
    """A text in random pieces."""
    edges = [0, *sorted(draw.sample(range(1, len(text)), draw.randrange(len(text)))), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def test_spans_end_where_the_bytes_of_both_do():
    draw = random.Random(3)
    for _ in range(200):
        text = "".join(draw.choice("ab \u00e9\u4e2d\U0001f600") for _ in range(draw.randrange(2, 14)))
        own, other = (cut(text, draw) for _ in range(2))
        expected = [
            SpanEnd(i, j)
            for i in range(len(own))
            for j in range(len(other))
            if "".join(own[: i + 1]).encode() == "".join(other[: j + 1]).encode()
        ]
        assert span_ends(own, other) == expected
        assert expected[-1] == (len(own) - 1, len(other) - 1)


def test_a_character_of_several_tokens_ends_with_the_last():
    assert span_ends(["a", "", "\u00e9", "b"], ["a\u00e9", "b"]) == [SpanEnd(2, 0), SpanEnd(3, 1)]
    assert span_ends(["a", "", ""], ["a"]) == [SpanEnd(0, 0)]
    assert span_ends([], []) == []


def test_forms_of_unicode_are_the_same_text():
    """Composed, taken apart, and with accents in another order; a token that ends inside of a character is no end."""
    apart, together = ["a", "e", "\u0301", "b"], ["a\u00e9", "b"]
    assert span_ends(apart, together) == [SpanEnd(2, 0), SpanEnd(3, 1)]
    assert span_ends(together, apart) == [SpanEnd(0, 2), SpanEnd(1, 3)]
    assert span_ends(["q", "\u0307", "", "\u0323"], ["q\u0323\u0307"]) == [SpanEnd(3, 0)]
    assert span_ends(["\u1100", "\u1161", "x"], ["\uac00", "x"]) == [SpanEnd(1, 0), SpanEnd(2, 1)]


def test_texts_that_differ_are_an_error():
    with pytest.raises(ValueError, match="'Ab' reads 'ab' in the other tokens"):
        span_ends(["Ab"], ["a", "b"])
