"""Models on disk, wherever a command takes one: a Hugging Face directory, a run, or a checkpoint of a run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from funrl.models.huggingface import directories as hf
from funrl.trainer.checkpoints.checkpoint import Recorded
from funrl.trainer.checkpoints.export import OUTLINE, checkpoint_of, export_checkpoint
from funrl.trainer.settings.declaration import SettingsError, blaming
from funrl.trainer.settings.scorers import MODEL_FLAGS, model_path
from funrl.trainer.settings.settings import Settings, flag_value, with_flags


class StoredModel(NamedTuple):
    """A model on disk.

    Attributes:
      directory: of Hugging Face; of a checkpoint, with everything but weights.
      checkpoint: that has these; None: the directory does.
      flags: of the run that the model is from; {} of any other model.
    """

    directory: str
    checkpoint: Recorded | None
    flags: Mapping[str, Any]


CHECKPOINT = re.compile(r"step-(\d+)")


def find_stored_model(model: str | Path, step: int | None = None) -> StoredModel:
    """The model of a directory, of a name in the local Hugging Face cache, or of a run.

    Args:
      model: of a run, its directory: of one that has ended the model, else the newest checkpoint; or a checkpoint of
        it, RUN/checkpoints/step-N.
      step: of the run's checkpoint.

    Raises:
      SettingsError, CheckpointError: there are none.
    """
    folder = hf.find_directory(model)
    if not folder.exists():
        raise SettingsError(f"{model}: no such directory, and no such model in the local cache")
    checkpoint = CHECKPOINT.fullmatch(folder.name)
    if checkpoint and folder.parent.name == "checkpoints" and step is None:
        return find_stored_model(folder.parent.parent, int(checkpoint[1]))
    flags = _run_flags(folder)
    if flags is None:
        if (folder / "adapter_config.json").is_file():
            raise SettingsError(f"{model} holds adapters alone; give the directory of their run, or its model/")
        if step is not None:
            raise SettingsError(f"--step={step}: {model} is not the directory of a run")
        return StoredModel(str(folder), None, {})
    if step is None and (folder / "model" / "config.json").is_file():
        return StoredModel(str(folder / "model"), None, flags)
    record = checkpoint_of(folder, step)
    return StoredModel(str(record.path.parent / OUTLINE), record, flags)


def _run_flags(folder: Path) -> Mapping[str, Any] | None:
    """The flags of a run; None where the directory is not one of a run."""
    try:
        record = json.loads((folder / "config.json").read_text())
        return record["flags"] if "experiment" in record else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def with_model_directories(settings: Settings) -> Settings:
    """The settings with Hugging Face directories instead of runs and checkpoints, wherever a flag takes a model.

    Raises:
      SettingsError, CheckpointError: a run or a checkpoint that is named has no model.
    """
    directories = {}
    for name in MODEL_FLAGS:
        path = model_path(settings, name)
        if path is not None and (_is_checkpoint(Path(path)) or _run_flags(Path(path)) is not None):
            with blaming(name):
                directory = model_directory(path, weights=not settings.estimate.dry_run)
            directories[name] = str(directory) + flag_value(settings, name).removeprefix(path)  # DIR@0.5
    return with_flags(settings, **directories)


def model_directory(run: str | Path, weights: bool = True) -> Path:
    """The Hugging Face directory of a run or a checkpoint, which is exported unless the run has ended.

    An export is made once and kept in the run's directory, as model-step-N. Processes that ask at the same time wait
    for the one that writes it.

    Args:
      run: the directory of a run, or a checkpoint of it.
      weights: whether it has weights; without, nothing is exported.

    Raises:
      SettingsError, CheckpointError: there is no model, or its checkpoint is damaged.
    """
    stored = find_stored_model(run)
    if stored.checkpoint is None or not weights:
        return Path(stored.directory)
    run_dir = stored.checkpoint.path.parents[1]
    step = stored.checkpoint.facts["step"]
    target = run_dir / f"model-step-{step}"
    with _one_at_a_time(run_dir / ".export.lock"):
        exported = target / "config.json"
        if not exported.is_file() or exported.stat().st_mtime < stored.checkpoint.path.stat().st_mtime:
            export_checkpoint(run_dir, step)
    return target


def _is_checkpoint(folder: Path) -> bool:
    return CHECKPOINT.fullmatch(folder.name) is not None and folder.parent.name == "checkpoints"


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Hold a lock on a file among the processes of this machine."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
