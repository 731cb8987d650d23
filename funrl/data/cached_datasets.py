"""Datasets of the local Hugging Face cache, by their names. Nothing is downloaded.

A name is `gsm8k`, `openai/gsm8k`, `openai/gsm8k:test` (a split) or `openai/gsm8k:main:test` (a configuration and a
split). What `datasets.load_dataset` has prepared is mapped as it is; of what was downloaded only (`hf download`), the
library prepares its copy first.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from funrl.data.json_lines import DataError

TRAIN = "train"  # the split where a name has none
_NAME = re.compile(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?::([\w.-]+))?(?::([\w.-]+))?")


class DatasetName(NamedTuple):
    """A dataset, one of its configurations (None: it has only one) and one of its splits."""

    name: str
    config: str | None
    split: str


def cached_name(text: str) -> DatasetName | None:
    """The dataset that a text names; None where the text is no name, or the local cache has no such dataset."""
    match = _NAME.fullmatch(text)
    if match is None or not looks_like_name(text):
        return None
    name, *rest = match.groups()
    given = [part for part in rest if part is not None]
    found = DatasetName(name, given[0] if len(given) == 2 else None, given[-1] if given else TRAIN)
    return found if any(_prepared(name)) or _snapshot(name) is not None else None


def looks_like_name(text: str) -> bool:
    """True for what could be the name of a dataset, and is no path."""
    return _NAME.fullmatch(text) is not None and not Path(text).exists()


def load_cached(wanted: DatasetName) -> Any:
    """A `datasets.Dataset`, mapped into memory.

    Raises:
      DataError: the cache does not have this split, or has several configurations and none is named.
      ImportError: datasets is not installed.
    """
    library, snapshot = importlib.import_module("datasets"), _snapshot(wanted.name)
    folders = list(_prepared(wanted.name))
    if not folders and snapshot is not None:
        return _loaded_snapshot(library.load_dataset, wanted, snapshot)
    configs = sorted({folder.parent.parent.name for folder in folders})
    if wanted.config is None and len(configs) > 1:
        names = ", ".join(f"{wanted.name}:{config}:{wanted.split}" for config in configs)
        raise DataError(f"{wanted.name}: the local cache has several configurations of it; give one of {names}")
    folders = [folder for folder in folders if wanted.config in (None, folder.parent.parent.name)]
    if not folders:
        raise DataError(f"{wanted.name}: the local cache has no configuration {wanted.config!r}, but {configs}")
    folder = max(folders, key=lambda one: (one / "dataset_info.json").stat().st_mtime_ns)
    splits = json.loads((folder / "dataset_info.json").read_text()).get("splits") or {}
    if wanted.split not in splits:
        own = wanted.name if wanted.config is None else f"{wanted.name}:{wanted.config}"
        names = ", ".join(f"{own}:{split}" for split in splits)
        raise DataError(f"{wanted.name}: the local cache has no split {wanted.split!r} of it; give one of {names}")
    files = [file for pattern in ("", "-*-of-*") for file in folder.glob(f"*-{wanted.split}{pattern}.arrow")]
    found = library.concatenate_datasets([library.Dataset.from_file(str(file)) for file in sorted(files)])
    if len(found) != (rows := splits[wanted.split]["num_examples"]):
        raise DataError(f"{folder}: {len(found)} of {rows} rows are there; load it anew with datasets")
    return found


def _loaded_snapshot(load: Callable[..., Any], wanted: DatasetName, snapshot: Path) -> Any:
    """A downloaded repository as the library reads it."""
    try:
        return load(str(snapshot), wanted.config, split=wanted.split)
    except (ValueError, OSError) as error:
        said = " ".join(str(error).split())
        raise DataError(f"{wanted.name}: datasets cannot read its copy in {snapshot}: {said}") from error


def _prepared(name: str) -> Iterator[Path]:
    """Directories of arrow files: below the cache NAMESPACE___NAME/CONFIG/VERSION/HASH."""
    owner, _, own = name.rpartition("/")
    for folder in _cache("HF_DATASETS_CACHE", "datasets").glob("*"):
        there, _, called = folder.name.rpartition("___")
        if there == owner and _plain(called) == _plain(own):
            yield from (file.parent for file in folder.glob("*/*/*/dataset_info.json"))


def _snapshot(name: str) -> Path | None:
    """The downloaded files of a dataset's repository."""
    folder = _cache("HF_HUB_CACHE", "hub") / f"datasets--{name.replace('/', '--')}"
    try:
        current = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    return current if current.is_dir() else None


def _plain(name: str) -> str:
    """A name without what the library changes in it: GSM8kMain becomes gsm8k_main."""
    return name.replace("_", "").lower()


def has_cached_model(name: str) -> bool:
    """True if the local cache may have a model of this name."""
    older = os.environ.get("HUGGINGFACE_HUB_CACHE")  # the variable's name before
    return older is not None or (_cache("HF_HUB_CACHE", "hub") / f"models--{name.replace('/', '--')}").is_dir()


def _cache(variable: str, folder: str) -> Path:
    """A folder of the Hugging Face cache, as its libraries find it."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    found = os.environ.get(variable) or Path(os.environ.get("HF_HOME") or home) / folder
    return Path(found).expanduser()
