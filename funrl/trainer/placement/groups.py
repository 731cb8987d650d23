"""The source of trainer ranks whose rows generator ranks write, and their client of these ranks.

It is `prompt_source` with another writer: order, seeds, filter and curriculum are its own, so that without staleness a
run whose ranks do both has the same rows. A row's tokens move once, when the batch is complete, from the rank that
wrote it to the rank that trains it; before that trainer ranks know only the row table.

The first rank keeps the ledger of the run: when a step begins it asks for the groups of all places that may begin, and
takes the groups of a batch. The others learn its choice from it. Without staleness these are the groups of the step;
else they are of later batches too.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.algos.reading import reads
from funrl.batch import as_dict, declare, schema_of
from funrl.data.order import take_next
from funrl.fields import FIELDS
from funrl.kinds import Value
from funrl.mesh.collectives import from_first_rank
from funrl.mesh.mesh import Mesh
from funrl.mesh.pools.channel import PROGRESS_S, MethodCall, ProgressLimit, wait_until
from funrl.mesh.pools.handover import Handover, receive_rows
from funrl.mesh.pools.transfer import TransferGroup, WeightSender
from funrl.processes.heartbeat import beat, beside_the_program, entered, left
from funrl.rewards.call import RewardError
from funrl.rollout.ledger import Ledger, LedgerRule
from funrl.rollout.remote.engine import RemoteEngine
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.jobs.demonstrations import learns_from_demonstrations
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.jobs.row_source import remarked_generation
from funrl.trainer.placement.board import AGAIN, ANY_REPLICA, HELDOUT, WORK_KEY, GroupBoard
from funrl.trainer.placement.messages import (
    ORIGIN,
    GroupPrompt,
    GroupWork,
    JoinedRows,
    WrittenGroup,
    age_metrics,
    baseline_of,
    group_of,
    in_place_of,
    join_written,
    joined_rollout,
    joined_rows,
    own_fields,
    plain_group,
    prompts_at,
    without_rows,
)
from funrl.trainer.settings.scorers import scorers_of
from funrl.trainer.sources.curriculum import UNWEIGHTED, PromptSchedule, as_chosen
from funrl.trainer.sources.heldout import HeldoutSamples, for_heldout, heldout_metrics
from funrl.trainer.sources.observing import SHOWN_PROMPTS, Show, ShownSample, with_scores
from funrl.trainer.sources.pair_rows import SAMPLED_PAIRS, pair_source
from funrl.trainer.sources.prompts import BASELINE_SEED, prompt_source
from funrl.trainer.sources.source import Generation, NextRows, SampledPrompts, Source, StepLog, StepRows
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.parts import GeneratingParts, Parts
from funrl.trainer.steps.step_rows import Rows, moved, rows_of, with_stale

REFILL_S = 0.02  # between two looks for groups that the filter drops, while the trainer does something else
GENERATORS = 0  # owner of all places in the ledger: a generator rank that is lost ends the run


def ledger_rule(job: RLJob, generation: Generation) -> LedgerRule:
    """The rule by which groups of a run are begun, refilled and taken."""
    given = job.settings
    rule = LedgerRule(given.run.batch_prompts, given.asynchrony.staleness, given.asynchrony.window)
    prompts = generation.selection.rounds
    return rule._replace(prompts=prompts, scores=prompts > 1 and bool(scorers_of(given))).checked()


class ChosenPrompts(NamedTuple):
    """Prompts of batches that weights have chosen ahead of their training.

    Attributes:
      positions: [n P] in the order of prompts, of the next batch and of those after it.
      end: position after the last one.
    """

    positions: Tensor
    end: int = 0

    def extended(
        self, schedule: PromptSchedule, memory: trees.Tree, steps: Sequence[int]
    ) -> tuple[ChosenPrompts, trees.Tree, dict[str, float]]:
        """The prompts with those of further batches, the memory of the weights, and metrics of the last batch.

        Args:
          schedule: of the prompts, with their weights.
          memory: of the weights.
          steps: that are chosen, from the next one on; those of `positions` are left out.
        """
        prompts, places, seed, weighing = schedule
        positions, end = self
        metrics: dict[str, float] = {}
        for step in steps[len(positions) // places :]:
            weights, memory, metrics = weighing.weights(memory, step)
            taken = take_next(prompts, places, seed, position=end, weights=weights)
            metrics["curriculum/passed_over"] = taken.end - end - places
            positions = torch.cat([positions, torch.from_numpy(taken.positions)])
            end = taken.end
        return ChosenPrompts(positions, end), memory, metrics


def collect_groups(groups: Mapping[int, WrittenGroup]) -> tuple[JoinedRows | None, Any]:
    """Rows of the samples of groups, and of their baselines; None: they have none.

    Args:
      groups: by number; or one that ends the run.
    """
    samples = [(n, group.generator, group.written) for n, group in groups.items() if group.written]
    baselines = [(baseline_of(n), group.generator, group.baseline) for n, group in groups.items() if group.baseline]
    return join_written(samples) if samples else None, join_written(baselines) if baselines else None


class GroupGenerators:
    """Trainer-side client of generator ranks that write groups; a `RemoteGenerators`.

    Attributes:
      early: whether rows come as soon as they are written, and not when the batch is complete.
      refills: whether prompts that the filter drops are replaced at once; else the trainer ranks do it in rounds.
      step: that the next rows are for.
      changed: lock of the ledger and of the groups, which a thread may change beside the program.
      ledger: of the run; None: before the first step, and on ranks other than the first.
      weighed: whether weights choose the prompts of batches ahead; see `choose`.
      chosen: the prompts of the next batches, if so. A resumed run needs them.
      places: the ledger as the checkpoint has it. "overtaken" [W - 1] bool: which of the places after the oldest one
        that is not taken are taken. "left" [n]: positions of prompts that were passed over.
    """

    def __init__(self, job: RLJob, engine: RemoteEngine, generation: Generation, show: Show) -> None:
        """Name the ranks.

        Args:
          job: of the run.
          engine: of these ranks.
          generation: of the trainer ranks.
          show: receives remarks.
        """
        self.engine = engine
        self.requests = engine.requests
        self.requests.note = show.note
        self.mesh = engine.requests.mesh
        self.generating = engine.weights.mesh
        self.show = show
        self.step = 0
        self._generation = generation
        self._rule = rule = ledger_rule(job, generation)
        self.ahead = rule.staleness > 0
        self.refills = not rule.rounds
        self.ledger: Ledger | None = None
        self.places = {"overtaken": torch.zeros(rule.window - 1, dtype=torch.bool), "left": torch.zeros(0).long()}
        self._groups: dict[int, WrittenGroup] = {}  # of the batch, in the order of their rows
        self._newest: tuple[int, ...] = ()  # those that came last
        self._baselines: JoinedRows | None = None  # of these
        self._lost: list[int] = []  # those that the filter has dropped, and nothing has replaced
        self._rounds: list[tuple[Sequence[int], int]] = []  # of the step, as `write_logged` takes them
        self._released: list[int] = []  # groups whose rows nobody asks for any more
        self._unlogged: list[int] = []  # and those whose episodes nobody does
        self._asked = 0  # groups of all steps
        self._numbers: dict[int, int] = {}  # of the newest group of each place that is not taken
        self._left: list[int] = []  # positions of prompts that a run which has ended passed over
        self._first = 0  # position of the prompt of place 0, where each place has the next one
        self._rescore = generation.rewards.rescore
        self.early = self._rescore is not None or needs_tokens(job, generation)
        self.weighed = self.ahead and self._generation.schedule.weighing is not UNWEIGHTED
        self.chosen = ChosenPrompts(torch.zeros(0, dtype=torch.int64))
        self._board = GroupBoard(self.generating.size(self.generating.row_axes))
        self._fixed = generation.engine.queue == "fixed" and not self.ahead
        if self.ahead:
            engine.held = self._board.holds
        self.changed = threading.Condition()
        self._closed = threading.Event()
        self._fault: BaseException | None = None  # of the thread
        self._replaced: dict[int, WrittenGroup] = {}  # by place, which other prompts refill
        self._positions = 0  # of prompts that are taken
        self._written: dict[int, WrittenGroup] = {}  # delivered, and not in the batch
        self._failed: WrittenGroup | None = None  # the first that ends the run
        self._counts: dict[str, float] = {}  # metrics of places in the newest step
        self._waited_s = 0.0
        self._alone = Mesh(device=self.mesh.device, timeout=self.mesh.timeout)

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
        ahead = -(-self._rule.ahead // self._rule.places)
        to_come = range(step, min(step + ahead, steps) + 1)
        self.chosen, memory, metrics = self.chosen.extended(self._generation.schedule, state["curriculum"], to_come)
        return {**state, "curriculum": memory}, metrics

    def begin_step(self, step: int, position: int, steps: int) -> None:
        """Begin to take the batch of a step.

        Args:
          step: number of the step.
          position: of its first prompt in the order.
          steps: of the run.
        """
        self.step = step
        self._unlogged += [number for numbers, _ in self._rounds for number in numbers]
        self._groups, self._newest, self._lost = {}, (), []
        self._rounds = []
        self._waited_s = 0.0
        if self.mesh.rank != 0:
            return
        with self.changed:
            ledger = self.ledger = self.ledger or self._restored_ledger(step, position, steps)
            if self.ahead:
                self._ask_places(ledger)

    def _restored_ledger(self, step: int, position: int, steps: int) -> Ledger:
        """The ledger before the first step of a run or of a resumed one. Args: as of `begin_step`."""
        places = self._rule.places
        overtaken = self.places["overtaken"].tolist()
        ledger = Ledger.restored(self._rule, steps * places, version=step - 1, overtaken=overtaken)
        ledger.prompts = position
        ledger.passed = self.places["left"].tolist()
        self._left = list(ledger.passed)
        self._positions = position + len(self._left)
        self._first = position - (step - 1) * places
        return ledger

    def end_step(self) -> None:
        """Take the batch of a step, on which the filter has decided. Collective."""
        self._released += [baseline_of(number) for numbers, _ in self._rounds for number in numbers]
        if self.ledger is not None:
            with self.changed:
                self._take_batch(self.ledger)
        self.places, self._counts = from_first_rank((self.places, self._counts), self.mesh)

    def _take_batch(self, ledger: Ledger) -> None:
        """Take the batch of the step, and read what has happened to places."""
        if self._rule.scores:
            ledger.score(self._places_of(self._lost))
        taken = ledger.take()
        if taken is None:
            raise RuntimeError(f"the batch of step {self.step} is not whole: places {sorted(ledger.batch)}")
        for place in taken:
            del self._numbers[place]
        overtaken = torch.tensor(ledger.taken_in_window, dtype=torch.bool)
        self.places = {"overtaken": overtaken, "left": torch.tensor(ledger.passed, dtype=torch.int64)}
        self._counts = {f"places/{name}": ledger.counts[name] for name in ("begun", "lost", "refilled", "taken")}
        self._counts["places/ahead"] = len(ledger.written)
        ledger.counts.clear()

    def saved(self, state: trees.Tree) -> trees.Tree:
        """The source's state with what a resumed run needs to know of the groups: places, and prompts chosen ahead."""
        further: dict[str, trees.Tree] = {"chosen": self.chosen._asdict()} if self.weighed else {}
        if self._rule.window > 1:
            further["overtaken"] = self.places["overtaken"]
        if self._rule.prompts > 1 and self.ahead:
            further["left"] = self.places["left"]
        return {**state, **further}

    def restored(self, state: trees.Tree) -> trees.Tree:
        """The state without them. A run without staleness takes the prompts from `prompts_consumed` on."""
        if self.ahead:
            self.places |= {name: state[name].cpu() for name in self.places if name in state}
        if self.weighed and "chosen" in state:
            self.chosen = ChosenPrompts(state["chosen"]["positions"].cpu(), state["chosen"]["end"])
        return {name: value for name, value in state.items() if name not in (*self.places, "chosen")}

    def take_step(self, next_rows: NextRows, state: trees.Tree, step: int, steps: int) -> StepRows:
        """Rows of a step, with metrics of its groups. Collective.

        Args:
          next_rows: of a source that has this client.
          state: of the source.
          step: number of the step.
          steps: of the run.
        """
        state, chosen = self.choose(self.restored(state), step, steps)
        self.begin_step(step, state["prompts_consumed"], steps)
        rows, state, metrics = next_rows(state, step)
        self.end_step()
        return rows, self.saved(state), chosen | metrics | self.metrics()

    def write(self, places: np.ndarray, sampling: Sampling, seed: int) -> SampledPrompts:
        """Rows of as many groups of the batch, once these have ended; see `RemoteGenerators`. Collective.

        Unless `early`, they are on the ranks that wrote them. In rounds later calls of a step are for the groups that
        replace dropped ones.

        Raises:
          RewardError: as `rollout` raises it.
        """
        lost, self._lost = self._lost[: len(places)], self._lost[len(places) :]
        prompts = [GroupPrompt(index, seed, number) for number, index in enumerate(places.tolist())]
        groups, samples, self._baselines = self._collected(self._ask_for_batch(lost, [] if self.ahead else prompts))
        assert len(groups) == len(places)
        self._newest = tuple(groups)
        self._rounds.append((self._newest, sampling.samples))
        self._released += self._newest
        if self.ahead:
            replaced = {self._groups[number].work.place: self._groups.pop(number) for number in lost}
            groups = {n: in_place_of(replaced.get(group.work.place), group) for n, group in groups.items()}
        self._groups |= groups
        dropped = [prompt for group in groups.values() for prompt in group.dropped] if self.refills else []
        if self.ahead:
            positions = [group.work.prompt.position for group in groups.values()]
            if self.ledger is not None and self._rule.prompts > 1:
                self.ledger.use_prompts([*positions, *(prompt.position for prompt in dropped)])
            self.chosen = self.chosen._replace(positions=self.chosen.positions[len(places) :])
        places = np.array([group.work.prompt.index for group in groups.values()])
        examples = [self._generation.schedule.prompts[place] for place in places.tolist()]
        done = joined_rollout(samples, self.generating, self.mesh.device)
        rows = joined_rows(samples, self.generating, self.mesh.device, sampling.samples)
        rows = self.moved_early(rows, len(places)) if self.early else rows
        return SampledPrompts(examples, places, done, rows, dropped)

    def _ask_for_batch(self, lost: Sequence[int], prompts: Sequence[GroupPrompt]) -> Sequence[int]:
        """Ask for groups of the batch that have not been asked for; returns their numbers on the first rank.

        Args:
          lost: groups that the filter has dropped, whose places are refilled.
          prompts: of the groups; none: the next ones of the order.
        """
        if self.ledger is None or not (lost or prompts):
            return ()
        with self.changed:
            if lost:
                self.ledger.refill(self._places_of(lost))
            return self._ask_places(self.ledger, prompts, AGAIN if lost else ANY_REPLICA)

    def _ask_places(self, ledger: Ledger, prompts: Sequence[GroupPrompt] = (), queue: str = ANY_REPLICA) -> list[int]:
        """Ask for the groups of all places that may begin; returns their numbers."""
        places = self._begin_places(ledger)
        works = self._works(places, prompts or self._prompts_of(ledger, places))
        self._numbers |= {place: work.number for place, work in zip(places, works, strict=True)}
        self._ask(works, queue)
        return [work.number for work in works]

    def _begin_places(self, ledger: Ledger) -> list[int]:
        """Begin the places of the ledger that may begin."""
        places = ledger.next_places(ledger.version, ledger.until)
        ledger.begin(GENERATORS, places, ledger.version)
        return places

    def _prompts_of(self, ledger: Ledger, places: Sequence[int]) -> list[GroupPrompt]:
        """The next prompts of the order, or those that weights have chosen, for places."""
        size = self._rule.places
        if self._rule.prompts > 1:
            positions, self._left = self._left[: len(places)], self._left[len(places) :]
            if count := len(places) - len(positions):
                positions += range(self._positions, self._positions + count)
                self._positions += count
        elif self.weighed:
            chosen = self.chosen.positions.tolist()
            positions = [chosen[place - ledger.version * size] for place in places]
        else:
            positions = [self._first + place for place in places]
        by_batch = self._rule.prompts == 1 and not self.weighed  # with the seeds of a batch that is written at once
        firsts = [p - place % size for p, place in zip(positions, places, strict=True)] if by_batch else positions
        return prompts_at(self._generation.schedule, positions, firsts)

    def _works(self, places: Sequence[int | None], prompts: Sequence[GroupPrompt]) -> list[GroupWork]:
        """Groups of places with prompts, to be written with the newest weights."""
        weights = self.engine.version or 0
        numbers = range(self._asked, self._asked + len(places))
        self._asked += len(places)
        baseline = self.ahead and self._generation.greedy_baseline
        return [GroupWork(*work, weights, baseline) for work in zip(numbers, places, prompts, strict=True)]

    def _ask(self, works: Sequence[GroupWork], queue: str = ANY_REPLICA) -> None:
        """Ask replicas for groups."""
        if not self._fixed:
            self._board.ask(works, queue)
            return
        replicas = self._board.replicas
        ends = [len(works) * replica // replicas for replica in range(replicas + 1)]
        for replica, (begin, end) in enumerate(itertools.pairwise(ends)):
            self._board.ask(works[begin:end], str(replica))

    def _places_of(self, numbers: Iterable[int]) -> list[int]:
        """Places of groups of the step."""
        places = (self._groups[number].work.place for number in numbers)
        return [place for place in places if place is not None]

    def moved_early(self, rows: Rows, prompts: int) -> Rows:
        """Rows on the trainer ranks, shared out by their groups."""
        ranks = self.mesh.size(self.mesh.row_axes)
        return self.move(rows, rows.batch.group.cpu().numpy() * ranks // max(1, prompts), self.mesh)

    def baseline_rows(self, groups: np.ndarray, places: np.ndarray, sampling: Sampling) -> Rows:
        """Rows of the greedy completions or episodes of some groups of the batch; see `RemoteGenerators`."""
        if self.ahead:
            assert self._baselines is not None
            baselines = self._baselines.take(groups)
        else:
            prompts = [GroupPrompt(index, BASELINE_SEED, n) for n, index in enumerate(places.tolist())]
            works = self._works([None] * len(prompts), prompts)
            if self.ledger is not None:
                self._ask(works)
            own, baselines, _ = self._collected([work.number for work in works])
            self._rounds.append((tuple(own), 1))
        self._released += baselines.numbers.tolist()
        rows = joined_rows(baselines, self.generating, self.mesh.device, sampling.samples)
        return self.moved_early(rows, len(places)) if self._rescore is not None else rows

    def keep(self, prompts: np.ndarray) -> None:
        """Note which of the newest groups the filter keeps; see `RemoteGenerators`."""
        kept = {self._newest[place] for place in prompts.tolist()}
        self._lost += [number for number in self._newest if number not in kept]
        if self._rule.scores and self.ledger is not None:
            self.ledger.score(self._places_of(kept))

    def batch_groups(self) -> list[WrittenGroup]:
        """The groups of the newest batch in its order; what the trainer ranks drop is last."""
        lost = frozenset(() if self.refills else self._lost)
        return [self._groups[number] for number in sorted(self._groups, key=lost.__contains__)]

    def samples(self) -> dict[int, ShownSample]:
        """The first samples of the batch, if its groups have some; see `RemoteGenerators`."""
        shown = [(place, x) for place, number in enumerate(self._newest) for x in self._groups[number].shown]
        return dict(shown[:SHOWN_PROMPTS])

    def begin_evaluation(self, step: int) -> Callable[[], dict[str, float]]:
        """Have replicas evaluate the newest weights beside their groups; see `RemoteGenerators`."""
        heldout, _, _, seed, _ = self._generation.evaluation
        prompts = [GroupPrompt(number, seed, number) for number in range(len(heldout))]
        with self.changed:
            works = [work._replace(heldout=True) for work in self._works([None] * len(prompts), prompts)]
            if self.mesh.rank == 0:
                self._ask(works, HELDOUT)
        return lambda: self._evaluated(step, [work.number for work in works])

    def _evaluated(self, step: int, numbers: Sequence[int]) -> dict[str, float]:
        """Metrics of the evaluation after a step, whose completions models score here. Collective.

        Args:
          numbers: of its groups.
        """
        generation = self._generation
        heldout, sampling, *_ = generation.evaluation
        groups, samples, _ = self._collected(numbers, f"the generators' evaluation after step {step}")
        done = joined_rollout(samples, self._alone, self.mesh.device)
        rows = joined_rows(samples, self.generating, self.mesh.device, sampling.samples)
        self._released += numbers
        shown_at = {place: x for place, group in enumerate(groups.values()) for x in group.shown}
        shown = [*shown_at.values()]
        if self._rescore is not None:
            rows = self._rescore(self.moved_early(rows, len(heldout)), heldout, "eval")
            shown = with_scores(shown_at, rows, sampling.samples, generation.rewards.names)
        metrics: dict[str, float] = {}
        if self.mesh.rank == 0:
            texts = {number: text for group in groups.values() for number, text in group.texts.items()}
            written = HeldoutSamples(done, rows, texts, shown)
            metrics = heldout_metrics(for_heldout(generation), written, self.show, step)
        return from_first_rank(metrics, self.mesh)

    def log(self) -> list[tuple[object, ...]] | None:
        """The groups of the newest batch that was written ahead, as a log has them: fields of `LoggedGroup`.

        None: the run without its ranks repeats them.
        """
        if not self._groups or not self.ahead:
            return None
        return [
            (
                group.work.prompt.position,
                group.work.prompt.position - group.work.prompt.number,
                group.generator,
                group.switches,
                sorted(group.tokens.items()),
                group.dropped,
            )
            for group in self.batch_groups()
        ]

    def write_episodes(self, folder: Path) -> int:
        """Have the generator ranks write the episodes of the newest step; returns the bytes. Collective.

        Raises:
          CheckpointError: one of them cannot write.
        """
        request = MethodCall("write_episodes", (str(folder.absolute()), self._rounds))
        return self.requests.ask(request, "the generators' episodes")

    def metrics(self) -> dict[str, float]:
        """Metrics of places, and where groups are written ahead, of the batch and of the weights sent before it."""
        sender = self.engine.sender
        sent = {} if sender is None else dict(sender.policy)
        if sender is not None and sender.remark:
            self.show.note(sender.remark)
            sender.remark = ""
        if not self.ahead:
            return self._counts | sent
        if sender is not None and sender.sent_s:
            sent["sync/hidden_share"] = sender.hidden_share
        groups = self.batch_groups()
        waited = sum(group.waited_s for group in groups) / self._board.replicas
        waits = {"wait/trainer_s": self._waited_s, "wait/generator_s": waited}
        return self._counts | waits | age_metrics([group.tokens for group in groups], self.engine.version or 0) | sent

    def close(self) -> None:
        """End the thread, and wait for the last transfer of weights."""
        self._closed.set()
        if self.engine.sender is not None:
            self.engine.sender.wait()

    def move(self, rows: Rows, to: np.ndarray, mesh: Mesh) -> Rows:
        """`moved`, also for rows of the generator ranks, which let go of the groups that have come. Collective."""
        if rows.mesh.here:
            return moved(rows, to, mesh)
        fields = as_dict(rows.batch)
        own = self._received(rows, fields.pop("origin").cpu().numpy(), to, mesh)
        further = {name: field for name, field in schema_of(rows.batch).items() if name not in FIELDS | ORIGIN}
        batch = declare(type(rows.batch)(**{}), further)._replace(**{**fields, **own})
        moved_rows = rows_of(batch, to, mesh)
        return with_stale(moved_rows, self.engine.version or 0, self._rule.most_age) if "version" in own else moved_rows

    def _received(self, rows: Rows, origins: np.ndarray, to: np.ndarray, mesh: Mesh) -> dict[str, Value]:
        """Fields of the rows that this rank trains, which only ranks of a row know. Collective.

        Args:
          rows: without them.
          origins: [B] of the rows.
          to, mesh: as of `move`.
        """
        with self.changed:
            released, self._released = self._released, []
            unlogged, self._unlogged = self._unlogged, []
        way = rows.lengths, rows.owner, to
        number = self.requests.post(MethodCall("send_groups", (origins, way, released, unlogged)))
        own = receive_rows(*own_fields(rows.batch), Handover(*way, source=rows.mesh, target=mesh))
        self.requests.answer(number, "the generators' rows")
        return own

    def _collected(
        self, numbers: Sequence[int], name: str = ""
    ) -> tuple[dict[int, WrittenGroup], JoinedRows, JoinedRows | None]:
        """Some groups that have ended, or else those of the next batch; shows their remarks. Collective.

        Args:
          numbers: of the groups, on the first rank; none: those of the next batch.
          name: of what is waited for; "": of the rows of the step.

        Returns: the groups by number, in the order of their rows, without these, and with texts on the first rank; rows
          of their samples, and of their greedy completions or episodes, if they have some.

        Raises:
          RewardError: one has failed.
        """
        begin = time.perf_counter()
        name = name or f"the generators' rows of step {self.step}"
        ended = self._awaited_by(lambda: self._complete(numbers), name)
        facts = ended and collect_groups(ended)
        groups = ended and [without_rows(group) for group in ended.values()]
        plain, (samples, baselines) = from_first_rank(
            ended and ([plain_group(group) for group in groups], facts), self.mesh
        )
        groups = groups or [group_of(values) for values in plain]
        self._waited_s += time.perf_counter() - begin
        for note in (note for group in groups for note in group.notes):
            self.show.note(note)
        if samples is None:
            raise RewardError(groups[0].problem or "a group has no rows")
        return {group.work.number: group for group in groups}, samples, baselines

    def _awaited_by(self, look: Callable[[], Any], name: str) -> Any:
        """Wait until `look` gives a result on the first rank; None on the others. Collective.

        The others wait a few seconds at a time, so that no collective takes longer.

        Args:
          name: of what is waited for.
        """
        entered(name)
        limit = ProgressLimit(self.mesh.timeout, name, WORK_KEY)
        result = None
        while not from_first_rank(result is not None, self.mesh):
            if self.mesh.rank == 0:
                result = self._look(look, limit)
            beat()
        left()
        return result

    def _look(self, look: Callable[[], Any], limit: ProgressLimit) -> Any:
        """The result of `look`; None: it has given none for some seconds."""
        end = time.monotonic() + PROGRESS_S

        def results() -> list[Any]:
            with self.changed:
                self._take_deliveries()
                result = look()
            return [result] if result is not None or time.monotonic() > end else []

        return wait_until(results, 1, limit)[0]

    def _complete(self, awaited: Sequence[int]) -> dict[int, WrittenGroup] | None:
        """Groups by number, or one that ends the run; None: some are not written.

        Args:
          awaited: numbers of groups; none: those of the batch.
        """
        if self._failed is not None:
            return {self._failed.work.number: self._failed}
        numbers = awaited
        if self.ledger is not None:
            self.ledger.fill_batch()
            if not awaited and len(self.ledger.batch) == self._rule.places:
                numbers = [self._numbers[place] for place in sorted(self.ledger.batch)]
        if not numbers or len(self._written) < len(numbers) or not self._written.keys() >= set(numbers):
            return None
        return {number: self._written.pop(number) for number in numbers}

    def refill_beside(self) -> None:
        """Refill places while the program does something else, on the first rank; a thread runs it."""
        with beside_the_program():
            while not self._closed.wait(REFILL_S) and self._fault is None:
                with self.changed:
                    try:
                        self._take_deliveries()
                    except BaseException as error:  # raised where the program looks for groups
                        self._fault = error

    def _take_deliveries(self) -> None:
        """Note all groups that replicas have delivered. Under the lock."""
        if self._fault is not None:
            raise self._fault
        while (group := self._board.next_delivery()) is not None:
            place = group.work.place
            if place is not None and group.problem is None and self.ledger is not None:
                self.ledger.deliver(GENERATORS, place, self.ledger.places[place].attempt)
            self._keep_written(group)
            beat()

    def _keep_written(self, group: WrittenGroup) -> bool:
        """Keep a group whose place the ledger knows to be written; False: another prompt refills it. Under the lock."""
        number, place, *_ = group.work
        if place is not None:
            group = in_place_of(self._replaced.pop(place, None), group)
            if self.refills and not group.keeps and self.ledger is not None and self.ledger.refill([place]):
                self._replaced[place] = without_rows(group)
                self._released += [number, baseline_of(number)]
                self._unlogged.append(number)
                self._ask_places(self.ledger, queue=AGAIN)
                return False
        self._written[number] = group
        if group.problem is not None:
            self._failed = self._failed or group
        return True


# Makes a client for an engine through which weights go.
MakeClient = Callable[[RLJob, Any, Generation, Show], GroupGenerators]


def sending_client(
    group: TransferGroup, job: RLJob, engine: RemoteEngine, generation: Generation, show: Show
) -> GroupGenerators:
    """The client of generator ranks, to which weights are sent; with `group`, of `transfer_group`, a `MakeClient`."""
    patches = job.settings.engines.abilities.patches
    engine.sender = WeightSender(engine.requests.mesh, engine.weights.mesh.world, group, patches=patches)
    generators = GroupGenerators(job, engine, generation, show)
    engine.ahead = generators.ahead
    if engine.requests.mesh.rank == 0 and ledger_rule(job, generation).filters:
        threading.Thread(target=generators.refill_beside, name="refills", daemon=True).start()
    return generators


def placed_source(
    job: Job,
    parts: Parts,
    frozen: Mapping[str, trees.Tree],
    clock: Clock,
    show: Show,
    *,
    client: MakeClient,
) -> Source:
    """The source of trainer ranks whose rows others write; with a client a `MakeSource`.

    Args:
      job, parts, frozen, clock, show: as of any source.
      client: makes the client of the others.
    """
    assert isinstance(job, RLJob) and isinstance(parts, GeneratingParts)
    generation = remarked_generation(job, parts, frozen, clock, show)
    generators = client(job, parts.generator.engine, generation, show)
    begin_evaluation = None
    if generators.ahead:
        generation = generation._replace(schedule=as_chosen(generation.schedule))
        if not generators.weighed:  # a curriculum may read its metrics before the next step
            begin_evaluation = lambda step: clock.phase("eval")(generators.begin_evaluation(step))  # noqa: E731
    source = prompt_source(generation._replace(remote=generators), clock, show)
    if job.algorithm.example in SAMPLED_PAIRS:
        source = pair_source(source, job.reward_names)
    next_rows = source.next_rows
    init = source.init
    return source._replace(
        init=lambda: generators.saved(init()),
        next_rows=lambda state, step: generators.take_step(next_rows, state, step, job.settings.run.steps),
        move=generators.move,
        close=generators.close,
        begin_evaluation=begin_evaluation,
        log=StepLog((), None if generation.episodes is None else generators.write_episodes, generators.log),
    )


def needs_tokens(job: RLJob, generation: Generation) -> bool:
    """True if tokens of rows are read before the batch is complete: of pairs, by a filter, beside demonstrations."""
    if job.algorithm.example in SAMPLED_PAIRS or learns_from_demonstrations(job.algorithm):
        return True
    if generation.selection.filter is None:
        return False
    fields = FIELDS | job.algorithm.fields
    read = reads(generation.selection.filter, fields=job.algorithm.fields)
    return any(not fields[name].kind.everywhere for name in read.required | read.optional)
