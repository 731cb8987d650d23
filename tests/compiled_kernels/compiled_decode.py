"""The kernels of fused decoding compiled for GPUs that this machine need not have; compiled_pages.py is the program."""

import torch  # before triton, which it may bring along
import triton
from triton.compiler import ASTSource

from funrl.compiled_kernels import fused_decode
from funrl.compiled_kernels.gpu_kernels import decode_kernels, sampler_kernels
from funrl.rollout.native.device import row_sampler

EIGHT = "*fp8e4nv"
HALF, FULL, WIDE, WHOLE, LONG = "*bf16", "*fp32", "*fp64", "*i32", "*i64"
SLOTS = {"length_row": 0, "ended_row": 5}
KERNELS = {  # types of the arguments, constants, warps; of Qwen3 1.7B
    decode_kernels._begin: (
        (LONG, LONG, LONG, WHOLE, HALF, HALF, FULL, *[HALF] * 4, LONG, *[WHOLE] * 3, *["i32"] * 3, "fp32", "fp32"),
        SLOTS | {"page": 256, "pages": 128, "numbers": 2048, "width": 2048, "head": 128, "half": 64},
        8,
    ),
    decode_kernels._heads: (
        (FULL, *[HALF] * 5, LONG, *[HALF] * 3, "i32", "fp32"),
        {"queries": 16, "keys": 8, "head": 128, "width": 128, "parts": 4, "biased": True, "normed": True},
        1,
    ),
    decode_kernels._add_norm: (
        (HALF, FULL, HALF, HALF, HALF, "i32", "fp32"),
        {"numbers": 2048, "width": 2048, "parts": 8, "biased": True},
        8,
    ),
    decode_kernels._round_rows: ((HALF, EIGHT, FULL, "fp32", "fp32"), {"numbers": 6144, "width": 8192}, 8),
    decode_kernels._gate: ((HALF, HALF, "i32"), {"numbers": 6144, "block": 1024, "parts": 1}, 4),
    decode_kernels._split_product: (
        (HALF, HALF, FULL, "i32", "i32", "i32", "i32"),
        {"count": 16, "tile": 64, "block": 128},
        4,
    ),
    sampler_kernels._block_sums: (
        (FULL, FULL, WIDE, WIDE, "i32", "i32", "fp32"),
        {"blocks": 16, "block": 256, "tempered": True},
        4,
    ),
    sampler_kernels._sample: (
        (LONG, LONG, LONG, FULL, FULL, WIDE, WIDE, LONG, FULL, FULL, *["i32"] * 3, "fp32", "i32"),
        {
            "stops": 3,
            "stop_width": 4,
            "width": 1024,
            "greedy": False,
            "tempered": True,
            "grouped": True,
        },
        4,
    ),
}


TYPES = {torch.float32: FULL, torch.float64: WIDE, torch.int64: LONG, torch.int32: WHOLE, torch.bfloat16: HALF}


def compile_trials(gpu):
    """Compile each kernel as the trials on the first pass call it; returns their names. Nothing is computed."""
    names = []

    def compile_call(kernel, grid, args, constants, warps=4):
        signature = {}
        known = {**constants, "pdl": True}
        for name, value in zip(kernel.arg_names, args, strict=False):
            if isinstance(value, torch.Tensor):
                signature[name] = TYPES[value.dtype]
            elif isinstance(value, float):
                signature[name] = "fp32"
            elif value == 1:  # as Triton specializes
                known[name] = 1
            else:
                signature[name] = "i32"
        signature |= dict.fromkeys(known, "constexpr")
        source = ASTSource(
            kernel,
            {name: signature[name] for name in kernel.arg_names},
            constexprs={(kernel.arg_names.index(name),): value for name, value in known.items()},
        )
        triton.compile(source, target=gpu, options={"num_warps": warps, "launch_pdl": True})
        names.append(kernel.__name__)

    fused_decode.runs_kernels = lambda x: True
    decode_kernels.launch_kernel = sampler_kernels.launch_kernel = compile_call
    fused_decode.fused_decode_error("cpu", torch.bfloat16)
    row_sampler.row_sampler_error("cpu")
    return names


def compiled(kernel, gpu):
    """Assembly; on the NVIDIA GPU of a kernel that waits for the one before it."""
    types, constants, warps = KERNELS[kernel]
    types = [kind.replace(EIGHT, "*fp8e4b8") if gpu.backend == "hip" else kind for kind in types]  # AMD's format
    pdl = gpu.backend == "cuda"
    constants = constants | {"pdl": pdl}
    names = kernel.arg_names
    whole = [
        i for i, kind in enumerate(types) if kind.startswith("*") or names[i] in ("inner", "span", "stride", "vocab")
    ]
    source = ASTSource(
        kernel,
        dict(zip(names, (*types, *["constexpr"] * len(constants)), strict=True)),
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in whole},
    )
    options = {"num_warps": warps} | ({"launch_pdl": True} if pdl else {})
    assembly = triton.compile(source, target=gpu, options=options).asm
    waits = pdl and all(f"griddepcontrol.{name}" in assembly["ptx"] for name in ("wait", "launch_dependents"))
    assert waits == pdl, f"{kernel.__name__} does not wait for the kernel before it"
    return assembly
