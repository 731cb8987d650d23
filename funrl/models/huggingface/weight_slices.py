"""Parts of the tensors of a Hugging Face directory, read without the rest of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from funrl.models.errors import ModelError
from funrl.models.huggingface.fp8_files import FP8, dequantized, fp8_blocks
from funrl.models.huggingface.mxfp4_files import MXFP4_BLOCKS, unpacked
from funrl.models.huggingface.names import UNEMBED, Stored
from funrl.models.huggingface.weight_files import read_json, weight_tables

TIED_ROWS = 4096  # compared at a time


def tensor_slices(folder: Path, tables: Mapping[Path, Mapping[str, Any]] | None = None) -> Callable[[str], Any]:
    """A function: name of a tensor -> what is sliced to read of it, a slice object of safetensors or `Dequantized`.

    Args:
      folder: a directory; everything but its numbers has been checked.
      tables: of its files, where they have been read.
    """
    tables = weight_tables(folder) if tables is None else tables
    where = {name: file for file, table in tables.items() for name in table}
    blocks = fp8_blocks(read_json(folder / "config.json"))
    packed = {name.removesuffix(MXFP4_BLOCKS) for name in where if name.endswith(MXFP4_BLOCKS)}
    opened = dict[Path, Any]()

    def file_of(name: str) -> Any:
        file = where[name]
        if file not in opened:
            opened[file] = safe_open(file, framework="pt")
        return opened[file]

    def tensor(name: str) -> Any:
        if name in packed and name not in where:
            return unpacked(name, file_of)
        if blocks is not None and tables[where[name]][name]["dtype"] == FP8:
            return dequantized(name, where, blocks, file=file_of)
        return file_of(name).get_slice(name)

    return tensor


def check_tied(file: Path, embed: str, tensor: Callable[[str], Any]) -> None:
    """Raise ModelError where a second copy of tied embeddings is not a copy. Both are read, some rows at a time.

    Args:
      file: of the copy.
      tensor: as `tensor_slices` gives it.
    """
    first = tensor(embed)
    other = tensor(UNEMBED)
    shapes = [tuple(part.get_shape()) for part in (first, other)]
    rows = range(0, shapes[0][0], TIED_ROWS) if shapes[0] == shapes[1] else ()
    if rows and all(torch.equal(first[i : i + TIED_ROWS], other[i : i + TIED_ROWS]) for i in rows):
        return
    raise ModelError(
        f"{file}: {UNEMBED} is not {embed}, but config.json has tie_word_embeddings: true; set it to false to use "
        f"both, or take {UNEMBED} out of the file"
    )


def read_part(tensor: Any, stored: Stored, shape: tuple[int, ...], box: tuple[tuple[int, int], ...]) -> Tensor:
    """The part `box` of our tensor of `shape`, read from rows of a stored one in which some neighbouring dims are one.

    Args:
      tensor: a slice object of safetensors, or `Dequantized`.
    """
    if not shape:
        return tensor[()]
    if len(stored.shape) > len(shape):  # a matrix of one row
        return tensor[(slice(0, 1), *(slice(*edge) for edge in box))][0]
    if stored.turn is not None:
        number, count = stored.turn
        first, (low, high), *inner = box
        index = (slice(*first), *(slice(*edge) for edge in inner), slice(low * count, high * count))
        numbers = tensor[index][..., number::count]
        return numbers.mT if inner else numbers
    if stored.columns is not None:
        experts, (low, high), inner = box
        own = slice(stored.columns[0] + low, stored.columns[0] + high)
        if tuple(tensor.get_shape()) == (stored.shape[0], *stored.shape[:0:-1]):
            return tensor[(slice(*experts), own, slice(*inner))]
        return tensor[(slice(*experts), slice(*inner), own)].mT
    index = []
    part = []
    rest = []
    dim = 0
    begin, end = stored.rows
    for length in (end - begin, *stored.shape[1:]):
        # of the dims that are one in the file, up to `dim`
        low = 0
        high = 1
        merged = 1
        first = dim
        while merged < length or dim == first:
            # of one index of the dims before, only a part of this one is read
            only = high - low == 1
            inner = shape[dim]
            inside = box[dim] if only else (0, inner)
            low = low * inner + inside[0]
            high = (high - 1) * inner + inside[1]
            part.append(inside[1] - inside[0])
            rest.append(slice(None) if only else slice(*box[dim]))
            merged = merged * inner
            dim = dim + 1
        index.append(slice(begin + low, begin + high))
        begin = 0  # of the dims behind the first
    return tensor[tuple(index)].reshape(part)[tuple(rest)]
