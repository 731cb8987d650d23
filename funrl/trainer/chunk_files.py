"""Large chunks of a checkpoint, written and read as plain bytes at the speed of a copy.

A chunk on disk is its bytes and their CRC-32C. Tensorstore computes that at 2 GB a second on processors that it does
not know; here a kernel does at 17, and the bytes go from the shared memory to the disk, and from there to a rank's own
tensors, without a copy between. What is written is an OCDBT database of its own, `ocdbt.process_R.chunks`: data files,
one B+tree node that finds the chunks in them, and a manifest. The commit joins it with the others, and any reader of
OCDBT finds all chunks. Small chunks, and all where there is no compiler, go tensorstore's own way; what a reader finds
is the same.

Reference: the storage format, https://google.github.io/tensorstore/kvstore/ocdbt
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import unquote

import numpy as np

from funrl.compiled_kernels.kernel_library import CHECKSUM, KernelError, library

LARGE_BYTES = 1 << 20  # of a chunk that is worth it
FILE_BYTES = 256 << 20  # of a data file, before the next begins
CHECKSUM_BYTES = 4
NODE_MAGIC = 0x0CDB20DE
MANIFEST_CONFIG = {
    "compression": {"id": "zstd"}, "max_decoded_node_bytes": 8 << 20, "max_inline_value_bytes": 100,
    "version_tree_arity_log2": 4,
}  # fmt: skip


class UnreadableChunk(ValueError):
    """A chunk that cannot be read, or whose bytes are not those that were written."""


class Span(NamedTuple):
    """Place of a key's value: `length` bytes of a file, checksum included."""

    file: str
    offset: int
    length: int


class Kernels(NamedTuple):
    """Functions of `checksum.cpp`.

    Attributes:
      checksum: CRC-32C of bytes.
      read: fill an array [n] of uint8 from a place in a file on; how many bytes there were, and their CRC-32C.
      write: append such an array to a file; its CRC-32C.
    """

    checksum: Callable[[bytes], int]
    read: Callable[[BinaryIO, int, np.ndarray], tuple[int, int]]
    write: Callable[[BinaryIO, np.ndarray], int]


@functools.cache
def kernels() -> Kernels | None:
    """The functions that sum bytes as they go by; None where they cannot be had."""
    try:
        kernel: Any = library(CHECKSUM)
    except KernelError:
        return None
    kernel.funrl_crc32c.restype = ctypes.c_uint32
    kernel.funrl_read_summed.restype = kernel.funrl_write_summed.restype = ctypes.c_int64

    def checked(count: int, file: BinaryIO) -> int:
        if count < 0:
            raise OSError(-count, os.strerror(-count), file.name)
        return count

    def read(file: BinaryIO, offset: int, values: np.ndarray) -> tuple[int, int]:
        total = ctypes.c_uint32()
        place, count = values.ctypes.data, values.nbytes
        found = kernel.funrl_read_summed(file.fileno(), offset, place, count, ctypes.byref(total))
        return checked(found, file), total.value

    def write(file: BinaryIO, values: np.ndarray) -> int:
        total = ctypes.c_uint32()
        place, count = values.ctypes.data, values.nbytes
        checked(kernel.funrl_write_summed(file.fileno(), place, count, ctypes.byref(total)), file)
        return total.value

    return Kernels(lambda data: kernel.funrl_crc32c(data, len(data), 0), read, write)


def write_chunks(folder: str, chunks: Sequence[tuple[str, np.ndarray]]) -> None:
    """Write a database of chunks, which has reached the disk on return.

    Args:
      chunks: keys, and [n] uint8.

    Raises:
      OSError: they cannot be written.
    """
    kernel = kernels()
    assert kernel is not None, "the caller has asked"
    os.makedirs(Path(folder) / "d")
    entries: dict[bytes, Span] = {}
    file: BinaryIO | None = None
    on_disk: list[Future[None]] = []
    with ThreadPoolExecutor(1) as disk:
        try:
            for key, values in chunks:
                if file is None:
                    name = f"d/{secrets.token_hex(16)}"
                    file = open(Path(folder) / name, "wb", buffering=0)  # noqa: SIM115  (closed by `_finish`)
                entries[key.encode()] = Span(name, file.tell(), values.nbytes + CHECKSUM_BYTES)
                _write_all(file, memoryview(kernel.write(file, values).to_bytes(CHECKSUM_BYTES, "little")))
                if file.tell() >= FILE_BYTES:
                    on_disk.append(disk.submit(_finish, file))
                    file = None
        finally:
            if file is not None:
                on_disk.append(disk.submit(_finish, file))
        for done in on_disk:
            done.result()
    _write_index(folder, dict(sorted(entries.items())))


def _write_all(file: BinaryIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _finish(file: BinaryIO) -> None:
    """Bring a file to the disk."""
    with file:
        os.fsync(file.fileno())


def _write_index(folder: str, entries: dict[bytes, Span]) -> None:
    """Write the node and the manifest of a database of these values, in the order of their keys."""
    import tensorstore as ts

    node, name = leaf_node(entries), f"d/{secrets.token_hex(16)}"
    statistics = {
        "num_keys": len(entries), "num_tree_bytes": len(node),
        "num_indirect_value_bytes": sum(place.length for place in entries.values()),
    }  # fmt: skip
    root = {"location": f"btreenode::{name}:0:{len(node)}", "statistics": statistics}
    version = {"commit_time": time.time_ns(), "generation_number": 1, "root": root, "root_height": 0}
    manifest = {
        "config": MANIFEST_CONFIG | {"uuid": secrets.token_hex(16)},
        "version_tree_nodes": [],
        "versions": [version],
    }
    for path, content in ((name, node), ("manifest.ocdbt", ts.ocdbt.undump_manifest(manifest))):
        file = open(Path(folder) / path, "wb", buffering=0)  # noqa: SIM115  (closed by `_finish`)
        _write_all(file, memoryview(content))
        _finish(file)


def leaf_node(entries: dict[bytes, Span]) -> bytes:
    """The encoded B+tree node of height 0 that finds some values in files.

    Args:
      entries: in the order of their keys; the files relative to the database.
    """
    files = list(dict.fromkeys(place.file for place in entries.values()))
    numbers = {file: number for number, file in enumerate(files)}
    keys, places, shared = list(entries), list(entries.values()), _shared_prefixes(list(entries))
    body = b"".join((
        b"\0",  # height
        _varints([len(files)]), _varints([0] * (len(files) - 1)), _varints([len(file) for file in files]),
        _varints([0] * len(files)), "".join(files).encode(),
        _varints([len(keys)]), _varints(shared[1:]),
        _varints([len(key) - n for key, n in zip(keys, shared, strict=True)]),
        b"".join(key[n:] for key, n in zip(keys, shared, strict=True)),
        _varints([place.length for place in places]), _varints([1] * len(places)),  # 1: in a file
        _varints([numbers[place.file] for place in places]), _varints([place.offset for place in places]),
    ))  # fmt: skip
    length = 4 + 8 + 2 + len(body) + CHECKSUM_BYTES
    node = struct.pack(">I", NODE_MAGIC) + struct.pack("<Q", length) + b"\0\0" + body  # version; compression: none
    kernel = kernels()
    assert kernel is not None, "the caller has asked"
    return node + kernel.checksum(node).to_bytes(CHECKSUM_BYTES, "little")


def _shared_prefixes(keys: Sequence[bytes]) -> list[int]:
    """Of each key, how many of its first bytes are those of the key before it; 0 for the first."""
    found = [0]
    for one, other in itertools.pairwise(keys):
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
        found.append(sum(1 for _ in same))
    return found


def _varints(numbers: Sequence[int]) -> bytes:
    """Numbers in groups of 7 bits, the lowest first; the highest bit of a byte says that more follow."""
    out = bytearray()
    for number in numbers:
        while number > 127:
            out.append(number & 127 | 128)
            number >>= 7
        out.append(number)
    return bytes(out)


def places_of(folder: str, keys: Sequence[str]) -> dict[str, Span]:
    """Places of the values of those keys that a database has outside of its index."""
    import tensorstore as ts

    root = ts.ocdbt.dump(ts.KvStore.open(url(folder)).result()).result()["versions"][-1]["root"]
    if "location" not in root:
        return {}
    places = {}
    for key, location in _values(folder, root["location"], b"", sorted(key.encode() for key in keys)):
        _, parent, file, offset, length = location.split(":")
        path = Path(folder) / (unquote(parent) + unquote(file))
        places[key.decode()] = Span(str(path), int(offset), int(length))
    return places


def _values(folder: str, location: str, prefix: bytes, wanted: list[bytes]) -> Iterator[tuple[bytes, str]]:
    """Keys of those that are wanted, in order, and the places of their values below a node."""
    height, entries = _node(folder, location)
    if height == 0:
        for key in wanted:
            entry = entries.get(key.removeprefix(prefix))
            if entry is not None and "indirect_value" in entry:
                yield key, entry["indirect_value"]
        return
    starts = [prefix + key for key in entries]
    for entry, low, high in zip(entries.values(), starts, [*starts[1:], None], strict=True):
        below = [key for key in wanted if key >= low and (high is None or key < high)]
        if below:
            yield from _values(folder, entry["location"], prefix + entry["subtree_common_prefix"], below)


@functools.lru_cache(maxsize=8)
def _node(folder: str, location: str) -> tuple[int, dict[bytes, Any]]:
    """Height and entries of a node, which never changes."""
    import tensorstore as ts

    node = ts.ocdbt.dump(ts.KvStore.open(url(folder)).result(), location).result()
    return node["height"], {entry["key"]: entry for entry in node["entries"]}


def url(folder: str) -> str:
    return Path(folder).absolute().as_uri() + "/"


def read_chunks(wanted: Sequence[tuple[str, Span, np.ndarray]], threads: int) -> None:
    """Read chunks of tensors, each into an array [n] of uint8, and verify their checksums.

    Raises:
      UnreadableChunk: a file cannot be read, or bytes are missing, or not those that were written; it names the tensor.
    """
    if threads == 1:
        for one in wanted:
            _read_chunk(*one)
        return
    with ThreadPoolExecutor(threads) as readers:
        reading = [readers.submit(_read_chunk, *one) for one in wanted]
        try:
            for done in reading:
                done.result()
        except UnreadableChunk:
            readers.shutdown(cancel_futures=True)
            raise


def _read_chunk(name: str, place: Span, values: np.ndarray) -> None:
    try:
        problem = _chunk_problem(place, values)
    except OSError as error:
        raise UnreadableChunk(f"{name}: {error}") from error
    if problem:
        raise UnreadableChunk(f"{name}: {place.file}: {problem}")


def _chunk_problem(place: Span, values: np.ndarray) -> str | None:
    """Read one chunk: None, or what is wrong with it."""
    kernel = kernels()
    assert kernel is not None, "the caller has asked"
    if place.length != values.nbytes + CHECKSUM_BYTES:
        return f"a chunk has {place.length} bytes of {values.nbytes + CHECKSUM_BYTES}"
    with open(place.file, "rb", buffering=0) as file:
        count, total = kernel.read(file, place.offset, values)
        file.seek(place.offset + values.nbytes)
        last = file.read(CHECKSUM_BYTES)
    if count < values.nbytes or len(last) < CHECKSUM_BYTES:
        return "it ends within a chunk"
    if total != int.from_bytes(last, "little"):
        return f"the checksum of the chunk at byte {place.offset} is wrong"
    return None
