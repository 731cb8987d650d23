"""The instructions of a benchmark: those of the processor, or with `--isa=avx2` AVX2 and FMA on one that has more.

A capped run shows bits and paths, not the speed of a processor with AVX2 alone. The caps are variables that torch,
oneDNN, MKL, Inductor, funrl's kernels and vLLM's process read; the program starts again with them. MKL obeys its cap on
Intel's processors; on AMD's its products use AVX2 in any case.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from absl import flags

from funrl.compiled_kernels.kernel_library import ISA as KERNELS_ISA

ISA = flags.DEFINE_enum("isa", "native", ["native", "avx2"], "instructions of all libraries; native: the processor's")
FOLDER = Path(tempfile.gettempdir()) / f"funrl-avx2-{os.getuid()}"  # of code that was compiled under the caps
CAPS = {
    KERNELS_ISA: "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",  # torch's kernels, and the loops that Inductor makes
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "TORCHINDUCTOR_CACHE_DIR": str(FOLDER / "inductor"),
    "VLLM_CACHE_ROOT": str(FOLDER / "vllm"),
}
PROBE = """
import torch
x = torch.ones(64, 64)
x @ x
x.to_mkldnn() + x.to_mkldnn()
"""


def limit_instructions() -> None:
    """Start the program again with the caps of --isa unless it has them, and print the instructions in force.

    Raises:
      SystemExit: something uses other instructions than --isa allows.
    """
    if ISA.value == "avx2" and any(os.environ.get(name) != value for name, value in CAPS.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | CAPS)
    from funrl.processes.processor import processor_name

    found = instructions()
    text = ", ".join(f"{library} {isa}" for library, isa in found.items())
    print(f"{processor_name()}{', AVX2 forced' * (ISA.value == 'avx2')}: {text}", flush=True)
    wrong = [library for library, isa in found.items() if re.search("avx-?512|amx", isa, re.IGNORECASE)]
    if ISA.value == "avx2" and wrong:
        raise SystemExit(f"--isa=avx2: more than AVX2 is in force in {', '.join(wrong)}")


def instructions() -> dict[str, str]:
    """Instructions in force by library, as each of them says."""
    import torch
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    from funrl.compiled_kernels.kernel_library import library, library_problem

    kernels = library_problem() or {64: "AVX-512", 32: "AVX2"}[library().funrl_panel()]
    verbose = os.environ | {"MKL_VERBOSE": "1", "ONEDNN_VERBOSE": "1"}
    probe = subprocess.run(
        [sys.executable, "-c", PROBE], env=verbose, capture_output=True, text=True, check=True
    ).stdout
    onednn = re.search(r"cpu,isa:(.*)", probe)
    mkl = re.search(
        r"^MKL_VERBOSE oneMKL.*? for Intel\(R\) 64 architecture (.*?) (enabled )?processors", probe, re.MULTILINE
    )
    return {
        "torch": torch.backends.cpu.get_cpu_capability(),
        "Inductor": str(pick_vec_isa()) or "none",
        "oneDNN": onednn[1] if onednn else "none",
        "MKL": mkl[1] if mkl else "none",
        "funrl": kernels,
    }
