"""Traces of some steps of a run, which Perfetto and Chrome open: `--profile=STEP:COUNT`.

A trace has what torch.profiler sees of one rank, the operators of the CPU and the kernels of the GPU, and as ranges of
its own each step and the phases of a step by the names that the metrics time_s/... have.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from funrl.mesh.mesh import Mesh
from funrl.processes import heartbeat
from funrl.trainer.settings.declaration import parts
from funrl.trainer.settings.settings import Settings

PROFILES = "profile"  # in the run directory


def is_profiled(settings: Settings, mesh: Mesh) -> bool:
    """True if this rank writes a trace."""
    return settings.outputs.profile_ranks == "all" or str(mesh.process) in parts(settings.outputs.profile_ranks)


class StepProfiler:
    """Begins and ends the trace of a rank as its steps go by.

    Args:
      settings: of the run.
      mesh: of this rank.
      checkpoints: folder beside which traces go; None: nowhere.
      note: receives the path of the trace.
    """

    def __init__(self, settings: Settings, mesh: Mesh, checkpoints: str | None, note: Callable[[str], None]) -> None:
        self.window = settings.outputs.window if checkpoints is not None and is_profiled(settings, mesh) else None
        self.mesh = mesh
        self.folder = Path(checkpoints or PROFILES).with_name(PROFILES)
        self.note = note
        self.trace: Any = None
        self.range: Any = None

    def begin(self, step: int) -> None:
        """Take note of a step that begins."""
        if self.window is None or not self.window.first <= step <= self.window.last:
            return
        if self.trace is None:
            activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (self.mesh.device.type == "cuda")]
            self.trace = torch.profiler.profile(activities=activities, acc_events=True)
            self.trace.start()
            self.begun = step
            heartbeat.mark_phases(record_function)
        self.step = step
        self.range = record_function(f"step {step}")
        self.range.__enter__()

    def end(self, step: int) -> None:
        """Take note of a step that is done; after the last one the trace is written."""
        if self.trace is None:
            return
        self.range.__exit__(None, None, None)
        self.range = None
        if self.window is not None and step >= self.window.last:
            self._write(step)

    def close(self) -> None:
        """Write the trace that is under way, of a run that ends early."""
        if self.trace is not None:
            if self.range is not None:
                self.range.__exit__(None, None, None)
            self._write(self.step, "-cut")

    def _write(self, step: int, end: str = "") -> None:
        trace, self.trace = self.trace, None
        heartbeat.mark_phases(None)
        trace.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        steps = f"step-{self.begun}" if step == self.begun else f"steps-{self.begun}-{step}"
        path = self.folder / f"rank-{self.mesh.process}-{steps}{end}.json.gz"
        trace.export_chrome_trace(str(path))
        self.note(f"wrote {path}; open it at ui.perfetto.dev or chrome://tracing")
