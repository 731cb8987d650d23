"""The clients of the registry in front of the endpoint, and exact tokens behind it."""

import json

import pytest
from small_chats import CHAT, SAMPLING, SETUP, TEMPLATE, chat_of, engine_of, text
from small_servers import LONG, TOOL, anthropic_client, call, needs_clients, openai_client, scripted, serve

from funrl.environments.chat import ChatOptions, TemplateChat

pytestmark = needs_clients
USER = [{"role": "user", "content": "hello"}]


def assert_exact(trajectories):
    """What a trajectory's messages say is what its tokens say, and sampled nodes have numbers for every token."""
    for end in trajectories:
        for node in end.nodes():
            if node.sampled:
                assert len(node.raw_logp) == len(node.sampling_logp) == len(node.versions) == len(node.tokens)


@pytest.mark.slow
def test_a_chat_of_several_turns_is_one_trajectory_with_the_tokens_of_the_engine():
    async def program(endpoint):
        async with openai_client(endpoint) as client:
            messages, replies = list(USER), []
            for turn in range(3):
                done = await client.chat.completions.create(
                    model="any", messages=messages, logprobs=True, extra_body={"return_token_ids": True}
                )
                replies.append(done)
                messages += [
                    done.choices[0].message.model_dump(exclude_none=True),
                    {"role": "user", "content": f"{turn}?"},
                ]
            return replies, endpoint.session

    replies, session = serve(engine_of(), program, SETUP)
    (end,) = session.trajectories()
    sampled = [node for node in end.nodes() if node.sampled]
    assert len(sampled) == 3 and session.forks == 0
    for done, node in zip(replies, sampled, strict=True):
        (choice,) = done.choices
        prompt = [token for before in node.parent.path() for token in before.tokens]
        assert done.prompt_token_ids == prompt and choice.token_ids == list(node.tokens)
        assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(node.sampling_logp.tolist())
        written = node.tokens[:-1] if node.finish == "stop" else node.tokens
        assert choice.message.content == text(written)
        assert choice.finish_reason == ("stop" if node.finish == "stop" else "length")
        assert done.usage.prompt_tokens == len(prompt) and done.usage.completion_tokens == len(node.tokens)
    assert_exact([end])


def test_a_stream_says_what_the_whole_answer_says(monkeypatch):
    monkeypatch.setattr("funrl.serve.app.CHUNK_S", 0)

    async def program(endpoint):
        async with openai_client(endpoint) as client:
            chunks = []
            asked = {"model": "any", "messages": USER, "seed": 5, "n": 2}
            async for chunk in await client.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            ):
                chunks.append(chunk)
            return chunks, await client.chat.completions.create(**asked), endpoint.session

    chunks, whole, session = serve(engine_of(), program, SETUP)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens and not chunks[-1].choices
    for index in range(2):
        own = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(c.delta.content or "" for c in own) == whole.choices[index].message.content
        assert own[-1].finish_reason == whole.choices[index].finish_reason
    pieces = [c for chunk in chunks for c in chunk.choices if c.delta.content]
    assert len(pieces) > 2  # they do not come all at once, which would be one piece each
    assert len(session.trajectories()) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_answered_and_seen_as_one_trajectory(stream):
    engine = scripted("well " + call(a=1) + call(a=2), "3")

    async def program(endpoint):
        async with openai_client(endpoint) as client:
            asked = {"model": "any", "tools": [TOOL]}
            if stream:
                message = await streamed(client, messages=USER, **asked)
            else:
                done = await client.chat.completions.create(messages=USER, **asked)
                assert done.choices[0].finish_reason == "tool_calls"
                message = done.choices[0].message.model_dump(exclude_none=True)
            results = [{"role": "tool", "tool_call_id": row["id"], "content": "1"} for row in message["tool_calls"]]
            last = await client.chat.completions.create(messages=[*USER, message, *results], **asked)
            return message, last, endpoint.session

    message, last, session = serve(engine, program)
    assert message["content"] == "well"
    assert [json.loads(row["function"]["arguments"]) for row in message["tool_calls"]] == [{"a": 1}, {"a": 2}]
    assert last.choices[0].message.content == "3" and session.forks == 0
    (end,) = session.trajectories()
    assert text(end.token_ids()).count("t>1") == 2 and text(end.token_ids()).endswith("a>3</s>")


async def streamed(client, **asked):
    """The message of a stream, put together as clients do."""
    content, calls = "", {}
    async for chunk in await client.chat.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for item in choice.delta.tool_calls or ():
                calls[item.index] = {
                    "id": item.id,
                    "type": "function",
                    "function": {"name": item.function.name, "arguments": item.function.arguments},
                }
    return {"role": "assistant", "content": content, "tool_calls": list(calls.values())}


@pytest.mark.parametrize(("choice", "begin"), [("required", '{"name": "'), ("add", '{"name": "add", "arguments": ')])
def test_a_demanded_call_begins_as_one(choice, begin):
    rest = ('add", "arguments": {"a": 4}}' if choice == "required" else '{"a": 4}}') + "</tool_call>"
    engine = scripted(rest)
    named = choice if choice == "required" else {"type": "function", "function": {"name": choice}}

    async def program(endpoint):
        async with openai_client(endpoint) as client:
            done = await client.chat.completions.create(model="any", messages=USER, tools=[TOOL], tool_choice=named)
            return done, endpoint.session

    done, session = serve(engine, program)
    (tool_call,) = done.choices[0].message.tool_calls
    assert tool_call.function.name == "add" and json.loads(tool_call.function.arguments) == {"a": 4}
    (end,) = session.trajectories()
    assert not end.leaf.parent.sampled and text(end.leaf.parent.tokens) == "<tool_call>\n" + begin
    (message,) = end.leaf.messages  # a fork renders it again
    assert [row["function"]["arguments"] for row in message["tool_calls"]] == [{"a": 4}]


def test_a_demanded_call_is_answered_without_a_fork():
    chat = TemplateChat(CHAT.tokenizer, options=ChatOptions(history="template"))

    async def program(endpoint):
        async with openai_client(endpoint) as client:
            asked = {"model": "any", "tools": [TOOL]}
            done = await client.chat.completions.create(messages=USER, tool_choice="required", **asked)
            message = done.choices[0].message.model_dump(exclude_none=True)
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "1"}
            await client.chat.completions.create(messages=[*USER, message, result], **asked)
            return endpoint.session

    session = serve(scripted('add", "arguments": {"a": 4}}</tool_call>', "3"), program, LONG._replace(chat=chat))
    (end,) = session.trajectories()
    assert len([node for node in end.nodes() if node.sampled]) == 2 and session.forks == 0


def test_a_retry_gets_the_first_answer_and_an_equal_request_another_one():
    async def program(endpoint):
        async with openai_client(endpoint) as client:
            replies = []
            for count in (None, "1", "0", "2"):
                headers = {} if count is None else {"x-stainless-retry-count": count}
                done = await client.chat.completions.create(
                    model="any", messages=USER, extra_headers=headers, extra_body={"return_token_ids": True}
                )
                replies.append(done.choices[0].token_ids)
            return replies, len(endpoint.session.trajectories())

    (first, again, other, latest), count = serve(engine_of(), program, SETUP)
    assert first == again and other == latest and first != other and count == 2


def test_a_changed_history_is_a_fork_and_a_branch_is_none():
    async def program(endpoint):
        async with openai_client(endpoint) as client:

            async def say(messages):
                done = await client.chat.completions.create(model="any", messages=messages)
                return {"role": "assistant", "content": done.choices[0].message.content}

            first = await say(USER)
            forks = []
            for change, user in (("", "a"), ("", "b"), ("!", "a")):
                changed = first | {"content": f" {first['content']}{change}\n"}  # white space around it is no change
                await say([*USER, changed, {"role": "user", "content": user}])
                forks.append(endpoint.session.forks)
            return forks, endpoint.session.trajectories()

    forks, ends = serve(engine_of(), program, SETUP)
    assert forks == [0, 0, 1] and [sum(node.sampled for node in end.nodes()) for end in ends] == [2, 2, 1]
    assert ends[0].leaf.path()[1] is ends[1].leaf.path()[1]


def test_stop_texts_end_a_reply_and_are_no_part_of_it():
    async def program(endpoint):
        async with openai_client(endpoint) as client:
            free = await client.chat.completions.create(model="any", messages=USER, seed=1)
            content = free.choices[0].message.content
            stop = content[3:5]
            cut = await client.chat.completions.create(model="any", messages=USER, seed=1, stop=[stop])
            return content, stop, cut

    content, stop, cut = serve(engine_of(), program, SETUP)
    (choice,) = cut.choices
    assert choice.finish_reason in ("stop", "length") and stop not in choice.message.content
    assert len(content) > 4


def test_texts_and_token_ids_are_completed():
    async def program(endpoint):
        async with openai_client(endpoint) as client:
            first = await client.completions.create(model="any", prompt="abc", seed=1, logprobs=1, max_tokens=5)
            ids = CHAT.tokenizer.encode("abc")
            other = await client.completions.create(
                model="any", prompt=ids, seed=1, max_tokens=5, extra_body={"return_token_ids": True}
            )
            further = await client.completions.create(
                model="any", prompt=[*ids, *other.choices[0].token_ids, 7], max_tokens=5
            )
            listed = await client.models.list()
            return first, other, further, [model.id for model in listed.data], endpoint.session

    first, other, further, listed, session = serve(engine_of(), program, SETUP)
    assert first.choices[0].text == other.choices[0].text and len(first.choices[0].logprobs.tokens) <= 5
    assert further.usage.prompt_tokens == 4 + other.usage.completion_tokens and listed == ["policy"]
    ends = session.trajectories()
    assert [sum(node.sampled for node in end.nodes()) for end in ends] == [1, 2] or len(ends) == 2


def test_the_sampling_of_a_run_is_kept_and_said_once():
    notes = []

    async def program(endpoint):
        async with openai_client(endpoint) as client:
            return [
                await client.chat.completions.create(model="any", messages=USER, temperature=t, seed=2)
                for t in (0.1, 0.2)
            ]

    first, other = serve(engine_of(), program, SETUP, note=notes.append)
    assert first.choices[0].message.content == other.choices[0].message.content
    assert len(notes) == 1 and "0.1" in notes[0]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_the_client_of_anthropic_is_served(stream):
    engine = scripted("well " + call(a=1), "done")
    tool = {"name": "add", "description": "Add.", "input_schema": TOOL["function"]["parameters"]}

    async def program(endpoint):
        async with anthropic_client(endpoint) as client:
            asked = {"model": "any", "max_tokens": 200, "tools": [tool], "system": "be brief"}
            counted = await client.messages.count_tokens(model="any", messages=USER, tools=[tool], system="be brief")
            if stream:
                async with client.messages.stream(messages=USER, **asked) as events:
                    first = await events.get_final_message()
            else:
                first = await client.messages.create(messages=USER, **asked)
            use = first.content[-1]
            result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "1"}]}
            replied = [{"role": "assistant", "content": [block.model_dump() for block in first.content]}]
            last = await client.messages.create(
                messages=[*USER, *replied, {"role": "user", "content": [result]}], **asked
            )
            return counted, first, last, endpoint.session

    counted, first, last, session = serve(engine, program)
    assert [block.type for block in first.content] == ["text", "tool_use"] and first.stop_reason == "tool_use"
    assert first.content[0].text == "well" and first.content[1].input == {"a": 1}
    assert last.content[0].text == "done" and last.stop_reason == "end_turn" and session.forks == 0
    assert counted.input_tokens == first.usage.input_tokens
    assert len(session.trajectories()) == 1


def test_a_stream_for_the_client_of_anthropic_has_no_empty_pieces():
    engine = scripted("well done", call(a=1))
    tool = {"name": "add", "input_schema": TOOL["function"]["parameters"]}

    async def program(endpoint):
        async with anthropic_client(endpoint) as client:
            streams = []
            for tools in ({}, {"tools": [tool]}):
                stream = await client.messages.create(model="any", max_tokens=200, messages=USER, stream=True, **tools)
                streams.append([event async for event in stream])
            return streams

    for events, kind in zip(serve(engine, program), ("text", "tool_use"), strict=True):
        blocks = [event.content_block.type for event in events if event.type == "content_block_start"]
        pieces = [event.delta for event in events if event.type == "content_block_delta"]
        assert blocks == [kind] and all(piece.text for piece in pieces if piece.type == "text_delta")


THINKS = LONG._replace(chat=chat_of(TEMPLATE + "{# <think></think> #}"))


async def whole_or_streamed(client, stream, **asked):
    """Content, thoughts and calls of a message."""
    if not stream:
        message = (await client.chat.completions.create(**asked)).choices[0].message
        return message.content, getattr(message, "reasoning", ""), len(message.tool_calls or ())
    content, thoughts, calls = "", "", 0
    async for chunk in await client.chat.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            thoughts += getattr(choice.delta, "reasoning", None) or ""
            calls += len(choice.delta.tool_calls or ())
    return content, thoughts, calls


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_apart_from_the_content(stream):
    thought = "<think>\nhm\n</think>\n\nwell "
    engine = scripted(thought, thought, thought, thought + call(a=1), "<think>on and on", "end")

    async def program(endpoint):
        async with openai_client(endpoint) as client:
            asked = {"model": "any", "messages": USER}
            replies = [
                await whole_or_streamed(client, stream, **asked, extra_body=body)
                for body in ({}, {"include_reasoning": True}, {"include_reasoning": False})
            ]
            replies.append(await whole_or_streamed(client, stream, **asked, tools=[TOOL]))
            replies.append(await whole_or_streamed(client, stream, **asked, extra_body={"include_reasoning": True}))
            results = {"role": "assistant", "content": replies[1][0], "reasoning": "hm"}
            await client.chat.completions.create(model="any", messages=[*USER, results, *USER])
            return replies, endpoint.session

    replies, session = serve(engine, program, THINKS)
    assert replies == [
        (thought, "", 0),
        ("well ", "hm", 0),
        ("well ", "", 0),
        ("well", "hm", 1),
        ("", "on and on", 0),
    ]
    assert session.forks == 0 and len(session.trajectories()) == 5


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_of_anthropic_gets_thoughts_where_it_asks_for_them(stream):
    engine = scripted("<think>hm</think>well " + call(a=1), "done", "<think>hm</think>well")
    tool = {"name": "add", "input_schema": TOOL["function"]["parameters"]}

    async def program(endpoint):
        async with anthropic_client(endpoint) as client:
            asked = {"model": "any", "max_tokens": 2000, "tools": [tool]}
            thinking = {"type": "enabled", "budget_tokens": 1024}
            if stream:
                async with client.messages.stream(messages=USER, thinking=thinking, **asked) as events:
                    first = await events.get_final_message()
            else:
                first = await client.messages.create(messages=USER, thinking=thinking, **asked)
            use = first.content[-1]
            replied = [{"role": "assistant", "content": [block.model_dump() for block in first.content]}]
            replied.append(
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "1"}]}
            )
            await client.messages.create(messages=[*USER, *replied], **asked)
            last = await client.messages.create(messages=USER, thinking={"type": "disabled"}, **asked)
            return first, last, endpoint.session

    first, last, session = serve(engine, program, THINKS)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert first.content[0].thinking == "hm" and first.content[1].text == "well" and first.content[2].input == {"a": 1}
    assert [block.text for block in last.content] == ["well"] and session.forks == 0


@pytest.mark.parametrize("stream", [False, True])
def test_responses_are_served(stream):
    engine = scripted("well " + call(a=1), "done")
    tool = {"type": "function", **TOOL["function"]}

    async def program(endpoint):
        async with openai_client(endpoint) as client:
            asked = {"model": "any", "tools": [tool], "instructions": "be brief"}
            if stream:
                async with client.responses.stream(input="hello", **asked) as events:
                    async for _ in events:
                        pass
                    first = await events.get_final_response()
            else:
                first = await client.responses.create(input="hello", **asked)
            used = next(item for item in first.output if item.type == "function_call")
            history = [
                {"role": "user", "content": "hello"},
                *(item.model_dump(exclude_none=True) for item in first.output),
            ]
            history.append({"type": "function_call_output", "call_id": used.call_id, "output": "1"})
            return first, await client.responses.create(input=history, **asked), endpoint.session

    first, last, session = serve(engine, program)
    assert first.output_text == "well" and json.loads(first.output[1].arguments) == {"a": 1}
    assert last.output_text == "done" and last.status == "completed" and session.forks == 0
    assert len(session.trajectories()) == 1


def test_replies_end_at_the_sampling_of_the_run():
    async def program(endpoint):
        async with openai_client(endpoint) as client:
            return await client.chat.completions.create(model="any", messages=USER, max_tokens=500)

    assert serve(engine_of(), program, SETUP).usage.completion_tokens <= SAMPLING.max_new_tokens
