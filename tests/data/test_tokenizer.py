"""The character tokenizer, loading, and encoding of prompts."""

import pytest

from funrl.data import tokenizer as t
from funrl.data.conversations import encode_prompt

CHAT = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def characters():
    return t.character_tokenizer("0123456789+= \na:user;")


def test_every_character_is_one_token_and_comes_back(characters):
    text = "27 + 185=\n"
    ids = characters.encode(text)
    assert ids == [4, 9, 14, 12, 14, 3, 10, 7, 13, 15]  # ids from 2 on, in the order of the alphabet
    assert characters.decode(ids) == text
    assert (characters.pad_token_id, characters.eos_token_id) == (0, 1)
    assert len(characters) == 23
    assert characters.decode([*ids, 1, 0, 0], skip_special_tokens=True) == text


def test_an_unknown_character_is_an_error(characters):
    with pytest.raises(Exception, match="UNK"):
        characters.encode("27*3")


@pytest.mark.parametrize("alphabet,message", [("abca", "'a'"), ("", "empty")])
def test_an_alphabet_has_distinct_characters(alphabet, message):
    with pytest.raises(t.TokenizerError, match=message):
        t.character_tokenizer(alphabet)


def test_it_saves_and_loads(characters, tmp_path):
    characters.save_pretrained(tmp_path)
    loaded = t.load_tokenizer(tmp_path)
    text = "1+ 2=\na"
    assert loaded.encode(text) == characters.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.is_fast) == (0, 1, True)


def test_what_cannot_be_loaded_is_named(tmp_path):
    with pytest.raises(t.TokenizerError, match="nowhere: no such directory"):
        t.load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(t.TokenizerError, match=r"no tokenizer; one of tokenizer\.json"):
        t.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(t.TokenizerError, match="cannot load"):
        t.load_tokenizer(tmp_path)


def test_chat_messages_go_through_the_template(characters):
    messages = [{"role": "user", "content": "1+1"}]
    with pytest.raises(t.TokenizerError, match="no chat template"):
        encode_prompt(characters, messages)
    characters.chat_template = CHAT
    try:
        ids, text = encode_prompt(characters, messages)
        assert text == "user:1+1;a:"
        assert characters.decode(ids) == text
        characters.chat_template = "{{ raise_exception('only one turn') }}"
        with pytest.raises(t.TokenizerError, match="only one turn"):
            encode_prompt(characters, messages)
    finally:
        characters.chat_template = None


def test_special_tokens_open_a_prompt_and_none_closes_it():
    from tokenizers import processors

    both = t.character_tokenizer("<s>/ab")
    both._tokenizer.post_processor = processors.TemplateProcessing(
        single="<pad> $A </s>", special_tokens=[("<pad>", 0), ("</s>", 1)]
    )
    assert both.encode("ab") == [0, 6, 7, 1]
    assert encode_prompt(both, "ab") == ([0, 6, 7], "ab")
