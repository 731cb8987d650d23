"""Observer of a run: rank 0 shows and writes; on other ranks the same calls do nothing."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError

from funrl import trees
from funrl.data.pictures import picture_form_of
from funrl.mesh.reshard import unshard
from funrl.models import Placed
from funrl.models.deployed import deployed
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.names import names_of
from funrl.models.huggingface.peft_files import write_peft
from funrl.models.lora import trained_part
from funrl.processes import spans
from funrl.track.progress import Progress
from funrl.track.records.guards import Monitor
from funrl.track.records.run_directory import (
    RunDirectory,
    RunDirectoryError,
    begin_segment,
    keep_steps,
    open_lines,
    read_lines,
)
from funrl.track.records.samples import Sample, sample_line
from funrl.track.records.services import open_service, prometheus
from funrl.track.records.shown_pictures import shown_pictures
from funrl.track.records.trackers import jsonl, tensorboard
from funrl.trainer.jobs.job import Job
from funrl.trainer.settings.declaration import parts
from funrl.trainer.sources.evaluation import EvalRow
from funrl.trainer.sources.observing import GroupGradient, ShownSample

ORDER = "answers are shown with their digits in the usual order; the model writes the ones first"
OnStep = Callable[[int, dict[str, float]], object]


class RunObserver:
    """Progress on the terminal, lines and events in the run directory, the model at the end; a `trainer.Observer`.

    Raises:
      RunDirectoryError: by every method that writes, when the system refuses it, as on a full disk.
    """

    def __init__(self, job: Job, run_dir: str | None, rank: int, on_step: OnStep | None = None) -> None:
        """Prepare to observe a run.

        Args:
          job: what runs.
          run_dir: the same on every rank; rank 0 writes there. None: nothing is written.
          rank: of this process.
          on_step: called by rank 0 with the number and the metrics of every step.
        """
        self.job = job
        self.stack = contextlib.ExitStack()
        self.run = RunDirectory(Path(run_dir)) if run_dir and rank == 0 else None
        self.own = rank, run_dir
        self.on_step = on_step if rank == 0 else None
        self.times_shown = 0
        self.monitor = Monitor()

    def __enter__(self) -> RunObserver:
        """Open the files and the trackers, and begin to show progress; every rank exports its own spans."""
        outputs = self.job.settings.outputs
        services = parts(outputs.report_to)
        if "otel" in services:
            self.stack.enter_context(spans.spans_exported(*self.own))
        if self.run is None:
            return self
        with _writing(self.run):
            self.trackers = [
                jsonl(self.run.metrics),
                tensorboard(self.run.tensorboard),
                *(open_service(name, self.run, self.note) for name in services),
                *([] if outputs.metrics_port is None else [prometheus(outputs.metrics_port)]),
            ]
            self.sample_lines = open_lines(self.run.samples)
            self.table = open_lines(self.run.eval_samples)
            self.group_lines = None if outputs.explain_every is None else open_lines(self.run.groups)
            for writer in (*self.trackers, self.sample_lines, self.table, *filter(None, [self.group_lines])):
                self.stack.callback(writer.close)
        self.progress = Progress(self.job.settings.run.steps)
        return self

    def __exit__(self, *exception: object) -> None:
        """Close all of them."""
        # An error of closing files would hide the exception that ended the run.
        with contextlib.suppress(OSError) if exception[0] else _writing(self.run):
            self.stack.close()

    def note(self, text: str) -> None:
        """Print a line."""
        if self.run is not None:
            self.progress.note(text)

    def samples(self, step: int, samples: Sequence[ShownSample]) -> None:
        """Write samples of a step to samples.jsonl and print one of them."""
        if self.run is None:
            return
        readable = self.job.task.readable
        if readable is not None and not self.times_shown:
            self.progress.note(f"samples: {ORDER}")
        records = [
            Sample(
                step,
                prompt=sample.prompt,
                completion=sample.text if readable is None else readable(sample.text),
                reward=sample.score,
                rewards=tuple(sample.parts.items()),
                conversation=sample.conversation,
                pictures=shown_pictures(sample.example, picture_form_of(self.job.tokenizer)),
            )
            for sample in samples
        ]
        with _writing(self.run):
            for record in records:
                self.sample_lines.write(sample_line(record))
        # Evaluations have the same prompts: each time the next of them is printed.
        shown = records[self.times_shown % len(records)]
        self.times_shown += 1
        self.progress.sample(shown)

    def evaluated(self, rows: Sequence[EvalRow]) -> None:
        """Write rows of an evaluation's table, in readable form."""
        if self.run is None:
            return
        readable = self.job.task.readable
        with _writing(self.run):
            for row in rows:
                if readable is not None:
                    row = row._replace(completion=readable(row.completion), answer=readable(row.answer))
                self.table.write(row._asdict())

    def groups(self, step: int, groups: Sequence[GroupGradient]) -> None:
        """Write the groups of the largest gradients to groups.jsonl, in readable form."""
        if self.run is None or self.group_lines is None:
            return
        readable = self.job.task.readable or str
        with _writing(self.run):
            for group in groups:
                shown = group._replace(completion=readable(group.completion))
                self.group_lines.write({"step": step, **shown._asdict()})

    def step(self, step: int, metrics: dict[str, float], seconds: dict[str, float]) -> None:
        """Write and show the metrics of a step, with the time of each phase."""
        total = sum(seconds.values())
        tokens = metrics.get("perf/total_num_tokens", 0.0)
        times = {f"time_s/{phase}": value for phase, value in seconds.items()} | {"time_s/step": total}
        metrics = metrics | times | {"perf/tokens_per_s": tokens / max(total, 1e-9)}
        if self.run is not None:
            self._track(step, metrics)
            self.progress.update(step, metrics)
            self.monitor.add(step, metrics)
            for finding in self.monitor.new_findings():
                self.progress.note(str(finding))
        if self.on_step is not None:
            self.on_step(step, metrics)

    def resumed(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Remove the lines of steps after `step`, which are made again; write that of `step` if it is missing."""
        if self.run is None:
            return
        last = 0
        self.monitor = Monitor()
        with _writing(self.run):
            keep_steps(self.run.metrics, step)
            keep_steps(self.run.samples, step)
            keep_steps(self.run.eval_samples, step)
            keep_steps(self.run.groups, step)
            for row in read_lines(self.run.metrics) if self.run.metrics.exists() else ():
                self.monitor.add(row["step"], row)
                self.monitor.new_findings()  # guards that have reported do not report again
                last = row["step"]
        if metrics is not None and last < step:
            self._track(step, metrics)

    def _track(self, step: int, metrics: Mapping[str, float]) -> None:
        with _writing(self.run):
            for tracker in self.trackers:
                tracker.write(step, metrics)

    def began(self, step: int, inputs: Mapping[str, str]) -> None:
        """Record the start in config.json."""
        if self.run is not None:
            with _writing(self.run):
                begin_segment(self.run, step, inputs)

    def checkpoint_folder(self) -> str | None:
        """Folder in which rank 0 writes checkpoints."""
        return None if self.run is None else str(self.run.checkpoints)

    def finish(self, placed: Placed, params: trees.Tree, error: str | None) -> None:
        """Write the model; every rank takes part, as its weights are gathered one by one.

        Adapters are merged into it, and written by themselves too.

        Args:
          placed: the trained model.
          params: this rank's weights.
          error: what ended the run early.
        """
        merged = deployed(placed, params)
        named = merged.exported(names_of(merged.model))
        if self.run is None:
            collections.deque(named, maxlen=0)
        else:
            with _writing(self.run):
                hf.write(self.run.model, merged.model, named, self.job.tokenizer, dtype=self.job.save_dtype)
        if placed.model.adapters is not None:
            self._write_adapters(placed, params)
        if self.run is None:
            return
        if error:
            self.progress.note(f"stopped early; the model as it is now was saved in {self.run.model}")

    def _write_adapters(self, placed: Placed, params: trees.Tree) -> None:
        model = placed.model
        own, stored = (trained_part(model, tree) for tree in (params, placed.stored))
        whole = dict(trees.named(unshard(own, stored, placed.mesh)))
        if self.run is not None:
            base = Path(self.job.settings.models.model or self.run.base).absolute()
            with _writing(self.run):
                write_peft(self.run.adapter, model, whole, base=base, tokenizer=self.job.tokenizer)


@contextlib.contextmanager
def _writing(run: RunDirectory | None) -> Iterator[None]:
    """Name the run directory in an error of the file system."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (getattr(error, "strerror", None) or str(error).rsplit("I/O error: ")[-1]).lower()
        place = getattr(error, "filename", None) or (run.path if run else "")
        raise RunDirectoryError(f"{place}: cannot be written: {reason}") from error
