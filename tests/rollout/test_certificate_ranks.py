"""The proof of a sync on real ranks: what is wrong on one is reported by all, and what is right is not called wrong."""

import re

import pytest
import torch
from selection import quick
from synced_engines import CONFIG, SMALL, WRONG, shows, stale, weights, without

from funrl import trees
from funrl.mesh import rules
from funrl.mesh.launch import WorkerError, launch, view
from funrl.mesh.mesh import parse
from funrl.mesh.plan import plan
from funrl.mesh.reshard import reshard
from funrl.mesh.rules import STORED, fully_sharded
from funrl.models import decoder_config, decoder_model, place
from funrl.models.deployed import deployed
from funrl.rollout import certificate
from funrl.rollout.certificate import SyncError, certify, compare_weights, digest, probe_gap
from funrl.rollout.native.engine import NativeEngine, NativeOptions, native_engine

pytestmark = pytest.mark.gloo


def resharded(mesh, sizes, config=CONFIG, stored=STORED, dtype=torch.float32, master=torch.float32, splits=False):
    """The model, this rank's weights, and an engine on a view of the mesh that has been given them by a reshard."""
    placed = place(decoder_model(config), mesh, stored, dtype=dtype, splits=splits)
    params = rules.shard(weights(config, master), placed.stored, mesh)
    engine = native_engine(placed.model, view(mesh, parse(sizes)), dtype, options=NativeOptions(packed=False))
    to_engine = plan(placed.stored, engine.weights.layouts, dtype)
    engine.load(engine.weights.named(reshard(params, to_engine, mesh)), 3)
    return placed, params, engine


BF16 = {"dtype": torch.bfloat16}
FINE = {  # training mesh: engines that are right
    "dp2,tp2": [
        ("tp2,dp2", {"splits": True}),
        ("tp4", {"config": decoder_config(**SMALL | {"kv_heads": 1}, tied=True)}),
        ("dp2,tp2", {"config": decoder_config(**SMALL | {"kv_heads": 1}), "stored": fully_sharded(STORED)}),
        ("dp4", {"config": decoder_config(**SMALL, family="qwen2", attention_bias=True, tied=True), **BF16}),
    ],
    "dp4": [
        ("dp4", {}),
        ("dp2,tp2", {"stored": fully_sharded(STORED), **BF16}),
        ("tp4", {"dtype": torch.float64, "master": torch.float64}),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", quick(FINE, ("dp4",)))
def test_what_is_right_is_not_called_wrong(mesh):
    def program(mesh, cases):
        metrics = []
        for sizes, how in cases:
            placed, params, engine = resharded(mesh, sizes, **how)
            metrics.append(certify(placed, params, engine, 3, probes=True))
        return metrics

    metrics = launch(lambda m: program(m, FINE[mesh]), parse(mesh), "cpu")
    assert [metric["sync/verified"] for metric in metrics] == [1] * len(FINE[mesh])
    for row, (_, how) in zip(metrics, FINE[mesh], strict=True):
        assert row["sync/probe_gap"] < (0.05 if how.get("dtype") == torch.bfloat16 else 1e-5)


def skipped_shard(mesh, placed, params, engine):
    """Rank 3 keeps what it had of one weight, such as that of an earlier step."""
    if mesh.rank == 3:
        dict(engine.held_weights())[WRONG].mul_(0.999)


def shard_of_another(mesh, placed, params, engine):
    """The two tensor ranks of the engine have each other's part of one weight."""
    halves = weights()["layers"][1]["mlp"]["up"].chunk(2)
    dict(engine.held_weights())[WRONG].copy_(halves[1 - int(engine.weights.mesh.index("tensor"))])


def missing_on_a_rank(mesh, placed, params, engine):
    if mesh.rank == 2:
        shows(engine, without)


def drifted_trainer(mesh, placed, params, engine):
    """A weight that all ranks of the trainer hold is not the same on one of them, and its engine has the same."""
    if mesh.rank == 2:
        params["norm"] += 1e-6
        dict(engine.held_weights())["norm"] += 1e-6


def drifted_copy(mesh, placed, params, engine):
    """The same, but the engine has what the other ranks have."""
    if mesh.rank == 2:
        params["norm"] += 1e-6


def stale_replica(mesh, placed, params, engine):
    """The engine's last replica computes with other weights than it shows."""
    if mesh.rank == 3:
        old = stale(engine)
        right = trees.from_named(old.weights.layouts, [(name, x.clone()) for name, x in old.held_weights()])
        old.load(old.weights.named(trees.map(lambda x: x * 1.1, right)), 2)
        old.load(old.weights.named(right), 3)


@pytest.mark.parametrize(
    "mesh, sizes, damage, message",
    [
        ("dp2,tp2", "dp2,tp2", skipped_shard, f"{WRONG} differs on rank 3; 1 of "),
        ("dp2,tp2", "dp4", skipped_shard, f"{WRONG} differs between ranks 0 and 3, which ought to hold the same part"),
        ("dp2,tp2", "tp4", skipped_shard, f"{WRONG} differs; 1 of "),
        ("dp4", "dp2,tp2", shard_of_another, f"{WRONG} differs; 1 of "),
        ("dp2,tp2", "dp4", missing_on_a_rank, f"{WRONG} is missing on rank 2$"),
        ("dp2,tp2", "dp2,tp2", drifted_trainer, "norm differs before the sync: the trainer's ranks 0 and 2 have"),
        ("dp2,tp2", "dp4", drifted_copy, "norm differs before the sync: the trainer's ranks 0 and 2 have"),
        ("dp2,tp2", "dp4", stale_replica, "of a fixed text are up to"),
    ],
)
def test_a_wrong_rank_is_found_by_all(mesh, sizes, damage, message):
    def program(mesh):
        placed, params, engine = resharded(mesh, sizes)
        mine = trees.clone(dict(engine.held_weights()))  # memory of its own, which may be damaged
        engine.load(mine.items(), 3)
        compare_weights(deployed(placed, params), engine, 3)
        damage(mesh, placed, params, engine)
        try:
            certify(placed, params, engine, 3, probes=True)
        except SyncError as error:
            problem = str(error)
        else:
            problem = ""
        metrics = [None] * mesh.world
        torch.distributed.all_gather_object(metrics, problem)
        return metrics

    metrics = launch(program, parse(mesh), "cpu")
    assert len(set(metrics)) == 1 and re.search(message, metrics[0]), metrics


def test_equal_errors_of_all_copies_do_not_cancel():
    def program(mesh):
        placed, params, engine = resharded(mesh, "dp4", dtype=torch.bfloat16)
        off = {x.data_ptr() for _, x in engine.held_weights()}
        # Four of them are 0.
        certificate.digest = lambda x, *args, **keywords: (
            digest(x, *args, **keywords) + (x.data_ptr() in off) * (1 << 62)
        )
        compare_weights(deployed(placed, params), engine, 3)

    with pytest.raises(WorkerError, match=r"SyncError: .* embed differs on rank 0"):
        launch(program, parse("dp4"), "cpu")


class Undecided(NativeEngine):
    """An engine whose second replica draws another token in one place, and so others after it."""

    nats = 0.0

    def step(self):
        done = super().step()
        for completion in done if self.weights.mesh.rank == 1 else ():
            if completion.number == 0:
                completion.tokens[3:] = (completion.tokens[3:] + 1) % CONFIG.vocab
                completion.raw_logp[3] += self.nats
                completion.raw_logp[4:] -= 5.0
        return done


def test_replicas_are_compared_up_to_a_tie():
    def program(mesh):
        placed, params, engine = resharded(mesh, "dp2")
        engine.__class__ = Undecided
        gaps = [probe_gap(placed, params, engine)]
        engine.nats = 0.5
        return [*gaps, probe_gap(placed, params, engine)]

    tie, other = launch(program, parse("dp2"), "cpu")
    assert tie < 1e-5 and other == pytest.approx(0.5, abs=1e-5)
