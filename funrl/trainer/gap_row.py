"""The token with the largest gap between engine and trainer, saved with the weights for `funrl bisect RUN --gap`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from funrl import trees
from funrl.mesh.collectives import gather_objects
from funrl.mesh.launch import ranks_per_node
from funrl.mesh.mesh import AXES, Mesh
from funrl.mesh.plan import plan
from funrl.mesh.reshard import reshard
from funrl.models.weight_dtypes import weight_dtypes
from funrl.rollout.engine import Engine
from funrl.trainer.steps.parts import GeneratingParts
from funrl.trainer.steps.step_rows import Rows
from funrl.trainer.storage.shard_server import CheckpointError, DamagedError

GAP_FOLDER = "gap"  # of a run


class GapRow(NamedTuple):
    """A token whose log-probabilities differ.

    Attributes:
      step: of the run.
      row, position: of the token among the rows of the step.
      tokens: ids of the row, up to this token.
      prompt: number of tokens before the first sampled one.
      versions: of the weights that sampled each token; () where the rows have none.
      engine, trainer: its log-probability in nats.
      temperature: of both.
    """

    step: int
    row: int
    position: int
    tokens: tuple[int, ...]
    prompt: int
    versions: tuple[int, ...]
    engine: float
    trainer: float
    temperature: float

    def __str__(self) -> str:
        return f"row {self.row}, position {self.position} (token {self.tokens[-1]})"


def worst_token(rows: Rows, step: int, temperature: float) -> GapRow | None:
    """The token with the largest gap; None where no old log-probabilities are kept. Collective."""
    batch = rows.batch
    old_logp = batch.get("old_logp")
    if old_logp is None:
        return None
    counted_bT = batch.mask
    for name in ("stale", "demonstration"):
        left_out = batch.get(name)
        counted_bT = counted_bT if left_out is None else counted_bT & ~left_out
    gap_bT = torch.where(counted_bT, (old_logp - batch.rollout_logp).abs().nan_to_num(torch.inf), -1.0)
    worst: tuple[float, GapRow | None] = (-1.0, None)
    if gap_bT.numel() and counted_bT.any():
        i, position = divmod(int(gap_bT.argmax()), gap_bT.shape[1])
        versions = batch.get("version")
        here = slice(0, position + 1)
        worst = (
            gap_bT[i, position].item(),
            GapRow(
                step,
                row=int(rows.own[i]),
                position=position,
                tokens=tuple(batch.tokens[i, here].tolist()),
                prompt=int(batch.mask[i].nonzero()[0]),
                versions=() if versions is None else tuple(versions[i, here].tolist()),
                engine=batch.rollout_logp[i, position].item(),
                trainer=old_logp[i, position].item(),
                temperature=temperature,
            ),
        )
    return max(gather_objects(worst, rows.mesh), key=lambda pair: pair[0])[1]


def save_gap(folder: Path, row: GapRow, engine: Engine) -> None:
    """Save a token's row, and the weights that the engine holds, which the ranks of one replica write. Collective.

    Args:
      folder: of the rows with a gap of a run.

    Raises:
      CheckpointError: on every rank, where one of them cannot write.
    """
    mesh = engine.weights.mesh
    draft = folder / f".step-{row.step}"
    path = folder / f"step-{row.step}"
    problem = ""
    try:
        draft.mkdir(parents=True, exist_ok=True)
        if not any(int(mesh.index(axis)) for axis in AXES if axis != "tensor"):
            shards = {name: x.cpu().contiguous() for name, x in held_shards(engine).items()}
            save_file(shards, draft / weights_file(mesh))
        if mesh.rank == 0:
            (draft / "row.json").write_text(json.dumps(row._asdict()))
    except (OSError, SafetensorError) as error:
        problem = str(error)
    if problems := [text for text in gather_objects(problem, mesh) if text]:
        raise CheckpointError(f"{path}: it cannot be written: {problems[0]}")
    if mesh.rank == 0:
        shutil.rmtree(path, ignore_errors=True)
        draft.rename(path)
    gather_objects(None, mesh)  # it is there when a rank returns


def held_shards(engine: Engine) -> dict[str, Tensor]:
    """This rank's shards of the weights that an engine computes with, by name."""
    return {name: x.detach() for name, x in engine.held_weights() if x is not None}


def newest_gap(folder: Path) -> Path | None:
    """The newest row that a run has saved; None: there is none."""
    steps = sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))
    return folder / f"step-{steps[-1]}" if steps else None


def read_gap_row(path: Path) -> GapRow:
    """A saved row.

    Raises:
      DamagedError: it cannot be read.
    """
    try:
        row = GapRow(**json.loads((path / "row.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise DamagedError(f"{path}: it cannot be read: {error}") from error
    return row._replace(tokens=tuple(row.tokens), versions=tuple(row.versions))


def read_gap_weights(path: Path, engine: Engine) -> dict[str, Tensor]:
    """This rank's shards of the engine's weights.

    Raises:
      DamagedError: they cannot be read.
    """
    file = path / weights_file(engine.weights.mesh)
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise DamagedError(f"{file}: it cannot be read: {error}") from error


def weights_file(mesh: Mesh) -> str:
    """Name of the file of a tensor rank's weights."""
    return f"weights-{int(mesh.index('tensor'))}.safetensors"


def as_trained(parts: GeneratingParts, shards: dict[str, Tensor]) -> trees.Tree:
    """The policy's weights as the trainer has them, from this rank's shards of the engine's. Collective."""
    layouts = parts.generator.engine.weights.layouts
    placed = parts.roles[parts.main_role].placed
    back = plan(layouts, placed.stored, weight_dtypes(layouts, placed.dtype), ranks_per_node())
    return reshard(trees.from_named(layouts, shards.items()), back, parts.mesh)


def shares_memory(shards: dict[str, Tensor], params: trees.Tree) -> bool:
    """True if an update in place of weights changes the engine's too."""
    own = {x.untyped_storage().data_ptr() for x in trees.leaves(params)}
    return any(x.untyped_storage().data_ptr() in own for x in shards.values())
