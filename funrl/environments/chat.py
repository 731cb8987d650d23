"""Messages as tokens by a model's own chat template, of which only what is new is rendered.

What stands between two turns of the policy is the difference of two renderings of a synthetic conversation: with and
without the new messages behind a reply. So no token that the policy wrote is rendered, and no template needs code of
its own. `check_chat` says whether a template allows it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from funrl.data.json_lines import DataError
from funrl.data.tokenizer import TokenizerError, chat_text, encode_prompt
from funrl.environments.tool_calls import read_hermes, read_message
from funrl.rollout.episodes import Message
from funrl.rollout.policy import ReadReply, Tools

REPLY = "FUNRL-REPLY"  # content of a synthetic reply
CALL_ID = "call00000"  # of a synthetic call, in the form that Mistral's templates demand


class TemplateChat:
    """A `Chat` of a Hugging Face tokenizer and its chat template.

    Without a chat template it still reads replies, as environments that talk in token ids need it.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None):
        """Make it.

        Args:
          tokenizer: of Hugging Face.
          arguments: further arguments of the chat template, by name.
        """
        self.tokenizer = tokenizer
        self.arguments = dict(arguments or {})
        self._decode = functools.partial(tokenizer.decode, skip_special_tokens=True)

    def opening(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Tokens of a conversation, up to the begin of the policy's turn: those of `encode_prompt`.

        Raises:
          TokenizerError: there is no chat template, or it refuses the messages.
        """
        return encode_prompt(self.tokenizer, messages, tools, arguments=self.arguments)[0]

    def continuation(self, messages: Sequence[Message], tools: Tools = (), last: int | None = None) -> list[int]:
        """Tokens from the end of a reply to the begin of the policy's next turn; see `Chat`.

        Raises:
          TokenizerError: there is no chat template, or it refuses the messages.
          DataError: the template renders an earlier reply anew where messages follow it.
        """
        closing, text = self._after_reply(messages, tools)
        mark = "" if last is None else self.tokenizer.decode([last], skip_special_tokens=False)
        begin = closing.find(mark) if mark else -1
        if begin >= 0:
            text = text[begin + len(mark) :]
        else:
            mark = ""
        return self._encode(mark, text)

    def read(self, before: Sequence[int], tokens: Sequence[int], tools: Tools = ()) -> ReadReply:
        """Read a reply: by the tokenizer's own `response_template` if it has one, else calls as Hermes writes them."""
        if getattr(self.tokenizer, "response_template", None) is not None:
            return read_message(self.tokenizer, before, tokens, tools)
        text = continued_text(before, tokens, self._decode)
        return read_hermes(text) if tools else ReadReply({"role": "assistant", "content": text})

    def _after_reply(self, messages: Sequence[Message], tools: Tools) -> tuple[str, str]:
        """Texts that follow a reply: its closing, and all from there to the begin of the next turn."""
        answers = sum(message.get("role") == "tool" for message in messages)
        plain = self._rendered((), 0, tools)
        problem: Exception | None = None
        for calls in dict.fromkeys((answers, 0)):  # some templates demand calls where tools answer, others know none
            try:
                closing = self._rendered((), calls, tools)
                text = self._rendered(messages, calls, tools)
            except TokenizerError as error:
                problem = error
                continue
            if text.startswith(closing) and closing.endswith(plain):
                return plain, plain + text[len(closing) :]
            problem = DataError(
                f"the chat template does not append: a reply ends with {closing!r} at the end of a conversation, and "
                f"with {text[: len(closing)]!r} before {list(messages)!r}; give another one (--chat_template=FILE), or "
                "start a new trajectory for every turn"
            )
        assert problem is not None
        raise problem

    def _rendered(self, messages: Sequence[Message], calls: int, tools: Tools) -> str:
        """Text after a synthetic reply: of its calls and what follows, up to the begin of a turn if messages follow."""
        reply: dict[str, Any] = {"role": "assistant", "content": REPLY}
        if calls:
            call = {"type": "function", "id": CALL_ID, "function": {"name": "f", "arguments": {}}}
            reply["tool_calls"] = [call] * calls
        conversation = [{"role": "user", "content": "?"}, reply, *messages]
        if self.tokenizer.chat_template is None:
            raise TokenizerError("the tokenizer has no chat template; give --chat_template=FILE.jinja")
        try:
            text = chat_text(
                self.tokenizer, conversation, tools, arguments=self.arguments, add_generation_prompt=bool(messages)
            )
        except Exception as error:  # templates may raise anything
            raise TokenizerError(f"the chat template refuses the messages {list(messages)!r}: {error}") from error
        before, mark, after = text.partition(REPLY)
        if not mark:
            raise TokenizerError(f"the chat template leaves out a reply; it renders {before!r}")
        return after

    def _encode(self, mark: str, text: str) -> list[int]:
        """Tokens of a text as it follows a special token, since some tokenizers begin every text with a space."""
        ids = self.tokenizer.encode(mark + text, add_special_tokens=False)
        marked = self.tokenizer.encode(mark, add_special_tokens=False) if mark else []
        if ids[: len(marked)] == marked:
            return ids[len(marked) :]
        return self.tokenizer.encode(text, add_special_tokens=False)


def check_chat(chat: TemplateChat, tools: Tools = ()) -> None:
    """Raise where a chat template cannot continue a conversation: after a reply by the user, and by a tool if any.

    Raises:
      TokenizerError, DataError: as in `TemplateChat.continuation`.
    """
    chat.continuation([{"role": "user", "content": "?"}], tools)
    if tools:
        chat.continuation([{"role": "tool", "name": "f", "content": "?", "tool_call_id": CALL_ID}], tools)


def continued_text(before: Sequence[int], tokens: Sequence[int], decode: Any) -> str:
    """Text of some tokens as they continue others. Many tokenizers drop the space at the start of a text."""
    opening = decode(list(before[-1:]))
    joined = decode([*before[-1:], *tokens])
    return joined[len(opening) :] if joined.startswith(opening) else decode(list(tokens))
