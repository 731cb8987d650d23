"""`funrl show` prints records as they are trained, and what differs between a record and its tokens."""

import json
import re
import string

import pytest

from funrl.cli import main as cli
from funrl.cli.show import run_words
from funrl.data.conversations import Text
from funrl.data.tokenizer import chat_character_tokenizer, load_tokenizer
from funrl.track.report.record_page import joined_pieces, text_pieces

MARKS = ("<|user|>", "<|tool|>", "<|assistant|>", "<|end|>", "<think>", "</think>")
# Thoughts of earlier turns are left out once a user speaks again.
TEMPLATE = """\
{%- set last = namespace(user=-1) -%}
{%- for m in messages if m.role == "user" %}{% set last.user = messages.index(m) %}{% endfor -%}
{%- for m in messages -%}
<|{{ m.role }}|>
{%- if m.reasoning_content and loop.index0 > last.user %}<think>{{ m.reasoning_content }}</think>{% endif -%}
{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments|tojson }}){% endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": "two"}'}}
CHAT = {
    "id": 7,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Add"}, {"type": "text", "text": " <|end|>."}]},
        {"role": "assistant", "content": None, "reasoning": "Call.", "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "content": {"sum": 5}},
        {"role": "assistant", "content": "Five.", "mood": "glad"},
        {"role": "user", "content": "And\nyou? "},
        {"role": "assistant", "content": "I am.", "weight": 0},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Bye."},
    ],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    chat_character_tokenizer(string.printable, MARKS, TEMPLATE, unknown="#").save_pretrained(folder)
    return folder


@pytest.fixture
def show(tmp_path, capsys, model, monkeypatch):
    """Run `funrl show` on records: (status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def run(words, *records, name="data.jsonl", model=model):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        status = cli.main(["funrl", "show", *words.split(), f"--model={model}"])
        return status, *capsys.readouterr()

    return run


def test_a_conversation_and_all_that_was_changed(show):
    status, out, _ = show("sft --data=data.jsonl", CHAT)
    assert status == 0
    assert out.splitlines()[3:] == [
        "data.jsonl, line 1  row 1 of 2: 59 tokens, 31 trained; row 2 of 2: 81 tokens, 5 trained",
        "  messages, message 1 (user): 2 parts of text are joined",
        "  messages, message 1 (user): <|end|> is text in it, and no special token",
        "  messages, message 2 (assistant): the arguments of 1 call are decoded from JSON text",
        "  messages, message 2 (assistant): reasoning is read as reasoning_content",
        "  messages, message 2 (assistant): fields that are null are left out: refusal",
        "  messages, message 3 (tool): its content is written as JSON",
        "  messages, message 6 (assistant): not trained: weight 0",
        "  fields of messages that nothing reads: mood",
        "  columns that nothing reads: id",
        "  the chat template renders earlier turns otherwise later: each row trains other turns",
        "--- row 1 of 2",
        '<|user|>Add <|end|>.<|end|><|assistant|>{+<think>Call.</think>add({"a": "two"})<|end|>+}<|tool|>{"sum": 5}'
        "<|end|><|assistant|>{+Five.<|end|>+}",
        "--- row 2 of 2",
        '<|user|>Add <|end|>.<|end|><|assistant|>add({"a": "two"})<|end|><|tool|>{"sum": 5}<|end|>'
        "<|assistant|>Five.<|end|><|user|>And\u21b5",
        "you?\u00b7<|end|><|assistant|>I am.<|end|><|user|>Bye<|end|><|assistant|>{+Bye.<|end|>+}",
    ]


@pytest.mark.parametrize(
    ("template", "remark"),
    [
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}", "its thoughts are not in the"),
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content[:2] }}<|end|>{% endfor %}", "(user): its content is not"),
        (
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}",
            "</s> is added and trained: the chat template has nothing that ends the text",
        ),
    ],
)
def test_what_a_template_drops_is_said(template, remark, show, tmp_path):
    (tmp_path / "own.jinja").write_text(f"{template}{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}")
    thinking = {"role": "assistant", "content": "Five.", "reasoning": "2 + 3"}
    status, out, _ = show("data.jsonl --chat_template=own.jinja", {"messages": [CHAT["messages"][0], thinking]})
    assert status == 0 and remark in out


def test_calls_that_a_template_drops_are_refused(show, tmp_path):
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    (tmp_path / "own.jinja").write_text(f"{template}{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}")
    status, _, problem = show("data.jsonl --chat_template=own.jinja", {"messages": CHAT["messages"][:2]})
    assert status != 0 and "data.jsonl, line 1: the chat template leaves out the call of 'add'" in problem


def test_a_prompt_of_text_and_tools_that_nothing_shows(show):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    record = {"prompt": "1+1=", "completion": "2", "tools": tools, "note": "x"}
    _, out, _ = show("sft --data=data.jsonl", record)
    assert "tools are not shown: the prompt is text" in out and "columns that nothing reads: note" in out
    assert "  </s> is added and trained: the record has nothing that ends the text" in out and "1+1={+2</s>+}" in out
    _, out, _ = show("sft --data=data.jsonl --chat_template=own", record)
    assert "tools that the chat template does not show: add" in out


def test_pairs_have_their_shared_tokens_once(show):
    ask = [{"role": "user", "content": "Hi"}]
    pair = {
        "chosen": [*ask, {"role": "assistant", "content": "Hey you"}],
        "rejected": [*ask, {"role": "assistant", "content": "Hey"}],
    }
    _, out, _ = show("data.jsonl", pair)
    assert out.splitlines()[0].startswith("funrl dpo --data=data.jsonl")
    assert out.splitlines()[3:] == [
        "data.jsonl, line 1  chosen: 13 tokens, 8 trained; rejected: 9 tokens, 4 trained",
        "  the prompt is what its texts share: the first messages (1)",
        "--- shared",
        "<|user|>Hi<|end|><|assistant|>{+Hey+}",
        "--- chosen",
        "{+\u00b7you<|end|>+}",
        "--- rejected",
        "{+<|end|>+}",
    ]
    _, out, _ = show("dpo --data=data.jsonl", {"prompt": "a", "chosen": "b", "rejected": "b"})
    assert "  chosen and rejected are equal: there is nothing to learn\n" in out
    _, out, _ = show("reward_model --data=data.jsonl", pair)
    assert "{+<pad>+}" in out and "trained is the model's number at the token that is appended" in out
    _, out, _ = show("kto --data=data.jsonl", pair)
    assert [line for line in out.splitlines() if line.startswith("---")] == ["--- label 1", "--- label 0"]


def test_steps_have_labels_and_ratings_one(show):
    _, out, _ = show("data.jsonl", {"prompt": "1+1+1=", "completions": ["2+1", "3"], "labels": [True, 0.5]})
    assert "1+1+1=2+1{+\u21b5 (label 1) +}\n3{+\u21b5 (label 0.5) +}\n" in out
    _, out, _ = show("data.jsonl", {"prompt": "1+1=", "completion": "2", "label": False})
    assert "--- label 0\n1+1={+2</s>+}\n" in out


def test_a_prompt_of_a_run_needs_no_reward_and_has_its_fields(show):
    record = {"question": "1+1=", "answer": "2", "demonstration": "2!"}
    status, out, _ = show("data.jsonl --system_prompt=Short. --few_shot=data.jsonl:1", record)
    assert status == 0 and "left out: it is an example of --few_shot" in out
    turn = "<|user|>1+1=<|end|><|assistant|>"
    assert f"--- prompt, which the policy continues\n<|system|>Short.<|end|>{turn}2<|end|>{turn}\n" in out
    assert 'field answer: "2"\nfield demonstration: "2!"\n' in out and "{+" not in out.split("context")[1]
    _, out, _ = show("chord --prompts=data.jsonl --reward=exact", record)
    assert "--- demonstration\n1+1={+2!</s>+}\n" in out


def test_the_embedded_task_needs_no_model(capsys):
    assert cli.main(["funrl", "show", "dpo", "--record=2,4"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^arithmetic, example (\d)", out, re.MULTILINE) == ["2", "4"] and "</s>+}" in out


def test_parquet_has_nulls_and_rows(show, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] for _ in range(2)]
    rows[1][1]["reasoning_content"] = "c"
    datasets.Dataset.from_list([{"messages": row} for row in rows]).to_parquet(str(tmp_path / "t.parquet"))
    _, out, _ = show("sft --data=t.parquet --record=1")
    assert "t.parquet, row 1" in out and "  nulls that the table has for absent keys are left out\n" in out


def test_texts_that_are_too_long(show):
    record = {"prompt": "1+1=", "completion": "2"}
    assert "the run refuses it: data.jsonl, line 1: the text has 6" in show("data.jsonl --max_text_tokens=4", record)[1]
    long = "data.jsonl --max_text_tokens=4 --long_prompts="
    assert "left out (--long_prompts=drop): --max_text_tokens is 4" in show(f"{long}drop", record)[1]
    out = show(f"{long}truncate", record)[1]
    assert "shortened to 4 tokens, as --max_text_tokens is 4" in out and "\n1={+2</s>+}\n" in out


def test_ids_of_tokens_and_the_page(show, tmp_path, model):
    record = {"prompt": "a<", "completion": "\x1b[1m b"}
    _, out, _ = show("data.jsonl --tokens --output=out/page.html", record)
    a, end = load_tokenizer(model).convert_tokens_to_ids(["a", "</s>"])
    assert f"a {a} < " in out and f"</s> {end} +}}" in out and "\x1b" not in out
    page = (tmp_path / "out/page.html").read_text()
    assert f'<span class="" title="{a}">a</span>' in page and f'"trained special" title="{end}">&lt;/s&gt;<' in page
    assert "\x1b" not in page and "http" not in page.replace("http-equiv", "")


def test_a_character_of_several_tokens_is_one_piece():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    ids = tokenizer.encode("a\u00e9\U0001f600!")
    pieces = text_pieces(Text(ids, [True] * len(ids)), tokenizer)
    assert [(piece.text, len(piece.ids)) for piece in pieces] == [("a", 1), ("\u00e9", 2), ("\U0001f600", 4), ("!", 1)]
    assert [piece.text for piece in joined_pieces(pieces)] == ["a\u00e9\U0001f600!"]


@pytest.mark.parametrize(
    ("columns", "recipe"),
    [
        (("prompt", "chosen", "rejected", "reference"), "tpo"),
        (("prompt", "chosen", "rejected"), "dpo"),
        (("prompt", "completion", "label"), "kto"),
        (("prompt", "completions", "labels"), "process_reward_model"),
        (("messages",), "sft"),
        (("text",), "sft"),
        (("question", "answer"), "grpo"),
    ],
)
def test_a_file_alone_is_shown_for_the_recipe_of_its_columns(columns, recipe, tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(dict.fromkeys(columns, "x")))
    flag = "prompts" if recipe == "grpo" else "data"
    assert run_words([str(file), "--seed=1"]) == [recipe, f"--{flag}={file}", "--seed=1"]


@pytest.mark.parametrize(
    ("words", "record", "says"),
    [
        ("data.jsonl", {"messages": [{"role": "user"}]}, "data.jsonl, line 1: 'messages', message 1: the content of"),
        ("grpo --prompts=data.jsonl", {"text": "x"}, "data.jsonl, line 1: there is no field 'prompt'"),
        ("data.jsonl --record=2", {"text": "x"}, "--record=2: data.jsonl has no record there"),
        ("data.jsonl --record=0", {"text": "x"}, "--record=0: it must be numbers of lines or rows, such as 3,17"),
        ("data.jsonl --count=0", {"text": "x"}, "--count=0: it must be at least 1"),
        ("nofile.jsonl", {"text": "x"}, "'nofile.jsonl' is not a recipe, and no file of records: no such file"),
        ("data.jsonl", "text", "data.jsonl: there is no record with columns at its begin"),
        ("data.jsonl --output=data.jsonl/page.html", {"text": "xy"}, "data.jsonl/page.html: cannot be written"),
        ("", {"text": "x"}, "usage: funrl show NAME|FILE"),
    ],
)
def test_bad_input_is_one_line(words, record, says, show):
    status, _, err = show(words, record)
    assert status == 2 and err.startswith(f"error: {says}") and err.count("\n") == 1


def test_a_tokenizer_that_refuses_a_text_names_its_line(tmp_path, capsys):
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"text": "abc"}))
    assert cli.main(["funrl", "show", str(file)]) == 2
    assert f"error: {file}, line 1: " in capsys.readouterr().err


def test_colours_of_a_terminal(show, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, out, _ = show("data.jsonl", {"prompt": "1+1=", "completion": "2"})
    assert "\x1b[2m1+1=\x1b[0m\x1b[32m2\x1b[0m\x1b[30;42m</s>\x1b[0m\n" in out and "{+" not in out
    monkeypatch.setenv("NO_COLOR", "1")
    _, out, _ = show("data.jsonl", {"prompt": "1+1=", "completion": "2"})
    assert "{+" in out and "\x1b[32m" not in out
