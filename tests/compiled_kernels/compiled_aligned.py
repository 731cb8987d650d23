"""Kernels of a fixed order compiled for GPUs that this machine need not have, as a program.

It prints as JSON, for each GPU and form of a kernel, what the assembly says.
"""

import json
import re

import torch  # noqa: F401  # before triton, which it may bring along
import triton
from compiled_rows import GPUS
from triton.compiler import ASTSource

from funrl.compiled_kernels.gpu_kernels import aligned_kernels as kernels

HALF, FULL, WHOLE, WIDE = "*bf16", "*fp32", "*i32", "*fp64"
DIVISIBLE = ("span", "inner", "outputs", "columns", "count", "numbers")
PRODUCT = (HALF, HALF, HALF, HALF, *["i32"] * 5), {"block": 64, "biased": True, "even": True}
ATTENTION = (
    (HALF, HALF, HALF, WHOLE, WHOLE, WHOLE, HALF, FULL, FULL, *["i32"] * 4, "fp32", "fp32", "i32"),
    {"part": 512, "tokens": 32, "block": 64, "group": 2, "heads": 2, "size": 128, "width": 128, "capped": False},
)
NORM = {"numbers": 2048, "width": 2048, "count": 1}
HEADS = {"numbers": 128, "width": 128, "count": 8}
FORMS = {  # kernel, types of the arguments, constants, warps, stages; of Qwen3 1.7B
    "product of many rows": (kernels._product, PRODUCT, {"tile_rows": 128, "tile": 128, "split": False}, 8, 4),
    "product of some rows in parts": (kernels._product, PRODUCT, {"tile_rows": 128, "tile": 128, "split": True}, 8, 4),
    "product of few rows": (kernels._product, PRODUCT, {"tile_rows": 64, "tile": 128, "split": False}, 4, 4),
    "product of few rows in parts": (kernels._product, PRODUCT, {"tile_rows": 64, "tile": 64, "split": True}, 4, 4),
    "product of 32 outputs in parts": (kernels._product, PRODUCT, {"tile_rows": 64, "tile": 32, "split": True}, 4, 4),
    "add parts": (
        kernels._add_parts,
        ((FULL, HALF, HALF, *["i32"] * 3), {}),
        {"block": 1024, "biased": True},
        4,
        2,
    ),
    "attend in training": (kernels._attend, ATTENTION, {"page": 0, "split": False}, 4, 2),
    "attend to pages": (kernels._attend, ATTENTION, {"page": 256, "split": False}, 4, 2),
    "attend in decoding": (kernels._attend, ATTENTION, {"page": 256, "split": True}, 4, 2),
    "attend with wide heads": (
        kernels._attend,
        ATTENTION,
        {"page": 0, "split": False, "capped": True, "size": 256, "width": 256, "block": 32},
        8,
        1,
    ),
    "join parts": (
        kernels._join_parts,
        ((FULL, FULL, WHOLE, HALF, FULL, *["i32"] * 3), {}),
        {"part": 512, "heads": 16, "width_heads": 16, "size": 128, "width": 128},
        4,
        2,
    ),
    "norm": (kernels._norm, ((HALF, HALF, HALF, "i32", "fp32", "fp32"), NORM), {"shifted": False}, 8, 2),
    "norm of heads": (kernels._norm, ((HALF, HALF, HALF, "i32", "fp32", "fp32"), HEADS), {"shifted": False}, 1, 2),
    "norm backward": (kernels._norm_backward, ((*[HALF] * 4, FULL, "i32", "fp32", "fp32"), NORM), {}, 8, 2),
    "norm of heads backward": (kernels._norm_backward, ((*[HALF] * 4, FULL, "i32", "fp32", "fp32"), HEADS), {}, 4, 2),
    "rotate": (
        kernels._rotate,
        ((HALF, HALF, HALF, HALF, "i32", "i32", "fp32"), {}),
        {"heads": 16, "size": 128, "turned": 128, "block": 1024},
        4,
        2,
    ),
    "gate": (kernels._gate, ((HALF, HALF, HALF, "i32"), {}), {"kind": 0, "block": 1024}, 4, 2),
    "gate backward": (kernels._gate_backward, ((*[HALF] * 5, "i32"), {}), {"kind": 0, "block": 1024}, 4, 2),
    "sum logits": (kernels._logit_sums, ((FULL, FULL, WIDE, "i32", "fp32"), {}), {"sums": 3, "block": 4096}, 8, 2),
    "add blocks": (kernels._add_blocks, ((WIDE, WIDE, "i32"), {}), {"sums": 3}, 1, 2),
}


def compiled(gpu, kernel, signature, constants, warps, stages):
    """Assembly of one form; CDNA has 4 warps and 2 stages at most, as the launches say."""
    types, shared = signature
    known = shared | constants
    names = kernel.arg_names
    if known.get("split"):  # results are parts in float32
        place = names.index("out_ptr")
        types = (*types[:place], FULL, *types[place + 1 :])
    if gpu.backend == "hip":
        stages = min(stages, 2)
        warps = 4 if "capped" in known else warps
    whole = [i for i, kind in enumerate(types) if kind.startswith("*") or names[i] in DIVISIBLE]
    source = ASTSource(
        kernel,
        {name: types[i] if i < len(types) else "constexpr" for i, name in enumerate(names)},
        constexprs={(names.index(name),): value for name, value in known.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in whole},
    )
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    return triton.compile(source, target=gpu, options=options).asm


def facts(assembly):
    """Whether vector registers spill, contracted products of float32, and the instructions that multiply matrices."""
    if "amdgcn" in assembly:
        text = assembly["amdgcn"]
        spills = any(map(int, re.findall(r"vgpr_spill_count:\s+(\d+)", text)))
        return {"spills": spills, "products": sorted(set(re.findall(r"v_mfma_\w+", text)))}
    text = assembly["ptx"]
    products = sorted(set(re.findall(r"\b(wgmma|mma)\.\w*mma_async|\b(mma)\.sync", text)))
    kinds = sorted({first or second for first, second in products})
    return {"spills": ".local" in text, "products": kinds, "contracted": len(re.findall(r"fma\.rn\.f32", text))}


def main():
    print(
        json.dumps(
            {f"{g} {name}": facts(compiled(gpu, *form)) for g, gpu in GPUS.items() for name, form in FORMS.items()}
        )
    )


if __name__ == "__main__":
    main()
