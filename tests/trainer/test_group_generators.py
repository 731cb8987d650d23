"""Groups as the trainer ranks take them: what a resumed run begins again."""

import threading
import time
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from funrl.batch import Batch
from funrl.data.prompts import Example
from funrl.mesh.mesh import single
from funrl.mesh.pools import channel
from funrl.mesh.pools.transfer import WeightDelivery
from funrl.rollout.ledger import LedgerRule, PlaceState
from funrl.rollout.requests import request_seed
from funrl.rollout.sampling_parameters import Sampling
from funrl.seeds import derived_seed
from funrl.trainer.placement import board, groups
from funrl.trainer.placement.board import GroupBoard
from funrl.trainer.placement.generate import GroupWriter, ReplicaStep
from funrl.trainer.placement.groups import ChosenPrompts, GroupGenerators
from funrl.trainer.placement.logged import LoggedGroup
from funrl.trainer.placement.messages import (
    GroupPrompt,
    GroupWork,
    WrittenGroup,
    WrittenRows,
    age_metrics,
    group_parts,
    prompts_at,
)
from funrl.trainer.sources.curriculum import PromptSchedule, weighing
from funrl.trainer.sources.evaluation import PromptEvaluation
from funrl.trainer.sources.observing import ShownSample, with_scores
from funrl.trainer.sources.source import DroppedPrompt, Generation
from funrl.trainer.steps.step_rows import rows_of

PROMPTS = [Example([1], str(number), {}) for number in range(40)]


def new_generators(schedule=None, queue="tickets", replicas=1, **rule):
    weights = SimpleNamespace(mesh=single())
    requests = SimpleNamespace(mesh=single())
    engine = SimpleNamespace(requests=requests, weights=weights, version=4, sender=None)
    rule = LedgerRule(**{"places": 4, "staleness": 1, "window": 3} | rule)
    rewarded = SimpleNamespace(queue=queue)
    schedule = schedule or PromptSchedule(PROMPTS, 4)
    generation = Generation(cast(Any, rewarded), schedule, Sampling(), PromptEvaluation((), Sampling()))
    with mock.patch.multiple(groups, ledger_rule=lambda *_: rule, needs_tokens=lambda *_: False):
        generators = GroupGenerators(
            cast(Any, None), cast(Any, engine), generation, cast(Any, SimpleNamespace(note=None))
        )
    generators._board.replicas = replicas
    return generators


@pytest.fixture(autouse=True)
def store(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(channel, "run_store", lambda: store)
    monkeypatch.setattr(board, "run_store", lambda: store)


def new_replica(owner=0, replicas=1, version=4):
    """The board of a replica that holds the weights of the first batch."""
    replica = GroupBoard(replicas, owner)
    replica.hold(version)
    return replica


def asked(replica):
    """All groups that a replica may begin."""
    works = []
    while (work := replica.next_group()) is not None:
        works.append(work)
    return works


EMPTY = WrittenRows({"entries": {}, "episodes": {}}, np.zeros(0, dtype=np.int64), {}, {}, {})


def deliver(work, **fields):
    """Deliver a group without rows, as a replica does."""
    GroupBoard(1).deliver(WrittenGroup(0, work, EMPTY, {}, (), 0.0, **fields))


def places_and_prompts(works):
    return [(work.place, work.prompt.position) for work in works]


def test_a_run_begins_with_the_first_group():
    generators = new_generators()
    assert generators.saved({"prompts_consumed": 0})["overtaken"].tolist() == [False, False]
    generators.begin_step(1, 0, 5)
    works = asked(new_replica())
    assert places_and_prompts(works) == [(place, place) for place in range(8)]
    assert [work.number for work in works] == list(range(8)) and {work.weights for work in works} == {4}
    assert works[5].prompt == prompts_at(PromptSchedule(PROMPTS, 4), [5], [4])[0]


def test_the_last_groups_are_those_of_the_last_batch():
    generators = new_generators(staleness=2, window=1)
    generators.begin_step(2, 4, 3)
    assert [work.place for work in asked(new_replica())] == list(range(4, 12))


def test_a_resumed_run_begins_with_the_group_that_others_overtook():
    """Eight groups were taken: 0 to 6, and 8."""
    generators = new_generators()
    state = {"prompts_consumed": 8, "overtaken": torch.tensor([True, False])}
    assert generators.restored(state) == {"prompts_consumed": 8}
    generators.begin_step(3, 8, 5)
    works = {work.place: work for work in asked(new_replica())}
    assert places_and_prompts(works.values()) == [(place, place) for place in (7, *range(9, 16))]
    assert generators.saved({})["overtaken"].tolist() == [True, False]  # until the batch has been taken
    for place in (7, 10, 9, 12):
        deliver(works[place])
    groups = generators._collected([])[0]
    assert [group.work.place for group in groups.values()] == [7, 9, 10, 12]
    generators.end_step()
    assert generators.ledger.version == 3 and generators.saved({})["overtaken"].tolist() == [True, False]
    generators.begin_step(4, 12, 5)
    assert generators.ledger.oldest == 11
    assert [work.place for work in asked(GroupBoard(1, 1))] == list(range(16, 20))


def test_other_prompts_refill_what_the_filter_drops_as_the_budget_of_a_batch_allows():
    generators = new_generators(prompts=2)
    generators.begin_step(1, 0, 5)
    replica = new_replica()
    first = asked(replica)
    assert places_and_prompts(first) == [(place, place) for place in range(8)]
    written = WrittenRows({"entries": {"x": (1.0, 2)}, "episodes": {}}, np.zeros(0), {}, {}, {})
    dropped = WrittenGroup(0, first[1], written, {}, (), 0.5, keeps=False)
    for position in range(8, 12):
        replica.deliver(dropped)
        generators._take_deliveries()
        (work,) = asked(replica)
        (prompt,) = prompts_at(PromptSchedule(PROMPTS, 4), [position], [position])
        assert (work.place, work.prompt) == (1, prompt)
        dropped = dropped._replace(work=work)
    assert generators.ledger.refilled == {0: 4} and generators.ledger.written == []
    replica.deliver(dropped)  # the batch has had as many as it may
    replica.deliver(dropped._replace(work=first[5]))
    generators._take_deliveries()
    assert places_and_prompts(asked(replica)) == [(5, 12)], "of the next batch"
    assert generators.ledger.written == [1] and generators.ledger.refilled == {0: 4, 1: 1}
    assert generators.ledger.counts == {"begun": 8 + 5, "refilled": 5}
    (kept,) = generators._written.values()
    assert kept.dropped == [DroppedPrompt(n, 0, {"x": (1.0, 2)}, {}) for n in (1, 8, 9, 10)] and kept.waited_s == 2.5
    replaced = [first[1].number, *range(8, 11), first[5].number]
    assert generators._unlogged == replaced and generators._released[::2] == replaced


def test_places_are_refilled_while_the_program_does_something_else():
    generators = new_generators(prompts=2)
    generators.begin_step(1, 0, 5)
    replica = new_replica()
    (first, *_) = asked(replica)
    thread = threading.Thread(target=generators.refill_beside)
    thread.start()
    replica.deliver(WrittenGroup(0, first, EMPTY, {}, (), 0.0, keeps=False))
    limit = time.monotonic() + 60
    while not (works := asked(replica)) and time.monotonic() < limit:
        time.sleep(0.001)
    assert places_and_prompts(works) == [(0, 8)]
    replica.deliver(WrittenGroup(0, works[0]._replace(place=99), EMPTY, {}, (), 0.0))  # no place of the run
    thread.join(60)
    with pytest.raises(KeyError, match="99"):
        generators._collected([])


def test_a_resumed_run_begins_with_the_prompts_that_were_passed_over():
    """Eight prompts were trained on or dropped: those at positions 0 to 4, 6, 7 and 9."""
    generators = new_generators(prompts=2)
    state = {"prompts_consumed": 8, "left": torch.tensor([5, 8])}
    assert generators.restored(state) == {"prompts_consumed": 8}
    generators.begin_step(3, 8, 5)
    works = asked(new_replica())
    assert [work.prompt.position for work in works] == [5, 8, *range(10, 16)]
    assert generators._positions == 16
    assert works[2].prompt == prompts_at(PromptSchedule(PROMPTS, 4), [10], [10])[0]
    assert generators.saved({"prompts_consumed": 8})["left"].tolist() == [5, 8]
    generators.ledger.use_prompts([5, 12, 10])
    assert generators.ledger.passed == [8, 11]
    generators.ledger.use_prompts([8, 11, 13])
    assert generators.ledger.passed == [] and generators.ledger.prompts == 14


def test_a_resumed_run_takes_what_weights_chose_and_nothing_that_they_passed_over():
    prompts = PROMPTS
    weights = weighing(prompts, lambda step: [float(number % 3 == 0) for number in range(40)], None, (), single())
    begun, resumed = (new_generators(PromptSchedule(prompts, 4, 0, weights), window=1) for _ in range(2))
    state, _ = begun.choose({"curriculum": weights.init()}, 1, steps=5)
    positions, end = begun.chosen
    assert len(positions) == 2 * 4 and end > 2 * 4, "the weights passed over no position"
    begun.chosen = ChosenPrompts(positions[4:], end)  # as after the batch of step 1
    resumed.choose(resumed.restored(begun.saved(state)), 2, steps=5)
    assert resumed.chosen.positions[:4].tolist() == positions[4:].tolist()
    assert len(resumed.chosen.positions) == 2 * 4 and min(resumed.chosen.positions[4:].tolist()) >= end


def test_groups_have_the_prompts_that_weights_chose():
    weights = weighing(PROMPTS, lambda step: [float(number % 3 == 0) for number in range(40)], None, (), single())
    schedule = PromptSchedule(PROMPTS, 4, 0, weights)
    generators = new_generators(schedule, window=1)
    generators.choose({"curriculum": weights.init()}, 1, steps=5)
    generators.begin_step(1, 0, 5)
    works = asked(new_replica())
    assert places_and_prompts(works) == list(enumerate(generators.chosen.positions.tolist()))
    assert all(work.prompt.index % 3 == 0 and work.prompt.number == 0 for work in works)


def test_what_the_trainer_asks_for_again_comes_first():
    generators = new_generators(prompts=2, scores=True, queue="fixed")
    generators.begin_step(1, 0, 5)
    replica = new_replica()
    works = [replica.next_group() for _ in range(4)]
    for work in works:
        deliver(work)
    generators._groups = generators._collected([])[0]
    generators._newest = tuple(generators._groups)
    generators.keep(np.array([0, 2]))
    assert generators._lost == [1, 3]
    numbers = generators._ask_for_batch(generators._lost, [])
    again = [replica.next_group() for _ in range(3)]
    assert places_and_prompts(again) == [(1, 8), (3, 9), (4, 4)]
    assert [work.number for work in again[:2]] == numbers == [8, 9]


def test_without_staleness_groups_begin_when_they_are_asked_for():
    generators = new_generators(staleness=0, window=1, prompts=2)
    generators.begin_step(1, 0, 5)
    first, second = new_replica(), GroupBoard(1, 1)
    assert first.next_group() is None
    prompts = [GroupPrompt(index, 5, number) for number, index in enumerate((7, 3, 9, 1))]
    numbers = generators._ask_for_batch([], prompts)
    works = [replica.next_group() for replica in (first, second, second, first)]
    assert works == [GroupWork(n, n, prompt, weights=4) for n, prompt in enumerate(prompts)]
    assert first.next_group() is None, "there is no further group"
    for work in works:
        deliver(work)
    generators._groups = generators._collected(numbers)[0]
    assert list(generators._groups) == numbers == [0, 1, 2, 3]
    generators._newest = tuple(numbers)
    generators.keep(np.array([0, 3]))
    again = generators._ask_for_batch(generators._lost, [GroupPrompt(8, 6, 0), GroupPrompt(2, 6, 1)])
    assert again == [4, 5]
    assert first.next_group() == GroupWork(4, 1, GroupPrompt(8, 6, 0), weights=4)
    assert generators.ledger.places[2].state == PlaceState.RUNNING


def test_fixed_groups_are_for_one_replica_each():
    generators = new_generators(staleness=0, window=1, queue="fixed", replicas=3)
    generators.begin_step(1, 0, 5)
    generators._ask_for_batch([], [GroupPrompt(place, 5, place) for place in range(4)])
    replicas = [new_replica(owner, 3) for owner in range(3)]
    assert [[work.number for work in asked(replica)] for replica in replicas] == [[0], [1], [2, 3]]


def test_the_log_has_what_was_dropped_in_the_place_of_a_group():
    def deliver_rows(works):
        facts = {"entries": {"x": (1.0, 2)}, "episodes": {}}
        written = WrittenRows(facts, np.zeros(2), {"failed": np.array([True, False])}, {}, {})
        for work in works:
            tokens = {4: 10 + work.prompt.position}
            GroupBoard(1).deliver(WrittenGroup(0, work, written, tokens, [[(0, 4)]], 0.5))

    def rows_of_groups(joined, *_):
        return SimpleNamespace(owner=joined.written.owner)

    generators = new_generators(prompts=2, scores=True, staleness=0.5)
    generators.refills = False
    generators.begin_step(1, 0, 5)
    replica = new_replica()
    deliver_rows([replica.next_group() for _ in range(4)])
    with mock.patch.multiple(groups, joined_rows=rows_of_groups, joined_rollout=lambda *_: None):
        generators.write(np.arange(4), Sampling(), 0)
        generators.keep(np.array([1, 3]))
        assert generators._lost == [0, 2]
        numbers = generators._ask_for_batch(generators._lost, [])
        deliver_rows([replica.next_group() for _ in numbers])
        with mock.patch.object(generators, "_ask_for_batch", lambda lost, prompts: numbers):
            generators.write(np.arange(2), Sampling(), 0)
    generators.keep(np.array([0]))
    log = [LoggedGroup(*group) for group in generators.log()]
    assert [(group.position, group.first, [prompt.position for prompt in group.dropped]) for group in log] == [
        (1, 1, []),
        (3, 3, []),
        (6, 6, [0]),
        (7, 7, [2]),
    ]
    assert log[2].dropped[0] == (0, 1, {"x": (1.0, 2)}, {})
    assert generators.metrics()["wait/generator_s"] == 0.5 * 6 and generators.metrics()["age/max"] == 0
    assert len(generators._lost) == 1 and generators.ledger.take() is None
    generators.end_step()  # place 2 stays empty
    assert generators.ledger.version == 1
    counts = {name: count for name, count in generators.metrics().items() if name.startswith("places/")}
    assert counts == {"places/begun": 8, "places/lost": 0, "places/refilled": 2, "places/taken": 4, "places/ahead": 0}


def test_samples_have_the_seeds_of_a_batch_that_is_written_at_once():
    schedule = PromptSchedule(PROMPTS, 4, seed=5)
    (prompt,) = prompts_at(schedule, [14], [12])
    assert prompt.seeds(3) == [request_seed(derived_seed(5, 12), 2 * 3 + sample) for sample in range(3)]
    assert prompt.baseline_seed not in prompt.seeds(3)
    asked = GroupPrompt(prompt.index, derived_seed(5, 12), 2)
    ((_, seeds),) = group_parts(GroupWork(0, 0, asked), Sampling(samples=3))
    assert seeds == prompt.seeds(3)
    (_, beside) = group_parts(GroupWork(0, 0, prompt, baseline=True), Sampling(samples=3))
    ((sampling, (seed,)),) = group_parts(GroupWork(0, None, asked), Sampling(samples=3))
    assert sampling.greedy and sampling.samples == 1 and seed == request_seed(asked.seed, 2)
    assert beside == (sampling, [prompt.baseline_seed])


def test_a_shown_sample_has_the_score_of_its_own_prompt():
    """A group of an earlier batch, which shows nothing, stands before those that others overtook it with."""
    generators = new_generators()
    shown = {0: [], 1: [ShownSample("1+1=", "2")], 2: [ShownSample("2+2=", "4")], 3: []}
    written = WrittenGroup(0, GroupWork(0, 0, GroupPrompt(0, 0, 0)), None, {}, (), 0.0)
    generators._groups = {number: written._replace(shown=samples) for number, samples in shown.items()}
    generators._newest = tuple(shown)
    samples = generators.samples()
    assert {place: sample.text for place, sample in samples.items()} == {1: "2", 2: "4"}
    batch = Batch(score=torch.arange(8.0), scores=torch.arange(16.0).reshape(8, 2))
    scored = with_scores(samples, rows_of(batch, np.zeros(8, dtype=np.int64), single()), 2, ["right", "reward_model"])
    assert [(episode.text, episode.score, episode.parts) for episode in scored] == [
        ("2", 2.0, {"right": 4.0, "reward_model": 5.0}),
        ("4", 4.0, {"right": 8.0, "reward_model": 9.0}),
    ]


def test_ages_are_of_tokens():
    assert age_metrics([{4: 5, 2: 2}, {4: 1}], newest=4) == {"age/mean": 0.5, "age/max": 2.0}
    assert age_metrics([{}], newest=4) == {}


class OneBuffer:
    """A receiver of versions 3, 4, 5, that receives one when the one before was taken."""

    def __init__(self):
        self.next = 3
        self.looks = 0

    def arrived(self):
        self.looks += 1
        assert self.looks < 100, "it waits for weights for which there is no room"
        return WeightDelivery({"": self.next}, {"": {}})

    def release(self):
        self.next += 1


def test_older_weights_are_taken_where_newer_ones_are_waited_for():
    engine = SimpleNamespace(version=2, check=lambda requests: None, weights=SimpleNamespace(named=lambda tree: tree))
    engine.load = lambda tree, version: setattr(engine, "version", version)
    buffer = OneBuffer()
    writer = GroupWriter.__new__(GroupWriter)
    writer.__dict__ |= {"engine": engine, "mesh": single(), "resident": object(), "_receiver": buffer}
    writer._reported = 5
    writer._measured = True
    writer._held = {}
    writer._decide = lambda answers: ReplicaStep(weights=buffer.arrived() is not None)
    writer.step = lambda: None
    writer._generator = cast(Any, SimpleNamespace(engine=engine))
    writer.take_version(5)
    assert engine.version == 5 and buffer.next == 6
