"""What holds for every embedded task with an environment: its demonstrator, tokenizer, decoder and splits."""

from importlib.util import find_spec

import pytest

from funrl.data.prompts import Prompt
from funrl.tasks.conversations import demonstrated
from funrl.tasks.embedded import TASK_NAMES, embedded_task, is_embedded_tokenizer

NAMES = [name for name in TASK_NAMES if embedded_task(name).environment is not None]
NEEDS = {"search": "bm25s"}


@pytest.fixture(params=NAMES)
def task(request):
    return embedded_task(request.param)


def test_demonstrations_are_in_the_tokens_of_the_decoder(task):
    if task.name in NEEDS and find_spec(NEEDS[task.name]) is None:
        pytest.skip(f"{NEEDS[task.name]} is not installed")
    tokenizer = task.tokenizer()
    config = task.model_config(16)
    assert len(tokenizer) <= config.vocab and tokenizer.eos_token_id == config.special_tokens.eos[0]
    for record in task.demonstrations(1, 40):
        text = tokenizer.apply_chat_template(record["messages"], tokenize=False)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and len(ids) <= config.max_positions
        assert tokenizer.unk_token_id not in ids
        replies = [m["content"] for m in record["messages"] if m["role"] == "assistant"]
        assert all(len(tokenizer.encode(reply)) < task.max_new_tokens for reply in replies)
    assert tokenizer.decode(tokenizer.encode("@@")) == "??"


def test_a_directory_is_known_by_its_tokenizer(task, tmp_path):
    task.tokenizer().save_pretrained(tmp_path)
    assert [name for name in NAMES if embedded_task(name).is_its_tokenizer(tmp_path)] == [task.name]
    assert is_embedded_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert not task.is_its_tokenizer(tmp_path)


def test_held_out_prompts_are_not_trained_on(task):
    if task.name == "guessing":
        pytest.skip("its held-out games are against another player, see test_guessing_task.py")
    train = {str(prompt.prompt) for prompt in task.training_prompts(0)}
    heldout = [str(prompt.prompt) for prompt in task.heldout_prompts(40)]
    assert len(set(heldout)) == 40 and not train & set(heldout)
    assert task.heldout_prompts(9) == task.heldout_prompts(9) != task.training_prompts(0)[:9]


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
