"""The kernels of `delta_rule` compiled for GPUs that this machine need not have, as a program.

It prints as JSON, for each GPU, size of a head and kernel, its registers, what it spills and its shared memory.
"""

import json
import re
import subprocess
import sys
import tempfile

import torch  # noqa: F401  # before triton, which it may bring along
import triton
from compiled_rows import GPUS
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from funrl.compiled_kernels.delta_rule import kernels

HALF, FULL = "*bf16", "*fp32"
TYPES = {
    kernels._condense: (HALF, HALF, FULL, HALF, FULL, *[HALF] * 3),
    kernels._advance: (HALF, HALF, FULL, FULL, *[HALF] * 5, FULL),
    kernels._retreat: (HALF, FULL, HALF, HALF, FULL, *[HALF] * 3, FULL),
    kernels._read_gradients: (*[HALF] * 3, FULL, *[HALF] * 7, FULL),
    kernels._condensed_gradients: (*[HALF] * 3, FULL, *[HALF] * 7, FULL, FULL),
}
FORMS = [  # kernels, constants by the size of a head, and whether it is one of gradients
    (kernels._condense, {"keep": False}, kernels._BLOCK, False),
    (kernels._condense, {"keep": True}, kernels._BLOCK, False),
    (kernels._advance, {"keep": False}, kernels._VALUES, False),
    (kernels._advance, {"keep": True}, kernels._VALUES, False),
    (kernels._retreat, {}, kernels._VALUES, False),
    (kernels._read_gradients, {"keys": 64}, kernels._VALUES, True),
    (kernels._condensed_gradients, {}, kernels._VALUES, True),
]


def compiled(kernel, constants, gpu, warps):
    names = kernel.arg_names
    types = (*TYPES[kernel], "i32")
    known = {name: constants[name] for name in names[len(types) :]}
    source = ASTSource(
        kernel,
        dict(zip(names, (*types, *["constexpr"] * len(known)), strict=True)),
        constexprs={(names.index(name),): value for name, value in known.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind.startswith("*")},
    )
    return triton.compile(source, target=gpu, options={"num_warps": warps, "num_stages": kernels._STAGES})


def facts(result):
    assembly = result.asm
    shared = result.metadata.shared
    if "amdgcn" in assembly:
        text = assembly["amdgcn"]
        registers = int(re.findall(r"\.vgpr_count:\s+(\d+)", text)[0])
        spills = sum(map(int, re.findall(r"(?:vgpr_spill_count|private_segment_fixed_size):\s+(\d+)", text)))
        return {"registers": registers, "spills": spills, "shared": shared}
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(assembly["ptx"])
        file.flush()
        arch = re.search(r"\.target (sm_\w+)", assembly["ptx"])[1]
        command = [get_ptxas(90).path, "-v", f"--gpu-name={arch}", file.name, "-o", "/dev/null"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stores, loads = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text).groups()
    registers = int(re.search(r"Used (\d+) registers", text)[1])
    return {"registers": registers, "spills": int(stores) + int(loads), "shared": shared}


def main():
    results = {}
    for name, gpu in GPUS.items():
        for head in map(int, sys.argv[1:]):
            sizes = {"K": 16, "H": 32, "N": head, "M": head, "precision": "tf32" if name == "sm_90" else "ieee"}
            for kernel, constants, block, of_gradients in FORMS:
                warps = 8 if of_gradients and name == "sm_90" else kernels._WARPS
                result = compiled(kernel, sizes | {"block": min(block, head)} | constants, gpu, warps)
                keep = " keep" * constants.get("keep", False)
                results[f"{name} {head} {kernel.__name__}{keep}"] = facts(result)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
