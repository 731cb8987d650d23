"""The kernels of `gpu_kernels` and `logit_rows` compiled for GPUs that this machine need not have, as a program.

It prints as JSON, for each GPU and kernel, what the assembly says.
"""

import json

import compiled_decode
import compiled_rows
import torch  # noqa: F401  # before triton, which it may bring along
import triton
import triton.language as tl
from triton.compiler import ASTSource

from funrl.compiled_kernels.gpu_kernels import adamw_kernel, page_kernels, tail_kernel

HALF, FULL, WHOLE = "*bf16", "*fp32", "*i32"
HEADS = {"page": 256, "block": 64, "group": 2, "size": 128, "width": 128}
ADAMW = {"grad_type": tl.bfloat16, "mu_type": tl.float32, "param_type": tl.float32, "target_type": tl.float32}
ADAMW |= {"copy_type": tl.bfloat16, "in_place": True, "aligned": 16, "width": 2048}
SUM = {"total_type": tl.float32, "first_type": tl.bfloat16, "second_type": tl.bfloat16, "aligned": 16, "width": 2048}
KERNELS = {  # types of the arguments, constants, warps
    page_kernels._decode_parts: (
        (HALF, HALF, HALF, WHOLE, WHOLE, WHOLE, FULL, FULL, "i32", "i32", "fp32", "fp32", "i32"),
        HEADS | {"part": 512, "rows": 16, "capped": False},
        4,
    ),
    page_kernels._prompt_tiles: (
        (HALF, HALF, HALF, WHOLE, WHOLE, WHOLE, HALF, HALF, "i32", "i32", "i32", "fp32", "fp32", "i32"),
        HEADS | {"tokens": 32, "heads": 2, "capped": False, "sinks": False},
        4,
    ),
    page_kernels._write: ((HALF, HALF, HALF, HALF, "*i64", "i32", "i32"), {"numbers": 1024, "width": 1024}, 4),
    tail_kernel._zero_tail: ((HALF, WHOLE, "i32", "i32", "i32"), {"width": 1024}, 4),
    adamw_kernel._adamw: (("*i64", FULL, WHOLE, FULL, *["fp32"] * 5), ADAMW, 4),
    adamw_kernel._add: (("*i64", WHOLE), SUM, 4),
}


def compiled(kernel, gpu):
    types, constants, warps = KERNELS[kernel]
    names = kernel.arg_names
    whole = [
        i
        for i, kind in enumerate(types)
        if kind.startswith("*") or names[i] in ("size", "k_stride", "v_stride", "numbers")
    ]
    source = ASTSource(
        kernel,
        dict(zip(names, (*types, *["constexpr"] * len(constants)), strict=True)),
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in whole},
    )
    return triton.compile(source, target=gpu, options={"num_warps": warps}).asm


def main():
    results = {}
    for name, gpu in compiled_rows.GPUS.items():
        for kernel in KERNELS:
            results[f"{name} {kernel.__name__}"] = compiled_rows.facts(compiled(kernel, gpu))
        for kernel in compiled_rows.TYPES:
            results[f"{name} {kernel.__name__}"] = compiled_rows.facts(compiled_rows.compiled(kernel, gpu))
        for kernel in compiled_decode.KERNELS:
            results[f"{name} {kernel.__name__}"] = compiled_rows.facts(compiled_decode.compiled(kernel, gpu))
    results["trials"] = compiled_decode.compile_trials(compiled_rows.GPUS["sm_90"])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
