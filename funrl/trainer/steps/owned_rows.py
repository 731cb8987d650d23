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


def with_owned(rows: Rows, owned: Sequence[OwnedLines | None], like: Mapping[str, Tensor] | None) -> Rows:
    """The rows with the values that they own.

    Args:
      rows: some rows.
      owned: values of each of this rank's own rows; None: none.
      like: lines of any row of the run, as those of `OwnedValues.none`; None: no row owns any.
    """
    if like is None:
        return rows
    return rows.declaring(owned_fields(like)).with_fields(**owned_lines_of(owned, like, rows.batch.tokens.device))


def owned_lines_of(
    owned: Sequence[OwnedLines | None], like: Mapping[str, Tensor], device: torch.device
) -> dict[str, Ragged]:
    """The fields of rows that own these values; `like` as of `with_owned`."""
    lines = {name: [x[:0] if own is None else own.values[name] for own in owned] for name, x in like.items()}
    values = {name: ragged(lines[name], x[:0]) for name, x in like.items()}
    return {name: Ragged(*(x.to(device) for x in value)) for name, value in values.items()}


def ragged(lines: Sequence[Tensor], none: Tensor) -> Ragged:
    """Rows that own these lines.

    Args:
      lines: of each row.
      none: the lines of a row without any.
    """
    offsets = torch.tensor([0, *map(len, lines)], dtype=torch.int64).cumsum(0)
    return Ragged(torch.cat([none, *lines]), offsets)
