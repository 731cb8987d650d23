"""The processor of this machine, and what decides the bits of matrix products on it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "MKL_CBWR"  # which `funrl` sets to AUTO where the user has not set it
CAPS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "FUNRL_ISA")  # variables that take instructions away
SYMBOLS = ("mkl_serv_cbwr_get", "mkl_cbwr_get")  # inside libtorch, where MKL is linked into it; in a library of its own
BRANCH_AND_FLAGS = -1  # asks for branch and flags
OFF = 1  # the branch whose bits depend on the alignment of memory


def processor_facts() -> dict[str, str]:
    """Facts that decide the last bits of a run on a CPU: the processor, torch's kernels for it and MKL's mode."""
    import torch

    capped = {name: os.environ[name] for name in CAPS if os.environ.get(name)}
    kernels = torch.backends.cpu.get_cpu_capability()
    return {"name": processor_name(), "kernels": kernels, VARIABLE: products_mode()} | capped


def processor_name() -> str:
    """Name of the processor as Linux has it, such as "AMD EPYC 9654 96-Core Processor"; elsewhere as Python has it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def other_processor(before: Mapping[str, str] | None) -> str:
    """Remark on a resumed run whose last bits will differ; "" where they will not.

    Args:
      before: facts of the processor that the run had; None: they were not recorded.
    """
    if before is None:
        return ""
    now = processor_facts()
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if not changed:
        return ""
    pairs = (f"{name} {before.get(name, 'not set')}, now {now.get(name, 'not set')}" for name in changed)
    changes = "; ".join(pairs)
    return f"the checkpoint was written on another processor or in another mode of it, so last bits differ: {changes}"


def products_mode() -> str:
    """Mode of MKL's products in this process: MKL_CBWR's value, "off" where it came too late, or "no MKL".

    MKL reads MKL_CBWR once, before its first product.
    """
    import torch

    if not torch.backends.mkl.is_available():
        return "no MKL"
    if _branch() == OFF:
        return "off"
    return os.environ.get(VARIABLE, "off")


def products_problem() -> str:
    """Remark on products whose bits depend on where tensors are in memory; "" where they do not."""
    if products_mode() != "off":
        return ""
    value = os.environ.get(VARIABLE)
    if value in (None, ""):
        reason = f"{VARIABLE} is {'not set' if value is None else 'empty'}; set it to AUTO before Python starts"
    else:
        reason = (
            f"torch multiplied matrices before funrl was imported, so that {VARIABLE}={value} came too late; import "
            f"funrl first, or set {VARIABLE}={value} before Python starts"
        )
    return f"the last bits of matrix products may differ from one equal run to the next: {reason}"


def _branch() -> int | None:
    """Branch of MKL's code that is in force; None: the library does not say."""
    import torch

    for path in (Path(torch.__file__).parent / "lib" / "libtorch_cpu.so", None):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(None if path is None else str(path))
            for symbol in SYMBOLS:
                if hasattr(library, symbol):
                    return getattr(library, symbol)(BRANCH_AND_FLAGS)
    return None
