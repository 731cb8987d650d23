#!/usr/bin/env bash
# flash-attn-4 takes the name of flash-attn without its functions, and reads -1 on one side of a window as a bound.
#
# Version: flash-attn-4 4.0.0b36 with nvidia-cutlass-dsl 4.6.2 and quack-kernels 0.5.3, torch 2.13.0 (CPU build).
# Behaviour:
#   1. The wheel installs `flash_attn/cute` and no `flash_attn/__init__.py`. So `import flash_attn` succeeds, and
#      `importlib.util.find_spec("flash_attn")` finds it, where flash-attn (2) is not installed; code that takes this as
#      a sign of flash-attn and then reads `flash_attn.flash_attn_varlen_func` meets an AttributeError, not an ImportError.
#   2. flash-attn (2) and torch's operator write "no bound" as -1 on either side: (-1, 0) is causal attention over all
#      earlier tokens. Here only (-1, -1) is read so. Beside 0 the -1 stays a number: the call counts as local attention,
#      even with causal=True, while None in its place gives plain causal attention.
# Seen:
#     namespace without functions: True
#     causal, (-1, 0): (False, True, -1, 0)     (causal, local, left, right)
#     causal, (None, None): (True, False, None, None)
# Exits with 1 if the behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy einops typing_extensions triton==3.7.1 "protobuf<7,>=6.30.2" \
    "apache-tvm-ffi==0.1.15.post2" "torch-c-dlpack-ext==0.1.5" "cuda-python==12.9.0"
"$work/venv/bin/pip" install --quiet --no-deps flash-attn-4==4.0.0b36 quack-kernels==0.5.3 nvidia-cutlass-dsl==4.6.2 \
    nvidia-cutlass-dsl-libs-base==4.6.2 nvidia-cutlass-dsl-libs-core==4.6.2 nvidia-cutlass-dsl-libs-cu12==4.6.2
cat > "$work/look.py" <<'PY'
import importlib.util
import sys

import flash_attn
from flash_attn.cute.interface import _resolve_causal_local_window as resolve

bare = importlib.util.find_spec("flash_attn") is not None and not hasattr(flash_attn, "flash_attn_varlen_func")
beside_zero, none = resolve(True, -1, 0), resolve(True, None, None)
print("namespace without functions:", bare)
print("causal, (-1, 0):", beside_zero)
print("causal, (None, None):", none)
if not (bare and beside_zero == (False, True, -1, 0) and none == (True, False, None, None)):
    sys.exit("the behaviour has changed")
PY
FLASH_ATTENTION_ARCH=sm_90 CUTE_DSL_ARCH=sm_90a FLASH_ATTENTION_NUM_SMS=132 "$work/venv/bin/python" "$work/look.py"
