"""Models on disk, wherever a command takes one: a Hugging Face directory, a run, or a checkpoint of a run."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.peft_files import MERGE_ADVICE, PeftAdapter, describe_adapter, is_adapter
from funrl.trainer.checkpoints.checkpoint import Recorded, step_of
from funrl.trainer.checkpoints.export import OUTLINE, checkpoint_of, export_checkpoint
from funrl.trainer.settings.checks import check_adapter_flags
from funrl.trainer.settings.declaration import SettingsError, blaming
from funrl.trainer.settings.scorers import MODEL_FLAGS, with_paths
from funrl.trainer.settings.settings import Settings, flag_value, settings_flags, with_flags


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
    if step is None and _is_checkpoint(folder):
        return find_stored_model(folder.parent.parent, step_of(folder))
    flags = _run_flags(folder)
    if flags is None:
        if is_adapter(folder):
            raise SettingsError(
                f"{model} holds adapters alone, for the base {describe_adapter(folder).base}; give the directory of "
                f"their run, or its model/, or {MERGE_ADVICE}"
            )
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

    A --model that is an adapter becomes its base and --adapter, whose rank, alpha and projections become flags.

    Raises:
      SettingsError, CheckpointError: a run or a checkpoint that is named has no model, or an adapter no base.
    """
    settings = _with_adapter(settings)
    directories = {}
    for name in MODEL_FLAGS:
        if flag_value(settings, name) is not None:
            with blaming(name):
                directories[name] = with_paths(settings, name, functools.partial(_stored_in, settings))
    return with_flags(settings, **directories)


def _stored_in(settings: Settings, path: str) -> str:
    """The directory of the model of a run or a checkpoint; other paths as they are."""
    if _is_checkpoint(Path(path)) or _run_flags(Path(path)) is not None:
        return str(model_directory(path, weights=not settings.estimate.dry_run))
    return path


def _with_adapter(settings: Settings) -> Settings:
    """The settings with the base of an adapter, and the flags of adapters that continue it."""
    given, adapter = settings.models.model, settings.adapters.adapter
    if given is not None and is_adapter(hf.find_directory(given)):
        if adapter is not None:
            raise SettingsError(f"--adapter={adapter} with --model={given}, which is an adapter too; give its base")
        with blaming("model"):
            settings = with_flags(settings, model=_base_of(given), adapter=str(hf.find_directory(given)))
    elif adapter is None:
        return settings
    folder = str(settings.adapters.adapter)
    with blaming("adapter"):
        described = describe_adapter(hf.find_directory(folder))
    settings = with_flags(settings, **_lora_flags(settings, folder, described))
    check_adapter_flags(settings)
    return settings


def _base_of(adapter: str) -> str:
    """The model that adapters stand on. Raises: SettingsError, it is not on this machine."""
    base = describe_adapter(hf.find_directory(adapter)).base
    folder = hf.find_directory(base) if base else None
    if folder is not None and folder.exists() and not is_adapter(folder):
        return base
    what = "not named in base_model_name_or_path"
    if folder is not None:
        what = "adapters too" if folder.exists() else "neither a directory here nor a model in the local cache"
    raise SettingsError(
        f"{adapter} holds adapters for the base {base or 'that they were made on'}, which is {what}; give "
        f"--model=BASE --adapter={adapter}, or {MERGE_ADVICE}"
    )


def _lora_flags(settings: Settings, adapter: str, described: PeftAdapter) -> dict[str, Any]:
    """The flags of adapters. Raises: SettingsError, one is given with another value."""
    derived = {
        "lora_rank": described.rank,
        "lora_alpha": described.alpha,
        "lora_targets": ",".join(described.modules),
    }
    for name, value in derived.items():
        given = flag_value(settings, name)
        same = set(given.split(",")) == set(value.split(",")) if isinstance(given, str) else given == value
        if given != settings_flags()[name].default and not same:
            raise SettingsError(f"--{name}={given}: the adapters in {adapter} have {value}; leave it out")
    return derived


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
    return step_of(folder) is not None and folder.parent.name == "checkpoints"


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Hold a lock on a file among the processes of this machine."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
