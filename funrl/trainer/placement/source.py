"""The source of trainer ranks whose rows generator ranks write.

It is `prompt_source` with another writer: order, seeds, filter and curriculum are its own, so that without staleness a
run whose ranks do both has the same rows. A row's tokens move once, when the batch is complete, from the rank that
wrote it to the rank that trains it; before that trainer ranks know only the row table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from funrl import trees
from funrl.algos.reading import reads
from funrl.fields import FIELDS
from funrl.mesh.pools.transfer import TransferGroup, WeightSender
from funrl.rollout.remote.engine import RemoteEngine
from funrl.trainer.jobs.demonstrations import learns_from_demonstrations
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.jobs.row_source import remarked_generation
from funrl.trainer.placement.groups import GroupGenerators, ledger_rule
from funrl.trainer.sources.curriculum import as_chosen
from funrl.trainer.sources.observing import Show
from funrl.trainer.sources.pair_rows import SAMPLED_PAIRS, pair_source
from funrl.trainer.sources.prompts import prompt_source
from funrl.trainer.sources.source import Generation, Source, StepLog
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.parts import GeneratingParts, Parts

BeginEvaluation = Callable[[int], Callable[[], dict[str, float]]]


def placed_source(
    job: Job,
    parts: Parts,
    frozen: Mapping[str, trees.Tree],
    clock: Clock,
    show: Show,
    *,
    group: TransferGroup = None,
) -> Source:
    """The source of the trainer ranks of a job with a placement; a `MakeSource`.

    Args:
      job, parts, frozen, clock, show: as of any source.
      group: of `transfer_group`.
    """
    assert isinstance(job, RLJob) and isinstance(parts, GeneratingParts)
    generation = remarked_generation(job, parts, frozen, clock, show)
    engine: object = parts.generator.engine
    assert isinstance(engine, RemoteEngine)
    engine.sender = WeightSender(parts.mesh, engine.weights.mesh.world, group)
    generators = GroupGenerators(
        engine,
        show,
        rule=ledger_rule(job, generation),
        generation=generation,
        early=generation.rewards.rescore is not None or needs_tokens(job, generation),
    )
    engine.ahead = generators.ahead
    return source_of_generators(job, generation, generators, clock, show)


def source_of_generators(
    job: RLJob, generation: Generation, generators: GroupGenerators, clock: Clock, show: Show
) -> Source:
    """The source of trainer ranks whose rows others write.

    Args:
      job, clock, show: as of any source.
      generation: of the trainer ranks.
      generators: client of the others.
    """
    begin_evaluation = None
    if generators.ahead:
        generation = generation._replace(schedule=as_chosen(generation.schedule))
        if not generators.weighed:  # a curriculum may read its metrics before the next step
            begin_evaluation = timed_evaluation(generators.begin_evaluation, clock)
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


def timed_evaluation(begin: BeginEvaluation, clock: Clock) -> BeginEvaluation:
    """`Source.begin_evaluation` whose wait for the metrics is of the phase "eval"."""

    def timed(step: int) -> Callable[[], dict[str, float]]:
        wait = begin(step)

        def metrics() -> dict[str, float]:
            with clock.phase("eval"):
                return wait()

        return metrics

    return timed


def needs_tokens(job: RLJob, generation: Generation) -> bool:
    """True if tokens of rows are read before the batch is complete: of pairs, by a filter, beside demonstrations."""
    if job.algorithm.example in SAMPLED_PAIRS or learns_from_demonstrations(job.algorithm):
        return True
    if generation.selection.filter is None:
        return False
    fields = FIELDS | job.algorithm.fields
    read = reads(generation.selection.filter, fields=job.algorithm.fields)
    return any(not fields[name].kind.everywhere for name in read.required | read.optional)
