"""Chat templates: only what is new is rendered, and a reply is read as what it says."""

import pytest
from small_chats import CHAT, END, TEMPLATE, TOKENIZER, chat_of, text

from funrl.data.json_lines import DataError
from funrl.data.tokenizer import TokenizerError, character_tokenizer
from funrl.environments.chat import TemplateChat, check_chat
from funrl.environments.forms.tool_calls import read_reply

USER = {"role": "user", "content": "more"}
TOOL = {"role": "tool", "content": "42"}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]

# Qwen3's habits: thoughts before the last question go, an empty thought before the last reply, tools answer together.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}u>{% endif %}[{{ m.content }}]"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}</s>\n{% endif %}"
    "{% elif m.role == 'assistant' %}a>{% if loop.index0 > ns.last and loop.last %}<think>\n</think>\n{% endif %}"
    "{{ m.content.split('</think>')[-1] }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}</s>\n{% else %}u>{{ m.content }}</s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a>{% if think is defined and not think %}<think>\n</think>\n{% endif %}{% endif %}"
)
# Mistral's: tools must answer calls, each by its id, and nothing is between a reply's end and what follows.
STRICT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{% set calls = messages[loop.index0 - 1].tool_calls %}"
    "{% if not calls and messages[loop.index0 - 1].role != 'tool' %}{{ raise_exception('no call') }}{% endif %}"
    "[R]{{ m.content }}[/R]{% elif m.role == 'assistant' %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
    "[C]{{ c.function.name }}{% endfor %}</s>{% else %}[I]{{ m.content }}[/I]{% endif %}{% endfor %}"
)
TEMPLATE_WITHOUT_NAMES = (
    "{% for m in messages %}{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "last", "expected"),
    [
        (TEMPLATE, [USER], END, "\nu>more</s>\na>"),
        (TEMPLATE, [USER], None, "</s>\nu>more</s>\na>"),  # the reply was cut off: its end is context
        (TEMPLATE, [USER], 5, "</s>\nu>more</s>\na>"),  # it ended by a token that is not the template's
        (TEMPLATE, [TOOL, TOOL], END, "\nt>42</s>\nt>42</s>\na>"),
        (THINKING, [USER], END, "\nu>more</s>\na>"),
        (THINKING, [TOOL, TOOL, USER], END, "\nu>[42][42]</s>\nu>more</s>\na>"),
        (STRICT, [USER], END, "[I]more[/I]"),
        (STRICT, [TOOL, TOOL], None, "</s>[R]42[/R][R]42[/R]"),
    ],
)
def test_only_what_is_new_is_rendered(template, messages, last, expected):
    chat = chat_of(template)
    assert text(chat.continuation(messages, TOOLS, last)) == expected
    check_chat(chat, TOOLS)
    reply = {"role": "assistant", "content": "yes"}
    if last == END and "think" not in template:  # then it is also what the template makes of the whole conversation
        opened = chat.opening([USER])
        calls = [{"type": "function", "id": "123456789", "function": {"name": "f", "arguments": {}}}] * 2
        with_calls = reply | ({"tool_calls": calls} if TOOL in messages else {})
        whole = text(chat.opening([USER, with_calls, *messages]))
        assert whole.startswith(text(opened)) and whole.endswith(expected)


def test_arguments_of_the_template_act_on_every_turn():
    chat = TemplateChat(chat_of(THINKING).tokenizer, {"think": False})
    assert text(chat.continuation([USER], (), END)).endswith("a><think>\n</think>\n")
    assert text(chat.opening([USER])) == "u>more</s>\na><think>\n</think>\n"


def test_a_template_that_does_not_append_is_an_error():
    later = "{% for m in messages %}{{ m.content }}{% if loop.last %}END{% else %}-{% endif %}{% endfor %}"
    with pytest.raises(DataError, match=r"does not append: a reply ends with 'END'.*--chat_template=FILE"):
        check_chat(chat_of(later))
    with pytest.raises(TokenizerError, match=r"refuses the messages .*: no tools"):
        check_chat(
            chat_of(
                "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
                "{{ m.content }}{% endfor %}"
            ),
            TOOLS,
        )
    with pytest.raises(TokenizerError, match="leaves out a reply"):
        check_chat(chat_of("nothing"))
    with pytest.raises(TokenizerError, match="no chat template"):
        check_chat(chat_of(None))


def test_no_turn_begins_with_the_space_that_a_tokenizer_puts_before_a_text():
    from tokenizers import Regex, pre_tokenizers

    tokenizer = character_tokenizer("\u2581amore")
    spaced = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [spaced, pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")]
    )
    tokenizer.chat_template = TEMPLATE_WITHOUT_NAMES
    assert tokenizer.decode(tokenizer.encode("more")) == "\u2581more"
    assert tokenizer.decode(TemplateChat(tokenizer).continuation([USER], (), END)) == "more</s>a"


@pytest.mark.parametrize(
    ("written", "content", "calls", "problem"),
    [
        ("just text <b", "just text <b", [], ""),
        ('so <tool_call>{"name": "f", "arguments": {"a": [1]}}</tool_call>', "so", [("f", {"a": [1]})], ""),
        ('<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})], ""),
        ('<tool_call>{"name": "f"}</tool_call><tool_call>x</tool_call>', "", [("f", {})], "not JSON"),
        ('<tool_call>{"name": 3}</tool_call>', "", [], "an object with a name"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "", [], "arguments of f are an object"),
        ('a <tool_call>{"name": "f"', "a", [], "a call has no </tool_call>"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "", [], "recursion"),
        ('<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "", [], "4300"),
    ],
)
def test_calls_are_read_and_what_is_wrong_with_them_is_said(written, content, calls, problem):
    reading = read_reply("hermes", written)
    assert (reading.message["content"], list(reading.tool_calls)) == (content, calls)
    assert len(reading.problems) == bool(problem) and all(problem in item for item in reading.problems)
    assert [call["function"]["name"] for call in reading.message.get("tool_calls", ())] == [name for name, _ in calls]
    ids = TOKENIZER.encode(written[:3000])
    without = CHAT.read(TOKENIZER.encode("a>"), ids)  # without tools nothing is a call
    assert (without.message["content"], without.tool_calls) == (written[:3000], ())


def test_a_tokenizer_s_own_template_of_responses_is_used():
    chat = chat_of()
    call = {"type": "function", "function": "{content}"}
    chat.tokenizer.response_template = {
        "start_anchor": "a>",
        "defaults": {"role": "assistant"},
        "fields": {
            "content": {"close": "</s>"},
            "tool_calls": {"open": "[", "close": "]", "repeats": True, "content": "json", "transform": call},
        },
    }
    before, written = TOKENIZER.encode("u>go</s>\na>"), 'so [{"name": "f", "arguments": {"x": 1}}]'
    reading = chat.read(before, TOKENIZER.encode(written), TOOLS)
    assert (reading.tool_calls, reading.problems) == ([("f", {"x": 1})], ())
    assert reading.message["content"].strip() == "so" and reading.message["role"] == "assistant"
    reading = chat.read(before, TOKENIZER.encode("so [not json]"), TOOLS)
    assert not reading.tool_calls
    assert reading.problems == ["the reply cannot be read: a part of it is not JSON: expecting value at 'not json'"]
    assert reading.message == {"role": "assistant", "content": "so [not json]"}
