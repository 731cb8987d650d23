"""What is trained of a conversation is what a policy with the same history would have sampled in an environment.

For every template of `chat_templates` and conversations drawn by seed: each turn of the assistant is trained once,
behind the context that an environment's chat gives, token for token; it ends with a stop token, and reading it gives
the message back, up to what the table of `chat_templates` says that the template drops.
"""

import json
import re
from typing import Any, NamedTuple

import pytest
from chat_templates import TEMPLATES, tokenizer_of
from drawn_conversations import TOOLS, drawn_conversations
from selection import quick

from funrl.data.conversations import QUESTION, ChatTemplate
from funrl.data.messages import normal_messages, normal_tools, without_arrow_nulls
from funrl.data.supervised import load_examples, text_example
from funrl.environments.chat import ChatOptions, TemplateChat

FEW, MANY = 25, 300  # conversations


class Sampled(NamedTuple):
    """A turn as it is trained.

    Attributes:
      row: the number of its row.
      context: tokens before it.
      tokens: that are trained, with the end.
    """

    row: int
    context: list[int]
    tokens: list[int]


def sampled_turns(texts, tokenizer, ends):
    """The trained turns of rows; each ends with one of some tokens."""
    stops = {tokenizer.convert_tokens_to_ids(end) for end in (*ends, tokenizer.eos_token)}
    turns = []
    for row, text in enumerate(texts):
        begin = None
        for place, (token, is_trained) in enumerate(zip(*text, strict=True)):
            if is_trained and begin is None:
                begin = place
            if begin is not None:
                assert is_trained, f"a turn without an end: {tokenizer.decode(text.tokens[begin:place])!r}"
                if token in stops:
                    turns.append(Sampled(row, text.tokens[:begin], text.tokens[begin : place + 1]))
                    begin = None
        assert begin is None, f"the last turn of {tokenizer.decode(text.tokens)!r} has no end"
    return turns


def chat_of(tokenizer):
    """An environment's chat; no form of calls is known of DeepSeek, but its tokens do not depend on one."""
    chat = TemplateChat(tokenizer)
    return chat if chat.form else TemplateChat(tokenizer, options=ChatOptions(parser="hermes"))


def contexts_in_an_environment(chat, messages, tools, turns):
    """For each turn the tokens before it, where an environment's chat keeps the tokens that were sampled before.

    None where the turn before is the assistant's too: no environment asks twice without an answer.
    """
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    contexts: list[list[int] | None] = []
    for number, (place, turn) in enumerate(zip(places, turns, strict=True)):
        if messages[place - 1]["role"] == "assistant":
            contexts.append(None)
        elif number == 0 or turns[number - 1].row != turn.row:
            contexts.append(chat.opening(messages[:place], tools))
        else:
            last, before = places[number - 1], turns[number - 1]
            new = chat.continuation(messages[last + 1 : place], tools, before.tokens[-1], messages[last])
            contexts.append([*before.context, *before.tokens, *new])
    return contexts


def essence(message):
    """What a message says: content, thoughts, and names and arguments of calls."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    thoughts = message.get("reasoning_content") or message.get("thinking") or ""
    return message["content"].strip(), thoughts.strip(), [(f["name"], f["arguments"]) for f in functions]


def without_drops(message, form, opens_thoughts=False):
    """`essence` of a message less what a template drops; a policy closes thoughts that the template opens."""
    content, thoughts, calls = essence(message)
    thoughts = "" if "thoughts" in form.drops and not opens_thoughts else thoughts
    if calls and "call_content" in form.drops:
        content = ""
    if calls and content and "all_beside_calls" in form.refuses:  # of gpt-oss, whose content beside calls is analysis
        content, thoughts = "", content
    return content, thoughts, calls[:1] if "more_calls" in form.drops else calls


DEEPSEEK_CALL = re.compile("<\uff5ctool\u2581call\u2581begin\uff5c>(.*?)<\uff5ctool\u2581sep\uff5c>(.*?)<\uff5ctool", re.DOTALL)


def read(chat, turn):
    """`essence` of a trained turn as an environment reads it."""
    text = chat.tokenizer.decode(turn.tokens[:-1])
    content, calls, _ = text.partition("<\uff5ctool\u2581calls\u2581begin\uff5c>")
    if calls:
        return content.strip(), "", [(name, json.loads(value)) for name, value in DEEPSEEK_CALL.findall(text)]
    reply = chat.read(turn.context, turn.tokens[:-1], TOOLS)
    assert not reply.problems, (reply.problems, text)
    return essence(reply.message)


def drawn(name, count, without=(), seed=1):
    form = TEMPLATES[name]
    marks = [word for word in (*form.marks[:3], *form.marks.special, *form.marks.added) if word]
    return drawn_conversations(count, seed, marks=marks, without={*form.refuses, *without})


def read_record(conversation):
    """A record as `records` gives it."""
    return without_arrow_nulls(conversation.record) if conversation.flavour == "arrow" else conversation.record


@pytest.mark.parametrize("count", quick([FEW, MANY], [FEW]))
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_is_trained_as_a_policy_samples_it(name, count):
    form, tokenizer = TEMPLATES[name], tokenizer_of(name)
    chat = chat_of(tokenizer)
    opens_thoughts = ChatTemplate(tokenizer).render(QUESTION, opens=True).text.endswith("<think>\n")
    for conversation in drawn(name, count):
        record = read_record(conversation)
        messages, tools = normal_messages(record["messages"]), normal_tools(record.get("tools"))
        assert messages == conversation.messages
        turns = sampled_turns(text_example(record, "demonstrations", tokenizer).texts, tokenizer, form.ends)
        said = [message for message in messages if message["role"] == "assistant"]
        expected = [without_drops(message, form, opens_thoughts) for message in said]
        assert [read(chat, turn) for turn in turns] == expected
        contexts = contexts_in_an_environment(chat, messages, tools, turns)
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        for place, turn, context in zip(places, turns, contexts, strict=True):
            assert context is None or turn.context == context, (conversation.number, place)
            rendered = ChatTemplate(tokenizer, tools).render(messages[:place], opens=True).text
            assert tokenizer.decode(turn.context) == rendered, (conversation.number, place)
