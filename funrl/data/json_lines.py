"""Files of JSON lines, read in place. Values stay as in JSON: no column is converted to a common type."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

JsonObject = dict[str, Any]
Stamp = tuple[int, int]  # size and time of change of a file


class DataError(ValueError):
    """A file or line cannot be trained on; the message names the file, the line and the problem."""


NO_LINES = np.zeros(1, dtype=np.int64)


class JsonLines(NamedTuple):
    """The lines of a file, each parsed on access. It holds no open file, so it can be forked and pickled.

    Attributes:
      path: path of the file.
      offsets: [lines + 1] int64, start of each line, and the end of the file; [0] before `indexed`.
      stamp: size and time of the file when it was indexed.
    """

    path: Path
    offsets: np.ndarray = NO_LINES
    stamp: Stamp = (0, 0)

    def indexed(self) -> JsonLines:
        """Index the lines for random access."""
        with _opened(self.path) as file:
            stamp = _stamp(file)
            lengths = np.fromiter(map(len, file), dtype=np.int64)
        return JsonLines(self.path, np.append(0, np.cumsum(lengths)), stamp)

    def scan(self) -> Iterator[tuple[int, Any]]:
        """Parse the whole file: yields the index and record of each line that is not blank.

        Raises:
          DataError: the file cannot be read, or a line is not JSON.
        """
        with _opened(self.path) as file:
            for place, line in enumerate(file):
                if line.strip():
                    yield place, self._parsed(place, line)

    def read(self, place: int) -> Any:
        """Parse one line. Raises: DataError, the file has changed since it was indexed."""
        with _opened(self.path) as file:
            if _stamp(file) != self.stamp:
                raise DataError(f"{self.path}: the file has been changed since the run began; start again")
            file.seek(int(self.offsets[place]))
            return self._parsed(place, file.readline())

    def where(self, place: int) -> str:
        """File and number of a line."""
        return f"{self.path}, line {place + 1}"

    def sizes(self) -> np.ndarray:
        """[lines] bytes of each line."""
        return np.diff(self.offsets)

    def _parsed(self, place: int, line: bytes) -> Any:
        try:
            return parse_json(line)
        except ValueError as error:
            raise DataError(f"{self.where(place)}: {error}") from error


def parse_json(text: bytes) -> Any:
    """Parse JSON. Raises: ValueError, it is not UTF-8 JSON, is nested too deeply, or repeats a key."""
    try:
        value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_object)
        if b"\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise ValueError(
            f"{half} is half of a surrogate pair, which is not valid text; write the character itself"
        ) from None
    except RecursionError:
        raise ValueError("nested too deeply; a record is an object with a few fields") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"not valid JSON: {error.msg} at {line}column {error.colno}") from error


def _object(pairs: list[tuple[str, object]]) -> JsonObject:
    """Build a JSON object. Raises: ValueError, a key occurs twice, so that a value would be lost."""
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {repeated!r} occurs twice; leave one of them out")
    return record


def _opened(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(f"{path}: it cannot be read: {error.strerror}") from error


def _stamp(file: BinaryIO) -> Stamp:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns
