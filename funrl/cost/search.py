"""A search over meshes: all ways to split a run over N devices, ranked by formula; the best are traced.

`--mesh=auto:64` is such a search. --dry_run prints it; a run takes its first mesh. The result depends only on flags,
the model's config.json and the table of hardware, so it is the same on all ranks.

The formula of time is the sum over layers that the dry run's trace counts kernel by kernel. A kernel takes the maximum
of its arithmetic, its memory traffic and its launch. Matrix products of a forward pass take the maximum of the three
sums. All other kernels are bound by memory traffic or, in decoding, by launches. Kernels run one after the other, then
the collectives that do not overlap with them. That of memory has states, the engine's copy of the weights, gathered
layers and the activations of a micro-batch.

A split of training, such as dp64 --fsdp, does not fix the generate mesh: a model that does not fit one device can train
without tensor parallelism and generate with it. If memory is short by formula, --remat=full and smaller token budgets
are variants too. The formula takes a tenth of a millisecond per variant; laying out a model takes much longer, so it is
done once for each split, with few layers.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from funrl import trees
from funrl.algos.core import Algorithm
from funrl.cost.dry_run import check_width, estimate, plain_job, tokens_of
from funrl.cost.rows import rows_of_step
from funrl.cost.tables import duration_text, size
from funrl.cost.tracing.estimate import TRACED, Estimate, of_depth, traced_layers
from funrl.cost.tracing.hardware import USABLE, Hardware, collective_seconds, message_seconds
from funrl.cost.tracing.turns import written_tokens
from funrl.cost.verdict import Peak, Rates, peak_of, rates_of, written_flags
from funrl.mesh import mesh as meshes
from funrl.mesh.message_sizes import message_bytes
from funrl.mesh.plan import RANKS_PER_NODE
from funrl.mesh.text import AXES, ROW_AXES, SHORT, TOKEN_AXES, devices
from funrl.models import Model
from funrl.rollout.certificate import DIGEST_PASSES
from funrl.rollout.native.cache_sizes import FREE_SHARE, page_tokens, pass_tokens
from funrl.trainer.jobs.compatibility import check_meshes
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.jobs.sharding import generate_sizes, is_sharded, splits_residual
from funrl.trainer.settings.checks import check_together
from funrl.trainer.settings.declaration import SettingsError, parts
from funrl.trainer.settings.settings import Settings, flag_value, scoring_budget, with_flags


class MeshSplit(NamedTuple):
    """Split of a job over its mesh.

    Attributes:
      tensor, rows, sequence: ranks that split a layer, the rows, and the tokens of a row.
      experts: ranks over which experts are split while a layer computes.
      shards: ranks that weights are sharded over; 1: none.
      alone: those of them that have the same experts.
      reach: number of neighbouring ranks that a group of shards spans.
      generating: (tensor, rows) while generating, where each rank has all experts.
      stream: tensor ranks that share the tokens of the residual stream.
      item: bytes per number of a forward pass.
      width: tokens of a row.
      count: rows of a step.
    """

    tensor: int
    rows: int
    sequence: int
    experts: int
    shards: int
    alone: int
    reach: int
    generating: tuple[int, int]
    stream: int
    item: int
    width: int
    count: int

    @property
    def tokens(self) -> int:
        """Tokens of the rank with the most rows."""
        return math.ceil(math.ceil(self.count / self.rows) * self.width / self.sequence)


def split_of(job: Job, width: int, hardware: Hardware) -> MeshSplit:
    """The split of a job whose rows have `width` tokens."""
    settings = job.settings
    over = [SHORT[short] for short in parts(settings.sharding.fsdp_axes)] or list(TOKEN_AXES)
    outermost = next((axis for axis in AXES if axis in over and job.sizes[axis] > 1), "tensor")
    return MeshSplit(
        tensor=job.sizes["tensor"],
        rows=devices(job.sizes, ROW_AXES),
        sequence=job.sizes["sequence"],
        experts=job.sizes["expert"],
        shards=devices(job.sizes, over) if settings.sharding.fsdp else 1,
        alone=devices(job.sizes, [axis for axis in over if axis != "expert"]) if settings.sharding.fsdp else 1,
        reach=devices(job.sizes, AXES[AXES.index(outermost) :]),
        generating=(job.generate_sizes["tensor"], devices(job.generate_sizes, ROW_AXES)),
        stream=job.sizes["tensor"] if splits_residual(settings, job.sizes, hardware.accelerator) else 1,
        item=job.dtype.itemsize,
        width=width,
        count=rows_of_step(job),
    )


def shards_of(job: Job, split: MeshSplit, role: str) -> int:
    """Ranks that the weights of a role are sharded over; 1: none."""
    return split.shards if is_sharded(job.settings, role) else 1


class RowPieces(NamedTuple):
    """Micro-batches of a rank's rows.

    Attributes:
      count: their number; the last counts as a fraction if there are more than are traced.
      tokens: tokens of the largest.
    """

    count: float
    tokens: float


def pieces_of(split: MeshSplit, parts: int, budget: int) -> RowPieces:
    """Micro-batches of whole rows.

    Args:
      parts: number of mini-batches that the rows are divided into.
      budget: tokens of a micro-batch; a longer row raises it.
    """
    rows = math.ceil(split.count / split.rows / parts)
    most = max(1, budget * split.sequence // split.width)
    count = rows / most
    if count <= TRACED:
        count = math.ceil(count)
        most = math.ceil(rows / count)
    return RowPieces(count, most * split.width / split.sequence)


@functools.lru_cache(maxsize=64)
def parameters(model: Model) -> int:
    """Parameters of a model."""
    return trees.count(model.shapes)


def stored(job: Job, split: MeshSplit, role: str) -> float:
    """Parameters of a role that a rank stores between steps."""
    model = job.models[role]
    own = model.abilities.cost.expert_parameters
    sharded = shards_of(job, split, role) > 1
    count = (parameters(model) - own) / (split.tensor * (split.shards if sharded else 1))
    return count + own / (split.tensor * split.experts * (split.alone if sharded else 1))


def computed(model: Model, experts: int) -> float:
    """Parameters that a rank has while layers compute, before tensor ranks split them."""
    own = model.abilities.cost.expert_parameters
    return parameters(model) - own + own / experts


def tables(model: Model) -> int:
    """Parameters of the embedding and of the unembedding."""
    shared = model.config.tied or not model.generates
    return model.config.vocab * model.config.embed * (1 if shared else 2)


def generated(job: Job, split: MeshSplit) -> float:
    """Parameters that a rank of the engine has."""
    return parameters(job.models[job.main_role]) / split.generating[0]


def copies_weights(job: Job, split: MeshSplit) -> bool:
    """True if the engine has its own copy of the weights, in another dtype or with another sharding."""
    experts = split.experts > 1 and job.models[job.main_role].abilities.routers is not None
    return experts or (split.item, split.shards, job.generate_sizes) != (job.master.itemsize, 1, job.sizes)


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


TOLERANCE = 1.5  # the formula and the trace differ by less than this factor
SMALLER_BUDGETS = (2, 4)  # the token budget is divided by these
MOST_NODES = 8  # limit of a tensor parallel group of the engine


class Candidate(NamedTuple):
    """One way to split a run, with its cost by formula.

    Attributes:
      settings: settings of the run with this split.
      rough: its cost by formula.
      nodes: nodes that its widest tensor parallel group spans.
    """

    settings: Settings
    rough: Rough
    nodes: int


class SearchSpace(NamedTuple):
    """Constants of a search.

    Attributes:
      base: the job on one device.
      shallow: its models with few layers, which have the layouts of whole ones.
      width: tokens of a row.
      hardware: the devices.
    """

    base: Job
    shallow: Mapping[str, Model]
    width: int
    hardware: Hardware

    @property
    def room(self) -> float:
        """Bytes of a device that can be used."""
        return self.hardware.memory * USABLE


def search_space(base: Job, width: int, hardware: Hardware) -> SearchSpace:
    """Constants of a search for meshes of a job."""
    shallow = {name: _shallow(model) for name, model in base.models.items()}
    return SearchSpace(base, shallow, width, hardware)


def _shallow(model: Model) -> Model:
    return of_depth(model, traced_layers(model).few)


def rank_key(fits: bool, nodes: int, seconds: float, nbytes: float) -> tuple[bool, bool, float]:
    """Sort key of ways to split a run: by time if they fit, else by memory.

    A tensor parallel group inside a node comes before one that spans nodes, whose sums cross the network.
    """
    return (not fits, nodes > 1, seconds if fits else nbytes)


def rough_key(candidate: Candidate, room: float) -> tuple[bool, bool, float]:
    """`rank_key` of a candidate by formula."""
    rough = candidate.rough
    return rank_key(rough.nbytes <= room, candidate.nodes, rough.seconds, rough.nbytes)


def tensor_nodes(job: Job) -> int:
    """Nodes that the widest tensor parallel group of a job spans."""
    widest = max(job.sizes["tensor"], job.generate_sizes["tensor"] if isinstance(job, RLJob) else 1)
    return math.ceil(widest / RANKS_PER_NODE)


def engine_meshes(space: SearchSpace, settings: Settings, world: int) -> list[str]:
    """Generate meshes to try in addition to the default one; none if a flag gives one.

    They are tensor parallel inside a node, and over nodes only if a node has no room for the weights.
    """
    base = space.base
    if not isinstance(base, RLJob) or settings.devices.generate_mesh is not None or settings.engines.engine != "native":
        return []
    engines = {base.main_role: space.shallow[base.main_role]}
    widest = RANKS_PER_NODE if engine_fits_node(space) else RANKS_PER_NODE * MOST_NODES
    texts = []
    for tensor in (n for n in range(1, min(world, widest) + 1) if world % n == 0):
        text = meshes.text({"data": world // tensor, "expert": 1, "sequence": 1, "tensor": tensor})
        probe = with_flags(settings, mesh=text, generate_mesh=text, fsdp=False, fsdp_axes=None)
        try:
            check_meshes(probe, engines, probe.devices.train.sizes, space.hardware.memory)
        except ValueError:
            continue
        texts.append(text)
    return texts


def engine_bytes_of_node(space: SearchSpace) -> float:
    """Bytes of weights per device of an engine whose tensor parallel group is one node."""
    return space.base.dtype.itemsize * parameters(space.base.models[space.base.main_role]) / RANKS_PER_NODE


def engine_fits_node(space: SearchSpace) -> bool:
    """True if an engine whose tensor parallel group is a node has room for the weights."""
    return engine_bytes_of_node(space) <= space.room


def candidates_of(space: SearchSpace, split: Settings, engines: Sequence[str]) -> list[Candidate]:
    """All variants of a split of training, best first.

    Args:
      engines: generate meshes, in addition to the default.

    Raises:
      ValueError: the models cannot be laid out so.
    """
    check_together(split)
    base = space.base
    sizes = split.devices.train.chosen
    memory = space.hardware.memory
    default = generate_sizes(split, sizes, base.models[base.main_role], memory) if isinstance(base, RLJob) else sizes
    laid_out = with_flags(split, generate_mesh=meshes.text(default)) if isinstance(base, RLJob) else split
    check_meshes(laid_out, space.shallow, sizes, memory)
    candidates = list(
        _with_savings(space, dataclasses.replace(base, settings=split, sizes=sizes, generate_sizes=default))
    )
    for text in engines:
        generating = meshes.parse(text)
        if generating != default:
            settings = with_flags(split, generate_mesh=text)
            job = dataclasses.replace(base, settings=settings, sizes=sizes, generate_sizes=generating)
            candidates += _with_savings(space, job)
    return sorted(candidates, key=lambda candidate: rough_key(candidate, space.room))


def _with_savings(space: SearchSpace, job: Job) -> Iterator[Candidate]:
    """A job unchanged, and if memory may be short, with flags that save memory."""
    nodes = tensor_nodes(job)
    seen = set()
    for settings in _savings(job.settings, space.width):
        rough = closed_form(dataclasses.replace(job, settings=settings), space.width, space.hardware)
        if rough not in seen:  # a budget below a row's tokens changes nothing
            yield Candidate(settings, rough, nodes)
        seen.add(rough)
        if settings is job.settings and rough.nbytes * TOLERANCE <= space.room:
            return


def _savings(settings: Settings, width: int) -> Iterator[Settings]:
    """The settings, then those with smaller token budgets and with --remat=full."""
    budget = settings.updates.token_budget
    budgets = [budget, *(max(width, budget // n) for n in SMALLER_BUDGETS if budget > width)]
    for remat in ["none", "full"] if settings.devices.remat == "none" else [settings.devices.remat]:
        for tokens in dict.fromkeys(budgets):
            same = (remat, tokens) == (settings.devices.remat, budget)
            yield settings if same else with_flags(settings, remat=remat, token_budget=tokens)


BEST = 5  # meshes that are traced
SPANNING = 2  # of these, at most so many that fit and whose tensor parallel groups span nodes
RESCUES = 2  # further meshes, if none of the best is sensible and fits


class Traced(NamedTuple):
    """A way to split a run that was traced.

    Attributes:
      settings: settings of the run with this split.
      flags: those that differ from the given ones.
      estimate: cost of a step, traced.
      peak: the largest memory of a rank.
      rates: times and throughput of the run.
      fits: whether a device has room for it.
    """

    settings: Settings
    flags: dict[str, Any]
    estimate: Estimate
    peak: Peak
    rates: Rates
    fits: bool

    @property
    def nodes(self) -> int:
        """Nodes that its widest tensor parallel group spans."""
        return tensor_nodes(self.estimate.job)

    @property
    def sensible(self) -> bool:
        """True if it fits and its tensor parallel groups stay inside a node."""
        return self.fits and self.nodes == 1


class Other(NamedTuple):
    """A way to split a run that was not traced.

    Attributes:
      flags: of this split.
      rough: its cost by formula; None: the split is impossible.
      reason: why it was dropped.
    """

    flags: dict[str, Any]
    rough: Rough | None
    reason: str


class Ranked(NamedTuple):
    """Ways to split a run, by formula.

    Attributes:
      space: the constants of the search.
      splits: the candidates of each split of training, best first.
      others: impossible splits.
      unused: axes that the model is not split over, and why.
    """

    space: SearchSpace
    splits: list[list[Candidate]]
    others: list[Other]
    unused: dict[str, str]


class Search(NamedTuple):
    """Ways to split a run over some devices.

    Attributes:
      world: devices.
      hardware: of the devices.
      best: traced splits in the order of `rank_key`.
      others: the rest, by formula.
      ranked: all splits, by formula.
    """

    world: int
    hardware: Hardware
    best: tuple[Traced, ...]
    others: tuple[Other, ...]
    ranked: Ranked

    @property
    def unused(self) -> dict[str, str]:
        """Axes that the model is not split over, and why."""
        return self.ranked.unused


def search(settings: Settings, algorithm: Algorithm, hardware: Hardware) -> Search:
    """Rank all meshes of --mesh=auto:N by formula and trace the best of them.

    Raises:
      ValueError: a flag cannot work on any mesh, or no mesh is possible; the message has the first reason.
    """
    world = settings.devices.train.wanted or 1
    tokens = tokens_of(settings, algorithm)
    ranked = ranked_splits(settings, algorithm, world, hardware)

    def trace(candidate: Candidate) -> Traced:
        changed = candidate.settings
        estimated = estimate(plain_job(changed, algorithm, hardware.memory), tokens, hardware)
        peak = peak_of(estimated)
        fits = peak.nbytes <= hardware.memory * USABLE
        return Traced(changed, split_flags(changed, settings), estimated, peak, rates_of(estimated, hardware), fits)

    best, errors = _traced(ranked, trace)
    others = [_other(ranked, number, errors, settings) for number in _untraced(ranked, best)] + ranked.others
    if not best:
        reason = others[0].reason if others else "there is none"
        raise SettingsError(f"--mesh={settings.devices.mesh}: no mesh of {world} devices is possible: {reason}")
    best.sort(key=lambda traced: rank_key(traced.fits, traced.nodes, traced.rates.seconds, traced.peak.nbytes))
    return Search(world, hardware, tuple(best), tuple(others), ranked)


def ranked_splits(settings: Settings, algorithm: Algorithm, world: int, hardware: Hardware) -> Ranked:
    """Rank all ways to split a run over `world` devices by formula.

    Raises:
      ValueError: a flag that cannot work on any mesh.
    """
    unshared = {"fsdp": False, "fsdp_axes": None, "grad_reduce_dtype": "auto", "balance_pictures": False}
    alone = with_flags(settings, mesh="dp1", generate_mesh=None, **unshared)
    base = plain_job(alone, algorithm, hardware.memory)
    space = search_space(base, check_width(base, tokens_of(settings, algorithm)), hardware)
    axes, unused = usable_axes(settings, base.models)
    engines = engine_meshes(space, settings, world)
    splits: list[list[Candidate]] = []
    others: list[Other] = []
    for changed in ways(settings, world, axes, has_experts(base.models)):
        try:
            splits.append(candidates_of(space, changed, engines))
        except ValueError as error:
            reason = str(error).removeprefix(f"--mesh={changed.devices.mesh}: ")
            others.append(Other(split_flags(changed, settings), None, reason))
    splits.sort(key=lambda candidates: rough_key(candidates[0], space.room))
    return Ranked(space, splits, others, unused)


def _traced(ranked: Ranked, trace: Callable[[Candidate], Traced]) -> tuple[list[Traced], dict[int, str]]:
    """Trace the best candidate of each of the first splits.

    If a traced split does not fit, a candidate of it with less memory is traced too. If nothing sensible fits, so are
    candidates that exceed the memory by a little, by formula.

    Returns: the traced splits, and the reason for each split, by number, that could not be traced.
    """
    best: list[Traced] = []
    errors: dict[int, str] = {}

    def attempt(number: int, candidate: Candidate) -> Traced | None:
        try:
            best.append(trace(candidate))
        except ValueError as error:
            errors[number] = str(error)
            return None
        return best[-1]

    room = ranked.space.room
    splits = ranked.splits
    waiting = [(rough_key(candidates[0], room), number, 0) for number, candidates in enumerate(splits)]
    while waiting and len(best) < BEST and sum(traced.fits and traced.nodes > 1 for traced in best) < SPANNING:
        _, number, position = heapq.heappop(waiting)
        traced = attempt(number, splits[number][position])
        rough = splits[number][position].rough
        if traced is not None and not traced.fits and rough.nbytes <= room:
            later = enumerate(splits[number][position + 1 :], position + 1)
            leaner = (i for i, candidate in later if candidate.rough.nbytes < rough.nbytes)
            for position in leaner:
                heapq.heappush(waiting, (rough_key(splits[number][position], room), number, position))
                break
    if any(traced.sensible for traced in best):
        return best, errors
    tried = [traced.settings for traced in best]
    near = []
    for number, candidates in enumerate(splits):
        inside = [x for x in candidates if x.nodes == 1 and x.rough.nbytes < TOLERANCE * room]
        leanest = min(inside, key=lambda candidate: candidate.rough.nbytes, default=None)
        if leanest is not None and number not in errors and leanest.settings not in tried:
            near.append((leanest.rough.nbytes, number, leanest))
    for _, number, candidate in heapq.nsmallest(RESCUES, near, key=lambda entry: entry[0]):
        attempt(number, candidate)
    return best, errors


def _untraced(ranked: Ranked, best: Sequence[Traced]) -> list[int]:
    """The numbers of the splits none of whose candidates was traced."""
    traced = {_training(candidates.settings) for candidates in best}
    return [
        number for number, candidates in enumerate(ranked.splits) if _training(candidates[0].settings) not in traced
    ]


def _training(settings: Settings) -> tuple[str, bool, str | None]:
    return settings.devices.mesh, settings.sharding.fsdp, settings.sharding.fsdp_axes


def _other(ranked: Ranked, number: int, errors: Mapping[int, str], given: Settings) -> Other:
    """The best candidate by formula of a split that was not traced, with the reason why it was dropped."""
    best = ranked.splits[number][0]
    reason = errors.get(number)
    if reason is None and best.rough.nbytes > ranked.space.room:
        reason = "too large"
    elif reason is None:
        reason = "slower" if best.nodes == 1 else spans_text(best.nodes)
    return Other(split_flags(best.settings, given), best.rough, reason)


def spans_text(nodes: int) -> str:
    """Remark on a tensor parallel group that spans nodes."""
    return f"tp over {nodes} nodes"


def ways(settings: Settings, world: int, axes: tuple[str, ...], experts: bool) -> Iterator[Settings]:
    """Enumerate the ways to split a run: each factorisation of the devices with each way to shard weights.

    Weights are whole, sharded over all rows, or sharded inside groups of neighboring ranks. Flags that are given stay.

    Args:
      settings: the flags.
      world: devices.
      axes: axes that the model can be split over.
      experts: whether the model has experts to split; if not, the expert axis only forms such groups.
    """
    free = [axis for axis in AXES if axis in axes]
    for sizes in factorisations(world, len(free)):
        mesh = dict.fromkeys(AXES, 1) | dict(zip(free, sizes, strict=True))
        given = with_flags(settings, mesh=meshes.text(mesh))
        if mesh["expert"] == 1 or experts or settings.sharding.fsdp_axes is not None:
            if not settings.sharding.fsdp:
                yield given
            if settings.sharding.fsdp or any(mesh[axis] > 1 for axis in ROW_AXES):
                yield with_flags(given, fsdp=True)
        elif mesh["data"] > 1 and mesh["expert"] * mesh["tensor"] == RANKS_PER_NODE:
            yield with_flags(given, fsdp=True, fsdp_axes="ep")


def factorisations(world: int, count: int) -> Iterator[tuple[int, ...]]:
    """All `count` numbers whose product is `world`, in every order."""
    if count <= 1:
        yield (world,) * count
        return
    for first in (n for n in range(1, world + 1) if world % n == 0):
        for rest in factorisations(world // first, count - 1):
            yield (first, *rest)


def usable_axes(settings: Settings, models: Mapping[str, Model]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The axes that a run can be split over, and for each other axis the reason why not."""
    usable = ["data", "tensor"]
    unused = {}
    for axis in (axis for axis in AXES if axis not in usable):
        short = next(short for short, name in SHORT.items() if name == axis)
        probe = with_flags(settings, mesh=f"{short}2", generate_mesh=None, fsdp=axis in ROW_AXES)
        probe = with_flags(probe, fsdp_axes=settings.sharding.fsdp_axes if settings.sharding.fsdp else None)
        try:
            check_meshes(probe, models, probe.devices.train.chosen, float("inf"))
            usable.append(axis)
        except ValueError as error:
            unused[short] = str(error).rpartition(f"{short}2: ")[2]
    return tuple(usable), unused


def has_experts(models: Mapping[str, Model]) -> bool:
    """True if some weight of a model has experts."""
    return any("experts" in axes for model in models.values() for axes in _logical(model.axes))


def _logical(axes: Any) -> Iterator[tuple[str, ...]]:
    """The logical axes of all leaves."""
    if isinstance(axes, tuple) and all(isinstance(axis, str) for axis in axes):
        yield axes
    else:
        for child in axes.values() if isinstance(axes, Mapping) else axes:
            yield from _logical(child)


def split_flags(settings: Settings, given: Settings) -> dict[str, Any]:
    """The flags that split a run, and those that differ from the given ones."""
    chosen = {name: flag_value(settings, name) for name in ("mesh", "generate_mesh", "fsdp", "fsdp_axes")}
    flags = {name: value for name, value in chosen.items() if value}
    saving = ("remat", "token_budget")
    return flags | {
        name: flag_value(settings, name) for name in saving if flag_value(settings, name) != flag_value(given, name)
    }


def chosen_mesh(settings: Settings, compose: Callable[[], Algorithm], hardware: Hardware) -> tuple[Settings, str]:
    """Settings with the best mesh instead of auto:N, and a line that describes it.

    Raises:
      SettingsError: the run fits no mesh; the message has the memory that the best one needs.
    """
    result = search(settings, compose(), hardware)
    best = result.best[0]
    flags = written_flags(best.flags)
    held = size(best.peak.nbytes)
    room = size(hardware.memory * USABLE)
    if not best.fits:
        raise SettingsError(
            f"--mesh={settings.devices.mesh}: no mesh of {result.world} devices fits: {flags} "
            f"needs {held} of {room} per device, in {best.peak.phase}; with --dry_run this command shows what helps"
        )
    slow = "" if best.sensible else f", {spans_text(best.nodes)}, as nothing else fits"
    text = (
        f"--mesh={settings.devices.mesh} is {flags}: {held} of a device's {room}, "
        f"{duration_text(best.rates.seconds)} a step"
    )
    return best.settings, f"{text}{slow}, by a dry run"


def with_groups(
    settings: Settings, compose: Callable[[], Algorithm], hardware: Hardware, node: int | None
) -> tuple[Settings, str | None]:
    """Settings that shard inside each node if a shard of that size fits, and a line on the choice.

    A given --fsdp_axes, and a mesh chosen by --mesh=auto:N, are not changed.

    Args:
      node: ranks of each node; None: all are on one node.
    """
    if (
        not settings.sharding.fsdp
        or settings.sharding.fsdp_axes is not None
        or node is None
        or settings.devices.train.wanted is not None
    ):
        return settings, None
    sizes = settings.devices.train.chosen
    world = devices(sizes)
    over = devices(sizes, TOKEN_AXES)
    if world <= node or world % node:
        return settings, None
    everywhere = f"--fsdp: weights are sharded over all {over} ranks that have other tokens"
    try:
        algorithm = compose()
        job = plain_job(settings, algorithm, hardware.memory)
        inside = node_mesh(sizes, node, has_experts(job.models))
        if inside is None:
            return settings, f"{everywhere}: on {settings.devices.mesh} no axis ends with a node of {node}"
        short = {axis: name for name, axis in SHORT.items()}
        axes = ",".join(short[axis] for axis in TOKEN_AXES[1:] if inside[axis] > 1)
        changed = with_flags(settings, mesh=meshes.text(inside), fsdp_axes=axes)
        job = plain_job(changed, algorithm, hardware.memory)
        held = closed_form(job, check_width(job, tokens_of(changed, algorithm)), hardware).nbytes
    except ValueError:
        return settings, None  # a flag cannot work; the run reports it
    needs = f"about {held / 1e9:.3g} GB of a device's {hardware.memory * USABLE / 1e9:.3g} GB"
    if held > hardware.memory * USABLE:
        return settings, f"{everywhere}: inside of nodes of {node} they would need {needs}"
    return changed, (
        f"--fsdp: weights are sharded inside of each node of {node} and copied to {world // node} nodes, which needs "
        f"{needs}: --mesh={changed.devices.mesh} --fsdp_axes={axes}; --fsdp_axes=dp,ep,sp shards over all"
    )


def node_mesh(sizes: dict[str, int], node: int, experts: bool) -> dict[str, int] | None:
    """The mesh with `data` across nodes and all other token axes inside a node; None: there is none.

    Args:
      node: ranks of a node, which divide those of the mesh.
      experts: whether the expert axis splits experts and so must stay unchanged.
    """
    near = sizes["tensor"] * sizes["sequence"]
    group, rest = divmod(node, near)
    if experts or sizes["expert"] > 1:
        return sizes if group == sizes["expert"] > 1 and not rest else None
    if rest or sizes["data"] % group or group * sizes["sequence"] == 1:
        return None
    return sizes | {"data": sizes["data"] // group, "expert": group}
