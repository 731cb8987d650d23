"""The embedded task of several turns: its data, its tokenizer and its tool."""

import pytest

from funrl.data.prompt_format import PLAIN_PROMPTS
from funrl.data.prompts import encode
from funrl.environments.adapters import tool_schema
from funrl.environments.chat import TemplateChat
from funrl.tasks import calculator as c
from funrl.tasks.calculator import calculator, conversations, factors, final_product, heldout_products
from funrl.tasks.embedded import embedded_task, has_tokenizer_of


def test_the_demonstrator_calls_seldom_and_is_right_where_it_calls():
    records = conversations(0, 2000)
    calls = [r["messages"] for r in records if len(r["messages"]) == 4]
    assert abs(len(calls) / len(records) - c.CALLS_SHARE) < 0.03
    for question, call, output, answer in calls:
        assert output["content"] == answer["content"] == str(eval(question["content"]))
        assert question["content"] in call["content"]
    estimates = [r["messages"] for r in records if len(r["messages"]) == 2]
    right = [str(eval(question["content"])) == answer["content"] for question, answer in estimates]
    assert sum(right) / len(right) < 0.05


def test_splits_share_no_pair():
    train = {tuple(sorted(pair)) for pair in factors(0, 4096).tolist()}
    held = {tuple(sorted(pair)) for pair in factors(0, 400, "heldout").tolist()}
    assert not train & held and len(heldout_products(50)) == 50
    assert heldout_products(9) == heldout_products(9)


def test_what_is_written_fits_the_decoder():
    task = embedded_task("calculator")
    tokenizer, config = task.tokenizer(), task.model_config(16)
    assert len(tokenizer) <= config.vocab and tokenizer.eos_token_id == config.special_tokens.eos[0]
    for record in conversations(1, 50):
        text = tokenizer.apply_chat_template(record["messages"], tokenize=False)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and len(ids) <= config.max_positions
    assert tokenizer.decode(tokenizer.encode("error: no")) == "?" * 9


def test_a_call_is_read_and_its_output_continues_the_conversation():
    tokenizer = embedded_task("calculator").tokenizer()
    chat = TemplateChat(tokenizer)
    prompt = encode(heldout_products(1)[0], tokenizer, PLAIN_PROMPTS)
    written = tokenizer.encode(f"{c.CALL}12*34{c.END_OF_CALL}")
    reading = chat.read(prompt.tokens, written, [tool_schema(calculator)])
    assert list(reading.tool_calls) == [("calculator", {"expression": "12*34"})] and not reading.problems
    after = chat.continuation([{"role": "tool", "content": "408"}], (), tokenizer.eos_token_id)
    assert tokenizer.decode(after) == "<tool>408<assistant>"


def test_the_tool_multiplies_and_refuses_anything_else():
    assert calculator("12*34") == "408"
    for text in ("12", "12+3", "*3", "a*3", "1*2*3"):
        with pytest.raises(ValueError, match="is not a product"):
            calculator(text)


def test_the_last_message_is_scored():
    messages = [{"role": "assistant", "content": "12"}]
    assert final_product(messages, answer="12") == 1.0 and final_product(messages, answer="1") == 0.0
    assert final_product([*messages, {"role": "tool", "content": "12"}], answer="12") == 0.0


def test_the_chat_template_shows_the_calls_as_the_demonstrator_writes_them():
    tokenizer = c.calculator_task().tokenizer()
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "37*48"}}}
    question = {"role": "user", "content": "37*48"}
    read = [question, {"role": "assistant", "content": "", "tool_calls": [call]}]
    written = [question, {"role": "assistant", "content": f"{c.CALL}37*48{c.END_OF_CALL}"}]
    texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in (read, written)]
    assert texts[0] == texts[1]
    assert TemplateChat(tokenizer).opening([question], c.calculator_environment().tools)


def test_a_directory_is_known_by_its_tokenizer(tmp_path):
    embedded_task("calculator").tokenizer().save_pretrained(tmp_path)
    assert has_tokenizer_of("calculator", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert not has_tokenizer_of("calculator", tmp_path)
    c.chat_tokenizer(c.DIGITS_AND_SIGNS).save_pretrained(tmp_path)
    assert not has_tokenizer_of("calculator", tmp_path)
