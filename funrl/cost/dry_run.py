"""Cost of a run before it is started: memory by phase, bytes by mesh axis, FLOPs, time.

    python -m funrl.experiments.ppo --mesh=dp64,tp8 --model=CONFIG.json --dry_run

It runs the trainer's own functions for one rank of the mesh, on tensors without memory and a process group that sends
nothing, and counts their work. It starts no process and reads no weights or prompts. It assumes that every row has the
greatest length, that every token of a text but the first is trained on, and that no prompt is filtered out.

With --place a rank does the work of its pool alone, and weights and rows go from one pool to another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from funrl import trees
from funrl.algos.core import Algorithm
from funrl.batch import as_dict, kind_of
from funrl.cost import decoding
from funrl.cost.rows import (
    WORD,
    RowPlan,
    full_batch,
    full_rows,
    owned_bytes,
    pictures_text,
    reads_task,
    row_plan,
    rows_to_read,
    score_or_fill,
    task_texts,
    useful_shares,
    with_assumed_pictures,
    with_moves,
    with_owned_bytes,
    written_fields,
)
from funrl.cost.tracing import estimate as tracing
from funrl.cost.tracing.costs import UPDATES, Costs, Traffic, plus, times
from funrl.cost.tracing.hardware import USABLE, Hardware, message_seconds, op_seconds
from funrl.cost.tracing.tracer import Tracer
from funrl.cost.verdict import size
from funrl.data.supervised import TEXT_FIELDS
from funrl.environments.agents import AgentMap, parse_agents
from funrl.mesh.buckets import DIRECT_BYTES, program, staged_bytes
from funrl.mesh.mesh import AXES, Mesh, ranks_of, text
from funrl.mesh.plan import RANKS_PER_NODE, Box, Plan, plan, received_bytes, sent_bytes, volume
from funrl.mesh.pools.placement import Placement, RankPool
from funrl.mesh.pools.transfer import NARROW
from funrl.mesh.reshard import BUCKET_BYTES
from funrl.mesh.rows import row_indices, token_bytes
from funrl.mesh.rules import Layout
from funrl.models import Model
from funrl.models.errors import ModelError
from funrl.models.float8_weights import quantized_bytes
from funrl.models.huggingface import directories as hf
from funrl.models.lora import added_adapters, trained_part
from funrl.models.vision.model import model_of_config
from funrl.models.weight_dtypes import weight_dtypes
from funrl.role_kinds import BASE, SCORING_ROLES
from funrl.rollout.certificate import DIGEST_PASSES, GPU_PIECE
from funrl.rollout.native.cache_sizes import FREE_SHARE
from funrl.rollout.native.loading import native_weights, spec_of_adapter
from funrl.tasks.embedded import embedded_task
from funrl.trainer import offload, phases
from funrl.trainer.jobs.build import build, first_state, weights_dtype
from funrl.trainer.jobs.compatibility import check_algorithm, check_mask_replay, check_meshes, check_owned_values
from funrl.trainer.jobs.demonstrations import learns_from_demonstrations
from funrl.trainer.jobs.job import Job, JobDevices, RLJob, Task, TextJob, Texts
from funrl.trainer.jobs.learning_rates import updates_of
from funrl.trainer.jobs.models import agent_models, located, models_of, with_policies, with_teachers
from funrl.trainer.jobs.prepare import new_tokens, rl_job, text_job, texts_kind
from funrl.trainer.jobs.sharding import check_layouts, splits_residual
from funrl.trainer.settings.checks import check_settings
from funrl.trainer.settings.declaration import SettingsError, blaming, run_kind
from funrl.trainer.settings.scorers import JUDGE, has_environment, model_path
from funrl.trainer.settings.settings import Settings, for_kind, scoring_budget, with_flags
from funrl.trainer.sources.completion_scores import end_values
from funrl.trainer.sources.generation import generating_ranks
from funrl.trainer.sources.pair_rows import SAMPLED_PAIRS
from funrl.trainer.sources.source import Source
from funrl.trainer.steps.optimizer import check_freeze
from funrl.trainer.steps.parts import GeneratingParts, Generator, JudgeJob, Parts, without_generator
from funrl.trainer.steps.roles import Role, bases
from funrl.trainer.steps.step_rows import Rows, moved


def role_weights(tracer: Tracer, job: Job, parts: Parts) -> tuple[trees.Tree, trees.Tree]:
    """Make fake weights of the trained and the frozen roles, both by name."""
    own = {}
    frozen = {}
    for name, role in parts.roles.items():
        if role.loss is not None:
            own[name] = tracing.make_weights(tracer, role.stored, job.master)
        elif role.base is None:
            frozen[name] = tracing.make_weights(tracer, role.stored, weights_dtype(job, role))
    return own, frozen


def engine_bytes(job: Job, parts: Parts, generator: Generator) -> tuple[float, float]:
    """Bytes of the engine's own weights, and bytes that it shares with the trainer."""
    own = shared = 0.0
    leaves = ((nbytes, is_shared) for _, nbytes, is_shared in _leaves(job, parts, generator))
    for nbytes, is_shared in itertools.chain(leaves, _base_leaves(job, parts, generator)):
        own, shared = (own, shared + nbytes) if is_shared else (own + nbytes, shared)
    return own + _float8_bytes(job, generator.whole.weights.layouts), shared


def _float8_bytes(job: Job, layouts: trees.Tree) -> float:
    """Bytes of an engine's quantized weights, which are beside those in these layouts that it was given."""
    return quantized_bytes(layouts) if job.settings.engines.float8 else 0.0


def agent_bytes(job: Job, parts: Parts, pool: str = "") -> float:
    """Bytes of the weights of agents' further models: in their engines, and the copies that a checkpoint holds.

    Args:
      pool: what the rank does: "train", "generate", or "" for both.
    """
    role = parts.roles[parts.main_role]
    copies = sum(declared.every > 0 for declared in job.agents.frozen.values()) if pool in ("", "train") else 0
    nbytes = copies * _local_bytes(role.stored, job.master if role.base is not None else job.dtype)
    if not isinstance(parts, GeneratingParts):
        return nbytes
    engines = parts.generator.further.values()
    forms = [engine.weights.layouts for engine in engines]
    return nbytes + sum(_local_bytes(layouts, job.dtype) + _float8_bytes(job, layouts) for layouts in forms)


def sent_copies(job: Job, parts: Parts) -> float:
    """Bytes of the copies of its weights that a trainer rank sends and, of 16 bits, has sent before, to make patches.

    Patches are sent where few numbers have changed, which nothing promises: their bytes are counted nowhere.
    """
    role = parts.roles[parts.main_role]
    dtypes = trees.leaves(weight_dtypes(role.stored, job.dtype))
    keeps = any(dtype.itemsize == NARROW for dtype in dtypes) and job.settings.engines.abilities.patches
    layouts = trees.leaves(role.stored)
    nbytes = sum(math.prod(x.local_shape()) * dtype.itemsize for x, dtype in zip(layouts, dtypes, strict=True))
    return float(nbytes * (1 + keeps))


def _local_bytes(layouts: trees.Tree, dtype: torch.dtype) -> float:
    """Bytes of a rank's shards."""
    return float(dtype.itemsize * sum(math.prod(layout.local_shape(0)) for layout in trees.leaves(layouts)))


def resharding(job: Job, parts: Parts, generator: Generator, resting: dict[str, float], routed: bool = True) -> Costs:
    """Cost of a sync: the engine's old copy is freed first, and a few buckets are sent at once.

    Weights with merged adapters are temporary: each is freed once it is sent. To an engine that adds adapters to a base
    they alone are sent; the first sync of a run, which sends the base, is not counted.

    Args:
      job, parts, generator: at full depth.
      resting: bytes by kind that are held.
      routed: plan the routes, whose gathers may stage more than a bucket.
    """
    engine, _ = engine_bytes(job, parts, generator)
    names = offload.made_weights(parts)
    stored = dict(trees.named(parts.begin.stored))
    merged = job.dtype.itemsize * sum(math.prod(stored[name].local_shape(0)) for name in names)
    most = _most_received(_sent_leaves(job, parts, generator))
    weights = resting["weights"] + max(engine, float(merged))
    routes = generator.to_engine.routes if routed else ()
    bucket = max((staged_bytes(route, BUCKET_BYTES) for route in routes), default=BUCKET_BYTES)
    peak = resting | {"weights": weights, "staging": min(2.0 * bucket, 2 * most)}
    traffic = {(tracing.RESHARD, "all"): Traffic(1, most)} if most else {}
    return Costs({"other": peak}, 0.0, 0.0, traffic)


def verifying(job: Job, parts: Parts, generator: Generator, resting: dict[str, float], hardware: Hardware) -> Costs:
    """Cost of digests of the trainer's and of the engine's weights, with one sum over all ranks."""
    mesh = parts.mesh
    seconds = 0.0
    for (old, new), _, is_shared in _leaves(job, parts, generator):
        numbers = sum(volume(box) for box in ([new] if is_shared else [old, new]))
        seconds += DIGEST_PASSES * op_seconds(hardware, 0.0, 8.0 * numbers, torch.int64)
    traffic = {}
    if mesh.world > 1:
        digests = 1 + len(trees.leaves(generator.engine.weights.layouts))
        traffic["all_reduce", mesh.group_name(AXES)] = Traffic(1, 40.0 * digests)
    return Costs({"other": resting | {"staging": 16.0 * GPU_PIECE}}, 0.0, seconds, traffic)


class SentLeaf(NamedTuple):
    """A weight of a sync: its layouts in the trainer and in the engine, and the dtype that arrives."""

    name: str
    stored: Layout
    wanted: Layout
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the engine of the first rank."""
        return volume(self.wanted.box(0)) * self.dtype.itemsize


def _sent_leaves(job: Job, parts: Parts, generator: Generator) -> list[SentLeaf]:
    """Weights of each sync: the adapters alone where the engine adds them to its base."""
    policy = parts.roles[job.main_role].placed
    stored = parts.begin.stored if generator.base is None else trained_part(policy.model, policy.stored)
    return _pairs(stored, generator.engine.weights.layouts, job.dtype)


def _pairs(stored: trees.Tree, layouts: trees.Tree, dtype: torch.dtype) -> list[SentLeaf]:
    wanted = dict(trees.named(layouts))
    dtypes = trees.leaves(weight_dtypes(layouts, dtype))
    named = zip(trees.named(stored), dtypes, strict=True)
    return [SentLeaf(name, layout, wanted[name], arriving) for (name, layout), arriving in named]


def _most_received(leaves: Sequence[SentLeaf]) -> float:
    """Bytes of the rank that receives the most: of its parts in the engine all that it does not store."""
    weights: dict[tuple[Layout, Layout], int] = {}
    for leaf in leaves:
        pair = leaf.stored, leaf.wanted
        weights[pair] = weights.get(pair, 0) + leaf.dtype.itemsize
    received = np.zeros(1)
    for (stored, wanted), weight in weights.items():
        old, new = _boxes(stored), _boxes(wanted)
        low, high = np.maximum(old[..., 0], new[..., 0]), np.minimum(old[..., 1], new[..., 1])
        lacks = (new[..., 1] - new[..., 0]).prod(1) - np.maximum(high - low, 0).prod(1)
        received = received + float(weight) * lacks
    return float(received.max())


@functools.lru_cache(maxsize=4096)
def _boxes(layout: Layout) -> np.ndarray:
    """Boxes of all ranks: [ranks, dims, 2]."""
    return np.array([layout.box(rank) for rank in range(layout.world)]).reshape(layout.world, len(layout.shape), 2)


def _leaves(job: Job, parts: Parts, generator: Generator) -> Iterator[tuple[tuple[Box, Box], int, bool]]:
    """Boxes of each weight in a sync's plan before and after it, its bytes in the engine, and whether it is shared.

    A shared weight is the trainer's own tensor, or the copy of it in the dtype to compute in.
    """
    merged = offload.made_weights(parts)
    own = job.initial_dtype if generator.base is None else job.master
    for leaf in _sent_leaves(job, parts, generator):
        boxes = leaf.stored.box(0), leaf.wanted.box(0)
        shared = boxes[0] == boxes[1] and leaf.dtype in (own, job.dtype) and leaf.name not in merged
        yield boxes, leaf.nbytes, shared


def _base_leaves(job: Job, parts: Parts, generator: Generator) -> Iterator[tuple[int, bool]]:
    """Bytes in the engine of each weight of a base that adapters are added to, and whether it is shared."""
    if generator.base is None:
        return
    placed = generator.base.placed
    as_stored = placed.model is parts.roles[BASE].placed.model
    for leaf in _pairs(placed.stored, generator.whole.weights.layouts, job.dtype):
        yield leaf.nbytes, as_stored and leaf.stored.box(0) == leaf.wanted.box(0)


def without_offloaded(job: Job, parts: Parts, phases: dict[str, Costs], rests: dict[str, float]) -> dict[str, Costs]:
    """Subtract from each phase the bytes that are offloaded while it runs.

    Args:
      rests: bytes of weights and optimizers, by kind.
    """
    stages = offload.frozen_stages(parts.roles)
    shared_weights = bases(parts.roles)
    own = {
        name: role
        for name, role in parts.roles.items()
        if role.loss is None and role.base is None and name not in shared_weights
    }
    stored = {name: trees.leaves(role.stored) for name, role in own.items()}
    frozen = {
        name: float(weights_dtype(job, own[name]).itemsize * sum(math.prod(x.local_shape(0)) for x in layout))
        for name, layout in stored.items()
    }
    shared = engine_bytes(job, parts, parts.generator)[1] if isinstance(parts, GeneratingParts) else 0.0
    of_part = {
        "optimizer": {"optimizer": rests["optimizer"]},
        "params": {"weights": rests["weights"] - sum(frozen.values()) - shared},
    }
    away = offload.offloaded_parts(job.settings.devices.offload)
    for name, costs in phases.items():
        stage = "update" if tracing.stage_of(name) == "reshard" else tracing.stage_of(name)
        stage = "generate" if name == tracing.MOVES[0] else stage
        for part in away.difference(offload.NEEDS[stage], ["reference"]):
            costs = plus(costs, {kind: -nbytes for kind, nbytes in of_part[part].items()})
        if "reference" in away:
            gone = sum(nbytes for role, nbytes in frozen.items() if stage not in stages.get(role, {stage}))
            costs = plus(costs, {"weights": -gone})
        phases[name] = costs
    return phases


def pool_phases(
    phases: Mapping[str, Costs],
    parts: Parts,
    dtype: torch.dtype,
    *,
    rests: Mapping[str, float],
    pool: str,
    apart: Collection[str],
) -> dict[str, Costs]:
    """Phases of the ranks of one pool.

    Args:
      phases: of a rank with all roles.
      parts: on its mesh.
      dtype: of the weights of roles that do not learn.
      rests: bytes by kind that it holds between phases.
      pool: what the rank does: "train", "generate" or the name of a role.
      apart: as in `RankWork`.
    """
    if pool == "train":
        others = sum(stored_bytes(role, dtype) for name, role in parts.roles.items() if name in apart)
        gone = {tracing.MOVES[0], *(f"score_{name}" for name in apart)}  # rows come from the other ranks
        return {name: plus(costs, {"weights": -others}) for name, costs in phases.items() if name not in gone}
    own = {kind: -nbytes for kind, nbytes in rests.items()}
    if pool == "generate":
        return {pool: plus(phases[pool], own)}
    own["weights"] += stored_bytes(parts.roles[pool], dtype)
    name = f"score_{pool}"
    return {name: plus(phases[name], own)}


def stored_bytes(role: Role, dtype: torch.dtype) -> float:
    """Bytes of a role's weights that a rank stores, where they do not learn."""
    dtypes = trees.leaves(weight_dtypes(role.placed.stored, dtype))
    layouts = trees.leaves(role.placed.stored)
    return float(sum(math.prod(x.local_shape()) * item.itemsize for x, item in zip(layouts, dtypes, strict=True)))


def step_text(job: Job, tokens: int) -> str:
    """Describe a step in words."""
    count = job.settings.run.batch_prompts
    if isinstance(job, TextJob):
        texts = len(TEXT_FIELDS[job.task.kind])
        each = f"{texts} texts of {tokens:,} tokens" if texts > 1 else f"{tokens:,} tokens{pictures_text(job, tokens)}"
        return f"{count:,} {job.task.kind}, each {each}, all of full length and trained on"
    rows = count * job.sampling.samples
    turns = tracing.turns_of(job.settings)
    width = turns.row_tokens(tokens, job.sampling.max_new_tokens)
    if turns.gaps:
        return f"{rows:,} episodes of {turns.replies} replies, {width:,} tokens each, all of full length"
    seen = pictures_text(job, tokens)
    return f"{rows:,} completions, prompt and completion {width:,} tokens{seen}, all of full length"


def left_out(job: Job, judge: JudgeJob | None, hardware: Hardware) -> tuple[str, ...]:
    """Describe the parts of a step that are not counted."""
    settings = job.settings
    out = ["rewards"] * isinstance(job, RLJob) + [
        "tokenizer",
        "files",
        f"the evaluation every {settings.evaluation.eval_every} steps",
        *["the gain of --rollout_dtype=float8, as products are counted in 16 bits"] * settings.engines.float8,
        *["what the teacher sees before the prompts"] * (settings.models.teacher_context is not None),
        *["the gain of prompts that plain layers on a CPU compute once"] * _shares_beginnings(job, hardware),
    ]
    if job.algorithm.filter is not None and settings.sampling.max_refills > 1:
        out.append(
            f"up to {settings.sampling.max_refills - 1} more batches of completions instead of rows that are filtered"
        )
    if job.model.owned is not None:
        out.append("reading and resizing pictures")
    if isinstance(job, RLJob) and not job.models[job.main_role].pages:
        out.append("generation, which runs transformers' own code")
    if isinstance(job, RLJob) and settings.engines.probe_sync_every:
        out.append(f"the probe of the engine every {settings.engines.probe_sync_every} steps")
    if judge is not None and not judge.model.pages:
        out.append("the judge, which runs transformers' own code")
    if isinstance(job, RLJob) and job.algorithm.example in SAMPLED_PAIRS:
        out.append("the selection of each prompt's best and worst sample for training")
    if isinstance(job, RLJob) and has_environment(settings):
        out.append("branches of episodes, replies of frozen agents, and the work of environments")
    if isinstance(job, RLJob) and learns_from_demonstrations(job.algorithm):
        out.append("the rows of demonstrations, one per prompt")
    if settings.devices.offload:
        copies = "the time of offloading copies" if hardware.accelerator else "it does nothing on a CPU"
        out.append(f"--offload={settings.devices.offload}: {copies}")
    return tuple(out)


def _shares_beginnings(job: Job, hardware: Hardware) -> bool:
    """True if plain layers compute once what packed rows begin with in common; see `Placed.shares_prefixes`."""
    if hardware.accelerator or not isinstance(job, RLJob):
        return False
    return job.sampling.samples > 1 and job.models[job.main_role].abilities.shares_prefixes


PROMPT_TOKENS = 512  # of a prompt, unless a flag or the embedded task gives it
TEXT_TOKENS = 1024  # of a text, in the same case


def plain_job(settings: Settings, algorithm: Algorithm, memory: float) -> Job:
    """Build the job of the flags for cost estimates; of its files only config.json is read.

    Args:
      settings: the flags.
      memory: bytes of a device; the default generate mesh depends on it.

    Raises:
      ValueError: a flag or a combination of flags cannot work.
    """
    sizes = settings.devices.train.chosen
    settings = located(settings)
    model = plain_model(settings)
    kind = run_kind(algorithm, settings.examples.data)
    settings = with_flags(for_kind(settings, kind), compile="off", device="cpu")
    check_settings(settings)
    algorithm = with_teachers(algorithm, settings)
    check_algorithm(algorithm, settings)
    algorithm = with_policies(algorithm, parse_agents(settings.environments.agents).policies)
    models = models_of(algorithm, settings, model, None, read_model)
    check_owned_values(settings, models.models, algorithm)
    check_freeze(settings, {name: x for name, x in models.models.items() if name in algorithm.losses})
    generating = check_meshes(settings, models.models, sizes, memory)
    check_mask_replay(settings, models.models, algorithm)
    devices = JobDevices(sizes=sizes, generate_sizes=generating, device="cpu")
    if kind == "supervised":
        return text_job(settings, algorithm, models, devices, Texts("dry run", (), (), texts_kind(algorithm)))
    most = new_tokens(settings)
    task = Task(name="dry run", prompts=(), heldout=(), rewards=(), weights=(1.0,), max_new_tokens=most)
    job = rl_job(settings, algorithm, models, devices, task)
    judge = None
    if (directory := model_path(settings, "judge")) is not None:
        judge = decoding.plain_judge(
            settings, directory, read_model(directory, settings.models.model_code), sizes, memory
        )
    others = agent_models(settings, job.agents, model, None, read_model)
    return dataclasses.replace(job, judge=judge, agent_models=others)


def plain_model(settings: Settings) -> Model:
    """The model of --model, or of the embedded task. Raises: ModelError, as `read_model`."""
    if settings.models.model is None:
        return model_of_config(embedded_task(settings.examples.task).model_config(1))
    return read_model(settings.models.model, settings.models.model_code)


def read_model(path: str, code: str = "native") -> Model:
    """Read a model from a config.json or from its directory, which need not have weights.

    Args:
      code: as in `hf.load_model`.

    Raises:
      ModelError: the file is missing or not JSON, or the model is not supported.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ModelError(
            f"{path}: there is no {file}, nor such a model in the local cache; a dry run needs only a config.json: "
            "--model=CONFIG.json"
        )
    return hf.load_model(file, code)


def tokens_of(settings: Settings, algorithm: Algorithm) -> int:
    """Tokens of a prompt, or of a text where texts are given.

    Returns: the flag's number; else the longest of the embedded task; else a default that fits the model's positions.
    """
    if run_kind(algorithm, settings.examples.data) == "supervised":
        if settings.estimate.text_tokens is not None:
            return settings.estimate.text_tokens
        if settings.models.model is not None or settings.examples.data is not None:
            if settings.examples.max_text_tokens is not None:
                return settings.examples.max_text_tokens
            # A value head reads one more token.
            reads_end = algorithm.role_kinds.generating(algorithm.losses) is None
            return min(TEXT_TOKENS, plain_model(located(settings)).config.max_positions - reads_end)
        return max(x.tokens for x in task_texts(settings, plain_model(settings).config, texts_kind(algorithm)))
    if settings.estimate.prompt_tokens is not None:
        return settings.estimate.prompt_tokens
    if not reads_task(settings, None):
        positions = plain_model(located(settings)).config.max_positions
        return max(1, min(PROMPT_TOKENS, positions - new_tokens(settings)))
    return max(x.tokens for x in task_texts(settings, plain_model(settings).config, None))


Phases = dict[str, Costs]  # by their names


class TraceMemo(NamedTuple):
    """Traces that the estimates of a search share.

    Attributes:
      traces: by settings, layers and rows.
      room: usable bytes of a device; an estimate ends early where the update alone needs more.
    """

    traces: dict[object, tracing.Trace]
    room: float = math.inf


class TooLargeError(SettingsError):
    """An update that needs more memory than a search allows; `nbytes`: at least."""

    def __init__(self, nbytes: float) -> None:
        super().__init__(f"needs {size(nbytes)} or more")
        self.nbytes = nbytes


class RankWork(NamedTuple):
    """Work of a rank in a step.

    Attributes:
      tokens: of a prompt, or of a text where texts are given.
      hardware: of the rank.
      pool: "train" or "generate", or the name of a role that scores, if that is all that the rank does.
      apart: the other pools: "generate", and roles, or the judge, on ranks of their own.
      memo: of a search.
    """

    tokens: int
    hardware: Hardware
    pool: str = ""
    apart: Collection[str] = ()
    memo: TraceMemo | None = None


def estimate(
    job: Job,
    tokens: int,
    hardware: Hardware,
    pool: str = "",
    apart: Collection[str] = (),
    memo: TraceMemo | None = None,
) -> tracing.Estimate:
    """Cost of one step of the job on a rank of its mesh, by phase.

    Args:
      tokens, hardware, pool, apart, memo: as in `RankWork`.

    Raises:
      SettingsError: rows are longer than the model's positions.
      TooLargeError: the memo has no room for the update.
    """
    width = check_width(job, tokens)
    judge = job.judge if isinstance(job, RLJob) else None
    if isinstance(job, RLJob):
        job = dataclasses.replace(job, judge=None)
    split = "on" if splits_residual(job.settings, job.sizes, hardware.accelerator) else "off"
    job = dataclasses.replace(job, settings=with_flags(job.settings, split_residual=split))
    work = RankWork(tokens, hardware, pool, apart, memo or TraceMemo({}))
    with tracing.pretended(job.sizes, None if hardware.tpu else hardware.node) as mesh:
        built = build(job, mesh, lambda _: None)
        parts = built if pool in ("", "generate") else without_generator(built)
        sends = pool == "train" and "generate" in apart
        agents = agent_bytes(job, parts, pool) + (sent_copies(job, parts) if sends else 0.0)
        job = _without_agents(job)
        plan = row_plan(job, parts, width, _learning_step(parts))
        if memo is not None and pool in ("", "train") and not job.settings.devices.offload:
            _check_room(job, parts, plan, work, agents)
        phases = tracing.of_all_layers(job, lambda shallow: _phases(shallow, parts, plan, work))
        axes = tracing.axes_of(mesh)
        rests = phases.pop("rests").peak
        episodes = None
        engine = 0.0
        served = rests | {"weights": rests.get("weights", 0.0) + agents}
        if isinstance(parts, GeneratingParts):
            axes |= tracing.axes_of(parts.generator.whole.weights.mesh)
            phases, episodes, engine = _with_generator(job, parts, phases, work, served, agents)
        elif agents:
            phases = {name: plus(costs, {"weights": agents}) for name, costs in phases.items()}
        here = judge if judge is not None and decoding.writes_verdicts(judge, pool, apart) else None
        if isinstance(job, RLJob) and isinstance(built, GeneratingParts) and here is not None:
            resting = served | {"weights": served["weights"] + engine}
            verdicts = decoding.judging(job, here, built, tokens, sum(resting.values()), hardware)
            axes |= verdicts.axes
            phases = decoding.with_judge_phase(phases, verdicts, resting)
        useful = useful_shares(job, parts, plan)
        if job.settings.devices.offload and hardware.accelerator:
            phases = without_offloaded(job, parts, phases, rests)
        phases = phases if not pool else pool_phases(phases, parts, job.dtype, rests=rests, pool=pool, apart=apart)
        meshes = (mesh, parts.generator.mesh) if isinstance(parts, GeneratingParts) else (mesh,)
        phases = tracing.with_communicators(phases, meshes, pool, hardware)
    return tracing.Estimate(
        job=job,
        roles=tuple(name for name in parts.roles if name in job.models),
        step=step_text(job, tokens),
        tokens=width,
        phases=phases,
        axes=axes,
        parameters=job.models[job.main_role].parameters,
        trained=trees.count(parts.roles[job.main_role].stored),
        useful={name: share for name, share in useful.items() if name in phases},
        left_out=left_out(job, judge, hardware),
        episodes=episodes,
    )


def _check_room(job: Job, parts: Parts, plan: RowPlan, work: RankWork, agents: float) -> None:
    """Raise TooLargeError where the memo has no room for the update and `agents`, bytes of other agents' weights."""
    least = tracing.of_all_layers(job, lambda shallow: _traced_steps(shallow, parts, plan, work).least())
    copied = engine_bytes(job, parts, parts.generator)[0] if isinstance(parts, GeneratingParts) else 0.0
    nbytes = max(costs.total for costs in least.values()) + copied + agents
    if work.memo is not None and nbytes > work.memo.room:
        raise TooLargeError(nbytes)


def _with_generator(
    job: Job, parts: GeneratingParts, phases: Phases, work: RankWork, served: dict[str, float], agents: float
) -> tuple[Phases, tracing.EpisodeCost | None, float]:
    """Phases beside an engine, with those that need one; the cost of its episodes; and bytes of the engine's weights.

    Args:
      served: bytes by kind while the ranks generate, without the engine.
      agents: bytes of the weights of other agents, which `served` has.
    """
    engine, shared = engine_bytes(job, parts, parts.generator)
    held = engine + sum(served.values())
    waiting = decoding.with_waiting(job, parts.generator, phases["generate"], work.tokens, held, work.hardware)
    phases["generate"], episodes = waiting
    copied = engine + shared if work.pool == "generate" else engine  # nothing is the trainer's there
    phases = {name: plus(costs, {"weights": copied + agents}) for name, costs in phases.items()}
    searched = work.memo is not None and math.isfinite(work.memo.room)
    phases["reshard"] = resharding(job, parts, parts.generator, served, routed=not searched)
    if job.settings.engines.verify_sync:
        phases["verify"] = verifying(job, parts, parts.generator, phases["reshard"].peak, work.hardware)
    return phases, episodes, engine


def _parts(job: Job, mesh: Mesh, generates: bool) -> Parts:
    """Parts of a job, without an engine where the ranks do not generate."""
    parts = build(job, mesh, lambda _: None)
    return parts if generates else without_generator(parts)


def _without_agents(job: Job) -> Job:
    """The job without the frozen agents, whose replies are not traced."""
    agents = AgentMap(policies=job.agents.policies)
    return dataclasses.replace(job, agents=agents, agent_models={}) if isinstance(job, RLJob) else job


def check_width(job: Job, tokens: int) -> int:
    """Tokens of a row of the batch.

    Raises:
      SettingsError: a row is longer than the model's positions.
    """
    positions = job.model.config.max_positions
    reader = job.main_role in SCORING_ROLES
    if isinstance(job, TextJob):
        width = tokens + reader  # a value head reads one more token
        rows = len(TEXT_FIELDS[job.task.kind])
        flags = {"text_tokens": tokens}
    else:
        turns = tracing.turns_of(job.settings)
        width = turns.row_tokens(tokens, job.sampling.max_new_tokens)
        rows = 1
        flags = {"prompt_tokens": tokens, "max_new_tokens": job.sampling.max_new_tokens}
        flags |= {"assume_turns": turns.replies, "assume_turn_tokens": turns.context} if turns.gaps else {}
    if width > positions:
        given = " ".join(f"--{name}={value}" for name, value in flags.items())
        raise SettingsError(f"{given}: a row has {width} tokens, and the model {positions} positions; give fewer")
    return rows * width


class _TracedSteps(NamedTuple):
    """Traces of the steps of a job with few layers.

    Attributes:
      parts: of the job.
      trace: (rows of a rank, learns=) -> the step that scores them, or learns from scored ones.
      scored, learned: rows of a rank that are scored, and those of a mini-batch; and of these the rows of one pass.
    """

    parts: Parts
    trace: Callable[..., tracing.Trace]
    scored: tuple[int, int]
    learned: tuple[int, int]

    def least(self) -> dict[str, Costs]:
        """Costs of the updates of the first rows, whose peaks are below those of all rows."""
        return {
            name: costs
            for name, costs in self.trace(tracing.first_rows(*self.learned), learns=True).phases.items()
            if name.startswith(UPDATES)
        }


def _traced_steps(job: Job, whole: Parts, plan: RowPlan, work: RankWork) -> _TracedSteps:
    """Traces of the steps of a job, made when they are asked for; the arguments are those of `_phases`."""
    traces = {} if work.memo is None else work.memo.traces
    mesh = whole.mesh
    parts = with_assumed_pictures(job, _parts(job, mesh, generates=isinstance(whole, GeneratingParts)), work.tokens)
    settings = job.settings
    ranks = mesh.size(mesh.row_axes)
    rows = len(plan.lengths)
    once = dataclasses.replace(job, settings=with_flags(settings, epochs=1, minibatches=1))
    layers = [
        (model.config.layers, model.abilities.layer_kinds, tracing.tower_layers(model)) for model in job.models.values()
    ]
    of_pass = [
        tracing.rows_of_a_pass(budget, int(plan.lengths[0]), mesh)
        for budget in (scoring_budget(settings), settings.updates.token_budget)
    ]
    scored = math.ceil(rows / ranks), of_pass[0]

    def trace(count: int, learns: bool) -> tracing.Trace:
        # The generate mesh does not matter, nor does remat where nothing learns.
        changed = with_flags(settings, generate_mesh=None, remat=settings.devices.remat if learns else "none")
        key = repr((changed, layers)), count, learns
        if key not in traces:
            written = trace(tracing.first_rows(*scored), learns=False).written if learns else None
            tracer = tracing.tracer_of(once, parts, work.hardware)
            traces[key] = trace_step(once, parts, full_rows(once, parts, work.tokens, count), tracer, learns, written)
        return traces[key]

    mini = math.ceil(rows / settings.updates.minibatches / ranks)
    return _TracedSteps(parts, trace, scored, (mini, of_pass[1]))


def _phases(job: Job, whole: Parts, plan: RowPlan, work: RankWork) -> dict[str, Costs]:
    """Costs of all phases except the reshard, without the engine's copy of the weights.

    Args:
      job: at full depth or with fewer layers.
      whole: parts at full depth, which determine how many rows the engine decodes together.
      plan: of all rows.
      work: of the rank.

    Returns: costs by phase; "rests" has the bytes held between phases.
    """
    steps = _traced_steps(job, whole, plan, work)
    if work.pool == "generate":
        return {"generate": _generation(job, whole, steps.parts, work, {}), "rests": Costs({"other": {}})}
    learns = work.pool in ("", "train")
    local, scoring = steps.scored
    mini, piece = steps.learned
    some = steps.trace(
        min(mini, tracing.TRACED * piece) if learns else tracing.first_rows(local, scoring), learns=learns
    )
    phases = {}
    if isinstance(whole, GeneratingParts):
        phases["generate"] = _generation(job, whole, steps.parts, work, some.resting)
    scores = tracing.at_rows(functools.partial(steps.trace, learns=False), local, scoring)
    owned = owned_bytes(job, work.tokens)
    phases |= with_moves(job, plan, scores, some.token_bytes, owned)
    again = tracing.MOVES[1] in phases  # the step keeps the rows as scored
    kept = local - mini + again * local
    updates = job.settings.updates
    learned = tracing.at_rows(functools.partial(steps.trace, learns=True), mini, piece) if learns else {}
    for name, costs in learned.items():
        if name.startswith(UPDATES):
            role = name.removeprefix(UPDATES)
            costs = times(costs, updates.epochs * updates.minibatches * updates_of(job.settings, role))
            phases[name] = plus(costs, {"batch": kept * some.row_bytes})
    phases = with_owned_bytes(phases, sum(owned), local)
    if "generate" in phases:
        phases["generate"] = plus(phases["generate"], some.resting)
    return phases | {"rests": Costs({"other": some.resting})}


def _generation(job: Job, whole: Parts, parts: Parts, work: RankWork, resting: Mapping[str, float]) -> Costs:
    """Costs of generation.

    Args:
      job, whole, work: as in `_phases`.
      parts: of the job.
      resting: bytes by kind that the rank holds to train.
    """
    assert isinstance(whole, GeneratingParts) and isinstance(parts, GeneratingParts) and isinstance(job, RLJob)
    if not job.models[job.main_role].pages:
        return Costs({"other": {}})
    own, shared = engine_bytes(job, whole, whole.generator)
    trained = sum(resting.values()) * _stored(whole) / _stored(parts)  # at full depth
    held = own + agent_bytes(job, whole) + (shared if work.pool == "generate" else trained)
    engines = 1 + len(whole.generator.frozen) + len(whole.generator.policies)
    costs = decoding.generation(
        decoding.EngineWork(
            job,
            parts.generator,
            whole.generator,
            prompt_tokens=work.tokens,
            room=FREE_SHARE * max(0.0, work.hardware.memory * USABLE - held) / engines,
            hardware=work.hardware,
            turns=tracing.turns_of(job.settings),
        )
    )
    return plus(costs, {"cache": (engines - 1) * costs.peak.get("cache", 0.0)})  # of frozen agents, as much each


def _stored(parts: Parts) -> int:
    """Number of weights of all roles that a rank stores."""
    return sum(math.prod(x.local_shape()) for role in parts.roles.values() for x in trees.leaves(role.stored))


def trace_step(
    job: Job,
    parts: Parts,
    rows: Rows,
    tracer: Tracer,
    learns: bool = True,
    written: tracing.FieldShapes | None = None,
) -> tracing.Trace:
    """Score rows and learn from them with the trainer's own functions.

    Args:
      job: to trace.
      parts: by `build`, on a mesh that may be `pretended`.
      rows: of all ranks, by `full_rows`.
      tracer: by `tracer_of`, new.
      learns: update the weights; False: only score rows and move them.
      written: fields that an earlier trace has scored, with which no role scores here; None: score here.
    """
    roles = {
        name: role._replace(context="", optimizer=role.optimizer and tracer.marked(role.optimizer))
        for name, role in parts.roles.items()
    }
    weights, frozen = role_weights(tracer, job, parts)
    batches = [rows]
    learning = _learning_step(parts) - 1
    del rows  # freed once they have been moved
    no_source = Source(dict, lambda state, step: (batches.pop(), state, {}), lambda roles, step: {}, has_digests=False)
    traced = dataclasses.replace(parts, roles=roles, agents={})  # each role sees all rows
    trainer = phases.Trainer(job, traced, no_source, frozen, tracing.TracedClock(tracer))
    alone = parts.mesh.size(parts.mesh.row_axes) == batches[0].mesh.size(batches[0].mesh.row_axes) == 1
    phase_of_moves = contextlib.nullcontext if alone else tracer.phase
    tracer.hold_tree(batches[0].batch, "batch")
    with tracer:
        state = first_state(job, trainer.parts, {**weights, **frozen}, ())._replace(step=learning)
        for role in state.roles.values():
            tracer.hold_tree(role.opt_state, "optimizer")
        resting = {kind: tracer.held[kind] for kind in ("weights", "optimizer")}
        with phase_of_moves(tracing.MOVES[0]):
            rows, state, _ = phases.draw_batch(trainer, state)
        drawn = _token_bytes(rows)
        for name in (name for name in SCORING_ROLES if name in frozen):
            read = rows_to_read(job, rows)
            with trainer.clock.phase(f"score_{name}"):
                end_values(roles[name], frozen[name], read, scoring_budget(job.settings))
        rows, state = score_or_fill(trainer, state, rows, written, tracer.empty)
        tracer.hold_tree(rows.batch, "batch")
        if learns:
            phases.learn_batch(trainer, state, rows)
        else:  # to the next rank: memory depends on the number of rows, not on their destination
            with phase_of_moves(tracing.MOVES[1]):
                moved(rows, (rows.owner + 1) % parts.mesh.size(parts.mesh.row_axes), parts.mesh)
    row_bytes = trees.nbytes(rows.batch) / max(1, len(rows.own))
    return tracing.Trace(tracer.phases, resting, row_bytes, (drawn, _token_bytes(rows)), written_fields(parts, rows))


def _token_bytes(rows: Rows) -> int:
    return token_bytes({name: x for name, x in as_dict(rows.batch).items() if kind_of(rows.batch, name).per_token})


def _learning_step(parts: Parts) -> int:
    """The first step in which every role learns."""
    return max(role.first_step for role in parts.roles.values())


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


def pool_estimate(settings: Settings, algorithm: Algorithm, work: RankWork) -> tracing.Estimate:
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


def _judge_estimate(settings: Settings, algorithm: Algorithm, tokens: int, hardware: Hardware) -> tracing.Estimate:
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
    with tracing.pretended(job.sizes) as mesh:
        verdicts = decoding.judging(job, judge, build(job, mesh, lambda _: None), tokens, 0.0, hardware)
    read = decoding.tokens_to_read(job, judge, tokens)
    count = decoding.verdicts_of_step(job)
    step = f"{count:,} verdicts of {judge.sampling.max_new_tokens:,} tokens, each after {read:,} tokens"
    return tracing.Estimate(
        job=dataclasses.replace(job, model=model, sizes=sizes, generate_sizes=sizes),
        roles=(JUDGE,),
        step=f"{step}, all of full length",
        tokens=check_width(job, tokens),
        phases=tracing.with_communicators(
            {"score_judge": plus(verdicts.costs, {"weights": verdicts.weights})}, (), JUDGE, hardware
        ),
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
      messages: of the rank with the most messages; of weights, of the first rank that sends or receives.
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
    with tracing.pretended(job.sizes) as mesh:
        parts = build(dataclasses.replace(job, judge=None), mesh, lambda _: None)  # whose weights are not read
        moves = weight_plan(job, parts, placement)
        sent, received, messages = row_traffic(job, parts, placement, width)
    owned = owned_bytes(job, tokens)
    item = row_token_bytes(job, tokens) + sum(WORD + nbytes for nbytes in owned) / width
    messages *= 1 + len(owned) + bool(owned)  # one for each ragged field, and one with their numbers
    direct = max(DIRECT_BYTES, BUCKET_BYTES // 8)  # as on a GPU
    steps = (
        program(moves, ranks[0], BUCKET_BYTES, direct_bytes=direct) for ranks in (moves.src_ranks, moves.dst_ranks)
    )
    count = max(max(sum(len(x.sends) for x in own), sum(len(x.receives) for x in own)) for own in steps)
    weights = PoolTransfer("weights", float(max(sent_bytes(moves))), float(max(received_bytes(moves))), count, near)
    return weights, PoolTransfer("rows", float(item * sent), float(item * received), messages, near)


def weight_plan(job: RLJob, parts: Parts, placement: Placement) -> Plan:
    """The plan of a sync: of the adapters alone where the engine adds them to its base."""
    mesh = Mesh(placement.generate.sizes)
    spec = native_weights(parts.begin.model, mesh, job.dtype)
    policy = parts.roles[job.main_role].placed
    stored = parts.begin.stored
    if lora := added_adapters(policy.model):
        spec = spec_of_adapter(parts.begin.model, spec, lora)
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
