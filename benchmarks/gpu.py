"""Everything that is measured on one GPU, in under nine minutes: one table with the roofline beside each number.

    python benchmarks/gpu.py --tests
    python benchmarks/gpu.py --gpus=2    # what may break first on two, on gloo's ranks with --device=cpu --small
    python benchmarks/gpu.py --vllm_python=PATH --parts=peer    # beside vLLM, of an environment of its own
    python benchmarks/gpu.py --device=cpu --small    # the same program on a CPU: not the numbers

It measures kernels, the phases of a training step and their MFU, generation (and its ratio to vLLM), memory beside the
dry run's, and the time to compile a layer; --tests runs the tests marked `gpu` too. Weights are random. A
roofline is the longer of two times: of the FLOPs that the dry run counts at the data sheet's peak, and of the bytes
that have to move at its bandwidth (`funrl.cost.tracing.hardware`). Of memory the share is the dry run's prediction over
what was held.

Every part is a process of its own with a bound of seconds, the most important first. What fails is a row with its
error, and the exit status is 1; what has no time left is a row that says so. The table is at OUT.md and OUT.json after
every row.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

# This process must not start CUDA, for its children are forks.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
from absl import app, flags
from gpu_parts.aligned import aligned_rows
from gpu_parts.compiling import compile_rows
from gpu_parts.decoding import float8_rows, mixed_rows, native_rows, peer_rows
from gpu_parts.kernels import kernel_rows
from gpu_parts.marked_tests import marked_test_rows
from gpu_parts.passes import pass_rows
from gpu_parts.rows import Bench, Row, Rows
from gpu_parts.training import training_rows
from gpu_parts.two import TWO_GPUS, on_two_ranks
from gpu_parts.variants import grouped_rows, logprob_rows

from funrl.cost.tracing.hardware import hardware_of
from funrl.mesh.launch import gpu_problem
from funrl.processes.device_memory import expand_segments

SECONDS = flags.DEFINE_float("seconds", 520, "seconds of all parts together", lower_bound=1)
DEVICE = flags.DEFINE_enum("device", "cuda", ["cuda", "cpu"], "where")
SMALL = flags.DEFINE_bool("small", False, "the smallest sizes")
TESTS = flags.DEFINE_bool("tests", False, "run the tests marked gpu too")
GPUS = flags.DEFINE_enum("gpus", "1", ["1", "2"], "how many: with 2 these parts alone, a minute each")
PARTS = flags.DEFINE_list("parts", [], "some parts by name; none: all")
VLLM = flags.DEFINE_string("vllm_python", None, "interpreter of an environment with vLLM, for the part peer")
OUT = flags.DEFINE_string("out", "runs/gpu_benchmark", "path of the table, without .md and .json")
HEAD = ("part", "what", "measured", "roofline", "share", "remark")
TWO_RANKS_S = 60.0  # of a part on two GPUs
FORK = multiprocessing.get_context("fork")


class Part(NamedTuple):
    """Rows that are measured in one process.

    Attributes:
      name: of the part.
      seconds: that it may take; more is a failure.
      rows: measures them.
    """

    name: str
    seconds: float
    rows: Callable[[Bench], Rows]


def parts() -> list[Part]:
    """All parts, the most important first."""

    def training(name: str, seconds: float, model: str, tokens: int, row: int) -> Part:
        sizes = {"model": "0.2M", "tokens": 128, "row": 64} if SMALL.value else {}
        return Part(
            name, seconds, functools.partial(training_rows, **{"model": model, "tokens": tokens, "row": row} | sizes)
        )

    if GPUS.value == "2":
        return [
            Part(name, TWO_RANKS_S, functools.partial(on_two_ranks, mesh, check))
            for name, (mesh, check) in TWO_GPUS.items()
        ]
    return [
        Part("kernels", 90, kernel_rows),
        training("train", 90, "1.7B", 4096, 1024),
        Part("decode", 120, native_rows),
        Part("mixed", 90, mixed_rows),
        Part("decode-passes", 90, pass_rows),
        Part("logprob", 60, logprob_rows),
        Part("grouped", 60, grouped_rows),
        Part("aligned", 120, aligned_rows),
        training("train-long", 100, "1.7B", 32768, 32768),
        Part("peer", 240, functools.partial(peer_rows, python=VLLM.value)),
        Part("decode-float8", 90, float8_rows),
        *[Part("tests", 120, marked_test_rows)] * TESTS.value,
        training("train-7b", 100, "7B", 4096, 1024),
        Part("compile", 90, compile_rows),
        training("train-7b-long", 120, "7B", 32768, 32768),
    ]


def main(argv: list[str]) -> None:
    del argv
    deadline = time.monotonic() + SECONDS.value
    chosen = parts()
    if unknown := set(PARTS.value) - {part.name for part in chosen}:
        raise app.UsageError(f"--parts={min(unknown)}: the parts are {', '.join(part.name for part in chosen)}")
    title = next(rows_of(Part("device", 60, device_rows), deadline))
    if title.failed:
        raise SystemExit(f"{title.note}; --device=cpu --small tries the program")
    print(title.name)
    print(line(HEAD), line(["---"] * len(HEAD)), sep="\n", flush=True)
    table = []
    for part in chosen:
        if PARTS.value and part.name not in PARTS.value:
            continue
        for row in rows_of(part, deadline):
            table.append((part.name, row))
            print(line(cells(part.name, row)), flush=True)
            write(title.name, table)
    if failed := [name for name, row in table if row.failed]:
        raise SystemExit(f"failed: {', '.join(dict.fromkeys(failed))}")


def rows_of(part: Part, deadline: float) -> Iterator[Row]:
    """The rows of a part as its process sends them, and one more if it failed or had no time left."""
    limit = min(deadline, time.monotonic() + part.seconds)
    receiver, sender = FORK.Pipe(duplex=False)
    if limit <= time.monotonic():
        yield Row(part.name, None, "", note=f"left out: no time left of --seconds={SECONDS.value:g}")
        return
    process = FORK.Process(target=measure, args=(part, sender))
    process.start()
    sender.close()
    try:
        while receiver.poll(max(0.0, limit - time.monotonic())):
            row = receiver.recv()
            if row is None:
                return
            yield row
        late = limit == deadline
        of = f"--seconds={SECONDS.value:g} were over" if late else f"its {part.seconds:g} s were over"
        yield Row(part.name, None, "", note=f"cut off: {of}", failed=not late)
    except EOFError:
        process.join()
        yield Row(part.name, None, "", note=f"its process ended with {process.exitcode}", failed=True)
    finally:
        process.kill()
        with contextlib.suppress(ProcessLookupError):  # of the processes that it has started
            os.killpg(int(process.pid or 0), signal.SIGKILL)
        process.join()


def measure(part: Part, sender: Connection) -> None:
    """Measure a part in this process, a fork that leads a group of its own."""
    os.setpgid(0, 0)
    device = torch.device("cuda:0" if DEVICE.value == "cuda" else "cpu")
    try:
        if device.type == "cuda":
            if (problem := gpu_problem()) is not None:
                raise RuntimeError(problem)
            expand_segments()
            torch.cuda.set_device(device)
        for row in part.rows(Bench(device, hardware_of(device.type), SMALL.value)):
            sender.send(row)
    except Exception as error:  # a row, so that the other parts go on
        traceback.print_exc()
        note = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        sender.send(Row(part.name, None, "", note=note, failed=True))
    sender.send(None)  # the end, whoever else has the pipe open


def device_rows(bench: Bench) -> Rows:
    """One row whose name is the title of the table."""
    name = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else "CPU"
    hardware = bench.hardware
    peak = f"{hardware.half / 1e12:g} TFLOP/s in 16 bits, {hardware.bandwidth / 1e12:g} TB/s"
    yield Row(f"{name}, torch {torch.__version__}; roofline: {peak}, {hardware.memory / 1e9:g} GB", None, "")


def cells(part: str, row: Row) -> tuple[str, ...]:
    """A row of the table."""
    numbers = ("-" if x is None else f"{x:,.4g} {row.unit}" for x in (row.value, row.bound))
    share = "-" if row.share is None else f"{row.share:.1%}"
    return part, row.name, *numbers, share, ("FAILED: " if row.failed else "") + row.note.replace("|", "/")


def line(values: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(values)} |"


def write(title: str, table: list[tuple[str, Row]]) -> None:
    """Write the table so far as markdown and as JSON."""
    path = Path(OUT.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [line(HEAD), line(["---"] * len(HEAD)), *(line(cells(*row)) for row in table)]
    path.with_suffix(".md").write_text("\n".join([title, "", *lines]) + "\n")
    rows = [{"part": part, **row._asdict(), "share": row.share} for part, row in table]
    path.with_suffix(".json").write_text(json.dumps({"device": title, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
