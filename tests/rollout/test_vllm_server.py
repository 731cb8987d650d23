"""A server of vLLM that is killed, one that is not there, and what the two sides tell each other."""

import http.client
import json
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from small_engines import KINDS, NO_VLLM, PROMPTS, WIDE, ServerProcess, assert_same, load, weights

from funrl import trees
from funrl.mesh.mesh import Mesh, MeshError, parse
from funrl.mesh.patches import apply_patch
from funrl.models import decoder_model
from funrl.models.huggingface.names import names_of
from funrl.rollout.engine import complete
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.requests import requests_of
from funrl.rollout.sampling_parameters import Sampling
from funrl.rollout.vllm import client as vllm_client_module
from funrl.rollout.vllm import server as vllm_server
from funrl.rollout.vllm.client import EngineServerError, vllm_client
from funrl.rollout.vllm.contract import CacheCounts, CoreRequest, SampledTokens, VLLMOptions
from funrl.rollout.vllm.server import CoreHandler, CoreServer, plain_requests, request_of

MODEL = decoder_model(WIDE)
needs_vllm = pytest.mark.skipif(NO_VLLM is not None, reason=str(NO_VLLM))


@needs_vllm
def test_a_killed_server_rejoins_with_the_current_weights():
    server, how = ServerProcess(), Sampling(max_new_tokens=24, samples=2)
    engine = vllm_client(server.url, MODEL, options=VLLMOptions(max_rows=64, cache_bytes=1 << 24), timeout_s=120)
    load(engine, weights(WIDE, seed=3), 1)
    load(engine, weights(WIDE, seed=0), 2)
    requests = requests_of(PROMPTS, how, 0)
    whole = complete(engine, requests)
    engine.submit(requests)
    for _ in range(5):
        assert engine.step() == []
    server.kill()
    port, ended = int(server.url.rsplit(":", 1)[1]), threading.Event()

    def serve_again():
        time.sleep(1)
        again = ServerProcess(port)
        ended.wait(60)  # a fork ends with the thread that has started it
        again.kill()

    starter = threading.Thread(target=serve_again)
    starter.start()
    done = []
    while engine.unfinished():
        done += engine.step()
    assert engine.core.generation == 2 and engine.version == 2
    assert_same(sorted(done, key=lambda completion: completion.number), whole, 1e-5)
    load(engine, weights(WIDE, seed=1), 3)
    expected = complete(KINDS["packed float32"].engine(WIDE, seed=1, version=3), requests)
    assert_same(complete(engine, requests), expected, 2e-5)
    ended.set()
    starter.join()


@needs_vllm
def test_a_server_says_what_it_could_sample_also_of_interrupted_completions():
    server = ServerProcess()
    options = VLLMOptions(max_rows=64, cache_bytes=1 << 24, record_kept=True)
    engine = load(vllm_client(server.url, MODEL, options=options, timeout_s=120), weights(WIDE), 1)
    peer = load(native_engine(MODEL, options=NativeOptions(record_kept=True)), weights(WIDE), 1)
    requests = requests_of(PROMPTS, Sampling(max_new_tokens=12, top_p=0.8, temperature=0.7), 0)
    engine.submit(requests)
    done = [x for _ in range(4) for x in engine.step()]
    engine.pause()
    engine.resume()
    begun = engine.cancel([0])
    engine.submit([requests[0]._replace(begun=begun[0])])
    while engine.unfinished():
        done += engine.step()
    for ours, theirs in zip(sorted(done, key=lambda x: x.number), complete(peer, requests), strict=True):
        assert ours.tokens.equal(theirs.tokens) and (ours.sampling_logp - theirs.sampling_logp).abs().max() < 2e-5
        assert all(a.equal(b) for a, b in zip(ours.kept, theirs.kept, strict=True))
    server.kill()


@needs_vllm
def test_another_model_is_refused_by_a_server_that_has_one():
    engine = KINDS["vllm server"].engine(WIDE)
    with pytest.raises(EngineServerError, match=f"{engine.core.url} answers to open: .* has another model"):
        vllm_client(engine.core.url, MODEL, options=VLLMOptions(max_rows=8))


class CountingCore:
    """A core that draws 1, 2, 3 ... for each request, and keeps what it is given."""

    def __init__(self):
        self.requests, self.weights, self.loads, self.generation = {}, {}, 0, 0

    def add(self, requests):
        self.requests |= {request.number: request for request in requests}

    def step(self):
        results = []
        for number, request in list(self.requests.items()):
            results.append(SampledTokens(number, [request.written + 1], [-1.0], [-2.0], 0))
            self.requests[number] = request._replace(written=request.written + 1, count=request.count - 1)
            if request.count == 1:
                del self.requests[number]
        return results

    def drop(self, numbers):
        self.requests = {number: request for number, request in self.requests.items() if number not in numbers}

    def forget(self):
        self.requests = {}

    def reload(self, named_weights):
        self.weights, self.loads = dict(named_weights), self.loads + 1

    def sleep(self): ...

    def wake(self): ...

    def held(self):
        return self.weights.items()

    def counts(self):
        return CacheCounts(16, 1, 8, len(self.requests), 0)


def counting_client():
    """An engine over a server, the server, and its core."""
    core = CountingCore()
    server = CoreServer(("127.0.0.1", 0), lambda message: core)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    engine = vllm_client(f"http://127.0.0.1:{server.server_port}", MODEL, timeout_s=120)
    engine.record_digests = True
    return load(engine, weights(WIDE), 4), server, core


def test_tokens_after_a_restart_have_the_digest_of_what_the_new_server_holds():
    engine, server, core = counting_client()
    (request,) = requests_of([[1]], Sampling(max_new_tokens=4), 0)
    engine.submit([request])
    for _ in range(2):
        engine.step()
    core.weights["model.norm.weight"] = core.weights["model.norm.weight"] + 1  # those of the server after its restart
    core.requests = {}
    engine.core.generation += 1
    done = []
    while not done:
        done = engine.step()
    first, second, third, fourth = done[0].digests.tolist()
    assert first == second != third == fourth
    server.shutdown()


def test_a_completion_without_digests_is_refused_before_it_is_registered():
    engine, server, _ = counting_client()
    (request,) = requests_of([[1]], Sampling(max_new_tokens=4), 0)
    (done,) = complete(engine, [request._replace(most=2)])
    with pytest.raises(ValueError, match="what sampled it was not recorded; --noverify_sync continues it without"):
        engine.submit([request._replace(begun=done._replace(digests=None))])
    assert engine.unfinished() == 0
    server.shutdown()


def test_a_completion_without_masks_is_refused_before_it_is_registered():
    engine, server, _ = counting_client()
    (request,) = requests_of([[1]], Sampling(max_new_tokens=4), 0)
    (done,) = complete(engine, [request._replace(most=2)])
    engine._records_kept = True
    with pytest.raises(ValueError, match="what it could have sampled was not recorded"):
        engine.submit([request._replace(begun=done)])
    assert engine.unfinished() == 0
    server.shutdown()


@pytest.mark.parametrize("lost", ["bucket", "reload", "add", "step", "drop", "wake", "sleep"])
def test_an_answer_that_is_lost_costs_nothing_but_time(lost, monkeypatch):
    """The server stays, but one connection breaks."""
    core, times = CountingCore(), iter([True])
    answer = CoreHandler.do_POST

    def breaks(handler):
        if handler.path == f"/{lost}" and armed and next(times, False):
            return handler.connection.shutdown(socket.SHUT_RDWR)
        return answer(handler)

    monkeypatch.setattr(CoreHandler, "do_POST", breaks)
    server, armed = CoreServer(("127.0.0.1", 0), lambda message: core), []
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    engine = vllm_client(f"http://127.0.0.1:{server.server_port}", MODEL, timeout_s=120)
    armed.append(True)
    params = weights(WIDE)
    load(engine, params, 4)
    assert set(core.weights) == {there for there, _ in names_of(MODEL).values()} and core.loads == 1
    assert torch.equal(core.weights["model.norm.weight"], params["norm"])
    engine.submit(requests_of([[1], [2, 3], [4]], Sampling(max_new_tokens=6), 0))
    for _ in range(3):
        engine.step()
    engine.cancel([1])
    engine.pause()
    engine.resume()
    done = []
    while engine.unfinished():
        done += engine.step()
    assert engine.core.generation == 2 and next(times, None) is None  # the first is that of its beginning
    assert [(completion.number, completion.tokens.tolist()) for completion in done] == [
        (0, [1, 2, 3, 4, 5, 6]),
        (2, [1, 2, 3, 4, 5, 6]),
    ]
    assert all(item.versions.tolist() == [4] * 6 for item in done)
    server.shutdown()


@pytest.mark.parametrize("first", ["load", "submit", "step", "cancel", "pause"])
def test_a_server_restarted_while_nobody_asks_gets_its_state_back(first):
    """The client's next request is its first to the new server."""

    def start(port, core):
        server = CoreServer(("127.0.0.1", port), lambda message: core)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        return server, thread

    server, thread = start(0, CountingCore())
    engine = vllm_client(f"http://127.0.0.1:{server.server_port}", MODEL, **BF16)
    params = trees.map(lambda x: x.bfloat16(), weights(WIDE))
    load(engine, params, 1)
    if first not in ("submit", "load"):
        engine.submit(requests_of([[1], [2, 3]], Sampling(max_new_tokens=4), 0))
        engine.step()
    server.shutdown()
    thread.join(60)
    server.server_close()
    core = CountingCore()
    server, _ = start(server.server_port, core)
    if first == "load":
        params["norm"][0] += 1  # few numbers: the client has patches
        load(engine, params, 2)
    if first in ("submit", "load"):
        engine.submit(requests_of([[1], [2, 3]], Sampling(max_new_tokens=4), 0))
    if first == "cancel":
        engine.cancel([1])
    if first == "pause":
        engine.pause()
        engine.resume()
    done = []
    while engine.unfinished():
        done += engine.step()
    assert engine.core.generation == 2 and core.loads == 1
    for name, x in engine.weights.named(params):
        assert torch.equal(core.weights[name], x), name
    numbers = [0] if first == "cancel" else [0, 1]
    assert [(item.number, item.tokens.tolist()) for item in done] == [(number, [1, 2, 3, 4]) for number in numbers]
    server.shutdown()


def test_an_error_of_vllm_is_no_restart():
    core = CountingCore()
    server = CoreServer(("127.0.0.1", 0), lambda message: core)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    engine = vllm_client(f"http://127.0.0.1:{server.server_port}", MODEL, timeout_s=120)
    core.reload = lambda named_weights: 1 / 0
    with pytest.raises(EngineServerError, match="ZeroDivisionError"):
        load(engine, weights(WIDE), 1)
    assert engine.core.generation == 1
    server.shutdown()


@pytest.fixture
def served(monkeypatch):
    """A server over a core that counts, whose clients are soon given up."""
    monkeypatch.setattr(vllm_server, "IDLE_S", 1.0)
    core = CountingCore()
    server = CoreServer(("127.0.0.1", 0), lambda message: core)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server, core
    server.shutdown()
    thread.join(60)
    assert not thread.is_alive()
    server.server_close()


def asked(server, what, body=b"{}", **headers):
    """Status and text of the answer to a request with some headers."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("POST", f"/{what}", body, headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


BF16 = {"dtype": torch.bfloat16, "timeout_s": 120}


@pytest.mark.parametrize("fault", ["", "lost", "always", "reopened"])
def test_patches_give_the_server_the_weights_of_a_whole_load(fault, monkeypatch):
    """Ten versions; the sixth patch, or it and all later ones, has a wrong bit, or the server let go of its weights."""
    core = CountingCore()
    server = CoreServer(("127.0.0.1", 0), lambda message: core)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    engine = vllm_client(f"http://127.0.0.1:{server.server_port}", MODEL, **BF16)
    notes = []
    engine.core.note = notes.append
    params = trees.map(lambda x: x.bfloat16(), weights(WIDE))
    whole = None
    encode = vllm_client_module.encode_patch

    def damaged(new, old):
        patch = encode(new, old)
        patch[-1] ^= 1
        return patch

    for version in range(10):
        generator = torch.Generator().manual_seed(version)
        for x in trees.leaves(params):
            x.view(-1)[torch.randint(x.numel(), (1 + x.numel() // 100,), generator=generator)] *= 1.5
        if version == 6 and fault == "reopened":
            server._empty()
        with monkeypatch.context() as patch:
            if (version == 6 and fault == "lost") or (version in (6, 7) and fault == "always"):
                patch.setattr(vllm_client_module, "encode_patch", damaged)
            load(engine, params, version)
        whole = engine.core.sent if whole is None else whole
        faulty = [6, 7, 8, 9] if fault == "always" else [6] * (fault != "")  # after two no patches are sent
        assert (engine.core.sent == whole) == (version in (0, *faulty))
        assert engine.core.sent == whole or engine.core.sent < whole / 4
        for name, x in engine.weights.named(params):
            assert torch.equal(core.weights[name], x), (version, name)
    assert core.loads == 10
    assert len(notes) == (fault == "always")
    server.shutdown()


def test_a_tensor_too_long_for_indices_has_no_patch():
    bucket = {"w": torch.empty(1 << 31, dtype=torch.bfloat16, device="meta")}
    assert vllm_client_module.bucket_patch(0, bucket, bucket) is None


def test_a_late_patch_does_not_overwrite_the_bucket_after_it(served, monkeypatch):
    """The patch's client is gone; another sends all weights while the patch is applied."""
    server, core = served
    asked(server, "open")
    old, new, sent = ({"w": torch.full((64,), value).bfloat16()} for value in (1.0, 2.0, 3.0))
    new["w"][1:] = old["w"][1:]
    patch = vllm_client_module.bucket_patch(0, old, new)
    assert asked(server, "bucket", save(old))[0] == asked(server, "reload", b'{"buckets": 1}')[0] == 200
    entered, leave = threading.Event(), threading.Event()

    def late(*args):
        entered.set()
        leave.wait(60)
        return apply_patch(*args)

    monkeypatch.setattr(vllm_server, "apply_patch", late)
    threads = [
        threading.Thread(target=asked, args=(server, *rest)) for rest in (("patch", patch), ("bucket", save(sent)))
    ]
    threads[0].start()
    assert entered.wait(60)
    threads[1].start()
    threads[1].join(0.5)
    leave.set()
    for thread in threads:
        thread.join(60)
    assert asked(server, "reload", b'{"buckets": 1}')[0] == 200
    assert torch.equal(core.weights["w"], sent["w"])


def test_a_reload_of_another_number_of_buckets_is_refused(served):
    server, core = served
    asked(server, "open")
    bucket = save({"w": torch.ones(2)})
    asked(server, "bucket", bucket)
    for body in (b'{"buckets": 2}', b"{}"):
        status, text = asked(server, "reload", body)
        assert status == 400 and text.startswith("reload: ") and "buckets were sent" in text
    assert core.loads == 0
    for _ in range(2):
        asked(server, "bucket", bucket)
    assert asked(server, "reload", b'{"buckets": 2}')[0] == 200 and core.loads == 1


def test_clients_that_say_nothing_block_nobody_and_are_closed(served):
    server, _ = served
    half = b"POST /bucket HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\nhalf"
    connections = [socket.create_connection(("127.0.0.1", server.server_port), 60) for _ in range(3)]
    connections[1].sendall(b"POST /status HT")
    connections[2].sendall(half)
    assert asked(server, "open") == (200, "{}")
    for connection in connections:
        assert connection.recv(100) == b""  # the server has closed it
        connection.close()
    end = time.monotonic() + 60
    while list(Path(server.buckets.name).iterdir()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not list(Path(server.buckets.name).iterdir())  # half a bucket is not kept


def test_a_busy_core_still_has_a_status_and_takes_requests_in_turn(served):
    server, core = served
    entered, leave, steps = threading.Event(), threading.Event(), []

    def step():
        steps.append(threading.get_ident())
        entered.set()
        leave.wait(60)
        return []

    core.step = step
    asked(server, "open")
    others = [threading.Thread(target=asked, args=(server, "step")) for _ in range(2)]
    for other in others:
        other.start()
    assert entered.wait(60)
    assert json.loads(asked(server, "status")[1]) == {"instance": server.instance, "open": True}
    assert len(steps) == 1
    leave.set()
    for other in others:
        other.join(60)
    assert len(steps) == 2 and len(set(steps)) == 1


@pytest.mark.parametrize(
    ("headers", "code", "message"),
    [
        ({"Host": "example.org"}, 403, "step: Host: example.org: this server is for its own machine"),
        ({"Host": "example.org:8100"}, 403, "step: Host: example.org: this server"),
        ({"Origin": "http://127.0.0.1:8100"}, 403, "step: Origin: http://127.0.0.1:8100: a page in a browser may not"),
        ({"Origin": "null"}, 403, "step: Origin: null"),
        ({"Content-Length": "-1"}, 400, "step: Content-Length: -1: a number of bytes is needed"),
        ({"Content-Length": "x"}, 400, "step: Content-Length: x: a number"),
        (
            {"Content-Length": "1000000000000"},
            413,
            "step: Content-Length: 1000000000000: it must be at most 1073741824",
        ),
    ],
)
def test_requests_of_others_and_absurd_sizes_are_refused(served, headers, code, message):
    server, core = served
    asked(server, "open")
    core.step = lambda: pytest.fail("a request that is refused reached the core")
    status, text = asked(server, "step", b"{}", **headers)
    assert status == code and text.startswith(message)


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (b"not json", 400, "Expecting value"),
        (b"[" * 100_000, 400, "recursion"),
        (b"[1]", 400, "step: an object with entries is needed, not [1]"),
        (b"{}", 500, "RuntimeError: out of pages"),
    ],
    ids=["garbage", "nested", "a list", "an error of vLLM"],
)
def test_answers_to_what_fails_have_no_traceback(served, body, code, message):
    server, core = served
    asked(server, "open")

    def fails():
        raise RuntimeError("out of pages")

    core.step = fails
    status, text = asked(server, "step", body)
    assert status == code and message in text
    assert "Traceback" not in text and "File " not in text and ".py" not in text
    assert asked(server, "status")[0] == 200


@pytest.mark.skipif(NO_VLLM is None, reason="vLLM is installed here")
def test_without_vllm_a_server_says_so_and_stays():
    from funrl.rollout.vllm.server import start_here

    server = CoreServer(("127.0.0.1", 0), lambda message: start_here(message, "cpu"))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    for _ in range(2):
        with pytest.raises(EngineServerError, match=r"answers to open: (?s:.*)vLLM is not installed"):
            vllm_client(f"http://127.0.0.1:{server.server_port}", MODEL)
    server.shutdown()


def test_a_server_that_is_not_there_is_waited_for_and_named():
    with socket.socket() as taken:  # nothing listens there, and nothing else can
        taken.bind(("127.0.0.1", 0))
        url, begin = f"http://127.0.0.1:{taken.getsockname()[1]}", time.monotonic()
        says = f"the server {url} has not answered for 0.3 s .*refused.*--engine_url"
        with pytest.raises(EngineServerError, match=says):
            vllm_client(url, MODEL, timeout_s=0.3)
    assert 0.3 < time.monotonic() - begin < 60


def test_a_server_that_says_nothing_is_not_waited_for_forever():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(EngineServerError, match=f"the server {url} has not answered for 0.3 s .*timed out"):
            vllm_client(url, MODEL, timeout_s=0.3)


def test_a_server_holds_a_whole_model():
    with pytest.raises(MeshError, match="without tp instead of tp2"):
        vllm_client("http://127.0.0.1:1", MODEL, Mesh(parse("tp2")), torch.float32)


def test_a_request_survives_the_way_to_the_server():
    how = Sampling(temperature=0.7, stop=(3, 5), stop_strings=("a",), top_k=3, min_p=0.1, repetition_penalty=1.1)
    first = CoreRequest(7, [1, 2, 3], 1, 9, how, -(1 << 63))
    (fields,) = json.loads(json.dumps(plain_requests([first])))
    assert request_of(fields) == first
