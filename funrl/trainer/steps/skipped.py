"""Updates that are not made because a loss or a gradient is not finite: what caused it, and when that is enough.

The cause is looked for in the rows of the update, on every rank: first a number that is not finite or whose square
overflows float32, in the order in which fields are written (a reward before the advantage that is made of it), then a
term of the loss that gives a number that is not finite, then a micro-batch whose loss is not. The rows that have it
are saved beside the run's metrics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from funrl import trees
from funrl.batch import as_dict, kind_of, schema_of
from funrl.mesh.collectives import gather_objects
from funrl.mesh.mesh import Mesh
from funrl.role_kinds import ROLES
from funrl.trainer.steps.odd_terms import STEEP
from funrl.trainer.steps.step import NotFiniteError
from funrl.trainer.steps.step_rows import Rows, own_batch

LARGE = 1e15  # what is smaller has squares that float32 can add up
FOLDER = "skipped"  # in the run's directory
# at most, of a run and of a file
MOST_FILES = 8
FILE_ROWS = 16
MOST_BYTES = 16 << 20
ADVICE = {  # by the writer of a field; a role that is not among them is an algorithm's own
    "source": "the reward function gave it; have it give numbers of usual size, such as between -1 and 1",
    "advantage": "the advantage chain made it of numbers of usual size",
    **{name: kind.advice(name) for name, kind in ROLES.items()},
    **dict.fromkeys(("trainer", "step"), STEEP),
}


class Cause(NamedTuple):
    """Cause of an update that was not made, as far as it was found; the smallest of all ranks' counts.

    Attributes:
      order: of the field in which an odd number is, or beyond all fields: a term, a micro-batch, then nothing.
      rank: that has the rows.
      rows: their numbers in the step.
      text: for the user.
    """

    order: int
    rank: int
    rows: tuple[int, ...]
    text: str


class Suspects(NamedTuple):
    """Row numbers of this rank that may have caused it.

    Attributes:
      rows: their micro-batch has a loss that is not finite, or the term.
      term: words for a term of the loss that gives a number that is not finite; None: none was found.
    """

    rows: np.ndarray
    term: str | None = None


def cause_in(rows: Rows, part: np.ndarray, suspects: Suspects, rank: int) -> Cause:
    """The cause that this rank sees.

    Args:
      part: numbers of the rows of the update.
    """
    own = np.sort(part[rows.owner[part] == rows.index])
    fields = as_dict(rows.batch)
    schema = schema_of(rows.batch)
    for order, (name, field) in enumerate(schema.items()):
        x = fields.get(name)
        if x is None or field.kind.spread is None or not x.is_floating_point():
            continue
        values = _values(rows, name, x, own)
        odd = own[_odd(values).any(1).cpu().numpy()]
        if len(odd):
            value = values[_odd(values)][0].item()
            advice = ADVICE.get(field.writer, f"the {field.writer} gave it; its weights may be damaged")
            text = f"{name} of row {odd[0]}, on rank {rank}, is {value:.3g}: {advice}"
            return Cause(order, rank, tuple(odd.tolist()), text)
    numbers = tuple(suspects.rows.tolist())
    if suspects.term is not None:
        return Cause(len(schema), rank, numbers, suspects.term)
    if numbers:
        some = ", ".join(map(str, numbers[:4]))
        text = f"the loss on rows {some} of rank {rank} is not finite; {STEEP}"
        return Cause(len(schema) + 1, rank, numbers, text)
    return Cause(len(schema) + 2, rank, tuple(own.tolist()), STEEP)


def _odd(values: Tensor) -> Tensor:
    """Mask of the numbers that are not finite or whose squares overflow."""
    return ~(values.abs() < LARGE)


def _values(rows: Rows, name: str, x: Tensor, numbers: np.ndarray) -> Tensor:
    """A field of some of this rank's rows [n, K]; 0 on tokens that do not count and where a reward does not apply."""
    if kind_of(rows.batch, name).everywhere:
        values = x[torch.from_numpy(numbers).to(x.device)]
        values = torch.where(values.isnan(), 0, values) if name == "scores" else values
    else:
        places = torch.from_numpy(rows.local(numbers)).to(x.device)
        values = x[places]
        mask = rows.batch.mask[places].to(x.device)
        values = torch.where(mask.view(*mask.shape, *(1,) * (values.ndim - mask.ndim)), values, 0)
    return values.flatten(1) if values.ndim > 1 else values[:, None]


class Skips:
    """The updates of a run that were not made: counted, explained, and ended where they are too many in a row."""

    def __init__(self, most: int, mesh: Mesh, folder: str | None, note: Callable[[str], None]) -> None:
        """Begin without a skipped update.

        Args:
          most: updates of a role in a row, at which `check` raises.
          folder: the run's checkpoints, beside which rows are saved; None: they are not.
          note: shows a line.
        """
        self.most = most
        self.mesh = mesh
        self.note = note
        self.folder = None if folder is None else Path(folder).parent / FOLDER
        self.in_a_row: dict[str, int] = {}
        self.count = 0
        self.problem = None

    def made(self, name: str) -> None:
        """Take note of an update of a role that was made."""
        self.in_a_row[name] = 0

    def add(
        self, error: NotFiniteError, what: str, name: str, rows: Rows, part: np.ndarray, suspects: Suspects
    ) -> None:
        """Take note of an update that was not made. Collective.

        Args:
          what: step and role, such as "step 3, policy".
          name: of the role.
          rows, part, suspects: as in `cause_in`.
        """
        mine = cause_in(rows, part, suspects, self.mesh.rank)
        cause = min(gather_objects(mine, self.mesh), key=lambda one: (one.order, one.rank))
        self.count += 1
        row = self.in_a_row[name] = self.in_a_row.get(name, 0) + 1
        file = self._save(what, error, cause, rows) if cause.rank == self.mesh.rank else None
        file = next((path for path in gather_objects(file, self.mesh) if path), None)
        where = f"; its rows are in {file}" if file else ""
        self.note(f"{error}: the update is left out. {cause.text}{where}")
        if row >= self.most and self.problem is None:
            self.problem = f"{error}; {row} in a row were left out (--max_skipped={self.most}). {cause.text}{where}"

    def take(self) -> dict[str, float]:
        """The metric of a step: updates that were not made."""
        count, self.count = self.count, 0
        return {"update/skipped": float(count)}

    def check(self) -> None:
        """Raise NotFiniteError where too many in a row were not made, on every rank."""
        if self.problem is not None:
            raise NotFiniteError(self.problem)

    def _save(self, what: str, error: NotFiniteError, cause: Cause, rows: Rows) -> str | None:
        """Save the rows of a cause; the file, or None where there is none, or there are enough."""
        if self.folder is None or not cause.rows:
            return None
        with contextlib.suppress(OSError, SafetensorError):  # the run continues without it
            self.folder.mkdir(parents=True, exist_ok=True)
            there = len(list(self.folder.glob("*.safetensors")))
            if there >= MOST_FILES:
                return None
            file = self.folder / f"{what.replace(', ', '-').replace(' ', '-')}-{there + 1}.safetensors"
            draft = file.with_suffix(".partial")
            facts = {"update": what, "problem": str(error), "rank": str(cause.rank), "cause": cause.text}
            save_file(dict(row_tensors(rows, np.array(cause.rows))), draft, metadata=facts)
            draft.rename(file)
            return str(file)
        return None


def row_tensors(rows: Rows, numbers: np.ndarray) -> Mapping[str, Tensor]:
    """The fields of the first of some of this rank's rows, as many as a file may have, and their numbers as "rows"."""
    size = trees.nbytes(own_batch(rows, numbers[:1]))
    numbers = numbers[: max(1, min(FILE_ROWS, MOST_BYTES // max(size, 1)))]
    chosen = trees.named(as_dict(own_batch(rows, numbers)))
    return {"rows": torch.from_numpy(numbers)} | {name: x.contiguous().cpu() for name, x in chosen}
