"""What TRL and verl gave can be read with the tokenizers of these tests."""

import pytest
from chat_templates import TEMPLATES, tokenizer_of
from peer_texts import DATE, RECORDS, peer_results, tokens_of

from funrl.data.supervised import text_example
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


# Results of peers that train the tokens that funrl trains, but for white space behind the mark that ends a turn, which
# they train too. docs/data.md says how the others differ.
AGREE = {
    ("trl", "sft"): {
        "text_completion",
        "opened_thoughts_with_thoughts",
        "gemma_completion",
        "gpt_oss_completion",
    },
    ("trl", "sft_assistant_only"): {"opened_thoughts_with_thoughts", "gpt_oss_completion"},
    ("trl", "dpo"): set(),
    ("verl", "sft"): {"opened_thoughts_with_thoughts", "gpt_oss_completion"},
    ("verl", "sft_ignoring_mismatch"): {
        "one_turn",
        "two_turns",
        "call_and_answer",
        "message_as_completion",
        "call_as_completion",
        "opened_thoughts_with_thoughts",
        "null_content",
        "marks_of_a_user",
        "gpt_oss_completion",
    },
}


def words_of(texts, tokenizer):
    """Spans of texts, whose white space at their borders is left out."""
    rows = []
    for tokens, trained in texts:
        spans = []
        for token, flag in zip(tokens, trained, strict=True):
            if not spans or spans[-1][0] != flag:
                spans.append([flag, []])
            spans[-1][1].append(token)
        words = [(flag, tokenizer.decode(ids, skip_special_tokens=False)) for flag, ids in spans]
        rows.append([(flag, text.rstrip("\n") if flag else text.lstrip("\n")) for flag, text in words])
    return rows


def test_what_peers_train_otherwise_is_known():
    agree = {key: set() for key in AGREE}
    for name, entry in RECORDS.items():
        if entry["tokenizer"] not in TEMPLATES:
            continue
        tokenizer = tokenizer_of(entry["tokenizer"])
        tokenizer.chat_template = tokenizer.chat_template.replace(*DATE)
        (record, *_) = entry["records"]
        kind = "preferences" if "chosen" in record else "demonstrations"
        own = words_of([(x.tokens, x.trained) for x in text_example(record, kind, tokenizer).texts], tokenizer)
        for library, way, result in peer_results(name):
            texts = result.get("texts", {}) if isinstance(result, dict) else {}
            theirs = [tokens_of(text, tokenizer) for text in texts.values()]
            if theirs and words_of(theirs, tokenizer) == own:
                agree[library, way].add(name)
    assert agree == AGREE
