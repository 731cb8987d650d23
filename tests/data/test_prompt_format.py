"""The format of prompts: templates, system messages, solved examples, tools, and arguments of the chat template."""

import json

import pytest

from funrl.data.conversations import encode_prompt
from funrl.data.json_lines import DataError
from funrl.data.prompt_format import (
    PromptFormat,
    Shot,
    format_prompt,
    marked,
    read_shots,
    read_tools,
    template_arguments,
    text_of_flag,
    tools_of,
    with_own_pictures,
)
from funrl.data.supervised import text_example
from funrl.data.tokenizer import character_tokenizer

TEMPLATE = (
    "{% if tools %}[{% for t in tools %}{{ t.name }}{% endfor %}]{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% if think is defined and not think %}-{% endif %}{% endif %}"
)
SHOTS = (Shot("x", "X"), Shot("y", "Y"))
USER = [{"role": "user", "content": "q"}]
OWN = [{"role": "system", "content": "own"}, *USER]


@pytest.fixture
def tokenizer():
    made = character_tokenizer("abcdefghijklmnopqrstuvwxyzXYQ:;[]- \n")
    made.chat_template = TEMPLATE
    return made


def encoded(tokenizer, prompt, form, tools=None):
    return encode_prompt(tokenizer, format_prompt(prompt, form), tools_of(tools, form), arguments=form.arguments)


@pytest.mark.parametrize(
    ("prompt", "form", "text"),
    [
        ("q", PromptFormat(), "q"),
        ("q", PromptFormat(text="Q:{prompt} a:", shots=SHOTS), "Q:x a:X\n\nQ:y a:Y\n\nQ:q a:"),
        ("q", PromptFormat(chat=True), "u:q;a:"),
        ("q", PromptFormat(chat=True, text="say {prompt}", system="be brief"), "s:be brief;u:say q;a:"),
        (USER, PromptFormat(), "u:q;a:"),
        (USER, PromptFormat(chat=True, system="s", shots=SHOTS), "s:s;u:x;a:X;u:y;a:Y;u:q;a:"),
        (OWN, PromptFormat(chat=True, system="not this", shots=SHOTS[:1]), "s:own;u:x;a:X;u:q;a:"),
        (USER, PromptFormat(tools=({"name": "f"},), arguments={"think": False}), "[f]u:q;a:-"),
        (USER, PromptFormat(arguments={"think": True}), "u:q;a:"),
    ],
)
def test_a_prompt_in_its_format(prompt, form, text, tokenizer):
    before = json.dumps(prompt)
    tokens, made = encoded(tokenizer, prompt, form)
    assert made == text and tokenizer.decode(tokens) == text
    assert json.dumps(prompt) == before


def test_a_records_own_tools_come_first(tokenizer):
    form = PromptFormat(tools=({"name": "f"},))
    for own in ([{"name": "g"}], '[{"name": "g"}]'):
        assert encoded(tokenizer, USER, form, own)[1] == "[g]u:q;a:"
    for wrong in ("[", "3", [1]):
        with pytest.raises(DataError, match="tools are a list of JSON schemas"):
            encoded(tokenizer, USER, form, wrong)


def test_examples_of_messages_need_a_chat():
    with pytest.raises(DataError, match="this prompt is text; give --chat_template=own"):
        format_prompt("q", PromptFormat(shots=(Shot(USER, "A"),)))


def test_solved_examples_are_the_first_records_of_a_file(tmp_path):
    path = tmp_path / "shots.jsonl"
    rows = [{"question": "a", "answer": "b"}, {"prompt": "c", "completion": "d", "answer": 3}, {"prompt": "e"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read_shots(f"{path}:2", {}) == (Shot("a", "b"), Shot("c", "d"))
    for text, item in (
        (f"{path}:3", "line 3: an example has a prompt, and a text or messages as its completion, answer, solution"),
        (f"{path}:9", "line 3: an example"),
        (str(path), "write FILE:n, such as examples.jsonl:4"),
        (f"{path}:0", "write FILE:n"),
        ("nowhere.jsonl:2", "nowhere.jsonl: no such file"),
    ):
        with pytest.raises(DataError, match=item):
            read_shots(text, {})
    path.write_text(json.dumps(rows[0]))
    with pytest.raises(DataError, match="the file has 1 records"):
        read_shots(f"{path}:2", {})


def test_texts_and_arguments_of_flags(tmp_path):
    (tmp_path / "system.txt").write_text("be\nbrief")
    (tmp_path / "tools.json").write_text('[{"name": "f"}]')
    assert text_of_flag("be brief") == "be brief" and text_of_flag(f"{tmp_path}/system.txt") == "be\nbrief"
    assert read_tools(f"{tmp_path}/tools.json") == ({"name": "f"},)
    with pytest.raises(DataError, match=r"gone\.txt: it cannot be read: no such file"):
        text_of_flag(f"{tmp_path}/gone.txt")
    assert template_arguments("think:false,effort:high,n:2") == {"think": False, "effort": "high", "n": 2}
    for text in ("", "think", "think:true,think:false", ":x"):
        with pytest.raises(DataError, match="write NAME:VALUE"):
            template_arguments(text)


def test_texts_to_learn_from_have_the_format_too(tokenizer):
    form = PromptFormat(chat=True, system="s", arguments={"think": False})
    (text,) = text_example({"prompt": "q", "completion": "c"}, "demonstrations", tokenizer, form).texts
    assert tokenizer.decode(text.tokens) == "s:s;u:q;a:-c</s>" and sum(text.trained) == 2
    turns = [*USER, {"role": "assistant", "content": "c"}]
    (text,) = text_example({"messages": turns}, "demonstrations", tokenizer, PromptFormat(system="s")).texts
    assert tokenizer.decode(text.tokens) == "s:s;u:q;a:c</s>" and sum(text.trained) == 2


def test_messages_without_content_stay_so_beside_pictures(tokenizer):
    calls = {"role": "assistant", "content": None, "tool_calls": []}
    shown = marked([{"role": "user", "content": "<image>q"}, calls], tokenizer)
    question = {"type": "text", "text": "q"}
    assert shown == [{"role": "user", "content": [{"type": "image"}, question]}, calls]
    own = [{"type": "image", "image": "a.png"}, question]
    assert with_own_pictures(shown, ["a.png"]) == [{"role": "user", "content": own}, calls]


@pytest.mark.parametrize("pictures", [[], ["a.png", "b.png"]])
def test_places_without_a_picture_of_their_own_are_refused(pictures):
    with pytest.raises(DataError, match=f"1 places for pictures in the messages, and {len(pictures)} pictures"):
        with_own_pictures([{"role": "user", "content": [{"type": "image"}]}], pictures)
