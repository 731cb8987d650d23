"""Weights that files have in FP8, with a scale for each block of a matrix.

The weight is W_ij = Q_ij S_(i // rows, j // columns): Q is in float8_e4m3fn, and S, whose name ends in `_scale_inv`, is
what it is multiplied by. Blocks at the lower and the right edge may be cut. Without blocks S is one number. Products
are taken in float32 and then rounded, as DeepSeek's own conversion does.

References: DeepSeek-AI, 2024, https://arxiv.org/abs/2412.19437
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from funrl.models.errors import ModelError

if TYPE_CHECKING:  # flags are read, and so is config.json, before torch is imported
    from torch import Tensor

FIELD = "quantization_config"
FP8 = "F8_E4M3"  # the dtype in the table of a file
SCALES = ("_scale_inv", "_scale")  # behind the name of a weight: that of its scales
SCALE_DTYPES = ("F32", "BF16", "F16")
OF_ACTIVATIONS = (".activation_scale", ".input_scale")  # for products in FP8, which are not taken here
LARGEST_BLOCK = 2**20


class Blocks(NamedTuple):
    """Sizes of the blocks of a directory's FP8 weights; 0: a weight is one block."""

    rows: int
    columns: int

    def of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The same of a weight."""
        return self.rows or max(1, shape[0]), self.columns or max(1, shape[1])


def fp8_blocks(raw: Mapping[str, Any]) -> Blocks | None:
    """The blocks of the FP8 weights beside a parsed config.json; None: weights are not quantized.

    Raises:
      ModelError: they are quantized in another way.
    """
    quantization = raw.get(FIELD)
    if quantization is None:
        return None
    if not isinstance(quantization, Mapping):
        raise ModelError(f"{FIELD} is {quantization!r}, it must be an object")
    method = quantization.get("quant_method")
    kind = quantization.get("fmt", "e4m3")
    if method == "mxfp4":  # its tensors say it themselves
        return None
    if method != "fp8":
        raise ModelError(
            f"{FIELD}.quant_method is {method!r}, supported are 'fp8' and 'mxfp4'; take the model's files without "
            "quantization, or write such files with transformers (from_pretrained, dequantize, save_pretrained)"
        )
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise ModelError(f"{FIELD}.fmt is {kind!r}, supported is 'e4m3'")
    sizes = quantization.get("weight_block_size")
    if sizes is None:
        return Blocks(0, 0)
    good = isinstance(sizes, list | tuple) and all(type(size) is int and 0 < size <= LARGEST_BLOCK for size in sizes)
    if not good or len(sizes) != 2:
        raise ModelError(f"{FIELD}.weight_block_size is {sizes!r}, it must be two whole numbers of at least 1, or null")
    return Blocks(*sizes)


def without_quantization(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json of the weights as they are read. Raises: ModelError, as `fp8_blocks`."""
    fp8_blocks(raw)
    return {name: value for name, value in raw.items() if name != FIELD}


def scales_name(weight: str, there: Mapping[str, Any]) -> str:
    """The name of the tensor with an FP8 weight's scales among the existing names; the usual name if none exists."""
    return next((weight + end for end in SCALES if weight + end in there), weight + SCALES[0])


def is_beside_fp8(name: str, dtypes: Mapping[str, str]) -> bool:
    """True of the scales of an FP8 weight, and of those of what it is multiplied by.

    Args:
      dtypes: of the tensors of all files by their names.
    """
    scaled = [name.removesuffix(end) for end in SCALES if name.endswith(end)]
    scaled += [name.removesuffix(end) + ".weight" for end in OF_ACTIVATIONS if name.endswith(end)]
    return any(dtypes.get(weight, "").startswith("F8_") for weight in scaled)  # those of another kind are refused


def check_scales(
    weight: str, there: Mapping[str, tuple[tuple[int, ...], str, str]], blocks: Blocks | None, folder: Path
) -> None:
    """Check that an FP8 weight can be read.

    Args:
      there: shape, dtype and name of the file of the tensors of all files by their names.
      folder: of the files.

    Raises:
      ModelError: config.json does not say that there are such weights, or the scales are missing or are not its own.
    """
    shape, _, file = there[weight]
    name = scales_name(weight, there)
    subject = f"{folder / file}: {weight} has dtype {FP8}"
    if blocks is None:
        raise ModelError(f"{subject}, but config.json has no {FIELD} that says how it is scaled")
    if len(shape) != 2:
        raise ModelError(f"{subject} and shape {list(shape)}, FP8 is supported of matrices")
    if name not in there:
        raise ModelError(f"{subject}, but its scales, {name}, are missing")
    scale_shape, dtype, file = there[name]
    expected = [-(-length // size) for length, size in zip(shape, blocks.of(shape), strict=True)]
    if list(scale_shape) != expected and not (blocks.rows == 0 and math.prod(scale_shape) == 1):
        block_size = list(blocks) if blocks.rows else "null"
        raise ModelError(
            f"{folder / file}: {name} has shape {list(scale_shape)}, {weight} of shape {list(shape)} with "
            f"weight_block_size {block_size} in config.json needs {expected}"
        )
    if dtype not in SCALE_DTYPES:
        raise ModelError(f"{folder / file}: {name} has dtype {dtype}, supported are {list(SCALE_DTYPES)}")


@dataclass(frozen=True)
class Dequantized:
    """An FP8 weight that is read in float32, as a slice object of safetensors is: of its scales only those of the part.

    Attributes:
      held: the slice object of the weight, [rows, columns].
      scales: the same of its scales, or these [1, 1].
      block: rows and columns of a block.
    """

    held: Any
    scales: Any
    block: tuple[int, int]

    def get_shape(self) -> list[int]:
        """The shape of the weight."""
        return self.held.get_shape()

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        given = index if isinstance(index, tuple) else (index,)
        ranges = [part.indices(n)[:2] for part, n in zip((*given, slice(None))[:2], self.get_shape(), strict=True)]
        part_RC = self.held[tuple(slice(*ends) for ends in ranges)].float()
        if not part_RC.numel():
            return part_RC
        pairs = list(zip(ranges, self.block, strict=True))
        scales = self.scales[tuple(slice(low // size, -(-high // size)) for (low, high), size in pairs)].float()
        row, column = (low % size for (low, _), size in pairs)  # of the part's first number in its block
        rows = scales.repeat_interleave(min(self.block[0], row + len(part_RC)), 0)[row : row + len(part_RC)]
        begin = -column
        for scale_R in rows.unbind(1):
            part_RC[:, max(begin, 0) : begin + self.block[1]] *= scale_R[:, None]
            begin += self.block[1]
        return part_RC


def dequantized(weight: str, there: Mapping[str, Any], blocks: Blocks, file: Callable[[str], Any]) -> Dequantized:
    """An FP8 weight that `check_scales` has passed.

    Args:
      there: by names of tensors.
      file: name of a tensor -> the opened file that it is in.
    """
    name = scales_name(weight, there)
    held = file(weight).get_slice(weight)
    scales = file(name).get_slice(name) if blocks.rows else file(name).get_tensor(name).reshape(1, 1)
    return Dequantized(held, scales, blocks.of(tuple(held.get_shape())))
