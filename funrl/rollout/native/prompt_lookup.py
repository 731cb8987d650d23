"""Drafts of the next tokens, copied from what followed an earlier occurrence of the text's last tokens.

A draft changes no completion. All its tokens are verified in one pass: each position is sampled from the model with the
request's own noise, and the samples up to the first that differs from the draft are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

SIZES = (4, 3, 2)  # tokens that must recur; the longest is tried first
LONGEST_WAIT = 64  # bound on the tokens without a draft after wrong drafts


class PromptLookup:
    """Index of a text's n-grams, and how good its drafts have been.

    A draft is one token longer than the accepted part of the last one. After wrong drafts, some tokens have none.

    Attributes:
      length: tokens of the text that are indexed.
    """

    def __init__(self) -> None:
        self._text: list[int] = []
        self._followers: tuple[dict[tuple[int, ...], int], ...] = tuple(
            {} for _ in SIZES
        )  # n-gram -> position after it
        self._reach = 2
        self._wrong = 0
        self._begin = 0

    @property
    def length(self) -> int:
        return len(self._text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Index the text's next tokens."""
        text = self._text
        for token in tokens:
            end = len(text)
            for size, followers in zip(SIZES, self._followers, strict=True):
                if end >= size:
                    followers[tuple(text[end - size : end])] = end
            text.append(token)

    def draft(self, most: int) -> list[int]:
        """Draft at most `most` next tokens; [] if the last tokens did not occur before, or a draft would not pay.

        If the occurrence is so recent that the text ends within the draft, the draft repeats itself.
        """
        text = self._text
        most = min(most, self._reach)
        if most < 1 or len(text) < self._begin:
            return []
        for size, followers in zip(SIZES, self._followers, strict=True):
            place = followers.get(tuple(text[-size:])) if len(text) >= size else None
            if place is not None:
                period = len(text) - place
                return [text[place + i % period] for i in range(most)]
        return []

    def settle(self, drafted: int, accepted: int) -> None:
        """Adapt the length of drafts to how much of the last one was accepted."""
        self._reach = accepted + 1 if accepted < drafted else 2 * drafted
        self._wrong = 0 if accepted else self._wrong + 1
        self._begin = len(self._text) + (0 if accepted else min(1 << self._wrong, LONGEST_WAIT))
