"""Exact gradients of single reward functions and of single groups, on the rows of a step (`--explain_every`).

The whole is the gradient of the policy's loss over all rows of a step, at the weights before its updates: with one
mini-batch and one epoch, the gradient of the update. Denominators are those of all rows, so gradients of reward
functions, of what remains, and of groups each add up to the whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from funrl import trees
from funrl.algos.core import Advantage
from funrl.algos.reading import reads
from funrl.algos.reward_parts import PART_FIELDS, REWARD_PARTS, advantage_parts, loss_of_part
from funrl.mesh.collectives import gather_objects
from funrl.optim import global_dot, global_norm
from funrl.role_kinds import ROLES, SCORING_ROLES
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.sources.observing import GroupGradient, Observer
from funrl.trainer.steps.learn import MicroBatches, RoleUpdate, denominators
from funrl.trainer.steps.micro import plan_epoch, sizes_of, token_ranks
from funrl.trainer.steps.parts import Parts
from funrl.trainer.steps.roles import Role, sums_over_episodes
from funrl.trainer.steps.router_losses import RouterLosses
from funrl.trainer.steps.step import LossTotals, gradient
from funrl.trainer.steps.step_rows import Rows, UpdatePlan, moved, on_cpu, rows_of_agents, take

SHOWN_GROUPS = 5
METRIC = "reward_gradient"
REMAINDER = "rest"
ROUNDINGS = 64  # units of the last place of the whole, up to which a gradient has no direction


class Comparison(NamedTuple):
    """A gradient beside the whole.

    Attributes:
      norm: of the gradient.
      cosine: of the angle between the two; 0 where one of them is 0, or no more than a rounding of the whole.
      share: its component along the whole, over the norm of the whole; shares of all parts add up to 1.
    """

    norm: float
    cosine: float
    share: float


class Explainer(NamedTuple):
    """Gradients of reward functions and groups.

    Attributes:
      every: steps between two explanations.
      name, role: the policy, without losses of routers.
      parts: the same role with the loss of each reward function, by its name.
      weights: of the reward functions in the score; None: of tokens, as in `advantage_parts`.
      agents: whose rows the policy learns from; None: all.
      decode: token ids -> text.
      show: (step, the groups of the largest gradients) -> None.
      note: receives the cost of each explanation.
    """

    every: int
    name: str
    role: Role
    parts: Mapping[str, Role]
    weights: Sequence[float | None]
    agents: Sequence[int] | None
    decode: Callable[[list[int]], str]
    show: Callable[[int, Sequence[GroupGradient]], None]
    note: Callable[[str], None]

    def is_due(self, step: int) -> bool:
        """True if a step is explained."""
        return step % self.every == 0 and step >= self.role.first_step

    def with_parts(self, chain: Advantage, state: object, rows: Rows) -> Rows:
        """Add the part of each reward function in the advantages to scored rows, before the chain runs.

        Args:
          state: of the chain, before its run.
        """
        declared = rows.declaring(PART_FIELDS)
        if not self.weights:  # a teacher rewards tokens
            return declared
        parts_bTK = advantage_parts(chain, state, on_cpu(rows).batch, self.weights)
        return declared.with_fields(**{REWARD_PARTS: parts_bTK.to(rows.batch.tokens.device)})

    def explain(
        self, params: trees.Tree, rows: Rows, plan: UpdatePlan, frozen: Mapping[str, trees.Tree]
    ) -> dict[str, float]:
        """Metrics of the reward functions; the groups of the largest gradients are shown. Collective.

        Args:
          params: own weights of the policy, before the updates of the step.
          rows: with the parts of the reward functions.
          plan: of the step's updates.
          frozen: weights that do not learn.
        """
        start_s = time.perf_counter()
        rows = rows_of_agents(rows, self.agents)
        if not len(rows.owner):  # no update follows
            return {}
        numbers = np.arange(len(rows.owner))
        total = denominators({self.name: self.role}, rows, [numbers])[0][self.name]
        pass_ = _Pass(self.name, params, total, plan._replace(epochs=1, minibatches=1), frozen)
        whole = pass_.gradient(self.role, rows)
        rest = trees.clone(whole)
        metrics = dict[str, float]()
        for name, role in self.parts.items():
            part = pass_.gradient(role, rows)
            metrics |= _metrics(name, self._compare(part, whole))
            rest = trees.map(torch.sub, rest, part)
        metrics |= _metrics(REMAINDER, self._compare(rest, whole))
        groups = list(self._groups(pass_, whole, rows))
        groups.sort(key=lambda group: -group.norm)
        self.show(plan.step, groups[:SHOWN_GROUPS])
        passes = f"{1 + len(self.parts)} gradients of all rows, and one of each of {len(groups)} groups"
        self.note(f"step {plan.step}: rewards explained in {time.perf_counter() - start_s:.2g} s, {passes}")
        return metrics

    def _compare(self, part: trees.Tree, whole: trees.Tree) -> Comparison:
        mesh = self.role.placed.mesh
        dot = global_dot(part, whole, self.role.stored, mesh).item()
        norm = global_norm(part, self.role.stored, mesh).item()
        whole_norm = global_norm(whole, self.role.stored, mesh).item()
        rounding = ROUNDINGS * torch.finfo(trees.leaves(part)[0].dtype).eps * whole_norm
        cosine = dot / (norm * whole_norm or 1.0) if norm > rounding else 0.0
        return Comparison(norm, cosine, dot / (whole_norm**2 or 1.0))

    def _groups(self, pass_: _Pass, whole: trees.Tree, rows: Rows) -> Iterator[GroupGradient]:
        """Yield each group with its gradient and the text of its first row."""
        group_B = rows.batch.group.cpu().numpy()
        score_B = rows.batch.get("score")
        first_B = rows.batch.get("episode_first")  # its rows share a reward
        counted = np.ones(len(group_B), dtype=bool) if first_B is None else first_B.cpu().numpy()
        members = [np.flatnonzero(group_B == number) for number in np.unique(group_B)]
        texts = self._texts(rows, [own[0] for own in members])
        for own in members:
            comparison = self._compare(pass_.gradient(self.role, take(rows, own)), whole)
            rewards = [] if score_B is None else score_B.cpu().double().numpy()[own[counted[own]]].tolist()
            yield GroupGradient(*texts[int(own[0])], rewards, *comparison)

    def _texts(self, rows: Rows, numbers: Sequence[int]) -> dict[int, tuple[str, str]]:
        """Prompt and completion of some rows, by their numbers. Collective."""
        own: dict[int, tuple[str, str]] = {}
        for number in set(map(int, numbers)) & set(rows.own.tolist()):
            place = int(rows.local(np.array([number]))[0])
            tokens = rows.batch.tokens[place, : rows.lengths[number]].tolist()
            sampled = rows.batch.mask[place].nonzero().flatten().tolist()
            begin = sampled[0] if sampled else len(tokens)
            own[number] = self.decode(tokens[:begin]), self.decode(tokens[begin:])
        return {number: text for part in gather_objects(own, rows.mesh) for number, text in part.items()}


class _Pass(NamedTuple):
    """Arguments that all gradients of an explanation share, as of `gradient`."""

    name: str
    params: trees.Tree
    total: LossTotals
    plan: UpdatePlan
    frozen: Mapping[str, trees.Tree]

    def gradient(self, role: Role, rows: Rows) -> trees.Tree:
        """The gradient of a role's loss on some rows; they are moved to balance the ranks. Collective."""
        units = rows.units(sums_over_episodes([role.training_loss]))
        epoch = plan_epoch(rows.lengths, rows.mesh, self.plan, units=units)
        rows = moved(rows, epoch.to, rows.mesh)
        most = sizes_of(rows.lengths, self.plan.token_budget, token_ranks(rows.mesh), together=units.together)[1]
        update = RoleUpdate(
            "explanation", self.name, role, rows, part=epoch.parts[0], packing=epoch.packings[0], most_rows=most
        )
        return gradient(role, self.params, MicroBatches(update), self.total.denominators, self.frozen).tree


def explainer(job: Job, parts: Parts, observer: Observer) -> Explainer | None:
    """The explainer of a run; None: it explains nothing."""
    every = job.settings.outputs.explain_every
    if every is None or not isinstance(job, RLJob):
        return None
    role = parts.roles[job.main_role]._replace(router=RouterLosses(), watch_entropy=False)
    weights: list[float | None] = list(job.task.weights)
    names = job.reward_names if len(job.reward_names) == len(weights) else tuple(map(str, range(1, 1 + len(weights))))
    each = job.settings.rewards.process_reward in (None, "each") and "token_reward" in reads(job.algorithm).optional
    of_steps = {name for name in SCORING_ROLES if ROLES[name].reads == "steps"} if each else set[str]()
    weights = [None if name in of_steps else weight for name, weight in zip(names, weights, strict=True)]
    agents = parts.agents.get(job.main_role)
    return Explainer(
        every,
        name=job.main_role,
        role=role,
        parts={name: role._replace(loss=loss_of_part(role.training_loss, i)) for i, name in enumerate(names)},
        weights=weights,
        agents=None if agents is None else sorted(agents),
        decode=job.tokenizer.decode,
        show=observer.groups,
        note=observer.note,
    )


def _metrics(name: str, comparison: Comparison) -> dict[str, float]:
    return {f"{METRIC}/{name}/{key}": value for key, value in comparison._asdict().items()}


def without_parts(rows: Rows) -> Rows:
    """The rows without the parts of reward functions."""
    return rows.with_fields(**{REWARD_PARTS: None})
