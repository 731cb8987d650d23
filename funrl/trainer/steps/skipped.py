"""Updates that are not made because a loss or a gradient is not finite: what caused it, and when that is enough.

The cause is looked for in the rows of the update, on every rank: first a number that is not finite or whose square
overflows float32, in the order in which fields are written (a reward before the advantage that is made of it), then a
term of the loss that gives a number that is not finite, then a micro-batch whose loss is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.algos.guarding import defined_at, name_of
from funrl.algos.masks import where_masked
from funrl.algos.metrics import PieceError
from funrl.batch import Batch, as_dict, kind_of, recording, schema_of
from funrl.mesh.collectives import gather_objects
from funrl.mesh.mesh import Mesh
from funrl.role_kinds import ROLES
from funrl.trainer.steps.roles import Role
from funrl.trainer.steps.step import NotFiniteError, present_scores
from funrl.trainer.steps.step_rows import Rows

FAR = 20.0  # nats from the old policy; a ratio of it is 5e8
USUAL = (
    "the numbers that go into it are of usual size, so its formula does it: a root, a logarithm or a division at 0, "
    "such as a ratio of 1 that is subtracted from 1; clamp its argument above 0. A lower --lr does not prevent it"
)
STEEP = (
    "no number that went in is odd: a lower --lr or --max_grad_norm, or a warm-up (--lr_warmup_steps), may prevent it"
)


def odd_term(
    role: Role, params: trees.Tree, micro_batches: Iterable[Batch], frozen: Mapping[str, trees.Tree] | None = None
) -> str | None:
    """Words for the first term whose loss, or its derivative by what the model gives, is not finite here; None: none.

    Collective: all ranks run all micro-batches, without a gradient through the model.

    Args:
      params, micro_batches, frozen: as in `train_step`.
    """
    text = None
    for rows in micro_batches:
        with torch.no_grad(), role.placed.expert_rows.bounded():  # as many rows as the update had
            present = present_scores(params, role, rows, frozen)
        text = text or _odd_term_of(role, present.x, present.rows)
    return text


def _odd_term_of(role: Role, x_BT: Tensor, rows: Batch) -> str | None:
    """Words for the first odd term of a loss on one micro-batch."""
    if not where_masked(x_BT, rows.mask).isfinite().all():
        return f"the {role.prefix}'s own numbers are not finite before any term of its loss: {STEEP}"
    x_BT = x_BT.detach().requires_grad_()
    written = {name: x.detach() for name in ("entropy", "topk_logp", "divergence") if (x := rows.get(name)) is not None}
    leaves = [x_BT, *(x.requires_grad_() for x in written.values() if x.is_floating_point())]
    watched, seen = recording(rows._replace(**written))
    try:
        with torch.enable_grad():
            role.training_loss.numerators(x_BT, watched)
    except PieceError:
        return None
    for term, place, _, loss_BT in seen.terms:
        odd_BT = ~where_masked(loss_BT, rows.mask).isfinite()
        what = "loss"
        if not odd_BT.any() and loss_BT.requires_grad:
            total = where_masked(loss_BT, rows.mask).sum()
            grads = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
            odd = [~grad.isfinite() for grad in grads if grad is not None]
            odd_BT = torch.stack([x if x.dim() == 2 else x.any(-1) for x in odd]).any(0)
            what = "derivative, where its loss is finite,"
        if odd_BT.any():
            of = f", {place} that are added" if place else ""
            advice = _advice(x_BT.detach()[odd_BT], rows, odd_BT)
            count = int(odd_BT.sum())
            where = f"{count} token{'s' * (count > 1)}"
            return f"term {name_of(term)}{of}{defined_at(term)}: its {what} is not finite on {where}; {advice}"
    return None


def _advice(x_N: Tensor, rows: Batch, odd_BT: Tensor) -> str:
    """The cause by the size of what went in, on the odd tokens."""
    old_BT = rows.get("old_logp")
    far = old_BT is not None and bool(((x_N - old_BT[odd_BT]).abs() > FAR).any())
    return STEEP if far else USUAL


LARGE = 1e15  # what is smaller has squares that float32 can add up
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
      text: for the user.
    """

    order: int
    rank: int
    text: str


def cause_in(rows: Rows, part: np.ndarray, suspects: Sequence[int] | str, rank: int) -> Cause:
    """The cause that this rank sees.

    Args:
      part: numbers of the rows of the update.
      suspects: words for an odd term of the loss, or numbers of rows whose micro-batch has a loss that is not finite.
    """
    own = np.sort(part[rows.owner[part] == rows.index])
    fields = as_dict(rows.batch)
    schema = schema_of(rows.batch)
    for order, (name, field) in enumerate(schema.items()):
        x = fields.get(name)
        if x is None or field.kind.spread is None or not x.is_floating_point():
            continue
        values = _values(rows, name, x, own)
        odd = ~(values.abs() < LARGE)
        if odd.any():
            row = own[int(odd.any(1).nonzero()[0])]
            advice = ADVICE.get(field.writer, f"the {field.writer} gave it; its weights may be damaged")
            return Cause(order, rank, f"{name} of row {row}, on rank {rank}, is {values[odd][0].item():.3g}: {advice}")
    if isinstance(suspects, str):
        return Cause(len(schema), rank, suspects)
    if suspects:
        some = ", ".join(map(str, suspects[:4]))
        return Cause(len(schema) + 1, rank, f"the loss on rows {some} of rank {rank} is not finite; {STEEP}")
    return Cause(len(schema) + 2, rank, STEEP)


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

    def __init__(self, most: int, mesh: Mesh, note: Callable[[str], None]) -> None:
        """Begin without a skipped update.

        Args:
          most: updates of a role in a row, at which `check` raises.
          mesh: whose ranks see the cause.
          note: shows a line.
        """
        self.most = most
        self.mesh = mesh
        self.note = note
        self.in_a_row: dict[str, int] = {}
        self.count = 0
        self.problem: str | None = None

    def made(self, name: str) -> None:
        """Take note of an update of a role that was made."""
        self.in_a_row[name] = 0

    def add(
        self, error: NotFiniteError, name: str, rows: Rows, part: np.ndarray, suspects: Sequence[int] | str
    ) -> None:
        """Take note of an update that was not made. Collective.

        Args:
          name: of the role.
          rows, part, suspects: as in `cause_in`.
        """
        mine = cause_in(rows, part, suspects, self.mesh.rank)
        cause = min(gather_objects(mine, self.mesh))
        self.count += 1
        row = self.in_a_row[name] = self.in_a_row.get(name, 0) + 1
        self.note(f"{error}: the update is left out. {cause.text}")
        if row >= self.most and self.problem is None:
            self.problem = f"{error}; {row} in a row were left out (--max_skipped={self.most}). {cause.text}"

    def take(self) -> dict[str, float]:
        """The metric of a step: updates that were not made."""
        count, self.count = self.count, 0
        return {"update/skipped": float(count)}

    def check(self) -> None:
        """Raise NotFiniteError where too many in a row were not made, on every rank."""
        if self.problem is not None:
            raise NotFiniteError(self.problem)
