"""Weights that files have in MXFP4: pairs of 4-bit numbers in a byte, and a power of two for each 32 of them.

The tensor `X` [E, K, N] of a layer's experts is two: `X_blocks` [E, N, K / 32, 16], the even number of a pair in the
lower half of a byte, and `X_scales` [E, N, K / 32], exponents of 2 plus 127.

References: Open Compute Project, 2023, OCP Microscaling Formats (MX) Specification 1.0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from funrl.models.errors import ModelError

if TYPE_CHECKING:  # flags are read, and so is config.json, before torch is imported
    from torch import Tensor

MXFP4 = "MXFP4"  # in place of the dtype of such a tensor
MXFP4_BLOCKS = "_blocks"
MXFP4_SCALES = "_scales"
BYTES = 16  # of a block
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NUMBERS = (*_POSITIVE, *(-number for number in _POSITIVE))  # by their four bits
_BIAS = 127  # of exponents

Entry = tuple[tuple[int, ...], str, str]  # shape, dtype and name of the file of a tensor


def whole_entries(entries: Mapping[str, Entry], folder: Path) -> dict[str, Entry]:
    """Tensors of files by their names, pairs of blocks and scales as the tensor that they stand for.

    Raises:
      ModelError: blocks have no scales of their shape.
    """
    whole = dict(entries)
    for name, (shape, dtype, file) in entries.items():
        if not (name.endswith(MXFP4_BLOCKS) and dtype == "U8" and len(shape) == 4):
            continue
        weight = name.removesuffix(MXFP4_BLOCKS)
        scales = entries.get(weight + MXFP4_SCALES)
        if shape[3] != BYTES or scales is None or scales[:2] != (shape[:3], "U8"):
            there = "missing" if scales is None else f"{scales[1]} of shape {list(scales[0])}"
            raise ModelError(
                f"{folder / file}: {name} has shape {list(shape)}, it needs {BYTES} bytes a block and U8 scales of "
                f"shape {list(shape[:3])}; {weight}{MXFP4_SCALES} is {there}"
            )
        del whole[name], whole[weight + MXFP4_SCALES]
        whole[weight] = ((shape[0], 2 * BYTES * shape[2], shape[1]), MXFP4, file)
    return whole


@dataclass(frozen=True)
class Unpacked:
    """A tensor in MXFP4 that is read in float32, as a slice object of safetensors is.

    Attributes:
      blocks, scales: slice objects.
    """

    blocks: Any
    scales: Any

    def get_shape(self) -> list[int]:
        """The shape [E, K, N] of the tensor."""
        experts, outputs, count, _ = self.blocks.get_shape()
        return [experts, 2 * BYTES * count, outputs]

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        import torch

        experts, inner, outputs = (
            slice(*part.indices(size)[:2]) for part, size in zip(index, self.get_shape(), strict=True)
        )
        first = inner.start // (2 * BYTES)
        some = slice(first, -(-inner.stop // (2 * BYTES)))
        bytes_ENGB = self.blocks[experts, outputs, some, 0:BYTES]
        table = torch.tensor(NUMBERS)
        pairs = torch.stack((table[(bytes_ENGB & 15).long()], table[(bytes_ENGB >> 4).long()]), -1)
        exponents_ENG = self.scales[experts, outputs, some].int() - _BIAS
        x_ENK = torch.ldexp(pairs.flatten(-2), exponents_ENG.unsqueeze(-1)).flatten(-2)
        begin = first * 2 * BYTES
        return x_ENK[..., inner.start - begin : inner.stop - begin].transpose(1, 2)


def unpacked(weight: str, file: Callable[[str], Any]) -> Unpacked:
    """A tensor that `whole_entries` has found.

    Args:
      file: name of a tensor -> the opened file that it is in.
    """
    blocks, scales = (file(weight + end).get_slice(weight + end) for end in (MXFP4_BLOCKS, MXFP4_SCALES))
    return Unpacked(blocks, scales)
