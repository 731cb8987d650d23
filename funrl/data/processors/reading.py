"""Pictures in files or bytes that threads read ahead of their use, each of them once."""

from __future__ import annotations

import collections
import contextlib
import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from funrl.data.json_lines import DataError

# picture, whether it counts as alone -> patches, height and width in patches
ReadPatches = Callable[[Any, bool], tuple[np.ndarray, tuple[int, int]]]
WithPictures = TypeVar("WithPictures")

THREADS = 4  # Pillow decodes and resizes without the interpreter's lock
AHEAD = 32  # items whose pictures are read before they are used
KEPT_BYTES = 1 << 30  # patches of pictures that may be used again


class PictureReading(NamedTuple):
    """A way to read pictures.

    Attributes:
      patches: of a picture.
      alone: number of the pictures of a prompt -> whether each of them counts as alone.
    """

    patches: ReadPatches
    alone: Callable[[int], bool]


def read_ahead(
    items: Iterable[WithPictures], pictures: Callable[[WithPictures], Sequence[object]], reading: PictureReading | None
) -> Iterator[tuple[WithPictures, ReadPatches | None]]:
    """Each item, with a reader of its pictures; threads read those of the next `AHEAD` items meanwhile.

    Args:
      items: such as records.
      pictures: those of an item, as it has them. Where it fails, the item is left to its user, who says why.
      reading: None: nothing is read ahead.
    """
    if reading is None:
        yield from ((item, None) for item in items)
        return
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="pictures")
    reader = PictureReader(reading.patches, pool)
    waiting: collections.deque[WithPictures] = collections.deque()
    try:
        for item in items:
            with contextlib.suppress(DataError, AttributeError, TypeError):  # a record may be no mapping
                given = pictures(item)
                for picture in given:
                    reader.begin(picture, reading.alone(len(given)))
            waiting.append(item)
            if len(waiting) > AHEAD:
                yield waiting.popleft(), reader
        while waiting:
            yield waiting.popleft(), reader
    finally:
        pool.shutdown(cancel_futures=True)


class PictureReader:
    """Reader that reads each file, and equal bytes, once, and keeps up to `KEPT_BYTES` of patches.

    Pictures that are objects of Python are read when they are used: they may be made anew each time, and Pillow's are
    not to be loaded by two threads.

    Args:
      read: patches of a picture.
      pool: of the threads that read.
    """

    def __init__(self, read: ReadPatches, pool: ThreadPoolExecutor) -> None:
        self._read = read
        self._pool = pool
        self._begun: dict[Hashable, Future] = {}
        self._kept: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
        self._bytes = 0

    def begin(self, picture: object, alone: bool) -> None:
        """Start a thread that reads a picture, unless it has been read or is an object of Python."""
        name = picture_key(picture)
        key = name, alone
        if name is not None and key not in self._begun and key not in self._kept:
            self._begun[key] = self._pool.submit(self._read, picture, alone)

    def __call__(self, picture: Any, alone: bool) -> tuple[np.ndarray, tuple[int, int]]:
        """Patches of a picture. Raises: as `read`."""
        name = picture_key(picture)
        if name is None:
            return self._read(picture, alone)
        key = name, alone
        if key not in self._kept:
            self.begin(picture, alone)
            self._kept[key] = patches = self._begun.pop(key).result()
            self._bytes += patches[0].nbytes
        self._kept.move_to_end(key)
        while self._bytes > KEPT_BYTES and len(self._kept) > 1:
            _, (old, _) = self._kept.popitem(last=False)
            self._bytes -= old.nbytes
        return self._kept[key]


def picture_key(given: object) -> Hashable:
    """Path of a picture, or digest of its bytes, equal only for equal pictures; None: it is an object of Python."""
    if isinstance(given, Mapping):
        inner = next((given[key] for key in ("bytes", "path", "image") if given.get(key) is not None), None)
        return picture_key(inner)
    if isinstance(given, bytes | bytearray):
        return hashlib.blake2b(given, digest_size=16).digest()
    return str(given) if isinstance(given, str | Path) else None
