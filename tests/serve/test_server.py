"""The server against clients that are wrong, slow or broken, and many at once."""

import asyncio
import json
import random

import pytest
from small_chats import CHAT, SETUP, engine_of, examples_of
from small_servers import LIMITS, LONG, call, needs_clients, scripted, serve

from funrl.environments.run import episode_groups, run_episodes
from funrl.mesh.mesh import SINGLE
from funrl.rollout.policy import EpisodeLimits
from funrl.serve.programs import endpoint_environment

pytestmark = needs_clients
GOOD = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}


async def ask(endpoint, path="/v1/chat/completions", body=GOOD, key=None, method="POST", raw=None, length=0):
    """(status, body) of an answer, over a socket."""
    host, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode() if raw is None else raw
    lines = [f"{method} {path} HTTP/1.1", "host: x", f"content-length: {length or len(data)}", "connection: close"]
    lines += [f"authorization: Bearer {endpoint.api_key if key is None else key}"]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
    answer = await reader.read()
    writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), rest


WRONG = [
    (401, {"key": ""}, "a key is needed"),
    (401, {"key": "funrl-wrong"}, "not valid"),
    (404, {"path": "/v1/embeddings"}, "is not served"),
    (405, {"method": "GET"}, "is not served"),
    (400, {"raw": b"{"}, "not JSON"),
    (400, {"raw": b"[" * 100_000}, "not JSON"),
    (400, {"raw": b"\xff\xfe"}, "not JSON"),
    (400, {"body": []}, "must be a JSON object"),
    (413, {"length": 1 << 40}, "the body has"),
    (400, {"body": GOOD | {"messages": []}}, "messages are needed"),
    (400, {"body": GOOD | {"n": 1e9}}, "n is 1000000000.0"),
    (400, {"body": GOOD | {"temperature": -1}}, "temperature is -1"),
    (400, {"body": GOOD | {"temperature": 10**400}}, "it must be a number from 0 to 100"),
    (400, {"body": GOOD | {"stop": [""]}}, "stop has"),
    (400, {"body": GOOD | {"response_format": {"type": "json_object"}}}, "response_format"),
    (400, {"body": GOOD | {"colour": 1}}, "'colour' is not a field"),
    (400, {"body": GOOD | {"\ud800": 1}}, "'ud800' is not a field"),
    (400, {"body": GOOD | {"messages": [{"role": "assistant", "tool_calls": 5}]}}, "must be a list"),
    (400, {"body": GOOD | {"tool_choice": "required"}}, "there are no tools"),
    (400, {"body": GOOD | {"messages": [{"role": "robot", "content": "x"}]}}, "role 'robot'"),
    (400, {"body": GOOD | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}}, "in base64"),
    (400, {"path": "/v1/completions", "body": {"prompt": [1 << 30]}}, "vocab"),
    (400, {"path": "/v1/completions", "body": {"prompt": [5] * 2000}}, "limit"),
]


def test_wrong_requests_are_answered_in_words_and_nothing_is_lost():
    async def program(endpoint):
        answers = [await ask(endpoint, **wrong) for _, wrong, _ in WRONG]
        return answers, await ask(endpoint), len(endpoint.session.trajectories())

    answers, good, count = serve(engine_of(), program)
    for (status, wrong, text), (got, rest) in zip(WRONG, answers, strict=True):
        assert got == status and text in json.dumps(json.loads(rest)).replace("\\", ""), (wrong, got, rest)
    assert good[0] == 200 and count == 1


def test_malformed_requests_are_refused():
    """Bodies whose fields have random values: 300 of them."""
    pick = random.Random(0)
    values = [
        None,
        True,
        -1,
        0,
        7,
        1e308,
        "",
        "x",
        [],
        {},
        [None],
        [[]],
        {"a": {}},
        "\ud800",
        [{"role": "user"}],
        1 << 70,
    ]
    fields = [
        "messages",
        "tools",
        "tool_choice",
        "n",
        "seed",
        "stop",
        "temperature",
        "top_p",
        "top_k",
        "max_tokens",
        "stream_options",
        "logprobs",
        "stream",
        "prompt",
        "token_ids",
        "sampling_params",
        "input",
        "system",
    ]
    paths = [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/inference/v1/generate",
        "/v1/messages/count_tokens",
    ]

    async def program(endpoint):
        answers = []
        for _ in range(300):
            body = {name: pick.choice(values) for name in pick.sample(fields, pick.randint(1, 6))}
            body = (GOOD if pick.random() < 0.3 else {}) | body
            answers.append((body, await ask(endpoint, pick.choice(paths), body)))
        return answers, await ask(endpoint)

    answers, good = serve(engine_of(), program)
    statuses = {status for _, (status, _) in answers}
    assert statuses <= {200, 400}, [body for body, (status, _) in answers if status not in (200, 400)]
    assert 400 in statuses and good[0] == 200
    for body, (status, rest) in answers:
        if status == 400:
            error = json.loads(rest)["error"]
            assert error["message"], body


def test_a_key_ends_with_its_episode():
    async def program(endpoint):
        return endpoint

    async def later(endpoint):
        return await ask(endpoint, key=ended.api_key)

    ended = serve(engine_of(), program)
    assert serve(engine_of(), later)[0] == 401


@pytest.mark.slow
def test_many_programs_at_once_are_neither_mixed_nor_lost():
    """Episodes of one to three turns, half of them streaming, a tenth broken off; each depends on its number alone."""
    count, broken = 60, []
    shared = []  # the connections of all programs

    async def agent(messages, *, base_url, api_key, model, number):
        import openai

        if not shared:
            shared.append(openai.DefaultAsyncHttpxClient(timeout=None))
        pick = random.Random(number)
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, http_client=shared[0])
        history = list(messages)
        for _ in range(pick.randint(1, 3)):
            asked = {"model": model, "messages": history}
            if number % 10 == 0:
                broken.append(number)
                await broken_off(base_url, api_key, asked, pick)
            text = await said(client, asked, stream=number % 2 == 0)
            history += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{number}!"}]
        return float(number)

    examples = [example for n in range(count) for example in examples_of(f"prompt {n}", number=n)]
    groups = episode_groups(examples, 1, seed=1)
    limits = LIMITS._replace(waiting=count, environment_s=3600)
    run = run_episodes(engine_of(), SINGLE, endpoint_environment(agent), groups, SETUP, limits)
    assert [number for number, _ in run.episodes] == list(range(count)) and broken
    for number, episode in run.episodes:
        assert episode.status == "done", episode.problem
        assert episode.rewards == {"policy": float(number)} and episode.parts == {"forks": 0.0}
        for end in episode.ends:
            spoken = [message["content"] for message in end.messages() if message["role"] == "user"]
            assert spoken[0] == f"prompt {number}" and set(spoken[1:]) <= {f"{number}!"}
        longest = max(sum(node.sampled for node in end.nodes()) for end in episode.ends)
        assert longest == random.Random(number).randint(1, 3)


async def said(client, asked, stream):
    if not stream:
        return (await client.chat.completions.create(**asked)).choices[0].message.content
    chunks = await client.chat.completions.create(**asked, stream=True)
    return "".join([choice.delta.content or "" async for chunk in chunks for choice in chunk.choices])


async def broken_off(base_url, api_key, asked, pick):
    """Send a request, or a part of it, and go away at a random moment."""
    host, port = base_url.removeprefix("http://").removesuffix("/v1").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(asked | {"stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    whole = head.encode() + f"authorization: Bearer {api_key}\r\n\r\n".encode() + body
    writer.write(whole[: pick.choice([len(whole), len(whole), len(whole) // 2, 10])])
    await writer.drain()
    await asyncio.sleep(pick.choice([0, 0.01]))
    writer.close()


def test_a_program_that_passes_a_limit_is_unscored_and_one_that_fails_says_why():
    async def talker(messages, *, base_url, api_key, model):
        import openai

        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            while True:
                text = await said(client, {"model": model, "messages": messages}, stream=False)
                messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "on"}]

    async def silent(messages, **fields):
        return 1.0

    def episode_of(program, limits=LIMITS):
        groups = episode_groups(examples_of("hello"), 1, seed=1)
        run = run_episodes(engine_of(), SINGLE, endpoint_environment(program), groups, SETUP, limits)
        return run.episodes[0][1]

    episode = episode_of(talker, EpisodeLimits(turns=3, length=1024))
    assert episode.status == "turns" and episode.rewards == {"policy": None}
    assert sum(node.sampled for node in episode.ends[0].nodes()) == 3
    assert "has not asked the endpoint" in episode_of(silent).problem


def test_a_plain_program_runs_in_a_thread():
    def agent(messages, *, base_url, api_key, model, number):
        import openai

        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
            done = client.chat.completions.create(model=model, messages=messages, tools=[tool])
            return float(len(done.choices[0].message.tool_calls)) + number

    groups = episode_groups(examples_of("hello", number=3), 1, seed=1)
    run = run_episodes(scripted(call(a=1)), SINGLE, endpoint_environment(agent), groups, LONG, LIMITS)
    assert run.episodes[0][1].rewards == {"policy": 4.0}


def test_the_chat_template_is_needed():
    async def program(endpoint):
        raise AssertionError

    with pytest.raises(ValueError, match="needs a policy with a chat template"):
        serve(engine_of(), program, SETUP._replace(chat=None))
    assert CHAT.tokenizer.chat_template
