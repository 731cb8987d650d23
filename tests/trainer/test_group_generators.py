"""Groups as the trainer ranks take them: what a resumed run begins again."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from funrl.batch import Batch
from funrl.data.prompts import Example
from funrl.mesh.mesh import single
from funrl.mesh.pools import channel
from funrl.mesh.pools.transfer import WeightDelivery, WeightTransfer
from funrl.rollout import group_board
from funrl.rollout.group_board import GroupBegin, GroupBoard
from funrl.rollout.ledger import Ledger, LedgerRule
from funrl.rollout.requests import request_seed
from funrl.rollout.sampling_parameters import Sampling
from funrl.seeds import derived_seed
from funrl.trainer.placement.group_prompts import AskedPrompt, ChosenPrompts, GroupPrompt, GroupWork, group_parts
from funrl.trainer.placement.groups import GroupGenerators
from funrl.trainer.placement.joined_groups import age_metrics
from funrl.trainer.placement.link import BoardLink
from funrl.trainer.placement.logged import LoggedGroup
from funrl.trainer.placement.messages import WrittenGroup, WrittenRows, origins_of, split_origins
from funrl.trainer.placement.writer import GroupWriter
from funrl.trainer.sources.curriculum import PromptSchedule, weighing
from funrl.trainer.sources.evaluation import PromptEvaluation
from funrl.trainer.sources.observing import ShownSample, with_scores
from funrl.trainer.sources.source import DroppedPrompt, Generation
from funrl.trainer.steps.step_rows import rows_of


def new_generators(schedule=None, window=3):
    weights = SimpleNamespace(mesh=single())
    requests = SimpleNamespace(mesh=single())
    engine = SimpleNamespace(requests=requests, weights=weights, version=4, sender=None)
    rule = LedgerRule(places=4, staleness=1, window=window)
    schedule = schedule or PromptSchedule(())
    rewarded = SimpleNamespace(queue="tickets")
    generation = Generation(cast(Any, rewarded), schedule, Sampling(), PromptEvaluation((), Sampling()))
    return GroupGenerators(cast(Any, engine), cast(Any, None), rule=rule, generation=generation)


@pytest.fixture
def generators(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(channel, "run_store", lambda: store)
    monkeypatch.setattr(group_board, "run_store", lambda: store)
    return new_generators()


def deliver(generators, number, version=0, attempt=1, **fields):
    """Deliver a group without rows, as a replica does that began it at a version of the ledger."""
    generators._board.begin([GroupBegin(0, number, attempt, version)])
    generators._board.deliver(number, WrittenGroup(0, None, {}, (), 0.0, attempt=attempt, **fields))


def test_a_run_begins_with_the_first_group(generators):
    assert generators.saved({"prompts_consumed": 0})["overtaken"].tolist() == [False, False]
    generators.begin_step(1, 0, 5)
    assert [generators.ledger.place_of(ticket) for ticket in (0, 19, 20)] == [0, 19, None]
    assert generators._board.opened() == generators.ledger


def test_a_resumed_run_begins_with_the_group_that_others_overtook(generators):
    """Eight groups were taken: 0 to 6, and 8."""
    state = {"prompts_consumed": 8, "overtaken": torch.tensor([True, False])}
    assert generators.restored(state) == {"prompts_consumed": 8}
    generators.begin_step(3, 8, 5)
    assert [generators.ledger.place_of(ticket) for ticket in range(13)] == [7, *range(9, 20), None]
    assert [generators.ledger.prompt_of(ticket) for ticket in range(2)] == [8, 9]
    assert generators.saved({})["overtaken"].tolist() == [True, False]  # until the batch has been taken
    for number in (7, 10, 9, 12):
        deliver(generators, number, version=2)
    assert list(generators._awaited(generators.ledger, [], "groups")) == [7, 9, 10, 12]
    generators.end_step()
    assert generators.ledger.version == 3 and generators.saved({})["overtaken"].tolist() == [True, False]
    generators.begin_step(4, 12, 5)
    assert generators.ledger.oldest == 11


def test_what_a_replica_has_refilled_counts_in_the_budget_of_its_batch(generators):
    generators._rule = generators._rule._replace(prompts=2)
    generators.begin_step(1, 0, 5)
    dropped = [DroppedPrompt(position, 0, {}, {}) for position in (1, 4, 5)]
    generators._board.begin([GroupBegin(0, 1, attempt, 0) for attempt in (1, 2, 3)])
    deliver(generators, 1, attempt=4, dropped=dropped)
    generators._read_reports(generators.ledger)
    assert generators.ledger.refilled == {0: 3} and generators.ledger.written == [1]
    assert generators.ledger.counts == {"begun": 4, "refilled": 3}


def test_a_resumed_run_begins_with_the_prompts_that_were_passed_over(generators):
    """Eight prompts were trained on or dropped: those at positions 0 to 4, 6, 7 and 9."""
    generators._rule = generators._rule._replace(prompts=2)
    state = {"prompts_consumed": 8, "left": torch.tensor([5, 8])}
    assert generators.restored(state) == {"prompts_consumed": 8}
    generators.begin_step(3, 8, 5)
    assert [generators.ledger.prompt_of(ticket) for ticket in range(4)] == [5, 8, 10, 11]
    assert generators.saved({"prompts_consumed": 8})["left"].tolist() == [5, 8]
    generators.ledger.use_prompts([5, 12, 10])
    assert generators.ledger.passed == [8, 11]
    generators.ledger.use_prompts([8, 11, 13])
    assert generators.ledger.passed == [] and generators.ledger.prompts == 14


def test_a_resumed_run_takes_what_weights_chose_and_nothing_that_they_passed_over():
    prompts = [Example([1], str(number), {}) for number in range(40)]
    weights = weighing(prompts, lambda step: [float(number % 3 == 0) for number in range(40)], None, (), single())
    begun, resumed = (new_generators(PromptSchedule(prompts, 4, 0, weights), window=1) for _ in range(2))
    state, _ = begun.choose({"curriculum": weights.init()}, 1, steps=5)
    positions, end = begun.chosen
    assert len(positions) == 2 * 4 and end > 2 * 4, "the weights passed over no position"
    begun.chosen = ChosenPrompts(positions[4:], end)  # as after the batch of step 1
    resumed.choose(resumed.restored(begun.saved(state)), 2, steps=5)
    assert resumed.chosen.positions[:4].tolist() == positions[4:].tolist()
    assert len(resumed.chosen.positions) == 2 * 4 and min(resumed.chosen.positions[4:].tolist()) >= end


def test_a_delivery_of_an_attempt_that_another_has_replaced_changes_nothing(generators):
    generators.begin_step(1, 0, 5)
    generators._board.begin([GroupBegin(0, 1, 1, 0)])
    generators._read_reports(generators.ledger)
    generators.ledger.lost(0)
    generators._board.begin([GroupBegin(1, 1, 2, 0)])
    generators._board.deliver(1, WrittenGroup(0, None, {}, (), 0.0))
    generators._read_reports(generators.ledger)
    assert generators._written == {} and generators.ledger.written == []
    generators._board.deliver(1, WrittenGroup(1, None, {}, (), 0.0, attempt=2))
    generators._read_reports(generators.ledger)
    assert list(generators._written) == generators.ledger.written == [1]


def new_links(generators, count=2, **flags):
    """Links of replicas that hold the weights of the first batch."""
    links = [BoardLink(GroupBoard(1), owner, **flags) for owner in range(count)]
    generators._board.replicas = 1
    links[0].hold(4)
    assert all(link.is_open() for link in links)
    return links


def begin(link):
    """The group that a replica begins."""
    work = link.next_group(4)
    assert work is not None
    return work


def test_replicas_share_the_replacements_of_a_batch(generators):
    generators._rule = generators._rule._replace(prompts=2)
    generators.begin_step(1, 0, 5)
    replicas = new_links(generators)
    assert all(link.filters for link in replicas)
    begun = [begin(link) for link in replicas * 2]
    assert begun == [GroupWork(place, place, prompt=GroupPrompt(place, place)) for place in range(4)]
    further = [link.replace(begun[1]) for link in (replicas[0], *replicas * 2)]
    others = [GroupWork(1, 1, attempt=2, prompt=GroupPrompt(place, place)) for place in range(4, 8)]
    assert further == [*others, None]
    next_batch = begin(replicas[0])
    assert next_batch.place == 4
    again = replicas[0].replace(next_batch)
    assert again is not None and again.prompt == GroupPrompt(9, 9), "the next batch has its own"


def test_what_the_trainer_asks_for_again_is_written_once(generators):
    generators._rule = generators._rule._replace(prompts=2, scores=True)
    generators.begin_step(1, 0, 5)
    replicas = new_links(generators, fixed=True)  # which says nothing about groups that are written ahead
    assert not any(link.filters for link in replicas)
    assert [begin(link).prompt for link in replicas] == [GroupPrompt(0, 0), GroupPrompt(1, 1)]
    generators._board.ask([GroupWork(3, 3, attempt=2), GroupWork(1, 1, attempt=2)])
    asked = [begin(link) for link in replicas]
    assert asked == [GroupWork(3, 3, 2, 0, GroupPrompt(2, 2)), GroupWork(1, 1, 2, 0, GroupPrompt(3, 3))]
    generators._board.ask([GroupWork(0, 0, attempt=2)])
    assert [begin(link).place for link in replicas] == [0, 2]


def test_without_staleness_groups_begin_when_they_are_asked_for(generators):
    generators._rule = generators._rule._replace(staleness=0, prompts=2)
    generators.ahead = generators.refills = False
    generators.begin_step(1, 0, 5)
    first, second = new_links(generators)
    assert first.next_group(4) is None and not first.filters
    prompts = [AskedPrompt(place, 5, number) for number, place in enumerate((7, 3, 9, 1))]
    numbers = generators._ask(prompts, range(4))
    assert numbers == (0, 1, 2, 3)
    works = [begin(link) for link in (first, second, second, first)]
    assert works == [GroupWork(n, n, prompt=prompt) for n, prompt in enumerate(prompts)]
    assert first.next_group(4) is None, "there is no further group"
    for work, link in zip(works, (first, second, second, first), strict=True):
        link.begin([work])
        link.deliver(work, WrittenGroup(link.owner, None, {}, (), 0.0))
    assert list(generators._awaited(generators.ledger, numbers, "groups")) == [0, 1, 2, 3]
    assert {place: generators.ledger.places[place].owner for place in range(4)} == {0: 0, 1: 1, 2: 1, 3: 0}
    generators._newest = numbers
    generators.keep(np.array([0, 3]))
    assert generators._refilled(generators._lost) == [1, 2]
    again = generators._ask([AskedPrompt(8, 6, 0), AskedPrompt(2, 6, 1)], [1, 2])
    assert again == (4, 5) and begin(first) == GroupWork(4, 1, 2, 0, AskedPrompt(8, 6, 0))
    greedy = generators._ask([AskedPrompt(7, 1, 0, greedy=True)], [None])
    assert [begin(first).number, begin(first)] == [
        5,
        GroupWork(greedy[0], None, prompt=AskedPrompt(7, 1, 0, greedy=True)),
    ]


def test_fixed_groups_are_for_one_replica_each(generators):
    generators._rule = generators._rule._replace(staleness=0)
    generators._fixed = True
    generators.begin_step(1, 0, 5)
    generators._board.replicas = 3
    generators._ask([AskedPrompt(place, 5, place) for place in range(4)], range(4))
    links = new_links(generators, count=3, fixed=True)
    own = [[link.next_group(4), link.next_group(4)] for link in links]
    assert [[work and work.number for work in works] for works in own] == [[0, None], [1, None], [2, 3]]


def test_the_log_has_what_was_dropped_in_the_place_of_a_group(generators):
    def taken(position, dropped=()):
        facts = {"entries": {"x": (1.0, 2)}, "episodes": {}}
        written = WrittenRows(facts, np.zeros(2), {"failed": torch.tensor([True, False])}, {}, {})
        group = WrittenGroup(0, written, {4: 10 + position}, [[(0, 4)]], 0.5, prompt=GroupPrompt(position, position))
        return group._replace(dropped=dropped)

    def write(number, group, attempt=1):
        generators._board.begin([GroupBegin(0, number, attempt, 0)])
        generators._board.deliver(number, group._replace(attempt=attempt))

    generators._rule = generators._rule._replace(prompts=2, scores=True)
    generators.refills = False
    generators.begin_step(1, 0, 5)
    for number in range(4):
        write(number, taken(number))
    generators._groups = generators._awaited(generators.ledger, [], "groups")
    generators._newest = tuple(generators._groups)
    generators.keep(np.array([1, 3]))
    assert generators._lost == [0, 2] and generators.dropped() == []
    for number, group in ((2, taken(5)), (0, taken(4))):
        write(number, group, attempt=2)
    newest = generators._awaited(generators.ledger, generators._lost, "groups")
    generators._groups = {number: generators._groups[number] for number in (1, 3)} | newest
    generators._newest, generators._lost = tuple(newest), []
    generators.keep(np.array([0]))
    log = [LoggedGroup(*group) for group in generators.log()]
    assert [(group.position, [prompt.position for prompt in group.dropped]) for group in log] == [
        (1, []),
        (3, []),
        (4, [0]),
        (5, [2]),
    ]
    assert log[2].dropped[0] == (0, 1, {"x": (1.0, 2)}, {})
    assert generators.metrics()["wait/generator_s"] == 0.5 * 6 and generators.metrics()["age/max"] == 0
    assert generators._lost == [2] and generators.ledger.take() is None
    generators.end_step()  # place 2 stays empty
    assert generators.ledger.version == 1
    counts = {name: count for name, count in generators.metrics().items() if name.startswith("places/")}
    assert counts == {"places/begun": 6, "places/refilled": 2, "places/taken": 4, "places/ahead": 0}


def test_samples_have_the_seeds_of_a_batch_that_is_written_at_once(generators):
    ledger = Ledger.restored(LedgerRule(places=4), until=24, version=2)
    ledger.prompts = 8
    generators._board.open(ledger)
    link = BoardLink(GroupBoard(1))
    assert link.is_open()
    prompt = link._prompt(14)
    assert prompt == (14, 12)
    assert prompt.seeds(seed=5, samples=3) == [request_seed(derived_seed(5, 12), 2 * 3 + sample) for sample in range(3)]
    assert prompt.baseline_seed not in prompt.seeds(seed=5, samples=3)
    asked = AskedPrompt(7, derived_seed(5, 12), 2)
    ((_, seeds),) = group_parts(asked, 5, Sampling(samples=3), baseline=True)
    assert seeds == prompt.seeds(seed=5, samples=3)
    ((sampling, (seed,)),) = group_parts(asked._replace(greedy=True), 5, Sampling(samples=3), baseline=True)
    assert sampling.greedy and sampling.samples == 1 and seed == request_seed(asked.seed, 2)


def test_a_shown_sample_has_the_score_of_its_own_prompt(generators):
    """A group of an earlier batch, which shows nothing, stands before those that others overtook it with."""
    shown = {0: [], 1: [ShownSample("1+1=", "2")], 2: [ShownSample("2+2=", "4")], 3: []}
    written = WrittenGroup(0, None, {}, (), 0.0)
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


def test_rows_of_a_group_that_is_begun_again_are_a_run_of_their_own():
    runs = split_origins(np.concatenate([origins_of(0, 2), origins_of(1, 2), origins_of(1, 1)]))
    assert [(number, rows.tolist()) for number, rows in runs] == [(0, [0, 1]), (1, [0, 1, 0])]


class OneBuffer:
    """A receiver of versions 3, 4, 5, that receives one when the one before was taken."""

    def __init__(self):
        self.next = 3
        self.looks = 0

    def arrived(self):
        self.looks += 1
        assert self.looks < 100, "it waits for weights for which there is no room"
        return WeightDelivery(WeightTransfer(self.next), self.next, {})

    def complete(self, number):
        return True

    def release(self):
        self.next += 1


def test_older_weights_are_taken_where_newer_ones_are_waited_for():
    engine = SimpleNamespace(version=2, check=lambda requests: None)
    buffer = OneBuffer()
    writer = GroupWriter.__new__(GroupWriter)
    writer.__dict__ |= {"engine": engine, "mesh": single(), "resident": object(), "_receiver": buffer}
    writer.evaluates = False
    writer._reported = 5
    writer._measured = True
    writer._take_weights = lambda arrived: setattr(engine, "version", arrived.transfer.version)
    writer.take_version(5)
    assert engine.version == 5 and buffer.next == 6
