"""Trainer-side client of the generator ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.batch import as_dict, declare, schema_of
from funrl.data.order import Mixture
from funrl.data.prompts import Example
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
    SamplesRequest,
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
from funrl.trainer.sources.source import DroppedPrompt
from funrl.trainer.steps.step_rows import Rows, moved, rows_of
from funrl.trainer.storage.shard_server import CheckpointError

ORIGIN = {"origin": Field("row", "source", "the row's number among those of the generator ranks", dtype="int")}


ServeUntil = Callable[[Requests, int, str], None]


class NumberedExample(Example):
    """A prompt that knows its place among those of the job."""

    place: int


class NumberedPrompts(Sequence[Example]):
    """Prompts that know their places."""

    def __init__(self, prompts: Sequence[Example]) -> None:
        """Number prompts, each when it is asked for."""
        self.prompts = prompts

    def __len__(self) -> int:
        return len(self.prompts)

    @overload
    def __getitem__(self, place: int) -> Example: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Example]: ...
    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        return _numbered(self.prompts[place], place)


class NumberedMixture(Mixture[Example]):
    """Prompts of several parts that know their places."""

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return _numbered(super().__getitem__(index), index)


def with_places(prompts: Sequence[Example]) -> Sequence[Example]:
    """The prompts, in the same order, as `NumberedExample`s."""
    if isinstance(prompts, Mixture):
        return NumberedMixture(prompts.parts, prompts.shares)
    return NumberedPrompts(prompts)


def _numbered(prompt: Example, place: int) -> NumberedExample:
    example = NumberedExample(*prompt)
    example.place = int(place)
    return example


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
        mesh: Mesh,
        show: Show,
        *,
        early: bool,
        staleness: int = 0,
        serve_until: ServeUntil | None = None,
    ) -> None:
        """Name the ranks.

        Args:
          engine: theirs.
          mesh: to train on.
          show: receives their remarks.
          early: whether rows come as soon as they are written, and not when the batch is complete.
          staleness: bound on the age of a token, in versions.
          serve_until: as `RewardsOfTrainers.serve_until`; None: trainer ranks reward nothing for generator ranks.
        """
        self.engine = engine
        self.requests = engine.requests
        self.mesh = mesh
        self.generating = engine.weights.mesh
        self.show = show
        self.early = early
        self.staleness = staleness
        self.step = 0
        self.newest = -1  # number of the request of the newest rows
        self.serve_until = serve_until

    def rewarded_rows(self, examples: Sequence[Example], sampling: Sampling, seed: int) -> tuple[Rollout, Rows]:
        """Rows of prompts; see `RemoteGenerators`. Unless `early`, they are on the ranks that wrote them.

        Raises:
          RewardError: as `rollout` raises it.
        """
        places = np.array([example.place for example in examples if isinstance(example, NumberedExample)])
        number = self.requests.post(WriteRequest(self.step, places, sampling, seed))
        self.newest = number
        written: WrittenRows = self._answer(number, f"the generators' rows of step {self.step}")
        device = self.mesh.device
        facts: dict[str, Any] = {
            name: x.to(device) if isinstance(x, Tensor) else x for name, x in written.rollout.items()
        }
        done = Rollout(completions=(), mesh=self.generating, **facts)
        batch = declare(blank_batch(written, device), ORIGIN)
        origin_B = torch.from_numpy(origins_of(number, len(written.owner))).to(device)
        rows = rows_of(batch._replace(origin=origin_B), written.owner, self.generating)
        if not self.early:
            return done, rows
        ranks = self.mesh.size(self.mesh.row_axes)
        to = batch.group.cpu().numpy() * ranks // max(1, len(examples))
        return done, self.move(rows, to, self.mesh)

    def begin_step(self, step: int, position: int, steps: int) -> None:
        """Begin to take the batch of a step.

        Args:
          step: number of the step.
          position: of its first prompt in the order.
          steps: of the run.
        """
        del position, steps
        self.step = step

    def choose(self, state: trees.Tree, step: int, steps: int) -> tuple[trees.Tree, dict[str, float]]:
        """The source's state and no metrics: the prompts of a step are chosen when it begins."""
        del step, steps
        return state, {}

    def log(self) -> list[tuple[Any, ...]] | None:
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

    def restored(self, state: trees.Tree) -> trees.Tree:
        """The state without it, which is taken in."""
        return state

    def metrics(self) -> dict[str, float]:
        """Metrics of the newest batch."""
        return {}

    def close(self) -> None:
        """Do nothing: nothing runs between steps."""

    def order(self, places: np.ndarray) -> np.ndarray:
        """The given places: their rows come next; see `RemoteGenerators`."""
        return places

    def dropped(self) -> list[DroppedPrompt]:
        """Prompts that were replaced for the newest rows; see `RemoteGenerators`."""
        return []

    def keep(self, prompts: np.ndarray) -> None:
        """Do nothing: further prompts are asked for as others are; see `RemoteGenerators`."""

    def baseline_rows(self, groups: np.ndarray) -> Rows | None:
        """None: greedy completions are asked for as other rows are; see `RemoteGenerators`."""
        return None

    def samples(self, count: int) -> dict[int, ShownSample]:
        """Samples of the newest rows; see `RemoteGenerators`."""
        shown = self._answer(self.requests.post(SamplesRequest(self.newest, count)), "the generators' samples")
        return dict(enumerate(shown))

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
        if "version" in own:
            own["stale"] = own["mask"] & self.stale(own["version"], own["mask"])
        further = {name: field for name, field in schema_of(rows.batch).items() if name not in FIELDS | ORIGIN}
        batch = declare(type(rows.batch)(**{}), further)._replace(**{**fields, **own})
        return rows_of(batch, to, mesh)

    def stale(self, version_bT: Tensor, mask_bT: Tensor) -> Tensor:
        """[b, T] bool, tokens whose log-probabilities need not be those of the newest weights. Raises: RuntimeError."""
        return self._mark_stale(version_bT, mask_bT)

    def send_request(self, rows: Rows, origins: np.ndarray, to: np.ndarray) -> Any:
        """The request that lets the generator ranks hand rows over."""
        kept = {self.newest} if self.early else set()  # whose samples may be asked for
        return SendRequest(origins, to, frozenset(kept))

    def _mark_stale(self, version_bT: Tensor, mask_bT: Tensor) -> Tensor:
        """[b, T] bool, tokens of other weights than the newest.

        Raises:
          RuntimeError: a token that was sampled is older than it may be.
        """
        age_bT = (self.engine.version or 0) - version_bT
        oldest = int(age_bT[mask_bT].max()) if mask_bT.any() else 0
        if oldest > self.staleness:
            raise RuntimeError(f"a token of step {self.step} is {oldest} versions old; --staleness={self.staleness}")
        return age_bT != 0

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
