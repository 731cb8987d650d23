"""Files of JSON lines that are read where they are: an index of 16 bytes a line is all that is held in memory."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np


class DataError(ValueError):
    """A file or a line that cannot be trained on; the message names the file, the line and what is wrong with it."""


class JsonLines(Sequence[Any]):
    """The records of a file of JSON lines, parsed when they are asked for. Slices and arrays of places give views.

    It holds no open file, so it may be forked and pickled.

    Attributes:
      path: of the file.
      offsets: [lines] int64, where each record's line begins; lines that are blank have none.
      numbers: [lines] int64, the number of each record's line in the file, from 1.
    """

    def __init__(self, path: Path, offsets: np.ndarray, numbers: np.ndarray, stamp: tuple[int, int]):
        self.path, self.offsets, self.numbers, self._stamp = path, offsets, numbers, stamp

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice | np.ndarray) -> JsonLines: ...
    def __getitem__(self, index: int | slice | np.ndarray) -> Any:
        """Raises: DataError, the file has been changed since it was opened."""
        if isinstance(index, (slice, np.ndarray)):
            return JsonLines(self.path, self.offsets[index], self.numbers[index], self._stamp)
        try:
            with open(self.path, "rb") as file:
                stamp = _stamp(file.fileno())
                file.seek(int(self.offsets[index]))
                line = file.readline()
        except OSError as error:
            raise DataError(f"{self.path}: it cannot be read any more: {error.strerror}") from error
        if stamp != self._stamp:
            raise DataError(f"{self.path}: the file has been changed since the run began; start again")
        return parsed_line(line)

    @property
    def nbytes(self) -> np.ndarray:
        """[records] bytes of each record's text, at least; the last line's end is not known."""
        return np.append(np.abs(np.diff(self.offsets)), np.iinfo(np.int64).max)[: len(self)]

    def where(self, index: int) -> str:
        """The file and the line of a record."""
        return f"{self.path}, line {self.numbers[index]}"


def open_json_lines(path: str | Path, check: Callable[[Any], None]) -> JsonLines:
    """Index a file, one line in memory at a time; every record is parsed and checked, and let go.

    Args:
      check: raises a ValueError for a record that cannot be used.

    Raises:
      DataError: the file cannot be read, a line is no JSON or fails the check; the first such line is named.
    """
    path, offsets, numbers = Path(path), array("q"), array("q")
    try:
        with open(path, "rb") as file:
            stamp, offset = _stamp(file.fileno()), 0
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        check(parsed_line(line))
                    except ValueError as error:  # what json and utf-8 raise is one too
                        raise DataError(f"{path}, line {number}: {error}") from error
                    offsets.append(offset)
                    numbers.append(number)
                offset += len(line)
    except OSError as error:
        raise DataError(f"{path}: it cannot be read: {error.strerror}") from error
    return JsonLines(path, np.frombuffer(offsets, np.int64), np.frombuffer(numbers, np.int64), stamp)


def parsed_line(line: bytes) -> Any:
    """The value that JSON text means. Raises: ValueError, it is no JSON, not UTF-8, or nested too deeply."""
    try:
        record = json.loads(line.decode("utf-8-sig"))
        if b"\\ud" in line.lower():
            json.dumps(record, ensure_ascii=False).encode()
        return record
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise ValueError(f"{half} is half of a surrogate pair, which no text has; write the character itself") from None
    except RecursionError:
        raise ValueError("nested too deeply; a record is an object with a few fields") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise ValueError(f"not valid JSON: {error.msg} at {at}") from error


def _stamp(descriptor: int) -> tuple[int, int]:
    """Signature of a file, which changes when it is written."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns
