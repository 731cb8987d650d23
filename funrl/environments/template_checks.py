"""Limits of a chat template in conversations of several turns: a line for each, with the way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from funrl.data.conversations import CALL_ID, REPLY
from funrl.data.json_lines import DataError
from funrl.data.tokenizer import THINK, TokenizerError, chat_text
from funrl.environments.chat import TemplateChat
from funrl.environments.forms.response_templates import REPLY_FORMS
from funrl.rollout.episodes import Message

THOUGHT = "FUNRL-THOUGHT"
USER: Message = {"role": "user", "content": "?"}
TOOL: Message = {"role": "tool", "name": "f", "content": "?", "tool_call_id": CALL_ID}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "description": "a number"}}, "required": ["a"]}
TOOLS = ({"type": "function", "function": {"name": "f", "description": "FUNRL-TOOL", "parameters": SCHEMA}},)
ANOTHER = "another template (--chat_template=FILE)"


def template_limits(chat: TemplateChat, tools: bool) -> list[str]:
    """Lines about what a chat template does not allow; none where it allows everything, or where there is none.

    Args:
      chat: with the template.
      tools: whether the environment has tools.

    | asked | by |
    |---|---|
    | does it append | a user's message behind a reply |
    | has it tools | a description of a tool, and a result behind a call |
    | does it leave the start as it is | the same messages after a reply |
    | does it keep thoughts | a reply with thoughts, and behind it a result, or a user's message |
    | can a reply that was cut off be closed | the end of a reply |
    """
    if chat.tokenizer.chat_template is None:
        return []
    lines = [_appends(chat, "a user's message", USER, "start a new trajectory for every turn, or give " + ANOTHER)]
    if not lines[0]:
        lines.append(_closes(chat))
        lines.append(_begins_alike(chat, TOOLS if tools else ()))
    if tools:
        lines += _tool_limits(chat)
    lines += _thoughts(chat)
    return ["the chat template " + line for line in lines if line]


def _tool_limits(chat: TemplateChat) -> list[str]:
    if not _shows_tools(chat):
        return [f"shows no tools: describe them in a system message and name --tool_parser, or give {ANOTHER}"]
    lines = [_appends(chat, "a tool's result", TOOL, f"answer calls by messages of the user, or give {ANOTHER}")]
    if not chat.form and getattr(chat.tokenizer, "response_template", None) is None:
        lines.append(f"shows no known form of calls: name it, --tool_parser={'|'.join(REPLY_FORMS)}")
    return lines


def _appends(chat: TemplateChat, what: str, message: Message, remedy: str) -> str:
    try:
        chat.after_reply([message], TOOLS if message is TOOL else ())
    except TokenizerError as error:
        return f"refuses {what} behind a reply ({str(error)[-200:]}): {remedy}"
    except DataError:
        return f"renders a reply anew where {what} follows: {remedy}"
    return ""


def _begins_alike(chat: TemplateChat, tools: Sequence[object]) -> str:
    reply = {"role": "assistant", "content": REPLY}
    try:
        before = _text(chat, [USER], tools).rpartition("?")[0]
        same = _text(chat, [USER, reply, USER], tools).startswith(before)
    except Exception:  # templates may raise anything
        return ""
    if same:
        return ""
    what = "renders the start of a conversation anew once a user speaks again, such as tools that move"
    return f"{what}: {_consequence(chat)}"


def _closes(chat: TemplateChat) -> str:
    """A line unless the end of a reply is a mark of its own."""
    rendered, begin, _ = chat.after_reply([USER])
    if chat.first_mark(rendered.text[begin:]):
        return ""
    return "has no mark that ends a turn: a reply that was cut off runs into what follows it; raise --max_new_tokens"


def _shows_tools(chat: TemplateChat) -> bool:
    try:
        return "FUNRL-TOOL" in _text(chat, [USER], TOOLS)
    except Exception:  # templates may raise anything
        return False


def _thoughts(chat: TemplateChat) -> list[str]:
    """A line if thoughts of an earlier turn are left out once something follows."""
    template = str(chat.tokenizer.chat_template)
    if THINK not in template and "thinking" not in template and "reasoning_content" not in template:
        return []
    thinks = {"reasoning_content": THOUGHT, "thinking": THOUGHT}
    called = {"type": "function", "id": CALL_ID, "function": {"name": "f", "arguments": {"a": 1}}}
    reply: dict[str, Any] = {"role": "assistant", "content": REPLY, **thinks}
    cycle = [{**reply, "content": "", "tool_calls": [called]}, TOOL]
    where: list[str] = []
    for name, messages in (("a tool's result", cycle), ("a user's message", [reply, USER])):
        try:
            kept = THOUGHT in _text(chat, [USER, *messages], TOOLS)
        except Exception:  # templates may raise anything
            continue
        if not kept:
            where.append(name)
    if not where:
        return []
    what = f"leaves out what the policy thought once {' or '.join(where)} follows"
    return [f"{what}: {_consequence(chat)}"]


def _consequence(chat: TemplateChat) -> str:
    if chat.options.history == "template":
        return "the trajectory forks there; --history=append keeps what was sampled"
    return "what was sampled stays all the same; --history=template forks there"


def _text(chat: TemplateChat, messages: Sequence[Message], tools: Sequence[object]) -> str:
    return chat_text(chat.tokenizer, messages, tools, chat.arguments, add_generation_prompt=True)
