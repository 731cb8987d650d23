"""Digests of files: every byte of small ones, a bounded number of bytes of large ones."""

import pytest

from funrl.data import cached_datasets as file_digests
from funrl.data.cached_datasets import PARTIAL, data_digest, files_digest, records_digest


def test_every_byte_of_a_small_file_counts_and_its_place_does_not(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(bytes(range(256)) * 40)
    assert data_digest(str(tmp_path / "a")) == data_digest(str(tmp_path / "b"))
    whole = bytearray((tmp_path / "a").read_bytes())
    for place in (0, 5000, len(whole) - 1):
        changed = bytearray(whole)
        changed[place] ^= 1
        (tmp_path / "b").write_bytes(changed)
        assert data_digest(str(tmp_path / "a")) != data_digest(str(tmp_path / "b"))


def test_a_directory_is_its_names_and_its_bytes(tmp_path):
    (tmp_path / "a" / "inner").mkdir(parents=True)
    (tmp_path / "a" / "inner" / "x").write_text("12")
    (tmp_path / "a" / "y").write_text("3")
    before = data_digest(str(tmp_path / "a"))
    (tmp_path / "a" / "y").rename(tmp_path / "a" / "z")
    assert data_digest(str(tmp_path / "a")) != before
    (tmp_path / "a" / "z").rename(tmp_path / "a" / "y")
    assert data_digest(str(tmp_path / "a")) == before
    (tmp_path / "a" / "inner" / "x").write_text("1")
    (tmp_path / "a" / "y").write_text("23")  # the same bytes, divided otherwise
    assert data_digest(str(tmp_path / "a")) != before
    assert data_digest(str(tmp_path / "nowhere")) == ""


@pytest.mark.parametrize("sizes", [(10_000,), (3000, 2, 0, 6998)])
def test_of_large_files_blocks_are_read(sizes, tmp_path, monkeypatch):
    monkeypatch.setattr(file_digests, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(file_digests, "BLOCKS", 10)
    monkeypatch.setattr(file_digests, "BLOCK_BYTES", 64)
    files = {str(number): tmp_path / str(number) for number in range(len(sizes))}

    def digest(content):
        begin = 0
        for path, size in zip(files.values(), sizes, strict=True):
            path.write_bytes(content[begin : begin + size])
            begin += size
        return files_digest(files)

    content, seen = bytes(sum(sizes)), 0
    plain = digest(content)
    assert plain.startswith(PARTIAL) and digest(content) == plain
    places = range(0, len(content), 50)
    for place in places:
        seen += digest(content[:place] + b"\1" + content[place + 1 :]) != plain
    assert 0 < seen < len(places) / 4  # some 640 of 10,000 bytes are read
    for place in (0, len(content) - 1):
        assert digest(content[:place] + b"\1" + content[place + 1 :]) != plain
    grown = tmp_path / str(len(sizes) - 1)
    grown.write_bytes(grown.read_bytes() + b"\0")
    assert files_digest(files) != plain  # the size alone


def test_records_are_compared_by_their_values():
    assert records_digest([{"a": 1, "b": [2]}]) == records_digest([{"b": [2], "a": 1}]) != records_digest([{"a": 1}])
    many = [{"a": n} for n in range(3000)]
    assert records_digest(many).startswith(PARTIAL)
    assert records_digest(many) != records_digest(many[:-1]) and records_digest(many) != records_digest(many[::-1])
    assert records_digest([object()]) == records_digest([object()])  # by their type: the address is of one process
