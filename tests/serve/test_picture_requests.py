"""Requests with pictures in every dialect: they are tokens of the prompt, and what cannot be read is a 400."""

import asyncio
import base64
import io
import json
import threading

import pytest
import torch
from picture_runs import TEMPLATE, save_seeing_model
from PIL import Image
from small_chats import SETUP
from small_servers import LIMITS, needs_clients, scripted, serve
from test_server import ask

from funrl.data.pictures import picture_form, read_picture, with_picture_form
from funrl.data.tokenizer import load_tokenizer
from funrl.environments.chat import TemplateChat
from funrl.mesh.mesh import SINGLE, single
from funrl.models.huggingface.directories import load
from funrl.rollout.native.engine import native_engine
from funrl.rollout.policy import Policy, PolicySetup
from funrl.rollout.resident import run_beside
from funrl.rollout.sampling_parameters import Sampling
from funrl.serve.asks import BadRequest, Body
from funrl.serve.chat_completions import read_chat
from funrl.serve.endpoint import speech_of
from funrl.serve.session import Session

pytestmark = needs_clients


def url(value, size=(16, 8), kind="PNG"):
    file = io.BytesIO()
    Image.new("RGB", size, (value,) * 3).save(file, kind)
    return f"data:image/{kind.lower()};base64," + base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """(new engine, setup) of a tiny Qwen2.5-VL."""
    folder = tmp_path_factory.mktemp("served") / "model"
    save_seeing_model(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    model, params = load(folder, torch.float64)
    tokenizer = with_picture_form(load_tokenizer(folder), picture_form(model.config, str(folder)))

    def new_engine():
        engine = native_engine(model, single())
        engine.load(engine.weights.named(params), 0)
        return engine

    return new_engine, PolicySetup(Sampling(max_new_tokens=3, stop=(1,)), TemplateChat(tokenizer))


async def asked(endpoint, **request):
    """Status and JSON of an answer."""
    status, answer = await ask(endpoint, **request)
    return status, json.loads(answer)


def chat(*parts):
    return {"model": "policy", "messages": [{"role": "user", "content": list(parts)}], "return_token_ids": True}


def image_url(given):
    return {"type": "image_url", "image_url": {"url": given}}


QUESTION = {"type": "text", "text": "a cab ?"}


def test_pictures_are_tokens_of_the_conversation(seeing):
    engine, setup = seeing
    bodies = [chat(image_url(url(5)), QUESTION), chat(image_url(url(9)), image_url(url(7, (8, 8), "JPEG")), QUESTION)]

    async def program(endpoint):
        answers = [(await asked(endpoint, body=body))[1] for body in bodies]
        reply = {"role": "assistant", "content": answers[1]["choices"][0]["message"]["content"]}
        longer = {**bodies[1], "messages": [*bodies[1]["messages"], reply, *bodies[0]["messages"]]}
        answers.append((await asked(endpoint, body=longer))[1])
        return answers, endpoint.session.trajectories()

    answers, ends = serve(engine(), program, setup)
    placeholder = setup.chat.tokenizer.picture_form.tower.placeholder
    assert [answer["prompt_token_ids"].count(placeholder) for answer in answers] == [2, 3, 5]
    owned = [[node.owned.values["grids"].tolist() for node in end.nodes() if node.owned] for end in ends]
    assert owned == [[[[2, 4]]], [[[2, 4], [2, 2]], [[2, 4]]]]


DIALECTS = {
    "/v1/responses": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url(5)}]}]},
        lambda answer: answer["usage"]["input_tokens"],
    ),
    "/v1/messages": (
        {
            "max_tokens": 2,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": url(5).partition(",")[2]},
                        }
                    ],
                }
            ],
        },
        lambda answer: answer["usage"]["input_tokens"],
    ),
}


@pytest.mark.parametrize("path", DIALECTS)
def test_other_dialects_have_pictures_too(seeing, path):
    engine, setup = seeing
    body, tokens = DIALECTS[path]
    status, answer = serve(engine(), lambda endpoint: asked(endpoint, path=path, body=body), setup)
    assert status == 200 and tokens(answer) == 5  # begin, two of the picture, end, "?"


BAD = {
    "an address": (image_url("https://example.com/a.png"), "https://example.com/a.png', and none is fetched"),
    "a file": (image_url("/etc/passwd"), "/etc/passwd', and none is fetched"),
    "no picture": (image_url("data:image/png;base64,aGVsbG8="), "cannot be read"),
    "no base64": (image_url("data:image/png;base64,%%%"), "is no base64"),
    "long": (image_url(url(5, (4000, 1))), "4000 x 1 pixels: one side is more than 200 times"),
    "of another kind": ({"type": "video_url", "video_url": {"url": url(5)}}, "only text is served"),
}


def test_what_cannot_be_read_is_refused_in_one_line(seeing, monkeypatch):
    engine, setup = seeing
    cases = [chat(part, QUESTION) for part, _ in BAD.values()]

    async def program(endpoint):
        answers = [await asked(endpoint, body=body) for body in cases]
        monkeypatch.setattr("funrl.data.pictures.MOST_STORED_PIXELS", 100)
        return [*answers, await asked(endpoint, body=chat(image_url(url(5)), QUESTION))]

    *answers, huge = serve(engine(), program, setup)
    for (status, answer), (_, words) in zip([*answers, huge], [*BAD.values(), (None, "resize it")], strict=True):
        message = answer["error"]["message"]
        assert status == 400 and words in message and "\n" not in message, message


LIMITS_OF_A_REQUEST = {
    "MOST_PICTURES": (1, "the request has 2 pictures; 1 are allowed: send fewer"),
    "MOST_ENCODED": (99, f"the request has {len(url(5) + url(7))} characters of pictures in base64; 99 are allowed"),
    "MOST_PIXELS": (255, "the request has 256 pixels of pictures; 255 are allowed: send smaller pictures"),
}


@pytest.mark.parametrize("limit", LIMITS_OF_A_REQUEST)
def test_a_request_has_bounded_pictures(seeing, monkeypatch, limit):
    engine, setup = seeing
    most, words = LIMITS_OF_A_REQUEST[limit]
    body = chat(image_url(url(5)), image_url(url(7)), QUESTION)
    monkeypatch.setattr(f"funrl.serve.pictures.{limit}", most)
    status, answer = serve(engine(), lambda endpoint: asked(endpoint, body=body), setup)
    assert status == 400 and words in answer["error"]["message"]
    monkeypatch.setattr(f"funrl.serve.pictures.{limit}", 1 << 20)
    assert serve(engine(), lambda endpoint: asked(endpoint, body=body), setup)[0] == 200


def test_other_requests_are_answered_while_a_picture_is_decoded(seeing, monkeypatch):
    engine, setup = seeing
    answered = threading.Event()
    waited = []

    def slow(given):
        waited.append(answered.wait(60))
        return read_picture(given)

    monkeypatch.setattr("funrl.serve.pictures.read_picture", slow)

    async def program(endpoint):
        shown = asyncio.create_task(asked(endpoint, body=chat(image_url(url(5)), QUESTION)))
        first, _ = await asked(endpoint, body=chat(QUESTION))
        answered.set()
        return first, (await shown)[0]

    assert serve(engine(), program, setup) == (200, 200) and waited == [True]


def test_a_model_of_text_refuses_them():
    status, answer = serve(
        scripted("hi"), lambda endpoint: asked(endpoint, body=chat(image_url(url(5)), QUESTION)), SETUP
    )
    assert status == 400 and "the model reads text only" in answer["error"]["message"]


@pytest.mark.parametrize("most,forks", [(1, 1), (1 << 20, 0)], ids=["few", "many"])
def test_a_server_forgets_the_oldest_pictures(seeing, monkeypatch, most, forks):
    engine, setup = seeing
    monkeypatch.setattr("funrl.serve.session.KEPT_PICTURE_BYTES", most)
    bodies = [chat(image_url(url(value)), QUESTION) for value in (5, 9)]

    async def program(resident):
        session = Session(lambda _: Policy(resident.ask, setup, 3, LIMITS), speech_of(setup.chat), kept=8)

        async def forks_of(body):
            """Histories that are not found when a conversation continues."""
            (exchange,) = await session.answer(read_chat(Body(body)), json.dumps(body).encode(), again=False)
            return exchange, session.forks

        replies = [(await forks_of(body))[0] for body in bodies]
        counts = []
        for body, reply in [*zip(bodies, replies, strict=True)][::-1]:  # the last one is remembered in any case
            results = {"role": "assistant", "content": reply.content}
            longer = {**body, "messages": [*body["messages"], results, {"role": "user", "content": "a cab ?"}]}
            counts.append((await forks_of(longer))[1])
        with pytest.raises(BadRequest, match="is no base64"):
            await forks_of(chat(image_url("data:image/png;base64,%%%")))
        await asyncio.sleep(0)
        return counts, len(session._answers)

    counts, answers = run_beside(engine(), SINGLE, program)
    assert counts == [0, forks] and answers == 4  # an answer that failed is not kept
