"""The kernels of `logit_rows` compiled for GPUs that this machine need not have; compiled_pages.py is the program."""

import re

import torch  # noqa: F401  # before triton, which it may bring along
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from funrl.compiled_kernels.logit_rows import divergence_kernels, kernels

GPUS = {"sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}
TYPES = {
    kernels._row_sums: ("*fp32", "*i64", "*fp32", "*fp32", "i32", "i32", "i32", "fp32", "fp32"),
    kernels._d_logits: ("*fp32", "*i64", "*fp32", "*fp32", "*bf16", "i32", "i32", "i32", "i32", "fp32", "fp32"),
    divergence_kernels._divergence_sums: ("*fp32",) * 4 + ("i32",) + ("fp32",) * 5,
    divergence_kernels._divergence_gradients: ("*fp32",) * 3 + ("*bf16", "i32") + ("fp32",) * 5,
}


def compiled(kernel, gpu):
    """Assembly with all that a kernel can do."""
    types = TYPES[kernel]
    names = kernel.arg_names
    flags = {"width": kernels._WIDTH, "picks": 64, "kind": 2}
    known = {name: flags.get(name, True) for name in names[len(types) :]}
    whole = [i for i, kind in enumerate(types) if kind.startswith("*") or names[i] in ("V", "B", "first", "stride")]
    source = ASTSource(
        kernel,
        dict(zip(names, (*types, *["constexpr"] * len(known)), strict=True)),
        constexprs={(names.index(name),): value for name, value in known.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in whole},
    )
    return triton.compile(source, target=gpu, options={"num_warps": kernels._WARPS}).asm


def facts(assembly):
    """Whether registers did not suffice, and whether a thread reads 16 bytes at a time."""
    if "amdgcn" in assembly:
        text = assembly["amdgcn"]
        spilled = any(map(int, re.findall(r"gpr_spill_count:\s+(\d+)", text)))
        return {"spills": spilled, "wide": "load_dwordx4" in text}
    text = assembly["ptx"]
    return {"spills": ".local" in text, "wide": "ld.global.v4" in text}
