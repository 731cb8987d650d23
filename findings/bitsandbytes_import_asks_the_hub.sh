#!/usr/bin/env bash
# `import bitsandbytes` asks the Hugging Face Hub for compiled code where the package kernels is installed.
#
# Version: bitsandbytes 0.50.2, kernels 0.11.3, torch 2.13.0 (CPU build), on a processor with AVX-512 BF16.
# Behaviour: the backend for CPUs calls kernels.get_kernel("kernels-community/quantization-bitsandbytes", version=1)
# while it is imported, before anything is computed. With a network this downloads and loads a library; offline it is
# a warning, and the import goes on. So a program that only expands 4-bit weights, or imports a library that imports
# bitsandbytes, reaches for the network at its start, and its kernels depend on what it got.
# Seen with HF_HUB_OFFLINE=1: imported True, asked True, and the warning
#     Failed to load CPU gemm_4bit_forward from kernels-community: ...
# Exits with 1 if the behaviour has changed, with 0 and a line on processors without AVX-512 BF16, which ask nothing.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 bitsandbytes==0.50.2 kernels==0.11.3
cat > "$work/ask.py" <<'PY'
import logging
import sys

lines = []


class Keep(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())


logging.getLogger("bitsandbytes").addHandler(Keep())
import bitsandbytes  # noqa: E402
from bitsandbytes.functional import has_avx512bf16  # noqa: E402

if not has_avx512bf16():
    print("skipped: this processor has no AVX-512 BF16")
    sys.exit(0)
asked = [line for line in lines if "from kernels-community" in line]
print("imported", bitsandbytes.__version__ == "0.50.2", "asked", bool(asked), "kernels" in sys.modules)
print(*asked, sep="\n")
sys.exit(not (asked and "kernels" in sys.modules))
PY
HF_HUB_OFFLINE=1 HF_HOME="$work/home" "$work/venv/bin/python" "$work/ask.py"
