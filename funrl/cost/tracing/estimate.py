"""Parts of every dry run: turns of episodes, pretended ranks, traces of a step, and extrapolation from two traces."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from funrl import trees
from funrl.cost.tracing.costs import UPDATES, Costs, along, plus
from funrl.cost.tracing.hardware import COMMUNICATOR_BYTES, Hardware
from funrl.cost.tracing.tool_trace import read_trace
from funrl.cost.tracing.tracer import Tracer
from funrl.mesh import launch
from funrl.mesh import mesh as meshes
from funrl.mesh.mesh import AXES, Mesh, single
from funrl.mesh.rules import COMPUTE, layouts
from funrl.models import Model
from funrl.models.fsdp import layers_of_group
from funrl.models.lora import decoder_of
from funrl.models.vision.config import VisionLanguageConfig
from funrl.models.vision.model import VISION
from funrl.models.weight_dtypes import weight_dtype
from funrl.tasks.embedded import embedded_task
from funrl.trainer.jobs.job import Job
from funrl.trainer.jobs.sharding import stored_rules
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.scorers import has_environment
from funrl.trainer.settings.settings import Settings
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.micro import sizes_of, token_ranks
from funrl.trainer.steps.parts import Parts

TURNS = 2  # a call of a tool and an answer, unless a flag or the embedded task gives it
TURN_TOKENS = 64  # of a tool's answer with the template around it, in the same case


class Turns(NamedTuple):
    """Turns of an episode; without an environment there is one reply.

    Attributes:
      replies: of the policy.
      context: tokens that come before each reply but the first.
      seconds: of the environment before each reply but the first, in the mean.
      waits: seconds of the environment in whole episodes, in ascending order, by a trace; (): all have the same.
    """

    replies: int = 1
    context: int = 0
    seconds: float = 0.0
    waits: tuple[float, ...] = ()

    @property
    def gaps(self) -> int:
        """Times that an episode waits for its environment."""
        return self.replies - 1

    @property
    def episode_waits(self) -> tuple[float, ...]:
        """Seconds of the environment in whole episodes, each as likely as another."""
        return self.waits or (self.gaps * self.seconds,)

    def row_tokens(self, prompt: int, reply: int) -> int:
        """Tokens of an episode."""
        return prompt + self.replies * reply + self.gaps * self.context

    def begins(self, prompt: int, reply: int) -> list[int]:
        """The place of each reply's first token."""
        return [prompt + turn * (reply + self.context) for turn in range(self.replies)]


ONE_REPLY = Turns()


class EpisodeCost(NamedTuple):
    """Episodes of one rank of the engine.

    Attributes:
      turns: what is assumed of each.
      tokens: of an episode's row.
      running: episodes that generate at a time.
      open: unfinished episodes at a time: running ones, and as many that wait as keep the engine busy and as
        --max_waiting lets begin.
      read: tokens of later turns that the engine reads, without recomputed ones.
      recomputed: tokens whose pages were evicted while their episode waited.
      waited: seconds in which every unfinished episode waits for its environment.
      overlapped: other seconds of environments: an episode waits, others generate.
      cache: bytes of the pages of waiting episodes.
    """

    turns: Turns
    tokens: int
    running: int
    open: int
    read: int
    recomputed: int
    waited: float
    overlapped: float
    cache: float


def turns_of(settings: Settings) -> Turns:
    """The turns that flags, a trace and the embedded task give, else defaults.

    Raises:
      SettingsError: there are more than --episode_turns.
    """
    if not has_environment(settings):
        return ONE_REPLY
    own = settings.environments.env is None and settings.examples.prompts is None
    turns, context = embedded_task(settings.examples.task).turns if own else (TURNS, TURN_TOKENS)
    assumed = settings.estimate
    most = settings.environments.episode_turns
    if (assumed.assume_turns or 1) > most:
        raise SettingsError(
            f"--assume_turns={assumed.assume_turns} is more than --episode_turns={most}; raise that one"
        )
    trace = [] if assumed.tool_trace is None else read_trace(Path(assumed.tool_trace))
    traced = max((episode.replies for episode in trace), default=0)
    if traced > most:
        raise SettingsError(
            f"--tool_trace={assumed.tool_trace}: an episode of {traced} replies, more than --episode_turns={most}; "
            "raise that one"
        )
    turns = traced or turns
    waits = tuple(sorted(episode.seconds for episode in trace))
    replies = assumed.assume_turns or min(turns, most)
    context = context if assumed.assume_turn_tokens is None else assumed.assume_turn_tokens
    seconds = assumed.assume_tool_seconds or 0.0
    if waits:
        seconds = sum(waits) / len(waits) / max(1, replies - 1)
    return Turns(replies, context, seconds, waits)


Counted = TypeVar("Counted")
FieldShapes = Mapping[str, tuple[torch.Size, torch.dtype]]  # name of a field -> its shape per token and its dtype
# Messages of layers of one kind to trace, of a decoder and of a tower; those of deeper models are extrapolated from a
# trace with one more. With fewer than three, no layer is between one whose weights are being sent and one whose
# gradients are.
DEPTH = 3
FURTHER = 3  # messages that are traced besides, where fewer traces suffice then
# collectives that send messages from rank to rank instead of around rings
MOVE = "move_rows"
RESHARD = "reshard"
MOVES = ("move_rows", "move_rows_again")  # phases: before the rows are scored, and before further passes over them
TRACED = 2  # maximum number of traced micro-batches: the second is the first to add to an existing gradient


class Estimate(NamedTuple):
    """Cost of one step for one rank.

    Attributes:
      job: the estimated job.
      roles: its roles.
      step: description of a step.
      tokens: tokens of a row.
      phases: costs by name of the phase, in the order of a step.
      axes: name of each process group -> its mesh axes, such as "tp8", and their sizes.
      parameters: parameters of the trained model.
      trained: number of trained parameters.
      useful: for each phase that packs rows, the useful share of the FLOPs that all ranks could do, where micro-batch i
        begins when all ranks have finished i - 1.
      left_out: descriptions of what is not counted.
      episodes: the turns of episodes, an `EpisodeCost`; None: there is one reply.
    """

    job: Job
    roles: tuple[str, ...]
    step: str
    tokens: int
    phases: dict[str, Costs]
    axes: dict[str, tuple[str, tuple[str, ...], dict[str, int]]]
    parameters: int
    trained: int
    useful: dict[str, float]
    left_out: tuple[str, ...]
    episodes: EpisodeCost | None = None


class Trace(NamedTuple):
    """A traced step without generation.

    Attributes:
      phases: costs of each phase.
      resting: bytes of models and optimizers, by kind.
      row_bytes: bytes of a row of the scored batch.
      token_bytes: bytes that a move sends per token, before and after scoring.
      written: for each field that roles write, its shape per token and its dtype.
    """

    phases: dict[str, Costs]
    resting: dict[str, float]
    row_bytes: float
    token_bytes: tuple[int, int]
    written: FieldShapes


def stage_of(phase: str) -> str:
    """generate, score, update or reshard; verification of the engine's weights belongs to reshard."""
    if phase in ("generate", "reshard"):
        return phase
    if phase == "verify":
        return "reshard"
    return "update" if phase.startswith(UPDATES) or phase == MOVES[1] else "score"


@contextlib.contextmanager
def pretended(sizes: dict[str, int], node: int | None = None) -> Iterator[Mesh]:
    """The first rank of a mesh whose other ranks do not exist; messages to them are discarded.

    Args:
      node: ranks of each node; None: all are on one.
    """
    world = Mesh(sizes).world
    if world == 1:
        yield single()
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield launch.with_expert_nodes(Mesh(sizes, 0, torch.device("cpu"), launch.groups(sizes)), node)
    finally:
        dist.destroy_process_group()


def axes_of(mesh: Mesh) -> dict[str, tuple[str, tuple[str, ...], dict[str, int]]]:
    """`Estimate.axes` of one mesh."""
    shorts = {axis: short for short, axis in meshes.SHORT.items()}
    return {
        name: (",".join(f"{shorts[a]}{own.sizes[a]}" for a in axes), axes, own.sizes)
        for own in (*(mesh.nodes or ()), mesh)
        for axes, name in own.groups.items()
    }


def communicators(phases: Mapping[str, Costs], meshes_of_run: Sequence[Mesh], pool: str) -> int:
    """Number of NCCL's communicators that a rank has: of all processes, and of the groups that exchange something.

    Args:
      phases: of the rank.
      meshes_of_run: that it is in.
      pool: as in `RankWork`; ranks of pools have one of their pool, and one for weights that go between pools.
    """
    names = {group for costs in phases.values() for op, group in costs.traffic if op != RESHARD}
    names |= {mesh.group_name(AXES) for mesh in meshes_of_run if mesh.world > 1}
    return len(names) + 2 * bool(pool)


def with_communicators(
    phases: Mapping[str, Costs], meshes_of_run: Sequence[Mesh], pool: str, hardware: Hardware
) -> dict[str, Costs]:
    """Phases with the memory of the communicators that a rank holds throughout; the arguments are those above."""
    if not hardware.accelerator or hardware.tpu:
        return dict(phases)
    nbytes = float(COMMUNICATOR_BYTES * communicators(phases, meshes_of_run, pool))
    return {name: plus(costs, {"communicators": nbytes}) for name, costs in phases.items()} if nbytes else dict(phases)


def tracer_of(job: Job, parts: Parts, hardware: Hardware, real: bool = False) -> Tracer:
    """A tracer that recognizes the weights of the roles; if `real`, it also computes."""
    stored = [role.placed.stored for role in parts.roles.values()]
    shapes = {tuple(layout.local_shape(0)) for layout in trees.leaves(stored)}
    shapes |= {tuple(x.shape) for x in trees.leaves(job.model.shapes)} if job.settings.sharding.fsdp else set()
    vocabulary = next((layout.local_shape(0)[0] for layout in trees.leaves(unembedding(parts))), 0)
    return Tracer(hardware, shapes, (vocabulary,), real=real)


def unembedding(parts: Parts) -> trees.Tree:
    """The initial layout of the unembedding."""
    placed = parts.begin
    return () if placed.model.unembed is None else placed.model.unembed(placed.stored)


def make_weights(tracer: Tracer, stored: trees.Tree, dtype: torch.dtype) -> trees.Tree:
    """Make rank 0's weights in these layouts and hold them."""
    params = trees.map_named(lambda name, x: tracer.empty(x.local_shape(0), weight_dtype(name, dtype)), stored)
    tracer.hold_tree(params, "weights")
    return params


class Phased(Protocol):
    """Dispatch mode that counts by phase."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Count what runs inside the context as a phase."""
        ...


class TracedClock(Clock):
    """A clock that marks the phases of a tracer."""

    def __init__(self, tracer: Phased) -> None:
        super().__init__()
        self.tracer = tracer

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Count what runs inside the context as the phase `name` of the tracer."""
        return self.tracer.phase(name)


class Depth(NamedTuple):
    """Layers of a model.

    Attributes:
      layers: numbers of those of the decoder.
      tower, whole: how many its vision tower has, and how many of them see whole pictures; 0: it has none.
    """

    layers: tuple[int, ...]
    tower: int = 0
    whole: int = 0


class TracedLayers(NamedTuple):
    """Layers of a model to trace, from which its cost is extrapolated.

    Attributes:
      few: those of the first trace.
      more: for each further trace its layers, which have one message more, and the number of messages like that one.
    """

    few: Depth
    more: tuple[tuple[Depth, float], ...]


def traced_layers(model: Model, joined: int = 1, tower_joined: int = 1) -> TracedLayers:
    """The layers of a model to trace: at least `DEPTH` messages of each kind, and one more where a kind has more.

    Kinds with the same number of remaining messages have one more together.

    Args:
      joined, tower_joined: layers per message, of the decoder and of the tower; the last message has fewer if they do
        not divide.
    """
    messages = _messages_by_kind(model, joined)
    tower, whole = tower_layers(model)
    few_tower, few_whole = _shallow_tower(model, tower_joined)
    rests = _near_rests([max(0, len(same) - DEPTH) for same in messages] + [(tower - few_tower) // tower_joined])
    *of_kinds, of_tower = rests
    begun = [same[: len(same) - rest] for same, rest in zip(messages, of_kinds, strict=True)]
    few = Depth(_in_order(*begun), tower - of_tower * tower_joined, few_whole)
    more = []
    for rest in sorted(set(rests) - {0}):
        added = [same[-rest : len(same) - rest + 1] for same, n in zip(messages, of_kinds, strict=True) if n == rest]
        further = tower_joined if of_tower == rest else 0
        more.append((Depth(_in_order(*begun, *added), few.tower + further, few_whole), float(rest)))
    if whole > few_whole:
        more.append((few._replace(whole=few_whole + 1), float(whole - few_whole)))
    return TracedLayers(few, tuple(more))


def _messages_by_kind(model: Model, joined: int) -> list[list[tuple[int, ...]]]:
    """Layers of each message of the decoder, for each kind of messages."""
    layers = range(model.config.layers)
    kinds = model.abilities.layer_kinds or (0,) * len(layers)
    of_kind: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for message in (tuple(layers[i : i + joined]) for i in layers[::joined]):
        of_kind.setdefault(tuple(kinds[i] for i in message), []).append(message)
    return list(of_kind.values())


def _in_order(*messages: list[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(layer for same in messages for message in same for layer in message))


def _near_rests(rests: list[int]) -> list[int]:
    """Numbers of messages to extrapolate, lowered by at most `FURTHER` where that saves a trace."""
    lowered: dict[int, int] = {}
    least = 0
    for rest in sorted(set(rests)):
        if rest > least + FURTHER:
            least = rest
        lowered[rest] = least
    return [lowered[rest] for rest in rests]


def tower_layers(model: Model) -> tuple[int, int]:
    """Layers of a model's vision tower, and how many of them see whole pictures; 0, 0: it has none."""
    config = model.config
    return (config.tower.layers, len(config.tower.whole_layers)) if isinstance(config, VisionLanguageConfig) else (0, 0)


def _shallow_tower(model: Model, joined: int) -> tuple[int, int]:
    """The least numbers of layers of a tower that stand for its own, as `tower_layers`.

    Layers that give states to the decoder stay, as do one that sees whole pictures and `DEPTH` messages of others, of
    which two see windows only.
    """
    if not isinstance(model.config, VisionLanguageConfig):
        return 0, 0
    tower = model.config.tower
    deep = tower.form.deep_layers
    whole = min(len(tower.whole_layers), len(set(deep) & set(tower.whole_layers)) + 1)
    if len(tower.whole_layers) - whole <= FURTHER:
        whole = len(tower.whole_layers)
    least = -(-(whole + 2) // joined) if whole else 0
    few = max(DEPTH + -(-len(deep) // joined), least) * joined + tower.layers % joined
    windowed = tower.layers - len(tower.whole_layers)
    enough = windowed >= few + joined - whole and tower.layers > few + joined
    return (few, whole) if enough else tower_layers(model)


def of_all_layers(
    job: Job, costs: Callable[[Job], dict[str, Counted]], extrapolate: Callable[..., Counted] = along
) -> dict[str, Counted]:
    """Costs by phase of a job, extrapolated from shallower ones.

    Args:
      job: at full depth.
      costs: job -> costs by phase.
      extrapolate: as `along`, for costs of another form.
    """
    models = {job.directories.get(name): model for name, model in job.models.items()}
    traced = {path: traced_layers(model, *_together(job, path)) for path, model in models.items()}
    few = {path: layers.few for path, layers in traced.items()}
    low = costs(_with_depths(job, few))
    # A separate model, such as a teacher, has layers of its own; where as many are left, they go with the others.
    deeper: dict[tuple[int, float], dict[str | None, Depth]] = {}
    for path, chosen in traced.items():
        for number, (layers, count) in enumerate(chosen.more):
            deeper.setdefault((number, count), {})[path] = layers
    ways = [(costs(_with_depths(job, few | depths)), count) for (_, count), depths in deeper.items()]
    return {name: extrapolate(first, *((way[name], n) for way, n in ways)) for name, first in low.items()}


def _together(job: Job, path: str | None) -> tuple[int, int]:
    """Layers of a directory's models that are gathered in one message: of the decoder, and of the tower.

    Args:
      path: of the directory; None: of models that start as the job's.
    """
    counts = [(1, 1)]
    for name, model in job.models.items():
        if job.directories.get(name) == path and job.settings.sharding.fsdp:
            tables = stored_rules(job.settings, name), COMPUTE
            stored, compute = (decoder_of(layouts(model.shapes, model.axes, table, job.sizes)) for table in tables)
            itemsize = job.dtype.itemsize
            of_tower = 1
            if VISION in stored:
                of_tower = layers_of_group(stored[VISION]["layers"], compute[VISION]["layers"], itemsize)
            counts.append((layers_of_group(stored["layers"], compute["layers"], itemsize), of_tower))
    return max(layers for layers, _ in counts), max(layers for _, layers in counts)


def _with_depths(job: Job, depths: Mapping[str | None, Depth]) -> Job:
    """The job with some of the layers of its models.

    Args:
      depths: by directory of the model; None: for models that start as the job's.
    """

    def shallow(model: Model, path: str | None) -> Model:
        return of_depth(model, depths[path])

    models = {id(job.model): shallow(job.model, None)}  # roles with equal models keep sharing one
    for name, model in job.models.items():
        models[id(model)] = models.get(id(model)) or shallow(model, job.directories.get(name))
    return dataclasses.replace(
        job, model=models[id(job.model)], models={name: models[id(x)] for name, x in job.models.items()}
    )


def of_depth(model: Model, depth: Depth) -> Model:
    """The model with some of its layers."""
    if len(depth.layers) < model.config.layers:
        model = model.of_layers(depth.layers)
    if (depth.tower, depth.whole) == tower_layers(model):
        return model
    assert isinstance(model.config, VisionLanguageConfig)
    tower = model.config.tower.with_last_layers(depth.tower, depth.whole)
    return model.rebuild(dataclasses.replace(model.config, tower=tower))


def rows_of_a_pass(token_budget: int, width: int, mesh: Mesh) -> int:
    """Rows of `width` tokens in one forward pass."""
    return sizes_of(np.array([width]), token_budget, token_ranks(mesh))[0][-1] // width


def first_rows(rows: int, piece: int) -> int:
    """The fewest rows that `at_rows` traces."""
    return rows if rows <= TRACED * piece else (TRACED - 1) * piece


def at_rows(trace_at: Callable[[int], Trace], rows: int, piece: int) -> dict[str, Costs]:
    """Costs of `rows` rows of this rank in micro-batches of `piece`; later ones cost as much as the second.

    Args:
      trace_at: the trace of a number of rows of this rank.
    """
    few = trace_at(first_rows(rows, piece)).phases
    if rows <= TRACED * piece:
        return few
    more = trace_at(TRACED * piece).phases
    phases = {}
    steps = rows / piece - (TRACED - 1)
    for name, costs in few.items():
        phases[name] = along(costs, (more[name], steps))
        if name.startswith(UPDATES):  # the gradient is held from the second on, but only once
            phases[name].peaks = {
                part: held | {"batch": phases[name].peaks.get(part, held).get("batch", 0.0)}
                for part, held in more[name].peaks.items()
            }
    return phases
