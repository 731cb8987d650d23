"""Directories whose matrices are stored in FP8, made of plain ones by a reference of quantization."""

import json
import math

import torch
from safetensors.torch import load_file, save_file

PLAIN = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")  # matrices that published files leave as they are


def spread(scales, block, shape):
    """The scale of each number of a matrix."""
    return torch.kron(scales.float(), torch.ones(block))[: shape[0], : shape[1]]


def quantize(w, block, dtype=torch.float32):
    """A matrix in FP8 with the scales of its blocks, so that the largest number of a block is FP8's largest."""
    counts = [math.ceil(length / size) for length, size in zip(w.shape, block, strict=True)]
    full = torch.zeros([n * size for n, size in zip(counts, block, strict=True)])
    full[: w.shape[0], : w.shape[1]] = w
    largest = full.view(counts[0], block[0], counts[1], block[1]).abs().amax((1, 3))
    scales = (largest / torch.finfo(torch.float8_e4m3fn).max).to(dtype)
    return (w / spread(scales, block, w.shape)).to(torch.float8_e4m3fn), scales


def to_fp8(folder, block=(16, 16), dtype=torch.float32, suffix="_scale_inv"):
    """Store the projections of a directory in FP8.

    Args:
      block: None: a weight has one scale, and so have the numbers that it is multiplied by.

    Returns: all tensors as they are to be read.
    """
    weights, stored, meant = load_file(folder / "model.safetensors"), {}, {}
    for name, w in weights.items():
        stored[name] = meant[name] = w
        if w.ndim == 2 and not name.endswith(PLAIN):
            sizes = tuple(w.shape) if block is None else block
            stored[name], scales = quantize(w.float(), sizes, dtype)
            meant[name] = stored[name].float() * spread(scales, sizes, w.shape)
            stored[name + suffix] = scales if block is not None else scales.reshape(())
            if block is None:
                stored[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.5)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(
        folder,
        quantization_config={
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": None if block is None else list(block),
        },
    )
    return meant


def edit_config(folder, **fields):
    """Set fields of a directory's config.json."""
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | fields))
