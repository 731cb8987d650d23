"""The first step, phase and tensor in which the saved files of two runs differ.

Metrics of every step, the rows, scores and weight digests that `--save_rollouts` keeps, and checkpoints are compared.
Nothing is computed, and none of the runs' devices is needed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from funrl.mesh.mesh import single
from funrl.track.records.run_directory import RunDirectory, read_lines
from funrl.track.records.segments import in_words, values_over_time
from funrl.trainer.checkpoints.checkpoint import Recorded, complete_checkpoints, recorded
from funrl.trainer.checkpoints.saved_rows import STAGES, open_rows, saved_steps
from funrl.trainer.differences import (
    Difference,
    by_phase,
    difference,
    digest_difference,
    joined_differences,
    line_differences,
    metric_differences,
    phase_of_field,
    phase_of_leaf,
    row_place,
    unequal,
)
from funrl.trainer.settings.declaration import START_FLAGS, SettingsError
from funrl.trainer.storage.shard_server import DamagedError
from funrl.trainer.storage.shards import TENSOR_DTYPES, ShardError, ShardServer, read_tensors

ROWS_AT_ONCE = 256
SHOWN = 20  # differences of the first phase


class RunRecord(NamedTuple):
    """The files of a run.

    Attributes:
      flags: flags and recipe arguments, each with its values and the steps after which they took effect.
      inputs: digests of files and weights, in the same form.
      steps: by "metrics", "rows" and "checkpoints": the metrics of each step, or its folder.
    """

    path: Path
    flags: Mapping[str, list[tuple[int, object]]]
    inputs: Mapping[str, list[tuple[int, object]]]
    steps: Mapping[str, Mapping[int, Any]]


def first_difference(first: str, second: str) -> tuple[list[str], bool]:
    """Describe the first difference of two run directories, or what agrees; and whether all agrees.

    Raises:
      SettingsError, RunDirectoryError: a directory is not a run, one of its files is broken, or no step is in both.
      DamagedError: a file cannot be read.
    """
    a, b = (_read_record(Path(path)) for path in (first, second))
    names = [name for name in dict.fromkeys((*a.flags, *b.flags)) if name not in START_FLAGS]
    flags = [(name, a.flags.get(name), b.flags.get(name)) for name in names]
    unlike = [f"--{name}: {in_words(x)} and {in_words(y)}" for name, x, y in flags if x != y]
    lines = [f"flags that differ: {'; '.join(unlike)}"] * bool(unlike)
    unlike = [name for name, x in a.inputs.items() if x != b.inputs.get(name, x)]
    lines += [f"digests that differ: {', '.join(unlike)}"] * bool(unlike)
    common = {kind: a.steps[kind].keys() & b.steps[kind].keys() for kind in a.steps}
    steps = sorted(set().union(*common.values()))
    if not steps:
        raise SettingsError(f"{a.path} and {b.path} have no step in common")
    for step in steps:
        parts = by_phase(part for part in _compare_step(a, b, step) if part.count)
        if parts or step == steps[-1]:
            break
    compared = ", ".join(f"{kind} of {sum(number <= step for number in s)} steps" for kind, s in common.items())
    if not parts:
        return [*lines, f"no difference up to step {step}; compared: {compared}"], True
    phase, differences = parts[0]
    lines += [f"first difference: step {step}, phase {phase}", *(f"  {part}" for part in differences[:SHOWN])]
    lines += [f"  and {len(differences) - SHOWN} more"] * (len(differences) > SHOWN)
    return [*lines, f"compared: {compared}"], False


@contextlib.contextmanager
def reading_config(file: Path) -> Iterator[dict[str, Any]]:
    """Read the config.json of a run; the context refuses one that lacks what it reads. Raises: SettingsError."""
    try:
        yield json.loads(file.read_text())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"{file}: not the config.json of a run: {reason}") from None


def _read_record(path: Path) -> RunRecord:
    run = RunDirectory(path)
    with reading_config(run.config) as record:
        flags = values_over_time(record, "flags")
        inputs = values_over_time(record, "inputs")
        record["flags"].items()
    metrics = read_lines(run.metrics) if run.metrics.exists() else ()
    steps = {
        "metrics": {int(line["step"]): line for line in metrics if "step" in line},
        "rows": saved_steps(run.rollouts),
        "checkpoints": complete_checkpoints(run.checkpoints),
    }
    return RunRecord(path, flags, inputs, steps)


def _compare_step(a: RunRecord, b: RunRecord, step: int) -> Iterator[Difference]:
    pairs = {
        kind: (a.steps[kind][step], b.steps[kind][step])
        for kind in a.steps
        if step in a.steps[kind] and step in b.steps[kind]
    }
    if "rows" in pairs:
        yield from _compare_saved(*pairs["rows"], step=step)
    if "metrics" in pairs:
        first, second = pairs["metrics"]
        names = first.keys() & second.keys()  # one run may evaluate more often than the other
        yield from metric_differences(*({name: x[name] for name in names} for x in (first, second)))
    if "checkpoints" in pairs:
        yield from _compare_checkpoints(*pairs["checkpoints"])


def _compare_saved(first: Path, second: Path, step: int) -> list[Difference]:
    """Compare the rows of a step at both stages, and the digests of the weights after it."""
    a, b = (open_rows(path.parent, step) for path in (first, second))
    differences: list[Difference] = []
    for stage in STAGES:
        phases = {name: phase_of_field(field.writer, stage) for name, field in {**b.schema, **a.schema}.items()}
        for name in set(a.record["fields"][stage]) ^ set(b.record["fields"][stage]):
            differences.append(unequal(phases[name], "field", name, "one run has no such field"))
        tables = a.row_fields(stage), b.row_fields(stage)
        for name in tables[0].keys() & tables[1].keys():
            differences.append(difference(phases[name], "field", name, tables[0][name], tables[1][name], row_place))
        count = min(len(a.lengths(stage)), len(b.lengths(stage)))
        for start in range(0, count, ROWS_AT_ONCE):
            numbers = range(start, min(start + ROWS_AT_ONCE, count))
            lines = a.lines(stage, numbers), b.lines(stage, numbers)
            for name in (name for name in lines[0] if name in lines[1]):
                differences += line_differences(phases[name], name, numbers, lines[0][name], lines[1][name])
    weights = a.record["weights"], b.record["weights"]
    for role in {**weights[0], **weights[1]}:
        differences.append(digest_difference(role, weights[0].get(role, {}), weights[1].get(role, {})))
    return joined_differences(differences)


def _compare_checkpoints(first: Path, second: Path) -> Iterator[Difference]:
    """Compare every tensor and number of two checkpoints, in chunks."""
    a, b = (recorded(path) for path in (first, second))
    comparable = []
    for name in {**a.arrays, **b.arrays}:
        kinds = [f"{x.dtype} {x.shape}" if x else "no such tensor" for x in (a.arrays.get(name), b.arrays.get(name))]
        if kinds[0] == kinds[1]:
            comparable.append(name)
        else:
            yield unequal(phase_of_leaf(name), "weights", name, " and ".join(kinds))
    for (name, x), (_, y) in zip(_tensors(a, comparable), _tensors(b, comparable), strict=True):
        yield difference(phase_of_leaf(name), "weights", name, x, y)


def _tensors(checkpoint: Recorded, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield some tensors of a checkpoint, each whole."""
    dtypes = {name: TENSOR_DTYPES[checkpoint.arrays[name].dtype] for name in names}
    server = ShardServer()
    try:
        yield from read_tensors(checkpoint.database(server), dtypes, {}, mesh=single())
    except ShardError as error:
        raise DamagedError(f"{checkpoint.path}: it cannot be read: {error}") from error
    finally:
        server.close()
