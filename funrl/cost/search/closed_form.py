"""Memory and time of a step by formula, to rank many meshes before a few of them are traced.

This module has the memory: states, the engine's copy of the weights, gathered layers, activations of a micro-batch.
`closed_seconds` has the time.
"""

from __future__ import annotations

from typing import NamedTuple

from funrl.cost.search.closed_seconds import generation_seconds, sync_seconds, training_seconds
from funrl.cost.search.closed_split import (
    MeshSplit,
    computed,
    copies_weights,
    generated,
    pieces_of,
    shards_of,
    split_of,
    stored,
)
from funrl.cost.tracing.hardware import Hardware
from funrl.models import Model
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.settings.settings import scoring_budget

# Numbers saved per token for a layer's backward pass, in sizes of the residual stream, of the mlp and of the heads;
# from dry runs of a Llama 8B and a 70B on tp8. With a split stream, the inputs of attention and mlp are whole.
SAVED_SIZES = (8, 4, 4)
ENTERING = 2
SAVED_DISPATCHED = 3  # per token and expert, in sizes of the residual stream
# Bytes per trained weight: its moments and its gradient in float32.
MOMENT_BYTES = 8
GRADIENT_BYTES = 4


class Rough(NamedTuple):
    """Cost of a step by formula.

    Attributes:
      nbytes: peak memory of a rank.
      seconds: seconds of a step.
    """

    nbytes: float
    seconds: float


def closed_form(job: Job, width: int, hardware: Hardware) -> Rough:
    """Rough cost of a step of a job on its mesh.

    Args:
      width: tokens of a row.
    """
    split = split_of(job, width, hardware)
    resting = _resting(job, split)
    seconds = training_seconds(job, split, hardware)
    if isinstance(job, RLJob):
        seconds += sync_seconds(job, split, hardware) + generation_seconds(job, split, hardware, resting)
    return Rough(resting + _learning(job, split) + _activations(job, split), seconds)


def training_bytes(job: Job, width: int, hardware: Hardware) -> float:
    """Peak bytes of a rank that trains and does not generate.

    Args:
      width: tokens of a row.
    """
    split = split_of(job, width, hardware)
    return _states(job, split) + _learning(job, split) + _activations(job, split)


def scoring_bytes(job: Job, name: str, width: int, hardware: Hardware) -> float:
    """Peak bytes of a rank that only scores for one role.

    Args:
      name: of the role.
      width: tokens of a row.
    """
    split = split_of(job, width, hardware)
    model = job.models[name]
    nbytes = stored(job, split, name)
    if shards_of(job, split, name) > 1:
        nbytes += 2 * computed(model, split.experts) / (split.tensor * max(model.config.layers, 1))
    tokens = pieces_of(split, 1, scoring_budget(job.settings)).tokens
    return split.item * (nbytes + tokens * _saved(model, split))


def _resting(job: Job, split: MeshSplit) -> float:
    """Bytes of weights and optimizer states, and of the engine's copy."""
    copied = isinstance(job, RLJob) and copies_weights(job, split)
    return _states(job, split) + split.item * generated(job, split) * copied


def _states(job: Job, split: MeshSplit) -> float:
    """Bytes of weights and optimizer states."""
    nbytes = 0.0
    for name in job.models:
        count = stored(job, split, name)
        if job.base_of(name) is not None:
            nbytes += count * split.item * (name == job.main_role)  # one base for all
        else:
            nbytes += count * (job.master.itemsize + MOMENT_BYTES if name in job.algorithm.losses else split.item)
    return nbytes


def _learning(job: Job, split: MeshSplit) -> float:
    """Bytes of gradients, of the unembedding's float32 gradient while it is summed, and of gathered layers."""
    nbytes = 0.0
    for name, model in job.models.items():
        if name in job.algorithm.losses and job.base_of(name) is None:
            nbytes += GRADIENT_BYTES * stored(job, split, name)
            if name == job.main_role and model.generates:
                nbytes += 4 * model.config.vocab * model.config.embed / split.tensor
        if shards_of(job, split, name) > 1:
            nbytes += 2 * split.item * computed(model, split.experts) / (split.tensor * max(model.config.layers, 1))
    return nbytes


def _activations(job: Job, split: MeshSplit) -> float:
    """Bytes of activations of a training or a scoring micro-batch, whichever is larger."""
    config = job.model.config
    settings = job.settings
    layer = split.item * _saved(job.model, split)
    learned = pieces_of(split, settings.updates.minibatches, settings.updates.token_budget).tokens
    scored = pieces_of(split, 1, scoring_budget(settings)).tokens
    kept = split.item * config.embed / split.stream + layer / config.layers
    of_token = config.layers * (layer if settings.devices.remat == "none" else kept) + layer
    return max(learned * of_token, scored * layer)


def _saved(model: Model, split: MeshSplit) -> float:
    """Numbers saved per token for the backward pass of the widest kind of layer."""
    stream, mlp, heads = SAVED_SIZES
    stream = ENTERING + (stream - ENTERING) / split.stream
    embed = model.config.embed
    routed = any(layer.experts for layer in model.abilities.cost.layers)
    sizes = []
    for layer in model.abilities.cost.layers:
        if bool(layer.experts) == routed:
            rows = SAVED_DISPATCHED * layer.chosen * embed  # dispatched tokens, whole on every tensor rank
            sizes.append(stream * embed + rows + (mlp * layer.inner + heads * layer.queries) / split.tensor)
    return max(sizes)
