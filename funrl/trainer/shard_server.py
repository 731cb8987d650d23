"""A process that writes and reads shards with tensorstore, for the rank that has started it.

Tensorstore has threads of its own, and a process that has them cannot be forked safely any more. A rank may be forked
(by a reward, by the next run of a notebook), so tensorstore is never imported there. What is written and read passes
through memory that both share, requests and answers through pipes.

On disk each rank has an OCDBT database `ocdbt.process_R` with its chunks, and one more for the large ones, which
`chunk_files` writes; a commit joins their indices in one, without touching the chunks. Arrays are zarr 3 with a
checksum in each chunk. It is what orbax writes and reads.

    python -m funrl.trainer.shard_server

Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import json
import math
import mmap
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from funrl.trainer import chunk_files

ARRIVED = "arrived"  # folder in which each rank leaves a file when it has written its part
COMPLETE = "complete.json"  # written last: a checkpoint that has it is whole
CACHE_BYTES = 64 << 20  # of the databases' index
COPY_THREADS, FILE_THREADS = 2, 8
NICENESS, NICE_BYTES = 19, 64 << 20  # of a process that writes more than this: training comes first

Ends = tuple[tuple[int, int], ...]


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message names it and what is wrong."""


class DamagedError(CheckpointError):
    """A checkpoint whose files are not as they were written."""


class Array(NamedTuple):
    """One array of a checkpoint, as every rank knows it.

    Attributes:
      dtype: its name in zarr, such as "bfloat16".
      chunk: shape of its chunks, of which the last in a dim may be cut. () where it is not known.
      scalar: a number rather than a tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    scalar: bool = False


class ShardPart(NamedTuple):
    """A box of an array, and where it is in the shared memory."""

    name: str
    box: Ends
    offset: int


class WriteShards(NamedTuple):
    """Write parts of arrays.

    Attributes:
      folder: of the checkpoint that is being written.
      process: number of the rank.
      arrays: those that this rank has a part of.
      created: names of the arrays that this rank declares; every array is declared by one rank.
      numbers: of the scalar arrays, which come with the request; they are on one rank.
    """

    folder: str
    process: int
    memory: str
    arrays: Mapping[str, Array]
    parts: tuple[ShardPart, ...]
    created: frozenset[str]
    numbers: Mapping[str, int | float | bool]


class Commit(NamedTuple):
    """Wait for the parts of all ranks, and make a checkpoint of them.

    Attributes:
      folder, path: it is renamed from the one to the other.
      processes: how many have written.
      arrays: of the whole checkpoint.
      facts: further content of `COMPLETE`.
      removed: older checkpoints, which go when this one is there and has been answered for.
      synced: files beside the checkpoint that must have reached the disk before it is there.
      timeout_s: how long to wait for the other ranks.
    """

    folder: str
    path: str
    processes: int
    arrays: Mapping[str, Array]
    facts: Mapping[str, Any]
    removed: tuple[str, ...]
    synced: tuple[str, ...]
    timeout_s: float


class ReadShards(NamedTuple):
    """Read parts of arrays into memory, and say where some chunks are, which the rank reads itself.

    Attributes:
      chunks: keys of these chunks.
    """

    path: str
    memory: str
    arrays: Mapping[str, Array]
    parts: tuple[ShardPart, ...]
    chunks: tuple[str, ...] = ()


class Reserve(NamedTuple):
    """Have the pages of a memory made, before a rank needs them in a hurry."""

    memory: str
    nbytes: int


def main() -> None:
    """Answer requests until the rank has gone."""
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they are for the rank, which may want a last save
        signal.signal(sign, signal.SIG_IGN)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    requests, answers = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # whatever a library prints is no answer
    while True:
        try:
            request = requests.recv()
        except EOFError:
            return
        try:
            answer = answered(request)
        except Exception as error:  # whatever it is, the rank is told
            answer = f"{type(error).__name__}: {_first_line(error)}"
        answers.send(answer)
        if isinstance(request, Commit) and answer is None:
            for name in request.removed:
                shutil.rmtree(name, ignore_errors=True)


def answered(request: Any) -> str | dict[str, chunk_files.Span] | None:
    """Do what a request asks for; None, what went wrong, or where chunks are."""
    if isinstance(request, WriteShards):
        return write_own(request)
    if isinstance(request, Commit):
        return commit(request)
    if isinstance(request, ReadShards):
        return read_parts(request)
    with open(request.memory, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, request.nbytes)
    return None


def write_own(request: WriteShards) -> str | None:
    """Write this rank's part; leave word of it, good or bad, where `commit` looks."""
    problem = None
    if os.stat(request.memory).st_size > NICE_BYTES:  # a small part is written before it could hinder anyone
        _give_way()
    try:
        _write_parts(request)
    except Exception as error:
        problem = _first_line(error)
    folder = Path(request.folder) / ARRIVED
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{request.process}"
        draft.write_text(problem or "")
        draft.rename(folder / str(request.process))
    except OSError as error:
        problem = problem or str(error)
    return problem


def _give_way() -> None:
    """Lower the priority of this process; of all its threads, for on Linux each has its own."""
    threads = Path("/proc/self/task")
    for thread in [int(one.name) for one in threads.iterdir()] if threads.is_dir() else [0]:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, NICENESS)


def _write_parts(request: WriteShards) -> None:
    import numpy as np
    import tensorstore as ts

    context, memory, large = _context(ts), _mapped(request.memory), []
    base = str(Path(request.folder) / f"ocdbt.process_{request.process}")
    opened, written = {}, []

    def opening(name: str) -> Any:
        if name not in opened:
            mode = {"create": True} if name in request.created else {"assume_metadata": True}
            spec = _spec(base, name, request.arrays[name])
            opened[name] = ts.open(spec | {"open": True} | mode, context=context)
        return opened[name]

    for name in request.created:
        opening(name)
    for part in request.parts:
        array = request.arrays[part.name]
        values = _view(memory, array, part)
        if hasattr(ts.ocdbt, "undump_manifest") and (keys := large_chunks(part, array)):
            large.append((keys[0], values.reshape(-1).view(np.uint8)))
            continue
        target = opening(part.name).result()[_slices(part.box)]
        written.append(target.write(values, can_reference_source_data_indefinitely=True))
    for name, number in request.numbers.items():
        written.append(opening(name).result().write(np.array(number, request.arrays[name].dtype)))
    if large:
        chunk_files.write_chunks(f"{base}.chunks", large)
    for future in written:
        future.result()
    for future in opened.values():
        future.result()


def commit(request: Commit) -> str | None:
    """Make a checkpoint of what all ranks have written: None, or why it is not there."""
    folder, path = Path(request.folder), Path(request.path)
    if problem := _wait(folder, request):
        shutil.rmtree(folder, ignore_errors=True)
        return problem
    shutil.rmtree(folder / ARRIVED)
    _merge(folder)
    tree = {str(tuple(name.split("/"))): _tree_entry(name, array) for name, array in request.arrays.items()}
    flags = {"use_ocdbt": True, "use_zarr3": True, "store_array_data_equal_to_fill_value": True}
    _write_json(folder / "_METADATA", {"tree_metadata": tree, **flags, "custom_metadata": None})
    files = {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    arrays = {name: [list(one.shape), one.dtype, list(one.chunk)] for name, one in request.arrays.items()}
    for name in request.synced:
        with open(name, "rb") as file:
            os.fsync(file.fileno())
    record = {**request.facts, "arrays": arrays, "files": files}
    _write_json(folder / COMPLETE, record | {"digest": record_digest(record)})
    if path.exists():  # of the same step, and damaged, or it would not be written again
        shutil.rmtree(path)
    folder.rename(path)
    _sync_folder(path.parent)
    return None


def record_digest(record: Mapping[str, Any]) -> str:
    """A checksum of the record of a checkpoint."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _wait(folder: Path, request: Commit) -> str | None:
    """Wait until every rank has written: None, or what hindered one of them."""
    missing, deadline, pause_s = set(range(request.processes)), time.monotonic() + request.timeout_s, 0.005
    while missing:
        there = os.listdir(folder / ARRIVED) if (folder / ARRIVED).exists() else []
        for rank in sorted(missing & {int(name) for name in there if name.isdigit()}):
            missing.discard(rank)
            if problem := (folder / ARRIVED / str(rank)).read_text():
                return problem
        if missing and time.monotonic() > deadline:
            return f"rank {min(missing)} has not written its part within {request.timeout_s:.0f} s"
        if missing:
            time.sleep(pause_s)
            pause_s = min(1.0, pause_s * 1.5)
    return None


def _merge(folder: Path) -> None:
    """Join the indices of all ranks' databases."""
    import tensorstore as ts

    context = _context(ts)
    bases = sorted(folder.glob("ocdbt.process_*"))
    parts = [ts.KvStore.open(_database(str(base)), context=context) for base in bases]
    whole = ts.KvStore.open(_database(str(folder)), context=context).result()
    transaction = ts.Transaction(atomic=True)
    copies = [part.result().experimental_copy_range_to(whole.with_transaction(transaction)) for part in parts]
    for copy in copies:
        copy.result()
    transaction.commit_async().result()


def read_parts(request: ReadShards) -> str | dict[str, chunk_files.Span] | None:
    """Read parts into memory, and find chunks: their places, None if there are none, or which array cannot be read."""
    import tensorstore as ts

    context, memory = _context(ts, {"file_io_mode": {"mode": "memmap"}}), _mapped(request.memory)
    opened, copies = {}, []
    for name in dict.fromkeys(part.name for part in request.parts):
        opened[name] = ts.open(_spec(request.path, name, None), open=True, context=context)
    for part in request.parts:
        array = request.arrays[part.name]
        try:
            found = opened[part.name].result()
            if tuple(found.shape) != array.shape or found.dtype.name != array.dtype:
                return f"{part.name} has shape {list(found.shape)} and dtype {found.dtype.name}"
            if any(low == high for low, high in part.box):
                continue
            target = ts.array(_view(memory, array, part), context=context, copy=False)
            copies.append((part.name, target.write(found[_slices(part.box)])))
        except Exception as error:
            return f"{part.name}: {_first_line(error)}"
    for name, copy in copies:
        try:
            copy.result()
        except Exception as error:
            return f"{name}: {_first_line(error)}"
    if not request.chunks:
        return None
    places = chunk_files.places_of(request.path, request.chunks)
    missing = [key for key in request.chunks if key not in places]
    return f"the chunk {missing[0]} is missing" if missing else places


def large_chunks(part: ShardPart, array: Array) -> list[str]:
    """The keys of the chunks of a part, which are whole and behind one another in memory; [] where they are not, are
    small, or cannot be summed."""
    shape = tuple(high - low for low, high in part.box)
    if len(array.chunk) != len(shape) or _nbytes(array.chunk, array.dtype) < chunk_files.LARGE_BYTES:
        return []
    if chunk_files.kernels() is None:
        return []
    first = next(dim for dim, length in enumerate(array.chunk) if length > 1)
    whole = all(end % length == 0 for ends, length in zip(part.box, array.chunk, strict=True) for end in ends)
    return _chunk_keys(part, array) if whole and array.chunk[first + 1 :] == shape[first + 1 :] else []


def _chunk_keys(part: ShardPart, array: Array) -> list[str]:
    """The keys of the chunks that a part is made of, row-major."""
    ends = zip(part.box, array.chunk, strict=True)
    numbers = itertools.product(*(range(low // length, high // length) for (low, high), length in ends))
    return ["/".join((f"{_path(part.name)}c", *map(str, one))) for one in numbers]


def _context(ts: Any, more: Mapping[str, Any] | None = None) -> Any:
    """Threads and memory that tensorstore may use."""
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": CACHE_BYTES},
            "data_copy_concurrency": {"limit": COPY_THREADS},
            "file_io_concurrency": {"limit": FILE_THREADS},
            **(more or {}),
        }
    )


def _database(base: str) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": chunk_files.url(base), "target_data_file_size": chunk_files.FILE_BYTES}


def _path(name: str) -> str:
    """The beginning of an array's keys."""
    return name.replace("/", ".") + "/"


def _spec(base: str, name: str, array: Array | None) -> dict[str, Any]:
    """The place of an array, and its metadata, if that is to be written."""
    spec: dict[str, Any] = {"driver": "zarr3", "kvstore": {**_database(base), "path": _path(name)}}
    if array is None:
        return spec
    chunk = [max(1, length) for length in array.chunk]
    spec["metadata"] = {
        "shape": list(array.shape),
        "data_type": array.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "fill_value": False if array.dtype == "bool" else 0,
    }
    return spec | {"store_data_equal_to_fill_value": True}


def _tree_entry(name: str, array: Array) -> dict[str, Any]:
    """The entry of an array in the tree that orbax reads."""
    keys = [{"key": key, "key_type": 2} for key in name.split("/")]  # 2: of a dict
    kind = "scalar" if array.scalar else "np.ndarray"
    return {"key_metadata": keys, "value_metadata": {"value_type": kind, "skip_deserialize": False}}


def _mapped(memory: str) -> mmap.mmap | None:
    """The memory that the rank shares; None where it has none."""
    with open(memory, "r+b") as file:
        return mmap.mmap(file.fileno(), 0) if os.fstat(file.fileno()).st_size else None


def _view(memory: mmap.mmap | None, array: Array, part: ShardPart) -> Any:
    """A part in the shared memory, as an array."""
    import numpy as np

    dtype = _dtype(array.dtype)
    shape = [high - low for low, high in part.box]
    count = int(np.prod(shape, dtype=np.int64))
    values = np.frombuffer(memory or b"", np.uint8, count * dtype.itemsize, part.offset)
    return values.view(dtype).reshape(shape)


def _nbytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * _dtype(dtype).itemsize


def _dtype(name: str) -> Any:
    import ml_dtypes
    import numpy as np

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _slices(box: Ends) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in box)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with open(path, "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _first_line(error: BaseException) -> str:
    """An error's message without tensorstore's own context, which is long: of one of the system, path and reason."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    found = re.search(r"(.*): ([^:]+?) \[(os_error_code|tensorstore_spec|source locations)=", text)
    if found and (paths := re.findall(r'"(/[^"]*?)(?:\.__lock)?"', found[1])):
        return f"{paths[-1]}: {found[2].lower()}"
    return text.split(" [source locations=")[0].split(" [tensorstore_spec=")[0][:300]


if __name__ == "__main__":
    main()
