"""A process that writes and reads shards with tensorstore, for the rank that has started it.

Tensorstore has threads of its own, and a process that has them can no longer be forked safely. A rank may be forked (by
the next run of a notebook, for one), so tensorstore is never imported there. The process also writes at a low priority
and can be killed where a disk hangs. What is written and read passes through memory that both share, requests and
answers through pipes.

On disk each rank has an OCDBT database `ocdbt.process_R` with its chunks; a commit joins their indices in one, without
touching the chunks. Arrays are zarr 3 with a checksum in each chunk. It is what orbax writes and reads.

    python -m funrl.trainer.storage.shard_server

Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import re
import shutil
import signal
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from funrl.processes.forks import end_with_parent

ARRIVED = "arrived"  # folder in which each rank leaves a file when it has written its part
COMPLETE = "complete.json"  # written last: a checkpoint that has it is whole
CACHE_BYTES = 64 << 20  # of the databases' index
COPY_THREADS = 2
FILE_THREADS = 8
FILE_BYTES = 256 << 20  # of a data file, before the next begins
NICENESS = 19  # of a process that writes: training comes first
NICE_BYTES = 64 << 20  # a smaller part is written before it could hinder anyone

Edges = tuple[tuple[int, int], ...]


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message names it and what is wrong."""


class DamagedError(CheckpointError):
    """A checkpoint whose files are not as they were written."""


class Array(NamedTuple):
    """One array of a checkpoint, as every rank knows it.

    Attributes:
      dtype: its name in zarr, such as "bfloat16".
      chunk: shape of its chunks; the last in a dim may be cut. () where it is not known.
      scalar: a number rather than a tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    scalar: bool = False


class ShardPart(NamedTuple):
    """A box of an array, and where it is in the shared memory."""

    name: str
    box: Edges
    offset: int


class WriteShards(NamedTuple):
    """Write parts of arrays.

    Attributes:
      folder: of the checkpoint that is being written.
      process: number of the rank.
      arrays: arrays with a part on this rank.
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
    """Read parts of arrays into memory."""

    path: str
    memory: str
    arrays: Mapping[str, Array]
    parts: tuple[ShardPart, ...]


class Reserve(NamedTuple):
    """Have the pages of a memory made, before a rank needs them in a hurry."""

    memory: str
    nbytes: int


def main() -> None:
    """Answer requests until the rank has gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # for the rank, which may want a last save
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    requests = Connection(os.dup(0), writable=False)
    answers = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # whatever a library prints is no answer
    while True:
        try:
            request = requests.recv()
        except EOFError:
            return
        try:
            answer = _answer(request)
        except Exception as error:  # whatever it is, it is the rank's to handle
            answer = f"{type(error).__name__}: {_first_line(error)}"
        answers.send(answer)
        if isinstance(request, Commit) and answer is None:
            for name in request.removed:
                shutil.rmtree(name, ignore_errors=True)


def _answer(request: Any) -> str | None:
    """Do what a request asks for; None, or what went wrong."""
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
    """Write this rank's part, and leave a file with the problem, empty if there is none, that `commit` waits for."""
    problem = None
    if os.stat(request.memory).st_size > NICE_BYTES:
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
    """Lower the priority of this process; on Linux each of its threads has its own."""
    threads = Path("/proc/self/task")
    for thread in [int(entry.name) for entry in threads.iterdir()] if threads.is_dir() else [0]:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, NICENESS)


def _write_parts(request: WriteShards) -> None:
    import numpy as np
    import tensorstore as ts

    context = _context(ts)
    memory = _mapped(request.memory)
    base = str(Path(request.folder) / f"ocdbt.process_{request.process}")
    opening = {}
    for name, array in request.arrays.items():
        mode = {"create": True} if name in request.created else {"assume_metadata": True}
        opening[name] = ts.open(_spec(base, name, array) | {"open": True} | mode, context=context)
    arrays = {name: future.result() for name, future in opening.items()}
    writing = []
    for part in request.parts:
        values = _view(memory, request.arrays[part.name], part)
        target = arrays[part.name][_slices(part.box)]
        writing.append(target.write(values, can_reference_source_data_indefinitely=True))
    for name, number in request.numbers.items():
        writing.append(arrays[name].write(np.array(number, request.arrays[name].dtype)))
    for future in writing:
        future.result()


def commit(request: Commit) -> str | None:
    """Make a checkpoint of what all ranks have written; the problem, if there is none."""
    folder = Path(request.folder)
    path = Path(request.path)
    if problem := _wait(folder, request):
        shutil.rmtree(folder, ignore_errors=True)
        return problem
    shutil.rmtree(folder / ARRIVED)
    _merge(folder)
    tree = {str(tuple(name.split("/"))): _tree_entry(name, array) for name, array in request.arrays.items()}
    flags = {"use_ocdbt": True, "use_zarr3": True, "store_array_data_equal_to_fill_value": True}
    _write_json(folder / "_METADATA", {"tree_metadata": tree, **flags, "custom_metadata": None})
    files = {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    arrays = {name: [list(array.shape), array.dtype, list(array.chunk)] for name, array in request.arrays.items()}
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
    """Wait until every rank has written; the first problem of one of them, if there is any."""
    missing = set(range(request.processes))
    deadline = time.monotonic() + request.timeout_s
    pause_s = 0.005
    while missing:
        files = os.listdir(folder / ARRIVED) if (folder / ARRIVED).exists() else []
        for rank in sorted(missing & {int(name) for name in files if name.isdigit()}):
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


def read_parts(request: ReadShards) -> str | None:
    """Read parts into memory; the first array that cannot be read and why, if there is any."""
    import tensorstore as ts

    context = _context(ts, {"file_io_mode": {"mode": "memmap"}})
    memory = _mapped(request.memory)
    opening = {}
    for name in dict.fromkeys(part.name for part in request.parts):
        spec = _spec(request.path, name, request.arrays[name])  # an array that is stored otherwise is an error
        opening[name] = ts.open(spec, open=True, context=context)
    reading = []
    for part in request.parts:
        try:
            stored = opening[part.name].result()
            target = ts.array(_view(memory, request.arrays[part.name], part), context=context, copy=False)
            reading.append((part.name, target.write(stored[_slices(part.box)])))
        except Exception as error:
            return f"{part.name}: {_first_line(error)}"
    for name, future in reading:
        try:
            future.result()
        except Exception as error:
            return f"{name}: {_first_line(error)}"
    return None


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
    return {"driver": "ocdbt", "base": Path(base).absolute().as_uri() + "/", "target_data_file_size": FILE_BYTES}


def _spec(base: str, name: str, array: Array) -> dict[str, Any]:
    """Place and metadata of an array."""
    spec: dict[str, Any] = {"driver": "zarr3", "kvstore": {**_database(base), "path": f"{name.replace('/', '.')}/"}}
    metadata: dict[str, Any] = {
        "shape": list(array.shape),
        "data_type": array.dtype,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "chunk_key_encoding": {"name": "default"},
        "fill_value": False if array.dtype == "bool" else 0,
    }
    if len(array.chunk) == len(array.shape):  # else it is of an earlier version's checkpoint, which did not record it
        chunk = [max(1, length) for length in array.chunk]
        metadata["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": chunk}}
    return spec | {"metadata": metadata, "store_data_equal_to_fill_value": True}


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
    count = math.prod(shape) * dtype.itemsize
    values = np.frombuffer(memory or b"", np.uint8, count=count, offset=part.offset)
    return values.view(dtype).reshape(shape)


def _dtype(name: str) -> Any:
    import ml_dtypes
    import numpy as np

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _slices(box: Edges) -> tuple[slice, ...]:
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
    match = re.search(r"(.*): ([^:]+?) \[(os_error_code|tensorstore_spec|source locations)=", text)
    if match and (paths := re.findall(r'"(/[^"]*?)(?:\.__lock)?"', match[1])):
        return f"{paths[-1]}: {match[2].lower()}"
    return text.split(" [source locations=")[0].split(" [tensorstore_spec=")[0][:300]


if __name__ == "__main__":
    main()
