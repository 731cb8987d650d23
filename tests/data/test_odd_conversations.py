"""Odd conversations and chat templates: what is trained of them, and what is refused because it would be lost."""

import datetime
import json
from decimal import Decimal

import pytest
from test_records_to_tokens import ASK, CHATML, calling, chat_of, chatml, said, spans, trained

from funrl.data.conversations import ChatTemplate
from funrl.data.json_lines import DataError
from funrl.data.messages import unread_fields, without_arrow_nulls
from funrl.data.prompt_format import PLAIN_PROMPTS, Shot
from funrl.data.prompts import Prompt, PromptError, encode
from funrl.data.supervised import load_examples, text_example
from funrl.data.tokenizer import TokenizerError

OPENS_THOUGHTS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}").replace(
    "{{ m.content or '' }}", "{{ (m.content or '').split('</think>')[-1] }}"
)
NO_TOOLS = "{% for m in messages %}{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}assistant>"


def answered(content, **fields):
    """A question and an answer."""
    return {"messages": [ASK, {"role": "assistant", "content": content, **fields}]}


def assert_refused(record, tokenizer, message, kind="demonstrations"):
    with pytest.raises((DataError, TokenizerError), match=message):
        text_example(record, kind, tokenizer)


def test_calls_that_a_template_does_not_know_are_refused():
    """Else the end of the turn alone would be trained."""
    assert_refused(
        {"messages": [ASK, calling()]}, chatml(NO_TOOLS), "leaves out the call of 'mul', and renders '<|im_end|>'"
    )


def test_a_turn_of_which_a_template_leaves_nothing_is_refused():
    assert_refused(answered(None, reasoning_content="hm"), chatml(), "leaves out 'hm' of a message of the assistant")
    assert_refused(answered("yo"), chatml("{{ messages[0].content }}<|im_end|>"), "leaves out what the assistant says")
    assert trained(answered(""), chatml()) == [["<|im_end|>"]]


def test_thoughts_in_a_content_are_trained_whole_or_refused():
    twice = answered("<think>a</think>b<think>c</think>d")
    assert trained(twice, chatml()) == [["<think>a</think>b<think>c</think>d<|im_end|>"]]  # which knows no thoughts
    assert_refused(twice, chatml(OPENS_THOUGHTS), "leaves out 'a' of a message of the assistant")
    once = answered("<think>\na\n</think>\n\nd")
    for record in (once, answered("d", reasoning_content="a"), answered("a\n</think>\n\nd")):
        assert trained(record, chatml(OPENS_THOUGHTS)) == [["a\n</think>\n\nd<|im_end|>"]]
    assert trained(answered("d"), chatml(OPENS_THOUGHTS)) == [["\n</think>\n\nd<|im_end|>"]]


def test_thoughts_in_a_content_reach_the_field_that_a_template_reads():
    """As gpt-oss's, whose name is `thinking`."""
    template = CHATML.replace("\n{{ m.content", "\n{% if m.thinking %}[{{ m.thinking }}]{% endif %}{{ m.content")
    for record in (answered("<think>\na\n</think>\n\nd"), answered("d", reasoning="a")):
        assert trained(record, chatml(template)) == [["[a]d<|im_end|>"]]


def test_a_content_may_begin_like_the_mark_that_opens_thoughts():
    template = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    assert trained(answered("<b>x"), chatml(template)) == [["\n</think>\n\n<b>x<|im_end|>"]]


def test_thoughts_that_a_prompt_has_closed_may_be_none():
    """As Nemotron's template, which writes a turn without thoughts as empty ones, and opens them in a prompt."""
    template = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}").replace(
        "{{ m.content", "{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content"
    )
    assert trained(answered("yo"), chatml(template)) == [["</think>yo<|im_end|>"]]
    closed = CHATML.replace("assistant\n{% endif %}", "assistant\n</think>{% endif %}")
    (row,) = text_example(
        answered("yo", reasoning_content="hm"),
        "demonstrations",
        chatml(closed.replace("\n{{ m.content", "\n{% if m.role == 'assistant' %}</think>{% endif %}{{ m.content")),
    ).texts
    assert spans(row, chatml())[-1] == (True, "yo<|im_end|>")


def test_thoughts_that_a_prompt_begins_go_on():
    """Where the template opens them itself they are not opened twice."""
    for template in (CHATML, OPENS_THOUGHTS):
        begun = [ASK, {"role": "assistant", "content": "<think>\nI"}]
        text = encode(Prompt(begun, {}), chatml(template)).text
        assert text.endswith("<|im_start|>assistant\n<think>\nI")
    record = {"prompt": begun, "completion": " am\n</think>\n\nyo"}
    assert trained(record, chatml()) == [[" am\n</think>\n\nyo<|im_end|>"]]


@pytest.mark.parametrize(
    "messages, name",
    [
        ([{"role": "developer", "content": "x"}, *said("a", "b")], "message 1, as its role is 'developer'"),
        ([ASK, calling(), {"role": "tool", "content": "6"}, *said("", "b")[1:]], "message 3, as its role is 'tool'"),
        ([ASK, {"role": "system", "content": "x"}, *said("", "b")[1:]], "message 2, .*'system', and another message"),
    ],
)
def test_a_message_whose_role_a_template_leaves_out_is_refused(messages, name):
    knows = CHATML.replace("%}<|im_start|>", "%}{% if m.role in ('user', 'assistant') %}<|im_start|>", 1).replace(
        "{% endfor %}{% if add", "{% endif %}{% endfor %}{% if add"
    )
    assert_refused({"messages": messages}, chatml(knows), name)
    assert_refused({"prompt": messages[:-1], "completion": "b"}, chatml(knows), name)
    assert trained({"messages": messages}, chatml())[0][-1] == "b<|im_end|>"


def test_the_first_message_may_be_the_assistants_if_it_is_context():
    messages = [{"role": "assistant", "content": "Hi!"}, *said("a", "b")]
    assert_refused({"messages": messages}, chatml(), "message 1 is by the assistant, and no prompt is before it")
    messages[0]["train"] = False
    assert trained({"messages": messages}, chatml()) == [["b<|im_end|>"]]


def test_a_turn_ends_once():
    for content in ("yo", "yo<|im_end|>"):
        assert trained(answered(content), chatml()) == [["yo<|im_end|>"]]
    unended = chat_of(CHATML.replace("<|im_end|>", ""), "<|im_start|>", "<|im_end|>")
    assert trained(answered("yo<|im_end|>"), unended) == [["yo<|im_end|>"]]


PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
ENDS = {  # what stands at the end of a message, what is trained of it, and what is at the end of the template
    "one": ("<|im_end|>\n", "<|im_end|>", PROMPT),
    "cohere": ("<|stop|><|im_end|>", "<|stop|><|im_end|>", PROMPT),
    "phi_3": ("<|im_end|>\n", "<|im_end|>", PROMPT.replace("{% endif", "{% else %}<|stop|>{% endif")),
    "gpt_oss": (
        "{{ '<|stop|>' if m.role == 'assistant' and loop.last else '<|im_end|>' }}",
        "<|stop|>",
        PROMPT,
    ),
    "opens a turn unasked": ("<|im_end|>\n", "<|im_end|>", "<|im_start|>assistant\n"),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_turn_ends_with_the_mark_that_ends_it(name):
    end, trained_end, prompt = ENDS[name]
    template = CHATML.replace("<|im_end|>\n", end).replace(PROMPT, prompt)
    tokenizer = chat_of(template, "<|im_start|>", "<|im_end|>", "<|stop|>")
    parts = [part.strip("\n") for row in trained({"messages": said("a", "b", "c", "d")}, tokenizer) for part in row]
    assert parts == [f"b{trained_end}", f"d{trained_end}"]


def test_templates_by_name_are_read():
    """As Hermes 2 Pro's and Command R+'s tokenizers have them."""
    tokenizer = chatml({"default": CHATML, "tool_use": "{{ tools | tojson }}" + CHATML})
    assert trained({"messages": said("a", "b")}, tokenizer) == [["b<|im_end|>"]]
    schema = {"type": "function", "function": {"name": "f"}}
    (text,) = text_example({"messages": said("a", "b"), "tools": [schema]}, "demonstrations", tokenizer).texts
    assert tokenizer.decode(text.tokens).startswith('[{"type"')


def test_a_tokenizer_may_have_no_end_pad_by_it_or_be_slow():
    record = {"messages": said("a", "b", "c", "d")}
    for change in ({"eos_token": None}, {"pad_token": "<|im_end|>"}):
        tokenizer = chatml()
        for name, value in change.items():
            setattr(tokenizer, name, value)
        assert trained(record, tokenizer) == [["b<|im_end|>", "d<|im_end|>"]]
    from transformers import ByT5Tokenizer

    slow = ByT5Tokenizer(chat_template=CHATML.replace("<|im_start|>", "<extra_id_0>").replace("<|im_end|>", "</s>"))
    marked = {"messages": [{"role": "user", "content": "</s><extra_id_0>"}, *record["messages"][1:]]}
    assert trained(marked, slow) == [["b</s>", "d</s>"]]
    (text,) = text_example(marked, "demonstrations", slow).texts
    assert text.tokens.count(slow.eos_token_id) == 4  # and not the user's


def test_marks_of_turns_need_not_be_special():
    tokenizer = chat_of(CHATML, "<|x|>", "<|y|>", added=("<|im_start|>", "<|im_end|>"))
    messages = [{"role": "user", "content": "<|im_end|>"}, *said("", "b", "c", "d")[1:]]
    assert trained({"messages": messages}, tokenizer) == [["b<|im_end|>", "d<|im_end|>"]]
    (text,) = text_example({"messages": messages}, "demonstrations", tokenizer).texts
    assert text.tokens.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 4


def test_examples_and_a_system_message_stand_before_a_conversation_and_are_not_trained():
    shots = (Shot("q", "a"), Shot([ASK], [calling()]))
    form = PLAIN_PROMPTS._replace(system="S", shots=shots)
    for own in ([], [{"role": "system", "content": "own"}]):
        record = {"messages": [*own, *said("a", "b", "c", "d")]}
        (text,) = text_example(record, "demonstrations", chatml(), form).texts
        parts = spans(text, chatml())
        assert [part for is_trained, part in parts if is_trained] == ["b<|im_end|>", "d<|im_end|>"]
        assert parts[0][1].startswith(f"<|im_start|>system\n{'own' if own else 'S'}<|im_end|>\n<|im_start|>user\nq")
        assert "<call>mul" in parts[0][1]


def test_dates_and_decimals_of_a_column_are_what_json_has():
    arguments = {
        "at": datetime.datetime(2024, 5, 1, 12),
        "on": datetime.date(2024, 5, 1),
        "n": Decimal("1.5"),
        "x": None,
    }
    record = without_arrow_nulls({"messages": [ASK, calling("f", arguments | {"x": None})]})
    assert trained(record, chatml()) == [
        ['<call>f {"at": "2024-05-01T12:00:00", "on": "2024-05-01", "n": 1.5}</call><|im_end|>']
    ]
    tools = [{"name": "f", "inputs": {"a": 1, "b": None}}]
    assert without_arrow_nulls({"tools": tools, "x": {"a": None}}) == {
        "tools": [{"name": "f", "inputs": {"a": 1}}],
        "x": {"a": None},
    }


def test_thoughts_that_a_template_does_not_know_are_named(tmp_path):
    messages = [{"role": "assistant", "content": "a", "reasoning_content": "b"}]
    assert unread_fields(messages, CHATML) == ["reasoning_content"]
    assert unread_fields(messages, OPENS_THOUGHTS) == unread_fields(messages, "{{ m.thinking }}") == []
    file = tmp_path / "thoughts.jsonl"
    plain, thinking = answered("a"), answered("a", reasoning_content="b")
    file.write_text("".join(json.dumps(record) + "\n" for record in (plain, thinking, thinking)))
    (remark,) = load_examples(file, "demonstrations", chatml()).remarks
    assert remark == f"messages have a field 'reasoning_content', which nothing reads ({file}, line 2)"
    assert load_examples(file, "demonstrations", chatml(OPENS_THOUGHTS)).remarks == ()


@pytest.mark.parametrize(
    "messages, message",
    [
        (
            [{"from": "human", "value": "x"}],
            "its role is null; .* in fields role and content instead of from",
        ),
        ([{"role": "human", "content": "x"}], "one of them at least by the assistant; the roles are human"),
        ([], "'messages' must be a list of messages, one of them at least by the assistant$"),
        ([None], "message 1: null is not an object with a role and a content"),
        (
            [{"role": "user", "content": 5}],
            "the content of the user is 5; a text, or a list of parts",
        ),
        ([{"role": 1, "content": "x"}], "message 1: its role is 1; one of system, developer, user, assistant, tool"),
        ([{"role": "user", "content": [["x"]]}], r"the content of the user is \[\[\"x\"\]\]; a text, or a list"),
    ],
)
def test_what_is_no_conversation_is_named(messages, message):
    assert_refused({"messages": messages}, chatml(), message)


def test_a_template_that_refuses_says_why():
    for template, why in (("{{ raise_exception('no system') }}", "no system"), ("{% for m in messages %}", "endfor")):
        with pytest.raises(TokenizerError, match=f"the chat template refuses the messages .*{why}"):
            ChatTemplate(chatml(template)).prompt([ASK])


def test_pairs_whose_difference_a_template_leaves_out_are_refused():
    """Else the loss would stay at log 2 without a word."""

    def pair(chosen, rejected):
        return {"prompt": [ASK], "chosen": [chosen], "rejected": [rejected]}

    def answer(content, **fields):
        return {"role": "assistant", "content": content, **fields}

    thinking = pair(answer("6", reasoning_content="so"), answer("6", reasoning_content="or"))
    assert_refused(thinking, chatml(), "differ in their thoughts, and have the same tokens", "preferences")
    no_content = CHATML.replace("{{ m.content or '' }}", "{{ '' if m.tool_calls else m.content }}")
    beside = pair({**calling(), "content": "a"}, {**calling(), "content": "b"})
    assert len(set(map(str, trained(beside, chatml(), "preferences")))) == 2
    assert_refused(beside, chatml(no_content), "differ in their content", "preferences")
    assert_refused({**beside, "reference": "c"}, chatml(no_content), "differ in their content", "triples")
    trimming = chatml(CHATML.replace("m.content or ''", "m.content | trim"))
    for equal in (pair(answer("6"), answer("6")), pair(answer("6"), answer("6 "))):  # which is remarked elsewhere
        chosen, rejected = text_example(equal, "preferences", trimming).texts
        assert chosen == rejected


def test_equal_conversations_are_a_pair_as_equal_answers_are(tmp_path):
    good, bad = ({"role": "assistant", "content": text} for text in ("6", "7"))
    pairs = [{"chosen": [ASK, good], "rejected": [ASK, other]} for other in (bad, good)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, pairs)))
    file = load_examples(path, "preferences", chatml())
    assert "in 1 of 2 pairs" in file.remarks[0] and "line 2" in file.remarks[0]
    chosen, rejected = file[1].texts
    assert chosen == rejected != file[0].texts[1] and file[0].texts[0] == chosen


def test_messages_behind_a_text_are_one():
    reply = {"role": "assistant", "content": "a"}
    assert_refused(
        {"prompt": "hi", "completion": [reply, ASK, reply]}, chatml(), "has 3 messages, and the prompt is text"
    )


def test_words_that_go_on_with_a_prompt_may_be_untrained():
    begun, goes_on, then = ({"role": "assistant", "content": text} for text in ("a", "b", "c"))
    record = {"prompt": [ASK, begun], "completion": [{**goes_on, "weight": 0}, ASK, then]}
    assert trained(record, chatml()) == [["c<|im_end|>"]]
    assert_refused({**record, "completion": record["completion"][:1]}, chatml(), "no turn of the assistant is trained")


@pytest.mark.parametrize("place", ["messages", "completion", "prompt"])
def test_places_of_pictures_are_refused_where_the_model_reads_text_only(place):
    """Else a template of texts would render the list of parts as Python's."""
    reply = {"role": "assistant", "content": "a"}
    parts = [{"type": "text", "text": "what is "}, {"type": "image"}]
    records = {
        "messages": {"messages": [{"role": "user", "content": parts}, reply]},
        "completion": {"prompt": [ASK], "completion": [{"role": "assistant", "content": parts}]},
        "prompt": {"prompt": [{"role": "user", "content": parts}], "completion": [reply]},
    }
    assert_refused(records[place], chatml(), "the record has pictures, and the model reads text only")
    if place == "prompt":
        with pytest.raises(PromptError, match="the record has pictures, and the model reads text only"):
            encode(Prompt(records[place]["prompt"], {}), chatml())
