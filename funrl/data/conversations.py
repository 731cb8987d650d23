"""Conversations as tokens by a chat template: prompts, the turns that answer them, and which tokens are trained.

Every recipe, and the chat of an environment, uses these functions. What is trained of a turn is what a policy with the
same history would have had to sample: it has the prompt as the template renders it, up to the start of its turn, and
writes the reply and the token that ends it.

| the template | the row |
|---|---|
| ends a turn by a special token | it is trained, and what the template writes behind it is context |
| lets the mark of the next turn end it (GLM-4.5) | that mark is trained; behind the last turn, the end-of-text token |
| writes no mark (plain texts) | the end-of-text token is trained, and the next turn begins a row of its own |
| writes empty thoughts that the prompt lacks (Qwen3) | they are left out |
| has opened the thoughts in the prompt (Qwen3.5, R1) | the reply closes them |
| renders earlier turns otherwise later (Qwen3, gpt-oss) | a row for each turn whose history changes |
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from funrl.data.json_lines import DataError, JsonObject
from funrl.data.messages import TRAIN_FIELD
from funrl.data.tokenizer import (
    END_THINK,
    THINK,
    RenderedChat,
    TextTokenizer,
    TokenizerError,
    encode_after,
    encode_rendered,
    encode_text_prompt,
    inline_thoughts,
    markers_of,
    render_chat,
)

Conversation = Sequence[Mapping[str, Any]]
LINE = "\n"
REPLY = "FUNRL-REPLY"  # content of a synthetic reply, and the place where the assistant's words continue
CALL_ID = "call00000"  # of a synthetic call, in the form that Mistral's templates demand
ANY_QUESTION: Conversation = ({"role": "user", "content": "?"},)  # a history that every template knows
_EMPTY_THOUGHTS = re.compile(rf"\A(\s*){THINK}\s*{END_THINK}\s*")


class Text(NamedTuple):
    """A sequence of tokens, and a mask of the trained ones."""

    tokens: list[int]
    trained: list[bool]


class AssistantTurn(NamedTuple):
    """A turn of the assistant.

    Attributes:
      prompt: the chat up to it, with what the template writes at the start of a reply.
      reply: what the policy has to sample then, with the mark that ends it.
      ended: whether there is such a mark; else the mark of the next turn or the end-of-text token ends it.
    """

    prompt: RenderedChat
    reply: str
    ended: bool


class ChatTemplate(NamedTuple):
    """A tokenizer's chat template with what a run gives it.

    Attributes:
      tokenizer: of Hugging Face.
      tools: JSON schemas of tools.
      arguments: further arguments of the template, by name.
    """

    tokenizer: TextTokenizer
    tools: Sequence[object] = ()
    arguments: Mapping[str, object] | None = None

    def prompt(self, messages: Conversation) -> RenderedChat:
        """Render messages up to the start of the policy's turn; words of the assistant at the end are continued.

        Raises:
          TokenizerError: there is no chat template, or it refuses the messages.
        """
        last = messages[-1]
        if last["role"] != "assistant":
            self._check_shown(messages)
            return self.render(messages, opens=True)
        if last.get("tool_calls") or not isinstance(last.get("content"), str):
            raise TokenizerError("the prompt ends with calls of the assistant, which nothing answers")
        turn = self.turn([*messages[:-1], {**last, "content": last["content"] + REPLY}])
        place = turn.reply.rfind(REPLY)
        if place < 0:
            raise TokenizerError(f"the chat template leaves out words of the assistant; it renders {turn.reply!r:.500}")
        return turn.prompt._replace(text=turn.prompt.text + turn.reply[:place])

    def turn(self, messages: Conversation) -> AssistantTurn:
        """The last message of some, by the assistant, as the policy has to write it.

        Raises:
          TokenizerError: as `prompt`.
          DataError: the template renders what was before it otherwise.
        """
        *history, message = messages
        if not history:
            raise DataError(
                "message 1 is by the assistant, and no prompt is before it; begin with a message of the system or the "
                "user, or give it train: false, which keeps it as context"
            )
        self._check_shown(history)
        prompt = self.render(history, opens=True)
        begin = prompt.text.rstrip()
        thoughts = given = inline_thoughts(message)
        if begin.endswith(END_THINK):  # the prompt says that nothing is thought
            message = _without_thoughts(message)
            thoughts = ""
        reply = self._reply(history, message, prompt.text)
        if reply is None:  # the template renders the history otherwise behind this message
            plain = self._replace(tools=())
            reply = plain._reply(ANY_QUESTION, message, plain._synthetic(ANY_QUESTION, opens=True))
        if reply is None:
            raise DataError(
                "the chat template renders what is before a turn of the assistant otherwise once there is one: "
                f"{self.render([*history, message], opens=False).text[-300:]!r} does not begin with "
                f"{prompt.text[-300:]!r}; give another one (--chat_template=FILE)"
            )
        content = str(message.get("content")).lstrip()
        if begin.endswith(THINK) and content.startswith(THINK) and END_THINK not in content:  # thoughts that continue
            reply = content.removeprefix(THINK).lstrip(LINE) + (self.closing()[0] or "")
        elif begin.endswith(THINK):
            reply = reply if END_THINK in reply else f"{thoughts}\n{END_THINK}\n\n{reply.lstrip(LINE)}"
        elif not thoughts and END_THINK not in str(message.get("content")):
            reply = _EMPTY_THOUGHTS.sub(r"\1", reply)
        elif thoughts.strip() not in reply and self._may_think():
            reply = f"{THINK}\n{thoughts}\n{END_THINK}\n\n{reply.lstrip(LINE)}"
        _check_reply(reply, message, given)
        return AssistantTurn(prompt, *self._ended(reply))

    def render(self, messages: Conversation, opens: bool) -> RenderedChat:
        """Render messages.

        Args:
          messages: in the normal form.
          opens: up to the start of the policy's turn.

        Raises:
          TokenizerError: there is no chat template, or it refuses the messages.
        """
        if self.tokenizer.chat_template is None:
            raise TokenizerError(
                "a prompt is a list of chat messages, but this tokenizer has no chat template; "
                "give --chat_template=FILE.jinja, or prompts as text"
            )
        try:
            return render_chat(self.tokenizer, messages, self.tools, self.arguments, add_generation_prompt=opens)
        except Exception as error:  # templates may raise anything
            raise TokenizerError(f"the chat template refuses the messages {list(messages)!r:.2000}: {error}") from error

    def _reply(self, history: Conversation, message: Mapping[str, object], prompt: str) -> str | None:
        """Text that the template writes of a message of the assistant, from the end of its prompt on.

        Returns: None if the template renders the history otherwise before the message than before a prompt.
        """
        whole = self.render([*history, message], opens=False).text
        if whole.startswith(prompt):
            return whole[len(prompt) :]
        pairs = enumerate(zip(prompt, whole, strict=False))
        shared = next((place for place, (a, b) in pairs if a != b), min(len(prompt), len(whole)))
        if shared < len(self.render(history, opens=False).text):
            return None
        marks = re.finditer(f"{THINK}|{END_THINK}", prompt)
        shared = next((mark.start() for mark in marks if mark.start() < shared < mark.end()), shared)
        # The prompt ends with what a finished turn lacks, such as opened or empty thoughts.
        reply = whole[shared:]
        content = str(message.get("content")).rpartition(END_THINK)[2].strip()
        is_open = prompt[:shared].rstrip().endswith(THINK) and not prompt[shared:].strip()
        thinks = is_open or THINK in prompt[shared:] or END_THINK in prompt[shared:]
        return reply if thinks or (content and reply.lstrip().startswith(content)) else None

    def _may_think(self) -> bool:
        """True if the template knows thoughts, and does not close them where a turn opens, as DeepSeek-V3.1's does."""
        knows = END_THINK in str(self.tokenizer.chat_template)
        return knows and not self._synthetic(ANY_QUESTION, opens=True).rstrip().endswith(END_THINK)

    def _check_shown(self, messages: Conversation) -> None:
        """Raise TokenizerError for a message that the template leaves out because of its role.

        A template that refuses the synthetic messages says itself what it knows.
        """
        for number, message in enumerate(messages):
            role = message["role"]
            if role in ("user", "assistant") or (role == "system" and not number):
                continue
            shown = {"role": role, "content": REPLY}
            synthetic = [*ANY_QUESTION, shown] if number else [shown, *ANY_QUESTION]
            if role == "tool":
                call = {"type": "function", "id": CALL_ID, "function": {"name": "f", "arguments": {}}}
                calling = {"role": "assistant", "content": "", "tool_calls": [call]}
                synthetic = [*ANY_QUESTION, calling, {**shown, "name": "f", "tool_call_id": CALL_ID}]
            rendered = self._synthetic(synthetic, opens=True)
            if rendered and REPLY not in rendered:
                raise TokenizerError(
                    f"the chat template leaves out message {number + 1}, as its role is {role!r}"
                    f"{', and another message is before it' if role == 'system' else ''}; give it another role, or "
                    "another template (--chat_template=FILE)"
                )

    def _ended(self, reply: str) -> tuple[str, bool]:
        """The reply up to the mark that ends it, and whether there is one."""
        closing, end = self.closing()
        if closing is not None and not end:
            return reply.removesuffix(closing), False
        if closing is not None and reply.endswith(closing):
            answered = reply[: len(reply) - len(closing)]
            return answered if answered.endswith(end) else answered + end, True
        ends = [str(word) for word in self.tokenizer.all_special_tokens]
        is_ended = any(end and reply.rstrip().endswith(end) for end in ends)
        return (reply.rstrip(), True) if is_ended else (reply, False)

    def closing(self) -> tuple[str | None, str]:
        """Text behind the content of a reply, and the part of it up to the mark that ends the turn.

        That is the first mark, as Phi-3's template has the end-of-text token behind that of the turn, or several that
        stand side by side wherever a turn ends, such as Cohere's two. None where it refuses a synthetic reply.

        Raises:
          TokenizerError: it leaves out what the assistant says.
        """
        answered = [*ANY_QUESTION, {"role": "assistant", "content": REPLY}]
        whole = self._synthetic(answered, opens=False)
        if not whole:
            return None, ""
        if REPLY not in whole:
            raise TokenizerError(f"the chat template leaves out what the assistant says; it renders {whole!r:.500}")
        closing = whole.rpartition(REPLY)[2]
        followed = self._synthetic([*answered, *ANY_QUESTION], opens=False).rpartition(REPLY)[2]
        marks = [match for match in markers_of(self.tokenizer).finditer(closing) if len(match[0]) > 1]
        if not marks:
            return closing, ""
        first = marks[0]
        run = re.compile(f"(?:{markers_of(self.tokenizer).pattern})+").match(closing, first.start())
        end = first.end() if run is None else run.end()
        ends_all = followed.startswith(closing[:end]) and not closing[end:].strip()
        return closing, closing[: end if ends_all else first.end()]

    def _synthetic(self, messages: Conversation, opens: bool) -> str:
        """Text of synthetic messages without tools, which is kept; "" where the template refuses them."""
        arguments = json.dumps([self.arguments or {}, messages, opens], sort_keys=True, default=str)
        key = (str(self.tokenizer.chat_template), arguments)
        known = _SYNTHETIC.setdefault(self.tokenizer, {})
        if key not in known:
            try:
                known[key] = self._replace(tools=()).render(messages, opens).text
            except TokenizerError:
                known[key] = ""
        return known[key]

    def next_marks(self) -> dict[str, str]:
        """Role -> marker of its turn, which ends a reply before it; {} where the template ends replies otherwise."""
        closing, end = self.closing()
        if closing is None or end:
            return {}
        call = {"type": "function", "id": CALL_ID, "function": {"name": "f", "arguments": {}}}
        replies: dict[str, JsonObject] = {"user": {}, "tool": {"tool_calls": [call]}}
        marks: dict[str, str] = {}
        for role, calls in replies.items():
            answered = [*ANY_QUESTION, {"role": "assistant", "content": REPLY, **calls}]
            before = self._synthetic(answered, opens=False)
            after = self._synthetic([*answered, {"role": role, "content": "?"}], opens=False)
            match = markers_of(self.tokenizer).match(after, len(before)) if after.startswith(before) else None
            if match and len(match[0]) > 1:
                marks[role] = match[0]
        return marks


_SYNTHETIC: weakref.WeakKeyDictionary[TextTokenizer, dict[tuple[str, str], str]] = weakref.WeakKeyDictionary()


def encode_prompt(
    tokenizer: TextTokenizer, prompt: str | Conversation, tools: Sequence[object] = (), arguments: Any = None
) -> tuple[list[int], str]:
    """Tokenize a prompt so that a completion can follow.

    Args:
      tokenizer: of Hugging Face.
      prompt: text, which gets the tokenizer's special tokens; or messages in the normal form, which go through its chat
        template, up to the start of the assistant's turn or, where they end with its words, up to these.
      tools: JSON schemas of tools, for the chat template.
      arguments: further arguments of the chat template, by name.

    Returns: the ids without a closing end-of-sequence token, and the text (of chat messages: the templated text).

    Raises:
      TokenizerError: the prompt is a chat and the tokenizer has no chat template, or the template rejects it.
    """
    if isinstance(prompt, str):
        return encode_text_prompt(tokenizer, prompt), prompt
    rendered = ChatTemplate(tokenizer, tools, arguments).prompt(prompt)
    return encode_rendered(tokenizer, rendered), rendered.text


def conversation_texts(messages: Conversation, template: ChatTemplate, first: int = 0) -> list[Text]:
    """Tokenize a conversation, whose turns by the assistant are trained, unless a message says `train: false`.

    Args:
      messages: in the normal form.
      template: that renders them.
      first: index of the first message that may be trained.

    Returns: the rows. A turn stands in the row of the one before if the template renders that as it was sampled; else
      it begins another row. Each turn is trained once.

    Raises:
      DataError: no turn is trained, or the template renders what was before a turn otherwise.
      TokenizerError: as `ChatTemplate.prompt`.
    """
    rows = [_Row(template.tokenizer)]
    for place, message in enumerate(messages):
        if place < first or message["role"] != "assistant" or message.get(TRAIN_FIELD) is False:
            continue
        turn = template.turn(messages[: place + 1])
        if rows[-1].text and not rows[-1].goes_on(turn.prompt):
            rows.append(_Row(template.tokenizer))
        follows = messages[place + 1]["role"] if place + 1 < len(messages) else ""
        rows[-1].add(turn, "" if turn.ended else template.next_marks().get(follows, ""))
    texts = [row.finished() for row in rows if row.text]
    if not texts:
        raise DataError("no turn of the assistant is trained: each has weight 0 or train false")
    return texts


def continued_texts(prompt: Conversation, completion: Conversation, template: ChatTemplate) -> list[Text]:
    """Tokenize a prompt and messages that complete it; the assistant's are trained.

    Where the prompt ends with the assistant's words, the first message continues them, and only that is trained.

    Raises:
      DataError, TokenizerError: as `conversation_texts`.
    """
    if prompt[-1]["role"] != "assistant":
        return conversation_texts([*prompt, *completion], template, first=len(prompt))
    if completion[0]["role"] != "assistant":
        raise DataError("the prompt ends with words of the assistant, and the completion does not continue them")
    begun = template.prompt(prompt)
    joined = {**prompt[-1], **completion[0], "content": prompt[-1]["content"] + completion[0]["content"]}
    turn = template.turn([*prompt[:-1], joined])
    whole = turn.prompt.text + turn.reply
    if not whole.startswith(begun.text):
        raise DataError(
            f"the chat template renders words of the assistant otherwise where they are continued: {begun.text!r:.300} "
            f"becomes {whole!r:.300}"
        )
    row = _Row(template.tokenizer)
    row.add(AssistantTurn(begun, whole[len(begun.text) :], turn.ended))
    rest = [*prompt[:-1], joined, *completion[1:]]
    continues = completion[0].get(TRAIN_FIELD) is not False
    further = not continues or any(message["role"] == "assistant" for message in completion[1:])
    texts = conversation_texts(rest, template, first=len(prompt)) if further else []
    return [row.finished(), *texts] if continues else texts


def completed_text(prompt: list[int], name: str, completion: str, tokenizer: TextTokenizer, before: str = "") -> Text:
    """Tokens of a text prompt and its completion, which is trained and ends with the end-of-text token.

    Args:
      prompt: token ids.
      name: name of the completion's field, for errors.
      before: the prompt's text, which the completion continues.

    Raises:
      DataError: one of them has no tokens.
    """
    ids = with_end(tokenizer, encode_after(tokenizer, before, completion))
    if not prompt or not ids:
        raise DataError(f"the prompt and {name!r} must have at least one token")
    return Text([*prompt, *ids], [False] * len(prompt) + [True] * len(ids))


def whole_text(text: str, tokenizer: TextTokenizer) -> Text:
    """Tokens of a text that ends with the end-of-text token; all but the first are trained. Raises: DataError."""
    ids = with_end(tokenizer, encode_text_prompt(tokenizer, text))
    if len(ids) < 2:
        raise DataError("'text' must have at least two tokens")
    return Text(ids, [False] + [True] * (len(ids) - 1))


def with_end(tokenizer: TextTokenizer, ids: list[int]) -> list[int]:
    """Token ids that end with the end-of-text token, if the tokenizer has one."""
    end = tokenizer.eos_token_id
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


class _Row:
    """A row that grows by turns."""

    def __init__(self, tokenizer: TextTokenizer):
        self.tokenizer = tokenizer
        self.text = ""
        self.ended = True
        self.mark = ""
        self.tokens: list[int] = []
        self.trained: list[bool] = []

    def goes_on(self, prompt: RenderedChat) -> bool:
        """True if a prompt begins with the row, so that the turn that answers it can stand in it."""
        if not prompt.text.startswith(self.text):
            return False
        mark = self._mark_after(prompt)
        return self.ended or bool(mark and prompt.text[len(self.text) + len(mark) :].strip())

    def add(self, turn: AssistantTurn, mark: str = "") -> None:
        """Append a turn and what is before it.

        Args:
          turn: of the assistant.
          mark: of the turn that follows, where it ends this one; "": the end-of-text token does.
        """
        if not self.ended:
            end = self._mark_after(turn.prompt)
            self._append(encode_after(self.tokenizer, self.text, end), trained=True)
            self.text += end
        self._append(encode_rendered(self.tokenizer, turn.prompt, len(self.text)), trained=False)
        self._append(encode_after(self.tokenizer, turn.prompt.text, turn.reply), trained=True)
        self.text = turn.prompt.text + turn.reply
        self.ended = turn.ended
        self.mark = mark

    def finished(self) -> Text:
        """The row, with a token that ends its last turn where the template writes none."""
        mark = self.mark or str(self.tokenizer.eos_token or "")
        end = self.tokenizer.convert_tokens_to_ids(mark) if mark else None
        if not self.ended and end is not None and self.tokens[-1] != end:
            self._append([end], trained=True)
        self.trained[0] = False  # nothing predicts it
        return Text(self.tokens, self.trained)

    def _append(self, ids: list[int], trained: bool) -> None:
        self.tokens += ids
        self.trained += [trained] * len(ids)

    def _mark_after(self, prompt: RenderedChat) -> str:
        """The marker that follows the row in a prompt."""
        match = markers_of(self.tokenizer).match(prompt.text, len(self.text))
        return match[0] if match and len(match[0]) > 1 else ""


def _without_thoughts(message: Mapping[str, object]) -> JsonObject:
    content = message.get("content")
    rest = content.rpartition(END_THINK)[2].lstrip("\n") if isinstance(content, str) else content
    return {name: value for name, value in message.items() if name != "reasoning_content"} | {"content": rest}


def _check_reply(reply: str, message: Mapping[str, Any], thoughts: str) -> None:
    """Raise DataError where a template leaves out calls, a part of a content with thoughts, or all of a message."""
    calls = message.get("tool_calls") or ()
    if calls and calls[0]["function"]["name"] not in reply:
        raise DataError(
            f"the chat template leaves out the call of {calls[0]['function']['name']!r}, and renders {reply!r:.300}; "
            "give one that knows tools (--chat_template=FILE)"
        )
    content = message.get("content")
    if calls or not isinstance(content, str):
        return
    parts = re.split(f"{THINK}|{END_THINK}", content) if END_THINK in content else [] if content else [thoughts]
    lost = next((part for part in parts if part.strip() not in reply), None)
    if lost is not None:
        raise DataError(
            f"the chat template leaves out {lost!r:.100} of a message of the assistant, and renders {reply!r:.300}; "
            "give thoughts once, before an answer, or another template (--chat_template=FILE)"
        )
