"""Records of data files in any format.

Formats: JSON lines, a JSON list, CSV, parquet, a directory saved by `datasets`, or a dataset in the local Hugging Face
cache. JSON lines are read in place, what `datasets` reads is memory-mapped, and JSON lists and CSV are held in memory.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, overload

import numpy as np

from funrl.data.cached_datasets import TRAIN, cached_name, load_cached, looks_like_name
from funrl.data.json_lines import DataError, JsonLines, parse_json
from funrl.data.messages import without_arrow_nulls

FORMATS = (
    "a .jsonl, .json, .csv or .parquet file, a directory that `datasets` saved, or the name of a dataset in the local "
    "Hugging Face cache"
)
SAVED = "state.json"  # marks a directory of one split that `datasets` saved
SAVED_SPLITS = "dataset_dict.json"  # marks a directory of several


class Table(Protocol):
    """Rows by index."""

    def read(self, place: int) -> Any: ...
    def where(self, place: int) -> str: ...
    def sizes(self) -> np.ndarray: ...


class Records(Sequence[Any]):
    """Records of a table, each read on access. Slices and arrays of indices give views.

    Attributes:
      table: the rows.
      places: [records] int64, index of each record in the table.
    """

    def __init__(self, table: Table, places: np.ndarray):
        self.table = table
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice | np.ndarray) -> Records: ...
    def __getitem__(self, index: int | slice | np.ndarray) -> Any:
        """Raises: DataError, the file has changed since it was opened."""
        if isinstance(index, (slice, np.ndarray)):
            return Records(self.table, self.places[index])
        return self.table.read(int(self.places[index]))

    def where(self, index: int) -> str:
        """File, and line or row, of a record."""
        return self.table.where(int(self.places[index]))

    def sizes(self) -> np.ndarray:
        """[records] bytes of each record's text."""
        return self.table.sizes()[self.places]


class TableRows(NamedTuple):
    """Rows in memory, or memory-mapped by `datasets`.

    Attributes:
      name: of the file.
      rows: by index.
      is_arrow: whether they are of an Arrow table, which adds nulls to objects; see `without_arrow_nulls`.
    """

    name: str
    rows: Sequence[Any]
    is_arrow: bool = False

    def indexed(self) -> TableRows:
        """Itself: rows have random access."""
        return self

    def scan(self) -> Iterator[tuple[int, Any]]:
        """Yield each row with its index, as it is in the table."""
        return enumerate(self.rows)

    def read(self, place: int) -> Any:
        """Read a row."""
        return without_arrow_nulls(self.rows[place]) if self.is_arrow else self.rows[place]

    def where(self, place: int) -> str:
        """File and number of a row."""
        return f"{self.name}, row {place + 1}"

    def sizes(self) -> np.ndarray:
        """[rows] bytes of each row as JSON."""
        return np.fromiter((len(json.dumps(row, default=str)) for row in self.rows), dtype=np.int64)


def source_problem(path: str | Path) -> str:
    """Reason why a path cannot be a data file or the name of a dataset; "" if it can."""
    path = Path(path)
    saved = _saved_folder(path)
    if saved is not None and not saved.is_dir():
        splits = sorted(f"{saved.parent}:{file.parent.name}" for file in saved.parent.glob(f"*/{SAVED}"))
        return f"it has no split {saved.name!r}; give one of {', '.join(splits)}"
    if saved is not None or path.is_file() or cached_name(str(path)):
        return ""
    if path.is_dir():
        return "this is a directory, and not one that `datasets` saved"
    return "no such file" + (", and no such dataset in the local cache" if looks_like_name(str(path)) else "")


def read_records(path: str | Path) -> Iterator[tuple[str, Any]]:
    """Yield each record of a file with its source: the file, and the line or row.

    Raises:
      DataError: the file or a line of it cannot be read, or a library for its format is not installed.
    """
    table = open_table(Path(path))
    is_arrow = isinstance(table, TableRows) and table.is_arrow
    for place, record in table.scan():
        yield table.where(place), without_arrow_nulls(record) if is_arrow else record


def rows_in_memory(records: Sequence[object]) -> Sequence[Any]:
    """Records in memory; those of a data set of `datasets` without the nulls that Arrow adds."""
    is_arrow = type(records).__module__.partition(".")[0] == "datasets"
    return [without_arrow_nulls(row) for row in records] if is_arrow else records


def open_records(source: str | Path | TableRows, check: Callable[[Any], None]) -> Records:
    """Open a file and check every record once. Records are held in memory only if the format needs it.

    Args:
      source: path of a file, name of a dataset, or rows in memory.
      check: raises a ValueError for an unusable record.

    Raises:
      DataError: the file cannot be read, or a record fails the check; the message names the first such record.
    """
    table = source if isinstance(source, TableRows) else open_table(Path(source)).indexed()
    places = array("q")
    for place, record in table.scan():
        try:
            check(record)
        except ValueError as error:
            raise DataError(f"{table.where(place)}: {error}") from error
        places.append(place)
    return Records(table, np.frombuffer(places, dtype=np.int64))


def open_table(path: Path) -> JsonLines | TableRows:
    """The rows of a file, or of a dataset by its name. Raises: DataError."""
    saved = _saved_folder(path)
    if saved is not None:
        return _dataset(path, lambda datasets: datasets.load_from_disk(str(saved)))
    wanted = cached_name(str(path))
    if wanted is not None:
        return _dataset(path, lambda datasets: load_cached(datasets, wanted))
    if path.suffix == ".parquet":
        return _dataset(path, lambda datasets: _parquet_rows(datasets, path))
    if path.suffix not in (".csv", ".json"):
        return JsonLines(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: it cannot be read: {error.strerror}") from error
    if path.suffix == ".json" and not content[:256].removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return JsonLines(path)
    try:
        return TableRows(str(path), _csv_rows(content) if path.suffix == ".csv" else parse_json(content))
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error


def _parquet_rows(datasets: Any, path: Path) -> Any:
    """Rows of a parquet file; of one without any, which `datasets` fails on, none."""
    metadata = importlib.import_module("pyarrow.parquet").read_metadata(path)
    if not metadata.num_rows:
        return datasets.Dataset.from_dict({})
    return datasets.load_dataset("parquet", data_files=str(path), split=TRAIN)


def _csv_rows(content: bytes) -> list[dict[str, str]]:
    """Rows of a CSV file, with texts as values.

    `datasets` reads CSV by pandas, which converts texts to numbers, and silently fills missing cells and drops extra
    ones.
    """
    try:
        lines = io.StringIO(content.decode("utf-8-sig"), newline="")
        rows = [cells for cells in csv.reader(lines, strict=True) if cells]
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"not CSV in UTF-8: {error}; JSON lines may hold it") from error
    names = rows.pop(0) if rows else []
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two columns have the name {repeated[0]!r}; rename one of them")
    for number, cells in enumerate(rows, 1):
        if len(cells) != len(names):
            raise ValueError(f"row {number} has {len(cells)} cells, and the first line has {len(names)} names")
    return [dict(zip(names, cells, strict=True)) for cells in rows]


def _saved_folder(path: Path) -> Path | None:
    """Directory of a split saved by `datasets`: DIR, DIR/train if there are several, or DIR/SPLIT for "DIR:SPLIT"."""
    if (path / SAVED).is_file():
        return path
    if (path / SAVED_SPLITS).is_file():
        return path / TRAIN
    folder, _, split = str(path).rpartition(":")
    several = folder and not path.exists() and (Path(folder) / SAVED_SPLITS).is_file()
    return Path(folder, split) if several else None


def _dataset(path: Path, load: Callable[[Any], Any]) -> TableRows:
    """Rows loaded by `load` with the library `datasets`, whose import takes a second.

    Raises:
      DataError: the library is missing, or fails.
    """
    if problem := source_problem(path):
        raise DataError(f"{path}: {problem}")
    try:
        library = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(f"{path}: this needs datasets, which is not installed; pip install 'funrl[data]'") from error
    config = library.config
    was_offline = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = True  # online, it would look up names at the hub and report its loads
    try:
        return TableRows(str(path), load(library).with_format(None), is_arrow=True)
    except Exception as error:  # datasets raises many kinds for broken files
        reason = " ".join(str(error.__cause__ or error).split())
        raise DataError(f"{path}: datasets cannot read it: {reason}") from error
    finally:
        config.HF_HUB_OFFLINE = was_offline
