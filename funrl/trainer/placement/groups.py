"""Trainer-side client of generator ranks that write groups of rows without a break.

The first rank keeps the state of admission: it learns which groups have ended and which weights all replicas hold, and
chooses the groups of a batch by their numbers. The others learn its choice through the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from funrl import trees
from funrl.asynchrony.admission import Admission, AdmissionRule
from funrl.data.order import places_in_order
from funrl.mesh.collectives import from_first_rank
from funrl.mesh.pools.channel import Pauses, ProgressLimit, limit_of, run_store, wait_for_keys
from funrl.mesh.pools.groups import GROUPS_KEY, WORK_KEY, GroupBoard, GroupPlan
from funrl.processes.heartbeat import beat, entered, left
from funrl.rewards.call import RewardError
from funrl.rollout.remote.engine import RemoteEngine
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.placement.generators import Generators, ServeUntil
from funrl.trainer.placement.group_prompts import ChosenPrompts, positions_left
from funrl.trainer.placement.joined_groups import age_metrics, in_place_of, joined_rows
from funrl.trainer.placement.messages import (
    BeginEvaluationRequest,
    EndEvaluationRequest,
    SendGroupsRequest,
    WrittenGroup,
)
from funrl.trainer.sources.curriculum import UNWEIGHTED
from funrl.trainer.sources.observing import SHOWN_PROMPTS, Show, ShownSample
from funrl.trainer.sources.source import DroppedPrompt, Generation, NextRows, RemoteRows, StepRows
from funrl.trainer.steps.step_rows import Rows


class BatchGroup(NamedTuple):
    """A group of a batch.

    Attributes:
      number: of it.
      group: what was delivered.
    """

    number: int
    group: WrittenGroup


def admission_rule(job: RLJob) -> AdmissionRule:
    """The rule by which groups of a run are begun and taken."""
    given = job.settings
    return AdmissionRule(given.run.batch_prompts, given.asynchrony.staleness, given.asynchrony.window).checked()


class GroupGenerators(Generators):
    """Trainer-side client of generator ranks that write groups ahead; a `RemoteGenerators`.

    Attributes:
      plan: of the groups; None: before the first step.
      replaces: whether other prompts take the places of prompts that the filter drops.
      weighed: whether weights choose the prompts of batches; see `choose`.
      chosen: the prompts of the next batches, if so. A resumed run needs them.
      late: whether these are asked for once models have scored the rows; otherwise replicas filter what they write.
      rewards_baselines: whether models reward greedy completions too, once these are on the trainer ranks.
      left: [n] positions of prompts that were passed over: others are trained on or dropped already. A resumed run
        needs them.
      overtaken_W: [W - 1] bool, which of the groups after the oldest one that was not taken were taken, at the end of
        a batch. A resumed run needs it.
    """

    def __init__(
        self,
        engine: RemoteEngine,
        show: Show,
        *,
        rule: AdmissionRule,
        generation: Generation,
        early: bool = False,
        serve_until: ServeUntil | None = None,
    ) -> None:
        """Name the ranks.

        Args:
          engine, show, early, serve_until: as of `Generators`.
          rule: of admission.
          generation: of the trainer ranks.
        """
        super().__init__(engine, show, early=early, staleness=rule.most_age, serve_until=serve_until)
        self.plan: GroupPlan | None = None
        self._schedule = generation.schedule
        rescored = generation.rewards.rescore is not None
        self.replaces = generation.selection.rounds > 1
        self.late = self.replaces and rescored
        self.refills = not self.late
        self._kept_groups: list[WrittenGroup] = []  # of the batch, by the filter
        self._lost: list[BatchGroup] = []  # groups of the batch that it has dropped, and nothing has replaced
        self.rewards_baselines = rescored and generation.greedy_baseline
        self._kept: tuple[int, ...] = ()  # groups whose greedy completions the replicas still have
        self.left = torch.zeros(0, dtype=torch.int64)
        self._consumed = 0  # prompts before the batch
        self.weighed = self._schedule.weighing is not UNWEIGHTED
        self.chosen = ChosenPrompts(torch.zeros(0, dtype=torch.int64))
        self._admission = Admission(rule)
        self._board = GroupBoard(self.generating.size(self.generating.row_axes))
        engine.held = self._board.holds
        self._batch = 0
        self.overtaken_W = torch.zeros(rule.window - 1, dtype=torch.bool)
        self._written: dict[int, WrittenGroup] = {}  # that were delivered and are not taken
        self._taken: list[BatchGroup] = []
        self._collections = 0
        self._waited_s = 0.0

    def choose(self, state: trees.Tree, step: int, steps: int) -> tuple[trees.Tree, dict[str, float]]:
        """Choose the prompts of batches up to S after that of a step, with what is known before it. Collective.

        Groups of the last of these batches may depend on all results of the steps before.

        Args:
          state: of the source.
          step: number of the step.
          steps: of the run.

        Returns: the state with what the weights remember, and metrics of the last choice.
        """
        if not self.weighed:
            return state, {}
        ahead = int(self._admission.rule.staleness)
        to_come = range(step, min(step + ahead, steps) + 1)
        self.chosen, memory, metrics = self.chosen.extended(self._schedule, state["curriculum"], to_come)
        return {**state, "curriculum": memory}, metrics

    def begin_step(self, step: int, position: int, steps: int) -> None:
        """Begin to take the batch of a step.

        Args:
          step: number of the step.
          position: of its first prompt in the order.
          steps: of the run.
        """
        self.step = step
        self._consumed = position
        self._taken, self._kept_groups, self._lost = [], [], []
        self._waited_s = 0.0
        plan = self.plan
        if plan is None:
            count = (steps - step + 1) * self._admission.rule.places
            overtaking = self.overtaking()
            again = tuple(n for n in range(-len(overtaking), max(overtaking, default=-1) + 1) if n not in overtaking)
            fresh = max(overtaking, default=-1) + 1
            plan = GroupPlan(position, count, step, fresh, again, tuple(self.left.tolist()))
            self._admission = self._admission._replace(
                fresh=fresh, oldest=-len(overtaking), overtaken=frozenset(overtaking), again=again
            )
        self._batch = step - plan.step
        if self.mesh.rank == 0:
            self._board.give_prompts(self._batch, self.chosen.positions.view(-1, self._admission.rule.places).tolist())
            if self.plan is None:
                self._board.open(plan)
            self._board.train(self._batch, self.engine.version or 0)
        self.plan = plan

    def saved(self, state: trees.Tree) -> trees.Tree:
        """The state with groups that have overtaken others and prompts that were passed over; see `Generators`."""
        further = {"overtaken": self.overtaken_W} if len(self.overtaken_W) else {}
        further |= {"chosen": self.chosen._asdict()} if self.weighed else {}
        return {**state, **further, "left": self.left} if self.replaces else {**state, **further}

    def restored(self, state: trees.Tree) -> trees.Tree:
        """The state without them; see `Generators`."""
        if "overtaken" in state:
            self.overtaken_W = state["overtaken"].cpu()
        if "left" in state:
            self.left = state["left"].cpu()
        if "chosen" in state:
            self.chosen = ChosenPrompts(state["chosen"]["positions"].cpu(), state["chosen"]["end"])
        return {name: value for name, value in state.items() if name not in ("overtaken", "left", "chosen")}

    def overtaking(self) -> list[int]:
        """Groups that were taken before their batch or an earlier one began, as numbers counted from it."""
        oldest = -int(self.overtaken_W.sum())
        return [oldest + 1 + place for place in torch.nonzero(self.overtaken_W).flatten().tolist()]

    def take_step(self, next_rows: NextRows, state: trees.Tree, step: int, steps: int) -> StepRows:
        """Rows of a step, with metrics of its groups; see `Generators`. Collective."""
        state, chosen = self.choose(self.restored(state), step, steps)
        self.begin_step(step, state["prompts_consumed"], steps)
        rows, state, metrics = next_rows(state, step)
        return rows, self.saved(state), chosen | metrics | self.metrics()

    def write(self, places: np.ndarray, sampling: Sampling, seed: int) -> RemoteRows:
        """Rows of the groups of the next batch, once these have ended; see `RemoteGenerators`. Collective.

        Where `late`, the first call of a step is for its groups, and each later one for the groups that have replaced
        dropped ones.

        Raises:
          RewardError: as `rollout` raises it.
        """
        begin = time.perf_counter()
        self._taken = self._collected(self._lost[: len(places)])
        self._lost = self._lost[len(places) :]
        self._waited_s += time.perf_counter() - begin
        for _, group in self._taken:
            for note in group.notes:
                self.show.note(note)
        for _, group in self._taken:
            if group.problem is not None:
                raise RewardError(group.problem)
        assert len(self._taken) == len(places)
        self.chosen = self.chosen._replace(positions=self.chosen.positions[len(places) :])
        prompts, _, seed, _ = self._schedule
        positions = [group.prompt.position for _, group in self._taken if group.prompt is not None]
        if self.replaces:
            used = [*positions, *(prompt.position for prompt in self.dropped())]
            self.left = torch.tensor(positions_left(self.left.tolist(), self._consumed, used), dtype=torch.int64)
            self._consumed += len(used)
        written = [(number, group.generator, group.written, 0) for number, group in self._taken]
        done, rows = joined_rows(written, self.generating, self.mesh.device, samples=sampling.samples)
        places = np.concatenate([places_in_order(prompts, 1, seed, position) for position in positions])
        return RemoteRows(places, done, self.moved_early(rows, len(places)) if self.early else rows)

    def baseline_rows(self, groups: np.ndarray, places: np.ndarray, sampling: Sampling) -> Rows:
        """Rows of the greedy completions or episodes of some groups of the batch; see `RemoteGenerators`."""
        del places
        written = []
        for number, group in (self._taken[place] for place in groups.tolist()):
            written.append((number, group.generator, group.baseline, len(group.rows.owner)))
        rows = joined_rows(written, self.generating, self.mesh.device, samples=sampling.samples)[1]
        return self.moved_early(rows, len(groups)) if self.rewards_baselines else rows

    def dropped(self) -> list[DroppedPrompt]:
        """Prompts that replicas have replaced for the batch; see `RemoteGenerators`."""
        return [] if self.late else [prompt for _, group in self._taken for prompt in group.dropped]

    def keep(self, prompts: np.ndarray) -> None:
        """Note which of the newest groups the filter keeps; see `RemoteGenerators`."""
        kept = set(prompts.tolist())
        self._kept_groups += [group for place, (_, group) in enumerate(self._taken) if place in kept]
        self._lost += [taken for place, taken in enumerate(self._taken) if place not in kept]

    def batch_groups(self) -> list[WrittenGroup]:
        """The groups of the newest batch in its order; with `late` the ones that the filter dropped are last."""
        if not self.late:
            return [group for _, group in self._taken]
        return [*self._kept_groups, *(group for _, group in self._lost)]

    def samples(self) -> dict[int, ShownSample]:
        """The first samples of the batch, if its groups have some; see `RemoteGenerators`."""
        shown = [(place, sample) for place, (_, group) in enumerate(self._taken) for sample in group.shown]
        return dict(shown[:SHOWN_PROMPTS])

    def evaluate(self, step: int, show: Show) -> dict[str, float]:
        """Evaluate on the replicas beside their groups; see `RemoteGenerators`."""
        return self.begin_evaluation(step)()

    def begin_evaluation(self, step: int) -> Callable[[], dict[str, float]]:
        """Have replicas evaluate the newest weights beside their groups; see `Source`. Collective."""
        self.requests.forget(self.requests.post(BeginEvaluationRequest(step, self.engine.version or 0)))
        return lambda: self._evaluated(EndEvaluationRequest(), step, self.show)

    def log(self) -> list[tuple[object, ...]] | None:
        """The groups of the newest batch, as a log has them: fields of `LoggedGroup`; None: they cannot be repeated."""
        if self.plan is None:
            return None
        return [
            (*group.prompt, group.generator, group.switches, sorted(group.tokens.items()), group.dropped)
            for group in self.batch_groups()
            if group.prompt is not None
        ]

    def episode_groups(self) -> tuple[int, ...]:
        """Groups of the newest batch; see `Generators`."""
        return tuple(number for number, _ in self._taken)

    def metrics(self) -> dict[str, float]:
        """Metrics of the newest batch and of the weights that were sent before it."""
        sender = self.engine.sender
        sent = {} if sender is None or not sender.sent_s else {"sync/hidden_share": sender.hidden_share}
        groups = self.batch_groups()
        waited = sum(group.waited_s for group in groups) / self._board.replicas
        waits = {"wait/trainer_s": self._waited_s, "wait/generator_s": waited}
        return waits | age_metrics([group.tokens for group in groups], self.engine.version or 0) | sent

    def close(self) -> None:
        """Wait for the last transfer of weights."""
        if self.engine.sender is not None:
            self.engine.sender.wait()

    def send_request(self, rows: Rows, origins: np.ndarray, to: np.ndarray) -> SendGroupsRequest:
        """The request that lets the generator ranks hand rows over, and let go of the batch's groups."""
        ended = self.episode_groups()
        if self.rewards_baselines and self._kept != ended:  # their greedy completions follow
            self._kept, ended = ended, self._kept
        else:
            self._kept = ()
        return SendGroupsRequest(origins, rows.owner, rows.lengths, to, ended)

    def _collected(self, lost: Sequence[BatchGroup]) -> list[BatchGroup]:
        """Groups that have ended: replacements of some groups, or else the groups of the next batch, by number.

        Collective.
        """
        name = f"the generators' groups of step {self.step}"
        ready = f"{GROUPS_KEY}/ready"
        key = f"{ready}/{self._collections}"
        entered(name)
        taken = overtaken_W = None
        if self.mesh.rank == 0:
            taken = self._awaited(dict(lost), name)
            oldest = self._admission.oldest
            window = range(oldest + 1, oldest + len(self.overtaken_W) + 1)
            overtaken_W = torch.tensor([number in self._admission.overtaken for number in window], dtype=torch.bool)
            run_store().set(key, "1")
            run_store().delete_key(f"{ready}/{self._collections - 2}")
        else:
            wait_for_keys([key], self.mesh.world, name, limit_of(self.mesh))
        self._collections += 1
        taken, self.overtaken_W = from_first_rank((taken, overtaken_W), self.mesh)
        left()
        return taken

    def _awaited(self, lost: Mapping[int, WrittenGroup], waits_for: str) -> list[BatchGroup]:
        """Wait on the first rank for the groups of the batch by number, or for those of other prompts in some places.

        Args:
          lost: groups whose places other prompts take. These places have left the state of admission: a group that
            begins in one of them now is within its bound.
          waits_for: name of the groups.
        """
        pauses = Pauses(1)
        limit = ProgressLimit(limit_of(self.mesh), waits_for, WORK_KEY)
        batch = self._admission.batch
        taken: list[int] = []
        for number in lost:
            self._board.ask_again(number)
        while True:
            if self._read_finished(lost):
                pauses = Pauses(1)
            if problems := [BatchGroup(*item) for item in self._written.items() if item[1].problem is not None]:
                return problems[:1]
            if lost and lost.keys() <= self._written.keys():
                return [BatchGroup(number, in_place_of(lost[number], self._written.pop(number))) for number in lost]
            while not lost and self._admission.batch == batch and (places := self._admission.consumable()):
                _, self._admission = self._admission.consume(places)
                taken += places
            if self._admission.batch > batch:
                return [BatchGroup(number, self._written.pop(number)) for number in sorted(taken)]
            pauses.sleep()
            limit.check()

    def _read_finished(self, lost: Collection[int]) -> bool:
        """Collect groups that were delivered since the last call; returns whether there was one.

        Args:
          lost: places that have left the state of admission.
        """
        count = len(self._written)
        while (number := self._board.next_finished()) is not None:
            self._written[number] = self._board.collect(number)
            beat()
            if number not in lost:
                self._admit()  # it may have begun since the last one
                # A place keeps the version of its first prompt: replacements began later, within the bound.
                self._admission = self._admission.finish([number])
        return len(self._written) > count

    def _admit(self) -> None:
        """Follow the rule by which replicas begin groups."""
        batch = self._board.batch_of_weights(self.engine.version or 0)
        held = self._admission.version
        if self.plan is not None and batch is not None and (held is None or batch > held):
            self._admission = self._admission.version_held(batch)
            _, self._admission = self._admission.submit(self.plan.count)
