#!/usr/bin/env bash
# Triton's interpreter cuts float32 to bfloat16 off towards zero, where the compiled kernel rounds to the nearest.
#
# Version: triton 3.7.1, torch 2.13.0 (CPU build), numpy 2.
# Behaviour: with TRITON_INTERPRET=1 `x.to(tl.bfloat16)` of a float32 drops the low 16 bits. The same kernel compiled for
# sm_90 converts by `cvt.rn.bf16`, which rounds to the nearest, and so does torch's `x.bfloat16()`. So a kernel that is
# tested in the interpreter beside torch differs by one last place of bfloat16 in half of its numbers, always towards
# zero, and repeated updates of bfloat16 weights drift there.
# Seen (4,096 numbers in 1 to 2, in last places of bfloat16, 2^-7):
#     interpreted minus float32: -0.973 to -0.004
#     torch minus float32: -0.473 to 0.496
#     compiled for sm_90: cvt.rn.bf16.f32
# Exits with 1 if the behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 triton==3.7.1 numpy
cat > "$work/kernel.py" <<'PY'
import triton
import triton.language as tl


@triton.jit
def cast(x_ptr, y_ptr, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(y_ptr + at, tl.load(x_ptr + at).to(tl.bfloat16))
PY
cat > "$work/interpreted.py" <<'PY'
import sys

import torch
from kernel import cast

x = 1 + torch.arange(4096) / 4096 + 2.0**-15
y = torch.empty(4096, dtype=torch.bfloat16)
cast[(1,)](x, y, 4096)
for name, rounded in (("interpreted", y), ("torch", x.bfloat16())):
    places = (rounded.double() - x.double()) * 128
    print(f"{name} minus float32: {places.min():.3f} to {places.max():.3f}")
errors = (y.double() - x.double()) * 128
if errors.max() > 0 or errors.min() > -0.9:
    sys.exit("the behaviour has changed")
PY
cat > "$work/compiled.py" <<'PY'
import sys

import torch  # noqa: F401
import triton
from kernel import cast
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

source = ASTSource(cast, {"x_ptr": "*fp32", "y_ptr": "*bf16", "n": "constexpr"}, constexprs={(2,): 1024})
text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
found = sorted({word for word in text.split() if word.startswith("cvt.rn.bf16")})
print("compiled for sm_90:", *found)
if not found:
    sys.exit("the behaviour has changed")
PY
cd "$work"
TRITON_INTERPRET=1 "$work/venv/bin/python" interpreted.py
TRITON_CACHE_DIR="$work/cache" "$work/venv/bin/python" compiled.py
