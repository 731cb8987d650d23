"""Messages as tokens by a model's own chat template; only new messages are rendered.

What stands between two turns of the policy is the difference of two renderings of a synthetic conversation: with and
without the new messages behind a reply. So no token that the policy wrote is rendered, and no template needs code of
its own. `check_chat` says whether a template allows it, `template_limits` what it does not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from funrl.data.conversations import CALL_ID, REPLY, encode_prompt
from funrl.data.json_lines import DataError
from funrl.data.messages import normal_messages
from funrl.data.tokenizer import (
    THINK,
    RenderedChat,
    TokenizerError,
    chat_text,
    encode_as_text,
    encode_rendered,
    render_chat,
)
from funrl.environments.forms.drift import SAME, NodeText, drift_cause
from funrl.environments.forms.picture_parts import collapsed_tokens, expanded_tokens, without_pictures
from funrl.environments.forms.response_templates import END_THINK, REPLY_FORMS, checked_form, form_of
from funrl.environments.forms.tool_calls import read_message, read_reply
from funrl.kinds import OwnedLines
from funrl.rollout.episodes import Message, Node
from funrl.rollout.policy import ReadReply, RunEndingError, Tools

HEADER_TOKENS = 256  # before a reply, among which its parser finds how the turn was opened
TOKEN_CHARACTERS = 8  # of a token, at most, in a result that is cut
CACHED_RENDERINGS = 256  # renderings that do not depend on messages
USER: Message = {"role": "user", "content": "?"}
TOOL: Message = {"role": "tool", "name": "f", "content": "?", "tool_call_id": CALL_ID}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "description": "a number"}}, "required": ["a"]}
SOME_TOOLS = ({"type": "function", "function": {"name": "f", "description": "FUNRL-TOOL", "parameters": SCHEMA}},)
ANOTHER = "another template (--chat_template=FILE)"


class UnknownFormError(TokenizerError, RunEndingError):
    """A chat template does not show how tools are called, and no flag says it."""


class ChatOptions(NamedTuple):
    """Choices of a chat.

    Attributes:
      parser: name of the form of replies with calls, in `response_templates.REPLY_FORMS`; "": the tokenizer's own
        `response_template`, else the form that the chat template shows.
      tool_tokens: tokens of a tool's result; what is beyond is cut, and the text says so. 0: no limit.
      history: "append": what the policy wrote stays, whatever the template makes of it later. "template": where it
        means something else than what the template renders, the trajectory forks to that.
    """

    parser: str = ""
    tool_tokens: int = 4096
    history: str = "append"


class _Closing(NamedTuple):
    """End of a synthetic reply.

    Attributes:
      conversation: the question and the reply.
      ordinal: number of the mark in the text after which `text` begins; -1: it is the whole text.
      text: of the conversation, from there.
      end: what of it ends the turn; calls may be before.
    """

    conversation: Sequence[Message]
    ordinal: int
    text: str
    end: str


class TemplateChat:
    """A `Chat` of a Hugging Face tokenizer and its chat template.

    Without a chat template it still reads replies, as environments that talk in token ids need it.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None, options: ChatOptions | None = None):
        """Make it.

        Args:
          tokenizer: of Hugging Face.
          arguments: further arguments of the chat template, by name.
          options: choices; None: the defaults.

        Raises:
          TokenizerError: there is no form of that name.
        """
        self.tokenizer = tokenizer
        self.arguments = dict(arguments or {})
        self.options = ChatOptions() if options is None else options
        self.form = checked_form(self.options.parser) if self.options.parser else form_of(tokenizer.chat_template)
        self._closings: dict[tuple[int, tuple[str, ...]], tuple[Tools, _Closing]] = {}
        self._openings: dict[int, tuple[Tools, str]] = {}
        self._skipped: frozenset[int] | None = None
        self._marks: frozenset[int] = frozenset()

    def opening(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Tokens of a conversation, up to the start of the policy's turn, as of `encode_prompt`.

        Raises:
          TokenizerError: there is no chat template, or it refuses the messages.
          UnknownFormError: there are tools, and the chat template shows no known form of their calls.
        """
        if tools and not self.form and not self._own_template():
            forms = "|".join(REPLY_FORMS)
            raise UnknownFormError(
                f"the chat template shows no known form of calls of tools; name it: --tool_parser={forms}"
            )
        return encode_prompt(self.tokenizer, self.prepared(messages), tools, arguments=self.arguments)[0]

    def continuation(
        self, messages: Sequence[Message], tools: Tools = (), last: int | None = None, reply: Message | None = None
    ) -> list[int]:
        """Tokens from the end of a reply to the start of the policy's next turn; see `Chat`.

        Raises:
          TokenizerError: there is no chat template, or it refuses the messages.
          DataError: the template renders an earlier reply anew where messages follow it.
        """
        rendered, begin, end = self.after_reply(self.prepared(messages), tools, reply)
        text = rendered.text
        mark = "" if last is None else self.tokenizer.decode([last], skip_special_tokens=False)
        if mark and mark == end.strip() and not text.startswith(mark, begin):
            mark = self.first_mark(text[begin:])  # the template ends a turn that is followed in another way
        mark_begin = text.find(mark, begin, max(begin + len(end), begin + len(mark))) if mark else -1
        if mark_begin < 0:
            return encode_rendered(self.tokenizer, rendered, begin, before=None if last is None else self._raw([last]))
        return encode_rendered(self.tokenizer, rendered, mark_begin + len(mark))

    def expanded(self, tokens: list[int], messages: Sequence[Message]) -> tuple[list[int], OwnedLines | None]:
        """Rendered tokens of messages with those of their pictures; see `expanded_tokens`."""
        return expanded_tokens(tokens, messages, self.tokenizer)

    def read(self, before: Sequence[int], tokens: Sequence[int], tools: Tools = ()) -> ReadReply:
        """Read a reply: by the tokenizer's own `response_template` if it has one, else by the form of its family.

        Without tools all of it is the content, unless it has special tokens of the form, such as gpt-oss's channels.
        """
        header = before[-HEADER_TOKENS:]
        if self._own_template():
            return read_message(self.tokenizer, header, tokens, tools)
        if not tools and not self._has_marks(tokens):
            return ReadReply({"role": "assistant", "content": continued_text(header, tokens, self._plain)})
        text = continued_text(header, tokens, self._marked)
        return read_reply(self.form or "hermes", text, tools, self._opens_thoughts(header, tools))

    def fork_cause(self, nodes: Sequence[Node], tools: Tools = ()) -> tuple[str, bool]:
        """Cause why the template would render a history otherwise, and whether the trajectory forks there.

        Args:
          nodes: as in `Chat`.

        Returns: a cause of `drift`; "" if there is no difference.
        """
        root = nodes[0] if nodes[0].parent is None else None
        nodes = nodes[root is not None :]
        if not all(node.messages for node in nodes):
            return "", False  # raw tokens have no rendering
        cycle: Sequence[Message] = () if root is None else _after_user(root.messages)
        messages = [*cycle, *(message for node in nodes for message in node.messages)]
        unread = any(node.problems for node in nodes)
        try:
            opened = self._render(self._history(cycle), tools).text if cycle else self._opened(tools)
            rendered = self._render(self._history(messages), tools).text
        except TokenizerError:  # then there is nothing to fork to
            return "unreadable" if unread else "other", False
        before, _, turn = self._opened(tools).rpartition("?")
        parts = [NodeText(opened), *(self._part(node) for node in nodes)]
        cause = drift_cause(parts, rendered, turn.partition(THINK)[0])
        if cause and not rendered.startswith(before):
            cause = "system_prompt"
        elif cause == "other" and unread:
            cause = "unreadable"
        elif cause == "other" and any(node.finish == "length" for node in nodes):
            cause = "truncated"
        return cause, self.options.history == "template" and bool(cause) and cause not in SAME

    def _history(self, messages: Sequence[Message]) -> list[Message]:
        """A synthetic question, and messages whose calls have the ids that templates demand."""
        history = [USER]
        for message in messages:
            calls = [{"id": f"call{number:05}", **call} for number, call in enumerate(message.get("tool_calls") or ())]
            history.append({**message, "tool_calls": calls} if calls else message)
        return self.prepared(history)

    def _part(self, node: Node) -> NodeText:
        end = self._raw(node.tokens[-1:]) if node.finish == "stop" else ""
        return NodeText(self._raw(collapsed_tokens(node, self.tokenizer)), node.sampled, end)

    def _own_template(self) -> bool:
        return not self.options.parser and getattr(self.tokenizer, "response_template", None) is not None

    def after_reply(
        self, messages: Sequence[Message], tools: Tools = (), reply: Message | None = None
    ) -> tuple[RenderedChat, int, str]:
        """A synthetic conversation of a reply and messages, where the end of the reply begins, and that end.

        Raises:
          TokenizerError, DataError: as in `continuation`.
        """
        answers = sum(message.get("role") == "tool" for message in messages)
        names = tuple(str(call["function"]["name"]) for call in (reply or {}).get("tool_calls") or ())
        names = names if answers in (0, len(names)) else ("f",) * answers
        problem: Exception = DataError("no reply can be rendered")
        for calls in dict.fromkeys((names, ())):  # some templates demand calls where tools answer, others know none
            try:
                closing = self._closing(calls, tools)
                rendered = self._render([*closing.conversation, *messages], tools)
                begin = _after_mark(rendered.text, closing.ordinal)
            except TokenizerError as error:
                problem = error
                continue
            if rendered.text.startswith(closing.text, begin):
                return rendered, begin + len(closing.text) - len(closing.end), closing.end
            other = self.first_mark(rendered.text[begin:])
            if not calls and other and closing.end.strip() == self.first_mark(closing.end):
                return rendered, begin, closing.end
            problem = DataError(
                f"the chat template does not append: a reply ends with {closing.text!r} at the end of a conversation, "
                f"and with {rendered.text[begin : begin + len(closing.text)]!r} before {list(messages)!r:.500}; give "
                "another one (--chat_template=FILE), or start a new trajectory for every turn"
            )
        raise problem

    def _closing(self, calls: tuple[str, ...], tools: Tools) -> _Closing:
        """End of a synthetic reply with calls."""
        key = (id(tools), calls)
        if key not in self._closings:
            if len(self._closings) >= CACHED_RENDERINGS:
                self._closings.clear()
            self._closings[key] = (tools, self._new_closing(calls, tools))  # the tools are held, so the id stays theirs
        return self._closings[key][1]

    def _new_closing(self, calls: tuple[str, ...], tools: Tools) -> _Closing:
        reply: dict[str, Any] = {"role": "assistant", "content": REPLY}
        if calls:
            functions = [{"name": name, "arguments": {}} for name in calls]
            reply["tool_calls"] = [{"type": "function", "id": CALL_ID, "function": call} for call in functions]
        conversation = [USER, reply]
        whole = self._render(conversation, tools, opens=False).text
        ordinal = whole.count(REPLY) - 1
        if ordinal < 0 and not calls:
            raise TokenizerError(f"the chat template leaves out a reply; it renders {whole!r:.500}")
        text = whole[_after_mark(whole, ordinal) :]
        if not calls:
            return _Closing(conversation, ordinal, text, text)
        plain = self._closing((), tools).end
        end = plain if text.endswith(plain) else self._last_mark(text)
        return _Closing(conversation, ordinal, text, end)

    def _render(self, conversation: Sequence[Message], tools: Tools, opens: bool = True) -> RenderedChat:
        """Render a conversation. `opens`: up to the start of the policy's turn."""
        if self.tokenizer.chat_template is None:
            raise TokenizerError("the tokenizer has no chat template; give --chat_template=FILE.jinja")
        try:
            return render_chat(self.tokenizer, conversation, tools, self.arguments, add_generation_prompt=opens)
        except Exception as error:  # templates may raise anything
            new = list(conversation[2:])
            raise TokenizerError(f"the chat template refuses the messages {new!r:.2000}: {error}") from error

    def _opened(self, tools: Tools) -> str:
        """A question, up to the start of the policy's turn."""
        if id(tools) not in self._openings:
            if len(self._openings) >= CACHED_RENDERINGS:
                self._openings.clear()
            self._openings[id(tools)] = (tools, self._render([USER], tools).text)
        return self._openings[id(tools)][1]

    def _opens_thoughts(self, before: Sequence[int], tools: Tools) -> bool:
        """True if the template has opened the policy's thoughts."""
        try:
            turn = self._opened(tools).rpartition("?")[2]
        except TokenizerError:
            return False
        return turn.rfind(THINK) > turn.rfind(END_THINK) and self._raw(before).endswith(turn)

    def first_mark(self, text: str) -> str:
        """The special token that a text begins with; ""."""
        match = self._special().match(text)
        return match[0] if match else ""

    def _last_mark(self, text: str) -> str:
        """The special token that a text ends with, and space behind it; ""."""
        last = list(self._special().finditer(text))[-1:]
        return text[last[0].start() :] if last and not text[last[0].end() :].strip() else ""

    def _special(self) -> re.Pattern[str]:
        words = sorted(map(str, self.tokenizer.all_special_tokens), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, words)) or r"(?!)")

    def _raw(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False)

    def _plain(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def _marked(self, tokens: Sequence[int]) -> str:
        """Text with only those special tokens that belong to the form of replies."""
        if self._skipped is None:
            marks = REPLY_FORMS[self.form or "hermes"].marks
            special = dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True))
            self._skipped = frozenset(number for word, number in special.items() if word not in marks)
            self._marks = frozenset(special.values()) - self._skipped
        return self._raw([token for token in tokens if token not in self._skipped])

    def _has_marks(self, tokens: Sequence[int]) -> bool:
        """True if special tokens of the form of replies are among some."""
        self._marked(())
        return not self._marks.isdisjoint(tokens)

    def prepared(self, messages: Sequence[Message]) -> list[Message]:
        """Messages in their normal form, in which long results are cut, and parts of pictures only say where they are.

        Raises:
          DataError: one is not a message.
        """
        limit = self.options.tool_tokens
        prepared: list[Message] = []
        for message in normal_messages(messages):
            content = message["content"]
            if limit and message["role"] == "tool" and isinstance(content, str) and len(content) > limit:
                message = {**message, "content": self._cut(content)}
            prepared.append(without_pictures(message))
        return prepared

    def _cut(self, text: str) -> str:
        """A text of at most so many tokens, which says that it was cut."""
        limit = self.options.tool_tokens
        head = text[: limit * TOKEN_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
        ids = encode_as_text(self.tokenizer, head)
        if len(ids) <= limit and len(text) <= limit * TOKEN_CHARACTERS:
            return text
        kept = self._raw(ids[:limit]).rstrip("\ufffd")
        return f"{kept}\n[cut here: {len(kept)} of {len(text)} characters]"


def check_chat(chat: TemplateChat, tools: Tools = ()) -> None:
    """Raise where a chat template cannot continue a conversation: after a reply by the user, and by a tool if any.

    Raises:
      TokenizerError, DataError: as in `TemplateChat.continuation`.
    """
    chat.continuation([USER], tools)
    if tools:
        chat.continuation([TOOL], tools)


def template_limits(chat: TemplateChat, tools: bool) -> list[str]:
    """Lines about what a chat template does not allow, each with the way out; none where there is no template.

    Args:
      chat: with the template.
      tools: whether the environment has tools.
    """
    if chat.tokenizer.chat_template is None:
        return []
    lines = [_append_limit(chat, "a user's message", USER, f"start a new trajectory for every turn, or give {ANOTHER}")]
    if not lines[0]:
        rendered, begin, _ = chat.after_reply([USER])
        if not chat.first_mark(rendered.text[begin:]):
            lines.append(
                "has no mark that ends a turn: a reply that was cut off runs into what follows it; raise "
                "--max_new_tokens"
            )
    try:
        shown = not tools or "FUNRL-TOOL" in chat_text(chat.tokenizer, [USER], SOME_TOOLS, chat.arguments)
    except Exception:  # templates may raise anything
        shown = False
    if not shown:
        lines.append(f"shows no tools: describe them in a system message and name --tool_parser, or give {ANOTHER}")
    elif tools:
        way_out = f"answer calls by messages of the user, or give {ANOTHER}"
        lines.append(_append_limit(chat, "a tool's result", TOOL, way_out))
        if not chat.form and getattr(chat.tokenizer, "response_template", None) is None:
            lines.append(f"shows no known form of calls: name it, --tool_parser={'|'.join(REPLY_FORMS)}")
    return ["the chat template " + line for line in lines if line]


def _append_limit(chat: TemplateChat, what: str, message: Message, way_out: str) -> str:
    try:
        chat.after_reply([message], SOME_TOOLS if message is TOOL else ())
    except TokenizerError as error:
        return f"refuses {what} behind a reply ({str(error)[-200:]}): {way_out}"
    except DataError:
        return f"renders a reply anew where {what} follows: {way_out}"
    return ""


def continued_text(before: Sequence[int], tokens: Sequence[int], decode: Any) -> str:
    """Text of some tokens as they continue others. Many tokenizers drop the space at the start of a text."""
    opening = decode(list(before[-1:]))
    joined = decode([*before[-1:], *tokens])
    return joined[len(opening) :] if joined.startswith(opening) else decode(list(tokens))


def _after_mark(text: str, ordinal: int) -> int:
    """Place after a reply in a text, by the number of its mark; the start if it is -1."""
    place = 0
    for _ in range(ordinal + 1):
        mark_begin = text.find(REPLY, place)
        if mark_begin < 0:
            raise TokenizerError(f"the chat template leaves out a reply; it renders {text!r:.500}")
        place = mark_begin + len(REPLY)
    return place


def _after_user(messages: Sequence[Message]) -> Sequence[Message]:
    """Messages behind the last one of a user that does not answer a call: what the policy wrote, and results."""
    asks = [
        number
        for number, message in enumerate(messages)
        if message.get("role") == "user" and not (number and messages[number - 1].get("tool_calls"))
    ]
    return messages[asks[-1] + 1 :] if asks else ()
