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
from drawn_conversations import TOOLS, Drawn, drawn_conversations
from selection import quick

from funrl.data.conversations import ANY_QUESTION, ChatTemplate
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


DEEPSEEK_CALL = re.compile(
    "<\uff5ctool\u2581call\u2581begin\uff5c>(.*?)<\uff5ctool\u2581sep\uff5c>(.*?)<\uff5ctool", re.DOTALL
)


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
    opens_thoughts = ChatTemplate(tokenizer).render(ANY_QUESTION, opens=True).text.endswith("<think>\n")
    for conversation in drawn(name, count):
        record = read_record(conversation)
        messages, tools = normal_messages(record["messages"]), normal_tools(record.get("tools"))
        assert messages == conversation.messages
        turns = sampled_turns(text_example(record, "demonstrations", tokenizer).texts, tokenizer, form.ends)
        results = [message for message in messages if message["role"] == "assistant"]
        expected = [without_drops(message, form, opens_thoughts) for message in results]
        assert [read(chat, turn) for turn in turns] == expected
        contexts = contexts_in_an_environment(chat, messages, tools, turns)
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        for place, turn, context in zip(places, turns, contexts, strict=True):
            assert context is None or turn.context == context, (conversation.number, place)
            rendered = ChatTemplate(tokenizer, tools).render(messages[:place], opens=True).text
            assert tokenizer.decode(turn.context) == rendered, (conversation.number, place)


def last_turn(texts, tokenizer, ends):
    turn = sampled_turns(texts, tokenizer, ends)[-1]
    return tokenizer.decode(turn.context), turn.tokens


@pytest.mark.parametrize("count", quick([FEW, 100], [FEW]))
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_recipe_trains_a_reply_as_a_conversation_does(name, count):
    """`prompt` and `completion`; `chosen` and `rejected`; ratings; and a reward model, which reads the same tokens."""
    form, tokenizer = TEMPLATES[name], tokenizer_of(name)
    for conversation in drawn(name, count, without={"in_a_row"}):
        record = read_record(conversation)
        *prompt, reply = record["messages"]
        shared = {"prompt": prompt, "tools": record.get("tools")}
        whole = text_example(record, "demonstrations", tokenizer).texts
        (completed,) = text_example({**shared, "completion": [reply]}, "demonstrations", tokenizer).texts
        assert last_turn([completed], tokenizer, form.ends) == last_turn(whole, tokenizer, form.ends)
        other = [{"role": "assistant", "content": "not drawn"}]  # by words, as templates may leave out thoughts
        pair = text_example({**shared, "chosen": [reply], "rejected": other}, "preferences", tokenizer).texts
        (rejected,) = text_example({**shared, "completion": other}, "demonstrations", tokenizer).texts
        assert pair == (completed, rejected)
        conversations = {"chosen": [*prompt, reply], "rejected": [*prompt, *other], "tools": record.get("tools")}
        assert text_example(conversations, "preferences", tokenizer).texts == pair
        (rated,) = text_example({**shared, "completion": [reply], "label": True}, "ratings", tokenizer).texts
        assert rated == completed


def as_column(conversation, arguments, parts):
    """A record whose values have one type in a column, as Arrow demands.

    Args:
      conversation: drawn.
      arguments: function of the arguments of a call.
      parts: whether contents are lists of parts.
    """
    record: Any = {"messages": json.loads(json.dumps(conversation.messages)), "tools": json.dumps(conversation.tools)}
    for message in record["messages"]:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = arguments(call["function"]["arguments"])
        if parts:
            message["content"] = [{"type": "text", "text": message["content"]}]
    return record


FILES = ("jsonl", "json", "parquet", "saved")


def write(records, folder, kind):
    """Write records to a file or folder of a kind."""
    path = folder / f"records.{kind}"
    if kind in ("jsonl", "json"):
        lines = [json.dumps(record) for record in records]
        path.write_text("\n".join(lines) if kind == "jsonl" else f"[{', '.join(lines)}]")
        return path
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(records)
    table.to_parquet(path) if kind == "parquet" else table.save_to_disk(path)
    return path


def sorted_arguments(arguments):
    """Arguments in the order of the column, which has one for all rows."""
    return {key: sorted_arguments(x) if isinstance(x, dict) else x for key, x in sorted(arguments.items())}


COLUMNS = {"objects": (sorted_arguments, False), "text": (json.dumps, False), "parts": (sorted_arguments, True)}


# Every key, sorted: a column has them in the order in which they appear.
ARGUMENTS = {"l": ["x"], "n": 1, "s": "x", "unit": "C", "where": {"city": "x", "days": 1}}
CALL = {"type": "function", "id": "c000x0000", "function": {"name": "find", "arguments": ARGUMENTS}}
FIRST_MESSAGES = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "", "reasoning_content": "x", "tool_calls": [CALL]},
]
FIRST_ROW = Drawn(-1, "plain", FIRST_MESSAGES, TOOLS, {})


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("name", quick(["qwen3", "gpt_oss", "glm_4_5", "ministral_3"], ["qwen3"]))
def test_every_kind_of_file_trains_the_same_tokens(name, columns, tmp_path):
    tokenizer = tokenizer_of(name)
    conversations = drawn(name, 30)
    records = [as_column(conversation, *COLUMNS[columns]) for conversation in conversations]
    records.insert(0, as_column(FIRST_ROW, *COLUMNS[columns]))
    wanted = [text_example(record, "demonstrations", tokenizer).texts for record in records]
    if columns == "text":  # which keeps the order of arguments
        plain = [{"messages": x.messages, "tools": x.tools} for x in conversations]
        assert wanted[1:] == [text_example(record, "demonstrations", tokenizer).texts for record in plain]
    for kind in FILES:
        examples = load_examples(write(records, tmp_path, kind), "demonstrations", tokenizer)
        assert [example.texts for example in examples] == wanted, kind
