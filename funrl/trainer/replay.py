"""Steps of an earlier run repeated in the same trainer, with the rows that it saved or with its episodes' answers.

source = replay_source("RUN/rollouts")           # a source like any other: funrl.train(..., source=source)
done = replay(job, "RUN", 7, mesh, observer)     # repeats step 7 and compares it with what the run saved
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from funrl import trees
from funrl.environments.logged import LoggedEnvironment
from funrl.kinds import Value, row_lines
from funrl.mesh.collectives import gather_objects
from funrl.mesh.mesh import Mesh
from funrl.mesh.rules import Layout
from funrl.rollout.certificate import first_copy
from funrl.rollout.sync_proof import published_of
from funrl.trainer.checkpoints.checkpoint import Recorded, complete_checkpoints, load, recorded, state_layouts
from funrl.trainer.checkpoints.resumable import check_facts, check_frozen
from funrl.trainer.checkpoints.saved_episodes import read_episodes
from funrl.trainer.checkpoints.saved_rows import ROLLOUTS, SavedRows, open_rows, read_rows, saved_steps, stage_fields
from funrl.trainer.checkpoints.snapshot import held_rows
from funrl.trainer.checkpoints.weight_digests import role_digests, weight_digests
from funrl.trainer.differences import (
    Difference,
    difference,
    digest_difference,
    joined_differences,
    line_differences,
    metric_differences,
    phase_of_field,
    phase_of_leaf,
    row_place,
    unequal,
)
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.loop import one_step
from funrl.trainer.phases import Trainer, draw_batch, learn_batch, prove_sync, score_batch, skip_batch
from funrl.trainer.settings.settings import with_flags
from funrl.trainer.sources.observing import Observer
from funrl.trainer.sources.source import Source, is_skipped
from funrl.trainer.startup import MakeSource, begin_run, make_source
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.foreign_rows import without_foreign_rows
from funrl.trainer.steps.parts import GeneratingParts, Parts
from funrl.trainer.steps.roles import State
from funrl.trainer.steps.step_rows import Rows
from funrl.trainer.steps.sync import sync
from funrl.trainer.storage.shard_server import DamagedError
from funrl.trainer.storage.shards import ShardServer


class Replayed(NamedTuple):
    """One step that was repeated, and the comparison of all that it makes."""

    step: int
    differences: list[Difference]


def replay_source(folder: str | Path) -> MakeSource:
    """A source that reads the rows that an earlier run saved; it evaluates nothing.

    Rows that other weights sampled than that run had published are an error.

    Args:
      folder: "rollouts" in the directory of that run.
    """

    def make(job: Job, parts: Parts, frozen: Mapping[str, trees.Tree], clock: Clock, show: Any) -> Source:
        def next_rows(state: trees.Tree, step: int) -> tuple[Rows, trees.Tree, dict[str, float]]:
            saved = open_rows(folder, step, job.algorithm.fields)
            rows = read_rows(saved, parts.mesh)
            published = published_of(saved.record.get("published", {}))  # by that run, to its engines
            without_foreign_rows(rows, published, parts.agents, policy=parts.main_role, drop=False)
            return rows.with_fields(digests=None), state, saved.record["metrics"]["drawn"]

        return Source(lambda: (), next_rows, lambda states, step: {}, has_digests=False)

    return make


def replay(
    job: Job,
    run_dir: str | Path,
    step: int | None,
    mesh: Mesh,
    observer: Observer,
    logged: LoggedEnvironment | MakeSource | None = None,
) -> list[Replayed]:
    """Repeat a step of a run, and those between the newest checkpoint before it and it. Collective.

    Each rank computes a step with as many threads as the first rank of the run had, since last bits depend on them.
    Without a checkpoint before it the run is repeated from its first step; so is one by a source
    that repeats an asynchronous run, some of whose rows begin before the checkpoint.

    Args:
      job: of the run; its mesh may be another one.
      step: to repeat; None: all steps from the first to the last whose rows are saved.
      logged: the environment of the job, or a source that repeats what the run has generated. Then rows are
        generated again, and compared with the saved ones; None: saved rows are trained on, and nothing is generated.

    Returns: the comparison of each step, the same on every rank.

    Raises:
      CheckpointError: rows or episodes of a step are missing or cannot be read, or a checkpoint is of another run.
    """
    folder = Path(run_dir) / ROLLOUTS
    server = ShardServer()
    threads = torch.get_num_threads()
    environment = logged if isinstance(logged, LoggedEnvironment) else None
    generating = make_source if isinstance(logged, LoggedEnvironment) else logged
    source = generating or replay_source(folder)
    try:
        last = step or gather_objects(max(saved_steps(folder), default=1), mesh)[0]
        if logged is None and not job.settings.engines.abilities.unpaged:  # without weights an engine costs nothing
            job = dataclasses.replace(job, settings=with_flags(job.settings, engine="native"))
        trainer, state = begin_run(job, mesh, observer, source)
        layouts = state_layouts(trainer.parts, state)
        before, after = _checkpoints(run_dir, last, mesh, observer)
        if before is not None and step is not None and (logged is None or environment is not None):
            check_facts(before, job)
            check_frozen(before, role_digests(trainer.parts.roles, trainer.frozen, mesh), job)
            if logged is None:
                state = load(_without_source(before), state, layouts, mesh=mesh, server=server)
            else:
                held = held_rows(trainer.source, state)
                state = load(before, state, layouts, mesh=mesh, server=server, held=held)
                state = state._replace(source=trainer.source.stored.restored(state.source))
            observer.note(f"from {before.path}")
        else:
            observer.note("from the weights that the run began with")
        if logged is not None:
            version = state.version - 1 if state.step else state.version  # that of its engine
            state = sync(trainer.parts, state._replace(version=version), frozen=trainer.frozen)
            if before is not None and isinstance(trainer.parts, GeneratingParts):
                trainer.parts.generator.proof.restore(before.facts.get("published", {}))
            prove_sync(trainer, state, first=True)
        repeated = []
        for number in range(state.step + 1, last + 1):
            saved = open_rows(folder, number, job.algorithm.fields)
            torch.set_num_threads(saved.record.get("threads", threads))  # which products and sums depend on
            if environment is not None:
                environment.open(read_episodes(folder, number))
            repeat_step = _train_again if logged is None else _generate_again
            trainer, state, differences = repeat_step(trainer, state, saved)
            differences += _digest_differences(trainer, state, saved, mesh)
            if number == last and after is not None:
                theirs = load(_without_source(after), state._replace(source=()), layouts, mesh=mesh, server=server)
                differences += _compare_states(state, theirs, layouts, mesh)
            repeated.append(Replayed(number, joined_differences(differences)))
        return repeated
    finally:
        torch.set_num_threads(threads)
        server.close()


def _digest_differences(trainer: Trainer, state: State, saved: SavedRows, mesh: Mesh) -> list[Difference]:
    """Differences of the weights of all roles from those after the saved step."""
    differences = []
    for name, role in state.roles.items():
        digests = weight_digests(role.params, trainer.parts.roles[name].stored, mesh)
        differences.append(digest_difference(name, digests, saved.record["weights"].get(name, {})))
    return differences


def _train_again(trainer: Trainer, state: State, saved: SavedRows) -> tuple[Trainer, State, list[Difference]]:
    """One step on saved rows."""
    drawn, state, source_metrics = draw_batch(trainer, state)
    learned = {}
    if is_skipped(source_metrics):
        scored = drawn
        state, metrics = skip_batch(trainer, state, drawn)
    else:
        scored, state, metrics = score_batch(trainer, state, drawn)
        state, learned = learn_batch(trainer, state, scored)
    differences = _compare_rows(scored, stage_fields(drawn, scored)["scored"], saved, "scored")
    recorded = saved.record["metrics"]
    return trainer, state, differences + metric_differences(metrics | learned, recorded["scored"] | recorded["learned"])


def _generate_again(trainer: Trainer, state: State, saved: SavedRows) -> tuple[Trainer, State, list[Difference]]:
    """One step whose rows are generated with the answers of a log, or as its log of groups says."""
    trainer, state, record = one_step(trainer, state, lambda run, state, stage: (run, state))
    metrics = {name: value for stage in record.stages.values() for name, value in stage.items()}
    environment = trainer.job.task.environment if isinstance(trainer.job, RLJob) else None
    differences = []
    if isinstance(environment, LoggedEnvironment):  # each turn that differs is named by itself
        turns = environment.compared, environment.unlike
        for count, unlike in gather_objects(turns, trainer.parts.mesh):
            differences.append(Difference("generate", "turns", "turns of the episodes", count))
            differences += [unequal("generate", "turns", turn, "") for turn in unlike]
    fields = stage_fields(record.drawn, record.rows)
    differences += _compare_rows(record.drawn, fields["drawn"], saved, "drawn")
    differences += _compare_rows(record.rows, fields["scored"], saved, "scored")
    recorded = saved.record["metrics"]
    differences += metric_differences(metrics, recorded["drawn"] | recorded["scored"] | recorded["learned"])
    return trainer, state._replace(source=trainer.source.observed(state.source, metrics)), differences


def _checkpoints(
    run_dir: str | Path, step: int, mesh: Mesh, observer: Observer
) -> tuple[Recorded | None, Recorded | None]:
    """The newest checkpoint before a step that can be read, and the one after the step; the same on every rank."""
    before = after = None
    if mesh.rank == 0:
        for number, path in reversed(complete_checkpoints(Path(run_dir) / "checkpoints").items()):
            if number > step or (number < step and before is not None):
                continue
            try:
                checkpoint = recorded(path)
            except DamagedError as error:
                observer.note(str(error))
                continue
            before, after = (before, checkpoint) if number == step else (checkpoint, after)
    return gather_objects((before, after), mesh)[0]


def _without_source(checkpoint: Recorded) -> Recorded:
    """A checkpoint without the place of the run's own source, which a replay does not have."""
    return checkpoint._replace(
        arrays={name: x for name, x in checkpoint.arrays.items() if not name.startswith("source/")}
    )


def _compare_rows(rows: Rows, fields: Mapping[str, Value], saved: SavedRows, stage: str) -> list[Difference]:
    """Compare fields of rows at a stage, on every rank its own; the result is the same on every rank."""
    mine = joined_differences(own_differences(rows, fields, saved, stage))
    return [part for parts in gather_objects(mine, rows.mesh) for part in parts]


def own_differences(
    rows: Rows, fields: Mapping[str, Value], saved: SavedRows, stage: str = "scored"
) -> list[Difference]:
    """Compare fields of this rank's rows with the saved ones.

    Args:
      fields: of the rows, by name.
      stage: "drawn" or "scored".
    """
    table = saved.row_fields(stage)
    differences = []
    own = rows.own
    lengths = rows.lengths[rows.own]
    first = rows.mesh.rank == 0  # rows' own fields are the same on all ranks
    for name, x in fields.items():
        if name in table and first:
            phase = phase_of_field(saved.schema[name].writer, stage)
            differences.append(difference(phase, "field", name, x.cpu(), table[name], row_place))
    if len(saved.lengths(stage)) != len(rows.owner):
        return differences  # other rows were chosen: `length` says so
    replicating = [axis for axis in rows.mesh.sizes if axis not in rows.mesh.row_axes]
    if any(int(rows.mesh.index(axis)) for axis in replicating):
        return differences  # another rank compares these rows
    for name, parts in saved.lines(stage, own.tolist()).items():
        if name in fields:
            kind = saved.schema[name].kind
            mine = row_lines(kind, fields[name], lengths).cpu().split(kind.counts(fields[name], lengths).tolist())
            phase = phase_of_field(saved.schema[name].writer, stage)
            differences += line_differences(phase, name, own.tolist(), mine, parts)
    return differences


def _compare_states(state: State, saved: State, layouts: Mapping[str, Layout], mesh: Mesh) -> list[Difference]:
    """Compare weights, optimizer states and the advantage chain's state with those of a checkpoint."""
    differences = []
    equal = dict[str, int]()
    for (name, x), (_, y) in zip(*(trees.named(s._replace(source=(), version=0)) for s in (state, saved)), strict=True):
        if not (first_copy(layouts[name], mesh) if name in layouts else mesh.rank == 0):
            continue  # another rank compares it
        phase = phase_of_leaf(name)
        mine, theirs = (v.detach().cpu() if isinstance(v, torch.Tensor) else torch.tensor(v) for v in (x, y))
        compared = difference(phase, "weights", name, mine, theirs)
        differences += [compared] * bool(compared.count)
        equal[phase] = equal.get(phase, 0) + (0 if compared.count else compared.total)
    differences += [Difference(phase, "weights", "state of the checkpoint", total) for phase, total in equal.items()]
    return [part for parts in gather_objects(differences, mesh) for part in parts]
