"""Rows in a dry run, each of the greatest length: their fields and pictures, the rank that holds each, moves, packing.

All rows have the same pictures, before their text. Those of the embedded task are its own; others are as large as the
bounds on pixels and the length of a prompt allow.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.algos.objectives import OBJECTIVE, OBJECTIVE_FIELD
from funrl.algos.reading import reads
from funrl.batch import TOKEN_INT, Batch, as_dict, declare
from funrl.compiled_kernels.varlen_attention import segment_bounds
from funrl.cost.tracing.costs import UPDATES, Costs, Traffic, add_traffic, plus, times
from funrl.cost.tracing.estimate import MOVE, MOVES, FieldShapes, turns_of
from funrl.data.conversations import Text
from funrl.data.packing import Packing, RowCost, lockstep_work
from funrl.data.pictures import with_picture_form
from funrl.data.processors.form import PictureForm
from funrl.data.prompts import encode
from funrl.data.supervised import TEXT_FIELDS, TextExample, text_batch
from funrl.fields import KEPT_FIELDS, SOURCE_FIELDS
from funrl.kinds import OwnedLines
from funrl.mesh.mesh import Mesh
from funrl.mesh.rows import move_traffic
from funrl.models import Model, Placed
from funrl.models.model import Inputs, ModelConfig
from funrl.models.vision.config import CHANNELS, TowerConfig, VisionLanguageConfig
from funrl.models.vision.grids import Grid, picture_patches, picture_tokens, smallest_grid
from funrl.models.vision.inputs import (
    GRIDS,
    PATCHES,
    Pictures,
    grids_of,
    split_pictures,
    with_pictures,
)
from funrl.role_kinds import SCORING_ROLES
from funrl.rollout.requests import Request
from funrl.tasks.embedded import embedded_task
from funrl.trainer import loop, phases
from funrl.trainer.jobs.datasets import embedded_texts
from funrl.trainer.jobs.demonstrations import learns_from_demonstrations
from funrl.trainer.jobs.job import Job, RLJob, TextJob
from funrl.trainer.jobs.prepare import form_of_pictures
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.scorers import has_environment
from funrl.trainer.settings.settings import Settings, check_needs, scoring_budget
from funrl.trainer.sources.completion_scores import reading_ranks
from funrl.trainer.sources.generation import generating_ranks
from funrl.trainer.steps.micro import Epoch, pack_in_place, plan_epoch, row_cost, token_ranks
from funrl.trainer.steps.parts import GeneratingParts, Parts
from funrl.trainer.steps.step_rows import Rows, rows_of

TASK_PROMPTS = 64  # of the embedded task that are read
MOVED_COPIES = 4  # of its rows that a rank holds in a move: those before, those after, and what it sends and receives


class TaskText(NamedTuple):
    """Tokens of a prompt or text of the embedded task, and what it owns."""

    tokens: int
    owned: OwnedLines | None


def task_texts(settings: Settings, config: ModelConfig, kind: str | None) -> tuple[TaskText, ...]:
    """Prompts or texts of the embedded task.

    Args:
      config: of the model, which may see pictures.
      kind: of texts; None: prompts.
    """
    form = form_of_pictures(settings, config)
    if kind is None:
        return _task_prompts(settings.examples.task, form)
    tokenizer = with_picture_form(embedded_task(settings.examples.task).tokenizer(), form)
    texts = embedded_texts(settings, kind, tokenizer)
    examples = (*texts.examples, *texts.heldout)
    return tuple(
        TaskText(len(text.tokens), own)
        for x in examples
        for text, own in itertools.zip_longest(x.texts, x.owned, fillvalue=None)
        if text is not None
    )


@functools.lru_cache(maxsize=8)
def _task_prompts(task: str, form: PictureForm | None) -> tuple[TaskText, ...]:
    embedded = embedded_task(task)
    tokenizer = with_picture_form(embedded.tokenizer(), form)
    examples = [encode(prompt, tokenizer) for prompt in embedded.heldout_prompts(TASK_PROMPTS)]
    return tuple(TaskText(len(x.tokens), x.owned) for x in examples)


def reads_task(settings: Settings, kind: str | None) -> bool:
    """True if the prompts or texts are those of the embedded task, for its own model."""
    own = [settings.models.model, settings.examples.data]
    if kind is None:
        own = [settings.models.model, settings.examples.prompts, settings.environments.env]
    return all(x is None for x in own)


def row_grids(job: Job, tokens: int) -> tuple[Grid, ...]:
    """Height and width in patches of each picture of a row; (): it has none.

    Args:
      tokens: of a prompt or text.

    Raises:
      SettingsError: --assume_pictures does not go with the model or the texts, or the pictures do not fit.
    """
    settings = job.settings
    count = settings.estimate.assume_pictures
    form = form_of_pictures(settings, job.model.config)
    kind = job.task.kind if isinstance(job, TextJob) else None
    if form is None or kind not in (None, "demonstrations"):
        check_needs(settings, pictures=form, picture_rows=False)
        return ()
    if count is None and reads_task(settings, kind):
        owned = [x.owned for x in task_texts(settings, job.model.config, kind) if x.owned is not None]
        largest = max(owned, key=lambda x: len(x.values[PATCHES]), default=None)
        grids = () if largest is None else grids_of(largest.values[GRIDS])
    else:
        grids = _largest_grids(form, 1 if count is None else count, tokens)
    if len(leading_tokens(form.tower, grids)) >= tokens + (kind is None):
        flag = "prompt_tokens" if kind is None else "text_tokens"
        raise SettingsError(
            f"--{flag}={tokens}: {len(grids)} pictures take {len(leading_tokens(form.tower, grids)):,} tokens or more; "
            f"give a larger --{flag}, or fewer with --assume_pictures"
        )
    return grids


def _largest_grids(form: PictureForm, count: int, tokens: int) -> tuple[Grid, ...]:
    """Pictures of equal size, as large as the form and the tokens of a row allow.

    Where the smallest ones do not fit either, these.
    """
    tower = form.tower
    if tower.layout.tiles is not None:
        return _largest_tiled(tower, count, tokens)
    least = max(1, math.ceil(form.min_pixels / form.factor**2))
    around = len(leading_tokens(tower, ((tower.merge, 0),)))
    room = (tokens - 1) // max(count, 1) - around
    most = max(least, min(form.max_pixels // form.factor**2, room))
    sides = [(height, min(most // height, 2 * height)) for height in range(1, math.isqrt(most) + 1)]
    height, width = max(sides, key=lambda side: (math.prod(side), side[0]))
    return ((height * tower.merge, width * tower.merge),) * count


def _largest_tiled(tower: TowerConfig, count: int, tokens: int) -> tuple[Grid, ...]:
    """A picture that fills a canvas, as large as the tokens of a row allow; several are their overviews."""
    tiles = tower.layout.tiles
    assert tiles is not None
    whole = [(rows * tiles.pixels, columns * tiles.pixels) for rows, columns in tiles.canvases]
    fitting = [grid for grid in whole if len(leading_tokens(tower, (grid,))) < tokens]
    if count == 1 and fitting:
        return (max(fitting, key=lambda grid: picture_patches(grid, tower)),)
    return (smallest_grid(tower),) * count


def leading_tokens(tower: TowerConfig, grids: tuple[Grid, ...]) -> list[int]:
    """Token ids of pictures, each with the tokens around it."""
    return [
        token
        for grid in grids
        for token in (tower.begin, *[tower.placeholder] * picture_tokens(grid, tower), tower.end)
        if token is not None
    ]


def picture_tokens_of(job: Job, tokens: int) -> int:
    """Tokens with which a row begins that pictures take; `tokens` are of a prompt or text."""
    grids = row_grids(job, tokens)
    return len(leading_tokens(_tower(job.model), grids)) if grids else 0


def patches_in(grids: tuple[Grid, ...], tower: TowerConfig) -> int:
    """Number of patches of some pictures."""
    return sum(picture_patches(grid, tower) for grid in grids)


def pictures_text(job: Job, tokens: int) -> str:
    """Describe the pictures of a row in words; "": it has none."""
    grids = row_grids(job, tokens)
    patches = patches_in(grids, _tower(job.model)) if grids else 0
    return f" with {len(grids)} picture{'s' * (len(grids) > 1)} of {patches:,} patches" if grids else ""


DIGEST_BYTES = 3 * 8.0  # of a row and version


def owned_bytes(job: Job, tokens: int) -> tuple[float, ...]:
    """Bytes of each ragged field of a row; (): rows have none.

    Args:
      tokens: of a prompt or text.
    """
    grids = row_grids(job, tokens)
    kept = (*_kept_bytes(job), *_digest_bytes(job))
    if not grids or job.model.owned is None:
        return kept
    lines = {PATCHES: patches_in(grids, _tower(job.model)), GRIDS: len(grids)}
    return *kept, *(float(lines[name] * x[:1].nbytes) for name, x in _one_line(job.model).items())


def _kept_bytes(job: Job) -> tuple[float, ...]:
    """Bytes of the ids that could be sampled at all tokens of a row's replies: a bound, which --top_k makes small."""
    if not isinstance(job, RLJob) or not job.settings.sampling.mask_replay:
        return ()
    vocab = job.model.config.vocab
    tokens = turns_of(job.settings).replies * job.sampling.max_new_tokens
    return (float(TOKEN_INT.itemsize * tokens * min(job.sampling.top_k or vocab, vocab)),)


def _digest_bytes(job: Job) -> tuple[float, ...]:
    """Bytes of the digest of the weights that sampled a row, with its first token and version: of one version."""
    return (DIGEST_BYTES,) if isinstance(job, RLJob) and job.settings.engines.verify_sync else ()


def _tower(model: Model) -> TowerConfig:
    assert isinstance(model.config, VisionLanguageConfig)
    return model.config.tower


def _one_line(model: Model) -> dict[str, torch.Tensor]:
    """A line of each ragged field."""
    assert model.owned is not None
    return {name: x.new_zeros(1, *x.shape[1:]) for name, x in model.owned.none.items()}


def with_owned_bytes(phases: dict[str, Costs], nbytes: float, local: int) -> dict[str, Costs]:
    """Add the ragged fields of a rank's rows to phases, in which the traced rows have none.

    Args:
      nbytes: of these fields of a row.
      local: rows of a rank.
    """
    again = MOVES[1] in phases  # the step keeps the rows as scored
    copies = dict.fromkeys(MOVES, MOVED_COPIES) | {name: 1 + again for name in phases if name.startswith(UPDATES)}
    copies["generate"] = 0  # prompts are on the host
    return {name: plus(costs, {"batch": copies.get(name, 1) * local * nbytes}) for name, costs in phases.items()}


def with_assumed_pictures(job: Job, parts: Parts, tokens: int) -> Parts:
    """Parts whose models see pictures in all rows, although the rows have no such fields.

    What absent ranks would send is unknown, sizes of pictures included; so each forward pass makes up its own.

    Args:
      job: of the run.
      parts: of the run.
      tokens: of a prompt or text.
    """
    grids = row_grids(job, tokens)
    if job.model.owned is None or (not grids and isinstance(job, RLJob)):  # texts have the fields, if only empty ones
        return parts
    roles = {name: role._replace(placed=_assuming(role.placed, grids)) for name, role in parts.roles.items()}
    return dataclasses.replace(parts, roles=roles)


def _assuming(placed: Placed, grids: tuple[Grid, ...]) -> Placed:
    model = placed.model
    assert model.owned is not None
    read = functools.partial(assumed_inputs, _tower(model), grids)
    return dataclasses.replace(placed, model=dataclasses.replace(model, owned=model.owned._replace(read=read)))


def assumed_inputs(tower: TowerConfig, grids: tuple[Grid, ...], batch: Batch, inputs: Inputs) -> Inputs:
    """`OwnedValues.read` of a micro-batch whose rows all begin with the same pictures.

    Args:
      tower: of the model.
      grids: of the pictures of a row.
      batch: packed.
      inputs: of it.
    """
    tokens_BT = inputs.tokens
    bounds = segment_bounds(batch.offsets)
    assert bounds is not None and inputs.positions is not None and inputs.segments is not None
    of_rows = grids * bounds.segments
    if not of_rows:  # as `picture_inputs`
        of_rows = (smallest_grid(tower),)
        pictures = Pictures(unread_patches(tower, patches_in(of_rows, tower), tokens_BT.device), of_rows)
        return inputs._replace(pictures=pictures, inserted_at=torch.full_like(tokens_BT, -1))
    if tokens_BT.device.type == "cpu":
        first_M = torch.tensor([*leading_tokens(tower, grids), -1])
        first_BT = first_M[inputs.positions.clamp(max=len(first_M) - 1)]
        is_picture_BT = (first_BT == tower.placeholder) & (inputs.segments > 0)
        tokens_BT = torch.where(is_picture_BT, tower.placeholder, 0 if tower.placeholder else 1)
    patches = patches_in(of_rows, tower)
    pictures = Pictures(unread_patches(tower, patches, tokens_BT.device), of_rows)
    return with_pictures(tower, inputs._replace(tokens=tokens_BT), pictures)._replace(tokens=inputs.tokens)


def assumed_prompt(job: RLJob, tokens: int) -> Request | None:
    """A request for a completion of a prompt that begins with its pictures; None: it has none.

    Args:
      job: of the run.
      tokens: of a prompt.
    """
    grids = row_grids(job, tokens)
    if not grids:
        return None
    tower = _tower(job.model)
    first = leading_tokens(tower, grids)
    text = [0 if tower.placeholder else 1] * (tokens - len(first))
    patches = patches_in(grids, tower)
    values = {PATCHES: unread_patches(tower, patches, torch.device("cpu")), GRIDS: torch.tensor(grids)}
    return Request(0, [*first, *text], job.sampling, seed=0, owned=OwnedLines(values, 0))


def encode_pictures(model: Model, params: trees.Tree, request: Request) -> int:
    """Compute the states of a prompt with pictures as an engine does; return their bytes."""
    assert model.owned is not None and request.owned is not None
    return sum(
        model.owned.encode(params, lines).nbytes for lines in split_pictures(_tower(model), request.owned.values)
    )


def with_unread_pictures(model: Model) -> Model:
    """The model, whose pictures of a prompt differ though they have no numbers: an engine computes each."""
    if model.owned is None:
        return model

    def apart(values: Mapping[str, torch.Tensor]) -> list[OwnedLines]:
        return [OwnedLines(lines, number) for number, lines in enumerate(split_pictures(_tower(model), values))]

    return dataclasses.replace(model, owned=model.owned._replace(apart=apart))


def unread_patches(tower: TowerConfig, count: int, device: torch.device) -> torch.Tensor:
    """Patches [count, 3, patch, patch] uint8; a tracer computes no numbers of them, for it takes them for floats."""
    shape = (count, CHANNELS, tower.patch, tower.patch)
    if device.type == "meta":
        return torch.empty(shape, dtype=torch.uint8, device=device)
    return torch.empty(shape, dtype=torch.float8_e5m2, device=device).to(torch.uint8)


def full_rows(job: Job, parts: Parts, tokens: int, local: int) -> Rows:
    """Rows of the greatest length as the source makes them, on the generator ranks.

    Args:
      job: of the run.
      parts: of the run.
      tokens: of a prompt or text.
      local: rows of each rank that trains.
    """
    mesh = parts.generator.mesh if isinstance(parts, GeneratingParts) else parts.mesh
    count = local * parts.mesh.size(parts.mesh.row_axes)
    owner = generating_ranks(count, 1, mesh.size(mesh.row_axes))
    own = int((owner == mesh.index(mesh.row_axes)).sum())
    return rows_of(full_batch(job, tokens, count, own), owner, mesh)


def rows_to_read(job: Job, rows: Rows) -> Rows:
    """The rows as a reward model reads them, all of the greatest length."""
    length = int(rows.lengths.max())
    text = Text(rows.batch.tokens.new_ones(length).tolist(), [False] * length)
    example = text_batch([TextExample((text,))], job.pad if job.pad != 1 else 0, reader=True)
    here = trees.map(lambda x: x.expand(len(rows.own), *x.shape[1:]).clone(), example)
    return rows_of(here._replace(length=example.length.expand(len(rows.owner)).clone()), rows.owner, rows.mesh)


def score_or_fill(
    trainer: phases.Trainer,
    state: loop.State,
    rows: Rows,
    written: FieldShapes | None,
    empty: Callable[..., Tensor],
) -> tuple[Rows, loop.State]:
    """The rows with the fields that roles write, and with advantages; the state after them.

    Args:
      trainer, state: of the step.
      rows: as the trainer scores them.
      written: fields to make without scoring, by `written_fields`; None: score.
      empty: (shape, dtype=dtype) -> a tensor without numbers.
    """
    if written is not None:
        silent = {name: role._replace(writes={}) for name, role in trainer.parts.roles.items()}
        trainer = trainer._replace(parts=dataclasses.replace(trainer.parts, roles=silent))
        shape = rows.batch.tokens.shape
        rows = rows.with_fields(
            **{name: empty((*shape, *more), dtype=dtype) for name, (more, dtype) in written.items()}
        )
    rows, state, _ = phases.score_batch(trainer, state, rows)
    return rows, state


def written_fields(parts: Parts, rows: Rows) -> FieldShapes:
    """The fields of scored rows that roles have written."""
    fields = as_dict(rows.batch)
    names = [name for role in parts.roles.values() for name in role.writes]
    return {name: (fields[name].shape[2:], fields[name].dtype) for name in names}


def full_batch(job: Job, tokens: int, rows: int, own: int | None = None) -> Batch:
    """Batch of rows of the greatest length, as the source makes it.

    Args:
      job: of the run.
      tokens: of a prompt or text.
      rows: of all ranks.
      own: rows whose tokens are on this rank; None: all.
    """
    own = rows if own is None else own
    if isinstance(job, TextJob):
        first = max(1, picture_tokens_of(job, tokens))  # the first of all tokens that is trained
        text = Text([i % job.model.config.vocab for i in range(tokens)], [i >= first for i in range(tokens)])
        needed = reads(job.algorithm)
        margin = 0.0 if "margin" in needed.required | needed.optional else None
        labels = {"ratings": (1.0,), "steps": (1.0,) * (tokens - first)}.get(job.task.kind, ())
        example = TextExample((text,) * len(TEXT_FIELDS[job.task.kind]), margin, labels)
        row = text_batch([example], job.pad, job.main_role in SCORING_ROLES, steps=job.task.kind == "steps")
        if margin is not None:
            row = row._replace(margin=row.margin.to(job.master))
        batch = trees.map(lambda x: x.expand(own, *x.shape[1:]).clone(), row)
        other = torch.arange(rows) % 2 == 1 if "mismatched" in needed.required else None
        return batch._replace(length=row.length.expand(rows).clone(), mismatched=other)
    turns = turns_of(job.settings)
    reply = job.sampling.max_new_tokens
    length = turns.row_tokens(tokens, reply)
    begins = turns.begins(tokens, reply)
    shape = (own, -(-length // 8) * 8)
    wide = torch.promote_types(job.dtype, torch.float32)
    choices = job.model.abilities.choices
    at_T = torch.arange(shape[1])
    written_T = torch.stack([(at_T >= begin) & (at_T < begin + reply) for begin in begins]).any(0)
    score_B = torch.arange(rows).remainder(2).to(wide)
    batch = Batch(
        tokens=torch.arange(math.prod(shape), dtype=TOKEN_INT).remainder(job.model.config.vocab).view(shape),
        mask=written_T.expand(shape).clone(),
        length=torch.full((rows,), length, dtype=torch.int64),
        group=torch.arange(rows) // job.sampling.samples,
        score=score_B,
        scores=score_B[:, None],
        truncated=torch.ones(rows, dtype=torch.bool),
        rollout_logp=torch.zeros(shape, dtype=wide),
        routes=torch.zeros(*shape, choices, dtype=TOKEN_INT) if job.settings.routers.router_replay else None,
        prompt_value=score_B if "prompt_value" in reads(job.algorithm).required else None,
        greedy_score=score_B if "greedy_score" in reads(job.algorithm).required else None,
        demonstration=torch.zeros(shape, dtype=torch.bool) if learns_from_demonstrations(job.algorithm) else None,
        **(_episode_fields(job, shape, begins, wide) if has_environment(job.settings) else {}),
    )
    if objectives := len(job.algorithm.objectives):
        batch = declare(batch, {OBJECTIVE: OBJECTIVE_FIELD})._replace(objective=batch.group % objectives)
    if sources := len(job.role_sources):
        batch = declare(batch, SOURCE_FIELDS)._replace(data_source=batch.group % sources)
    if not job.settings.sampling.mask_replay:
        return batch
    return declare(batch, KEPT_FIELDS)._replace(kept_counts=torch.zeros(shape, dtype=TOKEN_INT))


def _episode_fields(job: Job, shape: tuple[int, int], begins: list[int], dtype: torch.dtype) -> dict[str, Tensor]:
    """The fields per token that rows of episodes have besides, as far as the algorithm reads them.

    Args:
      shape: [own rows, T].
      begins: of each reply.
    """
    read = reads(job.algorithm)
    turn_T = (torch.arange(shape[1])[:, None] >= torch.tensor(begins[1:])).sum(1)
    fields = {
        "turn": turn_T.to(TOKEN_INT).expand(shape).clone(),
        "token_reward": torch.zeros(shape, dtype=dtype),
    }
    return {name: x for name, x in fields.items() if name in read.required | read.optional}


WORD = 8  # bytes per number of the row table when it is sent


class Holders(NamedTuple):
    """The rank that holds each row in one phase.

    Attributes:
      owner: [B] index of the rank over the row axes of `mesh`.
      mesh: mesh of the ranks.
    """

    owner: np.ndarray
    mesh: Mesh


class RowPlan(NamedTuple):
    """Rows of a step.

    Attributes:
      lengths: [B] tokens of each row.
      before: ranks that hold the rows from generation to scoring.
      epochs: passes over them.
    """

    lengths: np.ndarray
    before: list[Holders]
    epochs: list[Epoch]

    @property
    def again(self) -> list[Holders]:
        """Ranks that hold the rows while they are scored, then in each epoch."""
        return [self.before[-1], *(Holders(epoch.to, self.before[-1].mesh) for epoch in self.epochs)]


def row_plan(job: Job, parts: Parts, width: int, step: int) -> RowPlan:
    """Plan the rows of a step, each of `width` tokens."""
    settings = job.settings
    mesh = parts.mesh
    samples = rows_of_step(job) // settings.run.batch_prompts
    source = parts.generator.mesh if isinstance(parts, GeneratingParts) else mesh
    lengths = np.full(settings.run.batch_prompts * samples, width)
    group = torch.arange(len(lengths)) // samples
    generating = generating_ranks(settings.run.batch_prompts, samples, source.size(source.row_axes))
    before = [Holders(generating, source)]
    for name in SCORING_ROLES if isinstance(job, RLJob) else ():
        if name in parts.roles:
            before.append(Holders(reading_ranks(lengths, parts.roles[name], scoring_budget(settings)), mesh))
    before.append(Holders(phases.scoring_ranks(job, parts, lengths, group, step)[0], mesh))
    plan = phases.update_plan(job, parts, step)
    epochs = [plan_epoch(lengths, mesh, plan, number) for number in range(plan.epochs)]
    return RowPlan(lengths, before, epochs)


def rows_of_step(job: Job) -> int:
    """Number of rows of a step: completions of all prompts, or texts with KTO's mismatched ones."""
    samples = job.sampling.samples if isinstance(job, RLJob) else 1 + ("mismatched" in reads(job.algorithm).required)
    return job.settings.run.batch_prompts * samples


def with_moves(
    job: Job,
    plan: RowPlan,
    phases: Mapping[str, Costs],
    token_bytes: tuple[int, int],
    owned_bytes: Sequence[float] = (),
) -> dict[str, Costs]:
    """Replace the traced traffic of moves by that of the moves of all rows.

    Args:
      phases: costs by phase; those of a move are of one move.
      token_bytes: bytes that a move sends per token, before and after scoring.
      owned_bytes: of each ragged field of a row.
    """
    first = _traffic_before(job, plan, token_bytes[0], owned_bytes)
    again = _moves(plan.lengths, plan.again, token_bytes[1], owned_bytes)
    traffic: dict[str, Any] = dict(zip(MOVES, (first, again), strict=True))
    often: dict[str, int] = dict(zip(MOVES, (_count(plan.before), _count(plan.again)), strict=True))
    return {
        name: dataclasses.replace(times(costs, often[name]), traffic=traffic[name]) if name in traffic else costs
        for name, costs in phases.items()
        if traffic.get(name, True)
    }


def _traffic_before(
    job: Job, plan: RowPlan, token_bytes: int, owned_bytes: Sequence[float]
) -> dict[tuple[str, str], Traffic]:
    """Traffic of the busiest rank before scoring: the shared row table, and the moves of rows.

    Args:
      token_bytes: bytes sent per token.
      owned_bytes: as in `with_moves`.
    """
    source = plan.before[0].mesh
    table = {}
    axes = (*source.row_axes, "tensor") if isinstance(job, RLJob) else source.row_axes  # those that know of completions
    if source.size(axes) > 1:
        nbytes = float(WORD * table_columns(job) * len(plan.lengths))
        table["all_reduce", source.group_name(axes)] = Traffic(1, nbytes)
    for key, (count, nbytes) in _moves(plan.lengths, plan.before, token_bytes, owned_bytes).items():
        add_traffic(table, key, count, nbytes)
    return table


def table_columns(job: Job) -> int:
    """Columns of the table that all ranks share about each row.

    A text has its length; a completion also its end, its rewards, and whether they failed.
    """
    if not isinstance(job, RLJob):
        return 1
    functions = job.settings.rewards.reward.split(",") if job.settings.rewards.reward else []
    return (
        2 + (len(functions) or job.settings.examples.prompts is None) + (job.settings.rewards.on_reward_error != "stop")
    )


def _count(stops: Sequence[Holders]) -> int:
    """Number of moves between consecutive holders."""
    return sum(a.mesh.sizes != b.mesh.sizes or not np.array_equal(a.owner, b.owner) for a, b in pairwise(stops))


def _moves(
    lengths: np.ndarray, stops: Sequence[Holders], token_bytes: int, owned_bytes: Sequence[float]
) -> dict[tuple[str, str], Traffic]:
    """Traffic of the moves between consecutive holders.

    Tokens travel together and each ragged field by itself, once all ranks know how much of it each row has.
    """
    traffic: dict[tuple[str, str], Traffic] = {}
    for (owner, source), (to, target) in pairwise(stops):
        same = source.sizes == target.sizes
        axes = target.row_axes if same else tuple(target.sizes)
        sent = move_traffic(lengths, owner, source, to, target)
        tokens = int(np.maximum(sent.sent, sent.received).max())
        if tokens:
            key = MOVE, target.group_name(axes)
            rows = tokens / int(lengths[0])
            messages = int(sent.messages.max()) * (1 + len(owned_bytes))
            add_traffic(traffic, key, messages, tokens * token_bytes + rows * sum(owned_bytes))
            if owned_bytes and source.size(source.row_axes) > 1:
                table = float(WORD * len(owned_bytes) * len(lengths))
                add_traffic(traffic, ("all_reduce", source.group_name(source.row_axes)), 1, table)
    return traffic


def useful_shares(job: Job, parts: Parts, plan: RowPlan) -> dict[str, float]:
    """Useful share of the FLOPs that all ranks could do, for each phase that packs rows."""
    mesh = parts.mesh
    budget = scoring_budget(job.settings)
    shares = {}
    ranks = mesh.size(mesh.row_axes)
    scores = plan.before[-1].owner
    for name, role in parts.roles.items():
        cost = row_cost(role.placed)
        read = plan.lengths
        owner = scores
        if name in SCORING_ROLES and isinstance(job, RLJob):  # one more token, which it reads
            readers = [reader for reader in SCORING_ROLES if reader in parts.roles]
            read = plan.lengths + 1
            owner = plan.before[1 + readers.index(name)].owner
        if role.writes or read is not plan.lengths:
            packing = pack_in_place(read, owner, ranks, budget, cost, token_ranks(mesh))
            shares[f"score_{name}"] = _share([(packing, read)], ranks, cost)
        if role.loss is not None:
            parts_of = [
                (packing, plan.lengths[part])
                for epoch in plan.epochs
                for part, packing in zip(epoch.parts, epoch.packings, strict=True)
            ]
            shares[UPDATES + name] = _share(parts_of, ranks, cost)
    return shares


def _share(packings: Sequence[tuple[Packing, np.ndarray]], ranks: int, cost: RowCost) -> float:
    useful = sum(int(cost.work(lengths).sum()) for _, lengths in packings)
    return useful / (ranks * sum(lockstep_work(packing, lengths, cost) for packing, lengths in packings))
