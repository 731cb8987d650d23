"""The command `funrl bisect`: the first difference between two runs, or between engine and trainer.

    funrl bisect RUN_DIR OTHER_RUN_DIR
    funrl bisect RUN_DIR --gap

The first form names the first step, phase and tensor that differ. It compares the files of both runs: the metrics of
every step, the rows, scores and weight digests that `--save_rollouts` keeps, and checkpoints. It computes nothing, and
needs none of the runs' devices. The second form is `funrl.cli.bisect_gap`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from funrl.cli.bisect_gap import bisect_gap
from funrl.cli.line import read_words
from funrl.cli.usages import COMMANDS
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
from funrl.trainer.settings.declaration import START_FLAGS, Flag, SettingsError
from funrl.trainer.storage.shard_server import DamagedError
from funrl.trainer.storage.shards import TENSOR_DTYPES, ShardError, ShardServer, read_tensors

ROWS_AT_ONCE = 256
SHOWN = 20  # differences of the first phase


class RunRecord(NamedTuple):
    """The files of a run, by step.

    Attributes:
      flags: flags and recipe arguments, each with its values and the steps after which they took effect.
      inputs: digests of files and weights, in the same form.
      metrics: metrics of each step.
      rows, checkpoints: their folders.
    """

    path: Path
    flags: Mapping[str, list[tuple[int, Any]]]
    inputs: Mapping[str, list[tuple[int, Any]]]
    metrics: Mapping[int, dict[str, Any]]
    rows: Mapping[int, Path]
    checkpoints: Mapping[int, Path]


def bisect_command(argv: Sequence[str]) -> int:
    """Run `funrl bisect ...`; return the exit status: 0 if nothing differs, else 1.

    Args:
      argv: "bisect" and its arguments.
    """
    usage = COMMANDS["bisect"].usage
    own = Flag("gap", False, bool, optional=False, text="compare engine and trainer on the row that the run has saved")
    places, line = read_words([own], argv, usage, most=2)
    if len(places) != (1 if line.values["gap"] else 2):
        raise SettingsError(f"usage: {usage}")
    if line.values["gap"]:
        return bisect_gap(places[0])
    run, other = (read_record(Path(place)) for place in places)
    if unlike := flag_differences(run, other):
        print(f"flags that differ: {'; '.join(unlike)}")
    if unlike := [name for name, x in run.inputs.items() if x != other.inputs.get(name, x)]:
        print(f"digests that differ: {', '.join(unlike)}")
    step, differences = first_step(run, other)
    print("\n".join(conclusion(run, other, step, differences=differences)))
    return 1 if differences else 0


def read_record(path: Path) -> RunRecord:
    """The files of a run.

    Raises:
      SettingsError, RunDirectoryError: the directory is not a run, or one of its files is broken.
    """
    run = RunDirectory(path)
    try:
        record = json.loads(run.config.read_text())
        flags = values_over_time(record, "flags")
        inputs = values_over_time(record, "inputs")
        record["flags"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"{run.config}: not the config.json of a run: {reason}") from None
    lines = list(read_lines(run.metrics)) if run.metrics.exists() else []
    metrics = {int(line["step"]): line for line in lines if "step" in line}
    return RunRecord(
        path,
        flags=flags,
        inputs=inputs,
        metrics=metrics,
        rows=saved_steps(run.rollouts),
        checkpoints=complete_checkpoints(run.checkpoints),
    )


def flag_differences(run: RunRecord, other: RunRecord) -> list[str]:
    """Describe each flag in which two runs differ."""
    names = [name for name in dict.fromkeys((*run.flags, *other.flags)) if name not in START_FLAGS]
    pairs = [(name, run.flags.get(name), other.flags.get(name)) for name in names]
    return [f"--{name}: {in_words(x)} and {in_words(y)}" for name, x, y in pairs if x != y]


def first_step(run: RunRecord, other: RunRecord) -> tuple[int, list[Difference]]:
    """The first step in which two runs differ, and its differences; else the last common step and an empty list.

    Raises:
      SettingsError: they have no step in common.
      DamagedError: a file cannot be read.
    """
    metrics = sorted(run.metrics.keys() & other.metrics.keys())
    rows = run.rows.keys() & other.rows.keys()
    checkpoints = run.checkpoints.keys() & other.checkpoints.keys()
    steps = sorted({*metrics, *rows, *checkpoints})
    if not steps:
        raise SettingsError(f"{run.path} and {other.path} have no step in common")
    for step in steps:
        differences = compare_saved(run, other, step) if step in rows else []
        if step in metrics:
            a, b = (record.metrics[step] for record in (run, other))
            names = a.keys() & b.keys()  # one run may evaluate more often than the other
            differences += metric_differences(*({name: x[name] for name in names} for x in (a, b)))
        if step in checkpoints:
            differences += compare_checkpoints(run.checkpoints[step], other.checkpoints[step])
        if any(part.count for part in differences):
            return step, differences
    return steps[-1], []


def compare_saved(run: RunRecord, other: RunRecord, step: int) -> list[Difference]:
    """Compare the rows of a step at both stages, and the digests of the weights after it."""
    a, b = (open_rows(record.rows[step].parent, step) for record in (run, other))
    differences: list[Difference] = []
    for stage in STAGES:
        tables = a.row_fields(stage), b.row_fields(stage)
        for name in tables[0].keys() & tables[1].keys():
            phase = phase_of_field(a.schema[name].writer, stage)
            differences.append(difference(phase, "field", name, tables[0][name], tables[1][name], row_place))
        for name in set(a.record["fields"][stage]) ^ set(b.record["fields"][stage]):
            phase = phase_of_field({**a.schema, **b.schema}[name].writer, stage)
            differences.append(_of_one_run(phase, "field", name))
        count = min(len(a.lengths(stage)), len(b.lengths(stage)))
        for first in range(0, count, ROWS_AT_ONCE):
            numbers = range(first, min(first + ROWS_AT_ONCE, count))
            parts = a.lines(stage, numbers), b.lines(stage, numbers)
            for name in (name for name in parts[0] if name in parts[1]):
                phase = phase_of_field(a.schema[name].writer, stage)
                differences += line_differences(phase, name, numbers, parts[0][name], parts[1][name])
    for role in {**a.record["weights"], **b.record["weights"]}:
        pair = [x.record["weights"].get(role, {}) for x in (a, b)]
        unlike = [name for name in {**pair[0], **pair[1]} if pair[0].get(name) != pair[1].get(name)]
        where = unlike[0] if unlike else ""
        largest = math.inf if unlike else 0.0
        what = f"weights of {role} by their digests"
        differences.append(
            Difference(
                f"update_{role}",
                "digests",
                what,
                total=len(pair[0]),
                count=len(unlike),
                largest=largest,
                where=where,
            )
        )
    return joined_differences(differences)


def compare_checkpoints(run: Path, other: Path) -> list[Difference]:
    """Compare every tensor and number of two checkpoints, in chunks.

    Raises:
      DamagedError: one cannot be read.
    """
    a, b = (recorded(path) for path in (run, other))
    differences = []
    for name in a.arrays.keys() ^ b.arrays.keys():
        differences.append(_of_one_run(phase_of_leaf(name), "weights", name))
    common = [name for name in a.arrays if name in b.arrays]
    comparable = [name for name in common if a.arrays[name][:2] == b.arrays[name][:2]]  # shape and dtype
    for name in (name for name in common if name not in comparable):
        where = f"{a.arrays[name].dtype} {a.arrays[name].shape} and {b.arrays[name].dtype} {b.arrays[name].shape}"
        differences.append(
            Difference(phase_of_leaf(name), "weights", name, total=1, count=1, largest=math.inf, where=where)
        )
    for (name, x), (_, y) in zip(_tensors(a, comparable), _tensors(b, comparable), strict=True):
        differences.append(difference(phase_of_leaf(name), "weights", name, x, y))
    return differences


def _of_one_run(phase: str, kind: str, name: str) -> Difference:
    """A field or tensor that only one of two runs has."""
    where = f"one run has no such {'field' if kind == 'field' else 'tensor'}"
    return Difference(phase, kind, name, total=1, count=1, largest=math.inf, where=where)


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


def phase_of_leaf(name: str) -> str:
    """The phase of a step that writes a tensor of a checkpoint."""
    head, _, rest = name.partition("/")
    return {"roles": f"update_{rest.partition('/')[0]}", "source": "generate"}.get(head, "advantage")


def conclusion(run: RunRecord, other: RunRecord, step: int, differences: Sequence[Difference]) -> list[str]:
    """Describe the first difference, or what agrees."""
    counts = {
        "metrics": run.metrics.keys() & other.metrics.keys(),
        "rows": run.rows.keys() & other.rows.keys(),
        "checkpoints": run.checkpoints.keys() & other.checkpoints.keys(),
    }
    compared = ", ".join(f"{kind} of {sum(s <= step for s in steps)} steps" for kind, steps in counts.items())
    if not differences:
        return [f"no difference up to step {step}; compared: {compared}"]
    first = first_phase(differences)
    lines = [f"first difference: step {step}, phase {first[0].phase}", *(f"  {part}" for part in first[:SHOWN])]
    if len(first) > SHOWN:
        lines.append(f"  and {len(first) - SHOWN} more")
    return [*lines, f"compared: {compared}"]
