"""Observer of a run: rank 0 shows and writes; on other ranks the same calls do nothing."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from funrl import trees
from funrl.mesh.reshard import unshard
from funrl.models import Placed, hf
from funrl.models.deployed import deployed
from funrl.models.lora import trained_part
from funrl.models.peft_files import write_peft
from funrl.track.guards import Watch
from funrl.track.progress import open_progress
from funrl.track.report import ORDER
from funrl.track.run_directory import RunDirectory, RunDirectoryError, keep_steps, open_lines, read_lines
from funrl.track.samples import Sample, open_samples
from funrl.track.services import open_service
from funrl.track.trackers import join_trackers, jsonl, tensorboard
from funrl.trainer.declaration import parts
from funrl.trainer.evaluation import EvalRow
from funrl.trainer.generation import Example
from funrl.trainer.job import Job

OnStep = Callable[[int, dict[str, float]], Any]


class RunObserver:
    """Progress on the terminal, lines and events in the run directory, the model at the end; a `trainer.Observer`.

    Raises:
      RunDirectoryError: by every method that writes, when the system refuses it, as on a full disk.
    """

    def __init__(self, job: Job, run_dir: str | None, rank: int, on_step: OnStep | None = None) -> None:
        """
        Args:
          run_dir: the same on every rank; rank 0 writes there. None: nothing is written.
          on_step: called by rank 0 with the number and the metrics of every step.
        """
        self.job, self.run_dir, self.stack = job, run_dir, contextlib.ExitStack()
        self.run = RunDirectory(Path(run_dir)) if run_dir and rank == 0 else None
        self.on_step = on_step if rank == 0 else None
        self.warmstart: contextlib.AbstractContextManager[None] | None = None
        self.times_shown = 0
        self.watch = Watch()

    def __enter__(self) -> RunObserver:
        if self.run is None:
            return self
        title = f"{self.job.task.name}, mesh {self.job.settings.mesh}, seed {self.job.settings.seed}"
        with _writing(self.run):
            self.track = join_trackers(
                jsonl(self.run.metrics),
                tensorboard(self.run.tensorboard),
                *(open_service(name, self.run, self.note) for name in parts(self.job.settings.report_to)),
            )
            self.stack.callback(self.track.close)
            self.write_sample = open_samples(self.run.samples)
            self.stack.callback(self.write_sample.close)
            self.table = open_lines(self.run.eval_samples)
            self.stack.callback(self.table.close)
        self.progress = self.stack.enter_context(open_progress(self.job.settings.steps, title))
        return self

    def __exit__(self, *exception: Any) -> None:
        # Where an exception is under way already, one of closing files would hide it.
        with contextlib.suppress(OSError) if exception[0] else _writing(self.run):
            self.stack.close()

    def note(self, text: str) -> None:
        if self.run is not None:
            self.progress.note(text)

    def supervised(self, step: int, steps: int, metrics: dict[str, float]) -> None:
        """Progress of the warm start."""
        if self.run is None:
            return
        if self.warmstart is None:
            self.warmstart = self.progress.stage("warm start", steps)
            self.warmstart.__enter__()
        self.progress.update(step, metrics)
        if step == steps:
            self.warmstart.__exit__(None, None, None)

    def samples(
        self,
        step: int,
        examples: Sequence[Example],
        texts: Sequence[str],
        scores: Sequence[float | None],
        parts: Sequence[Mapping[str, float]],
    ) -> None:
        if self.run is None:
            return
        readable = self.job.task.readable
        if readable is not None:
            texts = [readable(text) for text in texts]
            if not self.times_shown:
                self.progress.note(f"samples: {ORDER}")
        given = [
            Sample(step, e.text, text, score, tuple(part.items()))
            for e, text, score, part in zip(examples, texts, scores, parts, strict=True)
        ]
        with _writing(self.run):
            for sample in given:
                self.write_sample.write(sample)
        # Evaluations come with the same prompts: another one is printed each time.
        turn = self.times_shown % len(given)
        self.times_shown += 1
        self.progress.sample(given[turn].prompt, given[turn].completion, scores[turn], step)

    def evaluated(self, rows: Sequence[EvalRow]) -> None:
        """Write rows of an evaluation's table, as people read them."""
        if self.run is None:
            return
        readable = self.job.task.readable
        with _writing(self.run):
            for row in rows:
                if readable is not None:
                    row = row._replace(completion=readable(row.completion), answer=readable(row.answer))
                self.table.write(row._asdict())

    def step(self, step: int, metrics: dict[str, float], seconds: dict[str, float]) -> None:
        """One line of metrics, with the time of each phase."""
        total = sum(seconds.values())
        tokens = metrics.get("perf/total_num_tokens", 0.0)
        times = {f"time_s/{phase}": value for phase, value in seconds.items()} | {"time_s/step": total}
        metrics = metrics | times | {"perf/tokens_per_s": tokens / max(total, 1e-9)}
        if self.run is not None:
            with _writing(self.run):
                self.track(step, metrics)
            self.progress.update(step, metrics)
            for finding in self.watch.look(step, metrics):
                self.progress.note(str(finding))
        if self.on_step is not None:
            self.on_step(step, metrics)

    def resumed(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Forget the lines of steps after `step`, which are written again; write that of `step` if it is missing."""
        if self.run is None:
            return
        last = 0
        with _writing(self.run):
            keep_steps(self.run.metrics, step)
            keep_steps(self.run.samples, step)
            keep_steps(self.run.eval_samples, step)
            for row in read_lines(self.run.metrics) if self.run.metrics.exists() else ():
                self.watch.look(row["step"], row)  # what was said is not said again
                last = row["step"]
            if metrics is not None and last < step:
                self.track(step, metrics)

    def checkpoint_folder(self) -> str | None:
        """Folder in which rank 0 writes checkpoints."""
        return None if self.run is None else str(self.run.checkpoints)

    def finish(self, placed: Placed, params: trees.Tree, error: str | None) -> None:
        """Write the model; every rank takes part, as its weights come one by one from all ranks. Adapters are merged
        in it, and written by themselves too.

        Args:
          placed, params: the trained model and this rank's weights.
          error: what ended the run early.
        """
        found = deployed(placed, params)
        named = found.exported(found.model.names)
        if self.run is None:
            collections.deque(named, maxlen=0)
        else:
            with _writing(self.run):
                hf.write(self.run.model, found.model, named, self.job.tokenizer)
        if placed.model.adapters is not None:
            self._write_adapters(placed, params)
        if self.run is None:
            return
        if error:
            self.progress.note(f"stopped early; the model as it is now was saved in {self.run.model}")

    def _write_adapters(self, placed: Placed, params: trees.Tree) -> None:
        model, (own, stored) = placed.model, (trained_part(placed.model, x) for x in (params, placed.stored))
        whole = dict(trees.named(unshard(own, stored, placed.mesh)))
        if self.run is not None:
            base = Path(self.job.settings.model or self.run.base).absolute()
            with _writing(self.run):
                write_peft(self.run.adapter, model, whole, base, self.job.tokenizer)


@contextlib.contextmanager
def _writing(run: RunDirectory | None) -> Iterator[None]:
    """Name the run directory in an error of the file system."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (getattr(error, "strerror", None) or str(error).rsplit("I/O error: ")[-1]).lower()
        where = getattr(error, "filename", None) or (run.path if run else "")
        raise RunDirectoryError(f"{where}: cannot be written: {reason}") from error
