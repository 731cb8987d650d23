"""Logs of calls that the clients of OpenAI and Anthropic made of `funrl serve`, as they dump them, in `funrl audit`."""

import json

import pytest
from small_chats import SETUP, TOKENIZER, engine_of
from small_servers import anthropic_client, needs_clients, openai_client, scripted, serve

from funrl.data.conversations import ChatTemplate
from funrl.serve.log_audit import audit_entry
from funrl.serve.log_files import read_logs

pytestmark = [needs_clients, pytest.mark.slow]
TEMPLATE = ChatTemplate(TOKENIZER)
HELLO = {"role": "user", "content": "hello"}


def audits_of(folder, calls):
    """Audits of a log with one call a line."""
    file = folder / "calls.jsonl"
    lines = [{"request": request, "response": response.model_dump(mode="json")} for request, response in calls]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [audit_entry(entry, TEMPLATE) for entry in read_logs(file, TEMPLATE)]


def test_token_ids_of_an_openai_client_are_those_of_the_engine(tmp_path):
    """The second history goes on, the third has another reply in the place of the first one."""

    async def program(endpoint):
        calls = []
        async with openai_client(endpoint) as client:
            histories = [[HELLO], None, [HELLO, {"role": "assistant", "content": "summary"}, HELLO]]
            for history in histories:
                first = calls[0][1].choices[0].message.model_dump(exclude_none=True) if calls else None
                request = {"model": "any", "messages": history or [HELLO, first, {"role": "user", "content": "more"}]}
                done = await client.chat.completions.create(**request, extra_body={"return_token_ids": True})
                calls.append((request, done))
        return calls, endpoint.session.trajectories()

    calls, ends = serve(engine_of(), program, SETUP)
    (audit,) = audits_of(tmp_path, calls)
    assert audit.entry.logged and audit.entry.form == "OpenAI" and audit.paths == 2
    (rewrite,) = audit.rewrites
    assert rewrite.startswith("path 2, message 2: ") and "sampled tokens of the path before it" in rewrite
    sampled = [node for node in {node: None for end in ends for node in end.nodes()} if node.sampled]
    assert audit.sampled == {calls[0][1].model: sum(len(node.tokens) for node in sampled)}
    rows = {tuple(end.token_ids()) for end in audit.entry.episode.ends}
    assert {tuple(end.token_ids()) for end in ends} <= rows  # token for token what the endpoint recorded
    own = audit.trained["funrl"]
    assert (own.rows, own.lost, own.other, own.again) == (2, 0, 0, 0)


def test_messages_of_an_anthropic_client_are_rendered(tmp_path):
    async def program(endpoint):
        calls = []
        async with anthropic_client(endpoint) as client:
            messages = [HELLO]
            for _ in range(2):
                request = {"model": "any", "system": "be kind", "messages": [*messages], "max_tokens": 50}
                done = await client.messages.create(**request)
                calls.append((request, done))
                messages += [{"role": "assistant", "content": [x.model_dump() for x in done.content]}, HELLO]
        return calls, endpoint.session.trajectories()

    calls, (end,) = serve(scripted("hi", "ho"), program)
    (audit,) = audits_of(tmp_path, calls)
    assert not audit.entry.logged and audit.entry.form == "Anthropic" and not audit.rewrites
    (path,) = [end for end in audit.entry.episode.ends if len(end.messages()) == 5]
    assert path.token_ids() == end.token_ids()  # the template has the tokens that the engine sampled
    assert path.messages()[0] == {"role": "system", "content": "be kind"}
    assert audit.sampled == {calls[0][1].model: len("hi") + len("ho") + 2}
