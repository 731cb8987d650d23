"""The directory that a run leaves behind, and the lines of JSON in it.

| file | what | written |
|---|---|---|
| config.json | every flag, versions, platform, mesh, seed | before any work |
| metrics.jsonl | one object a step | after every step |
| samples.jsonl | one object a sample | now and then |
| eval_samples.jsonl | one object a completion of an evaluation | at every evaluation |
| tensorboard/ | the metrics as TensorBoard events | after every step |
| model/ | the trained policy as a Hugging Face directory | at the end |
| adapter/ | with --lora_rank, the adapters that are merged in it, as PEFT has them | at the end |
| base/ | with --lora_rank and without --model, the model that the adapters stand on | before the first step |
| trackers.json | what the trackers of --report_to call this run | when they are opened |
| checkpoints/ | the newest checkpoints, and the best | every `--save_every` |
| rollouts/ | rows and scores of steps, for `funrl replay` | every `--save_rollouts` steps |
| skipped/ | rows of updates that were not finite, a few of them | when one is left out |
| profile/ | traces of steps, for Perfetto or Chrome | after the steps of `--profile` |
| report.html | all of this as one page | at the end |

A line reaches the file in one write, so whatever ends a run, each line is a whole object (at most the last is cut
short, which `read_lines` leaves out).
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import itertools
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import funrl


class RunDirectoryError(ValueError):
    """A run directory that cannot be used; the message names it and says what would be right."""


@dataclass(frozen=True)
class RunDirectory:
    """Directory of a run. It holds no open file, so it may be handed to other processes."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def eval_samples(self) -> Path:
        return self.path / "eval_samples.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def base(self) -> Path:
        return self.path / "base"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def trackers(self) -> Path:
        return self.path / "trackers.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def skipped(self) -> Path:
        return self.path / "skipped"


def open_run(run_dir: str | Path | None, experiment: str, config: dict[str, Any], resume: bool = False) -> RunDirectory:
    """Create the directory of a run, prove that it can be written, and write its config.json.

    Args:
      run_dir: where; None or "" is runs/<experiment>-<time>, with a number behind it if that is taken.
      experiment: the name of the program, such as "ppo".
      config: every flag by name; "mesh" and "seed" are also put at the top of config.json.
      resume: the directory may hold what this run has written before.
    Raises:
      RunDirectoryError: it cannot be created or written, or it holds anything of a former run that would mix
        with this one's or be lost, or a foreign config.json.
    """
    run = RunDirectory(_new_default(experiment) if not run_dir else given_directory(Path(run_dir)))
    try:
        if not resume:
            check_unused(run)
        sweep_drafts(run)
        _check_writable(run.path)
        write_text(run.config, json.dumps(valid(run_record(experiment, config)), indent=2) + "\n")
    except (OSError, RunDirectoryError) as error:
        with contextlib.suppress(OSError):
            run.path.rmdir()  # only one that holds nothing
        if isinstance(error, RunDirectoryError):
            raise
        raise RunDirectoryError(f"--run_dir={run.path}: cannot be written: {_reason(error)}") from None
    return run


def run_record(experiment: str, config: dict[str, Any]) -> dict[str, Any]:
    """Content of config.json: the flags, and what else is needed to do the run again."""
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
    }


def versions() -> dict[str, str | None]:
    """The versions of what decides a run's numbers."""
    found = {name: _version(name) for name in ("torch", "transformers")}
    return {"funrl": funrl.__version__, "python": platform.python_version()} | found


def valid(value: Any) -> Any:
    """The value as what JSON can say: numbers that are not finite are None, scalars of any library are numbers."""
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

    write: Callable[[dict[str, Any]], None]
    close: Callable[[], None]


def open_lines(path: Path) -> Lines:
    """Open a file to add JSON lines to; each is handed to the system, whole, before `write` returns.

    `write` raises OSError where the file has been deleted or moved, or the disk is full.
    """
    file = open(path, "ab", buffering=0)  # noqa: SIM115  (closed by the caller)
    own = os.fstat(file.fileno())

    def write(record: dict[str, Any]) -> None:
        line = json.dumps(valid(record), ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n"
        begin = os.stat(path)  # a file that was deleted could be written still, for nobody
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
            if number == len(lines):  # no newline follows it: the run was ended inside this write
                return
            raise RunDirectoryError(f"{path}, line {number}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise RunDirectoryError(f"{path}, line {number}: a JSON object is needed, not {type(record).__name__}")
        yield record


def keep_steps(path: Path, step: int) -> None:
    """Remove the lines of steps after `step` from a file of JSON lines, in place: whoever adds to it may have it open.

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
    """Make the directory that a flag names, if it is not there. Raises: RunDirectoryError."""
    path = expanded(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"--run_dir={path}: cannot be created: {_reason(error)}") from None
    return path


def _new_default(experiment: str) -> Path:
    stem = f"{experiment}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        path = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if path.is_dir():
                continue
            raise RunDirectoryError(f"{path.parent}: is a file; give --run_dir") from None
        except OSError as error:
            here = Path.cwd()
            raise RunDirectoryError(f"{here / path}: cannot be created: {_reason(error)}; give --run_dir") from None
        return path
    raise RunDirectoryError(f"runs/{stem}: a thousand of that name exist; give --run_dir")


def check_unused(run: RunDirectory) -> None:
    """Raise RunDirectoryError where a directory holds what a former run or a model left; it need not exist."""
    files = (run.metrics, run.samples, run.eval_samples, run.report)
    models = (run.model, run.adapter, run.base)
    written = (*files, *models, run.tensorboard, run.checkpoints, run.rollouts, run.skipped, run.profile)
    there = [path.name for path in written if os.path.lexists(path)]
    if there:  # even with no step in it: that run may not have ended
        raise RunDirectoryError(
            f"--run_dir={run.path}: holds {', '.join(there)}, as a former run leaves them; give another directory or "
            "remove them"
        )
    if run.config.exists():
        try:
            ours = "experiment" in json.loads(run.config.read_bytes())
        except (ValueError, TypeError, OSError):
            ours = False
        if not ours:
            raise RunDirectoryError(
                f"--run_dir={run.path}: holds a config.json that no run has written (a model?); give another directory"
            )


def check_can_go_on(path: Path) -> None:
    """Raise RunDirectoryError where the run of a directory has made all its steps and has left no checkpoint: beginning
    anew would lose it."""
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
            f"--resume: the run in {path} has made its {steps} steps and has no checkpoint to go on from; give another "
            f"--run_dir, with --model={run.model} to begin with its weights"
        )


def sweep_drafts(run: RunDirectory) -> None:
    """Remove files that a run that was killed has left half written."""
    drafts = [run.path.glob(pattern) for pattern in (".config.json.*", ".report.html.*", ".probe.*")]
    for draft in itertools.chain(*drafts, run.model.glob("*.partial"), run.skipped.glob("*.partial")):
        with contextlib.suppress(OSError):
            draft.unlink()


def _check_writable(path: Path) -> None:
    probe = path / f".probe.{os.getpid()}"
    try:
        probe.write_bytes(b"\n")
    except OSError as error:
        raise RunDirectoryError(f"--run_dir={path}: cannot be written: {_reason(error)}") from None
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
