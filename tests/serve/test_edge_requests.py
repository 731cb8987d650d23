"""Requests that are too large, and those whose logits are no numbers: others are served meanwhile, and afterwards."""

import asyncio
import json
import threading

import pytest
import torch
from small_chats import CONFIG, SETUP, TOKENIZER, engine_of
from small_servers import LIMITS, LONG, needs_clients, serve
from test_server import ask

from funrl.environments.chat import TemplateChat
from funrl.models import decoder_model, with_fields
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.policy import LimitReached
from funrl.rollout.sampling_parameters import Sampling
from funrl.serve.asks import Ask, BadRequest, Body
from funrl.serve.session import ASIDE_BYTES, PART_CHARACTERS, PromptBound, decode_json

pytestmark = needs_clients
BAD = TOKENIZER.encode("#")[0]


def bodies(text, stream=False):
    """Requests of every dialect that have a text, as (path, body)."""
    user = [{"role": "user", "content": text}]
    more = {"stream": True} if stream else {}
    return [
        ("/v1/chat/completions", {"messages": user} | more),
        ("/v1/completions", {"prompt": text} | more),
        ("/v1/messages", {"messages": user, "max_tokens": 200} | more),
        ("/v1/responses", {"input": text} | more),
    ]


def engine_without(token):
    """An engine with an embedding that is no number."""
    model = decoder_model(with_fields(CONFIG, tied=False))
    params = model.init(torch.Generator().manual_seed(0))
    params["embed"][token] = torch.nan
    engine = native_engine(model, options=NativeOptions(decode=TOKENIZER.decode))
    engine.load(engine.weights.named(params), 7)
    return engine


STOPS_THERE = SETUP._replace(sampling=Sampling(max_new_tokens=12, stop=(1, BAD)))


@pytest.mark.parametrize("stream", [False, True])
def test_logits_that_are_no_numbers_are_an_error_of_their_request_alone(stream):
    async def program(endpoint):
        wrong = [ask(endpoint, path, body) for path, body in bodies("an a and a #", stream)]
        right = [ask(endpoint, path, body) for path, body in bodies("an a and a b", stream)]
        both = await asyncio.gather(*wrong, *right)
        return both[:4], both[4:], await ask(endpoint)

    wrong, right, last = serve(engine_without(BAD), program, setup=STOPS_THERE, lasting=True)
    assert [status for status, _ in wrong] == [500] * 4 and [status for status, _ in right] == [200] * 4
    kinds = [json.loads(rest)["error"]["type"] for _, rest in wrong]
    assert kinds == ["server_error", "server_error", "api_error", "server_error"]
    assert all("logits are not finite for this request" in json.loads(rest)["error"]["message"] for _, rest in wrong)
    assert last[0] == 200


def test_a_stream_that_has_begun_ends_with_an_error():
    """The token that greedy sampling writes last is one whose embedding is no number."""
    setup = SETUP._replace(sampling=Sampling(max_new_tokens=200, greedy=True))

    async def program(endpoint):
        return await asyncio.gather(*(ask(endpoint, path, body) for path, body in bodies("ab", stream=True)))

    async def whole(endpoint):
        return await ask(endpoint, body={"messages": bodies("ab")[0][1]["messages"]})

    text = json.loads(serve(engine_without([]), whole, setup=setup)[1])["choices"][0]["message"]["content"]
    late = max(text.index(character) for character in set(text) - set("uab>"))
    assert late > 20
    chat, _, messages, responses = serve(
        engine_without(TOKENIZER.encode(text[late])), program, setup=setup, lasting=True
    )
    for (status, events), kind in ((chat, "server_error"), (messages, "api_error"), (responses, "server_error")):
        assert status == 200 and b"logits are not finite for this request" in events
        assert f'"{kind}"' in events.decode()
    assert b"event: error\n" in messages[1] and b"event: error\n" in responses[1]


@pytest.mark.parametrize("temperature", [1e-46, 1e-300, 1e-40, 0])
def test_a_temperature_that_float32_has_not_is_greedy(temperature):
    assert Body({"temperature": temperature}).sampling() == {"greedy": True}
    assert Body({"temperature": 1e-4}).sampling() == {"temperature": 1e-4, "greedy": False}
    if temperature:
        with pytest.raises(ValueError, match=r"temperature is .*, it must be above 0 and at least 1e-05"):
            Sampling(temperature=temperature)


class WaitingChat(TemplateChat):
    """A chat whose rendering waits until it is let go."""

    def __init__(self):
        super().__init__(TOKENIZER)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def opening(self, messages, tools=()):
        if len(str(messages[0]["content"])) > 9:
            self.begun.set()
            assert self.go_on.wait(60)
        return super().opening(messages, tools)


def test_others_are_served_while_a_text_is_tokenised():
    chat = WaitingChat()
    body = {"messages": [{"role": "user", "content": "a" * 10}], "metadata": {"padding": " " * ASIDE_BYTES}}

    async def program(endpoint):
        large = asyncio.ensure_future(ask(endpoint, body=body))
        await asyncio.to_thread(chat.begun.wait, 60)
        others = [await ask(endpoint, "/health", method="GET"), await ask(endpoint)]
        waits = not large.done()
        chat.go_on.set()
        return waits, [status for status, _ in others], (await large)[0]

    assert serve(engine_of(), program, setup=LONG._replace(chat=chat)) == (True, [200, 200], 200)


class Forbidden(TemplateChat):
    """A chat that must not render."""

    def opening(self, messages, tools=()):
        raise AssertionError("it was rendered")


LONGEST = max(len(token.encode()) for token in TOKENIZER.get_vocab())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [LIMITS.length * LONGEST + 1, 3_000_000])
def test_a_text_that_cannot_fit_is_refused_before_it_is_rendered(size, stream):
    async def program(endpoint):
        answers = [await ask(endpoint, path, body) for path, body in bodies("a" * size, stream)]
        return answers, await ask(
            endpoint, "/v1/messages/count_tokens", {"messages": bodies("a" * size)[0][1]["messages"]}
        )

    answers, count = serve(engine_of(), program, setup=LONG._replace(chat=Forbidden(TOKENIZER)))
    for status, rest in [*answers, count]:
        assert status == 400 and f"{LIMITS.length} tokens of prompt and reply" in json.loads(rest)["error"]["message"]


def test_a_text_of_many_tokens_is_tokenised_in_parts_only():
    """By its bytes it could fit: an added token is long."""
    encoded = []

    def encode(text):
        encoded.append(len(text))
        return TOKENIZER.encode(text, add_special_tokens=False)

    bound = PromptBound(length=1000, longest=10_000, sees=False)
    with pytest.raises(LimitReached, match="more than 65536 tokens"):
        bound.check(Ask(text="a" * 5_000_000, size=5_000_000), encode)
    assert encoded == [PART_CHARACTERS]
    bound.check(Ask(text="a" * 15_000, size=15_000), encode)
    assert encoded == [PART_CHARACTERS]


@pytest.mark.parametrize("value", [{"a": [1, -2.5, None, True, "\N{GRINNING FACE} \\ \n"]}, "text", [[]], {"": {}}])
def test_large_json_reads_as_small(value):
    padded = json.dumps({"padding": "x" * ASIDE_BYTES, "value": value})
    for text in (padded.encode(), padded.encode("utf-16"), b"\xef\xbb\xbf" + padded.encode()):
        assert decode_json(text)["value"] == value
    with pytest.raises(ValueError):
        decode_json(padded.encode()[:-1])


def test_a_value_in_an_error_is_cut():
    with pytest.raises(BadRequest) as caught:
        Body({"stream": ["x" * 10_000_000] * 3}).flag("stream")
    assert len(str(caught.value)) < 200
