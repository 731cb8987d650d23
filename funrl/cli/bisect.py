"""The command `funrl bisect`: the first step, phase and tensor in which two runs differ.

    funrl bisect RUN_DIR OTHER_RUN_DIR

It compares what both have written: the metrics of every step, the rows, scores and digests of weights that
`--save_rollouts` keeps, and checkpoints. Nothing is computed, and no device of the runs is needed.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from funrl.cli.usages import COMMANDS, read_places
from funrl.mesh.mesh import single
from funrl.track.records.run_directory import RunDirectory, read_lines
from funrl.track.records.segments import in_words, values_over_time
from funrl.trainer.checkpoints.checkpoint import Recorded, complete_checkpoints, recorded
from funrl.trainer.checkpoints.saved_rows import STAGES, open_rows, saved_steps
from funrl.trainer.differences import (
    Difference,
    difference,
    first_phase,
    joined_differences,
    metric_differences,
    phase_of_field,
)
from funrl.trainer.replay import line_differences, row_place
from funrl.trainer.settings.declaration import START_FLAGS, SettingsError
from funrl.trainer.storage.shard_server import DamagedError
from funrl.trainer.storage.shards import TENSOR_DTYPES, ShardError, ShardServer, read_tensors

ROWS_AT_ONCE = 256
SHOWN = 20  # differences of the first phase


class RunRecord(NamedTuple):
    """Everything that a run has written, by step.

    Attributes:
      flags: with the recipe's arguments, each with the steps after which it began to have a value.
      inputs: digests of files and weights, likewise.
      metrics: of each step.
      rows, checkpoints: their folders.
    """

    path: Path
    flags: Mapping[str, list[tuple[int, Any]]]
    inputs: Mapping[str, list[tuple[int, Any]]]
    metrics: Mapping[int, dict[str, Any]]
    rows: Mapping[int, Path]
    checkpoints: Mapping[int, Path]


def bisect_command(argv: Sequence[str]) -> int:
    """Run `funrl bisect ...`; return the exit status: 0 where nothing differs, 1 where something does.

    Args:
      argv: "bisect" and its arguments.
    """
    try:
        places, _ = read_places([], argv, COMMANDS["bisect"].usage, least=2, most=2)
        one, other = (read_record(Path(place)) for place in places)
        if unlike := flag_differences(one, other):
            print(f"flags that differ: {'; '.join(unlike)}")
        if unlike := [name for name, x in one.inputs.items() if x != other.inputs.get(name, x)]:
            print(f"digests that differ: {', '.join(unlike)}")
        step, found = first_step(one, other)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(conclusion(one, other, step, found)))
    return 1 if found else 0


def read_record(path: Path) -> RunRecord:
    """The files of a run.

    Raises:
      SettingsError, RunDirectoryError: it is no run, or one of its files is broken.
    """
    run = RunDirectory(path)
    try:
        record = json.loads(run.config.read_text())
        told = values_over_time(record, "flags"), values_over_time(record, "inputs")
        record["flags"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"{run.config}: it is not the record of a run: {reason}") from None
    lines = list(read_lines(run.metrics)) if run.metrics.exists() else []
    metrics = {int(line["step"]): line for line in lines if "step" in line}
    return RunRecord(path, *told, metrics, saved_steps(run.rollouts), complete_checkpoints(run.checkpoints))


def flag_differences(one: RunRecord, other: RunRecord) -> list[str]:
    """Words for each flag in which two runs differ."""
    names = [name for name in dict.fromkeys((*one.flags, *other.flags)) if name not in START_FLAGS]
    pairs = [(name, one.flags.get(name), other.flags.get(name)) for name in names]
    return [f"--{name}: {in_words(x)} and {in_words(y)}" for name, x, y in pairs if x != y]


def first_step(one: RunRecord, other: RunRecord) -> tuple[int, list[Difference]]:
    """The first step in which two runs differ, and its differences; else the last that both have, and none.

    Raises:
      SettingsError: they have no step in common.
      DamagedError: a file cannot be read.
    """
    metrics = sorted(one.metrics.keys() & other.metrics.keys())
    rows, checkpoints = one.rows.keys() & other.rows.keys(), one.checkpoints.keys() & other.checkpoints.keys()
    steps = sorted({*metrics, *rows, *checkpoints})
    if not steps:
        raise SettingsError(f"{one.path} and {other.path} have no step in common")
    for step in steps:
        found = compare_saved(one, other, step) if step in rows else []
        if step in metrics:
            a, b = one.metrics[step], other.metrics[step]
            names = a.keys() & b.keys()  # one may evaluate more often than the other
            found += metric_differences(*({name: x[name] for name in names} for x in (a, b)))
        if step in checkpoints:
            found += compare_checkpoints(one.checkpoints[step], other.checkpoints[step])
        if any(part.count for part in found):
            return step, found
    return steps[-1], []


def compare_saved(one: RunRecord, other: RunRecord, step: int) -> list[Difference]:
    """Compare the rows of a step at both stages, and the digests of the weights after it."""
    a, b = (open_rows(run.rows[step].parent, step) for run in (one, other))
    found: list[Difference] = []
    for stage in STAGES:
        tables = a.row_fields(stage), b.row_fields(stage)
        for name in tables[0].keys() & tables[1].keys():
            phase = phase_of_field(a.schema[name].writer, stage)
            found.append(difference(phase, "field", name, tables[0][name], tables[1][name], row_place))
        for name in set(a.record["fields"][stage]) ^ set(b.record["fields"][stage]):
            phase = phase_of_field({**a.schema, **b.schema}[name].writer, stage)
            found.append(Difference(phase, "field", name, 1, 1, math.inf, "one run has no such field"))
        count = min(len(a.lengths(stage)), len(b.lengths(stage)))
        for first in range(0, count, ROWS_AT_ONCE):
            numbers = range(first, min(first + ROWS_AT_ONCE, count))
            parts = a.lines(stage, numbers), b.lines(stage, numbers)
            for name in (name for name in parts[0] if name in parts[1]):
                phase = phase_of_field(a.schema[name].writer, stage)
                found += line_differences(phase, name, numbers, parts[0][name], parts[1][name])
    for role in {**a.record["weights"], **b.record["weights"]}:
        pair = [x.record["weights"].get(role, {}) for x in (a, b)]
        unlike = [name for name in {**pair[0], **pair[1]} if pair[0].get(name) != pair[1].get(name)]
        where = unlike[0] if unlike else ""
        largest = math.inf if unlike else 0.0
        what = f"weights of {role} by their digests"
        found.append(Difference(f"update_{role}", "digests", what, len(pair[0]), len(unlike), largest, where))
    return joined_differences(found)


def compare_checkpoints(one: Path, other: Path) -> list[Difference]:
    """Compare every tensor and number of two checkpoints, some at a time.

    Raises:
      DamagedError: one cannot be read.
    """

    a, b = recorded(one), recorded(other)
    found = []
    for name in a.arrays.keys() ^ b.arrays.keys():
        found.append(Difference(phase_of_leaf(name), "weights", name, 1, 1, math.inf, "one run has no such tensor"))
    common = [name for name in a.arrays if name in b.arrays]
    alike = [name for name in common if a.arrays[name][:2] == b.arrays[name][:2]]  # shape and dtype
    for name in (name for name in common if name not in alike):
        where = f"{a.arrays[name].dtype} {a.arrays[name].shape} and {b.arrays[name].dtype} {b.arrays[name].shape}"
        found.append(Difference(phase_of_leaf(name), "weights", name, 1, 1, math.inf, where))
    for (name, x), (_, y) in zip(_tensors(a, alike), _tensors(b, alike), strict=True):
        found.append(difference(phase_of_leaf(name), "weights", name, x, y))
    return found


def _tensors(found: Recorded, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Some tensors of a checkpoint, whole, one after the other."""
    dtypes = {name: TENSOR_DTYPES[found.arrays[name].dtype] for name in names}
    server = ShardServer()
    try:
        yield from read_tensors(found.database(server), dtypes, {}, mesh=single())
    except ShardError as error:
        raise DamagedError(f"{found.path}: it cannot be read: {error}") from error
    finally:
        server.close()


def phase_of_leaf(name: str) -> str:
    """Phase of a step that makes a tensor of a checkpoint."""
    head, _, rest = name.partition("/")
    return {"roles": f"update_{rest.partition('/')[0]}", "source": "generate"}.get(head, "advantage")


def conclusion(one: RunRecord, other: RunRecord, step: int, found: Sequence[Difference]) -> list[str]:
    """Lines on the first difference, or on what agrees."""
    counts = {
        "metrics": one.metrics.keys() & other.metrics.keys(), "rows": one.rows.keys() & other.rows.keys(),
        "checkpoints": one.checkpoints.keys() & other.checkpoints.keys(),
    }  # fmt: skip
    compared = ", ".join(f"{kind} of {sum(s <= step for s in steps)} steps" for kind, steps in counts.items())
    if not found:
        return [f"no difference up to step {step}; compared: {compared}"]
    first = first_phase(found)
    lines = [f"first difference: step {step}, phase {first[0].phase}", *(f"  {part}" for part in first[:SHOWN])]
    if len(first) > SHOWN:
        lines.append(f"  and {len(first) - SHOWN} more")
    return [*lines, f"compared: {compared}"]
