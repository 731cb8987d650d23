"""Datasets in the local Hugging Face cache, by name, and digests of data. Nothing is downloaded.

A name is `gsm8k`, `openai/gsm8k`, `openai/gsm8k:test` (a split) or `openai/gsm8k:main:test` (a configuration and a
split). What `datasets.load_dataset` has prepared is memory-mapped; a dataset that was only downloaded (`hf download`)
is prepared by the library first.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TRAIN = "train"  # the split if a name has none
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:[\w.-]+){0,2}")


class DatasetName(NamedTuple):
    """A dataset, its configuration (None: it has only one) and its split."""

    name: str
    config: str | None
    split: str


def cached_name(text: str) -> DatasetName | None:
    """The dataset that a text names; None if the text is not a name, or the local cache lacks the dataset."""
    if not looks_like_name(text):
        return None
    name, *parts = text.split(":")
    wanted = DatasetName(name, parts[0] if len(parts) == 2 else None, parts[-1] if parts else TRAIN)
    return wanted if _prepared(wanted) or _snapshot(name) is not None else None


def looks_like_name(text: str) -> bool:
    """True for a text that could be the name of a dataset and is not a path."""
    return _NAME.fullmatch(text) is not None and not Path(text).exists()


def load_cached(library: Any, wanted: DatasetName) -> Any:
    """Load a memory-mapped `datasets.Dataset`.

    Args:
      library: the module `datasets` in offline mode.
      wanted: a dataset in the cache.

    Raises:
      ValueError: the cache lacks the split or configuration, or has several and none is named.
    """
    path = wanted.name if _prepared(wanted) else str(_snapshot(wanted.name))
    cache = str(_cache("HF_DATASETS_CACHE", "datasets"))
    try:
        dataset = library.load_dataset(path, wanted.config, split=wanted.split, cache_dir=cache)
    except ValueError as error:
        raise ValueError(f"{error}; write NAME:SPLIT or NAME:CONFIGURATION:SPLIT") from None
    rows = dataset.info.splits[wanted.split].num_examples
    if len(dataset) != rows:
        raise ValueError(f"only {len(dataset)} of {rows} rows are there; load it again with datasets")
    return dataset


def cached_files(wanted: DatasetName) -> dict[str, Path]:
    """Files of a dataset by name: the prepared files of its split, or those of the downloaded repository."""
    pattern = f"{wanted.config or '*'}/*/*/*-{wanted.split}*.arrow"
    folders = _prepared(wanted)
    files = {str(file.relative_to(folder)): file for folder in folders for file in folder.glob(pattern)}
    snapshot = _snapshot(wanted.name)
    if folders or snapshot is None:
        return files
    return {file.relative_to(snapshot).as_posix(): file for file in snapshot.rglob("*") if file.is_file()}


def _prepared(wanted: DatasetName) -> list[Path]:
    """Directories NAMESPACE___NAME of a prepared dataset, which hold CONFIG/VERSION/HASH."""
    name = _plain(wanted.name.replace("/", "___"))
    folders = _cache("HF_DATASETS_CACHE", "datasets").glob("*")
    return [folder for folder in folders if _plain(folder.name) == name and any(folder.glob("*/*/*/dataset_info.json"))]


def _snapshot(name: str) -> Path | None:
    """The downloaded files of a dataset's repository."""
    folder = _cache("HF_HUB_CACHE", "hub") / f"datasets--{name.replace('/', '--')}"
    try:
        current = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    return current if current.is_dir() else None


def _plain(name: str) -> str:
    """A name in the library's normal form: GSM8kMain becomes gsm8k_main; ___ after a namespace stays."""
    return re.sub("(?<!_)_(?!_)", "", name).lower()


def has_cached_model(name: str) -> bool:
    """True if the local cache may have a model of this name."""
    older = os.environ.get("HUGGINGFACE_HUB_CACHE")  # older name of the variable
    return older is not None or (_cache("HF_HUB_CACHE", "hub") / f"models--{name.replace('/', '--')}").is_dir()


def _cache(variable: str, folder: str) -> Path:
    """A folder of the Hugging Face cache, as its libraries find it."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get(variable) or Path(os.environ.get("HF_HOME") or home) / folder).expanduser()


WHOLE_BYTES = 64 << 20  # files up to this size are read whole
BLOCKS = 256  # of larger files, evenly spaced, including the first and the last
BLOCK_BYTES = 256 << 10
RECORDS_READ = 1024  # of a list, spaced in the same way
PARTIAL = "sampled-"  # prefix of a digest of partially read data


def short_digest(data: bytes) -> str:
    """First 16 hexadecimal digits of the SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


def files_digest(files: Mapping[str, Path]) -> str:
    """Digest of files: of their names, sizes and bytes, or of blocks of large files.

    Up to `WHOLE_BYTES`, all bytes are read; beyond, `BLOCKS` blocks, such as 64 MiB of 30 GB. A change that keeps every
    size and touches no block goes unnoticed.

    Args:
      files: paths by name; the names are part of the digest. Use "" for a single file.

    Raises:
      OSError: a file cannot be read.
    """
    sizes = {name: files[name].stat().st_size for name in sorted(files)}
    total = sum(sizes.values())
    digest = hashlib.sha256(json.dumps(sizes).encode())
    if total <= WHOLE_BYTES:
        for name in sizes:
            digest.update(files[name].read_bytes())
        return digest.hexdigest()[:16]
    starts = iter([(total - BLOCK_BYTES) * number // (BLOCKS - 1) for number in range(BLOCKS)])
    start = next(starts)
    before = 0
    for name, size in sizes.items():
        with open(files[name], "rb") as file:
            while start is not None and start < before + size:
                file.seek(start - before)
                digest.update(file.read(BLOCK_BYTES))
                start = next(starts, None)
        before += size
    return f"{PARTIAL}{digest.hexdigest()[:16]}"


def data_digest(path: str) -> str:
    """Digest of a data file, a directory, or a dataset in the local Hugging Face cache; "" for anything else.

    Raises:
      OSError: as in `files_digest`.
    """
    place = Path(path)
    if place.is_file():
        return files_digest({"": place})
    if place.is_dir():
        return files_digest({str(file.relative_to(place)): file for file in place.rglob("*") if file.is_file()})
    wanted = cached_name(path)
    return "" if wanted is None else files_digest(cached_files(wanted))


def records_digest(records: Sequence[object]) -> str:
    """Digest of a list of records: of all, or of evenly spaced ones if there are more than `RECORDS_READ`.

    Objects that JSON cannot represent contribute only their type.
    """
    count = len(records)
    places: Sequence[int] = range(count)
    if count > RECORDS_READ:
        places = [(count - 1) * number // (RECORDS_READ - 1) for number in range(RECORDS_READ)]
    texts = [json.dumps(records[place], sort_keys=True, default=_type_name) for place in places]
    return f"{PARTIAL if count > RECORDS_READ else ''}{short_digest(json.dumps([count, *texts]).encode())}"


def _type_name(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__
