"""Prompt files, good and bad, and the order of training."""

import json

import pytest

from funrl.data.prompts import Prompt, PromptError, check_prompts, load_prompts, prompt_batch


def write(tmp_path, text):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_prompts_are_text_or_messages_with_fields(tmp_path):
    chat = [{"role": "user", "content": "What is 1+1?"}]
    lines = [{"prompt": "1+1=", "answer": 2}, {"prompt": chat, "level": "easy", "tags": [1]}, {"prompt": "\u00e9"}]
    path = write(tmp_path, "\ufeff" + "\n\n".join(map(json.dumps, lines)) + "\n \n")
    expected = [Prompt("1+1=", {"answer": 2}), Prompt(chat, {"level": "easy", "tags": [1]}), Prompt("\u00e9", {})]
    prompts = load_prompts(path)
    assert [item._replace(source="") for item in prompts] == expected
    assert [element.source for element in prompts] == [f"{path}, line {n}" for n in (1, 3, 5)]


GOOD = '{"prompt": "a"}\n'


@pytest.mark.parametrize(
    "text,message",
    [
        ("", "prompts.jsonl: the file is empty"),
        (" \n\n", "the file is empty"),
        (GOOD + '{"prompt": "b"\n', "line 2: not valid JSON.*column"),
        (GOOD + "\n" + "[1, 2]\n", r"line 3: a JSON object is needed.*\[1, 2\]"),
        (GOOD + '"text"\n', "line 2: a JSON object is needed"),
        (
            GOOD + '{"text": "b", "answer": 1}\n',
            r"line 2: there is no field 'prompt'.*\['answer', 'text'\].*--fields=pro",
        ),
        (GOOD + '{"prompt": "a\\ud800b"}\n', r"line 2: '.ud800' is half of a surrogate pair"),
        (GOOD + "[" * 10**5 + "]" * 10**5 + "\n", "line 2: nested too deeply"),
        (GOOD + '{"prompt": ""}\n', "line 2: 'prompt' must be text that is not empty"),
        (GOOD + '{"prompt": 3}\n', "line 2: 'prompt' must be text.*it is 3"),
        (GOOD + '{"prompt": []}\n', "line 2: 'prompt' must be text"),
        (GOOD + '{"prompt": [{"role": "user"}]}\n', "line 2: 'prompt', message 1: the content of the user is null"),
        (GOOD + '{"prompt": [{"role": "user", "content": "a"}, {"role": "user"}]}\n', "line 2: 'prompt', message 2"),
        (GOOD + '{"prompt": "b", "completion": "c"}\n', "line 2: a field cannot be called 'completion'"),
        (GOOD.encode() + b'{"prompt": "\xff"}\n', "line 2: not UTF-8"),
    ],
)
def test_a_bad_file_is_named_with_the_line(tmp_path, text, message):
    with pytest.raises(PromptError, match=message):
        load_prompts(write(tmp_path, text))


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(PromptError, match=r"nothing\.jsonl: no such file"):
        load_prompts(tmp_path / "nothing.jsonl")
    with pytest.raises(PromptError, match=f"{tmp_path}: this is a directory, and not one that"):
        load_prompts(tmp_path)


def test_every_epoch_is_a_new_order_of_all_prompts():
    prompts = list(range(10))
    epochs = [prompt_batch(prompts, 10, 0, 10 * e) for e in range(4)]
    assert all(sorted(e) == prompts for e in epochs)
    assert len(set(map(tuple, epochs))) == 4
    assert prompt_batch(prompts, 10, 1, 0) != epochs[0]


def test_the_order_depends_on_the_seed_and_the_position_alone():
    prompts = list(range(7))
    straight = prompt_batch(prompts, 60, 5, 0)
    position, resumed = 0, []
    for count in (3, 1, 20, 7, 29):
        resumed += prompt_batch(prompts, count, 5, position)
        position += count
    assert resumed == straight


def test_prompts_in_memory_are_named_by_their_number_from_one():
    with pytest.raises(PromptError, match=r"^prompt 2: "):
        check_prompts([{"prompt": "a"}, {"text": "b"}])
