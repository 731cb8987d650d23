"""Memory and time of a step by formula, to rank many meshes before a few of them are traced.

It has the terms that differ from mesh to mesh: states, activations of a micro-batch, matrix products, attention, the
collectives of tensor parallelism and of sharding, and decoding, which reads the weights for every token.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from funrl import trees
from funrl.cost.hardware import USABLE, Hardware, collective_seconds
from funrl.cost.row_plan import rows_of_step
from funrl.mesh.message_sizes import message_bytes
from funrl.mesh.plan import RANKS_PER_NODE
from funrl.mesh.text import ROW_AXES, SHORT, devices
from funrl.models import Model
from funrl.models.config import Config
from funrl.rollout.native import FREE_SHARE
from funrl.trainer.declaration import parts
from funrl.trainer.job import Job
from funrl.trainer.settings import scoring_budget
from funrl.trainer.sharding import sharded_roles, splits_residual

# Numbers of a token that a layer's backward pass needs, in sizes of the residual stream, of the mlp and of the heads;
# by the dry runs of a Llama 8B and a 70B on tp8. Where tensor ranks share the stream, what enters the halves is whole.
SAVED_SIZES = (8, 4, 4)
ENTERING = 2
DISPATCHED = 3  # of a token for each of its experts, in sizes of the residual stream
STATE_BYTES = 12  # of a weight that learns: two moments and a gradient in float32
KERNELS = 12  # of a layer in one step of decoding


class Rough(NamedTuple):
    """Cost of a step by formula.

    Attributes:
      nbytes: the most that a rank holds.
      seconds: of a step.
    """

    nbytes: float
    seconds: float


class _Split(NamedTuple):
    """Split of a job over its mesh.

    Attributes:
      tensor, rows, sequence: ranks that split a layer, the rows, and the tokens of a row.
      experts: ranks that have other experts while a layer computes.
      shards: ranks that weights are sharded over; 1: none.
      alone: those of them that have the same experts.
      generating: (tensor, rows, experts) while generating.
      stream: tensor ranks that share the tokens of the residual stream.
      item: bytes of a number that a forward pass computes in.
      width: tokens of a row.
      count: rows of a step.
    """

    tensor: int
    rows: int
    sequence: int
    experts: int
    shards: int
    alone: int
    generating: tuple[int, int, int]
    stream: int
    item: int
    width: int
    count: int

    @property
    def tokens(self) -> int:
        """Tokens of the rank that has most rows."""
        return math.ceil(math.ceil(self.count / self.rows) * self.width / self.sequence)


def closed_form(job: Job, width: int, hardware: Hardware) -> Rough:
    """Rough cost of a step of a job on its mesh.

    Args:
      width: tokens of a row.
    """
    settings = job.settings
    over = [SHORT[short] for short in parts(settings.fsdp_axes)] or list(ROW_AXES)
    split = _Split(
        tensor=job.sizes["tensor"],
        rows=devices(job.sizes, ROW_AXES),
        sequence=job.sizes["sequence"],
        experts=job.sizes["expert"],
        shards=devices(job.sizes, over) if settings.fsdp else 1,
        alone=devices(job.sizes, [axis for axis in over if axis != "expert"]) if settings.fsdp else 1,
        generating=(
            job.generate_sizes["tensor"],
            devices(job.generate_sizes, ROW_AXES),
            job.generate_sizes["expert"],
        ),
        stream=job.sizes["tensor"] if splits_residual(settings, job.sizes, hardware.accelerator) else 1,
        item=job.dtype.itemsize,
        width=width,
        count=rows_of_step(job),
    )
    held = _states(job, split)
    seconds = _passes(job, split, hardware)
    if job.generates:
        seconds += _decoding(job, split, hardware, held)
    return Rough(held + _activations(job, split), seconds)


def _shards(job: Job, split: _Split, role: str) -> int:
    return split.shards if role in sharded_roles(job.settings) else 1


def _computed(model: Model, experts: int) -> float:
    """Parameters that a rank has while layers compute, before tensor ranks split them."""
    own = model.config.expert_parameters
    return trees.count(model.shapes) - own + own / experts


def _states(job: Job, split: _Split) -> float:
    """Bytes of weights, gradients and optimizer states, of the engine's copy, and of layers that are gathered."""
    nbytes = 0.0
    for name, model in job.models.items():
        own, sharded = model.config.expert_parameters, _shards(job, split, name) > 1
        count = (trees.count(model.shapes) - own) / (split.tensor * (split.shards if sharded else 1))
        count += own / (split.tensor * split.experts * (split.alone if sharded else 1))
        if job.lora is not None and (name in job.algorithm.losses or name not in job.directories):
            count *= name == job.lead  # one base for all
            nbytes += count * split.item
        elif name in job.algorithm.losses:
            nbytes += count * (job.master.itemsize + STATE_BYTES)
        else:
            nbytes += count * split.item
        if sharded:
            nbytes += 2 * split.item * _computed(model, split.experts) / (split.tensor * max(model.config.layers, 1))
    if job.generates and (split.item, split.shards, job.generate_sizes) != (job.master.itemsize, 1, job.sizes):
        nbytes += split.item * _computed(job.models["policy"], split.generating[2]) / split.generating[0]
    return nbytes


def _activations(job: Job, split: _Split) -> float:
    """Bytes that the larger of a micro-batch that learns and one that is scored takes."""
    config, settings = job.model.config, job.settings
    layer = split.item * _saved(config, split)
    longest = split.width / split.sequence
    learned = min(max(settings.token_budget, longest), split.tokens)
    scored = min(max(scoring_budget(settings), longest), split.tokens)
    kept = split.item * config.embed / split.stream + layer / config.layers
    of_token = config.layers * (layer if settings.remat == "none" else kept) + layer
    return max(learned * of_token, scored * layer)


def _saved(config: Config, split: _Split) -> float:
    stream, mlp, heads = SAVED_SIZES
    stream = ENTERING + (stream - ENTERING) / split.stream
    if config.experts is None:
        return stream * config.embed + (mlp * config.mlp + heads * config.attention_width) / split.tensor
    chosen, own = config.experts.per_token, config.experts
    rows = DISPATCHED * chosen * config.embed  # of a token on its way, whole on every tensor rank
    wide = mlp * (chosen * own.mlp + own.shared) + heads * config.attention_width
    return stream * config.embed + rows + wide / split.tensor


def _passes(job: Job, split: _Split, hardware: Hardware) -> float:
    """Seconds of scoring and learning: of arithmetic, and of collectives; on accelerators the arithmetic hides those of
    sharding, as far as it lasts."""
    settings, seconds = job.settings, 0.0
    again = settings.remat != "none"
    prefill = int(job.generates)
    for name, model in job.models.items():
        learns = name in job.algorithm.losses
        scored = int(not learns or settings.epochs * settings.minibatches > 1) if job.generates else int(not learns)
        updates = settings.epochs if learns else 0
        used = model.config.used_parameters(trees.count(model.shapes))
        arithmetic = _forward(model.config, used, split, hardware)
        computing = arithmetic * (scored + updates * (3 + again))
        seconds += computing + arithmetic * prefill * (name == "policy")
        streamed = scored + updates * (2 + again)
        seconds += streamed * _summed(model.config, split, hardware)
        scoring = math.ceil(split.tokens / max(scoring_budget(settings), split.width))
        learning = math.ceil(split.tokens / max(settings.token_budget, split.width))
        weights = _computed(model, split.experts) / split.tensor
        shards = _shards(job, split, name)
        near = split.tensor * split.sequence * shards <= RANKS_PER_NODE
        if shards > 1:
            gathers = scoring * scored + learning * updates * 2
            nbytes = gathers * weights * split.item + learning * updates * weights * 4
            filled = max(1.0, message_bytes(shards, 0) * model.config.layers / (weights * split.item))
            count = gathers * math.ceil(model.config.layers / filled)
            sharding = collective_seconds(hardware, "gather", count, nbytes, shards, near)
            seconds += max(0.0, sharding - computing) if hardware.accelerator else sharding
        if updates and split.rows > shards:
            count = updates * settings.minibatches
            far = split.tensor * split.rows > RANKS_PER_NODE
            nbytes = count * 4 * weights / shards * (job.lora is None)
            seconds += collective_seconds(hardware, "all_reduce", count, nbytes, split.rows // shards, not far)
    return seconds


def _forward(config: Config, parameters: int, split: _Split, hardware: Hardware) -> float:
    """Seconds of the arithmetic of one forward pass over the rows of a rank."""
    pairs = 2 * config.layers * config.attention_width * split.width
    rate = (hardware.half if split.item == 2 else hardware.single) * hardware.efficiency[0]
    return split.tokens * (2 * parameters + pairs) / split.tensor / rate


def _summed(config: Config, split: _Split, hardware: Hardware) -> float:
    """Seconds of what layers send in one pass: two sums over tensor ranks, keys and values to sequence ranks, tokens to
    their experts."""
    seconds = 0.0
    if split.sequence > 1:
        near = split.tensor * split.sequence <= RANKS_PER_NODE
        nbytes = 2.0 * config.layers * split.tokens * split.sequence * config.kv_heads * config.head * split.item
        seconds = collective_seconds(hardware, "gather", config.layers, nbytes / split.tensor, split.sequence, near)
    if config.experts is not None and split.experts > 1:  # there and back
        near = split.tensor * split.sequence * split.experts <= RANKS_PER_NODE
        count, item = 2 * len(config.expert_layers), split.item
        nbytes = count * split.tokens * min(config.experts.per_token, split.experts) * config.embed * item
        seconds += collective_seconds(hardware, "gather", count, float(nbytes), split.experts, near)
    if split.tensor == 1:
        return seconds
    nbytes = 2.0 * config.layers * split.tokens * config.embed * split.item
    near = split.tensor <= RANKS_PER_NODE
    return seconds + collective_seconds(hardware, "all_reduce", 2 * config.layers, nbytes, split.tensor, near)


def _decoding(job: Job, split: _Split, hardware: Hardware, held: float) -> float:
    """Seconds of decoding: in each step the weights and the keys are read, for as many rows as there is room for."""
    config, (tensor, ranks, experts) = job.model.config, split.generating
    rows, speed = math.ceil(split.count / ranks), hardware.bandwidth * hardware.efficiency[1]
    keys = config.layers * config.cached(tensor) * split.item
    room = FREE_SHARE * max(hardware.memory * USABLE - held, 0.0)
    together = max(1, min(rows, job.settings.decode_rows, int(room / (keys * split.width))))
    steps = math.ceil(rows / together) * job.sampling.max_new_tokens
    policy = job.models["policy"]
    own, whole = config.expert_parameters / experts, _computed(policy, experts)
    chosen = 1.0 if config.experts is None else min(1.0, together * config.experts.per_token / config.experts.count)
    weights = split.item * (whole - own * (1 - chosen)) / tensor
    read = (weights + together * keys * split.width / 2) / speed
    rate = (hardware.half if split.item == 2 else hardware.single) * hardware.efficiency[0]
    counted = 2 * together * config.used_parameters(trees.count(policy.shapes)) / tensor / rate
    step = max(read, counted, KERNELS * config.layers * hardware.launch)
    if tensor > 1:
        nbytes = 2.0 * config.layers * together * config.embed * split.item
        near = tensor <= RANKS_PER_NODE
        step += collective_seconds(hardware, "all_reduce", 2 * config.layers, nbytes, tensor, near)
    return steps * step
