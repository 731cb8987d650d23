"""The safetensors files of a directory: their tables, checked before any weight is read, and their writing."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from funrl.models.errors import ModelError

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
SPECIAL_FLOATS = ("Infinity", "-Infinity", "NaN")


def read_json(file: Path) -> dict[str, Any]:
    """The object that a file of JSON holds; an infinity may be {"__float__": "Infinity"}, as transformers 5 writes it.

    Raises:
      ModelError: naming the file.
    """
    if not file.is_file():
        raise ModelError(f"{file} is missing")
    try:
        raw = json.loads(file.read_text(), object_hook=_special_float)
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}") from None
    except RecursionError:
        raise ModelError(f"{file} is nested too deeply for a file of a model") from None
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{file} holds a {type(raw).__name__}, not an object")
    return raw


def _special_float(fields: dict[str, Any]) -> Any:
    """The float that transformers has written as an object; any other object as it is."""
    text = fields.get("__float__") if len(fields) == 1 else None
    return float(text) if text in SPECIAL_FLOATS else fields


def weight_tables(folder: Path) -> dict[Path, dict[str, Any]]:
    """The files of weights with their tables: tensor -> "dtype" and "shape".

    Raises:
      ModelError: a file that the index names is missing, is not in the directory or lacks a tensor; or a table is
        broken.
    """
    if (folder / WHOLE).is_file():
        return {folder / WHOLE: read_table(folder / WHOLE)}
    if not (folder / INDEX).is_file():
        raise ModelError(f"{folder} has neither {WHOLE} nor {INDEX}; other formats of weights are not read")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / INDEX} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or "\0" in file or len(file) > 255:
            raise ModelError(f"{folder / INDEX}: the file of {name} is {_short(file)}, it must be the name of a file")
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
            raise ModelError(
                f"{folder / INDEX}: the file of {name} is {file!r}, which is not in the directory; put it there"
            )
    tables = {}
    for name in sorted(set(weight_map.values())):
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name} is missing; {INDEX} names it")
        tables[folder / name] = read_table(folder / name)
    for name, file in weight_map.items():
        if name not in tables[folder / file]:
            raise ModelError(f"{folder / file} lacks {name}, which {INDEX} says is in it")
    return tables


def read_table(file: Path) -> dict[str, dict[str, Any]]:
    """The "dtype" and "shape" of each tensor of a safetensors file.

    Raises:
      ModelError: the file is cut short, or its table is broken.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  (it is no dict)
            return {name: {"dtype": x.get_dtype(), "shape": x.get_shape()} for name, x in slices.items()}
    except (OSError, SafetensorError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise ModelError(f"{file}: it is cut short or damaged: {reason}") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def write_weight_files(folder: Path, tensors: Iterable[tuple[str, Tensor]], limit: int) -> torch.dtype | None:
    """Write tensors that arrive one by one, instead of the weights that a directory holds.

    Args:
      folder: that they are written to.
      tensors: names and tensors.
      limit: bytes beyond which they are split over several files, with an index.

    Returns: the dtype of the largest one of the last file; None: there are no tensors.
    """
    partials: list[Path] = []
    shards: list[list[str]] = []
    total = 0
    dtype = None
    for shard in split_shards(tensors, limit):
        dtype = max(shard.values(), key=Tensor.numel).dtype
        partials.append(folder / f"model-{len(shards) + 1:05}.safetensors.partial")
        partials[-1].write_bytes(b"")
        mode = partials[-1].stat().st_mode  # the umask's; safetensors makes files that only their owner reads
        save_file(shard, partials[-1], metadata={"format": "pt"})
        partials[-1].chmod(mode)
        shards.append(list(shard))
        total += sum(x.nbytes for x in shard.values())
    count = len(shards)
    files = [WHOLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for partial, file in zip(partials, files, strict=True):
        os.replace(partial, folder / file)
    for old in folder.iterdir():  # a stale file of weights would be loaded instead of the new ones
        if re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?", old.name) and old.name not in files:
            old.unlink()
    if count > 1:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return dtype


def split_shards(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """Shards of at most `limit` bytes, in order and on the CPU; a tensor is never split."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, x in tensors:
        if shard and size + x.nbytes > limit:
            yield shard
            shard = {}
            size = 0
        shard[name] = x.to("cpu").contiguous()
        size = size + x.nbytes
    if shard:
        yield shard
