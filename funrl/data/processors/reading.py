"""Pictures that threads read ahead of their use, each of them once."""

from __future__ import annotations

import collections
import contextlib
import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from funrl.data.json_lines import DataError

# picture, whether its prompt has no other -> patches, height and width in patches
ReadPatches = Callable[[Any, bool], tuple[np.ndarray, tuple[int, int]]]
WithPictures = TypeVar("WithPictures")

THREADS = 4  # Pillow decodes and resizes without the interpreter's lock
AHEAD = 32  # items whose pictures are read before they are used
KEPT_BYTES = 1 << 30  # patches of pictures that may be used again


def read_ahead(
    items: Iterable[WithPictures], pictures: Callable[[WithPictures], Sequence[Any]], read: ReadPatches | None
) -> Iterator[tuple[WithPictures, ReadPatches | None]]:
    """Each item, with a reader of its pictures; threads read those of the next `AHEAD` items meanwhile.

    Args:
      items: such as records.
      pictures: those of an item, as it has them. Where it raises DataError, the item is left to its user.
      read: patches of a picture; None: nothing is read ahead.
    """
    if read is None:
        yield from ((item, None) for item in items)
        return
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="pictures")
    reader = PictureReader(read, pool)
    waiting: collections.deque[WithPictures] = collections.deque()
    try:
        for item in items:
            with contextlib.suppress(DataError):
                given = pictures(item)
                for picture in given:
                    reader.begin(picture, len(given) == 1)
            waiting.append(item)
            if len(waiting) > AHEAD:
                yield waiting.popleft(), reader
        while waiting:
            yield waiting.popleft(), reader
    finally:
        pool.shutdown(cancel_futures=True)


class PictureReader:
    """Reader that reads each picture once, and keeps up to `KEPT_BYTES` of patches.

    Args:
      read: patches of a picture.
      pool: of the threads that read.
    """

    def __init__(self, read: ReadPatches, pool: ThreadPoolExecutor) -> None:
        self._read = read
        self._pool = pool
        self._begun: dict[Hashable, Future] = {}
        self._kept: collections.OrderedDict[Hashable, tuple[Any, Any]] = collections.OrderedDict()  # beside pictures
        self._bytes = 0

    def begin(self, picture: Any, alone: bool) -> None:
        """Let a thread read a picture, unless it has been read."""
        key = picture_key(picture), alone
        if key not in self._begun and key not in self._kept:
            self._begun[key] = self._pool.submit(self._read, picture, alone)

    def __call__(self, picture: Any, alone: bool) -> tuple[np.ndarray, tuple[int, int]]:
        """Patches of a picture. Raises: as `read`."""
        key = picture_key(picture), alone
        if key not in self._kept:
            self.begin(picture, alone)
            patches = self._begun.pop(key).result()
            self._kept[key] = picture, patches
            self._bytes += patches[0].nbytes
        self._kept.move_to_end(key)
        while self._bytes > KEPT_BYTES and len(self._kept) > 1:
            _, (_, (old, _)) = self._kept.popitem(last=False)
            self._bytes -= old.nbytes
        return self._kept[key][1]


def picture_key(given: Any) -> Hashable:
    """Path of a picture, digest of its bytes, or else number of the object: equal only for equal pictures."""
    if isinstance(given, Mapping):
        inner = next((given[key] for key in ("bytes", "path", "image") if given.get(key) is not None), None)
        return picture_key(inner)
    if isinstance(given, bytes | bytearray):
        return hashlib.blake2b(given, digest_size=16).digest()
    if isinstance(given, str | Path):
        return str(given)
    return id(given)
