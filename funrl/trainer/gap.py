"""The gap between engine and trainer: where it is 0 by construction, and what a run does if it is not.

On a CPU both compute with the functions of the decoding step, so that the log-probability of a token has the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from funrl import trees
from funrl.compiled_kernels.exact.dispatch import kernels_work
from funrl.compiled_kernels.packed import BITS, FIXED_PARTS, parts_of
from funrl.mesh.collectives import gather_objects
from funrl.models.decoder.sequence_parallel import is_ring
from funrl.trainer.gap_row import GAP_FOLDER, as_trained, held_shards, save_gap, shares_memory, worst_token
from funrl.trainer.jobs.job import Job
from funrl.trainer.settings.settings import scoring_budget
from funrl.trainer.steps.parts import GeneratingParts, Parts
from funrl.trainer.steps.score import score_role
from funrl.trainer.steps.step_rows import Rows
from funrl.trainer.storage.shard_server import CheckpointError

_log = logging.getLogger(__name__)
GAP_METRIC = "rollout/logprob_gap_max"


class GapError(RuntimeError):
    """Engine and trainer gave different log-probabilities where the same bits are promised."""


def gap_check(job: Job, parts: Parts, checkpoints: str | None, note: Callable[[str], None]) -> GapCheck | None:
    """The check of a run's steps; None: engine and trainer may differ by rounding. The arguments are `GapCheck`'s."""
    if not isinstance(parts, GeneratingParts):
        return None
    if problem := gap_problem(job, parts):
        _log.info("engine and trainer may differ by rounding: %s", problem)
        return None
    return GapCheck(job, parts, checkpoints, note)


def gap_problem(job: Job, parts: GeneratingParts) -> str | None:
    """The reason why engine and trainer may differ by rounding; None: their log-probabilities have the same bits.

    Args:
      job: one that generates.
      parts: of the run.
    """
    settings = job.settings
    policy = parts.roles[job.main_role].placed
    sums = policy.model.abilities.exact_sums
    sizes = policy.mesh.sizes
    if policy.mesh.device.type != "cpu":
        return f"the kernels of {policy.mesh.device.type} sum in orders that depend on the batch"
    if settings.models.backend != "torch":
        return f"--backend={settings.models.backend} sums in orders of its own"
    if not kernels_work():
        return "there are no C++ kernels here"
    if not settings.engines.abilities.own_steps:
        return f"--engine={settings.engines.engine} has kernels of its own"
    if job.dtype not in BITS:
        return f"there are no C++ kernels for {job.dtype}"
    if isinstance(sums, str):
        return sums
    if job.lora is not None and job.agents.policies:
        return "the engines of second policies merge adapters, which the trainer adds"
    if is_ring(settings.devices.sequence_parallel, -(-policy.model.abilities.heads // sizes["tensor"]), sizes):
        return "ring attention adds up keys by ranks"
    splits = {policy.mesh.size("tensor"), parts.generator.mesh.size("tensor")}
    heads = policy.model.abilities.heads
    if len(splits) > 1 and any(heads % ranks for ranks in splits):
        return f"{' and '.join(map(str, sorted(splits)))} tensor ranks do not all divide {heads} heads"
    return split_problem(sums, splits)


def split_problem(sums: tuple[int, ...], splits: set[int]) -> str | None:
    """The reason why some numbers of tensor ranks share sums of these sizes in ways that differ."""
    if len(splits) == 1 and splits == {1}:
        return None
    for size in sums:
        for ranks in splits:
            if parts_of(size) % ranks:
                return (
                    f"a sum over {size} terms has {parts_of(size)} of {FIXED_PARTS} equal parts, which {ranks} tensor "
                    "ranks cannot share"
                )
    return None


class GapCheck:
    """The check of a step's rows and metrics: it says that a gap is not 0 where it should be, or stops the run.

    The first gap of a run is saved beside its checkpoints, as `funrl bisect RUN --gap` reads it.
    """

    def __init__(self, job: Job, parts: GeneratingParts, checkpoints: str | None, note: Callable[[str], None]) -> None:
        """Check the steps of a run.

        Args:
          checkpoints: their folder; None: nothing is saved.
          note: receives what is said.
        """
        self.parts = parts
        self.settings = job.settings
        self.folder = None if checkpoints is None else Path(checkpoints).with_name(GAP_FOLDER)
        self.note = note
        self.saved = False
        generator = parts.generator
        # One engine, which is this rank's, has all weights of all rows.
        self.searches = generator.base is None and not generator.policies and generator.mesh.here

    def scored(self, rows: Rows, metrics: Mapping[str, float], step: int) -> None:
        """Check rows that have been scored. Collective where there is a gap.

        Args:
          metrics: of the step, in which there may be a gap.
          step: number of the step.

        Raises:
          GapError: there is one, and --on_gap=stop.
        """
        if metrics.get(GAP_METRIC, 0.0) == 0:
            return
        text = self._message(rows, metrics[GAP_METRIC], step)
        if self.settings.engines.on_gap == "stop":
            raise GapError(text)
        self.note(text)

    def learned(self, rows: Rows, metrics: Mapping[str, float], params: trees.Tree, step: int) -> None:
        """Check rows whose old log-probabilities were those of an update, before the engine has newer weights.

        Collective where there is a gap. The rows are scored again, by the weights that the engine holds.

        Args:
          params: this rank's weights of the policy after the update.
        """
        gap = metrics.get(GAP_METRIC, 0.0)
        if gap == 0:
            return
        shards = held_shards(self.parts.generator.engine) if self.searches else {}
        if not self.searches or any(gather_objects(shares_memory(shards, params), self.parts.mesh)):
            self.note(f"{_difference(gap)}; --on_gap=stop names the token, which it scores before the update")
            return
        role = self.parts.roles[self.parts.main_role]._replace(writes={"old_logp": "logp"})
        weights = as_trained(self.parts, shards)
        rows = rows.with_fields(**score_role(role, weights, rows, scoring_budget(self.settings)))
        self.note(self._message(rows, gap, step))

    def _message(self, rows: Rows, gap: float, step: int) -> str:
        """The token in words, and the command that finds the operation. Collective."""
        row = worst_token(rows, step, self.settings.sampling.temperature)
        text = _difference(gap)
        if row is None:
            return text
        text = f"{text}, most at {row}"
        if self.saved:
            return text
        if not self.searches:
            return f"{text}; `funrl bisect --gap` searches runs without --place, of one policy without adapters"
        self.saved = True
        if self.folder is None:
            return f"{text}; with --run_dir `funrl bisect RUN --gap` names the operation that differs"
        try:
            save_gap(self.folder, row, self.parts.generator.engine)
        except CheckpointError as error:
            return f"{text}; {error}"
        return f"{text}; this command names the operation that differs: funrl bisect {self.folder.parent} --gap"


def _difference(gap: float) -> str:
    return f"engine and trainer differ by {gap:.3g} nats where they should have the same bits"
