"""Pictures in a dry run: their sizes, and stand-ins for them in the forward passes of the trainer.

All rows have the same pictures, before their text. Those of the embedded task are its own; others are as large as the
bounds on pixels and the length of a prompt allow.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from funrl import trees
from funrl.batch import Batch
from funrl.compiled_kernels.varlen_attention import segment_bounds
from funrl.cost.tracing.costs import UPDATES, Costs, plus
from funrl.cost.tracing.estimate import MOVES
from funrl.data.pictures import with_picture_form
from funrl.data.processors.form import PictureForm
from funrl.data.prompts import encode
from funrl.kinds import OwnedLines
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
from funrl.rollout.requests import Request
from funrl.tasks.embedded import embedded_task
from funrl.trainer.jobs.datasets import embedded_texts
from funrl.trainer.jobs.job import Job, RLJob, TextJob
from funrl.trainer.jobs.prepare import form_of_pictures
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import Settings
from funrl.trainer.steps.parts import Parts

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
        if count is not None:
            what = "the model reads text only" if form is None else f"{kind} have no pictures"
            raise SettingsError(f"--assume_pictures={count}: {what}; leave it out")
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


def owned_bytes(job: Job, tokens: int) -> tuple[float, ...]:
    """Bytes of each ragged field of a row; (): rows have none.

    Args:
      tokens: of a prompt or text.
    """
    grids = row_grids(job, tokens)
    if not grids or job.model.owned is None:
        return ()
    lines = {PATCHES: patches_in(grids, _tower(job.model)), GRIDS: len(grids)}
    return tuple(float(lines[name] * x[:1].nbytes) for name, x in _one_line(job.model).items())


def _tower(model: Model) -> TowerConfig:
    assert isinstance(model.config, VisionLanguageConfig)
    return model.config.tower


def _one_line(model: Model) -> dict[str, torch.Tensor]:
    """A line of each ragged field."""
    assert model.owned is not None
    return {name: x.new_zeros(1, *x.shape[1:]) for name, x in model.owned.none.items()}


def with_owned_bytes(phases: dict[str, Costs], nbytes: float, local: int) -> dict[str, Costs]:
    """Add the pictures of a rank's rows to phases, in which the traced rows have none.

    Args:
      nbytes: of the pictures of a row.
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
