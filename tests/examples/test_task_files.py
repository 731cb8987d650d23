"""The examples env_*.py: what holds for each task of a small decoder, and the files that it writes."""

import importlib
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from task_files import Task, demonstrated, write_files

from funrl.data.prompts import Prompt
from funrl.tasks.calculator import chat_tokenizer

ROOT = Path(__file__).parents[2]
TASKS = {
    "retry": "products",
    "programs": "functions",
    "search": "facts_of_persons",
    "guessing": "numbers",
    "long_search": "long_search",
}
LONGEST_REPLY = {
    "retry": 6,
    "programs": 8,
    "search": 12,
    "guessing": 2,
    "long_search": 6,
}  # tokens, of docs/example_environments.md


@pytest.fixture(scope="module", params=TASKS)
def name(request):
    if request.param == "search" and find_spec("bm25s") is None:
        pytest.skip("bm25s is not installed: pip install 'funrl[environments]'")
    return request.param


@pytest.fixture(scope="module")
def task(name):
    return importlib.import_module(f"env_{name}").task(40)


def test_demonstrations_are_in_the_tokens_of_the_decoder(name, task):
    tokenizer = chat_tokenizer(task.alphabet, task.words)
    assert len(tokenizer) <= task.vocab
    for record in task.demonstrations:
        text = tokenizer.apply_chat_template(record["messages"], tokenize=False)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and len(ids) <= task.positions
        assert tokenizer.unk_token_id not in ids
        replies = [m["content"] for m in record["messages"] if m["role"] == "assistant"]
        assert all(len(tokenizer.encode(reply)) < LONGEST_REPLY[name] for reply in replies)
    assert tokenizer.decode(tokenizer.encode("@@")) == "??"


def test_held_out_prompts_are_not_trained_on(name, task):
    if name == "guessing":
        pytest.skip("its held-out games are against another player, see test_env_guessing.py")
    if name == "long_search":
        pytest.skip("its prompts are all equal and their pages differ, see test_env_long_search.py")
    train = {str(prompt.prompt) for prompt in task.prompts}
    heldout = [str(prompt.prompt) for prompt in task.heldout]
    assert len(set(heldout)) == len(heldout) >= 64 and not train & set(heldout)


def test_a_conversation_ends_with_the_demonstrator_s_last_reply():
    class Doubling:
        def reset(self, example, seed):
            self.left = 2
            return [{"role": "user", "content": example.text}], ()

        def step(self, message):
            self.left -= 1
            return [{"role": "user", "content": message["content"] * 2}], None, not self.left

    messages = demonstrated(Doubling(), Prompt("a", {}), lambda messages: messages[-1]["content"])
    assert [m["content"] for m in messages] == ["a", "a", "aa", "aa"]


def test_the_files_of_a_task(tmp_path):
    prompts = [Prompt([{"role": "user", "content": "ab"}], {"answer": "b"})]
    write_files(Task("ab?", (), 16, 32, prompts, prompts * 2, [{"messages": []}]), tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "heldout.jsonl").read_text().splitlines()]
    assert rows == [{"prompt": [{"role": "user", "content": "ab"}], "answer": "b"}] * 2
    assert (tmp_path / "initial" / "config.json").exists()
