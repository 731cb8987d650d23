"""Phases of a step: draw rows, score them, learn from them, and give the engine the new weights.

    draw -> score -> advantages -> learn -> sync

Each box is a function of a trainer and its state that can be called alone. They are the same on every rank, for
reinforcement, supervised and preference learning: what differs is the source. A rank holds its shards of each model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.models.compiling.compile_cache import CompileCache
from funrl.processes import heartbeat
from funrl.trainer.gap import GapCheck
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.reward_gradients import Explainer, without_parts
from funrl.trainer.settings.settings import scoring_budget
from funrl.trainer.sources.observing import Observer
from funrl.trainer.sources.pair_rows import SAMPLED_PAIRS
from funrl.trainer.sources.selection import check_usable, nothing_learned
from funrl.trainer.sources.source import Source
from funrl.trainer.steps.advantage_phase import advantages, describe
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.foreign_rows import ForeignRowError, without_foreign_rows
from funrl.trainer.steps.learn import UpdateMonitor, learn_per_agent
from funrl.trainer.steps.micro import plan_epoch, ranks_of_groups, row_cost
from funrl.trainer.steps.parts import GeneratingParts, Parts
from funrl.trainer.steps.roles import State, sums_over_episodes, weights_of
from funrl.trainer.steps.score import score
from funrl.trainer.steps.skipped import Skips
from funrl.trainer.steps.step_rows import SINGLE_ROWS, Epoch, Rows, RowUnits, UpdatePlan, on_cpu
from funrl.trainer.steps.sync import (
    begin_proof,
    control_metrics,
    publish,
    refresh_earlier_selves,
    sync,
    wait_for_proof,
)


class Trainer(NamedTuple):
    """Everything that a run needs on this rank beside its state.

    Attributes:
      frozen: weights of the roles that neither learn nor follow the policy.
      skips: takes note of updates that are left out; None: such an update is an error.
      folder: of the checkpoints; None: the run has no directory.
      compile_cache: keeps the code of compiled layers; None: no layer is compiled.
      gap_check: of rows and metrics in which engine and trainer should agree to the bit; None: they may differ.
      explainer: takes gradients of reward functions; None: the run explains nothing.
    """

    job: Job
    parts: Parts
    source: Source
    frozen: Mapping[str, trees.Tree]
    clock: Clock
    skips: Skips | None = None
    folder: str | None = None
    compile_cache: CompileCache | None = None
    gap_check: GapCheck | None = None
    explainer: Explainer | None = None

    def frozen_in(self, state: State) -> Mapping[str, trees.Tree]:
        """Weights of the roles that do not learn, with those of the roles that follow the policy."""
        return {**self.frozen, **state.following}


def draw_batch(trainer: Trainer, state: State) -> tuple[Rows, State, dict[str, float]]:
    """Rows of the next step on the ranks that score and train them, the state with the source's place, and metrics."""
    job = trainer.job
    control_metrics(trainer.parts)  # of an evaluation, which are not the step's
    rows, source, metrics = trainer.source.next_rows(state.source, state.step + 1)
    metrics |= control_metrics(trainer.parts)
    wait_for_proof(trainer.parts)
    rows = rows.declaring(job.algorithm.fields)
    units = rows.units(sums_over_episodes(job.algorithm.losses.values()))
    group = rows.batch.get("group")
    to, epoch = scoring_ranks(job, trainer.parts, rows.lengths, group, state.step + 1, units)
    rows = trainer.source.move(rows, to, trainer.parts.mesh)._replace(epoch=epoch)
    rows, foreign = published_rows(trainer, state, rows)
    return rows, state._replace(source=source), metrics | foreign


def published_rows(trainer: Trainer, state: State, rows: Rows) -> tuple[Rows, dict[str, float]]:
    """The rows that published weights sampled, and metrics, as `without_foreign_rows`. Collective.

    Raises:
      ForeignRowError: as there; or the rows have no digests, which their source should have.
    """
    parts = trainer.parts
    if not isinstance(parts, GeneratingParts):
        return rows, {}
    if rows.batch.get("digests") is None:
        if trainer.job.settings.engines.verify_sync and trainer.source.has_digests:
            raise ForeignRowError(
                "the rows have no digests of the weights that sampled them; --noverify_sync trains on them unproved"
            )
        return rows, {}
    proof = parts.generator.proof
    if proof.version != state.version:  # who calls the phases without the loop may leave the proof out
        publish(parts, state, trainer.frozen)
        proof.complete()
    drop = trainer.job.settings.updates.foreign_rows == "drop"
    return without_foreign_rows(rows, proof.published, parts.agents, policy=parts.main_role, drop=drop)


def scoring_ranks(
    job: Job, parts: Parts, lengths: np.ndarray, group: Tensor | None, step: int, units: RowUnits = SINGLE_ROWS
) -> tuple[np.ndarray, Epoch | None]:
    """Ranks [B] on which the first pass over the rows is balanced, with that pass.

    Where advantages need whole groups, they are the ranks of the groups, without a pass.

    Args:
      lengths, group: [B] tokens and group of each row.
      units: what the rows belong to.
    """
    mesh = parts.mesh
    chain = job.algorithm.advantage
    if chain is not None and chain.whole_groups:
        if group is None:
            raise ValueError("the advantages need whole groups, and the rows are in none")
        cost = row_cost(parts.roles[job.main_role].placed)
        ranks = mesh.size(mesh.row_axes)
        return ranks_of_groups(lengths, group.cpu().numpy(), ranks, scoring_budget(job.settings), cost), None
    epoch = plan_epoch(lengths, mesh, update_plan(job, parts, step), units=units)
    return epoch.to, epoch


def update_plan(job: Job, parts: Parts, step: int) -> UpdatePlan:
    """Division of a step's rows into updates, as the flags say."""
    updates = job.settings.updates
    cost = row_cost(parts.roles[job.main_role].placed)
    return UpdatePlan(step, job.settings.run.seed, updates.epochs, updates.minibatches, updates.token_budget, cost)


def score_batch(trainer: Trainer, state: State, rows: Rows) -> tuple[Rows, State, dict[str, float]]:
    """Rows with the fields that roles write and with advantages, the state with the chain's, and metrics."""
    job = trainer.job
    parts = trainer.parts
    weights = weights_of(parts.roles, state.roles, trainer.frozen_in(state))
    for scorer in parts.remote_scorers.values():
        scorer.begin(rows, state.step + 1)
    rows = score(parts.roles, weights, rows, scoring_budget(job.settings), trainer.clock, parts.agents)
    for name, scorer in parts.remote_scorers.items():
        with trainer.clock.phase(f"score_{name}"):
            rows = scorer.finish(rows)
    if job.algorithm.advantage is None:
        pairs = job.algorithm.example in SAMPLED_PAIRS  # which the source has reported
        return rows, state, described_rows(trainer, rows) if isinstance(job, RLJob) and not pairs else {}
    with trainer.clock.phase("advantage"):
        if trainer.explainer is not None and trainer.explainer.is_due(state.step + 1):
            rows = trainer.explainer.with_parts(job.algorithm.advantage, state.advantage, rows)
        rows, chain, metrics = advantages(job.algorithm.advantage, state.advantage, rows, job.reward_names)
    return rows, state._replace(advantage=chain), metrics


def skip_batch(trainer: Trainer, state: State, rows: Rows) -> tuple[State, dict[str, float]]:
    """The state after a step without an update, as the source asks for (`is_skipped`), and metrics of the rows.

    Weights, optimizers, the advantage chain's state and the engine stay what they are.
    """
    state = follow_policy(trainer.parts, state._replace(step=state.step + 1))
    state = refresh_earlier_selves(trainer.parts, state, trainer.frozen)
    described = len(rows.owner) and trainer.job.algorithm.example != "pair"  # whose source reports them
    return state, described_rows(trainer, rows) if described else {}


def described_rows(trainer: Trainer, rows: Rows) -> dict[str, float]:
    """Metrics of rows without advantages."""
    return describe(on_cpu(rows), on_cpu(rows).batch, trainer.job.reward_names)


def explain_batch(trainer: Trainer, state: State, rows: Rows) -> tuple[Rows, dict[str, float]]:
    """Metrics of the reward functions in a step that is explained, and the rows as all steps have them. Collective."""
    explainer = trainer.explainer
    if explainer is None or not explainer.is_due(state.step + 1):
        return rows, {}
    plan = update_plan(trainer.job, trainer.parts, state.step + 1)
    params = state.roles[trainer.job.main_role].params
    with trainer.clock.phase("explain"):
        metrics = explainer.explain(params, rows, plan, trainer.frozen_in(state))
    return without_parts(rows), metrics


def update_batch(trainer: Trainer, state: State, rows: Rows) -> tuple[State, dict[str, float], dict[str, float]]:
    """The state after the step's updates and the sync of the engine; metrics of the updates and of the engine."""
    state, learned = learn_batch(trainer, state, rows)
    if trainer.gap_check is not None:
        trainer.gap_check.learned(learned)
    state = sync(trainer.parts, state, trainer.clock, trainer.frozen)
    return state, learned, prove_sync(trainer, state)


def prove_sync(trainer: Trainer, state: State, *, first: bool = False) -> dict[str, float]:
    """`begin_proof` of a trainer's newest sync."""
    return begin_proof(trainer.parts, state, trainer.frozen, trainer.job.settings, trainer.clock, first=first)


def learn_batch(trainer: Trainer, state: State, rows: Rows) -> tuple[State, dict[str, float]]:
    """The state after the step's updates, and their metrics."""
    parts = trainer.parts
    plan = update_plan(trainer.job, parts, state.step + 1)
    monitor = UpdateMonitor(trainer.clock, trainer.skips)
    roles, metrics = learn_per_agent(
        parts.roles, state.roles, rows, plan, parts.agents, frozen=trainer.frozen_in(state), monitor=monitor
    )
    state = follow_policy(parts, state._replace(roles=roles, step=plan.step))
    if trainer.skips is not None:
        metrics |= trainer.skips.take()
    return refresh_earlier_selves(parts, state, trainer.frozen), metrics


@torch.no_grad()
def follow_policy(parts: Parts, state: State) -> State:
    """The state after the moves of `Role.follow` that are due after its step, in place. Collective.

    References: Gorbatovski et al., 2024, https://arxiv.org/abs/2404.09656 (a reference that moves).
    """
    policy = parts.roles[parts.main_role].placed
    own = state.roles[parts.main_role].params
    for name, params in state.following.items():
        role = parts.roles[name]
        if role.follow is None or state.step % role.follow.every:
            continue
        same = role.placed.stored == policy.stored
        target = own if same else role.placed.copy_from(policy, own)
        for x, y in zip(trees.leaves(params), trees.leaves(target), strict=True):
            x.lerp_(y.to(x.dtype), role.follow.share)
    return state


def end_steps(trainer: Trainer, state: State) -> None:
    """Complete the proof of the newest sync, and raise RewardError if no step had a usable episode."""
    check_usable(state.source, state.step)
    wait_for_proof(trainer.parts)


def finish(trainer: Trainer, state: State, observer: Observer, error: str | None) -> bool:
    """Give the observer the trained model; False, and nothing is given, if a failed run has learned nothing."""
    if error and nothing_learned(state.source, state.step):
        return False
    role = trainer.parts.roles[trainer.job.main_role]
    with heartbeat.phase("finish"):
        params = role.whole(state.roles[trainer.job.main_role].params, trainer.frozen)
        observer.finish(role.placed, params, error)
    return True
