"""The directory that a run leaves behind, and the lines of JSON in it.

| file | content | written |
|---|---|---|
| config.json | every flag, versions, platform, mesh, seed, digests; a segment per start | when a start is accepted |
| metrics.jsonl | one object per step | after every step |
| samples.jsonl | one object per sample | now and then |
| eval_samples.jsonl | one object per completion of an evaluation | at every evaluation |
| groups.jsonl | the groups of the largest gradients | every `--explain_every` steps |
| tensorboard/ | the metrics as TensorBoard events | after every step |
| model/ | the trained policy as a Hugging Face directory | at the end |
| adapter/ | with --lora_rank, the adapters that are merged in it, in PEFT's format | at the end |
| base/ | with --lora_rank and without --model, the model that the adapters were trained on | before the first step |
| trackers.json | identities of this run in the trackers of --report_to | when they are opened |
| checkpoints/ | the newest checkpoints, and the best | every `--save_every` |
| rollouts/ | rows and scores of steps, for `funrl replay` | every `--save_rollouts` steps |
| profile/ | traces of steps, for Perfetto or Chrome | after the steps of `--profile` |
| report.html | all of this as one page | at the end |

A line reaches the file in one write, so whatever ends a run, each line is a whole object. Only the last may be cut
short, and `read_lines` leaves it out.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.metadata
import itertools
import json
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import funrl
from funrl.processes.processor import processor_facts
from funrl.rewards.sandbox import SandboxError, check_platform
from funrl.track.records.segments import config_of, segments_of


class RunDirectoryError(ValueError):
    """A run directory that cannot be used; the message names it and what would be right."""


class Member:
    """A file or folder of a run directory, by its name."""

    def __init__(self, name: str) -> None:
        """Name it."""
        self.name = name

    def __get__(self, run: RunDirectory, _: type) -> Path:
        """Its path in a run's directory."""
        return run.path / self.name


@dataclass(frozen=True)
class RunDirectory:
    """Directory of a run. It holds no open file, so it may be handed to other processes."""

    path: Path

    config = Member("config.json")
    start = Member(".config.json.start")  # record of a start that is not in config.json yet
    metrics = Member("metrics.jsonl")
    samples = Member("samples.jsonl")
    eval_samples = Member("eval_samples.jsonl")
    groups = Member("groups.jsonl")
    tensorboard = Member("tensorboard")
    model = Member("model")
    adapter = Member("adapter")
    base = Member("base")
    report = Member("report.html")
    trackers = Member("trackers.json")
    checkpoints = Member("checkpoints")
    rollouts = Member("rollouts")
    profile = Member("profile")
    skipped = Member("skipped")  # of earlier versions, as the next one
    gap = Member("gap")


def open_run(
    run_dir: str | Path | None,
    experiment: str,
    config: Mapping[str, object],
    resume: bool = False,
) -> RunDirectory:
    """Create the directory of a run, check that it can be written, and write its config.json.

    The config.json of a resumed run stays as it is until its checkpoint has been accepted: see `segments`.

    Args:
      run_dir: where; None or "" is runs/<experiment>-<time>, with a number appended if that is taken.
      experiment: the name of the program, such as "ppo".
      config: every flag by name; "mesh" and "seed" are also put at the top of config.json.
      resume: the directory may hold what this run has written before.

    Raises:
      RunDirectoryError: it cannot be created or written, or it holds anything of a former run that would mix
        with this one's or be lost, or a foreign config.json.
    """
    run = RunDirectory(_new_default(experiment) if not run_dir else given_directory(Path(run_dir)))
    try:
        check_own_config(run)
        if not resume:
            check_unused(run)
        sweep_drafts(run)
        record = {"step": 0} | run_record(experiment, config)
        write_text(run.start if resume else run.config, _json_text(record if resume else config_of([record])))
    except (OSError, RunDirectoryError) as error:
        with contextlib.suppress(OSError):
            run.path.rmdir()  # only one that holds nothing
        if isinstance(error, RunDirectoryError):
            raise
        raise RunDirectoryError(f"--run_dir={run.path}: cannot be written: {_reason(error)}") from None
    return run


def run_record(experiment: str, config: Mapping[str, object]) -> dict[str, object]:
    """Content of config.json: the flags, and what else is needed to repeat the run."""
    return {
        "experiment": experiment,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "mesh": config.get("mesh"),
        "seed": config.get("seed"),
        "flags": config,
        "versions": versions(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "processor": processor_facts(),
        "sandbox": _sandbox(),
    }


def _sandbox() -> str | None:
    """Means by which programs that a policy writes are confined on this machine; None: they cannot be."""
    try:
        return check_platform()
    except SandboxError:
        return None


def versions() -> dict[str, str | None]:
    """Versions of the packages that decide a run's numbers."""
    packages = {name: installed_version(name) for name in ("torch", "transformers")}
    return {"funrl": funrl.__version__, "python": platform.python_version()} | packages


def valid(value: Any) -> Any:
    """The value as JSON can hold it: numbers that are not finite become None, scalars of any library numbers."""
    if isinstance(value, dict):
        return {str(key): valid(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [valid(item) for item in value]
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # tensors and arrays; those without dims become a number
        return valid(value.tolist())
    return str(value)


class Lines(NamedTuple):
    """A file of JSON lines that is open for writing."""

    write: Callable[[Mapping[str, object]], None]
    close: Callable[[], None]


def open_lines(path: Path) -> Lines:
    """Open a file to append JSON lines to; each is handed to the system, whole, before `write` returns.

    `write` raises OSError if the file has been deleted or moved, or the disk is full.
    """
    file = open(path, "ab", buffering=0)  # noqa: SIM115  (closed by the caller)
    own = os.fstat(file.fileno())

    def write(record: Mapping[str, object]) -> None:
        line = json.dumps(valid(record), ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n"
        begin = os.stat(path)  # a deleted file could still be written, and nobody would find it
        if (begin.st_ino, begin.st_dev) != (own.st_ino, own.st_dev):
            raise FileNotFoundError(errno.ENOENT, "another file has taken its place", str(path))
        try:
            while line:  # a full disk may take a part
                line = line[file.write(line) or 0 :]
        except OSError:
            os.ftruncate(file.fileno(), begin.st_size)  # no half line is left
            raise

    return Lines(write, file.close)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines. A last line that was cut short is left out.

    Raises:
      RunDirectoryError: a line before the last is no JSON object; the message has its number.
    """
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # no newline follows it: the run ended inside this write
                return
            raise RunDirectoryError(f"{path}, line {number}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise RunDirectoryError(f"{path}, line {number}: a JSON object is needed, not {type(record).__name__}")
        yield record


def keep_steps(path: Path, step: int) -> None:
    """Remove the lines of steps after `step` from a file of JSON lines, in place: another writer may have it open.

    Raises:
      RunDirectoryError: as `read_lines`.
    """
    if not path.exists():
        return
    kept = [record for record in read_lines(path) if record.get("step", 0) <= step]
    with open(path, "r+b") as file:
        file.write(b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in kept))
        file.truncate()


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: to a neighbour first, which then takes its name."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(draft, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def expanded(path: str | Path) -> Path:
    """A path whose leading ~ is the home directory. Raises: RunDirectoryError."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise RunDirectoryError(f"--run_dir={path}: {str(error).lower()}; give it in full") from None


def given_directory(path: Path) -> Path:
    """Create the directory that a flag names, if it does not exist. Raises: RunDirectoryError."""
    path = expanded(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"--run_dir={path}: cannot be created: {_reason(error)}") from None
    return path


def _new_default(experiment: str) -> Path:
    stem = f"{experiment}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = Path("runs") / stem
    number = 1
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except OSError as error:
            if not path.is_dir():
                here = Path.cwd()
                raise RunDirectoryError(f"{here / path}: cannot be created: {_reason(error)}; give --run_dir") from None
        number += 1
        path = path.with_name(f"{stem}-{number}")


def check_unused(run: RunDirectory) -> None:
    """Raise RunDirectoryError if a directory holds what a former run or a model left; it need not exist."""
    written = (*_written_by_a_start(run), run.report, run.model, run.adapter)
    if there := [path.name for path in written if os.path.lexists(path)]:
        raise RunDirectoryError(
            f"--run_dir={run.path}: holds {', '.join(there)}, as a former run leaves them; "
            "give another directory or remove them"
        )
    check_own_config(run)


def check_own_config(run: RunDirectory) -> None:
    """Raise RunDirectoryError if a directory holds a config.json that no run has written."""
    if not run.config.exists():
        return
    try:
        ours = "experiment" in json.loads(run.config.read_bytes())
    except (ValueError, TypeError, OSError):
        ours = False
    if not ours:
        raise RunDirectoryError(
            f"--run_dir={run.path}: holds a config.json that no run has written (a model?); give another directory"
        )


def has_no_step(run: RunDirectory) -> bool:
    """True if a directory holds nothing that a step of a run, or its end, has written."""
    if any(os.path.lexists(path) for path in (run.model, run.adapter, run.report)):
        return False
    if any(path.is_dir() and any(path.iterdir()) for path in (run.rollouts, run.skipped, run.gap, run.profile)):
        return False
    steps = [path for path in run.checkpoints.glob("step-*/complete.json") if path.parent.name != "step-0"]
    try:
        return not steps and not (run.metrics.exists() and any(read_lines(run.metrics)))
    except (OSError, RunDirectoryError):
        return False


def remove_start(run: RunDirectory) -> None:
    """Remove what a start without a step has written: see `has_no_step`. Other files stay."""
    for path in (*_written_by_a_start(run), run.trackers, run.config, run.start):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _written_by_a_start(run: RunDirectory) -> tuple[Path, ...]:
    """Paths that a start may write before its first step."""
    folders = (run.base, run.tensorboard, run.checkpoints, run.rollouts, run.skipped, run.gap, run.profile)
    return (run.metrics, run.samples, run.eval_samples, *folders)


def begin_segment(run: RunDirectory, step: int, inputs: Mapping[str, str]) -> None:
    """Record in config.json that the present start continues after `step`, or is the run's first.

    Args:
      run: the directory.
      step: the last one of the checkpoint; 0: none.
      inputs: digests of the files and weights that the start has read.

    Raises:
      OSError, ValueError: a file cannot be read or written.
    """
    segments = segments_of(json.loads(run.config.read_bytes())) if run.config.exists() else []
    if run.start.exists():
        segments.append(json.loads(run.start.read_bytes()))
    if not segments:  # the directory was not opened as a run's
        return
    segments[-1] = {**segments[-1], "step": step, "inputs": dict(inputs)}
    write_text(run.config, _json_text(config_of(segments)))
    run.start.unlink(missing_ok=True)


def _json_text(record: object) -> str:
    return json.dumps(valid(record), indent=2) + "\n"


def check_can_go_on(path: Path) -> None:
    """Raise RunDirectoryError if a run has made all its steps and left no checkpoint: beginning anew would lose it."""
    run = RunDirectory(path)
    if not run.model.is_dir() or any(run.checkpoints.glob("step-*/complete.json")):
        return
    try:
        steps = json.loads(run.config.read_bytes())["flags"]["steps"]
        last = max((line.get("step", 0) for line in read_lines(run.metrics)), default=0)
    except (OSError, ValueError, KeyError, TypeError):
        return
    if last == steps:
        raise RunDirectoryError(
            f"--resume: the run in {path} has made its {steps} steps and has no checkpoint to continue; give another "
            f"--run_dir, with --model={run.model} to begin with its weights"
        )


def sweep_drafts(run: RunDirectory) -> None:
    """Remove files that a killed run has left half written."""
    drafts = [run.path.glob(pattern) for pattern in (".config.json.*", "..config.json.*", ".report.html.*")]
    for draft in itertools.chain(*drafts, run.model.glob("*.partial"), run.skipped.glob("*.partial")):
        with contextlib.suppress(OSError):
            draft.unlink()


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


@functools.cache
def installed_version(package: str) -> str | None:
    """Version of a package; None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
