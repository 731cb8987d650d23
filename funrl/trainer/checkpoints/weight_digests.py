"""Digests of the weights of roles: equal where all bits are, on any mesh and in any layout.

They are those by which an engine is proven to hold the trainer's weights (`funrl.rollout.certificate`): a rank sums its
own part, and one small collective adds the parts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.data.cached_datasets import records_digest
from funrl.mesh.collectives import gather_objects, psum
from funrl.mesh.mesh import AXES, Mesh
from funrl.models.weight_dtypes import weight_dtype
from funrl.rollout.certificate import digest, first_copy
from funrl.rollout.native.engine import NativeEngine
from funrl.trainer.jobs.job import Job, TextJob
from funrl.trainer.jobs.provenance import WEIGHTS
from funrl.trainer.settings.declaration import HELD_OUT_SET, RECORD_TOKENS
from funrl.trainer.settings.scorers import SCORERS
from funrl.trainer.settings.settings import flag_value
from funrl.trainer.steps.parts import GeneratingParts, Parts
from funrl.trainer.steps.roles import Role, bases

UINT64 = (1 << 64) - 1


def weight_digests(
    params: trees.Tree, stored: trees.Tree, mesh: Mesh, dtype: torch.dtype | None = None
) -> dict[str, str]:
    """The digest of each weight by name, 16 hexadecimal digits. Collective.

    Args:
      params: this rank's shards.
      stored: their layouts.
      dtype: to which they are cast before; None: as they are.
    """
    layouts = dict(trees.named(stored))
    digests: dict[str, Tensor] = {}
    for name, x in trees.named(params):
        read_as = x.dtype if dtype is None else weight_dtype(name, dtype)
        own = digest(x, layouts[name], mesh.rank, dtype=read_as) * first_copy(layouts[name], mesh)
        digests[name] = own.to(mesh.device)
    if not digests:
        return {}
    whole = psum(torch.stack(list(digests.values())), mesh, AXES).tolist()
    return {name: f"{number & UINT64:016x}" for name, number in zip(digests, whole, strict=True)}


def role_digests(roles: Mapping[str, Role], weights: Mapping[str, trees.Tree], mesh: Mesh) -> dict[str, str]:
    """One digest of all weights of each of some roles. Collective.

    Args:
      weights: this rank's shards, by role.
    """
    own = [name for name in weights if name not in bases(roles)]  # of a base a checkpoint knows each weight
    return {name: joined_digest(weight_digests(weights[name], roles[name].stored, mesh)) for name in own}


def agent_digests(parts: Parts) -> dict[str, str]:
    """One digest of all weights of each frozen model of agents that stays what it is, if it is here. Collective."""
    digests = {}
    frozen = parts.generator.frozen if isinstance(parts, GeneratingParts) else {}
    for name, agent in frozen.items():
        spec = agent.engine.weights
        if not agent.declared.every and isinstance(agent.engine, NativeEngine):
            held = trees.from_named(spec.layouts, agent.engine.held_weights())
            digests[name] = joined_digest(weight_digests(held, spec.layouts, spec.mesh))
    return digests


def joined_digest(digests: Mapping[str, str]) -> str:
    """One digest of the digests of weights."""
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:16]


class FrozenDigests(NamedTuple):
    """Digests of the weights of a run that do not learn.

    Attributes:
      roles: by role, as `role_digests` takes them.
      adapters: as `base_model.adapter_facts`, of a run in which adapters learn.
      agents: by the names of the frozen models of agents, as `agent_digests` takes them.
    """

    roles: Mapping[str, str] = {}
    adapters: Mapping[str, Any] = {}
    agents: Mapping[str, str] = {}


def with_first_digests(job: Job, parts: Parts, params: trees.Tree, digests: FrozenDigests) -> Job:
    """The job with digests of the weights that it begins with, and of its held-out set. Collective.

    The weights are those of a frozen reference or of the base of adapters, whose digests are known; only without either
    is a pass made over them.

    Args:
      params: this rank's weights of the leading role before the first step.
      digests: of the weights that do not learn.
    """
    frozen = digests.roles
    adapters = digests.adapters
    inputs = dict(gather_objects(dict(job.provenance.inputs), parts.mesh)[0])
    own_head = job.kind_of_role(job.main_role).value_head
    initial = [name for name in frozen if name not in job.directories and job.kind_of_role(name).value_head == own_head]
    if adapters:
        weights = joined_digest(adapters["base"]["digests"])
    elif initial:
        weights = frozen[initial[0]]
    else:
        weights = joined_digest(weight_digests(params, parts.roles[job.main_role].stored, parts.mesh, dtype=job.dtype))
    inputs |= {WEIGHTS: weights, HELD_OUT_SET: held_out_digest(job, inputs), RECORD_TOKENS: tokens_digest(job)}
    return dataclasses.replace(job, provenance=job.provenance._replace(inputs=inputs))


COMPARED = 64  # examples whose tokens are in a digest


def tokens_digest(job: Job) -> str:
    """Digest of the tokens of the first examples that are trained on."""
    if isinstance(job, TextJob):
        count = min(COMPARED, len(job.task.examples))
        texts = [text for place in range(count) for text in job.task.examples[place].texts]
        return records_digest([[list(map(int, text.tokens)), text.trained] for text in texts])
    count = min(COMPARED, len(job.task.prompts))
    return records_digest([list(map(int, job.task.prompts[place].tokens)) for place in range(count)])


def held_out_digest(job: Job, inputs: Mapping[str, str]) -> str:
    """Digest of the held-out examples and of how they are sampled and rewarded.

    Two evaluations with the same digest may be compared.

    Args:
      job: of the run.
      inputs: digests of the run's files.
    """
    settings = job.settings
    if isinstance(job, TextJob):
        texts = job.task.heldout
        return records_digest([[list(map(int, text.tokens)) for text in example.texts] for example in texts])
    flags = [flag_value(settings, name) for name in ("reward", *SCORERS, "reward_weights")]
    rewards = [None if text is None else re.sub(r"[^,]*/", "", text) for text in flags]  # wherever their files are
    files = [digest for name, digest in inputs.items() if name.split("/")[0] in ("reward", *SCORERS)]
    examples = [[list(map(int, prompt.tokens)), prompt.text, prompt.fields] for prompt in job.task.heldout]
    return records_digest([[repr(job.eval_sampling), rewards, files], *examples])
