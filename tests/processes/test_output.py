"""Printing never ends a run: a reader that leaves, a full device, a stream that is closed."""

import io
import os
import subprocess
import sys

import pytest

from funrl.processes.output import LastingStream, lasting_output

PROGRAM = """
import os, sys
from funrl.processes.output import lasting_output
with lasting_output():
    for number in range(5000):
        print("a line that is written", number)
    print("to the other stream too", file=sys.stderr, flush=True)
    number = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
assert number > 2, number
os.write(number, b"whole")
"""
ways = [
    "",
    ">/dev/full",
    "2>/dev/full",
    ">/dev/full 2>/dev/full",
    ">&-",
    "2>&-",
    "<&- >&- 2>&-",
    "| head -n 1 >/dev/null",
]


@pytest.mark.parametrize("way", ways)
def test_a_program_ends_well_wherever_its_output_goes(way, tmp_path):
    command = f"set -o pipefail; '{sys.executable}' -c '{PROGRAM}' {tmp_path}/file {way}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr in ("", "to the other stream too\n")
    assert (tmp_path / "file").read_bytes() == b"whole"  # and nothing of what was printed


def test_what_a_full_device_does_not_take_is_dropped_and_later_lines_are_written(tmp_path):
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        lasting, kept = LastingStream(stream), os.dup(writer)
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, writer)
        lasting.write("lost\\n")
        lasting.flush()
        os.dup2(kept, writer)
        lasting.write("found\\n")
        lasting.flush()
        os.close(kept), os.close(full)
        assert lasting.encoding == stream.encoding
    with os.fdopen(reader) as fdopen:
        assert fdopen.read() == "found\\n"


def test_a_stream_that_is_closed_is_no_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with lasting_output():
        sys.stdout.close()
        print("to nobody")
        sys.stdout.writelines(["nor", "this"])
        sys.stdout.flush()
        assert isinstance(sys.stdout, LastingStream) and sys.stdout.closed
