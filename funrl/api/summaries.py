"""Short texts of results for notebooks: of a run and its model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from funrl.trainer.loop import Outcome

TRAINED = ("reward/mean", "train/loss", "actor/pg_loss")  # the first one that a run has is shown
EVALUATED = ("eval/reward", "eval/accuracy", "eval/loss")


def run_summary(run_dir: str, metrics: Sequence[Mapping[str, float]], outcome: Outcome) -> str:
    """A run in one line: its number of steps, and first and last values of training and held-out metrics."""
    parts = [f"{len(metrics)} step{'s' * (len(metrics) != 1)}"]
    for name in [name for name in TRAINED if metrics and name in metrics[-1]][:1]:
        parts.append(f"{name} {_change([row[name] for row in metrics if name in row])}")
    for name in EVALUATED:
        ends = [row[name] for row in (outcome.first, outcome.last) if name in row]
        parts += [f"{name} {_change(ends)}"] if ends else []
    if outcome.error is not None:
        parts.append(f"failed: {_shortened(outcome.error)}")
    elif outcome.stopped is not None:
        parts.append(f"stopped after step {outcome.stopped}")
    return f"<Run {run_dir}: {', '.join(parts)}>"


def model_summary(directory: Path) -> str:
    """A model in one line: its directory, its architecture and the size of its weights."""
    try:
        kind = str(json.loads((directory / "config.json").read_text()).get("model_type"))
    except (OSError, ValueError):
        return f"<TrainedModel {directory}: nothing is saved there>"
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return f"<TrainedModel {directory}: {kind}, {size / 1e6:.3g} MB of weights>"


def _change(values: Sequence[float]) -> str:
    """The first and the last of several numbers."""
    return f"{values[0]:.4g}" if len(values) == 1 else f"{values[0]:.4g} -> {values[-1]:.4g}"


def _shortened(text: str) -> str:
    """The first line of a text, of at most 100 characters."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 100 else line[:97] + "..."
