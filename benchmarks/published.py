"""The dry run beside published figures of other projects: seconds of a step and memory of a device, row by row.

`published.json` has the rows with their sources. A row becomes the flags of a run of funrl, and the dry run's update
stands beside the published step. A row is fitted if the first byte of the SHA-256 of its name is even; constants are
fitted on these rows and judged on the others.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

DATA = Path(__file__).parent / "published.json"
GIB = 2.0**30


class Row(NamedTuple):
    """A published figure.

    Attributes:
      name: of the row, unique.
      source: key of the table of sources.
      model: key of the table of configurations.
      hardware: name of the devices, of `HARDWARE` or of the file's table.
      gpus: number of devices.
      tokens: of a packed row; where completions are sampled, of the longest one.
      mean_tokens: of a row with its completion, where they are sampled.
      rows: of a device's micro-batch.
      micro_batches: of a step on each device, or group of devices that share rows.
      mesh: of the devices.
      remat: as --remat.
      program: key of `PROGRAMS`.
      flags: further flags.
      seconds: of a step; None: not published.
      gib: of a device; None: not published.
      reason: why funrl cannot express it; "": it can.
    """

    name: str
    source: str
    model: str
    hardware: str
    gpus: int
    tokens: int = 0
    mean_tokens: int | None = None
    rows: int = 1
    micro_batches: int = 1
    mesh: str = "dp1"
    remat: str = "full"
    program: str = "default"
    flags: dict[str, Any] = {}
    seconds: float | None = None
    gib: float | None = None
    reason: str = ""

    @property
    def fitted(self) -> bool:
        """True if constants may be fitted on it."""
        return hashlib.sha256(self.name.encode()).digest()[0] % 2 == 0


def read_rows() -> list[Row]:
    """All rows of the file."""
    return [Row(**fields) for fields in json.loads(DATA.read_text())["rows"]]

