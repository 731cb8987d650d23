"""`funrl.data.peers` has the trained tokens that TRL 1.16.0 and verl 0.9.1 themselves gave for records of a file."""

import pytest
from chat_templates import TEMPLATES, tokenizer_of
from peer_texts import DATE, RECORDS, peer_results, tokens_of

from funrl.data.conversations import ChatTemplate
from funrl.data.json_lines import DataError
from funrl.data.messages import normal_messages, normal_tools, without_arrow_nulls
from funrl.data.peers import trl_completed_messages, trl_completion, trl_text, verl_text
from funrl.data.tokenizer import TokenizerError

# Records whose messages are not in the normal form, which the peers render as they are.
GIVEN = {"nulls_of_arrow", "arguments_as_text", "text_parts"}
RESULTS = [
    (name, library, result)
    for name, entry in RECORDS.items()
    for library, way, result in peer_results(name)
    if entry["tokenizer"] in TEMPLATES and way == "sft" and name not in GIVEN
]


@pytest.mark.parametrize("name,library,result", RESULTS, ids=[f"{name}-{library}" for name, library, _ in RESULTS])
def test_a_peer_trains_what_its_own_code_said(name, library, result):
    entry = RECORDS[name]
    tokenizer = tokenizer_of(entry["tokenizer"])
    tokenizer.chat_template = tokenizer.chat_template.replace(*DATE)
    record = without_arrow_nulls(entry["records"][0])
    template = ChatTemplate(tokenizer, normal_tools(record.get("tools") or ()))
    if library == "verl" and "messages" not in record:
        record["messages"] = record["prompt"] + record["completion"]
    if "error" in result:
        with pytest.raises((DataError, TokenizerError)):
            verl_text(normal_messages(record["messages"]), template)
        return
    if "messages" in record:
        own = {"trl": trl_text, "verl": verl_text}[library](normal_messages(record["messages"]), template)
    elif isinstance(record["prompt"], str):
        own = trl_completion(record["prompt"], record["completion"], template)
    else:
        own = trl_completed_messages(*map(normal_messages, (record["prompt"], record["completion"])), template)
    if result == "every token":
        assert not own.trained[0] and all(own.trained[1:])
        return
    ((text,)) = result["texts"].values()
    tokens, trained = tokens_of(text, tokenizer)
    assert (own.tokens, own.trained) == (tokens, trained)
