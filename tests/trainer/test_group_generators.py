"""Groups as the ranks that train take them: what a resumed run begins again."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from funrl.asynchrony.admission import AdmissionRule
from funrl.mesh.mesh import single
from funrl.mesh.pools import channel, groups
from funrl.mesh.pools.groups import GroupPlan
from funrl.mesh.pools.transfer import Arrived, WeightTransfer
from funrl.trainer.placement.groups import GroupGenerators, age_metrics
from funrl.trainer.placement.messages import origins_of, split_origins
from funrl.trainer.placement.writer import GroupWriter


@pytest.fixture
def generators(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(channel, "run_store", lambda: store)
    monkeypatch.setattr(groups, "run_store", lambda: store)
    engine = SimpleNamespace(requests=None, weights=SimpleNamespace(mesh=single()), version=4, sender=None)
    rule = AdmissionRule(places=4, staleness=1, window=3)
    return GroupGenerators(
        cast(Any, engine), single(), cast(Any, None), rule=rule, early=False, schedule=cast(Any, None)
    )


def test_a_run_begins_with_the_first_group(generators):
    assert generators.saved({"prompts_consumed": 0})["overtaken"].tolist() == [False, False]
    generators.begin_step(1, 0, 5)
    assert generators.plan == GroupPlan(position=0, count=20, step=1)
    assert [generators.plan.number_of(ticket) for ticket in (0, 19, 20)] == [0, 19, None]


def test_a_resumed_run_begins_with_the_group_that_others_overtook(generators):
    """Eight groups were taken: those at positions 0 to 6, and 8."""
    state = {"prompts_consumed": 8, "overtaken": torch.tensor([True, False])}
    assert generators.restored(state) == {"prompts_consumed": 8}
    generators.begin_step(3, 8, 5)
    assert generators.plan == GroupPlan(position=8, count=12, step=3, fresh=1, again=(-1,))
    assert [generators.plan.number_of(ticket) for ticket in range(13)] == [-1, *range(1, 12), None]
    generators._board.hold(4)
    generators._admit()
    assert sorted(generators._admission.running) == [-1, 1, 2, 3, 4, 5, 6, 7]
    for number in (-1, 2, 1, 3):
        generators._admission = generators._admission.finish([number])
    taken = generators._admission.consumable()
    assert taken == (-1, 1, 2, 3)
    assert generators._admission.consume(taken)[1].batch == 1
    assert generators.saved({})["overtaken"].tolist() == [True, False]  # until the batch has been taken


def test_ages_are_of_tokens():
    assert age_metrics({4: 6, 2: 2}, newest=4) == {"age/mean": 0.5, "age/max": 2.0}
    assert age_metrics({}, newest=4) == {}


def test_rows_of_a_group_that_is_begun_again_are_a_run_of_their_own():
    runs = split_origins(np.concatenate([origins_of(-1, 2), origins_of(1, 2), origins_of(1, 1)]))
    assert [(number, rows.tolist()) for number, rows in runs] == [(-1, [0, 1]), (1, [0, 1, 0])]


class OneBuffer:
    """A receiver of versions 3, 4, 5, that receives one when the one before was taken."""

    def __init__(self):
        self.next = 3
        self.looks = 0

    def arrived(self):
        self.looks += 1
        assert self.looks < 100, "it waits for weights for which there is no room"
        return Arrived(WeightTransfer(self.next), self.next, {})

    def complete(self, number):
        return True

    def taken(self, arrived):
        self.next += 1


def test_older_weights_are_taken_where_newer_ones_are_waited_for():
    engine = SimpleNamespace(version=2)
    buffer = OneBuffer()
    writer = GroupWriter.__new__(GroupWriter)
    writer.__dict__ |= {"engine": engine, "mesh": single(), "resident": object(), "_receiver": buffer}
    writer.beside = cast(Any, SimpleNamespace(goes_on=False))
    writer._told = 5
    writer._take_weights = lambda arrived: setattr(engine, "version", arrived.transfer.version)
    writer.take_version(5)
    assert engine.version == 5 and buffer.next == 6
    writer.take(5)  # which has been let go of
    assert buffer.next == 6
