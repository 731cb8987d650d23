"""Facts of a group that a replica has written, for every rank of the run."""

from __future__ import annotations

from collections.abc import Sequence

from funrl.trainer.placement.group_prompts import GroupWork
from funrl.trainer.placement.messages import WrittenGroup, versions_of, written_rows
from funrl.trainer.sources.generation import Rollout
from funrl.trainer.sources.observing import SHOWN_PROMPTS, ShownSample, shown_samples
from funrl.trainer.sources.source import Generation
from funrl.trainer.steps.step_rows import Rows


def describe_group(
    generation: Generation, written: Sequence[tuple[Rollout, Rows]], group: WrittenGroup
) -> WrittenGroup:
    """Add the facts of what was written to a group.

    Args:
      generation: of the replica.
      written: its samples; and its greedy completion or episode, if it has one.
      group: without rows.
    """
    done, rows = written[0]
    tokens, switches = versions_of(rows)
    if len(written) > 1:
        group = group._replace(baseline=written_rows(*written[1]))
        switches = [*switches, *versions_of(written[1][1])[1]]
    shown = _shown(generation, group.work, done, rows)
    own = written_rows(done, rows)
    return group._replace(written=own, tokens=tokens, switches=switches, shown=shown)


def _shown(generation: Generation, work: GroupWork, done: Rollout, rows: Rows) -> list[ShownSample]:
    """The first sample of a group, if its step shows samples and it is among the first."""
    if work.place is None:
        return []
    batch, place = divmod(work.place, generation.schedule.batch)
    if place >= SHOWN_PROMPTS or not generation.shows(batch + 1):
        return []
    decode = generation.engine.decode
    samples = generation.sampling.samples
    names = generation.rewards.names[: done.scores.shape[1]]  # models reward it where it is trained
    example = generation.schedule.prompts[work.prompt.index]
    return shown_samples(done, rows, [example], samples, decode=decode, names=names)
