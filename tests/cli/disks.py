"""Small disks to fill."""

import contextlib
import subprocess

import pytest


@contextlib.contextmanager
def mounted(folder, size):
    """A folder on a disk of its own, of a size such as "3m"; the test is skipped where none can be mounted."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # a process that ends may still be there
