"""Bytes that go from one pool of ranks to another in a step: the policy's weights one way, rows the other."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import torch

from funrl.batch import as_dict, kind_of
from funrl.cost.dry_run import check_width
from funrl.cost.full_rows import full_batch
from funrl.cost.row_pictures import owned_bytes
from funrl.cost.row_plan import WORD
from funrl.cost.tracing.estimate import pretended
from funrl.cost.tracing.hardware import Hardware, message_seconds
from funrl.mesh.mesh import Mesh, ranks_of
from funrl.mesh.plan import RANKS_PER_NODE, Plan, plan, received_bytes, sent_bytes
from funrl.mesh.pools.placement import Placement
from funrl.mesh.rows import row_indices, token_bytes
from funrl.models.lora import added_adapters, trained_part
from funrl.models.weight_dtypes import weight_dtypes
from funrl.rollout.native.loading import native_weights, spec_of_adapter
from funrl.trainer import phases
from funrl.trainer.jobs.build import build
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.sources.generation import generating_ranks
from funrl.trainer.steps.parts import Parts

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
