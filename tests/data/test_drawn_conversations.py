"""The templates say what the table of `chat_templates` says, and the drawn conversations have all that they should."""

import itertools
import json
from collections import Counter
from typing import Any

import pytest
from chat_templates import FOLDER, TEMPLATES, tokenizer_of
from drawn_conversations import FLAVOURS, REFUSALS, TOOLS, answer_text, drawn_conversations

IDS = ("c000x0001", "c000x0002")


def turns(thoughts=True, content=True, calls=2):
    """A conversation in which every part has a word of its own."""
    functions = [{"name": "find", "arguments": {"s": "CALL1"}}, {"name": "add_1", "arguments": {"n": 777}}][:calls]
    asks = [{"type": "function", "id": i, "function": f} for i, f in zip(IDS, functions, strict=False)]
    answers = [
        {"role": "tool", "name": f["name"], "tool_call_id": i, "content": f"ANSWER{i}"}
        for i, f in zip(IDS, functions, strict=False)
    ]
    thinks = {"reasoning_content": "THOUGHT1"} if thoughts else {}
    asking = {"role": "assistant", "content": "CONTENT1" if content else "", **thinks, "tool_calls": asks}
    return [
        {"role": "system", "content": "SYSTEM"},
        {"role": "user", "content": "first"},
        *([asking, *answers] if calls else []),
        {"role": "assistant", "content": " CONTENT2 ", "reasoning_content": "THOUGHT2"},
        {"role": "user", "content": "second"},
        {"role": "assistant", "content": "CONTENT3"},
    ]


def rendering(tokenizer, messages, tools=TOOLS, **more):
    return tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, **more)


def shown(tokenizer, messages, tools=TOOLS):
    """Renderings up to each of the assistant's turns."""
    ends = [n for n, message in enumerate(messages, 1) if message["role"] == "assistant"]
    return [rendering(tokenizer, messages[:end], tools) for end in ends]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_lacks_what_the_table_says(name):
    form, tokenizer = TEMPLATES[name], tokenizer_of(name)
    lacks = set()
    if "tools" in form.refuses:
        last = shown(tokenizer, turns(calls=0), [])[0]
    else:
        calls = 1 if "parallel" in form.refuses else 2
        # Only one of content and thoughts, for templates that refuse both.
        first, last = shown(tokenizer, turns(thoughts=False, calls=calls))[:2]
        lacks |= {"call_content"} if "CONTENT1" not in first else set()
        lacks |= {"more_calls"} if calls == 2 and "777" not in first else set()
        lacks |= {"tools"} if "what to find" not in first else set()
        lacks |= {"ids"} if first.count(IDS[0]) == 0 else set()
        assert "CALL1" in first and f"ANSWER{IDS[0]}" in last
        thinking = shown(tokenizer, turns(content=False, calls=calls))[0]
        assert ("THOUGHT1" in thinking) == ("thoughts" not in form.drops)
    lacks |= {"system"} if "SYSTEM" not in last else set()
    lacks |= {"thoughts"} if "THOUGHT2" not in last else set()
    lacks |= {"space"} if " CONTENT2 " not in last else set()
    assert "CONTENT2" in last and lacks == form.drops


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_rewrites_earlier_turns_if_the_table_says_so(name):
    form, tokenizer = TEMPLATES[name], tokenizer_of(name)
    messages = turns(content=False, calls=0 if "tools" in form.refuses else 1)
    texts = shown(tokenizer, messages, [] if "tools" in form.refuses else TOOLS)
    assert any(not later.startswith(text) for text, later in itertools.pairwise(texts)) == form.rewrites


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_refuses_or_loses_what_the_table_says(name):
    form, tokenizer = TEMPLATES[name], tokenizer_of(name)
    calls = 1 if "parallel" in form.refuses else 2
    in_a_row = [{"role": "user", "content": "?"}, *[{"role": "assistant", "content": f"SAID{n}"} for n in range(2)]]
    kept_calls = 1 if "more_calls" in form.drops else 2
    cases = {
        "tools": (turns(calls=1, content=False), ["CALL1", f"ANSWER{IDS[0]}"]),
        "parallel": (turns(calls=2, content=False), ["CALL1", "777"][:kept_calls]),
        "all_beside_calls": (turns(calls=calls)[:3], ["CONTENT1", "THOUGHT1"]),
        "in_a_row": (in_a_row, ["SAID0", "SAID1"]),
    }
    droppable = {"call_content": "CONTENT1", "thoughts": "THOUGHT1"}
    lost = {word for drop, word in droppable.items() if drop in form.drops}
    for refusal, (messages, words) in cases.items():
        if refusal != "tools" and "tools" in form.refuses and refusal != "in_a_row":
            continue
        try:
            text = rendering(tokenizer, messages, [] if refusal == "in_a_row" else TOOLS)
        except Exception:  # templates raise anything
            text = ""
        message = all(word in text for word in words if word not in lost)
        assert message == (refusal not in form.refuses), (refusal, text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_drawn_conversation_is_rendered(name):
    form, tokenizer = TEMPLATES[name], tokenizer_of(name)
    marks = [word for word in (*form.marks[:3], *form.marks.special, *form.marks.added) if word]
    for drawn in drawn_conversations(marks=marks, without=form.refuses)[::6]:
        text = rendering(tokenizer, drawn.messages, drawn.tools)
        assert drawn.messages[-1]["content"].strip() in text or "call_content" in form.drops
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_kept_templates_are_listed_with_their_licence():
    table = (FOLDER / "README.md").read_text()
    for path in FOLDER.glob("*.jinja"):
        assert f"| `{path.name}` |" in table
    assert {form.file for form in TEMPLATES.values() if form.folder == FOLDER} == {
        path.stem for path in FOLDER.glob("*.jinja")
    }


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def normal(record):
    """A plain reader of the records, to compare their normal form with."""
    tools = record.get("tools") or []
    messages = []
    for given in without_nulls(record["messages"]):
        message = {"role": given["role"], "content": given.get("content", "")}
        if isinstance(message["content"], list):
            message["content"] = "".join(part["text"] for part in message["content"])
        message["content"] = answer_text(message["content"])
        thoughts = given.get("reasoning_content", given.get("reasoning"))
        message |= {"reasoning_content": thoughts} if thoughts else {}
        message |= {key: given[key] for key in ("name", "tool_call_id", "tool_calls") if key in given}
        for call in message.get("tool_calls", ()):
            arguments = call["function"].get("arguments", {})
            call["function"]["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
        messages.append(message)
    return messages, without_nulls(json.loads(tools) if isinstance(tools, str) else tools)


def test_records_say_what_the_normal_form_says():
    for drawn in drawn_conversations():
        assert normal(json.loads(json.dumps(drawn.record))) == (drawn.messages, drawn.tools), drawn.number


def test_draws_depend_on_the_seed_alone():
    first, again, other = (drawn_conversations(40, seed) for seed in (0, 0, 1))
    assert first == again and first != other
    assert [x.messages for x in first[:10]] == [x.messages for x in drawn_conversations(10)]


def test_records_have_all_that_users_have():
    """Each kind at least five times, so that a fault in one of them shows."""
    seen = Counter()
    for drawn in drawn_conversations():
        text, messages = json.dumps(drawn.record), drawn.record["messages"]
        roles = [message["role"] for message in messages]
        calls = [call for message in messages for call in message.get("tool_calls") or ()]
        functions = [call["function"] for call in calls]
        seen[drawn.flavour] += 1
        seen["system"] += "system" in roles
        seen["turns"] += roles.count("user") > 1
        seen["row"] += ("assistant", "assistant") in itertools.pairwise(roles)
        seen["parallel"] += any(len(message.get("tool_calls") or ()) > 1 for message in messages)
        seen["ends with calls"] += bool(messages[-1].get("tool_calls"))
        given = [f["arguments"].values() for f in functions if isinstance(f["arguments"], dict)]
        seen["null arguments"] += any(None in values for values in given)
        seen["text arguments"] += any(isinstance(f["arguments"], str) for f in functions)
        seen["null content"] += any(message.get("content", "") is None for message in messages)
        seen["no content"] += any("content" not in message for message in messages)
        seen["empty content"] += any(m.get("tool_calls") and m.get("content") == "" for m in messages)
        seen["content beside calls"] += any(m.get("tool_calls") and bool(m.get("content")) for m in messages)
        seen["object answers"] += any(isinstance(message.get("content"), dict) for message in messages)
        seen["thoughts"] += '"reasoning_content": "' in text
        seen["reasoning"] += '"reasoning": "' in text
        seen["marks"] += any("<|im_end|>" in str(m.get("content")) for m in messages if m["role"] in ("user", "tool"))
        seen["unicode"] += not json.dumps(drawn.messages, ensure_ascii=False).isascii()
        seen["tools as text"] += isinstance(drawn.record.get("tools"), str)
        seen["nulls of schemas"] += drawn.flavour == "arrow" and '"where": null' in text
    assert set(FLAVOURS) <= set(seen) and len(seen) > 20
    assert {kind: number for kind, number in seen.items() if number < 5} == {}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_a_template_refuses_is_not_drawn(refusal):
    conversations = [drawn.messages for drawn in drawn_conversations(without=[refusal])]
    messages = [message for messages in conversations for message in messages]
    pairs = [pair for messages in conversations for pair in itertools.pairwise(m["role"] for m in messages)]
    results = {
        "tools": any("tool_calls" in message for message in messages),
        "parallel": any(len(message.get("tool_calls", ())) > 1 for message in messages),
        "all_beside_calls": any({"tool_calls", "reasoning_content"} <= set(m) and bool(m["content"]) for m in messages),
        "in_a_row": ("assistant", "assistant") in pairs,
    }
    assert not results.pop(refusal)
    assert all(results.values()) or refusal == "tools"
