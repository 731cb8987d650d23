"""Pools of ranks: the text of a placement, and rows, requests and weights between ranks of two of them."""

import functools
import time
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from funrl.kinds import FIELD_KINDS
from funrl.mesh.collectives import gather_objects
from funrl.mesh.launch import launch, submesh
from funrl.mesh.mesh import parse, single
from funrl.mesh.plan import lower_bound_bytes, plan, received_bytes, sent_bytes
from funrl.mesh.pools import channel, handover
from funrl.mesh.pools.channel import Answers, End, Requests, end_requests
from funrl.mesh.pools.handover import Handover, messages_from, messages_to, receive_rows, send_rows
from funrl.mesh.pools.placement import ranks_text, read_placement
from funrl.mesh.rules import GENERATE, STORED, fully_sharded, layouts
from funrl.mesh.text import MeshError
from funrl.models import decoder_model
from funrl.tasks.embedded import embedded_task

KINDS = {"tokens": FIELD_KINDS["token"], "logp": FIELD_KINDS["token"], "pairs": FIELD_KINDS["token_k"]}
ONE = parse("dp1")


@pytest.mark.parametrize(
    "text,mesh,placed",
    [
        ("train:dp2@0-1 generate:dp1@2", "dp1", "train:dp2@0-1 generate:dp1@2"),
        ("generate:1", "dp1", "train:dp1@0 generate:dp1@1"),
        ("generate:tp2", "dp2,tp2", "train:dp2,tp2@0-3 generate:tp2@4-5"),
        ("generate:dp2@1-2 train:dp2", "dp1", "train:dp2@0,3 generate:dp2@1-2"),
        ("train:3@0,2-3 generate:1", "dp1", "train:dp3@0,2-3 generate:dp1@1"),
        ("reference:tp2@1-2 train:1 generate:1", "dp1", "train:dp1@0 generate:dp1@3 reference:tp2@1-2"),
    ],
)
def test_a_placement_is_all_ranks_once(text, mesh, placed):
    placement = read_placement(text, parse(mesh))
    assert str(placement) == placed
    pools = (placement.train, placement.generate, *placement.scoring.values())
    assert sorted(rank for pool in pools for rank in pool.ranks) == list(range(placement.world))
    assert placement.launched == parse(f"dp{placement.world}")
    assert read_placement(str(placement), ONE) == placement


@pytest.mark.parametrize(
    "text,problem",
    [
        ("", "no pool generates; add one, such as generate:2"),
        ("train:dp2@0-1", "no pool generates"),
        ("train:dp2@0-1 generate:dp1@1", "rank 1 is in two pools; every rank is in one"),
        ("train:dp2@0-1 generate:dp1@3", "rank 2 is in no pool; the ranks of all pools are 0 to 2"),
        ("train:dp1@1 generate:dp1@0", "rank 0 writes the run's files, and has to be one that trains"),
        ("train:dp2@0-2 generate:1", "train:dp2 has 2 devices and @0-2 is 3 ranks"),
        ("cri-tic:1 generate:1", "'cri-tic:1' is not a pool; write train, generate or a role"),
        ("generate", "'generate' is not a pool"),
        ("generate:", "a pool has no mesh; write one such as dp2 or 2"),
        ("generate:1 generate:2", "the pool 'generate' is given twice"),
        ("generate:sp2", "generation does not split the tokens of a row; write dp for sp"),
        ("generate:xp2", "'xp2' is not an axis"),
        ("generate:1@2-1", "'2-1' is not a range of ranks; write @0-7 or @8"),
        ("train:2@1,0 generate:1", "'train:2@1,0': its ranks are not ascending"),
    ],
)
def test_what_is_not_a_placement_is_refused(text, problem):
    with pytest.raises(MeshError, match="--place=") as error:
        read_placement(text, ONE)
    assert problem in str(error.value)


def test_ranks_are_written_as_spans():
    assert ranks_text((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"


def test_weights_come_at_the_bound_and_from_all_that_have_them():
    model = decoder_model(embedded_task("arithmetic").model_config(1))
    for train, rules, generating in (
        ("dp2", STORED, "dp1"),
        ("tp2", STORED, "dp2"),
        ("dp2", fully_sharded(STORED), "tp2"),
        ("dp2,tp2", fully_sharded(STORED), "dp3"),
    ):
        placement = read_placement(f"train:{train} generate:{generating}", ONE)
        src = layouts(model.shapes, model.axes, rules, placement.train.sizes)
        dst = layouts(model.shapes, model.axes, GENERATE, placement.generate.sizes)
        ranks = placement.train.ranks, placement.generate.ranks
        made = plan(src, dst, torch.float32, src_ranks=ranks[0], dst_ranks=ranks[1])
        assert received_bytes(made) == lower_bound_bytes(made)
        assert not any(received_bytes(made)[rank] for rank in placement.train.ranks)
        sent = [sent_bytes(made)[rank] for rank in placement.train.ranks]
        assert min(sent) > 0.6 * max(sent)


def rows_of_rank(way, numbers):
    """Rows that say their numbers, as a rank holds them."""
    width = int(way.lengths.max())
    tokens = torch.arange(width)[None] + 100 * torch.from_numpy(numbers)[:, None]
    inside = torch.arange(width)[None] < torch.from_numpy(way.lengths[numbers])[:, None]
    tokens = (tokens * inside).int()
    return {"tokens": tokens, "logp": tokens.double() / 7, "pairs": torch.stack((tokens, -tokens), 2).float()}


def hand_over_rows(text, mesh):
    """Rows from all generating ranks to all training ones; what each rank sent or received, and whether it is right."""
    placement = read_placement(text, ONE)
    target = submesh(mesh, *placement.train)
    source = submesh(mesh, *placement.generate)
    rng = np.random.default_rng(0)
    owner = rng.integers(source.size(source.row_axes), size=23)
    to = rng.integers(target.size(target.row_axes), size=23)
    way = Handover(rng.integers(1, 30, size=23), owner, to, source, target)
    sizes = []
    exchange = handover._exchange

    def measured(mesh, messages, contents, receives=False):
        sizes.extend(x.nbytes for x in contents)
        exchange(mesh, messages, contents, receives)

    with mock.patch.object(handover, "_exchange", measured):
        if source.here:
            own = np.flatnonzero(owner == source.index(source.row_axes))
            send_rows(rows_of_rank(way, own), KINDS, way)
            return source.process, sum(sizes), len(list(messages_to(way))), True
        like = {name: x[:0] for name, x in rows_of_rank(way, np.arange(1)).items()}
        fields = receive_rows(like, KINDS, way)
    nbytes = sum(sizes)
    coming = np.flatnonzero(to == target.index(target.row_axes))
    wanted = rows_of_rank(way, coming)
    width = fields["tokens"].shape[1]
    right = all(
        torch.equal(x[:, : wanted[name].shape[1]], wanted[name][:, :width]) and x.dtype == wanted[name].dtype
        for name, x in fields.items()
    )
    bound = int(way.lengths[coming].sum()) * (4 + 8 + 8)
    return target.process, nbytes - bound, len(list(messages_from(way))), right


def everyone(program, mesh):
    return gather_objects(program(mesh), mesh)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("text", ["train:dp2 generate:tp2", "train:tp2 generate:dp2", "train:dp2,tp2 generate:3"])
def test_rows_go_once_from_the_rank_that_has_them_to_each_that_needs_them(text):
    check_rows(text)


@pytest.mark.gloo
def test_rows_go_from_one_rank_to_two():
    check_rows("train:dp2 generate:1")


def check_rows(text):
    placement = read_placement(text, ONE)
    result = launch(functools.partial(everyone, functools.partial(hand_over_rows, text)), placement.launched, "cpu")
    assert all(right for *_, right in result)
    sent = sum(nbytes for rank, nbytes, *_ in result if rank in placement.generate.ranks)
    assert all(beyond == 0 for rank, beyond, *_ in result if rank in placement.train.ranks)
    assert sent > 0
    messages = [count for rank, _, count, _ in result if rank in placement.train.ranks]
    assert max(messages) <= len(placement.generate.ranks)


def ask_twice(mesh):
    """Requests larger than the store takes at once, and an answer to each."""
    asking = submesh(mesh, parse("dp2"), (0, 1))
    answering = submesh(mesh, parse("dp2"), (2, 3))
    if answering.here:
        answers = Answers(answering)
        while not isinstance(request := answers.take("a request"), End):
            answers.answer(len(request))
        return request.result
    requests = Requests(asking)
    asks = [requests.ask(b"x" * size, "an answer") for size in (9 << 20, *range(12))]
    numbers = [requests.post(bytes(size)) for size in range(2 * channel.KEPT_REQUESTS)]
    asks += [requests.answer(number, "an answer") for number in numbers]  # long after they were posted
    end_requests(asking, "ended")
    return asks


@pytest.mark.slow
@pytest.mark.gloo
def test_requests_and_answers_cross_in_order():
    result = launch(functools.partial(everyone, ask_twice), parse("dp4"), "cpu")
    assert result == [[9 << 20, *range(12), *range(2 * channel.KEPT_REQUESTS)]] * 2 + ["ended"] * 2


class Clock:
    """A clock that only sleeping moves, and a store in which a side shows progress until a time."""

    def __init__(self, until):
        self.now = 0.0
        self.until = until

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def check(self, keys):
        return keys == [channel.progress_key(channel.GENERATING)]

    def get(self, key):
        return str(min(self.now, self.until)).encode()


def test_a_wait_lasts_as_long_as_there_is_progress_and_then_the_limit(monkeypatch):
    clock = Clock(until=1000.0)
    monkeypatch.setattr(channel, "time", clock)
    monkeypatch.setattr(channel, "run_store", lambda: clock)
    with pytest.raises(MeshError, match=r"waited for an answer: .* have made no progress for 60 s"):
        channel.wait_for_keys(["answer"], 1, channel.ProgressLimit(timedelta(minutes=1), "an answer"))
    assert 1060 <= clock.now < 1070


def test_each_pool_shows_progress_of_its_own(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(channel, "run_store", lambda: store)
    monkeypatch.setattr(channel, "PROGRESS_S", 0.01)
    looks = 0
    with Answers(single(), "seven").showing_progress():
        while not store.check([channel.progress_key("seven")]):
            looks += 1
            assert looks < 6000
            time.sleep(0.01)
    assert not store.check([channel.progress_key(channel.GENERATING)])
    keys = []
    monkeypatch.setattr(channel, "wait_for_keys", lambda *given: keys.append(given[-1].key))
    channel.write_value(channel.answer_key("seven", 7), channel.PoolAnswer("an answer"))
    assert Requests(single(), "seven").answer(7, "an answer") == "an answer" and keys == [channel.progress_key("seven")]
