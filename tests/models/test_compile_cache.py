"""The file of compiled code: what is written is loaded, and a damaged or foreign file is passed over with a remark."""

import pytest
import torch

from funrl.models.compiling import compile_cache
from funrl.models.compiling.compile_cache import CompileCache, checked_content

CPU = torch.device("cpu")
FACTS = {"models": {"policy": {"embed": 16}}, "dtype": "torch.float32", "meshes": ["dp1", "dp1"]}


@pytest.fixture
def torch_caches(tmp_path, monkeypatch):
    """What torch would keep and has been given, and its folder with a kernel and a probe of the processor."""
    folder = tmp_path / "torch"
    (folder / "ab").mkdir(parents=True)
    (folder / "ab" / "probe.so").write_bytes(b"probe")
    given = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"code of some graphs", None))
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda data: given.append(data) or object())
    monkeypatch.setattr(compile_cache, "graphs_compiled", lambda: 0)
    return folder, given


def test_code_and_libraries_come_back(torch_caches):
    folder, given = torch_caches
    notes = []
    first = CompileCache(FACTS, CPU, notes.append)
    first.load()  # there is none yet
    first.save()
    (folder / "ab" / "probe.so").unlink()
    second = CompileCache(dict(reversed(FACTS.items())), CPU, notes.append)
    assert second.file == first.file and first.file.stat().st_mode & 0o077 == 0
    second.load()
    assert given == [b"code of some graphs"] and notes == []
    assert (folder / "ab" / "probe.so").read_bytes() == b"probe"
    assert [file.name for file in first.file.parent.iterdir()] == [first.file.name]


def test_a_file_is_written_again_only_for_new_code(torch_caches, monkeypatch):
    first = CompileCache(FACTS, CPU, print)
    first.save()
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"more code", None))
    loaded = CompileCache(FACTS, CPU, print)
    loaded.load()
    before = first.file.read_bytes()
    loaded.save()
    assert first.file.read_bytes() == before
    monkeypatch.setattr(compile_cache, "graphs_compiled", lambda: 1)
    loaded.save()
    assert first.file.read_bytes() != before


def test_other_facts_have_another_file(torch_caches, monkeypatch):
    files = {CompileCache(FACTS | more, CPU, print).file for more in ({}, {"dtype": "torch.bfloat16"}, {"meshes": []})}
    monkeypatch.setattr(torch, "__version__", "9.9")
    files.add(CompileCache(FACTS, CPU, print).file)
    assert len(files) == 4


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda data: data[:-1], "its checksum differs"),
        (lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:], "its checksum differs"),
        (lambda data: b"", "another kind of file"),
        (lambda data: b"\x7fELF" + data, "another kind of file"),
        (lambda data: data.replace(b"code 1", b"code 0", 1), "another kind of file"),
    ],
)
def test_a_file_that_is_damaged_or_foreign_is_passed_over_with_one_remark(change, reason, torch_caches):
    _, given = torch_caches
    notes = []
    cache = CompileCache(FACTS, CPU, notes.append)
    cache.save()
    cache.file.write_bytes(change(cache.file.read_bytes()))
    other = CompileCache(FACTS, CPU, notes.append)
    other.load()
    assert given == [] and len(notes) == 1 and reason in notes[0] and str(cache.file) in notes[0]
    other.save()
    assert checked_content(cache.file.read_bytes()), "it is written again"


def test_a_whole_file_without_an_archive_is_passed_over(torch_caches, monkeypatch):
    notes = []
    cache = CompileCache(FACTS, CPU, notes.append)
    cache.save()
    monkeypatch.setattr(compile_cache, "checked_content", lambda data: b"no archive")
    cache.load()
    assert len(notes) == 1 and "not used" in notes[0]


def test_a_folder_that_cannot_be_written_is_reported(torch_caches, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file, not a folder")
    notes = []
    cache = CompileCache(FACTS, CPU, notes.append)
    cache.load()
    cache.save()
    assert len(notes) == 1 and notes[0].startswith("compiled code is not kept: ")
