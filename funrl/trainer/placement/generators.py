"""Trainer-side client of the generator ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.batch import as_dict, declare, schema_of
from funrl.fields import FIELDS, Field
from funrl.mesh.mesh import Mesh
from funrl.mesh.pools.channel import Requests
from funrl.mesh.pools.handover import Handover, receive_rows
from funrl.rewards.call import RewardError
from funrl.rollout.remote.engine import RemoteEngine
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.placement.messages import (
    EndEvaluationRequest,
    EpisodesRequest,
    EvaluateRequest,
    SendGroupsRequest,
    SendRequest,
    WriteRequest,
    WrittenFiles,
    WrittenRows,
    blank_batch,
    origins_of,
    own_fields,
)
from funrl.trainer.sources.generation import Rollout
from funrl.trainer.sources.observing import Show, ShownSample
from funrl.trainer.sources.prompts import BASELINE_SEED
from funrl.trainer.sources.source import DroppedPrompt, NextRows, RemoteRows, StepRows
from funrl.trainer.steps.step_rows import Rows, moved, rows_of, with_stale
from funrl.trainer.storage.shard_server import CheckpointError

ORIGIN = {"origin": Field("row", "source", "the row's number among those of the generator ranks", dtype="int")}


ServeUntil = Callable[[Requests, int, str], None]


class Generators:
    """Trainer-side client of the generator ranks; a `RemoteGenerators`.

    Attributes:
      step: that the next rows are for.
      refills: whether prompts that the filter drops are replaced where they are written.
    """

    refills = False

    def __init__(
        self,
        engine: RemoteEngine,
        show: Show,
        *,
        early: bool,
        staleness: int = 0,
        serve_until: ServeUntil | None = None,
    ) -> None:
        """Name the ranks.

        Args:
          engine: theirs.
          show: receives their remarks.
          early: whether rows come as soon as they are written, and not when the batch is complete.
          staleness: bound on the age of a token, in versions.
          serve_until: as `RewardsOfTrainers.serve_until`; None: trainer ranks reward nothing for generator ranks.
        """
        self.engine = engine
        self.requests = engine.requests
        self.mesh = engine.requests.mesh
        self.generating = engine.weights.mesh
        self.show = show
        self.early = early
        self.staleness = staleness
        self.step = 0
        self.shown: list[ShownSample] = []  # of the newest rows
        self.serve_until = serve_until

    def write(self, places: np.ndarray, sampling: Sampling, seed: int) -> RemoteRows:
        """Rows of prompts; see `RemoteGenerators`. Unless `early`, they are on the ranks that wrote them.

        Raises:
          RewardError: as `rollout` raises it.
        """
        number = self.requests.post(WriteRequest(self.step, places, sampling, seed))
        written: WrittenRows
        written, self.shown = self._answer(number, f"the generators' rows of step {self.step}")
        device = self.mesh.device
        facts: dict[str, Any] = {
            name: x.to(device) if isinstance(x, Tensor) else x for name, x in written.rollout.items()
        }
        done = Rollout(completions=(), mesh=self.generating, **facts)
        batch = declare(blank_batch(written, device), ORIGIN)
        origin_B = torch.from_numpy(origins_of(number, len(written.owner))).to(device)
        rows = rows_of(batch._replace(origin=origin_B), written.owner, self.generating)
        return RemoteRows(places, done, self.moved_early(rows, len(places)) if self.early else rows)

    def moved_early(self, rows: Rows, prompts: int) -> Rows:
        """Rows on the trainer ranks, shared out by their groups."""
        ranks = self.mesh.size(self.mesh.row_axes)
        return self.move(rows, rows.batch.group.cpu().numpy() * ranks // max(1, prompts), self.mesh)

    def take_step(self, next_rows: NextRows, state: trees.Tree, step: int, steps: int) -> StepRows:
        """Rows of a step; as `next_rows` gives them.

        Args:
          next_rows: of a source that has this client.
          state: of the source.
          step: number of the step.
          steps: of the run.
        """
        del steps
        self.step = step
        return next_rows(state, step)

    def log(self) -> list[tuple[object, ...]] | None:
        """The groups of the newest batch; None: it was not made of groups that were written ahead."""
        return None

    def write_episodes(self, folder: Path) -> int:
        """Have the generator ranks write the episodes of the newest batch; returns the bytes. Collective.

        Raises:
          CheckpointError: one of them cannot write.
        """
        number = self.requests.post(EpisodesRequest(str(folder.absolute()), self.episode_groups()))
        files: WrittenFiles = self._answer(number, "the generators' episodes")
        if files.problem:
            raise CheckpointError(files.problem)
        return files.nbytes

    def episode_groups(self) -> tuple[int, ...]:
        """Groups of the newest batch, as in `EpisodesRequest`."""
        return ()

    def saved(self, state: trees.Tree) -> trees.Tree:
        """The source's state with what a resumed run needs to know of the generator ranks."""
        return state

    def close(self) -> None:
        """Do nothing: nothing runs between steps."""

    def dropped(self) -> list[DroppedPrompt]:
        """Prompts that were replaced for the newest rows; see `RemoteGenerators`."""
        return []

    def keep(self, prompts: np.ndarray) -> None:
        """Do nothing: further prompts are asked for as others are; see `RemoteGenerators`."""

    def baseline_rows(self, groups: np.ndarray, places: np.ndarray, sampling: Sampling) -> Rows:
        """Rows of greedy completions, which are asked for as other rows are; see `RemoteGenerators`."""
        del groups
        return self.write(places, sampling, BASELINE_SEED).rows

    def samples(self) -> dict[int, ShownSample]:
        """Samples of the newest rows; see `RemoteGenerators`."""
        return dict(enumerate(self.shown))

    def evaluate(self, step: int, show: Show) -> dict[str, float]:
        """Metrics of an evaluation; see `RemoteGenerators`."""
        return self._evaluated(EvaluateRequest(step, self.engine.version or 0), step, show)

    def _evaluated(self, request: EvaluateRequest | EndEvaluationRequest, step: int, show: Show) -> dict[str, float]:
        """Metrics of the evaluation that a request asks for."""
        number = self.requests.post(request)
        metrics, samples, table = self._answer(number, f"the generators' evaluation after step {step}")
        show.samples(step, samples)
        show.evaluated(table)
        return dict(metrics)

    def move(self, rows: Rows, to: np.ndarray, mesh: Mesh) -> Rows:
        """`moved`, also for rows of the generator ranks, which let go of all other rows then. Collective."""
        if rows.mesh.here:
            return moved(rows, to, mesh)
        fields = as_dict(rows.batch)
        number = self.requests.post(self.send_request(rows, fields.pop("origin").cpu().numpy(), to))
        way = Handover(rows.lengths, rows.owner, to, source=rows.mesh, target=mesh)
        own, _ = receive_rows(*own_fields(rows.batch), way)
        self._answer(number, "the generators' rows")
        further = {name: field for name, field in schema_of(rows.batch).items() if name not in FIELDS | ORIGIN}
        batch = declare(type(rows.batch)(**{}), further)._replace(**{**fields, **own})
        moved_rows = rows_of(batch, to, mesh)
        return with_stale(moved_rows, self.engine.version or 0, self.staleness) if "version" in own else moved_rows

    def send_request(self, rows: Rows, origins: np.ndarray, to: np.ndarray) -> SendRequest | SendGroupsRequest:
        """The request that lets the generator ranks hand rows over."""
        del rows
        return SendRequest(origins, to)

    def _answer(self, number: int, waits_for: str) -> Any:
        """The value of an answer, after its remarks have been shown. Raises: RewardError."""
        if self.serve_until is not None:
            self.serve_until(self.requests, number, waits_for)
        value, notes, problem = self.requests.answer(number, waits_for)
        for note in notes:
            self.show.note(note)
        if problem is not None:
            raise RewardError(problem)
        return value
