"""Replicas that share prompts: each group once and whole, the same completions, and no replica idle."""

import itertools

import pytest
import torch
from small_engines import CONFIGS, PROMPTS, assert_same, engine_of, load, weights

from funrl.mesh.collectives import gather_objects
from funrl.mesh.counter import shared_counter
from funrl.mesh.launch import launch
from funrl.mesh.mesh import parse, single
from funrl.models import decoder_model
from funrl.rollout.engine import Callbacks, complete
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.requests import requests_of
from funrl.rollout.sampling_parameters import Sampling
from funrl.rollout.tickets import Tickets, complete_shared, share_tickets

CONFIG = CONFIGS["qwen3"]
HOW = Sampling(max_new_tokens=15, stop=(3, 17), samples=3)


def groups_of(prompts, how=HOW):
    requests = requests_of(prompts, how, 4)
    return [requests[low : low + how.samples] for low in range(0, len(requests), how.samples)]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("mesh", "count"), [("dp3", 2), ("dp3", 10), pytest.param("dp2,tp2", 4, marks=pytest.mark.slow)]
)
def test_every_group_is_completed_once_and_as_by_one_engine(mesh, count):
    groups = groups_of((PROMPTS * 2)[:count])

    def program(mesh):
        engine = native_engine(decoder_model(CONFIG), mesh, torch.float64, options=NativeOptions(max_rows=4))
        reported = []
        load(engine, weights(CONFIG, torch.float64))
        done = complete_shared(engine, share_tickets(groups, mesh, size=3), mesh, Callbacks(finished=reported.append))
        assert (
            sorted(item.number for item in reported) == [request.number for request in done]
            and engine.unfinished() == 0
        )
        return gather_objects(done, mesh)

    ranks = launch(program, parse(mesh), "cpu")
    if "tp2" in mesh:
        assert_same(ranks[0], ranks[1])  # the ranks of a replica have the same
        assert_same(ranks[2], ranks[3])
        ranks = ranks[::2]
    for done in ranks:
        numbers = [request.number for request in done]
        assert numbers == sorted(numbers) and len(numbers) % 3 == 0
        assert all(len({n // 3 for n in numbers[i : i + 3]}) == 1 for i in range(0, len(numbers), 3))
    whole = complete(engine_of(CONFIG, torch.float64), list(itertools.chain(*groups)))
    assert_same(sorted(itertools.chain(*ranks), key=lambda completion: completion.number), whole, 1e-10)


def counter_of(taken):
    """A counter of one process that notes what is taken."""

    def take(count):
        taken.append(count)
        return sum(taken[:-1])

    return take


def test_a_replica_takes_many_groups_at_first_and_few_at_the_end():
    taken, engine = [], engine_of(CONFIG, max_rows=60)
    tickets = Tickets(groups_of(PROMPTS * 10), counter_of(taken), 4, size=3)
    done = complete_shared(engine, tickets, single())
    assert len(done) == 210
    # An eighth of what is left at the time (four replicas, twice over), and no more than there is room for (20 groups).
    left = [70 - sum(taken[:i]) for i in range(len(taken))]
    assert taken[:2] == [-(-70 // 8), -(-61 // 8)] and taken[2] <= 20 - 17 + 1
    assert all(count <= -(-n // 8) for count, n in zip(taken, left, strict=True))
    assert taken[-8:] == [1] * 8 and sum(taken) == 70


def test_one_replica_takes_what_it_has_room_for():
    taken, groups = [], groups_of(PROMPTS * 2)
    done = complete_shared(engine_of(CONFIG, max_rows=512), Tickets(groups, counter_of(taken), size=3), single())
    assert taken == [14] and len(done) == 42
    taken.clear()
    again = complete_shared(engine_of(CONFIG, max_rows=12), Tickets(groups, counter_of(taken), size=3), single())
    assert_same(again, done)
    assert taken[0] == 4 and sum(taken) == 14
    assert complete_shared(engine_of(CONFIG), Tickets([], counter_of(taken)), single()) == []


def test_an_error_leaves_nothing_in_flight():
    engine, groups = engine_of(CONFIG, max_rows=6), groups_of(PROMPTS)
    groups[5] = [group._replace(prompt=[77]) for group in groups[5]]
    with pytest.raises(ValueError, match="has token 77"):
        complete_shared(engine, share_tickets(groups, single(), size=3), single())
    assert engine.unfinished() == 0 and engine.cost().used_pages == 0
    engine.pause()
    with pytest.raises(RuntimeError, match="paused: call resume first"):
        complete_shared(engine, share_tickets(groups[:2], single(), size=3), single())
    assert engine.unfinished() == 0


@pytest.mark.gloo
def test_nobody_gets_a_number_that_another_has():
    def program(mesh):
        first, second = shared_counter(mesh), shared_counter(mesh)
        mine = [(first(2), second(1)) for _ in range(50)]
        return gather_objects(mine, mesh)

    ranks = launch(program, parse("dp2,tp2"), "cpu")
    assert sorted(a for mine in ranks for a, _ in mine) == list(range(0, 400, 2))
    assert sorted(b for mine in ranks for _, b in mine) == list(range(200))
    assert all(mine == sorted(mine) for mine in ranks)
    item = shared_counter(single())
    assert [item(3), item(1), item(2)] == [0, 3, 4] and shared_counter(single())(1) == 0
