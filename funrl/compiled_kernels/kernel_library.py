"""The C++ kernels of this package: compiled at first use, kept in the user's cache, loaded with ctypes.

A file of the cache is named after everything that its bits depend on: the sources, the compiler, its flags, and the
processor. Many ranks may compile at once: each writes a file of its own and renames it.

The kernels use all instructions of the processor. `FUNRL_ISA=avx2` compiles them without AVX-512, `FUNRL_ISA=avx512`
without the matrix unit (AMX), as for a processor that lacks these.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

FLAGS = "-std=c++20 -O3 -march=native -ffp-contract=off -fno-math-errno -fPIC -shared -pthread -Wno-psabi"
NEEDED = ("avx2", "fma")  # of the processor
ISA = "FUNRL_ISA"
ISA_CAPS = {
    "": (),
    "avx2": ("-mno-avx512f",),
    "avx512": ("-mno-amx-bf16",),
}  # value of FUNRL_ISA: flags of the compiler
_FOLDER = Path(__file__).parent
SOURCE = "decode_step.cpp"
_P = ctypes.c_void_p
_N = ctypes.c_int64
_I = ctypes.c_int
_F = ctypes.c_double
_ARGUMENTS = {  # as the source declares them
    "funrl_panel": (),
    "funrl_pack": (_I, _P, _N, _N, _N, _P),
    "funrl_digest": (_P, _N),
    "funrl_forward": (_I, _P, _P, _N),
    "funrl_linear": (_I, _P, _P, _P, _P, _I, _N, _N, _N, _N, _I),
    "funrl_transposed_product": (_P, _P, _P, _N, _N, _N, _I, _I),
    "funrl_norm": (_I, _P, _P, _P, _N, _N, _F, _F, _I),
    "funrl_norm_backward": (_I, _P, _P, _P, _P, _P, _N, _N, _F, _F, _I),
    "funrl_rotate": (_I, _P, _P, _P, _P, _N, _N, _N, _N, _N, _I, _I),
    "funrl_gate": (_I, _P, _P, _P, _N, _I, _I),
    "funrl_gate_backward": (_I, _P, _P, _P, _P, _P, _N, _I, _I),
    "funrl_pack_groups": (_I, _P, _N, _N, _N, _N, _P),
    "funrl_grouped_linear": (_I, _P, _P, _P, _P, _I, _N, _N, _N, _N, _N, _I),
    "funrl_softmax": (_I, _P, _P, _N, _N, _I),
    "funrl_sigmoid": (_I, _P, _P, _N, _I),
    "funrl_largest": (_I, _P, _P, _N, _N, _N, _I),
    "funrl_square_sums": (_I, _P, _P, _N, _N, _N, _I),
    "funrl_scale_rows": (_I, _P, _P, _P, _P, _N, _N, _N, _F, _F, _I),
    "funrl_attention": (_I, _P, _P, _P, _P, _P, _P, _P, _P, _P, _F, _F, _I),
    "funrl_sample": (_I, _P, _N, _N, _I, _P, _N, _P, _F, _P, _P, _P, _P, _I),
    "funrl_tops": (_I, _P, _N, _N, _P, _I),
    "funrl_moments": (_I, _P, _N, _N, _I, _P, _F, _P, _N, _I, _P, _P, _I),
    "funrl_log_probabilities": (_I, _P, _P, _N, _N, _F, _P),
}


class KernelError(RuntimeError):
    """A kernel that cannot be had here; the message is the reason."""


@functools.cache
def library_problem() -> str | None:
    """The reason why nothing can be compiled and run here; None: there is none that shows before it is tried."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"the C++ kernels need Linux on x86_64, this is {platform.system()} on {platform.machine()}"
    missing = [flag for flag in NEEDED if flag not in _processor().split()]
    if missing:
        return f"the C++ kernels need a processor with {' and '.join(NEEDED)}, this one lacks {' and '.join(missing)}"
    if (cap := os.environ.get(ISA, "")) not in ISA_CAPS:
        return f"{ISA}={cap} is neither avx2 nor avx512; without it the C++ kernels use all that the processor has"
    command = _compiler()
    if not command or shutil.which(command[0]) is None:
        return f"the C++ kernels need a compiler, and there is no {' '.join(command)!r}: install g++ or set CXX"
    return None


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels; a call lets other Python threads run.

    Raises:
      KernelError: there is no compiler, it fails, or the processor is not one that the kernels know.
    """
    problem = library_problem()
    if problem is not None:
        raise KernelError(problem)
    try:
        file = _compiled()
        try:
            loaded = ctypes.CDLL(str(file))
        except OSError:  # it is damaged: once more
            file.unlink()
            loaded = ctypes.CDLL(str(_compiled()))
    except OSError as error:
        text = f"the C++ kernels cannot be kept or loaded: {error}; XDG_CACHE_HOME may name another folder"
        raise KernelError(text) from error
    for name, arguments in _ARGUMENTS.items():
        getattr(loaded, name).argtypes = arguments
    loaded.funrl_digest.restype = ctypes.c_uint64
    return loaded


def cache_folder() -> Path:
    """Folder for files that can be made again: $XDG_CACHE_HOME/funrl, by default ~/.cache/funrl.

    Without a home directory it is one of this user's own among the temporary ones.

    Raises:
      OSError: there is no folder that is this user's own.
    """
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "funrl"
    try:
        return Path.home() / ".cache" / "funrl"
    except RuntimeError:
        folder = Path(tempfile.gettempdir()) / f"funrl-cache-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{folder} is not this user's own; XDG_CACHE_HOME may name another folder") from None
        return folder


def _compiled() -> Path:
    command = [*_compiler(), *FLAGS.split(), *ISA_CAPS[os.environ.get(ISA, "")]]
    sources = [_FOLDER / SOURCE, *sorted(_FOLDER.glob("*.hpp"))]
    version = subprocess.run([*_compiler(), "--version"], capture_output=True, text=True, check=False).stdout
    parts = [" ".join(command), version, _processor(), *(file.read_text() for file in sources)]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    target = cache_folder() / f"kernels-{name}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(target.parent):
        return target if target.exists() else _compile([*command, str(_FOLDER / SOURCE)], target)


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Make the ranks of a machine wait for the first of them, where the file system can lock."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _compile(command: list[str], target: Path) -> Path:
    handle, own = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        done = subprocess.run([*command, "-o", own], capture_output=True, text=True, check=False)
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
            raise KernelError(f"{command[0]} cannot compile the C++ kernels: {first}")
        os.replace(own, target)
    finally:
        Path(own).unlink(missing_ok=True)
    return target


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX") or "g++")


@functools.cache
def _processor() -> str:
    """Flags of the first processor, as Linux lists them."""
    with open("/proc/cpuinfo") as file:
        return next((line.partition(":")[2].strip() for line in file if line.startswith("flags")), "")
