"""Kernels that are compiled already, for a cache of a test's own: g++ takes a core for half a minute."""

import shutil
from pathlib import Path

from funrl.compiled_kernels.kernel_library import cache_folder, library, library_problem


def share_kernels(cache: Path) -> None:
    """Copy the compiled kernels of this process's cache into another, which `XDG_CACHE_HOME` is to name."""
    if library_problem() is None:
        library()
    folder = cache / "funrl"
    folder.mkdir(parents=True, exist_ok=True)
    for file in cache_folder().glob("kernels-*.so"):
        shutil.copy(file, folder)
