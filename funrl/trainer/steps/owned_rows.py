"""Values that rows own besides their tokens, such as pictures, as ragged fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from funrl.fields import Field
from funrl.kinds import OwnedLines, Ragged
from funrl.trainer.steps.step_rows import Rows


def owned_fields(values: Mapping[str, Tensor]) -> dict[str, Field]:
    """Declarations of the fields that hold values such as these."""
    dtypes = {name: "float" if x.is_floating_point() else "int" for name, x in values.items()}
    return {name: Field("ragged", "source", f"{name} that a row owns", dtype=dtypes[name]) for name in values}


def with_owned(rows: Rows, owned: Sequence[OwnedLines | None], like: OwnedLines | None) -> Rows:
    """The rows with the values that they own.

    Args:
      rows: some rows.
      owned: values of each of this rank's own rows.
      like: those of any row of the run; None: no row owns any.
    """
    if like is None:
        return rows
    device = rows.batch.tokens.device
    values = {name: ragged([x.values[name] for x in owned if x], x[:0]) for name, x in like.values.items()}
    fields = {name: Ragged(*(x.to(device) for x in value)) for name, value in values.items()}
    return rows.declaring(owned_fields(like.values)).with_fields(**fields)


def ragged(lines: Sequence[Tensor], none: Tensor) -> Ragged:
    """Rows that own these lines.

    Args:
      lines: of each row.
      none: the lines of a row without any.
    """
    offsets = torch.tensor([0, *map(len, lines)], dtype=torch.int64).cumsum(0)
    return Ragged(torch.cat([none, *lines]), offsets)
