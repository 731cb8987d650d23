"""Drafts of the next tokens, taken from the text so far: what followed when its last tokens were there before.

A draft changes no completion. Each of its tokens is sampled as it would have been, by the model and the request's own
noise, in one pass; the tokens up to the first that differs are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

SIZES = (4, 3, 2)  # tokens that must have been there before; the most are tried first
LONGEST_WAIT = 64  # tokens without a draft, after drafts that were wrong


class PromptLookup:
    """The places of a text's short sequences, and how good its drafts have been.

    Drafts are as long as the last one was right, and one token longer; after wrong ones some tokens go without.

    Attributes:
      length: tokens of the text that are known here.
    """

    def __init__(self) -> None:
        self._text: list[int] = []
        self._behind: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in SIZES)  # sequence -> the place after
        self._reach = 2
        self._wrong = 0
        self._begin = 0

    @property
    def length(self) -> int:
        return len(self._text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Learn the text's next tokens."""
        text = self._text
        for token in tokens:
            end = len(text)
            for size, behind in zip(SIZES, self._behind, strict=True):
                if end >= size:
                    behind[tuple(text[end - size : end])] = end
            text.append(token)

    def draft(self, most: int) -> list[int]:
        """The next tokens as they may be, `most` at most; none where nothing like it was there, or it would not pay.

        Where the text repeats itself the draft does too, beyond its end.
        """
        text = self._text
        most = min(most, self._reach)
        if most < 1 or len(text) < self._begin:
            return []
        for size, behind in zip(SIZES, self._behind, strict=True):
            place = behind.get(tuple(text[-size:])) if len(text) >= size else None
            if place is not None:
                period = len(text) - place
                return [text[place + i % period] for i in range(most)]
        return []

    def settle(self, drafted: int, accepted: int) -> None:
        """Take in how much of a draft was right."""
        self._reach = accepted + 1 if accepted < drafted else 2 * drafted
        self._wrong = 0 if accepted else self._wrong + 1
        self._begin = len(self._text) + (0 if accepted else min(1 << self._wrong, LONGEST_WAIT))
