"""Bytes between pools of ranks in a dry run, and the schedules of a placement."""

import json

import numpy as np
import pytest
from dry_jobs import CPU, plain

from funrl import trees
from funrl.algos.recipes import recipe
from funrl.cost.dry_run import estimate, pool_transfers, row_token_bytes, row_traffic, sent_copies
from funrl.cost.report import dry_run
from funrl.cost.tracing.estimate import pretended
from funrl.mesh.mesh import Mesh
from funrl.mesh.pools.handover import Handover, messages_from, messages_to
from funrl.mesh.pools.placement import read_placement
from funrl.trainer import phases
from funrl.trainer.jobs.build import build
from funrl.trainer.settings.settings import settings_of
from funrl.trainer.sources.generation import generating_ranks

ONE = {"dp": 1}


def meshes_of(pool):
    """Mesh of a pool as each of its ranks sees it."""
    return [Mesh(pool.sizes, rank, over=pool.ranks) for rank in range(len(pool.ranks))]


@pytest.mark.parametrize("place", ["train:dp2 generate:1", "train:tp2 generate:dp2", "train:dp2 generate:dp2,tp2"])
def test_tokens_of_rows_are_those_of_the_messages(place):
    placement = read_placement(place, ONE)
    job = plain("grpo", mesh=place.split()[0].removeprefix("train:"))
    width = 34
    with pretended(job.sizes) as mesh:
        parts = build(job, mesh, lambda _: None)
        sent, received, messages = row_traffic(job, parts, placement, width)
        lengths = np.full(16, width)
        to = phases.scoring_ranks(job, parts, lengths, None, step=1)[0]
    training, generating = meshes_of(placement.train), meshes_of(placement.generate)
    owner = generating_ranks(8, 2, generating[0].size(generating[0].row_axes))
    leaving = [list(messages_to(Handover(lengths, owner, to, mesh, training[0]))) for mesh in generating]
    coming = [list(messages_from(Handover(lengths, owner, to, generating[0], mesh))) for mesh in training]
    assert sent == max(sum(lengths[x.rows].sum() for x in own) for own in leaving)
    assert received == max(sum(lengths[x.rows].sum() for x in own) for own in coming)
    assert messages == max(map(len, leaving + coming))


def test_pictures_go_with_their_rows():
    place = read_placement("train:dp1 generate:1", ONE)
    flags = {"task": "shapes", "dry_run": True, "hardware": "cpu", "verify_sync": False}
    jobs = [plain("grpo", **flags), plain("grpo", **flags, assume_pictures=0)]
    seeing, blind = (pool_transfers(job, place, 11)[1] for job in jobs)
    row = 16 * 3 * 8 * 8 + 2 * 8 + 2 * 8  # patches, sizes, and the numbers of both
    assert seeing.sent - blind.sent == pytest.approx(16 * row)
    assert (blind.messages, seeing.messages) == (3, 5)  # digests are of each row


def test_masks_go_with_their_rows():
    """Of each row the ids that could be sampled at 24 tokens, and of each of its 34 tokens their number."""
    place = read_placement("train:dp1 generate:1", ONE)
    flags = {"top_k": 5, "new_tokens_per_step": 8, "max_new_tokens": 24}
    masked, plain_rows = (pool_transfers(plain("grpo", mask_replay=x, **flags), place, 10)[1] for x in (True, False))
    row = 24 * 5 * 4 + 8 + 34 * 4
    assert masked.sent - plain_rows.sent == pytest.approx(16 * row)
    assert masked.messages == plain_rows.messages + 1


def test_weights_to_one_rank_are_the_whole_model_once():
    job = plain("grpo", mesh="dp2", fsdp=True, verify_sync=False)
    weights, rows = pool_transfers(job, read_placement("train:dp2 generate:1", ONE), 10)
    whole = 4 * sum(x.numel() for x in trees.leaves(job.model.shapes))
    assert weights.received == whole and weights.sent == pytest.approx(whole / 2, rel=0.01)
    assert rows.sent == 16 * 34 * row_token_bytes(job, 10) and rows.received == rows.sent / 2
    assert weights.near and 2 <= weights.messages <= 8
    assert weights.seconds(CPU) == pytest.approx(weights.messages * CPU.latency + whole / (CPU.link * 0.7))
    wide = pool_transfers(job, read_placement("train:dp2@0-1 generate:dp7", ONE), 10)[0]
    assert not wide.near and wide.received == whole


def test_trainer_ranks_hold_the_weights_that_they_send_and_those_of_16_bits_that_they_have_sent():
    copies = []
    for dtype in ("float32", "bfloat16"):
        job = plain("grpo", dtype=dtype)
        with pretended(job.sizes) as mesh:
            parts = build(job, mesh, lambda _: None)
        copies.append(sent_copies(job, parts))
    whole = 4 * sum(x.numel() for x in trees.leaves(job.model.shapes))
    assert copies == [whole, whole]


def test_ranks_hold_sent_copies_only_beside_generator_ranks():
    """A run on shared devices sends nothing, nor do the steps of `funrl compile` or a supervised run."""
    job = plain("grpo", dtype="bfloat16")
    with pretended(job.sizes) as mesh:
        copies = sent_copies(job, build(job, mesh, lambda _: None))
    alone, beside = (estimate(job, 10, CPU, "train", apart).phases for apart in ((), ("generate",)))
    assert {name: beside[name].total - costs.total for name, costs in alone.items()} == dict.fromkeys(alone, copies)


def test_adapters_alone_go_and_rows_of_older_weights_have_a_version():
    placement = read_placement("train:1 generate:1", ONE)
    whole = pool_transfers(plain("grpo"), placement, 10)[0]
    adapters = pool_transfers(plain("grpo", lora_rank=2), placement, 10)[0]
    assert 0 < adapters.sent < whole.sent / 4
    stale = plain("rollout_is", staleness=1, dry_run=True)
    assert row_token_bytes(stale, 10) == row_token_bytes(plain("rollout_is"), 10) + 4


def report(**flags):
    given = {"place": "train:dp2@0-1 generate:tp2", "device": "cpu", "hardware": "cpu", "dry_run": True, "json": True}
    settings = settings_of(batch_prompts=8, samples_per_prompt=2, max_new_tokens=24, **given, **flags)
    return json.loads(dry_run(settings, recipe("rollout_is")))


@pytest.mark.slow
def test_a_placement_has_its_schedules_and_pools_that_overlap():
    turns = report()
    assert "schedules" not in turns and [x["content"] for x in turns["transfers"]] == ["weights", "rows"]
    step = turns["step"]
    assert step["seconds"] == pytest.approx(sum(step[name] for name in ("train", "generate", "weights", "rows")))
    assert turns["generate"]["phases"]["generate"]["peak_bytes"]["weights"] > 0
    assert "move_rows" not in turns["train"]["phases"]
    ahead = report(staleness=1, lengths="mean:8,max:24")
    assert ahead["step"]["seconds"] == pytest.approx(
        max(ahead["step"]["train"], ahead["step"]["generate"]) + ahead["step"]["weights"] + ahead["step"]["rows"]
    )
    splits = ahead["schedules"]["splits"]
    assert {(x["train"], x["generate"], x["shared"]) for x in splits} == {(2, 2, False), (4, 4, True)}
    assert {x["staleness"] for x in ahead["schedules"]["rules"]} == {0, 1, 2, 4}
