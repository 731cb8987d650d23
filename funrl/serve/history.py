"""Histories that clients send: digests by which they are found again, and a bound on their texts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from funrl.environments.forms.response_templates import END_THINK
from funrl.rollout.episodes import Message
from funrl.rollout.policy import LimitReached
from funrl.serve.asks import Ask

ESCAPE = 6  # bytes of JSON for a byte of text, as in "\\u0061"
MANY = 16  # bytes a token, more than any text has
PART_CHARACTERS = 1 << 16  # characters that are tokenised together to count them
BESIDE_TEXT = 1 << 20  # bytes of a body that are no text of the prompt


def request_digest(path: str, body: bytes) -> bytes:
    """Digest by which a request is found that a client library sends once more."""
    digest = hashlib.blake2b(path.encode() + b"\n", digest_size=16)
    digest.update(body)
    return digest.digest()


class History:
    """Digests of the begins of a request's history, which texts around replies and ids of calls do not change."""

    def __init__(self, ask: Ask):
        self.ask = ask
        self._digest = hashlib.blake2b(digest_size=16)

    def read(self) -> list[bytes]:
        """The digest after each message."""
        self._digest = hashlib.blake2b(json.dumps(self.ask.tools, sort_keys=True).encode(), digest_size=16)
        return [_add(self._digest, message) for message in self.ask.messages]

    def after(self, reply: Message) -> bytes:
        """The digest after a reply to what was read."""
        return _add(self._digest.copy(), reply)


def _add(digest: Any, message: Message) -> bytes:
    """Add a message to a digest; returns its value."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    facts = [message.get("role"), str(message.get("content") or "").strip()]
    facts += [[call["name"], call["arguments"]] for call in calls]
    digest.update(json.dumps(facts, sort_keys=True).encode() + b"\n")
    return digest.digest()


def rendered_texts(ask: Ask) -> list[str]:
    """The texts that a template renders of a request: without thoughts of earlier turns, which templates leave out."""
    texts = [ask.text, json.dumps(ask.tools)] if ask.tools else [ask.text]
    for message in ask.messages:
        content = message.get("content") or ""
        parts = [content] if isinstance(content, str) else [str(part.get("text") or "") for part in content]
        thinks = message.get("role") == "assistant"
        texts += [part.rpartition(END_THINK)[2] if thinks else part for part in parts]
    return texts


class PromptBound(NamedTuple):
    """Bound on a prompt, by which one that cannot fit is refused before it is read, or tokenised.

    Attributes:
      length: tokens that prompt and reply may have; 0: no limit.
      longest: bytes of the longest token; 0: unknown.
      sees: whether prompts may have pictures.
    """

    length: int
    longest: int
    sees: bool

    def check_body(self, size: int) -> None:
        """Raise LimitReached where a body has more bytes than JSON can need for the text of a prompt."""
        most = ESCAPE * self.length * self.longest + BESIDE_TEXT
        if self.length and self.longest and not self.sees and size > most:
            raise self._beyond(f"the body has {size} bytes")

    def check(self, ask: Ask, encode: Callable[[str], list[int]]) -> None:
        """Raise LimitReached where the texts of a request cannot fit: by their bytes, or by the tokens of their parts.

        Parts are tokenised until they have too many tokens, where a text could fit by its bytes only just.

        Args:
          encode: text -> token ids.
        """
        self.check_tokens(len(ask.tokens))
        if not self.length or ask.size <= self.length * min(MANY, self.longest or MANY):
            return
        texts = rendered_texts(ask)
        size = sum(len(x) if x.isascii() else len(x.encode("utf-8", "surrogatepass")) for x in texts)
        if self.longest and size > self.length * self.longest:
            raise self._beyond(f"the texts have {size} bytes")
        if size <= MANY * self.length:
            return
        count = 0
        for text in texts:
            for begin in range(0, len(text), PART_CHARACTERS):
                count += len(encode(text[begin : begin + PART_CHARACTERS]))
                if count > 2 * self.length:  # where a text is cut it may have a token more
                    raise self._beyond(f"the texts have more than {count} tokens")

    def check_tokens(self, count: int) -> None:
        """Raise LimitReached where a prompt leaves no room for a reply."""
        if 0 < self.length <= count:
            raise self._beyond(f"the prompt has {count} tokens")

    def _beyond(self, what: str) -> LimitReached:
        return LimitReached("tokens", f"{what}: too many for the limit of {self.length} tokens of prompt and reply")
