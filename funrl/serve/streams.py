"""Text of tokens that arrive a few at a time."""

from __future__ import annotations

from collections.abc import Sequence

from funrl.environments.forms.response_templates import OPEN
from funrl.serve.session import DecodeIds

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what tokenizers show of a character whose bytes have not all arrived


class TextStream:
    """The text of one reply, as much of it as cannot change any more.

    Attributes:
      text: given out so far.
    """

    def __init__(self, decode: DecodeIds, before: Sequence[int], hidden: Sequence[str], *, calls: bool):
        """Make it.

        Args:
          decode: token ids -> text.
          before: the last tokens of the prompt, which some tokenizers need for a text's first space.
          hidden: stop texts; no part of them is sent.
          calls: hold back what may be a call of a function.
        """
        self.text = ""
        self._decode = decode
        self._ids = list(before[-1:])
        self._begin = 0
        self._end = len(self._ids)
        self._whole = ""
        self._hidden = [*hidden, *([OPEN] if calls else [])]
        self._calls = calls

    def feed(self, tokens: Sequence[int]) -> str:
        """Take further tokens, and give out what they add."""
        self._ids += tokens
        known = self._decode(self._ids[self._begin : self._end])
        text = self._decode(self._ids[self._begin :])
        if len(text) > len(known) and not text.endswith(_UNFINISHED):
            self._whole += text[len(known) :]
            self._begin = self._end
            self._end = len(self._ids)
        return self._give(self._safe())

    def finish(self, content: str) -> str:
        """The rest of a reply's content, once it is known."""
        rest = content[len(self.text) :] if content.startswith(self.text) else ""
        self.text += rest
        return rest

    def _give(self, upto: int) -> str:
        new = self._whole[len(self.text) : upto]
        self.text += new
        return new

    def _safe(self) -> int:
        """Characters that are content whatever follows."""
        text = self._whole
        safe = len(text)
        for hidden in self._hidden:
            place = text.find(hidden)
            if place >= 0:
                safe = min(safe, place)
            tails = range(min(len(hidden) - 1, len(text)), 0, -1)
            safe = min(safe, next((len(text) - n for n in tails if text.endswith(hidden[:n])), safe))
        if self._calls:  # a content with calls has no white space around it
            safe = len(text[:safe].rstrip())
            if not text[:safe].strip():
                return 0
        return max(safe, len(self.text))
