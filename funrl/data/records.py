"""Records of data in any format: JSON lines, a JSON list, CSV, parquet, a directory that `datasets` saved, or a
dataset of the local Hugging Face cache.

Of JSON lines an index is held in memory, of parquet two row groups, and what `datasets` has written is mapped; a JSON
list and a CSV file are held whole.
"""

from __future__ import annotations

import csv
import functools
import importlib
import json
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, overload

import numpy as np

from funrl.data.cached_datasets import DatasetName, cached_name, load_cached, looks_like_name
from funrl.data.json_lines import DataError, JsonLines, open_json_lines, parsed_line

FORMATS = (
    "a .jsonl, .json, .csv or .parquet file, a directory that `datasets` saved, or the name of a dataset in the local "
    "Hugging Face cache"
)
SAVED = ("dataset_dict.json", "state.json")  # one of these is in a directory that `datasets` saved
CHUNK = 1000  # rows of parquet that are Python objects at a time


class Table(Protocol):
    """Rows by their places from 0."""

    def __len__(self) -> int: ...
    def read(self, place: int) -> Any: ...
    def where(self, place: int) -> str: ...
    def rows(self) -> Iterator[Any]: ...


class Records(Sequence[Any]):
    """Records of a table, read when they are asked for. Slices and arrays of places give views.

    Attributes:
      table: the rows.
      places: [records] of the records in the table.
      nbytes: [records] bytes of each record's text, at least.
    """

    def __init__(self, table: Table, places: np.ndarray, nbytes: np.ndarray):
        self.table, self.places, self.nbytes = table, places, nbytes

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice | np.ndarray) -> Records: ...
    def __getitem__(self, index: int | slice | np.ndarray) -> Any:
        """Raises: DataError, the file has been changed since it was opened."""
        if isinstance(index, (slice, np.ndarray)):
            return Records(self.table, self.places[index], self.nbytes[index])
        return self.table.read(int(self.places[index]))

    def where(self, index: int) -> str:
        """The file and the line or row of a record."""
        return self.table.where(int(self.places[index]))


class _Held(NamedTuple):
    """Rows in memory, with the file and line of each."""

    records: list[Any]
    sources: list[str]

    def __len__(self) -> int:
        return len(self.records)

    def read(self, place: int) -> Any:
        return self.records[place]

    def where(self, place: int) -> str:
        return self.sources[place]

    def rows(self) -> Iterator[Any]:
        return iter(self.records)


class _Parquet:
    """Rows of a parquet file, of which two row groups are in memory. It holds no open file.

    Args:
      path: of the file.
    """

    def __init__(self, path: Path):
        self.path, self.stamp = path, _stamp(path)
        found = _parquet(path).metadata
        self.starts = np.cumsum([0, *(found.row_group(n).num_rows for n in range(found.num_row_groups))])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, place: int) -> Any:
        group = int(np.searchsorted(self.starts, place, side="right")) - 1
        return _row_group(self.path, self.stamp, group).slice(place - int(self.starts[group]), 1).to_pylist()[0]

    def where(self, place: int) -> str:
        return f"{self.path}, row {place + 1}"

    def rows(self) -> Iterator[Any]:
        for group in range(len(self.starts) - 1):
            for chunk in _row_group(self.path, self.stamp, group).to_batches(CHUNK):
                yield from chunk.to_pylist()


class _Mapped(NamedTuple):
    """Rows that `datasets` has written, which are mapped into memory."""

    name: str
    found: Any

    def __len__(self) -> int:
        return len(self.found)

    def read(self, place: int) -> Any:
        return self.found[place]

    def where(self, place: int) -> str:
        return f"{self.name}, row {place + 1}"

    def rows(self) -> Iterator[Any]:
        return iter(self.found)


def source_problem(path: str | Path) -> str:
    """Reason why a path cannot be a data file or the name of a dataset; "" where it may be one."""
    path = Path(path)
    if path.is_dir():
        saved = any((path / name).is_file() for name in SAVED)
        return "" if saved else "this is a directory, and not one that `datasets` saved"
    if path.is_file() or cached_name(str(path)):
        return ""
    return "no such file" + (", and no such dataset in the local cache" if looks_like_name(str(path)) else "")


def read_records(path: str | Path) -> Iterator[tuple[str, Any]]:
    """Each record of a file with its source, the file and the line or row.

    Raises:
      DataError: the file or a line of it cannot be read, or a library for its format is not installed.
    """
    table = _table(path := Path(path))
    if table is not None:
        for place, record in enumerate(table.rows()):
            yield table.where(place), record
        return
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path}, line {number}"
                    try:
                        record = parsed_line(line)
                    except ValueError as error:
                        raise DataError(f"{where}: {error}") from error
                    yield where, record
    except OSError as error:
        raise DataError(f"{path}: it cannot be read: {error.strerror}") from error


def open_records(path: str | Path, check: Callable[[Any], None]) -> JsonLines | Records:
    """Open a file to read its records later; every record is checked, and let go where the format allows it.

    Args:
      check: raises a ValueError for a record that cannot be used.

    Raises:
      DataError: the file cannot be read, or a record fails the check; the first such record is named.
    """
    table, nbytes = _table(path := Path(path)), array("q")
    if table is None:
        return open_json_lines(path, check)
    for place, record in enumerate(table.rows()):
        try:
            check(record)
        except ValueError as error:
            raise DataError(f"{table.where(place)}: {error}") from error
        nbytes.append(len(json.dumps(record, default=str)))
    return Records(table, np.arange(len(nbytes)), np.frombuffer(nbytes, np.int64))


def _table(path: Path) -> Table | None:
    """The rows of a file; None: it has JSON lines."""
    if path.is_dir():
        return _saved(path)
    if (name := cached_name(str(path))) is not None:
        return _cached(name, path)
    try:
        with open(path, "rb") as file:
            begin = file.read(256)
    except OSError as error:
        raise DataError(f"{path}: it cannot be read: {error.strerror}") from error
    if path.suffix == ".parquet" or begin.startswith(b"PAR1"):
        return _Parquet(path)
    if path.suffix == ".csv":
        return _csv_rows(path)
    if path.suffix == ".json" and begin.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return _json_rows(path)
    return None


def _json_rows(path: Path) -> _Held:
    try:
        records = parsed_line(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error
    return _Held(records, [f"{path}, row {n}" for n in range(1, len(records) + 1)])


def _csv_rows(path: Path) -> _Held:
    records, sources, line = [], [], 1
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for record in reader:
                where, line = f"{path}, line {line + 1}", reader.line_num
                if None in record or None in record.values():
                    names = reader.fieldnames or ()
                    more = "more" if None in record else "fewer"
                    raise DataError(f"{where}: it has {more} cells than the {len(names)} names of the first line")
                records.append(record)
                sources.append(where)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path}, line {line + 1}: not CSV in UTF-8: {error}; JSON lines may hold it") from error
    return _Held(records, sources)


def _cached(name: DatasetName, path: Path) -> _Mapped:
    _library("datasets", path, "a dataset of the local cache")
    return _Mapped(str(path), load_cached(name).with_format(None))


def _saved(path: Path) -> _Mapped:
    if problem := source_problem(path):
        raise DataError(f"{path}: {problem}")
    try:
        if (path / SAVED[0]).is_file():
            splits = json.loads((path / SAVED[0]).read_text())["splits"]
            if "train" not in splits:
                raise DataError(
                    f"{path}: it has no split 'train'; give one of " + ", ".join(f"{path / s}" for s in splits)
                )
            path = path / "train"
        found = _library("datasets", path, "a saved `datasets` directory").load_from_disk(str(path))
    except DataError:
        raise
    except Exception as error:  # datasets raises many kinds for a broken directory
        raise DataError(f"{path}: datasets cannot load it: {error}") from error
    return _Mapped(str(path), found.with_format(None))


def _library(name: str, path: Path, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise DataError(
            f"{path}: {what} needs {package}, which is not installed; pip install 'funrl[data]', or {package} alone"
        ) from error


def _parquet(path: Path) -> Any:
    library = _library("pyarrow.parquet", path, "parquet")
    try:
        return library.ParquetFile(path)
    except (OSError, ValueError) as error:  # what pyarrow raises are subclasses
        raise DataError(f"{path}: it cannot be read as parquet: {error}") from error


@functools.lru_cache(maxsize=2)
def _row_group(path: Path, stamp: tuple[int, int], group: int) -> Any:
    """A row group as it was when the file had this stamp."""
    if _stamp(path) != stamp:
        raise DataError(f"{path}: the file has been changed since the run began; start again")
    with _parquet(path) as file:
        try:
            return file.read_row_group(group, use_threads=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: its row group {group} cannot be read: {error}") from error


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(f"{path}: it cannot be read any more: {error.strerror}") from error
    return status.st_size, status.st_mtime_ns
