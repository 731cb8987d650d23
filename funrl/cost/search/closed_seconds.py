"""Time of a step by formula: the sum over layers that the dry run's trace counts kernel by kernel.

A kernel takes the maximum of its arithmetic, its memory traffic and its launch. Matrix products of a forward pass take
the maximum of the three sums. All other kernels are bound by memory traffic or, in decoding, by launches. Kernels run
one after the other, then the collectives that do not overlap with them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from funrl.cost.search.closed_split import (
    MeshSplit,
    computed,
    copies_weights,
    generated,
    parameters,
    pieces_of,
    shards_of,
    stored,
    tables,
)
from funrl.cost.tracing.hardware import USABLE, Hardware, collective_seconds, message_seconds
from funrl.cost.tracing.turns import written_tokens
from funrl.mesh.message_sizes import message_bytes
from funrl.mesh.plan import RANKS_PER_NODE
from funrl.models import Model
from funrl.rollout.certificate import DIGEST_PASSES
from funrl.rollout.native.cache_sizes import FREE_SHARE, page_tokens, pass_tokens
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.settings.settings import scoring_budget

# By the dry runs of Qwen2.5 0.5B and 7B, Llama 70B, Qwen3 30B and Mixtral 8x7B, kernel by kernel.
# Kernels of a layer's forward pass: matrix products, and all others.
PRODUCTS = 7
KERNELS = 34
NORM_KERNELS = 14  # additional in a layer that norms queries and keys
# Additional kernels in a layer with experts, and for each expert of a token.
EXPERT_KERNELS = 37
CHOICE_KERNELS = 3
TOKEN_KERNELS = 84  # per decoding iteration outside layers: embedding, norm, logits, sampling
# Numbers that other kernels read and write per token in a layer's forward pass, in sizes of the residual stream, of the
# mlp, and of the heads of queries and keys (twice if these are normed). With experts, in sizes of the stream for each
# expert of a token: dispatch, and combination from each rank whose experts see all tokens.
MOVED = (46, 9, 9)
DISPATCHED = 8
COMBINED = 7
LEARNED = 2.7  # factor of numbers and kernels for forward and backward pass together
# Memory traffic per weight, in sizes of a number of the forward pass: for each gather, each micro-batch that gives it a
# gradient, and in addition for the embedding tables, whose gradient is in float32.
GATHERED = 4.7
GRADIENT = 6.5
TABLE_GRADIENT = 12.0
UPDATED = 31  # bytes per weight in an optimizer step
# Bytes of memory traffic per logit.
SCORED_LOGIT = 28
LEARNED_LOGIT = 90
DRAWN_LOGIT = 28


class _Pass(NamedTuple):
    """Forward passes over some tokens of a rank.

    Attributes:
      model: the model.
      tensor, stream: ranks that split a layer, and the tokens of the residual stream.
      experts: ranks over which experts are split.
      item: bytes per number.
      tokens: tokens of all passes together.
      pieces: number of passes.
      width: twice the mean number of tokens that a token attends to.
    """

    model: Model
    tensor: int
    stream: int
    experts: int
    item: int
    tokens: float
    pieces: float
    width: float


def training_seconds(job: Job, split: MeshSplit, hardware: Hardware) -> float:
    """Seconds of scoring and training, of kernels and of collectives."""
    return sum(role_seconds(job, split, hardware, name) for name in job.models)


def role_seconds(job: Job, split: MeshSplit, hardware: Hardware, name: str) -> float:
    """Seconds of scoring and training of one role."""
    settings = job.settings
    model = job.models[name]
    learns = name in job.algorithm.losses
    scored = (
        int(not learns or settings.updates.epochs * settings.updates.minibatches > 1)
        if isinstance(job, RLJob)
        else int(not learns)
    )
    updates = settings.updates.epochs * learns
    again = settings.devices.remat != "none"
    scoring = scored * pieces_of(split, 1, scoring_budget(settings)).count
    steps = updates * settings.updates.minibatches
    learning = steps * pieces_of(split, settings.updates.minibatches, settings.updates.token_budget).count
    work = _Pass(
        model=model,
        tensor=split.tensor,
        stream=split.stream,
        experts=split.experts,
        item=split.item,
        tokens=0,
        pieces=0,
        width=split.width,
    )
    score = work._replace(tokens=scored * split.tokens, pieces=scoring)
    update = work._replace(tokens=updates * split.tokens, pieces=learning)
    kernels = sum(_kernels(score, hardware))
    sent = _summed(score, split.sequence, hardware)
    products, others = _kernels(update, hardware)
    kernels += (3 + again) * products + (LEARNED + again) * others
    sent += (2 + again) * _summed(update, split.sequence, hardware)
    kernels += _logits(job, split, hardware, model, scored, updates)
    kernels += _weights(job, split, hardware, name, (scoring, learning, steps))
    sharding, summing = _sharding(job, split, hardware, name, (scoring, learning, steps))
    return kernels + sent + summing + (max(0.0, sharding - kernels) if hardware.accelerator else sharding)


def _kernels(work: _Pass, hardware: Hardware) -> tuple[float, float]:
    """Seconds of matrix products and attention, and of all other kernels, without embedding and unembedding."""
    cost = work.model.abilities.cost
    embed = work.model.config.embed
    pairs = 2 * cost.queries * work.width
    flops = (
        work.tokens * (2 * (cost.used_parameters(parameters(work.model)) - tables(work.model)) + pairs) / work.tensor
    )
    weights = (computed(work.model, work.experts) - tables(work.model) - cost.looked_up) / work.tensor
    launches = work.pieces * len(cost.layers) * PRODUCTS * hardware.launch
    read = work.pieces * work.item * weights / _speed(hardware)
    products = max(flops / _rate(hardware, work.item), read, launches)
    stream, mlp, heads = MOVED
    moved = count = 0.0
    for layer in cost.layers:
        moved += stream * embed / work.stream + heads * (1 + layer.normed) * layer.projected / work.tensor
        moved += mlp * layer.inner / work.tensor
        count += KERNELS + NORM_KERNELS * layer.normed
        if layer.experts:
            seen = work.experts if work.experts <= layer.chosen else 1
            moved += layer.chosen * (DISPATCHED + COMBINED * seen) * embed
            count += EXPERT_KERNELS + CHOICE_KERNELS * layer.chosen
    return products, work.item * work.tokens * moved / _speed(hardware) + work.pieces * count * hardware.launch


def _logits(job: Job, split: MeshSplit, hardware: Hardware, model: Model, scored: int, updates: int) -> float:
    """Seconds of float32 logits of the scored and the trained tokens."""
    if not model.generates:
        return 0.0
    share = written_tokens(job) / split.width if isinstance(job, RLJob) else 1.0
    logits = share * split.tokens * model.config.vocab / split.tensor
    product = 2 * model.config.embed / _rate(hardware, max(split.item, 4))
    back = 4 * model.config.embed / _rate(hardware, split.item)
    moved = scored * SCORED_LOGIT + updates * LEARNED_LOGIT
    return logits * ((scored + 2 * updates) * product + updates * back + moved / _speed(hardware))


def _weights(job: Job, split: MeshSplit, hardware: Hardware, name: str, often: tuple[float, float, int]) -> float:
    """Seconds of reading and writing weights and gradients outside matrix products.

    Args:
      often: numbers of scoring passes, training passes and optimizer steps.
    """
    scoring, learning, steps = often
    model = job.models[name]
    each = computed(model, split.experts) / split.tensor
    numbers = (scoring + 2 * learning) * GATHERED * each if shards_of(job, split, name) > 1 else 0.0
    if job.base_of(name) is not None:
        return split.item * numbers / _speed(hardware)
    numbers += learning * (GRADIENT * each + TABLE_GRADIENT * tables(model) / split.tensor)
    return (split.item * numbers + steps * UPDATED * stored(job, split, name)) / _speed(hardware)


def _sharding(
    job: Job, split: MeshSplit, hardware: Hardware, name: str, often: tuple[float, float, int]
) -> tuple[float, float]:
    """Seconds of the collectives of sharded weights, and of the sum of gradients once per step.

    Args:
      often: as in `_weights`.
    """
    scoring, learning, steps = often
    model = job.models[name]
    shards = shards_of(job, split, name)
    weights = computed(model, split.experts) / split.tensor
    layers = model.config.layers
    gathering = 0.0
    if shards > 1:
        near = split.reach <= RANKS_PER_NODE
        gathers = scoring + learning * 2
        nbytes = gathers * weights * split.item + learning * weights * job.reduce_dtype.itemsize
        filled = max(1.0, message_bytes(shards, 0) * layers / (weights * split.item))
        count = gathers * math.ceil(layers / filled)
        gathering = collective_seconds(hardware, "gather", count, nbytes, shards, near)
    ranks = split.rows * split.sequence // shards
    if not steps or ranks == 1:
        return gathering, 0.0
    near = split.tensor * split.rows * split.sequence <= RANKS_PER_NODE
    nbytes = steps * 4 * weights / shards * (job.base_of(name) is None)
    return gathering, collective_seconds(hardware, "all_reduce", steps * layers, nbytes, ranks, near)


def _summed(work: _Pass, sequence: int, hardware: Hardware) -> float:
    """Seconds of the collectives of layers.

    These are two sums over tensor ranks, the gather of keys and values or of states over sequence ranks, and the
    exchange of tokens between expert ranks.
    """
    config = work.model.config
    cost = work.model.abilities.cost
    seconds = 0.0
    if sequence > 1:
        near = work.tensor * sequence <= RANKS_PER_NODE
        count = work.pieces * config.layers
        nbytes = 2.0 * sum(layer.keys for layer in cost.layers) * work.tokens * sequence * work.item
        nbytes += sum(layer.passed for layer in cost.layers) * work.pieces * sequence * max(4, work.item)
        seconds = collective_seconds(hardware, "gather", count, nbytes / work.tensor, sequence, near)
    routers = work.model.abilities.routers
    if routers is not None and work.experts > 1:  # there and back
        near = work.tensor * sequence * work.experts <= RANKS_PER_NODE
        ways = 2 * len(routers.layers)
        nbytes = ways * work.tokens * min(routers.per_token, work.experts) * config.embed * work.item
        seconds += collective_seconds(hardware, "gather", 2 * ways * work.pieces, float(nbytes), work.experts, near)
    if work.tensor == 1:
        return seconds
    near = work.tensor <= RANKS_PER_NODE
    count = work.pieces * 2 * config.layers
    nbytes = 2.0 * config.layers * work.tokens * config.embed * work.item
    return seconds + collective_seconds(hardware, "all_reduce", count, nbytes, work.tensor, near)


def sync_seconds(job: Job, split: MeshSplit, hardware: Hardware) -> float:
    """Seconds of a weight sync: receiving the weights, and verifying them."""
    have = stored(job, split, job.main_role)
    wanted = generated(job, split)
    seconds = message_seconds(hardware, 0, split.item * max(0.0, wanted - have), near=False)
    if job.settings.engines.verify_sync:
        numbers = wanted + have * copies_weights(job, split)
        seconds += DIGEST_PASSES * 8 * numbers / _speed(hardware)
    return seconds


def generation_seconds(job: RLJob, split: MeshSplit, hardware: Hardware, resting: float) -> float:
    """Seconds of prefill and decoding, with as many rows at once as fit.

    Args:
      job: to estimate.
      split: over the mesh.
      hardware: of each rank.
      resting: bytes that a rank holds besides the cache.
    """
    model = job.models[job.main_role]
    tensor, ranks = split.generating
    settings = job.settings
    config = model.config
    device = "cuda" if hardware.accelerator else "cpu"
    new = written_tokens(job)
    prompts = math.ceil(settings.run.batch_prompts / ranks)
    prompt = split.width - new
    page = page_tokens(device)
    rows = prompts * job.sampling.samples
    keys = model.abilities.cost.cached(tensor) * split.item
    state = model.abilities.cost.state(tensor) * max(split.item, 4)
    room = (settings.engines.kv_cache_gb or 0) * 1e9 or FREE_SHARE * max(hardware.memory * USABLE - resting, 0.0)
    row_bytes = keys * page * math.ceil(split.width / page) + state
    most = max(1, min(rows, settings.engines.decode_rows, int(room / row_bytes)))
    waves = math.ceil(rows / most)
    work = _Pass(
        model=model,
        tensor=tensor,
        stream=1,
        experts=1,
        item=split.item,
        tokens=prompts * prompt,
        pieces=0,
        width=prompt,
    )
    at_once = min(max(1, pass_tokens(device) // prompt), math.ceil(most / job.sampling.samples))
    passes = math.ceil(prompts / at_once) * math.ceil(prompt / pass_tokens(device))
    reading = work._replace(pieces=passes)
    step = work._replace(tokens=rows / waves, pieces=1, width=0)
    seen = page * math.ceil((prompt + new / 2) / page)
    decoding = sum(_kernels(step, hardware)) + _summed(step, 1, hardware) + _drawing(step, hardware)
    moved = step.tokens * (keys * seen + 2 * state)  # a state is read and written
    decoding += max(config.layers * hardware.launch, moved / _speed(hardware))
    return sum(_kernels(reading, hardware)) + _summed(reading, 1, hardware) + waves * new * decoding


def _drawing(step: _Pass, hardware: Hardware) -> float:
    """Seconds of the embedding, of the float32 logits, and of sampling one token per row."""
    config = step.model.config
    speed = _speed(hardware)
    table = config.vocab * config.embed / step.tensor
    product = max(2 * step.tokens * table / _rate(hardware, max(step.item, 4)), max(step.item, 4) * table / speed)
    logits = step.tokens * config.vocab
    seconds = product + (step.item * table + DRAWN_LOGIT * logits) / speed + TOKEN_KERNELS * hardware.launch
    if step.tensor == 1:
        return seconds
    return seconds + collective_seconds(hardware, "gather", 2, 4.0 * logits, step.tensor, step.tensor <= RANKS_PER_NODE)


def _rate(hardware: Hardware, item: int) -> float:
    """FLOPs a second of matrix products of numbers of `item` bytes."""
    return {2: hardware.half, 8: hardware.double}.get(item, hardware.single) * hardware.efficiency[0]


def _speed(hardware: Hardware) -> float:
    """Bytes a second that memory transfers."""
    return hardware.bandwidth * hardware.efficiency[1]
