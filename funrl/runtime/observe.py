"""What rank 0 shows and writes during a run; on other ranks the same calls do nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from funrl import trees
from funrl.models import hf
from funrl.runtime.job import Job
from funrl.runtime.progress import open_progress
from funrl.runtime.report import write_report
from funrl.runtime.rollout import Example
from funrl.runtime.run_directory import RunDirectory
from funrl.runtime.samples import Sample, open_samples
from funrl.runtime.trackers import jsonl, tensorboard, together

SHOWN = 3  # samples printed at a time; all that are given are written


class Observer:
    """Progress on the terminal, lines and events in the run directory, model and report at the end."""

    def __init__(self, job: Job, run_dir: str | None) -> None:
        self.job, self.run, self.stack = job, RunDirectory(Path(run_dir)) if run_dir else None, contextlib.ExitStack()

        self.warmstart: contextlib.AbstractContextManager[None] | None = None

    def __enter__(self) -> Observer:
        if self.run is None:
            return self
        title = f"{self.job.task.name}, mesh {self.job.settings.mesh}, seed {self.job.settings.seed}"
        self.track = together(jsonl(self.run.metrics), tensorboard(self.run.tensorboard))
        self.stack.callback(self.track.close)
        self.write_sample = open_samples(self.run.samples)
        self.stack.callback(self.write_sample.close)
        self.progress = self.stack.enter_context(open_progress(self.job.settings.steps, title))
        return self

    def __exit__(self, *exception: Any) -> None:
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

    def samples(self, step: int, examples: Sequence[Example], texts: Sequence[str], scores: Sequence[float]) -> None:
        if self.run is None:
            return
        for i, (example, text, score) in enumerate(zip(examples, texts, scores, strict=True)):
            self.write_sample.write(Sample(step, example.text, text, score))
            if i < SHOWN:
                self.progress.sample(example.text, text, score)

    def step(self, step: int, metrics: dict[str, float], seconds: dict[str, float]) -> None:
        """One line of metrics, with the time of each phase."""
        total = sum(seconds.values())
        tokens = metrics.get("perf/total_num_tokens", 0.0)
        times = {f"time_s/{phase}": value for phase, value in seconds.items()} | {"time_s/step": total}
        metrics = metrics | times | {"perf/tokens_per_s": tokens / max(total, 1e-9)}
        if self.run is not None:
            self.track(step, metrics)
            self.progress.update(step, metrics)

    def finish(self, weights: trees.Tree, error: str | None) -> None:
        """Writes the model (whole weights) and the report."""
        if self.run is None:
            return
        hf.save(self.run.model, self.job.config, weights, self.job.tokenizer)
        with contextlib.suppress(FileNotFoundError):  # a run that stopped before its first step has no metrics
            write_report(self.run.path)
        if error:
            self.progress.note(f"stopped early; the model as it is now was saved in {self.run.model}")
