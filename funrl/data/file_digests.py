"""Digests of files and of Python objects that read a bounded amount of data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from funrl.data.cached_datasets import cached_files, cached_name

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
