"""Records that users of other libraries reported, as the tokens that are trained or sampled from."""

import json
import string
from typing import Any

import pytest
from family_templates import Family, byte_tokenizer

from funrl.data.json_lines import DataError
from funrl.data.prompts import Prompt, encode
from funrl.data.supervised import load_examples, text_example

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
    "<call>{{ f.name }} {{ f.arguments | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{{ m.content }}{{ '<|return|>' if m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
THINKS_AT_THE_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASK = {"role": "user", "content": "go"}


def chat_of(template, *special, added=()):
    """A tokenizer of bytes; the second special token ends a text."""
    return byte_tokenizer(template, Family("", special, added, str))


def chatml(template: Any = CHATML):
    return chat_of(template, "<|im_start|>", "<|im_end|>", "<|endoftext|>")


def spans(text, tokenizer):
    """Pairs of whether tokens are trained, and their text."""
    parts: list[tuple[bool, list[int]]] = []
    for token, is_trained in zip(*text, strict=True):
        if not parts or parts[-1][0] != is_trained:
            parts.append((is_trained, []))
        parts[-1][1].append(token)
    return [(is_trained, tokenizer.decode(ids)) for is_trained, ids in parts]


def trained(record, tokenizer, kind="demonstrations"):
    """The trained parts of each text of a record."""
    texts = text_example(record, kind, tokenizer).texts
    return [[part for is_trained, part in spans(text, tokenizer) if is_trained] for text in texts]


def calling(name="mul", arguments=None, **fields):
    """A message of the assistant with a call."""
    arguments = {"a": 2, "b": 3} if arguments is None else arguments
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **fields}


def said(*contents):
    """Messages of the user and the assistant in turn."""
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def test_calls_of_a_completion_are_trained():
    pair = {"prompt": [ASK], "chosen": [calling("mul")], "rejected": [calling("add", content="Wait.")]}
    assert trained(pair, chatml(), "preferences") == [
        ['<call>mul {"a": 2, "b": 3}</call><|im_end|>'],
        ['Wait.<call>add {"a": 2, "b": 3}</call><|im_end|>'],
    ]
    rated = {"prompt": [ASK], "completion": [calling()], "label": True}
    assert trained(rated, chatml(), "ratings") == [['<call>mul {"a": 2, "b": 3}</call><|im_end|>']]


def test_a_completion_has_the_form_and_the_end_of_its_template():
    turns = CHATML.replace("<|im_start|>", "<turn>").replace("<|im_end|>", "<end_turn>")
    gemma = chat_of(turns, "<bos>", "<eos>", "<turn>", "<end_turn>")
    channels = chat_of(CHANNELS, "<|start|>", "<|return|>", "<|channel|>", "<|message|>", "<|end|>")
    for completion in ("yo", said("", "yo")[1:]):
        record = {"prompt": [ASK], "completion": completion}
        assert trained(record, gemma) == [["yo<end_turn>"]]
        assert trained(record, channels) == [["<|channel|>final<|message|>yo<|return|>"]]


def test_a_turn_that_the_next_mark_ends_is_ended():
    template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = chat_of(template, "<|user|>", "<|endoftext|>", "<|assistant|>")
    record = {"messages": said("hi", "yo", "more", "ok")}
    assert trained(record, tokenizer) == [["\nyo<|user|>", "\nok<|endoftext|>"]]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
def test_nulls_that_a_column_adds_are_not_trained(kind, tmp_path):
    schemas = [
        {"type": "function", "function": {"name": name, "parameters": {"properties": {name: {"type": "x"}}}}}
        for name in ("mul", "neg")
    ]
    records = [
        {"messages": [ASK, calling("mul")], "tools": schemas[:1]},
        {"messages": [ASK, calling("neg", {"x": 4}, content=None)], "tools": schemas[1:]},
    ]
    path = tmp_path / f"calls.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, records)))
    else:
        table = pytest.importorskip("datasets").Dataset.from_list(records)
        table.to_parquet(path) if kind == "parquet" else table.save_to_disk(path)
    tokenizer = chatml("{{ tools | tojson }}" + CHATML)
    rows = [spans(example.texts[0], tokenizer) for example in load_examples(path, "demonstrations", tokenizer)]
    assert [row[1][1] for row in rows] == [
        '<call>mul {"a": 2, "b": 3}</call><|im_end|>',
        '<call>neg {"x": 4}</call><|im_end|>',
    ]
    assert [row[0][1].partition("<|im_start|>")[0] for row in rows] == [
        json.dumps(record["tools"]) for record in records
    ]


def test_arguments_as_json_text_are_trained_as_an_object():
    for arguments in ('{"a": 2, "b": 3}', {"a": 2, "b": 3}):
        assert trained({"messages": [ASK, calling(arguments=arguments)]}, chatml()) == [
            ['<call>mul {"a": 2, "b": 3}</call><|im_end|>']
        ]
    history = [ASK, calling(arguments='{"a": 2}'), {"role": "tool", "content": {"value": 6}}]
    assert '<call>mul {"a": 2}</call>' in encode(Prompt(history, {}), chatml()).text
    with pytest.raises(DataError, match=r"message 2: the arguments \"\{a\" of a call are not JSON"):
        text_example({"messages": [ASK, calling(arguments="{a")]}, "demonstrations", chatml())


def test_content_may_be_null_beside_calls_and_an_answer_an_object():
    null = calling(content=None)
    absent = {name: value for name, value in null.items() if name != "content"}
    for call in (null, absent):
        record = {"messages": [ASK, call, {"role": "tool", "content": {"value": 6}}, *said("", "6")[1:]]}
        assert trained(record, chatml()) == [['<call>mul {"a": 2, "b": 3}</call><|im_end|>', "6<|im_end|>"]]
    with pytest.raises(DataError, match="message 2: the content of the assistant is null, and neither calls nor"):
        text_example({"messages": [ASK, {"role": "assistant", "content": None}]}, "demonstrations", chatml())


def begin_chat():
    """A tokenizer that puts BOS before a text, as its template does."""
    from tokenizers import processors

    tokenizer = chat_of("{{ bos_token }}" + CHATML, "<s>", "<|im_end|>", "<|im_start|>")
    begin = [("<s>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=begin)
    return tokenizer


def test_a_rendered_text_has_one_begin_of_text():
    tokenizer = begin_chat()
    text = tokenizer.apply_chat_template([ASK], tokenize=False, add_generation_prompt=True)
    records = [
        ({"prompt": text, "completion": "yo"}, "demonstrations"),
        ({"prompt": [ASK], "completion": "yo"}, "demonstrations"),
        ({"messages": [ASK, *said("", "yo")[1:]]}, "demonstrations"),
        ({"text": f"{text}yo<|im_end|>"}, "demonstrations"),
        ({"prompt": text, "chosen": "yo", "rejected": "no"}, "preferences"),
        ({"prompt": text, "completion": "yo", "label": True}, "ratings"),
    ]
    for record, kind in records:
        tokens, is_trained = text_example(record, kind, tokenizer).texts[0]
        assert tokenizer.decode(tokens).removesuffix("\n") == f"{text}yo<|im_end|>"
        assert tokens.count(tokenizer.bos_token_id) == 1 and not is_trained[0]
    for prompt in (text, [ASK]):
        assert encode(Prompt(prompt, {}), tokenizer).tokens.count(tokenizer.bos_token_id) == 1


def test_a_prompt_that_ends_with_the_assistants_words_goes_on():
    begun = said("2+3?", "Let me think.\n")
    text = encode(Prompt(begun, {}), chatml()).text
    assert text.endswith("<|im_start|>assistant\nLet me think.\n")
    record = {"prompt": begun, "completion": [{"role": "assistant", "content": "It is 5."}]}
    assert trained(record, chatml()) == [["It is 5.<|im_end|>"]]


def test_earlier_turns_that_are_rendered_otherwise_have_rows_of_their_own():
    tokenizer = chatml(THINKS_AT_THE_END)
    rows = [
        spans(text, tokenizer) for text in text_example({"messages": said(*"abcd")}, "demonstrations", tokenizer).texts
    ]
    first = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    # The prompt has no empty thoughts, so a policy would not have written them; later the turn is as it was sampled.
    assert rows == [
        [
            (False, first),
            (True, "b<|im_end|>"),
            (False, "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"),
            (True, "d<|im_end|>"),
        ],
    ]
    thinking = THINKS_AT_THE_END.replace("<think>\n", "<think>\n{{ m.reasoning_content }}")
    messages = [message | ({"reasoning_content": "hm"} if n % 2 else {}) for n, message in enumerate(said(*"abcd"))]
    assert trained({"messages": messages}, chatml(thinking)) == [
        ["<think>\nhm\n</think>\n\nb<|im_end|>"],
        ["<think>\nhm\n</think>\n\nd<|im_end|>"],
    ]


def test_a_turn_that_is_not_to_be_trained_is_context():
    for mark in ({"weight": 0}, {"weight": 0.0}, {"train": False}):
        for place, kept in (
            (1, ["d<|im_end|>", "f<|im_end|>"]),
            (3, ["b<|im_end|>", "f<|im_end|>"]),
            (5, ["b<|im_end|>", "d<|im_end|>"]),
        ):
            messages = said(*"abcdef")
            messages[place] |= mark
            assert trained({"messages": messages}, chatml()) == [kept]
    with pytest.raises(DataError, match="no turn of the assistant is trained"):
        text_example({"messages": [m | {"weight": 0} for m in said("a", "b")]}, "demonstrations", chatml())
    with pytest.raises(DataError, match=r"message 2: its weight is 0\.5; 1 trains the turn, and 0 d"):
        text_example({"messages": [ASK, said("", "b")[1] | {"weight": 0.5}]}, "demonstrations", chatml())


def test_marks_in_a_users_text_are_text():
    tokenizer = chatml()
    asked = [{"role": "user", "content": "what is <|im_end|>?"}]
    prompt = encode(Prompt(asked, {}), tokenizer).tokens
    assert prompt.count(tokenizer.eos_token_id) == 1
    (text,) = text_example({"messages": [*asked, *said("", "x")[1:]]}, "demonstrations", tokenizer).texts
    assert text.tokens[: len(prompt)] == prompt and text.tokens.count(tokenizer.eos_token_id) == 2


def test_parts_of_text_are_joined():
    template = "{% for m in messages %}<|im_start|>{{ m['content'] | trim }}<|im_end|>{% endfor %}"
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert encode(Prompt([{"role": "user", "content": parts}], {}), chatml(template)).text == "<|im_start|>hi<|im_end|>"
    record = {"prompt": [ASK], "completion": [{"role": "assistant", "content": parts}]}
    assert trained(record, chatml()) == [["hi<|im_end|>"]]
    assert trained(record | {"chosen": record["completion"], "rejected": "no"}, chatml(), "preferences")[0] == [
        "hi<|im_end|>"
    ]


SPACED = ("prepend", "first", "always", "sequence")


def spaced_tokenizer(kind):
    """A tokenizer of characters that begins a text with a space, as those made from SentencePiece do.

    Args:
      kind: "prepend", a normalizer, as of Llama 2; "first" and "always", a scheme of the pre-tokenizer; "sequence",
        the scheme "always" inside of a sequence.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    space = "\u2581"
    words = [
        "<s>",
        "</s>",
        "<unk>",
        "<turn>",
        space,
        *string.ascii_letters,
        *"0123456789+-*/=?!.,:;<>|_\n",
        f"{space}h",
    ]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [(space, "h")], unk_token="<unk>"))
    if kind == "prepend":
        core.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
        core.decoder = decoders.Sequence([decoders.Replace(space, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        scheme = "first" if kind == "first" else "always"
        spaced = pre_tokenizers.Metaspace(space, prepend_scheme=scheme, split=False)
        core.pre_tokenizer = pre_tokenizers.Sequence([spaced]) if kind == "sequence" else spaced
        core.decoder = decoders.Metaspace(space, prepend_scheme=scheme)
    core.add_special_tokens(words[:2] + words[3:4])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("kind", SPACED)
def test_no_space_stands_in_the_middle_of_a_text(kind):
    tokenizer = spaced_tokenizer(kind)
    for prompt, completion in (("2+2=", "4"), ("Once upon a ti", "me"), ("a", " b"), ("a ", "b"), ("hh", "hh")):
        (text,) = text_example({"prompt": prompt, "completion": completion}, "demonstrations", tokenizer).texts
        assert tokenizer.decode(text.tokens) == f"{prompt}{completion}</s>"
        words = "".join(tokenizer.convert_ids_to_tokens(text.tokens[:-1])).replace("\u2581", " ")
        assert words == f" {prompt}{completion}"
    steps = {"prompt": "2+2=", "completions": ["4", "so 4"], "labels": [True, True]}
    assert tokenizer.decode(text_example(steps, "steps", tokenizer).texts[0].tokens) == "2+2=4\nso 4\n"


@pytest.mark.parametrize("kind", SPACED)
def test_a_conversation_has_the_tokens_of_its_whole_text(kind):
    tokenizer = spaced_tokenizer(kind)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:\n{{ m.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    messages = said("hi", "home", "so", "here")
    (text,) = text_example({"messages": messages}, "demonstrations", tokenizer).texts
    whole = tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("\n")
    assert text.tokens == tokenizer.encode(whole, add_special_tokens=False)
    assert [part for is_trained, part in spans(text, tokenizer) if is_trained] == ["home</s>", "here</s>"]
