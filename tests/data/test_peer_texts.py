"""What TRL and verl gave can be read with the tokenizers of these tests."""

import pytest
from chat_templates import TEMPLATES, tokenizer_of
from peer_texts import DATE, RECORDS, peer_results, tokens_of

from funrl.data.tokenizer import chat_text


@pytest.mark.parametrize("name", [name for name, entry in RECORDS.items() if entry["tokenizer"] in TEMPLATES])
def test_the_prompt_of_a_peer_is_that_of_the_template(name):
    """So that a difference is one of the library and not of tokenizers or templates that have changed since."""
    entry = RECORDS[name]
    tokenizer = tokenizer_of(entry["tokenizer"])
    tokenizer.chat_template = tokenizer.chat_template.replace(*DATE)
    texts = [r["texts"]["text"] for _, _, r in peer_results(name) if "texts" in r and "text" in r["texts"]]
    texts += [r["texts"]["chosen"] for _, _, r in peer_results(name) if "texts" in r and "chosen" in r["texts"]]
    assert texts
    for text in texts:
        tokens, trained = tokens_of(text, tokenizer)
        assert len(tokens) == len(trained) and any(trained) and not trained[0]
        assert tokenizer.decode(tokens) == "".join(words for _, words in text["spans"])
    record = entry["records"][0]
    begin = record.get("prompt") or record["messages"]
    if isinstance(begin, list):
        tools = record.get("tools") or ()
        rendered = chat_text(tokenizer, begin[:1], tools)
        shown = [text["spans"][0][1] for text in texts]
        assert any(words.startswith(rendered) for words in shown) or name == "nulls_of_arrow"
