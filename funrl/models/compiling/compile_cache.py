"""Compiled code of earlier runs, kept in the user's cache: what a run compiles, an equal one loads.

A file has what `torch.compiler.save_cache_artifacts` gives: the code of every graph that the process compiled or
loaded, under keys by which torch finds it again. A graph that is not among them is compiled. On a CPU the code is C++,
so the file has the shared libraries that were made of it too. It is named after what its contents depend on, and begins
with a checksum.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from funrl.compiled_kernels.kernel_library import cache_folder
from funrl.processes.processor import processor_facts

FILE_HEAD = b"funrl compiled code 1 "  # before the checksum, with the version of the format
ARTIFACTS = "artifacts"  # name in the archive of what torch gives; the others are libraries


class CompileCache:
    """The file of a run's compiled code.

    Attributes:
      file: where it is; None: there is no folder for it.
    """

    def __init__(self, facts: Mapping[str, Any], device: torch.device, note: Callable[[str], None]) -> None:
        """Name the file; nothing is read or written yet.

        Args:
          facts: of the run, such as its models, dtype and mesh; compared by their text.
          device: that computes.
          note: receives the reason why the file cannot be used.
        """
        self._note = note
        self._loaded = False
        self.file: Path | None = None
        text = json.dumps([facts, machine_facts(device)], sort_keys=True, default=str)
        try:
            self.file = cache_folder() / "compiled" / hashlib.sha256(text.encode()).hexdigest()[:20]
        except OSError as error:
            note(f"compiled code is not kept: {error}")

    def load(self) -> None:
        """Give torch the code of the file, if it is there and whole."""
        if self.file is None or not self.file.exists():
            return
        try:
            with zipfile.ZipFile(io.BytesIO(checked_content(self.file.read_bytes()))) as archive:
                _restore_libraries(archive)
                self._loaded = torch.compiler.load_cache_artifacts(archive.read(ARTIFACTS)) is not None
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            self._note(f"the compiled code in {self.file} is not used: {error}; it is compiled again")

    def save(self) -> None:
        """Write the code of all graphs of this process, unless every one of them came from the file."""
        if self.file is None or (self._loaded and not graphs_compiled()):
            return
        artifacts = torch.compiler.save_cache_artifacts()
        if artifacts is None:
            return
        packed = io.BytesIO()
        try:
            with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(ARTIFACTS, artifacts[0])
                for library, name in compiled_libraries().items():
                    archive.write(library, name)
            content = packed.getvalue()
            _replace(self.file, FILE_HEAD + hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
        except OSError as error:
            self._note(f"compiled code is not kept: {error}; XDG_CACHE_HOME may name another folder")


def checked_content(data: bytes) -> bytes:
    """The content of a file without its head.

    Raises:
      ValueError: it is damaged or another kind of file.
    """
    head, _, content = data.partition(b"\n")
    if not head.startswith(FILE_HEAD):
        raise ValueError("it is another kind of file")
    if head.removeprefix(FILE_HEAD).decode(errors="replace") != hashlib.sha256(content).hexdigest():
        raise ValueError("its checksum differs")
    return content


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Facts that compiled code depends on, besides the program: torch and the processor."""
    facts: dict[str, Any] = {"torch": torch.__version__}
    if device.type == "cuda":
        return facts | {"name": torch.cuda.get_device_name(device)}
    return facts | processor_facts()


def graphs_compiled() -> int:
    """Graphs of this process that torch found in no cache."""
    return _count("fxgraph_cache_miss") + _count("fxgraph_cache_bypass")


def graphs_found() -> int:
    """Graphs of this process whose code came from a cache: the file, or torch's own folder on this machine."""
    return _count("fxgraph_cache_hit")


def compiled_libraries() -> dict[Path, str]:
    """Shared libraries in torch's folder of compiled code that a run like this one needs, with their paths in it.

    They are the kernels that this process has loaded, and small ones by which torch finds out what the processor can
    do, which it loads elsewhere. None outside of Linux, where they are compiled again.
    """
    folder = _torch_folder()
    try:
        with open("/proc/self/maps") as maps:
            loaded = {Path(fields[5].strip()) for line in maps if len(fields := line.split(maxsplit=5)) == 6}
    except OSError:
        return {}
    kernels = {file for file in loaded if file.is_relative_to(folder) and file.exists()}  # others may have replaced it
    probes = {file for file in folder.glob("*/*.so") if "." not in file.stem}
    return {file: str(file.relative_to(folder)) for file in sorted(kernels | probes)}


def _restore_libraries(archive: zipfile.ZipFile) -> None:
    """Write the missing libraries of an archive to torch's folder."""
    for name in archive.namelist():
        file = _torch_folder() / name
        if name != ARTIFACTS and not file.exists():
            _replace(file, archive.read(name), mode=0o755)


def _torch_folder() -> Path:
    """Folder in which torch keeps compiled code on this machine."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # takes two seconds

    return Path(cache_dir())


def _count(name: str) -> int:
    import torch._dynamo.utils

    return torch._dynamo.utils.counters["inductor"][name]


def _replace(file: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file that others see whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, own = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        os.chmod(own, mode)
        os.replace(own, file)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(own)
