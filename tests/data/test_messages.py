"""The normal form of messages: every form in which records have them, and what is refused."""

import json

import pytest
from drawn_conversations import drawn_conversations

from funrl.data.json_lines import DataError
from funrl.data.messages import (
    are_usual,
    check_chat_roles,
    normal_messages,
    normal_tools,
    unread_fields,
    without_arrow_nulls,
)


def call(arguments, **more):
    return {"type": "function", **more, "function": {"name": "f", "arguments": arguments}}


def assistant(**fields):
    return {"role": "assistant", **fields}


NORMAL = assistant(content="", tool_calls=[call({"a": 1})])


@pytest.mark.parametrize(
    "given,normal",
    [
        (assistant(content="a"), assistant(content="a")),
        (assistant(content=None, tool_calls=[call('{"a": 1}')]), NORMAL),
        (assistant(tool_calls=[{"name": "f", "arguments": {"a": 1}}]), NORMAL),
        (assistant(content="", refusal=None, function_call=None, tool_calls=[call({"a": 1}, id=None)]), NORMAL),
        (assistant(content="", tool_calls=[call("")]), assistant(content="", tool_calls=[call({})])),
        (assistant(content="", tool_calls=[call(None)]), assistant(content="", tool_calls=[call({})])),
        (
            assistant(content="", tool_calls=[call({"x": None}, id="7")]),
            assistant(content="", tool_calls=[call({"x": None}, id="7")]),  # a null that JSON has was meant
        ),
        (assistant(content="a", tool_calls=None), assistant(content="a")),
        (assistant(content="a", tool_calls=[]), assistant(content="a")),
        (assistant(content="a", reasoning="b"), assistant(content="a", reasoning_content="b")),
        (assistant(content="a", thinking="b", reasoning="b"), assistant(content="a", reasoning_content="b")),
        (assistant(reasoning_content="b"), assistant(content="", reasoning_content="b")),
        (assistant(content="a", weight=0), assistant(content="a", train=False)),
        (assistant(content="a", weight=1, train=True), assistant(content="a")),
        ({"role": "user", "content": "a", "weight": 1}, {"role": "user", "content": "a"}),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "image": None}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "ab"},
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "text": None}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]},
        ),
        ({"role": "tool", "content": {"a": [1, "\u00e9"]}}, {"role": "tool", "content": '{"a": [1, "\u00e9"]}'}),
        ({"role": "tool", "content": 3, "name": "f"}, {"role": "tool", "content": "3", "name": "f"}),
        ({"role": "tool", "content": None}, {"role": "tool", "content": ""}),
        ({"role": "tool", "content": []}, {"role": "tool", "content": "[]"}),
        ({"role": "user", "content": "a", "own": 3, "gone": None}, {"role": "user", "content": "a", "own": 3}),
    ],
)
def test_every_form_of_a_message_has_one_normal_form(given, normal):
    before = json.dumps(given)
    assert normal_messages([given]) == [normal]
    assert normal_messages([normal]) == [normal] and json.dumps(given) == before


@pytest.mark.parametrize(
    "given,problem",
    [
        ("a", 'message 1: "a" is not an object'),
        ({"role": 3, "content": "a"}, "message 1: its role is 3; one of system, developer"),
        ({"role": "user"}, "the content of the user is null; a text is needed"),
        ({"role": "user", "content": 3}, "the content of the user is 3"),
        ({"role": "user", "content": [{"type": "audio"}]}, "the content of the user is .* a list of parts of text"),
        (assistant(content=None), "is null, and neither calls nor thoughts beside it"),
        (assistant(content="", tool_calls={}), "tool_calls is {}; a list of calls is needed"),
        (assistant(content="", tool_calls=[{"function": {}}]), "has no function with a name"),
        (assistant(content="", tool_calls=[call("{a")]), r'the arguments "{a" of a call are not JSON'),
        (assistant(content="", tool_calls=[call("[1]")]), r"the arguments of a call are \[1\]; an object is needed"),
        (assistant(content=None, function_call={"name": "f"}), "it has function_call, an older form; give tool_calls"),
        (assistant(content="a", weight=0.5), "its weight is 0.5; 1 trains the turn, and 0 does not"),
        (assistant(content="a", train="no"), 'its field train is "no"'),
        (assistant(content="a", thinking="b", reasoning="c"), "reasoning and thinking are different texts"),
        (assistant(content="a", reasoning=["b"]), "reasoning is .*; a text is needed"),
    ],
)
def test_what_is_no_message_is_named(given, problem):
    with pytest.raises(DataError, match=problem):
        normal_messages([given])


def test_nulls_of_arrow_are_left_out_of_messages_and_tools_alone():
    inner = {"a": 1, "b": None, "c": {"d": None, "e": [None, {"f": None}]}}
    row = {
        "messages": [assistant(content="", tool_calls=[call(inner)], name=None)],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}, "b": None}}}}],
        "answer": [{"a": None}],
        "more": {"a": None},
        "gone": None,
    }
    clean = without_arrow_nulls(row)
    assert clean["messages"][0]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "c": {"e": [None, {}]}}
    assert "name" not in clean["messages"][0]
    assert clean["tools"][0]["function"]["parameters"] == {"properties": {"a": {}}}
    assert {name: clean[name] for name in ("answer", "more", "gone")} == {
        name: row[name] for name in ("answer", "more", "gone")
    }
    nested = without_arrow_nulls({"data": {"said": row, "a": None}})["data"]  # as --fields=messages:data.said.messages
    assert nested == {"said": clean, "a": None}


def test_messages_that_are_taken_as_usual_are_normal_and_have_nothing_unread():
    usual = 0
    for drawn in drawn_conversations(200, seed=3):
        messages = drawn.record["messages"]
        if are_usual(messages):
            usual += 1
            normal = normal_messages(messages)
            assert unread_fields(normal, "") == []
            check_chat_roles(normal, "")
    assert usual > 20
    for odd in (
        [assistant(content="a", own=1)],
        [{"role": "usr", "content": "a"}],
        [assistant(content="", tool_calls=[call("{")])],
        [assistant(content=None)],
        [assistant(content="a", weight=0)],
        [assistant(content="a", reasoning="b")],
    ):
        assert not are_usual(odd)


def test_roles_and_fields_that_only_the_template_knows():
    messages = normal_messages([{"role": "critic", "content": "a", "score": 3, "own": 1}])
    check_chat_roles(messages, "{% if m.role == 'critic' %}{{ m.score }}")
    assert unread_fields(messages, "{{ m.score }}") == ["own"]
    with pytest.raises(DataError, match="message 1 has the role 'critic', which the chat template does not name"):
        check_chat_roles(messages, "{{ m.critics }}")


def test_tools_are_a_list_or_json():
    tool = {"type": "function", "function": {"name": "f"}}
    for given in ([tool], json.dumps([tool]), [json.dumps(tool)]):
        assert normal_tools(given) == [tool]
    for none in (None, [], "", "null", "[]"):  # an empty cell of CSV is ""
        assert normal_tools(none) == []
    for given in ("[", "3", {"a": 1}, [3], '{"a": 1}'):
        with pytest.raises(DataError, match="tools are a list of JSON schemas"):
            normal_tools(given)
    for given in ([{"type": "function"}], [tool, {"function": {}}], [{"function": "f"}]):
        with pytest.raises(DataError, match=rf"tool {len(given)} is .* is needed"):
            normal_tools(given)
    assert normal_tools([{"type": "web_search"}]) == [{"type": "web_search"}]  # of a template's own
