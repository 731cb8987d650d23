"""Views of a reply for reward functions: its text, its special tokens, or its answer."""

import pytest
from family_templates import FAMILIES, Family, byte_tokenizer, tokenizer_of
from small_chats import TOKENIZER

from funrl.environments.answer_rewards import CompletionReader, check_readings
from funrl.environments.chat import TemplateChat
from funrl.rewards.call import RewardError
from funrl.rewards.load import load_rewards
from funrl.rewards.style import think_then_answer
from funrl.rewards.verifiers import exact_match
from funrl.rewards.views import read_as

TAGGED = Family("hermes", (*FAMILIES["qwen3"].special, "<think>", "</think>", "<answer>", "</answer>"), (), None)


def reader_of(tokenizer, end):
    stop = tokenizer.convert_tokens_to_ids(end)
    return CompletionReader(TemplateChat(tokenizer), (stop,))


def read(tokenizer, text, end, name):
    return reader_of(tokenizer, end).read(name, (), tokenizer.encode(text + end, add_special_tokens=False))


def test_the_final_channel_of_gpt_oss_is_the_answer():
    tokenizer = tokenizer_of("harmony")
    reply = "<|channel|>analysis<|message|>2*3 is 6<|end|><|start|>assistant<|channel|>final<|message|>6"
    assert read(tokenizer, reply, "<|return|>", "text") == "analysis2*3 is 6assistantfinal6"
    assert read(tokenizer, reply, "<|return|>", "marks") == reply
    assert read(tokenizer, reply, "<|return|>", "answer") == "6"
    assert exact_match("", read(tokenizer, reply, "<|return|>", "answer"), answer=6) == 1.0
    thought = "<|channel|>analysis<|message|>it is 6"
    assert read(tokenizer, thought, "<|return|>", "answer") == ""  # it never comes to an answer


def test_tags_that_are_special_tokens_reach_who_asks_for_them():
    tokenizer = byte_tokenizer("", TAGGED)
    reply = "<think>2</think><answer>4</answer>"
    assert read(tokenizer, reply, "<|im_end|>", "text") == "24"
    assert read(tokenizer, reply, "<|im_end|>", "marks") == reply
    assert think_then_answer("", read(tokenizer, reply, "<|im_end|>", "marks")) == 1.0
    assert read(tokenizer, "<think>so</think>4", "<|im_end|>", "answer") == "4"


@pytest.mark.parametrize("name", ["text", "marks", "answer"])
def test_a_reply_without_special_tokens_is_the_same_for_all(name):
    for text in ("<think>so</think> 4", " 4", "<|im_end|", ""):
        assert read(tokenizer_of("qwen3"), text, "<|im_end|>", name) == text


def test_a_reward_that_can_give_nothing_is_refused():
    letters = TOKENIZER
    tagged = byte_tokenizer("", TAGGED)
    check_readings(load_rewards("format,gsm8k,exact,json"), tagged)
    check_readings(load_rewards("format"), letters)

    @read_as("text", example="<think>so</think> 4")
    def thinks(prompt, completion):
        return float("</think>" in completion)

    with pytest.raises(RewardError, match=r"thinks can give nothing with this tokenizer.*'so 4'; @read_as\('marks'\)"):
        check_readings([thinks], tagged)
    check_readings([read_as("marks", example="<think>so</think> 4")(thinks)], tagged)
    with pytest.raises(RewardError, match="reward function format can give nothing"):
        check_readings(load_rewards("format"), small_tokenizer())


def small_tokenizer():
    from funrl.data.tokenizer import character_tokenizer

    return character_tokenizer("0123456789+=")
