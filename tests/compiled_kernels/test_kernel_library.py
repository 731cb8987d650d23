"""Compiling the kernels: races, compilers that are missing or fail, folders that cannot be written."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from funrl.compiled_kernels import kernel_library
from funrl.compiled_kernels.kernel_library import KernelError, cache_folder, library, library_problem

NO_KERNEL = library_problem()
pytestmark = pytest.mark.skipif(NO_KERNEL is not None, reason=str(NO_KERNEL))


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A cache with nothing in it, and nothing remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.cache_clear(), library_problem.cache_clear()
    yield tmp_path / "funrl"
    library.cache_clear(), library_problem.cache_clear()


PROGRAM = """
from funrl.compiled_kernels import kernel_library
kernel_library.FLAGS = kernel_library.FLAGS.replace("-O3", "-O0")
print(kernel_library.library().funrl_panel())
"""


@pytest.mark.slow
def test_two_processes_compile_at_once(fresh):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", PROGRAM]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(2)]
    assert {process.communicate(timeout=300)[0].strip() for process in both} in ({"64"}, {"32"})
    files = list(fresh.iterdir())
    assert len(files) == 1 and files[0].name.startswith("kernels-")  # nothing half written is left
    written = files[0].stat().st_mtime_ns
    subprocess.run(command, check=True, cwd=root, stdout=subprocess.DEVNULL)
    assert [file.stat().st_mtime_ns for file in fresh.iterdir()] == [written]


def test_the_file_is_named_after_what_its_bits_depend_on(fresh, monkeypatch, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then cat ' + str(tmp_path / "version") + "; exit; fi\n"
        'while [ "$1" != -o ]; do shift; done; echo library > "$2"\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "version").write_text("1")
    monkeypatch.setenv("CXX", str(compiler))
    first = kernel_library._compiled()
    assert first == kernel_library._compiled() and first.read_text() == "library\n"
    (tmp_path / "version").write_text("2")
    other_version = kernel_library._compiled()
    monkeypatch.setattr(kernel_library, "FLAGS", kernel_library.FLAGS + " -g")
    other_flags = kernel_library._compiled()
    monkeypatch.setattr(kernel_library, "_processor", lambda: "avx2 fma and more")
    other_processor = kernel_library._compiled()
    monkeypatch.setenv("FUNRL_ISA", "avx2")
    other_instructions = kernel_library._compiled()
    files = [first, other_version, other_flags, other_processor, other_instructions]
    assert len(set(files)) == len(files) and sorted(fresh.iterdir()) == sorted(files)


def test_no_compiler(fresh, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -v")
    assert "there is no 'no-such-compiler -v': install g++ or set CXX" in library_problem()
    with pytest.raises(KernelError, match="no-such-compiler"):
        library()


def test_an_old_processor(fresh, monkeypatch):
    monkeypatch.setattr(kernel_library, "_processor", lambda: "sse2 avx fma")
    assert library_problem().endswith("this one lacks avx2")


def test_instructions_that_nobody_knows(fresh, monkeypatch):
    monkeypatch.setenv("FUNRL_ISA", "sse4")
    assert library_problem().startswith("FUNRL_ISA=sse4 is neither avx2 nor avx512")


@pytest.mark.slow
def test_a_compiler_that_fails(fresh, monkeypatch):
    monkeypatch.setattr(kernel_library, "FLAGS", kernel_library.FLAGS + " -Dfma=1(")
    with pytest.raises(KernelError, match=r"g\+\+ cannot compile the C\+\+ kernels: .*error"):
        library()
    assert list(fresh.iterdir()) == []


def test_a_folder_that_cannot_be_written(fresh, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(KernelError, match="XDG_CACHE_HOME may name another folder"):
        library()


def test_the_cache_is_in_the_user_s_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/funrl")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "funrl"
