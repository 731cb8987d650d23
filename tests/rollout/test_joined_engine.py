"""The engine of joined generators, its lease server, and the weights that they pull."""

import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from small_engines import CONFIGS, weights

from funrl import trees
from funrl.asynchrony.leases import LeaseRule
from funrl.mesh.mesh import SINGLE, Mesh
from funrl.mesh.plan import lower_bound_bytes, plan, slices
from funrl.mesh.rules import GENERATE, STORED, fully_sharded, layouts
from funrl.mesh.text import parse
from funrl.models import decoder_model
from funrl.models.weight_dtypes import weight_dtypes
from funrl.processes.connections import Addresses, ConnectionServer, PeerError, connect_to, new_secret
from funrl.rollout.certificate import SyncError
from funrl.rollout.engine import WeightSpec, complete
from funrl.rollout.joined.engine import COMPLETION_WAIT_S, JoinedEngine, NoGeneratorError, StoppedError, prompt_units
from funrl.rollout.joined.generator import NEWS_S, NotJoinedError, _LeaseServers, _Progress, serve_run
from funrl.rollout.joined.lease_server import LeaseServer
from funrl.rollout.joined.messages import WEIGHTS, Hello, Orders, Report, TrainerFacts
from funrl.rollout.joined.weight_server import StaleVersionError, WeightServer, pieces_for, pull
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.native.loading import native_weights
from funrl.rollout.remote.digests import EngineDigests
from funrl.rollout.requests import requests_of
from funrl.rollout.sampling_parameters import Sampling

HOST = "127.0.0.1"
CONFIG = CONFIGS["qwen3"]
MODEL = decoder_model(CONFIG)
DTYPE = torch.float32
REQUESTS = requests_of([[1, 2, 3], [7], [4, 4]], Sampling(samples=2, max_new_tokens=5), seed=3)


def weight_server_of(mesh, stored, params, version=1):
    """The weight server of one of the trainer ranks, with its parts of weights."""
    names = native_weights(MODEL, SINGLE, DTYPE).names
    spec = WeightSpec(names, stored, mesh, DTYPE)
    named = dict(trees.named(stored))
    weight_server = WeightServer(spec, TrainerFacts(named, DTYPE, [0], digests=False))
    whole = dict(trees.named(params))
    parts = {name: whole[name][slices(x.box(mesh.rank), tuple((0, n) for n in x.shape))] for name, x in named.items()}
    weight_server.put(spec.named(trees.from_named(stored, parts.items())), version)
    return weight_server


MESHES = [("dp1", "dp1"), ("dp4", "tp2"), ("dp2,tp2", "dp1"), ("dp3", "tp2")]


@pytest.mark.parametrize("train,generate", MESHES)
def test_a_rank_receives_each_element_that_it_needs_once(train, generate):
    params = weights(CONFIG)
    sizes = parse(train)
    stored = layouts(MODEL.shapes, MODEL.axes, fully_sharded(STORED), sizes)
    weight_servers = [weight_server_of(Mesh(sizes, rank), stored, params) for rank in range(Mesh(sizes).world)]
    secret = new_secret()

    def served(weight_server):
        def serve(connection):
            assert connection.receive() == Hello("g", WEIGHTS)
            weight_server.serve(connection)

        return ConnectionServer(serve, secret, 5.0, HOST)

    boards = [served(weight_server) for weight_server in weight_servers]
    connections = [connect_to(HOST, board.port, secret, 5.0) for board in boards]
    for connection in connections:
        connection.send(Hello("g", WEIGHTS))
        assert connection.receive().dtype == DTYPE
    wanted = parse(generate)
    own = layouts(MODEL.shapes, MODEL.axes, GENERATE, wanted)
    ranks = range(len(weight_servers), len(weight_servers) + Mesh(wanted).world)
    least = plan(stored, own, weight_dtypes(own, DTYPE), src_ranks=range(len(weight_servers)), dst_ranks=ranks)
    for rank in range(Mesh(wanted).world):
        spec = WeightSpec(native_weights(MODEL, Mesh(wanted, rank), DTYPE).names, own, Mesh(wanted, rank), DTYPE)
        pieces = pieces_for(dict(trees.named(stored)), dict(trees.named(own)), rank, turn=rank)
        with pytest.raises(StaleVersionError, match="has weights 1, and 0 were asked for"):
            pull(connections, pieces, spec, 0, 5.0)
        tree, received = pull(connections, pieces, spec, 1, 5.0)
        assert received == lower_bound_bytes(least)[ranks[rank]]
        for (name, x), (_, whole) in zip(trees.named(tree), trees.named(params), strict=True):
            box = dict(trees.named(own))[name].box(rank)
            assert torch.equal(x, whole[slices(box, tuple((0, n) for n in whole.shape))]), name
        with pytest.raises(PeerError, match="has weights 1, and 2 are needed"):
            pull(connections, pieces, spec, 2, 0.1)
    for closing in (*connections, *boards):
        closing.close()


def joined_engine(rule=LeaseRule(silent_s=600), limit_s=60.0, digests=False):  # noqa: B008
    """An engine of a run with one rank, and its lease server."""
    stored = layouts(MODEL.shapes, MODEL.axes, STORED, SINGLE.sizes)
    names = native_weights(MODEL, SINGLE, DTYPE).names
    spec = WeightSpec(names, stored, SINGLE, DTYPE)
    weight_server = WeightServer(spec, TrainerFacts(dict(trees.named(stored)), DTYPE, [0], digests=digests))
    lease_server = LeaseServer(rule, weight_server)
    return JoinedEngine(CONFIG, SINGLE, weight_server, spec, lease_server, limit_s), lease_server


def test_a_generator_completes_what_a_native_engine_does():
    params = weights(CONFIG)
    native = native_engine(MODEL, SINGLE, DTYPE, options=NativeOptions(max_rows=3))
    native.load(native.weights.named(params), 4)
    expected = complete(native, REQUESTS)
    engine, lease_server = joined_engine()
    engine.load(engine.weights.named(params), 4)
    board = ConnectionServer(engine.serve, secret := new_secret(), 5.0, HOST)
    ended: list[Any] = []

    def generate():
        own = native_engine(MODEL, SINGLE, DTYPE, options=NativeOptions(max_rows=3))
        ended.append(serve_run(own, Addresses([(HOST, board.port)], secret), 30.0, lambda: False, lambda text: None))

    thread = threading.Thread(target=generate)
    thread.start()
    done = complete(engine, REQUESTS)
    engine.close(complete=True)
    thread.join(30)
    board.close()
    for a, b in zip(done, expected, strict=True):
        assert a.number == b.number and torch.equal(a.tokens, b.tokens) and torch.equal(a.raw_logp, b.raw_logp)
        assert torch.equal(a.versions, b.versions)
    how, counts = ended[0]
    assert how == "ended" and (counts.units, counts.loads) == (3, 1)
    assert counts.bytes == sum(x.nbytes for x in trees.leaves(params)) and lease_server.generators == ()


def test_a_unit_is_the_samples_of_a_prompt():
    assert [[request.number for request in unit] for unit in prompt_units(REQUESTS)] == [[0, 1], [2, 3], [4, 5]]
    assert prompt_units([]) == []


def test_without_a_generator_it_says_what_it_waits_for_and_ends(monkeypatch):
    monkeypatch.setattr("funrl.rollout.joined.engine.COMPLETION_WAIT_S", 0.0)
    engine, lease_server = joined_engine(limit_s=30.0)
    waited = iter([5.0, 15.0, 25.0, 35.0])
    monkeypatch.setattr(lease_server, "alone_s", lambda: next(waited))
    notes = []
    engine.note = notes.append
    engine.load(engine.weights.named(weights(CONFIG)), 1)
    with pytest.raises(NoGeneratorError, match=r"6 requests have waited 35 s for a generator, and none is in service"):
        complete(engine, REQUESTS)
    assert notes == ["no generator is in service: 6 requests wait for funrl join RUN_DIR"]
    assert engine.unfinished() == 0
    lease_server.close(complete=False)


def test_a_generator_is_missed_from_when_there_is_work_for_it():
    lease_server = joined_engine()[1]
    lease_server._alone_since -= 1000.0  # the run was busy with something else
    lease_server.open([REQUESTS[:2]])
    assert lease_server.alone_s() < 500.0
    lease_server._alone_since -= 1000.0
    lease_server.open([REQUESTS[2:4]])  # more work does not begin the wait anew
    assert lease_server.alone_s() > 500.0
    lease_server.close(complete=False)


def test_weights_wait_for_completions_of_other_replicas(monkeypatch):
    engine, lease_server = joined_engine()
    elsewhere = iter([3, 1, 0])
    monkeypatch.setattr("funrl.rollout.joined.engine.psum", lambda pending, *_: pending + next(elsewhere))
    waits = []
    monkeypatch.setattr(engine, "_receive", waits.append)
    monkeypatch.setattr(engine, "_weight_server", SimpleNamespace(put=lambda *_: waits.append("put")))
    engine.load([], 1)
    assert waits == [COMPLETION_WAIT_S, COMPLETION_WAIT_S, "put"]
    lease_server.close(complete=False)


def test_weights_wait_for_a_program_beside_which_gets_its_own_completions(monkeypatch):
    engine, lease_server = joined_engine()
    engine.load(engine.weights.named(weights(CONFIG)), 4)
    beside = engine.beside()
    engine.submit(REQUESTS[:2])
    beside.submit(REQUESTS[:2])
    work = asked(lease_server, "g", Report(0, 4, 9)).work
    assert [len(requests) for _, requests in work] == [2, 2]
    done = [
        (lease, [x._replace(number=r.number) for x, r in zip(_completions(4), some, strict=True)])
        for lease, some in work
    ]
    asked(lease_server, "g", Report(1, 4, 9, done))
    assert [x.number for x in beside.step()] == [x.number for x in engine.step()] == [0, 1]
    monkeypatch.setattr(engine, "_receive", lambda timeout_s: engine.leave(beside))
    engine.load(engine.weights.named(weights(CONFIG)), 5)
    assert not engine._beside
    beside.stop()
    assert beside.unfinished() == 1
    with pytest.raises(StoppedError):
        beside.step()
    lease_server.close(complete=False)


class Asked:
    """A connection to a lease server of a version, that keeps the reports."""

    def __init__(self, version, work=()):
        self.orders = [Orders(version, work)]
        self.reports = []

    def ask(self, report):
        self.reports.append(report)
        return self.orders.pop() if len(self.orders) > 1 else self.orders[0]._replace(work=())


def test_a_generator_waits_for_no_office_while_it_works_and_loads_what_all_have():
    lease_servers = [Asked(3), Asked(2)]
    sees = _LeaseServers(cast(Any, lease_servers), _Progress())
    sees.version = 2
    assert sees.exchange(8, False).load is None  # the second gives its last work of version 2 first
    assert [lease_server.reports[-1].wait_s for lease_server in lease_servers] == [NEWS_S / 2, NEWS_S / 2]
    lease_servers[1].orders = [Orders(2), Orders(2, [(0, REQUESTS[:2])])]
    assert len(sees.exchange(8, False).submit) == 2
    assert sees.exchange(8, False).load is None
    assert [lease_server.reports[-1].wait_s for lease_server in lease_servers] == [0.0, 0.0]
    sees.units.clear()
    lease_servers[1].orders = [Orders(3)]
    assert sees.exchange(8, False).load == 3


def test_a_run_that_is_not_complete_does_not_end_its_generators(monkeypatch):
    engine, _ = joined_engine()
    engine.load(engine.weights.named(weights(CONFIG)), 4)
    engine.submit(REQUESTS)
    board = ConnectionServer(engine.serve, secret := new_secret(), 5.0, HOST)
    own = native_engine(MODEL, SINGLE, DTYPE, options=NativeOptions(max_rows=3))
    working = threading.Event()

    def step():
        working.set()
        time.sleep(0.01)
        return []

    monkeypatch.setattr(own, "step", step)  # it completes nothing
    ended: list[Any] = []

    def generate():
        try:
            serve_run(own, Addresses([(HOST, board.port)], secret), 30.0, lambda: False, lambda text: None)
        except PeerError as error:
            ended.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    assert working.wait(60) and own.unfinished() > 0
    engine.close(complete=False)
    board.close()
    thread.join(60)
    assert len(ended) == 1 and not isinstance(ended[0], NotJoinedError)
    assert own.unfinished() == 0  # it may join again


def test_a_generator_of_another_protocol_is_told(monkeypatch):
    engine, lease_server = joined_engine()
    board = ConnectionServer(engine.serve, secret := new_secret(), 5.0, HOST)
    own = native_engine(MODEL, SINGLE, DTYPE, options=NativeOptions(max_rows=3))
    addresses = Addresses([(HOST, board.port)], secret)
    monkeypatch.setattr("funrl.rollout.joined.generator.PROTOCOL", 7)
    with pytest.raises(
        ValueError, match=r"are of version \d+, and those of this generator of 7; install the same funrl"
    ):
        serve_run(own, addresses, 30.0, lambda: False, lambda text: None)
    lease_server.close(complete=False)
    board.close()
    with pytest.raises(NotJoinedError):
        serve_run(own, addresses, 30.0, lambda: False, lambda text: None)


def test_new_weights_do_not_come_while_requests_are_unfinished():
    engine, lease_server = joined_engine()
    with pytest.raises(RuntimeError, match="no weights"):
        engine.submit(REQUESTS)
        engine.step()
    with pytest.raises(RuntimeError, match=r"6 requests are unfinished"):
        engine.load([], 1)
    done = engine.cancel(range(9))
    assert [x.finish for x in done] == ["cancelled"] * 6 and engine.unfinished() == 0
    with pytest.raises(KeyError, match="weights are missing: embed"):
        engine.load([], 1)
    lease_server.close(complete=False)


def asked(lease_server, name, report):
    """Orders of a lease server, asked without a connection."""
    return lease_server._orders(name, report)


def test_work_is_given_to_generators_with_the_newest_weights_that_have_proved_it():
    engine, lease_server = joined_engine(digests=True)
    engine.load(engine.weights.named(weights(CONFIG)), 4)
    engine.submit(REQUESTS)
    assert asked(lease_server, "g", Report(0)).version == 4  # and no work: it has no weights
    proof = EngineDigests(4, {"a": (5, 5)}, ())
    assert not asked(lease_server, "g", Report(1, 4, 9, digests=proof)).work  # the digests are not known yet
    lease_server.expect({"a": 5})
    (lease, requests), *more = asked(lease_server, "g", Report(2, 4, room=3)).work
    assert [request.number for request in requests] == [0, 1] and len(more) == 1
    done = [x._replace(number=request.number) for x, request in zip(_completions(4), requests, strict=True)]
    asked(lease_server, "g", Report(3, 4, 0, [(lease, done), (lease, done)]))
    assert [x.number for x in engine.step()] == [0, 1] and not engine.step()
    lease_server.withdraw([2])
    assert not asked(lease_server, "g", Report(4, 4, 0, held=[more[0][0]])).drop  # its other sample is wanted
    lease_server.withdraw([3])
    assert asked(lease_server, "g", Report(4, 4, 0, held=[more[0][0]])).drop == (more[0][0],)
    lease_server.close(complete=False)


def test_a_generator_with_other_weights_ends_the_run():
    engine, lease_server = joined_engine(digests=True)
    engine.load(engine.weights.named(weights(CONFIG)), 4)
    engine.submit(REQUESTS)
    lease_server.expect({"a": 5})
    asked(lease_server, "g", Report(0, 4, 9, digests=EngineDigests(4, {"a": (6, 6)}, ())))
    with pytest.raises(SyncError, match="generator g does not hold the trainer's weights 4: a differs; 1 of 1"):
        engine.step()
    lease_server.close(complete=False)


def test_completions_of_another_version_end_the_run():
    engine, lease_server = joined_engine()
    engine.load(engine.weights.named(weights(CONFIG)), 4)
    engine.submit(REQUESTS[:2])
    ((lease, requests),) = asked(lease_server, "g", Report(0, 4, 9)).work
    done = [x._replace(number=request.number) for x, request in zip(_completions(3), requests, strict=True)]
    asked(lease_server, "g", Report(1, 4, 9, [(lease, done)]))
    with pytest.raises(SyncError, match=r"generator g delivers request 0 with weights \[3\]"):
        engine.step()
    lease_server.close(complete=False)


def test_too_few_completions_of_a_lease_end_the_run():
    engine, lease_server = joined_engine()
    engine.load(engine.weights.named(weights(CONFIG)), 4)
    engine.submit(REQUESTS[:2])
    ((lease, requests),) = asked(lease_server, "g", Report(0, 4, 9)).work
    done = [x._replace(number=request.number) for x, request in zip(_completions(4), requests, strict=True)]
    asked(lease_server, "g", Report(1, 4, 9, [(lease, done[:1])]))
    with pytest.raises(SyncError, match="generator g delivers 1 of 2 requests of a lease"):
        engine.step()
    lease_server.close(complete=False)


def test_a_generator_that_comes_back_has_proved_its_weights():
    engine, lease_server = joined_engine(digests=True)
    engine.load(engine.weights.named(weights(CONFIG)), 4)
    engine.submit(REQUESTS[:2])
    asked(lease_server, "g", Report(0, 4, 9, digests=EngineDigests(4, {"a": (5, 5)}, ())))
    with lease_server._lock:
        lease_server._lost(lease_server._leases.leave("g", "it has been silent"))
    assert not asked(lease_server, "g", Report(1, 4, 9)).work
    lease_server.expect({"a": 5})
    assert asked(lease_server, "g", Report(2, 4, 9)).work
    engine.cancel(range(9))
    engine.load(engine.weights.named(weights(CONFIG)), 5)
    assert not lease_server._given and not lease_server._proved
    lease_server.close(complete=False)


def test_a_generator_that_comes_back_after_it_was_lost_drops_what_it_held():
    engine, lease_server = joined_engine(LeaseRule(silent_s=0.2))
    engine.load(engine.weights.named(weights(CONFIG)), 4)
    engine.submit(REQUESTS[:2])
    ((lease, requests),) = asked(lease_server, "g", Report(0, 4, 9)).work
    deadline = time.monotonic() + 30
    while lease_server.generators:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    done = [x._replace(number=request.number) for x, request in zip(_completions(4), requests, strict=True)]
    orders = asked(lease_server, "g", Report(1, 4, 0, [(lease, done)], held=[lease]))
    assert orders.drop == (lease,) and not engine.step()
    assert asked(lease_server, "g", Report(2, 4, 9)).work[0][1] == requests
    lease_server.close(complete=False)


def _completions(version):
    """Two completions of a token each, of weights with a version."""
    native = native_engine(MODEL, SINGLE, DTYPE, options=NativeOptions(max_rows=3))
    native.load(native.weights.named(weights(CONFIG)), version)
    return complete(native, requests_of([[1]], Sampling(samples=2, max_new_tokens=1), seed=3))
