"""Costs of generation: prefill, then one token per row and iteration, traced with the engine's own backend.

Prompts and completions have maximum length, so rows that start together end together: continuous batching becomes waves
of rows. Later turns of episodes read their context, and a step may wait for environments: t replies of n tokens, with
c tokens of context before each but the first, make an episode of p + t n + (t - 1) c tokens after a prompt of p, and no
episode branches. A judge writes verdicts in the same way.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import re
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.algos.reading import reads
from funrl.cost.rows import assumed_prompt, encode_pictures, with_unread_pictures
from funrl.cost.tracing.costs import Costs, after, along, plus, times
from funrl.cost.tracing.estimate import (
    ONE_REPLY,
    Depth,
    EpisodeCost,
    Turns,
    axes_of,
    make_weights,
    of_depth,
    traced_layers,
    turns_of,
)
from funrl.cost.tracing.hardware import USABLE, Hardware
from funrl.cost.tracing.tracer import Tracer
from funrl.mesh.launch import view
from funrl.mesh.mesh import Mesh
from funrl.models import Model
from funrl.models.lora import Adapter, scale_of
from funrl.rollout.adapter_engine import AdapterEngine
from funrl.rollout.native.backends import TorchBackend
from funrl.rollout.native.cache_sizes import FREE_SHARE, page_tokens, pass_tokens
from funrl.rollout.native.engine import NativeEngine, NativeOptions, native_engine
from funrl.rollout.native.owned_prompts import MOST_STATE_BYTES
from funrl.rollout.native.passes import PassWork
from funrl.rollout.requests import Request
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.jobs.sharding import generate_sizes
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.scorers import JUDGE
from funrl.trainer.settings.settings import Settings, with_flags
from funrl.trainer.sources.judging import PLACEHOLDER, TEMPLATE, check_writes, read_template
from funrl.trainer.steps.parts import GeneratingParts, Generator, JudgeJob


class EngineWork(NamedTuple):
    """Prompts that an engine completes in a step.

    Attributes:
      job, generator: at full depth or with fewer layers.
      whole: the generator at full depth, whose memory limits the rows that are decoded together.
      prompt_tokens: tokens of a prompt.
      room: bytes of the cache if no flag gives its size.
      hardware: hardware of each rank.
      turns: of the episodes that it completes.
    """

    job: RLJob
    generator: Generator
    whole: Generator
    prompt_tokens: int
    room: float
    hardware: Hardware
    turns: Turns = ONE_REPLY


def generation(work: EngineWork) -> Costs:
    """Costs of the completions of a step, greedy baselines included."""
    job = work.job
    greedy = dataclasses.replace(job.sampling, greedy=True, samples=1)
    baseline = [greedy] if "greedy_score" in reads(job.algorithm).required else []
    costs = Costs()
    for sampling in (job.sampling, *baseline):
        costs = after(costs, completions(work, sampling))
    return costs


def completions(work: EngineWork, sampling: Sampling) -> Costs:
    """Costs of the completions of all prompts with one way to sample."""
    costs = Costs()
    for number, count in waves(work, sampling):
        costs = after(costs, times(_wave(work, sampling, count), number))
    return costs


def waves(work: EngineWork, sampling: Sampling) -> list[tuple[int, int]]:
    """Waves of completions of one rank of the engine, all of full length: (number of waves, rows of each)."""
    job = work.job
    rows = own_prompts(job, work.whole.whole.weights.mesh) * sampling.samples
    most = min(rows, job.settings.engines.decode_rows, rows_in_cache(work, sampling)[0])
    if work.turns.replies > 1:
        most = min(most, job.settings.environments.max_waiting)
    full, rest = divmod(rows, max(1, most))
    return [(full, max(1, most))] + [(1, rest)] * (rest > 0)


def rows_in_cache(work: EngineWork, sampling: Sampling) -> tuple[int, int]:
    """Rows of full length that the cache of one rank has room for, and bytes of the pages of one in the mean.

    The completions of a prompt share its whole pages, which fewer rows than these hold too.
    """
    job = work.job
    engine = work.whole.whole
    assert isinstance(engine, NativeEngine)
    mesh = engine.weights.mesh
    page = hardware_page_tokens(work.hardware)
    page_bytes = engine.model.page_bytes(mesh, page, job.dtype)
    cell_bytes = engine.model.cell_bytes(mesh, job.dtype)
    shared_bytes = work.prompt_tokens // page * page_bytes
    own_bytes = _whole_row_bytes(work, sampling) - shared_bytes
    row_bytes = math.ceil(own_bytes + shared_bytes / sampling.samples) + cell_bytes
    given = round((job.settings.engines.kv_cache_gb or 0) * 1e9) or work.room
    given -= _control_bytes(work, sampling)
    rows = given // row_bytes
    if rows < sampling.samples:
        rows = (given - shared_bytes) // (own_bytes + cell_bytes)
    return max(0, int(rows)), row_bytes


def _whole_row_bytes(work: EngineWork, sampling: Sampling) -> int:
    """Bytes of the pages of a row of full length that shares none."""
    engine = work.whole.whole
    assert isinstance(engine, NativeEngine)
    page = hardware_page_tokens(work.hardware)
    pages = -(-work.turns.row_tokens(work.prompt_tokens, sampling.max_new_tokens) // page)
    return pages * engine.model.page_bytes(engine.weights.mesh, page, work.job.dtype)


def _control_bytes(work: EngineWork, sampling: Sampling) -> int:
    """Bytes of the cache in which a control row is scored once more: it shares no pages. 0: none is."""
    engine = work.whole.whole
    scored = isinstance(engine, NativeEngine) and engine.control is not None
    return _whole_row_bytes(work, sampling) if scored else 0


def own_prompts(job: RLJob, mesh: Mesh) -> int:
    """Prompts that a rank of the engine completes."""
    return -(-job.settings.run.batch_prompts // mesh.size(mesh.row_axes))


class WaveSizes(NamedTuple):
    """Sizes of the passes of a wave.

    Attributes:
      rows: rows that are decoded together.
      row_pages: pages of a row of full length.
      pages: of all rows, of which those of a prompt share its whole pages.
      fresh: prompts of the wave: their completions share one prefill.
      prompts, prompt_tokens: prompts of a prefill, and new tokens of each.
      answered: rows that read the context of a later turn together.
      most: bound on the new tokens of a pass.
    """

    rows: int
    row_pages: int
    pages: int
    fresh: float
    prompts: int
    prompt_tokens: int
    answered: int
    most: int


def wave_sizes(work: EngineWork, sampling: Sampling, count: int) -> WaveSizes:
    """Sizes of the passes of a wave of `count` rows."""
    turns = work.turns
    most = pass_tokens(_device(work.hardware))
    fresh = count / sampling.samples
    length = turns.row_tokens(work.prompt_tokens, sampling.max_new_tokens)
    page = hardware_page_tokens(work.hardware)
    row_pages = -(-length // page)
    shared = work.prompt_tokens // page
    return WaveSizes(
        rows=count,
        row_pages=row_pages,
        pages=count * (row_pages - shared) + math.ceil(fresh) * shared,
        fresh=fresh,
        prompts=min(max(1, most // work.prompt_tokens), math.ceil(fresh)),
        prompt_tokens=min(work.prompt_tokens, most),
        answered=min(max(1, most // max(1, turns.context)), count),
        most=most,
    )


def _wave(work: EngineWork, sampling: Sampling, count: int) -> Costs:
    """Costs of a wave, from traces of a prefill and of a decoding iteration at half the length.

    Args:
      work: of the engine.
      sampling: of its completions.
      count: rows that are decoded together.
    """
    turns = work.turns
    sizes = wave_sizes(work, sampling, count)
    length = turns.row_tokens(work.prompt_tokens, sampling.max_new_tokens)
    middle = work.prompt_tokens + (length - work.prompt_tokens) // 2
    phases, weights, state_bytes = traced_passes(work, sampling, sizes, middle)
    fresh = sizes.fresh
    passes = (fresh if fresh < 1 else math.ceil(fresh / sizes.prompts)) * -(-work.prompt_tokens // sizes.prompt_tokens)
    steps = turns.replies * sampling.max_new_tokens
    whole = after(times(phases["prefill"], passes), times(phases["decode"], steps))
    whole = plus(whole, {"cache": float(_control_bytes(work, sampling))})
    if state_bytes:
        most_held = MOST_STATE_BYTES // state_bytes
        own = own_prompts(work.job, work.whole.whole.weights.mesh)
        # A baseline of the same prompts finds the states that their completions have left.
        known = sampling is not work.job.sampling and own <= most_held
        # The traced prefill encodes one prompt, as all of its prompts are the same.
        whole = after(whole, times(phases["encode"], fresh * (not known) - passes))
        whole = plus(whole, {"cache": float(state_bytes * (max(sizes.prompts, min(own, most_held)) - 1))})
    if "extend" in phases:
        extends = turns.gaps * math.ceil(count / sizes.answered) * -(-turns.context // sizes.most)
        whole = after(whole, times(phases["extend"], extends))
    return plus(whole, {"weights": -weights})


class WavePasses(NamedTuple):
    """Costs of one pass of each kind.

    Attributes:
      phases: costs by kind: "prefill", "decode", "encode" of a prompt's pictures, "extend" by the context of a turn.
      weights: bytes of the weights in them.
      state_bytes: of what the engine keeps of a prompt's pictures; 0: prompts have none.
    """

    phases: dict[str, Costs]
    weights: float
    state_bytes: int


def traced_passes(work: EngineWork, sampling: Sampling, sizes: WaveSizes, length: int) -> WavePasses:
    """Trace one pass of each kind: a prefill, a decoding iteration and, with turns, reading a later context.

    Args:
      work: of the engine.
      sampling: of its completions.
      sizes: of the passes.
      length: tokens of a row that the later two read.
    """
    job, generator, _, prompt_tokens, _, hardware, turns = work
    model = job.model
    mesh = generator.whole.weights.mesh
    wanted = generator.whole.weights.layouts
    page = hardware_page_tokens(hardware)
    count = sizes.rows
    pages = sizes.pages
    cells = count if model.cell_bytes(mesh, job.dtype) else 0
    cache = model.empty_cache(mesh, pages, page, job.dtype, torch.device("meta"), cells=cells)
    assert model.unembed is not None
    vocabulary = model.unembed(wanted).local_shape(0)[0]
    adapted = () if generator.base is None else generator.engine.weights.layouts
    shapes = [layout.local_shape(0) for layout in trees.leaves((wanted, adapted))]
    tracer = Tracer(hardware, shapes, (vocabulary, model.config.vocab), {tuple(x.shape) for x in trees.leaves(cache)})
    params = make_weights(tracer, wanted, job.dtype)
    factors = make_weights(tracer, adapted, job.dtype)
    backend = TorchBackend(with_unread_pictures(model), mesh, job.dtype, None, page)
    table_SP = torch.arange(count * sizes.row_pages, dtype=torch.int32).remainder(pages).view(count, sizes.row_pages)
    pictured: Request | None = None  # a prompt with pictures, if they have some
    state_bytes = 0

    def pass_work(rows: int, tokens: int, end: int) -> PassWork:
        draws = list(range(tokens - 1, rows * tokens, tokens))
        zeros_N = torch.zeros(rows * tokens, dtype=torch.int64)
        adapters = np.zeros(rows, dtype=np.int64) if generator.base is not None else None
        numbers = np.arange(rows) if cells else None
        lengths = [tokens] * rows, [end] * rows
        requests = None if pictured is None else [pictured] * rows
        return PassWork(zeros_N, *lengths, table_SP[:rows], draws, adapters=adapters, cells=numbers, requests=requests)

    def draw(logits: Tensor) -> None:
        noise_R = torch.zeros(len(logits), dtype=torch.float64)
        backend.sample(logits, torch.arange(len(logits)), noise_R, sampling, None)

    with tracer, torch.no_grad():
        with tracer.phase("prefill"):
            backend.load(params)
            if isinstance(generator.engine, AdapterEngine):
                backend.load_adapter(0, Adapter(factors, scale_of(generator.engine.lora)))
            backend.resize(pages, cells)
        with tracer.phase("encode"):
            pictured = assumed_prompt(job, prompt_tokens)
            if pictured is not None:
                state_bytes = encode_pictures(model, params, pictured)
        with tracer.phase("prefill"):
            draw(backend.forward(pass_work(sizes.prompts, sizes.prompt_tokens, prompt_tokens)))
        with tracer.phase("decode"):
            draw(backend.forward(pass_work(count, 1, length)))
        if turns.gaps and turns.context:
            with tracer.phase("extend"):
                draw(backend.forward(pass_work(sizes.answered, min(turns.context, sizes.most), length)))
    return WavePasses(tracer.phases, float(trees.nbytes((params, factors))), state_bytes)


def _device(hardware: Hardware) -> str:
    return "cuda" if hardware.accelerator else "cpu"


def hardware_page_tokens(hardware: Hardware) -> int:
    """Tokens of a page of the engine on some hardware."""
    return page_tokens(_device(hardware))


def episode_cost(work: EngineWork, generating: float) -> EpisodeCost:
    """Cost of environments beside an engine.

    A step takes at least what the engine has to do, and at least the time of the episodes that one after the other take
    one of the `open` places: the larger of the two is assumed. It is the asymptotic bound of a closed network. Episodes
    of a trace come in random order, each to the place that is free first.

    Args:
      work: of the engine, at full depth.
      generating: seconds in which it does the work of the step.

    References: Denning and Buzen, 1978, https://doi.org/10.1145/356733.356735
    """
    job = work.job
    turns = work.turns
    sampling = job.sampling
    rows = own_prompts(job, work.generator.whole.weights.mesh) * sampling.samples
    fitting, row_bytes = rows_in_cache(work, sampling)
    most = min(rows, job.settings.environments.max_waiting)
    running = max(1, min(most, job.settings.engines.decode_rows, fitting))
    own = generating * running / rows  # seconds that one episode generates
    waits = np.quantile(turns.episode_waits, (np.arange(rows) + 0.5) / rows, method="inverted_cdf")
    waiting = float(np.mean(waits))
    wanted = math.ceil(running * (own + waiting) / own) if own else most
    begun = min(most, wanted)
    idle = begun - running
    kept = max(0, min(idle, fitting - running))
    evicted = (idle - kept) / begun  # share of the episodes whose pages do not stay
    again = sum(work.prompt_tokens + k * (sampling.max_new_tokens + turns.context) for k in range(turns.gaps))
    again += turns.gaps * sampling.max_new_tokens
    bound, in_line = _last_place(begun, own, np.random.default_rng(0).permutation(waits))
    waited = max(0.0, bound - generating) if waiting else 0.0
    return EpisodeCost(
        turns,
        turns.row_tokens(work.prompt_tokens, sampling.max_new_tokens),
        running,
        begun,
        read=rows * turns.gaps * turns.context,
        recomputed=round(rows * evicted * again),
        waited=waited,
        overlapped=max(0.0, in_line - waited),
        cache=kept * row_bytes,
    )


def _last_place(places: int, own: float, waits: np.ndarray) -> tuple[float, float]:
    """The time at which the last of some places is free, and the seconds of environments in it.

    Args:
      own: seconds that an episode generates.
      waits: [R] seconds of the environment in each episode, in the order in which they begin.
    """
    free = [(0.0, 0.0)] * places
    for wait in waits.tolist():
        end, waited = heapq.heappop(free)
        heapq.heappush(free, (end + own + wait, waited + wait))
    return max(free)


def with_waiting(
    job: Job, generator: Generator, costs: Costs, tokens: int, held: float, hardware: Hardware
) -> tuple[Costs, EpisodeCost | None]:
    """Costs of generation with the seconds and pages of episodes that wait; and what is known of these.

    Args:
      costs: of generation.
      tokens: of a prompt.
      held: bytes that a rank holds besides the cache.
    """
    turns = turns_of(job.settings)
    if not isinstance(job, RLJob) or not (turns.gaps or turns.waits) or not job.model.pages:
        return costs, None
    room = FREE_SHARE * max(0.0, hardware.memory * USABLE - held)
    work = EngineWork(job, generator, generator, prompt_tokens=tokens, room=room, hardware=hardware, turns=turns)
    episodes = episode_cost(work, costs.seconds)
    waiting = dataclasses.replace(costs, seconds=costs.seconds + episodes.waited)
    return plus(waiting, {"cache": episodes.cache}), episodes


CHARACTERS = 4  # of a template per token, as no tokenizer is read


class JudgeCost(NamedTuple):
    """Cost of the verdicts of a step for one rank.

    Attributes:
      costs: of generation, without the weights.
      weights: bytes of weights, which each phase holds.
      axes: as in `Estimate`.
    """

    costs: Costs
    weights: float
    axes: dict[str, tuple[str, tuple[str, ...], dict[str, int]]]


def plain_judge(settings: Settings, directory: str, model: Model, sizes: dict[str, int], memory: float) -> JudgeJob:
    """Build the judge of the flags for cost estimates.

    Args:
      directory, model: of the judge.
      sizes: of the mesh to train on.
      memory: bytes of a device.

    Raises:
      SettingsError: it has a value head, or the template cannot be read.
    """
    check_writes(directory, model)
    text = TEMPLATE if settings.judging.judge_template is None else read_template(settings.judging.judge_template)
    sampling = Sampling(greedy=True, max_new_tokens=settings.judging.judge_max_new_tokens)
    return JudgeJob(
        directory=directory,
        model=model,
        tokenizer=None,
        template=text,
        pattern=re.compile(settings.judging.judge_pattern),
        sampling=sampling,
        sizes=generate_sizes(settings, sizes, model, memory),
    )


def judging(
    job: RLJob, judge: JudgeJob, parts: GeneratingParts, prompt_tokens: int, held: float, hardware: Hardware
) -> JudgeCost:
    """Cost of verdicts on all completions of a step, greedy baselines included; each reads its whole prompt.

    Args:
      prompt_tokens: of the policy.
      held: bytes that a rank holds besides the judge.

    Raises:
      SettingsError: a verdict with its prompt is longer than the judge's positions.
    """
    read = tokens_to_read(job, judge, prompt_tokens)
    positions = judge.model.config.max_positions
    if read + judge.sampling.max_new_tokens > positions:
        raise SettingsError(
            f"--judge={judge.directory}: it reads {read} tokens and may write {judge.sampling.max_new_tokens} "
            f"(--judge_max_new_tokens), but it has {positions} positions"
        )
    mesh = view(parts.mesh, judge.sizes)
    settings = with_flags(job.settings, batch_prompts=verdicts_of_step(job), kv_cache_gb=None)

    def with_judge(model: Model) -> RLJob:
        return dataclasses.replace(job, settings=settings, model=model)

    def generator_of(shallow: RLJob):
        engine = native_engine(
            shallow.model, mesh, job.dtype, options=NativeOptions(settings.engines.decode_rows), note=lambda _: None
        )
        return parts.generator._replace(engine=engine, mesh=mesh, base=None)

    whole = generator_of(with_judge(judge.model))
    stored = trees.leaves(whole.engine.weights.layouts)
    weights = float(job.dtype.itemsize * sum(math.prod(layout.local_shape(0)) for layout in stored))
    room = FREE_SHARE * (hardware.memory * USABLE - held - weights)

    def costs_at(depth: Depth) -> Costs:
        shallow = with_judge(of_depth(judge.model, depth))
        return completions(
            EngineWork(shallow, generator_of(shallow), whole, prompt_tokens=read, room=room, hardware=hardware),
            judge.sampling,
        )

    few, more = traced_layers(judge.model)
    costs = along(costs_at(few), *((costs_at(depth), count) for depth, count in more))
    return JudgeCost(costs, weights, axes_of(mesh))


def writes_verdicts(judge: JudgeJob, pool: str, apart: Collection[str]) -> bool:
    """True if the ranks of a pool write the verdicts of a judge that can be traced; see `dry_run.estimate`."""
    return judge.model.pages and JUDGE not in apart and pool in ("", "train")


def with_judge_phase(phases: dict[str, Costs], judge: JudgeCost, resting: dict[str, float]) -> dict[str, Costs]:
    """Add a judge: its weights to each phase, and its verdicts as a phase after generation.

    Args:
      phases: costs by phase.
      judge: costs of its verdicts.
      resting: bytes by kind that a rank holds while the judge writes.
    """
    generated = {name: costs for name, costs in phases.items() if name == "generate"}
    with_verdicts = generated | {"score_judge": plus(judge.costs, resting)} | phases
    return {name: plus(costs, {"weights": judge.weights}) for name, costs in with_verdicts.items()}


def verdicts_of_step(job: RLJob) -> int:
    """Number of completions of a step that a judge reads, greedy baselines included."""
    greedy = "greedy_score" in reads(job.algorithm).required
    return job.settings.run.batch_prompts * (job.sampling.samples + greedy)


def tokens_to_read(job: RLJob, judge: JudgeJob, prompt_tokens: int) -> int:
    """Tokens that the judge reads for a completion: the policy's prompt and completion, and the template."""
    characters = len(PLACEHOLDER.sub("", judge.template))
    return prompt_tokens + job.sampling.max_new_tokens + math.ceil(characters / CHARACTERS)
