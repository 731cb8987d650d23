"""Trainer-side client of generator ranks that write groups of rows without a break.

The first rank keeps the ledger of the run: it learns from what replicas deliver which groups have begun and ended, and
takes the groups of a batch. The others learn its choice through the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from funrl import trees
from funrl.mesh.collectives import from_first_rank
from funrl.mesh.pools.channel import Pauses, ProgressLimit, limit_of, run_store, wait_for_keys
from funrl.processes.heartbeat import beat, entered, left
from funrl.rewards.call import RewardError
from funrl.rollout.group_board import GROUPS_KEY, WORK_KEY, GroupBoard
from funrl.rollout.ledger import Ledger, LedgerRule
from funrl.rollout.remote.engine import RemoteEngine
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.placement.generators import Generators, ServeUntil
from funrl.trainer.placement.group_prompts import ChosenPrompts
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


def ledger_rule(job: RLJob, generation: Generation) -> LedgerRule:
    """The rule by which groups of a run are begun, refilled and taken; `generation` is of the trainer ranks."""
    given = job.settings
    rule = LedgerRule(given.run.batch_prompts, given.asynchrony.staleness, given.asynchrony.window)
    prompts = generation.selection.rounds
    return rule._replace(prompts=prompts, scores=prompts > 1 and generation.rewards.rescore is not None).checked()


class GroupGenerators(Generators):
    """Trainer-side client of generator ranks that write groups ahead; a `RemoteGenerators`.

    Attributes:
      ledger: of the run; None: before the first step, and on ranks other than the first.
      weighed: whether weights choose the prompts of batches; see `choose`.
      chosen: the prompts of the next batches, if so. A resumed run needs them.
      rewards_baselines: whether models reward greedy completions too, once these are on the trainer ranks.
      places: the ledger as the checkpoint has it. "overtaken" [W - 1] bool: which of the places after the oldest one
        that is not taken are taken. "left" [n]: positions of prompts that were passed over.
    """

    def __init__(
        self,
        engine: RemoteEngine,
        show: Show,
        *,
        rule: LedgerRule,
        generation: Generation,
        early: bool = False,
        serve_until: ServeUntil | None = None,
    ) -> None:
        """Name the ranks.

        Args:
          engine, show, early, serve_until: as of `Generators`.
          rule: of the ledger.
          generation: of the trainer ranks.
        """
        super().__init__(engine, show, early=early, staleness=rule.most_age, serve_until=serve_until)
        self._schedule = generation.schedule
        self._rule = rule
        self.refills = not rule.scores
        self.ledger: Ledger | None = None
        self.places = {"overtaken": torch.zeros(rule.window - 1, dtype=torch.bool), "left": torch.zeros(0).long()}
        self._groups: dict[int, WrittenGroup] = {}  # of the batch, in the order of their rows
        self._newest: tuple[int, ...] = ()  # those that came last
        self._lost: list[int] = []  # those that the filter has dropped, and nothing has replaced
        self.rewards_baselines = generation.rewards.rescore is not None and generation.greedy_baseline
        self._kept: tuple[int, ...] = ()  # groups whose greedy completions the replicas still have
        self.weighed = self._schedule.weighing is not UNWEIGHTED
        self.chosen = ChosenPrompts(torch.zeros(0, dtype=torch.int64))
        self._board = GroupBoard(self.generating.size(self.generating.row_axes))
        engine.held = self._board.holds
        self._written: dict[int, WrittenGroup] = {}  # delivered, and not in the batch
        self._counts: dict[str, float] = {}  # metrics of places in the newest step
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
        ahead = int(self._rule.staleness)
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
        self._groups, self._newest, self._lost = {}, (), []
        self._waited_s = 0.0
        if self.mesh.rank != 0:
            return
        places = self._rule.places
        self._board.give_prompts(step - 1, self.chosen.positions.view(-1, places).tolist())
        if self.ledger is None:
            overtaken = self.places["overtaken"].tolist()
            self.ledger = Ledger.restored(self._rule, steps * places, version=step - 1, overtaken=overtaken)
            self.ledger.prompts = position
            self.ledger.passed = self.places["left"].tolist()
            self._board.open(self.ledger)
        self._board.train(step - 1, self.engine.version or 0)

    def end_step(self) -> None:
        """Take the batch of a step, on which the filter has decided. Collective."""
        if self.ledger is not None:
            if self._rule.scores:
                self.ledger.score(self._lost)
            if self.ledger.take() is None:
                raise RuntimeError(f"the batch of step {self.step} is not whole: places {sorted(self.ledger.batch)}")
            overtaken = torch.tensor(self.ledger.taken_in_window, dtype=torch.bool)
            self.places = {"overtaken": overtaken, "left": torch.tensor(self.ledger.passed, dtype=torch.int64)}
            self._counts = {f"places/{name}": self.ledger.counts[name] for name in ("begun", "refilled", "taken")}
            self._counts["places/ahead"] = len(self.ledger.written)
            self.ledger.counts.clear()
        self.places, self._counts = from_first_rank((self.places, self._counts), self.mesh)

    def saved(self, state: trees.Tree) -> trees.Tree:
        """The state with the ledger and prompts that weights have chosen; see `Generators`."""
        further: dict[str, trees.Tree] = {"chosen": self.chosen._asdict()} if self.weighed else {}
        if self._rule.window > 1:
            further["overtaken"] = self.places["overtaken"]
        if self._rule.prompts > 1:
            further["left"] = self.places["left"]
        return {**state, **further}

    def restored(self, state: trees.Tree) -> trees.Tree:
        """The state without them; see `Generators`."""
        self.places |= {name: state[name].cpu() for name in self.places if name in state}
        if "chosen" in state:
            self.chosen = ChosenPrompts(state["chosen"]["positions"].cpu(), state["chosen"]["end"])
        return {name: value for name, value in state.items() if name not in (*self.places, "chosen")}

    def take_step(self, next_rows: NextRows, state: trees.Tree, step: int, steps: int) -> StepRows:
        """Rows of a step, with metrics of its groups; see `Generators`. Collective."""
        state, chosen = self.choose(self.restored(state), step, steps)
        self.begin_step(step, state["prompts_consumed"], steps)
        rows, state, metrics = next_rows(state, step)
        self.end_step()
        return rows, self.saved(state), chosen | metrics | self.metrics()

    def write(self, places: np.ndarray, sampling: Sampling, seed: int) -> RemoteRows:
        """Rows of the groups of the next batch, once these have ended; see `RemoteGenerators`. Collective.

        Where models score rows, later calls of a step are for the groups that have replaced dropped ones.

        Raises:
          RewardError: as `rollout` raises it.
        """
        begin = time.perf_counter()
        lost, self._lost = self._lost[: len(places)], self._lost[len(places) :]
        groups = self._collected(lost)
        self._waited_s += time.perf_counter() - begin
        for group in groups.values():
            for note in group.notes:
                self.show.note(note)
        for group in groups.values():
            if group.problem is not None:
                raise RewardError(group.problem)
        assert len(groups) == len(places)
        self._newest = tuple(groups)
        self._groups = {number: group for number, group in self._groups.items() if number not in groups} | groups
        self.chosen = self.chosen._replace(positions=self.chosen.positions[len(places) :])
        positions = [group.prompt.position for group in groups.values() if group.prompt is not None]
        if self.ledger is not None and self._rule.prompts > 1:
            self.ledger.use_prompts([*positions, *(prompt.position for prompt in self.dropped())])
        written = [(number, group.generator, group.written, 0) for number, group in groups.items()]
        done, rows = joined_rows(written, self.generating, self.mesh.device, samples=sampling.samples)
        places = self._schedule.numbers_at(np.array(positions))
        return RemoteRows(places, done, self.moved_early(rows, len(places)) if self.early else rows)

    def baseline_rows(self, groups: np.ndarray, places: np.ndarray, sampling: Sampling) -> Rows:
        """Rows of the greedy completions or episodes of some groups of the batch; see `RemoteGenerators`."""
        del places
        written = []
        for number in (self._newest[place] for place in groups.tolist()):
            group = self._groups[number]
            written.append((number, group.generator, group.baseline, len(group.rows.owner)))
        rows = joined_rows(written, self.generating, self.mesh.device, samples=sampling.samples)[1]
        return self.moved_early(rows, len(groups)) if self.rewards_baselines else rows

    def dropped(self) -> list[DroppedPrompt]:
        """Prompts that replicas have replaced for the batch; see `RemoteGenerators`."""
        return [] if self._rule.scores else [prompt for group in self._groups.values() for prompt in group.dropped]

    def keep(self, prompts: np.ndarray) -> None:
        """Note which of the newest groups the filter keeps; see `RemoteGenerators`."""
        kept = [self._newest[place] for place in prompts.tolist()]
        self._lost += [number for number in self._newest if number not in kept]
        if self._rule.scores and self.ledger is not None:
            self.ledger.score(kept)

    def batch_groups(self) -> list[WrittenGroup]:
        """The groups of the newest batch in its order; what the trainer ranks drop is last."""
        lost = self._lost if self._rule.scores else []
        return [self._groups[number] for number in sorted(self._groups, key=lost.__contains__)]

    def samples(self) -> dict[int, ShownSample]:
        """The first samples of the batch, if its groups have some; see `RemoteGenerators`."""
        shown = [(place, x) for place, number in enumerate(self._newest) for x in self._groups[number].shown]
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
        if not self._groups:
            return None
        return [
            (*group.prompt, group.generator, group.switches, sorted(group.tokens.items()), group.dropped)
            for group in self.batch_groups()
            if group.prompt is not None
        ]

    def episode_groups(self) -> tuple[int, ...]:
        """Groups of the newest batch; see `Generators`."""
        return self._newest

    def metrics(self) -> dict[str, float]:
        """Metrics of the newest batch and of the weights that were sent before it."""
        sender = self.engine.sender
        sent = {} if sender is None or not sender.sent_s else {"sync/hidden_share": sender.hidden_share}
        groups = self.batch_groups()
        waited = sum(group.waited_s for group in groups) / self._board.replicas
        waits = {"wait/trainer_s": self._waited_s, "wait/generator_s": waited}
        return self._counts | waits | age_metrics([group.tokens for group in groups], self.engine.version or 0) | sent

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

    def _collected(self, lost: Sequence[int]) -> dict[int, WrittenGroup]:
        """Groups that have ended: replacements of some groups, or else the groups of the next batch, by number.

        Collective.
        """
        name = f"the generators' groups of step {self.step}"
        ready = f"{GROUPS_KEY}/ready"
        key = f"{ready}/{self._collections}"
        entered(name)
        groups = None
        if self.ledger is not None:
            groups = self._awaited(self.ledger, lost, name)
            run_store().set(key, "1")
            run_store().delete_key(f"{ready}/{self._collections - 2}")
        else:
            wait_for_keys([key], self.mesh.world, name, limit_of(self.mesh))
        self._collections += 1
        groups = from_first_rank(groups, self.mesh)
        left()
        return groups

    def _awaited(self, ledger: Ledger, lost: Sequence[int], waits_for: str) -> dict[int, WrittenGroup]:
        """Wait on the first rank for the groups of the batch by number, or for those of other prompts in some places.

        Args:
          ledger: of the run.
          lost: groups whose places other prompts refill.
          waits_for: name of the groups.
        """
        pauses = Pauses(1)
        limit = ProgressLimit(limit_of(self.mesh), waits_for, WORK_KEY)
        for number in ledger.refill(lost) if lost else ():
            self._board.ask_again(number)
        while True:
            if self._read_finished(ledger):
                pauses = Pauses(1)
            if problems := [item for item in self._written.items() if item[1].problem is not None]:
                return dict(problems[:1])
            ledger.fill_batch()
            numbers = lost or (sorted(ledger.batch) if len(ledger.batch) == self._rule.places else ())
            if numbers and self._written.keys() >= set(numbers):
                groups = {number: self._written.pop(number) for number in numbers}
                return {n: in_place_of(self._groups[n], group) if lost else group for n, group in groups.items()}
            pauses.sleep()
            limit.check()

    def _read_finished(self, ledger: Ledger) -> bool:
        """Collect groups that were delivered since the last call; returns whether there was one."""
        count = len(self._written)
        while (number := self._board.next_finished()) is not None:
            self._written[number] = group = self._board.collect(number)
            beat()
            for _ in group.dropped:
                write_place(ledger, number, group)
                ledger.refill([number])
            write_place(ledger, number, group)
        return len(self._written) > count


def write_place(ledger: Ledger, number: int, group: WrittenGroup) -> None:
    """Note that a replica, which reports no begin of its own, has written a group."""
    attempt = ledger.begin(group.generator, [number], group.version)[number]
    ledger.deliver(group.generator, number, attempt)
