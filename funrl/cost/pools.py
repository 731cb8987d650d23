"""Cost of one step for the ranks of one pool, and what goes from one pool to another."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import torch

from funrl import trees
from funrl.algos.core import Algorithm
from funrl.batch import as_dict, kind_of
from funrl.cost.decoding import judging, tokens_to_read, verdicts_of_step
from funrl.cost.dry_run import RankWork, check_width, estimate, left_out, plain_job
from funrl.cost.row_pictures import owned_bytes
from funrl.cost.rows import WORD, full_batch
from funrl.cost.tracing.costs import plus
from funrl.cost.tracing.estimate import Estimate, pretended
from funrl.cost.tracing.hardware import Hardware, message_seconds
from funrl.mesh.mesh import Mesh, ranks_of, text
from funrl.mesh.plan import RANKS_PER_NODE, Plan, plan, received_bytes, sent_bytes
from funrl.mesh.pools.placement import Placement, RankPool
from funrl.mesh.rows import row_indices, token_bytes
from funrl.models.lora import added_adapters, trained_part
from funrl.models.weight_dtypes import weight_dtypes
from funrl.rollout.native.loading import native_weights, spec_of_adapter
from funrl.trainer import phases
from funrl.trainer.jobs.build import build
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.jobs.sharding import check_layouts
from funrl.trainer.settings.declaration import SettingsError, blaming
from funrl.trainer.settings.scorers import JUDGE
from funrl.trainer.settings.settings import Settings, with_flags
from funrl.trainer.sources.generation import generating_ranks
from funrl.trainer.steps.parts import Parts

UNSHARDED = {
    "fsdp": False,
    "fsdp_axes": None,
    "fsdp_models": None,
    "grad_reduce_dtype": "auto",
    "sequence_parallel": "auto",
    "split_residual": "auto",
}


def pool_settings(settings: Settings, pool: RankPool, learns: bool) -> Settings:
    """Flags of a run on the ranks of one pool.

    Args:
      settings: the flags of the whole run.
      pool: its ranks.
      learns: whether its ranks may shard weights as those that train do; see `Placement.shards`.
    """
    mesh = text(pool.sizes)
    if learns:
        return with_flags(settings, place=None, mesh=mesh)
    return with_flags(settings, place=None, mesh=mesh, generate_mesh=mesh, **UNSHARDED)


def pool_estimate(settings: Settings, algorithm: Algorithm, work: RankWork) -> Estimate:
    """Cost of one step for a rank of a pool.

    Args:
      settings: of a run on the ranks of the pool, by `pool_settings`.
      algorithm: of the run.
      work: of the rank.

    Raises:
      ValueError: a flag cannot work there.
    """
    if work.pool == JUDGE:
        return _judge_estimate(settings, algorithm, work.tokens, work.hardware)
    return estimate(plain_job(settings, algorithm, work.hardware.memory), *work)


def _judge_estimate(settings: Settings, algorithm: Algorithm, tokens: int, hardware: Hardware) -> Estimate:
    """Cost of a step's verdicts on ranks that have the judge alone."""
    sizes = settings.devices.train.chosen
    spread = f"dp{Mesh(sizes).world}"  # a mesh of the policy, which need not divide as the judge does
    job = plain_job(with_flags(settings, mesh=spread, generate_mesh=None), algorithm, hardware.memory)
    assert isinstance(job, RLJob) and job.judge is not None
    model = job.judge.model
    with blaming("judge"):
        check_layouts({JUDGE: model}, settings, sizes, sizes)
        if not model.pages:
            raise SettingsError("it runs transformers' own code, which a dry run does not count; leave its pool out")
    judge = job.judge._replace(sizes=sizes)
    job = dataclasses.replace(job, judge=None)
    with pretended(job.sizes) as mesh:
        verdicts = judging(job, judge, build(job, mesh, lambda _: None), tokens, 0.0, hardware)
    read = tokens_to_read(job, judge, tokens)
    step = f"{verdicts_of_step(job):,} verdicts of {judge.sampling.max_new_tokens:,} tokens, each after {read:,} tokens"
    return Estimate(
        job=dataclasses.replace(job, model=model, sizes=sizes, generate_sizes=sizes),
        roles=(JUDGE,),
        step=f"{step}, all of full length",
        tokens=check_width(job, tokens),
        phases={"score_judge": plus(verdicts.costs, {"weights": verdicts.weights})},
        axes=verdicts.axes,
        parameters=trees.count(model.shapes),
        trained=trees.count(model.shapes),
        useful={},
        left_out=left_out(job, judge, hardware),
    )


VERSION_BYTES = 4  # of a token, where rows may be of older weights


class PoolTransfer(NamedTuple):
    """Bytes that go from one pool to another in a step.

    Attributes:
      content: "weights" or "rows".
      sent, received: bytes of the rank that sends, or receives, the most.
      messages: of the rank with the most messages.
      near: whether all ranks are on one node.
    """

    content: str
    sent: float
    received: float
    messages: int
    near: bool

    def seconds(self, hardware: Hardware) -> float:
        """Seconds of the busiest rank."""
        return message_seconds(hardware, self.messages, max(self.sent, self.received), self.near)


def pool_transfers(job: RLJob, placement: Placement, tokens: int) -> tuple[PoolTransfer, PoolTransfer]:
    """Weights to the generator ranks, and rows from them, where all rows have full length.

    Args:
      job: on the mesh of the trainer ranks.
      placement: of all ranks.
      tokens: of a prompt.
    """
    near = placement.world <= RANKS_PER_NODE
    width = check_width(job, tokens)
    with pretended(job.sizes) as mesh:
        parts = build(dataclasses.replace(job, judge=None), mesh, lambda _: None)  # whose weights are not read
        moves = weight_plan(job, parts, placement)
        sent, received, messages = row_traffic(job, parts, placement, width)
    owned = owned_bytes(job, tokens)
    item = row_token_bytes(job, tokens) + sum(WORD + nbytes for nbytes in owned) / width
    messages *= 1 + len(owned) + bool(owned)  # one for each ragged field, and one with their numbers
    weights = PoolTransfer("weights", float(max(sent_bytes(moves))), float(max(received_bytes(moves))), 1, near)
    return weights, PoolTransfer("rows", float(item * sent), float(item * received), messages, near)


def weight_plan(job: RLJob, parts: Parts, placement: Placement) -> Plan:
    """The plan of a sync: of the adapters alone where the engine adds them to its base."""
    mesh = Mesh(placement.generate.sizes)
    spec = native_weights(parts.begin.model, mesh, job.dtype)
    policy = parts.roles[job.main_role].placed
    stored = parts.begin.stored
    if lora := added_adapters(policy.model):
        spec = spec_of_adapter(parts.begin.model, mesh, spec, lora)
        stored = trained_part(policy.model, policy.stored)
    return plan(
        stored,
        spec.layouts,
        weight_dtypes(spec.layouts, job.dtype),
        RANKS_PER_NODE,
        src_ranks=ranks_of(placement.train.ranks),
        dst_ranks=ranks_of(placement.generate.ranks),
    )


def row_traffic(job: RLJob, parts: Parts, placement: Placement, width: int) -> tuple[int, int, int]:
    """Tokens that the busiest rank sends, those that the busiest one receives, and the most messages of a rank.

    Args:
      job, parts: on the mesh of the trainer ranks.
      placement: of all ranks.
      width: tokens of a row.
    """
    prompts = job.settings.run.batch_prompts
    samples = job.sampling.samples
    lengths = np.full(prompts * samples, width)
    groups = torch.arange(len(lengths)) // samples
    has = row_indices(Mesh(placement.generate.sizes))
    wants = row_indices(Mesh(placement.train.sizes))
    owner = generating_ranks(prompts, samples, int(has.max()) + 1)
    to = phases.scoring_ranks(job, parts, lengths, groups, step=1)[0]
    tokens = np.zeros((int(has.max()) + 1, int(wants.max()) + 1), dtype=np.int64)
    np.add.at(tokens, (owner, to), lengths)
    sent = np.zeros((2, len(has)), dtype=np.int64)  # tokens and messages of each rank that generates
    for index, row in enumerate(tokens[:, wants]):
        holders = np.flatnonzero(has == index)
        turns = holders[np.arange(len(wants)) % len(holders)]
        np.add.at(sent[0], turns, row)
        np.add.at(sent[1], turns, row > 0)
    received = tokens[:, wants]
    messages = max(int(sent[1].max()), int((received > 0).sum(0).max()))
    return int(sent[0].max()), int(received.sum(0).max()), messages


def row_token_bytes(job: RLJob, tokens: int) -> int:
    """Bytes of a token of a row as it is handed over."""
    batch = full_batch(job, tokens, 1)
    fields = {name: x for name, x in as_dict(batch).items() if kind_of(batch, name).per_token}
    aged = bool(job.settings.asynchrony.staleness or job.settings.sampling.new_tokens_per_step)
    return token_bytes(fields) + VERSION_BYTES * aged
