"""Draws of models, meshes, requests and packings in which engine and trainer have to compute the same bits.

A draw is a number: all of its choices follow from it. Ranks are those of `lockstep_ranks`, or real ones.
"""

import functools
import itertools
import math
import random
from typing import Any, NamedTuple

import torch
from lockstep_ranks import run_ranks

from funrl import trees
from funrl.batch import Batch
from funrl.mesh.launch import view
from funrl.mesh.mesh import SINGLE, Mesh, parse
from funrl.mesh.rules import GENERATE, STORED, fully_sharded, layouts, shard
from funrl.models import decoder_config, decoder_model
from funrl.models.decoder.layers import RopeScaling
from funrl.models.decoder.sequence_parallel import is_ring
from funrl.models.placed import place
from funrl.rollout.engine import complete
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.requests import Completion, requests_of
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.jobs.numerics import split_problem

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
# Sizes and switches of the models that are drawn. Another kind of model joins by a row here, once `exact_sums` of its
# abilities are sizes; what an engine needs beside the weights is added in `generate`.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, scaled": {"tied": True, "rope_scaling": RopeScaling("llama3", 4.0, original=32)},
    "qwen2": {"family": "qwen2", "attention_bias": True, "output_bias": True, "windows": (None, 7)},
    "qwen3": {"family": "qwen3", "qk_norm": True, "head": 32},
    "odd sizes": {"vocab": 101, "embed": 90, "heads": 6, "head": 10, "mlp": 77, "windows": (9, None)},
    "gemma2": {
        "norms": "sandwich",
        "norm_offset": 1.0,
        "activation": "gelu",
        "attention_cap": 5.0,
        "logit_cap": 3.0,
        "windows": (9, None),
        "embed_scale": 7.3,
        "attention_scale": 0.3,
    },
    "granite": {"residual_scale": 0.4, "logit_divisor": 3.0, "embed_scale": 3.1},
    "partly rotated": {"rotary_part": 8, "qk_norm": True},
}
SIZES = {"vocab": 136, "embed": 64, "layers": 2, "heads": 8, "kv_heads": 2, "head": 16, "mlp": 96}
PAUSES = ("no", "no", "paused", "other weights after a pause", "other weights in flight")


class Draw(NamedTuple):
    """Choices of a draw.

    Attributes:
      number: of the draw.
      family, dtype: of the model.
      generate, train: meshes.
      sharded: weights are fully sharded in training.
      splits: tensor ranks share the residual stream in training.
      graph: training keeps a graph for gradients.
      temperature, samples, new_tokens: of sampling; each prompt has as many samples.
      pause: one of `PAUSES`.
      packed, speculate, max_rows: options of the engine.
      pages: of its cache; 0: as many as it wants.
      budget: tokens of a micro-batch.
      multiple: that the length of a micro-batch is padded to.
      threads: of torch.
    """

    number: int
    family: str
    dtype: torch.dtype
    generate: str
    train: str
    sharded: bool
    splits: bool
    graph: bool
    temperature: float
    samples: int
    new_tokens: int
    pause: str
    packed: bool
    speculate: int
    max_rows: int
    pages: int
    budget: int
    multiple: int
    threads: int

    @property
    def versions(self):
        return (1, 2) if self.pause.startswith("other weights") else (1,)


class Written(NamedTuple):
    """Completions of a draw, each with its prompt."""

    prompts: list[list[int]]
    done: list[Completion]


class Gap(NamedTuple):
    """Tokens whose bits engine and trainer should share, those of them that differ, and other ones that do."""

    promised: int
    differ: int
    stale: int


@functools.cache
def model_of(family):
    return decoder_model(decoder_config(**(SIZES | FAMILIES[family])))


@functools.cache
def weights_of(family, version):
    params = model_of(family).init(torch.Generator().manual_seed(0), torch.float64)
    params = trees.map_named(lambda name, x: x * (20 if name in ("embed", "unembed") else 1), params)
    noise = torch.Generator().manual_seed(version)  # biases and norms are not what they begin as
    return trees.map(lambda x: x + 0.02 * torch.randn(x.shape, dtype=x.dtype, generator=noise), params)


@functools.cache
def meshes_of(family):
    """Meshes of the engine and of training in which a family's bits are promised."""
    model = model_of(family)
    sums = model.abilities.exact_sums
    assert isinstance(sums, tuple), sums
    heads = model.abilities.heads
    tensor = [ranks for ranks in (1, 2, 4, 8) if split_problem(sums, {1, ranks}) is None and heads % ranks == 0]
    train = []
    for data, sequence, ranks in itertools.product((1, 2), (1, 2), tensor):
        sizes = {"data": data, "expert": 1, "sequence": sequence, "tensor": ranks}
        if math.prod(sizes.values()) <= 8 and not is_ring("auto", heads // ranks, sizes):
            train.append(f"dp{data},sp{sequence},tp{ranks}")
    return [f"tp{ranks}" for ranks in tensor], train


def draw_of(number, **fixed):
    """A draw, some of whose choices are given."""
    pick = random.Random(number)
    family = fixed.get("family", pick.choice(list(FAMILIES)))
    meshes, train = meshes_of(family)
    generate = fixed.get("generate", pick.choice([meshes[0]] * 5 + meshes))
    choices = {
        "family": family,
        "dtype": pick.choice(DTYPES),
        "generate": generate,
        "train": pick.choice([train[0]] * 4 + train),
        "sharded": pick.random() < 0.5,
        "splits": pick.random() < 0.3,
        "graph": pick.random() < 0.3,
        "temperature": pick.choice([1.0, 0.7, 1.3]),
        "samples": pick.randint(1, 8 if generate in ("tp1", "tp2") else 2),  # eight ranks take long
        "new_tokens": pick.choice([1, 6, 12]),
        "pause": pick.choice(PAUSES),
        "packed": pick.random() < 0.6,
        "speculate": pick.choice([0, 0, 3]),
        "max_rows": pick.choice([1, 4, 512, 512]),
        "pages": pick.choice([0, 0, 9, 14]),
        "budget": pick.choice([1, 120, 400]),
        "multiple": pick.choice([8, 11, 32]),
        "threads": pick.choice([1, 1, 2]),
    }
    return Draw(number, **(choices | fixed))


def gap_of(draw, generate_on=run_ranks, train_on=run_ranks):
    """What engine and trainer make of a draw."""
    return compare(draw, generate(draw, generate_on), train_on)


def generate(draw, run=run_ranks):
    """Complete random prompts, some of them alike, in a random order."""
    torch.set_num_threads(draw.threads)
    pick = random.Random(-draw.number)
    vocab = model_of(draw.family).config.vocab
    lengths = [pick.choice([1, 3, 16, 17, 40]) for _ in range(pick.randint(1, 3))]
    known = [[pick.randrange(vocab) for _ in range(length)] for length in lengths]
    prompts = [pick.choice(known) * pick.choice([1, 1, 2]) for _ in range(len(known) + 1)]
    sampling = Sampling(max_new_tokens=draw.new_tokens, temperature=draw.temperature, samples=draw.samples)
    requests = requests_of(prompts, sampling, seed=pick.randrange(99))
    pick.shuffle(requests)
    short = [pick.choice([None, 3]) for _ in requests]
    steps = pick.randint(1, 8)
    done = run(lambda mesh: _complete(draw, mesh, requests, short, steps), parse(draw.generate))
    return Written([list(request.prompt) for request in requests], done[0])


def _engine(draw, mesh):
    options = NativeOptions(packed=draw.packed, speculate=draw.speculate, max_rows=draw.max_rows)
    engine = native_engine(model_of(draw.family), mesh, draw.dtype, options)
    if not draw.pages:
        return engine
    options = options._replace(cache_bytes=draw.pages * engine._backend.page_bytes)
    return native_engine(model_of(draw.family), mesh, draw.dtype, options)


def _load(draw, engine, version):
    model = model_of(draw.family)
    mesh = engine.weights.mesh
    placed = layouts(model.shapes, model.axes, GENERATE, sizes=mesh.sizes)
    engine.load(engine.weights.named(shard(weights_of(draw.family, version), placed, mesh)), version)


def _complete(draw, mesh, requests, short, steps):
    engine = _engine(draw, mesh)
    _load(draw, engine, 1)
    if draw.pause == "no":
        return complete(engine, requests)
    if draw.pause == "other weights in flight":
        engine.submit(requests)
        done = []
        for number in itertools.count():
            if number == steps:
                _load(draw, engine, 2)
            if not engine.unfinished():
                break
            done += engine.step()
        return sorted(done, key=lambda completion: [r.number for r in requests].index(completion.number))
    done = complete(engine, [r._replace(most=most) for r, most in zip(requests, short, strict=True)])
    if draw.pause == "other weights after a pause":
        _load(draw, engine, 2)
    paused = [i for i, completion in enumerate(done) if completion.finish == "paused"]
    again = complete(engine, [requests[i]._replace(begun=done[i]) for i in paused])
    for i, completion in zip(paused, again, strict=True):
        done[i] = completion
    return done


def compare(draw, written, run=run_ranks):
    """Score completions with the weights of each version, and compare the tokens of that version."""
    torch.set_num_threads(draw.threads)
    promised = differ = stale = 0
    for version in draw.versions:
        for temperature in {draw.temperature, 1.0}:
            scores = run(lambda mesh, t=temperature, v=version: _score(draw, written, v, t, mesh), parse(draw.train))
            for i, logp in itertools.chain.from_iterable(part.items() for part in scores):
                done = written.done[i]
                own = done.versions == version
                assert torch.isfinite(logp).all() and len(logp) == len(done.tokens)
                for name, of in (("sampling_logp", draw.temperature), ("raw_logp", 1.0)):
                    if of == temperature:
                        unlike = logp != getattr(done, name)
                        promised += int(own.sum())
                        differ += int((unlike & own).sum())
                        stale += int((unlike & ~own).sum())
    return Gap(promised, differ, stale)


def _score(draw, written, version, temperature, mesh):
    """The trainer's log-probabilities of this rank's rows, by their numbers."""
    rules = fully_sharded(STORED) if draw.sharded and mesh.size("data") > 1 else STORED
    placed = place(model_of(draw.family), mesh, rules, dtype=draw.dtype, splits=draw.splits)
    wide = torch.float64 if draw.dtype == torch.float64 else torch.float32
    weights = trees.map(lambda x: x.to(wide), weights_of(draw.family, version))
    params = shard(weights, placed.stored, mesh)
    results = {}
    for numbers in micro_batches(draw, written, mesh):
        batch, parts = packed(written, numbers, math.lcm(draw.multiple, placed.multiple))
        with torch.set_grad_enabled(draw.graph):
            scores = placed.token_scores(params, batch, ("logp", "entropy"), temperature=temperature)
        results |= {i: scores.logp[0, part].detach() for i, part in parts.items()}
    return results


def micro_batches(draw, written, mesh):
    """Row numbers of each micro-batch of this data rank; ranks that share weights have as many."""
    numbers = list(range(len(written.done)))
    random.Random(draw.number + 1).shuffle(numbers)
    ranks = mesh.size("data")
    tokens = sum(len(p) + len(c.tokens) for p, c in zip(written.prompts, written.done, strict=True))
    count = min(math.ceil(tokens / ranks / draw.budget), max(1, len(numbers) // ranks), 6)
    own = [numbers[i :: count * ranks] for i in range(count * ranks)]
    first = mesh.index("data") * count
    return [part or numbers[:1] for part in own[first : first + count]]


def packed(written, numbers, multiple):
    """A micro-batch of some rows, end to end, and the places of their sampled tokens."""
    texts = {i: written.prompts[i] + written.done[i].tokens.tolist() for i in numbers}
    lengths = torch.tensor([len(text) for text in texts.values()])
    padding = -int(lengths.sum()) % multiple
    tokens = torch.tensor([*itertools.chain.from_iterable(texts.values()), *[0] * padding])[None]
    positions = torch.cat([torch.arange(n) for n in (*lengths.tolist(), padding)])[None]
    segments = torch.repeat_interleave(torch.arange(len(numbers) + 1), torch.tensor([*lengths.tolist(), padding]))
    segments = (segments + 1) % (len(numbers) + 1)
    offsets = torch.tensor([0, *lengths.tolist()]).cumsum(0).int()
    mask, parts = torch.zeros_like(tokens, dtype=torch.bool), {}
    for i, start, end in zip(numbers, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        parts[i] = slice(start + len(written.prompts[i]), end)
        mask[0, parts[i]] = True
    return Batch(tokens=tokens, positions=positions, segments=segments[None], offsets=offsets, mask=mask), parts


def on_this_rank(mesh):
    """`run_ranks` on a real rank: its own mesh, as many copies of a smaller one as there is room for, or it alone."""

    def run(program, sizes):
        sizes = dict(sizes)
        if sizes == mesh.sizes:
            return [program(mesh)]
        world = Mesh(sizes).world
        return [program(view(mesh, sizes | {"data": mesh.world // world * sizes["data"]}) if world > 1 else SINGLE)]

    return run
